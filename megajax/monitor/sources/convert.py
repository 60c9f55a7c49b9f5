"""From an exporter's series to the metrics of a machine: counters to rates, devices to extremes.

`canonical` applies the table of names.py to samples. What the table does not know keeps its name
and is taken as a gauge. Where a machine has several series of a metric (eight GPUs), the metric is
their mean, and `<metric>_min` and `<metric>_max` are their extremes, second by second: one dead GPU
of eight moves a mean by 12 % only.

Series of one metric are told apart by labels (`DCGM_FI_DEV_GPU_UTIL{gpu="3"}`). Where most times of
a machine have several rows without labels, these are devices in the order in which they come.

Legend: N rows. A cell is a second of a machine.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.samples import Samples, index
from megajax.monitor.sources import names
from megajax.monitor.sources.names import COUNTER, Way

DEVICES = 4096  # (chosen) of a machine: more values of one time are no devices
NAMES = 4096  # (chosen) exporter's names, without their labels
GAP = 2.5  # (chosen) times the usual distance of a counter's readings: over more there is no rate


@dataclasses.dataclass
class Rows:
    """Rows of one metric. machine_N, key_N: int64; a key is a device: a number for its labels."""

    time_N: np.ndarray
    machine_N: np.ndarray
    key_N: np.ndarray
    value_N: np.ndarray

    def of(self, rows: np.ndarray) -> "Rows":
        """Returns some of the rows: a mask or places."""
        return Rows(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    @classmethod
    def join(cls, parts: Sequence["Rows"]) -> "Rows":
        """Returns the rows of all parts."""
        return cls(
            *(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls))
        )

    def sorted(self) -> "Rows":
        """Returns the rows by machine, device and time."""
        return self.of(np.lexsort((self.time_N, self.key_N, self.machine_N)))

    def devices(self) -> int:
        """Returns the number of devices of the machine that has most."""
        if not len(self.key_N):
            return 0
        keys = int(self.key_N.max()) + 1
        return int(np.bincount(np.unique(self.machine_N * keys + self.key_N) // keys).max())


def canonical(samples: Samples) -> Samples:
    """Returns the samples under the names of names.METRICS, all of them gauges.

    A counter that began again has no rate over that interval, nor has one over a gap. Rates stand
    at the time of the later reading. Samples that need nothing of this come back unchanged.
    """
    table = _Table(samples)
    if not table.needs_work():
        return samples
    found: dict[str, list[Rows]] = {}
    used = set()
    for metric, ways in names.METRICS.items():
        used |= {name for way in ways for name in (*way.names, way.rest_of)}
        for suffix, rows in table.first(ways).items():
            found.setdefault(metric + suffix, []).append(rows)
    for base in dict.fromkeys(b for b, _ in table.parsed if b not in used):
        for suffix, rows in over_devices(table.rows(base)).items():
            found.setdefault(base + suffix, []).append(rows)
    for metric in names.COUNTED:
        if metric + names.LEAST in found:
            found[names.GPU_COUNT] = [table.count(names.METRICS[metric])]
            break
    return _joined(samples, found, table.notes)


def per_machine(samples: Samples) -> Samples:
    """Returns the samples with the devices of a machine as in `canonical`, under their own names
    and taken as gauges."""
    if not any(names.parse(metric)[1] for metric in samples.metrics):
        return samples
    table = _Table(samples)
    found: dict[str, list[Rows]] = {}
    for base in dict.fromkeys(b for b, _ in table.parsed):
        for suffix, rows in over_devices(table.rows(base)).items():
            found.setdefault(base + suffix, []).append(rows)
    return _joined(samples, found, ())


def _joined(samples: Samples, found: dict[str, list[Rows]], notes: Sequence[str]) -> Samples:
    """Returns rows as samples of the same machines and interval."""
    metrics = tuple(sorted(m for m, parts in found.items() if sum(len(p.time_N) for p in parts)))
    parts = [Rows.join(found[m]) for m in metrics]
    rows = Rows.join([_NONE, *parts])
    metric_N = np.repeat(np.arange(len(metrics)), [len(p.time_N) for p in parts])
    return Samples(
        rows.time_N, rows.machine_N, metric_N, rows.value_N, samples.machines, metrics,
        samples.start, samples.end, (*samples.notes, *notes),
    )  # fmt: skip


_NONE = Rows(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


class _Table:
    """The series of samples by the exporter's name."""

    def __init__(self, samples: Samples):
        self.samples, self.notes = samples, list[str]()
        self.parsed = [names.parse(m) for m in samples.metrics]
        labels = [repr(sorted(found.items())) for _, found in self.parsed]
        self.labels, self._key_of_metric = index(labels)
        self._metrics: dict[str, list[int]] = {}  # exporter's name -> its metrics
        for k, (base, _) in enumerate(self.parsed):
            self._metrics.setdefault(base, []).append(k)
        if len(self._metrics) > NAMES:
            raise UserError(
                f"{len(self._metrics):,} names of metrics; {NAMES:,} are read at most. Is the "
                "column of metrics one of identities or times?"
            )
        self._order_N = np.argsort(samples.metric_N, kind="stable")  # the rows by metric
        self._first_C = np.searchsorted(
            samples.metric_N[self._order_N], np.arange(len(samples.metrics) + 1)
        )
        self._occurrence_N = _occurrences(samples)

    def needs_work(self) -> bool:
        """Tells whether a name is in the table, has labels, or stands for several devices."""
        known = {n for ways in names.METRICS.values() for way in ways for n in way.names}
        return self._occurrence_N is not None or any(
            base in known or labels for base, labels in self.parsed
        )

    def rows(self, base: str, way: Way | None = None) -> Rows:
        """Returns the rows of an exporter's name that have a value and the labels of a way."""
        s, first_C = self.samples, self._first_C
        parts = [
            self._order_N[first_C[k] : first_C[k + 1]]
            for k in self._metrics.get(base, ())
            if way is None or way.takes(self.parsed[k][1])
        ]
        place_N = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
        place_N = place_N[np.isfinite(s.value_N[place_N]) & np.isfinite(s.time_N[place_N])]
        key_N = self._key_of_metric[s.metric_N[place_N]].astype(np.int64)
        if self._occurrence_N is not None:
            key_N += len(self.labels) * self._occurrence_N[place_N]
        machine_N = s.machine_N[place_N].astype(np.int64)
        return Rows(s.time_N[place_N], machine_N, key_N, s.value_N[place_N])

    def first(self, ways: Iterable[Way]) -> dict[str, Rows]:
        """Returns {suffix of the metric: rows}, of each machine by the first way that it has."""
        parts: dict[str, list[Rows]] = {}
        for way, rows in self._each(ways):
            found = over_devices(rows) if way.over == "devices" else {"": reduce(rows, way.over)}
            for suffix, part in found.items():
                parts.setdefault(suffix, []).append(part)
        return {suffix: Rows.join(p) for suffix, p in parts.items()}

    def count(self, ways: Iterable[Way]) -> Rows:
        """Returns how many devices of each machine have the metric in each cell."""
        return Rows.join([reduce(rows, "count") for _, rows in self._each(ways)])

    def _each(self, ways: Iterable[Way]) -> Iterable[tuple[Way, Rows]]:
        """Yields the ways that machines have, with the rows of those that have no earlier one."""
        had = np.empty(0, np.int64)
        for way in ways:
            rows = self._by(way)
            rows = rows.of(~np.isin(rows.machine_N, had))
            if len(rows.time_N):
                had = np.union1d(had, rows.machine_N)
                yield way, rows

    def _by(self, way: Way) -> Rows:
        """Returns a way's value of every device."""
        parts = [self.rows(name, way) for name in way.names]
        if way.kind == COUNTER:
            parts = [self._rates(p, name) for p, name in zip(parts, way.names, strict=True)]
        parts = [p for p in parts if len(p.time_N)]
        if not parts:
            return _NONE
        rows = parts[0] if len(parts) == 1 else _added(parts)
        rows.value_N = rows.value_N * way.scale
        if way.rest_of == "1":
            rows.value_N = 1 - rows.value_N
        elif way.rest_of:
            rows = _rest(rows, self.rows(way.rest_of, way))
        return rows

    def _rates(self, rows: Rows, name: str) -> Rows:
        """Returns how fast each counter grows, at the later of two readings."""
        rows = rows.sorted()
        same = (np.diff(rows.machine_N) == 0) & (np.diff(rows.key_N) == 0)
        seconds, grown = np.diff(rows.time_N), np.diff(rows.value_N)
        same &= seconds > 0
        if not same.any():
            return _NONE
        if (again := same & (grown < 0)).any():
            machines = [self.samples.machines[k] for k in np.unique(rows.machine_N[1:][again])]
            more = f" and {len(machines) - 3} more" if len(machines) > 3 else ""
            self.notes.append(
                f"{name} began again {np.count_nonzero(again)} times "
                f"({', '.join(machines[:3])}{more}); these intervals have no rate"
            )
        good = same & (grown >= 0) & (seconds <= GAP * np.median(seconds[same]))
        later = rows.of(np.flatnonzero(good) + 1)
        later.value_N = grown[good] / seconds[good]
        return later


