"""The progress record as another process sees it: whole, newest, readable after a kill."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import find_supervisor
from megajax.monitor import heartbeat
from megajax.monitor.heartbeat import CODES, Heartbeat, read, read_spans, stacks_file
from megajax.monitor.timers import Timers

HAMMER = """
import sys, pathlib
from megajax.monitor.heartbeat import Heartbeat
beat = Heartbeat(pathlib.Path(sys.argv[1]))
n = 0
while True:
    n += 1
    beat.keep(n, n, n, 1)
    beat.write(float(n), n, 1 + n % 4, float(n), float(n), float(n))
"""


def test_a_record_comes_back(tmp_path):
    path = tmp_path / "rank"
    assert read(path) is None
    beat = Heartbeat(path)
    assert read(path) is None  # zeros agree too, and are no record
    beat.write(12.5, 7, CODES["wait"], 2.25, 0.5, 1.5)
    progress = read(path)
    assert (progress.beat, progress.time, progress.step, progress.section) == (1, 12.5, 7, "wait")
    assert (progress.loss, progress.own_s, progress.step_s) == (2.25, 0.5, 1.5)
    assert progress.pid == os.getpid()
    assert not progress.has_bad_loss
    beat.write(13.0, 8, CODES["failed"], math.nan, 0.5, 1.5)
    assert read(path).has_bad_loss


def test_its_pages_are_there_before_they_are_written(tmp_path, monkeypatch):
    """A page that full shared memory cannot give later would end the process by SIGBUS."""
    Heartbeat(tmp_path / "p")
    assert os.stat(tmp_path / "p").st_blocks * 512 >= heartbeat.SIZE
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(UserError, match=r"cannot keep [\d,]+ bytes of progress in .*No space left"):
        Heartbeat(tmp_path / "q")


@pytest.mark.parametrize("side", ["front", "back"])
def test_a_write_cut_off_at_any_byte_leaves_the_record_before(tmp_path, side):
    path = tmp_path / "rank"
    beat = Heartbeat(path)
    states = []
    for n in (1, 2, 3):  # the third goes over the first
        beat.write(n * 1.1, n * 1001, n, n * 2.2, n * 3.3, n * 4.4)
        states.append(path.read_bytes())
    before, after = states[1], states[2]
    changed = [i for i in range(len(after)) if before[i] != after[i]]
    assert len(changed) > 20
    for k in range(1, len(changed)):
        taken = changed[:k] if side == "front" else changed[k:]
        torn = bytearray(before)
        for i in taken:
            torn[i] = after[i]
        path.write_bytes(torn)
        assert read(path).step == 2002, f"{k} of {len(changed)} bytes"
    path.write_bytes(after)
    assert read(path).step == 3003


def test_a_busy_writer_is_never_read_torn_and_its_death_loses_nothing(tmp_path):
    path = tmp_path / "rank"
    writer = subprocess.Popen([sys.executable, "-c", HAMMER, str(path)])
    try:
        while read(path) is None:
            time.sleep(0.01)
        last, end = 0, time.monotonic() + 1
        while time.monotonic() < end:
            p = read(path)
            assert p.time == p.step == p.loss == p.own_s == p.step_s == p.beat
            assert p.beat >= last
            last = p.beat
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    p = read(path)
    assert p.beat >= last > 1000 and p.pid == writer.pid
    spans = read_spans(path)
    assert len(spans) > heartbeat.SPANS - 10
    assert [s.step for s in spans] == list(range(p.beat - len(spans) + 1, p.beat + 1))


def clocked():
    """A clock that a test moves: clock.now."""

    def clock():
        return clock.now

    clock.now = 100.0
    return clock


def test_timers_partition_the_time_and_tell_own_work(tmp_path):
    clock = clocked()
    timers = Timers(Heartbeat(tmp_path / "rank"), clock)
    # (section, step, seconds spent in it)
    for section, step, spent in [
        ("data", 1, 1),
        ("prepare", 1, 1),
        ("compile", 1, 40),
        ("wait", 1, 2),
        ("data", 2, 0.25),
        ("prepare", 2, 0.5),
        ("launch", 2, 4),
        ("wait", 2, 0.125),
        ("save", 2, 8),
        ("data", 3, 0),
    ]:
        timers.enter(section, step)
        clock.now += spent
    p = read(tmp_path / "rank")
    assert (p.section, p.step) == ("data", 3)
    assert p.own_s == 0.75 and p.step_s == 12.875
    assert timers.drain() == {
        "time_data_s": 1.25,
        "time_prepare_s": 1.5,
        "time_compile_s": 40,
        "time_wait_s": 2.125,
        "time_launch_s": 4,
        "time_save_s": 8,
    }
    assert timers.drain() == {}
    spans = read_spans(tmp_path / "rank")
    assert [(s.section, s.step, s.end - s.begin) for s in spans][4:7] == [
        ("wait", 1, 2),
        ("data", 2, 0.25),
        ("prepare", 2, 0.5),
    ]
    assert all(a.end == b.begin for a, b in zip(spans, spans[1:], strict=False))


def test_the_ring_keeps_the_newest_spans(tmp_path):
    timers = Timers(Heartbeat(tmp_path / "rank"))
    for step in range(1, 3 * heartbeat.SPANS):
        timers.enter("data", step)
    steps = [s.step for s in read_spans(tmp_path / "rank")]
    assert steps == list(range(3 * heartbeat.SPANS - 1 - len(steps), 3 * heartbeat.SPANS - 1))
    assert len(steps) >= heartbeat.SPANS - 8


END = """
import sys, pathlib
from megajax.monitor.timers import Timers
class JaxRuntimeError(Exception): pass
timers = Timers.of_process(pathlib.Path(sys.argv[1]))
timers.enter("wait", 5)
HOW
"""


@pytest.mark.parametrize(
    ("how", "section"),
    [
        ("raise JaxRuntimeError('gloo')", "lost"),
        ("raise JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')", "failed"),
        ("raise ValueError('loader')", "failed"),
        ("sys.exit(0)", "failed"),  # too early: nobody said 'end'
        ("timers.enter('end', 6)", "end"),
    ],
)
def test_a_process_says_how_it_ends(tmp_path, how, section):
    path = tmp_path / "rank"
    code = END.replace("HOW", how)
    subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True)
    assert read(path).section == section


STUCK = """
import sys, pathlib, itertools
from megajax.monitor.timers import Timers
Timers.of_process(pathlib.Path(sys.argv[1])).enter("data", 5)
def spins_in_c(): sum(itertools.repeat(0))
spins_in_c()
"""


def test_stacks_come_from_a_process_that_holds_the_interpreter(tmp_path):
    path = tmp_path / "rank"
    stuck = subprocess.Popen([sys.executable, "-c", STUCK, str(path)])
    try:
        while (p := read(path)) is None or p.section != "data":
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(p.pid, signal.SIGUSR1)
        end = time.monotonic() + 5
        while "spins_in_c" not in stacks_file(path).read_text():
            assert time.monotonic() < end and stuck.poll() is None
            time.sleep(0.01)
    finally:
        stuck.kill()
        stuck.wait()


def test_the_agent_names_the_file(tmp_path):
    assert find_supervisor({}).progress is None
    env = {
        "MEGAJAX_PROGRESS": str(tmp_path / "x"),
        "MEGAJAX_MEMORY": str(tmp_path / "y"),
        "MEGAJAX_ATTEMPT": "3",
    }
    supervisor = find_supervisor(env)
    assert (supervisor.progress, supervisor.memory) == (tmp_path / "x", tmp_path / "y")
    assert supervisor.attempt == 3


def test_a_boundary_is_cheap(tmp_path):
    """Microseconds (docs/papers/megascale.md has the figure); the bound is for a busy machine."""
    timers = Timers(Heartbeat(tmp_path / "rank"))
    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(500):
            timers.enter("wait", 1)
        best = min(best, (time.perf_counter() - began) / 500)
    assert best < 30e-6
    print(f"{best * 1e6:.2f} us a boundary")
