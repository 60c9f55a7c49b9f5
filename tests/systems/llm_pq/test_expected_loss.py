"""What rounding is expected to cost, against gradients by hand and against measured losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.models import decoder
from megajax.quant import Format
from megajax.systems.llm_pq.quality import curvature, expected_loss, leaf_of, with_leaves
from tests.tiny import MODEL


@pytest.fixture(scope="module")
def params():
    return jax.jit(decoder.parts(MODEL).init)(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).integers(0, MODEL.vocab, (3, 9))


def test_curvature_is_the_squared_gradients_of_sequences(params, rows):
    """Of one number of a matrix, by central differences of each sequence's summed loss."""
    name, place = "blocks.mlp.up", (1, 3, 5)
    parts, h = decoder.parts(MODEL, dtype="float32"), 1e-2

    @jax.jit
    def summed(step, tokens):
        leaf = leaf_of(params, name)
        moved = with_leaves(params, {name: leaf.at[place].add(step)})
        logits = parts.logits(
            moved,
            {
                "tokens": tokens[None, :-1],
                "positions": jnp.arange(8, dtype=jnp.int32)[None],
            },
        )[0, :, : MODEL.vocab]
        chosen = jnp.take_along_axis(logits, tokens[1:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).sum()

    slopes = [(float(summed(h, x)) - float(summed(-h, x))) / (2 * h) for x in jnp.asarray(rows)]
    fisher = curvature(params, MODEL, [rows[:2], rows[2:]])
    assert fisher[name][place] == pytest.approx(np.square(slopes).sum() / 24, rel=0.02)


def test_expected_loss_is_half_the_curvature_times_the_squared_change(params, rows):
    fmt = Format(4, 16, 0)
    rise = expected_loss(params, MODEL, rows, [fmt, None, Format(8, 16, 0)])
    assert rise.shape == (2, 3) and (rise[:, 1] == 0).all()
    assert (rise[:, 0] > 50 * rise[:, 2]).all() and (rise[:, 2] > 0).all()
    expected = 0.0
    for name, f in curvature(params, MODEL, [rows]).items():
        w = np.asarray(leaf_of(params, name), np.float64)[1]
        rows_of = 1 if "out" not in name and "down" not in name else w.ndim - 1
        w_KN = w.reshape(int(np.prod(w.shape[:rows_of])), -1)
        groups = w_KN.reshape(-1, 16, w_KN.shape[1])
        step = np.abs(groups).max(1, keepdims=True) / 7
        change = np.rint(groups / step) * step - groups
        expected += 0.5 * (f[1].reshape(groups.shape) * change**2).sum()
    assert rise[1, 0] == pytest.approx(expected, rel=1e-3)


def test_no_text(params):
    with pytest.raises(UserError, match="there is no sequence"):
        curvature(params, MODEL, [])
