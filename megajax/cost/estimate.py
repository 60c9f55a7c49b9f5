"""Step time, tokens a second and MFU of a planned step: ESTIMATES, never measurements.

    step = compute + compute of idle ticks + exposed communication + optimizer update + quantizing

Compute times come from a CostModel, communication times from the alpha-beta model
(cost/roofline.py: a latency, then bytes over bandwidth). A transfer is exposed for as long as it
takes beyond the matrix products that run at the same time. If two transfers run beside the same
products, both are credited with all of their time, so the estimate is too fast there. In a
pipeline, stages compute or wait, and send, in idle ticks, too, as the program does (cost/step.py).
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Protocol

from megajax.core.hardware import Cluster
from megajax.cost import traffic
from megajax.cost.base import (
    Convention,
    CostModel,
    Op,
    mfu,
    model_flops_per_token,
    train_flops_per_token,
)
from megajax.cost.kernels import Collective, Matmul, Rowwise
from megajax.cost.memory import held
from megajax.cost.roofline import Group, Roofline, group_of
from megajax.cost.step import MOMENTS, StepShape
from megajax.cost.traffic import members


class Sent(Protocol):
    """What a planned transfer and a compiled collective have in common."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def axes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def nbytes(self) -> float: ...  # noqa: D102
    @property
    def executions(self) -> float: ...  # noqa: D102
    @property
    def flops_beside(self) -> float: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step by cause, and the throughput that follows from them.

    communication_s: {mesh axes such as 'data' or 'node+data': seconds of all transfers over them}.
    exposed_s: the same for what no computation hides. bubble_s: a pipeline's idle ticks, in which a
    device computes or waits. bubble: bubble_s over the compute of the stages' work. mfu_megatron,
    mfu_causal: model FLOPs utilisation, 0..1, in two conventions (cost/base.py). quantize_s: the
    seconds in which what data parallelism sends is quantized.
    """

    step_s: float
    sigma_s: float
    compute_s: float
    update_s: float
    bubble_s: float
    bubble: float
    communication_s: dict[str, float]
    exposed_s: dict[str, float]
    tokens_per_s: float
    mfu_megatron: float
    mfu_causal: float
    quantize_s: float = 0.0


def transfer_seconds(
    sent: Sent, step: StepShape, cluster: Cluster, model: CostModel, flops_per_s: float
) -> tuple[float, float, float]:
    """Returns (seconds of all executions, those of them with no matmul beside, their deviation)."""
    group = _group(sent.axes, tuple(step.sizes.items()), cluster.gpus_per_host)
    op = Op("transfer", Collective(sent.kind, sent.nbytes, group.inside, group.hosts))
    once, sigma = model.op_time(op, cluster.card)
    hidden_s = sent.flops_beside / flops_per_s
    bare = max(0.0, once - hidden_s) * sent.executions
    return once * sent.executions, bare, bare * (sigma / once if once else 0.0)


@functools.cache
def _group(axes: tuple[str, ...], sizes: tuple[tuple[str, int], ...], gpus_per_host: int) -> Group:
    """The group of these axes; a search asks for the same ones again and again."""
    return group_of(members(axes, dict(sizes)), gpus_per_host)


def estimate(
    step: StepShape,
    cluster: Cluster,
    sent: Iterable[Sent],
    model: CostModel = Roofline(),
) -> Estimate:
    """Returns the estimate of a step that sends these transfers.

    Errors of the model's times are taken as fully correlated.
    """
    compute = idle = layers = 0.0
    update = sigma = 0.0
    if step.trains:
        # Masters, moments and gradients are read, masters and moments written, in float32.
        arrays = 2 * (1 + MOMENTS[step.optimizer] + step.averages) + 1
        frozen = sum(op.params for op in step.load.all_ops if op.frozen) / step.load.params
        kernel = Rowwise("update", held(step) * (1 - frozen), 1, arrays - 1)
        update, sigma = model.op_time(Op("update", kernel, dtypes=("float32",)), cluster.card)
    quantize, deviation = model.op_time(traffic.coding_op(step), cluster.card)
    sigma += deviation
    for op in step.forward.ops:
        if op.part not in step.counts:
            continue
        once, deviation = model.op_time(op, cluster.card)
        done, masked = step.counts[op.part]
        seconds = op.count * once
        compute += seconds * done
        layers += seconds * done * (op.part != "head")
        idle += seconds * masked
        sigma += op.count * deviation * (done + masked)
    large = Op("input", Matmul(8192, 8192, 8192), dtypes=(step.load.dtype,))
    rate = large.flops / model.op_time(large, cluster.card)[0]  # of a large product, FLOP/s
    spent: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for transfer in sent:
        if not transfer.axes:
            continue
        name = "+".join(transfer.axes)
        seconds_of_all, bare, deviation = transfer_seconds(transfer, step, cluster, model, rate)
        spent[name] = spent.get(name, 0.0) + seconds_of_all
        exposed[name] = exposed.get(name, 0.0) + bare
        sigma += deviation
    total = compute + idle + sum(exposed.values()) + update + quantize
    tokens, peak = step.load.tokens, cluster.card.peak(step.load.dtype)

    def utilisation(convention: Convention) -> float:
        of_token = train_flops_per_token if step.trains else model_flops_per_token
        return mfu(tokens / total, of_token(step.load, convention), step.devices, peak)

    return Estimate(
        total,
        sigma,
        compute,
        update,
        idle,
        idle / layers,
        spent,
        exposed,
        tokens / total,
        utilisation("megatron"),
        utilisation("causal"),
        quantize,
    )
