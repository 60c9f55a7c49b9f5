"""Calls of whole programs: sums of predicted instructions beside XLA's own counts of the program.

XLA's analysis (`compiled.cost_analysis()`) covers a module and not an instruction, and on a CPU it
counts FLOPs, bytes and transcendentals without a time. What can be made of it is a roofline with
fitted weights, so that is the rival here; a call's time seen from outside is what both predict. All
methods have their weights fitted on the calls of the same other families: of a constant and of
their own sums, none negative, by the least squared relative error.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from experiments.reports.cdmpp import EACH, errors
from experiments.reports.cdmpp_splits import Split
from megajax.core.errors import UserError
from megajax.cost.program import records
from megajax.systems.cdmpp import families
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.profile import compile_program

GROUP = "whole calls"
_COUNTED = ("flops", "bytes accessed", "transcendentals")
_LAUNCH = 1e-5  # seconds; scales the constant, whose weight is fitted


def xla_counts(labels: Labels, numbers: Iterable[int]) -> dict[int, np.ndarray]:
    """Returns XLA's counts of programs (FLOPs, bytes, transcendentals) by their numbers.

    The programs are compiled again, from the seed that the labels' facts have (none: 0). Raises:
    UserError where the labels are of other programs.
    """
    found, seed = {}, int(labels.dataset.facts.get("seed", 0))
    for number in numbers:
        rows = np.flatnonzero(labels.programs == number).tolist()
        family = str(labels.families[rows[0]])  # the labels may be older than some families
        compiled = compile_program(families.program(number, (family,), seed=seed))
        mine = {record.hash for record in records(compiled)}
        if {labels.dataset.records[i].hash for i in rows} - mine:
            raise UserError(
                f"program {number} has other instructions than its labels: they are of another "
                "--seed, --scale or version"
            )
        said: Any = compiled.cost_analysis() or {}
        found[number] = np.array([float(said.get(name, 0.0)) for name in _COUNTED])
    return found


@dataclasses.dataclass(frozen=True)
class Calls:
    """Labelled calls. counts: XLA's, by the program's number; calls without them are left out."""

    labels: Labels
    counts: Mapping[int, np.ndarray]

    def judge(
        self, splits: Sequence[Split], seconds: Mapping[str, Sequence[np.ndarray]]
    ) -> list[dict[str, Any]]:
        """Returns the errors on calls of the held-out families: of each method and of all folds.

        Args: splits: by families. seconds: what a method predicts for all rows of the labels, by
            the method's name, a fold each.
        """
        names, values, walls, calls_families = self._calls()
        where = {name: np.array([rows for rows in values[name]]) for name in values}
        of_device = np.array([device for device, _ in names])
        found = []
        sums = {name: lambda fold, name=name: self._sum(names, seconds[name][fold])
                for name in seconds}  # fmt: skip
        sums |= {name: lambda fold, name=name: where[name] for name in where}
        for method, terms in sums.items():
            predicted, measured = [], []
            for fold, split in enumerate(splits):
                held = np.isin(calls_families, split.part.split(", "))
                for device in sorted(set(of_device.tolist())):
                    here = of_device == device
                    work = np.column_stack([np.full(len(here), _LAUNCH), terms(fold)])
                    train, test = here & ~held, here & held
                    weights, _ = nnls(work[train] / walls[train, None], np.ones(train.sum()))
                    predicted.append(work[test] @ weights)
                    measured.append(walls[test])
            both = np.concatenate(predicted), np.concatenate(measured)
            about = {"method": method, "split": "families", "held_out": EACH, "group": GROUP}
            unknown = np.full(len(both[0]), np.nan)
            found.append(about | errors(both[0], unknown, both[1], None, np.isfinite(both[0])))
        return found

    def _calls(self) -> tuple[list, dict[str, list[np.ndarray]], np.ndarray, np.ndarray]:
        names, walls, names_families = [], [], []
        values: dict[str, list[np.ndarray]] = {"XLA's counts": [], "our counts": []}
        values["measured instructions"] = []
        for key, rows in self._rows():
            names.append(key)
            walls.append(self.labels.walls[rows[0]].min())
            names_families.append(self.labels.families[rows[0]])
            values["XLA's counts"].append(self.counts[key[1]])
            found = [self.labels.dataset.records[i] for i in rows]
            values["our counts"].append(
                np.sum(
                    [
                        r.executions * np.array([r.flops, r.nbytes, r["transcendentals"]])
                        for r in found
                    ],
                    0,
                )
            )
            times = self.labels.dataset.seconds[rows]
            values["measured instructions"].append(
                np.array([sum(r.executions * s for r, s in zip(found, times, strict=True))])
            )
        return names, values, np.array(walls), np.array(names_families)

    def _rows(self) -> Iterator[tuple[tuple[str, int], np.ndarray]]:
        keys = list(zip(self.labels.dataset.devices, self.labels.programs.tolist(), strict=True))
        places: dict[tuple[str, int], list[int]] = {}
        for row, key in enumerate(keys):
            if key[1] in self.counts:
                places.setdefault(key, []).append(row)
        yield from ((key, np.array(rows)) for key, rows in places.items())

    def _sum(self, names: list, seconds: np.ndarray) -> np.ndarray:
        """Returns the seconds of all executions of each call, (calls, 1)."""
        executions = np.array([record.executions for record in self.labels.dataset.records])
        return np.array([[np.sum((executions * seconds)[rows])] for _, rows in self._rows()])
