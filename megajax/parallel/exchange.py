"""The exchange of data parallelism for a tree of parameters: weights in, their gradients out.

Masters rest cut along the model width over the axes that share their gradient (the rules of
`sharding.rules('full')`), weights in use are whole over them. Between the two lies a codec: what
moves the weights in use after an update is gathered in its `weights`, gradients are summed into
pieces by its `inside` and `between` (parallel/zero.py has one message).

A bucket is what travels in one message: the matrices of one layer that share their axes, or one
table of the vocabulary. Vectors and routers are small and may not be rounded; they are in no bucket
and travel as they do without a codec.

The file follows a step: what travels (Wire, Bucket), the order of collectives on emulated devices,
the Exchange, whose methods are in the order gather, scatter, one layer, one bucket, and the loop
over layers that exchanges them one by one.

Sources: SDP4Bit (arXiv 2410.15526, section 3; norms and biases are not quantized), ZeRO++ (arXiv
2306.10209, section 3), and for the errors that a codec with feedback keeps LoCo (arXiv 2407.04480,
section 3).

Legend: W ranks that share a gradient, C elements of a rank's piece of a bucket, N of all pieces, L
layers.
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
from jax.sharding import Mesh, reshard
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree, is_words, name
from megajax.models.parts import is_stacked, map_words, select
from megajax.parallel import wire, zero
from megajax.parallel.zero import Passes
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation

Array = jax.Array
NODE = "node"

# ---- what travels


@dataclasses.dataclass(frozen=True)
class Wire:
    """The codecs of an exchange.

    weights, gradients: of megajax.quant.codec; None: weights and gradients travel as they do
    without a codec. difference: each rank keeps a copy of the weights as part of a run's state, and
    the masters travel as their difference from the copy; otherwise weights travel as they are.
    start_step: gradients travel as float32 before this step. kernels: which implementation computes
    between messages, as in pallas_kernels/dispatch.py.
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
    """Refuses kernels that the device cannot run, or that would run no pass of the wire.

    cfg: a JobConfig. device: one device of the run. Raises: UserError.
    """
    if cfg.wire == "none" or cfg.exchange.kernels in ("auto", "reference"):
        return
    flag = f"wire.kernels={cfg.exchange.kernels}"
    if cfg.exchange.kernels == "hopper" and not dispatch.is_hopper(device.device_kind):
        raise UserError(
            f"{flag}: {dispatch.NEEDS}, found {device.device_kind}; nearest: auto (--wire.kernels)"
        )
    passes = Passes(4 * 2**20, wire.codec(cfg), 2, 2)  # sizes that the kernels take
    why = [passes.why_not(name) for name in passes.names]
    if all(why):
        listed = "; ".join(dict.fromkeys(reason for reasons in why for reason in reasons))
        raise UserError(
            f"{flag}: the kernels take nothing of --wire={cfg.wire}: {listed}; nearest: auto "
            "(--wire.kernels, --wire)"
        )


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that travel in one message.

    axes: the mesh axes whose ranks share the gradient, slow links first. cut: the other axes that
    cut every leaf. Ranks along an axis that is in neither hold the same part of the leaves, and
    must round it to the same bits. stacked: the first dimension of the leaves counts layers, and
    each layer is a message.
    """

    name: str
    axes: tuple[str, ...]
    cut: tuple[str, ...]
    stacked: bool
    leaves: tuple[int, ...]


def whole_local(layout: Layout, words: Words, x: Array, dtype: Any) -> Array:
    """Returns a matrix in the compute dtype, gathered over the ZeRO axes; a vector as it is.

    A router's matrix is not cast, because its scores may not be rounded. For code inside a
    shard_map over the whole mesh.
    """
    if "embed" not in words:
        return x
    where, axes = _zero_cut(layout, words)
    x = x if "router" in words else x.astype(dtype)
    return lax.all_gather(x, axes, axis=where, tiled=True) if axes else x


def scatter_matrix(layout: Layout, words: Words, grad: Array) -> Array:
    """Returns this device's piece of a gradient, summed over the ZeRO axes, inside a shard_map.

    grad: this device's gradient of a complete parameter. Without a dimension `embed` (a vector)
    it is returned unchanged.
    """
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


def add_device_dim(tree: Any) -> Any:
    """Returns arrays of one device with a leading dimension of size 1, which counts the devices of
    the mesh outside a shard_map."""
    return jax.tree.map(lambda x: x[None], tree)


def drop_device_dim(tree: Any) -> Any:
    """Returns arrays without their leading dimension of devices, of which a shard_map has one."""
    return jax.tree.map(lambda x: x[0], tree)


def fold(key: Array | None, number: Any) -> Array | None:
    """Returns the key of a bucket or a layer; None: the codec draws no numbers."""
    return None if key is None else jax.random.fold_in(key, number)


def _front(x: Array, where: int, ranks: int) -> Array:
    """Returns (ranks, elements): a leaf cut along a dimension, each rank's part in one row."""
    return jnp.moveaxis(x, where, 0).reshape(ranks, -1)


