"""Judges the detector on three fleets that share no assumption with the simulator it grew up on.

On each fleet (megajax/monitor/fleet/unlike.py) a detector is fitted on that fleet's own jobs,
without labels, and judged on others. `ours` is the whole detector. `levels` is the same fit without
spreads, lags and the order of onsets. Constants were chosen on scenes of the seeds below
FIRST_SEED; a judgement uses a seed from there on.
"""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from experiments.reports import minder_runs
from experiments.reports.minder_runs import OURS, code
from experiments.reports.reporting import wilson
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.monitor import results
from megajax.monitor.fleet import unlike
from megajax.monitor.samples import Grid
from megajax.systems.minder import Detector, features
from megajax.systems.minder.judge import Onsets

FIRST_SEED = 1000
DETECTORS = (OURS, "levels")  # the second one sees no healthy jobs: it takes long
HEALTHY = "healthy"
BATCH = 64  # windows of a training step, an eighth of the usual: so small jobs need no more
SIZES = (8, 16, 32)  # machines of a job


@dataclass(frozen=True)
class Config(Checked):
    """What is judged."""

    fleets: str = option(
        ",".join(unlike.BACKGROUNDS),
        "names of fleets, joined by commas",
        verbs=("unlike",),
    )
    faults: int = option(
        4, "scenes of each kind of fault on each fleet", at_least=1, verbs=("unlike",)
    )
    healthy: int = option(5, "scenes without a fault on each fleet", at_least=0, verbs=("unlike",))
    seed: int = option(
        FIRST_SEED,
        "random seed of the scenes; below 1000: those on which constants were chosen",
        at_least=0,
        verbs=("unlike",),
    )

    def __post_init__(self):
        """Refuses fleets that do not exist."""
        super().__post_init__()
        for name in self.fleets.split(","):
            if name not in unlike.BACKGROUNDS:
                known = ", ".join(unlike.BACKGROUNDS)
                raise UserError(
                    f"fleets={self.fleets}: {name!r} must be one of {known} (--unlike.fleets)"
                )


def sources(background: str) -> list[Grid]:
    """Returns the jobs to fit on: six of 45 minutes, one of them with a fault."""
    return [
        unlike.scene(background, size, k, "level" if k == 4 else None, seconds=2700).grid
        for k, size in enumerate((8, 16, 24, 8, 16, 24))
    ]


def alerts(detector: str, model: Path, grid: Grid) -> list[dict[str, Any]]:
    """Returns the alerts of one detector on one scene."""
    profile = Detector.load(model).profile
    with contextlib.ExitStack() as stack:
        if detector == "levels":
            profile = dataclasses.replace(profile, dynamics=None)
            stack.enter_context(mock.patch.object(Onsets, "moved", _unknown))
        return [dataclasses.asdict(a) for a in Detector(profile).update(grid)]


def _unknown(self: Onsets, rows_R: np.ndarray, *_: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.full(len(rows_R), np.nan), np.full(len(rows_R), np.nan)


def judged(background: str, model: Path, cfg: Config) -> Iterator[dict[str, Any]]:
    """Yields {'kind', 'faults', 'machine_days', 'said': {detector: alerts}} of each scene."""
    counts: Mapping[unlike.Kind | None, int] = {
        **dict.fromkeys(unlike.KINDS, cfg.faults),
        None: cfg.healthy,
    }
    for one in unlike.scenes(background, counts, SIZES, cfg.seed):
        _, N, T = one.grid.values_CNT.shape
        yield {
            "kind": one.faults[0].kind if one.faults else HEALTHY,
            "left": [],
            "faults": [dataclasses.asdict(f) for f in one.faults],
            "machine_days": N * T / 86400,
            "said": {
                name: alerts(name, model, one.grid)
                for name in DETECTORS
                if one.faults or name == OURS
            },
        }


def rows(background: str, cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each detector and kind of fault, and one for each detector over all."""
    for name in DETECTORS:
        total, delays = Counter[tuple[str, str]](), dict[str, list[float]]()
        for case in (c for c in cases if name in c["said"]):
            judgement = minder_runs.judged(case, case["said"][name])
            hits = [d for d in judgement["named"] if d is not None]
            delays.setdefault(case["kind"], []).extend(hits)
            total[case["kind"], "faults"] += len(case["faults"])
            total[case["kind"], "vain"] += judgement["vain"]
        for kind in unlike.KINDS:
            named, faults = len(delays.get(kind, ())), total[kind, "faults"]
            if faults:
                yield {
                    "part": "kind",
                    "background": background,
                    "detector": name,
                    "kind": kind,
                    "faults": faults,
                    "named": named,
                    "recall": named / faults,
                    "recall_95": wilson(named, faults),
                    "vain": total[kind, "vain"],
                    "delay_s": minder_runs.delays(delays[kind]),
                }
        named = sum(map(len, delays.values()))
        vain = sum(v for (_, what), v in total.items() if what == "vain")
        quiet = [c for c in cases if c["kind"] == HEALTHY and name in c["said"]]
        days = sum(c["machine_days"] for c in quiet)
        yield {
            "part": "background",
            "background": background,
            "detector": name,
            "named": named,
            "vain": vain,
            "precision": named / (named + vain) if named + vain else 1.0,
            "healthy_machine_days": days,
            "healthy_vain": total[HEALTHY, "vain"],
        }


def measure(
    cfg: Config, steps: int, out: str, tell: Callable[[str], Any] = print
) -> Mapping[str, Any]:
    """Fits and judges on each fleet; writes OUT/minder_unlike.json; returns what it holds.

    Raises: UserError for an unknown fleet.
    """
    import jax

    folder = results.writable_folder(out)
    state = folder / f"unlike-{code()}-{steps}"  # what is done stays: the same command goes on
    state.mkdir(exist_ok=True)
    counted: list[dict[str, Any]] = []
    for background in cfg.fleets.split(","):
        model = state / f"{background}.npz"
        if not model.exists():
            with mock.patch.object(features, "BATCH", BATCH):
                Detector.fit(sources(background), seed=0, steps=steps).save(model)
            share = Detector.load(model).profile.report["learnt"]
            tell(f"{background}: fitted; networks give back {share:.0%} of the variance")
        seen = state / f"{background}-{cfg.seed}-{cfg.faults}-{cfg.healthy}.json"
        if not seen.exists():
            cases = list(judged(background, model, cfg))
            seen.write_text(json.dumps(cases, default=float))
        for row in rows(background, json.loads(seen.read_text())):
            counted.append(row)
            tell(text(row))
    about = results.facts(jax.devices()[0].device_kind, "simulated") | {
        "config": {
            "faults": cfg.faults,
            "healthy": cfg.healthy,
            "seed": cfg.seed,
            "sizes": list(SIZES),
            "steps": steps,
        },
    }
    path = folder / "minder_unlike.json"
    results.write(path, about, counted)
    tell(f"{path}")
    return about | {"rows": counted}


def text(row: Mapping[str, Any]) -> str:
    """Returns a line for the terminal."""
    begin = f"{row['background']:15} {row['detector']:7}"
    if row["part"] == "kind":
        named = f"{row['named']} of {row['faults']} named"
        return f"{begin} {row['kind']:7} {named}, {row['vain']} in vain"
    return (
        f"{begin} precision {row['precision']:.3f}; {row['healthy_vain']} false alarms in "
        f"{row['healthy_machine_days']:.1f} days of a healthy machine"
    )
