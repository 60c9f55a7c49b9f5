"""scripts/supervise.py with real processes: a driver, two agents, two ranks in lockstep.

The job (lockstep.py) has no jax, so that a fault costs seconds; the real trainer's turn is in
tests/experiments/test_supervised.py. Each run must end with the parameters of one that nobody
disturbed, name the right rank in time, and leave no process and no shared memory.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from experiments.faults.cluster import Relay
from megajax.systems.elastic.wire import StrangerError, dial

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parent.parent.parent.parent
SUPERVISE = str(ROOT / "scripts" / "supervise.py")
JOB = str(pathlib.Path(__file__).parent / "lockstep.py")
STEPS, LIMIT_S = 30, 2.0
QUICK = [
    "--hosts=2",
    "--silence_s=2",
    f"--step_s={LIMIT_S}",
    "--start_s=20",
    "--period_s=0.2",
    "--backoff_s=0.1",
]


def parameters(steps=STEPS):
    """What the job computes, written again."""
    value = ""
    for step in range(1, steps + 1):
        total = float(sum((step * 31 + row * 7) % 101 for row in range(12)))
        value = hashlib.sha256(f"{value}{total}".encode()).hexdigest()
    return value


class Supervised:
    """A run in a folder of its own."""

    def __init__(self, folder, *flags, fault="", pause=0.02, command=None):
        self.folder, self.out = folder, folder / "out"
        job = [sys.executable, JOB, str(folder), str(STEPS), "5", str(pause), fault]
        self.process = subprocess.Popen(
            [sys.executable, SUPERVISE, *QUICK, *flags, f"--out={self.out}", "--"]
            + (command or job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def events(self, name=None):
        file = self.out / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [e for e in events if name in (None, e["event"])]

    def saved(self):
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.folder / "saved.json").read_text())
        return {"step": 0}

    def wait_for(self, condition):
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.events()
            time.sleep(0.01)

    def end(self):
        """Waits, and checks that nothing is left. Returns (exit code, standard error)."""
        try:
            out, err = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        self.output = out
        self.nothing_is_left()
        return self.process.returncode, err

    def nothing_is_left(self):
        end = time.monotonic() + 3
        while remains := [*of_folder(self.folder), *shared_memory(self.agents())]:
            assert time.monotonic() < end, remains
            time.sleep(0.05)

    def began(self, rank, section, step):
        """When a rank entered a section in the first attempt."""
        spans = json.loads((self.out / "attempt0" / "spans.json").read_text())["spans"]
        begin = next(b for s, n, b, _ in spans[str(rank)] if (s, n) == (section, step))
        return begin + time.time() - time.monotonic()

    def agents(self):
        return {e["pid"]: e["host"] for e in self.events("joined")}


def of_folder(folder):
    """Processes whose command line names this folder."""
    commands = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in words and int(file.parent.name) != os.getpid():
                commands.append(words)
    return commands


def shared_memory(agents):
    return [p for a in agents for p in pathlib.Path("/dev/shm").glob(f"megajax-{a}-*")]


slow = pytest.mark.slow
FAULTS = [  # the flag, the rule that finds it, the ranks named
    ("kill@12:rank1", "exit", [1]),
    ("sleep@12:rank1", "stall", [1]),
    pytest.param("kill@12:rank0", "exit", [0], marks=slow),
    pytest.param("stop@12:rank1", "stopped", [1], marks=slow),
    pytest.param("gil@12:rank1", "stall", [1], marks=slow),
    pytest.param("exit@12:rank1", "exit", [1], marks=slow),
    pytest.param("data@12:rank0", "exit", [0], marks=slow),
    pytest.param("nan@12:rank1", "nan", [1], marks=slow),  # though all compute the same loss
    pytest.param("flood@2:rank1", "flood", [1], marks=slow),
]


@pytest.mark.parametrize(("fault", "rule", "ranks"), FAULTS)
def test_a_fault_is_found_named_and_survived(tmp_path, fault, rule, ranks):
    flood = rule == "flood"
    run = Supervised(tmp_path, fault=fault, pause=0.3 if flood else 0.02)
    code, err = run.end()
    assert code == 0, err
    assert run.saved() == {"step": STEPS, "value": parameters()}
    (event,) = run.events("fault")
    assert (event["rule"], event["ranks"]) == (rule, ranks), err
    if flood:  # whose line drowns in it
        assert event["time"] - run.began(1, "data", 2) <= 2 * LIMIT_S
    else:
        (injected,) = [e for e in run.events("warning") if "injected fault" in e["message"]]
        assert event["time"] - injected["time"] <= 2 * LIMIT_S
    (checked,) = run.events("checked")
    assert checked["links"]["local0 - local1"] > 0
    (start, again) = run.events("start")
    assert "begins after step 0" in run.output and "begins after step " in run.output
    assert "in memory: nothing" in run.output and "in memory: rank 0, attempt 0" in run.output
    stacks = (run.out / "attempt0" / f"rank{ranks[-1]}.stacks").read_text()
    if rule == "stall":
        assert "strike" in stacks  # the function that hangs
    silent = (run.out / "attempt0" / "silent.txt").read_text()
    assert f"rank {ranks[-1]}" in silent or rule not in ("stall", "stopped"), silent
    trace = json.loads((run.out / "attempt1" / "timeline.json").read_text())["traceEvents"]
    assert {e["tid"] for e in trace if e["ph"] == "X"} == {0, 1}
    assert "rank" in (run.out / "attempt1" / "heat.html").read_text()
    metrics = (run.out / "metrics.prom").read_text()
    assert f'megajax_faults_total{{rule="{rule}"}} 1' in metrics
    assert "megajax_effective_time_ratio 0." in metrics
    for rank in (0, 1):  # what each recorded itself, and what its agent saw
        for name in ("step_time_s", "total", "resident_bytes", "own_s"):
            place = f'{{host="local{rank}",rank="{rank}"}}'
            assert re.search(rf"megajax_rank_{name}{place} \d", metrics)
    assert 'megajax_host_disk_free_bytes{host="local0"} ' in metrics


def test_a_killed_agent_takes_its_ranks_along_and_comes_back(tmp_path):
    run = Supervised(tmp_path, pause=0.1)
    run.wait_for(lambda: run.saved()["step"] >= 5)
    victim = next(pid for pid, host in run.agents().items() if host == "local1")
    began = time.time()
    os.kill(victim, signal.SIGKILL)
    code, err = run.end()
    assert code == 0, err
    assert run.saved()["value"] == parameters()
    (event,) = run.events("fault")
    assert (event["rule"], event["hosts"], event["ranks"]) == ("agent", ["local1"], [1])
    assert event["time"] - began <= 2 * LIMIT_S
    assert len(run.agents()) == 3


@slow
def test_a_slow_rank_is_named_and_shown(tmp_path):
    flags = ("--period_s=0.1", "--grid=tensor=4")
    run = Supervised(tmp_path, *flags, fault="slow=0.3@2:rank1", pause=0.1)
    code, err = run.end()
    assert code == 0, err
    (event,) = [e for e in run.events("warning") if e["rule"] == "straggler"]
    assert event["ranks"] == [1]
    words = [sys.executable, SUPERVISE, "--report", f"--out={run.out}", f"--run_dir={tmp_path}"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and "faults     0" in done.stdout, done.stderr
    assert (run.out / "heat.png").stat().st_size > 1000
    assert "rank 1 does" in (run.out / "attempt0" / "heat.html").read_text()


@slow
def test_a_straggler_gives_way_to_the_spare_and_no_step_is_lost(tmp_path):
    flags = ("--period_s=0.1", "--spares=1", "--straggler=evict")
    run = Supervised(tmp_path, *flags, fault="slow=0.3@2:rank1", pause=0.1)
    code, err = run.end()
    assert code == 0, err
    assert run.saved()["value"] == parameters()
    (told,), (event,) = run.events("told"), run.events("fault")
    assert "rank 1 on local1: its own work takes" in told["message"]
    assert (event["rule"], event["ranks"], event["hosts"]) == ("straggler", [1], ["local1"])
    assert (run.out / "blocklist").read_text() == "local1\n"
    assert run.events("start")[1]["message"].endswith("on local0, local2")
    assert f"begins after step {event['step']}\n" in run.output


@slow
def test_a_frozen_agent_is_replaced(tmp_path):
    run = Supervised(tmp_path, pause=0.1)
    run.wait_for(lambda: run.saved()["step"] >= 5)
    victim = next(pid for pid, host in run.agents().items() if host == "local1")
    os.kill(victim, signal.SIGSTOP)
    code, err = run.end()
    assert code == 0, err
    assert run.saved()["value"] == parameters()
    assert run.events("fault")[0]["rule"] == "silence"


@slow
@pytest.mark.parametrize("times", [1, 20])
def test_frozen_drivers_blame_nobody(tmp_path, times):
    """The leases of the ranks run out meanwhile. A freeze costs the steps since the last save."""
    steps = 16 * times + 10
    job = [sys.executable, JOB, str(tmp_path), str(steps), "3", "0.25"]
    run = Supervised(tmp_path, "--max_restarts=1", command=job)
    for i in range(times):
        last = run.saved()["step"]
        run.wait_for(lambda last=last: run.saved()["step"] >= last + 3)
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        run.process.send_signal(signal.SIGCONT)
        run.wait_for(lambda i=i: len(run.events("start")) == i + 2)
    code, err = run.end()
    assert code == 0 and run.saved() == {"step": steps, "value": parameters(steps)}, err
    faults = [(e["rule"], e["hosts"], e["ranks"]) for e in run.events("fault")]
    assert faults == [("driver", [], [])] * times, err
    assert "the driver did not run for" in err and "No host is at fault" in err
    assert not (run.out / "blocklist").exists()


@slow
def test_an_agent_comes_back_when_its_connection_ends_and_the_driver_does_not(tmp_path):
    """A network between the two hosts and the driver ends and changes what goes through it."""
    secret = "a secret of this job"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "MEGAJAX_TOKEN": secret}
    job = [sys.executable, JOB, str(tmp_path), "60", "5", "0.1"]
    words = ["--agents=elsewhere", f"--listen=127.0.0.1:{port}", f"--out={tmp_path / 'out'}"]
    driver = subprocess.Popen(
        [sys.executable, SUPERVISE, *QUICK, *words, "--", *job], env=env, stderr=subprocess.PIPE
    )
    relays = [Relay(port), Relay(port)]
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                SUPERVISE,
                f"--agent=127.0.0.1:{r.port}",
                f"--name=h{i}",
                "--period_s=0.2",
                "--join_s=20",
            ],
            env=env,
        )
        for i, r in enumerate(relays)
    ]
    seen = tmp_path / "out" / "events.jsonl"
    saved = tmp_path / "saved.json"
    try:
        for attempt, mark in enumerate(("ends", "wrong")):
            end = time.monotonic() + 30
            while not saved.exists() or json.loads(saved.read_text())["step"] < 10 + 20 * attempt:
                assert time.monotonic() < end and driver.poll() is None
                time.sleep(0.05)
            setattr(relays[attempt], mark, True)
        assert driver.wait(60) == 0, driver.communicate()
        assert [a.wait(20) for a in agents] == [0, 0]  # the driver sent them home
    finally:
        for process in (driver, *agents):
            process.kill()
            process.communicate()
        for relay in relays:
            relay.close()
    faults = [e for e in map(json.loads, seen.read_text().splitlines()) if e["event"] == "fault"]
    assert [(e["rule"], e["hosts"]) for e in faults] == [("agent", ["h0"]), ("agent", ["h1"])]
    assert "nobody signed" in faults[1]["message"]
    assert json.loads(saved.read_text()) == {"step": 60, "value": parameters(60)}


@slow
def test_when_the_driver_is_killed_everything_ends(tmp_path):
    run = Supervised(tmp_path, pause=0.1)
    run.wait_for(lambda: run.saved()["step"] >= 5)
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL


@slow
def test_a_step_that_fails_three_times_stops_with_a_report(tmp_path):
    run = Supervised(tmp_path, fault="data@12:rank0:always", pause=0.0)
    code, err = run.end()
    assert code == 70
    assert len(run.events("start")) == 3
    report = (run.out / "report.txt").read_text()
    assert "step 12 failed 3 times with the same error, on local0, local1" in report
    assert (
        report in err
        and "InjectedError: the data loader" in report
        and not (run.out / "blocklist").exists()
    )
    command = report.splitlines()[2]
    assert "Correct the data or the program" in command and f"--out={run.out}" in command
    assert run.saved()["step"] == 10
    memory = [line for line in run.output.splitlines() if line.startswith("in memory")]
    # After two failures of the step what is in memory is not trusted, and hosts change places.
    assert memory == ["in memory: nothing", "in memory: rank 0, attempt 0", "in memory: nothing"]
    assert run.events("start")[2]["message"].endswith("on local1, local0")


@slow
def test_a_host_that_fails_twice_is_left_out_and_fewer_go_on(tmp_path):
    run = Supervised(tmp_path, "--min_hosts=1", fault="data@8:rank1,data@18:rank1:attempt1")
    code, err = run.end()
    assert code == 0, err
    assert run.saved()["value"] == parameters()
    assert (run.out / "blocklist").read_text() == "local1\n"
    assert run.events("start")[2]["message"].endswith("1 processes on local0")


@slow
def test_a_host_that_fails_twice_gives_way_to_the_spare(tmp_path):
    run = Supervised(tmp_path, "--spares=1", fault="data@8:rank1,data@18:rank1:attempt1")
    code, err = run.end()
    assert code == 0, err
    assert run.saved()["value"] == parameters()
    assert (run.out / "blocklist").read_text() == "local1\n"
    assert run.events("start")[2]["message"].endswith("on local0, local2")


@slow
def test_evicting_by_hand_brings_the_spare_in(tmp_path):
    run = Supervised(tmp_path, "--spares=1", pause=0.3)
    run.wait_for(lambda: run.saved()["step"] >= 5)
    words = [sys.executable, SUPERVISE, "--evict=local0", f"--out={run.out}"]
    assert subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0
    code, err = run.end()
    assert code == 0, err
    assert run.saved()["value"] == parameters()
    assert run.events("start")[1]["message"].endswith("on local2, local1")  # ranks stay
    assert (run.out / "blocklist").read_text() == "local0\n"
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "no driver is running" in done.stderr


@slow
def test_a_host_that_is_readmitted_by_hand_is_a_spare_again(tmp_path):
    run = Supervised(tmp_path, "--spares=1", pause=0.5)

    def tell(*words):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        assert not subprocess.call([sys.executable, SUPERVISE, *words, f"--out={run.out}"], env=env)

    run.wait_for(lambda: run.saved()["step"] >= 3)
    tell("--evict=local0")
    run.wait_for(lambda: len(run.events("start")) == 2)
    assert (run.out / "blocklist").read_text() == "local0\n"
    tell("--readmit=local0")
    run.wait_for(lambda: run.events("readmitted"))
    assert (run.out / "blocklist").read_text() == "" and len(run.events("start")) == 2
    tell("--evict=local1")
    code, err = run.end()
    assert code == 0, err
    assert run.saved()["value"] == parameters()
    assert run.events("start")[2]["message"].endswith("on local2, local0")


@slow
def test_sigterm_to_one_rank_or_to_the_driver_saves_one_step_everywhere(tmp_path):
    for name in ("rank", "driver"):
        folder = tmp_path / name
        folder.mkdir()
        run = Supervised(folder, pause=0.1)
        run.wait_for(lambda run=run: run.saved()["step"] >= 5)
        if name == "driver":
            run.process.send_signal(signal.SIGTERM)
        else:
            ranks = [w for w in pathlib.Path("/proc").glob("[0-9]*") if is_rank(w, folder)]
            assert len(ranks) == 2
            os.kill(int(ranks[1].name), signal.SIGTERM)
        code, err = run.end()
        assert code == 143, err  # the driver's; those of the ranks are 0
        ends = (run.out / "attempt0" / "spans.json").read_text()
        assert ends.count('"told"') == 2
        assert not run.events("fault") and 5 < run.saved()["step"] < STEPS
        assert run.saved()["value"] == parameters(run.saved()["step"])


@slow
def test_sigterm_while_ranks_start_is_nobodys_fault(tmp_path):
    """They have no handler yet, so the signal that they are sent ends them."""
    script = f"import time; print('up', flush=True); time.sleep(60)  # {tmp_path}"
    run = Supervised(tmp_path, command=[sys.executable, "-c", script])
    logs = [run.out / "attempt0" / f"rank{r}.log" for r in (0, 1)]
    run.wait_for(lambda: all(f.exists() and f.read_text() for f in logs))
    run.process.send_signal(signal.SIGTERM)
    code, err = run.end()
    assert code == 75 and not run.events("fault") and len(run.events("start")) == 1, err
    (early,) = run.events("early")
    assert early["ranks"] == early["hosts"] == [], early
    assert "told to stop before all ranks were seen to train" in err


def is_rank(process, folder):
    with contextlib.suppress(OSError):
        words = (process / "cmdline").read_bytes().split(b"\0")
        return JOB.encode() in words[1:2] and str(folder).encode() in words
    return False


@slow
def test_a_command_that_cannot_work_is_tried_once(tmp_path):
    run = Supervised(tmp_path, command=[sys.executable, "-c", f"raise SystemExit(2)  # {tmp_path}"])
    code, err = run.end()
    assert code == 2 and len(run.events("start")) == 1


@slow
def test_signals_that_people_send_to_look_end_nobody(tmp_path):
    """The driver, its agents and their reapers."""
    run = Supervised(tmp_path)
    run.wait_for(lambda: run.saved()["step"] >= 5)
    ours = {run.process.pid, *run.agents()}
    reapers = subprocess.run(["pgrep", "-f", "elastic/reaper.py"], capture_output=True, text=True)
    for word in reapers.stdout.split():
        stat = pathlib.Path(f"/proc/{word}/stat").read_text()
        ours |= {int(word)} if int(stat.rsplit(")", 1)[1].split()[1]) in run.agents() else set()
    assert len(ours) == 5
    for pid in ours:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    code, err = run.end()
    assert code == 0 and not run.events("fault") and len(run.events("joined")) == 2, err
    assert err.count("most recent call first") >= 3 and "in pump" in err and "in serve" in err, err
    assert run.saved() == {"step": STEPS, "value": parameters()}


@slow
def test_each_driver_names_its_run_and_ends_when_another_has_taken_it_over(tmp_path):
    named = []
    for out in ("first", "second"):
        (tmp_path / out).mkdir()
        script = f"echo $MEGAJAX_RUN $MEGAJAX_ATTEMPT; exit 76 # {tmp_path}"
        run = Supervised(tmp_path / out, command=["sh", "-c", script])
        code, err = run.end()
        assert code == 76 and not run.events("fault") and len(run.events("start")) == 1, err
        (taken,) = run.events("superseded")
        assert "a newer driver's run saves in its place" in taken["message"]
        logs = {(run.out / "attempt0" / f"rank{r}.log").read_text() for r in (0, 1)}
        assert len(logs) == 1 and next(iter(logs)).endswith(" 0\n")
        named.append(next(iter(logs)).split()[0])
    assert len(set(named)) == 2 and all(len(n) == 16 for n in named)


@pytest.mark.parametrize("kind", ["missing", pytest.param("not executable", marks=slow)])
def test_a_command_that_cannot_start_is_tried_once(tmp_path, kind):
    program = tmp_path / "program"
    if kind != "missing":
        program.touch()
    run = Supervised(tmp_path, command=[str(program)])
    code, err = run.end()
    assert code == 2 and len(run.events("start")) == 1, err
    reason = "No such file or directory" if kind == "missing" else "Permission denied"
    (fault,) = run.events("fault")
    pattern = rf"local[01] cannot start '{program}': {reason}; correct the command behind --"
    assert fault["rule"] == "command" and re.fullmatch(pattern, fault["message"])


def test_agents_that_are_awaited_are_told_of(tmp_path):
    words = ["--agents=elsewhere", "--hosts=2", "--join_s=0.4", f"--out={tmp_path}", "--", "true"]
    done = subprocess.run([sys.executable, SUPERVISE, *words], capture_output=True, text=True)
    assert done.returncode == 75
    assert re.search(
        r"0 of 2 hosts are here \(none\); waiting for the agents of the others for 0 s more "
        r"\(--join_s\); on each of them: scripts/supervise.py --agent=127.0.0.1:\d+, with "
        rf"MEGAJAX_TOKEN set to the token in {tmp_path}/driver.json; only this machine",
        done.stderr,
    )
    assert "gave up before the first attempt: 0 hosts came of at least 2" in done.stderr


def test_mistakes_are_explained():
    def call(*words, token=""):
        env = os.environ | {"MEGAJAX_TOKEN": token}
        done = subprocess.run(
            [sys.executable, SUPERVISE, *words], capture_output=True, text=True, env=env
        )
        return done.returncode, done.stderr

    code, err = call("--hosts=2", "--min_hosts=3", "--", "true")
    assert code == 2 and "min_hosts=3 must be 1 to 2" in err
    code, err = call("--processes=4", "--grid=data=3", "--", "true")
    assert code == 2 and "grid=data=3 must be" in err
    assert call() == (
        2,
        "error: no command: it stands behind --, e.g. supervise -- megajax train --preset=gpt2\n",
    )
    code, err = call("--hosts=0", "--", "true")
    assert code == 2 and "hosts=0 must be at least 1; nearest: 1 (--hosts)" in err
    code, err = call("--agent=127.0.0.1:1", "--name=me", "--join_s=0.5", token="x" * 16)
    assert code == 2 and "error: no driver at 127.0.0.1:1" in err
    assert "[agent me] no driver at 127.0.0.1:1 yet" in err and "0 s more (--join_s)" in err
    code, err = call("--agent=127.0.0.1:1")
    assert code == 2 and "must hold the job's secret (MEGAJAX_TOKEN, or --token_file)" in err
    code, err = call("--period_s=5", "--silence_s=9", "--", "true")
    assert code == 2 and "silence_s=9 must be at least 10" in err
    code, err = call("--agents=elsewhere", "--", "true", token="guess me")
    assert code == 2 and "has 8 characters and needs at least 16" in err


@slow
def test_strangers_at_the_driver_leave_the_job_alone(tmp_path):
    """A line that nests too deep, idle connections, a dribble, an agent that guesses the secret."""
    run = Supervised(tmp_path, pause=0.1)
    run.wait_for(lambda: run.saved()["step"] >= 5)
    reach = json.loads((run.out / "driver.json").read_text())
    host, _, port = reach["address"].rpartition(":")
    assert (run.out / "driver.json").stat().st_mode & 0o777 == 0o600
    strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
    strangers[0].sendall(b"[" * 100_000 + b"\n")
    with pytest.raises(StrangerError):
        dial(reach["address"], "guessed by somebody", "agent", "local1")
    with contextlib.suppress(OSError):
        for _ in range(100):
            strangers[-1].sendall(b" ")
            time.sleep(0.01)
    code, err = run.end()
    for sock in strangers:
        sock.close()
    assert code == 0, err
    assert run.saved()["value"] == parameters() and not run.events("fault")
    assert len(run.events("start")) == 1 and 1 <= len(run.events("refused")) <= 12
    assert reach["token"] not in (run.out / "events.jsonl").read_text() + run.output + err


@slow
@pytest.mark.parametrize("where", ["127.0.0.2:0", "[::1]:0", "[::]:0", "0.0.0.0:0", "localhost:0"])
def test_local_agents_find_the_driver_wherever_it_listens(tmp_path, where):
    run = Supervised(tmp_path, f"--listen={where}", "--join_s=10", command=["true"])
    code, err = run.end()
    assert code == 0 and len(run.agents()) == 2, err


@slow
def test_links_are_checked_under_tls_too(tmp_path):
    run = Supervised(tmp_path, "--tls", fault="kill@12:rank1")
    code, err = run.end()
    assert code == 0 and run.saved()["value"] == parameters(), err
    (checked,) = run.events("checked")
    assert checked["links"]["local0 - local1"] > 0


@slow
def test_an_agent_that_dies_in_its_self_checks_is_not_excluded(tmp_path):
    run = Supervised(tmp_path, fault="kill@12:rank1")
    run.wait_for(lambda: run.events("fault"))
    os.kill(next(iter(run.agents())), signal.SIGKILL)
    code, err = run.end()
    assert code == 0 and not (run.out / "blocklist").exists(), err


@slow
@pytest.mark.parametrize("where", ["closed", "full"])
def test_output_that_nobody_takes_ends_nobody(tmp_path, where):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, SUPERVISE, *QUICK, "--hosts=1", f"--out={tmp_path / 'out'}", "--"]
            + ["sh", "-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.3; done"],
            stdout=writer if where == "closed" else full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    os.close(writer)
    assert done.returncode == 0 and "fault" not in done.stderr, done.stderr


@slow
def test_a_second_driver_of_a_folder_keeps_the_logs_of_the_first(tmp_path):
    for text in ("first", "second"):
        run = Supervised(tmp_path, "--hosts=1", command=["echo", text])
        assert run.end()[0] == 0
    logs = [(run.out / f"attempt{i}" / "rank0.log").read_text() for i in (0, 1)]
    assert logs == ["first\n", "second\n"]
    words = [sys.executable, SUPERVISE, "--report", f"--out={run.out}", f"--run_dir={tmp_path}"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "faults     0" in done.stdout, done.stderr
