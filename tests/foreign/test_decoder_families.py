"""Gemma 3, OLMo 2, SmolLM3 and Phi-3 against transformers (tests/golden/make_families.py)."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.foreign import hf
from megajax.layers.attention import RopeConfig, frequencies, table_factor
from megajax.models import decoder, names
from megajax.models.decoder_config import DecoderConfig
from megajax.serving import Engine, SamplingParams
from megajax.training.step import make_train_step
from tests.plain_loop import SMALL
from tests.tiny import host_batch, on, run_config

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FAMILIES = ["gemma3_text", "olmo2", "smollm3", "phi3"]
PROMPT = 18
slow = pytest.mark.slow


@functools.cache
def golden_of(name):
    with np.load(GOLDEN / f"hf_{name}.npz") as file:
        return dict(file)


def unpack(name, folder, **changes):
    """Writes a golden file out as the folder that transformers would have saved."""
    golden = golden_of(name)
    folder.mkdir(exist_ok=True)
    config = json.loads(str(golden["config"])) | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {k.removeprefix("tensor:"): golden[k] for k in golden if k[:7] == "tensor:"}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return golden, tensors


def batch_of(tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    targets = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), -1, np.int32)], 1)
    return {"tokens": tokens, "positions": positions, "targets": targets}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    golden, tensors = unpack(name, tmp_path)
    cfg, params = hf.load(tmp_path)
    batch, parts = batch_of(golden["tokens"]), decoder.parts(cfg)

    @jax.jit
    def both(params):
        def mean(params):
            sums = parts.loss(params, batch)
            return sums.cross_entropy / sums.count.astype(jnp.float32)

        return parts.logits(params, batch), jax.grad(mean)(params)

    logits, grads = both(params)
    assert np.abs(golden["logits"]).max() > 1.0
    np.testing.assert_allclose(logits[..., : cfg.vocab], golden["logits"], atol=2e-4)
    assert names.family(cfg) == name
    leaves = dict(named_leaves(grads))
    made, produce = hf.tensors_of(leaves, names.rules(cfg), cfg, "float32")
    assert set(made) == set(tensors)
    for key in made:
        theirs = golden[f"grad:{key}"]
        np.testing.assert_allclose(
            produce(key), theirs, atol=1e-3 * np.abs(theirs).max(), err_msg=key
        )


@pytest.mark.parametrize("name", [pytest.param(n, marks=slow) for n in FAMILIES])
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    golden, _ = unpack(name, tmp_path)
    cfg, params = hf.load(tmp_path)
    engine = Engine(cfg, params, **SMALL, pages=40, page_size=4)
    prompt = golden["tokens"][0, :PROMPT].tolist()
    asked = SamplingParams(max_tokens=len(golden["greedy"]), temperature=0)
    engine.submit(prompt, asked)
    tokens = [token for output in engine.run() for token in output.tokens]
    assert tokens == golden["greedy"].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_export_is_bit_for_bit(name, tmp_path):
    _, tensors = unpack(name, tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    hf.save(params, cfg, tmp_path / "ours")
    exported = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert set(exported) == set(tensors)
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(exported[key], tensor, err_msg=key)
    assert hf.load_config(tmp_path / "ours") == cfg


MESHES = [(4, {"mesh__data": 2, "mesh__tensor": 2}), (2, {"mesh__pipe": 2})]


@slow
@pytest.mark.parametrize("name", FAMILIES)
def test_training_on_meshes_has_the_losses_of_one_device(name, tmp_path):
    unpack(name, tmp_path)
    model = dataclasses.replace(hf.load_config(tmp_path), vocab_multiple=16)

    def losses(devices, **changes):
        cfg = dataclasses.replace(run_config(**changes), model=model)
        step = make_train_step(cfg, cfg.mesh.build(jax.devices()[:devices]))
        state, seen = step.init(0), []
        for i in range(2):
            state, metrics = step.step(state, on(step, host_batch(i)))
            seen.append(float(metrics["loss"]))
        return seen

    expected = losses(1)
    for devices, changes in MESHES:
        np.testing.assert_allclose(losses(devices, **changes), expected, atol=2e-5)


@slow
@pytest.mark.parametrize("name", ["gemma3_text", "olmo2"])
def test_engine_on_a_mesh_has_the_tokens_of_transformers(name, tmp_path):
    golden, _ = unpack(name, tmp_path)
    cfg, params = hf.load(tmp_path)
    mesh = MeshSpec(tensor=4).build(jax.devices()[:4])
    engine = Engine(cfg, params, mesh=mesh, **SMALL, pages=40, page_size=4)
    engine.submit(
        golden["tokens"][0, :PROMPT].tolist(), SamplingParams(max_tokens=4, temperature=0)
    )
    tokens = [token for output in engine.run() for token in output.tokens]
    assert tokens == golden["greedy"][:4].tolist()


def test_joined_matrices_of_a_plain_phi_are_split(tmp_path):
    """Phi-4's folder has joined matrices; its arithmetic, and so its export, is Llama's."""
    plain = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}
    _, tensors = unpack("phi3", tmp_path / "theirs", rope_parameters=plain)
    cfg, params = hf.load(tmp_path / "theirs")
    assert names.family(cfg) == "llama"
    hf.save(params, cfg, tmp_path / "ours")
    again, params2 = hf.load(tmp_path / "ours")
    assert again == cfg
    q, k, v = np.split(tensors["model.layers.1.self_attn.qkv_proj.weight"], [32, 48])
    exported = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    for letter, x in zip("qkv", (q, k, v), strict=True):
        name = f"model.layers.1.self_attn.{letter}_proj.weight"
        np.testing.assert_array_equal(exported[name], x)


def test_scaled_frequencies_are_those_of_transformers():
    rows = json.loads((GOLDEN / "rope_scalings.json").read_text())
    for settings, length, expected, factor in rows:
        config = {"model_type": "llama", "max_position_embeddings": 64, "rope_theta": 1e4}
        rope = names._rope(config | {"rope_scaling": settings})
        np.testing.assert_allclose(frequencies(rope, 16, length), expected, rtol=2e-6)
        assert table_factor(rope) == pytest.approx(factor, rel=1e-6)
        settled = rope.at(length, 16)
        np.testing.assert_array_equal(frequencies(settled, 16, 5), frequencies(rope, 16, length))
        cfg = DecoderConfig(rope=rope, max_positions=64, head_width=16, tied=False)
        if settings["rope_type"] != "longrope":
            back = names.from_hf_config(names.to_hf_config(cfg, "float32"))
            assert back.rope == rope


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types has 1 types for 4"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention are not"),
        ("gemma3_text", {"sliding_window": None}, "there is no window"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1.0}}, "each with its own settings"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation=silu is not supported"),
        ("olmo2", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 4}, "only false"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 numbers for 4 layers"),
        ("smollm3", {"no_rope_layers": "no"}, "a list of whole numbers"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "default, longrope"),
        ("phi3", {"embd_layer": {}}, "is no member of transformers' configuration of phi3"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, changes, words):
    config = json.loads(str(golden_of(name)["config"])) | changes
    with pytest.raises(UserError) as error:
        names.from_hf_config(config)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scaling": "longrope"}, "needs model.rope.short_factors"),
        ({"scaling": "longrope", "short_factors": "1,x"}, "finite numbers above 0"),
        ({"scaling": "longrope", "short_factors": "1,-2"}, "finite numbers above 0"),
        ({"scaling": "longrope", "short_factors": "1," * 5000 + "1"}, "at most 4096"),
        ({"partial": 0.0}, "model.rope.partial=0.0 must be in [0.001, 1]"),
    ],
)
def test_impossible_scalings_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        RopeConfig(**changes)
    assert words in str(error.value)
    with pytest.raises(UserError, match="numbers are rotated needs 4"):
        frequencies(RopeConfig(scaling="longrope", short_factors="1,2"), 8)
    with pytest.raises(UserError, match="which must be even"):
        DecoderConfig(head_width=10, rope=RopeConfig(partial=0.5))
