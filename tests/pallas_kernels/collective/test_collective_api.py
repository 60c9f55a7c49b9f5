"""The public functions: plain collectives against float64, and what is refused, with reasons."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.collective import api
from pallas_kernels.collective.all_gather_gemm import all_gather_gemm
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.fused import Fusion
from pallas_kernels.hopper.peers import ReadyPeer
from pallas_kernels.hopper.tiles import Tile

MESHES = {(4,): ("x",), (2, 4): ("d", "x"), (1,): ("x",)}


def on(shape, function, in_specs, out_specs):
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), MESHES[shape])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def values(*shapes, seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("shape", list(MESHES))
def test_plain_collectives_against_float64(shape, seed):
    x, w, v, bias, residual = values((2, 24, 16), (16, 8), (16, 4), (8,), (2, 24, 8), seed=seed)
    b4, w2 = bias[:4], v

    def gather(x, w, v, bias, b4):
        return api.all_gather_matmul(
            x, [w, v], axis="x", bias=[bias, None], activation="silu", return_gathered=True
        )

    rows, cut = P(None, "x"), P(None, "x")
    specs = (rows, cut, cut, P("x"), P("x"))
    (y, z), gathered = on(shape, gather, specs, ((P(None, None, "x"),) * 2, P(None, None, "x")))(
        x, w, w2, bias, b4
    )
    want = x.astype(float) @ w + bias
    np.testing.assert_allclose(y, want / (1 + np.exp(-want)), atol=1e-5)
    plain = x.astype(float) @ w2
    np.testing.assert_allclose(z, plain / (1 + np.exp(-plain)), atol=1e-5)
    np.testing.assert_array_equal(gathered[..., : x.shape[-1]], x)

    def scatter(x, w, bias, residual):
        return api.matmul_reduce_scatter(x, w, axis="x", bias=bias, residual=residual)

    specs = (P(None, None, "x"), P("x"), P(), rows)
    y = on(shape, scatter, specs, rows)(x, w, bias, residual)
    np.testing.assert_allclose(y, x.astype(float) @ w + bias + residual, atol=1e-5)

    def scatter_two(x, w):
        return api.matmul_reduce_scatter([x, 2 * x], [w.T, w.T], axis="x", transpose_w=True)

    y = on(shape, scatter_two, specs[:2], rows)(x, w)
    np.testing.assert_allclose(y, 3 * (x.astype(float) @ w), atol=1e-4)

    def reduce(x, w, bias, residual):
        return api.matmul_all_reduce(x, w, axis="x", bias=bias, residual=residual)

    y = on(shape, reduce, (P(None, None, "x"), P("x"), P(), P()), P())(x, w, bias, residual)
    np.testing.assert_allclose(y, x.astype(float) @ w + bias + residual, atol=1e-5)


def test_a_cpu_is_refused_with_every_reason():
    x, w = jnp.ones((8, 16)), jnp.ones((16, 8))

    def fused(x, w):
        return api.all_gather_matmul(x, w, axis="x", implementation="fused")

    with pytest.raises(NotImplementedError) as error:
        on((4,), fused, (P("x"), P()), P())(x, w)
    for reason in (
        "needs Hopper GPUs, found cpu",
        "found float32",
        "columns of x, found 16",
        "columns of w, found 8",
    ):
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("w float32\\(8, 8\\) must be \\(16, N\\)", {"w": jnp.ones((8, 8))}),
        ("bias float32\\(3,\\) must be floating, \\(8,\\)", {"bias": jnp.ones(3)}),
        ("activation='relu'", {"activation": "relu"}),
        ("implementation='ring'", {"implementation": "ring"}),
        ("2 x, 2 weights, 1 biases", {"w": [jnp.ones((16, 8))] * 2, "bias": [None]}),
    ],
)
def test_bad_input_is_a_clear_error(message, change):
    call = {"w": jnp.ones((16, 8)), "axis": "x"} | change
    with pytest.raises(ValueError, match=message):
        on((4,), lambda x: api.all_gather_matmul(x, call.pop("w"), **call), P("x"), P())(
            jnp.ones((8, 16))
        )


def test_rows_that_the_ranks_do_not_divide():
    with pytest.raises(ValueError, match="nearest: 4, 8"):
        on((4,), lambda x, w: api.matmul_reduce_scatter(x, w, axis="x"), (P(), P()), P("x"))(
            jnp.ones((6, 16)), jnp.ones((16, 8))
        )


def test_a_fusion_without_blocks_that_copy_is_refused():
    """It would wait for ever."""
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 64, 64), (1, 64, 64))]
    fusion = Fusion(Tile(64, 64, 64, 2, 1), 2, 64)
    with pytest.raises(ValueError, match="some block must copy, or none can"):
        jax.eval_shape(
            lambda x, w: all_gather_gemm(
                x, (w,), rows=64, peers=ReadyPeer(2, 0), fusion=fusion, spec=Spec(None, "bfloat16")
            ),
            *args,
        )
