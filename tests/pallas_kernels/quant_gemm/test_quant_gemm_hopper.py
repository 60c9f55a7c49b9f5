"""The Hopper kernel in the interpreter, race detection on, and where its registers lie."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array as fragmented
from jax.experimental.mosaic.gpu.mma import MMALayouts

from pallas_kernels import aot, interpret, pack_weight, quant_matmul
from pallas_kernels.hopper import cards, tiles
from pallas_kernels.quant_gemm import hopper, pairs, registers
from pallas_kernels.quant_gemm.cases import CASES as SHAPES
from pallas_kernels.quant_gemm.hopper import Tile
from pallas_kernels.quant_gemm.reference import BITS, Spec
from tests import quant_gemm_oracle as oracle

SLOW = pytest.mark.slow
ONE = Tile(128, 8, 64, 2, 1)
TWO = Tile(256, 16, 128, 2, 2)
SPLIT = dataclasses.replace(TWO, splits=2)
# (M, N, K), tile, spec, with a bias, blocks.
CASES = {
    # Tails in all three sizes, three steps in two stages, two tiles of columns, a short last group.
    "int4": ((5, 144, 168), ONE, Spec(4, 64, True, "silu"), True, 1),
    # Two warpgroups; the second split's last step lies beyond K; four groups a step.
    "int8 split": ((16, 272, 328), SPLIT, Spec(8, 32), True, 2),
    "int4 split": ((16, 272, 700), SPLIT, Spec(4, 128), True, 2),
    "int4, one group": ((9, 300, 200), TWO, Spec(4, 200), True, 2),
    "3 bits": ((3, 37, 203), ONE, Spec(3, 32, False, "gelu"), True, 1),
    "2 bits": ((17, 128, 130), TWO, Spec(2, 128), False, 1),
    "int4 zeros, one group": ((9, 40, 200), ONE, Spec(4, 200, False), False, 1),
    "int4 zeros split": ((3, 400, 700), SPLIT, Spec(4, 128, False, "gelu_tanh"), True, 4),
    "four warpgroups": (
        (16, 600, 320),
        Tile(512, 16, 128, 2, 4, splits=2),
        Spec(4, 128, False),
        False,
        2,
    ),
    # Warpgroups share columns: two pieces of them in halves of K, and one in quarters, whose sums
    # meet; a block has more than one tile. The last parts of the last step lie beyond K.
    "halves": (
        (16, 300, 700),
        Tile(256, 16, 128, 2, 4, splits=2),
        Spec(4, 64),
        True,
        2,
    ),
    "quarters": ((3, 272, 600), Tile(128, 8, 256, 2, 4), Spec(4, 128, True, "silu"), True, 2),
    "quarters by warp": (
        (13, 272, 1100),
        Tile(128, 16, 512, 2, 4, splits=2, by_warp=True),
        Spec(4, 128),
        True,
        2,
    ),
    "quarters, 8 bits zeros": ((8, 128, 600), Tile(128, 8, 256, 2, 4), Spec(8, 32, False), True, 1),
    "halves, 3 bits": ((9, 140, 300), Tile(128, 16, 128, 2, 2), Spec(3, 128, False), True, 1),
    "many tokens": ((200, 130, 64), Tile(128, 128, 64, 2, 1), Spec(4, 32), False, 1),
    # Weights scaled two at a time: groups of half a chunk, of a chunk, and longer than a step.
    "pairs of 32": ((17, 130, 200), Tile(128, 16, 128, 2, 1), Spec(4, 32), True, 1),
    "pairs of 64": ((130, 270, 330), Tile(256, 128, 128, 2, 2), Spec(4, 64), True, 2),
    "pairs, halves": ((130, 40, 300), Tile(128, 128, 128, 2, 2, splits=2), Spec(4, 512), True, 1),
    "pairs, 1000 tokens": ((1000, 16, 130), Tile(128, 128, 64, 2, 1), Spec(4, 128), False, 3),
}
QUICK = "int4", "pairs of 32"


def arrays(sizes, spec, bias, seed, dtype=jnp.bfloat16):
    """Bits beyond the last code of a column are set."""
    M, N, K = sizes
    random = np.random.default_rng(seed)
    scales, zeros = oracle.numbers(seed, K, N, spec.group, spec.signed)
    packed = pack_weight(oracle.codes(seed, K, N, spec.bits, spec.signed), bits=spec.bits)
    spare = np.ones((8 * packed.shape[0], N), np.uint8)
    spare[: K * spec.bits] = 0
    return (
        jnp.asarray(random.standard_normal((M, K)), dtype),
        packed | jnp.asarray(np.packbits(spare, axis=0, bitorder="little")),
        jnp.asarray(scales),
        None if zeros is None else jnp.asarray(zeros),
        jnp.asarray(random.standard_normal(N), jnp.float32) if bias else None,
    )


def weight(packed, scales, zeros, K, spec, tokens):
    """w in float64, as the kernel's tensor cores have it in bf16."""
    w = oracle.dequantize(packed, scales, zeros, K, spec.bits, spec.group)
    if spec.bits != 4 or not spec.signed:
        return oracle.rounded(w, "bfloat16")
    if tokens <= 64 and (spec.group % 64 == 0 or spec.group >= K):
        return w  # a group's scale multiplies its sums, so the weight itself is never rounded
    high = oracle.rounded(scales, "bfloat16")
    parts = high, oracle.rounded(scales - high, "bfloat16")
    upper, lower = (oracle.dequantize(packed, s, None, K, 4, spec.group) for s in parts)
    return oracle.rounded(upper + oracle.rounded(lower, "bfloat16"), "bfloat16")


