"""The Hadamard transform against its matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.quant import hadamard
from tests import quant_oracle as oracle

compiled = jax.jit(hadamard, static_argnums=1)


@pytest.mark.parametrize("size", [1, 32, 128])
def test_it_is_the_matrix_and_its_own_inverse(size, seed):
    x_RN = np.random.default_rng(seed).standard_normal((3, 256)).astype(np.float32)
    y_RN = compiled(x_RN, size)
    for x_N, y_N in zip(x_RN, y_RN, strict=True):
        np.testing.assert_allclose(y_N, oracle.hadamard(x_N, size), rtol=0, atol=3e-6)
    np.testing.assert_allclose(compiled(y_RN, size), x_RN, rtol=0, atol=3e-6)


def test_its_bits_do_not_depend_on_the_cut(seed):
    x_N = np.random.default_rng(seed).standard_normal(4096).astype(np.float32)
    whole_N = np.asarray(compiled(x_N))
    rows = np.asarray(compiled(x_N.reshape(16, 256)))
    np.testing.assert_array_equal(rows.reshape(-1), whole_N)
    np.testing.assert_array_equal(compiled(x_N[:32]), whole_N[:32])


def test_types_and_outliers():
    y_N = compiled(np.where(np.arange(64) == 3, 32.0, 0).astype(jnp.bfloat16))
    assert y_N.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.abs(y_N.astype(jnp.float32)), [32**0.5] * 32 + [0] * 32, rtol=4e-3
    )


@pytest.mark.parametrize(
    "x, size, message",
    [
        (np.ones(33, np.float32), 32, "nearest: 32, 64"),
        (np.ones(31, np.float32), 32, "nearest: 32"),
        (np.float32(1), 32, "no dimension"),
        (np.ones(48, np.float32), 24, "nearest: 16, 32"),
        (np.ones(48, np.float32), 0, "power of two"),
        (np.ones(48, np.float32), 2.0, "power of two"),
        (np.ones(32, np.int32), 32, "floating type, got int32"),
    ],
)
def test_bad_calls_are_explained(x, size, message):
    with pytest.raises(UserError, match=message):
        hadamard(x, size)
