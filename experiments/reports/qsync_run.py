"""What `qsync.py run` measures: two real processes, of which one plays a weak device.

Both are processes of experiments/pretrain.py that train one model as one job on this machine's CPU.
--play makes each product take the time that it would take at the rates of a strong and of a weak
device, so that a step takes as long as the plan of the weak one lets it; what the CPU itself takes
comes on top and is calibrated, with one precision for all products. So the steps show how well
`replay` predicts a job, and how much a way to run it learns in a step and in a second. They are no
measurement of any GPU.

Source: QSync (arXiv 2407.02327), whose evaluation had V100s and T4s.
"""

import dataclasses
import functools
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports.reporting import panels, read, save, table
from megajax.core import config, files
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import is_words, named_leaves
from megajax.layers.ops import Ops
from megajax.models.parts import is_layered
from megajax.monitor import results
from megajax.systems.qsync import Graph, Node, Precisions, allocate, replay
from megajax.training import presets
from megajax.training.config import Config
from megajax.training.precision import is_product, node_name, parsed_rates

ROOT = Path(__file__).parents[2]
PRECISIONS = ("none", "bfloat16", "float16", "fp8", "int8")  # of --train.precision; none: float32
KINDS = STRONG, WEAK = ("strong", "weak")
FULL, QSYNC, UNEVEN = "full", "qsync", "uneven"
NARROW = ("float16", "int8")  # in all products of the weak kind
WAYS = (FULL, *NARROW, QSYNC, UNEVEN)
COLOURS = {FULL: "0.4", "float16": "C2", "int8": "C3", QSYNC: "C0", UNEVEN: "C1"}
FIRST = 3  # (chosen) steps of a job that are not timed: they compile, and fill the pipe
CALIBRATED, TRIED = 10, 10  # (chosen) timed steps of a calibration, and of a plan that is held out
LIMIT_S = 1800.0  # (chosen) of one job
MOST = 64 * 2**20  # bytes of metrics.jsonl
LINES = 100_000
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided, by the number of seeds
Rates = Mapping[str, Mapping[str, float]]  # {kind: {precision: FLOP/s}}
Plan = Mapping[str, Mapping[str, str]]


