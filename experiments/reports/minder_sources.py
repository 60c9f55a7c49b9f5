"""Where experiments/minder.py gets metrics from: files, a Prometheus server, simulated jobs."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.monitor import sources
from megajax.monitor.fleet import cases
from megajax.monitor.samples import Grid, of_machines
from megajax.monitor.sources import convert
from megajax.monitor.sources import server as server_
from megajax.systems.minder.pending import grid_of
from megajax.systems.minder.recent import merged

PIECE_S = 240  # seconds that are read at a time: 2,300 machines and 15 metrics in one read
RETRIES = 1  # the daemon reads again anyway
SIZES = (8, 16, 64)  # machines of simulated jobs, as far as --machines
# Beside them what shows a sick host where GPUs or their network cannot be seen.
DEFAULT = (*convert.WATCHED, "memory_usage", "disk_throughput", "tcp_throughput")
HEALTHY = 0.8  # share of the simulated jobs without a fault


def paths(text: str) -> list[Path]:
    """'a.csv,b.parquet' -> paths. Raises: UserError for one that is not there."""
    found = [expand(word, "source") for word in text.split(",") if word]
    for path in found:
        if not path.is_file():
            raise UserError(f"source={path} is no file (--source)")
    return found


def simulated(jobs: int, machines: int, seed: int, say: Callable[[str], Any]) -> list[Grid]:
    """Returns simulated jobs of up to so many machines."""
    sizes = tuple(n for n in SIZES if n < machines) + (machines,)
    say(f"simulating {jobs} jobs of {', '.join(map(str, sizes))} machines")
    return [case.read() for case in cases(jobs, sizes, seed, split="train", healthy=HEALTHY)]


def server(url: str, metrics: Sequence[str] | None, queries: str | None, **secrets: Any) -> Any:
    """Returns a Prometheus server as a source.

    metrics: of a model; None: those that Minder uses, and the host's. queries: a JSON file with
    expressions of its own. Raises: UserError.
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
    source: Any, hours: float, only: str, kept: Path, say: Callable[[str], Any]
) -> list[Grid]:
    """Returns the last hours of a server as one job. kept: where they are written, so that a
    training that was stopped goes on with the same."""
    if kept.exists():
        with np.load(kept, allow_pickle=False) as file:
            machines, metrics = (tuple(map(str, file[n])) for n in ("machines", "metrics"))
            say(f"{kept} holds what was read before")
            return [Grid(int(file["start"]), 1, file["values"], machines, metrics)]
    end = math.floor(time.time() - 5)
    start = end - round(3600 * hours)
    grids = []
    for at in range(start, end, PIECE_S):
        samples = source.read(at, min(at + PIECE_S, end))
        grids.append(grid_of(of_machines(samples, only)))
        say(f"read {(grids[-1].end - start) / 60:.0f} of {60 * hours:.0f} minutes")
        for note in samples.notes:
            say(f"note: {note}")
    found = merged(grids, sorted({m for g in grids for m in g.metrics}))
    first = int(np.isfinite(found.values_CNT).any((0, 1)).argmax())  # the server is younger
    found = replace(found, start=found.start + first, values_CNT=found.values_CNT[:, :, first:])
    part = kept.with_name(f".part.{kept.name}")  # NumPy adds .npz to a name without it
    np.savez(
        part, start=found.start, values=found.values_CNT, machines=np.array(found.machines, str),
        metrics=np.array(found.metrics, str),
    )  # fmt: skip
    part.replace(kept)
    return [found]


def forget(folder: Path) -> None:
    """Takes away what a training kept: the next one begins anew."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another training is under way beside it
        folder.parent.rmdir()
