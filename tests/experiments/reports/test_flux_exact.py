"""The rows of flux.py's exact part: layers too narrow for the paper, and a wrong one."""

import numpy as np
import pytest

from experiments.reports import overlap
from pallas_kernels.collective.cases import Dense


@pytest.mark.parametrize("gated", [False, True])
def test_numpy_is_what_its_derivatives_say(gated, seed):
    """Along one direction of all arguments, by central differences of its own y."""
    arrays = overlap.draw_dense(Dense(width=128, hidden=192, inputs=1 + gated), 5, seed)
    arrays = tuple(a.astype(np.float64) for a in arrays)
    random, step = np.random.default_rng(seed), 1e-6
    along = [random.standard_normal(a.shape) for a in arrays[:-1]]

    def value(sign):
        moved = [a + sign * step * d for a, d in zip(arrays, along, strict=False)]
        return (overlap.exact((*moved, arrays[-1]), gated)[0] * arrays[-1]).sum()

    _, *grads = overlap.exact(arrays, gated)
    want = sum((g * d).sum() for g, d in zip(grads, along, strict=True))
    assert (value(1) - value(-1)) / (2 * step) == pytest.approx(want, rel=1e-6)


@pytest.mark.slow  # compiled layers
@pytest.mark.parametrize("inputs", [1, 2])
def test_rows_are_exact_and_say_so_when_not(inputs, monkeypatch):
    case = Dense(width=128, hidden=1024, inputs=inputs)
    monkeypatch.setitem(overlap.DENSE, "small", case)
    monkeypatch.setattr(overlap, "ROWS", (24,))
    rows = list(overlap.flux_rows(["small"]))
    assert [row["way"] for row in rows] == list(overlap.FLUX_WAYS)
    for row in rows:
        assert row["same_bits"]
        assert all(row[f"{name}_error"] < 3e-6 for name in overlap.FLUX_RESULTS)
    right = overlap.matmul_reduce_scatter

    def wrong(h, w, *, bias, **how):
        return right(h, w, bias=bias * 1.01, **how)

    monkeypatch.setattr(overlap, "matmul_reduce_scatter", wrong)
    assert next(overlap.flux_rows(["small"]))["y_error"] > 1e-4
