"""Reports the alerts of a daemon: a log, events.jsonl, pictures, Alertmanager, Prometheus.

Ledger (which alerts are active, over restarts) -> Reporter, which reports what is new and what has
ended. Nothing here may end the watch: what a full disk or an unreachable server does not accept is
counted.
"""

import collections
import dataclasses
import datetime
import html
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.monitor.alerts import MACHINE, Alert
from megajax.monitor.exporter import Row
from megajax.monitor.records import Lines
from megajax.monitor.samples import Grid
from megajax.monitor.sources.http_query import Client, Unavailable, plain
from megajax.systems.minder.detector import Recent

# ---- the active alerts of a job, in a file so that a restarted daemon does not report them again
#
# An alert is active while its machine differs from the others, and for `clear_s` seconds more. The
# file is replaced as a whole after each change.


MAX_LEDGER = 2**24  # (chosen) bytes of the file


@dataclass(frozen=True)
class Lasting:
    """An active alert.

    until: Unix seconds at which it ends if the machine does not differ again. last: Unix seconds at
    which the machine was last seen to differ.
    """

    alert: Alert
    until: float
    last: float


class Ledger:
    """The active alerts of one job, by machine, and their file."""

    def __init__(self, path: Path, clear_s: float):
        """Reads the file that an earlier process wrote; `trouble` describes its defect, or is ''.

        clear_s: seconds without a difference after which an alert ends.
        """
        self._path, self._clear_s, self.trouble = path, clear_s, ""
        self.lasting: dict[str, Lasting] = {}
        self.lost = 0  # writes that failed since the last one that did not
        if not path.exists():
            return
        try:
            rows = files.parse_json(files.read_bytes(path, MAX_LEDGER))["alerts"]
            self.lasting = {one.alert.machine: one for one in map(_parse, rows)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.trouble = (
                f"{path} cannot be read ({error!s:.100}): alerts that last may be told once more"
            )

    def hear(
        self, alerts: Iterable[Alert], named: Mapping[str, float], judged: float
    ) -> tuple[list[Lasting], list[Lasting]]:
        """Updates the active alerts; returns (new alerts to report, alerts that have ended).

        Args: alerts: what Detector.update returned. named: Detector.named. judged: Unix seconds up
          to which the detector has judged.
        """
        new, before = [], dict(self.lasting)
        for alert in alerts:
            old = self.lasting.get(alert.machine)
            if old is None or old.until <= alert.at:
                self.lasting[alert.machine] = Lasting(alert, alert.at + self._clear_s, alert.at)
                new.append(self.lasting[alert.machine])
            else:
                self._prolong(alert.machine, alert.at + self._clear_s)
        for machine, until in named.items():
            self._prolong(machine, until)
        ended = [one for one in self.lasting.values() if one.until <= judged]
        for one in ended:
            del self.lasting[one.alert.machine]
        if self.lasting != before or self.lost:
            self.save()
        return new, ended

    def _prolong(self, machine: str, until: float) -> None:
        old = self.lasting.get(machine)
        if old is not None and until > old.until:
            last = until - self._clear_s
            self.lasting[machine] = dataclasses.replace(old, until=until, last=last)

    def save(self) -> None:
        """Writes the file; `lost` counts the writes that failed since the last good one."""
        rows = [
            {"alert": one.alert.measured, "until": one.until, "last": one.last}
            for one in self.lasting.values()
        ]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(self._path, json.dumps({"alerts": rows}, indent=1))
        except OSError:
            self.lost += 1
        else:
            self.lost = 0


def _parse(row: Mapping[str, Any]) -> Lasting:
    """Returns a row that `save` wrote. Raises an error for a row of another form."""
    values = dict(row["alert"])
    pairs = [(str(metric), float(score)) for metric, score in values.pop("deviations")]
    alert = Alert.of_machine(**values, deviations=pairs)
    if not isinstance(alert.machine, str):
        raise ValueError("a machine without a name")
    numbers = (alert.since, alert.score, alert.at, row["until"], row["last"])
    if not all(isinstance(x, int | float) for x in numbers):
        raise ValueError("a time that is no number")
    return Lasting(alert, float(row["until"]), float(row["last"]))


# ---- Alertmanager of Prometheus, which groups, silences and routes alerts to people
#
# Source: its HTTP API v2 (POST /api/v2/alerts). An alert is what its labels say: it is sent again
# while it lasts, because Alertmanager ends one that it has not heard of until `endsAt`, and once
# more when it has ended. A thread of its own sends, so that a server that is slow or away delays
# nobody.


RESEND_S = 60.0  # (Prometheus' rule manager: --rules.alert.resend-delay)
LASTS = 4  # (the same) times RESEND_S after which an alert that is not sent again has ended
LONGEST_PAUSE_S = 60.0  # (chosen) between tries
KEEP_S = 3600.0  # (chosen) for which the end of an alert is kept for a server that is away


@dataclass(frozen=True)
class Firing:
    """An alert as Alertmanager knows it.

    labels: its identity. since, ended: Unix seconds at which it began and ended; ended: None: it
    lasts.
    """

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float
    ended: float | None = None

    def row(self, now: float) -> dict:
        """Returns it as the API has it (postableAlert)."""
        until = now + LASTS * RESEND_S if self.ended is None else self.ended
        return {
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "startsAt": _moment(self.since),
            "endsAt": _moment(max(until, self.since)),
        }


class Alertmanager:
    """A client of one server. failures, sent: numbers of failed and of accepted requests."""

    def __init__(
        self,
        url: str,
        *,
        user: str | None = None,
        password: str | None = None,
        ca_file: str | Path | None = None,
        tell: Callable[[str], object] = print,
        timeout_s: float = 10.0,
        resend_s: float = RESEND_S,
    ):
        """url: http(s)://host:port, without /api/v2. tell: is called from another thread when the
        server cannot be reached, once, and when it can again. Raises: UserError for an address that
        cannot be."""
        self._client = Client(
            url, user, password, ca_file=ca_file, timeout_s=timeout_s, name="alertmanager"
        )
        self._tell, self._resend_s = tell, resend_s
        self._alerts: dict[frozenset, tuple[Firing, float]] = {}  # and when it was put
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._ending = threading.Event()
        self.failures = self.sent = 0
        self._thread = threading.Thread(target=self._run, name="alertmanager", daemon=True)
        self._thread.start()

    def put(self, alert: Firing) -> None:
        """Takes an alert, or its end, and sends it soon."""
        with self._lock:
            self._alerts[frozenset(alert.labels.items())] = alert, time.monotonic()
        self._wake.set()

    def close(self, timeout_s: float = 3.0) -> None:
        """Sends once more, for at most so many seconds. Alerts that last are not ended."""
        self._ending.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        fails, due = 0, time.monotonic() + self._resend_s
        ending = False
        while not ending:
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            if fails:  # a new alert does not hurry a server that is away
                self._ending.wait(max(0.0, due - time.monotonic()))
            ending = self._ending.is_set()
            problem = self._send()
            if problem and not fails:
                self._tell(f"alertmanager: {problem}; tries again, and watching goes on")
            elif not problem and fails:
                self._tell(f"alertmanager: takes alerts again, after {fails} failed tries")
            fails = fails + 1 if problem else 0
            pause = min(2.0**fails, LONGEST_PAUSE_S) if problem else self._resend_s
            due = time.monotonic() + pause

    def _send(self) -> str:
        """Sends all alerts; returns the problem in words, or ''."""
        oldest = time.monotonic() - KEEP_S
        with self._lock:
            recent = {k: x for k, x in self._alerts.items() if x[0].ended is None or x[1] > oldest}
            self._alerts, batch = recent, dict(recent)
        if not batch:
            return ""
        try:
            body = json.dumps([alert.row(time.time()) for alert, _ in batch.values()]).encode()
            status, text = self._client.post("api/v2/alerts", body)
        except Exception as error:  # whatever it is, the thread goes on
            self.failures += 1
            return str(error) if isinstance(error, Unavailable) else plain(f"{error!r:.200}")
        if status != 200:
            self.failures += 1
            words = plain(text[:200].decode(errors="replace"))
            return f"{self._client.where}: {status}: {words or 'no reason is given'}"
        self.sent += 1
        with self._lock:
            for key, sent in batch.items():
                if sent[0].ended is not None and self._alerts.get(key) is sent:
                    del self._alerts[key]
        return ""


def _moment(seconds: float) -> str:
    """Returns Unix seconds as RFC 3339 has them."""
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- pictures: the metrics of all machines around an alert, and a map of all scores
#
# matplotlib is imported only when something is drawn. Legend: N machines, T seconds.


BEFORE_S = 300  # (chosen) seconds that a picture shows before an alert's onset
MOST_LINES = 64  # machines that are drawn one by one; more become bands of quantiles
PANELS = 3  # metrics of a picture
ROWS = 64  # machines of a map of scores: those with the highest
COLUMNS = 180  # moments of a map
REDDEST = 2.0  # (chosen) the score that has the strongest colour


def draw_alert(alert: Alert, recent: Recent, end: float, path: Path) -> None:
    """Draws the metrics in which a machine differs, for this machine and all others.

    The first panel shows the metric that the alert names.
    Args: recent: the metrics of the last minutes. end: Unix seconds at which the picture ends.
      path: .png or .svg.
    """
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys([alert.metric, *(m for m, _ in alert.deviations)]))[:PANELS]
    figure = Figure(figsize=(9, 1 + 2.2 * len(metrics)), dpi=110, layout="constrained")
    panels = figure.subplots(len(metrics), squeeze=False, sharex=True)[:, 0]
    start = int(alert.since) - BEFORE_S
    for axes, metric in zip(panels, metrics, strict=True):
        _panel(axes, recent.metric(metric, start, int(end)), alert)
    panels[-1].set_xlabel("seconds from the onset")
    panels[0].legend(loc="upper left", fontsize=7)
    began = datetime.datetime.fromtimestamp(alert.since).isoformat(" ", "seconds")
    figure.suptitle(f"{alert.message}\nsince {began}", fontsize=9)
    _save(figure, path)


