"""A grouped product and its gradients in float64 NumPy, group after group."""

import math

import numpy as np


def arrays(seed, M, G, K, N, transpose=False):
    """(lhs, rhs, dy), float64 standard normal; the product has variance 1."""
    random = np.random.default_rng(seed)
    rhs = random.standard_normal((G, N, K) if transpose else (G, K, N)) / math.sqrt(K)
    return random.standard_normal((M, K)), rhs, random.standard_normal((M, N))


def oracle(lhs, rhs, sizes, dy, transpose=False):
    """(y, dlhs, drhs)."""
    y, dlhs, drhs = np.zeros_like(dy), np.zeros_like(lhs), np.zeros_like(rhs)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, min(begin + size, len(lhs)))
        w = rhs[group].T if transpose else rhs[group]
        y[rows] = lhs[rows] @ w
        dlhs[rows] = dy[rows] @ w.T
        dw = lhs[rows].T @ dy[rows]
        drhs[group] = dw.T if transpose else dw
        begin += size
    return y, dlhs, drhs


def split(seed, rows, G, empty=0.0):
    """Random sizes (G,) that add up to `rows`, about `empty` of them 0."""
    random = np.random.default_rng(seed)
    shares = random.random(G) * (random.random(G) >= empty)
    shares[random.integers(G)] += 1e-3
    return random.multinomial(rows, shares / shares.sum())