def close(result, operands, spec, tokens):
    """One rounding of the result; the interpreter sums in another order."""
    x, packed, scales, zeros, bias = operands
    w = weight(packed, scales, zeros, x.shape[1], spec, tokens)
    want, _ = oracle.product(x, w, bias, spec.activation)
    assert result.dtype == x.dtype and result.shape == want.shape
    error = np.abs(np.asarray(result, np.float64) - want) / np.maximum(np.abs(want), 1)
    assert error.max() <= 2**-8, error.max()


def product(case, seed):
    sizes, tile, spec, bias, blocks = case
    operands = arrays(sizes, spec, bias, seed)
    call = functools.partial(hopper.multiply, spec=spec, tile=tile, interpret=True, blocks=blocks)
    with interpret.checked():
        result = jax.block_until_ready(jax.jit(call)(*operands))
    close(result, operands, spec, tile.block_n)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in CASES]
)
def test_kernel(name, seed):
    product(CASES[name], seed)


@pytest.mark.slow
def test_public_function_with_gradients(seed):
    """Through custom_vjp, in the heuristic's tile; two leading dimensions."""
    spec = Spec(4, 32, False, "silu")
    x, packed, scales, zeros, bias = arrays((6, 160, 72), spec, True, seed, jnp.float16)

    def call(x, scales, zeros, bias, implementation="interpret"):
        return quant_matmul(
            x.reshape(2, 3, -1),
            packed,
            scales,
            bits=4,
            group=32,
            zeros=zeros,
            bias=bias,
            activation="silu",
            implementation=implementation,
        )

    def grads(call, *args):
        y, pull = jax.vjp(call, *args)
        return y, *pull(jnp.ones_like(y))

    args = (x, scales, zeros, bias)
    want = jax.jit(functools.partial(grads, functools.partial(call, implementation="reference")))(
        *args
    )
    with interpret.checked():
        results = jax.block_until_ready(jax.jit(functools.partial(grads, call))(*args))
    assert results[0].shape == (2, 3, 160)
    for got, value in zip(results, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(value, np.float32), rtol=4e-3, atol=4e-3
        )


