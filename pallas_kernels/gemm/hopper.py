"""The matrix product for Hopper, with its epilogue in registers.

On the engine of pallas_kernels/hopper: tiles come in an order that snakes so that blocks which run
together share rows and columns in L2. The epilogue of each piece:

    bias, activation, residual (by TMA, started before the product) | SMEM | TMA to memory

Operands may be stored transposed, so x w, dz w^T and x^T dz are one kernel. Where a tile reaches
over an edge TMA reads zeros and writes nothing (PTX ISA, tensor copies: out-of-bound access). That
counts in whole pieces of the swizzled tiling, 8 rows of 128 bytes: other sizes are copied first.

Where there are fewer tiles than SMs (a few rows, or a small weight's gradient), K is cut into
splits (`Tile.splits`). A split's sums are stored in float32 to a page of their own, without an
epilogue; `summed` adds the pages up in the order of the splits and then computes the epilogue, as
one fusion of XLA. So no thread block waits for another, there is no flag that could be left over
from a run before, and every run gives the same bits.
8-bit operands: promotion.py; their scales, of a row and of a column, are part of the epilogue.
Absent: stream-K, scales of blocks of K.

Legend: M rows, N columns, K contracted; a, b the operands as they are stored.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import work
from pallas_kernels.gemm import promotion, reference
from pallas_kernels.hopper import engine, tiles
from pallas_kernels.hopper.activations import Spec, activate_tile
from pallas_kernels.hopper.cards import CHIPS, SM_L2_BYTES, SMS
from pallas_kernels.hopper.epilogue import WGMMA, Staging, add_bias, staging_shape
from pallas_kernels.hopper.memory import PIECE, SWIZZLE, pad, span, up, varying_as
from pallas_kernels.hopper.tiles import BLOCKS, Tile

OP = "fused_gemm"
RESIDUALS = 2  # pieces of the residual on their way
PINGPONG = (128, 128)
SPLITS = (2, 3, 4, 6, 8, 12, 16)
SHORTEST = 4  # steps of a split, at least (chosen: what fills a ring once)
SUM_S = 2e-6  # that the sum of splits takes at least (chosen: a launch beside a graph's others)
HBM_BYTES = CHIPS["h100"][8]  # a second; H200's is faster


@dataclasses.dataclass(frozen=True)
class Stored:
    """Whether an operand is stored transposed: a as (K, M), b as (N, K)."""

    a: bool = False
    b: bool = False


def heuristic(
    M: int, N: int, K: int, *, spec: Spec = Spec(None, "bfloat16"), residual: bool = False
) -> Tile:
    """Returns the tile if nothing was measured: the least time by waves, tensor cores and L2.

    spec, residual: what the epilogue computes and keeps in shared memory.
    """

    # The second block of a cluster has rows of its own.
    choices = candidates(spec, residual) + split_candidates(M, N, K)
    legal = (tile for tile in choices if tile.cluster == 1 or M > tile.block_m)
    return min(legal, key=functools.partial(seconds, (M, N, K), spec))


def seconds(sizes: tuple[int, int, int], spec: Spec, tile: Tile) -> float:
    """An estimate of a product of 16-bit operands, by waves, tensor cores, L2, and sums."""
    M, N, K = sizes
    waves = pl.cdiv(tile_count(tile, M, N) * tile.splits, SMS)
    part = pl.cdiv(pl.cdiv(K, tile.block_k), tile.splits) * tile.block_k
    activation = spec.activation is not None and tile.splits == 1
    product, finish = tile.seconds(part, activation)
    if tile.pingpong:
        return waves * max(product, (product + finish) / 2) + finish
    if tile.splits == 1:
        return waves * (product + finish)
    read = 2 * K * (M + N) / HBM_BYTES  # both operands, once
    added = 4 * (tile.splits + 1) * M * N / (SMS * SM_L2_BYTES)
    return max(product, read) + finish + SUM_S + added


def tile_count(tile: Tile, M: int, N: int) -> int:
    """Returns the tiles of one split, with those of a cluster that lie beyond the last row."""
    return pl.cdiv(M, tile.block_m * tile.cluster) * tile.cluster * pl.cdiv(N, tile.block_n)


def candidates(spec: Spec, residual: bool) -> list[Tile]:
    """Returns the tiles for the heuristic and the tuner, with at least three in flight."""
    fitting = (
        fitted(Tile(m, n, 64, 6, 2 if pingpong else m // 64, cluster, 8, pingpong), spec, residual)
        for m, n, pingpong in (*((m, n, False) for m, n in BLOCKS), (*PINGPONG, True))
        for cluster in (2, 1)
    )
    return [tile for tile in fitting if tile.buffers > 2]


def split_candidates(M: int, N: int, K: int, unsplit: Sequence[Tile] = ()) -> list[Tile]:
    """Returns tiles in splits that all run at one time; none if the tiles fill half the SMs.

    Of all splits of a tile those with the same number of steps are one candidate. unsplit: the
    tiles to split; empty: those of 16-bit operands.
    """
    choices = unsplit or candidates(partial(jnp.bfloat16), False)
    step = choices[0].block_k
    steps = max(pl.cdiv(K, step), 1)
    return [
        dataclasses.replace(tile, splits=splits)
        for tile in choices
        for splits in sorted({pl.cdiv(steps, pl.cdiv(steps, n)) for n in SPLITS})
        if not tile.pingpong
        and splits > 1
        and tile_count(tile, M, N) * splits <= SMS
        and pl.cdiv(steps, splits) >= SHORTEST
    ]


def heuristic_scaled(M: int, N: int, K: int, *, spec: Spec, residual: bool) -> Tile:
    """Returns what `heuristic` does, for 8-bit operands."""
    choices = candidates_scaled(M, N, K, spec, residual)
    legal = (tile for tile in choices if tile.cluster == 1 or M > tile.block_m)
    # A byte is half of what `seconds` counts, in the tensor core and on the way there.
    return min(legal, key=functools.partial(seconds, (M, N, pl.cdiv(K, 2)), spec))


def candidates_scaled(M: int, N: int, K: int, spec: Spec, residual: bool) -> list[Tile]:
    """Returns what `candidates` and `split_candidates` do, for 8-bit operands."""

    def fitting(spec: Spec, residual: bool) -> list[Tile]:
        return [
            fitted(
                Tile(m, n, promotion.STEP, 6, m // 64, cluster), spec, residual, promotion.OPERAND
            )
            for m, n in promotion.BLOCKS
            for cluster in (2, 1)
        ]

    unsplit = fitting(partial(promotion.OPERAND), False)
    return fitting(spec, residual) + split_candidates(M, N, K, unsplit)


def fitted(tile: Tile, spec: Spec, residual: bool, dtype: Any = jnp.bfloat16) -> Tile:
    """The same tile with no more stages than its epilogue's buffers leave room for."""
    return tiles.fitted(tile, lambda tile: buffers(tile, Stored(), spec, residual, dtype))


