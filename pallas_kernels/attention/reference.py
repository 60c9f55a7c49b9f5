"""Packed attention in plain JAX: the spec of the kernels, and what runs where they cannot.

Works block by block over the tiles that hold a live pair (ranges.py), with the online softmax of
FlashAttention (arXiv 2205.14135, algorithm 1) and its backward (algorithm 4), so the memory is
O(T x block) and 32k tokens fit anywhere. Logits, softmax and sums are float32; products take the
inputs' type, as the kernels do.

Legend: T query rows, S key rows, H query heads, G key-value heads, R = H / G, K head width,
Q rows of a query block, N rows of a key tile.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.ranges import Rows, visits

BLOCK = 256  # rows of a block and of a tile (chosen: few steps on a CPU, small logits on a GPU)
LOWEST = -1e30  # where a row's running maximum starts: exp of masked logits stays 0, never NaN


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in one attention. scale: the logits' factor. softcap: None or its bound.

    pairs: the most pairs of a query and a key that it sees, for cost models; None: unknown.
    """

    scale: float
    softcap: float | None = None
    pairs: int | None = None


def forward(
    q_THK: jax.Array,
    k_SGK: jax.Array,
    v_SGK: jax.Array,
    rows: Rows,
    slopes_H: jax.Array | None,
    *,
    spec: Spec,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_THK in q's type, lse_HT float32, natural log); dead rows: 0 and -inf."""
    T, H, K = q_THK.shape
    blocks, keys, tiles = _cut((q_THK,), (k_SGK, v_SGK), rows, H)
    G, R = k_SGK.shape[1], H // k_SGK.shape[1]

    def block(inputs):
        (q_QGRK,), seen, span = inputs

        def step(c, carry):
            out_GRQK, maximum_GRQ, total_GRQ = carry
            k_NGK, v_NGK = (x[tiles[c]] for x in keys)
            logits_GRQN, _, _ = _logits(q_QGRK, k_NGK, seen, tiles[c], slopes_H, spec)
            new_GRQ = jnp.maximum(maximum_GRQ, logits_GRQN.max(-1))
            weights_GRQN = jnp.exp(logits_GRQN - new_GRQ[..., None])
            shrink_GRQ = jnp.exp(maximum_GRQ - new_GRQ)
            more_GRQK = _einsum("grqn,ngk->grqk", weights_GRQN.astype(v_NGK.dtype), v_NGK)
            out_GRQK = out_GRQK * shrink_GRQ[..., None] + more_GRQK
            return out_GRQK, new_GRQ, total_GRQ * shrink_GRQ + weights_GRQN.sum(-1)

        Q = q_QGRK.shape[0]
        zero_GRQ = _zeros(q_QGRK, (G, R, Q))
        start = (_zeros(q_QGRK, (G, R, Q, K)), zero_GRQ + LOWEST, zero_GRQ)
        with _named(keys[0], T, spec):
            out_GRQK, maximum_GRQ, total_GRQ = jax.lax.fori_loop(span[0], span[3], step, start)
        live_11Q = (seen.lo < seen.hi)[None, None]
        total_GRQ = jnp.where(live_11Q, total_GRQ, 1.0)
        out_GRQK = jnp.where(live_11Q[..., None], out_GRQK / total_GRQ[..., None], 0.0)
        lse_GRQ = jnp.where(live_11Q, maximum_GRQ + jnp.log(total_GRQ), -jnp.inf)
        return jnp.moveaxis(out_GRQK, 2, 0).astype(q_THK.dtype), lse_GRQ

    out_MQGRK, lse_MGRQ = jax.lax.map(block, blocks)
    return (
        out_MQGRK.reshape(-1, H, K)[:T],
        jnp.moveaxis(lse_MGRQ, 0, 2).reshape(H, -1)[:, :T],
    )


def backward(
    q_THK: jax.Array,
    k_SGK: jax.Array,
    v_SGK: jax.Array,
    rows: Rows,
    slopes_H: jax.Array | None,
    lse_HT: jax.Array,
    delta_HT: jax.Array,
    dout_THK: jax.Array,
    *,
    spec: Spec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dq_THK, dk_SGK, dv_SGK) in the inputs' types.

    lse_HT: from `forward`. delta_HT: float32, rowsum(out dout), less the gradient of lse.
    """
    T, H, K = q_THK.shape
    S, G = k_SGK.shape[:2]
    blocks, keys, tiles = _cut((q_THK, dout_THK, lse_HT.T, delta_HT.T), (k_SGK, v_SGK), rows, H)

    def block(sums, inputs):
        (q_QGRK, dout_QGRK, lse_QGR, delta_QGR), seen, span = inputs
        # A dead row's lse is -inf; with +inf its weights are exp(-inf) = 0.
        lse_QGR = jnp.where((seen.lo < seen.hi)[:, None, None], lse_QGR, jnp.inf)
        lse_GRQ1, delta_GRQ1 = (jnp.moveaxis(x, 0, 2)[..., None] for x in (lse_QGR, delta_QGR))

        def step(c, carry):
            dq_QGRK, dk, dv = carry
            k_NGK, v_NGK = (x[tiles[c]] for x in keys)
            logits_GRQN, slope, seen_11QN = _logits(q_QGRK, k_NGK, seen, tiles[c], slopes_H, spec)
            # Selects, for a bad row's lse is NaN (guard.py).
            weights_GRQN = jnp.where(seen_11QN, jnp.exp(logits_GRQN - lse_GRQ1), 0.0)
            dweights_GRQN = _einsum("qgrk,ngk->grqn", dout_QGRK, v_NGK)
            dlogits_GRQN = weights_GRQN * (dweights_GRQN - delta_GRQ1) * slope
            dlogits_GRQN = jnp.where(seen_11QN, dlogits_GRQN, 0.0)
            weights_GRQN, dlogits_GRQN = (
                x.astype(q_QGRK.dtype) for x in (weights_GRQN, dlogits_GRQN)
            )
            dq_QGRK += _einsum("grqn,ngk->qgrk", dlogits_GRQN, k_NGK)
            dk_NGK = _einsum("grqn,qgrk->ngk", dlogits_GRQN, q_QGRK)
            dv_NGK = _einsum("grqn,qgrk->ngk", weights_GRQN, dout_QGRK)
            return dq_QGRK, dk.at[tiles[c]].add(dk_NGK), dv.at[tiles[c]].add(dv_NGK)

        zeros = _zeros(q_QGRK, q_QGRK.shape)
        with _named(keys[0], T, spec):
            dq_QGRK, *sums = jax.lax.fori_loop(span[0], span[3], step, (zeros, *sums))
        return tuple(sums), dq_QGRK

    zeros = tuple(_zeros(x, x.shape) for x in keys)
    (dk, dv), dq_MQGRK = jax.lax.scan(block, zeros, blocks)
    return (
        dq_MQGRK.reshape(-1, H, K)[:T].astype(q_THK.dtype),
        dk.reshape(-1, G, K)[:S].astype(k_SGK.dtype),
        dv.reshape(-1, G, K)[:S].astype(v_SGK.dtype),
    )


def _named(keys, T: int, spec: Spec) -> contextlib.AbstractContextManager:
    """Writes into the compiled program's names how many tiles a block visits at most, in the mean.

    keys: tiles (., N, G, K) of them.
    """
    tiles, N = keys.shape[:2]
    most = tiles if spec.pairs is None else -(-spec.pairs // (T * N))
    return jax.named_scope(f"at_most_{min(max(most, 1), tiles)}_turns")


def _cut(queries, keys, rows: Rows, H: int):
    """Whole blocks (M, Q, ...) of what belongs to queries, tiles (., N, G, K), the tile table."""
    (T, S), G = (queries[0].shape[0], keys[0].shape[0]), keys[0].shape[1]
    Q, N = (min(BLOCK, -(-n // 8) * 8) for n in (T, S))
    over_keys, _ = visits(rows, S, Q, N)

    def blocks(x, size):
        x = jnp.pad(x, ((0, -x.shape[0] % size),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    queries = tuple(x.reshape(T, G, H // G, *x.shape[2:]) for x in queries)
    queries, rows = jax.tree.map(lambda x: blocks(x, Q), (queries, rows))
    keys = tuple(blocks(x, N) for x in keys)
    return (queries, rows, over_keys.spans), keys, over_keys.tiles


def _logits(q_QGRK, k_NGK, seen: Rows, tile, slopes_H, spec: Spec):
    """Returns (logits_GRQN, -inf where unseen; their derivative by q.k; what is seen, 11QN)."""
    logits_GRQN = _einsum("qgrk,ngk->grqn", q_QGRK, k_NGK) * spec.scale
    slope = spec.scale
    if spec.softcap is not None:
        bounded_GRQN = jnp.tanh(logits_GRQN / spec.softcap)
        logits_GRQN, slope = spec.softcap * bounded_GRQN, spec.scale * (1 - bounded_GRQN**2)
    N, G, _ = k_NGK.shape
    key_1N = (tile * N + jnp.arange(N, dtype=jnp.int32))[None]
    if slopes_H is not None:
        distance_QN = jnp.abs(seen.self[:, None] - key_1N).astype(jnp.float32)
        logits_GRQN -= slopes_H.reshape(G, -1, 1, 1) * distance_QN[None, None]
    seen_QN = (seen.lo[:, None] <= key_1N) & (key_1N < seen.hi[:, None])
    seen_11QN = seen_QN[None, None]
    return jnp.where(seen_11QN, logits_GRQN, -jnp.inf), slope, seen_11QN


def _zeros(like: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Float32 zeros that vary over the mesh axes over which `like` does."""
    return jax.lax.pcast(
        jnp.zeros(shape, jnp.float32), tuple(jax.typeof(like).mat.varying), to="varying"
    )


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