def _occurrences(samples: Samples) -> np.ndarray | None:
    """Returns which of the rows of one time, machine and metric each row is, None if that is 0.

    Rows that repeat at few times are no devices: their mean counts.
    """
    near = (np.diff(samples.time_N) == 0) & (np.diff(samples.machine_N) == 0)
    if not (near & (np.diff(samples.metric_N) == 0)).any():  # devices stand beside each other
        return None
    order = np.lexsort((samples.time_N, samples.machine_N, samples.metric_N))
    columns = [c[order] for c in (samples.time_N, samples.machine_N, samples.metric_N)]
    begins = np.ones(len(order), bool)
    begins[1:] = np.any([np.diff(c) != 0 for c in columns], axis=0)
    first = np.flatnonzero(begins)
    size = np.diff(first, append=len(order))
    if size.max() > DEVICES:
        at = int(size.argmax())
        time, machine, metric = (column[first[at]] for column in columns)
        raise UserError(
            f"{samples.machines[machine]} has {size[at]:,} values of {samples.metrics[metric]} at "
            f"{time:.0f} (Unix seconds); {DEVICES:,} devices are read at most"
        )
    place = np.arange(len(order)) - np.repeat(first, size)
    metric_N = columns[2]
    times = np.bincount(metric_N, begins, len(samples.metrics))
    doubled = np.bincount(metric_N, place == 1, len(samples.metrics))
    place[(2 * doubled < times)[metric_N]] = 0
    found = np.empty(len(order), np.int64)
    found[order] = place
    return found if found.any() else None


