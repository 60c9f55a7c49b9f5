"""The expert kernels timed on one GPU: a rank of full size beside ghosts (collective/peers.py).

Every rank holds the same tokens and chooses as the rank before it does, the experts of one rank
further on: so what a rank sends is what comes to it, and a ghost's results are complete. The link
is EMULATED, as in collective/tunings.py. The rival does what plain XLA does, one after the other:

    dispatch  copies at the link's rate | tokens to their experts' rows | our grouped products
    combine   our grouped product | each rank's sums of its answers | copies | sum of the ranks'

While there are no more than twice as many ranks as choices, an all-gather's copies bring every
token from every rank, and a reduce-scatter's the sums, in 16 bits as a model's own are. Beyond that
an all-to-all's bring a row a choice: a few more than the tokens that are needed.

`Case` is what a tuner times, and bench.py with its controls.

Legend: as in routes.py; K contracted, F and D columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.collective.all_gather_gemm import all_gather
from pallas_kernels.collective.cases import RANKS
from pallas_kernels.collective.peers import GhostPeer, Peers, ReadyPeer
from pallas_kernels.collective.tunings import LATENCY_NS, ME, WORDS, link
from pallas_kernels.expert import plans, reference, tables
from pallas_kernels.expert.cases import MIXTURES
from pallas_kernels.expert.copies import send_rows
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.gemm_combine import gemm_combine
from pallas_kernels.expert.plans import COMBINE, DISPATCH
from pallas_kernels.expert.product import Plan, height
from pallas_kernels.expert.routes import Routes, route
from pallas_kernels.grouped import hopper as grouped
from pallas_kernels.hopper.activations import Spec

Array = jax.Array
TOKENS = (4096, 16384)  # of all ranks (COMET, section 5: 2048 to 32768)
TILES = 3  # of other tiles than the heuristic's, timed as well (chosen)


class Inputs(NamedTuple):
    """x: tokens (T, K), or rows of the experts (N, K). ws: (E, K, columns) each.

    weight_TA: of a combine. routes: of rank ME.
    """

    x: Array
    ws: tuple[Array, ...]
    weight_TA: Array
    routes: Routes


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of rank ME of R. tokens: T. choices: A. experts: E. room: rows over even shares.

    room: of a rank's experts over the even share of all ranks' choices; R: whatever the routing.
    """

    op: str
    tokens: int
    choices: int
    experts: int
    K: int
    widths: tuple[int, ...]
    ranks: int = RANKS
    room: float = RANKS

    @property
    def S(self) -> int:
        """Choices of a rank, and the rows that come to it."""
        return self.tokens * self.choices

    @property
    def rows(self) -> int:
        """N."""
        return int(self.S * self.room) // 8 * 8

    @property
    def sums(self) -> Spec:
        """In what the product leaves its kernel."""
        return Spec(None, "bfloat16" if self.op == DISPATCH else "float32")

    @property
    def arguments(self) -> Inputs:
        """Shapes of the inputs."""
        return jax.eval_shape(self.inputs, jax.random.key(0))

    def inputs(self, key: Array) -> Inputs:
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

    def routes(self, expert_TA: Array) -> Routes:
        """Of rank ME, where rank r chooses as rank 0, r E experts on."""
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

    def plans(self) -> tuple[Plan, ...]:
        """The heuristic's; others with its tile; a few with other tiles."""
        sizes, out = (self.S, list(self.widths)), self.sums.out_dtype
        first = plans.heuristic(
            self.op, self.ranks, self.S, self.experts, self.K, list(self.widths), out
        )
        wide = plans.WIDTHS if self.op == COMBINE else (first.width,)
        found = [dataclasses.replace(first, comm=c, width=w) for c in plans.COMM for w in wide]
        tiles = [tile for tile in plans.candidates(self.op, *sizes, out) if tile != first.tile]
        found += [dataclasses.replace(first, tile=tile) for tile in tiles[:TILES]]
        legal = (plan for plan in found if plan.comm % plan.tile.cluster == 0)
        return tuple(dict.fromkeys((first, *legal)))

    def ghost(self, plan: Plan, rate: float) -> GhostPeer:
        """Peers behind a link of `rate` bytes/s; 0: as fast as memory."""
        return GhostPeer(self.ranks, self.me, rate / plan.comm, LATENCY_NS if rate else 0)

    def work(self, plan: Plan, routes: Routes) -> tables.Tables:
        """The tables, as a page."""
        block = plan.tile.block_m * plan.tile.cluster
        if self.op == DISPATCH:
            made = tables.dispatch(routes, chunk=plan.chunk, block=block, staged=plan.rotated)
        else:
            made = tables.combine(routes, chunk=plan.chunk, block=block)
        return jax.tree.map(lambda a: a[None], made)

    def fused(self, peers: Peers, plan: Plan, *args: Any) -> tuple[Array, ...]:
        """The kernel: of each w (N, columns); of a combine (T, D)."""
        return self._kernel(peers, plan, Inputs(*args))[0]

    def ready(
        self, plan: Plan, pages: Array | None, *args: Any, interpret: bool = False
    ) -> tuple[Array, ...]:
        """The kernel where nothing travels and nobody waits, which the interpreter can run.

        pages: of a dispatch, `pages`. Returns: as `fused`, of a combine the answers (N, D).
        """
        plan = dataclasses.replace(plan, comm=0)
        more: dict[str, Any] = {} if pages is None else {"into": pages}
        if interpret:
            more |= {"blocks": 2 * plan.tile.cluster, "interpret": True}
        peers = ReadyPeer(self.ranks, self.me)
        found, page = self._kernel(peers, plan, Inputs(*args), **more)
        if self.op == DISPATCH:
            return found
        return (page[self.me, self.S : self.S + self.rows],)

    def _kernel(
        self, peers: Peers, plan: Plan, given: Inputs, **more: Any
    ) -> tuple[tuple[Array, ...], Array]:
        routes, work = given.routes, self.work(plan, given.routes)
        ws = tuple(w[None] for w in given.ws)
        more |= {"peers": peers, "plan": plan, "spec": self.sums}
        if self.op == DISPATCH:
            more |= {"rows": self.rows, "flags": tables.flags(routes, plan.chunk)}
            ys, rows = dispatch_gemm(given.x[None], ws, work, **more)
            return tuple(y[0] for y in ys), rows
        below = height(self.rows, plan.tile) - self.rows
        x = jnp.pad(given.x, ((0, below), (0, 0)))[None]
        places, weights = tables.places(routes)[None], given.weight_TA[None]
        y, page = gemm_combine((x,), ws, work, places, weights, **more)
        return (y[0],), page

    def came(self, given: Inputs) -> Array:
        """x_NK: the tokens as the experts' rows; past those that came any token."""
        return given.x[given.routes.choice_N % self.S // self.choices]

    def pages(self, plan: Plan, given: Inputs) -> Array:
        """(R, height, K): those rows where every rank's are, for `ready`."""
        below = height(self.rows, plan.tile) - self.rows
        x_NK = jnp.pad(self.came(given), ((0, below), (0, 0)))
        return jnp.broadcast_to(x_NK, (self.ranks, *x_NK.shape))

    def products(self, x_NK: Array, given: Inputs) -> list[Array]:
        """The grouped products by our kernel on all SMs, of rows that are there."""
        tile = grouped.heuristic(self.S, self.widths[0], self.K, self.experts)
        sizes_E = given.routes.sizes_E
        return [grouped.product(x_NK, w, sizes_E, transpose=False, tile=tile) for w in given.ws]

    def copy(self, peers: Peers, plan: Plan, *args: Any) -> Array:
        """The kernel's copies alone, of rows or, for a combine, of answers: its page of them."""
        given, tall = Inputs(*args), height(self.rows, plan.tile)
        x, below = given.x[None], 0
        if self.op == COMBINE:
            below = self.S
            x = jnp.zeros((1, below + tall, self.widths[0]), jnp.float32)
        static: dict[str, Any] = {"peers": peers, "comm": plan.comm, "chunk": plan.chunk}
        work = self.work(plan, given.routes)
        return send_rows(x, work, height=below + tall, **static)[0]

    def serial(self, peers: Peers, plan: Plan, *args: Any) -> tuple[Array, ...]:
        """The kernel's copies, then the products; or product, copies, sum (COMET's baseline)."""
        given = Inputs(*args)
        if self.op == DISPATCH:
            return tuple(self.products(self.copy(peers, plan, *args)[: self.rows], given))
        (y_ND,) = self.products(given.x, given)
        tall = height(self.rows, plan.tile) - self.rows
        page = jnp.pad(y_ND.astype(jnp.float32), ((self.S, tall), (0, 0)))[None]
        static: dict[str, Any] = {"peers": peers, "comm": plan.comm, "chunk": plan.chunk}
        came = send_rows(page, self.work(plan, given.routes), height=page.shape[1], **static)[0]
        y_TAD = came[: self.S].reshape(self.tokens, self.choices, -1)
        return ((given.weight_TA[..., None] * y_TAD).sum(1).astype(given.x.dtype),)

    def plain(self, peers: Peers, plan: Plan, *args: Any) -> tuple[Array, ...]:
        """What plain XLA does with the fewest bytes; see the module."""
        if self.ranks > 2 * self.choices:
            return self.serial(peers, plan, *args)
        given, R, T = Inputs(*args), self.ranks, self.tokens
        pull = functools.partial(all_gather, peers=peers, comm=plan.comm, chunk=plan.chunk)
        if self.op == DISPATCH:
            x_PK = pull(given.x[None]).at[self.me].set(given.x).reshape(R * T, self.K)
            return tuple(self.products(x_PK[given.routes.choice_N // self.choices], given))
        (y_ND,) = self.products(given.x, given)
        here_N = jnp.arange(self.rows) < given.routes.sizes_E.sum()
        to_N = jnp.where(here_N, given.routes.choice_N, R * self.S)
        row_P = jnp.full(R * self.S, self.rows, jnp.int32)
        row_P = row_P.at[to_N].set(jnp.arange(self.rows, dtype=jnp.int32), mode="drop")
        y_PD = y_ND.at[row_P].get(mode="fill", fill_value=0).astype(jnp.float32)
        y_RTAD = y_PD.reshape(R, T, self.choices, -1) * given.weight_TA[None, ..., None]
        sums_RTD = pull(y_RTAD.sum(2).astype(given.x.dtype))
        return (sums_RTD.sum(0, dtype=jnp.float32).astype(given.x.dtype),)

    def exact(self, *args: Any) -> tuple[Array, ...]:
        """The result of `fused`, where all ranks are alike."""
        given = Inputs(*args)
        if self.op == DISPATCH:
            x_NK = self.came(given)
            products = (reference.product(x_NK, w, given.routes, False) for w in given.ws)
            return tuple(y.astype(given.x.dtype) for y in products)
        (answers_ND,) = (reference.product(given.x, w, given.routes, False) for w in given.ws)
        return self.weighted(answers_ND, given)

    def alike(self, plan: Plan, *args: Any) -> tuple[Array, ...]:
        """The result of `fused` by the interpreter."""
        given = Inputs(*args)
        if self.op == DISPATCH:
            return self.ready(plan, self.pages(plan, given), *args, interpret=True)
        return self.weighted(self.ready(plan, None, *args, interpret=True)[0], given)

    def weighted(self, answers_ND: Array, given: Inputs) -> tuple[Array]:
        """y_TD of this rank's answers, which are its tokens' too."""
        y_TAD = given.weight_TA[..., None] * answers_ND[given.routes.row_TA]
        return (y_TAD.sum(1).astype(given.x.dtype),)


def of_model(op: str, model: str, tokens: int, room: float = RANKS) -> Case:
    """A product of a paper's model, expert parallel over RANKS. tokens: of all ranks."""
    mixture = MIXTURES[model]
    sizes = tokens // RANKS, mixture.active, mixture.experts // RANKS
    if op == DISPATCH:
        shape = mixture.width, (mixture.hidden,) * mixture.inputs
    else:
        shape = mixture.hidden, (mixture.width,)
    return Case(op, *sizes, *shape, room=room)


def cases() -> Iterator[Case]:
    """The papers' models, every number of tokens, rows for any routing."""
    for model in MIXTURES:
        for tokens in TOKENS:
            for op in (DISPATCH, COMBINE):
                yield of_model(op, model, tokens)


def tunings() -> tuple[tuned.Tuning, ...]:
    """Of all cases."""
    return tuple(map(tuning, cases()))


def tuning(case: Case) -> tuned.Tuning:
    """One measurement."""
    legal = case.plans()

    def function(plan: Plan, interpret: bool) -> Callable[..., Any]:
        if not interpret:
            return lambda *args: case.fused(case.ghost(plan, link()), plan, *args)
        return functools.partial(case.alike, plan)

    def plain(*args: Any) -> tuple[Array, ...]:
        return case.plain(case.ghost(legal[0], link()), legal[0], *args)

    key = plans.key(case.op, case.ranks, case.S, case.experts, case.K, sum(case.widths))
    return tuned.Tuning(
        case.op, key, legal, function, case.inputs, plain, want=case.exact, words=WORDS,
        link="emulated",
    )  # fmt: skip
