"""The account of a storm: each fault and what became of it, what does not hold, table and picture.

The rows are those of the result file; times are seconds since the storm began. A run has one
lineage when every step that was ever done, however often, had the loss of the undisturbed run.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reports.reporting import panels, save
from experiments.storm.plan import KINDS
from experiments.storm.storm import Case
from megajax.monitor import results

Row = Mapping[str, Any]
POINTS = 800  # (chosen) of the line in the picture


def rows(cases: Sequence[Case], began: float) -> list[dict[str, Any]]:
    """Returns a row for each fault."""
    return [
        {
            "fault": case.strike.kind, "at_s": _since(case.at, began), "step": case.step,
            "struck": _named(case), "wanted": list(KINDS[case.strike.kind].rules),
            "rule": case.rule, "said": case.said, "right": case.right,
            "found_s": _since(case.found, case.at), "training_s": _since(case.back, case.at),
            "resumed": case.resumed, "false_alarms": case.alarms, "more_faults": case.again,
        }
        for case in cases
    ]  # fmt: skip


def _since(moment: float | None, began: float) -> float | None:
    return None if moment is None else round(max(moment - began, 0.0), 2)


def _named(case: Case) -> str:
    hit = case.hit
    words = [f"rank {r}" for r in hit.ranks] + list(hit.hosts) + ([hit.note] if hit.note else [])
    return ", ".join(words)


def lineage(ours: Sequence[Row], theirs: Sequence[Row], steps: int, starts: int) -> list[str]:
    """Returns what is wrong with the steps of a disturbed run, beside an undisturbed one.

    A loss that is not finite (None in a row) is that of a fault: the step must come again.
    ours, theirs: rows of metrics.jsonl. starts: of the job; only then may a step come again.
    """
    want = {r["step"]: r["loss"] for r in theirs}
    last = {r["step"]: r["loss"] for r in ours}
    seen = [r for r in ours if r["loss"] is not None or last[r["step"]] is None]
    other = sorted({r["step"] for r in seen if r["loss"] != want.get(r["step"])})
    backwards = sum(b["step"] <= a["step"] for a, b in zip(ours, ours[1:], strict=False))
    found = []
    if other:
        found.append(
            f"{len(other)} steps have another loss, the first is {other[0]}: {last[other[0]]}, not "
            f"{want.get(other[0])}"
        )
    if backwards >= starts:
        found.append(f"steps began again {backwards} times in {starts} starts")
    if max((r["step"] for r in ours), default=0) != steps:
        found.append(f"the last step is not {steps}")
    return found


def summary(found: Sequence[Row], between: Sequence[Row]) -> dict[str, Any]:
    """Returns the figures of all rows. between: faults that were reported when nobody made one."""
    wanted = [r for r in found if r["wanted"]]
    times = sorted(r["found_s"] for r in wanted if r["found_s"] is not None)
    back = sorted(r["training_s"] for r in wanted if r["training_s"] is not None)
    return {
        "faults": len(found),
        "to_be_found": len(wanted),
        "not_found": sum(r["rule"] is None for r in wanted),
        "wrongly_named": sum(r["right"] is False for r in wanted),
        "false_alarms": sum(r["false_alarms"] for r in found) + len(between),
        "found_s": _quantiles(times),
        "training_s": _quantiles(back),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    last = len(values) - 1
    at = {"median": last // 2, "p90": math.ceil(0.9 * last), "most": last}
    return {name: values[i] for name, i in at.items()}


def line(found: Sequence[Row], began: float) -> list[list[float]]:
    """Returns (seconds, step) of some of the rows, for the picture."""
    every = max(len(found) // POINTS, 1)
    kept = [
        r for i, r in enumerate(found)
        if i % every == 0 or i == len(found) - 1
        or r["step"] <= found[i - 1]["step"] or found[i + 1]["step"] <= r["step"]
    ]  # fmt: skip
    return [[round(r["time"] - began, 2), r["step"]] for r in kept]


def draw(path: Path) -> None:
    """Draws the result file: steps over time, and below when each kind struck; SVG and PNG."""
    from matplotlib.patches import Patch

    found = json.loads(path.read_text())
    kinds = [k for k in KINDS if any(r["fault"] == k for r in found["rows"])][::-1]
    heights = 3, max(0.2 * len(kinds), 0.5)
    figure, (top, below) = panels(
        rows=2, size=(11, 0.6 + sum(heights)), heights=heights, sharex=True
    )
    minutes = [at / 60 for at, _ in found["line"]]
    top.plot(minutes, [step for _, step in found["line"]], color="#0072B2", linewidth=1.2)
    top.set_ylabel("optimizer step")
    for r in found["rows"]:
        at, y = r["at_s"] / 60, kinds.index(r["fault"])
        seen, back = r["found_s"] or 0.0, r["training_s"] or 0.0
        if r["wanted"]:
            below.barh(y, seen / 60, 0.7, at, color="#D55E00")
            below.barh(y, (back - seen) / 60, 0.7, at + seen / 60, color="#E69F00")
            top.axvline(at, color="#D55E00", linewidth=0.5, alpha=0.5)
        else:
            below.barh(y, back / 60, 0.7, at, color="#009E73")
            top.axvline(at, color="#009E73", linewidth=0.5, alpha=0.5)
        if r["false_alarms"] or (r["wanted"] and not r["right"]):
            below.plot(at, y, "x", color="black", markersize=8)
    below.set_yticks(range(len(kinds)), kinds, fontsize=8)
    below.set_xlabel("time since the storm began (minutes)")
    legend = [("#D55E00", "until it was found"), ("#E69F00", "until training went on"),
              ("#009E73", "training goes on meanwhile")]  # fmt: skip
    below.legend(handles=[Patch(color=c, label=text) for c, text in legend], frameon=False,
                 fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    top.set_title(found["title"], loc="left", fontsize=10)
    save(figure, path)


def table(path: Path) -> str:
    """Returns a Markdown table of the result file: a row a kind."""
    found = json.loads(path.read_text())
    lines = [
        found["title"] + ".", "",
        "| fault | times | rule | found after (s), median, most | training after (s), median, most "
        "| false alarms |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, kind in KINDS.items():
        own = [r for r in found["rows"] if r["fault"] == name]
        if not own:
            continue
        rules = sorted({r["rule"] or "not found" for r in own}) if kind.rules else ["no restart"]
        seen, back = (
            _quantiles(sorted(r[key] for r in own if r[key] is not None))
            for key in ("found_s", "training_s")
        )
        cells = [
            kind.what, len(own), ", ".join(rules), _cell(seen),
            _cell(back) if kind.rules else "-", sum(r["false_alarms"] for r in own),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    source = ", ".join(str(found[k]) for k in ("layer", "device", "date", "commit") if found[k])
    return "\n".join([*lines, "", f"*{source}*"])


def drills(path: Path) -> str:
    """Returns which faults a run by steps met (experiments/chaos.py without a storm), and what was
    said of them, as Markdown."""
    found = json.loads(path.read_text())
    spent = found["effective"]
    same = "the same parameters bit for bit" if not found["different"] else "OTHER parameters"
    text = (
        f"{spent['faults']} faults, {same} as without; {100 * spent['ettr']:.0f} % of "
        f"{spent['total_s']:.0f} s trained, {spent['redone_s']:.0f} s of it again:"
    )
    columns = {"fault": "fault", "rule": "rule", "what was said": "named"}
    return f"{text}\n\n{results.table(path, columns)}"


def _cell(values: Mapping[str, float]) -> str:
    return f"{values['median']:.1f}, {values['most']:.1f}" if values else "-"
