"""The three other fleets: a scene is a function of its arguments, and its fault is in the data."""

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor.fleet import unlike

METRICS = sorted(unlike.METRICS)


def pair(background, kind):
    """Returns (scene, metric -> values_NT, row of the fault, second of its onset)."""
    one = unlike.scene(background, 9, 5, kind, seconds=900, restless=0.0)
    (fault,) = one.faults
    row, start = one.grid.machines.index(fault.machine), int(fault.start - unlike.EPOCH)
    return one, dict(zip(METRICS, one.grid.values_CNT, strict=True)), row, start


@pytest.mark.parametrize("background", unlike.BACKGROUNDS)
def test_a_scene_depends_on_its_arguments_alone(background):
    first, again = (unlike.scene(background, 6, 3, "level", seconds=300) for _ in range(2))
    np.testing.assert_array_equal(first.grid.values_CNT, again.grid.values_CNT)
    assert first.faults == again.faults and first.harmless == again.harmless
    other = unlike.scene(background, 6, 4, "level", seconds=300)
    assert not np.array_equal(first.grid.values_CNT, other.grid.values_CNT, equal_nan=True)
    assert first.grid.metrics == tuple(METRICS) and not unlike.scene(background, 6, 3).faults


@pytest.mark.parametrize("background", unlike.BACKGROUNDS)
def test_noise_grows_and_levels_stay(background):
    _, values, row, start = pair(background, "spread")
    for metric in (unlike.POWER, unlike.CPU):
        measured_T = np.isfinite(values[metric][row])
        others_NT = np.delete(values[metric], row, 0)[:, measured_T]
        value_T, course_T = values[metric][row, measured_T], np.nanmean(others_NT, 0)
        at_T = np.flatnonzero(measured_T)
        noise, level = [], []
        for part_T in (at_T < start, at_T >= start + 240):
            line = np.polyfit(course_T[part_T], value_T[part_T], 1)
            noise.append(np.std(value_T[part_T] - np.polyval(line, course_T[part_T])))
            level.append(np.mean(value_T[part_T]) - np.mean(course_T[part_T]))
        assert noise[1] > 1.3 * noise[0], metric
        assert abs(level[1] - level[0]) < 0.5 * noise[0] + 0.05 * np.mean(value_T), metric


@pytest.mark.parametrize("background", unlike.BACKGROUNDS)
def test_a_machine_that_lags_is_about_a_second_behind(background):
    """By the shift in whole seconds with the largest correlation, over all of the time."""
    _, values, row, start = pair(background, "lag")
    value_NT = np.nan_to_num(values[unlike.NVLINK], nan=float(np.nanmean(values[unlike.NVLINK])))
    course_T = np.median(np.delete(value_NT, row, 0), 0)

    def best(part):
        return max(
            range(-3, 4),
            key=lambda s: np.corrcoef(value_NT[row, part], np.roll(course_T, s)[part])[0, 1],
        )

    assert 1 <= best(slice(start, 890)) - best(slice(5, start)) <= 2


@pytest.mark.parametrize("background", unlike.BACKGROUNDS)
def test_the_neighbours_of_a_fault_follow_later(background):
    one, values, row, start = pair(background, "order")
    (fault,) = one.faults
    assert fault.followers and all(delay >= 6 for _, delay in fault.followers)
    link_NT = values[unlike.NVLINK]
    others = [
        n
        for n, m in enumerate(one.grid.machines)
        if m not in {fault.machine, *(f for f, _ in fault.followers)}
    ]

    def share(n, part):
        return np.nanmean(link_NT[n, part]) / np.nanmean(link_NT[others][:, part])

    for name, delay in ((fault.machine, 0.0), *fault.followers):
        n, at = one.grid.machines.index(name), start + int(delay)
        assert share(n, slice(at, None)) < 0.9 * share(n, slice(0, start))


def test_unknown_fleets_and_faults_are_refused():
    with pytest.raises(UserError, match="background='x' must be one of"):
        unlike.scene("x", 8, 0)
    with pytest.raises(UserError, match="kind='x' must be one of"):
        unlike.scene("counters", 8, 0, "x")  # type: ignore[arg-type]
