"""The weights of a runtime, in the bits that a placement gives their layers."""

from collections.abc import Sequence
from typing import Any

import jax

from megajax.core.errors import UserError
from megajax.core.packed import LayerRuns, PackedWeight, runs_of
from megajax.core.tree import Tree
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.quant import Format, quantize_model

GROUP, DENSE = 128, 16  # (LLM-PQ's kernels) inputs that share a scale; bits of what stays as it is


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedWeight)


def _packed(tree: Tree) -> list[Any]:
    return [w for w in jax.tree.leaves(tree, is_leaf=_is_packed) if _is_packed(w)]


def in_bits_of(params: Tree, cfg: DecoderConfig, bits_I: Sequence[int]) -> Tree:
    """Returns the parameters in the placement's bits. Raises: UserError where they have others."""
    if not _packed(params):
        if all(bits >= DENSE for bits in bits_I):
            return params
        formats = [
            None if bits >= DENSE else Format(bits, GROUP, 0, scale_dtype="float16")
            for bits in bits_I
        ]
        return quantize_model(params, cfg, formats)
    runs: LayerRuns = runs_of(params[decoder.parts(cfg).stack], cfg.layers)
    for stack, start, stop in zip(runs.stacks, runs.starts, runs.stops, strict=True):
        found = {w.weight.format.bits for w in _packed(stack) if hasattr(w, "weight")} or {DENSE}
        for layer in range(start, stop):
            wanted = min(bits_I[layer], DENSE)
            if found != {wanted}:
                raise UserError(
                    f"layer {layer} of the parameters has {sorted(found)} bits, and {wanted} in "
                    "the placement; quantize the dense parameters by it"
                )
    return params


def one_rank(params: Tree, ranks: Sequence[int]) -> None:
    """Refuses quantized weights on tensor ranks. Raises: UserError."""
    if _packed(params) and max(ranks) > 1:
        raise UserError(
            "quantized matrices are not cut over tensor ranks yet; give each stage one device"
        )
