"""What other people and programs keep in a run's folder: it stays, and stops nobody."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.steps import METADATA
from megajax.checkpoint.store import SaveError
from megajax.checkpoint.trust import RECORD, CheckpointError, UnreadableError

FOLDERS = ["5", "6.trash", "7.former", "8.saving-backup-of-bob", "2024-results.trash", "3x.former",
           "0.saving_notes", "9", "1.trash", "4.saving"]  # fmt: skip
FILES = ["10", "12.trash", "13.saving", "4.orbax-checkpoint-tmp-mine"]
NOBODY = 65534


def state(step):
    return {"x": np.full(4, step, np.float32)}


@contextlib.contextmanager
def plain_user():
    """Acts as a user whom modes stop, as they do not stop root."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def place():
    """A folder that a plain user may enter."""
    with plain_user():
        folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


def test_nothing_is_removed_or_replaced_that_others_keep_there(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    manager.save(1, state(1)).result()
    manager.close()
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text(name)
    for name in FILES:
        (tmp_path / name).write_text(name)
    (tmp_path / "11").symlink_to("/nowhere")
    theirs = {n: sorted((tmp_path / n).glob("*")) for n in os.listdir(tmp_path) if n != "1"}
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (5, 9, 10, 11, 4, 13):
        with pytest.raises(SaveError, match=rf"{tmp_path}/{step}.* megajax.*move it"):
            manager.save(step, state(step)).result()
    for step in (2, 3, 14):  # step 1 has to go, though 1.trash is somebody else's
        manager.save(step, state(step)).result()
    manager.close()
    assert manager.steps() == [3, 14]
    assert set(os.listdir(tmp_path)) - set(theirs) == {"3", "14"}
    for name, held in theirs.items():
        assert sorted((tmp_path / name).glob("*")) == held
    assert os.readlink(tmp_path / "11") == "/nowhere"
    assert all((tmp_path / n / "thesis").read_text() == n for n in FOLDERS)
    assert all((tmp_path / n).read_text() == n for n in FILES)


def test_a_step_that_plain_orbax_wrote_is_neither_replaced_nor_let_go(tmp_path):
    ocp.save(tmp_path / "1", state(1), custom_metadata={"rows": 7})
    manager = CheckpointManager(tmp_path, keep=1)
    with pytest.raises(SaveError, match="move it"):
        manager.save(1, state(2)).result()
    for step in (2, 3):
        manager.save(step, state(step)).result()
    manager.close()
    assert manager.steps() == [1, 3]
    assert manager.restore(1, like=state(0))["x"].tolist() == [1] * 4


def hidden(path, mode=0):
    for one in (path, *path.rglob("*")) if mode == 0 and path.name == "state" else (path,):
        if not (path.name == "state" and one.is_dir()):
            one.chmod(mode)


CLOSED = {  # what is closed in step 3 of 1, 2 and 3, and the step that comes back
    "folder": (lambda step: step.chmod(0), 2),
    "arrays": (lambda step: hidden(step / "state"), 2),
    "record": (lambda step: hidden(step / RECORD), 2),
    "metadata": (lambda step: hidden(step / METADATA), 2),
    "nothing": (lambda step: None, 3),
    "a folder beside": (lambda step: (step.parent / "7").mkdir(mode=0), 3),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_resume_takes_the_newest_step_that_can_be_read(name, place, caplog):
    close, expected = CLOSED[name]
    with plain_user():
        manager = CheckpointManager(place / "steps", keep=0)
        for step in (1, 2, 3):
            manager.save(step, state(step), data_state={"rows": step}).result()
        manager.close()
        close(place / "steps" / "3")
        manager = CheckpointManager(place / "steps", keep=1)
        restored = manager.restore(like=state(0))["x"]
        assert manager.latest() == expected and restored.tolist() == [expected] * 4
        assert manager.data_state(expected) == {"rows": expected}
        assert ("Make it readable" in caplog.text) == (name != "nothing")
        for step in (9, 10):
            manager.save(step, state(step)).result()
        manager.close()
        left = {p.name for p in (place / "steps").iterdir()}
        assert left >= {"10"} and left <= {"3", "7", "10"}
        assert ("3" in left) == (name in ("folder", "record", "metadata"))


def test_unreadable_steps_alone_are_not_taken_for_a_new_run(place):
    with plain_user():
        CheckpointManager(place).save(3, state(3)).finish()
        (place / "3").chmod(0)
        with pytest.raises(UnreadableError, match="Make it readable"):
            CheckpointManager(place).restore(like=state(0))
        (place / "3").chmod(0o700)
        place.chmod(0o333)
        with pytest.raises(CheckpointError, match="Make it readable"):
            CheckpointManager(place).restore(like=state(0))
        place.chmod(0o700)
