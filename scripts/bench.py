"""Benchmark of the trainer: ours beside the best rival, interleaved in one process.

    uv run scripts/bench.py train [--preset=nano] [--mesh.data=4 --mesh.tensor=2]

train: the trainer's step (data, step, record) over a minimal hand-written JAX loop of the same
model, mesh, stored shardings and remat (scripts/plain_train.py), A/B/A/B, median of --rounds pairs.
Writes bench_train.json into --out. On a CPU the ratio counts, not the times.
Kernels are timed by scripts/gpu_check.py.
"""

import megajax.core.interrupted  # noqa: F401

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import plain_train
from jax.sharding import NamedSharding

from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.data.corpus import open_corpora
from megajax.data.loader import Loader, training_rows
from megajax.models.decoder_config import PRESETS as MODELS
from megajax.monitor import results
from megajax.monitor.meter import Meter
from megajax.monitor.records import Recorder
from megajax.monitor.sinks import Jsonl
from megajax.training import banner
from megajax.training.config import Config as RunConfig
from megajax.training.config import TrainConfig
from megajax.training.step import make_train_step


@dataclass(frozen=True)
class Config(Checked):
    """What to compare."""

    rounds: int = option(30, "timed pairs, after 5 of warm-up", at_least=1)
    out: str = results.out_option("bench")
    run: RunConfig = group(RunConfig)
    emulate: int | None = option(None, "CPU devices to emulate; none: 8 without a GPU", at_least=1)
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, whole=True)


def nano() -> Config:
    """The default run with AdamW, which both sides have."""
    run = RunConfig(
        model=MODELS["nano"](), train=TrainConfig(steps=1000, global_batch=32, seq_len=128)
    )
    return Config(run=run, mesh=mesh_.MeshSpec(tensor=2))


PRESETS = {"nano": nano}
config.define_flags(PRESETS, "nano")


def bench_train(cfg: Config) -> None:
    """Times both loops on the same data."""
    mesh_.start(cfg.emulate, 8)
    mesh = mesh_.fit(cfg.mesh, nano().mesh, jax.device_count()).build()
    run = replace(cfg.run, mesh=cfg.mesh)
    train_step = make_train_step(run, mesh)
    corpora, _ = open_corpora(run.data, run.cache_dir, vocab=run.model.vocab)
    rows = training_rows(corpora, run.train.seq_len, run.train.seed)
    ours = Loader(rows, train_step.abstract_batch, order=train_step.order)
    auto = plain_train.automatic(mesh)
    theirs = Loader(
        rows,
        {
            k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(auto, x.sharding.spec))
            for k, x in train_step.abstract_batch.items()
        },
    )
    state = train_step.init(0)
    place, plain_step = plain_train.make(run, mesh, train_step.abstract_state.params)
    plain_state = place(train_step.init(0).params)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder([Jsonl(Path(folder) / "metrics.jsonl")])
        meter = Meter(banner.work(run, mesh), run.train.steps)
        times: tuple[list[float], list[float]] = ([], [])
        losses: tuple[list[float], list[float]] = ([], [])
        for i in range(cfg.rounds + 5):
            began = time.perf_counter()
            state, metrics = train_step.step(state, next(ours))
            loss = float(metrics["loss"])
            recorder.emit(i + 1, {"loss": loss} | meter.finish(i + 1, loss))
            middle = time.perf_counter()
            batch = next(theirs)
            plain_state, value = plain_step(plain_state, batch)
            plain_loss = float(value)
            ended = time.perf_counter()
            losses[0].append(loss)
            losses[1].append(plain_loss)
            if i >= 5:
                times[0].append(middle - began)
                times[1].append(ended - middle)
    # Only the first steps: rounding grows as any training does.
    difference = float(np.abs(np.subtract(*losses))[:8].max())
    if difference > 1e-3:
        raise UserError(f"the two loops do not compute the same: losses differ by {difference:.3g}")
    ratio = float(np.median(np.array(times[0]) / np.array(times[1])))
    found = []
    for name, taken in zip(("megajax trainer", "hand-written JAX"), times, strict=True):
        p10, median, p90 = (float(np.percentile(taken, p)) for p in (10, 50, 90))
        row = {"loop": name, "median_s": median, "p10_s": p10, "p90_s": p90, "n": len(taken)}
        found.append(row)
    found[0]["ratio"] = found[0]["median_s"] / found[1]["median_s"]
    about = banner.facts(run, mesh, train_step, config.start_name())
    about |= {"median_of_pairwise_ratios": ratio, "largest_loss_difference": difference}
    for row in found:
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    print(f"ratio of medians {found[0]['ratio']:.3f}, median of ratios {ratio:.3f}")
    results.write(expand(cfg.out, "out") / "bench_train.json", about, found)


def main(what: str) -> int:
    """Runs one benchmark."""
    cfg, _ = config.from_flags(PRESETS)
    if what != "train":
        raise UserError(f"{what!r} must be train; kernels are timed by scripts/gpu_check.py")
    results.writable_folder(cfg.out)
    bench_train(cfg)
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main, positional=1))
