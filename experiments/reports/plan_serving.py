"""What a cluster serves, as text and rows. Every time and rate is an estimate."""

import dataclasses
import functools
from typing import Any

from experiments.reports.plan import table
from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError
from megajax.core.hardware import Cluster
from megajax.cost import memory, serving
from megajax.cost.base import CostModel
from megajax.cost.roofline import Roofline
from megajax.systems.aot import RESERVE_BYTES
from megajax.training.config import Config


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
        load_of, cluster, tensor=cfg.mesh.tensor, context=cfg.train.seq_len,
        room=cluster.card.memory_bytes - RESERVE_BYTES, model=model,
    )  # fmt: skip


def rows(found: serving.Serving, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns a row a batch. The members of a replica, and `cluster_per_s`, of all of them."""
    return [
        dataclasses.asdict(rate) | {"cluster_per_s": rate.served_per_s * found.replicas}
        for rate in found.rates
    ]


def figures(found: serving.Serving) -> dict[str, Any]:
    """Returns what all batches share."""
    return {k: v for k, v in dataclasses.asdict(found).items() if k != "rates"}


def markdown(found: serving.Serving, cluster: Cluster) -> str:
    """Returns the whole plan."""
    gib = functools.partial("{:.1f} GiB".format)
    have = gib((cluster.card.memory_bytes - RESERVE_BYTES) / 2**30)
    head = (
        f"{cluster.name}: {found.replicas} replicas on {found.tensor} GPUs each, sequences of "
        f"{found.context:,} tokens. Weights take {memory.size(found.weight_bytes)} of a GPU's "
        f"{have}, a token's keys and values {found.token_bytes / 1024:.1f} KiB."
    )
    if not found.rates:
        return f"{head}\n\nDOES NOT FIT: not one sequence has room; more --mesh.tensor"
    columns = (
        "sequences at a time", "estimate: a decode step, ms", "memory roofline, ms",
        "estimate: first token, ms", "estimate: decoded tokens/s", "with prefills",
        "of the cluster", "memory of a GPU",
    )  # fmt: skip
    lines = [
        (
            f"{r.batch:,}", f"{1e3 * r.decode_s:.2f}", f"{1e3 * r.bound_s:.2f}",
            f"{1e3 * r.first_token_s:.1f}", f"{r.tokens_per_s:,.0f}", f"{r.served_per_s:,.0f}",
            f"{r.served_per_s * found.replicas:,.0f}", gib(r.needed / 2**30),
        )
        for r in found.rates
    ]  # fmt: skip
    note = (
        "With prefills: answer tokens a second where prompt and answer have half the tokens each. "
        "Decode steps are those of full sequences. Host work is not counted."
    )
    return "\n\n".join([head, table(columns, lines), note])
