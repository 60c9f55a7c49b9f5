"""Weights scaled two at a time in bf16: the interpreter beside float64, the instructions beside it.

Legend: 128 columns, 64 along K.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant_gemm import pairs, registers
from tests.pallas_kernels.quant_gemm.test_quant_gemm_hopper import column_of


class Shared:
    """An array in the place of shared memory."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, place):
        return self.array if place is ... else self.array[place.start : place.start + place.size]


def scales_of_all_kinds(seed, pieces):
    """(pieces, 128) of both signs from 2^-100 to 2^100, and ties of bf16, and bf16 numbers."""
    random = np.random.default_rng(seed)
    scales = random.uniform(1, 2, (pieces, 128)) * 2.0 ** random.integers(-100, 100, (pieces, 128))
    scales[:, :4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-7, 2 - 2.0**-23
    return (scales * random.choice([-1, 1], scales.shape)).astype(np.float32)


def scaled(words, scales):
    """What the interpreter has of them: (128 columns, in order, 64), and the codes."""
    parts = [pairs.scale_pairs(registers.load_rows(Shared(s), True), True) for s in scales]
    rows = np.asarray(pairs.scaled_operand(Shared(words), (0, 0), parts, True), np.float64)
    columns = np.empty_like(rows)
    columns[[column_of(row) for row in range(128)]] = rows
    codes = np.unpackbits(words.view(np.uint8).reshape(32, 128), axis=0, bitorder="little")
    codes = codes.reshape(64, 4, 128).transpose(2, 0, 1) @ np.array([1.0, 2, 4, -8])
    return columns, codes


@pytest.mark.parametrize("pieces", [1, 2])
def test_scaled_codes_are_rounded_once(pieces, seed):
    """Beside float64: half a place of bf16, but for 2^-15 of the number; seldom another one."""
    words = np.random.default_rng(seed).integers(0, 2**32, (32, 32), np.uint32).view(np.int32)
    scales = scales_of_all_kinds(seed, pieces)
    weights, codes = scaled(words, jnp.asarray(scales))
    want = codes * np.repeat(scales, 64 // pieces, 0).T.astype(np.float64)
    assert (np.abs(weights - want) <= (2**-8 + 2**-15) * np.abs(want)).all()
    rounded = want.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    assert np.mean(weights != rounded) < 0.01
    scales[:, :3] = np.inf, -np.inf, np.nan
    weights, _ = scaled(words, jnp.asarray(scales))
    assert not np.isfinite(weights[:3]).any() and np.isfinite(weights[3:]).all()


def test_the_instructions_scale_as_the_interpreter_does(seed, monkeypatch):
    """PTX of two bf16 numbers, read and computed as the PTX ISA defines it."""
    two, word = jnp.bfloat16, np.uint32

    def assembly(_, operands, code, constraints):
        values = {f"${i + 1}": value for i, value in enumerate(operands)}
        for line in code.strip("{}").split(";"):
            name, *operands = line.replace(",", "").split() or [""]
            if name == "cvt.rn.bf16x2.f32":
                upper, lower = (values[i].astype(two).view(np.uint16) for i in operands[1:])
                values[operands[0]] = upper.astype(word) << 16 | lower
            elif name in ("mul.rn.bf16x2", "fma.rn.bf16x2"):
                a, b, *c = (values[i].view(two).astype(np.float64) for i in operands[1:])
                exact = a * b + sum(c)
                values[operands[0]] = exact.astype(np.float32).astype(two).view(word)
        return values["$0"]

    arith = dict(
        andi=lambda a, b: a & b,
        subf=lambda a, b: a - b,
        bitcast=lambda _, bits: bits.view(np.float32),
        constant=lambda _, value: word(value & 2**32 - 1),
    )
    types = SimpleNamespace(get_signless=int, get=lambda *_: None)
    names = ("IntegerType", "VectorType", "BF16Type", "F32Type")
    for name, change in (
        ("llvm", SimpleNamespace(inline_asm=assembly)),
        ("arith", SimpleNamespace(**arith)),
        ("ir", SimpleNamespace(**dict.fromkeys(names, types))),
        ("vector", SimpleNamespace(bitcast=lambda _, register: register)),
        ("element_of", lambda register, _: register),
        ("vector_of", lambda elements: elements[0]),
    ):
        monkeypatch.setattr(pairs, name, change)
    words = np.random.default_rng(seed).integers(0, 2**32, (32, 32), np.uint32).view(np.int32)
    scales = scales_of_all_kinds(seed, 1)
    want, codes = scaled(words, jnp.asarray(scales))
    high, low = pairs.parts_of_scale(np.repeat(scales[0], 32))
    result = pairs.scaled(codes.astype(two).reshape(-1).view(word), high, low)
    np.testing.assert_array_equal(result.view(two).reshape(128, 64).astype(np.float64), want)
