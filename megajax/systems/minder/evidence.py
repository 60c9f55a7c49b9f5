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
CROWD, PER_DOUBLING = 16, 0.10  # (chosen) machines whose limits these are; more a doubling
RESTLESS = (0.75, 0.38)  # (chosen) quantile of all machines' scores, and what it usually is below
ALWAYS = 1.6  # (chosen) of a limit, for a machine that was never seen like the others
MORE = 1.5  # (chosen) times its part of the average that a channel may add in one tick
ONE_WAY = 0.5  # (chosen) cosine between the averages of a span's two halves
ELSEWHERE = 0.1  # (chosen) of a level, whose healthy range is 1/3: so far the job's median moved
SMALL = 0.25  # a score that no rule looks at
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
    scores_FNH: np.ndarray, mean_FN: np.ndarray, inverse_FF: np.ndarray, span: Span,
    least_G: np.ndarray | None = None, asked_N: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns statistic_GN, which is 0 where the difference does not last.

    In all channels together, a difference lasts only if it stays the same one. Two disturbances of
    one machine, the second in other channels than the first, are no lasting difference.
    Args: scores_FNH: of the span's ticks, NaN where missing. mean_FN: their `average`. inverse_FF:
      inverse covariance of healthy averages. least_G: a machine all of whose statistics are smaller
      gets 0. asked_N: machines that are not asked for get 0 too; None: all are asked for.
    """
    square_N = np.maximum(((inverse_FF @ mean_FN) * mean_FN).sum(0), 0.0)
    alone_FN = np.abs(mean_FN) * np.sqrt(np.diag(inverse_FF))[:, None]
    reach_GN = np.concatenate([alone_FN, np.sqrt(square_N)[None]])
    near_N = np.zeros(len(square_N), bool) if asked_N is None else ~asked_N
    if least_G is not None:  # most machines are like the others: what follows is not for them
        near_N = near_N | (reach_GN < least_G[:, None]).all(0)
    rows, found_GN = np.flatnonzero(~near_N), np.zeros(reach_GN.shape)
    lasts_GN = _lasts(scores_FNH[:, rows], mean_FN[:, rows], inverse_FF, span)
    found_GN[:, rows] = np.where(lasts_GN, reach_GN[:, rows], 0.0)
    return found_GN


def _lasts(
    scores_FNH: np.ndarray, mean_FN: np.ndarray, inverse_FF: np.ndarray, span: Span
) -> np.ndarray:
    """Tells which differences last, each channel and all together, (G, N)."""
    filled_FNH = bridged(scores_FNH, mean_FN)
    toward_FN = inverse_FF @ mean_FN
    part_FN = toward_FN * mean_FN
    most_FN = MORE * np.maximum(part_FN, 0.0)
    share_NH = np.minimum(toward_FN[..., None] * filled_FNH, most_FN[..., None]).sum(0)
    square_N = np.maximum(part_FN.sum(0), 0.0)
    together_N = (share_NH >= SHARE * square_N[:, None]).sum(-1) >= span.needed
    together_N &= _one_way(filled_FNH, inverse_FF)
    tall = np.sign(mean_FN)[..., None] * filled_FNH >= SHARE * np.abs(mean_FN)[..., None]
    return np.concatenate([tall.sum(-1) >= span.needed, together_N[None]])


def _one_way(scores_FNH: np.ndarray, inverse_FF: np.ndarray) -> np.ndarray:
    """Tells whether the averages of both halves of a span have one direction, (N,)."""
    first_FN, second_FN = (half.mean(-1) for half in np.array_split(scores_FNH, 2, axis=-1))
    toward_FN = inverse_FF @ first_FN
    one_N, both_N = (toward_FN * first_FN).sum(0), (toward_FN * second_FN).sum(0)
    other_N = (second_FN * (inverse_FF @ second_FN)).sum(0)
    return both_N >= ONE_WAY * np.sqrt(np.maximum(one_N * other_N, 0.0))


def score(
    scores_FNH: np.ndarray,
    past_N: np.ndarray,
    limits: Limits,
    chosen: Sequence[Span],
    middle_FH: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (score_GN, average_FN of the first span). A score of 1 is the limit.

    Of several spans the largest score counts. A score below SMALL is 0.
    Args: scores_FNH: of the newest ticks, at least as many as the first span has. past_N: ticks for
      which each machine was known before the newest one. middle_FH: the job's median in the ticks
      of the scores; None: of channels that no stall of the job hides.
    """
    F, N, H = scores_FNH.shape
    best_GN = np.zeros((F + 1, N))
    first_FN = np.zeros((F, N))
    for p, span in enumerate(chosen):
        if H < span.ticks:
            continue
        part = scores_FNH[..., H - span.ticks :]
        # A stall must not prolong a short disturbance: in the longer span more ticks are left.
        if p > 0 and middle_FH is not None:
            part = without_stalls(part, middle_FH[:, H - span.ticks :])
        age_N = age_of(past_N - span.ticks + 1)
        mean_FN = average(part)
        first_FN = mean_FN if p == 0 else first_FN
        for a in np.unique(age_N[age_N >= 0]):
            limit_G = limits.limit[a, p]
            found_GN = statistics(
                part, mean_FN, limits.inverse[a, p], span, SMALL * limit_G, age_N == a
            )
            best_GN = np.maximum(best_GN, found_GN / limit_G[:, None])
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


def covariance(average_XF: np.ndarray, levels: int) -> np.ndarray:
    """Returns a robust covariance (F, F) of healthy averages, more diagonal if they are few.

    levels: channels behind which there are residuals.
    """
    X, F = average_XF.shape
    middle_F = np.median(average_XF, 0)
    sigma_F = np.maximum(1.4826 * np.median(np.abs(average_XF - middle_F), 0), LEAST_SIGMA)
    cut_XF = np.clip((average_XF - middle_F) / sigma_F, -SPREAD, SPREAD)
    found_FF = cut_XF.T @ cut_XF / max(X, 1)
    shrink = F / (F + X)
    found_FF = (1 - shrink) * found_FF + (shrink + 0.05) * np.eye(F)
    sigma_F[levels:] *= ODD  # residuals move for many reasons
    return found_FF * sigma_F[:, None] * sigma_F[None]
