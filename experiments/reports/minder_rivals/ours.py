"""Our detector as the evaluation runs it: in a job's order, with declared departures."""

from collections.abc import Sequence
from pathlib import Path

from experiments.reports.minder_rivals.view import Said
from megajax.monitor.samples import Grid
from megajax.systems.minder import Detector

DECLARED = 10.0  # seconds after which a departure is declared: clocks are up to 2 s wrong


def alerts(path: str | Path, grid: Grid, departures: Sequence[tuple[str, float]]) -> list[Said]:
    """Returns the alerts of a detector without history. departures: (machine, Unix s)."""
    detector = Detector.load(path)
    declared = [(at + DECLARED, machine) for machine, at in departures]
    cuts = sorted({grid.start, grid.end, *(int(at) for at, _ in declared if at < grid.end)})
    found = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        for at, machine in declared:
            if int(at) == begin:
                detector.leave(machine)
        values = grid.values_CNT[:, :, begin - grid.start : end - grid.start]
        part = Grid(begin, 1, values, grid.machines, grid.metrics)
        found += detector.update(part)
    return [Said(a.machine, a.metric, a.since, a.at, a.score, a.kind) for a in found]
