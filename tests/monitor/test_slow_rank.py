"""Who makes the steps slow: the arithmetic on ticks, simulated jobs, and streams of reports."""

import numpy as np
import pytest

from experiments.reports import slow_ranks
from megajax.monitor.detectors import Limits
from megajax.monitor.slow_rank import LEAST_PAST, MEASURES, TICKS, OwnWork, SlowRank
from tests.monitor.test_watchdog import Stream

PAST = 2 * LEAST_PAST


def ticks(seed, ranks=4, count=PAST + TICKS, noise=0.02):
    """(step_T, work_TMR) of a healthy job with steps of a second."""
    random = np.random.default_rng(seed)
    level_MR = np.array([0.02, 0.1, 1.0])[:, None] * random.uniform(0.9, 1.1, (3, ranks))
    work_TMR = level_MR * (1 + noise * random.standard_normal((count, 3, ranks)))
    return 1 + 0.01 * random.standard_normal(count), work_TMR


def named(step_T, work_TMR):
    """[(tick, finding)] in order."""
    work = OwnWork(work_TMR.shape[2])
    return [
        (t, one) for t in range(len(step_T)) for one in work.tick(24.0 * t, step_T[t], work_TMR[t])
    ]


@pytest.mark.parametrize("m", range(3))
@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_a_rank_whose_own_work_grew_is_named_after_the_continuity(seed, m, ranks):
    step_T, work_TMR = ticks(seed, ranks)
    work_TMR[PAST:, m, 1] += 0.3
    step_T[PAST:] += 0.3
    ((when, one),) = named(step_T, work_TMR)
    assert (one.rank, one.measure, when) == (1, MEASURES[m], PAST + TICKS - 1)
    assert one.since == 24.0 * PAST
    assert one.more_s == pytest.approx(0.3, rel=0.2) and one.usual_s == pytest.approx(1, abs=0.05)
    assert one.step_s == pytest.approx(1.3, abs=0.05)


def test_names_do_not_depend_on_the_order_of_ranks_nor_on_units(seed):
    step_T, work_TMR = ticks(seed, 8)
    work_TMR[PAST:, 0, 3] += 0.2
    step_T[PAST:] += 0.2
    order = np.random.default_rng(seed).permutation(8)
    ((_, one),) = named(step_T, work_TMR)
    ((_, other),) = named(step_T, work_TMR[:, :, order])
    assert (one.rank, order[other.rank]) == (3, 3)
    ((_, scaled),) = named(60 * step_T, 60 * work_TMR)
    assert scaled.rank == 3 and scaled.more_s == pytest.approx(60 * one.more_s)


def test_what_slows_all_or_nobody_names_nobody(seed):
    step_T, work_TMR = ticks(seed)
    assert named(step_T, work_TMR) == []
    slow_T = step_T.copy()
    slow_T[PAST:] += 0.5
    assert named(slow_T, work_TMR) == []  # the network of all
    both = work_TMR.copy()
    both[PAST:, 0] += 0.5
    assert named(slow_T, both) == []  # the file system of all
    aside = work_TMR.copy()
    aside[PAST:, 1, 2] += 1.5
    assert named(step_T, aside) == []  # a checkpoint that is written beside the steps
    two = work_TMR.copy()
    two[PAST:, 0, :2] += 0.5
    assert named(slow_T, two) == []  # two of four that have one role


def test_a_disturbance_that_ends_is_none(seed):
    for length in (4, TICKS - 1):
        step_T, work_TMR = ticks(seed, count=PAST + 3 * TICKS)
        span = slice(PAST, PAST + length)
        work_TMR[span, :, 2] += 0.5
        step_T[span] += 0.5
        assert named(step_T, work_TMR) == [], length


def test_ticks_without_a_measurement_and_a_measure_that_nobody_has(seed):
    step_T, work_TMR = ticks(seed)
    work_TMR[:, 2] = np.nan
    work_TMR[:PAST:3, 0] = np.nan
    work_TMR[PAST:, 0, 1] += 0.3
    step_T[PAST:] += 0.3
    ((_, one),) = named(step_T, work_TMR)
    assert (one.rank, one.measure) == (1, "own")


def test_simulated_jobs():
    """A few of those of experiments/reports/slow_ranks.py."""
    for seed in range(2):
        run = slow_ranks.simulate(4, seed, healthy=0.0)
        ranks = [one.rank for at, one in slow_ranks.judge(run) if at > run.onset]
        assert ranks[:1] == [run.who], (seed, run.kind)


# ---- streams of reports


def stream():
    """Four hosts; a continuity of 30 s, ticks of 3 s. emitted: records."""
    emitted = []
    hosts = {f"h{r}": (r,) for r in range(4)}
    rules = {"slow": lambda job: SlowRank(job, 30.0, emit=emitted.extend)}
    s = Stream(hosts, Limits(), detectors=rules)
    s.emitted = emitted
    return s


def train(s, seconds, own_s=0.02, wait=None, step_s=1.0, slow=None, first=1):
    """A step a second. wait: {rank: threads that wait for a processor}. Returns what is named."""
    actions = []
    for step in range(first, first + seconds):
        for r in range(4):
            more = 0.4 if r == slow else 0.0
            work_s = own_s * (1 + 0.05 * ((step + r) % 3)) + more
            s.put(r, "wait", step, own_s=work_s, step_s=step_s)
            s.set(r, cpu_cores=0.4, cpu_wait_cores=(wait or {}).get(r, 0.05))
        actions += s.tick()
    return actions


def test_a_rank_with_slow_own_work_is_named_with_its_host():
    s = stream()
    assert train(s, 60) == []
    (alert,) = train(s, 60, step_s=1.4, slow=2, first=61)
    assert (alert.rule, alert.ranks, alert.hosts) == ("slow", (2,), ("h2",))
    assert "its own work before a step takes 400 ms longer" in alert.message
    shares = {r.rank: r.value for r in s.emitted if r.name == "own_work_share"}
    assert max(shares, key=shares.get) == 2 and shares[2] == pytest.approx(0.4, abs=0.1)


def test_a_rank_that_waits_for_its_processor_is_named_with_what_its_host_shows():
    s = stream()
    assert train(s, 60) == []
    (alert,) = train(s, 60, wait={1: 1.2}, step_s=1.8, first=61)
    assert (alert.rule, alert.ranks, alert.hosts) == ("slow", (1,), ("h1",))
    assert "cpu_wait_cores 1.2 (others 0.05)" in alert.message
    assert "steps take 1.8 s, before" in alert.message


def test_compiling_saving_and_evaluating_are_no_work():
    s = stream()
    for step in (1, 2):  # a cold cache: one rank compiles for long
        for r in range(4):
            s.put(r, "compile", step, own_s=0.02, step_s=60.0)
            s.set(r, cpu_cores=8.0 if r == 3 else 0.1, cpu_wait_cores=0.0)
        s.quiet(60)
    assert train(s, 60, first=3) == []
    for section in ("save", "evaluate"):  # of one rank, for minutes, while the others wait
        s.put(0, section, 63)
        s.set(0, cpu_cores=3.0)
        s.quiet(150)
        assert train(s, 60, first=64) == []
