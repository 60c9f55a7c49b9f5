"""The training parts of gpu_check.py: losses against the CPU's, and the step of a 1.2B decoder.

Losses: a small model on the GPU against this machine's CPU, in float32, then in bf16 with each
attention. Step: median time and MFU in bf16 on one GPU, and the cost model's estimate of the step
and of its memory. A row's packed segments count: the MFU credits the attention inside them only.
'hopper' is our kernel, be it this GPU's default or not.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from megajax.core import config
from megajax.core.hardware import find_card, parse_cluster
from megajax.core.mesh import MeshSpec
from megajax.cost import memory
from megajax.cost.base import train_flops_per_token
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.systems import aot
from megajax.training.config import Config, TrainConfig
from megajax.training.optim import OptimConfig
from megajax.training.step import TrainStep, make_train_step
from scripts.gpu_session.channel import Item

PIECES = 4  # segments of a row
WARMUP, STEPS = 5, 20
SMALL = Config(  # the narrowest heads that our attention kernel takes
    model=DecoderConfig(head_width=64),
    train=TrainConfig(steps=20, global_batch=8),
    optim=OptimConfig(lr=1e-3),
)
# Of the 1.2B Llama 3.2 shape with 32,768 tokens a step: what each changes. Names say what runs.
VARIANTS: dict[str, dict[str, Any]] = {
    "cudnn, remat outputs": {},
    "hopper, remat outputs": {"train.attention": "hopper"},
    "cudnn, remat full": {"train.remat": "full"},
    "cudnn, remat dots": {"train.remat": "dots", "train.loss_chunks": 0},
    "cudnn, batch 16": {"train.global_batch": 16},
    "cudnn, parallel block": {"model.block": "parallel"},
    "xla, batch 2": {"train.attention": "xla", "train.global_batch": 2},
}
LARGE = {
    "train.steps": 1000,
    "train.global_batch": 8,
    "train.seq_len": 4096,
    "train.dtype": "bfloat16",
    "train.loss_chunks": 8,
    "train.attention": "cudnn",
    "train.remat": "outputs",
    "train.segments": PIECES,
}
TINY = {"train.steps": 1000, "train.global_batch": 2, "train.seq_len": 64, "train.attention": "xla"}


def train_step_of(cfg: Config, device: jax.Device | None = None) -> TrainStep:
    """The trainer's own step on one device."""
    return make_train_step(cfg, MeshSpec(data=1).build([device or jax.devices()[0]]))


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


# ---- losses


def losses(cfg: Config, device: jax.Device, steps: int) -> list[float]:
    """Trains on one device. Returns: the losses."""
    train_step = train_step_of(cfg, device)
    state, values = train_step.init(0), []
    for i in range(steps):
        state, metrics = train_step.step(state, batch_of(train_step, i, cfg.model.vocab, 2))
        values.append(float(metrics["loss"]))
    return values


@functools.cache
def cpu_losses(steps: int) -> list[float]:
    """Returns the CPU's losses in float32."""
    with jax.default_matmul_precision("highest"):
        return losses(SMALL, jax.devices("cpu")[0], steps)


def losses_items(rehearsal: bool) -> list[Item]:
    """Returns items that compare losses with the CPU's; a rehearsal compares two CPU devices."""
    steps, device = (2, jax.devices()[-1]) if rehearsal else (20, jax.devices()[0])

    def exact() -> dict[str, Any]:
        with jax.default_matmul_precision("highest"):
            device_losses = losses(SMALL, device, steps)
        difference = float(np.abs(np.subtract(cpu_losses(steps), device_losses)).max())
        return {"value": difference, "bound": 1e-3, "passed": difference <= 1e-3}

    def short(attention: str) -> dict[str, Any]:
        changes = {"train.dtype": "bfloat16", "train.attention": attention}
        cfg = config.override(SMALL, changes)
        last = losses(cfg, device, steps)[-1]
        want = cpu_losses(steps)[-1]
        relative = abs(last - want) / want
        return {"value": relative, "bound": 0.02, "passed": relative <= 0.02}

    kinds = ("xla",) if rehearsal else ("xla", "cudnn", "hopper")
    return [
        Item(f"float32 losses, GPU against CPU, {steps} steps", exact, limit_s=150),
        *(
            Item(
                f"bf16 last loss, {kind} attention, relative to float32",
                functools.partial(short, kind),
                limit_s=120,
            )
            for kind in kinds
        ),
    ]


