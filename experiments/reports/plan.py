"""A plan, a search or a serving estimate as text, Markdown, JSON and a picture.

Every time and rate in them is an estimate and carries the word 'estimate'.
"""

import dataclasses
import functools
import json
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reports.reporting import markdown_table, panels
from megajax.core import config
from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError
from megajax.core.hardware import Cluster
from megajax.cost import hlo, memory, serving, sparse, traffic
from megajax.cost.base import CostModel
from megajax.cost.estimate import transfer_seconds
from megajax.cost.roofline import Roofline
from megajax.cost.step import StepShape
from megajax.monitor import results
from megajax.monitor.console import quantity
from megajax.schedule import simulate
from megajax.schedule.trace import gantt
from megajax.systems.aot import RESERVE_BYTES, Plan
from megajax.systems.strategies import Ranking
from megajax.training.config import Config

# ---- the exchange of gradients
#
# What data parallelism sends in a planned step: the codec's bytes by level, seconds as estimates.
#
# For steps with an exchange of their own (--wire, --shard.zero=optimizer); what others gather and
# scatter stands among a plan's collectives.


def exchange_figures(step: StepShape, cluster: Cluster) -> dict[str, Any]:
    """Returns the figures of the exchange for JSON: rows by level and axes, and the time of
    quantizing."""
    model = Roofline()
    estimates: dict[tuple, float] = {}
    for m in traffic.messages(step):
        one = traffic.Transfer(m.kind, m.axes, m.nbytes, m.count, 0.0, m.level)
        seconds = transfer_seconds(one, step, cluster, model, 1.0)[0]
        key = m.level, m.kind, m.axes
        estimates[key] = estimates.get(key, 0.0) + seconds
    return {
        "label": "estimate",
        "rows": [
            {
                "level": row.level,
                "collective": row.kind,
                "axes": "+".join(row.axes),
                "bits": row.bits,
                "bytes": row.nbytes,
                "estimate_s": estimates[row.level, row.kind, row.axes],
            }
            for row in traffic.rows(step)
        ],
        "quantize_bytes": traffic.coded_bytes(step),
        "estimate_quantize_s": model.op_time(traffic.coding_op(step), cluster.card)[0],
    }


def seconds(exchange: dict[str, Any]) -> float:
    """Returns the estimate of a whole exchange, quantizing included."""
    return sum(row["estimate_s"] for row in exchange["rows"]) + exchange["estimate_quantize_s"]


# ---- a plan


