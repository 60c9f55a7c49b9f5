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
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import layout
from jax.sharding import PartitionSpec as P

from megajax.core.axes import BATCH_AXES, MESH_AXES
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, nearest_multiples
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.layers.losses import LossSums
from megajax.layers.weight import packed_axes
from megajax.models.parts import Batch, ModelParts, Remat, map_words
from megajax.parallel.exchange import PLAIN, Exchange, scatter_local
from megajax.parallel.moves import Gradients, Moves, Turn
from megajax.parallel.order import order_of
from megajax.parallel.tick import FUNCTIONS, PIPE, Function, Objective, Tick
from megajax.schedule import build
from megajax.schedule.ir import Table
from megajax.schedule.route import Route, Stretch, route

# How sums leave the stages: the loss on all devices, the routers' with each stage's own layers.
SUMS = LossSums(P(), P(), P(PIPE))  # type: ignore[bad-argument-type]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


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
        "what a forward pass keeps: the chunk's input, so that it runs again before the backward "
        "pass, or what --train.remat keeps",
    )
    gradients: Literal["local", "sharded"] = option(
        "local", "local: reduce-scattered once a step; sharded: in every tick, in less memory"
    )
    overlap: Literal["chunk", "none"] = option(
        "chunk", "chunk: other chunks' ticks hide each one's weight gather and gradient scatter"
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
        if cfg.model.dropout > 0:
            raise UserError(
                f"model.dropout={cfg.model.dropout}: pipeline stages have none; use 0 "
                "(--model.dropout, --mesh.pipe)"
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
    """Runs ModelParts that were built on local Ops (parallel/local.py) by a table.

    dtype: of compute. remat: of the layers inside a chunk. batch: how each member of a batch
    (U, B, ...) lies; none: rows of tokens. exchange: what lies between masters and weights in use;
    None: nothing but a cast. functions: of the kinds of a table.
    """

    parts: ModelParts
    layout: Layout
    cfg: PipelineConfig
    dtype: jnp.dtype
    remat: Remat
    batch: Mapping[str, P] | None = None
    exchange: Exchange | None = None
    functions: Mapping[str, Function] = dataclasses.field(default_factory=lambda: FUNCTIONS)

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
        turn: Turn | None = None,
    ) -> Gradients:
        """Returns the loss sums of the batch, gradients stored as the parameters are, and what the
        exchange, if there is one, keeps of this step.

        Args: params: layers in `layer_order`. batch: leaves (U, B, ...). route: of a table, such as
          `cfg.route(stages)`; an argument of the jitted function, or its arrays are constants of
          the program. objective(sums, *scalars):
          what is differentiated; it must be linear in the sums. It is also called with one
          layer's MoeSums and zeros, and with the rest without them. turn: where there is an
          exchange.
        Of a packed leaf, whose integers have no gradient, the others are None.
        """
        self = self._of(params)

        def local(
            params: Tree, batch: Batch, route: Route, turn: Turn | None, *scalars: jax.Array
        ) -> Gradients:
            return self._run(route, params, batch, lambda sums: objective(sums, *scalars), turn)

        copies: Any = None
        squares: Any = None
        errors: Any = None
        if self.exchange is not None:
            squares = errors = self.exchange.devices
            if self.exchange.wire.difference:
                copies = self.exchange.copied_specs()
        given = None if turn is None else Turn(P(), P(), copies, errors)
        wanted = Gradients(SUMS, self.parts.trained(self._specs), copies, squares, errors)
        return self._everywhere(local, wanted, given, *[P()] * len(scalars))(
            params, batch, route, turn, *scalars
        )

    def sums(self, params: Tree, batch: Batch, route: Route) -> LossSums:
        """Returns the loss sums of a batch (U, B, ...). route: of the forward half of a table."""
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
        # See local.py: gradients of sums over devices, which the checker does not know.
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
        turn: Turn | None = None,
    ) -> Gradients:
        """The program of one device: its loops, and beside them the chunks' gathers and scatters.

        While a loop runs, the weights of the chunk that the next one opens are gathered, and the
        gradients of the chunk that the last one finished are scattered: the first gather and the
        last scatter alone are exposed. (MegaScale section 3.2, overlapping in data parallelism.)
        Raises: ValueError for kinds of the table that have no function.
        """
        if lost := [kind.name for kind in route.kinds if kind.name not in self.functions]:
            raise ValueError(
                f"kind {', '.join(lost)} of the table has no function here; the kinds that can be "
                f"executed are {', '.join(self.functions)}"
            )
        v, stack, order = self.cfg.chunks, self.parts.stack, order_of(self.layout.mesh)
        moves = Moves(self._exchange(objective is not None), stack, v, turn)
        rest = moves.rest({k: x for k, x in params.items() if k != stack})
        cut = moves.cut(params[stack])
        first = [moves.chunk(cut, chunk) for chunk in range(route.loops[0].chunks)]
        held = _write(jax.tree.map(lambda w: jnp.zeros((v, *w.shape), w.dtype), first[0]), 0, first)
        tick = Tick(
            self.parts,
            route,
            rest | {stack: held},
            batch,
            objective,
            chunks=v,
            copies=self.layout.ways(self.layout.rules.stored["vocab"]),
            remat=self.remat,
            stashes=self.cfg.stash == "residuals",
            settle=self._settle,
            order=order,
            functions=self.functions,
        )
        carry, rows, done = tick.start(), tick.rows(), {}
        local = objective is not None and self.cfg.gradients == "local"
        here = _rows(rows, route.loops[0])
        for loop, following in zip(route.loops, (*route.loops[1:], route.loops[-1]), strict=True):
            # Barriers, for the scheduler goes backwards and takes what is ready first: the gather
            # starts when the loop has all that it needs, and ends where the next loop's rows are
            # cut. That is work, so the end is ready before the loop is, which then lies between.
            (cut, carry, held), _ = lax.optimization_barrier(((cut, carry, held), rest))
            coming = [moves.chunk(cut, chunk) for chunk in range(loop.chunks, following.chunks)]
            tick.blocks = held
            here = order.after(here, (coming, done))
            carry, _ = lax.scan(functools.partial(tick, loop), carry, here)
            carry, rows = order.together((carry, rows))
            cut = order.after(cut, carry)
            here, held, coming = lax.optimization_barrier((_rows(rows, following), held, coming))
            held = _write(held, loop.chunks, coming)
            for chunk in loop.done if local else ():
                grads = jax.tree.map(lambda g: g[chunk], carry.blocks)  # noqa: B023
                # Cut out before the next loop adds to the others: else XLA copies all chunks' sums
                # here, and every finished chunk would keep a copy of all of them.
                grads, carry = lax.optimization_barrier((grads, carry))
                grads, done = order.together((grads, done))
                done[chunk] = moves.scatter_chunk(grads, chunk)
        partial, rest = self.layout.live(self.layout.rules.partial), carry.rest
        sums = lax.psum(order.after(carry.sums, done), partial) if partial else carry.sums
        blocks, moe = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (carry.blocks, carry.moe))
        sums = dataclasses.replace(sums, moe=moe)
        if objective is None:
            return Gradients(sums, None)
        if local:
            blocks = jax.tree.map(lambda *g: jnp.concatenate(g), *(done[c] for c in range(v)))
            rest, _ = order.together((rest, (done, sums)))
            rest = moves.scatter_rest(rest)
        grads = order.after(rest | {stack: blocks}, (rest, blocks))
        grads = map_words(functools.partial(add_copies, self.layout), self.parts.axes, grads)
        squares = moves.squares if self.exchange else None
        return Gradients(sums, grads, moves.copies(), squares, moves.errors())

    # ---- weights and their gradients

    def _exchange(self, trains: bool) -> Exchange:
        """What brings weights: without a codec where nothing is trained."""
        if self.exchange is not None and trains:
            return self.exchange
        parts = self.parts
        return Exchange(parts.axes, self.layout, self.layout, PLAIN, self.dtype, parts.trains)

    def _settle(self, words: tuple, grad: jax.Array | None) -> jax.Array | None:
        """Done to a gradient before it is added to the total: its scatter, if that is asked."""
        if grad is None or self.cfg.gradients == "local":
            return grad
        return scatter_local(self.layout, words, grad)


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
    for index, mine in enumerate(chunks, place):
        mine = jax.tree.map(_row_major, mine)
        held = jax.tree.map(lambda h, w: h.at[index].set(w), held, mine)  # noqa: B023
    return held


def _row_major(x: jax.Array) -> jax.Array:
    """A gather leaves the dimension that it joins outermost in memory, and loops want rows.

    Left alone, XLA keeps all chunks as gathered and turns all of them around before every loop:
    one more copy of the stage's weights.
    """
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
