"""Runs two attempts of one job at the same time: only one of them may write the run's history.

    uv run scripts/split_brain.py              # 2 tries, minutes
    uv run scripts/split_brain.py --tries=20

Each try is a supervised job of the real trainer on --hosts agents and a spare one. An agent stands
for a host: the driver did not start it and cannot kill it. At a random step one host is frozen by
SIGSTOP: its agent, its trainer, or both; or both while a second driver, of another run, continues
from the same checkpoints. The driver starts the next attempt, and at a random time, before or while
that attempt trains, the frozen processes are woken by SIGCONT. In the end the script checks that
the job has finished, that exactly the expected steps are stored, and that every array of every step
equals that of an undisturbed run bit by bit. It writes split_brain.json into --out. Exit code 1:
something differs.
"""

import megajax.core.interrupted  # noqa: F401

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.checkpoint import offline
from megajax.checkpoint.steps import SAVING, StepFolder
from megajax.checkpoint.trust import DamagedError
from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import SUPERSEDED, UserError
from megajax.monitor import results
from megajax.monitor.records import read_jsonl
from megajax.systems.elastic import reaper

ROOT = Path(__file__).parent.parent
SUPERVISE, TRAINER = ROOT / "scripts" / "supervise.py", ROOT / "experiments" / "pretrain.py"
KINDS = ("both", "trainer", "driver", "agent")
EVERY = 2  # steps between saves
SILENCE_S = 4.0  # of an agent, before its host counts as lost
LONGEST_S = 300.0  # (chosen) for what must happen in a try, on a busy machine
MODEL = (
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
    f"--checkpoint.every={EVERY}",
    "--checkpoint.keep=0",
)


@dataclass(frozen=True)
class Config(Checked):
    """Number of tries, and size of a job."""

    tries: int = option(2, "number of jobs of which a host is frozen", at_least=1)
    hosts: int = option(2, "hosts that work at a time; one more is a spare", at_least=1)
    steps: int = option(60, "optimizer steps of each job", at_least=30)
    seed: int = option(0, "random seed of hosts, steps and times", at_least=0, at_most=2**32 - 1)
    kind: str = option("", "what is frozen: both, trainer, driver, agent; empty: each in turn")
    out: str = results.out_option("split_brain")

    def __post_init__(self):
        """Refuses a kind that there is none of."""
        super().__post_init__()
        if self.kind not in ("", *KINDS):
            raise UserError(f"kind={self.kind} must be one of {', '.join(KINDS)} (--kind)")


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


