"""The daemon of experiments/minder.py: its flags, and how its parts are put together."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.reports import minder_sources as sources_
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.monitor import exporter, results
from megajax.monitor.alertmanager import Alertmanager
from megajax.monitor.minder_config import first_line
from megajax.monitor.sources.http_query import shown
from megajax.systems.minder import Detector, Settings
from megajax.systems.minder.ledger import Ledger
from megajax.systems.minder.refit import Plan, Refit
from megajax.systems.minder.telling import Teller
from megajax.systems.minder.watch import Pace, Watch

FROM_SERVER = ("train", "watch")


@dataclass(frozen=True)
class Server(Checked):
    """The Prometheus server."""

    prometheus: str | None = option(
        None,
        "address of the Prometheus server, http(s)://host:9090",
        verbs=FROM_SERVER,
        flag="prometheus",
    )
    user: str | None = option(
        None, "user name at the server, with --password_file", verbs=FROM_SERVER, flag="user"
    )
    password_file: str | None = option(
        None,
        "file whose first line is the user's password",
        verbs=FROM_SERVER,
        flag="password_file",
    )
    token_file: str | None = option(
        None,
        "file whose first line is a bearer token for the server",
        verbs=FROM_SERVER,
        flag="token_file",
    )
    ca_file: str | None = option(
        None,
        "PEM file of the authority that signed the server's certificate",
        verbs=FROM_SERVER,
        flag="ca_file",
    )
    queries: str | None = option(
        None, "JSON file {metric: expression}; none: the metrics of known exporters",
        verbs=FROM_SERVER, flag="queries",
    )  # fmt: skip
    only: str = option(
        "", "regular expression for the label instance of the job's machines; empty: all",
        verbs=FROM_SERVER, flag="only",
    )  # fmt: skip
    timeout_s: float = option(
        10.0,
        "longest time for an answer of the server",
        "s",
        verbs=FROM_SERVER,
        flag="timeout_s",
        above=0,
    )


@dataclass(frozen=True)
class WatchConfig(Checked):
    """The daemon."""

    alertmanager: str | None = option(
        None, "address of Alertmanager, http(s)://[user@]host:9093", verbs=("watch",),
        flag="alertmanager",
    )  # fmt: skip
    alertmanager_password_file: str | None = option(
        None, "file whose first line is Alertmanager's password", verbs=("watch",),
        flag="alertmanager_password_file",
    )  # fmt: skip
    period_s: float = option(
        8.0, "time between two reads", "s", verbs=("watch",), flag="period_s", at_least=0.5
    )
    lag_s: float = option(
        5.0, "a read ends so long before now, and at least two scrape intervals", "s",
        verbs=("watch",), flag="lag_s", at_least=0,
    )  # fmt: skip
    history_s: float = option(
        600.0, "how much of the past the first read covers", "s", verbs=("watch",),
        flag="history_s", at_least=0, at_most=3600,
    )  # fmt: skip
    gap_s: float = option(
        900.0, "how much is read later after the server was away; older seconds are skipped", "s",
        verbs=("watch",), flag="gap_s", at_least=60, at_most=3600,
    )  # fmt: skip
    left: str | None = option(
        None, "file of machines or hosts that left on purpose, one a line; read again each time",
        verbs=("watch",), flag="left",
    )  # fmt: skip
    metrics_port: int | None = option(
        None, "port for the daemon's own metrics; 0: any free port; none: not served",
        verbs=("watch",), flag="metrics_port", at_least=0, at_most=65535,
    )  # fmt: skip
    metrics_host: str = option(
        "127.0.0.1",
        "address at which the daemon's own metrics are served",
        verbs=("watch",),
        flag="metrics_host",
    )
    heatmap: str | None = option(
        None, ".html, .png or .svg file in which a picture of all scores is kept", verbs=("watch",),
        flag="heatmap",
    )  # fmt: skip
    retrain_hours: float = option(
        0.0, "time between two fits of a new model on data without alerts; 0: never", "h",
        verbs=("watch",), flag="retrain_hours", at_least=0,
    )  # fmt: skip


def source(s: Server, metrics: Sequence[str] | None) -> Any:
    """Returns the Prometheus server. metrics: of a model; None: Minder's."""
    if s.prometheus is None:
        raise UserError("which server? Give its address (--prometheus=http://HOST:9090)")
    if (s.user is None) != (s.password_file is None):
        raise UserError("a user needs a password and the reverse (--user, --password_file)")
    if s.user is not None and s.token_file is not None:
        raise UserError("give a user or a token, and not both (--user, --token_file)")
    return sources_.server(
        s.prometheus, metrics, s.queries, user=s.user, ca_file=s.ca_file,
        password=first_line(s.password_file, "password_file"),
        token=first_line(s.token_file, "token_file"), timeout_s=s.timeout_s,
    )  # fmt: skip


