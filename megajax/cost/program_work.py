"""Finds what one operation of a compiled program computes: its class, FLOPs and shape.

All of it follows from the opcode, the shapes and the attributes of the operation, by the rules that
cost/program.py lists. Neither names nor the order of operations have an influence.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from megajax.cost.hlo import Array, Instruction, contracted

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
CLASS = {
    **dict.fromkeys(("add", "subtract", "negate", "abs", "sign", "floor", "ceil",
                     "round-nearest-afz", "round-nearest-even"), "add"),
    "multiply": "multiply", "divide": "divide", "remainder": "divide",
    **dict.fromkeys(("maximum", "minimum", "clamp"), "maximum"),
    **dict.fromkeys(("compare", "and", "or", "not", "xor", "is-finite"), "compare"),
    "select": "select",
    **dict.fromkeys(("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic",
                     "tanh", "erf"), "exponential"),
    # On a CPU 15 to 40 times as long as exp or tanh: XLA calls the C library for each element.
    **dict.fromkeys(("sine", "cosine", "tan", "atan2"), "trigonometric"),
    **dict.fromkeys(("power", "sqrt", "rsqrt", "cbrt"), "power"),
    **dict.fromkeys(("convert", "bitcast-convert", "reduce-precision", "real", "imag",
                     "complex"), "convert"),
    **dict.fromkeys(("shift-left", "shift-right-logical", "shift-right-arithmetic", "popcnt",
                     "count-leading-zeros"), "integer"),
    **dict.fromkeys(("broadcast", "iota"), "broadcast"),
    **dict.fromkeys(("reshape", "dynamic-reshape"), "reshape"),
    "transpose": "transpose", "copy": "copy", "copy-start": "copy",
    **dict.fromkeys(("slice", "dynamic-slice", "reverse"), "slice"),
    "dynamic-update-slice": "update",
    **dict.fromkeys(("concatenate", "pad"), "concatenate"),
    "gather": "gather", "scatter": "scatter",
    **dict.fromkeys(("reduce", "reduce-window", "select-and-scatter"), "reduce"),
    **dict.fromkeys(("dot", "ragged-dot"), "dot"), "convolution": "convolution", "sort": "sort",
    **dict.fromkeys(("rng", "rng-bit-generator", "rng-get-and-update-state"), "random"),
    "custom-call": "custom",
    **dict.fromkeys(COLLECTIVES, "collective"),
}  # fmt: skip
FLOPS = ("add", "multiply", "divide", "maximum")  # of floats: one an element
COMMUTES = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
# Opcodes that launch nothing: they name, group or reinterpret what is in memory.
FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency",
    "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain", "copy-done",
    "fusion-done", "async-done", "async-update", "call-done", "get-dimension-size",
))  # fmt: skip
DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "pred": "bool",
    "s4": "int4", "u4": "int4", "s8": "int8", "u8": "int8", "s16": "int16", "u16": "int16",
    "s32": "int32", "u32": "int32", "s64": "int64", "u64": "int64", "c64": "complex64",
    "c128": "complex128",
}  # fmt: skip


def dtype_of(array: Array) -> str:
    """Returns the data type as records name it: every 8-bit float is 'float8'."""
    return DTYPES.get(array.dtype) or ("float8" if array.dtype.startswith("f8") else "float32")


@dataclasses.dataclass(frozen=True)
class Product:
    """`batch` matrix products of (m, k) by (k, n).

    transposed: how many of the two operands are read against their layout: the first one, if it is
    not contiguous along k; the second one, if it is.
    """

    batch: int
    m: int
    n: int
    k: int
    transposed: int = 0


def class_of(one: Instruction) -> str:
    """Returns the class of OPCODES that an operation belongs to.

    Arithmetic on integers is 'integer': it takes no floating-point operations. A copy into another
    layout is a transpose.
    """
    name = CLASS.get(one.opcode, "other")
    if name in (*FLOPS, "power") and not one.array.is_float:
        return "integer"
    return name


def flops_of(
    one: Instruction, operands: Sequence[Array], body: Mapping[str, Instruction], share: float
) -> float:
    """Returns the floating-point operations of a share of an operation's result.

    operands: their arrays. body: the computation that a reduction calls, else empty.
    """
    kind, result = class_of(one), one.array
    if kind in FLOPS:
        return share * result.elements
    if kind == "dot":
        product = dot(one, operands)
        return 2.0 * product.batch * product.m * product.n * product.k
    if kind == "convolution":
        return convolution(one, operands[0], operands[1], result)[1]
    if kind == "reduce" and operands and operands[0].is_float:
        each = sum(class_of(i) in FLOPS for i in body.values()) or 1
        return share * each * _reductions(one, operands)
    if kind == "scatter" and result.is_float and len(operands) > 2:
        return operands[-1].elements * sum(class_of(i) in FLOPS for i in body.values())
    return 0.0


def _reductions(one: Instruction, operands: Sequence[Array]) -> float:
    """Returns how often a reduction combines two values."""
    result = one.array.elements
    if one.opcode == "reduce":
        return max(operands[0].elements - result, 0)
    if one.opcode == "reduce-window":
        return max(_in_windows(one, operands[0].dims, one.array.dims) - result, 0)
    # select-and-scatter: compares the elements of a window and adds the source's to one of them
    return _in_windows(one, operands[0].dims, operands[1].dims)


def _in_windows(one: Instruction, operand: Sequence[int], windowed: Sequence[int]) -> int:
    """Returns how many elements all windows have together, without those of the padding.

    XLA's CPU compiler splits long sums into windows that it pads. windowed: windows by dimension.
    """
    rows = zip(windows(one), operand, windowed, strict=True)
    return math.prod(window.pairs(size, count) for window, size, count in rows)


@dataclasses.dataclass(frozen=True)
class WindowDimension:
    """One dimension of an attribute window={size=... stride=... pad=...}."""

    size: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    base: int = 1  # lhs_dilate: zeros between the elements of the operand
    dilation: int = 1  # rhs_dilate

    def pairs(self, operand: int, result: int) -> int:
        """Returns how many pairs of a result and a place in its window fall on a real element.

        The other pairs fall on padding, or on the zeros between elements (`base`).
        """
        first = np.arange(result) * self.stride - self.low
        total = 0
        for k in range(self.size):
            place = first + k * self.dilation
            inside = (place >= 0) & (place <= (operand - 1) * self.base)
            total += int((inside & (place % self.base == 0)).sum())
        return total


def windows(one: Instruction) -> list[WindowDimension]:
    """Returns the dimensions of an operation's window."""
    texts = dict(re.findall(r"(\w+)=(\S+)", one.get("window")))
    sizes = [int(i) for i in texts.get("size", "").split("x") if i]

    def numbers(name: str, default: str) -> list[str]:
        return texts[name].split("x") if name in texts else [default] * len(sizes)

    pads = [[int(i) for i in pad.split("_")] for pad in numbers("pad", "0_0")]
    rows = zip(
        sizes,
        numbers("stride", "1"),
        pads,
        numbers("lhs_dilate", "1"),
        numbers("rhs_dilate", "1"),
        strict=True,
    )
    return [
        WindowDimension(size, int(stride), pad[0], pad[1], int(base), int(dilation))
        for size, stride, pad, base, dilation in rows
    ]


