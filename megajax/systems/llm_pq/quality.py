"""The loss of quality by quantized weights: measured on held-out text, and estimated.

`calibrate` gathers statistics of the inputs of every product on some text. `loss_of` measures.
`expected_loss` estimates from the curvature of the loss, without held-out text. Sums of the errors
of products (`quant.sensitivity`), which LLM-PQ uses (arXiv 2403.01136, section 4.2), do not know
how much the outputs of a layer matter.

Legend: B rows, S positions, T tokens, K inputs of a product.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.core.packed import PackedWeight
from megajax.core.tree import Tree, name
from megajax.data.config import DataConfig
from megajax.data.documents import is_held_out
from megajax.data.source import open_source
from megajax.data.tokenizer import Tokenizer
from megajax.layers import ops
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import check_params
from megajax.quant.compensated import row_format
from megajax.quant.formats import Format
from megajax.quant.qtensor import dequantize, quantize
from megajax.quant.quantized_model import inputs_of, matrices
from megajax.quant.statistics import Statistics

# ---- calibration
#
# Calibration runs one layer at a time: the device holds the sums of one layer and the residual
# streams of all batches; the sums of finished layers are in host memory. GPTQ (arXiv 2210.17323)
# feeds each layer the output of the quantized layers before it. Here every layer sees the stream of
# the dense model, so that one calibration serves every plan of bits (LLM-PQ, arXiv 2403.01136,
# section 4.2).


Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Watched(PackedWeight):
    """A dense weight that tells its products' inputs: tell(x, how many dimensions are summed)."""

    weight: Array
    tell: Callable[[Array, int], None] = dataclasses.field(metadata={"static": True})

    def piece(self) -> Self:
        return self

    def astype(self, dtype: Any) -> Self:
        return dataclasses.replace(self, weight=self.weight.astype(dtype))

    def matmul(self, x: Array, contract: int = 1, **after: Any) -> Array:
        assert not any(v is not None for v in after.values())  # the plain Ops fuse nothing
        self.tell(x, contract)
        return ops.matmul(x, self.weight, contract)


def calibrate(
    params: Tree, cfg: DecoderConfig, batches: Iterable[Any], *, dtype: Any = "float32"
) -> dict[str, Statistics]:
    """Returns {name of a leaf: Statistics of its products' inputs}, stacked over the layers.

    Args: params: dense, on one device. batches: token ids, int (B, S) each, of one shape; 128
        sequences of 2048 tokens are the papers' number. dtype: that of the residual stream.
    Returns: NumPy arrays for `megajax.quant.quantize_model(calibration=...)`. Leaves with the same
        inputs (query, key and value; gate and up) share their arrays.
    Raises: UserError without a batch, for unlike shapes, for what are no token ids of the model,
        and for parameters that are quantized.
    """
    leaves = jax.tree.leaves(params, is_leaf=lambda w: isinstance(w, PackedWeight))
    if any(isinstance(w, PackedWeight) for w in leaves):
        raise UserError("calibration: the parameters are quantized; give the dense ones")
    parts = decoder.parts(cfg, dtype=dtype)
    check_params(params, parts, "calibration")
    watched = [n.removeprefix(f"{parts.stack}.") for n in matrices(cfg.axes)]
    embed = jax.jit(functools.partial(_embed, parts))
    streams, contexts = [], []
    for tokens in batches:
        x, context = embed(params, jnp.asarray(token_ids("calibration", tokens, cfg.vocab)))
        if streams and x.shape != streams[0].shape:
            raise UserError(
                f"calibration: batches must have one shape; the first has {streams[0].shape[:2]}, "
                f"another {x.shape[:2]}"
            )
        streams.append(x)
        contexts.append(context)
    if not streams:
        raise UserError("calibration: there is no batch of text; give one at least")
    blocks = {parts.block_of(i): i for i in range(cfg.layers)}
    steps = {one: jax.jit(functools.partial(_layer, one, watched)) for one in blocks}
    statistics: list[Mapping[str, Statistics]] = []
    for layer in range(cfg.layers):
        weights = jax.tree.map(lambda w, i=layer: w[i], params[parts.stack])
        total: Any = None
        for i, (x, context) in enumerate(zip(streams, contexts, strict=True)):
            streams[i], sums = steps[parts.block_of(layer)](weights, x, context)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        statistics.append(jax.tree.map(np.asarray, total))
    stacked: dict[str, Statistics] = {}
    for joined in statistics[0]:
        layers = jax.tree.map(lambda *x: np.stack(x), *(each[joined] for each in statistics))
        stacked |= {f"{parts.stack}.{n}": layers for n in joined.split()}
    return stacked


