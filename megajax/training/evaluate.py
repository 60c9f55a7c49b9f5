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
    train_step: TrainStep,
    params: Tree,
    batches: Iterable[Batch],
    corpora: Sequence[Corpus] | None,
    rows: Sequence[int] = (),
) -> dict[str, float | int | None]:
    """Returns eval_loss (nats a token), eval_bits_per_byte and eval_tokens, or {} without targets;
    eval_accuracy too where the model counts what it predicted right.

    Bits per byte makes tokenizers comparable: total bits over the bytes of the text. It is None
    when nobody knows the bytes (a foreign .bin), and left out where targets are no text (corpora
    None). rows: of each corpus in the batches.
    """
    total: LossSums | None = None
    for batch in batches:
        sums = train_step.evaluate(params, batch)
        total = sums if total is None else total + sums
    count = 0 if total is None else int(total.count)
    if total is None or not count:
        return {}
    loss = float(jax.device_get(total.cross_entropy)) / count
    found: dict[str, float | int | None] = {"eval_loss": loss, "eval_tokens": count}
    if corpora is not None:
        found["eval_bits_per_byte"] = bits_per_byte(loss, corpora, rows)
    if total.right is not None:
        found["eval_accuracy"] = int(total.right) / count
    return found


def bits_per_byte(
    nats_per_token: float, corpora: Sequence[Corpus], rows: Sequence[int]
) -> float | None:
    """Converts a loss over `rows` rows of each corpus; None when one does not know its bytes."""
    parts = [(c.bytes_per_token, n) for c, n in zip(corpora, rows, strict=True) if n]
    if not parts or any(ratio is None for ratio, _ in parts):
        return None
    mean = sum(ratio * n for ratio, n in parts if ratio is not None) / sum(n for _, n in parts)
    return nats_per_token / math.log(2) / mean
