"""The loss of quality by quantized weights: measured on held-out text, and estimated.

`loss_of` measures. `expected_loss` estimates from the curvature of the loss, without held-out text.
Sums of the errors of products (`quant.sensitivity`), which LLM-PQ uses (arXiv 2403.01136, section
4.2), do not know how much the outputs of a layer matter.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.core.tree import Tree
from megajax.data.config import DataConfig
from megajax.data.holdout import is_held_out
from megajax.data.source import open_source
from megajax.data.tokenizer import Tokenizer
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.quant.compensated import row_format
from megajax.quant.formats import Format
from megajax.quant.qtensor import dequantize, quantize
from megajax.quant.quantized_model import inputs_of
from megajax.systems.llm_pq.calibrate import curvature, leaf_of

HELD_OUT = 0.05  # of a source's documents, by their content, as training holds them out


def windows(
    source: str, tokenizer: Tokenizer, shape: tuple[int, int], *, held_out: bool, seed: int = 0
) -> np.ndarray:
    """Returns token ids, int32 (rows, length), of held-out documents or of training documents.

    Documents are shuffled, joined (each with the tokenizer's begin and end tokens) and cut.
    Args: source: as --data.source. shape: rows and length. held_out: which documents. seed: of the
      order.
    Raises: UserError if the source has too little text.
    """
    rows, length = shape
    found = open_source(source, DataConfig(source=source))
    texts = [d.text for d in found.documents() if is_held_out(d.text, HELD_OUT) == held_out]
    order = np.random.default_rng(seed).permutation(len(texts))
    pieces: list[np.ndarray] = []
    total = 0
    for batch in _batches(order, 32):
        for ids in tokenizer.encode([texts[i] for i in batch]):
            marks = ([] if m is None else [m] for m in (tokenizer.begin, tokenizer.end))
            begin, end = marks
            pieces.append(np.concatenate([begin, ids, end]).astype(np.int32))
            total += len(pieces[-1])
        if total >= rows * length:
            return np.concatenate(pieces)[: rows * length].reshape(rows, length)
    raise UserError(
        f"{source} has {total} tokens of text that is {'held out' if held_out else 'learnt'}, and "
        f"{rows} rows of {length} are {rows * length}; ask for fewer rows"
    )


def _batches(items: np.ndarray, size: int) -> Iterator[np.ndarray]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield np.array(batch)


def loss_of(params: Tree, cfg: DecoderConfig, rows: np.ndarray, *, batch: int = 4) -> float:
    """Returns the mean cross-entropy of the next token, in nats a token, computed in float32.

    Args: params: dense or quantized, on one device. rows: token ids, int32 (rows, length). batch:
      rows of one call.
    """
    run = _summed(cfg)
    total, count = 0.0, 0
    for start in range(0, len(rows), batch):
        sums = run(params, jnp.asarray(rows[start : start + batch], jnp.int32))
        total, count = total + float(sums[0]), count + int(sums[1])
    return total / count


@functools.cache
def _summed(cfg: DecoderConfig):
    parts = decoder.parts(cfg)

    @jax.jit
    def run(params: Tree, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BS, y_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(x_BS.shape[1], dtype=jnp.int32), x_BS.shape)
        sums = parts.loss(params, {"tokens": x_BS, "targets": y_BS, "positions": positions})
        return sums.cross_entropy, sums.count

    return run


def expected_loss(
    params: Tree, cfg: DecoderConfig, rows: np.ndarray, formats: Sequence[Format | None]
) -> np.ndarray:
    """Returns the expected rise of the loss, float64 (layers, formats), in nats a token.

    It is 1/2 sum of F dW^2 over the matrices of a layer, rounded to nearest; F is the diagonal of
    the Fisher matrix (`calibrate.curvature`). Sums over layers rank plans; as a number, a sum is an
    estimate for small changes only.
    Args: params: dense, on one device. rows: token ids, int32 (rows, length), of text like the
      training text. formats: None: the layer stays dense.
    """
    found = np.zeros((cfg.layers, len(formats)))
    for name, f in curvature(params, cfg, [rows]).items():
        words, leaf = leaf_of(cfg.axes, name), leaf_of(params, name)
        for layer in range(cfg.layers):
            w = jnp.asarray(leaf[layer])
            w_KN = w.reshape(inputs_of(words[1:], w.shape), -1)
            f_KN = f[layer].reshape(w_KN.shape)
            for place, fmt in enumerate(formats):
                if fmt is not None:
                    q = quantize(w_KN, row_format("expected_loss", w_KN, fmt))
                    found[layer, place] += 0.5 * float((f_KN * (dequantize(q) - w_KN) ** 2).sum())
    return found
