"""One run in a folder: the lock goes with its process, and says who has it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from megajax.checkpoint.lease import Attempt, SupersededError
from megajax.core.errors import UserError
from megajax.training import run_lock
from megajax.training.run_lock import FILE, RunLock, lock_run

# Another process, without our imports: as any program it gets the lock by flock.
HOLD = """
import fcntl, json, os, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
json.dump({"host": "far", "pid": os.getpid(), "since": "noon", "command": "train --x"}, file)
file.flush()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, tmp_path / FILE], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_who_runs(tmp_path, holder):
    with pytest.raises(UserError) as error:
        RunLock(tmp_path, patience_s=0)
    text = str(error.value)
    assert f"{tmp_path} is in use by process {holder.pid} on far since noon (train --x)" in text
    assert "--run_dir" in text


def test_a_killed_run_leaves_the_folder_free_at_once(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / FILE).exists()
    RunLock(tmp_path, patience_s=0).release()


def test_a_dying_run_is_waited_for(tmp_path, holder):
    threading.Timer(0.3, holder.kill).start()
    began = time.monotonic()
    lock = RunLock(tmp_path, patience_s=20)
    assert 0.2 < time.monotonic() - began < 10
    lock.release()


def test_what_is_released_leaves_nothing(tmp_path):
    """And a folder that held something keeps it."""
    lock = RunLock(tmp_path / "a" / "run")
    with pytest.raises(UserError, match=f"process {os.getpid()} on "):
        RunLock(tmp_path / "a" / "run", patience_s=0)
    lock.release()
    assert not (tmp_path / "a" / "run").exists()
    (tmp_path / "x").touch()
    RunLock(tmp_path).release()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "x"]


def test_a_fork_and_a_program_that_we_start_hold_nothing(tmp_path):
    lock = RunLock(tmp_path)
    assert not os.get_inheritable(lock._file)
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # JAX's threads stay behind
        child = os.fork()
    if not child:  # stays until the pipe is closed
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    os.close(lock._file)  # as the kernel does when we are killed
    lock._file = -1
    RunLock(tmp_path, patience_s=5).release()
    os.close(write)
    os.waitpid(child, 0)


def test_a_file_that_its_holder_removed_does_not_count(tmp_path, monkeypatch):
    """Between our open and our flock the holder releases: the lock of a file without a name."""
    taken = []

    def remove_first(file, path):
        if not taken:
            path.unlink()
        taken.append(file)
        return is_at(file, path)

    is_at = run_lock._is_at
    monkeypatch.setattr(run_lock, "_is_at", remove_first)
    lock = RunLock(tmp_path, patience_s=0)
    assert len(taken) == 2 and (tmp_path / FILE).exists()
    lock.release()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    RunLock(tmp_path).release()
    assert "cannot be locked" in caplog.text and "No locks available" in caplog.text


def test_all_processes_of_a_job_fail_with_the_first(tmp_path, monkeypatch):
    """Process 0 asks; what it sends is what the others hear."""
    sent = []
    monkeypatch.setattr(run_lock.jax, "process_count", lambda: 2)
    send = run_lock.multihost_utils
    monkeypatch.setattr(send, "broadcast_one_to_all", lambda x: sent.append(np.array(x)) or x)
    lock = lock_run(tmp_path, 0)
    with pytest.raises(UserError, match="is in use by") as first:
        lock_run(tmp_path, 0)
    monkeypatch.setattr(run_lock.jax, "process_index", lambda: 1)
    for message, refused in zip(sent, (None, str(first.value)), strict=True):
        monkeypatch.setattr(send, "broadcast_one_to_all", lambda _, m=message: m)
        if refused is None:
            assert lock_run(tmp_path, 0) is None
        else:
            with pytest.raises(UserError) as other:
                lock_run(tmp_path, 0)
            assert str(other.value) == refused
    lock.release()


def test_a_full_disk_is_no_mistake_of_the_command(tmp_path, monkeypatch):
    """Every process of the job ends with the code that a launcher starts again."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(run_lock.os, "open", lambda *_: (_ for _ in ()).throw(full))
    sent = []
    monkeypatch.setattr(run_lock.jax, "process_count", lambda: 2)
    send = run_lock.multihost_utils
    monkeypatch.setattr(send, "broadcast_one_to_all", lambda x: sent.append(np.array(x)) or x)
    for index in (0, 1):
        monkeypatch.setattr(run_lock.jax, "process_index", lambda i=index: i)
        with pytest.raises(UserError, match="cannot write to .*: No space left on") as refused:
            lock_run(tmp_path, 0)
        assert refused.value.exit_code == 75
        monkeypatch.setattr(send, "broadcast_one_to_all", lambda _: sent[0])


def test_a_lock_file_that_says_nothing_of_use(tmp_path):
    for text in ("", "{", "[" * 50_000, "[]", '{"pid": 1}'):
        (tmp_path / FILE).write_text(text)
        with open(tmp_path / FILE) as file:
            assert run_lock._holder(file.fileno()) == "another process"


def test_a_newer_attempt_of_a_run_does_not_wait_for_a_frozen_one(tmp_path):
    old = RunLock(tmp_path, attempt=Attempt("r", 0))
    new = RunLock(tmp_path, 0, Attempt("r", 1))
    old.release()  # wakes up, and ends: the file is not its own any more
    with pytest.raises(UserError, match="is in use by process") as refused:
        RunLock(tmp_path, 0)
    assert refused.value.exit_code == 2
    with pytest.raises(UserError, match="is in use by process") as refused:
        RunLock(tmp_path, 0, Attempt("another", 2))
    assert refused.value.exit_code == 75  # what a killed driver left may end soon
    with pytest.raises(SupersededError, match="a newer attempt is in"):
        RunLock(tmp_path, 60, Attempt("r", 0))
    new.release()
    assert not (tmp_path / FILE).exists()
