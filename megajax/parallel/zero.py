"""Data parallelism in few bits: gradients are summed into pieces, weights follow as differences.

Every rank holds a copy of the weights and one piece of the float32 masters. `reduce_scatter` gives
a rank its piece of the summed gradients; `gather_difference` sends what the copy still lacks of the
masters. The difference is taken against the copy, never against the old master: what a quantizer
lost is then part of the next difference, so the copy cannot drift (SDP4Bit, arXiv 2410.15526,
section 3). The two-level sum is that of ZeRO++ (arXiv 2306.10209): first among the ranks inside a
node, then between nodes, each rank sending every other its row, so a value is quantized once a
level whatever the number of ranks. The Hadamard transform is linear: it is done once before the
first quantizer and undone once after the last sum.

For code inside a shard_map whose manual axes are the two, or under `jax.vmap` with these axis
names, which gives the same bits. Nothing here is differentiable.

Legend: N elements of a flat buffer, R ranks along an axis, C elements of a piece, W wire bytes.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.hashes import sum_words, words
from megajax.core.tree import Tree
from megajax.cost.traffic import gradient_length, weight_length
from megajax.quant.codecs import Codec, Feedback
from megajax.quant.qtensor import QTensor, need_key
from pallas_kernels import tuned
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quantize.fused_reference import BLOCK

# ---- passes
#
# What a rank computes between two messages of the exchange: plain JAX, or one kernel a pass.
#
#     send      transforms a buffer, orders it and encodes a row for each receiver
#     relay     sums what the ranks of a node sent, encodes a row for each node
#     receive   sums what came last, transforms back
#     subtract  encodes what the copy lacks of the masters
#     add       moves the copy by what all ranks sent
#
# A pass of plain JAX reads and writes its arrays several times, a kernel of pallas_kernels/quantize
# once; both give the same bits. Kernels take some codes, groups and sizes only (`why_not`).
#
# Legend: R rows of a payload.


Array = jax.Array
Pass = Literal["send", "relay", "receive", "subtract", "add"]


def piece_length(n: int, ranks: int, codec: Codec | None = None) -> int:
    """Returns the elements of a rank's piece of a buffer of n: an even share, rounded up.

    The codec does not change it: what a row needs beyond is added to the rows that travel.
    """
    return -(-n // ranks)


def row_length(n: int, ranks: int, codec: Codec) -> int:
    """Returns the elements of a piece of gradients as it travels (cost/traffic.py)."""
    return gradient_length(piece_length(n, ranks), codec.hadamard or 1, codec.inside, codec.between)


class Encoded(NamedTuple):
    """The result of a pass that encodes.

    payload_RW: a row for each receiver. bad: whether an element of the input was not finite. error:
    the quantization error that the next step adds; None without feedback.
    """

    payload_RW: Array
    bad: Array
    error: QTensor | None = None


@dataclass(frozen=True)
class Compensation:
    """The quantization error of earlier steps, the rule by which it is kept, the step's number."""

    error: QTensor
    feedback: Feedback
    step: Array


