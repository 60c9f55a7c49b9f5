"""The rivals' formulas against plain loops, and their rule against a slow one.

Legend: C metrics, N machines, J windows, M streams, T seconds, X points, D numbers.
"""

import numpy as np
import pytest
from scipy.special import gammaln

from experiments.reports import minder_rivals as rivals
from experiments.reports.minder_rivals import Base, View, nearest
from megajax.monitor.samples import Grid

RNG = np.random.default_rng


@pytest.mark.parametrize("measure", rivals.DISTANCES)
def test_sums_of_distances(measure):
    e_JND = RNG(0).random((3, 5, 8)).astype(np.float32)
    e_JND[1, 2] = e_JND[1, 3]
    order = {"euclid": 2, "manhattan": 1, "chebyshev": np.inf}[measure]
    want = [
        [sum(np.linalg.norm((a - b).astype(float), order) for b in e_ND) for a in e_ND]
        for e_ND in e_JND
    ]
    np.testing.assert_allclose(rivals.sums(e_JND, measure), want, rtol=2e-5)


def test_holes_have_the_nearest_sample():
    x = np.array([[np.nan, 1, np.nan, np.nan, 2, np.nan, 3, np.nan], [np.nan] * 8], np.float32)
    for row, got in zip(x, nearest(x), strict=True):
        at = np.flatnonzero(np.isfinite(row))
        want = [row[at[np.abs(at - t).argmin()]] if len(at) else 0.5 for t in range(len(row))]
        np.testing.assert_array_equal(got, want)


def test_scores_of_distances():
    d_JN = RNG(1).random((4, 9)) + 1
    there_JN = RNG(2).random((4, 9)) > 0.2
    for j in range(4):
        d = d_JN[j][there_JN[j]]
        middle, n = np.median(d), len(d)
        want = {
            "z": (d - d.mean()) / d.std(),
            "share": (d - d.mean()) / d.std() / (n - 1) ** 0.5,
            "ratio": (d - middle) / middle,
            "mad": (d - middle) / (1.4826 * np.median(abs(d - middle)) + 0.02 * middle),
            "plain": d,
        }
        for how in rivals.SCORES:
            got = rivals.normal(d_JN, there_JN, how)[j][there_JN[j]]
            np.testing.assert_allclose(got, want[how], rtol=1e-6, err_msg=how)
    lone = np.array([[1.0] * 99 + [50.0]])
    share = rivals.normal(lone, np.ones((1, 100), bool), "share")
    assert share.max() == pytest.approx(1.0, rel=1e-6)  # the most that 100 machines can have


def slow_rule(score_MJN, threshold, need, most):
    """Walks window by window, as the paper words it."""
    named, out, begin = [], None, 0
    while len(named) < most:
        runs, hit = [(None, 0)] * len(score_MJN), None
        for j in range(begin, score_MJN.shape[1]):
            for m, score_JN in enumerate(score_MJN):
                score_N = score_JN[j].copy()
                if out is not None:
                    score_N[out] = -np.inf
                k = int(score_N.argmax())
                last, count = runs[m]
                if score_N[k] > threshold:
                    runs[m] = (k, count + 1 if k == last else 1)
                else:
                    runs[m] = (None, 0)
                if runs[m][1] >= need and hit is None:
                    hit = (j, k, m)
            if hit:
                break
        if not hit:
            break
        named.append(hit)
        out, begin = hit[1], hit[0] + 1
    return named


@pytest.mark.parametrize("seed", range(20))
def test_continuity_counts_windows_of_one_machine(seed):
    rng = RNG(seed)
    slow_JN = np.repeat(rng.random((2, 12, 5)), 5, 1)  # candidates last a few windows
    score_MJN = slow_JN + 0.1 * rng.random((2, 60, 5))
    candidates = rivals.trace(score_MJN, np.ones((60, 5), bool))
    for threshold in (0.3, 0.6, 0.8):
        for need in (1, 4, 9):
            got = rivals.decide(candidates, threshold, need, 2)
            assert [g[:3] for g in got] == slow_rule(score_MJN, threshold, need, 2)


def test_machines_that_are_not_there_are_no_candidates():
    score_MJN = np.ones((1, 5, 3))
    score_MJN[..., 2] = 9.0
    there_JN = np.ones((5, 3), bool)
    there_JN[2:, 2] = False
    candidates = rivals.trace(score_MJN, there_JN)
    assert rivals.decide(candidates, 5.0, 3) == [] and rivals.decide(candidates, 5.0, 2)[0][:2] == (
        1,
        2,
    )


