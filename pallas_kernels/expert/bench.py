"""Checks and times of a mixture's fused products on one GPU, for scripts/gpu_check.py.

As collective/bench.py: eight virtual ranks first, each on its share of the thread blocks, buffers
full of NaN, every rank up to 200 us late, a hundred times; values are small integers, so that the
result is exact, beside a loop over tokens in float64. Then times of one rank of full size beside a
ghost (an EMULATED link): the papers' models, 16384 tokens, expert parallel over 8, every expert as
likely. Every rank holds the same tokens and chooses as the rank before it does, the experts of one
rank further on: so what a rank sends is what comes to it, and a ghost's results are complete.

    gemm     the grouped product alone on all SMs, nothing travels
    copy     the same throttled copies alone
    serial   those copies, then that product (for a combine: product, copies, sum)
    fused    the kernel;  hidden = 1 - (fused - gemm) / (serial - gemm)   (COMET, section 5)

and the controls: `ready`, the kernel without communication; `unstaged`, tiles in the order of
their rows, must be worse; `free`, a link as fast as memory; other numbers of communication blocks
than the fusion's, of which the fastest is what a table should hold.

Rehearsed without a GPU: the first check and the first case are compiled for one (aot); nothing is
timed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pallas_kernels import aot, bench, tuned
from pallas_kernels.collective.all_gather_gemm import all_gather
from pallas_kernels.collective.bench import (
    CLOSE,
    DELAY_NS,
    LATENCY_NS,
    LINKS,
    ME,
    REHEARSED,
    SEEDS,
    R,
    Work,
    apart,
    compiled,
    interleaved,
    link,
    link_row,
)
from pallas_kernels.expert import fusions, reference, tables
from pallas_kernels.expert.cases import MIXTURES
from pallas_kernels.expert.copies import send_rows
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.fusions import COMBINE, DISPATCH
from pallas_kernels.expert.gemm_combine import gemm_combine
from pallas_kernels.expert.product import ExpertFusion, height
from pallas_kernels.expert.routes import Routes, cut, route
from pallas_kernels.grouped import hopper as grouped
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.fused import fitted
from pallas_kernels.hopper.peers import GhostPeer, Peers, ReadyPeer, VirtualPeer
from pallas_kernels.hopper.tiles import Tile

PLAIN, SUMS = Spec(None, "bfloat16"), Spec(None, "float32")
OTHERS = 3  # of other tiles than the heuristic's, timed as well (chosen)
TOKENS, ROOM = 16384, 1.25  # of all ranks; rows of a rank over an even share

# ---- virtual ranks


@dataclasses.dataclass(frozen=True)
class Check:
    """A product on eight virtual ranks.

    tile: (rows, columns, thread blocks of a cluster). tokens: those of one rank.
    """

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
        """The name in the report."""
        sizes = f"{self.tokens} x {self.choices} of {self.experts}, {self.K} x {self.N}"
        return f"{self.kind} of 8 virtual ranks, {self.routing}, {sizes}, {self.tile}"

    @property
    def rows(self) -> int:
        """The rows of a rank's experts for any routing."""
        return R * self.tokens * self.choices

    @property
    def fusion(self) -> ExpertFusion:
        """Two blocks of sixteen communicate."""
        m, n, cluster = self.tile
        sums = "bfloat16" if self.kind == "dispatch" else "float32"
        return ExpertFusion(
            fitted(Tile(m, n, 64, 6, m // 64, cluster), sums), 2, 16, band=2, width=1
        )

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

    def run(
        self, x: jax.Array, w: jax.Array, weights: jax.Array, experts: jax.Array, delays: jax.Array
    ) -> jax.Array:
        """Returns y of all ranks: (ranks, rows or tokens, N)."""
        fusion, peers, S = self.fusion, VirtualPeer(R), self.tokens * self.choices
        block = fusion.tile.block_m * fusion.tile.cluster

        def made(experts: jax.Array) -> Any:
            routes = route(experts, experts=self.experts, axis="x")
            make = tables.dispatch if self.kind == "dispatch" else tables.combine
            return make(routes, chunk=fusion.chunk, block=block), tables.places(routes)

        work, places = jax.vmap(made, axis_name="x")(experts)
        tall = height(self.rows, fusion.tile)
        if self.kind == "dispatch":
            into = jax.new_ref(jnp.full((R, tall, self.K), jnp.nan, x.dtype))
            flags = R * -(-S // fusion.chunk)
            (y,), _ = dispatch_gemm(
                x,
                (w,),
                work,
                delays,
                into,
                rows=self.rows,
                flags=flags,
                peers=peers,
                fusion=fusion,
                spec=PLAIN,
            )
            return y
        into = jax.new_ref(jnp.full((R, S + tall, self.N), jnp.nan, jnp.float32))
        came = jnp.arange(tall)[None, :, None] < work.totals[:, tables.END, None, None]
        x = jnp.where(came, jnp.pad(x, ((0, 0), (0, tall - self.rows), (0, 0))), jnp.nan)
        weights = weights.astype(jnp.float32)
        return gemm_combine(
            (x,), (w,), work, places, weights, delays, into, peers=peers, fusion=fusion, spec=SUMS
        )[0]

    def want(
        self, x: np.ndarray, w: np.ndarray, weights: np.ndarray, experts: np.ndarray
    ) -> np.ndarray:
        """Returns the result of `run`, computed in float64, row by row."""
        first = self.kind == "dispatch"
        y = np.zeros((R, self.rows if first else self.tokens, self.N))
        flat, source = experts.reshape(-1), np.arange(experts.size) // experts[0].size
        for rank in range(R):
            (local,) = np.nonzero((flat >= 0) & (flat // self.experts == rank))
            local = local[np.lexsort((local, (source[local] - rank) % R, flat[local]))]
            expert_N, token_N = flat[local] % self.experts, local // self.choices
            rows = x.reshape(-1, self.K)[token_N] if first else x[rank, : len(local)]
            answers = np.zeros((len(local), self.N))
            for e in range(self.experts):
                answers[expert_N == e] = rows[expert_N == e] @ w[rank, e]
            if first:
                y[rank, : len(local)] = answers
            else:
                weighted = weights.reshape(-1)[local][:, None] * answers
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


class Inputs(NamedTuple):
    """x: tokens (T, K), or rows of the experts (N, K). ws: (E, K, columns) each.

    weight_TA: the weights of a combine. routes: those of rank ME.
    """

    x: jax.Array
    ws: tuple[jax.Array, ...]
    weight_TA: jax.Array
    routes: Routes


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of rank ME of R, as it is timed here and by a tuner.

    tokens: T. choices: A. experts: E. room: rows of a rank's experts over the even share of all
    ranks' choices; R: whatever the routing.
    """

    op: str
    tokens: int
    choices: int
    experts: int
    K: int
    widths: tuple[int, ...]
    ranks: int = R
    room: float = R

    @property
    def S(self) -> int:
        """The choices of a rank, which are as many as the rows that come to it."""
        return self.tokens * self.choices

    @property
    def rows(self) -> int:
        """N."""
        return int(self.S * self.room) // 8 * 8

    @property
    def sums(self) -> Spec:
        """The type in which the product leaves its kernel."""
        return Spec(None, "bfloat16" if self.op == DISPATCH else "float32")

    @property
    def arguments(self) -> Inputs:
        """Shapes of the inputs."""
        return jax.eval_shape(self.inputs, jax.random.key(0))

    def inputs(self, key: jax.Array) -> Inputs:
        """Normal values; every choice as likely."""
        first, second, third, fourth = jax.random.split(key, 4)
        tall = self.tokens if self.op == DISPATCH else self.rows
        x = jax.random.normal(first, (tall, self.K), jnp.bfloat16)
        keys = zip(jax.random.split(second, len(self.widths)), self.widths, strict=True)
        ws = tuple(jax.random.normal(k, (self.experts, self.K, n), jnp.bfloat16) for k, n in keys)
        weight_TA = jax.random.normal(third, (self.tokens, self.choices), jnp.float32)
        every = self.ranks * self.experts
        expert_TA = jax.random.randint(fourth, weight_TA.shape, 0, every, jnp.int32)
        return Inputs(x, ws, weight_TA, self.routes(expert_TA))

    def routes(self, expert_TA: jax.Array) -> Routes:
        """Returns the routes of rank ME; rank r chooses as rank 0 does, r E experts further on."""
        on_R11 = self.experts * jnp.arange(self.ranks, dtype=jnp.int32)[:, None, None]
        one = functools.partial(route, experts=self.experts, axis="x", rows=self.rows)
        every = jax.vmap(one, axis_name="x")(
            (expert_TA[None] + on_R11) % (self.ranks * self.experts)
        )
        return jax.tree.map(lambda a: a[self.me], every)

    @property
    def me(self) -> int:
        """The rank."""
        return ME % self.ranks

    def fusions(self) -> tuple[ExpertFusion, ...]:
        """Returns the heuristic's fusion, others with its tile, and a few with other tiles."""
        sizes, out = (self.S, list(self.widths)), self.sums.out_dtype
        first = fusions.heuristic(
            self.op, self.ranks, self.S, self.experts, self.K, list(self.widths), out
        )
        wide = fusions.WIDTHS if self.op == COMBINE else (first.width,)
        nearby = [dataclasses.replace(first, comm=c, width=w) for c in fusions.COMM for w in wide]
        tiles = [tile for tile in fusions.candidates(self.op, *sizes, out) if tile != first.tile]
        nearby += [dataclasses.replace(first, tile=tile) for tile in tiles[:OTHERS]]
        legal = (fusion for fusion in nearby if fusion.comm % fusion.tile.cluster == 0)
        return tuple(dict.fromkeys((first, *legal)))

    def ghost(self, fusion: ExpertFusion, rate: float) -> GhostPeer:
        """Peers behind a link of `rate` bytes/s; 0: as fast as memory."""
        return GhostPeer(self.ranks, self.me, rate / fusion.comm, LATENCY_NS if rate else 0)

    def work(self, fusion: ExpertFusion, routes: Routes) -> tables.Tables:
        """The tables, as a page."""
        block = fusion.tile.block_m * fusion.tile.cluster
        if self.op == DISPATCH:
            made = tables.dispatch(routes, chunk=fusion.chunk, block=block, staged=fusion.rotated)
        else:
            made = tables.combine(routes, chunk=fusion.chunk, block=block)
        return jax.tree.map(lambda a: a[None], made)

    def fused(self, peers: Peers, fusion: ExpertFusion, *args: Any) -> tuple[jax.Array, ...]:
        """Runs the kernel. Returns: (N, columns) for each w; for a combine (T, D)."""
        return self._kernel(peers, fusion, Inputs(*args))[0]

    def ready(
        self, fusion: ExpertFusion, pages: jax.Array | None, *args: Any, interpret: bool = False
    ) -> tuple[jax.Array, ...]:
        """Runs the kernel without communication and waits, as the interpreter can.

        pages: for a dispatch, the result of `pages`. Returns: as `fused`; for a combine the answers
          (N, D).
        """
        fusion = dataclasses.replace(fusion, comm=0)
        more: dict[str, Any] = {} if pages is None else {"into": pages}
        if interpret:
            more |= {"blocks": 2 * fusion.tile.cluster, "interpret": True}
        peers = ReadyPeer(self.ranks, self.me)
        products, page = self._kernel(peers, fusion, Inputs(*args), **more)
        if self.op == DISPATCH:
            return products
        return (page[self.me, self.S : self.S + self.rows],)

    def _kernel(
        self, peers: Peers, fusion: ExpertFusion, inputs: Inputs, **more: Any
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        routes, work = inputs.routes, self.work(fusion, inputs.routes)
        ws = tuple(w[None] for w in inputs.ws)
        more |= {"peers": peers, "fusion": fusion, "spec": self.sums}
        if self.op == DISPATCH:
            more |= {"rows": self.rows, "flags": tables.flags(routes, fusion.chunk)}
            ys, rows = dispatch_gemm(inputs.x[None], ws, work, **more)
            return tuple(y[0] for y in ys), rows
        below = height(self.rows, fusion.tile) - self.rows
        x = jnp.pad(inputs.x, ((0, below), (0, 0)))[None]
        places, weights = tables.places(routes)[None], inputs.weight_TA[None]
        y, page = gemm_combine((x,), ws, work, places, weights, **more)
        return (y[0],), page

    def came(self, inputs: Inputs) -> jax.Array:
        """Returns x_NK, the tokens as the experts' rows; rows past the last hold any token."""
        return inputs.x[inputs.routes.choice_N % self.S // self.choices]

    def pages(self, fusion: ExpertFusion, inputs: Inputs) -> jax.Array:
        """Returns (R, height, K): the rows of `came` as every rank's page, for `ready`."""
        below = height(self.rows, fusion.tile) - self.rows
        x_NK = jnp.pad(self.came(inputs), ((0, below), (0, 0)))
        return jnp.broadcast_to(x_NK, (self.ranks, *x_NK.shape))

    def products(self, x_NK: jax.Array, inputs: Inputs) -> list[jax.Array]:
        """Returns the grouped products of rows that have arrived, by our kernel on all SMs."""
        tile = grouped.heuristic(self.S, self.widths[0], self.K, self.experts)
        sizes_E = inputs.routes.sizes_E
        return [grouped.product(x_NK, w, sizes_E, transpose=False, tile=tile) for w in inputs.ws]

    def copy(self, peers: Peers, fusion: ExpertFusion, *args: Any) -> jax.Array:
        """Runs the copies alone, of rows or, for a combine, of answers. Returns: their page."""
        inputs, tall = Inputs(*args), height(self.rows, fusion.tile)
        x, below = inputs.x[None], 0
        if self.op == COMBINE:
            below = self.S
            x = jnp.zeros((1, below + tall, self.widths[0]), jnp.float32)
        static: dict[str, Any] = {"peers": peers, "comm": fusion.comm, "chunk": fusion.chunk}
        work = self.work(fusion, inputs.routes)
        return send_rows(x, work, height=below + tall, **static)[0]

    def serial(self, peers: Peers, fusion: ExpertFusion, *args: Any) -> tuple[jax.Array, ...]:
        """Runs the copies, then the products; or product, copies, sum (COMET's baseline)."""
        inputs = Inputs(*args)
        if self.op == DISPATCH:
            return tuple(self.products(self.copy(peers, fusion, *args)[: self.rows], inputs))
        (y_ND,) = self.products(inputs.x, inputs)
        tall = height(self.rows, fusion.tile) - self.rows
        page = jnp.pad(y_ND.astype(jnp.float32), ((self.S, tall), (0, 0)))[None]
        static: dict[str, Any] = {"peers": peers, "comm": fusion.comm, "chunk": fusion.chunk}
        came = send_rows(page, self.work(fusion, inputs.routes), height=page.shape[1], **static)[0]
        y_TAD = came[: self.S].reshape(self.tokens, self.choices, -1)
        return ((inputs.weight_TA[..., None] * y_TAD).sum(1).astype(inputs.x.dtype),)

    def plain(self, peers: Peers, fusion: ExpertFusion, *args: Any) -> tuple[jax.Array, ...]:
        """Runs plain XLA's form with the fewest bytes on the wire, one step after the other.

        dispatch: copies at the link's rate, tokens to their experts' rows, our grouped products.
        combine: our grouped product, each rank's sums of its answers, copies, sum of the ranks'.
        While there are no more than twice as many ranks as choices, an all-gather's copies bring
        every token from every rank, and a reduce-scatter's the sums, in 16 bits as a model's own
        are. Beyond that an all-to-all's bring a row a choice: a few more than are needed.
        """
        if self.ranks > 2 * self.choices:
            return self.serial(peers, fusion, *args)
        inputs, R, T = Inputs(*args), self.ranks, self.tokens
        pull = functools.partial(all_gather, peers=peers, comm=fusion.comm, chunk=fusion.chunk)
        if self.op == DISPATCH:
            x_PK = pull(inputs.x[None]).at[self.me].set(inputs.x).reshape(R * T, self.K)
            return tuple(self.products(x_PK[inputs.routes.choice_N // self.choices], inputs))
        (y_ND,) = self.products(inputs.x, inputs)
        here_N = jnp.arange(self.rows) < inputs.routes.sizes_E.sum()
        to_N = jnp.where(here_N, inputs.routes.choice_N, R * self.S)
        row_P = jnp.full(R * self.S, self.rows, jnp.int32)
        row_P = row_P.at[to_N].set(jnp.arange(self.rows, dtype=jnp.int32), mode="drop")
        y_PD = y_ND.at[row_P].get(mode="fill", fill_value=0).astype(jnp.float32)
        y_RTAD = y_PD.reshape(R, T, self.choices, -1) * inputs.weight_TA[None, ..., None]
        sums_RTD = pull(y_RTAD.sum(2).astype(inputs.x.dtype))
        return (sums_RTD.sum(0, dtype=jnp.float32).astype(inputs.x.dtype),)

    def exact(self, *args: Any) -> tuple[jax.Array, ...]:
        """Returns the result of `fused` in float32, given that all ranks hold the same."""
        inputs = Inputs(*args)
        if self.op == DISPATCH:
            x_NK = self.came(inputs)
            products = (reference.product(x_NK, w, inputs.routes, False) for w in inputs.ws)
            return tuple(y.astype(inputs.x.dtype) for y in products)
        (answers_ND,) = (reference.product(inputs.x, w, inputs.routes, False) for w in inputs.ws)
        return self.weighted(answers_ND, inputs)

    def alike(self, fusion: ExpertFusion, *args: Any) -> tuple[jax.Array, ...]:
        """Returns the result of `fused`, computed by the interpreter."""
        inputs = Inputs(*args)
        if self.op == DISPATCH:
            return self.ready(fusion, self.pages(fusion, inputs), *args, interpret=True)
        return self.weighted(self.ready(fusion, None, *args, interpret=True)[0], inputs)

    def weighted(self, answers_ND: jax.Array, inputs: Inputs) -> tuple[jax.Array]:
        """Returns y_TD from this rank's answers, which stand for those to its tokens."""
        y_TAD = inputs.weight_TA[..., None] * answers_ND[inputs.routes.row_TA]
        return (y_TAD.sum(1).astype(inputs.x.dtype),)


def of_model(op: str, model: str, tokens: int, room: float = R) -> Case:
    """Returns a product of a paper's model, expert parallel over R. tokens: those of all ranks."""
    mixture = MIXTURES[model]
    sizes = tokens // R, mixture.active, mixture.experts // R
    if op == DISPATCH:
        shape = mixture.width, (mixture.hidden,) * mixture.inputs
    else:
        shape = mixture.hidden, (mixture.width,)
    return Case(op, *sizes, *shape, room=room)


def arguments(case: Case, key: jax.Array) -> tuple[Any, ...]:
    """Returns the inputs, the product's rows and, for a dispatch, all ranks' pages."""
    inputs = case.inputs(key)
    if case.op == COMBINE:
        return inputs, inputs.x, None
    return inputs, case.came(inputs), case.pages(case.fusions()[0], inputs)


def functions(case: Case, links: tuple[float, ...]) -> dict[str, Callable[..., Any]]:
    """Returns the functions that are timed together, by name; each takes `arguments`."""
    fusion, best = case.fusions()[0], f"{links[0] / 1e9:.0f}"

    def timed(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
        return lambda inputs, *_: function(*static, *inputs)

    def fused(rate: float, fusion: ExpertFusion) -> Callable[..., Any]:
        return timed(case.fused, case.ghost(fusion, rate), fusion)

    named: dict[str, Callable[..., Any]] = {
        "gemm": lambda inputs, rows, _: case.products(rows, inputs),
        "ready": lambda inputs, _, pages: case.ready(fusion, pages, *inputs),
        "free": fused(0, fusion),
    }
    for rate in links:
        peers, word = case.ghost(fusion, rate), f"{rate / 1e9:.0f}"
        named |= {
            f"fused {word}": fused(rate, fusion),
            f"copy {word}": timed(case.copy, peers, fusion),
            f"serial {word}": timed(case.serial, peers, fusion),
        }
    if case.op == DISPATCH:
        named[f"unstaged {best}"] = fused(links[0], dataclasses.replace(fusion, rotated=False))
    for comm in fusions.COMM:
        named[f"{comm} blocks {best}"] = fused(links[0], dataclasses.replace(fusion, comm=comm))
    return named


CASES = tuple((model, op) for model in MIXTURES for op in (DISPATCH, COMBINE))


def hidden(
    case: Case, links: tuple[float, ...] = LINKS, clock: bench.Clock = bench.device_clock
) -> list[dict[str, Any]]:
    """Returns a row for each link, from one series of rounds."""
    draw = jax.jit(functools.partial(arguments, case))
    inputs: list[tuple[Any, ...]] = [draw(key) for key in jax.random.split(jax.random.key(0), 3)]
    timed, best = functions(case, links), f"{links[0] / 1e9:.0f}"
    wrong = apart(timed[f"fused {best}"], lambda args, *_: case.exact(*args), inputs[0])
    used, seconds = interleaved(timed, inputs, clock)
    controls = "ready", "free", f"blocks {best}", f"unstaged {best}"
    control_times = {name: value for name, value in seconds.items() if name.endswith(controls)}
    shared = {
        "relative_error": wrong,
        "passed": wrong <= CLOSE,
        "controls_s": control_times,
        "clock": used,
    }
    gemm, fusion = seconds["gemm"], case.fusions()[0]
    return [link_row(rate, fusion, gemm, seconds, "hidden") | shared for rate in links]


def checks() -> list[Work]:
    """Returns the checks on virtual ranks; each gives a row."""
    return [(check.name, {}, functools.partial(exact, check)) for check in CHECKS]


def times() -> list[Work]:
    """Returns the timed products beside ghosts; each gives a row for every link."""

    def measure(model: str, op: str) -> list[dict[str, Any]]:
        return hidden(of_model(op, model, TOKENS, ROOM))

    return [
        (f"{model} {op}", {"case": model, "op": op}, functools.partial(measure, model, op))
        for model, op in CASES
    ]


def rehearsals() -> list[Work]:
    """Returns the programs of the first check and case, to be compiled for an H100 without one."""
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
    abstract = jax.eval_shape(functools.partial(arguments, case), jax.random.key(0))
    return [
        one(check.name, check.run, like),
        *(
            one(f"{model} {op}, {name}", function, abstract)
            for name, function in functions(case, LINKS[:1]).items()
            if name.startswith(REHEARSED)
        ),
    ]


# ---- tunings
#
# What tune.py times of the experts' products: the papers' models, on one rank beside ghosts.
#
# The rival is plain XLA, one after the other (`Case.plain`).


TUNED_TOKENS = (4096, 16384)  # of all ranks (COMET, section 5: 2048 to 32768)
WORDS = ("fused", "xla")


def tuned_cases() -> Iterator[Case]:
    """The papers' models, every number of tokens, rows for any routing."""
    for model in MIXTURES:
        for tokens in TUNED_TOKENS:
            for op in (DISPATCH, COMBINE):
                yield of_model(op, model, tokens)


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns the tunings of all cases."""
    return tuple(map(tuning, tuned_cases()))


def tuning(case: Case) -> tuned.Tuning:
    """Returns the measurement of a case, for scripts/tune.py."""
    legal = case.fusions()

    def function(fusion: ExpertFusion, interpret: bool) -> Callable[..., Any]:
        if not interpret:
            return lambda *args: case.fused(case.ghost(fusion, link()), fusion, *args)
        return functools.partial(case.alike, fusion)

    def plain(*args: Any) -> tuple[jax.Array, ...]:
        return case.plain(case.ghost(legal[0], link()), legal[0], *args)

    key = fusions.key(case.op, case.ranks, case.S, case.experts, case.K, sum(case.widths))
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
