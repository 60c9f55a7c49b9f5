"""How far devices are from each other, and what that does to a band."""

import dataclasses

import numpy as np
import pytest

from megajax.core.hardware import CARDS, DeviceCard
from megajax.cost.record import KINDS
from megajax.systems.cdmpp import calibration
from megajax.systems.cdmpp.physics import with_chip


def named(name: str) -> DeviceCard:
    """Returns a card that has what the name of a GPU says about its chip, and no other number."""
    return with_chip(DeviceCard(name, {"float32": 1e12}, 1, 1e11, 0, 0))


def test_a_gpu_of_the_same_generation_and_power_is_nearest():
    known = [named("Tesla P4"), named("Tesla V100-PCIE-32GB"), named("NVIDIA A100-PCIE-40GB")]
    assert np.argmax(calibration.prior(named("A100 80GB PCIe"), known)) == 2
    assert np.argmax(calibration.prior(named("Tesla T4"), known)) == 0  # both have about 70 W
    np.testing.assert_allclose(calibration.prior(named("a CPU"), known), 1 / 3)
    assert calibration.prior(named("L4"), known).sum() == pytest.approx(1)


def test_only_data_of_others_is_read_by_the_names_of_gpus():
    """And what a card says of its chip counts more than its name."""
    for name, card in CARDS.items():
        bare = dataclasses.replace(card, name=f"NVIDIA {name}", capability=0, power_w=0)
        assert with_chip(bare) == dataclasses.replace(card, name=f"NVIDIA {name}")
    as_l4 = dataclasses.replace(CARDS["L4"], name="NVIDIA H100 PCIe")
    assert with_chip(as_l4) is as_l4
    assert with_chip(dataclasses.replace(CARDS["H100"], name="x", power_w=0)).power_w == 0
    assert (named("NVIDIA L40S").power_w, named("Tesla L4").power_w) == (350, 72)


def test_distance_is_to_the_nearest_and_counts_generation_power_and_rates():
    a100, h100, h200 = CARDS["A100"], CARDS["H100"], CARDS["H200"]
    # H200 to H100: the bandwidth alone, 4.8 over 3.35 TB/s.
    near = np.log(4.8 / 3.35) / 2
    assert calibration.distance(h200, [a100, h100]) == pytest.approx(near)
    # A100 (8.0, 400 W) to H100 (9.0, 700 W): generation, power, int8 peak and bandwidth.
    far = 1 + np.log(700 / 400) / 0.5 + (np.log(1979 / 624) + np.log(3.35 / 2.039)) / 2
    assert calibration.distance(h100, [a100]) == pytest.approx(far)
    twin = dataclasses.replace(h100, name="a CPU")
    assert calibration.distance(twin, [h100]) == 0.1
    bare = dataclasses.replace(h200, capability=0)  # a chip that is not known: by the rates alone
    assert calibration.distance(bare, [a100]) == pytest.approx(
        (np.log(1979 / 624) + np.log(4.8 / 2.039)) / 2
    )


def test_products_of_an_unseen_device_take_less_of_their_neighbours():
    """And of those near in compute capability; other kinds of those near in power as well."""
    kinds = np.array([KINDS.index(k) for k in ("fusion", "product", "batched_product", "copy")])
    known = [named("Tesla T4"), named("NVIDIA A100-PCIE-40GB"), named("Tesla P4")]
    weights = calibration.blend(named("NVIDIA L4"), known, kinds)
    np.testing.assert_allclose(weights.sum(1), [1, 0.5, 0.5, 1])
    assert np.argmax(weights, 1).tolist() == [0, 1, 1, 0]
    np.testing.assert_allclose(weights[1], weights[2])
    unknown = calibration.blend(named("a CPU"), known, kinds)
    np.testing.assert_allclose(unknown, np.array([[1], [0.5], [0.5], [1]]) * np.full(3, 1 / 3))


def test_the_twin_of_a_gpu_has_the_same_chip():
    a100, h100, h200 = CARDS["A100"], CARDS["H100"], CARDS["H200"]
    assert calibration.twin(h100, {"a": a100, "H200": h200}) == "H200"
    assert calibration.twin(a100, {"H200": h200}) is None
    assert calibration.twin(dataclasses.replace(h100, name="x"), {"H200": h200}) == "H200"
    assert calibration.twin(dataclasses.replace(h100, capability=0), {"H200": h200}) is None
    better = dataclasses.replace(h100, flops={"float32": 1e15}, memory_bytes_per_s=1e14, sms=500)
    assert calibration.twin(better, {"H200": h200}) == "H200"
    l4, large = CARDS["L4"], CARDS["L40S"]  # of one generation
    assert large.capability == l4.capability and calibration.twin(large, {"NVIDIA L4": l4}) is None


def test_errors_grow_with_the_distance_kind_by_kind():
    few = np.full(len(KINDS), np.nan)
    known, away = few.copy(), few.copy()
    known[0], away[0], away[1] = 0.1, 0.2, 0.4
    errors = calibration.Errors(0.5, known).plus(calibration.Errors(0.3, away), 2.0)
    kinds = np.array([0, 1, 2])
    np.testing.assert_allclose(errors.of(kinds), [0.1 + 0.4, 0.5 + 0.8, 0.5 + 0.6])


def test_nine_in_ten_scores_are_within_the_scale():
    rng = np.random.default_rng(0)
    kinds = np.repeat([0, 1], [500, 10])
    score = rng.exponential(size=510)
    errors = calibration.Errors.of_scores(score, kinds)
    inside = (score <= errors.of(kinds))[:500].mean()
    assert 0.9 <= inside < 0.91
    assert np.isnan(errors.kinds[1])  # ten rows are too few for a scale of their own


def test_one_odd_device_does_not_set_the_band_of_all():
    few = np.full(len(KINDS), np.nan)
    parts = []
    for every, kind in ((0.1, 0.2), (0.2, np.nan), (3.0, 0.3)):
        of_kind = few.copy()
        of_kind[0] = kind
        parts.append(calibration.Errors(every, of_kind))
    errors = calibration.Errors.typical(parts)
    np.testing.assert_allclose(errors.of(np.array([0, 1])), [0.25, 0.2])


def test_few_rows_scale_the_errors_of_all_kinds_by_one_factor():
    few = np.full(len(KINDS), np.nan)
    few[:2] = 0.1, 0.4
    known = calibration.Errors(0.2, few)
    kinds = np.array([0] * 8 + [1] * 30)
    score = np.where(kinds == 0, 0.3, 1.2)  # three times what is known of both
    score[-1] = 9.0  # one in ten may be outside
    errors = known.rescaled(score, kinds)
    np.testing.assert_allclose(errors.of(np.array([0, 1, 2])), [0.3, 1.2, 0.6])
