"""Gradients of a step: weights arrive, micro-batches are differentiated, gradients leave.

Without a wire, masters are cast and gathered where a model uses them. With one (--wire), and with
--shard.zero=optimizer, an Exchange (parallel/exchange.py) lies between masters and model:

sharded    fully sharded masters: each layer's weights are fetched in what the backward pass runs
           again, and its gradients leave by the transposition of that fetch.
gathered   all weights arrive first, all gradients leave last: with error feedback, because a
           backward pass cannot return the errors that it leaves, with a first quantized step, and
           where layers compute in runs of unlike precisions, or are of several kinds.
streamed   one micro-batch of copied weights: each layer's weights arrive during the work of the
           layer before it, and each layer's gradients leave while the layer before it is
           differentiated. What arrived is kept for the backward pass.
accumulated  several micro-batches of copied weights: all weights arrive before the first one;
           gradients are added up where they are made, in float32, and leave, layer by layer, while
           the last micro-batch is differentiated.

local      a network that computes its own loss (models/parts.py, of_loss) runs inside a shard_map,
           on whole weights and a device's rows, with all of the above in one message a leaf.

Pipelines have loops of their own (parallel/pipeline.py), with the same exchange in them.

Parameters that are not trained (Task.trains) are constants of what is differentiated: they are
gathered like the others, and there is no gradient of them, not even zeros.

Legend: L layers, x the residual stream.
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
from megajax.models.parts import Batch, ModelParts, Remat, map_words
from megajax.parallel import sharding
from megajax.parallel.exchange import (
    PLAIN,
    Exchange,
    LayerLoop,
    add_device_dim,
    drop_device_dim,
    wire_of,
)
from megajax.parallel.pipeline import REST, Gradients, Pipeline, StepInputs, add_copies
from megajax.schedule.route import Route
from megajax.training.task import TrainState

Array = jax.Array
WIRE = 0x77697265  # folded into a step's key: of what the exchange rounds by


Sums = Callable[[Tree, Batch, StepInputs], LossSums]  # of parameters and a micro-batch
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
    ordered = cfg.precisions is not None
    return Exchange(parts.axes, layout, used, wire_of(cfg), dtype, parts.trains, ordered)


def without_stages(
    cfg: Any, parts: ModelParts, exchange: Exchange | None, value: Value
) -> Differentiate:
    """Returns the gradients of a step without pipeline stages. parts: on the layout of weights in
    use, if there is an exchange."""
    remat, pieces = cfg.train.keeps, cfg.train.accumulate

    def plain(params: Tree, micro: Batch, inputs: StepInputs) -> LossSums:
        return parts.loss(params, micro, inputs.key, remat)

    if exchange is None or cfg.zero == "full":
        sums_of = plain if exchange is None else sharded_sums(parts, exchange, remat)
        gradients = scanned(parts, sums_of, value, pieces)

        def of_masters(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
            return Gradients(*gradients(state.params, batch, total, StepInputs(key, state.step)))

        return of_masters
    if exchange.keeps_errors or exchange.wire.start_step or parts.runs or parts.kinds:
        return gathered(exchange, scanned(parts, plain, value, pieces))
    if pieces > 1:
        earlier = scanned(parts, plain, value, pieces - 1, is_stacked=True)
        return accumulated(parts, exchange, remat, value, pieces, earlier)
    return streamed(parts, exchange, remat, value)


def pipelined(pipe: Pipeline, value: Value) -> Differentiate:
    """Gradients by the pipeline's table, whose route is the last argument."""

    def differentiate(
        state: TrainState, batch: Batch, total: Array, key: Array, route: Route
    ) -> Gradients:
        inputs = None
        if pipe.exchange is not None:
            wire_key = jax.random.fold_in(key, WIRE)
            inputs = StepInputs(wire_key, state.step, state.copies, state.errors)
        return pipe.gradients(state.params, batch, route, value, total, inputs=inputs)

    return differentiate


# ---- micro-batches


def scanned(
    parts: ModelParts, sums_of: Sums, value: Value, pieces: int, is_stacked: bool | None = None
) -> Callable[..., tuple[LossSums, Tree]]:
    """Returns (params, batch, total, inputs) -> (sums, gradients) by differentiating the loss, one
    micro-batch after the other.

    pieces: micro-batches. is_stacked: whether the batch has a dimension of them; None: if there are
    several.
    """

    def objective(
        trained: Tree, params: Tree, micro: Batch, total: Array, inputs: StepInputs
    ) -> tuple[Array, LossSums]:
        sums = sums_of(parts.joined(trained, params), micro, inputs)
        return value(sums, total), sums

    grad_of = jax.grad(objective, has_aux=True)

    def gradients(
        params: Tree, batch: Batch, total: Array, inputs: StepInputs
    ) -> tuple[LossSums, Tree]:
        trained = parts.trained(params)
        if not (pieces > 1 if is_stacked is None else is_stacked):
            grads, sums = grad_of(trained, params, batch, total, inputs)
            return sums, grads

        def micro_step(carry: tuple, piece: tuple) -> tuple[tuple, None]:
            index, micro = piece
            drawn = inputs._replace(key=jax.random.fold_in(inputs.key, index))
            grads, sums = grad_of(trained, params, micro, total, drawn)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), carry, (sums, grads)), None

        first = jax.tree.map(lambda x: x[0], dict(batch))
        like, sums = jax.eval_shape(grad_of, trained, params, first, total, inputs)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
        items = (jnp.arange(pieces), dict(batch))
        return lax.scan(micro_step, (none, jax.tree.map(_zeros, trained, like)), items)[0]

    return gradients


