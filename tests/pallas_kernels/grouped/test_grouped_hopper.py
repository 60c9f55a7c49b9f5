"""The grouped kernels in Pallas' interpreter, with race detection, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, grouped_matmul, interpret
from pallas_kernels.grouped import hopper, hopper_weights, tiling
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.tiles import Tile
from tests.gemm_oracle import relative
from tests.grouped_oracle import arrays, oracle, split

SLOW = pytest.mark.slow
SMALL = Tile(64, 64, 64, 2, 1)
WIDE = Tile(128, 128, 64, 2)
PAIR = Tile(64, 128, 64, 2, 1, cluster=2)
LARGE = Tile(128, 192, 64, 3, cluster=2)
# (M, K, N), sizes, tile, b transposed, thread blocks.
PRODUCTS = {
    # Two warpgroups, one of them without a row; tails in K and N; a second tile; rows past the sum.
    "tails": ((136, 72, 72), [30, 0, 66], WIDE, False, 1),
    "transposed": ((136, 136, 72), [70, 5, 61], WIDE, True, 1),
    "cluster": ((200, 64, 192), [7, 0, 130, 30], PAIR, False, 2),
    "cluster transposed": ((130, 128, 200), [130], LARGE, True, 2),
    "all empty": ((72, 64, 64), [0, 0], SMALL, False, 2),
    "one row": ((1, 5, 3), [0, 1], SMALL, False, 1),
    "many groups": ((40, 64, 64), split(0, 36, 24, 0.5), SMALL, False, 4),
    "past the rows": ((64, 64, 64), [50, 30, 5], SMALL, True, 1),
}
# The same of a^T b: K x N results.
WEIGHTS = {
    # Two warpgroups that clean b together; a group within one step; tails; an empty group.
    "tails": ((200, 72, 72), [70, 0, 9, 90], WIDE, 1),
    "cluster": ((200, 200, 64), [7, 130, 0, 63], PAIR, 2),
    "three steps": ((264, 64, 192), [201, 40], LARGE, 2),
    "all empty": ((72, 64, 64), [0, 0], SMALL, 2),
    "one row": ((1, 5, 3), [0, 1], SMALL, 1),
    "many groups": ((40, 64, 64), split(0, 36, 24, 0.5), SMALL, 4),
    "past the rows": ((64, 64, 64), [50, 30, 5], SMALL, 1),
}
DEFAULT = ("tails",)


def cases(table):
    return [pytest.param(n, marks=() if n in DEFAULT else SLOW) for n in table]


def rounded(*values):
    """bf16 arrays, and the same in float64."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in values]
    return arrays, [np.asarray(x, np.float64) for x in arrays]


def run(call, *args):
    with interpret.checked():
        return np.asarray(jax.block_until_ready(jax.jit(call)(*args)), np.float64)


def product(case, seed):
    (M, K, N), sizes, tile, transpose, blocks = case
    lhs, rhs, dy = arrays(seed, M, len(sizes), K, N, transpose)
    lhs[sum(sizes) :] = np.nan
    (a, b), exact = rounded(lhs, rhs)
    call = functools.partial(
        hopper.product, transpose=transpose, tile=tile, interpret=True, blocks=blocks
    )
    result = run(call, a, b, jnp.asarray(sizes, jnp.int32))
    want = oracle(*exact, sizes, dy, transpose)[0]
    assert np.abs(result - want).max() <= 2**-6  # one rounding, of values up to 2**3
    assert not result[sum(sizes) :].any()


