"""The counts against closed forms and brute force; that every step computes the same."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reports import bytetransformer
from megajax.models.encoder_config import PRESETS, EncoderConfig
from pallas_kernels import bench
from pallas_kernels.attention import hopper_forward
from pallas_kernels.cases import paper_lengths

TINY = EncoderConfig(layers=1, width=64, heads=1, mlp=96)
BASE = PRESETS["bert_base"]()


def test_steps_change_one_thing_each():
    before = bytetransformer.STEPS[0]
    for step in bytetransformer.STEPS[1:]:
        changed = [
            f.name
            for f in dataclasses.fields(step)
            if f.name != "name" and getattr(step, f.name) != getattr(before, f.name)
        ]
        assert len(changed) == 1
        before = step


def test_products_and_attention_are_counted():
    """Padded: 24 D^2 a token and 4 D a pair, D = 768, F = 4 D."""
    flops = sum(
        k.flops for k in bytetransformer.kernels(BASE, bytetransformer.PADDED, (10, 20), 100)
    )
    assert flops == 200 * 24 * 768**2 + 2 * 100**2 * 4 * 768
    # The digest of the paper: 1.89 TFLOP on its lengths' mean at batch 16 and length 1024.
    mean = 16 * 0.6 * 1024 * 24 * 768**2 * 12 + 16 * 0.4133 * 1024**2 * 4 * 768 * 12
    assert bytetransformer.useful_flops(BASE, paper_lengths(1024)) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("lengths", [(1, 130, 0, 64, 200), (7,)])
def test_visited_pairs_are_whole_tiles_with_a_live_pair(lengths):
    """Brute force over all pairs."""
    T = sum(lengths)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    seen = ids[:, None] == ids[None]
    block = hopper_forward.ROWS
    tile = hopper_forward.heuristic(64, longest=max(lengths)).block_k
    visited = sum(
        block * tile
        for i in range(0, T, block)
        for j in range(0, T, tile)
        if seen[i : i + block, j : j + tile].any()
    )
    assert bytetransformer.visited_pairs(lengths, 64) == visited


def test_bytes_shrink_from_step_to_step():
    lengths = paper_lengths(1024)
    moved = [
        sum(k.bytes for k in bytetransformer.kernels(BASE, step, lengths, 1024))
        for step in bytetransformer.STEPS
    ]
    assert moved == sorted(moved, reverse=True)
    assert (moved[0] - moved[1]) == 2 * 2 * 2 * 16 * 1024 * 768  # two norms, h written and read
    assert (moved[1] - moved[2]) == 2 * 2 * 16 * 1024 * 3072  # hidden written and read


def test_every_step_equals_the_padded_model():
    rows = list(
        bytetransformer.exact(TINY, "float32", 3, 16, (0.1, 0.6, 1.0), bytetransformer.runnable())
    )
    assert {row["step"] for row in rows} == {step.name for step in bytetransformer.runnable()}
    assert all(row["passed"] for row in rows), rows
    assert [row["tokens"] for row in rows if row["alpha"] == 1.0][0] == 48


def test_a_step_that_sees_padding_is_not_exact(monkeypatch):
    """Unpacked attention whose rows are taken for full gives another result."""
    right = bytetransformer._padded_context
    monkeypatch.setattr(
        bytetransformer,
        "_padded_context",
        lambda lengths_B, longest: right(lengths_B * 0 + longest, longest),
    )
    rows = list(
        bytetransformer.exact(
            TINY, "float32", 3, 16, (0.6,), [bytetransformer.PADDED, bytetransformer.STEPS[3]]
        )
    )
    assert [row["passed"] for row in rows] == [True, False]


def test_draws_follow_the_average():
    for alpha in (0.1, 0.6, 1.0):
        drawn = np.asarray(paper_lengths(1000, 4000, alpha=alpha))
        assert drawn.min() >= 0 and drawn.max() <= 1000
        assert drawn.mean() == pytest.approx(1000 * alpha, abs=15)


def test_times_are_rows():
    """The lines that a GPU runs, by this process's clock."""
    row = bytetransformer.timed_attention(
        TINY, bytetransformer.OURS, "float32", 2, 16, bench.wall_clock, runs=2
    )
    assert row["part"] == "attention" and row["n"] == 3 and row["useful_tflops"] > 0
    assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] and row["wall_ms"] > 0


@pytest.mark.slow
def test_the_stack_is_timed_too():
    row = bytetransformer.timed(
        TINY, bytetransformer.OURS, "float32", 2, 16, bench.wall_clock, runs=2
    )
    assert row["part"] == "time" and row["useful_tflops"] > 0


def test_weights_are_of_each_layer():
    cfg = dataclasses.replace(TINY, layers=2)
    one, two = bytetransformer.weights(cfg, "bfloat16")
    assert one["mlp"]["up"].shape == (64, 96) and one["mlp"]["up"].dtype == jnp.bfloat16
    assert (one["mlp"]["up"] != two["mlp"]["up"]).any()
    assert abs(float(one["mlp_norm"]["scale"].mean()) - 1) < 0.1
