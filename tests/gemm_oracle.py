"""activation(x w + bias) + residual and its gradients in float64, by formulas of their own."""

import math

import numpy as np

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
PARTS = ("bias", "residual")


def arrays(seed, rows, K, N, parts=PARTS):
    """({x, w and the named parts}, dy), float64 standard normal; z has variance 1."""
    random = np.random.default_rng(seed)
    operands = {
        "x": random.standard_normal((*rows, K)),
        "w": random.standard_normal((K, N)) / math.sqrt(K),
        "bias": random.standard_normal(N),
        "residual": random.standard_normal((*rows, N)),
    }
    dy = random.standard_normal((*rows, N))
    return {k: v for k, v in operands.items() if k in ("x", "w", *parts)}, dy


def activate(kind, z):
    """(value, derivative): GELU by the normal distribution, its approximation by tanh."""
    if kind == "gelu":
        below = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)))(z)
        return z * below, below + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    if kind == "gelu_tanh":
        c = math.sqrt(2 / math.pi)
        t = np.tanh(c * (z + 0.044715 * z**3))
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 0.134145 * z * z)
    if kind == "silu":
        s = 0.5 * (1 + np.tanh(z / 2))
        return z * s, s + z * s * (1 - s)
    return z, np.ones_like(z)


def oracle(kind, dy, x, w, bias=None, residual=None):
    """(y, {name: gradient of sum(y dy)})."""
    rows = x.reshape(-1, x.shape[-1])
    z = (rows @ w).reshape(dy.shape) + (0 if bias is None else bias)
    y, slope = activate(kind, z)
    dz = (dy * slope).reshape(-1, dy.shape[-1])
    grads = {"x": (dz @ w.T).reshape(x.shape), "w": rows.T @ dz}
    if bias is not None:
        grads["bias"] = dz.sum(0)
    if residual is not None:
        y, grads["residual"] = y + residual, dy
    return y, grads


def relative(result, want):
    """The largest error, over the root mean square of what is right."""
    return np.abs(np.asarray(result, np.float64) - want).max() / np.sqrt((want**2).mean())
