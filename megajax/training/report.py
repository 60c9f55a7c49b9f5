"""What a run leaves to look at: curve.png, summary.md and .json, from metrics.jsonl."""

from pathlib import Path
from typing import Any

from megajax.monitor import results
from megajax.monitor.sinks import rows_by_step

OURS, HELD_OUT = "#1f6feb", "#d1242f"  # the same colours in all figures


def write_report(folder: Path, facts: dict[str, Any], sample: str | None) -> dict[str, Any]:
    """Draws the curve and writes the summary. Returns the figures that the summary states.

    facts: name -> value lines for the head of the summary.
    """
    train = rows_by_step(folder / "metrics.jsonl", "loss")
    held_out = rows_by_step(folder / "metrics.jsonl", "eval_loss")
    if not train:
        return {}
    draw_curve(folder / "curve.png", train, held_out)
    steps = sorted(train)
    last = [train[s] for s in steps[-10:]]
    times = sorted(train[s]["step_time_s"] for s in steps[1:]) or [train[steps[0]]["step_time_s"]]
    figures: dict[str, Any] = {
        "steps": steps[-1],
        "last_10_loss": _mean([r["loss"] for r in last]),
        "median_step_time_s": times[len(times) // 2],
        "tokens_per_s": train[steps[-1]]["tokens"] / times[len(times) // 2],
    }
    if held_out:
        newest = held_out[max(held_out)]
        figures["eval_loss"] = newest["eval_loss"]
        figures["eval_bits_per_byte"] = newest.get("eval_bits_per_byte")
    lines = ["# Run", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_show(value)} |" for name, value in (facts | figures).items()]
    lines += ["", "![loss](curve.png)", ""]
    if sample is not None:
        lines += ["## Sample", "", "```", sample, "```", ""]
    (folder / "summary.md").write_text("\n".join(lines))
    results.write(folder / "summary.json", facts, [figures])
    return figures


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_curve(path: Path, train: dict[int, dict], held_out: dict[int, dict]) -> None:
    """Draws training and held-out loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    steps = [s for s in sorted(train) if train[s]["loss"] is not None]
    axes.plot(steps, [train[s]["loss"] for s in steps], color=OURS, lw=1.4, label="training")
    title = f"training loss {train[steps[-1]]['loss']:.2f} nats after {steps[-1]} steps"
    if held_out:
        at = sorted(held_out)
        losses = [held_out[s]["eval_loss"] for s in at]
        axes.plot(at, losses, "o-", color=HELD_OUT, lw=1.4, ms=4, label="held out")
        bits = held_out[at[-1]].get("eval_bits_per_byte")
        if bits is not None:
            title += f", held out {bits:.2f} bits per byte"
    axes.set(xlabel="optimizer step", ylabel="cross-entropy (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