def curvature(
    params: Tree, cfg: DecoderConfig, batches: Iterable[Any], *, dtype: Any = "float32"
) -> dict[str, np.ndarray]:
    """Returns {name of a leaf: F}, the diagonal of the loss's empirical Fisher matrix, float32.

    If the matrices of a trained model change by a dW that is independent of the data, as errors of
    rounding are, the loss is expected to change by 1/2 sum of F dW^2 nats a token. F is the sum
    over sequences of the squared gradient of the sequence's summed loss, divided by the number of
    tokens. Each sequence takes one backward pass.
    Args: as in `calibrate`.
    Raises: UserError without a sequence, and for what are no token ids of the model.
    """
    parts, names = decoder.parts(cfg, dtype=dtype), matrices(cfg.axes)

    def loss(leaves: dict[str, Array], params: Tree, tokens_S: Array) -> tuple[Array, Array]:
        x_BS, y_BS = tokens_S[None, :-1], tokens_S[None, 1:]
        positions_BS = jnp.arange(x_BS.shape[1], dtype=jnp.int32)[None]
        batch = {"tokens": x_BS, "targets": y_BS, "positions": positions_BS}
        sums = parts.loss(with_leaves(params, leaves), batch)
        return sums.cross_entropy, sums.count

    @functools.partial(jax.jit, donate_argnums=0)
    def step(total: Any, params: Tree, tokens_S: Array) -> tuple[Any, Array]:
        leaves = {n: leaf_of(params, n) for n in names}
        gradients, count = jax.grad(loss, has_aux=True)(leaves, params, tokens_S)
        return jax.tree.map(lambda f, g: f + jnp.square(g), total, gradients), count

    total: Any = {n: jnp.zeros_like(leaf_of(params, n)) for n in names}
    count = 0
    for tokens_BS in batches:
        for tokens_S in token_ids("curvature", tokens_BS, cfg.vocab):
            total, seen = step(total, params, tokens_S)
            count += int(seen)
    if not count:
        raise UserError("curvature: there is no sequence of text; give one at least")
    return {n: np.asarray(f) / count for n, f in total.items()}


def token_ids(op: str, ids: Any, vocab: int) -> np.ndarray:
    """Returns a batch of token ids, int32 (B, S). vocab: the model's, which ids must be below.

    Raises: UserError. JAX would take the last row of the embedding for an id that it lacks.
    """
    ids_BS = np.asarray(ids)
    if ids_BS.ndim != 2 or not np.issubdtype(ids_BS.dtype, np.integer):
        raise UserError(
            f"{op}: a batch must be token ids, integers (rows, tokens), got "
            f"{ids_BS.dtype}{ids_BS.shape}; give a list of batches"
        )
    if ids_BS.size and not (0 <= ids_BS.min() and ids_BS.max() < vocab):
        raise UserError(
            f"{op}: token ids must be from 0 to {vocab - 1}, the model's; these are "
            f"{ids_BS.min()} to {ids_BS.max()}"
        )
    return ids_BS.astype(np.int32)


def leaf_of(tree: Tree, n: str) -> Any:
    """Returns the member of nested dictionaries that a dotted name names."""
    return functools.reduce(lambda part, key: part[key], n.split("."), tree)


def with_leaves(params: Tree, leaves: Mapping[str, Any]) -> Tree:
    """Returns the parameters, in which these leaves, by dotted names, replace those of the same
    names."""
    return jax.tree_util.tree_map_with_path(lambda path, w: leaves.get(name(path), w), params)


def _embed(parts: Any, params: Tree, tokens_BS: Array) -> tuple[Array, Any]:
    positions_BS = jnp.broadcast_to(
        jnp.arange(tokens_BS.shape[1], dtype=jnp.int32), tokens_BS.shape
    )
    batch = {"tokens": tokens_BS, "positions": positions_BS}
    context = parts.context(batch, None)
    return parts.embed(params, batch, context), context


def _layer(
    block: Any, watched: list[str], weights: Tree, x_BSD: Array, context: Any
) -> tuple[Array, dict[str, Statistics]]:
    """Returns the stream after a layer, and the sums of each distinct input of its products.

    A sum's name is that of all leaves that have the input, joined by blanks.
    """
    seen: dict[int, tuple[Array, int, list[str]]] = {}

    def told(n: str, x: Array, contract: int) -> None:
        seen.setdefault(id(x), (x, contract, []))[2].append(n)

    def leaf(path: tuple, w: Array) -> Any:
        n = name(path)
        return _Watched(w.shape, w, functools.partial(told, n)) if n in watched else w

    y_BSD, _, _ = block(jax.tree_util.tree_map_with_path(leaf, weights), x_BSD, context)
    inputs = {
        " ".join(names): x.reshape(*x.shape[: x.ndim - contract], -1)
        for x, contract, names in seen.values()
    }
    return y_BSD, {names: Statistics.of(x_xK) for names, x_xK in inputs.items()}


# ---- loss of quality


HELD_OUT = 0.05  # of a source's documents, by their content, as training holds them out


def windows(
    source: str, tokenizer: Tokenizer, shape: tuple[int, int], *, held_out: bool, seed: int = 0
) -> np.ndarray:
    """Returns token ids, int32 (rows, length), of held-out documents or of training documents.

    Documents are shuffled, joined (each with the tokenizer's begin and end tokens) and cut.
    Args: source: as --data.source. shape: rows and length. held_out: whether held-out documents are
      taken. seed: the seed of the order.
    Raises: UserError if the source has too little text.
    """
    rows, length = shape
    documents = open_source(source, DataConfig(source=source))
    texts = [d.text for d in documents.documents() if is_held_out(d.text, HELD_OUT) == held_out]
    order = np.random.default_rng(seed).permutation(len(texts))
    pieces: list[np.ndarray] = []
    total = 0
    for batch in itertools.batched(order, 32):
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
    rise = np.zeros((cfg.layers, len(formats)))
    for leaf_name, f in curvature(params, cfg, [rows]).items():
        words, leaf = leaf_of(cfg.axes, leaf_name), leaf_of(params, leaf_name)
        for layer in range(cfg.layers):
            w = jnp.asarray(leaf[layer])
            w_KN = w.reshape(inputs_of(words[1:], w.shape), -1)
            f_KN = f[layer].reshape(w_KN.shape)
            for place, fmt in enumerate(formats):
                if fmt is not None:
                    q = quantize(w_KN, row_format("expected_loss", w_KN, fmt))
                    rise[layer, place] += 0.5 * float((f_KN * (dequantize(q) - w_KN) ** 2).sum())
    return rise
