"""Finds in which order a launched instruction reads the arrays in memory.

XLA's code for an operation is a nest of loops over its result, the result's adjacent elements
innermost; a reduction has loops over the reduced dimensions inside of these. What an operation
inside a fusion reads follows from the loops of its result: a transposition or a copy into another
layout permutes them, a broadcast drops some. So each array in memory is read by a nest of loops
with known strides, and these say how many adjacent elements are read before the address jumps.

A nest is a list of (stride, count), innermost first. The stride is in elements of the value's own
layout; it is 0 where the loop does not move within the value.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from megajax.cost import program_work as work
from megajax.cost.hlo_text import Array, Instruction
from megajax.cost.program_body import PASS, Region

Nest = tuple[tuple[int, int], ...]
# Operations whose result is not computed from the same place of their operands.
_STOPS = ("dot", "ragged-dot", "convolution", "custom-call", "scatter", "iota", "constant", "rng",
          "rng-bit-generator", "tuple")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Read:
    """How an array in memory is read, or updated in place.

    reads: elements. run: bytes that are read side by side before the address jumps. stride: bytes
    between the starts of two runs; 0 if the address never jumps.
    """

    reads: float
    run: float
    stride: float
    itemsize: float

    @property
    def jumps(self) -> float:
        """How often the address jumps."""
        return self.reads * self.itemsize / self.run if self.stride else 0.0


def reads(found: Region, by_library: bool = False) -> list[Read]:
    """Returns how the operations of a region read their parameters, a value a path and nest.

    Args: by_library: a library runs the region. Its reductions are assumed to read their operand in
      the order of memory, whatever dimensions they add up: YNNPACK's sums over columns take 0.29 ns
      an element on an AMD EPYC, XLA's own loops 4.2 ns.
    """
    stack = [(one.name, _nest(one)) for one in found.outputs]
    seen: set[tuple[str, Nest]] = set()
    result: list[Read] = []
    while stack:
        name, nest = stack.pop()
        if (name, nest) in seen or name not in found.instructions:
            continue
        seen.add((name, nest))
        one = found.instructions[name]
        if one.opcode == "parameter":
            if one.array.elements > 1 and len(one.arrays) == 1:
                result.append(_read(one.array, nest))
            continue
        if one.name in found.in_place and one.opcode == "dynamic-update-slice":
            moved = _by_dimension(nest, found.array(one.operands[1]))
            result.append(_read(one.array, _onto(one.array, moved)))
            stack.append((one.operands[1], nest))
            continue
        if by_library and one.opcode == "reduce":
            stack += [
                (n, _nest(found.instructions[n])) for n in one.operands if n in found.instructions
            ]
            continue
        stack += _below(found, one, nest)
    return result


def _nest(one: Instruction) -> Nest:
    """Returns the loops over the result of an operation that writes memory."""
    array = one.array
    order = list(array.layout)
    if one.opcode == "sort":  # one row after the other
        order.sort(key=lambda d: d not in one.dims("dimensions"))
    return _onto(array, [(d, 1, array.dims[d]) for d in order])


def _below(found: Region, one: Instruction, nest: Nest) -> Iterator[tuple[str, Nest]]:
    """Yields the operands of an operation with the loops that read them."""
    if one.opcode in _STOPS or not one.operands:
        return
    if one.opcode in (*PASS, "reshape"):
        yield one.operands[0], nest
        return
    value = one.array
    moves = _by_dimension(nest, value)
    if one.opcode in ("reduce", "reduce-window"):
        for name in one.operands[: len(one.operands) // 2]:
            if name in found.instructions:
                yield name, _combined(one, found.array(name), moves)
        return
    for place, name in enumerate(one.operands):
        if name not in found.instructions or found.array(name).elements <= 1:
            continue
        array = found.array(name)
        if one.opcode == "transpose":
            to = one.dims("dimensions")
        elif one.opcode == "broadcast":
            at = one.dims("dimensions")
            to = [at.index(d) if d in at else -1 for d in range(len(value.dims))]
        elif one.opcode == "gather":
            if place:
                continue
            to = _gathered(one, array, len(value.dims))
        elif len(array.dims) == len(value.dims):
            to = list(range(len(value.dims)))
        else:
            continue
        by = _steps(one, array, to)
        there = [(to[d], s * by[d], n) if d >= 0 else (-1, 0, n) for d, s, n in moves]
        if one.opcode in ("concatenate", "pad"):  # an operand makes a part of the result
            there = [(d, s, min(n, array.dims[d]) if d >= 0 else n) for d, s, n in there]
        yield name, _onto(array, there)


def _combined(one: Instruction, source: Array, moves: list[tuple[int, int, int]]) -> Nest:
    """Returns the loops of a reduction over its operand: those of the result around its own."""
    if one.opcode == "reduce":
        gone = one.dims("dimensions")
        kept = [d for d in range(len(source.dims)) if d not in gone]
        inner = [(d, 1, source.dims[d]) for d in source.layout if d in gone]
        outer = [(kept[d], step, n) for d, step, n in moves if 0 <= d < len(kept)]
    else:
        sizes = work.windows(one)
        inner = [(d, sizes[d].dilation, sizes[d].size) for d in source.layout]
        outer = [(d, step * sizes[d].stride, n) for d, step, n in moves if d >= 0]
    return _onto(source, inner + outer)


def _gathered(one: Instruction, array: Array, rank: int) -> list[int]:
    """Returns the dimension of the operand that each dimension of a gather's result moves along."""
    inside = one.dims("offset_dims")
    gone = [*one.dims("collapsed_slice_dims"), *one.dims("operand_batching_dims")]
    kept = [d for d in range(len(array.dims)) if d not in gone]
    looked_up = (one.dims("start_index_map") or [-1])[0]
    to = dict(zip(inside, kept, strict=False))
    return [to.get(d, looked_up) for d in range(rank)]


