"""Signed codes of 4 bits as operands of the tensor cores, two at a time in 16-bit arithmetic.

A pair of codes becomes two 16-bit floats in one register, exactly, by three instructions: PRMT
brings a byte of the word and the same byte of the word shifted by 4 into two halves of a register,
LOP3 masks the codes, flips their signs and adds an exponent, and one subtraction takes off what
that has added. Hopper runs PRMT, LOP3 and shifts at half the rate of float arithmetic, so their
number decides. Where the scale of a group can multiply the float32 sums of its product, that is all
(`exact_operand`, `exact_sums`).

Where it cannot, the weight itself is scaled, in bf16 (`scaled_operand`). A float32 scale s is cut
into two bf16 numbers, high = bf16(s) and low = bf16(s - high). Two instructions, each for two
weights, then compute

    w = bf16(code * high + bf16(code * low))

The sum is rounded once. high + low differs from s by at most 2^-16 of s, and the rounded product
adds as much, so w is what rounding code * s would give unless code * s lies within 2^-15 of itself
of the middle between two bf16 numbers. float16 has no such way. Its numbers have no
bits below 2^-24, so the low part of a scale below 2^-3 would lose bits, and below 2^-13 all.

Threads have the registers that registers.py describes.

Legend: M tokens, K contracted; T tokens of a tile.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fragmented
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.mma import MMALayouts, mma
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from pallas_kernels.quant_gemm.registers import (
    BLOCK,
    COLUMNS,
    DEPTH,
    HALVES,
    LANES,
    ROW,
    SWIZZLED,
    TILES,
    Values,
    element_of,
    load,
    load_rows,
    numbers,
    operand,
    reader,
    rows_of,
    vector_of,
)

BITS = 4  # of a code
# Of 16-bit types: the number whose last bit is 1 and whose low four bits are 0, and its value.
ONES = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}
SIGN = 8  # of a code
UPPER = -(2**16)  # a mask: the bits of a float32 that bf16 has, and the upper of two bf16 numbers


def offset(dtype: Any) -> int:
    """Returns what must be subtracted from a 16-bit float whose low bits are a code of 4 bits, its
    sign flipped, to get the code."""
    return ONES[jnp.dtype(dtype).name][1] + SIGN


def exact_operand(words: Any, place: tuple[Any, int], dtype: Any, interpret: bool) -> Values:
    """Returns the codes of w^T (128, 64), not yet scaled, in the layout of wgmma's left operand.

    words: shared memory of codes, as of `load`. place: (a row, traced, a multiple of 8; the first
    row after it).
    """
    base, first = place
    rows = rows_of(DEPTH, 4)
    if interpret:
        codes = numbers(load(words, (base, first, rows), 4, True), 4, True)
        each = [[code * np.float32(2.0**-power) for code, power in byte] for byte in codes]
        return operand([each], 4, dtype, True)

    return _placed(words, place, dtype, None)


def scale_pairs(scale: Values, interpret: bool) -> tuple[Values, Values]:
    """Returns the high and the low part of a number for each row (128,): registers of two bf16.

    Both halves of a register, which is an int32, are the same number. In the interpreter a part is
    that number, in float32.
    """
    if interpret:
        high = lax.reduce_precision(scale, 8, 7)
        return high, lax.reduce_precision(scale - high, 8, 7)
    part = plgpu.ShapeDtypeStruct((COLUMNS,), jnp.int32, layout=ROW)

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=[part, part])
    def split(_, scale):
        layout, shape = scale.layout, scale.registers.shape
        split_registers = np.empty((2, scale.registers.size), object)
        for i, register in enumerate(scale.registers.flat):
            for p, part in enumerate(parts_of_scale(element_of(register, 0))):
                split_registers[p, i] = vector_of([part])
        return [
            fragmented.FragmentedArray(
                _registers=part.reshape(shape), _layout=layout, _is_signed=True
            )
            for part in split_registers
        ]

    return tuple(split(scale))


def scaled_operand(
    words: Any,
    place: tuple[Any, int],
    scales: Sequence[tuple[Values, Values]],
    interpret: bool,
) -> Values:
    """Returns w^T (128, 64), the codes times their scales, rounded to bf16.

    words, place: as in `exact_operand`. scales: `scale_pairs` of each of the equal pieces of the 64
    along K that have scales of their own.
    """
    if interpret:
        codes = exact_operand(words, place, jnp.bfloat16, True).astype(jnp.float32)
        codes = codes.reshape(COLUMNS, len(scales), -1)
        high, low = (jnp.stack(part, axis=1)[:, :, None] for part in zip(*scales, strict=True))
        # Float32 holds the first product exactly. The device rounds the sum once, float32 twice,
        # which differs where the sum lies within 2^-24 of the middle of two bf16 numbers.
        w = codes * high + lax.reduce_precision(codes * low, 8, 7)
        return w.astype(jnp.bfloat16).reshape(COLUMNS, DEPTH)
    return _placed(words, place, jnp.bfloat16, scales)


def operands(
    words: Any, base: Any, scale: Callable[[int], Any], group: int, interpret: bool
) -> Callable[[int], Values]:
    """Returns a function of a number of 64 along K, which returns their `scaled_operand`.

    The scales of a group are cut into parts once.
    Args: words, base: as in `exact_operand`. scale: maps a group to its scales, in shared memory.
      group: codes of one along K.
    """

    @functools.cache
    def parts(i: int) -> tuple[Values, Values]:
        return scale_pairs(load_rows(scale(i), interpret), interpret)

    def operand(chunk: int) -> Values:
        starts = range(chunk * DEPTH, (chunk + 1) * DEPTH, min(group, DEPTH))
        scales = [parts(start // group) for start in starts]
        return scaled_operand(words, (base, rows_of(chunk * DEPTH, BITS)), scales, interpret)

    return operand


def _placed(words: Any, place: tuple[Any, int], dtype: Any, scales: Any) -> Values:
    """Returns the codes, times `scales` if there are any, where wgmma wants its left operand."""
    (base, first), parts = place, list(map(list, scales or ()))

    @plgpu.inline_mgpu(
        arg_types=(SWIZZLED, plgpu.Layout.WG_SPLAT, [[ROW, ROW] for _ in parts]),
        return_type=plgpu.ShapeDtypeStruct((COLUMNS, DEPTH), dtype, layout=plgpu.Layout.WGMMA),
    )
    def read(_, words, base, parts):
        word = reader(words, base, 1)
        layout = fragmented.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((COLUMNS, DEPTH)), object)
        blocks = DEPTH // BLOCK
        for block in range(blocks):
            pairs = code_pairs(word(first + LANES * block), jnp.dtype(dtype).name)
            if parts:
                factors = [part.registers.flat for part in parts[block * len(parts) // blocks]]
                pairs = [scaled(*each) for each in zip(pairs, *factors, strict=True)]
            for j, pair in enumerate(pairs):
                t, half = divmod(j, HALVES)
                registers[(t, block, 0, 0, half, *(0,) * (registers.ndim - 5))] = pair
        return fragmented.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(words, jnp.int32(base), parts)


def exact_sums(
    words: Any,
    place: tuple[Any, int],
    x: Any,
    chunks: tuple[int, int],
    interpret: bool,
) -> Values:
    """Returns the sums (128, T) of w^T x^T over neighbouring chunks of 64 along K, in the layout of
    wgmma's sums, but by `mma.sync`: each warp multiplies its 16 rows by 8 tokens at a time.

    On an H200 it is hardly faster than wgmma (README.md), so the tuner tries both. The registers of
    both instructions belong to the same threads. x is read by the threads, from swizzled rows of
    128 bytes; the lanes of a warp find its words in 32 banks.

    words, place: as in `exact_operand`, for the first chunk. x: shared memory, (T, K of a part),
    tiled and swizzled as wgmma reads it. chunks: the first of x's and how many.
    """
    base, first = place
    (T, depth), dtype, (start, count) = x.shape, x.dtype, chunks
    rows = rows_of(DEPTH, 4)
    if interpret:
        total = jnp.zeros((COLUMNS, T), jnp.float32)
        for i in range(count):
            left = exact_operand(words, (base, first + i * rows), dtype, True)
            right = x[:, pl.ds((start + i) * DEPTH, DEPTH)]
            total += lax.dot_general(
                left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        return total
    tiled = plgpu.RefType((plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(2 * DEPTH)))

    @plgpu.inline_mgpu(
        arg_types=(SWIZZLED, plgpu.Layout.WG_SPLAT, tiled),
        return_type=plgpu.ShapeDtypeStruct((COLUMNS, T), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def multiply(_, words, base, x):
        kind = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        layouts = MMALayouts(kind)
        word, pair = reader(words, base, 1), _pair_reader(x, depth, kind)

        def array(registers: Any, layout: Any, shape: tuple[int, int]) -> Any:
            held = np.empty(layout.registers_shape(shape), object)
            held.reshape(-1)[:] = registers
            return fragmented.FragmentedArray(_registers=held, _layout=layout, _is_signed=None)

        zero = arith.constant(ir.F32Type.get(), 0.0)
        sums = array([vector_of([zero, zero])] * (T // 8 * 4), layouts.acc, (COLUMNS, T))
        for i in range(count):
            codes = [
                code_pairs(word(first + i * rows + LANES * block), jnp.dtype(dtype).name)
                for block in range(DEPTH // BLOCK)
            ]
            left = [codes[block][HALVES * t + half] for t, block, half in left_order()]
            right = [pair(n, start + i, 2 * k + half) for k, n, half in right_order(T)]
            sums = mma(
                sums,
                array(left, layouts.lhs, (COLUMNS, DEPTH)),
                array(right, layouts.rhs, (DEPTH, T)),
            )
        return array(sums.registers.reshape(-1), fragmented.WGMMA_LAYOUT, (COLUMNS, T))

    return multiply(words, jnp.int32(base), x)


def left_order() -> list[tuple[int, int, int]]:
    """The order of a thread's registers of `mma`'s left operand: (t, block of 8 along K, half)."""
    return [*itertools.product(range(TILES), range(DEPTH // BLOCK), range(HALVES))]


def right_order(T: int) -> list[tuple[int, int, int]]:
    """The order of its right operand: (16 along K, 8 of T tokens, which 8 of the 16)."""
    return [*itertools.product(range(DEPTH // 16), range(T // 8), range(2))]


def _pair_reader(x: Any, depth: int, kind: Any) -> Callable[[int, int, int], Any]:
    """Returns a function that reads a thread's two neighbours along K of one token.

    It takes the number of eight tokens, that of a chunk of 64 along K, and that of eight in it. The
    token is the thread's lane / 4 of the eight, the neighbours are 2 (lane mod 4) and the next.
    """
    i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    two = ir.VectorType.get((2,), kind)

    def number(x: int) -> Any:
        return arith.constant(i32, x)

    lane = arith.andi(utils.thread_idx(), number(31))
    token = arith.shrui(lane, number(2))
    start = arith.addi(
        arith.shli(token, number(7)), arith.shli(arith.andi(lane, number(3)), number(2))
    )
    pointer = utils.memref_ptr(x)

    def pair(tokens: int, chunk: int, eight: int) -> Any:
        turned = arith.shli(arith.xori(token, number(eight)), number(4))
        at = arith.addi(start, turned)
        tile = 1024 * (tokens * (depth // DEPTH) + chunk)
        at = arith.addi(at, number(tile))
        return llvm.load(two, utils.getelementptr(pointer, [at], i8))

    return pair


def code_pairs(word: Any, dtype: str) -> list[Any]:
    """Returns, for each byte of a word, its two signed codes of 4 bits as a pair of 16-bit floats.

    The first code of a byte, in its low bits, becomes the lower half of a register.
    """
    one, _ = ONES[dtype]
    shifted = _right(word, 4)
    weights = []
    for j in range(4):
        halves = _permute(word, shifted, 0xF0F0 | (4 + j) << 8 | j)
        field = _masked(halves, 0x000F000F, (one | SIGN) * 0x10001)
        weights.append(_minus(field, dtype))
    return weights


def _right(word: Any, places: int) -> Any:
    return arith.shrui(word, arith.constant(word.type, places))


def _permute(low: Any, high: Any, selector: int) -> Any:
    """Four bytes of eight by PRMT: byte i is the one whose number is digit i of the selector."""
    return llvm.inline_asm(low.type, [low, high], f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r")


def _masked(word: Any, mask: int, flip: int) -> Any:
    """(word & mask) ^ flip, by one LOP3; ptxas makes two of the plain operations."""
    code = f"lop3.b32 $0, $1, {mask:#x}, $2, {(0xF0 & 0xCC) ^ 0xAA:#x};"
    return llvm.inline_asm(word.type, [word, arith.constant(word.type, flip)], code, "=r,r,r")


def _minus(field: Any, dtype: str) -> Any:
    """Two 16-bit floats, less the offset of `code_pairs`."""
    kind = ir.BF16Type.get() if dtype == "bfloat16" else ir.F16Type.get()
    two = ir.VectorType.get((2,), kind)
    splat = ir.DenseElementsAttr.get_splat(two, ir.FloatAttr.get(kind, float(offset(dtype))))
    one = vector_of([field])
    return arith.subf(vector.bitcast(two, one), arith.constant(two, splat))


def parts_of_scale(number: Any) -> tuple[Any, Any]:
    """Returns the nearest bf16 number of a float32, and that of the rest, each twice in 32 bits."""
    high = _twice(number)
    word = ir.IntegerType.get_signless(32)
    above = arith.bitcast(ir.F32Type.get(), arith.andi(high, arith.constant(word, UPPER)))
    return high, _twice(arith.subf(number, above))


def _twice(number: Any) -> Any:
    """The nearest bf16 number of a float32, in both halves of a register."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [number], "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f")


def scaled(pair: Any, high: Any, low: Any) -> Any:
    """A pair of bf16 numbers times a scale of two parts, registers of `scale_pairs`.

    PTX is written out because LLVM computes a fused multiply-add of bf16 in float32.
    """
    word = ir.IntegerType.get_signless(32)
    code = "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}"
    codes = element_of(vector.bitcast(ir.VectorType.get((1,), word), pair), 0)
    parts = [element_of(part, 0) for part in (high, low)]
    product = vector_of([llvm.inline_asm(word, [codes, *parts], code, "=r,r,r,r")])
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), product)
