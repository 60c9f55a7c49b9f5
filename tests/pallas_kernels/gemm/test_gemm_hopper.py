"""The Hopper kernel in the interpreter, race detection on, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, fused_gemm, interpret
from pallas_kernels.gemm import hopper
from pallas_kernels.gemm.cases import CASES
from pallas_kernels.gemm.hopper import Stored
from pallas_kernels.hopper import cards, tiles
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import Tile
from tests.gemm_oracle import PARTS, activate, arrays, relative

SLOW = pytest.mark.slow
SMALL = Tile(64, 64, 64, 2, 1)
WIDE = Tile(128, 128, 64, 2, 2)
PAIR = Tile(64, 64, 64, 2, 1, cluster=2)
TURNS = Tile(64, 64, 64, 2, 2, pingpong=True)
PLAIN = Spec(None, "bfloat16")
KEPT = Spec("gelu", "bfloat16", keep=True)
X, DZ_W, X_DZ = Stored(), Stored(b=True), Stored(a=True)  # x w, dz w^T, x^T dz
# (M, N, K), tile, how operands are stored, what is computed, with bias and residual, blocks.
CASES_FORWARD = [
    # Two warpgroups on a tile, tails in all three sizes, two tiles, more steps than stages.
    ((136, 72, 136), WIDE, X, KEPT, PARTS, 1),
    pytest.param(((128, 128, 64), WIDE, X, PLAIN, (), 1), marks=SLOW),
    pytest.param(((3, 5, 7), SMALL, X, Spec("silu", "bfloat16"), PARTS, 4), marks=SLOW),
    pytest.param(((200, 128, 192), PAIR, X, KEPT, PARTS, 2), marks=SLOW),
    pytest.param(((130, 64, 64), PAIR, X, Spec("gelu_tanh", "float32"), ("bias",), 2), marks=SLOW),
    # Ping-pong: two tiles each, one of them beyond the last row; two pieces of rows; a cluster.
    pytest.param(((200, 64, 192), TURNS, X, KEPT, PARTS, 1), marks=SLOW),
    pytest.param(
        ((200, 192, 320), Tile(128, 64, 64, 2, 2, pingpong=True), X, KEPT, PARTS, 1), marks=SLOW
    ),
    pytest.param(
        ((264, 128, 136), Tile(64, 64, 64, 2, 2, 2, pingpong=True), X, PLAIN, PARTS, 2), marks=SLOW
    ),
    pytest.param(((64, 192, 130), Tile(64, 192, 64, 3, 1), X, KEPT, PARTS, 1), marks=SLOW),
    # In splits: two steps each, the second split's last one beyond K; two tiles for each block.
    ((40, 72, 136), Tile(64, 64, 64, 2, 1, splits=2), X, KEPT, PARTS, 2),
    # The third split has nothing; a cluster whose second block has a few rows.
    pytest.param(
        ((72, 64, 200), Tile(64, 64, 64, 2, 1, 2, splits=3), X, KEPT, PARTS, 4), marks=SLOW
    ),
    pytest.param(
        ((136, 64, 328), Tile(128, 64, 64, 2, 2, splits=4), X, PLAIN, ("bias",), 1), marks=SLOW
    ),
]
CASES_BACKWARD = [
    pytest.param(((72, 64, 200), SMALL, DZ_W, PLAIN, (), 1), marks=SLOW),
    ((128, 128, 136), WIDE, X_DZ, PLAIN, (), 1),
    pytest.param(((136, 200, 128), WIDE, DZ_W, PLAIN, (), 2), marks=SLOW),
    pytest.param(((200, 128, 72), PAIR, X_DZ, PLAIN, (), 2), marks=SLOW),
    pytest.param(((200, 64, 136), PAIR, DZ_W, PLAIN, (), 2), marks=SLOW),
    pytest.param(((136, 128, 200), TURNS, X_DZ, PLAIN, (), 1), marks=SLOW),
    pytest.param(((136, 128, 136), TURNS, DZ_W, PLAIN, (), 1), marks=SLOW),
    pytest.param(((256, 128, 64), Tile(256, 128, 64, 2, 2), X_DZ, PLAIN, (), 1), marks=SLOW),
    pytest.param(((72, 64, 264), Tile(64, 64, 64, 2, 1, splits=2), X_DZ, PLAIN, (), 2), marks=SLOW),
    pytest.param(((72, 64, 264), Tile(64, 64, 64, 2, 1, splits=3), DZ_W, PLAIN, (), 1), marks=SLOW),
]


def named(case):
    return "x".join(map(str, case[0]))


def run(case, seed, dtype=jnp.bfloat16):
    (M, N, K), tile, stored, spec, parts, blocks = case
    inputs, _ = arrays(seed, (M,), K, N, parts)
    inputs = {name: jnp.asarray(value, dtype) for name, value in inputs.items()}
    if "residual" in inputs:
        inputs["residual"] = inputs["residual"].astype(spec.out_dtype)
    exact = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    call = functools.partial(
        hopper.multiply, spec=spec, tile=tile, stored=stored, interpret=True, blocks=blocks
    )
    x, w = inputs["x"], inputs["w"]
    operands = x.T if stored.a else x, w.T if stored.b else w
    with interpret.checked():
        y, z = jax.block_until_ready(
            jax.jit(call)(*operands, inputs.get("bias"), inputs.get("residual"))
        )
    want_z = exact["x"] @ exact["w"] + exact.get("bias", 0)
    want = activate(spec.activation, want_z)[0] + exact.get("residual", 0)
    # One rounding, of values up to 2**3.
    assert y.dtype == spec.out_dtype and y.shape == (M, N)
    assert np.abs(np.asarray(y, np.float64) - want).max() <= (1e-5 if y.dtype == "f4" else 2**-6)
    assert (z is not None) == spec.keep
    if z is not None:
        assert np.abs(np.asarray(z, np.float64) - want_z).max() <= 2**-6


@pytest.mark.parametrize("case", CASES_FORWARD, ids=named)
def test_forward(case, seed):
    run(case, seed)


@pytest.mark.parametrize("case", CASES_BACKWARD, ids=named)
def test_backward(case, seed):
    run(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_public_function_with_gradients(mapped, seed):
    """Through custom_vjp; two leading dimensions, one of them mapped."""
    operands, dy = arrays(seed, (2, 20), 24, 40)
    x, w, bias, residual = (jnp.asarray(v, jnp.float16) for v in operands.values())

    def call(x, w, bias, residual, implementation="interpret"):
        return fused_gemm(
            x, w, bias=bias, residual=residual, activation="gelu", implementation=implementation
        )

    def grads(call, x, w, bias, residual, dy):
        y, pull = jax.vjp(call, x, w, bias, residual)
        return y, *pull(dy)

    args = (x, w, bias, residual, jnp.asarray(dy, jnp.float16))
    want = grads(functools.partial(call, implementation="reference"), *args)
    step = functools.partial(grads, jax.vmap(call, (0, None, None, 0)) if mapped else call)
    with interpret.checked():
        results = jax.block_until_ready(jax.jit(step)(*args))
    for got, value in zip(results, want, strict=True):
        assert relative(got, np.asarray(value, np.float64)) < 5e-3


@pytest.mark.aot
@pytest.mark.slow
def test_devices_exchange_only_the_gradients_they_share():
    """In a shard_map over two H100s: a kernel for y, dx and dw each, sums of dw and dbias."""
    mesh = Mesh(np.array(aot.devices(1, 2)), "d")

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def grads(x, w, bias, residual, dy):
        def call(x, w, bias, residual):
            return fused_gemm(
                x, w, bias=bias, residual=residual, activation="gelu", implementation="hopper"
            )

        return jax.vjp(call, x, w, bias, residual)[1](dy)

    cut, full = P("d"), P()
    y = array(2, 256, 128, spec=cut)
    args = (array(2, 256, 64, spec=cut), array(64, 128, spec=full), array(128, spec=full), y, y)
    step = jax.shard_map(
        grads,
        mesh=mesh,
        in_specs=tuple(a.sharding.spec for a in args),
        out_specs=(cut, full, full, cut),
    )
    text = aot.compile(jax.jit(step).lower(*args)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "collective-permute", "all-to-all"))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_the_heuristic_gives_legal_tiles(out_dtype, keep, residual):
    spec = Spec("gelu", out_dtype, keep)
    sizes = [(c.M, c.N, c.K) for c in CASES] + [(8, 64, 64), (128, 64, 8192), (4096, 8, 8)]
    for M, N, K in sizes:
        tile = hopper.heuristic(M, N, K, spec=spec, residual=residual)
        tiles.check("x", tile)
        tiles.check_shared("x", hopper.buffers(tile, X, spec, residual))
        assert tile.rings * tile.stages >= 3


def test_the_heuristic_by_hand():
    """A large product takes the largest tile; 16 rows one row of tiles and no cluster."""
    assert hopper.heuristic(8192, 8192, 8192) == Tile(128, 256, 64, 4, 2, 2)
    few = hopper.heuristic(16, 4096, 4096)
    assert (few.block_m, few.cluster) == (64, 1)


@pytest.mark.parametrize(
    ("M", "N", "K", "splits"),
    [
        (1, 4096, 4096, True),  # decoding
        (128, 4096, 14336, True),
        (768, 768, 9856, True),  # the gradient of a small weight
        (16, 64, 192, False),  # three steps of K
        (16, 132 * 256, 4096, False),  # a tile for each SM
        (8192, 8192, 8192, False),
    ],
)
def test_splits_where_there_are_fewer_tiles_than_sms(M, N, K, splits):
    tile = hopper.heuristic(M, N, K)
    assert (tile.splits > 1) == splits
    for other in [tile] * splits + hopper.split_candidates(M, N, K):
        steps = -(-K // other.block_k)
        each = -(-steps // other.splits)
        # All run at one time, none is empty.
        assert hopper.tile_count(other, M, N) * other.splits <= cards.SMS
        assert each >= 4 and (other.splits - 1) * each < steps
        tiles.check("x", other)
        tiles.check_shared("x", hopper.buffers(other, X, PLAIN, False))


def test_splits_are_added_in_their_order():
    """Float32 that has no room for 1 beside 2**24 tells the orders apart."""
    large = 2.0**25
    for pages, want in (((1.0, large, -large), 0.0), ((large, -large, 1.0), 1.0)):
        sums = jnp.asarray(pages, jnp.float32)[:, None, None]
        add = functools.partial(hopper.summed, spec=Spec(None, "float32"), dtype=jnp.bfloat16)
        y, z = jax.jit(add)(sums, None, None)
        assert float(y[0, 0]) == want and z is None


BAD = {
    "ping-pong is not for those": Tile(64, 64, 64, 2, 2, pingpong=True, splits=2),
    "block_m=96 must be a multiple of 128; nearest: 128": Tile(96, 128, 64, 2, 2),
    "block_n=200 .* nearest: 192, 256": Tile(64, 200, 64, 2, 1),
    "block_k=32 .* nearest: 64": Tile(64, 64, 32, 2, 1),
    "smaller tiles or fewer warpgroups": Tile(128, 256, 64, 2, 1),
    "at least 2 stages": Tile(64, 64, 64, 1, 1),
    "bytes of shared memory": Tile(128, 256, 64, 6, 2),
}


@pytest.mark.parametrize("message", BAD)
def test_an_illegal_tile_is_refused(message):
    x = jnp.zeros((128, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        hopper.multiply(x, x.T, spec=PLAIN, tile=BAD[message])