def convolution(one: Instruction, x: Array, w: Array, y: Array) -> tuple[Product, float]:
    """Returns (the convolution y of x with w as a matrix product, its FLOPs).

    The product multiplies the patches of x by w, and its k includes the padding of the window. The
    FLOPs do not: they count only where w meets an element of x.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", one.get("dim_labels"))
    if labels is None:
        return Product(1, 1, 1, 1), 0.0
    at = [
        {label: size for label, size in zip(text, array.dims, strict=True)}
        for text, array in zip(labels.groups(), (x, w, y), strict=True)
    ]
    spatial = [label for label in labels[3] if label.isdigit()]
    dimensions = windows(one) or [WindowDimension()] * len(spatial)
    pairs = [
        d.pairs(at[0][label], at[2][label])
        for d, label in zip(dimensions, sorted(spatial, key=int), strict=True)
    ]
    groups = int(one.get("feature_group_count", "1")) * int(one.get("batch_group_count", "1"))
    rows = at[2]["b"] * math.prod(at[2][label] for label in spatial)
    depth = at[1]["i"] * math.prod(d.size for d in dimensions)
    product = Product(groups, rows, at[1]["o"] // groups, depth)
    return product, 2.0 * at[2]["b"] * at[2]["f"] * at[1]["i"] * math.prod(pairs)


def dot(one: Instruction, operands: Sequence[Array]) -> Product:
    """Returns the product of a dot; a ragged one multiplies every row once."""
    left, right = operands[0], operands[1]
    over, over_right = one.dims("lhs_contracting_dims"), one.dims("rhs_contracting_dims")
    batch = math.prod(left.dims[i] for i in one.dims("lhs_batch_dims"))
    inner = contracted(one, left)
    m = left.elements // max(batch * inner, 1)
    n = one.array.elements // max(batch * m, 1)
    against = bool(left.layout) and left.layout[0] not in over and m > 1
    against += bool(right.layout) and right.layout[0] in over_right and n > 1
    return Product(batch, m, n, inner, int(against))


def gathered(one: Instruction, operands: Sequence[Array]) -> int:
    """Returns the indices that a gather or scatter takes: slices that it reads or writes."""
    if one.opcode not in ("gather", "scatter") or len(operands) < 2:
        return 0
    indices = operands[len(operands) // 2] if one.opcode == "scatter" else operands[1]
    place = int(one.get("index_vector_dim", "0") or 0)
    size = indices.dims[place] if place < len(indices.dims) else 1
    return indices.elements // max(size, 1)