def _back(rows: Array, shape: Sequence[int], where: int) -> Array:
    """Returns the leaf of this shape whose `_front` is `rows`."""
    front = (shape[where], *shape[:where], *shape[where + 1 :])
    assert math.prod(front) == rows.size
    return jnp.moveaxis(rows.reshape(front), 0, where)


# ---- order on emulated CPU devices: data dependences that keep collectives in one order
#
# XLA's CPU backend runs a program's operations as soon as their operands are there. Collectives
# start in the order of the schedule, but a loop or a branch counts as started when its first
# operation does: a collective that comes after it in the schedule, and needs nothing of it, may
# overtake the collectives in it, on one device and not on another. These then wait for each other,
# or take what was meant for another collective. Barriers do not help, because the CPU compiler
# removes them before it makes the schedule (jaxlib 0.11.2, xla/runtime/execution_graph.h: edges of
# the kind kScheduling). A GPU starts collectives from one stream in the order of the schedule:
# there nothing is added, and overlap is not lost.
#
# For code inside a shard_map over the whole mesh.


@dataclasses.dataclass(frozen=True)
class Order:
    """How the collectives of one program are ordered. emulated: its devices are CPU devices."""

    emulated: bool

    def after(self, tree: Tree, done: Tree) -> Tree:
        """Returns the tree, on emulated devices once the first element of each array in done is
        there; elsewhere as it is."""
        return hold(tree, never(done)) if self.emulated else tree

    def together(self, tree: Tree) -> Tree:
        """Returns the tree behind an optimization barrier, which emulated devices keep too."""
        tree = lax.optimization_barrier(tree)
        return self.after(tree, tree)


def order_of(mesh: Mesh) -> Order:
    """Returns the order of programs on a mesh."""
    return Order(mesh.size > 1 and mesh.devices.flat[0].platform == "cpu")


def never(done: Tree) -> Array:
    """Returns False (), which takes the first element of each floating array to compute."""
    flag = jnp.bool_(False)
    for x in jax.tree.leaves(done):
        if x.size and jnp.issubdtype(x.dtype, jnp.floating):
            first = x.reshape(-1)[0].astype(jnp.float32)
            flag |= jnp.isnan(first) & jnp.isinf(first)
    return flag


