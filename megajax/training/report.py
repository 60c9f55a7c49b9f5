"""The report of a run: curve.png, summary.md and summary.json, made from metrics.jsonl.

A run whose checkpoints are safe has done its work. If a file of the report cannot be written (a
full disk, a folder that became read-only), the run prints why and keeps its exit code.
"""

import dataclasses
import io
import math
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from megajax.core import config, tree
from megajax.core.axes import BATCH_AXES
from megajax.core.errors import UserError, unwritable
from megajax.core.files import json_text, write_whole
from megajax.core.hardware import find_card
from megajax.core.mesh import describe
from megajax.cost.base import train_flops_per_token
from megajax.data.config import DataConfig
from megajax.data.corpus import Corpus
from megajax.data.tokenizer import Tokenizer
from megajax.monitor import results
from megajax.monitor.console import Console, quantity
from megajax.monitor.meter import Work
from megajax.monitor.records import SCORE, Jsonl, Sink, TensorBoard, Wandb, rows_by_step
from megajax.parallel import expert, wire
from megajax.parallel.context import choose_attention
from megajax.parallel.tensor import explain_overlap
from megajax.training import optim, precision
from megajax.training.run_dir import RunDir
from megajax.training.step import TrainStep
from megajax.training.task import Task

LAST = 10  # steps whose mean loss stands for the end of a run: one batch's is noise
OURS, HELD_OUT = "#1f6feb", "#d1242f"  # the same colours in all figures


