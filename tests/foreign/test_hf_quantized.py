"""GPTQ's and AWQ's files: bits against a plain packing loop, folders both ways, and folders that
GPTQModel wrote (tests/golden/make_quantized.py)."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.foreign import hf, hf_quantized
from megajax.foreign.hf_quantized import PARTS
from megajax.foreign.safetensors import TensorFolder, write_folder
from megajax.layers.attention import RopeConfig
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.quant import Format, dequantize, quantize_model
from megajax.quant.kernel import QuantKernel

FOREIGN = Path(__file__).parents[1] / "golden" / "quantized"
CASES = ("gptq4_order", "gptq3_v2", "gptq8_column", "awq4")
CFG = DecoderConfig(
    layers=2,
    width=64,
    heads=2,
    kv_heads=2,
    head_width=32,
    mlp=96,
    vocab=128,
    position="rope",
    rope=RopeConfig(),
)


def plain_words(codes_KN, bits):
    """AutoGPTQ's loops: a column's codes, low bits first, in words of 32 bits."""
    K, N = codes_KN.shape
    out = np.zeros((K * bits // 32, N), np.uint64)
    for k in range(K):
        for b in range(bits):
            place = k * bits + b
            out[place // 32] |= ((codes_KN[k].astype(np.uint64) >> b) & 1) << (place % 32)
    return out.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing(bits):
    codes_KN = np.random.default_rng(bits).integers(0, 2**bits, (96, 32))
    words = plain_words(codes_KN, bits)
    np.testing.assert_array_equal(
        hf_quantized.pack(np.ascontiguousarray(codes_KN.T), bits).T, words
    )
    np.testing.assert_array_equal(
        hf_quantized.unpack(np.ascontiguousarray(words.T), bits, 96).T, codes_KN
    )
    np.testing.assert_array_equal(
        hf_quantized.rows_of_bytes(hf_quantized.bytes_of_rows(words)), words
    )


def test_packing_of_awq():
    codes = np.random.default_rng(0).integers(0, 16, (5, 16)).astype(np.uint8)
    words = np.zeros((5, 2), np.uint32)
    for column in range(2):  # AutoAWQ's loop
        for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, column] |= codes[:, 8 * column + place].astype(np.uint32) << (4 * i)
    np.testing.assert_array_equal(hf_quantized.pack_awq(codes), words.view(np.int32))
    np.testing.assert_array_equal(hf_quantized.unpack_awq(words.view(np.int32)), codes)


def quantized(bits, group=32, **more):
    """Returns parameters in a format."""
    params = jax.jit(decoder.parts(CFG).init)(jax.random.key(0))
    # What float16 holds, as an export in float16 keeps it.
    params = jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), params)
    return quantize_model(params, CFG, Format(bits, group, 0, scale_dtype="float16", **more))


def logits(params):
    """Returns the logits of some tokens."""
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    return decoder.parts(CFG).logits(params, {"tokens": tokens, "positions": tokens})


@pytest.mark.parametrize("bits", [3, 8])
def test_folders_both_ways(bits, tmp_path):
    params = quantized(bits)
    hf_quantized.save(params, CFG, tmp_path / "one")
    cfg, loaded = hf_quantized.load(tmp_path / "one")
    assert (cfg.layers, cfg.width) == (2, 64)
    np.testing.assert_array_equal(logits(loaded), logits(params))
    hf_quantized.save(loaded, cfg, tmp_path / "two")
    first, second = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two"))
    assert first == second


def test_a_linear_of_gptq_is_its_formula(tmp_path):
    """Of either form of its zero points."""
    hf_quantized.save(quantized(4), CFG, tmp_path / "v2")
    files = TensorFolder(tmp_path / "v2")
    stem = "model.layers.1.mlp.down_proj"
    part = {end: np.asarray(files.view(f"{stem}.{end}")) for end in ("qweight", "qzeros", "scales")}
    code = np.zeros((96, 64))
    for k in range(96):
        code[k] = (part["qweight"][k // 8].view(np.uint32) >> (4 * (k % 8))) & 15
    w = part["scales"].astype(np.float64).repeat(32, 0) * (code - 8)
    weight = hf_quantized.load(tmp_path / "v2")[1]["blocks"]["mlp"]["down"].weight
    layer = jax.tree.map(lambda x: x[1, 0], weight)
    np.testing.assert_allclose(np.asarray(dequantize(layer)), w, rtol=1e-6)

    members = json.loads((tmp_path / "v2" / "config.json").read_text())
    members["quantization_config"]["checkpoint_format"] = "gptq"
    tensors = {n: np.asarray(files.view(n)) for n in files.names()}
    for n in tensors:
        if n.endswith(".qzeros"):
            tensors[n] = tensors[n] - np.int32(0x11111111)
    (tmp_path / "v1").mkdir()
    kinds = {np.dtype(np.float16): "F16", np.dtype(np.int32): "I32"}
    write_folder(
        tmp_path / "v1",
        {n: (x.shape, kinds[x.dtype]) for n, x in tensors.items()},
        tensors.__getitem__,
    )
    (tmp_path / "v1" / "config.json").write_text(json.dumps(members))
    older = hf_quantized.load(tmp_path / "v1")[1]["blocks"]["mlp"]["down"].weight
    for a, b in zip(jax.tree.leaves(weight), jax.tree.leaves(older), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("value", [0, 1])
def test_a_bias_that_the_family_has_none_of(value, tmp_path):
    """Zeros, which some writers give every Linear, are nothing; other numbers are not dropped."""
    hf_quantized.save(quantized(4), CFG, tmp_path / "m")
    files = TensorFolder(tmp_path / "m")
    tensors = {n: np.array(files.view(n)) for n in files.names()}
    name = "model.layers.1.mlp.down_proj.bias"
    tensors[name] = np.full(64, value, np.float16)
    (tmp_path / "b").mkdir()
    kinds = {np.dtype(np.float16): "F16", np.dtype(np.int32): "I32"}
    described = {n: (x.shape, kinds[x.dtype]) for n, x in tensors.items()}
    write_folder(tmp_path / "b", described, tensors.__getitem__)
    (tmp_path / "b" / "config.json").write_text((tmp_path / "m" / "config.json").read_text())
    if value:
        with pytest.raises(UserError, match="does not know.*down_proj.bias"):
            hf_quantized.load(tmp_path / "b")
    else:
        hf_quantized.load(tmp_path / "b")


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_another_program_has_its_logits(case):
    """Of GPTQModel's own dequantization; the dense model's logits are 0.1 to 2.2 away."""
    cfg, params = hf_quantized.load(FOREIGN / case)
    kernel = params["blocks"]["mlp"]["down"]
    assert isinstance(kernel, QuantKernel) and (kernel.order is not None) == ("order" in case)
    with np.load(FOREIGN / case / "expected.npz") as file:
        frozen = dict(file)
    tokens = jnp.asarray(frozen["tokens"], jnp.int32)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    parts = decoder.parts(cfg, dtype="float32")
    out = parts.logits(params, {"tokens": tokens, "positions": places})[..., : cfg.vocab]
    np.testing.assert_allclose(out, frozen["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES[:2])
def test_export_gives_another_programs_tensors(case, tmp_path):
    """Codes, scales, zero points and the groups of rows bit for bit, in the version they came in;
    the zero points of the older version are less by 1."""
    cfg, params = hf_quantized.load(FOREIGN / case)
    is_first = "v2" not in case
    hf_quantized.save(params, cfg, tmp_path / "ours", form="gptq_v1" if is_first else "gptq")
    theirs, ours = TensorFolder(FOREIGN / case), TensorFolder(tmp_path / "ours")
    compared = [n for n in theirs.names() if n.endswith(PARTS)]
    assert len(compared) == 2 * 7 * 4
    for n in compared:
        np.testing.assert_array_equal(ours.view(n), theirs.view(n), err_msg=n)
    again = hf_quantized.load(tmp_path / "ours")[1]["blocks"]
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params["blocks"]), strict=True):
        np.testing.assert_array_equal(a, b)
    members = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    assert members["desc_act"] == (case == "gptq4_order")
    assert members["checkpoint_format"] == ("gptq" if is_first else "gptq_v2")


def test_groups_of_unlike_sizes(tmp_path):
    shutil.copytree(FOREIGN / "gptq4_order", tmp_path / "m")
    files = TensorFolder(tmp_path / "m")
    tensors = {n: np.array(files.view(n)) for n in files.names()}
    kinds = {"float16": "F16", "int32": "I32", "bfloat16": "BF16"}
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name][np.argmax(tensors[name] == 0)] = 1
    (tmp_path / "m" / "model.safetensors").unlink()
    described = {n: (x.shape, kinds[x.dtype.name]) for n, x in tensors.items()}
    write_folder(tmp_path / "m", described, tensors.__getitem__)
    with pytest.raises(UserError, match="down_proj.g_idx must have 32 rows in each of the groups"):
        hf_quantized.load(tmp_path / "m")


def change(folder, **members):
    """Writes members into a folder's quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= members
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "members, words",
    [
        (
            {"quant_method": "bitsandbytes"},
            r"not supported; gptq .* and awq \(4 bits, version gemm\)",
        ),
        ({"bits": 5}, "bits=5 of gptq must be one of"),
        ({"group_size": 0}, "group_size=0 must be at least 1"),
        ({"group_size": 2**64}, "group_size=18446744073709551616 must be at most 2,147,483,647"),
        ({"dynamic": {".*": {"group_size": 2**63}}}, "dynamic .*group_size=9223372036854775808"),
        ({"checkpoint_format": "marlin"}, "must be gptq or gptq_v2"),
        (
            {"group_size": 16},
            "g_idx must have 16 rows in each of the groups 0 to 3, .* groups 0 to 1",
        ),
    ],
)
def test_bad_settings(members, words, tmp_path):
    hf_quantized.save(quantized(4), CFG, tmp_path / "m")
    change(tmp_path / "m", **members)
    with pytest.raises(UserError, match=words):
        hf_quantized.load(tmp_path / "m")