@dataclass(frozen=True)
class Passes:
    """The passes of one buffer of n elements.

    nodes: that share the buffer. ranks: of each node. kernels: the implementation of the passes, as
    in pallas_kernels/dispatch.py; a pass that its kernel does not take runs in plain JAX. dtype: of
    the copy of the weights.
    """

    n: int
    codec: Codec
    nodes: int
    ranks: int
    kernels: Implementation | None = None
    dtype: Any = jnp.float32

    @property
    def size(self) -> int:
        """The ranks of all nodes together."""
        return self.nodes * self.ranks

    @property
    def piece(self) -> int:
        """The elements of a rank's piece."""
        return piece_length(self.n, self.size)

    @property
    def row(self) -> int:
        """The elements of a piece of gradients as it travels."""
        return row_length(self.n, self.size, self.codec)

    @property
    def fetched(self) -> int:
        """The elements of a piece of weights as it travels."""
        return weight_length(self.piece, self.codec.weights)

    @property
    def names(self) -> tuple[Pass, ...]:
        """The passes of a step."""
        if self.size == 1:
            return ()
        between: tuple[Pass, ...] = ("relay",) if self.nodes > 1 and self.ranks > 1 else ()
        weights: tuple[Pass, ...] = () if is_exact(self.codec.weights) else ("subtract", "add")
        return ("send", *between, "receive", *weights)

    def why_plain(self, name: Pass) -> list[str]:
        """Returns why a pass runs in plain JAX on the GPUs that the program is for; empty: the
        kernel runs it."""
        from pallas_kernels.quantize import api

        return self.why_not(name) or api.why_plain(self._problem(name), self.kernels)

    def why_not(self, name: Pass) -> list[str]:
        """Returns why the kernel of a pass does not take it, on whatever GPU; empty: it does."""
        levels = [level for level in self._levels(name) if level.format is None]
        if levels:
            return [f"{levels[0].dtype} is no code of a group"]
        if name not in ("subtract", "add") and self.codec.feedback is not None:
            return ["the kernels do not keep errors for the next step"]
        if name not in ("subtract", "add") and self.codec.hadamard not in (0, BLOCK):
            return [f"needs a transform of {BLOCK}, found {self.codec.hadamard}"]
        groups = {level.format.group for level in self._levels(name) if level.format}
        if None in groups:
            return ["needs groups, found one scale for all of a row"]
        if len(groups) > 1:
            return ["needs groups of one size on both levels, found " + _listed(groups)]
        from pallas_kernels.quantize import api

        return api.why_not(self._problem(name))

    def _fused(self, name: Pass) -> bool:
        """Tells whether a kernel runs the pass, on the devices that the program is for."""
        if self.kernels is None and tuned.target() is None:
            return False
        if self.kernels == "reference" or self.why_not(name):
            return False
        from pallas_kernels.quantize import api

        return api.runs_kernel(self._problem(name), self.kernels)

    def _kernel(self, name: Pass, *operands: Any, **key: Any) -> Array:
        """Runs a pass in one kernel. key: of a pass that rounds at random."""
        from pallas_kernels.quantize import api

        run = {
            "send": api.hadamard_quantize,
            "relay": api.reduce_requantize,
            "receive": api.reduce_hadamard,
            "subtract": api.subtract_quantize,
            "add": api.dequantize_add,
        }[name]
        return run(*operands, **self._options(name), **key, implementation=self.kernels)

    def _levels(self, name: Pass) -> tuple[Codec, ...]:
        codec = self.codec
        first = codec.inside if self.ranks > 1 else codec.between
        last = codec.between if self.nodes > 1 else codec.inside
        return {
            "send": (first,),
            "relay": (codec.inside, codec.between),
            "receive": (last,),
            "subtract": (codec.weights,),
            "add": (codec.weights,),
        }[name]

    def _options(self, name: Pass) -> dict[str, Any]:
        """What the kernel's function takes beside arrays and a key."""
        levels = self._levels(name)
        form = levels[-1].format
        assert form is not None
        options: dict[str, Any] = {"bits": form.bits, "group": form.group}
        if name == "send":
            rows = (self.ranks, self.nodes) if self.ranks > 1 else (self.nodes, 1)
            options |= {"rows": rows[0], "nodes": rows[1]}
        if name in ("send", "receive"):
            options["hadamard"] = bool(self.codec.hadamard)
        if name == "relay":
            first = levels[0].format
            assert first is not None
            options |= {"rows": self.nodes, "bits": first.bits, "new_bits": form.bits}
        return options

    def _problem(self, name: Pass) -> Any:
        from pallas_kernels.quantize import problems

        options, random = self._options(name), self._levels(name)[-1].stochastic
        last = self.nodes if self.nodes > 1 else self.ranks
        match name:
            case "send":
                n = self.size * self.row
                return problems.hadamard_quantize(n, **options, random=random)
            case "relay":
                n = self.nodes * self.row
                return problems.reduce_requantize(n, **options, senders=self.ranks, random=random)
            case "receive":
                return problems.reduce_hadamard(self.row, **options, senders=last)
            case "subtract":
                return problems.subtract_quantize(
                    self.fetched, **options, random=random, dtype=self.dtype
                )
        n = self.size * self.fetched
        return problems.dequantize_add(n, **options, senders=self.size, dtype=self.dtype)

    # ---- gradients

    def send(self, x_N: Array, key: Array | None, earlier: Compensation | None = None) -> Encoded:
        """The first level's payloads of a float32 buffer. key: of this rank and level."""
        [level], shape = self._levels("send"), (self.size, self.piece)
        x = jnp.pad(x_N, (0, self.size * self.piece - self.n)).reshape(shape)
        x = jnp.pad(x, ((0, 0), (0, self.row - self.piece)))
        if earlier is None and self._fused("send"):
            payload_RW = self._kernel("send", x.reshape(-1), key=_key(level, key))
            line = self.size * self.row // payload_RW.shape[0]
            return Encoded(payload_RW, ~level.is_finite(payload_RW, line))
        rows = (self.ranks, self.nodes) if self.ranks > 1 else (self.nodes, 1)
        x = self.codec.transform(x).reshape(rows[1], rows[0], -1).swapaxes(0, 1)
        return _encode(level, x.reshape(rows[0], -1), key, earlier)

    def relay(
        self, payload_RW: Array, key: Array | None, earlier: Compensation | None = None
    ) -> Encoded:
        """The second level's payloads of what the first level brought."""
        inside, between = self._levels("relay")
        n = self.nodes * self.row
        if earlier is None and self._fused("relay"):
            payload_RW = self._kernel("relay", payload_RW, n, key=_key(between, key))
            return Encoded(payload_RW, ~between.is_finite(payload_RW, self.row))
        return _encode(
            between, sum_rows(payload_RW, inside, n).reshape(self.nodes, -1), key, earlier
        )

    def receive(self, payload_RW: Array) -> Array:
        """The float32 sum (row,) of what the last level brought, transformed back."""
        [level] = self._levels("receive")
        if self._fused("receive"):
            return self._kernel("receive", payload_RW, self.row)
        return self.codec.restore(sum_rows(payload_RW, level, self.row), self.row)

    def finish(self, total: Array, rank: Array) -> Array:
        """The piece (piece,) of a row of sums: zero beyond n."""
        piece_C = total[: self.piece]
        if self.n == self.size * self.piece:
            return piece_C
        # Quantized zeros come back from the transform as noise.
        return jnp.where(rank * self.piece + jnp.arange(self.piece) < self.n, piece_C, 0.0)

    # ---- weights

    def subtract(self, main_C: Array, lossy_C: Array, key: Array | None) -> Array:
        """The payload (W,) of main - lossy, in float32. key: of this rank."""
        level, beyond = self.codec.weights, (0, self.fetched - self.piece)
        main_C, lossy_C = jnp.pad(main_C, beyond), jnp.pad(lossy_C, beyond)
        if self._fused("subtract"):
            return self._kernel("subtract", main_C, lossy_C, key=_key(level, key))
        return level.encode(main_C - lossy_C.astype(jnp.float32), key)

    def add(self, payload_RW: Array, copy: Array) -> Array:
        """The copy (ranks of all nodes, piece), moved by all ranks' payloads, in its type."""
        if self._fused("add"):
            copy = jnp.pad(copy, ((0, 0), (0, self.fetched - self.piece)))
            new = self._kernel("add", payload_RW, copy.reshape(-1))
            return new.reshape(self.size, -1)[:, : self.piece]
        change = self.codec.weights.decode(payload_RW, self.fetched)[:, : self.piece]
        return (copy.astype(jnp.float32) + change).astype(copy.dtype)


