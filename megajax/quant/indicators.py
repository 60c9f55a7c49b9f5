"""Indicators: the expected error of a product whose weight is quantized, before it is.

'exact' and 'hessian' are squared errors of the product, summed over calibration tokens and outputs.
'variance' is in the unit of its paper, and 'random' has none.

    variance   sum over groups and outputs of s^2 Var(x), s = (max - min) / (2^(b-1) - 1)
               LLM-PQ (arXiv 2403.01136), section 4.2: the form of an upper bound, without constants
    exact      sum over rows and outputs of s^2 / 12 sum_t x_tk^2: the expected error if the errors
               of rounding are uniform and independent; s = 0 of a group of zeros (with zero points
               of equal numbers), which is exact
    hessian    sum over outputs of dW^T h dW: the error of rounding to nearest on these tokens
    random     a random number, for comparisons

Legend: K inputs, N outputs, G groups of C rows.
"""

import zlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.quant import qtensor
from megajax.quant.compensated import row_format
from megajax.quant.formats import Format
from megajax.quant.statistics import Statistics, statistics_of
from pallas_kernels.quantize import reference

Array = jax.Array
Indicator = Literal["variance", "exact", "hessian", "random"]
INDICATORS = ("variance", "exact", "hessian", "random")


def sensitivity(
    w_KN: Array,
    x_TK: Array | Statistics,
    fmt: Format | None,
    indicator: Indicator = "exact",
    *,
    name: str = "",
    seed: int = 0,
) -> float:
    """Returns the expected error of the product if this weight is quantized.

    Args: w_KN: (inputs, outputs), of a floating type. x_TK: inputs of the product on calibration
        text, or their Statistics. fmt: as in `gptq`; None: not quantized, which returns 0.
        indicator: see the module's text. name, seed: 'random' is a function of these and the bits.
    Raises: UserError as `gptq`, and for an unknown indicator.
    """
    if indicator not in INDICATORS:
        raise UserError(
            f"indicator={indicator!r} must be among {', '.join(INDICATORS)}."
            f"{did_you_mean(str(indicator), INDICATORS)}"
        )
    if fmt is None:
        return 0.0
    fmt = row_format("sensitivity", w_KN, fmt)
    statistics = statistics_of(x_TK, w_KN.shape[0], "sensitivity")
    if indicator == "random":
        key = zlib.crc32(f"{name} {fmt.bits}".encode())
        return float(np.random.default_rng([seed, key]).uniform())
    w_KN = jnp.asarray(w_KN, jnp.float32)
    if indicator == "hessian":
        return float(statistics.error(qtensor.dequantize(qtensor.quantize(w_KN, fmt)) - w_KN))
    K, N = w_KN.shape
    C = fmt.group_of(K)
    weight_K = jnp.diagonal(statistics.h_KK) / 12
    if indicator == "variance":
        steps = 2.0 ** (fmt.width - 1) - 1
        low_GN, high_GN = _range(w_KN, C)
        scale_GN, weight_K = (high_GN - low_GN) / steps, statistics.variance_K / C
    else:
        scale_GN = _steps(w_KN, C, fmt)
    weight_G = _groups(weight_K[:, None], C, 0.0).sum((1, 2))
    return float(jnp.sum(scale_GN**2 * weight_G[:, None]))


def _steps(w_KN: Array, C: int, fmt: Format) -> Array:
    """Returns the scale of each group, (G, N); 0 of a group that its codes hold exactly.

    Such a group (zeros, or equal numbers if there are zero points) has the scale 1 in a QTensor,
    which is no distance of codes.
    """
    scale_GN = qtensor.quantize(w_KN, fmt).scales.astype(jnp.float32)
    low_GN, high_GN = _range(w_KN, C)
    is_exact_GN = low_GN == high_GN
    if fmt.symmetric:
        is_exact_GN &= low_GN == 0
    return jnp.where(is_exact_GN, 0.0, scale_GN)


def _range(w_KN: Array, C: int) -> tuple[Array, Array]:
    """Returns the smallest and the largest number of each group, (G, N)."""
    return jnp.min(_groups(w_KN, C, jnp.inf), 1), jnp.max(_groups(w_KN, C, -jnp.inf), 1)


def _groups(x_KN: Array, C: int, fill: float) -> Array:
    """Returns x_GCN; `fill` stands for what a short last group lacks."""
    K, N = x_KN.shape
    more = reference.groups_of(K, C) * C - K
    return jnp.pad(x_KN, ((0, more), (0, 0)), constant_values=fill).reshape(-1, C, N)
