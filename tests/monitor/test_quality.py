"""What is named about the metrics of machines, and when a step is a change of unit."""

import dataclasses

import numpy as np
import pytest

from megajax.monitor.samples import Grid, Quality

T0 = 1_700_000_005  # no multiple of ten
MACHINES = tuple(f"m{k}" for k in range(6))


def grid(rng, seconds=300, level=400.0, noise=0.02):
    """Power of six machines, and a share that nobody touches."""
    power_NT = level * (1 + noise * rng.normal(size=(6, seconds)))
    share_NT = rng.uniform(0.4, 0.6, (6, seconds))
    values = np.stack([power_NT, share_NT]).astype(np.float32)
    return Grid(T0, 1, values, MACHINES, ("power", "share"))


def cut(grid_, *places):
    bounds = [0, *places, grid_.values_CNT.shape[2]]
    return [
        dataclasses.replace(grid_, start=grid_.start + a, values_CNT=grid_.values_CNT[:, :, a:b])
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


@pytest.mark.parametrize("factor", [1000.0, 0.001, 0.01, 1024.0, 1e6, 1e-9])
@pytest.mark.parametrize("who", [[2], [0, 4], list(range(6))])
def test_a_change_of_unit_is_named_and_converted(seed, factor, who):
    plain = grid(np.random.default_rng(seed))
    changed = dataclasses.replace(plain, values_CNT=plain.values_CNT.copy())
    changed.values_CNT[0, who, 150:] *= np.float32(factor)
    checked = Quality().check(changed)
    (note,) = checked.notes
    assert note.startswith("power is") and "m0" in note if 0 in who else "m2" in note
    since = int(note.partition("since about ")[2].split()[0])
    assert abs(since - (T0 + 150)) <= 10
    np.testing.assert_allclose(
        checked.values_CNT[:, :, 150 + 41 :], plain.values_CNT[:, :, 150 + 41 :], rtol=1e-5
    )
    np.testing.assert_array_equal(checked.values_CNT[:, :, :150], plain.values_CNT[:, :, :150])
    np.testing.assert_array_equal(checked.values_CNT[1], plain.values_CNT[1])
    np.testing.assert_array_equal(
        changed.values_CNT[0, who, 200],  # the input is left alone
        plain.values_CNT[0, who, 200] * np.float32(factor),
    )


def test_it_does_not_matter_where_time_is_cut_and_a_unit_may_come_back(seed):
    rng = np.random.default_rng(seed)
    uncut = grid(rng, 600)
    uncut.values_CNT[0, 3, 150:400] *= 1000
    once = Quality().check(uncut)
    for places in ([1, 2, 3, 151, 190], sorted(rng.choice(599, 60, replace=False) + 1)):
        quality = Quality()
        parts = [quality.check(part) for part in cut(uncut, *places)]
        joined = np.concatenate([p.values_CNT for p in parts], axis=2)
        np.testing.assert_array_equal(joined, once.values_CNT)
        assert tuple(n for p in parts for n in p.notes) == once.notes
    assert [n.split()[2:5] for n in once.notes] == [
        ["1000", "times", "larger"],
        ["1000", "times", "smaller"],
    ]
    np.testing.assert_array_equal(once.values_CNT[0, 3, 450:], uncut.values_CNT[0, 3, 450:])


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x * 0.1,  # a clock that is throttled
        lambda x: x * 0.015,
        lambda x: x * 0.0,
        lambda x: x * 0 + 4.0 * 3,  # a level that is nobody's, though near a hundredth
        lambda x: x * 30,
        lambda x: x * np.nan,
    ],
)
def test_a_fault_is_no_change_of_unit(seed, fault):
    plain = grid(np.random.default_rng(seed))
    plain.values_CNT[0, 2, 150:] = fault(plain.values_CNT[0, 2, 150:])
    checked = Quality().check(plain)
    assert checked.notes == ()
    np.testing.assert_array_equal(checked.values_CNT, plain.values_CNT)


