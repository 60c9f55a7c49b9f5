"""Minder (arXiv 2411.01791) judged on simulated jobs, beside rivals: the entry, figures and tables.

`evaluate` fits every detector on the same jobs, tunes the rivals on others, runs all of them on the
same cases and writes JSON and figures; documents show the tables. What has been done stays in the
state folder, so the same command goes on after a stop. The cases and the counts are in
minder_runs.py, the other detectors in minder_rivals.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from experiments.reports import minder_runs, minder_watch
from experiments.reports.minder_rivals import MEASURES, RIVALS, VARIANTS
from experiments.reports.minder_runs import OURS
from experiments.reports.reporting import Row, markdown_table, panels, read, rows_of, save, source
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.monitor import results
from megajax.monitor.fleet import MIXES

# ---- figures


Rows = Sequence[Mapping[str, Any]]
PAPER_F1 = 0.893
COLOURS = {
    OURS: "#0072B2",
    "minder-paper": "#000000",
    "minder-tuned": "#555555",
    "raw": "#E69F00",
    "con": "#56B4E9",
    "int": "#009E73",
    "no-continuity": "#D55E00",
    "mahalanobis": "#CC79A7",
    "median": "#8C564B",
    "forest": "#17A015",
    "nvrx-relative": "#F0C000",
    "nvrx-individual": "#B8A000",
    "greyhound": "#9467BD",
}
LEVELS = ("low", "middle", "high")


def draw(rows: Rows, path: Path) -> None:
    """Draws F1 by size, recall by kind, precision and recall by noise, and delays, as SVG and
    PNG."""
    by_detector = {r["detector"]: r for r in rows if r["part"] == "overall"}
    if OURS not in by_detector:
        return
    order = sorted(by_detector, key=lambda n: (n != OURS, -by_detector[n]["f1"]))
    figure, axes = panels(2, 2, size=(14, 8.6))
    _sizes(axes[0], rows, order)
    _kinds(axes[1], rows, order[:2])
    _noise(axes[2], rows, order[:4])
    _delays(axes[3], rows, order[:4])
    best = by_detector[order[1]] if len(order) > 1 else None
    title = (
        f"ours: F1 {by_detector[OURS]['f1']:.3f} on {by_detector[OURS]['cases']} simulated cases"
    )
    title += f"; the best rival ({order[1]}): {best['f1']:.3f}" if best else ""
    save(figure, path, title)


def _sizes(axes: Any, rows: Rows, order: Sequence[str]) -> None:
    for name in order:
        by_size = [r for r in rows if r["part"] == "size" and r["detector"] == name]
        x = range(len(by_size))
        axes.plot(
            x,
            [r["f1"] for r in by_size],
            color=COLOURS[name],
            label=name,
            marker="o",
            markersize=3,
            linewidth=2.2 if name == OURS else 1.0,
        )
        if name == OURS:
            low, high = zip(*(r["f1_95"] for r in by_size), strict=True)
            axes.fill_between(x, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
    axes.axhline(PAPER_F1, color="0.3", linestyle="--", linewidth=0.9)
    axes.text(
        0.01,
        PAPER_F1 + 0.01,
        "paper",
        fontsize=7,
        color="0.3",
        transform=axes.get_yaxis_transform(),
    )
    sizes = sorted({r["size"] for r in rows if r["part"] == "size"})
    axes.set_xticks(range(len(sizes)), [f"{s:,}" for s in sizes])
    axes.set(xlabel="machines of the job", ylabel="F1", ylim=(0, 1.02))
    axes.set_title("F1 by size of the job; shaded: 95 % interval", fontsize=9, loc="left")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _kinds(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    by_kind = {
        n: {r["kind"]: r for r in rows if r["part"] == "kind" and r["detector"] == n} for n in names
    }
    kinds = sorted(by_kind[OURS], key=lambda k: (k[0] == "(", by_kind[OURS][k]["recall"]))
    for place, kind in enumerate(kinds):
        for shift, name in zip((0.2, -0.2), names, strict=False):
            row = by_kind[name][kind]
            low, high = row["recall_95"]
            axes.barh(
                place + shift,
                row["recall"],
                0.36,
                color=COLOURS[name],
                label=name if not place else None,
            )
            axes.plot([low, high], [place + shift] * 2, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(kinds)),
        [f"{k.replace('_', ' ')} ({by_kind[OURS][k]['faults']})" for k in kinds],
        fontsize=7.5,
    )
    axes.set(xlabel="share of the faults that were named", xlim=(0, 1))
    axes.set_title("recall by kind of fault; lines: 95 % intervals", fontsize=9, loc="left")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _noise(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    for k, name in enumerate(names):
        by_noise = {r["noise"]: r for r in rows if r["part"] == "noise" and r["detector"] == name}
        x = np.array([i for i, level in enumerate(LEVELS) if level in by_noise]) + 0.07 * k
        shown = [by_noise[level] for level in LEVELS if level in by_noise]
        for what, mark in (("precision", "^"), ("recall", "o")):
            middle = np.array([r[what] for r in shown])
            low, high = np.array([r[f"{what}_95"] for r in shown]).T
            axes.errorbar(
                x,
                middle,
                np.maximum([middle - low, high - middle], 0),
                marker=mark,
                color=COLOURS[name],
                markersize=4,
                linewidth=1.0,
                elinewidth=0.6,
                linestyle="--" if what == "precision" else "-",
                label=f"{name}, {what}",
            )
    axes.set_xticks(range(len(LEVELS)), LEVELS)
    axes.set(xlabel="noise", ylabel="precision, recall", ylim=(0, 1.02))
    axes.set_title("precision and recall by noise", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="lower left")


def _delays(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    for name in names:
        (row,) = [r for r in rows if r["part"] == "delays" and r["detector"] == name]
        seconds = np.sort(row["seconds"]) / 60
        share = np.arange(1, len(seconds) + 1) / max(row["faults"], 1)
        last = share[-1] if len(share) else 0
        width = 2.0 if name == OURS else 1.0
        axes.step(
            [0, *seconds, 25],
            [0, *share, last],
            where="post",
            color=COLOURS[name],
            label=name,
            linewidth=width,
        )
    axes.axvline(4, color="0.3", linestyle="--", linewidth=0.9)
    axes.text(4.1, 0.02, "continuity of the paper", fontsize=7, color="0.3")
    axes.set(
        xlabel="minutes from the onset to the alert",
        xlim=(0, 25),
        ylim=(0, 1.02),
        ylabel="share of all faults",
    )
    axes.set_title("delay to the alert", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False, loc="lower right")


# ---- the evaluation


PAPER = {"precision": 0.904, "recall": 0.883, "f1": 0.893}  # Minder section 6.1: 150 cases


@dataclass(frozen=True)
class Config(Checked):
    """What is judged, and on what."""

    detectors: str = option(
        "all", "names joined by commas; all: ours and every rival; ablations: ours without one part"
    )
    sizes: str = option("4,16,64,256,1024,1500", "machines of a job, joined by commas")
    cases: str = option("60,60,60,24,14,10", "number of cases of each size, joined by commas")
    mixes: str = option(
        "evaluation,even,weak,slow", "mixes of fault types; the first has half of the cases"
    )
    split: Literal["train", "validate", "held_out"] = option("held_out", "family of simulated jobs")
    seed: int = option(20261124, "random seed of the cases", at_least=0)
    healthy_hours: float = option(
        3.0, "length of healthy jobs of 1,024 machines, for false alarms", "hours", at_least=0
    )
    train_jobs: int = option(18, "number of jobs to fit on", at_least=1)
    train_seed: int = option(7, "random seed of the jobs to fit on", at_least=0)
    steps: int = option(800, "training steps of the networks", at_least=1)
    tune_cases: int = option(120, "validation cases on which the rivals are tuned", at_least=1)
    tune_seed: int = option(31, "random seed of those cases", at_least=0)
    model: str = option("", "file of a saved detector to judge; empty: one is fitted")
    processes: int = option(2, "processes that share the cases", at_least=1)
    draw: bool = option(False, "run nothing: count, write and draw the cases that are done")
    state: str = option("runs/minder", "folder of the cases that are done")
    out: str = results.out_option("minder")

    def __post_init__(self):
        """Refuses lists that do not fit together."""
        super().__post_init__()
        if len(numbers("sizes", self.sizes)) != len(numbers("cases", self.cases)):
            raise UserError(
                f"cases={self.cases} must have a number for each of sizes={self.sizes} (--cases)"
            )


def tiny() -> Config:
    """A configuration that shows that the evaluation runs; its figures say nothing about a
    detector."""
    return Config(
        "ours,raw,minder-paper",
        "4,8",
        "4,4",
        "evaluation",
        "validate",
        healthy_hours=0.0,
        train_jobs=2,
        steps=40,
        tune_cases=4,
        processes=1,
    )


PRESETS = {"tiny": tiny, "paper": Config}


def numbers(name: str, text: str) -> list[int]:
    """'4,16' -> [4, 16]. Raises: UserError."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        message = f"{name}={text} must be numbers with commas, e.g. 4,16 (--{name})"
        raise UserError(message) from None


