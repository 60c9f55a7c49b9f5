"""Estimates the sparsity from which a pruned weight makes a matrix product faster.

All times are ESTIMATES, from a card's peaks and the assumed efficiencies of cost/roofline.py. They
are computed before anything is pruned or measured. Tile-Wise sparsity (arXiv 2008.13006) prunes
columns of a weight and rows in tiles of the other columns, so that its kernel multiplies dense
tiles. The kept columns are padded to whole tiles and the kept rows to whole chunks, and the kernel
reaches only a `share` of the dense kernel's rate. Pruning saves time if it saves more arithmetic
than that. The pattern TEW also keeps single elements, which need one more product; that is not
counted here.

Legend: M rows (tokens), K contracted, N columns.
"""

import dataclasses
import math
from collections.abc import Iterable

from megajax.core.hardware import DeviceCard
from megajax.cost.base import Op, Stack
from megajax.cost.kernels import TileSparse
from megajax.cost.roofline import Roofline

SHARE = 0.8  # (assumed: the goal of at most 1.25 times the dense time where nothing is pruned)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """y (M, N) = x (M, K) w (K, N)."""

    name: str
    M: int
    K: int
    N: int


@dataclasses.dataclass(frozen=True)
class SparseCost:
    """The machine and the sparse kernel for which times are estimated.

    tile, chunk: kept columns and kept rows are padded to multiples of these. share: the sparse
    kernel's rate over the dense kernel's, 0..1. squared: whether columns and rows are pruned alike
    (tw2d), or rows alone (tw1d).
    """

    card: DeviceCard
    dtype: str = "bfloat16"
    tile: int = 128
    chunk: int = 64
    share: float = SHARE
    squared: bool = True
    roofline: Roofline = Roofline()

    def dense_time(self, gemm: Gemm, backward: bool = False) -> float:
        """Returns estimated seconds of the dense product, or of its two backward ones."""
        return self._times(gemm, gemm.K * gemm.N, 1.0, backward)

    def sparse_time(self, gemm: Gemm, density: float, backward: bool = False) -> float:
        """Returns estimated seconds with this fraction of the weights kept, in (0, 1]."""
        return self._times(gemm, self.stored(gemm, density), self.share, backward)

    def stored(self, gemm: Gemm, density: float) -> int:
        """Returns how many entries of the weight are multiplied, padding included."""
        side = math.sqrt(density) if self.squared else 1.0
        columns = _round_up(side * gemm.N, self.tile)
        return columns * _round_up(density / side * gemm.K, self.chunk)

    def break_even(self, gemm: Gemm, backward: bool = False) -> float | None:
        """Returns the largest density at which the sparse product is estimated as fast as the dense
        one, to 0.1 %; None: at none."""
        dense = self.dense_time(gemm, backward)
        paying = [
            d / 1000 for d in range(1, 1001) if self.sparse_time(gemm, d / 1000, backward) <= dense
        ]
        return max(paying, default=None)

    def _times(self, gemm: Gemm, weights: int, share: float, backward: bool) -> float:
        products = 2 if backward else 1  # dX reads dy and w, dW reads x and dy: as much each
        kernel = TileSparse(gemm.M, gemm.K, gemm.N, weights)
        model = dataclasses.replace(self.roofline, matmul=share * self.roofline.matmul)
        return products * model.op_time(Op("input", kernel), self.card, self.dtype)[0]


def table(
    cost: SparseCost, gemms: Iterable[Gemm], sparsities: Iterable[float] = (0.5, 0.75, 0.9)
) -> list[dict[str, str | int | float | None]]:
    """Returns a row for each product, all of it estimates: the dense time, the sparsity from which
    pruning pays in the forward product and in the backward ones (None: never), the gain at each."""
    rows = []
    for gemm in gemms:
        dense = cost.dense_time(gemm)
        row: dict[str, str | int | float | None] = {
            "product": gemm.name,
            "M": gemm.M,
            "K": gemm.K,
            "N": gemm.N,
            "dense us (estimate)": dense * 1e6,
        }
        for what, backward in (("forward", False), ("backward", True)):
            density = cost.break_even(gemm, backward)
            row[f"{what} pays from sparsity (estimate)"] = None if density is None else 1 - density
        for sparsity in sparsities:
            gain = dense / cost.sparse_time(gemm, 1 - sparsity)
            row[f"gain at {sparsity:.0%} (estimate)"] = gain
        rows.append(row)
    return rows


def decoder_gemms(stack: Stack, tokens: int) -> list[Gemm]:
    """Returns the products of one layer of a decoder whose weights can be pruned, for so many
    tokens; of routed experts none."""
    D, F = stack.width, stack.hidden
    asked, stored = stack.heads * stack.head_width, stack.kv_heads * stack.head_width
    gemms = [
        Gemm("query", tokens, D, asked),
        Gemm("key", tokens, D, stored),
        Gemm("value", tokens, D, stored),
        Gemm("out", tokens, asked, D),
    ]
    if F:
        gemms += [Gemm("gate", tokens, D, F)] * stack.gated
        gemms += [Gemm("up", tokens, D, F), Gemm("down", tokens, F, D)]
    return gemms


def _round_up(x: float, step: int) -> int:
    return max(math.ceil(x / step - 1e-9), 1) * step
