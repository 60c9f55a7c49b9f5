"""One tick of a pipeline on one device: land, forward, head, backward, weights, send.

The body of parallel/pipeline.py's loops, inside a shard_map over the whole mesh. A `Route` says
what this stage does in this tick, kind by kind, and a mapping has the function of each kind. Idle
slots compute on zeros and add zeros. The predicates of the `cond`s are equal on all devices, so the
collectives inside meet.

Legend: U microbatches, B rows of one, S positions, T ticks.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.axes import MESH_AXES
from megajax.core.layout import Words
from megajax.core.tree import Tree, floating
from megajax.layers.losses import LossSums, MoeSums
from megajax.layers.mask import Context
from megajax.models.parts import Batch, ModelParts, Remat, map_words, remat_policy, select
from megajax.parallel.exchange import attach, detach
from megajax.parallel.order import Order
from megajax.schedule.route import Cells, Route, Stretch

PIPE = "pipe"
# Named scopes of the branches that few ticks take; plans count them by these (`branches`).
ENTER, HEAD, LEAVE = "pipeline_enter", "pipeline_head", "pipeline_leave"
Objective = Callable[[LossSums], jax.Array]

# Its arrays are arguments of a program; tables that differ in nothing else share the program.
jax.tree_util.register_dataclass(
    Route,
    data_fields=["cells", "land", "head", "head_place", "embed", "unembed"],
    meta_fields=["sizes", "kinds", "loops"],
)


class Carry(NamedTuple):
    """What goes from tick to tick.

    arrived: {kind: what a neighbour sent}. values: {value of the Route: its buffer}, of chunk
    inputs and of gradients of chunk outputs. kept: buffers of residuals, if stashed. The last place
    of a buffer takes what nothing reads. blocks, rest: gradients so far. sums: of the loss. moe: of
    the routers, leaves (chunks, layers of one, ...), equal on all devices of the stage; None in a
    dense model.
    """

    arrived: dict[str, jax.Array]
    values: dict[str, jax.Array]
    kept: Tree
    blocks: Tree
    rest: Tree
    sums: LossSums
    moe: MoeSums | None


class Tick:
    """One tick of one device. Scan calls it with the loop, the carry and a tick of the route."""

    def __init__(
        self,
        parts: ModelParts,
        route: Route,
        whole: Tree,
        batch: Batch,
        objective: Objective | None,
        *,
        chunks: int,
        copies: int,
        remat: Remat,
        stashes: bool,
        settle: Callable[[Words, Any], Any],
        order: Order,
        functions: Mapping[str, "Function"],
    ):
        """Args: whole: this stage's weights in use. batch: this device's rows, leaves (U, B, ...).

        objective: what is differentiated; None: sums only. copies: devices that compute one loss
        together, each of which counts for its share. remat: of the layers inside a chunk. stashes:
        what remat keeps lies in a buffer from F to B; else B makes it again.
        settle(words, gradient): done to a gradient before it is added to the total. order: of the
        work of a tick: head, send, B, send, W. functions: of the kinds.
        """
        self.functions = functions
        self.parts, self.route, self.batch, self.objective = parts, route, batch, objective
        self.copies, self.settle, self.v, self.order = copies, settle, chunks, order
        self.remat, self.stashes = remat, stashes and objective is not None
        self.stage, self.stages = lax.axis_index(PIPE), lax.axis_size(PIPE)
        self.rest = {k: x for k, x in whole.items() if k != parts.stack}
        self.blocks = whole[parts.stack]
        self.axes = parts.axes[parts.stack], {k: parts.axes[k] for k in self.rest}
        self.trains = parts.trains and (
            parts.trains[parts.stack],
            {k: parts.trains[k] for k in self.rest},
        )

    def rows(self) -> Route:
        """Returns the route as this stage reads it, leaves (T,), from another lane (T, P)."""
        return jax.tree.map(lambda a: a[:, self.stage] if a.ndim > 1 else a, self.route)

    def start(self) -> Carry:
        """Returns the carry before the first tick: zeros."""
        x = jax.eval_shape(self.embed, self.rest, 0)
        blocks, rest = {}, {}
        if self.objective is not None:
            one = self.graded(0, floating(jax.tree.map(lambda w: w[0], self.blocks)))
            settled = functools.partial(map_words, self.settle)
            chunk = jax.eval_shape(lambda: settled(self.axes[0], one))
            blocks = jax.tree.map(lambda s: jnp.zeros((self.v, *s.shape), jnp.float32), chunk)
            outer = jax.eval_shape(lambda: settled(self.axes[1], self.graded(1, self.rest)))
            rest = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), outer)
        cell = Cells(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), {})
        _, kept, moe = jax.eval_shape(lambda x: self.run(cell, self.pick(cell), x), x)
        kept = kept if self.stashes else {}
        moe = jax.tree.map(lambda s: jnp.zeros((self.v, *s.shape), s.dtype), moe)
        empty = jnp.zeros(x.shape, x.dtype)

        def buffer(places: int, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((places + 1, *like.shape), like.dtype)

        values = {value: buffer(places, x) for value, places in self.route.sizes}
        kept = jax.tree.map(functools.partial(buffer, dict(self.route.sizes)["F"]), kept)
        arrived = {kind.name: empty for kind in self.route.kinds if kind.sends}
        return Carry(arrived, values, kept, blocks, rest, self.no_sums(empty), moe)

    def __call__(self, loop: Stretch, carry: Carry, row: Route) -> tuple[Carry, None]:
        """Lands what arrived, then runs each of the loop's kinds and sends its result."""
        landed = {k: _put(carry.values[k], row.land[k], x) for k, x in carry.arrived.items()}
        carry = carry._replace(values=carry.values | landed)
        for kind in self.route.kinds:
            if kind.name not in loop.kinds:
                continue
            carry, result = self.functions[kind.name](self, carry, row, loop.events)
            if result is not None:
                sent = self.send(result, kind.sends)
                carry = carry._replace(arrived=carry.arrived | {kind.name: sent})
                row = self.order.after(row, sent)
        return carry, None

    # ---- the kinds of work: each returns the carry and what it sends

    def forward(self, carry: Carry, row: Route, events: frozenset[str]) -> tuple[Carry, jax.Array]:
        """F: the chunk's output. On the first stage's first chunk the tokens enter."""
        cell = row.cells["F"]
        x = _take(carry.values["F"], cell.places["F"])

        def enter() -> jax.Array:
            entering = (self.stage == 0) & (cell.chunk == 0)
            return jnp.where(entering, self.embed(self.rest, row.embed), x)

        if "E" in events:
            with jax.named_scope(ENTER):
                x = lax.cond(row.embed >= 0, enter, lambda: x)
            cell = self.order.after(cell, x)
        inputs = _put(carry.values["F"], cell.places["F"], x)
        carry = carry._replace(values=carry.values | {"F": inputs})
        y, kept, moe = self.run(cell, self.pick(cell), x)
        carry = carry._replace(moe=_add(carry.moe, cell, moe))
        if self.stashes:
            put = functools.partial(_put, place=cell.places["F"])
            carry = carry._replace(
                kept=jax.tree.map(lambda b, k: put(b, value=k), carry.kept, kept)
            )
        if "H" in events:
            carry = self.head(carry, row, y)
            y = self.order.after(y, carry.sums)
        return carry, y

    def head(self, carry: Carry, row: Route, y: jax.Array) -> Carry:
        """H: the loss of the microbatch that leaves the last stage, by all stages together."""
        number = row.head
        is_last = self.stage == self.stages - 1

        def loss(rest: Tree, y: jax.Array) -> tuple[jax.Array, LossSums]:
            y = lax.psum(jnp.where(is_last, y, 0), PIPE)
            sums = self.head_sums(rest, y, number)
            return self.value(sums) / self.copies, sums

        def value() -> LossSums:
            return carry.sums + loss(self.rest, y)[1]

        def gradient() -> tuple[LossSums, Tree, jax.Array]:
            one, vjp, sums = jax.vjp(loss, self.rest, y, has_aux=True)
            rest, dy = vjp(jnp.ones_like(one))
            return carry.sums + sums, self.add_rest(carry.rest, rest), dy

        if self.objective is None:
            return carry._replace(sums=lax.cond(number >= 0, value, lambda: carry.sums))
        skip = (carry.sums, carry.rest, jnp.zeros_like(y))
        with jax.named_scope(HEAD):
            sums, rest, dy = lax.cond(number >= 0, gradient, lambda: skip)
        grads = _put(carry.values["B"], jnp.where(is_last, row.head_place, -1), dy)
        return carry._replace(sums=sums, rest=rest, values=carry.values | {"B": grads})

    def head_sums(self, rest: Tree, y: jax.Array, number: Any) -> LossSums:
        """Returns the loss sums of a microbatch whose last layer gave y."""
        params = rest | {self.parts.stack: self.blocks}
        return self.parts.head_loss(params, y, self.piece(number))

    def no_sums(self, y: jax.Array) -> LossSums:
        """Returns zeros in the place of the loss sums of a microbatch. y: of the last layer."""
        sums = jax.eval_shape(lambda: self.head_sums(self.rest, y, 0))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)

    def backward(self, carry: Carry, row: Route, events: frozenset[str]) -> tuple[Carry, jax.Array]:
        """B: the gradient of the chunk's input and, unless W does it, of its weights."""
        dx, blocks = self.pull(carry, row.cells["B"])
        if "W" not in row.cells:
            carry = carry._replace(blocks=blocks)

        def leave() -> Tree:
            vjp = jax.vjp(lambda rest: self.embed(rest, row.unembed), self.rest)[1]
            return self.add_rest(carry.rest, *vjp(jnp.where(self.stage == 0, dx, 0)))

        if "L" in events:
            with jax.named_scope(LEAVE):
                rest = lax.cond(row.unembed >= 0, leave, lambda: carry.rest)
            carry = carry._replace(rest=rest)
            dx = self.order.after(dx, rest)
        return carry, dx

    def weights(self, carry: Carry, row: Route, events: frozenset[str]) -> tuple[Carry, None]:
        """W: the gradient of the chunk's weights, for which the backward chain runs again."""
        return carry._replace(blocks=self.pull(carry, row.cells["W"])[1]), None

    def pull(self, carry: Carry, cell: Cells) -> tuple[jax.Array, Tree]:
        """Returns (gradient of the chunk's input, block gradients with the chunk's added).

        Layer by layer, so that one layer's weight gradient exists at a time.
        """
        weights, context, layer = self.pick(cell), self.context(cell), self.layer()
        if self.stashes:
            kept = jax.tree.map(lambda buffer: _take(buffer, cell.places["F"]), carry.kept)
        else:
            kept = self.run(cell, weights, _take(carry.values["F"], cell.places["F"]))[1]
        dy = _take(carry.values["B"], cell.places["B"])
        one = jax.tree.map(lambda w: w[0], weights)
        (_, moe), template = jax.eval_shape(lambda: jax.vjp(layer, one, dy, context))
        share = self.share(moe, dy)

        def down(state: tuple, item: tuple) -> tuple[tuple, None]:
            dy, total = state
            index, w, kept = item
            dw, dx, _ = attach(template, kept, w, context)((dy, share))
            return (dx, self.add_layer(total, cell, index, floating(dw))), None

        items = (jnp.arange(len(jax.tree.leaves(weights)[0])), weights, kept)
        (dx, total), _ = lax.scan(down, (dy, carry.blocks), items, reverse=True)
        return dx, total

    # ---- pieces

    def piece(self, number: Any) -> dict:
        """Returns one microbatch."""
        number = jnp.maximum(number, 0)
        pick = functools.partial(lax.dynamic_index_in_dim, index=number, keepdims=False)
        return {k: pick(x) for k, x in self.batch.items()}

    def embed(self, rest: Tree, number: Any) -> jax.Array:
        """Returns the start of a microbatch's residual stream; every stage adds its rows."""
        batch = self.piece(number)
        context = self.parts.context(batch, None)
        return self.parts.embed(rest | {self.parts.stack: self.blocks}, batch, context)

    def pick(self, cell: Cells) -> Tree:
        """Returns the weights of the cell's chunk."""
        index = jnp.maximum(cell.chunk, 0)
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.blocks
        )

    def context(self, cell: Cells) -> Context:
        """Returns what the blocks need of the cell's microbatch."""
        return self.parts.context(self.piece(cell.microbatch), None)

    def layer(self) -> Callable[[Tree, jax.Array, Context], tuple[jax.Array, MoeSums | None]]:
        """Returns one layer as a function that jax.vjp may take apart."""

        def layer(w: Tree, x: jax.Array, context: Context) -> tuple[jax.Array, MoeSums | None]:
            y, _, moe = self.parts.block(w, x, context)
            return y, moe

        if self.remat == "none":
            return layer
        return jax.checkpoint(layer, policy=remat_policy(self.remat), prevent_cse=False)

    def run(
        self, cell: Cells, weights: Tree, x: jax.Array
    ) -> tuple[jax.Array, Tree, MoeSums | None]:
        """Returns (a chunk's output, what its layers' backward passes need beside weights, the
        layers' own sums)."""
        layer, context = self.layer(), self.context(cell)

        def up(x: jax.Array, w: Tree) -> tuple[jax.Array, tuple]:
            (y, moe), vjp = jax.vjp(layer, w, x, context)
            return y, (detach(vjp), moe)

        y, (kept, moe) = lax.scan(up, x, weights)
        return y, kept, moe

    def value(self, sums: LossSums) -> jax.Array:
        """Returns the objective, 0 where nothing is differentiated."""
        return jnp.zeros(()) if self.objective is None else self.objective(sums)

    def share(self, moe: MoeSums | None, x: jax.Array) -> MoeSums | None:
        """Returns the objective's gradient by a layer's sums, this device's share of it.

        moe: what they look like. x: an output of the last layer, for its shape. The sums are equal
        on all devices of the stage, each of which gives its share, because the gradient here is
        that of the sum over all devices (local.py).
        """
        none = self.no_sums(x)

        def part(moe: MoeSums | None) -> jax.Array:
            return self.value(dataclasses.replace(none, moe=moe)) / (
                lax.axis_size(MESH_AXES) // self.stages
            )

        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), moe)
        return jax.grad(part, allow_int=True)(zeros)

    def graded(self, which: int, tree: Tree) -> Tree:
        """Returns a tree with None in the place of the leaves that have no gradient. which: 0 for
        the leaves of a layer, 1 for those in no layer."""
        return select(self.trains[which], tree) if self.trains else tree

    def add_layer(self, total: Tree, cell: Cells, index: jax.Array, grad: Tree) -> Tree:
        """Adds the gradient of one layer of the cell's chunk."""
        grad = self.graded(0, grad)
        grad = map_words(lambda words, g: self.settle(words[1:], g), self.axes[0], grad)
        return _add(total, cell, grad, index)

    def add_rest(self, total: Tree, grad: Tree) -> Tree:
        """Adds the gradient of embedding, last norm and head."""
        grad = map_words(self.settle, self.axes[1], self.graded(1, grad))
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grad)

    def send(self, x: jax.Array, way: int) -> jax.Array:
        """Gives x to the next (1) or previous (-1) stage; the ends are joined."""
        P = self.stages
        return lax.ppermute(x, PIPE, [(i, (i + way) % P) for i in range(P)])


