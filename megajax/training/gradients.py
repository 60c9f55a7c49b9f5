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

local      a network that computes its own loss (models/parts.py, of_loss) runs inside a shard_map,
           on whole weights and a device's rows, with all of the above in one message a leaf.

Pipelines have loops of their own (parallel/pipeline.py), with the same exchange in them.

Parameters that are not trained (Task.trains) are constants of what is differentiated: they are
gathered like the others, and there is no gradient of them, not even zeros.

Legend: L layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from megajax.core.axes import BATCH_AXES
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.layers.losses import LossSums
from megajax.models.parts import Batch, ModelParts, Remat, Stream, map_words
from megajax.parallel import sharding
from megajax.parallel.exchange import PLAIN, Exchange, Streamed, lead, led, wire_of
from megajax.parallel.pipeline import REST, Gradients, Pipeline, Turn, add_copies
from megajax.schedule.route import Route
from megajax.training.task import TrainState

Array = jax.Array
WIRE = 0x77697265  # folded into a step's key: of what the exchange rounds by


Sums = Callable[[Tree, Batch, Turn], LossSums]  # of parameters and a micro-batch
Value = Callable[..., Array]  # of sums and the targets of a step: what falls
# Of a state, a batch, the step's total, a key and, of a pipeline, its route.
Differentiate = Callable[..., Gradients]


def exchange_of(cfg: Any, parts: ModelParts, layout: Layout) -> Exchange | None:
    """Returns what lies between masters and weights in use; None: the model gathers these itself.

    cfg: a JobConfig. layout: of the masters. Call it under the mesh.
    """
    if cfg.wire == "none" and cfg.zero != "optimizer":
        return None
    used = sharding.layout(layout.mesh, "none", model=cfg.model)
    dtype = jnp.dtype(cfg.train.dtype)
    return Exchange(parts.axes, layout, used, wire_of(cfg), dtype, parts.trains)


def without_stages(
    cfg: Any, parts: ModelParts, exchange: Exchange | None, value: Value
) -> Differentiate:
    """Returns the gradients of a step without pipeline stages. parts: on the layout of weights in
    use, if there is an exchange."""
    remat, pieces = cfg.train.keeps, cfg.train.accumulate
    if exchange is None:
        return without_exchange(scanned(parts, plain_sums(parts, remat), value, pieces))
    if cfg.zero == "full":
        return without_exchange(scanned(parts, sharded_sums(parts, exchange, remat), value, pieces))
    if exchange.keeps_errors or exchange.wire.start_step:
        return gathered(exchange, scanned(parts, plain_sums(parts, remat), value, pieces))
    if pieces > 1:
        return accumulated(parts, exchange, remat, value, pieces)
    return streamed(parts, exchange, remat, value)


def plain_sums(parts: ModelParts, remat: Remat) -> Sums:
    """Returns the loss sums of weights that the model gathers where it uses them."""
    return lambda params, micro, turn: parts.loss(params, micro, turn.key, remat)


def scanned(
    parts: ModelParts, sums_of: Sums, value: Value, pieces: int, always: bool = False
) -> Callable[..., tuple[LossSums, Tree]]:
    """Returns (params, batch, total, turn) -> (sums, gradients) by differentiating the loss, one
    micro-batch after the other. pieces: of them; more than one, or always: the batch is stacked."""

    def objective(
        trained: Tree, params: Tree, micro: Batch, total: Array, turn: Turn
    ) -> tuple[Array, LossSums]:
        sums = sums_of(parts.joined(trained, params), micro, turn)
        return value(sums, total), sums

    grad_of = jax.grad(objective, has_aux=True)

    def gradients(params: Tree, batch: Batch, total: Array, turn: Turn) -> tuple[LossSums, Tree]:
        trained = parts.trained(params)
        if pieces == 1 and not always:
            grads, sums = grad_of(trained, params, batch, total, turn)
            return sums, grads

        def micro_step(carry: tuple, piece: tuple) -> tuple[tuple, None]:
            index, micro = piece
            drawn = turn._replace(key=jax.random.fold_in(turn.key, index))
            grads, sums = grad_of(trained, params, micro, total, drawn)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), carry, (sums, grads)), None

        first = jax.tree.map(lambda x: x[0], dict(batch))
        like, sums = jax.eval_shape(grad_of, trained, params, first, total, turn)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
        items = (jnp.arange(pieces), dict(batch))
        return lax.scan(micro_step, (none, jax.tree.map(_zeros, trained, like)), items)[0]

    return gradients


