"""Checks and times of the fused products on one GPU, for scripts/gpu_check.py.

Correctness first: eight virtual ranks share the GPU, each on its share of the thread blocks, with
every signal, pull and push between them. Buffers are full of NaN before each run, every rank starts
up to 200 us late, a hundred times over; values are small integers, so that the result is exact.

Then times of one rank of full size, whose peers are a ghost: copies are held back to a link's rate
and latency (an EMULATED link: tiles, waves and communication blocks are the real ones, but no
NVLink is crossed). All times that overlap is judged by are measured in the same rounds, each
function for a few calls a round:

    gemm     the best of our kernel and cuBLAS on all SMs, nothing travels
    copy     the same throttled copies alone
    serial   those copies, then that product (for a scatter: product, copies, sum; an all-reduce has
             the copies of a scatter and of a gather, the fewest)
    fused    the kernel;  E = 1 - (fused - gemm) / (serial - gemm)   (Flux, section 5.1, Eq. 2)

and the controls: `ready`, the kernel without communication; `unrotated`, tiles from row 0 on, must
be worse; `free`, a link as fast as memory, must come near gemm; 25 GB/s must come near copy.

Rehearsed without a GPU: the first check and the first case are compiled for one (aot); nothing is
timed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import aot, bench, tuned
from pallas_kernels.collective import api, fusions
from pallas_kernels.collective.all_gather_gemm import all_gather, all_gather_gemm
from pallas_kernels.collective.api import GATHER, REDUCE, SCATTER
from pallas_kernels.collective.cases import DENSE
from pallas_kernels.collective.gemm_all_reduce import gemm_all_reduce
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.gemm import hopper
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.fused import LINK_BYTES, Fusion, fitted
from pallas_kernels.hopper.peers import GhostPeer, Peers, ReadyPeer, VirtualPeer
from pallas_kernels.hopper.tiles import Tile

R, ME = 8, 3
DELAY_NS, SEEDS = 200_000, 100
LATENCY_NS = 2000  # (chosen: a signal over NVLink takes 1 to 2 us)
CUT = {"nvidia_h800": 178e9}  # bytes/s usable of an NVLink that is cut; else LINK_BYTES
BEST = 8  # fusions that are timed, best first by the model (chosen)
LINKS = (400e9, 200e9, 25e9)  # bytes/s in one direction: NVLink 4, H800's, PCIe's
ROUNDS, LAUNCHES = 4, 2  # (chosen: the clock of a GPU drifts slower than a round)
CLOSE = 0.02  # relative to the exact result's size (chosen: 16-bit results differ by under 0.01)
PLAIN, SUMS = Spec(None, "bfloat16"), Spec(None, "float32")


# ---- virtual ranks


@dataclasses.dataclass(frozen=True)
class Check:
    """A product on eight virtual ranks.

    rows: the rows of one rank. tile: (rows, columns, thread blocks of a cluster).
    """

    kind: str
    rows: int
    K: int
    N: int
    tile: tuple[int, int, int]
    chunk: int

    @property
    def name(self) -> str:
        """The name in the report."""
        return f"{self.kind} of 8 virtual ranks, {self.rows} x {self.K} x {self.N}, {self.tile}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of x, of w and of the inbox that is full of NaN: pages of all ranks."""
        pages = R * R if self.kind == "scatter" else R
        inbox = (R * R, self.rows, self.K if self.kind == "gather" else self.N)
        return (pages, self.rows, self.K), (R, self.K, self.N), inbox

    def run(self, x: jax.Array, w: jax.Array, delays: jax.Array) -> jax.Array:
        """Returns (ranks, rows, N) of each kind: for a gather the rows of all ranks."""
        m, n, cluster = self.tile
        spec = PLAIN if self.kind == "gather" else SUMS
        tile = fitted(Tile(m, n, 64, 6, m // 64, cluster), spec.out_dtype)
        fusion = Fusion(tile, 0 if self.kind == "reduce" else 2, self.chunk)
        into = jax.new_ref(
            jnp.full(self.shapes[2], jnp.nan, x.dtype if self.kind == "gather" else jnp.float32)
        )
        static: dict[str, Any] = {
            "rows": self.rows,
            "peers": VirtualPeer(R),
            "fusion": fusion,
            "spec": spec,
        }
        if self.kind == "gather":
            ys, _ = all_gather_gemm(x, (w,), None, delays, into, keep=True, **static)
            return ys[0].reshape(R, -1, self.N)
        if self.kind == "scatter":
            return gemm_reduce_scatter((x,), (w,), None, None, delays, into, **static)[0]
        return gemm_all_reduce(x, w, None, None, delays, into, **static)

    def want(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Returns the result of `run`, computed in float64."""
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


def link() -> float:
    """Bytes/s of this GPU's link in one direction."""
    return CUT.get(tuned.slug(tuned.target() or ""), LINK_BYTES)


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of rank ME of R, as it is timed here and by a tuner.

    m: the rows of all ranks. K, N: the sizes of this rank's weight.
    """

    op: str
    m: int
    K: int
    N: int
    ranks: int = R

    @property
    def spec(self) -> Spec:
        """Partial sums cross ranks in float32."""
        return Spec(None, "bfloat16" if self.op == api.GATHER else "float32")

    @property
    def rows(self) -> int:
        """Rows of a page."""
        return self.m if self.op == api.REDUCE else self.m // self.ranks

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """x, of a scatter by owners, and w."""
        pages = self.ranks if self.op == api.SCATTER else 1
        x, w = (pages, self.rows, self.K), (1, self.K, self.N)
        return jax.ShapeDtypeStruct(x, jnp.bfloat16), jax.ShapeDtypeStruct(w, jnp.bfloat16)

    def inputs(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Normal values."""
        keys = jax.random.split(key)
        pairs = zip(keys, self.arguments, strict=True)
        return tuple(jax.random.normal(k, a.shape, a.dtype) for k, a in pairs)

    def fusions(self) -> tuple[Fusion, ...]:
        """Returns the heuristic's fusion, then the next best by the heuristic's model."""
        legal = fusions.candidates(self.op, self.rows, [self.N], self.spec.out_dtype)
        sizes = (self.ranks, self.rows, self.K, [self.N], self.spec.out_dtype)
        return tuple(sorted(legal, key=lambda p: fusions.seconds(self.op, p, *sizes))[:BEST])

    @property
    def me(self) -> int:
        """The rank."""
        return ME % self.ranks

    def ghost(self, fusion: Fusion, rate: float) -> GhostPeer:
        """Peers behind a link of `rate` bytes/s; 0: as fast as memory."""
        tile, senders = fusion.tile, fusion.comm
        if not senders:  # all blocks that compute
            rows = -(-self.rows // (tile.block_m * tile.cluster)) * tile.cluster
            senders = min(rows * -(-self.N // tile.block_n), SMS)
        return GhostPeer(self.ranks, self.me, rate / senders, LATENCY_NS if rate else 0)

    def fused(self, peers: Peers, fusion: Fusion, x: jax.Array, w: jax.Array) -> jax.Array:
        """Runs the kernel on pages padded to a tile. Returns: (R, m / R, N), or (1, rows, N)."""
        static: dict[str, Any] = {"peers": peers, "fusion": fusion, "spec": self.spec}
        static |= {"rows": self.rows}
        x = jnp.pad(x, ((0, 0), (0, max(0, fusion.tile.block_m - self.rows)), (0, 0)))
        if self.op == api.GATHER:
            y = all_gather_gemm(x, (w,), **static)[0][0]
        elif self.op == api.SCATTER:
            y = gemm_reduce_scatter((x,), (w,), **static)[0]
        else:
            y = gemm_all_reduce(x, w, **static)
        return y[:, : self.rows]

    def ready(
        self, fusion: Fusion, x: jax.Array, w: jax.Array, interpret: bool = False
    ) -> tuple[jax.Array, ...]:
        """Runs the kernel without communication and waits, as the interpreter can.

        x: pages of all ranks. Returns: as `fused`; of a scatter the sums of gemm_reduce_scatter.
        Raises: NotImplementedError for an all-reduce, whose every tile waits for all ranks.
        """
        fusion = dataclasses.replace(fusion, comm=0)
        static: dict[str, Any] = {"peers": ReadyPeer(self.ranks, self.me), "fusion": fusion}
        static |= {"rows": self.rows, "spec": self.spec}
        if interpret:
            static |= {"blocks": 2 * fusion.tile.cluster, "interpret": True}
        if self.op == api.GATHER:
            return tuple(all_gather_gemm(x, (w,), **static)[0])
        if self.op == api.SCATTER:
            return tuple(gemm_reduce_scatter((x,), (w,), **static)[1:])
        raise NotImplementedError(f"{api.REDUCE}: nothing of it can run without flags, as on a GPU")

    def product(self, x: jax.Array, w: jax.Array, dtype: str) -> jax.Array:
        """Returns XLA's product of the pages of x."""
        y = jnp.einsum("pmk,kn->pmn", x, w[0], preferred_element_type=jnp.float32)
        return y.astype(dtype)

    def copy(self, peers: Peers, fusion: Fusion, sent: jax.Array) -> jax.Array:
        """Runs the copies alone, as pulls for each kind, as many and as large. sent: x, or sums."""
        if self.op != api.REDUCE:
            return all_gather(sent, peers=peers, comm=fusion.comm, chunk=fusion.chunk)
        static: dict[str, Any] = {"peers": peers, "comm": self.ranks - 1, "chunk": 8}
        parts = sent.reshape(self.ranks, 8, -1)
        total = all_gather(parts, **static).sum(0, keepdims=True)
        return all_gather(total, **static).reshape(sent.shape)

    def serial(
        self, peers: Peers, fusion: Fusion, x: jax.Array, w: jax.Array, wire: str | None = None
    ) -> jax.Array:
        """Runs the copies, then XLA's product; or product, copies, sum.

        wire: type of the sums that travel; None: the kernel's.
        """
        if self.op == api.GATHER:
            return self.product(self.copy(peers, fusion, x), w, self.spec.out_dtype)
        came = self.copy(peers, fusion, self.product(x, w, wire or self.spec.out_dtype))
        return came.sum(0, keepdims=True, dtype=jnp.float32).astype(x.dtype)

    def alone(self, fusion: Fusion, rate: float) -> GhostPeer:
        """Returns the peers of `copy` and `serial`, whose blocks share the link."""
        if self.op == api.REDUCE:
            return GhostPeer(self.ranks, self.me, rate / (self.ranks - 1), LATENCY_NS)
        return self.ghost(fusion, rate)

    def alike(self, fusion: Fusion, x: jax.Array, w: jax.Array) -> jax.Array:
        """Returns the result of `fused`, computed by the interpreter."""
        if self.op == api.GATHER:
            return self.ready(fusion, jnp.repeat(x, self.ranks, 0), w, interpret=True)[0]
        sums, owned = self.ready(fusion, x, w, interpret=True)
        sums = sums.at[self.me].set(owned[self.me * (self.ranks + 1)])
        return sums.sum(0, keepdims=True).astype(x.dtype)

    def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Returns the result of `fused` in float32, given that all ranks hold the same."""
        y = jnp.einsum("pmk,kn->pmn", x, w[0], preferred_element_type=jnp.float32)
        if self.op == api.GATHER:
            y = jnp.broadcast_to(y, (self.ranks, *y.shape[1:]))
        else:
            y = self.ranks // len(x) * y.sum(0, keepdims=True)
        return y.astype(x.dtype)


def cases() -> tuple[Case, ...]:
    """GPT-3 175B's feed-forward products, in order of worth."""
    model = DENSE["gpt3_175b"]

    def pair(m: int) -> Iterator[Case]:
        up, down = model.up(m), model.down(m, 4)
        yield Case(api.GATHER, m, up.k, up.n)
        yield Case(api.SCATTER, m, down.k, down.n)

    few = (model.down(m, 4) for m in (64, 16))
    reduces = (Case(api.REDUCE, down.m, down.k, down.n) for down in few)
    return (*pair(4096), *pair(1024), *reduces, *pair(8192), *pair(2048))


def arguments(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns x, w, and the data that a rank sends: x of all ranks, or partial sums."""
    x, w = case.arguments
    if case.op == api.GATHER:
        return x, w, jax.ShapeDtypeStruct((R, *x.shape[1:]), x.dtype)
    return x, w, jax.ShapeDtypeStruct((*x.shape[:2], case.N), jnp.float32)


def functions(case: Case, links: tuple[float, ...]) -> dict[str, Callable[..., jax.Array]]:
    """Returns the functions that are timed together, by name; each takes `arguments`."""
    fusion, gathers = case.fusions()[0], case.op == api.GATHER
    tile = hopper.heuristic(case.m, case.N, case.K, spec=PLAIN)

    def all_rows(x: jax.Array, every: jax.Array) -> jax.Array:
        return (every if gathers else x).reshape(case.m, case.K)

    def fused(peers: Peers, fusion: Fusion) -> Callable[..., jax.Array]:
        return lambda x, w, _: case.fused(peers, fusion, x, w)

    timed: dict[str, Callable[..., Any]] = {
        "ours": lambda x, w, e: hopper.multiply(all_rows(x, e), w[0], spec=PLAIN, tile=tile)[0],
        "cublas": lambda x, w, e: all_rows(x, e) @ w[0],
        "free": fused(case.ghost(fusion, 0), fusion),
    }
    for rate in links:
        alone, word = case.alone(fusion, rate), f"{rate / 1e9:.0f}"
        timed |= {
            f"fused {word}": fused(case.ghost(fusion, rate), fusion),
            f"copy {word}": lambda x, w, e, p=alone: case.copy(p, fusion, x if gathers else e),
            f"serial {word}": lambda x, w, _, p=alone: case.serial(p, fusion, x, w),
        }
    if case.op != api.REDUCE:  # whose tiles need nobody else's rows
        unrotated, best = dataclasses.replace(fusion, rotated=False), f"{links[0] / 1e9:.0f}"
        timed[f"unrotated {best}"] = fused(case.ghost(unrotated, links[0]), unrotated)
        timed["ready"] = lambda x, w, e: case.ready(fusion, e if gathers else x, w)
    return timed


def interleaved(
    functions: dict[str, Callable[..., Any]],
    inputs: Sequence[tuple[Any, ...]],
    clock: bench.Clock,
) -> tuple[str, dict[str, float]]:
    """Returns which clock, and the median seconds of each function; all run in every round."""
    programs = {name: jax.jit(bench.chained(function)) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    used = ""
    for _ in range(ROUNDS):
        for name, program in programs.items():
            used, seconds = clock(program, inputs, LAUNCHES)
            times[name] += seconds
    return used, {name: float(np.median(t)) / len(inputs) for name, t in times.items()}


def apart(function: Callable[..., Any], exact: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Returns how far a result is from the exact one, of the latter's size; NaN where it is NaN."""
    result, want = (
        jnp.concatenate(
            [y.astype(jnp.float32).reshape(-1) for y in jax.tree.leaves(jax.jit(f)(*args))]
        )
        for f in (function, exact)
    )
    return float(jnp.linalg.norm(result - want) / jnp.linalg.norm(want))


def efficiencies(
    case: Case, links: tuple[float, ...] = LINKS, clock: bench.Clock = bench.device_clock
) -> list[dict[str, Any]]:
    """Returns a row for each link, from one series of rounds."""
    keys, like = jax.random.split(jax.random.key(0), 3), arguments(case)
    draw = jax.jit(
        lambda key: tuple(
            jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(jax.random.split(key, len(like)), like, strict=True)
        )
    )
    inputs: list[tuple[Any, ...]] = [draw(key) for key in keys]
    timed = functions(case, links)
    wrong = apart(timed[f"fused {links[0] / 1e9:.0f}"], lambda x, w, _: case.exact(x, w), inputs[0])
    used, seconds = interleaved(timed, inputs, clock)
    gemm = min(seconds["ours"], seconds["cublas"])
    controls = "ours", "cublas", "ready", "free", f"unrotated {links[0] / 1e9:.0f}"
    control_times = {name: value for name, value in seconds.items() if name in controls}
    shared = {
        "relative_error": wrong,
        "passed": wrong <= CLOSE,
        "controls_s": control_times,
        "clock": used,
    }
    return [link_row(r, case.fusions()[0], gemm, seconds, "efficiency") | shared for r in links]


def link_row(
    rate: float, fusion: Fusion, gemm: float, seconds: Mapping[str, float], hidden: str
) -> dict[str, Any]:
    """Returns the papers' figures behind one link. hidden: the name of the hidden share."""
    fused, copy, serial = (
        seconds[f"{name} {rate / 1e9:.0f}"] for name in ("fused", "copy", "serial")
    )
    return {
        "link_gbytes_per_s": rate / 1e9,
        "latency_us": LATENCY_NS / 1e3,
        "fusion": dataclasses.asdict(fusion),
        "runs": ROUNDS * LAUNCHES,
        "gemm_s": gemm,
        "copy_s": copy,
        "serial_s": serial,
        "fused_s": fused,
        "floor_s": max(gemm, copy),
        hidden: 1 - (fused - gemm) / (serial - gemm) if serial > gemm else None,
    }


Work = tuple[str, dict[str, Any], Callable[[], Any]]  # a name, members of its rows, what makes them


def checks() -> list[Work]:
    """Returns the checks on virtual ranks; each gives a row."""
    return [(check.name, {}, functools.partial(exact, check)) for check in CHECKS]


def times() -> list[Work]:
    """Returns the timed products beside ghosts; each gives a row for every link."""
    return [
        (
            f"{case.op} m={case.m}",
            {"case": f"gpt3_175b {case.op}", "m": case.m},
            functools.partial(efficiencies, case),
        )
        for case in cases()
    ]


REHEARSED = ("fused", "copy", "serial")  # of a case's functions, which take minutes to compile


def rehearsals() -> list[Work]:
    """Returns the programs of the first check and case, to be compiled for an H100 without one."""
    device = NamedSharding(Mesh(np.array(aot.devices(1, 1)), ("x",)), PartitionSpec())

    def one(name: str, function: Callable, like: Any) -> Work:
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for x in like]
        return name, {}, functools.partial(compiled, function, args)

    check, case = CHECKS[0], cases()[0]
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in check.shapes[:2])
    delays = jax.ShapeDtypeStruct((R,), jnp.int32)
    return [
        one(check.name, check.run, (x, w, delays)),
        *(
            one(f"{case.op} m={case.m}, {name}", function, arguments(case))
            for name, function in functions(case, LINKS[:1]).items()
            if name.startswith(REHEARSED)
        ),
    ]


def compiled(function: Callable, args: Sequence[Any]) -> dict[str, Any]:
    """Compiles a function and returns a rehearsal's row. Raises: what the compiler raises."""
    aot.compile(jax.jit(function).lower(*args))
    return {"compiled": True}


def fits() -> str:
    """Returns the reason why this GPU cannot run such kernels; '' if it can."""
    if jax.devices()[0].core_count < SMS:
        return f"needs {SMS} SMs: thread blocks must all run at one time"
    return ""


# ---- tunings
#
# What tune.py times of the fused products: the papers' layers, on one rank beside ghosts.
#
# The rival is plain XLA, one after the other (`Case.serial`). A model's own
# sums travel in 16 bits, so the rival's do, where the kernels send float32: a table that says
# 'fused' does not flatter.


ROWS = (1024, 2048, 4096, 8192)  # m (chosen: smaller products have nothing to hide behind)
DECODING = (8, 16, 32, 64, 128)  # m of the all-reduce
WORDS = ("fused", "xla")


def tuned_cases() -> Iterator[Case]:
    """The papers' feed-forward layers, every number of rows."""
    for model in DENSE.values():
        for m in ROWS:
            up, down = model.up(m), model.down(m, 4)
            yield Case(GATHER, m, up.k, up.n)
            yield Case(SCATTER, m, down.k, down.n)
        for m in DECODING:
            down = model.down(m, 4)
            yield Case(REDUCE, m, down.k, down.n)


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns the tunings of all cases."""
    return tuple(map(tuning, tuned_cases()))


def tuning(case: Case) -> tuned.Tuning:
    """Returns the measurement of a case, for scripts/tune.py."""
    legal = case.fusions()

    def function(fusion: Fusion, interpret: bool) -> Callable[..., jax.Array]:
        if interpret:
            return lambda x, w: case.alike(fusion, x, w)
        return lambda x, w: case.fused(case.ghost(fusion, link()), fusion, x, w)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return case.serial(case.alone(legal[0], link()), legal[0], x, w, wire="bfloat16")

    key = api.key(case.op, case.ranks, case.rows, case.K, case.N)
    return tuned.Tuning(
        case.op,
        key,
        legal,
        function,
        case.inputs,
        plain,
        want=case.exact,
        words=WORDS,
        link="emulated",
    )
