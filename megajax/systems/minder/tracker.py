"""Scores how far each machine is from what its peers and its own past predict.

A machine differs from the median of all machines by a constant offset (due to its pipeline stage,
its rank or its make) plus noise. While the job does something unusual (a checkpoint, a stall),
machines move apart in proportion to how unusual the median is:

    y_i = median + r_i + noise + slope (median - usual median) e_i

A Kalman filter estimates the offset r_i tick by tick; `fit` learns its prior and its noise. So a
machine without a past is judged by how far machines usually differ, a machine with a past by its
own offset, and an unusual state of the job widens the expected error instead of raising an alert.
When the usual state itself changes, each offset becomes less sure, by slope times the change.
The score of a tick is the distance in standard deviations. While a machine is suspected, its offset
is not updated, or a fault would become its normal state. The noise adapts to the job, slowly, so
that a fault does not become noise either.

Among few machines, a faulty one and the peer that it drags along can be half of all, and the median
then lies between the halves. In that case the half that is nearer to the usual state of the job
counts as healthy.
Sources: distances to peers: Minder section 4.3 (there a z-score over machines, which cannot exceed
(n - 1) / sqrt(n)); relative and own-history scores: NVIDIA's resiliency extension.

Legend: F channels, N machines, J windows of a tick, H ticks that are remembered.
"""

import collections
import dataclasses
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megajax.systems.minder.settings import CHANNELS, TICK, WINDOWS

# ---- evidence: the scores of the last ticks as one score a machine: does it differ lastingly?
#
# The scores are averaged over a span of ticks. The average is compared with limits, channel by
# channel and in all channels together (its Mahalanobis length under the covariance of healthy
# machines). Continuity (Minder section 4.3) is required of every tick: its component in the
# direction of the average must reach a share (SHARE) of the average. So a disturbance that is
# shorter than the span gives a score of 0, however large it is. A machine without a past has other
# limits than one whose offsets are known (AGES). The limits hold for one machine of a small job.
# `demand` raises them for large jobs, for restless jobs, and for machines that have differed ever
# since they were first seen.
#
# Legend: F channels, N machines, H ticks, G = F + 1 statistics: each channel, then all together.


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
    statistics: standard deviations for a channel, Mahalanobis length for all channels together.
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
    """Returns the scores with NaN where a state of the whole job hid a difference.

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
    scores_FNH: np.ndarray,
    mean_FN: np.ndarray,
    inverse_FF: np.ndarray,
    span: Span,
    least_G: np.ndarray | None = None,
    asked_N: np.ndarray | None = None,
) -> np.ndarray:
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


# ---- medians over thousands of machines, without a sort
#
# A CPU sorts 2,048 floats row by row with a comparison function. Here the middle element is found
# by bisection instead: floats become integers of the same order, and one bit of the answer is
# decided by each of 32 counts over all rows, which the compiler turns into vector instructions. The
# result is exact, and at 42 rows of 2,048 it takes a fifth of the sort's time.


Array = jax.Array
LAST = jnp.iinfo(jnp.int32).max  # behind every finite float
FIRST = jnp.iinfo(jnp.int32).min


def median(x: Array) -> Array:
    """Returns the median over the last axis, float32; values that are not finite are ignored.

    NaN where there is no finite value.
    """
    low, high = middle_two(x)
    return 0.5 * (low + high)


def middle_two(x: Array) -> tuple[Array, Array]:
    """Returns the two middle values over the last axis, the same value twice for an odd number.

    x: float32; values that are not finite are ignored. NaN where there is no finite value.
    """
    finite = jnp.isfinite(x)
    count = finite.sum(-1)
    keys = jnp.where(finite, _flipped(jax.lax.bitcast_convert_type(x, jnp.int32)), LAST)
    # The key that has `rank` keys before it in order; keys: (..., N), rank: (...).
    rank = jnp.maximum(count - 1, 0) // 2

    def decide(bit: Array, key: Array) -> Array:
        larger = key + jax.lax.shift_left(jnp.int32(1), jnp.int32(31) - bit)
        return jnp.where((keys < larger[..., None]).sum(-1) <= rank, larger, key)

    low = jax.lax.fori_loop(0, 32, decide, jnp.full(rank.shape, FIRST, jnp.int32))
    not_above = (keys <= low[..., None]).sum(-1)
    next_up = jnp.min(jnp.where(keys > low[..., None], keys, LAST), -1)
    high = jnp.where(not_above > count // 2, low, next_up)

    def value(key: Array) -> Array:
        decoded = jax.lax.bitcast_convert_type(_flipped(key), jnp.float32)
        return jnp.where(count > 0, decoded, jnp.nan)

    return value(low), value(high)


def _flipped(bits: Array) -> Array:
    """Returns integers in the order of the floats that have these bits, or such integers' bits."""
    return jnp.where(bits < 0, bits ^ LAST, bits)