def hold(tree: Tree, nothing: Array) -> Tree:
    """Returns the tree, whose arrays then depend on `nothing`, which is False; not its keys."""

    def one(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return jnp.where(nothing, jnp.zeros_like(x), x)

    return jax.tree.map(one, tree)


# ---- exchange


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of the leaves of one tree.

    axes: the words of the leaves. masters, used: the layouts of the masters and of the weights in
    use. dtype: of weights in use. trains: a tree of bools like axes, False where a leaf has no
    gradient; None: all are trained.

    Methods whose name ends in `_local` or `_bucket` run inside a shard_map over the whole mesh; the
    others are called under an Explicit mesh.

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
    is_ordered: bool = False

    def part(self, pick: Callable[[Tree], Tree], words: Callable[[Words], Words]) -> Self:
        """Returns the exchange of a part of the tree, whose leaves have other words."""
        return dataclasses.replace(
            self,
            axes=map_words(words, pick(self.axes)),
            trains=None if self.trains is None else pick(self.trains),
        )

    # ---- the leaves, and which of them travel together

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
        """The buckets, in the tree's order; empty without a codec."""
        if self.wire.weights is None:
            return ()
        groups: dict[tuple[str, tuple[str, ...], tuple[str, ...], bool], list[int]] = {}
        for index, words in enumerate(self.words):
            # What is frozen never changes: a codec would only lose some of it.
            if not is_quantized(words) or index in self.frozen:
                continue
            group = self.names[index].split(".")[0] if is_stacked(words) else "rest"
            if {"vocab", "positions"} & set(words):
                group = self.names[index]
            axes = self.masters.partial(*words)
            entries = self.masters.stored(*words)
            cut = {a for e in entries for a in ((e,) if isinstance(e, str) else e or ())}
            other = tuple(a for a in self.masters.mesh.axis_names if a in cut and a not in axes)
            groups.setdefault((group, axes, other, is_stacked(words)), []).append(index)
        return tuple(Bucket(*named, tuple(leaves)) for named, leaves in groups.items())

    @functools.cached_property
    def exact(self) -> tuple[int, ...]:
        """The leaves that are in no bucket."""
        in_buckets = {i for bucket in self.buckets for i in bucket.leaves}
        return tuple(i for i in range(len(self.words)) if i not in in_buckets)

    @functools.cached_property
    def exact_gradients(self) -> tuple[int, ...]:
        """The leaves that are in no bucket and have a gradient."""
        return tuple(i for i in self.exact if i not in self.frozen)

    @property
    def keeps_errors(self) -> bool:
        """Tells whether gradients travel in a codec with feedback."""
        return bool(self.buckets) and self.wire.gradients.feedback is not None

    # ---- what a step sends

    def wire_bytes(self, params: Tree, chunks: int = 1) -> dict[str, tuple[int, float]]:
        """Returns {level: (bytes of a step on one device, numbers that they stand for)}.

        params: arrays or ShapeDtypeStructs, the masters. chunks: of a pipeline's stage, each of
        which is a message. Levels and bytes are those of zero.wire_bytes: what a device gives the
        collectives of all buckets, in the order weights, inside, between; empty: no bucket.
        """
        totals: dict[str, tuple[int, float]] = {}
        for bucket in self.buckets:
            passes, count = self._message(bucket, params, chunks)
            n = passes.n
            numbers = {"weights": n, "inside": n, "between": n / passes.ranks}
            sent = zero.wire_bytes(n, self.wire.gradients, passes.nodes, passes.ranks)
            for level in ("weights", "inside", "between"):
                if sent[level]:
                    nbytes, stands = totals.get(level, (0, 0.0))
                    totals[level] = nbytes + count * sent[level], stands + count * numbers[level]
        return totals

    def plain_passes(self, params: Tree, chunks: int = 1) -> dict[str, dict[str, list[str]]]:
        """Returns {bucket: {pass: why it runs in plain JAX; empty: a kernel runs it}}.

        params, chunks: as of wire_bytes. Call it under the mesh.
        """
        reasons: dict[str, dict[str, list[str]]] = {}
        for bucket in self.buckets:
            passes, _ = self._message(bucket, params, chunks)
            of_bucket = reasons.setdefault(bucket.name, {})
            for one in passes.names:
                of_bucket[one] = of_bucket.get(one) or passes.why_plain(one)
        return reasons

    def _message(self, bucket: Bucket, params: Tree, chunks: int) -> tuple[Passes, int]:
        """Returns (the passes of one of a bucket's messages, messages of a step)."""
        values, sizes = self._values(params), self.masters.mesh.shape
        ranks, nodes = self._ranks(bucket), sizes[NODE] if NODE in bucket.axes else 1
        count = chunks
        if bucket.stacked and sizes["pipe"] == 1:
            count = values[bucket.leaves[0]].shape[0]
        count = count if bucket.stacked else 1
        specs = self._specs(bucket, self.masters)
        pieces = [
            math.prod(self.masters.named(spec).shard_shape(values[i].shape))
            for i, spec in zip(bucket.leaves, specs, strict=True)
        ]
        n, wire = ranks * sum(pieces) // count, self.wire
        return Passes(n, wire.gradients, nodes, ranks // nodes, wire.kernels, self.dtype), count

    # ---- state between steps

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
            lambda params: add_device_dim(self.errors_local(params)), (specs,), self.devices
        )(params)

    def errors_local(self, params: Tree) -> Any:
        """Returns this rank's first errors. params: its pieces of the masters."""
        if not self.keeps_errors:
            return None
        values, errors, mesh = self._values(params), [], self.masters.mesh
        for bucket in self.buckets:
            ranks, nodes = self._ranks(bucket), mesh.shape[NODE] if NODE in bucket.axes else 1
            n = ranks * sum(values[i].size for i in bucket.leaves)
            layers = values[bucket.leaves[0]].shape[0] if bucket.stacked else 1
            error = zero.start(n // layers, self.wire.gradients, nodes, ranks // nodes)
            if bucket.stacked:
                error = jax.tree.map(lambda x, n=layers: jnp.stack([x] * n), error)
            errors.append(error)
        return tuple(errors)

    @property
    def devices(self) -> P:
        """How an array lies whose first dimension counts all devices."""
        return P(self.masters.mesh.axis_names)

    # ---- weights in, all at once

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

    def gather(
        self, params: Tree, copies: Tree, key: Array, after: Tree = None
    ) -> tuple[Tree, Tree, Array]:
        """Returns (the weights in use, the new copies, squares (devices, 2): each device's part of
        the sum of what the weights still lack of the masters, and of these).

        params: the masters. copies: as `copies` gave them or the last step did. after: sums of all
        devices that an ordered exchange waits for.
        """
        masters = self._values(params)
        old = self._values(copies) if self.wire.difference else []
        weights, new = list(masters), list(old)
        squares = reshard(jnp.zeros((self.masters.mesh.size, 2)), self.devices)
        previous = self._start(after)
        for i in self.exact:
            w = masters[i].astype(self.dtype) if is_quantized(self.words[i]) else masters[i]
            stored = self.masters.stored(*self.words[i])
            weights[i], previous = self._sent(previous, w, stored, self._in_use(i))
        for number, bucket in enumerate(self.buckets):
            pieces = [masters[i] for i in bucket.leaves]
            bucket_copies = [old[i] for i in bucket.leaves] if old else None
            copied = self._specs(bucket, self.used)
            (gathered, more), previous = self._in_order(
                functools.partial(self.gather_bucket, bucket),
                (self._specs(bucket, self.masters), bucket_copies and copied, P()),
                (copied, self.devices),
            )(previous, pieces, bucket_copies, fold(key, number))
            squares += more
            for i, x in zip(bucket.leaves, gathered, strict=True):
                weights[i] = reshard(x.astype(self.dtype), self._in_use(i))
                if old:
                    new[i] = x
        weights = self._after(previous, weights, [self._in_use(i) for i in range(len(weights))])
        return self._tree(weights), self._tree(new) if old else None, squares

    def in_use(self, params: Tree, copies: Tree) -> Tree:
        """Returns the weights in use of copies that a `gather` gave; what is in no bucket comes
        from the masters."""
        weights, old = self._values(params), self._values(copies)
        for i in range(len(weights)):
            x = weights[i] if i in self.exact else old[i]
            weights[i] = reshard(
                x.astype(self.dtype) if is_quantized(self.words[i]) else x, self._in_use(i)
            )
        return self._tree(weights)

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
            pieces = [masters[i] for i in bucket.leaves]
            bucket_copies = [old[i] for i in bucket.leaves] if old else None
            gathered, more = self.gather_bucket(bucket, pieces, bucket_copies, fold(key, number))
            squares += more
            for i, x in zip(bucket.leaves, gathered, strict=True):
                weights[i] = x.astype(self.dtype)
                if old:
                    new[i] = x
        return self._tree(weights), self._tree(new) if old else None, squares

    def gather_bucket(
        self,
        bucket: Bucket,
        masters: Sequence[Array],
        copies: Sequence[Array] | None,
        key: Array | None,
    ) -> tuple[list[Array], Array]:
        """Returns (the new copies of a bucket's leaves, this device's row (1, 2) of squares)."""
        if not bucket.stacked:
            return self._gather_message(bucket, masters, copies, key)

        def one(squares: Array, item: tuple) -> tuple[Array, list[Array]]:
            index, layer, copies = item
            new, more = self._gather_message(bucket, layer, copies, fold(key, index))
            return squares + more, new

        layers = jnp.arange(masters[0].shape[0])
        squares, new = lax.scan(one, jnp.zeros((1, 2)), (layers, masters, copies))
        return new, squares

    def _gather_message(
        self,
        bucket: Bucket,
        masters: Sequence[Array],
        copies: Sequence[Array] | None,
        key: Array | None,
    ) -> tuple[list[Array], Array]:
        ranks, wheres = self._ranks(bucket), self._wheres(bucket)
        pieces = [_front(x, where, 1) for x, where in zip(masters, wheres, strict=True)]
        main_C = jnp.concatenate(pieces, axis=1)[0]
        if copies is None:
            old = jnp.zeros((ranks, main_C.size), self.dtype)
        else:
            rows = [_front(x, where, ranks) for x, where in zip(copies, wheres, strict=True)]
            old = jnp.concatenate(rows, axis=1)
        codec, key = self.wire.weights, self._part_key(bucket, key)
        new = zero.gather_difference(
            main_C, old.reshape(-1), codec, bucket.axes, key=key, implementation=self.wire.kernels
        )
        new = new.reshape(ranks, -1)
        lossy_C = lax.dynamic_index_in_dim(new, lax.axis_index(bucket.axes), keepdims=False)
        lack_C = main_C - lossy_C.astype(jnp.float32)
        squares = jnp.stack([jnp.sum(lack_C**2), jnp.sum(main_C**2)])[None]
        leaves, begin = [], 0
        for x, where in zip(masters, wheres, strict=True):
            shape = list(x.shape)
            shape[where] *= ranks
            leaves.append(_back(new[:, begin : begin + x.size], shape, where))
            begin += x.size
        return leaves, squares

    # ---- gradients out, all at once

    def scatter(
        self, grads: Tree, key: Array, step: Array, errors: Any = None, after: Tree = None
    ) -> tuple[Tree, Any]:
        """Returns (the gradients of the masters, float32, cut as these; the new errors).

        grads: of the weights in use, partial sums on each rank where `gather` says so. errors: as
        `errors` gave them or the last step did; None: nothing is fed back. after: as of `gather`.
        """
        values = self._values(grads)
        specs = [self.masters.stored(*words) for words in self.words]
        live = [i for i in range(len(values)) if i not in self.frozen]
        if self.is_ordered and after is not None:
            start, partial = self._start(after), [self._sums(i) for i in live]
            values = dict(
                zip(live, self._after(start, [values[i] for i in live], partial), strict=True)
            )
        previous = self._token([values[i] for i in live], [self._sums(i) for i in live])
        summed: list[Any] = [None] * len(specs)
        new_errors = []
        for i in self.exact_gradients:
            moved, previous = self._sent(previous, values[i], self._sums(i), specs[i])
            summed[i] = moved.astype(jnp.float32)
        for number, bucket in enumerate(self.buckets):

            def local(
                grads: Sequence[Array], key: Array, step: Array, error: Any, bucket: Bucket = bucket
            ) -> tuple[list[Array], Any]:
                pieces, error = self.scatter_bucket(
                    bucket, grads, key, step, drop_device_dim(error)
                )
                return pieces, add_device_dim(error)

            error = None if errors is None else errors[number]
            (pieces, error), previous = self._in_order(
                local,
                (self._partial(bucket), P(), P(), self.devices),
                (self._specs(bucket, self.masters), self.devices),
            )(previous, [values[i] for i in bucket.leaves], fold(key, number), step, error)
            new_errors.append(error)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                summed[i] = x
        ordered = self._after(previous, [summed[i] for i in live], [specs[i] for i in live])
        for i, x in zip(live, ordered, strict=True):
            summed[i] = x
        return self._tree(summed), None if errors is None else tuple(new_errors)

    def leave(self, params: Tree, used: Tree, sums: Tree, key: Array, step: Array) -> Tree:
        """Returns the weights in use, whose gradient is the `scatter` of their own and of sums.

        sums: gradients of earlier micro-batches, float32, partial sums as gradients of `used` are;
        None where a leaf has no gradient.
        """

        @jax.custom_vjp
        def through(params: Tree) -> Tree:
            return used

        def backward(_: None, grads: Tree) -> tuple:
            added = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, self.trained(grads))
            return (self.scatter(added, key, step)[0],)

        through.defvjp(lambda params: (used, None), backward)
        return through(params)

    def scatter_local(
        self, grads: Tree, key: Array | None, step: Array | None, errors: Any = None
    ) -> tuple[Tree, Any]:
        """Does what `scatter` does, on local arrays inside a shard_map.

        grads: gradients of the weights that `gather_local` returned. A vector's gradient is not
        summed over ranks; the caller sums it. Returns: (pieces of the gradients, new errors).
        """
        values, new_errors = self._values(grads), []
        summed = [None if i in self.frozen else x for i, x in enumerate(values)]
        for i in self.exact_gradients:
            piece = scatter_matrix(self.masters, self.words[i], values[i])
            summed[i] = piece.astype(jnp.float32)
        order = order_of(self.masters.mesh)
        for number, bucket in enumerate(self.buckets):
            bucket_grads = order.after([values[i] for i in bucket.leaves], summed)
            error = None if errors is None else errors[number]
            pieces, error = self.scatter_bucket(
                bucket, bucket_grads, fold(key, number), step, error
            )
            new_errors.append(error)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                summed[i] = x
        return self._tree(summed), None if errors is None else tuple(new_errors)

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
            return self._scatter_message(bucket, grads, key, step, error)

        def one(_: None, item: tuple) -> tuple[None, tuple]:
            index, layer, error = item
            return None, self._scatter_message(bucket, layer, fold(key, index), step, error)

        return lax.scan(one, None, (jnp.arange(grads[0].shape[0]), grads, error))[1]

    def _scatter_message(
        self,
        bucket: Bucket,
        grads: Sequence[Array],
        key: Array | None,
        step: Array | None,
        error: zero.Errors | None,
    ) -> tuple[list[Array], zero.Errors | None]:
        def coded(x_N: Array, error: zero.Errors | None) -> tuple:
            link = self._link(bucket, key)._asdict()
            summed = zero.reduce_scatter(x_N, **link, state=error)
            return (summed, None) if error is None else summed

        def plain(x_N: Array, error: zero.Errors | None) -> tuple:
            return lax.psum_scatter(x_N, bucket.axes, scatter_dimension=0, tiled=True), error

        x_N, bad = self._flat(bucket, grads)
        if not self.wire.start_step or step is None:
            piece_C, error = coded(x_N, error)
        else:
            piece_C, error = lax.cond(step < self.wire.start_step, plain, coded, x_N, error)
        shapes, ranks = [list(g.shape) for g in grads], self._ranks(bucket)
        for shape, where in zip(shapes, self._wheres(bucket), strict=True):
            shape[where] //= ranks
        bad = lax.pmax(bad, bucket.axes) > 0
        return self._pieces(bucket, piece_C, bad, shapes), error

    def _flat(self, bucket: Bucket, grads: Sequence[Array]) -> tuple[Array, Array]:
        """Returns (a bucket's gradients, a rank's piece after the other; int32 (leaves,): which
        leaves are not finite on this device).

        Zeros stand in the place of leaves that are not finite, so that the other leaves of the
        bucket arrive unharmed.
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

    # ---- gradients of one layer out, in two halves, between which the caller has other work

    def send(self, grads: Tree, key: Array, sums: Any = None, index: Any = None) -> dict:
        """Returns what `receive` needs: the first half of `scatter`, of leaves that are not
        stacked.

        grads: as of `scatter`. sums: of `summed`; the layer of this index is added to the
        gradients. None: nothing is added.
        """
        values, exact = self._values(grads), []
        for number, i in enumerate(self.exact_gradients):
            x = reshard(values[i], self.masters.stored(*self.words[i]))
            if sums is not None:
                more = lax.dynamic_index_in_dim(sums["exact"][number], index, keepdims=False)
                x = more + x.astype(more.dtype)
            exact.append(x)
        sent: dict[str, Any] = {"exact": exact}
        for number, bucket in enumerate(self.buckets):
            sent[str(number)] = self._everywhere(
                functools.partial(self.send_bucket, bucket),
                (self._partial(bucket), P(), self.devices, P()),
                self.devices,
            )(
                [values[i] for i in bucket.leaves],
                fold(key, number),
                None if sums is None else sums[str(number)],
                index,
            )
        return sent

    def receive(self, sent: dict, key: Array, like: Tree) -> Tree:
        """Returns what `scatter` does. key: as of `send`. like: the masters."""
        masters = self._values(like)
        summed: list[Any] = [None] * len(masters)
        for i, x in zip(self.exact_gradients, sent["exact"], strict=True):
            summed[i] = x.astype(masters[i].dtype)
        for number, bucket in enumerate(self.buckets):
            shapes = [masters[i] for i in bucket.leaves]
            pieces = self._everywhere(
                functools.partial(self.receive_bucket, bucket),
                (self.devices, P(), self._specs(bucket, self.masters)),
                self._specs(bucket, self.masters),
            )(sent[str(number)], fold(key, number), shapes)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                summed[i] = x
        return self._tree(summed)

    def summed(self, sums: Tree) -> dict:
        """Returns stacked partial sums as `send` adds them: leaves that are in no bucket are small,
        and are summed over the ranks here."""

        def stacked(spec: P) -> P:
            return P(None, *spec.partitions, unreduced=spec.unreduced, reduced=spec.reduced)

        values = self._values(sums)
        added: dict[str, Any] = {
            "exact": [
                reshard(values[i], stacked(self.masters.stored(*self.words[i])))
                for i in self.exact_gradients
            ]
        }
        # Loops and custom_vjp of jax 0.11.2 take partial sums, and XLA adds them up before: as
        # arrays with a dimension of devices they stay what each rank has.
        for number, bucket in enumerate(self.buckets):
            specs = [stacked(spec) for spec in self._partial(bucket)]
            added[str(number)] = self._everywhere(add_device_dim, (specs,), self.devices)(
                [values[i] for i in bucket.leaves]
            )
        return added

    def send_bucket(
        self, bucket: Bucket, grads: Sequence[Array], key: Array | None, sums: Any, index: Any
    ) -> tuple[Array, Array, Array]:
        """Returns what `receive_bucket` needs: the first half of `scatter_bucket`, with a dimension
        of devices. Of leaves that are not stacked, without errors. sums, index: as of `send`."""
        if sums is not None:
            grads = [
                lax.dynamic_index_in_dim(s, index, keepdims=False) + g.astype(s.dtype)
                for s, g in zip(drop_device_dim(sums), grads, strict=True)
            ]
        x_N, bad = self._flat(bucket, grads)
        sent = zero.send(x_N, self._link(bucket, key))
        return add_device_dim((sent.rows, sent.bad, bad))

    def receive_bucket(
        self, bucket: Bucket, sent: tuple, key: Array | None, like: Sequence[Array]
    ) -> list[Array]:
        """Returns this rank's pieces of the gradients. like: the masters, for their shapes."""
        rows, bad, leaves = drop_device_dim(sent)
        size = self._ranks(bucket) * sum(x.size for x in like)
        piece_C, _ = zero.receive(zero.Sent(rows, bad, None), size, self._link(bucket, key))
        leaves = lax.pmax(leaves, bucket.axes) > 0
        return self._pieces(bucket, piece_C, leaves, [x.shape for x in like])

    # ---- sizes, shardings and keys of a leaf or a bucket

    def _ranks(self, bucket: Bucket) -> int:
        return math.prod(self.masters.mesh.shape[axis] for axis in bucket.axes)

    def _wheres(self, bucket: Bucket) -> list[int]:
        """The dimension of each leaf, of one layer if they are stacked, that the ranks cut."""
        return [self.words[i].index("embed") - bucket.stacked for i in bucket.leaves]

    def _specs(self, bucket: Bucket, layout: Layout) -> list[P]:
        return [layout.stored(*self.words[i]) for i in bucket.leaves]

    def _in_use(self, index: int) -> P:
        """How a weight in use lies, with gradients that are partial sums of the ranks."""
        words = self.words[index]
        spec = self.used.stored(*words)
        if self.masters.stored(*words) == spec:
            return spec
        return spec.update(reduced=set(self.used.live(self.used.partial(*words))))

    def _sums(self, index: int) -> P:
        """How the gradient of a weight in use lies: partial sums."""
        spec = self._in_use(index)
        return P(*spec.partitions, unreduced=spec.reduced)

    def _partial(self, bucket: Bucket) -> list[P]:
        return [self._sums(i) for i in bucket.leaves]

    def _link(self, bucket: Bucket, key: Array | None) -> zero.Link:
        inside = tuple(a for a in bucket.axes if a != NODE)
        key = self._part_key(bucket, key)
        return zero.Link(self.wire.gradients, inside, NODE, key, self.wire.kernels)

    def _part_key(self, bucket: Bucket, key: Array | None) -> Array | None:
        """Returns the key of the ranks that hold this device's part of the bucket."""
        if key is None or not bucket.cut:
            return key
        return jax.random.fold_in(key, lax.axis_index(bucket.cut))

    @functools.cached_property
    def _structure(self) -> Any:
        return jax.tree.structure(self.axes, is_leaf=is_words)

    def _tree(self, leaves: Sequence[Any]) -> Tree:
        return self._structure.unflatten(leaves)

    def _values(self, tree: Tree) -> list[Any]:
        """The leaves, None where a tree has None: integers of packed weights have no gradient."""
        return self._structure.flatten_up_to(tree)

    # ---- messages in one order: a token is `never` of each device, or None where none is kept

    @property
    def _keeps_order(self) -> bool:
        return self.is_ordered or order_of(self.masters.mesh).emulated

    def _start(self, after: Tree) -> Array | None:
        """Returns the token of sums that every device has."""
        if not self.is_ordered or after is None:
            return None
        leaves = jax.tree.leaves(after)
        return self._token(leaves, [P()] * len(leaves))

    def _sent(self, token: Array | None, x: Array, spec: P, to: P) -> tuple[Array, Array | None]:
        """Returns (x, which lies by `spec`, as it lies by `to`; the token after it). In an ordered
        exchange x waits for the token."""
        if not self.is_ordered:
            return reshard(x, to), token
        moved = reshard(self._after(token, [x], [spec])[0], to)
        return moved, self._token([moved], [to])

    def _in_order(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns (token of what comes before, *args) -> (what `local` returns, its token)."""
        if not self._keeps_order:
            call = self._everywhere(local, in_specs, out_specs)
            return lambda _, *args: (call(*args), None)

        def ordered(token: Array | None, *args: Any) -> tuple[Any, Array]:
            result = local(*(args if token is None else hold(args, token[0])))
            return result, never(result)[None]

        return self._everywhere(ordered, (self.devices, *in_specs), (out_specs, self.devices))

    def _token(self, values: list, specs: list[P]) -> Array | None:
        """Returns the token of all values."""
        if not self._keeps_order:
            return None
        return self._everywhere(lambda x: never(x)[None], (specs,), self.devices)(values)

    def _after(self, token: Array | None, values: list, specs: list[P]) -> list:
        """Returns the values, which then depend on the token."""
        if token is None:
            return values
        plain = [P(*spec.partitions, unreduced=spec.unreduced) for spec in specs]
        ordered = self._everywhere(
            lambda token, values: hold(values, token[0]), (self.devices, plain), plain
        )(token, [reshard(x, spec) for x, spec in zip(values, plain, strict=True)])
        return [reshard(x, spec) for x, spec in zip(ordered, specs, strict=True)]

    def _everywhere(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        # The checker does not see that what was gathered is equal on all ranks.
        return jax.shard_map(
            local,
            mesh=self.masters.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


# ---- a stack of layers whose weights and gradients travel during its own work
#
# Forward, each layer's weights are fetched while the layer before it computes. Backward, while
# layer i is differentiated, the gradients of layer i + 1 travel inside the nodes, and those of
# layer i + 2, which have done so, between the nodes: no message waits for another, and each ends
# before layer i - 1 begins. The loop is written out, because the transposition of the forward loop
# leaves it to the compiler where a message ends, and XLA's scheduler ends it where it began
# (compiled for H100, jax 0.11.2).
#
# Weights are not kept for the backward pass a second time: they are in the new copies, or in a
# buffer of their own where there are none.


class Backward(NamedTuple):
    """What goes from layer to layer in the backward pass.

    dx: the gradient of the residual stream. grads: of the weights of the layer after this one.
    sent: the gradients of the layer after that, between the two halves of their exchange.
    """

    dx: Array
    grads: Tree
    sent: Any


class LayerLoop:
    """Runs the layers of one step."""

    def __init__(self, exchange: Exchange, step: Callable, key: Array):
        """exchange: the exchange of one layer. step(x, (weights, index)) -> (x, y). key: each layer
        folds its number into it."""
        self._exchange, self._step, self._key = exchange, step, key

    def fetch(self, x: Array, masters: Tree, copies: Tree) -> tuple[Array, Any, Tree, Array]:
        """Returns (x, stacked ys, the new copies, squares as of Exchange.gather).

        masters, copies: stacked. Gradients of the masters are pieces, as of Exchange.scatter.
        """

        @jax.custom_vjp
        def through(x: Array, masters: Tree, copies: Tree) -> tuple:
            return self._forward(x, masters, copies)[0]

        def backward(saved: tuple, cotangents: tuple) -> tuple:
            return *self._backward(saved, *cotangents[:2]), None

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
                x, y, residuals = self._layer(x, item[1], item[0])
                return x, (y, residuals)

            items = (jnp.arange(len(jax.tree.leaves(masters)[0])), used)
            x, (ys, residuals) = lax.scan(one, x, items)
            return (x, ys), (masters, residuals)

        def backward(saved: tuple, cotangents: tuple) -> tuple:
            (masters, residuals), (dx, dys) = saved, cotangents
            return self._backward((masters, None, (residuals, used), None), dx, dys, sums)

        through.defvjp(forward, backward)
        return through(x, masters)

    def _forward(self, x: Array, masters: Tree, copies: Tree) -> tuple[tuple, tuple]:
        count = len(jax.tree.leaves(masters)[0])

        def fetch(layer_masters: Tree, copies: Tree, index: Array) -> tuple[Tree, Tree, Array]:
            """Returns (a layer's weights, the copies with the layer's replaced, squares)."""
            put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
            weights, new, squares = self._exchange.gather(
                layer_masters, _take(copies, index), self._layer_key(index)
            )
            return weights, jax.tree.map(put, copies, new), squares

        def both(carry: tuple, item: tuple) -> tuple[tuple, tuple]:
            x, weights, copies, squares = carry
            index, following = item
            coming, copies, more = fetch(following, copies, index + 1)
            x, y, residuals = self._layer(x, weights, index)
            saved = (y, residuals, weights if copies is None else None)
            return (x, coming, copies, squares + more), saved

        first, following = _at(masters, 0), jax.tree.map(lambda w: w[1:], masters)
        carry = (x, *fetch(first, copies, jnp.int32(0)))
        indices = jnp.arange(count - 1)
        (x, weights, copies, squares), stacked = lax.scan(both, carry, (indices, following))
        x, y, residuals = self._layer(x, weights, jnp.int32(count - 1))
        last = (residuals, weights if copies is None else None)
        ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), stacked[0], y)
        return (x, ys, copies, squares), (masters, copies, stacked[1:], last)

    def _layer(self, x: Array, weights: Tree, index: Array) -> tuple[Array, Any, Any]:
        """Returns (x, y, the residuals without the weights)."""
        (x, y), vjp = jax.vjp(lambda weights, x: self._step(x, (weights, index)), weights, x)
        return x, y, detach(vjp)

    def _backward(self, saved: tuple, dx: Array, dys: Any, sums: Tree = None) -> tuple[Array, Tree]:
        """Returns (dx, the pieces of the masters' gradients).

        saved: the residuals of `_forward`. sums: as in `leave`.
        """
        masters, copies, stacked, last = saved
        count = len(jax.tree.leaves(masters)[0])
        floats, rebuild = _floating(dys)

        def send(grads: Tree, index: Array) -> Any:
            return self._exchange.send(grads, self._layer_key(index), sums, index)

        def receive(sent: Any, index: Array, layer_masters: Tree) -> Tree:
            return self._exchange.receive(sent, self._layer_key(index), layer_masters)

        def differentiate(state: Backward, index: Array, item: tuple) -> tuple[Backward, Tree]:
            """Differentiates a layer while the messages of the two after it travel."""
            layer_masters, dy, (residuals, weights) = item
            if copies is not None:
                weights = self._exchange.in_use(layer_masters, _take(copies, index))
            pieces = sent = None
            if state.sent is not None:
                pieces = receive(state.sent, index + 2, layer_masters)
            if state.grads is not None:
                sent = send(state.grads, index + 1)
            template = jax.eval_shape(
                lambda w, x: jax.vjp(lambda w, x: self._step(x, (w, jnp.int32(0))), w, x)[1],
                weights,
                state.dx,
            )
            grads, dx = attach(template, residuals, weights)((state.dx, rebuild(dy)))
            return Backward(dx, self._exchange.trained(grads), sent), pieces

        state = Backward(dx, None, None)
        for index in range(count - 1, max(count - 3, -1), -1):
            stored = last if index == count - 1 and last is not None else _at(stacked, index)
            item = _at(masters, index), _at(floats, index), stored
            state, _ = differentiate(state, jnp.int32(index), item)
        body: Tree = None
        if count > 2:
            items = jax.tree.map(lambda a: a[: count - 2], (masters, floats, stacked))
            step = lambda state, item: differentiate(state, item[0], item[1])  # noqa: E731
            state, body = lax.scan(step, state, (jnp.arange(count - 2), items), reverse=True)
        ends = []
        if state.sent is not None:
            ends = [receive(state.sent, jnp.int32(1), _at(masters, 1))]
        sent = send(state.grads, jnp.int32(0))
        ends = [receive(sent, jnp.int32(0), _at(masters, 0)), *ends]
        ends = jax.tree.map(lambda *rows: jnp.stack(rows), *ends)
        if body is not None:
            ends = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ends, body)
        return state.dx, ends

    def _layer_key(self, index: Array) -> Array:
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
        cotangents = iter(floats)
        return tree.unflatten(
            [
                next(cotangents) if is_real else np.zeros(x.shape[1:], jax.dtypes.float0)
                for x, is_real in zip(leaves, real, strict=True)
            ]
        )

    return [x for x, is_real in zip(leaves, real, strict=True) if is_real], rebuild


# Residuals are what a layer's forward pass stores for its backward pass. A loop over layers that
# differentiates each by itself stacks them, but not the weights, which lie in buffers of their own.


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

    def fill(argument: Any, values: Tree) -> Any:
        """Puts values where the vjp stores one; what it does not need has no leaf."""
        places, tree = jax.tree.flatten(argument, is_leaf=lambda p: not isinstance(p, tuple | list))
        pairs = zip(places, jax.tree.leaves(values), strict=True)
        return tree.unflatten([leaf if jax.tree.leaves(place) else place for place, leaf in pairs])

    stored_weights, _, *stored_others = template.args_res
    filled = [fill(place, values) for place, values in zip(stored_others, others, strict=True)]
    return template.replace(
        args_res=[fill(stored_weights, weights), x, *filled],
        opaque_residuals=opaque,
        structured_residuals=structured,
    )
