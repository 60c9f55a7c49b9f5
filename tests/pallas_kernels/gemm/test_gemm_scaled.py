"""Products of 8-bit operands: the kernel in the interpreter, and the reference, against float64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, fused_gemm, interpret
from pallas_kernels.gemm import hopper, promotion, reference
from pallas_kernels.gemm.reference import Scales
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import Tile
from tests.gemm_oracle import activate

SLOW = pytest.mark.slow
E4M3, E5M2, INT8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
SMALL = Tile(64, 64, 128, 2, 1)
FULL = Spec("gelu", "bfloat16")
ALL = ("scales", "bias", "residual")
# (M, N, K), types of x and w, tile, what is computed and with what, blocks.
CASES = [
    # Tails in all three sizes, three steps in two stages, two tiles.
    ((72, 40, 264), (E4M3, E4M3), SMALL, FULL, ALL, 1),
    pytest.param(((72, 64, 264), (INT8, INT8), SMALL, FULL, ALL, 2), marks=SLOW),
    pytest.param(
        ((40, 72, 520), (E4M3, E5M2), Tile(64, 64, 128, 2, 1, splits=2), FULL, ALL, 2), marks=SLOW
    ),
    ((40, 72, 264), (INT8, INT8), Tile(64, 64, 128, 2, 1, splits=2), FULL, ALL, 2),
    pytest.param(
        ((136, 128, 128), (INT8, INT8), Tile(128, 128, 128, 2, 2, 2), Spec(None, "float32"), (), 2),
        marks=SLOW,
    ),
]


def arrays(shape, dtypes, parts, out_dtype, seed):
    """x, w, scales, bias and residual, as far as they are wanted; values of a few units."""
    (M, N, K), random = shape, np.random.default_rng(seed)

    def operand(dtype, *shape):
        if dtype == INT8:
            return jnp.asarray(random.integers(-128, 128, shape), dtype)
        return jnp.asarray(random.standard_normal(shape), dtype)

    spread = 75 if dtypes[0] == INT8 else 1  # so that z has a variance of about 1
    scales = Scales(
        jnp.asarray(random.uniform(0.5, 1.5, M) / spread, jnp.float32),
        jnp.asarray(random.uniform(0.5, 1.5, N) / spread / np.sqrt(K), jnp.float32),
    )
    return (
        operand(dtypes[0], M, K),
        operand(dtypes[1], K, N),
        scales if "scales" in parts else Scales(),
        jnp.asarray(random.standard_normal(N), jnp.float32) if "bias" in parts else None,
        jnp.asarray(random.standard_normal((M, N)), out_dtype) if "residual" in parts else None,
    )


def oracle(operands, spec):
    x, w, scales, bias, residual = jax.tree.map(lambda v: np.asarray(v, np.float64), operands)
    z = x @ w
    for vector, place in ((scales.x_M, np.s_[:, None]), (scales.w_N, np.s_[None, :])):
        z = z if vector is None else z * vector[place]
    y = activate(spec.activation, z if bias is None else z + bias)[0]
    return y if residual is None else y + residual


def close(result, operands, spec):
    """One rounding of the result; plain sums of integers are exact in float32."""
    want = oracle(operands, spec)
    assert result.dtype == spec.out_dtype and result.shape == want.shape
    error = np.abs(np.asarray(result, np.float64) - want) / np.maximum(np.abs(want), 1)
    assert error.max() <= (2**-8 if spec.out_dtype == "bfloat16" else 0), error.max()


def product(case, seed):
    shape, dtypes, tile, spec, parts, blocks = case
    operands = arrays(shape, dtypes, parts, spec.out_dtype, seed)
    call = functools.partial(
        hopper.multiply_scaled, spec=spec, tile=tile, interpret=True, blocks=blocks
    )
    with interpret.checked():
        result = jax.block_until_ready(jax.jit(call)(*operands))
    close(result, operands, spec)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[0])))
def test_kernel(case, seed):
    product(case, seed)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (INT8, INT8)], ids=str)
def test_reference(dtypes, seed):
    operands = arrays((24, 40, 264), dtypes, ALL, "bfloat16", seed)
    close(jax.jit(functools.partial(reference.scaled, spec=FULL))(*operands), operands, FULL)


def test_a_sum_of_many_bytes_is_exact(seed):
    """Of 2^17 - 1 large products and their negatives one is left, which float32 would lose."""
    half = np.random.default_rng(seed).integers(64, 128, 2**16 - 1)
    x = jnp.asarray(np.concatenate([[1], half, np.roll(-half, 7)]), INT8)[None]
    w = jnp.asarray(np.concatenate([[1], half, np.roll(half, 7)]), INT8)[:, None]
    y = reference.scaled(x, w, Scales(), spec=Spec(None, "float32"))
    assert float(y[0, 0]) == 1.0


@pytest.mark.parametrize(
    ("message", "tile"),
    [
        ("block_k=64 .* nearest: 128", Tile(64, 64, 64, 2, 1)),
        ("smaller tiles or fewer warpgroups", Tile(128, 256, 128, 2, 2)),
        ("ping-pong, which 8-bit", Tile(64, 64, 128, 2, 2, pingpong=True)),
    ],
)
def test_an_illegal_tile_is_refused(message, tile):
    x = jnp.zeros((64, 128), INT8)
    with pytest.raises(ValueError, match=message):
        hopper.multiply_scaled(x, x.T, Scales(), spec=FULL, tile=tile)


def test_tiles_of_the_heuristic_are_legal():
    for M, N, K in ((1, 4096, 4096), (128, 4096, 14336), (8192, 8192, 8192), (8, 64, 64)):
        for tile in hopper.candidates_scaled(M, N, K, FULL, True):
            tiles.check("x", tile)
            promotion.check("x", tile)
            tiles.check_shared("x", hopper.buffers(tile, hopper.Stored(b=True), FULL, True, INT8))
        chosen = hopper.heuristic_scaled(M, N, K, spec=FULL, residual=True)
        assert (chosen.splits > 1) == (M <= 128 and K > 64)


@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("interpret", marks=SLOW)], ids=str
)
def test_public_function(implementation, seed):
    """Two leading dimensions; the type of the result is bfloat16."""
    operands = arrays((6, 40, 136), (E4M3, E5M2), ALL, "bfloat16", seed)
    x, w, scales, bias, residual = operands

    def call(x, w, scales, bias, residual):
        return fused_gemm(
            x.reshape(2, 3, -1),
            w,
            bias=bias,
            activation="gelu",
            implementation=implementation,
            residual=residual.reshape(2, 3, -1),
            w_scale=scales.w_N,
            x_scale=scales.x_M.reshape(2, 3),
        )

    with interpret.checked() if implementation == "interpret" else contextlib.nullcontext():
        y = jax.block_until_ready(jax.jit(call)(*operands))
    assert y.shape == (2, 3, 40)
    close(y.reshape(6, 40), operands, FULL)


X = {name: jnp.ones((4, 8), name) for name in ("int8", "float8_e4m3fn", "bfloat16")}
BAD = {
    "both be int8, or both float8": (X["int8"], X["float8_e4m3fn"], {}),
    "x int8 and w bfloat16": (X["int8"], X["bfloat16"], {}),
    "for 8-bit operands; x is bfloat16": (X["bfloat16"], X["bfloat16"], {"x_scale": jnp.ones(4)}),
    "x_scale float32.* must be floating, .4,.: x's rows": (
        X["int8"],
        X["int8"],
        {"x_scale": jnp.ones(8)},
    ),
    "w_scale int32.4.* w's columns": (
        X["int8"],
        X["int8"],
        {"w_scale": jnp.ones(4, jnp.int32)},
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_say_what_is_wrong(message):
    x, w, options = BAD[message]
    with pytest.raises(ValueError, match=message):
        fused_gemm(x, w.T, **options)


def test_there_are_no_gradients():
    x = X["float8_e4m3fn"]
    with pytest.raises(NotImplementedError, match="has no gradients"):
        jax.grad(lambda bias: fused_gemm(x, x.T, bias=bias).sum())(jnp.ones(4, jnp.bfloat16))


@pytest.mark.aot
@pytest.mark.slow
def test_a_split_product_is_a_kernel_and_one_fusion_and_copies_no_weight():
    mesh = Mesh(np.array(aot.devices(1, 1)), "d")

    def array(*shape, dtype=INT8):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def call(x, w_NK, down, across):
        return fused_gemm(x, w_NK.T, x_scale=down, w_scale=across, implementation="hopper")

    step = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P())
    vectors = array(64, dtype=jnp.float32), array(4096, dtype=jnp.float32)
    text = aot.compile(jax.jit(step).lower(array(64, 4096), array(4096, 4096), *vectors)).as_text()
    words = ("custom-call(", "fusion(", "copy(", "transpose(")
    assert [sum(f" {word}" in line for line in text.splitlines()) for word in words] == [1, 1, 0, 0]
