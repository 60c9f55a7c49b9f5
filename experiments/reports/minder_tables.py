"""Markdown tables of what experiments/minder.py writes, for the documents."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.reports import minder_time
from experiments.reports.minder_figures import LEVELS, OURS

Row = dict[str, Any]


def overall(path: Path) -> str:
    """Every detector on all cases, and how much better ours is on the same ones."""
    found = _read(path)
    rows = []
    for row in sorted(_part(found, "overall"), key=lambda r: (r["detector"] != OURS, -r["f1"])):
        name = row["detector"]
        tuned = found["tuned"].get(name, {}).get("f1")
        rows.append(
            (
                name, row["what"],
                *(_interval(row, m) for m in ("precision", "recall", "f1")),
                _interval(row, "f1_more", sign=True) if "f1_more" in row else "",
                f"{row['delay_s'].get('p50', 0):.0f} s" if row["delay_s"] else "-",
                "" if tuned is None else f"{tuned:.3f}",
            )
        )  # fmt: skip
    heads = ("detector", "what", "precision", "recall", "F1", "F1 of ours minus its F1",
             "median time from onset to alert", "F1 on the cases it was tuned on")  # fmt: skip
    paper = found["paper"]
    config = found["config"]
    text = (
        f"{found['cases']} cases of the family `{config['split']}`, seed {config['seed']}, mixes "
        f"{config['mixes'].replace(',', ', ')}; in brackets 95 % intervals of a bootstrap over the "
        f"cases. The paper has {paper['precision']}, {paper['recall']} and {paper['f1']} on 150 "
        "cases of its own."
    )
    return "\n".join([_table(heads, rows), "", text, "", _source(found)])


def sizes(path: Path) -> str:
    """F1 by size of the job."""
    found = _read(path)
    by = {(r["detector"], r["size"]): r for r in _part(found, "size")}
    columns = sorted({size for _, size in by})
    faults = {s: by[OURS, s]["faults"] for s in columns}
    heads = ("F1", *(f"{s:,} machines ({faults[s]} faults)" for s in columns))
    rows = [
        (name, *(_interval(by[name, s], "f1") if name == OURS else f"{by[name, s]['f1']:.3f}"
                 for s in columns))
        for name in dict.fromkeys(name for name, _ in by)
    ]  # fmt: skip
    both = (f"{by[OURS, s]['precision']:.3f}, {by[OURS, s]['recall']:.3f}" for s in columns)
    rows.insert(1, ("ours: precision, recall", *both))
    return "\n".join([_table(heads, rows), "", _source(found)])


def kinds(path: Path) -> str:
    """Recall by kind of fault: ours, and the two best rivals."""
    found = _read(path)
    whole = sorted(_part(found, "overall"), key=lambda r: (r["detector"] != OURS, -r["f1"]))
    names = [r["detector"] for r in whole[:3]]
    by = {(r["detector"], r["kind"]): r for r in _part(found, "kind")}
    rows = []
    for kind in sorted({k for _, k in by}, key=lambda k: (k[0] == "(", k)):
        mine = by[OURS, kind]
        others = (f"{by[name, kind]['recall']:.3f}" for name in names[1:])
        delay = f"{mine['delay_s']['p50']:.0f} s" if mine["delay_s"] else "-"
        before = f"{mine['before_halt']} of {mine['named']}"
        rows.append((kind.replace("_", " "), str(mine["faults"]), _interval(mine, "recall"),
                     *others, delay, before))  # fmt: skip
    heads = (
        "kind of fault, or (its effect)", "faults", "ours, recall",
        *(f"{n}, recall" for n in names[1:]),
        "ours, median time from onset to alert", "named before the job halted",
    )  # fmt: skip
    return "\n".join([_table(heads, rows), "", _source(found)])


def conditions(path: Path) -> str:
    """Our precision, recall and F1 by noise and by mix of kinds."""
    found = _read(path)
    rows = []
    for part, order in (("noise", LEVELS), ("mix", found["config"]["mixes"].split(","))):
        by = {r[part]: r for r in _part(found, part) if r["detector"] == OURS}
        rows += [
            (f"{part}: {value}", str(by[value]["cases"]),
             *(_interval(by[value], m) for m in ("precision", "recall", "f1")))
            for value in order if value in by
        ]  # fmt: skip
    heads = ("condition", "cases", "precision", "recall", "F1")
    return "\n".join([_table(heads, rows), "", _source(found)])


def alarms(path: Path) -> str:
    """False alarms a day of long healthy runs."""
    found = _read(path)
    rows = [
        (row["detector"], f"{row['machines']:,}", f"{24 * row['days']:.1f}",
         str(row["false_alarms"]), f"{row['a_day']:.2f}",
         f"{row['a_day_95'][0]:.2f} to {row['a_day_95'][1]:.2f}")
        for row in _part(found, "alarms")
    ]  # fmt: skip
    heads = ("detector", "machines", "hours", "false alarms", "false alarms a day", "95 % interval")
    return "\n".join([_table(heads, rows), "", _source(found)])


def ablations(path: Path) -> str:
    """Our detector without one of its parts, on the same cases."""
    found = _read(path)
    rows = [
        (row["what"], *(_interval(row, m) for m in ("precision", "recall", "f1")),
         _interval(row, "f1_more", sign=True) if "f1_more" in row else "")
        for row in _part(found, "overall")
    ]  # fmt: skip
    heads = ("variant", "precision", "recall", "F1", "F1 of the whole minus its F1")
    text = f"{found['cases']} cases of the family `{found['config']['split']}`."
    return "\n".join([_table(heads, rows), "", text, "", _source(found)])


def seconds(path: Path) -> str:
    """How long a call takes."""
    found = _read(path)
    return "\n".join([f"{minder_time.text(found)}. The paper: {found['paper_s']} s with the query.",
                      "", _source(found)])  # fmt: skip


def unlike(path: Path) -> str:
    """Recall by kind of fault, and precision, on fleets of other assumptions."""
    found = _read(path)
    config = found["config"]
    by = {(r["background"], r["detector"], r.get("kind")): r for r in found["rows"]}
    names = list(dict.fromkeys(r["background"] for r in found["rows"]))
    kinds = list(dict.fromkeys(r["kind"] for r in _part(found, "kind")))
    rows = []
    for background in names:
        for detector, what in (("levels", "levels only"), (OURS, "the whole detector")):
            each = [by[background, detector, kind] for kind in kinds]
            total = by[background, detector, None]
            days = total["healthy_machine_days"]
            alarms = f"{total['healthy_vain']} in {days:.1f}" if days else "-"
            rows.append(
                (background, what, *(f"{r['named']} of {r['faults']}" for r in each),
                 f"{total['precision']:.3f} ({total['vain']} in vain)", alarms)
            )  # fmt: skip
    recall = {}
    for kind in kinds:
        each = [by[name, OURS, kind] for name in names]
        recall[kind] = sum(r["named"] for r in each) / sum(r["faults"] for r in each)
    heads = ("fleet", "detector", *kinds, "precision", "false alarms in days of a healthy machine")
    text = (
        f"Recall of the whole detector over all fleets: "
        f"{', '.join(f'{k} {v:.2f}' for k, v in recall.items())}. Jobs of "
        f"{', '.join(map(str, config['sizes']))} machines, {config['faults']} faults of each kind "
        f"and {config['healthy']} healthy jobs on each fleet, seed {config['seed']}."
    )
    return "\n".join([_table(heads, rows), "", text, "", _source(found)])


def tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Returns {name of a place in a document: what stands there}."""
    every = (overall, sizes, kinds, conditions, alarms)
    found: dict[str, Callable[[], str]] = {
        f"minder_{t.__name__}": functools.partial(t, folder / "minder.json") for t in every
    }
    found["minder_slow_kinds"] = functools.partial(kinds, folder / "minder_slow.json")
    found["minder_ablations"] = functools.partial(ablations, folder / "minder_ablations.json")
    found["minder_unlike"] = functools.partial(unlike, folder / "minder_unlike.json")
    found["minder_time"] = functools.partial(seconds, folder / "minder_time.json")
    return found


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _part(found: dict, part: str) -> list[Row]:
    return [row for row in found["rows"] if row["part"] == part]


def _interval(row: Row, name: str, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    low, high = row[f"{name}_95"]
    return f"{row[name]:{form}} ({low:{form}} to {high:{form}})"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _source(found: dict) -> str:
    return f"*{found['layer']}, {found['device']}, {found['date']}, {found['commit']}*"
