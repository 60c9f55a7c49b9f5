"""Held-out loss, in nats a token and bits a byte."""

import math
from collections.abc import Iterable, Sequence

import jax

from megajax.core.tree import Tree
from megajax.data.corpus import Corpus
from megajax.layers.losses import LossSums
from megajax.models.parts import Batch
from megajax.training.step import TrainStep


def evaluate(
    train_step: TrainStep, params: Tree, batches: Iterable[Batch], corpora: Sequence[Corpus]
) -> dict[str, float | int | None]:
    """Returns eval_loss (nats a token), eval_bits_per_byte and eval_tokens, or {} without batches.

    Bits per byte makes tokenizers comparable: total bits over the bytes of the text. It is None
    when nobody knows the bytes (a foreign .bin). Corpora get equal shares of the rows, so their
    bytes a token count equally.
    """
    total: LossSums | None = None
    for batch in batches:
        sums = train_step.evaluate(params, batch)
        total = sums if total is None else total + sums
    if total is None:
        return {}
    count = int(total.count)
    loss = float(jax.device_get(total.cross_entropy)) / max(count, 1)
    return {
        "eval_loss": loss,
        "eval_bits_per_byte": bits_per_byte(loss, corpora),
        "eval_tokens": count,
    }


def bits_per_byte(nats_per_token: float, corpora: Sequence[Corpus]) -> float | None:
    """Converts a loss; None when a corpus does not know its bytes."""
    ratios = [c.bytes_per_token for c in corpora if c.held_out is not None]
    if not ratios or any(r is None for r in ratios):
        return None
    mean = sum(r for r in ratios if r is not None) / len(ratios)
    return nats_per_token / math.log(2) / mean
