"""AdamW, LAMB, Muon and SGD over stacked, sharded parameters; named learning-rate schedules.

Each optimizer is an optax chain: a direction, decoupled weight decay, (LAMB: trust ratio), the
learning rate. Two things optax does not do, so they are here: LAMB's trust ratio per layer slice of
a stacked leaf (optax.lamb takes one ratio for all layers), and Muon under an Explicit mesh.
Sources: AdamW arXiv 1711.05101; LAMB arXiv 1904.00962 (MegaScale section 3.1 uses it for 4x
batches); Muon (Jordan et al. 2024) with Moonlight's scale (arXiv 2502.16982 section 2.2), so that
one learning rate and weight decay serve all leaves; WSD arXiv 2404.06395.
"""

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec, reshard

from megajax.core.config import EPS, Checked, equal, option, other_than
from megajax.core.errors import UserError, did_you_mean
from megajax.core.layout import Layout, Words
from megajax.core.packed import RANK
from megajax.core.tree import Tree, named_leaves
from megajax.models.parts import FEATURES, LAYERS, TOWER, map_words

STACK_WORDS = (LAYERS, TOWER, "expert")  # dimensions that count independent weights
NAMES = ("adamw", "lamb", "muon", "sgd")  # the optimizers of this file
SLOWEST = 0.99999  # (chosen) decay of a moment: nearer to 1, float32 makes it 1 and divides by 0


