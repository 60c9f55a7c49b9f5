"""Turns the scores of the last ticks into one score a machine: is it unlike its peers, lastingly?

The scores are averaged over a span of ticks. The average is compared with limits, channel by
channel and in all channels together (its Mahalanobis length under the covariance of healthy
machines). Continuity (Minder section 4.3) is required of every tick: its component in the direction
of the average must reach a share (SHARE) of the average. So a disturbance that is shorter than the
span gives a score of 0, however large it is.
A machine without a past has other limits than one whose offsets are known (AGES). The limits hold
for one machine of a small job. `demand` raises them for large jobs, for restless jobs, and for
machines that have differed ever since they were first seen.

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
MORE = 1.5  # (chosen) times its part of the average that a channel may add in one tick
ONE_WAY = 0.5  # (chosen) cosine between the averages of a span's two halves
ELSEWHERE = 0.1  # (chosen) of a level, whose healthy range is 1/3: so far the job's median moved
SPREAD = 4.0  # (chosen) robust standard deviations at which averages are cut off for a covariance


@dataclasses.dataclass(frozen=True)
class Span:
    """ticks: length of the span. needed: ticks that must point in the direction of the average."""

    ticks: int
    needed: int


def spans(ticks: int) -> tuple[Span, Span]:
    """Returns two spans: `ticks`, and one half as long again for weak faults.

    In the longer one some ticks may fail. A disturbance of 5/6 of `ticks` passes neither.
    """
    longer = ticks + ticks // 2
    return Span(ticks, ticks), Span(longer, longer - max(1, longer // 8))


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits, by age A (of AGES) and span P.

    inverse: (A, P, F, F), inverse covariance of healthy averages. limit: (A, P, G), limits of the
    statistics: in standard deviations for a channel, in Mahalanobis length for all together.
    """

    inverse: np.ndarray
    limit: np.ndarray


def age_of(past_N: np.ndarray) -> np.ndarray:
    """Returns the index into AGES for machines with so many ticks before the span; -1: too new."""
    return np.searchsorted(np.asarray(AGES), past_N, side="right") - 1


def average(scores_FNH: np.ndarray) -> np.ndarray:
    """Returns the mean over ticks, (F, N); 0 where more than MISSING of the ticks have no score."""
    measured = np.isfinite(scores_FNH)
    count_FN = measured.sum(-1)
    total_FN = np.where(measured, scores_FNH, 0.0).sum(-1)
    enough = count_FN >= (1 - MISSING) * scores_FNH.shape[-1]
    return np.where(enough, total_FN / np.maximum(count_FN, 1), 0.0)


def bridged(scores_FNH: np.ndarray, mean_FN: np.ndarray) -> np.ndarray:
    """Returns the scores with missing ticks filled.

    Between two measured ticks the mean is filled in. At either end it is 0, because nobody knows
    whether the difference lasts there.
    """
    measured = np.isfinite(scores_FNH)
    inside = np.maximum.accumulate(measured, -1)
    inside &= np.maximum.accumulate(measured[..., ::-1], -1)[..., ::-1]
    return np.where(measured, scores_FNH, np.where(inside, mean_FN[..., None], 0.0))


def without_stalls(scores_FNH: np.ndarray, middle_FH: np.ndarray) -> np.ndarray:
    """Returns the scores with NaN where a difference was hidden by what the whole job did.

    While all machines stand still, a machine whose GPU is dead looks like the others: that tick is
    no evidence that the machine has recovered. A tick is left out in a channel if the job's median
    was far from where it was in most of the span and the machine did not show its difference.
    Args: scores_FNH: of a span's ticks. middle_FH: the job's median in these ticks.
    """
    C = scores_FNH.shape[0] // CHANNELS
    known_C1 = np.isfinite(middle_FH[:C]).any(-1, keepdims=True)
    middle_CH = np.where(known_C1, middle_FH[:C], 0.0)
    away_CH = np.abs(middle_CH - np.nanmedian(middle_CH, -1, keepdims=True)) > ELSEWHERE
    if not away_CH.any():
        return scores_FNH
    away_FH = np.concatenate([away_CH] * CHANNELS)
    usual_FNH = np.isfinite(scores_FNH) & ~away_FH[:, None]
    total_FN = np.where(usual_FNH, scores_FNH, 0.0).sum(-1)
    mean_FN1 = (total_FN / np.maximum(usual_FNH.sum(-1), 1))[..., None]
    hidden = np.sign(mean_FN1) * scores_FNH < SHARE * np.abs(mean_FN1)
    return np.where(away_FH[:, None] & hidden, np.nan, scores_FNH)