def watch(
    w: WatchConfig,
    server: Server,
    path: Path,
    settings_of: Callable[[Settings], Settings],
    steps: int,
    out: str,
) -> int:
    """Watches until SIGTERM or Ctrl-C; returns the exit code.

    path: of the model. settings_of: makes settings of the model's. steps: of a retraining. out:
    folder of all that is written.
    """
    if not path.exists():
        raise UserError(
            f"model={path} is not there; experiments/minder.py train --model={path} makes one "
            "(--model)"
        )
    first = Detector.load(path)  # what is wrong with it comes before all else
    learnt = first.profile.settings
    settings = settings_of(learnt)
    reader = source(server, first.profile.metrics)
    folder = results.writable_folder(f"{out}/watch")
    heatmap = _picture(w.heatmap)
    ledger = Ledger(folder / "alerts.json", settings.clear_s)
    with contextlib.ExitStack() as stack:
        alertmanager = None
        if w.alertmanager is not None:
            alertmanager = Alertmanager(
                w.alertmanager, password=first_line(w.alertmanager_password_file,
                                                 "alertmanager_password_file"),
                ca_file=server.ca_file, tell=_log,
            )  # fmt: skip
        teller = Teller(folder, ledger, _log, alertmanager, heatmap)
        stack.callback(teller.close)
        teller.gauges["model_timestamp_seconds"] = path.stat().st_mtime
        if w.metrics_port is not None:
            address = stack.enter_context(_serving(w.metrics_host, w.metrics_port, teller))
            _log(f"metrics of the daemon: http://{address}/metrics")
        refit = None
        if w.retrain_hours > 0:
            plan = Plan(w.retrain_hours, steps, settings, first.profile.metrics)
            refit = Refit(folder / "quiet", path, plan, time.time)
            stack.callback(refit.close)
        left = None if w.left is None else expand(w.left, "left")
        pace = Pace(w.period_s, w.lag_s, w.history_s, w.gap_s, server.only, left)
        daemon = Watch(reader, lambda: Detector.load(path, settings), teller, pace, refit)
        for sentence in (ledger.trouble, _mismatch(settings, learnt)):
            if sentence:
                teller.event("note", sentence)
        teller.event(
            "start", f"watching {shown(str(server.prometheus))}: "
            f"{len(first.profile.metrics)} metrics, continuity "
            f"{settings.continuity_s:g} s, every {w.period_s:g} s; {folder}",
        )  # fmt: skip
        number = _until_told(daemon)
        lasting = len(ledger.lasting)
        teller.event("stop", f"stopped: {daemon.seconds} s judged, {lasting} alerts last")
    return 0 if number == signal.SIGTERM else 130


def _until_told(daemon: Watch) -> int:
    """Runs until a signal comes; returns its number."""
    stop, got = threading.Event(), []

    def hear(number: int, _: Any) -> None:
        if got:
            raise KeyboardInterrupt  # asked twice
        got.append(number)
        stop.set()

    before = {n: signal.signal(n, hear) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        daemon.run(stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return got[0]


@contextlib.contextmanager
def _serving(host: str, port: int, teller: Teller) -> Iterator[str]:
    """Serves the daemon's metrics; yields the address."""
    try:
        server = exporter.Server(host, port, teller.rows)
    except UserError as error:
        raise UserError(
            str(error).replace("port=", "metrics_port=", 1)
            .replace("(--host, --port)", "(--metrics_host, --metrics_port)")
        ) from None  # fmt: skip
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        server.shutdown()
        server.server_close()


def _picture(name: str | None) -> Path | None:
    if name is None:
        return None
    path = expand(name, "heatmap")
    if path.suffix not in (".html", ".png", ".svg"):
        raise UserError(f"heatmap={name} must end in .html, .png or .svg (--heatmap)")
    results.writable_folder(str(path.parent), "heatmap")
    return path


def _mismatch(settings: Settings, learnt: Settings) -> str:
    """Returns a sentence about limits that were learnt for another continuity."""
    if settings.ticks == learnt.ticks:
        return ""
    return (
        f"the model's limits were learnt for a continuity of {learnt.continuity_s:g} s; for "
        f"{settings.continuity_s:g} s, train with --continuity_s={settings.continuity_s:g}"
    )


def _log(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)
