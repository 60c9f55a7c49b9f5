"""The rival of `bench.py train`: a minimal hand-written JAX training loop of the same decoder.

Plain functions over a dict of arrays, einsum by einsum, sharded by the compiler: parameters are
stored as megajax stores them, everything else is left to it. No modules, no Layout, no Ops. It is
what a good engineer writes in an afternoon for this one model, and the price of our generality is
the ratio to it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.training.optim import make_schedule

BATCH = ("node", "data", "expert")


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary positions."""
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def automatic(mesh: Mesh) -> Mesh:
    """Returns the same mesh with axes that the compiler shards over as it likes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def block(
    x: jax.Array, w: dict, mask: jax.Array, angles: tuple, inside: Any, residual: Any
) -> jax.Array:
    """A serial layer; the compiler places the collectives between the two constraints."""
    cut = jax.lax.with_sharding_constraint
    a, m = w["attention"], w["mlp"]
    h = cut(norm(x, w["attention_norm"]["scale"]), inside)
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, a[n]) for n in ("query", "key", "value"))
    q, k = rope(q, *angles), rope(k, *angles)
    logits = jnp.einsum("bshk,bmhk->bhsm", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(jnp.where(mask, logits * q.shape[-1] ** -0.5, -1e30), -1).astype(x.dtype)
    y = checkpoint_name(jnp.einsum("bhsm,bmhk->bshk", p, v), "attended")
    y = cut(jnp.einsum("bshk,hkd->bsd", y, a["out"]), residual)
    x = x + checkpoint_name(y, "block_out")
    h = cut(norm(x, w["mlp_norm"]["scale"]), inside)
    y = cut((jax.nn.silu(h @ m["gate"]) * (h @ m["up"])) @ m["down"], residual)
    return x + checkpoint_name(y, "block_out")


def loss(cfg: Any, inside: Any, residual: Any, params: dict, batch: dict) -> jax.Array:
    """Mean cross-entropy of a packed batch."""
    dtype = jnp.dtype(cfg.train.dtype)
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    K = cfg.model.head_width
    freq = cfg.model.rope.theta ** (-jnp.arange(0, K, 2) / K)
    angle = batch["positions"][..., None, None] * freq
    angles = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
    seg, pos = batch["segments"], batch["positions"]
    mask = (seg[:, :, None] == seg[:, None]) & (pos[:, :, None] >= pos[:, None])
    layer = jax.checkpoint(
        lambda x, w: (block(x, w, mask[:, None], angles, inside, residual), None),
        policy=jax.checkpoint_policies.save_only_these_names("block_out", "attended"),
    )
    x = jax.lax.with_sharding_constraint(params["tokens"][batch["tokens"]], residual)
    x, _ = jax.lax.scan(layer, x, params["blocks"])
    head = params["tokens"].T if cfg.model.tied else params["head"]
    h = jax.lax.with_sharding_constraint(norm(x, params["norm"]["scale"]), inside)
    z = jnp.einsum("bsd,dv->bsv", h, head, preferred_element_type=jnp.float32)
    valid = batch["targets"] >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(z, jnp.maximum(batch["targets"], 0))
    return (losses * valid).sum() / valid.sum()


def make(cfg: Any, mesh: Mesh, like: Any) -> tuple[Callable, Callable]:
    """Returns (place(parameters), step(state, batch) -> (state, loss)) for a serial decoder.

    like: the parameters as megajax stores them; ours lie the same.
    """
    auto = automatic(mesh)
    stored = jax.tree.map(lambda a: NamedSharding(auto, a.sharding.spec), like)
    residual = NamedSharding(auto, P(BATCH, ("context", "tensor"), None))
    inside = NamedSharding(auto, P(BATCH, "context", None))

    def decays(path: tuple, _: Any) -> bool:
        return "norm" not in jax.tree_util.keystr(path)

    optimizer = optax.chain(
        optax.clip_by_global_norm(cfg.optim.clip),
        optax.adamw(
            make_schedule(cfg.optim, cfg.train.steps),
            b1=cfg.optim.beta1,
            b2=cfg.optim.beta2,
            weight_decay=cfg.optim.weight_decay,
            mask=functools.partial(jax.tree_util.tree_map_with_path, decays),
        ),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: tuple, batch: dict) -> tuple[tuple, jax.Array]:
        params, opt = state
        objective = functools.partial(loss, cfg, inside, residual)
        value, grads = jax.value_and_grad(objective)(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        new = optax.apply_updates(params, updates)
        return (jax.tree.map(jax.lax.with_sharding_constraint, new, stored), opt), value

    def place(params: Any) -> tuple:
        params = jax.tree.map(jax.device_put, params, stored)
        return params, jax.jit(optimizer.init)(params)

    return place, step
