"""Markdown tables of what experiments/tilewise.py writes, for the documents."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from experiments.reports.pruning import PAPER, WHAT
from experiments.reports.pruning_study import METHODS

COUNTED = "work counted, times estimated for an H200, losses of models trained here"
Columns = Mapping[str, Callable[[dict], str]]  # heading -> what a row's cell says


def quality(path: Path) -> str:
    """Held-out loss above the dense model's, by pattern and sparsity."""
    found = json.loads(path.read_text())
    rows = [r for r in found["rows"] if r["part"] == "quality" and r["method"] != "dense"]
    at = {(r["task"], r["method"], r["goal"]): r for r in rows}
    heads = [(t, g) for t in WHAT for g in sorted({r["goal"] for r in rows if r["task"] == t})]
    lines = [
        "| pattern | " + " | ".join(f"{t}, {100 * g:.0f} %" for t, g in heads) + " |",
        "|" + "---|" * (len(heads) + 1),
    ]
    for method in (m for m in METHODS if any(r["method"] == m for r in rows)):
        cells = [_lost(at.get((task, method, goal))) for task, goal in heads]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    dense = [r for r in found["rows"] if r["part"] == "quality" and r["method"] == "dense"]
    lasts = {r["task"]: r for r in dense}
    levels = "; ".join(
        f"{WHAT[t]}: {r['loss']:.2f} nats, {100 * r['accuracy']:.0f} % right (seeds: {r['n']})"
        for t, r in lasts.items()
    )
    return "\n".join([*lines, "", f"Dense, tuned as long: {levels}.", "", _source(found)])


def _lost(row: dict | None) -> str:
    if row is None:
        return ""
    bar = "" if row["lost_std"] is None else f" ± {row['lost_std']:.3f}"
    return f"{row['lost']:+.3f}{bar} ({row['n']})"


def claims(path: Path) -> str:
    """Tile-wise with chunk 1 over blocks at 75 %."""
    columns: Columns = {
        "model": lambda r: WHAT[r["task"]],
        "tiles": lambda r: r["tiles"],
        "blocks": lambda r: r["blocks"],
        "tiles lose": lambda r: f"{r['tw']:+.3f}",
        "blocks lose": lambda r: f"{r['bw']:+.3f}",
        "ratio": lambda r: "-" if r["ratio"] is None else f"{r['ratio']:.2f}",
        "at most half": lambda r: "yes" if r["met"] else "no",
    }
    return _table(path, columns, part="claim", what="lost")


def prices(path: Path) -> str:
    """What a layer of BERT gains beside what our models lose, by chunk."""
    tasks = {
        f"{t} loses": (lambda r, t=t: f"{r[f'{t}_lost']:+.3f}" if f"{t}_lost" in r else "")
        for t in WHAT
    }
    columns: Columns = {
        "sparsity": lambda r: f"{100 * r['goal']:.0f} %",
        "tile x chunk": lambda r: f"{r['tile']} x {r['chunk']}",
        "FLOPs, dense over ours": lambda r: f"{r['flops_saved']:.2f}",
        "bytes, dense over ours": lambda r: f"{r['bytes_saved']:.2f}",
        "times as fast (estimate)": lambda r: f"{r['speedup_estimate']:.2f}",
        "at most, by floors": lambda r: f"{r['speedup_floor']:.2f}",
        "kernel": lambda r: "Hopper" if r["kernel"] else "plain JAX only",
        **tasks,
    }
    return _table(path, columns, COUNTED, part="price")


def speeds(path: Path) -> str:
    """The paper's products at 75 %, its V100 beside our counts; measured: empty without a GPU."""

    def kilo(member: str) -> Callable[[dict], str]:
        return lambda r: f"{r[member + '_dense']:.1f} -> {r[member]:.1f}"

    columns: Columns = {
        "product": lambda r: r["shape"],
        "tile x chunk": lambda r: f"{r['tile']} x {r['chunk']}",
        "multiplied": lambda r: f"{100 * r['multiplied']:.1f} %",
        "GFLOP": kilo("gflop"),
        "MB": kilo("mb"),
        "floor, us": kilo("floor_us"),
        "us (estimate)": kilo("estimate_us"),
        "times (estimate)": lambda r: f"{r['speedup_estimate']:.2f}",
        "times, paper (V100)": lambda r: f"{r['paper']:.2f}",
        "us, measured": lambda r: "",
    }
    found = _table(path, columns, COUNTED, part="speed", goal=0.75)
    return f"{found}\n\nThe paper's average at 75 %: {PAPER} times."


def _table(path: Path, columns: Columns, layer: str = "", **wanted: object) -> str:
    found = json.loads(path.read_text())
    rows: Iterable[dict] = (r for r in found["rows"] if wanted.items() <= r.items())
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows]
    return "\n".join([*lines, "", _source(found, layer)])


def _source(found: dict, layer: str = "") -> str:
    rule = {"paper": "units ranked by L2 / n", "rms": "units ranked by L2 / sqrt(n)"}
    parts = layer or found["layer"], rule[found["unit_score"]], found["device"]
    return f"*{', '.join(parts)}, {found['date']}, {found['commit']}*"