@dataclass(frozen=True)
class OptimConfig(Checked, section="optim"):
    """Optimizer and schedule."""

    name: str = option(
        "adamw",
        "optimizer: adamw, lamb, muon, sgd, or MODULE:FUNCTION, a function of the learning rate "
        "that returns an optax transformation, as optax:lion",
    )
    lr: float = option(3e-3, "peak learning rate", at_least=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = option(
        "cosine", "course of the learning rate after the warm-up"
    )
    warmup: int = option(10, "steps of linear warm-up from 0", "steps", at_least=0)
    final: float = option(
        0.1,
        "last learning rate as a fraction of the peak",
        needs=other_than("schedule", "constant"),
        at_least=0,
        at_most=1,
    )
    decay: float = option(
        0.2,
        "wsd: fraction of the run that decays",
        needs=equal("schedule", "wsd"),
        at_least=0,
        at_most=1,
    )
    beta1: float = option(
        0.9, "decay of the first moment; muon, sgd: momentum", at_least=0, at_most=SLOWEST
    )
    beta2: float = option(0.95, "decay of the second moment", at_least=0, at_most=SLOWEST)
    eps: float = option(1e-8, "number that is added to the root of the second moment", at_least=EPS)
    weight_decay: float = option(
        0.1,
        "weight decay, on matrices and embeddings only; decoupled, of sgd added to the gradient",
        at_least=0,
    )
    clip: float = option(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    lamb_scope: Literal["matrices", "all"] = option(
        "matrices",
        "lamb: what has trust ratio and weight decay; all: norms and biases too",
        needs=equal("name", "lamb"),
    )
    ema: float = option(
        0.0,
        "decay of a running mean of the weights, which evaluations and samples use; 0: none",
        at_least=0,
        at_most=SLOWEST,
    )

    def __post_init__(self):
        """Refuses a name that is neither one of the library's nor MODULE:FUNCTION."""
        super().__post_init__()
        if self.name not in NAMES and not re.fullmatch(r"[\w.]+:\w+", self.name):
            raise UserError(
                f"optim.name={self.name} must be one of {', '.join(NAMES)}, or MODULE:FUNCTION, as "
                f"optax:lion.{did_you_mean(self.name, NAMES)} (--optim.name)"
            )


def phases(cfg: OptimConfig, steps: int) -> tuple[int, int]:
    """Returns (steps of warm-up, steps of WSD's decay): as asked for, as far as the run has room,
    the warm-up first. `shortened` says what had none."""
    warmup = min(cfg.warmup, steps)
    decay = max(round(cfg.decay * steps), 1) if cfg.schedule == "wsd" else 0
    return warmup, min(decay, max(steps - warmup, 1))


def shortened(cfg: OptimConfig, steps: int) -> list[str]:
    """Returns a sentence for each part of the schedule that is longer than its run."""
    warmup, decay = phases(cfg, steps)
    said = []
    if warmup < cfg.warmup:
        said.append(
            f"optim.warmup={cfg.warmup} is longer than train.steps={steps}: the warm-up is "
            f"shortened to {warmup} steps, and only the last one learns with optim.lr={cfg.lr:g}"
        )
    if cfg.schedule == "wsd" and decay < round(cfg.decay * steps):
        said.append(
            f"optim.warmup={cfg.warmup} and optim.decay={cfg.decay:g} of train.steps={steps} are "
            f"longer than the run: the decay is shortened to {decay} steps"
        )
    return said


def make_schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Returns step (from 0) -> learning rate. The first step already learns."""
    warmup, decay = phases(cfg, steps)
    decay_steps = max(steps - warmup, 1)
    last = cfg.lr * cfg.final
    tail = {
        "constant": optax.constant_schedule(cfg.lr),
        "cosine": optax.cosine_decay_schedule(cfg.lr, decay_steps, cfg.final),
        "linear": optax.linear_schedule(cfg.lr, last, decay_steps),
        "wsd": optax.linear_schedule(cfg.lr, last, decay, decay_steps - decay),
    }[cfg.schedule]
    if not warmup:
        return tail
    ramp = optax.linear_schedule(cfg.lr / warmup, cfg.lr, warmup - 1 or 1)
    return optax.join_schedules([ramp, tail], [warmup])


def is_matrix(words: Words) -> bool:
    """Tells matrices, those of adapters too, kernels of convolutions and embeddings, which decay,
    from norms and biases, which do not."""
    inner = [w for w in words if w not in STACK_WORDS]
    return not {"embed", FEATURES, RANK}.isdisjoint(words) and len(inner) > 1


def is_orthogonalised(words: Words) -> bool:
    """Tells what Muon orthogonalises: matrices between embedding and head, and kernels of a network
    that computes its own loss, as matrices of all inputs by outputs."""
    return is_matrix(words) and not {"vocab", "positions"} & set(words)


def is_hidden_matrix(words: Words) -> bool:
    """Tells the matrices between embedding and head."""
    return is_orthogonalised(words) and FEATURES not in words


def unknown_rate(step: Any) -> jax.Array:
    """Is the rate of an optimizer that does not say its learning rate: a step reports none."""
    return jnp.float32(jnp.nan)


def _observe_nothing(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    return grads, state


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation (init, update) and what else a step asks of it.

    What happens between gradients and update wraps one (training/masking.py).
    observe(grads, state, params) -> (grads, state): called first, before the norm is taken and
    gradients are clipped. rate(step) -> the learning rate that is reported. mean(state, params) ->
    the weights that evaluations use. is_foreign: it was made from any optax transformation.
    """

    init: Callable[[Tree], Any]
    update: Callable[..., tuple[Tree, Any]]
    observe: Callable[[Tree, Any, Tree], tuple[Tree, Any]] = _observe_nothing
    rate: optax.Schedule = unknown_rate
    is_foreign: bool = False
    mean: Callable[[Any, Tree], Tree] = lambda state, params: params


def make_optimizer(
    cfg: OptimConfig,
    steps: int,
    axes: Tree,
    layout: Layout | None = None,
    schedule: optax.Schedule | None = None,
) -> Optimizer:
    """Returns the optimizer of a parameter tree whose leaves have these words.

    layout: where the leaves live; None: no mesh. schedule: learning rate of each step; None: that
    of the configuration. Gradients must already be clipped.
    """
    schedule = make_schedule(cfg, steps) if schedule is None else schedule
    if cfg.name in NAMES:
        optimizer = Optimizer(*_chain(cfg, axes, layout, schedule), rate=schedule)
    else:
        optimizer = of_optax(imported(cfg.name, schedule), schedule)
    return average_weights(optimizer, cfg.ema) if cfg.ema else optimizer


def _chain(
    cfg: OptimConfig, axes: Tree, layout: Layout | None, schedule: optax.Schedule
) -> optax.GradientTransformation:
    adam = _promoting(optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps))
    matrices = map_words(is_matrix, axes)
    everything = cfg.lamb_scope == "all"
    decay = optax.add_decayed_weights(cfg.weight_decay, mask=None if everything else matrices)
    rate = _promoting(optax.scale_by_learning_rate(schedule))
    if cfg.name == "sgd":  # as torch.optim.SGD: the decay is part of the gradient
        return optax.chain(decay, optax.trace(cfg.beta1), rate)
    if cfg.name == "lamb":
        return optax.chain(adam, decay, scale_by_trust_ratio(axes, everything), rate)
    if cfg.name == "muon":
        labels = map_words(lambda w: "muon" if is_orthogonalised(w) else "adam", axes)
        muon = scale_by_muon(cfg.beta1, axes, layout)
        return optax.chain(optax.partition({"muon": muon, "adam": adam}, labels), decay, rate)
    return optax.chain(adam, decay, rate)


def of_optax(
    transformation: optax.GradientTransformation, rate: optax.Schedule = unknown_rate
) -> Optimizer:
    """Returns an optax transformation, which has its learning rate in itself, as an Optimizer. It
    sees the arrays of all devices, so that a norm over a parameter is that of the parameter."""

    def init(params: Tree) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.init(params)

    return Optimizer(init, _promoting(transformation).update, rate=rate, is_foreign=True)


def optimizer_of(make: Any, axes: Tree, layout: Layout) -> Optimizer:
    """Returns the optimizer that `make` is or makes. make: an optax transformation, or a function
    (words of the parameters, layout) -> Optimizer."""
    return of_optax(make) if isinstance(make, optax.GradientTransformation) else make(axes, layout)


def imported(name: str, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns what MODULE:FUNCTION makes of a learning rate. The module may lie in the working
    directory. It is imported only if the command line has the name: a file of settings may be a
    stranger's.

    Raises: UserError for a name that is not on the command line, and for a module, a function or a
      result that is not there or not usable.
    """
    if not any(name == argument.rpartition("=")[2] for argument in sys.argv[1:]):
        raise UserError(
            f"optim.name={name} is not on the command line, and code is run only where it is; "
            f"repeat it there: --optim.name={name}. A program of your own gives make_train_step "
            "the optax transformation itself (--optim.name)"
        )
    module, _, function = name.partition(":")
    sys.path.append(os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise UserError(
            f"optim.name={name}: the module {module} cannot be imported: {error}. It must lie in "
            "the working directory or be installed (--optim.name)"
        ) from error
    except AttributeError:
        raise UserError(
            f"optim.name={name}: the module {module} has no function {function} (--optim.name)"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    try:
        made = make(schedule)
    except TypeError as error:
        raise UserError(
            f"optim.name={name}: {function}(learning_rate) raised {error}; the function takes the "
            "learning rate, a function of the step, alone (--optim.name)"
        ) from error
    if not isinstance(made, optax.GradientTransformation):
        raise UserError(
            f"optim.name={name}: {function}(learning_rate) returned a {type(made).__name__}; it "
            "must return an optax.GradientTransformation (--optim.name)"
        )
    return made


def check_update(optimizer: Optimizer, params: Tree, opt: Tree) -> None:
    """Refuses a foreign optimizer whose update does not trace on parameters cut over the mesh, or
    has not the shape of each parameter. params, opt: abstract. Call it under the mesh.

    Raises: UserError.
    """
    if not optimizer.is_foreign:
        return
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), params
    )
    try:
        updates, new = jax.eval_shape(optimizer.update, grads, opt, params)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the optimizer cannot update parameters that are cut over devices: {first:.300}; "
            "--shard.zero=none keeps a copy of each on every device (--shard.zero)"
        ) from error
    for tree, like, what in ((updates, params, "update"), (new, opt, "state")):
        if jax.tree.structure(tree) != jax.tree.structure(like):
            raise UserError(f"the optimizer returned another tree than it got as its {what}")
        for (name, x), (_, y) in zip(named_leaves(tree), named_leaves(like), strict=True):
            if x.shape != y.shape:
                raise UserError(
                    f"the optimizer returned {name} of the shape {x.shape} as its {what}; it must "
                    f"stay {y.shape}"
                )


def _promoting(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lets optax mix int32 counts with floats where the caller has strict dtype promotion."""

    def update(updates: Tree, state: Any, params: Tree | None = None, **_: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


class Averaged(NamedTuple):
    """mean: float32, like the parameters. count: int32, updates in it. inner: the optimizer's own
    state."""

    mean: Tree
    count: jax.Array
    inner: Any


def average_weights(inner: Optimizer, decay: float) -> Optimizer:
    """Wraps an optimizer so that it keeps a running mean of the weights.

    mean <- d mean + (1 - d) weights after each update, d = min(decay, (1 + n) / (10 + n)) at update
    n from 1, so that the first weights do not dominate a short run (as TensorFlow's
    ExponentialMovingAverage does).
    """

    def init(params: Tree) -> Averaged:
        mean = jax.tree.map(lambda w: w.astype(jnp.float32) + 0, params)  # buffers of its own
        return Averaged(mean, jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Tree, state: Any, params: Tree | None = None, **_: Any) -> Any:
        if params is None:
            raise ValueError("a mean needs the parameters: update(grads, state, params)")
        updates, inner_state = inner.update(updates, state.inner, params)
        count = state.count + 1
        n = count.astype(jnp.float32)
        d = jnp.minimum(decay, (1 + n) / (10 + n))
        mean = jax.tree.map(lambda m, w, u: d * m + (1 - d) * (w + u), state.mean, params, updates)
        return updates, Averaged(mean, count, inner_state)

    def observe(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Averaged]:
        grads, inner_state = inner.observe(grads, state.inner, params)
        return grads, state._replace(inner=inner_state)

    return dataclasses.replace(
        inner, init=init, update=update, observe=observe, mean=lambda state, params: state.mean
    )


# ---- LAMB


def scale_by_trust_ratio(axes: Tree, everything: bool = False) -> optax.GradientTransformation:
    """Scales each weight's update by |w| / |update|, one ratio per slice of a stacked leaf.

    That is algorithm 2 of arXiv 1904.00962 with phi the identity; a slice whose weight or update is
    0 keeps ratio 1. everything: norms and biases too, as that algorithm says. Otherwise they keep
    ratio 1: the TensorFlow implementations of LAMB leave what has no weight decay out of the
    adaptation by default, and a bias near 0 would get steps near 0.
    """

    def ratio(words: Words, update: jax.Array, weight: jax.Array) -> jax.Array:
        if not everything and not is_matrix(words):
            return update
        inner = tuple(i for i, w in enumerate(words) if w not in STACK_WORDS)

        def norm(x: jax.Array) -> jax.Array:
            return jnp.sqrt((x.astype(jnp.float32) ** 2).sum(inner, keepdims=True))

        w, u = norm(weight), norm(update)
        usable = (w > 0) & (u > 0)
        return update * jnp.where(usable, w / jnp.where(usable, u, 1.0), 1.0)

    def update(updates: Tree, state: Any, params: Tree | None = None, **_: Any) -> Any:
        if params is None:
            raise ValueError("the trust ratio needs the parameters: update(grads, state, params)")
        return map_words(ratio, axes, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# ---- Muon

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # (Jordan et al. 2024: quintic, steepest at 0)
NEWTON_SCHULZ_STEPS = 5


class MuonState(NamedTuple):
    """Momentum of each orthogonalised leaf."""

    momentum: Tree


def orthogonalise(x: jax.Array) -> jax.Array:
    """Returns (..., m, n) with every matrix's singular values near 1, by Newton-Schulz."""
    a, b, c = NEWTON_SCHULZ
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (jnp.sqrt((x * x).sum((-2, -1), keepdims=True)) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def spread(count: int, layout: Layout | None, taken: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns mesh axes, largest first, that together cut `count` slices into equal pieces.

    taken: axes that must not be used.
    """
    if layout is None:
        return ()
    chosen: tuple[str, ...] = ()
    free = [a for a in layout.mesh.shape if a not in taken]
    for axis in sorted(free, key=lambda a: -layout.mesh.shape[a]):
        if layout.mesh.shape[axis] > 1 and count % layout.ways((*chosen, axis)) == 0:
            chosen = (*chosen, axis)
    return chosen


def route(spec: PartitionSpec, target: PartitionSpec, stack: int) -> list[PartitionSpec]:
    """Returns the shardings that lead to `target`, one reshard each; often that is all.

    Where some of the axes that cut one inner dimension go to a stacked one and the others are not
    used any more, XLA would gather the whole array on every device ("Involuntary full
    rematerialization"). It can gather the last axes of a dimension, and move them, so: gather what
    lies behind the axes that go, move these, gather the rest.
    Args: target: cuts stacked dimensions only. stack: how many there are, in front.
    """
    used = {axis for entry in target for axis in _axes(entry)}
    first, then, split = list(spec[:stack]), list(target[:stack]), False
    for cut in map(_axes, spec[stack:]):
        if {*cut} & used and {*cut} - used:
            split = True
            while cut[-1] not in used:
                cut = cut[:-1]
        first.append(cut or None)
        then.append(tuple(axis for axis in cut if axis not in used) or None)
    return [PartitionSpec(*first), PartitionSpec(*then), target] if split else [target]


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def scale_by_muon(
    momentum: float, axes: Tree, layout: Layout | None
) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised per matrix, scaled to the RMS of an Adam update.

    Under a mesh each device orthogonalises its share of the stacked layers and experts (these stay
    on their axis): one all-to-all there and one back, no collective inside Newton-Schulz.
    """

    def direction(words: Words, x: jax.Array) -> jax.Array:
        stack = [i for i, w in enumerate(words) if w in STACK_WORDS]
        shape, spec = x.shape, jax.typeof(x).sharding.spec
        if layout is not None:
            # Pipeline stages and experts keep their own slices; free axes share out the rest.
            held = [layout.live(layout.rules.stored.get(words[i] or "", ())) for i in stack]
            taken, entries = sum(held, ()), []
            for i, axes_at in zip(stack, held, strict=True):
                more = spread(shape[i] // layout.ways(axes_at), layout, taken)
                taken += more
                entries.append((*axes_at, *more) or None)
            target = PartitionSpec(*entries, *[None] * (x.ndim - len(stack)))
            for there in route(spec, target, len(stack)):
                x = reshard(x, there)
        # 'embed', an adapter's rank or the outputs of a kernel are one side of the matrix, all
        # other inner dimensions the other.
        is_first = words[len(stack)] in ("embed", RANK) and FEATURES not in words
        rows = shape[len(stack)] if is_first else -1
        columns = shape[-1] if rows == -1 else -1
        matrix = orthogonalise(x.reshape(*shape[: len(stack)], rows, columns))
        matrix = matrix * (0.2 * max(matrix.shape[-2:]) ** 0.5)  # Moonlight: RMS 0.2, as Adam's
        x = matrix.reshape(shape)
        return x if layout is None else reshard(x, spec)

    def leaf(words: Words, grad: jax.Array, buffer: jax.Array) -> jax.Array:
        return direction(words, grad + momentum * buffer)

    def update(updates: Tree, state: Any, params: Tree | None = None, **_: Any) -> Any:
        buffers = jax.tree.map(lambda g, m: momentum * m + g, updates, state.momentum)
        chosen = _like(axes, updates)
        return map_words(leaf, chosen, updates, buffers), MuonState(buffers)

    return optax.GradientTransformation(
        lambda params: MuonState(jax.tree.map(jnp.zeros_like, params)), update
    )


def _like(axes: Tree, masked: Tree) -> Tree:
    """Returns the words of the leaves that optax.partition left in, MaskedNode elsewhere."""
    return map_words(lambda w, x: x if isinstance(x, optax.MaskedNode) else w, axes, masked)
