"""The matrix product for Hopper: persistent, warp-specialised, with its epilogue in registers.

A thread block for each SM takes output tiles in turn, in an order that snakes so that blocks which
run together share rows and columns in L2. A producer warpgroup only starts copies (TMA), over all
tiles of its block without a pause. The compute warpgroups share a tile, each with its rows of it,
and one ring of buffers; or, in ping-pong, each has a tile and a ring of its own, and as the
producer fills one ring after the other, one's epilogue hides behind the other's product:

    producer      wait free[s] | TMA a, b -> ready[s]                   s = 0 .. stages - 1, round
    each compute  wait ready[s], acc += a b (wgmma, one left in flight), arrive free[s - 1]
    epilogue      for pieces of 64 rows and 128 bytes: bias, activation, residual (by TMA, started
                  before the product), SMEM, TMA to memory while the next piece is computed;
                  meanwhile the producer fills the ring for the next tile

Operands may be stored transposed, so x w, dz w^T and x^T dz are one kernel. Where a tile reaches
over an edge TMA reads zeros and writes nothing (PTX ISA, tensor copies: out-of-bound access). That
counts in whole pieces of the swizzled tiling, 8 rows of 128 bytes: other sizes are copied first.
Known from CUTLASS as the cooperative and the ping-pong kernel. Absent: split-K, stream-K.

Legend: M rows, N columns, K contracted; a, b the operands as they are stored.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels import tiles
from pallas_kernels.attention.hopper_forward import varying_as
from pallas_kernels.gemm.reference import Spec, activate

SMS = 132  # of H100 and H200 (SXM): thread blocks that run at one time
SWIZZLE = 128  # bytes of a row of every buffer's tiling
PIECE = 8  # rows of it
RESIDUALS = 2  # pieces of the residual on their way
BLOCKS = ((128, 256), (128, 192), (128, 128), (64, 256), (64, 128), (64, 64))
PINGPONG = (128, 128)
# What one SM may expect (0.8 of H200's datasheet; L2 second hand, in doubt), and elements that it
# finishes in a second, without and with an activation (counted: of that, 2 special functions an
# element, 16 a clock; clock: H100's datasheet).
SM_FLOPS, SM_L2_BYTES = 0.8 * 989.5e12 / SMS, 5.5e12 / SMS
SM_EPILOGUE = (32 * 1.755e9, 8 * 1.755e9)
WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_m, block_n, block_k: of a tile. stages: of a ring, tiles of a and b in flight.

    warpgroups: that compute. cluster: thread blocks, one below the other, that read b once for all
    (TMA multicast). snake: clusters down M that are taken before the next column of tiles.
    pingpong: each warpgroup has tiles of its own, else they share each tile's rows.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warpgroups: int
    cluster: int = 1
    snake: int = 8
    pingpong: bool = False

    @property
    def rings(self) -> int:
        """Of buffers, each with one tile after the other."""
        return self.warpgroups if self.pingpong else 1

    @property
    def rows(self) -> int:
        """Of a tile, that a warpgroup computes."""
        return self.block_m * self.rings // self.warpgroups


@dataclasses.dataclass(frozen=True)
class Stored:
    """Whether an operand is stored transposed: a as (K, M), b as (N, K)."""

    a: bool = False
    b: bool = False


def heuristic(
    M: int, N: int, K: int, *, spec: Spec = Spec(None, "bfloat16"), residual: bool = False
) -> Tile:
    """The tile where nothing was measured: the least time by waves of tiles, tensor cores and L2.

    spec, residual: what the epilogue computes and keeps in shared memory.
    """

    def seconds(tile: Tile) -> float:
        count = pl.cdiv(M, tile.block_m * tile.cluster) * tile.cluster * pl.cdiv(N, tile.block_n)
        waves = pl.cdiv(count, SMS)
        flops = 2 * tile.block_m * tile.block_n * tile.block_k
        loaded = 2 * tile.block_k * (tile.block_m + tile.block_n / tile.cluster)
        product = pl.cdiv(K, tile.block_k) * max(flops / SM_FLOPS, loaded / SM_L2_BYTES)
        finish = tile.block_m * tile.block_n / SM_EPILOGUE[spec.activation is not None]
        if tile.pingpong:
            return waves * max(product, (product + finish) / 2) + finish
        return waves * (product + finish)

    # The second block of a cluster has rows of its own.
    legal = (t for t in candidates(spec, residual) if t.cluster == 1 or M > t.block_m)
    return min(legal, key=seconds)


def candidates(spec: Spec, residual: bool) -> list[Tile]:
    """What the heuristic and the tuner choose from: at least three tiles are in flight."""
    found = (
        fitted(Tile(m, n, 64, 6, 2 if pingpong else m // 64, cluster, 8, pingpong), spec, residual)
        for m, n, pingpong in (*((m, n, False) for m, n in BLOCKS), (*PINGPONG, True))
        for cluster in (2, 1)
    )
    return [tile for tile in found if tile.rings * tile.stages > 2]


def fitted(tile: Tile, spec: Spec, residual: bool) -> Tile:
    """The same tile with no more stages than its epilogue's buffers leave room for."""

    def fits(stages: int) -> bool:
        buffers = _buffers(dataclasses.replace(tile, stages=stages), Stored(), spec, residual)
        return tiles.shared_bytes(buffers) <= tiles.SHARED_BYTES - tiles.RESERVED_BYTES

    stages = next((n for n in range(tile.stages, 2, -1) if fits(n)), 2)
    return dataclasses.replace(tile, stages=stages)


