"""Named shapes of tile-sparse products for tests, reports and benchmarks.

The products of BERT that Tile-Wise Sparsity times (arXiv 2008.13006, section 7; 12800 rows), and
one of a large model. Which chunks a tile keeps is drawn at random, so that every tile differs.
FLOPs and bytes are of kept chunks only; bytes count every operand and result once.

Legend: M rows, K contracted, N columns, T tiles, C chunks.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from pallas_kernels.cases import Workload
from pallas_kernels.tile_sparse.format import Pattern, pattern_of, together

ROWS = 12800  # of x: 100 sequences of 128 tokens
SPARSITIES = (0, 50, 75, 90)  # per cent
SHAPES = ((768, 768), (768, 3072), (3072, 768), (4096, 16384))


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """One product of 16-bit operands. sparsity: per cent of weights that are pruned.

    columns: the share of columns that are kept, spread evenly, so that they are gathered; in those,
    chunks are pruned until the sparsity is reached.
    """

    M: int
    K: int
    N: int
    sparsity: float
    columns: float = 1.0
    tile: int = 128
    chunk: int = 64

    @property
    def name(self) -> str:
        """The name of the case in reports."""
        words = f"{self.K}x{self.N} {self.sparsity:g}%"
        words += f" {self.tile}x{self.chunk}" * ((self.tile, self.chunk) != (128, 64))
        return words + " gathered" * (self.columns < 1)

    @property
    def kept_columns(self) -> np.ndarray:
        """The numbers of the columns that are kept, evenly spread."""
        return np.unique(np.arange(round(self.N * self.columns)) / self.columns // 1).astype(int)

    @property
    def kept_CT(self) -> np.ndarray:
        """The chunks that are kept, bool (C, T), of kept columns in tiles; the same each time."""
        T, C = -(-self.kept_columns.size // self.tile), -(-self.K // self.chunk)
        live = np.zeros(C * T, bool)
        share = (1 - self.sparsity / 100) / self.columns
        live[: round(C * T * share)] = True
        return np.random.default_rng(0).permutation(live).reshape(C, T)

    @property
    def mask(self) -> np.ndarray:
        """The weights that are kept, bool (K, N)."""
        blocks = np.repeat(np.repeat(self.kept_CT, self.chunk, 0), self.tile, 1)
        mask = np.zeros((self.K, self.N), bool)
        mask[:, self.kept_columns] = blocks[: self.K, : self.kept_columns.size]
        return mask

    @property
    def abstract(self) -> Pattern:
        """The pattern with abstract arrays, which is all that keys and heuristics need."""
        (C, T), each = self.kept_CT.shape, together(self.chunk)
        S = max(int((-(-self.kept_CT.sum(0) // each)).sum()), 1) * each
        sizes = {
            "chunks": S,
            "tiles": S,
            "tile_starts": T + 1,
            "by_chunk": S,
            "chunk_starts": C + 1,
            "tile_order": T,
            "chunk_order": C,
            "columns": T * self.tile,
            "places": self.N,
        }
        arrays: dict[str, Any] = {k: jax.ShapeDtypeStruct((n,), "int32") for k, n in sizes.items()}
        arrays["kept"] = jax.ShapeDtypeStruct((S, self.tile * self.chunk // 8), "uint8")
        arrays |= {"rows_R": None, "columns_R": None}
        form = {"shape": (self.K, self.N), "tile": self.tile, "chunk": self.chunk}
        return Pattern(**arrays, **form, gathered=self.columns < 1)

    def flops(self, backward: bool = False) -> float:
        """Returns the FLOPs of the forward product, or of the two backward ones."""
        slots = int(self.kept_CT.sum())
        return 2 * self.M * slots * self.chunk * self.tile * (2 if backward else 1)

    def bytes(self, backward: bool = False) -> float:
        """Forward: x, w, y; backward: x, w, dy, dx, dw. Of x what a tile keeps, of dy what is."""
        live_CT = self.kept_CT
        x = self.M * min(int(live_CT.any(1).sum()) * self.chunk, self.K)
        dy = self.M * min(int(live_CT.any(0).sum()) * self.tile, self.N)
        w = int(live_CT.sum()) * self.chunk * self.tile
        if backward:
            return 2 * (x + 2 * w + dy + self.M * self.K)
        return 2 * (x + w + self.M * self.N)


@functools.lru_cache(maxsize=2)
def pattern(case: Case) -> Pattern:
    """Returns the pattern of a case's mask, as arrays even while a caller is being traced."""
    with jax.ensure_compile_time_eval():
        return pattern_of(case.mask, np.zeros_like(case.mask), case.tile, case.chunk)


CASES = (
    *(Case(ROWS, K, N, sparsity) for K, N in SHAPES for sparsity in SPARSITIES),
    Case(ROWS, 768, 3072, 75, columns=0.5),
    Case(ROWS, 768, 3072, 75, chunk=32),
    Case(ROWS, 768, 3072, 75, chunk=8),
    Case(ROWS, 4096, 16384, 75, tile=256),
)
