"""Thread blocks that only copy: pieces of contiguous rows, through a ring of buffers.

They are bulk copies without a descriptor, so that a peer may be any traced number:

    loads         piece q + slots - STORING is on its way while piece q is stored
    a chunk's end all its stores done (waited for) | finish: the flag
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.memory import Int

RING_BYTES = 32 * 1024  # of a piece, at most (chosen: six on their way hide 2 us at 100 GB/s)
STORING = 2  # pieces whose stores may still be read from the ring


def piece_shape(width: int, itemsize: int) -> tuple[int, int]:
    """Returns (rows, columns) of the contiguous piece that one copy moves; width: a row's columns.

    Rows divide 8, and so every chunk's rows; where a row is too long, its columns are divided.
    """
    for rows in (8, 4, 2, 1):
        if rows * width * itemsize <= RING_BYTES:
            return rows, width
    most = RING_BYTES // itemsize
    return 1, next(n for n in range(most - most % 64, 0, -64) if width % n == 0)


def scratch(width: int, dtype: Any, most: int) -> tuple[tuple[Any], Any]:
    """Returns (a ring of pieces,) in at most `most` bytes of shared memory, and its barriers."""
    piece = piece_shape(width, jnp.dtype(dtype).itemsize)
    slots = min(16, most // tiles.shared_bytes({"piece": (piece, dtype)}))
    return (plgpu.SMEM((slots, *piece), dtype),), plgpu.Barrier(num_barriers=slots)


def relay(
    ring: Any,
    arrived: Any,
    total: Int,
    pieces: Int,
    *,
    source: Callable[[Int], Any],
    target: Callable[[Int], Any],
    pace: Callable[[Int], None],
    finish: Callable[[Int], None],
    live: Callable[[Int], Any] = lambda q: q >= 0,
) -> None:
    """A warpgroup copies pieces 0 .. total - 1, `pieces` a chunk, from source(q) to target(q).

    pace(q): before piece q is stored. finish(n): after all of chunk n is stored. live(q): false
    for pieces past a chunk's rows, which come last in it.
    """
    slots = ring.shape[0]
    ahead = slots - STORING

    def fetch(q):
        @pl.when((q < total) & live(q))
        def _():
            slot = lax.rem(q, jnp.int32(slots))
            plgpu.copy_gmem_to_smem(
                source(q),
                ring.at[slot],
                arrived.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    pl.loop(0, ahead)(fetch)

    @pl.loop(0, total)
    def _(q):
        @pl.when(live(q))
        def _():
            slot = lax.rem(q, jnp.int32(slots))
            plgpu.barrier_wait(arrived.at[slot])
            pace(q)
            plgpu.copy_smem_to_gmem(ring.at[slot], target(q))

        @pl.when(lax.rem(q, pieces) == pieces - 1)
        def _():
            plgpu.wait_smem_to_gmem(0)
            finish(lax.div(q, pieces))

        # The slot that is filled now was stored from STORING pieces ago; a dead piece has no store
        # that would count as one of them.
        plgpu.wait_smem_to_gmem(STORING, wait_read_only=True)
        pl.when(~live(q))(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        fetch(q + ahead)
