"""The exchange of data parallelism for a tree of parameters: weights in, their gradients out.

Masters rest cut along the model width over the axes that share their gradient (the rules of
`sharding.rules('full')`), weights in use are whole over them. Between the two lies a codec: what
moves the weights in use after an update is gathered in its `weights`, gradients are summed into
pieces by its `inside` and `between` (parallel/zero.py). parallel/exchange.py says what travels in
one message.

Sources: SDP4Bit (arXiv 2410.15526, section 3), ZeRO++ (arXiv 2306.10209, section 3), and for the
errors that a codec with feedback keeps LoCo (arXiv 2407.04480, section 3).

Legend: W ranks that share a gradient, C elements of a rank's piece of a bucket, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from megajax.core.errors import UserError
from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree, is_words, name
from megajax.models.parts import is_stacked, map_words, select
from megajax.parallel import wire, zero
from megajax.parallel.order import Order, hold, never, order_of
from megajax.parallel.zero import Passes
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation

# ---- buckets
#
# Which parameters travel together in the exchange of data parallelism, and how.
#
# A bucket is what travels at once: the matrices of one layer that share their axes, or one table of
# the vocabulary. Vectors and routers, which are small and may not be rounded, are in no bucket and
# travel as they do without a codec. parallel/exchange.py moves the buckets. Source: SDP4Bit (arXiv
# 2410.15526, section 3), in which norms and biases are not quantized.


Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Wire:
    """What travels. weights, gradients: of megajax.quant.codec, or None: as without a codec.

    difference: weights travel as what the copy in use still lacks of the masters, and the copies
    are part of a run's state; otherwise as they are. start_step: before it gradients travel as
    float32. kernels: which implementation runs what lies between messages, as in
    pallas_kernels/dispatch.py.
    """

    weights: Any
    gradients: Any
    difference: bool
    start_step: int = 0
    kernels: Implementation | None = None


PLAIN = Wire(None, None, False)


def wire_of(cfg: Any) -> Wire:
    """Returns what a run sends. cfg: a JobConfig."""
    if cfg.wire == "none":
        return PLAIN
    chosen = wire.codec(cfg)
    spec = cfg.exchange
    kernels = None if spec.kernels == "auto" else spec.kernels
    return Wire(chosen.weights, chosen, wire.sends_differences(cfg), spec.start_step, kernels)


def refuse_kernels(cfg: Any, device: Any) -> None:
    """Refuses kernels that a device has not, or that would take nothing of a wire.

    cfg: a JobConfig. device: of the run. Raises: UserError.
    """
    if cfg.wire == "none" or cfg.exchange.kernels in ("auto", "reference"):
        return
    flag = f"wire.kernels={cfg.exchange.kernels}"
    if cfg.exchange.kernels == "hopper" and not dispatch.is_hopper(device.device_kind):
        raise UserError(
            f"{flag}: {dispatch.NEEDS}, found {device.device_kind}; nearest: auto (--wire.kernels)"
        )
    used = wire.codec(cfg)
    own = Passes(4 * 2**20, used, 2, 2)  # sizes that the kernels take
    why = [own.why_not(one) for one in own.names]
    if all(why):
        listed = "; ".join(dict.fromkeys(reason for found in why for reason in found))
        raise UserError(
            f"{flag}: the kernels take nothing of --wire={cfg.wire}: {listed}; nearest: auto "
            "(--wire.kernels, --wire)"
        )


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that travel at once. axes: which share their gradient, slow links first. cut: other
    axes that cut all of them: ranks along the rest hold the same part, and must round it alike.
    stacked: their first dimension counts layers, each of which is a message of its own."""

    name: str
    axes: tuple[str, ...]
    cut: tuple[str, ...]
    stacked: bool
    leaves: tuple[int, ...]


def whole_local(layout: Layout, words: Words, x: Array, dtype: Any) -> Array:
    """A matrix in the compute dtype, gathered over the ZeRO axes; a vector as it is.

    A router's matrix is gathered as it is: what it scores may not be rounded. For code inside a
    shard_map over the whole mesh.
    """
    if "embed" not in words:
        return x
    where, axes = _zero_cut(layout, words)
    x = x if "router" in words else x.astype(dtype)
    return lax.all_gather(x, axes, axis=where, tiled=True) if axes else x


