"""A long run under random faults ends with the same parameters as one that nobody disturbed.

    uv run experiments/chaos.py                   # 2 faults, about 2 minutes on 2 cores
    uv run experiments/chaos.py --preset=long     # 8 faults
    uv run experiments/chaos.py --preset=gust     # about 3 minutes, 4 kinds of faults from outside
    uv run experiments/chaos.py --preset=storm    # an hour of faults of all kinds (--minutes)

Two supervised jobs of real processes (scripts/supervise.py), one of them with a fault in every
attempt, of a random kind, at a random step, in a random rank: killed, frozen, asleep before a
collective, stuck in C code, ended without a word, NaN, a broken data loader. What must hold: every
fault is found, and the last checkpoints are equal bit by bit. What it cost: effective training
time, as measured. MegaScale (arXiv 2402.15627) section 4, ByteCheckpoint (arXiv 2407.20143).
Writes chaos.json, .svg and .png into --out. Exit code 1: something does not hold.

A storm (--minutes) strikes a job of four processes on two of three hosts from outside, until time
is up: processes, hosts, networks, disks, steps and ports (megajax/systems/chaos/plan.py). Then the
job finishes, an undisturbed one does as many steps, and what must hold is: every fault found under
the right name, no false alarm, the same parameters and losses bit by bit, nothing left behind.
Writes storm.json, .svg and .png. It mounts two small disks if it may, else no disk is filled.
"""

import megajax.core.interrupted  # noqa: F401

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import config, mesh
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.monitor import ettr, results
from megajax.monitor.sinks import read_jsonl
from megajax.systems.chaos import account
from megajax.systems.chaos.cluster import Cluster
from megajax.systems.chaos.deeds import Deeds
from megajax.systems.chaos.plan import FEW, strikes
from megajax.systems.chaos.plan import KINDS as KINDS_OUTSIDE
from megajax.systems.chaos.storm import Storm

ROOT = Path(__file__).parent.parent
# Kinds that end an attempt.
KINDS = ("kill", "stop", "sleep", "gil", "exit", "nan", "data")
MODEL = (
    "--model.layers=2", "--model.width=64", "--model.heads=4", "--model.kv_heads=4",
    "--model.head_width=16", "--model.mlp=128", "--train.global_batch=16", "--train.seq_len=64",
    "--eval.every=0", "--eval.batches=1", "--eval.sample_tokens=0", "--log.every=50",
    "--log.tensorboard=false",
)  # fmt: skip


@dataclass(frozen=True)
class Config(Checked):
    """How long, how often disturbed, by how many processes."""

    steps: int = option(60, "optimizer steps of the run", at_least=1)
    faults: int = option(2, "attempts that are disturbed", at_least=1)
    processes: int = option(2, "of the job, with 2 emulated devices each", at_least=1)
    every: int = option(10, "steps between checkpoints", at_least=1)
    seed: int = option(0, "of the faults", at_least=0, at_most=2**32 - 1)
    stall_s: float = option(10.0, "a section of a step that takes longer is a hang", "s", above=0)
    minutes: float = option(
        0.0, "of a storm of faults from outside; 0: so many faults in the program", "min",
        at_least=0,
    )  # fmt: skip
    kinds: str = option("", "of a storm, joined by commas; empty: all")
    pace_s: float = option(0.3, "a storm: that each step takes more, as a larger model's would",
                           "s", at_least=0)  # fmt: skip
    out: str = results.out_option("chaos")

    def __post_init__(self):
        """Refuses what leaves no room for the faults."""
        super().__post_init__()
        if unknown := [k for k in self.kinds.split(",") if k and k not in KINDS_OUTSIDE]:
            raise UserError(
                f"kinds={unknown[0]} must be among {', '.join(KINDS_OUTSIDE)}."
                f"{did_you_mean(unknown[0], tuple(KINDS_OUTSIDE))} (--kinds)"
            )
        if self.steps < 4 * (self.faults + 1):
            raise UserError(
                f"steps={self.steps} leave no room for {self.faults} faults; nearest: "
                f"{4 * (self.faults + 1)} (--steps)"
            )


def long() -> Config:
    """Eight faults."""
    return Config(steps=400, faults=8, every=20)


def storm() -> Config:
    """An hour, all kinds."""
    return Config(processes=4, every=20, minutes=60.0, stall_s=20.0)


