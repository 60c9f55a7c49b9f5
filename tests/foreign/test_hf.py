"""Import and export against transformers: logits frozen by tests/golden/make_hf.py."""

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.data.tokenizer import train_bpe
from megajax.foreign import hf
from megajax.models import decoder, names
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.parallel import sharding
from tests import foreign_writer

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
ABSENT = object()
FAMILIES = ["gpt2", "llama", "llama3_tied", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]


def unpack(name, folder):
    """Writes a golden file out as the folder that transformers would have saved."""
    with np.load(GOLDEN / f"hf_{name}.npz") as file:
        golden = dict(file)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(golden["config"]))
    tensors = {k.removeprefix("tensor:"): golden[k] for k in golden if k[:7] == "tensor:"}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return golden, tensors


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (name, x), y in zip(named_leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    golden, _ = unpack(name, tmp_path)
    cfg, params = hf.load(tmp_path)
    tokens = golden["tokens"]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions}
    logits = np.asarray(jax.jit(decoder.parts(cfg).logits)(params, batch))
    assert np.abs(golden["logits"]).max() > 1.0
    np.testing.assert_allclose(logits[..., : cfg.vocab], golden["logits"], atol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_export_is_bit_for_bit(name, tmp_path):
    """Their tensors -> ours, cut over a mesh -> their tensors, in several shards -> ours again."""
    _, tensors = unpack(name, tmp_path / "theirs")
    lo = sharding.layout(MeshSpec(tensor=2, expert=2).build())
    cfg, params = hf.load(tmp_path / "theirs", lo)
    blocks = params["blocks"]
    if cfg.moe.experts:
        words = ("layers", "expert", "embed", "mlp")
        assert blocks["moe"]["up"].sharding.spec == lo.stored(*words)
    else:
        assert blocks["mlp"]["up"].sharding.spec == lo.stored("layers", "embed", "mlp")
    hf.save(params, cfg, tmp_path / "ours")
    exported = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert set(exported) == set(tensors)
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(exported[key], tensor, err_msg=key)
    hf.save(params, cfg, tmp_path / "sharded", shard_bytes=30_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    again, params2 = hf.load(tmp_path / "sharded")
    assert again == cfg
    assert_same(params, params2)


def test_half_precision_export_rounds_once(tmp_path):
    _, tensors = unpack("llama", tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    hf.save(params, cfg, tmp_path / "half", dtype="bfloat16")
    _, back = hf.load(tmp_path / "half")
    norm = np.asarray(back["norm"]["scale"])
    want = np.asarray(jax.numpy.asarray(tensors["model.norm.weight"], "bfloat16"), np.float32)
    np.testing.assert_array_equal(norm, want)


def test_gpt2s_own_names_have_no_prefix(tmp_path):
    _, tensors = unpack("gpt2", tmp_path)
    bare = {k.removeprefix("transformer."): v for k, v in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)  # a buffer of old checkpoints
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
    cfg, params = hf.load(tmp_path)
    assert params["tokens"].shape == (128, 48) and cfg.vocab == 101
    assert np.asarray(params["tokens"])[101:].max() == 0  # rows that pad the vocabulary


@pytest.mark.parametrize(
    "name", [n for n in PRESETS if n not in ("nano", "megascale_175b", "megascale_530b")]
)
def test_config_json_round_trip(name):
    """Our presets survive their config.json, so an export of each can be loaded."""
    cfg = PRESETS[name]()
    back = names.from_hf_config(json.loads(json.dumps(names.to_hf_config(cfg, "bfloat16"))))
    # How a model was trained is no member that is read.
    trained = dataclasses.replace(back.moe, aux_loss=cfg.moe.aux_loss)
    assert dataclasses.replace(back, moe=trained) == cfg


def test_rules_cover_every_leaf():
    names_ = "gpt2 llama3_8b qwen2_7b qwen3_8b llama3_1b mixtral_8x7b qwen3_30b_a3b"
    for name in names_.split():
        cfg = dataclasses.replace(PRESETS[name](), layers=1)
        leaves = {n for n, _ in named_leaves(decoder.parts(cfg).abstract)}
        assert {r.ours for r in names.rules(cfg)} == leaves


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", ["llama3_tied", "qwen3", "gpt2"])
def test_a_stored_head_is_a_copy_of_the_tied_table_or_refused(name, tmp_path):
    """transformers 5 computes with the stored head, whatever config.json says (seen in 5.24)."""
    _, tensors = unpack(name, tmp_path)
    table = next(x for n, x in tensors.items() if n.endswith(("embed_tokens.weight", "wte.weight")))
    params = hf.load(tmp_path)[1]
    safetensors.numpy.save_file(
        tensors | {"lm_head.weight": table.copy()}, tmp_path / "model.safetensors"
    )
    assert_same(hf.load(tmp_path)[1], params)
    other = table.copy()
    other[-1, -1] += 1e-3
    for head in (other, table[:-1].copy()):
        safetensors.numpy.save_file(
            tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors"
        )
        with pytest.raises(UserError, match="lm_head.weight differs from .*tie_word_embeddings"):
            hf.load(tmp_path)
    if name != "gpt2":
        edit(tmp_path, tie_word_embeddings=False)
        safetensors.numpy.save_file(
            tensors | {"lm_head.weight": other}, tmp_path / "model.safetensors"
        )
        cfg, params = hf.load(tmp_path)
        np.testing.assert_array_equal(np.asarray(params["head"]).T[: cfg.vocab], other)


STRANGERS = [
    "model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.layers.0.mlp.adapter.down.weight",
    "model.layers.2.input_layernorm.weight",
    "model.mtp.0.embed_tokens.weight",
    "score.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.attn.bias",
    "lm_head.bias",
    "model.layers.0.self_attn.q_norm.weight",
    "v_head.summary.weight",
]


def test_tensors_that_the_model_would_not_use_are_named(tmp_path):
    _, tensors = unpack("llama", tmp_path)
    params = hf.load(tmp_path)[1]
    known = "model.layers.1.self_attn.rotary_emb.inv_freq"  # a buffer of transformers 4
    for name in (known, *STRANGERS):
        safetensors.numpy.save_file(
            tensors | {name: np.ones(4, np.float32)}, tmp_path / "model.safetensors"
        )
        if name == known:
            assert_same(hf.load(tmp_path)[1], params)
            continue
        with pytest.raises(UserError, match=f"does not know: {re.escape(name)}; the model would"):
            hf.load(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_beside_the_weights_are_named(name, tmp_path):
    """transformers adds an adapter that it finds in a folder to the weights."""
    unpack("llama", tmp_path)
    (tmp_path / name).write_text("{}")
    for read in (hf.load, hf.load_config, hf.load_decoder_config):
        with pytest.raises(UserError, match=rf"has an adapter \({name}\)"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["llama3_tied", "qwen3"])
def test_decoders_without_their_head_have_no_prefix(name, tmp_path):
    """What LlamaModel and its relatives save: embedding models are such files."""
    _, tensors = unpack(name, tmp_path)
    params = hf.load(tmp_path)[1]
    bare = {k.removeprefix("model."): v for k, v in tensors.items() if k != "lm_head.weight"}
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
    assert_same(hf.load(tmp_path)[1], params)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not one of"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported, only silu"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type yarn lacks factor"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type mrope is not supported"),
        ({"intermediate_size": 96}, "has shape"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "tensors that this family does not know: model.layers.1"),
        ({"tie_word_embeddings": True, "num_attention_heads": 8}, "has shape"),
    ],
)
def test_folders_that_cannot_be_read_are_refused(tmp_path, changes, words):
    unpack("llama", tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        hf.load(tmp_path)
    assert words in str(error.value)


def test_missing_pieces_are_named(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # of default sizes
    with pytest.raises(UserError, match="has neither model.safetensors nor"):
        hf.load(tmp_path)


def test_a_window_on_some_layers_is_a_pattern(tmp_path):
    unpack("qwen2", tmp_path)
    edit(
        tmp_path,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
    )
    cfg = hf.load_config(tmp_path)
    assert (cfg.pattern, cfg.window) == ("fw", 4)
    assert names.from_hf_config(names.to_hf_config(cfg, "float32")) == cfg


@pytest.mark.parametrize(
    ("family", "members", "window"),
    [
        ("mistral", {}, 8),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": ABSENT}, 4096),
        ("mixtral", {}, 8),
        ("mixtral", {"sliding_window": ABSENT}, None),
        ("llama", {"sliding_window": ABSENT}, None),
        ("qwen2", {}, None),
        ("qwen3_moe", {"max_window_layers": 48}, None),
        ("qwen3_moe", {"max_window_layers": 48, "use_sliding_window": True}, 8),  # on all layers
        ("qwen3_moe", {"sliding_window": ABSENT, "use_sliding_window": True}, 4096),
        ("qwen2", {"use_sliding_window": True}, None),  # 28 layers before it has effect
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 8),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 8),
    ],
)
def test_members_that_lack_are_those_of_transformers(family, members, window):
    """Defaults of the classes of transformers 5.24; its LlamaConfig knows no window."""
    common = {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "num_key_value_heads": 4,
    }
    config = {n: v for n, v in (common | members).items() if v is not ABSENT}
    assert names.from_hf_config(config).window == window


@pytest.mark.parametrize(
    ("family", "member", "value"),
    [
        ("mixtral", "rope.theta", 1e6), ("llama", "rope.theta", 1e4), ("mistral", "kv_heads", 8),
        ("qwen2", "kv_heads", 32), ("qwen3_moe", "kv_heads", 4), ("llama", "kv_heads", 32),
        ("qwen3", "head_width", 128), ("qwen3_moe", "head_width", 2), ("mixtral", "norm_eps", 1e-5),
        ("llama", "norm_eps", 1e-6), ("gpt2", "tied", True), ("qwen2", "tied", False),
        ("gpt2", "mlp", 256), ("qwen3_moe", "moe.normalise", False), ("mixtral", "moe.top_k", 2),
        ("qwen3_moe", "moe.experts", 128), ("qwen3_moe", "moe.width", 768),
    ],
)  # fmt: skip
def test_absent_members_are_defaults_of_transformers(family, member, value):
    """Of its configuration classes, read in 5.24; heads are 32 of width 2."""
    config = {"model_type": family, "hidden_size": 64, "num_attention_heads": 32}
    default = names.from_hf_config(config)
    for name in member.split("."):
        default = getattr(default, name)
    assert default == value


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"auto_map": {"AutoModel": "m.X"}}, "auto_map names code of the folder's own"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is no member of"),
        ({"is_causal": False}, "is_causal=False is not supported, only True"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
        ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ({"sliding_window": 8}, "sliding_window=8 is no member of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported, only 1.0"),
        ({"rope_parameters": {"mscale": 1.0}}, "mscale of the rotary settings is not read"),
        ({"quantization": {"bits": 4}}, "quantization={'bits': 4} is no member of"),
        ({"hidden_act": "relu"}, "hidden_act=relu is not supported, only silu, swish"),
    ],
)
def test_members_that_may_change_the_arithmetic_are_named(members, words):
    with pytest.raises(UserError) as error:
        names.from_hf_config({"model_type": "llama"} | members)
    assert words in str(error.value)


