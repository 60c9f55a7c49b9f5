"""Markdown tables of what experiments/sdp4bit.py writes, for the documents."""

import json
from collections.abc import Iterable
from pathlib import Path

from experiments.reports import sdp4bit as estimate
from experiments.reports.sdp4bit_runs import PAPER, WHAT, Row

LEVELS = {
    "weights": "weights, all-gather",
    "inside": "gradients inside a node, all-to-all",
    "between": "gradients between nodes, all-to-all",
    "crossing": "all that leaves a node",
}


def losses(path: Path) -> str:
    """Held-out losses by variant, ours and the paper's above the float32 exchange."""
    found = json.loads(path.read_text())
    heads = (
        "variant", "what travels in few bits", "held-out loss, nats a byte", "above float32",
        "above float32, masters", "seeds", *(f"paper, {model}" for model in PAPER),
    )  # fmt: skip
    rows = []
    for row in _part(found, "gap"):
        paper = [row["paper_percent"].get(model) for model in PAPER]
        rows.append(
            (
                row["variant"], WHAT[row["variant"]], _number(row["loss"], row["loss_error"], 4),
                _percent(row["gap_percent"], row["gap_error"]),
                _percent(row["masters_gap_percent"], row["masters_gap_error"]), str(row["n"]),
                *("-" if p is None else f"{p:+.2f} %" for p in paper),
            )
        )  # fmt: skip
    text = (
        f"{found['layers']} blocks of width {found['width']}, {found['steps']} steps, "
        f"{found['tokens']:,} tokens, {found['nodes']} nodes of {found['ranks']} emulated devices. "
        "± is one standard error over the seeds."
    )
    return "\n".join([_table(heads, rows), "", text, "", _source(found)])


def claims(path: Path) -> str:
    """The paper's claims on losses, met or not."""
    found = json.loads(path.read_text())
    sure = {True: "yes", False: "no", None: "one seed"}
    rows = [
        (
            row["what"], _percent(row["value"], row["error"]), "yes" if row["met"] else "no",
            sure[row["sure"]], str(row["n"]),
        )
        for row in _part(found, "claim")
    ]  # fmt: skip
    heads = ("claim", "difference", "met", "beyond two standard errors", "seeds")
    return "\n".join([_table(heads, rows), "", _source(found)])


def sent(path: Path) -> str:
    """Bits an element and bytes relative to bfloat16, from the compiled program."""
    found = json.loads(path.read_text())
    rows = list(_part(found, "bytes"))
    if not rows:
        return "*not counted yet: `experiments/sdp4bit.py --bytes`*"
    names = list(dict.fromkeys(r["codec"] for r in rows))
    at = {(r["codec"], r["level"]): r for r in rows}
    lines = [
        (text, *(f"{at[n, level]['bits']:.4f} ({at[n, level]['of_bf16']:.3f})" for n in names))
        for level, text in LEVELS.items()
    ]
    one = rows[0]
    source = (
        f"*compiled for H100, {one['nodes']} nodes of {one['ranks']}, a buffer of "
        f"{one['elements']:,} elements, {found['date']}, {found['commit']}*"
    )
    return "\n".join([_table(("bits an element (of bfloat16)", *names), lines), "", source])


def estimates(path: Path) -> str:
    """The paper's ten pairs of model and cluster: its speed-up beside estimates."""
    found = json.loads(path.read_text())
    text = estimate.table(list(_part(found, "estimate")))
    return f"{text}\n\n*estimates of the cost model, {found['date']}, {found['commit']}*"


def _part(found: dict, part: str) -> Iterable[Row]:
    return (row for row in found["rows"] if row["part"] == part)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _number(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return "not finite"
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _percent(value: float | None, error: float | None) -> str:
    if value is None:
        return "not finite"
    bar = "" if error is None else f" ± {error:.2f}"
    return f"{value:+.2f}{bar} %"


def _source(found: dict) -> str:
    return f"*{found['layer']}, emulated {found['device']}, {found['date']}, {found['commit']}*"
