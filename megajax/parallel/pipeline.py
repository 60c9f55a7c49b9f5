"""Pipeline parallelism: one jitted program that executes a schedule's tick table.

A shard_map over the whole mesh. It goes through the table's phases, each one loop: in a tick every
stage takes what its neighbours sent, runs at most one slot of each kind (F, B, W) on the chunk and
microbatch that the table names, and sends. The table enters as the arrays of a `Route`, which are
arguments of the program, so tables with equal loops share one program. A chunk's weights are
gathered over the ZeRO axes once a step (compute dtype), beside the ticks before its first use; its
gradients add up in float32 where they are made and are reduce-scattered once, beside the ticks
after its last, or in every tick if asked. The backward pass is called by the table, not by
differentiating the loop: so 1F1B's memory does not grow with the microbatches.

The vocabulary is cut over pipe as well as tensor: all stages share the work of embedding and head.
Sources: 1F1B and interleaving (Megatron-LM, arXiv 2104.04473 section 2.2), decoupled sends and
receives, gathers and scatters by chunk (MegaScale section 3.2), zero-bubble (arXiv 2401.10241).

Legend: U microbatches, B rows of one, S positions, D model width, P stages, T ticks, v chunks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import layout
from jax.sharding import PartitionSpec as P

from megajax.core.axes import BATCH_AXES, MESH_AXES
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, nearest_multiples
from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree, floating
from megajax.layers.attention import Context
from megajax.layers.losses import LossSums, MoeSums
from megajax.layers.param import packed_axes
from megajax.models.parts import (
    Batch,
    ModelParts,
    Remat,
    map_words,
    remat_policy,
    select,
)
from megajax.parallel.exchange import (
    PLAIN,
    Exchange,
    Order,
    add_device_dim,
    attach,
    detach,
    drop_device_dim,
    order_of,
    scatter_matrix,
)
from megajax.parallel.slots import Job, Scan, Segment, Work, drive, skipped, take, zeros
from megajax.schedule import build
from megajax.schedule.build import Schedule
from megajax.schedule.ir import DECODER, Table
from megajax.schedule.route import Cells, Route, Stretch, route

# ---- tick
#
# One tick of a pipeline on one device: land, forward, head, backward, weights, send.
#
# The body of parallel/pipeline.py's loops, inside a shard_map over the whole mesh. A `Route` says
# what this stage does in this tick, kind by kind. A stage without a slot of a kind computes on
# zeros and adds zeros (--pipeline.idle=mask), or takes a branch that does nothing (skip); an
# encoder's work is always under such a branch. In it are only collectives among ranks of one stage,
# which all take it. The predicates of the other `cond`s are equal on all devices.
#
# An encoder's slots run beside the decoder's, EF in one branch with F and EB in one with B
# (parallel/slots.py). Its features stay on the stage that made them, which adds them to its part of
# the embedding: the sum over stages brings them to the first one, and the transposed sum brings
# their gradient back.
#
# Legend: U microbatches, B rows of one, S positions, T ticks.


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

    arrived: {kind: the array that a neighbour sent}. values: {value of the Route: its buffer}, of
    chunk inputs, of gradients of chunk outputs and of what an encoder makes. residuals: buffers of
    residuals, if they are stashed. A buffer has one place more than the Route counts, the last one:
    arrays that no later tick reads are written there. blocks, outer: the gradients so far, of the
    layers and of the other parameters. sums: of the loss. moe: of the routers, leaves (chunks,
    layers of one, ...), equal on all devices of the stage; None in a dense model.
    """

    arrived: dict[str, jax.Array]
    values: dict[str, jax.Array]
    residuals: Tree
    blocks: Tree
    outer: Tree
    sums: LossSums
    moe: MoeSums | None


