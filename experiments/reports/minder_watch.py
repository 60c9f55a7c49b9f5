"""The daemon of experiments/minder.py, the sources of its metrics, and the time of a call."""

import contextlib
import math
import os
import resource
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.monitor import exporter, results, sources
from megajax.monitor.fleet import cases
from megajax.monitor.fleet.faults import METRICS
from megajax.monitor.fleet.roles import Setting
from megajax.monitor.fleet.simulator import Fleet
from megajax.monitor.minder_config import first_line
from megajax.monitor.samples import Grid, of_machines
from megajax.monitor.sources import convert
from megajax.monitor.sources import server as server_
from megajax.monitor.sources.http_query import shown
from megajax.systems.minder import Detector, Settings
from megajax.systems.minder.detector import grid_of, merged
from megajax.systems.minder.refit import Plan, Refit
from megajax.systems.minder.reporter import Alertmanager, Ledger, Reporter
from megajax.systems.minder.settings import TICK
from megajax.systems.minder.watch import Pace, Watch

# ---- sources


PIECE_S = 240  # seconds that are read at a time: 2,300 machines and 15 metrics in one read
RETRIES = 1  # the daemon reads again anyway
SIZES = (8, 16, 64)  # machines of simulated jobs, as far as --machines
# Beside them what shows a sick host where GPUs or their network cannot be seen.
DEFAULT = (*convert.WATCHED, "memory_usage", "disk_throughput", "tcp_throughput")
HEALTHY = 0.8  # share of the simulated jobs without a fault


def paths(text: str) -> list[Path]:
    """'a.csv,b.parquet' -> paths. Raises: UserError for one that is not there."""
    existing = [expand(word, "source") for word in text.split(",") if word]
    for path in existing:
        if not path.is_file():
            raise UserError(f"source={path} is no file (--source)")
    return existing


def simulated(jobs: int, machines: int, seed: int, say: Callable[[str], Any]) -> list[Grid]:
    """Returns simulated jobs of up to so many machines."""
    sizes = tuple(n for n in SIZES if n < machines) + (machines,)
    say(f"simulating {jobs} jobs of {', '.join(map(str, sizes))} machines")
    return [case.read() for case in cases(jobs, sizes, seed, split="train", healthy=HEALTHY)]


def server(url: str, metrics: Sequence[str] | None, queries: str | None, **secrets: Any) -> Any:
    """Returns a Prometheus server as a source.

    metrics: names of the metrics that a model reads; None: those of Minder, and those of the host.
    queries: name of a JSON file {metric: expression}. Raises: UserError.
    """
    if queries is not None:
        said = files.read_object(expand(queries, "queries"), 2**20, "queries")
        if not said or not all(isinstance(v, str) for v in said.values()):
            raise UserError(
                f"queries={queries} must be {{metric: expression}}, with one at least (--queries)"
            )
        if metrics is not None and not set(said) & set(metrics):
            raise UserError(
                f"queries={queries} has none of the model's metrics: {', '.join(metrics)} "
                "(--queries)"
            )
        return sources.prometheus(url, queries=said, retries=RETRIES, **secrets)
    known = server_.all_metrics()
    asked = [m for m in (DEFAULT if metrics is None else metrics) if m in known]
    if not asked:
        raise UserError(
            f"the model's metrics ({', '.join(metrics or ())}) are none that exporters show: give "
            "an expression for each (--queries)"
        )
    return sources.prometheus(url, metrics=asked, retries=RETRIES, **secrets)


