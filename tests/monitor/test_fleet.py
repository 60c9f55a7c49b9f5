"""The simulated fleet: the same numbers whatever the cut, roles, faults and their spread.

Expected values are computed here from the definitions, with no code of the simulator, except where
two runs of it must agree. Legend: C metrics, N machines, T seconds.
"""

import subprocess
import sys
import zlib

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor.fleet import (
    KINDS,
    METRICS,
    MIXES,
    Disturbance,
    Fault,
    Fleet,
    Move,
    Setting,
    cases,
    draw_fault,
    roles,
)
from megajax.monitor.fleet.faults import draw_kind
from megajax.monitor.fleet.roles import BINS, draw_layout, quiet, step_profile
from megajax.monitor.sources.convert import MINDER

BUSY = Setting(jitters=3.0, job_events=20.0, gaps=3.0, checkpoint_every_s=200, evaluate_every_s=500)


def faulty(machines: int = 16, kind: str = "pcie_downgrading", seed: int = 3, **changes) -> Fleet:
    """A fleet with one fault, 10 minutes after the start, for 10 minutes."""
    empty = Fleet(machines, seed, **changes)
    rng = np.random.default_rng(seed)
    fault = draw_fault(rng, kind, empty.layout, empty.start + 600.5, empty.start + 1200)
    return Fleet(machines, seed, faults=(fault,), **changes)


def test_any_cut_gives_the_same_bits():
    """Also across minutes, hours and the halt, backwards, and with a fresh object each time."""
    start = 1_700_000_000 // 3600 * 3600 + 3000  # the hour ends 10 minutes later
    make = lambda: faulty(setting=BUSY, start=start)  # noqa: E731
    whole_CNT = make().read(start, start + 1500).values_CNT
    cuts = [0, 1, 2, 60, 61, 119, 333, 599, 600, 601, 1199, 1200, 1447, 1500]
    pieces = list(zip(cuts[:-1], cuts[1:], strict=True))
    reused = make()
    for low, high in pieces[::-1]:
        for fleet in (reused, make()) if high - low < 400 else (reused,):
            part_CNT = fleet.read(start + low, start + high).values_CNT
            assert np.array_equal(part_CNT, whole_CNT[:, :, low:high], equal_nan=True)


def test_a_later_read_does_not_depend_on_earlier_ones():
    fleet, other = Fleet(8, 5, setting=BUSY), Fleet(8, 5, setting=BUSY)
    late = fleet.start + 5 * 3600
    for hours in (0, 3, 1):
        fleet.read(fleet.start + hours * 3600, fleet.start + hours * 3600 + 5)
    a, b = (f.read(late, late + 90).values_CNT for f in (fleet, other))
    assert np.array_equal(a, b, equal_nan=True)


def test_a_metric_does_not_depend_on_the_others():
    alone = Fleet(8, 1, metrics=("cpu_usage",)).read(1_700_000_000, 1_700_000_100)
    all_of_them = Fleet(8, 1, metrics=tuple(METRICS)).read(1_700_000_000, 1_700_000_100)
    at = all_of_them.metrics.index("cpu_usage")
    assert np.array_equal(alone.values_CNT[0], all_of_them.values_CNT[at], equal_nan=True)


def test_another_process_gives_the_same_bits():
    """No hash of a string and no order of a set is in it."""
    code = (
        "import zlib; from megajax.monitor.fleet import cases\n"
        "for case in cases(2, (8, 5), 7, split='held_out', healthy=0):\n"
        "    print(zlib.crc32(case.read().values_CNT.tobytes()), case.faults[0].machine)\n"
    )
    run = [sys.executable, "-c", code]
    there = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    expected: list[str] = []
    for case in cases(2, (8, 5), 7, split="held_out", healthy=0):
        expected += [str(zlib.crc32(case.read().values_CNT.tobytes())), case.faults[0].machine]
    assert expected == there


