"""Tiles of numbers through a thread block: copied in, changed in registers, copied out.

A thread block is one warpgroup; a few share an SM, and each takes every n-th tile through a ring of
slots in shared memory:

    wait ready[s] | start the copies of the tile `stages` - 1 ahead | slot -> registers -> one of
    two places | start the copies of that place out | wait until the other place was read out

`commit_smem` and `wait_smem_to_gmem` are barriers of the block: what a tile's slot held was read by
all threads before the copies of a later tile into it start, and a place was read out before it is
written again. No thread reads what it wrote, so Pallas' own barriers are off.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.memory import share

PLACES = 2  # for results on their way out
INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
Int = Any  # traced int32


def stream(
    total: int,
    blocks: int,
    stages: int,
    ready: Any,
    fetch: Callable[[Int, Int], None],
    compute: Callable[[Int, Int, Int], None],
    send: Callable[[Int, Int], None],
) -> None:
    """Runs this block's tiles, of `total` in all.

    fetch(tile, slot): starts the copies into a slot, which arrive at ready.at[slot].
    compute(tile, slot, place): reads the slot, writes the place. send(tile, place): starts the
    copies out, without `commit_group`.
    """
    block = lax.axis_index("block")
    steps = share(total, block, blocks)

    def start(i: Int) -> None:
        fetch(block + i * blocks, lax.rem(i, jnp.int32(stages)))

    for i in range(stages - 1):
        pl.when(i < steps)(lambda i=i: start(jnp.int32(i)))

    @pl.loop(0, steps)
    def _(i):
        tile, slot, place = block + i * blocks, lax.rem(i, jnp.int32(stages)), lax.rem(i, PLACES)
        plgpu.barrier_wait(ready.at[slot])
        pl.when(i + stages - 1 < steps)(lambda: start(i + stages - 1))
        compute(tile, slot, place)
        plgpu.commit_smem()
        send(tile, place)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(PLACES - 1, wait_read_only=True)

    plgpu.wait_smem_to_gmem(0)