def over_devices(rows: Rows) -> dict[str, Rows]:
    """Returns {"": mean, "_min": least, "_max": greatest} of the devices of each cell.

    Where no machine has two devices in one cell: {"": the rows}.
    """
    if rows.devices() <= 1 or reduce(rows, "count").value_N.max() <= 1:
        return {"": rows}
    hows = {"": "mean", names.LEAST: "min", names.GREATEST: "max"}
    return {suffix: reduce(rows, how) for suffix, how in hows.items()}


def reduce(rows: Rows, how: str, by_device: bool = False) -> Rows:
    """Returns one row a cell, or a cell and device: the mean, min, max, sum or count of its rows.

    Several rows of one device in a cell are their mean first, but for by_device.
    """
    if not len(rows.time_N):
        return rows
    if not by_device:
        if rows.devices() <= 1 and how != "count":
            return rows
        rows = reduce(rows, "mean", by_device=True)
    cell_N = np.floor(rows.time_N)
    keys = rows.key_N if by_device else np.zeros_like(rows.key_N)
    order = np.lexsort((cell_N, keys, rows.machine_N))
    columns = [c[order] for c in (cell_N, keys, rows.machine_N)]
    begins = np.ones(len(order), bool)
    begins[1:] = np.any([np.diff(c) != 0 for c in columns], axis=0)
    first = np.flatnonzero(begins)
    size = np.diff(first, append=len(order))
    value_N = rows.value_N[order]
    match how:
        case "count":
            found = size.astype(np.float64)
        case "min" | "max":
            found = (np.minimum if how == "min" else np.maximum).reduceat(value_N, first)
        case _:
            found = np.add.reduceat(value_N, first) / (size if how == "mean" else 1)
    cell_N, keys, machine_N = (c[first] for c in columns)
    return Rows(cell_N, machine_N, keys, found)


def _added(parts: Sequence[Rows]) -> Rows:
    """Returns the sums over parts, of each device and cell where all the parts that it has are."""
    means = [reduce(p, "mean", by_device=True) for p in parts]
    rows = Rows.join(means)
    total = reduce(rows, "sum", by_device=True)
    count = reduce(rows, "count", by_device=True).value_N
    pair_N = total.machine_N * (total.key_N.max() + 1) + total.key_N
    _, device_N = np.unique(pair_N, return_inverse=True)
    most = np.zeros(device_N.max() + 1)
    np.maximum.at(most, device_N, count)
    return total.of(count == most[device_N])


def _rest(part: Rows, whole: Rows) -> Rows:
    """Returns 1 - part / whole, of each device and cell that has both."""
    part, whole = (reduce(r, "mean", by_device=True) for r in (part, whole))
    both = Rows.join([part, whole])
    side_N = np.repeat([0, 1], [len(part.time_N), len(whole.time_N)])
    order = np.lexsort((side_N, both.time_N, both.key_N, both.machine_N))
    both = both.of(order)
    columns = (both.time_N, both.key_N, both.machine_N)
    pairs = np.flatnonzero(np.all([np.diff(c) == 0 for c in columns], axis=0))
    found, total = both.of(pairs), both.value_N[pairs + 1]
    found.value_N = 1 - found.value_N / np.where(total == 0, np.nan, total)
    return found
