"""A masked product and its gradients in float64, and masks of many kinds, without tiles."""

import math

import numpy as np

from tests import gemm_oracle


def arrays(seed, M, K, N):
    """(x, w, bias, dy), float64 standard normal; the unmasked product has variance 1."""
    random = np.random.default_rng(seed)
    w = random.standard_normal((K, N)) / math.sqrt(K)
    x, bias, dy = (random.standard_normal(shape) for shape in ((M, K), N, (M, N)))
    return x, w, bias, dy


def oracle(activation, dy, x, w, mask, bias=None):
    """(y, {x, w, bias: gradient of sum(y dy)}) of the dense weight with zeros."""
    y, grads = gemm_oracle.oracle(activation, dy, x, np.where(mask, w, 0), bias)
    return y, grads | {"w": np.where(mask, grads["w"], 0)}


def tilewise(seed, K, N, tile, chunk, share, columns=1.0, inside=1.0):
    """Kept columns at random, those in tiles from left to right, chunks of each tile at random.

    share, columns, inside: of chunks, columns, and entries of chunks that are kept.
    """
    random = np.random.default_rng(seed)
    mask = np.zeros((K, N), bool)
    columns_left = np.flatnonzero(random.random(N) < columns)
    for begin in range(0, len(columns_left), tile):
        for first in range(0, K, chunk):
            if random.random() < share:
                mask[first : first + chunk, columns_left[begin : begin + tile]] = True
    return mask & (random.random((K, N)) < inside)


def of_lengths(K, N, tile, chunk, lengths):
    """Columns in place; tile t keeps lengths[t] chunks, from the t-th on and around."""
    mask = np.zeros((K, N), bool)
    chunks = -(-K // chunk)
    for t, length in enumerate(lengths):
        for c in range(t, t + length):
            first = c % chunks * chunk
            mask[first : first + chunk, t * tile : (t + 1) * tile] = True
    return mask
