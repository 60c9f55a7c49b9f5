"""The product of activations and packed codes for Hopper: the weight is dequantized in registers.

It runs on the engine of pallas_kernels/hopper, with the two sides of the product exchanged: the
kernel computes y^T = w^T x^T. The columns of the weight are then the 64 rows of wgmma, and the
tokens are its columns, of which there may be as few as 8, so decoding a few tokens wastes no rows.
The weight becomes the left operand, the one that wgmma can take from registers:

    producer      TMA: packed bytes, scales, zeros of a step, x -> ready[s]
    each compute  wait ready[s] | 64 of K: words -> codes -> w^T in registers (registers.py) | wgmma
                  | the next 64, while the tensor core multiplies | arrive free[s]
    epilogue      sums | bias, activation | shared memory | TMA to y (tokens, columns)

Because the sides are exchanged, a tile's block_m counts columns of the weight here, 128 for each
warpgroup, and its block_n counts tokens. Where there are more warpgroups than that, they share the
columns: each multiplies its part of a step's K, and at the end of a tile the first adds the sums of
the others, which come through shared memory. Then fewer splits are needed to fill the SMs. Where a
tile reaches over an edge, TMA reads zeros. The byte zero is a finite code there, and x is zero, so
the product is zero as well.

Where there are fewer tiles than SMs, K is cut into splits as in pallas_kernels/gemm/hopper.py. Each
split writes a page of float32 sums; XLA adds the pages in the order of the splits and applies the
epilogue in the same fusion.

Legend: M tokens, N columns, K contracted, G groups of K, P rows of packed bytes.
"""

import dataclasses
import functools
import itertools
from typing import Any, cast, override

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import work
from pallas_kernels.hopper import engine, tiles
from pallas_kernels.hopper.activations import activate_tile
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.epilogue import Staging
from pallas_kernels.hopper.memory import PIECE, pad, span, up, varying_as
from pallas_kernels.quant_gemm import pairs, reference, registers
from pallas_kernels.quant_gemm.reference import Spec
from pallas_kernels.quant_gemm.registers import COLUMNS, DEPTH, WORDS

OP = "quant_matmul"
TOKENS = (8, 16, 32, 64, 128)  # of a tile
BY_WARP = 16  # tokens, at most, that warps multiply by (chosen: wgmma is as fast from 64 on)
STAGED = 64  # tokens of a piece of y on its way out
SMALLEST = 32  # of a group along K
SHORTEST = 256  # of K, that a split has at least (chosen: two or four steps)
GRAIN = 16  # columns of a row whose bytes TMA takes
REGISTERS = {3: (160, 32), 4: (112, 32)}  # of a thread that computes, and of one that copies
MOST_EVEN = 8  # splits for the sake of even work (chosen): each costs a page of sums
BOX = 256  # rows that one copy of TMA takes
SWIZZLED = 64  # columns of a piece of y, of 16 bits; of float32 32


@dataclasses.dataclass(frozen=True)
class Tile(tiles.Tile):
    """How a product is cut. by_warp: warps multiply codes by few tokens (pairs.exact_sums)."""

    by_warp: bool = False


def scales_sums(spec: Spec, tokens: int) -> bool:
    """Tells whether the codes are multiplied unscaled, and a group's scale multiplies its sums.

    Args: tokens: those of a tile. If they are many, no registers are left for the sums of a group.
    """
    return spec.bits == 4 and spec.signed and spec.group % DEPTH == 0 and tokens <= 64


def scales_pairs(spec: Spec, tokens: int, dtype: Any) -> bool:
    """Tells whether weights are scaled two at a time, in bf16 (pairs.scaled_operand)."""
    fits = spec.bits == 4 and spec.signed and not scales_sums(spec, tokens)
    return fits and jnp.dtype(dtype).name == "bfloat16"


def columns_of(tile: Tile) -> int:
    """Returns into how many pieces of 128 columns a tile is cut."""
    return tile.block_m // COLUMNS


def parts_of(tile: Tile) -> int:
    """Returns how many warpgroups share the columns of a piece, each with its part of a step."""
    return tile.warpgroups // columns_of(tile)


