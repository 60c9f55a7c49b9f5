"""ModelParts: a network as separate pure functions over a plain tree of arrays.

Scan, pipeline, serving and ahead-of-time compilation all reuse the same parts: `embed`, ONE `block`
and `head_loss`. Parameters are nested dicts of float32 arrays. `axes` mirrors the tree with each
leaf's logical words. A leaf of a stack of equal layers has the layers first, and its first word
names the stack: 'layers' is the stack that `block` runs and that pipeline stages cut, 'tower' any
further one (`as_tower`), such as a vision encoder, which `embed` or `head_loss` runs by itself. No
code asks where in the tree a stack lies.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.layout import Words
from megajax.core.packed import LayerRuns, PackedWeight, runs_of
from megajax.core.tree import Tree, is_words, named_leaves
from megajax.layers.losses import LossSums, MoeSums
from megajax.layers.mask import Context
from pallas_kernels.attention.names import SAVED

Batch = Mapping[str, jax.Array]  # of tokens: tokens, targets, segments, positions, int32 (B, S)
Remat = Literal["none", "full", "outputs", "dots"]
LAYERS, TOWER = "layers", "tower"  # the first words of stacked leaves


def scan_layers(step: Callable, x: Any, stack: Tree, layers: int) -> tuple[Any, Any]:
    """Returns what step(x, (weights of a layer, its index)) -> (x, y) makes of x, layer by layer,
    and the stacked ys. stack: of all layers, or core.packed.LayerRuns: a scan for each, and a call
    for a layer that is alone."""
    runs, found = runs_of(stack, layers), []
    alone = jax.jit(step)  # one lowering for all layers whose weights are alike
    for part, start, stop in zip(runs.stacks, runs.starts, runs.stops, strict=True):
        if stop - start == 1:
            x, y = alone(x, (jax.tree.map(lambda w: w[0], part), jnp.int32(start)))
            ys = jax.tree.map(lambda one: one[None], y)
        else:
            x, ys = jax.lax.scan(step, x, (part, jnp.arange(start, stop)))
        found.append(ys)
    return x, found[0] if len(found) == 1 else jax.tree.map(lambda *y: jnp.concatenate(y), *found)


@dataclasses.dataclass(frozen=True)
class Stream:
    """How the weights of stacked layers come to where they are used.

    layer(stored weights, index) -> weights in use: called in each layer, in what the backward pass
    runs again. run: as `scan_layers`, which it may replace to fetch a layer beside the one before.
    """

    layer: Callable[[Tree, jax.Array], Tree] = lambda weights, index: weights
    run: Callable[..., tuple[jax.Array, Any]] = scan_layers


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """A network taken apart.

    abstract: the parameters as ShapeDtypeStructs. axes: the logical words of each leaf.
    context(batch, key): what all blocks need. embed(params, batch, context) -> x.
    block(layer params, x, context, cache) -> (x, cache, MoeSums or None); the objective adds the
    MoeSums' penalty. head(params, x) -> float32 logits (who never asks for them may raise).
    head_loss(params, x, targets) -> LossSums
    without the blocks' part. settle(params, sums of a step) -> params: what follows a rule and no
    gradient (the experts' bias), once a step.
    """

    layers: int
    abstract: Tree
    axes: Tree
    init: Callable[[jax.Array], Tree]
    context: Callable[..., Context]
    embed: Callable[..., jax.Array]
    block: Callable[..., tuple[jax.Array, Any, MoeSums | None]]
    head: Callable[..., jax.Array]
    head_loss: Callable[..., LossSums]
    settle: Callable[[Tree, LossSums], Tree] = lambda params, sums: params

    @property
    def stack(self) -> str:
        """The member of the parameters that holds the layers of `block`, by its leaves' words.

        Raises: UserError when it is not one member with nothing else in it.
        """
        return _stack(self.axes)

    def hidden(
        self,
        params: Tree,
        batch: Batch,
        key: jax.Array | None,
        remat: Remat,
        stream: "Stream | None" = None,
    ) -> tuple[jax.Array, MoeSums | None]:
        """Returns (the residual stream after the last block, the blocks' sums); one scan over the
        stacked layers. stream: how these come to where they are used; None: they are there."""
        context, stream = self.context(batch, key), stream or Stream()

        def step(x: jax.Array, layer: tuple) -> tuple[jax.Array, MoeSums | None]:
            weights, index = stream.layer(*layer), layer[1]
            here = context
            if context.dropout is not None:
                here = dataclasses.replace(
                    context, dropout=jax.random.fold_in(context.dropout, index)
                )
            x, _, moe = self.block(weights, x, here)
            return x, moe

        if remat != "none":
            step = jax.checkpoint(step, policy=remat_policy(remat), prevent_cse=False)
        with jax.named_scope("embed"):
            x = self.embed(params, batch, context)
        with jax.named_scope("blocks"):
            return stream.run(step, x, params[self.stack], self.layers)

    def loss(
        self,
        params: Tree,
        batch: Batch,
        key: jax.Array | None = None,
        remat: Remat = "none",
        stream: "Stream | None" = None,
    ) -> LossSums:
        """Returns the sums over all predicted tokens of the batch. stream: as of `hidden`."""
        x, moe = self.hidden(params, batch, key, remat, stream)
        with jax.named_scope("head"):
            sums = self.head_loss(params, x, batch["targets"])
        return dataclasses.replace(sums, moe=moe)

    def logits(self, params: Tree, batch: Batch) -> jax.Array:
        """Returns float32 logits (B, S, padded vocabulary), all at once: for small batches."""
        return self.head(params, self.hidden(params, batch, None, "none")[0])


def remat_policy(name: Remat) -> Callable:
    """Returns what the backward pass may keep of a block.

    full: only its input. outputs: also what attention and each sublayer gave, so that no collective
    and no fused attention runs twice ('attended': its output and log-sum-exp). dots: every
    matmul's result, and attention's; of partial sums over ranks the total, which is smaller.
    """
    policies = jax.checkpoint_policies
    attended = policies.save_only_these_names(SAVED)
    return {
        "full": policies.nothing_saveable,
        "outputs": policies.save_only_these_names("block_out", SAVED),
        "dots": policies.save_from_both_policies(_products, attended),
    }[name]


def _products(prim: Any, *avals: Any, **params: Any) -> bool:
    """A policy of jax.checkpoint: whether to keep what an operation gives.

    A product of weights whose type says `unreduced` is a partial sum of one rank. A scan would
    stack such arrays and slice them in the backward pass, which jax 0.11.2 refuses ("unreduced rule
    for dynamic_slice is not implemented"). What the ranks' sums add up to, a reshard, is kept.
    """
    if prim.name == "reshard":
        return bool(avals[0].sharding.spec.unreduced) and not params["dst_sharding"].spec.unreduced
    out = params.get("out_sharding")
    if out is not None and out.spec.unreduced:
        return False
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *avals, **params)


def split(model: nnx.Module) -> tuple[Any, Tree, Tree]:
    """Returns (graph, tree of the parameters, tree of their words) of an NNX module.

    Words that name fewer dimensions than the leaf has belong to a stacked leaf, whose layers come
    first: of the stack that `block` runs, or of one that `as_tower` marked.
    Raises: UserError with every variable that has no words, or too many, and how to give them.
    """
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    _check_words(state)

    def words(variable: nnx.Variable) -> tuple:
        axes, stack = variable.get_metadata("axes"), variable.get_metadata("stack", LAYERS)
        return (stack,) * (len(variable.get_value().shape) - len(axes)) + tuple(axes)

    axes = nnx.to_pure_dict(
        jax.tree.map(
            lambda v: v.replace(words(v)), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )
    )
    return graph, params, axes


def _check_words(state: Any) -> None:
    wrong = []
    for path, variable in nnx.to_flat_state(state):
        name, kind = ".".join(map(str, path)), type(variable).__name__
        axes, shape = variable.get_metadata("axes", None), tuple(variable.get_value().shape)
        if not issubclass(type(variable), nnx.Param):
            wrong.append(f"{name} is a {kind} and no nnx.Param; a step keeps parameters alone")
        elif axes is None:
            wrong.append(f"{name} {shape} has none")
        elif not is_words(axes) or len(axes) > len(shape):
            wrong.append(f"{name} {shape} has {axes!r}")
    if wrong:
        raise UserError(
            "each parameter needs words, a tuple with the word of each dimension or None (the "
            f"layers of a stack need none): {'; '.join(wrong)}. Give them where the parameter is "
            'made: megajax.layers.param.normal(rngs, layout, shape, ("embed", "mlp"), std), '
            'nnx.Param(value, axes=("embed", "mlp")), or for a module of Flax nnx.Linear(..., '
            'kernel_metadata={"axes": ("embed", "mlp")}, bias_metadata={"axes": ("mlp",)})'
        )


def as_tower(stack: Any) -> Any:
    """Marks stacked layers, which nnx.vmap made, as a stack that `block` does not run."""
    for _, variable in nnx.iter_graph(stack):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata("stack", TOWER)
    return stack


def is_layered(words: Words) -> bool:
    """Tells a leaf of the stack that `block` runs."""
    return words[:1] == (LAYERS,)


def is_stacked(words: Words) -> bool:
    """Tells a leaf of any stack of layers."""
    return words[:1] in ((LAYERS,), (TOWER,))


def _words(axes: Tree) -> list[Words]:
    return jax.tree.leaves(axes, is_leaf=is_words)


def _stack(axes: Tree) -> str:
    marked = {k: {is_layered(w) for w in _words(v)} for k, v in axes.items()}
    found = [k for k, kinds in marked.items() if True in kinds]
    if len(found) != 1 or False in marked[found[0]]:
        raise UserError(
            "a model must have one member whose leaves all have the word 'layers' first, the stack "
            f"that `block` runs; found {', '.join(found) or 'none'}; mark further stacks by "
            "models.parts.as_tower"
        )
    return found[0]


def of_module(build: Callable[[jax.Array], Any], layers: int) -> ModelParts:
    """Returns a network that is an NNX module as parts. Call it, and them, under its mesh.

    build(key): the module. It has a stack of `layers` blocks, made by nnx.vmap, that take (x,
    context) and return x, and the methods context(batch, key) -> Context, embed(batch, context) ->
    x, loss(x, targets) -> LossSums and, for whoever asks for it, logits(x).
    Raises: UserError when it has not one such stack.
    """
    graph, abstract, axes = split(nnx.eval_shape(lambda: build(jax.random.key(0))))
    block_graph = nnx.split(getattr(nnx.merge(graph, abstract), _stack(axes)))[0]

    def block(weights: Tree, x: jax.Array, context: Context, cache: None = None) -> tuple:
        return nnx.merge(block_graph, weights)(x, context), cache, None

    merge = functools.partial(nnx.merge, graph)
    return ModelParts(
        layers=layers,
        abstract=abstract,
        axes=axes,
        init=lambda key: nnx.to_pure_dict(nnx.state(build(key))),
        context=lambda batch, key: merge(abstract).context(batch, key),
        embed=lambda params, batch, context: merge(params).embed(batch, context),
        block=block,
        head=lambda params, x: merge(params).logits(x),
        head_loss=lambda params, x, targets: merge(params).loss(x, targets),
    )


def check_params(params: Tree, parts: ModelParts, who: str) -> None:
    """Refuses parameters that are not those of a model, by the names and shapes of their leaves.

    JAX would otherwise drop layers that a configuration does not have, and repeat the last one for
    those that the parameters lack. Packed leaves (quantized matrices) have shapes of their own.
    Raises: UserError that begins with `who` and names the leaf.
    """
    wanted, given = dict(named_leaves(parts.abstract)), dict(params)
    for stack, value in params.items():
        if isinstance(value, LayerRuns):
            if value.layers != parts.layers:
                raise UserError(
                    f"{who}: the parameters have {value.layers} layers, the configuration "
                    f"{parts.layers}"
                )
            del given[stack]
            wanted = {n: x for n, x in wanted.items() if not n.startswith(f"{stack}.")}
    for n, x in named_leaves(given, lambda x: isinstance(x, PackedWeight)):
        like = wanted.pop(n, None)
        if like is None:
            raise UserError(f"{who}: the configuration's model has no parameter {n}")
        if not isinstance(x, PackedWeight) and tuple(x.shape) != like.shape:
            raise UserError(
                f"{who}: {n} has the shape {list(x.shape)}; that of the configuration's model is "
                f"{list(like.shape)}"
            )
    if wanted:
        raise UserError(f"{who}: the parameters have no {next(iter(wanted))}")


def map_words(function: Callable, axes: Tree, *rest: Tree) -> Tree:
    """Maps function(words, *leaves) over the tree of words."""
    return jax.tree.map(function, axes, *rest, is_leaf=is_words)
