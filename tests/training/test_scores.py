"""Scores of given tokens depend on these tokens alone."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models import heads, vlm
from megajax.parallel import sharding
from megajax.training import scores
from tests import image_loop
from tests.tiny import MOE

# Two tokens of a row for each expert: others would be dropped.
CFG = dataclasses.replace(
    MOE,
    moe=dataclasses.replace(MOE.moe, mode="capacity", capacity_factor=0.5),
    max_positions=32,
)


def test_values_depend_on_no_padding():
    """Of a mixture of experts that drops tokens while it trains."""
    params = heads.critic_parts(CFG).init(jax.random.key(0))
    params["value"] = jax.random.normal(jax.random.key(1), params["value"].shape)
    row = [*range(1, 33)]
    longer, shorter = scores.values(CFG, params, [row, row[:16]])
    assert longer.shape == (32,) and shorter.shape == (16,)
    assert np.ptp(shorter) > 0.1
    np.testing.assert_allclose(longer[:16], shorter, atol=1e-4)
    for score in (scores.values, scores.logprobs):
        with pytest.raises(UserError, match=r"rows\[0\] has 33 tokens; the model has 32"):
            score(CFG, params, [[1] * 33])


def test_a_tower_keeps_no_logits_of_all_pairs_of_patches():
    """Of 4096 patches, those of two heads would have 128 MiB."""
    mesh, cfg = MeshSpec(data=1).build(jax.devices()[:1]), image_loop.CFG
    layout, run = scores._program(cfg, mesh, "float32")
    params = sharding.place(layout, vlm.parts(cfg).axes, image_loop.sharp())
    shapes = {
        "rotary": ((1, 16, 3), np.int32),
        "places": ((1, 16), np.int32),
        "patches": ((1, 4096, 48), np.uint8),
        "patch_places": ((1, 4096, 2), np.int32),
        "images": ((1, 4096), np.int32),
    }
    with jax.set_mesh(mesh):
        put = lambda x: jax.device_put(  # noqa: E731
            x, layout.named(layout.act("batch", *[None] * (x.ndim - 1)))
        )
        more = {name: put(np.zeros(*of)) for name, of in shapes.items()}
        program = run.lower(params, put(np.zeros((1, 16), np.int32)), more).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**26
