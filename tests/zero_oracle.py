"""The exchange of data parallelism in NumPy, from its rule alone, to nearest.

A group of neighbours: s = amax / Q in float32, by the float32 reciprocal of Q; codes are rounded
products with 1 / s. Hadamard: H / sqrt(32) on 32 neighbours, H of Sylvester. Sums in rank order.
"""

import numpy as np

BLOCK = 32
TILE = 4096  # to which rows are filled up, if that adds at most 1/256


def hadamard(x):
    """Of the last dimension, by the matrix, in float64."""
    h = np.ones((1, 1))
    while len(h) < BLOCK:
        h = np.block([[h, h], [h, -h]])
    return (x.reshape(-1, BLOCK) @ h / np.sqrt(BLOCK)).reshape(x.shape)


def quantize(x, bits, group):
    """Returns (what is decoded, the scale of each element), float32; x: (..., N)."""
    q, n = 2 ** (bits - 1) - 1, x.shape[-1]
    missing = -n % group
    x = np.pad(np.float32(x), [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    x = x.reshape(*x.shape[:-1], -1, group)
    amax = np.abs(x).max(-1, keepdims=True)
    scale = np.where(amax > 0, amax * np.float32(1 / q), np.float32(1))
    code = np.rint(np.clip(x * (np.float32(1) / scale), -q, q))
    flat = lambda y: y.reshape(*y.shape[:-2], -1)[..., :n]  # noqa: E731
    return flat(np.float32(code * scale)), flat(np.broadcast_to(scale, x.shape))


def in_order(rows):
    """Adds up along the first dimension, from the first to the last, in float32."""
    total = rows[0]
    for row in rows[1:]:
        total = np.float32(total + row)
    return total


def reduce_scatter(x, levels=((8, 128), (4, 128)), transform=True, rounding=0.5):
    """Returns (pieces (nodes, ranks, C), bound on the L2 error of each block of 32 of them).

    x: (nodes, ranks, N). rounding: largest error of a code: 0.5 to nearest, 1 stochastic.
    """
    nodes, ranks, n = x.shape
    length = -(-n // (nodes * ranks))
    row = -(-length // BLOCK) * BLOCK if transform else length
    tiled = -(-row // TILE) * TILE
    row = tiled if 256 * (tiled - row) <= row else row
    x = np.pad(x, ((0, 0), (0, 0), (0, nodes * ranks * length - n)))
    x = np.pad(x.reshape(nodes, ranks, -1, length), [(0, 0)] * 3 + [(0, row - length)])
    x = np.float32(hadamard(x.astype(np.float64)) if transform else x)
    x = x.reshape(nodes, ranks, nodes, ranks, row)  # of sender (i, j), for rank (k, l)
    slack = np.zeros((nodes, ranks, row))  # at rank (k, l), the largest error of each element
    # Inside a node: sender (i, j) -> (i, l), one line for all nodes k.
    sent = x.transpose(0, 1, 3, 2, 4).reshape(nodes, ranks, ranks, nodes * row)
    if ranks > 1:
        sent, scale = quantize(sent, *levels[0])
        worst = rounding * scale.reshape(nodes, ranks, ranks, nodes, row).sum((0, 1))
        slack += worst.transpose(1, 0, 2)
    held = in_order(sent.swapaxes(0, 1)).reshape(nodes, ranks, nodes, row)  # at (i, l), for (k, l)
    if nodes > 1:
        held, scale = quantize(held, *levels[1])
        slack += rounding * scale.sum(0).swapaxes(0, 1)
    total = in_order(held).swapaxes(0, 1).astype(np.float64)
    total = hadamard(total) if transform else total
    bound = np.sqrt((slack.reshape(nodes, ranks, -1, BLOCK) ** 2).sum(-1)) if transform else slack
    return np.ascontiguousarray(total[..., :length]), bound
