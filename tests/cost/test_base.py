"""Workloads and step shapes against the FLOP formula, and against counting by hand."""

import dataclasses

import pytest

from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.base import RECOMPUTED, Op, train_flops_per_token
from megajax.cost.estimate import estimate
from megajax.cost.kernels import Matmul, Rowwise
from megajax.cost.roofline import Roofline
from megajax.cost.step import Pipeline, StepShape
from megajax.cost.traffic import Overlap, members, transfers
from megajax.models.decoder_config import PRESETS

SIZES = {"pipe": 1, "node": 1, "data": 64, "expert": 1, "context": 1, "tensor": 8}
CFG = PRESETS["megascale_175b"]()
LOAD = CFG.workload(256, 2048)


def shape(**changes):
    step = StepShape(LOAD, SIZES, ("data",), loss_chunks=8)
    return dataclasses.replace(step, **changes)


def remade(cfg, seq, remat, loss_chunks, keys):
    """FLOPs of one token that the backward pass spends on making forward values again, by hand.

    Source: models/parts.py:remat_policy, layers/losses.py.
    """
    again, D, gated = RECOMPUTED[remat], cfg.width, cfg.activation == "swiglu"
    asked, stored = cfg.heads * cfg.head_width, cfg.kv_heads * cfg.head_width
    hidden, moe = cfg.feed_forward.hidden, cfg.moe
    layer = 2 * D * (asked + 2 * stored + (1 + gated) * hidden) * again.get("input", 0)
    layer += 2 * D * (asked + hidden) * again.get("output", 0)
    layer += 4 * asked * keys * again.get("attention", 0)
    layer += 2 * D * moe.experts * again.get("router", 0)
    if moe.experts:
        layer += 2 * moe.top_k * (2 + gated) * D * moe.width * again.get("experts", 0)
    return cfg.layers * layer + (2 * cfg.vocab * D if loss_chunks > 1 else 0)


@pytest.mark.parametrize("name", ["megascale_175b", "llama3_8b", "qwen3_0p6b"])
def test_a_workload_has_the_flops_of_the_formula(name):
    cfg = PRESETS[name]()
    load = cfg.workload(3, 2048)
    per_token = train_flops_per_token(load, "megatron")
    assert 3 * load.flops == pytest.approx(per_token * 3 * 2048)


@pytest.mark.parametrize("remat", ["none", "dots", "outputs", "full"])
def test_recomputation_adds_what_the_formula_says(remat):
    step = shape(remat=remat)
    full = dataclasses.replace(CFG, window=None)
    per_token = train_flops_per_token(full.workload(1, 2048), "megatron")
    per_token += remade(full, 2048, remat, 8, 2048)
    assert step.workload.flops * step.devices == pytest.approx(per_token * 256 * 2048)


def test_outputs_makes_the_inputs_and_half_of_attention_again():
    """D 12288: q, k, v and up are 3 D + 4 D columns; of attention the weights, 2 D a key."""
    plain, again = (
        shape(remat=remat, loss_chunks=1).workload.flops for remat in ("none", "outputs")
    )
    D, tokens = 12288, 256 * 2048
    assert (again - plain) * 512 / tokens == pytest.approx(96 * (2 * D * 7 * D + 2 * D * 2048))


def test_full_recomputation_is_a_third_more():
    plain, again = (
        shape(remat=remat, loss_chunks=n).workload.flops for remat, n in (("none", 1), ("full", 8))
    )
    assert again == pytest.approx(plain * 4 / 3)


@pytest.mark.parametrize(("remat", "passes"), [("none", 3.5), ("outputs", 3.5), ("full", 4.5)])
def test_a_ring_computes_the_weights_of_attention_again(remat, passes):
    """parallel/context.py: five products of a block of keys backward, two of them forward."""
    step = shape(sizes=SIZES | {"data": 16, "context": 4}, remat=remat)
    assert step.counts["attention"] == (passes, 0)
    assert step.counts["norm"] == shape(remat=remat).counts["norm"]


