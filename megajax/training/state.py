"""What a training step reads and writes."""

import dataclasses

import jax

from megajax.core.tree import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """float32 master parameters, optimizer state, and the number of finished steps (int32).

    copies: what weights that travel as differences were in use at the last step, in the type of
    compute, whole over the axes that share a gradient; None: the run keeps none. errors: what
    codecs with feedback dropped of gradients so far, each device's own: the first dimension of all
    leaves counts the devices of the mesh (parallel/moves.py, first_errors); None: no feedback.
    """

    params: Tree
    opt: Tree
    step: jax.Array
    copies: Tree = None
    errors: Tree = None
