"""The activations of a product's epilogue: in plain JAX, the specification, and in kernels."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["gelu", "gelu_tanh", "silu"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static: the activation, the type of the result, whether z is wanted as well."""

    activation: Activation | None
    out_dtype: str
    keep: bool = False


def activate(kind: Activation | None, z: jax.Array) -> jax.Array:
    """Applies an activation to float32 values. 'gelu' is exact, 'gelu_tanh' GPT-2's approximation.

    0.5 (1 + tanh(u)) is sigmoid(2 u), of which Hopper's fast exponential gives all bits that its
    fast tanh (11) does not.
    """
    return _FUNCTIONS[kind](z)


# Every word of Activation, so that none is computed as another one or as nothing.
_FUNCTIONS: dict[Activation | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda z: z,
    "gelu": lambda z: 0.5 * z * (1 + jax.lax.erf(z * math.sqrt(0.5))),
    "gelu_tanh": lambda z: z * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z * z * z)),
    "silu": lambda z: z * jax.nn.sigmoid(z),
}
ACTIVATIONS = tuple(_FUNCTIONS)


def activate_tile(kind: Activation | None, z: jax.Array) -> jax.Array:
    """Applies `activate` to values in a kernel's registers: Mosaic GPU has no erf for tiles."""
    return gelu(z) if kind == "gelu" else activate(kind, z)


def gelu(z: jax.Array) -> jax.Array:
    """max(z, 0) - |z| erfc(|z| / sqrt 2) / 2, the exact one.

    erfc as in Abramowitz and Stegun 7.1.26, error below 1.5e-7.
    """
    size = jnp.abs(z)
    t = 1 / (1 + (0.3275911 * math.sqrt(0.5)) * size)
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    return jnp.maximum(z, 0.0) - 0.5 * size * series * jnp.exp(-0.5 * z * z)
