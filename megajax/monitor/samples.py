"""Samples: what a source of monitoring data gives, one row a measured value, in any order.

The input of the detector of sick machines (Minder, NSDI 2025, arXiv 2411.01791, section 3). Sources
(megajax/monitor/sources/) make Samples, `grid.to_grid` puts them on a grid of seconds. A machine
is what may be sick, most often a host. A series that stops is a sign of a fault, so that nobody
fills holes: a value that was not measured is in no row.

Legend: N rows. Not here: what the metrics are called (sources/names.py).
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Samples:
    """Rows of (time, machine, metric, value).

    time_N: float64, Unix seconds. machine_N, metric_N: int32, places in `machines` and `metrics`.
    value_N: float64; NaN: the source says that there is no value. start, end: the interval
    [start, end) that was asked for, in Unix seconds; None: what the rows hold. notes: sentences
    about what was wrong with the data, for the log.
    """

    time_N: np.ndarray
    machine_N: np.ndarray
    metric_N: np.ndarray
    value_N: np.ndarray
    machines: tuple[str, ...]
    metrics: tuple[str, ...]
    start: float | None = None
    end: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Sets the types. Raises: ValueError for rows that name nothing, or names that repeat."""
        types = {"time_N": np.float64, "machine_N": np.int32, "metric_N": np.int32}
        for name, kind in {**types, "value_N": np.float64}.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), kind))
        rows = {getattr(self, n).shape for n in (*types, "value_N")}
        if len(rows) != 1 or len(next(iter(rows))) != 1:
            raise ValueError(f"Samples has columns of the shapes {sorted(rows)}, not of one")
        for place_N, names in ((self.machine_N, self.machines), (self.metric_N, self.metrics)):
            if len(set(names)) != len(names):
                raise ValueError(f"Samples has names twice: {sorted(names)[:20]}")
            if place_N.size and not (0 <= place_N.min() and place_N.max() < len(names)):
                raise ValueError(f"Samples has rows of names outside of {len(names)}")

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[float, str, str, float]],
        start: float | None = None,
        end: float | None = None,
    ) -> "Samples":
        """Returns the samples of (time, machine, metric, value) rows."""
        times, names, words, values = [list(c) for c in zip(*rows, strict=True)] or [[]] * 4
        machines, machine_N = index(names)
        metrics, metric_N = index(words)
        return cls(
            np.array(times, np.float64), machine_N, metric_N, np.array(values, np.float64),
            machines, metrics, start, end,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.time_N)

    def rows(self) -> Iterable[tuple[float, str, str, float]]:
        """Yields (time, machine, metric, value) in the order in which they are held."""
        columns = (self.time_N, self.machine_N, self.metric_N, self.value_N)
        for at, machine, metric, value in zip(*(c.tolist() for c in columns), strict=True):
            yield at, self.machines[machine], self.metrics[metric], value


def of_machines(samples: Samples, pattern: str) -> Samples:
    """Returns the rows of the machines whose whole names the regular expression matches; '': of
    all."""
    if not pattern:
        return samples
    keep = [k for k, m in enumerate(samples.machines) if re.fullmatch(pattern, m)]
    notes = samples.notes
    if samples.machines and not keep:
        names = ", ".join(samples.machines[:3])
        notes += (f"none of the {len(samples.machines)} machines ({names}) matches {pattern!r}",)
    place = np.full(len(samples.machines), -1)
    place[keep] = np.arange(len(keep))
    rows = np.flatnonzero(place[samples.machine_N] >= 0)
    return dataclasses.replace(
        samples,
        time_N=samples.time_N[rows],
        machine_N=place[samples.machine_N[rows]],
        metric_N=samples.metric_N[rows],
        value_N=samples.value_N[rows],
        machines=tuple(samples.machines[k] for k in keep),
        notes=notes,
    )


def index(names: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns (the different names, sorted; the place of each among them, int32 (N,))."""
    different = tuple(sorted(set(names)))
    place = {name: k for k, name in enumerate(different)}
    return different, np.fromiter((place[n] for n in names), np.int32, len(names))


def concat(parts: Sequence[Samples]) -> Samples:
    """Returns the rows of all parts, in their order.

    The interval is the smallest that holds all; it is None where one part has none.
    """
    machines = tuple(sorted({m for p in parts for m in p.machines}))
    metrics = tuple(sorted({m for p in parts for m in p.metrics}))

    def column(name: str, kind: type) -> np.ndarray:
        return np.concatenate([np.empty(0, kind), *(getattr(p, name) for p in parts)])

    def moved(place: str, old: str, new: tuple[str, ...]) -> np.ndarray:
        at = {name: k for k, name in enumerate(new)}
        found = [np.empty(0, np.int32)]
        for p in parts:
            table = np.array([at[name] for name in getattr(p, old)], np.int32)
            found.append(table[getattr(p, place)])
        return np.concatenate(found)

    starts, ends = [p.start for p in parts], [p.end for p in parts]
    return Samples(
        column("time_N", np.float64),
        moved("machine_N", "machines", machines),
        moved("metric_N", "metrics", metrics),
        column("value_N", np.float64),
        machines,
        metrics,
        None if None in starts else min(starts, default=None),  # type: ignore[type-var]
        None if None in ends else max(ends, default=None),  # type: ignore[type-var]
        tuple(dict.fromkeys(note for p in parts for note in p.notes)),
    )