def test_a_fused_kernel_skips_what_the_window_hides():
    plain, fused = (shape(fused_attention=f).forward.attention for f in (False, True))
    assert plain.reach == 2048 and fused.reach == 1024
    assert plain.flops == 2 * fused.flops


def test_roofline_takes_the_longer_of_arithmetic_and_memory():
    card, model = CARDS["H100"], Roofline(matmul=0.5, memory_bandwidth=0.5)
    busy, _ = model.op_time(Op("input", Matmul(1e4, 5e3, 1e4)), card, "bfloat16")
    moving, sigma = model.op_time(Op("norm", Rowwise("norm", 5e5, 1e3)), card)
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
    sent = {(t.kind, t.axes, t.what): t for t in transfers(shape())}
    weights = sent["all-gather", ("data",), "layer weights"]
    assert weights.nbytes == 2 * 12 * 12288**2 / 8 and weights.executions == 2 * 96
    assert sent["reduce-scatter", ("data",), "layer gradients"].executions == 96
    stream = sent["all-gather", ("tensor",), "residual stream"]
    assert stream.nbytes == 2 * 4 * 2048 * 12288 and stream.executions == 3 * 96
    assert sent["reduce-scatter", ("tensor",), "residual stream"].executions == 2 * 96


def test_which_sums_are_scattered_again():
    """Of a serial block's two, the attention's: for the input of the MLP."""
    load = dataclasses.replace(CFG, block="serial").workload(256, 2048)

    def scatters(**changes):
        sent = transfers(shape(load=load, **changes))
        return sum(t.executions for t in sent if t.kind == "reduce-scatter" and t.what == WHAT)

    WHAT, staged = "residual stream", {"sizes": SIZES | {"pipe": 8, "data": 8}}
    assert [scatters(remat=r) / 96 for r in ("none", "outputs", "dots", "full")] == [4, 4, 4, 5]
    staged["pipeline"] = Pipeline(8, 32, 6)
    outputs, dots, full = (scatters(remat=r, **staged) for r in ("outputs", "dots", "full"))
    assert outputs < dots == full  # one rank's sums are what a stage keeps


def test_hybrid_sharding_reduces_the_shard_between_nodes():
    sizes = SIZES | {"node": 4, "data": 16}
    sent = transfers(shape(sizes=sizes, zero_axes=("data",)))
    between = [t for t in sent if t.kind == "all-reduce" and t.what == "layer gradients"]
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
    flops = train_flops_per_token(LOAD, "megatron") * 256 * 2048
    assert bare.mfu_megatron == pytest.approx(flops / bare.step_s / 512 / 989.5e12)


def test_a_pipeline_pays_its_bubble_and_sends_between_stages():
    sizes = SIZES | {"pipe": 8, "data": 8}
    step = shape(sizes=sizes, remat="full", pipeline=Pipeline(8, 32, 6))
    assert step.rows == 1 and step.layers == 12
    sent = {t.kind: t for t in transfers(step) if t.axes == ("pipe",)}
    assert sent["collective-permute"].executions == 2 * (6 * 32 + 7)
    assert sent["collective-permute"].nbytes == 2 * 2048 * 12288 / 8
    estimated = estimate(step, parse_cluster("h100:64x8"), transfers(step))
    assert estimated.bubble == pytest.approx(7 / 192)
    head = sum(op.flops * op.count for op in step.workload.ops if op.part == "head")
    assert step.masked.flops == pytest.approx(7 / 192 * (step.workload.flops - head))
    parts = (
        estimated.compute_s
        + estimated.update_s
        + estimated.bubble_s
        + sum(estimated.exposed_s.values())
    )
    assert estimated.step_s == pytest.approx(parts)


