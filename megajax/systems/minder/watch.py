"""The daemon: reads the metrics of a job every few seconds and names the faulty machine.

A read that fails is repeated, and the missed seconds are read later, up to `gap_s` of them. Only a
server that refuses the first request ends the watch: whatever else a server says, and whatever a
window makes the detector raise, is an event. The daemon's time is that of the samples: an
alert's `at` is the second up to which the detector had read.

Source: Minder (NSDI 2025, arXiv 2411.01791), section 5; there the detector is called every few
minutes and reads 15 minutes each time. Not here: reporting (reporter.py), retraining (refit.py).
"""

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megajax.core import files
from megajax.core.errors import UserError
from megajax.monitor.alerts import Alert
from megajax.monitor.samples import Grid, Samples, nothing_in, of_machines
from megajax.monitor.sources.http_query import Refused, plain
from megajax.systems.minder.detector import Detector, Recent, Runner, grid_of
from megajax.systems.minder.refit import Refit
from megajax.systems.minder.reporter import Reporter

INTERVALS = 2  # scrapes that may be incomplete before now (sources/server.py)
FORGET_S = 3600.0  # (chosen) a hole after which a detector's history says nothing
BACK_S = 60.0  # (chosen) by which a clock may go back without a new beginning
QUIET_S = 600.0  # (chosen) without a note, after which it is said again; between two sentences
# about what still goes wrong
CHANGED_S = 60.0  # (chosen) between two sentences about what goes wrong in ever other words
CELLS = 2**25  # (chosen: 128 MiB; 1,500 machines and 9 metrics have 12 million) of a grid
MACHINES = 2**13  # (measured: a process of 0.8 GB) of a job within an hour; 65,000 GPUs
MOST_NAMES = 2**20  # (chosen) bytes of a file of names
PIECE_S = 900  # (chosen) seconds that are read at a time
SMALLEST_S = 60  # (chosen) of a server that is too slow for more


class Source(Protocol):
    """A source of the metrics of machines, such as monitor/sources/server.py, Server.

    It may have an attribute `interval_s`, the longest scrape interval in seconds: the daemon then
    reads only samples that are older than two such intervals. Without it, 0 is assumed.
    """

    def read(self, start: float, end: float) -> Samples:
        """Returns the samples of [start, end), Unix seconds."""
        ...


@dataclass(frozen=True)
class Pace:
    """When and what the daemon reads; times in seconds.

    period_s: time between two reads. lag_s: a read ends so long before now, and at least two scrape
    intervals. history_s: how much of the past the first read covers. gap_s: how much is read later
    after the source was away; older seconds are skipped. machines: regular expression for the names
    of machines that are judged; '': all. left: file that is read again each time, with the names of
    machines, or of their hosts, that left the job on purpose, one a line; None: no file.
    """

    period_s: float = 8.0
    lag_s: float = 5.0
    history_s: float = 600.0
    gap_s: float = 900.0
    machines: str = ""
    left: Path | None = None


