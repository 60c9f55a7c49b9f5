"""Which parameters travel together in the exchange of data parallelism, and how.

A bucket is what travels at once: the matrices of one layer that share their axes, or one table of
the vocabulary. Vectors and routers, which are small and may not be rounded, are in no bucket and
travel as they do without a codec. parallel/exchange.py moves the buckets.
Source: SDP4Bit (arXiv 2410.15526, section 3), in which norms and biases are not quantized.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree, is_words, name
from megajax.models.parts import is_stacked, map_words, select
from megajax.parallel import wire, zero
from megajax.parallel.passes import Passes
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation

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


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The leaves of one tree. axes: their words. masters, used: the layouts of the masters and of
    the weights in use. dtype: of weights in use. trains: a tree of bools like axes, False where a
    leaf has no gradient; None: all are trained."""

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
