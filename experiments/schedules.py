"""Pipeline schedules side by side: as papers draw them and as our one program executes them.

    uv run experiments/schedules.py [--stages=4 --microbatches=8 --chunks=2]

Times are SIMULATED, in units of one forward pass of a stage; no device and no jax is needed. F is a
forward pass, B the gradient of the inputs, W the gradient of the weights. Ideal: every stage runs
an operation as soon as its inputs exist, and B and W cost as much as F. Lockstep: a tick ends when
all stages have ended it, which is what a single SPMD program does. Where inputs are stashed, B (and
a W that is split from it) runs F again; a split W runs the backward chain of its layers again.
The command writes schedules.json and schedules.svg into --out; docs/parallelism.md shows the table.
"""

import megajax.core.interrupted  # noqa: F401

import sys
from dataclasses import dataclass

from experiments.reports.reporting import closing
from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, nearest_multiples
from megajax.monitor import results
from megajax.schedule import build, simulate
from megajax.schedule.ir import Table
from megajax.schedule.simulator import lockstep
from megajax.schedule.trace import gantt

IDEAL = {"F": 1.0, "B": 1.0, "W": 1.0}
# A table that does not split the backward pass gives B the sum of B and W.
RESIDUALS = {False: IDEAL, True: {"F": 1.0, "B": 1.0, "W": 2.0}}
INPUTS = {False: {"F": 1.0, "B": 1.0, "W": 2.0}, True: {"F": 1.0, "B": 2.0, "W": 3.0}}


@dataclass(frozen=True)
class Config(Checked):
    """What to draw."""

    stages: int = option(4, "number of pipeline stages", at_least=1)
    microbatches: int = option(8, "micro-batches of a step", at_least=1)
    chunks: int = option(
        2, "groups of layers on each stage, for the interleaved schedule", at_least=1
    )
    out: str = results.out_option("schedules")

    def __post_init__(self):
        """Refuses what no schedule can be made of, by the names of these flags."""
        super().__post_init__()
        if self.microbatches % self.stages:
            raise UserError(
                f"microbatches={self.microbatches} must be a multiple of stages={self.stages} for "
                f"the interleaved schedule; {nearest_multiples(self.microbatches, self.stages)} "
                "(--microbatches)"
            )


COLUMNS = {
    "schedule": "schedule",
    "ideal makespan": "ideal",
    "idle": "bubble",
    "lockstep, residuals stashed": "residuals",
    "lockstep, inputs stashed": "inputs",
    "inputs kept": "places",
}
PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def row(name: str, table: Table) -> dict:
    """Returns what the table costs, in forward passes of a stage."""
    ideal = simulate(table, IDEAL)
    return {
        "schedule": name,
        "ideal": ideal.makespan,
        "bubble": f"{100 * ideal.bubble_fraction:.0f} %",
        "residuals": lockstep(table, RESIDUALS[table.is_split]).makespan,
        "inputs": lockstep(table, INPUTS[table.is_split]).makespan,
        "places": table.check(),
    }


def main() -> int:
    """Prints the table, writes JSON and chart."""
    cfg, _ = config.from_flags(PRESETS)
    sizes = cfg.stages, cfg.microbatches
    tables = {
        "gpipe": build.gpipe(*sizes),
        "1f1b": build.one_f_one_b(*sizes),
        f"interleaved, {cfg.chunks} chunks": build.interleaved(*sizes, cfg.chunks),
        "zero_bubble": build.zero_bubble(*sizes),
    }
    rows = [row(name, table) for name, table in tables.items()]
    print(results.columns(rows, COLUMNS))
    out = results.writable_folder(cfg.out)
    device = f"{cfg.stages} stages, {cfg.microbatches} microbatches"
    results.write(out / "schedules.json", results.facts(device, "simulated"), rows)
    titles = {f"{r['schedule']}: {r['bubble']} of all time idle": r["schedule"] for r in rows}
    charts = {title: simulate(tables[name], IDEAL) for title, name in titles.items()}
    gantt(charts, out / "schedules.svg", "forward passes of a stage")
    print(
        "Times are in forward passes of a stage, simulated; no paper's number stands beside them. "
        f"Of {cfg.stages} stages' time with {cfg.microbatches} micro-batches, "
        + ", ".join(f"{r['schedule']} idles {r['bubble']}" for r in rows)
        + "."
    )
    print(f"{out}/schedules.json and .svg")
    print(closing(config.start_name()))
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
