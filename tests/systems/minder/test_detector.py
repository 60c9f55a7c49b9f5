"""The detector on small invented jobs: whom it names, when, and whom it leaves alone.

The jobs are made here and not by the fleet simulator, so that a mistake which both share shows.
Legend: C metrics, N machines, T seconds.
"""

import dataclasses
import gzip

import numpy as np
import pytest

from experiments.reports import minder_rivals as rivals
from experiments.reports import minder_watch
from megajax.core.errors import UserError
from megajax.monitor.samples import Grid, Samples
from megajax.systems.minder import Detector, Settings, features, fit
from megajax.systems.minder.judge import SUSPECTED

BEGIN = 1_700_000_000
METRICS = ("cpu_usage", "gpu_duty_cycle", "queue_length")  # the last one is nobody's standard
LEVEL, NOISE = np.array([30.0, 80.0, 500.0]), np.array([2.0, 3.0, 60.0])


def job(machines=8, seconds=1500, seed=0, faults=(), stall_every=600, missing=0.02):
    """faults: (metric, machine, from, to, share of the level that is added)."""
    rng = np.random.default_rng(seed)
    shape = (len(METRICS), machines, seconds)
    t_T = np.arange(seconds)
    together_T = 1 + 0.1 * np.sin(2 * np.pi * t_T / 7)  # steps
    together_T[t_T % stall_every < 45] *= 0.3  # the whole job waits
    offset_CN1 = 0.05 * rng.standard_normal(shape[:2])[..., None]
    values = LEVEL[:, None, None] * (together_T + offset_CN1)
    values += NOISE[:, None, None] * rng.standard_normal(shape)
    for metric, machine, start, end, share in faults:
        values[metric, machine, start:end] += share * LEVEL[metric]
    values[rng.random(shape) < missing] = np.nan
    names = tuple(f"m{i}" for i in range(machines))
    return Grid(BEGIN, 1, values.astype(np.float32), names, METRICS)


