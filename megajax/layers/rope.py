"""Rotary position embedding, with Llama 3's frequency scaling.

Sources: RoFormer (arXiv 2104.09864) section 3; Llama 3.1 release for the scaling: frequencies with
wavelengths beyond the original context are divided by `factor`, short ones kept, those between
interpolated. The rotation pairs dimension i with i + K/2, as Hugging Face checkpoints expect.

Legend: B rows, S positions, H heads, K head width.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.config import Checked, option, other_than
from megajax.core.errors import UserError

SCALED = other_than("factor", 1.0)


@dataclass(frozen=True)
class RopeConfig(Checked, section="model.rope"):
    """Frequencies of rotary embeddings, and their scaling."""

    theta: float = option(10000.0, "base of the frequencies of rotary embeddings", at_least=1)
    factor: float = option(
        1.0, "Llama 3 scaling: divisor of low frequencies; 1: no scaling", at_least=1
    )
    low_freq_factor: float = option(
        1.0,
        "Llama 3 scaling: wavelengths above original_positions divided by this are scaled",
        needs=SCALED,
        above=0,
    )
    high_freq_factor: float = option(
        4.0,
        "Llama 3 scaling: wavelengths below original_positions divided by this are not scaled",
        needs=SCALED,
        above=0,
    )
    original_positions: int = option(
        8192, "Llama 3 scaling: context before scaling", "tokens", needs=SCALED, at_least=1
    )

    def __post_init__(self):
        """Refuses an interpolation between two equal or exchanged wavelengths."""
        super().__post_init__()
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.factor != 1.0 and high <= low:
            raise UserError(
                f"model.rope.high_freq_factor={high} must be above model.rope.low_freq_factor="
                f"{low}; the default is 4.0 (--model.rope.high_freq_factor)"
            )


def frequencies(cfg: RopeConfig, head_width: int) -> np.ndarray:
    """Returns the K/2 angular frequencies, float32, radians a position."""
    freq = cfg.theta ** (-np.arange(0, head_width, 2, dtype=np.float64) / head_width)
    if cfg.factor != 1.0:
        turns = cfg.original_positions * freq / (2 * math.pi)  # full turns in the old context
        low, high = cfg.low_freq_factor, cfg.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        freq = keep * freq + (1 - keep) * freq / cfg.factor
    return freq.astype(np.float32)


def rotary(
    positions_BS: jax.Array, cfg: RopeConfig, head_width: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (cos_BSK, sin_BSK) in float32, K = head_width / 2, made once for all layers."""
    freq_11K = frequencies(cfg, head_width)[None, None]
    angle_BSK = positions_BS[..., None].astype(jnp.float32) * freq_11K
    return jnp.cos(angle_BSK), jnp.sin(angle_BSK)


def rotate(x_BSHK: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns x rotated by its positions' angles, in x's dtype."""
    cos, sin = (t[:, :, None].astype(x_BSHK.dtype) for t in tables)
    a, b = jnp.split(x_BSHK, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