# ---- the distance of each machine from its peers and its past


CORRELATED = 4.0  # (chosen) neighbouring ticks that say about as much as one
WANDER = 24.0 / 14400.0  # (chosen) share of the prior variance that a tick brings back: in 4 hours
LEARN = 2.0  # (chosen) standard deviations beyond which a tick teaches no further (Huber)
CLIP = 6.0  # (chosen) standard deviations beyond which a window counts no further, of few machines
USUAL = 50  # ticks (20 minutes) whose median is the usual state of the job
KNOWN = 4  # (chosen) ticks from which there is a usual state
SPLIT = 3.0  # (chosen) noises between the two middle machines of an even number, or more: halves
HALVES = 16  # (chosen) machines up to which a fault and its peers may be half of them
FEW = 100  # (chosen) machines up to which the spread of a tick may be that of a fault
SLOW = 0.015  # (chosen) share by which a tick changes the noise of the job
RANGE = (0.7, 2.0)  # (chosen) of the job's noise, as shares of what `fit` learnt
SUDDEN = 1.5  # (chosen) times the job's noise that a tick of few machines may have


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prior:
    """What `fit` learnt of each channel: standard deviations, float32 (profile.py)."""

    noise_F: Array
    offset_F: Array
    slope_F: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tracks:
    """The estimates of one job.

    offset_FN, unsure_FN: each machine's offset and the variance of that estimate. middle_FH: the
    healthy median of the last ticks, NaN for ticks before the job. noise_F: standard deviation of
    this job's ticks.
    """

    offset_FN: Array
    unsure_FN: Array
    middle_FH: Array
    noise_F: Array


def rows(machines: int) -> int:
    """Returns a power of two, so that few programs are compiled as machines come and go."""
    return max(8, 1 << (machines - 1).bit_length())


def begin(prior: Prior, machines: int) -> Tracks:
    """Returns the estimates for so many machines, none of which has been seen yet."""
    F = prior.noise_F.shape[0]
    zeros_FN = jnp.zeros((F, machines))
    unsure_FN = prior.offset_F[:, None] ** 2 + zeros_FN
    return Tracks(zeros_FN, unsure_FN, jnp.full((F, USUAL), jnp.nan, jnp.float32), prior.noise_F)


def resized(tracks: Tracks, prior: Prior, machines: int) -> Tracks:
    """Returns the estimates resized to so many machines; new machines have no past."""
    fresh, have = begin(prior, machines), min(tracks.offset_FN.shape[1], machines)
    return dataclasses.replace(
        tracks,
        offset_FN=fresh.offset_FN.at[:, :have].set(tracks.offset_FN[:, :have]),
        unsure_FN=fresh.unsure_FN.at[:, :have].set(tracks.unsure_FN[:, :have]),
    )


def without(tracks: Tracks, rows: list[int]) -> Tracks:
    """Returns the estimates without the machines in these rows."""
    keep = jnp.array([i for i in range(tracks.offset_FN.shape[1]) if i not in set(rows)], int)
    return dataclasses.replace(
        tracks, offset_FN=tracks.offset_FN[:, keep], unsure_FN=tracks.unsure_FN[:, keep]
    )


