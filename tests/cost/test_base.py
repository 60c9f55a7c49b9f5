"""Workloads and step shapes against the FLOP formula, and against counting by hand."""

import dataclasses

import pytest

from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.base import Op, StepShape
from megajax.cost.estimate import estimate
from megajax.cost.flops import recomputed_flops_per_token, train_flops_per_token
from megajax.cost.pipeline import Pipeline
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
    assert sent["collective-permute"].executions == 2 * (6 * 32 + 7)
    assert sent["collective-permute"].nbytes == 2 * 2048 * 12288 / 8
    found = estimate(step, parse_cluster("h100:64x8"), transfers(step))
    assert found.bubble == pytest.approx(7 / 192)
    head = sum(op.flops * op.count for op in step.workload.ops if op.part == "head")
    assert step.masked.flops == pytest.approx(7 / 192 * (step.workload.flops - head))
    parts = found.compute_s + found.update_s + found.bubble_s + sum(found.exposed_s.values())
    assert found.step_s == pytest.approx(parts)


MOE = PRESETS["mixtral_8x7b"]().work
MOE_SIZES = SIZES | {"data": 4, "expert": 8, "tensor": 4}


def experts(**changes):
    step = StepShape(MOE, 64, 4096, MOE_SIZES, ("data", "expert"), loss_chunks=8)
    return dataclasses.replace(step, **changes)


def test_dropless_experts_exchange_tokens_by_hand():
    """2 rows of 4096 tokens, D 4096, bf16; 8 devices of tokens meet. Forward, made again, back."""
    found = {(t.kind, t.axes, t.what): t for t in transfers(experts())}
    whole = 2 * 2 * 4096 * 4096
    there = found["all-gather", ("expert",), "tokens"]
    assert there.nbytes == 8 * whole and there.executions == 32 * 3
    back = found["reduce-scatter", ("expert",), "sums"]
    assert back.nbytes == 8 * whole and back.executions == 32 * 2
    assert found["all-gather", ("tensor",), "tokens"].nbytes == whole
    stream = found["all-gather", ("tensor",), "residual stream"]
    assert stream.executions == 32 * 3  # attention alone: there are no shared experts
    weights = found["all-gather", ("data",), "expert weights"]
    assert weights.nbytes == 2 * 8 * 3 * 4096 * 14336 / 8 / 4 and weights.executions == 2 * 32
    router = found["all-gather", ("data", "expert"), "layer weights"]
    assert router.nbytes == 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 4096 * 8) / 4


def test_slots_travel_there_and_back():
    """8 experts, 2 a token, factor 1.25: 1280 slots a row and expert, filled or not."""
    routed = dataclasses.replace(MOE.routed, capacity=1.25)
    step = experts(work=dataclasses.replace(MOE, routed=routed))
    found = transfers(step)
    (slots,) = (t for t in found if t.kind == "all-to-all")
    assert slots.axes == ("expert",) and slots.nbytes == 2 * 8 * 2 * 1280 * 4096
    assert slots.executions == 32 * (2 + 2 + 2)
    assert not any(t.axes == ("expert",) and t.what in ("tokens", "sums") for t in found)
    assert all(t.executions == 32 * 4 for t in transfers(dataclasses.replace(step, remat="none"))
               if t.kind == "all-to-all")  # fmt: skip


@pytest.mark.parametrize("remat", ["none", "dots", "outputs", "full"])
def test_experts_recompute_what_the_formula_says(remat):
    step = experts(remat=remat)
    per_token = train_flops_per_token(MOE, 4096, "megatron")
    per_token += recomputed_flops_per_token(MOE, 4096, remat, 8, 4096)
    assert step.workload.flops * step.devices == pytest.approx(per_token * 64 * 4096)