def chosen(text: str) -> list[str]:
    """Returns the detectors of --detectors, ours first. Raises: UserError."""
    known = ["ours", *RIVALS, *VARIANTS]
    groups = {
        "all": ["ours", *(n for n in RIVALS if n not in MEASURES)],
        "ablations": ["ours", *VARIANTS, "minder-tuned", *MEASURES],
    }
    words = groups.get(text, text.split(","))
    for word in words:
        if word not in known:
            raise UserError(
                f"detectors={text}: {word!r} must be one of {', '.join(known)}."
                f"{did_you_mean(word, known)} (--detectors)"
            )
    return [name for name in known if name in words]


def evaluate(cfg: Config, tell: Callable[[str], Any] = print) -> Mapping[str, Any]:
    """Runs the cases that are missing; writes OUT/minder.json and figures; returns what the file
    holds.

    Raises: UserError for a configuration that cannot be run.
    """
    names, mixes = chosen(cfg.detectors), cfg.mixes.split(",")
    if strange := [m for m in mixes if m not in MIXES]:
        raise UserError(f"mixes={cfg.mixes}: {strange[0]!r} must be one of {sorted(MIXES)}")
    name = "minder_ablations" if set(names) & set(VARIANTS) else "minder"
    path = results.writable_folder(cfg.out) / f"{name}.json"
    state = results.writable_folder(cfg.state, "state")
    fits = state / "fits"
    fits.mkdir(exist_ok=True)
    recipe = minder_runs.Recipe(
        cfg.train_jobs, cfg.train_seed, cfg.steps, cfg.tune_cases, cfg.tune_seed
    )
    sizes, counts = numbers("sizes", cfg.sizes), numbers("cases", cfg.cases)
    items = minder_runs.items(cfg.split, cfg.seed, sizes, counts, mixes, cfg.healthy_hours)
    made: list[minder_runs.Made] = []
    if not cfg.draw:
        model = minder_runs.fitted(fits, recipe, cfg.model, tell)
        made = minder_runs.ready(names, fits, model, recipe, tell)
        base = minder_runs.base_of(fits, model, recipe)
        minder_runs.shared(state, items, made, base, cfg.processes, tell)
    done = list(minder_runs.finished(state, items, names))
    names = [n for n in names if all(n in c["said"] for c in done if c["mix"])]
    about: dict[str, Any] = results.facts(jax.devices()[0].device_kind, "simulated")
    if cfg.draw and path.exists():  # what ran stays what is drawn
        before = read(path)
        about |= {name: before[name] for name in ("device", "date", "commit")}
    ignored = ("draw", "model", "out", "processes", "state")
    config = {name: value for name, value in vars(cfg).items() if name not in ignored}
    about |= {"config": config, "cases": len(done), "wanted": len(items)}
    about |= {"tuned": minder_runs.tuned(state, made), "paper": PAPER}
    rows = list(minder_runs.evaluation_rows(done, names))
    results.write(path, about, rows)
    for row in rows:
        if row["part"] in ("overall", "alarms"):
            tell(text(row))
    if name == "minder":
        draw(rows, path.with_suffix(""))
    tell(f"{path}" + ", .svg and .png" * (name == "minder"))
    return about | {"rows": rows}


