"""The fused kernels' protocols on Pallas' TPU interpreter: who waits, copies and signals, and when.

The Mosaic GPU interpreter knows no semaphores and no peers, the TPU's does, with vector clocks over
devices. So the three protocols are written a second time, on the same tables (schedule.py) and with
the same flags, one device a rank. What differs: a TPU only pushes, so a device serves the pulls
that its peers would make; the flag of a copy is the semaphore that its arrival counts up, and a
wait takes the count away, so that what is left at the end is a fault as well. Thread blocks, TMA's
own view of memory and stores that are seen in part are not modelled.

`mutant` plants one of MUTANTS, each of which must be found.
"""

import contextlib
import functools
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as state
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.collective import schedule

MUTANTS = ("dropped wait", "early signal", "swapped slot", "no final drain")
R, ROWS, K, N = 4, 16, 8, 128  # ranks; rows of one, columns of x, of w
SPLIT = schedule.Split(R * ROWS, R, tile=8, chunk=8)
CHUNK = SPLIT.chunk


class TpuPeer:
    """A device of the interpreter as a rank; copies count flags of the device that they go to."""

    def __init__(self, sent, flags, early, mutant):
        """sent: a semaphore a copy. flags: one a flag. early: as many, for the mutant."""
        self.sent, self.flags, self.early, self.mutant = sent, flags, early, mutant
        self.copies = []

    def rank(self):
        return lax.axis_index("x")

    def _copy(self, source, target, to, number, flag):
        return pltpu.make_async_remote_copy(
            source, target, self.sent.at[number], self.flags.at[flag], device_id=(to,),
            device_id_type=pl.DeviceIdType.MESH,
        )  # fmt: skip

    def copy(self, source, target, to, number, flag):
        """Starts copy `number`, whose arrival raises `flag` of rank `to`."""
        self._copy(source, target, to, number, flag).start()
        self.copies.append((source, target, number, flag))
        if self.mutant == "early signal":
            pl.semaphore_signal(
                self.early.at[flag], device_id=(to,), device_id_type=pl.DeviceIdType.MESH
            )

    def wait(self, like, flag):
        """Until the copy of `like` that raises an own flag has arrived."""
        if self.mutant == "early signal":
            pl.semaphore_wait(self.early.at[flag])
        elif self.mutant != "dropped wait":
            self._copy(like, like, self.rank(), 0, flag).wait_recv()

    def drain(self):
        """Until what this rank sends has left it: nobody reads its memory any more."""
        if self.mutant != "no final drain":
            for source, target, number, flag in self.copies:
                self._copy(source, target, self.rank(), number, flag).wait_send()


