"""Rates of serving against counts by hand."""

import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost import serving
from megajax.models.decoder_config import PRESETS

GIB = 2**30


def rates(name="llama3_8b", cluster="h100:1x8", **changes):
    model = PRESETS[name]()
    options = {"tensor": 1, "context": 4096, "room": 70 * GIB} | changes
    return serving.plan(
        lambda rows, tokens, phase: model.workload(rows, tokens, "bfloat16", phase),
        parse_cluster(cluster),
        **options,
    )


def test_llama_8b_on_an_h100_by_hand():
    """16.1 GB of weights, of which a step reads all but the embedding; 128 KiB a cached token."""
    plan_of_rates = rates()
    weights, read = 2 * 8.03e9, 2 * (8.03e9 - 128256 * 4096)
    token = 2 * 2 * 32 * 8 * 128  # bytes x (keys, values) x layers x heads x width
    assert plan_of_rates.token_bytes == token == 128 * 1024
    assert plan_of_rates.weight_bytes == pytest.approx(weights, rel=1e-3)
    assert (plan_of_rates.replicas, plan_of_rates.context) == (8, 4096)
    bandwidth = 0.85 * CARDS["H100"].memory_bytes_per_s
    for rate in plan_of_rates.rates:
        by_hand = (read + rate.batch * 4096 * token) / bandwidth
        assert rate.decode_s == pytest.approx(by_hand, rel=0.03)
        assert rate.bound_s == pytest.approx(0.85 * by_hand, rel=0.03)
        assert rate.tokens_per_s == pytest.approx(rate.batch / by_hand, rel=0.03)
    # A prompt of 2,048 tokens: 2 FLOP a parameter and token at 70 % of 989 TFLOP/s, but for the
    # head, of which the last token alone needs logits; causal attention at 50 %; the activation
    # reads two arrays and writes one, a norm reads one and writes one.
    products = 2 * (8.03e9 - 2 * 128256 * 4096) * 2048 / 0.7
    attention = 32 * 2 * 2048 * 2048 * 4096 / 0.5
    passes = 32 * 2 * 2048 * (3 * 14336 + 2 * 2 * 4096) + 2 * 128256 * 4096
    by_hand = (products + attention) / 989e12 + passes / bandwidth
    assert plan_of_rates.rates[0].first_token_s == pytest.approx(by_hand, rel=0.05)
    # The pages of 110 sequences of 0.5 GiB and the weights fill 70 GiB.
    assert plan_of_rates.largest == pytest.approx((70 * GIB - weights) / (4096 * token), abs=2)
    most = plan_of_rates.rates[-1]
    assert most.batch == plan_of_rates.largest and most.needed <= 70 * GIB
    answers = 2048 / (2048 * most.decode_s / most.batch + most.first_token_s)
    assert most.served_per_s == pytest.approx(answers)


def test_tensor_ranks_share_weights_and_pages():
    one, four = rates(), rates(tensor=4)
    assert (four.replicas, four.weight_bytes) == (2, pytest.approx(one.weight_bytes / 4))
    assert four.token_bytes == one.token_bytes / 4
    faster = one.rates[0].decode_s / four.rates[0].decode_s
    assert 1.5 < faster < 4  # 65 sums across ranks take 1.9 ms of latency
    # 16 ranks share 8 heads: each head is kept twice.
    assert rates(tensor=16, cluster="h100:2x8").token_bytes == one.token_bytes / 8


def test_what_cannot_be_served():
    assert rates("llama3_70b").rates == () and rates("llama3_70b").largest == 0
    assert rates("llama3_70b", tensor=8).largest > 0
    with pytest.raises(UserError, match="mesh.tensor=3 must divide the 8 GPUs"):
        rates(tensor=3)
    with pytest.raises(UserError, match="train.seq_len=1 must be at least 2"):
        rates(context=1)
