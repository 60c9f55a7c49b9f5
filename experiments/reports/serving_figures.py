"""Figure and tables of experiments/serving.py: throughput against latency, and what modes cost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.reports.figure import panels, save
from megajax.monitor.results import table

Row = dict[str, Any]
COLOURS = {
    "continuous": "#0072B2", "continuous, no prefix reuse": "#56B4E9", "static": "#D55E00",
    "static, padded": "#E69F00",
}  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Tokens a second of all modes, and the latency of a request at each offered load.

    rows: of the parts 'offline', 'online' and 'claim'. Writes SVG and PNG.
    """
    figure, (left, right) = panels(2, size=(10.5, 3.8))
    offline = [r for r in rows if r["part"] == "offline"]
    for place, row in enumerate(offline):
        error = [[row["tokens_per_s"] - row["slowest"]], [row["fastest"] - row["tokens_per_s"]]]
        left.barh(
            place, row["tokens_per_s"], xerr=error, color=COLOURS[row["mode"]], height=0.6,
            capsize=3,
        )  # fmt: skip
    left.set_yticks(range(len(offline)), [r["mode"] for r in offline], fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="tokens a second, all requests at once")
    n = max((r["n"] for r in offline), default=0)
    left.set_title(f"median of {n} runs, bars: slowest and fastest", fontsize=9, loc="left")
    for mode in ("static, padded", "static", "continuous"):
        curve = sorted((r for r in rows if r["part"] == "online" and r["mode"] == mode), key=_load)
        if curve:
            right.plot(
                [r["tokens_per_s"] for r in curve], [r["request_s_p50"] for r in curve], "o-",
                color=COLOURS[mode], label=f"{mode}, median", markersize=4,
            )  # fmt: skip
            right.plot(
                [r["tokens_per_s"] for r in curve], [r["request_s_p90"] for r in curve], "v:",
                color=COLOURS[mode], label=f"{mode}, p90", markersize=4,
            )  # fmt: skip
    right.set(xlabel="tokens a second, Poisson arrivals", ylabel="seconds from arrival to end")
    right.set_yscale("log")
    right.set_title("each point: another rate of arrival", fontsize=9, loc="left")
    right.legend(fontsize=7, frameon=False)
    claim = next((r for r in rows if r["part"] == "claim"), None)
    title = (
        f"Continuous batching: {claim['value']:.2f} times padded static batching" if claim else ""
    )
    save(figure, path, title)


def _load(row: Row) -> float:
    return row["load"]


def offline(path: Path) -> str:
    """All requests at once, by mode."""
    columns = {
        "mode": "mode", "tokens/s": "tokens_per_s", "slowest run": "slowest",
        "fastest run": "fastest", "runs": "n", "steps": "steps",
        "tokens/s over those of padded static": "ratio", "the same by CPU time": "cpu_ratio",
    }  # fmt: skip
    found = json.loads(path.read_text())
    text = (
        f"{found['requests']} requests of {found['prompt_tokens']:.0f} prompt tokens and "
        f"{found['answer_tokens']:.0f} answer tokens on average, up to {found['max_batch']} at a "
        f"time; {found['cores']} cores."
    )
    return f"{text}\n\n{table(path, columns, part='offline')}"


def online(path: Path) -> str:
    """Poisson arrivals, by rate."""
    columns = {
        "mode": "mode", "offered load": "load", "tokens/s": "tokens_per_s",
        "first token, median s": "first_token_s_p50", "first token, p90 s": "first_token_s_p90",
        "each token, median s": "per_token_s_p50", "request, median s": "request_s_p50",
        "request, p90 s": "request_s_p90",
    }  # fmt: skip
    return table(path, columns, part="online")


def numerics(path: Path) -> str:
    """Fast beside exact numerics."""
    columns = {
        "numerics": "numerics", "sequences at a time": "batch", "tokens/s": "tokens_per_s",
        "slowest run": "slowest", "fastest run": "fastest", "runs": "n",
        "tokens/s over those of fast": "of_fast", "the same by CPU time": "cpu_of_fast",
    }  # fmt: skip
    return table(path, columns, part="numerics")
