"""Gradients of a step: one micro-batch after the other, and how weights reach where they are used.

Without a wire, masters are cast and gathered where a model uses them. With one (--wire), and with
--shard.zero=optimizer, an Exchange (parallel/exchange.py) lies between masters and model:

streamed   each layer's weights come while the layer before it computes and, by differentiation,
           each layer's gradients leave while the layer before it is differentiated. Fully sharded
           weights come again in the backward pass; of copied ones what came is kept.
accumulated  of several micro-batches: all weights come before the first one; gradients are added
           up where they are made, in float32, and leave, layer by layer, while the last micro-batch
           is differentiated.
gathered   all weights come first, all gradients leave last: with error feedback, because a backward
           pass cannot return the errors that it leaves, and with a first quantized step.

Pipelines have loops of their own (parallel/pipeline.py), with the same exchange in them.

Legend: L layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import reshard

from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.layers.losses import LossSums
from megajax.models.parts import Batch, ModelParts, Remat, Stream, map_words
from megajax.parallel import sharding
from megajax.parallel.buckets import wire_of
from megajax.parallel.exchange import Exchange
from megajax.parallel.moves import REST, Found, Turn
from megajax.parallel.pipeline import Pipeline
from megajax.parallel.streamed import Streamed
from megajax.training.state import TrainState

Array = jax.Array
WIRE = 0x77697265  # folded into a step's key: of what the exchange rounds by


Sums = Callable[[Tree, Batch, Turn], LossSums]  # of parameters and a micro-batch
Value = Callable[..., Array]  # of sums and the targets of a step: what falls
Gradients = Callable[[TrainState, Batch, Array, Array], Found]  # of a state, batch, targets, key


def exchange_of(cfg: Any, parts: ModelParts, layout: Layout) -> Exchange | None:
    """Returns what lies between masters and weights in use; None: the model gathers these itself.

    cfg: a JobConfig. layout: of the masters. Call it under the mesh.
    """
    if cfg.wire == "none" and cfg.zero != "optimizer":
        return None
    used = sharding.layout(layout.mesh, "none", model=cfg.model)
    dtype = jnp.dtype(cfg.train.dtype)
    return Exchange(parts.axes, layout, used, wire_of(cfg), dtype)


def without_stages(
    cfg: Any, parts: ModelParts, exchange: Exchange | None, value: Value
) -> Gradients:
    """Returns the gradients of a step without pipeline stages. parts: on the layout of weights in
    use, if there is an exchange."""
    remat, pieces = cfg.train.keeps, cfg.train.accumulate
    if exchange is None:
        return without_exchange(scanned(plain_sums(parts, remat), value, pieces))
    if cfg.zero == "full":
        return without_exchange(scanned(sharded_sums(parts, exchange, remat), value, pieces))
    if exchange.keeps_errors or exchange.wire.start_step:
        return gathered(exchange, scanned(plain_sums(parts, remat), value, pieces))
    if pieces > 1:
        return accumulated(parts, exchange, remat, value, pieces)
    return streamed(parts, exchange, remat, value)


def plain_sums(parts: ModelParts, remat: Remat) -> Sums:
    """Returns the loss sums of weights that the model gathers where it uses them."""
    return lambda params, micro, turn: parts.loss(params, micro, turn.key, remat)


def scanned(
    sums_of: Sums, value: Value, pieces: int, always: bool = False
) -> Callable[..., tuple[LossSums, Tree]]:
    """Returns (params, batch, total, turn) -> (sums, gradients) by differentiating the loss, one
    micro-batch after the other. pieces: of them; more than one, or always: the batch is stacked."""

    def objective(params: Tree, micro: Batch, total: Array, turn: Turn) -> tuple:
        sums = sums_of(params, micro, turn)
        return value(sums, total), sums

    grad_of = jax.grad(objective, has_aux=True)

    def gradients(params: Tree, batch: Batch, total: Array, turn: Turn) -> tuple[LossSums, Tree]:
        if pieces == 1 and not always:
            grads, sums = grad_of(params, batch, total, turn)
            return sums, grads

        def micro_step(carry: tuple, piece: tuple) -> tuple[tuple, None]:
            index, micro = piece
            here = turn._replace(key=jax.random.fold_in(turn.key, index))
            grads, sums = grad_of(params, micro, total, here)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), carry, (sums, grads)), None

        first = jax.tree.map(lambda x: x[0], dict(batch))
        like, found = jax.eval_shape(grad_of, params, first, total, turn)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)
        items = (jnp.arange(pieces), dict(batch))
        return lax.scan(micro_step, (none, jax.tree.map(_zeros, params, like)), items)[0]

    return gradients


def _zeros(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """Returns float32 zeros to which gradients of x may be added: partial sums, if they are."""
    partial = like.sharding is not None and like.sharding.spec.unreduced
    if not partial:
        return jnp.zeros_like(x)
    return reshard(jnp.zeros(like.shape, jnp.float32), like.sharding.spec)


def without_exchange(gradients: Callable[..., tuple[LossSums, Tree]]) -> Gradients:
    """Returns what a step asks for, of gradients of the masters."""

    def found(state: TrainState, batch: Batch, total: Array, key: Array) -> Found:
        return Found(*gradients(state.params, batch, total, Turn(key, state.step)))

    return found


def pipelined(pipe: Pipeline, value: Value) -> Gradients:
    """Gradients by the pipeline's table."""

    def found(state: TrainState, batch: Batch, total: Array, key: Array) -> Found:
        turn = None
        if pipe.exchange is not None:
            turn = Turn(jax.random.fold_in(key, WIRE), state.step, state.copies, state.errors)
        return pipe.gradients(state.params, batch, value, total, turn=turn)

    return found


