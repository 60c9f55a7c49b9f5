"""Packed attention as a float64 loop over unpadded sequences, heads and queries."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. len_k: None for self-attention. spare: tokens past the last segment."""

    len_q: tuple[int, ...]
    len_k: tuple[int, ...] | None = None
    heads: tuple[int, int] = (2, 2)
    width: int = 16
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    spare: int = 0

    @property
    def options(self):
        return {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes,
        }

    @property
    def slopes(self):
        H = self.heads[0]
        return np.float32(2.0 ** -np.arange(1, H + 1)) if self.alibi else None

    @property
    def cu_q(self):
        return np.concatenate([[0], np.cumsum(self.len_q)]).astype(np.int32)

    @property
    def cu_k(self):
        return np.concatenate([[0], np.cumsum(self.len_k or self.len_q)]).astype(np.int32)

    def arrays(self, seed, spare_value=0.0):
        """q, k, v, dout, dlse in float64; the spare tokens hold spare_value."""
        random = np.random.default_rng(seed)
        T, S = self.cu_q[-1] + self.spare, self.cu_k[-1] + self.spare
        H, G = self.heads
        shapes = ((T, H, self.width), (S, G, self.width), (S, G, self.width), (T, H, self.width))
        arrays = [random.standard_normal(shape) for shape in shapes]
        for x in arrays:
            x[x.shape[0] - self.spare :] = spare_value
        dlse = random.standard_normal((H, T))
        return *arrays, dlse


def visible(case):
    """Boolean (T, S) by the definition, pair by pair."""
    cu_q, cu_k = case.cu_q, case.cu_k
    seen = np.zeros((cu_q[-1] + case.spare, cu_k[-1] + case.spare), bool)
    left, right = case.window or (None, None)
    for b in range(len(cu_q) - 1):
        n, m = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        for i in range(n):
            place = i + m - n
            for j in range(m):
                ok = not (case.causal and j > place)
                ok &= left is None or j >= place - left
                ok &= right is None or j <= place + right
                seen[cu_q[b] + i, cu_k[b] + j] = ok
    return seen


def attention(case, q, k, v, dout=None, dlse=None):
    """Returns out, lse, and with dout also dq, dk, dv, all float64."""
    H, G = case.heads
    T = q.shape[0]
    seen = visible(case)
    out, lse = np.zeros(q.shape), np.full((H, T), -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    position = np.zeros(T)
    for b in range(len(case.cu_q) - 1):
        place = np.arange(case.cu_q[b], case.cu_q[b + 1])
        position[place] = place - case.cu_q[b + 1] + case.cu_k[b + 1]
    for h in range(H):
        for t in range(T):
            s = np.flatnonzero(seen[t])
            if not s.size:
                continue
            keys, values = k[s, h // (H // G)], v[s, h // (H // G)]
            logits = keys @ q[t, h] * case.width**-0.5
            slope = np.full(s.size, case.width**-0.5)
            if case.softcap is not None:
                bounded = np.tanh(logits / case.softcap)
                logits, slope = bounded * case.softcap, slope * (1 - bounded**2)
            if case.alibi:
                logits = logits - case.slopes[h] * np.abs(position[t] - s)
            lse[h, t] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            weights = np.exp(logits - lse[h, t])
            out[t, h] = weights @ values
            if dout is None:
                continue
            dweights = values @ dout[t, h]
            dlogits = weights * (dweights - weights @ dweights + dlse[h, t]) * slope
            dq[t, h] = dlogits @ keys
            np.add.at(dk[:, h // (H // G)], s, dlogits[:, None] * q[t, h])
            np.add.at(dv[:, h // (H // G)], s, weights[:, None] * dout[t, h])
    return (out, lse) if dout is None else (out, lse, dq, dk, dv)
