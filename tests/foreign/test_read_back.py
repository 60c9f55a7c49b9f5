"""Folders that we write, as another program read them (tests/golden/make_read_back.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.foreign import hf_quantized
from megajax.models import decoder
from tests.golden.make_read_back import CASES, OUT, TOKENS, digest, write


@pytest.mark.parametrize("case", CASES)
def test_another_program_has_our_logits(case, tmp_path):
    """GPTQModel read exactly these tensors and settings, and its float32 logits are ours.

    If a digest differs because the writer was changed, the folders have to be read again.
    """
    write(tmp_path, case)
    with np.load(OUT) as file:
        assert digest(tmp_path / case) == str(file[f"{case}.digest"])
        expected = file[f"{case}.logits"]
    cfg, params = hf_quantized.load(tmp_path / case)
    batch = {"tokens": jnp.asarray(TOKENS, jnp.int32), "positions": jnp.arange(8)[None]}
    logits = jax.jit(decoder.parts(cfg, dtype="float32").logits)(params, batch)[..., : cfg.vocab]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert np.std(expected) > 0.5
