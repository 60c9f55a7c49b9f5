"""The fused kernels on the emulated GPU of kernel_run.py: small, and exact to the last bit.

Values are small integers, or those times a power of two, so that every product is exact. `run(case,
seed)` raises Fault for a broken rule and AssertionError for a wrong result.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.collective.all_gather_gemm import all_gather, all_gather_gemm
from pallas_kernels.collective.gemm_all_reduce import gemm_all_reduce
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.expert import product, tables
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.gemm_combine import gemm_combine
from pallas_kernels.expert.product import height
from pallas_kernels.expert.routes import route
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.fused import Fusion
from pallas_kernels.hopper.peers import RemotePeer
from pallas_kernels.hopper.tiles import Tile
from tests.expert_oracle import order, routings
from tests.kernel_calls import Call
from tests.kernel_run import Gpu

SPEC = Spec(None, "float32")
NOTHING = "it makes no difference"


def small_integers(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Small integers."""
    return random.integers(-3, 4, shape).astype(np.float32)


def gather(gpu, random, ranks=3, rows=72, cluster=1, warpgroups=1, comm=1, keep=False):
    """Two weights, tiles and chunks that end with a rank's rows; chunks that are no whole tiles."""
    R, K, widths = ranks, 128, (64, 128)
    x, bias = small_integers(random, R, 1, rows, K), small_integers(random, 1, sum(widths))
    ws = [small_integers(random, R, 1, K, N) for N in widths]
    fusion = Fusion(Tile(64 * warpgroups, 64, 64, 3, warpgroups, cluster), comm * cluster, 40)
    results = gpu.run(*(
        functools.partial(
            all_gather_gemm, x[r], tuple(w[r] for w in ws), bias, rows=rows, keep=keep,
            peers=RemotePeer(R, gpu.axis), fusion=fusion, spec=SPEC, blocks=(comm + 2) * cluster,
        )
        for r in range(R)
    ))  # fmt: skip
    for r, (ys, gathered) in enumerate(results):
        for w, y, b in zip(ws, ys, np.split(bias[0], np.cumsum(widths)[:-1]), strict=True):
            np.testing.assert_array_equal(y, x[:, 0] @ w[r, 0] + b)
        there = [source for source in range(R) if keep or source != r]
        np.testing.assert_array_equal(gathered[there], x[there, 0])


def copies(gpu, random, ranks=3, rows=64, comm=1):
    """The gather's communication alone, in a ring of few slots; chunks with two pieces too many."""
    x = small_integers(random, ranks, 1, rows, 1024)
    peers = RemotePeer(ranks, gpu.axis)
    results = gpu.run(
        *(
            functools.partial(all_gather, x[r], peers=peers, comm=comm, chunk=40)
            for r in range(ranks)
        )
    )
    for r, gathered in enumerate(results):
        there = [source for source in range(ranks) if source != r]
        np.testing.assert_array_equal(gathered[there], x[there, 0])


def ordered(parts: np.ndarray, *more: np.ndarray) -> np.ndarray:
    """Sums in float32, those of rank 0 first; rank 1's are so large that the order matters."""
    return functools.reduce(np.add, [*parts, *more])


def large(ranks: int) -> np.ndarray:
    """Factors of the ranks' values."""
    return np.where(np.arange(ranks) == 1, np.float32(2**22), np.float32(1))


