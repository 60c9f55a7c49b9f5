"""Products of 8-bit operands: each step's sum leaves the tensor core and is added in registers.

Hopper's tensor cores sum products of float8 with about 14 bits (DeepSeek-V3, arXiv 2412.19437,
section 3.3.2): over a long K the error would grow. So a step, 128 of K, has an accumulator of its
own, and the total is in float32 registers; of int8 both are int32, and exact. The price is a
second set of sums, so tiles are half as wide, and no wgmma is in flight while a warpgroup adds: the
other warpgroup's is. `wgmma` transposes 16-bit operands only, so the right one is stored (N, K).
"""

import dataclasses
from typing import Any, override

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper import engine, tiles
from pallas_kernels.hopper.tiles import Tile

STEP = 128  # of K: a row of a swizzled buffer, and what DeepSeek-V3 sums in a tensor core
BLOCKS = ((128, 128), (64, 128), (64, 64))  # rows and columns, twice in registers
OPERAND = jnp.int8  # stands for all operands of 8 bits, where only their size matters
UNUSED = ((64, 8),)  # the engine's accumulators, of which the interpreter needs one


def sum_dtype(dtype: Any) -> Any:
    """Returns what products of an operand's type are summed in."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def check(op: str, tile: Tile) -> None:
    """Raises: ValueError where a tile's step is another, or its sums take too many registers."""
    tiles.check_multiple(op, "block_k", tile.block_k, STEP, STEP)
    tiles.check_registers(op, tile.warpgroups, *[(tile.rows, tile.block_n)] * 2)


@dataclasses.dataclass(frozen=True)
class Promoted(engine.Product):
    """The engine's roles, with sums of `dtype` outside of the tensor core."""

    dtype: Any = jnp.float32

    @override
    def _product(self, where, live, multiply, *accumulators):
        ring, first, steps = where
        assert live is None and isinstance(steps, int)

        def step(i):
            buffer = self._buffer(ring, i)
            plgpu.barrier_wait(self.ready.at[buffer])

            def sums(acc):
                multiply(i - first, buffer, acc)
                return acc[...]  # waits for the product, which then no longer reads the buffer

            shape = self.tile.rows, self.tile.block_n
            step_sums = pl.run_scoped(sums, plgpu.ACC(shape, self.dtype))
            plgpu.barrier_arrive(self.free.at[buffer])
            return step_sums

        total = step(first)
        return (pl.loop(first + 1, first + steps, init_carry=total)(lambda i, t: t + step(i)),)
