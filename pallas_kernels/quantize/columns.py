"""Bodies with a Hadamard transform: a thread has whole blocks of 32 neighbours in its registers.

A block is 32 arrays of one number a thread, so the five butterflies are 80 sums and 80 differences
a block, with no exchange between threads, and the codes of a word lie in one thread. In shared
memory a block is a row of 128 bytes (64 of 16 bits); TMA swizzles rows, for 32 threads that read
the same column of unswizzled rows would meet in one bank.

Legend: T groups of a tile, L blocks (threads) of a group, W 32-bit words.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantize import counter, registers
from pallas_kernels.quantize.fused_reference import BLOCK
from pallas_kernels.quantize.payloads import Payloads
from pallas_kernels.quantize.stream import stream

GROUPS = (128, 256, 512, 1024)  # a group is 4 to 32 threads of one warp
Values = Any


def layout(lanes: int) -> Any:
    """(T, L, columns) in registers: a thread for each of the first two, all columns in it."""
    near = 32 // lanes
    if near == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4, lanes, 1),)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
    tiling = plgpu.Tiling(((4 * near, lanes, 1), (near, lanes, 1)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1)


def transformed(parts: Sequence[Values]) -> list[Values]:
    """Returns x H / sqrt(32) of 32 arrays, in the order of additions of reference.hadamard."""
    mixed, half = list(parts), 1
    while half < len(parts):
        for i in range(len(parts)):
            if not i & half:
                a, b = mixed[i], mixed[i | half]
                mixed[i], mixed[i | half] = a + b, a - b
        half *= 2
    return [x * np.float32(len(parts) ** -0.5) for x in mixed]


def _columns(x_TLC: Values) -> list[Values]:
    T, L, C = x_TLC.shape
    return [lax.slice(x_TLC, (0, 0, c), (T, L, c + 1)) for c in range(C)]


def _over_lanes(x_T1: Values, lanes: int) -> Values:
    return lax.broadcast_in_dim(x_T1, (x_T1.shape[0], lanes, 1), [0, 2])


def _noise(key: Any, first: Any, problem: Any, T: int) -> list[Values]:
    """Returns the 32 u of each thread's block, by the index of its elements in all payloads.

    first: group of the tile.
    """
    L = problem.lanes
    one_TL1, other_TL1 = (
        plgpu.broadcasted_iota(jnp.int32, (T, L, 1), axis, layout=layout(L)) for axis in (0, 1)
    )
    calls = BLOCK // counter.CALL
    first_TL1 = ((first + one_TL1) * L + other_TL1) * calls
    noise = []
    for call in range(calls):
        pair = counter.words(key[0], key[1], first_TL1 + call)
        noise += [counter.uniform(word, half) for word in pair for half in (0, 1)]
    return noise


def encode(*refs, names, problem, tile, interpret, **smem):
    """Makes payloads of x: transform, scales, codes."""
    at = dict(zip(names, refs, strict=True))
    payloads, ready = Payloads(at, smem, problem, tile, interpret), smem["ready"]
    T, L, bits = tile.groups, problem.lanes, problem.new_bits
    q = 2 ** (bits - 1) - 1

    def fetch(t, slot):
        source = at["x"].at[pl.ds(t * T, T)]
        plgpu.copy_gmem_to_smem(source, smem["x_slots"].at[slot], ready.at[slot])

    def compute(t, slot, place):
        x_TLC = plgpu.load(smem["x_slots"].at[slot], layout=layout(L), optimized=False)
        parts = _columns(x_TLC.astype(jnp.float32))
        if problem.hadamard:
            parts = transformed(parts)
        amax_TL1 = functools.reduce(jnp.maximum, [jnp.abs(x) for x in parts])
        scale_T1, finite_T1 = registers.scales(amax_TL1.max(1), q)
        inverse_TL1 = _over_lanes(registers.reciprocal(scale_T1), L)
        noise: list[Any] = [None] * BLOCK
        if problem.noise:
            noise = _noise(at["key"], payloads.group_sent(t), problem, T)
        codes = [registers.codes(x, inverse_TL1, q, u) for x, u in zip(parts, noise, strict=True)]
        codes = [registers.placed(c, i * bits % 32, bits) for i, c in enumerate(codes)]
        each = 32 // bits
        words = [
            functools.reduce(jnp.bitwise_or, codes[w : w + each]) for w in range(0, BLOCK, each)
        ]
        finite_TL1 = _over_lanes(finite_T1, L)
        words = [word & finite_TL1 for word in words]
        payloads.store(place, words, scale_T1)

    stream(problem.tiles(tile), tile.blocks, tile.stages, ready, fetch, compute, payloads.send)


def reduce(*refs, names, problem, tile, interpret, **smem):
    """Makes the float32 sum of payloads, transformed back."""
    at = dict(zip(names, refs, strict=True))
    payloads, ready = Payloads(at, smem, problem, tile, interpret), smem["ready"]
    T, L, bits = tile.groups, problem.lanes, problem.bits

    def fetch(t, slot):
        for r in range(problem.payloads):
            payloads.fetch(r, t, slot, r)

    def compute(t, slot, place):
        def add(r, parts):
            words = payloads.columns(slot, r, (T, L, bits), layout(L))
            words = [registers.flipped(word, bits) for word in words]
            scale_T = payloads.scales(slot, r, layout(L).reduce((1, 2)))
            scale_TL1 = lax.broadcast_in_dim(scale_T, (T, L, 1), [0])
            numbers = [
                registers.numbers(words[c * bits // 32], c * bits % 32, bits) for c in range(BLOCK)
            ]
            return [
                part + registers.scaled(number, scale_TL1)
                for part, number in zip(parts, numbers, strict=True)
            ]

        # A loop: layouts are inferred in a time that grows with the square of what is unrolled.
        zeros = plgpu.layout_cast(jnp.zeros((T, L, 1), jnp.float32), layout(L))
        parts = lax.fori_loop(0, problem.payloads, add, [zeros] * BLOCK)
        if problem.hadamard:
            parts = transformed(parts)
        smem["out"].at[place][...] = lax.concatenate(parts, 2)

    def send(t, place):
        target = at["x"].at[pl.ds(t * T, T)]
        plgpu.copy_smem_to_gmem(smem["out"].at[place], target, commit_group=False)

    stream(problem.tiles(tile), tile.blocks, tile.stages, ready, fetch, compute, send)
