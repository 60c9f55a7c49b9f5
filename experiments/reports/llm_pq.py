"""What experiments/llm_pq.py shows: cases beside rivals, summary, figure, tables. No jax."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.reports.reporting import markdown_table, panels, read, rows_of, save, source, table
from megajax.core.errors import UserError
from megajax.core.hardware import MixedCluster
from megajax.systems.llm_pq import Placement, Problem, Workload, solve
from megajax.systems.llm_pq.planning import equal_quality, problem_of, uniform_bits
from megajax.systems.llm_pq.problem import held, simulate
from megajax.systems.llm_pq.rivals import rivals
from megajax.systems.llm_pq.solver import Plan, Solver

Row = Mapping[str, Any]
PAPER_MEAN = 2.26  # (LLM-PQ, abstract) over its baselines, on the authors' GPUs
SPLITQUANT_MEAN = 1.61  # (SplitQuant, CLUSTER 2025, abstract)
NAMES = {
    "uniform": "one width, even split",
    "pipeedge": "PipeEdge's partition, requests / devices a micro-batch",
    "pipeedge_tuned": "PipeEdge's partition, best micro-batches",
    "adabits": "least loss of quality",
}


@dataclass(frozen=True)
class Options:
    """How a case is searched. quality: as in `megajax.systems.llm_pq.plan`."""

    quality: Any
    solver: Solver
    time_limit_s: float
    rivals: bool


def one(
    case: str, workload: Workload, cluster: MixedCluster, options: Options
) -> tuple[dict[str, Any], Placement, bool]:
    """Returns (row of the result file, placement, whether Ctrl-C ended it).

    After Ctrl-C the row has the rivals that were finished. Raises: UserError when nothing fits;
    KeyboardInterrupt after Ctrl-C before a placement is found.
    """
    problem = problem_of(workload, cluster)
    quality = equal_quality(problem) if options.quality == "equal" else options.quality
    placement = solve(
        problem, quality=quality, solver=options.solver, time_limit_s=options.time_limit_s
    )
    row, is_interrupted = None, placement.status == "interrupted"
    try:
        row = _row(case, workload, cluster, problem, quality, placement, options)
        if options.rivals and not is_interrupted:
            for rival in _compared(problem, quality, placement, options):
                row["rivals"].append(rival)
            row |= _fastest(problem, placement, options)
    except KeyboardInterrupt:
        is_interrupted = True
        row = row or _row(case, workload, cluster, problem, quality, placement, options)
    return row, placement, is_interrupted


def _fastest(problem: Problem, placement: Placement, options: Options) -> dict[str, Any]:
    """Returns the row's member for plans of any quality; {} if none was found."""
    try:
        fastest = _searched(problem, options, None, [_begin(placement)])
    except UserError:
        return {}
    told = {"tokens_per_s": fastest.tokens_per_s, "omega": fastest.omega, "gap": fastest.gap}
    return {"fastest": told}


def _begin(placement: Placement) -> Plan:
    """Returns a placement in the form in which `solve` takes one to start from."""
    pair = placement.prefill_batch, placement.decode_batch
    return placement.stages, placement.bits, pair


def _row(
    case: str,
    workload: Workload,
    cluster: MixedCluster,
    problem: Problem,
    quality: float | None,
    placement: Placement,
    options: Options,
) -> dict[str, Any]:
    """Returns the row of a placement, without rivals."""
    return {
        "case": case,
        "model": workload.name,
        "cluster": cluster.name,
        "quality": quality,
        "uniform_bits": uniform_bits(problem),
        **dataclasses.asdict(placement),
        "simulated_tokens_per_s": simulate(problem, placement).tokens_per_s,
        "solver": options.solver,
        "devices": [card.name for card in cluster.cards],
        "held_bytes": held(problem, placement.stages, placement.bits),
        "memory_bytes": problem.memory.tolist(),
        "rivals": [],
    }


def _searched(
    problem: Problem, options: Options, quality: float | None, start: Sequence[Plan] = ()
) -> Placement:
    """Returns what `solve` does. Raises: KeyboardInterrupt where Ctrl-C ended the search."""
    placement = solve(
        problem,
        quality=quality,
        solver=options.solver,
        time_limit_s=options.time_limit_s,
        start=start,
    )
    if placement.status == "interrupted":
        raise KeyboardInterrupt
    return placement


