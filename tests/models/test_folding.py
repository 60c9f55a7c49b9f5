"""AWQ's scales of inputs put into norms and products: the same logits, and a file that has them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.tree import name
from megajax.foreign import hf_quantized
from megajax.layers.attention import RopeConfig
from megajax.models import decoder, folding
from megajax.models.decoder_config import DecoderConfig
from megajax.quant import Format, dequantize, quantize_model
from megajax.quant.kernel import QuantKernel
from megajax.systems.llm_pq.quality import calibrate

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24))
LLAMA = DecoderConfig(
    layers=2,
    width=64,
    heads=2,
    kv_heads=2,
    head_width=32,
    mlp=96,
    vocab=96,
    position="rope",
    rope=RopeConfig(),
    bias="qkv",
)
GPT2 = dataclasses.replace(
    LLAMA,
    position="learned",
    norm="layer",
    activation="gelu_tanh",
    bias="all",
    tied=True,
    max_positions=32,
)
FEW_HEADS = dataclasses.replace(LLAMA, kv_heads=1, bias="none")
FORMAT = Format(4, 32, 0)


def dense(cfg):
    """Returns parameters with biases and gains that are not trivial, and inputs of unlike sizes."""
    params = jax.jit(decoder.parts(cfg).init)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 64))

    def noisy(path, w):
        if w.ndim > 2 and "bias" not in name(path):
            return w * 3
        return w + 0.5 * jax.random.normal(next(keys), w.shape, w.dtype)

    params = jax.tree_util.tree_map_with_path(noisy, params)
    gain_LD = params["blocks"]["attention_norm"]["scale"]
    channels_D = jnp.exp(2 * jax.random.normal(jax.random.key(2), gain_LD.shape[1:]))
    params["blocks"]["attention_norm"]["scale"] = gain_LD * channels_D[None]
    return params


def logits(params, cfg):
    """Returns the logits of TOKENS."""
    tokens = jnp.asarray(TOKENS, jnp.int32)
    places = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), tokens.shape)
    parts = decoder.parts(cfg, dtype="float32")
    return np.asarray(parts.logits(params, {"tokens": tokens, "positions": places}))


def quantized(cfg, fmt, params):
    """Returns parameters by AWQ with scales that can be folded."""
    statistics = calibrate(params, cfg, [TOKENS])
    options = {"method": "awq", "calibration": statistics, "sources": folding.sources(cfg)}
    return quantize_model(params, cfg, fmt, **options)


@pytest.mark.parametrize(
    ("cfg", "fmt"),
    [(LLAMA, dataclasses.replace(FORMAT, symmetric=False)), (FEW_HEADS, FORMAT), (GPT2, FORMAT)],
    ids=["llama", "few heads", "gpt2"],
)
def test_folding_keeps_the_logits(cfg, fmt):
    params = quantized(cfg, fmt, dense(cfg))
    blocks, expected = params["blocks"], logits(params, cfg)
    scales = {n: blocks["attention"][n].scale for n in ("query", "key", "value")}
    assert all((scale == scales["query"]).all() for scale in scales.values())
    assert float(jnp.ptp(scales["query"])) > 0.1  # there is something to fold
    assert (blocks["attention"]["out"].scale is None) == (cfg is FEW_HEADS)
    assert (blocks["mlp"]["down"].scale is None) == (cfg is GPT2)
    folded = folding.fold(params, cfg)
    kernels = [*folded["blocks"]["attention"].values(), *folded["blocks"]["mlp"].values()]
    assert all(getattr(kernel, "scale", None) is None for kernel in kernels)
    spread = expected[..., : cfg.vocab].std()
    np.testing.assert_allclose(logits(folded, cfg), expected, rtol=0, atol=2e-4 * spread)
    assert blocks["attention"]["query"].scale is not None  # what was given stays as it is


def test_shared_scales_lose_no_more_than_rounding_to_nearest():
    """Over the matrices that share them, weighed by the calibration: an exponent of 0 is tried."""
    params = dense(LLAMA)
    statistics = calibrate(params, LLAMA, [TOKENS])
    ours = quantized(LLAMA, Format(3, 32, 0), params)["blocks"]["attention"]
    plain = quantize_model(params, LLAMA, Format(3, 32, 0))["blocks"]["attention"]
    lost = {"ours": 0.0, "plain": 0.0}
    for n in ("query", "key", "value"):
        w_KN = params["blocks"]["attention"][n][1].reshape(64, -1)
        h_KK = np.asarray(statistics[f"blocks.attention.{n}"].h_KK[1], np.float64)
        for who, kernel in (("ours", ours[n]), ("plain", plain[n])):
            one = jax.tree.map(lambda x: x[1, 0], kernel)
            scale_K1 = 1.0 if one.scale is None else np.asarray(one.scale)[:, None]
            change_KN = np.asarray(dequantize(one.weight)) / scale_K1 - np.asarray(w_KN)
            lost[who] += float(np.einsum("kn,kj,jn->", change_KN, h_KK, change_KN))
    assert lost["ours"] < 0.9 * lost["plain"]


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_folder_has_what_was_folded(form, tmp_path):
    """What is dense in float16, codes and scales as they were folded."""
    fmt = dataclasses.replace(FORMAT, scale_dtype="float16")
    params = quantized(LLAMA, [fmt, fmt], dense(LLAMA))
    with pytest.raises(UserError, match="q_proj has scales of its inputs .* fold them"):
        hf_quantized.save(params, LLAMA, tmp_path / "m", form=form)
    folded = folding.fold(params, LLAMA)
    hf_quantized.save(folded, LLAMA, tmp_path / "m", form=form)
    cfg, again = hf_quantized.load(tmp_path / "m")

    def rounded(w):
        is_dense = not isinstance(w, QuantKernel)
        return w.astype(jnp.float16).astype(jnp.float32) if is_dense else w

    in_bfloat16 = jax.tree.map(rounded, folded, is_leaf=lambda w: isinstance(w, QuantKernel))
    np.testing.assert_allclose(logits(again, cfg), logits(in_bfloat16, LLAMA), rtol=0, atol=1e-4)


def test_layers_that_stay_dense_are_left_alone():
    params = dense(LLAMA)
    model = quantized(LLAMA, [None, FORMAT], params)
    folded = folding.fold(model, LLAMA)
    first = folded["blocks"].of(0)
    for a, b in zip(
        jax.tree.leaves(first),
        jax.tree.leaves(jax.tree.map(lambda x: x[0], params["blocks"])),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(logits(folded, LLAMA), logits(model, LLAMA), rtol=0, atol=1e-3)


def test_matrices_behind_one_norm_must_share_their_scales():
    params = dense(LLAMA)
    quantized_model = quantize_model(
        params, LLAMA, FORMAT, method="awq", calibration=calibrate(params, LLAMA, [TOKENS])
    )
    with pytest.raises(UserError, match="unlike scales of inputs; quantize with sources="):
        folding.fold(quantized_model, LLAMA)


@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_a_source_of_what_is_no_matrix_is_named(method):
    params = dense(LLAMA)
    sources = folding.sources(LLAMA) | {"blocks.mlp.upp": None}
    statistics = calibrate(params, LLAMA, [TOKENS])
    with pytest.raises(UserError, match=r"'blocks.mlp.upp' is no matrix .* mean blocks.mlp.up\?"):
        quantize_model(
            params, LLAMA, FORMAT, method=method, calibration=statistics, sources=sources
        )


def test_scales_that_are_not_finite_are_not_written(tmp_path):
    params = quantize_model(dense(LLAMA), LLAMA, dataclasses.replace(FORMAT, scale_dtype="float16"))
    kernel = params["blocks"]["mlp"]["up"]
    scales = kernel.weight.scales.at[0, 0, 0, 0].set(jnp.inf)
    weight = dataclasses.replace(kernel.weight, scales=scales)
    params["blocks"]["mlp"]["up"] = dataclasses.replace(kernel, weight=weight)
    with pytest.raises(UserError, match="layers.0.mlp.up_proj: its scales are not finite"):
        hf_quantized.save(params, LLAMA, tmp_path / "m")
    assert not (tmp_path / "m").exists()
