"""ByteCheckpoint: rows, goals, a plan, the figure and the table of measured seconds."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports.reporting import panels, read, rows_of, rows_table, save, source
from megajax.checkpoint import planner
from megajax.monitor import results

# (ByteCheckpoint, table of section 6: stall against PyTorch's own format, vDiT 4B on 128 A100s)
PAPER_STALL = 61.37 / 0.38
BASE = {"stall": "one copy", "whole": "write and sync", "load": "read"}
# The machine's own time over ours must be at least this (chosen before it was measured).
GOALS = {"stall": 1 / 1.2, "whole": 0.7, "load": 0.7}
TITLES = {"stall": "the loop stands still", "whole": "until the step counts", "load": "load"}
COLOURS = {
    "ours": "#0072B2",
    "ours, read back": "#56B4E9",
    "orbax": "#E69F00",
    "orbax, waits": "#D55E00",
    "machine": "#999999",
}


def seconds(call: Callable[[], Any]) -> float:
    """Returns how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def summarise(times: dict[tuple[str, str], list[float]], nbytes: int) -> list[dict[str, Any]]:
    """Returns a row for each measurement: seconds, rate, and the ratio to the time that the machine
    itself needs."""
    rows = []
    for (what, how), samples in times.items():
        p10, median, p90 = (float(x) for x in np.percentile(samples, (10, 50, 90)))
        machine = float(np.median(times[what, BASE[what]]))
        rows.append(
            {
                "what": what,
                "how": how,
                "median_s": median,
                "p10_s": p10,
                "p90_s": p90,
                "runs": len(samples),
                "gb_per_s": nbytes / median / 1e9,
                "times_the_machine": median / machine,
            }
        )
    return sorted(
        rows, key=lambda row: ("stall whole load".split().index(row["what"]), row["median_s"])
    )


