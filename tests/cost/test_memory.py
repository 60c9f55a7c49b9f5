"""Terms of memory by hand; against XLA's own figure they stand in tests/systems/test_aot.py."""

import dataclasses

from megajax.cost.memory import bound, misfit, terms
from megajax.cost.step import Pipeline, StepShape
from megajax.layers.moe import MoeConfig
from megajax.models.decoder_config import DecoderConfig

# 4 layers, D 8, 2 heads of 4, F 32, V 64, tied: a layer has 4 x 64 + 2 x 256 = 768 parameters.
CFG = DecoderConfig(
    layers=4, width=8, heads=2, kv_heads=2, head_width=4, mlp=32, vocab=64, activation="gelu_tanh"
)
SIZES = {"pipe": 1, "node": 1, "data": 2, "expert": 1, "context": 1, "tensor": 2}
STEP = StepShape(CFG.workload(4, 16), SIZES, ("data",), remat="full")


def loaded(rows=4, **changes):
    return dataclasses.replace(CFG, **changes).workload(rows, 16)


def test_state_is_cut_over_data_and_tensor():
    sizes = terms(STEP)
    params = 4 * 768 + 64 * 8
    assert sizes["parameters"] == 4 * params / 4
    assert sizes["optimizer"] == 2 * sizes["parameters"]
    assert sizes["gradients"] == sizes["parameters"]
    unsharded = terms(dataclasses.replace(STEP, zero_axes=(), local_gradients=True))
    assert unsharded["parameters"] == unsharded["gradients"] == 4 * params / 2


def test_what_the_backward_pass_keeps():
    """2 rows of 16 tokens a device, width 8, 2 bytes, the stream cut over tensor 2."""
    stream = 2 * 16 * 8 * 2 / 2
    assert terms(STEP)["stash"] == 4 * stream
    # outputs: the attention's result in its heads, and what it added to the stream.
    outputs = terms(dataclasses.replace(STEP, remat="outputs"))["stash"]
    assert outputs == 4 * (stream + stream + 2 * 16 * 8 * 2 / 2)
    parallel = dataclasses.replace(STEP, load=loaded(block="parallel"), remat="outputs")
    assert terms(parallel)["stash"] == 4 * 2 * stream
    order = [
        terms(dataclasses.replace(STEP, remat=r))["stash"] for r in ("full", "outputs", "none")
    ]
    assert order == sorted(order) and len(set(order)) == 3


def test_logits_are_cut_into_chunks():
    one, four = (terms(dataclasses.replace(STEP, loss_chunks=n))["logits"] for n in (1, 4))
    assert one == 2 * 4 * 32 * 64 / 2 and four == one / 4


def test_a_fused_attention_has_no_logits_of_queries_by_keys():
    plain, fused = (
        terms(dataclasses.replace(STEP, fused_attention=f))["activations"] for f in (False, True)
    )
    # The softmax in float32, the same in bfloat16 and a gradient, of rows x heads of this device x
    # S x S. A stash without rematerialisation has the first two, of 4 layers.
    assert plain - fused == (4 + 2 + 2) * 2 * 1 * 16 * 16
    none = dataclasses.replace(STEP, remat="none")
    stashed, bare = (dataclasses.replace(none, fused_attention=f) for f in (False, True))
    assert terms(stashed)["activations"] - terms(bare)["activations"] == 2 * 2 * 16 * 16
    assert terms(stashed)["stash"] - terms(bare)["stash"] == 4 * (4 + 2) * 2 * 16 * 16
    # Half of the queries, and all keys or, in a ring, those of one device at a time.
    ring = dataclasses.replace(STEP, sizes=SIZES | {"context": 2})
    other = dataclasses.replace(ring, context="gather")
    assert terms(other)["activations"] - terms(ring)["activations"] == 8 * 2 * 1 * 8 * (16 - 8)


def test_a_pipelines_stash_is_flat_in_the_microbatches():
    def stash(microbatches):
        sizes = SIZES | {"pipe": 2}
        step = dataclasses.replace(
            STEP, sizes=sizes, load=loaded(2 * microbatches), pipeline=Pipeline(2, microbatches)
        )
        return terms(step)["stash"]

    assert stash(64) == stash(16) > 0


def test_stashed_residuals_lie_in_every_place():
    """1F1B on 2 stages keeps 3 inputs, and there is one place more; residuals for 2 layers each."""
    sizes = SIZES | {"pipe": 2}
    stream = 1 * 16 * 8 * 2 / 2  # 16 rows over data 2 and 8 micro-batches

    def stash(kind):
        pipeline = Pipeline(2, 8, 1, "1f1b", kind)
        step = dataclasses.replace(STEP, sizes=sizes, load=loaded(16), pipeline=pipeline)
        return terms(step)["stash"]

    assert stash("input") == 4 * stream + 2 * stream
    assert stash("residuals") == 4 * stream + 4 * 2 * stream