def write_report(
    folder: Path,
    facts: dict[str, Any],
    sample: str | None,
    say: Callable[[str], None] = print,
    labels: Sequence[str] = (),
    scores: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Draws the curve and writes the summary. Returns the figures that the summary states.

    facts: name -> value lines for the head of the summary; `caption` has those under the curve.
    say: hears what could not be written, and why; nothing is raised for it.
    labels: the names of a classifier's classes. scores: figures of the last evaluation that are no
    losses, by their names in metrics.jsonl.
    """

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # of drawing too: the run is over, and it went well
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            said = f"cannot write {folder / name}: {' '.join(str(why).split())[:200]}"
            say(str(error) if isinstance(error, UserError) else said)  # it names the file

    metrics = folder / "metrics.jsonl"
    rows = attempt("curve.png, summary.md, summary.json", lambda: _rows(metrics, labels))
    train, held_out, by_label = rows or ({}, {}, [])
    if not train:
        return {}
    attempt("curve.png", lambda: draw_curve(folder / "curve.png", train, held_out, caption(facts)))
    steps = sorted(train)
    times = sorted(train[s]["step_time_s"] for s in steps[1:]) or [train[steps[0]]["step_time_s"]]
    newest, unit = train[steps[-1]], unit_of(train)
    figures: dict[str, Any] = {
        "steps": steps[-1],
        "last_10_loss": last_loss(train),
        "median_step_time_s": times[len(times) // 2],
        f"{unit}_per_s": newest[unit] / times[len(times) // 2],
    }
    if held_out:
        figures["eval_step"] = max(held_out)
        newest = held_out[figures["eval_step"]]
        figures["eval_loss"] = newest["eval_loss"]
        for name in ("eval_bits_per_byte", "eval_accuracy", "eval_majority", "eval_f1"):
            if name in newest:
                figures[name] = newest[name]
    if by_label:
        figures["labels"] = by_label
    figures |= scores or {}
    lines = ["# Run", "", "| | |", "|---|---|"]
    plain = {name: value for name, value in (facts | figures).items() if name != "labels"}
    lines += [f"| {name} | {_show(value)} |" for name, value in plain.items()]
    if "labels" in figures:
        columns = [*by_label[0]]
        lines += ["", "## Classes", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(map(_show, row.values())) + " |" for row in figures["labels"]]
    lines += ["", "![loss](curve.png)", ""]
    if sample is not None:
        lines += ["## Sample", "", "```", sample, "```", ""]
    text = "\n".join(lines).encode(errors="backslashreplace")
    data = json_text({**facts, "rows": [figures]})
    attempt("summary.md", lambda: write_whole(folder / "summary.md", text))
    attempt("summary.json", lambda: write_whole(folder / "summary.json", data))
    return figures


def unit_of(train: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what the steps of a run count: 'tokens', 'images', ..."""
    rates = (n for n in train[min(train)] if n.endswith("_per_s"))
    return next(rates, "tokens_per_s").removesuffix("_per_s")


def is_cross_entropy(row: Mapping[str, Any], unit: str) -> bool:
    """Tells whether a step's loss is in nats: of predictors of tokens, which have no score."""
    return unit == "tokens" and SCORE not in row


def _rows(
    metrics: Path, labels: Sequence[str]
) -> tuple[dict[int, dict], dict[int, dict], list[dict[str, Any]]]:
    """Returns the rows of steps, those of held-out losses, and the last figures of classes."""
    of_classes = rows_by_step(metrics, f"eval_examples/{labels[0]}") if labels else {}
    by_label = label_scores(of_classes[max(of_classes)], labels) if of_classes else []
    return rows_by_step(metrics, "loss"), rows_by_step(metrics, "eval_loss"), by_label


def label_scores(row: Mapping[str, Any], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the figures of each class in an evaluation's row; [] where it has none.

    examples: that are held out; precision, recall: of a classifier; ap: the average precision of a
    detector.
    """
    kinds = [k for k in ("examples", "precision", "recall", "ap") if f"eval_{k}/{labels[0]}" in row]
    return [
        {"number": i, "class": name} | {kind: row.get(f"eval_{kind}/{name}") for kind in kinds}
        for i, name in enumerate(labels)
        if f"eval_examples/{name}" in row
    ]


def caption(facts: Mapping[str, Any]) -> str:
    """Returns what was run: preset, flags that differ from it, seed, as far as they are known."""
    shown = [str(facts[k]) for k in ("preset", "overrides") if facts.get(k)]
    said = ", ".join([*shown, *([f"seed {facts['seed']}"] if "seed" in facts else [])])
    return said.encode(errors="backslashreplace").decode()  # a path may be no UTF-8


def last_loss(train: dict[int, dict]) -> float | None:
    """Returns the mean loss of the last steps; None where none of them is finite."""
    known = [train[s]["loss"] for s in sorted(train)[-LAST:] if train[s]["loss"] is not None]
    return sum(known) / len(known) if known else None


def _show(value: Any) -> str:
    """A cell of a Markdown table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "-"
    return " ".join(str(value).replace("|", "\\|").splitlines())


def title(train: dict[int, dict], held_out: dict[int, dict]) -> str:
    """Returns what the curve claims: the summary's figures, each with the steps that it is of."""
    mean, steps = last_loss(train), sorted(train)[-LAST:]
    span = f"mean of steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    nats = " nats" if is_cross_entropy(train[min(train)], unit_of(train)) else ""
    said = f"training loss {mean:.2f}{nats} ({span})" if mean is not None else "loss not finite"
    if held_out:
        bits = held_out[max(held_out)].get("eval_bits_per_byte")
        if bits is not None:
            said += f",\nheld out {bits:.2f} bits per byte (step {max(held_out)})"
        accuracy = held_out[max(held_out)].get("eval_accuracy")
        if accuracy is not None:
            said += f",\nheld out {accuracy:.1%} right (step {max(held_out)})"
    return said


def draw_curve(
    path: Path, train: dict[int, dict], held_out: dict[int, dict], about: str = ""
) -> None:
    """Draws training and held-out loss over steps. about: what was run, in small print."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    steps = [s for s in sorted(train) if train[s]["loss"] is not None]
    axes.plot(steps, [train[s]["loss"] for s in steps], color=OURS, lw=1.4, label="training")
    if held_out:
        at = sorted(held_out)
        losses = [held_out[s]["eval_loss"] for s in at]
        axes.plot(at, losses, "o-", color=HELD_OUT, lw=1.4, ms=4, label="held out")
    unit = "token" if all("eval_accuracy" not in r for r in held_out.values()) else "prediction"
    in_nats = is_cross_entropy(train[min(train)], unit_of(train))
    loss = f"cross-entropy (nats per {unit})" if in_nats else "loss"
    axes.set(xlabel="optimizer step", ylabel=loss)
    axes.set_title(title(train, held_out), fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    if about:
        figure.supxlabel(textwrap.fill(about, 110), fontsize=7, color="0.4", parse_math=False)
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=110, format=path.suffix.removeprefix(".") or "png")
    finally:
        plt.close(figure)
    write_whole(path, picture.getvalue())


# ---- banner
#
# What a run says at its start and end: device, mesh, differences, sizes, where things are.
#
# Configurations are those of pretraining or fine-tuning, training.config.JobConfig with data and a
# model whose work is known.


MOST_CLASSES = 20  # (chosen) classes whose figures the end of a run lists
SHARES = {"precision": "precision", "recall": "recall", "ap": "average precision"}


def save_plot(figure: Any, file: Path, console: Console) -> None:
    """Writes a figure of matplotlib as PNG, and closes it. A disk that fails is told, no error."""
    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    plt.close(figure)
    try:
        write_whole(file, picture.getvalue())
    except OSError as error:
        console.say(f"cannot write {file}: {error.strerror}")


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
        load = cfg.workload(1)
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
    usual = DataConfig().tokenizer
    tokenizer = getattr(getattr(cfg, "data", None), "tokenizer", usual)
    if tokenizer != usual and cfg.init_from is None and hasattr(cfg.model, "vocab"):
        console.say(f"  model.vocab: {cfg.model.vocab:,} ids for data.tokenizer={tokenizer}")
    for sentence in optim.shortened(cfg.optim, cfg.train.steps):
        console.say(f"note: {sentence}")


def show_data(console: Console, cfg: Any, corpora: list[Corpus], tokenizer: Tokenizer) -> None:
    """Prints the corpora, their tokens, and how many documents occur more than once."""
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
    flops = train_flops_per_token(cfg.workload(1), "megatron")
    held = tree.nbytes_per_device(state) / 2**30
    parts, some = train_step.parts, ""
    if parts.trains is not None:
        some = f" ({quantity(tree.count(parts.trained(state.params)))} of them trained)"
    console.say(
        f"{quantity(tree.count(state.params))} parameters{some}, {quantity(flops)} FLOPs a token, "
        f"{held:.3f} GiB of state a device"
    )
    model = cfg.model
    kv_heads = model.kv_heads * train_step.layout.copies("kv_heads")
    packed = model.head_width, model.heads // kv_heads, cfg.train.seq_len
    kernel, why = choose_attention(
        train_step.layout,
        cfg.train.attention,
        cfg.train.dtype,
        cfg.context,
        packed,
        getattr(model, "sinks", False),
    )
    console.say(f"attention: {kernel} ({why})")
    if line := precision.explain(cfg, train_step.parts):
        console.say(f"precision: {line}")
    if (share := train_step.share) is not None:
        each = share.numbers.size // train_step.layout.ways(BATCH_AXES)
        of_step = f"{each} of the {share.total} rows of a step"
        console.say(f"shares: {cfg.shares}; a data-parallel rank of this process takes {of_step}")
    if mesh.shape["tensor"] > 1 and model.feed_forward.hidden:
        tokens = math.prod(train_step.abstract_batch["tokens"].shape[-2:])
        mlp = model.feed_forward
        plain = cfg.train.precision == "none" and cfg.precisions is None
        overlap = cfg.overlap if plain else "xla"
        why = explain_overlap(train_step.layout, overlap, tokens, mlp, cfg.train.dtype)
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
    """Prints the codecs of data parallelism, the bytes of a step, and the leaves that are not
    quantized."""
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

    name: of the preset, file or recipe that the configuration starts from. preset: that
    configuration; the flags that differ from it are stated. None: flags are not stated.
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
    scores: Mapping[str, float] | None = None,
) -> None:
    """The last figures and where to look. labels, scores: as of `write_report`."""
    if sample is not None:
        console.say(f"--- sample\n{sample}\n---")
    if figures:
        bits = figures.get("eval_bits_per_byte")
        at = f" at step {figures.get('eval_step')}"
        tail = f", held out {bits:.3f} bits per byte{at}" if bits is not None else ""
        if (accuracy := figures.get("eval_accuracy")) is not None:
            tail = f", held out {accuracy:.1%} right{at}"
        loss = figures["last_10_loss"]
        nats = "" if scores else " nats"
        shown = f"{loss:.4f}{nats}" if loss is not None else "not finite"
        tail += "".join(f", {name} {value:.3f}" for name, value in (scores or {}).items())
        console.say(f"done: {figures['steps']} steps, last 10 losses {shown}{tail}")
        rows = figures.get("labels", ())
        for row in rows[:MOST_CLASSES]:
            shares = [
                f"{SHARES[kind]} {'-' if row[kind] is None else f'{row[kind]:.1%}'}"
                for kind in SHARES
                if kind in row
            ]
            count = row["examples"]
            console.say(f"  {row['class']}: {count} examples held out, {', '.join(shares)}")
        if len(labels) > min(len(rows), MOST_CLASSES):
            console.say(f"  {len(labels)} classes, see summary.md")
    there = [n for n in ("summary.md", "curve.png", "metrics.jsonl") if (run_dir.path / n).exists()]
    if there:
        console.say(f"see {run_dir.path}/{', '.join(there)}")