def _compared(
    problem: Problem, quality: float | None, placement: Placement, options: Options
) -> Iterator[dict[str, Any]]:
    """Yields each rival, with our plan at its quality. Searches of one quality are done once.

    quality, placement: those of the first search.
    """
    known: dict[float, Placement | None] = {} if quality is None else {quality: placement}
    rival_plans = rivals(problem)
    begin: list[Plan] = [
        (r.stages, r.bits, (r.prefill_batch, r.decode_batch))
        for r in rival_plans
        if not r.offloaded
    ]
    begin.append(_begin(placement))
    for rival in rival_plans:
        if rival.omega not in known:
            known[rival.omega] = _at(problem, rival.omega, begin, options)
        ours = known[rival.omega]
        yield {
            "name": rival.name,
            "bits": sorted(set(rival.bits)),
            "omega": rival.omega,
            "prefill_batch": rival.prefill_batch,
            "decode_batch": rival.decode_batch,
            "offloaded": rival.offloaded,
            "tokens_per_s": rival.times.tokens_per_s,
            "ours_tokens_per_s": ours.tokens_per_s if ours else None,
            "ours_omega": ours.omega if ours else None,
            "ours_gap": ours.gap if ours else None,
            "speedup": ours.tokens_per_s / rival.times.tokens_per_s if ours else None,
        }


def _at(
    problem: Problem, omega: float, begin: Sequence[Plan], options: Options
) -> Placement | None:
    """Returns our plan at a quality; None: nothing fits without offloading."""
    try:
        return _searched(problem, options, omega, begin)
    except UserError:
        return None


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns mean and least speedup over each rival, of the cases where both have a plan."""
    figures: dict[str, Any] = {"paper_mean": PAPER_MEAN, "splitquant_mean": SPLITQUANT_MEAN}
    for name in NAMES:
        speedups = [
            rival["speedup"]
            for row in rows
            for rival in row["rivals"]
            if rival["name"] == name and rival["speedup"] is not None
        ]
        if speedups:
            figures[name] = {
                "cases": len(speedups),
                "mean": statistics.mean(speedups),
                "least": min(speedups),
                "most": max(speedups),
            }
    ratios = [
        row["fastest"]["tokens_per_s"] / rival["tokens_per_s"]
        for row in rows
        if "fastest" in row
        for rival in row["rivals"]
        if rival["name"] == "pipeedge"
    ]
    if ratios:
        figures["any_quality_over_pipeedge"] = statistics.mean(ratios)
    return figures


def told(figures: Mapping[str, Any]) -> str:
    """Returns the summary in words."""
    lines = ["speedup at each rival's quality (simulated estimate):"]
    for name, words in NAMES.items():
        if name in figures:
            part = figures[name]
            lines.append(
                f"  over {words}: mean {part['mean']:.2f}, {part['least']:.2f} to "
                f"{part['most']:.2f} ({part['cases']} cases)"
            )
    if (ratio := figures.get("any_quality_over_pipeedge")) is not None:
        lines.append(f"  over PipeEdge's partition at any quality: mean {ratio:.2f}")
    lines.append(
        f"  LLM-PQ reports a mean of {PAPER_MEAN}, SplitQuant of {SPLITQUANT_MEAN}, over baselines "
        "of their own on real GPUs, not at equal quality"
    )
    return "\n".join(lines)


def text(row: Row, placement: Placement) -> str:
    """Returns a case for the console."""
    quality = "any" if row["quality"] is None else f"at most {row['quality']:.4g}"
    lines = [f"{row['case']}: {row['model']} on {row['cluster']}, sum of omega {quality}"]
    for (device, start, stop), used in zip(placement.stages, row["held_bytes"], strict=True):
        runs = ", ".join(
            f"{len(list(same))} x {bits}"
            for bits, same in itertools.groupby(placement.bits[start:stop])
        )
        lines.append(
            f"  {row['devices'][device]} (device {device}): layers {start} to {stop - 1}, "
            f"bits {runs}; {used / 1e9:.1f} of {row['memory_bytes'][device] / 1e9:.1f} GB"
        )
    unused = set(range(len(row["devices"]))) - {device for device, _, _ in placement.stages}
    if unused:
        lines.append(f"  unused: devices {', '.join(map(str, sorted(unused)))}")
    lines.append(
        f"  micro-batches of {placement.prefill_batch} in prefill and {placement.decode_batch} in "
        f"decoding; {placement.tokens_per_s:.1f} tokens/s (simulated estimate; event by event "
        f"{row['simulated_tokens_per_s']:.1f}), gap {100 * placement.gap:.2f} % "
        f"({placement.status}), quality cost {placement.omega:.4g}"
    )
    for rival in row["rivals"]:
        ours = "no placement without offloading"
        if rival["speedup"] is not None:
            ours = f"ours {rival['ours_tokens_per_s']:.1f} at its quality: {rival['speedup']:.2f}x"
        away = f", {rival['offloaded']} layers in host memory" if rival["offloaded"] else ""
        lines.append(
            f"  {rival['name']}: bits {'/'.join(map(str, rival['bits']))}{away}, omega "
            f"{rival['omega']:.4g}, {rival['tokens_per_s']:.1f} tokens/s; {ours}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the speedup of each case over PipeEdge's partition and the even split, at their
    quality."""
    figure, (axes,) = panels(size=(8.5, 3.6))
    shown = ("uniform", "pipeedge", "pipeedge_tuned")
    for k, name in enumerate(shown):
        at = [
            (i + 0.27 * (k - 1), rival["speedup"])
            for i, row in enumerate(rows)
            for rival in row["rivals"]
            if rival["name"] == name and rival["speedup"] is not None
        ]
        if at:
            axes.bar(*zip(*at, strict=True), width=0.25, color=f"C{k}", label=NAMES[name])
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.axhline(
        PAPER_MEAN, color="0.4", linestyle="--", label=f"paper: mean {PAPER_MEAN}, own baselines"
    )
    labels = [
        f"{row['case']}\n{row['model']}\n{row['cluster'].replace(',', chr(10))}" for row in rows
    ]
    axes.set_xticks(range(len(rows)), labels, fontsize=6.5)
    axes.set_ylim(0, 3.4)
    axes.set_ylabel("tokens a second over the rival's")
    axes.legend(fontsize=7, frameon=False, loc="upper left", ncols=2)
    figures = summary(rows)
    title = "LLM-PQ's plan at the rival's quality (simulated estimate)"
    if "pipeedge" in figures:
        title = (
            f"At equal quality the plan is {figures['pipeedge']['mean']:.2f} times as fast as "
            "PipeEdge's partition (mean, simulated estimate)"
        )
    save(figure, path, title)