class Job:
    """A driver and its agents. This object ends all of their processes."""

    def __init__(self, folder: Path, steps: Path, cfg: Config, agents: list[str], silence: float):
        """folder: the job's own folder. steps: folder of the checkpoints. agents: their names, with
        that of the spare one."""
        folder.mkdir()
        self.out = folder / "out"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "MEGAJAX_TOKEN": secrets.token_hex(16),
            "JAX_PLATFORMS": "cpu",
            # Of two processes only the first would find its programs, and Gloo waits 30 s.
            "JAX_ENABLE_COMPILATION_CACHE": str(cfg.hosts == 1).lower(),
        }
        words = [
            "--agents=elsewhere",
            f"--listen=127.0.0.1:{port}",
            f"--hosts={cfg.hosts}",
            f"--silence_s={silence}",
            "--step_s=60",
            "--start_s=300",
            "--period_s=0.5",
            "--backoff_s=0.1",
            "--join_s=60",
            f"--out={self.out}",
            "--",
            sys.executable,
            str(TRAINER),
            *MODEL,
            f"--train.steps={cfg.steps}",
            f"--run_dir={folder}/run",
            f"--checkpoint.dir={steps}",
            f"--cache_dir={folder.parent.parent}/cache",
        ]
        self._log = open(folder / "output.txt", "w")  # noqa: SIM115 - open as long as the processes
        self._env = env
        self.driver = self._start(words)
        at = f"--agent=127.0.0.1:{port}"
        self.agents = {name: self._start([at, f"--name={name}"]) for name in agents}

    def _start(self, words: list[str]) -> subprocess.Popen:
        command = [sys.executable, str(SUPERVISE), *words]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, env=self._env)

    def trainers(self, agent: str) -> list[int]:
        """Returns the training processes of an agent."""
        processes = []
        for pid in reaper.descendants(self.agents[agent].pid):
            with contextlib.suppress(OSError):
                if str(TRAINER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    processes.append(pid)
        return processes

    def events(self, name: str) -> list[dict]:
        """Returns what its driver recorded."""
        file = self.out / "events.jsonl"
        return [e for e in read_jsonl(file) if e["event"] == name] if file.exists() else []

    def said(self, words: str) -> int:
        """Returns how many logs of its trainers hold these words."""
        return sum(words in f.read_text(errors="replace") for f in self.out.glob("*/rank*.log"))

    def end(self) -> int:
        """Waits for the driver. Returns its exit code."""
        try:
            return self.driver.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            raise UserError(f"the driver of {self.out} does not end") from None

    def close(self) -> None:
        """Ends all that is left."""
        for agent in self.agents.values():
            with contextlib.suppress(OSError):
                agent.send_signal(signal.SIGCONT)
        for process in (self.driver, *self.agents.values()):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._log.close()


def wait_for(condition: Callable[[], Any], what: str, job: Job) -> None:
    """Waits for a condition. Raises: UserError when it does not come true while the job runs."""
    end = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > end or job.driver.poll() is not None:
            text = (job.out.parent / "output.txt").read_text()[-3000:]
            raise UserError(f"{what}: in vain, driver {job.driver.poll()}\n{text}")
        time.sleep(0.02)


def newest(steps: Path) -> int:
    """Returns the newest step's number."""
    return max(StepFolder(steps).steps(), default=0)


def freeze(job: Job, kind: str, host: str) -> list[int]:
    """Stops processes of a host. Returns them in a random order, in which they are to be woken."""
    agent, trainers = [job.agents[host].pid], job.trainers(host)
    pids = {"agent": agent, "trainer": trainers, "driver": trainers, "both": agent + trainers}[kind]
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGSTOP)
    return pids


