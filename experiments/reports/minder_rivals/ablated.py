"""Our detector without one of its parts: fitted anew without it, and run without it.

A part that no setting switches off is replaced for the time of a call, in the module where the
detector looks it up. Networks are those of the whole detector where the metrics are the same.

Legend: C metrics, F channels, N machines, J windows.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from experiments.reports.minder_rivals import ours
from experiments.reports.minder_rivals.view import WINDOW, Said
from megajax.monitor.fleet import METRICS, Case
from megajax.monitor.samples import Grid
from megajax.monitor.sources.convert import MINDER, WATCHED
from megajax.systems.minder import Detector, Settings, features, tracker, training

Patch = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Variant:
    """what: is left out. patches: what is replaced while it is fitted and run."""

    what: str
    patches: tuple[Patch, ...] = ()
    settings: Settings = Settings()
    metrics: tuple[str, ...] = WATCHED


def _without_residual() -> Any:
    whole = features.of_tick

    def of_tick(*args: Any, **kw: Any) -> Any:
        y_FNJ = whole(*args, **kw)
        level_CNJ, residual_CNJ = np.split(y_FNJ, 2)
        return np.concatenate([level_CNJ, np.where(np.isnan(residual_CNJ), np.nan, 0.0)])

    return mock.patch.object(features, "of_tick", of_tick)


def _without_networks() -> Any:
    def of_tick(cfg: Any, vae: Any, range_3C: np.ndarray, values_CNT: Any) -> Any:
        values_CNT = np.asarray(values_CNT)
        C, N, T = values_CNT.shape
        x_CNT = features.scaled(values_CNT, *np.asarray(range_3C)[:, :, None, None])
        x_CNJW = np.asarray(x_CNT).reshape(C, N, T // WINDOW, WINDOW)
        seen = np.isfinite(x_CNJW).sum(3)
        mean = np.nansum(x_CNJW, 3) / np.maximum(seen, 1)
        y = np.concatenate([mean, np.zeros_like(mean)])
        measured = np.concatenate([seen, seen]) >= features.SEEN
        return np.where(measured, y, np.nan).astype(np.float32)

    return mock.patch.object(features, "of_tick", of_tick)


def _without_past() -> Any:
    whole = tracker.advance

    def advance(prior: Any, tracks: Any, y_FNJ: Any, held_N: Any, *rest: Any) -> Any:
        return whole(prior, tracks, y_FNJ, np.ones_like(held_N), *rest)

    return mock.patch.object(tracker, "advance", advance)


VARIANTS = {
    "no-residual": Variant("without the residual of the networks", (_without_residual,)),
    "no-vae": Variant("without networks: means of windows", (_without_networks,)),
    "no-past": Variant("without the machine's own past", (_without_past,)),
    "short": Variant("without continuity: two ticks of 24 s", settings=Settings(continuity_s=48.0)),
    "no-groups": Variant("without grouping of followers", settings=Settings(group_s=1.0)),
    "three-metrics": Variant("three of Minder's seven metrics", metrics=MINDER[:3]),
    "seven-metrics": Variant(
        "Minder's seven metrics, without clock and temperature", metrics=MINDER
    ),
    "all-metrics": Variant("all 21 metrics", metrics=tuple(METRICS)),
}


@contextlib.contextmanager
def changed(variant: Variant, base: Path, fits: bool) -> Iterator[None]:
    """Takes the part away while the context lasts. fits: a detector is fitted in it."""
    with contextlib.ExitStack() as stack:
        for patch in variant.patches:
            stack.enter_context(patch())
        if fits and variant.metrics == WATCHED:
            profile = Detector.load(base).profile
            error = profile.report.get("mean_square", float("nan"))
            same = mock.patch.object(training, "train", lambda *a, **k: (profile.vae, error))
            stack.enter_context(same)
        yield


def read(name: str, case: Case) -> Grid:
    """Returns the samples of a case, of the metrics that the variant looks at."""
    fleet = dataclasses.replace(case.fleet, metrics=VARIANTS[name].metrics)
    return fleet.read(case.start, case.end)


def fit(name: str, base: Path, sources: Sequence[Case], steps: int, path: Path) -> None:
    """Fits a variant and saves it. base: the file of the whole detector."""
    variant = VARIANTS[name]
    grids = [read(name, case) for case in sources]
    with changed(variant, base, True):
        detector = Detector.fit(
            grids, seed=0, steps=steps, settings=variant.settings, metrics=variant.metrics
        )
    detector.save(path)


def alerts(name: str, path: Path, case: Case) -> list[Said]:
    """Returns what a fresh detector says of a case."""
    with changed(VARIANTS[name], path, False):
        return ours.alerts(path, read(name, case), case.fleet.departures)
