"""The grouped product on a GPU without a kernel of ours: XLA's, in the better of two forms.

`lax.ragged_dot` is one product, but XLA's GPU compiler gives it a masked copy of all rows for each
group (compiled for H100, jax 0.11.2: bf16[M, G, K] and G times the FLOPs). The loop of reference.py
multiplies each group's own rows, a step at a time. So few rows, as in decoding, take ragged_dot,
and training takes the loop in steps that are large enough for a GPU.

Legend: M rows, G groups, K contracted, N columns.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from pallas_kernels.grouped import reference
from pallas_kernels.hopper import visits

Array = jax.Array
# Rows of a step (chosen, not measured: with 128 rows most products would leave SMs without a tile).
ROWS = 512


def takes_ragged_dot(M: int, G: int) -> bool:
    """Whether ragged_dot multiplies no more rows than the loop does at worst, and can run here.

    On arrays of a mesh with Explicit axes, outside a shard_map, it has no sharding rule (jax 0.11).
    """
    return G * M <= M + G * ROWS and not jax.sharding.get_abstract_mesh().explicit_axes


def product(a_MK: Array, b: Array, sizes_G: Array, *, transpose: bool) -> Array:
    """Returns what reference.product does.

    By ragged_dot, an Inf or NaN in the b of one group makes all rows NaN.
    """
    M, G = a_MK.shape[0], b.shape[0]
    if not takes_ragged_dot(M, G) or not a_MK.size * b.size:
        with _named(M):
            return reference.product(a_MK, b, sizes_G, transpose=transpose, size=ROWS)
    starts_G, ends_G = visits.bounds(sizes_G, M)
    live_M1 = (jnp.arange(M, dtype=jnp.int32) < ends_G[-1])[:, None]
    y_MN = (_ragged_turned if transpose else _ragged)(a_MK, b, ends_G - starts_G)
    return jnp.where(live_M1, y_MN, 0.0).astype(a_MK.dtype)


# One after the other: ragged_dot has no rule for a batch that shares b (jax 0.11).
@sequential_vmap
def _ragged(a_MK: Array, b_GKN: Array, sizes_G: Array) -> Array:
    return lax.ragged_dot(a_MK, b_GKN, sizes_G, preferred_element_type=jnp.float32)


@sequential_vmap
def _ragged_turned(a_MK: Array, b_GNK: Array, sizes_G: Array) -> Array:
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(a_MK, b_GNK, sizes_G, dims, preferred_element_type=jnp.float32)


def weights(a_MK: Array, b_MN: Array, sizes_G: Array) -> Array:
    """Returns reference.weights, by the loop: a masked copy would carry NaN from group to group."""
    with _named(a_MK.shape[0]):
        return reference.weights(a_MK, b_MN, sizes_G, size=ROWS)


def _named(M: int) -> contextlib.AbstractContextManager:
    """Writes into the program's names how many steps the loop has if groups hold all rows."""
    return jax.named_scope(f"grouped_steps_{-(-M // ROWS)}")
