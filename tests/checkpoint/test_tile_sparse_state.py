"""Tile-sparse weights in a state, through our manager and through plain Orbax."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from megajax.checkpoint.manager import CheckpointManager
from pallas_kernels import TileSparse

W = jnp.arange(1, 1 + 20 * 24, dtype=jnp.float32).reshape(20, 24)
MASK = np.zeros((20, 24), bool)
MASK[8:16, 5:19] = True
SINGLE = np.zeros((20, 24), bool)
SINGLE[2, 3] = SINGLE[19, 23] = True


@pytest.mark.parametrize(
    ("mask", "single"),
    [(MASK, None), (MASK, SINGLE), (np.zeros_like(MASK), None)],
    ids=["tiles", "residual", "nothing"],
)
def test_a_weight_comes_back(tmp_path, mask, single):
    weight = TileSparse.from_dense(W, mask, tile=8, chunk=8, residual_mask_KN=single)
    state = {"layer": [weight, jnp.ones(3)]}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    ocp.save(str(tmp_path / "plain"), state)
    manager = CheckpointManager(tmp_path / "ours")
    manager.save(1, state).result()
    for restored in (ocp.load(str(tmp_path / "plain"), like), manager.restore(like=like)):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        chex.assert_trees_all_equal(restored, state, strict=True)
        tiles = mask if single is None else mask | single
        np.testing.assert_array_equal(restored["layer"][0].to_dense(), np.where(tiles, W, 0))
        assert restored["layer"][0].density == pytest.approx(tiles.mean())
