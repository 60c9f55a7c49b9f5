"""Families of real programs to time: our networks, optimizers and their pieces.

A split holds out whole families. Shapes are drawn at random; a seed always gives the same programs.
Sizes at `scale` 1 are for a CPU: at most about 2 GFLOP and 64 MiB a program. With a larger scale,
for a GPU, the scale of each program is drawn between 1 and it, most of them large, and half of the
programs compute in bfloat16.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.layers.moe import MoeConfig
from megajax.models import decoder, encoder, lstm_vae
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.parts import ModelParts
from megajax.systems.cdmpp import detector
from megajax.systems.cdmpp.draw import Draw, TooLarge
from megajax.training.optim import OptimConfig, make_optimizer

BFLOAT16 = 0.5  # (chosen) share of a GPU's programs


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with its arguments. number: position in the sequence, from 0; family: FAMILIES."""

    number: int
    family: str
    function: Callable
    args: tuple


Built = tuple[Callable, tuple]


# ---- whole networks


def _trained(parts: ModelParts, batch: dict, draw: Draw, forward: bool) -> Built:
    """A network's loss with its gradient, or the loss alone."""

    def loss(params: Any, batch: dict, key: jax.Array) -> jax.Array:
        sums = parts.loss(params, batch, key)
        return sums.cross_entropy / jnp.maximum(sums.count, 1).astype(jnp.float32)

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
    return _trained(lstm_vae.parts(cfg), batch, draw, draw.pick(False, True))


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


# ---- what networks consist of


