"""Times that a card's peaks and its power limit give, against hand counts and what they promise."""

import dataclasses
import math

import known_gpu
import numpy as np
import pytest

from megajax.core.hardware import CARDS
from megajax.cost.record import FEATURES, product, record, rowwise
from megajax.systems.cdmpp import network, physics

T4 = dataclasses.replace(
    known_gpu.card("Tesla T4", 8.141, 320, 40, 4), clock_hz=1.59e9, capability=7.5, power_w=70.0
)  # 70 W feed about half of its peak
FREE = dataclasses.replace(T4, power_w=0.0)  # its power limit is not known
TILE = physics.TILES.index((128, 128))


def waves(card, batch: int, size: int, k: int) -> float:
    """Seconds of a product with 128 x 128 tiles."""
    rows = physics.programs([product(batch, size, size, k, "float32")])
    return float(np.exp(physics.times(rows, card).waves_RT[0, TILE]))


def test_tiles_run_in_waves_and_a_power_limit_lengthens_full_ones():
    one = 2 * 128 * 128 * 1024 / (128 * 1.59e9)  # a tile on one SM, 128 operations a clock
    for batch in (1, 40, 41, 400):
        assert waves(FREE, batch, 128, 1024) == pytest.approx(math.ceil(batch / 40) * one)
    joules = 11.7e-12 * 1.59**0.8  # of a float32 operation at full clock
    idle = 20 + 0.08 * 70
    needed = 40 * 128 * 1.59e9 * joules  # watts of arithmetic on all SMs at full clock
    assert needed > 2 * (70 - idle)
    full = waves(T4, 400, 128, 1024)
    slower = full / (10 * one)
    # At 1 / slower of the clock an operation takes 1 / slower^0.8 of its energy.
    assert needed / slower * slower**-0.8 == pytest.approx(70 - idle)
    assert waves(T4, 4, 128, 1024) == pytest.approx(one)  # four SMs stay below the limit


def test_the_limit_feeds_what_large_layers_were_measured_at():
    """96 % of the sustained peak, as physics.py says of its constants; NeuSight's test rows."""
    for name, tflops, clock, measured, within in (
        ("Tesla P4", 5.699, 1.113e9, 0.83, 0.045),
        ("Tesla T4", 8.141, 1.59e9, 0.515, 0.015),
        ("Tesla V100-PCIE-32GB", 14.029, 1.37e9, 0.98, 0.025),
        ("NVIDIA A100-PCIE-40GB", 19.492, 1.41e9, 0.85, 0.015),
    ):
        card = physics.with_chip(known_gpu.card(name, tflops, 900, 40, 4))
        card = dataclasses.replace(card, clock_hz=clock)
        reached = physics.throttled(np.array(0.96 * tflops * 1e12), physics.sustained(card))
        assert reached / (tflops * 1e12) == pytest.approx(measured, abs=within), name
    assert physics.sustained(FREE) == np.inf


def test_lanes_wait_in_float32_products_alone_on_sms_with_128():
    """Ada's and Hopper's SMs; matrix units and other operations are not slowed."""
    shares = {name: physics.busy(CARDS[name]) for name in ("L4", "H100", "A100", "T4")}
    assert shares["L4"] < shares["H100"] < shares["A100"] == shares["T4"] == 1
    known = dataclasses.replace(CARDS["H100"], clock_hz=1e8)  # far below its power limit
    other = dataclasses.replace(known, capability=0)
    for dtype, share in (("float32", shares["H100"]), ("bfloat16", 1.0)):
        rows = physics.programs([product(1, 4096, 4096, 4096, dtype)])
        slow, fast = (physics.times(rows, card).waves_RT for card in (known, other))
        np.testing.assert_allclose(slow - fast, -np.log(share), atol=1e-9)


def test_a_wave_reads_its_panels_once_and_the_next_again_beyond_the_l2():
    record = product(1, 4096, 4096, 512, "float32")
    rows = physics.programs([record])
    operands = 2 * 4096 * 512 * 4
    # 1,024 tiles, 64 together: waves of 8 x 8 tiles, each with 16 panels of 128 x 512.
    again = 16 * 16 * 128 * 512 * 4
    for l2, expected in ((1e15, operands), (1.0, again)):
        card = dataclasses.replace(FREE, sms=64, l2_bytes=l2)
        seconds = np.exp(physics.times(rows, card).traffic_RT[0, TILE])
        assert seconds == pytest.approx(expected / card.memory_bytes_per_s, rel=1e-3)


def loop(parts: float, jumps: float = 0):
    """An addition of 1,000 x 256 elements that XLA cuts into parts for the threads of a CPU."""
    plain = rowwise(("add",), 1000, 256, 2, "float32")
    values = dict(zip(FEATURES, plain.features, strict=True)) | {"parts": parts, "jumps": jumps}
    return record(plain.kind, [], values)


def test_a_loop_runs_on_as_many_threads_as_it_has_parts():
    rows = physics.programs([loop(1), loop(4, jumps=1000), loop(0)])
    card = dataclasses.replace(FREE, clock_hz=2e9)
    for threads, used in ((1, (1, 1)), (3, (1, 3)), (8, (1, 4))):
        timed = physics.times(rows, dataclasses.replace(card, sms=threads))
        work, moved, jumps = np.exp(timed.general_RG[:, -3:]).T
        np.testing.assert_allclose(work[:2], 256_000 / 32 / 2e9 / np.array(used))
        np.testing.assert_allclose(moved[:2], 3 * 4 * 256_000 / 16 / 2e9 / np.array(used))
        assert jumps[1] == pytest.approx(1000 * 4 / 2e9 / used[1])
        assert max(work[2], moved[2], jumps[0], jumps[2]) < 1e-20  # no such time


def test_no_time_rises_with_a_better_card_at_its_power_limit():
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(5000), (200, 4))).astype(int)
    records = [product(*row.tolist(), "float32") for row in sizes]
    records += [product(*row.tolist(), "bfloat16") for row in sizes[:50]]
    records += [loop(*size) for size in ((0, 0), (0, 50), (1, 50), (3, 10_000), (64, 0))]
    rows = physics.programs(records)
    card = dataclasses.replace(T4, flops={"float32": 8.1e12, "bfloat16": 65e12})
    for field in ("sms", "flops", "float32 alone", "memory_bytes_per_s", "l2_bytes"):
        before = np.inf
        for factor in (0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1, 1.02, 1.2, 1.5, 2, 3, 5, 9):
            value = getattr(card, field, None)
            if field in ("flops", "float32 alone"):
                fields = {
                    "flops": {
                        k: v * (factor if field == "flops" or k == "float32" else 1)
                        for k, v in card.flops.items()
                    }
                }
            else:
                fields = {field: type(value)(value * factor)}
            timed = physics.times(rows, dataclasses.replace(card, **fields))
            now = np.concatenate([timed.general_RG, timed.waves_RT, timed.traffic_RT], -1)
            assert np.all(now <= before + 1e-12), (field, factor)
            before = now


def test_the_floor_and_the_times_are_joined_by_a_smooth_maximum():
    floor, times = np.log([1.0, 1.0, 3.0]), np.log([1.0, 5.0, 1e-6])
    seconds = np.exp(network.above(floor, times, np))
    assert np.all(seconds >= np.exp(np.maximum(floor, times)) * (1 - 1e-12))
    np.testing.assert_allclose(seconds, [2 ** (1 / 8), 5.0, 3.0], rtol=1e-5)