@pytest.mark.aot
@pytest.mark.parametrize(("bits", "fusions"), [(4, 1), (3, 2)])
def test_a_split_product_copies_no_weight(bits, fusions):
    """A kernel and the sum of its splits; of 3 bits one that puts x in order."""
    device = jax.sharding.SingleDeviceSharding(aot.devices(1, 1)[0])

    def array(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    def call(x, packed, scales):
        return quant_matmul(x, packed, scales, bits=bits, group=128, implementation="hopper")

    args = (
        array(16, 2048, dtype=jnp.bfloat16),
        array(2048 * bits // 8, 1024, dtype=jnp.uint8),
        array(16, 1024, dtype=jnp.float32),
    )
    text = aot.compile(jax.jit(call).lower(*args)).as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    words = ("custom-call(", "fusion(", "copy(", "transpose(")
    counts = [sum(f" {word}" in line for line in entry) for word in words]
    assert counts == [1, fusions, 0, 0]


# ---- where registers lie: every thread's, by the layouts as Mosaic has them


def held(layout, shape):
    """{(register index, place in its vector, warp, lane): element} of an array of this shape."""
    rank = layout.tiled_tiling_rank
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:  # tile by tile, as the layout is defined
        lead = numbers.shape[: -len(tile)]
        pairs = [(s // t, t) for s, t in zip(numbers.shape[-len(tile) :], tile, strict=True)]
        numbers = numbers.reshape(*lead, *(n for pair in pairs for n in pair))
        n, k = len(lead), len(tile)
        numbers = numbers.transpose(
            *range(n), *(n + 2 * i for i in range(k)), *(n + 2 * i + 1 for i in range(k))
        )
    owners = {}
    sizes = numbers.shape[-rank:]

    def index_of(thread, dims):
        """The place of a thread along the dimensions that are cut over such, or held by several."""
        shape = [sizes[d] if isinstance(d, int) else d.times for d in dims]
        places = np.unravel_index(thread, shape)
        return {d: int(i) for d, i in zip(dims, places, strict=True) if isinstance(d, int)}

    free = layout.registers_shape(shape)
    for warp in range(4):
        for lane in range(32):
            warps = [d for d in layout.warp_dims if isinstance(d, int) and sizes[d] > 1]
            cut = index_of(warp if warps else 0, warps) | index_of(lane, layout.lane_dims)
            for register in np.ndindex(*free):
                for place in range(layout.vector_length):
                    at = [*register]
                    for d, i in (cut | {layout.vector_dim: place}).items():
                        at[d] = i
                    element = np.unravel_index(numbers[tuple(at)], shape)
                    owners[register, place, warp, lane] = tuple(map(int, element))
    return owners


@pytest.fixture
def labelled(monkeypatch):
    """What Mosaic would be given is run with labels in the place of registers.

    Returns array(layout, shape, label): whose registers are (label, index).
    """

    class Array:
        def __init__(self, _registers, _layout, _is_signed):
            self.registers, self.layout = _registers, _layout

        def astype(self, _):
            return self

    def array(layout, shape, label):
        registers = np.empty(layout.registers_shape(shape), object)
        for index in np.ndindex(*registers.shape):
            registers[index] = label, index
        return Array(registers, layout, None)

    def inline(**_):
        return lambda place: functools.partial(place, None)

    changes = {
        "plgpu": dict(
            inline_mgpu=inline, ShapeDtypeStruct=plgpu.ShapeDtypeStruct, Layout=plgpu.Layout
        ),
        "fragmented": dict(FragmentedArray=Array, WGMMA_LAYOUT=fragmented.WGMMA_LAYOUT),
        "ir": dict(BF16Type=SimpleNamespace(get=lambda: None)),
    }
    for module in (registers, pairs):
        for name, values in changes.items():
            monkeypatch.setattr(module, name, SimpleNamespace(**values))
        monkeypatch.setattr(module, "element_of", lambda value, place: (*value, place))
        monkeypatch.setattr(module, "vector_of", tuple)
    return array


def column_of(row):
    """As the docstring of registers.py has it."""
    t, warp, half, quarter = row // 64, row % 64 // 16, row % 16 // 8, row % 8
    return 4 * (4 * (warp + 4 * (quarter // 4)) + quarter % 4) + 2 * t + half


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("bits", BITS)
def test_no_code_changes_its_thread_on_the_way_to_the_tensor_core(bits, parts, labelled):
    """Of each register of the operand: its thread holds that code of that column already."""
    pairs, _ = registers.OWNED[bits]
    depth = registers.DEPTH // parts
    shape = depth // (2 * pairs), registers.WORDS, 1
    values = [
        [
            [labelled(registers.LANED, shape, (part, j, i)) for i in range(2 * pairs)]
            for j in range(4)
        ]
        for part in range(parts)
    ]
    result = registers.operand(values, bits, jnp.bfloat16, interpret=False)
    words = held(registers.LANED, shape)
    operand = held(result.layout, (registers.COLUMNS, registers.DEPTH))
    order = np.arange(registers.DEPTH)[None]  # which K a place along K is
    order = np.asarray(registers.ordered(order, bits))[0]
    for (register, place, warp, lane), (row, k) in operand.items():
        (part, j, i), index, at = result.registers[register][place]
        r, c, _ = words[index, at, warp, lane]
        assert 4 * c + j == column_of(row)
        assert depth * part + 2 * pairs * r + i == order[k]
    assert len(operand) == registers.COLUMNS * registers.DEPTH


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_pair_of_codes_meets_the_scale_of_its_column(pieces, labelled, monkeypatch):
    """Of each register of the operand: the codes and both parts of the scale are its own."""
    first, numbers = 8, registers.CODES.reduce(0).to_mgpu()

    def columns(piece, j, _):
        return labelled(numbers, (registers.WORDS, 1), (piece, j))

    monkeypatch.setattr(registers, "load_columns", columns)
    for name, change in (
        ("parts_of_scale", lambda scale: [("high", scale), ("low", scale)]),
        ("reader", lambda *_: lambda row: row),
        ("code_pairs", lambda row, _: [(row, j) for j in range(4)]),
        ("scaled", lambda *registers: registers),
    ):
        monkeypatch.setattr(pairs, name, change)
    scales = [pairs.scale_pairs(registers.load_rows(i, False), False) for i in range(pieces)]
    result = pairs.scaled_operand(None, (0, first), scales, False)
    columns = held(numbers, (registers.WORDS, 1))
    operand = held(result.layout, (registers.COLUMNS, registers.DEPTH))
    for (register, place, warp, lane), (row, k) in operand.items():
        (word, j), *parts = result.registers[register]
        assert 2 * (word - first + lane % 4) + place == k and j == column_of(row) % 4
        for name, ((part, scale),) in zip(("high", "low"), parts, strict=True):
            (piece, j), index, at = scale
            assert (part, piece) == (name, k * pieces // registers.DEPTH)
            assert 4 * columns[index, at, warp, lane][0] + j == column_of(row)


@pytest.mark.parametrize("tokens", [8, 24])
def test_sums_lie_with_their_columns_in_order(tokens, labelled):
    """Each vector of y's layout is made of the four sums of its thread that belong there."""
    array = labelled(fragmented.WGMMA_LAYOUT, (registers.COLUMNS, tokens), None)
    array.shape = registers.COLUMNS, tokens
    result = registers.sums(array, interpret=False)
    sums = held(array.layout, array.shape)
    y = held(result.layout, (tokens, registers.COLUMNS))
    for (register, place, warp, lane), (token, column) in y.items():
        _, index, at = result.registers[register][place]
        row, there = sums[index, at, warp, lane]
        assert (column_of(row), there) == (column, token)
    assert len(y) == tokens * registers.COLUMNS


@pytest.fixture
def computed(monkeypatch):
    """The instructions of a thread, computed on Python's integers by what their names say."""
    ones = 2**32 - 1
    names = {
        "andi": lambda a, b: a & b,
        "shrui": lambda a, b: a >> b,
        "shli": lambda a, b: a << b & ones,
        "addi": lambda a, b: a + b,
        "muli": lambda a, b: a * b,
        "xori": lambda a, b: a ^ b,
        "constant": lambda _, value: value,
    }
    types = SimpleNamespace(get_signless=int, get=lambda *_: None)
    for module in (registers, pairs):
        monkeypatch.setattr(module, "arith", SimpleNamespace(**names))
        kinds = SimpleNamespace(IntegerType=types, VectorType=types)
        monkeypatch.setattr(module, "ir", kinds)
    return monkeypatch


def at_bytes(computed):
    """Lets a read from shared memory return its byte; returns the thread that reads, in a list."""
    thread = [0]
    read = dict(memref_ptr=lambda _: 0, getelementptr=lambda pointer, at, _: pointer + at[0])
    fake_utils = SimpleNamespace(thread_idx=lambda: thread[0], **read)
    for module in (registers, pairs):
        computed.setattr(module, "llvm", SimpleNamespace(load=lambda _, byte: byte))
        computed.setattr(module, "utils", fake_utils)
    return thread


@pytest.mark.parametrize("bits", BITS)
def test_a_thread_reads_its_own_words_and_a_warp_reads_32_banks(bits, computed):
    """The words that LANED gives a thread, from memory that TMA has swizzled."""
    size, base = registers.OWNED[bits][1], 16
    rows, first = 2 * 4 * size, 4 * size
    where = {}  # the byte of each word: sixteen bytes at place p stand at p XOR (row mod 8)
    for row in range(base + first + rows):
        for c in range(registers.WORDS):
            where[128 * row + 16 * ((c // 4) ^ (row % 8)) + 4 * (c % 4)] = row, c
    thread = at_bytes(computed)
    splat = SimpleNamespace(registers=np.array(base, object))
    read = {}
    for warp in range(4):
        for lane in range(32):
            thread[0] = 128 + 32 * warp + lane
            word = registers.reader(None, splat, size)
            for i in range(2):
                for r in range(size):
                    read[warp, lane, i, r] = word(first + size * 4 * i + r)
    layout = held(registers.LANED, (8, registers.WORDS, 1))
    for (register, _, warp, lane), (row, c, _) in layout.items():
        for r in range(size):
            place = where[read[warp, lane, register[0], r]]
            assert place == (base + first + size * row + r, c)
    banks = [len({read[w, lane, i, r] // 4 % 32 for lane in range(32)}) for w, _, i, r in read]
    assert min(banks) == (16 if bits == 8 else 32)


def test_a_thread_reads_its_own_activations_and_a_warp_reads_32_banks(computed):
    """Pairs along K of x (24 tokens, 128), from memory that TMA has tiled and swizzled."""
    where = {}  # the byte of each pair
    for token, k in np.ndindex(24, 64):
        tile, place, inside = 2 * (token // 8) + k // 32, token % 8, k % 32
        byte = 1024 * tile + 128 * place + 16 * ((inside // 4) ^ place) + 4 * (inside % 4)
        where[byte] = token, 2 * k
    thread, banks = at_bytes(computed), {}
    for lane in range(32):
        thread[0] = 96 + lane
        pair = pairs._pair_reader(None, 128, None)
        for eights, chunk, eight in np.ndindex(3, 2, 8):
            byte = pair(eights, chunk, eight)
            token, k = 8 * eights + lane // 4, 64 * chunk + 8 * eight + 2 * (lane % 4)
            assert where[byte] == (token, k)
            banks.setdefault((eights, chunk, eight), set()).add(byte // 4 % 32)
    assert all(len(each) == 32 for each in banks.values())


@pytest.mark.parametrize("tokens", [8, 16])
def test_warps_multiply_registers_in_the_order_of_their_instruction(tokens):
    """The orders in which `exact_sums` lists its registers, by the layouts that Mosaic has."""
    layouts = MMALayouts(jnp.bfloat16)
    depth, rows = registers.DEPTH, registers.COLUMNS
    for layout, shape, order in (
        (layouts.lhs, (rows, depth), pairs.left_order()),
        (layouts.rhs, (depth, tokens), pairs.right_order(tokens)),
    ):
        numbers = np.arange(len(order)).reshape(layout.registers_shape(shape))
        for (register, place, warp, lane), position in held(layout, shape).items():
            a, b, half = order[numbers[register]]
            q, g = lane % 4, lane // 4
            if shape[0] == rows:
                assert position == (64 * a + 16 * warp + 8 * half + g, 8 * b + 2 * q + place)
            else:
                assert position == (16 * a + 8 * half + 2 * q + place, 8 * b + g)
    shape = rows, tokens
    assert list(held(layouts.acc, shape).values()) == list(
        held(fragmented.WGMMA_LAYOUT, shape).values()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_of_4_bits_become_floats_exactly(dtype, seed, computed):
    """By PRMT and LOP3 as the PTX ISA defines them, and float arithmetic on the bits."""

    def permute(code, low, high):
        selector = int(code.split("$2, ")[1].rstrip(";"), 16)
        source = [*int(low).to_bytes(4, "little"), *int(high).to_bytes(4, "little")]
        digits = [selector >> 4 * i & 15 for i in range(4)]
        # A digit from 8 on spreads the sign of its byte.
        each = [255 * (source[d & 7] >> 7) if d > 7 else source[d] for d in digits]
        return int.from_bytes(bytes(each), "little")

    def logic(code, a, c):
        mask, _, table = code.removeprefix("lop3.b32 $0, $1, ").rstrip(";").split(", ")
        merged = 0
        for bit in range(32):
            place = (a >> bit & 1) << 2 | (int(mask, 16) >> bit & 1) << 1 | (c >> bit & 1)
            merged |= (int(table, 16) >> place & 1) << bit
        return merged

    class Word(int):
        type = None

    def assembly(_, operands, code, constraints):
        assert constraints == "=r,r,r"
        return Word((permute if code.startswith("prmt") else logic)(code, *operands))

    def minus(field, dtype):
        pair = np.array([field], np.uint32).view(jnp.dtype(dtype))
        return pair - np.asarray(pairs.offset(dtype), dtype)

    computed.setattr(pairs, "llvm", SimpleNamespace(inline_asm=assembly))
    computed.setattr(pairs, "_minus", minus)

    for word in np.random.default_rng(seed).integers(0, 2**32, 200):
        unpacked = pairs.code_pairs(Word(word), dtype)
        nibbles = [int(word) >> 4 * i & 15 for i in range(8)]
        signed = np.array([n - 16 if n > 7 else n for n in nibbles]).reshape(4, 2)
        np.testing.assert_array_equal(np.array(unpacked, np.float32), signed)


# ---- tiles


def test_the_heuristic_gives_legal_tiles_that_fill_a_gpu():
    for case in SHAPES:
        tile = hopper.heuristic(case.M, case.N, case.K, case.spec)
        hopper.check(tile, case.spec)
        tiles.check_shared("x", hopper.buffers(tile, case.spec, jnp.bfloat16))
        assert tile.stages >= 3
        count = hopper.tile_count(tile, case.M, case.N) * tile.splits
        assert count > cards.SMS // 2 and (tile.splits == 1 or count <= cards.SMS)
    for sizes in ((1, 1, 1), (0, 4, 4), (4, 0, 0), (8192, 8, 8), (1, 64, 65536)):
        hopper.check(hopper.heuristic(*sizes, Spec(4, 64)), Spec(4, 64))


BAD = {
    "block_m=192 must be a multiple of 128": Tile(192, 8, 64, 2, 2),
    "block_k=64 must be a multiple of 128": Tile(128, 8, 64, 2, 2),
    "block_n=12 must be a multiple of 8": Tile(128, 12, 64, 2, 1),
    "block_k=32 must be a multiple of 64": Tile(128, 8, 32, 2, 1),
    "one warpgroup, or the same number of them, for each 128": Tile(256, 8, 64, 2, 1),
    "smaller tiles or fewer warpgroups": Tile(256, 256, 64, 2, 2),
    "at most 16 tokens .by_warp": Tile(128, 32, 64, 2, 1, by_warp=True),
    "no cluster": Tile(128, 8, 64, 2, 1, cluster=2),
    "block_k=192 must be a multiple of the group, 128": Tile(128, 8, 192, 2, 1),
}


@pytest.mark.parametrize("message", BAD)
def test_an_illegal_tile_is_refused(message):
    with pytest.raises(ValueError, match=message):
        hopper.check(BAD[message], Spec(4, 128))


def test_what_cannot_run_says_why():
    x, packed, scales, *_ = arrays((4, 16, 96), Spec(4, 48), False, 0)
    with pytest.raises(NotImplementedError, match="groups of 32 or a multiple of 64, found 48"):
        quant_matmul(x, packed, scales, bits=4, group=48, implementation="interpret")
    x, packed, scales, *_ = arrays((4, 16, 96), Spec(4, 32), False, 0, jnp.float32)
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, found float32"):
        quant_matmul(x, packed, scales, bits=4, group=32, implementation="interpret")
