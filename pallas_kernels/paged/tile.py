"""The tiles of the paged kernels: what fits, the heuristic, and what a tuning table measured.

A call takes the tile of the nearest row of a tuning table (tuned.py) if that tile fits the call,
else the heuristic's.

Legend: as hopper.py.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.attention.ranges import FARTHEST, Window
from pallas_kernels.hopper import tiles as limits
from pallas_kernels.hopper.cards import ROWS
from pallas_kernels.hopper.memory import PIECE, up
from pallas_kernels.paged.reference import Pages

OP = "paged_attention"
WIDTHS = (64, 96, 128, 256)
REDUCTIONS = 2048  # bytes that Mosaic adds for them (read in its lowering)
SMALL_WIDTHS = (64, 128)  # of pages of 8 bits: registers for their scales
PART = 64  # columns of a piece that is converted, or set to 0, at a time: whole swizzles
PAGES = (8, 16, 32, 64, 128)  # that TMA copies: whole rows of a tiling


@dataclasses.dataclass(frozen=True)
class Tile:
    """tokens: Q. keys: C, of a step. stages: steps in flight."""

    tokens: int
    keys: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static of a call, but for the tile.

    heads: G. group: R. page_dtype: the pages' type. left: keys of a window before a token's own.
    """

    heads: int
    group: int
    width: int
    page: int
    dtype: Any
    page_dtype: Any
    left: int | None = None

    @property
    def most(self) -> int:
        """The most rows of a tile: those of two warpgroups, or of one where registers are few."""
        return ROWS if self.width > 128 else 2 * ROWS

    @property
    def small(self) -> bool:
        """Whether pages have scales."""
        return jnp.dtype(self.page_dtype).itemsize == 1

    def rows(self, tile: Tile) -> int:
        """Returns E: the rows of whole warpgroups, but fewer for small tiles."""
        rows = up(tile.tokens * self.group, PIECE)
        return rows if rows <= ROWS else 2 * ROWS

    def warpgroups(self, tile: Tile) -> int:
        """Returns the number of warpgroups that compute."""
        return pl.cdiv(self.rows(tile), ROWS)

    def pieces(self, tile: Tile) -> tuple[int, int]:
        """Returns (copies of keys in a step, tokens of each copy)."""
        size = min(self.page, tile.keys)
        return tile.keys // size, size