def text(row: Mapping[str, Any]) -> str:
    """Returns a line for the terminal."""
    if row["part"] == "alarms":
        low, high = row["a_day_95"]
        return (
            f"{row['detector']:16} {row['a_day']:.1f} false alarms a day of {row['machines']} "
            f"healthy machines ({low:.1f} to {high:.1f}; {24 * row['days']:.0f} h)"
        )
    line = f"{row['detector']:16}" + "".join(
        f" {n} {row[n]:.3f} ({row[f'{n}_95'][0]:.3f} to {row[f'{n}_95'][1]:.3f}),"
        for n in ("precision", "recall", "f1")
    )
    if "f1_more" in row:
        low, high = row["f1_more_95"]
        line += f" ours better by {row['f1_more']:+.3f} ({low:+.3f} to {high:+.3f})"
    return line.rstrip(",")


# ---- tables of documents


def overall(path: Path) -> str:
    """Returns every detector on all cases, and how much better ours is on the same ones."""
    result = read(path)
    rows = []
    for row in _ranked(result):
        name = row["detector"]
        tuned = result["tuned"].get(name, {}).get("f1")
        rows.append(
            (
                name,
                row["what"],
                *(_interval(row, m) for m in ("precision", "recall", "f1")),
                _interval(row, "f1_more", sign=True) if "f1_more" in row else "",
                f"{row['delay_s'].get('p50', 0):.0f} s" if row["delay_s"] else "-",
                "" if tuned is None else f"{tuned:.3f}",
            )
        )
    heads = (
        "detector",
        "what",
        "precision",
        "recall",
        "F1",
        "F1 of ours minus its F1",
        "median time from onset to alert",
        "F1 on the cases it was tuned on",
    )
    paper = result["paper"]
    config = result["config"]
    text = (
        f"{result['cases']} cases of the family `{config['split']}`, seed {config['seed']}, mixes "
        f"{config['mixes'].replace(',', ', ')}; in brackets 95 % intervals of a bootstrap over the "
        f"cases. The paper has {paper['precision']}, {paper['recall']} and {paper['f1']} on 150 "
        "cases of its own."
    )
    return "\n\n".join([markdown_table(heads, rows), text, source(result)])


