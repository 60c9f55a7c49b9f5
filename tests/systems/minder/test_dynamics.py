"""Spreads, lags and onsets, against NumPy over one machine at a time.

Legend: C metrics, N machines, T seconds.
"""

import numpy as np
import pytest

from megajax.systems.minder import tracker
from megajax.systems.minder.judge import Onsets
from megajax.systems.minder.settings import TICK

C, N = 3, 8


def tick(rng, late_s=0.0, seconds=TICK):
    """Returns (x_CNT of machines that do the same work, of which machine 5 is late)."""
    at_NT = np.tile(np.arange(float(seconds)), (N, 1))
    at_NT[5] -= late_s
    course_CNT = np.stack([np.sin(2 * np.pi * (at_NT / p + c)) for c, p in enumerate((7, 9, 11))])
    x_CNT = 0.5 + 0.05 * course_CNT + 0.01 * rng.standard_normal((C, N, seconds))
    return x_CNT.astype(np.float32)


def test_spreads_are_mean_distances_from_the_medians_course(seed):
    rng = np.random.default_rng(seed)
    x_CNT = tick(rng)
    x_CNT[1, 2] += 0.03 * rng.standard_normal(TICK)
    x_CNT[0, :, 3:7] = np.nan
    x_CNT[2, 4, ::3] = np.nan
    x_CNT[2, 6, : TICK - 4] = np.nan
    y_FN, _ = tracker.of_tick(x_CNT)
    for c, n in np.ndindex(C, N):
        apart_T = x_CNT[c, n] - [
            np.median(v[np.isfinite(v)]) if np.isfinite(v).any() else np.nan for v in x_CNT[c].T
        ]
        apart_T = apart_T[np.isfinite(apart_T)]
        expected = np.log(tracker.FLOOR + np.abs(apart_T - apart_T.mean()).mean())
        expected = np.nan if len(apart_T) < TICK / 2 else expected
        assert y_FN[c, n] == pytest.approx(expected, abs=1e-4, nan_ok=True), (c, n)
    assert y_FN[1, 2] == y_FN[1].max()


@pytest.mark.parametrize("late_s", [-1.5, 0.0, 0.6, 1.0, 2.3])
def test_the_lag_is_how_late_a_machine_is(seed, late_s):
    lag_N = tracker.of_tick(tick(np.random.default_rng(seed), late_s))[0][-1]
    assert lag_N[5] == pytest.approx(late_s, abs=0.2)
    assert np.abs(np.delete(lag_N, 5)).max() < 0.2


def test_a_job_that_stands_still_shows_no_lag(seed):
    noise_CNT = 0.5 + 0.01 * np.random.default_rng(seed).standard_normal((C, N, TICK))
    assert np.isnan(tracker.of_tick(noise_CNT.astype(np.float32))[0][-1]).all()


def test_onsets_are_known_to_the_second_whatever_the_sizes(seed):
    rng, moved = np.random.default_rng(seed), {2: 400, 3: 412, 6: 431}
    x_CNT = tick(rng, seconds=20 * TICK)
    for number, (row, at) in enumerate(moved.items()):
        x_CNT[0, row, at:] += 0.02 * (1 + number)
        x_CNT[1, row, at:] -= 0.02
    x_CNT[:, :, 300:] += 0.1  # all machines
    onsets = Onsets(15)
    for at in range(0, 20 * TICK, TICK):
        onsets.add(x_CNT[..., at : at + TICK])
    rows_R = np.array(list(moved))
    about_R = np.array([20 * TICK - at // TICK * TICK for at in moved.values()])
    far_CR, still_N = np.array([[9.0], [-9.0], [0.5]]) * np.ones(3), np.ones(N, bool)
    still_N[rows_R] = False
    ago_R, blur_R = onsets.moved(rows_R, about_R, far_CR, still_N)
    np.testing.assert_allclose(20 * TICK - ago_R, list(moved.values()), atol=3)
    assert (blur_R < 3).all()
    assert np.isnan(onsets.moved(rows_R, about_R, far_CR, np.zeros(N, bool))[0]).all()


def test_a_job_that_changes_its_course_is_no_evidence_until_that_is_usual(seed):
    rng, state = np.random.default_rng(seed), tracker.State()
    level_H = np.full(120, 0.5)
    level_H[40:60] += 0.1  # for eight minutes
    level_H[80:] -= 0.1  # from now on
    said = [state.see(np.array([level, 0.1]) + 0.005 * rng.standard_normal(2)) for level in level_H]
    is_usual_H, is_new_H = np.array(said).T
    assert is_usual_H[:40].all() and is_usual_H[66:80].all() and is_usual_H[108:].all()
    assert not is_usual_H[43:60].any() and not is_usual_H[84:100].any()
    assert not is_new_H[:100].any() and is_new_H[100:].sum() == 1
