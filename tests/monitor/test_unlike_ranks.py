"""A job on unlike GPUs: a weak rank is not slow, and one that stops or becomes slow is named.

Two kinds share a job, an "L4" beside "H100"s. Its host and its device are several times slower, so
that all others wait for it in every step; that is no fault.
"""

import numpy as np
import pytest

from megajax.monitor.detectors import DETECTORS, Hang, Limits
from megajax.monitor.records import KIND
from megajax.monitor.slow_rank import OwnWork, SlowRank
from tests.monitor.test_watchdog import Stream

FLEETS = [("H100",) * 4 + ("L4",) * 2, ("H100",) * 3 + ("L4",), ("H100", "L4")]
OWN_S, DEVICE_S = {"H100": 0.05, "L4": 0.3}, {"H100": 0.2, "L4": 0.9}
PULSE_S = {"H100": 0.002, "L4": 0.011}


class Fleet(Stream):
    """One rank a host. slow: {rank: factor} on its own work, or on its device's time."""

    def __init__(self, kinds, seed, says=True, work=None):
        self.emitted, self.work = [], work
        rules = dict(DETECTORS) | {
            "hang": Hang,
            "slow": self.made,
        }
        super().__init__({f"h{r}": (r,) for r in range(len(kinds))}, Limits(), detectors=rules)
        self.kinds, self.random, self.step = kinds, np.random.default_rng(seed), 0
        for rank, kind in enumerate(kinds):
            if says is True or isinstance(says, str):
                self.set(rank, **{KIND: says if isinstance(says, str) else kind})

    def made(self, job):
        self.slow = SlowRank(job, 20.0, self.work, self.emitted.extend)
        return self.slow

    def train(self, steps, host=None, device=None, slack=1.0):
        """Trains; returns what is said, [(rule, ranks)]."""
        said = []
        for _ in range(steps):
            self.step += 1
            noise_2R = 1 + 0.02 * self.random.standard_normal((2, len(self.kinds)))
            own_s = [
                OWN_S[kind] * (host or {}).get(rank, 1.0) * noise_2R[0, rank]
                for rank, kind in enumerate(self.kinds)
            ]
            factors = [(device or {}).get(rank, 1.0) * x for rank, x in enumerate(noise_2R[1])]
            times = zip(own_s, self.kinds, factors, strict=True)
            step_s = slack * max(o + DEVICE_S[kind] * factor for o, kind, factor in times)
            for rank, kind in enumerate(self.kinds):
                self.put(rank, "wait", self.step, own_s=own_s[rank], step_s=step_s)
                self.set(rank, pulse_s=PULSE_S[kind] * factors[rank], cpu_cores=0.2)
            said += [(a.rule, a.ranks) for a in self.tick()]
        return said


@pytest.mark.parametrize("kinds", FLEETS)
def test_a_weak_rank_is_no_fault(kinds, seed):
    assert Fleet(kinds, seed).train(50) == []
    unlike = Fleet(kinds, seed, says=False).train(50)  # the rules do see the difference
    assert {("straggler", (r,)) for r, kind in enumerate(kinds) if kind == "L4"} & set(unlike)


@pytest.mark.parametrize("kinds", FLEETS)
def test_a_weak_rank_with_twice_its_own_work_is_named(kinds, seed):
    fleet, last = Fleet(kinds, seed), len(kinds) - 1
    assert fleet.train(50) == []
    said = fleet.train(50, host={last: 2.0})
    assert sorted(said) == [("slow", (last,)), ("straggler", (last,))]


@pytest.mark.parametrize("kinds", FLEETS)
def test_a_weak_rank_whose_device_takes_twice_as_long_is_named(kinds, seed):
    fleet, last = Fleet(kinds, seed), len(kinds) - 1
    assert fleet.train(50) == []
    assert fleet.train(50, device={last: 2.0}) == [("slow", (last,))]


