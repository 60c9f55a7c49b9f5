"""Workloads and step shapes against the FLOP formula, and against counting by hand."""

import dataclasses

import pytest

from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.base import Op, Pipeline, StepShape
from megajax.cost.estimate import estimate
from megajax.cost.flops import recomputed_flops_per_token, train_flops_per_token
from megajax.cost.roofline import Roofline
from megajax.cost.traffic import Overlap, members, transfers
from megajax.models.decoder_config import PRESETS

SIZES = {"pipe": 1, "node": 1, "data": 64, "expert": 1, "context": 1, "tensor": 8}
WORK = PRESETS["megascale_175b"]().work


def shape(**changes):
    step = StepShape(WORK, 256, 2048, SIZES, ("data",), loss_chunks=8)
    return dataclasses.replace(step, **changes)


@pytest.mark.parametrize("name", ["megascale_175b", "llama3_8b", "qwen3_0p6b"])
def test_a_workload_has_the_flops_of_the_formula(name):
    cfg = PRESETS[name]()
    forward = cfg.workload(3, 2048).flops
    per_token = train_flops_per_token(cfg.work, 2048, "megatron")
    assert 3 * forward == pytest.approx(per_token * 3 * 2048)


@pytest.mark.parametrize("remat", ["none", "dots", "outputs", "full"])
def test_recomputation_adds_what_the_formula_says(remat):
    step = shape(remat=remat)
    keys = 2048
    work = dataclasses.replace(WORK, window=None)
    per_token = train_flops_per_token(work, 2048, "megatron")
    per_token += recomputed_flops_per_token(work, 2048, remat, 8, keys)
    assert step.workload.flops * step.devices == pytest.approx(per_token * 256 * 2048)


def test_outputs_makes_the_inputs_and_half_of_attention_again():
    """D 12288: q, k, v and up are 3 D + 4 D columns; of attention the weights, 2 D a key."""
    work = dataclasses.replace(WORK, window=None)
    again = recomputed_flops_per_token(work, 2048, "outputs", 1, 2048)
    D = 12288
    assert again == 96 * (2 * D * 7 * D + 2 * D * 2048)


def test_full_recomputation_is_a_third_more():
    work = dataclasses.replace(WORK, window=None)
    again = recomputed_flops_per_token(work, 2048, "full", 8, 2048)
    assert again == pytest.approx(train_flops_per_token(work, 2048, "megatron") / 3)


def test_a_fused_kernel_skips_what_the_window_hides():
    assert shape().keys == 2048 and shape(fused_attention=True).keys == 1024


def test_bubble():
    """MegaScale's 175B on 256 GPUs: PP 8, 6 chunks, 192 micro-batches; and a plain pipeline."""
    assert Pipeline(8, 32, 6).bubble == pytest.approx(7 / 192)
    assert Pipeline(4, 8).bubble == pytest.approx(3 / 8)
    assert Pipeline().bubble == 0


def test_roofline_takes_the_longer_of_arithmetic_and_memory():
    card, model = CARDS["H100"], Roofline(matmul=0.5, memory_bandwidth=0.5)
    busy, _ = model.op_time(Op("input", 1e12, 1), card, "bfloat16")
    moving, sigma = model.op_time(Op("norm", 0, 1e9), card, "bfloat16")
    assert busy == pytest.approx(1e12 / (0.5 * 989.5e12))
    assert moving == pytest.approx(2e9 / (0.5 * 3.35e12))
    assert sigma == pytest.approx(0.15 * moving)
    assert model.transfer_time(45e9, parse_cluster("h100:1x8").inside) == pytest.approx(0.1, 1e-3)


def test_groups_follow_the_order_of_the_mesh():
    assert members(("tensor",), SIZES) == list(range(8))
    assert members(("data",), SIZES) == list(range(0, 512, 8))
    assert members(("data", "tensor"), SIZES) == list(range(512))
    piped = SIZES | {"pipe": 4, "data": 16}
    assert members(("pipe",), piped) == [0, 128, 256, 384]


