"""Who may attend to whom: causal order or none, packed segments, sliding window.

Positions restart at every segment, so inside one segment their order is the order of the tokens,
whatever the layout of the row. That one rule serves packed training rows, cached decoding (the
memory's positions are 0..M-1 and what is not yet written lies in the future) and reordered context
parallelism. Sliding window: MegaScale section 3.1.

Legend: B rows, S query positions, M memory positions, K head width.
"""

import dataclasses
from numbers import Integral

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from pallas_kernels.attention.ranges import FARTHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What the blocks need to know of the tokens, the same for all layers.

    positions_BS: int32, from 0 in each segment. segments_BS: int32 or None (one segment a row);
    below 0: dead, what pads a row. rotary: (cos_BSK, sin_BSK) float32 or None. dropout: PRNG key or
    None (off). causal: static; False: tokens also see what follows them, as in an encoder.
    """

    positions_BS: jax.Array
    segments_BS: jax.Array | None = None
    rotary: tuple[jax.Array, jax.Array] | None = None
    dropout: jax.Array | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})


def visible(query: Context, memory: Context, window: int | None) -> jax.Array:
    """Returns mask_B1SM, True where the query may see the key.

    window: a query sees `window` keys at most on each side where it sees any, itself included;
    None: all.

    Raises: UserError for a window that is not a positive integer.
    """
    window = reach(window)
    q_BS1, k_B1M = query.positions_BS[:, :, None], memory.positions_BS[:, None, :]
    if query.causal:
        mask_BSM = k_B1M <= q_BS1
    elif window is not None:
        mask_BSM = k_B1M < q_BS1 + window
    else:
        mask_BSM = jnp.ones_like(k_B1M, bool) & jnp.ones_like(q_BS1, bool)
    if window is not None:
        mask_BSM &= k_B1M > q_BS1 - window
    if query.segments_BS is not None and memory.segments_BS is not None:
        mask_BSM &= query.segments_BS[:, :, None] == memory.segments_BS[:, None, :]
    return mask_BSM[:, None]


def reach(window: int | None) -> int | None:
    """Returns the window, or None where it is so large that it hides nothing.

    Raises: UserError for a window that is not a positive integer.
    """
    if window is None:
        return None
    if not isinstance(window, Integral) or isinstance(window, bool) or int(window) < 1:
        raise UserError(
            f"window={window!r} must be one integer of at least 1, the keys that a query sees on "
            "each side with itself, or None for all; pallas_kernels takes pairs "
            "(window - 1, window - 1)"
        )
    # int32 positions plus a larger one would overflow, and no sequence is so long.
    return int(window) if window < FARTHEST else None
