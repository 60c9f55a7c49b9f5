"""Scores of given tokens depend on these tokens alone."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.models import heads
from megajax.training import scores
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