def weights(case, seed, spoil=None):
    (M, K, N), sizes, tile, blocks = case
    lhs, rhs, dy = arrays(seed, M, len(sizes), K, N)
    lhs[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
    spoiled = np.zeros(len(sizes), bool)
    if spoil is not None:  # a row of a step that several groups share
        dy[spoil], spoiled[np.searchsorted(np.cumsum(sizes), spoil, "right")] = np.nan, True
    (a, b), exact = rounded(lhs, dy)
    call = functools.partial(hopper_weights.weights, tile=tile, interpret=True, blocks=blocks)
    result = run(call, a, b, jnp.asarray(sizes, jnp.int32))
    with np.errstate(invalid="ignore"):
        want = oracle(exact[0], rhs, sizes, exact[1])[2][~spoiled]
    assert not np.isfinite(result[spoiled]).any()
    result, sizes = result[~spoiled], np.asarray(sizes)[~spoiled]
    assert np.abs(result - want).max() <= 2**-8 * max(np.abs(want).max(), 1)
    assert not result[sizes == 0].any()


@pytest.mark.parametrize("name", cases(PRODUCTS))
def test_product(name, seed):
    product(PRODUCTS[name], seed)


@pytest.mark.parametrize("name", cases(WEIGHTS))
def test_weights(name, seed):
    weights(WEIGHTS[name], seed, spoil=69 if name == "tails" else None)


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
def test_public_function_with_gradients(transpose, seed):
    """Through custom_vjp, in float16, with NaN past the sum."""
    M, K, N, sizes = 72, 64, 128, [20, 0, 41]
    lhs, rhs, dy = arrays(seed, M, 3, K, N, transpose)
    want = oracle(lhs, rhs, sizes, dy, transpose)
    lhs[61:], dy[61:] = np.nan, np.nan
    lhs, rhs, dy = (jnp.asarray(x, jnp.float16) for x in (lhs, rhs, dy))

    def grads(lhs, rhs, dy, sizes):
        def call(lhs, rhs):
            return grouped_matmul(
                lhs, rhs, sizes, transpose_rhs=transpose, implementation="interpret"
            )

        y, pull = jax.vjp(call, lhs, rhs)
        return y, *pull(dy)

    with interpret.checked():
        results = jax.block_until_ready(jax.jit(grads)(lhs, rhs, dy, jnp.array(sizes)))
    for got, value in zip(results, want, strict=True):
        assert relative(got, value) < 5e-3


@pytest.mark.slow
def test_a_wrong_boundary_is_found(seed, monkeypatch):
    """One row too many stored, or one row too many of the neighbour's added up."""
    store, iota = hopper.store_rows, hopper.plgpu.broadcasted_iota
    case = ((64, 64, 64), [21, 40], SMALL, False, 1)
    with monkeypatch.context() as patch:
        wider = lambda *a: store(*a[:-1], a[-1] + 1)  # noqa: E731
        patch.setattr(hopper, "store_rows", wider)
        with pytest.raises(Exception, match="race|assert"):
            product(case, seed)
    with monkeypatch.context() as patch:
        patch.setattr(hopper.plgpu, "broadcasted_iota", lambda *a, **k: iota(*a, **k) - 1)
        with pytest.raises(AssertionError):
            weights(((136, 64, 64), [21, 115], SMALL, 1), seed)


@pytest.mark.aot
@pytest.mark.slow
def test_devices_exchange_only_the_gradients_they_share():
    """In a shard_map over two H100s: a kernel for y, dlhs and drhs each, sums of drhs."""
    mesh = Mesh(np.array(aot.devices(1, 2)), "d")

    def array(*shape, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def grads(lhs, rhs, sizes, dy):
        call = functools.partial(grouped_matmul, implementation="hopper")
        y, pull = jax.vjp(lambda lhs, rhs: call(lhs, rhs, sizes), lhs, rhs)
        return y, *pull(dy)

    cut, full = P("d"), P()
    args = (
        array(256, 64, spec=cut),
        array(4, 64, 128, spec=full),
        array(8, spec=cut, dtype=jnp.int32),
        array(256, 128, spec=cut),
    )
    step = jax.shard_map(
        grads,
        mesh=mesh,
        in_specs=tuple(a.sharding.spec for a in args),
        out_specs=(cut, cut, full),
    )
    text = aot.compile(jax.jit(step).lower(*args)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "collective-permute", "all-to-all"))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a100", "b200"])
def test_other_gpus_run_plain_jax(kind):
    """The mesh says which they are; nobody chose, so nobody is refused."""
    mesh = Mesh(np.array(aot.devices(1, 1, kind)), "d")
    like = (jnp.bfloat16, (256, 64)), (jnp.bfloat16, (4, 64, 128)), (jnp.int32, (4,))
    args = [jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, P())) for t, s in like]
    step = jax.shard_map(grouped_matmul, mesh=mesh, in_specs=P(), out_specs=P())
    text = aot.compile(jax.jit(step).lower(*args)).as_text()
    assert "mosaic_gpu" not in text and "ragged_dot" in text


def test_the_heuristics_give_legal_tiles():
    for make in (hopper.heuristic, hopper_weights.heuristic):
        for M in (1, 100, 65536):
            for G in (1, 8, 512):
                tile = make(M, 1408, 2048, G)
                tiling.check(tile)
                tiles.check_registers("x", tile.warpgroups, (tile.rows, tile.block_n))
                assert tile.stages >= 3


def test_the_heuristic_by_hand():
    """Large groups take the largest tile; 16 rows of 16 groups one warpgroup."""
    assert hopper.heuristic(16384, 14336, 4096, 8) == Tile(128, 256, 64, 4, 2, 2)
    assert hopper_weights.heuristic(16384, 14336, 4096, 8) == Tile(128, 256, 64, 4, 2, 2)


BAD = {
    "block_m=96 must be a multiple of 128 and at most 128; nearest: 128": Tile(96, 128),
    "block_n=200 .* nearest: 192, 256": Tile(128, 200),
    "block_k=32 .* nearest: 64": Tile(128, 64, 32),
    "at least 2 stages": Tile(128, 64, stages=1),
    "cluster of 1 or 2": Tile(128, 64, cluster=4),
    "bytes of shared memory": Tile(128, 256, stages=6),
}


@pytest.mark.parametrize("message", BAD)
def test_an_illegal_tile_is_refused(message):
    x, sizes = jnp.zeros((128, 64), jnp.bfloat16), jnp.array([128])
    with pytest.raises(ValueError, match=message):
        hopper.product(x, x[None, :64], sizes, transpose=False, tile=BAD[message])
    with pytest.raises(ValueError, match=message):
        hopper_weights.weights(x, x, sizes, tile=BAD[message])
