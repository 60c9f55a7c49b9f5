"""Samples from a Prometheus server, by range queries in pages.

Each metric is one expression; its series are told apart by the label `instance`, which is the
machine. By default the expressions are those of promql.py for what the server has, with the scrape
interval of each exporter as the server's own samples show it. Two exporters of one host differ in
the port of their `instance`; they are one machine if no metric comes from both.

A page that is lost is a hole and a note. `read` raises only if nothing can be read, or if reading
again would not help. Legend: N rows.
"""

import collections
import concurrent.futures
import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.monitor.samples import Samples, index
from megajax.monitor.sources import names, promql
from megajax.monitor.sources.convert import per_machine
from megajax.monitor.sources.http_query import Client, Refused, TooLarge, Unavailable

PAGE = 11_000  # points of a series: Prometheus refuses more
POINTS = 400_000  # (chosen: some 10 MB of text) of a page, once the number of series is known
SMALLEST = 60  # (chosen) points of a page that is not cut further when it is too much
THREADS = 4  # (chosen) requests at a time
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
        are; None: the metrics of names.METRICS that the server has. metrics: only these of them,
        e.g. names.MINDER. user, password: for basic authentication. token: a bearer token. ca_file:
        PEM file of the authority that signed the server's certificate. timeout_s: for each whole
        answer. retries: of each request that may succeed later, with pauses of 0.5, 1, 2, ... s.
        step_s: seconds between the moments at which the expressions are evaluated.
    Raises: UserError for an address or metric that cannot be, and for a ca_file that is none.
    """
    client = Client(url, user, password, token, ca_file, timeout_s, retries)
    if step_s < 1 or step_s != int(step_s):
        raise UserError(f"step_s={step_s} must be a whole number of seconds; nearest: 1")
    if queries is not None and (not queries or metrics is not None):
        raise UserError("give queries={metric: expression} or metrics=[...], and at least one")
    known = promql.all_metrics()
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


class Server:
    """A source. It remembers machines and scrape intervals between its reads."""

    def __init__(
        self, client: Client, queries: Mapping[str, str] | None, metrics: Sequence[str], step_s: int
    ):
        """See `prometheus`."""
        self._client, self._queries, self._metrics = client, queries, tuple(metrics)
        self._step_s = step_s
        self._intervals: dict[str, tuple[float, float]] = {}  # name -> (known until, seconds)
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
        try:
            samples, queries = self._ask(start, end, notes)
        finally:
            self._client.close()  # connections live as long as a read
        if empty := [m for m in queries if not {m, m + names.LEAST} & set(samples.metrics)]:
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
        series, lost = self._run(pages, notes)
        different = {(s.metric, s.series, s.labels.get(promql.MACHINE)) for s in series}
        self._size |= collections.Counter(metric for metric, *_ in different)
        asked = {m: text for m, text in queries.items() if m not in lost}
        return self._samples(series, start, end), asked

    # ---- what to ask

    def _expressions(self, start: float, end: float, notes: list[str]) -> dict[str, str]:
        """Returns {metric: expression}."""
        if self._queries is not None:
            return dict(self._queries)
        window = {"start": f"{start:.3f}", "end": f"{end:.3f}"}
        listed, _ = self._client.ask("label/__name__/values", window)
        there = set(listed) if isinstance(listed, list) else set()
        wanted = [n for m in self._metrics for n in promql.exporter_names(m)]
        intervals = {
            name: self._interval(name, end) for name in dict.fromkeys(wanted) if name in there
        }
        made = {m: promql.expression(m, intervals) for m in self._metrics}
        absent = [promql.split(m)[0] for m, text in made.items() if text is None]
        if absent := list(dict.fromkeys(absent)):
            more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            notes.append(f"{self._client.where}: has no {', '.join(absent[:8])}{more}")
        return {m: text for m, text in made.items() if text is not None}

    def _interval(self, name: str, end: float) -> float:
        """Returns the scrape interval of an exporter's name, by the series that has most samples.

        A series is younger than the window after a restart, so that its samples' distances are
        asked for, and not only their number.
        """
        until, seconds = self._intervals.get(name, (0.0, USUAL_S))
        if time.monotonic() < until:
            return seconds
        at = {"time": f"{end:.3f}"}
        try:
            query = f"topk(1, count_over_time({name}[5m]))"
            found, _ = self._client.ask("query", {"query": query, **at}, retries=0)
            labels = found["result"][0]["metric"]
            pairs = ",".join(f"{k}={_quoted(v)}" for k, v in labels.items() if k != "__name__")
            query = f"{name}{{{pairs}}}[5m]"
            found, _ = self._client.ask("query", {"query": query, **at}, retries=0)
            moments = [float(t) for t, _ in found["result"][0]["values"]]
        except (Unavailable, LookupError, TypeError, ValueError, AttributeError):
            return seconds
        if len(moments) > 2:
            seconds = statistics.median(b - a for a, b in zip(moments, moments[1:], strict=False))
            self._intervals[name] = (time.monotonic() + KNOWN_S, seconds)
        return seconds

    # ---- asking

    def _run(self, pages: Sequence[_Page], notes: list[str]) -> tuple[list["_Series"], set[str]]:
        """Returns (the series of all pages, metrics of which pages were lost), and notes why.

        Once a page has failed at all its tries, others try once; where none succeeds, most are not
        tried at all, since a server that is away would cost minutes.
        """
        health, found = _Health(), list[_Series]()
        lost: list[tuple[_Page, UserError]] = []
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            jobs = [(page, pool.submit(self._page, page, health)) for page in pages]
            try:
                for page, job in jobs:
                    try:
                        series, warnings = job.result()
                    except (Refused, Unavailable) as error:
                        if isinstance(error, Refused) and (self._queries or _is_about_user(error)):
                            said = f"{error}. The query of {page.metric!r} is {page.expression}"
                            raise Refused(str(error) if _is_about_user(error) else said) from None
                        lost.append((page, error))
                    else:
                        found += series
                        notes += [f"{self._client.where}: {page.metric}: {w}" for w in warnings]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        if lost and len(lost) == len(pages):
            raise lost[0][1]
        for why, metrics in _by_reason(lost).items():
            notes.append(f"{why}. These pages are holes: {', '.join(metrics)}")
        return found, {page.metric for page, _ in lost}

    def _page(self, page: _Page, health: "_Health") -> tuple[list["_Series"], list[str]]:
        """Returns (series of a page, warnings). A page that is too much is asked in halves."""
        retries = health.retries()
        last = page.first + (page.count - 1) * self._step_s
        parameters = {
            "query": page.expression, "start": str(page.first), "end": str(last),
            "step": str(self._step_s),
        }  # fmt: skip
        try:
            data, warnings = self._client.ask("query_range", parameters, retries)
        except TooLarge:
            if page.count <= SMALLEST:
                raise
            half = page.count // 2
            parts = [
                self._page(dataclasses.replace(page, first=first, count=count), health)
                for first, count in (
                    (page.first, half),
                    (page.first + half * self._step_s, page.count - half),
                )
            ]
            return [s for part in parts for s in part[0]], [w for part in parts for w in part[1]]
        except Unavailable:
            health.fell()
            raise
        health.stood()
        try:
            return _parse(page.metric, data), warnings
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Unavailable(
                f"{self._client.where}: the answer is no matrix of Prometheus' API ({error!r:.100})"
            ) from None

    # ---- what the series are

    def _samples(self, series: Sequence["_Series"], start: float, end: float) -> Samples:
        """Returns one sample a machine, metric and moment, devices as their mean and extremes."""
        notes = []
        for metric in sorted({s.metric for s in series if promql.MACHINE not in s.labels}):
            notes.append(f"{metric}: series without the label {promql.MACHINE!r} were left out")
        series = [s for s in series if promql.MACHINE in s.labels]
        for s in series:
            self._seen.setdefault(s.labels[promql.MACHINE], set()).add(s.metric)
        self._name_machines(notes)
        machines, machine_S = index([self._machines[s.labels[promql.MACHINE]] for s in series])
        metrics, metric_S = index([s.series for s in series])
        sizes = [len(s.time_N) for s in series]
        none = np.empty(0)
        found = Samples(
            np.concatenate([none, *(s.time_N for s in series)]),
            np.repeat(machine_S, sizes), np.repeat(metric_S, sizes),
            np.concatenate([none, *(s.value_N for s in series)]),
            machines, metrics, start, end, tuple(notes),
        )  # fmt: skip
        return per_machine(found)

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
                notes.append(f"{', '.join(moved)} are machines of their own from now on")

    def _silent(self, samples: Samples) -> list[str]:
        """Returns a sentence about machines that gave something once and nothing now."""
        for k, machine in enumerate(samples.machines):
            times = samples.time_N[samples.machine_N == k]
            if len(times):
                self._last[machine] = max(times.max(), self._last.get(machine, -math.inf))
        return [
            f"machine {m} gave nothing; its last sample is of {at:.0f} (Unix seconds)"
            for m, at in self._last.items()
            if m not in samples.machines
        ][:10]


@dataclasses.dataclass(frozen=True)
class _Series:
    """A series of an answer. series: the metric with its labels but for the machine's."""

    metric: str
    series: str
    labels: Mapping[str, str]
    time_N: np.ndarray
    value_N: np.ndarray


