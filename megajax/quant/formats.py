"""The format of a quantized array: bits, groups, zero points, rounding, type of the scales.

A Format is plain data. `quantize` (qtensor.py) makes arrays in a format, a codec (codecs.py) makes
bytes. The arithmetic is defined in pallas_kernels/quantize/reference.py, which kernels share.
Sources: SDP4Bit (arXiv 2410.15526) for symmetric groups, stochastic rounding and the code that is
not used; QSync (arXiv 2407.02327) and LLM-PQ (arXiv 2403.01136) for the widths.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from pallas_kernels.quantize import reference

Bits = reference.Bits
Rounding = Literal["nearest", "stochastic"]
WIDTHS = (*reference.INTEGERS, *reference.FLOATS)
ROUNDINGS = ("nearest", "stochastic")
SCALES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Format:
    """How numbers are quantized; hashable, and static in a QTensor.

    bits: 2, 3, 4 or 8 (integers), 'e4m3' or 'e5m2' (8-bit floating types).
    group: number of neighbours that share a scale, at least 1; None: a whole line.
    axis: dimension along which groups lie. None: the flattened array is one line. So axis=None,
    group=None is one scale for the whole array, and axis=0, group=None one for each column of a
    matrix.
    symmetric: True: codes from -Q to Q. False: codes from 0 to 2^bits - 1, and each group has a
    zero point, its smallest number; for integers only.
    rounding: 'nearest' (ties to even), or 'stochastic', which is unbiased and needs a key.
    scale_dtype: data type of scales and zero points. In bfloat16 and float16 scales are rounded up,
    because the largest number of a group could exceed the largest code otherwise; zero points are
    rounded down.
    Raises: UserError for values that do not exist or do not fit together.
    """

    bits: Bits
    group: int | None = 128
    axis: int | None = None
    symmetric: bool = True
    rounding: Rounding = "nearest"
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, str | int | np.integer) or self.bits not in WIDTHS:
            raise UserError(
                f"bits={self.bits!r} must be one of {_listed(WIDTHS)}."
                f"{did_you_mean(str(self.bits), map(str, WIDTHS))}"
            )
        if not isinstance(self.bits, str):
            object.__setattr__(self, "bits", int(self.bits))
        object.__setattr__(self, "group", _integer("group", self.group, least=1))
        object.__setattr__(self, "axis", _integer("axis", self.axis))
        check_rounding(self.rounding)
        if not isinstance(self.symmetric, bool):
            raise UserError(f"symmetric={self.symmetric!r} must be True or False")
        if not self.symmetric and isinstance(self.bits, str):
            raise UserError(
                f"bits={self.bits!r} has a sign of its own: zero points (symmetric=False) are for "
                f"{_listed(reference.INTEGERS)} bits"
            )
        value = self.scale_dtype
        try:
            scale_dtype = np.dtype(value).name
        except TypeError:
            scale_dtype = ""
        if value is None or scale_dtype not in SCALES:
            raise UserError(
                f"scale_dtype={value!r} must be one of {_listed(SCALES)}."
                f"{did_you_mean(str(value), SCALES)}"
            )
        object.__setattr__(self, "scale_dtype", scale_dtype)

    @property
    def largest(self) -> float:
        """Q: the largest code; 7 of 4 bits, 15 with zero points, 448 of e4m3."""
        if self.symmetric or isinstance(self.bits, str):
            return reference.largest(self.bits)
        return float(2**self.bits - 1)

    @property
    def width(self) -> int:
        """The bits of a code."""
        return reference.width(self.bits)

    @property
    def stochastic(self) -> bool:
        """Whether quantizing needs a random key."""
        return self.rounding == "stochastic"

    @property
    def effective_bits(self) -> float:
        """Bits per element, including scales and zero points, if no group is short.

        With group=None scales are not included, because their number depends on the array.
        """
        if self.group is None:
            return float(self.width)
        each = np.dtype(self.scale_dtype).itemsize * 8
        return self.width + (each if self.symmetric else 2 * each) / self.group

    def group_of(self, line: int) -> int:
        """Returns the group size for a line of this many elements."""
        return self.group or max(line, 1)

    def lines(self, shape: tuple[int, ...]) -> tuple[int, int | None]:
        """Returns (elements of a line, axis counted from 0 or None) for an array of this shape.

        Raises: UserError if the array lacks the axis.
        """
        if self.axis is None:
            return math.prod(shape), None
        if not -len(shape) <= self.axis < len(shape):
            raise UserError(
                f"axis={self.axis} of the format must be a dimension of the array, whose shape is "
                f"{shape}: {-len(shape)} to {len(shape) - 1}, or None for its flat elements"
                if shape
                else f"axis={self.axis} of the format needs an array with dimensions, got a number;"
                " axis=None takes it"
            )
        axis = self.axis % len(shape)
        return shape[axis], axis


def check_rounding(rounding: Any) -> None:
    """Raises: UserError if `rounding` is not 'nearest' or 'stochastic'."""
    if rounding not in ROUNDINGS:
        raise UserError(
            f"rounding={rounding!r} must be one of {_listed(ROUNDINGS)}."
            f"{did_you_mean(str(rounding), ROUNDINGS)}"
        )


def _integer(name: str, value: Any, least: int | None = None) -> int | None:
    if value is None:
        return None
    try:
        integer = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None or least is not None and integer < least:
        rule = "an integer" if least is None else f"an integer of at least {least}"
        raise UserError(f"{name}={value!r} must be {rule}, or None")
    return integer


def _listed(words: tuple) -> str:
    return ", ".join(repr(w) for w in words)
