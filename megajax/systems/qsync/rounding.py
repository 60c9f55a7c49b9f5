"""How much the precision of a product y = x w adds to its variance: QSync's indicator.

QSync (arXiv 2407.02327) models a rounding as random and without bias. A number a fraction f above
its lower neighbour, at a distance s of both neighbours, then has the variance f (1 - f) s^2, and
none if it is one of the numbers of its type. Types and scales are those of quant/products.py with
one scale an operand:

    int8       scale amax / 127, s = scale
    fp8        scale amax / 448 of e4m3 and amax / 57344 of e5m2
    float16    scale a power of two, so that the largest code is in [2^14, 2^15)
    bfloat16   scale 1

Of the floating types s = scale 2^(floor(log2 |code|) - bits), where bits are the explicit ones of
the mantissa: 3 of e4m3, 2 of e5m2, 10, 7. Below the smallest normal code, which is 2^-6 of e4m3,
2^-14 of e5m2 and float16, and 2^-126 of bfloat16, s is as at that code; so a float16 is subnormal
where it is less than 2^-28 of the largest one's power of two. What would round to more than the
largest bfloat16 counts as if its exponents went on. As in products.py, no scale is below 2^-126;
smaller ones of int8 and fp8 are 1. Codes are exact here, not float32.

Errors of operands are independent, so that with V(a) the variances of the elements of a

    variance of sum_k a_k b_k = sum_k V(a_k) b_k^2 + a_k^2 V(b_k) + V(a_k) V(b_k)

forward is its sum over the elements of y = x w. backward is its sum over those of dx = gy w^T and
of dw = x^T gy, of the rounded operands that the forward pass saved and of the gradient's codes
(bfloat16 of int8, e5m2 of fp8). What rounding elsewhere adds to x and gy is not counted.

The published indicator, as its authors' program computes it, takes 1/6 in the place of f (1 - f),
norms where squares belong, D (numbers of elements of x, w, y) where numbers of rows or columns do,
and e where 2^(2e) does; e(a) is |exponent| of a's root mean norm sqrt(||a|| / D), 5 at most, with a
mantissa in [1/2, 1), and e of dw is that of its largest magnitude:

    int8    forward  (||w|| S_x^2 D_x + ||x|| S_w^2 D_w) / 6
            backward (||dw|| S_x^2 D_x + ||x|| 2^(2 e_x - 2 k) D_y) / 6
    others  forward  (||w|| D_x e_x + ||x|| D_w e_w) 2^(-2 k) / 6
            backward (||dw|| D_x e_x 2^(-2 k) + ||x|| D_y e_dw 2^(-2 k)) / 6

Their k is 9. Here k is the explicit bits of the type that is rounded to; in the second terms of
backward, of the gradient's type. Their other type is float16 alone, and bfloat16 and fp8 are
computed like it. They read norms of rounded x and w and exponents of float16, which is not done
here. They weigh forward and backward by a layer's depth, which is left to the caller.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
from jax.typing import ArrayLike

from megajax.core.errors import UserError, did_you_mean
from megajax.quant.products import CODES, Codes
from pallas_kernels.quantize import reference

FORMS = ("paper", "exact")
# Of the types of codes: explicit bits of the mantissa, exponent of the smallest normal number.
FLOATS: dict[Codes, tuple[int, int]] = {
    "bfloat16": (7, -126),
    "float16": (10, -14),
    "e4m3": reference.FLOATS["e4m3"],
    "e5m2": reference.FLOATS["e5m2"],
}


class Variance(NamedTuple):
    """What rounding adds to the variance of a product's elements, summed, and of its gradients'."""

    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A product's variances: of each form, {precision: Variance}, summed over the batches."""

    exact: Mapping[str, Variance]
    paper: Mapping[str, Variance]

    def __add__(self, other: Self) -> Self:
        """Returns the sums over the batches of both, each of which has its own scales."""
        forms = ((self.exact, other.exact), (self.paper, other.paper))
        return type(self)(
            *(
                {name: Variance(*map(sum, zip(one[name], two[name], strict=True))) for name in one}
                for one, two in forms
            )
        )


def statistics(x: ArrayLike, w: ArrayLike, gy: ArrayLike | None = None) -> Statistics:
    """Returns the variances of y = x w in every precision; no array stays in them.

    Args: x: (..., K). w: (K, N). gy: (..., N), the gradient of y; None: backward is 0.
    Raises: UserError for other shapes, and for inf and NaN.
    """
    x_MK, w_KN, gy_MN = _matrices(x, w, gy)
    exact: dict[str, Variance] = {}
    for precision, (bits, gradient_bits) in CODES.items():
        rounded_x, rounded_w = _rounded(x_MK, bits), _rounded(w_KN, bits)
        rounded_gy = _rounded(gy_MN, gradient_bits)
        dx = _added(rounded_gy, rounded_w, 0, 0)
        dw = _added(rounded_x, rounded_gy, 1, 1)
        exact[precision] = Variance(_added(rounded_x, rounded_w, 0, 1), dx + dw)
    return Statistics(exact, _published(x_MK, w_KN, gy_MN))


def variance(stats: Statistics, precision: str) -> Variance:
    """Returns what rounding to this precision adds; 0 in float32.

    Raises: UserError for a precision that quant.matmul does not have.
    """
    return stats.exact[_checked("precision", precision, tuple(CODES))]


