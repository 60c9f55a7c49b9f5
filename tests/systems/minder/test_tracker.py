"""The estimates of machines' offsets, by jobs that are made from their definition."""

import jax.numpy as jnp
import numpy as np

from megajax.systems.minder import tracker

MACHINES, WINDOWS, NOISE, SLOPE = 16, 3, 0.005, 0.1


def scores(middle_T, slope_N, seed, more_TN=None):
    """Returns score_TN of a job of one metric whose machines move apart with its median."""
    rng = np.random.default_rng(seed)
    prior = tracker.Prior(*(jnp.full(1, x, jnp.float32) for x in (NOISE, 0.02, SLOPE)))
    tracks, nobody, scores_TN = tracker.begin(prior, MACHINES), np.zeros(MACHINES, bool), []
    offset_N = 0.02 * rng.standard_normal(MACHINES)
    more_TN = np.zeros((len(middle_T), MACHINES)) if more_TN is None else more_TN
    for middle, more_N in zip(middle_T, more_TN, strict=True):
        y_NJ = NOISE * rng.standard_normal((MACHINES, WINDOWS))
        y_NJ += (middle + offset_N + more_N + slope_N * middle)[:, None]
        y_FNJ = jnp.asarray(y_NJ[None], jnp.float32)
        tracks, score_FN, *_ = tracker.advance(prior, tracks, y_FNJ, nobody, nobody)
        scores_TN.append(np.asarray(score_FN)[0])
    return np.array(scores_TN)


def test_offsets_that_were_learnt_while_the_job_stood_still_are_less_sure_afterwards(seed):
    slope_N = SLOPE * np.random.default_rng(seed).standard_normal(MACHINES)
    middle_T = np.where(np.arange(30) < 6, 0.0, 0.4)
    score_TN = scores(middle_T, slope_N, seed)
    assert np.abs(score_TN[8:].mean(0)).max() < 2.0


def test_a_machine_that_changes_in_an_unchanged_job_stands_out(seed):
    slope_N, rng = np.zeros(MACHINES), np.random.default_rng(seed)
    changes_TN = np.zeros((30, MACHINES))
    changes_TN[20:, 3] = 0.04
    for spread in (0.0, 0.001):  # the median is never quite the same
        score_TN = scores(spread * rng.standard_normal(30), slope_N, seed, changes_TN)
        assert score_TN[20:, 3].mean() > 4.0
        assert np.abs(np.delete(score_TN, 3, 1)).mean() < 1.0


def test_medians_are_exact_for_any_count_of_machines_with_holes_ties_and_both_signs(seed):
    rng = np.random.default_rng(seed)
    for machines in (1, 2, 7, 64, 1501):
        sizes_61 = 10.0 ** rng.integers(-30, 30, (6, 1))
        x = (rng.standard_normal((6, machines)) * sizes_61).astype(np.float32)
        x[1] = np.round(x[1] / np.abs(x[1]).max() * 3)  # ties, zeros of both signs
        x[2:4, rng.random(machines) < 0.3] = np.nan
        x[4], x[5, machines // 2 :] = np.nan, np.inf
        medians = zip(*tracker.middle_two(x), tracker.median(x), strict=True)
        for row, (low, high, middle) in zip(x, medians, strict=True):
            ordered = np.sort(row[np.isfinite(row)])
            n = len(ordered)
            expected = (ordered[(n - 1) // 2], ordered[n // 2]) if n else (np.nan, np.nan)
            np.testing.assert_array_equal((low, high), expected)
            np.testing.assert_array_equal(middle, np.float32(0.5) * np.float32(np.sum(expected)))


def test_the_second_tick_of_a_job_compiles_nothing():
    prior = tracker.Prior(*(jnp.full(1, x, jnp.float32) for x in (NOISE, 0.02, SLOPE)))
    tracks, nobody = tracker.begin(prior, 5), np.zeros(5, bool)
    before = tracker.advance._cache_size()
    for _ in range(2):
        tracks, *_ = tracker.advance(prior, tracks, jnp.zeros((1, 5, WINDOWS)), nobody, nobody)
    assert tracker.advance._cache_size() == before + 1
