"""The job of a storm: its processes, how it ends, and what it is compared with."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.storm import account
from experiments.storm.cluster import ROOT, SUPERVISE, Cluster
from experiments.storm.deeds import Deeds
from experiments.storm.plan import KINDS, strikes
from experiments.storm.storm import Storm
from megajax.core import config, mesh
from megajax.core.errors import UserError
from megajax.monitor import results, timeline
from megajax.monitor.records import read_jsonl

SMALLEST = (
    "--model.layers=1", "--model.width=32", "--model.heads=2", "--model.kv_heads=2",
    "--model.head_width=16", "--model.mlp=64", "--train.global_batch=4", "--train.seq_len=32",
    "--eval.every=0", "--eval.batches=0", "--eval.sample_tokens=0", "--log.tensorboard=false",
    "--log.every=100", "--optim.schedule=constant", "--checkpoint.keep=3", "--emulate=1",
)  # fmt: skip
ENDLESS = 10**6  # steps; a storm says at its end how many there are
REST = 60  # steps after the storm
HOSTS = 2
BUSY = "while True: pass"  # what two other jobs of the machine do


class Settings(Protocol):
    """What experiments/chaos.py:Config says of a storm."""

    processes: int
    every: int
    seed: int
    stall_s: float
    minutes: float
    kinds: str
    pace_s: float
    busy: int


def finish(job: subprocess.Popen) -> int:
    """Waits for a driver, after Ctrl-C too: only it can end the processes of its job, which write
    into a folder that is removed next. Returns its exit code."""
    try:
        return job.wait()
    except KeyboardInterrupt:
        job.send_signal(signal.SIGINT)  # where it had the one of the terminal, it ends at once
        job.wait()
        raise


def parameters(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Returns the last checkpoint's arrays by name."""
    from megajax.checkpoint.manager import CheckpointManager
    from megajax.core.tree import named_leaves
    from megajax.training.config import Config as Training
    from megajax.training.step import make_train_step

    cfg = config.load_json(Training, folder / "run" / "config.json")
    like = vars(make_train_step(cfg, cfg.mesh.build()).abstract_state)
    found = CheckpointManager(folder / "run" / "checkpoints", keep=0).restore(step, like=like)
    return {name: np.asarray(x) for name, x in named_leaves(found)}


