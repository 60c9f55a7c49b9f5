"""What fits in a thread block of a Hopper GPU, and which sizes its instructions take.

A tile that does not fit fails deep in the compiler, or spills registers and is slow without a word:
kernels check theirs here before they are traced, and the tuner drops such candidates.
Source: CUDA C programming guide, technical specifications of compute capability 9.0.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

SHARED_BYTES = 227 * 1024  # that a thread block may have
RESERVED_BYTES = 1024  # (measured, deviceless: barriers and their alignment)
ALIGNMENT = 1024  # of a buffer with a 128-byte swizzle
WARPGROUP = 128  # threads
ROWS = 64  # of a wgmma instruction, and of a warpgroup's tile
REGISTERS = 255  # that a thread can name
# Registers of a thread once a producer has handed its own over, by compute warpgroups: 65536 of an
# SM, 40 (or 24) kept by the producer, in steps of 8 (FlashAttention-3 section 3.1).
COMPUTE_REGISTERS = {1: 240, 2: 232, 3: 160}

Buffers = Mapping[str, tuple[tuple[int, ...], Any]]


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

    warpgroups: that compute, beside one that only starts copies. spare: for indices, row vectors
    and the operand on its way (chosen: what the kernels here need to stay without spills).
    """
    most = COMPUTE_REGISTERS[warpgroups] - spare
    needed = accumulator_registers(*shapes)
    if needed > most:
        raise ValueError(
            f"{op}: tiles {shapes} take {needed} registers of a thread, and with {warpgroups} "
            f"compute warpgroups there are {most}; use smaller tiles or fewer warpgroups"
        )


def check_multiple(op: str, name: str, value: int, multiple: int, most: int | None = None) -> None:
    """Raises: ValueError, with the nearest legal values, unless a multiple, above 0, <= most."""
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