MOE_CFG = PRESETS["mixtral_8x7b"]()
MOE = MOE_CFG.workload(64, 4096)
MOE_SIZES = SIZES | {"data": 4, "expert": 8, "tensor": 4}


def experts(**changes):
    step = StepShape(MOE, MOE_SIZES, ("data", "expert"), loss_chunks=8)
    return dataclasses.replace(step, **changes)


def test_dropless_experts_exchange_tokens_by_hand():
    """2 rows of 4096 tokens, D 4096, bf16; 8 devices of tokens meet. Forward, made again, back."""
    sent = {(t.kind, t.axes, t.what): t for t in transfers(experts())}
    tokens = 2 * 2 * 4096 * 4096
    there = sent["all-gather", ("expert",), "tokens"]
    assert there.nbytes == 8 * tokens and there.executions == 32 * 3
    back = sent["reduce-scatter", ("expert",), "sums"]
    assert back.nbytes == 8 * tokens and back.executions == 32 * 2
    assert sent["all-gather", ("tensor",), "tokens"].nbytes == tokens
    stream = sent["all-gather", ("tensor",), "residual stream"]
    assert stream.executions == 32 * 3  # attention alone: there are no shared experts
    weights = sent["all-gather", ("data",), "expert weights"]
    assert weights.nbytes == 2 * 8 * 3 * 4096 * 14336 / 8 / 4 and weights.executions == 2 * 32
    router = sent["all-gather", ("data", "expert"), "layer weights"]
    assert router.nbytes == 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 4096 * 8) / 4


def test_slots_travel_there_and_back():
    """8 experts, 2 a token, factor 1.25: 1280 slots a row and expert, filled or not."""
    moe = dataclasses.replace(MOE_CFG.moe, mode="capacity", capacity_factor=1.25)
    step = experts(load=dataclasses.replace(MOE_CFG, moe=moe).workload(64, 4096))
    sent = transfers(step)
    (slots,) = (t for t in sent if t.kind == "all-to-all")
    assert slots.axes == ("expert",) and slots.nbytes == 2 * 8 * 2 * 1280 * 4096
    assert slots.executions == 32 * (2 + 2 + 2)
    assert not any(t.axes == ("expert",) and t.what in ("tokens", "sums") for t in sent)
    assert all(
        t.executions == 32 * 4
        for t in transfers(dataclasses.replace(step, remat="none"))
        if t.kind == "all-to-all"
    )


@pytest.mark.parametrize("remat", ["none", "dots", "outputs", "full"])
def test_experts_recompute_what_the_formula_says(remat):
    step = experts(remat=remat)
    per_token = train_flops_per_token(MOE, "megatron")
    per_token += remade(MOE_CFG, 4096, remat, 8, 4096)
    assert step.workload.flops * step.devices == pytest.approx(per_token * 64 * 4096)


def test_mfu_counts_active_experts():
    """As many experts again, never used, leave FLOPs as they are and the utilisation below it."""
    cfg = dataclasses.replace(MOE_CFG, moe=dataclasses.replace(MOE_CFG.moe, experts=16))
    more = cfg.workload(64, 4096)
    one, two = (
        estimate(experts(load=w), parse_cluster("h100:16x8"), transfers(experts(load=w)))
        for w in (MOE, more)
    )
    flops = train_flops_per_token(MOE, "megatron") * 64 * 4096
    assert one.mfu_megatron == pytest.approx(flops / one.step_s / 128 / 989.5e12)
    assert two.step_s > one.step_s and two.mfu_megatron < one.mfu_megatron