class Players:
    """A training run that two processes play. options: a QSyncConfig. folder: of all its jobs."""

    def __init__(self, options: Any, folder: Path) -> None:
        """Raises: UserError for rates that are none, or lack a precision."""
        self.options, self.folder = options, folder.absolute()
        self.base = presets.PRESETS["nano"]()
        members = {f.name: getattr(options, f.name) for f in dataclasses.fields(Config)}
        self.job = Config(**members)
        self.rates = {
            STRONG: parsed_rates(options.strong_rates, "strong_rates"),
            WEAK: parsed_rates(options.weak_rates, "weak_rates"),
        }
        for kind, needed in ((STRONG, ("float32",)), (WEAK, ("float32", *NARROW))):
            for precision in needed:
                if precision not in self.rates[kind]:
                    raise UserError(
                        f"{kind}_rates lacks {precision}; add {precision}:20 (--{kind}_rates)"
                    )
        self.flops = self._flops()
        self.machine_s: dict[str, float] = {}  # what this machine takes itself, by precision
        self._number = 0

    def _flops(self) -> dict[str, float]:
        """Returns {product: FLOPs of its forward pass on one of the two processes}."""
        parts = self.job.task().parts(None, Ops())
        rows = self.job.train.global_batch / len(KINDS)
        sizes = dict(named_leaves(parts.abstract))
        return {
            node_name(name, i): 2 * rows * self.job.train.seq_len * sizes[name].size / parts.layers
            for name, words in named_leaves(parts.axes, is_words)
            if is_layered(words) and is_product(words)
            for i in range(parts.layers)
        }

    # ---- plans and their predicted steps

    def uniform(self, precision: str) -> Plan:
        """Returns one precision for the weak kind."""
        return {
            STRONG: dict.fromkeys(self.flops, "float32"),
            WEAK: dict.fromkeys(self.flops, precision),
        }

    def waits_s(self, kind: str, row: Mapping[str, str]) -> float:
        """Returns how long a kind's products take in a step: forward once, backward twice."""
        return sum(3 * self.flops[n] / self.rates[kind][p] for n, p in row.items())

    def graphs(self, omega: Mapping[str, Mapping[str, float]]) -> dict[str, Graph]:
        """Returns the step of each kind, of products alone: of each the time that is played, and
        its share of what the machine takes itself, by FLOPs."""
        total = sum(self.flops.values())

        def node(kind: str, name: str) -> Node:
            seconds = {
                p: self.flops[name] / rate + self.flops[name] / total * self.machine_s[p] / 3
                for p, rate in self.rates[kind].items()
                if p in self.machine_s
            }
            errors = {p: omega.get(name, {}).get(p, 0.0) for p in seconds}
            if kind == STRONG:
                errors = {"float32": 0.0}
            twice = {p: 2 * s for p, s in seconds.items()}
            return Node(name, (), seconds, twice, 0, dict.fromkeys(seconds, 0.0), errors)

        return {
            kind: Graph(tuple(node(kind, name) for name in self.flops), ((tuple(self.flops), 0.0),))
            for kind in KINDS
        }

    def calibrate(self) -> None:
        """Measures what this machine takes for a step, with one precision in both processes."""
        for precision in ("float32", *NARROW):
            row = dict.fromkeys(self.flops, precision)
            step_s = self.timed({STRONG: row, WEAK: row}, CALIBRATED, as_weak=True)
            self.machine_s[precision] = max(step_s - self.waits_s(WEAK, row), 0.0)
            print(
                f"calibration, all products in {precision}: a step takes {step_s:.3f} s, of which "
                f"the machine itself takes {self.machine_s[precision]:.3f} s",
                flush=True,
            )

    def held_out(self, count: int) -> list[dict[str, Any]]:
        """Returns the predicted and the measured step of random plans."""
        rows, drawn, graphs = [], random.Random(0), self.graphs({})
        for number in range(count):
            # Each plan has its own mixture, so that steps differ.
            weights = [drawn.random() for _ in ("float32", *NARROW)]
            row = {name: drawn.choices(("float32", *NARROW), weights)[0] for name in self.flops}
            plan = {STRONG: dict.fromkeys(self.flops, "float32"), WEAK: row}
            predicted, measured = replay(graphs, plan).step_s, self.timed(plan, TRIED)
            rows.append({"predicted_s": predicted, "measured_s": measured})
            error = predicted / measured - 1
            print(
                f"plan {number + 1}/{count}: predicted {predicted:.3f} s, measured "
                f"{measured:.3f} s ({100 * error:+.1f} %)",
                flush=True,
            )
        return rows

    # ---- jobs

    def timed(self, plan: Plan, steps: int, as_weak: bool = False) -> float:
        """Returns the median step of a short job, in seconds. as_weak: both play the weak rates."""
        run = self.start(
            f"timed-{self._next()}",
            plan,
            {"train.steps": FIRST + steps, "eval.batches": 0},
            WEAK if as_weak else STRONG,
        )
        return statistics.median(step_times(run))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def start(
        self,
        name: str,
        plan: Plan,
        changes: Mapping[str, Any],
        plays: str = STRONG,
        shares: str = "",
    ) -> Path:
        """Runs a job to its end, unless it did so before. Returns its run's folder.

        plays: whose rates the first process has. Raises: UserError when a process fails.
        """
        folder = self.folder / name
        run = folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        Precisions({kind: dict(row) for kind, row in plan.items()}).save(folder / "precisions.json")
        cfg = dataclasses.replace(
            self.job,
            precisions=str(folder / "precisions.json"),
            mesh=MeshSpec(node=len(KINDS)),
            emulate=1,
            run_dir=str(run),
        )
        cfg = config.override(
            cfg, {"checkpoint.every": 0, "eval.sample_tokens": 0, "train.remat": "none", **changes}
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        commands = []
        for rank, kind in enumerate(KINDS):
            rates = self.rates[plays if kind == STRONG else WEAK]
            play = ",".join(f"{p}:{rate / 1e9:g}" for p, rate in rates.items())
            flags = config.spell(dataclasses.replace(cfg, kind=kind, play=play), self.base)
            flags += [f"--shares={shares}"] if shares else []
            join = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(len(KINDS)),
                "JAX_PROCESS_ID": str(rank),
            }
            commands.append((flags, join))
        run_job(folder, commands)
        return run

    # ---- the ways

    def ways(self, names: Sequence[str], seeds: int, omega: Any) -> list[dict[str, Any]]:
        """Trains each way with each seed. Returns a row a way."""
        graphs = self.graphs(omega)
        chosen = allocate(graphs, dict.fromkeys(KINDS, 1), memory={}, method="exact")
        plans = {FULL: self.uniform("float32"), UNEVEN: self.uniform("float32"), QSYNC: chosen}
        plans |= {precision: self.uniform(precision) for precision in NARROW}
        shares = {method: self._shares() if method == UNEVEN else "" for method in names}
        runs: dict[str, list[Path]] = {method: [] for method in names}
        for seed in range(seeds):
            for method in names:
                changes = {"train.seed": seed}
                run = self.start(f"{method}-{seed}", plans[method], changes, shares=shares[method])
                runs[method].append(run)
                print(
                    f"{method}, seed {seed}: a step takes {statistics.median(step_times(run)):.3f} "
                    f"s, held-out loss {losses(run)[-1][1]:.4f}",
                    flush=True,
                )
        rows = []
        for method in names:
            weak = plans[method][WEAK]
            counts = {p: list(weak.values()).count(p) for p in self.machine_s}
            step_s = [statistics.median(step_times(run)) for run in runs[method]]
            predicted = None if shares[method] else replay(graphs, plans[method]).step_s
            rows.append(
                {
                    "way": method,
                    "products": {p: n for p, n in counts.items() if n},
                    "shares": shares[method],
                    "omega": sum(omega.get(n, {}).get(p, 0.0) for n, p in weak.items()),
                    "step_s": statistics.median(step_s),
                    "predicted_s": predicted,
                    "curves": [losses(run) for run in runs[method]],
                }
            )
        return rows

    def _shares(self) -> str:
        """Returns rows in proportion to the speeds of full precision."""
        speeds = [1 / self.waits_s(kind, dict.fromkeys(self.flops, "float32")) for kind in KINDS]
        batch = self.job.train.global_batch
        strong = min(max(round(batch * speeds[0] / sum(speeds)), 1), batch - 1)
        return f"{STRONG}:{strong},{WEAK}:{batch - strong}"


