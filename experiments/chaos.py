"""A long run under random faults ends with the same parameters as an undisturbed run.

    uv run experiments/chaos.py                   # 2 faults, about 2 minutes on 2 cores
    uv run experiments/chaos.py --preset=long     # 8 faults
    uv run experiments/chaos.py --preset=gust     # about 3 minutes, 4 kinds of faults from outside
    uv run experiments/chaos.py --preset=storm    # an hour of faults of all kinds (--minutes)
    uv run experiments/chaos.py --preset=outside  # 10 minutes of kills, freezes and full disks

Two supervised jobs of real processes (scripts/supervise.py) run the same training. In every attempt
of one of them a random rank has a random fault at a random step: it is killed, frozen, asleep
before a collective, stuck in C code, ends without a message, computes NaN, or its data loader
fails. The command checks that every fault is found and that the last checkpoints of both jobs are
equal bit by bit, and measures the effective training time. Sources: MegaScale (arXiv 2402.15627)
section 4, ByteCheckpoint (arXiv 2407.20143). It writes chaos.json, .svg and .png into --out. Exit
code 1: a check failed.

A storm (--minutes) injects faults from outside into a job of four processes on two of three hosts,
until the time is up: into processes, hosts, networks, disks, stored steps and ports
(experiments/faults/strikes.py). Then the job finishes, and an undisturbed job runs as many steps.
The command checks that every fault was found under the right name, that there was no false alarm,
that parameters and losses are equal bit by bit, and that no process or file is left behind. It
writes storm.json, .svg and .png, or storm_outside.json, .svg and .png with --preset=outside. It
mounts two small disks if it is allowed to; otherwise no disk is filled.
"""

import megajax.core.interrupted  # noqa: F401

import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.faults import storm as storms
from experiments.faults.strikes import FEW, FROM_OUTSIDE
from experiments.faults.strikes import KINDS as KINDS_OUTSIDE
from experiments.reports.reporting import closing, panels, save
from megajax.core import config, mesh
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.monitor import results, timeline
from megajax.monitor.records import read_jsonl

ROOT = Path(__file__).parent.parent
# Kinds that end an attempt.
KINDS = ("kill", "stop", "sleep", "gil", "exit", "nan", "data")
MODEL = (
    "--model.layers=2",
    "--model.width=64",
    "--model.heads=4",
    "--model.kv_heads=4",
    "--model.head_width=16",
    "--model.mlp=128",
    "--train.global_batch=16",
    "--train.seq_len=64",
    "--eval.every=0",
    "--eval.batches=1",
    "--eval.sample_tokens=0",
    "--log.every=50",
    "--log.tensorboard=false",
)


@dataclass(frozen=True)
class Config(Checked):
    """How long, how often disturbed, by how many processes."""

    steps: int = option(60, "optimizer steps of the run", at_least=1)
    faults: int = option(2, "number of attempts that are disturbed", at_least=1)
    processes: int = option(2, "processes of the job, with 2 emulated devices each", at_least=1)
    every: int = option(10, "steps between checkpoints", at_least=1)
    seed: int = option(0, "random seed of the faults", at_least=0, at_most=2**32 - 1)
    stall_s: float = option(
        10.0, "time after which a section of a step counts as hung", "s", above=0
    )
    minutes: float = option(
        0.0,
        "length of a storm of faults from outside; 0: --faults faults in the program",
        "min",
        at_least=0,
    )
    kinds: str = option("", "kinds of faults in a storm, joined by commas; empty: all")
    pace_s: float = option(
        0.3, "storm: time added to each step, as if the model were larger", "s", at_least=0
    )
    busy: int = option(0, "storm: processes beside the job that keep a core busy", at_least=0)
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


def outside() -> Config:
    """Ten minutes of what is done to a job from outside, on a machine that two others use."""
    return Config(
        processes=2, every=10, minutes=10.0, stall_s=20.0, kinds=",".join(FROM_OUTSIDE), busy=2
    )


PRESETS = {"tiny": Config, "long": long, "gust": gust, "storm": storm, "outside": outside}
config.define_flags(PRESETS, "tiny")


