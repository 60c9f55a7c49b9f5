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

    predicted = rivals.fitted_roofline(data("a"))(data("b"))
    np.testing.assert_allclose(predicted, data("b").seconds, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "trees" else ())
        for name in sorted(rivals.RIVALS)
    ],
)
def test_what_is_fitted_beats_the_roofline(name):
    if name == "trees":
        pytest.importorskip("sklearn", reason="needs scikit-learn: uv sync --group rivals")
    train = known_gpu.dataset(("small", "wide", "large"), 150, seed=0)
    test = known_gpu.dataset(("wide",), 100, seed=1)
    wrong = np.abs(rivals.RIVALS[name](train)(test) / test.seconds - 1).mean()
    floor = np.abs(rivals.roofline(train)(test) / test.seconds - 1).mean()
    assert wrong == floor if name == "roofline" else wrong < floor


def test_some_rows_of_a_device_rescale_its_predictions():
    train = known_gpu.dataset(("small", "wide"), 60, seed=0)
    new = known_gpu.dataset(("large",), 60, seed=1)
    model = rivals.Fitted.of(rivals.fitted_roofline, train)
    plain, sigma = model.predict(new.records, new.cards["large"])
    twice, _ = model.adapt(
        Dataset(new.records[:9], 2 * plain[:9], new.devices[:9], new.cards)
    ).predict(new.records, new.cards["large"])
    np.testing.assert_allclose(twice, 2 * plain, rtol=1e-12)
    assert np.isnan(sigma).all()


def test_a_kind_without_rows_has_a_model_of_all_kinds_and_is_named():
    data = known_gpu.dataset(("wide",), 60, seed=0)
    is_product = np.array([record.kind == "product" for record in data.records])
    model = rivals.Fitted.of(rivals.fitted_roofline, data[is_product])
    seconds, _ = model.predict(data.records, data.cards["wide"])
    assert np.all(seconds > 0)
    assert model.unseen(data.records) == ["batched_product", "fusion"]
    assert model.unseen(data[is_product].records) == []
    with pytest.raises(UserError, match="needs training rows"):
        rivals.Fitted.of(rivals.regression, data[:0])