def test_transfers_of_a_layer_by_hand():
    """D 12288, F 49152, a parallel block, tensor 8, 4 rows of 2048: MiB, and how often."""
    found = {(t.kind, t.axes, t.what): t for t in transfers(shape())}
    weights = found["all-gather", ("data",), "layer weights"]
    assert weights.nbytes == 2 * 12 * 12288**2 / 8 and weights.executions == 2 * 96
    assert found["reduce-scatter", ("data",), "layer gradients"].executions == 96
    stream = found["all-gather", ("tensor",), "residual stream"]
    assert stream.nbytes == 2 * 4 * 2048 * 12288 and stream.executions == 3 * 96
    assert found["reduce-scatter", ("tensor",), "residual stream"].executions == 2 * 96


def test_hybrid_sharding_reduces_the_shard_between_nodes():
    sizes = SIZES | {"node": 4, "data": 16}
    found = transfers(shape(sizes=sizes, zero_axes=("data",)))
    between = [t for t in found if t.kind == "all-reduce" and t.what == "layer gradients"]
    assert [t.axes for t in between] == [("node",)]
    assert between[0].nbytes == 2 * 12 * 12288**2 / 8 / 16


def test_an_estimate_adds_up_and_overlap_only_helps():
    cluster = parse_cluster("h100:64x8")
    bare = estimate(shape(), cluster, transfers(shape()))
    parts = bare.compute_s + bare.update_s + bare.bubble_s + sum(bare.exposed_s.values())
    assert bare.step_s == pytest.approx(parts)
    assert bare.exposed_s == bare.communication_s
    hidden = estimate(shape(), cluster, transfers(shape(), Overlap(1, 1, 1)))
    assert hidden.step_s < bare.step_s and hidden.compute_s == bare.compute_s
    assert hidden.communication_s == bare.communication_s
    flops = train_flops_per_token(WORK, 2048, "megatron") * 256 * 2048
    assert bare.mfu_megatron == pytest.approx(flops / bare.step_s / 512 / 989.5e12)


def test_a_pipeline_pays_its_bubble_and_sends_between_stages():
    sizes = SIZES | {"pipe": 8, "data": 8}
    step = shape(sizes=sizes, remat="full", pipeline=Pipeline(8, 32, 6))
    assert step.rows == 1 and step.layers == 12
    sent = {t.kind: t for t in transfers(step) if t.axes == ("pipe",)}
    assert sent["collective-permute"].executions == 2 * 6 * 32
    assert sent["collective-permute"].nbytes == 2 * 2048 * 12288 / 8
    found = estimate(step, parse_cluster("h100:64x8"), transfers(step))
    assert found.bubble == pytest.approx(7 / 192)
    stages = found.compute_s + found.exposed_s["tensor"] + found.exposed_s["pipe"]
    assert found.bubble_s == pytest.approx(7 / 192 * stages)


def test_megascales_ablation_has_the_papers_signs():
    """Table 3: parallel block, window, overlap of tensor, pipe and data, larger batch all help."""
    cluster = parse_cluster("a100:32x8")
    sizes = SIZES | {"pipe": 8, "data": 4}

    def mfu(block, window, overlap, batch):
        model = dataclasses.replace(PRESETS["megascale_175b"](), block=block, window=window)
        step = StepShape(
            model.work, batch, 2048, sizes, ("data",), remat="dots", fused_attention=True,
            pipeline=Pipeline(8, batch // 4, 6),
        )  # fmt: skip
        return estimate(step, cluster, transfers(step, overlap)).mfu_megatron

    found = [
        mfu("serial", None, Overlap(), 256),
        mfu("parallel", None, Overlap(), 256),
        mfu("parallel", 1024, Overlap(), 256),
        mfu("parallel", 1024, Overlap(tensor=1), 256),
        mfu("parallel", 1024, Overlap(tensor=1, pipe=1), 256),
        mfu("parallel", 1024, Overlap(1, 1, 1), 256),
        mfu("parallel", 1024, Overlap(1, 1, 1), 768),
    ]
    assert found == sorted(found) and len(set(found)) == 7