# (tick, carry, a tick of the route, events of the loop) -> (carry, what the kind sends)
Function = Callable[[Tick, Carry, Route, frozenset[str]], tuple[Carry, jax.Array | None]]
FUNCTIONS: Mapping[str, Function] = {"F": Tick.forward, "B": Tick.backward, "W": Tick.weights}


def branches(route: Route) -> dict[tuple[str, int], float]:
    """Returns {(scope, ticks of a loop): how many of its ticks take the branch}.

    Loops of equal length that have the branch are told apart by nobody who reads a program: each
    counts for their mean, so that the sum is right.
    """
    taken: dict[tuple[str, int], list[int]] = {}
    numbers = {ENTER: ("E", route.embed), HEAD: ("H", route.head), LEAVE: ("L", route.unembed)}
    for loop in route.loops:
        for scope, (event, number) in numbers.items():
            if event in loop.events:
                here = number[loop.first : loop.first + loop.ticks]
                taken.setdefault((scope, loop.ticks), []).append(int((here >= 0).sum()))
    return {key: sum(times) / len(times) for key, times in taken.items()}


def _put(buffer: jax.Array, place: jax.Array, value: jax.Array) -> jax.Array:
    """Writes at a place; -1 goes to the last one, which nobody reads."""
    place = jnp.where(place < 0, buffer.shape[0] - 1, place)
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), place, 0)


def _take(buffer: jax.Array, place: jax.Array) -> jax.Array:
    """Reads a place; -1 gives zeros, whatever lies there (a NaN must not spread)."""
    value = lax.dynamic_index_in_dim(buffer, jnp.maximum(place, 0), keepdims=False)
    return jnp.where(place < 0, jnp.zeros_like(value), value)


def _add(total: Tree, cell: Cells, value: Tree, *index: jax.Array) -> Tree:
    """Adds what a slot made to the place of the cell's chunk; an idle slot's counts as zero."""
    chunk, works = jnp.maximum(cell.chunk, 0), cell.chunk >= 0

    def add(t: jax.Array, v: jax.Array) -> jax.Array:
        return t.at[(chunk, *index)].add(jnp.where(works, v, 0).astype(t.dtype))

    return jax.tree.map(add, total, value)
