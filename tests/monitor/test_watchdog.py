"""The rules on streams of reports, by a clock that the test moves: faults and their look-alikes.

A stream is what agents would report of a job of four ranks on two hosts, once a second.
"""

import dataclasses
import math
import pathlib

import numpy as np
import pytest

from megajax.core.errors import SUPERSEDED
from megajax.monitor.detectors import Limits, Watchdog
from megajax.monitor.records import Record

HOSTS = {"a": (0, 1), "b": (2, 3)}
LIMITS = Limits(start=100, step=20, save=60, evaluate=200, silence=5, settle=2)


class Stream:
    """Ranks that a test moves, and the watchdog that hears of them.

    ranks: what an agent would record of each, by name. lines: of their logs since the last report.
    """

    def __init__(self, hosts=HOSTS, limits=LIMITS, **more):
        self.now = 1000.0
        self.hosts = hosts
        ranks = [r for numbers in hosts.values() for r in numbers]
        self.ranks = {r: {"state": "S", "log_bytes": 0} for r in ranks}
        self.steps = dict.fromkeys(self.ranks)
        self.lines = {}
        self.traffic = dict.fromkeys(hosts, 0)
        self.disk = dict.fromkeys(hosts, 2e12)
        self.silent = set()
        self.dog = Watchdog(hosts, limits, self.now, 1.0, **more)

    def put(self, rank, section, step, loss=2.0, own_s=0.1, step_s=1.0, bad=False):
        self.steps[rank] = step
        beat = self.ranks[rank].get("beat", 0) + 1
        self.set(rank, beat=beat, section=section, loss=loss, own_s=own_s, step_s=step_s)
        self.set(rank, has_bad_state=bad)

    def put_all(self, section, step, **more):
        for rank in self.ranks:
            self.put(rank, section, step, **more)

    def set(self, rank, **more):
        self.ranks[rank] |= more

    def report(self, host):
        """What its agent says."""
        values = [(None, "disk_free_bytes", self.disk[host])]
        values += [(None, "network_bytes", self.traffic[host])]
        for rank in self.hosts[host]:
            values += [(rank, n, v) for n, v in self.ranks[rank].items()]
            values += [(rank, "log_line", line) for line in self.lines.pop(rank, ())]
        return [Record(0.0, host, r, None, self.steps.get(r), n, v) for r, n, v in values]

    def tick(self, seconds=1.0):
        """Reports and judges."""
        self.now += seconds
        for host in self.hosts:
            if host not in self.silent:
                self.dog.hear(self.now, host, self.report(host))
        return self.dog.judge(self.now)

    def quiet(self, seconds):
        """Nothing must be said for so long."""
        for _ in range(int(seconds)):
            assert self.tick() == []

    def until(self, seconds):
        """Returns (the first fault, seconds that it took)."""
        for i in range(int(seconds)):
            faults = [a for a in self.tick() if a.kind != "warn"]
            if faults:
                return faults[0], i + 1
        raise AssertionError("nothing was found")

    def train(self, first, last):
        """Healthy steps of a second each."""
        for step in range(first, last + 1):
            for section in ("data", "launch", "wait"):
                self.put_all(section, step)
            assert self.tick() == []


def test_a_healthy_job_ends():
    s = Stream()
    s.quiet(90)
    s.put_all("compile", 1)
    s.quiet(90)
    s.train(2, 50)
    for rank in (0, 1, 3):
        s.put(rank, "end", 50)
        s.set(rank, state="X", exit_code=0)
    s.put(2, "end", 50)
    s.quiet(150)
    s.set(2, state="X", exit_code=0)
    (done,) = s.tick()
    assert (done.kind, done.code) == ("done", 0)


@pytest.mark.parametrize(
    ("section", "code", "shown"),
    [("told", 0, 143), ("told", 143, 143), ("told", 130, 130), ("end", 143, 143), ("end", 0, 0)],
)
def test_a_job_that_was_told_to_stop_ends_with_another_code(section, code, shown):
    s = Stream()
    s.train(1, 3)
    s.put_all(section, 3)
    for rank in s.ranks:
        s.set(rank, state="X", exit_code=code)
    (done,) = s.tick()
    assert (done.kind, done.code) == ("done", shown)


