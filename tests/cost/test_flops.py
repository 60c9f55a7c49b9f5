"""MegaScale's tables 2 and 3 are the oracle; for experts, model cards and counting."""

import dataclasses

import numpy as np
import pytest

from megajax.core.hardware import CARDS
from megajax.cost.base import keys_per_query, mfu, train_flops_per_token
from megajax.models.decoder_config import PRESETS

PEAK = CARDS["A100"].flops["bfloat16"]


def gpt(name):
    """The baseline of the table: the same shape without a window."""
    return dataclasses.replace(PRESETS[name](), window=None)


# Megatron-LM rows of table 2 (175B): GPUs, thousand tokens/s, MFU in percent.
@pytest.mark.parametrize(
    ("gpus", "ktokens", "percent"),
    [
        (256, 39.3, 53.0),
        (512, 74.1, 49.9),
        (768, 103.8, 46.7),
        (1024, 132.7, 44.7),
        (3072, 433.6, 48.7),
        (6144, 851.6, 47.8),
        (8192, 1027.9, 43.3),
        (12288, 1466.8, 41.2),
    ],
)
def test_megascale_table_2(gpus, ktokens, percent):
    flops = train_flops_per_token(gpt("megascale_175b").workload(1, 2048), "megatron")
    # The paper's last digit is sometimes cut, not rounded (49.98 is printed as 49.9).
    assert 100 * mfu(ktokens * 1e3, flops, gpus, PEAK) == pytest.approx(percent, abs=0.1)


def test_parameters_of_the_175b():
    assert gpt("megascale_175b").workload(1, 1).dense_params == 12 * 96 * 12288**2


@pytest.mark.parametrize(("seq", "window"), [(16, None), (16, 5), (16, 16), (16, 40), (7, 1)])
def test_keys_by_counting(seq, window):
    mask = np.tril(np.ones((seq, seq)))
    if window is not None:
        mask *= np.triu(np.ones((seq, seq)), 1 - window)
    assert keys_per_query(seq, window, "causal") == pytest.approx(mask.sum(1).mean())
    assert keys_per_query(seq, window, "megatron") == min(window or seq, seq)


def test_dense_flops_are_six_a_parameter():
    """GPT-2: 12 layers, D 768, V 50257."""
    load = gpt("gpt2").workload(1, 1)
    flops = train_flops_per_token(load, "causal")
    head, attention = 6 * 50257 * 768, 12 * 12 * 768
    assert flops == 6 * load.dense_params + head + attention


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral_8x7b", 46.70e9, 12.88e9), ("qwen3_30b_a3b", 30.53e9, 3.35e9)],
)
def test_parameters_of_published_experts(name, total, active):
    """Model cards; norms are not counted."""
    load = PRESETS[name]().workload(1, 1)
    idle = load.routed_params * (1 - load.routed.top_k / load.routed.experts)
    assert load.params == pytest.approx(total, rel=1e-3)
    assert load.params - idle == pytest.approx(active, rel=5e-3)


def test_only_active_experts_count():
    """D 128, E 8 of which 2 with F 192 and three matrices; attention 4 x 128 x 128."""
    load = PRESETS["nano_moe"]().workload(1, 16)
    per_token = 4 * 128 * 128 + 2 * 3 * 128 * 192 + 128 * 8
    assert load.params - load.table_params == 4 * (4 * 128**2 + 8 * 3 * 128 * 192 + 128 * 8)
    flops = train_flops_per_token(load, "megatron")
    assert flops == 6 * (4 * per_token + 512 * 128) + 12 * 4 * 128 * 16


@pytest.mark.parametrize(("factor", "seq"), [(1.25, 128), (1.0, 7), (100.0, 16)])
def test_slots_are_the_layers_own(factor, seq):
    moe = dataclasses.replace(PRESETS["nano_moe"]().moe, mode="capacity", capacity_factor=factor)
    cfg = dataclasses.replace(PRESETS["nano_moe"](), moe=moe)
    routed = cfg.stack.routed
    assert routed.slots(seq) == moe.slots(seq)
    assert routed.pairs(seq) == pytest.approx(8 * moe.slots(seq) / seq)
