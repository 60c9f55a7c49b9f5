"""Families of real programs to time: our networks, optimizers and their pieces.

A split holds out whole families. Shapes are drawn at random; a seed always gives the same programs.
Sizes at `scale` 1 are for a CPU: at most about 2 GFLOP and 64 MiB a computation. With a larger
scale, for a GPU, the scale of each program is drawn between 1 and it, most of them large, and half
of the programs compute in bfloat16.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.layers.losses import LossSums
from megajax.layers.moe import MoeConfig
from megajax.models import decoder, encoder, lstm_vae
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.parts import ModelParts
from megajax.systems.cdmpp import pieces
from megajax.systems.cdmpp.pieces import Built, Draw, TooLarge
from megajax.training.optim import OptimConfig, make_optimizer
from megajax.training.task import Objective

BFLOAT16 = 0.5  # (chosen) share of a GPU's programs


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with its arguments. number: position in the sequence, from 0; family: its name."""

    number: int
    family: str
    function: Callable
    args: tuple


def _cross_entropy(sums: LossSums, total: jax.Array) -> jax.Array:
    return sums.cross_entropy / total


def _trained(
    parts: ModelParts,
    batch: dict,
    draw: Draw,
    forward: bool,
    objective: Objective = _cross_entropy,
) -> Built:
    """A network's loss with its gradient, or the loss alone."""

    def loss(params: Any, batch: dict, key: jax.Array) -> jax.Array:
        sums = parts.loss(params, batch, key)
        return objective(sums, jnp.maximum(sums.count, 1).astype(jnp.float32))

    args = draw.like(parts.abstract), batch, jax.random.key(1)
    return (loss if forward else jax.value_and_grad(loss)), args


def _tokens(draw: Draw, rows: int, length: int, vocab: int, heads: int) -> dict:
    draw.limit(rows, heads, length, length)
    draw.limit(rows, length, vocab)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    return {
        "tokens": draw.below(vocab, rows, length),
        "targets": draw.below(vocab, rows, length),
        "positions": positions,
    }


def _decoder_config(draw: Draw, **more: Any) -> DecoderConfig:
    heads = draw.count(2, 4, 8)
    return DecoderConfig(
        layers=draw.pick(1, 2, 3),
        width=draw.size(48, 256, 16),
        heads=heads,
        kv_heads=draw.pick(1, 2, heads),
        head_width=draw.count(16, 32, 64),
        mlp=draw.size(64, 768, 16),
        vocab=draw.size(256, 2048, 128),
        block=draw.pick("serial", "parallel"),
        norm=draw.pick("rms", "layer"),
        position=draw.pick("rope", "none"),
        activation=draw.pick("swiglu", "gelu"),
        bias="none",
        qk_norm=draw.pick(False, True),
        window=draw.pick(None, None, 16),
        **more,
    )


def _of_decoder(draw: Draw, **more: Any) -> Built:
    cfg = _decoder_config(draw, **more)
    batch = _tokens(draw, draw.pick(1, 2, 4), draw.size(16, 192, 8), cfg.vocab, cfg.heads)
    return _trained(
        decoder.parts(cfg, dtype=draw.dtype), batch, draw, draw.pick(False, False, True)
    )


def _of_experts(draw: Draw) -> Built:
    experts = draw.pick(4, 8)
    moe = MoeConfig(
        experts=experts,
        top_k=draw.pick(1, 2),
        width=draw.size(32, 256, 16),
        shared=draw.pick(0, 1),
        mode=draw.pick("dropless", "capacity"),
    )
    return _of_decoder(draw, moe=moe)


def _encoder_config(draw: Draw, vocab: int) -> EncoderConfig:
    heads = draw.count(2, 4, 8)
    return EncoderConfig(
        layers=draw.pick(1, 2, 3),
        width=heads * draw.count(16, 24, 32, 48),
        heads=heads,
        mlp=draw.size(64, 1024, 16),
        vocab=vocab,
        activation=draw.pick("gelu", "gelu_tanh"),
    )


def _of_encoder(draw: Draw) -> Built:
    cfg = _encoder_config(draw, draw.size(256, 2048, 128))
    batch = _tokens(draw, draw.pick(1, 2, 4), draw.size(16, 192, 8), cfg.vocab, cfg.heads)
    return _trained(
        encoder.parts(cfg, dtype=draw.dtype), batch, draw, draw.pick(False, False, True)
    )