def test_mfu_counts_active_experts():
    """As many experts again, never used, leave FLOPs as they are and the utilisation below it."""
    more = dataclasses.replace(MOE, routed=dataclasses.replace(MOE.routed, experts=16))
    one, two = (
        estimate(experts(work=w), parse_cluster("h100:16x8"), transfers(experts(work=w)))
        for w in (MOE, more)
    )
    flops = train_flops_per_token(MOE, 4096, "megatron") * 64 * 4096
    assert one.mfu_megatron == pytest.approx(flops / one.step_s / 128 / 989.5e12)
    assert two.step_s > one.step_s and two.mfu_megatron < one.mfu_megatron


def test_keys_of_other_devices_by_hand():
    """Context 4, 1 row of 8192, 12288 wide on tensor 8: k and v of a piece 2 x 2048 x 1536."""
    sizes = SIZES | {"data": 16, "context": 4}
    step = shape(sizes=sizes, zero_axes=("data", "context"), global_batch=16, seq_len=8192)
    own = 2 * 2 * 2048 * 12288 / 8

    def sent(kind):
        found = transfers(dataclasses.replace(step, context=kind))
        found = [t for t in found if t.axes == ("context",) and t.kind != "all-reduce"]
        return [(t.kind, t.nbytes, t.executions / 96) for t in found if "keys" in t.what]

    # `outputs` keeps a ring's result: 3 hops forward, 3 back with 4 of the float32 gradients.
    assert sent("ring") == [("collective-permute", own, 6), ("collective-permute", 2 * own, 4)]
    gathered = [("all-gather", 4 * own, 2), ("reduce-scatter", 4 * own, 1)]
    assert sent("gather") == gathered
    # Two there and two back for queries and results, the same for keys and values.
    assert sent("ulysses") == [("all-to-all", own / 2, 6)]


def test_ranks_that_share_a_key_value_head_send_it_each_and_add_its_gradient():
    """Two heads of 96 on tensor 8: each rank has a whole one, and four ranks add its gradient."""
    sizes = SIZES | {"data": 16, "context": 4}
    step = shape(sizes=sizes, zero_axes=("data", "context"), global_batch=16, seq_len=8192)
    more = 2 * 12288 * (12288 - 192) * 96
    work = dataclasses.replace(
        step.work, kv_width=192, matmul_params=step.work.matmul_params - more
    )
    found = {t.what: t for t in transfers(dataclasses.replace(step, work=work, context="gather"))}
    assert found["keys and values"].nbytes == 2 * 2 * 8192 * 96
    grads = found["shared key-value gradients"]
    assert (grads.axes, grads.executions) == (("tensor",), 96)
    assert grads.nbytes == 4 * 2 * 12288 * 192 / 64


def test_megascales_ablation_has_the_papers_signs():
    """Table 3: parallel block, window, overlap of tensor, pipe and data, larger batch all help."""
    cluster = parse_cluster("a100:32x8")
    sizes = SIZES | {"pipe": 8, "data": 4}

    def mfu(block, window, overlap, batch):
        model = dataclasses.replace(PRESETS["megascale_175b"](), block=block, window=window)
        step = StepShape(
            model.work, batch, 2048, sizes, ("data",), remat="dots", fused_attention=True,
                local_gradients=True,
            pipeline=Pipeline(8, batch // 4, 6, stash="residuals"),
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


def test_chunks_hide_all_but_the_first_gather_and_the_last_scatter():
    """4 stages of 24 layers in 6 chunks: of 24 gathers a stage 4 are exposed, 20 have 4 ticks'."""
    sizes = SIZES | {"pipe": 4, "data": 16}
    pipeline = Pipeline(4, 8, 6, "interleaved", hides=True)
    found = transfers(shape(sizes=sizes, pipeline=pipeline, local_gradients=True))
    for kind, what in (("all-gather", "layer weights"), ("reduce-scatter", "layer gradients")):
        mine = [t for t in found if (t.kind, t.what) == (kind, what)]
        assert [t.executions for t in mine] == pytest.approx([4, 20])
        assert mine[0].flops_beside == 0 < mine[1].flops_beside
    plain = transfers(
        shape(sizes=sizes, pipeline=Pipeline(4, 8, 6, "interleaved"), local_gradients=True)
    )
    assert sum(t.total for t in found) == pytest.approx(sum(t.total for t in plain))
