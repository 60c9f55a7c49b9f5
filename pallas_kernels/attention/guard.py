"""Keeps a value that is not finite inside the segments that see it.

A key that a query does not see has the weight 0, and 0 times Inf or NaN is NaN: one bad token would
reach every row of the tiles that hold its segment. Masks are selects, which let nothing through, so
it is enough that the operands of a product are finite where the product sums over rows of several
segments: V forward; K, Q and dO backward. What such a value means for the rows that do see it
travels through the masks instead: a NaN in the key makes the logits of all its queries NaN, and a
NaN log-sum-exp the weights of all keys that a query sees.

Legend: T query rows, S key rows, H query heads, G key-value heads, K head width.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def keys(k_SGK: Array, v_SGK: Array) -> tuple[Array, Array]:
    """Returns keys and values for the forward pass.

    Values are finite, and a key is NaN if it or its value was not finite.

    Any leading dimensions. The queries that see such a key get NaN, the others never read it.
    """
    bad_SG1 = ~(jnp.isfinite(k_SGK) & jnp.isfinite(v_SGK)).all(-1, keepdims=True)
    k_SGK = jnp.where(bad_SG1, jnp.full((), jnp.nan, k_SGK.dtype), k_SGK)
    return k_SGK, jnp.where(bad_SG1, jnp.zeros((), v_SGK.dtype), v_SGK)


def mark(x: Array) -> Array:
    """Returns x with each row (last dimension) all NaN if anything of it is not finite."""
    fine = jnp.isfinite(x).all(-1, keepdims=True)
    return jnp.where(fine, x, jnp.full((), jnp.nan, x.dtype))


def finite(x: Array) -> Array:
    """Returns x with 0 where it is not finite."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def queries(q: Array, dout: Array, lse: Array, delta: Array) -> tuple[Array, Array, Array, Array]:
    """Returns the backward pass's inputs of queries; bad rows have NaN in lse and 0 in the others.

    Args: q, dout: (..., K). lse, delta: (...), rowsum(out dout) less the gradient of lse.
    A row is bad where its q, out, dout, lse or the gradient of lse is not finite. (If out or dout
    is not finite, delta is not.) The weights of a bad row become NaN for the keys that it sees, and
    for no others.
    """
    fine = jnp.isfinite(q).all(-1) & jnp.isfinite(lse) & jnp.isfinite(delta)
    q, dout = (jnp.where(fine[..., None], x, jnp.zeros((), x.dtype)) for x in (q, dout))
    return q, dout, jnp.where(fine, lse, jnp.nan), jnp.where(fine, delta, 0.0)