def draw_faults(cfg: Config) -> list[tuple[str, int, int]]:
    """Returns (kind, step, rank) for each attempt; steps grow from attempt to attempt."""
    draw = random.Random(cfg.seed)
    kinds = draw.sample(KINDS, len(KINDS))
    width = cfg.steps // (cfg.faults + 1)
    return [
        (
            kinds[i % len(kinds)],
            (i + 1) * width + draw.randrange(width // 2 + 1),
            draw.randrange(cfg.processes),
        )
        for i in range(cfg.faults)
    ]


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
        code = storms.finish(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
    if code:
        tail = "\n".join((folder / "output.txt").read_text().splitlines()[-15:])
        raise UserError(f"the supervised job ended with {code}:\n{tail}")
    return time.time() - began


def draw(runs: dict[str, list[dict]], events: list[dict], title: str, path: Path) -> None:
    """Steps over time of both runs, with the faults where they were found; SVG and PNG."""
    figure, (axes,) = panels(size=(9, 4.2))
    start = {name: rows[0]["time"] - rows[0]["step_time_s"] for name, rows in runs.items()}
    for name, style in (
        ("undisturbed", {"color": "#999999", "linestyle": "--"}),
        ("disturbed", {"color": "#0072B2"}),
    ):
        at = [row["time"] - start[name] for row in runs[name]]
        axes.plot(at, [row["step"] for row in runs[name]], label=name, **style)
    for i, event in enumerate(e for e in events if e["event"] == "fault"):
        at = event["time"] - start["disturbed"]
        axes.axvline(at, color="#D55E00", linewidth=1, label="fault found" if i == 0 else None)
        axes.annotate(
            event["rule"],
            (at, 1),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=8,
        )
    axes.set_xlabel("time since the first step began (s)")
    axes.set_ylabel("optimizer step")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def main() -> int:
    """Runs both jobs, compares, accounts. Returns 1 when something does not hold."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    path = results.writable_folder(cfg.out) / "chaos.json"
    if cfg.minutes:
        name = "storm_outside" if cfg.kinds == ",".join(FROM_OUTSIDE) else "storm"
        return storms.run(cfg, path.with_name(f"{name}.json"), os.environ)
    faults = draw_faults(cfg)
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("undisturbed", "disturbed")}
        took = {}
        for kind, folder in folders.items():
            folder.mkdir()
            took[kind] = supervise(cfg, folder, faults if kind == "disturbed" else [])
            print(f"{kind}: {took[kind]:.0f} s", flush=True)
        mesh.start(2 * cfg.processes)
        ours, want = (
            storms.parameters(folders[kind], cfg.steps) for kind in ("disturbed", "undisturbed")
        )
        different = [k for k in want if not np.array_equal(ours[k], want[k], equal_nan=True)]
        runs = {
            kind: [r for r in read_jsonl(f / "run" / "metrics.jsonl") if "step_time_s" in r]
            for kind, f in folders.items()
        }
        events = list(read_jsonl(folders["disturbed"] / "watch" / "events.jsonl"))
    reports = [e for e in events if e["event"] == "fault"]
    rows: list[dict[str, Any]] = []
    for i, (kind, step, rank) in enumerate(faults):
        seen = reports[i] if i < len(reports) else {}
        rows.append(
            {
                "fault": kind,
                "step": step,
                "rank": rank,
                "rule": seen.get("rule"),
                "named": seen.get("message"),
            }
        )
    columns = {
        "fault": "fault",
        "optimizer step": "step",
        "rank": "rank",
        "rule that found it": "rule",
        "what was said": "named",
    }
    print(results.columns(rows, columns))
    account = timeline.measured(events, runs["disturbed"])
    ok = not different and len(reports) >= len(faults)
    same = "the same parameters bit for bit" if not different else f"{len(different)} arrays differ"
    title = f"{len(reports)} faults, {same}; effective training time {account['ettr']:.0%}"
    about = results.facts(f"{cfg.processes} processes of 2 emulated devices", "emulated")
    about |= {"different": different, "seconds": took, "effective": account}
    results.write(path, about, rows)
    draw(runs, events, title, path)
    print(f"{path}, .svg and .png")
    print(
        f"{title}. MegaScale reports over 90 % of effective training time in weeks of training; "
        "faults come too often here, and the steps are too few, to compare with that."
    )
    print(closing(config.start_name()))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(config.run(main))
