"""The collective part of gpu_check.py: the fused products on one GPU, exact and timed.

Correctness first: eight virtual ranks share the GPU, each on its share of the thread blocks, with
every signal, pull and push between them. Buffers are full of NaN before each run, every rank starts
up to 200 us late, a hundred times over; values are small integers, so that the result is exact.

Then times of one rank of full size, whose peers are a ghost: copies are held back to a link's rate
and latency (an EMULATED link: no NVLink is crossed). All that overlap is judged by is measured in
the same rounds, each function once a round:

    gemm     the best of our kernel and cuBLAS on all SMs, nothing travels
    copy     the same throttled copies alone
    serial   those copies, then that product (for a scatter: product, copies, sum)
    fused    the kernel;  E = 1 - (fused - gemm) / (serial - gemm)   (Flux, section 5.1, Eq. 2)

and the controls: `ready`, the kernel without communication; `unrotated`, tiles from row 0 on, must
be worse; `free`, a link as fast as memory, must come near gemm; 25 GB/s must come near copy.

Rehearsed without a GPU: all that would run is compiled for one (aot), nothing is timed.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_kernels import Add, attempt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import aot, bench
from pallas_kernels.collective import api, plans
from pallas_kernels.collective.all_gather_gemm import all_gather, all_gather_gemm
from pallas_kernels.collective.cases import DENSE
from pallas_kernels.collective.core import Plan
from pallas_kernels.collective.gemm_all_reduce import gemm_all_reduce
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.collective.peers import GhostPeer, ReadyPeer, VirtualPeer
from pallas_kernels.gemm import hopper
from pallas_kernels.gemm.hopper import Spec, Tile

R, ME = 8, 3
DELAY_NS, SEEDS = 200_000, 100
LINKS = (400e9, 200e9, 25e9)  # bytes/s in one direction: NVLink 4, H800's, PCIe's
LATENCY_NS = 2000  # (chosen: a signal over NVLink takes 1 to 2 us)
ROUNDS, WARMUP = 20, 3
PLAIN, SUMS = Spec(None, "bfloat16"), Spec(None, "float32")


# ---- virtual ranks


@dataclasses.dataclass(frozen=True)
class Check:
    """A product on eight virtual ranks; rows: of one rank. tile: rows, columns, cluster."""

    kind: str
    rows: int
    K: int
    N: int
    tile: tuple[int, int, int]
    chunk: int

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.kind} of 8 virtual ranks, {self.rows} x {self.K} x {self.N}, {self.tile}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of x, w and of what is full of NaN: pages of all ranks."""
        pages = R * R if self.kind == "scatter" else R
        inbox = (R * R, self.rows, self.K if self.kind == "gather" else self.N)
        return (pages, self.rows, self.K), (R, self.K, self.N), inbox

    def run(self, x: jax.Array, w: jax.Array, delays: jax.Array) -> jax.Array:
        """Returns (ranks, rows, N) of each kind: for a gather the rows of all ranks."""
        m, n, cluster = self.tile
        spec = PLAIN if self.kind == "gather" else SUMS
        tile = plans.fitted(Tile(m, n, 64, 6, m // 64, cluster), spec.out_dtype)
        plan = Plan(tile, 0 if self.kind == "reduce" else 2, self.chunk)
        into = jax.new_ref(
            jnp.full(self.shapes[2], jnp.nan, x.dtype if self.kind == "gather" else jnp.float32)
        )
        static: dict[str, Any] = {
            "rows": self.rows, "peers": VirtualPeer(R), "plan": plan, "spec": spec,
        }  # fmt: skip
        if self.kind == "gather":
            ys, _ = all_gather_gemm(x, (w,), None, delays, into, keep=True, **static)
            return ys[0].reshape(R, -1, self.N)
        if self.kind == "scatter":
            return gemm_reduce_scatter((x,), (w,), None, None, delays, into, **static)[0]
        return gemm_all_reduce(x, w, None, None, delays, into, **static)

    def want(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The same by float64."""
        if self.kind == "gather":
            return np.einsum("mk,rkn->rmn", x.reshape(-1, self.K), w)
        if self.kind == "scatter":
            return np.einsum("romk,rkn->omn", x.reshape(R, R, self.rows, self.K), w)
        return np.broadcast_to(np.einsum("rmk,rkn->mn", x, w), (R, self.rows, self.N))


CHECKS = (
    Check("gather", 256, 512, 512, (128, 256, 2), 128),
    Check("scatter", 256, 512, 512, (128, 256, 2), 128),
    Check("reduce", 64, 512, 512, (64, 128, 1), 64),
    Check("gather", 200, 256, 320, (64, 128, 1), 64),
    Check("scatter", 200, 256, 384, (64, 128, 1), 64),
    Check("gather", 136, 192, 192, (128, 128, 1), 136),
    Check("scatter", 136, 192, 128, (128, 128, 1), 136),
    Check("reduce", 136, 192, 384, (128, 256, 1), 136),
)


def exact(check: Check) -> dict[str, Any]:
    """Returns how many of the runs with random delays differ from float64 in any bit."""
    random = np.random.default_rng(0)
    (x, w) = (random.integers(-2, 3, shape) for shape in check.shapes[:2])
    want = jnp.asarray(check.want(x.astype(float), w.astype(float)), jnp.bfloat16)
    # What the GPU may do in float64 is left to the CPU; both round the same exact sums.
    arrays = [jnp.asarray(v, jnp.bfloat16) for v in (x, w)]
    function = jax.jit(check.run)
    wrong = 0
    for _ in range(SEEDS):
        delays = jnp.asarray(random.integers(0, DELAY_NS, R), jnp.int32)
        wrong += not bool(jnp.array_equal(function(*arrays, delays), want))
    return {"runs": SEEDS, "wrong": wrong, "passed": wrong == 0}


# ---- one rank of full size beside ghosts


@dataclasses.dataclass(frozen=True)
class Case:
    """GPT-3 175B's feed-forward products, one rank of eight; m: rows of all ranks."""

    kind: str
    m: int

    @property
    def sizes(self) -> tuple[int, int]:
        """K, N of a rank's product."""
        model = DENSE["gpt3_175b"]
        sizes = model.width, model.hidden // R
        return sizes if self.kind == "gather" else sizes[::-1]

    @property
    def plan(self) -> Plan:
        """The heuristic's."""
        K, N = self.sizes
        op, out = (api.GATHER, "bfloat16") if self.kind == "gather" else (api.SCATTER, "float32")
        return plans.heuristic(op, R, self.m // R, K, [N], out)

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """x by ranks, w, and what a rank sends: x or partial sums."""
        K, N = self.sizes
        x, sums = ((R, self.m // R, n) for n in (K, N))
        sent = (x, jnp.bfloat16) if self.kind == "gather" else (sums, jnp.float32)
        shapes = (x, jnp.bfloat16), ((1, K, N), jnp.bfloat16), sent
        return tuple(jax.ShapeDtypeStruct(*s) for s in shapes)

    def fused(self, peers: Any, plan: Plan, x: jax.Array, w: jax.Array, _: Any) -> jax.Array:
        """The kernel."""
        static: dict[str, Any] = {"rows": self.m // R, "peers": peers, "plan": plan}
        if self.kind == "gather":
            return all_gather_gemm(x, (w,), spec=PLAIN, **static)[0][0]
        return gemm_reduce_scatter((x,), (w,), spec=SUMS, **static)[0]

    def copy(self, peers: Any, x: jax.Array, w: jax.Array, sent: jax.Array) -> jax.Array:
        """The copies alone, pulled for either kind: as many and as large."""
        return all_gather(sent, peers=peers, comm=self.plan.comm, chunk=self.plan.chunk)

    def ours(self, x: jax.Array, w: jax.Array, _: Any) -> jax.Array:
        """The product by our kernel on all SMs."""
        K, N = self.sizes
        tile = hopper.heuristic(self.m, N, K, spec=PLAIN)
        y, _ = hopper.multiply(x.reshape(self.m, K), w[0], spec=PLAIN, tile=tile)
        return y

    def cublas(self, x: jax.Array, w: jax.Array, _: Any) -> jax.Array:
        """The product by XLA."""
        return x.reshape(self.m, -1) @ w[0]

    def serial(self, peers: Any, x: jax.Array, w: jax.Array, sent: jax.Array) -> jax.Array:
        """Copies, then the product; or product, copies, sum."""
        if self.kind == "gather":
            return self.cublas(self.copy(peers, x, w, sent), w, sent)
        part = jnp.einsum("rmk,kn->rmn", x, w[0], preferred_element_type=jnp.float32)
        return self.copy(peers, x, w, part).sum(0).astype(x.dtype)

    def functions(self, links: tuple[float, ...]) -> dict[str, Callable[..., jax.Array]]:
        """All that is timed together, by name."""
        plan = self.plan
        alone = dataclasses.replace(plan, comm=0)
        unrotated = dataclasses.replace(plan, rotated=False)

        def ghost(rate: float) -> GhostPeer:
            return GhostPeer(R, ME, rate / plan.comm, LATENCY_NS if rate else 0)

        found: dict[str, Callable[..., jax.Array]] = {
            "ours": self.ours,
            "cublas": self.cublas,
            "ready": functools.partial(self.fused, ReadyPeer(R, ME), alone),
            "free": functools.partial(self.fused, ghost(0), plan),
        }
        for rate in links:
            peers, word = ghost(rate), f"{rate / 1e9:.0f}"
            found |= {
                f"fused {word}": functools.partial(self.fused, peers, plan),
                f"copy {word}": functools.partial(self.copy, peers),
                f"serial {word}": functools.partial(self.serial, peers),
            }
        best = f"{links[0] / 1e9:.0f}"
        found[f"unrotated {best}"] = functools.partial(self.fused, ghost(links[0]), unrotated)
        return found


CASES = (  # in order of worth
    *(Case(kind, 4096) for kind in ("gather", "scatter")),
    *(Case(kind, 1024) for kind in ("gather", "scatter")),
    *(Case(kind, 8192) for kind in ("gather", "scatter")),
    *(Case(kind, 2048) for kind in ("gather", "scatter")),
)


def interleaved(
    functions: dict[str, Callable[..., Any]], inputs: list[tuple[Any, ...]], clock: bench.Clock
) -> dict[str, float]:
    """Returns the median seconds of each function; in every round each runs once."""
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for i in range(WARMUP + ROUNDS):
        for name, function in compiled.items():
            times[name].append(clock(function, *inputs[i % len(inputs)]))
    return {name: float(np.median(found[WARMUP:])) for name, found in times.items()}


def efficiencies(case: Case, links: tuple[float, ...], clock: bench.Clock) -> Iterator[dict]:
    """Yields a row for each link, from one series of rounds."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(
        lambda key: tuple(
            jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(jax.random.split(key), case.arguments, strict=True)
        )
    )
    seconds = interleaved(case.functions(links), [draw(key) for key in keys], clock)
    gemm = min(seconds["ours"], seconds["cublas"])
    for rate in links:
        word = f"{rate / 1e9:.0f}"
        fused, copy, serial = (seconds[f"{name} {word}"] for name in ("fused", "copy", "serial"))
        yield {
            "link_gbytes_per_s": rate / 1e9, "latency_us": LATENCY_NS / 1e3,
            "plan": dataclasses.asdict(case.plan), "rounds": ROUNDS, "gemm_s": gemm,
            "copy_s": copy, "serial_s": serial, "fused_s": fused, "floor_s": max(gemm, copy),
            "efficiency": 1 - (fused - gemm) / (serial - gemm) if serial > gemm else None,
            "controls_s": {
                name: value for name, value in seconds.items()
                if name in ("ours", "cublas", "ready", "free", f"unrotated {word}")
            },
        }  # fmt: skip


def compile_all(add: Add) -> None:
    """The rehearsal: everything of the first cases, for an H100 that is not there."""
    device = NamedSharding(Mesh(np.array(aot.devices(1, 1)), ("x",)), PartitionSpec())

    def row(name: str, function: Callable, like: Any) -> None:
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for x in like]

        def measure() -> dict[str, Any]:
            aot.compile(jax.jit(function).lower(*args))
            return {"compiled": True}

        attempt(add, {"rehearsal": name}, measure)

    for check in CHECKS[:3]:
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in check.shapes[:2])
        row(check.name, check.run, (x, w, jax.ShapeDtypeStruct((R,), jnp.int32)))
    for case in CASES[:2]:
        for name, function in case.functions(LINKS[:1]).items():
            row(f"{case.kind} m={case.m}, {name}", function, case.arguments)


def check_collective(add: Add, about: dict[str, Any], deadline: float, rehearsal: bool) -> None:
    """Adds the rows: virtual ranks, then efficiencies on emulated links."""
    about["links"] = "emulated: one GPU, copies held back by its clock"
    if rehearsal:
        return compile_all(add)
    if jax.devices()[0].core_count < hopper.SMS:
        return add({"note": f"needs {hopper.SMS} SMs: thread blocks must all run at one time"})
    for check in CHECKS:
        if time.perf_counter() > deadline:
            return add({"check": check.name, "note": "not run: out of time, nor what follows it"})
        attempt(add, {"check": check.name}, functools.partial(exact, check))
    for case in CASES:
        row = {"case": f"gpt3_175b {case.kind}", "m": case.m}
        if time.perf_counter() > deadline:
            add(row | {"note": "not run: out of time"})
            continue
        rows = efficiencies(case, LINKS, bench.device_clock)
        for _ in LINKS:
            attempt(add, row, functools.partial(next, rows))