# What each of the four ranks shows: (exit code, section of its last record); those to be named.
LOST, LIVE = (1, "lost"), (None, "wait")
ENDS = {
    "kill -9, the others lose their connection": ([LOST, (-9, "wait"), LOST, LIVE], [1]),
    "the coordinator is killed, jax ends others": (
        [(-9, "launch"), (-6, "wait"), (-6, "wait"), LOST],
        [0],
    ),
    "exit(0) before the end": ([LOST, LOST, (0, "launch"), LIVE], [2]),
    "an exception, and jax's clean-up waits": ([LIVE, LIVE, LIVE, (None, "failed")], [3]),
    "an exception that ended the process": ([LOST, (1, "failed"), LOST, LOST], [1]),
    "a segmentation fault": ([LIVE, LOST, LOST, (-11, "launch")], [3]),
    "two at one time": ([(-9, "wait"), (-9, "wait"), LOST, LOST], [0, 1]),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_rank_that_ended_first_is_named(name):
    ranks, causes = ENDS[name]
    s = Stream()
    s.train(1, 5)
    order = sorted(range(4), key=lambda r: r in causes)  # the cause is seen last
    for rank in order:
        code, section = ranks[rank]
        s.put(rank, section, 6)
        if code is not None:
            s.set(rank, exit_code=code, state="X")
        if rank == order[0]:
            assert s.tick() == []
    fault, took = s.until(5)
    assert (fault.kind, fault.rule, list(fault.ranks)) == ("restart", "exit", causes)
    assert fault.step == 6 and took <= 1.5 * LIMITS.settle + 1  # the last words are waited for


CAUSES = {
    "an exception": (1, "failed", "ValueError: row 7", "program"),
    "a segmentation fault": (-11, "wait", "", "program"),
    "kill -9": (-9, "wait", "", "other"),
    "SIGTERM": (-15, "data", "", "other"),
    "a full disk": (1, "failed", "OSError: [Errno 28] No space left on device: 'x'", "temporary"),
    "a full disk, told by a wrong code": (2, "failed", "error: no space left on x", "temporary"),
    "storage that is away": (75, "failed", "error: step 5 was not saved", "temporary"),
    "the same, and its clean-up waits": (None, "failed", "error: x (exit code 75: y)", "temporary"),
    "a failed assertion of XLA": (-6, "wait", "F0000 a.cc:7] Check failed: n > 0", "program"),
    "a coordinator that is gone": (-6, "wait", "F0 Check failed: coordination service", "other"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_what_the_end_of_a_rank_is_evidence_of(name):
    """An error proves nothing about a step before all ranks came as far as one."""
    code, section, error, cause = CAUSES[name]
    for is_up in (True, False):
        s = Stream()
        if is_up:
            s.train(1, 5)
        s.put(1, section, 6)
        s.set(1, error=error, **({} if code is None else {"exit_code": code, "state": "X"}))
        fault, _ = s.until(5)
        assert (fault.kind, fault.rule, fault.ranks) == ("restart", "exit", (1,))
        assert fault.cause == ("start" if cause == "program" and not is_up else cause)
        assert error[:200] in fault.message and "7" not in fault.error


@pytest.mark.parametrize("how", ["leases", "agents", "killed"])
def test_a_watcher_that_was_frozen_blames_nobody(how):
    s = Stream()
    s.train(1, 5)
    for rank in s.ranks:
        if how != "agents":
            s.set(rank, exit_code=75, state="X")
    if how == "agents":
        for host in s.hosts:
            s.silent.add(host)
            s.dog.hang_up(host, "closed by the other end")
    if how == "killed":  # which a freeze explains as little as a rank's own error
        s.set(2, exit_code=-9)
    faults = [a for a in s.tick(60.0) if a.kind != "warn"]
    fault = faults[0] if faults else s.until(5)[0]
    if how == "killed":
        assert (fault.rule, fault.ranks) == ("exit", (2,))
    else:
        assert (fault.rule, fault.ranks, fault.hosts) == ("driver", (), ())
        assert "did not run for 60.0 s" in fault.message


def test_a_lease_that_ran_out_is_no_error_of_its_rank():
    s = Stream()
    s.train(1, 5)
    s.set(3, exit_code=75, state="X", error="[lease] process 9 ends: no news")
    fault, _ = s.until(5)
    assert (fault.rule, fault.hosts, fault.cause) == ("lease", ("b",), "other")


def test_who_was_waited_for_is_named_when_only_the_waiting_gave_up():
    """Gloo gives a peer 30 s to come; one that still compiles is too late for it."""
    s = Stream()
    for rank in (0, 1, 3):
        s.put(rank, "lost", 2)
        s.set(rank, state="X", exit_code=1)
    s.put(2, "compile", 1)
    fault, _ = s.until(5)
    assert (fault.rule, fault.ranks, fault.hosts) == ("lost", (2,), ("b",))


def test_wrong_flags_are_not_tried_again():
    s = Stream()
    for rank in s.ranks:
        s.put(rank, "failed", 0)
        s.set(rank, state="X", exit_code=2)
    fault, _ = s.until(3)
    assert (fault.kind, fault.rule, fault.code) == ("stop", "usage", 2)


@pytest.mark.parametrize("late", [0, 3, 8, 20])
def test_wrong_flags_are_known_by_a_code_that_comes_late(late):
    """A machine that is busy takes seconds to end a process that has said what is wrong."""
    s = Stream()
    s.put(1, "failed", 0)
    s.set(1, error="error: config.json is torn: delete it (--run_dir)")
    action = next((a for _ in range(late) for a in s.tick()), None)
    if action is None:
        s.set(1, state="X", exit_code=2)
        action, _ = s.until(8)
    code = 2 if late <= 5 * LIMITS.settle else 0
    kind, rule = ("stop", "usage") if code else ("restart", "exit")
    assert (action.kind, action.rule, action.code, action.ranks) == (kind, rule, code, (1,))


def test_a_job_whose_place_another_has_taken_ends_and_nobody_is_blamed():
    s = Stream()
    s.train(1, 5)
    s.put(0, "failed", 5)
    s.set(0, state="X", exit_code=SUPERSEDED)
    s.put(1, "lost", 5)
    s.set(1, state="X", exit_code=1)
    fault, _ = s.until(2)
    assert (fault.kind, fault.rule, fault.code) == ("stop", "superseded", SUPERSEDED)


def test_a_loss_that_is_not_finite_is_a_fault_though_the_code_is_2():
    s = Stream()
    s.train(1, 5)
    s.put_all("failed", 6, loss=math.nan)
    for rank in s.ranks:
        s.set(rank, state="X", exit_code=2)
    fault, _ = s.until(3)
    assert (fault.kind, fault.rule, fault.step) == ("restart", "nan", 6)


def test_nan_names_the_rank_whose_state_is_bad_however_early_the_others_say_so():
    s = Stream()
    s.train(1, 5)
    for rank in (0, 1, 3):
        s.put(rank, "failed", 6, loss=math.nan)
        s.set(rank, state="X", exit_code=2)
    assert s.tick() == []
    s.put(2, "failed", 6, loss=math.nan, bad=True)
    s.set(2, state="X", exit_code=2)
    fault, _ = s.until(3)
    assert (fault.rule, fault.ranks, fault.hosts, fault.step) == ("nan", (2,), ("b",), 6)


def test_nan_of_a_job_that_goes_on():
    s = Stream()
    s.train(1, 5)
    s.put_all("data", 6, loss=math.nan)
    fault, took = s.until(5)
    assert fault.rule == "nan" and took <= 3


@pytest.mark.parametrize("section", ["data", "prepare", "launch"])
def test_a_rank_asleep_is_named_while_all_others_wait(section):
    s = Stream()
    s.train(1, 30)
    for rank in (0, 1, 2):
        s.put(rank, "wait", 31)
    s.put(3, section, 31)
    fault, took = s.until(60)
    assert (fault.rule, fault.ranks, fault.hosts) == ("stall", (3,), ("b",))
    assert LIMITS.step < took <= 2 * LIMITS.step


def test_a_stuck_collective_names_all_that_are_in_it_and_the_frozen_one_first():
    s = Stream()
    s.train(1, 30)
    s.put_all("wait", 31)
    fault, _ = s.until(60)
    assert (fault.rule, fault.ranks) == ("stall", (0, 1, 2, 3))
    s = Stream(limits=dataclasses.replace(LIMITS, silence=100))
    s.train(1, 30)
    s.put_all("wait", 31)
    s.set(2, state="T")
    assert s.until(60)[0].ranks == (2,)


def test_a_stopped_process_is_found_before_its_section_is_overdue():
    s = Stream()
    s.train(1, 30)
    s.put_all("wait", 31)
    s.set(1, state="T")
    fault, took = s.until(20)
    assert (fault.rule, fault.ranks) == ("stopped", (1,)) and took <= 2 * LIMITS.silence


def test_a_job_that_is_suspended_as_a_whole_is_left_alone():
    s = Stream()
    s.train(1, 30)
    for rank in s.ranks:
        s.set(rank, state="T")
    s.quiet(LIMITS.step - 1)


def test_a_silent_agent_and_one_that_hangs_up():
    s = Stream()
    s.train(1, 5)
    s.silent.add("b")
    fault, took = s.until(20)
    assert (fault.rule, fault.hosts, fault.ranks) == ("silence", ("b",), (2, 3))
    assert took <= 2 * LIMITS.silence
    s = Stream()
    s.train(1, 5)
    s.silent.add("a")
    s.dog.hang_up("a")
    for rank in (2, 3):
        s.put(rank, "lost", 6)
        s.set(rank, state="X", exit_code=1)
    fault, took = s.until(5)
    assert (fault.rule, fault.hosts) == ("agent", ("a",)) and took <= 3


def test_a_flood_of_the_log():
    s = Stream()
    s.train(1, 5)
    for i in range(20):
        s.put_all("wait", 6 + i)
        s.set(1, log_bytes=s.ranks[1]["log_bytes"] + 50_000_000)
        if actions := s.tick():
            break
    assert (actions[0].rule, actions[0].ranks) == ("flood", (1,)) and i < 2 * LIMITS.silence
    s = Stream()  # one burst is no flood, however late its report comes
    s.train(1, 5)
    s.set(1, log_bytes=900_000_000)
    s.put_all("wait", 6)
    for _ in range(2):
        s.now += 2
        assert s.dog.judge(s.now) == []
    assert s.tick(1.9) == []
    s.train(7, 30)
    s = Stream()  # nor is one long traceback
    s.train(1, 5)
    s.set(1, log_bytes=90_000_000)
    s.train(6, 30)


# ---- no false alarm


def test_a_slow_first_compile_and_a_slow_start_of_one_rank():
    s = Stream()
    for rank in (0, 1, 2):
        s.put(rank, "compile", 1)
    s.quiet(95)
    s.put(3, "compile", 1)
    s.quiet(95)
    s.put_all("data", 2)
    s.put_all("compile", 2)
    s.quiet(95)


def test_a_long_evaluation_of_one_rank_while_the_others_wait_for_it():
    s = Stream()
    s.train(1, 30)
    s.put(0, "evaluate", 30)
    for rank in (1, 2, 3):
        s.put(rank, "launch", 31)
    s.quiet(190)
    s.put(0, "wait", 31)
    s.train(32, 40)
    assert s.dog.job.allowed("launch") == LIMITS.step  # waiting for others teaches nothing


def test_a_slow_disk():
    s = Stream()
    s.train(1, 30)
    s.put(2, "save", 30)
    for rank in (0, 1, 3):
        s.put(rank, "wait", 31)
    s.quiet(55)
    s.put(2, "wait", 31)
    s.train(32, 40)


def test_limits_grow_with_what_was_seen():
    s = Stream()
    for step in range(1, 5):
        s.put_all("wait", step)
        s.quiet(18)
    s.put_all("wait", 5)
    s.quiet(80)
    fault, took = s.until(40)
    assert fault.rule == "stall" and 80 < 80 + took <= 5 * 18 + 10


def test_a_watcher_that_was_starved_does_not_blame_the_job():
    s = Stream()
    s.train(1, 30)
    s.put_all("wait", 31)
    for _ in range(5):
        assert s.tick(seconds=300) == []


def test_a_loaded_machine(seed):
    """Steps and reports of wildly different length, all below the floors."""
    random = np.random.default_rng(seed)
    s = Stream()
    for step in range(1, 60):
        for rank in random.permutation(4):
            for section in ("data", "prepare", "launch", "wait"):
                s.put(int(rank), section, step)
                if random.random() < 0.1:
                    s.quiet(random.integers(1, 4))
        s.silent = {"a"} if random.random() < 0.3 else set()
        assert s.tick(random.uniform(0.2, 3)) == []
        s.silent = set()


# ---- warnings


def own_times(seed, factor, ranks=4, steps=60, noise=0.03):
    """Names of ranks that were called slow: own work is the step, times 1 +- noise."""
    random = np.random.default_rng(seed)
    hosts = {f"h{i}": (i,) for i in range(ranks)}
    s = Stream(hosts)
    work = 1 + noise * random.uniform(-1, 1, (ranks, 1))  # each machine has its own speed
    work = work * (1 + noise * random.uniform(-1, 1, (ranks, steps)))
    work[ranks // 2] *= factor
    named = []
    for i in range(steps):
        for r in range(ranks):
            s.put(r, "data", i + 1, own_s=work[r, i], step_s=work[:, i].max())
        named += [a.ranks for a in s.tick() if a.rule == "straggler"]
    return named


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_straggler_of_12_percent_is_named_once_and_noise_of_3_is_not(ranks):
    for k in range(5):
        assert own_times(k, 1.0, ranks) == []
        assert own_times(k, 1.12, ranks, noise=0.01) == [(ranks // 2,)]
    assert own_times(3, 1.25, ranks) == [(ranks // 2,)]


def slow_ranks(own_s, step_s):
    """The rule again, in NumPy: {rank: when its median of 20 first is 8 % of a step over}."""
    first = {}
    for end in range(20, own_s.shape[1] + 1):
        median = np.median(own_s[:, end - 20 : end], axis=1)
        usual = np.sort(median)[(len(median) - 1) // 2]
        over = (median - usual) / np.median(step_s[:, end - 20 : end])
        for rank in np.flatnonzero(over > 0.08):
            first.setdefault(int(rank), end)
    return first


def named(own_s, step_s):
    """{rank: step} that the watchdog warns of, with their hosts."""
    s = Stream({f"h{r}": (r,) for r in range(len(own_s))})
    first = {}
    for i in range(own_s.shape[1]):
        for r in range(len(own_s)):
            s.put(r, "data", i + 1, own_s=own_s[r, i], step_s=step_s[r, i])
        for a in s.tick():
            (rank,) = a.ranks
            assert (
                a.rule == "straggler" and a.hosts == (f"h{rank}",) and f"rank {rank} " in a.message
            )
            first.setdefault(rank, i + 1)
    return first


def test_stragglers_in_recorded_times(seed):
    """158 steps of four real ranks (lockstep.py on a machine at load 15), one of them slowed down.

    Recorded with scripts/supervise.py; own_s and step_s from attempt0/spans.json.
    """
    golden = np.load(pathlib.Path(__file__).parent.parent / "golden" / "straggler.npz")
    work, step = golden["own_s"].astype(float), golden["step_s"].astype(float)
    random = np.random.default_rng(seed)
    assert named(work, step) == {}
    assert named(work * random.uniform(0.97, 1.03, work.shape), step) == {}  # noise of each step
    assert named(work * random.uniform(0.97, 1.03, (4, 1)), step) == {}  # of each machine
    for rank in range(4):
        factor = np.where(np.arange(4) == rank, 1.12, 1)[:, None]
        assert named(work * factor, step) == {rank: 20}
    for _ in range(4):  # and whatever else: as the rule says, at the same step
        factor = random.uniform(0.9, 1.2, (4, 1)) * random.uniform(0.95, 1.05, work.shape)
        assert named(work * factor, step) == slow_ranks(work * factor, step)


def test_own_work_that_is_nothing_beside_a_step_names_nobody():
    s = Stream()
    for step in range(1, 60):
        for r in s.ranks:
            s.put(r, "data", step, own_s=0.001 * (1 + r), step_s=1.0)
        assert s.tick() == []


def test_a_full_disk_a_drop_of_traffic_and_a_word_in_the_log_warn_once():
    s = Stream()
    for step in range(1, 30):
        s.put_all("wait", step)
        s.traffic["a"] += 1000
        assert s.tick() == []
    s.disk["b"] = 1e6
    s.lines[3] = ["NVRM: Xid 79"]
    actions = s.tick()
    assert [(a.kind, a.rule, a.hosts) for a in actions] == [
        ("warn", "log", ("b",)),
        ("warn", "disk", ("b",)),
    ]
    assert "Xid 79" in actions[0].message and actions[0].ranks == (3,)
    assert s.tick() == []
    said = []
    for step in range(31, 40):
        s.put_all("wait", step)
        s.traffic["a"] += 100
        said += s.tick()
    assert [(a.rule, a.hosts) for a in said] == [("traffic", ("a",))]
