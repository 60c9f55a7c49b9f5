"""ModelParts: a network as separate pure functions over a plain tree of arrays.

Scan, pipeline, serving and ahead-of-time compilation all reuse the same parts: `embed`, ONE `block`
and `head_loss`. Parameters are nested dicts of float32 arrays. `axes` mirrors the tree with each
leaf's logical words. A leaf of a stack of equal layers has the layers first, and its first word
names the stack: 'layers' is the stack that `block` runs and that pipeline stages cut, 'tower' any
further one (`as_tower`), such as a vision encoder, which `embed` or `head_loss` runs by itself. A
stack may lie anywhere in the tree.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.layout import Words
from megajax.core.packed import LayerRuns, LowRank, PackedWeight, slice_layers, split_runs
from megajax.core.tree import Tree, is_words, named_leaves
from megajax.layers.attention import Context
from megajax.layers.losses import LossSums, MoeSums
from pallas_kernels.attention.names import SAVED

Batch = Mapping[str, jax.Array]  # of tokens: tokens, targets, segments, positions, int32 (B, S)
Remat = Literal["none", "full", "outputs", "dots"]
LAYERS, TOWER = "layers", "tower"  # the first words of stacked leaves
Steps = Callable | Mapping[int, Callable | tuple[Callable, ...]]  # of `scan_layers`
LONGEST = 8  # (chosen) steps that one iteration of a loop over layers has, unrolled


def scan_layers(step: Steps, x: Any, stack: Tree, layers: int) -> tuple[Any, Any]:
    """Returns (x after all layers, the stacked ys) of step(x, (weights of a layer, its index)) ->
    (x, y).

    step: of all layers, or {first layer of a run: its step, or a tuple of steps that its layers
    have one after the other, repeated}. stack: of all layers, or core.packed.LayerRuns. Each run of
    equal steps and stacks is a scan, whose iteration has a layer, or a layer for each step of a
    tuple. A run of one layer, and the layers that are left over by tuples, are calls.
    """
    steps = step if isinstance(step, Mapping) else {0: step}
    cycles = {first: one if isinstance(one, tuple) else (one,) for first, one in steps.items()}
    runs, outputs = split_runs(stack, layers, tuple(steps)), []
    # Lowered once for equal weights.
    alone = {one: jax.jit(one) for cycle in cycles.values() for one in cycle}
    for part, start, stop in zip(runs.stacks, runs.starts, runs.stops, strict=True):
        first = max(first for first in steps if first <= start)
        cycle = cycles[first]
        cycle = cycle[(start - first) % len(cycle) :] + cycle[: (start - first) % len(cycle)]
        looped = (stop - start) // len(cycle) * len(cycle)
        looped = looped if looped > len(cycle) else 0
        if looped and len(cycle) == 1:
            x, ys = jax.lax.scan(cycle[0], x, (part, jnp.arange(start, stop)))
            outputs.append(ys)
        elif looped:
            x, ys = _scan_cycles(cycle, x, slice_layers(part, 0, looped), start)
            outputs.append(ys)
        for i in range(looped, stop - start):
            one = alone[cycle[i % len(cycle)]]
            x, y = one(x, (jax.tree.map(lambda w: w[i], part), jnp.int32(start + i)))  # noqa: B023
            outputs.append(jax.tree.map(lambda one: one[None], y))
    if len(outputs) == 1:
        return x, outputs[0]
    return x, jax.tree.map(lambda *y: jnp.concatenate(y), *outputs)


def _scan_cycles(steps: tuple[Callable, ...], x: Any, stack: Tree, start: int) -> tuple[Any, Any]:
    """`scan_layers` of a stack whose number of layers is a multiple of the number of steps."""
    cycles = jax.tree.map(lambda w: w.reshape(-1, len(steps), *w.shape[1:]), stack)
    firsts = start + len(steps) * jnp.arange(jax.tree.leaves(cycles)[0].shape[0])

    def cycle(x: Any, item: tuple) -> tuple[Any, Any]:
        weights, first = item
        ys = []
        for i, step in enumerate(steps):
            layer = jax.tree.map(lambda w: w[i], weights)  # noqa: B023
            x, y = step(x, (layer, first + i))
            ys.append(y)
        return x, jax.tree.map(lambda *y: jnp.stack(y), *ys)

    x, ys = jax.lax.scan(cycle, x, (cycles, firsts))
    return x, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)


def cycles_of(kinds: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (first layer of a run, the kinds of its layers, which repeat) for the kinds of all
    layers: one run where they repeat soon enough, else runs of equal kinds."""
    count = len(kinds)
    for period in range(1, min(LONGEST, count // 2) + 1):
        if all(kinds[i] == kinds[i - period] for i in range(period, count)):
            return [(0, tuple(kinds[:period]))]
    return [(i, (kind,)) for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]


@dataclasses.dataclass(frozen=True)
class Tower:
    """A further stack of layers (`as_tower`) that makes features of images, which `embed` takes.

    layers: of the stack. segments: equal pieces of it, each of them the work of one slot of a
    pipeline's table (schedule/encoder.py); 0: `embed` runs the tower. Of a tower with segments:
    members: of the parameters: the stack with what `start` reads, and what `finish` reads.
    start(params, batch) -> x, what the first layer reads. segment(params, x, batch) -> x: the
    layers that the stack in `params` holds, all or some of them. finish(params, x, batch) -> the
    features. images: the member of a batch (..., rows, patches) that is 0 or more where there is
    something to see. shares: whether every tensor rank has all weights, and runs start, segment and
    finish on its share of a microbatch's rows.
    """

    layers: int
    segments: int = 0
    members: tuple[str, ...] = ()
    start: Callable[..., jax.Array] | None = None
    segment: Callable[..., jax.Array] | None = None
    finish: Callable[..., jax.Array] | None = None
    images: str = ""
    shares: bool = False


@dataclasses.dataclass(frozen=True)
class Prelude:
    """Layers before those of `ModelParts.block`, with other leaves: DeepSeek-V3's dense ones.

    `ModelParts.embed` runs them, so that a train step and a pipeline know nothing of them: all
    stages of a pipeline compute them, beside the embedding, and hold their weights. What has a
    cache calls `start`, then `block` layer by layer. member: of the parameters, a stack that
    `as_tower` marked. start(params, batch, context, *features) -> x before them.
    """

    member: str
    layers: int
    block: Callable[..., tuple[jax.Array, Any, MoeSums | None]]
    start: Callable[..., jax.Array]

    def embed(
        self, params: Tree, batch: Batch, context: Context, *features: jax.Array
    ) -> jax.Array:
        """Returns the residual stream after them. The backward pass computes them again."""
        x = self.start(params, batch, context, *features)

        def layer(x: jax.Array, item: tuple) -> tuple[jax.Array, None]:
            weights, index = item
            at = context
            if context.dropout is not None:
                at = dataclasses.replace(
                    context, dropout=jax.random.fold_in(context.dropout, index)
                )
            return self.block(weights, x, at)[0], None

        # Behind the numbers that the other layers and the embedding fold into the key.
        first = jnp.arange(self.layers) + 2**20
        layer = jax.checkpoint(layer, prevent_cse=False)
        return jax.lax.scan(layer, x, (params[self.member], first))[0]


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """A network taken apart.

    abstract: the parameters as ShapeDtypeStructs. axes: the logical words of each leaf.
    context(batch, key): what all blocks need. embed(params, batch, context) -> x; where a tower has
    segments, embed(params, batch, context, features) too, for local code (parallel/tensor.py): the
    features are zeros on the devices that have none, and all devices add up to x.
    block(layer params, x, context, cache) -> (x, cache, MoeSums or None); the step adds the
    MoeSums' penalty to the objective. head(params, x) -> float32 logits (a model without logits may
    raise). head_loss(params, x, batch) -> LossSums without the blocks' part; batch: the
    micro-batch, all members. settle(params, sums of a step) -> params: what follows a rule and no
    gradient (the experts' bias), once a step.
    see(params, batch) -> the features of images, which embed takes in their place (models/vlm.py).
    tower: a further stack; None: there is none.
    network(params, batch, key) -> LossSums: of a model without a stack (`of_loss`), in the place of
    embed, block and head_loss; layers is 0 then. module(params) -> the Flax module with these
    values, to evaluate: of a plain network (models/plain.py); None: of others.
    trains: a tree of bools like the parameters, set by the train step: False where a leaf has no
    gradient; None: all leaves are trained.
    runs: {number of a run's first layer: its block}, of layers that compute unlike others; the
    parameters stay one stack. Empty: `block` runs all layers.
    prelude: layers that `embed` runs; None: there are none.
    kinds, blocks: of layers of several kinds (layers.attention.Kind): the number of each layer's
    kind, and the block of each kind. `block` runs the layer whose kind Context.kind is. Both are
    empty where layers are alike.
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
    see: Callable[..., jax.Array] | None = None
    tower: Tower | None = None
    network: Callable[..., LossSums] | None = None
    module: Callable[[Tree], Any] | None = None
    trains: Tree = None
    runs: Mapping[int, Callable] = dataclasses.field(default_factory=dict)
    prelude: Prelude | None = None
    kinds: tuple[int, ...] = ()
    blocks: tuple[Callable, ...] = ()

    @property
    def stack(self) -> str:
        """The member of the parameters that holds the layers of `block`, by its leaves' words.

        Raises: UserError when it is not one member with nothing else in it.
        """
        return _stack(self.axes)

    def block_of(self, layer: int) -> Callable:
        """Returns the block of one layer, which needs no Context.kind."""
        return self.blocks[self.kinds[layer]] if self.kinds else self.block

    def steps(self, step_of: Callable[[Callable], Callable]) -> Steps:
        """Returns the steps of `scan_layers`. step_of(block): of the layers that a block runs."""
        if self.runs or not self.kinds:
            return {i: step_of(block) for i, block in self.runs.items()} or step_of(self.block)
        steps = [*map(step_of, self.blocks)]
        return {i: tuple(steps[kind] for kind in cycle) for i, cycle in cycles_of(self.kinds)}

    def outer(self, tree: Tree) -> Tree:
        """Returns the members of a tree like the parameters that hold no layer of `block`."""
        return {k: x for k, x in tree.items() if k != self.stack}

    def trained(self, tree: Tree) -> Tree:
        """Returns a tree like the parameters with None in the place of what is not trained."""
        return tree if self.trains is None else select(self.trains, tree)

    def joined(self, trained: Tree, params: Tree) -> Tree:
        """Returns params with the trained leaves taken from another tree, which `trained` made."""
        if self.trains is None:
            return trained
        return jax.tree.map(
            lambda is_trained, new, old: new if is_trained else old, self.trains, trained, params
        )

    def enter(
        self,
        params: Tree,
        batch: Batch,
        key: jax.Array | None,
        remat: Remat,
        fetch: Callable[[Tree, jax.Array], Tree] | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns (the residual stream before the first layer, the step of `scan_layers`).

        fetch(stored weights, index) -> the weights in use: called in each layer, in the part that
        the backward pass runs again; None: the weights of the stack are in use.
        """
        context = self.context(batch, key)

        def step(block: Callable, x: jax.Array, layer: tuple) -> tuple[jax.Array, MoeSums | None]:
            weights, index = layer
            if fetch is not None:
                weights = fetch(weights, index)
            layer_context = context
            if context.dropout is not None:
                layer_key = jax.random.fold_in(context.dropout, index)
                layer_context = dataclasses.replace(context, dropout=layer_key)
            x, _, moe = block(weights, x, layer_context)
            return x, moe

        def stored(block: Callable) -> Callable:
            one = functools.partial(step, block)
            if remat == "none":
                return one
            return jax.checkpoint(one, policy=remat_policy(remat), prevent_cse=False)

        steps = self.steps(stored)
        with jax.named_scope("embed"):
            return self.embed(params, batch, context), steps

    def hidden(
        self,
        params: Tree,
        batch: Batch,
        key: jax.Array | None,
        remat: Remat,
        fetch: Callable[[Tree, jax.Array], Tree] | None = None,
    ) -> tuple[jax.Array, MoeSums | None]:
        """Returns (the residual stream after the last block, the blocks' sums); one scan over the
        stacked layers. fetch: as of `enter`."""
        x, step = self.enter(params, batch, key, remat, fetch)
        with jax.named_scope("blocks"):
            return scan_layers(step, x, params[self.stack], self.layers)

    def finish(self, params: Tree, x: jax.Array, moe: MoeSums | None, batch: Batch) -> LossSums:
        """Returns the sums over all predictions of the batch. x, moe: as of `hidden`."""
        with jax.named_scope("head"):
            sums = self.head_loss(params, x, batch)
        return dataclasses.replace(sums, moe=moe)

    def loss(
        self,
        params: Tree,
        batch: Batch,
        key: jax.Array | None = None,
        remat: Remat = "none",
        fetch: Callable[[Tree, jax.Array], Tree] | None = None,
    ) -> LossSums:
        """Returns the sums over all predictions of the batch. fetch: as of `enter`."""
        if self.network is not None:
            return self.network(params, batch, key)
        x, moe = self.hidden(params, batch, key, remat, fetch)
        return self.finish(params, x, moe, batch)

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
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        variable.set_metadata("path", ".".join(map(str, path)))  # layers.param.name_of
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
    wrong = _no_params(state)
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        axes, shape = variable.get_metadata("axes", None), tuple(variable.get_value().shape)
        if not issubclass(type(variable), nnx.Param):
            continue
        if axes is None:
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


def _no_params(state: Any) -> list[str]:
    return [
        f"{'.'.join(map(str, path))} is a {type(variable).__name__} and no nnx.Param; a step keeps "
        "parameters alone"
        for path, variable in nnx.to_flat_state(state)
        if not issubclass(type(variable), nnx.Param)
    ]


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
    stacks = [k for k, kinds in marked.items() if True in kinds]
    if len(stacks) != 1 or False in marked[stacks[0]]:
        raise UserError(
            "a model must have one member whose leaves all have the word 'layers' first, the stack "
            f"that `block` runs; found {', '.join(stacks) or 'none'}; mark further stacks by "
            "models.parts.as_tower"
        )
    return stacks[0]


def of_module(build: Callable[[jax.Array], Any], layers: int) -> ModelParts:
    """Returns a network that is an NNX module as parts. Call it, and them, under its mesh.

    build(key): the module. It has a stack of `layers` blocks, made by nnx.vmap, that take (x,
    context) and return x, and the methods context(batch, key) -> Context, embed(batch, context) ->
    x, loss(x, batch) -> LossSums and, where logits are asked for, logits(x). A `loss` whose second
    parameter is named `targets` or `targets_...` gets that member of the batch alone.
    Raises: UserError when it has not one such stack.
    """
    graph, abstract, axes = split(nnx.eval_shape(lambda: build(jax.random.key(0))))
    module = nnx.merge(graph, abstract)
    block_graph = nnx.split(getattr(module, _stack(axes)))[0]
    of_targets = [*inspect.signature(module.loss).parameters][1].split("_")[0] == "targets"
    towers = [
        x.shape[0]
        for (_, words), (_, x) in zip(
            named_leaves(axes, is_words), named_leaves(abstract), strict=True
        )
        if words[:1] == (TOWER,)
    ]

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
        head_loss=lambda params, x, batch: merge(params).loss(
            x, batch["targets"] if of_targets else batch
        ),
        tower=Tower(max(towers)) if towers else None,
    )


FEATURES = "features"  # the word of a dimension that no mesh axis cuts, of a matrix or a kernel


def of_loss(build: Callable[[jax.Array], Any]) -> ModelParts:
    """Returns a network that computes its loss by itself, and has no stack of equal layers.

    build(key): an NNX module with the method loss(batch, key) -> LossSums, in plain code: it sees
    whole weights and a device's rows of the batch, and the train step adds up sums and gradients
    over devices. key: None where nothing is drawn. The loss of a row must not depend on the other
    rows. Parameters may have words; `embed` alone counts, as the dimension that --shard.zero cuts.
    A parameter of two dimensions or more without words counts as a matrix (weight decay).
    Pipelines and context parallelism, which cut such a network, are refused by the train step.
    Raises: UserError with every variable that is no nnx.Param.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: build(jax.random.key(0))))
    wrong = _no_params(state)
    if wrong:
        raise UserError("; ".join(wrong))

    def words(variable: nnx.Variable) -> nnx.Variable:
        ndim = len(variable.get_value().shape)
        has = variable.get_metadata("axes", None) or (None,) * ndim
        known = [w if w == "embed" else None for w in has]
        if "embed" not in known and ndim > 1:
            known[-1] = FEATURES
        return variable.replace(tuple(known))

    axes = jax.tree.map(words, state, is_leaf=lambda v: isinstance(v, nnx.Variable))

    return parts_of_network(
        abstract=nnx.to_pure_dict(state),
        axes=nnx.to_pure_dict(axes),
        init=lambda key: nnx.to_pure_dict(nnx.state(build(key))),
        network=lambda params, batch, key: nnx.merge(graph, params).loss(batch, key),
    )


def parts_of_network(**members: Any) -> ModelParts:
    """Returns the parts of a network that computes its loss by itself. members: of ModelParts."""

    def missing(*_: Any) -> Any:
        raise UserError("a network that computes its own loss has no blocks and no logits")

    return ModelParts(
        layers=0,
        context=missing,
        embed=missing,
        block=missing,
        head=missing,
        head_loss=missing,
        **members,
    )


def check_params(params: Tree, parts: ModelParts, who: str) -> None:
    """Refuses parameters that are not those of a model, by the names and shapes of their leaves.

    JAX would otherwise drop layers that a configuration does not have, and repeat the last one for
    those that the parameters lack. Packed leaves (quantized matrices) have shapes of their own.
    Raises: UserError that begins with `who` and names the leaf.
    """
    expected, leaves = dict(named_leaves(parts.abstract)), dict(params)
    for stack, value in params.items():
        if isinstance(value, LayerRuns):
            if value.layers != parts.layers:
                raise UserError(
                    f"{who}: the parameters have {value.layers} layers, the configuration "
                    f"{parts.layers}"
                )
            del leaves[stack]
            expected = {n: x for n, x in expected.items() if not n.startswith(f"{stack}.")}
    for n, x in named_leaves(leaves, lambda x: isinstance(x, PackedWeight | LowRank)):
        x = x.base if isinstance(x, LowRank) else x
        like = expected.pop(n, None)
        if like is None:
            raise UserError(f"{who}: the configuration's model has no parameter {n}")
        if not isinstance(x, PackedWeight) and tuple(x.shape) != like.shape:
            raise UserError(
                f"{who}: {n} has the shape {list(x.shape)}; that of the configuration's model is "
                f"{list(like.shape)}"
            )
    if expected:
        raise UserError(f"{who}: the parameters have no {next(iter(expected))}")


def select(mask: Tree, tree: Tree) -> Tree:
    """Returns a tree with None in the place of what the mask, a tree of bools, has False for. A
    leaf of the mask may stand for a subtree (a packed weight) or for None."""
    return jax.tree.map(lambda is_in, x: x if is_in else None, mask, tree)


def map_words(function: Callable, axes: Tree, *others: Tree) -> Tree:
    """Maps function(words, *leaves) over the tree of words."""
    return jax.tree.map(function, axes, *others, is_leaf=is_words)
