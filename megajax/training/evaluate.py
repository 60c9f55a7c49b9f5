"""Held-out loss, in nats a token and bits a byte."""

import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from megajax.core.tree import Tree
from megajax.data.corpus import Corpus
from megajax.layers.losses import LossSums
from megajax.models.parts import Batch
from megajax.training.config import JobConfig
from megajax.training.step import TrainStep

MOST_SHOWN = 200  # (chosen) classes that have figures of their own


def evaluated_rows(cfg: JobConfig) -> int:
    """Returns how many held-out rows an evaluation reads: the same under any accumulation and on
    any mesh, whatever the batches in which they come."""
    return cfg.eval.batches * cfg.train.global_batch


def evaluate(
    train_step: TrainStep,
    params: Tree,
    batches: Iterable[Batch],
    corpora: Sequence[Corpus] | None,
    rows: Sequence[int] = (),
    labels: Sequence[str] = (),
) -> dict[str, float | int | None]:
    """Returns eval_NAME of each value that the task reports (eval_loss, of a language model in nats
    a token; eval_accuracy where it counts what it predicted right), eval_bits_per_byte, and
    eval_tokens, or the name of another unit: how many predictions there were; {} without any.

    labels: the names of a classifier's classes, of which `by_label` says more than these figures.

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
    values = jax.device_get(train_step.metrics(jax.device_get(total), np.float64(count)))
    found: dict[str, float | int | None] = {f"eval_{n}": float(x) for n, x in values.items()}
    found[f"eval_{train_step.task.unit}"] = count
    if corpora is not None:
        found["eval_bits_per_byte"] = bits_per_byte(float(values["loss"]), corpora, rows)
    if labels and "classes_3C" in total.terms:
        found |= by_label(jax.device_get(total.classes_3C), labels)
    return found


def by_label(classes_3C: np.ndarray, labels: Sequence[str]) -> dict[str, float | int | None]:
    """Returns of each class eval_precision/NAME (of what is said to be of it, how much is) and
    eval_recall/NAME (of what is of it, how much is said to be), None where nothing is, with
    eval_examples/NAME; and eval_f1, the mean over the classes with examples of their harmonic mean.

    classes_3C: as LossSums has them. Of more than MOST_SHOWN classes: eval_f1 only.
    """
    found: dict[str, float | int | None] = {}
    means: list[float] = []
    for name, counts in zip(labels, classes_3C.T.tolist(), strict=True):
        there, said, right = counts
        if there:
            means.append(2 * right / (there + said))
        if len(labels) <= MOST_SHOWN:
            found[f"eval_precision/{name}"] = right / said if said else None
            found[f"eval_recall/{name}"] = right / there if there else None
            found[f"eval_examples/{name}"] = there
    return found | {"eval_f1": sum(means) / len(means)}


def bits_per_byte(
    nats_per_token: float, corpora: Sequence[Corpus], rows: Sequence[int]
) -> float | None:
    """Converts a loss over `rows` rows of each corpus; None when one does not know its bytes."""
    parts = [(c.bytes_per_token, n) for c, n in zip(corpora, rows, strict=True) if n]
    if not parts or any(ratio is None for ratio, _ in parts):
        return None
    mean = sum(ratio * n for ratio, n in parts if ratio is not None) / sum(n for _, n in parts)
    return nats_per_token / math.log(2) / mean
