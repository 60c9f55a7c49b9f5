"""The rivals by name: what scores machines, what is learnt, what may be tuned.

Every rival learns from the jobs that our detector is fitted on, and its threshold, its score and
how many alerts it gives are those with the highest F1 on the same validation cases.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports.minder_rivals import distances, others, rule
from experiments.reports.minder_rivals.rule import CONTINUITY, SCORES, Trace
from experiments.reports.minder_rivals.view import Said, View

Learnt = dict[str, np.ndarray]
THRESHOLDS = 40  # tried between the median and the highest score of the tuning cases


def _nothing(views: Sequence[View], seed: int, steps: int) -> Learnt:
    return {}


@dataclass(frozen=True)
class Rival:
    """scores: of machines by window, (M, J, N). hows: rule.SCORES that may be tuned. need: windows
    in a row. most: alerts of a case that may be tuned."""

    what: str
    scores: Callable[[View, Learnt], np.ndarray]
    learn: Callable[[Sequence[View], int, int], Learnt] = _nothing
    hows: tuple[str, ...] = SCORES[:-1]
    need: int = CONTINUITY
    most: tuple[int, ...] = (1, 2)

    def traces(self, view: View, learnt: Learnt) -> dict[str, Trace]:
        """Returns the candidates of a case by score."""
        d_MJN, there_JN = self.scores(view, learnt), view.there_JN
        return {
            how: rule.trace(np.stack([rule.normal(d, there_JN, how) for d in d_MJN]), there_JN)
            for how in self.hows
        }

    def choices(self, traces: Sequence[dict[str, Trace]]) -> Iterator[Mapping[str, Any]]:
        """Yields what may be tuned. traces: of the tuning cases."""
        for how in self.hows:
            high = np.concatenate([t[how].high[0].ravel() for t in traces])
            levels = 1 - np.geomspace(0.5, 1e-4, THRESHOLDS)
            limits = np.unique(np.quantile(high[np.isfinite(high)], levels))
            for limit, most in itertools.product(limits, self.most):
                yield {"how": how, "threshold": float(limit), "most": most}

    def named(self, traces: dict[str, Trace], tuned: Mapping[str, Any]) -> list:
        """Returns (window, machine, stream, score) of a case's alerts."""
        found = traces[tuned["how"]]
        return rule.decide(found, tuned["threshold"], self.need, tuned["most"])

    def alerts(self, view: View, learnt: Learnt, tuned: Mapping[str, Any]) -> list[Said]:
        """Returns the alerts of a case."""
        only = dataclasses.replace(self, hows=(tuned["how"],))
        traces = only.traces(view, learnt)
        streams = view.base.metrics if len(traces[tuned["how"]].who[0]) > 1 else ("all",)
        return rule.said(view, self.named(traces, tuned), self.need, streams)


_of = functools.partial(functools.partial, distances.of_metrics)
MEASURES = ("minder-manhattan", "minder-chebyshev")  # for a comparison of distances only
_one = ("plain", *SCORES[:-1])
RIVALS: dict[str, Rival] = {
    "minder-paper": Rival(
        "Minder as published: sums of distances of denoised windows, z-score, 4 minutes, the first "
        "metric in the paper's order",
        _of(source="denoised"), hows=("z",), most=(1,),
    ),
    "minder-tuned": Rival(
        "minder-paper with the best of four scores and up to two alerts", _of(source="denoised")
    ),
    "no-continuity": Rival(
        "minder-tuned without continuity (section 6)", _of(source="denoised"), need=1
    ),
    "raw": Rival("distances of windows without a network (RAW, section 6)", _of(source="x")),
    "con": Rival("all metrics' denoised windows in one distance (CON)", distances.concatenated),
    "int": Rival("one LSTM-VAE for all metrics (INT)", distances.of_one_network,
                 others.learn_integrated),
    "mahalanobis": Rival("Mahalanobis distance of statistics of windows", others.mahalanobis,
                         others.learn_covariance, hows=_one),
    "median": Rival("distance from the median machine, no model", distances.from_median, hows=_one),
    "forest": Rival("isolation forest (Liu et al. 2008)", others.isolation, others.learn_forest,
                    hows=_one),
    "nvrx-relative": Rival("NVRx's score beside the best machine",
                           functools.partial(others.nvrx, kind="relative"), hows=("plain",),
                           need=1),
    "nvrx-individual": Rival("NVRx's score beside the machine's own best",
                             functools.partial(others.nvrx, kind="individual"), hows=("plain",),
                             need=1),
    "greyhound": Rival("Bayesian change points, confirmed (Greyhound, ATC 2025)", others.greyhound,
                       hows=("plain",), need=1),
    "minder-manhattan": Rival("minder-tuned with Manhattan distances",
                              _of(source="denoised", measure="manhattan")),
    "minder-chebyshev": Rival("minder-tuned with Chebyshev distances",
                              _of(source="denoised", measure="chebyshev")),
}  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """A rival that is ready: what it learnt, what was tuned, and its F1 there."""

    name: str
    learnt: Learnt
    tuned: Mapping[str, Any]
    f1: float

    def alerts(self, view: View) -> list[Said]:
        """Returns the alerts of a case."""
        return RIVALS[self.name].alerts(view, self.learnt, self.tuned)

    def save(self, path: Path) -> None:
        """Writes an archive without pickles."""
        head = json.dumps({"name": self.name, "tuned": dict(self.tuned), "f1": self.f1})
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(part, head=np.array(head), **self.learnt)  # type: ignore[arg-type]
        part.replace(path)

    @staticmethod
    def load(path: Path) -> "Tuned":
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            head = json.loads(str(file["head"]))
            learnt = {name: file[name] for name in file.files if name != "head"}
        return Tuned(head["name"], learnt, head["tuned"], head["f1"])


Counted = Callable[[int, Sequence[Said]], tuple[int, int, int]]


def tune(
    names: Sequence[str], sources: Sequence[View], views: Iterator[View], counted: Counted,
    seed: int, steps: int,
) -> Iterator[Tuned]:  # fmt: skip
    """Yields the rivals, ready.

    sources: jobs to learn from. views: the tuning cases, one at a time. counted: of a case's number
    and its alerts: (named, in vain, faults).
    """
    learnt = {name: RIVALS[name].learn(sources, seed, steps) for name in names}
    kept: dict[str, list] = {name: [] for name in names}
    cases = []
    for view in views:
        for name in names:
            kept[name].append(RIVALS[name].traces(view, learnt[name]))
        grid = dataclasses.replace(view.grid, values_CNT=view.grid.values_CNT[:, :, :0])
        cases.append(dataclasses.replace(view, grid=grid))  # without its data
    for name in names:
        rival = RIVALS[name]

        def tried(choice: Mapping[str, Any], rival: Rival = rival, name: str = name) -> list:
            found = []
            for number, (view, traces) in enumerate(zip(cases, kept[name], strict=True)):
                named = rival.named(traces, choice)
                said = rule.said(view, named, rival.need, view.base.metrics)  # by their order
                found.append(counted(number, said))
            return found

        choice, value = rule.best(rival.choices(kept[name]), tried)
        yield Tuned(name, learnt[name], choice, value)
