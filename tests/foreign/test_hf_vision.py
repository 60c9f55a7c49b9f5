"""Qwen2-VL against golden files of transformers 5 (tests/golden/make_hf.py qwen2_vl)."""

import dataclasses
import functools
import json
import pathlib
import subprocess

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.foreign import hf
from megajax.models import vlm, vlm_names
from megajax.parallel import sharding
from tests.vision_rows import Sample, batch, row

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "hf_qwen2_vl.npz")
TENSORS = {k.removeprefix("tensor:"): GOLDEN[k] for k in GOLDEN if k.startswith("tensor:")}
CONFIG = json.loads(str(GOLDEN["config"]))
ROWS = ("none", "one", "three", "wide", "resized")


def write(folder, config=CONFIG, tensors=TENSORS):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return hf.load(write(tmp_path_factory.mktemp("theirs") / "model"))


def golden(name):
    """A row's sample, with transformers' patches."""
    if name == "none":
        return Sample(GOLDEN["none:tokens"], [], [])
    grids = [tuple(map(int, grid)) for grid in GOLDEN[f"{name}:grids"]]
    cuts = np.cumsum([4 * i * j for i, j in grids])[:-1]
    return Sample(GOLDEN[f"{name}:tokens"], grids, np.split(GOLDEN[f"{name}:patches"], cuts))


def test_logits_are_those_of_transformers(loaded):
    """Each row alone, and all of them packed into one row."""
    cfg, params = loaded
    logits = jax.jit(vlm.parts(cfg).logits)
    samples = [golden(name) for name in ROWS]
    made = functools.partial(row, tokens=192, patches=512, cfg=cfg)
    rows = [made([one]) for one in samples] + [made(samples)]
    ours = np.asarray(logits(params, batch(rows)))[..., : cfg.vocab]
    start = 0
    for i, name in enumerate(ROWS):
        expected, stop = GOLDEN[f"{name}:logits"], start + len(samples[i].tokens)
        np.testing.assert_allclose(ours[i, : len(expected)], expected, atol=2e-4, err_msg=name)
        np.testing.assert_allclose(ours[-1, start:stop], expected, atol=2e-4, err_msg=name)
        start = stop


@pytest.mark.parametrize("name", ROWS)
def test_positions_are_those_of_transformers(name):
    sample = golden(name)
    positions_3S = vlm.positions(sample.tokens, sample.grids, CONFIG["image_token_id"])
    np.testing.assert_array_equal(positions_3S, GOLDEN[f"{name}:positions"])
    if name != "none":  # the order of the patches in the rows of these tests is transformers', too
        host = row([sample], 192, 512, hf_config())
        places = GOLDEN[f"{name}:patch_places"]
        np.testing.assert_array_equal(host["patch_places"][: len(places)], places)


def hf_config(**changes):
    return vlm_names.from_hf_config(CONFIG | changes)


def test_export_is_bit_for_bit(tmp_path):
    """Their tensors -> ours, cut over a mesh -> their tensors -> ours again; both frames of the
    patch kernel are kept."""
    layout = sharding.layout(MeshSpec(data=2, tensor=1).build(jax.devices()[:2]), model=hf_config())
    cfg, params = hf.load(write(tmp_path / "theirs"), layout)
    hf.save(params, cfg, tmp_path / "ours")
    exported = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert set(exported) == set(TENSORS)
    for key, tensor in TENSORS.items():
        np.testing.assert_array_equal(exported[key], tensor, err_msg=key)
    kernel = exported["visual.patch_embed.proj.weight"]
    assert (kernel[:, :, 0] != kernel[:, :, 1]).any()
    again, params2 = hf.load(tmp_path / "ours")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, params, params2)


@pytest.mark.slow
def test_transformers_computes_the_same_from_an_export(loaded, tmp_path, request):
    """Its own image processor with the limits of pixels that the folder states."""
    python = request.config.getoption("--transformers_python")
    if python is None:
        pytest.skip("needs --transformers_python=PATH, a Python with transformers and torch")
    cfg, params = loaded
    tower = dataclasses.replace(cfg.tower, min_pixels=28 * 28, max_pixels=28 * 28 * 36)
    hf.save(params, dataclasses.replace(cfg, tower=tower), tmp_path / "ours")
    make = pathlib.Path(__file__).parents[1] / "golden" / "make_hf.py"
    run = subprocess.run(
        [python, make, "check", tmp_path / "ours"], capture_output=True, text=True, check=True
    )
    apart = json.loads(run.stdout.splitlines()[-1])
    assert apart.keys() == {*ROWS} and max(apart.values()) < 1e-5


@pytest.mark.parametrize("layout", ["4.52", "no head"])
def test_other_spellings_of_the_tensors(layout, loaded, tmp_path):
    def spelled(name):
        body = name.removeprefix("model.")
        if layout == "no head":
            return name if body == name else f"language_model.{body}"
        if name == "lm_head.weight":
            return name
        return f"model.{name}" if body == name else f"model.language_model.{body}"

    tensors = {spelled(name): x for name, x in TENSORS.items()}
    if layout == "no head":
        tensors = {n: x for n, x in tensors.items() if n != "lm_head.weight"}
        config = CONFIG | {"tie_word_embeddings": True}
        cfg, params = hf.load(write(tmp_path / "x", config, tensors))
        assert cfg.tied
    else:
        cfg, params = hf.load(write(tmp_path / "x", tensors=tensors))
    for name, x in named_leaves(params):
        np.testing.assert_array_equal(x, dict(named_leaves(loaded[1]))[name])