def buffers(
    tile: Tile, stored: Stored, spec: Spec, residual: bool, dtype: Any = jnp.bfloat16
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shared memory, as (shape, type)."""
    if tile.splits > 1:
        spec, residual = partial(dtype), False
    a, b = (tile.block_m, tile.block_k), (tile.block_k, tile.block_n)
    shape, out_dtype = staging_shape(tile.warpgroups, (tile.rows, tile.block_n), spec.out_dtype)
    shared: dict[str, tuple[tuple[int, ...], Any]] = {
        "a_smem": ((tile.buffers, *(a[::-1] if stored.a else a)), dtype),
        "b_smem": ((tile.buffers, *(b[::-1] if stored.b else b)), dtype),
        "y_smem": (shape, out_dtype),
    }
    if spec.keep:
        shared["z_smem"] = (shape, dtype)
    if residual:
        shared["residual_smem"] = ((tile.warpgroups, RESIDUALS, *shape[2:]), out_dtype)
    return shared


def forward(
    x_xK: jax.Array,
    w_KN: jax.Array,
    bias_N: jax.Array | None,
    residual_xN: jax.Array | None,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns what reference.forward does, for bf16 and f16. blocks: thread blocks, one an SM."""
    N = w_KN.shape[1]
    x_MK = x_xK.reshape(-1, x_xK.shape[-1])
    residual_MN = None if residual_xN is None else residual_xN.reshape(-1, N)
    outputs = multiply(
        x_MK, w_KN, bias_N, residual_MN, spec=spec, tile=tile, interpret=interpret, blocks=blocks
    )
    y_xN, z_xN = jax.tree.map(lambda x: x.reshape(*x_xK.shape[:-1], N), outputs)
    return y_xN, z_xN


def backward(
    x_xK: jax.Array,
    w_KN: jax.Array,
    dz_xN: jax.Array,
    *,
    tile_dx: Tile,
    tile_dw: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array]:
    """Returns what reference.backward does, for bf16 and f16."""
    x_MK, dz_MN = (x.reshape(-1, x.shape[-1]) for x in (x_xK, dz_xN))
    static = {"spec": Spec(None, x_xK.dtype.name), "interpret": interpret, "blocks": blocks}
    dx_MK, _ = multiply(dz_MN, w_KN, tile=tile_dx, stored=Stored(b=True), **static)
    dw_KN, _ = multiply(x_MK, dz_MN, tile=tile_dw, stored=Stored(a=True), **static)
    return dx_MK.reshape(x_xK.shape), dw_KN


def multiply(
    a: jax.Array,
    b: jax.Array,
    bias_N: jax.Array | None = None,
    residual_MN: jax.Array | None = None,
    *,
    spec: Spec,
    tile: Tile,
    stored: Stored = Stored(),
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array | None]:
    """One kernel: (activate(z) + residual, z if kept, in a's type), z = a b + bias; both (M, N).

    Of a tile with splits the kernel computes the sums of each, and `summed` the rest.
    """
    operands = {"a": a, "b": b}
    added = {"bias": bias_N, "residual": residual_MN}
    static = {"tile": tile, "stored": stored, "interpret": interpret, "blocks": blocks}
    tiles.check(OP, tile)
    if tile.splits == 1:
        results = _launch(operands | added, spec=spec, **static)
        return results["y"], results.get("z")
    if tile.pingpong:
        raise ValueError(f"{OP}: {tile} is in splits; ping-pong is not for those")
    sums_SMN = _launch(operands, spec=partial(a.dtype), **static)["y"]
    return summed(sums_SMN, bias_N, residual_MN, spec=spec, dtype=a.dtype)


def multiply_scaled(
    x_MK: jax.Array,
    w_KN: jax.Array,
    scales: reference.Scales,
    bias_N: jax.Array | None = None,
    residual_MN: jax.Array | None = None,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """Returns reference.scaled of 8-bit operands. w is read transposed: free, if made from w^T."""
    tiles.check(OP, tile)
    promotion.check(OP, tile)
    if tile.pingpong:
        raise ValueError(f"{OP}: {tile} is ping-pong, which 8-bit operands have none of")
    operands = {"a": x_MK, "b": w_KN.T}
    added = {"bias": bias_N, "residual": residual_MN, "down": scales.x_M, "across": scales.w_N}
    static = {"tile": tile, "stored": Stored(b=True), "interpret": interpret, "blocks": blocks}
    if tile.splits == 1:
        return _launch(operands | added, spec=spec, **static)["y"]
    sums_SMN = _launch(operands, spec=partial(x_MK.dtype), **static)["y"]
    dtype = jnp.dtype(spec.out_dtype)
    return summed(sums_SMN, bias_N, residual_MN, spec=spec, dtype=dtype, scales=scales)[0]


def summed(
    sums_SMN: jax.Array,
    bias_N: jax.Array | None,
    residual_MN: jax.Array | None,
    *,
    spec: Spec,
    dtype: Any,
    scales: reference.Scales = reference.Scales(),
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the sum of splits, the first one first, and the epilogue. dtype: z's."""
    z_MN = reference.scale(functools.reduce(jnp.add, list(sums_SMN)), scales)
    return reference.finish(z_MN, bias_N, residual_MN, spec=spec, dtype=dtype)


def partial(dtype: Any) -> Spec:
    """Returns the spec of a split: plain sums of operands of `dtype`, in the type of sums."""
    return Spec(None, jnp.dtype(promotion.sum_dtype(dtype)).name)


def _launch(operands, *, spec, tile, stored, interpret, blocks):
    """Returns the kernel's results by name: (M, N), or (splits, M, N) where there are some.

    operands: a and b, and what the epilogue takes: bias, residual, scales.
    """
    a, b = operands["a"], operands["b"]
    M, K = a.shape[::-1] if stored.a else a.shape
    N = b.shape[0] if stored.b else b.shape[1]
    # What an operand must have so that its tiles may reach over its edge; 16-bit results too.
    piece = SWIZZLE // a.dtype.itemsize
    whole_M = max(tile.block_m, up(M, piece if stored.a else PIECE))
    whole_N = max(tile.block_n, up(N, SWIZZLE // 2))
    whole_K = max(tile.block_k, up(K, PIECE if stored.a and not stored.b else piece))
    grid = (pl.cdiv(whole_M, tile.block_m * tile.cluster), pl.cdiv(whole_N, tile.block_n))
    sizes = {
        "a": (whole_K, whole_M) if stored.a else (whole_M, whole_K),
        "b": (whole_N, whole_K) if stored.b else (whole_K, whole_N),
        "residual": (whole_M, whole_N),
        # Vectors are read by threads, past the edge as well.
        "bias": (grid[1] * tile.block_n,),
        "across": (grid[1] * tile.block_n,),
        "down": (grid[0] * tile.block_m * tile.cluster,),
    }
    inputs = {
        name: pad(x.astype(jnp.float32) if x.ndim == 1 else x, sizes[name])
        for name, x in operands.items()
        if x is not None
    }
    outputs = ({"z": a.dtype} if spec.keep else {}) | {"y": jnp.dtype(spec.out_dtype)}
    shared = buffers(tile, stored, spec, "residual" in inputs, a.dtype)
    shared["b_smem"] = shared["b_smem"][0], b.dtype  # float8 has two
    tiles.check_shared(OP, shared)
    scratch = engine.scratch(shared) | engine.barriers(tile)
    if "residual" in inputs:
        scratch["residual_ready"] = plgpu.Barrier(num_barriers=tile.warpgroups * RESIDUALS)
    clusters = min(blocks // tile.cluster, grid[0] * grid[1] * tile.splits)
    shape = *((tile.splits,) if tile.splits > 1 else ()), whole_M, whole_N
    results = engine.launch(
        functools.partial(_body, spec=spec, tile=tile, stored=stored, grid=grid, clusters=clusters),
        inputs,
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in outputs.items()},
        scratch,
        work=work.product(OP, M, N, K),
        tile=tile,
        clusters=clusters,
        interpret=interpret,
    )
    return varying_as(a, {name: x[..., :M, :N] for name, x in results.items()})


def _body(gmem, *, spec, tile, stored, grid, clusters, a_smem, b_smem, y_smem, ready, free, **more):
    # The last split's last steps may lie beyond K: TMA brings zeros.
    steps = pl.cdiv(pl.cdiv(gmem["a"].shape[0 if stored.a else 1], tile.block_k), tile.splits)
    count = grid[0] * grid[1]
    # The roles of this block, and the accumulators in the tensor core.
    block = lax.axis_index("block")
    if gmem["a"].dtype.itemsize > 1:
        product = engine.Product(tile, ready, free, steps, block, clusters)
        sums = [(tile.rows, tile.block_n)]
    else:
        dtype, sums = promotion.sum_dtype(gmem["a"].dtype), promotion.UNUSED
        product = promotion.Promoted(tile, ready, free, steps, block, clusters, dtype)
    results = {"z": more["z_smem"]} if spec.keep else {}
    results["y"] = y_smem
    staging = Staging(tuple(results.values()), product.warpgroup)
    pieces = staging.pieces((tile.rows, tile.block_n))
    height, width = y_smem.shape[2:]

    def split(i):
        return lax.div(i, jnp.int32(count)) if tile.splits > 1 else None

    def corner(i):
        i = lax.rem(i, jnp.int32(count)) if tile.splits > 1 else i
        m, n = plgpu.planar_snake(i, grid, 0, tile.snake)
        m = (m * tile.cluster + lax.axis_index("cluster")) * tile.block_m
        return pl.multiple_of(m, tile.block_m), pl.multiple_of(n * tile.block_n, tile.block_n)

    def load(place, s, buffer, barrier):
        part, (m, n) = place
        s = s if part is None else part * steps + s
        m, n, k = pl.ds(m, tile.block_m), pl.ds(n, tile.block_n), span(s, tile.block_k)
        left = gmem["a"].at[(k, m) if stored.a else (m, k)]
        right = gmem["b"].at[(n, k) if stored.b else (k, n)]
        plgpu.copy_gmem_to_smem(left, a_smem.at[buffer], barrier)
        plgpu.copy_gmem_to_smem(right, b_smem.at[buffer], barrier, collective_axes=tile.multicast)

    def multiply(_, s, buffer, acc):
        left = (
            a_smem.at[buffer, :, product.part_rows].T
            if stored.a
            else a_smem.at[buffer, product.part_rows]
        )
        plgpu.wgmma(acc, left, b_smem.at[buffer].T if stored.b else b_smem.at[buffer])

    def place_of(i, p):
        """Returns where piece p of this warpgroup's part of tile i is."""
        m, n = corner(i)
        m += product.part * tile.rows
        return pl.ds(m + pieces[p][0], height), pl.ds(n + pieces[p][1], width)

    def residual(p):
        """Returns where piece p of the residual comes to, and the barrier that says so."""
        slot = p % RESIDUALS
        barrier = more["residual_ready"].at[product.warpgroup * RESIDUALS + slot]
        return more["residual_smem"].at[product.warpgroup, slot], barrier

    def fetch(i, p):
        if "residual" in gmem and p < len(pieces):
            plgpu.copy_gmem_to_smem(gmem["residual"].at[place_of(i, p)], *residual(p))

    def begin(i):
        for p in range(RESIDUALS):
            fetch(i, p)
        return i

    def finish(i, sums):
        for p, (_, _, down, right) in enumerate(pieces):
            z = sums[down, right]
            if z.dtype != jnp.dtype(spec.out_dtype):
                z = z.astype(jnp.float32)
            for axis, name in enumerate(("down", "across")):
                if name in gmem:
                    z = scale(z, gmem[name], place_of(i, p)[axis], axis)
            if "bias" in gmem:
                z = add_bias(z, gmem["bias"], place_of(i, p)[1])
            y = activate_tile(spec.activation, z)
            if "residual" in gmem:
                came, barrier = residual(p)
                plgpu.barrier_wait(barrier)
                y += came[...].astype(jnp.float32)

            def copy(*staged, p=p):
                for name, piece in zip(results, staged, strict=True):
                    part = split(i)
                    page = gmem[name] if part is None else gmem[name].at[part]
                    target = page.at[place_of(i, p)]
                    plgpu.copy_smem_to_gmem(piece, target, commit_group=name == "y")

            staging.put(p, (z, y) if spec.keep else (y,), copy)
            fetch(i, p + RESIDUALS)

    total = count * tile.splits
    product.specialise(
        lambda: product.compute(total, multiply, finish, sums=sums, begin=begin),
        lambda: product.produce(total, lambda i: (split(i), corner(i)), load),
    )


def scale(z, scales, part, axis: int):
    """z times a scale of each row (axis 0) or column (1); scales are in memory."""
    factors = plgpu.load(scales.at[part], layout=WGMMA.reduce(1 - axis), optimized=False)
    return z * lax.broadcast_in_dim(factors, z.shape, [axis])
