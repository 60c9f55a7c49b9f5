"""The one train step: training, planning, benchmarks and tests all build it here.

`make_train_step(cfg, mesh)` gives jitted functions and the abstract values to compile them for, so
the program that a plan inspects is the program that runs. It knows no model: parts, batch and
objective are a `Task`, and what happens between gradients and update is an `Optimizer`. The step
casts to the compute dtype where weights are gathered, scans over micro-batches, clips, updates
float32 masters and, when anything is not finite, keeps the old state and says which leaf went bad.

Legend: A micro-batches, B rows of one, S positions.
"""

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.layout import Layout, Words
from megajax.core.mesh import memory_bytes
from megajax.core.packed import PackedWeight
from megajax.core.tree import Tree, is_words, name, named_leaves, owner
from megajax.data.loader import Share
from megajax.layers import ops as ops_
from megajax.layers.losses import LossSums, MoeSums
from megajax.models import lora
from megajax.models.parts import Batch, ModelParts, is_layered, map_words
from megajax.parallel import sharding, tensor, zero
from megajax.parallel.exchange import PLAIN, Exchange, Order, order_of
from megajax.parallel.overlap import compiler_options
from megajax.parallel.pipeline import Gradients, Pipeline, first_errors, layer_order
from megajax.parallel.slots import EncoderRoutes
from megajax.schedule.route import Route
from megajax.training import shares
from megajax.training.gradients import (
    Differentiate,
    LocalNetwork,
    exchange_of,
    pipelined,
    without_stages,
)
from megajax.training.optim import Optimizer, check_update, optimizer_of, unknown_rate
from megajax.training.precision import agree, products_of
from megajax.training.shape import is_open, resolved
from megajax.training.task import Leaf, Task, TrainState, count_in_loss


@dataclasses.dataclass(frozen=True)
class StorageOrder:
    """The order in which a run holds layers and tokens, and what a checkpoint must state of it.

    layers: {leaf of a state: the number of the model's layer at each place}, for the leaves whose
    layers are not in the model's order (interleaved pipeline stages). Checkpoints are written in
    the model's order. tokens: the number of the token at each place of a row (context parallelism);
    None: the order of the text. chunks: the chunks of a pipeline's stage. natural(tree): returns a
    state or parameters with the layers in the model's order. arranged(tree): returns them in the
    order of the run. exchange: a description, in JSON, of the copies and errors that a state holds.
    A run restores copies and errors only if its own description is the same; otherwise it makes new
    ones.
    """

    layers: Mapping[str, Sequence[int]]
    tokens: np.ndarray | None
    chunks: int
    natural: Callable[[Any], Any]
    arranged: Callable[[Any], Any]
    exchange: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The jitted functions of a run, and the shapes and shardings of their arguments.

    init(seed) -> state.
    step(state, batch) -> (state, metrics): one program that computes `apply(state, gradients(state,
      batch))`. It donates the state.
    gradients(state, batch) -> Gradients, summed over all micro-batches and devices.
    apply(state, gradients) -> (state, metrics): the update. It donates the state.
    evaluate(params, batch) -> LossSums of one micro-batch.
    init_exchange(params) -> (copies, errors) of a TrainState whose parameters were loaded.
    agree(state) -> a bool for each leaf: whether all devices that hold the same part of the leaf
      hold the same bits.
    abstract_state, abstract_batch, abstract_eval_batch: ShapeDtypeStructs with shardings.
      abstract_batches has one of each shape in which a batch may come. With --shares a batch to
      train on gives every device the rows that this process's devices have.
    leaf_names: the names of the trained parameters, in the order of metrics['leaf_norms'].
    exchange: lies between the masters and the weights in use; None: the model gathers its weights.
    share: the `share` that Loader takes.
    """

    task: Task
    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    gradients: Callable[[TrainState, Batch], Gradients]
    apply: Callable[[TrainState, Gradients], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Tree, Batch], LossSums]
    parts: ModelParts
    layout: Layout
    optimizer: Optimizer
    storage: StorageOrder
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    abstract_eval_batch: dict[str, jax.ShapeDtypeStruct]
    abstract_batches: tuple[dict[str, jax.ShapeDtypeStruct], ...]
    leaf_names: tuple[str, ...]
    init_exchange: Callable[[Tree], tuple[Tree, Tree]]
    agree: Callable[[TrainState], TrainState]
    exchange: Exchange | None = None
    share: Share | None = None

    @property
    def rows(self) -> Mapping[str, Sequence[int]]:
        """Returns storage.layers, the `order` that CheckpointManager takes."""
        return self.storage.layers

    @property
    def order(self) -> np.ndarray | None:
        """Returns storage.tokens, the `order` that Loader takes."""
        return self.storage.tokens

    def weights(self, state: TrainState) -> Tree:
        """Returns the parameters that evaluations and samples use: the running mean, if the
        optimizer keeps one (--optim.ema)."""
        params = state.params
        return self.parts.joined(self.optimizer.mean(state.opt, self.parts.trained(params)), params)

    def bare_parts(self) -> ModelParts:
        """Returns the parts of the model without adapters."""
        with jax.set_mesh(self.layout.mesh):
            return (self.task.bare or self.task).parts(self.layout, ops_.Ops())

    def adopt(self, params: Tree, fresh: Tree) -> Tree:
        """Returns the parameters of a run that begins from loaded ones, in the order of the run.
        With adapters the loaded ones become their bases, and the adapters are the fresh ones."""
        cfg = self.task.adapters
        if self.task.bare is None:
            return params
        with jax.set_mesh(self.layout.mesh):
            axes = self.bare_parts().axes
            bases = jax.jit(lambda params: lora.at_rest(params, axes, cfg, self.layout))
            return lora.with_base(fresh, bases(params))

    def metrics(self, sums: LossSums, total: Any) -> dict[str, jax.Array]:
        """Returns the task's metrics of sums over `total` predictions, with `loss` among them."""
        return _metrics(self.task, sums, total)


