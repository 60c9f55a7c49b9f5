"""The products inside the fused kernels, in Mosaic GPU's interpreter with race detection.

It knows no flags, so all rows are there already: which rows of which expert a tile reads, and
which it stores, for ragged and empty experts, clusters, activations. Who waits for whom:
test_expert_protocol.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import interpret as interpreter
from pallas_kernels.collective.peers import ReadyPeer
from pallas_kernels.expert import tables
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.product import Plan, height
from pallas_kernels.expert.routes import route
from pallas_kernels.gemm.hopper import Spec, Tile

R, ME, E, T, A, K = 2, 1, 3, 50, 2, 64


@pytest.fixture(autouse=True)
def _no_races():
    with interpreter.checked():
        yield


def tables_of(make, block, seed):
    """Of rank ME, with a leading page: its first expert has few rows, its second none."""
    random = np.random.default_rng(seed)
    experts = random.choice(R * E, (R * T, A), p=[0.1, 0.1, 0.1, 0.04, 0, 0.66]).astype(np.int32)

    def made(experts):
        routes = route(experts, experts=E, axis="x", rows=168)
        return jax.tree.map(lambda a: a[None], (make(routes, block), routes.sizes_E))

    mesh = Mesh(np.array(jax.devices()[:R]), ("x",))
    step = jax.shard_map(made, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a[ME])), jax.jit(step)(experts))


def values(*shapes, seed):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.integers(-2, 3, shape), jnp.bfloat16) for shape in shapes]


def pages(work):
    return jax.tree.map(lambda a: a[None], work)


@pytest.mark.parametrize(
    ("tile", "turned"),
    [
        pytest.param((64, 64, 1, 1), False),
        pytest.param((64, 128, 1, 2), True, marks=pytest.mark.slow),
        pytest.param((128, 64, 2, 1), False, marks=pytest.mark.slow),
    ],
)
def test_dispatched_product(tile, turned, seed):
    m, n, warpgroups, cluster = tile
    plan = Plan(Tile(m, n, 64, 2, warpgroups, cluster), 0, 8, band=2)

    def make(routes, block):
        return tables.dispatch(routes, chunk=8, block=block)

    work, sizes_E = tables_of(make, m * cluster, seed)
    F = 192
    x, w = values((168, K), (1, E, *((F, K) if turned else (K, F))), seed=seed)
    end = int(sizes_E.sum())
    assert 0 < sizes_E[0] < 8 * E and sizes_E[1] == 0 and 64 < end < 168
    rows = jnp.where(jnp.arange(168)[:, None] < end, x, jnp.nan)
    into = jnp.full((R, height(168, plan.tile), K), jnp.nan, x.dtype).at[ME, :168].set(rows)
    (y,), _ = dispatch_gemm(
        x[None], (w,), pages(work), None, into, rows=168, flags=1, peers=ReadyPeer(R, ME),
        plan=plan, spec=Spec(None, "float32"), turned=turned, blocks=2 * cluster, interpret=True,
    )  # fmt: skip
    group_N = np.repeat(np.arange(E), sizes_E)
    w = np.asarray(w[0], np.float64)
    w = (w.swapaxes(1, 2) if turned else w)[group_N]
    want = np.einsum("nk,nkf->nf", np.asarray(x[:end], np.float64), w)
    np.testing.assert_array_equal(y[0, :end], want)
    np.testing.assert_array_equal(y[0, end:], 0)