def _panel(axes: Any, grid: Grid, alert: Alert) -> None:
    values_NT = grid.values_CNT[0]
    at_T = np.arange(values_NT.shape[1]) + grid.start - alert.since
    others = [n for n, name in enumerate(grid.machines) if name != alert.machine]
    if len(others) > MOST_LINES:
        few, half, many = _quantiles(values_NT[others])
        axes.fill_between(at_T, few, many, color="0.85", label="99 % of the others")
        axes.plot(at_T, half, color="0.5", linewidth=0.8, label="their median")
    else:
        for k, n in enumerate(others):
            label = "others" if k == 0 else None
            axes.plot(at_T, values_NT[n], color="0.7", linewidth=0.6, label=label)
    if alert.machine in grid.machines:
        own_T = values_NT[grid.machines.index(alert.machine)]
        axes.plot(at_T, own_T, color="tab:red", linewidth=1.2, label=alert.machine)
    axes.axvline(0, color="k", linestyle="--", linewidth=0.8, label="onset")
    axes.axvline(alert.at - alert.since, color="k", linestyle=":", linewidth=0.8, label="found")
    axes.set_ylabel(grid.metrics[0], fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _quantiles(values_NT: np.ndarray) -> np.ndarray:
    """Returns the quantiles of 0.5 %, 50 % and 99.5 %, NaN in seconds without a sample."""
    quantiles = np.full((3, values_NT.shape[1]), np.nan)
    there_T = np.isfinite(values_NT).any(0)
    quantiles[:, there_T] = np.nanquantile(values_NT[:, there_T], (0.005, 0.5, 0.995), axis=0)
    return quantiles


class Heat:
    """The scores of all machines over time, as a picture or a page."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._moments: collections.deque[tuple[float, Mapping[str, float]]] = collections.deque(
            maxlen=COLUMNS
        )

    def add(self, at: float, scores: Mapping[str, float]) -> None:
        """Takes the scores of a moment, Unix seconds."""
        self._moments.append((at, dict(scores)))

    def write(self, path: Path, named: Collection[str]) -> None:
        """Writes the map. path: ends in .html, .png or .svg. named: machines with an alert."""
        highest: dict[str, float] = {}
        for _, scores in self._moments:
            for machine, score in scores.items():
                highest[machine] = max(score, highest.get(machine, 0.0))
        order = sorted(highest, key=lambda m: (m not in named, -highest[m], m))[:ROWS]
        if path.suffix == ".html":
            files.write_whole(path, self._page(order, named))
        elif order:
            self._draw(order, named, path)

    def _title(self, named: Collection[str]) -> str:
        verb = "differs" if len(named) == 1 else "differ"
        who = f"{', '.join(sorted(named)[:3])} {verb}" if named else "no machine differs"
        last = self._moments[-1][0] if self._moments else 0.0
        return f"Minder: {who} ({datetime.datetime.fromtimestamp(last):%Y-%m-%d %H:%M:%S})"

    def _page(self, order: Collection[str], named: Collection[str]) -> str:
        title = html.escape(self._title(named))
        lines = [
            "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=30>"
            f"<title>{title}</title><h3>{title}</h3><p>score of each machine, 1 (and above) is an "
            "alert; time goes to the right</p>"
            "<table cellspacing=0 style='font:12px sans-serif'>"
        ]
        for machine in order:
            name = html.escape(machine)
            mark = f"<b>{name}</b>" if machine in named else name
            cells = (
                f'<td style="background:{_colour(scores.get(machine))}" title="{name} '
                f'{datetime.datetime.fromtimestamp(at):%H:%M:%S}: {scores.get(machine, 0):.2f}">'
                "&nbsp;</td>"
                for at, scores in self._moments
            )
            lines.append(f"<tr><th align=left>{mark}</th>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</table>\n"])

    def _draw(self, order: Collection[str], named: Collection[str], path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 1.5 + 0.18 * len(order)), dpi=110, layout="constrained")
        axes = figure.subplots()
        table = [[scores.get(m, np.nan) for _, scores in self._moments] for m in order]
        image = axes.imshow(
            table, cmap="Reds", vmin=0, vmax=REDDEST, aspect="auto", interpolation="nearest"
        )
        labels = [f"{m} *" if m in named else m for m in order]
        axes.set_yticks(range(len(labels)), labels, fontsize=6)
        ticks = range(0, len(self._moments), max(1, len(self._moments) // 6))
        words = [f"{datetime.datetime.fromtimestamp(self._moments[t][0]):%H:%M:%S}" for t in ticks]
        axes.set_xticks(ticks, words, fontsize=7)
        axes.set_title(self._title(named), loc="left", fontsize=9)
        figure.colorbar(image, label="score; 1 is an alert")
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Writes a picture atomically, because somebody may look at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, lambda file: figure.savefig(file, format=path.suffix[1:]))


def _colour(score: float | None) -> str:
    if score is None:
        return "#dddddd"  # the machine was not there
    pale = round(255 * (1 - min(max(score / REDDEST, 0.0), 1.0)))
    return f"#ff{pale:02x}{pale:02x}"


# ---- reporting


NAME = "MinderFaultyMachine"  # the label `alertname`
REDRAW_S = 60.0  # (chosen) between two drawings of the map without an alert
PREFIX = "megajax_minder_"
COUNTERS = {
    "judged_seconds_total": "seconds of metrics that were judged",
    "skipped_seconds_total": "seconds that were never judged, since the source was away too long",
    "source_failures_total": "reads that failed",
    "refused_windows_total": "windows that could not be judged, e.g. of fewer than 4 machines",
    "notes_total": "sentences about what is wrong with the metrics themselves",
    "read_seconds_total": "time that reading took",
    "update_seconds_total": "time that judging took",
    "lost_writes_total": "events, pictures and states that the disk did not take",
    "alertmanager_failures_total": "requests to Alertmanager that failed",
}
GAUGES = (
    "machines",
    "lag_seconds",
    "judged_timestamp_seconds",
    "source_up",
    "alerts",
    "model_timestamp_seconds",
)
BY_MACHINE = ("alerts_total", "alert", "score")
FITS = "fits_total"  # by result
NAMES = tuple(PREFIX + n for n in (*COUNTERS, *GAUGES, *BY_MACHINE, FITS))


class Reporter:
    """Reports the alerts of one job."""

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        say: Callable[[str], object],
        alertmanager: Alertmanager | None = None,
        heatmap: Path | None = None,
    ):
        """Sends the alerts again that an earlier process left active in the ledger.

        Args: folder: for events.jsonl and pictures. say: called with each line for the log.
          heatmap: file for the picture of all scores.
        Raises: OSError if nothing can be written into the folder.
        """
        self.folder, self.ledger, self.say = folder, ledger, say
        self.count: Counter[str] = Counter()
        self.fits: Counter[str] = Counter()
        self.gauges: dict[str, float] = {"source_up": 0.0}
        self._alerts: Counter[str] = Counter()
        self._alertmanager, self._heatmap = alertmanager, heatmap
        self._lines = Lines(folder / "events.jsonl")
        self._heat, self._drawn = Heat(), 0.0
        self._by_machine: list[Row] = []
        for one in ledger.lasting.values():  # of an earlier process
            self._send(one)

    # ---- what the watch says

    def event(self, name: str, message: str, **values: Any) -> None:
        """Writes an event to events.jsonl and its message to the log."""
        row = {"time": round(time.time(), 3), "event": name, "message": message} | values
        self.count["lost_writes_total"] += not self._lines.write(json.dumps(row))
        self.say(plain(message))  # names come from a server: no line end, nothing for a terminal

    def hear(
        self,
        alerts: Sequence[Alert],
        named: Mapping[str, float],
        scores: Mapping[str, float],
        judged: float,
        recent: Recent,
    ) -> None:
        """Reports new and ended alerts, and updates the metrics and the map of scores.

        Args: alerts, named, scores: what the detector returned and has. judged: Unix seconds up to
          which it has read. recent: the metrics of the last minutes, for pictures.
        """
        new, ended = self.ledger.hear(alerts, named, judged)
        for one in new:
            self._alerts[one.alert.machine] += 1
            self._send(one)  # before a picture is drawn
            self._tell(one.alert, recent, judged)
        for one in ended:
            alert = one.alert
            message = f"{alert.machine}: like the others again, or gone; it last differed at "
            message += f"{_clock(one.last)}"
            self.event("resolved", message, rule=MACHINE, machine=alert.machine, last=one.last)
            self._send(one, ended=True)
        self._heat.add(judged, scores)
        self._draw_heat(bool(new or ended))
        self._by_machine = list(self._rows(scores))

    def close(self) -> None:
        """Sends what Alertmanager has not received yet, and closes the file."""
        if self._alertmanager is not None:
            self._alertmanager.close()
        self._lines.close()

    # ---- outlets

    def _tell(self, alert: Alert, recent: Recent, judged: float) -> None:
        name = "".join(c if c.isalnum() else "-" for c in alert.machine)[:100]
        path = self.folder / "alerts" / f"{int(alert.at)}-{name}.png"
        try:
            draw_alert(alert, recent, judged, path)
        except Exception as error:  # whatever it is, the alert is what counts
            self.count["lost_writes_total"] += 1
            self.say(f"no picture: {error}")
            shown = ""
        else:
            shown = f"; see {path}"
        self.event(
            "alert",
            f"ALERT {alert.message}, since {_clock(alert.since)}{shown}",
            rule=MACHINE,
            hosts=[alert.machine],
            machine=alert.machine,
            metric=alert.metric,
            since=alert.since,
            score=round(alert.score, 3),
            kind=alert.kind,
            at=alert.at,
            deviations=dict(alert.deviations),
            picture=str(path) if shown else None,
        )

    def _send(self, one: Lasting, ended: bool = False) -> None:
        if self._alertmanager is None:
            return
        alert = one.alert
        labels = {
            "alertname": NAME,
            "instance": alert.machine,
            "machine": alert.machine,
            "metric": alert.metric,
            "kind": alert.kind,
            "severity": "critical" if alert.kind == "silent" else "warning",
        }
        far = ", ".join(f"{m} {score:+.1f}" for m, score in alert.deviations)
        notes = {
            "summary": f"{alert.machine} differs from the other machines of its job",
            "description": alert.message + (f"; standard deviations: {far}" if far else ""),
            "score": f"{alert.score:.2f}",
        }
        self._alertmanager.put(Firing(labels, notes, alert.since, one.last if ended else None))

    def _draw_heat(self, now: bool) -> None:
        moment = time.monotonic()
        if self._heatmap is None or not (now or moment - self._drawn > REDRAW_S):
            return
        self._drawn = moment
        try:
            self._heatmap.parent.mkdir(parents=True, exist_ok=True)
            self._heat.write(self._heatmap, self.ledger.lasting)
        except Exception:  # whatever a name or a disk does to the drawing
            self.count["lost_writes_total"] += 1

    # ---- Prometheus

    def rows(self) -> Iterator[Row]:
        """Yields the daemon's own metrics, for monitor/exporter.py; another thread calls it."""
        counts = dict(self.count)
        counts["lost_writes_total"] = counts.get("lost_writes_total", 0) + self.ledger.lost
        if self._alertmanager is not None:
            counts["alertmanager_failures_total"] = self._alertmanager.failures
        for name in COUNTERS:
            yield PREFIX + name, "counter", {}, float(counts.get(name, 0))
        gauges = dict(self.gauges)
        if "judged_timestamp_seconds" in gauges:
            gauges["lag_seconds"] = time.time() - gauges["judged_timestamp_seconds"]
        for name in GAUGES:
            if name in gauges:
                yield PREFIX + name, "gauge", {}, gauges[name]
        for result in ("accepted", "rejected", "failed"):
            yield PREFIX + FITS, "counter", {"result": result}, float(self.fits[result])
        yield from self._by_machine

    def _rows(self, scores: Mapping[str, float]) -> Iterator[Row]:
        """Yields the metrics that each machine has.

        They have no label `instance`, because Prometheus sets it to the daemon's own address.
        """
        self.gauges |= {"machines": float(len(scores)), "alerts": float(len(self.ledger.lasting))}
        for machine in sorted({*scores, *self._alerts}):
            count = float(self._alerts[machine])
            yield PREFIX + "alerts_total", "counter", {"machine": machine}, count
        for machine, score in scores.items():
            yield PREFIX + "score", "gauge", {"machine": machine}, score
        for machine, one in self.ledger.lasting.items():
            labels = {"machine": machine, "metric": one.alert.metric, "kind": one.alert.kind}
            yield PREFIX + "alert", "gauge", labels, 1.0


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