# ---- with an exchange; the parts are on the layout of weights in use


def gathered(exchange: Exchange, gradients: Callable[..., tuple[LossSums, Tree]]) -> Gradients:
    """All weights before the first micro-batch, all gradients after the last one."""

    def found(state: TrainState, batch: Batch, total: Array, key: Array) -> Found:
        turn, wire_key = Turn(key, state.step), jax.random.fold_in(key, WIRE)
        used, copies, squares = exchange.gather(state.params, state.copies, wire_key)
        sums, grads = gradients(used, batch, total, turn)
        grads, errors = exchange.scatter(grads, wire_key, state.step, state.errors)
        return Found(sums, grads, copies, squares, errors)

    return found


def sharded_sums(parts: ModelParts, exchange: Exchange, remat: Remat) -> Sums:
    """Returns the loss sums of fully sharded masters, fetched layer by layer in what the backward
    pass runs again; their gradients are the masters'."""
    stack, (layers, rest) = parts.stack, split(exchange, parts)

    def sums(params: Tree, micro: Batch, turn: Turn) -> LossSums:
        key = jax.random.fold_in(turn.key, WIRE)

        def layer(masters: Tree, index: Array) -> Tree:
            return layers.fetch(masters, None, jax.random.fold_in(key, index), turn.step)[0]

        outer = {k: x for k, x in params.items() if k != stack}
        used = rest.fetch(outer, None, jax.random.fold_in(key, REST), turn.step)[0]
        whole = used | {stack: params[stack]}
        return parts.loss(whole, micro, turn.key, remat, Stream(layer))

    return sums


def streamed(parts: ModelParts, exchange: Exchange, remat: Remat, value: Value) -> Gradients:
    """One micro-batch a step, of copied weights: each layer is fetched beside the one before."""
    stack, (layers, rest) = parts.stack, split(exchange, parts)

    def objective(
        params: Tree, copies: Tree, batch: Batch, total: Array, turn: Turn
    ) -> tuple[Array, tuple]:
        key, found = jax.random.fold_in(turn.key, WIRE), {}

        def run(step: Callable, x: Array, masters: Tree, count: int) -> tuple[Array, Any]:
            held = None if copies is None else copies[stack]
            x, ys, found["copies"], found["squares"] = Streamed(layers, step, key).run(
                x, masters, held
            )
            return x, ys

        outer = {k: x for k, x in params.items() if k != stack}
        held = None if copies is None else {k: x for k, x in copies.items() if k != stack}
        used, held, squares = rest.fetch(outer, held, jax.random.fold_in(key, REST), turn.step)
        whole = used | {stack: params[stack]}
        sums = parts.loss(whole, batch, turn.key, remat, Stream(run=run))
        new = None if copies is None else held | {stack: found["copies"]}
        return value(sums, total), (sums, new, squares + found["squares"])

    def gradients(state: TrainState, batch: Batch, total: Array, key: Array) -> Found:
        turn = Turn(key, state.step)
        grads, (sums, copies, squares) = jax.grad(objective, has_aux=True)(
            state.params, state.copies, batch, total, turn
        )
        return Found(sums, grads, copies, squares)

    return gradients


def accumulated(
    parts: ModelParts, exchange: Exchange, remat: Remat, value: Value, pieces: int
) -> Gradients:
    """Several micro-batches a step, of copied weights: gradients leave beside the last one."""
    stack, (layers, rest) = parts.stack, split(exchange, parts)
    earlier = scanned(plain_sums(parts, remat), value, pieces - 1, always=True)

    def objective(
        params: Tree, used: Tree, grads: Tree, batch: Batch, total: Array, turn: Turn, key: Array
    ) -> tuple[Array, LossSums]:
        whole = layers.summed(grads[stack])

        def run(step: Callable, x: Array, masters: Tree, count: int) -> tuple[Array, Any]:
            return Streamed(layers, step, key).leave(x, masters, used[stack], whole)

        outer, used_outer, grads_outer = (
            {k: x for k, x in tree.items() if k != stack} for tree in (params, used, grads)
        )
        left = rest.leave(outer, used_outer, grads_outer, jax.random.fold_in(key, REST), turn.step)
        sums = parts.loss(left | {stack: params[stack]}, batch, turn.key, remat, Stream(run=run))
        return value(sums, total), sums

    def gradients(state: TrainState, batch: Batch, total: Array, key: Array) -> Found:
        turn, wire_key = Turn(key, state.step), jax.random.fold_in(key, WIRE)
        used, copies, squares = exchange.gather(state.params, state.copies, wire_key)
        first = {k: x[: pieces - 1] for k, x in batch.items()}
        sums, grads = earlier(used, first, total, turn)
        last = {k: x[pieces - 1] for k, x in batch.items()}
        own = turn._replace(key=jax.random.fold_in(key, pieces - 1))
        grads, more = jax.grad(objective, has_aux=True)(
            state.params, used, grads, last, total, own, wire_key
        )
        sums = jax.tree.map(lambda t, x: t + x.astype(t.dtype), sums, more)
        return Found(sums, grads, copies, squares)

    return gradients


def split(exchange: Exchange, parts: ModelParts) -> tuple[Exchange, Exchange]:
    """Returns the exchanges of one layer and of all that is in no layer."""
    stack = parts.stack
    layer = map_words(lambda words: words[1:], exchange.axes[stack])
    rest = {k: words for k, words in exchange.axes.items() if k != stack}
    return dataclasses.replace(exchange, axes=layer), dataclasses.replace(exchange, axes=rest)
