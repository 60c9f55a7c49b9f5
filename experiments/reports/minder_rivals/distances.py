"""The paper's detector and its variants: sums of distances between machines, window by window.

Minder section 4.3: d_i is the sum over the other machines of the distance between what the
networks make of a window of machine i and of theirs. RAW (section 6): of the windows themselves.
CON: of all metrics' windows one after the other. INT: of what one network makes of all metrics.
MEDIAN is no variant of the paper: how far the mean of a window lies from the median machine.

Legend: C metrics, M streams, N machines, J windows, D numbers of a window.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reports.minder_rivals import integrated
from experiments.reports.minder_rivals.view import View, in_parts

Learnt = dict[str, np.ndarray]
MEASURES = ("euclid", "manhattan", "chebyshev")
WINDOWS = 64  # of a call


def sums(e_JND: np.ndarray, measure: str = "euclid") -> np.ndarray:
    """Returns d_JN: of each machine the sum of its distances to all others."""
    return in_parts(lambda e: _sums(e, measure), e_JND, WINDOWS)


@functools.partial(jax.jit, static_argnums=1)
def _sums(e_JND: jax.Array, measure: str) -> jax.Array:

    def euclid(e_ND: jax.Array) -> jax.Array:
        e_ND = e_ND - e_ND.mean(0, keepdims=True)  # so that the products below lose no digits
        square_N = (e_ND * e_ND).sum(1)
        product = jnp.matmul(e_ND, e_ND.T, precision="highest")
        square_NN = square_N[:, None] + square_N[None] - 2 * product
        square_NN = jnp.where(jnp.eye(len(e_ND), dtype=bool), 0.0, square_NN)
        return jnp.sqrt(jnp.maximum(square_NN, 0.0)).sum(1)

    def other(e_ND: jax.Array) -> jax.Array:
        apart_NND = jnp.abs(e_ND[:, None] - e_ND[None])
        each = apart_NND.sum(2) if measure == "manhattan" else apart_NND.max(2)
        return each.sum(1)

    return jax.lax.map(euclid if measure == "euclid" else other, e_JND)


def of_metrics(view: View, _: Learnt, source: str, measure: str = "euclid") -> np.ndarray:
    """Returns d_MJN, a stream a metric. source: 'x' (RAW) or 'denoised'."""
    name = f"{source} {measure}"
    if name not in view.kept:
        windows = view.x_CNJW if source == "x" else view.denoised_CNJW
        C, N, J, W = windows.shape
        e_XNW = windows.swapaxes(1, 2).reshape(C * J, N, W)
        view.kept[name] = sums(e_XNW, measure).reshape(C, J, N)
    return view.kept[name]


def concatenated(view: View, _: Learnt) -> np.ndarray:
    """Returns d_MJN of one stream: the metrics' denoised windows one after the other (CON)."""
    C, N, J, W = view.denoised_CNJW.shape
    e_JND = view.denoised_CNJW.transpose(2, 1, 0, 3).reshape(J, N, C * W)
    return sums(e_JND)[None]


def of_one_network(view: View, learnt: Learnt) -> np.ndarray:
    """Returns d_MJN of one stream: all metrics through one LSTM-VAE (INT)."""
    C, N, J, W = view.x_CNJW.shape
    x_XWC = view.x_CNJW.transpose(1, 2, 3, 0).reshape(N * J, W, C)
    back = in_parts(lambda x: integrated.denoise(learnt, x), x_XWC)
    e_JND = back.reshape(N, J, W * C).swapaxes(0, 1)
    return sums(e_JND)[None]


def from_median(view: View, _: Learnt) -> np.ndarray:
    """Returns how far the mean of each window lies from the median machine's, (M, J, N)."""
    mean_CJN = view.x_CNJW.mean(3).swapaxes(1, 2)
    mean_CJN = np.where(view.there_JN, mean_CJN, np.nan)
    return np.abs(np.nan_to_num(mean_CJN - np.nanmedian(mean_CJN, 2, keepdims=True)))
