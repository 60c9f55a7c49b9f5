"""Checkpoints of Megatron-LM (tests/golden/make_foreign.py) against transformers' logits."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.foreign import hf, megatron, readers
from megajax.foreign.megatron import MegatronFolder, to_hf_config
from megajax.models import decoder, names
from tests.foreign_writer import Name, Object, Raw, tensor, torch_zip

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "foreign"
LLAMAS = ["megatron_legacy", "megatron_core", "megatron_dist", "megatron_dist_apart"]
VOCAB = 61
ARGS = megatron.open_step(GOLDEN / "megatron_core" / "iter_0000007").args
GPT2 = megatron.open_step(GOLDEN / "megatron_gpt2" / "iter_0000007").args


def tensors(name):
    checkpoint = MegatronFolder(GOLDEN / name, vocab=VOCAB)
    return {n: checkpoint.view(n) for n in checkpoint.tensors}


@functools.cache
def logits_of(cfg):
    """One compilation for all forms."""
    return jax.jit(decoder.parts(cfg).logits)


@pytest.mark.parametrize("name", [*LLAMAS, "megatron_gpt2"])
def test_logits_are_those_of_transformers(name, tmp_path):
    """2 tensor ranks x 2 stages (x 2 chunks) -> a Hugging Face folder -> ours."""
    assert readers.detect(GOLDEN / name) == "megatron"
    source = readers.open_foreign(GOLDEN / name, "megatron", vocab=VOCAB)
    assert source.step == 7
    readers.write(source, tmp_path)
    cfg, params = hf.load(tmp_path)
    kind = "gpt2" if "gpt2" in name else "llama"
    with np.load(GOLDEN / "logits.npz") as golden:
        tokens, want = golden[f"{kind}_tokens"], golden[f"{kind}_logits"]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions}
    logits = np.asarray(logits_of(cfg)(params, batch))
    assert names.family(cfg) == kind and np.abs(want).max() > 2
    np.testing.assert_allclose(logits[..., :VOCAB], want, atol=2e-5)


def test_all_forms_hold_the_same_bits():
    want = tensors(LLAMAS[0])
    assert len(want) == 39 and all(x.dtype == ml_dtypes.bfloat16 for x in want.values())
    assert want["lm_head.weight"].shape == (VOCAB, 16)
    assert want["model.layers.3.self_attn.k_proj.weight"].shape == (8, 16)
    for name in LLAMAS[1:]:
        checkpoint = tensors(name)
        assert checkpoint.keys() == want.keys()
        assert all(checkpoint[n].tobytes() == want[n].tobytes() for n in want), name


def test_what_is_left_out_is_said():
    assert MegatronFolder(GOLDEN / "megatron_core").left_out == ["optimizer", "rng_state"]
    assert MegatronFolder(GOLDEN / "megatron_dist").left_out == []


def test_a_step_by_number():
    checkpoint = MegatronFolder(GOLDEN / "megatron_dist", step=7)
    assert checkpoint.folder.name == "iter_0000007" and checkpoint.config["vocab_size"] == 64
    assert MegatronFolder(checkpoint.folder).tensors == checkpoint.tensors
    with pytest.raises(UserError, match=r"has no checkpoint 8 \(--step\)"):
        MegatronFolder(GOLDEN / "megatron_dist", step=8)
    with pytest.raises(UserError, match="neither latest_checkpointed_iteration.txt nor ranks"):
        MegatronFolder(GOLDEN)
    with pytest.raises(UserError, match="is none of safetensors, dcp, megatron, torch"):
        readers.detect(GOLDEN)


def copied(name, tmp_path):
    shutil.copytree(GOLDEN / name, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_rank_that_is_missing(tmp_path):
    folder = copied("megatron_legacy", tmp_path)
    rank = folder / "iter_0000007" / "mp_rank_01_000"
    (rank / "model_optim_rng.pt").rename(rank / "other.pt")
    with pytest.raises(UserError, match="mp_rank_01_000 has no model_optim_rng.pt"):
        MegatronFolder(folder)
    shutil.rmtree(rank)
    with pytest.raises(UserError, match="lacks mp_rank_01_000"):
        MegatronFolder(folder)
    shutil.rmtree(folder / "iter_0000007" / "mp_rank_01_001")
    with pytest.raises(UserError, match="1 tensor ranks, its arguments say 2"):
        MegatronFolder(folder)


def test_a_stage_of_another_place(tmp_path):
    """The second stage twice: the table of words is not there, and layers are not lost silently."""
    folder = copied("megatron_legacy", tmp_path)
    for t in (0, 1):
        home = folder / "iter_0000007"
        file = "model_optim_rng.pt"
        shutil.copy(home / f"mp_rank_0{t}_001" / file, home / f"mp_rank_0{t}_000" / file)
    with pytest.raises(UserError, match="decoder.final_layernorm.weight is there twice"):
        MegatronFolder(folder)


def test_ranks_that_do_not_agree():
    checkpoint = MegatronFolder(GOLDEN / "megatron_legacy")
    norms = checkpoint._source.names["decoder.layers.1.input_layernorm.weight"]
    norms[1] = checkpoint._source.names["decoder.layers.2.input_layernorm.weight"][1]
    with pytest.raises(UserError, match=r"layers.1.input_layernorm.weight is not alike on all"):
        checkpoint.view("model.layers.1.input_layernorm.weight")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "gives model.embed_tokens.weight the shape"),
        ({"ffn_hidden_size": 32}, "gives model.layers.0.mlp.gate_proj.weight the shape"),
        ({"num_query_groups": 4}, "does not hold"),
        ({"num_layers": 5}, "has no decoder.layers.4.self_attention.linear_qkv.weight"),
        ({"num_layers": 3}, "has tensors that a llama does not: decoder.layers.3"),
        ({"padded_vocab_size": 65}, "gives model.embed_tokens.weight the shape"),
        ({"add_qkv_bias": True}, "has no decoder.layers.0.self_attention.linear_qkv.bias"),
        ({"untie_embeddings_and_output_weights": False}, "output_layer.weight differs from embed"),
    ],
)
def test_arguments_of_another_model(changes, said, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_hf_config(ARGS | changes)))

    with pytest.raises(UserError, match=said):
        source = readers.open_foreign(GOLDEN / "megatron_core", "megatron", config=str(config))
        [source.view(n) for n in source.shapes]


def tiny_stage(table, head=None, is_last=True):
    """One layer of width 2 and three words. table, head: where their values begin in a storage."""

    def part(shape, offset=0):
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        return tensor(offset, shape, strides, elements=12)

    layer = "decoder.layers.0."
    members = {
        "embedding.word_embeddings.weight": part((3, 2), table),
        layer + "self_attention.linear_qkv.weight": part((6, 2)),
        layer + "self_attention.linear_proj.weight": part((2, 2)),
        layer + "mlp.linear_fc1.weight": part((2, 2)),
        layer + "mlp.linear_fc2.weight": part((2, 1)),
        layer + "input_layernorm.weight": part((2,)),
        layer + "pre_mlp_layernorm.weight": part((2,)),
    }
    if is_last:
        members["decoder.final_layernorm.weight"] = part((2,))
    if head is not None:
        members[f"{head[0]}.weight"] = part((3, 2), head[1])
    return members


def tiny_config(layers):
    """A config.json of `tiny_stage`, tied."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 2,
        "head_dim": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 1,
        "vocab_size": 3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("copy", ["output_layer", "word_embeddings_for_head", "stage"])
