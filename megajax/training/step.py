"""The one train step: training, planning, benchmarks and tests all build it here.

`make_train_step(cfg, mesh)` gives jitted functions and the abstract values to compile them for, so
the program that a plan inspects is the program that runs. It knows no model: parts, batch and
objective are a `Task`, and what happens between gradients and update is an `Optimizer`. The step
casts to the compute dtype where weights are gathered, scans over micro-batches, clips, updates
float32 masters and, when anything is not finite, keeps the old state and says which leaf went bad.

Legend: A micro-batches, B rows of one, S positions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.layout import Layout, Words
from megajax.core.mesh import memory_bytes
from megajax.core.tree import Tree, is_words, name, named_leaves, owner
from megajax.layers.losses import LossSums, MoeSums
from megajax.models.parts import Batch, ModelParts, is_layered, map_words
from megajax.parallel import local, sharding, tensor, zero
from megajax.parallel.exchange import Exchange
from megajax.parallel.moves import first_errors
from megajax.parallel.overlap import compiler_options
from megajax.parallel.pipeline import Pipeline, layer_order
from megajax.training.gradients import Gradients, exchange_of, pipelined, without_stages
from megajax.training.optim import Optimizer
from megajax.training.shape import is_open, resolved
from megajax.training.state import TrainState
from megajax.training.task import Leaf, Task


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The jitted functions of a run and what they take.

    init(seed) -> state. step(state, batch) -> (state, metrics); it donates the state.
    beside(params) -> (copies, errors) of a TrainState, for parameters that no step made.
    agree(state) -> for each leaf whether all devices with the same part of it hold the same bits.
    evaluate(params, batch) -> LossSums. abstract_state and abstract_batch: ShapeDtypeStructs with
    shardings. order: which token of a row lies at each of its places, for whoever places a batch;
    None: as they come. leaf_names: of metrics['leaf_norms'], in its order. natural(tree),
    arranged(tree): a state or parameters with the layers in the model's order, and in the order in
    which interleaved pipeline stages hold them; else the same. rows: of the leaves of a state whose
    layers are not held in the model's order, the model's layer at each place. kept: what a
    checkpoint must say of the copies and errors in it (JSON): a run of another one makes its own.
    exchange: between masters and weights in use; None: the model gathers these itself. chunks: of
    a pipeline's stage.
    """

    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Tree, Batch], LossSums]
    natural: Callable[[Any], Any]
    arranged: Callable[[Any], Any]
    parts: ModelParts
    layout: Layout
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    abstract_eval_batch: dict[str, jax.ShapeDtypeStruct]
    order: np.ndarray | None
    leaf_names: tuple[str, ...]
    beside: Callable[[Tree], tuple[Tree, Tree]]
    agree: Callable[[TrainState], TrainState]
    rows: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exchange: Exchange | None = None
    chunks: int = 1


