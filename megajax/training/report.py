"""What a run leaves to look at: curve.png, summary.md and .json, from metrics.jsonl.

A run whose checkpoints are safe has done its work: what of this cannot be written (a full disk, a
folder that became read-only) is told in a line, and changes no exit code.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.files import json_text, write_whole
from megajax.monitor.sinks import rows_by_step

LAST = 10  # steps whose mean loss stands for the end of a run: one batch's is noise
OURS, HELD_OUT = "#1f6feb", "#d1242f"  # the same colours in all figures


def write_report(
    folder: Path,
    facts: dict[str, Any],
    sample: str | None,
    say: Callable[[str], None] = print,
    labels: Sequence[str] = (),
) -> dict[str, Any]:
    """Draws the curve and writes the summary. Returns the figures that the summary states.

    facts: name -> value lines for the head of the summary; `caption` has those under the curve.
    say: hears what could not be written, and why; nothing is raised for it.
    labels: the names of a classifier's classes.
    """

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # of drawing too: the run is over, and it went well
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            said = f"cannot write {folder / name}: {' '.join(str(why).split())[:200]}"
            say(str(error) if isinstance(error, UserError) else said)  # it names the file

    rows = attempt("curve.png, summary.md, summary.json", lambda: _rows(folder / "metrics.jsonl"))
    train, held_out = rows or ({}, {})
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
        if scores := label_scores(newest, labels):
            figures["labels"] = scores
    lines = ["# Run", "", "| | |", "|---|---|"]
    plain = {name: value for name, value in (facts | figures).items() if name != "labels"}
    lines += [f"| {name} | {_show(value)} |" for name, value in plain.items()]
    if "labels" in figures:
        lines += ["", "## Classes", "", "| number | class | examples | precision | recall |"]
        lines += ["|---|---|---|---|---|"]
        lines += ["| " + " | ".join(map(_show, row.values())) + " |" for row in figures["labels"]]
    lines += ["", "![loss](curve.png)", ""]
    if sample is not None:
        lines += ["## Sample", "", "```", sample, "```", ""]
    text = "\n".join(lines).encode(errors="backslashreplace")
    whole = json_text({**facts, "rows": [figures]})
    attempt("summary.md", lambda: write_whole(folder / "summary.md", text))
    attempt("summary.json", lambda: write_whole(folder / "summary.json", whole))
    return figures


def unit_of(train: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what the steps of a run count: 'tokens', 'images', ..."""
    rates = (n for n in train[min(train)] if n.endswith("_per_s"))
    return next(rates, "tokens_per_s").removesuffix("_per_s")


def _rows(metrics: Path) -> tuple[dict[int, dict], dict[int, dict]]:
    return rows_by_step(metrics, "loss"), rows_by_step(metrics, "eval_loss")


def label_scores(row: Mapping[str, Any], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the figures of each class in an evaluation's row; [] where it has none."""
    return [
        {"number": i, "class": name}
        | {kind: row.get(f"eval_{kind}/{name}") for kind in ("examples", "precision", "recall")}
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
    nats = " nats" if unit_of(train) == "tokens" else ""
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
    loss = f"cross-entropy (nats per {unit})" if unit_of(train) == "tokens" else "loss"
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