@jax.jit
def advance(
    prior: Prior, tracks: Tracks, y_FNJ: Array, held_N: Array, anew_N: Array
) -> tuple[Tracks, Array, Array, Array, Array]:
    """Returns (the estimates after a tick, signed score_FN, the same unclipped, healthy median_F,
    apart_FN: distance from the median of all, in standard deviations of machines' offsets).

    Scores are in standard deviations, NaN if a machine has no window in this tick. Only a distance
    from the peers counts. A step towards them may be the end of a disturbance that an offset was
    learnt from.
    Args: y_FNJ: of features.of_tick. held_N: True for machines whose offset must not be updated.
      anew_N: True for machines whose offset is forgotten first.
    """
    tracks = dataclasses.replace(
        tracks,
        offset_FN=jnp.where(anew_N, 0.0, tracks.offset_FN),
        unsure_FN=jnp.where(anew_N, prior.offset_F[:, None] ** 2, tracks.unsure_FN),
    )
    own_FNJ = y_FNJ - tracks.offset_FN[..., None]
    center_FJ = _healthy(prior, tracks, own_FNJ)
    middle_FH = jnp.concatenate(
        [tracks.middle_FH[:, 1:], jnp.nanmean(center_FJ, -1, keepdims=True)], 1
    )
    usual_F = median(middle_FH)
    unusual_F = jnp.nan_to_num(middle_FH[:, -1] - usual_F)
    # An offset that was learnt in one state of the job is less sure in another one.
    moved_F1 = jnp.nan_to_num(usual_F - median(tracks.middle_FH))[:, None]
    unsure_FN = tracks.unsure_FN + (moved_F1 * prior.slope_F[:, None]) ** 2
    tracks = dataclasses.replace(tracks, unsure_FN=unsure_FN)
    apart_FNJ = y_FNJ - median(y_FNJ.swapaxes(1, 2))[:, None]
    error_FNJ = own_FNJ - center_FJ[:, None]
    error_FN = jnp.nanmean(error_FNJ, -1)
    noise_F, slowly_F = _noise(prior, tracks, error_FN)
    noise_F = noise_F**2 + (unusual_F * prior.slope_F) ** 2
    deviation_FN = jnp.sqrt(noise_F[:, None] + tracks.unsure_FN)
    away_FNJ = jnp.where(
        error_FNJ > 0, jnp.clip(apart_FNJ, 0.0, error_FNJ), jnp.clip(apart_FNJ, error_FNJ, 0.0)
    )
    counted_FNJ = away_FNJ / deviation_FN[..., None]
    most_F11 = _most(error_FN)[:, None, None]
    score_FN = jnp.nanmean(jnp.clip(counted_FNJ, -most_F11, most_F11), -1)
    odd_FN = jnp.abs(error_FN) / deviation_FN
    learns_FN = jnp.isfinite(error_FN) & ~held_N[None]
    gain_FN = tracks.unsure_FN / (tracks.unsure_FN + CORRELATED * noise_F[:, None])
    # A large error may be a disturbance, so it moves the offset less and reduces its variance less.
    gain_FN *= jnp.minimum(1.0, LEARN / jnp.maximum(odd_FN, 1e-9))
    gain_FN = jnp.where(learns_FN, gain_FN, 0.0)
    after = Tracks(
        tracks.offset_FN + gain_FN * jnp.nan_to_num(error_FN),
        (1.0 - WANDER) * (1.0 - gain_FN) * tracks.unsure_FN + WANDER * prior.offset_F[:, None] ** 2,
        middle_FH,
        slowly_F,
    )
    far_FN = jnp.nanmean(counted_FNJ, -1)
    apart_FN = jnp.nanmean(apart_FNJ, -1) / jnp.maximum(prior.offset_F, 1e-9)[:, None]
    return after, score_FN, far_FN, middle_FH[:, -1], apart_FN


def _healthy(prior: Prior, tracks: Tracks, own_FNJ: Array) -> Array:
    """Returns the level of healthy machines, (F, J): the median of all or of the healthy half.

    own_FNJ: windows after the machines' offsets were subtracted.
    """
    own_FN = jnp.nanmean(own_FNJ, -1)
    low_F, high_F = middle_two(own_FN)
    count_F = jnp.isfinite(own_FN).sum(-1)
    usual_F = median(tracks.middle_FH)
    halves_F = (high_F - low_F > SPLIT * prior.noise_F) & (count_F <= HALVES)
    halves_F &= jnp.isfinite(tracks.middle_FH).sum(-1) >= KNOWN
    up_F = jnp.abs(high_F - usual_F) < jnp.abs(low_F - usual_F)
    shift_F = jnp.where(up_F, 0.5, -0.5) * (high_F - low_F)
    middle_FJ = median(own_FNJ.swapaxes(1, 2))
    return middle_FJ + jnp.where(halves_F, shift_F, 0.0)[:, None]


def _most(error_FN: Array) -> Array:
    """Returns where a window's score is clipped, in standard deviations, (F,).

    It grows with the number of machines as the limits do (`demand`), so that scores are
    clipped at the same multiple of the limit in every job.
    """
    count_F = jnp.maximum(jnp.isfinite(error_FN).sum(-1), 1)
    return CLIP * (1.0 + PER_DOUBLING * jnp.maximum(0.0, jnp.log2(count_F / CROWD)))


def _noise(prior: Prior, tracks: Tracks, error_FN: Array) -> tuple[Array, Array]:
    """Returns (standard deviation of this tick (F,), that of the job after it (F,))."""
    spread_F = 1.4826 * median(jnp.abs(error_FN))
    low, high = RANGE
    job_F = jnp.clip(tracks.noise_F, low * prior.noise_F, high * prior.noise_F)
    few_F = jnp.isfinite(error_FN).sum(-1) < FEW
    most_F = jnp.where(few_F, SUDDEN * jnp.fmax(job_F, tracks.noise_F), jnp.inf)
    square_F = tracks.noise_F**2
    new_F = (1 - SLOW) * square_F + SLOW * jnp.minimum(spread_F**2, 4 * square_F)
    after_F = jnp.where(jnp.isfinite(new_F), jnp.sqrt(new_F), tracks.noise_F)
    return jnp.fmax(job_F, jnp.minimum(spread_F, most_F)), after_F