def sizes(path: Path) -> str:
    """Returns F1 by size of the job."""
    result = read(path)
    by = {(r["detector"], r["size"]): r for r in rows_of(result, part="size")}
    columns = sorted({size for _, size in by})
    faults = {s: by[OURS, s]["faults"] for s in columns}
    heads = ("F1", *(f"{s:,} machines ({faults[s]} faults)" for s in columns))
    rows = [
        (
            name,
            *(
                _interval(by[name, s], "f1") if name == OURS else f"{by[name, s]['f1']:.3f}"
                for s in columns
            ),
        )
        for name in dict.fromkeys(name for name, _ in by)
    ]
    both = (f"{by[OURS, s]['precision']:.3f}, {by[OURS, s]['recall']:.3f}" for s in columns)
    rows.insert(1, ("ours: precision, recall", *both))
    return f"{markdown_table(heads, rows)}\n\n{source(result)}"


def kinds(path: Path) -> str:
    """Returns recall by kind of fault: of ours, and of the two best rivals."""
    result = read(path)
    names = [r["detector"] for r in _ranked(result)[:3]]
    by = {(r["detector"], r["kind"]): r for r in rows_of(result, part="kind")}
    rows = []
    for kind in sorted({k for _, k in by}, key=lambda k: (k[0] == "(", k)):
        ours = by[OURS, kind]
        others = (f"{by[name, kind]['recall']:.3f}" for name in names[1:])
        delay = f"{ours['delay_s']['p50']:.0f} s" if ours["delay_s"] else "-"
        before = f"{ours['before_halt']} of {ours['named']}"
        rows.append(
            (
                kind.replace("_", " "),
                str(ours["faults"]),
                _interval(ours, "recall"),
                *others,
                delay,
                before,
            )
        )
    heads = (
        "kind of fault, or (its effect)",
        "faults",
        "ours, recall",
        *(f"{n}, recall" for n in names[1:]),
        "ours, median time from onset to alert",
        "named before the job halted",
    )
    return f"{markdown_table(heads, rows)}\n\n{source(result)}"


