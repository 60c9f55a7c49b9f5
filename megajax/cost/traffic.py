"""What a step sends, from sizes alone: the collectives that the design asks for.

The list mirrors parallel/tensor.py and models/parts.py; a test holds it against the compiled H100
program. Weights travel in the compute dtype. Sequence parallelism gathers and scatters the residual
stream around every sublayer, or once around a parallel block (MegaScale section 3.1).
"""

import dataclasses
import itertools
from collections.abc import Mapping

from megajax.core.axes import MESH_AXES, ZERO_AXES
from megajax.cost.base import StepShape
from megajax.cost.memory import layer_weights, residual


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of collective of a step.

    nbytes: of the larger side on one device, one execution. flops_beside: of the matmuls that run
    at the same time on one device. what: the array that travels.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    executions: float
    flops_beside: float
    what: str

    @property
    def total(self) -> float:
        """Bytes of all executions."""
        return self.nbytes * self.executions


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How much of a block's matmuls runs beside each kind of transfer, 0..1.

    Nothing by default. data: weight gathers and gradient scatters; tensor: of the residual stream;
    pipe: sends to the next stage (MegaScale section 3.2 hides all three).
    """

    data: float = 0.0
    tensor: float = 0.0
    pipe: float = 0.0


def members(axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[int]:
    """Returns the device numbers of the first group along these axes."""
    strides, stride = {}, 1
    for axis in reversed(MESH_AXES):
        strides[axis] = stride
        stride *= sizes.get(axis, 1)
    steps = [range(0, sizes.get(a, 1) * strides[a], strides[a]) for a in MESH_AXES if a in axes]
    return [sum(place) for place in itertools.product(*steps)]


def transfers(step: StepShape, overlap: Overlap = Overlap()) -> list[Transfer]:
    """Returns the collectives of one step above the size of norms and scalars."""
    found = [*_weights(step, overlap), *_residuals(step, overlap), *_keys(step)]
    if step.pipeline.stages > 1:
        sends = 2 * step.pipeline.chunks * step.micro_steps
        beside = overlap.pipe * _layer_flops(step) * step.layers / step.pipeline.chunks
        found.append(
            Transfer(
                "collective-permute", ("pipe",), residual(step), sends, beside, "residual stream"
            )
        )
    return [t for t in found if t.nbytes * t.executions and step.ways(*t.axes) > 1]


def _layer_flops(step: StepShape) -> float:
    """Forward FLOPs of one layer of one micro-batch on one device."""
    work = step.work
    dense = 2 * work.matmul_params / work.layers + 4 * work.attention_width * step.keys
    return step.tokens * dense / step.ways("tensor")


def _live(step: StepShape, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if step.ways(a) > 1)


def _weights(step: StepShape, overlap: Overlap) -> list[Transfer]:
    cut = _live(step, step.zero_axes)
    copied = tuple(a for a in _live(step, ZERO_AXES) if a not in cut)
    tables = (2 * step.work.vocab + step.work.positions) * (
        step.itemsize * step.work.width / step.ways("tensor", "pipe")
    )
    piped = step.pipeline.stages > 1
    times = 1 if piped else step.accumulate
    again = 1 if piped or step.remat == "none" else 2  # gathered again in the backward pass
    found = []
    for what, nbytes, layers, gathers, beside in (
        ("layer", layer_weights(step), step.layers, again, overlap.data * _layer_flops(step)),
        ("embedding and head", tables, 1, 1, 0.0),
    ):
        count = layers * times
        found += [
            Transfer("all-gather", cut, nbytes, gathers * count, beside, f"{what} weights"),
            Transfer("reduce-scatter", cut, nbytes, count, 2 * beside, f"{what} gradients"),
            Transfer(
                "all-reduce", copied, nbytes / step.ways(*cut), count, beside, f"{what} gradients"
            ),
        ]
    return found


def _residuals(step: StepShape, overlap: Overlap) -> list[Transfer]:
    whole = residual(step) * step.ways("tensor")
    sublayers = 1 if step.work.parallel else 2
    again = 0 if step.remat == "none" else sublayers
    remade = 1 if step.remat in ("full", "dots") and not step.work.parallel else 0
    blocks = step.layers * step.micro_steps
    beside = overlap.tensor * _layer_flops(step) / sublayers
    axes = ("tensor",)
    # Embedding and head: a scatter and a gather forward, their mirrors backward.
    return [
        Transfer(
            "all-gather", axes, whole, blocks * (2 * sublayers + again), beside, "residual stream"
        ),
        Transfer(
            "reduce-scatter", axes, whole, blocks * (2 * sublayers + remade), beside,
            "residual stream",
        ),
        Transfer("all-gather", axes, whole, 2 * step.micro_steps, 0.0, "embedding and head"),
        Transfer("reduce-scatter", axes, whole, 2 * step.micro_steps, 0.0, "embedding and head"),
    ]  # fmt: skip


def _keys(step: StepShape) -> list[Transfer]:
    """Context parallelism gathers keys and values, forward and again backward."""
    width = 2 * step.work.kv_width * step.itemsize / step.ways("tensor")
    nbytes = step.rows * step.seq_len * width
    blocks = step.layers * step.micro_steps
    again = 1 if step.remat == "none" else 2
    axes = ("context",)
    return [
        Transfer("all-gather", axes, nbytes, again * blocks, 0.0, "keys and values"),
        Transfer("reduce-scatter", axes, nbytes, blocks, 0.0, "gradients of keys and values"),
    ]