@pytest.mark.parametrize("kinds", FLEETS[:2])
def test_a_strong_rank_that_becomes_as_slow_as_a_weak_one_is_named(kinds, seed):
    fleet = Fleet(kinds, seed)
    assert fleet.train(50) == []
    assert fleet.train(50, device={1: 5.0}) == [("slow", (1,))]


@pytest.mark.parametrize("kinds", FLEETS)
def test_what_slows_all_kinds_names_nobody(kinds, seed):
    fleet = Fleet(kinds, seed)
    fleet.train(50)
    assert fleet.train(50, slack=1.5) == []  # the network of all
    assert fleet.train(60, host=dict.fromkeys(range(len(kinds)), 1.2), slack=1.5) == []


@pytest.mark.parametrize("kinds", FLEETS)
def test_a_weak_rank_that_stops_is_named(kinds, seed):
    last = len(kinds) - 1
    for how in ("signal", "late", "silent"):
        fleet = Fleet(kinds, seed)
        assert fleet.train(30) == []
        for rank in range(last):
            fleet.put(rank, "wait", 32)
        if how == "signal":
            fleet.set(last, state="T")
        elif how == "late":
            fleet.put(last, "data", 31)
        else:
            fleet.silent = {f"h{last}"}
        said = [a for _ in range(20) for a in fleet.tick()]
        assert said and {a.ranks for a in said} == {(last,)}, how


def test_the_others_wait_rightly_for_the_only_rank_of_a_kind_that_computes(seed):
    """Without a peer it has the limit of its section, of minutes; with one, seconds."""
    for kinds, seconds in ((("H100",) * 3 + ("L4",), 180), (("H100",) * 4, 10)):
        fleet = Fleet(kinds, seed)
        fleet.train(20)
        fleet.put_all("wait", 21)
        for rank in range(4):
            fleet.set(rank, cpu_cores=1.0 if rank == 3 else 0.01)
        fleet.quiet(seconds - 1)
        said = [a for _ in range(10) for a in fleet.tick()]
        assert ("hang", (3,)) in [(a.rule, a.ranks) for a in said]


def test_ranks_that_a_restart_places_otherwise_have_no_past(seed):
    """The past of rank 0, an H100, says nothing of the L4 that has its number now."""
    work, kinds = OwnWork(4), ("H100", "H100", "H100", "L4")
    assert Fleet(kinds, seed, work=work).train(50) == []
    again = Fleet(kinds[::-1], seed + 1, work=work)
    assert again.train(50, slack=1.3) == []  # and the network is slower
    assert again.train(50, host={0: 2.0}, slack=1.3)[-1] == ("slow", (0,))
    third = Fleet(kinds[::-1], seed, work=work)  # this one keeps its past
    assert ("slow", (1,)) in third.train(30, device={1: 6.0}, slack=1.3)


@pytest.mark.parametrize("ranks", [2, 4, 20])
def test_ranks_of_one_kind_are_as_ranks_without_kinds(ranks, seed):
    """To the last bit, with noise, a straggler and a device that becomes slow."""
    said, shares = [], []
    for says in (False, "H100"):
        fleet = Fleet(("H100",) * ranks, seed, says)
        one = fleet.train(50, host={0: 1.3})
        one += fleet.train(50, device={ranks - 1: 1.4})
        said.append(one)
        shares.append([r.value for r in fleet.emitted])
    assert said[0] == said[1] and ("slow", (ranks - 1,)) in said[0]
    assert shares[0] == shares[1] and any(shares[0])


def test_metrics_of_a_host_are_compared_with_those_of_its_kind(seed):
    fleet = Fleet(("H100",) * 3 + ("L4",) * 3, seed)
    for rank in range(6):
        fleet.set(rank, gpu_power_w=(600.0 if rank < 3 else 70.0) + rank)
    fleet.train(36)
    fleet.train(1)
    assert fleet.slow.differences("h4") == []
    fleet.set(4, gpu_power_w=30.0)
    fleet.train(2)
    assert [d.split()[0] for d in fleet.slow.differences("h4")] == ["gpu_power_w"]
