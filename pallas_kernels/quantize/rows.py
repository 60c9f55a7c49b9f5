"""Bodies without a transform: a thread has the neighbours that a word of codes holds.

The numbers of a word are one vector of a thread (8 of 4 bits, 4 of 8), which is read and written in
whole 16 bytes; the sum of its shifted codes is the word. Where 8-bit codes become 4-bit ones, a
thread has two words in, side by side, and one out.

Legend: T groups of a tile, L times 4 words of a group, V numbers of a word.
"""

import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import counter, registers
from pallas_kernels.quantize.payloads import Payloads
from pallas_kernels.quantize.stream import INSIDE, stream

FOUR = 4  # words that end a shape: layout inference tiles no shared memory with so few
GROUPS = (128, 256, 512, 1024, 2048)
Values = Any


def layout(lanes: int, *inner: int) -> Any:
    """(T, L, 4, *inner) in registers: a thread for the first three, the last one a vector."""
    near, one = 32 // lanes, (1,) * (len(inner) - 1) + inner[-1:]
    rank, warp = 3 + len(inner), (near, lanes // FOUR, FOUR, *one)
    if near == 1:
        tiling, warps = plgpu.Tiling(((4, *warp[1:]),)), (-rank,)
        threads = (1 - rank, 2 - rank)
    else:
        tiling, warps = plgpu.Tiling(((4 * near, *warp[1:]), warp)), (-2 * rank,)
        threads = (-rank, 1 - rank, 2 - rank)
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=threads, vector_dim=-1)


def _spread(x: Values, shape: tuple[int, ...], rank: int) -> Values:
    """An array of the first `rank` dimensions over all."""
    return lax.broadcast_in_dim(x, shape, list(range(rank)))


def _shifts(shape: tuple[int, ...], where: Any, bits: int) -> Values:
    """Returns how far the codes of each word are shifted."""
    return plgpu.broadcasted_iota(jnp.int32, shape, len(shape) - 1, layout=where) * bits


def _noise(key: Any, t: Any, shape: tuple[int, ...], where: Any) -> Values:
    """Returns u for (T, L, 4, ...) numbers, by their index; a call makes those of four."""
    T, L, *_, V = shape
    inner = shape[3:]
    calls = math.prod(inner) // counter.CALL
    flat = where.reduce(tuple(range(3, len(shape))))
    group, many, few = (
        plgpu.broadcasted_iota(jnp.int32, shape[:3], axis, layout=flat) for axis in range(3)
    )
    first = (((t * T + group) * L + many) * FOUR + few) * calls
    index = plgpu.broadcasted_iota(jnp.int32, shape, len(shape) - 1, layout=where)
    if len(inner) == 2:
        index += V * plgpu.broadcasted_iota(jnp.int32, shape, 3, layout=where)
    chosen = None
    for call in range(calls):
        for place, short in enumerate(counter.words(key[0], key[1], first + call)):
            word = _spread(short, shape, 3)
            for half in (0, 1):
                u, number = counter.uniform(word, half), counter.CALL * call + 2 * place + half
                chosen = u if chosen is None else jnp.where(index == number, u, chosen)
    return chosen


def _quantized(x: Values, key: Any, t: Any, where: Any, bits: int) -> tuple[Values, Values, Values]:
    """Returns (codes in the low bits of words, float32 scale_T, words that are 0 where none)."""
    q, amax = 2 ** (bits - 1) - 1, jnp.abs(x)
    for axis in reversed(range(1, len(x.shape))):
        amax = amax.max(axis)
    scale_T, finite_T = registers.scales(amax, q)
    inverse = _spread(registers.reciprocal(scale_T), x.shape, 1)
    noise = None if key is None else _noise(key, t, x.shape, where)
    return registers.codes(x, inverse, q, noise), scale_T, finite_T


