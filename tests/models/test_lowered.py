"""What a decoder's gradient is lowered to for a GPU: how often attention runs, and in which types.

Nothing is compiled and no GPU is needed: the StableHLO is read.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from megajax.layers.attention import attend
from megajax.layers.ops import Ops
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from pallas_kernels.attention import library, reference
from tests.stablehlo import executions

S, V = 320, 640  # longer than a block of the reference; no other dimension
CFG = DecoderConfig(layers=2, width=64, heads=2, kv_heads=2, head_width=32, vocab=V)


@functools.cache
def lowered(remat, attention="cudnn", platform="cuda", packed=True):
    """The gradient of the loss of packed rows, or of rows of one segment."""
    ops = dataclasses.replace(Ops(), attend=functools.partial(attend, implementation=attention))
    parts = decoder.parts(CFG, ops=ops, dtype="bfloat16", loss_chunks=2)
    names = ("tokens", "targets", "positions") + ("segments",) * packed
    batch = {name: jax.ShapeDtypeStruct((2, S), jnp.int32) for name in names}

    def loss(params, batch):
        batch = {"segments": None} | batch
        return parts.loss(params, batch, None, remat).cross_entropy

    traced = jax.jit(jax.grad(loss)).trace(parts.abstract, batch)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("remat", "passes"), [("outputs", 1), ("dots", 1), ("full", 2)])
def test_cudnn_runs_forward_once_where_its_result_is_kept(remat, passes):
    """The layers are one scan, so its body has one call a pass."""
    text = lowered(remat)
    assert executions(text, "@__cudnn$fmhaSoftmax(") == passes
    assert executions(text, "@__cudnn$fmhaSoftmaxBackward(") == 1


def test_slots_of_a_training_batch_are_bounded(monkeypatch):
    """cuDNN's log-sum-exps, (slots, heads, S) float32, fit the limit that `library` sets."""
    slots = lambda text: set(re.findall(rf"tensor<(\d+)x2x{S}xf32>", text))  # noqa: E731
    assert "16" in slots(lowered("outputs"))  # 2 rows of 8
    lowered.cache_clear()
    monkeypatch.setattr(library, "STATS_BYTES", 7 * 2 * S * 4)
    few = slots(lowered("outputs"))
    lowered.cache_clear()
    assert "6" in few and "16" not in few


@pytest.mark.parametrize(("remat", "times"), [("outputs", 1), ("dots", 1), ("full", 2)])
def test_slots_are_worked_out_once_for_all_layers(remat, times, monkeypatch):
    """Before the layers' loop; of both passes where the policy keeps names. Nothing is stacked."""
    inner = library._slots_of_ids
    mark = jax.lax.population_count  # an operation that can be counted in the program
    monkeypatch.setattr(
        library, "_slots_of_ids", lambda ids, segments: inner(ids + 0 * mark(ids), segments)
    )
    lowered.cache_clear()
    text = lowered(remat)
    lowered.cache_clear()
    assert executions(text, "stablehlo.popcnt") == times
    assert f"<2x{S}xi32>" in text and f"<2x2x{S}xi32>" not in text  # 2 layers, 2 rows


@pytest.mark.parametrize(("remat", "passes"), [("outputs", 1), ("dots", 1), ("full", 2)])
def test_our_kernel_runs_forward_once_where_its_result_is_kept(remat, passes, monkeypatch):
    lowered.cache_clear()
    inner = reference.forward

    mark = 2.0**-100  # a constant that can be counted in the program
    monkeypatch.setattr(
        reference, "forward", lambda q, *args, spec: inner(q + mark, *args, spec=spec)
    )
    text = lowered(remat, "varlen", "cpu")
    lowered.cache_clear()
    assert executions(text, "dense<7.8886") == passes


def test_no_array_of_all_pairs():
    """Packed rows have no mask or bias of (S, S), one segment a row neither, in either branch."""
    for packed in (True, False):
        text = lowered("outputs", packed=packed)
        mask = "PADDING_CAUSAL" if packed else "CAUSAL"
        assert f"{S}x{S}" not in text and f'"mask_type": "{mask}"' in text.replace("\\22", '"')


def test_products_of_the_head_are_16_bit():
    """Logits, and the gradients of hidden values and table: bf16 operands, also backward."""
    dots = re.findall(r"dot_general .*?: \((.*?)\) -> (\S+)", lowered("dots"))
    head = [(operands, out) for operands, out in dots if str(V) in operands + out]
    assert len(head) == 3  # logits (one function, called in both passes) and two gradients
    assert not [d for d in head if "f32" in d[0]]
    assert sum("f32" in out for _, out in head) == 1