def cut(grid, start, end, machines=None):
    rows = range(len(grid.machines)) if machines is None else machines
    values = grid.values_CNT[:, list(rows), start:end]
    names = tuple(grid.machines[i] for i in rows)
    return Grid(grid.start + start, 1, values, names, grid.metrics)


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    """The jobs here have about ten machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "MACHINES", 12)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("minder") / "model.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "BATCH", 64)  # an eighth: more steps in a third of the time
        sources = [job(8, 1800, seed=1), job(12, 1500, seed=2)]
        detector = Detector.fit(sources, seed=3, steps=600)
    assert detector.profile.report["learnt"] > 0.9
    detector.save(path)
    return path


def alerts(model, grid, **kw):
    return Detector.load(model, **kw).update(grid)


def test_a_healthy_job_and_short_disturbances_raise_nothing(model):
    assert alerts(model, job(seed=5, seconds=2400)) == []
    for metric in range(3):
        faults = [(metric, 2, 300, 330, -0.9), (metric, 2, 900, 1050, -0.9)]
        assert alerts(model, job(seed=6, faults=faults)) == [], metric
    twice = [(1, 2, 700, 850, -0.9), (1, 2, 910, 1060, -0.9)]
    assert alerts(model, job(seed=6, faults=twice)) == []


def test_a_hole_behind_a_short_disturbance_does_not_prolong_it(model):
    grid = job(seed=6, faults=[(1, 2, 840, 990, -0.9)])
    values = grid.values_CNT.copy()
    values[:, 2, 991:1070] = np.nan
    assert alerts(model, dataclasses.replace(grid, values_CNT=values)) == []
    values = job(seed=6, faults=[(1, 2, 840, 1300, -0.9)]).values_CNT.copy()
    values[:, 2, 940:1000] = np.nan  # one that lasts longer is none the less seen through a hole
    named = alerts(model, dataclasses.replace(grid, values_CNT=values))
    assert [a.machine for a in named] == ["m2"] and named[0].at <= BEGIN + 840 + 330


def test_a_continuity_of_a_quarter_of_an_hour(model):
    grid = job(seed=7, seconds=3000, faults=[(0, 1, 1000, 1700, 1.0), (1, 6, 1500, 2700, -0.6)])
    named = alerts(model, grid, settings=Settings(continuity_s=900.0))
    assert [a.machine for a in named] == ["m6"]
    assert 900 - 24 <= named[0].at - (BEGIN + 1500) <= 1000


def test_faults_in_the_sources_do_not_set_the_limits():
    healthy_GX = np.abs(np.random.default_rng(0).standard_normal((7, 600)))
    faulty_GX = healthy_GX.copy()
    faulty_GX[:, :30] = 15.0  # of 18 jobs of 33 machines four have a fault that drags others along
    assert fit._tail(faulty_GX, 6) == pytest.approx(fit._tail(healthy_GX, 6), rel=0.02)
    wide_GX = 4 * healthy_GX  # all machines vary more
    assert (fit._tail(wide_GX, 6)[:3] > 1.5 * fit._tail(healthy_GX, 6)[:3]).all()


@pytest.mark.parametrize(("machines", "metric"), [(4, 0), (8, 1), (40, 2)])
def test_ten_minutes_are_named_once_with_their_onset(model, machines, metric):
    fault = [(metric, 1, 800, 1400, -0.5)]
    named = alerts(model, job(machines, 1700, seed=7, faults=fault, stall_every=700))
    assert [(a.machine, a.metric) for a in named] == [("m1", METRICS[metric])]
    alert = named[0]
    assert abs(alert.since - (BEGIN + 800)) <= 60 and alert.score >= 1
    assert 240 - 24 <= alert.at - (BEGIN + 800) <= 330  # whole ticks of 24 s
    assert alert.deviations[0][0] == METRICS[metric] and alert.deviations[0][1] < 0
    assert "m1" in alert.message and METRICS[metric] in alert.message


@pytest.mark.parametrize("part", ["no-residual", "no-vae", "no-past"])
def test_the_detector_without_one_of_its_parts(model, part):
    with rivals.changed(rivals.VARIANTS[part], model, fits=False):
        detector = Detector.load(model)
        detector.update(job(seconds=400))
    learnt, scores_FNH = detector._tracks.offset_FN, detector._judge.scores_FNH
    residual = scores_FNH[len(METRICS) :]
    assert np.isfinite(scores_FNH).any()
    assert bool(learnt.any()) == (part != "no-past")
    assert bool(residual[np.isfinite(residual)].any()) == (part == "no-past")


def test_who_is_named_and_how_far_each_machine_is_can_be_asked(model):
    grid = job(seed=7, seconds=2400, faults=[(0, 1, 800, 1400, -0.5)], stall_every=700)
    detector, rows = Detector.load(model), []
    assert detector.scores == detector.named == {}
    for at in range(0, 2400, 24):  # a tick each
        detector.update(cut(grid, at, at + 24))
        rows.append((at + 24, detector.scores, detector.named))
    high = [end for end, scores, _ in rows if scores.get("m1", 0) >= 1]
    named = [end for end, _, machines in rows if set(machines) == {"m1"}]
    assert set(rows[-1][1]) == set(grid.machines)
    assert 1000 <= high[0] <= 1150 and abs(high[-1] - 1400) <= 120
    differs = [end for end, scores, _ in rows if scores.get("m1", 0) > SUSPECTED]
    assert named[0] == high[0] and abs(named[-1] - (differs[-1] + 600)) <= 48
    assert rows[-1][2] == {} and all(set(machines) <= {"m1"} for *_, machines in rows)
    until = next(machines["m1"] for end, _, machines in rows if end == 1200)
    assert abs(until - (BEGIN + 1200 + 600)) <= 24


def test_a_fault_from_the_first_second_is_found(model):
    named = alerts(model, job(seed=8, seconds=900, faults=[(1, 3, 0, 900, -0.6)]))
    assert [a.machine for a in named] == ["m3"]


def test_a_machine_that_drags_others_along_is_named(model):
    """Were the others as far, the job would have changed and nobody be named."""

    def faults(share):
        return [(1, m, 700, 1400, -0.5 if m == 1 else -share) for m in range(1, 5)]

    named = alerts(model, job(9, 1500, seed=10, faults=faults(0.2)))
    assert [a.machine for a in named] == ["m1"]
    assert alerts(model, job(9, 1500, seed=10, faults=faults(0.45))) == []


@pytest.mark.parametrize("followers", [2, 3])  # three and the first are too many for one fault
def test_who_moved_first_is_named_though_others_follow_as_far(model, followers):
    def values(delay):
        faults = [(1, 3, 700, 1400, -0.45)]
        faults += [(1, m, 700 + delay, 1400, -0.5) for m in range(4, 4 + followers)]
        return job(9, 1500, seed=10, faults=faults)

    assert [a.machine for a in alerts(model, values(25))] == ["m3"]
    if followers == 3:
        assert alerts(model, values(0)) == []


def test_noise_that_grows_on_one_machine_is_named_and_on_all_is_not(model):
    grid = job(8, 1500, seed=21)
    wild_NT = NOISE[0] * np.random.default_rng(3).standard_normal((8, 1500))
    wild_NT *= np.clip((np.arange(1500) - 600) / 150, 0, 1) * 4  # to four times the noise
    one, everywhere = grid.values_CNT.copy(), grid.values_CNT.copy()
    one[0, 5] += wild_NT[5]
    everywhere[0] += wild_NT
    (alert,) = alerts(model, dataclasses.replace(grid, values_CNT=one))
    assert (alert.machine, alert.metric, alert.kind) == ("m5", "cpu_usage", "unsteady")
    assert 600 - 24 <= alert.since - BEGIN <= 750 and alert.at - alert.since <= 360
    assert "cpu_usage varies more than the others'" in alert.message
    assert alerts(model, dataclasses.replace(grid, values_CNT=everywhere)) == []


def test_a_model_of_a_version_without_spread_and_lag_says_so_once(model, tmp_path):
    older = tmp_path / "older.npz"
    dataclasses.replace(Detector.load(model).profile, dynamics=None).save(older)
    detector, grid = Detector.load(older), job(8, 600, seed=21)
    said = [detector.update(cut(grid, at, at + 300)) or detector.notes for at in (0, 300)]
    assert ["neither spread nor lag" in " ".join(notes) for notes in said] == [True, False]
    assert Detector.load(model).update(grid) == []


def test_a_machine_a_second_behind_is_named_and_one_that_has_always_been_is_not(model):
    def behind(since, to):
        grid = job(8, 1500, seed=22, missing=0.0, stall_every=10_000)
        course_T = 1 + 0.1 * np.sin(2 * np.pi * (np.arange(1500) - 1) / 7)
        late_T = course_T - (1 + 0.1 * np.sin(2 * np.pi * np.arange(1500) / 7))
        values = grid.values_CNT.copy()
        values[:, 6, since:to] += (LEVEL[:, None] * late_T)[:, since:to]
        return dataclasses.replace(grid, values_CNT=values)

    (alert,) = alerts(model, behind(700, 1500))
    assert (alert.machine, alert.kind) == ("m6", "late")
    assert alert.lag_s == pytest.approx(1.0, abs=0.3) and "s behind the others" in alert.message
    assert abs(alert.since - (BEGIN + 700)) <= 48
    assert alerts(model, behind(700, 880)) == []  # for three minutes


def test_two_machines_at_different_times_are_both_named(model):
    faults = [(0, 1, 600, 1300, 1.0), (1, 6, 1000, 1700, -0.6)]
    named = alerts(model, job(16, 1800, seed=9, faults=faults))
    assert [a.machine for a in named] == ["m1", "m6"]


@pytest.mark.parametrize("seed", [0, 2])
def test_windows_may_be_cut_anywhere(model, seed):
    faults = [(0, 1, 600, 1300, 1.0), (1, 6, 1000, 1700, -0.6)]
    grid = job(16, 1800, seed=9, faults=faults)
    rng = np.random.default_rng(seed)
    places = sorted({0, 1800, *rng.integers(1, 1800, (3, 0, 200)[seed]).tolist()})
    detector, named = Detector.load(model), []
    for a, b in zip(places, places[1:], strict=False):
        named += detector.update(cut(grid, a, b))
    assert named == alerts(model, grid)


def test_neither_order_nor_names_of_machines_matter(model):
    grid = job(8, 1700, seed=7, faults=[(1, 1, 800, 1400, -0.5)])
    (first,) = alerts(model, grid)
    order = np.random.default_rng(0).permutation(8)
    names = tuple(f"other-{i}" for i in order)
    moved = dataclasses.replace(grid, values_CNT=grid.values_CNT[:, order], machines=names)
    (second,) = alerts(model, moved)
    assert second.machine == "other-1" and second.since == first.since
    assert second.score == pytest.approx(first.score, rel=1e-4)


@pytest.mark.slow  # three trainings
def test_unit_and_zero_point_of_a_metric_do_not_matter():
    answers = []
    for scale, shift in ((1.0, 0.0), (1e6, 0.0), (0.01, 4.0)):

        def other(grid, scale=scale, shift=shift):
            return dataclasses.replace(grid, values_CNT=(grid.values_CNT * scale + shift))

        fault = [(1, 1, 800, 1400, -0.5)]
        detector = Detector.fit([other(job(8, 900, seed=1))], steps=400)
        answers.append(detector.update(other(job(8, 1500, seed=7, faults=fault))))
    assert [[a.machine for a in f] for f in answers] == [["m1"]] * 3
    assert len({f[0].since for f in answers}) == 1
    assert max(f[0].score for f in answers) < 1.05 * min(f[0].score for f in answers)


def test_what_all_machines_do_is_no_fault(model):
    grid = job(8, 1800, seed=11)
    slow = grid.values_CNT.copy()
    slow[:, :, 600:1400] *= 0.4
    assert alerts(model, dataclasses.replace(grid, values_CNT=slow)) == []
    same = np.repeat(grid.values_CNT[:, :1], 8, 1)
    assert alerts(model, dataclasses.replace(grid, values_CNT=same)) == []
    constant = np.full_like(grid.values_CNT, 50.0)
    assert alerts(model, dataclasses.replace(grid, values_CNT=constant)) == []


def test_a_machine_at_the_end_of_the_scale_stays_above_the_others_when_they_slow(model):
    """Its 100 % hid that it is above them; nothing happened to it when the job slowed."""
    grid = job(8, 1500, seed=18, stall_every=10_000)
    duty_NT = grid.values_CNT[1]
    duty_NT[:] = 97 + np.random.default_rng(1).normal(0, 1.0, duty_NT.shape)
    duty_NT[3] += 25
    duty_NT[:, 700:] -= 20
    duty_NT[:] = np.minimum(np.rint(duty_NT), 100)
    told = {}
    for top in (np.inf, 100.0):
        detector = Detector.load(model)
        top_C = np.array([np.inf, top, np.inf], np.float32)
        told[top] = Detector(dataclasses.replace(detector.profile, top_C=top_C)).update(grid)
    assert [a.machine for a in told[np.inf]] == ["m3"]
    assert told[100.0] == []


def test_three_machines_are_refused_and_nothing_is_lost(model):
    detector, grid = Detector.load(model), job(8, 1200, seed=12, faults=[(1, 1, 500, 1200, -0.6)])
    with pytest.raises(UserError, match="3 machines cannot be judged: at least 4"):
        detector.update(cut(grid, 0, 60, range(3)))
    assert [a.machine for a in detector.update(cut(grid, 60, 1200))] == ["m1"]


def test_a_sample_that_is_lost_in_the_first_second_refuses_no_job(model):
    detector, grid = Detector.load(model), job(4, 60, seed=12)
    assert detector.update(cut(grid, 0, 1, range(3))) == detector.update(cut(grid, 1, 60)) == []


def test_who_joins_late_is_no_fault_and_is_judged_later(model):
    grid = job(9, 2400, seed=13, faults=[(1, 8, 700, 950, -0.8), (1, 8, 1500, 2300, -0.5)])
    values = grid.values_CNT.copy()
    values[:, 8, :700] = np.nan
    named = alerts(model, dataclasses.replace(grid, values_CNT=values))
    assert [a.machine for a in named] == ["m8"]
    assert abs(named[0].since - (BEGIN + 1500)) <= 60


def test_silence_is_an_alert_unless_it_was_declared(model):
    grid = job(8, 1500, seed=14)
    values = grid.values_CNT.copy()
    values[:, 5, 700:] = np.nan
    grid = dataclasses.replace(grid, values_CNT=values)
    (alert,) = alerts(model, grid)
    assert (alert.machine, alert.kind) == ("m5", "silent")
    assert abs(alert.since - (BEGIN + 700)) <= 5 and 240 <= alert.at - (BEGIN + 700) <= 270
    detector = Detector.load(model)
    assert detector.update(cut(grid, 0, 720)) == []
    detector.leave("m5")
    assert detector.update(cut(grid, 720, 1500, [0, 1, 2, 3, 4, 6, 7])) == []


def test_a_window_without_a_row_is_named_each_time(model, tmp_path):
    detector, grid = Detector.load(model), job(8, 1000, seed=14)
    empty = Samples.of([], BEGIN, BEGIN + 60)
    with pytest.raises(UserError, match=f"no machine has a sample from {BEGIN} to {BEGIN + 60}"):
        detector.update(empty)  # nothing is known of the job yet
    detector = Detector.load(model)
    detector.update(cut(grid, 0, 600))
    for start in (600, 660):
        begin, end = BEGIN + start, BEGIN + start + 60
        assert detector.update(Samples.of([], begin, end)) == []
        (note,) = detector.notes
        assert note.startswith(f"no machine has a sample from {begin} to {end}")
    path = tmp_path / "none.csv"
    path.write_text("timestamp,machine,metric,value\n")
    for window in (path, Samples.of([])):  # neither a row nor an interval
        with pytest.raises(UserError, match="neither a row nor an interval.*nothing was judged"):
            detector.update(window)
    detector.update(cut(grid, 720, 1000))  # nothing was lost
    assert not any("no machine has a sample" in note for note in detector.notes)


def test_one_series_that_ends_is_an_alert_and_one_that_ends_everywhere_is_none(model):
    grid = job(8, 1500, seed=15)
    one, everywhere = grid.values_CNT.copy(), grid.values_CNT.copy()
    one[1, 2, 600:] = np.nan
    everywhere[1, :, 600:] = np.nan
    (alert,) = alerts(model, dataclasses.replace(grid, values_CNT=one))
    assert (alert.machine, alert.metric, alert.kind) == ("m2", "gpu_duty_cycle", "vanished")
    assert alerts(model, dataclasses.replace(grid, values_CNT=everywhere)) == []


def test_a_change_of_unit_is_named_and_the_rest_is_judged(model):
    grid = job(8, 1700, seed=16, faults=[(0, 4, 800, 1600, 1.0)])
    values = grid.values_CNT.copy()
    values[2, :, 700:] *= 1000
    detector = Detector.load(model)
    named = detector.update(dataclasses.replace(grid, values_CNT=values))
    assert [a.machine for a in named] == ["m4"]
    assert any("queue_length" in n and "change of unit" in n for n in detector.notes)


def test_files_out_of_order_with_values_that_are_none(model, tmp_path):
    grid = job(6, 1300, seed=17, faults=[(0, 2, 500, 1300, 1.0)])
    rows = [
        f"{grid.start + t},{machine},{metric},{grid.values_CNT[c, n, t]}"
        for c, metric in enumerate(grid.metrics)
        for n, machine in enumerate(grid.machines)
        for t in range(1300)
        if np.isfinite(grid.values_CNT[c, n, t])
    ]
    np.random.default_rng(0).shuffle(rows)
    rows += [f"{grid.start + 10},m1,cpu_usage,NaN", "99,m1,cpu_usage,30"]
    path = tmp_path / "window.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("timestamp,machine,metric,value\n" + "\n".join(rows) + "\n")
    detector = Detector.load(model)
    named = detector.update(path)
    assert named == alerts(model, grid) and [a.machine for a in named] == ["m2"]
    assert any("days away" in n for n in detector.notes)


def test_models_and_windows_that_do_not_fit_are_named(model, tmp_path):
    grid = job(8, 900, seed=18)
    strange = dataclasses.replace(grid, metrics=("a", "b", "c"))
    with pytest.raises(UserError, match="none of the window's metrics"):
        alerts(model, strange)
    detector = Detector.load(model)
    partly = dataclasses.replace(grid, metrics=("a", "cpu_usage", "gpu_duty_cycle"))
    assert detector.update(partly) == []
    assert any("not fitted on: a" in note for note in detector.notes)
    damaged = bytearray(model.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    (tmp_path / "bad.npz").write_bytes(damaged)
    for path in (tmp_path / "bad.npz", tmp_path / "none.npz"):
        with pytest.raises(UserError, match="model="):
            Detector.load(path)
    with pytest.raises(UserError, match=r"judges 'queue_length', which simulated jobs.*--model"):
        minder_watch.measure(minder_watch.TimeConfig(), model, str(tmp_path))
    with pytest.raises(UserError, match="at least 4 machines and 600 s"):
        Detector.fit([job(3, 900)])
    with pytest.raises(UserError, match="nothing to fit"):
        Detector.fit([])


def test_a_continuity_that_no_source_lasts_for_is_refused():
    long = Settings(continuity_s=600.0)  # whose longer span is 37 ticks, 888 s
    with pytest.raises(UserError, match=r"at least 912 s.*25 ticks.*--continuity_s"):
        Detector.fit([job(4, 624), job(4, 600)], settings=long)
    first = fit._long_enough  # a source of just the length has limits above 0
    first(37, long)
    with pytest.raises(UserError):
        first(36, long)


@pytest.mark.slow  # two trainings, and a half
def test_a_training_that_was_stopped_goes_on(tmp_path):
    sources = [job(8, 900, seed=1)]
    once = Detector.fit(sources, seed=4, steps=400)
    folder = tmp_path / "training"

    def stop(message):
        if "step 200/" in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Detector.fit(sources, seed=4, steps=400, folder=folder, tell=stop)
    again = Detector.fit(sources, seed=4, steps=400, folder=folder)
    grid = job(8, 1500, seed=7, faults=[(1, 1, 600, 1400, -0.5)])
    assert once.update(grid) == again.update(grid) != []