RELEASE = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def test_the_release_is_the_preset():
    """The members of the release's config.json, flat, and those that transformers 5 saves of it."""
    cfg = vlm.PRESETS["qwen2_vl_2b"]()
    assert vlm_names.from_hf_config(RELEASE) == cfg
    text = ("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings")
    text += ("max_window_layers", "num_attention_heads", "num_hidden_layers", "vocab_size")
    text += ("num_key_value_heads", "rms_norm_eps", "sliding_window", "use_sliding_window")
    nested = {n: RELEASE[n] for n in text} | {"tie_word_embeddings": True}
    nested["rope_parameters"] = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    outer = {n: x for n, x in RELEASE.items() if n not in text}
    for name in ("rope_scaling", "rope_theta", "tie_word_embeddings"):
        outer.pop(name)
    assert vlm_names.from_hf_config(outer | {"text_config": nested}) == cfg
    assert vlm_names.from_hf_config(RELEASE | {"text_config": nested}) == cfg


@pytest.mark.parametrize("name", ["qwen2_vl_2b", "qwen2_vl_7b"])
def test_config_json_round_trip(name):
    cfg = vlm.PRESETS[name]()
    members = json.loads(json.dumps(vlm_names.to_hf_config(cfg, "bfloat16")))
    assert vlm_names.from_hf_config(members) == cfg


def test_limits_of_pixels_come_from_the_folder(tmp_path):
    folder = write(tmp_path / "x")
    for limits in (
        {"min_pixels": 784, "max_pixels": 12845056},
        {"size": {"shortest_edge": 784, "longest_edge": 12845056}},
    ):
        (folder / vlm_names.PROCESSOR).write_text(json.dumps(limits))
        tower = hf.load_config(folder).tower
        assert (tower.min_pixels, tower.max_pixels) == (784, 12845056)
    (folder / vlm_names.PROCESSOR).write_text('{"min_pixels": "784"}')
    with pytest.raises(UserError, match="min_pixels is '784', it must be a whole number"):
        hf.load_config(folder)


@pytest.mark.parametrize(
    "place, changes, said",
    [
        ("", {"model_type": "qwen2_5_vl"}, "model_type 'qwen2_5_vl' is not one of .*qwen2_vl"),
        ("", {"frobnicate": 3}, "frobnicate=3 is no member"),
        ("", {"vision_config": 3}, "vision_config is 3, it must be an object"),
        ("", {"image_token_id": 101}, "model.image_token=101 must be below model.vocab=101"),
        ("", {"hidden_size": 64}, "hidden_size=64 and text_config.hidden_size=32 are two words"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ("text_config", {"rope_parameters": None}, "mrope_section must be stated once"),
        ("text_config", {"rope_parameters": {"mrope_section": [2, 3]}}, "it must be three whole"),
        ("text_config", {"rope_parameters": {"mrope_section": [2, 2, 2]}}, "with the sum 8"),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [2, 3, 3], "rope_type": "yarn", "factor": 2.0}},
            "longrope, dynamic or yarn are for models that read text only",
        ),
        ("vision_config", {"hidden_act": "silu"}, "hidden_act=silu is not supported"),
        ("vision_config", {"hidden_size": 64}, "hidden_size=64 is not supported, only 32"),
        ("vision_config", {"depth": 10**9}, "depth is 1000000000, it must be a whole number"),
        ("vision_config", {"fullatt_block_indexes": [1]}, "fullatt_block_indexes=.* is no member"),
        ("vision_config", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta=5.0 is not supp"),
        ("vision_config", {"num_heads": 3}, "tower.width=16 must be divisible by 4 x tower.heads"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(place, changes, said, tmp_path):
    config = CONFIG | (changes if not place else {place: CONFIG[place] | changes})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        hf.load_config(tmp_path)


def test_what_the_family_cannot_hold_is_not_exported(tmp_path):
    cfg = hf_config()
    for changed, said in (
        (dataclasses.replace(cfg, mrope=None), "model.mrope"),
        (dataclasses.replace(cfg, tower=dataclasses.replace(cfg.tower, mlp=40)), "a multiple of"),
        (dataclasses.replace(cfg, tower=dataclasses.replace(cfg.tower, norm_eps=1e-5)), "norm_eps"),
    ):
        with pytest.raises(UserError, match=f"qwen2_vl cannot hold this model.*{said}"):
            vlm_names.rules(changed)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    kernel = "visual.patch_embed.proj.weight"
    tensors = TENSORS | {kernel: np.ascontiguousarray(TENSORS[kernel][:, :, :1])}
    folder = write(tmp_path / "x", tensors=tensors)
    with pytest.raises(UserError, match=f"{kernel} has shape .16, 3, 1, 14, 14., .*2, 14, 14"):
        hf.load(folder)
    with pytest.raises(UserError, match="holds a vision-language model .qwen2_vl.; this program"):
        hf.load_decoder_config(folder)
