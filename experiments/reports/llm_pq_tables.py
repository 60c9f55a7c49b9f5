"""Markdown tables of what experiments/llm_pq_quality.py writes, for the documents."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from megajax.monitor.results import table


def indicators(path: Path) -> str:
    """Rank correlation of each indicator with the measured change of the held-out loss."""
    return table(path, {
        "model": "model", "plans": "plans", "number of plans": "count",
        "largest change of the loss, nats": "largest_change",
        "variance (the paper's)": "spearman_variance",
        "exact": "spearman_exact", "Hessian": "spearman_hessian", "random": "spearman_random",
        "curvature (`expected_loss`)": "spearman_curvature", "each layer alone": "spearman_alone",
    })  # fmt: skip


def rounding(path: Path) -> str:
    """Change of the held-out loss by each way of rounding: the mean, and every model's."""
    found = json.loads(path.read_text())
    rows = found["rows"]
    widths, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("bits", "method"))
    models = dict.fromkeys(f"{row['model']} {row['loss_dense']:.4f}" for row in rows)
    heads = ("method", *(f"{w} bits: {what}" for w in widths for what in ("nats", "squared error")))
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for method in methods:
        cells = [method]
        for width in widths:
            here = [r for r in rows if (r["method"], r["bits"]) == (method, width)]
            changes = [r["loss_change"] for r in here if r["loss_change"] is not None]
            if not changes:
                cells += ["-", "-"]
                continue
            each = ", ".join(f"{c:+.4f}" for c in changes)
            cells.append(
                f"{mean(changes):+.4f} ({each})" if len(changes) > 1 else f"{changes[0]:+.4f}"
            )
            errors = [r["product_error"] for r in here if r["product_error"] is not None]
            cells.append(f"{mean(errors):.3g}" if errors else "-")
        lines.append("| " + " | ".join(cells) + " |")
    told = (
        "Nats: rise of the held-out loss over the dense model's, a token; the mean, in brackets "
        "each model's. Squared error: summed over all products. Groups of "
        f"{rows[0]['group']}. Dense losses: {', '.join(models)}."
    )
    source = ", ".join(found[key] for key in ("layer", "device", "date", "commit"))
    return "\n".join([*lines, "", told, "", f"*{source}*"])


def plans(path: Path) -> str:
    """Our plans beside rivals' at equal measured loss."""
    return table(path, {
        "case": "case", "cluster": "cluster", "rounding": "method", "rival": "rival",
        "rival's bits": "rival_bits", "rival's change of the loss, nats": "rival_loss_change",
        "rival's tokens/s (simulated)": "rival_tokens_per_s", "our mean bits": "mean_bits",
        "our change of the loss, nats": "loss_change",
        "our tokens/s (simulated)": "tokens_per_s",
        "speedup": "speedup",
    })  # fmt: skip


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """Returns {name: what makes the table}."""
    made = {"indicators": indicators, "rounding": rounding, "plans": plans}
    made["rounding_smollm2"] = rounding
    return {
        f"llm_pq_{name}": functools.partial(make, results / f"llm_pq_{name}.json")
        for name, make in made.items()
    }