# ---- tables of documents


def indicators(path: Path) -> str:
    """Returns the rank correlation of each indicator with the measured change of the held-out
    loss."""
    return table(
        path,
        {
            "model": "model",
            "plans": "plans",
            "number of plans": "count",
            "largest change of the loss, nats": "largest_change",
            "variance (the paper's)": "spearman_variance",
            "exact": "spearman_exact",
            "Hessian": "spearman_hessian",
            "random": "spearman_random",
            "curvature (`expected_loss`)": "spearman_curvature",
            "each layer alone": "spearman_alone",
        },
    )


def rounding(path: Path) -> str:
    """Returns the change of the held-out loss by each method of rounding: the mean, and that of
    each model."""
    result = read(path)
    rows = result["rows"]
    widths, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("bits", "method"))
    models = dict.fromkeys(f"{row['model']} {row['loss_dense']:.4f}" for row in rows)
    heads = ("method", *(f"{w} bits: {what}" for w in widths for what in ("nats", "squared error")))
    lines = []
    for method in methods:
        cells = [method]
        for width in widths:
            chosen = rows_of(result, method=method, bits=width)
            changes = [r["loss_change"] for r in chosen if r["loss_change"] is not None]
            if not changes:
                cells += ["-", "-"]
                continue
            each = ", ".join(f"{c:+.4f}" for c in changes)
            cells.append(
                f"{mean(changes):+.4f} ({each})" if len(changes) > 1 else f"{changes[0]:+.4f}"
            )
            errors = [r["product_error"] for r in chosen if r["product_error"] is not None]
            cells.append(f"{mean(errors):.3g}" if errors else "-")
        lines.append(cells)
    told = (
        "Nats: rise of the held-out loss over the dense model's, a token; the mean, in brackets "
        "each model's. Squared error: summed over all products. Groups of "
        f"{rows[0]['group']}. Dense losses: {', '.join(models)}."
    )
    return "\n\n".join([markdown_table(heads, lines), told, source(result)])


def plans(path: Path) -> str:
    """Returns our plans beside those of rivals at equal measured loss."""
    return table(
        path,
        {
            "case": "case",
            "cluster": "cluster",
            "rounding": "method",
            "rival": "rival",
            "rival's bits": "rival_bits",
            "rival's change of the loss, nats": "rival_loss_change",
            "rival's tokens/s (simulated)": "rival_tokens_per_s",
            "our mean bits": "mean_bits",
            "our change of the loss, nats": "loss_change",
            "our tokens/s (simulated)": "tokens_per_s",
            "speedup": "speedup",
        },
    )


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """Returns {name of a table: a function that returns it}."""
    made = {"indicators": indicators, "rounding": rounding, "plans": plans}
    made["rounding_smollm2"] = rounding
    return {
        f"llm_pq_{name}": functools.partial(make, results / f"llm_pq_{name}.json")
        for name, make in made.items()
    }