def make_train_step(
    cfg: Any,
    mesh: Mesh,
    task: Task | None = None,
    optimizer: Callable[[Tree, Layout], Optimizer] | optax.GradientTransformation | None = None,
) -> TrainStep:
    """Builds the step of a configuration on a mesh.

    Args: cfg: a training.config.JobConfig. task: what is trained; None: `cfg.task()`. optimizer: an
      optax transformation, which gets clipped gradients (--optim.clip), or a function (words of the
      trained parameters, layout) -> Optimizer; None: `cfg.optimizer`.
    Raises: UserError for a mesh that cannot cut the model, a --train.freeze that names no parameter
      or all of them, and an optimizer that cannot update the parameters.
    """
    rows = shares.rows_of_ranks(cfg, mesh, agree(cfg) if cfg.shares else ())
    if is_open(cfg):
        cfg = resolved(cfg, dict(mesh.shape), memory_bytes(mesh), len(rows) * max(rows))
    task = (cfg.task() if task is None else task).with_adapters(cfg.lora)
    layout = sharding.layout(mesh, cfg.zero, model=cfg.model)
    cfg.check(mesh.shape)
    stages = mesh.shape["pipe"]
    pieces = cfg.pipeline.pieces(stages) if stages > 1 else cfg.train.accumulate
    share = shares.share_of(mesh, rows, pieces) if cfg.shares else None
    with jax.set_mesh(mesh):
        plain = _parts(cfg, task, layout)
        shares.check(cfg, task, plain)
        trains = trained_leaves(task, cfg.train.freeze, plain.axes)
        plain = dataclasses.replace(plain, trains=trains)
        products, runs = products_of(cfg, plain, layout)
        of_layout = functools.partial(
            _parts, cfg, task, trains=trains, products=products, runs=runs
        )
        parts = of_layout(layout) if runs or products is not ops_.matmul else plain

        def objective(sums: LossSums, total: jax.Array) -> jax.Array:
            value = task.objective(sums, total)
            return value if sums.moe is None else value + sums.moe.penalty.sum() / pieces

        exchange, used = exchange_of(cfg, parts, layout), parts
        options = compiler_options(cfg.overlap, mesh, cfg.is_unlike)
        routes: list[tuple] = [(), ()]
        order = np.arange(parts.layers)
        if parts.network is not None:
            network = _network(cfg, task, parts, layout, exchange, pieces)
            loss, differentiate = network.sums, network.differentiate(objective)
        elif stages > 1:
            routes = [(cfg.pipeline.route(stages, backward),) for backward in (True, False)]
            if parts.tower and parts.tower.segments:
                routes[0] = (_encoder_routes(cfg, parts, stages),)
            make = functools.partial(_pipeline, cfg, task, trains, layout, exchange)
            pipe = make(products)
            plainly = pipe if products is ops_.matmul else make()
            loss, options = plainly.sums, pipe.compiler_options
            differentiate = pipelined(pipe, objective)
            order = layer_order(parts.layers, stages, cfg.pipeline.chunks)
        else:
            if exchange is not None:
                used = of_layout(exchange.used)
            loss = plain.loss
            differentiate = without_stages(cfg, used, exchange, objective)
        rule = optimizer_of(optimizer or cfg.optimizer, parts.trained(parts.axes), layout)
        if parts.tower:
            differentiate = _counted_first(order_of(mesh), differentiate)
        gradients = functools.partial(_gradients, cfg, task, parts, differentiate)
        apply = functools.partial(_apply, cfg, task, pieces, parts, rule)
        init_exchange = functools.partial(_init_exchange, cfg, exchange, parts)
        init = functools.partial(_init, cfg, parts, layout, rule, order, init_exchange)
        abstract = _with_shardings(jax.eval_shape(init, 0), mesh)
        check_update(rule, parts.trained(abstract.params), abstract.opt)

    def step(
        state: TrainState, batch: Batch, *route: Route
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        return apply(state, gradients(state, batch, *route))

    under_mesh = functools.partial(_under, mesh)
    of_rows = functools.partial(_abstract_batch, cfg, layout=layout, pieces=pieces)
    return TrainStep(
        task=task,
        init=under_mesh(jax.jit(init, static_argnums=0, compiler_options=_once(mesh))),
        step=under_mesh(jax.jit(step, donate_argnums=0, compiler_options=options), *routes[0]),
        gradients=under_mesh(jax.jit(gradients, compiler_options=options), *routes[0]),
        apply=under_mesh(jax.jit(apply, donate_argnums=0, compiler_options=options)),
        evaluate=under_mesh(jax.jit(loss, compiler_options=options), *routes[1]),
        parts=plain,
        layout=layout,
        optimizer=rule,
        storage=StorageOrder(
            layers=_rows(order, parts.axes, abstract),
            tokens=cfg.context.order_of(cfg.train.seq_len, mesh.shape["context"]),
            chunks=cfg.pipeline.chunks,
            natural=under_mesh(_reorder(np.argsort(order), parts.axes)),
            arranged=under_mesh(_reorder(order, parts.axes)),
            exchange=_exchange_state(cfg, exchange, abstract),
        ),
        abstract_state=abstract,
        abstract_batch=of_rows(task.batch, share=share),
        abstract_eval_batch=of_rows(task.batch, stacked=stages > 1),
        abstract_batches=tuple(of_rows(m, share=share) for m in (task.batch, *task.more_batches)),
        leaf_names=tuple(n for n, _ in named_leaves(parts.trained(abstract.params))),
        init_exchange=under_mesh(jax.jit(init_exchange, compiler_options=_once(mesh))),
        agree=under_mesh(jax.jit(functools.partial(_agree, mesh, abstract))),
        exchange=exchange,
        share=share,
    )


# ---- a step: gradients, then the update


def _gradients(
    cfg: Any,
    task: Task,
    parts: ModelParts,
    differentiate: Differentiate,
    state: TrainState,
    batch: Batch,
    *route: Route,
) -> Gradients:
    """Returns the gradients of one step, of all its micro-batches.

    route: of a pipeline. Raises: UserError for a parameter that is no array.
    """
    leaves = jax.tree.structure(parts.abstract).flatten_up_to(state.params)
    for (n, _), x in zip(named_leaves(parts.abstract), leaves, strict=True):
        if not isinstance(x, jax.Array):
            raise UserError(
                f"{n} is a {type(x).__name__}, and a train step takes arrays: a parameter that is "
                "not trained rests in float32 or bfloat16 (--train.freeze, --train.frozen_dtype); "
                "quantized weights are served, not trained (docs/serving.md)"
            )
    _check_members(task, parts, batch)
    key = jax.random.fold_in(jax.random.key(cfg.train.seed), state.step)
    if task.count is count_in_loss:
        summed = differentiate(state, batch, jnp.float32(1), key, *route)
        count = summed.sums.count
        scale = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        return summed._replace(count=count, grads=jax.tree.map(lambda g: g * scale, summed.grads))
    count = task.count(batch)
    total = jnp.maximum(count, 1).astype(jnp.float32)
    return differentiate(state, batch, total, key, *route)._replace(count=count)


def _check_members(task: Task, parts: ModelParts, batch: Batch) -> None:
    """Refuses a batch without a member of the task and, of a network that computes its own loss,
    one with others. Raises: UserError."""
    lacks = [n for n in task.batch if n not in batch]
    more = [n for n in batch if n not in task.batch] if parts.network is not None else []
    if lacks or more:
        said = [f"lacks {', '.join(lacks)}"] * bool(lacks)
        said += [f"has {', '.join(more)} besides"] * bool(more)
        raise UserError(
            f"the batch {' and '.join(said)}; the members of the task are {', '.join(task.batch)} "
            "(Task.batch)"
        )


def _counted_first(order: Order, differentiate: Differentiate) -> Differentiate:
    """Holds the batch back, on emulated devices, until the predictions of the step are counted.

    The loop over a tower's layers needs nothing of that count. Its collectives overtook the sum of
    the counts on some devices and not on others, and the run stopped with a rendezvous timeout.
    """

    def ordered(state: TrainState, batch: Batch, total: jax.Array, *more: Any) -> Gradients:
        return differentiate(state, order.after(batch, total), total, *more)

    return ordered


def _apply(
    cfg: Any,
    task: Task,
    pieces: int,
    parts: ModelParts,
    optimizer: Optimizer,
    state: TrainState,
    gradients: Gradients,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The update of one optimizer step. pieces: micro-batches of it."""
    sums, grads, copies, lack, errors, count = gradients
    assert count is not None
    total, trained = jnp.maximum(count, 1).astype(jnp.float32), parts.trained(state.params)
    grads, opt = optimizer.observe(grads, state.opt, trained)
    squares = jnp.stack([jnp.sum(g * g) for g in jax.tree.leaves(grads)])
    norm = jnp.sqrt(squares.sum())
    if cfg.optim.clip > 0:
        scale = jnp.minimum(1.0, cfg.optim.clip / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt = optimizer.update(grads, opt, trained)
    params = parts.joined(optax.apply_updates(trained, updates), state.params)
    params = parts.settle(params, sums)
    new = TrainState(params, opt, state.step + 1, errors=errors)
    metrics = _metrics(task, sums, total)
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    old = dataclasses.replace(state, copies=None)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    # Copies follow the masters that were there before the step, so they stand in any case.
    new = dataclasses.replace(new, copies=copies)
    metrics |= {"grad_norm": norm, "targets": count, "leaf_norms": jnp.sqrt(squares)}
    if optimizer.rate is not unknown_rate:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes int32 and floats
            metrics["lr"] = jnp.asarray(optimizer.rate(state.step), jnp.float32)
    if lack is not None:
        metrics |= _wire_metrics(lack)
    return new, metrics | _moe_metrics(sums.moe, pieces)


def _metrics(task: Task, sums: LossSums, total: Any) -> dict[str, jax.Array]:
    metrics = dict(task.metrics(sums, total))
    return metrics if "loss" in metrics else {"loss": task.objective(sums, total), **metrics}


def _wire_metrics(squares: jax.Array) -> dict[str, jax.Array]:
    """Returns the distance of the weights in use from the masters.

    wire_drift is the norm of the difference, wire_drift_relative that norm divided by the norm of
    the masters. squares: of Exchange.gather. Every piece lies on one device of each copy, and is
    counted once.
    """
    drift, norm = jnp.sqrt(squares.sum(0))
    return {"wire_drift": drift, "wire_drift_relative": drift / jnp.maximum(norm, 1e-30)}


def _moe_metrics(sums: MoeSums | None, batches: int) -> dict[str, jax.Array]:
    """Returns the metrics of a mixture of experts; none for a dense model.

    moe_aux and moe_z are the means of the auxiliary losses over layers and micro-batches; the
    metric `loss` does not contain them. moe_dropped is the number of pairs of token and expert that
    found no slot, in all layers. moe_max_load is the load of the busiest expert of any layer,
    divided by the load of a balanced one.
    """
    if sums is None:
        return {}
    load = sums.load_E.astype(jnp.float32)
    return {
        "moe_aux": sums.aux.mean() / batches,
        "moe_z": sums.z.mean() / batches,
        "moe_dropped": sums.dropped.sum(),
        "moe_max_load": (load / load.mean(-1, keepdims=True)).max(),
    }


# ---- what a step is made of


def trained_leaves(task: Task, freeze: str | None, axes: Tree) -> Tree:
    """Returns a tree of bools like the parameters, False where a leaf is not trained; None: all.

    freeze: --train.freeze: names separated by commas. Each is a dotted name of a parameter or of a
    part of the model, or a shell pattern of such names ('blocks.*.norm').
    Raises: UserError for a name that no parameter has, and where nothing is left to train.
    """
    names = [n for n, _ in named_leaves(axes, is_words)]
    frozen: set[str] = set()
    for pattern in filter(None, (p.strip() for p in (freeze or "").split(","))):
        parts = [n for n in names if _matches(n, pattern)]
        if not parts:
            known = sorted({n.split(".")[0] for n in names})
            near = difflib.get_close_matches(pattern, {*known, *names}, 1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise UserError(
                f"train.freeze={freeze}: no parameter's name begins with {pattern}, or matches it; "
                f"the model has {', '.join(known)}{hint} (--train.freeze)"
            )
        frozen |= {*parts}
    trains = {
        n: n not in frozen and task.trains(n, words) for n, words in named_leaves(axes, is_words)
    }
    if not any(trains.values()):
        raise UserError(
            f"train.freeze={freeze or 'none'}: no parameter is left to train (--train.freeze)"
        )
    if all(trains.values()):
        return None
    return jax.tree.structure(axes, is_leaf=is_words).unflatten(trains.values())


def _matches(name: str, pattern: str) -> bool:
    """Tells whether a pattern is that of the parameter's name or of a part that it lies in."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:i]), pattern) for i in range(1, len(parts) + 1))


def _network(
    cfg: Any,
    task: Task,
    parts: ModelParts,
    layout: Layout,
    exchange: Exchange | None,
    pieces: int,
) -> LocalNetwork:
    """Returns what runs a network that computes its own loss. Raises: UserError for a mesh that
    would have to cut it."""
    for axis in ("pipe", "context"):
        if layout.mesh.shape[axis] > 1:
            raise UserError(
                f"mesh.{axis}={layout.mesh.shape[axis]}: this model computes its loss by itself "
                f"and has no layers or sequence that {axis} could cut; use 1 (--mesh.{axis})"
            )
    for (n, words), (_, x) in zip(
        named_leaves(parts.axes, is_words), named_leaves(parts.abstract), strict=True
    ):
        ways = layout.ways(layout.rules.stored["embed"])
        if "embed" in words and x.shape[words.index("embed")] % ways:
            raise UserError(
                f"{n} {tuple(x.shape)}: its dimension 'embed' must be divisible by {ways}, the "
                "devices that cut it; use --shard.zero=none, or another word"
            )
    dtype = jnp.dtype(cfg.train.dtype)
    if exchange is None:
        exchange = Exchange(parts.axes, layout, layout, PLAIN, dtype, parts.trains)
    rows = {n: _spec(layout, leaf, False) for n, leaf in task.batch.items()}
    return LocalNetwork(parts, layout, exchange, rows, pieces, dtype)


def _parts(
    cfg: Any,
    task: Task,
    layout: Layout,
    trains: Tree = None,
    products: Callable = ops_.matmul,
    runs: Mapping[int, Callable] = MappingProxyType({}),
) -> ModelParts:
    """Returns a task's parts under the mesh. products, runs: of training/precision.py."""
    how = functools.partial(
        tensor.ops,
        layout,
        attention=cfg.train.attention,
        context=cfg.context,
        overlap=cfg.overlap,
        segments=cfg.train.segments or None,
    )
    blocks = {i: task.parts(layout, how(matmul=one)).block for i, one in runs.items()}
    parts = task.parts(layout, how(matmul=products))
    return dataclasses.replace(parts, trains=trains, runs=blocks)


def _pipeline(
    cfg: Any,
    task: Task,
    trains: Tree,
    layout: Layout,
    exchange: Exchange | None,
    products: Callable = ops_.matmul,
) -> Pipeline:
    # A ring's permutations need all stages, and a stage that skips its slot would be missing.
    overlap = "xla" if cfg.pipeline.idle == "skip" and cfg.overlap == "auto" else cfg.overlap
    how = cfg.train.attention, cfg.context, overlap, cfg.train.segments or None
    parts = task.parts(None, tensor.local_ops(layout, *how, matmul=products))
    parts = dataclasses.replace(parts, trains=trains)
    rows = {name: _spec(layout, leaf, True) for name, leaf in task.batch.items()}
    dtype = jnp.dtype(cfg.train.dtype)
    return Pipeline(parts, layout, cfg.pipeline, dtype, cfg.train.keeps, rows, exchange)


# ---- the first state


def _init(
    cfg: Any,
    parts: ModelParts,
    layout: Layout,
    optimizer: Optimizer,
    order: np.ndarray,
    init_exchange: Callable[[Tree], tuple[Tree, Tree]],
    seed: int,
) -> TrainState:
    params = rest_frozen(parts, cfg.train.frozen_dtype, parts.init(jax.random.key(seed)))

    def place(words: Words, x: jax.Array) -> jax.Array:
        if parts.network is not None:  # whose modules may have been made without the layout
            return jax.sharding.reshard(x, layout.stored(*words))
        if not is_layered(words) or layout.mesh.shape["pipe"] == 1:
            # The weights of a tower may be stored otherwise than its modules made them.
            return jax.sharding.reshard(x, layout.stored(*words)) if parts.tower else x
        # Each layer is on its stage's devices, in the order in which the stage runs them.
        return x.at[order].get(out_sharding=layout.stored(*words))

    def place_all(words: Words, w: Tree) -> Tree:  # of a packed weight, all of its arrays
        return jax.tree.map(functools.partial(place, words), w)

    params = map_words(place_all, parts.axes, params)
    step = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(parts.trained(params)), step, *init_exchange(params))


def rest_frozen(parts: ModelParts, dtype: str, params: Tree) -> Tree:
    """Returns the parameters with those that are not trained, if float32, in the dtype."""
    if parts.trains is None:
        return params

    def of(is_trained: bool, w: Any) -> Any:
        is_wide = not isinstance(w, PackedWeight) and w.dtype == jnp.float32
        return w.astype(dtype) if is_wide and not is_trained else w

    return jax.tree.map(of, parts.trains, params)


def _init_exchange(
    cfg: Any, exchange: Exchange | None, parts: ModelParts, params: Tree
) -> tuple[Tree, Tree]:
    """Returns the copies and the errors with which masters begin."""
    if exchange is None:
        return None, None
    stack = parts.stack if parts.layers else ""
    chunks = cfg.pipeline.chunks if exchange.masters.mesh.shape["pipe"] > 1 else None
    return exchange.copies(params), first_errors(exchange, params, stack, chunks)


def _exchange_state(cfg: Any, exchange: Exchange | None, abstract: TrainState) -> dict[str, Any]:
    """Returns StorageOrder.exchange. It has what decides the shape and meaning of errors: mesh,
    chunks (which are messages) and codec."""
    if exchange is None or (abstract.copies is None and abstract.errors is None):
        return {}
    stated = {"copies": None if abstract.copies is None else str(jnp.dtype(exchange.dtype))}
    if abstract.errors is not None:
        sizes = dict(exchange.masters.mesh.shape)
        stated["errors"] = repr((sizes, cfg.pipeline.chunks, exchange.wire.gradients))
    return stated


# ---- orders, shapes and meshes


def _rows(order: np.ndarray, axes: Tree, state: Tree) -> dict[str, list[int]]:
    """Returns {leaf: order} of the leaves that stack layers; {} if the order is the model's."""
    if (order == np.arange(order.size)).all():
        return {}
    stacked = _stacked(order, axes)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {name(path): order.tolist() for path, x in leaves if stacked(path, x)}


def _stacked(order: np.ndarray, axes: Tree) -> Callable[[tuple, Any], bool]:
    """Returns a function of (path, leaf) that tells whether the leaf has the layers as its first
    dimension, so that its rows must follow `order`.

    Such a leaf is a parameter whose first word is `layers`, or belongs to one: the dotted path of a
    moment or a mask ends in the name of its parameter (core/tree.py, owner). Its first dimension
    must also have as many entries as `order`.

    order: int, (L,), the model's layer at each place of the stack. axes: the words of the
    parameters.
    """
    layered = {leaf for leaf, words in named_leaves(axes, is_words) if is_layered(words)}
    layered |= {leaf for leaf, words in lora.adapters(axes).items() if is_layered(words.a)}

    def is_stacked(path: tuple, x: Any) -> bool:
        # The arrays of a packed weight, and an adapter's, lie below the name of their parameter.
        owned = any(owner(path[:i], layered) is not None for i in range(len(path), 0, -1))
        return owned and x.shape[:1] == order.shape

    return is_stacked


def _reorder(order: np.ndarray, axes: Tree) -> Callable[[Any], Any]:
    """Returns tree -> the tree with its stacked layers in another order, cut as before."""
    if (order == np.arange(order.size)).all():
        return lambda tree: tree
    stacked = _stacked(order, axes)

    def leaf(path: tuple, x: jax.Array) -> jax.Array:
        if not stacked(path, x):
            return x
        return x.at[order].get(out_sharding=jax.typeof(x).sharding.spec)

    return jax.jit(functools.partial(jax.tree_util.tree_map_with_path, leaf))


def _with_shardings(tree: Tree, mesh: Mesh) -> Tree:
    """Puts the concrete mesh into the shardings that eval_shape found."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding is not None else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def _spec(layout: Layout, leaf: Leaf, stacked: bool) -> P:
    """Returns the sharding of a member of a batch: (B, ...), or (A, B, ...) with micro-batches."""
    rows = layout.act("batch", *leaf.words)
    return P(None, *rows) if stacked else rows


def _abstract_batch(
    cfg: Any,
    members: Mapping[str, Leaf],
    layout: Layout,
    pieces: int,
    stacked: bool = True,
    share: Share | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the ShapeDtypeStructs of a batch.

    pieces: the micro-batches of a step. stacked: whether the batch holds all of them, in leaves
    (A, B, ...); otherwise it is one of them. share: of this process; None: all devices take as many
    rows.
    """
    stacked = stacked and pieces > 1
    rows = cfg.train.global_batch if share is None else share.numbers.size
    outer = (pieces,) * stacked + (rows // pieces,)
    return {
        name: jax.ShapeDtypeStruct(
            (*outer, *leaf.shape), leaf.dtype, sharding=layout.named(_spec(layout, leaf, stacked))
        )
        for name, leaf in members.items()
    }


def _agree(mesh: Mesh, like: TrainState, state: TrainState) -> TrainState:
    return zero.replicas_agree(mesh, jax.tree.map(lambda x: x.sharding.spec, like), state)


def _once(mesh: Mesh) -> dict[str, Any] | None:
    """Compiler options of a program that runs once: on a CPU, optimising is not worth its time."""
    if mesh.devices.flat[0].platform == "cpu":
        return {"xla_backend_optimization_level": 0}
    return None


def _encoder_routes(cfg: Any, parts: ModelParts, stages: int) -> Callable[..., Route]:
    """Returns the route of a step whose encoder works in the pipeline's idle slots, by (state,
    batch)."""
    tower, trains = parts.tower, parts.trains
    assert tower is not None
    trained = trains is None or any(jax.tree.leaves(trains[tower.members[0]]))
    routes = EncoderRoutes(cfg.pipeline.table(stages), tower.segments, trained)
    return lambda state, batch: routes(batch[tower.images])


def _under(mesh: Mesh, function: Any, *routes: Route | Callable[..., Route]) -> Callable:
    """Returns a function that runs, and is traced or lowered, under the mesh.

    routes: its last arguments, or what makes them of the other ones; every device gets the arrays
    of a route at its first use.
    """
    where = NamedSharding(mesh, P())

    @functools.lru_cache(64)
    def placed(route: Route) -> Route:
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, where, x.__getitem__), route
        )

    def of(args: tuple) -> list[Route]:
        return [r(*args) if callable(r) else r for r in routes]

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return function(*args, *map(placed, of(args)))

    def stage(method: str, *args: Any) -> Any:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), of(args)
        )
        with jax.set_mesh(mesh):
            return getattr(function, method)(*args, *like)

    for method in ("trace", "lower"):
        setattr(call, method, functools.partial(stage, method))
    return call


