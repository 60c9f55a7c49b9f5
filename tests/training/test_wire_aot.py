"""The compiled H100 program of a step with a wire: bytes, and what lies beside them."""

import dataclasses

import jax
import pytest

from megajax.cost.hlo import collectives
from megajax.models.decoder_config import PRESETS
from megajax.parallel import zero
from megajax.quant import codec
from megajax.systems.aot import QUICK
from megajax.training.step import make_train_step
from pallas_kernels import aot
from tests.parallel.test_zero_aot import float_collectives
from tests.tiny import MODEL, run_config

pytestmark = pytest.mark.aot

NODES, RANKS, LAYERS = 2, 4, 8
KINDS = "all-to-all", "all-gather"
DEEP = dataclasses.replace(
    MODEL, layers=LAYERS, width=512, heads=8, kv_heads=8, head_width=64, mlp=2048, vocab=128
)


def compiled(model, **changes):
    """Returns (the text of a step, its mesh, its parameters)."""
    cfg = run_config(
        mesh__node=NODES,
        mesh__data=RANKS,
        wire="sdp4bit",
        train__dtype="bfloat16",
        train__attention="xla",
        **changes,
    )
    cfg = dataclasses.replace(cfg, model=model)
    mesh = cfg.mesh.build(aot.devices(NODES, RANKS))
    step = make_train_step(cfg, mesh)
    lowered = step.step.lower(step.abstract_state, step.abstract_batch)
    return aot.compile(lowered, QUICK).as_text(), mesh, step.abstract_state.params


@pytest.mark.slow
def test_of_a_large_decoder_nearly_all_bytes_travel_beside_products():
    """GPT-2 XL, 1.5 billion parameters: what is bare is its table and the ends of the loops."""
    model = PRESETS["gpt2_xl"]()
    text, mesh, _ = compiled(
        model, train__seq_len=1024, train__global_batch=64, train__loss_chunks=8
    )
    sent = [c for c in collectives(text, dict(mesh.shape)) if c.kind in KINDS]
    assert sum(c.total for c in sent if c.is_hidden) > 0.9 * sum(c.total for c in sent)
    assert not float_collectives(text)


@pytest.mark.slow
def test_gradients_of_micro_batches_travel_beside_products():
    """Weights, 30 % of the bytes, come before the first micro-batch; no gradient travels as floats.
    Measured: 54 % of all bytes."""
    text, mesh, _ = compiled(DEEP, train__seq_len=256, train__global_batch=128, train__accumulate=4)
    sent = [c for c in collectives(text, dict(mesh.shape)) if c.kind in KINDS]
    assert sum(c.total for c in sent if c.is_hidden) > 0.5 * sum(c.total for c in sent)
    assert not float_collectives(text)


def test_most_bytes_travel_beside_products():
    text, mesh, params = compiled(DEEP, train__seq_len=256, train__global_batch=32)
    messages = [c for c in collectives(text, dict(mesh.shape)) if c.kind in KINDS]
    sent = sum(c.total for c in messages)
    assert (
        sum(c.total for c in messages if c.is_hidden) > 0.75 * sent
    )  # 8 layers, whose ends are bare
    assert not float_collectives(text)

    # By hand: one message a layer and one for the table, whose lengths divide.
    layer = sum(x.size for x in jax.tree.leaves(params["blocks"]) if x.ndim > 2) // LAYERS
    table = sum(
        x.size for k, v in params.items() if k != "blocks" for x in jax.tree.leaves(v) if x.ndim > 1
    )
    used = codec("sdp4bit")
    by_layer, once = (zero.wire_bytes(n, used, NODES, RANKS) for n in (layer, table))
    expected = {k: LAYERS * by_layer[k] + once[k] for k in once}
    for kind, axes, name in (
        ("all-gather", ("node", "data"), "weights"),
        ("all-to-all", ("data",), "inside"),
        ("all-to-all", ("node",), "between"),
    ):
        bytes_ = sum(c.total for c in messages if (c.kind, c.axes) == (kind, axes))
        assert bytes_ == pytest.approx(expected[name], rel=0.005), name
    floats = 2 * (LAYERS * layer + table) / RANKS  # a rank's share in bfloat16
    assert expected["between"] <= 0.27 * floats