def attempt(folder: Path, cfg: Config, kind: str, draw: random.Random) -> dict[str, Any]:
    """Runs one job with a frozen host. Returns what happened."""
    folder.mkdir()
    steps = folder / "steps"
    names = [f"host{i}" for i in range(cfg.hosts + (kind != "driver"))]
    # A second driver, and not the loss of the lease, is to fence what the first one has frozen.
    first = Job(folder / "first", steps, cfg, names, 120.0 if kind == "driver" else SILENCE_S)
    jobs, last = [first], first
    try:
        at = draw.randrange(EVERY, cfg.steps // 3)
        wait_for(lambda: newest(steps) >= at, f"step {at}", first)
        host = draw.choice(sorted(n for n in names if first.trainers(n)))
        pids = freeze(first, kind, host)
        began, frozen_at = time.monotonic(), newest(steps)
        if kind == "driver":
            for other in names:
                pids += freeze(first, kind, other)
            names = [f"other{i}" for i in range(cfg.hosts)]
            jobs.append(last := Job(folder / "second", steps, cfg, names, SILENCE_S))
        if draw.random() < 0.7:  # while the next attempt trains
            more = frozen_at + EVERY * draw.randrange(1, 8)
            wait_for(
                lambda: newest(steps) >= more or last.driver.poll() is not None,
                f"step {more}",
                first,
            )
        else:
            time.sleep(draw.uniform(0.2, 4 * SILENCE_S))
        waited, woken_at = time.monotonic() - began, newest(steps)
        draw.shuffle(pids)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
            time.sleep(draw.uniform(0.0, 1.0))  # an agent that wakes first ends its trainers
        codes = [job.end() for job in reversed(jobs)]
        return {
            "frozen": kind,
            "host": host,
            "at_step": frozen_at,
            "for_s": round(waited, 2),
            "woken_at_step": woken_at,
            "codes": codes,
            "attempts": sum(len(j.events("start")) for j in jobs),
            "ended_by_lease": sum(j.said("[lease] process") for j in jobs),
            "refused": sum(j.said("a newer attempt") for j in jobs),
        }
    finally:
        for job in jobs:
            job.close()


def history(steps: Path) -> dict[int, dict[str, list[int]]]:
    """Returns {step: fingerprints of its arrays}; every byte is read and checked."""
    folder = StepFolder(steps)
    return {
        s: {n: list(x.fingerprint) for n, x in offline.verify(folder, s).leaves.items()}
        for s in folder.steps()
    }


def judge(row: dict[str, Any], steps: Path, undisturbed_steps: dict[int, dict]) -> str:
    """Returns what is wrong with a try, '' if nothing is."""
    if row["codes"] not in ([0], [0, SUPERSEDED], [0, 0]):  # [0, 0]: the first had come to its end
        return f"exit codes {row['codes']}"
    try:
        stored = history(steps)
    except DamagedError as error:
        return str(error)
    if stored.keys() != undisturbed_steps.keys():
        return f"steps {sorted(stored.keys() ^ undisturbed_steps.keys())} are too many or missing"
    if differ := [s for s in undisturbed_steps if stored[s] != undisturbed_steps[s]]:
        return f"steps {differ} differ from the undisturbed run's"
    names = {p.name for p in steps.iterdir()} - {str(s) for s in undisturbed_steps}
    if left := sorted(n for n in names if not n.startswith("attempt.") and SAVING not in n):
        return f"left behind: {left}"
    return ""  # what a killed save left, N.saving, goes with the next start


def undisturbed(folder: Path, cfg: Config) -> dict[int, dict]:
    """Returns the history of a job without a frozen host. Raises: UserError when it fails."""
    folder.mkdir()
    job = Job(folder / "job", folder / "steps", cfg, [f"host{i}" for i in range(cfg.hosts)], 30.0)
    try:
        if code := job.end():
            text = (folder / "job" / "output.txt").read_text()[-3000:]
            raise UserError(f"the undisturbed job ended with {code}\n{text}")
        stored = history(folder / "steps")
    finally:
        job.close()
    if sorted(stored) != list(range(EVERY, cfg.steps + 1, EVERY)):
        raise UserError(f"the undisturbed job stored {sorted(stored)}")
    return stored


def main() -> int:
    """Freezes, wakes, compares, writes."""
    cfg, _ = config.from_flags(PRESETS)
    path = results.writable_folder(cfg.out) / "split_brain.json"
    draw, began = random.Random(cfg.seed), time.monotonic()
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = dict(results.facts(f"{os.cpu_count()} CPU cores", "emulated"))
    about |= {"hosts": cfg.hosts, "steps": cfg.steps, "every": EVERY, "silence_s": SILENCE_S}
    with tempfile.TemporaryDirectory() as name:
        undisturbed_steps = undisturbed(Path(name) / "undisturbed", cfg)
        print(
            f"undisturbed: {len(undisturbed_steps)} steps, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for i in range(cfg.tries):
            folder = Path(name) / f"try{i}"
            row = attempt(folder, cfg, cfg.kind or KINDS[i % len(KINDS)], draw)
            row["left_of_killed_saves"] = len(list((folder / "steps").glob(f"*{SAVING}*")))
            rows.append(row | {"wrong": judge(row, folder / "steps", undisturbed_steps)})
            print(json.dumps(rows[-1]), flush=True)
            bad = sum(bool(r["wrong"]) for r in rows)
            about |= {"tries": len(rows), "tries_that_went_wrong": bad}
            results.write(path, about | {"seconds": round(time.monotonic() - began)}, rows)
    print(f"{len(rows)} tries, {bad} went wrong; {path}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(config.run(main))
