"""What one rank does in the exchange of a tree: buckets made flat, sent, and taken apart again.

For code inside a shard_map over the whole mesh: pipelines call it as it is, parallel/exchange.py
puts a shard_map around it. parallel/buckets.py says what travels in one message, parallel/zero.py
how.

Errors, of a codec with feedback, are a tuple with a zero.Errors a bucket, stacked like its leaves;
None: the codec has none.

Legend: C elements of a rank's piece of a bucket, N of all pieces, L layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.tree import Tree
from megajax.parallel import zero
from megajax.parallel.buckets import Bucket, Buckets, scatter_local, whole_local
from megajax.parallel.order import Order, order_of

Array = jax.Array
NODE = "node"


class LocalExchange(Buckets):
    """The exchange of one tree, on local arrays."""

    @property
    def order(self) -> Order:
        """How the messages are ordered."""
        return order_of(self.masters.mesh)

    @property
    def keeps_errors(self) -> bool:
        """Tells whether gradients travel in a codec with feedback."""
        return bool(self.buckets) and self.wire.gradients.feedback is not None

    def gather_local(
        self, params: Tree, copies: Tree, key: Array | None
    ) -> tuple[Tree, Tree, Array]:
        """`gather`, all dimensions of a leaf in one message, of vectors and routers too."""
        masters = self._values(params)
        old = self._values(copies) if self.wire.difference else []
        weights, new, squares = list(masters), list(old), jnp.zeros((1, 2))
        for i in self.exact:
            weights[i] = whole_local(self.masters, self.words[i], masters[i], self.dtype)
        for number, bucket in enumerate(self.buckets):
            mine = [masters[i] for i in bucket.leaves]
            held = [old[i] for i in bucket.leaves] if old else None
            moved, two = self.gather_bucket(bucket, mine, held, fold(key, number))
            squares += two
            for i, x in zip(bucket.leaves, moved, strict=True):
                weights[i] = x.astype(self.dtype)
                if old:
                    new[i] = x
        return self._tree(weights), self._tree(new) if old else None, squares

    def scatter_local(
        self, grads: Tree, key: Array | None, step: Array | None, errors: Any = None
    ) -> tuple[Tree, Any]:
        """`scatter`, of what `gather_local` gave. Vectors stay sums of this rank's own."""
        values, after = self._values(grads), []
        found = [None if i in self.frozen else x for i, x in enumerate(values)]
        for i in self.exact_gradients:
            found[i] = scatter_local(self.masters, self.words[i], values[i])
        for number, bucket in enumerate(self.buckets):
            mine = self.order.after([values[i] for i in bucket.leaves], found)
            error = None if errors is None else errors[number]
            pieces, error = self.scatter_bucket(bucket, mine, fold(key, number), step, error)
            after.append(error)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                found[i] = x
        return self._tree(found), None if errors is None else tuple(after)

    def errors_local(self, params: Tree) -> Any:
        """Returns this rank's first errors. params: its pieces of the masters."""
        if not self.keeps_errors:
            return None
        values, found, mesh = self._values(params), [], self.masters.mesh
        for bucket in self.buckets:
            ranks, nodes = self._ranks(bucket), mesh.shape[NODE] if NODE in bucket.axes else 1
            n = ranks * sum(values[i].size for i in bucket.leaves)
            layers = values[bucket.leaves[0]].shape[0] if bucket.stacked else 1
            error = zero.start(n // layers, self.wire.gradients, nodes, ranks // nodes)
            if bucket.stacked:
                error = jax.tree.map(lambda x, n=layers: jnp.stack([x] * n), error)
            found.append(error)
        return tuple(found)

    def gather_bucket(
        self,
        bucket: Bucket,
        masters: Sequence[Array],
        copies: Sequence[Array] | None,
        key: Array | None,
    ) -> tuple[list[Array], Array]:
        """Returns (the new copies of a bucket's leaves, this device's row (1, 2) of squares)."""
        if not bucket.stacked:
            return self._gather(bucket, masters, copies, key)
        layers = masters[0].shape[0]

        def one(squares: Array, item: tuple) -> tuple[Array, list[Array]]:
            index, mine, held = item
            new, two = self._gather(bucket, mine, held, fold(key, index))
            return squares + two, new

        squares, new = lax.scan(one, jnp.zeros((1, 2)), (jnp.arange(layers), masters, copies))
        return new, squares

    def _gather(
        self,
        bucket: Bucket,
        masters: Sequence[Array],
        copies: Sequence[Array] | None,
        key: Array | None,
    ) -> tuple[list[Array], Array]:
        ranks, wheres = self._ranks(bucket), self._wheres(bucket)
        mine = [_front(x, where, 1) for x, where in zip(masters, wheres, strict=True)]
        main_C = jnp.concatenate(mine, axis=1)[0]
        if copies is None:
            held = jnp.zeros((ranks, main_C.size), self.dtype)
        else:
            rows = [_front(x, where, ranks) for x, where in zip(copies, wheres, strict=True)]
            held = jnp.concatenate(rows, axis=1)
        codec, key = self.wire.weights, self._own(bucket, key)
        new = zero.gather_difference(
            main_C, held.reshape(-1), codec, bucket.axes, key=key, implementation=self.wire.kernels
        )
        new = new.reshape(ranks, -1)
        own = lax.dynamic_index_in_dim(new, lax.axis_index(bucket.axes), keepdims=False)
        squares = jnp.stack([jnp.sum((main_C - own.astype(jnp.float32)) ** 2), jnp.sum(main_C**2)])[
            None
        ]
        whole, begin = [], 0
        for x, where in zip(masters, wheres, strict=True):
            shape = list(x.shape)
            shape[where] *= ranks
            whole.append(_back(new[:, begin : begin + x.size], shape, where))
            begin += x.size
        return whole, squares

    def scatter_bucket(
        self,
        bucket: Bucket,
        grads: Sequence[Array],
        key: Array | None,
        step: Array | None,
        error: zero.Errors | None = None,
    ) -> tuple[list[Array], zero.Errors | None]:
        """Returns (this rank's pieces of the summed gradients of a bucket's leaves, float32; its
        new errors)."""
        if not bucket.stacked:
            return self._scatter(bucket, grads, key, step, error)

        def one(_: None, item: tuple) -> tuple[None, tuple]:
            index, mine, error = item
            return None, self._scatter(bucket, mine, fold(key, index), step, error)

        return lax.scan(one, None, (jnp.arange(grads[0].shape[0]), grads, error))[1]

    def _scatter_led(
        self,
        bucket: Bucket,
        grads: Sequence[Array],
        key: Array,
        step: Array,
        error: zero.Errors | None,
    ) -> tuple[list[Array], zero.Errors | None]:
        """`scatter_bucket` of errors with a dimension of devices."""
        pieces, error = self.scatter_bucket(bucket, grads, key, step, led(error))
        return pieces, lead(error)

    def _scatter(
        self,
        bucket: Bucket,
        grads: Sequence[Array],
        key: Array | None,
        step: Array | None,
        error: zero.Errors | None,
    ) -> tuple[list[Array], zero.Errors | None]:
        x_N, bad = self._flat(bucket, grads)
        piece_C, error = self._sum(bucket, x_N, key, step, error)
        shapes, ranks = [list(g.shape) for g in grads], self._ranks(bucket)
        for shape, where in zip(shapes, self._wheres(bucket), strict=True):
            shape[where] //= ranks
        bad = lax.pmax(bad, bucket.axes) > 0
        return self._pieces(bucket, piece_C, bad, shapes), error

    def _flat(self, bucket: Bucket, grads: Sequence[Array]) -> tuple[Array, Array]:
        """Returns (a bucket's gradients, a rank's piece after the other, int32 (leaves,): which are
        not finite here). Zeros stand in the place of those: their neighbours keep what they have.
        """
        ranks = self._ranks(bucket)
        grads = [g.astype(jnp.float32) for g in grads]
        bad = jnp.stack([~jnp.isfinite(g).all() for g in grads])
        rows = [
            _front(jnp.where(bad[i], 0.0, g), where, ranks)
            for i, (g, where) in enumerate(zip(grads, self._wheres(bucket), strict=True))
        ]
        return jnp.concatenate(rows, axis=1).reshape(-1), bad.astype(jnp.int32)

    def _pieces(
        self, bucket: Bucket, piece_C: Array, bad: Array, shapes: Sequence[Sequence[int]]
    ) -> list[Array]:
        """Returns the leaves of a piece, NaN where a leaf is not finite on some rank."""
        pieces, begin = [], 0
        for i, (shape, where) in enumerate(zip(shapes, self._wheres(bucket), strict=True)):
            size = math.prod(shape)
            piece = _back(piece_C[None, begin : begin + size], shape, where)
            pieces.append(jnp.where(bad[i], jnp.nan, piece))
            begin += size
        return pieces

    def _sum(
        self,
        bucket: Bucket,
        x_N: Array,
        key: Array | None,
        step: Array | None,
        error: zero.Errors | None,
    ) -> tuple[Array, zero.Errors | None]:
        def coded(x_N: Array, error: zero.Errors | None) -> tuple:
            way = self._way(bucket, key)._asdict()
            found = zero.reduce_scatter(x_N, **way, state=error)
            return (found, None) if error is None else found

        def plain(x_N: Array, error: zero.Errors | None) -> tuple:
            return lax.psum_scatter(x_N, bucket.axes, scatter_dimension=0, tiled=True), error

        if not self.wire.start_step or step is None:
            return coded(x_N, error)
        return lax.cond(step < self.wire.start_step, plain, coded, x_N, error)

    # ---- one message in two halves, for who has work to put beside them

    def send_bucket(
        self, bucket: Bucket, grads: Sequence[Array], key: Array | None
    ) -> tuple[Array, Array, Array]:
        """Returns what `receive_bucket` needs: the first half of `scatter_bucket`, with a dimension
        of devices. Of leaves that are not stacked, without errors."""
        x_N, bad = self._flat(bucket, grads)
        sent = zero.send(x_N, self._way(bucket, key))
        return lead((sent.rows, sent.bad, bad))

    def receive_bucket(
        self, bucket: Bucket, sent: tuple, key: Array | None, like: Sequence[Array]
    ) -> list[Array]:
        """Returns this rank's pieces. like: of the masters."""
        rows, bad, leaves = led(sent)
        size = self._ranks(bucket) * sum(x.size for x in like)
        found = zero.receive(zero.Sent(rows, bad, None), size, self._way(bucket, key))
        leaves = lax.pmax(leaves, bucket.axes) > 0
        return self._pieces(bucket, found.piece, leaves, [x.shape for x in like])

    def _way(self, bucket: Bucket, key: Array | None) -> zero.Way:
        inside, own = tuple(a for a in bucket.axes if a != NODE), self._own(bucket, key)
        return zero.Way(self.wire.gradients, inside, NODE, own, self.wire.kernels)

    def _own(self, bucket: Bucket, key: Array | None) -> Array | None:
        """Returns a key of the ranks that hold this part of the bucket."""
        if key is None or not bucket.cut:
            return key
        return jax.random.fold_in(key, lax.axis_index(bucket.cut))


def lead(errors: Any) -> Any:
    """Returns errors with the dimension of devices, of which this one is one."""
    return jax.tree.map(lambda x: x[None], errors)


def led(errors: Any) -> Any:
    """Returns errors without the dimension of devices."""
    return jax.tree.map(lambda x: x[0], errors)


def fold(key: Array | None, number: Any) -> Array | None:
    """Returns a key of a bucket, or of a layer; None: of nothing."""
    return None if key is None else jax.random.fold_in(key, number)


def _front(x: Array, where: int, ranks: int) -> Array:
    """Returns (ranks, elements): a leaf cut along a dimension, each rank's part in one row."""
    return jnp.moveaxis(x, where, 0).reshape(ranks, -1)


def _back(rows: Array, shape: Sequence[int], where: int) -> Array:
    """Returns the leaf of this shape whose `_front` is `rows`."""
    moved = (shape[where], *shape[:where], *shape[where + 1 :])
    assert math.prod(moved) == rows.size
    return jnp.moveaxis(rows.reshape(moved), 0, where)
