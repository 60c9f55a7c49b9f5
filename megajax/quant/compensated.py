"""GPTQ (arXiv 2210.17323): rounds a matrix row by row; later rows compensate for earlier errors.

For a product y = x w with w (K, N) and h = sum of x x^T over calibration tokens, the rows of w are
rounded in turn. The rows that are not rounded yet compensate for the error of row k in y by

    w_j -= u_kj / u_kk (w_k - round(w_k))      for j > k,    (h + damp mean(diag h) 1)^-1 = u^T u

with u upper triangular (section 3.3, Cholesky). The scale and the zero point of a group are
computed when its first row is reached, from its rows as they are then. With order='activations'
(the authors' `act_order`) rows with the largest inputs are rounded first. The groups are still of
neighbouring rows and keep the scales of the unchanged weight, so no permutation has to be stored.

Legend: K inputs (rows of w), N outputs, G groups of rows, C rows of a group, B rows of a block.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.quant import qtensor
from megajax.quant.formats import Format
from megajax.quant.qtensor import QTensor
from megajax.quant.statistics import Statistics, statistics_of
from pallas_kernels.quantize import reference

Array = jax.Array
Order = Literal["given", "activations"]
ORDERS = ("given", "activations")
DAMP = 0.01  # (GPTQ, section 3.3: 1 % of the mean of the diagonal)
SHARES = tuple(1 - k / 20 for k in range(10))  # (AWQ's code) of the largest magnitude
_BLOCK = 128  # (GPTQ, section 3.3: lazy batches) rows whose updates of the others are one product
_MOST_DAMP = 1.0


def gptq(
    w_KN: Array,
    x_TK: Array | Statistics,
    fmt: Format,
    *,
    damp: float = DAMP,
    order: Order = "given",
    clip: bool = False,
) -> QTensor:
    """Returns w as a QTensor, quantized so that the product x w changes little.

    Args: w_KN: (inputs, outputs), of a floating type; computed in float32. x_TK: inputs of the
        product on calibration text, or their Statistics. fmt: integer bits, rounding to nearest,
        groups along the inputs (axis=0; None is read as 0). damp: added to the diagonal of h, in
        units of its mean. order: see the module's text. clip: whether a group's scale may be
        smaller than its largest weight requires, if that lowers the sum of its squared errors, each
        weighted by the power of its input.
    Raises: UserError for other formats and shapes, numbers that are not finite, and an h that stays
        singular with a damp of 1.
    """
    fmt = row_format("gptq", w_KN, fmt)
    if order not in ORDERS:
        raise UserError(f"order={order!r} must be among {ORDERS}.{did_you_mean(order, ORDERS)}")
    if not isinstance(damp, int | float | np.number) or not 0 < damp <= _MOST_DAMP:
        raise UserError(
            f"damp={damp!r} must be above 0 and at most {_MOST_DAMP:g}; the paper's: {DAMP}"
        )
    K = w_KN.shape[0]
    h_KK = statistics_of(x_TK, K, "gptq").h_KK
    place_K = np.arange(K)
    if order == "activations":
        place_K = np.argsort(-np.asarray(jnp.diagonal(h_KK)), kind="stable")
    w = jnp.asarray(w_KN, jnp.float32)
    while True:
        options = {"fmt": fmt, "is_static": order != "given", "clip": clip}
        solution = _solve(w, h_KK, jnp.asarray(place_K), damp, **options)
        if jnp.isfinite(solution[-1]).all():
            break
        damp *= 10
        if damp > _MOST_DAMP:
            raise UserError("gptq: the inputs' products are singular, even with damp=1")
    code_KN, scale_GN, zero_GN, _ = solution
    dtype = jax.dtypes.canonicalize_dtype(w_KN.dtype)  # of NumPy's float64 float32, as JAX has it
    return qtensor.from_codes(code_KN, scale_GN, zero_GN, fmt, dtype)


def row_format(op: str, w_KN: Array, fmt: Format) -> Format:
    """Returns the format with groups along the rows of a matrix.

    Raises: UserError where the weight is no finite matrix of floats, or the format not for it.
    """
    if not isinstance(fmt, Format):
        raise UserError(f"{op}: fmt must be a megajax.quant.Format, got {fmt!r}")
    if getattr(w_KN, "ndim", 0) != 2 or not jnp.issubdtype(w_KN.dtype, jnp.floating):
        raise UserError(f"{op}: w must be a matrix of floats, (inputs, outputs)")
    if not all(w_KN.shape):
        raise UserError(
            f"{op}: w has the shape {w_KN.shape}; it must have one input and one output at least"
        )
    if fmt.axis not in (None, 0, -2):
        raise UserError(
            f"{op}: axis={fmt.axis} of the format must be 0: groups lie along the inputs"
        )
    if isinstance(fmt.bits, str) or fmt.stochastic:
        raise UserError(f"{op}: bits must be an integer and rounding 'nearest', got {fmt}")
    if not jnp.isfinite(w_KN).all():
        raise UserError(f"{op}: the weight is not finite everywhere")
    return Format(fmt.bits, fmt.group, 0, fmt.symmetric, fmt.rounding, fmt.scale_dtype)


def inverse_factor(h_KK: Array, damp: float) -> Array:
    """Returns u, upper triangular, with (h + damp mean(diag h) 1)^-1 = u^T u; NaN if singular.

    Of inputs that were always 0 the diagonal is set to the mean, so they round to nearest. With
    both dimensions reversed a Cholesky factor is upper: h = r r^T, u = r^-1.
    """
    diagonal_K = jnp.diagonal(h_KK)
    mean = jnp.maximum(diagonal_K.mean(), jnp.finfo(jnp.float32).tiny)
    diagonal_K = jnp.where(diagonal_K > 0, diagonal_K, mean) + damp * mean
    damped_KK = jnp.where(jnp.eye(len(h_KK), dtype=bool), diagonal_K, h_KK)
    r_KK = jnp.linalg.cholesky(damped_KK[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(r_KK, jnp.eye(len(h_KK)), lower=False)


@functools.partial(jax.jit, static_argnames=("fmt", "is_static", "clip"))
def _solve(
    w_KN: Array, h_KK: Array, place_K: Array, damp: Any, *, fmt: Format, is_static: bool, clip: bool
) -> tuple[Array, Array, Array | None, Array]:
    """Returns codes (K, N), scales and zero points (G, N), and the diagonal of u.

    place_K: the row that is rounded at each turn. is_static: groups keep their first scales.
    """
    K, N = w_KN.shape
    C = fmt.group_of(K)
    B = C if C <= 2 * _BLOCK else next(b for b in (_BLOCK, C) if C % b == 0 or b == C)
    if fmt.group is None:
        B = min(_BLOCK, K)
    G, turns = reference.groups_of(K, C), -(-K // B)
    u_KK = inverse_factor(h_KK[place_K][:, place_K], damp)
    # Rows behind the last one are zeros that nothing depends on.
    more = turns * B - K
    u_KK = jnp.pad(u_KK, (0, more)) + jnp.diag(jnp.where(jnp.arange(K + more) < K, 0.0, 1.0))
    w_KN = jnp.pad(w_KN, ((0, more), (0, 0)))
    first = jnp.pad(w_KN[:K], ((0, G * C - K), (0, 0))).reshape(G, C, N)
    w_KN = w_KN.at[:K].set(w_KN[place_K])
    group_K = jnp.pad(place_K // C, (0, more), constant_values=G - 1)
    power_GC = jnp.pad(jnp.diagonal(h_KK), (0, G * C - K)).reshape(G, C) if clip else None
    scales = functools.partial(_scales, K=K, fmt=fmt, power_GC=power_GC)
    scale_GN, zero_GN = jax.vmap(scales)(first, jnp.arange(G))

    def block(carry: tuple, number: Array) -> tuple:
        w_KN, scale_GN, zero_GN, code_KN = carry
        start = number * B
        if not is_static:
            first_row = (start // C) * C
            rows = jnp.pad(w_KN, ((0, C), (0, 0)))
            rows = jax.lax.dynamic_slice_in_dim(rows, first_row, C)
            newest = scales(rows, start // C)
            at = jnp.where(start % C == 0, start // C, G)  # G: dropped
            scale_GN = scale_GN.at[at].set(newest[0], mode="drop")
            zero_GN = zero_GN.at[at].set(newest[1], mode="drop")
        part_BN = jax.lax.dynamic_slice_in_dim(w_KN, start, B)
        u_BK = jax.lax.dynamic_slice_in_dim(u_KK, start, B)
        u_BB = jax.lax.dynamic_slice_in_dim(u_BK, start, B, 1)
        groups_B = jax.lax.dynamic_slice_in_dim(group_K, start, B)

        def row(part_BN: Array, b: Array) -> tuple:
            scale_N, zero_N = scale_GN[groups_B[b]], zero_GN[groups_B[b]]
            code_N, rounded_N = _round(part_BN[b], scale_N, zero_N, fmt)
            error_N = (part_BN[b] - rounded_N) / u_BB[b, b]
            return part_BN - u_BB[b][:, None] * error_N[None], (code_N, error_N)

        _, (code_BN, error_BN) = jax.lax.scan(row, part_BN, jnp.arange(B))
        w_KN = w_KN - jnp.matmul(u_BK.T, error_BN, precision="highest")
        code_KN = jax.lax.dynamic_update_slice_in_dim(code_KN, code_BN, start, 0)
        return (w_KN, scale_GN, zero_GN, code_KN), None

    codes = jnp.zeros(w_KN.shape, jnp.int8 if fmt.symmetric else jnp.uint8)
    carry = (w_KN, scale_GN, zero_GN, codes)
    (_, scale_GN, zero_GN, code_KN), _ = jax.lax.scan(block, carry, jnp.arange(turns))
    code_KN = jnp.zeros((K, N), codes.dtype).at[place_K].set(code_KN[:K])
    return code_KN, scale_GN, None if fmt.symmetric else zero_GN, jnp.diagonal(u_KK)


def _scales(
    rows_CN: Array, g: Array, K: int, fmt: Format, power_GC: Array | None
) -> tuple[Array, Array]:
    """Returns scales and zero points (N,) of group g, whose rows beyond K do not count.

    power_GC: of the inputs; the best of SHARES of the rows' magnitudes counts. None: all of them.
    """
    if power_GC is None:
        return _full_scales(rows_CN, g, K, fmt)

    def tried(share: Array) -> tuple[Array, Array, Array]:
        scale_N, zero_N = _full_scales(rows_CN * share, g, K, fmt)
        _, rounded_CN = jax.vmap(lambda w_N: _round(w_N, scale_N, zero_N, fmt))(rows_CN)
        return (power_GC[g][:, None] * (rows_CN - rounded_CN) ** 2).sum(0), scale_N, zero_N

    error_SN, scale_SN, zero_SN = jax.vmap(tried)(jnp.asarray(SHARES, jnp.float32))
    best_1N = jnp.argmin(error_SN, 0)[None]
    scale_1N, zero_1N = (jnp.take_along_axis(x, best_1N, 0) for x in (scale_SN, zero_SN))
    return scale_1N[0], zero_1N[0]


def _full_scales(rows_CN: Array, g: Array, K: int, fmt: Format) -> tuple[Array, Array]:
    """Returns scales and zero points (N,) that reach the largest row."""
    x_N1C = rows_CN.T[:, None]
    if fmt.symmetric:
        scale_N = qtensor.symmetric_scales(x_N1C, fmt)[:, 0]
        return scale_N, jnp.zeros_like(scale_N)
    scale_N1, zero_N1 = qtensor.zero_points(x_N1C, K - g * len(rows_CN), fmt)
    return scale_N1[:, 0], zero_N1[:, 0]


def _round(w_N: Array, scale_N: Array, zero_N: Array, fmt: Format) -> tuple[Array, Array]:
    """Returns the codes of a row, and what they stand for."""
    if fmt.symmetric:
        code_N1 = reference.codes(w_N[:, None], scale_N, fmt.bits)
        return code_N1[:, 0], code_N1[:, 0].astype(jnp.float32) * scale_N
    code_N1 = qtensor.unsigned_codes(w_N[:, None], scale_N, zero_N, fmt, None)
    return code_N1[:, 0], zero_N + code_N1[:, 0].astype(jnp.float32) * scale_N