def dot(x, w):
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def gather(x, w, y, gathered, sent, flags, early, *, mutant):
    """As all_gather_gemm: tiles wait for the chunk of their rows, which its rank's peers serve."""
    peers = TpuPeer(sent, flags, early, mutant)
    rank = peers.rank()
    for i in range((R - 1) * SPLIT.chunks):
        puller = (rank + R - 1 - i // SPLIT.chunks) % R
        chunk = schedule.gather_chunk(i, puller, SPLIT)  # of whose rows I am the owner
        slot = (rank + 1) % R if mutant == "swapped slot" else rank
        rows = pl.ds(chunk.row, CHUNK)
        peers.copy(x.at[rows], gathered.at[slot, rows], puller, i, chunk.flag)
    for i in range(R * SPLIT.row_tiles):
        tile = schedule.gather_tile(i, rank, SPLIT, columns=1)
        rows = pl.ds(tile.row, SPLIT.tile)
        if i < SPLIT.row_tiles:
            y[tile.peer, rows] = dot(x[rows], w[...])
        else:
            peers.wait(gathered.at[tile.peer, rows], tile.first_flag)
            y[tile.peer, rows] = dot(gathered[tile.peer, rows], w[...])
    peers.drain()


def scatter(x, w, y, inbox, outbox, sent, flags, early, *, mutant):
    """As gemm_reduce_scatter: a chunk leaves after its tiles, its owner adds up rank 0's first."""
    peers = TpuPeer(sent, flags, early, mutant)
    rank = peers.rank()
    for i in range(R * SPLIT.row_tiles):
        tile = schedule.scatter_tile(i, rank, SPLIT, columns=1)
        rows = pl.ds(tile.row, SPLIT.tile)
        part = dot(x[pl.ds(tile.peer * ROWS + tile.row, SPLIT.tile)], w[...])
        if i >= (R - 1) * SPLIT.row_tiles:
            inbox[rank, rows] = part
            continue
        outbox[tile.peer, rows] = part
        chunk = schedule.scatter_chunk(i, rank, SPLIT, columns=1)  # a tile's rows are a chunk's
        slot = (rank + 1) % R if mutant == "swapped slot" else rank
        flag = rank * SPLIT.chunks + chunk.flag % SPLIT.chunks
        peers.copy(outbox.at[chunk.peer, rows], inbox.at[slot, rows], chunk.peer, i, flag)
    for c in range(SPLIT.chunks):
        rows = pl.ds(c * CHUNK, CHUNK)
        for distance in range(1, R):
            source = (rank + distance) % R
            peers.wait(inbox.at[source, rows], source * SPLIT.chunks + c)
        y[rows] = functools.reduce(jnp.add, [inbox[source, rows] for source in range(R)])
    peers.drain()


def reduce(x, w, y, inbox, sent, flags, early, *, mutant):
    """As gemm_all_reduce: a tile goes to all ranks, each adds up rank 0's first."""
    peers = TpuPeer(sent, flags, early, mutant)
    rank = peers.rank()
    tiles = ROWS // SPLIT.tile
    for i in range(tiles):
        rows = pl.ds(i * SPLIT.tile, SPLIT.tile)
        inbox[rank, rows] = dot(x[rows], w[...])
        for distance in range(1, R):
            to = (rank + distance) % R
            slot = (rank + 1) % R if mutant == "swapped slot" else rank
            number = i * (R - 1) + distance - 1
            peers.copy(inbox.at[rank, rows], inbox.at[slot, rows], to, number, rank * tiles + i)
    for i in range(tiles):
        rows = pl.ds(i * SPLIT.tile, SPLIT.tile)
        for distance in range(1, R):
            source = (rank + distance) % R
            peers.wait(inbox.at[source, rows], source * tiles + i)
        y[rows] = functools.reduce(jnp.add, [inbox[source, rows] for source in range(R)])
    peers.drain()


# Of each: the body; what of x, w and y a rank has; the shape of its y; its buffers.
PROTOCOLS = {
    "gather": (gather, (P("x"), P(None, "x"), P(None, None, "x")), (R, ROWS, N), [(R, ROWS, K)]),
    "scatter": (scatter, (P(None, "x"), P("x"), P("x")), (ROWS, N), [(R, ROWS, N)] * 2),
    "reduce": (reduce, (P(None, "x"), P("x"), P("x")), (ROWS, N), [(R, ROWS, N)]),
}


def faults(name: str, mode: str, mutant: str | None, seed: int) -> set[str]:
    """Runs a protocol; returns what is wrong with it: 'result', 'race', 'semaphore'.

    mode: 'on_wait', a copy happens when it is waited for, or 'eager', at once, or in between: races
    are found by clocks. Values are small integers, so that sums are exact in any order.
    """
    body, (x_spec, w_spec, y_spec), y_shape, buffers = PROTOCOLS[name]
    # Pallas knows a kernel by its function, so every run has one of its own.
    own = types.FunctionType(body.__code__, body.__globals__, f"{name}_{mutant}")
    own.__kwdefaults__ = {"mutant": mutant}
    kernel = pl.pallas_call(
        own,
        out_shape=jax.ShapeDtypeStruct(y_shape, jnp.float32),
        scratch_shapes=[
            *(pltpu.VMEM(shape, jnp.float32) for shape in buffers),
            pltpu.SemaphoreType.DMA((R * R * SPLIT.chunks,)),
            pltpu.SemaphoreType.DMA((R * SPLIT.chunks,)),
            pltpu.SemaphoreType.REGULAR((R * SPLIT.chunks,)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=0),
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode),
    )
    mesh = Mesh(np.array(jax.devices()[:R]), ("x",))
    random = np.random.default_rng(seed)
    rows = ROWS if name == "reduce" else R * ROWS
    x, w = (
        random.integers(-3, 4, shape).astype(np.float32)
        for shape in ((rows, K if name == "gather" else R * K),
                      (K, R * N) if name == "gather" else (R * K, N))
    )  # fmt: skip
    want = x @ w
    step = jax.jit(
        jax.shard_map(
            kernel, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=False
        )
    )
    state.reset_tpu_interpret_mode_state()
    with contextlib.redirect_stdout(io.StringIO()) as said:  # the interpreter only prints these
        y = np.asarray(step(x, w))
    want = np.tile(want, (R, 1)) if name == "reduce" else want
    wrong = {
        "result": not np.array_equal(y.reshape(want.shape), want),
        "race": state.races is not None and state.races.races_found,
        "semaphore": "non-zero count" in said.getvalue(),
    }
    state.reset_tpu_interpret_mode_state()
    return {fault for fault, found in wrong.items() if found}