def _of_attention(draw: Draw) -> Built:
    rows, heads, width = draw.pick(1, 2, 4), draw.count(2, 4, 8), draw.pick(16, 32, 64, 128)
    queries = draw.size(16, 384, 8)
    draw.limit(rows, heads, queries, queries)
    keys, is_causal = queries, draw.pick(True, False)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5
        if is_causal:
            seen = jnp.arange(queries)[:, None] >= jnp.arange(keys)
            scores = jnp.where(seen, scores, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    args = tuple(draw.floats(rows, n, heads, width) for n in (queries, keys, keys))
    if draw.pick(True, False):
        return attend, args
    return jax.grad(lambda *a: attend(*a).sum(), argnums=(0, 1, 2)), args


def _of_mlp(draw: Draw) -> Built:
    rows, width, hidden = (draw.size(16, 512, 4), draw.size(32, 512, 8), draw.size(64, 1536, 16))
    draw.limit(rows, hidden)
    act = draw.pick(jax.nn.gelu, jax.nn.relu, jax.nn.silu, jnp.tanh)

    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return x + act(x @ up) @ down

    args = draw.floats(rows, width), draw.floats(width, hidden), draw.floats(hidden, width)
    if draw.pick(True, False):
        return mlp, args
    return jax.grad(lambda *a: mlp(*a).sum(), argnums=(1, 2)), args


def _of_product(draw: Draw) -> Built:
    m, k, n = draw.size(1, 1024), draw.size(8, 1024), draw.size(8, 1024)
    batch = draw.pick(1, 1, 2, 4, 8)
    spelled = draw.pick("mk,kn->mn", "km,kn->mn", "mk,nk->mn")
    if batch > 1:
        m, k, n = m // 4 + 1, k // 2 + 1, n // 2 + 1
        spelled = draw.pick("bmk,bkn->bmn", "bkm,bkn->bmn", "bmk,bnk->bmn")
    sizes = {"b": batch, "m": m, "k": k, "n": n}
    draw.limit(batch, m, n)
    args = [draw.floats(*(sizes[c] for c in a)) for a in spelled.split("->")[0].split(",")]
    if draw.pick(True, False):
        return functools.partial(jnp.einsum, spelled), tuple(args)
    return lambda x, w, bias: jnp.einsum(spelled, x, w) + bias, (*args, draw.floats(n))


def _of_norm(draw: Draw) -> Built:
    rows, width = draw.size(8, 4096), draw.size(16, 2048)

    def rms(x: jax.Array, g: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g

    def layer(x: jax.Array, g: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * g

    def softmax(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.nn.softmax(x * g)

    norm = draw.pick(rms, layer, softmax)
    args = draw.floats(rows, width), draw.floats(width)
    if draw.pick(True, False):
        return norm, args
    return jax.grad(lambda *a: (norm(*a) ** 2).sum(), argnums=(0, 1)), args


def _of_convolution(draw: Draw) -> Built:
    side, rows, inner = draw.size(8, 64, 2), draw.pick(1, 2, 4), draw.size(3, 48)
    outer, kernel, stride = draw.size(4, 64), draw.pick(1, 3, 5), draw.pick(1, 2)
    draw.limit(rows, side, side, outer)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        order = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=order)
        return jax.nn.relu(y)

    args = draw.floats(rows, side, side, inner), draw.floats(kernel, kernel, inner, outer)
    if draw.pick(True, True, False):
        return convolve, args
    return jax.grad(lambda *a: convolve(*a).sum(), argnums=(0, 1)), args


def _of_layout(draw: Draw) -> Built:
    a, b, c = draw.size(4, 512), draw.size(4, 512), draw.size(2, 16)
    x = draw.floats(a, b, c)
    moves: Sequence[Callable] = (
        lambda x: x.transpose(draw_order),
        lambda x: x.reshape(a, b * c).T + 1.0,
        lambda x: jnp.concatenate([x, x[::-1]], axis),
        lambda x: jnp.pad(x, ((1, 2), (3, 4), (0, 1))) * 2.0,
        lambda x: jnp.roll(x, 3, axis),
        lambda x: x[:, ::2] * x[:, : (b + 1) // 2],
        lambda x: jnp.repeat(x, 2, axis),
        lambda x: jnp.stack([x, x + 1.0], axis),
        lambda x: x.swapaxes(0, 1) + x.swapaxes(0, 1) * 2.0,
    )
    draw_order, axis = draw.pick((1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0)), draw.pick(0, 1, 2)
    return draw.pick(*moves), (x,)


def _of_elements(draw: Draw) -> Built:
    rows, width = draw.size(4, 4096), draw.size(8, 2048)
    one: Sequence[Callable] = (
        jnp.tanh, jnp.exp, jnp.abs, jax.nn.gelu, jax.nn.silu, jnp.sqrt, jnp.sin, jnp.log1p,
        lambda v: jnp.maximum(v, 0.0), lambda v: v.astype(jnp.bfloat16).astype(jnp.float32),
    )  # fmt: skip
    two: Sequence[Callable] = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.divide)
    steps = [(draw.pick(*one), draw.pick(*two)) for _ in range(draw.pick(1, 1, 2, 3, 5, 8))]

    def chain(x: jax.Array, *others: jax.Array) -> jax.Array:
        for place, (unary, binary) in enumerate(steps):
            x = binary(unary(x), others[place % len(others)])
        return x

    count = draw.pick(1, 2, 3)
    shapes = [draw.pick((rows, width), (rows, width), (width,), (rows, 1)) for _ in range(count)]
    return chain, (draw.floats(rows, width), *(draw.floats(*s) for s in shapes))


def _of_reduction(draw: Draw) -> Built:
    x = draw.floats(draw.size(4, 1024), draw.size(4, 512), draw.pick(1, 2, 4, 8))
    axes = draw.pick((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
    how: Callable = draw.pick(
        jnp.sum, jnp.max, jnp.mean, jnp.var, jax.nn.logsumexp, lambda x, axis: jnp.sum(x * x, axis)
    )
    if draw.pick(True, True, True, False):
        return lambda x: how(x, axis=axes), (x,)
    return lambda x: (jnp.argmax(x, axis=axes[0]), jnp.cumsum(x, axis=axes[0])), (x,)


def _of_gather(draw: Draw) -> Built:
    table, width, count = draw.size(16, 8192), draw.size(4, 512), draw.size(8, 4096)
    draw.limit(count, width)
    x, places = draw.floats(table, width), draw.below(table, count)
    if draw.pick(True, False):
        return lambda x, i: x[i] * 2.0, (x, places)
    if draw.pick(True, False):
        return lambda x, i, y: x.at[i].add(y), (x, places, draw.floats(count, width))
    if draw.pick(True, False):
        return lambda x: jax.lax.top_k(x, min(4, width)), (x,)
    return lambda x: jnp.sort(x, axis=0), (x[:1024, :64],)


def _of_random(draw: Draw) -> Built:
    shape = draw.size(4, 2048), draw.size(8, 512)
    draw.limit(*shape)
    make = draw.pick(jax.random.normal, jax.random.uniform)
    if draw.pick(True, False):
        return lambda key: make(key, shape), (jax.random.key(0),)

    def drop(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, shape), x / 0.9, 0.0)

    return drop, (jax.random.key(0), draw.floats(*shape))


FAMILIES: dict[str, Callable[[Draw], Built]] = {
    "decoder": _of_decoder,
    "experts": _of_experts,
    "encoder": _of_encoder,
    "vit": _of_images,
    "lstm": _of_series,
    "update": _of_update,
    "attention": _of_attention,
    "mlp": _of_mlp,
    "product": _of_product,
    "norm": _of_norm,
    "convolution": _of_convolution,
    "layout": _of_layout,
    "elementwise": _of_elements,
    "reduction": _of_reduction,
    "gather": _of_gather,
    "random": _of_random,
    "detector": detector.drawn,
}


def program(
    number: int, names: Sequence[str] = tuple(FAMILIES), *, seed: int = 0, scale: float = 1.0
) -> Program:
    """Returns the program of this number, a function of (seed, number), of a family of `names`.

    scale: the largest factor on the sizes; a program with an array of more than LARGEST elements is
    drawn again, smaller. Above 1, a share of BFLOAT16 of the programs computes in bfloat16.
    """
    family = names[number % len(names)]
    mine, dtype = scale, jnp.float32
    if scale > 1:
        apart = np.random.default_rng([seed, number, 1])
        mine = scale ** apart.uniform() ** 0.5  # half of them are above scale ** 0.7
        dtype = jnp.bfloat16 if apart.uniform() < BFLOAT16 else jnp.float32
    while True:
        try:
            draw = Draw(np.random.default_rng([seed, number]), mine, dtype)
            function, args = FAMILIES[family](draw)
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
