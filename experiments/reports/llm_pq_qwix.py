"""qwix's GPTQ and AWQ (contrib) on the same matrices and the same calibration as ours.

qwix takes the transposed weight. Its symmetric codes reach from -8 to 7 in 4 bits, with a step of
amax / 7.5, ours from -7 to 7; its scales are float32, ours float16.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from megajax.quant import Statistics
from megajax.quant.formats import Format

Array = jax.Array
_TYPES: dict[int, Any] = {3: "int3", 4: jnp.int4, 8: jnp.int8}


def roundings() -> dict[str, Any]:
    """Returns {name: rounding}. Raises: UserError where qwix is not installed."""
    if importlib.util.find_spec("qwix") is None:
        raise UserError("the rival qwix is not installed: uv sync --group rivals (--rivals)")
    return {"qwix rtn": to_nearest, "qwix gptq": by_gptq, "qwix awq": by_awq}


def _how(fmt: Format, inputs: int) -> Any:
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]

    return qarray.HowToQuantize(
        qtype=_TYPES[fmt.width], channelwise_axes=[0], tiled_axes={1: fmt.group_of(inputs)}
    )


def to_nearest(w_KN: Array, own: Statistics, fmt: Format) -> Array:
    """Rounds each number by itself."""
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]

    return qarray.dequantize(qarray.quantize(w_KN.T, _how(fmt, len(w_KN)))).T


def by_gptq(w_KN: Array, own: Statistics, fmt: Format) -> Array:
    """Rounds column by column of the transposed weight.

    Raises: NotImplementedError for 3 bits, which its GPTQ does not take.
    """
    if isinstance(_TYPES[fmt.width], str):
        raise NotImplementedError(f"qwix's GPTQ has no {fmt.width} bits")
    return _gptq(w_KN, own.h_KK, fmt)


@functools.partial(jax.jit, static_argnums=2)  # a program of its own for every column, if not
def _gptq(w_KN: Array, h_KK: Array, fmt: Format) -> Array:
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]
    from qwix.contrib import gptq_core  # pyrefly: ignore[missing-import]

    q, _ = gptq_core.quantize_weight(w_KN.T, h_KK, _how(fmt, len(w_KN)))
    return qarray.dequantize(q).T


def by_awq(w_KN: Array, own: Statistics, fmt: Format) -> Array:
    """Rounds what the inputs' magnitudes have scaled."""
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]
    from qwix.contrib import awq_core  # pyrefly: ignore[missing-import]

    magnitude_K = own.absolute_K / own.count
    q, scale_1K = awq_core.quantize_weight(w_KN.T, magnitude_K, _how(fmt, len(w_KN)))
    return (qarray.dequantize(q) / scale_1K).T
