"""Sends alerts to Prometheus' Alertmanager, which groups, silences and routes them to people.

Source: its HTTP API v2 (POST /api/v2/alerts). An alert is what its labels say: it is sent again
while it lasts, because Alertmanager ends one that it has not heard of until `endsAt`, and once more
when it has ended. A thread of its own sends, so that a server that is slow or away delays nobody.
No jax import.
"""

import datetime
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megajax.monitor.sources.http_query import Client, Unavailable, plain

RESEND_S = 60.0  # (Prometheus' rule manager: --rules.alert.resend-delay)
LASTS = 4  # (the same) times RESEND_S after which an alert that is not sent again has ended
LONGEST_PAUSE_S = 60.0  # (chosen) between tries
KEEP_S = 3600.0  # (chosen) for which the end of an alert is kept for a server that is away


@dataclass(frozen=True)
class Firing:
    """An alert. labels: its identity. since, ended: Unix seconds; ended: None: it lasts."""

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
    """One server. failures, sent: how many requests failed, and how many were accepted."""

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
        """Takes an alert, or the end of one, and sends it soon."""
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
        """Sends all alerts; returns what went wrong, or ''."""
        oldest = time.monotonic() - KEEP_S
        with self._lock:
            kept = {k: x for k, x in self._alerts.items() if x[0].ended is None or x[1] > oldest}
            self._alerts, batch = kept, dict(kept)
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
