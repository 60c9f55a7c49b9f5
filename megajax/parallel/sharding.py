"""The rule tables: which mesh axes cut which logical word.

Dense weights rest cut over tensor (Megatron's column and row cut) and, along the model width, over
every axis that shares their gradient (ZeRO-3, FSDP). Experts rest on the axis `expert`, so their
width is cut over the other three. The residual stream between blocks is cut along the sequence over
tensor too (sequence parallelism, arXiv 2205.05198). Pipeline stages hold their own layers and share
the vocabulary. Plain data; the rest of the library sees it through `core.layout.Layout`.
"""

from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from megajax.core.axes import BATCH_AXES, ZERO_AXES
from megajax.core.config import Checked, option
from megajax.core.layout import Layout
from megajax.core.rules import Rules

Zero = Literal["full", "hybrid", "none"]


@dataclass(frozen=True)
class ShardSpec(Checked, section="shard"):
    """How far parameters, gradients and optimizer state are cut over data parallelism."""

    zero: Zero = option(
        "full", "full: over node, data, expert, context; hybrid: copied on each node; none: copied"
    )


def zero_axes(zero: Zero) -> tuple[str, ...]:
    """Returns the axes that cut a dense weight along its width."""
    return {
        "full": ZERO_AXES,
        "hybrid": tuple(a for a in ZERO_AXES if a != "node"),
        "none": (),
    }[zero]


def rules(zero: Zero = "full", decode: bool = False) -> Rules:
    """Returns the rule table.

    decode: one token at a time has no sequence to cut, so the residual stream is whole over tensor,
      and no pipeline: every stage has all layers.
    """
    weights = {w: ("tensor",) for w in ("heads", "kv_heads", "mlp")}
    stages = () if decode else ("pipe",)
    weights |= {w: (*stages, "tensor") for w in ("vocab", "positions")} | {"layers": stages}
    act = {
        "batch": BATCH_AXES,
        "seq": () if decode else ("context",),
        **{w: ("tensor",) for w in ("heads", "kv_heads", "mlp", "vocab")},
    }
    residual = {"batch": BATCH_AXES, "seq": () if decode else ("context", "tensor")}
    stored = weights | {"expert": ("expert",), "embed": zero_axes(zero)}
    return Rules(stored=stored, act=act, residual=residual, partial=ZERO_AXES)


def layout(mesh: Mesh, zero: Zero = "full", decode: bool = False) -> Layout:
    """Returns the layout of a mesh under the rule table."""
    return Layout(mesh, rules(zero, decode))
