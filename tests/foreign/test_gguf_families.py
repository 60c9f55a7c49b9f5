"""GGUF files of Gemma 3, OLMo 2, SmolLM3 and Phi-3, written by llama.cpp's own package."""

import json
import math

import gguf as theirs
import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.foreign import gguf, hf
from megajax.models import decoder
from megajax.parallel import sharding
from tests.foreign.test_decoder_families import batch_of, unpack
from tests.foreign.test_gguf import permute

KINDS = {"gemma3_text": "gemma3", "olmo2": "olmo2", "smollm3": "smollm3", "phi3": "phi3"}
SCALE = {"query_pre_attn_scalar": 12}  # a head's width, as of all Gemma 3 but the 27B


def write(name, folder, extra=None, tensors=None, **changes):
    """Writes a golden model as convert_hf_to_gguf.py does. extra: more keys; tensors: more of them.

    changes: of config.json. Returns the file.
    """
    changes |= SCALE if name == "gemma3_text" else {}
    _, stored = unpack(name, folder / name, **changes)
    config = json.loads((folder / name / "config.json").read_text())
    kind = KINDS[name]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    out = theirs.GGUFWriter(folder / f"{name}.gguf", kind)
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if name == "gemma3_text":
        out.add_key_length(width)
        out.add_value_length(width)
        out.add_sliding_window(config["sliding_window"])
        out.add_sliding_window_pattern(config["_sliding_window_pattern"])
        out.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        out.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        out.add_rope_scaling_type(theirs.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(rope["full_attention"]["factor"])
    else:
        out.add_rope_freq_base(rope["rope_theta"])
    if name == "phi3":
        original, longest = rope["original_max_position_embeddings"], 64
        out.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
        out.add_rope_scaling_orig_ctx_len(original)
        out.add_sliding_window(0)
        grown = math.sqrt(1 + math.log(longest / original) / math.log(original))
        out.add_rope_scaling_attn_factors(grown)
        for end in ("long", "short"):
            out.add_tensor(f"rope_factors_{end}.weight", np.float32(rope[f"{end}_factor"]))
    arch = {v: k for k, v in theirs.MODEL_ARCH_NAMES.items()}[kind]
    names = theirs.get_tensor_name_map(arch, config["num_hidden_layers"])
    for key, x in stored.items():
        if name == "gemma3_text" and key.endswith("norm.weight"):
            x = x + 1
        if name == "smollm3" and ("q_proj" in key or "k_proj" in key):
            x = permute(x, heads if "q_proj" in key else kv_heads)
        out.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), np.float32(x))
    for key, value in (extra or {}).items():
        (out.add_uint32 if isinstance(value, int) else out.add_float32)(f"{kind}.{key}", value)
    for key, x in (tensors or {}).items():
        out.add_tensor(key, np.float32(x))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return folder / f"{name}.gguf"


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_hugging_face_folder(name, tmp_path):
    """Whose logits are transformers', by test_decoder_families.py."""
    opened = gguf.GgufModel(write(name, tmp_path))
    cfg, params = hf.load(tmp_path / name)
    assert opened.cfg == cfg
    read, expected = dict(named_leaves(opened.params())), dict(named_leaves(params))
    assert read.keys() == expected.keys()
    for leaf, x in expected.items():
        # A norm of Gemma is 1 + w in float32, which rounds.
        rounds = 2e-7 if name == "gemma3_text" and leaf.endswith("scale") else 0.0
        np.testing.assert_allclose(read[leaf], x, rtol=0, atol=rounds, err_msg=leaf)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (2, 24), np.int32)
    logits = jax.jit(decoder.parts(cfg).logits)
    want = np.asarray(logits(params, batch_of(tokens)))
    assert np.abs(want).max() > 1.0
    np.testing.assert_allclose(logits(opened.params(), batch_of(tokens)), want, atol=1e-4)
    if name == "phi3":  # each device reads its rows of the joined matrices
        layout = sharding.layout(MeshSpec(tensor=2, data=4).build(), model=cfg)
        for leaf, x in named_leaves(opened.params(layout)):
            np.testing.assert_array_equal(np.asarray(x), expected[leaf], err_msg=leaf)


def test_what_no_key_says_is_as_llama_cpp_has_it(tmp_path):
    """Gemma 3's six layers with base 10,000 in windows; SmolLM3's fourth layer; Phi-3's 4k form."""
    file = write("gemma3_text", tmp_path)
    opened = gguf.GgufFile(file)
    shapes = {n: t.shape for n, t in opened.tensors.items()}
    names, said = gguf.gguf_names, dict(opened.metadata)
    del said["gemma3.attention.sliding_window_pattern"], said["gemma3.rope.freq_base_swa"]
    cfg = names.from_metadata(said, shapes, {})
    assert (cfg.pattern, cfg.rope.local_theta, cfg.query_scale) == ("w", 10000.0, None)
    cfg = names.from_metadata(said | {"gemma3.block_count": 7}, shapes, {})
    assert cfg.pattern == "wwwwwf"
    cfg = names.from_metadata(said | {"gemma3.block_count": 62}, shapes, {})
    assert cfg.query_scale == 32 / 4
    said.pop("gemma3.attention.sliding_window")
    assert names.from_metadata(said, shapes, {}).pattern == "f"
    opened = gguf.GgufFile(write("smollm3", tmp_path))
    shapes = {n: t.shape for n, t in opened.tensors.items()}
    cfg = names.from_metadata(opened.metadata | {"smollm3.block_count": 3}, shapes, {})
    assert cfg.pattern is None


@pytest.mark.parametrize(
    ("name", "extra", "tensors", "words"),
    [
        ("gemma3_text", {"final_logit_softcapping": 30.0}, {}, "gemma3.final_logit_softcapping is"),
        ("gemma3_text", {"attention.scale": 0.5}, {}, "gemma3.attention.scale is"),
        ("gemma3_text", {"expert_count": 4}, {}, "expert_count is 4, this architecture has no"),
        ("olmo2", {"attention.sliding_window": 8}, {}, "sliding_window is 8, layers with a window"),
        (
            "olmo2",
            {},
            {"blk.0.attn_norm.weight": [1.0] * 32},
            "tensors that this .* blk.0.attn_norm",
        ),
        ("smollm3", {}, {"rope_factors_long.weight": [1.0]}, "belongs to phi3, not to smollm3"),
        ("smollm3", {"rope.dimension_count": 4}, {}, "it must be 8, the width of a head"),
        ("phi3", {}, {"rope_freqs.weight": [1.0] * 3}, "longrope needs rope_factors_short.weight"),
        ("phi3", {"rope.scaling.yarn_ext_factor": 1.0}, {}, "phi3.rope.scaling.yarn_ext_factor is"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(name, extra, tensors, words, tmp_path):
    with pytest.raises(UserError, match=words):
        gguf.GgufModel(write(name, tmp_path, extra, tensors)).params()


@pytest.mark.parametrize(
    ("factor", "words"), [([1.0, 2.0], "must hold 3 finite"), ([1.0, 0.0, 2.0], "must hold 3")]
)
def test_factors_of_another_head_are_refused(factor, words, tmp_path):
    opened = gguf.GgufFile(write("phi3", tmp_path))
    shapes = {n: t.shape for n, t in opened.tensors.items()}
    tables = {n: np.float32([1.0, 1.5, 2.0]) for n in ("rope_factors_short.weight",)}
    tables["rope_factors_long.weight"] = np.float32(factor)
    with pytest.raises(UserError, match=words):
        gguf.gguf_names.from_metadata(opened.metadata, shapes, tables)
