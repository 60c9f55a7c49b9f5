"""A search as a ranking: text for people, rows for plan.json, flags for pretrain.py."""

import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

from experiments.reports.plan import GIB
from megajax.core import config
from megajax.systems.aot import Plan
from megajax.systems.strategies import Found
from megajax.training.config import Config

PLAIN = "wire none, ZeRO full"  # what is not said of a plan
SIGN = {"compiled": "", "expected": "~ ", "bound": "> "}  # before the GiB a GPU


def summary(found: Found) -> str:
    """Returns how many were looked at, why most were dropped, and how many were compiled."""
    dropped = sum(found.dropped.values())
    text = (
        f"{found.proposals:,} candidates on {found.meshes} legal meshes, priced by the cost model "
        f"in {found.cpu_s:.0f} CPU seconds"
    )
    if dropped:
        terms = ", ".join(f"{term} {count:,}" for term, count in found.dropped.items())
        text += f"; {dropped:,} fit no GPU by their bound (largest term: {terms})"
    parts = [f"{text}."]
    if found.compiled:
        fits = sum(p.fits for p in found.compiled)
        parts.append(f"{len(found.compiled)} were compiled, of which {fits} fit.")
    if found.unlikely:
        parts.append(
            f"{found.unlikely:,} that fit by their bound are left out: they would not fit if their "
            "programs grow beyond it as the compiled ones did."
        )
    if found.ended:
        parts.append(f"The search ended early: {found.ended}.")
    return " ".join(parts)


def rows(found: Found, base: Config, start: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one row a plan, best first, compiled ones before the others.

    base, start: what the flags started from, and the words that say so (--preset=...).
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
            "needed_is": _certainty(p),
            "fits": _fits(p),
            "flags": shlex.join([*start, *config.spell(p.cfg, base)]),
        }
        for rank, p in enumerate(found.plans, 1)
    ]


def figures(found: Found, ranking: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what JSON tells of a search."""
    return {
        "label": "estimate",
        "candidates": found.proposals,
        "legal_meshes": found.meshes,
        "dropped": dict(found.dropped),
        "search_cpu_s": found.cpu_s,
        "compiled": len(found.compiled),
        "unlikely": found.unlikely,
        "ended": found.ended,
        "stopped": found.stopped,
        "rows": list(ranking),
    }


def markdown(found: Found, ranking: Sequence[dict[str, Any]]) -> str:
    """Returns the ranking, and below it the flags of each row, to paste behind pretrain.py.

    A row of the ranking is two lines that 80 columns hold; a Markdown table would break there.
    """
    parts = ["## Search", summary(found)]
    if found.stopped:
        parts.append(
            f"PARTIAL: Ctrl-C ended the search: {found.stopped}. The ranking is of these alone."
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


def _certainty(plan: Plan) -> str:
    """Returns what the bytes of a plan are."""
    return "compiled" if plan.compiled else "expected" if plan.expected else "bound"


def _fits(plan: Plan) -> str:
    """Returns whether a plan fits, which only a compiled program can tell."""
    if plan.misfit is not None:
        return f"DOES NOT FIT ({plan.misfit})"
    return "fits" if plan.compiled else "not compiled"
