"""Packed codes as operands of the tensor cores: layouts of registers, and the arithmetic in them.

The tensor core of Hopper (the instruction wgmma) takes its left operand from registers, so a weight
can be dequantized there and multiplied without a detour through shared memory. The columns of the
weight therefore become the rows of the left operand, and the product is y^T = w^T x^T. This file
says which thread needs which code, arranges the loads so that each thread reads just its own codes,
and turns codes into floats.

Which thread has what. A warpgroup (4 warps of 32 lanes) handles 128 columns. In memory the bytes of
four neighbouring columns form one 32-bit word: word c of a row has columns 4c to 4c + 3. Along K a
thread needs, of each 8 codes, the two at places 2q and 2q + 1, where q = lane mod 4. With warp w,
lane l, and t and half each 0 or 1:

    row of wgmma's operand     16 w + l / 4 + 8 half + 64 t
    word of the row of words   4 (w + 4 (l / 16)) + (l / 4) mod 4
    column of the weight       4 word + 2 t + half, which is byte 2 t + half of the word

So the four bytes of a word belong to one thread, one byte to each of the thread's four rows, and no
value has to move between threads. With 8 or 4 bits the thread's two neighbours along K are whole
bytes. With 3 or 2 bits they are not; there a lane takes 8 (4) neighbours of each 32 (16) along K,
which fill 3 bytes (1 byte), and `ordered` puts the activations in the same order. That is allowed
because a sum over K does not depend on the order of its terms, but for rounding.

Banks. A row of 32 words is 128 bytes, so without more care the four lanes with the same word of
four rows would read from one bank of shared memory. TMA swizzles the words: the sixteen bytes at
place p of row r stand at place p XOR (r mod 8). With the words above, the lanes of a warp then read
from 32 banks at once (4, 3 and 2 bits; with 8 bits two lanes still meet).

What comes out. The sums of a thread belong to four neighbouring columns, for two tokens of each 8.
In the layout `SUMS` of y (tokens, 128 columns) they are vectors of four neighbours, so y is stored
without a transposition.

Signed codes of 4 bits have a shorter way (pairs.py).

Legend: M tokens, K contracted; R rows of four lanes, C words of a row; T tokens of a tile.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fragmented
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from pallas_kernels.quant_gemm.reference import Spec

Values = Any  # a traced array in registers
COLUMNS, WORDS = 128, 32  # of a warpgroup
DEPTH = 64  # of K in a wgmma with an operand in registers: a swizzled row of the other one
LANES, HALVES, TILES = 4, 2, 2  # lanes along K; rows 8 apart, and 64 apart, of a thread
BLOCK = 8  # along K in which a thread has one pair
# Of a code's bits: (pairs of neighbours that a lane owns, bytes that hold them).
OWNED = {2: (2, 1), 3: (4, 3), 4: (1, 1), 8: (1, 2)}
FRACTION = 23  # bits of float32's fraction
EXPONENT = 0x4B000000  # of float32 from 2^23 to 2^24, whose last bit is 1
HIGH = 12  # places by which a word is shifted for the codes at its top (chosen: fits all bits)


def _layout(tiles: Any, warp: int, lanes: tuple[int, ...]) -> fragmented.TiledLayout:
    return fragmented.TiledLayout(
        fragmented.Tiling(tiles), (warp,), lanes, -1, _check_canonical=False
    ).canonicalize()


# (R, 32, 1): lane q of four has the rows r with r mod 4 = q; eight lanes, and four warps, have
# words. The 1 is one column of a word's four. With it a view of a word's bytes, or of its columns'
# numbers, keeps a dimension without gaps, which Mosaic's layout inference asks for.
LANED = _layout(((LANES, WORDS, 1), (1, 16, 1), (1, 4, 1)), -5, (-8, -2, -9))
# (T, 128): of each 8 rows lane q of four has rows 2q and 2q + 1, and others have four columns each.
SUMMED = _layout(((8, COLUMNS), (2, 64), (16,), (4,)), -3, (-5, -2, -6))
PARITY = -4  # the dimension of SUMMED's registers that counts a lane's two tokens of eight


def _public(layout: fragmented.TiledLayout) -> Any:
    return plgpu.Layout.TILED(
        layout.tiling,
        warp_dims=layout.warp_dims,
        lane_dims=layout.lane_dims,
        vector_dim=layout.vector_dim,
    )


CODES, SUMS = _public(LANED), _public(SUMMED)
# Words in shared memory: rows of 128 bytes, which TMA swizzles.
# A tiling would want whole tiles of columns in memory.
SWIZZLE = plgpu.SwizzleTransform(4 * WORDS)
SWIZZLED = plgpu.RefType((SWIZZLE,))
ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of wgmma's sums


def ordered(x_MK: Values, bits: int) -> Values:
    """Returns x with K in the order in which lanes own codes; K is a multiple of 32."""
    pairs, _ = OWNED[bits]
    if pairs == 1:
        return x_MK
    M, K = x_MK.shape
    return x_MK.reshape(M, -1, LANES, pairs, 2).swapaxes(2, 3).reshape(M, K)


def rows_of(depth: int, bits: int) -> int:
    """Returns the rows of bytes of so many codes along K; a multiple of 32."""
    return depth * bits // 8


def load(words: Any, place: tuple[Any, int, int], bits: int, interpret: bool) -> list[Values]:
    """Returns the words that each lane owns: one (R, 32, 1) for each byte.

    words: shared memory, swizzled, (rows of bytes, 32). place: (a row, traced, a multiple of 8; the
    first row after it; rows).
    """
    base, first, rows = place
    _, size = OWNED[bits]
    R = rows // size
    if interpret:
        words_R = words[pl.ds(base + first, rows)].reshape(R, size, WORDS, 1)
        return [words_R[:, r] for r in range(size)]
    like = plgpu.ShapeDtypeStruct((R, WORDS, 1), jnp.int32, layout=CODES)

    @plgpu.inline_mgpu(
        arg_types=(SWIZZLED, plgpu.Layout.WG_SPLAT),
        return_type=[like] * size,
    )
    def read(_, words, base):
        word, arrays = reader(words, base, size), []
        for r in range(size):
            registers = np.empty(LANED.registers_shape((R, WORDS, 1)), object)
            for i in range(R // LANES):
                registers[(i, *(0,) * (registers.ndim - 1))] = vector_of(
                    [word(first + size * LANES * i + r)]
                )
            arrays.append(
                fragmented.FragmentedArray(_registers=registers, _layout=LANED, _is_signed=True)
            )
        return arrays

    return read(words, jnp.int32(base))


def reader(words: Any, base: Any, size: int) -> Callable[[int], Any]:
    """Returns a function that reads a thread's word of row `row` + size * q from swizzled memory.

    base: as in `load`, in a register. The offset of lane q's row, and of the sixteen bytes there,
    is computed once for each place of a row among eight.
    """
    i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)

    def number(x: int) -> Any:
        return arith.constant(i32, x)

    thread = utils.thread_idx()
    lane, warp = (
        arith.andi(thread, number(31)),
        arith.andi(arith.shrui(thread, number(5)), number(3)),
    )
    q = arith.andi(lane, number(3))
    inside = arith.andi(arith.shrui(lane, number(2)), number(3))
    sixteen = arith.addi(warp, arith.shli(arith.shrui(lane, number(4)), number(2)))
    rows = arith.muli(q, number(size))
    start = arith.addi(
        arith.shli(arith.addi(base.registers.item(), rows), number(7)),
        arith.shli(inside, number(2)),
    )
    pointer = utils.memref_ptr(words)

    @functools.cache
    def offset(place: int) -> Any:
        turned = arith.andi(arith.addi(rows, number(place)), number(7))
        return arith.addi(start, arith.shli(arith.xori(sixteen, turned), number(4)))

    def word(row: int) -> Any:
        at = arith.addi(offset(row % 8), number(128 * row))
        return llvm.load(i32, utils.getelementptr(pointer, [at], i8))

    return word


def numbers(words: Sequence[Values], bits: int, signed: bool) -> list[list[tuple[Values, int]]]:
    """Returns, for each byte j of a word, the codes that its lane owns, in order: (code * 2^p, p).

    A code is left at its place p in the word if the 23 bits of a float32's fraction reach there.
    That saves a shift; the factor 2^-p becomes part of the scale (`dequantize`).
    """
    pairs, _ = OWNED[bits]
    high = [_shifted(word, HIGH) for word in words]
    return [
        [_number((words, high), bits, signed, divmod(bits * i, 8), j) for i in range(2 * pairs)]
        for j in range(4)
    ]


def _number(
    words: tuple[Sequence[Values], Sequence[Values]],
    bits: int,
    signed: bool,
    start: tuple[int, int],
    j: int,
) -> tuple[Values, int]:
    """Returns one code of byte j as (code * 2^power, power).

    The code's bits are put into the fraction of the float 2^23, whose last bit counts 1;
    subtracting 2^23 leaves the code as a float. The sign bit is flipped first and its value is
    subtracted too, which turns two's complement into a signed number.
    Args: words: the words as they are, and shifted right by HIGH. start: the row of bytes in which
      the code begins, and the bit of that byte.
    """
    low, high = words
    (row, place), power = start, 8 * j + start[1]
    over = place + bits - 8  # bits in the next byte
    if over > 0:
        field = _shifted(low[row], power) & np.int32(2 ** (bits - over) - 1)
        more = _shifted(low[row + 1], 8 * j) & np.int32(2**over - 1)
        field = field | lax.shift_left(more, jnp.full_like(more, bits - over))
        power = 0
    else:
        near = power + bits <= FRACTION
        word, power = (low[row], power) if near else (high[row], power - HIGH)
        field = word & np.int32((2**bits - 1) << power)
    sign = 2 ** (bits - 1) << power if signed else 0
    raised = lax.bitcast_convert_type(field ^ np.int32(EXPONENT | sign), jnp.float32)
    return raised - np.float32(2**FRACTION + sign), power


def _shifted(word: Values, places: int) -> Values:
    return lax.shift_right_logical(word, jnp.full_like(word, places)) if places else word


def by_column(vector_C: Values, shape: tuple[int, ...]) -> Values:
    """Returns a number of each word (32, 1), the same in all rows."""
    return lax.broadcast_in_dim(vector_C, shape, [1, 2])


def load_columns(numbers: Any, j: int, interpret: bool) -> Values:
    """Returns the numbers of the columns of byte j, (32, 1).

    numbers: shared memory, (128,), in the order of the columns.
    """
    if interpret:
        return numbers[...].reshape(WORDS, 4)[:, j : j + 1]
    view = numbers.reshape(WORDS, 4).at[:, pl.ds(j, 1)]
    return plgpu.load(view, layout=CODES.reduce(0), optimized=False)


def places(bits: int, parts: int) -> dict[tuple[int, int, int], tuple[int, int, int, int, int]]:
    """Returns where each pair of codes in a thread's left operand (128, 64) comes from.

    It maps (t, block of 8 along K, half) to (part, row of four lanes, byte j, first and second code
    of the byte's codes).
    Args: parts: into how many parts the 64 along K are cut; each part has arrays of its own.
    """
    pairs, _ = OWNED[bits]
    each = DEPTH // BLOCK // parts  # blocks of a part
    cells = {}
    for t in range(TILES):
        for block in range(DEPTH // BLOCK):
            part, inside = divmod(block, each)
            row, pair = divmod(inside, pairs)
            for half in range(HALVES):
                cells[t, block, half] = part, row, HALVES * t + half, 2 * pair, 2 * pair + 1
    return cells


def operand(values: Sequence[Any], bits: int, dtype: Any, interpret: bool) -> Values:
    """Returns w^T (128, 64), rounded to dtype, in the layout of wgmma's left operand.

    values: values[part][j][i] is code i of byte j in that part of the 64 along K, float32, (R, 32,
    1).
    """
    parts = len(values)
    source = places(bits, parts)
    if interpret:
        # Warps and lanes are axes here: row = 16 w + l / 4 + ..., and K = 8 block + 2 q + parity;
        # words are (l / 16, w, (l / 4) mod 4).
        w = np.empty((TILES, DEPTH // BLOCK, HALVES, 2), object)
        for (t, block, half), (part, row, j, *codes) in source.items():
            for parity, i in enumerate(codes):
                four_QC = values[part][j][i][LANES * row : LANES * (row + 1)]
                w[t, block, half, parity] = four_QC
        stacked = jnp.stack(list(w.reshape(-1))).reshape(*w.shape, LANES, 2, 4, 4)
        # (t, block, half, parity, q, l / 16, warp, (l / 4) mod 4) -> rows, then K.
        return stacked.transpose(0, 6, 2, 5, 7, 1, 4, 3).reshape(COLUMNS, DEPTH).astype(dtype)

    types = [[[CODES for _ in codes] for codes in part] for part in values]

    @plgpu.inline_mgpu(
        arg_types=(types,),
        return_type=plgpu.ShapeDtypeStruct((COLUMNS, DEPTH), dtype, layout=plgpu.Layout.WGMMA),
    )
    def place(_, values):
        layout = fragmented.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((COLUMNS, DEPTH)), object)
        for (t, block, half), (part, row, j, *codes) in source.items():
            pair = [_single(values[part][j][i].registers, row) for i in codes]
            registers[(t, block, 0, 0, half, *(0,) * (registers.ndim - 5))] = vector_of(pair)
        w = fragmented.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
        return w.astype(ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())

    return place([list(map(list, part)) for part in values])


def operands(
    words: Any,
    base: Any,
    readers: Mapping[str, Callable[[int], Any]],
    spec: Spec,
    dtype: Any,
    interpret: bool,
) -> Callable[[int], Values]:
    """Returns a function of a number of 64 along K, which returns their w^T (128, 64).

    Codes are dequantized in pieces that lie inside of one group.
    Args: words, base: as in `load`. readers: "scales" and "zeros", if any: each maps a group
      to its numbers, in shared memory, in the order of the columns.
    """
    bits, piece = spec.bits, min(spec.group, DEPTH)

    def operand_of(chunk: int) -> Values:
        parts = []
        for start in range(chunk * DEPTH, (chunk + 1) * DEPTH, piece):
            first, size = rows_of(start, bits), rows_of(piece, bits)

            def column(name: str, j: int, group: int = start // spec.group) -> Values | None:
                return load_columns(readers[name](group), j, interpret) if name in readers else None

            held = load(words, (base, first, size), bits, interpret)
            parts.append(dequantize(numbers(held, bits, spec.signed), column))
        return operand(parts, bits, dtype, interpret)

    return operand_of


def load_rows(numbers: Any, interpret: bool) -> Values:
    """Returns the numbers of all 128 columns, one for each row of wgmma's sums.

    numbers: shared memory, (128,), in the order of the columns.
    """
    if interpret:
        # Columns (l / 16, warp, (l / 4) mod 4, t, half) are rows (t, warp, half, l / 4).
        parts = numbers[...].reshape(2, 4, 4, TILES, HALVES)
        return parts.transpose(3, 1, 4, 0, 2).reshape(COLUMNS)
    columns = [load_columns(numbers, j, interpret) for j in range(4)]

    @plgpu.inline_mgpu(
        arg_types=([CODES.reduce(0)] * 4,),
        return_type=plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout=ROW),
    )
    def place(_, columns):
        layout = ROW.to_mgpu()
        registers = np.empty((TILES, HALVES), object)
        for j, column in enumerate(columns):
            (registers[divmod(j, HALVES)],) = column.registers.flat
        registers = registers.reshape(layout.registers_shape((COLUMNS,)))
        return fragmented.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return place(columns)


def sums(acc_CT: Values, interpret: bool) -> Values:
    """Returns y (T, 128), whose columns are in order, from wgmma's sums (128, T)."""
    T = acc_CT.shape[1]
    if interpret:
        # Rows (t, warp, half, l / 4) are columns (l / 16, warp, (l / 4) mod 4, t, half).
        parts = acc_CT.reshape(TILES, 4, HALVES, 2, 4, T)
        return parts.transpose(5, 3, 1, 4, 0, 2).reshape(T, COLUMNS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((T, COLUMNS), jnp.float32, layout=SUMS),
    )
    def place(_, acc):
        registers = np.empty(SUMMED.registers_shape((T, COLUMNS)), object)
        flat = acc.registers.reshape(TILES, T // 8, HALVES)
        for block in range(T // 8):
            for parity in range(2):
                four = [
                    element_of(flat[t, block, h], parity) for t in range(TILES) for h in range(2)
                ]
                registers[_summed_index(registers.ndim, block, parity)] = vector_of(four)
        return fragmented.FragmentedArray(_registers=registers, _layout=SUMMED, _is_signed=None)

    return place(acc_CT)


def _summed_index(rank: int, block: int, parity: int) -> tuple[int, ...]:
    """Returns an index of SUMMED's registers. parity: 0 or 1, a lane's first or second token."""
    index = [0] * rank
    index[0], index[PARITY] = block, parity
    return tuple(index)


def _single(registers: np.ndarray, row: int) -> Any:
    """Returns the one value that a thread has of LANED's registers in a row of four lanes."""
    (value,) = registers[row].flat
    return element_of(value, 0)


def element_of(value: Any, i: int) -> Any:
    """One element of a register that is a vector."""
    return vector.extract(value, dynamic_position=[], static_position=[i])


def vector_of(elements: Sequence[Any]) -> Any:
    """A register of these elements."""
    return vector.from_elements(ir.VectorType.get((len(elements),), elements[0].type), elements)


def dequantize(
    codes: Sequence[Sequence[tuple[Values, int]]],
    column: Callable[[str, int], Values],
) -> list[list[Values]]:
    """Returns the weights, float32: code * scale, plus zero where there are zero points.

    Args: codes: the result of `numbers`. column: maps ("scales" or "zeros", byte j) to the numbers
      of the byte's columns, (32, 1); None where there are none.
    """
    parts = []
    for j, each in enumerate(codes):
        spread = functools.partial(by_column, shape=each[0][0].shape)
        scale, zero = column("scales", j), column("zeros", j)
        scales = {power: spread(scale * np.float32(2.0**-power)) for _, power in each}
        numbers = [code * scales[power] for code, power in each]
        parts.append(numbers if zero is None else [n + spread(zero) for n in numbers])
    return parts