def test_a_chunk_on_its_way_is_apart_from_the_sums_of_all():
    """Gradients of 2 layers in 2 chunks: all sums, and a copy of one chunk's that is being sent. Of
    4 chunks two have arrived by then, each a half over data 2."""
    sizes = SIZES | {"pipe": 2}

    def gradients(chunks, hides=True, layers=4):
        pipeline = Pipeline(2, 4, chunks, "interleaved", "input", hides)
        load = dataclasses.replace(CFG, layers=layers).workload(8, 16)
        step = dataclasses.replace(STEP, load=load, sizes=sizes, pipeline=pipeline)
        return terms(dataclasses.replace(step, local_gradients=True))["gradients"] / 4

    table, layer = 64 * 8 / 2 / 2, 768 / 2
    once = 2 * layer + table
    assert gradients(1) == gradients(2, hides=False) == once
    assert gradients(2) == once + once / 2
    assert gradients(4, layers=8) == (4 * layer + table) * (1 + 1 / 4 + (1 - 2 / 4) / 2)


def test_experts_rest_on_their_axis_and_are_cut_over_the_others():
    """8 experts of width 16, gated: 3 x 8 x 16 each; of a layer 4 x 64 + 64 are everyone's."""
    dense, one = 4 * (4 * 64 + 64), 4 * 3 * 8 * 16
    load = loaded(moe=MoeConfig(experts=8, top_k=2, width=16), activation="swiglu")
    sizes = SIZES | {"data": 4, "expert": 2}
    step = dataclasses.replace(STEP, load=load, sizes=sizes, zero_axes=("data", "expert"))
    bytes_by_term = terms(step)
    # Tensor 2 cuts all; ZeRO cuts everyone's over data and expert, an expert over data.
    assert bytes_by_term["parameters"] == 4 * ((dense + 64 * 8) / 8 + 8 * one / 2 / 4) / 2
    assert bytes_by_term["optimizer"] == 2 * bytes_by_term["parameters"]
    copied = terms(dataclasses.replace(step, zero_axes=()))
    assert copied["parameters"] == 4 * (dense + 64 * 8 + 8 * one / 2) / 2
    # Dropless: both devices' tokens may use 2 of 4 experts here. In and out 8 wide, 3 x 16 inside
    # cut over tensor, and the answers' gradient; half a row of 16 tokens a device.
    assert bytes_by_term["activations"] == 2 * (8 * 2 * 2) * (3 * 8 + 3 * 16 / 2)


def test_the_term_that_does_not_fit_is_named():
    sizes = terms(dataclasses.replace(STEP, load=loaded(4096)))
    assert misfit(sizes, 1e9) is None
    assert misfit(sizes, 1e3) == max(sizes, key=sizes.get)
    assert bound(sizes) < sum(sizes.values())


def test_a_key_value_head_that_ranks_share_is_stored_by_all_and_used_once():
    """One head of 4 on tensor 4: keys and values are 2 x 8 x 4 of a layer's 832 parameters."""
    shared, others = 4 * 64, 4 * 768
    load = loaded(heads=4, kv_heads=1)
    step = dataclasses.replace(STEP, load=load, sizes=SIZES | {"tensor": 4}, remat="dots")
    sizes = terms(step)
    assert sizes["parameters"] == 4 * (shared + (others + 64 * 8) / 4) / 2
    assert sizes["gradients"] == sizes["parameters"]
    # A rank's products into the block: 4 of q, a whole head of k and of v, 32 / 4 of the MLP; and
    # its head of attention's result.
    stream, inputs, attended = 32 * 8 * 2 / 4, 32 * 2 * (4 + 4 + 4 + 8), 32 * 2 * 4
    assert sizes["stash"] == 4 * (2 * stream + inputs + attended)
    # In use: a layer's whole heads of keys and values, a quarter of all else, and of the table.
    assert sizes["weights in use"] == 2 * (64 + (768 + 64 * 8) / 4)
    staged = dataclasses.replace(
        step, sizes=step.sizes | {"pipe": 2}, pipeline=Pipeline(2, 4), local_gradients=True
    )
    assert terms(staged)["gradients"] == 4 * (shared + (others + 64 * 8) / 4) / 2
    two = dataclasses.replace(step, load=loaded(heads=4, kv_heads=2), fused_attention=True)
    assert (two.kv_copies, two.used.kv_width) == (2, 16)
    assert dataclasses.replace(two, sizes=SIZES).used == two.load  # a head a rank: no copies
