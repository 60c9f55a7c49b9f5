"""A mixture of experts as a loop over tokens in float64 NumPy, and what its tests share."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from megajax.layers.mlp import MlpConfig
from megajax.layers.moe import Moe, MoeConfig
from megajax.layers.ops import Ops

D, F = 16, 8
MLP = MlpConfig(width=D, hidden=F, activation="swiglu", bias=False, down_std=0.03)
# Biases of router and experts, and the clamped activation, of which the clamps are in use.
BIASED = dataclasses.replace(MLP, activation="swiglu_clamped", bias=True)


def build(cfg: MoeConfig, layout=None, ops=None, mlp=MLP):
    """Returns (graph, parameters) with weights far from 0. Call it under the layout's mesh."""
    moe = Moe(cfg, mlp, layout, ops or Ops(), rngs=nnx.Rngs(0))
    graph, state = nnx.split(moe)
    params = nnx.to_pure_dict(state)
    params = jax.tree.map(lambda a: 20 * a if a.ndim == 3 else 50 * a, params)
    if mlp.bias:
        random = np.random.default_rng(0)
        for name in ("router_bias", "gate_bias", "up_bias", "down_bias"):
            params[name] += random.standard_normal(params[name].shape).astype(np.float32)
        params["gate"] *= 4
    return graph, params


def one_token(x, w, cfg: MoeConfig):
    """Returns (chosen experts, their weights), best first."""
    logits = x @ w["router"] + w.get("router_bias", 0.0)
    if cfg.score == "softmax":
        scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores + w["bias"] if "bias" in w else scores.copy()
    each = cfg.experts // cfg.groups
    best = [np.sort(choice[g * each : (g + 1) * each])[-2:].sum() for g in range(cfg.groups)]
    for g in np.argsort(best)[: cfg.groups - cfg.top_groups]:
        choice[g * each : (g + 1) * each] = -np.inf
    chosen = np.argsort(-choice, kind="stable")[: cfg.top_k]
    weights = scores[chosen]
    if cfg.normalise:
        weights = weights / weights.sum()
    return chosen, cfg.scale * weights


def loop(params, x_BSD, cfg: MoeConfig):
    """Returns (y_BSD, pairs dropped, pairs that chose each expert)."""
    w = {k: np.asarray(v, np.float64) for k, v in params.items()}
    y, dropped, load = np.zeros(x_BSD.shape), 0, np.zeros(cfg.experts, int)
    slots = cfg.slots(x_BSD.shape[1])
    for b, row in enumerate(np.asarray(x_BSD, np.float64)):
        taken = np.zeros(cfg.experts, int)
        for s, x in enumerate(row):
            for e, weight in zip(*one_token(x, w, cfg), strict=True):
                load[e] += 1
                taken[e] += 1
                if slots is not None and taken[e] > slots:
                    dropped += 1
                    continue
                gate, up = x @ w["gate"][e], x @ w["up"][e]
                if "gate_bias" in w:  # GPT-OSS's experts
                    gate = np.minimum(gate + w["gate_bias"][e], 7)
                    up = np.clip(up + w["up_bias"][e], -7, 7) + 1
                    hidden = gate / (1 + np.exp(-1.702 * gate)) * up
                    y[b, s] += weight * (hidden @ w["down"][e] + w["down_bias"][e])
                else:
                    y[b, s] += weight * (gate / (1 + np.exp(-gate)) * up) @ w["down"][e]
    return y, dropped, load


def gradients(params, x, graph):
    """The derivative of sum(y^2) by (parameters, x), of the layer on one device."""
    return jax.tree.map(np.asarray, _gradient(graph)(params, x))


@functools.cache
def _gradient(graph):
    def value(params, x):
        return (nnx.merge(graph, params)(x)[0] ** 2).sum()

    return jax.jit(jax.grad(value, (0, 1)))


def differences(params, x_BSD, cfg: MoeConfig, direction, step=1e-5):
    """The derivative of sum(y^2) along a direction of (parameters, x), by central differences."""

    def value(sign):
        moved, x = jax.tree.map(
            lambda a, d: np.asarray(a, np.float64) + sign * step * np.asarray(d, np.float64),
            (params, x_BSD),
            direction,
        )
        return (loop(moved, x, cfg)[0] ** 2).sum()

    return (value(1) - value(-1)) / (2 * step)


def tokens(seed: int, rows: int = 8, positions: int = 4):
    return np.random.default_rng(seed).standard_normal((rows, positions, D)).astype(np.float32)
