"""Times that a card's peaks and its power limit give, against hand counts and what they promise."""

import dataclasses
import math

import known_gpu
import numpy as np
import pytest

from megajax.cost.record import product
from megajax.systems.cdmpp import network, physics

T4 = dataclasses.replace(
    known_gpu.card("Tesla T4", 8.141, 320, 40, 4), clock_hz=1.59e9
)  # 70 W feed about half of its peak
FREE = dataclasses.replace(T4, name="another")  # a name that no power limit is known of
TILE = physics.TILES.index((128, 128))


def waves(card, batch: int, size: int, k: int) -> float:
    """Seconds of a product with 128 x 128 tiles."""
    rows = physics.programs([product(batch, size, size, k, "float32")])
    return float(np.exp(physics.times(rows, card).waves_RT[0, TILE]))


def test_tiles_run_in_waves_and_a_power_limit_lengthens_full_ones():
    one = 2 * 128 * 128 * 1024 / (128 * 1.59e9)  # a tile on one SM, 128 operations a clock
    for batch in (1, 40, 41, 400):
        assert waves(FREE, batch, 128, 1024) == pytest.approx(math.ceil(batch / 40) * one)
    joules = 17e-12 * (1.59 / 1.113) ** 1.43  # of a float32 operation, by the node's table
    needed = 40 * 128 * 1.59e9 * joules  # watts of all SMs at full clock
    assert needed > 3 * 70
    full = waves(T4, 400, 128, 1024)
    assert full == pytest.approx(10 * one * math.sqrt(needed / 70))
    assert waves(T4, 4, 128, 1024) == pytest.approx(one)  # four SMs stay below the limit


def test_the_limit_feeds_what_large_layers_were_measured_at():
    """95 % of the sustained peak, as physics.py says of its constants; NeuSight's test rows."""
    for name, tflops, clock, measured in (
        ("Tesla P4", 5.699, 1.113e9, 0.83),
        ("Tesla T4", 8.141, 1.59e9, 0.52),
        ("NVIDIA A100-PCIE-40GB", 19.492, 1.41e9, 0.85),
    ):
        card = dataclasses.replace(known_gpu.card(name, tflops, 900, 40, 4), clock_hz=clock)
        share = math.sqrt(physics.sustained(card) / (tflops * 1e12))
        assert 0.95 * share == pytest.approx(measured, abs=0.015)
    assert physics.sustained(FREE) == np.inf


def test_no_time_rises_with_a_better_card_at_its_power_limit():
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(5000), (200, 4))).astype(int)
    records = [product(*row.tolist(), "float32") for row in sizes]
    records += [product(*row.tolist(), "bfloat16") for row in sizes[:50]]
    rows = physics.programs(records)
    card = dataclasses.replace(T4, flops={"float32": 8.1e12, "bfloat16": 65e12})
    for field in ("sms", "flops", "float32 alone", "memory_bytes_per_s", "l2_bytes"):
        before = np.inf
        for factor in (0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1, 1.02, 1.2, 1.5, 2, 3, 5, 9):
            value = getattr(card, field, None)
            if field in ("flops", "float32 alone"):
                fields = {"flops": {
                    k: v * (factor if field == "flops" or k == "float32" else 1)
                    for k, v in card.flops.items()
                }}  # fmt: skip
            else:
                fields = {field: type(value)(value * factor)}
            timed = physics.times(rows, dataclasses.replace(card, **fields))
            now = np.concatenate([timed.general_RG, timed.waves_RT, timed.traffic_RT], -1)
            assert np.all(now <= before + 1e-12), (field, factor)
            before = now


def test_the_floor_and_the_times_are_joined_by_a_smooth_maximum():
    floor, times = np.log([1.0, 1.0, 3.0]), np.log([1.0, 5.0, 1e-6])
    found = np.exp(network.above(floor, times, np))
    assert np.all(found >= np.exp(np.maximum(floor, times)) * (1 - 1e-12))
    np.testing.assert_allclose(found, [2 ** (1 / 8), 5.0, 3.0], rtol=1e-5)