def check(tile: Tile) -> None:
    """Raises: ValueError where a tile breaks the rules of wgmma or of registers."""
    op = "fused_gemm"
    tiles.check_multiple(op, "block_m", tile.block_m, tiles.ROWS * tile.warpgroups // tile.rings)
    tiles.check_multiple(op, "block_n", tile.block_n, 64, 256)
    tiles.check_multiple(op, "block_k", tile.block_k, 64, 256)
    tiles.check_registers(op, tile.warpgroups, (tile.rows, tile.block_n))
    if tile.stages < 2 or tile.cluster not in (1, 2):
        raise ValueError(f"{op}: {tile} needs at least 2 stages, and a cluster of 1 or 2")


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
    """As reference.forward, for bf16 and f16. blocks: thread blocks, one an SM."""
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
    """As reference.backward, for bf16 and f16."""
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
    """One kernel: (activate(z) + residual, z if kept, in a's type), z = a b + bias; both (M, N)."""
    M, K = a.shape[::-1] if stored.a else a.shape
    N = b.shape[0] if stored.b else b.shape[1]
    piece = SWIZZLE // a.dtype.itemsize
    whole_M = _whole(M, tile.block_m, piece if stored.a else PIECE)
    whole_N = _whole(N, tile.block_n, piece)
    whole_K = _whole(K, tile.block_k, PIECE if stored.a and not stored.b else piece)
    inputs = {
        "a": _pad(a, (whole_K, whole_M) if stored.a else (whole_M, whole_K)),
        "b": _pad(b, (whole_N, whole_K) if stored.b else (whole_K, whole_N)),
    }
    if bias_N is not None:
        columns = pl.cdiv(N, tile.block_n) * tile.block_n
        inputs["bias"] = _pad(bias_N.astype(jnp.float32), (columns,))
    if residual_MN is not None:
        inputs["residual"] = _pad(residual_MN, (whole_M, whole_N))
    outputs = {"z": a.dtype} if spec.keep else {}
    outputs["y"] = jnp.dtype(spec.out_dtype)
    check(tile)
    buffers = _buffers(tile, stored, spec, residual_MN is not None, a.dtype)
    tiles.check_shared("fused_gemm", buffers)
    scratch = {name: _ring(*buffer) for name, buffer in buffers.items()}
    stages, readers = tile.rings * tile.stages, tile.warpgroups // tile.rings
    free = {"num_arrivals": readers, "num_barriers": stages}
    scratch |= {
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.ClusterBarrier(collective_axes=("cluster",), **free)
        if tile.cluster > 1
        else plgpu.Barrier(**free),
    }
    if residual_MN is not None:
        scratch["residual_ready"] = plgpu.Barrier(num_barriers=tile.warpgroups * RESIDUALS)
    grid = (pl.cdiv(whole_M, tile.block_m * tile.cluster), pl.cdiv(whole_N, tile.block_n))
    blocks = min(blocks // tile.cluster, grid[0] * grid[1])
    body = functools.partial(
        _body, names=(*inputs, *outputs), spec=spec, tile=tile, stored=stored, grid=grid,
        blocks=blocks, steps=pl.cdiv(whole_K, tile.block_k),
    )  # fmt: skip
    found = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((whole_M, whole_N), x) for x in outputs.values()],
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="fused_gemm",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )(*inputs.values())
    named = dict(zip(outputs, varying_as(a, [x[:M, :N] for x in found]), strict=True))
    return named["y"], named.get("z")


