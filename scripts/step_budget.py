"""Where the time of one train step goes on one H100: an ESTIMATE by the cost model, by cause.

    uv run scripts/step_budget.py [--out=experiments/results] [--compiled]

The step is that of the 1.2B decoder of scripts/gpu_session/training.py, with 8 rows of 4,096
tokens. It is estimated in three configurations: the program before packed cuDNN attention, the same
flags now, and the flags recommended for one H100; each for rows of one segment and of four. The
efficiencies are assumed ones of the cost model (megajax/cost/roofline.py); nothing was measured.
The script writes step_budget.json into --out. With --compiled it also writes step_memory.json, the
memory of the steps as compiled for an H100 without a GPU. cuDNN's kernel cannot be compiled without
its library, so attention is our kernel there, which stores the same arrays.

The first configuration models three faults that the lowered program had: the forward pass of
attention ran twice, it computed all pairs of a row (a dense mask is no causal order for cuDNN), and
both backward products of the head were in float32 (TF32).
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.files import expand
from megajax.core.hardware import CARDS, Cluster, parse_cluster
from megajax.cost import memory
from megajax.cost.base import train_flops_per_token
from megajax.cost.estimate import estimate
from megajax.cost.roofline import Roofline
from megajax.cost.step import StepShape
from megajax.monitor import results
from megajax.systems.aot import QUICK
from megajax.training.config import Config as RunConfig
from megajax.training.shape import step_shape, with_chunks
from pallas_kernels import aot
from scripts.gpu_session import training

ONE = dict.fromkeys(("pipe", "node", "data", "expert", "context", "tensor"), 1)
NOW = "cudnn, remat outputs"
RECOMMENDED = "cudnn, remat dots"
CARD, MODEL = CARDS["H100"], Roofline()


@dataclass(frozen=True)
class Config(Checked):
    """The folder of the results."""

    out: str = results.out_option("step_budget")
    compiled: bool = option(False, "also compile the recommended step for an H100 (extra aot)")


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def shape_of(cfg: RunConfig, pieces: int) -> StepShape:
    """Returns the step with attention inside segments only: each segment is a row of its own."""
    train = dataclasses.replace(
        cfg.train, global_batch=cfg.train.global_batch * pieces, seq_len=cfg.train.seq_len // pieces
    )
    return step_shape(dataclasses.replace(cfg, train=train), ONE, fused_attention=True)


def budget(step: StepShape) -> dict[str, float]:
    """Returns the milliseconds of the step by cause; they add up to the estimate."""
    by_cause: dict[str, float] = {}

    def add(cause: str, seconds: float) -> None:
        by_cause[cause] = by_cause.get(cause, 0.0) + 1e3 * seconds

    for op in step.forward.ops:
        if op.part not in step.counts:
            continue
        times, once = step.counts[op.part][0], op.count * MODEL.op_time(op, CARD)[0]
        if op.part in ("norm", "activation"):
            add("norms and activations, forward and backward", 3 * once)
            add("norms and activations again (remat)", (times - 3) * once)
            continue
        # Of attention a causal half is credited, of products all.
        half = 0.5 if op.part == "attention" else 1.0
        ideal = half * op.count * op.flops / CARD.flops["bfloat16"]
        kind = "attention" if op.part == "attention" else "products"
        add("useful work at the card's peak", 3 * ideal)
        add(f"{kind}: below the peak (assumed efficiency)", 3 * (once - ideal))
        again = {"attention": "attention", "head": "head"}.get(op.part, "products of the blocks")
        add(f"{again} again", (times - 3) * once)
    update = estimate(step, parse_cluster("H100:1x1"), ()).update_s
    add("optimizer update", update)
    return {cause: ms for cause, ms in by_cause.items() if ms > 0}


def as_before(step: StepShape, row_step: StepShape) -> dict[str, float]:
    """Returns what the earlier program adds to the same step, in milliseconds.

    row_step: the step with attention over whole rows.
    """
    (packed,), (there,) = (
        [op for op in s.forward.ops if op.part == "attention"] for s in (step, row_step)
    )
    once, pairs = (op.count * MODEL.op_time(op, CARD)[0] for op in (packed, there))
    (head,) = (op for op in step.forward.ops if op.part == "head")
    rates = (CARD.flops[dtype] for dtype in ("tfloat32", "bfloat16"))
    slow, fast = (head.flops * head.count / (MODEL.matmul * rate) for rate in rates)
    return {
        "attention again": 1e3 * pairs,
        "attention: pairs of other segments": 1e3 * 3 * (pairs - once),
        "head: float32 products backward": 1e3 * 2 * (slow - fast),
    }


def row(name: str, variant: str, pieces: int, before: bool, cluster: Cluster) -> dict[str, Any]:
    """Returns one configuration's estimate."""
    cfg = training.configuration(variant, rehearsal=False)
    if not before:
        open_chunks = config.override(cfg, {"train.loss_chunks": 0})
        cfg = with_chunks(open_chunks, ONE, CARD.memory_bytes) if variant == RECOMMENDED else cfg
    step = shape_of(cfg, pieces)
    causes = budget(step)
    for cause, ms in (as_before(step, shape_of(cfg, 1)) if before else {}).items():
        causes[cause] = causes.get(cause, 0.0) + ms
    step_s = sum(causes.values()) / 1e3
    if not before:
        assert abs(step_s - estimate(step, cluster, ()).step_s) < 1e-6
    flops = train_flops_per_token(step.load, "causal") * step.load.tokens
    return {
        "configuration": name,
        "segments": pieces,
        "step_ms": 1e3 * step_s,
        "mfu_percent": 100 * flops / step_s / CARD.flops["bfloat16"],
        "bound_gib": memory.bound(memory.terms(shape_of(cfg, 1))) / 2**30,
        "remat": cfg.train.remat,
        "loss_chunks": cfg.train.loss_chunks,
        "causes_ms": {cause: round(ms, 2) for cause, ms in causes.items()},
    }


