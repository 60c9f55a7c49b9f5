"""Both gradients of the tile-sparse product for Hopper, each by its kernel."""

import jax

from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.tile_sparse import hopper, hopper_weights, reference
from pallas_kernels.tile_sparse.format import Pattern


def backward(
    x_xK: jax.Array,
    slots_Skn: jax.Array,
    dz_xP: jax.Array,
    pattern: Pattern,
    *,
    tile_dx: Tile,
    tile_dw: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array]:
    """Returns what reference.backward does, for bf16 and f16. blocks: thread blocks, one an SM.

    A result of 8 or 16 columns is too narrow for wgmma: with such chunks dx is one dense product.
    """
    static = {"interpret": interpret, "blocks": blocks}
    if pattern.together > 1:
        dx_xK = reference.gradient(dz_xP, slots_Skn, pattern)
    else:
        dx_xK = hopper.gradient(dz_xP, slots_Skn, pattern, tile=tile_dx, **static)
    return dx_xK, hopper_weights.weights(x_xK, dz_xP, pattern, tile=tile_dw, **static)
