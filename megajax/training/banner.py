"""What a run says at its start and end: device, mesh, differences, sizes, where things are.

Configurations are those of pretraining or fine-tuning, training.config.JobConfig with data and a
model whose work is known.
"""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from megajax.core import config, tree
from megajax.core.errors import unwritable
from megajax.core.hardware import find_card
from megajax.core.mesh import describe
from megajax.cost.base import train_flops_per_token
from megajax.data.corpus import Corpus
from megajax.data.tokenizer import Tokenizer
from megajax.monitor import results
from megajax.monitor.console import Console, quantity
from megajax.monitor.meter import Work
from megajax.monitor.records import Sink
from megajax.monitor.sinks import Jsonl, TensorBoard, Wandb
from megajax.parallel import expert, wire
from megajax.parallel.attention import choose_attention
from megajax.parallel.inside import explain_overlap
from megajax.training import optim
from megajax.training.run_dir import RunDir
from megajax.training.step import TrainStep
from megajax.training.task import Task

MOST_CLASSES = 20  # (chosen) classes whose figures the end of a run lists


def sinks(cfg: Any, run_dir: RunDir, console: Console) -> list[Sink]:
    """Returns the sinks of this process; only the first one of a job writes.

    A run goes on without TensorBoard's files.
    Raises: UserError when metrics.jsonl cannot be opened.
    """
    if jax.process_index() != 0:
        return []
    try:
        chosen: list[Sink] = [Jsonl(run_dir.metrics)]
    except OSError as error:
        why = f"cannot write {run_dir.metrics}: {error.strerror} (--run_dir)"
        raise unwritable(why, error) from None
    if cfg.log.tensorboard:
        try:
            settings = {name: config.get(cfg, name) for name, _, _ in config.leaves(type(cfg))}
            chosen.append(TensorBoard(run_dir.path, settings))
        except OSError as error:
            why = error.strerror
            console.say(f"TensorBoard cannot write: {why}. Training goes on without")
    if cfg.log.wandb is not None:
        name = run_dir.path.name
        chosen.append(Wandb(cfg.log.wandb, name, run_dir.path, dataclasses.asdict(cfg)))
    return chosen


def work(cfg: Any, task: Task, mesh: Mesh) -> Work:
    """Returns what throughput and MFU divide: units of a step, FLOPs of one in both conventions if
    the model says what it computes, and the devices' peak if known."""
    flops: dict[str, float | None] = {"megatron": None, "causal": None}
    if hasattr(cfg.model, "workload"):
        load = cfg.model.workload(1, cfg.train.seq_len)
        for convention in ("megatron", "causal"):
            row = train_flops_per_token(load, convention) * load.tokens
            flops[convention] = row / task.units_per_row
    card = find_card(mesh.devices.flat[0].device_kind)
    peak = card.flops.get(cfg.train.dtype) if card else None
    return Work(
        cfg.train.global_batch * task.units_per_row,
        flops["megatron"],
        flops["causal"],
        peak * mesh.size if peak else None,
        task.unit,
    )


def show_start(
    console: Console, name: str, cfg: Any, preset: Any, mesh: Mesh, run_dir: RunDir
) -> None:
    """Device, mesh, folder, and what differs from the preset. name: what the run starts from."""
    console.say(f"{name}: {describe(mesh)}, run in {run_dir.path}")
    for field, old, new in config.diff(cfg, preset):
        console.say(f"  {field}: {old} -> {new}")
    for sentence in optim.shortened(cfg.optim, cfg.train.steps):
        console.say(f"note: {sentence}")


def show_data(console: Console, cfg: Any, corpora: list[Corpus], tokenizer: Tokenizer) -> None:
    """What is read and how much, and how many documents are there more than once."""
    for c in corpora:
        held = c.held_out.tokens if c.held_out is not None else 0
        console.say(
            f"{c.name}: {quantity(c.train.tokens)} tokens to learn, {quantity(held)} held out "
            f"({tokenizer.name})"
        )
        if c.held_out is not None and not c.held_out.rows(cfg.train.seq_len):
            console.say(
                f"{c.name}: not evaluated, what is held out does not fill a row of "
                f"{cfg.train.seq_len} tokens (--data.holdout, --train.seq_len)"
            )
        if c.copies:
            console.say(f"{c.name}: {quantity(c.copies)} documents are copies of earlier ones")


