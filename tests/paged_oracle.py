"""Steps over paged keys and values, and their attention as a float64 loop over rows and heads."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One step. contexts: keys of each sequence, this step's included. counts: rows of this step.

    spare: rows of q behind the last segment. more: pages that a table has room for behind a
    sequence's last one.
    """

    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    width: int = 16
    page: int = 16
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    spare: int = 0
    more: int = 1

    @property
    def rows(self):
        return sum(self.counts) + self.spare


@dataclasses.dataclass
class Sequences:
    """q (T, H, K), float64; lists of k and v (context, G, K) and of their scales (context, G)."""

    q: np.ndarray
    k: list
    v: list
    sinks: np.ndarray | None
    k_scale: list | None = None
    v_scale: list | None = None


def draw(case, seed):
    """Normal values; what q holds in spare rows is NaN."""
    random = np.random.default_rng(seed)
    H, G = case.heads
    q = random.standard_normal((case.rows, H, case.width))
    q[sum(case.counts) :] = np.nan
    k, v = ([random.standard_normal((n, G, case.width)) for n in case.contexts] for _ in range(2))
    return Sequences(q, k, v, random.standard_normal(H) if case.sinks else None)


def quantize(sequences, dtype, largest):
    """The same in 8 bits: stored numbers that float64 holds, and scales a token and head."""

    def one(x):
        scale = np.float32(np.abs(x).max(-1) / largest)
        stored = x / scale[..., None]
        stored = stored.round() if np.issubdtype(dtype, np.integer) else stored
        return np.asarray(stored.astype(dtype), np.float64), scale

    k, v = ([one(x) for x in arrays] for arrays in (sequences.k, sequences.v))
    return dataclasses.replace(
        sequences,
        k=[x for x, _ in k],
        v=[x for x, _ in v],
        k_scale=[s for _, s in k],
        v_scale=[s for _, s in v],
    )


def lay_out(case, sequences, seed, waste=np.nan):
    """Returns (k and v pages, their scales or None, table, start, count, context).

    Pages lie in random order between pages of nobody; what nobody wrote is `waste`. Page 0 is
    nobody's; places of the table behind a sequence's last page name any page.
    """
    random = np.random.default_rng(seed + 1)
    N, G, K = case.page, case.heads[1], case.width
    used = [-(-n // N) for n in case.contexts]
    # Few different shapes: each is a program to compile.
    P = -(-(4 + sum(used)) // 64) * 64
    M = -(-(max([*used, 0]) + case.more) // 8) * 8
    ids = list(random.permutation(np.arange(1, P)))
    table = random.integers(0, P, (len(used), M)).astype(np.int32)
    pools = [np.full((P, N, G, K), waste) for _ in range(2)]
    scales = [np.full((P, N, G), np.nan, np.float32) for _ in range(2)]
    for b, pages in enumerate(used):
        for m in range(pages):
            table[b, m] = page = ids.pop()
            span = slice(m * N, (m + 1) * N)
            for pool, values in zip(pools, (sequences.k, sequences.v), strict=True):
                part = values[b][span]
                pool[page, : len(part)] = part
            if sequences.k_scale is not None:
                for pool, values in zip(
                    scales, (sequences.k_scale, sequences.v_scale), strict=True
                ):
                    part = values[b][span]
                    pool[page, : len(part)] = part
    start = np.cumsum([0, *case.counts])[:-1].astype(np.int32)
    numbers = (table, start, np.int32(case.counts), np.int32(case.contexts))
    return (*pools, *(scales if sequences.k_scale is not None else (None, None)), *numbers)


def attention(case, sequences):
    """out (T, H, K) float64, row by row."""
    H, G = case.heads
    out, row = np.zeros(sequences.q.shape), 0
    left = (case.window or (None, None))[0]
    for b, (context, count) in enumerate(zip(case.contexts, case.counts, strict=True)):
        for i in range(count):
            place = context - count + i
            first = 0 if left is None else max(0, place - left)
            for h in range(H):
                g = h // (H // G)
                k, v = (x[b][first : place + 1, g] for x in (sequences.k, sequences.v))
                if sequences.k_scale is not None:
                    k = k * sequences.k_scale[b][first : place + 1, g, None].astype(np.float64)
                    v = v * sequences.v_scale[b][first : place + 1, g, None].astype(np.float64)
                logits = k @ sequences.q[row, h] * case.width**-0.5
                if case.softcap is not None:
                    logits = case.softcap * np.tanh(logits / case.softcap)
                sink = -np.inf if sequences.sinks is None else sequences.sinks[h]
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                out[row, h] = weights @ v / (weights.sum() + np.exp(sink - top))
            row += 1
    return out
