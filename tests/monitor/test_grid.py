"""Samples and the grid of seconds, beside a brute force over single cells."""

import itertools
import math
import statistics

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor.samples import Samples, concat, to_grid

T0 = 1_700_000_000


def brute(rows, step_s=1, start=None, end=None):
    """{(metric, machine): list of a value or None a cell}, by its definition."""
    rows = [r for r in rows if math.isfinite(r[0])]
    first = math.floor((min(r[0] for r in rows) if start is None else start) / step_s)
    last = math.floor(max(r[0] for r in rows) / step_s) + 1 if end is None else -(-end // step_s)
    lists_of = {}
    for metric in {r[2] for r in rows}:
        cells, gaps = {}, []
        for machine in {r[1] for r in rows}:
            series = [r for r in rows if r[1] == machine and r[2] == metric and math.isfinite(r[3])]
            lists = [
                [r[3] for r in series if math.floor(r[0] / step_s) == t]
                for t in range(int(first), int(last))
            ]
            cells[machine] = [statistics.fmean(x) if x else None for x in lists]
            at = [t for t, x in enumerate(lists) if x]
            gaps += [b - a for a, b in itertools.pairwise(at)]
        k = max(1, round(statistics.median(gaps))) if gaps else 1
        for machine, values in cells.items():
            held = list(values)
            for t in range(len(values)):
                near = [values[u] for u in range(t, max(-1, t - k), -1) if values[u] is not None]
                held[t] = near[0] if near else None
            lists_of[metric, machine] = held
    return lists_of


def random_rows(rng, period, machines=5, metrics=3, seconds=60):
    """Jittered samples of some period in seconds, with holes, doubles and values that are none."""
    rows = []
    for n in range(machines):
        for c in range(metrics):
            for t in np.arange(rng.uniform(0, period), seconds, period):
                if rng.random() < 0.2:
                    continue
                value = rng.choice([math.nan, math.inf, rng.normal()], p=[0.05, 0.05, 0.9])
                rows.append((T0 + t + rng.uniform(-0.2, 0.2), f"m{n}", f"c{c}", float(value)))
    rng.shuffle(rows)
    return [(float(a), str(b), str(c), float(d)) for a, b, c, d in rows]


@pytest.mark.parametrize("period", [0.3, 1.0, 2.7, 15.0])
@pytest.mark.parametrize("step_s", [1, 5])
def test_the_grid_is_that_of_brute_force(period, step_s, seed):
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, period)
    grid = to_grid(Samples.of(rows), step_s)
    expected = brute(rows, step_s)
    assert grid.metrics == ("c0", "c1", "c2") and len(grid.machines) == 5
    assert grid.start % step_s == 0 and grid.values_CNT.dtype == np.float32
    for (metric, machine), values in expected.items():
        values_T = grid.values_CNT[grid.metrics.index(metric), grid.machines.index(machine)]
        expected_T = np.array([math.nan if v is None else v for v in values], np.float32)
        np.testing.assert_allclose(values_T, expected_T, rtol=1e-6)
    assert np.isnan(grid.values_CNT).any()  # else nothing was said about holes


def test_the_order_of_rows_and_of_names_is_irrelevant(seed):
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, 1.0)
    one = to_grid(Samples.of(rows))
    late = concat([Samples.of(rows[k::3]) for k in (2, 0, 1)])
    mixed = to_grid(late)
    np.testing.assert_allclose(one.values_CNT, mixed.values_CNT, rtol=1e-6)
    assert (one.machines, one.metrics, one.start) == (mixed.machines, mixed.metrics, mixed.start)
    back = Samples(
        late.time_N,
        4 - late.machine_N,
        2 - late.metric_N,
        late.value_N,
        late.machines[::-1],
        late.metrics[::-1],
    )
    np.testing.assert_array_equal(to_grid(back).values_CNT, mixed.values_CNT)
    assert to_grid(back).machines == mixed.machines == ("m0", "m1", "m2", "m3", "m4")
    assert sorted(map(str, late.rows())) == sorted(map(str, rows))


def test_a_series_that_stops_is_a_hole_to_the_end():
    rows = [(T0 + t, m, "x", 1.0) for t in range(60) for m in "ab" if m == "a" or t < 20]
    grid = to_grid(Samples.of(rows))
    assert np.isnan(grid.values_CNT[0, 1, 20:]).all() and not np.isnan(grid.values_CNT[0, 0]).any()
    slow = to_grid(Samples.of([r for r in rows if (r[0] - T0) % 10 == 0]))
    assert np.isnan(slow.values_CNT[0, 1, 20:]).all()
    assert not np.isnan(slow.values_CNT[0, 1, :20]).any()


def test_the_interval_that_was_asked_for_is_kept_and_what_lies_outside_is_named():
    rows = [(T0 + t, "a", "x", 1.0) for t in range(5, 8)]
    rows += [(T0 + 3600.0, "wrong clock", "x", 1.0), (math.nan, "a", "x", 1.0)]
    grid = to_grid(Samples.of(rows, start=T0 + 0.5, end=T0 + 9.5))
    assert (grid.start, grid.end) == (T0, T0 + 10)
    assert np.isnan(grid.values_CNT[0, 0]).tolist() == [True] * 5 + [False] * 3 + [True] * 2
    assert "wrong clock" in grid.notes[0] and "2 rows" in grid.notes[0]
    assert grid.machines == ("a", "wrong clock")  # it is a machine all the same, and silent


def test_a_known_period_is_held_in_a_window_that_is_too_short_to_see_it():
    short = Samples.of([(T0 + 1, "a", "x", 3.0)], start=T0, end=T0 + 8)
    assert np.isfinite(to_grid(short).values_CNT).sum() == 1
    held = to_grid(short, period_s={"x": 4.0}).values_CNT[0, 0]
    np.testing.assert_array_equal(held, [np.nan, 3, 3, 3, 3, np.nan, np.nan, np.nan])


def test_nothing_gives_an_empty_grid():
    grid = to_grid(Samples.of([]))
    assert grid.values_CNT.shape == (0, 0, 0)
    assert to_grid(Samples.of([], start=T0, end=T0 + 4)).end == T0 + 4
    assert concat([]).machines == ()


def test_a_wrong_timestamp_does_not_take_all_memory():
    rows = [(T0 + t, "a", "x", 1.0) for t in range(5)]
    with pytest.raises(UserError, match="from 0 to 1700000004"):
        to_grid(Samples.of([*rows, (0.0, "b", "x", 1.0)]))
    with pytest.raises(UserError, match="step_s=0"):
        to_grid(Samples.of(rows), 0)


def test_rows_of_unknown_names_are_refused():
    with pytest.raises(ValueError, match="outside of 1"):
        Samples([0.0], [1], [0], [0.0], ("a",), ("x",))  # type: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="twice"):
        Samples([0.0], [1], [0], [0.0], ("a", "a"), ("x",))  # type: ignore[bad-argument-type]