def make_train_step(
    cfg: Any,
    mesh: Mesh,
    task: Task | None = None,
    optimizer: Callable[[Tree, Layout], Optimizer] | None = None,
) -> TrainStep:
    """Builds the step of a configuration on a mesh.

    Args: cfg: a training.config.JobConfig. task: what is trained; None: what the configuration
      itself describes, `cfg.task()`. optimizer(words of the parameters, layout): None: that of the
      configuration, `cfg.optimizer`.
    """
    if is_open(cfg):
        cfg = resolved(cfg, dict(mesh.shape), memory_bytes(mesh))
    task = cfg.task() if task is None else task
    layout = sharding.layout(mesh, cfg.zero, model=cfg.model)
    cfg.check(mesh.shape)
    stages = mesh.shape["pipe"]
    pieces = cfg.pipeline.pieces(stages) if stages > 1 else cfg.train.accumulate
    with jax.set_mesh(mesh):
        how = functools.partial(
            tensor.ops, attention=cfg.train.attention, context=cfg.context, overlap=cfg.overlap,
            segments=cfg.train.segments or None,
        )  # fmt: skip
        parts = task.parts(layout, how(layout))

        def objective(sums: LossSums, total: jax.Array) -> jax.Array:
            return task.objective(sums, total, pieces)

        exchange, used = exchange_of(cfg, parts, layout), parts
        if exchange is not None:
            used = task.parts(exchange.used, how(exchange.used))
        loss, options = parts.loss, compiler_options(cfg.overlap, mesh)
        if stages > 1:
            pipe = _pipeline(cfg, task, layout, exchange)
            loss, options = pipe.sums, pipe.compiler_options
            gradients = pipelined(pipe, objective)
        else:
            gradients = without_stages(cfg, used, exchange, objective)
        rule = (optimizer or cfg.optimizer)(parts.axes, layout)
        step = functools.partial(_step, cfg, pieces, parts, gradients, rule)
        order = layer_order(parts.layers, stages, cfg.pipeline.chunks)
        beside = functools.partial(_beside, cfg, exchange, parts.stack)
        init = functools.partial(_init, parts, layout, rule, order, beside)
        abstract = _with_shardings(jax.eval_shape(init, 0), mesh)

    under_mesh = functools.partial(_under, mesh)
    return TrainStep(
        init=under_mesh(jax.jit(init, static_argnums=0, compiler_options=_once(mesh))),
        step=under_mesh(jax.jit(step, donate_argnums=0, compiler_options=options)),
        evaluate=under_mesh(jax.jit(loss, compiler_options=options)),
        natural=under_mesh(_reorder(np.argsort(order), parts.axes)),
        arranged=under_mesh(_reorder(order, parts.axes)),
        parts=parts,
        layout=layout,
        abstract_state=abstract,
        abstract_batch=_abstract_batch(cfg, task.batch, layout, pieces),
        abstract_eval_batch=_abstract_batch(cfg, task.batch, layout, pieces, stages > 1),
        order=cfg.context.order_of(cfg.train.seq_len, mesh.shape["context"]),
        leaf_names=tuple(n for n, _ in named_leaves(abstract.params)),
        rows=_rows(order, parts.axes, abstract),
        beside=under_mesh(jax.jit(beside, compiler_options=_once(mesh))),
        agree=under_mesh(jax.jit(functools.partial(_agree, mesh, abstract))),
        kept=_kept(cfg, exchange, abstract),
        exchange=exchange,
        chunks=cfg.pipeline.chunks,
    )


def _pipeline(cfg: Any, task: Task, layout: Layout, exchange: Exchange | None) -> Pipeline:
    how = cfg.train.attention, cfg.context, cfg.overlap, cfg.train.segments or None
    parts = task.parts(None, local.ops(layout, *how))
    rows = {name: _spec(layout, leaf, True) for name, leaf in task.batch.items()}
    dtype = jnp.dtype(cfg.train.dtype)
    return Pipeline(parts, layout, cfg.pipeline, dtype, cfg.train.keeps, rows, exchange)


def _once(mesh: Mesh) -> dict[str, Any] | None:
    """Compiler options of a program that runs once: on a CPU, optimising is not worth its time."""
    if mesh.devices.flat[0].platform == "cpu":
        return {"xla_backend_optimization_level": 0}
    return None


def _under(mesh: Mesh, function: Any) -> Callable:
    """Returns a function that runs, and is lowered, under the mesh."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return function(*args)

    def lower(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return function.lower(*args)

    call.lower = lower  # type: ignore[attr-defined]
    return call


def _init(
    parts: ModelParts,
    layout: Layout,
    optimizer: Optimizer,
    order: np.ndarray,
    beside: Callable[[Tree], tuple[Tree, Tree]],
    seed: int,
) -> TrainState:
    params = parts.init(jax.random.key(seed))

    def place(words: Words, x: jax.Array) -> jax.Array:
        if not is_layered(words) or layout.mesh.shape["pipe"] == 1:
            return x
        # Each layer is on its stage's devices, in the order in which the stage runs them.
        return jax.sharding.reshard(x[order], layout.stored(*words))

    params = map_words(place, parts.axes, params)
    step = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), step, *beside(params))


def _beside(cfg: Any, exchange: Exchange | None, stack: str, params: Tree) -> tuple[Tree, Tree]:
    """Returns the copies and the errors with which masters begin."""
    if exchange is None:
        return None, None
    chunks = cfg.pipeline.chunks if exchange.masters.mesh.shape["pipe"] > 1 else None
    return exchange.copies(params), first_errors(exchange, params, stack, chunks)


def _kept(cfg: Any, exchange: Exchange | None, abstract: TrainState) -> dict[str, Any]:
    """Returns TrainStep.kept. Errors are those of a rank, a message and a transform: what decides
    any of these is in it."""
    if exchange is None or (abstract.copies is None and abstract.errors is None):
        return {}
    kept = {"copies": None if abstract.copies is None else str(jnp.dtype(exchange.dtype))}
    if abstract.errors is not None:
        sizes = dict(exchange.masters.mesh.shape)
        kept["errors"] = repr((sizes, cfg.pipeline.chunks, exchange.wire.gradients))
    return kept


def _agree(mesh: Mesh, like: TrainState, state: TrainState) -> TrainState:
    return zero.replicas_agree(mesh, jax.tree.map(lambda x: x.sharding.spec, like), state)


def _rows(order: np.ndarray, axes: Tree, state: Tree) -> dict[str, list[int]]:
    """Returns {leaf: order} of the leaves that stack layers; {} in the model's order."""
    if (order == np.arange(order.size)).all():
        return {}
    stacked = _stacked(order, axes)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {name(path): order.tolist() for path, x in leaves if stacked(path, x)}