def statistics(
    scores_FNH: np.ndarray, inverse_NFF: np.ndarray, span: Span
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (average_FN, statistic_GN, which is 0 where the difference does not last).

    In all channels together, a difference lasts only if it stays the same one. Two disturbances of
    one machine, the second in other channels than the first, are no lasting difference.
    Args: scores_FNH: of the span's ticks, NaN where missing. inverse_NFF: inverse covariance of
      healthy averages, by machine.
    """
    mean_FN = average(scores_FNH)
    filled_FNH = bridged(scores_FNH, mean_FN)
    sigma_FN = 1.0 / np.sqrt(np.einsum("nff->fn", inverse_NFF))
    toward_FN = np.einsum("nfg,gn->fn", inverse_NFF, mean_FN)
    square_N = np.maximum((toward_FN * mean_FN).sum(0), 0.0)
    most_FN = MORE * np.maximum(toward_FN * mean_FN, 0.0)
    share_NH = np.minimum(toward_FN[..., None] * filled_FNH, most_FN[..., None]).sum(0)
    lasts_N = (share_NH >= SHARE * square_N[:, None]).sum(-1) >= span.needed
    lasts_N &= _one_way(filled_FNH, inverse_NFF)
    together_N = np.where(lasts_N, np.sqrt(square_N), 0.0)
    sign_FN = np.sign(mean_FN)[..., None]
    tall = sign_FN * filled_FNH >= SHARE * np.abs(mean_FN)[..., None]
    alone_FN = np.where(tall.sum(-1) >= span.needed, np.abs(mean_FN) / sigma_FN, 0.0)
    return mean_FN, np.concatenate([alone_FN, together_N[None]])


def _one_way(scores_FNH: np.ndarray, inverse_NFF: np.ndarray) -> np.ndarray:
    """Tells whether the averages of both halves of a span have one direction, (N,)."""
    halves = np.array_split(scores_FNH, 2, axis=-1)
    first_FN, second_FN = (half.mean(-1) for half in halves)
    toward_FN = np.einsum("nfg,gn->fn", inverse_NFF, first_FN)
    one_N = (toward_FN * first_FN).sum(0)
    both_N = (toward_FN * second_FN).sum(0)
    other_N = np.einsum("fn,nfg,gn->n", second_FN, inverse_NFF, second_FN, optimize=True)
    return both_N >= ONE_WAY * np.sqrt(np.maximum(one_N * other_N, 0.0))


def score(
    scores_FNH: np.ndarray,
    past_N: np.ndarray,
    limits: Limits,
    chosen: Sequence[Span],
    middle_FH: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (score_GN, average_FN of the first span). A score of 1 is the limit.

    Of several spans the largest score counts.
    Args: scores_FNH: of the newest ticks, at least as many as the first span has. past_N: ticks for
      which each machine was known before the newest one. middle_FH: the job's median in the ticks
      of the scores.
    """
    F, N, H = scores_FNH.shape
    best_GN = np.zeros((F + 1, N))
    first_FN = np.zeros((F, N))
    for p, span in enumerate(chosen):
        age_N = age_of(past_N - span.ticks + 1)
        if H < span.ticks:
            continue
        part = scores_FNH[..., H - span.ticks :]
        if p > 0:  # a stall must not prolong a short disturbance: here more ticks are left
            part = without_stalls(part, middle_FH[:, H - span.ticks :])
        mean_FN, found_GN = statistics(part, limits.inverse[np.maximum(age_N, 0), p], span)
        found_GN = np.where(age_N >= 0, found_GN / limits.limit[np.maximum(age_N, 0), p].T, 0.0)
        best_GN = np.maximum(best_GN, found_GN)
        first_FN = mean_FN if p == 0 else first_FN
    return best_GN, first_FN


def demand(worst_N: np.ndarray, judged_N: np.ndarray, always_N: np.ndarray) -> np.ndarray:
    """Returns the factor on the limits of each machine, (N,).

    Args: worst_N: highest score of each machine. judged_N: True for machines that are judged.
      always_N: True for machines that have differed since they were first seen, perhaps because of
      their role.
    """
    count = max(int(judged_N.sum()), 1)
    factor = 1.0 + PER_DOUBLING * np.log2(count / CROWD)
    if count >= CROWD:
        quantile, usual = RESTLESS
        factor *= max(1.0, float(np.quantile(worst_N[judged_N], quantile)) / usual)
    return factor * np.where(always_N, ALWAYS, 1.0)


def covariance(average_XF: np.ndarray) -> np.ndarray:
    """Returns a robust covariance (F, F) of healthy averages, more diagonal if they are few."""
    X, F = average_XF.shape
    middle_F = np.median(average_XF, 0)
    sigma_F = np.maximum(1.4826 * np.median(np.abs(average_XF - middle_F), 0), LEAST_SIGMA)
    cut_XF = np.clip((average_XF - middle_F) / sigma_F, -SPREAD, SPREAD)
    found_FF = cut_XF.T @ cut_XF / max(X, 1)
    shrink = F / (F + X)
    found_FF = (1 - shrink) * found_FF + (shrink + 0.05) * np.eye(F)
    sigma_F[F // CHANNELS :] *= ODD  # residuals move for many reasons
    return found_FF * sigma_F[:, None] * sigma_F[None]
