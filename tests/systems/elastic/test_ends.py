"""What an agent starts ends with it, and nothing else does: logs, orphans, leases, attempts."""

import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from megajax.core.errors import UserError
from megajax.monitor import heartbeat, meter
from megajax.monitor.detectors import Limits
from megajax.monitor.records import read_jsonl
from megajax.systems.elastic import agent as agent_
from megajax.systems.elastic import driver as driver_module
from megajax.systems.elastic import reaper
from megajax.systems.elastic.agent import Agent, Output
from megajax.systems.elastic.driver import Driver, Host, Hosts, Settings
from megajax.systems.elastic.events import Journal, Speaker
from megajax.systems.elastic.wire import AGENT, Line, join_address, self_signed, split_address

ROOT = pathlib.Path(__file__).parent.parent.parent.parent
SUPERVISE = str(ROOT / "scripts" / "supervise.py")
process = pytest.mark.process
# An agent forks; jax, which other tests of this process use, warns of that and no agent has it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def lives(pid):
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


# ---- logs


@process
def test_a_log_that_is_removed_is_read_on(tmp_path):
    log = tmp_path / "attempt0" / "rank0.log"
    script = "printf 'a\\303'; read x < fifo; printf '\\251b'"
    os.mkfifo(tmp_path / "fifo")
    with contextlib.chdir(tmp_path):
        popen, output = agent_.run(["sh", "-c", script], log, os.environ)
    output.follow()
    wait_for(lambda: log.stat().st_size == 2)
    assert output.new_text() == "a"  # and half of a character
    log.unlink()
    log.parent.rmdir()
    (tmp_path / "fifo").write_text("\n")
    popen.wait()
    assert output.new_text() == "éb" and output.total == 4
    assert meter.disk_free(log.parent) > 0
    output.close()


@process
def test_a_place_that_takes_no_log_costs_the_log(tmp_path, capsys):
    (tmp_path / "rank0.log").mkdir()
    popen, output = agent_.run(["echo", "x"], tmp_path / "rank0.log", os.environ)
    output.follow()
    assert popen.wait() == 0
    assert output.new_text() == "x\n" and "no log" in capsys.readouterr().err
    output.close()
    assert output.missing() == (
        "2 bytes of output are not in the log (Is a directory); the last:\nx\n\n"
    )
    with pytest.raises(FileNotFoundError):
        agent_.run(["no such program"], tmp_path / "other.log", os.environ)