@pytest.mark.parametrize("spacing", [5, 40, 900])
def test_correlated_noise_is_continuous(spacing):
    """Pieces are those of one long draw, steps are small, knots are independent."""
    whole_NT = roles.interpolated(1, 2, spacing, 120, 3600, 64)
    cuts = [0, 60, 100, 777, 3600]
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        part_NT = roles.interpolated(1, 2, spacing, 120 + low, high - low, 64)
        assert np.array_equal(part_NT, whole_NT[:, low:high])
    assert np.abs(np.diff(whole_NT, axis=1)).max() < 9 / spacing  # two knots: 9 sigma at most
    knots_NT = whole_NT[:, (-120) % spacing :: spacing]
    assert abs(knots_NT.std() - 1) < 0.2
    if knots_NT.shape[1] > 30:
        assert abs(np.mean(knots_NT[:, 1:] * knots_NT[:, :-1])) < 0.1


def test_seeds_differ():
    a, b = (Fleet(4, seed).read(1_700_000_000, 1_700_000_060).values_CNT for seed in (1, 2))
    assert not np.array_equal(a, b, equal_nan=True)


def test_machines_without_noise_are_identical():
    """Nothing but noise, clocks and roles tells healthy machines apart."""
    setting = quiet(noise=0, skew_s=0, other_make=0, stages=1, tensor=1)
    fleet = Fleet(12, 2, metrics=tuple(METRICS), setting=setting)
    grid = fleet.read(fleet.start + 100, fleet.start + 300)
    single = {"cpu_usage", "disk_usage", "tcp_throughput"}  # machine 0 writes the log
    for c, name in enumerate(grid.metrics):
        value_NT = grid.values_CNT[c]
        first = 1 if name in single else 0
        assert np.array_equal(
            value_NT[first:], np.broadcast_to(value_NT[-1], value_NT[first:].shape)
        )
        assert (value_NT[0] > value_NT[-1]).any() == (name in single), name


def test_readings_stay_in_their_range_and_are_quantised():
    fleet = Fleet(64, 4, metrics=tuple(METRICS), setting=Setting(noise=3.0, jitters=5.0))
    grid = fleet.read(fleet.start, fleet.start + 600)
    for name, value_NT in zip(grid.metrics, grid.values_CNT, strict=True):
        seen, unit = value_NT[np.isfinite(value_NT)], METRICS[name].unit
        assert seen.min() >= 0, name
        if unit == "%":
            assert seen.max() <= 100, name
        if unit == "1":
            assert seen.max() <= 1, name
    for name in ("cpu_usage", "gpu_duty_cycle", "pfc_tx_packet_rate"):  # whole numbers
        value_NT = grid.values_CNT[grid.metrics.index(name)]
        seen = value_NT[np.isfinite(value_NT)]
        assert np.array_equal(seen, np.rint(seen)), name
    duty = grid.values_CNT[grid.metrics.index("gpu_duty_cycle")]
    assert np.mean(duty == 100) > 0.2  # saturates


def test_noise_has_heavy_tails_and_memory():
    setting = quiet(stages=1, tensor=1, skew_s=0)
    fleet = Fleet(32, 9, metrics=("gpu_power_draw",), setting=setting)
    value_NT = fleet.read(fleet.start, fleet.start + 1800).values_CNT[0]
    left_NT = value_NT - np.median(value_NT, axis=0)
    left_NT -= left_NT.mean(axis=1, keepdims=True)
    kurtosis = np.mean(left_NT**4) / np.mean(left_NT**2) ** 2
    assert kurtosis > 3.3  # a normal distribution has 3
    memory = np.mean(left_NT[:, 1:] * left_NT[:, :-1]) / np.mean(left_NT**2)
    assert memory > 0.15


@pytest.mark.parametrize("missing", [0.01, 0.05])
def test_missing_samples(missing):
    fleet = Fleet(64, 6, setting=quiet(missing=missing))
    lost_CNT = np.isnan(fleet.read(fleet.start, fleet.start + 900).values_CNT)
    whole_NT = lost_CNT.all(axis=0)
    expected = missing / 2 + missing / 2 - (missing / 2) ** 2  # of a scrape, or of a metric
    assert abs(lost_CNT.mean() - expected) < 0.05 * missing
    assert abs(whole_NT.mean() - missing / 2) < 0.05 * missing


