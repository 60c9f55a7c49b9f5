"""From the scores of the last ticks to how unlike its peers a machine is, and whether it lasts.

One number a machine and span of ticks: the scores are averaged over the span, and the average is
judged channel by channel and in all channels together (its Mahalanobis length under what healthy
machines show). Continuity (Minder section 4.3) is asked of every tick: its own share in the
direction of the average must not fall to that of a machine that is like the others again. So a
disturbance that is shorter than the span gives nothing, however large it is.
A machine without a past is judged by other limits than one whose offsets are known (AGES). The
limits hold for one machine of a small job; `demand` raises them for the many of a large one, for
all of a restless one, and for those that have differed ever since they were first seen.

Legend: F channels, N machines, H ticks, G = F + 1 statistics: each channel, then all together.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from megajax.systems.minder.settings import CHANNELS

SHARE = 0.4  # of the average's length that a tick must have in its direction: more than one window
AGES = (0, 3, 8)  # ticks of a machine's past at the start of a span, from which each limit holds
YOUNG = 25  # (chosen) ticks (10 minutes) until a machine's own past is trusted
MISSING = 0.3  # share of a span's ticks that may be without a score
ODD = 3.0  # (chosen on training seeds of the fleet) more spread of residuals than they show
LEAST_SIGMA = 0.3  # of an average: ten ticks of independent noise have 10 ** -0.5
CROWD, PER_DOUBLING = 16, 0.13  # (chosen) machines whose limits these are; more a doubling
RESTLESS = (0.75, 0.38)  # (chosen) quantile of all machines' scores, and what it usually is below
ALWAYS = 1.6  # (chosen) of a limit, for a machine that was never seen like the others
SPREAD = 4.0  # (chosen) robust standard deviations at which averages are cut off for a covariance


@dataclasses.dataclass(frozen=True)
class Span:
    """ticks: its length; needed: those that must point in the direction of the average."""

    ticks: int
    needed: int


def spans(ticks: int) -> tuple[Span, Span]:
    """Returns the spans that are looked at: the continuity, and half as long again for weak faults,
    of which some ticks may fail. Neither takes a disturbance of 5/6 of the continuity."""
    longer = ticks + ticks // 2
    return Span(ticks, ticks), Span(longer, longer - max(1, longer // 8))


@dataclasses.dataclass(frozen=True)
class Limits:
    """By age A and span P: inverse_APFF of the averages' covariance; limit_APG of the statistics,
    in their own units: standard deviations of a channel, and the length of all together."""

    inverse: np.ndarray
    limit: np.ndarray


def age_of(past_N: np.ndarray) -> np.ndarray:
    """Returns which of AGES holds for machines with so many ticks before the span."""
    return np.searchsorted(np.asarray(AGES), past_N, side="right") - 1


def average(scores_FNH: np.ndarray) -> np.ndarray:
    """Returns the mean over ticks, (F, N); 0 where too many have no score."""
    measured = np.isfinite(scores_FNH)
    count_FN = measured.sum(-1)
    total_FN = np.where(measured, scores_FNH, 0.0).sum(-1)
    enough = count_FN >= (1 - MISSING) * scores_FNH.shape[-1]
    return np.where(enough, total_FN / np.maximum(count_FN, 1), 0.0)


def bridged(scores_FNH: np.ndarray, mean_FN: np.ndarray) -> np.ndarray:
    """Returns the scores with the mean in holes between two measured ticks, and 0 in those at
    either end: there nobody knows whether the difference lasts."""
    measured = np.isfinite(scores_FNH)
    inside = np.maximum.accumulate(measured, -1)
    inside &= np.maximum.accumulate(measured[..., ::-1], -1)[..., ::-1]
    return np.where(measured, scores_FNH, np.where(inside, mean_FN[..., None], 0.0))


def statistics(
    scores_FNH: np.ndarray, inverse_NFF: np.ndarray, span: Span
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (average_FN, statistic_GN: 0 where it does not last).

    scores: of the span's ticks. inverse: of the averages' covariance, by machine.
    """
    mean_FN = average(scores_FNH)
    filled_FNH = bridged(scores_FNH, mean_FN)
    sigma_FN = 1.0 / np.sqrt(np.einsum("nff->fn", inverse_NFF))
    toward_FN = np.einsum("nfg,gn->fn", inverse_NFF, mean_FN)
    square_N = np.maximum((toward_FN * mean_FN).sum(0), 0.0)
    share_NH = np.einsum("fn,fnh->nh", toward_FN, filled_FNH)
    lasts_N = (share_NH >= SHARE * square_N[:, None]).sum(-1) >= span.needed
    together_N = np.where(lasts_N, np.sqrt(square_N), 0.0)
    sign_FN = np.sign(mean_FN)[..., None]
    tall = sign_FN * filled_FNH >= SHARE * np.abs(mean_FN)[..., None]
    alone_FN = np.where(tall.sum(-1) >= span.needed, np.abs(mean_FN) / sigma_FN, 0.0)
    return mean_FN, np.concatenate([alone_FN, together_N[None]])


def score(
    scores_FNH: np.ndarray, past_N: np.ndarray, limits: Limits, chosen: Sequence[Span]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (score_GN, 1 at its limit, the larger of all spans; average_FN of the first span).

    scores: of the newest ticks, at least those of the first span. past: ticks of each machine's
    past before the newest one.
    """
    F, N, H = scores_FNH.shape
    best_GN = np.zeros((F + 1, N))
    first_FN = np.zeros((F, N))
    for p, span in enumerate(chosen):
        age_N = age_of(past_N - span.ticks + 1)
        part = scores_FNH[..., H - span.ticks :]
        if H < span.ticks:
            continue
        mean_FN, found_GN = statistics(part, limits.inverse[np.maximum(age_N, 0), p], span)
        found_GN = np.where(age_N >= 0, found_GN / limits.limit[np.maximum(age_N, 0), p].T, 0.0)
        best_GN = np.maximum(best_GN, found_GN)
        first_FN = mean_FN if p == 0 else first_FN
    return best_GN, first_FN


def demand(worst_N: np.ndarray, judged_N: np.ndarray, always_N: np.ndarray) -> np.ndarray:
    """Returns the factor on the limits of each machine.

    worst: highest score of each machine. judged: who counts. always: whose difference has no
    beginning: it may be its role.
    """
    count = max(int(judged_N.sum()), 1)
    factor = 1.0 + PER_DOUBLING * np.log2(count / CROWD)
    if count >= CROWD:
        quantile, usual = RESTLESS
        factor *= max(1.0, float(np.quantile(worst_N[judged_N], quantile)) / usual)
    return factor * np.where(always_N, ALWAYS, 1.0)


def covariance(average_XF: np.ndarray) -> np.ndarray:
    """Returns the covariance of healthy averages, robustly, and the more diagonal the fewer they
    are."""
    X, F = average_XF.shape
    middle_F = np.median(average_XF, 0)
    sigma_F = np.maximum(1.4826 * np.median(np.abs(average_XF - middle_F), 0), LEAST_SIGMA)
    cut_XF = np.clip((average_XF - middle_F) / sigma_F, -SPREAD, SPREAD)
    found_FF = cut_XF.T @ cut_XF / max(X, 1)
    shrink = F / (F + X)
    found_FF = (1 - shrink) * found_FF + (shrink + 0.05) * np.eye(F)
    sigma_F[F // CHANNELS :] *= ODD  # residuals move for many reasons
    return found_FF * sigma_F[:, None] * sigma_F[None]
