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
        "model": "model", "plans": "plans", "number": "count",
        "largest change, nats": "largest_change", "variance (the paper's)": "spearman_variance",
        "exact": "spearman_exact", "Hessian": "spearman_hessian", "random": "spearman_random",
        "curvature (`expected_loss`)": "spearman_curvature", "each layer alone": "spearman_alone",
    })  # fmt: skip


def rounding(path: Path) -> str:
    """Change of the held-out loss by each way of rounding: the mean, and every model's."""
    found = json.loads(path.read_text())
    rows = found["rows"]
    widths, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("bits", "method"))
    models = dict.fromkeys(f"{row['model']} {row['loss_dense']:.4f}" for row in rows)
    heads = ("method", *(f"{w} bits: {what}" for w in widths for what in ("nats", "error")))
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
            cells.append(f"{mean(r['product_error'] for r in here):.3g}")
        lines.append("| " + " | ".join(cells) + " |")
    told = (
        "Nats a token above the dense loss, the mean and each model's, and the squared error of "
        f"all products; groups of {rows[0]['group']}. Dense: {', '.join(models)}."
    )
    source = ", ".join(found[key] for key in ("layer", "device", "date", "commit"))
    return "\n".join([*lines, "", told, "", f"*{source}*"])


def plans(path: Path) -> str:
    """Our plans beside rivals' at equal measured loss."""
    return table(path, {
        "case": "case", "cluster": "cluster", "rounding": "method", "rival": "rival",
        "its bits": "rival_bits", "its change, nats": "rival_loss_change",
        "its tokens/s (simulated)": "rival_tokens_per_s", "our mean bits": "mean_bits",
        "our change, nats": "loss_change", "our tokens/s (simulated)": "tokens_per_s",
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