def test_gaps_are_bursts():
    fleet = Fleet(64, 6, setting=quiet(gaps=2.0))
    lost_NT = np.isnan(fleet.read(fleet.start, fleet.start + 1800).values_CNT).all(axis=0)
    edges = np.diff(lost_NT.astype(int), axis=1)
    assert 20 < (edges == 1).sum() < 150 and lost_NT.sum() / (edges == 1).sum() > 5


def test_clocks_differ():
    """A stall of the whole job begins on each machine at its own time, within the limit."""
    start = 1_700_000_000
    stall = Disturbance("stall", start + 300.0, start + 330.0, speed=0.0, state="starve")
    setting = quiet(noise=0, skew_s=2, stages=1, tensor=1, step_s=1)
    fleet = Fleet(64, 8, ("gpu_power_draw",), setting, events=(stall,))
    low_NT = fleet.read(start + 280, start + 350).values_CNT[0] < 150
    begin_N = low_NT.argmax(axis=1)
    assert 17 <= begin_N.min() < begin_N.max() <= 22 and len(set(begin_N)) >= 4


def test_layout_divides_the_machines():
    for machines in (4, 5, 7, 16, 64, 256, 1024, 1500):
        for seed in range(5):
            layout = draw_layout(machines, seed, Setting())
            assert layout.machines == machines
            assert layout.data * layout.tensor >= 2  # every stage has peers to compare with
            assert list(layout.names) == sorted(layout.names)
            victim = seed % machines
            peers = layout.peers(victim)
            assert victim not in peers and len(set(peers)) == len(peers)
            if layout.stages * layout.tensor > 1:
                assert {int(layout.data_N[k]) for k in peers} == {int(layout.data_N[victim])}
                assert len(peers) == layout.stages * layout.tensor - 1


@pytest.mark.parametrize("stages,microbatches", [(1, 4), (4, 8), (8, 16)])
def test_bubbles_of_a_step_are_those_of_1f1b(stages, microbatches):
    """Closed form: a stage computes for M of the M + P - 1 units of the pipeline's part."""
    compute_PK, exchange_PK = step_profile(stages, microbatches, 0.1)
    busy = microbatches / (microbatches + stages - 1) * (1 - 0.1 - 0.02) + 0.02
    np.testing.assert_allclose(compute_PK[:, -1], busy, atol=1e-9)
    np.testing.assert_allclose(exchange_PK[:, -1], 0.1 * busy + 0.1, atol=1e-9)
    # Stage s begins after s forward passes, of 3 units the unit (a backward pass is two of them).
    begins = (compute_PK > 1e-9).argmax(axis=1) - 1
    share = 0.88 / 3 / (microbatches + stages - 1)
    np.testing.assert_allclose(begins / BINS, np.arange(stages) * share, atol=1 / BINS)


def test_roles():
    """The last stage computes more, the first loads more, rank 0 writes more of a checkpoint."""
    write = Disturbance("checkpoint", 1_700_000_300.0, 1_700_000_400.0, state="write")
    setting = quiet(noise=0, skew_s=0, other_make=0, stages=4, tensor=1, step_s=5)
    metrics = ("gpu_tensor_activity", "tcp_throughput", "disk_usage")
    fleet = Fleet(16, 1, metrics, setting, events=(write,))
    grid = fleet.read(fleet.start, fleet.start + 250)
    calm = dict(zip(grid.metrics, grid.values_CNT.mean(axis=2), strict=True))
    grid = fleet.read(fleet.start + 310, fleet.start + 390)
    saving = dict(zip(grid.metrics, grid.values_CNT, strict=True))
    stage_N = fleet.layout.stage_N
    tensor = [calm["gpu_tensor_activity"][stage_N == s].mean() for s in range(4)]
    assert tensor[3] > 1.05 * tensor[1] and tensor[0] > 1.02 * tensor[1]
    loads = calm["tcp_throughput"]
    assert loads[stage_N == 0].min() > 1.3 * loads[stage_N == 1].max()
    writes = saving["disk_usage"].mean(axis=1)
    assert writes[fleet.layout.data_N == 0].min() > 3 * writes[fleet.layout.data_N > 0].max()


