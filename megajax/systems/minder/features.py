"""Turns seconds of metrics into two channels a metric: the level and the residual of each window.

Each window of 8 s goes through the LSTM-VAE of its metric (Minder section 4.2). The level is the
mean of the reconstruction, which has no noise. The residual is the logarithm of the distance
between window and reconstruction; it changes if a series freezes, oscillates or leaves its range.

Legend: C metrics, N machines, T seconds of a tick, J windows of a tick, F channels (2 C: levels,
then residuals).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.tree import Tree
from megajax.models import lstm_vae
from megajax.models.lstm_vae import LstmVaeConfig
from megajax.systems.minder.settings import WINDOW

Array = jax.Array
SEEN = WINDOW // 2  # seconds of a window that must have a sample
MACHINES = 192  # (chosen) of a call
FLOOR = 1e-3  # (chosen) of a residual, as a share of three healthy ranges


def scaled(values: Any, low: Any, high: Any, bend: Any) -> Any:
    """Returns values scaled so that the healthy range is the middle third of [0, 1], then clipped.

    NaN stays NaN. low, high: ends of the healthy range, after `bent`. bend: as in `bent`. All
    arguments are NumPy or JAX arrays of shapes that broadcast.
    """
    library = jnp if isinstance(values, jax.Array) else np
    values = bent(values, bend)
    return library.clip((values - low) / (3.0 * (high - low)) + 1.0 / 3.0, 0.0, 1.0)


def bent(values: Any, bend: Any) -> Any:
    """Returns asinh(values / bend), which is logarithmic far above `bend`; values if bend is 0.

    It is for rates of rare events, whose healthy values differ by factors.
    """
    library = jnp if isinstance(values, jax.Array) else np
    divisor = library.where(bend > 0, bend, 1.0)
    return library.where(bend > 0, library.arcsinh(values / divisor), values)


@functools.partial(jax.jit, static_argnums=0)
def _of_machines(cfg: LstmVaeConfig, vae: Tree, range_3C: Array, values_CNT: Array) -> Array:
    """Returns y_FNJ of MACHINES machines; values are as measured, NaN where a sample is missing."""
    C, N, T = values_CNT.shape
    values_BWC = values_CNT.reshape(C, -1, WINDOW).transpose(1, 2, 0)
    x_BWC = scaled(values_BWC, *range_3C[:, None, None])
    back_BWC = lstm_vae.denoise(cfg, vae, x_BWC)
    measured_BWC = x_BWC >= 0
    seen_BC = measured_BWC.astype(jnp.float32).sum(1)
    error_BWC = jnp.where(measured_BWC, x_BWC - back_BWC, 0.0)
    mean_square_BC = (error_BWC**2).sum(1) / jnp.maximum(seen_BC, 1.0)
    residual_BC = jnp.log(FLOOR + jnp.sqrt(mean_square_BC))
    y_BF = jnp.concatenate([back_BWC.mean(1), residual_BC], 1)
    y_BF = jnp.where(jnp.concatenate([seen_BC, seen_BC], 1) >= SEEN, y_BF, jnp.nan)
    return y_BF.T.reshape(-1, N, T // WINDOW)


def of_tick(
    cfg: LstmVaeConfig, vae: Tree, range_3C: np.ndarray, values_CNT: np.ndarray
) -> np.ndarray:
    """Returns y_FNJ, float32: level and residual of each window of one tick.

    A window has NaN if fewer than half of its seconds have a sample. Jobs of all sizes run the same
    program, MACHINES at a time.
    Args: range_3C: low, high and bend of each metric (`scaled`). values_CNT: seconds as measured,
      NaN where a sample is missing.
    """
    N = values_CNT.shape[1]
    range_3C = np.asarray(range_3C, np.float32)
    found = []
    for start in range(0, N, MACHINES):
        part = values_CNT[:, start : start + MACHINES]
        pad = ((0, 0), (0, MACHINES - part.shape[1]), (0, 0))
        part = np.pad(part, pad, constant_values=np.nan)
        found.append(_of_machines(cfg, vae, range_3C, part))
    y_FNJ = np.concatenate([np.asarray(part) for part in found], 1)  # all run before the first
    return y_FNJ[:, :N]