def shape_of(q_THK: jax.Array, pages: Pages, window: Window | None = None) -> Shape:
    """Returns the shape of a call."""
    (_, H, K), (_, N, G, _) = q_THK.shape, pages.k.shape
    left = window[0] if window is not None else None
    left = left if left is not None and left < FARTHEST else None
    return Shape(G, H // G, K, N, q_THK.dtype, pages.k.dtype, left)


def misfits(shape: Shape) -> list[str]:
    """Returns why the kernel cannot take it, empty when it can."""
    reasons = []
    if jnp.dtype(shape.dtype).name not in ("bfloat16", "float16"):
        reasons.append(f"needs bfloat16 or float16 queries, found {jnp.dtype(shape.dtype).name}")
    elif shape.page_dtype != shape.dtype and not shape.small:
        reasons.append(
            f"needs pages of q's type or of 8 bits, found {jnp.dtype(shape.page_dtype).name}"
        )
    widths = SMALL_WIDTHS if shape.small else WIDTHS
    if shape.width not in widths:
        pages = " with pages of 8 bits" if shape.small else ""
        named = ", ".join(map(str, widths))
        reasons.append(f"needs a head width of {named}{pages}, found {shape.width}")
    if shape.page not in PAGES:
        reasons.append(f"needs pages of {', '.join(map(str, PAGES))} tokens, found {shape.page}")
    if shape.group > shape.most:
        reasons.append(
            f"needs at most {shape.most} query heads of a key-value head, found {shape.group}"
        )
    return reasons


def heuristic(shape: Shape, tokens: int, segments: int) -> Tile:
    """Returns the tile if nothing was measured.

    One token where all segments may decode, else as many as there are rows for. tokens, segments:
    T and B.
    """
    most = max(shape.most // shape.group, 1)
    few = shape.width > 128 or shape.small  # registers: of sums, of scales
    rows = 1 if tokens <= segments else min(most, tokens)
    return fitted(Tile(rows, 64 if few else 128, 8), shape)


def fitted(tile: Tile, shape: Shape) -> Tile:
    """Returns the same tile with no more stages than fit."""
    return dataclasses.replace(
        tile,
        stages=limits.fitted(
            engine_tile(tile, shape),
            lambda t: buffers(dataclasses.replace(tile, stages=t.stages), shape),
        ).stages,
    )


def engine_tile(tile: Tile, shape: Shape) -> limits.Tile:
    """Returns the tile as the engine describes it."""
    warpgroups = shape.warpgroups(tile)
    return limits.Tile(
        ROWS * warpgroups, tile.keys, shape.width, tile.stages, warpgroups=warpgroups
    )


def buffers(tile: Tile, shape: Shape) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The shared memory of a thread block, that of Mosaic's reductions included."""
    W, K, C = shape.warpgroups(tile), shape.width, tile.keys
    ring = ((tile.stages, C, K), shape.page_dtype)
    shared: dict[str, tuple[tuple[int, ...], Any]] = {
        "q_smem": ((W, ROWS, K), shape.dtype),
        "k_smem": ring,
        "v_smem": ring,
        "sums_smem": ((W, 1, ROWS, 32), jnp.float32),
        "lse_smem": ((W, ROWS), jnp.float32),
        "p_smem": ((W,), jnp.int32),
        "reductions": ((REDUCTIONS,), jnp.int8),
    }
    if shape.small:
        shared |= {name: ((C, K), shape.dtype) for name in ("wide_k_smem", "wide_v_smem")}
        shared |= {f"{x}_scale_smem": ((tile.stages, C), jnp.float32) for x in "kv"}
    return shared


def check(tile: Tile, shape: Shape) -> None:
    """Raises: ValueError for a tile that the hardware does not take."""
    limits.check_multiple(OP, "keys", tile.keys, 64, 128)
    limits.check_multiple(OP, "stages", tile.stages, 1)
    if not 1 <= tile.tokens * shape.group <= shape.most:
        raise ValueError(
            f"{OP}: tokens={tile.tokens} of {shape.group} heads must be 1 to {shape.most} rows; "
            f"nearest: {max(shape.most // shape.group, 1)}"
        )
    limits.check_shared(OP, buffers(tile, shape))
    warpgroups = shape.warpgroups(tile)
    limits.check_registers(OP, warpgroups, (ROWS, shape.width), (ROWS, tile.keys))


def key(shape: Shape, tokens: int, segments: int, room: int) -> dict[str, Any]:
    """Returns the key of a table's row (tuned.py). tokens: T. segments: B. room: its positions.

    Contexts, window and sinks are data. The width is a word: a kernel of another head width is
    another program.
    """
    return {
        "dtype": jnp.dtype(shape.dtype).name,
        "pages": jnp.dtype(shape.page_dtype).name,
        "width": str(shape.width),
        "group": shape.group,
        "heads": shape.heads,
        "page": shape.page,
        "tokens": tokens,
        "segments": segments,
        "room": room,
    }


def choose(q_THK: jax.Array, pages: Pages) -> tuple[dict | None, Tile]:
    """Returns (the row for `dispatch.choose`, the kernel's tile).

    A row's tile that does not fit here (the nearest row may be of another group) is passed over.
    """
    shape, (B, M) = shape_of(q_THK, pages), pages.table_BM.shape
    row = tuned.find(OP, key(shape, q_THK.shape[0], B, M * shape.page))
    measured = tuned.tile(row)
    if measured and _legal(tile := Tile(**measured), shape):
        return row, tile
    return row, heuristic(shape, q_THK.shape[0], B)


def candidates(shape: Shape, tokens: int, segments: int) -> list[Tile]:
    """Returns the heuristic's tile, then those of other rows and keys, with the stages that fit."""
    first = heuristic(shape, tokens, segments)
    half = max(64 // shape.group, 1)  # one warpgroup's rows
    tiles = [first]
    for rows, keys in itertools.product({first.tokens, min(half, tokens)}, (128, 64)):
        tile = fitted(Tile(rows, keys, 8), shape)
        tiles += [tile] if _legal(tile, shape) else []
    return list(dict.fromkeys(tiles))


def _legal(tile: Tile, shape: Shape) -> bool:
    try:
        check(tile, shape)
    except ValueError:
        return False
    return True


def few_rows(width: int) -> Any:
    """Returns the layout of (8, width) in the registers of a warpgroup; width: a multiple of 32.

    A warp has two rows, half a warp each, and a thread neighbours that are a vector.
    """
    vector = 4 if width % 64 == 0 else 2
    columns = 16 * vector
    tiling = plgpu.Tiling(((PIECE, columns), (2, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
