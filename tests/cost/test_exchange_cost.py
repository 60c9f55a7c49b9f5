"""Bytes, time and memory of what data parallelism sends once a step, by hand."""

import dataclasses
import math

import jax
import pytest

from megajax import quant
from megajax.core.hardware import parse_cluster
from megajax.cost import traffic
from megajax.cost.estimate import estimate
from megajax.cost.memory import terms
from megajax.cost.roofline import Group, collective_time
from megajax.cost.step import Coding, StepShape
from megajax.cost.traffic import Overlap, transfers
from megajax.layers.moe import MoeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import zero
from megajax.training.gradients import exchange_of
from megajax.training.shape import step_shape
from tests.tiny import MOE, MQA, run_config, step_of

# 4 layers, D 8, 2 heads of 4, F 32, V 64, tied: a layer has 4 x 64 + 2 x 256 = 768 parameters.
MODEL = DecoderConfig(
    layers=4, width=8, heads=2, kv_heads=2, head_width=4, mlp=32, vocab=64, activation="gelu_tanh"
)
ONE = {"pipe": 1, "node": 1, "data": 1, "expert": 1, "context": 1, "tensor": 1}
ZERO = ("node", "data", "expert", "context")
LARGE = DecoderConfig(layers=4, width=4096, heads=32, kv_heads=32, head_width=128, mlp=16384)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Codes of some bits and a float32 for every group of them."""

    bits: int
    group: int
    format = "groups"

    def wire_bytes(self, n):
        return math.ceil(n * self.bits / 8) + 4 * math.ceil(n / self.group)


SDP4BIT = Coding(Groups(4, 2048), Groups(8, 128), Groups(4, 128), 32, True)


def shape(model=MODEL, coding: Coding | None = SDP4BIT, **sizes):
    ways = ONE | {"node": 2, "data": 4} | sizes
    axes = tuple(a for a in ZERO if ways[a] > 1)
    return StepShape(model.workload(16, 16), ways, axes, resident=True, coding=coding)


def by_level(step):
    return {(r.level, r.axes): r for r in traffic.rows(step)}


def test_messages_of_a_layer_and_a_table_by_hand():
    """A layer's 768 weights over 8 ranks: 96 a piece, three blocks of 32. A table's 512: 64."""
    levels = by_level(shape())
    assert levels.keys() == {
        ("weights", ("node", "data")),
        ("inside", ("data",)),
        ("between", ("node",)),
    }
    weights = 4 * 8 * (96 // 2 + 4) + 8 * (64 // 2 + 4)
    inside = 4 * 4 * (2 * 96 + 4 * 2) + 4 * (2 * 64 + 4)
    between = 4 * 2 * (96 // 2 + 4) + 2 * (64 // 2 + 4)
    assert [r.nbytes for r in levels.values()] == [weights, inside, between]
    assert [r.elements for r in levels.values()] == [3584, 3584, 3584 / 4]


def test_a_piece_is_padded_to_blocks_of_the_transform():
    """768 over 16 ranks: 48 weights a piece travel as they are, gradients as 64."""
    step = shape(data=8)
    layer = {m.level: m.nbytes for m in traffic.messages(step) if m.bucket.what == "layer"}
    row = 64
    assert layer == {
        "weights": 16 * (48 // 2 + 4),
        "inside": 8 * (2 * row + 4),
        "between": 2 * (row // 2 + 4),
    }
    plain = dataclasses.replace(SDP4BIT, block=1)
    layer = {m.level: m.nbytes for m in traffic.messages(shape(coding=plain, data=8))}
    assert layer["between"] == 2 * (32 // 2 + 4)  # the table's


def test_bits_of_an_element_are_the_papers_on_large_layers():
    bits = [row.bits for row in traffic.rows(shape(LARGE))]
    assert bits == pytest.approx([4 + 32 / 2048, 8 + 32 / 128, 4 + 32 / 128], rel=1e-6)


@pytest.mark.parametrize("name", ["sdp4bit", "zeropp", "loco", "fp8"])
def test_bytes_are_those_that_the_exchange_itself_counts(name):
    """parallel/zero.py, of 2 x 4 and 2 x 8 ranks, whose pieces are whole blocks and are not."""
    codec = quant.codec(name)
    coding = Coding(codec.weights, codec.inside, codec.between, max(codec.hadamard, 1))
    for data in (4, 8):
        for bucket, n in (("layer", 768), ("embedding", 512)):
            messages = traffic.messages(shape(coding=coding, data=data))
            sent = {m.level: m.nbytes for m in messages if m.bucket.what == bucket}
            assert sent == zero.wire_bytes(n, codec, 2, data)


def test_one_level_and_one_rank():
    assert by_level(shape(node=1)).keys() == {("weights", ("data",)), ("inside", ("data",))}
    assert by_level(shape(data=1)).keys() == {("weights", ("node",)), ("between", ("node",))}
    alone = shape(node=1, data=1)
    assert traffic.rows(alone) == [] and traffic.coded_bytes(alone) == 0


def test_without_a_codec_numbers_travel_as_they_are_computed():
    """Weights in 16 bit, gradients in float32."""
    levels = by_level(shape(coding=None, tensor=2))
    assert {level: row.nbytes for (level, _), row in levels.items()} == {
        "weights": 2 * 3584 / 2,
        "gradients": 4 * 3584 / 2,
    }
    assert traffic.coded_bytes(shape(coding=None)) == 0


def test_experts_have_the_gradients_of_fewer_ranks_and_routers_stay_float32():
    moe = dataclasses.replace(MODEL, moe=MoeConfig(experts=4, top_k=2, width=16))
    step = shape(moe, expert=2)
    buckets = {b.what: b for b in traffic.buckets(step)}
    assert (
        buckets["experts"].axes == ("node", "data")
        and buckets["experts"].elements == 2 * 2 * 8 * 16
    )
    assert buckets["layer"].axes == ("node", "data", "expert") and buckets["layer"].elements == 256
    routers = {m.level: m.nbytes for m in traffic.messages(step) if m.bucket.exact}
    assert routers == {"weights": 4 * 8 * 4, "gradients": 4 * 8 * 4}
    assert ("inside", ("data", "expert")) in by_level(step)


def test_quantizing_reads_and_writes_each_payload_once():
    """8 ranks, N weights in 16 bit, no padding: see what each fused pass moves."""
    step = shape(LARGE)
    n = sum(b.elements * b.count for b in traffic.buckets(step))
    sent = {row.level: row.nbytes for row in traffic.rows(step)}
    piece = n / 8
    subtract = 4 * piece + 2 * piece + sent["weights"] / 8
    add = sent["weights"] + 2 * n + 2 * n
    transform = 4 * n + sent["inside"]
    again = sent["inside"] + sent["between"]
    back = sent["between"] + 4 * piece
    assert traffic.coded_bytes(step) == pytest.approx(subtract + add + transform + again + back)
    plain = dataclasses.replace(SDP4BIT, difference=False)
    less = traffic.coded_bytes(step) - traffic.coded_bytes(shape(LARGE, plain))
    assert less == pytest.approx(2 * piece + 2 * n)


def test_the_estimate_prices_each_level_on_its_link_and_the_passes_over_memory():
    step, cluster = shape(LARGE), parse_cluster("a100:2x4")
    guess = estimate(step, cluster, transfers(step))
    memory = cluster.card.memory_bytes_per_s * 0.85
    assert guess.quantize_s == pytest.approx(traffic.coded_bytes(step) / memory)
    for axes, group in ((("data",), Group(4, 1)), (("node",), Group(1, 2))):
        once = [
            m.count * collective_time(m.kind, m.nbytes, group, cluster)
            for m in traffic.messages(step)
            if m.axes == axes
        ]
        assert guess.exposed_s["+".join(axes)] == pytest.approx(sum(once))
    parts = guess.compute_s + guess.update_s + guess.quantize_s + sum(guess.exposed_s.values())
    assert guess.step_s == pytest.approx(parts)


def test_memory_of_copies_and_of_masters_that_are_cut():
    """3584 weights: masters and moments in eighths, copies in 16 bit and gradients whole."""
    step = shape()
    sizes = terms(step)
    assert sizes["parameters"] == 4 * 3584 / 8 and sizes["optimizer"] == 2 * sizes["parameters"]
    assert sizes["weights in use"] == 2 * 3584
    assert sizes["gradients"] == 4 * (3584 / 8 + 768 + 512)  # streamed: one layer's, the table's
    later = terms(dataclasses.replace(step, accumulate=2))
    assert later["gradients"] == 4 * (3584 + 3584 / 8)
    assert "errors" not in sizes
    with_errors = shape(coding=dataclasses.replace(SDP4BIT, error_bits=8.25))
    assert terms(with_errors)["errors"] == 3584 * 8.25 / 8
    full = dataclasses.replace(step, resident=False, coding=None)
    assert terms(full)["gradients"] == 4 * 3584 / 8
    # Nothing is gathered for the backward pass, so nothing of that is kept.
    stash = [terms(dataclasses.replace(s, remat="none"))["stash"] for s in (full, step)]
    assert stash[0] - stash[1] == 4 * 2 * 768


def test_pieces_in_a_codec_travel_for_every_micro_batch_and_weights_twice():
    """ZeRO-3 of 4 layers and a table, three micro-batches."""
    step = dataclasses.replace(shape(), resident=False, accumulate=3)
    once = {(m.bucket.what, m.level): m.nbytes for m in traffic.messages(shape())}
    times = {(m.bucket.what, m.level): m.count for m in traffic.messages(step)}
    assert times["layer", "weights"] == 4 * 3 * 2 and times["layer", "inside"] == 4 * 3
    assert times["embedding", "weights"] == times["embedding", "between"] == 3
    assert {(m.bucket.what, m.level): m.nbytes for m in traffic.messages(step)} == once
    sizes = terms(step)
    assert sizes["gradients"] == 4 * 3584 / 8 and sizes["weights in use"] == 2 * (768 + 512)
    sent = transfers(step, Overlap(data=0.5))
    flops = {t.what: t.flops_beside for t in sent}
    assert flops["layer inside"] == 2 * flops["layer weights"] > flops["embedding weights"] == 0
    piped = dataclasses.replace(step, resident=True)
    assert {t.flops_beside for t in transfers(piped, Overlap(data=0.5))} == {0.0}


@pytest.mark.parametrize(
    ("values", "resident", "bits"),
    [
        ({}, False, None),
        ({"shard__zero": "optimizer"}, True, None),
        ({"wire": "sdp4bit"}, True, (4, 8, 4)),
        ({"wire": "zeropp"}, False, (8, 4, 4)),
        ({"wire": "zeropp", "mesh__pipe": 2}, True, (8, 4, 4)),
        ({"wire": "loco"}, True, (16, 4, 4)),
    ],
)
def test_the_shape_of_a_configuration_knows_its_wire(values, resident, bits):
    cfg = run_config(**values)
    step = step_shape(cfg, ONE | {"node": 2, "data": 2, "pipe": cfg.mesh.pipe})
    assert step.resident is resident and (step.coding is None) is (bits is None)
    if step.coding is not None:
        sent = [p.wire_bytes(8192) for p in (step.coding.weights, step.coding.inside)]
        assert [8 * n // 8192 for n in sent] == list(bits[:2])
        assert step.coding.difference is (values["wire"] == "sdp4bit")
        assert step.coding.block == (32 if values["wire"] == "sdp4bit" else 1)
        assert step.coding.error_bits == (8.25 if values["wire"] == "loco" else 0)
    served = step_shape(run_config(**values), ONE, phase="decode")
    assert not served.resident and served.coding is None


@pytest.mark.parametrize("model", [MQA, MOE])
def test_buckets_are_those_of_the_step(model):
    """Elements, axes and number of what a real exchange sends, on 2 x 2 ranks of 2 tensor ranks."""
    cfg = run_config(wire="sdp4bit", mesh__node=2, mesh__data=2, mesh__tensor=2)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(model, vocab=64))
    built = step_of(cfg)
    mesh, params = built.layout.mesh, jax.tree.leaves(built.abstract_state.params)
    with jax.set_mesh(mesh):
        real = exchange_of(cfg, built.parts, built.layout)
    executed = []
    for bucket in real.buckets:
        ranks = math.prod(mesh.shape[axis] for axis in bucket.axes)
        pieces = [params[i].sharding.shard_shape(params[i].shape) for i in bucket.leaves]
        layers = pieces[0][0] if bucket.stacked else 1
        axes = tuple(axis for axis in bucket.axes if mesh.shape[axis] > 1)
        executed.append((ranks * sum(map(math.prod, pieces)) // layers, layers, axes))
    planned = traffic.buckets(step_shape(cfg, dict(mesh.shape)))
    assert sorted(executed) == sorted((b.elements, b.count, b.axes) for b in planned if not b.exact)
