"""The thread blocks of all fused kernels: how many there are, and what each of them does.

Most thread blocks compute (engine.py): tiles come in the order of schedule.py, and a kernel names
its operands and results tile by tile. Some blocks may only copy (relay.py); their flags tell the
others which rows have arrived.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import engine, tiles
from pallas_kernels.hopper.epilogue import Staging
from pallas_kernels.hopper.memory import PIECE, Int, swizzled
from pallas_kernels.hopper.peers import Peers, clock, spin
from pallas_kernels.hopper.tiles import BLOCKS, Tile

# (chosen: 400 GB/s of an H100's NVLink in one direction, of which a block, with six pieces of
# 32 KiB on their way for 2 us, moves a quarter; to be replaced by measurements)
LINK_BYTES, BLOCK_BYTES = 400e9, 100e9


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How a fused kernel runs.

    tile: that of the product, as in gemm, without ping-pong. comm: thread blocks that only copy, in
    whole clusters; 0 if the epilogue sends. chunk: rows that travel under one flag. rotated: tiles
    begin with the rank's own rows, or those of the next rank; False: with row 0, which measures
    what the rotation gains.
    """

    tile: Tile
    comm: int
    chunk: int
    rotated: bool = True

    def step(self, i: Int, first: Int, ranks: int, each: int) -> Int:
        """Returns the i-th step to take; a rank has `each` steps, and rank `first` comes first."""
        if self.rotated:
            return i
        rank = lax.rem(lax.div(i, jnp.int32(each)) + ranks - first, jnp.int32(ranks))
        return rank * each + lax.rem(i, jnp.int32(each))


