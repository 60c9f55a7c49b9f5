"""Work of a pipeline's slots: loops that slots share, and an encoder's segments.

A slot's work is a generator that yields its loops over layers. `drive` runs the slots of a stage in
a tick: their first loops become one loop, layer beside layer, so do their second ones. XLA never
overlaps two loops, but it hides a collective of one network behind products of the other in the
same one (Optimus, arXiv 2408.03505, section 4.2, does so by kernels).

`Segment` is an encoder's work: a piece of its stack, before it what makes the stack's input (with
the first piece), behind it what makes features (with the last). `EncoderRoutes` gives a step the
route for its batch. parallel/pipeline.py runs them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.core.layout import Words
from megajax.core.tree import Tree, is_words
from megajax.models.parts import is_stacked, map_words
from megajax.schedule import encoder
from megajax.schedule.ir import Table
from megajax.schedule.route import Cells, Route, route

# ---- loops


class Scan(NamedTuple):
    """A loop over layers, as lax.scan takes it."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    carry: Any
    items: Any
    reverse: bool = False


# Work yields its loops, and None for a round without one, and gets (carry, outputs) of them.
Work = Generator[Scan | None, Any, Any]
# (whether there is work, None: always; what it is; what it gives where it is skipped, None: zeros)
Job = tuple[jax.Array | None, Callable[[], Work], Callable[[], Any] | None]


def drive(works: Sequence[Callable[[], Work]]) -> list[Any]:
    """Returns the result of each work. The first loops of all are one loop, so are the second."""
    running, results = {i: work() for i, work in enumerate(works)}, {}
    replies: dict[int, Any] = dict.fromkeys(running)
    while running:
        asked: dict[int, Scan] = {}
        for i, work in [*running.items()]:
            try:
                scan = work.send(replies[i])
            except StopIteration as end:
                results[i] = end.value
                del running[i]
                continue
            replies[i] = None
            if scan is not None:
                asked[i] = scan
        replies |= dict(zip(asked, _joined([*asked.values()]), strict=True))
    return [results[i] for i in range(len(works))]


def _joined(scans: Sequence[Scan]) -> list[tuple[Any, Any]]:
    """Returns (carry, outputs) of each scan. All are in one direction; an iteration of the loop has
    the same share of the layers of each."""
    if len(scans) < 2:
        return [lax.scan(s.step, s.carry, s.items, reverse=s.reverse) for s in scans]
    lengths = [len(jax.tree.leaves(s.items)[0]) for s in scans]
    times = math.gcd(*lengths)

    def step(carries: list, parts: list) -> tuple[list, list]:
        outputs = []
        for number, (scan, part) in enumerate(zip(scans, parts, strict=True)):
            size = lengths[number] // times
            ys = []
            for i in reversed(range(size)) if scan.reverse else range(size):
                item = jax.tree.map(lambda x: x[i], part)  # noqa: B023
                carries[number], y = scan.step(carries[number], item)
                ys.append(y)
            ys = ys[::-1] if scan.reverse else ys
            outputs.append(jax.tree.map(lambda *y: jnp.stack(y), *ys))
        return carries, outputs

    items = [
        jax.tree.map(lambda x: x.reshape(times, -1, *x.shape[1:]), scan.items) for scan in scans
    ]
    carries, outputs = lax.scan(step, [s.carry for s in scans], items, reverse=scans[0].reverse)
    flat = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), outputs)
    return [*zip(carries, flat, strict=True)]


