"""Markdown tables of what experiments/cdmpp.py evaluate writes, for the documents."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reports.cdmpp import EACH, FAMILY, PAPER
from experiments.reports.cdmpp_calls import GROUP

Row = Mapping[str, Any]
# Mean errors in percent that NeuSight's repository publishes (scripts/asplos/summary) for devices
# outside of its training: H100, L4 and A100-80 together.
NEUSIGHT = {"bmm": 13.8, "linear": 13.9, "elem": 19.3, "softmax": 13.9, "ln": 56.7}
KERNELS = {
    "linear": "linear",
    "bmm": "batched products",
    "elem": "element-wise",
    "softmax": "softmax",
    "ln": "layer norm",
}


def programs(path: Path) -> str:
    """Errors of own programs' instructions by split and method; bands, noise, the paper's."""
    found = json.loads(path.read_text())
    rows = [row for row in found["rows"] if row["group"] == "all"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    splits = list(dict.fromkeys((row["split"], row["held_out"]) for row in rows))
    whole = {name for name, held in splits if held == EACH}
    heads = ("held out", "rows", *methods, "of the sum", "in the band", "labels differ by", "paper")
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for split, held in splits:
        if split in whole and held != EACH and split == "families":
            continue
        here = {r["method"]: r for r in rows if (r["split"], r["held_out"]) == (split, held)}
        ours = here["ours"]
        cells = [f"{here[m]['mean']:.1f} / {here[m]['median']:.1f}" for m in methods]
        paper = PAPER.get(split.split(",")[0])
        lines.append(
            _line(
                (
                    f"{split}: {held}", f"{ours['rows']:,}", *_best(cells, here, methods),
                    f"{ours['weighted']:.1f}", f"{100 * ours['in_band']:.0f}",
                    f"{ours['noise_mean']:.1f} / {ours['noise_median']:.1f}",
                    "-" if paper is None else f"{paper}",
                )
            )
        )  # fmt: skip
    text = (
        "Relative errors in %: mean / median; bold: the least mean. The paper's figures are of "
        "other programs and devices. `of the sum`: of ours, weighted by time. `in the band`: "
        "measured times in our 90 % band, in %. `labels differ by`: the two halves of the "
        "measurements. "
        f"Ours: mean of seeds, {rows[0]['seeds']}."
    )
    return "\n".join([*lines, "", text, "", _source(found)])


def kinds(path: Path) -> str:
    """Our errors by kind of instruction, beside the labels' noise."""
    found = json.loads(path.read_text())
    wanted = [
        row
        for row in found["rows"]
        if row["method"] == "ours"
        and row["group"] not in ("all", GROUP)
        and not row["group"].startswith(FAMILY)
        and (row["held_out"] == EACH or row["split"] == "random")
    ]
    splits = list(dict.fromkeys(row["split"] for row in wanted))
    at = {(row["split"], row["group"]): row for row in wanted}
    names = sorted({row["group"] for row in wanted})
    heads = ("kind", *(f"{split}" for split in splits), "labels differ by")
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for name in names:
        here = [at.get((split, name)) for split in splits]
        cells = [f"{r['mean']:.1f} / {r['median']:.1f} ({r['rows']})" if r else "" for r in here]
        noise = next(r for r in here if r)
        lines.append(_line((name, *cells, f"{noise['noise_mean']:.1f}")))
    text = "Relative errors in %: mean / median (rows)."
    return "\n".join([*lines, "", text, "", _source(found)])


