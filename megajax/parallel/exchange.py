"""The exchange of data parallelism for a tree of parameters: which leaves travel together, and how.

Masters rest cut along the model width over the axes that share their gradient (the rules of
`sharding.rules('full')`), weights in use are whole over them. Between the two lies a codec: what
moves the weights in use after an update is gathered in its `weights`, gradients are summed into
pieces by its `inside` and `between` (parallel/zero.py). A bucket is what travels at once: the
matrices of one layer that share their axes, or one table of the vocabulary. Vectors and routers,
which are small and may not be rounded, are outside and travel as they do without a codec.

Sources: SDP4Bit (arXiv 2410.15526, section 3), ZeRO++ (arXiv 2306.10209, section 3).

Legend: W ranks that share a gradient, C elements of a rank's piece of a bucket, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree, is_words, name
from megajax.models.parts import is_stacked
from megajax.parallel import wire, zero

Array = jax.Array
NODE = "node"


@dataclasses.dataclass(frozen=True)
class Wire:
    """What travels. weights, gradients: of megajax.quant.codec, or None: as without a codec.

    difference: weights travel as what the copy in use still lacks of the masters, and the copies
    are part of a run's state; otherwise as they are. start_step: before it gradients travel as
    float32.
    """

    weights: Any
    gradients: Any
    difference: bool
    start_step: int = 0


PLAIN = Wire(None, None, False)


def wire_of(cfg: Any) -> Wire:
    """Returns what a run sends. cfg: a JobConfig."""
    if cfg.wire == "none":
        return PLAIN
    chosen = wire.codec(cfg)
    return Wire(chosen.weights, chosen, wire.sends_differences(cfg), cfg.exchange.start_step)


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


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of one tree. axes: the words of its leaves. masters, used: the layouts of the
    masters and of the weights in use. dtype: of weights in use."""

    axes: Tree
    masters: Layout
    used: Layout
    wire: Wire
    dtype: Any

    # ---- which leaves travel how

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
            if not is_quantized(words):
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
            return self.scatter(grads[0], *saved), None, None, None

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
        squares = self.squares()
        for i in self.exact:
            w = masters[i].astype(self.dtype) if is_quantized(self.words[i]) else masters[i]
            weights[i] = reshard(w, self._whole(i))
        for number, bucket in enumerate(self.buckets):
            mine = [masters[i] for i in bucket.leaves]
            held = [old[i] for i in bucket.leaves] if old else None
            moved, two = self._everywhere(
                functools.partial(self.gather_bucket, bucket),
                (self._specs(bucket, self.masters), held and self._specs(bucket, self.used), P()),
                (self._specs(bucket, self.used), P(self.masters.mesh.axis_names)),
            )(mine, held, _fold(key, number))
            squares += two
            for i, x in zip(bucket.leaves, moved, strict=True):
                weights[i] = reshard(x.astype(self.dtype), self._whole(i))
                if old:
                    new[i] = x
        return self._tree(weights), self._tree(new) if old else None, squares

    def scatter(self, grads: Tree, key: Array, step: Array) -> Tree:
        """Returns the gradients of the masters, float32, cut as these.

        grads: of the weights in use, partial sums on each rank where `gather` says so.
        """
        values = self._values(grads)
        found = list(values)
        for i in self.exact:
            found[i] = reshard(values[i], self.masters.stored(*self.words[i]))
        for number, bucket in enumerate(self.buckets):
            pieces = self._everywhere(
                functools.partial(self.scatter_bucket, bucket),
                (self._partial(bucket), P(), P()),
                self._specs(bucket, self.masters),
            )([values[i] for i in bucket.leaves], _fold(key, number), step)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                found[i] = x
        return self._tree(found)

    def squares(self) -> Array:
        """Returns the zeros that the squares of `gather` are added to."""
        mesh = self.masters.mesh
        return reshard(jnp.zeros((mesh.size, 2)), P(mesh.axis_names))

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
            moved, two = self.gather_bucket(bucket, mine, held, _fold(key, number))
            squares += two
            for i, x in zip(bucket.leaves, moved, strict=True):
                weights[i] = x.astype(self.dtype)
                if old:
                    new[i] = x
        return self._tree(weights), self._tree(new) if old else None, squares

    def scatter_local(self, grads: Tree, key: Array | None, step: Array | None) -> Tree:
        """`scatter`, of what `gather_local` gave. Vectors stay sums of this rank's own."""
        values = self._values(grads)
        found = list(values)
        for i in self.exact:
            found[i] = scatter_local(self.masters, self.words[i], values[i])
        for number, bucket in enumerate(self.buckets):
            mine = [values[i] for i in bucket.leaves]
            here = _fold(key, number)
            pieces = self.scatter_bucket(bucket, mine, here, step)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                found[i] = x
        return self._tree(found)

    # ---- one layer, in two halves, for who has work to put beside them

    def send(self, grads: Tree, key: Array) -> dict:
        """Returns what `receive` needs: the first half of `scatter`, of leaves that are not
        stacked. grads: as of `scatter`."""
        values = self._values(grads)
        everywhere = P(self.masters.mesh.axis_names)
        sent: dict[str, Any] = {
            "exact": [reshard(values[i], self.masters.stored(*self.words[i])) for i in self.exact]
        }
        for number, bucket in enumerate(self.buckets):
            sent[str(number)] = self._everywhere(
                functools.partial(self._send, bucket),
                (self._partial(bucket), P()),
                (everywhere, everywhere, everywhere),
            )([values[i] for i in bucket.leaves], _fold(key, number))
        return sent

    def receive(self, sent: dict, key: Array, like: Tree) -> Tree:
        """Returns what `scatter` does. key: as of `send`. like: the masters."""
        masters = self._values(like)
        found = list(masters)
        for i, x in zip(self.exact, sent["exact"], strict=True):
            found[i] = x
        everywhere = P(self.masters.mesh.axis_names)
        for number, bucket in enumerate(self.buckets):
            shapes = [masters[i] for i in bucket.leaves]
            pieces = self._everywhere(
                functools.partial(self._receive, bucket),
                ((everywhere, everywhere, everywhere), P(), self._specs(bucket, self.masters)),
                self._specs(bucket, self.masters),
            )(sent[str(number)], _fold(key, number), shapes)
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

    # ---- on local arrays, inside a shard_map over the whole mesh

    def _send(self, bucket: Bucket, grads: Sequence[Array], key: Array | None) -> tuple:
        x_N, bad = self._flat(bucket, grads)
        sent = zero.send(x_N, self.wire.gradients, **self._ways(bucket, key))
        return sent.rows[None], sent.bad[None], bad[None]

    def _receive(
        self, bucket: Bucket, sent: tuple, key: Array | None, like: Sequence[Array]
    ) -> list[Array]:
        rows, bad, leaves = (x[0] for x in sent)
        size = self._ranks(bucket) * sum(x.size for x in like)
        found = zero.receive(
            zero.Sent(rows, bad, None), size, self.wire.gradients, **self._ways(bucket, key)
        )
        leaves = lax.pmax(leaves, bucket.axes) > 0
        return self._pieces(bucket, found.piece, leaves, [x.shape for x in like])

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
            new, two = self._gather(bucket, mine, held, _fold(key, index))
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
        new = zero.gather_difference(main_C, held.reshape(-1), codec, bucket.axes, key=key)
        new = new.reshape(ranks, -1)
        own = lax.dynamic_index_in_dim(new, lax.axis_index(bucket.axes), keepdims=False)
        squares = jnp.stack([jnp.sum((main_C - own.astype(jnp.float32)) ** 2), jnp.sum(main_C**2)])[None]
        whole, begin = [], 0
        for x, where in zip(masters, wheres, strict=True):
            shape = list(x.shape)
            shape[where] *= ranks
            whole.append(_back(new[:, begin : begin + x.size], shape, where))
            begin += x.size
        return whole, squares

    def scatter_bucket(
        self, bucket: Bucket, grads: Sequence[Array], key: Array | None, step: Array | None
    ) -> list[Array]:
        """Returns this rank's pieces of the summed gradients of a bucket's leaves, float32."""
        if not bucket.stacked:
            return self._scatter(bucket, grads, key, step)

        def one(_: None, item: tuple) -> tuple[None, list[Array]]:
            index, mine = item
            return None, self._scatter(bucket, mine, _fold(key, index), step)

        return lax.scan(one, None, (jnp.arange(grads[0].shape[0]), grads))[1]

    def _scatter(
        self, bucket: Bucket, grads: Sequence[Array], key: Array | None, step: Array | None
    ) -> list[Array]:
        x_N, bad = self._flat(bucket, grads)
        piece_C = self._sum(bucket, x_N, key, step)
        shapes, ranks = [list(g.shape) for g in grads], self._ranks(bucket)
        for shape, where in zip(shapes, self._wheres(bucket), strict=True):
            shape[where] //= ranks
        return self._pieces(bucket, piece_C, lax.pmax(bad, bucket.axes) > 0, shapes)

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
        """Returns the leaves of a piece, NaN where a leaf is bad on some rank."""
        pieces, begin = [], 0
        for i, (shape, where) in enumerate(zip(shapes, self._wheres(bucket), strict=True)):
            size = math.prod(shape)
            piece = _back(piece_C[None, begin : begin + size], shape, where)
            pieces.append(jnp.where(bad[i], jnp.nan, piece))
            begin += size
        return pieces

    def _ways(self, bucket: Bucket, key: Array | None) -> dict[str, Any]:
        inside = tuple(a for a in bucket.axes if a != NODE)
        return {"inside": inside, "between": NODE, "key": self._own(bucket, key)}

    def _sum(self, bucket: Bucket, x_N: Array, key: Array | None, step: Array | None) -> Array:
        coded = functools.partial(
            zero.reduce_scatter, codec=self.wire.gradients, **self._ways(bucket, key)
        )
        if not self.wire.start_step or step is None:
            return coded(x_N)
        plain = functools.partial(
            lax.psum_scatter, axis_name=bucket.axes, scatter_dimension=0, tiled=True
        )
        return lax.cond(step < self.wire.start_step, plain, coded, x_N)

    def _own(self, bucket: Bucket, key: Array | None) -> Array | None:
        """Returns a key of the ranks that hold this part of the bucket."""
        if key is None or not bucket.cut:
            return key
        return jax.random.fold_in(key, lax.axis_index(bucket.cut))

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

    def _partial(self, bucket: Bucket) -> list[P]:
        """How gradients of weights in use lie: partial sums."""
        whole = [self._whole(i) for i in bucket.leaves]
        return [P(*p.partitions, unreduced=p.reduced) for p in whole]

    def _everywhere(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        # The checker does not see that what was gathered is equal on all ranks.
        return jax.shard_map(
            local,
            mesh=self.masters.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _tree(self, leaves: Sequence[Any]) -> Tree:
        return self._structure.unflatten(leaves)

    def _values(self, tree: Tree) -> list[Any]:
        """The leaves, None where a tree has None: integers of packed weights have no gradient."""
        return self._structure.flatten_up_to(tree)

    @functools.cached_property
    def _structure(self) -> Any:
        return jax.tree.structure(self.axes, is_leaf=is_words)


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


def _fold(key: Array | None, number: Any) -> Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _front(x: Array, where: int, ranks: int) -> Array:
    """Returns (ranks, elements): a leaf cut along a dimension, each rank's part in one row."""
    return jnp.moveaxis(x, where, 0).reshape(ranks, -1)


def _back(rows: Array, shape: Sequence[int], where: int) -> Array:
    """Returns the leaf of this shape whose `_front` is `rows`."""
    moved = (shape[where], *shape[:where], *shape[where + 1 :])
    assert math.prod(moved) == rows.size
    return jnp.moveaxis(rows.reshape(moved), 0, where)
