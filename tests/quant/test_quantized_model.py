"""Models of quantized matrices: the arithmetic of the dense model that they stand for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.packed import LayerRuns
from megajax.layers.attention import RopeConfig
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.quant import Format, dequantize, quantize, quantize_model
from megajax.quant.kernel import QuantKernel
from megajax.quant.quantized_model import matrices
from megajax.serving import Engine, SamplingParams
from megajax.systems.llm_pq.quality import calibrate, curvature

# All matrices have one shape, so that they share their compiled programs.
CFG = DecoderConfig(
    layers=3,
    width=64,
    heads=4,
    kv_heads=4,
    head_width=16,
    mlp=64,
    vocab=128,
    position="rope",
    rope=RopeConfig(),
)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
TOKENS = np.random.default_rng(0).integers(0, 128, (2, 24))


@functools.cache
def dense():
    """Returns (ModelParts, parameters) of a model whose numbers are not small."""
    parts = decoder.parts(CFG)
    params = jax.jit(parts.init)(jax.random.key(0))
    return parts, jax.tree.map(lambda w: w * 4 if w.ndim > 2 else w, params)


@functools.cache
def statistics():
    """Returns the calibration of `dense` on TOKENS."""
    return calibrate(dense()[1], CFG, [TOKENS[:1], TOKENS[1:]])


def logits(params):
    """Returns the logits of TOKENS."""
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), tokens.shape)
    return np.asarray(_logits(params, {"tokens": tokens, "positions": positions}))


@jax.jit
def _logits(params, batch):
    return dense()[0].logits(params, batch)


def decoded(params):
    """Returns the dense parameters that quantized ones stand for."""

    def leaf(k):
        if not isinstance(k, QuantKernel):
            return k

        def one(q, scale):
            w_KN = dequantize(q)
            return (w_KN if scale is None else w_KN / scale[:, None]).reshape(k.shape)

        stack = jax.tree.map(lambda x: x[:, 0], (k.weight, k.scale))
        return jax.vmap(one)(*stack)

    is_kernel = lambda x: isinstance(x, QuantKernel)  # noqa: E731
    blocks = params["blocks"]
    runs = blocks.stacks if isinstance(blocks, LayerRuns) else (blocks,)
    wide = [jax.tree.map(leaf, run, is_leaf=is_kernel) for run in runs]
    return params | {"blocks": jax.tree.map(lambda *x: jnp.concatenate(x), *wide)}


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_layers_of_unlike_bits(method):
    params = dense()[1]
    formats = [Format(8, 32), Format(4, 32, 0, symmetric=False), None]
    options = {} if method == "rtn" else {"calibration": statistics()}
    params_q = quantize_model(params, CFG, formats, method=method, **options)
    runs = params_q["blocks"]
    assert runs.starts == (0, 1, 2) and runs.layers == 3
    assert runs.of(1)["mlp"]["up"].weight.format.bits == 4
    outputs = logits(params_q)
    np.testing.assert_allclose(outputs, logits(decoded(params_q)), rtol=1e-4, atol=1e-4)
    assert np.abs(outputs - logits(params)).max() > 1e-3
    dense_layer = jax.tree.leaves(runs.stacks[2])
    last = jax.tree.map(lambda w: w[2:], params["blocks"])
    assert all((a == b).all() for a, b in zip(dense_layer, jax.tree.leaves(last), strict=True))


def test_equal_layers_stay_one_stack_and_are_small():
    params = dense()[1]
    params_q = quantize_model(params, CFG, Format(4, 32, scale_dtype="float16"))
    blocks = params_q["blocks"]
    assert not isinstance(blocks, LayerRuns)
    kernel = blocks["attention"]["out"]
    assert kernel.weight.values.shape == (3, 1, 32, 64) and kernel.shape == (4, 16, 64)
    assert kernel.weight.scales.shape == (3, 1, 2, 64)
    assert (blocks["attention_norm"]["scale"] == params["blocks"]["attention_norm"]["scale"]).all()


def test_calibration_is_what_the_products_read():
    """The sums of the first layer's attention inputs, of its norm, in NumPy; shared where equal."""
    params = dense()[1]
    calibration = statistics()
    assert sorted(calibration) == sorted(matrices(CFG.axes))
    x = np.asarray(params["tokens"], np.float64)[TOKENS].reshape(-1, 64)
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True) + CFG.norm_eps)
    norm = norm * np.asarray(params["blocks"]["attention_norm"]["scale"])[0]
    query = calibration["blocks.attention.query"]
    np.testing.assert_allclose(query.h_KK[0], norm.T @ norm, rtol=1e-4, atol=1e-3)
    assert query.count.tolist() == [48] * 3
    assert calibration["blocks.attention.value"].h_KK is query.h_KK
    assert calibration["blocks.mlp.down"].h_KK.shape == (3, 64, 64)
    # Of the last layer: by the model itself, with a weight that is watched there only.
    assert np.linalg.matrix_rank(calibration["blocks.mlp.up"].h_KK[2]) == 48


def test_gptq_and_awq_change_the_model_less_than_rounding():
    params = dense()[1]
    fmt = Format(3, 32)
    errors, right = {}, logits(params)
    for method in ("rtn", "gptq", "awq"):
        calibration = None if method == "rtn" else statistics()
        params_q = quantize_model(params, CFG, fmt, method=method, calibration=calibration)
        errors[method] = float(((logits(params_q) - right) ** 2).mean())
    assert errors["gptq"] < 0.7 * errors["rtn"] and errors["awq"] < errors["rtn"]