def _zeros(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """Returns float32 zeros to which gradients of x may be added: partial sums, if they are."""
    partial = like.sharding is not None and like.sharding.spec.unreduced
    if not partial:
        return jnp.zeros_like(x, jnp.float32)
    return reshard(jnp.zeros(like.shape, jnp.float32), like.sharding.spec)


# ---- with an exchange; the parts are on the layout of weights in use


def split(exchange: Exchange, parts: ModelParts) -> tuple[Exchange, Exchange]:
    """Returns the exchanges of one layer and of all that is in no layer."""
    stack = parts.stack
    layer = exchange.part(lambda tree: tree[stack], lambda words: words[1:])
    outer = exchange.part(parts.outer, lambda words: words)
    return layer, outer


def sharded_sums(parts: ModelParts, exchange: Exchange, remat: Remat) -> Sums:
    """Returns the loss sums of fully sharded masters, fetched layer by layer in what the backward
    pass runs again; their gradients are the masters'."""
    stack, (layers, outer) = parts.stack, split(exchange, parts)

    def sums(params: Tree, micro: Batch, inputs: StepInputs) -> LossSums:
        key = jax.random.fold_in(inputs.key, WIRE)

        def fetch(masters: Tree, index: Array) -> Tree:
            return layers.fetch(masters, None, jax.random.fold_in(key, index), inputs.step)[0]

        outer_key = jax.random.fold_in(key, REST)
        used = outer.fetch(parts.outer(params), None, outer_key, inputs.step)[0]
        return parts.loss(used | {stack: params[stack]}, micro, inputs.key, remat, fetch)

    return sums


def gathered(exchange: Exchange, gradients: Callable[..., tuple[LossSums, Tree]]) -> Differentiate:
    """All weights before the first micro-batch, all gradients after the last one."""

    def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
        wire_key = jax.random.fold_in(key, WIRE)
        used, copies, squares = exchange.gather(state.params, state.copies, wire_key, total)
        sums, grads = gradients(used, batch, total, StepInputs(key, state.step))
        grads, errors = exchange.scatter(grads, wire_key, state.step, state.errors, sums)
        return Gradients(sums, grads, copies, squares, errors)

    return differentiate


def streamed(parts: ModelParts, exchange: Exchange, remat: Remat, value: Value) -> Differentiate:
    """One micro-batch a step, of copied weights."""
    stack, (layers, outer) = parts.stack, split(exchange, parts)

    def objective(
        trained: Tree, params: Tree, copies: Tree, batch: Batch, total: Array, inputs: StepInputs
    ) -> tuple[Array, tuple]:
        params = parts.joined(trained, params)
        key = jax.random.fold_in(inputs.key, WIRE)
        outer_copies = None if copies is None else parts.outer(copies)
        outer_key = jax.random.fold_in(key, REST)
        used, outer_copies, squares = outer.fetch(
            parts.outer(params), outer_copies, outer_key, inputs.step
        )
        used = used | {stack: params[stack]}
        x, step = parts.enter(used, batch, inputs.key, remat)
        with jax.named_scope("blocks"):
            stack_copies = None if copies is None else copies[stack]
            loop = LayerLoop(layers, step, key)
            x, moe, stack_copies, more = loop.fetch(x, params[stack], stack_copies)
        sums = parts.finish(used, x, moe, batch)
        new = None if copies is None else outer_copies | {stack: stack_copies}
        return value(sums, total), (sums, new, squares + more)

    def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
        inputs = StepInputs(key, state.step)
        grads, (sums, copies, squares) = jax.grad(objective, has_aux=True)(
            parts.trained(state.params), state.params, state.copies, batch, total, inputs
        )
        return Gradients(sums, grads, copies, squares)

    return differentiate


def accumulated(
    parts: ModelParts,
    exchange: Exchange,
    remat: Remat,
    value: Value,
    pieces: int,
    earlier: Callable[..., tuple[LossSums, Tree]],
) -> Differentiate:
    """Several micro-batches a step, of copied weights: the gradients of all of them leave while the
    last one is differentiated. earlier: `scanned`, of the micro-batches before it."""
    stack, (layers, outer) = parts.stack, split(exchange, parts)

    def objective(
        trained: Tree,
        params: Tree,
        used: Tree,
        grads: Tree,
        batch: Batch,
        total: Array,
        inputs: StepInputs,
        key: Array,
    ) -> tuple[Array, LossSums]:
        params = parts.joined(trained, params)
        stack_grads = layers.summed(grads[stack])
        outer_params, outer_used, outer_grads = (parts.outer(t) for t in (params, used, grads))
        outer_key = jax.random.fold_in(key, REST)
        leaving = outer.leave(outer_params, outer_used, outer_grads, outer_key, inputs.step)
        leaving = leaving | {stack: params[stack]}
        x, step = parts.enter(leaving, batch, inputs.key, remat)
        with jax.named_scope("blocks"):
            loop = LayerLoop(layers, step, key)
            x, moe = loop.leave(x, params[stack], used[stack], stack_grads)
        sums = parts.finish(leaving, x, moe, batch)
        return value(sums, total), sums

    def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
        inputs, wire_key = StepInputs(key, state.step), jax.random.fold_in(key, WIRE)
        used, copies, squares = exchange.gather(state.params, state.copies, wire_key)
        first = {k: x[: pieces - 1] for k, x in batch.items()}
        sums, grads = earlier(used, first, total, inputs)
        last = {k: x[pieces - 1] for k, x in batch.items()}
        drawn = inputs._replace(key=jax.random.fold_in(key, pieces - 1))
        grads, more = jax.grad(objective, has_aux=True)(
            parts.trained(state.params), state.params, used, grads, last, total, drawn, wire_key
        )
        sums = jax.tree.map(lambda t, x: t + x.astype(t.dtype), sums, more)
        return Gradients(sums, grads, copies, squares)

    return differentiate


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
            used, _, _ = self._weights(params, None, None)
            return self._total(self.parts.network(used, batch, None))  # type: ignore

        specs = map_words(lambda words: self.layout.stored(*words), self.parts.axes)
        return jax.shard_map(
            local,
            mesh=self.layout.mesh,
            in_specs=(specs, dict(self.batch)),
            out_specs=P(),
            check_vma=False,
        )(params, batch)

    def differentiate(self, value: Value) -> Differentiate:
        """Returns the gradients of a step."""
        exchange, devices = self.exchange, self.exchange.devices
        stacked = {k: P(None, *spec) if self.pieces > 1 else spec for k, spec in self.batch.items()}
        copies = exchange.copied_specs() if exchange.wire.difference else None
        errors = devices if exchange.keeps_errors else None
        squares = devices if exchange.wire.weights is not None else None
        specs = map_words(lambda words: self.layout.stored(*words), self.parts.axes)
        grads: Any = self.parts.trained(specs)

        def differentiate(state: TrainState, batch: Batch, total: Array, key: Array) -> Gradients:
            return jax.shard_map(
                functools.partial(self._local, value),
                mesh=self.layout.mesh,
                in_specs=(specs, stacked, P(), StepInputs(P(), P(), copies, errors)),
                out_specs=Gradients(P(), grads, copies, squares, errors),  # type: ignore
                check_vma=False,
            )(
                state.params,
                dict(batch),
                total,
                StepInputs(key, state.step, state.copies, state.errors),
            )

        return differentiate

    def _local(
        self, value: Value, params: Tree, batch: Batch, total: Array, inputs: StepInputs
    ) -> Gradients:
        """What one device does in a step."""
        wire_key = jax.random.fold_in(inputs.key, WIRE)
        used, copies, squares = self._weights(params, inputs.copies, wire_key)
        repeats = self.layout.mesh.size // self.layout.ways(BATCH_AXES)
        gradients = scanned(
            self.parts,
            lambda params, micro, inputs: self.parts.network(params, micro, inputs.key),  # type: ignore
            lambda sums, total: value(sums, total) / repeats,
            self.pieces,
        )
        sums, grads = gradients(used, batch, total, inputs)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        errors = None if inputs.errors is None else drop_device_dim(inputs.errors)
        grads, errors = self.exchange.scatter_local(grads, wire_key, inputs.step, errors)
        grads = map_words(functools.partial(add_copies, self.layout), self.parts.axes, grads)
        errors = None if errors is None else add_device_dim(errors)
        # Without a codec the weights in use lack nothing of the masters.
        squares = squares if self.exchange.wire.weights is not None else None
        return Gradients(self._total(sums), grads, copies, squares, errors)

    def _weights(self, params: Tree, copies: Tree, key: Array | None) -> tuple[Tree, Tree, Array]:
        """Returns (whole weights in the type of compute, the new copies, squares)."""
        exchange = self.exchange
        if copies is None and exchange.wire.difference:  # an evaluation: nothing is quantized
            exchange = dataclasses.replace(exchange, wire=PLAIN)
        used, new, squares = exchange.gather_local(params, copies, key)

        def cast(x: Array) -> Array:
            is_matrix = x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(self.dtype) if is_matrix else x

        return jax.tree.map(cast, used), new, squares

    def _total(self, sums: LossSums) -> LossSums:
        axes = self.layout.live(BATCH_AXES)
        return jax.tree.map(lambda x: lax.psum(x, axes), sums) if axes else sums