def _stacked(order: np.ndarray, axes: Tree) -> Callable[[tuple, Any], bool]:
    """Returns (path, leaf) -> whether the leaf stacks the layers that are ordered.

    axes: the words of the parameters, which say what is stacked; what belongs to a parameter (a
    moment, a mask) ends in its name.
    """
    layered = {leaf for leaf, words in named_leaves(axes, is_words) if is_layered(words)}
    return lambda path, x: owner(path, layered) is not None and x.shape[:1] == order.shape


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
    """Returns how a member of a batch lies: (B, ...), or (A, B, ...) with micro-batches."""
    rows = layout.act("batch", *leaf.words)
    return P(None, *rows) if stacked else rows


def _abstract_batch(
    cfg: Any, members: Mapping[str, Leaf], layout: Layout, pieces: int, stacked: bool = True
) -> dict[str, jax.ShapeDtypeStruct]:
    """pieces: of a step's batch. stacked: all of them in leaves (A, B, ...), else one of them."""
    stacked = stacked and pieces > 1
    rows = (pieces,) * stacked + (cfg.train.global_batch // pieces,)
    return {
        name: jax.ShapeDtypeStruct(
            (*rows, *leaf.shape), leaf.dtype, sharding=layout.named(_spec(layout, leaf, stacked))
        )
        for name, leaf in members.items()
    }


def _step(
    cfg: Any,
    pieces: int,
    parts: ModelParts,
    gradients: Gradients,
    optimizer: Optimizer,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step. pieces: micro-batches of it."""
    count = (batch["targets"] >= 0).sum()
    total = jnp.maximum(count, 1).astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(cfg.train.seed), state.step)
    sums, grads, copies, lack, errors = gradients(state, batch, total, key)
    grads, opt = optimizer.observe(grads, state.opt, state.params)
    squares = jnp.stack([jnp.sum(g * g) for g in jax.tree.leaves(grads)])
    norm = jnp.sqrt(squares.sum())
    if cfg.optim.clip > 0:
        scale = jnp.minimum(1.0, cfg.optim.clip / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt = optimizer.update(grads, opt, state.params)
    params = parts.settle(optax.apply_updates(state.params, updates), sums)
    new = TrainState(params, opt, state.step + 1, errors=errors)
    loss = sums.cross_entropy / total
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    old = dataclasses.replace(state, copies=None)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    # Copies follow the masters that were there before the step, so they stand in any case.
    new = dataclasses.replace(new, copies=copies)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes int32 and floats
        rate = optimizer.rate(state.step)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "z_squared": sums.z_squared / total,
        "targets": count,
        "lr": jnp.asarray(rate, jnp.float32),
        "leaf_norms": jnp.sqrt(squares),
    }
    if lack is not None:
        metrics |= _wire_metrics(lack)
    if sums.right is not None:
        metrics["accuracy"] = sums.right / total
    return new, metrics | _moe_metrics(sums.moe, pieces)


def _wire_metrics(squares: jax.Array) -> dict[str, jax.Array]:
    """wire_drift: the root of the sum of squares of what the weights in use lack of the masters.

    wire_drift_relative: over that of the masters. squares: as of Exchange.gather; every piece lies
    on one device of each copy, and is counted once.
    """
    drift, whole = jnp.sqrt(squares.sum(0))
    return {"wire_drift": drift, "wire_drift_relative": drift / jnp.maximum(whole, 1e-30)}


def _moe_metrics(sums: MoeSums | None, batches: int) -> dict[str, jax.Array]:
    """moe_aux and moe_z: means over layers and micro-batches, beside the loss, never in it.

    moe_dropped: pairs of token and expert without a slot, of all layers. moe_max_load: of the
    busiest expert of any layer, over a balanced one's.
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
