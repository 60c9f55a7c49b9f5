"""What a training step reads and writes."""

import dataclasses

import jax

from megajax.core.tree import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """float32 master parameters, optimizer state, and the number of finished steps (int32)."""

    params: Tree
    opt: Tree
    step: jax.Array
