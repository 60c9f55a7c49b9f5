"""How each machine follows the job within a tick: the spread of its metrics, and its lag.

A level says where a machine is, and features.py measures that. A machine whose power swings more
than the others' has the same level, and so has one that does the work of the job a second later.
Both are measured here against the median of all machines, second by second:

- The spread of a metric is the logarithm of the mean distance between the machine's course and the
  median's, after the difference of their levels has been subtracted.
- The lag, in seconds, is the shift of the median's course that explains the machine's best, over
  all metrics: each metric counts with the log likelihood of its correlation. A tick in which the
  job does nothing that could be late has none.

Only more spread and more lag count as a deviation. tracker.py and evidence.py score both as they
score levels, so that a machine is compared with its peers and with its own past.

Legend: C metrics, N machines, T seconds of a tick, K shifts, S seconds that have all K shifts,
F = C + 1 channels: the spread of each metric, then the lag.
"""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from megajax.systems.minder import tracker
from megajax.systems.minder.medians import median
from megajax.systems.minder.settings import TICK, WINDOWS
from megajax.systems.minder.tracker import Prior, Tracks

Array = jax.Array
FLOOR = 0.003  # (chosen) of a distance, as a share of three healthy ranges: 1 % of one
FARTHEST = 4  # (chosen) seconds of lag that are looked for
PART = 0.5  # seconds between two shifts
LEAST = 12.0  # (chosen) log likelihood below which no shift is told from another
NEAR = 0.15  # (chosen) share of it that the farthest shift costs: the nearer of two peaks counts
USUAL, RECENT, FIRST = 50, 5, 10  # ticks: of the usual course, of the present one, to begin with
MOVED = 0.04  # (chosen) of a level or variation of the job's course, whose healthy range is 1/3
SEEN = 0.5  # share of the seconds that must have a sample
LEAST_NOISE = (0.05, 0.2)  # (chosen) standard deviation of a spread, of a lag in s
USUAL_SLOPE = 0.5  # where the job's state did not vary while learning


def names(metrics: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the channels."""
    return (*(f"spread of {m}" for m in metrics), "lag")


def least_noise(metrics: int) -> np.ndarray:
    """Returns the least standard deviation of each channel, (F,)."""
    return np.append(np.full(metrics, LEAST_NOISE[0]), LEAST_NOISE[1])


class State:
    """What the job as a whole does, tick by tick: `is_usual` tells whether spreads can be compared.

    Machines with other roles follow the job in other ways: if its steps change, so do their spreads
    and lags, and no machine is to blame. Ticks in which the job's course differs from that of most
    of the last 20 minutes are no evidence. If the new course stays, offsets are learnt anew.
    """

    def __init__(self) -> None:
        """Knows nothing of a job yet."""
        self._states: collections.deque[np.ndarray] = collections.deque(maxlen=USUAL)
        self._learnt_S: np.ndarray | None = None

    def see(self, state_S: np.ndarray) -> tuple[bool, bool]:
        """Takes a tick's state; returns (the job does what it usually does, that is another course
        than the one in which offsets were learnt)."""
        self._states.append(state_S)
        seen_HS = np.array(self._states)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a metric without a sample
            usual_S, now_S = np.nanmedian(seen_HS, 0), np.nanmean(seen_HS[-RECENT:], 0)
        if self._learnt_S is None:
            self._learnt_S = usual_S
        if len(seen_HS) < FIRST:  # nothing is learnt that could be wrong
            self._learnt_S = usual_S
        if _apart(now_S, usual_S) > MOVED:
            return False, False
        is_new = _apart(usual_S, self._learnt_S) > MOVED
        if is_new:
            self._learnt_S = usual_S
        return True, is_new


def _apart(one_S: np.ndarray, other_S: np.ndarray) -> float:
    return float(np.nanmax(np.abs(one_S - other_S), initial=0.0))


def _shifts() -> tuple[np.ndarray, np.ndarray]:
    """Returns (shifts_K, weights_KST: what makes of a course the course that is so much later)."""
    shifts_K = np.arange(-FARTHEST, FARTHEST + PART / 2, PART)
    at_KS = np.arange(FARTHEST, TICK - FARTHEST) - shifts_K[:, None]
    weights_KST = np.maximum(1 - np.abs(at_KS[..., None] - np.arange(TICK)), 0.0)
    return shifts_K.astype(np.float32), weights_KST.astype(np.float32)


def of_tick(x_CNT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (y_FN, float32: NaN where a spread or a lag cannot be measured; state_S: level and
    variation of the median's course in each metric).

    x_CNT: scaled samples (features.scaled) of the tick, NaN where missing.
    """
    N = x_CNT.shape[1]
    pad = ((0, 0), (0, tracker.rows(N) - N), (0, 0))
    y_FN, state_S = _of_tick(np.pad(x_CNT, pad, constant_values=np.nan))
    return np.asarray(y_FN)[:, :N], np.asarray(state_S)