class Tick:
    """One tick of one device. Scan calls it with the loop, the carry and a tick of the route."""

    def __init__(
        self,
        parts: ModelParts,
        route: Route,
        weights: Tree,
        batch: Batch,
        objective: Objective | None,
        *,
        chunks: int,
        copies: int,
        remat: Remat,
        stashes: bool,
        settle: Callable[[Words, Any], Any],
        order: Order,
        skips: bool,
    ):
        """Makes the tick of a stage.

        weights: this stage's weights in use. batch: this device's rows, leaves (U, B, ...).
        objective: what is differentiated; None: sums only. copies: devices that compute one loss
        together, each of which counts for its share. remat: of the layers inside a chunk. stashes:
        residuals lie in a buffer from F to B; otherwise B computes them again. settle(words,
        gradient): applied to a gradient before it is added to the total. order: of the work of a
        tick: head, send, B, send, W. skips: whether a stage without work of a kind computes
        nothing.
        """
        self.skips = skips
        self.parts, self.route, self.batch, self.objective = parts, route, batch, objective
        self.copies, self.settle, self.v, self.order = copies, settle, chunks, order
        self.remat, self.stashes = remat, stashes and objective is not None
        self.stage, self.stages = lax.axis_index(PIPE), lax.axis_size(PIPE)
        self.outer = parts.outer(weights)
        self.blocks = weights[parts.stack]
        self.axes = parts.axes[parts.stack], {k: parts.axes[k] for k in self.outer}
        self.trains = parts.trains and (
            parts.trains[parts.stack],
            {k: parts.trains[k] for k in self.outer},
        )
        # Where the projector alone is trained, the embedding runs it, so that no EB is needed.
        self.late = False
        if "EF" in route.cells and self.trains and parts.tower is not None:
            stack, projector = (jax.tree.leaves(parts.trains[m]) for m in parts.tower.members)
            self.late = any(projector) and not any(stack)

    def rows(self) -> Route:
        """Returns the route as this stage reads it, leaves (T,), from another lane (T, P)."""
        return jax.tree.map(lambda a: a[:, self.stage] if a.ndim > 1 else a, self.route)

    def start(self) -> Carry:
        """Returns the carry before the first tick: zeros."""
        x = jax.eval_shape(self.embed, self.outer, 0)
        blocks, outer = {}, {}
        if self.objective is not None:
            one = self.graded(0, floating(jax.tree.map(lambda w: w[0], self.blocks)))
            settled = functools.partial(map_words, self.settle)
            chunk = jax.eval_shape(lambda: settled(self.axes[0], one))
            blocks = jax.tree.map(lambda s: jnp.zeros((self.v, *s.shape), jnp.float32), chunk)
            shapes = jax.eval_shape(lambda: settled(self.axes[1], self.graded(1, self.outer)))
            outer = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
        cell = Cells(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), {})
        _, residuals, moe = jax.eval_shape(
            lambda x: drive([lambda: self.run(cell, self.pick(cell), x)])[0], x
        )
        residuals = residuals if self.stashes else {}
        moe = jax.tree.map(lambda s: jnp.zeros((self.v, *s.shape), s.dtype), moe)
        empty = jnp.zeros(x.shape, x.dtype)

        def buffer(places: int, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((places + 1, *like.shape), like.dtype)

        like = dict.fromkeys(("F", "B"), x)
        if "EF" in self.route.cells:
            inner, features = self.seen_shapes()
            like |= {"EF": inner, "EB": inner, "EF>F": features, "B>EB": features}
        values = {value: buffer(places, like[value]) for value, places in self.route.sizes}
        residuals = jax.tree.map(functools.partial(buffer, dict(self.route.sizes)["F"]), residuals)
        arrived = {k.name: empty for k in self.route.kinds if k.sends and k.lane == DECODER}
        return Carry(arrived, values, residuals, blocks, outer, self.no_sums(empty), moe)

    def __call__(self, loop: Stretch, carry: Carry, row: Route) -> tuple[Carry, None]:
        """Lands what arrived, then runs each of the loop's kinds and sends its result."""
        landed = {k: _put(carry.values[k], row.land[k], x) for k, x in carry.arrived.items()}
        carry = carry._replace(values=carry.values | landed)
        for kind in self.route.kinds:
            if kind.name not in loop.kinds or kind.lane != DECODER:
                continue
            work = {"F": self.forward, "B": self.backward, "W": self.weights}[kind.name]
            carry, result = work(carry, row, loop.events)
            if result is not None:
                sent = self.send(result, kind.sends)
                carry = carry._replace(arrived=carry.arrived | {kind.name: sent})
                row = self.order.after(row, sent)
        return carry, None

    # ---- the kinds of work: each returns the carry and what it sends

    def forward(self, carry: Carry, row: Route, events: frozenset[str]) -> tuple[Carry, jax.Array]:
        """F: the chunk's output, beside EF. On the first stage's first chunk the tokens enter."""
        cell = row.cells["F"]
        x = take(carry.values["F"], cell.places["F"])

        def enter() -> jax.Array:
            entering = (self.stage == 0) & (cell.chunk == 0)
            embedded = self.embed(self.outer, row.embed, *self.held(carry, cell))
            return jnp.where(entering, embedded, x)

        if "E" in events:
            with jax.named_scope(ENTER):
                x = lax.cond(row.embed >= 0, enter, lambda: x)
            cell = self.order.after(cell, x)
        inputs = _put(carry.values["F"], cell.places["F"], x)
        carry = carry._replace(values=carry.values | {"F": inputs})
        jobs: list[Job] = [(self.works(cell), lambda: self.run(cell, self.pick(cell), x), None)]
        if "EF" in row.cells:
            seen = row.cells["EF"]
            jobs.append((seen.chunk >= 0, lambda: self.see(carry, seen), None))
        (y, residuals, moe), *made = self.together(jobs)
        for inner, features in made:
            new = {"EF": inner, "EF>F": features}
            put = {k: _put(carry.values[k], row.land[k], z) for k, z in new.items()}
            carry = carry._replace(values=carry.values | put)
        carry = carry._replace(moe=_add(carry.moe, cell, moe))
        if self.stashes:
            put = functools.partial(_put, place=cell.places["F"])
            carry = carry._replace(
                residuals=jax.tree.map(lambda b, k: put(b, value=k), carry.residuals, residuals)
            )
        if "H" in events:
            carry = self.head(carry, row, y)
            y = self.order.after(y, carry.sums)
        return carry, y

    def head(self, carry: Carry, row: Route, y: jax.Array) -> Carry:
        """H: the loss of the microbatch that leaves the last stage, by all stages together."""
        number = row.head
        is_last = self.stage == self.stages - 1

        def loss(outer: Tree, y: jax.Array) -> tuple[jax.Array, LossSums]:
            y = lax.psum(jnp.where(is_last, y, 0), PIPE)
            sums = self.head_sums(outer, y, number)
            return self.value(sums) / self.copies, sums

        def value() -> LossSums:
            return carry.sums + loss(self.outer, y)[1]

        def gradient() -> tuple[LossSums, Tree, jax.Array]:
            one, vjp, sums = jax.vjp(loss, self.outer, y, has_aux=True)
            outer, dy = vjp(jnp.ones_like(one))
            return carry.sums + sums, self.add_outer(carry.outer, outer), dy

        if self.objective is None:
            return carry._replace(sums=lax.cond(number >= 0, value, lambda: carry.sums))
        skip = (carry.sums, carry.outer, jnp.zeros_like(y))
        with jax.named_scope(HEAD):
            sums, outer, dy = lax.cond(number >= 0, gradient, lambda: skip)
        grads = _put(carry.values["B"], jnp.where(is_last, row.head_place, -1), dy)
        return carry._replace(sums=sums, outer=outer, values=carry.values | {"B": grads})

    def head_sums(self, outer: Tree, y: jax.Array, number: Any) -> LossSums:
        """Returns the loss sums of a microbatch whose last layer gave y."""
        params = outer | {self.parts.stack: self.blocks}
        return self.parts.head_loss(params, y, self.piece(number))

    def no_sums(self, y: jax.Array) -> LossSums:
        """Returns zeros like the loss sums of a microbatch. y: an output of the last layer."""
        sums = jax.eval_shape(lambda: self.head_sums(self.outer, y, 0))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)

    def backward(self, carry: Carry, row: Route, events: frozenset[str]) -> tuple[Carry, jax.Array]:
        """B: the gradient of the chunk's input and, unless W does it, of its weights; beside EB."""
        cell, seen = row.cells["B"], row.cells.get("EB")
        if "W" in row.cells:
            jobs: list[Job] = [(self.works(cell), lambda: self.pull(carry, cell, 0), None)]
        else:
            no_x = jnp.zeros_like(carry.arrived["B"])
            jobs = [
                (self.works(cell), lambda: self.pull(carry, cell), lambda: (no_x, carry.blocks))
            ]
        if seen is not None:
            none = jnp.zeros_like(carry.values["EB"][0])
            jobs.append(
                (seen.chunk >= 0, lambda: self.unsee(carry, seen), lambda: (carry.outer, none))
            )
        pulled, *made = self.together(jobs)
        dx, blocks = (pulled, carry.blocks) if "W" in row.cells else pulled
        carry = carry._replace(blocks=blocks)
        for outer, inner in made:
            values = carry.values | {"EB": _put(carry.values["EB"], row.land["EB"], inner)}
            carry = carry._replace(outer=outer, values=values)
        features, present = self.held(carry, cell)

        def leave() -> tuple[Tree, jax.Array | None]:
            def embed(outer: Tree, features: jax.Array | None) -> jax.Array:
                return self.embed(outer, row.unembed, features, present)

            outer, seen = jax.vjp(embed, self.outer, features)[1](jnp.where(self.stage == 0, dx, 0))
            return self.add_outer(carry.outer, outer), seen

        def stay() -> tuple[Tree, jax.Array | None]:
            return carry.outer, jax.tree.map(jnp.zeros_like, features)

        if "L" in events:
            with jax.named_scope(LEAVE):
                outer, gradient = lax.cond(row.unembed >= 0, leave, stay)
            carry = carry._replace(outer=outer)
            if seen is not None:
                values = _put(carry.values["B>EB"], row.land["B>EB"], gradient)
                carry = carry._replace(values=carry.values | {"B>EB": values})
            dx = self.order.after(dx, outer)
        return carry, dx

    def weights(self, carry: Carry, row: Route, events: frozenset[str]) -> tuple[Carry, None]:
        """W: the gradient of the chunk's weights, for which the backward chain runs again."""
        cell = row.cells["W"]
        job = self.works(cell), lambda: self.pull(carry, cell, 1), lambda: carry.blocks
        return carry._replace(blocks=self.together([job])[0]), None

    def works(self, cell: Cells) -> jax.Array | None:
        """Returns whether this stage has a slot; None: it computes in any case."""
        return cell.chunk >= 0 if self.skips else None

    def together(self, jobs: Sequence[Job]) -> list[Any]:
        """Returns the result of each job: of those that have work, or always do, in one branch."""
        asked = [i for i, (works, _, _) in enumerate(jobs) if works is not None]
        if not asked:
            return drive([run for _, run, _ in jobs])

        def branch(number: int) -> Callable[[], list[Any]]:
            idle = {i for bit, i in enumerate(asked) if not number >> bit & 1}

            def run_all() -> list[Any]:
                done = iter(drive([run for i, (_, run, _) in enumerate(jobs) if i not in idle]))
                return [
                    skipped(*job[1:]) if i in idle else next(done) for i, job in enumerate(jobs)
                ]

            return run_all

        bits = [jobs[i][0].astype(jnp.int32) << bit for bit, i in enumerate(asked)]  # type: ignore
        return lax.switch(sum(bits[1:], bits[0]), [branch(n) for n in range(1 << len(asked))])

    # ---- an encoder's work

    def see(self, carry: Carry, cell: Cells) -> Work:
        """EF: (what the next segment reads, the features of the last one); both of any segment,
        and what a segment has not got is written where no tick reads."""
        segment = self.segment(cell)
        x, _ = yield Scan(
            lambda x, w: (segment.layer(w, x), None), segment.first(carry), segment.stack
        )
        features = self.seen_shapes()[1]
        return x, self.where(segment.is_last, lambda: segment.finish(x), lambda: zeros(features))

    def unsee(self, carry: Carry, cell: Cells) -> Work:
        """EB: (the gradients with the segment's added, that of what the segment read)."""
        segment = self.segment(cell)

        def up(x: jax.Array, w: list) -> tuple[jax.Array, tuple]:
            y, vjp = jax.vjp(segment.layer, w, x)
            return y, detach(vjp)

        x = segment.first(carry)
        y, residuals = yield Scan(up, x, segment.stack)
        one = [w[0] for w in segment.stack]
        template = jax.eval_shape(lambda: jax.vjp(segment.layer, one, x)[1])

        def down(state: tuple, item: tuple) -> tuple[tuple, None]:
            (dx, total), (index, w, residuals) = state, item
            dw, dx = attach(template, residuals, w)(dx)
            return (dx, segment.add_layer(total, index, dw)), None

        def finished() -> tuple[Tree, jax.Array]:
            dy = take(carry.values["B>EB"], cell.places["B>EB"])
            return segment.finish_back(carry.outer, y, dy)

        def between() -> tuple[Tree, jax.Array]:
            return carry.outer, take(carry.values["EB"], cell.places["EB"])

        outer, dy = self.where(segment.is_last, finished, between)
        total, ends = segment.split(outer)
        items = jnp.arange(segment.size), segment.stack, residuals
        (dx, total), _ = yield Scan(down, (dy, total), items, reverse=True)
        outer = segment.joined(outer, total, ends)
        return self.where(
            segment.is_first, lambda: segment.start_back(outer, dx), lambda: outer
        ), dx

    def where(self, is_so: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Returns then() of the segments of which something is so: of a single one in any case."""
        single = self.parts.tower.segments == 1  # type: ignore[missing-attribute]
        return then() if single else lax.cond(is_so, then, otherwise)

    def segment(self, cell: Cells) -> Segment:
        """Returns the cell's segment of the encoder."""
        return Segment(self, cell)

    def rows_seen(self, batch: dict) -> dict:
        """Returns the rows of a microbatch whose images this rank sees."""
        if not self.parts.tower.shares:  # type: ignore[missing-attribute]
            return batch
        rows = {len(x) // lax.axis_size("tensor") for x in batch.values()}.pop()
        first = lax.axis_index("tensor") * rows
        return {k: lax.dynamic_slice_in_dim(x, first, rows) for k, x in batch.items()}

    def seen_shapes(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns the shapes (of what a segment reads, of the features that are held)."""
        segment = Segment(self, Cells(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), {}))
        x = jax.eval_shape(segment.start)
        return x, jax.eval_shape(segment.finish, x)

    def held(self, carry: Carry, cell: Cells) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns (the features that this stage holds of the microbatch that enters or leaves the
        decoder, zeros where it has none; whether it has some); None without an encoder."""
        place = cell.places.get("EF>F")
        return (None, None) if place is None else (take(carry.values["EF>F"], place), place >= 0)

    def pull(self, carry: Carry, cell: Cells, which: int | None = None) -> Work:
        """Returns (gradient of the chunk's input, block gradients with the chunk's added), or one.

        Layer by layer, so that one layer's weight gradient exists at a time.
        """
        weights, context, layer = self.pick(cell), self.context(cell), self.layer()
        if self.stashes:
            residuals = jax.tree.map(lambda buffer: take(buffer, cell.places["F"]), carry.residuals)
            yield None  # the round in which an encoder beside it runs forward
        else:
            x = take(carry.values["F"], cell.places["F"])
            residuals = (yield from self.run(cell, weights, x))[1]
        dy = take(carry.values["B"], cell.places["B"])
        one, kind = jax.tree.map(lambda w: w[0], (weights, self.kinds(cell)))
        like = dataclasses.replace(context, kind=kind)
        (_, moe), template = jax.eval_shape(lambda: jax.vjp(layer, one, dy, like))
        share = self.share(moe, dy)

        def down(state: tuple, item: tuple) -> tuple[tuple, None]:
            dy, total = state
            index, w, kind, residuals = item
            of_layer = dataclasses.replace(context, kind=kind)
            dw, dx, _ = attach(template, residuals, w, of_layer)((dy, share))
            return (dx, self.add_layer(total, cell, index, floating(dw))), None

        kinds = self.kinds(cell)
        items = (jnp.arange(len(jax.tree.leaves(weights)[0])), weights, kinds, residuals)
        pulled, _ = yield Scan(down, (dy, carry.blocks), items, reverse=True)
        return pulled if which is None else pulled[which]

    # ---- pieces

    def piece(self, number: Any) -> dict:
        """Returns one microbatch."""
        number = jnp.maximum(number, 0)
        pick = functools.partial(lax.dynamic_index_in_dim, index=number, keepdims=False)
        return {k: pick(x) for k, x in self.batch.items()}

    def embed(
        self,
        outer: Tree,
        number: Any,
        features: jax.Array | None = None,
        present: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the start of a microbatch's residual stream; every stage adds its rows, and what
        it holds of the features. features, present: of `held`."""
        batch = self.piece(number)
        context = self.parts.context(batch, None)
        params = outer | {self.parts.stack: self.blocks}
        if features is None:
            return self.parts.embed(params, batch, context)
        if self.late and present is not None:
            finished = self.parts.tower.finish(params, features, self.rows_seen(batch))  # type: ignore
            features = jnp.where(present, finished, 0)
        return self.parts.embed(params, batch, context, features)

    def pick(self, cell: Cells) -> Tree:
        """Returns the weights of the cell's chunk."""
        index = jnp.maximum(cell.chunk, 0)
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.blocks
        )

    def kinds(self, cell: Cells) -> jax.Array | None:
        """Returns the kind of each layer of the cell's chunk; None where layers are alike."""
        if not self.parts.kinds:
            return None
        chunk = jnp.maximum(cell.chunk, 0)
        return jnp.reshape(jnp.array(self.parts.kinds), (self.v, self.stages, -1))[
            chunk, self.stage
        ]

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

    def run(self, cell: Cells, weights: Tree, x: jax.Array) -> Work:
        """Returns (a chunk's output, what its layers' backward passes need beside weights, the
        layers' own sums)."""
        layer, context = self.layer(), self.context(cell)

        def up(x: jax.Array, item: tuple) -> tuple[jax.Array, tuple]:
            w, kind = item
            (y, moe), vjp = jax.vjp(layer, w, x, dataclasses.replace(context, kind=kind))
            return y, (detach(vjp), moe)

        y, (residuals, moe) = yield Scan(up, x, (weights, self.kinds(cell)))
        return y, residuals, moe

    def value(self, sums: LossSums) -> jax.Array:
        """Returns the objective, 0 where nothing is differentiated."""
        return jnp.zeros(()) if self.objective is None else self.objective(sums)

    def share(self, moe: MoeSums | None, x: jax.Array) -> MoeSums | None:
        """Returns the objective's gradient by a layer's sums, this device's share of it.

        moe: what they look like. x: an output of the last layer, for its shape. The sums are equal
        on all devices of the stage, each of which gives its share, because the gradient here is
        that of the sum over all devices (tensor.local_ops).
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

    def add_outer(self, total: Tree, grad: Tree) -> Tree:
        """Adds the gradient of embedding, last norm and head."""
        grad = map_words(self.settle, self.axes[1], self.graded(1, grad))
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grad)

    def send(self, x: jax.Array, direction: int) -> jax.Array:
        """Gives x to the next (1) or previous (-1) stage; the ends are joined."""
        P = self.stages
        return lax.ppermute(x, PIPE, [(i, (i + direction) % P) for i in range(P)])


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
                ticks = number[loop.first : loop.first + loop.ticks]
                taken.setdefault((scope, loop.ticks), []).append(int((ticks >= 0).sum()))
    return {key: sum(times) / len(times) for key, times in taken.items()}


def _put(buffer: jax.Array, place: jax.Array, value: jax.Array) -> jax.Array:
    """Writes at a place. -1 writes at the last place, which no tick reads."""
    place = jnp.where(place < 0, buffer.shape[0] - 1, place)
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), place, 0)


def _add(total: Tree, cell: Cells, value: Tree, *index: jax.Array) -> Tree:
    """Adds what a slot made to the place of the cell's chunk; an idle slot's counts as zero."""
    chunk, works = jnp.maximum(cell.chunk, 0), cell.chunk >= 0

    def add(t: jax.Array, v: jax.Array) -> jax.Array:
        return t.at[(chunk, *index)].add(jnp.where(works, v, 0).astype(t.dtype))

    return jax.tree.map(add, total, value)


# ---- moves
#
# What a pipeline's loops have moved for them: chunks of weights in, their gradients out.
#
# One stage's layers travel chunk by chunk, each chunk's matrices in one message, and what is in no
# layer by itself (parallel/exchange.py says which leaves share a message).


Array = jax.Array
REST = 2**16  # folded into a key for what is in no layer; layers and chunks fold their numbers


class StepInputs(NamedTuple):
    """The arguments of a step's gradients beside parameters and batch.

    key: of a micro-batch, or of the wire. step: the number of finished steps, int32. copies,
    errors: of the TrainState.
    """

    key: Any
    step: Any
    copies: Tree = None
    errors: Tree = None


class Gradients(NamedTuple):
    """The gradients of a step, its loss sums, and the new state of the exchange.

    sums: over the whole step. grads: float32, sharded as the parameters; None for a leaf that is
    not trained. copies, errors: of the exchange, after the step. squares: of Exchange.gather; None:
    no exchange. count: int32, the number of predictions of the step.
    """

    sums: LossSums
    grads: Tree
    copies: Tree = None
    squares: Array | None = None
    errors: Tree = None
    count: Array | None = None


def first_errors(exchange: Exchange | None, params: Tree, stack: str, chunks: int | None) -> Any:
    """Returns the first errors of a run, None without feedback, under an Explicit mesh.

    params: the masters. chunks: of a pipeline's stage: the errors are then {"chunks": of each of
    them, "rest"}; None: no pipeline, and they are Exchange.errors.
    """
    if exchange is None or not exchange.keeps_errors:
        return None
    if chunks is None:
        return exchange.errors(params)
    specs = map_words(lambda words: exchange.masters.stored(*words), exchange.axes)

    def local(params: Tree) -> Tree:
        moves = Moves(exchange, stack, chunks, None)
        return add_device_dim(moves.errors_of(params))

    return jax.shard_map(
        local,
        mesh=exchange.masters.mesh,
        in_specs=(specs,),
        out_specs=exchange.devices,
        check_vma=False,
    )(params)


class Moves:
    """The moves of one step, in the order in which the loops ask for them.

    For code inside a shard_map over the whole mesh.
    """

    def __init__(self, exchange: Exchange, stack: str, chunks: int, inputs: StepInputs | None):
        """stack: the member that holds the layers. chunks: of a stage. inputs: None where the
        exchange has no codec."""
        self._stack, self._chunks, self._inputs = stack, chunks, inputs
        # One message a chunk: its layers are a dimension like any other.
        self._layers = exchange.part(lambda tree: tree[stack], lambda words: (None, *words[1:]))
        self._outer = exchange.part(
            lambda tree: {k: x for k, x in tree.items() if k != stack}, lambda words: words
        )
        self.squares = jnp.zeros((1, 2))
        self._new: dict[int, Tree] = {}
        self._new_outer: Tree = None
        errors = None if inputs is None else drop_device_dim(inputs.errors)
        self._errors: Any = errors and {"chunks": list(errors["chunks"]), "rest": errors["rest"]}

    def cut(self, layers: Tree) -> tuple[Tree, Tree]:
        """Returns a stage's masters, and their copies, cut into chunks (chunks, layers, ...)."""
        copies = None if self._inputs is None else self._inputs.copies
        held = None if copies is None else copies[self._stack]
        return jax.tree.map(
            lambda x: x.reshape(self._chunks, x.shape[0] // self._chunks, *x.shape[1:]),
            (layers, held),
        )

    def chunk(self, cut: tuple[Tree, Tree], chunk: int) -> Tree:
        """Returns one chunk's weights in use."""
        masters, copies = jax.tree.map(lambda x: x[chunk], cut)
        used, self._new[chunk], more = self._layers.gather_local(masters, copies, self._key(chunk))
        self.squares += more
        return used

    def outer(self, params: Tree) -> Tree:
        """Returns the weights in use of what is in no layer."""
        copies = None if self._inputs is None else self._inputs.copies
        held = None if copies is None else {k: copies[k] for k in params}
        used, self._new_outer, more = self._outer.gather_local(params, held, self._key(REST))
        self.squares += more
        return used

    def scatter_chunk(self, grads: Tree, chunk: int) -> Tree:
        """Returns this rank's pieces of a chunk's summed gradients."""
        error = self._errors and self._errors["chunks"][chunk]
        pieces, error = self._layers.scatter_local(grads, self._key(chunk), self._step(), error)
        if self._errors:
            self._errors["chunks"][chunk] = error
        return pieces

    def scatter_outer(self, grads: Tree) -> Tree:
        """Returns this rank's pieces of the summed gradients of what is in no layer."""
        error = self._errors and self._errors["rest"]
        pieces, error = self._outer.scatter_local(grads, self._key(REST), self._step(), error)
        if self._errors:
            self._errors["rest"] = error
        return pieces

    def errors(self) -> Tree:
        """Returns the errors that the moves left, as TrainState.errors holds them."""
        return add_device_dim(self._errors)

    def errors_of(self, params: Tree) -> Tree:
        """Returns the first errors of this device. params: its pieces of the masters."""
        cut, _ = self.cut(params[self._stack])
        chunks = [jax.tree.map(lambda x, c=c: x[c], cut) for c in range(self._chunks)]
        outer = {k: x for k, x in params.items() if k != self._stack}
        return {
            "chunks": [self._layers.errors_local(chunk) for chunk in chunks],
            "rest": self._outer.errors_local(outer),
        }

    def copies(self) -> Tree:
        """Returns the copies that the moves made, as TrainState.copies holds them."""
        if self._inputs is None or self._inputs.copies is None:
            return None
        chunks = [self._new[c] for c in range(self._chunks)]
        return self._new_outer | {self._stack: jax.tree.map(lambda *x: jnp.concatenate(x), *chunks)}

    def _key(self, number: int) -> Array | None:
        return None if self._inputs is None else jax.random.fold_in(self._inputs.key, number)

    def _step(self) -> Array | None:
        return None if self._inputs is None else self._inputs.step


# ---- pipeline


# How sums leave the stages: the loss on all devices, the routers' with each stage's own layers.
SUMS = LossSums(P(), P(), P(PIPE))  # type: ignore[bad-argument-type]


@dataclasses.dataclass(frozen=True)
class PipelineConfig(Checked, section="pipeline"):
    """The schedule of a run with mesh.pipe > 1."""

    schedule: Schedule = option("1f1b", "order of forward and backward passes")
    microbatches: int | None = option(
        None, "pieces of a step's batch; none: twice the stages", at_least=1
    )
    chunks: int = option(1, "interleaved: groups of layers on each stage", at_least=1)
    stash: Literal["input", "residuals"] = option(
        "input",
        "what a forward pass stores; input: the chunk's input, from which the forward pass runs "
        "again before the backward pass; residuals: what --train.remat stores",
    )
    gradients: Literal["local", "sharded"] = option(
        "local",
        "when gradients are reduce-scattered; local: once a step; sharded: in every tick, which "
        "needs less memory",
    )
    overlap: Literal["chunk", "none"] = option(
        "chunk",
        "chunk: the weights of a chunk are gathered, and its gradients scattered, during the "
        "ticks of other chunks",
    )
    idle: Literal["mask", "skip"] = option(
        "mask",
        "what a stage does in a tick in which it has no work; mask: it computes on zeros; skip: "
        "nothing, under a branch that has run on emulated devices only",
    )

    def pieces(self, stages: int) -> int:
        """The microbatches of a step."""
        return self.microbatches or 2 * stages

    def check(self, cfg: Any, sizes: Mapping[str, int]) -> None:
        """Refuses what a pipeline cannot run. cfg: as core.check.check's. sizes: {mesh axis: size}.

        Raises: UserError with the nearest legal value and the flag.
        """
        stages = sizes[PIPE]
        if stages == 1:
            if self.microbatches is not None or self.chunks > 1:
                raise UserError(
                    "pipeline.microbatches and pipeline.chunks need stages: --mesh.pipe=2 or more "
                    "(without them a step is cut by --train.accumulate)"
                )
            return
        groups, pieces = stages * self.chunks, self.pieces(stages)
        self.table(stages)
        if self.idle == "skip":
            self._check_skip(cfg, sizes)
        if cfg.model.layers % groups:
            raise UserError(
                f"model.layers={cfg.model.layers} must be divisible by mesh.pipe {stages} x "
                f"pipeline.chunks {self.chunks} = {groups}; "
                f"{nearest_multiples(cfg.model.layers, groups)} (--model.layers, --mesh.pipe, "
                "--pipeline.chunks)"
            )
        ways = math.prod(sizes[a] for a in BATCH_AXES) * pieces
        if cfg.train.global_batch % ways:
            raise UserError(
                f"train.global_batch={cfg.train.global_batch} must be divisible by the devices "
                f"that cut its rows x pipeline.microbatches {pieces} = {ways}; "
                f"{nearest_multiples(cfg.train.global_batch, ways)} (--train.global_batch, "
                "--pipeline.microbatches)"
            )
        if cfg.train.accumulate > 1:
            raise UserError(
                f"train.accumulate={cfg.train.accumulate}: with pipeline stages a step is cut by "
                "--pipeline.microbatches; use 1 (--train.accumulate)"
            )
        if getattr(cfg.model, "layer_kinds", ()):
            self._check_kinds(cfg, sizes)
        if cfg.model.dropout > 0:
            raise UserError(
                f"model.dropout={cfg.model.dropout}: pipeline stages have none; use 0 "
                "(--model.dropout, --mesh.pipe)"
            )

    def _check_kinds(self, cfg: Any, sizes: Mapping[str, int]) -> None:
        """Refuses rings: stages may be at layers of different kinds, which take other branches."""
        if sizes["context"] > 1 and cfg.context.kind == "ring":
            raise UserError(
                f"model.pattern={cfg.model.pattern}: with context.kind=ring keys travel around a "
                "ring, which needs all stages in one kind of layer; use --context.kind=gather or "
                "ulysses, or no stages (--context.kind, --mesh.pipe)"
            )

    def _check_skip(self, cfg: Any, sizes: Mapping[str, int]) -> None:
        """Refuses rings: all devices take part in a permutation, and only some take a branch."""
        if sizes["context"] > 1 and cfg.context.kind == "ring":
            raise UserError(
                "pipeline.idle=skip: with context.kind=ring keys travel around a ring, which needs "
                "all stages; use --context.kind=gather or ulysses, or --pipeline.idle=mask"
            )
        if cfg.overlap == "ring" and sizes["tensor"] * sizes["expert"] > 1:
            raise UserError(
                "pipeline.idle=skip: with overlap=ring products travel around a ring, which needs "
                "all stages; use --overlap=xla, or --pipeline.idle=mask"
            )

    def table(self, stages: int) -> Table:
        """Builds and checks the tick table. Raises: UserError for sizes that it cannot have."""
        table = build.BUILDERS[self.schedule](stages, self.pieces(stages), self.chunks)
        table.check()
        return table

    def route(self, stages: int, backward: bool = True) -> Route:
        """Returns what runs when, as the program executes it."""
        return route(self.table(stages), backward, self.overlap == "chunk")


def layer_order(layers: int, stages: int, chunks: int) -> np.ndarray:
    """Returns the layer at each place of a stacked leaf, stage after stage, chunk after chunk.

    Chunk c of stage s is the group c * stages + s, so with one chunk the order is the natural one.
    """
    groups = np.arange(layers).reshape(chunks, stages, -1)
    return groups.transpose(1, 0, 2).reshape(-1)


# What XLA's GPU scheduler must be told to hide a chunk's weights behind other chunks' ticks: a loop
# that communicates may have a collective beside it, and a chunk's collectives are one. Without
# these no gather overlaps a loop (compiled for H100, jax 0.11.2).
OVERLAP = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 40,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 40,
}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Runs ModelParts that were built on local Ops (parallel/tensor.py) by a table.

    dtype: of compute. remat: of the layers inside a chunk. batch: how each member of a batch
    (U, B, ...) lies; none: rows of tokens. exchange: what lies between masters and weights in use;
    None: nothing but a cast.
    """

    parts: ModelParts
    layout: Layout
    cfg: PipelineConfig
    dtype: jnp.dtype
    remat: Remat
    batch: Mapping[str, P] | None = None
    exchange: Exchange | None = None

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.layout.mesh.shape[PIPE]

    def gradients(
        self,
        params: Tree,
        batch: Batch,
        route: Route,
        objective: Objective,
        *scalars: jax.Array,
        inputs: StepInputs | None = None,
    ) -> Gradients:
        """Returns the loss sums of the batch, gradients stored as the parameters are, and what the
        exchange, if there is one, keeps of this step.

        Args: params: layers in `layer_order`. batch: leaves (U, B, ...). route: of a table, such as
          `cfg.route(stages)`; an argument of the jitted function, or its arrays are constants of
          the program. objective(sums, *scalars):
          what is differentiated; it must be linear in the sums. It is also called with one
          layer's MoeSums and zeros, and with the other sums without MoeSums. inputs: for the
          exchange, if there is one.
        Of a packed leaf, whose integers have no gradient, the others are None.
        """
        self = self._of(params)

        def local(
            params: Tree, batch: Batch, route: Route, inputs: StepInputs | None, *scalars: jax.Array
        ) -> Gradients:
            return self._run(route, params, batch, lambda sums: objective(sums, *scalars), inputs)

        copies: Any = None
        squares: Any = None
        errors: Any = None
        if self.exchange is not None:
            squares = errors = self.exchange.devices
            if self.exchange.wire.difference:
                copies = self.exchange.copied_specs()
        in_specs = None if inputs is None else StepInputs(P(), P(), copies, errors)
        out_specs = Gradients(SUMS, self.parts.trained(self._specs), copies, squares, errors)
        return self._everywhere(local, out_specs, in_specs, *[P()] * len(scalars))(
            params, batch, route, inputs, *scalars
        )

    def sums(self, params: Tree, batch: Batch, route: Route) -> LossSums:
        """Returns the loss sums of a batch (U, B, ...).

        route: of a table without backward passes.
        """
        self = self._of(params)

        def local(params: Tree, batch: Batch, route: Route) -> LossSums:
            return self._run(route, params, batch, None).sums

        return self._everywhere(local, SUMS)(params, batch, route)

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """XLA options for the programs that call `gradients` or `sums`; None: the defaults."""
        gpu = self.layout.mesh.devices.flat[0].platform in ("gpu", "cuda")
        hides = self.cfg.overlap == "chunk" and self.cfg.chunks > 1
        return OVERLAP if gpu and hides else None

    def _of(self, params: Tree) -> "Pipeline":
        """Returns the same pipeline for parameters of which some are packed."""
        axes = packed_axes(self.parts.axes, params)
        return dataclasses.replace(self, parts=dataclasses.replace(self.parts, axes=axes))

    @property
    def _specs(self) -> Tree:
        return map_words(lambda words: self.layout.stored(*words), self.parts.axes)

    def _everywhere(self, local: Callable, out_specs: Any, *others: Any) -> Callable:
        rows: Any = self.batch or P(None, *self.layout.act("batch", "seq"))
        # As in tensor.local_ops: gradients of sums over devices, which the checker does not know.
        return jax.shard_map(
            local,
            mesh=self.layout.mesh,
            in_specs=(self._specs, rows, P(), *others),
            out_specs=out_specs,
            check_vma=False,
        )

    def _run(
        self,
        route: Route,
        params: Tree,
        batch: Batch,
        objective: Objective | None,
        inputs: StepInputs | None = None,
    ) -> Gradients:
        """The program of one device: its loops, and beside them the chunks' gathers and scatters.

        While a loop runs, the weights of the chunk that the next one opens are gathered, and the
        gradients of the chunk that the last one finished are scattered: the first gather and the
        last scatter alone are exposed. (MegaScale section 3.2, overlapping in data parallelism.)
        Raises: ValueError for kinds of the table that the model has no work for.
        """
        has_segments = self.parts.tower is not None and self.parts.tower.segments
        known = ("F", "B", "W", "EF", "EB") if has_segments else ("F", "B", "W")
        if lost := [kind.name for kind in route.kinds if kind.name not in known]:
            raise ValueError(
                f"the model has no work for {', '.join(lost)} of the table; the kinds that can be "
                f"executed are {', '.join(known)}"
            )
        v, stack, order = self.cfg.chunks, self.parts.stack, order_of(self.layout.mesh)
        moves = Moves(self._exchange(objective is not None), stack, v, inputs)
        outer = moves.outer(self.parts.outer(params))
        cut = moves.cut(params[stack])
        first = [moves.chunk(cut, chunk) for chunk in range(route.loops[0].chunks)]
        held = _write(jax.tree.map(lambda w: jnp.zeros((v, *w.shape), w.dtype), first[0]), 0, first)
        tick = Tick(
            self.parts,
            route,
            outer | {stack: held},
            batch,
            objective,
            chunks=v,
            copies=self.layout.ways(self.layout.rules.stored["vocab"]),
            remat=self.remat,
            stashes=self.cfg.stash == "residuals",
            settle=self._settle,
            order=order,
            skips=self.cfg.idle == "skip",
        )
        carry, rows, done = tick.start(), tick.rows(), {}
        local = objective is not None and self.cfg.gradients == "local"
        loop_rows = _rows(rows, route.loops[0])
        for loop, following in zip(route.loops, (*route.loops[1:], route.loops[-1]), strict=True):
            # Barriers, for the scheduler goes backwards and takes what is ready first: the gather
            # starts when the loop has all that it needs, and ends where the next loop's rows are
            # cut. That is work, so the end is ready before the loop is, which then lies between.
            (cut, carry, held), _ = lax.optimization_barrier(((cut, carry, held), outer))
            coming = [moves.chunk(cut, chunk) for chunk in range(loop.chunks, following.chunks)]
            tick.blocks = held
            loop_rows = order.after(loop_rows, (coming, done))
            carry, _ = lax.scan(functools.partial(tick, loop), carry, loop_rows)
            carry, rows = order.together((carry, rows))
            cut = order.after(cut, carry)
            loop_rows, held, coming = lax.optimization_barrier(
                (_rows(rows, following), held, coming)
            )
            held = _write(held, loop.chunks, coming)
            for chunk in loop.done if local else ():
                grads = jax.tree.map(lambda g: g[chunk], carry.blocks)  # noqa: B023
                # Cut out before the next loop adds to the others: else XLA copies all chunks' sums
                # here, and every finished chunk would keep a copy of all of them.
                grads, carry = lax.optimization_barrier((grads, carry))
                grads, done = order.together((grads, done))
                done[chunk] = moves.scatter_chunk(grads, chunk)
        partial, outer = self.layout.live(self.layout.rules.partial), carry.outer
        sums = lax.psum(order.after(carry.sums, done), partial) if partial else carry.sums
        blocks, moe = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (carry.blocks, carry.moe))
        sums = dataclasses.replace(sums, moe=moe)
        if objective is None:
            return Gradients(sums, None)
        if local:
            blocks = jax.tree.map(lambda *g: jnp.concatenate(g), *(done[c] for c in range(v)))
            outer, _ = order.together((outer, (done, sums)))
            outer = moves.scatter_outer(outer)
        grads = order.after(outer | {stack: blocks}, (outer, blocks))
        grads = map_words(functools.partial(add_copies, self.layout), self.parts.axes, grads)
        squares = moves.squares if self.exchange else None
        return Gradients(sums, grads, moves.copies(), squares, moves.errors())

    # ---- weights and their gradients

    def _exchange(self, trains: bool) -> Exchange:
        """Returns the exchange of a program; one that does not train has no codec."""
        if self.exchange is not None and trains:
            return self.exchange
        parts = self.parts
        return Exchange(parts.axes, self.layout, self.layout, PLAIN, self.dtype, parts.trains)

    def _settle(self, words: tuple, grad: jax.Array | None) -> jax.Array | None:
        """Returns a gradient as it is added to the total: scattered, with --pipeline.gradients=
        sharded."""
        if grad is None or self.cfg.gradients == "local":
            return grad
        return scatter_matrix(self.layout, words, grad)


def add_copies(layout: Layout, words: tuple, grad: jax.Array | None) -> jax.Array | None:
    """Sums a gradient over the axes that hold copies of its leaf, inside a shard_map; None, of a
    leaf without a gradient, stays None."""
    if grad is None:
        return None
    cut = {a for entry in layout.stored(*words) for a in _axes(entry)}
    copies = tuple(a for a in layout.live(MESH_AXES) if a not in cut)
    return lax.psum(grad, copies) if copies else grad


def _rows(rows: Route, loop: Stretch) -> Route:
    """Returns what a loop's ticks read of the route."""
    return jax.tree.map(lambda x: x[loop.first : loop.first + loop.ticks], rows)


def _write(held: Tree, place: int, chunks: Sequence[Tree]) -> Tree:
    """Puts chunks' weights side by side, from a place on."""
    for index, chunk in enumerate(chunks, place):
        chunk = jax.tree.map(_row_major, chunk)
        held = jax.tree.map(lambda h, w: h.at[index].set(w), held, chunk)  # noqa: B023
    return held


def _row_major(x: jax.Array) -> jax.Array:
    """Returns the array with its first dimension outermost in memory, as loops read it.

    A gather leaves the dimension that it joins outermost. Left alone, XLA keeps all chunks as
    gathered and transposes all of them before every loop: one more copy of the stage's weights.
    """
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