def families(path: Path) -> str:
    """Errors on each family of programs, held out with the others of its group."""
    found = json.loads(path.read_text())
    rows = [row for row in found["rows"] if row["group"].startswith(FAMILY)]
    at = {(row["method"], row["group"]): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    heads = ("family", "rows", *methods, "labels differ by")
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for group in sorted({row["group"] for row in rows}):
        here = {method: at[method, group] for method in methods}
        cells = [f"{here[m]['mean']:.1f} / {here[m]['median']:.1f}" for m in methods]
        first, best = here[methods[0]], _best(cells, here, methods)
        noise = f"{first['noise_mean']:.1f}"
        lines.append(_line((group.removeprefix(FAMILY), f"{first['rows']:,}", *best, noise)))
    text = "Relative errors in %: mean / median; bold: the least mean."
    return "\n".join([*lines, "", text, "", _source(found)])


def calls(path: Path) -> str:
    """Errors on whole calls of held-out families, by what is summed."""
    found = json.loads(path.read_text())
    rows = [row for row in found["rows"] if row["group"] == GROUP]
    heads = ("a call is predicted from", "calls", "mean %", "median %", "90th percentile %")
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for row in sorted(rows, key=lambda row: row["mean"]):
        errors = (f"{row[name]:.1f}" for name in ("mean", "median", "p90"))
        lines.append(_line((row["method"], f"{row['rows']:,}", *errors)))
    return "\n".join([*lines, "", _source(found)])


def kernels(path: Path) -> str:
    """Errors on NeuSight's kernels of GPUs that no fit has seen, without and with rows of them."""
    found = json.loads(path.read_text())
    few = next(row["split"] for row in found["rows"] if "," in row["split"])
    rows = {
        (row["group"], row["held_out"], row["method"], row["split"]): row for row in found["rows"]
    }
    methods = list(dict.fromkeys(row["method"] for row in found["rows"]))
    devices = list(dict.fromkeys(row["held_out"] for row in found["rows"]))
    heads = ("kernels", "rows", *methods, "% of times in our band", "NeuSight")
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for group, name in KERNELS.items():
        for device in (d for d in devices if (group, d, "ours", few) in rows):
            here = {m: rows[group, device, m, "devices"] for m in methods}
            seen = {m: rows[group, device, m, few] for m in methods}
            cells = [f"{here[m]['mean']:.1f} / {seen[m]['mean']:.1f}" for m in methods]
            bands = (100 * r["ours"]["in_band"] for r in (here, seen))
            where = "both" if device == EACH else device.removeprefix("NVIDIA ")
            lines.append(
                _line(
                    (
                        f"{name}, {where}", f"{here['ours']['rows']:,}", *cells,
                        " / ".join(f"{band:.0f}" for band in bands),
                        f"{NEUSIGHT[group]}" if device == EACH else "",
                    )
                )
            )  # fmt: skip
    ours = found["rows"][0]
    text = (
        "Mean relative errors in %. Left of the slash the predictor has no row of the GPU, right "
        f"of it {found['shots']} rows of all its kernels. Mean over {ours['seeds']} seeds. "
        "NeuSight's errors, also without rows of the GPU, are means over an H100 too, whose rows "
        "we lack."
    )
    return "\n".join([*lines, "", text, "", _source(found)])


def h200(path: Path) -> str:
    """What one H200 measured, beside predictions: before and after its rows were learnt."""
    found = json.loads(path.read_text())
    heads = ["what is predicted", "rows", "mean error", "median error", "times in the 90 % band"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in found["rows"]:
        band = "" if row["coverage"] is None else f"{100 * row['coverage']:.0f} %"
        errors = (f"{100 * row[k]:,.1f} %" for k in ("mean", "median"))
        lines.append(_line([row["what"], str(row["rows"]), *errors, band]))
    return "\n".join([*lines, "", _source(found)])


def _best(cells: Sequence[str], here: Mapping[str, Row], methods: Sequence[str]) -> list[str]:
    least = min(here[m]["mean"] for m in methods)
    return [
        f"**{cell}**" if here[m]["mean"] == least else cell
        for cell, m in zip(cells, methods, strict=True)
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _source(found: Mapping[str, Any]) -> str:
    source = ", ".join(found[k] for k in ("layer", "device", "date", "commit") if found.get(k))
    return f"*{source}*"