def _zeros(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """Returns float32 zeros to which gradients of x may be added: partial sums, if they are."""
    partial = like.sharding is not None and like.sharding.spec.unreduced
    if not partial:
        return jnp.zeros_like(x)
    return reshard(jnp.zeros(like.shape, jnp.float32), like.sharding.spec)


def without_exchange(gradients: Callable[..., tuple[LossSums, Tree]]) -> Differentiate:
    """Returns what a step asks for, of gradients of the masters."""

    def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
        return Gradients(*gradients(state.params, batch, total, Turn(key, state.step)))

    return differentiate


def pipelined(pipe: Pipeline, value: Value) -> Differentiate:
    """Gradients by the pipeline's table, whose route is the last argument."""

    def differentiate(
        state: TrainState, batch: Batch, total: Array, key: Array, route: Route
    ) -> Gradients:
        turn = None
        if pipe.exchange is not None:
            turn = Turn(jax.random.fold_in(key, WIRE), state.step, state.copies, state.errors)
        return pipe.gradients(state.params, batch, route, value, total, turn=turn)

    return differentiate


# ---- with an exchange; the parts are on the layout of weights in use


def gathered(exchange: Exchange, gradients: Callable[..., tuple[LossSums, Tree]]) -> Differentiate:
    """All weights before the first micro-batch, all gradients after the last one."""

    def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
        turn, wire_key = Turn(key, state.step), jax.random.fold_in(key, WIRE)
        used, copies, squares = exchange.gather(state.params, state.copies, wire_key)
        sums, grads = gradients(used, batch, total, turn)
        grads, errors = exchange.scatter(grads, wire_key, state.step, state.errors)
        return Gradients(sums, grads, copies, squares, errors)

    return differentiate


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


def streamed(parts: ModelParts, exchange: Exchange, remat: Remat, value: Value) -> Differentiate:
    """One micro-batch a step, of copied weights: each layer is fetched beside the one before."""
    stack, (layers, rest) = parts.stack, split(exchange, parts)

    def objective(
        trained: Tree, params: Tree, copies: Tree, batch: Batch, total: Array, turn: Turn
    ) -> tuple[Array, tuple]:
        params = parts.joined(trained, params)
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

    def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
        turn = Turn(key, state.step)
        grads, (sums, copies, squares) = jax.grad(objective, has_aux=True)(
            parts.trained(state.params), state.params, state.copies, batch, total, turn
        )
        return Gradients(sums, grads, copies, squares)

    return differentiate


def accumulated(
    parts: ModelParts, exchange: Exchange, remat: Remat, value: Value, pieces: int
) -> Differentiate:
    """Several micro-batches a step, of copied weights: gradients leave beside the last one."""
    stack, (layers, rest) = parts.stack, split(exchange, parts)
    earlier = scanned(parts, plain_sums(parts, remat), value, pieces - 1, always=True)

    def objective(
        trained: Tree,
        params: Tree,
        used: Tree,
        grads: Tree,
        batch: Batch,
        total: Array,
        turn: Turn,
        key: Array,
    ) -> tuple[Array, LossSums]:
        params = parts.joined(trained, params)
        whole = layers.summed(grads[stack])

        def run(step: Callable, x: Array, masters: Tree, count: int) -> tuple[Array, Any]:
            return Streamed(layers, step, key).leave(x, masters, used[stack], whole)

        outer, used_outer, grads_outer = (
            {k: x for k, x in tree.items() if k != stack} for tree in (params, used, grads)
        )
        left = rest.leave(outer, used_outer, grads_outer, jax.random.fold_in(key, REST), turn.step)
        sums = parts.loss(left | {stack: params[stack]}, batch, turn.key, remat, Stream(run=run))
        return value(sums, total), sums

    def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
        turn, wire_key = Turn(key, state.step), jax.random.fold_in(key, WIRE)
        used, copies, squares = exchange.gather(state.params, state.copies, wire_key)
        first = {k: x[: pieces - 1] for k, x in batch.items()}
        sums, grads = earlier(used, first, total, turn)
        last = {k: x[pieces - 1] for k, x in batch.items()}
        drawn = turn._replace(key=jax.random.fold_in(key, pieces - 1))
        grads, more = jax.grad(objective, has_aux=True)(
            parts.trained(state.params), state.params, used, grads, last, total, drawn, wire_key
        )
        sums = jax.tree.map(lambda t, x: t + x.astype(t.dtype), sums, more)
        return Gradients(sums, grads, copies, squares)

    return differentiate


def split(exchange: Exchange, parts: ModelParts) -> tuple[Exchange, Exchange]:
    """Returns the exchanges of one layer and of all that is in no layer."""
    stack = parts.stack
    layer = exchange.part(lambda tree: tree[stack], lambda words: words[1:])
    rest = exchange.part(
        lambda tree: {k: x for k, x in tree.items() if k != stack}, lambda words: words
    )
    return layer, rest


# ---- a network that computes its own loss, inside a shard_map


@dataclasses.dataclass(frozen=True)
class LocalNetwork:
    """Runs ModelParts.network on whole weights and a device's rows.

    layout: of the masters. exchange: what brings weights and takes gradients away. batch: how each
    member of one micro-batch lies. pieces: micro-batches of a step. Matrices and kernels are cast
    to `dtype`, vectors stay float32. Axes that do not cut rows repeat the work.
    """

    parts: ModelParts
    layout: Layout
    exchange: Exchange
    batch: Mapping[str, P]
    pieces: int
    dtype: jnp.dtype

    def sums(self, params: Tree, batch: Batch) -> LossSums:
        """Returns the loss sums of one micro-batch."""

        def local(params: Tree, batch: Batch) -> LossSums:
            sums = self.parts.network(self._weights(params, None, None)[0], batch, None)  # type: ignore
            return self._total(sums)

        specs = self._specs(), dict(self.batch)
        return jax.shard_map(
            local, mesh=self.layout.mesh, in_specs=specs, out_specs=P(), check_vma=False
        )(params, batch)

    def differentiate(self, value: Value) -> Differentiate:
        """Returns the gradients of a step."""
        mesh, exchange = self.layout.mesh, self.exchange
        stacked = {k: P(None, *spec) if self.pieces > 1 else spec for k, spec in self.batch.items()}
        copies = exchange.copied_specs() if exchange.wire.difference else None
        errors = exchange.devices if exchange.keeps_errors else None
        squares = exchange.devices if self._has_codec else None

        def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
            turn = Turn(key, state.step, state.copies, state.errors)
            specs = self._specs()
            found = Gradients(P(), self.parts.trained(specs), copies, squares, errors)  # type: ignore
            return jax.shard_map(
                functools.partial(self._local, value),
                mesh=mesh,
                in_specs=(specs, stacked, P(), Turn(P(), P(), copies, errors)),
                out_specs=found,
                check_vma=False,
            )(state.params, dict(batch), total, turn)

        return differentiate

    def _local(
        self, value: Value, params: Tree, batch: Batch, total: Array, turn: Turn
    ) -> Gradients:
        wire_key = jax.random.fold_in(turn.key, WIRE)
        used, copies, squares = self._weights(params, turn.copies, wire_key)
        repeats = self.layout.mesh.size // self.layout.ways(BATCH_AXES)

        def objective(trained: Tree, micro: Batch, key: Array) -> tuple[Array, LossSums]:
            sums = self.parts.network(self.parts.joined(trained, used), micro, key)  # type: ignore
            return value(sums, total) / repeats, sums

        grad_of = jax.grad(objective, has_aux=True)
        trained = self.parts.trained(used)
        if self.pieces == 1:
            grads, sums = grad_of(trained, batch, turn.key)
        else:

            def micro_step(carry: tuple, piece: tuple) -> tuple[tuple, None]:
                index, micro = piece
                found = grad_of(trained, micro, jax.random.fold_in(turn.key, index))
                return jax.tree.map(lambda t, x: t + x.astype(t.dtype), carry, found), None

            first = jax.tree.map(lambda x: x[0], batch)
            like = jax.eval_shape(grad_of, trained, first, turn.key)
            none = (
                jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), like[0]),
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like[1]),
            )
            items = (jnp.arange(self.pieces), batch)
            (grads, sums), _ = lax.scan(micro_step, none, items)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        errors = None if turn.errors is None else led(turn.errors)
        grads, errors = self.exchange.scatter_local(grads, wire_key, turn.step, errors)
        grads = map_words(functools.partial(add_copies, self.layout), self.parts.axes, grads)
        errors = None if errors is None else lead(errors)
        squares = squares if self._has_codec else None
        return Gradients(self._total(sums), grads, copies, squares, errors)

    @property
    def _has_codec(self) -> bool:
        """Whether the weights in use may lack something of the masters, which a step reports."""
        return self.exchange.wire.weights is not None

    def _weights(self, params: Tree, copies: Tree, key: Array | None) -> tuple[Tree, Tree, Array]:
        """Returns (whole weights in the type of compute, the new copies, squares)."""
        exchange = self.exchange
        if copies is None and exchange.wire.difference:  # an evaluation: nothing is quantized
            exchange = dataclasses.replace(exchange, wire=PLAIN)
        used, new, squares = exchange.gather_local(params, copies, key)
        cast = lambda x: x.astype(self.dtype if x.ndim > 1 else x.dtype)  # noqa: E731
        return jax.tree.map(cast, used), new, squares

    def _total(self, sums: LossSums) -> LossSums:
        axes = self.layout.live(BATCH_AXES)
        return jax.tree.map(lambda x: lax.psum(x, axes), sums) if axes else sums

    def _specs(self) -> Tree:
        return map_words(lambda words: self.layout.stored(*words), self.parts.axes)
