"""Where the input scales of AWQ (arXiv 2306.00978) can go: into what makes the inputs.

In x w = (x / s) (s w) the division costs nothing, and needs no place in a file, if x comes out of a
norm's gain or out of the columns of another product: then these are divided by s. So the matrices
behind one norm must share s (`quantize_model(sources=)`). Nothing can be divided before the output
of attention with fewer key-value heads than heads, whose inputs share columns, and behind an
activation that is not gated.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from megajax.core.packed import map_runs
from megajax.core.tree import Tree
from megajax.layers.mlp import ACTIVATIONS
from megajax.models.decoder_config import DecoderConfig
from megajax.quant.kernel import QuantKernel

VALUE, UP = "blocks.attention.value", "blocks.mlp.up"


def sources(cfg: DecoderConfig) -> dict[str, str | None]:
    """Returns {matrix of the blocks: what its inputs come out of, and can be divided; or None}."""
    # A norm that attention and MLP share has unlike inputs; a scale stored less 1 is not divided.
    is_serial = cfg.block == "serial" and cfg.norms != "after" and cfg.norm != "rms_plus_one"
    before = "blocks.attention_norm" if is_serial else None
    origins = dict.fromkeys((f"blocks.attention.{n}" for n in ("query", "key", "value")), before)
    origins["blocks.attention.out"] = VALUE if cfg.heads == cfg.kv_heads else None
    is_gated = ACTIVATIONS[cfg.activation].is_gated
    before = "blocks.mlp_norm" if is_serial else None
    origins |= dict.fromkeys(["blocks.mlp.gate", UP] if is_gated else [UP], before)
    return origins | {"blocks.mlp.down": UP if is_gated else None}


def fold(params: Tree, cfg: DecoderConfig) -> Tree:
    """Returns the parameters without input scales: what makes the inputs is divided by them.

    The scales of a QTensor's groups are rounded to their type again: in float16 by a part of 2^-11
    at most, and more below 6.1e-5, where float16 has fewer bits.
    params: of quantize_model with `sources(cfg)`.
    Raises: UserError where matrices behind one norm have unlike scales.
    """
    named = sources(cfg)

    def run(stack: Tree) -> Tree:
        stack = jax.tree.map(lambda x: x, stack, is_leaf=_is_kernel)  # dictionaries of its own
        divided: dict[str, jax.Array] = {}  # by which scale; matrices behind one norm share it
        for n, source in named.items():
            home, leaf = n.split(".")[1:]
            kernel = stack[home][leaf]
            if not isinstance(kernel, QuantKernel) or kernel.scale is None or source is None:
                continue
            stack[home] = stack[home] | {leaf: dataclasses.replace(kernel, scale=None)}
            scale_LK = kernel.scale[:, 0]
            if source in divided:
                if not jnp.array_equal(scale_LK, divided[source]):
                    raise UserError(
                        f"{n} and another matrix behind {source} have unlike scales of inputs; "
                        "quantize with sources=folding.sources(cfg)"
                    )
                continue
            divided[source] = scale_LK
            home, *leaf = source.split(".")[1:]
            if leaf:
                stack[home] = _divided(stack[home], leaf[0], scale_LK)
            else:
                stack[home] = {m: x / scale_LK.astype(x.dtype) for m, x in stack[home].items()}
        return stack

    return params | {"blocks": map_runs(run, params["blocks"])}


def _is_kernel(x: Any) -> bool:
    return isinstance(x, QuantKernel)


def _divided(leaves: Tree, name: str, scale_LN: jax.Array) -> Tree:
    """Returns the leaves with the columns of one matrix, and its bias, divided."""
    kernel, bias = leaves[name], f"{name}_bias"
    q, by = kernel.weight, scale_LN[:, None, None]  # layers, pieces, groups, columns

    def divided(x: Any) -> Any:
        return None if x is None else (x.astype(jnp.float32) / by).astype(x.dtype)

    q = dataclasses.replace(q, scales=divided(q.scales), zeros=divided(q.zeros))
    folded = leaves | {name: dataclasses.replace(kernel, weight=q)}
    if bias in leaves:
        b = leaves[bias]
        folded[bias] = b / scale_LN.reshape(b.shape).astype(b.dtype)
    return folded