def test_copies_of_the_table_are_equal_or_refused(copy, offset, tmp_path):
    """A head beside a tied table, a legacy last stage's copy of it, the table of a second stage."""
    storage = np.arange(12, dtype=np.float32).tobytes()
    stages = [tiny_stage(0, (copy, offset))]
    if copy == "stage":
        stages = [tiny_stage(0, is_last=False), tiny_stage(offset)]
    for stage, tensors_ in enumerate(stages):
        (tmp_path / f"mp_rank_00_{stage:03d}").mkdir()
        state = {"model": tensors_, "checkpoint_version": 3.0}
        file = tmp_path / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        file.write_bytes(torch_zip(state, {"0": storage}))
    checkpoint = MegatronFolder(tmp_path, config=tiny_config(len(stages)))
    if offset == 0:
        table = checkpoint.view("model.embed_tokens.weight")
        np.testing.assert_array_equal(table, np.arange(6, dtype=np.float32).reshape(3, 2))
        return
    with pytest.raises(UserError, match="differs from embedding|two stages hold embedding"):
        checkpoint.view("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "has no arguments"),
        (ARGS | {"num_experts": 8}, "num_experts=8 is not supported"),
        (ARGS | {"rotary_percent": 0.5}, "rotary_percent=0.5 is not supported, only 1.0"),
        (ARGS | {"window_size": (128, 0)}, "window_size=.128, 0. is not supported"),
        (ARGS | {"softmax_scale": 0.5}, "softmax_scale=0.5 is not supported, only None"),
        (ARGS | {"use_mup": True}, "use_mup=True is not supported, only False"),
        (ARGS | {"spec": ["my.module", "layer"]}, "spec=list is not supported, only None"),
        (ARGS | {"multi_latent_attention": True}, "multi_latent_attention=True"),
        (ARGS | {"rotary_interleaved": True}, "rotary_interleaved=True"),
        (ARGS | {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0 is no argument of"),
        (GPT2 | {"add_position_embedding": False}, "add_position_embedding=False"),
        (GPT2 | {"use_rotary_position_embeddings": True}, "say two things"),
        (ARGS | {"apply_layernorm_1p": True}, "apply_layernorm_1p=True"),
        (ARGS | {"normalization": "LayerNorm"}, "no family of ours has normalization=LayerNorm"),
        (ARGS | {"add_qkv_bias": True, "qk_layernorm": True}, "no family"),
        (GPT2 | {"bias_gelu_fusion": False}, "GELU by tanh"),
        ({k: v for k, v in ARGS.items() if k != "num_layers"}, "lack 'num_layers'"),
    ],
)
def test_arguments_that_we_cannot_compute(args, said):
    with pytest.raises(UserError, match=said):
        to_hf_config(args)


def test_arguments_that_change_nothing_are_let_through():
    """Of training, and those that something else would have to switch on."""
    inert = {
        "lr": 3e-4, "micro_batch_size": 4, "moe_router_topk": 2, "kv_lora_rank": 32, "mscale": 1.0,
        "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True, "fp8": "hybrid",
        "yarn_correction_range_round_to_int": True, "recompute_granularity": "selective",
        "relative_attention_num_buckets": 32, "mtp_loss_scaling_factor": 0.1, "img_h": 224,
        "consumed_train_samples": 5, "use_rotary_position_embeddings": True,
        "some_new_switch": None, "some_old_switch": False, "attention_dropout": 0.1,
        "num_experts": None, "mtp_num_layers": 0,
    }  # fmt: skip
    assert to_hf_config(ARGS | inert) == to_hf_config(ARGS)


def test_arguments_of_relatives():
    assert to_hf_config(ARGS | {"add_qkv_bias": True})["model_type"] == "qwen2"
    assert to_hf_config(ARGS | {"qk_layernorm": True})["model_type"] == "qwen3"
    scaled = to_hf_config(ARGS | {"use_rope_scaling": True, "rope_scaling_factor": 32.0})
    assert names.from_hf_config(scaled).rope.factor == 32.0
    assert to_hf_config(ARGS, vocab=60)["vocab_size"] == 60


def test_names_of_every_age():
    for old, new in (
        ("module.decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        (
            "language_model.transformer.layers.0.attention.query_key_value.weight",
            "decoder.layers.0.self_attention.linear_qkv.weight",
        ),
        (
            "language_model.encoder.layers.11.post_attention_layernorm.bias",
            "decoder.layers.11.pre_mlp_layernorm.bias",
        ),
        (
            "decoder.layers.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.pre_mlp_layernorm.weight",
        ),
    ):
        assert megatron.rename(old) == new


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {}, "checkpoint_version": 1.0}, "has checkpoint_version 1.0"),
        ({"model": {}, "checkpoint_version": "x"}, "has checkpoint_version x"),
        ({"checkpoint_version": 3.0}, "has no model"),
        ({"model": {"decoder": 5}, "checkpoint_version": 3.0}, "decoder is no tensor"),
        ([1], "holds no dictionary"),
        (Object(Name("os", "system"), ("touch trace",)), "it names 'os.system'"),
    ],
)
def test_files_that_are_no_checkpoint(state, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "mp_rank_00"
    home.mkdir()
    (home / "model_optim_rng.pt").write_bytes(torch_zip(state))
    with pytest.raises(UserError, match=said):
        MegatronFolder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mp_rank_00"]
    home.rename(tmp_path / "mp_rank_00_000_001")
    with pytest.raises(UserError, match="experts over ranks"):
        MegatronFolder(tmp_path)


def test_older_folders_keep_the_arguments_in_a_file(tmp_path):
    folder = copied("megatron_dist", tmp_path)
    args = Object(Name("argparse", "Namespace"), (), {"num_layers": 4, "num_experts": 2})
    common = torch_zip({"args": args, "iteration": 7})
    (folder / "iter_0000007" / "common.pt").write_bytes(common)
    with pytest.raises(UserError, match="num_experts=2"):
        MegatronFolder(folder)


def one_rank(folder, state, name="mp_rank_00"):
    (folder / name).mkdir()
    (folder / name / "model_optim_rng.pt").write_bytes(torch_zip(state, {"0": bytes(24)}))


@pytest.mark.parametrize("name", ["mp_rank_9999999", "mp_rank_9999999_9999999", "mp_rank_01_000"])
def test_ranks_far_from_the_others(name, tmp_path):
    state = {"model": {}, "checkpoint_version": 3.0}
    one_rank(tmp_path, state)
    one_rank(tmp_path, state, name)
    with pytest.raises(UserError, match="lacks mp_rank_|has no model|no arguments"):
        MegatronFolder(tmp_path)


def test_two_folders_of_one_rank(tmp_path):
    for name in ("mp_rank_00", "mp_rank_000"):
        one_rank(tmp_path, {"model": {}, "checkpoint_version": 3.0}, name)
    with pytest.raises(UserError, match=r"mp_rank_00. is a second folder of .* rank \(0, 0\)"):
        MegatronFolder(tmp_path)


@pytest.mark.parametrize("name", ["x", "embedding.word_embeddings.weight", "output_layer.weight"])
def test_names_that_become_one(name, tmp_path):
    """Words of several writers mean one tensor: nested `module`s, `language_model`."""
    twice = {name: tensor(0, (6,), (1,)), f"module.{name}": tensor(0, (2,), (1,))}
    one_rank(tmp_path, {"model": twice, "checkpoint_version": 3.0})
    with pytest.raises(UserError, match=f"two tensors of the name {name}"):
        MegatronFolder(tmp_path)


LAUGH = b"](K\x01eq\x00" + b"".join(b"0](h%ch%ceq%c" % (i, i, i + 1) for i in range(60))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {}, "checkpoint_version": Raw(LAUGH)}, "checkpoint_version list"),
        (
            {"args": {"normalization": Raw(LAUGH)}, "model": {}, "checkpoint_version": 3},
            "argument normalization of the checkpoint is nested",
        ),
        ({"model" + "1" * 5000: {}, "checkpoint_version": 3}, "has no model"),
        (
            {
                "model": {"decoder.layers." + "1" * 5000 + ".w": tensor(0, (6,), (1,))},
                "checkpoint_version": 3,
            },
            "no arguments",
        ),
        ({"model": {}, "iteration": 10**40, "checkpoint_version": 3}, "is of iteration 1000"),
        ({"model": {}, "args": {"num_layers": 10**12}, "checkpoint_version": 3}, "lack"),
    ],
)
def test_values_that_no_message_may_spell_out(state, said, tmp_path):
    one_rank(tmp_path, state)
    with pytest.raises(UserError, match=said):
        MegatronFolder(tmp_path)


def test_a_tracker_of_many_digits(tmp_path):
    (tmp_path / megatron.TRACKER).write_text("1" * 4000)
    with pytest.raises(UserError, match="has no checkpoint 111"):
        megatron.find_step(tmp_path)


def test_shapes_that_do_not_split(tmp_path):
    checkpoint = MegatronFolder(GOLDEN / "megatron_core")
    pieces = checkpoint._source.names["decoder.layers.0.mlp.linear_fc1.weight"]
    pieces[0] = dataclasses.replace(pieces[0], shape=(3, 5), strides=(5, 1))
    with pytest.raises(UserError, match="linear_fc1.weight are not those of the configuration"):
        checkpoint.view("model.layers.0.mlp.gate_proj.weight")
