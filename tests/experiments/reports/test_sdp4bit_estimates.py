"""The paper's ten pairs: sizes by hand, calibration that gives back what it was set by."""

import pytest

from experiments.reports import sdp4bit
from megajax.cost import traffic

PAPER = {
    "64 A100": [2.39, 2.43, 3.44, 2.68, 2.92],
    "128 H800": [1.53, 1.63, 2.97, 3.85, 4.08],
}


@pytest.fixture(scope="module")
def rows():
    return sdp4bit.estimates()


def test_ten_pairs_with_the_papers_speedups(rows):
    for cluster, speedups in PAPER.items():
        of_cluster = [r for r in rows if r["cluster"] == cluster]
        assert [r["model"] for r in of_cluster] == ["1.3B", "2.7B", "6.7B", "13B", "18B"]
        assert [r["paper_speedup"] for r in of_cluster] == pytest.approx(speedups, abs=0.01)
    for row in rows:
        assert row["parameters"] == pytest.approx(float(row["model"][:-1]) * 1e9, rel=0.03)


def test_calibration_gives_back_the_two_times_that_it_was_set_by(rows):
    for pair in sdp4bit.PAIRS[:1] + sdp4bit.PAIRS[5:6]:
        factors = sdp4bit.factors(pair)
        times = [sdp4bit.seconds(pair, step, factors) for step in sdp4bit.shapes(pair)]
        assert times == pytest.approx(sdp4bit.paper_seconds(pair), rel=1e-6)
    assert [r["calibrated_speedup"] for r in rows if r["is_calibrated_on"]] == pytest.approx(
        [r["paper_speedup"] for r in rows if r["is_calibrated_on"]]
    )


def test_the_largest_models_traffic_by_hand():
    """18B on 128 H800: 16 ranks on 16 hosts, an eighth of the weights each. Blocks of 12 x width^2,
    two tables."""
    pair = sdp4bit.PAIRS[-1]
    weights = (40 * 12 * 6144**2 + (51200 + 2048) * 6144) / 8
    plain, coded = (
        {r.level: r.nbytes for r in traffic.rows(step)} for step in sdp4bit.shapes(pair)
    )
    assert plain == {"weights": 2 * weights, "gradients": 4 * weights}
    assert coded == {
        "weights": pytest.approx(weights * (4 + 32 / 2048) / 8, rel=1e-4),
        "between": pytest.approx(weights * (4 + 32 / 128) / 8, rel=1e-4),
    }
    slow, fast = sdp4bit.paper_seconds(pair)
    # 6 FLOPs a weight and token, an attention of 12 x width x 1024 a block; 1024 tokens on 8 GPUs.
    flops = 1024 / 8 * (6 * (weights * 8 - 2048 * 6144) + 40 * 12 * 6144 * 1024)
    assert (slow, fast) == pytest.approx((flops / 14.5e12, flops / 59.2e12), rel=1e-6)


def test_where_the_estimates_agree_and_where_they_do_not(rows):
    """On A100 two numbers of the 1.3B model predict the other four within 12 %. On H800 they do not
    predict the models with tensor parallelism: their own times imply a third of the speed between
    hosts, so the estimate stays below the paper."""
    ratio = {(r["cluster"], r["model"]): r["calibrated_speedup"] / r["paper_speedup"] for r in rows}
    for model in ("2.7B", "6.7B", "13B", "18B"):
        assert ratio["64 A100", model] == pytest.approx(1, abs=0.12)
    assert ratio["128 H800", "2.7B"] == pytest.approx(1, abs=0.12)
    assert all(ratio["128 H800", model] < 0.6 for model in ("6.7B", "13B", "18B"))
    speed = {r["model"]: r["implied_bytes_per_s"] for r in rows if r["cluster"] == "128 H800"}
    assert max(speed[m] for m in ("6.7B", "13B", "18B")) < speed["1.3B"] / 2


def test_the_table_calls_every_number_of_ours_an_estimate(rows):
    lines = sdp4bit.table(rows).splitlines()
    assert lines[0].count("estimate") == 3 and len(lines) == 12
    assert all(r["label"] == "estimate" for r in rows)