def gelu(z):
    """max(z, 0) - |z| erfc(|z| / sqrt 2) / 2: the exact one; Mosaic GPU has no erf for tiles.

    erfc as in Abramowitz and Stegun 7.1.26, error below 1.5e-7.
    """
    size = jnp.abs(z)
    t = 1 / (1 + (0.3275911 * math.sqrt(0.5)) * size)
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    return jnp.maximum(z, 0.0) - 0.5 * size * series * jnp.exp(-0.5 * z * z)


def _whole(size: int, block: int, piece: int) -> int:
    """What an operand must have so that its tiles may reach over its edge."""
    return max(block, pl.cdiv(size, piece) * piece)


def _pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, whole - size) for whole, size in zip(shape, x.shape, strict=True)])


def _buffers(
    tile: Tile, stored: Stored, spec: Spec, residual: bool, dtype: Any = jnp.bfloat16
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shared memory, as (shape, type)."""
    out_dtype = jnp.dtype(spec.out_dtype)
    columns = SWIZZLE // out_dtype.itemsize
    a, b = (tile.block_m, tile.block_k), (tile.block_k, tile.block_n)
    pieces = tile.rows // tiles.ROWS * tile.block_n // columns
    # They divide the pieces of a tile, so that every tile starts with the first.
    slots = next(n for n in (2, 3, 1) if pieces % n == 0)
    stages, staging = tile.rings * tile.stages, (tile.warpgroups, slots, tiles.ROWS, columns)
    buffers: dict[str, tuple[tuple[int, ...], Any]] = {
        "a_smem": ((stages, *(a[::-1] if stored.a else a)), dtype),
        "b_smem": ((stages, *(b[::-1] if stored.b else b)), dtype),
        "y_smem": (staging, out_dtype),
    }
    if spec.keep:
        buffers["z_smem"] = (staging, dtype)
    if residual:
        buffers["residual_smem"] = ((tile.warpgroups, RESIDUALS, *staging[2:]), out_dtype)
    return buffers


def _ring(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory that TMA reads and writes, in pieces of the widest swizzle its rows allow."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (
        plgpu.TilingTransform((PIECE, swizzle // itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _body(*refs, names, spec, tile, stored, grid, blocks, steps, a_smem, b_smem, y_smem, ready,
          free, **kept):  # fmt: skip
    gmem = dict(zip(names, refs, strict=True))
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    slots, height, columns = y_smem.shape[1:]
    across = tile.block_n // columns
    pieces = tile.rows // height * across
    own_tiles = lax.div(grid[0] * grid[1] - 1 - block, jnp.int32(blocks)) + 1

    def corner(j):
        """Of this block's tile j."""
        m, n = plgpu.planar_snake(block + j * blocks, grid, 0, tile.snake)
        m = (m * tile.cluster + lax.axis_index("cluster")) * tile.block_m
        return pl.multiple_of(m, tile.block_m), pl.multiple_of(n * tile.block_n, tile.block_n)

    def slot_of(ring, i):
        return ring * tile.stages + lax.rem(i, jnp.int32(tile.stages))

    def tiles_of(ring):
        """How many of this block's go through a ring: every `rings`-th."""
        return lax.div(own_tiles - ring + tile.rings - 1, jnp.int32(tile.rings))

    @pl.when(warpgroup < tile.warpgroups)
    def _compute():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(240, action="increase")
        ring, part = (warpgroup, 0) if tile.pingpong else (0, warpgroup)
        own = pl.ds(part * tile.rows, tile.rows)

        def step(i, acc):
            slot = slot_of(ring, i)
            plgpu.barrier_wait(ready.at[slot])
            left = a_smem.at[slot, :, own].T if stored.a else a_smem.at[slot, own]
            plgpu.wgmma(acc, left, b_smem.at[slot].T if stored.b else b_smem.at[slot])

        def product(first, acc):
            step(first, acc)

            @pl.loop(first + 1, first + steps)
            def _(i):
                step(i, acc)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(free.at[slot_of(ring, i - 1)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot_of(ring, first + steps - 1)])
            return acc[...]

        @pl.loop(0, tiles_of(ring))
        def _(j):
            m, n = corner(ring + j * tile.rings)
            m += part * tile.rows

            def here(p):
                down, right = p // across * height, p % across * columns
                return pl.ds(m + down, height), pl.ds(n + right, columns)

            def fetch(p):
                if "residual" in gmem and p < pieces:
                    slot = p % RESIDUALS
                    plgpu.copy_gmem_to_smem(
                        gmem["residual"].at[here(p)],
                        kept["residual_smem"].at[warpgroup, slot],
                        kept["residual_ready"].at[warpgroup * RESIDUALS + slot],
                    )

            for p in range(RESIDUALS):
                fetch(p)
            accumulated = pl.run_scoped(
                functools.partial(product, j * steps),
                plgpu.ACC((tile.rows, tile.block_n), jnp.float32),
            )
            for p in range(pieces):
                down, right = p // across * height, p % across * columns
                z = accumulated[down : down + height, right : right + columns]
                if "bias" in gmem:
                    bias = plgpu.load(
                        gmem["bias"].at[here(p)[1]], layout=WGMMA.reduce(0), optimized=False
                    )
                    z += lax.broadcast_in_dim(bias, z.shape, [1])
                y = gelu(z) if spec.activation == "gelu" else activate(spec.activation, z)
                if "residual" in gmem:
                    slot = p % RESIDUALS
                    plgpu.barrier_wait(kept["residual_ready"].at[warpgroup * RESIDUALS + slot])
                    y += kept["residual_smem"][warpgroup, slot].astype(jnp.float32)
                # What was stored `slots` pieces ago has been read.
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                staged = [("z", z, kept["z_smem"])] if spec.keep else []
                staged.append(("y", y, y_smem))
                for _, value, smem in staged:
                    smem[warpgroup, p % slots] = value.astype(smem.dtype)
                plgpu.commit_smem()
                for name, _, smem in staged:
                    plgpu.copy_smem_to_gmem(
                        smem.at[warpgroup, p % slots], gmem[name].at[here(p)],
                        commit_group=name == "y",
                    )  # fmt: skip
                fetch(p + RESIDUALS)

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.warpgroups)
    def _produce():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, own_tiles)
        def _(j):
            m, n = corner(j)
            m, n = pl.ds(m, tile.block_m), pl.ds(n, tile.block_n)
            ring, first = lax.rem(j, tile.rings), lax.div(j, tile.rings) * steps

            @pl.loop(0, steps)
            def _(s):
                i = first + s
                slot = slot_of(ring, i)
                k = pl.ds(pl.multiple_of(s * tile.block_k, tile.block_k), tile.block_k)
                pl.when(i >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                left = gmem["a"].at[(k, m) if stored.a else (m, k)]
                right = gmem["b"].at[(n, k) if stored.b else (k, n)]
                shared = "cluster" if tile.cluster > 1 else None
                plgpu.copy_gmem_to_smem(left, a_smem.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(
                    right, b_smem.at[slot], ready.at[slot], collective_axes=shared
                )

        # Every phase of every barrier is observed before the block ends.
        for ring in range(tile.rings):
            total = tiles_of(ring) * steps

            @pl.loop(jnp.maximum(0, total - tile.stages), total)
            def _(i, ring=ring):
                plgpu.barrier_wait(free.at[slot_of(ring, i)])