def sum_rows(payload_RW: Array, codec: Codec, n: int) -> Array:
    """Returns the float32 sum (n,) of the decoded rows, from the first to the last.

    A fixed order, of numbers that `decode` rounded to float32: every program gives the same bits.
    """

    def add(total: Array, payload: Array) -> tuple[Array, None]:
        return total + codec.decode(payload, n), None

    unroll = min(payload_RW.shape[0] - 1, 8)
    return lax.scan(add, codec.decode(payload_RW[0], n), payload_RW[1:], unroll=unroll)[0]


def is_exact(codec: Codec) -> bool:
    """Tells whether a codec of one level drops nothing."""
    return codec.format is None and codec.dtype == "float32"


def not_finite(x: Array) -> Array:
    """Tells whether any element is not."""
    return ~jnp.isfinite(x).all()


def _encode(
    level: Codec, rows_RN: Array, key: Array | None, earlier: Compensation | None
) -> Encoded:
    bad = not_finite(rows_RN)
    if earlier is None:
        return Encoded(level.encode(rows_RN, key), bad)
    feedback = earlier.feedback
    rows_RN = feedback.compensate(rows_RN, earlier.error)
    payload_RW = level.encode(rows_RN, key)
    received_RN = level.decode(payload_RW, rows_RN.shape[1])
    error = feedback.update(rows_RN, received_RN, earlier.error, earlier.step)
    return Encoded(payload_RW, bad, error)


