"""The tile of a product, and what fits in a thread block of a Hopper GPU.

A tile that does not fit fails deep in the compiler, or spills registers and is slow without any
message. So kernels check their tile here before they are traced, and the tuner drops such
candidates.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper.cards import (
    ALIGNMENT,
    COMPUTE_REGISTERS,
    RESERVED_BYTES,
    ROWS,
    SHARED_BYTES,
    SM_EPILOGUE,
    SM_FLOPS,
    SM_L2_BYTES,
    WARPGROUP,
)

# Rows and columns of the tiles that products choose from.
BLOCKS = ((128, 256), (128, 192), (128, 128), (64, 256), (64, 128), (64, 64))
Buffers = Mapping[str, tuple[tuple[int, ...], Any]]


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a persistent product is cut.

    block_m, block_n: rows and columns of a tile of the result. block_k: contracted at a time.
    stages: buffers of a ring, which are tiles of both operands in flight. warpgroups: how many
    compute. cluster: thread blocks, one below the other, that read the right operand once for all
    (TMA multicast). snake: clusters down the rows that are taken before the next column of tiles.
    pingpong: each warpgroup has tiles of its own, else they share each tile's rows. splits: parts
    of the contracted dimension, each with a result of its own.
    """

    block_m: int
    block_n: int
    block_k: int = 64
    stages: int = 6
    warpgroups: int = 2
    cluster: int = 1
    snake: int = 8
    pingpong: bool = False
    splits: int = 1

    @property
    def rings(self) -> int:
        """The number of rings of buffers, each with one tile after the other."""
        return self.warpgroups if self.pingpong else 1

    @property
    def rows(self) -> int:
        """The rows of a tile that one warpgroup computes."""
        return self.block_m * self.rings // self.warpgroups

    @property
    def buffers(self) -> int:
        """The buffers of each operand, in all rings."""
        return self.rings * self.stages

    @property
    def multicast(self) -> str | None:
        """The axis over which a copy of the right operand serves all blocks of a cluster."""
        return "cluster" if self.cluster > 1 else None

    def seconds(self, contracted: float, activation: bool = False) -> tuple[float, float]:
        """Returns an estimate of a tile's (product, epilogue), by tensor cores, L2 and counting."""
        flops = 2 * self.block_m * self.block_n * self.block_k
        loaded = 2 * self.block_k * (self.block_m + self.block_n / self.cluster)
        step = max(flops / SM_FLOPS, loaded / SM_L2_BYTES)
        finish = self.block_m * self.block_n / SM_EPILOGUE[activation]
        return contracted / self.block_k * step, finish


def fitted(tile: Tile, buffers: Callable[[Tile], Buffers]) -> Tile:
    """Returns the same tile with no more stages than fit. buffers: returns those of a tile."""

    def fits(stages: int) -> bool:
        needed = shared_bytes(buffers(dataclasses.replace(tile, stages=stages)))
        return needed <= SHARED_BYTES - RESERVED_BYTES

    stages = next((n for n in range(tile.stages, 2, -1) if fits(n)), 2)
    return dataclasses.replace(tile, stages=stages)


def check(op: str, tile: Tile, grain: int = 64) -> None:
    """Refuses a tile that breaks the rules of wgmma or of registers.

    grain: block_n and block_k are multiples of it.
    Raises: ValueError.
    """
    check_multiple(op, "block_m", tile.block_m, ROWS * tile.warpgroups // tile.rings)
    check_multiple(op, "block_n", tile.block_n, grain, 256)
    check_multiple(op, "block_k", tile.block_k, grain, 256)
    check_registers(op, tile.warpgroups, (tile.rows, tile.block_n))
    if tile.stages < 2 or tile.cluster not in (1, 2) or tile.splits < 1:
        raise ValueError(
            f"{op}: {tile} needs at least 2 stages, a cluster of 1 or 2, and 1 split or more"
        )


def shared_bytes(buffers: Buffers) -> int:
    """Returns the shared memory of named buffers (shape, dtype), each aligned for its swizzle."""
    return sum(
        -(-math.prod(shape) * jnp.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        for shape, dtype in buffers.values()
    )


def check_shared(op: str, buffers: Buffers) -> None:
    """Raises: ValueError, naming the largest buffer, when they do not fit in a thread block."""
    needed, most = shared_bytes(buffers), SHARED_BYTES - RESERVED_BYTES
    if needed > most:
        largest = max(buffers, key=lambda name: shared_bytes({name: buffers[name]}))
        shape, dtype = buffers[largest]
        raise ValueError(
            f"{op}: this tile needs {needed} bytes of shared memory, a thread block has {most}; "
            f"the largest buffer is {largest} {jnp.dtype(dtype).name}{list(shape)}"
        )


def accumulator_registers(*shapes: tuple[int, int]) -> int:
    """Returns the registers of a thread for float32 tiles (M, N) spread over a warpgroup."""
    return sum(rows * columns // WARPGROUP for rows, columns in shapes)


def check_registers(op: str, warpgroups: int, *shapes: tuple[int, int], spare: int = 64) -> None:
    """Raises: ValueError when a warpgroup's float32 tiles leave less than `spare` registers.

    warpgroups: how many compute, beside one that only starts copies. spare: for indices, row
    vectors and the operand on its way (chosen: what the kernels here need to stay without spills).
    """
    most = COMPUTE_REGISTERS[warpgroups] - spare
    needed = accumulator_registers(*shapes)
    if needed > most:
        raise ValueError(
            f"{op}: tiles {shapes} take {needed} registers of a thread, and with {warpgroups} "
            f"compute warpgroups there are {most}; use smaller tiles or fewer warpgroups"
        )


def check_multiple(op: str, name: str, value: int, multiple: int, most: int | None = None) -> None:
    """Raises: ValueError, with the nearest legal values, unless it is a multiple in 1 .. most."""
    if value > 0 and value % multiple == 0 and (most is None or value <= most):
        return
    below = max(value // multiple, 1) * multiple
    near = (
        {below, below + multiple}
        if most is None
        else {min(below, most), min(below + multiple, most)}
    )
    limit = "" if most is None else f" and at most {most}"
    raise ValueError(
        f"{op}: {name}={value} must be a multiple of {multiple}{limit}; nearest: "
        f"{', '.join(map(str, sorted(near)))}"
    )
