"""Reports alerts to a log, events.jsonl, a picture, Alertmanager, Prometheus and a map of scores.

Nothing here may end the watch: what a full disk or an unreachable server does not accept is
counted. No jax import.
"""

import collections
import datetime
import html
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.monitor.alertmanager import Alertmanager, Firing
from megajax.monitor.exporter import Row
from megajax.monitor.records import Lines
from megajax.monitor.samples import Grid
from megajax.monitor.sources.http_query import plain
from megajax.systems.minder.alert import Alert, Lasting, Ledger
from megajax.systems.minder.pending import Recent

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
    found = np.full((3, values_NT.shape[1]), np.nan)
    there_T = np.isfinite(values_NT).any(0)
    found[:, there_T] = np.nanquantile(values_NT[:, there_T], (0.005, 0.5, 0.995), axis=0)
    return found


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
            part = path.with_name(f"{path.name}.part")
            part.write_text(self._page(order, named))
            part.replace(path)
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
    """Writes a picture in one piece: somebody may look at it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _colour(score: float | None) -> str:
    if score is None:
        return "#dddddd"  # the machine was not there
    pale = round(255 * (1 - min(max(score / REDDEST, 0.0), 1.0)))
    return f"#ff{pale:02x}{pale:02x}"


# ---- reporting


NAME = "MinderFaultyMachine"  # the label `alertname`
RULE = "minder"  # of events, beside the rules of monitor/alerts.py
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


class Teller:
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

        Args: alerts, named, scores: of the detector. judged: Unix seconds up to which it has read.
          recent: the metrics of the last minutes, for pictures.
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
            self.event("resolved", message, rule=RULE, machine=alert.machine, last=one.last)
            self._send(one, ended=True)
        self._heat.add(judged, scores)
        self._draw_heat(bool(new or ended))
        self._by_machine = list(self._rows(scores))

    def close(self) -> None:
        """Sends what Alertmanager has not got yet, and closes the file."""
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
            rule=RULE,
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
