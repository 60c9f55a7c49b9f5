"""Samples from a Prometheus server, by range queries in pages.

Each metric is one expression; its series are told apart by the label `instance`, which is the
machine. By default the expressions are made of the table of convert.py for what the server has,
with the scrape interval of each exporter as the server's own samples show it. Two exporters of one
host differ in the port of their `instance`; they are one machine if no metric comes from both.

A page that is lost is a hole and a note. `read` raises only if nothing can be read, if reading
again would not help, or if the answers are more than one read may hold. A read has a limit of time
in which all of its pages, tries and halves must be done. Legend: N rows, S series.
"""

import collections
import concurrent.futures
import dataclasses
import math
import re
import statistics
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.monitor.samples import Samples, index
from megajax.monitor.sources import convert
from megajax.monitor.sources.convert import COUNTER, Recipe, Rows, over_devices
from megajax.monitor.sources.http_query import Client, Refused, TooLarge, Unavailable

# ---- the table of convert.py as expressions of Prometheus
#
# A range query looks back 5 minutes for the last sample of a series, which would hide that a series
# has stopped. Every series is therefore used only while its newest sample is younger than two and a
# half scrape intervals, which `timestamp` tells; and rates are those between the last two readings
# (`irate`), as in convert.py. Series of one machine (the label `instance`) become one, because
# eight GPUs and hundreds of processors would else be sent for every host.


FRESH, BACK = 2.5, 3.5  # (chosen) scrape intervals: the age of a sample, and how far a rate looks
MACHINE = "instance"
_OVER = {"": "avg", convert.LEAST: "min", convert.GREATEST: "max"}


def exporter_names(metric: str) -> tuple[str, ...]:
    """Returns all series that a metric may come from."""
    recipes = convert.METRICS.get(split(metric)[0], ())
    names = [n for recipe in recipes for n in (*recipe.names, recipe.rest_of) if n not in ("", "1")]
    return tuple(dict.fromkeys(names))


def split(metric: str) -> tuple[str, str]:
    """Returns (metric of the table, "_min", "_max" or ""); gpu_count is of the first counted."""
    if metric == convert.GPU_COUNT:
        return convert.COUNTED[0], ""
    for suffix in (convert.LEAST, convert.GREATEST):
        if metric.endswith(suffix) and metric.removesuffix(suffix) in convert.METRICS:
            return metric.removesuffix(suffix), suffix
    return metric, ""


def all_metrics() -> tuple[str, ...]:
    """Returns every metric that has an expression, extremes included."""
    metrics = []
    for metric, recipes in convert.METRICS.items():
        metrics += [metric] * bool(recipes)
        if any(recipe.over == "devices" and _is_per_gpu(recipe) for recipe in recipes):
            metrics += [metric + convert.LEAST, metric + convert.GREATEST]
    return (*metrics, convert.GPU_COUNT)


def expression(metric: str, intervals: Mapping[str, float]) -> str | None:
    """Returns the expression of a metric, None where the server has no series for it.

    intervals: scrape interval in seconds of each of an exporter's names that the server has.
    """
    base, suffix = split(metric)
    for recipe in convert.METRICS.get(base, ()):
        there = [n for n in recipe.names if n in intervals]
        needed = [*recipe.names, recipe.rest_of] if recipe.over == "devices" else [recipe.rest_of]
        if there and all(n in ("", "1") or n in intervals for n in needed):
            over = "count" if metric == convert.GPU_COUNT else _over(recipe, suffix)
            return f"{over} by ({MACHINE}) ({_value(recipe, there, intervals)})"
    return None


def _over(recipe: Recipe, suffix: str) -> str:
    return (
        _OVER[suffix] if recipe.over == "devices" else {"mean": "avg"}.get(recipe.over, recipe.over)
    )


def _value(recipe: Recipe, there: Collection[str], intervals: Mapping[str, float]) -> str:
    """Returns the value of every device."""
    parts = [_series(name, recipe, intervals[name]) for name in there]
    if len(parts) == 1:
        value = parts[0]
    elif recipe.over == "devices":  # equal labels
        value = " + ".join(f"({p})" for p in parts)
    else:  # the labels of two names may be equal: another label tells them apart
        value = " or ".join(
            f'label_replace({p}, "of", "{k}", "{MACHINE}", ".*")' for k, p in enumerate(parts)
        )
    if recipe.scale != 1:
        value = f"{recipe.scale!r} * ({value})"
    if recipe.rest_of == "1":
        return f"1 - ({value})"
    if recipe.rest_of:
        return f"1 - ({value}) / ({_series(recipe.rest_of, recipe, intervals[recipe.rest_of])})"
    return value


