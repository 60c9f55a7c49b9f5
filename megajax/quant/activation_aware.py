"""AWQ (arXiv 2306.00978): scales the weights of large inputs up before rounding them.

In a product x w each input is divided, and the row of w multiplied, by a scale:

    x w = (x / s) (s w) ~ (x / s) Q(s w),      s_k = (mean |x_k|)^a, normalised

a is searched in [0, 1) for the least error over the calibration tokens (section 3.2). Then the
weights of each group and output are clipped to the share of their largest magnitude that gives the
least error of the group (the authors' `auto_clip`). The division of the inputs is free if they come
from an operation with a factor for each channel, such as the gain of a norm.

Legend: K inputs, N outputs, G groups of C rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.quant.compensated import row_format
from megajax.quant.formats import Format
from megajax.quant.qtensor import QTensor, dequantize, quantize
from megajax.quant.statistics import Statistics, statistics_of
from pallas_kernels.quantize import reference

Array = jax.Array
GRID = 20  # (the authors' code) exponents that are tried
_CLIPS = 10  # (the authors' code, max_shrink 0.5 of 20 steps) shares of the largest magnitude


def awq(
    w_KN: Array, x_TK: Array | Statistics, fmt: Format, *, grid: int = GRID, clip: bool = True
) -> tuple[QTensor, Array]:
    """Returns (q, the quantized weight with scaled rows; scale_K, float32, of those rows).

    x w is then about (x / scale_K) dequantize(q). One exponent that is tried is 0, with scales of
    1, so the error over the calibration tokens never exceeds that of rounding to nearest.

    Args: w_KN: (inputs, outputs), of a floating type. x_TK: inputs of the product on calibration
        text, or their Statistics. fmt: as in `gptq`. grid: number of exponents that are tried.
        clip: whether weights may be clipped.
    Raises: UserError as `gptq`.
    """
    fmt = row_format("awq", w_KN, fmt)
    if not isinstance(grid, int | np.integer) or grid < 1:
        raise UserError(f"grid={grid!r} must be a whole number, at least 1; the authors': {GRID}")
    statistics = statistics_of(x_TK, w_KN.shape[0], "awq")
    q, scale_K = _search(jnp.asarray(w_KN, jnp.float32), statistics, fmt=fmt, grid=grid, clip=clip)
    return QTensor(
        q.values, q.scales, q.zeros, fmt, q.shape, jax.dtypes.canonicalize_dtype(w_KN.dtype)
    ), scale_K


def channel_scales(statistics: Statistics, exponent: Array) -> Array:
    """Returns the scale of each input, (K,): with the exponent 0 all are 1."""
    mean_K = jnp.maximum(statistics.absolute_K / jnp.maximum(statistics.count, 1), 1e-4)
    scale_K = mean_K**exponent
    return scale_K / jnp.sqrt(scale_K.max() * scale_K.min())


@functools.partial(jax.jit, static_argnames=("fmt", "grid", "clip"))
def _search(
    w_KN: Array, statistics: Statistics, *, fmt: Format, grid: int, clip: bool
) -> tuple[QTensor, Array]:
    def tried(exponent: Array) -> Array:
        scale_K1 = channel_scales(statistics, exponent)[:, None]
        return statistics.error(dequantize(quantize(w_KN * scale_K1, fmt)) / scale_K1 - w_KN)

    exponents = jnp.arange(grid) / grid
    errors = jax.lax.map(tried, exponents)
    # NaN: scaled weights whose groups' scales exceed scale_dtype. argmin would take the first.
    best = jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors))
    scale_K = channel_scales(statistics, exponents[best])
    scaled_KN = w_KN * scale_K[:, None]
    plain = quantize(scaled_KN, fmt)
    if not clip:
        return plain, scale_K
    h_KK = statistics.h_KK / (scale_K[:, None] * scale_K[None])
    clipped = quantize(clipped_weight(scaled_KN, h_KK, fmt), fmt)
    inner = Statistics(statistics.count, h_KK, statistics.total_K, statistics.absolute_K)
    before, after = (inner.error(dequantize(q) - scaled_KN) for q in (plain, clipped))
    return jax.tree.map(lambda a, b: jnp.where(after < before, a, b), clipped, plain), scale_K


def clipped_weight(w_KN: Array, h_KK: Array, fmt: Format) -> Array:
    """Returns w with the magnitudes of each group and output cut to the best share of the largest.

    Best: the least dW_g^T h_gg dW_g, with the group's own block of h alone.
    """
    K, N = w_KN.shape
    C = fmt.group_of(K)
    G = reference.groups_of(K, C)
    more = G * C - K
    w_GCN = jnp.pad(w_KN, ((0, more), (0, 0))).reshape(G, C, N)
    h_KK = jnp.pad(h_KK, (0, more)).reshape(G, C, G, C)
    h_GCC = h_KK[jnp.arange(G), :, jnp.arange(G)]
    most_G1N = jnp.abs(w_GCN).max(1, keepdims=True)

    def tried(share: Array) -> tuple[Array, Array]:
        cut_GCN = jnp.clip(w_GCN, -share * most_G1N, share * most_G1N)
        cut_KN = cut_GCN.reshape(G * C, N)[:K]
        change_KN = dequantize(quantize(cut_KN, fmt)) - w_KN
        change_GCN = jnp.pad(change_KN, ((0, more), (0, 0))).reshape(G, C, N)
        moved_GCN = jnp.einsum("gcd,gdn->gcn", h_GCC, change_GCN, precision="highest")
        return (moved_GCN * change_GCN).sum(1), share

    shares = 1 - jnp.arange(_CLIPS) / (2 * _CLIPS)
    errors_SGN, shares_S = jax.lax.map(tried, shares)
    best_G1N = shares_S[jnp.argmin(errors_SGN, 0)][:, None] * most_G1N
    return jnp.clip(w_GCN, -best_G1N, best_G1N).reshape(G * C, N)[:K]
