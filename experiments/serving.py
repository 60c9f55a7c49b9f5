"""Continuous beside static batching, and exact beside fast numerics, in one engine on one machine.

    uv run experiments/serving.py                     # seconds: shows that all of it runs
    uv run experiments/serving.py --preset=bench      # minutes on an idle machine

The nano decoder with random weights answers requests that have the lengths of the blocks of a
corpus (experiments/reports/serving.py). With all requests at once, the command measures tokens a
second of continuous batching, with and without the reuse of common prefixes, of static batching,
and of static batching of padded batches. With Poisson arrivals at several rates, it measures
throughput and latency. Runs of the modes alternate, so that other processes slow all of them alike.
Continuous batching is that of Orca (OSDI 2022); megajax/serving/engine.py names the engine's other
sources. The command writes serving.json after every row, and serving.svg and .png, into --out.
Ctrl-C keeps the rows so far; the next run measures all of them again. Tokens a second on a CPU
compare the modes and say nothing about a GPU.
"""

import megajax.core.interrupted  # noqa: F401

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments.reports import serving as report
from experiments.reports.reporting import closing, written
from experiments.reports.serving import MODES, Mode, Request
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.monitor import results
from megajax.serving import Engine

Row = dict[str, Any]
CONTEXT = 512  # tokens; the longest request has fewer
GOAL = 2.0  # times the tokens a second of padded static batching
SLOWER = 0.9  # of fast numerics' tokens a second that exact ones should reach


@dataclass(frozen=True)
class Config(Checked):
    """What is served, and how often."""

    model: DecoderConfig = group(DecoderConfig)
    requests: int = option(64, "number of requests in a run", at_least=2)
    max_batch: int = option(16, "largest number of sequences that run at a time", at_least=1)
    runs: int = option(3, "runs of each mode with all requests at once", at_least=1)
    loads: str = option(
        "0.3,0.6,0.9,1.2",
        "rates of arrival, as shares of what continuous batching serves, joined by commas; or none",
    )
    exact_batches: str = option(
        "16,32",
        "numbers of sequences at a time for which exact numerics are timed, joined by commas",
    )
    data: str = option(
        "stdlib",
        "text from which the lengths of requests are taken, given as --data.source of training",
    )
    seed: int = option(0, "random seed of requests and arrivals", at_least=0)
    out: str = results.out_option("serving")

    def __post_init__(self):
        """Refuses loads that are no numbers."""
        super().__post_init__()
        numbers("loads", self.loads)
        numbers("exact_batches", self.exact_batches, integers=True)


def tiny() -> Config:
    """Two layers, few requests, one rate."""
    model = DecoderConfig(layers=2, width=64, heads=2, kv_heads=2, mlp=128)
    return Config(model, requests=24, max_batch=8, runs=1, loads="0.5", exact_batches="8")


def numbers(name: str, text: str, integers: bool = False) -> list[float]:
    """'0.5,0.9' -> [0.5, 0.9]. Raises: UserError."""
    try:
        values = [float(word) for word in text.split(",")] if text not in ("", "none") else []
    except ValueError:
        values = [-1.0]
    if not all(0 < x < 1000 and (x.is_integer() or not integers) for x in values):
        kind = "whole numbers" if integers else "numbers"
        raise UserError(
            f"{name}={text} must be {kind} above 0 and below 1000 with commas, or none "
            f"(--{name}={'8,32' if integers else '0.5,0.9'})"
        )
    return values


class Study:
    """The engines and the load of one configuration."""

    def __init__(self, cfg: Config):
        """Compiles nothing yet."""
        self.cfg = cfg
        self.load = report.requests(cfg.data, cfg.requests, cfg.seed)
        self.params = jax.jit(decoder.parts(cfg.model).init)(jax.random.key(cfg.seed))
        self.fast = self.engine("fast", cfg.max_batch)

    def engine(self, numerics: Any, batch: int) -> Engine:
        """Returns an engine with room for all sequences that run."""
        return Engine(
            self.cfg.model,
            self.params,
            pages=batch * CONTEXT // 16 + 1,
            max_batch=batch,
            dtype="float32",
            numerics=numerics,
            context=CONTEXT,
            prefill_chunk=64,
        )

    def run(self, engine: Engine, mode: Mode, rate: float = np.inf) -> Row:
        """Serves the load once."""
        times = report.arrivals(len(self.load), rate, self.cfg.seed + 1)
        return report.serve(engine, self.load, mode, times, self.cfg.max_batch)

    def offline(self) -> Iterator[Row]:
        """Yields a row a mode. The first run of each compiles, and does not count."""
        calls = {mode: lambda mode=mode: self.run(self.fast, mode) for mode in MODES}
        medians = alternate(calls, self.cfg.runs)
        for mode in MODES:
            ratio = medians[mode]["tokens_per_s"] / medians["static, padded"]["tokens_per_s"]
            cpu = medians["static, padded"]["cpu_s"] / medians[mode]["cpu_s"]
            about = {"part": "offline", "mode": mode, "ratio": ratio, "cpu_ratio": cpu}
            yield about | medians[mode]

    def online(self, requests_per_s: float) -> Iterator[Row]:
        """Yields a row for each mode and load. requests_per_s: the rate that load 1 means."""
        for load in numbers("loads", self.cfg.loads):
            for mode in ("continuous", "static", "static, padded"):
                row = self.run(self.fast, mode, load * requests_per_s)
                yield {"part": "online", "mode": mode, "load": load} | row

    def numerics(self) -> Iterator[Row]:
        """Yields fast and exact numerics, with continuous batching and all requests at once."""
        for batch in map(int, numbers("exact_batches", self.cfg.exact_batches, integers=True)):
            engines = {name: self.engine(name, batch) for name in ("fast", "exact")}
            calls = {name: lambda e=e: self.run(e, "continuous") for name, e in engines.items()}
            medians = alternate(calls, self.cfg.runs)
            for name in engines:
                of_fast = medians[name]["tokens_per_s"] / medians["fast"]["tokens_per_s"]
                cpu = medians["fast"]["cpu_s"] / medians[name]["cpu_s"]
                about = {"numerics": name, "batch": batch, "of_fast": of_fast, "cpu_of_fast": cpu}
                yield {"part": "numerics"} | about | medians[name]