def conditions(path: Path) -> str:
    """Returns our precision, recall and F1 by noise and by mix of kinds."""
    result = read(path)
    rows = []
    for part, order in (("noise", LEVELS), ("mix", result["config"]["mixes"].split(","))):
        by = {r[part]: r for r in rows_of(result, part=part) if r["detector"] == OURS}
        rows += [
            (
                f"{part}: {value}",
                str(by[value]["cases"]),
                *(_interval(by[value], m) for m in ("precision", "recall", "f1")),
            )
            for value in order
            if value in by
        ]
    heads = ("condition", "cases", "precision", "recall", "F1")
    return f"{markdown_table(heads, rows)}\n\n{source(result)}"


def alarms(path: Path) -> str:
    """Returns the false alarms a day of long healthy runs."""
    result = read(path)
    rows = [
        (
            row["detector"],
            f"{row['machines']:,}",
            f"{24 * row['days']:.1f}",
            str(row["false_alarms"]),
            f"{row['a_day']:.2f}",
            f"{row['a_day_95'][0]:.2f} to {row['a_day_95'][1]:.2f}",
        )
        for row in rows_of(result, part="alarms")
    ]
    heads = ("detector", "machines", "hours", "false alarms", "false alarms a day", "95 % interval")
    return f"{markdown_table(heads, rows)}\n\n{source(result)}"


def ablations(path: Path) -> str:
    """Returns our detector without each of its parts, on the same cases."""
    result = read(path)
    rows = [
        (
            row["what"],
            *(_interval(row, m) for m in ("precision", "recall", "f1")),
            _interval(row, "f1_more", sign=True) if "f1_more" in row else "",
        )
        for row in rows_of(result, part="overall")
    ]
    heads = ("variant", "precision", "recall", "F1", "F1 of the whole minus its F1")
    text = f"{result['cases']} cases of the family `{result['config']['split']}`."
    return "\n\n".join([markdown_table(heads, rows), text, source(result)])


def seconds(path: Path) -> str:
    """Returns a sentence on the time of a call."""
    result = read(path)
    text = f"{minder_watch.text(result)}. The paper: {result['paper_s']} s with the query."
    return f"{text}\n\n{source(result)}"


def unlike(path: Path) -> str:
    """Returns recall by kind of fault, and precision, on fleets with other assumptions."""
    result = read(path)
    config = result["config"]
    by = {(r["background"], r["detector"], r.get("kind")): r for r in result["rows"]}
    names = list(dict.fromkeys(r["background"] for r in result["rows"]))
    kinds = list(dict.fromkeys(r["kind"] for r in rows_of(result, part="kind")))
    rows = []
    for background in names:
        for detector, what in (("levels", "levels only"), (OURS, "the whole detector")):
            each = [by[background, detector, kind] for kind in kinds]
            total = by[background, detector, None]
            days = total["healthy_machine_days"]
            alarms = f"{total['healthy_vain']} in {days:.1f}" if days else "-"
            rows.append(
                (
                    background,
                    what,
                    *(f"{r['named']} of {r['faults']}" for r in each),
                    f"{total['precision']:.3f} ({total['vain']} in vain)",
                    alarms,
                )
            )
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
    return "\n\n".join([markdown_table(heads, rows), text, source(result)])


def tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Returns {name of a place in a document: a function that returns its text}."""
    every = (overall, sizes, kinds, conditions, alarms)
    named: dict[str, Callable[[], str]] = {
        f"minder_{t.__name__}": functools.partial(t, folder / "minder.json") for t in every
    }
    named["minder_slow_kinds"] = functools.partial(kinds, folder / "minder_slow.json")
    named["minder_ablations"] = functools.partial(ablations, folder / "minder_ablations.json")
    named["minder_unlike"] = functools.partial(unlike, folder / "minder_unlike.json")
    named["minder_time"] = functools.partial(seconds, folder / "minder_time.json")
    return named


def _ranked(result: dict) -> list[Row]:
    """Returns each detector's row of all cases: ours, then the highest F1 first."""
    return sorted(
        rows_of(result, part="overall"), key=lambda row: (row["detector"] != OURS, -row["f1"])
    )


def _interval(row: Row, name: str, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    low, high = row[f"{name}_95"]
    return f"{row[name]:{form}} ({low:{form}} to {high:{form}})"