def skipped(run: Callable[[], Work], idle: Callable[[], Any] | None) -> Any:
    """Returns what a job gives where it is skipped."""
    return idle() if idle else jax.tree.map(zeros, jax.eval_shape(lambda: drive([run])[0]))


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros of this shape and dtype."""
    return jnp.zeros(like.shape, like.dtype)


def take(buffer: jax.Array, place: jax.Array) -> jax.Array:
    """Reads a place. -1 gives zeros, even if the buffer holds NaN."""
    value = lax.dynamic_index_in_dim(buffer, jnp.maximum(place, 0), keepdims=False)
    return jnp.where(place < 0, jnp.zeros_like(value), value)


# ---- an encoder


class Segment:
    """A segment of an encoder: the layers of its stack that one slot works on."""

    def __init__(self, tick: Any, cell: Cells):
        """tick: a pipeline's Tick. cell: of EF or EB; says which segment, of which microbatch."""
        tower = tick.parts.tower
        assert tower is not None and tower.start and tower.segment and tower.finish
        self._tick, self._cell, self._tower = tick, cell, tower
        self._batch = tick.rows_seen(tick.piece(cell.microbatch))
        self._words, self._tree = jax.tree.flatten(tick.axes[1][tower.members[0]], is_leaf=is_words)
        self.size = tower.layers // tower.segments
        self.is_first, self.is_last = cell.chunk <= 0, cell.chunk == tower.segments - 1
        self._at = jnp.maximum(cell.chunk, 0) * self.size
        stack, self._ends = self.split(tick.outer)
        self.stack = [lax.dynamic_slice_in_dim(w, self._at, self.size) for w in stack]

    def split(self, outer: Tree) -> tuple[list, list]:
        """Returns (the stacked leaves, the others) of the encoder, of a tree like the parameters
        that are in no layer of the decoder."""
        leaves = self._tree.flatten_up_to(outer[self._tower.members[0]])
        pairs = [*zip(self._words, leaves, strict=True)]
        stack = [x for words, x in pairs if is_stacked(words)]
        return stack, [x for words, x in pairs if not is_stacked(words)]

    def joined(self, outer: Tree, stack: Sequence, ends: Sequence) -> Tree:
        """Returns `outer` with the encoder of these leaves."""
        stacked, others = iter(stack), iter(ends)
        leaves = [next(stacked if is_stacked(words) else others) for words in self._words]
        return outer | {self._tower.members[0]: self._tree.unflatten(leaves)}

    def layer(self, w: list, x: jax.Array) -> jax.Array:
        """Returns the output of one layer. w: its leaves."""
        params = self.joined(self._tick.outer, [one[None] for one in w], self._ends)
        return self._tower.segment(params, x, self._batch)  # type: ignore[not-callable]

    def start(self, ends: Sequence | None = None) -> jax.Array:
        """Returns what the first layer reads."""
        stack = self.split(self._tick.outer)[0]
        params = self.joined(self._tick.outer, stack, self._ends if ends is None else ends)
        return self._tower.start(params, self._batch)  # type: ignore[not-callable]

    def finish(self, y: jax.Array, projector: Tree | None = None) -> jax.Array:
        """Returns the features that are held of a microbatch."""
        if self._tick.late:
            return y
        params = self._tick.outer
        if projector is not None:
            params = params | {self._tower.members[1]: projector}
        return self._tower.finish(params, y, self._batch)  # type: ignore[not-callable]

    def first(self, carry: Any) -> jax.Array:
        """Returns what the segment reads."""
        x = take(carry.values["EF"], self._cell.places["EF"])
        return self._tick.where(self.is_first, self.start, lambda: x)

    def start_back(self, total: Tree, dx: jax.Array) -> Tree:
        """Returns the gradients with those of what `start` reads added."""
        (ends,) = jax.vjp(self.start, self._ends)[1](dx)
        stack, old = self.split(total)
        words = [words for words in self._words if not is_stacked(words)]
        return self.joined(total, stack, [*map(self._add, words, old, ends)])

    def finish_back(self, total: Tree, y: jax.Array, dy: jax.Array) -> tuple[Tree, jax.Array]:
        """Returns (the gradients with those of what `finish` reads added, that of y)."""
        name = self._tower.members[1]
        dy, grads = jax.vjp(self.finish, y, self._tick.outer[name])[1](dy)
        new = map_words(self._add, self._tick.axes[1][name], total[name], grads)
        return total | {name: new}, dy

    def add_layer(self, total: list, index: jax.Array, grads: list) -> list:
        """Returns the stacked gradients with those of a layer of the segment added."""
        words = [words for words in self._words if is_stacked(words)]

        def add(words: Words, t: jax.Array | None, g: jax.Array) -> jax.Array | None:
            if t is None:  # it is not trained
                return None
            return t.at[self._at + index].add(self._tick.settle(words[1:], g).astype(jnp.float32))

        return [*map(add, words, total, grads)]

    def _add(self, words: Words, t: jax.Array | None, g: jax.Array) -> jax.Array | None:
        return None if t is None else t + self._tick.settle(words, g).astype(jnp.float32)


class EncoderRoutes:
    """The routes of a decoder's table with an encoder's work in it, which follows the batch.

    A microbatch without images has no such work. All routes have the shape of that of the batch in
    which all microbatches have images, so they share one program.
    """

    def __init__(self, table: Table, segments: int, trained: bool):
        """table: of the decoder. trained: whether the encoder has a backward pass."""
        self._table, self._work = table, (segments, segments if trained else 0)
        self._full = encoder.place(table, [self._work] * table.microbatches)
        self._full.check()
        self.largest = route(self._full)
        self._of = functools.lru_cache(64)(lambda shown: self.planned(shown)[1])

    def planned(self, shown: Sequence[bool]) -> tuple[Table, Route]:
        """Returns the table for a batch, and its route. shown: whether each microbatch has
        images."""
        table = encoder.place(self._table, [self._work if s else (0, 0) for s in shown])
        table.check()
        try:
            return table, route(table, like=self.largest)
        except ValueError:
            # Each microbatch's work where it is in the full table fits in any case.
            slots = (s for s in self._full.slots if s.kind in "FBW" or shown[s.microbatch])
            work = table.encoder_work
            table = dataclasses.replace(self._full, slots=tuple(slots), encoder_work=work)
            table.check()
            return table, route(table, like=self.largest)

    def __call__(self, images: jax.Array) -> Route:
        """Returns the route of a batch. images: (microbatches, rows, patches), of Tower.images.

        Where other processes have some of the rows, all microbatches count as having images.
        """
        if not isinstance(images, jax.Array) or not images.is_fully_addressable:
            return self.largest
        return self._of(tuple((np.asarray(images) >= 0).any((1, 2)).tolist()))
