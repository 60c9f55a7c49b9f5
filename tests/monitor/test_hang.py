"""The rule `hang` on streams of reports: who is named in 15 s, and what is slow but no hang."""

import numpy as np
import pytest

from megajax.monitor.detectors import Hang, Limits
from tests.monitor.test_watchdog import Stream

HOSTS = {f"h{r}": (r,) for r in range(4)}
SOON_S = 15


def stream(hosts=HOSTS, limits=Limits()):
    """Limits are the defaults, minutes: only `hang` can say something here."""
    s = Stream(hosts, limits, detectors={"hang": Hang})
    for step in range(1, 11):
        s.put_all("compile" if step < 3 else "wait", step)
        assert s.tick() == []
    return s


def named(s, seconds=SOON_S):
    for passed in range(seconds):
        if actions := s.tick():
            (alert,) = actions
            return alert.rule, alert.ranks, alert.hosts, passed + 1
    return None


@pytest.mark.parametrize("section", ["data", "prepare", "launch"])
def test_a_rank_that_does_not_come_is_named_while_the_others_wait(section):
    s = stream()
    for rank in (0, 1, 3):
        s.put(rank, "wait", 12)
    s.put(2, section, 11)
    rule, ranks, hosts, after = named(s)
    assert (rule, ranks, hosts) == ("hang", (2,), ("h2",)) and 10 <= after <= SOON_S
    s.quiet(60)  # it is said once


def test_one_of_two_ranks():
    s = stream({"a": (0,), "b": (1,)})
    s.put(0, "wait", 12)
    s.put(1, "data", 11)
    assert named(s)[1] == (1,)


def test_a_stopped_process_is_named_though_all_are_in_one_section():
    s = stream()
    s.put_all("wait", 11)
    s.set(1, state="T")
    assert named(s)[:3] == ("hang", (1,), ("h1",))


def test_the_only_rank_that_computes_is_named_and_nobody_where_all_do_or_none_does():
    for busy, expected in (((3,), (3,)), ((0, 1, 2, 3), None), ((), None), ((1, 2), None)):
        s = stream()
        for rank in range(4):
            s.set(rank, cpu_cores=1.0 if rank in busy else 0.01)
        s.put_all("wait", 11)
        answer = named(s)
        assert (answer and answer[1]) == expected, busy


def test_a_host_that_is_silent_is_named_and_a_watcher_that_hears_nobody_names_nobody():
    s = stream()
    s.silent = {"h3"}
    assert named(s)[:3] == ("hang", (3,), ("h3",))
    s = stream()
    s.silent = set(HOSTS)
    assert named(s, 60) is None


def test_what_rightly_takes_long_is_no_hang():
    for section in ("evaluate", "save", "compile"):
        s = stream()
        s.put(0, section, 10)
        for rank in (1, 2, 3):
            s.put(rank, "launch", 11)
        s.quiet(300)
        s.put(0, "wait", 11)
        assert named(s, 5) is None
    s = stream()  # all evaluate; one is done early
    s.put_all("evaluate", 10)
    s.put(2, "data", 11)
    s.quiet(300)
    s = Stream(HOSTS, Limits(), detectors={"hang": Hang})  # a start that takes long on one host
    for rank in (0, 1, 2):
        s.put(rank, "compile", 1)
    s.quiet(300)


def test_a_job_that_is_suspended_and_steps_of_half_a_minute_are_no_hang():
    s = stream()
    for rank in range(4):
        s.set(rank, state="T")
    s.quiet(300)
    s = stream()
    for step in range(11, 15):  # every rank waits for the devices
        s.put_all("wait", step)
        s.quiet(30)


def test_a_rank_that_is_often_late_gets_more_time():
    s = stream()
    for step in range(11, 14):
        for rank in (0, 1, 3):
            s.put(rank, "wait", step)
        s.put(2, "data", step)
        s.quiet(6)
        s.put(2, "wait", step)
        s.quiet(1)
    s.put(2, "data", 20)
    for rank in (0, 1, 3):
        s.put(rank, "wait", 20)
    s.quiet(25)
    assert named(s, 10)[1] == (2,)


def test_ranks_that_come_when_they_like_name_nobody(seed):
    random = np.random.default_rng(seed)
    s = stream()
    for step in range(11, 60):
        for rank in random.permutation(4):
            for section in ("data", "prepare", "launch", "wait"):
                s.put(int(rank), section, step)
                if random.random() < 0.1:
                    s.quiet(random.integers(1, 4))
