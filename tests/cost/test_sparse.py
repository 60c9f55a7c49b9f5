"""Estimated times of tile-wise products against closed forms."""

import dataclasses

import pytest

from megajax.core.hardware import CARDS
from megajax.cost.roofline import Roofline
from megajax.cost.sparse import Gemm, SparseCost, decoder_gemms, table
from megajax.models.decoder_config import PRESETS

LARGE = Gemm("large", 8192, 8192, 8192)
COST = SparseCost(CARDS["H200"])


def test_a_large_product_is_bound_by_arithmetic():
    peak = 989.5e12
    assert COST.dense_time(LARGE) == pytest.approx(2 * 8192**3 / (0.7 * peak))
    assert COST.sparse_time(LARGE, 0.25) == pytest.approx(2 * 8192**3 / 4 / (0.8 * 0.7 * peak))
    assert COST.sparse_time(LARGE, 1.0, True) == pytest.approx(2 * COST.dense_time(LARGE) / 0.8)
    rows = dataclasses.replace(COST, squared=False)
    assert rows.stored(LARGE, 0.25) == COST.stored(LARGE, 0.25) == 8192**2 // 4


def test_columns_are_padded_to_tiles_and_rows_to_chunks():
    gemm = Gemm("small", 64, 768, 768)
    assert COST.stored(gemm, 0.25) == 384 * 384
    assert COST.stored(gemm, 0.26) == 512 * 448  # sqrt(.26) x 768 = 391.6
    assert COST.stored(gemm, 1e-6) == 128 * 64
    assert COST.stored(gemm, 1.0) == 768 * 768


def test_arithmetic_breaks_even_at_the_share():
    for share in (0.5, 0.8, 1.0):
        cost = dataclasses.replace(COST, share=share, squared=False, tile=64, chunk=1)
        assert cost.break_even(LARGE) == pytest.approx(share, abs=2e-3)
        assert cost.break_even(LARGE, True) == pytest.approx(share, abs=2e-3)


def test_traffic_of_activations_is_not_saved():
    """Few columns: x must be read whatever is pruned, and the gain is bounded by that."""
    thin = Gemm("thin", 65536, 4096, 128)
    gain = COST.dense_time(thin) / COST.sparse_time(thin, 0.05)
    assert 1.0 <= gain < 1.05


def test_padding_can_cost_more_than_the_dense_product():
    narrow = Gemm("narrow", 4096, 4096, 24)
    cost = dataclasses.replace(COST, roofline=Roofline(memory_bandwidth=1.0), tile=256, chunk=4096)
    assert cost.break_even(narrow) is None


def test_the_table_names_every_figure_an_estimate():
    gemms = decoder_gemms(PRESETS["llama3_8b"]().stack, 8192)
    assert [g.name for g in gemms] == ["query", "key", "value", "out", "gate", "up", "down"]
    assert (gemms[1].K, gemms[1].N, gemms[-1].K) == (4096, 1024, 14336)
    for row in table(COST, gemms):
        assert all("(estimate)" in k for k in list(row)[4:])
        assert row["gain at 90% (estimate)"] > row["gain at 50% (estimate)"] > 0.9
        assert 0 <= row["forward pays from sparsity (estimate)"] <= 0.5
