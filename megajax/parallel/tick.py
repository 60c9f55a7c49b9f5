"""One tick of a pipeline on one device: land, forward, head, backward, weights, send.

The body of parallel/pipeline.py's loops, inside a shard_map over the whole mesh. A `Route` says
what this stage does in this tick; idle slots compute on zeros and add zeros. The predicates of the
`cond`s are equal on all devices, so the collectives inside meet.

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
from megajax.parallel.order import Order
from megajax.parallel.residuals import attach, detach
from megajax.schedule.route import Route

PIPE = "pipe"
# Named scopes of the branches that few ticks take; plans count them by these (`branches`).
ENTER, HEAD, LEAVE = "pipeline_enter", "pipeline_head", "pipeline_leave"
Objective = Callable[[LossSums], jax.Array]


class Carry(NamedTuple):
    """What goes from tick to tick.

    x, dy: what arrived from the previous and the next stage. inputs, kept, grads: buffers of chunk
    inputs, of residuals (if stashed) and of gradients of chunk outputs; the last place is for what
    nobody needs. blocks, rest: gradients so far. sums: of the loss. moe: of the routers, leaves
    (chunks, layers of one, ...), equal on all devices of the stage; None in a dense model.
    """

    x: jax.Array
    dy: jax.Array
    inputs: jax.Array
    kept: Tree
    grads: jax.Array
    blocks: Tree
    rest: Tree
    sums: LossSums
    moe: MoeSums | None


class Tick:
    """One tick of one device. Scan calls it with the kinds of the phase, the carry and a row."""

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
    ):
        """Args: whole: this stage's weights in use. batch: this device's rows, leaves (U, B, ...).

        objective: what is differentiated; None: sums only. copies: devices that compute one loss
        together, each of which counts for its share. remat: of the layers inside a chunk. stashes:
        what remat keeps lies in a buffer from F to B; else B makes it again.
        settle(words, gradient): done to a gradient before it is added to the total. order: of the
        work of a tick: head, send, B, send, W.
        """
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

    def rows(self) -> dict:
        """Returns the route as this stage reads it, leaves (T,)."""
        route = self.route
        arrays = {k: vars(lane) for k, lane in route.lanes.items()} | {
            "land_input": route.land_input, "land_grad": route.land_grad, "head": route.head,
            "head_place": route.head_place, "embed": route.embed, "unembed": route.unembed,
        }  # fmt: skip
        return jax.tree.map(
            lambda a: jnp.asarray(a)[:, self.stage] if a.ndim > 1 else jnp.asarray(a), arrays
        )

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
        lane = {k: jnp.zeros((), jnp.int32) for k in ("chunk", "microbatch")}
        _, kept, moe = jax.eval_shape(lambda x: self.run(lane, self.pick(lane), x), x)
        kept = kept if self.stashes else {}
        moe = jax.tree.map(lambda s: jnp.zeros((self.v, *s.shape), s.dtype), moe)
        empty = jnp.zeros(x.shape, x.dtype)

        def buffer(places: int, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((places + 1, *like.shape), like.dtype)

        inputs, grads = buffer(self.route.inputs, x), buffer(self.route.grads, x)
        kept = jax.tree.map(functools.partial(buffer, self.route.inputs), kept)
        sums = self.no_sums(empty)
        return Carry(empty, empty, inputs, kept, grads, blocks, rest, sums, moe)

    def __call__(self, kinds: frozenset[str], carry: Carry, row: Mapping) -> tuple[Carry, None]:
        """Lands what arrived, then F, head, B, W as far as the phase has them, then sends."""
        carry = carry._replace(
            inputs=_put(carry.inputs, row["land_input"], carry.x),
            grads=_put(carry.grads, row["land_grad"], carry.dy),
        )
        if "F" in kinds:
            carry, y = self.forward(carry, row, enters="E" in kinds)
            if "H" in kinds:
                carry = self.head(carry, row, y)
                y = self.order.after(y, carry.sums)
            carry = carry._replace(x=self.send(y, 1))
            row = self.order.after(row, carry.x)
        if "B" in kinds:
            carry = self.backward(carry, row, leaves="L" in kinds)
            row = self.order.after(row, carry.dy)
        if "W" in kinds:
            carry = self.weights(carry, row)
        return carry, None

    # ---- the kinds of work

    def forward(self, carry: Carry, row: Mapping, enters: bool) -> tuple[Carry, jax.Array]:
        """F: the chunk's output. On the first stage's first chunk the tokens enter."""
        lane = row["F"]
        x = _take(carry.inputs, lane["input"])

        def enter() -> jax.Array:
            entering = (self.stage == 0) & (lane["chunk"] == 0)
            return jnp.where(entering, self.embed(self.rest, row["embed"]), x)

        if enters:
            with jax.named_scope(ENTER):
                x = lax.cond(row["embed"] >= 0, enter, lambda: x)
            lane = self.order.after(lane, x)
        carry = carry._replace(inputs=_put(carry.inputs, lane["input"], x))
        y, kept, moe = self.run(lane, self.pick(lane), x)
        carry = carry._replace(moe=_add(carry.moe, lane, moe))
        if self.stashes:
            put = functools.partial(_put, place=lane["input"])
            carry = carry._replace(
                kept=jax.tree.map(lambda b, k: put(b, value=k), carry.kept, kept)
            )
        return carry, y

    def head(self, carry: Carry, row: Mapping, y: jax.Array) -> Carry:
        """H: the loss of the microbatch that leaves the last stage, by all stages together."""
        number = row["head"]
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
        place = jnp.where(is_last, row["head_place"], -1)
        return carry._replace(sums=sums, rest=rest, grads=_put(carry.grads, place, dy))

    def head_sums(self, rest: Tree, y: jax.Array, number: Any) -> LossSums:
        """Returns the loss sums of a microbatch whose last layer gave y."""
        params = rest | {self.parts.stack: self.blocks}
        return self.parts.head_loss(params, y, self.piece(number))

    def no_sums(self, y: jax.Array) -> LossSums:
        """Returns zeros in the place of the loss sums of a microbatch. y: of the last layer."""
        sums = jax.eval_shape(lambda: self.head_sums(self.rest, y, 0))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)

    def backward(self, carry: Carry, row: Mapping, leaves: bool) -> Carry:
        """B: the gradient of the chunk's input and, unless W does it, of its weights."""
        lane = row["B"]
        dx, blocks = self.pull(carry, lane)
        if "W" not in row:
            carry = carry._replace(blocks=blocks)

        def leave() -> Tree:
            vjp = jax.vjp(lambda rest: self.embed(rest, row["unembed"]), self.rest)[1]
            return self.add_rest(carry.rest, *vjp(jnp.where(self.stage == 0, dx, 0)))

        if leaves:
            with jax.named_scope(LEAVE):
                rest = lax.cond(row["unembed"] >= 0, leave, lambda: carry.rest)
            carry = carry._replace(rest=rest)
            dx = self.order.after(dx, rest)
        return carry._replace(dy=self.send(dx, -1))

    def weights(self, carry: Carry, row: Mapping) -> Carry:
        """W: the gradient of the chunk's weights, for which the backward chain runs again."""
        return carry._replace(blocks=self.pull(carry, row["W"])[1])

    def pull(self, carry: Carry, lane: Mapping) -> tuple[jax.Array, Tree]:
        """Returns (gradient of the chunk's input, block gradients with the chunk's added).

        Layer by layer, so that one layer's weight gradient exists at a time.
        """
        weights, context, layer = self.pick(lane), self.context(lane), self.layer()
        if self.stashes:
            kept = jax.tree.map(lambda buffer: _take(buffer, lane["input"]), carry.kept)
        else:
            kept = self.run(lane, weights, _take(carry.inputs, lane["input"]))[1]
        dy = _take(carry.grads, lane["grad"])
        one = jax.tree.map(lambda w: w[0], weights)
        (_, moe), template = jax.eval_shape(lambda: jax.vjp(layer, one, dy, context))
        share = self.share(moe, dy)

        def down(state: tuple, item: tuple) -> tuple[tuple, None]:
            dy, total = state
            index, w, kept = item
            dw, dx, _ = attach(template, kept, w, context)((dy, share))
            return (dx, self.add_layer(total, lane, index, floating(dw))), None

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

    def pick(self, lane: Mapping) -> Tree:
        """Returns the weights of the lane's chunk."""
        index = jnp.maximum(lane["chunk"], 0)
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.blocks
        )

    def context(self, lane: Mapping) -> Context:
        """Returns what the blocks need of the lane's microbatch."""
        return self.parts.context(self.piece(lane["microbatch"]), None)

    def layer(self) -> Callable[[Tree, jax.Array, Context], tuple[jax.Array, MoeSums | None]]:
        """Returns one layer as a function that jax.vjp may take apart."""

        def layer(w: Tree, x: jax.Array, context: Context) -> tuple[jax.Array, MoeSums | None]:
            y, _, moe = self.parts.block(w, x, context)
            return y, moe

        if self.remat == "none":
            return layer
        return jax.checkpoint(layer, policy=remat_policy(self.remat), prevent_cse=False)

    def run(
        self, lane: Mapping, weights: Tree, x: jax.Array
    ) -> tuple[jax.Array, Tree, MoeSums | None]:
        """Returns (a chunk's output, what its layers' backward passes need beside weights, the
        layers' own sums)."""
        layer, context = self.layer(), self.context(lane)

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

    def add_layer(self, total: Tree, lane: Mapping, index: jax.Array, grad: Tree) -> Tree:
        """Adds the gradient of one layer of the lane's chunk."""
        grad = self.graded(0, grad)
        grad = map_words(lambda words, g: self.settle(words[1:], g), self.axes[0], grad)
        return _add(total, lane, grad, index)

    def add_rest(self, total: Tree, grad: Tree) -> Tree:
        """Adds the gradient of embedding, last norm and head."""
        grad = map_words(self.settle, self.axes[1], self.graded(1, grad))
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grad)

    def send(self, x: jax.Array, way: int) -> jax.Array:
        """Gives x to the next (1) or previous (-1) stage; the ends are joined."""
        P = self.stages
        return lax.ppermute(x, PIPE, [(i, (i + way) % P) for i in range(P)])


def branches(route: Route) -> dict[tuple[str, int], float]:
    """Returns {(scope, ticks of a loop): how many of its ticks take the branch}.

    Loops of equal length that have the branch are told apart by nobody who reads a program: each
    counts for their mean, so that the sum is right.
    """
    taken: dict[tuple[str, int], list[int]] = {}
    numbers = {ENTER: ("E", route.embed), HEAD: ("H", route.head), LEAVE: ("L", route.unembed)}
    for loop in route.loops:
        for scope, (event, number) in numbers.items():
            if event in loop.kinds:
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


def _add(total: Tree, lane: Mapping, value: Tree, *index: jax.Array) -> Tree:
    """Adds what a slot made to the place of the lane's chunk; an idle slot's counts as zero."""
    chunk, works = jnp.maximum(lane["chunk"], 0), lane["chunk"] >= 0

    def add(t: jax.Array, v: jax.Array) -> jax.Array:
        return t.at[(chunk, *index)].add(jnp.where(works, v, 0).astype(t.dtype))

    return jax.tree.map(add, total, value)