def test_keys_of_other_devices_by_hand():
    """Context 4, 1 row of 8192, 12288 wide on tensor 8: k and v of a piece 2 x 2048 x 1536."""
    sizes = SIZES | {"data": 16, "context": 4}
    load = CFG.workload(16, 8192)
    step = shape(sizes=sizes, zero_axes=("data", "context"), load=load)
    local = 2 * 2 * 2048 * 12288 / 8

    def sent(kind):
        moved = transfers(dataclasses.replace(step, context=kind))
        moved = [t for t in moved if t.axes == ("context",) and t.kind != "all-reduce"]
        return [(t.kind, t.nbytes, t.executions / 96) for t in moved if "keys" in t.what]

    # `outputs` keeps a ring's result: 3 hops forward, 3 back with 4 of the float32 gradients.
    assert sent("ring") == [("collective-permute", local, 6), ("collective-permute", 2 * local, 4)]
    gathered = [("all-gather", 4 * local, 2), ("reduce-scatter", 4 * local, 1)]
    assert sent("gather") == gathered
    # Two there and two back for queries and results, the same for keys and values.
    assert sent("ulysses") == [("all-to-all", local / 2, 6)]


def test_ranks_that_share_a_key_value_head_send_it_each_and_add_its_gradient():
    """Two heads of 96 on tensor 8: each rank has a whole one, and four ranks add its gradient."""
    sizes = SIZES | {"data": 16, "context": 4}
    load = dataclasses.replace(CFG, kv_heads=2).workload(16, 8192)
    step = shape(sizes=sizes, zero_axes=("data", "context"), load=load)
    sent = {t.what: t for t in transfers(dataclasses.replace(step, context="gather"))}
    assert sent["keys and values"].nbytes == 2 * 2 * 8192 * 96
    grads = sent["shared key-value gradients"]
    assert (grads.axes, grads.executions) == (("tensor",), 96)
    assert grads.nbytes == 4 * 2 * 12288 * 192 / 64


def test_megascales_ablation_has_the_papers_signs():
    """Table 3: parallel block, window, overlap of tensor, pipe and data, larger batch all help."""
    cluster = parse_cluster("a100:32x8")
    sizes = SIZES | {"pipe": 8, "data": 4}

    def mfu(block, window, overlap, batch):
        model = dataclasses.replace(PRESETS["megascale_175b"](), block=block, window=window)
        step = StepShape(
            model.workload(batch, 2048),
            sizes,
            ("data",),
            remat="dots",
            fused_attention=True,
            local_gradients=True,
            pipeline=Pipeline(8, batch // 4, 6, stash="residuals"),
        )
        return estimate(step, cluster, transfers(step, overlap)).mfu_megatron

    rising = [
        mfu("serial", None, Overlap(), 256),
        mfu("parallel", None, Overlap(), 256),
        mfu("parallel", 1024, Overlap(), 256),
        mfu("parallel", 1024, Overlap(tensor=1), 256),
        mfu("parallel", 1024, Overlap(tensor=1, pipe=1), 256),
        mfu("parallel", 1024, Overlap(1, 1, 1), 256),
        mfu("parallel", 1024, Overlap(1, 1, 1), 768),
    ]
    assert rising == sorted(rising) and len(set(rising)) == 7


def test_chunks_hide_all_but_the_first_gather_and_the_last_scatter():
    """4 stages of 24 layers in 6 chunks: of 24 gathers a stage 4 are exposed, 20 have 4 ticks'."""
    sizes = SIZES | {"pipe": 4, "data": 16}
    pipeline = Pipeline(4, 8, 6, "interleaved", hides=True)
    sent = transfers(shape(sizes=sizes, pipeline=pipeline, local_gradients=True))
    for kind, what in (("all-gather", "layer weights"), ("reduce-scatter", "layer gradients")):
        parts = [t for t in sent if (t.kind, t.what) == (kind, what)]
        assert [t.executions for t in parts] == pytest.approx([4, 20])
        assert parts[0].flops_beside == 0 < parts[1].flops_beside
    plain = transfers(
        shape(sizes=sizes, pipeline=Pipeline(4, 8, 6, "interleaved"), local_gradients=True)
    )
    assert sum(t.total for t in sent) == pytest.approx(sum(t.total for t in plain))
