"""What a driver leaves behind: events.jsonl, metrics.prom, blocklist, report.txt, and evidence.

The evidence of an attempt: the stacks of each rank, timeline.json (open it in ui.perfetto.dev),
silent.txt (which ranks are furthest behind, on the grid), heat.html, and spans.json, from which the
others are made. metrics.prom has Prometheus' text format and is replaced atomically, for
node_exporter's textfile collector or a file server. blocklist has one excluded host a line. If the
disk takes no data, evidence is lost and the job goes on; the next event that is written has the
number of lost files and events.
"""

import contextlib
import errno
import json
import os
import queue
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megajax.core import files
from megajax.core.errors import UserError
from megajax.monitor import timeline
from megajax.monitor.records import Lines, Lossy, Prometheus, Record

SHARE = "own_work_share"  # of slow_rank.py, in usual steps
# Rules that name a rank for being sick, and not for what it printed.
BLAMES = ("hang", "slow", "minder", "straggler", "stall", "stopped", "nan", "exit")
EVERY_S = 5.0  # (chosen) seconds between rewrites of metrics.prom without an event


class Journal:
    """Writes into one folder, and prints the same for a person."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        """Appends to the files of an earlier driver. say: prints a line."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._say = folder, say
        self.run = secrets.token_hex(8)  # by which checkpoints know its attempts
        self._began = time.monotonic()
        self._lines = Lines(folder / "events.jsonl")
        self.lost = 0  # files and events that the disk did not take
        self._faults: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._metrics = Prometheus()
        self._named: dict[int, str] = {}  # what was said of a rank in this attempt
        self._shares: dict[int, float] = {}  # own work beyond the others', by the rule `slow`
        self._written = 0.0

    def last_attempt(self) -> int:
        """Returns the number of the last attempt of earlier drivers in this folder, or -1."""
        names = (p.name.removeprefix("attempt") for p in self.folder.glob("attempt*"))
        return max((int(n) for n in names if n.isascii() and n.isdecimal()), default=-1)

    def begin(self, attempt: int) -> None:
        """Makes the folder of an attempt, so that no later driver uses its number, and drops the
        values of earlier ranks."""
        self._metrics = Prometheus()
        self._named.clear()
        self._shares.clear()
        with self._may_lose():
            (self.folder / f"attempt{attempt}").mkdir(parents=True, exist_ok=True)

    def event(self, name: str, message: str = "", **values: Any) -> None:
        """Records an event, and prints its message if it has one."""
        clock = round(time.monotonic() - self._began, 3)  # goes on evenly, whatever sets the time
        row = {"time": round(time.time(), 3), "clock": clock, "event": name, "message": message}
        row |= values | ({"lost": self.lost} if self.lost else {})
        if self._lines.write(json.dumps(row)):
            self.lost = 0
        else:
            self._lose(self._lines.why)
        if name in ("fault", "warning"):
            self._faults[f'megajax_{name}s_total{{rule="{values["rule"]}"}}'] += 1
        if name in ("fault", "warning") and values["rule"] in BLAMES:
            self._named |= dict.fromkeys(values.get("ranks", ()), message)
        if message:
            self._say(f"[supervise] {name}: {message}")
        self._write()

    def gauge(self, **values: float) -> None:
        """Sets gauges; they appear as megajax_<name>."""
        self._gauges |= values
        if time.monotonic() - self._written > EVERY_S:
            self._write()

    def take(self, records: Sequence[Record]) -> None:
        """Remembers the newest values of an attempt for metrics.prom."""
        self._metrics.write(records)
        for r in records:
            if r.name == SHARE and r.rank is not None and isinstance(r.value, int | float):
                self._shares[r.rank] = float(r.value)

    def _write(self) -> None:
        self._written = time.monotonic()
        lines = ["# TYPE megajax_faults_total counter", "# TYPE megajax_warnings_total counter"]
        lines += [f"{name} {count}" for name, count in sorted(self._faults.items())]
        for name, value in self._gauges.items():
            lines += [f"# TYPE megajax_{name} gauge", f"megajax_{name} {value:g}"]
        with self._may_lose():
            lines += self._metrics.lines()
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            fresh = self.folder / "metrics.prom.new"
            fresh.write_text("\n".join(lines) + "\n")
            fresh.replace(self.folder / "metrics.prom")

    def _lose(self, why: str) -> None:
        if not self.lost:
            self._say(f"[supervise] cannot write into {self.folder}: {why}. The job goes on")
        self.lost += 1

    @contextlib.contextmanager
    def _may_lose(self) -> Iterator[None]:
        """What is written inside is lost when the disk does not take it."""
        try:
            yield
        except OSError as error:
            self._lose(error.strerror or str(error))

    def exclude(self, host: str, why: str) -> None:
        """Adds a host to the blocklist."""
        with self._may_lose(), open(self.folder / "blocklist", "a") as file:
            file.write(host + "\n")
        self.event("excluded", f"{host}: {why}", host=host)

    def readmit(self, host: str, why: str) -> None:
        """Removes a host from the blocklist."""
        path = self.folder / "blocklist"
        with self._may_lose():
            if path.exists():
                left = [line for line in path.read_text().splitlines() if line != host]
                files.write_whole(path, "".join(f"{line}\n" for line in left))
        self.event("readmitted", f"{host}: {why}", host=host)

    def evidence(
        self,
        attempt: int,
        stacks: Mapping[str, str],
        spans: Mapping[str, list],
        hosts: Mapping[int, str],
        offsets: Mapping[str, float],
        grid: str | None,
    ) -> None:
        """Writes what the ranks left: stacks {rank: text}, spans {rank: sections, the open one
        last}.

        hosts: {rank: its host}. offsets: {host: offset of its clock}. grid: as timeline.parse_grid
        reads it.
        """
        folder = self.folder / f"attempt{attempt}"
        with self._may_lose():
            folder.mkdir(parents=True, exist_ok=True)
            for rank, text in stacks.items():
                (folder / f"rank{rank}.stacks").write_text(text)
            sections = timeline.spans_of(spans)
            if not sections:  # a command that leaves no progress, or no agent that could tell
                return
            saved = {
                "spans": spans,
                "hosts": hosts,
                "offsets": offsets,
                "grid": grid,
                "shares": self._shares,
            }
            (folder / "spans.json").write_text(json.dumps(saved))
            trace = timeline.perfetto(sections, hosts, offsets)
            (folder / "timeline.json").write_text(json.dumps(trace))
            if len(sections) == len(hosts):
                axes = timeline.parse_grid(grid, len(sections))
                last = {rank: spans[-1] for rank, spans in sections.items()}
                places = {rank: (span.step, span.section) for rank, span in last.items()}
                (folder / "silent.txt").write_text(timeline.silent(places, axes))
                shares = timeline.own_share(sections)
                shares = {r: max(x, self._shares.get(r, x)) for r, x in shares.items()}
                page = timeline.heat_html(shares, axes, self._named)
                (folder / "heat.html").write_text(page)

    def report(self, text: str) -> None:
        """Writes report.txt: why the driver gave up."""
        with self._may_lose():
            (self.folder / "report.txt").write_text(text)
        self._say(text)

    def close(self) -> None:
        """Closes the file of events."""
        self._write()
        self._lines.close()