def prior(noise_F: np.ndarray, offset_F: np.ndarray, slope_F: np.ndarray) -> Prior:
    """Returns the prior of `advance`, with channels that have no sample behind those that do.

    There are as many as a tick of levels and residuals has, so that both run the same program.
    """
    pad = (0, 2 * (len(noise_F) - 1) - len(noise_F))
    return Prior(
        *(jnp.asarray(np.pad(x, pad, constant_values=1.0), jnp.float32)
          for x in (noise_F, offset_F, slope_F))
    )  # fmt: skip


def advance(
    prior: Prior, tracks: Tracks, y_FN: np.ndarray, held_N: np.ndarray, anew_N: np.ndarray
) -> tuple[Tracks, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (the estimates after a tick, score_FN, the same unclipped, apart_FN).

    As tracker.advance, but less spread or lag than usual counts as none. Args: y_FN: of `of_tick`;
    machines of the estimates that it does not have count as without samples.
    """
    (F, N), (channels, rows) = y_FN.shape, tracks.offset_FN.shape
    y_FN = np.pad(y_FN, ((0, channels - F), (0, rows - N)), constant_values=np.nan)
    y_FNJ = np.repeat(y_FN[..., None], WINDOWS, 2)
    tracks, score, far, _, apart = tracker.advance(
        prior, tracks, jnp.asarray(y_FNJ), held_N, anew_N
    )
    score_FN, far_FN, apart_FN = (np.asarray(x)[:F, :N] for x in (score, far, apart))
    return tracks, np.maximum(score_FN, 0.0), np.maximum(far_FN, 0.0), apart_FN


@jax.jit
def _of_tick(x_CNT: Array) -> tuple[Array, Array]:
    median_CT = median(x_CNT.swapaxes(1, 2))
    apart_CNT = x_CNT - median_CT[:, None]
    apart_CNT -= jnp.nanmean(apart_CNT, 2, keepdims=True)
    seen_CN = jnp.isfinite(apart_CNT).mean(2) >= SEEN
    spread_CN = jnp.log(FLOOR + jnp.nanmean(jnp.abs(apart_CNT), 2))
    spread_CN = jnp.where(seen_CN, spread_CN, jnp.nan)
    lag_N = _lag(jnp.nan_to_num(apart_CNT), jnp.nan_to_num(median_CT), seen_CN)
    state_S = jnp.concatenate([jnp.nanmean(median_CT, 1), jnp.nanstd(median_CT, 1)])
    return jnp.concatenate([spread_CN, lag_N[None]]), state_S


def _lag(apart_CNT: Array, median_CT: Array, seen_CN: Array) -> Array:
    """Returns the lag of each machine in seconds, NaN if none can be measured.

    apart_CNT: distance from the median's course, 0 where a sample is missing.
    """
    shifts_K, weights_KST = _shifts()
    x_CNS = (apart_CNT + median_CT[:, None])[..., FARTHEST : TICK - FARTHEST]
    x_CNS -= x_CNS.mean(2, keepdims=True)
    course_CKS = jnp.einsum("kst,ct->cks", weights_KST, median_CT)
    course_CKS -= course_CKS.mean(2, keepdims=True)
    power_CN1, power_C1K = (x_CNS**2).sum(2)[..., None], (course_CKS**2).sum(2)[:, None]
    both_CNK = jnp.einsum("cns,cks->cnk", x_CNS, course_CKS)
    rho_CNK = jnp.maximum(both_CNK, 0.0) / jnp.sqrt(jnp.maximum(power_CN1 * power_C1K, 1e-12))
    each_CNK = -0.5 * x_CNS.shape[2] * jnp.log(1 - jnp.minimum(rho_CNK, 0.995) ** 2)
    likely_NK = jnp.where(seen_CN[..., None], each_CNK, 0.0).sum(0)
    cost_1K = 1 - NEAR * jnp.abs(shifts_K)[None] / FARTHEST
    best_N = jnp.clip(jnp.argmax(likely_NK * cost_1K, 1), 1, len(shifts_K) - 2)
    before_N, now_N, after_N = (
        jnp.take_along_axis(likely_NK, best_N[:, None] + k, 1)[:, 0] for k in (-1, 0, 1)
    )
    bend_N = jnp.minimum(before_N - 2 * now_N + after_N, -1e-9)  # a parabola through the three
    part_N = jnp.clip(0.5 * (before_N - after_N) / bend_N, -0.5, 0.5)
    # What is as likely at every shift shows no lag.
    is_sharp_N = likely_NK.max(1) - likely_NK.mean(1) >= LEAST
    return jnp.where(is_sharp_N, jnp.asarray(shifts_K)[best_N] + PART * part_N, jnp.nan)
