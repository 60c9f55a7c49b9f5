"""The feed-forward part of a block: SwiGLU or GELU, without its two communications.

Sources: GLU Variants (arXiv 2002.05202) for SwiGLU. 'gelu_tanh' is the approximation that GPT-2
uses; 'gelu' is exact; 'quick_gelu' is CLIP's approximation, x sigmoid(1.702 x). 'swiglu_clamped' is
GPT-OSS's: that approximation of the clamped gate, times the clamped other product plus one.

Legend: B rows, S positions, D model width, F feed-forward width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout
from megajax.layers import param

INPUTS = "gate", "up"  # the weights that read the block's input; gate: SwiGLU only
Activation = Literal["swiglu", "geglu_tanh", "swiglu_clamped", "gelu", "gelu_tanh", "quick_gelu"]
# (GPT-OSS, config.json: swiglu_limit and swiglu_alpha) of 'swiglu_clamped'.
LIMIT, STEEPNESS = 7.0, 1.702


@dataclasses.dataclass(frozen=True)
class Nonlinearity:
    """An activation.

    apply: computes it, from gate and up if it is gated. hugging_face: its names in the table of
    transformers, first the one that exports use; for a gated activation, the names of the gate's
    function.
    """

    apply: Callable[..., jax.Array]
    hugging_face: tuple[str, ...]
    is_gated: bool = False


def _clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate sigmoid(1.702 gate) (up + 1), gate clamped to at most 7 and up to [-7, 7]."""
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(STEEPNESS * gate) * (up + 1.0)


# Every word of Activation is here (tests/layers/test_mlp.py), so that none is computed as another.
ACTIVATIONS: dict[Activation, Nonlinearity] = {
    "swiglu": Nonlinearity(lambda gate, up: jax.nn.silu(gate) * up, ("silu", "swish"), True),
    "swiglu_clamped": Nonlinearity(_clamped, ("silu", "swish"), True),
    "geglu_tanh": Nonlinearity(
        lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
        ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
        True,
    ),
    "gelu": Nonlinearity(
        functools.partial(jax.nn.gelu, approximate=False), ("gelu", "gelu_python")
    ),
    "gelu_tanh": Nonlinearity(
        functools.partial(jax.nn.gelu, approximate=True),
        ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
    ),
    "quick_gelu": Nonlinearity(lambda x: x * jax.nn.sigmoid(1.702 * x), ("quick_gelu",)),
}


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """Shape of one feed-forward layer."""

    width: int
    hidden: int
    activation: Activation
    bias: bool
    down_std: float


class Mlp(nnx.Module):
    """Parameters and activation."""

    def __init__(self, cfg: MlpConfig, layout: Layout | None, *, rngs: nnx.Rngs):
        """Makes up (and gate, for SwiGLU) (D,F) and down (F,D), with biases if asked."""
        D, F = cfg.width, cfg.hidden
        self.cfg = cfg
        if ACTIVATIONS[cfg.activation].is_gated:
            self.gate = param.normal(rngs, layout, (D, F), ("embed", "mlp"), 0.02)
        self.up = param.normal(rngs, layout, (D, F), ("embed", "mlp"), 0.02)
        self.down = param.normal(rngs, layout, (F, D), ("mlp", "embed"), cfg.down_std)
        if cfg.bias:
            self.up_bias = param.constant(layout, (F,), ("mlp",), 0.0)
            self.down_bias = param.constant(layout, (D,), (None,), 0.0)

    @property
    def inputs(self) -> tuple[nnx.Param, ...]:
        """The weights that read the block's input."""
        return (self.gate, self.up) if ACTIVATIONS[self.cfg.activation].is_gated else (self.up,)

    def __call__(self, projected: tuple[jax.Array, ...]) -> jax.Array:
        """Turns the projected inputs (each B,S,F) into the hidden values, ready for `down`."""
        *gate, up_BSF = projected
        if self.cfg.bias:
            up_BSF = up_BSF + param.broadcast(self.up_bias, up_BSF, up_BSF.dtype)
        return activate(self.cfg.activation, (*gate, up_BSF))


def activate(kind: Activation, projected: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the hidden values of the products with gate (SwiGLU only) and up."""
    return ACTIVATIONS[kind].apply(*projected)


# ---- dropout
#
# Dropout whose mask lies like the array it drops from, equal on every mesh.


def drop(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Returns x with each element zeroed with probability `rate`, the rest scaled by 1/(1-rate)."""
    sharding = jax.typeof(x).sharding
    spec = None if sharding.mesh.empty else sharding.spec
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape, out_sharding=spec)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def dropper(key: jax.Array | None, rate: float, place: int) -> Callable | None:
    """Returns the dropout of one place in a block, x -> x, or None without a key."""
    if key is None:
        return None
    return functools.partial(drop, rate=rate, key=jax.random.fold_in(key, place))
