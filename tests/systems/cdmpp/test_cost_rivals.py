"""Rivals on devices whose times are known."""

import known_gpu
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost.record import rowwise
from megajax.systems.cdmpp import Dataset, rivals


def test_a_fitted_roofline_finds_the_terms_of_a_linear_device():
    """Seconds that are exactly three of its terms come back, on a device of another card too."""
    records = [rowwise(("add",), n, 512, 2, "float32") for n in range(10, 5000, 100)]
    cards = {"a": CARDS["H100"], "b": CARDS["A100"]}

    def data(name: str) -> Dataset:
        seconds = [3e-6 + 1.4 * r.nbytes / cards[name].memory_bytes_per_s for r in records]
        return Dataset(records, np.array(seconds), [name] * len(records), cards)

    found = rivals.fitted_roofline(data("a"), data("b"))
    np.testing.assert_allclose(found, data("b").seconds, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(rivals.RIVALS))
def test_what_is_fitted_beats_the_roofline(name):
    if name == "trees":
        pytest.importorskip("sklearn")
    train = known_gpu.dataset(("small", "wide", "large"), 150, seed=0)
    test = known_gpu.dataset(("wide",), 100, seed=1)
    wrong = np.abs(rivals.RIVALS[name](train, test) / test.seconds - 1).mean()
    floor = np.abs(rivals.roofline(train, test) / test.seconds - 1).mean()
    assert wrong == floor if name == "roofline" else wrong < floor


def test_some_rows_rescale_a_prediction_and_unknown_kinds_are_refused():
    seconds = np.array([2.0, 4.0, 8.0, 8.0])
    np.testing.assert_array_equal(
        rivals.rescaled(np.array([1.0, 2.0, 3.0, 4.0]), seconds, np.array([0, 1])),
        [2.0, 4.0, 6.0, 8.0],
    )
    only = known_gpu.dataset(("wide",), 9, seed=0)
    products = only[np.array([r.kind == "product" for r in only.records])]
    with pytest.raises(UserError, match="kind batched_product has no row"):
        rivals.regression(products, only)
