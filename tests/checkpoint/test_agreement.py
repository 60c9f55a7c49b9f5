"""What processes agree on before a collective; the others are played."""

import numpy as np
import pytest

from megajax.checkpoint import agreement
from megajax.checkpoint.trust import CheckpointError, DamagedError, ForbiddenError

FINE, DAMAGED, FORBIDDEN, FAILED = range(4)


def play(monkeypatch, other):
    """Another process says this; returns what this one says."""
    said = []

    def tell(kind):
        said.append(kind)
        return np.array([kind, other])

    monkeypatch.setattr(agreement, "tell", tell)
    return said


def explain(error):
    if isinstance(error, CheckpointError):
        return error
    raise OSError("second")


@pytest.mark.parametrize(
    ("raised_here", "other", "raised", "words"),
    [
        (None, FINE, None, None),
        (None, DAMAGED, DamagedError, "the step failed on another process"),
        (None, FAILED, CheckpointError, "the step failed on another process"),
        (DamagedError("a bit"), FINE, DamagedError, "a bit"),
        (DamagedError("a bit"), FAILED, CheckpointError, "a bit"),
        (None, FORBIDDEN, ForbiddenError, "the step failed on another process"),
        (DamagedError("a bit"), FORBIDDEN, ForbiddenError, "a bit"),
        (ForbiddenError("shut"), DAMAGED, ForbiddenError, "shut"),
        (ForbiddenError("shut"), FAILED, CheckpointError, "shut"),
        (CheckpointError("no disk"), DAMAGED, CheckpointError, "no disk"),
        (OSError("first"), FINE, CheckpointError, "the step: first; and then second"),
    ],
)
def test_all_raise_an_error_of_one_kind_or_none(monkeypatch, raised_here, other, raised, words):
    """Each tells the others once, even when its error cannot be explained."""
    said = play(monkeypatch, other)
    try:
        with agreement.together("the step", explain):
            if raised_here is not None:
                raise raised_here
    except CheckpointError as error:
        assert type(error) is raised and words in str(error)
    else:
        assert raised is None
    assert len(said) == 1 and (said[0] > 0) == (raised_here is not None)


def test_alone_a_process_is_told_its_own_words():
    assert agreement.tell([2**40, -1]).tolist() == [[2**40, -1]]
    assert agreement.tell(True).tolist() == [1]
    assert agreement.first(None) is None and agreement.first(0) == 0