def indicator(
    stats: Statistics, precision: str, *, form: Literal["paper", "exact"] = "paper"
) -> float:
    """Returns forward + backward: the variances, or the published ones; see the module's text.

    Raises: UserError for an unknown precision or form.
    """
    table = getattr(stats, _checked("form", form, FORMS))
    return sum(table[_checked("precision", precision, tuple(CODES))])


def _checked(name: str, value: str, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise UserError(
            f"{name}={value!r} must be one of {', '.join(map(repr, known))}."
            f"{did_you_mean(str(value), known)}"
        )
    return value


def _matrices(
    x: ArrayLike, w: ArrayLike, gy: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns x_MK, w_KN and gy_MN in float32, as products.py rounds them; a missing gy is 0."""
    shapes = np.shape(x), np.shape(w)
    if len(shapes[0]) < 1 or len(shapes[1]) != 2 or shapes[0][-1] != shapes[1][0]:
        raise UserError(
            f"statistics: x must have the shape (..., K) and w (K, N), got {shapes[0]} and "
            f"{shapes[1]}"
        )
    result = (*shapes[0][:-1], shapes[1][1])
    if gy is not None and np.shape(gy) != result:
        raise UserError(f"statistics: gy must have the shape of y, {result}, got {np.shape(gy)}")
    x_MK, w_KN, gy_MN = (
        np.asarray(a, np.float32).reshape(-1, np.shape(a)[-1])
        for a in (x, w, np.zeros(result) if gy is None else gy)
    )
    for name, matrix in (("x", x_MK), ("w", w_KN), ("gy", gy_MN)):
        if not np.isfinite(matrix).all():
            raise UserError(f"statistics: {name} holds inf or NaN; all its numbers must be finite")
    return x_MK, w_KN, gy_MN


def _rounded(a_RC: np.ndarray, bits: Codes) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the variances of the elements, their squares) in float64."""
    a_RC = a_RC.astype(np.float64)
    square_RC = np.square(a_RC)
    amax = float(np.max(np.abs(a_RC), initial=0))
    if bits == "float32" or amax == 0:
        return np.zeros(a_RC.shape), square_RC
    if bits in ("float16", "bfloat16"):
        scale = max(2.0 ** (math.frexp(amax)[1] - 15), reference.TINY) if bits == "float16" else 1.0
        code_RC = a_RC / scale
    else:
        largest = reference.largest(bits)
        scale = amax / largest
        if scale < reference.TINY:
            scale, amax = 1.0, largest
        code_RC = a_RC * largest / amax  # exact for what is a code
    step_RC = np.ones(a_RC.shape)
    if bits != 8:
        mantissa, least = FLOATS[bits]
        step_RC = np.ldexp(step_RC, np.maximum(np.frexp(code_RC)[1] - 1, least) - mantissa)
    fraction_RC = code_RC / step_RC
    fraction_RC -= np.floor(fraction_RC)
    return fraction_RC * (1 - fraction_RC) * np.square(step_RC * scale), square_RC


def _added(
    a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray], i: int, j: int
) -> float:
    """Returns the variance of products' sums, summed over a's dimension i and b's j.

    The dimensions that stay are those that the products sum over.
    """
    variance_a, square_a = (array.sum(i) for array in a)
    variance_b, square_b = (array.sum(j) for array in b)
    return float(variance_a @ square_b + square_a @ variance_b + variance_a @ variance_b)


def _published(x_MK: np.ndarray, w_KN: np.ndarray, gy_MN: np.ndarray) -> dict[str, Variance]:
    """Returns {precision: Variance} in the published form; backward is 0 where gy is."""
    x, w, dw = (
        np.asarray(a, np.float64) for a in (x_MK, w_KN, np.matmul(x_MK.T, gy_MN, dtype=np.float64))
    )
    norm_x, norm_w, norm_dw = (float(np.linalg.norm(a)) for a in (x, w, dw))
    scale_x, scale_w = (float(np.max(np.abs(a), initial=0)) / 127 for a in (x, w))
    sizes = (norm_x / max(x.size, 1)) ** 0.5, (norm_w / max(w.size, 1)) ** 0.5
    largest_dw = np.max(np.abs(dw), initial=0)
    e_x, e_w, e_dw = (min(abs(int(np.frexp(a)[1])), 5) for a in (*sizes, largest_dw))
    table = {"float32": Variance(0.0, 0.0)}
    for precision, (bits, gradient_bits) in CODES.items():
        if precision == "float32":
            continue
        narrow = 2.0 ** (-2 * FLOATS[gradient_bits][0])
        if precision == "int8":
            forward = norm_w * scale_x**2 * x.size + norm_x * scale_w**2 * w.size
            first = norm_dw * scale_x**2 * x.size
            second = norm_x * 2 ** (2 * e_x) * narrow * gy_MN.size
        else:
            wide = 2.0 ** (-2 * FLOATS[bits][0])
            forward = wide * (norm_w * x.size * e_x + norm_x * w.size * e_w)
            first = norm_dw * x.size * e_x * wide
            second = norm_x * gy_MN.size * e_dw * narrow
        backward = first + second if gy_MN.any() else 0.0
        table[precision] = Variance(forward / 6, backward / 6)
    return table
