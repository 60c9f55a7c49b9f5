"""The lease of training processes: who has lost it, and that they then end."""

import os
import subprocess
import sys
import time

import pytest

from megajax.monitor import heartbeat, records


@pytest.fixture
def still(monkeypatch):
    """No thread looks."""
    monkeypatch.setattr(heartbeat.Watch, "_look", lambda self: None)


def test_a_lease_grows_old_and_is_never_renewed_by_an_old_answer(tmp_path, still, monkeypatch):
    path = heartbeat.lease_file(tmp_path / "attempt0-rank3")
    assert heartbeat.of_process(tmp_path / "attempt0-rank3") is None  # nobody gives one
    writer = heartbeat.Lease(path)
    moment = heartbeat.now()
    writer.renew(moment, 10.0)
    watch = heartbeat.of_process(tmp_path / "attempt0-rank3")
    assert watch is not None and watch.lost() is None
    monkeypatch.setattr(heartbeat, "now", lambda: moment + 10.5)
    assert watch.lost() == "its agent heard nothing of the driver for 10.5 s of 10"
    writer.renew(moment + 8.0)
    assert watch.lost() is None
    writer.renew(moment + 0.1)  # was long on its way
    assert watch.lost() is None
    monkeypatch.setattr(heartbeat, "now", lambda: moment + 18.1)
    assert watch.lost() is not None
    writer.renew(moment + 18.0)
    with monkeypatch.context() as broken:

        def read(self):
            raise OSError(5, "I/O error")

        broken.setattr(heartbeat.Watch, "_read", read)
        assert watch.lost() == "its lease cannot be read: I/O error"
    path.unlink()
    assert watch.lost() == "its agent has ended"
    writer.close()


CODE = """
import pathlib, sys, time
from megajax.monitor import heartbeat
from megajax.monitor.timers import Timers
heartbeat.LOOK_S = float(sys.argv[2])
timers = Timers.of_process(pathlib.Path(sys.argv[1]))
print("begins", flush=True)
if sys.argv[3] == "save":
    sys.stdin.read()
    timers.enter("save", 1)
    print("saves", flush=True)
time.sleep(30)
"""


@pytest.mark.process
@pytest.mark.parametrize(("look", "what"), [("0.02", "wait"), ("30", "save")])
def test_a_process_without_a_lease_ends_and_begins_no_save(tmp_path, look, what):
    writer = heartbeat.Lease(tmp_path / "lease")
    writer.renew(heartbeat.now(), 100.0)
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, tmp_path / "progress", look, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begins\n"
    writer.renew(heartbeat.now(), 0.0)
    time.sleep(0.01)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (heartbeat.EXPIRED, "")
    assert err.startswith(f"[lease] process {process.pid} ends: its agent heard nothing")
    writer.close()


def test_a_print_on_a_full_disk_ends_nobody():
    with open("/dev/full", "w", encoding="ascii") as full:
        stream = records.Lossy(full)
        print("x" * 100_000, file=stream, flush=True)
        stream.writelines(["a", "b"])
        with open(os.devnull, "w") as other:
            os.dup2(other.fileno(), full.fileno())
    reader, writer = os.pipe()
    with open(writer, "w", encoding="ascii") as out:
        print("é", file=records.Lossy(out), flush=True)
    assert os.read(reader, 100) == b"\\xe9\n"
    os.close(reader)