def show_model(console: Console, cfg: Any, train_step: TrainStep, mesh: Mesh) -> None:
    """Parameters, FLOPs and bytes a device, and which kernels were chosen why."""
    state = train_step.abstract_state
    flops = train_flops_per_token(cfg.model.workload(1, cfg.train.seq_len), "megatron")
    held = tree.nbytes_per_device(state) / 2**30
    console.say(
        f"{quantity(tree.count(state.params))} parameters, {quantity(flops)} FLOPs a token, "
        f"{held:.3f} GiB of state a device"
    )
    model = cfg.model
    kv_heads = model.kv_heads * train_step.layout.copies("kv_heads")
    packed = model.head_width, model.heads // kv_heads, cfg.train.seq_len
    kernel, why = choose_attention(
        train_step.layout, cfg.train.attention, cfg.train.dtype, cfg.context, packed
    )
    console.say(f"attention: {kernel} ({why})")
    if mesh.shape["tensor"] > 1 and model.feed_forward.hidden:
        tokens = math.prod(train_step.abstract_batch["tokens"].shape[-2:])
        mlp = model.feed_forward
        why = explain_overlap(train_step.layout, cfg.overlap, tokens, mlp, cfg.train.dtype)
        console.say(f"overlap: {why}")
    moe = getattr(model, "moe", None)  # an encoder has none
    if moe is not None and moe.experts and mesh.shape["expert"] * mesh.shape["tensor"] > 1:
        tokens = math.prod(train_step.abstract_batch["tokens"].shape[-2:])
        layer = moe, model.expert
        why = expert.explain_overlap(
            train_step.layout, cfg.overlap, tokens, *layer, cfg.train.dtype
        )
        console.say(f"experts: {why}")
    if mesh.shape["context"] > 1:
        order = "plain" if train_step.storage.tokens is None else "zigzag"
        console.say(f"context: {cfg.context.kind}, {order} order")
    show_wire(console, cfg, train_step, mesh)


def wire_bytes(train_step: TrainStep) -> dict[str, tuple[int, float]]:
    """Returns {"wire_LEVEL_bytes": (bytes that one device gives the collectives of a step, numbers
    that these stand for)}; nothing without a codec."""
    exchange = train_step.exchange
    if exchange is None:
        return {}
    sent = exchange.wire_bytes(train_step.abstract_state.params, train_step.storage.chunks)
    return {f"wire_{level}_bytes": row for level, row in sent.items()}


def show_wire(console: Console, cfg: Any, train_step: TrainStep, mesh: Mesh) -> None:
    """What data parallelism sends in which codec, how much, and what stays as without --wire."""
    exchange = train_step.exchange
    if cfg.wire == "none" or exchange is None:
        return
    console.say(wire.line(cfg, [exchange.names[i] for i in exchange.exact], mesh.shape))
    named = {"weights": "of weights", "inside": "inside a node", "between": "between nodes"}
    parts = [
        f"{nbytes / 2**20:.3f} MiB {named[key.split('_')[1]]} ({8 * nbytes / numbers:.2f} bits)"
        for key, (nbytes, numbers) in wire_bytes(train_step).items()
    ]
    if parts:
        console.say(f"wire: each device gives the collectives of a step {', '.join(parts)}")
    kernels, cpu = cfg.exchange.kernels, mesh.devices.flat[0].platform == "cpu"
    if parts and kernels != "reference" and not (cpu and kernels == "auto"):
        with jax.set_mesh(mesh):
            plain = exchange.plain_passes(
                train_step.abstract_state.params, train_step.storage.chunks
            )
        console.say(wire.kernels_line(plain))


def facts(
    cfg: Any, mesh: Mesh, train_step: TrainStep, name: str, preset: Any | None = None
) -> dict[str, Any]:
    """Returns what a result must state beside its figures.

    name: of what the configuration starts from. preset: that itself; None: flags are not stated.
    """
    device, task = mesh.devices.flat[0], train_step.task
    layer = "emulated" if device.platform == "cpu" else f"measured on {device.device_kind}"
    return results.facts(f"{mesh.size} x {device.device_kind}", layer) | {
        "preset": name,
        **({} if preset is None else {"overrides": shlex.join(config.spell(cfg, preset))}),
        "seed": cfg.train.seed,
        "mesh": describe(mesh),
        "parameters": tree.count(train_step.abstract_state.params),
        f"{task.unit}_per_step": cfg.train.global_batch * task.units_per_row,
        **{name: nbytes for name, (nbytes, _) in wire_bytes(train_step).items()},
    }


def show_end(
    console: Console,
    figures: dict[str, Any],
    run_dir: RunDir,
    sample: str | None,
    labels: Sequence[str] = (),
) -> None:
    """The last figures and where to look. labels: the names of a classifier's classes."""
    if sample is not None:
        console.say(f"--- sample\n{sample}\n---")
    if figures:
        bits = figures.get("eval_bits_per_byte")
        at = f" at step {figures.get('eval_step')}"
        tail = f", held out {bits:.3f} bits per byte{at}" if bits is not None else ""
        if (accuracy := figures.get("eval_accuracy")) is not None:
            tail = f", held out {accuracy:.1%} right{at}"
        loss = figures["last_10_loss"]
        shown = f"{loss:.4f} nats" if loss is not None else "not finite"
        console.say(f"done: {figures['steps']} steps, last 10 losses {shown}{tail}")
        rows = figures.get("labels", ())
        for row in rows[:MOST_CLASSES]:
            precision, recall = (
                "-" if row[kind] is None else f"{row[kind]:.1%}" for kind in ("precision", "recall")
            )
            console.say(
                f"  {row['class']}: {row['examples']} examples held out, precision {precision}, "
                f"recall {recall}"
            )
        if len(labels) > min(len(rows), MOST_CLASSES):
            console.say(f"  {len(labels)} classes, see summary.md")
    there = [n for n in ("summary.md", "curve.png", "metrics.jsonl") if (run_dir.path / n).exists()]
    if there:
        console.say(f"see {run_dir.path}/{', '.join(there)}")