def test_a_level_that_none_of_the_others_has_is_no_other_unit(seed):
    plain = grid(np.random.default_rng(seed))
    plain.values_CNT[0, 2, :150] *= 2  # it was not among the others before
    plain.values_CNT[0, 2, 150:] *= 0.02
    assert Quality().check(plain).notes == ()


def test_what_is_missing_is_named_once_until_it_is_back(seed):
    uncut = grid(np.random.default_rng(seed), 100)
    uncut.values_CNT[1, :, 20:60] = np.nan
    uncut.values_CNT[:, 4, 40:80] = np.nan
    quality = Quality(["power", "share", "nothing"])
    said = [quality.check(part).notes for part in cut(uncut, 20, 40, 60, 80)]
    gone = "no machine has the metric {} from {} (Unix seconds) on"
    assert said == [
        (gone.format("nothing", T0),),
        (gone.format("share", T0 + 20),),
        (f"machine m4 is silent from {T0 + 40} (Unix seconds) on",),
        (),
        (),
    ]
    fewer = dataclasses.replace(
        uncut, start=T0 + 100, machines=MACHINES[:5], values_CNT=uncut.values_CNT[:, :5]
    )
    assert "machine m5 is silent" in quality.check(fewer).notes[0]
    assert quality.check(fewer).notes == ()


def test_a_job_that_goes_on_after_it_stood_still_changed_no_unit():
    rng = np.random.default_rng(4)
    values = 0.9 + 0.02 * rng.standard_normal((40, 300))
    level = np.exp(rng.normal(0, 0.2, (40, 1)))  # so that some go up by just a hundred times
    values[:, 100:200] = 0.009 * level * (1 + 0.05 * rng.standard_normal((40, 100)))
    values[0] = 0.009 * (1 + 0.05 * rng.standard_normal(300))  # it stands still all the time
    untouched(values)


def test_a_machine_that_stands_still_at_a_hundredth_changed_no_unit():
    rng = np.random.default_rng(5)
    values = 100 + 3 * rng.standard_normal((12, 300))
    values[:3] *= 0.012  # they stand still all the time
    values[7, 100:200] = 1 + 0.2 * rng.standard_normal(100)
    untouched(values)


def test_one_machine_that_shows_a_little_while_all_show_nothing_changed_no_unit():
    rng = np.random.default_rng(6)
    values = 98 + rng.integers(0, 3, (16, 300)).astype(float)
    values[:, 100:200] = 0  # the whole job waits
    values[5, 100:200] = 1
    untouched(values)


