"""Everything that waits for a GPU, in order of worth, one JSON.

    PYTHONPATH=. python3 scripts/gpu_check.py            # all parts, inside 8 minutes
    PYTHONPATH=. python3 scripts/gpu_check.py kernels    # one part; or train, plan, ...
    PYTHONPATH=. python3 scripts/gpu_check.py tile_sparse    # one folder of kernels; or gemm, ...
    PYTHONPATH=. python3 scripts/gpu_check.py kernels rehearse   # on a CPU, tiny, interpreted
    PYTHONPATH=. python3 scripts/gpu_check.py collective rehearse   # on a CPU, compiled only
    PYTHONPATH=. python3 scripts/gpu_check.py expert rehearse   # likewise

train: correctness first (losses of a small model on the GPU against this machine's CPU, the cuDNN
attention against XLA's), then the step time and MFU of a 1.2B decoder in bf16 on one GPU, against a
plain bf16 matmul's rate in the same run. Results are written after every row, so a run that is
cut off still counts: runs/gpu_check/gpu_train.json (or under $OUT, where that is set; documents
quote what lies in experiments/results).
kernels: of every folder a sample of the correctness matrix, times beside rivals and a BERT forward
in order of worth, then the rest of the matrix (gpu_kernels.json; of one folder
gpu_kernels_<folder>.json).
plan: the cost model's estimate of such steps, and its memory bound, beside their measurement
(gpu_plan.json).
collective: the fused products on virtual ranks, exact, then timed beside a ghost whose link is
emulated (gpu_collective.json). expert: the same of a mixture's products (gpu_expert.json).
Needs jax with CUDA, flax, optax and absl only.
"""

import megajax.core.interrupted  # noqa: F401

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from gpu_kernels import FOLDERS, check_kernels

from megajax.core import config, script
from megajax.core.hardware import find_card, parse_cluster
from megajax.core.mesh import MeshSpec
from megajax.cost import memory
from megajax.cost.flops import train_flops_per_token
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.monitor import results
from megajax.systems import aot
from megajax.training.config import Config, TrainConfig
from megajax.training.optim import OptimConfig
from megajax.training.step import TrainStep, make_train_step
from pallas_kernels.collective.bench import check_collective
from pallas_kernels.expert.bench import check_expert

FOLDER = Path(os.environ.get("OUT", "runs/gpu_check"))
BUDGET_S, RESERVE_S = 8 * 60, 40  # in all, and for what has begun by the deadline
SMALL = Config(
    model=DecoderConfig(), train=TrainConfig(steps=20, global_batch=8), optim=OptimConfig(lr=1e-3)
)


