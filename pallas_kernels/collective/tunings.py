"""The fused products timed on one GPU: a rank of full size beside ghosts (peers.GhostPeer).

The link is EMULATED: tiles, waves and communication blocks are the real ones, no NVLink is crossed.
The rival does what plain XLA does, one after the other: the same copies alone at the link's rate,
and the product by XLA; for a scatter product, copies, sum. A model's own sums travel in 16 bits, so
the rival's do, where the kernels send float32; for the all-reduce of decoding in the fewest copies
that can be, a scatter's and a gather's, each with one latency: no NCCL has less. So a table that
says 'fused' does not flatter.

`Case` is what a tuner times, and bench.py with its controls.

Legend: R ranks, m rows of all ranks, K contracted, N columns.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.collective import api, plans
from pallas_kernels.collective.all_gather_gemm import all_gather, all_gather_gemm
from pallas_kernels.collective.api import GATHER, REDUCE, SCATTER
from pallas_kernels.collective.cases import DENSE
from pallas_kernels.collective.core import Plan
from pallas_kernels.collective.gemm_all_reduce import gemm_all_reduce
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.collective.peers import GhostPeer, Peers, ReadyPeer
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.cards import SMS

RANKS, ME = 8, 3
ROWS = (1024, 2048, 4096, 8192)  # m (chosen: smaller products have nothing to hide behind)
DECODING = (8, 16, 32, 64, 128)  # m of the all-reduce
LATENCY_NS = 2000  # (chosen: a signal over NVLink takes 1 to 2 us)
LINKS = {"nvidia_h800": 178e9}  # bytes/s usable of an NVLink that is cut; else plans.LINK_BYTES
BEST = 8  # plans that are timed, best first by the model (chosen)
WORDS = ("fused", "xla")


def link() -> float:
    """Bytes/s of this GPU's link in one direction."""
    return LINKS.get(tuned.slug(tuned.target() or ""), plans.LINK_BYTES)


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of rank ME of R; m: rows of all. K, N: of the rank."""

    op: str
    m: int
    K: int
    N: int
    ranks: int = RANKS

    @property
    def spec(self) -> Spec:
        """Partial sums cross ranks in float32."""
        return Spec(None, "bfloat16" if self.op == GATHER else "float32")

    @property
    def rows(self) -> int:
        """Of a page."""
        return self.m if self.op == REDUCE else self.m // self.ranks

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """x, of a scatter by owners, and w."""
        pages = self.ranks if self.op == SCATTER else 1
        x, w = (pages, self.rows, self.K), (1, self.K, self.N)
        return jax.ShapeDtypeStruct(x, jnp.bfloat16), jax.ShapeDtypeStruct(w, jnp.bfloat16)

    def inputs(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Normal values."""
        keys = jax.random.split(key)
        pairs = zip(keys, self.arguments, strict=True)
        return tuple(jax.random.normal(k, a.shape, a.dtype) for k, a in pairs)

    def plans(self) -> tuple[Plan, ...]:
        """The heuristic's, then the next best by its model."""
        legal = plans.candidates(self.op, self.rows, [self.N], self.spec.out_dtype)
        rest = (self.ranks, self.rows, self.K, [self.N], self.spec.out_dtype)
        return tuple(sorted(legal, key=lambda p: plans.seconds(self.op, p, *rest))[:BEST])

    @property
    def me(self) -> int:
        """The rank."""
        return ME % self.ranks

    def ghost(self, plan: Plan, rate: float) -> GhostPeer:
        """Peers behind a link of `rate` bytes/s; 0: as fast as memory."""
        tile, senders = plan.tile, plan.comm
        if not senders:  # all blocks that compute
            rows = -(-self.rows // (tile.block_m * tile.cluster)) * tile.cluster
            senders = min(rows * -(-self.N // tile.block_n), SMS)
        return GhostPeer(self.ranks, self.me, rate / senders, LATENCY_NS if rate else 0)

    def fused(self, peers: Peers, plan: Plan, x: jax.Array, w: jax.Array) -> jax.Array:
        """The kernel, its pages padded to a tile: (R, m / R, N) of a gather, else (1, rows, N)."""
        static: dict[str, Any] = {"peers": peers, "plan": plan, "spec": self.spec}
        static |= {"rows": self.rows}
        x = jnp.pad(x, ((0, 0), (0, max(0, plan.tile.block_m - self.rows)), (0, 0)))
        if self.op == GATHER:
            y = all_gather_gemm(x, (w,), **static)[0][0]
        elif self.op == SCATTER:
            y = gemm_reduce_scatter((x,), (w,), **static)[0]
        else:
            y = gemm_all_reduce(x, w, **static)
        return y[:, : self.rows]

    def ready(
        self, plan: Plan, x: jax.Array, w: jax.Array, interpret: bool = False
    ) -> tuple[jax.Array, ...]:
        """The kernel where nothing travels and nobody waits, which the interpreter can run.

        x: pages of all ranks. Returns: as `fused`; of a scatter the sums of gemm_reduce_scatter.
        Raises: NotImplementedError for an all-reduce, whose every tile waits for all ranks.
        """
        plan = dataclasses.replace(plan, comm=0)
        static: dict[str, Any] = {"peers": ReadyPeer(self.ranks, self.me), "plan": plan}
        static |= {"rows": self.rows, "spec": self.spec}
        if interpret:
            static |= {"blocks": 2 * plan.tile.cluster, "interpret": True}
        if self.op == GATHER:
            return tuple(all_gather_gemm(x, (w,), **static)[0])
        if self.op == SCATTER:
            return tuple(gemm_reduce_scatter((x,), (w,), **static)[1:])
        raise NotImplementedError(f"{REDUCE}: nothing of it can run without flags, as on a GPU")

    def product(self, x: jax.Array, w: jax.Array, dtype: str) -> jax.Array:
        """XLA's, of the pages that are there."""
        y = jnp.einsum("pmk,kn->pmn", x, w[0], preferred_element_type=jnp.float32)
        return y.astype(dtype)

    def copy(self, peers: Peers, plan: Plan, sent: jax.Array) -> jax.Array:
        """The copies alone, pulled for either kind: as many and as large. sent: x, or sums."""
        if self.op != REDUCE:
            return all_gather(sent, peers=peers, comm=plan.comm, chunk=plan.chunk)
        static: dict[str, Any] = {"peers": peers, "comm": self.ranks - 1, "chunk": 8}
        parts = sent.reshape(self.ranks, 8, -1)
        mine = all_gather(parts, **static).sum(0, keepdims=True)
        return all_gather(mine, **static).reshape(sent.shape)

    def serial(
        self, peers: Peers, plan: Plan, x: jax.Array, w: jax.Array, wire: str | None = None
    ) -> jax.Array:
        """Copies, then XLA's product; or product, copies, sum.

        wire: type of the sums that travel; None: the kernel's.
        """
        if self.op == GATHER:
            return self.product(self.copy(peers, plan, x), w, self.spec.out_dtype)
        came = self.copy(peers, plan, self.product(x, w, wire or self.spec.out_dtype))
        return came.sum(0, keepdims=True, dtype=jnp.float32).astype(x.dtype)

    def alone(self, plan: Plan, rate: float) -> GhostPeer:
        """Peers of `copy` and `serial`, whose blocks share the link; an all-reduce has its own."""
        if self.op == REDUCE:
            return GhostPeer(self.ranks, self.me, rate / (self.ranks - 1), LATENCY_NS)
        return self.ghost(plan, rate)

    def alike(self, plan: Plan, x: jax.Array, w: jax.Array) -> jax.Array:
        """The result of `fused` by the interpreter."""
        if self.op == GATHER:
            return self.ready(plan, jnp.repeat(x, self.ranks, 0), w, interpret=True)[0]
        sums, own = self.ready(plan, x, w, interpret=True)
        sums = sums.at[self.me].set(own[self.me * (self.ranks + 1)])
        return sums.sum(0, keepdims=True).astype(x.dtype)

    def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The result of `fused`, where all ranks are alike."""
        y = jnp.einsum("pmk,kn->pmn", x, w[0], preferred_element_type=jnp.float32)
        if self.op == GATHER:
            y = jnp.broadcast_to(y, (self.ranks, *y.shape[1:]))
        else:
            y = self.ranks // len(x) * y.sum(0, keepdims=True)
        return y.astype(x.dtype)


def cases() -> Iterator[Case]:
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
    """Of all cases."""
    return tuple(map(tuning, cases()))


def tuning(case: Case) -> tuned.Tuning:
    """One measurement."""
    legal = case.plans()

    def function(plan: Plan, interpret: bool) -> Callable[..., jax.Array]:
        if interpret:
            return lambda x, w: case.alike(plan, x, w)
        return lambda x, w: case.fused(case.ghost(plan, link()), plan, x, w)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return case.serial(case.alone(legal[0], link()), legal[0], x, w, wire="bfloat16")

    key = api.key(case.op, case.ranks, case.rows, case.K, case.N)
    return tuned.Tuning(
        case.op, key, legal, function, case.inputs, plain, want=case.exact, words=WORDS,
        link="emulated",
    )  # fmt: skip