def alternate(calls: dict[Any, Callable[[], Row]], runs: int) -> dict[Any, Row]:
    """Returns for each call its run of median tokens a second, with the slowest and the fastest.

    All calls take turns, after a first turn that does not count.
    """
    rows_of: dict[Any, list[Row]] = {name: [] for name in calls}
    for number in range(runs + 1):
        for name, call in calls.items():
            row = call()
            rows_of[name] += [row] if number else []
    summed = {}
    for name, rows in rows_of.items():
        rows.sort(key=lambda row: row["tokens_per_s"])
        rates = [row["tokens_per_s"] for row in rows]
        middle = rows[len(rows) // 2]
        summed[name] = middle | {"slowest": rates[0], "fastest": rates[-1], "n": runs}
    return summed


def claims(rows: Sequence[Row]) -> list[Row]:
    """Returns what the rows say of the two goals.

    By wall clock and by the process's CPU time, which a busy machine changes less.
    """
    row = next(r for r in rows if r.get("mode") == "continuous")
    what = "continuous over padded static batching"
    ratios = [(what, row["ratio"], GOAL), (f"{what}, CPU time", row["cpu_ratio"], GOAL)]
    for row in (r for r in rows if r.get("numerics") == "exact"):
        what = f"exact over fast numerics, batch {row['batch']}"
        ratios += [
            (what, row["of_fast"], SLOWER),
            (f"{what}, CPU time", row["cpu_of_fast"], SLOWER),
        ]
    return [
        {"part": "claim", "what": what, "value": value, "goal": goal, "met": value >= goal}
        for what, value, goal in ratios
    ]


def measured(study: Study) -> Iterator[Row]:
    """Yields all rows but the claims."""
    offline = list(study.offline())
    yield from offline
    rate = offline[0]["tokens_per_s"] / offline[0]["tokens"] * len(study.load)
    yield from study.online(rate)
    yield from study.numerics()


def show(row: Row) -> None:
    """Prints a row."""
    name = row.get("mode") or row.get("what") or f"{row['numerics']}, batch {row['batch']}"
    if row["part"] == "claim":
        verdict = "reached" if row["met"] else "not reached"
        print(f"goal: {name}: {row['value']:.2f} times; our goal of {row['goal']:.2f} is {verdict}")
        return
    text = f"{row['part']} | {name} | {row['tokens_per_s']:.0f} tokens/s in {row['steps']} steps"
    if "load" in row:
        text += f" | load {row['load']:.2f}, request p50 {row['request_s_p50']:.2f} s, "
        text += f"first token p50 {row['first_token_s_p50']:.3f} s"
    print(text, flush=True)


def main() -> int:
    """Measures all modes; writes after every row."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    path = results.writable_folder(cfg.out) / "serving.json"
    mesh_.start()
    device = jax.devices()[0]
    layer = f"measured on {device.device_kind}" if device.platform == "gpu" else "measured on a CPU"
    study = Study(cfg)
    load: Sequence[Request] = study.load
    about: dict[str, Any] = results.facts(device.device_kind, layer)
    about |= {
        "preset": config.start_name(),
        "requests": cfg.requests,
        "max_batch": cfg.max_batch,
        "layers": cfg.model.layers,
        "width": cfg.model.width,
        "cores": os.cpu_count(),
        "prompt_tokens": float(np.mean([len(r.prompt) for r in load])),
        "answer_tokens": float(np.mean([r.answer for r in load])),
    }
    rows: list[Row] = []
    try:
        for row in written(measured(study), path, about, rows):
            show(row)
    except KeyboardInterrupt:
        print(f"stopped after {len(rows)} rows, which are in {path}", file=sys.stderr)
        return 130
    for row in claims(rows):
        rows.append(row)
        show(row)
    results.write(path, about, rows)
    report.draw(rows, path.with_suffix(""))
    print(f"{path}, .svg and .png")
    print(conclusion(cfg, rows))
    print(closing(config.start_name()))
    return 0


def conclusion(cfg: Config, rows: Sequence[Row]) -> str:
    """Returns what the run has shown."""
    rate = next(r["ratio"] for r in rows if r.get("mode") == "continuous")
    text = f"Continuous batching gives {rate:.2f} times the tokens a second of padded static "
    text += "batching on this machine. The papers' factors are of large models on GPUs, over "
    text += "servers of their time, and cannot be compared."
    if cfg.runs < 2:
        text += (
            " One run of a tiny model is too little to judge our goals: it shows that all modes "
        )
        text += "answer all requests. --preset=bench repeats a larger one."
    return text


PRESETS = {"tiny": tiny, "bench": Config}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main))