def batch_of(train_step: TrainStep, number: int, vocab: int, pieces: int) -> dict[str, jax.Array]:
    """A random packed batch; `pieces` segments a row."""
    random = np.random.default_rng(number)
    shape = train_step.abstract_batch["tokens"].shape
    S = shape[-1]
    walk = (random.integers(0, 17, (*shape[:-1], S + 1)).cumsum(-1) % vocab).astype(np.int32)
    length = S // pieces
    segments = np.broadcast_to(np.arange(S) // length + 1, shape).astype(np.int32)
    host = {
        "tokens": walk[..., :-1],
        "targets": walk[..., 1:],
        "segments": segments,
        "positions": np.broadcast_to(np.arange(S) % length, shape).astype(np.int32),
    }
    return {k: jax.device_put(v, train_step.abstract_batch[k].sharding) for k, v in host.items()}


def losses(cfg: Config, device: jax.Device, steps: int) -> list[float]:
    """Trains on one device."""
    train_step = make_train_step(cfg, MeshSpec(data=1).build([device]))
    state, found = train_step.init(0), []
    for i in range(steps):
        state, metrics = train_step.step(state, batch_of(train_step, i, cfg.model.vocab, 2))
        found.append(float(metrics["loss"]))
    return found


def check_losses(report: Callable) -> None:
    """The GPU's float32 and bf16 losses against the CPU's float32."""
    cpu, gpu = jax.devices("cpu")[0], jax.devices()[0]
    with jax.default_matmul_precision("highest"):
        want = losses(SMALL, cpu, 20)
        exact = losses(SMALL, gpu, 20)
    difference = float(np.abs(np.subtract(want, exact)).max())
    report("float32 losses, GPU against CPU, 20 steps", difference, 1e-3)
    for attention in ("xla", "cudnn", "varlen"):
        cfg = config.override(SMALL, {"train.dtype": "bfloat16", "train.attention": attention})
        try:
            short = losses(cfg, gpu, 20)
        except Exception as error:  # a kernel that this machine lacks is a finding, not a crash
            report(f"bf16 losses, {attention} attention", None, None, note=str(error)[:300])
            continue
        relative = abs(short[-1] - want[-1]) / want[-1]
        report(f"bf16 last loss, {attention} attention, relative to float32", relative, 0.02)


def time_step(cfg: Config, steps: int, pieces: int) -> dict[str, Any]:
    """Median step time of the trainer's own step, three batches in rotation, after 5 of warm-up."""
    train_step = make_train_step(cfg, MeshSpec().build())
    state = train_step.init(0)
    batches = [batch_of(train_step, i, cfg.model.vocab, pieces) for i in range(3)]
    times, began = [], 0.0
    for i in range(steps + 5):
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, metrics = train_step.step(state, batches[i % 3])
        jax.block_until_ready(metrics["loss"])
        times.append(time.perf_counter() - began)
    kept = sorted(times[5:])
    median = kept[len(kept) // 2]
    tokens = cfg.train.global_batch * cfg.train.seq_len
    card = find_card(jax.devices()[0].device_kind)
    peak = card.flops["bfloat16"] * jax.device_count() if card else None
    rate = tokens / median
    row: dict[str, Any] = {
        "median_s": median, "p10_s": kept[len(kept) // 10], "p90_s": kept[-1 - len(kept) // 10],
        "n": len(kept), "tokens_per_s": rate, "loss": float(metrics["loss"]),
    }  # fmt: skip
    load = cfg.model.workload(1, cfg.train.seq_len)
    for convention in ("megatron", "causal"):
        flops = train_flops_per_token(load, convention)
        row[f"flops_per_token_{convention}"] = flops
        row[f"mfu_{convention}"] = rate * flops / peak if peak else None
    stats = jax.devices()[0].memory_stats() or {}
    row["memory_gib"] = stats.get("peak_bytes_in_use", 0) / 2**30
    return row


def matmul_rate() -> float:
    """FLOP/s of a plain bf16 matmul, the practical ceiling of this run."""
    n = 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        product(a, b).block_until_ready()
        times.append(time.perf_counter() - began)
    return 2 * n**3 / sorted(times)[10]


def large(**changes: Any) -> Config:
    """The 1.2B Llama 3.2 shape, 32,768 tokens a step."""
    base = Config(
        model=PRESETS["llama3_1b"](),
        train=TrainConfig(
            steps=1000, global_batch=8, seq_len=4096, dtype="bfloat16", loss_chunks=8
        ),
    )
    return config.override(base, {k.replace("__", "."): v for k, v in changes.items()})


VARIANTS: dict[str, dict[str, Any]] = {
    "cudnn, remat outputs": {},
    "varlen, remat outputs": {"train__attention": "varlen"},
    "cudnn, remat full": {"train__remat": "full"},
    "cudnn, remat dots": {"train__remat": "dots"},
    "cudnn, batch 16": {"train__global_batch": 16},
    "cudnn, parallel block": {"model__block": "parallel"},
    "xla attention, batch 2": {"train__attention": "xla", "train__global_batch": 2},
}


class Report:
    """Rows of one part, written and printed as they come."""

    def __init__(self, part: str):
        """part: names the file."""
        kind = jax.devices()[0].device_kind
        self.about: dict[str, Any] = results.facts(kind, f"measured on {kind}")
        self._path, self._rows = FOLDER / f"gpu_{part}.json", []

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row."""
        self._rows.append(row)
        results.write(self._path, self.about, self._rows)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)

    def each(self, wanted: Iterable[str], deadline: float, measure: Callable) -> None:
        """Adds measure(configuration) for each variant: one that fails must not lose the others."""
        for name in wanted:
            if time.perf_counter() > deadline:
                self.add({"variant": name, "note": "not run: out of time"})
                continue
            try:
                self.add({"variant": name} | measure(large(**VARIANTS[name])))
            except Exception as error:
                self.add({"variant": name, "note": f"{type(error).__name__}: {str(error)[:300]}"})


def check_train(deadline: float) -> None:
    """Correctness, then times."""
    rows = Report("train")

    def report(check: str, value: float | None, bound: float | None, note: str = "") -> None:
        passed = value is not None and bound is not None and value <= bound
        rows.add({"check": check, "value": value, "bound": bound, "passed": passed, "note": note})

    check_losses(report)
    rows.about["matmul_tflops"] = matmul_rate() / 1e12
    rows.each(VARIANTS, deadline, lambda cfg: time_step(cfg, 30, pieces=4))


def estimated(cfg: Config, kind: str) -> dict[str, float]:
    """Returns what the plan of one GPU says of a step: estimate_s and bound_gib."""
    fused = cfg.train.attention != "xla"
    planned = aot.outline(cfg, parse_cluster(f"{kind}:1x1"), fused_attention=fused)
    return {
        "estimate_s": planned.estimate.step_s,
        "bound_gib": memory.bound(planned.terms) / 2**30,
    }


def check_plan(deadline: float) -> None:
    """Estimate over measurement; the aim is within 15 percent."""
    rows = Report("plan")
    card = find_card(jax.devices()[0].device_kind)
    if card is None:
        sys.exit(f"error: no hardware card for {jax.devices()[0].device_kind}")

    def measure(cfg: Config) -> dict[str, Any]:
        row = estimated(cfg, card.name) | time_step(cfg, 20, pieces=4)
        return row | {"estimate_over_measured": row["estimate_s"] / row["median_s"]}

    rows.each(VARIANTS, deadline, measure)


def check_folders(deadline: float, rehearsal: bool = False, only: str | None = None) -> None:
    """Correctness and times of the kernels, of all folders or of one."""
    rows = Report("_".join(filter(None, ["kernels", only, rehearsal and "rehearsal"])))
    check_kernels(rows.add, rows.about, deadline, rehearsal, only)


def check_fused(name: str, deadline: float, rehearsal: bool = False) -> None:
    """Products with their communication inside, on one GPU."""
    rows = Report(f"{name}_rehearsal" if rehearsal else name)
    FUSED[name](rows.add, rows.about, deadline, rehearsal)


FUSED = {"collective": check_collective, "expert": check_expert}
PARTS = {
    "train": check_train, "plan": check_plan, "kernels": check_folders,
    **{name: functools.partial(check_fused, name) for name in FUSED},
}  # fmt: skip


def stop() -> None:
    """Ends the process at its limit, whatever compiles: all finished rows are on disk."""
    print(f"stopped: {BUDGET_S} s are over", flush=True)
    os._exit(0)


def main(argv: list[str]) -> None:
    """Runs the parts that are named, or all."""
    logging.set_verbosity(logging.WARNING)
    if argv[2:] == ["rehearse"] and argv[1] in ("kernels", *FOLDERS):
        jax.config.update("jax_num_cpu_devices", 8)  # the interpreter needs as many threads
        jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of its time
        only = argv[1] if argv[1] in FOLDERS else None
        return check_folders(time.perf_counter() + BUDGET_S, rehearsal=True, only=only)
    if argv[2:] == ["rehearse"] and argv[1] in FUSED:
        return check_fused(argv[1], time.perf_counter() + BUDGET_S, rehearsal=True)
    parts = PARTS | {name: functools.partial(check_folders, only=name) for name in FOLDERS}
    wanted = argv[1:] or list(PARTS)
    unknown = [w for w in wanted if w not in parts]
    if unknown:
        sys.exit(f"error: {unknown[0]!r} is not a part; there are {', '.join(parts)}")
    if jax.devices()[0].platform == "cpu":
        sys.exit("error: jax finds no GPU (is the CUDA plugin installed: uv sync --extra gpu?)")
    watch = threading.Timer(BUDGET_S, stop)
    watch.daemon = True
    watch.start()
    deadline = time.perf_counter() + BUDGET_S - RESERVE_S
    for name in wanted:
        parts[name](deadline)


if __name__ == "__main__":
    script.start(main)