# ---- steps


def configuration(variant: str, rehearsal: bool) -> Config:
    """Returns a variant's configuration; a rehearsal has the small model and a CPU's attention."""
    if rehearsal:
        return config.override(SMALL, VARIANTS[variant] | TINY)
    return config.override(Config(model=PRESETS["llama3_1b"]()), LARGE | VARIANTS[variant])


def time_step(cfg: Config, steps: int, pieces: int) -> dict[str, Any]:
    """Median time of a step, three batches in rotation, and its MFU where the peak is known."""
    train_step = train_step_of(cfg)
    state = train_step.init(0)
    batches = [batch_of(train_step, i, cfg.model.vocab, pieces) for i in range(3)]
    times = []
    for i in range(steps + WARMUP):
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, metrics = train_step.step(state, batches[i % 3])
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - began)
    p10, median, p90 = (float(x) for x in np.percentile(times[WARMUP:], (10, 50, 90)))
    stats = jax.devices()[0].memory_stats() or {}
    rate = cfg.train.global_batch * cfg.train.seq_len / median
    return {
        "median_s": median,
        "p10_s": p10,
        "p90_s": p90,
        "n": steps,
        "clock": "wall",
        "tokens_per_s": rate,
        "loss": float(metrics["loss"]),
        "memory_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        **mfu_of(cfg, rate, pieces),
    }


def mfu_of(cfg: Config, tokens_per_s: float, pieces: int) -> dict[str, float | None]:
    """FLOPs a token and MFU, by both conventions, of attention inside `pieces` segments a row."""
    card = find_card(jax.devices()[0].device_kind, "bfloat16")
    counts: dict[str, float | None] = {}
    for convention in ("megatron", "causal"):
        length = cfg.train.seq_len // pieces
        flops = train_flops_per_token(cfg.model.workload(1, length), convention)
        counts[f"flops_per_token_{convention}"] = flops
        peak = card.flops["bfloat16"] if card else None
        counts[f"mfu_{convention}"] = tokens_per_s * flops / peak if peak else None
    return counts


def estimated(cfg: Config, rehearsal: bool) -> dict[str, float]:
    """Returns estimate_s and bound_gib of a step, from the plan of one GPU."""
    card = find_card("H100" if rehearsal else jax.devices()[0].device_kind)
    if card is None:
        raise NotImplementedError(f"no hardware card for {jax.devices()[0].device_kind}")
    fused = cfg.train.attention != "xla"
    planned = aot.outline(cfg, parse_cluster(f"{card.name}:1x1"), fused_attention=fused)
    return {
        "estimate_s": planned.estimate.step_s,
        "bound_gib": memory.bound(planned.terms) / 2**30,
    }


def step_items(variant: str, rehearsal: bool) -> list[Item]:
    """Returns the item that measures the step, then its estimate."""
    cfg = configuration(variant, rehearsal)
    steps, train = 2 if rehearsal else STEPS, cfg.train
    about = {
        "variant": variant,
        "attention": train.attention,
        "remat": train.remat,
        "batch": train.global_batch,
        "seq_len": train.seq_len,
        "segments": PIECES,
    }

    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: time_step(cfg, steps, PIECES),
        "estimate": lambda: estimated(cfg, rehearsal),
    }
    return [Item(name, run, about=about, limit_s=180) for name, run in runs.items()]
