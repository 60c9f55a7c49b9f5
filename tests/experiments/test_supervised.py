"""The real trainer under supervision: two processes, one fault after another, the same parameters.

A run costs minutes because every restart imports jax and compiles again; the quick tests of the
supervision are in tests/systems/elastic.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.experiments.test_pretrain import ROOT, environment, home, restore, rows

pytestmark = [pytest.mark.process, pytest.mark.slow]
__all__ = ["home"]  # the fixture, shared

STEPS = 24
SILENCE_S, STEP_S = 5, 10
TINY = [
    "--model.layers=1",
    "--model.width=32",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.head_width=16",
    "--model.mlp=64",
    "--train.global_batch=4",
    "--train.seq_len=32",
    "--eval.batches=0",
    "--eval.sample_tokens=0",
    "--log.tensorboard=false",
    "--emulate=1",
    f"--train.steps={STEPS}",
    "--checkpoint.every=2",
    "--checkpoint.keep=0",
]
# In each attempt one fault; the flood needs a job that lasts until it is found.
FAULTS = (
    "kill@6:rank1,kill@9:rank0:attempt1,sleep@11:rank1:attempt2,stop@13:rank1:attempt3,"
    "gil@15:rank0:attempt4,exit@17:rank1:attempt5,data@19:rank0:attempt6,nan@21:rank1:attempt7,"
    "flood@22:rank1:attempt8,sleep@23:rank0:attempt8"
)
FOUND = [
    ("exit", [1]),
    ("exit", [0]),
    ("stall", [1]),
    ("stopped", [1]),
    ("stall", [0]),
    ("exit", [1]),
    ("exit", [0]),
    ("nan", [1]),
    ("flood", [1]),
]


def supervise(home, folder, *flags, processes=2, options=()):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "supervise.py"),
        "--hosts=1",
        f"--processes={processes}",
        "--max_restarts=20",
        f"--silence_s={SILENCE_S}",
        f"--step_s={STEP_S}",
        "--start_s=300",
        "--period_s=0.5",
        "--backoff_s=0.1",
        f"--out={folder}/out",
        *options,
        "--",
        sys.executable,
        str(ROOT / "experiments" / "pretrain.py"),
        *TINY,
        f"--data.source={home}/text",
        f"--cache_dir={home}/cache",
        f"--run_dir={folder}",
        *flags,
    ]
    # Only the first process finds its programs in the cache; on a loaded machine the other then
    # compiles for longer than the 30 s that Gloo gives a peer to come.
    env = {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment() | env,
    )


def events(folder, name):
    file = folder / "out" / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [e for e in map(json.loads, lines) if e["event"] == name]


def same(folder, straight, steps=STEPS):
    """Every stored array and every loss of the two runs is the same, to the last bit."""
    _, ours, data = restore(folder, steps)
    _, theirs, expected = restore(straight, steps)
    assert data == expected
    leaves = jax.tree.leaves_with_path(theirs)
    assert len(leaves) > 10
    for (path, want), got in zip(leaves, jax.tree.leaves(ours), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=str(path))
    want, got = rows(straight), rows(folder)
    assert [got[s]["loss"] for s in sorted(got)] == [want[s]["loss"] for s in sorted(want)]


@pytest.fixture(scope="module")
def straight(home):
    """A run that nobody disturbs."""
    folder = home / "straight"
    job = supervise(home, folder)
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, out
    assert not events(folder, "fault")  # a slow start and a first compile raise no alarm
    return folder


def logs(folder, attempt):
    files = (folder / "out" / f"attempt{attempt}").glob("rank*.log")
    return "".join(f.read_text() for f in files)


def began(folder, attempt, rank, section, step):
    """When a rank entered a section."""
    spans = json.loads((folder / "out" / f"attempt{attempt}" / "spans.json").read_text())["spans"]
    begin = next(b for s, n, b, _ in spans[str(rank)] if (s, n) == (section, step))
    return begin + time.time() - time.monotonic()


def nothing_is_left(folder):
    processes = subprocess.run(["pgrep", "-af", str(folder)], capture_output=True, text=True).stdout
    assert processes == ""
    for agent in events(folder, "joined"):
        assert not list(pathlib.Path("/dev/shm").glob(f"megajax-{agent['pid']}-*"))


def test_one_fault_after_another_and_the_same_parameters(home, straight):
    folder = home / "chaos"
    job = supervise(home, folder, f"--fault={FAULTS}")
    out, _ = job.communicate(timeout=1500)
    assert job.returncode == 0, out
    faults = events(folder, "fault")
    assert [(f["rule"], f["ranks"]) for f in faults] == FOUND, out
    warned = [e for e in events(folder, "warning") if "injected fault" in e["message"]]
    for f in faults:
        injected = [w["time"] for w in warned if w["attempt"] == f["attempt"]]
        limit = STEP_S if f["rule"] == "stall" else SILENCE_S
        if f["rule"] == "flood":  # whose line drowns in it
            injected = [began(folder, f["attempt"], 1, "data", 22)]
        assert f["time"] - min(injected) <= 2 * limit, f
    nothing_is_left(folder)
    same(folder, straight)


def test_four_processes(home):
    """A killed one, one asleep before a collective and a bad number, each the right one of four."""
    straight, folder = home / "straight4", home / "chaos4"
    out, _ = (job := supervise(home, straight, processes=4)).communicate(timeout=400)
    assert job.returncode == 0 and not events(straight, "fault"), out
    faults = "--fault=kill@6:rank3,sleep@11:rank2:attempt1,nan@15:rank1:attempt2"
    out, _ = (job := supervise(home, folder, faults, processes=4)).communicate(timeout=900)
    assert job.returncode == 0, out
    stops = [(f["rule"], f["ranks"]) for f in events(folder, "fault")]
    assert stops == [("exit", [3]), ("stall", [2]), ("nan", [1])], out
    nothing_is_left(folder)
    same(folder, straight)


def test_what_is_slow_and_not_a_fault_raises_no_alarm(home, straight):
    """A disk and an evaluation that take 2.5 times what a step may, in one rank while the other
    waits, on a machine whose cores are all busy."""
    folder = home / "slow"
    late = 2.5 * STEP_S
    faults = f"save={late}@6:rank1,evaluate={late}@9:rank0,evaluate={late}@18:rank1"
    idle = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        job = supervise(home, folder, "--eval.every=9", f"--fault={faults}")
        out, _ = job.communicate(timeout=550)
    finally:
        for process in idle:
            process.kill()
            process.wait()
    assert job.returncode == 0, out
    assert not events(folder, "fault")
    warned = [(e["rule"], e["ranks"]) for e in events(folder, "warning")]
    assert warned == [("log", [1]), ("log", [0]), ("log", [1])]  # the injected ones
    assert rows(folder)[7]["time"] - rows(folder)[5]["time"] >= late
    nothing_is_left(folder)
    same(folder, straight)


def test_memory_outlives_a_trainer_and_goes_with_its_agent(home, straight):
    """A killed trainer goes on from the copy in memory, newer than what storage has; the ranks of a
    killed agent from storage."""
    folder = home / "memory"
    faults = "kill@17:rank1,sleep@20:rank0:attempt1"
    flags = ("--checkpoint.every=10", "--checkpoint.memory_every_steps=2", f"--fault={faults}")
    job = supervise(home, folder, *flags)
    end = time.monotonic() + 400
    while "sleep in step 20" not in logs(folder, 1):
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.05)
    agent = events(folder, "joined")[0]["pid"]
    assert len(list(pathlib.Path("/dev/shm").glob(f"megajax-{agent}-*/memory?"))) == 2
    os.kill(agent, signal.SIGKILL)
    out, _ = job.communicate(timeout=400)
    assert job.returncode == 0, out
    stops = [(f["rule"], f["ranks"]) for f in events(folder, "fault")]
    assert stops == [("exit", [1]), ("agent", [0, 1])]
    # Storage has step 10. The copy of step 16 is made beside step 17, where the kill may be first.
    assert re.search("resumed after step (14|16), from memory", logs(folder, 1))
    assert "resumed after step 10 " in logs(folder, 2)
    nothing_is_left(folder)
    same(folder, straight)


@pytest.mark.process
def test_an_experiment_lets_a_driver_end_its_job_after_ctrl_c():
    """SIGKILL, which subprocess.run would send, leaves the processes of the job behind."""
    program = """if True:
        import signal, subprocess, sys
        from experiments.faults import storm
        def ring(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, ring)
        job = subprocess.Popen(["sleep", "60"])
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            storm.finish(job)
        except KeyboardInterrupt:
            print(job.returncode)
        """
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr
