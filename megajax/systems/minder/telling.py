"""Reports alerts to a log, events.jsonl, a picture, Alertmanager, Prometheus and a map of scores.

Nothing here may end the watch: what a full disk or an unreachable server does not accept is
counted. No jax import.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.monitor.alertmanager import Alertmanager, Firing
from megajax.monitor.exporter import Row
from megajax.monitor.records import Lines
from megajax.monitor.sources.http_query import plain
from megajax.systems.minder.alert import Alert
from megajax.systems.minder.ledger import Lasting, Ledger
from megajax.systems.minder.pictures import Heat, draw_alert
from megajax.systems.minder.recent import Recent

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
GAUGES = ("machines", "lag_seconds", "judged_timestamp_seconds", "source_up", "alerts",
          "model_timestamp_seconds")  # fmt: skip
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
            "alert", f"ALERT {alert.message}, since {_clock(alert.since)}{shown}", rule=RULE,
            hosts=[alert.machine], machine=alert.machine, metric=alert.metric, since=alert.since,
            score=round(alert.score, 3), kind=alert.kind, at=alert.at,
            deviations=dict(alert.deviations), picture=str(path) if shown else None,
        )  # fmt: skip

    def _send(self, one: Lasting, ended: bool = False) -> None:
        if self._alertmanager is None:
            return
        alert = one.alert
        labels = {
            "alertname": NAME, "instance": alert.machine, "machine": alert.machine,
            "metric": alert.metric, "kind": alert.kind,
            "severity": "critical" if alert.kind == "silent" else "warning",
        }  # fmt: skip
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
