"""The rows of comet.py's exact part: a mixture too narrow for the paper, and a wrong layer."""

import numpy as np
import pytest

from experiments.reports import overlap
from pallas_kernels.expert.cases import Mixture


def test_the_loop_is_what_its_derivatives_say(seed):
    """Along one direction of all arguments, by central differences of the loop's own y."""
    case = Mixture(width=96, hidden=64, experts=4, active=2)
    arrays, index, _ = overlap.draw_mixture(case, 6, 0.1, seed)
    arrays = tuple(a.astype(np.float64) for a in arrays)
    random, step = np.random.default_rng(seed), 1e-6
    along = [random.standard_normal(a.shape) for a in arrays[:-1]]

    def value(sign):
        moved = [a + sign * step * d for a, d in zip(arrays, along, strict=False)]
        return (overlap.loop((*moved, arrays[-1]), index)[0] * arrays[-1]).sum()

    _, *grads = overlap.loop(arrays, index)
    want = sum((g * d).sum() for g, d in zip(grads, along, strict=True))
    assert (value(1) - value(-1)) / (2 * step) == pytest.approx(want, rel=1e-6)


@pytest.mark.slow  # two compiled layers
def test_rows_are_exact_and_say_so_when_not(monkeypatch):
    case = Mixture(width=128, hidden=128, experts=8, active=2)
    monkeypatch.setitem(overlap.MIXTURES, "small", case)
    rows = list(overlap.comet_rows(["small"], [(2, 4)], 16, [0.05]))
    assert [row["way"] for row in rows] == ["xla", "ring"]
    for row in rows:
        assert row["same_bits"] and row["std_reached"] == pytest.approx(0.05, abs=0.01)
        assert all(0 < row[f"{name}_error"] < 3e-6 for name in overlap.COMET_RESULTS)
    right = overlap.grouped_matmul_combine

    def wrong(h, w, dispatch, *, weights, implementation):
        return right(h, w, dispatch, weights=weights * 1.001, implementation=implementation)

    monkeypatch.setattr(overlap, "grouped_matmul_combine", wrong)
    row, _ = overlap.comet_rows(["small"], [(2, 4)], 16, [0.05])
    assert row["y_error"] > 3e-4