def _series(name: str, recipe: Recipe, interval: float) -> str:
    """Returns the fresh values, or rates, of an exporter's series."""
    selector = f"{name}{{{recipe.only}}}" if recipe.only else name
    rate = recipe.kind == COUNTER and name != recipe.rest_of
    back_ms = max(1, round(1000 * BACK * interval))
    value = f"irate({selector}[{back_ms}ms])" if rate else selector
    return f"({value} and timestamp({selector}) > time() - {FRESH * interval:.3f})"


def _is_per_gpu(recipe: Recipe) -> bool:
    return any(name.startswith("DCGM_") for name in recipe.names)


# ---- the source


PAGE = 11_000  # points of a series: Prometheus refuses more
POINTS = 400_000  # (chosen: some 10 MB of text) of a page, once the number of series is known
ANSWER = 2**21  # samples of an answer: 17 bytes each, as `[1700000000,"0"],`, are 32 MiB of text
SMALLEST = 60  # (chosen) points of a page that is not cut further when it is too much
THREADS = 4  # (chosen) requests at a time
ROWS = 2**23  # (chosen: 0.2 GB, and as much again while they are joined) samples of a read
MACHINES = 2**16  # (chosen: a server of many jobs) of a read
NAME = 1024  # (chosen) characters of a machine's name, or of a series' labels
LONGEST_INTERVAL_S = 3600.0  # (chosen) between two scrapes
KNOWN_S = 600.0  # (chosen) for which a scrape interval is believed
USUAL_S = 15.0  # scrape interval where it cannot be seen; (Prometheus' example configuration)


def prometheus(
    url: str,
    *,
    queries: Mapping[str, str] | None = None,
    metrics: Sequence[str] | None = None,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    ca_file: str | Path | None = None,
    timeout_s: float = 10.0,
    retries: int = 3,
    step_s: int = 1,
) -> "Server":
    """Returns a Prometheus server as a source: `.read(start, end)` gives Samples.

    Args: url: http(s)://host:port, without /api/v1. queries: {metric: expression}, used as they
        are; None: the metrics of convert.METRICS that the server has. metrics: only these of them,
        e.g. convert.MINDER. user, password: for basic authentication. token: a bearer token.
        ca_file: PEM file of the authority that signed the server's certificate. timeout_s: for each
        whole answer. retries: of each request that may succeed later, with pauses of 0.5, 1, 2, ...
        s. step_s: seconds between the moments at which the expressions are evaluated.
    Raises: UserError for an address or metric that cannot be, and for a ca_file that is none.
    """
    client = Client(url, user, password, token, ca_file, timeout_s, retries)
    if step_s < 1 or step_s != int(step_s):
        raise UserError(f"step_s={step_s} must be a whole number of seconds; nearest: 1")
    if queries is not None and (not queries or metrics is not None):
        raise UserError("give queries={metric: expression} or metrics=[...], and at least one")
    known = all_metrics()
    for metric in metrics or ():
        if metric not in known:
            raise UserError(
                f"metrics={metric!r} is none of {', '.join(known)}.{did_you_mean(metric, known)}"
            )
    return Server(client, queries, tuple(metrics or known), int(step_s))


@dataclasses.dataclass(frozen=True)
class _Page:
    """Points of one metric: `count` of them from Unix second `first` on."""

    metric: str
    expression: str
    first: int
    count: int

    def last(self, step_s: int) -> int:
        """Returns the Unix second of the last point."""
        return self.first + (self.count - 1) * step_s


class _Full(Exception):
    """The answers of a read have more than ROWS samples."""


