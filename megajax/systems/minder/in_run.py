"""--detector=minder of a training run without a driver: its processes watch one another.

Once a period, a thread of each process writes what an agent would report (progress, records,
counters of its host) into the job's key-value store, so that a process that hangs is noticed. The
first process judges all reports as a driver would, with the rules of run.py. It can only report:
alerts go to its console and into minder.jsonl of the run's folder. Under scripts/supervise.py the
driver judges instead.
"""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from megajax.core import mesh
from megajax.core.errors import UserError
from megajax.monitor import heartbeat
from megajax.monitor.alerts import Kind
from megajax.monitor.detectors import Limits, Watchdog
from megajax.monitor.heartbeat import Heartbeat
from megajax.monitor.meter import HostMeter
from megajax.monitor.minder_config import MinderConfig
from megajax.monitor.records import Lines, Record, newest, parse, without_host
from megajax.monitor.timers import Timers
from megajax.systems.elastic import shared
from megajax.systems.minder.run import NAME, RESPONSES, RunMinder

FOLDER = "megajax/minder"
PROGRESS = ("beat", "section", "loss", "own_s", "step_s", "has_bad_state")
PERIOD_S = 1.0  # (chosen)
MEET_S = 300.0  # (chosen) for all processes to say where they are


def watched_timers() -> tuple[Timers, Path]:
    """Returns (timers whose progress another thread can read, the file of that progress).

    The file is in a folder of this process (shared.py), whose lock it holds until it ends.
    Raises: UserError.
    """
    place = shared.root()
    shared.sweep(place)  # of processes that were killed
    try:
        folder, _ = shared.claim(place)
    except OSError as error:
        raise UserError(
            f"cannot make a folder for the progress of this process in {place}: {error.strerror} "
            "(--detector=minder)"
        ) from None
    path = folder / "progress"
    return Timers(Heartbeat(path)), path


class InRun:
    """The thread of a process; a sink of its records too."""

    def __init__(
        self,
        options: MinderConfig,
        prometheus: str | None,
        progress: Path,
        run_dir: Path,
        say: Callable[[str], object],
        period_s: float = PERIOD_S,
    ):
        """Starts the thread.

        Args: progress: file of watched_timers. run_dir: folder into which the first process writes.
          say: prints a line on its console. period_s: seconds between two reports.
        """
        self._progress, self._period, self._say = progress, period_s, say
        self._store = mesh.job_store()
        self._rank, self._size = jax.process_index(), jax.process_count()
        self._host = socket.gethostname()
        self._meter, self._guard = HostMeter(), threading.Lock()
        self._records: list[Record] = []
        self._done = threading.Event()
        self._folder = run_dir
        self._minder: RunMinder | None = None
        if self._rank == 0:
            self._lines = Lines(run_dir / "minder.jsonl")
            self._minder = RunMinder(options, prometheus, run_dir, self._tell, lambda _: None)
            if self._size == 1:
                say("minder: one process alone: there is nobody to compare it with")
            say("minder: alerts are told only; scripts/supervise.py --detector=minder acts on them")
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    # ---- monitor.records.Sink

    def write(self, records: Sequence[Record]) -> None:
        """Keeps the newest records of this process."""
        with self._guard:
            self._records = newest([*self._records, *records])

    def close(self) -> None:
        """Ends the thread."""
        self._done.set()
        self._thread.join(2 * self._period + 5)
        if self._minder is not None:
            self._minder.close()
        shutil.rmtree(self._progress.parent, ignore_errors=True)

    # ---- the thread

    def _run(self) -> None:
        try:
            if self._store is not None:
                self._put(f"now/{self._rank}", json.dumps([self._host, []]))
            dog = self._meet() if self._rank == 0 else None
            while not self._done.wait(self._period):
                rows = [without_host(r) for r in self._look()]
                if self._store is not None:
                    self._put(f"now/{self._rank}", json.dumps([self._host, rows]))
                if dog is not None:
                    self._judge(dog, {self._rank: (self._host, rows)} | self._others())
        except Exception as error:  # the job's store may end before this process does
            if not self._done.is_set() and self._rank == 0:
                self._say(f"minder: watches no more: {error!r:.200}")

    def _look(self) -> list[Record]:
        """Returns what an agent would report of this process."""
        now, host, rank, meter = time.time(), self._host, self._rank, self._meter
        found = [
            Record(now, host, None, device, None, n, value)
            for device, values in {None: meter.host(self._folder), **meter.devices()}.items()
            for n, value in values.items()
        ]
        with self._guard:
            found += [r for r in self._records if r.device is None]
            self._records = []
        progress = heartbeat.read(self._progress)
        if progress is not None:
            seen = {n: getattr(progress, n) for n in PROGRESS} | meter.process(os.getpid())
            step = progress.step
            found += [Record(now, host, rank, None, step, n, v) for n, v in seen.items()]
        return found

    def _put(self, name: str, value: str) -> None:
        self._store.key_value_set(f"{FOLDER}/{name}", value, allow_overwrite=True)

    def _others(self) -> dict[int, tuple[str, list]]:
        if self._store is None:
            return {}
        found = self._store.key_value_dir_get(f"{FOLDER}/now/")
        return {int(k.rsplit("/", 1)[1]): tuple(json.loads(v)) for k, v in found}

    def _meet(self) -> Watchdog:
        """Waits until every process has said where it is."""
        end = time.monotonic() + MEET_S
        said: dict[int, tuple[str, list]] = {0: (self._host, [])}
        while len(said) < self._size and time.monotonic() < end and not self._done.wait(0.2):
            said |= self._others()
        names = [host for host, _ in said.values()]
        # A process that is frozen does not report, whatever others of its host do.
        self._names = {
            rank: host if names.count(host) == 1 else f"{host}/{rank}"
            for rank, (host, _) in sorted(said.items())
        }
        hosts = {name: [rank] for rank, name in self._names.items()}
        assert self._minder is not None
        self._heard: dict[int, float] = {}
        responses: dict[str, Kind] = {rule: "warn" for rule in RESPONSES}
        return Watchdog(
            hosts, Limits(), time.monotonic(), self._period, {NAME: self._minder.attempt}, responses
        )

    def _judge(self, dog: Watchdog, said: dict[int, tuple[str, list]]) -> None:
        for rank, (_, rows) in said.items():
            if (name := self._names.get(rank)) is None:
                continue
            records = parse(name, rows)
            at = max((r.time for r in records), default=0.0)
            if at > self._heard.get(rank, 0.0):
                self._heard[rank] = at
                dog.hear(time.monotonic(), name, records)
        for action in dog.judge(time.monotonic()):
            values = {"rule": action.rule, "ranks": action.ranks, "hosts": action.hosts}
            self._tell("alert", action.message, **values, step=action.step)

    def _tell(self, event: str, message: str, **values: Any) -> None:
        row = {"time": round(time.time(), 3), "event": event, "message": message} | values
        self._lines.write(json.dumps(row))
        self._say(f"minder: {message}")
