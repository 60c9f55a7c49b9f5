"""Finds how an operation walks through memory, and what kind of code runs it.

An operation that reads an array against its layout (a transposition, a product with a transposed
operand) jumps by a stride from element to element. If a large power of two divides the stride, the
elements compete for a few sets of the cache: on an AMD EPYC, a transposition of 384 x 1,024 floats
takes 5.5 times as long as one of 384 x 1,040.

Strides are in bytes. All of it follows from the shapes, layouts and attributes of an instruction.
"""

import json
import math
import re
from collections.abc import Sequence

from megajax.cost import program_work as work
from megajax.cost.hlo_text import Array, Instruction
from megajax.cost.program_body import Region

# Operations whose result has the shape of their operand, which are computed as it is read.
_SAME = ("convert", "negate", "abs", "exponential", "tanh", "sqrt", "rsqrt", "log", "slice",
         "dynamic-slice", "copy")  # fmt: skip
_MADE = ("broadcast", "iota", "constant")  # computed, not read from memory
_PARTS = re.compile(r'"outer_dimension_partitions":(\[[^\]]*\])')


def access(found: Region, one: Instruction) -> dict[str, float]:
    """Returns the features of record.FEATURES that say how a launched instruction is executed.

    They are those of `strides`, and: 'span', the bytes of the whole arrays that it reads at least a
    part of; 'dilated', the product of a convolution's dilations; 'custom', 1 if it is a custom call
    or fusion, whose code is a library's (YNNPACK, cuBLAS) or another compiler's (Triton), and not
    that of XLA's own loops; 'parts', into how many parts XLA cuts it for the threads of a CPU.

    Args: found: the region of `one`.
    """
    given = [i for i in found.order if i.opcode == "parameter" and found.demand[i.name]]
    windows = [d for i in found.order if i.opcode == "convolution" for d in work.windows(i)]
    is_custom = one.opcode == "custom-call" or one.get("kind") == "kCustom"
    cuts = _PARTS.search(one.attributes)
    return {
        **strides(found),
        "span": sum(array.nbytes for i in given for array in i.arrays),
        "dilated": math.prod(d.base * d.dilation for d in windows) if windows else 0.0,
        "custom": float(is_custom),
        "parts": math.prod(map(int, json.loads(cuts[1]))) if cuts else 1.0,
    }


def strides(found: Region) -> dict[str, float]:
    """Returns the features 'stride', 'stride_right' and 'run' of record.FEATURES; 0 for none.

    Of a product, 'stride' lies between the elements of the first operand along the contracted
    dimension, and 'stride_right' between those of the second operand along the result's rows, each
    if the operand is read against its layout. Otherwise 'stride' is that of the largest
    transposition, and 'run' says how many adjacent bytes are moved together between two jumps.
    """
    dots = [i for i in found.order if i.opcode in ("dot", "ragged-dot") and len(i.operands) > 1]
    if dots:
        one = max(dots, key=lambda i: (i.array.elements, i.shape))
        left, right = _strides_of_product(one, *found.operands(one)[:2])
        return {"stride": left, "stride_right": right}
    jumps = [(found.demand[i.name] * i.array.itemsize, *_jump(found, i)) for i in found.order]
    _, stride, run = max((j for j in jumps if j[1]), default=(0.0, 0.0, 0.0))
    return {"stride": stride, "run": run}


def _strides_of_product(one: Instruction, left: Array, right: Array) -> tuple[float, float]:
    over, over_right = one.dims("lhs_contracting_dims"), one.dims("rhs_contracting_dims")
    batch = one.dims("rhs_batch_dims")
    kept = [d for d in range(len(right.dims)) if d not in (*over_right, *batch)]
    return _against(left, over), _against(right, kept)


def _against(array: Array, wanted: Sequence[int]) -> float:
    """Returns the least stride along some dimensions, 0 where they hold adjacent elements."""
    order = [d for d in array.layout if array.dims[d] > 1]
    if not order or order[0] in wanted:
        return 0.0
    return next((_stride(array, d) for d in order if d in wanted), 0.0)


def _jump(found: Region, one: Instruction) -> tuple[float, float]:
    """Returns (stride, run) of a transposition, in bytes; zeros of any other operation."""
    if len(one.operands) != 1 or one.operands[0] not in found.instructions:
        return 0.0, 0.0
    read, moved = found.array(one.operands[0]), one.dims("dimensions")
    if one.opcode != "transpose":
        moved = list(range(len(read.dims)))
    if one.opcode not in ("transpose", *_SAME) or len(read.layout) != len(one.array.layout):
        return 0.0, 0.0
    source = _read(found, one.operands[0])
    if source is None:
        return 0.0, 0.0
    wanted = [moved[d] for d in one.array.layout if one.array.dims[d] > 1]
    stored = [d for d in read.layout if read.dims[d] > 1]
    run = read.itemsize
    for mine, there in zip(wanted, stored, strict=False):
        if mine != there:
            return _stride(source, mine), run
        run *= read.dims[there]
    return 0.0, 0.0


def _read(found: Region, name: str) -> Array | None:
    """Returns the array in memory that a value is computed from element by element.

    None if it is computed without one.
    """
    one = found.source(name)
    while one.opcode in _SAME and one.operands and one.operands[0] in found.instructions:
        one = found.source(one.operands[0])
    if one.opcode in _MADE:
        return None
    value = found.array(name)
    is_like = len(one.array.dims) == len(value.dims) and one.array.layout == value.layout
    return one.array if is_like else value


def _stride(array: Array, dimension: int) -> float:
    """Returns the bytes between two elements that are neighbours along a dimension."""
    stride = array.itemsize
    for inner in array.layout[: array.layout.index(dimension)]:
        stride *= array.dims[inner]
    return stride
