"""What a layer's forward pass keeps for its backward pass, apart from its weights.

A loop over layers that differentiates each by itself stacks what they keep. Weights, which lie in
buffers of their own, must not be stacked again.
"""

from collections.abc import Callable
from typing import Any

import jax

from megajax.core.tree import Tree


def detach(vjp: Any) -> tuple:
    """Returns the residuals of a jax.vjp(layer, weights, x, *others) without weights and others.

    Only this way a buffer of residuals holds activations alone (jax 0.11.2 keeps arguments apart).
    """
    return vjp.args_res[1], vjp.opaque_residuals, vjp.structured_residuals


def attach(template: Any, residuals: tuple, weights: Tree, *others: Tree) -> Callable:
    """Returns the vjp whose residuals were detached, with its weights and others again.

    template: such a vjp, of jax.eval_shape.
    """
    x, opaque, structured = residuals

    def fill(wanted: Any, given: Tree) -> Any:
        """The given leaves where the vjp keeps one; what it does not need has no leaf."""
        places, tree = jax.tree.flatten(wanted, is_leaf=lambda p: not isinstance(p, tuple | list))
        pairs = zip(places, jax.tree.leaves(given), strict=True)
        return tree.unflatten([leaf if jax.tree.leaves(place) else place for place, leaf in pairs])

    own, _, *shared = template.args_res
    filled = [fill(place, given) for place, given in zip(shared, others, strict=True)]
    return template.replace(
        args_res=[fill(own, weights), x, *filled],
        opaque_residuals=opaque,
        structured_residuals=structured,
    )
