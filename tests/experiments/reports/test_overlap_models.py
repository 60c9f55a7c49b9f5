"""Estimates of whole models against sums by hand."""

import pytest

from experiments.reports import overlap as report
from experiments.reports import overlap_simulator as sim
from experiments.reports.overlap_simulator import H800
from pallas_kernels.collective.cases import DENSE, Product
from pallas_kernels.expert.cases import MIXTURES


def test_products_of_a_block_have_its_flops():
    """Two a parameter and token forward, four backward; a rank has an eighth."""
    for model, case in DENSE.items():
        forward = (*report.attention(model, case.width, 64, 8), case.up(64), case.down(64, 2))
        columns = report.QKV[model] + case.width + (case.inputs + 1) * case.hidden
        want = 2 * 64 * case.width * columns / 8
        for products in (forward, map(report.backward, forward)):
            assert sum(2 * p.m * p.n * p.k for p in products) == want
    assert 2 * report.QKV["gpt3_175b"] * 12288 == 6 * 12288**2


def test_a_gradient_travels_as_many_bytes_as_its_values():
    for product in (Product("gather", 64, 96, 32), Product("scatter", 64, 96, 32)):
        back = report.backward(product)
        assert {back.kind, product.kind} == {"gather", "scatter"}
        assert report.backward(back) == product
        assert sim.comm_s(back, H800) == sim.comm_s(product, H800)


def test_a_dense_model_by_hand(monkeypatch):
    """One way to fuse, 10 us each; serial 30 us; 7 us of attention; 5 us of a weight's gradient."""
    times = sim.Times(20e-6, 10e-6, 30e-6, 10e-6)
    monkeypatch.setattr(report.sim, "simulate", lambda *_: (times, None))
    monkeypatch.setattr(report.sim, "gemm_s", lambda *_: 5e-6)
    monkeypatch.setattr(report, "attention_s", lambda *_: 7e-6)
    training, prefill = report.dense_model_rows(["gpt3_175b"], H800)
    assert prefill["serial_s"] == pytest.approx(127e-6)
    assert prefill["speedup"] == pytest.approx(127 / 47)
    assert training["serial_s"] == pytest.approx((8 * 30 + 4 * 5 + 3.5 * 7) * 1e-6)
    assert training["fused_s"] == pytest.approx((8 * 10 + 4 * 5 + 3.5 * 7) * 1e-6)
    assert (training["reported"], prefill["reported"]) == (1.24, 1.66)


def test_a_mixture_is_its_layer_and_attention_that_hides_nothing():
    layouts = [(8, 1), (1, 8)]
    layers = list(report.expert_rows(["mixtral_8x7b"], layouts, [1024], [0.0], H800))
    both = [report.mixture_row(layer, H800) for layer in layers]
    width = MIXTURES["mixtral_8x7b"].width
    for row, layer in zip(both, layers, strict=True):
        for name in ("serial_s", "fused_s"):
            other_s = row[name] - layer[name]
            floor = 2 * 128 * width * (2048 + report.QKV["mixtral_8x7b"] + width) / H800.flops
            assert other_s > 0.99 * floor
        assert 1 < row["speedup"] < layer["speedup"]
        assert row["serial_s"] - layer["serial_s"] == pytest.approx(
            row["fused_s"] - layer["fused_s"]
        )
