"""GPT-OSS and DeepSeek-V3 against transformers: files of tests/golden/make_hf_experts.py."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from megajax.core import tree
from megajax.core.errors import UserError
from megajax.foreign import hf, mxfp4
from megajax.models import decoder, names
from megajax.serving.engine import Engine
from megajax.serving.params import SamplingParams

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FAMILIES = "gpt_oss", "deepseek_v3"
PROMPT = 5  # tokens of the first row, to which the answer is


def seldom(name):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    """(what the golden file holds, the folder that transformers would have saved)."""
    with np.load(GOLDEN / f"hf_{request.param}.npz") as file:
        golden = dict(file)
    write(tmp_path, golden, "tensor:")
    return golden, tmp_path


def write(folder, golden, kind):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(golden["config"]))
    tensors = {k.removeprefix(kind): x for k, x in golden.items() if k.startswith(kind)}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("folder", [seldom("gpt_oss"), "deepseek_v3"], indirect=True)
def test_logits_gradients_and_the_answer(folder):
    golden, path = folder
    cfg, params = hf.load(path)
    assert names.family(cfg) == path_family(golden)
    parts, tokens = decoder.parts(cfg), golden["tokens"]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    targets = np.concatenate([tokens[:, 1:], np.full((2, 1), -1, np.int32)], 1)
    batch = {"tokens": tokens, "positions": positions, "targets": targets}
    batch = {k: jnp.asarray(x) for k, x in batch.items()}

    def loss(params):
        x, _ = parts.hidden(params, batch, None, "none")
        return parts.head_loss(params, x, batch).cross_entropy / float((targets >= 0).sum()), x

    (_, x), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    logits = np.asarray(parts.head(params, x))[..., : cfg.vocab]
    assert np.abs(golden["logits"]).max() > 1
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-4)
    check_gradients(cfg, gradients, golden)

    check_answer(cfg, params, tokens, golden["answer"])


def check_answer(cfg, params, tokens, answer):
    engine = Engine(cfg, params, dtype="float32", page_size=4, max_batch=1, context=32)
    sampling = SamplingParams(max_tokens=len(answer), temperature=0)
    engine.submit(tokens[0, :PROMPT].tolist(), sampling)
    assert [t for out in engine.run() for t in out.tokens] == answer.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["gpt_oss", "deepseek_v3"], indirect=True)
def test_yarn(folder, tmp_path):
    """Tables of both families, and the factor of DeepSeek-V3's logits; also once written again."""
    golden, path = folder
    write(path, golden | {"config": golden["yarn_config"]}, "tensor:")
    cfg, params = hf.load(path)
    tokens = jnp.asarray(golden["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = decoder.parts(cfg).logits(params, {"tokens": tokens, "positions": positions})
    assert np.abs(golden["yarn_logits"] - golden["logits"]).max() > 1
    np.testing.assert_allclose(logits[..., : cfg.vocab], golden["yarn_logits"], atol=2e-4)
    check_answer(cfg, params, golden["tokens"], golden["yarn_answer"])
    hf.save(params, cfg, tmp_path / "written")
    assert hf.load_config(tmp_path / "written") == cfg


def path_family(golden):
    return json.loads(str(golden["config"]))["model_type"]


def check_gradients(cfg, gradients, golden):
    """Every leaf's gradient against that of the tensors that it was read from."""
    sizes, leaves = names.sizes(cfg), dict(tree.named_leaves(gradients))
    compared = 0
    for rule in names.rules(cfg):
        for index in np.ndindex(rule.stack(sizes)):
            theirs = golden.get(f"gradient:{rule.name(index)}")
            if theirs is None:
                assert rule.ours == "blocks.moe.bias"  # which has none
                continue
            want = rule.to_ours(theirs, sizes)
            ours = np.asarray(leaves[rule.ours])[index][tuple(slice(n) for n in want.shape)]
            apart = np.linalg.norm(ours - want) / max(np.linalg.norm(want), 1e-6)
            assert apart < 1e-3, (rule.ours, index, apart)
            compared += np.linalg.norm(want) > 1e-6
    assert compared > 30


def test_written_folders_are_read_again(folder, tmp_path):
    _, path = folder
    cfg, params = hf.load(path)
    hf.save(params, cfg, tmp_path / "written")
    again, back = hf.load(tmp_path / "written")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax is not supported"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "must be below num_hidden_layers=3"),
        ("deepseek_v3", {"index_topk": 8}, "index_topk=8 is no member"),
        ("deepseek_v3", {"auto_map": {"AutoModel": "modeling_other.Model"}}, "auto_map names code"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 types for 2 layers"),
        ("gpt_oss", {"sliding_window": None}, "there is no window"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=False is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(kind, changes, words):
    with np.load(GOLDEN / f"hf_{kind}.npz") as golden:
        config = json.loads(str(golden["config"]))
    with pytest.raises(UserError, match=re.escape(words)):
        names.from_hf_config(config | changes)


@pytest.mark.parametrize("folder", ["deepseek_v3"], indirect=True)
def test_layers_that_predict_more_are_left_out(folder, caplog):
    """They are behind the last one; published folders name their code too, which is built in."""
    golden, path = folder
    cfg, params = hf.load(path)
    more = {"tensor:model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    config = json.loads(str(golden["config"])) | {"num_nextn_predict_layers": 1}
    config.pop("num_mtp_layers", None)
    config["auto_map"] = {"AutoModel": "modeling_deepseek.DeepseekV3Model"}
    write(path, golden | more | {"config": json.dumps(config)}, "tensor:")
    again, back = hf.load(path)
    assert again == cfg
    assert "1 tensors of layers that predict further tokens are not read" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, back, params)


# ---- experts in MXFP4


def test_all_codes_and_scales():
    """Against the formula in float64, and what transformers makes of the same bytes."""
    with np.load(GOLDEN / "mxfp4.npz") as golden:
        blocks, scales, theirs = (golden[n] for n in ("blocks", "scales", "values"))
    values = mxfp4.dequantize(blocks, scales)
    np.testing.assert_array_equal(values.transpose(0, 2, 1), theirs)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32).astype(int)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    want = (1.0 - 2 * sign) * size * 2.0 ** (scales[..., None].astype(int) - 127)
    np.testing.assert_array_equal(values, want.reshape(values.shape))
    packed = mxfp4.Packed("x", blocks, scales)
    inner = slice(1, 3), slice(30, 70), slice(1, 3)
    part = packed.part(inner, (1, 2))
    np.testing.assert_array_equal(part, theirs[1:3, 30:70, [3, 5]])


def mxfp4_folder(golden, path, **changes):
    """Writes GPT-OSS's golden model, twice as wide, with experts in MXFP4; returns its values."""
    random = np.random.default_rng(0)
    config = json.loads(str(golden["config"])) | {"hidden_size": 32, "intermediate_size": 32}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    tensors, values = {}, {}
    like = hf.names.from_hf_config(config)
    sizes = names.sizes(like)
    for rule in names.rules(like):
        for index in np.ndindex(rule.stack(sizes)):
            name, shape = rule.name(index), rule.their_shape(sizes)
            if "_proj" in name and ".experts." in name and "bias" not in name:
                E, K, N = shape
                halves = {
                    "_blocks": random.integers(0, 256, (E, N, K // 32, 16)).astype(np.uint8),
                    "_scales": random.integers(120, 124, (E, N, K // 32)).astype(np.uint8),
                }
                if f"{name}_blocks" not in tensors:
                    tensors |= {name + end: x for end, x in halves.items()}
                both = (tensors[name + end] for end in halves)
                values[name] = mxfp4.dequantize(*both).transpose(0, 2, 1)
            else:
                tensors[name] = values[name] = random.standard_normal(shape).astype(np.float32)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors | changes, path / "model.safetensors")
    return values, tensors


@pytest.mark.parametrize("folder", ["gpt_oss"], indirect=True)
def test_experts_in_mxfp4_are_dequantized(folder, tmp_path):
    golden, _ = folder
    values, tensors = mxfp4_folder(golden, tmp_path / "packed")
    cfg, params = hf.load(tmp_path / "packed")
    sizes, leaves = names.sizes(cfg), dict(tree.named_leaves(params))
    for rule in names.rules(cfg):
        for index in np.ndindex(rule.stack(sizes)):
            want = rule.to_ours(values[rule.name(index)], sizes)
            ours = np.asarray(leaves[rule.ours])[index][tuple(slice(n) for n in want.shape)]
            np.testing.assert_array_equal(ours, want, err_msg=rule.name(index))
    name = "model.layers.1.mlp.experts.down_proj"
    for changes, words in (
        ({f"{name}_blocks": tensors[f"{name}_blocks"][:, :-1]}, "config.json says uint8"),
        ({f"{name}_scales": tensors[f"{name}_scales"][..., None]}, "config.json says uint8"),
        ({f"{name}_scales": tensors[f"{name}_scales"] * 0 + np.uint8(255)}, "no number"),
        ({f"{name}_blocks": tensors[f"{name}_blocks"].astype(np.int16)}, "is int16"),
    ):
        mxfp4_folder(golden, tmp_path / "packed", **changes)
        with pytest.raises(UserError, match=words):
            hf.load(tmp_path / "packed")