def test_an_engine_serves_runs_of_unlike_layers():
    """Greedy tokens are those of the dense model that the quantized one stands for."""
    params = quantize_model(dense()[1], CFG, [Format(4, 32), Format(8, 64), Format(8, 64)])
    answers = []
    for weights in (params, decoded(params)):
        engine = Engine(CFG, weights, pages=16, page_size=8, max_batch=2, dtype="float32")
        ids = [engine.submit(TOKENS[0, :n].tolist(), GREEDY) for n in (5, 9)]
        tokens = {i: [] for i in ids}
        for output in engine.run():
            tokens[output.request_id] += output.tokens
        answers.append(tokens)
    assert answers[0] == answers[1] and all(len(t) == 8 for t in answers[0].values())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"formats": [Format(4)] * 2}, "2 entries for 3 layers"),
        ({"formats": [Format(4), 4, None]}, r"formats\[1\]=4 must be"),
        ({"formats": None}, "formats=None must be a megajax.quant.Format, or a list"),
        ({"formats": "int4"}, "formats='int4' must be a megajax.quant.Format, or a list"),
        ({"method": "gtpq"}, "Did you mean gptq"),
        ({"method": "gptq"}, "blocks.attention.key in calibration"),
        ({"formats": Format(4, 32, 1)}, "blocks.*axis=1 of the format must be 0"),
    ],
)
def test_bad_input(change, words):
    arguments = {"formats": Format(4, 32)} | change
    with pytest.raises(UserError, match=words):
        quantize_model(dense()[1], CFG, **arguments)


def test_parameters_of_another_kind_are_refused():
    """Also those that are quantized already: they came back as they were, without a word."""
    params = dense()[1]
    once = quantize_model(params, CFG, Format(8, 32))
    for method in ("rtn", "gptq"):
        with pytest.raises(UserError, match="blocks.attention.key is a QuantKernel already"):
            quantize_model(once, CFG, Format(4, 32), method=method)
    with pytest.raises(UserError, match="the parameters are quantized; give the dense ones"):
        calibrate(once, CFG, [TOKENS[:1]])
    for other in ({}, None):
        with pytest.raises(UserError, match="they have no blocks.attention.key"):
            quantize_model(other, CFG, Format(4, 32))
    for layers in (2, 5):  # layers were dropped, or the last one was repeated
        cfg = dataclasses.replace(CFG, layers=layers)
        with pytest.raises(UserError, match=f"has 3 layers, the configuration {layers}"):
            quantize_model(params, cfg, Format(4, 32))
        with pytest.raises(UserError, match=r"calibration: blocks\.\S+ has the shape \[3, "):
            calibrate(params, cfg, [TOKENS[:1]])
    for cfg, kind in ((params, "dict"), (EncoderConfig(), "EncoderConfig")):
        with pytest.raises(UserError, match=f"must be a decoder's configuration, got a {kind}"):
            quantize_model(params, cfg, Format(4, 32))


def test_a_calibration_of_other_layers_is_refused():
    """JAX's arrays gave their last layer for each layer that they lack."""
    params, full = dense()[1], statistics()
    two = {n: jax.tree.map(lambda x: jnp.asarray(x[:2]), s) for n, s in full.items()}
    one = {n: jax.tree.map(lambda x: jnp.asarray(x[0]), s) for n, s in full.items()}
    for method in ("gptq", "awq"):
        for calibration, shape in ((two, r"\(2, 64\)"), (one, r"\(64,\)")):
            words = f"blocks.attention.key must be stacked over the model's 3 layers; .* {shape}"
            with pytest.raises(UserError, match=words):
                quantize_model(params, CFG, Format(4, 32), method=method, calibration=calibration)
    inputs = {n: np.ones((3, 64), np.float32) for n in full}
    with pytest.raises(UserError, match="must be a megajax.quant.Statistics, .* got a ndarray"):
        quantize_model(params, CFG, Format(4, 32), method="gptq", calibration=inputs)


def test_one_format_in_two_spellings_is_one_stack():
    quantized = quantize_model(
        dense()[1], CFG, [Format(4, 32), Format(4, 32, 0), Format(4, 32, -2)]
    )
    assert not isinstance(quantized["blocks"], LayerRuns)


def test_what_are_no_token_ids_is_refused():
    """Of a matrix of ids each row was a batch, and ids beyond the vocabulary became others."""
    for batches, words in (
        (TOKENS, r"must be token ids, integers \(rows, tokens\), got int64\(24,\); give a list"),
        ([TOKENS / 2], r"got float64\(2, 24\)"),
        ([TOKENS + 5], "token ids must be from 0 to 127, the model's"),
        ([TOKENS - 128], "token ids must be from 0 to 127, the model's"),
    ):
        with pytest.raises(UserError, match=words):
            calibrate(dense()[1], CFG, batches)
        with pytest.raises(UserError, match=words):
            curvature(dense()[1], CFG, batches)


def test_experts_are_refused():
    moe = dataclasses.replace(CFG.moe, experts=4, width=32)
    cfg = dataclasses.replace(CFG, moe=moe)
    with pytest.raises(UserError, match="experts are multiplied by grouped products"):
        quantize_model({}, cfg, Format(4, 32))


def test_inputs_of_16_bits_are_divided_by_the_whole_scale():
    """A scale that is rounded to the inputs' 8 bits would double the rounding error."""
    rng = np.random.default_rng(3)
    scale = rng.uniform(0.5, 2, 64).astype(np.float32)
    one = quantize(jnp.eye(64), Format(8, group=64, axis=0))
    x = jnp.asarray(rng.standard_normal((32, 64)), jnp.bfloat16)
    y = np.asarray(QuantKernel((64, 64), one, jnp.asarray(scale)).matmul(x), np.float64)
    exact = np.asarray(x, np.float64) / scale
    assert np.abs(y / exact - 1).max() < 2**-8 * 1.01