def test_what_the_form_cannot_hold(tmp_path):
    with pytest.raises(UserError, match="scale_dtype='float16'"):
        params = quantized(4)
        dense = jax.jit(decoder.parts(CFG).init)(jax.random.key(0))
        hf_quantized.save(quantize_model(dense, CFG, Format(4, 32)), CFG, tmp_path / "a")
    with pytest.raises(UserError, match="no whole number of scales"):
        hf_quantized.save(quantized(4, symmetric=False), CFG, tmp_path / "b")
    with pytest.raises(UserError, match="has no quantization_config"):
        hf.save(dense, CFG, tmp_path / "c")
        hf_quantized.load(tmp_path / "c")
    with pytest.raises(UserError, match="no matrix is quantized; hf.save"):
        hf_quantized.save(dense, CFG, tmp_path / "d")
    assert params is not None and not any((tmp_path / n).exists() for n in "abd")


def test_an_older_folder_of_autogptq_has_its_settings_in_a_file(tmp_path):
    """quantize_config.json, without quant_method; config.json says nothing."""
    hf_quantized.save(quantized(4), CFG, tmp_path, form="gptq_v1")
    expected = logits(hf_quantized.load(tmp_path)[1])
    config = json.loads((tmp_path / "config.json").read_text())
    older = {n: config["quantization_config"][n] for n in ("bits", "group_size", "desc_act", "sym")}
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hf_quantized.settings(tmp_path) is None
    (tmp_path / "quantize_config.json").write_text(json.dumps(older))
    np.testing.assert_array_equal(logits(hf_quantized.load(tmp_path)[1]), expected)
