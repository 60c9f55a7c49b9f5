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

import dataclasses

import jax
import jax.numpy as jnp

from megajax.systems.minder.evidence import CROWD, PER_DOUBLING
from megajax.systems.minder.medians import median, middle_two

Array = jax.Array
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
    away_FNJ = jnp.where(error_FNJ > 0, jnp.clip(apart_FNJ, 0.0, error_FNJ),
                         jnp.clip(apart_FNJ, error_FNJ, 0.0))  # fmt: skip
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

    It grows with the number of machines as the limits do (evidence.demand), so that scores are
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