def run(cfg: Settings, path: Path, environ: Mapping[str, str]) -> int:
    """Runs a storm and an undisturbed job, compares, accounts. Returns 1 when something does not
    hold."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(cfg, folder)
        job.cluster = Cluster(folder, job.flags, job.command, HOSTS + 1, environ)
        mounted = len(job.cluster.mounted) == 2
        kinds = tuple(k for k in (cfg.kinds.split(",") if cfg.kinds else KINDS)
                      if mounted or KINDS[k].needs != "mount")  # fmt: skip
        if not mounted:
            print("no small disks can be mounted here: no disk is filled")
        deeds = Deeds(job.cluster, folder / "mail")
        storm = Storm(job.cluster, deeds, strikes(cfg.seed, kinds), 30 * cfg.stall_s,
                      lambda text: print(text, flush=True))  # fmt: skip
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cfg.busy)]
        try:
            storm.run(60 * cfg.minutes)
            job.finish(storm)
            wrong = job.compare(storm)
        finally:
            job.cluster.close()
            for process in busy:
                process.kill()
                process.wait()
        found = account.rows(storm.cases, storm.began)
        return conclude(cfg, path, storm, found, wrong)


class Job:
    """The trainers of a storm, and what they must have done."""

    cluster: Cluster

    def __init__(self, cfg: Settings, folder: Path):
        """folder: of the storm."""
        self._cfg, self._folder, self._steps = cfg, folder, ENDLESS
        silence = cfg.stall_s / 2
        each = cfg.processes // HOSTS
        self.flags = [
            f"--hosts={HOSTS}", f"--min_hosts={HOSTS}", f"--processes={each}",
            "--max_restarts=10000", f"--step_s={cfg.stall_s}", f"--silence_s={silence}",
            f"--start_s={10 * cfg.stall_s}", f"--save_s={3 * cfg.stall_s}", "--period_s=0.5",
            "--backoff_s=0.1",
        ]  # fmt: skip

    def command(self, run_dir: Path | None = None) -> list[str]:
        """Returns what is supervised. run_dir: of an undisturbed run."""
        cfg = self._cfg
        pace = [f"pace={cfg.pace_s:f}@1:rank{r}:always" for r in range(cfg.processes)]
        faults = ",".join([*pace, f"@{self._folder / 'mail'}"])
        return [
            sys.executable, str(ROOT / "experiments" / "pretrain.py"), *SMALLEST,
            f"--train.steps={self._steps}", f"--checkpoint.every={cfg.every}",
            f"--run_dir={run_dir or self.cluster.run_dir}", f"--cache_dir={self._folder}/cache",
            *([f"--fault={faults}"] if run_dir is None else []),
        ]  # fmt: skip

    def finish(self, storm: Storm) -> None:
        """Lets the job end: its driver is told to stop, and the next one knows the last step."""
        self._steps = (storm.step + REST) // self._cfg.every * self._cfg.every
        print(f"the storm is over at step {storm.step}; the job ends after step {self._steps}")
        driver, end = self.cluster.driver, time.monotonic() + 30 * self._cfg.stall_s
        if driver is not None:
            driver.send_signal(signal.SIGTERM)
        while 0 not in self.cluster.codes:
            storm.watch(None)
            time.sleep(0.2)
            if time.monotonic() > end:
                raise UserError(f"the job does not end: {self.cluster.tail('driver.txt')}")
        storm.watch(None)

    def compare(self, storm: Storm) -> dict[str, Any]:
        """Returns {what does not hold: how}."""
        wrong: dict[str, Any] = {}
        for _ in range(50):  # until the agents have gone home
            self.cluster.send_home()
            if not (left := self.cluster.leavings()):
                break
            time.sleep(0.2)
        if left:
            wrong["left behind"] = left
        quiet = self._folder / "undisturbed"
        quiet.mkdir()
        words = [sys.executable, SUPERVISE, *self.flags,
                 f"--out={quiet}/watch", "--", *self.command(quiet / "run")]  # fmt: skip
        with open(quiet / "output.txt", "w") as out:
            job = subprocess.Popen(words, stdout=out, stderr=out, env=self.cluster.environment())
            code = finish(job)
        if code:
            raise UserError(f"the undisturbed job ended with {code}: see {quiet}/output.txt")
        mesh.start(self._cfg.processes)
        ours, want = (parameters(run.parent, self._steps)
                      for run in (self.cluster.run_dir, quiet / "run"))  # fmt: skip
        if different := [k for k in want if not np.array_equal(ours[k], want[k], equal_nan=True)]:
            wrong["parameters"] = different
        theirs = [r for r in read_jsonl(quiet / "run" / "metrics.jsonl") if "step_time_s" in r]
        starts = sum(e["event"] == "start" for e in storm.seen.events)
        if problems := account.lineage(storm.seen.rows, theirs, self._steps, starts):
            wrong["lineage"] = problems
        return wrong


def conclude(
    cfg: Settings, path: Path, storm: Storm, found: list[dict[str, Any]], wrong: dict[str, Any]
) -> int:
    """Writes what a storm has shown. Returns 1 when something does not hold."""
    figures = account.summary(found, storm.alarms) | {"excluded": len(storm.excluded)}
    spent = timeline.measured(storm.seen.events, storm.seen.rows)
    same = f"NOT: {', '.join(wrong)}" if wrong else "parameters and losses equal bit for bit"
    title = (
        f"{figures['faults']} faults in {cfg.minutes:g} minutes, {figures['not_found']} not found, "
        f"{figures['wrongly_named']} wrongly named, {figures['false_alarms']} false alarms, "
        f"{figures['excluded']} hosts excluded in vain; {same}"
    )
    about = results.facts(f"{cfg.processes} processes on {HOSTS} of {HOSTS + 1} hosts", "emulated")
    about |= {
        "title": title, **figures, "wrong": wrong, "effective": spent, "seed": cfg.seed,
        "between": storm.alarms, "line": account.line(storm.seen.rows, storm.began),
    }  # fmt: skip
    results.write(path, about, found)
    account.draw(path)
    print(title, *(f"{name}: {text}" for name, text in wrong.items()), sep="\n")
    names = ("not_found", "wrongly_named", "false_alarms", "excluded")
    return 1 if wrong or any(figures[name] for name in names) else 0
