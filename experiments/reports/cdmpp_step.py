"""A predicted train step in figures and text: its time with a band, and its dearest operations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.reports.cdmpp import BAND
from megajax.core.hardware import Cluster
from megajax.cost.base import mfu, train_flops_per_token
from megajax.cost.record import OpRecord
from megajax.monitor import results
from megajax.systems.aot import RESERVE_BYTES
from megajax.systems.cdmpp.step import StepTime
from megajax.training.config import Config

TOP = 10


def step_facts(
    step: StepTime,
    cfg: Config,
    cluster: Cluster,
    segments: int = 1,
    band: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Returns the figures of a predicted step, and its dearest operations.

    Args: segments: documents of equal length in a row; MFU credits the attention inside them only.
      band: the ends of the 90 % band, as multiples of the step's time; None: by its deviation.
    """
    low = max(step.seconds - BAND * step.sigma, 0.0) if band is None else band[0] * step.seconds
    high = step.seconds + BAND * step.sigma if band is None else band[1] * step.seconds
    rows, length = cfg.train.global_batch * segments, cfg.train.seq_len // segments
    load = cfg.model.workload(rows, length, cfg.train.dtype)
    tokens_per_s = load.tokens / step.seconds
    peak = cluster.card.peak(cfg.train.dtype)
    flops = {c: train_flops_per_token(load, c) for c in ("megatron", "causal")}
    same: dict[str, list[float]] = {}
    first: dict[str, OpRecord] = {}
    for record, seconds, _ in step.rows:
        first.setdefault(record.hash, record)
        total = same.setdefault(record.hash, [0.0, 0.0])
        total[0] += seconds
        total[1] += record.executions
    dearest = sorted(same, key=lambda key: -same[key][0])[:TOP]
    return {
        "step_s": step.seconds,
        "low_s": low,
        "high_s": high,
        "compute_s": step.compute_s,
        "communication_s": step.communication_s,
        "exposed_s": step.exposed_s,
        "tokens_per_s": tokens_per_s,
        "mfu_megatron": mfu(tokens_per_s, flops["megatron"], cluster.devices, peak),
        "mfu_causal": mfu(tokens_per_s, flops["causal"], cluster.devices, peak),
        "dearest": [
            {
                "name": first[key].name,
                "kind": first[key].kind,
                "executions": same[key][1],
                "seconds": same[key][0],
                "share": same[key][0] / step.seconds if step.seconds else 0.0,
            }
            for key in dearest
        ],
    }


KERNELS = {
    "xla": "Attention is XLA's.",
    "hopper": "Attention is our Hopper kernel, in the place of cuDNN's.",
}


def write(folder: Path, step: StepTime, facts: Mapping[str, Any], cluster: Cluster) -> None:
    """Writes step.json and step_trace.json, which ui.perfetto.dev opens."""
    about: dict[str, Any] = results.facts(cluster.name, f"compiled for {cluster.card.name}")
    about |= {name: value for name, value in facts.items() if name != "dearest"}
    results.write(folder / "step.json", about, facts["dearest"])
    step.replay.timeline.to_perfetto(folder / "step_trace.json")


def step_markdown(facts: Mapping[str, Any], cluster: Cluster) -> str:
    """Returns the predicted step as text.

    facts: of `step_facts`, with memory_bytes, times (their source) and attention (of KERNELS, with
    which the step was compiled).
    """
    lines = [
        f"# A step on {cluster.name}",
        "",
        f"- step: {_time(facts['step_s'])} (90 % band {_time(facts['low_s'])} to "
        f"{_time(facts['high_s'])})",
        f"- compute: {_time(facts['compute_s'])}; communication "
        f"{_time(facts['communication_s'])}, of which {_time(facts['exposed_s'])} is exposed",
        f"- {facts['tokens_per_s']:,.0f} tokens/s, MFU {100 * facts['mfu_megatron']:.1f} % "
        f"(Megatron's convention), {100 * facts['mfu_causal']:.1f} % (causal)",
        f"- memory: {_memory(facts['memory_bytes'], cluster)}",
        "",
        "| operation | kind | executions | time | of the step |",
        "|---|---|---|---|---|",
    ]
    for row in facts["dearest"]:
        lines.append(
            f"| {row['name']} | {row['kind']} | {row['executions']:g} | {_time(row['seconds'])} | "
            f"{100 * row['share']:.1f} % |"
        )
    source = f"{facts['times'].rstrip('.')}. {KERNELS[facts['attention']]}"
    if (place := facts.get("compiled_for", cluster.card.name)) != cluster.card.name:
        source += (
            f" It is not compiled for {cluster.card.name}, so the program and its memory are those "
            f"of {place}."
        )
    return "\n".join([*lines, "", f"*Predicted, not measured: {source}*"])


def _memory(nbytes: float, cluster: Cluster) -> str:
    """Returns what the step needs on a device by XLA's figure and with the reserve of a plan, and
    whether it fits."""
    need = nbytes + RESERVE_BYTES
    gib, room = need / 2**30, cluster.card.memory_bytes / 2**30
    reserve = f"({RESERVE_BYTES / 2**30:.1f} reserved)"
    if need <= cluster.card.memory_bytes:
        return f"{gib:.1f} of {room:.1f} GiB a device {reserve}"
    return (
        f"{gib:.1f} GiB a device {reserve}, and it has {room:.1f}: this step does not fit, and "
        "XLA's schedule of it may be a worse one; more micro-batches need less "
        "(--train.accumulate)"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"
