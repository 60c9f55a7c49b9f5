"""Collective matmuls as rings of permutes, each beside one chunk's product: overlap by XLA alone.

XLA gives a product that waits for a gather, or a scatter that waits for a product, nothing to run
beside the collective. Cut into one chunk a rank, each step's permute has a chunk's product as
company. XLA's scheduler would still issue several permutes early and leave them exposed, so each
step is locked: a barrier lets nothing of the next step begin before the permute and the product of
this one are done (compiled for H100: every permute is in flight over exactly one product).

Both functions are for code inside a shard_map over `axis`; nothing here is differentiable, which is
parallel/collective_matmul.py's business. Source: looped collective einsum (Wang et al., ASPLOS
2023), the medium-grained overlap that Flux (arXiv 2406.06858) section 2 compares with.

Legend: R ranks of the axis, N columns; arrays are (..., rows, columns), rows are cut.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Arrays = tuple[Array, ...]

# Rings of more ranks turn in a loop: written out, the program and the time to compile it grow with
# the ranks (chosen: one NVLink node of 8).
UNROLLED = 8


def compiler_options(both_ways: bool) -> dict[str, Any]:
    """Returns what to compile a GPU program of rings with: jax.jit(compiler_options=...).

    XLA flies one permute at a time unless told. Rings of one direction need nothing: the locks keep
    the products of two steps apart, which else takes xla_gpu_dot_merger_threshold_mb=0.
    """
    return {"xla_gpu_experimental_parallel_collective_overlap_limit": 2} if both_ways else {}


def all_gather(x: Array, work: Callable[[Array], Arrays], axis: str, both_ways: bool) -> Arrays:
    """Returns work(x of all ranks, one below the other), chunk by chunk, own chunk first.

    work: (..., chunk, K) -> arrays (..., chunk, N), row by row. both_ways: half of each chunk goes
    up the ring and half down, where there are rows for it.
    """
    R, rank, m = lax.axis_size(axis), lax.axis_index(axis), x.shape[-2]
    if R == 1:
        return work(x)
    cuts = _cuts(m, both_ways)

    def step(s: int | Array, state: tuple[Arrays, Arrays], last: bool = False) -> tuple:
        chunks, outs = state
        coming = chunks if last else tuple(map(hop(axis), chunks, (-1, 1)))
        found = work(jnp.concatenate(chunks, -2))
        outs = outs or tuple(lax.empty((*y.shape[:-2], R * m, y.shape[-1]), y.dtype) for y in found)
        for (first, size), direction in zip(cuts, (1, -1), strict=False):
            row = (rank + direction * s) % R * m + first
            pieces = (lax.slice_in_dim(y, first, first + size, axis=-2) for y in found)
            outs = tuple(map(lambda o, y: _put(o, y, row), outs, pieces))  # noqa: B023
        return lax.optimization_barrier((coming, outs))

    state = step(0, (tuple(_rows(x, *cut) for cut in cuts), ()))
    return step(R - 1, turn(R - 1, step, state), last=True)[1]


def reduce_scatter(
    xs: Arrays, work: Callable[..., Array], axis: str, both_ways: bool, acc_dtype: jnp.dtype
) -> Array:
    """Returns this rank's rows of the sum over ranks of work(*xs), own chunk last, in float32.

    Args: xs: (..., R chunk, K) each. work: their rows (..., chunk, K) -> float32 (..., chunk, N).
      both_ways: half of each chunk's rows travels up the ring and half down. acc_dtype: of what
      travels.
    """
    R, rank, m = lax.axis_size(axis), lax.axis_index(axis), xs[0].shape[-2] // lax.axis_size(axis)
    if R == 1:
        return work(*xs)
    cuts = _cuts(m, both_ways)

    def rows(x: Array, s: int | Array) -> Array:
        """Returns the rows of the chunks whose sums still travel R - 1 - s hops to their owners."""
        owners = ((rank - s - 1) % R, (rank + s + 1) % R)
        pieces = ((o * m + first, n) for o, (first, n) in zip(owners, cuts, strict=False))
        return jnp.concatenate([_rows(x, *piece) for piece in pieces], -2)

    def step(s: int | Array, state: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        total, xs = state
        leaving = (_rows(total.astype(acc_dtype), *cut) for cut in cuts)
        coming = tuple(map(hop(axis), leaving, (1, -1)))
        part = work(*(rows(x, s) for x in xs))
        # xs too: were they outside, XLA would join the products of two steps into one.
        coming, part, xs = lax.optimization_barrier((coming, part, xs))
        return jnp.concatenate(coming, -2).astype(part.dtype) + part, xs

    state = lax.optimization_barrier((work(*(rows(x, 0) for x in xs)), xs))
    return turn(R, step, state)[0]


def turn[State](end: int, step: Callable[[int, State], State], state: State) -> State:
    """Steps 1 to end - 1."""
    if end > UNROLLED:
        return lax.fori_loop(1, end, step, state)
    for s in range(1, end):
        state = step(s, state)
    return state


def _cuts(m: int, both_ways: bool) -> list[tuple[int, int]]:
    """Returns (first row, rows) of what goes each way; one row goes one way."""
    half = (m + 1) // 2 if both_ways else m
    return [(0, half), (half, m - half)] if half < m else [(0, m)]


def hop(axis: str | tuple[str, ...]) -> Callable[[Array, int], Array]:
    """Returns (array, by how many ranks it moves) -> what comes from the neighbour.

    axis: one, or several in any order, the last fastest; `ppermute` takes the mesh's order only.
    """
    names = (axis,) if isinstance(axis, str) else axis
    mesh, R = jax.sharding.get_abstract_mesh(), lax.axis_size(axis)
    sorted_ = tuple(sorted(names, key=mesh.axis_names.index))
    places = np.arange(R).reshape([mesh.shape[name] for name in sorted_])
    place_R = places.transpose([sorted_.index(name) for name in names]).ravel().tolist()

    def move(x: Array, by: int) -> Array:
        pairs = [(place_R[r], place_R[(r + by) % R]) for r in range(R)]
        return lax.ppermute(x, sorted_, pairs)

    return move


def _rows(x: Array, first: int | Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, first, size, axis=x.ndim - 2)


def _put(out: Array, y: Array, first: int | Array) -> Array:
    return lax.dynamic_update_slice_in_dim(out, y, first, axis=out.ndim - 2)
