"""The orders in which a warpgroup waits for a step, multiplies by it and gives its buffers back.

The left operand of wgmma is in registers here. Registers that a wgmma reads may not be written
before `wgmma.wait_group` has told that it is over (PTX ISA, section wgmma.mma_async).
"""

import dataclasses
from typing import override

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper import engine


@dataclasses.dataclass(frozen=True)
class Product(engine.Product):
    """The engine's roles, but the products of a step are over before the next is dequantized.

    The engine leaves the products of one step in flight. Here the next step would overwrite
    registers that they still read, which the PTX ISA calls undefined behaviour before
    `wgmma.wait_group` (section wgmma.mma_async).
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
        def found(i, sums):
            buffer = self._buffer(ring, i)
            plgpu.barrier_wait(self.ready.at[buffer])
            sums = multiply(i - first, buffer, sums)
            plgpu.barrier_arrive(self.free.at[buffer])
            return sums

        return (found,)