def gust() -> Config:
    """Two minutes, few kinds."""
    return Config(processes=4, every=10, minutes=1.5, stall_s=20.0, kinds=",".join(FEW), pace_s=0.1)


PRESETS = {"tiny": Config, "long": long, "gust": gust, "storm": storm}
config.define_flags(PRESETS, "tiny")


def draw_faults(cfg: Config) -> list[tuple[str, int, int]]:
    """Returns (kind, step, rank) for each attempt; steps grow from attempt to attempt."""
    draw = random.Random(cfg.seed)
    kinds = draw.sample(KINDS, len(KINDS))
    width = cfg.steps // (cfg.faults + 1)
    return [
        (kinds[i % len(kinds)], (i + 1) * width + draw.randrange(width // 2 + 1),
         draw.randrange(cfg.processes))
        for i in range(cfg.faults)
    ]  # fmt: skip


def supervise(cfg: Config, folder: Path, faults: list[tuple[str, int, int]]) -> float:
    """Runs one supervised job. Returns its seconds. Raises: UserError when it did not end well."""
    spec = ",".join(f"{k}@{s}:rank{r}:attempt{i}" for i, (k, s, r) in enumerate(faults))
    command = [
        sys.executable, str(ROOT / "scripts" / "supervise.py"), f"--processes={cfg.processes}",
        f"--max_restarts={2 * cfg.faults + 2}", f"--step_s={cfg.stall_s}",
        f"--silence_s={cfg.stall_s}", "--period_s=0.5", "--backoff_s=0.5", f"--out={folder}/watch",
        "--", sys.executable, str(ROOT / "experiments" / "pretrain.py"), "--emulate=2", *MODEL,
        f"--train.steps={cfg.steps}", f"--checkpoint.every={cfg.every}", "--checkpoint.keep=2",
        f"--run_dir={folder}/run", f"--cache_dir={folder.parent}/cache",
        *([f"--fault={spec}"] if spec else []),
    ]  # fmt: skip
    began = time.time()
    with open(folder / "output.txt", "w") as output:
        code = finish(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
    if code:
        tail = "\n".join((folder / "output.txt").read_text().splitlines()[-15:])
        raise UserError(f"the supervised job ended with {code}:\n{tail}")
    return time.time() - began


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


def draw(runs: dict[str, list[dict]], events: list[dict], title: str, path: Path) -> None:
    """Steps over time of both runs, with the faults where they were found; SVG and PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    start = {name: rows[0]["time"] - rows[0]["step_time_s"] for name, rows in runs.items()}
    for name, style in (("undisturbed", {"color": "#999999", "linestyle": "--"}),
                        ("disturbed", {"color": "#0072B2"})):  # fmt: skip
        at = [row["time"] - start[name] for row in runs[name]]
        axes.plot(at, [row["step"] for row in runs[name]], label=name, **style)
    for i, event in enumerate(e for e in events if e["event"] == "fault"):
        at = event["time"] - start["disturbed"]
        axes.axvline(at, color="#D55E00", linewidth=1, label="fault found" if i == 0 else None)
        axes.annotate(event["rule"], (at, 1), xycoords=("data", "axes fraction"), rotation=90,
                      va="top", ha="right", fontsize=8)  # fmt: skip
    axes.set_xlabel("time since the first step began (s)")
    axes.set_ylabel("optimizer step")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    for suffix in ("svg", "png"):
        figure.savefig(path.with_suffix(f".{suffix}"))


# ---- a storm


SMALLEST = (
    "--model.layers=1", "--model.width=32", "--model.heads=2", "--model.kv_heads=2",
    "--model.head_width=16", "--model.mlp=64", "--train.global_batch=4", "--train.seq_len=32",
    "--eval.every=0", "--eval.batches=0", "--eval.sample_tokens=0", "--log.tensorboard=false",
    "--log.every=100", "--optim.schedule=constant", "--checkpoint.keep=3", "--emulate=1",
)  # fmt: skip
ENDLESS = 10**6  # steps; a storm says at its end how many there are
REST = 60  # steps after the storm
HOSTS = 2


def weather(cfg: Config, path: Path) -> int:
    """Runs a storm and an undisturbed job, compares, accounts. Returns 1 when something does not
    hold."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(cfg, folder)
        job.cluster = Cluster(folder, job.flags, job.command, HOSTS + 1, os.environ)
        mounted = len(job.cluster.mounted) == 2
        kinds = tuple(k for k in (cfg.kinds.split(",") if cfg.kinds else KINDS_OUTSIDE)
                      if mounted or KINDS_OUTSIDE[k].needs != "mount")  # fmt: skip
        if not mounted:
            print("no small disks can be mounted here: no disk is filled")
        deeds = Deeds(job.cluster, folder / "mail")
        storm = Storm(job.cluster, deeds, strikes(cfg.seed, kinds), 30 * cfg.stall_s,
                      lambda text: print(text, flush=True))  # fmt: skip
        try:
            storm.run(60 * cfg.minutes)
            job.finish(storm)
            wrong = job.compare(storm)
        finally:
            job.cluster.close()
        found = account.rows(storm.cases, storm.began)
        return conclude(cfg, path, storm, found, wrong)


class Job:
    """The trainers of a storm, and what they must have done."""

    cluster: Cluster

    def __init__(self, cfg: Config, folder: Path):
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
        words = [sys.executable, str(ROOT / "scripts" / "supervise.py"), *self.flags,
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
    cfg: Config, path: Path, storm: Storm, found: list[dict[str, Any]], wrong: dict[str, Any]
) -> int:
    """Writes what a storm has shown. Returns 1 when something does not hold."""
    figures = account.summary(found, storm.alarms)
    spent = ettr.measured(storm.seen.events, storm.seen.rows)
    same = f"NOT: {', '.join(wrong)}" if wrong else "parameters and losses equal bit for bit"
    title = (
        f"{figures['faults']} faults in {cfg.minutes:g} minutes, {figures['not_found']} not found, "
        f"{figures['wrongly_named']} wrongly named, {figures['false_alarms']} false alarms; {same}"
    )
    about = results.facts(f"{cfg.processes} processes on {HOSTS} of {HOSTS + 1} hosts", "emulated")
    about |= {
        "title": title, **figures, "wrong": wrong, "effective": spent, "seed": cfg.seed,
        "between": storm.alarms, "line": account.line(storm.seen.rows, storm.began),
    }  # fmt: skip
    results.write(path, about, found)
    account.draw(path)
    print(title, *(f"{name}: {text}" for name, text in wrong.items()), sep="\n")
    bad = wrong or figures["not_found"] or figures["wrongly_named"] or figures["false_alarms"]
    return 1 if bad else 0


def main() -> int:
    """Runs both jobs, compares, accounts. Returns 1 when something does not hold."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    path = results.writable_folder(cfg.out) / "chaos.json"
    if cfg.minutes:
        return weather(cfg, path.with_name("storm.json"))
    faults = draw_faults(cfg)
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("undisturbed", "disturbed")}
        took = {}
        for kind, folder in folders.items():
            folder.mkdir()
            took[kind] = supervise(cfg, folder, faults if kind == "disturbed" else [])
            print(f"{kind}: {took[kind]:.0f} s", flush=True)
        mesh.start(2 * cfg.processes)
        ours, want = (parameters(folders[kind], cfg.steps) for kind in ("disturbed", "undisturbed"))
        different = [k for k in want if not np.array_equal(ours[k], want[k], equal_nan=True)]
        runs = {
            kind: [r for r in read_jsonl(f / "run" / "metrics.jsonl") if "step_time_s" in r]
            for kind, f in folders.items()
        }
        events = list(read_jsonl(folders["disturbed"] / "watch" / "events.jsonl"))
    found = [e for e in events if e["event"] == "fault"]
    rows: list[dict[str, Any]] = []
    for i, (kind, step, rank) in enumerate(faults):
        seen = found[i] if i < len(found) else {}
        rows.append(
            {"fault": kind, "step": step, "rank": rank, "rule": seen.get("rule"),
             "named": seen.get("message")}
        )  # fmt: skip
        print(json.dumps(rows[-1]))
    account = ettr.measured(events, runs["disturbed"])
    ok = not different and len(found) >= len(faults)
    same = "the same parameters bit for bit" if not different else f"{len(different)} arrays differ"
    title = f"{len(found)} faults, {same}; effective training time {account['ettr']:.0%}"
    about = results.facts(f"{cfg.processes} processes of 2 emulated devices", "emulated")
    about |= {"different": different, "seconds": took, "effective": account}
    results.write(path, about, rows)
    draw(runs, events, title, path)
    print(title)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(config.run(main))
