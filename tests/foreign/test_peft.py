"""Folders of PEFT: logits frozen by tests/golden/make_peft.py, ours out and in, hostile ones."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.packed import LowRank
from megajax.core.tree import named_leaves
from megajax.foreign import hf, peft
from megajax.models import decoder, lora
from megajax.parallel import sharding
from tests.foreign.test_hf import GOLDEN, unpack

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    golden, _ = unpack("llama", folder)
    cfg, params = hf.load(folder)
    tokens = golden["tokens"]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    parts = decoder.parts(cfg)
    logits = functools.partial(
        jax.jit(parts.logits), batch={"tokens": tokens, "positions": positions}
    )
    return cfg, parts, params, lambda p: np.asarray(logits(p))[..., : cfg.vocab], folder


@pytest.mark.parametrize("name", ["all", "rslora"])
def test_logits_are_those_of_peft(llama, name):
    _, parts, params, logits, _ = llama
    with np.load(GOLDEN / "peft" / "logits.npz") as file:
        expected = file[name]
    adapted = peft.load(GOLDEN / "peft" / name, params, parts.axes)
    got = logits(adapted)
    assert np.abs(got - logits(params)).max() > 0.1
    np.testing.assert_allclose(got, expected, atol=2e-4)
    np.testing.assert_allclose(logits(lora.merge(adapted)), expected, atol=2e-4)


def test_what_save_writes_load_reads_bit_for_bit(llama, tmp_path):
    _, parts, params, _, folder = llama
    adapted = peft.load(GOLDEN / "peft" / "all", params, parts.axes)
    peft.save(adapted, lora.LoraConfig(3, 6.0), tmp_path / "ours")
    ours, theirs = (
        safetensors.numpy.load_file(f / TENSORS)
        for f in (tmp_path / "ours", GOLDEN / "peft" / "all")
    )
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    # Onto a mesh, over weights that have other adapters already.
    lo = sharding.layout(MeshSpec(data=2, tensor=2).build(jax.devices()[:4]))
    _, cut = hf.load(folder, lo)
    cfg = lora.LoraConfig(2, modules="q")
    other, axes = lora.adapt(params, parts.axes, cfg, jax.random.key(0))
    again = peft.load(tmp_path / "ours", lora.with_base(other, cut), axes)
    assert jax.tree.structure(again) == jax.tree.structure(adapted)
    for (name, x), y in zip(named_leaves(again), jax.tree.leaves(adapted), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)
    up = again["blocks"]["mlp"]["up"]
    assert up.b.sharding.spec == lo.stored("layers", "rank", "mlp")
    with pytest.raises(UserError, match="lora.rank=4"):
        peft.save(adapted, lora.LoraConfig(4), tmp_path / "other")
    with pytest.raises(UserError, match="no adapters"):
        peft.save(params, None, tmp_path / "other")


BAD_MEMBERS = {
    "peft_type": "ADALORA",
    "task_type": "SEQ_CLS",
    "r": 0,
    "lora_alpha": True,
    "use_rslora": 1,
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "fan_in_fan_out": True,
    "lora_bias": True,
    "layer_replication": [[0, 1]],
    "trainable_token_indices": [3],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "init_lora_weights": "pissa",
    "layers_to_transform": "all",
    "invented": 1,
}


@pytest.mark.parametrize("member", BAD_MEMBERS)
def test_members_that_change_the_arithmetic_are_refused_by_name(llama, member, tmp_path):
    _, parts, params, _, _ = llama
    members = json.loads((GOLDEN / "peft" / "all" / CONFIG).read_text())
    shutil.copy(GOLDEN / "peft" / "all" / TENSORS, tmp_path / TENSORS)
    (tmp_path / CONFIG).write_text(json.dumps(members | {member: BAD_MEMBERS[member]}))
    with pytest.raises(UserError, match=f"{CONFIG}: {member}="):
        peft.load(tmp_path, params, parts.axes)


def renamed(tensors, old, new):
    return {name.replace(old, new): x for name, x in tensors.items()}


LAYER = "base_model.model.model.layers.1.self_attn.q_proj"
BAD_TENSORS = {
    "a stranger": (lambda t: t | {"base_model.model.lm_head.lora_A.weight": t[A]}, "lm_head"),
    "DoRA": (lambda t: t | {f"{LAYER}.lora_magnitude_vector": t[A]}, "magnitude"),
    "a layer beyond": (lambda t: renamed(t, "layers.1.", "layers.7."), "it has 2 layers"),
    "a giant layer": (lambda t: renamed(t, "layers.1.", f"layers.{'9' * 300}."), "adapters are"),
    "no B": (lambda t: {n: x for n, x in t.items() if n != f"{LAYER}.lora_B.weight"}, "no lora_B"),
    "another shape": (lambda t: t | {A: t[A][:, :-1].copy()}, "of the shape"),
    "another rank": (lambda t: t | {A: t[A][:-1].copy()}, "of the shape"),
    "integers": (lambda t: t | {A: t[A].astype(np.int32)}, "is int32"),
    "nothing": (lambda t: {}, "no tensors"),
}
A = f"{LAYER}.lora_A.weight"


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(llama, case, tmp_path):
    _, parts, params, _, _ = llama
    change, words = BAD_TENSORS[case]
    shutil.copy(GOLDEN / "peft" / "all" / CONFIG, tmp_path / CONFIG)
    tensors = safetensors.numpy.load_file(GOLDEN / "peft" / "all" / TENSORS)
    safetensors.numpy.save_file(change(tensors), tmp_path / TENSORS)
    with pytest.raises(UserError, match=words):
        peft.load(tmp_path, params, parts.axes)


def test_incomplete_folders_are_refused_by_name(llama, tmp_path):
    _, parts, params, _, _ = llama
    with pytest.raises(UserError, match=CONFIG):
        peft.load(tmp_path, params, parts.axes)
    shutil.copy(GOLDEN / "peft" / "all" / CONFIG, tmp_path / CONFIG)
    with pytest.raises(UserError, match=TENSORS):
        peft.load(tmp_path, params, parts.axes)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="safe_serialization"):
        peft.load(tmp_path, params, parts.axes)
    (tmp_path / TENSORS).write_bytes(b"\x08" + bytes(7) + b"{}      ")
    with pytest.raises(UserError, match="no tensors"):
        peft.load(tmp_path, params, parts.axes)


def test_another_models_adapters_are_refused():
    parts = decoder.parts(decoder.DecoderConfig(layers=2, width=32, heads=4, kv_heads=4, mlp=64))
    params = parts.init(jax.random.key(0))
    with pytest.raises(UserError, match="of the shape"):
        peft.load(GOLDEN / "peft" / "all", params, parts.axes)
    assert not isinstance(params["blocks"]["mlp"]["up"], LowRank)
