"""What a driver leaves behind: events.jsonl, metrics.prom, blocklist, report.txt, and evidence.

The evidence of an attempt: the stacks of each rank, timeline.json (open it in ui.perfetto.dev),
silent.txt (who is furthest behind, over the grid), heat.html, and spans.json, of which they are
made. metrics.prom is Prometheus' text format, rewritten in one piece: for node_exporter's textfile
collector, or any file server. blocklist has one excluded host a line.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megajax.monitor import timeline
from megajax.monitor.heartbeat import Span

EVERY_S = 5.0  # (chosen) seconds between rewrites of metrics.prom without an event


class Journal:
    """Writes into one folder, and says the same to a person."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        """Appends to what an earlier driver left there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._say = folder, say
        self._file = open(folder / "events.jsonl", "a")
        self._faults: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._written = 0.0

    def event(self, name: str, message: str = "", **values: Any) -> None:
        """Records an event, and says it when it has a message."""
        row = {"time": round(time.time(), 3), "event": name, "message": message, **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if name in ("fault", "warning"):
            self._faults[f'megajax_{name}s_total{{rule="{values["rule"]}"}}'] += 1
        if message:
            self._say(f"[supervise] {name}: {message}")
        self._write()

    def gauge(self, **values: float) -> None:
        """Sets gauges; they appear as megajax_<name>."""
        self._gauges |= values
        if time.monotonic() - self._written > EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        lines = ["# TYPE megajax_faults_total counter", "# TYPE megajax_warnings_total counter"]
        lines += [f"{name} {count}" for name, count in sorted(self._faults.items())]
        for name, value in self._gauges.items():
            lines += [f"# TYPE megajax_{name} gauge", f"megajax_{name} {value:g}"]
        fresh = self.folder / "metrics.prom.new"
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.folder / "metrics.prom")

    def exclude(self, host: str, why: str) -> None:
        """Adds a host to the blocklist."""
        with open(self.folder / "blocklist", "a") as file:
            file.write(host + "\n")
        self.event("excluded", f"{host}: {why}", host=host)

    def evidence(
        self,
        attempt: int,
        stacks: Mapping[str, str],
        spans: Mapping[str, list],
        hosts: Mapping[int, str],
        offsets: Mapping[str, float],
        grid: str | None,
    ) -> None:
        """Keeps what the ranks left: {rank: text} and {rank: sections}, the open one last.

        hosts: of each rank. offsets: of each host's clock. grid: of timeline.parse_grid.
        """
        folder = self.folder / f"attempt{attempt}"
        folder.mkdir(exist_ok=True)
        for rank, text in stacks.items():
            (folder / f"rank{rank}.stacks").write_text(text)
        found = {int(rank): [Span(*s) for s in own] for rank, own in spans.items() if own}
        if not found:  # a command that leaves no progress, or no agent that could tell
            return
        saved = {"spans": spans, "hosts": hosts, "offsets": offsets, "grid": grid}
        (folder / "spans.json").write_text(json.dumps(saved))
        trace = timeline.perfetto(found, hosts, offsets)
        (folder / "timeline.json").write_text(json.dumps(trace))
        if len(found) == len(hosts):
            axes = timeline.parse_grid(grid, len(found))
            places = {rank: (own[-1].step, own[-1].section) for rank, own in found.items()}
            (folder / "silent.txt").write_text(timeline.silent(places, axes))
            page = timeline.heat_html(timeline.own_share(found), axes)
            (folder / "heat.html").write_text(page)

    def report(self, text: str) -> None:
        """Writes report.txt: why the driver gave up."""
        (self.folder / "report.txt").write_text(text)
        self._say(text)

    def close(self) -> None:
        """Closes the file of events."""
        self._write()
        self._file.close()