# ---- how each machine follows the job within a tick: the spread of its metrics, and its lag
#
# A level says where a machine is, and features.py measures that. A machine whose power swings more
# than the others' has the same level, and so has one that does the work of the job a second later.
# Both are measured here against the median of all machines, second by second:
#
# - The spread of a metric is the logarithm of the mean distance between the machine's course and
#   the median's, after the difference of their levels has been subtracted.
# - The lag, in seconds, is the shift of the median's course that explains the machine's best, over
#   all metrics: each metric counts with the log likelihood of its correlation. A tick in which the
#   job does nothing that could be late has none.
#
# Only more spread and more lag count as a deviation. The functions above score both as they
# score levels, so that a machine is compared with its peers and with its own past.
#
# Legend: C metrics, N machines, T seconds of a tick, K shifts, S seconds that have all K shifts, F
# = C + 1 channels: the spread of each metric, then the lag.


FLOOR = 0.003  # (chosen) of a distance, as a share of three healthy ranges: 1 % of one
FARTHEST = 4  # (chosen) seconds of lag that are looked for
PART = 0.5  # seconds between two shifts
LEAST_SHIFT = 12.0  # (chosen) log likelihood below which no shift is told from another
NEAR = 0.15  # (chosen) share of it that the farthest shift costs: the nearer of two peaks counts
USUAL_COURSE, RECENT, FIRST_COURSE = (
    50,
    5,
    10,
)  # ticks: of the usual course, of the present one, to begin with
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
    """The state of the job as a whole, tick by tick. `see` tells whether spreads can be compared.

    Machines with other roles follow the job in other ways: if its steps change, so do their spreads
    and lags, and no machine is to blame. Ticks in which the job's course differs from that of most
    of the last 20 minutes are no evidence. If the new course stays, offsets are learnt anew.
    """

    def __init__(self) -> None:
        """Knows nothing of a job yet."""
        self._states: collections.deque[np.ndarray] = collections.deque(maxlen=USUAL_COURSE)
        self._learnt_S: np.ndarray | None = None

    def see(self, state_S: np.ndarray) -> tuple[bool, bool]:
        """Takes a tick's state; returns (whether the job does what it usually does, whether that
        differs from the time in which offsets were learnt)."""
        self._states.append(state_S)
        seen_HS = np.array(self._states)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a metric without a sample
            usual_S, now_S = np.nanmedian(seen_HS, 0), np.nanmean(seen_HS[-RECENT:], 0)
        if self._learnt_S is None:
            self._learnt_S = usual_S
        if len(seen_HS) < FIRST_COURSE:  # nothing is learnt that could be wrong
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
    pad = ((0, 0), (0, rows(N) - N), (0, 0))
    y_FN, state_S = _of_tick(np.pad(x_CNT, pad, constant_values=np.nan))
    return np.asarray(y_FN)[:, :N], np.asarray(state_S)


def prior(noise_F: np.ndarray, offset_F: np.ndarray, slope_F: np.ndarray) -> Prior:
    """Returns the prior of `advance`, with channels that have no sample behind those that do.

    There are as many as a tick of levels and residuals has, so that both run the same program.
    """
    pad = (0, 2 * (len(noise_F) - 1) - len(noise_F))
    return Prior(
        *(
            jnp.asarray(np.pad(x, pad, constant_values=1.0), jnp.float32)
            for x in (noise_F, offset_F, slope_F)
        )
    )


def advance_course(
    prior: Prior, tracks: Tracks, y_FN: np.ndarray, held_N: np.ndarray, anew_N: np.ndarray
) -> tuple[Tracks, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (the estimates after a tick, score_FN, the same unclipped, apart_FN).

    As `advance`, but less spread or lag than usual counts as none. Args: y_FN: of `of_tick`;
    machines of the estimates that it does not have count as without samples.
    """
    (F, N), (channels, rows) = y_FN.shape, tracks.offset_FN.shape
    y_FN = np.pad(y_FN, ((0, channels - F), (0, rows - N)), constant_values=np.nan)
    y_FNJ = np.repeat(y_FN[..., None], WINDOWS, 2)
    tracks, score, far, _, apart = advance(prior, tracks, jnp.asarray(y_FNJ), held_N, anew_N)
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
    is_sharp_N = likely_NK.max(1) - likely_NK.mean(1) >= LEAST_SHIFT
    return jnp.where(is_sharp_N, jnp.asarray(shifts_K)[best_N] + PART * part_N, jnp.nan)
