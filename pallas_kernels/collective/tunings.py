"""What a tuner measures of the fused products: one rank of full size beside ghosts, on one GPU.

The rival is what plain XLA does, one after the other: the same copies alone at a link's rate, and
the product by XLA (for a scatter: product, copies, sum). The link is EMULATED (peers.GhostPeer):
tiles, waves and communication blocks are the real ones, no NVLink is crossed. The all-reduce of
decoding is not here: its rival's time is that of NCCL's steps, which one GPU does not have.

Legend: R ranks, m rows of all ranks, K contracted, N columns; pages are of one rank each.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.collective import api, plans
from pallas_kernels.collective.all_gather_gemm import all_gather, all_gather_gemm
from pallas_kernels.collective.cases import DENSE
from pallas_kernels.collective.core import Plan
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.collective.peers import GhostPeer, Peers, ReadyPeer
from pallas_kernels.gemm.hopper import Spec

RANKS, ME = 8, 3
ROWS = (1024, 2048, 4096, 8192)  # m (chosen: smaller products have nothing to hide behind)
LATENCY_NS = 2000  # (chosen: a signal over NVLink takes 1 to 2 us)
LINKS = {"nvidia_h800": 178e9}  # bytes/s usable of an NVLink that is cut; else plans.LINK_BYTES
BEST = 8  # plans that are timed, best first by the model (chosen)
WORDS = ("fused", "xla")


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of rank ME of R; m: rows of all."""

    op: Literal["all_gather_matmul", "matmul_reduce_scatter"]
    m: int
    K: int
    N: int
    ranks: int = RANKS

    @property
    def is_gather(self) -> bool:
        """Whether rows come before the product."""
        return self.op == api.GATHER

    @property
    def spec(self) -> Spec:
        """Partial sums cross ranks in float32."""
        return Spec(None, "bfloat16" if self.is_gather else "float32")

    @property
    def rows(self) -> int:
        """Of a page."""
        return self.m // self.ranks

    def inputs(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x by ranks (of a scatter by owners) and w."""
        left, right = jax.random.split(key)
        x = jax.random.normal(left, (self.ranks, self.rows, self.K), jnp.bfloat16)
        return x, jax.random.normal(right, (1, self.K, self.N), jnp.bfloat16)

    def plans(self) -> tuple[Plan, ...]:
        """The heuristic's, then the next best by its model."""
        legal = plans.candidates(self.op, self.rows, [self.N], self.spec.out_dtype)
        rest = (self.ranks, self.rows, self.K, [self.N], self.spec.out_dtype)
        return tuple(sorted(legal, key=lambda p: plans.seconds(self.op, p, *rest))[:BEST])

    def fused(self, plan: Plan, interpret: bool) -> Callable[..., jax.Array]:
        """Of x and w: the product's pages, those that leave the rank. Interpreted: nobody waits."""
        peers = ReadyPeer(self.ranks, ME % self.ranks) if interpret else self.ghost(plan)
        if interpret:
            plan = dataclasses.replace(plan, comm=0)
        static: dict[str, Any] = {"rows": self.rows, "peers": peers, "plan": plan}
        static |= {"spec": self.spec, "interpret": interpret}
        if interpret:
            static["blocks"] = 2 * plan.tile.cluster

        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            if self.is_gather:
                return all_gather_gemm(x, (w,), **static)[0][0]
            return gemm_reduce_scatter((x,), (w,), **static)[1]

        return run

    def ghost(self, plan: Plan) -> Peers:
        """Peers behind this GPU's link."""
        rate = LINKS.get(tuned.device_kind() or "", plans.LINK_BYTES)
        return GhostPeer(self.ranks, ME % self.ranks, rate / plan.comm, LATENCY_NS)

    def serial(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The copies as the best plan makes them, then XLA's product; or the other way round."""
        plan = self.plans()[0]
        copy = functools.partial(
            all_gather, peers=self.ghost(plan), comm=plan.comm, chunk=plan.chunk
        )
        if self.is_gather:
            return jnp.einsum("rmk,kn->rmn", copy(x), w[0])
        part = jnp.einsum("rmk,kn->rmn", x, w[0], preferred_element_type=jnp.float32)
        return copy(part).sum(0).astype(x.dtype)

    def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The result of `fused`; own sums of a scatter, which it leaves elsewhere, NaN."""
        y = jnp.einsum("rmk,kn->rmn", x, w[0], preferred_element_type=jnp.float32)
        if self.is_gather:
            return y.astype(x.dtype)
        return y.at[ME % self.ranks].set(jnp.nan)


def cases() -> Iterator[Case]:
    """The papers' feed-forward layers, every number of rows."""
    for model in DENSE.values():
        for m in ROWS:
            up, down = model.up(m), model.down(m, 4)
            yield Case("all_gather_matmul", m, up.k, up.n)
            yield Case("matmul_reduce_scatter", m, down.k, down.n)


def tunings() -> tuple[tuned.Tuning, ...]:
    """Of all cases."""
    return tuple(map(tuning, cases()))


def tuning(case: Case) -> tuned.Tuning:
    """One measurement."""
    key = api.key(case.op, case.ranks, case.rows, case.K, case.N)
    return tuned.Tuning(
        case.op, key, case.plans(), case.fused, case.inputs, case.serial, want=case.exact,
        words=WORDS,
    )  # fmt: skip