def _key(level: Codec, key: Array | None) -> Array | None:
    return need_key(f"codec {level.name}", key) if level.stochastic else None


def _listed(values: Any) -> str:
    return " and ".join(map(str, sorted(values)))


# ---- zero


BETWEEN, INSIDE = "node", "data"


# ---- sizes


def wire_bytes(n: int, codec: Codec, nodes: int, ranks: int) -> dict[str, int]:
    """Returns the bytes of the buffer that one rank gives each collective of a step.

    n: elements of the buffer. ranks: inside a node. 'inside' and 'between' are the inputs of the
    two all-to-alls of the gradients, of which each rank keeps 1 / R for itself. 'weights' is the
    result of the all-gather of the differences: the payloads of all ranks.
    """
    passes = Passes(n, codec, nodes, ranks)
    row, gathered = passes.row, passes.size * codec.weights.wire_bytes(passes.fetched)
    return {
        "inside": ranks * codec.inside.wire_bytes(nodes * row) if ranks > 1 else 0,
        "between": nodes * codec.between.wire_bytes(row) if nodes > 1 else 0,
        "weights": gathered if passes.size > 1 else 0,
    }


# ---- gradients


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Errors:
    """The quantization errors that this rank keeps (LoCo), in the few bits of the codec's feedback.

    step: int32, steps since the start. inside, between: the errors of the rows that each level
    sends; None: the level is skipped.
    """

    step: Array
    inside: QTensor | None
    between: QTensor | None


def start(n: int, codec: Codec, nodes: int, ranks: int) -> Errors | None:
    """Returns the first `state` of reduce_scatter for buffers of n; None: the codec keeps none.

    nodes, ranks: sizes of the axes between and inside nodes. Every rank has a state of its own.
    """
    if codec.feedback is None:
        return None
    row = row_length(n, nodes * ranks, codec)
    return Errors(
        jnp.zeros((), jnp.int32),
        codec.feedback.start((ranks, nodes * row)) if ranks > 1 else None,
        codec.feedback.start((nodes, row)) if nodes > 1 else None,
    )


