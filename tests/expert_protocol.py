"""The experts' protocols on Pallas' TPU interpreter, on the kernels' own tables.

As tests/collective_protocol.py, whose peer and mutants these are: one device a rank, the flag of a
copy is the semaphore that its arrival counts up. A job's rows are copies of their own, so a flag
counts rows here and a wait takes them all away, once: what was waited for is remembered. Tiles read
their own rows only, where the kernel also loads its neighbours' and drops them.
"""

import contextlib
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as state
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.expert import tables
from pallas_kernels.expert.routes import route
from pallas_kernels.expert.tables import (
    FAR,
    FLAG,
    FLAGS,
    GROUP,
    HI,
    JOBS,
    LO,
    NEAR,
    PAIRS,
    PEER,
    ROWS,
    VISITS,
)  # fmt: skip
from tests.collective_protocol import TpuPeer, dot
from tests.expert_oracle import order

R, T, A, E, K, D = 4, 4, 2, 2, 8, 256  # ranks; tokens, choices; experts of a rank; depth, columns
S, N, CHUNK, BLOCK, WIDE = T * A, R * T * A, 4, 8, 128
EACH = -(-S // CHUNK)  # flags of a source
COPIES = 2 * (N + R * CHUNK)  # of a rank, at most


class RowPeer(TpuPeer):
    """A rank that sends rows as a table of jobs says."""

    def __init__(self, jobs, count, sent, flags, early, mutant):
        """jobs: the table, of which `count` are live."""
        super().__init__(sent, flags, early, mutant)
        self.jobs, self.count = jobs, count

    def _each(self, do):
        @pl.loop(0, self.count)
        def _(n):
            @pl.loop(0, self.jobs[n, ROWS])
            def _(r):
                read, written = (self.jobs[n, PAIRS + 2 * r + i] for i in (0, 1))
                if self.mutant == "swapped slot":
                    written = written ^ 1
                do(n, n * CHUNK + r, self.jobs[n, PEER], self.jobs[n, FLAG], read, written)

    def send(self, source, target, first=0, flag_of=lambda flag: flag):
        """Copies source(row read) to target(row written) of each job's peer."""

        def start(n, number, to, flag, read, written):
            flag = flag_of(flag)
            self._copy(source(read), target(written), to, first + number, flag).start()
            if self.mutant == "early signal":
                pl.semaphore_signal(
                    self.early.at[flag], device_id=(to,), device_id_type=pl.DeviceIdType.MESH
                )

        self._each(start)

    def left(self, source, target, first=0):
        """Until what `send` sends has left this rank."""

        def wait(n, number, to, flag, read, written):
            self._copy(source(read), target(written), self.rank(), first + number, 0).wait_send()

        if self.mutant != "no final drain":
            self._each(wait)


def dispatch(*refs, mutant):
    """As dispatch_gemm: own rows first, then the others'; visits wait for the jobs of their rows.

    counts: rows that come from each distance.
    """
    x, w, visits, jobs, totals, counts, y, rows, seen, sent, flags, early = refs
    peers = RowPeer(jobs, totals[JOBS], sent, flags, early, mutant)
    source, target = (lambda row: x.at[pl.ds(row, 1)]), (lambda row: rows.at[pl.ds(row, 1)])
    seen[...] = jnp.zeros(seen.shape, jnp.int32)
    y[...] = jnp.zeros(y.shape, jnp.float32)
    peers.send(source, target)

    @pl.loop(0, totals[VISITS])
    def _(v):
        @pl.loop(visits[v, NEAR], visits[v, FAR])
        def _(distance):
            at = FLAGS + 2 * distance

            @pl.loop(visits[v, at], visits[v, at + 1])
            def _(flag):
                came = jnp.minimum(counts[0, distance] - (flag - distance * EACH) * CHUNK, CHUNK)

                @pl.when(seen[0, flag] == 0)
                def _():
                    seen[0, flag] = 1
                    pl.loop(0, came)(lambda _: peers.wait(rows.at[pl.ds(0, 1)], flag))

        @pl.loop(visits[v, LO], visits[v, HI])
        def _(n):
            y[pl.ds(n, 1)] = dot(rows[pl.ds(n, 1)], w[visits[v, GROUP]])

    peers.left(source, target)


def combine(*refs, mutant):
    """As gemm_combine: a block of columns of all experts, then its rows leave; sums at the end."""
    h, w, visits, jobs, totals, places, weights, y, page, sent, flags, early = refs
    peers = RowPeer(jobs, totals[JOBS], sent, flags, early, mutant)
    blocks = [pl.ds(b * WIDE, WIDE) for b in range(D // WIDE)]

    def piece(b):
        return lambda row: page.at[pl.ds(row, 1), blocks[b]]

    for b, columns in enumerate(blocks):

        @pl.loop(0, totals[VISITS])
        def _(v, columns=columns):
            @pl.loop(visits[v, LO], visits[v, HI])
            def _(n):
                found = dot(h[pl.ds(n, 1)], w[visits[v, GROUP], :, columns])
                page[pl.ds(S + n, 1), columns] = found

        peers.send(piece(b), piece(b), b * COPIES // 2, lambda _, b=b: b)
    for b, columns in enumerate(blocks):
        # Rows, of which totals counts the jobs on the GPU.
        came = (places[...] >= 0).sum() - (places[...] >= S).sum()
        pl.loop(0, came)(lambda _, b=b: peers.wait(piece(b)(0), b))
        for t in range(T):
            total = jnp.zeros((1, WIDE), jnp.float32)
            for a in range(A):
                place = places[t, a]
                answer = page[pl.ds(jnp.maximum(place, 0), 1), columns]
                total += jnp.where(place < 0, 0.0, weights[t, a] * answer)
            y[pl.ds(t, 1), columns] = total
    for b in range(len(blocks)):
        peers.left(piece(b), piece(b), b * COPIES // 2)


def want(name, x, w, experts, weights):
    """What the protocols compute, by loops."""
    y = np.zeros((R * (N if name == "dispatch" else T), D), np.float32)
    for rank in range(R):
        for n, (source, t, a) in enumerate(order(experts, R, E, rank)):
            token = source * T + t
            expert = w[experts[token, a]]
            if name == "dispatch":
                y[rank * N + n] = x[token] @ expert
            else:
                y[token] += weights[token, a] * (x[rank * N + n] @ expert)
    return y


PROTOCOLS = {"dispatch": dispatch, "combine": combine}


def faults(name: str, mode: str, mutant: str | None, experts: np.ndarray, seed: int) -> set[str]:
    """As collective_protocol.faults. experts: (R T, A), everyone's choices."""
    body = PROTOCOLS[name]
    # Pallas knows a kernel by its function, so every run has one of its own.
    own = types.FunctionType(body.__code__, body.__globals__, f"{name}_{mutant}")
    own.__kwdefaults__ = {"mutant": mutant}
    first = name == "dispatch"
    kernel = pl.pallas_call(
        own,
        out_shape=jax.ShapeDtypeStruct((N, D) if first else (T, D), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((N, K) if first else (S + N, D), jnp.float32),
            *([pltpu.VMEM((1, R * EACH), jnp.int32)] if first else []),
            pltpu.SemaphoreType.DMA((COPIES,)),
            pltpu.SemaphoreType.DMA((R * EACH,)),
            pltpu.SemaphoreType.REGULAR((R * EACH,)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=0),
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode),
    )

    def run(x, w, experts, weights):
        routes = route(experts, experts=E, axis="x")
        make = tables.dispatch if first else tables.combine
        work = make(routes, chunk=CHUNK, block=BLOCK)
        arrays = work.visits_VW, work.jobs_CW, work.totals
        if first:
            distances = (routes.rank + jnp.arange(R)) % R
            return kernel(x, w, *arrays, routes.counts_RE.sum(1)[distances][None])
        return kernel(x, w, *arrays, tables.places(routes), weights)

    random = np.random.default_rng(seed)
    x = random.integers(-3, 4, (R * (T if first else N), K)).astype(np.float32)
    w = random.integers(-3, 4, (R * E, K, D)).astype(np.float32)
    weights = random.integers(-2, 3, (R * T, A)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:R]), ("x",))
    step = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    state.reset_tpu_interpret_mode_state()
    with contextlib.redirect_stdout(io.StringIO()) as said:  # the interpreter only prints these
        y = np.asarray(step(x, w, experts, weights))
    wrong = {
        "result": not np.array_equal(y, want(name, x, w, experts, weights)),
        "race": state.races is not None and state.races.races_found,
        "semaphore": "non-zero count" in said.getvalue(),
    }
    state.reset_tpu_interpret_mode_state()
    return {fault for fault, found in wrong.items() if found}
