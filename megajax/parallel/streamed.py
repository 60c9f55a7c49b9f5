"""A stack of layers whose weights and gradients travel beside its own work.

Forward, each layer's weights are fetched while the layer before it computes. Backward, in the turn
of layer i the gradients of layer i + 1 travel inside the nodes, and those of layer i + 2, which did
so a turn before, between the nodes: no message waits for another, and each ends with the turn. The
loop is written out, because the transposition of the forward loop leaves it to the compiler where
a message ends, and XLA's scheduler ends it where it began (compiled for H100, jax 0.11.2).

Weights are not kept for the backward pass a second time: they are in the new copies, or in a
buffer of their own where there are none.

Of several micro-batches the weights are there already for the last one (`Streamed.leave`), and the
gradients of the others are added, layer by layer, to what it sends.

Legend: L layers, x the residual stream.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.core.tree import Tree
from megajax.parallel.exchange import Exchange
from megajax.parallel.residuals import attach, detach

Array = jax.Array


class Way(NamedTuple):
    """What travels backward. dx: of the residual stream. grads: of the layer after this one. sent:
    of the one after that, between its two halves."""

    dx: Array
    grads: Tree
    sent: Any


class Streamed:
    """Runs the layers of one step."""

    def __init__(self, exchange: Exchange, step: Callable, key: Array):
        """exchange: of one layer. step(x, (weights, index)) -> (x, y). key: layers fold their
        numbers into it."""
        self._exchange, self._step, self._key = exchange, step, key

    def run(self, x: Array, masters: Tree, copies: Tree) -> tuple[Array, Any, Tree, Array]:
        """Returns (x, stacked ys, the new copies, squares as of Exchange.gather).

        masters, copies: stacked. Gradients of the masters are pieces, as of Exchange.scatter.
        """

        @jax.custom_vjp
        def through(x: Array, masters: Tree, copies: Tree) -> tuple:
            return self._forward(x, masters, copies)[0]

        def backward(saved: tuple, given: tuple) -> tuple:
            return *self._backward(saved, *given[:2]), None

        through.defvjp(self._forward, backward)
        x, ys, copies, squares = through(x, masters, copies)
        return x, ys, *lax.stop_gradient((copies, squares))

    def leave(self, x: Array, masters: Tree, used: Tree, sums: Tree) -> tuple[Array, Any]:
        """Returns (x, stacked ys) of weights in use that are there already.

        used: stacked; their values only. sums: stacked gradients of earlier micro-batches, float32,
        partial sums as `used` has them. Gradients of the masters are pieces of all of them.
        """

        @jax.custom_vjp
        def through(x: Array, masters: Tree) -> tuple:
            return forward(x, masters)[0]

        def forward(x: Array, masters: Tree) -> tuple[tuple, tuple]:
            def one(x: Array, item: tuple) -> tuple[Array, tuple]:
                x, y, kept = self._layer(x, item[1], item[0])
                return x, (y, kept)

            items = (jnp.arange(len(jax.tree.leaves(masters)[0])), used)
            x, (ys, kept) = lax.scan(one, x, items)
            return (x, ys), (masters, kept)

        def backward(saved: tuple, given: tuple) -> tuple:
            (masters, kept), (dx, dys) = saved, given
            return self._backward((masters, None, (kept, used), None), dx, dys, sums)

        through.defvjp(forward, backward)
        return through(x, masters)

    # ---- forward

    def _forward(self, x: Array, masters: Tree, copies: Tree) -> tuple[tuple, tuple]:
        count = len(jax.tree.leaves(masters)[0])

        def both(carry: tuple, item: tuple) -> tuple[tuple, tuple]:
            x, weights, copies, squares = carry
            index, mine = item
            coming, copies, more = self._fetch(mine, copies, index + 1)
            x, y, kept = self._layer(x, weights, index)
            return (x, coming, copies, squares + more), (y, kept, self._spare(weights, copies))

        first, following = _at(masters, 0), jax.tree.map(lambda w: w[1:], masters)
        carry = (x, *self._fetch(first, copies, jnp.int32(0)))
        indices = jnp.arange(count - 1)
        (x, weights, copies, squares), stacked = lax.scan(both, carry, (indices, following))
        x, y, kept = self._layer(x, weights, jnp.int32(count - 1))
        last = (y, kept, self._spare(weights, copies))
        ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), stacked[0], y)
        return (x, ys, copies, squares), (masters, copies, stacked[1:], last[1:])

    def _fetch(self, mine: Tree, copies: Tree, index: Array) -> tuple[Tree, Tree, Array]:
        """Returns (a layer's weights, the copies with its own replaced where they lie, squares)."""
        put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        weights, new, squares = self._exchange.gather(mine, _take(copies, index), self._own(index))
        return weights, jax.tree.map(put, copies, new), squares

    def _layer(self, x: Array, weights: Tree, index: Array) -> tuple[Array, Any, Any]:
        """Returns (x, y, what the backward pass needs beside the weights)."""
        (x, y), vjp = jax.vjp(self._function(index), weights, x)
        return x, y, detach(vjp)

    def _function(self, index: Array) -> Callable:
        return lambda weights, x: self._step(x, (weights, index))

    def _spare(self, weights: Tree, copies: Tree) -> Tree:
        """Weights that the backward pass would not find in the copies."""
        return weights if copies is None else None

    # ---- backward

    def _backward(self, saved: tuple, dx: Array, dys: Any, sums: Tree = None) -> tuple[Array, Tree]:
        """saved: of `_forward`. sums: as of `leave`."""
        masters, copies, stacked, last = saved
        count = len(jax.tree.leaves(masters)[0])
        floats, rebuild = _floating(dys)

        def turn(way: Way, index: Array, item: tuple) -> tuple[Way, Tree]:
            """Differentiates a layer beside the messages of the two after it."""
            mine, dy, (kept, weights) = item
            if copies is not None:
                weights = self._exchange.in_use(mine, _take(copies, index))
            pieces = sent = None
            if way.sent is not None:
                pieces = self._exchange.receive(way.sent, self._own(index + 2), mine)
            if way.grads is not None:
                sent = self._send(way.grads, sums, index + 1)
            template = jax.eval_shape(
                lambda w, x: jax.vjp(self._function(jnp.int32(0)), w, x)[1], weights, way.dx
            )
            grads, dx = attach(template, kept, weights)((way.dx, rebuild(dy)))
            return Way(dx, self._exchange.trained(grads), sent), pieces

        def at(index: int) -> tuple:
            own = last if index == count - 1 and last is not None else _at(stacked, index)
            return _at(masters, index), _at(floats, index), own

        way = Way(dx, None, None)
        for index in range(count - 1, max(count - 3, -1), -1):
            way, _ = turn(way, jnp.int32(index), at(index))
        body: Tree = None
        if count > 2:
            items = jax.tree.map(lambda a: a[: count - 2], (masters, floats, stacked))
            body_of = lambda way, item: turn(way, item[0], item[1])  # noqa: E731
            way, body = lax.scan(body_of, way, (jnp.arange(count - 2), items), reverse=True)
        ends = (
            []
            if way.sent is None
            else [self._exchange.receive(way.sent, self._own(jnp.int32(1)), _at(masters, 1))]
        )
        sent = self._send(way.grads, sums, jnp.int32(0))
        ends = [self._exchange.receive(sent, self._own(jnp.int32(0)), _at(masters, 0)), *ends]
        ends = jax.tree.map(lambda *rows: jnp.stack(rows), *ends)
        if body is not None:
            ends = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ends, body)
        return way.dx, ends

    def _send(self, grads: Tree, sums: Tree, index: Array) -> Any:
        return self._exchange.send(grads, self._own(index), sums, index)

    def _own(self, index: Array) -> Array:
        return jax.random.fold_in(self._key, index)


def _at(tree: Tree, index: int) -> Tree:
    return jax.tree.map(lambda x: x[index], tree)


def _take(tree: Tree, index: Array) -> Tree:
    take = functools.partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(take, tree)


def _floating(dys: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """Returns (the leaves of stacked cotangents that a loop can cut, one layer's -> its tree).

    The others are of integers: JAX's own zeros, of a type that no loop takes.
    """
    leaves, tree = jax.tree.flatten(dys)
    real = [x.dtype != jax.dtypes.float0 for x in leaves]

    def rebuild(floats: list[Array]) -> Any:
        given = iter(floats)
        return tree.unflatten(
            [
                next(given) if is_real else np.zeros(x.shape[1:], jax.dtypes.float0)
                for x, is_real in zip(leaves, real, strict=True)
            ]
        )

    return [x for x, is_real in zip(leaves, real, strict=True) if is_real], rebuild