def scatter(
    gpu,
    random,
    ranks=3,
    rows=72,
    cluster=1,
    warpgroups=1,
    comm=1,
    depths=(64, 128),
    N=128,
    chunk=40,
):
    """Two products by transposed weights, added; bias and residual."""
    R = ranks
    xs = [small_integers(random, R, R, rows, K) * large(R)[:, None, None, None] for K in depths]
    ws = [small_integers(random, R, 1, N, K) for K in depths]
    bias, residual = small_integers(random, 1, N), small_integers(random, R, 1, rows, N)
    tile = Tile(64 * warpgroups, N // 2, 64, 2, warpgroups, cluster)
    fusion = Fusion(tile, comm * cluster, chunk)
    results = gpu.run(*(
        functools.partial(
            gemm_reduce_scatter, tuple(x[r] for x in xs), tuple(w[r] for w in ws), bias,
            residual[r], rows=rows, peers=RemotePeer(R, gpu.axis), fusion=fusion, spec=SPEC,
            turned=True, blocks=(comm + 2) * cluster,
        )
        for r in range(R)
    ))  # fmt: skip
    parts = sum(np.einsum("spmk,snk->spmn", x, w[:, 0]) for x, w in zip(xs, ws, strict=True))
    for r, (y, *_) in enumerate(results):
        np.testing.assert_array_equal(y[0], ordered(parts[:, r], bias, residual[r, 0]))


def reduce(gpu, random, ranks=3, rows=72, cluster=1, warpgroups=1):
    """More tiles than blocks, of which one ends with the rows."""
    R, K, N = ranks, 128, 256
    x, w = small_integers(random, R, 1, rows, K), small_integers(random, R, 1, K, N)
    x *= large(R)[:, None, None, None]
    bias, residual = small_integers(random, 1, N), small_integers(random, 1, rows, N)
    fusion = Fusion(Tile(64 * warpgroups, 128, 64, 3, warpgroups, cluster), 0, 8)
    results = gpu.run(*(
        functools.partial(
            gemm_all_reduce, x[r], w[r], bias, residual, rows=rows,
            peers=RemotePeer(R, gpu.axis), fusion=fusion, spec=SPEC, blocks=2 * cluster,
        )
        for r in range(R)
    ))  # fmt: skip
    want = ordered(x[:, 0] @ w[:, 0], bias, residual[0])
    for y in results:
        np.testing.assert_array_equal(y[0], want)


TOKENS, CHOICES, EXPERTS, CHUNK = 48, 2, 2, 32  # of a rank


@functools.cache
def _tables(cluster: int, warpgroups: int) -> Callable[..., Any]:
    def made(experts):
        routes = route(experts, experts=EXPERTS, axis="x")
        block = 64 * cluster * warpgroups
        return (
            tables.dispatch(routes, chunk=CHUNK, block=block),
            tables.combine(routes, chunk=CHUNK, block=block),
            tables.places(routes),
        )

    return jax.jit(jax.vmap(made, axis_name="x"))


def _routed(random, R, routing, cluster, warpgroups):
    known = routings(R, TOKENS, CHOICES, R * EXPERTS, random)
    known["stay"] = np.repeat(np.arange(R) * EXPERTS, TOKENS)[:, None].repeat(CHOICES, 1)
    experts = known[routing].astype(np.int32)
    by_rank = experts.reshape(R, TOKENS, CHOICES)
    work = jax.tree.map(np.asarray, _tables(cluster, warpgroups)(by_rank))
    return experts, work, [order(experts, R, EXPERTS, rank) for rank in range(R)]


def _pages(work: Any, rank: int) -> Any:
    return jax.tree.map(lambda a: a[rank][None], work)


def dispatch(
    gpu,
    random,
    ranks=3,
    routing="some nowhere",
    cluster=1,
    warpgroups=1,
    comm=1,
    K=128,
    widths=(64, 128),
):
    """Two weights; experts' rows that begin anywhere.

    A tile loads the rows of its neighbours too, which may be on their way, and stores its own.
    """
    gpu.lenient = True
    R, N = ranks, ranks * TOKENS * CHOICES
    _, (work, _, _), rows = _routed(random, R, routing, cluster, warpgroups)
    x = small_integers(random, R, 1, TOKENS, K)
    ws = [small_integers(random, R, 1, EXPERTS, K, F) for F in widths]
    tile = Tile(64 * warpgroups, 64, 64, 2, warpgroups, cluster)
    fusion = product.ExpertFusion(tile, comm * cluster, CHUNK, band=2)
    results = gpu.run(
        *(
            functools.partial(
                dispatch_gemm,
                x[r],
                tuple(w[r] for w in ws),
                _pages(work, r),
                rows=N,
                flags=R * -(-TOKENS * CHOICES // CHUNK),
                peers=RemotePeer(R, gpu.axis),
                fusion=fusion,
                spec=SPEC,
                blocks=(comm + 2) * cluster,
            )
            for r in range(R)
        )
    )
    each = [np.array([x[s, 0, t] for s, t, _ in arrivals]).reshape(-1, K) for arrivals in rows]
    for r, (ys, came) in enumerate(results):
        np.testing.assert_array_equal(came[0, : len(rows[r])], each[r])
        counts = work.visits_VW[r]
        group = np.zeros(len(rows[r]), int)
        for visit in counts[: work.totals[r, tables.VISITS]]:
            group[visit[tables.LO] : visit[tables.HI]] = visit[tables.GROUP]
        for w, y in zip(ws, ys, strict=True):
            want = np.einsum("nk,nkf->nf", each[r], w[r, 0][group])
            np.testing.assert_array_equal(y[0], np.pad(want, ((0, N - len(want)), (0, 0))))


def combine(
    gpu, random, ranks=3, routing="some nowhere", cluster=1, warpgroups=1, comm=1, widths=1
):
    """Two products by transposed weights, added; two blocks of columns."""
    R, depths, D, N = ranks, (64, 128), 256, ranks * TOKENS * CHOICES
    experts, (_, work, places), rows = _routed(random, R, routing, cluster, warpgroups)
    tile = Tile(64 * warpgroups, 128, 64, 2, warpgroups, cluster)
    fusion = product.ExpertFusion(tile, comm * cluster, CHUNK, width=widths)
    hs = [small_integers(random, R, 1, height(N, tile), K) for K in depths]
    for r, arrivals in enumerate(rows):
        for h in hs:
            h[r, 0, len(arrivals) :] = np.nan
    ws = [small_integers(random, R, 1, EXPERTS, D, K) for K in depths]
    weights = random.integers(-2, 3, (R, TOKENS, CHOICES)).astype(np.float32)
    results = gpu.run(*(
        functools.partial(
            gemm_combine, tuple(h[r] for h in hs), tuple(w[r] for w in ws), _pages(work, r),
            places[r][None], weights[r][None], peers=RemotePeer(R, gpu.axis), fusion=fusion,
            spec=SPEC, turned=True, blocks=(comm + 2) * cluster,
        )
        for r in range(R)
    ))  # fmt: skip
    want = np.zeros((R, TOKENS, D), np.float32)
    for r, arrivals in enumerate(rows):
        for n, (source, t, a) in enumerate(arrivals):
            e = experts[source * TOKENS + t, a] - r * EXPERTS
            answer = sum(w[r, 0, e] @ h[r, 0, n] for h, w in zip(hs, ws, strict=True))
            want[source, t] += weights[source, t, a] * answer
    for r, (y, _) in enumerate(results):
        np.testing.assert_array_equal(y[0], want[r])


def run(case: Callable[..., None], seed: int, slow: int | None = None, mutant: Any = None) -> Gpu:
    """Carries a case out; returns the GPU that it ran on."""
    gpu = Gpu(seed, slow=slow, mutant=mutant)
    case(gpu, np.random.default_rng(seed))
    return gpu


# Of each kernel, the cases that a mutant is looked for in: the first that misses it is enough.
CASES: dict[str, list[Callable[..., None]]] = {
    "all_gather_gemm": [gather, functools.partial(gather, ranks=2, cluster=2, keep=True), copies],
    "gemm_reduce_scatter": [
        scatter,
        functools.partial(scatter, ranks=2, cluster=2),
        functools.partial(scatter, ranks=2, rows=136, chunk=136, N=256, depths=(64,)),
    ],
    "gemm_all_reduce": [reduce, functools.partial(reduce, ranks=2, cluster=2)],
    "dispatch_gemm": [
        dispatch,
        functools.partial(dispatch, ranks=2, cluster=2),
        # A block that sends rows and has no tile; a ring that lies below the weights.
        functools.partial(dispatch, ranks=2, cluster=2, routing="stay", K=1024, widths=(64,)),
    ],
    "gemm_combine": [
        combine,
        functools.partial(combine, ranks=2, cluster=2),
        # Jobs that are longer than the ring.
        functools.partial(combine, ranks=2, routing="one hot expert"),
    ],
}
SEEDS = range(3)


def reached(kernel: str) -> set[tuple[str, int, int]]:
    """The calls that a kernel's cases make."""
    return set().union(*(run(case, SEEDS[0]).calls.reached for case in CASES[kernel]))


def fault(kernel: str, mutant: Call) -> str | None:
    """What is said of a mutant, in the first run that misses it; None: it survives.

    NOTHING: it makes no difference, because no case gets there or there is one page only.
    """
    applied = False
    for seed in SEEDS:
        for case in CASES[kernel]:
            gpu = Gpu(seed, mutant=mutant)
            try:
                case(gpu, np.random.default_rng(seed))
            except AssertionError as error:
                return str(error).strip().split("\n")[0]
            applied |= gpu.calls.applied
    return None if applied else NOTHING
