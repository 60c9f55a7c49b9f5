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

from megajax.cost import program_loops as loops
from megajax.cost import program_work as work
from megajax.cost.hlo_text import Array, Instruction
from megajax.cost.program_body import Region

_PARTS = re.compile(r'"outer_dimension_partitions":(\[[^\]]*\])')
_THREADED = ("dot", "convolution", "sort", "custom-call")  # use the threads of a CPU as they like


def access(found: Region, one: Instruction, *, is_gpu: bool = False) -> dict[str, float]:
    """Returns the features of record.FEATURES that say how a launched instruction is executed.

    They are those of `strides`, and: 'span', the bytes of the whole arrays that it reads at least a
    part of; 'dilated', the product of a convolution's dilations; 'custom', 1 if it is a custom call
    or fusion, whose code is a library's (YNNPACK, cuBLAS) or another compiler's (Triton), and not
    that of XLA's own loops; 'parts', how many threads of a CPU a loop of XLA's own runs on at most.
    Other code divides itself among all threads, or runs on a GPU: then 'parts' is 0.

    Args: found: the region of `one`. is_gpu: whether it runs on a GPU.
    """
    given = [i for i in found.order if i.opcode == "parameter" and found.demand[i.name]]
    windows = [d for i in found.order if i.opcode == "convolution" for d in work.windows(i)]
    is_custom = one.opcode == "custom-call" or one.get("kind") == "kCustom"
    is_loop = not (is_gpu or is_custom or one.opcode in _THREADED)
    cuts = _PARTS.search(one.attributes)
    parts = math.prod(map(int, json.loads(cuts[1]))) if cuts else 1
    return {
        **strides(found, is_custom),
        "span": sum(array.nbytes for i in given for array in i.arrays),
        "dilated": math.prod(d.base * d.dilation for d in windows) if windows else 0.0,
        "custom": float(is_custom),
        "parts": float(parts) if is_loop else 0.0,
    }


def strides(found: Region, by_library: bool = False) -> dict[str, float]:
    """Returns the features 'stride', 'stride_right', 'run' and 'jumps' of record.FEATURES.

    Of a product, 'stride' lies between the elements of the first operand along the contracted
    dimension, and 'stride_right' between those of the second operand along the result's rows, each
    if the operand is read against its layout. Otherwise 'jumps' says how often the address jumps
    while arrays are read, and 'run' and 'stride', both in bytes, belong to the array with the most
    jumps (program_loops.Read). Each is 0 where there is none. by_library: as `reads` has it.
    """
    dots = [i for i in found.order if i.opcode in ("dot", "ragged-dot") and len(i.operands) > 1]
    if dots:
        one = max(dots, key=lambda i: (i.array.elements, i.shape))
        left, right = _strides_of_product(one, *found.operands(one)[:2])
        return {"stride": left, "stride_right": right}
    jumping = [read for read in loops.reads(found, by_library) if read.jumps]
    if not jumping:
        return {}
    most = max(jumping, key=lambda read: (read.jumps, read.stride, read.run))
    jumps = math.fsum(read.jumps for read in jumping)  # the same in any order
    return {"stride": most.stride, "run": most.run, "jumps": jumps}


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
    return next((array.itemsize * array.strides[d] for d in order if d in wanted), 0.0)