def _parse(metric: str, data: Any) -> list[_Series]:
    """Returns the series of an answer. Raises: what an answer of another form raises."""
    if data["resultType"] != "matrix":
        raise ValueError(f"resultType {data['resultType']}")
    found = []
    for entry in data["result"]:
        labels = {str(k): str(v) for k, v in entry["metric"].items()}
        values = entry.get("values", [])
        points_N2 = np.array(values, np.float64).reshape(len(values), 2)
        own = {k: v for k, v in labels.items() if k not in (promql.MACHINE, "__name__")}
        pairs = ",".join(f"{k}={_quoted(v)}" for k, v in sorted(own.items()))
        found.append(
            _Series(
                metric,
                f"{metric}{{{pairs}}}" if pairs else metric,
                labels,
                points_N2[:, 0],
                points_N2[:, 1],
            )
        )
    return found


class _Health:
    """Whether the server of a read answers at all. Threads share it."""

    def __init__(self) -> None:
        self._lock, self._fell, self._stood = threading.Lock(), 0, False

    def retries(self) -> int | None:
        """Returns how often to try again, None: as usual. Raises: Unavailable."""
        with self._lock:
            if self._fell >= 2 * THREADS and not self._stood:
                raise Unavailable("the server was not asked, since it answered nothing before")
            return 0 if self._fell and not self._stood else None

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
    found: dict[str, list[str]] = {}
    for page, error in lost:
        listed = found.setdefault(str(error), [])
        listed += [page.metric] * (page.metric not in listed)
    return found


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
