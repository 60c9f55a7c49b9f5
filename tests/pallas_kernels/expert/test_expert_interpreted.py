"""The products inside the fused kernels, in Mosaic GPU's interpreter with race detection.

It knows no flags, so all rows are there already: which rows of which expert a tile reads, and
which it stores, for ragged and empty experts, clusters, activations. Who waits for whom:
test_expert_threads.py.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import interpret as interpreter
from pallas_kernels.expert import gemm_combine as combine
from pallas_kernels.expert import tables
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.product import ExpertFusion, height
from pallas_kernels.expert.routes import route
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.peers import Peers, ReadyPeer
from pallas_kernels.hopper.tiles import Tile

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "turned"),
    [((64, 64, 1, 1), False), ((64, 128, 1, 2), True), ((128, 64, 2, 1), False)],
)
def test_dispatched_product(tile, turned, seed):
    m, n, warpgroups, cluster = tile
    fusion = ExpertFusion(Tile(m, n, 64, 2, warpgroups, cluster), 0, 8, band=2)

    def make(routes, block):
        return tables.dispatch(routes, chunk=8, block=block)

    work, sizes_E = tables_of(make, m * cluster, seed)
    F = 192
    x, w = values((168, K), (1, E, *((F, K) if turned else (K, F))), seed=seed)
    end = int(sizes_E.sum())
    assert 0 < sizes_E[0] < 8 * E and sizes_E[1] == 0 and 64 < end < 168
    rows = jnp.where(jnp.arange(168)[:, None] < end, x, jnp.nan)
    into = jnp.full((R, height(168, fusion.tile), K), jnp.nan, x.dtype).at[ME, :168].set(rows)
    (y,), _ = dispatch_gemm(
        x[None], (w,), pages(work), None, into, rows=168, flags=1, peers=ReadyPeer(R, ME),
        fusion=fusion, spec=Spec(None, "float32"), turned=turned, blocks=2 * cluster,
        interpret=True,
    )  # fmt: skip
    group_N = np.repeat(np.arange(E), sizes_E)
    w = np.asarray(w[0], np.float64)
    w = (w.swapaxes(1, 2) if turned else w)[group_N]
    want = np.einsum("nk,nkf->nf", np.asarray(x[:end], np.float64), w)
    np.testing.assert_array_equal(y[0, :end], want)
    np.testing.assert_array_equal(y[0, end:], 0)


@pytest.mark.slow
@pytest.mark.parametrize(("warpgroups", "cluster"), [(1, 2), (2, 1)])
def test_combined_product(warpgroups, cluster, seed):
    """Two products by transposed weights, added; others' answers would arrive above."""
    fusion = ExpertFusion(Tile(64 * warpgroups, 128, 64, 2, warpgroups, cluster), 0, 8, width=1)

    def make(routes, block):
        return tables.combine(routes, chunk=8, block=block)

    work, sizes_E = tables_of(make, fusion.tile.block_m * cluster, seed)
    D, S, end = 256, T * A, int(sizes_E.sum())
    x, w, v, u = values((168, K), (1, E, D, K), (168, 2 * K), (1, E, D, 2 * K), seed=seed)
    into = jnp.full((R, S + 168, D), jnp.nan, jnp.float32)
    live = jnp.arange(168)[:, None] < end
    _, page = combine.gemm_combine(
        tuple(jnp.where(live, h, jnp.nan)[None] for h in (x, v)),
        (w, u),
        pages(work),
        jnp.zeros((1, T, A), jnp.int32),
        jnp.zeros((1, T, A), jnp.float32),
        None,
        jax.new_ref(into),
        peers=ReadyPeer(R, ME),
        fusion=fusion,
        spec=Spec(None, "float32"),
        turned=True,
        blocks=2 * cluster,
        interpret=True,
    )
    group_N = np.repeat(np.arange(E), sizes_E)
    x, w, v, u = (np.asarray(a, np.float64) for a in (x[:end], w[0], v[:end], u[0]))
    want = np.einsum("nk,ndk->nd", x, w[group_N]) + np.einsum("nk,ndk->nd", v, u[group_N])
    np.testing.assert_array_equal(page[ME, S : S + end], want)
    assert np.isnan(page[ME, :S]).all() and np.isnan(page[ME, S + end :]).all()


@pytest.mark.parametrize(("block", "choices"), [(0, 3), (1, 2 * combine.TOGETHER + 3)])
def test_weighted_sums_of_answers(block, choices, seed):
    """Of a last block of columns that is not full; rows that nobody wrote are full of NaN."""
    D, wide, tokens = 384, 256, 5
    random = np.random.default_rng(seed)
    page = np.full((tokens * choices + 4, D), np.nan, np.float32)
    places = random.permutation(len(page))[: tokens * choices].reshape(tokens, choices)
    places = np.where(random.random(places.shape) < 0.3, -1, places).astype(np.int32)
    written = places[places >= 0]
    page[written] = random.integers(-3, 4, (len(written), D))
    weights = random.integers(-2, 3, places.shape).astype(np.float32)

    def body(page, places, weights, y):
        gmem = {"page": page, "places": places, "weights": weights, "y": y}
        me = jax.lax.axis_index("block")
        combine._add_up(gmem, Peers(1), jnp.int32(block), wide, me, 2)

    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1, tokens, D), jnp.float32),
        grid=(2,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpreter.params(),
    )(page[None], places[None], weights[None])
    columns = slice(block * wide, min(D, (block + 1) * wide))
    rows = np.where(places[:, :, None] >= 0, page[places], 0)[:, :, columns]
    np.testing.assert_array_equal(y[0, :, columns], (rows * weights[:, :, None]).sum(1))