def misfits(dtype: Any, M: int, N: int, K: int, spec: Spec) -> list[str]:
    """Returns why the kernel cannot take a product, empty when it can."""
    reasons = []
    if jnp.dtype(dtype).name == "float32":
        reasons.append("needs bfloat16 or float16, found float32")
    if not M * K * N:
        reasons.append(f"needs something to compute, found M={M}, N={N}, K={K}")
    if spec.group < K and spec.group != SMALLEST and spec.group % DEPTH:
        reasons.append(f"needs groups of {SMALLEST} or a multiple of {DEPTH}, found {spec.group}")
    return reasons


def heuristic(M: int, N: int, K: int, spec: Spec, dtype: Any = jnp.bfloat16) -> Tile:
    """Returns the tile for a size that was never tuned.

    It holds all tokens of a decoding step, and has as many splits as fill the SMs.
    """
    tokens = next((t for t in TOKENS if t >= M), TOKENS[-1])
    warpgroups = 2 if N > COLUMNS else 1
    tile = Tile(COLUMNS * warpgroups, tokens, DEPTH, 8, warpgroups)
    count = tile_count(tile, M, N)
    # With many tokens, pages of float32 sums leave no shared memory for three stages of 128.
    deep = tokens <= 64 or (scales_pairs(spec, tokens, dtype) and count > SMS // 2)
    depth = 2 * DEPTH if deep and _fits(spec, K, 2 * DEPTH) else DEPTH
    tile, steps = dataclasses.replace(tile, block_k=depth), max(pl.cdiv(K, depth), 1)
    splits = min(max(SMS // max(count, 1), 1), max(K // SHORTEST, 1))
    splits = pl.cdiv(steps, pl.cdiv(steps, splits))
    return fitted(dataclasses.replace(tile, splits=splits), spec, dtype)


def candidates(M: int, N: int, K: int, spec: Spec, dtype: Any = jnp.bfloat16) -> list[Tile]:
    """Returns the tiles that the tuner measures, the heuristic's first.

    Decoding waits for memory, and more warpgroups hide more of that wait. With many tokens the sums
    take so many registers that fewer warpgroups fit.
    """
    first = heuristic(M, N, K, spec, dtype)
    choices = [first]
    decodes = M <= TOKENS[-1]
    for tokens in TOKENS:
        if tokens > first.block_n or tokens < first.block_n // (1 if decodes else 2):
            continue
        for warpgroups in sorted({2, _most_warpgroups(tokens, spec)} if N > COLUMNS else {1}):
            for parts, depth in itertools.product((1, 2, 4), (DEPTH, 2 * DEPTH)):
                if warpgroups % parts or not _fits(spec, K, depth * parts):
                    continue
                columns = COLUMNS * warpgroups // parts
                tile = Tile(columns, tokens, depth * parts, 8, warpgroups)
                choices += [dataclasses.replace(tile, splits=n) for n in _splits(tile, M, N, K)]
    if scales_sums(spec, first.block_n) and first.block_n <= BY_WARP:
        choices += [dataclasses.replace(t, by_warp=True) for t in choices if t.warpgroups == 4]
    fitting = dict.fromkeys(fitted(tile, spec, dtype) for tile in choices)
    return [tile for tile in fitting if tile.stages > 2]


def _splits(tile: Tile, M: int, N: int, K: int) -> list[int]:
    """Returns numbers of splits to measure: as many as the SMs have room for, half as many where
    warpgroups do not share columns, and the number that leaves the SMs idle least."""
    count, steps = tile_count(tile, M, N), max(pl.cdiv(K, tile.block_k), 1)
    most = max(K // SHORTEST, 1)
    room = max(min(SMS // max(count, 1), most), 1)

    def steps_in_turn(n: int) -> int:
        return pl.cdiv(count * n, SMS) * pl.cdiv(steps, n)

    counts = {room} | ({max(room // 2, 1)} if parts_of(tile) == 1 else set())
    even = min(range(1, min(MOST_EVEN, most) + 1), key=steps_in_turn)
    if M <= TOKENS[-1] and steps_in_turn(even) < 0.9 * steps_in_turn(room):
        counts.add(even)
    return sorted({pl.cdiv(steps, pl.cdiv(steps, n)) for n in counts})


def _most_warpgroups(tokens: int, spec: Spec) -> int:
    """Returns with how many computing warpgroups the registers of a thread still are enough.

    The numbers were found by compiling without a device (configs.py).
    """
    if tokens > 16:
        return 2
    return (
        4
        if scales_sums(spec, tokens) or (spec.bits in (4, 8) and (spec.signed or tokens == 8))
        else 3
    )


def _fits(spec: Spec, K: int, depth: int) -> bool:
    """Tells whether each step along K begins with a group or lies inside of one, and is a box."""
    small, large = sorted((spec.group, depth))
    aligned = spec.group >= K or large % small == 0
    spills = spec.bits == 2 and not spec.signed and depth > DEPTH  # 16 bytes, found by compiling
    return aligned and not spills and registers.rows_of(depth, spec.bits) <= BOX


def tile_count(tile: Tile, M: int, N: int) -> int:
    """Returns the number of tiles of one split."""
    return pl.cdiv(M, tile.block_n) * pl.cdiv(N, tile.block_m)


def fitted(tile: Tile, spec: Spec, dtype: Any = jnp.bfloat16) -> Tile:
    """Returns the tile with no more stages than fit into shared memory."""

    def needed(tile: Any) -> tiles.Buffers:
        return buffers(tile, spec, dtype)

    return cast(Tile, tiles.fitted(tile, needed))


def scale_rows(tile: Tile, spec: Spec) -> int:
    """Returns how many rows of scales, one a group, a step needs."""
    return max(tile.block_k // spec.group, 1)


def buffers(tile: Tile, spec: Spec, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns {name: (shape, dtype)} of the arrays in shared memory."""
    rows = registers.rows_of(tile.block_k, spec.bits)
    columns, parts = columns_of(tile), parts_of(tile)
    numbers = (tile.buffers, scale_rows(tile, spec), columns, COLUMNS)
    height = min(tile.block_n, STAGED)
    slots = min(2, tile.block_n // height)
    out_dtype = jnp.dtype(jnp.float32 if tile.splits > 1 else dtype)
    shared: dict[str, tuple[tuple[int, ...], Any]] = {
        "x_smem": ((tile.buffers, parts, tile.block_n, tile.block_k // parts), dtype),
        "words_smem": ((tile.buffers, columns, rows, WORDS), jnp.int32),
        "scales_smem": (numbers, jnp.float32),
        "y_smem": ((columns, slots, height, COLUMNS), out_dtype),
    }
    if not spec.signed:
        shared["zeros_smem"] = numbers, jnp.float32
    if parts > 1:
        shared["sums_smem"] = (columns, parts - 1, tile.block_n, COLUMNS), jnp.float32
    return shared


def check(tile: Tile, spec: Spec) -> None:
    """Raises: ValueError for a tile that breaks a rule of wgmma, of registers or of groups."""
    tiles.check_multiple(OP, "block_m", tile.block_m, COLUMNS)
    tiles.check_multiple(OP, "block_n", tile.block_n, PIECE, 256)
    columns = columns_of(tile)
    if tile.warpgroups % columns or tile.stages < 2 or tile.cluster > 1 or tile.pingpong:
        raise ValueError(
            f"{OP}: {tile} needs one warpgroup, or the same number of them, for each {COLUMNS} "
            "columns (block_m), at least 2 stages, no cluster and no ping-pong"
        )
    grain = DEPTH * parts_of(tile)
    tiles.check_multiple(OP, "block_k", tile.block_k, grain, max(grain, BOX * 8 // spec.bits))
    if tile.warpgroups < 4:
        tiles.check_registers(OP, tile.warpgroups, (COLUMNS, tile.block_n), (COLUMNS, DEPTH // 2))
    elif tile.block_n > 16:
        raise ValueError(f"{OP}: {tile}: four warpgroups have registers for 16 tokens (block_n)")
    if registers.rows_of(tile.block_k, spec.bits) > BOX:
        raise ValueError(f"{OP}: {tile}: a step has more than {BOX} rows of bytes (block_k)")
    if tile.by_warp and not (scales_sums(spec, tile.block_n) and tile.block_n <= BY_WARP):
        raise ValueError(
            f"{OP}: {tile}: warps multiply signed codes of 4 bits in groups of a multiple of "
            f"{DEPTH} by at most {BY_WARP} tokens (by_warp)"
        )
    small, large = sorted((spec.group, tile.block_k))
    if large % small:
        raise ValueError(
            f"{OP}: block_k={tile.block_k} must be a multiple of the group, {spec.group}, or "
            "divide it"
        )


def multiply(
    x_MK: jax.Array,
    packed_PN: jax.Array,
    scales_GN: jax.Array,
    zeros_GN: jax.Array | None,
    bias_N: jax.Array | None,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """Returns what reference.forward does, for bf16 and f16 and an x of two dimensions.

    Args: blocks: thread blocks to launch, one for each SM.
    """
    K = x_MK.shape[1]
    if spec.group >= K:  # one group, that no step leaves
        spec = dataclasses.replace(spec, group=up(K, tile.block_k))
    check(tile, spec)
    operands = {"x": x_MK, "packed": packed_PN, "scales": scales_GN, "zeros": zeros_GN}
    static = {"tile": tile, "interpret": interpret, "blocks": blocks}
    if tile.splits == 1:
        return _launch(operands | {"bias": bias_N}, spec=spec, **static)
    plain = dataclasses.replace(spec, activation=None)
    sums_SMN = _launch(operands, spec=plain, **static)
    z_MN = functools.reduce(jnp.add, list(sums_SMN))
    return reference.finish(z_MN, bias_N, spec).astype(x_MK.dtype)


def forward(
    x_xK: jax.Array,
    packed_PN: jax.Array,
    scales_GN: jax.Array,
    zeros_GN: jax.Array | None,
    bias_N: jax.Array | None,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """Returns what reference.forward does, for bf16 and f16; see `multiply`."""
    y_MN = multiply(
        x_xK.reshape(-1, x_xK.shape[-1]),
        packed_PN,
        scales_GN,
        zeros_GN,
        bias_N,
        spec=spec,
        tile=tile,
        interpret=interpret,
        blocks=blocks,
    )
    return y_MN.reshape(*x_xK.shape[:-1], -1)


def _launch(operands, *, spec, tile, interpret, blocks):
    """Returns y (M, N); with more than one split the pages of sums (splits, M, N), float32."""
    (M, K), (P, N) = operands["x"].shape, operands["packed"].shape
    dtype = operands["x"].dtype
    grid = (pl.cdiv(M, tile.block_n), pl.cdiv(N, tile.block_m))
    whole_N = max(tile.block_m, up(N, GRAIN))
    pieces_N = up(whole_N, COLUMNS)
    groups = max(scale_rows(tile, spec), operands["scales"].shape[0])
    sizes = {
        "x": (max(tile.block_n, up(M, PIECE)), max(tile.block_k, up(K, DEPTH))),
        "packed": (max(registers.rows_of(tile.block_k, spec.bits), P), whole_N),
        "scales": (groups, pieces_N),
        "zeros": (groups, pieces_N),
        "bias": (grid[1] * tile.block_m,),  # read by threads, past the edge as well
    }
    inputs = {name: pad(x, sizes[name]) for name, x in operands.items() if x is not None}
    for name in [n for n in ("scales", "zeros", "bias") if n in inputs]:
        inputs[name] = inputs[name].astype(jnp.float32)
    for name in [n for n in ("scales", "zeros") if n in inputs]:
        inputs[name] = inputs[name].reshape(groups, -1, COLUMNS)
    inputs["x"] = registers.ordered(inputs["x"], spec.bits)
    words = inputs["packed"].reshape(-1, whole_N // 4, 4)
    inputs["packed"] = lax.bitcast_convert_type(words, jnp.int32)
    shared = buffers(tile, spec, dtype)
    out_dtype = shared["y_smem"][1]
    tiles.check_shared(OP, shared)
    scratch = engine.scratch(shared, staged=lambda shape, dtype: plgpu.SMEM(shape, dtype))
    scratch["x_smem"] = engine.swizzled(*shared["x_smem"])
    scratch["words_smem"] = plgpu.SMEM(*shared["words_smem"], transforms=(registers.SWIZZLE,))
    columns, parts = columns_of(tile), parts_of(tile)
    scratch |= engine.barriers(tile, parts + columns + 1 + (not spec.signed))
    if parts > 1:
        scratch["full"] = plgpu.Barrier(num_arrivals=parts - 1, num_barriers=columns)
        scratch["taken"] = plgpu.Barrier(num_barriers=columns)
    if interpret:
        shape = (tile.warpgroups, 2, COLUMNS, DEPTH)
        scratch["w_smem"] = engine.swizzled(shape, dtype)
    clusters = min(blocks, grid[0] * grid[1] * tile.splits)
    # TMA writes swizzled pieces, of which there must be whole ones.
    shape = up(max(M, shared["y_smem"][0][2]), PIECE), up(whole_N, SWIZZLED)
    shape = *((tile.splits,) if tile.splits > 1 else ()), *shape
    results = engine.launch(
        functools.partial(
            _body, spec=spec, tile=tile, grid=grid, clusters=clusters, interpret=interpret
        ),
        inputs,
        {"y": jax.ShapeDtypeStruct(shape, out_dtype)},
        scratch,
        work=work.product(OP, M, N, K),
        tile=tile,
        clusters=clusters,
        interpret=interpret,
    )
    return varying_as(operands["x"], results["y"][..., :M, :N])


# ---- the orders in which a warpgroup waits for a step, multiplies by it and gives its buffers back
#
# The left operand of wgmma is in registers here. Registers that a wgmma reads may not be written
# before `wgmma.wait_group` has told that it is over (PTX ISA, section wgmma.mma_async).


@dataclasses.dataclass(frozen=True)
class Product(engine.Product):
    """The engine's roles, but the products of a step are over before the next is dequantized.

    The engine leaves the products of one step in flight. Here the next step would overwrite
    registers that they still read.
    """

    @override
    def _product(self, where, live, multiply, *accumulators):
        ring, first, steps = where
        assert live is None

        @pl.loop(first, first + steps)
        def _(i):
            buffer = self._buffer(ring, i)
            plgpu.barrier_wait(self.ready.at[buffer])
            multiply(i - first, buffer, *accumulators)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free.at[buffer])

        return tuple(accumulator[...] for accumulator in accumulators)


class Flowing(Product):
    """A Product whose last 64 of K of a step are multiplied while the next step is dequantized.

    `multiply(place, s, buffer, acc, over)` leaves at most its last product in flight, and calls
    over() as soon as those of the step before are done.
    """

    @override
    def _product(self, where, live, multiply, *accumulators):
        ring, first, steps = where
        assert live is None

        def step(i, over):
            buffer = self._buffer(ring, i)
            plgpu.barrier_wait(self.ready.at[buffer])
            multiply(i - first, buffer, *accumulators, over)

        def release(i):
            plgpu.barrier_arrive(self.free.at[self._buffer(ring, i)])

        step(first, lambda: None)

        @pl.loop(first + 1, first + steps)
        def _(i):
            step(i, lambda: release(i - 1))

        plgpu.wgmma_wait(0)
        release(first + steps - 1)
        return tuple(accumulator[...] for accumulator in accumulators)


class Grouped(Product):
    """A Product for steps whose sums are scaled before they are added to the sums so far.

    `multiply(place, s, buffer, sums)` returns the new sums.
    """

    @override
    def _product(self, where, live, multiply, *accumulators):
        ring, first, steps = where
        assert live is None
        zeros = plgpu.layout_cast(jnp.zeros(accumulators[0].shape, jnp.float32), plgpu.Layout.WGMMA)

        @pl.loop(first, first + steps, init_carry=zeros)
        def total(i, sums):
            buffer = self._buffer(ring, i)
            plgpu.barrier_wait(self.ready.at[buffer])
            sums = multiply(i - first, buffer, sums)
            plgpu.barrier_arrive(self.free.at[buffer])
            return sums

        return (total,)


# ---- the kernel


def _body(
    gmem, *, spec, tile, grid, clusters, interpret,
    x_smem, words_smem, scales_smem, y_smem, ready, free, **more,
):  # fmt: skip
    # The last split's last steps may lie beyond K: TMA brings zeros.
    steps = pl.cdiv(pl.cdiv(gmem["x"].shape[1], tile.block_k), tile.splits)
    count = grid[0] * grid[1]
    exact = scales_sums(spec, tile.block_n)
    paired = scales_pairs(spec, tile.block_n, gmem["x"].dtype)
    flows = paired and tile.block_k // parts_of(tile) > DEPTH
    kind = Grouped if exact else Flowing if flows else Product
    product = kind(tile, ready, free, steps, lax.axis_index("block"), clusters)
    columns, parts = columns_of(tile), parts_of(tile)
    column, part = product.warpgroup, jnp.int32(0)
    if parts > 1:
        column = lax.rem(product.warpgroup, jnp.int32(columns))
        part = lax.div(product.warpgroup, jnp.int32(columns))
    depth = tile.block_k // parts  # of a step, along K, that this warpgroup multiplies
    staging = Staging((y_smem,), column)
    pieces = staging.pieces((tile.block_n, COLUMNS))
    height = y_smem.shape[2]
    rows = registers.rows_of(tile.block_k, spec.bits)
    base = part * registers.rows_of(depth, spec.bits)
    numbers = {"scales": scales_smem} | ({} if spec.signed else {"zeros": more["zeros_smem"]})

    def split(i):
        return lax.div(i, jnp.int32(count)) if tile.splits > 1 else None

    def corner(i):
        i = lax.rem(i, jnp.int32(count)) if tile.splits > 1 else i
        m, n = plgpu.planar_snake(i, grid, 0, tile.snake)
        return pl.multiple_of(m * tile.block_n, PIECE), pl.multiple_of(n * tile.block_m, COLUMNS)

    def load(place, s, buffer, barrier):
        page, (m, n) = place
        s = s if page is None else page * steps + s
        for p in range(parts):
            source = gmem["x"].at[pl.ds(m, tile.block_n), span(s * parts + p, depth)]
            plgpu.copy_gmem_to_smem(source, x_smem.at[buffer, p], barrier)
        for c in range(columns):
            word = pl.multiple_of(lax.div(n, jnp.int32(4)) + c * WORDS, WORDS)
            source = gmem["packed"].at[span(s, rows), pl.ds(word, WORDS)]
            plgpu.copy_gmem_to_smem(source, words_smem.at[buffer, c], barrier)
        first = lax.div(s * tile.block_k, jnp.int32(spec.group))
        for name, smem in numbers.items():
            source = gmem[name].at[
                pl.ds(first, smem.shape[1]), pl.ds(lax.div(n, jnp.int32(COLUMNS)), columns)
            ]
            plgpu.copy_gmem_to_smem(source, smem.at[buffer], barrier)

    def of_group(smem, buffer, group):
        """The numbers, in shared memory, of a group of this warpgroup's part of a step."""
        row = 0  # a group that is longer than a step has one row
        if smem.shape[1] > 1:
            row = lax.div(part * depth, jnp.int32(spec.group)) + group
        return smem.at[buffer, row, column]

    def multiply(_, s, buffer, acc, over=None):
        words = words_smem.at[buffer, column]
        readers = {
            name: functools.partial(of_group, smem, buffer) for name, smem in numbers.items()
        }
        if paired:
            operand = pairs.operands(words, base, readers["scales"], spec.group, interpret)
        else:
            operand = registers.operands(words, base, readers, spec, gmem["x"].dtype, interpret)
        for chunk in range(depth // DEPTH):
            right = x_smem.at[buffer, part, :, pl.ds(chunk * DEPTH, DEPTH)].T
            join(acc, operand(chunk), right, chunk % 2 if flows else 0)
            if over:
                plgpu.wgmma_wait(1)  # the registers of the chunk before are free
            if over and chunk == 0:
                over()

    def product_of_groups(_, s, buffer, sums):
        chunks = min(spec.group, depth) // DEPTH
        words, x = words_smem.at[buffer, column], x_smem.at[buffer, part]

        def run(first, acc):
            for chunk in range(first, first + chunks):
                at = base, registers.rows_of(chunk * DEPTH, 4)
                left = pairs.exact_operand(words, at, gmem["x"].dtype, interpret)
                join(acc, left, x.at[:, pl.ds(chunk * DEPTH, DEPTH)].T)
            return acc[...]

        for group in range(max(depth // spec.group, 1)):
            first = group * chunks
            scale = registers.load_rows(of_group(scales_smem, buffer, group), interpret)
            if tile.by_warp:
                at = base, registers.rows_of(first * DEPTH, 4)
                part_sums = pairs.exact_sums(words, at, x, (first, chunks), interpret)
                if interpret:  # where only this orders reads by threads before a copy by TMA
                    plgpu.commit_smem()
            else:
                part_sums = pl.run_scoped(functools.partial(run, first), plgpu.ACC(sums.shape))
            sums = sums + part_sums * lax.broadcast_in_dim(scale, sums.shape, [0])
        return sums

    def join(acc, left, right, place=0):
        if interpret:  # which knows no operands in registers
            staged = more["w_smem"].at[product.warpgroup, place]
            if not flows:
                plgpu.wgmma_wait(0)
            staged[...] = left
            plgpu.commit_smem()
            left = staged
        plgpu.wgmma(acc, left, right)

    def finish(i, sums):
        y_TC = registers.sums(sums, interpret)
        if parts == 1:
            store(i, y_TC)
        else:
            _meet(y_TC, functools.partial(store, i), (column, part), **more)

    def store(i, y_TC):
        page, (m, n) = split(i), corner(i)
        n += column * COLUMNS
        if "bias" in gmem:
            bias = plgpu.load(
                gmem["bias"].at[pl.ds(n, COLUMNS)], layout=registers.SUMS.reduce(0), optimized=False
            )
            y_TC += lax.broadcast_in_dim(bias, y_TC.shape, [1])
        target = gmem["y"] if page is None else gmem["y"].at[page]
        for p, (token, _, down, right) in enumerate(pieces):
            y = activate_tile(spec.activation, y_TC[down, right])

            def copy(staged, token=token):
                rows = pl.ds(m + token, height), pl.ds(n, COLUMNS)
                plgpu.copy_smem_to_gmem(staged, target.at[rows], commit_group=True)

            staging.put(p, (y,), copy)

    total = count * tile.splits
    product.specialise(
        lambda: product.compute(
            total,
            product_of_groups if exact else multiply,
            finish,
            sums=[(COLUMNS, tile.block_n)],
        ),
        lambda: product.produce(total, lambda i: (split(i), corner(i)), load),
        REGISTERS.get(tile.warpgroups, engine.REGISTERS),
    )


def _meet(y_TC, store, place, *, sums_smem, full, taken, **_):
    """Adds the sums of all warpgroups of a piece of columns in the first one, which stores them.

    place: (the piece, which part of K this warpgroup has).
    """
    column, part = place
    full, taken = full.at[column], taken.at[column]

    @pl.when(part > 0)
    def _give():
        sums_smem[column, part - 1] = y_TC
        plgpu.barrier_arrive(full)
        plgpu.barrier_wait(taken)  # the next tile's sums overwrite these

    @pl.when(part == 0)
    def _take():
        plgpu.barrier_wait(full)
        y = y_TC
        for p in range(sums_smem.shape[1]):
            y += plgpu.load(sums_smem.at[column, p], layout=registers.SUMS, optimized=False)
        plgpu.barrier_arrive(taken)
        store(y)