def test_a_slow_machine_slows_all():
    """Synchronous training: the others wait, so they compute less a second."""
    start = 1_700_000_000
    slow = Disturbance("slow", start + 600.0, start + 1200.0, (3,), speed=0.5)
    setting = quiet(noise=0, skew_s=0, stages=1, tensor=1)
    fleet = Fleet(8, 1, ("gpu_tensor_activity",), setting, events=(slow,))
    value_NT = fleet.read(start, start + 1200).values_CNT[0]
    ratio_N = value_NT[:, 620:1180].mean(axis=1) / value_NT[:, :560].mean(axis=1)
    assert (ratio_N > 0.45).all() and (ratio_N < 0.6).all()


def test_a_fault_reaches_its_peers_later_and_weaker():
    layout = draw_layout(16, 0, Setting(stages=4, tensor=1))
    peers = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        fault = draw_fault(rng, "pcie_downgrading", layout, 1e9, 1e9 + 600)
        victim = layout.names.index(fault.machine)
        alone = fault.disturbances(layout)[0].moves
        for machine, delay_s, share in fault.peers:
            peers += 1
            assert machine in layout.peers(victim) and 1 <= delay_s <= 60 and 0 < share < 1
        for peer in (d for d in fault.disturbances(layout) if d.kind == "peer"):
            for move, origin in zip(peer.moves, alone, strict=True):
                assert move.metric == origin.metric and move.size < origin.size
                assert move.delay_s > origin.delay_s
    assert peers > 30


def test_a_peer_shows_it_later_in_the_samples():
    setting = quiet(noise=0, skew_s=0, stages=4, tensor=1, other_make=0)
    move = Move("cpu_usage", "high", 0.8)
    fault = Fault(
        "node00005",
        "cpu_contention",
        1_700_000_100.0,
        1_700_000_200.0,
        ("cpu_usage",),
        (move,),
        peers=((9, 20.0, 0.5),),
        restart_s=0,
    )
    fleet = Fleet(16, 1, ("cpu_usage",), setting, (fault,))
    value_NT = fleet.read(fleet.start, fleet.start + 300).values_CNT[0]
    high_NT = value_NT > value_NT[:, :90].max(axis=1, keepdims=True) + 5
    assert high_NT[5].argmax() == 100 and high_NT[9].argmax() == 120
    assert high_NT[5].sum() == 100 and high_NT[9].sum() == 80
    assert not np.delete(high_NT, [5, 9], axis=0).any()
    rise_N = value_NT[:, 120:200].mean(axis=1) - value_NT[:, :80].mean(axis=1)
    assert 1.9 < rise_N[5] / rise_N[9] < 2.1


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_moves_its_machine(kind):
    """Without noise, the faulty machine differs from its healthy twin in each metric it names."""
    setting = quiet(noise=0, stages=2, tensor=1, other_make=0)
    for seed in range(3):
        fleet = faulty(8, kind, seed, setting=setting, metrics=tuple(METRICS))
        fault = fleet.truth[0]
        span = (int(fault.start) + 240, int(fault.start) + 290)
        twin = Fleet(8, seed, tuple(METRICS), setting)
        a, b = fleet.read(*span), twin.read(*span)
        victim = fleet.layout.names.index(fault.machine)
        named = set(METRICS) if "*" in fault.metrics else set(fault.metrics)
        assert named & set(MINDER)
        for c, name in enumerate(a.metrics):
            same = np.array_equal(a.values_CNT[c, victim], b.values_CNT[c, victim], equal_nan=True)
            assert not (same and name in named), (kind, name)


