"""Markdown tables of what experiments/llm_pq_quality.py writes, for the documents."""

from pathlib import Path

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
    """Held-out loss of each way of rounding."""
    return table(path, {
        "model": "model", "dense loss, nats": "loss_dense", "bits": "bits", "group": "group",
        "method": "method", "change, nats": "loss_change", "products' squared error":
        "product_error",
    })  # fmt: skip


def plans(path: Path) -> str:
    """Our plans beside rivals' at equal measured loss."""
    return table(path, {
        "case": "case", "cluster": "cluster", "rounding": "method", "rival": "rival",
        "its bits": "rival_bits", "its change, nats": "rival_loss_change",
        "its tokens/s (simulated)": "rival_tokens_per_s", "our mean bits": "mean_bits",
        "our change, nats": "loss_change", "our tokens/s (simulated)": "tokens_per_s",
        "speedup": "speedup",
    })  # fmt: skip


TABLES = {
    "indicators": indicators, "rounding": rounding, "rounding_smollm2": rounding, "plans": plans,
}  # fmt: skip
