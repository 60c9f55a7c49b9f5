"""Records the metrics of machines under real stress: a trace to try detectors on.

    uv run scripts/record_trace.py --out=runs/trace     # 15 minutes
    uv run scripts/record_trace.py --out=runs/trace --seconds=5

Eight process groups of this host play machines (tests/machines.py). Each works a little every
second; one after the other is put under stress: processors, memory, disk, network (where they can
have networks of their own), then one is frozen (SIGSTOP), and the last is killed. Between these,
two things happen that are no fault of one machine: all are busy together, and one is busy for a
fifth of the time of a fault. A real Prometheus server scrapes their agents every second.

Writes machines.csv.gz (timestamp, machine, metric, value; megajax/monitor/sources/files.py reads
it) and machines.json (what happened, to whom, from when to when; `fault`: whether a detector should
name it). Needs Debian's prometheus. Exit code 2 without it. tests/golden has such a trace.
"""

import megajax.core.interrupted  # noqa: F401

import argparse
import datetime
import gzip
import json
import math
import sys
import tempfile
import time
from pathlib import Path

from megajax.monitor.samples import Grid, to_grid
from megajax.monitor.sources import prometheus
from tests import machines

COUNT = 8
METRICS = ("cpu_usage", "memory_usage", "disk_throughput", "tcp_throughput")
# kind, amount, machine (None: all), length in units, whether it is a fault of one machine
PLAN = (
    ("cpu", 1.0, 2, 1.0, True),
    ("cpu", 0.15, None, 1.0, False),
    ("memory", 600.0, 6, 1.0, True),
    ("cpu", 1.0, 4, 0.2, False),
    ("disk", 4.0, 1, 1.0, True),
    ("network", 5.0, 5, 1.0, True),
    ("frozen", 1.0, 3, 1.0, True),
    ("killed", 1.0, 0, 1.0, True),
)


def happen(fleet: list[machines.Machine], kind: str, amount: float, which: int | None) -> None:
    """Begins a kind of stress, or ends it if amount is 0."""
    for machine in fleet if which is None else [fleet[which]]:
        if kind == "killed":
            machine.kill()
        elif kind == "frozen":
            machine.freeze(amount > 0)
        else:
            machine.stress(kind, amount)


def record(fleet: list[machines.Machine], seconds: float, network: bool) -> list[dict]:
    """Applies all stresses of PLAN in turn. Returns when each of them began and ended."""
    events = []
    for kind, amount, which, length, fault in PLAN:
        time.sleep(seconds)
        if kind == "network" and not network:
            continue
        begin = time.time()
        happen(fleet, kind, amount, which)
        time.sleep(length * seconds)
        if kind != "killed":
            happen(fleet, kind, 0.0, which)
        machine = None if which is None else f"m{which}"
        events.append(
            {
                "kind": kind,
                "machine": machine,
                "start": round(begin, 1),
                "end": round(time.time(), 1),
                "fault": fault,
            }
        )
        print(f"{kind} on {machine or 'all'}: {events[-1]['end'] - events[-1]['start']:.0f} s")
    return events


def write(path: Path, grid: Grid, names: dict[str, str]) -> None:
    """Writes a grid in long form, without missing samples."""
    with gzip.open(path, "wt") as f:
        f.write("timestamp,machine,metric,value\n")
        for c, metric in enumerate(grid.metrics):
            for n, machine in enumerate(grid.machines):
                for t, value in enumerate(grid.values_CNT[c, n].tolist()):
                    if math.isfinite(value):
                        f.write(f"{grid.start + t},{names[machine]},{metric},{value:.4g}\n")


def main(arguments: list[str]) -> int:
    """Records one trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="length of each stress and pause"
    )
    flags = parser.parse_args(arguments)
    if why := machines.is_missing():
        print(f"error: {why}", file=sys.stderr)
        return 2
    network = machines.can_have_networks()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with machines.machines(COUNT, place, network) as fleet:
            names = {m.instance: f"m{k}" for k, m in enumerate(fleet)}
            with machines.server(place / "server", list(names)) as server:
                time.sleep(15)
                begin = math.floor(time.time())
                events = record(fleet, flags.seconds, network)
                source = prometheus(server.url, metrics=METRICS, timeout_s=60)
                grid = to_grid(source.read(begin, math.floor(time.time())))
    flags.out.mkdir(parents=True, exist_ok=True)
    write(flags.out / "machines.csv.gz", grid, names)
    about = {
        "recorded": datetime.date.today().isoformat(),
        "by": f"scripts/record_trace.py --seconds={flags.seconds:g}",
        "machines": sorted(names.values()),
        "events": events,
    }
    (flags.out / "machines.json").write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