def run_job(folder: Path, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """Runs processes of experiments/pretrain.py, with these (flags, environment), to their ends.

    FOLDER/done says with which flags and precisions they ended well; the same ones are not run
    again. Raises: UserError when one fails.
    """
    file = folder / "precisions.json"
    job = json.dumps([[flags for flags, _ in commands], file.exists() and file.read_text()])
    done = folder / "done"
    if done.exists() and done.read_text() == job:
        return
    for name in ("run", "done"):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(True)
    processes = []
    for rank, (flags, more) in enumerate(commands):
        with open(folder / f"rank{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    [
                        "env",
                        *(f"{name}={value}" for name, value in more.items()),
                        sys.executable,
                        "experiments/pretrain.py",
                        *flags,
                    ],
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(codes):
        bad = next(rank for rank, code in enumerate(codes) if code)
        log = folder / f"rank{bad}.log"
        lines = log.read_text(errors="replace").splitlines()
        raise UserError(
            f"process {bad} ended with code {codes[bad]}: {''.join(lines[-1:])} ({log})"
        )
    done.write_text(job)


def by_precision(job: Config, folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Trains on one device with each --train.precision and seed. Returns a row a precision."""
    base, rows = presets.PRESETS["nano"](), []
    folder = folder.absolute()
    for precision in PRECISIONS:
        last = []
        for seed in range(seeds):
            one = folder / f"{precision}-{seed}"
            one.mkdir(parents=True, exist_ok=True)
            changes = {
                "train.precision": precision,
                "train.seed": seed,
                "emulate": 1,
                "run_dir": str(one / "run"),
                "checkpoint.every": 0,
                "eval.sample_tokens": 0,
            }
            alone = dataclasses.replace(config.override(job, changes), mesh=MeshSpec())
            run_job(one, [(config.spell(alone, base), {})])
            last.append(losses(one / "run")[-1][1])
        rows.append({"precision": precision, "losses": last})
        print(precision, ", ".join(f"{x:.4f}" for x in last), flush=True)
    return rows


def records(run: Path) -> list[dict[str, Any]]:
    """Returns the records of a run."""
    lines = files.read_bytes(run / "metrics.jsonl", MOST).decode().splitlines()
    return [json.loads(line) for line in lines[:LINES]]


def step_times(run: Path) -> list[float]:
    """Returns the seconds of all steps but the first ones."""
    times = [(r["step"], r["step_time_s"]) for r in records(run) if "step_time_s" in r]
    return [seconds for step, seconds in times if step > FIRST]


def losses(run: Path) -> list[tuple[int, float]]:
    """Returns [(step, held-out loss)]."""
    return [(r["step"], r["eval_loss"]) for r in records(run) if "eval_loss" in r]


# ---- what it says


def at_time(row: Mapping[str, Any], seconds: float) -> list[float]:
    """Returns each seed's held-out loss after so many seconds of training, between two evaluations
    along a line; the last one where the run ended before."""
    return [
        float(np.interp(seconds / row["step_s"], *np.array(curve, float).T))
        for curve in row["curves"]
    ]


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns (mean, half of the 95 % interval; None for one seed or more than five)."""
    if len(values) not in T_95:
        return statistics.fmean(values), None
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), half


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each way its held-out loss at equal steps, and at the time in which the fastest way
    made all its steps."""
    seconds = min(row["step_s"] * row["curves"][0][-1][0] for row in rows)
    for row in rows:
        row["at_steps"] = spread([curve[-1][1] for curve in row["curves"]])
        row["at_time"] = spread(at_time(row, seconds))
        row["seconds"] = seconds
    return rows


def shown(pair: Sequence[Any]) -> str:
    """Returns a mean with its interval."""
    mean, half = pair
    return f"{mean:.4f}" if half is None else f"{mean:.4f} ± {half:.4f}"


def products(row: Mapping[str, Any]) -> str:
    """Returns what the weak process computes in."""
    if row["shares"]:
        return f"float32, rows {row['shares']}"
    return ", ".join(f"{n} {p}" for p, n in row["products"].items())


HEADS: dict[str, Any] = {
    "way": "way",
    "weak process": products,
    "step, s": lambda row: f"{row['step_s']:.3f}",
    "predicted, s": lambda row: "-" if row["predicted_s"] is None else f"{row['predicted_s']:.3f}",
    "held-out loss at equal steps": lambda row: shown(row["at_steps"]),
    "at equal time": lambda row: shown(row["at_time"]),
}


def text(rows: Sequence[Mapping[str, Any]], replays: Sequence[Mapping[str, float]]) -> str:
    """Returns the ways for the console, and how well steps were predicted."""
    made = [
        {head: row[of] if isinstance(of, str) else of(row) for head, of in HEADS.items()}
        for row in rows
    ]
    lines = [results.columns(made, {head: head for head in HEADS})] if made else []
    if replays:
        count, mean, most = replayed({"replays": replays})
        lines.append(
            f"replay of {count} plans that were not calibrated: off by {mean:.1f} % on average, "
            f"{most:.1f} % at most (paper: below 5 %, on GPUs)"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the held-out loss of every way over the seconds of training."""
    figure, (axes,) = panels(rows=1, size=(7.0, 4.2))
    for row in rows:
        curves = np.array([[loss for _, loss in curve] for curve in row["curves"]])
        seconds = row["step_s"] * np.array([step for step, _ in row["curves"][0]])
        name, colour = f"{row['way']} ({row['step_s']:.2f} s a step)", COLOURS[row["way"]]
        axes.plot(seconds, curves.mean(0), color=colour, marker=".", label=name)
        axes.fill_between(seconds, curves.min(0), curves.max(0), color=colour, alpha=0.15)
    axes.set_xlabel("seconds of training (played by waiting on CPUs)")
    axes.set_ylabel("held-out loss, nats")
    axes.legend()
    by_way = {row["way"]: row for row in rows}
    title = "Held-out loss over time, mean and range of the seeds"
    if FULL in by_way and QSYNC in by_way:
        share = by_way[QSYNC]["step_s"] / by_way[FULL]["step_s"]
        title = f"A step of QSync's plan takes {share:.2f} of full precision's (played)"
    save(figure, path, title)


def precisions(path: Path) -> str:
    """Returns the held-out losses of nano by the precision of its products."""
    rows = read(path)["rows"]
    full = next(row["losses"] for row in rows if row["precision"] == "bfloat16")

    def change(row: Mapping[str, Any]) -> str:
        pairs = zip(row["losses"], full, strict=True)
        mean, half = spread([100 * (loss / of - 1) for loss, of in pairs])
        return f"{mean:+.2f} %" + ("" if half is None else f" ± {half:.2f}")

    return table(
        path,
        {
            "--train.precision": "precision",
            "held-out loss, by seed": lambda row: ", ".join(f"{x:.4f}" for x in row["losses"]),
            "beside bfloat16": change,
        },
    )


def replayed(result: Mapping[str, Any]) -> tuple[int, float, float]:
    """Returns (plans that were held out, the mean error of their predicted steps, the largest)."""
    errors = [100 * abs(r["predicted_s"] / r["measured_s"] - 1) for r in result["replays"]]
    return len(errors), statistics.fmean(errors), max(errors)


def replays(path: Path) -> str:
    """Returns how well the steps of held-out plans were predicted."""
    result = read(path)
    count, mean, most = replayed(result)
    return (
        f"Rates: {result['rates']}. Replay of {count} random plans that were not "
        f"calibrated: off by {mean:.1f} % on average and {most:.1f} % at most."
    )


def tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Returns {name of a table: a function that returns it}."""
    path = folder / "qsync_run.json"
    return {
        "qsync_run": functools.partial(table, path, HEADS),
        "qsync_replays": functools.partial(replays, path),
        "qsync_ranks": functools.partial(
            table,
            folder / "qsync_ranks.json",
            {
                "form": "form",
                "with the squared error of the gradients": "gradients",
                "with the change of the loss": "loss",
            },
        ),
        "qsync_losses": functools.partial(precisions, folder / "qsync_losses.json"),
    }
