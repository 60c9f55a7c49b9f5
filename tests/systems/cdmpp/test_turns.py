"""Turns at a GPU: one holder at a time, whose time is known, and which programs a process has."""

import fcntl
import os

import pytest

from megajax.systems.cdmpp.labels import Turns, share


def test_a_turn_locks_and_says_who_has_it(tmp_path):
    turns = Turns(tmp_path / "lock")
    assert turns.seconds_of(os.getpid()) == 0
    with turns.take() as waited, open(turns.path, "a") as other:
        assert 0 <= waited < 5
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert 0 < turns.seconds_of(os.getpid()) < 5
        assert turns.seconds_of(os.getpid() + 1) == 0
    assert turns.seconds_of(os.getpid()) == 0
    with pytest.raises(RuntimeError, match="in a turn"), turns.take():
        raise RuntimeError("in a turn")
    with turns.take() as waited:
        assert waited < 5


@pytest.mark.parametrize(("processes", "families"), [(1, 16), (2, 4), (8, 16), (7, 16), (16, 16)])
def test_each_program_has_one_process_and_each_process_all_families(processes, families):
    shares = [share(process, processes, 1000, families) for process in range(processes)]
    assert sorted(number for one in shares for number in one) == list(range(1000))
    for one in shares:
        assert one == sorted(one)
        assert {number % families for number in one} == set(range(families))
    assert share(0, 1, 5, families) == [0, 1, 2, 3, 4]
