"""Runs the detector in a child process, so that a driver or a trainer never waits for it.

The detector needs jax, which a driver must not load, and a trainer's devices are busy. So records
are sent to a child process (beside_main.py) on the CPU, and its alerts come back as lines of JSON.
Threads do this; batches that the child does not accept in time are dropped and counted. If the
child ends, this is reported once and the job continues without it. No jax import.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megajax.monitor.records import Record
from megajax.monitor.slow_rank import METRICS
from megajax.systems.minder.alert import Alert

# What of a trainer's environment a process of its own on the CPU must not have.
ON_CPU = (
    "env", "-u", "XLA_FLAGS", "-u", "JAX_COORDINATOR_ADDRESS", "-u", "JAX_NUM_PROCESSES",
    "-u", "JAX_PROCESS_ID", "JAX_PLATFORMS=cpu", "CUDA_VISIBLE_DEVICES=",
)  # fmt: skip
CLOSE_S = 2.0  # (chosen) for a thread to see the end of the child
WAITING = 600  # (chosen) batches of records, of about a second, that wait for the child


class Beside:
    """The child process. `send` and `take` return at once."""

    def __init__(self, options: dict[str, Any]):
        """Starts the child.

        Args: options: of beside_main.py: "model", path of a saved detector; "settings", {field:
          value} of Settings; "server", arguments of sources.prometheus, or None.
        """
        self._queue: queue.Queue[Any] = queue.Queue(WAITING)
        self._queue.put(options)  # not among its arguments, which everybody sees
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.dropped = 0
        self._child = subprocess.Popen(
            [*ON_CPU, sys.executable, "-m", "megajax.systems.minder.beside_main"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._last = ""  # words of the child to standard error
        self._threads = [
            threading.Thread(target=work, name="minder", daemon=True)
            for work in (self._write, self._read, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, records: Sequence[Record]) -> None:
        """Sends those records to the child that are metrics of machines."""
        rows = [list(r) for r in records if r.name in METRICS and isinstance(r.value, int | float)]
        if rows:
            self._put(rows)

    def begin(self, hosts: Sequence[str]) -> None:
        """Tells the child the hosts of an attempt; hosts that are not among them leave the job.

        The machines of a Prometheus server are matched with these names.
        """
        self._put({"hosts": [*hosts]})

    def _put(self, what: Any) -> None:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self.dropped += 1

    def take(self) -> tuple[list[Alert], list[str], dict[str, float]]:
        """Returns (alerts, notes, {host: newest score}) that came since the last call."""
        alerts, notes, scores = [], [], {}
        with contextlib.suppress(queue.Empty):
            while True:
                said = self._lines.get_nowait()
                notes += said.get("notes", [])
                scores |= said.get("scores", {})
                for one in said.get("alerts", []):
                    pairs = tuple((m, s) for m, s in one.pop("deviations"))
                    alerts.append(Alert(**one, deviations=pairs))
        return alerts, notes, scores

    def close(self) -> None:
        """Ends the child."""
        self._child.kill()
        self._child.wait()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _write(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while (what := self._queue.get()) is not None:
                self._child.stdin.write(json.dumps(what) + "\n")
                self._child.stdin.flush()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._child.stdout:
                self._lines.put(json.loads(line))
        code = self._child.wait()
        why = f": {self._last}" if self._last else ""
        if code >= 0:  # else it was told to end
            message = f"the detector of metrics ended (exit code {code}){why}; the job goes on"
            self._lines.put({"notes": [message]})

    def _listen(self) -> None:
        assert self._child.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._child.stderr:
                self._last = line.strip()[:300] or self._last


def as_line(
    alerts: Sequence[Alert], notes: Sequence[str], scores: dict[str, float]
) -> dict[str, Any]:
    """Returns the message of the child, which is sent as one line of JSON."""
    return {"alerts": [asdict(a) for a in alerts], "notes": [*notes], "scores": scores}