def _steps(one: Instruction, array: Array, to: list[int]) -> list[int]:
    """Returns how far one step along each dimension of the result moves along the operand's `to`.

    A slice may have steps. The next row that a gather looks up is anywhere, assumed to be a third
    of the dimension away, the mean distance of two random rows.
    """
    found = [1] * len(to)
    if one.opcode == "slice":
        for d, part in enumerate(re.findall(r"\[([\d:]+)\]", one.get("slice"))):
            bounds = part.split(":")
            if d < len(to) and len(bounds) == 3:
                found[d] = int(bounds[2])
    if one.opcode == "gather":
        inside = one.dims("offset_dims")
        for d, there in enumerate(to):
            if d not in inside and there >= 0:
                found[d] = max(array.dims[there] // 3, 2)
    return found


def _by_dimension(nest: Nest, array: Array) -> list[tuple[int, int, int]]:
    """Returns the loops as (dimension, step, count), innermost first; dimension -1: none."""
    found: list[tuple[int, int, int]] = []
    for stride, count in nest:
        if stride == 0:
            found.append((-1, 0, count))
            continue
        for d, below in array.strides.items():
            above = below * array.dims[d]
            if below <= stride < above and count > 1:
                step = max(stride // below, 1)
                room = math.ceil(array.dims[d] / step)
                found.append((d, step, min(count, room)))
                count, stride = math.ceil(count / room), above
    return found


def _onto(array: Array, moves: list[tuple[int, int, int]]) -> Nest:
    """Returns the loops, given by dimensions of an array, as strides in its layout."""
    strides = {d: stride for d, stride in array.strides.items() if array.dims[d] > 1}
    return tuple((strides.get(d, 0) * step, n) for d, step, n in moves if n > 1)


def _read(array: Array, nest: Nest) -> Read:
    moving = [(stride, count) for stride, count in nest if stride and count > 1]
    reads = math.prod(count for _, count in moving)
    beside = 1
    for stride, count in moving:
        if stride != beside:
            return Read(reads, beside * array.itemsize, stride * array.itemsize, array.itemsize)
        beside *= count
    return Read(reads, beside * array.itemsize, 0.0, array.itemsize)
