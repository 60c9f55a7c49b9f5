"""Two users of one machine: what one leaves where both may write harms and stops nobody else.

The tests run as root and become other users for a while; other users skip them.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from megajax.checkpoint import steps
from megajax.checkpoint.memory_tier import Segment
from megajax.checkpoint.store import ObjectPath
from megajax.checkpoint.trust import CheckpointError
from megajax.core.errors import UserError
from megajax.core.files import open_own
from megajax.monitor import heartbeat
from megajax.monitor.heartbeat import Heartbeat, Lease, dump_stacks_on_signal
from megajax.monitor.records import Stream
from megajax.systems.minder.run import watched_timers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users: needs root")
ALICE, MALLORY = 65534, 1234


@contextlib.contextmanager
def user(number):
    """Acts as another user."""
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def place(monkeypatch):
    """A folder that all may write to, as /tmp and /dev/shm are."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    monkeypatch.setattr(heartbeat, "shared_memory", lambda: folder)
    yield folder
    shutil.rmtree(folder)


def stacks(path):
    dump_stacks_on_signal(path)  # which writes beside its path


OPENERS = {
    "progress": Heartbeat,
    "records": Stream,
    "lease": Lease,
    "stacks": stacks,
    "own": open_own,
    "segment": Segment,
    "new segment": lambda path: Segment.create(path, 2**20),
}


@pytest.mark.parametrize("name", OPENERS)
def test_links_are_not_followed_and_files_of_another_user_not_used(name, place, monkeypatch):
    monkeypatch.setattr("faulthandler.register", lambda *words, **options: None)
    suffix = ".stacks" if name == "stacks" else ""
    link, trap = place / f"link{suffix}", place / f"trap{suffix}"
    with user(ALICE):
        (place / "thesis").write_bytes(b"thesis " * 20_000)
    with user(MALLORY):
        link.symlink_to(place / "thesis")
        trap.write_bytes(bytes(2**16))
        trap.chmod(0o666)
    for path in (place / "link", place / "trap"):
        with user(ALICE), pytest.raises((OSError, UserError, CheckpointError)):
            OPENERS[name](path)
    assert (place / "thesis").read_bytes() == b"thesis " * 20_000
    assert trap.read_bytes() == bytes(2**16)


def test_what_another_user_left_stops_no_training_that_watches_itself(place):
    with user(MALLORY):
        for name in ("megajax-minder-999999999", "megajax-1-dead"):
            (place / name).write_text("")
        (place / "megajax-2-dir").mkdir(mode=0o700)
        (place / "megajax-3-link").symlink_to("/")
    before = {p.name for p in place.iterdir()}
    with user(ALICE):
        _, progress = watched_timers()
        assert progress.parent.stat().st_mode & 0o777 == 0o700
    with user(MALLORY), pytest.raises(PermissionError):
        list(progress.parent.iterdir())
    assert {p.name for p in place.iterdir()} - before == {progress.parent.name}
    assert before <= {p.name for p in place.iterdir()}


def test_a_sweep_takes_only_what_this_user_made_for_agents(place, monkeypatch):
    monkeypatch.setattr(heartbeat, "YOUNG_S", -1)
    with user(ALICE):
        (place / "megajax-notes").mkdir()
        (place / "megajax-notes" / "thesis").write_text("mine")
        (place / "megajax-old").mkdir()
        open_own(place / "megajax-old" / heartbeat.FOLDER_MARK)
        live, lock = heartbeat.claim_folder(place)
    with user(MALLORY):
        dead, theirs = heartbeat.claim_folder(place)
        fcntl.flock(theirs, fcntl.LOCK_UN)
        (place / "megajax-link").symlink_to(place / "megajax-notes")
    with user(ALICE):
        assert heartbeat.sweep_folders(place) == [place / "megajax-old"]
    assert live.exists() and dead.exists() and (place / "megajax-notes" / "thesis").exists()
    for number in (lock, theirs):
        os.close(number)


def test_staged_steps_are_not_put_where_another_user_may_look(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with user(ALICE):
        address = ObjectPath("s3://bucket/steps")
        first = steps.ObjectFolder(address).saving(3).parent.parent
        (place / "runs").mkdir()
    with user(MALLORY):
        first.symlink_to(place / "runs")
        (place / f"{first.name}-1").mkdir()
    with user(ALICE):
        stage = steps.ObjectFolder(address).saving(3).parent.parent
        assert stage == place / f"{first.name}-2"
        stage.mkdir(mode=0o700)
        assert steps.ObjectFolder(address).saving(3).parent.parent == stage
