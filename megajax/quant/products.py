"""Products whose operands have few bits, forward and backward: QSync (arXiv 2407.02327).

An operand is quantized where it is multiplied, with scales of its own largest magnitudes (no
history of earlier steps), and the sum is taken in float32 or int32. For y = x w, whose gradient is
g, with q(a) the codes of an operand and s its scale:

    y = s_x s_w q(x) q(w),      dx = s_g s_w q(g) q(w)^T,      dw = s_x s_g q(x)^T q(g)

    precision    q(x), q(w)          q(g)         scales
    float32      as they are         as it is     none
    bfloat16     bfloat16            bfloat16     none: it has the exponents of float32
    float16      float16             float16      powers of two: the largest code is in [2^14, 2^15)
    fp8          e4m3, to 448        e5m2         amax / Q; Q of e5m2: 57344
    int8         int8, -127 to 127   bfloat16     amax / Q; none of g

q(x), q(w) and their scales are all that is saved for the backward pass, which treats a rounding as
the identity. With a scale for each row of x and each column of w, dx sums over what s_w differs in,
and dw over what s_x differs in: q(g s_w) with a scale a row, and q(g s_x) with a scale a column,
stand in the place of s_w q(g) and s_x q(g). The arithmetic of codes is that of
pallas_kernels/quantize/reference.py: an operand that holds inf or NaN has a scale of NaN, so that
no product hides it.

Legend: M rows of x, K inputs, N outputs, x any leading dimensions.
Not here: scales of groups of inputs, which do not factor out of a sum (qtensor.py); collectives: a
scale is that of a local array, so call this on local arrays (inside a shard_map, or on one device).
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.errors import UserError, did_you_mean
from megajax.quant.qtensor import floating
from pallas_kernels.quantize import counter, reference

Array = jax.Array
Precision = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
Scaling = Literal["tensor", "rows"]
SCALINGS: tuple[Scaling, ...] = ("tensor", "rows")
# Types of codes: of the operands, of the gradient.
Codes = Literal["float32", "bfloat16", "float16", "e4m3", "e5m2", 8]
CODES: dict[Precision, tuple[Codes, Codes]] = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "fp8": ("e4m3", "e5m2"),
    "int8": (8, "bfloat16"),
}
MOST_INPUTS = (2**31 - 1) // 127**2  # of int8: more could exceed an int32 sum
EXPONENT = 0x7F800000  # its bits in a float32


def matmul(
    x_xK: Array,
    w_KN: Array,
    *,
    precision: Precision,
    key: Array | None = None,
    scaling: Scaling = "tensor",
) -> Array:
    """Returns y_xN = x w in x's type, of operands in few bits; differentiable in x and w.

    The gradients have the types of x and w. No loss scale is needed: a gradient's codes have the
    exponents of float32, or a scale by its largest magnitude.

    Args: x_xK: (..., K) of a floating type, w_KN: (K, N); both local. precision: that of operands
        and gradient, see the module's text. key: with 'int8', both operands are rounded at random,
        independently of each other and without bias (jax.random.key; another one for each product,
        step and rank); None: to nearest, ties to even. Other precisions do not use it. scaling:
        'tensor': one scale for each operand; 'rows': one for each row of x and each column of w.
    Raises: UserError for other precisions and scalings, operands that are no such arrays or do not
        fit, and K above 133,144 in int8, whose sums int32 could not hold.
    """
    for name, value, known in (("precision", precision, CODES), ("scaling", scaling, SCALINGS)):
        if not isinstance(value, str) or value not in known:
            raise UserError(
                f"matmul: {name}={value!r} must be one of {', '.join(map(repr, known))}."
                f"{did_you_mean(str(value), known)}"
            )
    x_xK, w_KN = floating("matmul", x_xK), floating("matmul", w_KN, "w")
    if x_xK.ndim < 1 or w_KN.ndim != 2 or x_xK.shape[-1] != w_KN.shape[0]:
        raise UserError(
            "matmul: x must have the shape (..., K) and w (K, N), got "
            f"{x_xK.shape} and {w_KN.shape}"
        )
    K, N = w_KN.shape
    if precision == "int8" and K > MOST_INPUTS:
        raise UserError(
            f"matmul: precision='int8' sums at most {MOST_INPUTS} products in int32, got K={K}; "
            "cut K into parts, or use 'fp8'"
        )
    x_xK, w_KN = varying(x_xK, w_KN)
    rule = (precision, scaling, x_xK.dtype, w_KN.dtype)
    x_MK = x_xK.reshape(math.prod(x_xK.shape[:-1]), K)
    y_MN = _product(rule, x_MK, w_KN, key if precision == "int8" else None)
    return y_MN.reshape(*x_xK.shape[:-1], N)


def varying(x_xK: Array, w_KN: Array) -> tuple[Array, Array]:
    """Returns both operands as different on all devices over which one of them differs.

    As autodiff does for a plain product: the transpose of this cast adds up the gradients of an
    operand that all devices of a shard_map's axis share.
    """
    over = [jax.typeof(a).manual_axis_type.varying for a in (x_xK, w_KN)]
    axes = frozenset.union(*over)
    x_xK, w_KN = (
        lax.pcast(a, tuple(axes - axes_of), to="varying") if axes - axes_of else a
        for a, axes_of in zip((x_xK, w_KN), over, strict=True)
    )
    return x_xK, w_KN


def _forward(rule: tuple, x_MK: Array, w_KN: Array, key: Array | None) -> tuple[Array, tuple]:
    precision, scaling, dtype, _ = rule
    keys = (None, None) if key is None else jax.random.split(key)
    bits, rows = CODES[precision][0], scaling == "rows"
    x = _coded(x_MK, bits, 1 if rows else None, keys[0])
    w = _coded(w_KN, bits, 0 if rows else None, keys[1])
    return _contracted(x, w, 1, 0).astype(dtype), (x, w)


def _backward(rule: tuple, saved: tuple, dy_MN: Array) -> tuple[Array, Array, None]:
    precision, scaling, *dtypes = rule
    bits, (x, w) = CODES[precision][1], saved
    if precision == "int8":  # exact
        x, w = ((code.astype(bits), scale) for code, scale in saved)
    dy_MN = dy_MN.astype(jnp.float32)
    if scaling == "tensor":
        across = down = _coded(dy_MN, bits)
    else:  # a sum cannot be multiplied by scales that its terms differ in
        across, down = _coded(dy_MN * w[1], bits, 1), _coded(dy_MN * x[1], bits, 0)
        x, w = ((code, jnp.ones((1, 1), jnp.float32)) for code, _ in (x, w))
    dx_MK, dw_KN = _contracted(across, w, 1, 1), _contracted(x, down, 0, 0)
    return dx_MK.astype(dtypes[0]), dw_KN.astype(dtypes[1]), None


_product = jax.custom_vjp(
    lambda rule, x_MK, w_KN, key: _forward(rule, x_MK, w_KN, key)[0], nondiff_argnums=(0,)
)
_product.defvjp(_forward, _backward)


def _coded(
    a: Array, bits: Codes, axis: int | None = None, key: Array | None = None
) -> tuple[Array, Array]:
    """Returns (codes, float32 scales) of a matrix.

    bits: the type of the codes. axis: the dimension that shares a scale; None: all. The scales have
    two dimensions, of which those that share a scale are 1.
    """
    if bits == "float32" or bits == "bfloat16":
        return a.astype(bits), jnp.ones((1, 1), jnp.float32)
    a = a.astype(jnp.float32)
    amax = jnp.max(jnp.abs(a), axis, keepdims=True, initial=0)
    if bits == "float16":
        power = lax.bitcast_convert_type(amax, jnp.int32) & EXPONENT
        scale = lax.bitcast_convert_type(power, jnp.float32) * jnp.float32(2.0**-14)
        scale = jnp.where(amax > 0, jnp.maximum(scale, reference.TINY), 1.0)
        scale = jnp.where(amax < jnp.inf, scale, jnp.nan)
        return (a * (1.0 / scale)).astype(jnp.float16), scale
    scale = reference.scales(amax, bits)
    noise = None if key is None else counter.noise(key, a.shape)[..., None]
    # Each number is a group, with the scale of its line.
    return reference.codes(a[..., None], scale, bits, noise)[..., 0], scale


def _contracted(a: tuple[Array, Array], b: tuple[Array, Array], i: int, j: int) -> Array:
    """Returns float32 sums over dimension i of a's codes and j of b's, times both scales."""
    integers = a[0].dtype == jnp.int8
    total = lax.dot_general(
        a[0],
        b[0],
        (((i,), (j,)), ((), ())),
        preferred_element_type=jnp.int32 if integers else jnp.float32,
        # float32 is not rounded to TF32. XLA's default for fp8 on Hopper sums in fewer bits.
        precision=None if integers or a[0].dtype.itemsize == 2 else lax.Precision.HIGHEST,
    )
    # The small scale first: neither the product of both nor of the sum and the large one need be
    # within float32 where the result is.
    small, large = jnp.minimum(a[1], b[1]), jnp.maximum(a[1], b[1])
    return total.astype(jnp.float32) * small * large
