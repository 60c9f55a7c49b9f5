"""What is opened to sample or to serve: configuration, tokenizer, chat template, parameters."""

import json
import math
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.data.tokenizer import FileTokenizer, train_bpe
from megajax.foreign import hf_quantized
from megajax.quant.kernel import QuantKernel
from megajax.serving import Engine, SamplingParams
from megajax.systems.open_model import open_model
from tests import gguf_writer as w

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "hf_llama.npz"
QUANTIZED = GOLDEN.parent / "quantized"  # by tests/golden/make_quantized.py


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A Hugging Face folder whose tokenizer fits its vocabulary."""
    folder = tmp_path_factory.mktemp("hf") / "theirs"
    folder.mkdir()
    golden = np.load(GOLDEN)
    config = json.loads(str(golden["config"])) | {"vocab_size": 300}
    tensors = {k[7:]: golden[k] for k in golden.files if k.startswith("tensor:")}
    for name, tensor in tensors.items():
        if tensor.shape[0] == 101:
            tensors[name] = np.resize(tensor, (300, *tensor.shape[1:]))
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    train_bpe(["some text to learn"], 260, folder / "tokenizer.json")
    return folder


def test_a_folder_opens_before_its_parameters_are_read(theirs):
    opened = open_model(hf=str(theirs))
    assert (opened.name, opened.cfg.vocab, opened.chat) == ("theirs", 300, None)
    assert opened.tokenizer.decode(opened.tokenizer.encode(["some text"])[0]) == "some text"
    mesh = MeshSpec(tensor=2).build(jax.devices()[:2])
    params, what = opened.load_to_serve(mesh)
    assert what == f"{theirs}, tensor 2 on 2 emulated cpu"
    table = dict(named_leaves(params))["tokens"]
    stored = safetensors.numpy.load_file(theirs / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(table)[:300], stored)
    assert len(table.sharding.device_set) == 2


def test_quantized_at_the_start_or_as_stored(theirs, tmp_path):
    """Both ways the engine multiplies by the same codes, and draws the same tokens."""
    opened = open_model(hf=str(theirs))
    mesh = MeshSpec().build(jax.devices()[:1])
    params, what = opened.load_to_serve(mesh, "int8")
    assert what.endswith("in int8") and isinstance(params["blocks"]["mlp"]["up"], QuantKernel)
    host = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)
    hf_quantized.save(host, opened.cfg, tmp_path / "gptq", tokenizer=theirs)
    again, what = open_model(hf=str(tmp_path / "gptq")).load_to_serve(mesh)
    assert "(gptq, 8 bits)" in what
    tokens = []
    for weights in (params, again):
        engine = Engine(opened.cfg, weights, mesh=mesh, pages=8, page_size=8, dtype="float32")
        engine.submit([1, 2, 3], SamplingParams(max_tokens=6, temperature=0))
        tokens.append([t for output in engine.run() for t in output.tokens])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6
    with pytest.raises(UserError, match="quantized as it is stored"):
        open_model(hf=str(tmp_path / "gptq")).load_to_serve(mesh, "int4")
    with pytest.raises(UserError, match="mesh has 2 of them"):
        opened.load_to_serve(MeshSpec(tensor=2).build(jax.devices()[:2]), "int8")


@pytest.mark.parametrize("case", ["gptq4_order", "awq4"])
def test_a_folder_of_another_program_is_served(case, tmp_path):
    """Its first greedy token is that of its logits, also where the rows of a group lie apart."""
    shutil.copytree(QUANTIZED / case, tmp_path / "m")
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(120)}, unk_token="t0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "m" / "tokenizer.json"))
    opened, mesh = open_model(hf=str(tmp_path / "m")), MeshSpec().build(jax.devices()[:1])
    params, _ = opened.load_to_serve(mesh)
    assert (params["blocks"]["mlp"]["up"].order is not None) == (case == "gptq4_order")
    engine = Engine(opened.cfg, params, mesh=mesh, pages=8, page_size=8, dtype="float32")
    with np.load(QUANTIZED / case / "expected.npz") as file:
        (prompt, _), logits = file["tokens"].tolist(), file["logits"]
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0))
    (output,) = engine.run()
    assert output.tokens == [np.argmax(logits[0, -1])]


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"tokenizer_config.json": {"chat_template": "{{ x }}"}}, "{{ x }}"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ],
                }
            },
            "d",
        ),
        ({"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "new"}, "new"),
        ({"tokenizer_config.json": {}}, None),
    ],
)
def test_a_chat_template_lies_beside_the_tokenizer(theirs, tmp_path, files, source):
    FileTokenizer(theirs / "tokenizer.json", "").copy_to(tmp_path / "other")
    for name, content in files.items():
        if isinstance(content, dict):
            content = json.dumps(content | {"bos_token": "<|bos|>"})
        (tmp_path / "other" / name).write_text(content)
    # The tokenizer's copy, as a run makes one, has the template too.
    FileTokenizer(tmp_path / "other" / "tokenizer.json", "").copy_to(tmp_path / "copy")
    for place in ("other", "copy"):
        chat = open_model(hf=str(theirs), tokenizer=str(tmp_path / place)).chat
        assert (chat and chat.source) == source
        assert chat is None or (chat.begin, chat.end) == ("<|bos|>", "")


def test_a_template_that_is_no_text_is_refused(theirs, tmp_path):
    FileTokenizer(theirs / "tokenizer.json", "").copy_to(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(UserError, match="chat_template is no text; it must be a Jinja template"):
        open_model(hf=str(theirs), tokenizer=str(tmp_path))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="chat_template.jinja is no text in UTF-8"):
        open_model(hf=str(theirs), tokenizer=str(tmp_path))


@pytest.mark.parametrize("sources", [{}, {"run_dir": "a", "hf": "b"}, {"hf": "a", "gguf": "b"}])
def test_exactly_one_source_is_opened(sources):
    with pytest.raises(UserError, match="give one of --run_dir, --hf and --gguf"):
        open_model(**sources)


def test_a_gguf_file_has_everything_in_it(tmp_path):
    file = tmp_path / "small.gguf"
    tensors = w.llama_tensors(np.random.default_rng(0))
    file.write_bytes(w.gguf(w.llama() | w.vocabulary(), tensors))
    opened = open_model(gguf=str(file))
    assert (opened.name, opened.cfg.vocab, opened.tokenizer.begin) == ("small.gguf", 262, None)
    assert opened.chat is not None and opened.chat.source.startswith("{{ bos_token }}")
    assert (opened.chat.begin, opened.chat.end) == ("<|begin|>", "<|end|>")
    params, what = opened.load_to_serve(MeshSpec(tensor=2).build(jax.devices()[:2]))
    assert what == f"{file}, tensor 2 on 2 emulated cpu"
    table = np.frombuffer(tensors[0].data, np.float32).reshape(262, 32)
    np.testing.assert_array_equal(np.asarray(params["tokens"])[:262], table)
    opened.tokenizer.copy_to(tmp_path / "other")
    again = open_model(gguf=str(file), tokenizer=str(tmp_path / "other"))
    assert again.chat == opened.chat and again.tokenizer.identity == opened.tokenizer.identity


RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize(
    ("said", "values"),
    [
        (RECOMMENDED | {"do_sample": True, "max_length": 5, "typical_p": 0.3}, RECOMMENDED),
        (RECOMMENDED, RECOMMENDED),  # vLLM heeds no do_sample
        (RECOMMENDED | {"do_sample": False}, RECOMMENDED | {"temperature": 0.0}),
        (
            {"do_sample": False, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1, "temperature": 0.0},
        ),
        (
            {"min_p": 0, "top_k": -1, "temperature": None, "eos_token_id": 1},
            {"min_p": 0, "top_k": -1},
        ),
        ({"do_sample": None}, {}),
        (None, {}),
    ],
)
def test_a_folder_recommends_how_to_sample(theirs, tmp_path, said, values):
    shutil.copytree(theirs, tmp_path / "m")
    if said is not None:
        (tmp_path / "m" / "generation_config.json").write_text(json.dumps(said))
    got, line = open_model(hf=str(tmp_path / "m")).sampling_defaults()
    assert got == values and bool(line) == bool(values)
    if values == RECOMMENDED:
        assert "generation_config.json: temperature=0.6, top_k=20, top_p=0.95 (--" in line


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"temperature": -0.5}, "temperature=-0.5 must be in [0, 1e+30]; nearest: 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be in (0, 1]"),
        ({"top_k": 20.0}, "top_k=20.0 must be of type int; nearest: 20"),
        ({"min_p": float("nan")}, "min_p=nan must be a finite number"),
        ({"repetition_penalty": ["x" * 999] * 99}, "repetition_penalty=['xxx"),
        ({"do_sample": "no"}, "do_sample='no' must be true or false"),
    ],
)
def test_a_recommendation_that_no_request_may_have_is_refused(theirs, tmp_path, said, words):
    shutil.copytree(theirs, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(said))
    opened = open_model(hf=str(tmp_path / "m"))  # sampled with --sampling_defaults=none
    with pytest.raises(UserError) as error:
        opened.sampling_defaults()
    text = str(error.value)
    assert "generation_config.json: " + words in text and "--sampling_defaults=none" in text
    assert len(text) < 600


def test_dense_weights_that_exceed_the_memory_stay_in_the_bits_of_the_file(tmp_path, monkeypatch):
    tensors = w.llama_tensors(np.random.default_rng(0))
    files = {"dense": tensors, "few": w.in_four_bits(tensors)}
    for name, stored in files.items():
        (tmp_path / name).write_bytes(w.gguf(w.llama() | w.vocabulary(), stored))
    opened = open_model(gguf=str(tmp_path / "few"))
    mesh = MeshSpec().build(jax.devices()[:1])
    size = 2 * (sum(math.prod(t.sizes) for t in tensors) + (384 - 262) * 32)  # padded vocabulary
    for free, dtype, packs in (
        (size, "bfloat16", False),
        (size - 1, "bfloat16", True),
        (size, "float32", True),
        (math.inf, "float32", False),
    ):
        monkeypatch.setattr("megajax.systems.open_model.free_bytes", lambda _, n=free: n)
        reason = opened.too_large(mesh, dtype)
        assert bool(reason) == packs, (free, dtype)
        assert not packs or re.fullmatch(
            r"dense weights need [.\d]+ GiB, and [.\d]+ GiB .*", reason
        )
    monkeypatch.setattr("megajax.systems.open_model.free_bytes", lambda _: 0)
    assert not opened.too_large(MeshSpec(tensor=2).build(jax.devices()[:2]), "float32")
    assert not open_model(gguf=str(tmp_path / "dense")).too_large(mesh, "float32")
    with pytest.raises(UserError, match="leave out one .--weights, --quantize"):
        opened.load_to_serve(mesh, "int4", packed=True)


def test_a_gguf_file_recommends_how_to_sample(tmp_path):
    """By llama.cpp's keys; its numbers are of float32."""
    keys = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 64,
        "general.sampling.top_p": 0.75,
        "general.sampling.min_p": 0.125,
        "general.sampling.penalty_repeat": 1.25,
        "general.sampling.mirostat": 2,
    }
    file, tensors = tmp_path / "small.gguf", w.llama_tensors(np.random.default_rng(0))
    file.write_bytes(w.gguf(w.llama() | w.vocabulary() | keys, tensors))
    assert open_model(gguf=str(file)).sampling_defaults()[0] == {
        "temperature": 0.5,
        "top_k": 64,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
    }
    file.write_bytes(w.gguf(w.llama() | w.vocabulary() | {"general.sampling.temp": -1.0}, tensors))
    with pytest.raises(UserError, match=r"gguf: general\.sampling\.temp=-1.0 must be in"):
        open_model(gguf=str(file)).sampling_defaults()
