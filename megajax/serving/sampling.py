"""From logits to the next token: greedy, temperature, top-k, nucleus.

Legend: B rows, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from megajax.core.config import Checked, option
from megajax.core.needs import above
from megajax.layers.losses import NEGATIVE

GREEDY = 1e-30  # (chosen) temperature below which logits over it would not be finite in float32


@dataclass(frozen=True)
class SamplingConfig(Checked, section="sampling"):
    """How a token is chosen."""

    temperature: float = option(0.8, "divides the logits; 0: greedy", at_least=0)
    top_k: int | None = option(
        None, "only the k likeliest tokens; none: all", needs=above(0, "temperature"), at_least=1
    )
    top_p: float = option(
        1.0,
        "only the likeliest tokens that together have this probability",
        needs=above(0, "temperature"),
        above=0,
        at_most=1,
    )


def sample(logits_BV: jax.Array, key: jax.Array, cfg: SamplingConfig) -> jax.Array:
    """Returns ids_B, int32. logits: float32, the vocabulary whole on every device."""
    if cfg.temperature < GREEDY:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    logits_BV = logits_BV / cfg.temperature
    if cfg.top_k is not None:
        kth_B1 = jax.lax.top_k(logits_BV, min(cfg.top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, NEGATIVE, logits_BV)
    if cfg.top_p < 1:
        sorted_BV = -jnp.sort(-logits_BV, -1)
        before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, -1), -1) - jax.nn.softmax(sorted_BV, -1)
        # The smallest kept logit: the last whose predecessors have less than top_p together.
        least_B1 = jnp.where(before_BV < cfg.top_p, sorted_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, NEGATIVE, logits_BV)
    sharding = jax.typeof(logits_BV).sharding
    spec = None if sharding.mesh.empty else sharding.spec
    noise_BV = jax.random.gumbel(key, logits_BV.shape, jnp.float32, out_sharding=spec)
    return jnp.argmax(logits_BV + noise_BV, -1).astype(jnp.int32)
