"""The name by which a rematerialisation policy keeps what attention's backward pass needs.

The output and the log-sum-exp get it inside the forward rules of the custom derivatives. A policy
that saves the name leaves one forward pass in the program; one that saves neither, or a name given
to the output alone outside of the rule, makes the backward pass run attention's forward pass again.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

SAVED = "attended"


def named(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns attention's output and log-sum-exp under the name."""
    return tuple(checkpoint_name(x, SAVED) for x in arrays)
