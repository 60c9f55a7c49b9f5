"""What the judge makes of given scores: roles, faults. Legend: F channels, N machines, H ticks."""

import numpy as np
import pytest

from megajax.systems.minder import tracker
from megajax.systems.minder.judge import Judge, Onsets
from megajax.systems.minder.settings import TICK, Settings
from megajax.systems.minder.tracker import Limits

N, TICKS = 16, 40


def named(*differs, middle_H=None, apart_H=None):
    """Returns the ticks after which machine 3 is named.

    Args: differs: its scores in one level after the other, (H,) each. middle_H: the job's median in
      all levels. apart_H: distance of machine 3 from the others in the first level.
    """
    C = len(differs)
    F = 2 * C
    each = [*[6.0] * C, *[9.0] * C, 10.0]
    limits = Limits(np.tile(np.eye(F) / 0.16, (3, 2, 1, 1)), np.tile(each, (3, 2, 1)))
    middle_H = np.zeros(TICKS) if middle_H is None else middle_H
    apart_H = np.zeros(TICKS) if apart_H is None else apart_H
    judge = Judge(Settings(), limits, range(F))
    judge.grow(N)
    rng, findings = np.random.default_rng(0), []
    for h in range(TICKS):
        end = TICK * (h + 1.0)
        judge.see(np.full((C, N), end), end - TICK)
        score_FN = 0.3 * rng.standard_normal((F, N))
        score_FN[:C, 3] = [differs_H[h] for differs_H in differs]
        apart_FN = np.zeros((F, N))
        apart_FN[0, 3] = apart_H[h]
        middle_F = np.full(F, middle_H[h])
        now = judge.look(end, score_FN, score_FN, apart_FN, middle_F)
        findings += [(h, one.row) for one in now]
    assert {row for _, row in findings} <= {3}
    return [h for h, _ in findings]


@pytest.mark.parametrize("at", [14, 20])
def test_a_role_of_its_own_stays_one_when_it_shows_less_for_a_moment(at):
    """The same difference is a fault of a machine that was like the others before."""
    role_H = np.full(TICKS, -3.2)
    assert named(role_H) == []
    role_H[at : at + 2] = -1.6
    assert named(role_H) == []
    fault_H = np.where(np.arange(TICKS) < at, 0.0, -3.2)
    assert named(fault_H) == [at + Settings().ticks - 1]
    assert named(1.6 * role_H) != []  # far enough, whatever it is


def test_a_hole_is_bridged_but_prolongs_nothing():
    short_H = np.where(abs(np.arange(TICKS) - 18) < 4, -5.0, 0.0)  # seven ticks
    short_H[22:25] = np.nan
    assert named(short_H) == []
    long_H = np.where(np.arange(TICKS) < 15, 0.0, -5.0)
    long_H[18:20] = np.nan
    assert named(long_H) == [15 + Settings().ticks - 1]


def test_ticks_in_which_the_whole_job_stalls_hide_a_fault_and_do_not_end_it():
    """A stall of three ticks, in which all machines are as low as the faulty one."""
    fault_H, middle_H = np.where(np.arange(TICKS) < 14, 0.0, -5.0), np.full(TICKS, 0.5)
    fault_H[19:22] = 0.0
    assert named(fault_H, middle_H=middle_H) == [22 + Settings().ticks - 1]  # the job did not stall
    middle_H[19:22] = 0.1
    longer = tracker.spans(Settings().ticks)[1]  # waits for more ticks, so that some may be hidden
    assert named(fault_H, middle_H=middle_H) == [14 + longer.needed - 1]
    short_H = np.where(np.arange(TICKS) < 23, fault_H, 0.0)  # nine ticks with the stall
    assert named(short_H, middle_H=middle_H) == []
    ends_H = np.where(np.arange(TICKS) < 19, fault_H, 0.0)  # and is like the others afterwards
    assert named(ends_H, middle_H=middle_H) == []


def two_disturbances(first, second, size):
    """Returns scores of two levels: a disturbance of `first` ticks, then one of `second` ticks."""
    scores = np.zeros((2, TICKS))
    scores[0, 14 : 14 + first] = -8.0
    scores[1, 14 + first - 1 : 14 + first + second] = -size
    return scores


@pytest.mark.parametrize(
    ("first", "second", "size", "rule"), [(6, 6, 8.0, "ONE_WAY"), (9, 3, 16.0, "MORE")]
)
def test_a_disturbance_after_another_one_does_not_prolong_it(
    first, second, size, rule, monkeypatch
):
    scores = two_disturbances(first, second, size)
    assert named(*scores) == []
    monkeypatch.setattr(tracker, rule, {"ONE_WAY": -2.0, "MORE": 1e9}[rule])
    assert named(*scores) != []  # it is this rule that refuses them
    monkeypatch.undo()
    both_H = np.where(np.arange(TICKS) < 14, 0.0, -5.0)
    assert named(both_H, 0.8 * both_H) == [14 + Settings().ticks - 1]  # a fault in both levels


