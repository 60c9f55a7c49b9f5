"""Only the newest attempt of a supervised job saves."""

import contextlib
import errno
import json
import os

import numpy as np
import pytest

from megajax.checkpoint import lease
from megajax.checkpoint.lease import Attempt, Lease, LeaseError, SupersededError
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.steps import MARK, StepFolder
from megajax.checkpoint.store import CheckpointError, SaveError
from megajax.core import errors, mesh
from megajax.training import interrupts

X = {"x": np.arange(3, dtype=np.float32)}


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 75), (errno.EDQUOT, 75), (errno.EIO, 75), (errno.EACCES, 2)]
)
def test_storage_that_does_not_take_the_record_has_an_error_of_its_own(
    tmp_path, monkeypatch, number, code
):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        CheckpointError, match=f"cannot take {tmp_path} over.*{os.strerror(number)}"
    ) as e:
        CheckpointManager(tmp_path, attempt=Attempt("r", 0))
    assert e.value.exit_code == code and isinstance(e.value, LeaseError) == (code == 75)
    assert not (tmp_path / lease.RECORD).exists()


def test_a_folder_in_the_place_of_the_lock_is_named(tmp_path):
    (tmp_path / lease.LOCK).mkdir()
    with pytest.raises(CheckpointError, match=f"{lease.LOCK}: Is a directory") as e:
        CheckpointManager(tmp_path, attempt=Attempt("r", 0))
    assert e.value.exit_code == 2


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
    lease_2 = Lease(tmp_path, Attempt("r", 2))
    assert not lease_2.is_lost()
    lease_2.take()
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
    supervisor = mesh.find_supervisor(
        {"MEGAJAX_PROGRESS": "p", "MEGAJAX_RUN": "r", "MEGAJAX_ATTEMPT": "2"}
    )
    assert (supervisor.run, supervisor.attempt) == ("r", 2)
    CheckpointManager(tmp_path).save(1, X).result()
    assert not list(tmp_path.glob("attempt*"))


def held(folder):
    record = json.loads((folder / lease.RECORD).read_text())
    return record["run"], record["number"]


def test_of_two_drivers_the_one_that_began_later_saves_and_the_other_never_again(tmp_path):
    """Run b takes over from a; what a still runs, and what a's driver starts next, is refused."""
    Lease(tmp_path, Attempt("a", 5)).take()
    new = Lease(tmp_path, Attempt("b", 0))
    new.take()
    for number in (0, 5, 6, 1000):
        with pytest.raises(SupersededError):
            Lease(tmp_path, Attempt("a", number)).take()
    newest = Lease(tmp_path, Attempt("c", 0))
    newest.take()
    for run in ("a", "b"):
        with pytest.raises(SupersededError):
            Lease(tmp_path, Attempt(run, 9)).take()
    assert held(tmp_path) == ("c", 0) and new.is_lost() and not newest.is_lost()


def test_a_process_that_the_same_attempt_started_again_is_not_the_former_one(tmp_path):
    old, new = (Lease(tmp_path, Attempt("a", 1)) for _ in range(2))
    old.take()
    new.take()
    assert old.is_lost() and not new.is_lost()


def test_who_saves_goes_on_when_somebody_removes_the_record(tmp_path):
    old, new = Lease(tmp_path, Attempt("a", 1)), Lease(tmp_path, Attempt("b", 0))
    old.take()
    new.take()
    (tmp_path / lease.RECORD).unlink()
    new.take()
    assert held(tmp_path) == ("b", 0) and old.is_lost()
    (tmp_path / lease.RECORD).unlink()
    old.take()  # the older one comes first: it saves until the newer one does
    assert not new.is_lost() or not old.is_lost()
    with contextlib.suppress(SupersededError):
        new.take()
    assert new.is_lost() != old.is_lost()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_order_one_saves_and_never_one_that_lost(tmp_path, seed):
    """Takes, saves and losses of random attempts of three runs; an oracle of its own."""
    random = np.random.default_rng(seed)
    live, order, lost = [], [], set()
    for _ in range(60):
        if not live or random.random() < 0.4:
            run, number = "abc"[random.integers(3)], int(random.integers(4))
            one = Lease(tmp_path, Attempt(run, number))
            newest = order[-1] if order else None
            refused = newest is not None and (
                newest[0] == run
                and newest[1] > number
                or newest[0] != run
                and run in {r for r, _ in order}
            )
            if refused:
                with pytest.raises(SupersededError):
                    one.take()
                continue
            one.take()
            order.append((run, number))
            lost |= set(map(id, live))
            live.append(one)
            continue
        one = live[int(random.integers(len(live)))]
        if id(one) in lost:
            with pytest.raises(SupersededError), one.held():
                raise AssertionError("not reached")
        else:
            with one.held():
                assert one is live[-1]


def test_a_trainer_whose_save_is_refused_ends_itself(tmp_path, capfd, monkeypatch):
    """With a code of its own, and without a clean-up that could wait for others."""
    old = CheckpointManager(tmp_path, attempt=Attempt("a", 0))
    Lease(tmp_path, Attempt("b", 0)).take()
    old.save(1, X)
    with pytest.raises(SupersededError, match="step 1 was not saved.*run b.*of run a"):
        old.save(2, X)

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended, interrupts.ends_when_superseded():
        CheckpointManager(tmp_path, attempt=Attempt("a", 1))
    assert ended.value.code == errors.SUPERSEDED
    assert "error: a newer attempt has taken over" in capfd.readouterr().err


def test_an_older_attempt_does_not_touch_what_the_newer_one_writes(tmp_path):
    """Both save step 2; the older one wakes up in the middle and cleans up after its refusal."""
    folders = [StepFolder(tmp_path) for _ in range(2)]
    folders[0].fence(Attempt("a", 0), takes=True)
    folders[0].begin(4)  # frozen in a save of step 4
    folders[0].unlock()
    folders[0].begin(2)
    folders[1].fence(Attempt("a", 1), takes=True)
    newer = folders[1].saving(2)
    newer.mkdir(parents=True)
    (newer / "data").write_text("of the newer one")
    (newer.parent / MARK).touch()
    folders[0].drop_saving(2)
    assert not folders[0].saving(2).parent.exists()
    with pytest.raises(SupersededError):
        folders[0].begin(2)
    assert folders[0].saving(4).parent.exists()
    folders[1].begin(6)
    assert not folders[0].saving(4).parent.exists()
    assert [p.name for p in newer.iterdir()] == ["data"]
    for folder in folders:
        folder.unlock()
