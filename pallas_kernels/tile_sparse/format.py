"""Tile-wise sparse weights: dense tiles of the weights that a mask keeps, and their places.

Tile-Wise Sparsity (arXiv 2008.13006, section 4): columns that are pruned as a whole vanish, the
others are gathered from left to right into tiles of equal width, and each tile keeps rows of its
own. Here rows are kept in chunks of `chunk` aligned rows, which one copy by TMA can fetch; chunk 1
is the paper's. A slot is one chunk of one tile, a dense block; slots of a tile follow each other,
where chunks have 8 or 16 rows from multiples of 64 rows on, with empty slots between.
All integers are data: a new mask that fits the same capacity runs the same compiled program.

    w (K, N)    . a . a b b      packed columns  a a a | b b .     T tiles of `tile` columns
    chunk 0     . x . x . .      tile 0: chunks 0, 1               slots 0, 1
    chunk 1     . x . x x x      tile 1: chunk 1                   slot 2

Legend: M rows, K contracted, N columns, P packed columns (T tiles of `tile`), C chunks of K, S
slots, R elements of the residual.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import arguments

OP = "tile_sparse_matmul"
Array = jax.Array


class Capacity(NamedTuple):
    """What is static of a pattern, beside its sizes: a mask that fits it needs no new program.

    tiles, slots, residual: how many there may be. gathered: whether columns are, into tiles of kept
    ones; else tile t has the columns t * tile onwards, and its result is where it belongs.
    """

    tiles: int
    slots: int
    residual: int
    gathered: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pattern:
    """The places of a weight's slots. Integer data; dead slots have the chunk C.

    chunks, tiles: int32 (S,), of a slot. tile_starts: int32 (T+1,), a tile's first slot.
    by_chunk: int32 (S,), slots by chunk, then tile. chunk_starts: int32 (C+1,), into by_chunk.
    tile_order, chunk_order: int32 (T,), (C,), those with most slots first. columns: int32 (P,), the
    column of a packed one, N for none. places: int32 (N,), the inverse, P for none. kept: uint8 (S,
    chunk * tile / 8), bits of the mask inside slots. rows_R, columns_R: int32 (R,), of the
    residual's elements; K for none. Where R is 0 they are None: Orbax stores no empty array.
    shape: (K, N). tile, chunk, gathered: static.
    """

    chunks: Array
    tiles: Array
    tile_starts: Array
    by_chunk: Array
    chunk_starts: Array
    tile_order: Array
    chunk_order: Array
    columns: Array
    places: Array
    kept: Array
    rows_R: Array | None
    columns_R: Array | None
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    tile: int = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})
    gathered: bool = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> Capacity:
        """Static."""
        R = 0 if self.rows_R is None else self.rows_R.size
        return Capacity(self.tile_order.size, self.chunks.size, R, self.gathered)

    @property
    def grid(self) -> tuple[int, int]:
        """(C, T), static."""
        return self.chunk_order.size, self.tile_order.size

    @property
    def together(self) -> int:
        """Slots of 64 rows, which the kernels multiply at once; static."""
        return together(self.chunk)

    @property
    def unit(self) -> int:
        """Rows of those slots together; static."""
        return self.chunk * self.together

    @property
    def kept_Skn(self) -> Array:
        """bool (S, chunk, tile): the mask inside slots."""
        size = self.chunk * self.tile
        bit = jnp.arange(8, dtype=jnp.uint8).reshape(1, 1, 8)
        bits = ((self.kept[..., None] >> bit) & 1).reshape(
            self.kept.shape[0], 8 * self.kept.shape[1]
        )[:, :size]
        return (bits > 0).reshape(self.kept.shape[0], self.chunk, self.tile)

    def spread(self, values_Skn: Array) -> Array:
        """(C * chunk, P): the slots where they belong, 0 elsewhere."""
        (C, T), k, n = self.grid, self.chunk, self.tile
        blocks = jnp.zeros((C, k, T, n), values_Skn.dtype)
        blocks = blocks.at[self.chunks, :, self.tiles].set(
            values_Skn, mode="drop", unique_indices=True
        )
        return blocks.reshape(C * k, T * n)

    def collect(self, dense_KP: Array) -> Array:
        """The inverse of spread: (S, chunk, tile) of (K, P), 0 where the mask does not keep."""
        (C, T), k, n = self.grid, self.chunk, self.tile
        blocks = jnp.pad(dense_KP, ((0, C * k - dense_KP.shape[0]), (0, 0))).reshape(C, k, T, n)
        slots_Skn = blocks.at[self.chunks, :, self.tiles].get(mode="fill", fill_value=0)
        return jnp.where(self.kept_Skn, slots_Skn, 0)

    def pack_columns(self, x_xN: Array) -> Array:
        """x_xP: of each packed column its column, 0 for none."""
        if not self.gathered:
            P = self.columns.size
            return jnp.pad(x_xN, [(0, 0)] * (x_xN.ndim - 1) + [(0, P - x_xN.shape[-1])])
        return jnp.take(x_xN, self.columns, axis=-1, mode="fill", fill_value=0)

    def unpack_columns(self, x_xP: Array) -> Array:
        """x_xN: the inverse, 0 for columns that are pruned."""
        if not self.gathered:
            return x_xP[..., : self.shape[1]]
        return _unpack_columns(x_xP, self)


@jax.custom_vjp
def _unpack_columns(x_xP: Array, pattern: Pattern) -> Array:
    return jnp.take(x_xP, pattern.places, axis=-1, mode="fill", fill_value=0)


# Its own rule would scatter.
_unpack_columns.defvjp(
    lambda x_xP, pattern: (_unpack_columns(x_xP, pattern), pattern),
    lambda pattern, dx_xN: (pattern.pack_columns(dx_xN), None),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileSparse:
    """A weight (K, N) of which tiles are kept: a pytree with one differentiable leaf.

    jax.grad refuses the integer leaves: differentiate by `values` (values_of in api.py).

    values: (S + S', chunk, tile), floating: S slots, dense blocks with exact 0 where the mask does
    not keep; the last S' hold the values of the residual's elements, one after the other, so that
    optimizers and checkpoints see one array. Gradients are 0 where nothing is kept. pattern: where
    they belong, integers.
    """

    values: Array
    pattern: Pattern

    @classmethod
    def from_dense(
        cls,
        w_KN: Array,
        mask_KN: Any,
        *,
        tile: int = 128,
        chunk: int = 64,
        residual_mask_KN: Any = None,
        capacity: Capacity | None = None,
    ) -> "TileSparse":
        """Packs the weights that a mask keeps; the others, even NaN, are not read.

        Args:
          w_KN: floating. mask_KN: bool, concrete, true where a weight is kept.
          tile, chunk: columns and rows of a slot. A slot is stored if the mask keeps any of it, so
            masks that keep whole chunks of whole tiles are stored best. The Hopper kernels take
            tiles of 64 to 256 columns and chunks of 8, 16, 32 or 64 rows.
          residual_mask_KN: bool, single elements that are kept besides (TEW, section 4.3), none of
            which the mask keeps.
          capacity: that of an earlier weight; a program compiled for that one takes this one too.
            None: what this mask needs; columns are gathered where that stores fewer slots.
        Raises: ValueError for shapes and types that break the above, masks that overlap, and a
          capacity that is too small.
        """
        op = "TileSparse.from_dense"
        arguments.check_arrays(op, w=w_KN)
        mask = _mask("mask", w_KN, mask_KN)
        tile, chunk = (
            arguments.integer(op, "tile", tile, 1),
            arguments.integer(op, "chunk", chunk, 1),
        )
        residual = np.zeros_like(mask)
        if residual_mask_KN is not None:
            residual = _mask("residual_mask", w_KN, residual_mask_KN)
        if (mask & residual).any():
            both = int((mask & residual).sum())
            raise ValueError(f"{both} weights are kept by the mask and by the residual mask")
        pattern = pattern_of(mask, residual, tile, chunk, capacity)
        return cls(_values(jnp.asarray(w_KN), pattern), pattern)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.pattern.shape

    @property
    def dtype(self) -> Any:
        """The data type of the values."""
        return self.values.dtype

    @property
    def capacity(self) -> Capacity:
        """Static: what a new mask may need without a new program."""
        return self.pattern.capacity

    @property
    def density(self) -> float:
        """Weights that are kept, over all; of a concrete weight."""
        tiles = int(jax.lax.population_count(self.pattern.kept).astype(jnp.int32).sum())
        rows_R = self.pattern.rows_R
        residual = 0 if rows_R is None else int((rows_R < self.shape[0]).sum())
        return (tiles + residual) / max(self.shape[0] * self.shape[1], 1)

    @property
    def stored(self) -> float:
        """Entries of slots, which are all multiplied, over all weights; of a concrete weight."""
        entries = int(self.pattern.tile_starts[-1]) * self.pattern.chunk * self.pattern.tile
        return entries / max(self.shape[0] * self.shape[1], 1)

    @property
    def slots(self) -> Array:
        """(S, chunk, tile): the values without the residual's."""
        return self.values[: self.capacity.slots]

    @property
    def residual(self) -> Array:
        """(R,): the residual's values."""
        return self.values[self.capacity.slots :].reshape(-1)[: self.capacity.residual]

    def residual_dense(self) -> Array:
        """(K, N): the residual's elements, 0 elsewhere."""
        empty, at = jnp.zeros(self.shape, self.dtype), (self.pattern.rows_R, self.pattern.columns_R)
        if not self.capacity.residual:
            return empty
        return empty.at[at].set(self.residual, mode="drop", unique_indices=True)

    def to_dense(self) -> Array:
        """(K, N), 0 where nothing is kept."""
        dense_KN = self.pattern.unpack_columns(self.pattern.spread(self.slots)[: self.shape[0]])
        return dense_KN + self.residual_dense() if self.capacity.residual else dense_KN

    def replace(self, *, values: Array) -> "TileSparse":
        """The same pattern with other values.

        Raises: ValueError where their shape differs.
        """
        arguments.check_arrays("TileSparse.replace", values=values)
        if values.shape != self.values.shape:
            raise ValueError(
                f"TileSparse.replace: values {values.shape} must have the shape {self.values.shape}"
            )
        return TileSparse(values, self.pattern)


def together(chunk: int) -> int:
    """Returns how many slots make one step: chunks below 64 rows are multiplied together."""
    return 64 // chunk if chunk in (8, 16) else 1


def fold(mask_KN: Any, columns: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, list, list]:
    """Puts kept columns before pruned ones, in the next layer's rows as well.

    The network computes the same, and no column needs to be put back: after this `from_dense` finds
    every column where it belongs. For a layer whose result only the next one reads, element by
    element in between (the two products of an MLP).
    Args: columns: arrays (..., N), as the weight. rows: arrays (N, ...), as the bias and the next
      layer's weight and mask.
    Returns: (mask_KN, columns, rows), each with its order of N.
    """
    order = np.argsort(~np.asarray(mask_KN, bool).any(0), kind="stable")
    return np.asarray(mask_KN)[:, order], [x[..., order] for x in columns], [x[order] for x in rows]


def _mask(name: str, w_KN: Array, mask_KN: Any) -> np.ndarray:
    if isinstance(mask_KN, jax.core.Tracer):
        raise ValueError(
            f"{name} must be known when the function is traced, got {mask_KN}; call from_dense "
            "outside of jax.jit and pass the TileSparse"
        )
    mask = np.asarray(mask_KN)
    if w_KN.ndim != 2 or mask.shape != w_KN.shape or mask.dtype != bool:
        raise ValueError(
            f"weight {w_KN.shape} and {name} {mask.dtype}{mask.shape} must be (K, N), and the mask "
            "bool"
        )
    if not jnp.issubdtype(w_KN.dtype, jnp.floating):
        raise ValueError(f"weight {w_KN.dtype} must be floating")
    return mask


def _blocks(mask: np.ndarray, columns: np.ndarray, tile: int, chunk: int) -> np.ndarray:
    """bool (C, chunk, T, tile): the mask of packed columns."""
    K, N = mask.shape
    C = -(-K // chunk)
    padded = np.zeros((C * chunk, N + 1), bool)
    padded[:K, :N] = mask
    return padded[:, columns].reshape(C, chunk, -1, tile)


def _in_tiles(columns: np.ndarray, tile: int, N: int, tiles: int | None = None) -> np.ndarray:
    """Columns as whole tiles, with N for none; one tile where there are no columns."""
    count = max(-(-columns.size // tile), 1) if tiles is None else tiles
    return np.concatenate([columns, np.full(count * tile - columns.size, N, columns.dtype)])


def _layout(mask: np.ndarray, tile: int, chunk: int, capacity: Capacity | None) -> np.ndarray:
    """Packed columns."""
    N = mask.shape[1]
    live, every = np.flatnonzero(mask.any(0)), np.arange(N)
    if capacity is not None and capacity.gathered:
        needed = -(-live.size // tile)
        if needed > capacity.tiles:
            raise ValueError(f"the mask needs {needed} tiles, {capacity} has {capacity.tiles}")
        return _in_tiles(live, tile, N, capacity.tiles)
    in_place = _in_tiles(every, tile, N)
    if capacity is not None:
        if in_place.size != capacity.tiles * tile:
            raise ValueError(f"{capacity} must have {in_place.size // tile} tiles")
        return in_place
    gathered = _in_tiles(live, tile, N)

    def slots(columns: np.ndarray) -> int:
        return int(_blocks(mask, columns, tile, chunk).any((1, 3)).sum())

    return gathered if slots(gathered) < slots(in_place) else in_place


def pattern_of(
    mask: np.ndarray,
    residual: np.ndarray,
    tile: int,
    chunk: int,
    capacity: Capacity | None = None,
) -> Pattern:
    """Returns the places of the slots of masks (K, N); see TileSparse.from_dense."""
    K, N = mask.shape
    columns = _layout(mask, tile, chunk, capacity)
    blocks = _blocks(mask, columns, tile, chunk)
    C, _, T, _ = blocks.shape
    tiles, chunks = np.nonzero(blocks.any((1, 3)).T)
    rows_R, columns_R = np.nonzero(residual)
    live, by_chunk = (np.bincount(x, minlength=n) for x, n in ((tiles, T), (chunks, C)))
    by_tile = -(-live // together(chunk)) * together(chunk)
    # Where each slot is: in its tile, one after the other.
    at = _starts(by_tile)[tiles] + np.arange(tiles.size) - _starts(live)[tiles]
    in_place = np.array_equal(columns[:N], np.arange(N)[: columns.size]) and columns.size >= N
    needed, least = int(by_tile.sum()), together(chunk)
    capacity = capacity or Capacity(T, max(needed, least), rows_R.size, not in_place)
    capacity = capacity._replace(slots=-(-capacity.slots // least) * least)
    if needed > capacity.slots or rows_R.size > capacity.residual:
        raise ValueError(
            f"the mask needs slots={needed} and residual={rows_R.size}, more than {capacity}"
        )
    mask_slots = np.zeros((capacity.slots, chunk * tile), bool)
    mask_slots[at] = blocks[chunks, :, tiles].reshape(-1, chunk * tile)
    places = np.full(N + 1, T * tile)
    places[columns] = np.arange(T * tile)
    fields = {
        "chunks": np.full(capacity.slots, C),
        "tiles": np.zeros(capacity.slots),
        "tile_starts": _starts(by_tile),
        "by_chunk": _filled(at[np.lexsort((tiles, chunks))], capacity.slots, 0),
        "chunk_starts": _starts(by_chunk),
        "tile_order": np.argsort(-by_tile, kind="stable"),
        "chunk_order": np.argsort(-by_chunk, kind="stable"),
        "columns": columns,
        "places": places[:N],
    }
    fields["chunks"][at], fields["tiles"][at] = chunks, tiles
    arrays: dict[str, Any] = {name: jnp.asarray(x, jnp.int32) for name, x in fields.items()}
    for name, x, none in (("rows_R", rows_R, K), ("columns_R", columns_R, 0)):
        filled = _filled(x, capacity.residual, none)
        arrays[name] = jnp.asarray(filled, jnp.int32) if filled.size else None
    bits = jnp.asarray(np.packbits(mask_slots, axis=1, bitorder="little"))
    return Pattern(
        **arrays, kept=bits, shape=(K, N), tile=tile, chunk=chunk, gathered=capacity.gathered
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


def _filled(x: np.ndarray, size: int, value: int) -> np.ndarray:
    """Returns x, filled with `value` up to a size."""
    return np.concatenate([x, np.full(size - x.size, value, x.dtype)])


@jax.jit
def _values(w_KN: Array, pattern: Pattern) -> Array:
    """The slots, then the residual's elements in whole slots."""
    slots_Skn = pattern.collect(pattern.pack_columns(w_KN))
    R, size = pattern.capacity.residual, pattern.chunk * pattern.tile
    if not R:
        return slots_Skn
    elements_R = w_KN.at[pattern.rows_R, pattern.columns_R].get(mode="fill", fill_value=0)
    elements = jnp.pad(elements_R, (0, -R % size)).reshape(-1, pattern.chunk, pattern.tile)
    return jnp.concatenate([slots_Skn, elements])
