"""Only the newest attempt of a supervised job saves."""

import numpy as np
import pytest

from megajax.checkpoint import lease
from megajax.checkpoint.directory import StepFolder
from megajax.checkpoint.lease import Attempt, Lease, SupersededError
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.storage import SaveError
from megajax.core import mesh

X = {"x": np.arange(3, dtype=np.float32)}


def test_an_older_attempt_saves_nothing_once_a_newer_one_began(tmp_path):
    old = CheckpointManager(tmp_path, attempt=Attempt("r", 0))
    old.save(1, X).result()
    new = CheckpointManager(tmp_path, attempt=Attempt("r", 1))
    with pytest.raises(SaveError, match="step 2 was not saved.*a newer attempt has taken over"):
        old.save(2, X).result()
    assert new.steps() == [1]
    new.save(2, X).result()
    assert new.steps() == [1, 2]
    with pytest.raises(SupersededError, match="a newer attempt has taken over"):
        CheckpointManager(tmp_path, attempt=Attempt("r", 0))
    with pytest.raises(SaveError, match="has taken over"):
        old.save(3, X).result()


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 50_000, '{"run": "r", "number": "9"}', '{"run": "r"}', "[1, 2]"]
)
def test_a_torn_record_names_no_attempt(tmp_path, text):
    (tmp_path / lease.RECORD).write_text(text)
    mine = Lease(tmp_path, Attempt("r", 2))
    assert not mine.is_lost()
    mine.take()
    assert Lease(tmp_path, Attempt("r", 1)).is_lost()


def test_an_attempt_that_is_overtaken_while_it_writes_is_refused(tmp_path, monkeypatch):
    old = CheckpointManager(tmp_path, attempt=Attempt("r", 0))
    commit = StepFolder.commit

    def overtaken(self, step):
        Lease(tmp_path, Attempt("r", 1)).take()
        commit(self, step)

    monkeypatch.setattr(StepFolder, "commit", overtaken)
    with pytest.raises(SaveError, match="has taken over"):
        old.save(1, X).result()
    assert old.steps() == []


def test_another_run_takes_over_and_the_former_one_is_refused(tmp_path):
    """A new driver counts from 0 again."""
    old = Lease(tmp_path, Attempt("a", 5))
    old.take()
    new = Lease(tmp_path, Attempt("b", 0))
    new.take()
    assert old.is_lost() and not new.is_lost()
    with pytest.raises(SupersededError), old.held():
        raise AssertionError("not reached")
    with new.held():
        pass


def test_a_torn_record_is_written_anew(tmp_path):
    (tmp_path / lease.RECORD).write_text('{"run": "a", ')
    Lease(tmp_path, Attempt("a", 0)).take()
    with pytest.raises(SupersededError):
        Lease(tmp_path, Attempt("a", -1)).take()


def test_nothing_is_checked_without_supervision(tmp_path):
    assert mesh.find_supervisor({}).run == ""
    found = mesh.find_supervisor(
        {"MEGAJAX_PROGRESS": "p", "MEGAJAX_RUN": "r", "MEGAJAX_ATTEMPT": "2"}
    )
    assert (found.run, found.attempt) == ("r", 2)
    CheckpointManager(tmp_path).save(1, X).result()
    assert not list(tmp_path.glob("attempt*"))
