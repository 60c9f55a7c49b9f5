"""Rolling retraining: fits a new model on the last hours without an alert, while the watch runs.

The daemon stores what it read on disk, in pieces of ten minutes, and deletes the pieces in which an
alert was active. Every few hours a child process fits a model on the rest. The new model replaces
the old one only if it is no worse on the same data: it may not raise more alerts on quiet data, and
must name nearly as many (AS_GOOD) of the faults that are injected into that data. Networks that
learnt nothing fail this test, as do limits that a disturbance has widened. The old model stays as
MODEL.previous.

`python -m megajax.systems.minder.refit JOB` is that process. Legend: C metrics, N machines.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.worker import Worker
from megajax.monitor.samples import Grid
from megajax.systems.minder.detector import merged
from megajax.systems.minder.reporter import Lasting
from megajax.systems.minder.settings import LEAST, Settings

PIECE_S = 600  # (fit.SHORTEST) seconds of a piece
BEFORE_S = 60  # (chosen) before an alert's onset, of what is thrown away too
LEAST_S = 1800  # (chosen) of quiet seconds without a hole that the last stretch must have
JUDGED_S = 2700  # (chosen) of the last stretch, on which both models are compared
JUDGED_MACHINES = 64  # (chosen) of it
AS_GOOD = 0.9  # (chosen) of the faults that the old model names, the new one must name so many
NICE = 10  # (chosen) of the process


@dataclass(frozen=True)
class Plan:
    """How to fit. hours: between two fits, and of data for a fit. steps: training steps. settings:
    of the detector. metrics: names, in the order of the old model."""

    hours: float
    steps: int
    settings: Settings
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """The result of a fit. word: 'accepted', 'rejected' or 'failed'."""

    word: str
    message: str
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Refit:
    """Stores the data of a job and fits models on it in a child process."""

    def __init__(self, folder: Path, model: Path, plan: Plan, clock: Callable[[], float]):
        """folder: for the data; data that an earlier daemon stored there is used. model: file of
        the
        model that is replaced. plan: how to fit. clock: returns Unix seconds."""
        self._folder, self._model, self._plan = folder, model, plan
        self._new: list[Grid] = []
        self._dirty = False  # an alert lasted in what is collected
        self._due = clock() + 3600 * plan.hours
        self._child: Worker | None = None
        self._folder.mkdir(parents=True, exist_ok=True)

    # ---- data

    def keep(self, grid: Grid, lasting: Mapping[str, Lasting]) -> None:
        """Adds the next seconds, and deletes data in which one of the active alerts lasted.

        Raises: OSError if a piece cannot be written; it is then lost.
        """
        begin = self._new[0].start if self._new else grid.start
        self._new.append(grid)
        for one in lasting.values():
            since, last = one.alert.since - BEFORE_S, max(one.last, one.alert.at)
            self._dirty |= since < grid.end and last >= begin
            for path in self._pieces():
                if since < int(path.stem) + PIECE_S and last >= int(path.stem):
                    path.unlink(missing_ok=True)
        if grid.end - begin < PIECE_S:
            return
        quiet, self._new, self._dirty = ([] if self._dirty else self._new), [], False
        if quiet:
            piece = merged(quiet, self._plan.metrics, begin, begin + PIECE_S)
            arrays = {"values": piece.values_CNT, "machines": np.array(piece.machines, str)}
            files.write_arrays(self._folder / f"{piece.start}.npz", arrays, compress=True)
        most = max(1, round(3600 * self._plan.hours / PIECE_S))
        for path in self._pieces()[:-most]:
            path.unlink(missing_ok=True)

    def _pieces(self) -> list[Path]:
        paths = [p for p in self._folder.glob("*.npz") if p.stem.isdecimal()]
        return sorted(paths, key=lambda p: int(p.stem))

    # ---- the process

    def poll(self, now: float) -> Result | None:
        """Starts a fit when it is due; returns the result of a fit that has ended, or None.

        Args: now: Unix seconds. Raises: OSError if no process can be started.
        """
        if self._child is None:
            if now >= self._due and _longest(self._pieces()) >= LEAST_S:
                self._due = now + 3600 * self._plan.hours  # also if it cannot be started
                self._start()
            return None
        code = self._child.process.poll()
        if code is None:
            return None
        reports = list(self._child.messages())
        self._child.close()
        self._child = None
        return self._take(code, reports)

    def _start(self) -> None:
        plan = self._plan
        job = {
            "pieces": [str(p) for p in self._pieces()],
            "model": str(self._model),
            "candidate": str(self._candidate),
            "steps": plan.steps,
            "metrics": list(plan.metrics),
            "settings": dataclasses.asdict(plan.settings),
        }
        (self._folder / "job.json").write_text(json.dumps(job))
        with (self._folder / "fit.log").open("w") as log:
            program = [sys.executable, "-m", "megajax.systems.minder.refit"]
            # Ctrl-C reaches the daemon alone, which ends the child.
            self._child = Worker([*program, str(self._folder / "job.json")], stderr=log)

    @property
    def _candidate(self) -> Path:
        return self._folder / "candidate"

    def _take(self, code: int, reports: Sequence[Mapping[str, Any]]) -> Result:
        """Returns the result of an ended process; an accepted model replaces the old one."""
        log = self._folder / "fit.log"
        try:
            report = reports[-1]
            worse = str(report["worse"])
        except (LookupError, ValueError, TypeError):
            return Result(
                "failed",
                f"retraining failed (exit code {code}, see {log}): the model stays as it was",
            )
        if worse:
            return Result("rejected", f"retraining: {worse}; the model stays as it was", report)
        previous = self._model.with_name(f"{self._model.name}.previous")
        try:
            previous.unlink(missing_ok=True)
            os.link(self._model, previous)
            os.replace(self._candidate, self._model)
        except OSError as error:
            why = error.strerror or error
            return Result("failed", f"retraining: the new model cannot be put in place: {why}")
        message = (
            f"retrained on {report['seconds'] / 3600:.1f} h: {self._model} is new, the old one is "
            f"{previous.name}; named {report['named']} of {report['faults']} faults "
            f"(the old one {report['named_before']})"
        )
        return Result("accepted", message, report)

    def close(self) -> None:
        """Ends a running fit."""
        if self._child is not None:
            self._child.close()
            self._child = None


def _longest(pieces: Sequence[Path]) -> int:
    """Returns the seconds of the newest stretch of successive pieces."""
    starts = [int(p.stem) for p in pieces]
    length = min(1, len(starts))
    for before, after in zip(starts[-2::-1], starts[:0:-1], strict=False):
        if after - before > PIECE_S:
            break
        length += 1
    return PIECE_S * length


# ---- in the child process: fit, compare, save


def stretches(paths: Sequence[str | Path], metrics: Sequence[str]) -> list[Grid]:
    """Returns the grids of the pieces; successive pieces of the same machines are joined."""
    groups: list[list[Grid]] = []
    for path in paths:
        arrays = files.read_arrays(path, "piece of a job's grid")
        machines = tuple(str(m) for m in arrays["machines"])
        grid = Grid(int(Path(path).stem), 1, arrays["values"], machines, tuple(metrics))
        if len(machines) < LEAST:
            continue
        last = groups[-1][-1] if groups else None
        if last is not None and last.end == grid.start and last.machines == grid.machines:
            groups[-1].append(grid)
        else:
            groups.append([grid])
    return [merged(group, metrics) for group in groups]


def compare(old: Callable, new: Callable, grid: Grid) -> dict[str, Any]:
    """Compares two detectors on a quiet stretch of data, without and with injected faults.

    They judge its last JUDGED_S seconds, with at most JUDGED_MACHINES machines.

    A fault shifts one metric of one machine in the second half, by the distance of the 1st and the
    99th percentile of all machines.
    Args: old, new: each returns a detector that has seen no job.
    Returns: counts, and 'worse': why the new one must not be used; '': it may be used.
    """
    every = -(-len(grid.machines) // JUDGED_MACHINES)
    values_CNT = grid.values_CNT[:, ::every, -JUDGED_S:]
    start = grid.end - values_CNT.shape[2]
    part = Grid(start, 1, values_CNT, grid.machines[::every], grid.metrics)
    false_old, false_new = (len(make().update(part)) for make in (old, new))
    named_old = named_new = faults = 0
    for c in range(len(part.metrics)):
        values = part.values_CNT[c]
        if not np.isfinite(values).any():
            continue
        low, high = np.nanquantile(values, (0.01, 0.99))
        for number, sign in enumerate((1.0, -1.0)):
            machine = (3 * c + 7 * number) % len(part.machines)
            sick = part.values_CNT.copy()
            sick[c, machine, sick.shape[2] // 2 :] += sign * max(high - low, 1e-6)
            broken = dataclasses.replace(part, values_CNT=sick)
            hits = [
                any(a.machine == part.machines[machine] for a in make().update(broken))
                for make in (old, new)
            ]
            faults, named_old, named_new = faults + 1, named_old + hits[0], named_new + hits[1]
    worse = ""
    if false_new > false_old:
        worse = f"the new model raises {false_new} alerts on quiet data, the old one {false_old}"
    elif named_new < AS_GOOD * named_old:
        worse = f"the new model names {named_new} of {faults} faults, the old one {named_old}"
    return {
        "worse": worse,
        "faults": faults,
        "named": named_new,
        "named_before": named_old,
        "false": false_new,
        "false_before": false_old,
    }


def main(job: Path) -> int:
    """Fits, compares, saves the candidate; the last line of its output is the report."""
    import jax

    from megajax.systems.minder.detector import Detector

    os.nice(NICE)
    jax.config.update("jax_platforms", "cpu")  # GPUs of this host belong to the job
    said = files.read_object(job, 2**20)
    metrics, settings = said["metrics"], Settings(**said["settings"])
    grids = stretches(said["pieces"], metrics)
    if not grids:
        raise UserError(f"no stretch of {PIECE_S} s has {LEAST} machines")
    new = Detector.fit(
        grids,
        seed=0,
        metrics=metrics,
        steps=said["steps"],
        settings=settings,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report = compare(
        lambda: Detector.load(said["model"], settings), lambda: Detector(new.profile), grids[-1]
    )
    new.save(said["candidate"])
    seconds = sum(g.values_CNT.shape[2] for g in grids)
    kinds = int | float | str | bool
    facts = {name: x for name, x in new.profile.report.items() if isinstance(x, kinds)}
    print(json.dumps(report | {"seconds": seconds, "fit": facts}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