# ---- several models in one state


@dataclasses.dataclass(frozen=True)
class JointStep:
    """Several models as one state, for a run whose step trains them together (`joint`).

    A state's `params` and `opt` are dicts by model, and its `step` counts iterations of the run.
    step(state, batch) -> (state, metrics): written by the run, in any number of compiled programs.
    Other members: as TrainStep's.
    """

    steps: Mapping[str, TrainStep]
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    storage: StorageOrder
    abstract_state: TrainState
    leaf_names: tuple[str, ...]
    exchange: None = None

    @property
    def task(self) -> Task:
        """Returns the first model's task, whose unit the run counts."""
        return next(iter(self.steps.values())).task

    @property
    def layout(self) -> Layout:
        """Returns the first model's layout, with which JobConfig.given_params reads weights."""
        return next(iter(self.steps.values())).layout

    @property
    def rows(self) -> Mapping[str, Sequence[int]]:
        """Returns storage.layers, the `order` that CheckpointManager takes."""
        return self.storage.layers

    def init(self, seed: int) -> TrainState:
        """Returns the first state; each model draws its parameters from a seed of its own."""
        return self.join(
            {name: one.init(seed + i) for i, (name, one) in enumerate(self.steps.items())}, 0
        )

    def agree(self, state: TrainState) -> TrainState:
        """Returns for each leaf whether all devices with the same part of it hold the same bits."""
        states = {name: one.agree(self.part(state, name)) for name, one in self.steps.items()}
        return self.join(states, next(iter(states.values())).step)

    def part(self, state: TrainState, name: str) -> TrainState:
        """Returns one model's state. Its TrainStep may donate it: `step` is a copy."""
        return TrainState(state.params[name], state.opt[name], state.step + 0)

    def join(self, states: Mapping[str, TrainState], step: Any) -> TrainState:
        """Returns the state of all models. step: the number of finished iterations."""
        return _join(states, jnp.int32(step) if isinstance(step, int) else step)