GIB = 2**30
REMEDY = {
    "parameters": "--shard.zero=full, more --mesh.data or --mesh.tensor",
    "optimizer": "--shard.zero=full, more --mesh.data or --mesh.tensor",
    "gradients": "--shard.zero=full, more --mesh.data or --mesh.tensor",
    "errors": "--wire=sdp4bit, which keeps none, or more --mesh.tensor",
    "weights in use": "more --mesh.tensor, or --shard.zero=full and --wire=none",
    "stash": "--train.remat=full, more --train.accumulate or --mesh.tensor",
    "activations": "more --train.accumulate, --mesh.tensor or --mesh.context",
    "logits": "more --train.loss_chunks",
    "batch": "more --train.accumulate",
    "cache": "more --mesh.tensor, fewer rows (--train.global_batch) or tokens (--train.seq_len)",
}
LEVELS = {
    "weights": "weights",
    "inside": "gradients inside a node",
    "between": "gradients between nodes",
    "gradients": "gradients",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that one operation asked for. nbytes: what one device sends in one step."""

    kind: str
    axes: str
    nbytes: int
    executions: int
    schedule: str
    op_name: str


def collective_rows(collectives: Sequence[hlo.Collective]) -> list[Row]:
    """Returns the collectives by operation, most bytes first."""
    merged: dict[tuple, list[hlo.Collective]] = {}
    for c in collectives:
        how = "hidden" if c.is_hidden else "async, exposed" if c.is_async else "exposed"
        merged.setdefault((c.kind, "+".join(c.axes) or "?", how, c.op_name or "?"), []).append(c)
    made = [
        Row(kind, axes, sum(c.total for c in cs), round(sum(c.executions for c in cs)), how, name)
        for (kind, axes, how, name), cs in merged.items()
    ]
    return sorted(made, key=lambda row: -row.nbytes)


def verdict(plan: Plan) -> str:
    """Returns whether it fits, and if not, what to change."""
    have, need = plan.cluster.card.memory_bytes / GIB, plan.needed / GIB
    amount = f"{need:.1f} of {have:.1f} GiB a GPU ({RESERVE_BYTES / GIB:.1f} reserved)"
    if plan.fits:
        return f"fits: needs {amount}"
    if plan.misfit is None and plan.expected:
        return f"not compiled: expected to need {amount}, as compiled programs of its kind do"
    sizes = f"needs {amount}" if plan.compiled else f"needs at least {amount}"
    if plan.misfit is None:
        return f"not compiled: {sizes}"
    term = memory.size(plan.terms[plan.misfit])
    return f"DOES NOT FIT: {sizes}; largest term: {plan.misfit}, {term}: " + (REMEDY[plan.misfit])


def headline(plan: Plan) -> str:
    """Returns the mesh and the estimate in two lines."""
    mesh = " x ".join(f"{a} {n}" for a, n in plan.step.sizes.items() if n > 1) or "one GPU"
    e, load = plan.estimate, plan.step.load
    rows, keys = f"{load.rows} rows", load.attention.keys if load.attention else 0
    what = {
        "train": f"{rows} of {load.seq_len:,} tokens",
        "prefill": f"prefill of {rows} of {load.seq_len:,} tokens",
        "decode": f"a token for each of {rows}, cache of {keys:,} tokens",
    }[load.phase]
    return (
        f"{plan.cluster.name}: {mesh}; {quantity(load.params)} parameters, {what}\n"
        f"estimate: {e.step_s:.4g} s a step +- {e.sigma_s:.2g}, estimate: {e.tokens_per_s:,.0f} "
        f"tokens/s, estimate: MFU {100 * e.mfu_megatron:.1f} % (Megatron convention) or "
        f"{100 * e.mfu_causal:.1f} % (causal)"
    )


ASSUMED = "assumed efficiencies and link speeds (megajax/cost)"


def markdown(plan: Plan, search: str = "", times: str = ASSUMED) -> str:
    """Returns the whole plan. search: the section on how it was chosen. times: their source."""
    parts = ["# Plan", verdict(plan), headline(plan).replace("\n", "\n\n")]
    parts += [search] if search else []
    if picture := mesh_picture(plan):
        parts += ["## Mesh", f"```\n{picture}\n```"]
    parts += ["## Memory of a GPU", markdown_table(("term", "bytes", "source"), _memory(plan))]
    if plan.compiled:
        collectives = plan.compiled.collectives
        top = [
            (r.kind, r.axes, memory.size(r.nbytes), r.executions, r.schedule, f"`{r.op_name}`")
            for r in collective_rows(collectives)[:10]
        ]
        columns = ("collective", "axis", "bytes a step", "executions", "schedule", "asked for by")
        share = (
            f"{100 * hlo.attributed(collectives):.3f} % of all bytes have an axis and an operation."
        )
        parts += ["## Top 10 collectives of a GPU", markdown_table(columns, top), share]
    parts += [
        "## Time of a step (estimate)",
        markdown_table(("part", "estimate, s"), _seconds(plan)),
    ]
    if plan.compiled:
        flops = plan.compiled.matmul_flops / 1e12
        counts = {part: done + idle for part, (done, idle) in plan.step.counts.items()}
        ours = plan.step.forward.times(counts).flops / 1e12
        parts.append(
            f"Matmuls of one GPU: {flops:,.4g} TFLOP in the program, {ours:,.4g} by formula."
        )
    parts.append(f"Pipeline bubble: {100 * plan.estimate.bubble:.1f} % of the work.")
    parts += sending(plan)
    parts += pruning(plan)
    lines = [f"- {w}" for w in plan.warnings] or ["none"]
    facts = results.facts(plan.cluster.name, _layer(plan))
    where = ", ".join(facts[name] for name in ("layer", "date", "commit"))
    source = f"*Times are estimates: {times}. Attention is XLA's. {where}*"
    return "\n\n".join([*parts, "## Warnings", "\n".join(lines), source]) + "\n"


def to_json(plan: Plan, search: Mapping[str, Any] | None = None) -> str:
    """Returns every figure of the plan as JSON, with those of the search that chose it."""
    collectives = plan.compiled.collectives if plan.compiled else ()
    members: dict[str, Any] = results.facts(plan.cluster.name, _layer(plan)) | {
        "mesh": dict(plan.step.sizes),
        "parameters": plan.step.load.params,
        "memory_terms_bytes": plan.terms,
        "memory_bound_bytes": memory.bound(plan.terms),
        "memory_xla_bytes": plan.compiled.xla if plan.compiled else None,
        "misfit": plan.misfit,
        "estimate": dataclasses.asdict(plan.estimate),
        "collective_bytes_attributed": hlo.attributed(collectives),
        "collectives": [dataclasses.asdict(row) for row in collective_rows(collectives)],
        "matmul_flops": plan.compiled.matmul_flops if plan.compiled else None,
        "compile_cpu_s": plan.compiled.cpu_s if plan.compiled else None,
        "warnings": plan.warnings,
    }
    if plan.step.exchanges:
        members |= {"exchange": exchange_figures(plan.step, plan.cluster)}
    members |= {"search": search} if search else {}
    return json.dumps(members, indent=2) + "\n"


def pruning(plan: Plan) -> list[str]:
    """Returns the section on which sparsity is worth it, for a run that prunes; else nothing."""
    prune = plan.cfg.prune
    if not prune.sparsity:
        return []
    head = "## Which sparsity pays, forward (estimate)"
    if prune.pattern not in ("tw2d", "tw1d", "tew", "bw"):
        return [head, f"None: {prune.pattern} leaves no tiles (--prune.pattern)."]
    tile, chunk = (32, 32) if prune.pattern == "bw" else (prune.tile, prune.chunk)
    square = prune.pattern in ("tw2d", "tew")
    dtype = plan.cfg.train.dtype
    cost = sparse.SparseCost(plan.cluster.card, dtype, tile, chunk, squared=square)
    gemms = sparse.decoder_gemms(plan.cfg.model.stack, round(plan.step.tokens))
    table_rows = sparse.table(cost, gemms, (prune.sparsity,))
    lines = [
        [f"{v:.3g}" if isinstance(v, float) else "never" if v is None else v for v in row.values()]
        for row in table_rows
    ]
    about = (
        f"One GPU multiplies a whole matrix for the {round(plan.step.tokens):,} tokens of a "
        f"micro-batch, by tiles of {tile} columns and {chunk} rows, at {cost.share:g} of the dense "
        "kernel's rate (assumed). Training itself multiplies the zeros."
    )
    if prune.pattern == "tew":
        about += " The single elements of tew are one more product, which is not counted."
    return [head, markdown_table(list(table_rows[0]), lines), about]


def sending(plan: Plan) -> list[str]:
    """Returns the section on what data parallelism sends once a step; nothing where it sends
    weights and gradients layer by layer, because these are among the collectives."""
    if not plan.step.exchanges:
        return []
    exchange, head = exchange_figures(plan.step, plan.cluster), "## What data parallelism sends"
    if not exchange["rows"]:
        return [head, "Nothing: one rank has all gradients."]
    lines = [
        (
            LEVELS[row["level"]],
            row["collective"],
            row["axes"],
            f"{row['bits']:.4f}",
            memory.size(row["bytes"]),
            f"{row['estimate_s']:.4g}",
        )
        for row in exchange["rows"]
    ]
    columns = ("what", "collective", "axes", "bits a number", "bytes a step and GPU", "estimate, s")
    parts = [head, markdown_table(columns, lines)]
    if plan.step.coding is None:
        return parts
    plain = exchange_figures(dataclasses.replace(plan.step, coding=None), plan.cluster)
    sent = memory.size(sum(row["bytes"] for row in plain["rows"]))
    about = (
        f"Quantizing moves {memory.size(exchange['quantize_bytes'])} through the memory of a GPU, "
        f"estimate: {exchange['estimate_quantize_s']:.4g} s. The whole exchange, estimate: "
        f"{seconds(exchange):.4g} s. Without a codec the same exchange sends {sent}, "
        f"estimate: {seconds(plain):.4g} s."
    )
    return [*parts, about]


HOSTS = 4  # (chosen) hosts that the picture of a mesh shows one by one
MOST_SLOTS = 24  # (chosen) micro-batches that the picture of a pipeline shows


def mesh_picture(plan: Plan) -> str:
    """Returns which coordinates of the mesh each GPU has, a host a line; '' for one GPU.

    GPUs are numbered host by host, and the last axis of the mesh changes from one to the next. What
    all GPUs of a host share stands behind its line.
    """
    sizes = {axis: n for axis, n in plan.step.sizes.items() if n > 1}
    each, total = plan.cluster.gpus_per_host, math.prod(sizes.values())
    if not sizes:
        return ""

    def places(gpu: int) -> dict[str, int]:
        at: dict[str, int] = {}
        for axis, n in reversed(sizes.items()):
            gpu, at[axis] = divmod(gpu, n)
        return {axis: at[axis] for axis in sizes}

    lines, hosts = [], -(-total // each)
    shown = list(range(hosts)) if hosts <= HOSTS + 1 else [*range(HOSTS - 1), hosts - 1]
    for host in shown:
        coordinates = [places(gpu) for gpu in range(host * each, min((host + 1) * each, total))]
        inside = [axis for axis in sizes if len({at[axis] for at in coordinates}) > 1]
        cells = [" ".join(f"{axis[0]}{at[axis]}" for axis in inside) for at in coordinates]
        wide = max(map(len, cells))
        shared = ", ".join(f"{axis} {coordinates[0][axis]}" for axis in sizes if axis not in inside)
        row = "|".join(cell.center(wide + 2) for cell in cells)
        lines.append(f"host {host:<{len(str(hosts))}} [{row}] {shared}".rstrip())
        if host == HOSTS - 2 and len(shown) < hosts:
            lines.append(f"... {hosts - HOSTS} more hosts")
    letters = ", ".join(f"{axis[0]}: {axis} of {n}" for axis, n in sizes.items())
    return "\n".join([*lines, f"({letters})"])


def pipeline_picture(plan: Plan, path: Path) -> bool:
    """Draws the order in which stages do forward and backward passes, if there are several.

    Passes last as long as one another there; the time of a step is estimated elsewhere. Tells
    whether a picture was drawn.
    """
    stages, pipeline = plan.step.sizes["pipe"], plan.cfg.pipeline
    if stages == 1:
        return False
    pieces = pipeline.pieces(stages)
    few = min(pieces, max(MOST_SLOTS // stages, 1) * stages)
    table = dataclasses.replace(pipeline, microbatches=few).table(stages)
    line = simulate(table, {"F": 1.0, "B": 1.0, "W": 1.0})
    cut = "" if few == pieces else f", the first {few}"
    title = f"{pipeline.schedule}: {stages} stages, {pieces} micro-batches{cut}"
    gantt({title: line}, path, "forward passes of a stage")
    return True


def draw(plan: Plan, path: Path) -> None:
    """Draws memory by term beside XLA's peak, and the estimated step time by part."""
    figure, (left, right) = panels(2, size=(10, 4))
    bottom = 0.0
    hidden = min(("activations", "logits"), key=lambda term: plan.terms[term])
    for term, value in plan.terms.items():
        if term != hidden:
            left.bar("cost model", value / GIB, bottom=bottom / GIB, label=term)
            bottom += value
    if plan.compiled:
        left.bar("XLA's peak", plan.compiled.xla["peak"] / GIB, color="0.6")
    capacity, top = plan.cluster.card.memory_bytes / GIB, left.get_ylim()[1]
    if top > capacity / 3:  # else the line would flatten the bars
        left.axhline(capacity, color="0.2", linestyle="--", linewidth=1)
    left.set(ylabel="GiB a GPU", title=f"needs {plan.needed / GIB:.1f} of {capacity:.1f} GiB")
    left.set_xlim(-0.6, 1.6 if plan.compiled else 0.6)
    handles, labels = left.get_legend_handles_labels()  # in the order of the bar, the top first
    left.legend(
        handles[::-1],
        labels[::-1],
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )
    times = _times(plan)
    right.barh(list(times), list(times.values()), color="C0")
    right.invert_yaxis()
    right.set(xlabel="s (estimate)", title=f"estimate: {plan.estimate.step_s:.4g} s a step")
    figure.suptitle(headline(plan).splitlines()[0], fontsize=10)
    figure.savefig(path)


def write(
    plan: Plan,
    folder: Path,
    section: str = "",
    search: Mapping[str, Any] | None = None,
    times: str = ASSUMED,
) -> None:
    """Writes plan.md, plan.json and plan.png, and of several stages pipeline.svg.

    section, search: text and figures of the search that chose the plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.md").write_text(markdown(plan, section, times))
    (folder / "plan.json").write_text(to_json(plan, search))
    draw(plan, folder / "plan.png")
    pipeline_picture(plan, folder / "pipeline.svg")


def _memory(plan: Plan) -> list[tuple]:
    state = "exact" if plan.compiled else "cost model"
    source = {"parameters": state, "optimizer": state}
    lines = [
        (term, memory.size(value), source.get(term, "cost model"))
        for term, value in plan.terms.items()
    ]
    bound = memory.bound(plan.terms)
    lines.append(("lower bound of these", memory.size(bound), "block and head do not overlap"))
    if plan.compiled:
        xla = plan.compiled.xla
        lines += [(f"XLA: {name}", memory.size(xla[name]), "compiled") for name in xla]
        lines.append(("XLA's peak / lower bound", f"{xla['peak'] / bound:.2f}", ""))
    return lines


def _times(plan: Plan) -> dict[str, float]:
    e = plan.estimate
    parts = {"compute": e.compute_s, "pipeline bubble": e.bubble_s}
    parts |= {f"exposed over {axes}": seconds for axes, seconds in e.exposed_s.items()}
    parts |= {"quantizing": e.quantize_s} if e.quantize_s else {}
    return parts | {"optimizer update": e.update_s}


def _seconds(plan: Plan) -> list[tuple[str, str]]:
    parts = _times(plan) | {"step": plan.estimate.step_s}
    return [(name, f"{seconds:.4g}") for name, seconds in parts.items()]


def _layer(plan: Plan) -> str:
    return f"compiled for {plan.cluster.card.name}" if plan.compiled else "simulated"


# ---- a search


PLAIN = "wire none, ZeRO full"  # what is not said of a plan
SIGN = {"compiled": "", "expected": "~ ", "bound": "> "}  # before the GiB a GPU


def summary(search: Ranking) -> str:
    """Returns how many were looked at, why most were dropped, and how many were compiled."""
    dropped = sum(search.dropped.values())
    text = (
        f"{search.proposals:,} candidates on {search.meshes} legal meshes, priced by the cost "
        f"model in {search.cpu_s:.0f} CPU seconds"
    )
    if dropped:
        terms = ", ".join(f"{term} {count:,}" for term, count in search.dropped.items())
        text += f"; {dropped:,} fit no GPU by their bound (largest term: {terms})"
    parts = [f"{text}."]
    if search.compiled:
        fits = sum(p.fits for p in search.compiled)
        parts.append(f"{len(search.compiled)} were compiled, of which {fits} fit.")
    if search.unlikely:
        parts.append(
            f"{search.unlikely:,} that fit by their bound are left out: they would not fit if "
            "their programs grow beyond it as the compiled ones did."
        )
    if search.ended:
        parts.append(f"The search ended early: {search.ended}.")
    return " ".join(parts)


def ranking_rows(search: Ranking, base: Config, start: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one row a plan, best first, compiled ones before the others.

    base: the configuration that the flags started from. start: the flags that name it.
    """
    return [
        {
            "rank": rank,
            "mesh": " x ".join(f"{a} {n}" for a, n in p.step.sizes.items() if n > 1) or "one GPU",
            "schedule": _schedule(p),
            "remat": p.cfg.train.remat,
            "exchange": f"wire {p.cfg.wire}, ZeRO {p.cfg.zero}",
            "source": "compiled" if p.compiled else "cost model",
            "estimate_step_s": p.estimate.step_s,
            "estimate_mfu": p.estimate.mfu_megatron,
            "estimate": f"estimate: {p.estimate.step_s:.4g} s, estimate: MFU "
            f"{100 * p.estimate.mfu_megatron:.1f} %",
            "needed_gib": p.needed / GIB,
            "needed_is": "compiled" if p.compiled else "expected" if p.expected else "bound",
            "fits": _fits(p),
            "flags": shlex.join([*start, *config.spell(p.cfg, base)]),
        }
        for rank, p in enumerate(search.plans, 1)
    ]


def search_figures(search: Ranking, ranking: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a search for JSON."""
    return {
        "label": "estimate",
        "candidates": search.proposals,
        "legal_meshes": search.meshes,
        "dropped": dict(search.dropped),
        "search_cpu_s": search.cpu_s,
        "compiled": len(search.compiled),
        "unlikely": search.unlikely,
        "ended": search.ended,
        "stopped": search.stopped,
        "rows": list(ranking),
    }


def search_markdown(search: Ranking, ranking: Sequence[dict[str, Any]]) -> str:
    """Returns the ranking, and below it the flags of each row, to paste behind pretrain.py.

    A row of the ranking is two lines that 80 columns hold; a Markdown table would break there.
    """
    parts = ["## Search", summary(search)]
    if search.stopped:
        parts.append(
            f"PARTIAL: Ctrl-C ended the search: {search.stopped}. The ranking is of these alone."
        )
    lines = [f"{'':<32}{'GiB a GPU':>10}{'estimate, s':>13}{'MFU, est.':>11}  source"]
    for row in ranking:
        need = f"{SIGN[row['needed_is']]}{row['needed_gib']:.1f}"
        figures = f"{need:>10}{row['estimate_step_s']:13.4g}"
        figures += f"{100 * row['estimate_mfu']:9.1f} %  {row['source']}"
        lines.append(f"{row['rank']:2}  {row['fits']:<28}{figures}")
        about = [row["mesh"], row["schedule"], f"remat {row['remat']}"]
        about += [] if all(r["exchange"] == PLAIN for r in ranking) else [row["exchange"]]
        lines += textwrap.wrap(
            "; ".join(about), 79, initial_indent=" " * 4, subsequent_indent=" " * 6
        )
    if any(row["needed_is"] != "compiled" for row in ranking):
        lines += [
            "",
            "~ is expected: as much beyond the bound as the compiled programs of its kind.",
        ]
        lines += ["> is the bound: no program of its kind was compiled, and it will need more."]
    flags = "\n".join(f"{r['rank']}: {r['flags']}" for r in ranking)
    text = "\n".join(lines)
    return "\n\n".join([*parts, f"```\n{text}\n```", f"Flags:\n\n```\n{flags}\n```"])


def _schedule(plan: Plan) -> str:
    pipeline, pieces = plan.cfg.pipeline, plan.cfg.train.accumulate
    if plan.step.sizes["pipe"] == 1:
        return f"{pieces} micro-batches" if pieces > 1 else "no pipeline"
    chunks = f" v {pipeline.chunks}" if pipeline.chunks > 1 else ""
    return (
        f"{pipeline.schedule}{chunks}, M {pipeline.microbatches}, keeps {pipeline.stash}, "
        f"{pipeline.gradients} gradients"
    )


def _fits(plan: Plan) -> str:
    """Returns whether a plan fits, which only a compiled program can tell."""
    if plan.misfit is not None:
        return f"DOES NOT FIT ({plan.misfit})"
    return "fits" if plan.compiled else "not compiled"


# ---- serving


def plan(cfg: Config, cluster: Cluster, model: CostModel = Roofline()) -> serving.Serving:
    """Returns the plan. Raises: UserError for a mesh that an engine's plan does not cover."""
    for axis in MESH_AXES:
        ways = getattr(cfg.mesh, axis)
        if axis not in ("tensor", "data") and ways is not None and ways > 1:
            raise UserError(
                f"mesh.{axis}={ways} must be 1: --workload=serve plans replicas on tensor ranks "
                f"(--mesh.{axis})"
            )

    def load_of(rows: int, tokens: int, phase: Any) -> Any:
        return cfg.model.workload(rows, tokens, cfg.train.dtype, phase)

    return serving.plan(
        load_of,
        cluster,
        tensor=cfg.mesh.tensor,
        context=cfg.train.seq_len,
        room=cluster.card.memory_bytes - RESERVE_BYTES,
        model=model,
    )


def serving_rows(serving_plan: serving.Serving, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns a row for each batch size: the figures of a replica, and `cluster_per_s` of all
    replicas."""
    return [
        dataclasses.asdict(rate) | {"cluster_per_s": rate.served_per_s * serving_plan.replicas}
        for rate in serving_plan.rates
    ]


def serving_figures(serving_plan: serving.Serving) -> dict[str, Any]:
    """Returns the figures that all batch sizes share."""
    return {k: v for k, v in dataclasses.asdict(serving_plan).items() if k != "rates"}


def serving_markdown(serving_plan: serving.Serving, cluster: Cluster) -> str:
    """Returns the whole plan."""
    gib = functools.partial("{:.1f} GiB".format)
    have = gib((cluster.card.memory_bytes - RESERVE_BYTES) / 2**30)
    head = (
        f"{cluster.name}: {serving_plan.replicas} replicas on {serving_plan.tensor} GPUs each, "
        f"sequences of {serving_plan.context:,} tokens. Weights take "
        f"{memory.size(serving_plan.weight_bytes)} of a GPU's {have}, a token's keys "
        f"and values {serving_plan.token_bytes / 1024:.1f} KiB."
    )
    if not serving_plan.rates:
        return f"{head}\n\nDOES NOT FIT: not one sequence has room; more --mesh.tensor"
    columns = (
        "sequences at a time",
        "estimate: a decode step, ms",
        "memory roofline, ms",
        "estimate: first token, ms",
        "estimate: decoded tokens/s",
        "with prefills",
        "of the cluster",
        "memory of a GPU",
    )
    lines = [
        (
            f"{r.batch:,}",
            f"{1e3 * r.decode_s:.2f}",
            f"{1e3 * r.bound_s:.2f}",
            f"{1e3 * r.first_token_s:.1f}",
            f"{r.tokens_per_s:,.0f}",
            f"{r.served_per_s:,.0f}",
            f"{r.served_per_s * serving_plan.replicas:,.0f}",
            gib(r.needed / 2**30),
        )
        for r in serving_plan.rates
    ]
    note = (
        "With prefills: answer tokens a second where prompt and answer have half the tokens each. "
        "Decode steps are those of full sequences. Host work is not counted."
    )
    return "\n\n".join([head, markdown_table(columns, lines), note])
