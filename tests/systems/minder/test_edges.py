"""Readings at the end of a metric's scale. Legend: C metrics, N machines, T seconds."""

import numpy as np
import pytest

from megajax.systems.minder.features import Edges, ends


def test_the_ends_of_a_scale_are_values_that_many_samples_have():
    rng = np.random.default_rng(0)
    duty = np.minimum(rng.normal(98, 2, 10_000), 100)
    assert ends(duty) == (-np.inf, 100)
    assert ends(-duty) == (-100, np.inf)
    assert ends(rng.normal(0, 1, 10_000)) == (-np.inf, np.inf)
    assert ends(np.zeros(100)) == (-np.inf, np.inf)  # a counter of errors may rise


def told(at_work, afterwards, suspected=False):
    """Returns, (2, N), who is told to be below or above at an end where it usually stands, after
    ten ticks of one reading of each machine and one tick of another."""
    edges = Edges(np.array([0.0]), np.array([100.0]))
    for _ in range(10):
        edges.seen(np.tile(np.array(at_work, float)[None, :, None], 24), np.ones(4, bool))
    values = np.tile(np.array(afterwards, float)[None, :, None], 24)
    for _ in range(10):
        told_2N = edges.seen(values, np.full(4, not suspected))[:, 0]
    return told_2N


def test_who_was_at_the_end_of_the_scale_is_known_when_the_others_leave_it():
    """The first machine's 100 % hid how far it was above its peers."""
    told_2N = told([100, 98, 97, 99], [99, 93, 92, 100], suspected=True)
    np.testing.assert_array_equal(told_2N, [[False] * 4, [True, False, False, False]])
    told_2N = told([0, 1, 2, 3], [0, 10, 10, 0], suspected=True)
    np.testing.assert_array_equal(told_2N, [[True, False, False, False], [False] * 4])


def test_what_is_beyond_the_end_is_no_end():
    assert not told([100, 98, 97, 99], [130, 93, 92, 99], suspected=True).any()


@pytest.mark.parametrize("suspected", [False, True])
def test_a_machine_that_comes_to_the_end_is_there_only_when_it_is_usual(suspected):
    told_2N = told([90, 98, 97, 99], [100, 98, 97, 99], suspected)
    assert told_2N[1, 0] == (not suspected)


def test_machines_come_go_and_lose_samples():
    edges = Edges(np.array([-np.inf]), np.array([100.0]))
    one = np.full((1, 1, 24), 100.0)
    assert edges.seen(one, np.ones(1, bool))[1].tolist() == [[True]]
    lost = np.full((1, 2, 24), np.nan)
    assert edges.seen(lost, np.ones(2, bool))[1].tolist() == [[True, False]]
    edges.forget([0])
    assert edges.seen(one, np.ones(1, bool))[1].tolist() == [[True]]  # the second, seen now