def test_the_best_choice_has_the_highest_f1():
    table = {1.0: [(1, 3, 1), (0, 0, 1)], 2.0: [(1, 0, 1), (0, 0, 1)], 3.0: [(0, 0, 1), (0, 0, 1)]}
    choices = ({"threshold": t} for t in table)
    choice, value = rivals.best(choices, lambda c: table[c["threshold"]])
    assert choice == {"threshold": 2.0} and value == pytest.approx(2 / 3)


# ---- isolation forest


def test_a_forest_walks_as_its_trees_say():
    x_XD = RNG(0).normal(size=(400, 3)).astype(np.float32)
    grown = rivals.grow(x_XD, 1)
    rows = np.concatenate([x_XD[:20], [[9, 9, 9]]]).astype(np.float32)

    def path(t, x):
        node = 0
        while not np.isfinite(grown["depth"][t, node]):
            right = x[grown["feature"][t, node]] >= grown["cut"][t, node]
            node = 2 * node + (2 if right else 1)
        return grown["depth"][t, node]

    mean = [np.mean([path(t, x) for t in range(rivals.TREES)]) for x in rows]
    usual = float(rivals.average_path(np.array(256)))
    got = rivals.score(grown, rows)
    np.testing.assert_allclose(got, 2 ** (-np.array(mean) / usual), rtol=1e-5)
    assert got.argmax() == 20 and got[20] > 0.7 and np.median(got[:20]) < 0.55


def test_average_path_is_that_of_random_search_trees():
    """n points are cut apart as n - 1 keys of a random search tree part its n gaps."""
    rng = RNG(3)
    for n in (2, 3, 10):
        total = []
        for _ in range(3000):
            keys, depth = n - 1, 0  # of the subtree in which a random gap lies
            while keys > 0:
                root, gap = rng.integers(keys), rng.integers(keys + 1)
                keys = root if gap <= root else keys - root - 1
                depth += 1
            total.append(depth)
        exact = 2 * sum(1 / k for k in range(1, n)) - 2 * (n - 1) / n
        assert np.mean(total) == pytest.approx(exact, rel=0.05)
        # The paper has ln(n - 1) + 0.5772 for the harmonic number: 1 / (2 n - 2) too low.
        got = float(rivals.average_path(np.array(n)))
        assert got == pytest.approx(exact, abs=0 if n == 2 else 1.1 / (n - 1))


# ---- scores by peers and own past


BASE = Base(
    ("cpu_usage", "gpu_duty_cycle", "gpu_power_draw"),
    np.array([[0.0, 0, 0], [100, 100, 700], [0, 0, 0]]),
    {},
)


def view(values_CNT, left=()):
    names = tuple(f"m{k}" for k in range(values_CNT.shape[1]))
    grid = Grid(1000, 1, values_CNT.astype(np.float32), names, BASE.metrics)
    return View(grid, left, BASE)


def job(seconds=720, machines=6):
    level = np.array([30.0, 95, 600])[:, None, None]
    return level * (1 + 0.01 * RNG(5).standard_normal((3, machines, seconds)))


def test_nvrx_is_a_ratio_of_medians():
    values = job()
    values[1:, 2, 300:] *= 0.5
    relative = rivals.nvrx(view(values), {}, "relative")
    individual = rivals.nvrx(view(values), {}, "individual")
    assert relative.shape == individual.shape == (1, 90, 6)
    for h in (12, 29):
        means = values[1:, :, : (h + 1) * 24].reshape(2, 6, -1, 24).mean(3)
        medians = [np.median(means[..., k - 9 : k + 1], 2) for k in range(9, h + 1)]
        now = medians[-1]
        best = np.max(medians, 0)
        np.testing.assert_allclose(
            relative[0, 3 * h + 2],
            1 - (now / now.max(1, keepdims=True)).mean(0),
            rtol=1e-4,
            atol=1e-6,
        )
        np.testing.assert_allclose(
            individual[0, 3 * h + 2], 1 - (now / best).mean(0), rtol=1e-4, atol=1e-6
        )
    assert relative[0, -1].argmax() == individual[0, -1].argmax() == 2
    assert relative[0, -1, 2] == pytest.approx(0.5, abs=0.03)


