"""No good step goes while fewer than `keep` newer verified ones exist."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megajax.checkpoint import trust
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.steps import METADATA, StepFolder
from megajax.checkpoint.store import SaveError
from megajax.checkpoint.trust import RECORD, CheckpointError, DamagedError, Record
from megajax.core.errors import UserError

X = {"x": np.arange(3, dtype=np.float32)}


def put_step(steps: StepFolder, step: int, metric: float | None = None) -> None:
    """Stores a step as the manager does, without arrays."""
    steps.begin(step)
    folder = steps.saving(step)
    folder.mkdir()
    for name in ("data", METADATA):
        trust.write_file(folder / name, json.dumps({"step": step}))
    files = trust.sum_files(folder, trust.list_files(folder))
    trust.write_record(folder, Record(step, files, {}, metric))
    try:
        steps.commit(step)
    finally:
        steps.unlock()


def junk(place: Path, name: str, kind: int = 0) -> None:
    folder = place / name
    if folder.exists():
        return
    folder.mkdir(parents=True)
    (folder / METADATA).write_text(
        ["", "{}", "[1]", '{"custom_metadata": {"megajax.integrity": 1}}'][kind % 4]
    )
    if kind >= 4:
        (folder / RECORD).write_text('{"crc32": "00000000", "record": {}}\n')


def names(place: Path) -> list[str]:
    return sorted(p.name for p in place.iterdir())


def test_folders_without_a_valid_record_are_not_kept_instead_of_steps(tmp_path):
    manager = CheckpointManager(tmp_path, keep=3)
    for step in (1, 2, 3):
        manager.save(step, X)
    manager.close()
    for name in ("500", "600", "700", "0900", "٩", "²", "8x"):
        junk(tmp_path, name)
    manager.save(4, X).result()
    manager.close()
    assert manager.steps() == [2, 3, 4] and manager.latest() == 4
    np.testing.assert_array_equal(manager.restore(like=X)["x"], X["x"])
    assert set(names(tmp_path)) >= {"500", "600", "700", "0900", "٩", "²", "8x"}


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_one_folder_that_is_no_step_does_not_stop_a_restore(tmp_path, kind):
    manager = CheckpointManager(tmp_path)
    manager.save(1, X).result()
    junk(tmp_path, "700", kind)
    assert manager.restore(like=X)["x"].tolist() == [0, 1, 2]
    assert manager.latest() == 1
    # What describes itself as Orbax's, and holds nothing:
    (tmp_path / "800").mkdir()
    shutil.copy(tmp_path / "1" / METADATA, tmp_path / "800")
    text = (tmp_path / "800" / METADATA).read_text().replace("megajax.integrity", "other")
    (tmp_path / "800" / METADATA).write_text(text)
    assert manager.restore(like=X)["x"].tolist() == [0, 1, 2]
    assert manager.latest() == 1


def test_a_step_that_was_just_saved_stays_below_newer_ones(tmp_path):
    steps = StepFolder(tmp_path)
    put_step(steps, 100)
    put_step(steps, 50)
    steps.retain(1, 0, (), 50)
    assert steps.steps() == [50, 100]
    put_step(steps, 60)
    steps.retain(1, 0, (), 60)
    assert steps.steps() == [60, 100]


def test_a_folder_with_another_runs_steps_is_not_replaced(tmp_path):
    manager = CheckpointManager(tmp_path)
    CheckpointManager(tmp_path / "5").save(1, X).result()
    with pytest.raises(CheckpointError, match="5 holds 1/, a step of another run"):
        manager.save(5, X).result()
    assert CheckpointManager(tmp_path / "5").steps() == [1]


def good(steps: StepFolder, listed: list[int]) -> set[int]:
    return {s for s in listed if _is_good(steps, s)}


def _is_good(steps: StepFolder, step: int) -> bool:
    """An oracle of its own: the bytes of the step are those that `put_step` wrote."""
    try:
        texts = [(steps.step(step) / n).read_bytes() for n in ("data", METADATA)]
        json.loads((steps.step(step) / RECORD).read_bytes())
    except (OSError, ValueError):
        return False
    return texts == [json.dumps({"step": step}).encode()] * 2


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 200))]
)
def test_no_good_step_is_lost(tmp_path, seed, monkeypatch):
    """Random saves, junk, damage and saves of lower numbers."""
    monkeypatch.setattr(trust.os, "fsync", lambda number: None)
    random = np.random.default_rng(seed)
    keep, best = int(random.integers(1, 4)), int(random.integers(0, 2))
    steps = StepFolder(tmp_path)
    for _ in range(25):
        step = int(random.integers(0, 30))
        before = good(steps, list(range(40)))
        match random.integers(0, 5):
            case 0:
                name = str(random.choice([str(step), f"0{step}", "²", "x"]))
                junk(tmp_path, name, int(random.integers(0, 6)))
            case 1 if (tmp_path / str(step) / "data").exists():
                (tmp_path / str(step) / "data").write_text("")
                before.discard(step)
            case _:
                put_step(steps, step, float(random.random()))
                steps.retain(keep, best, (), step)
                before.add(step)
        now = good(steps, list(range(40)))
        for lost in before - now:
            assert sum(s > lost for s in now) >= keep, (seed, lost, before, now)
    steps.empty()


# ---- unreadable is not absent


def refuse(monkeypatch, place: Path, code: int = errno.EACCES) -> None:
    """Makes all below a place unreadable; the tests run as root, whom modes do not bind."""

    def wrap(module, name):
        call = getattr(module, name)

        def guarded(path, *args, **kwargs):
            if isinstance(path, str | Path) and str(path).startswith(str(place)):
                raise OSError(code, os.strerror(code), str(path))
            return call(path, *args, **kwargs)

        monkeypatch.setattr(module, name, guarded)

    for module, name in ((os, "listdir"), (os, "scandir"), (os, "stat"), (os, "open")):
        wrap(module, name)
    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, *a, **k: (
            os.listdir(self) if str(self).startswith(str(place)) else opened(self, *a, **k)
        ),
    )


@pytest.mark.parametrize("where", ["1", "1/integrity.json", "."])
def test_what_cannot_be_read_is_not_taken_for_absent(tmp_path, monkeypatch, where):
    manager = CheckpointManager(tmp_path / "c")
    manager.save(1, X).result()
    manager.close()
    with monkeypatch.context() as patch:
        refuse(patch, tmp_path / "c" / where)
        with pytest.raises(UserError, match="ermission denied"):
            CheckpointManager(tmp_path / "c").latest()
    assert manager.latest() == 1


def test_only_a_step_that_was_read_back_lets_older_ones_go(tmp_path):
    """A mark counts for the record that it names, whole, and not when it says what was wrong."""
    steps = StepFolder(tmp_path)
    for step, metric in ((1, 2.0), (2, 1.0), (3, 3.0), (4, 4.0)):
        put_step(steps, step, metric)
    records = {s: steps.record(s) for s in steps.steps()}
    assert steps.unread(1) == 4 and steps.unread(1, {4, 3}) == 2
    trust.write_mark(steps.step(4), records[3], [])
    (tmp_path / "3" / trust.MARK).write_text('{"record": "')
    steps.retain(1, 0, (), 4, read_back=True)
    assert steps.steps() == [1, 2, 3, 4]
    trust.write_mark(steps.step(4), records[4], [])
    assert steps.unread(1) is None and steps.unread(2) == 3
    steps.retain(1, 1, (), 4, read_back=True)
    assert steps.steps() == [1, 2, 3, 4]  # none of the others is known to be the best one
    trust.write_mark(steps.step(2), records[2], [])
    steps.retain(1, 1, (), 4, read_back=True)
    assert steps.steps() == [2, 4]
    trust.write_mark(steps.step(4), records[4], ["leaf x"])
    with pytest.raises(DamagedError, match="step 4 .*not what was written: leaf x"):
        steps.record(4)
    put_step(steps, 4)
    assert steps.record(4) == dataclasses.replace(records[4], metric=None)


@pytest.mark.parametrize("seen", [True, False], ids=["restored", "not looked at"])
def test_a_copy_that_went_bad_lets_none_go_while_it_is_saved_again(tmp_path, monkeypatch, seen):
    """It keeps its record, sizes and mark. A listing may have hidden it from the restore."""
    x = {"x": np.random.default_rng(0).random(2**18, np.float32)}
    manager = CheckpointManager(tmp_path, keep=0)
    for step in (1, 2, 3):
        manager.save(step, x).result()
    manager.close()
    largest = max((tmp_path / "3").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)

    manager = CheckpointManager(tmp_path, keep=2)
    if seen:
        np.testing.assert_array_equal(manager.restore(like=x)["x"], x["x"])
        assert manager.latest() == 2

    def killed(*_):
        raise OSError("killed before the new copy counts")

    monkeypatch.setattr(StepFolder, "commit", killed)
    with pytest.raises(SaveError, match="killed before"):
        manager.save(3, x).result()
    assert manager.steps() == [1, 2, 3]
    monkeypatch.undo()
    manager.save(3, x).result()
    manager.close()
    assert manager.steps() == [2, 3]