class Watch:
    """Watches one job."""

    def __init__(
        self,
        source: Source,
        load: Callable[[], Detector],
        reporter: Reporter,
        pace: Pace = Pace(),
        refit: Refit | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Watches with the detector that `load` returns.

        Args: load: returns a detector that has seen no job; called again for each new model.
          reporter: reports alerts. refit: fits new models; None: never. clock: Unix seconds.
        """
        self._source, self._pace, self._clock = source, pace, clock
        self._reporter, self._refit = reporter, refit
        self._runner, self._recent = Runner(load, QUIET_S), Recent(max(pace.history_s, pace.gap_s))
        self._next: int | None = None  # the first second that was not read yet
        self._piece, self._has_read = PIECE_S, False
        self._source_trouble = Trouble("reading", reporter)
        self._window_trouble = Trouble("judging", reporter)
        self._empty_trouble = Trouble("metrics", reporter)
        self._left_trouble = Trouble("machines that left", reporter)
        self._refit_trouble = Trouble("retraining", reporter)

    def run(self, stop: threading.Event) -> None:
        """Watches until `stop` is set.

        Raises: Refused if the source refuses the first request that it answers.
        """
        while not stop.is_set():
            began = time.monotonic()
            self.look()
            is_up = self._reporter.gauges["source_up"] > 0
            if is_up and self._next is not None and self._end() - self._next > self._piece:
                continue  # what was missed is read at once
            stop.wait(max(0.0, self._pace.period_s - (time.monotonic() - began)))

    @property
    def seconds(self) -> int:
        """Number of seconds of metrics that were judged."""
        return self._reporter.count["judged_seconds_total"]

    def look(self) -> None:
        """Reads the new seconds and judges them."""
        span = self._span()
        if span is None:
            return
        began = time.monotonic()
        samples = self._read(*span)
        self._reporter.count["read_seconds_total"] += time.monotonic() - began  # type: ignore
        if samples is None:
            return
        grid = self._grid(samples, *span)
        if grid is None:
            return
        self._next = span[1]
        self._recent.add(grid)
        self._judge(grid)
        if self._refit is not None:
            self._learn(grid, self._refit)

    # ---- time

    def _end(self) -> int:
        lag_s = max(self._pace.lag_s, INTERVALS * getattr(self._source, "interval_s", 0.0))
        return math.floor(self._clock() - lag_s)

    def _span(self) -> tuple[int, int] | None:
        """Returns [start, end) of what is to be read now, in Unix seconds."""
        end, pace = self._end(), self._pace
        if self._next is None:
            self._next = end - math.ceil(max(pace.history_s, pace.period_s))
        if end < self._next - BACK_S:
            self._reporter.event(
                "clock", f"the clock went back by {self._next - end} s: the detector begins anew"
            )
            self._begin(end)
            return None
        if (missed := end - self._next - math.ceil(max(pace.gap_s, pace.history_s))) > 0:
            self._reporter.count["skipped_seconds_total"] += missed
            message = f"{missed} s are too long ago and will not be judged"
            self._reporter.event("gap", message, seconds=missed)
            self._next += missed
            if missed > FORGET_S:
                self._begin(self._next)
        return (self._next, min(end, self._next + self._piece)) if end > self._next else None

    def _begin(self, at: int) -> None:
        """Begins anew, without history."""
        self._next = at
        self._runner.begin()
        self._recent.clear()

    # ---- reading

    def _read(self, start: int, end: int) -> Samples | None:
        reporter = self._reporter
        try:
            samples = self._source.read(start, end)
        except Exception as error:  # whatever a server makes its reader raise ends no watch
            if isinstance(error, Refused) and not self._has_read:
                raise
            self._fail(_cause(error))
            return None
        reporter.gauges["source_up"] = 1.0
        self._piece, self._has_read = min(PIECE_S, 2 * self._piece), True
        self._source_trouble.gone()
        return samples

    def _fail(self, why: str) -> None:
        """Reports a read that gave nothing, and asks for less the next time."""
        self._reporter.count["source_failures_total"] += 1
        self._reporter.gauges["source_up"] = 0.0
        self._piece = max(SMALLEST_S, self._piece // 2)  # it may be too slow for so much
        self._source_trouble.there(why)

    def _grid(self, samples: Samples, start: int, end: int) -> Grid | None:
        """Returns the samples as a grid; None, with a report, if there are too many machines or
        metrics."""
        samples = of_machines(samples, self._pace.machines)
        machines = set(samples.machines).union(self._runner.detector.machines)
        if len(machines) > MACHINES:
            self._fail(
                f"{len(machines):,} machines have come and gone; {MACHINES:,} are watched at most, "
                "so that the detector begins anew (--only)"
            )
            self._begin(start)
            return None
        if (cells := len(samples.machines) * len(samples.metrics) * (end - start)) > CELLS:
            self._fail(
                f"{len(samples.machines):,} machines with {len(samples.metrics)} metrics in "
                f"{end - start} s are {cells:,} values; {CELLS:,} are watched at most (--only)"
            )
            return None
        return grid_of(samples)

    # ---- judging

    def _judge(self, grid: Grid) -> None:
        reporter, began = self._reporter, time.monotonic()
        nothing = nothing_in(grid)
        if nothing:
            self._empty_trouble.there("; ".join([nothing, *grid.notes]))
        else:
            self._empty_trouble.gone()
        self._leave()
        alerts, notes, error = self._runner.judge(grid)
        if error is None:
            self._window_trouble.gone()
        else:
            reporter.count["refused_windows_total"] += 1
            if not isinstance(error, UserError):
                self._window_trouble.there(f"{_cause(error)}; the detector begins anew")
                self._recent.clear()
            elif not nothing:
                self._window_trouble.there(str(error))
        reporter.count["update_seconds_total"] += time.monotonic() - began  # type: ignore
        if not nothing:
            reporter.count["judged_seconds_total"] += grid.values_CNT.shape[2]
            for note in filter(self._runner.is_new, notes):
                reporter.count["notes_total"] += 1
                reporter.event("note", note)
        self._hear(alerts, grid.end)

    def _leave(self) -> None:
        """Removes the machines that left on purpose."""
        if self._pace.left is None:
            return
        try:
            names = set(files.read_bytes(self._pace.left, MOST_NAMES).decode().split())
        except FileNotFoundError:
            return  # nobody has left yet
        except (OSError, ValueError) as error:
            self._left_trouble.there(f"{self._pace.left}: {getattr(error, 'strerror', error)}")
            return
        self._left_trouble.gone()
        detector = self._runner.detector
        for machine in detector.machines:
            if machine in names or machine.rpartition(":")[0] in names:
                detector.leave(machine)

    def _hear(self, alerts: list[Alert], end: int) -> None:
        reporter, detector = self._reporter, self._runner.detector
        reporter.hear(alerts, detector.named, detector.scores, end, self._recent)
        reporter.gauges["judged_timestamp_seconds"] = float(end)
        reporter.gauges["machines"] = float(len(detector.machines))

    # ---- a new model

    def _learn(self, grid: Grid, refit: Refit) -> None:
        try:
            refit.keep(grid, self._reporter.ledger.lasting)
            result = refit.poll(self._clock())
        except OSError as error:  # a full disk, or no process can be started
            self._refit_trouble.there(str(error))
            return
        self._refit_trouble.gone()
        if result is None:
            return
        self._reporter.fits[result.word] += 1
        self._reporter.event("fit", result.message, result=result.word, **result.report)
        if result.word != "accepted":
            return
        try:
            self._runner.begin()
        except UserError as error:
            self._reporter.event("fit", f"the new model is not used: {error}", result="failed")
            return
        self._reporter.gauges["model_timestamp_seconds"] = time.time()
        alerts, end = [], 0
        for grid in self._recent:  # it takes over what the old one knew of the last minutes
            with contextlib.suppress(UserError):
                alerts += self._runner.detector.update(grid)
            end = grid.end
        self._hear(alerts, end)


class Trouble:
    """A lasting problem, which is reported when it begins, changes and ends.

    While its cause is worded differently each time, it is reported once in CHANGED_S seconds.
    """

    def __init__(self, what: str, reporter: Reporter):
        """what: name of the activity that fails, with which messages begin.

        reporter: reports it.
        """
        self._what, self._reporter = what, reporter
        self._count, self._since, self._said = 0, 0.0, ("", 0.0)

    def there(self, why: str) -> None:
        """The problem occurred. why: its cause."""
        now, key = time.monotonic(), re.sub(r"\d+", "#", why)
        if not self._count:
            self._since = now
        self._count += 1
        quiet_s = QUIET_S if key == self._said[0] else CHANGED_S
        if self._count == 1 or now - self._said[1] > quiet_s:
            self._said = (key, now)
            more = f" ({self._count} times so far)" if self._count > 1 else ""
            self._reporter.event("trouble", f"{self._what}: {why}{more}; watching goes on")

    def gone(self) -> None:
        """The problem did not occur this time."""
        if self._count:
            seconds = time.monotonic() - self._since
            failures = f"{self._count} failure{'s' * (self._count > 1)}"
            self._reporter.event(
                "trouble", f"{self._what}: works again, after {failures} in {seconds:.0f} s"
            )
        self._count, self._said = 0, ("", 0.0)


def _cause(error: Exception) -> str:
    """Returns the text of an error; of an unforeseen one, its type too."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {plain(str(error))[:200]}"
