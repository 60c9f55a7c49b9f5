"""What the judge makes of given scores: roles, faults. Legend: F channels, N machines, H ticks."""

import numpy as np
import pytest

from megajax.systems.minder.evidence import Limits
from megajax.systems.minder.judge import Judge
from megajax.systems.minder.settings import TICK, Settings

F, N, TICKS = 2, 16, 40


def named(differs_H):
    """Returns the ticks after which machine 3 is named, which has these scores in one channel."""
    limits = Limits(np.tile(np.eye(F) / 0.16, (3, 2, 1, 1)), np.tile([6.0, 9.0, 10.0], (3, 2, 1)))
    judge = Judge(Settings(), limits, range(F))
    judge.grow(N)
    rng, found = np.random.default_rng(0), []
    for h in range(TICKS):
        end = TICK * (h + 1.0)
        judge.see(np.full((F // 2, N), end), end - TICK)
        score_FN = 0.3 * rng.standard_normal((F, N))
        score_FN[0, 3] = differs_H[h]
        found += [(h, one.row) for one in judge.look(end, score_FN, score_FN)]
    assert {row for _, row in found} <= {3}
    return [h for h, _ in found]


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
