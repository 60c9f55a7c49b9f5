"""A mixture's fused products on one GPU, exact and timed: what scripts/gpu_check.py runs.

As collective/bench.py: eight virtual ranks first, each on its share of the thread blocks, buffers
full of NaN, every rank up to 200 us late, a hundred times; values are small integers, so that the
result is exact, beside a loop over tokens in float64. Then times of one rank of full size beside a
ghost (an EMULATED link): the papers' models, 16384 tokens, expert parallel over 8, every expert as
likely (pallas_kernels/expert/tunings.py).

    gemm     the grouped product alone on all SMs, nothing travels
    copy     the same throttled copies alone
    serial   those copies, then that product (for a combine: product, copies, sum)
    fused    the kernel;  hidden = 1 - (fused - gemm) / (serial - gemm)   (COMET, section 5)

and the controls: `ready`, the kernel without communication; `unstaged`, tiles in the order of
their rows, must be worse; `free`, a link as fast as memory; other numbers of communication blocks
than the plan's, of which the fastest is what a table should hold.

Rehearsed without a GPU: the first check and the first case are compiled for one (aot); nothing is
timed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pallas_kernels import aot, bench
from pallas_kernels.collective.bench import (
    CLOSE,
    DELAY_NS,
    LINKS,
    REHEARSED,
    SEEDS,
    R,
    Work,
    apart,
    compiled,
    interleaved,
    link_row,
)
from pallas_kernels.collective.peers import VirtualPeer
from pallas_kernels.collective.plans import fitted
from pallas_kernels.expert import plans, tables
from pallas_kernels.expert.cases import MIXTURES
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.gemm_combine import gemm_combine
from pallas_kernels.expert.plans import COMBINE, DISPATCH
from pallas_kernels.expert.product import Plan, height
from pallas_kernels.expert.routes import cut, route
from pallas_kernels.expert.tunings import Case, of_model
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import Tile

PLAIN, SUMS = Spec(None, "bfloat16"), Spec(None, "float32")
TOKENS, ROOM = 16384, 1.25  # of all ranks; rows of a rank over an even share

# ---- virtual ranks


@dataclasses.dataclass(frozen=True)
class Check:
    """A product on eight virtual ranks. tile: rows, columns, cluster. tokens: of one rank."""

    kind: str
    routing: str
    tokens: int
    choices: int
    experts: int
    K: int
    N: int
    tile: tuple[int, int, int]

    @property
    def name(self) -> str:
        """For the report."""
        sizes = f"{self.tokens} x {self.choices} of {self.experts}, {self.K} x {self.N}"
        return f"{self.kind} of 8 virtual ranks, {self.routing}, {sizes}, {self.tile}"

    @property
    def rows(self) -> int:
        """Of a rank's experts, whatever the routing."""
        return R * self.tokens * self.choices

    @property
    def plan(self) -> Plan:
        """Two blocks of sixteen communicate."""
        m, n, cluster = self.tile
        sums = "bfloat16" if self.kind == "dispatch" else "float32"
        return Plan(fitted(Tile(m, n, 64, 6, m // 64, cluster), sums), 2, 16, band=2, width=1)

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Rows, w and weights of small integers, and choices: (ranks, ...) each."""
        shape = R, self.tokens, self.choices
        experts = random.integers(0, R * self.experts, shape)
        if self.routing == "one hot":
            experts[:] = self.experts
        elif self.routing == "gaps":
            experts = np.where(experts < self.experts, -1, experts)
            experts[2] = -1
        elif self.routing == "cut in two":
            halves = jnp.asarray(experts[:, :, ::2].reshape(-1, self.choices // 2) // 2)
            experts = np.asarray(cut(halves, experts=self.experts, parts=2)).reshape(shape)
        rows = self.tokens if self.kind == "dispatch" else self.rows
        shapes = (R, rows, self.K), (R, self.experts, self.K, self.N), shape
        return *(random.integers(-2, 3, s) for s in shapes), experts

    def run(self, x: jax.Array, w: jax.Array, weights: jax.Array, experts: jax.Array,
            delays: jax.Array) -> jax.Array:  # fmt: skip
        """Returns y of all ranks: (ranks, rows or tokens, N)."""
        plan, peers, S = self.plan, VirtualPeer(R), self.tokens * self.choices
        block = plan.tile.block_m * plan.tile.cluster

        def made(experts: jax.Array) -> Any:
            routes = route(experts, experts=self.experts, axis="x")
            make = tables.dispatch if self.kind == "dispatch" else tables.combine
            return make(routes, chunk=plan.chunk, block=block), tables.places(routes)

        work, places = jax.vmap(made, axis_name="x")(experts)
        tall = height(self.rows, plan.tile)
        if self.kind == "dispatch":
            into = jax.new_ref(jnp.full((R, tall, self.K), jnp.nan, x.dtype))
            flags = R * -(-S // plan.chunk)
            (y,), _ = dispatch_gemm(
                x, (w,), work, delays, into, rows=self.rows, flags=flags, peers=peers, plan=plan,
                spec=PLAIN,
            )  # fmt: skip
            return y
        into = jax.new_ref(jnp.full((R, S + tall, self.N), jnp.nan, jnp.float32))
        came = jnp.arange(tall)[None, :, None] < work.totals[:, tables.END, None, None]
        x = jnp.where(came, jnp.pad(x, ((0, 0), (0, tall - self.rows), (0, 0))), jnp.nan)
        weights = weights.astype(jnp.float32)
        return gemm_combine(
            (x,), (w,), work, places, weights, delays, into, peers=peers, plan=plan, spec=SUMS
        )[0]

    def want(self, x: np.ndarray, w: np.ndarray, weights: np.ndarray, experts: np.ndarray
             ) -> np.ndarray:  # fmt: skip
        """The same by float64, row by row."""
        first = self.kind == "dispatch"
        y = np.zeros((R, self.rows if first else self.tokens, self.N))
        flat, source = experts.reshape(-1), np.arange(experts.size) // experts[0].size
        for rank in range(R):
            (mine,) = np.nonzero((flat >= 0) & (flat // self.experts == rank))
            mine = mine[np.lexsort((mine, (source[mine] - rank) % R, flat[mine]))]
            expert_N, token_N = flat[mine] % self.experts, mine // self.choices
            rows = x.reshape(-1, self.K)[token_N] if first else x[rank, : len(mine)]
            answers = np.zeros((len(mine), self.N))
            for e in range(self.experts):
                answers[expert_N == e] = rows[expert_N == e] @ w[rank, e]
            if first:
                y[rank, : len(mine)] = answers
            else:
                weighted = weights.reshape(-1)[mine][:, None] * answers
                np.add.at(y.reshape(-1, self.N), token_N, weighted)
        return y


CHECKS = tuple(
    Check(kind, routing, tokens, choices, experts, K, N, tile)
    for routing, tokens, choices, experts, K, N, tile in (
        ("even", 64, 2, 2, 512, 512, (128, 256, 2)),
        ("gaps", 45, 3, 4, 192, 384, (64, 128, 1)),
        ("one hot", 24, 2, 1, 256, 256, (128, 128, 1)),
        ("even", 16, 8, 64, 128, 128, (64, 128, 2)),
        ("cut in two", 24, 12, 2, 256, 256, (64, 128, 2)),
    )
    for kind in ("dispatch", "combine")
)


def exact(check: Check) -> dict[str, Any]:
    """Returns how many of the runs with random delays differ from float64 in any bit."""
    random = np.random.default_rng(0)
    *arrays, experts = check.draw(random)
    x, w, weights = (a.astype(float) for a in arrays)
    want = jnp.asarray(check.want(x, w, weights, experts), jnp.bfloat16)
    args = (*(jnp.asarray(a, jnp.bfloat16) for a in arrays), jnp.asarray(experts, jnp.int32))
    function = jax.jit(check.run)
    wrong = 0
    for _ in range(SEEDS):
        delays = jnp.asarray(random.integers(0, DELAY_NS, R), jnp.int32)
        wrong += not bool(jnp.array_equal(function(*args, delays), want))
    return {"runs": SEEDS, "wrong": wrong, "passed": wrong == 0}


# ---- one rank of full size beside ghosts


def arguments(case: Case, key: jax.Array) -> tuple[Any, ...]:
    """What is timed; and, for the product alone, rows that are there, at a dispatch all ranks'."""
    given = case.inputs(key)
    if case.op == COMBINE:
        return given, given.x, None
    return given, case.came(given), case.pages(case.plans()[0], given)


def functions(case: Case, links: tuple[float, ...]) -> dict[str, Callable[..., Any]]:
    """All that is timed together, by name; of `arguments`."""
    plan, best = case.plans()[0], f"{links[0] / 1e9:.0f}"

    def timed(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
        return lambda given, *_: function(*static, *given)

    def fused(rate: float, plan: Plan) -> Callable[..., Any]:
        return timed(case.fused, case.ghost(plan, rate), plan)

    found: dict[str, Callable[..., Any]] = {
        "gemm": lambda given, rows, _: case.products(rows, given),
        "ready": lambda given, _, pages: case.ready(plan, pages, *given),
        "free": fused(0, plan),
    }
    for rate in links:
        peers, word = case.ghost(plan, rate), f"{rate / 1e9:.0f}"
        found |= {
            f"fused {word}": fused(rate, plan),
            f"copy {word}": timed(case.copy, peers, plan),
            f"serial {word}": timed(case.serial, peers, plan),
        }
    if case.op == DISPATCH:
        found[f"unstaged {best}"] = fused(links[0], dataclasses.replace(plan, rotated=False))
    for comm in plans.COMM:
        found[f"{comm} blocks {best}"] = fused(links[0], dataclasses.replace(plan, comm=comm))
    return found


CASES = tuple((model, op) for model in MIXTURES for op in (DISPATCH, COMBINE))


def hidden(
    case: Case, links: tuple[float, ...] = LINKS, clock: bench.Clock = bench.device_clock
) -> list[dict[str, Any]]:
    """Returns a row for each link, from one series of rounds."""
    draw = jax.jit(functools.partial(arguments, case))
    inputs: list[tuple[Any, ...]] = [draw(key) for key in jax.random.split(jax.random.key(0), 3)]
    timed, best = functions(case, links), f"{links[0] / 1e9:.0f}"
    wrong = apart(timed[f"fused {best}"], lambda given, *_: case.exact(*given), inputs[0])
    used, seconds = interleaved(timed, inputs, clock)
    controls = "ready", "free", f"blocks {best}", f"unstaged {best}"
    kept = {name: value for name, value in seconds.items() if name.endswith(controls)}
    rest = {"relative_error": wrong, "passed": wrong <= CLOSE, "controls_s": kept, "clock": used}
    gemm, plan = seconds["gemm"], case.plans()[0]
    return [link_row(rate, plan, gemm, seconds, "hidden") | rest for rate in links]


def checks() -> list[Work]:
    """Virtual ranks: each gives a row."""
    return [(check.name, {}, functools.partial(exact, check)) for check in CHECKS]


def times() -> list[Work]:
    """Products beside ghosts: each gives a row for every link."""

    def measure(model: str, op: str) -> list[dict[str, Any]]:
        return hidden(of_model(op, model, TOKENS, ROOM))

    return [
        (f"{model} {op}", {"case": model, "op": op}, functools.partial(measure, model, op))
        for model, op in CASES
    ]


def rehearsals() -> list[Work]:
    """What the first check and the first case run, compiled for an H100 that is not there."""
    device = SingleDeviceSharding(aot.devices(1, 1)[0])  # as on a GPU: no mesh

    def one(name: str, function: Callable, like: Any) -> Work:
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tuple(like)
        )
        return name, {}, functools.partial(compiled, function, args)

    check, (model, op) = CHECKS[0], CASES[0]
    *arrays, experts = check.draw(np.random.default_rng(0))
    x, w, weights = (a.astype(float) for a in arrays)
    check.want(x, w, weights, experts)
    like = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in arrays]
    like += [jax.ShapeDtypeStruct(s, jnp.int32) for s in (experts.shape, (R,))]
    case = of_model(op, model, TOKENS, ROOM)
    given = jax.eval_shape(functools.partial(arguments, case), jax.random.key(0))
    return [
        one(check.name, check.run, like),
        *(one(f"{model} {op}, {name}", function, given)
          for name, function in functions(case, LINKS[:1]).items()
          if name.startswith(REHEARSED)),
    ]  # fmt: skip