def scatter_local(layout: Layout, words: Words, grad: Array) -> Array:
    """Sums a matrix's gradient over the ZeRO axes, leaving each device its own piece."""
    if "embed" not in words:
        return grad
    where, axes = _zero_cut(layout, words)
    return lax.psum_scatter(grad, axes, scatter_dimension=where, tiled=True) if axes else grad


def _zero_cut(layout: Layout, words: Words) -> tuple[int, tuple[str, ...]]:
    """Returns (the dimension of a matrix that ZeRO cuts, the mesh axes that cut it)."""
    where = words.index("embed")
    entry = layout.stored(*words)[where]
    return where, (entry,) if isinstance(entry, str) else tuple(entry or ())


def is_quantized(words: Words) -> bool:
    """Tells the matrices and tables that travel in a codec: not vectors, not routers."""
    return "embed" in words and "router" not in words


# ---- exchange local
#
# What one rank does in the exchange of a tree: buckets made flat, sent, and taken apart again.
#
# For code inside a shard_map over the whole mesh: pipelines call it as it is, parallel/exchange.py
# puts a shard_map around it. parallel/exchange.py says what travels in one message,
# parallel/zero.py how.
#
# Errors, of a codec with feedback, are a tuple with a zero.Errors a bucket, stacked like its
# leaves; None: the codec has none.
#
# Legend: C elements of a rank's piece of a bucket, N of all pieces, L layers.


NODE = "node"


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