def memory_row(name: str, variant: str) -> dict[str, Any]:
    """Returns XLA's memory of a step, beside that of the cost model's terms."""
    cfg = training.configuration(variant, rehearsal=False)
    cfg = config.override(cfg, {"train.attention": "hopper"})
    step = training.train_step_of(cfg, aot.devices(1, 1, "h100")[0])
    lowered = step.step.lower(step.abstract_state, step.abstract_batch)
    used = aot.compile(lowered, QUICK).memory_analysis()
    chosen = with_chunks(cfg, ONE, CARD.memory_bytes)
    bound = memory.bound(memory.terms(step_shape(chosen, ONE, fused_attention=True)))
    return {
        "configuration": name,
        "loss_chunks": chosen.train.loss_chunks,
        "arguments_gib": used.argument_size_in_bytes / 2**30,
        "temporary_gib": used.temp_size_in_bytes / 2**30,
        "peak_gib": used.peak_memory_in_bytes / 2**30,
        "bound_gib": bound / 2**30,
    }


def main() -> int:
    """Writes the estimates."""
    cfg, _ = config.from_flags(PRESETS)
    folder = results.writable_folder(cfg.out)
    cluster = parse_cluster("H100:1x1")
    rows = [
        row(name, variant, pieces, name == "before", cluster)
        for pieces in (1, training.PIECES)
        for name, variant in (("before", NOW), ("now", NOW), ("recommended", RECOMMENDED))
    ]
    about = results.facts("H100", "estimated: efficiencies assumed, nothing measured")
    results.write(expand(str(folder), "out") / "step_budget.json", about, rows)
    if cfg.compiled:
        about = results.facts("H100", "compiled for H100, not run")
        steps = [memory_row("now", NOW), memory_row("recommended", RECOMMENDED)]
        results.write(expand(str(folder), "out") / "step_memory.json", about, steps)
    for row_shown in rows:
        print({k: round(v, 1) if isinstance(v, float) else v for k, v in row_shown.items()})
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
