"""Products with quantized weights on a GPU: correctness, and every case beside its rivals.

A result is correct if its error against float32 is at most twice that of the plain program, plus
1e-3. The rivals are XLA's program for the same product, which dequantizes inside its product where
it can, and the bf16 product of the weight before quantization, by cuBLAS and by PyTorch, which
quantization should beat.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import rivals, tuned
from pallas_kernels.bench import Side
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quant_gemm import api, hopper, reference
from pallas_kernels.quant_gemm.cases import CASES as CASES
from pallas_kernels.quant_gemm.cases import SERVED, Case
from pallas_kernels.quantize.reference import code_bytes, groups_of

TINY_CASES = (Case("tiny", 8, 128, 64, 4, 64, bias=True, activation="gelu"),)
CHECKED = (
    Case("int4 3 x 200 x 328", 3, 200, 328, 4, 64),
    Case("int4 zeros 16 x 512 x 1024", 16, 512, 1024, 4, zeros=True, bias=True),
    Case("int8 64 x 400 x 704 gelu", 64, 400, 704, 8, 32, activation="gelu", bias=True),
    Case("3 bits 63 x 272 x 2048", 63, 272, 2048, 3),
    Case("2 bits zeros 1 x 4096 x 4096", 1, 4096, 4096, 2, zeros=True),
    Case("int4 1000 x 512 x 512 silu", 1000, 512, 512, 4, activation="silu", bias=True),
    Case("3 bits zeros 130 x 256 x 200", 130, 256, 200, 3, 32, zeros=True),
    Case("int8 zeros 1000 x 384 x 640", 1000, 384, 640, 8, zeros=True),
)


def arguments(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of random inputs: x, codes, scales, zeros and bias if used.

    Codes are drawn as bfloat16, of two bytes each; any bytes are valid codes.
    """
    like, numbers = jax.ShapeDtypeStruct, (groups_of(case.K, case.group), case.N)
    arrays = [like((case.M, case.K), jnp.bfloat16)]
    arrays += [like((code_bytes(case.K, case.bits), case.N // 2), jnp.bfloat16)]
    shapes = [numbers] * (1 + case.zeros) + [(case.N,)] * case.bias
    return arrays + [like(shape, jnp.float32) for shape in shapes]


def product(case: Case, implementation: Implementation) -> Callable[..., jax.Array]:
    """quant_matmul of the arguments; a copy of the bytes alone is what XLA makes of the pairs."""

    def run(x, pairs, scales, *operands):
        left = list(operands)
        zeros = left.pop(0) if case.zeros else None
        bytes_PN = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
        return pallas_kernels.quant_matmul(
            x,
            bytes_PN.reshape(pairs.shape[0], -1),
            scales,
            bits=case.bits,
            group=case.group,
            zeros=zeros,
            bias=left.pop(0) if case.bias else None,
            activation=case.activation,
            implementation=implementation,
        )

    return run


def unquantized(case: Case) -> Side:
    """Returns the bf16 product of the unquantized weight: x, w, and bias if the case has one."""
    like = jax.ShapeDtypeStruct
    shapes = [like((case.M, case.K), jnp.bfloat16), like((case.K, case.N), jnp.bfloat16)]
    shapes += [like((case.N,), jnp.float32)] * case.bias

    def run(x, w, bias=None):
        return pallas_kernels.fused_gemm(
            x, w, bias=bias, activation=case.activation, implementation="reference"
        )

    return run, shapes


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns our kernel, plain JAX under XLA, and the bf16 product."""
    return {
        "ours": lambda: (product(case, implementation), arguments(case)),
        "xla": lambda: (product(case, "reference"), arguments(case)),
        "dense": lambda: unquantized(case),
    }


def torch_sides(case: Case) -> dict[str, Callable[[], rivals.Rival]]:
    """Returns torch.matmul in bf16, by torch.compile if bias or activation follow."""
    alone = case.activation is None and not case.bias
    function = rivals.matmul if alone else rivals.gemm(case.activation, case.bias, False)
    return {"torch": lambda: rivals.Rival(function, *unquantized(case))}


def drawn(case: Case) -> list[jax.Array]:
    """Returns the numbers of a check, whose products are of size 1."""
    random, arrays = np.random.default_rng(0), []
    for like in arguments(case):
        if like.dtype == jnp.float32:
            values = random.standard_normal(like.shape) / (case.K**0.5 * 2 ** (case.bits - 1))
            arrays.append(jnp.asarray(values, jnp.float32))
        elif like.shape == (case.M, case.K):
            arrays.append(jnp.asarray(random.standard_normal(like.shape), like.dtype))
        else:
            codes = random.integers(0, 256, (*like.shape, 2)).astype(np.uint8)
            arrays.append(jax.lax.bitcast_convert_type(jnp.asarray(codes), like.dtype))
    return arrays


def errors(case: Case, implementation: Implementation) -> dict[str, float]:
    """Returns error over bound of the result; at most 1 is right."""
    inputs = drawn(case)

    def result(implementation: Implementation, dtype: Any) -> np.ndarray:
        exact = dtype == jnp.float32
        with jax.default_matmul_precision("highest" if exact else "default"):
            run = jax.jit(product(case, implementation))
            return np.asarray(run(inputs[0].astype(dtype), *inputs[1:]), np.float64)

    actual, rough = (result(which, jnp.bfloat16) for which in (implementation, "reference"))
    want = result("reference", jnp.float32)
    bound = 2 * np.abs(rough - want).max() + 1e-3
    return {"out": float(np.abs(actual - want).max() / bound)}


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns (name, a function that returns error over bound) for each check."""
    cases = TINY_CASES if rehearsal else CHECKED
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"quant_gemm {case.name}", functools.partial(errors, case, implementation))
        for case in cases
    ]


# ---- tunings
#
# What tune.py times of the product with packed weights: tiles by tokens, steps and splits.


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns one measurement for every named shape."""
    return tuple(tuning(case) for case in (*CASES, *SERVED))


def tuning(case: Case) -> tuned.Tuning:
    """Returns the measurement of a case."""
    spec = case.spec
    tiles = tuple(dict.fromkeys(hopper.candidates(case.M, case.N, case.K, spec)))

    def function(tile: hopper.Tile, interpret: bool) -> Callable[..., Any]:
        return functools.partial(hopper.multiply, spec=spec, tile=tile, interpret=interpret)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        x, pairs, scales, *optional = arguments(case)
        keys = jax.random.split(key, 5)
        packed = jax.random.bits(keys[1], (pairs.shape[0], case.N), jnp.uint8)
        zeros = optional.pop(0) if case.zeros else None
        bias = optional.pop(0) if case.bias else None
        drawn = [
            None if like is None else jax.random.normal(k, like.shape, like.dtype)
            for k, like in zip((keys[0], *keys[2:]), (x, scales, zeros, bias), strict=True)
        ]
        return drawn[0], packed, *drawn[1:]

    key = api.key(jnp.bfloat16, spec, case.M, case.N, case.K)
    plain = functools.partial(reference.forward, spec=spec)
    return tuned.Tuning(api.OP, key, tiles, function, inputs, plain)