def test_ranges_and_networks_are_kept(tmp_path):
    base = Base(
        ("a", "b"), np.array([[0.0, 1], [10, 3], [0, 2]]), {"vae": {"out": np.ones((1, 2))}}
    )
    base.save(tmp_path / "base.npz")
    again = Base.load(tmp_path / "base.npz")
    assert again.metrics == base.metrics and np.array_equal(
        again.vae["vae"]["out"], np.ones((1, 2))
    )
    got = again.scaled(np.array([[[0.0, 5, 10, 30]], [[0.0, 2 * np.sinh(2), np.nan, 1e9]]]))
    want = [[[1 / 3, 1 / 2, 2 / 3, 1]], [[1 / 6, 1 / 2, np.nan, 1]]]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_who_left_or_has_not_come_is_not_there():
    values = job()
    values[:, 4, :200] = np.nan
    there_JN = view(values, [("m1", 1400.0)]).there_JN
    end_J = 1000 + 8 * (np.arange(90) + 1)
    assert (there_JN[:, 4] == (end_J > 1200)).all() and (there_JN[:, 1] == (end_J < 1396)).all()
    assert there_JN[:, [0, 2, 3, 5]].all()


def test_mahalanobis_is_the_length_under_the_learnt_covariance():
    seen = view(job())
    learnt = rivals.learn_covariance([seen], 0, 0)
    y_JND = rivals.apart(seen).astype(float)
    got = rivals.mahalanobis(seen, learnt)
    for j, n in ((0, 0), (40, 3)):
        want = np.sqrt(y_JND[j, n] @ learnt["inverse"] @ y_JND[j, n])
        assert got[0, j, n] == pytest.approx(want, rel=1e-5)
    assert 1.5 < np.median(got) < 3.5  # six numbers of standard deviation 1


def test_change_points_are_those_of_the_full_posterior():
    """Against a sum over all cuts of the past, for every tick."""
    hazard, rng = 1 / 50, RNG(9)
    y_HS = rng.normal(0, 0.02, (50, 3))
    y_HS[30:, 1] += 0.3
    y_HS[25:, 2] += 0.05
    got = rivals.changes(y_HS, hazard, 4)
    assert got[40:, 1].min() > 0.25 and got[40:, 1].max() < 0.35 and got[:33, 1].max() < 0.1
    spread = 1.4826 * np.median(np.abs(np.diff(y_HS, axis=0)), 0) / 2**0.5 + 5e-3
    for s in range(3):
        x = y_HS[:, s] / spread[s]
        segment_HH = [_segments(x[b:]) for b in range(len(x))]  # [b][n]: log density of n values
        before = [0.0]  # log evidence of the first k values, ended by a change
        for k in range(1, len(x) + 1):
            terms = [
                before[b] + segment_HH[b][k - b] + (k - b - 1) * np.log1p(-hazard) + np.log(hazard)
                for b in range(k)
            ]
            before.append(np.logaddexp.reduce(terms))
        for h in range(len(x)):
            n = h + 1
            weights = [
                before[n - run] + (segment_HH[n - run][run] + run * np.log1p(-hazard) if run else 0)
                for run in range(n + 1)
            ]
            run = int(np.argmax(weights))
            begin, want = n - run, 0.0
            if run >= 4 and begin >= 2:
                earlier = x[max(begin - 10, 0) : begin].mean()
                want = abs(x[begin:n].mean() - earlier) * spread[s]
            assert got[h, s] == pytest.approx(want, rel=1e-6, abs=1e-9), (s, h)


def _segments(values):
    """Returns the log density of the first n values as one segment, n = 0, 1, ..."""
    mean, kappa, alpha, beta, total = 0.0, 0.1, 1.0, 1.0, [0.0]
    for v in values:
        square, f = beta * (kappa + 1) / (alpha * kappa), 2 * alpha
        density = gammaln((f + 1) / 2) - gammaln(f / 2) - 0.5 * np.log(np.pi * f * square)
        density -= (f + 1) / 2 * np.log1p((v - mean) ** 2 / f / square)
        total.append(total[-1] + density)
        beta += kappa * (v - mean) ** 2 / (2 * (kappa + 1))
        mean += (v - mean) / (kappa + 1)
        kappa, alpha = kappa + 1, alpha + 0.5
    return total
