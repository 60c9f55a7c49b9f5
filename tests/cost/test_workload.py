"""Workloads against the products that the models' programs execute, counted one by one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost import memory
from megajax.cost.base import Op, Stack, Workload
from megajax.cost.estimate import estimate
from megajax.cost.kernels import Attention, Collective, Experts, Matmul
from megajax.cost.roofline import Roofline
from megajax.cost.step import Pipeline, StepShape
from megajax.cost.traffic import transfers
from megajax.layers.attention import Context, attend
from megajax.layers.ops import Ops
from megajax.models import decoder, encoder
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.models.encoder_config import PRESETS as ENCODERS
from megajax.models.encoder_config import EncoderConfig

B, S = 3, 24
GQA = DecoderConfig(layers=2, width=40, heads=6, kv_heads=2, head_width=4, mlp=56, vocab=128)
BERT = EncoderConfig(
    layers=2, width=24, heads=3, mlp=40, vocab=128, vocab_multiple=1, max_positions=S
)
ONE = {"pipe": 1, "node": 1, "data": 1, "expert": 1, "context": 1, "tensor": 1}


def products(jaxpr):
    """Returns the FLOPs of all matrix products of a program, loops as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            deep = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += 2 * deep * math.prod(eqn.outvars[0].aval.shape)
            continue
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            total += times * products(inner) if hasattr(inner, "eqns") else 0
    return total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of other tokens: only their number counts here."""

    k_BMGK: jax.Array
    v_BMGK: jax.Array

    def attend(self, q, k, v, context, window):
        places = jnp.broadcast_to(jnp.arange(S), self.k_BMGK.shape[:2])
        return attend(q, self.k_BMGK, self.v_BMGK, context, Context(places), window), self


def forward(parts, tokens, keys=None, scored=None):
    """The forward pass of a model over so many tokens a row, with a cache of `keys` places."""

    def run(params, tokens_BS, cache):
        positions_BS = jnp.broadcast_to(jnp.arange(tokens), (B, tokens))
        batch = {"tokens": tokens_BS, "positions": positions_BS}
        context = parts.context(batch, None)

        def layer(x, stacked):
            return parts.block(stacked[0], x, context, stacked[1])[:2]

        x = parts.embed(params, batch, context)
        x, cache = jax.lax.scan(layer, x, (params["blocks"], cache))
        return parts.head(params, x[:, :scored]), cache

    cache = None if keys is None else Cache(keys, keys)
    token_ids = jax.ShapeDtypeStruct((B, tokens), jnp.int32)
    return products(jax.make_jaxpr(run)(parts.abstract, token_ids, cache).jaxpr)


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": False},
        {"block": "parallel", "activation": "gelu_tanh", "position": "learned", "max_positions": S},
    ],
)
def test_a_decoders_workload_has_the_products_of_its_forward_pass(changes):
    cfg = dataclasses.replace(GQA, **changes)
    assert cfg.workload(B, S).flops == forward(decoder.parts(cfg), S)


@pytest.mark.parametrize(
    "changes",
    [{"head": "classify"}, {"embed_width": 8, "layers": 1, "repeats": 3}],
)
def test_an_encoders_workload_has_the_products_of_its_forward_pass(changes):
    cfg = dataclasses.replace(BERT, **changes)
    assert cfg.workload(B, S).flops == forward(encoder.parts(cfg, ops=Ops()), S)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_generation_has_the_products_of_its_forward_passes(phase):
    cfg, tokens = GQA, S if phase == "prefill" else 1
    shape = cfg.layers, B, S, cfg.kv_heads, cfg.head_width
    counted = forward(decoder.parts(cfg), tokens, jax.ShapeDtypeStruct(shape, jnp.float32), 1)
    assert cfg.workload(B, S, phase=phase).flops == counted


def test_experts_by_hand():
    """6 experts of which a token uses 2, width 5, 7 wide inside, gated: 3 products a row."""
    assert Experts(10, 6, 2, 5, 7, True, 2).flops == 10 * 2 * 3 * 2 * 5 * 7
    slots = Experts(10, 6, 2, 5, 7, False, 3.6, dropless=False)
    assert slots.flops == pytest.approx(36 * 2 * 2 * 5 * 7) and slots.params == 6 * 2 * 5 * 7


def vision(images, side=14, patch=16, width=768, classes=1000):
    """ViT-B/16 (arXiv 2010.11929 table 1) from public names: 197 tokens an image."""
    tokens = side**2 + 1
    stack = Stack(12, width, 12, 12, 64, 4 * width, causal=False)
    before = Op("head", Matmul(images * side**2, 3 * patch**2, width))
    after = Op("head", Matmul(images, width, classes))
    ops = before, *stack.ops(images, tokens, tokens), after
    return Workload(ops, images, tokens, 12, width)


def test_a_vision_transformer_is_a_workload_of_ones_own():
    """ViT-B/16 has 86 M parameters and takes 17.6 GFLOPs x 2 an image (timm's counts)."""
    load = vision(64)
    assert load.params == pytest.approx(86.4e6, rel=0.01)
    assert load.flops / 64 == pytest.approx(2 * 17.58e9, rel=0.01)
    step = StepShape(load, ONE | {"data": 8}, ("data",))
    estimated = estimate(step, parse_cluster("h100:1x8"), transfers(step))
    assert 0 < estimated.mfu_megatron == pytest.approx(estimated.mfu_causal)  # no causal mask


@pytest.mark.parametrize("name", ["bert_large", "albert_base"])
def test_an_encoder_has_a_plan(name):
    """Memory, traffic and time, with a pipeline and without; shared blocks are stored once.

    Parameters as published, ALBERT's without its pooler.
    """
    cluster, load = parse_cluster("h100:1x8"), ENCODERS[name]().workload(256, 512)
    step = StepShape(load, ONE | {"data": 4, "tensor": 2}, ("data",), fused_attention=True)
    flops = 3 * load.flops / 8
    stored = dataclasses.replace(step, remat="none")
    assert stored.workload.flops == pytest.approx(flops)
    bytes_by_term = memory.terms(step)
    assert bytes_by_term["parameters"] == pytest.approx(4 * load.params / 8)
    assert load.params == pytest.approx(
        {"bert_large": 335e6, "albert_base": 11.2e6}[name], rel=0.02
    )
    guess = estimate(step, cluster, transfers(step))
    assert 0 < guess.mfu_megatron < 1 and guess.bubble_s == 0
    if load.stored_layers > 1:
        sizes = ONE | {"pipe": 4, "tensor": 2}
        staged = dataclasses.replace(step, sizes=sizes, pipeline=Pipeline(4, 8))
        piped = estimate(staged, cluster, transfers(staged))
        assert piped.bubble == pytest.approx(3 / 8)
        assert memory.terms(staged)["stash"] < bytes_by_term["stash"] * 4


def generation(phase, **sizes):
    load = PRESETS["llama3_8b"]().workload(32, 4096, phase=phase)
    return StepShape(load, ONE | sizes, (), fused_attention=True)


def test_a_decoded_token_is_bound_by_memory_and_a_prefill_by_arithmetic():
    """Llama 3 8B, bf16, 32 rows on 8 ranks: 16 GB of weights and 17 GB of cache are read."""
    cluster = parse_cluster("h100:1x8")
    decode, prefill = (generation(phase, tensor=8) for phase in ("decode", "prefill"))
    cache = 2 * 2 * 32 * 32 * 4096 * 1024
    assert memory.terms(decode)["cache"] == memory.terms(prefill)["cache"] == cache / 8
    assert set(memory.terms(decode)).isdisjoint(("optimizer", "gradients", "stash"))
    read = 2 * (8.03e9 - 128256 * 4096) + cache  # the looked-up table is not read
    token, prompt = (estimate(step, cluster, transfers(step)) for step in (decode, prefill))
    assert token.compute_s == pytest.approx(read / 8 / (0.85 * 3.35e12), rel=0.02)
    assert token.tokens_per_s == pytest.approx(32 / token.step_s)
    assert prompt.mfu_megatron > 20 * token.mfu_megatron and prompt.mfu_megatron < 0.7
    assert token.update_s == prompt.update_s == 0
    assert {t.kind for t in transfers(decode)} == {"all-reduce", "all-gather"}
    assert transfers(generation("decode")) == []
    alone = memory.terms(generation("decode"))
    assert alone["cache"] == cache and alone["parameters"] == pytest.approx(2 * 8.03e9, rel=1e-3)
    # Replicas share the rows, and each reads the weights: so half the cache, all the weights.
    halves = estimate(generation("decode", data=2, tensor=4), cluster, ())
    assert halves.compute_s == pytest.approx((2 * read - cache) / 8 / (0.85 * 3.35e12), rel=0.02)


def test_generation_cuts_no_layers():
    with pytest.raises(UserError, match="mesh.pipe=2 must be 1 for decode.*--mesh.pipe"):
        generation("decode", pipe=2)


def test_the_shapes_of_a_device_are_those_that_it_executes():
    """4 pieces of rows, 2 micro-batches, tensor 2, context 2: what a table is asked for."""
    step = StepShape(
        GQA.workload(16, S), ONE | {"data": 4, "context": 2, "tensor": 2}, (), accumulate=2
    )
    kernels = [(op.part, op.kernel) for op in step.forward.ops]
    assert kernels[2] == ("input", Matmul(2 * S / 2, 40, (24 + 2 * 8) / 2))
    assert kernels[3][1] == Attention(2, S / 2, S, 3, 1, 4, fused=False)
    assert kernels[4] == ("output", Matmul(2 * S / 2, 24 / 2, 40))
    assert kernels[-1] == ("head", Matmul(2 * S / 2, 40, 128 / 2))
    assert [op.count for op in step.forward.ops][2:5] == [2 * 2] * 3
    name, shape, dtypes = step.forward.ops[2].key
    assert (name, shape, dtypes) == ("matmul", (24, 40, 20, 1), ("bfloat16",) * 3)
    assert GQA.workload(16, S, "float32").ops[3].key[2] == ("float32",) * 4


def test_weights_of_four_bits_are_read_as_such_and_multiplied_in_the_wider_type():
    op = Op("input", Matmul(1, 4096, 4096), dtypes=("bfloat16", "int4", "bfloat16"))
    assert op.nbytes == 2 * 2 * 4096 + 4096**2 / 2 and op.dtype == "bfloat16"
    assert op.cast("int8").nbytes == 2 * 4096 + 4096**2


def test_a_device_reads_all_of_an_operand_that_is_not_cut():
    op = Op("input", Matmul(64, 40, 24)).cut(8, "m")
    assert op.nbytes == 2 * (8 * 40 + 40 * 24 + 8 * 24) and op.params == 40 * 24
    both = op.cut(2, "n")
    assert both.nbytes == 2 * (8 * 40 + 40 * 12 + 8 * 12) and both.params == 40 * 24


def test_a_table_of_measured_times_is_a_backend():
    """A model that knows some kernels and leaves the others, collectives too, to the roofline."""

    known = {("all-reduce", ("all-reduce", 1e6, 8, 1), ()): 1.5}

    class Table(Roofline):
        def op_time(self, op, device, dtype=None):
            measured = known.get(op.key)
            return super().op_time(op, device, dtype) if measured is None else (measured, 0.0)

    card, model, cluster = CARDS["H100"], Table(), parse_cluster("h100:1x8")
    assert model.op_time(Op("transfer", Collective("all-reduce", 1e6, 8, 1)), card) == (1.5, 0.0)
    other = Op("transfer", Collective("all-reduce", 2e6, 8, 1))
    assert model.op_time(other, card) == Roofline().op_time(other, card) != (1.5, 0.0)
    step = generation("decode", tensor=8)
    sent = [t for t in transfers(step) if t.kind == "all-reduce"]
    (only,) = sent
    known["all-reduce", ("all-reduce", only.nbytes, 8, 1), ()] = 0.25
    slow = estimate(step, cluster, sent, model)
    assert slow.exposed_s == {"tensor": 0.25 * only.executions}
    assert slow.compute_s == estimate(step, cluster, sent).compute_s