def test_a_folder_to_quantize_on_loading_is_refused(tmp_path):
    unpack("llama", tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(UserError, match="is quantized .quantization_config"):
        hf.load(tmp_path)


def test_weights_for_another_model_are_refused(tmp_path):
    unpack("llama", tmp_path)
    with pytest.raises(UserError) as error:
        hf.load_params(tmp_path, DecoderConfig())
    assert "layers is 2 there, 4 here" in str(error.value)


def test_a_shape_without_a_family_is_refused(tmp_path):
    cfg = dataclasses.replace(DecoderConfig(), block="parallel")
    with pytest.raises(UserError, match="no Hugging Face family has this shape: block parallel"):
        hf.save({}, cfg, tmp_path / "out")


def test_nothing_is_overwritten(tmp_path):
    unpack("llama", tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        hf.save(params, cfg, tmp_path / "theirs")
    with pytest.raises(UserError, match="dtype=int8"):
        hf.save(params, cfg, tmp_path / "new", dtype="int8")


def test_parameters_of_another_shape_are_refused(tmp_path):
    """The head of an untied model is not left out where the configuration says tied."""
    unpack("llama", tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    with pytest.raises(UserError, match="not this configuration's: head"):
        hf.save(params, dataclasses.replace(cfg, tied=True), tmp_path / "out")
    del params["head"]
    with pytest.raises(UserError, match="not this configuration's: head"):
        hf.save(params, cfg, tmp_path / "out")


def test_numbers_that_half_precision_has_not_are_refused(tmp_path):
    unpack("llama", tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(-7e4)
    with pytest.raises(UserError, match="model.norm.weight holds 70000, more than F16 can"):
        hf.save(params, cfg, tmp_path / "out", "float16")
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(np.inf)  # what was infinite may be
    hf.save(params, cfg, tmp_path / "out", "float16")


def write_torch(folder, tensors, name="pytorch_model.bin"):
    """A file of torch.save with float32 tensors, written by hand."""
    value, members = {}, {}
    for i, (key, x) in enumerate(tensors.items()):
        strides = tuple(s // x.itemsize for s in np.ascontiguousarray(x).strides)
        value[key] = foreign_writer.tensor(0, x.shape, strides, str(i), x.size)
        members[str(i)] = x.astype("<f4").tobytes()
    (folder / name).write_bytes(foreign_writer.torch_zip(value, members))


def test_weights_of_torch_are_read_where_there_are_no_others(tmp_path):
    """pytorch_model.bin, in one file and in several: the same parameters as of safetensors."""
    unpack("llama", tmp_path / "safe")
    cfg, expected = hf.load(tmp_path / "safe")
    tensors = safetensors.numpy.load_file(tmp_path / "safe" / "model.safetensors")
    for kind in ("one", "several"):
        folder = tmp_path / kind
        folder.mkdir()
        shutil.copyfile(tmp_path / "safe" / "config.json", folder / "config.json")
        if kind == "one":
            write_torch(folder, tensors)
            continue
        homes = {key: f"pytorch_model-{i % 2}.bin" for i, key in enumerate(tensors)}
        for name in set(homes.values()):
            write_torch(folder, {k: x for k, x in tensors.items() if homes[k] == name}, name)
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": homes}))
    for kind in ("one", "several"):
        loaded_cfg, params = hf.load(tmp_path / kind)
        assert loaded_cfg == cfg
        assert_same(params, expected)
    gone = next(iter(tensors))
    index.write_text(json.dumps({"weight_map": homes | {gone: "pytorch_model-1.bin"}}))
    homes[gone] = "pytorch_model-0.bin"
    with pytest.raises(UserError, match="is in pytorch_model-1.bin; it is not"):
        hf.load(tmp_path / "several")
    write_torch(tmp_path / "one", {k: x for k, x in tensors.items() if k != gone})
    with pytest.raises(UserError, match=f"has no tensor {gone}"):
        hf.load(tmp_path / "one")
    (tmp_path / "one" / "pytorch_model.bin").write_bytes(foreign_writer.torch_zip({"a": 5}))
    with pytest.raises(UserError, match="pytorch_model.bin: a is no tensor"):
        hf.load(tmp_path / "one")


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    unpack("llama", tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    for place in (tmp_path / "nowhere", tmp_path / "theirs"):
        with pytest.raises(UserError, match="is no tokenizer and no folder with one"):
            hf.save(params, cfg, tmp_path / "out", tokenizer=place)
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]


def test_tokenizers_travel_along(tmp_path):
    unpack("llama", tmp_path / "theirs")
    train_bpe(["hello"], 300, tmp_path / "theirs" / "tokenizer.json")
    cfg, params = hf.load(tmp_path / "theirs")
    hf.save(params, cfg, tmp_path / "ours", tokenizer=tmp_path / "theirs")
    names = "theirs", "ours"
    made = [json.loads((tmp_path / name / "tokenizer.json").read_text()) for name in names]
    assert made[0]["model"] == made[1]["model"]


def config_of(name):
    with np.load(GOLDEN / f"hf_{name}.npz") as golden:
        return json.loads(str(golden["config"]))


WRONG = {"whole": ["64", True, 64.0, [64], 0, -1], "number": ["1e-5", True, float("nan"), 0]}


@pytest.mark.parametrize(
    ("name", "members", "kind"),
    [
        ("llama", "num_hidden_layers hidden_size num_attention_heads head_dim vocab_size", "whole"),
        ("llama", "num_key_value_heads intermediate_size max_position_embeddings", "whole"),
        ("llama", "rms_norm_eps rope_theta", "number"),
        ("mistral", "sliding_window", "whole"),
        ("mixtral", "num_experts_per_tok num_local_experts", "whole"),
        ("gpt2", "n_layer n_embd n_head n_inner n_positions", "whole"),
        ("gpt2", "layer_norm_epsilon", "number"),
        ("bert", "hidden_size num_attention_heads num_hidden_layers", "whole"),
        ("bert", "layer_norm_eps", "number"),
        ("distilbert", "dim n_layers n_heads hidden_dim", "whole"),
        ("albert", "num_hidden_groups", "whole"),
    ],
)
def test_members_of_a_wrong_kind_are_named(name, members, kind, tmp_path):
    golden = config_of(name)
    file = tmp_path / "config.json"
    for member in members.split():
        for value in WRONG[kind]:
            file.write_text(json.dumps(golden | {member: value}))
            with pytest.raises(UserError) as error:
                hf.load_config(tmp_path)
            told = str(error.value)
            assert told.startswith(f"{file}: {member} is {value!r}, it must be "), told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', it must be an object"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": "8"}}, "factor is '8'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3 lacks factor, low_freq_factor"),
        (
            {"rope_scaling": {"factor": 10**400}, "rope_parameters": None},
            "it must be a finite number above 0",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling and rope_parameters say two"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, it must be a finite number above 0"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_type is 3, it must be a string"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', it must be true or false"),
        ({"model_type": ["llama"]}, "model_type is ['llama'], it must be a string"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], it must be a string"),
        ({"architectures": "LlamaForCausalLM"}, "it must be a list of strings"),
        ({"hidden_size": None}, "hidden_size is null, which transformers refuses too"),
        ({"num_attention_heads": 10**6, "head_dim": None}, "model.head_width=0 must be at least"),
    ],
)
def test_members_that_mean_nothing_are_named(changes, words, tmp_path):
    golden = config_of("llama")
    (tmp_path / "config.json").write_text(json.dumps(golden | changes))
    with pytest.raises(UserError) as error:
        hf.load_decoder_config(tmp_path)
    assert words in str(error.value) and "config.json" in str(error.value)


@pytest.mark.parametrize("content", ["[1]", "null", "5", '"llama"', "[" * 100_000, "\xff"])
def test_a_config_that_is_no_object_is_named(content, tmp_path):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="config.json (must hold a JSON object|is not JSON)"):
        hf.load_config(tmp_path)


@pytest.mark.parametrize(
    ("member", "value", "rule"),
    [
        ("num_hidden_layers", 10**9, "[1, 16384]"),
        ("hidden_size", 2**40, "[1, 2147483647]"),
        ("vocab_size", 10**30, "[1, 2147483647]"),
        ("num_hidden_layers", json.loads("[" * 90 + "]" * 90), "[1, 2147483647]"),
    ],
)
def test_sizes_that_no_model_has(member, value, rule, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama") | {member: value}))
    with pytest.raises(UserError, match=re.escape(f"it must be a whole number in {rule}")):
        hf.load_config(tmp_path)


def test_a_config_that_is_a_pipe_or_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "MAX_CONFIG", 10)
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    with pytest.raises(UserError, match=r"bytes; 10 are read at most \(--init_from\)"):
        hf.load_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"it is a named pipe.*\(--init_from\)"):
        hf.load_config(tmp_path)