# ---- what the driver prints, through a thread: a terminal that is stopped must not stop the driver
#
# Output that nobody takes, because of a full disk, a closed pipe or a paused terminal, is dropped.


TEXTS = 1000  # (chosen) that wait to be printed; a text is at most what a log grows in a period
LAST_S = 2.0  # (chosen) for the last of them at the end


class Speaker:
    """Prints texts in order."""

    def __init__(self) -> None:
        """Prints nothing yet."""
        self._texts: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(TEXTS)
        self._dropped = 0
        self._thread = threading.Thread(target=self._print, name="speaker", daemon=True)
        self._thread.start()

    def say(self, stream: TextIO, text: str) -> None:
        """Prints a text as it is, soon. Never waits."""
        with contextlib.suppress(queue.Full):
            if self._dropped:
                self._texts.put_nowait((stream, f"[{self._dropped} texts were not printed]\n"))
                self._dropped = 0
            self._texts.put_nowait((stream, text))
            return
        self._dropped += 1

    def close(self) -> None:
        """Waits a little until the last texts are printed."""
        with contextlib.suppress(queue.Full):
            self._texts.put(None, timeout=LAST_S)
            self._thread.join(LAST_S)

    def _print(self) -> None:
        while (next_ := self._texts.get()) is not None:
            stream = Lossy(next_[0])
            with contextlib.suppress(ValueError):  # it is closed
                stream.write(next_[1])
                stream.flush()


# ---- the folder of a driver: events, logs and evidence of one job, of one driver at a time


def new_folder(kind: str = "supervised") -> Path:
    """Returns a folder of this driver alone in runs/KIND, named by the time."""
    parent = Path("runs", kind).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S")
    for other in ("", *(f"-{i}" for i in range(2, 1000))):
        try:
            (parent / f"{name}{other}").mkdir()
            return parent / f"{name}{other}"
        except FileExistsError:
            continue  # of another driver that started in the same second
    raise UserError(f"{parent} is full of folders of this second (--out)")


def hold(out: Path) -> int:
    """Returns the lock of a folder, which lasts as long as this process. Raises: UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            tempfile.TemporaryFile(dir=out).close()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk may lose telemetry
                raise
        lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
        is_free = files.lock(lock)
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror} (--out)") from None
    if not is_free:
        raise UserError(f"another driver writes into {out} (--out)")
    return lock
