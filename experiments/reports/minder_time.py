"""How long the detector takes for a large job: one call over minutes of it, and its daily work.

The paper's figure (arXiv 2411.01791, section 6) is 3.6 s for 15 minutes of 1,500 machines and seven
metrics, the query included; here the metrics are in memory.
"""

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.monitor import results
from megajax.monitor.fleet.faults import METRICS
from megajax.monitor.fleet.roles import Setting
from megajax.monitor.fleet.simulator import Fleet
from megajax.systems.minder import Detector
from megajax.systems.minder.settings import TICK

PAPER_S = 3.6
START = 1_700_000_400 // TICK * TICK  # Unix seconds; nothing depends on it
HOUR = 3600


@dataclass(frozen=True)
class Config(Checked):
    """What is timed."""

    machines: int = option(1500, "time: machines of the job", at_least=4, verbs=("time",))
    minutes: int = option(15, "time: minutes of metrics in one call", at_least=5, verbs=("time",))
    calls: int = option(7, "time: timed calls, each by a new detector", at_least=1, verbs=("time",))


def measure(
    cfg: Config, model: Path, out: str, tell: Callable[[str], Any] = print
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
        rows.append({"part": "call" if k else "first call", "s": time.perf_counter() - began,
                     "alerts": len(alerts)})  # fmt: skip
    detector, took = Detector.load(model), []
    for at in range(begin, end - TICK + 1, TICK):
        part = fleet.read(at, at + TICK)
        began = time.perf_counter()
        detector.update(part)
        took.append(time.perf_counter() - began)
    rows.append({"part": "online", "s": statistics.mean(took), "slowest_s": max(took),
                 "of_s": TICK})  # fmt: skip
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    about = results.facts(jax.devices()[0].device_kind, "simulated") | {
        "cores": os.cpu_count(), "machines": cfg.machines, "metrics": len(metrics),
        "minutes": cfg.minutes, "paper_s": PAPER_S,
        "memory_gib": of_process / 2 ** (30 if sys.platform == "darwin" else 20),
    }  # fmt: skip
    path = folder / "minder_time.json"
    results.write(path, about, rows)
    tell(f"{text(about | {'rows': rows})}\n{path}")
    return about | {"rows": rows}


def text(found: Mapping[str, Any]) -> str:
    """Returns the figures of a result as a sentence."""
    first, calls, online = (
        [r for r in found["rows"] if r["part"] == part] for part in ("first call", "call", "online")
    )
    took, tick = [row["s"] for row in calls], online[0]
    return (
        f"{statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f} s in {len(took)} "
        f"calls) for {found['minutes']} minutes of {found['machines']:,} machines and "
        f"{found['metrics']} metrics on {found['cores']} cores; {first[0]['s']:.1f} s in the first "
        f"call of a process, which makes its programs; online {tick['s'] / tick['of_s']:.4f} s for "
        f"a second of data, where the slowest tick of {tick['of_s']} s took "
        f"{tick['slowest_s']:.2f} s; largest memory of the process {found['memory_gib']:.2f} GiB, "
        "the metrics and the simulator included"
    )