def recorded(
    source: Any, hours: float, only: str, copy: Path, say: Callable[[str], Any]
) -> list[Grid]:
    """Returns the last hours of a server as one job.

    copy: the file to which they are written, so that a training that was stopped continues with
      the same data.
    """
    if copy.exists():
        arrays = files.read_arrays(copy, "recording of a job's metrics")
        machines, metrics = (tuple(map(str, arrays[n])) for n in ("machines", "metrics"))
        say(f"{copy} holds what was read before")
        return [Grid(int(arrays["start"]), 1, arrays["values"], machines, metrics)]
    end = math.floor(time.time() - 5)
    start = end - round(3600 * hours)
    grids = []
    for at in range(start, end, PIECE_S):
        samples = source.read(at, min(at + PIECE_S, end))
        grids.append(grid_of(of_machines(samples, only)))
        say(f"read {(grids[-1].end - start) / 60:.0f} of {60 * hours:.0f} minutes")
        for note in samples.notes:
            say(f"note: {note}")
    grid = merged(grids, sorted({m for g in grids for m in g.metrics}))
    first = int(np.isfinite(grid.values_CNT).any((0, 1)).argmax())  # the server is younger
    grid = replace(grid, start=grid.start + first, values_CNT=grid.values_CNT[:, :, first:])
    arrays = {"start": grid.start, "values": grid.values_CNT}
    names = {"machines": np.array(grid.machines, str), "metrics": np.array(grid.metrics, str)}
    files.write_arrays(copy, arrays | names)
    return [grid]


def forget(folder: Path) -> None:
    """Deletes what a training stored, so that the next one begins anew."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another training is under way beside it
        folder.parent.rmdir()


# ---- the daemon


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
        None,
        "JSON file {metric: expression}; none: the metrics of known exporters",
        verbs=FROM_SERVER,
        flag="queries",
    )
    only: str = option(
        "",
        "regular expression for the label instance of the job's machines; empty: all",
        verbs=FROM_SERVER,
        flag="only",
    )
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
        None,
        "address of Alertmanager, http(s)://[user@]host:9093",
        verbs=("watch",),
        flag="alertmanager",
    )
    alertmanager_password_file: str | None = option(
        None,
        "file whose first line is Alertmanager's password",
        verbs=("watch",),
        flag="alertmanager_password_file",
    )
    period_s: float = option(
        8.0, "time between two reads", "s", verbs=("watch",), flag="period_s", at_least=0.5
    )
    lag_s: float = option(
        5.0,
        "a read ends so long before now, and at least two scrape intervals",
        "s",
        verbs=("watch",),
        flag="lag_s",
        at_least=0,
    )
    history_s: float = option(
        600.0,
        "how much of the past the first read covers",
        "s",
        verbs=("watch",),
        flag="history_s",
        at_least=0,
        at_most=3600,
    )
    gap_s: float = option(
        900.0,
        "how much is read later after the server was away; older seconds are skipped",
        "s",
        verbs=("watch",),
        flag="gap_s",
        at_least=60,
        at_most=3600,
    )
    left: str | None = option(
        None,
        "file of machines or hosts that left on purpose, one a line; read again each time",
        verbs=("watch",),
        flag="left",
    )
    metrics_port: int | None = option(
        None,
        "port for the daemon's own metrics; 0: any free port; none: not served",
        verbs=("watch",),
        flag="metrics_port",
        at_least=0,
        at_most=65535,
    )
    metrics_host: str = option(
        "127.0.0.1",
        "address at which the daemon's own metrics are served",
        verbs=("watch",),
        flag="metrics_host",
    )
    heatmap: str | None = option(
        None,
        ".html, .png or .svg file in which a picture of all scores is kept",
        verbs=("watch",),
        flag="heatmap",
    )
    retrain_hours: float = option(
        0.0,
        "time between two fits of a new model on data without alerts; 0: never",
        "h",
        verbs=("watch",),
        flag="retrain_hours",
        at_least=0,
    )


def source(s: Server, metrics: Sequence[str] | None) -> Any:
    """Returns the Prometheus server. metrics: names that a model reads; None: those of Minder."""
    if s.prometheus is None:
        raise UserError("which server? Give its address (--prometheus=http://HOST:9090)")
    if (s.user is None) != (s.password_file is None):
        raise UserError("a user needs a password and the reverse (--user, --password_file)")
    if s.user is not None and s.token_file is not None:
        raise UserError("give a user or a token, and not both (--user, --token_file)")
    return server(
        s.prometheus,
        metrics,
        s.queries,
        user=s.user,
        ca_file=s.ca_file,
        password=first_line(s.password_file, "password_file"),
        token=first_line(s.token_file, "token_file"),
        timeout_s=s.timeout_s,
    )


def watch(
    w: WatchConfig,
    server: Server,
    path: Path,
    settings_of: Callable[[Settings], Settings],
    steps: int,
    out: str,
) -> int:
    """Watches until SIGTERM or Ctrl-C; returns the exit code.

    path: file of the model. settings_of: returns the settings to use for those of the model. steps:
    training steps of a retraining. out: folder of all files that are written.
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
    heatmap = heatmap_path(w.heatmap)
    ledger = Ledger(folder / "alerts.json", settings.clear_s)
    with contextlib.ExitStack() as stack:
        alertmanager = None
        if w.alertmanager is not None:
            alertmanager = Alertmanager(
                w.alertmanager,
                password=first_line(w.alertmanager_password_file, "alertmanager_password_file"),
                ca_file=server.ca_file,
                tell=_log,
            )
        reporter = Reporter(folder, ledger, _log, alertmanager, heatmap)
        stack.callback(reporter.close)
        reporter.gauges["model_timestamp_seconds"] = path.stat().st_mtime
        if w.metrics_port is not None:
            address = stack.enter_context(metrics_server(w.metrics_host, w.metrics_port, reporter))
            _log(f"metrics of the daemon: http://{address}/metrics")
        refit = None
        if w.retrain_hours > 0:
            plan = Plan(w.retrain_hours, steps, settings, first.profile.metrics)
            refit = Refit(folder / "quiet", path, plan, time.time)
            stack.callback(refit.close)
        left = None if w.left is None else expand(w.left, "left")
        pace = Pace(w.period_s, w.lag_s, w.history_s, w.gap_s, server.only, left)
        daemon = Watch(reader, lambda: Detector.load(path, settings), reporter, pace, refit)
        for sentence in (ledger.trouble, mismatch(settings, learnt)):
            if sentence:
                reporter.event("note", sentence)
        reporter.event(
            "start",
            f"watching {shown(str(server.prometheus))}: "
            f"{len(first.profile.metrics)} metrics, continuity "
            f"{settings.continuity_s:g} s, every {w.period_s:g} s; {folder}",
        )
        number = until_told(daemon)
        lasting = len(ledger.lasting)
        reporter.event("stop", f"stopped: {daemon.seconds} s judged, {lasting} alerts last")
    return 0 if number == signal.SIGTERM else 130