def goals(times: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """Returns a row for each goal: the median, over the repetitions, of the time of the plain file
    operation divided by ours.

    A row also says how many times faster ours is than Orbax, and than Orbax that the loop waits
    for.
    """
    rows = []
    for what, least in GOALS.items():
        ours = np.array(times[what, "ours"])

        def over(how: str, what: str = what, ours: np.ndarray = ours) -> float | None:
            samples = times.get((what, how))
            return None if samples is None else float(np.median(np.array(samples) / ours))

        rate = over(BASE[what])
        rows.append(
            {
                "what": "goal",
                "how": f"{what}: {BASE[what]} / ours",
                "goal": least,
                "rate": rate,
                "met": rate is not None and rate >= least,
                "runs": len(ours),
                "orbax_over_ours": over("orbax"),
                "orbax_waits_over_ours": over("orbax, waits"),
            }
        )
    return rows


def state_of_405b() -> list[planner.Leaf]:
    """Returns the leaves of Llama 3 405B (arXiv 2407.21783, table 3): float32 parameters and two
    moments, sharded by ZeRO-1."""
    L, D, F, H, G, K, V = 126, 16384, 53248, 128, 8, 128, 128256
    shapes = {  # and the dimensions that pipe and tensor cut
        "query": ((L, D, H, K), 0, 2),
        "key": ((L, D, G, K), 0, 2),
        "value": ((L, D, G, K), 0, 2),
        "out": ((L, H, K, D), 0, 1),
        "gate": ((L, D, F), 0, 2),
        "up": ((L, D, F), 0, 2),
        "down": ((L, F, D), 0, 1),
        "norms": ((L, 2, D), 0, None),
        "tokens": ((V, D), None, 0),
        "head": ((D, V), None, 1),
    }
    leaves = []
    for prefix in ("params", "mu", "nu"):
        for name, (shape, pipe, tensor) in shapes.items():
            cuts: list[tuple[str, ...]] = [()] * len(shape)
            for axis, place in (("pipe", pipe), ("tensor", tensor)):
                if place is not None:
                    cuts[place] += (axis,)
            if prefix != "params" and name != "norms":
                widest = max(range(len(shape)), key=lambda d: shape[d] * (not cuts[d]))
                cuts[widest] += ("data",)
            leaves.append(planner.Leaf(f"{prefix}.{name}", shape, 4, tuple(cuts)))
    return leaves


def planned(ranks: int) -> dict[str, Any]:
    """Plans a save of the 405B state twice, the second time from the cache."""
    mesh = {"pipe": 16, "data": ranks // 128, "tensor": 8}
    cache, leaves = planner.PlanCache(), state_of_405b()
    first = seconds(lambda: cache.plan(leaves, mesh))
    second = seconds(lambda: cache.plan(leaves, mesh))
    plan = cache.plan(leaves, mesh)
    estimate = planner.simulate(plan)
    per_rank = plan.bytes_per_rank
    return {
        "what": "plan",
        "how": f"{ranks} ranks",
        "plan_s": first,
        "plan_again_s": second,
        "imbalance": plan.imbalance,
        "gb_per_rank": float(per_rank.max()) / 1e9,
        "metadata_mb": plan.metadata_bytes / 1e6,
        "estimate_stall_s": estimate.stall,
        "estimate_save_s": estimate.save,
        "estimate_load_s": estimate.load,
    }


def text(
    measured: list[dict[str, Any]], goals_met: list[dict[str, Any]], plan: dict[str, Any]
) -> str:
    """Returns what was measured, the goals and the plan, for a terminal."""
    times = {
        "measured": "what",
        "how": "how",
        "median s": "median_s",
        "10th percentile s": "p10_s",
        "90th percentile s": "p90_s",
        "runs": "runs",
        "GB/s": "gb_per_s",
        "times the machine's": "times_the_machine",
    }
    goal_columns = {
        "the machine's time over ours": "how",
        "median": "rate",
        "our goal, at least": "goal",
        "orbax over ours": "orbax_over_ours",
        "orbax that waits over ours": "orbax_waits_over_ours",
    }
    shown = [row | {"what": TITLES[row["what"]]} for row in measured]
    return (
        f"{results.columns(shown, times)}\n\n{results.columns(goals_met, goal_columns)}\n\n"
        f"plan of a save of 405B parameters by {plan['how']}, simulated: {plan['plan_s']:.1f} s, "
        f"again {plan['plan_again_s']:.3f} s; {plan['gb_per_rank']:.2f} GB a rank, imbalance "
        f"{plan['imbalance']:.3f}"
    )


def draw(rows: list[dict[str, Any]], path: Path, megabytes: float) -> str:
    """Draws three panels, one for each question, as SVG and PNG. Returns the figure's title."""
    counts = [sum(row["what"] == what for row in rows) for what in TITLES]
    figure, places = panels(rows=3, size=(8, 7), heights=[1 + n for n in counts])
    for axes, (what, title) in zip(places, TITLES.items(), strict=True):
        bars = [row for row in rows if row["what"] == what][::-1]
        names = [r["how"].partition(", to ")[0] for r in bars]
        kind = [name if name in COLOURS else "machine" for name in names]
        low, high = ([abs(r["median_s"] - r[p]) for r in bars] for p in ("p10_s", "p90_s"))
        axes.barh(
            [r["how"] for r in bars],
            [r["median_s"] for r in bars],
            xerr=[low, high],
            color=[COLOURS[k] for k in kind],
        )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(0)
        axes.set_xlabel("seconds, median with 10th and 90th percentile", fontsize=9)
    by = {(r["what"], r["how"]): r["median_s"] for r in rows}
    gain = by["stall", "orbax, waits"] / by["stall", "ours"]
    title = (
        f"{megabytes:.0f} MB: a save stalls the loop {gain:.0f} times less than one that waits "
        f"(paper: {PAPER_STALL:.0f})"
    )
    save(figure, path, title)
    return title


# ---- table of documents


def seconds_table(path: Path) -> str:
    """Returns a table of the costs of saves and loads, and the plan for many ranks."""
    columns = {
        "what": "what",
        "how": "how",
        "median s": "median_s",
        "p10": "p10_s",
        "p90": "p90_s",
        "n": "runs",
        "GB/s": "gb_per_s",
        "times the machine's own": "times_the_machine",
    }
    result = read(path)
    (plan,) = rows_of(result, what="plan")
    text = (
        f"{result['megabytes']:.0f} MB of float32, {result['cores']} cores. A plan for a "
        f"405B model's state on {plan['how']} takes {plan['plan_s']:.1f} s, again "
        f"{1e3 * plan['plan_again_s']:.2g} ms; imbalance {plan['imbalance']:.3f}, "
        f"{plan['gb_per_rank']:.2f} GB a rank."
    )
    rows = [row for what in ("stall", "whole", "load") for row in rows_of(result, what=what)]
    return "\n\n".join([text, rows_table(rows, columns), source(result)])