def candidates(rows: int, widths: Sequence[int], out_dtype: Any, grain: int = 64) -> Iterator[Tile]:
    """Tiles that are legal for these sizes, of which each has the most stages that fit.

    grain: a tile's columns are a multiple of it.
    """
    for block_m, block_n in BLOCKS:
        if block_n > min(widths) or block_n % grain:
            continue
        for cluster in (2, 1):
            if block_m * (cluster - 1) < rows:
                yield fitted(Tile(block_m, block_n, 64, 6, block_m // 64, cluster), out_dtype)


def fitted(tile: Tile, out_dtype: Any, dtype: Any = jnp.bfloat16) -> Tile:
    """The same tile with no more stages than fit in shared memory."""
    return tiles.fitted(tile, lambda tile: engine.buffers(tile, dtype, out_dtype))


def clusters_of(op: str, fusion: Fusion, peers: Peers, blocks: int, copying: bool = True) -> int:
    """Returns the clusters of one rank's thread blocks, of which all run at one time.

    copying: whether the kernel has communication blocks.
    Raises: ValueError where a fusion breaks the rules of the product, leaves no block for it, or
      has none that communicates where the product would wait for it.
    """
    tile = fusion.tile
    tiles.check(op, tile)
    if tile.pingpong:
        raise ValueError(f"{op}: {tile} shares its tiles; ping-pong is not for fused kernels")
    clusters = blocks // tile.cluster // peers.copies
    if (fusion.comm > 0) != (copying and not peers.ready):
        raise ValueError(f"{op}: comm={fusion.comm} of {fusion}: some block must copy, or none can")
    if fusion.comm < 0 or fusion.comm % tile.cluster or fusion.comm // tile.cluster >= clusters:
        raise ValueError(
            f"{op}: comm={fusion.comm} of {clusters * tile.cluster} thread blocks must be whole "
            f"clusters of {tile.cluster} and leave one for the product"
        )
    tiles.check_multiple(op, "chunk", fusion.chunk, PIECE)
    return clusters


def scratch(
    op: str,
    fusion: Fusion,
    shared: tiles.Buffers,
    ring: Callable[[int], tuple[tuple[Any, ...], Any]],
    staged: Callable[..., Any] = swizzled,
) -> dict[str, Any]:
    """Returns shared memory and barriers: the product's buffers, or what blocks that copy need.

    shared: the product's buffers. ring: returns a ring of so many bytes, with its barriers.
    """
    tiles.check_shared(op, shared)
    smem = tuple(engine.scratch(shared, staged=staged).values())
    memory = {"smem": smem} | engine.barriers(fusion.tile)
    if fusion.comm:
        copied, arrived = ring(tiles.shared_bytes(shared))
        memory |= {"smem": plgpu.RefUnion(smem, copied), "arrived": arrived}
    return memory


@dataclasses.dataclass(frozen=True)
class Parts:
    """Consecutive runs of numbers: tiles of columns of several weights, steps of several sums."""

    sizes: Sequence[int]

    @property
    def total(self) -> int:
        """The size of all parts together."""
        return sum(self.sizes)

    def each(self, i: Int, do: Callable[[int, Int], None]) -> None:
        """Calls do(part, place in it) for the part that i belongs to."""
        for part, size in enumerate(self.sizes):
            first = sum(self.sizes[:part])
            inside = (i >= first) & (i < first + size)
            pl.when(inside)(functools.partial(do, part, i - first))


class Worker:
    """A thread block of a fused kernel.

    rank: the rank that it works for. cluster: its cluster's number among those of the rank. block:
    its number in the cluster. ring: the shared memory of blocks that copy. product, staging: those
    of blocks that compute.
    """

    def __init__(
        self,
        peers: Peers,
        fusion: Fusion,
        clusters: int,
        turned: bool,
        steps: int,
        memory: Mapping[str, Any],
        delays: Any = None,
    ):
        """Says how a block of a kernel is used.

        clusters: how many a rank has. turned: weights are stored (N, K). steps: how many a tile's
        product has. memory: smem, ready and free of `scratch`. delays: ns that each rank starts
        late (tests).
        """
        self.peers, self.fusion, self.tile, self.turned = peers, fusion, fusion.tile, turned
        smem = memory["smem"]
        (self.a_smem, self.b_smem, y_smem), *ring = smem if fusion.comm else (smem,)
        self.ring = ring[0] if ring else ()
        self.rank, self.cluster = peers.rank(), peers.cluster()
        self.block, self.warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
        self.talking = fusion.comm // self.tile.cluster  # clusters that only copy: the first ones
        self.computing = clusters - self.talking
        self.product = engine.Product(
            self.tile,
            memory["ready"],
            memory["free"],
            steps,
            self.cluster - self.talking,
            self.computing,
        )
        self.staging = Staging((y_smem,), self.warpgroup)
        if delays is not None:
            spin(clock(), delays[self.rank])

    @property
    def number(self) -> Int:
        """The number of this thread block, both among its rank's that copy and among all."""
        return self.cluster * self.tile.cluster + self.block

    @property
    def worker(self) -> tuple[Int, int]:
        """This warpgroup's number among all that compute or copy for its rank, and theirs."""
        clusters = self.talking + self.computing
        everyone = clusters * self.tile.cluster * self.tile.warpgroups
        return self.number * self.tile.warpgroups + self.warpgroup, everyone

    @property
    def computing_warpgroup(self) -> tuple[Int, int]:
        """This warpgroup's number among those that compute for its rank, and how many these are."""
        me, everyone = self.worker
        each = self.tile.warpgroups
        return me - self.fusion.comm * each, everyone - self.fusion.comm * each

    def top(self, row: Int) -> Int:
        """The first row of this warpgroup's, of a cluster's tile that begins at `row`."""
        return row + self.block * self.tile.block_m + self.warpgroup * self.tile.rows

    def rows(self, row: Int) -> Any:
        """Returns the rows that this block reads of a cluster's tile that begins at `row`."""
        first = pl.multiple_of(row + self.block * self.tile.block_m, self.tile.block_m)
        return pl.ds(first, self.tile.block_m)

    def load_left(self, rows: Any, buffer: Int, barrier: Any) -> None:
        """Starts the copy of (block_m, block_k)."""
        plgpu.copy_gmem_to_smem(rows, self.a_smem.at[buffer], barrier)

    def load_right(self, w: Any, n: Any, k: Any, buffer: Int, barrier: Any) -> None:
        """Starts the copy of columns n and rows k of a weight, for the whole cluster."""
        plgpu.copy_gmem_to_smem(
            w.at[(n, k) if self.turned else (k, n)],
            self.b_smem.at[buffer],
            barrier,
            collective_axes=self.tile.multicast,
        )

    def compute(self, total: Int, finish: Callable[[Int, Any], None]) -> None:
        """Runs a compute warpgroup; finish(i, sums of its rows) stores tile i of `total`."""

        def multiply(_, s, buffer, acc):
            right = self.b_smem.at[buffer]
            left = self.a_smem.at[buffer, self.product.part_rows]
            plgpu.wgmma(acc, left, right.T if self.turned else right)

        sums = [(self.tile.rows, self.tile.block_n)]
        self.product.compute(total, multiply, finish, sums=sums)

    def store(
        self, sums: Any, value: Callable[[Any, int], Any], copy: Callable[[Any, int, int], None]
    ) -> None:
        """Stores a warpgroup's sums, piece by piece.

        value(sums, right): what is stored of those from column `right` of the tile on.
        copy(piece in SMEM, down, right): one group of copies (TMA) of the piece there.
        """
        pieces = self.staging.pieces((self.tile.rows, self.tile.block_n))
        for p, (down, right, rows, columns) in enumerate(pieces):
            y = value(sums[rows, columns], right)
            self.staging.put(
                p, (y,), lambda piece, down=down, right=right: copy(piece, down, right)
            )

    def specialise(
        self,
        compute: Callable[[], None],
        produce: Callable[[], None],
        communicate: Callable[[], None] | None = None,
    ) -> None:
        """Gives each warpgroup its role; in blocks that copy, compute warpgroups `communicate`."""
        if self.fusion.comm and communicate:
            copying = self.warpgroup < self.tile.warpgroups
            pl.when((self.cluster < self.talking) & copying)(communicate)
        computes = self.cluster >= self.talking
        self.product.specialise(compute, produce, engine.BUSY, computes)