# ---- exchange: one object


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of the leaves of one tree.

    axes: the words of the leaves. masters, used: the layouts of the masters and of the weights in
    use. dtype: of weights in use. trains: a tree of bools like axes, False where a leaf has no
    gradient; None: all are trained.

    Methods whose name ends in `local`, `_bucket` or begins with an underscore run inside a
    shard_map over the whole mesh; the others are called under an Explicit mesh.

    Errors, of a codec with feedback, are a tuple with a zero.Errors a bucket, stacked like its
    leaves; None: the codec has none. Outside of a shard_map they have one more dimension in front,
    of all devices of the mesh, each of which has errors of its own.
    """

    axes: Tree
    masters: Layout
    used: Layout
    wire: Wire
    dtype: Any
    trains: Tree = None

    def part(self, pick: Callable[[Tree], Tree], words: Callable[[Words], Words]) -> Self:
        """Returns the same of a part of the tree, whose leaves have other words."""
        return dataclasses.replace(
            self,
            axes=map_words(words, pick(self.axes)),
            trains=None if self.trains is None else pick(self.trains),
        )

    def trained(self, tree: Tree) -> Tree:
        """Returns a tree with None in the place of the leaves that have no gradient."""
        return tree if self.trains is None else select(self.trains, tree)

    @functools.cached_property
    def frozen(self) -> frozenset[int]:
        """The leaves that have no gradient."""
        if self.trains is None:
            return frozenset()
        trains = self._structure.flatten_up_to(self.trains)
        return frozenset(i for i, is_trained in enumerate(trains) if not is_trained)

    @functools.cached_property
    def words(self) -> list[Words]:
        """The words of each leaf, in the tree's order."""
        return jax.tree.leaves(self.axes, is_leaf=is_words)

    @functools.cached_property
    def names(self) -> list[str]:
        """The dotted name of each leaf."""
        leaves = jax.tree_util.tree_leaves_with_path(self.axes, is_leaf=is_words)
        return [name(path) for path, _ in leaves]

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """What travels quantized, in the tree's order."""
        found: dict[tuple[str, tuple[str, ...], tuple[str, ...], bool], list[int]] = {}
        if self.wire.weights is None:
            return ()
        for index, words in enumerate(self.words):
            # What is frozen never changes: a codec would only lose some of it.
            if not is_quantized(words) or index in self.frozen:
                continue
            group = self.names[index].split(".")[0] if is_stacked(words) else "rest"
            if {"vocab", "positions"} & set(words):
                group = self.names[index]
            axes = self.masters.partial(*words)
            cut = tuple(a for a in self._cut(words) if a not in axes)
            found.setdefault((group, axes, cut, is_stacked(words)), []).append(index)
        return tuple(Bucket(*named, tuple(leaves)) for named, leaves in found.items())

    @functools.cached_property
    def exact(self) -> tuple[int, ...]:
        """The leaves that are in no bucket."""
        taken = {i for bucket in self.buckets for i in bucket.leaves}
        return tuple(i for i in range(len(self.words)) if i not in taken)

    @functools.cached_property
    def exact_gradients(self) -> tuple[int, ...]:
        """The leaves that are in no bucket and have a gradient."""
        return tuple(i for i in self.exact if i not in self.frozen)

    def wire_bytes(self, params: Tree, chunks: int = 1) -> dict[str, tuple[int, float]]:
        """Returns {level: (bytes of a step on one device, numbers that they stand for)}.

        params: arrays or ShapeDtypeStructs, the masters. chunks: of a pipeline's stage, each of
        which is a message. Levels and bytes are those of zero.wire_bytes: what a device gives the
        collectives of all buckets, in the order weights, inside, between; empty: no bucket.
        """
        found: dict[str, tuple[int, float]] = {}
        for bucket in self.buckets:
            own, count = self._message(bucket, params, chunks)
            n = own.n
            numbers = {"weights": n, "inside": n, "between": n / own.ranks}
            sent = zero.wire_bytes(n, self.wire.gradients, own.nodes, own.ranks)
            for level in ("weights", "inside", "between"):
                if sent[level]:
                    nbytes, stands = found.get(level, (0, 0.0))
                    found[level] = nbytes + count * sent[level], stands + count * numbers[level]
        return found

    def plain_passes(self, params: Tree, chunks: int = 1) -> dict[str, dict[str, list[str]]]:
        """Returns {bucket: {pass: why it runs in plain JAX; empty: a kernel runs it}}.

        params, chunks: as of wire_bytes. Call it under the mesh.
        """
        found: dict[str, dict[str, list[str]]] = {}
        for bucket in self.buckets:
            own, _ = self._message(bucket, params, chunks)
            passes = found.setdefault(bucket.name, {})
            for one in own.names:
                passes[one] = passes.get(one) or own.why_plain(one)
        return found

    def _message(self, bucket: Bucket, params: Tree, chunks: int) -> tuple[Passes, int]:
        """Returns (the passes of one of a bucket's messages, of how many a step)."""
        values, sizes = self._values(params), self.masters.mesh.shape
        ranks, nodes = self._ranks(bucket), sizes["node"] if "node" in bucket.axes else 1
        count = chunks
        if bucket.stacked and sizes["pipe"] == 1:
            count = values[bucket.leaves[0]].shape[0]
        count = count if bucket.stacked else 1
        n = ranks * sum(self._own_size(i, values[i].shape) for i in bucket.leaves) // count
        wire = self.wire
        return Passes(n, wire.gradients, nodes, ranks // nodes, wire.kernels, self.dtype), count

    def _own_size(self, index: int, shape: tuple[int, ...]) -> int:
        """The elements of a device's piece of a master."""
        at = self.masters.named(self.masters.stored(*self.words[index]))
        return math.prod(at.shard_shape(shape))

    def _cut(self, words: Words) -> list[str]:
        """The axes that cut a master, in the order of the mesh."""
        entries = self.masters.stored(*words)
        found = {a for e in entries for a in ((e,) if isinstance(e, str) else e or ())}
        return [a for a in self.masters.mesh.axis_names if a in found]

    # ---- pieces

    def _ranks(self, bucket: Bucket) -> int:
        return self.masters.ways(bucket.axes)

    def _wheres(self, bucket: Bucket) -> list[int]:
        """The dimension of each leaf, of one layer if they are stacked, that the ranks cut."""
        return [self.words[i].index("embed") - bucket.stacked for i in bucket.leaves]

    def _whole(self, index: int) -> P:
        """How a weight in use rests, with gradients that are partial sums of the ranks."""
        words = self.words[index]
        spec = self.used.stored(*words)
        if self.masters.stored(*words) == spec:
            return spec
        return spec.update(reduced=set(self.used.live(self.used.partial(*words))))

    def _specs(self, bucket: Bucket, layout: Layout) -> list[P]:
        return [layout.stored(*self.words[i]) for i in bucket.leaves]

    def _tree(self, leaves: Sequence[Any]) -> Tree:
        return self._structure.unflatten(leaves)

    def _values(self, tree: Tree) -> list[Any]:
        """The leaves, None where a tree has None: integers of packed weights have no gradient."""
        return self._structure.flatten_up_to(tree)

    @functools.cached_property
    def _structure(self) -> Any:
        return jax.tree.structure(self.axes, is_leaf=is_words)

    # ---- what one rank does, inside a shard_map

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

    # ---- under an Explicit mesh

    def copies(self, params: Tree) -> Tree:
        """Returns the first copies: the masters in the type of compute, None for leaves that are in
        no bucket. None: no copies are kept."""
        if not self.wire.difference:
            return None
        copies, values = [None] * len(self.words), self._values(params)
        for i in (i for bucket in self.buckets for i in bucket.leaves):
            copies[i] = reshard(values[i].astype(self.dtype), self.used.stored(*self.words[i]))
        return self._tree(copies)

    def copied_specs(self) -> Tree:
        """Returns how `copies` lie, None where there is none."""
        specs = [self.used.stored(*words) for words in self.words]
        return self._tree([None if i in self.exact else s for i, s in enumerate(specs)])

    def errors(self, params: Tree) -> Any:
        """Returns the first errors: zeros."""
        if not self.keeps_errors:
            return None
        specs = self._tree([self.masters.stored(*words) for words in self.words])
        return self._everywhere(
            lambda params: lead(self.errors_local(params)), (specs,), self.devices
        )(params)

    @property
    def devices(self) -> P:
        """How an array lies whose first dimension counts all devices."""
        return P(self.masters.mesh.axis_names)

    def fetch(
        self, params: Tree, copies: Tree, key: Array, step: Array
    ) -> tuple[Tree, Tree, Array]:
        """`gather`, whose gradient is `scatter`. step: int32, of the gradients."""

        @jax.custom_vjp
        def through(params: Tree, copies: Tree, key: Array, step: Array) -> tuple:
            return self.gather(params, copies, key)

        def forward(params: Tree, copies: Tree, key: Array, step: Array) -> tuple:
            return through(params, copies, key, step), (key, step)

        def backward(saved: tuple, grads: tuple) -> tuple:
            return self.scatter(grads[0], *saved)[0], None, None, None

        through.defvjp(forward, backward)
        weights, new, squares = through(params, copies, key, step)
        return weights, *lax.stop_gradient((new, squares))

    def gather(self, params: Tree, copies: Tree, key: Array) -> tuple[Tree, Tree, Array]:
        """Returns (the weights in use, the new copies, squares (devices, 2): each device's part of
        the sum of what the weights still lack of the masters, and of these).

        params: the masters. copies: as `copies` gave them or the last step did.
        """
        masters = self._values(params)
        old = self._values(copies) if self.wire.difference else []
        weights, new = list(masters), list(old)
        squares, turn = self.squares(), None
        for i in self.exact:
            w = masters[i].astype(self.dtype) if is_quantized(self.words[i]) else masters[i]
            weights[i] = reshard(w, self._whole(i))
        for number, bucket in enumerate(self.buckets):
            mine = [masters[i] for i in bucket.leaves]
            held = [old[i] for i in bucket.leaves] if old else None
            (moved, two), turn = self._in_turn(
                functools.partial(self.gather_bucket, bucket),
                (self._specs(bucket, self.masters), held and self._specs(bucket, self.used), P()),
                (self._specs(bucket, self.used), self.devices),
            )(turn, mine, held, fold(key, number))
            squares += two
            for i, x in zip(bucket.leaves, moved, strict=True):
                weights[i] = reshard(x.astype(self.dtype), self._whole(i))
                if old:
                    new[i] = x
        specs = [self._whole(i) for i in range(len(weights))]
        weights = self._after(turn, weights, specs)
        return self._tree(weights), self._tree(new) if old else None, squares

    def scatter(self, grads: Tree, key: Array, step: Array, errors: Any = None) -> tuple[Tree, Any]:
        """Returns (the gradients of the masters, float32, cut as these; the new errors).

        grads: of the weights in use, partial sums on each rank where `gather` says so. errors: as
        `errors` gave them or the last step did; None: nothing is fed back.
        """
        values = self._values(grads)
        specs = [self.masters.stored(*words) for words in self.words]
        live = [i for i in range(len(values)) if i not in self.frozen]
        turn = self._turn([values[i] for i in live], [self._sums(i) for i in live])
        found: list[Any] = [None] * len(values)
        after = []
        for i in self.exact_gradients:
            found[i] = reshard(values[i], specs[i])
        for number, bucket in enumerate(self.buckets):
            error = None if errors is None else errors[number]
            (pieces, error), turn = self._in_turn(
                functools.partial(self._scatter_led, bucket),
                (self._partial(bucket), P(), P(), self.devices),
                (self._specs(bucket, self.masters), self.devices),
            )(turn, [values[i] for i in bucket.leaves], fold(key, number), step, error)
            after.append(error)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                found[i] = x
        ordered = self._after(turn, [found[i] for i in live], [specs[i] for i in live])
        for i, x in zip(live, ordered, strict=True):
            found[i] = x
        return self._tree(found), None if errors is None else tuple(after)

    def squares(self) -> Array:
        """Returns the zeros that the squares of `gather` are added to."""
        return reshard(jnp.zeros((self.masters.mesh.size, 2)), self.devices)

    # ---- one layer, in two halves, for who has work to put beside them

    def send(self, grads: Tree, key: Array, sums: Any = None, index: Any = None) -> dict:
        """Returns what `receive` needs: the first half of `scatter`, of leaves that are not
        stacked. grads: as of `scatter`. sums: of `summed`, of which `index` is added; None: none.
        """
        values, exact = self._values(grads), []
        for number, i in enumerate(self.exact_gradients):
            found = reshard(values[i], self.masters.stored(*self.words[i]))
            if sums is not None:
                more = lax.dynamic_index_in_dim(sums["exact"][number], index, keepdims=False)
                found = more + found.astype(more.dtype)
            exact.append(found)
        sent: dict[str, Any] = {"exact": exact}
        for number, bucket in enumerate(self.buckets):
            more = None if sums is None else sums[str(number)]
            sent[str(number)] = self._everywhere(
                functools.partial(self._send_added, bucket),
                (self._partial(bucket), P(), self.devices, P()),
                self.devices,
            )([values[i] for i in bucket.leaves], fold(key, number), more, index)
        return sent

    def summed(self, sums: Tree) -> dict:
        """Returns stacked partial sums as `send` adds them: leaves that are in no bucket are small,
        and summed over the ranks here."""
        values = self._values(sums)
        found: dict[str, Any] = {
            "exact": [
                reshard(values[i], _stacked(self.masters.stored(*self.words[i])))
                for i in self.exact_gradients
            ]
        }
        # Loops and custom_vjp of jax 0.11.2 take partial sums, and XLA adds them up before: as
        # arrays with a dimension of devices they stay what each rank has.
        for number, bucket in enumerate(self.buckets):
            specs = [_stacked(spec) for spec in self._partial(bucket)]
            found[str(number)] = self._everywhere(lead, (specs,), self.devices)(
                [values[i] for i in bucket.leaves]
            )
        return found

    def _send_added(
        self, bucket: Bucket, grads: list[Array], key: Array, sums: Any, index: Any
    ) -> tuple:
        if sums is not None:
            grads = [
                lax.dynamic_index_in_dim(s, index, keepdims=False) + g.astype(s.dtype)
                for s, g in zip(led(sums), grads, strict=True)
            ]
        return self.send_bucket(bucket, grads, key)

    def leave(self, params: Tree, used: Tree, sums: Tree, key: Array, step: Array) -> Tree:
        """Returns the weights in use, whose gradient is `scatter` of it and of sums.

        sums: of earlier micro-batches, float32, partial sums as gradients of `used` are; None where
        a leaf has no gradient.
        """

        @jax.custom_vjp
        def through(params: Tree) -> Tree:
            return used

        def backward(_: None, grads: Tree) -> tuple:
            added = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, self.trained(grads))
            return (self.scatter(added, key, step)[0],)

        through.defvjp(lambda params: (used, None), backward)
        return through(params)

    def receive(self, sent: dict, key: Array, like: Tree) -> Tree:
        """Returns what `scatter` does. key: as of `send`. like: the masters."""
        masters = self._values(like)
        found: list[Any] = [None] * len(masters)
        for i, x in zip(self.exact_gradients, sent["exact"], strict=True):
            found[i] = x
        for number, bucket in enumerate(self.buckets):
            shapes = [masters[i] for i in bucket.leaves]
            pieces = self._everywhere(
                functools.partial(self.receive_bucket, bucket),
                (self.devices, P(), self._specs(bucket, self.masters)),
                self._specs(bucket, self.masters),
            )(sent[str(number)], fold(key, number), shapes)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                found[i] = x
        return self._tree(found)

    def in_use(self, params: Tree, copies: Tree) -> Tree:
        """Returns the weights in use of copies that a `gather` gave; what is in no bucket comes
        from the masters."""
        masters, held = self._values(params), self._values(copies)
        for i in range(len(masters)):
            x = masters[i] if i in self.exact else held[i]
            masters[i] = reshard(
                x.astype(self.dtype) if is_quantized(self.words[i]) else x, self._whole(i)
            )
        return self._tree(masters)

    def _partial(self, bucket: Bucket) -> list[P]:
        """How gradients of weights in use lie: partial sums."""
        return [self._sums(i) for i in bucket.leaves]

    def _sums(self, index: int) -> P:
        whole = self._whole(index)
        return P(*whole.partitions, unreduced=whole.reduced)

    # ---- order on emulated devices (parallel/order.py): a turn is `never` of each device, or None

    def _in_turn(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns (turn, *args) -> (what `local` returns, the turn of what comes after it)."""
        if not self.order.emulated:
            call = self._everywhere(local, in_specs, out_specs)
            return lambda _, *args: (call(*args), None)

        def held(turn: Array | None, *args: Any) -> tuple[Any, Array]:
            found = local(*(args if turn is None else hold(args, turn[0])))
            return found, never(found)[None]

        return self._everywhere(held, (self.devices, *in_specs), (out_specs, self.devices))

    def _turn(self, values: list, specs: list[P]) -> Array | None:
        """Returns the turn of what comes after all values."""
        if not self.order.emulated:
            return None
        return self._everywhere(lambda x: never(x)[None], (specs,), self.devices)(values)

    def _after(self, turn: Array | None, values: list, specs: list[P]) -> list:
        """Returns the values in a turn."""
        if turn is None:
            return values
        plain = [P(*spec.partitions) for spec in specs]
        held = self._everywhere(
            lambda turn, values: hold(values, turn[0]), (self.devices, plain), plain
        )(turn, [reshard(x, spec) for x, spec in zip(values, plain, strict=True)])
        return [reshard(x, spec) for x, spec in zip(held, specs, strict=True)]

    def _everywhere(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        # The checker does not see that what was gathered is equal on all ranks.
        return jax.shard_map(
            local,
            mesh=self.masters.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


def _stacked(spec: P) -> P:
    """How a stack of layers lies, given how one does."""
    return P(None, *spec.partitions, unreduced=spec.unreduced, reduced=spec.reduced)


# ---- residuals
#
# What a layer's forward pass keeps for its backward pass, apart from its weights.
#
# A loop over layers that differentiates each by itself stacks what they keep. Weights, which lie in
# buffers of their own, must not be stacked again.


def detach(vjp: Any) -> tuple:
    """Returns the residuals of a jax.vjp(layer, weights, x, *others) without weights and others.

    Only this way a buffer of residuals holds activations alone (jax 0.11.2 keeps arguments apart).
    """
    return vjp.args_res[1], vjp.opaque_residuals, vjp.structured_residuals


def attach(template: Any, residuals: tuple, weights: Tree, *others: Tree) -> Callable:
    """Returns the vjp whose residuals were detached, with its weights and others again.

    template: such a vjp, of jax.eval_shape.
    """
    x, opaque, structured = residuals

    def fill(wanted: Any, given: Tree) -> Any:
        """The given leaves where the vjp keeps one; what it does not need has no leaf."""
        places, tree = jax.tree.flatten(wanted, is_leaf=lambda p: not isinstance(p, tuple | list))
        pairs = zip(places, jax.tree.leaves(given), strict=True)
        return tree.unflatten([leaf if jax.tree.leaves(place) else place for place, leaf in pairs])

    own, _, *shared = template.args_res
    filled = [fill(place, given) for place, given in zip(shared, others, strict=True)]
    return template.replace(
        args_res=[fill(own, weights), x, *filled],
        opaque_residuals=opaque,
        structured_residuals=structured,
    )


# ---- streamed
#
# A stack of layers whose weights and gradients travel beside its own work.
#
# Forward, each layer's weights are fetched while the layer before it computes. Backward, in the
# turn of layer i the gradients of layer i + 1 travel inside the nodes, and those of layer i + 2,
# which did so a turn before, between the nodes: no message waits for another, and each ends with
# the turn. The loop is written out, because the transposition of the forward loop leaves it to the
# compiler where a message ends, and XLA's scheduler ends it where it began (compiled for H100, jax
# 0.11.2).
#
# Weights are not kept for the backward pass a second time: they are in the new copies, or in a
# buffer of their own where there are none.
#
# Of several micro-batches the weights are there already for the last one (`Streamed.leave`), and
# the gradients of the others are added, layer by layer, to what it sends.
#
# Legend: L layers, x the residual stream.


class Way(NamedTuple):
    """What travels backward. dx: of the residual stream. grads: of the layer after this one. sent:
    of the one after that, between its two halves."""

    dx: Array
    grads: Tree
    sent: Any


class Streamed:
    """Runs the layers of one step."""

    def __init__(self, exchange: Exchange, step: Callable, key: Array):
        """exchange: of one layer. step(x, (weights, index)) -> (x, y). key: layers fold their
        numbers into it."""
        self._exchange, self._step, self._key = exchange, step, key

    def run(self, x: Array, masters: Tree, copies: Tree) -> tuple[Array, Any, Tree, Array]:
        """Returns (x, stacked ys, the new copies, squares as of Exchange.gather).

        masters, copies: stacked. Gradients of the masters are pieces, as of Exchange.scatter.
        """

        @jax.custom_vjp
        def through(x: Array, masters: Tree, copies: Tree) -> tuple:
            return self._forward(x, masters, copies)[0]

        def backward(saved: tuple, given: tuple) -> tuple:
            return *self._backward(saved, *given[:2]), None

        through.defvjp(self._forward, backward)
        x, ys, copies, squares = through(x, masters, copies)
        return x, ys, *lax.stop_gradient((copies, squares))

    def leave(self, x: Array, masters: Tree, used: Tree, sums: Tree) -> tuple[Array, Any]:
        """Returns (x, stacked ys) of weights in use that are there already.

        used: stacked; their values only. sums: stacked gradients of earlier micro-batches, float32,
        partial sums as `used` has them. Gradients of the masters are pieces of all of them.
        """

        @jax.custom_vjp
        def through(x: Array, masters: Tree) -> tuple:
            return forward(x, masters)[0]

        def forward(x: Array, masters: Tree) -> tuple[tuple, tuple]:
            def one(x: Array, item: tuple) -> tuple[Array, tuple]:
                x, y, kept = self._layer(x, item[1], item[0])
                return x, (y, kept)

            items = (jnp.arange(len(jax.tree.leaves(masters)[0])), used)
            x, (ys, kept) = lax.scan(one, x, items)
            return (x, ys), (masters, kept)

        def backward(saved: tuple, given: tuple) -> tuple:
            (masters, kept), (dx, dys) = saved, given
            return self._backward((masters, None, (kept, used), None), dx, dys, sums)

        through.defvjp(forward, backward)
        return through(x, masters)

    # ---- forward

    def _forward(self, x: Array, masters: Tree, copies: Tree) -> tuple[tuple, tuple]:
        count = len(jax.tree.leaves(masters)[0])

        def both(carry: tuple, item: tuple) -> tuple[tuple, tuple]:
            x, weights, copies, squares = carry
            index, mine = item
            coming, copies, more = self._fetch(mine, copies, index + 1)
            x, y, kept = self._layer(x, weights, index)
            return (x, coming, copies, squares + more), (y, kept, self._spare(weights, copies))

        first, following = _at(masters, 0), jax.tree.map(lambda w: w[1:], masters)
        carry = (x, *self._fetch(first, copies, jnp.int32(0)))
        indices = jnp.arange(count - 1)
        (x, weights, copies, squares), stacked = lax.scan(both, carry, (indices, following))
        x, y, kept = self._layer(x, weights, jnp.int32(count - 1))
        last = (y, kept, self._spare(weights, copies))
        ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), stacked[0], y)
        return (x, ys, copies, squares), (masters, copies, stacked[1:], last[1:])

    def _fetch(self, mine: Tree, copies: Tree, index: Array) -> tuple[Tree, Tree, Array]:
        """Returns (a layer's weights, the copies with its own replaced where they lie, squares)."""
        put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        weights, new, squares = self._exchange.gather(mine, _take(copies, index), self._own(index))
        return weights, jax.tree.map(put, copies, new), squares

    def _layer(self, x: Array, weights: Tree, index: Array) -> tuple[Array, Any, Any]:
        """Returns (x, y, what the backward pass needs beside the weights)."""
        (x, y), vjp = jax.vjp(self._function(index), weights, x)
        return x, y, detach(vjp)

    def _function(self, index: Array) -> Callable:
        return lambda weights, x: self._step(x, (weights, index))

    def _spare(self, weights: Tree, copies: Tree) -> Tree:
        """Weights that the backward pass would not find in the copies."""
        return weights if copies is None else None

    # ---- backward

    def _backward(self, saved: tuple, dx: Array, dys: Any, sums: Tree = None) -> tuple[Array, Tree]:
        """saved: of `_forward`. sums: as of `leave`."""
        masters, copies, stacked, last = saved
        count = len(jax.tree.leaves(masters)[0])
        floats, rebuild = _floating(dys)

        def turn(way: Way, index: Array, item: tuple) -> tuple[Way, Tree]:
            """Differentiates a layer beside the messages of the two after it."""
            mine, dy, (kept, weights) = item
            if copies is not None:
                weights = self._exchange.in_use(mine, _take(copies, index))
            pieces = sent = None
            if way.sent is not None:
                pieces = self._exchange.receive(way.sent, self._own(index + 2), mine)
            if way.grads is not None:
                sent = self._send(way.grads, sums, index + 1)
            template = jax.eval_shape(
                lambda w, x: jax.vjp(self._function(jnp.int32(0)), w, x)[1], weights, way.dx
            )
            grads, dx = attach(template, kept, weights)((way.dx, rebuild(dy)))
            return Way(dx, self._exchange.trained(grads), sent), pieces

        def at(index: int) -> tuple:
            own = last if index == count - 1 and last is not None else _at(stacked, index)
            return _at(masters, index), _at(floats, index), own

        way = Way(dx, None, None)
        for index in range(count - 1, max(count - 3, -1), -1):
            way, _ = turn(way, jnp.int32(index), at(index))
        body: Tree = None
        if count > 2:
            items = jax.tree.map(lambda a: a[: count - 2], (masters, floats, stacked))
            body_of = lambda way, item: turn(way, item[0], item[1])  # noqa: E731
            way, body = lax.scan(body_of, way, (jnp.arange(count - 2), items), reverse=True)
        ends = (
            []
            if way.sent is None
            else [self._exchange.receive(way.sent, self._own(jnp.int32(1)), _at(masters, 1))]
        )
        sent = self._send(way.grads, sums, jnp.int32(0))
        ends = [self._exchange.receive(sent, self._own(jnp.int32(0)), _at(masters, 0)), *ends]
        ends = jax.tree.map(lambda *rows: jnp.stack(rows), *ends)
        if body is not None:
            ends = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ends, body)
        return way.dx, ends

    def _send(self, grads: Tree, sums: Tree, index: Array) -> Any:
        return self._exchange.send(grads, self._own(index), sums, index)

    def _own(self, index: Array) -> Array:
        return jax.random.fold_in(self._key, index)


def _at(tree: Tree, index: int) -> Tree:
    return jax.tree.map(lambda x: x[index], tree)


def _take(tree: Tree, index: Array) -> Tree:
    take = functools.partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(take, tree)


def _floating(dys: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """Returns (the leaves of stacked cotangents that a loop can cut, one layer's -> its tree).

    The others are of integers: JAX's own zeros, of a type that no loop takes.
    """
    leaves, tree = jax.tree.flatten(dys)
    real = [x.dtype != jax.dtypes.float0 for x in leaves]

    def rebuild(floats: list[Array]) -> Any:
        given = iter(floats)
        return tree.unflatten(
            [
                next(given) if is_real else np.zeros(x.shape[1:], jax.dtypes.float0)
                for x, is_real in zip(leaves, real, strict=True)
            ]
        )

    return [x for x, is_real in zip(leaves, real, strict=True) if is_real], rebuild
