"""SDP4Bit's fused kernels in the interpreter, race detection on, beside plain JAX.

All results agree to the bit: no product is fused with a sum, in either of the two.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels import aot, interpret
from pallas_kernels.quantize import bench as tunings
from pallas_kernels.quantize import configs, fused_reference, hopper, reference, registers
from pallas_kernels.quantize.cases import Case

SLOW = pytest.mark.slow
SEND, RELAY, RECEIVE = "hadamard_quantize", "reduce_requantize", "reduce_hadamard"
OUT, IN = "subtract_quantize", "dequantize_add"
# More tiles than slots for each block, so that slots are filled again; other pieces than tiles.
CASES = [
    Case("send random", SEND, 4 * 4096, 2, 2, bits=8, random=True),
    Case("relay random", RELAY, 4 * 1024, 3, pieces=2, bits=8, random=True),
    Case("out random", OUT, 3 * 8192, group=2048, random=True),
    Case("in bf16", IN, 4 * 8192, 2, group=2048, wide=False),
    pytest.param(Case("send bf16", SEND, 6 * 4096, 2, 3, bits=8, wide=False), marks=SLOW),
    pytest.param(
        Case("send plain 4 bits", SEND, 4 * 4096, 2, group=512, random=True, hadamard=False),
        marks=SLOW,
    ),
    pytest.param(Case("receive", RECEIVE, 3 * 4096, 3), marks=SLOW),
    pytest.param(Case("receive 8 bits", RECEIVE, 3 * 4096, 2, group=1024, bits=8), marks=SLOW),
    pytest.param(Case("relay", RELAY, 6 * 1024, 2, pieces=3, bits=8, group=256), marks=SLOW),
    pytest.param(Case("out bf16", OUT, 3 * 8192, group=2048, wide=False), marks=SLOW),
    pytest.param(Case("out 8 bits", OUT, 3 * 4096, bits=8, random=True), marks=SLOW),
    pytest.param(Case("in 8 bits", IN, 4 * 4096, 2, bits=8), marks=SLOW),
    pytest.param(Case("in groups 1024", IN, 2 * 16384, 1, group=1024), marks=SLOW),
]


def fill(case, args, seed):
    """Numbers of each argument; payloads of numbers; a group of zeros, and one that has inf."""
    random, arrays = np.random.default_rng(seed), []
    for like in args:
        if like is None or like.dtype == np.uint32:
            arrays.append(None if like is None else jax.random.bits(jax.random.key(seed), (2,)))
            continue
        if like.dtype != np.uint8:
            x = random.standard_normal(like.shape).astype(np.float32)
            x[: case.group], x[case.group + 5] = 0, np.inf if case.op == SEND else 3
            arrays.append(jax.numpy.asarray(x, like.dtype))
            continue
        n = case.elements // (case.payloads if case.op == IN else 1)
        x = jax.numpy.asarray(random.standard_normal((like.shape[0], n)), np.float32)
        arrays.append(reference.encode(x, case.bits, case.group))
    return arrays


def run(case, seed, stages=2, blocks=1):
    """Compares a kernel, interpreted, with plain JAX."""
    problem, kernel, args = configs.kernel(case)
    tile = dataclasses.replace(hopper.heuristic(problem), stages=stages, blocks=blocks)
    tile = dataclasses.replace(tile, groups=problem.least)
    assert not hopper.misfits(problem, tile)
    args = fill(case, args, seed)
    with interpret.checked():
        result = jax.jit(functools.partial(kernel, tile=tile, interpret=True))(*args)
        result = np.asarray(jax.block_until_ready(result))
    plain = functools.partial(getattr(fused_reference, case.op), **tunings.options(case))
    want = np.asarray(jax.jit(plain)(*args))
    assert result.shape == want.shape and result.dtype == want.dtype
    np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_beside_plain_jax(case, seed):
    run(case, seed)


@SLOW
def test_blocks_share_tiles(seed):
    run(CASES[2], seed, stages=3, blocks=2)


def test_reciprocals_are_rounded_to_nearest(seed):
    """Whatever the quick one is off by; also next to powers of two."""
    random = np.random.default_rng(seed)
    scale = np.exp2(random.uniform(-126, 125, 20000)).astype(np.float32)
    edges = np.exp2(np.arange(-126, 126, dtype=np.float32))
    scale = np.concatenate([scale, edges, np.nextafter(edges, 2e38), np.nextafter(edges[1:], 0)])
    want = (1 / scale.astype(np.float64)).astype(np.float32)

    @jax.jit
    def corrected(scale, quick):
        return registers.corrected(scale, quick)

    for off in (-1, 0, 1):
        quick = (want.view(np.int32) + off).view(np.float32)
        np.testing.assert_array_equal(corrected(scale, quick), want)


def test_the_report_knows_the_shipped_programs():
    assert len(set(configs.CONFIGS)) == len(configs.CONFIGS)
    for case in (*configs.CASES, *configs.OTHERS):
        problem = configs.kernel(case)[0]
        assert not hopper.misfits(problem, hopper.heuristic(problem)), case
        small = dataclasses.replace(case, elements=case.elements // 64)
        assert not hopper.misfits(configs.kernel(small)[0], hopper.heuristic(problem)), case


@pytest.mark.aot
@pytest.mark.parametrize("name", ["send 64M float32 random", "weights in 64M bf16"])
def test_bytes_move_once(name):
    """Compiled for an H100, a program is the kernel: views of bytes as words cost no copy."""
    function, args, _ = configs.program(name)
    text = aot.compile(jax.jit(function).lower(*args)).as_text()
    entry = text[text.index("ENTRY") :]
    assert "custom-call" in entry and "u8[" in entry
    assert "copy(" not in entry and " fusion(" not in entry, entry