def _of_images(draw: Draw) -> Built:
    """A vision transformer: patches by a convolution, then the encoder's blocks."""
    cfg = _encoder_config(draw, 128)
    parts, patch = encoder.parts(cfg, dtype=draw.dtype), draw.pick(4, 8, 16)
    side, rows = patch * draw.count(4, 6, 8, 12), draw.pick(1, 2, 4)
    cells = (side // patch) ** 2
    draw.limit(rows, cfg.heads, cells, cells)
    positions = jnp.broadcast_to(jnp.arange(cells, dtype=jnp.int32), (rows, cells))
    context = parts.context({"positions": positions}, None)

    def loss(weights: tuple, images: jax.Array) -> jax.Array:
        kernel, blocks, head = weights
        x = jax.lax.conv_general_dilated(
            images, kernel, (patch, patch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x.reshape(rows, cells, cfg.width)
        x, _ = jax.lax.scan(lambda x, w: (parts.block(w, x, context)[0], None), x, blocks)
        return jax.nn.log_softmax(x.mean(1) @ head).mean()

    blocks = draw.like(parts.abstract[parts.stack])
    weights = draw.floats(patch, patch, 3, cfg.width), blocks, draw.floats(cfg.width, 10)
    images = draw.floats(rows, side, side, 3)
    return (loss if draw.pick(False, True) else jax.grad(loss)), (weights, images)


def _of_series(draw: Draw) -> Built:
    """Minder's LSTM autoencoder of metrics."""
    cfg = lstm_vae.LstmVaeConfig(draw.pick(2, 4, 8), draw.pick(8, 16), draw.pick(4, 8, 16))
    metrics = draw.floats(draw.size(8, 256), cfg.window, cfg.metrics).astype(jnp.float32)
    batch = {"targets": jnp.abs(metrics)}
    return _trained(lstm_vae.parts(cfg), batch, draw, draw.pick(False, True), lstm_vae.objective)


def _of_update(draw: Draw) -> Built:
    """One update of an optimizer on a decoder's parameters."""
    name = draw.pick("adamw", "lamb", "muon")
    parts = decoder.parts(_decoder_config(draw))
    rule = make_optimizer(OptimConfig(name=name), 100, parts.axes)
    params = draw.like(parts.abstract)

    def update(grads: Any, state: Any, params: Any) -> Any:
        changes, state = rule.update(grads, state, params)
        return jax.tree.map(jnp.add, params, changes), state

    return update, (params, draw.like(jax.eval_shape(rule.init, params)), params)


FAMILIES: dict[str, Callable[[Draw], Built]] = {
    "decoder": _of_decoder,
    "experts": _of_experts,
    "encoder": _of_encoder,
    "vit": _of_images,
    "lstm": _of_series,
    "update": _of_update,
    "attention": pieces.attention,
    "mlp": pieces.mlp,
    "product": pieces.several(pieces.product, 8),
    "norm": pieces.several(pieces.norm, 12),
    "convolution": pieces.several(pieces.convolution, 12),
    "layout": pieces.several(pieces.layout, 16),
    "elementwise": pieces.several(pieces.elements, 24),
    "reduction": pieces.several(pieces.reduction, 16),
    "gather": pieces.several(pieces.gather, 12),
    "random": pieces.several(pieces.random, 2),
    "detector": pieces.detector,
}
# Programs that predictors may be fitted on as well, but that no split judges: nobody runs them.
SYNTHETIC: dict[str, Callable[[Draw], Built]] = {"mixture": pieces.several(pieces.mixture, 8)}


def program(
    number: int,
    names: Sequence[str] = tuple(FAMILIES),
    *,
    seed: int = 0,
    scale: float = 1.0,
    bfloat16: float | None = None,
) -> Program:
    """Returns the program of this number, a function of (seed, number), of a family of `names`.

    names: of FAMILIES or SYNTHETIC. scale: the largest factor on the sizes; a program with an
    array of more than LARGEST elements is drawn again, smaller. bfloat16: share of the programs
    that compute in it if the scale is above 1; None: BFLOAT16.
    """
    family = names[number % len(names)]
    mine, dtype = scale, jnp.float32
    if scale > 1:
        apart = np.random.default_rng([seed, number, 1])
        mine = scale ** apart.uniform() ** 0.5  # half of them are above scale ** 0.7
        share = BFLOAT16 if bfloat16 is None else bfloat16
        dtype = jnp.bfloat16 if apart.uniform() < share else jnp.float32
    while True:
        try:
            draw = Draw(np.random.default_rng([seed, number]), mine, dtype)
            function, args = (FAMILIES | SYNTHETIC)[family](draw)
            return Program(number, family, function, args)
        except TooLarge:
            mine /= 4


def programs(
    names: Sequence[str] = tuple(FAMILIES), *, seed: int = 0, start: int = 0, scale: float = 1.0
) -> Iterator[Program]:
    """Yields programs without end, a family after the other; see `program`.

    start: the first program's number.
    """
    for number in itertools.count(start):
        yield program(number, names, seed=seed, scale=scale)