@process
def test_frozen_agents_are_not_waited_for_one_after_the_other(monkeypatch):
    monkeypatch.setattr(driver_module, "ANSWER_S", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    hosts = Hosts(Owner(), listener, "a secret of this job")
    agents = [subprocess.Popen(["sleep", "60"]) for _ in range(5)]
    for agent in agents:
        agent.send_signal(signal.SIGSTOP)
    hosts._local = {f"local{i}": agent for i, agent in enumerate(agents)}
    began = time.monotonic()
    hosts.close()
    assert time.monotonic() - began < 1.2  # one after the other: 1.5
    assert [a.returncode for a in agents] == [-signal.SIGKILL] * 5


@process
def test_a_command_that_prints_does_not_meet_a_full_disk(tmp_path):
    script = "i=0; while [ $i -lt 300 ]; do echo line $i || exit 9; i=$((i+1)); done; kill -9 $$"
    popen, output = agent_.run(["sh", "-c", script], pathlib.Path("/dev/full"), os.environ)
    output.follow()
    assert popen.wait() == -signal.SIGKILL  # and no 9
    text = "".join(f"line {i}\n" for i in range(300))
    assert output.new_text() == text
    output.close()
    lost = f"{len(text)} bytes of output are not in the log (No space left on device); the last:\n"
    assert output.missing() == f"{lost}{text}\n"


def test_a_log_says_what_is_missing_as_soon_as_there_is_room(tmp_path):
    output = Output(tmp_path / "log")
    room, full = os.dup(output._file), os.open("/dev/full", os.O_WRONLY)
    output.follow()

    def put(text):
        before = output.total
        os.write(output.writer, text.encode())
        wait_for(lambda: output.total > before and not output._waiting)

    put("first\n")
    wait_for(lambda: (tmp_path / "log").stat().st_size == 6)
    os.dup2(full, output._file)
    put("lost\n")
    wait_for(lambda: output.missing())
    assert output.missing().endswith("first\nlost\n\n")
    os.dup2(room, output._file)
    put("second\n")
    os.close(output.writer)
    output.close()
    note = "\n[agent] 5 bytes are missing here: No space left on device\n"
    assert (tmp_path / "log").read_text() == f"first\n{note}second\n" and not output.missing()
    for file in (room, full):
        os.close(file)


@process
def test_what_a_command_left_behind_may_keep_its_output_open(tmp_path):
    """The command is killed with 200 kB in the pipe; the process it left prints on."""
    script = f"sleep 60 & {sys.executable} -c 'print(\"x\" * 200_000)'; kill -9 $$"
    popen, output = agent_.run(["sh", "-c", script], tmp_path / "log", os.environ)
    assert popen.wait() == -signal.SIGKILL
    output.follow()
    assert len(output.new_text()) == 200_001
    began = time.monotonic()
    output.close()
    assert time.monotonic() - began < 2
    os.killpg(popen.pid, signal.SIGKILL)
    assert (tmp_path / "log").stat().st_size == 200_001


def test_a_process_whose_lease_is_over_does_not_wait_for_its_output(monkeypatch):
    """Its agent is frozen, and the pipe is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    ended, written, select_ = [], [], select.select
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(os, "write", lambda *args: written.append(args))
    monkeypatch.setattr(select, "select", lambda r, w, x, t: select_(r, [writer] if w else w, x, t))
    heartbeat.end("of a test")
    assert ended == [heartbeat.EXPIRED] and not written
    os.close(reader)
    os.close(writer)


# ---- orphans


def two_of(mark):
    wait_for(lambda: len(reaper.marked(mark)) == 2)
    return reaper.marked(mark)


AN_AGENT = """
import os, pathlib, sys
from megajax.monitor import heartbeat
from megajax.monitor.detectors import Limits
from megajax.monitor.records import read_jsonl
from megajax.systems.elastic import driver as driver_module
from megajax.systems.elastic import agent, reaper
from megajax.systems.elastic.agent import Agent
from megajax.systems.elastic.driver import Driver, Settings
agent.adopt_orphans()
command = ["sh", "-c", sys.argv[2]]
env = os.environ | {reaper.MARK: sys.argv[3]}
popen, _ = agent.run(command, pathlib.Path(sys.argv[1]), env)
print(popen.pid, flush=True)
sys.stdin.readline()
popen.kill()
popen.wait()
print(len(reaper.descendants(os.getpid())), flush=True)
print(reaper.kill_all(lambda: reaper.reap(()) or reaper.descendants(os.getpid())), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def agent(tmp_path):
    """Starts an agent with a shell command. Returns it, its mark, and the command's number."""
    started = []

    def start(script):
        mark = f"test-{os.getpid()}-{tmp_path.name}"
        words = [sys.executable, "-c", AN_AGENT, str(tmp_path / "log"), script, mark]
        popen = subprocess.Popen(words, stdin=-1, stdout=-1, text=True)
        started.append(popen)
        return popen, mark, int(popen.stdout.readline())

    yield start
    for popen in started:
        popen.kill()
        popen.communicate()


@process
def test_what_left_its_session_is_found(agent):
    """One with the mark in its environment, one that cleared it and has lost its parents."""
    script = "setsid sleep 61 & (setsid env -i sleep 62 &); echo; exec sleep 63"
    popen, mark, first = agent(script)
    pids = two_of(mark)
    assert first in pids
    wait_for(lambda: len(reaper.descendants(popen.pid)) == 3)
    all_ = reaper.descendants(popen.pid)
    popen.stdin.write("\n")
    popen.stdin.flush()
    assert popen.stdout.readline() == "2\n" and popen.stdout.readline() == "True\n"
    assert not any(lives(pid) for pid in all_)
    children = reaper.descendants(os.getpid())
    assert popen.pid in children and reaper.descendants(os.getpid(), [popen.pid]) < children


@process
def test_the_reaper_finds_what_left_its_group(agent):
    popen, mark, first = agent("setsid sleep 64 & exec sleep 65")
    pids = two_of(mark)
    done = subprocess.run(
        [sys.executable, reaper.__file__], input=f"mark {mark}\nreaped 1\n", text=True, timeout=10
    )
    assert done.returncode == 0 and not any(lives(pid) for pid in pids)


@process
def test_a_command_dies_with_its_agent_though_no_reaper_lives(agent):
    popen, _, first = agent("exec sleep 66")
    assert lives(first)
    popen.kill()
    wait_for(lambda: not lives(first))


# ---- the driver


class Owner:
    def __getattr__(self, name):
        return lambda *words: None


@pytest.fixture
def joined():
    """Hosts with one agent that has joined: the hosts, the host, the agent's line."""
    hosts = Hosts(Owner(), socket.create_server(("127.0.0.1", 0)), "a secret of this job")
    a, b = socket.socketpair()
    line, agents = Line(FakeSocket(a), "s" * 16, False), Line(FakeSocket(b), "s" * 16, True)
    agents._hello()
    line.receive()
    agents.receive()
    line.receive()
    hosts._selector.register(line, 1)
    line.purpose, line.name = AGENT, "a"
    hosts._join(line, {"address": "127.0.0.1", "pid": 7, "mark": "m"})
    assert agents.receive() == [{"do": "welcome"}]
    yield hosts, hosts.good()[0], agents
    hosts.close()
    agents.close()


class FakeSocket:
    """One of a pair, which takes TCP's options."""

    def __init__(self, sock):
        self._sock = sock

    def setsockopt(self, *_):
        """Has none."""

    def __getattr__(self, name):
        return getattr(self._sock, name)


def test_every_report_renews_the_lease_by_the_agents_own_moment(joined):
    hosts, host, agents = joined
    assert host.leased < 0 and host.mark == "m"
    agents.send({"report": 0, "records": [], "moment": 12.5})
    hosts.pump(1.0)
    assert agents.receive() == [{"do": "lease", "since": 12.5}]
    assert time.monotonic() - host.leased < 1
    assert not hosts.dismiss(host) and not hosts.has(host)  # elsewhere: its processes may go on


def test_an_agent_takes_a_new_folder_where_its_own_was_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "shared_memory", lambda: tmp_path)
    told = []
    agent = object.__new__(Agent)
    agent._claim()
    first = agent._folder
    agent._processes, agent._line, agent._env = [], None, {}
    agent._tell_reaper = told.append
    message = {"attempt": 0, "folder": str(tmp_path), "ranks": {}, "since": 1.0, "lease": 2.0}
    agent._start(message)
    assert agent._folder == first and not told
    shutil.rmtree(first)
    agent._start(message)
    assert told == [f"folder {agent._folder}"] and (agent._folder / "lease").stat().st_size
    agent._release()
    assert not agent._folder.exists()


def test_an_answer_of_another_agent_of_the_name_is_not_awaited(joined):
    hosts, host, _ = joined
    other = Host("a", host.line, host.address, 8, 0.0)
    began = time.monotonic()
    assert hosts.ask([other], "stopped", 5.0, do="stop") == [None]
    assert time.monotonic() - began < 1 and hosts.has(host)


@process
def test_an_agent_that_ends_at_its_start_is_not_started_again_at_once():
    started = []

    def spawn(name):
        started.append(name)
        return subprocess.Popen(["true"])

    hosts = Hosts(Owner(), socket.create_server(("127.0.0.1", 0)), "s" * 16, spawn, 1)
    assert not hosts.gather(1, 1, 0.5, lambda: False)
    hosts.close()
    assert started == ["local0"]


def test_a_second_driver_keeps_the_attempts_of_the_first(tmp_path):
    journal = Journal(tmp_path, lambda text: None)
    assert journal.last_attempt() == -1
    for name in ("attempt9", "attempt10", "attemptx", "attempt²"):
        (tmp_path / name).mkdir()
    assert journal.last_attempt() == 10
    journal.begin(11)
    assert journal.last_attempt() == 11
    journal.close()


def drain(reader):
    while os.read(reader, 1 << 20):
        pass


def test_output_that_nobody_reads_stops_nobody():
    reader, writer = os.pipe()
    speaker, began = Speaker(), time.monotonic()
    with open(writer, "w") as stream:
        for i in range(3000):
            speaker.say(stream, f"{i}" + "x" * 1000)
        assert time.monotonic() - began < 5
        drained = threading.Thread(target=drain, args=(reader,))
        drained.start()
        speaker.close()
    drained.join()
    os.close(reader)
    speaker = Speaker()
    with open("/dev/full", "w") as full:
        speaker.say(full, "lost")
        speaker.close()
        with open(os.devnull, "w") as other:
            os.dup2(other.fileno(), full.fileno())


def test_addresses():
    for text, want in {
        "a:1": ("a", 1),
        "[::1]:0": ("::1", 0),
        "::1:5": ("::1", 5),
        ":7": ("", 7),
    }.items():
        assert split_address(text, "--listen") == want
    assert join_address("::1", 5) == "[::1]:5" and join_address("a", 5) == "a:5"
    for text in ("x", "a:", "a:-1", "a:65536", "a:b", "a:²", ""):
        with pytest.raises(UserError, match="must be host:port with a port from 0"):
            split_address(text, "--agent")


def test_what_others_wrote_into_a_file_of_rows_is_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    nested = b"[" * 100_000
    file.write_bytes(b'{"a": 1}\n7\n[]\n\xff\n{"b": "\xe2\x80\xa8"}\n' + nested + b'\n{"c"')
    assert list(read_jsonl(file)) == [{"a": 1}, {"b": "\u2028"}]


@process
def test_a_certificate_that_is_removed_later_ends_nobody(tmp_path):
    tls = self_signed(tmp_path)
    tls.channel(False)
    pathlib.Path(tls.certificate).unlink()
    pathlib.Path(tls.key).unlink()
    assert tls.channel(False).certificate()


def test_no_attempt_begins_while_processes_of_a_lost_host_may_run(tmp_path, joined, monkeypatch):
    monkeypatch.setattr(driver_module, "LEASE_S", 0.2)
    hosts, host, _ = joined
    said = []
    listener = socket.create_server(("127.0.0.1", 0))
    journal = Journal(tmp_path, said.append)
    settings = Settings(("true",), limits=Limits(silence=0.3))
    driver = Driver(settings, journal, listener, "s" * 16, print)
    driver._hosts.close()
    driver._hosts = hosts
    began = time.monotonic()
    assert driver._wait_for_leases() and not said
    host.leased = began
    driver._dismiss(host)
    assert driver._wait_for_leases()
    assert 0.5 <= time.monotonic() - began < 2 and "fenced: 0." in said[0]
    host.leased = time.monotonic()
    driver._dismiss(host)
    driver.signals.append(15)
    assert not driver._wait_for_leases()
    journal.close()


# ---- whole runs

TRAINER = """
import os, pathlib, sys, time
from megajax.monitor.timers import Timers
timers = Timers.of_process(pathlib.Path(os.environ["MEGAJAX_PROGRESS"]))
attempt, rank = os.environ["MEGAJAX_ATTEMPT"], os.environ["JAX_PROCESS_ID"]
log = open(f"{sys.argv[1]}/attempt{attempt}-rank{rank}", "w", buffering=1)
for step in range(1, 1000):
    timers.enter("data", step)
    log.write(f"{time.monotonic()}\\n")
    time.sleep(0.01)
    if attempt != "0" and step == 100:
        break
timers.enter("end", step)
"""


@pytest.mark.slow
@process
def test_old_and_new_processes_never_overlap_when_an_agent_freezes(tmp_path):
    """Agents of 'other' machines, which the driver can only ask; one is frozen, a spare goes on."""
    secret = "s" * 32
    env = os.environ | {"PYTHONPATH": str(ROOT), "MEGAJAX_TOKEN": secret}
    flags = ["--silence_s=2", "--period_s=0.2", "--backoff_s=0.1", "--agents=elsewhere"]
    driver = subprocess.Popen(
        [sys.executable, SUPERVISE, "--hosts=2", *flags, f"--out={tmp_path / 'out'}", "--"]
        + [sys.executable, "-c", TRAINER, str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    file = wait_for(lambda: (f := tmp_path / "out" / "driver.json").exists() and f)
    address = json.loads(file.read_text())["address"]
    agents = {
        name: subprocess.Popen(
            [sys.executable, SUPERVISE, f"--agent={address}", f"--name={name}", "--period_s=0.2"],
            env=env,
        )
        for name in ("a", "b", "c")
    }
    try:
        wait_for(lambda: len(list(tmp_path.glob("attempt0-rank*"))) == 2)
        time.sleep(0.5)
        team = pathlib.Path(tmp_path / "out" / "events.jsonl").read_text()
        frozen = re.search(r"2 processes on \w, (\w)", team)[1]
        agents[frozen].send_signal(signal.SIGSTOP)
        _, err = driver.communicate(timeout=60)
        assert driver.returncode == 0, err
        times = {
            p.name: [float(x) for x in p.read_text().splitlines()]
            for p in tmp_path.glob("attempt*-rank*")
        }
        old = max(x[-1] for name, x in times.items() if name.startswith("attempt0"))
        new = min(x[0] for name, x in times.items() if not name.startswith("attempt0"))
        assert len(times) == 4 and old < new, (old, new)
        assert new - old < 8
    finally:
        for popen in (driver, *agents.values()):
            popen.send_signal(signal.SIGCONT)
            popen.kill()
            popen.wait()