def fleet(rng, seconds=900, count=6):
    """Power in tenths of a watt, a share that changes every 15 s, a count that never changes."""
    power_NT = (400 + 8 * rng.normal(size=(count, seconds))).round(1)
    share_NT = rng.uniform(0.4, 0.6, (count, seconds // 15)).repeat(15, axis=1)
    values = np.stack([power_NT, share_NT, np.full((count, seconds), 8.0)]).astype(np.float32)
    names = tuple(f"m{k}" for k in range(count))
    return Grid(T0, 1, values, names, ("power", "share", "gpus"))


def stuck(grid_, *places):
    quality = Quality()
    notes = [n for part in cut(grid_, *places) for n in quality.check(part).notes]
    assert all("have had the same values since" in n for n in notes), notes
    return notes


@pytest.mark.parametrize("who", [[2], [0, 4], list(range(6))])
def test_an_exporter_that_repeats_its_last_values_is_named_once(seed, who):
    uncut = fleet(np.random.default_rng(seed))
    values = uncut.values_CNT
    values[:, who, 300:] = values[:, who, 299:300]
    (note,) = stuck(uncut)
    assert note.startswith(f"all metrics of m{who[0]}") and ("more" in note) == (len(who) > 3)
    since = int(note.partition("since ")[2].split()[0])
    assert since <= T0 + 299 and since >= T0 + 285
    assert stuck(uncut, 7, 150, 299, 420, 421, 600) == [note]  # wherever time is cut
    limit = 300 + (120 if len(who) < 4 else 300)
    early = dataclasses.replace(uncut, values_CNT=values[:, :, : limit - 20])
    assert stuck(early) == []
    again = fleet(np.random.default_rng(seed + 1)).values_CNT[:, :, :600]
    again[:, who, 400:] = again[:, who, 399:400]
    longer = dataclasses.replace(uncut, values_CNT=np.concatenate([values, again], axis=2))
    assert len(stuck(longer)) == (2 if len(who) < 4 else 1)  # it moved meanwhile


def test_what_is_always_the_same_or_seldom_changes_is_no_stuck_exporter(seed):
    plain = fleet(np.random.default_rng(seed))
    values = plain.values_CNT.copy()
    values[1, 3, 200:] = values[1, 3, 200]  # a series that stands still beside one that varies
    assert stuck(dataclasses.replace(plain, values_CNT=values)) == []
    values = plain.values_CNT.copy()
    values[:] = 8.0  # a job of counts
    assert stuck(dataclasses.replace(plain, values_CNT=values)) == []
    values[0] = (np.arange(900) // 250 % 2) * 30.0  # phases of four minutes
    assert stuck(dataclasses.replace(plain, values_CNT=values)) == []
    values[0] = plain.values_CNT[0]
    values[0, :, 300:500] = 100.0  # a job that uses all it can for three minutes
    assert stuck(dataclasses.replace(plain, values_CNT=values)) == []
    values[:, 2, 300:] = np.nan  # silence has a sentence of its own
    notes = Quality().check(dataclasses.replace(plain, values_CNT=values)).notes
    assert [n for n in notes if "same values" in n] == []


def test_samples_every_minute_stand_still_only_after_several_of_them(seed):
    rng = np.random.default_rng(seed)
    values = np.full((1, 6, 3600), np.nan, np.float32)
    values[..., ::60] = rng.normal(100, 5, (1, 6, 60))
    values[0, 1, 1800:] = np.where(np.isnan(values[0, 1, 1800:]), np.nan, values[0, 1, 1740])
    names = tuple(f"m{k}" for k in range(6))
    (note,) = stuck(Grid(0, 1, values, names, ("power",)))
    assert "of m1 have" in note and "since 1740 " in note
    values[0, 1, 1980:] = np.nan
    assert stuck(Grid(0, 1, values[..., :2040], names, ("power",))) == []


def test_machines_that_left_are_forgotten(seed):
    uncut, quality = fleet(np.random.default_rng(seed)), Quality()
    first, second = cut(uncut, 450)
    quality.check(first)
    quality.forget(["m1", "m5", "nobody"])
    stay = [0, 2, 3, 4]
    names = tuple(uncut.machines[k] for k in stay)
    fewer = dataclasses.replace(second, machines=names, values_CNT=second.values_CNT[:, stay])
    assert quality.check(fewer).notes == ()


def untouched(values):
    machines = tuple(f"m{k:02}" for k in range(len(values)))
    checked = Quality().check(Grid(0, 1, values[None].astype(np.float32), machines, ("x",)))
    assert checked.notes == ()
    np.testing.assert_array_equal(checked.values_CNT[0], values.astype(np.float32))


def test_bursts_of_a_rate_that_is_never_steady_change_no_unit():
    rng = np.random.default_rng(7)
    rate = 12 * np.exp(rng.normal(0, 0.5, (64, 1)))  # packets a second
    rate[5] = 12
    values = rng.poisson(rate, (64, 300)).astype(float)
    values[5, 150:] = rng.poisson(12, 150) * 100.0
    untouched(values)
    values = np.array([[0.49]] * 4) * (1 + 0.05 * rng.standard_normal((4, 300)))
    values[:, 128:134] *= 0.01  # a job that stops now and then, in its own units
    values[:, 150:] *= 0.01
    untouched(values)