class Server:
    """A source. It remembers machines and scrape intervals between its reads."""

    def __init__(
        self, client: Client, queries: Mapping[str, str] | None, metrics: Sequence[str], step_s: int
    ):
        """See `prometheus`."""
        self._client, self._queries, self._metrics = client, queries, tuple(metrics)
        self._step_s = step_s
        self._intervals: dict[str, tuple[float, float]] = {}  # name -> (known until, seconds)
        self._timeout_s = client.timeout_s
        self._size: dict[str, int] = {}  # metric -> number of its series
        self._seen: dict[str, set[str]] = {}  # instance -> the metrics that it had
        self._machines: dict[str, str] = {}  # instance -> machine
        self._last: dict[str, float] = {}  # machine -> its newest sample

    @property
    def interval_s(self) -> float:
        """The longest scrape interval that was measured; 0.0 before the first read."""
        return max((seconds for _, seconds in self._intervals.values()), default=0.0)

    def read(self, start: float, end: float) -> Samples:
        """Returns the samples of [start, end), Unix seconds, at whole multiples of step_s.

        The newest two scrape intervals before now may still be incomplete. Raises: Refused for a
        wrong password, a missing right or an expression that the server cannot parse; Unavailable
        when nothing could be read, which may pass; UserError for an interval that is none.
        """
        if not (math.isfinite(start) and math.isfinite(end) and start < end):
            raise UserError(f"start={start} must be before end={end} (Unix seconds)")
        notes: list[str] = []
        samples, queries = self._ask(start, end, notes)
        if empty := [m for m in queries if not {m, m + convert.LEAST} & set(samples.metrics)]:
            notes.append(f"{self._client.where}: no machine has {', '.join(empty)}")
        notes += [*samples.notes, *self._silent(samples)]
        return dataclasses.replace(samples, notes=tuple(dict.fromkeys(notes)))

    def _ask(self, start: float, end: float, notes: list[str]) -> tuple[Samples, dict[str, str]]:
        """Returns (samples, expressions of which no page was lost)."""
        first = math.ceil(start / self._step_s) * self._step_s
        points = math.ceil((end - first) / self._step_s)
        queries = self._expressions(start, end, notes)
        pages = []
        for metric, text in queries.items():
            most = max(SMALLEST, min(PAGE, POINTS // self._size.get(metric, 1)))
            pages += [
                _Page(metric, text, first + k * self._step_s, min(most, points - k))
                for k in range(0, points, most)
            ]
        until = time.monotonic() + self._timeout_s * (1 + len(pages) / THREADS)
        parts, lost = self._run(pages, notes, until)
        for metric in queries:
            if size := max((p.count for p in parts if p.metric == metric), default=0):
                self._size[metric] = size
        asked = {m: text for m, text in queries.items() if m not in lost}
        return self._samples(parts, start, end, notes), asked

    # ---- what to ask

    def _expressions(self, start: float, end: float, notes: list[str]) -> dict[str, str]:
        """Returns {metric: expression}."""
        if self._queries is not None:
            return dict(self._queries)
        window = {"start": f"{start:.3f}", "end": f"{end:.3f}"}
        needed = {n for m in self._metrics for n in exporter_names(m)}

        def known(data: Any) -> set[str]:
            if not isinstance(data, list):
                raise TypeError(f"{data!r:.40} where a list of names must be")
            return needed & set(map(_text, data))

        until = time.monotonic() + self._timeout_s
        there, _ = self._client.ask("label/__name__/values", window, known, until=until)
        until = time.monotonic() + self._timeout_s  # for all of them: what is late is asked again
        intervals = {name: self._interval(name, end, until, notes) for name in sorted(there)}
        made = {m: expression(m, intervals) for m in self._metrics}
        absent = [split(m)[0] for m, text in made.items() if text is None]
        if absent := list(dict.fromkeys(absent)):
            more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            notes.append(f"{self._client.where}: has no {', '.join(absent[:8])}{more}")
        return {m: text for m, text in made.items() if text is not None}

    def _interval(self, name: str, end: float, until: float, notes: list[str]) -> float:
        """Returns the scrape interval of an exporter's name, by the series that has most samples.

        A series is younger than the window after a restart, so that its samples' distances are
        asked for, and not only their number.
        """
        known_until, seconds = self._intervals.get(name, (0.0, USUAL_S))
        if time.monotonic() < known_until or time.monotonic() > until:
            return seconds
        at = {"time": f"{end:.3f}"}

        def labels(data: Any) -> str:
            pairs = data["result"][0]["metric"].items()
            plain = [(k, _text(v)) for k, v in pairs if _label(k) == k != "__name__"]
            return ",".join(f"{k}={_quoted(v)}" for k, v in plain)

        def moments(data: Any) -> list[float]:
            return [float(t) for t, _ in data["result"][0]["values"][:PAGE]]

        try:
            query = f"topk(1, count_over_time({name}[5m]))"
            pairs, _ = self._client.ask("query", {"query": query, **at}, labels, 0, until)
            query = f"{name}{{{pairs}}}[5m]"
            times, _ = self._client.ask("query", {"query": query, **at}, moments, 0, until)
        except Unavailable:
            return seconds
        if len(times) > 2:
            measured = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
            if 0 < measured <= LONGEST_INTERVAL_S:  # NaN is not
                seconds = measured
                self._intervals[name] = (time.monotonic() + KNOWN_S, seconds)
            else:
                notes.append(
                    f"{self._client.where}: the samples of {name} are {measured:.3g} s apart, "
                    f"which is no scrape interval; {seconds:g} s are assumed"
                )
        return seconds

    # ---- asking

    def _run(
        self, pages: Sequence[_Page], notes: list[str], until: float
    ) -> tuple[list["_Part"], set[str]]:
        """Returns (the series of all pages, metrics of which pages were lost), and notes why.

        Once a page has failed at all its tries, others try once; where none succeeds, most are not
        tried at all, since a server that is away would cost minutes. until: time.monotonic() after
        which no page is asked.
        """
        health, parts = _Health(until), list[_Part]()
        lost: list[tuple[_Page, UserError]] = []
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            jobs = collections.deque(
                (page, pool.submit(self._outcome, page, health)) for page in pages
            )
            try:
                while jobs:
                    page, job = jobs.popleft()
                    match job.result():
                        case _Full():
                            raise TooLarge(
                                f"{self._client.where}: more than {ROWS:,} samples, which is the "
                                "limit of a read; read fewer metrics or a shorter time"
                            )
                        case Refused() as error if self._queries or _is_about_user(error):
                            said = f"{error}. The query of {page.metric!r} is {page.expression}"
                            raise Refused(str(error) if _is_about_user(error) else said)
                        case Exception() as error:
                            lost.append((page, error))
                        case series, warnings:
                            parts += series
                            notes += [f"{self._client.where}: {page.metric}: {w}" for w in warnings]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        if lost and len(lost) == len(pages):
            raise lost[0][1]
        for why, metrics in _by_reason(lost).items():
            notes.append(f"{why}. These pages are holes: {', '.join(metrics)}")
        return parts, {page.metric for page, _ in lost}

    def _outcome(
        self, page: _Page, health: "_Health"
    ) -> tuple[list["_Part"], list[str]] | UserError | _Full:
        """Returns what `_page` returns, or the error that it raises."""
        try:
            return self._page(page, health)
        except (_Full, Refused, Unavailable) as error:
            # An error without its frames, whose variables hold all of an answer.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return error

    def _page(self, page: _Page, health: "_Health") -> tuple[list["_Part"], list[str]]:
        """Returns (series of a page, warnings). A page that is too much is asked in halves."""
        retries = health.retries()
        parameters = {
            "query": page.expression,
            "start": str(page.first),
            "end": str(page.last(self._step_s)),
            "step": str(self._step_s),
        }
        where = self._client.where

        def take(data: Any) -> _Part:
            return _parse(page, data, self._step_s, where)

        try:
            part, warnings = self._client.ask(
                "query_range", parameters, take, retries, health.until
            )
        except TooLarge:
            if page.count <= SMALLEST:
                raise
        except Unavailable:
            health.fell()
            raise
        else:
            health.stood()
            health.hold(part.samples)
            return [part], warnings
        half = page.count // 2  # the error is gone by now, and with it the answer that it holds
        halves = [
            self._page(dataclasses.replace(page, first=first, count=count), health)
            for first, count in (
                (page.first, half),
                (page.first + half * self._step_s, page.count - half),
            )
        ]
        return [p for ps, _ in halves for p in ps], [w for _, ws in halves for w in ws]

    # ---- what the series are

    def _samples(
        self, parts: Sequence["_Part"], start: float, end: float, notes: list[str]
    ) -> Samples:
        """Returns one sample a machine, metric and moment, devices as their mean and extremes."""
        for metric in sorted({p.metric for p in parts if p.nameless}):
            notes.append(f"{metric}: series without the label {MACHINE!r} were left out")
        if outside := sum(p.outside for p in parts):
            notes.append(
                f"{self._client.where}: {outside} samples of times that were not asked for"
            )
        there = {i for p in parts for i in p.instances}
        if len(there) > MACHINES:
            raise Unavailable(
                f"{self._client.where}: the answers name {len(there):,} machines; {MACHINES:,} are "
                f"read at most. Does the label {MACHINE!r} name machines?"
            )
        self._forget(there)
        for p in parts:
            for instance in p.instances:
                self._seen.setdefault(instance, set()).add(p.metric)
        self._name_machines(notes)
        machines, _ = index([self._machines[i] for p in parts for i in p.instances])
        place = {machine: k for k, machine in enumerate(machines)}
        joined: dict[str, list[tuple[_Part, Rows]]] = {}
        for metric in sorted({p.metric for p in parts if p.instances}):
            pages = [p for p in parts if p.metric == metric]
            for suffix in max((p.rows for p in pages), key=len):  # a page may lack devices
                rows_of = joined.setdefault(metric + suffix, [])  # a query may have that name, too
                rows_of += [(p, p.rows.get(suffix, p.rows[""])) for p in pages]
        rows = sum(len(r.time_N) for pairs in joined.values() for _, r in pairs)
        if rows > 2 * ROWS:
            raise TooLarge(
                f"{self._client.where}: {rows:,} means and extremes of devices; {2 * ROWS:,} are "
                "read at most; read fewer metrics or a shorter time"
            )
        time_N, value_N = np.empty(rows), np.empty(rows)
        machine_N, metric_N, at = np.empty(rows, np.int32), np.empty(rows, np.int32), 0
        metrics = tuple(sorted(joined))
        for k, metric in enumerate(metrics):
            for p, part in joined[metric]:
                place_I = slice(at, at := at + len(part.time_N))
                machine_I = np.array([place[self._machines[i]] for i in p.instances], np.int32)
                time_N[place_I], value_N[place_I] = part.time_N, part.value_N
                machine_N[place_I], metric_N[place_I] = machine_I[part.machine_N], k
        return Samples(time_N, machine_N, metric_N, value_N, machines, metrics, start, end)

    def _forget(self, there: set[str]) -> None:
        """Drops machines that are absent, after too many have come and gone."""
        if len(self._seen) + len(there) > 2 * MACHINES:
            machines = {self._machines.get(i, i) for i in there}
            for known in (self._seen, self._machines):
                for instance in known.keys() - there:
                    del known[instance]
            for machine in self._last.keys() - machines:
                del self._last[machine]

    def _name_machines(self, notes: list[str]) -> None:
        """Names the machine of each instance: the instance itself, or that of another exporter.

        What was one machine stays one until a metric comes from two of its instances.
        """
        hosts: dict[str, list[str]] = {}
        for instance in self._seen:
            hosts.setdefault(_host(instance), []).append(instance)
        for instances in hosts.values():
            metrics = [m for i in instances for m in self._seen[i]]
            first = next((i for i in instances if i in self._machines), min(instances))
            known = {i: self._machines.get(i) for i in instances}
            if len(set(metrics)) == len(metrics):
                self._machines |= dict.fromkeys(instances, self._machines.get(first, first))
            else:
                self._machines |= {i: i for i in instances}
            if moved := [i for i in instances if known[i] not in (None, self._machines[i])]:
                notes.append(f"{_some(moved)} are machines of their own from now on")

    def _silent(self, samples: Samples) -> list[str]:
        """Returns a sentence about each machine that gave something once and nothing now; of many,
        those that stopped last."""
        newest_K = np.full(len(samples.machines), -math.inf)
        np.maximum.at(newest_K, samples.machine_N, samples.time_N)
        for machine, at in zip(samples.machines, newest_K.tolist(), strict=True):
            if at > self._last.get(machine, -math.inf):
                self._last[machine] = at
        heard = set(samples.machines)
        gone = sorted((m for m in self._last if m not in heard), key=lambda m: -self._last[m])
        notes = [
            f"machine {m} gave nothing; its last sample is of {self._last[m]:.0f} (Unix seconds)"
            for m in gone[:10]
        ]
        return notes + [f"and {len(gone) - 10} more machines gave nothing"] * (len(gone) > 10)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What is kept of a page. instances: the different ones, sorted. rows: of each instance, as
    `over_devices` has them, with places in `instances` as machines and no keys. count: of series.
    samples: of the page, or its rows where these are more. nameless: series without a machine,
    which were left out; outside: samples of other times, which were left out."""

    metric: str
    instances: tuple[str, ...]
    rows: dict[str, Rows]
    count: int
    samples: int
    nameless: int
    outside: int


def _parse(page: _Page, data: Any, step_s: int, where: str) -> _Part:
    """Returns what is kept of an answer. Raises: TooLarge for one of more than ANSWER samples;
    anything for an answer of another form."""
    if data["resultType"] != "matrix":
        raise ValueError(f"resultType {data['resultType']!r:.40}")
    instances, series, points, nameless, samples = [], [], [np.empty((0, 2))], 0, 0
    for entry in data["result"]:
        labels = {_label(k): _text(v) for k, v in entry["metric"].items()}
        values = entry.get("values", [])
        if len(values) > PAGE:
            raise ValueError(f"{len(values)} samples of a series where {page.count} were asked for")
        if (samples := samples + len(values)) > ANSWER:
            raise TooLarge(f"{where}: an answer of more than {ANSWER:,} samples")
        points_N2 = np.array(values, np.float64).reshape(len(values), 2)
        if (instance := labels.pop(MACHINE, "")) == "":
            nameless += 1
            continue
        labels.pop("__name__", None)
        pairs = ",".join(f"{k}={_quoted(v)}" for k, v in sorted(labels.items()))
        if len(pairs) > NAME:
            raise ValueError(f"labels of {len(pairs)} characters; {NAME} are read at most")
        instances.append(instance)
        series.append(pairs)
        points.append(points_N2)
    if len(set(zip(instances, series, strict=True))) < len(series):
        raise ValueError("the same series comes twice")
    sizes = [len(points_N2) for points_N2 in points[1:]]
    time_N, value_N = np.concatenate(points).T
    del points
    with np.errstate(invalid="ignore"):  # a time may be NaN
        inside_N = (time_N >= page.first) & (time_N <= page.last(step_s))
    outside = int((~inside_N).sum())
    if any(series):
        inside_N &= np.isfinite(value_N)  # in no mean
    different, machine_S = index(instances)
    _, key_S = index(series)
    owner_N = np.repeat(np.arange(len(series), dtype=np.int32), sizes)[inside_N]
    rows = Rows(
        time_N[inside_N],
        machine_S.astype(np.int64)[owner_N],
        key_S.astype(np.int64)[owner_N],
        value_N[inside_N],
    )
    rows_of = {
        suffix: dataclasses.replace(r, machine_N=r.machine_N.astype(np.int32), key_N=_NO_KEYS)
        for suffix, r in (over_devices(rows) if any(series) else {"": rows}).items()
    }
    return _Part(
        page.metric,
        different,
        rows_of,
        len(series),
        max(samples, sum(len(r.time_N) for r in rows_of.values())),
        nameless,
        outside,
    )


_NO_KEYS = np.empty(0, np.int64)


class _Health:
    """Whether the server of a read answers at all. Threads share it. until: time.monotonic() at
    which the read ends."""

    def __init__(self, until: float) -> None:
        self.until = until
        self._lock, self._fell, self._stood, self._rows = threading.Lock(), 0, False, 0

    def retries(self) -> int | None:
        """Returns how many retries a request has; None: the usual number.

        Raises: Unavailable; _Full.
        """
        with self._lock:
            if self._rows > ROWS:
                raise _Full
            if self._fell >= 2 * THREADS and not self._stood:
                raise Unavailable("the server was not asked, since it answered nothing before")
            return 0 if self._fell and not self._stood else None

    def hold(self, rows: int) -> None:
        """A page has so many samples. Raises: _Full when all pages have more than a read may."""
        with self._lock:
            self._rows += rows
            if self._rows > ROWS:
                raise _Full

    def fell(self) -> None:
        """A page was lost."""
        with self._lock:
            self._fell += 1

    def stood(self) -> None:
        """A page was answered."""
        with self._lock:
            self._stood, self._fell = True, 0


def _by_reason(lost: Sequence[tuple[_Page, UserError]]) -> dict[str, list[str]]:
    """Returns {reason: metrics} of lost pages."""
    metrics: dict[str, list[str]] = {}
    for page, error in lost:
        listed = metrics.setdefault(str(error), [])
        listed += [page.metric] * (page.metric not in listed)
    return metrics


def _text(value: Any) -> str:
    """Returns a name of the server's. Raises: TypeError for what is no text, ValueError for one
    that is too long. What UTF-8 cannot hold, half of a pair of surrogates, becomes "?"."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where a text must be")
    if len(value) > NAME:
        raise ValueError(f"a name of {len(value)} characters; {NAME} are read at most")
    return value.encode("utf-8", "replace").decode()


def _label(name: str) -> str:
    """Returns a label's name with "_" for what convert.parse does not know, such as a dot."""
    return re.sub(r"^(?=\d)|[^A-Za-z0-9_]", "_", _text(name))


def _some(names: Sequence[str]) -> str:
    """Returns the first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_about_user(error: UserError) -> bool:
    return ": 401 " in str(error) or ": 403 " in str(error)


def _host(instance: str) -> str:
    """Returns an instance without its port."""
    host, colon, port = instance.rpartition(":")
    return host if colon and port.isdecimal() else instance


def _quoted(text: str) -> str:
    """Returns a label's value as PromQL writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