def test_a_machine_that_was_disturbed_at_first_is_learnt_anew():
    """It was seen during a disturbance of five ticks; afterwards it has changed for good."""
    changed_H = np.where(np.arange(TICKS) < 5, 0.0, 4.0)
    end = 5 + Settings().ticks - 1
    first_H = np.where(np.arange(TICKS) < 5, -9.0, 1.5)  # the first state is the odd one
    assert named(changed_H, apart_H=first_H)[:1] != [end]
    fault_H = np.where(np.arange(TICKS) < 5, -1.0, 9.0)  # the present state is the odd one
    assert named(changed_H, apart_H=fault_H)[:1] == [end]
    role_H = np.where(np.arange(TICKS) < 5, -2.0, 1.0)  # machines differ by as much
    assert named(changed_H, apart_H=role_H)[:1] == [end]


@pytest.mark.parametrize(("share", "who"), [(0.6, [0]), (0.95, []), (0.0, [0])])
def test_of_two_among_four_the_one_that_is_clearly_further_is_named(share, who):
    """Machine 1 shows a share of what machine 0 shows; who is first cannot be told if it is 1."""
    F, rows = 2, []
    limits = Limits(np.tile(np.eye(F) / 0.16, (3, 2, 1, 1)), np.tile([6.0, 9.0, 10.0], (3, 2, 1)))
    judge = Judge(Settings(), limits, range(F))
    judge.grow(4)
    for h in range(TICKS):
        end, score_FN = TICK * (h + 1.0), np.zeros((F, 4))
        judge.see(np.full((1, 4), end), end - TICK)
        score_FN[0, :2] = np.array([10.0, 10.0 * share]) * (h >= 14)
        seen = (np.clip(score_FN, -6, 6), score_FN, np.zeros((F, 4)), np.zeros(F))
        rows += [one.row for one in judge.look(end, *seen)]
    assert rows == who


def test_a_machine_whose_series_ended_explains_others_though_it_never_had_all_metrics():
    limits = Limits(
        np.tile(np.eye(4) / 0.16, (3, 2, 1, 1)), np.tile([6.0, 6.0, 9.0, 9.0, 10.0], (3, 2, 1))
    )
    judge = Judge(Settings(), limits, range(4))
    judge.grow(N)
    rng, rows = np.random.default_rng(0), []
    last_CN = np.full((2, N), -np.inf)
    for h in range(TICKS):
        end = TICK * (h + 1.0)
        last_CN[:] = end
        last_CN[1, 5] = -np.inf  # it never had this metric
        last_CN[0, 5] = end if h < 15 else -np.inf
        judge.see(last_CN, end - TICK)
        score_FN = 0.3 * rng.standard_normal((4, N))
        score_FN[:, 5] = np.nan
        score_FN[0, 3] = -5.0 if 16 <= h < 27 else 0.0  # it waits for the other one
        middle_F, apart_FN = np.zeros(4), np.zeros((4, N))
        rows += [one.row for one in judge.look(end, score_FN, score_FN, apart_FN, middle_F)]
    assert rows == [5]


@pytest.mark.parametrize("told", [True, False])
def test_the_follower_of_a_machine_that_another_judge_named_is_not_named(told):
    """The spread of machine 3 passes its limit a tick before its level and its follower's do."""
    F, least = 4, np.tile([6.0, 6.0, 9.0, 9.0, 10.0], (3, 2, 1))
    limits = Limits(np.tile(np.eye(F) / 0.16, (3, 2, 1, 1)), least)
    levels = Judge(Settings(), limits, range(F), Onsets(15))
    spreads = Judge(Settings(), limits, range(F), levels=F)
    for judge in (levels, spreads):
        judge.grow(N)
    rng, findings = np.random.default_rng(1), []
    for h in range(TICKS):
        end = TICK * (h + 1.0)
        levels.see(np.full((2, N), end), end - TICK)
        scores = [0.3 * rng.standard_normal((F, N)) for _ in range(2)]
        scores[0][0, 3] += -4.0 * (h >= 16)
        scores[0][0, 5] += -4.5 * (h >= 16)
        scores[1][0, 3] += 5.0 * (h >= 14)
        now = levels.look(end, scores[0], scores[0], np.zeros((F, N)), np.zeros(F))
        spreads.come(levels)
        more = spreads.look(end, scores[1], scores[1], np.zeros((F, N)), None)
        if told:
            spreads.tell(levels, more)
        findings += [("level", one.row) for one in now] + [("spread", one.row) for one in more]
    assert findings[0] == ("spread", 3)
    assert (("level", 5) in findings) != told
