"""The budget of evictions: how many, what a false alarm costs, and what outlives a driver."""

import dataclasses
import json

import pytest

from megajax.core.errors import UserError
from megajax.monitor.alerts import Action
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.policy import DAY_S, OPEN_S, Evictions, Policy, Recovery, to_evict


class Clock:
    now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def evictions(tmp_path, clock, per_day=2):
    return Evictions(tmp_path / "evictions.json", per_day, clock)


def test_one_at_a_time_and_a_few_a_day(tmp_path, clock):
    budget = evictions(tmp_path, clock)
    for host in ("a", "b"):
        assert budget.refusal() is None
        budget.add(host, "slow", [1], 4, (1.0, 1.5))
        assert f"whether {host} was evicted rightly" in budget.refusal()
        assert budget.judge(4, 1.1).verdict == "right"
    assert "2 evictions a day" in budget.refusal()
    clock.now += DAY_S + 1
    assert budget.refusal() is None
    assert evictions(tmp_path, clock, per_day=0).refusal() is not None


def test_steps_that_stay_long_make_a_false_alarm_for_a_day_and_for_the_next_driver(tmp_path, clock):
    budget = evictions(tmp_path, clock)
    budget.add("a", "slow", [1], 4, (1.0, 1.5))
    budget = evictions(tmp_path, clock)  # the driver was started again
    settled = budget.judge(4, 1.4)
    assert (settled.verdict, settled.host) == ("false alarm", "a") and "now 1.4 s" in settled.why
    budget = evictions(tmp_path, clock)
    assert "the eviction of a was a false alarm" in budget.refusal()
    clock.now += DAY_S - 1
    assert budget.refusal() is not None
    clock.now += 2
    assert budget.refusal() is None


def test_a_successor_that_shows_the_same_makes_a_false_alarm(tmp_path, clock):
    budget = evictions(tmp_path, clock)
    budget.add("a", "minder", [2, 3], 4, (0.0, 0.0))
    assert budget.judge(4, 1.0) is None  # how long steps took before is not known
    assert budget.blame("slow", [2]) is None and budget.blame("minder", [0]) is None
    assert budget.blame("minder", [3]).verdict == "false alarm"
    assert budget.blame("minder", [3]) is None


def test_what_nobody_can_know_is_unknown(tmp_path, clock):
    budget = evictions(tmp_path, clock)
    budget.add("a", "slow", [1], 4, (1.0, 1.5))
    assert budget.judge(3, 1.0) is None  # fewer ranks: other steps
    clock.now += OPEN_S + 1
    assert budget.refusal() is None and budget.all[0].verdict == "unknown"
    rows = json.loads((tmp_path / "evictions.json").read_text())["evictions"]
    assert rows[0]["verdict"] == "unknown"


@pytest.mark.parametrize("text", ['{"evictions": [{"x": 1}]}', "{}", "not json"])
def test_a_file_that_is_none(tmp_path, clock, text):
    (tmp_path / "evictions.json").write_text(text)
    with pytest.raises(UserError, match="evictions.json"):
        evictions(tmp_path, clock)


class Guard:
    """Refuses hosts of a list."""

    def __init__(self, *bad):
        self.bad, self.told, self.free = bad, [], ["a", "b"]

    def refuses(self, action):
        return "because" if action.hosts[0] in self.bad else None

    def evicts(self, action):
        self.told.append(action.hosts)

    def acquitted(self):
        return self.free


def test_a_driver_asks_before_it_evicts_and_keeps_the_needed_hosts():
    def action(*hosts):
        return Action("evict", "slow", "slow", (1,), hosts)

    def choose(actions, least, guard):
        said = []
        return to_evict(actions, "abc", least, guard, lambda *words: said.append(words)), said

    warn = Action("warn", "slow", "slow", (1,), ("a",))
    guard = Guard("a")
    choice, said = choose([warn, action("a"), action("b")], 2, guard)
    assert choice.hosts == ("b",) and said == [("kept", "a stays: because")]
    assert guard.told == [("b",)]
    choice, said = choose([action("b")], 3, guard)
    assert choice is None and "2 hosts would be left of 3" in said[0][1] and len(guard.told) == 1
    assert choose([action()], 2, guard) == (None, [])  # of no host of the job
    assert choose([action("a")], 2, None)[0].hosts == ("a",)


def test_a_host_that_was_evicted_wrongly_comes_back_unless_it_failed_a_check():
    recovery = Recovery(Policy(restarts=9, strikes=2))
    assert recovery.acquitted(Guard()) == ["a", "b"]
    fault = Action("restart", "exit", "ended", (1,), ("b",), 5, cause="program")
    recovery.decide(fault, {"a": "slow disk"}, "abc")
    assert recovery.acquitted(Guard()) == ["b"]
    recovery.forgive("b")  # its strike is forgotten
    later = dataclasses.replace(fault, step=50)
    assert not recovery.decide(later, {}, "bc").excluded
    assert set(recovery.decide(dataclasses.replace(fault, step=90), {}, "bc").excluded) == {"b"}


def test_the_blocklist_loses_the_host_that_is_readmitted(tmp_path):
    said = []
    journal = Journal(tmp_path, said.append)
    journal.readmit("a", "by hand")  # nobody is excluded
    for host in ("a", "ab", "b"):
        journal.exclude(host, "bad")
    journal.readmit("a", "its eviction was a false alarm")
    journal.close()
    assert (tmp_path / "blocklist").read_text() == "ab\nb\n"
    assert any("readmitted: a: its eviction was a false alarm" in line for line in said)
