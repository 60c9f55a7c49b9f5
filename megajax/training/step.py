"""The one train step: training, planning, benchmarks and tests all build it here.

`make_train_step(cfg, mesh)` gives jitted functions and the abstract values to compile them for, so
the program that a plan inspects is the program that runs. The step casts to the compute dtype where
weights are gathered, scans over micro-batches, clips, updates float32 masters and, when anything is
not finite, keeps the old state and says which leaf went bad.

Legend: A micro-batches, B rows of one, S positions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.layout import Layout
from megajax.core.tree import Tree, named_leaves
from megajax.layers.losses import LossSums, MoeSums
from megajax.models import decoder
from megajax.models.parts import Batch, ModelParts
from megajax.parallel import sharding, tensor
from megajax.training.optim import make_optimizer, make_schedule
from megajax.training.state import TrainState

BATCH_KEYS = ("tokens", "targets", "segments", "positions")


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The jitted functions of a run and what they take.

    init(seed) -> state. step(state, batch) -> (state, metrics); it donates the state.
    evaluate(params, batch) -> LossSums. abstract_state and abstract_batch: ShapeDtypeStructs with
    shardings. leaf_names: of metrics['leaf_norms'], in its order.
    """

    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Tree, Batch], LossSums]
    parts: ModelParts
    layout: Layout
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    abstract_eval_batch: dict[str, jax.ShapeDtypeStruct]
    leaf_names: tuple[str, ...]


def make_train_step(cfg: Any, mesh: Mesh) -> TrainStep:
    """Builds the step of a configuration (training.config.Config or alike) on a mesh."""
    layout = sharding.layout(mesh, cfg.shard.zero)
    with jax.set_mesh(mesh):
        parts = decoder.parts(
            cfg.model,
            layout,
            tensor.ops(layout, cfg.train.attention),
            cfg.train.dtype,
            cfg.train.loss_chunks,
        )
        optimizer = make_optimizer(cfg.optim, cfg.train.steps, parts.axes, layout)
        init = functools.partial(_init, parts, optimizer)
        abstract = _with_shardings(jax.eval_shape(init, 0), mesh)

    def under_mesh(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            with jax.set_mesh(mesh):
                return function(*args)

        call.lower = lambda *args: _lower(function, mesh, args)  # type: ignore[attr-defined]
        return call

    return TrainStep(
        init=under_mesh(jax.jit(init, static_argnums=0, compiler_options=_once(mesh))),
        step=under_mesh(jax.jit(functools.partial(_step, cfg, parts, optimizer), donate_argnums=0)),
        evaluate=under_mesh(jax.jit(parts.loss)),
        parts=parts,
        layout=layout,
        abstract_state=abstract,
        abstract_batch=_abstract_batch(cfg, layout, cfg.train.accumulate),
        abstract_eval_batch=_abstract_batch(cfg, layout, 1),
        leaf_names=tuple(name for name, _ in named_leaves(abstract.params)),
    )


def _once(mesh: Mesh) -> dict[str, Any] | None:
    """Compiler options of a program that runs once: on a CPU, optimising is not worth its time."""
    if mesh.devices.flat[0].platform == "cpu":
        return {"xla_backend_optimization_level": 0}
    return None


def _lower(function: Any, mesh: Mesh, args: tuple) -> Any:
    with jax.set_mesh(mesh):
        return function.lower(*args)


def _init(parts: ModelParts, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    params = parts.init(jax.random.key(seed))
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def _with_shardings(tree: Tree, mesh: Mesh) -> Tree:
    """Puts the concrete mesh into the shardings that eval_shape found."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding is not None else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def batch_spec(layout: Layout, accumulate: int) -> P:
    """Returns how a batch lies: (B, S), or (A, B, S) with micro-batches."""
    rows = layout.act("batch", "seq")
    return rows if accumulate == 1 else P(None, *rows)


def _abstract_batch(cfg: Any, layout: Layout, accumulate: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape: tuple[int, ...] = (cfg.train.global_batch // cfg.train.accumulate, cfg.train.seq_len)
    if accumulate > 1:
        shape = (accumulate, *shape)
    named = layout.named(batch_spec(layout, accumulate))
    return {k: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=named) for k in BATCH_KEYS}


def _step(
    cfg: Any,
    parts: ModelParts,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step. The objective is the mean over all predicted tokens of all micro-batches,
    so a micro-batch with fewer of them weighs less; plus the mean over micro-batches, all of one
    size, of the routers' penalties, which count every token."""
    count = (batch["targets"] >= 0).sum()
    total = jnp.maximum(count, 1).astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(cfg.train.seed), state.step)

    def objective(params: Tree, micro: Batch, key: jax.Array) -> tuple[jax.Array, LossSums]:
        sums = parts.loss(params, micro, key, cfg.train.remat)
        value = (sums.cross_entropy + cfg.train.z_loss * sums.z_squared) / total
        if sums.moe is not None:
            value += sums.moe.penalty.sum() / cfg.train.accumulate
        return value, sums

    grad_of = jax.value_and_grad(objective, has_aux=True)
    if cfg.train.accumulate == 1:
        (_, sums), grads = grad_of(state.params, batch, key)
    else:

        def micro_step(carry: tuple, piece: tuple) -> tuple[tuple, None]:
            index, micro = piece
            (_, sums), grads = grad_of(state.params, micro, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, carry, (sums, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        first = jax.tree.map(lambda x: x[0], dict(batch))
        found = jax.eval_shape(objective, state.params, first, key)[1]
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)
        pieces = (jnp.arange(cfg.train.accumulate), dict(batch))
        (sums, grads), _ = jax.lax.scan(micro_step, (none, zeros), pieces)

    squares = jnp.stack([jnp.sum(g * g) for g in jax.tree.leaves(grads)])
    norm = jnp.sqrt(squares.sum())
    if cfg.optim.clip > 0:
        scale = jnp.minimum(1.0, cfg.optim.clip / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt = optimizer.update(grads, state.opt, state.params)
    params = parts.settle(optax.apply_updates(state.params, updates), sums)
    new = TrainState(params, opt, state.step + 1)
    loss = sums.cross_entropy / total
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes int32 and floats
        rate = make_schedule(cfg.optim, cfg.train.steps)(state.step)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "z_squared": sums.z_squared / total,
        "targets": count,
        "lr": jnp.asarray(rate, jnp.float32),
        "leaf_norms": jnp.sqrt(squares),
    }
    return new, metrics | _moe_metrics(sums.moe, cfg.train.accumulate)


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
