"""Plain Flax NNX modules as ModelParts: networks written without words and without Ops.

The module's code runs inside a shard_map: every device has all weights of the module and its rows
of the batch, as if there were no mesh. At rest, --shard.zero cuts each parameter of two dimensions
or more along its largest dimension that the ranks divide. nnx.BatchNorm takes its statistics of the
rows of all ranks. Variables that are no parameters (its running statistics) are part of the tree of
parameters, have no gradient, and become the mean over ranks and micro-batches of what the module
writes. The keys of random streams (nnx.Dropout) are made of seed, step, micro-batch and rank, and
are not part of the tree.

Absent: tensor, pipeline and context parallelism, which need words and Ops (models/parts.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.axes import BATCH_AXES
from megajax.core.errors import UserError
from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree, named_leaves, nest
from megajax.layers.losses import LossSums
from megajax.models.parts import FEATURES, Batch, ModelParts, parts_of_network

VARIABLE = "variable/"  # begins the terms of LossSums that are new values of variables
Build = Callable[[nnx.Rngs], Any]
# Of the module and a batch: ({name: sum over the rows}, the number of rows or predictions).
Loss = Callable[[Any, Batch], tuple[Mapping[str, jax.Array], Any]]


@dataclasses.dataclass(frozen=True)
class PlainNetwork:
    """A plain module and its loss. build(rngs) -> the module. loss(module, batch) -> (sums, count),
    of which `sums["loss"]` is minimised."""

    build: Build
    loss: Loss

    def parts(self, layout: Layout | None = None, ops: Any = None) -> ModelParts:
        """Returns the network as parts. ops: ignored.

        Raises: UserError for variables that cannot be trained, and for a mesh that would have to
        cut the network.
        """
        module = nnx.eval_shape(lambda: self.build(nnx.Rngs(jax.random.key(0))))
        if not isinstance(module, nnx.Module):
            raise UserError(
                f"build(rngs) returned a {type(module).__name__}, and a plain network is an "
                "nnx.Module; return the module: lambda rngs: Net(rngs=rngs)"
            )
        leaves = _leaves(module)
        if layout is not None:
            _refuse(layout, leaves)
        abstract = {
            name: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype)
            for name, v in leaves.items()
        }
        ways = 1 if layout is None else layout.ways(layout.rules.stored["embed"])

        def settle(params: Tree, sums: LossSums) -> Tree:
            terms = sums.terms
            if VARIABLE not in terms:
                return params
            new = dict(named_leaves(params))
            for name in new:
                if (total := terms.get(VARIABLE + name)) is not None:
                    number = terms[VARIABLE].astype(total.dtype)
                    is_float = jnp.issubdtype(total.dtype, jnp.floating)
                    mean = total / number if is_float else total // number
                    new[name] = mean.astype(new[name].dtype)
            return nest(new)

        def init(key: jax.Array) -> Tree:
            return nest({n: v.get_value() for n, v in _leaves(self.build(nnx.Rngs(key))).items()})

        axes = () if layout is None else layout.live(BATCH_AXES)
        return parts_of_network(
            abstract=nest(abstract),
            axes=nest({name: _words(v, ways) for name, v in leaves.items()}),
            init=init,
            network=lambda params, batch, key: self._sums(params, batch, key, axes),
            settle=settle,
            module=lambda params: self._module(jax.tree.map(jnp.asarray, params), None),
        )

    def trains(self, name: str, words: Words) -> bool:
        """Tells the parameters from other variables, which have no gradient."""
        return name not in self._others

    @functools.cached_property
    def _others(self) -> set[str]:
        module = nnx.eval_shape(lambda: self.build(nnx.Rngs(jax.random.key(0))))
        return {name for name, v in _leaves(module).items() if not isinstance(v, nnx.Param)}

    def _module(self, params: Tree, key: jax.Array | None, axes: tuple[str, ...] = ()) -> Any:
        """Returns the module with these values; to train with a key, otherwise to evaluate."""
        module = nnx.eval_shape(lambda: self.build(nnx.Rngs(jax.random.key(0))))
        module.eval() if key is None else module.train()
        values = dict(named_leaves(params))
        graph, state = nnx.split(module)
        new: list[tuple[tuple, Any]] = []
        for number, (path, variable) in enumerate(nnx.to_flat_state(state)):
            if isinstance(variable, nnx.RngKey):
                seed = jax.random.key(0) if key is None else key
                value = jax.random.fold_in(seed, number)
            elif isinstance(variable, nnx.RngState):
                value = jnp.zeros(variable.get_value().shape, variable.get_value().dtype)
            else:
                value = values[_name(path)]
            new.append((path, variable.replace(value)))
        module = nnx.merge(graph, nnx.from_flat_state(new))
        kinds = {x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)}
        compute = next((d for d in kinds if d != jnp.float32), None)
        for _, part in nnx.iter_graph(module):
            if isinstance(part, nnx.Module):
                if compute is not None and getattr(part, "dtype", 0) is None:
                    part.dtype = compute  # type: ignore
                if isinstance(part, nnx.BatchNorm) and axes and part.axis_name is None:
                    part.axis_name = axes  # type: ignore  (all rows of the step are one batch)
        return module

    def _sums(
        self, params: Tree, batch: Batch, key: jax.Array | None, axes: tuple[str, ...]
    ) -> LossSums:
        """Returns the sums of one device's rows, inside a shard_map."""
        if key is not None and axes:
            key = jax.random.fold_in(key, lax.axis_index(axes))
        module = self._module(params, key, axes)
        try:
            returned = self.loss(module, dict(batch))
        except KeyError as error:
            if error.args and isinstance(error.args[0], str) and error.args[0] not in batch:
                name = error.args[0]
                raise UserError(
                    f"the loss reads the member {name!r} of the batch, and the task has "
                    f"{', '.join(batch)}; add it to the task: batch={{{name!r}: Leaf(...)}}"
                ) from error
            raise
        terms, count = _checked(returned)
        if key is not None:
            states = [(_name(path), v) for path, v in nnx.to_flat_state(nnx.state(module))]
            after = {name: v.get_value() for name, v in states if name in self._others}
            terms |= {VARIABLE + name: lax.stop_gradient(x) for name, x in after.items()}
            terms |= {VARIABLE: jnp.float32(1)} if after else {}
        return LossSums(terms, count)


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def _leaves(module: nnx.Module) -> dict[str, Any]:
    """Returns {dotted name: variable} of what a run keeps: not the state of random streams.

    Raises: UserError with every variable that a run cannot keep.
    """
    wrong, leaves = [], {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, nnx.RngState):
            continue
        name = _name(path)
        if not isinstance(variable, nnx.Variable):
            wrong.append(_plain_array(name))
            continue
        dtype = getattr(variable.get_value(), "dtype", None)
        if dtype is None:
            wrong.append(f"{name} is a {type(variable).__name__} whose value is no array")
        elif isinstance(variable, nnx.Param) and dtype != jnp.float32:
            wrong.append(
                f"{name} is a parameter of the type {dtype}, and parameters rest in float32: leave "
                "param_dtype out (--train.dtype=bfloat16 is the type of the computation), and make "
                "integers, which have no gradient, an nnx.Variable"
            )
        leaves[name] = variable
    for path, part in nnx.iter_graph(module):
        if isinstance(part, nnx.Module):
            arrays = (n for n, x in vars(part).items() if isinstance(x, jax.Array))
            wrong += [_plain_array(_name((*path, n))) for n in arrays]
    if wrong:
        raise UserError("; ".join(dict.fromkeys(wrong)))
    return leaves


