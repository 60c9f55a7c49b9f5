"""Packed tokens: (B, S, ...) padded rows to (T, ...) and back, and how large T should be.

A batch of unequal sequences is packed once where it enters a network and unpacked once where it
leaves; all between works on T tokens (ByteTransformer, arXiv 2210.03052, section 3.2). That paper
copies the number of tokens to the host to size its buffers; a compiled program has ONE size, so
here T is a static capacity with a dead tail, and `bucket` picks it from few sizes, from the lengths
that the data loader knows anyway.

Legend: B sequences, S padded length, T packed tokens (the capacity), x any further dims.
Not here: several sequences in each of several rows with a fixed length, for training on text; the
rows are packed where they are read, and attention takes them as `packed_attention`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import arguments
from pallas_kernels.packing import reference

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackInfo:
    """The places of a padded batch's tokens on the packed axis.

    cu_seqlens: int32 (B+1,), the sequences' starts and the last one's end. Tokens past it are the
    dead tail. capacity: T. length: S. Both static.
    """

    cu_seqlens: Array
    capacity: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    @property
    def segment_ids(self) -> Array:
        """int32 (T,): which sequence, -1 in the dead tail."""
        return reference.segment_ids(self.cu_seqlens, self.capacity)

    @property
    def positions(self) -> Array:
        """int32 (T,): the place in the sequence, 0 in the dead tail."""
        return reference.positions(self.cu_seqlens, self.capacity)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedTokens:
    """Sequences of any lengths, end to end.

    tokens: (T, ...), of any type; those at or past cu_seqlens[-1] are dead and may hold anything.
    cu_seqlens: int32 (B+1,); a batch of fewer sequences repeats its last value.
    """

    tokens: Array
    cu_seqlens: Array

    @property
    def capacity(self) -> int:
        """T, static."""
        return self.tokens.shape[0]

    @property
    def segment_ids(self) -> Array:
        """int32 (T,): which sequence, -1 in the dead tail."""
        return reference.segment_ids(self.cu_seqlens, self.capacity)

    @property
    def positions(self) -> Array:
        """int32 (T,): the place in the sequence, 0 in the dead tail."""
        return reference.positions(self.cu_seqlens, self.capacity)


def pack(
    x_BSx: Array, lengths_B: Array | np.ndarray | Sequence[int], capacity: int
) -> tuple[Array, PackInfo]:
    """Returns the first lengths[b] tokens of each row, end to end, in the order of the rows.

    Args:
      x_BSx: any type. What pads it is never read, so NaN there goes nowhere; its gradient is 0.
      lengths_B: int32, NumPy's integers or a list, 0 to S.
      capacity: T, static; see `bucket`.
    Returns: (x_Tx with a tail of 0, how to unpack it). Lengths that are traced cannot be checked:
      longer than S counts as S, and tokens past the capacity are left out.
    Raises: ValueError for shapes and types, and for concrete lengths that do not fit.
    """
    arguments.check_arrays("pack", x=x_BSx)
    lengths_B = arguments.integers("pack", "lengths", lengths_B, ndim=1)
    if x_BSx.ndim < 2 or lengths_B.shape != x_BSx.shape[:1]:
        raise ValueError(
            f"pack: x {x_BSx.shape} must be (B, S, ...) and lengths {lengths_B.shape} (B,)"
        )
    capacity = arguments.integer("pack", "capacity", capacity, 1)
    length = x_BSx.shape[1]
    known = arguments.concrete(lengths_B)
    if known is not None:
        if known.size and (known.min() < 0 or known.max() > length):
            raise ValueError(
                f"lengths must be from 0 to {length}, the padded length; got {known.min()} to "
                f"{known.max()}"
            )
        tokens = int(known.sum())
        if tokens > capacity:
            raise ValueError(
                f"capacity={capacity} is too small for {tokens} tokens; it must be at least "
                f"{tokens}, and bucket({tokens}) = {bucket(tokens)}"
            )
    lengths_B = jnp.clip(jnp.asarray(lengths_B), 0, length)
    cu_seqlens = jnp.minimum(reference.prefix_sums(lengths_B), capacity)
    info = PackInfo(cu_seqlens, capacity, length)
    with arguments.reverse_only("pack"):
        return _pack(x_BSx, cu_seqlens, capacity), info


def unpack(x_Tx: Array, info: PackInfo) -> Array:
    """Returns x_BSx, the inverse of `pack`, with 0 as padding, whatever the dead tail holds.

    Raises: ValueError when x does not have the capacity's tokens.
    """
    arguments.check_arrays("unpack", x=x_Tx)
    check_info("unpack", info)
    if x_Tx.ndim < 1 or x_Tx.shape[0] != info.capacity:
        raise ValueError(
            f"unpack: x {x_Tx.shape} must be (T, ...) with T = capacity = {info.capacity}"
        )
    with arguments.reverse_only("unpack"):
        return _unpack(x_Tx, info.cu_seqlens, info.length)


def check_info(op: str, info: Any) -> None:
    """Refuses anything but the PackInfo of `pack`.

    Raises: ValueError.
    """
    if not isinstance(info, PackInfo):
        raise ValueError(f"{op}: info must be the PackInfo of pack(), got {type(info).__name__}")


def bucket(tokens: int, *, most: int | None = None, steps: int = 4, multiple: int = 128) -> int:
    """Returns the capacity for a batch of this many tokens, out of few possible ones.

    Capacities have `steps` equal steps from each power of two to the next, so batches of n to 2 n
    tokens need steps + 2 compiled programs at most, and the dead tail is below
    max(tokens / steps, multiple) tokens.

    Args: most: the tokens that no batch exceeds (B x S); it is the last bucket, rounded up to
      `multiple`. steps: buckets per doubling. multiple: every capacity is a multiple of it (the
      rows of a kernel's tile).
    Raises: ValueError for numbers below 1 (tokens: below 0), and more tokens than `most`.
    """
    tokens = arguments.integer("bucket", "tokens", tokens, 0)
    steps, multiple = (
        arguments.integer("bucket", name, x, 1)
        for name, x in (("steps", steps), ("multiple", multiple))
    )
    if most is not None and tokens > arguments.integer("bucket", "most", most, 0):
        raise ValueError(
            f"bucket: tokens={tokens}, steps={steps}, multiple={multiple}, most={most}: tokens "
            "must be from 0 to most"
        )
    octave = 1 << max((tokens - 1).bit_length() - 1, 0)  # the power of two below tokens
    grain = max(octave // steps // multiple, 1) * multiple
    capacity = max(-(-tokens // grain), 1) * grain
    if most is None:
        return capacity
    return min(capacity, max(-(-most // multiple), 1) * multiple)


def _no_gradient(cu_seqlens: Array) -> Any:
    return np.zeros(cu_seqlens.shape, jax.dtypes.float0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pack(x_BSx: Array, cu_seqlens: Array, capacity: int) -> Array:
    return reference.pack(x_BSx, cu_seqlens, capacity)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unpack(x_Tx: Array, cu_seqlens: Array, length: int) -> Array:
    return reference.unpack(x_Tx, cu_seqlens, length)


# Each is the other's transpose. Left to itself, JAX would transpose a gather to a scatter-add.
def _pack_forward(x_BSx: Array, cu_seqlens: Array, capacity: int):
    return _pack(x_BSx, cu_seqlens, capacity), (cu_seqlens, x_BSx.shape[1])


def _pack_backward(capacity: int, saved, dx_Tx: Array):
    cu_seqlens, length = saved
    return _unpack(dx_Tx, cu_seqlens, length), _no_gradient(cu_seqlens)


def _unpack_forward(x_Tx: Array, cu_seqlens: Array, length: int):
    return _unpack(x_Tx, cu_seqlens, length), (cu_seqlens, x_Tx.shape[0])


def _unpack_backward(length: int, saved, dx_BSx: Array):
    cu_seqlens, capacity = saved
    return _pack(dx_BSx, cu_seqlens, capacity), _no_gradient(cu_seqlens)


_pack.defvjp(_pack_forward, _pack_backward)
_unpack.defvjp(_unpack_forward, _unpack_backward)