def difference(*refs, names, problem, tile, interpret, **smem):
    """Makes a payload of main - copy."""
    at = dict(zip(names, refs, strict=True))
    payloads, ready = Payloads(at, smem, problem, tile, interpret), smem["ready"]
    T, bits, V = tile.groups, problem.new_bits, problem.near
    where = layout(problem.lanes, V)
    shape = (T, problem.group // (FOUR * V), FOUR, V)

    def fetch(t, slot):
        for name in ("main", "x"):
            source, target = at[name].at[pl.ds(t * T, T)], smem[f"{name}_slots"].at[slot]
            plgpu.copy_gmem_to_smem(source, target, ready.at[slot], oob_mode=INSIDE)

    def compute(t, slot, place):
        main, copy = (
            plgpu.load(smem[f"{name}_slots"].at[slot], layout=where, optimized=False)
            for name in ("main", "x")
        )
        x = main - copy.astype(jnp.float32)
        code, scale_T, finite_T = _quantized(x, at.get("key"), t, where, bits)
        word = registers.placed(code, _shifts(shape, where, bits), bits).sum(3)
        payloads.store(place, [word & _spread(finite_T, shape[:3], 1)], scale_T)

    stream(problem.tiles(tile), tile.blocks, tile.stages, ready, fetch, compute, payloads.send)


def recode(*refs, names, problem, tile, interpret, **smem):
    """Makes 4-bit payloads of the sum of 8-bit payloads."""
    at = dict(zip(names, refs, strict=True))
    payloads, ready = Payloads(at, smem, problem, tile, interpret), smem["ready"]
    T, bits, new = tile.groups, problem.bits, problem.new_bits
    where = layout(problem.lanes, 2, 4)
    shape = (T, problem.group // (FOUR * 8), FOUR, 2, 4)

    def fetch(t, slot):
        for r in range(problem.payloads):
            payloads.fetch(r, t, slot, r)

    def compute(t, slot, place):
        total = None
        for r in range(problem.payloads):
            word = payloads.words(slot, r, shape[:4], where.reduce(4))
            word = _spread(registers.flipped(word, bits), shape, 4)
            x = registers.numbers(word, _shifts(shape, where, bits), bits)
            scale_T = payloads.scales(slot, r, where.reduce((1, 2, 3, 4)))
            x = registers.scaled(x, _spread(scale_T, shape, 1))
            total = x if total is None else total + x
        code, scale_T, finite_T = _quantized(total, at.get("key"), t, where, new)
        second = plgpu.broadcasted_iota(jnp.int32, shape, 3, layout=where) * (4 * new)
        word = registers.placed(code, _shifts(shape, where, new) + second, new).sum(4).sum(3)
        payloads.store(place, [word & _spread(finite_T, shape[:3], 1)], scale_T)

    stream(problem.tiles(tile), tile.blocks, tile.stages, ready, fetch, compute, payloads.send)


def apply(*refs, names, problem, tile, interpret, **smem):
    """Adds the numbers in payloads to a copy."""
    at = dict(zip(names, refs, strict=True))
    payloads, ready = Payloads(at, smem, problem, tile, interpret), smem["ready"]
    T, bits, V = tile.groups, problem.bits, problem.near
    where = layout(problem.lanes, V)
    shape = (T, problem.group // (FOUR * V), FOUR, V)
    tiles = jnp.int32(problem.groups // T)

    def fetch(t, slot):
        row, first = lax.div(t, tiles), lax.rem(t, tiles)
        payloads.fetch(row, first, slot, 0)
        source, target = at["x"].at[pl.ds(t * T, T)], smem["x_slots"].at[slot]
        plgpu.copy_gmem_to_smem(source, target, ready.at[slot], oob_mode=INSIDE)

    def compute(t, slot, place):
        word = payloads.words(slot, 0, shape[:3], where.reduce(3))
        scale_T = payloads.scales(slot, 0, where.reduce((1, 2, 3)))
        copy = plgpu.load(smem["x_slots"].at[slot], layout=where, optimized=False)
        word = _spread(registers.flipped(word, bits), shape, 3)
        change = registers.numbers(word, _shifts(shape, where, bits), bits)
        change = registers.scaled(change, _spread(scale_T, shape, 1))
        new = copy.astype(jnp.float32) + change
        smem["out"].at[place][...] = new.astype(problem.dtype)

    def send(t, place):
        target = at["new"].at[pl.ds(t * T, T)]
        plgpu.copy_smem_to_gmem(smem["out"].at[place], target, commit_group=False)

    stream(problem.tiles(tile), tile.blocks, tile.stages, ready, fetch, compute, send)
