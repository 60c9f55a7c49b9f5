"""Minder (arXiv 2411.01791) judged on simulated jobs, beside rivals: the entry and its flags.

`evaluate` fits every detector on the same jobs, tunes the rivals on others, runs all of them on the
same cases and writes JSON, figures and a table. What has been done stays in the state folder, so
the same command goes on after a stop.

- minder_runs.py: the cases, the processes, what is kept.   - minder_counts.py: counts, intervals.
- minder_rivals/: the other detectors.   - minder_tables.py, minder_figures.py: what documents show.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.monitor import results
from megajax.monitor.fleet import MIXES

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
    """Shows that all of it runs; nothing that it says of a detector counts."""
    return Config(
        "ours,raw,minder-paper", "4,8", "4,4", "evaluation", "validate", healthy_hours=0.0,
        train_jobs=2, steps=40, tune_cases=4, processes=1,
    )  # fmt: skip


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
    from experiments.reports.minder_rivals.ablated import VARIANTS
    from experiments.reports.minder_rivals.rivals import MEASURES, RIVALS

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
    """Runs what is missing; writes OUT/minder.json and figures; returns what the file holds.

    Raises: UserError for a configuration that cannot be run.
    """
    import jax

    from experiments.reports import minder_figures, minder_rows, minder_runs
    from experiments.reports.minder_rivals.ablated import VARIANTS

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
    wanted = minder_runs.items(cfg.split, cfg.seed, sizes, counts, mixes, cfg.healthy_hours)
    made: list[minder_runs.Made] = []
    if not cfg.draw:
        model = minder_runs.fitted(fits, recipe, cfg.model, tell)
        made = minder_runs.ready(names, fits, model, recipe, tell)
        base = minder_runs.base_of(fits, model, recipe)
        minder_runs.shared(state, wanted, made, base, cfg.processes, tell)
    found = list(minder_runs.found(state, wanted, names))
    names = [n for n in names if all(n in c["said"] for c in found if c["mix"])]
    about: dict[str, Any] = results.facts(jax.devices()[0].device_kind, "simulated")
    if cfg.draw and path.exists():  # what ran stays what is drawn
        before = json.loads(path.read_text())
        about |= {name: before[name] for name in ("device", "date", "commit")}
    here = ("draw", "model", "out", "processes", "state")
    config = {name: value for name, value in vars(cfg).items() if name not in here}
    about |= {"config": config, "cases": len(found), "wanted": len(wanted)}
    about |= {"tuned": minder_runs.tuned(state, made), "paper": PAPER}
    rows = list(minder_rows.rows(found, names))
    results.write(path, about, rows)
    for row in rows:
        if row["part"] in ("overall", "alarms"):
            tell(text(row))
    if name == "minder":
        minder_figures.draw(rows, path.with_suffix(""))
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
