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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.hashes import sum_words, words
from megajax.core.tree import Tree
from megajax.quant.codecs import Codec
from megajax.quant.feedback import Feedback
from megajax.quant.qtensor import QTensor

Array = jax.Array
BETWEEN, INSIDE = "node", "data"


# ---- sizes


def piece_length(n: int, ranks: int, codec: Codec | None = None) -> int:
    """Returns the elements of a rank's piece of a buffer of n: an even share, rounded up.

    The codec does not change it: what its transform needs beyond is added to the rows that travel.
    """
    return -(-n // ranks)


def row_length(n: int, ranks: int, codec: Codec) -> int:
    """Returns the elements of a piece as it travels: whole blocks of the codec's transform."""
    size = codec.hadamard or 1
    return -(-piece_length(n, ranks) // size) * size


def wire_bytes(n: int, codec: Codec, nodes: int, ranks: int) -> dict[str, int]:
    """Returns the bytes of the buffer that one rank gives each collective of a step.

    n: elements of the buffer. ranks: inside a node. 'inside' and 'between': of the two all-to-alls
    of the gradients; each rank keeps 1 / R of the buffer for itself. 'weights': of what the
    all-gather of the differences makes, all ranks' payloads together.
    """
    whole, row = nodes * ranks, row_length(n, nodes * ranks, codec)
    own = piece_length(n, whole)
    return {
        "inside": ranks * codec.inside.wire_bytes(nodes * row) if ranks > 1 else 0,
        "between": nodes * codec.between.wire_bytes(row) if nodes > 1 else 0,
        "weights": whole * codec.weights.wire_bytes(own) if whole > 1 else 0,
    }


# ---- gradients


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Errors:
    """What this rank's quantizers dropped so far (LoCo), in the few bits of the codec's feedback.

    step: int32, steps since the start. inside, between: of the rows sent at each level; None: the
    level is skipped.
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
      result is then (piece, state).
    A value that is not finite, on any rank, makes every piece NaN on all of them, and the state
    stays as it was. So does a transform or a sum inside a node that leaves float32's range.
    Raises: UserError for a buffer that is not flat and floating, or a codec without feedback.
    """
    _feedback(codec, state)
    sent = send(x_N, codec, inside=inside, between=between, key=key, state=state)
    found = receive(sent, x_N.shape[0], codec, inside=inside, between=between, key=key, state=state)
    return found.piece if state is None else (found.piece, found.state)


class Sent(NamedTuple):
    """What lies between the two levels. rows: what the ranks inside sent to this one: payloads
    (R, W), or with one rank the float32 rows. bad: something here was not finite. error: of this
    level, or None."""

    rows: Array
    bad: Array
    error: Any


class Received(NamedTuple):
    """piece: float32 (C,). state: as of reduce_scatter."""

    piece: Array
    state: Any


def send(
    x_N: Array,
    codec: Codec,
    *,
    inside: str | tuple[str, ...],
    between: str,
    key: Array | None,
    state: Errors | None = None,
) -> Sent:
    """The first half of `reduce_scatter`, to the end of the messages inside a node."""
    _check_flat(x_N, "x_N")
    nodes, ranks = lax.axis_size(between), lax.axis_size(inside)
    rank = lax.axis_index(between) * ranks + lax.axis_index(inside)
    rows = swizzle(x_N.astype(jnp.float32), nodes, ranks, codec)
    bad, error = _not_finite(rows), None if state is None else state.inside
    if ranks > 1:
        level = Level(codec.inside, inside, _fold(key, rank, 0), _feedback(codec, state))
        return level.send(rows.reshape(ranks, -1), error)._replace(bad=bad)
    return Sent(rows[0], bad, error)


def receive(
    sent: Sent,
    n: int,
    codec: Codec,
    *,
    inside: str | tuple[str, ...],
    between: str,
    key: Array | None,
    state: Errors | None = None,
) -> Received:
    """The second half: sums, and between nodes messages and sums again. n: of `send`'s buffer."""
    nodes, ranks = lax.axis_size(between), lax.axis_size(inside)
    rank = lax.axis_index(between) * ranks + lax.axis_index(inside)
    bad, sums = sent.bad, sent.rows
    if ranks > 1:
        row = row_length(n, nodes * ranks, codec)
        sums = sum_rows(sent.rows, codec.inside, nodes * row).reshape(nodes, -1)
        bad |= _not_finite(sums)
    total, second = sums[0], None if state is None else state.between
    if nodes > 1:
        level = Level(codec.between, between, _fold(key, rank, 1), _feedback(codec, state))
        got = level.send(sums, second)
        total, second = sum_rows(got.rows, codec.between, sums.shape[1]), got.error
    bad = _anywhere(bad, (between, *((inside,) if isinstance(inside, str) else inside)))
    piece_C = finish(total, rank, n, nodes * ranks, codec)
    piece_C = jnp.where(bad, jnp.nan, piece_C)
    if state is None:
        return Received(piece_C, None)
    after = Errors(state.step + 1, sent.error, second)
    kept = jax.tree.map(lambda old, new: jnp.where(bad, old, new), state, after)
    return Received(piece_C, kept)


def swizzle(x_N: Array, nodes: int, ranks: int, codec: Codec) -> Array:
    """Returns the transformed rows (ranks, nodes, row_length): row [j, i] is for rank (i, j)."""
    whole = nodes * ranks
    length = piece_length(x_N.shape[0], whole)
    x = jnp.pad(x_N, (0, whole * length - x_N.shape[0])).reshape(whole, length)
    x = codec.transform(x) if whole > 1 else x
    return x.reshape(nodes, ranks, -1).swapaxes(0, 1)


@dataclass(frozen=True)
class Level:
    """One all-to-all of the sum.

    codec: of one level. key: of this rank and level. feedback: (how errors are kept, the step).
    """

    codec: Codec
    axis: str | tuple[str, ...]
    key: Array | None
    feedback: tuple[Feedback, Array] | None

    def send(self, rows_RN: Array, error: QTensor | None) -> Sent:
        """Returns the payloads (R, W) that the ranks along the axis have for this one, its error.

        error: of earlier steps, which is added to the rows before they are encoded; None: of none.
        """
        if error is not None and self.feedback is not None:
            keep, step = self.feedback
            rows_RN = keep.compensate(rows_RN, error)
            payload_RW = self.codec.encode(rows_RN, self.key)
            received_RN = self.codec.decode(payload_RW, rows_RN.shape[1])
            error = keep.update(rows_RN, received_RN, error, step)
        else:
            payload_RW = self.codec.encode(rows_RN, self.key)
        return Sent(lax.all_to_all(payload_RW, self.axis, 0, 0), jnp.bool_(False), error)


def sum_rows(payload_RW: Array, codec: Codec, n: int) -> Array:
    """Returns the float32 sum (n,) of the decoded rows, from the first to the last.

    A fixed order, of numbers that `decode` rounded to float32: every program gives the same bits.
    """

    def add(total: Array, payload: Array) -> tuple[Array, None]:
        return total + codec.decode(payload, n), None

    rest = payload_RW.shape[0] - 1
    return lax.scan(add, codec.decode(payload_RW[0], n), payload_RW[1:], unroll=min(rest, 8))[0]


def finish(total: Array, rank: Array, n: int, ranks: int, codec: Codec) -> Array:
    """Returns the piece (piece_length,) of a row of sums: transformed back, zero beyond n."""
    length = piece_length(n, ranks)
    piece_C = codec.restore(total, length) if ranks > 1 else total
    if n == ranks * length:
        return piece_C
    # Quantized zeros come back from the transform as noise.
    return jnp.where(rank * length + jnp.arange(length) < n, piece_C, 0.0)


# ---- weights


def gather_difference(
    main_C: Array,
    copy_N: Array,
    codec: Codec,
    axes: str | tuple[str, ...] = (BETWEEN, INSIDE),
    *,
    key: Array | None = None,
) -> Array:
    """Returns the copy (N,) once all ranks' masters moved it, the same bits on every rank.

    Args: main_C: float32 (piece_length(N, ranks),), this rank's piece of the masters, pieces in the
      order of the ranks along `axes`. copy_N: the copy before, the same bits on every rank, float32
      or shorter; the result has its type. key: for a codec whose weights round stochastically.
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
    if ranks == 1 or _is_exact(weights):
        return all_gather(main_C, axes).reshape(-1)[:n].astype(copy_N.dtype)
    whole = jnp.pad(copy_N, (0, ranks * length - n))
    lossy_C = lax.dynamic_slice(whole, (rank * length,), (length,)).astype(jnp.float32)
    payload_RW = all_gather(weights.encode(main_C - lossy_C, _fold(key, rank, 2)), axes)
    moved_N = weights.decode(payload_RW, length).reshape(-1)[:n]
    return (copy_N.astype(jnp.float32) + moved_N).astype(copy_N.dtype)


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

    For code under an Explicit mesh. specs: how the leaves lie. A leaf of which every device has a
    part of its own has nothing to differ from, so it is True.
    """

    def others(spec: P) -> tuple[str, ...]:
        cut = {a for e in spec for a in ((e,) if isinstance(e, str) else e or ())}
        return tuple(a for a in mesh.axis_names if a not in cut and mesh.shape[a] > 1)

    axes = [others(spec) for spec in jax.tree.leaves(specs)]

    def local(tree: Tree) -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        found = [jnp.bool_(True)] * len(leaves)
        for group in sorted({own for own in axes if own}):
            places = [i for i, own in enumerate(axes) if own == group]
            same = copies_agree([leaves[i] for i in places], group)
            for i, is_same in zip(places, same, strict=True):
                found[i] = is_same
        same = lax.pmin(jnp.stack(found).astype(jnp.int32), mesh.axis_names) > 0
        return treedef.unflatten(list(same))

    call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    return call(tree)


# ---- parts


def _feedback(codec: Codec, state: "Errors | None") -> tuple[Feedback, Array] | None:
    if state is None:
        return None
    if codec.feedback is None:
        raise UserError(f"codec {codec.name} keeps no errors: call reduce_scatter without state=")
    return codec.feedback, state.step


def _is_exact(codec: Codec) -> bool:
    return codec.format is None and codec.dtype == "float32"


def _fold(key: Array | None, rank: Array, level: int) -> Array | None:
    return None if key is None else jax.random.fold_in(jax.random.fold_in(key, rank), level)


def _not_finite(x: Array) -> Array:
    return ~jnp.isfinite(x).all()


def _anywhere(flag: Array, axes: tuple[str, ...]) -> Array:
    """Tells whether the flag is set on any rank."""
    return lax.pmax(flag.astype(jnp.int32), axes) > 0


def _check_flat(x: Array, name: str) -> None:
    if x.ndim != 1 or not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"{name} is {x.dtype}{x.shape}; the exchange takes a flat, floating buffer that is not "
            "empty (parallel/buckets.py packs a tree into such)"
        )
