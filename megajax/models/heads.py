"""Heads of a decoder's trunk other than the vocabulary's.

Critic: one number a position, the value of the tokens up to it. Its trunk is a decoder's, with the
same names of parameters, so that it can start from the policy's weights; the head `value` starts
at 0.

Legend: B rows, S positions, D model width.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.layers import param
from megajax.layers.losses import LossSums
from megajax.layers.ops import Ops
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import Batch, ModelParts

HEAD = "value"  # the member of a critic's parameters that a decoder does not have


class Critic(decoder.Decoder):
    """A decoder whose head gives a value a position in the place of logits."""

    def __init__(self, cfg: DecoderConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes the trunk and the head. cfg: tied, or a head for the vocabulary would be made."""
        super().__init__(cfg, layout, ops, rngs=rngs)
        self.value = param.normal(rngs, layout, (cfg.width, 1), ("embed", None), 0.0)

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Returns float32 values (B, S, 1) of the residual stream after the last block."""
        # One number a position is gathered over the sequence, not the model width.
        values_BS1 = self.ops.score(self.norm(x_BSD), self.value, jnp.float32)
        if self.layout is None:
            return self.ops.gather(values_BS1)
        # Every rank of tensor computes the same loss of the values, so their gradient is whole; the
        # type that `gather` gives would say that it is a partial sum.
        return jax.sharding.reshard(values_BS1, self.layout.act("batch", "seq", None))

    def loss(self, x_BSD: jax.Array, batch: Batch, chunks: int, loss: Callable | None) -> LossSums:
        """Returns loss(values_BS, batch)."""
        assert loss is not None, "a critic has no loss of its own"
        return loss(self.logits(x_BSD)[..., 0], batch)


def critic_parts(
    cfg: DecoderConfig,
    layout: Layout | None = None,
    ops: Ops | None = None,
    dtype: jnp.dtype | str = "float32",
    loss: Callable[[jax.Array, Batch], LossSums] | None = None,
) -> ModelParts:
    """Returns a critic as pure functions; `head` gives values (B, S, 1).

    Args: as of decoder.parts. loss(values_BS, batch) -> LossSums: of each position's value.
    """
    cfg = dataclasses.replace(cfg, tied=True)
    return decoder.parts(cfg, layout, ops, dtype, loss=loss, network=Critic)


def critic_params(policy: Tree, fresh: Tree) -> Tree:
    """Returns a critic's parameters with the trunk of a policy. fresh: a new critic's."""
    return {name: x if name == HEAD else policy[name] for name, x in fresh.items()}