def joint(
    steps: Mapping[str, TrainStep],
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]],
) -> JointStep:
    """Returns the step of a run that trains several models.

    Raises: UserError for a model with an exchange (--wire), whose copies a joint state has no room
    for.
    """
    coded = [name for name, one in steps.items() if one.storage.exchange]
    if coded:
        raise UserError(f"wire: models in one state need --wire=none; found one on {coded[0]}")

    def reorder(how: str) -> Callable[[Any], Any]:
        def call(tree: Any) -> Any:
            if isinstance(tree, TrainState):
                parts = {n: TrainState(tree.params[n], tree.opt[n], tree.step) for n in steps}
                return _join(
                    {n: getattr(one.storage, how)(parts[n]) for n, one in steps.items()}, tree.step
                )
            return {n: getattr(one.storage, how)(tree[n]) for n, one in steps.items()}

        return call

    def renamed(leaf: str, model: str) -> str:
        member, _, parameter = leaf.partition(".")
        return f"{member}.{model}.{parameter}"

    layers = {
        renamed(leaf, name): order
        for name, one in steps.items()
        for leaf, order in one.storage.layers.items()
    }
    first = next(iter(steps.values()))
    storage = StorageOrder(
        layers, first.storage.tokens, 1, reorder("natural"), reorder("arranged"), {}
    )
    states = {name: one.abstract_state for name, one in steps.items()}
    names = tuple(f"{name}.{leaf}" for name, one in steps.items() for leaf in one.leaf_names)
    return JointStep(steps, step, storage, _join(states, first.abstract_state.step), names)


def _join(states: Mapping[str, TrainState], step: Any) -> TrainState:
    params = {name: state.params for name, state in states.items()}
    return TrainState(params, {name: state.opt for name, state in states.items()}, step)