def until_told(daemon: Watch) -> int:
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
def metrics_server(host: str, port: int, reporter: Reporter) -> Iterator[str]:
    """Serves the daemon's metrics; yields the address."""
    try:
        server = exporter.Server(host, port, reporter.rows)
    except UserError as error:
        raise UserError(
            str(error)
            .replace("port=", "metrics_port=", 1)
            .replace("(--host, --port)", "(--metrics_host, --metrics_port)")
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        server.shutdown()
        server.server_close()


def heatmap_path(name: str | None) -> Path | None:
    """Returns the file that --heatmap names. Raises: UserError for another kind of file."""
    if name is None:
        return None
    path = expand(name, "heatmap")
    if path.suffix not in (".html", ".png", ".svg"):
        raise UserError(f"heatmap={name} must end in .html, .png or .svg (--heatmap)")
    results.writable_folder(str(path.parent), "heatmap")
    return path


def mismatch(settings: Settings, learnt: Settings) -> str:
    """Returns a sentence about limits that were learnt for another continuity."""
    if settings.ticks == learnt.ticks:
        return ""
    return (
        f"the model's limits were learnt for a continuity of {learnt.continuity_s:g} s; for "
        f"{settings.continuity_s:g} s, train with --continuity_s={settings.continuity_s:g}"
    )


def _log(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


# ---- time of a call
#
# How long the detector takes for a large job: one call over minutes of it, and its daily work.
#
# The paper's figure (arXiv 2411.01791, section 6) is 3.6 s for 15 minutes of 1,500 machines and
# seven metrics, the query included; here the metrics are in memory.


PAPER_S = 3.6
START = 1_700_000_400 // TICK * TICK  # Unix seconds; nothing depends on it
HOUR = 3600


@dataclass(frozen=True)
class TimeConfig(Checked):
    """What is timed."""

    machines: int = option(1500, "machines of the job", at_least=4, verbs=("time",))
    minutes: int = option(15, "minutes of metrics in one call", at_least=5, verbs=("time",))
    calls: int = option(7, "timed calls, each by a new detector", at_least=1, verbs=("time",))


def measure(
    cfg: TimeConfig, model: Path, out: str, tell: Callable[[str], Any] = print
) -> Mapping[str, Any]:
    """Times a saved detector on a healthy simulated job; writes OUT/minder_time.json.

    `call`: all minutes at once. `online`: the same minutes, one tick at a time, as a daemon reads.
    Raises: UserError for a model that cannot be read or has metrics that the simulator lacks.
    """
    import jax

    folder = results.writable_folder(out)
    metrics = Detector.load(model).profile.metrics
    if strange := [m for m in metrics if m not in METRICS]:
        raise UserError(
            f"model={model} judges {strange[0]!r}, which simulated jobs do not show: give a model "
            "that was fitted on simulated jobs (--model)"
        )
    fleet = Fleet(cfg.machines, 7, metrics, Setting(), start=START)
    begin = START + HOUR
    end = begin + 60 * cfg.minutes
    grid = fleet.read(begin, end)
    rows: list[dict[str, Any]] = []
    for k in range(cfg.calls + 1):  # the first one compiles
        detector = Detector.load(model)
        began = time.perf_counter()
        alerts = detector.update(grid)
        rows.append(
            {
                "part": "call" if k else "first call",
                "s": time.perf_counter() - began,
                "alerts": len(alerts),
            }
        )
    detector, took = Detector.load(model), []
    for at in range(begin, end - TICK + 1, TICK):
        part = fleet.read(at, at + TICK)
        began = time.perf_counter()
        detector.update(part)
        took.append(time.perf_counter() - began)
    rows.append(
        {"part": "online", "s": statistics.mean(took), "slowest_s": max(took), "of_s": TICK}
    )
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    about = results.facts(jax.devices()[0].device_kind, "simulated") | {
        "cores": os.cpu_count(),
        "machines": cfg.machines,
        "metrics": len(metrics),
        "minutes": cfg.minutes,
        "paper_s": PAPER_S,
        "memory_gib": of_process / 2 ** (30 if sys.platform == "darwin" else 20),
    }
    path = folder / "minder_time.json"
    results.write(path, about, rows)
    tell(f"{text(about | {'rows': rows})}\n{path}")
    return about | {"rows": rows}


def text(result: Mapping[str, Any]) -> str:
    """Returns the figures of a result as a sentence."""
    first, calls, online = (
        [r for r in result["rows"] if r["part"] == part]
        for part in ("first call", "call", "online")
    )
    took, tick = [row["s"] for row in calls], online[0]
    return (
        f"{statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f} s in {len(took)} "
        f"calls) for {result['minutes']} minutes of {result['machines']:,} machines and "
        f"{result['metrics']} metrics on {result['cores']} cores; {first[0]['s']:.1f} s in the "
        f"first call of a process, which makes its programs; online "
        f"{tick['s'] / tick['of_s']:.4f} s for a second of data, where the slowest "
        f"tick of {tick['of_s']} s took {tick['slowest_s']:.2f} s; largest memory of "
        f"the process {result['memory_gib']:.2f} GiB, the metrics and the simulator included"
    )