def test_shares_of_a_mix():
    """Table 1 of the paper: an ECC error is 38.9 % of the faults (exact binomial, 4 sigma)."""
    rng, n = np.random.default_rng(0), 4000
    drawn = [draw_kind(rng, "table") for _ in range(n)]
    paper = {
        "ecc_error": 38.9,
        "cuda_execution_error": 14.6,
        "gpu_execution_error": 7.7,
        "pcie_downgrading": 6.6,
        "machine_unreachable": 6.0,
        "nic_dropout": 5.7,
        "hdfs_error": 5.7,
        "gpu_card_drop": 2.0,
        "nvlink_error": 1.7,
        "aoc_error": 0.9,
    }
    for kind, percent in paper.items():
        share = percent / 100
        assert abs(drawn.count(kind) / n - share) < 4 * np.sqrt(share * (1 - share) / n), kind
    others = sum(MIXES["table"].values()) - sum(paper.values())
    assert abs(others - 10.2) < 1e-9
    known = [MIXES["evaluation"][k] for k in list(paper)[:4]]
    assert known == [25.7, 15.0, 10.0, 8.6] and abs(sum(MIXES["evaluation"].values()) - 100) < 0.1


def test_cases():
    drawn = list(cases(60, (4, 16), 1, split="validate", healthy=0.25))
    assert sum(not c.faults for c in drawn) == 15
    assert [c.fleet.machines for c in drawn[:4]] == [4, 16, 4, 16]
    assert {c.noise for c in drawn} == {"low", "middle", "high"}
    for case in drawn:
        assert 900 <= case.end - case.start <= 1800
        for fault in case.faults:
            assert case.start + 60 <= fault.start <= case.end - 480
            assert fault.end - fault.start >= 360 or len(case.faults) == 2
            assert fault.machine not in dict(case.fleet.departures)
    again = list(cases(60, (4, 16), 1, split="validate", healthy=0.25))
    assert again == drawn
    other = {c.fleet.seed for c in cases(60, (4, 16), 1, split="held_out")}
    assert not other & {c.fleet.seed for c in drawn}


def test_joiners_and_leavers():
    start = 1_700_000_000
    gone = (Move("*", "gone"),)
    joiner = Disturbance("late_joiner", start - 60.0, start + 200.0, (2,), gone)
    leaver = Disturbance("leaver", start + 100.0, start + 1e9, (5,), gone)
    fleet = Fleet(8, 1, setting=quiet(skew_s=0), events=(joiner, leaver))
    none_NT = np.isnan(fleet.read(start, start + 300).values_CNT).all(axis=0)
    assert none_NT[2].tolist() == [True] * 200 + [False] * 100
    assert none_NT[5].tolist() == [False] * 100 + [True] * 200
    assert not np.delete(none_NT, [2, 5], axis=0).any()
    assert fleet.departures == (("node00005", start + 100.0),)


@pytest.mark.parametrize(
    "make,what",
    [
        (lambda: Fleet(8, 1, metrics=("cpu",)), "unknown metric 'cpu'"),
        (lambda: Fleet(8, 1, metrics=()), "at least one"),
        (lambda: Fleet(8, 1, setting=Setting(stages=3)), "legal stages"),
        (lambda: Fleet(8, 1).read(10, 20), "the job starts at"),
        (lambda: Fleet(8, 1).read(1_700_000_020, 1_700_000_020), "end must be after start"),
        (lambda: Setting(missing=1.5), "nearest: 0.9"),
        (lambda: next(cases(1, 4, 0, mix="odd")), "must be one of"),
        (lambda: next(cases(1, 4, 0, split="test")), "must be one of"),
        (lambda: Disturbance("x", 1.0, 2.0, moves=(Move("cpu", "high"),)), "unknown metrics"),
    ],
)
def test_bad_input_is_named(make, what):
    with pytest.raises(UserError, match=what):
        make()