def reduce_scatter(
    x_N: Array,
    codec: Codec,
    *,
    inside: str | tuple[str, ...] = INSIDE,
    between: str = BETWEEN,
    key: Array | None = None,
    state: Errors | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Returns this rank's piece of the sum of all ranks' buffers, float32 (piece_length,).

    Rank (i, j), i along `between` and j along `inside` (one axis, or several that count as one),
    gets piece i * R + j, R being the ranks inside. Elements beyond N, at the end of the last
    pieces, are exactly zero. An axis of size 1 skips its level, and a rank alone gets a copy. A
    rank quantizes all rows that it has, its own too, so that all ranks' gradients have the same
    error.

    Args: x_N: floating, the gradients of this rank, weighted by the caller: this is a sum. key: the
      same on all ranks, another one for each step and buffer; rank and level are folded in here.
      None: for codecs that round to nearest. state: of `start`, or what the last step returned: the
      result is then (piece, state). implementation: of the passes between the messages, as in
      pallas_kernels/dispatch.py; a pass that its kernel does not take (`Passes.why_not`)
      runs in plain JAX, which gives the same bits.
    A value that is not finite, on any rank, makes every piece NaN on all of them, and the state
    stays as it was. So does a transform or a sum inside a node that leaves float32's range.
    Raises: UserError for a buffer that is not flat and floating, or a codec without feedback;
    NotImplementedError for kernels on other GPUs than Hopper.
    """
    if state is not None and codec.feedback is None:
        raise UserError(f"codec {codec.name} keeps no errors: call reduce_scatter without state=")
    link = Link(codec, inside, between, key, implementation)
    piece_C, state = receive(send(x_N, link, state), x_N.shape[0], link, state)
    return piece_C if state is None else (piece_C, state)


class Link(NamedTuple):
    """What `send` and `receive` have in common: the arguments of `reduce_scatter`."""

    codec: Codec
    inside: str | tuple[str, ...]
    between: str
    key: Array | None
    implementation: Implementation | None = None

    def passes(self, n: int) -> Passes:
        """Returns the passes of a buffer of n."""
        sizes = lax.axis_size(self.between), lax.axis_size(self.inside)
        return Passes(n, self.codec, *sizes, self.implementation)

    @property
    def rank(self) -> Array:
        """Returns the number of this rank among all."""
        inside = lax.axis_index(self.inside)
        return lax.axis_index(self.between) * lax.axis_size(self.inside) + inside


class Sent(NamedTuple):
    """What lies between the two levels.

    rows: the payloads (R, W) that the ranks inside a node sent to this rank; of one rank alone, its
    float32 buffer. bad: whether an element of this rank's gradients was not finite. error: the new
    error of the first level, or None.
    """

    rows: Array
    bad: Array
    error: Any


def send(x_N: Array, link: Link, state: Errors | None = None) -> Sent:
    """The first half of `reduce_scatter`, to the end of the messages inside a node."""
    _check_flat(x_N, "x_N")
    passes, x_N = link.passes(x_N.shape[0]), x_N.astype(jnp.float32)
    if passes.ranks == 1:
        return Sent(x_N, not_finite(x_N), None)
    earlier = None if state is None else _compensation(link.codec, state, state.inside)
    encoded = passes.send(x_N, _fold(link.key, link.rank, 0), earlier)
    return Sent(lax.all_to_all(encoded.payload_RW, link.inside, 0, 0), encoded.bad, encoded.error)


def receive(
    sent: Sent, n: int, link: Link, state: Errors | None = None
) -> tuple[Array, Errors | None]:
    """The second half: sums, and between nodes messages and sums again.

    n: of `send`'s buffer. Returns: (the float32 piece_C, the new state).
    """
    passes, rank, bad = link.passes(n), link.rank, sent.bad
    rows, error = sent.rows, None if state is None else state.between
    if passes.nodes > 1:
        earlier = None if state is None else _compensation(link.codec, state, state.between)
        encode = passes.relay if passes.ranks > 1 else passes.send
        encoded = encode(rows, _fold(link.key, rank, 1), earlier)
        rows = lax.all_to_all(encoded.payload_RW, link.between, 0, 0)
        bad, error = bad | encoded.bad, encoded.error
    if passes.size > 1:
        rows = passes.receive(rows)
        bad |= not_finite(rows) if passes.nodes == 1 else False
    inside = (link.inside,) if isinstance(link.inside, str) else link.inside
    bad = lax.pmax(bad.astype(jnp.int32), (link.between, *inside)) > 0  # on any rank
    piece_C = jnp.where(bad, jnp.nan, passes.finish(rows, rank))
    if state is None:
        return piece_C, None
    new = Errors(state.step + 1, sent.error, error)
    return piece_C, jax.tree.map(lambda old, new: jnp.where(bad, old, new), state, new)


# ---- weights


def gather_difference(
    main_C: Array,
    copy_N: Array,
    codec: Codec,
    axes: str | tuple[str, ...] = (BETWEEN, INSIDE),
    *,
    key: Array | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Returns the copy (N,) once all ranks' masters moved it, the same bits on every rank.

    Args: main_C: float32 (piece_length(N, ranks),), this rank's piece of the masters, pieces in the
      order of the ranks along `axes`. copy_N: the copy before, the same bits on every rank, float32
      or shorter; the result has its type. key: for a codec whose weights round stochastically.
      implementation: as in reduce_scatter.
    The difference is taken in float32. A rank alone gets its masters, and so does everybody from a
    codec that drops nothing. Where a master is not finite, the copy of its whole group becomes NaN.
    Raises: UserError for buffers that do not fit.
    """
    _check_flat(copy_N, "copy_N")
    axes = (axes,) if isinstance(axes, str) else axes
    ranks, n = lax.axis_size(axes), copy_N.shape[0]
    length = piece_length(n, ranks)
    if main_C.shape != (length,) or main_C.dtype != jnp.float32:
        raise UserError(
            f"main_C is {main_C.dtype}{main_C.shape}; a piece of a copy of {n} elements on {ranks} "
            f"ranks is float32({length},)"
        )
    rank, weights = lax.axis_index(axes), codec.weights
    if ranks == 1 or is_exact(weights):
        return all_gather(main_C, axes).reshape(-1)[:n].astype(copy_N.dtype)
    passes = Passes(n, weights, 1, ranks, implementation, copy_N.dtype)
    copy = jnp.pad(copy_N, (0, ranks * length - n)).reshape(ranks, length)
    lossy_C = lax.dynamic_index_in_dim(copy, rank, keepdims=False)
    payload_W = passes.subtract(main_C, lossy_C, _fold(key, rank, 2))
    return passes.add(all_gather(payload_W, axes), copy).reshape(-1)[:n]


def all_gather(x: Array, axes: tuple[str, ...]) -> Array:
    """Returns what all ranks along the axes have, (R, ...), the last axis running fastest."""
    if set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        return lax.all_gather(x, axes, to="invarying")
    shape = x.shape
    for axis in reversed(axes):  # vmap cannot gather over several axes at once
        x = lax.all_gather(x, axis)
    return x.reshape(-1, *shape)


# ---- replicas


def fingerprint(x: Array) -> Array:
    """Returns two uint32 sums (2,) of an array's bits and places (core/hashes.py)."""
    return sum_words(words(x), jnp.zeros(x.ndim, jnp.uint32))


def copies_agree(tree: Tree, axes: tuple[str, ...]) -> Tree:
    """Tells of each leaf whether all ranks along the axes hold the same bits.

    A difference goes unseen with a probability of 2^-64. One small collective for the whole tree.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    sums = jnp.stack([fingerprint(x) for x in leaves])
    most, least = lax.pmax(jnp.stack([sums, ~sums]), axes)
    return treedef.unflatten(list((most == ~least).all(axis=-1)))


def replicas_agree(mesh: Mesh, specs: Tree, tree: Tree) -> Tree:
    """Tells of each leaf whether all devices that hold the same part of it hold the same bits.

    For code under an Explicit mesh. specs: how the leaves lie. True for a leaf of which no two
    devices hold the same part.
    """

    def others(spec: P) -> tuple[str, ...]:
        cut = {a for e in spec for a in ((e,) if isinstance(e, str) else e or ())}
        return tuple(a for a in mesh.axis_names if a not in cut and mesh.shape[a] > 1)

    axes = [others(spec) for spec in jax.tree.leaves(specs)]

    def local(tree: Tree) -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        same = [jnp.bool_(True)] * len(leaves)
        for group in sorted({names for names in axes if names}):
            places = [i for i, names in enumerate(axes) if names == group]
            agree = copies_agree([leaves[i] for i in places], group)
            for i, is_same in zip(places, agree, strict=True):
                same[i] = is_same
        same = lax.pmin(jnp.stack(same).astype(jnp.int32), mesh.axis_names) > 0
        return treedef.unflatten(list(same))

    call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    return call(tree)


# ---- parts


def _compensation(codec: Codec, state: Errors, error: QTensor | None) -> Compensation | None:
    if error is None or codec.feedback is None:
        return None
    return Compensation(error, codec.feedback, state.step)


def _fold(key: Array | None, rank: Array, level: int) -> Array | None:
    return None if key is None else jax.random.fold_in(jax.random.fold_in(key, rank), level)


def _check_flat(x: Array, name: str) -> None:
    if x.ndim != 1 or not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"{name} is {x.dtype}{x.shape}; the exchange takes a flat, floating buffer that is not "
            "empty (parallel/exchange.py packs a tree into such)"
        )