def _plain_array(name: str) -> str:
    return (
        f"{name} is an array of JAX that is no nnx.Variable: make it nnx.Param(...) to train it, "
        "or nnx.Variable(...) to keep it"
    )


def _words(variable: Any, ways: int) -> Words:
    """Returns the words of a leaf. `embed` is the dimension that ZeRO cuts; `features` marks what
    is a matrix for optimizers, whatever the mesh."""
    shape = variable.get_value().shape
    words: list[str | None] = [None] * len(shape)
    if not isinstance(variable, nnx.Param) or len(shape) < 2:
        return tuple(words)
    cut = [i for i, size in enumerate(shape) if size and size % ways == 0] if ways > 1 else []
    best = max(cut, key=lambda i: shape[i], default=None)
    if best is not None:
        words[best] = "embed"
    words[0 if best == len(shape) - 1 else -1] = FEATURES
    return tuple(words)


def _refuse(layout: Layout, leaves: Mapping[str, Any]) -> None:
    for axis in ("tensor", "pipe", "context"):
        size = layout.mesh.shape[axis]
        if size > 1:
            name = next((n for n, v in leaves.items() if v.get_value().ndim > 1), "")
            raise UserError(
                f"mesh.{axis}={size}: parameter {name} has no words, which say how {axis} cuts it; "
                "use 1, so that these devices take rows of the batch, or give the network words "
                f"and Ops (docs/own_networks.md) (--mesh.{axis})"
            )


def _checked(returned: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns (the terms, the count) that a loss returned. Raises: UserError."""
    mend = 'return ({"loss": the sum over the rows, ...}, the number of rows)'
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], dict)):
        raise UserError(f"the loss returned {_kind(returned)}; {mend}")
    terms, count = returned
    if "loss" not in terms:
        names = ", ".join(map(repr, terms)) or "none"
        raise UserError(f"the loss returned the sums {names} and no 'loss'; {mend}")
    for name, x in {**terms, "the count": count}.items():
        if jnp.shape(x) != ():
            shape = "x".join(map(str, jnp.shape(x)))
            raise UserError(
                f"the loss returned {name if name == 'the count' else repr(name)} of the shape "
                f"({shape}), and sums and counts are scalars: add up the rows with .sum()"
            )
    sums = {
        name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype("int32")
        for name, x in ((n, jnp.asarray(x)) for n, x in terms.items())
    }
    return sums, jnp.asarray(count).astype(jnp.int32)


def _kind(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(type(i).__name__ for i in x)})"
    return f"one array of the shape {jnp.shape(x)}" if hasattr(x, "shape") else type(x).__name__
