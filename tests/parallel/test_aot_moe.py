"""The compiled H100 program of a mixture of experts sends what was counted by hand, and no more."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.cost.hlo import attributed, collectives, find
from megajax.layers.mlp import MlpConfig
from megajax.layers.moe import Moe, MoeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import expert, sharding, tensor
from megajax.parallel.context import ContextSpec
from megajax.systems.aot import QUICK
from pallas_kernels import aot
from tests.parallel.test_aot import MIB, ZERO, compile_step, large_gradient_all_reduces, place

pytestmark = [pytest.mark.aot, pytest.mark.slow]

D, F, E, A, VOCAB = 1024, 2048, 8, 2, 32768
ROWS, SEQ = 16, 1024
MODEL = DecoderConfig(
    layers=4,
    width=D,
    heads=8,
    kv_heads=8,
    head_width=128,
    vocab=VOCAB,
    tied=False,
    moe=MoeConfig(experts=E, top_k=A, width=F),
)
SIZES = dict(train__seq_len=SEQ, train__global_batch=ROWS)


def sent(program, where, axis, kind):
    """MiB of one layer in one microbatch."""
    these = [c for c in program if place(c) == where and c.axes == (axis,) and c.kind == kind]
    return sum(c.nbytes for c in these) / MIB


def test_the_step_of_experts_over_four_devices():
    """Experts over 4, tensor 2; what is kept from forward to backward is `outputs`."""
    program = compile_step(model=MODEL, mesh__expert=4, mesh__tensor=2, **SIZES)
    everyone = ROWS * SEQ * D * 2 / MIB  # the tokens of all devices
    tensor = everyone / 4  # those of one tensor group
    choices = ROWS * SEQ * A * (4 + 4) / MIB  # experts and weights
    attention = 4 * D * D * 2 / 2 / MIB
    router = D * E * 4 / MIB
    by_hand = {
        ("blocks forward", "expert", "all-gather"): everyone + choices + attention + router,
        ("blocks forward", "expert", "reduce-scatter"): everyone,
        # The gathered tokens again, and the transpose of the scatter.
        ("blocks backward", "expert", "all-gather"): 2 * everyone + choices + attention + router,
        ("blocks backward", "expert", "reduce-scatter"): everyone + attention + router,
        ("blocks forward", "tensor", "all-gather"): 2 * tensor + choices / 4,
        ("blocks forward", "tensor", "reduce-scatter"): 2 * tensor,
        ("blocks backward", "tensor", "all-gather"): 4 * tensor + choices / 4,
        ("blocks backward", "tensor", "reduce-scatter"): 2 * tensor,
        ("entry forward", "expert", "all-gather"): 2 * VOCAB * D * 2 / 2 / MIB,
        ("entry backward", "expert", "reduce-scatter"): 2 * VOCAB * D * 2 / 2 / MIB,
    }
    # Less than the scores of all tokens, which `top_k` gathered: 1.4 % of the first line.
    for line, expected in by_hand.items():
        assert sent(program, *line) == pytest.approx(expected, rel=0.005), line
    assert attributed(program) >= 0.99
    assert find(program, ("expert",)) == [] and not large_gradient_all_reduces(program)


def test_stages_of_experts_exchange_tokens_in_the_loop_and_weights_outside():
    cfg = dict(mesh__pipe=2, mesh__expert=2, mesh__tensor=2, pipeline__microbatches=4)
    program = compile_step(model=MODEL, **cfg, **SIZES)
    assert attributed(program) >= 0.99
    assert find(program, ("expert",)) == []
    large = [c for c in program if c.nbytes > MIB and set(c.axes) & ZERO]
    assert {c.axes for c in large} == {("expert",)}
    inside = [c for c in large if c.bodies]
    tokens = ROWS // 4 * SEQ * D * 2
    assert {c.kind for c in inside} == {"all-gather", "reduce-scatter"}
    for c in inside:  # with the choices, 8 bytes each
        assert c.nbytes / c.arrays <= 2 * tokens and "experts" in c.op_name


def test_capacity_exchanges_slots():
    moe = dataclasses.replace(MODEL.moe, mode="capacity", capacity_factor=1.25, share_slots=True)
    model = dataclasses.replace(MODEL, moe=moe)
    program = compile_step(model=model, mesh__expert=4, mesh__tensor=2, **SIZES)
    slots = moe.slots(SEQ)
    # There and back; both again, because the choice's gradient needs the answers, and transposed.
    for where, times in (("blocks forward", 2), ("blocks backward", 4)):
        expected = times * E * ROWS // 4 * slots * D * 2 / MIB
        assert sent(program, where, "expert", "all-to-all") == pytest.approx(expected, rel=0.005)
    assert find(program, ("expert",)) == [] and attributed(program) >= 0.99


def test_fused_layers_of_experts_cut_over_tensor():
    """A kernel a half each way; x again, what is a number a choice.

    By hand: beside such a layer dense products have collectives of their own, so a job is refused.
    """
    layout = sharding.layout(MeshSpec(expert=4, tensor=2).build(aot.devices(1)))
    mesh, S, width = layout.mesh, 128, 256
    moe, mlp = MoeConfig(experts=8, top_k=2), MlpConfig(width, 256, "swiglu", False, 0.02)

    def array(shape, spec, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.named(spec))

    with jax.set_mesh(mesh):
        with pytest.raises(UserError, match="expert 4 may hold SMs"):
            tensor.ops(layout, overlap="fused")
        fused = functools.partial(
            expert.expert, layout, tensor.whole, context=ContextSpec(), overlap="fused"
        )
        ops = dataclasses.replace(tensor.ops(layout), expert=fused)
        abstract = nnx.eval_shape(lambda: Moe(moe, mlp, layout, ops, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(abstract)
        params = jax.tree.map(
            lambda p: p.replace(array(p.shape, layout.stored(*p.get_metadata("axes")), p.dtype)),
            state,
            is_leaf=lambda p: isinstance(p, nnx.Variable),
        )
        spec = layout.act("batch", "seq", None, residual=True)
        x = array((4, S, width), spec, jnp.bfloat16)

        def loss(params, x):
            return (nnx.merge(graph, params)(x)[0].astype(jnp.float32) ** 2).sum()

        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(params, x)
    text = aot.compile(lowered, QUICK).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 4
    over = [c for c in collectives(text, dict(mesh.shape)) if c.axes == ("expert", "tensor")]
    large = [(c.kind, c.nbytes) for c in over if c.nbytes > 4 * S * 2 * 2 * 8]
    assert large == [("all-gather", 4 * S * width * 2)]
