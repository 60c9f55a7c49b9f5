"""The rule tables: which mesh axes cut which logical word.

Dense weights rest cut over tensor (Megatron's column and row cut) and, along the model width, over
every axis that shares their gradient (ZeRO-3, FSDP). Experts rest on the axis `expert`, so their
width is cut over the other three. The residual stream between blocks is cut along the sequence over
tensor too (sequence parallelism, arXiv 2205.05198). Pipeline stages hold their own layers and share
the vocabulary. Plain data; the rest of the library sees it through `core.layout.Layout`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from megajax.core import check
from megajax.core.axes import BATCH_AXES, MESH_AXES, ZERO_AXES, Axes, Rules
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree, is_words
from megajax.layers.param import packed_axes

Zero = Literal["full", "optimizer", "hybrid", "none"]


@dataclass(frozen=True)
class ShardSpec(Checked, section="shard"):
    """How parameters, gradients and optimizer state are sharded over data-parallel ranks."""

    zero: Literal["auto", "full", "optimizer", "hybrid", "none"] = option(
        "auto",
        "full: sharded over node, data, expert and context; optimizer: the same, with a copy of "
        "all weights on each rank; hybrid: sharded inside each node; none: a copy on each rank; "
        "auto: optimizer with --wire=sdp4bit or loco, else full",
    )


def zero_axes(zero: Zero) -> tuple[str, ...]:
    """Returns the axes that cut a dense weight along its width, at rest.

    optimizer: of the masters; the copies that compute are cut as under 'none'.
    """
    return {
        "full": ZERO_AXES,
        "optimizer": ZERO_AXES,
        "hybrid": tuple(a for a in ZERO_AXES if a != "node"),
        "none": (),
    }[zero]


def rules(zero: Zero = "full", decode: bool = False, kv_copies: int = 1) -> Rules:
    """Returns the rule table.

    decode: one token at a time has no sequence to cut, so the residual stream is whole over tensor,
      and no pipeline: every stage has all layers. kv_copies: tensor ranks that hold each key-value
      head. More than one: every rank stores all of these small weights and uses the one head that
      its query heads read, so a parameter has the same shape on every mesh.
    """
    weights: dict[str, Axes] = {w: ("tensor",) for w in ("heads", "kv_heads", "mlp")}
    if kv_copies > 1:
        weights["kv_heads"] = ()
    stages = () if decode else ("pipe",)
    weights |= {w: (*stages, "tensor") for w in ("vocab", "positions")} | {"layers": stages}
    act = {
        "batch": BATCH_AXES,
        "seq": () if decode else ("context",),
        **{w: ("tensor",) for w in ("heads", "kv_heads", "mlp", "vocab")},
    }
    residual = {"batch": BATCH_AXES, "seq": () if decode else ("context", "tensor")}
    stored = weights | {"expert": ("expert",), "embed": zero_axes(zero)}
    copies = {"kv_heads": kv_copies}
    return Rules(stored, act, residual, ZERO_AXES, sharable=("kv_heads",), copies=copies)


def layout(mesh: Mesh, zero: Zero = "full", decode: bool = False, model: Any = None) -> Layout:
    """Returns the layout of a mesh under the rule table.

    model: a configuration with `.sizes`, whose weights are to be cut so; None: of weights that the
      caller knows to divide, with a key-value head for every tensor rank.
    Raises: UserError when the mesh lacks an axis or cannot cut the model.
    """
    missing = [axis for axis in MESH_AXES if axis not in mesh.shape]
    if missing:
        raise UserError(
            f"the mesh has the axes {', '.join(mesh.shape)} and needs {', '.join(missing)} too; "
            "megajax.core.mesh.MeshSpec(tensor=2).build() makes one with all of them"
        )
    if model is None:
        return Layout(mesh, rules(zero, decode))
    check.check_weights(model, mesh.shape, rules(zero, decode))
    heads, _ = model.sizes.get("kv_heads", (mesh.shape["tensor"], ""))
    return Layout(mesh, rules(zero, decode, kv_copies(heads, mesh.shape["tensor"])))


def kv_copies(kv_heads: int, tensor: int) -> int:
    """Returns how many tensor ranks hold each key-value head: more than one where the heads are
    fewer than the ranks (so in Megatron-LM and vLLM). One number divides the other."""
    return max(tensor // kv_heads, 1)


def place(layout: Layout, axes: Tree, params: Tree) -> Tree:
    """Puts parameters on the layout's devices, as they rest. axes: as ModelParts.axes; a leaf may
    be packed (core/packed.py)."""
    words = packed_axes(axes, params)
    specs = jax.tree.map(lambda w: layout.named(layout.stored(*w)), words, is_leaf=is_words)
    return jax.device_put(params, specs)
