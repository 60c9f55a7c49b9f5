"""What an export has beside its weights, so that others can use it."""

import json
import pathlib
import subprocess
import sys

import pytest

from megajax.data.token_ids import Settings, template
from megajax.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer, train_bpe
from megajax.foreign import companions, hf
from tests.foreign.test_hf import unpack

ROOT = pathlib.Path(__file__).parent.parent.parent
TEXTS = ["naïve café <|eos|> x", "  a\n\n\tb ", "", "\u2028\x00 <|bos|>", "汉字 🙂"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model: (configuration, parameters)."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    unpack("llama", folder)
    return hf.load(folder)


def export(model, folder, tokenizer, licences=()):
    cfg, params = model
    hf.save(params, cfg, folder, "bfloat16", tokenizer=tokenizer, licences=licences)
    names = "config.json", "generation_config.json", "tokenizer_config.json"
    members = [json.loads((folder / n).read_text()) for n in names]
    assert hf.load(folder)[0] == cfg
    return members


def test_a_bpe_of_ours_tells_others_where_texts_begin_and_end(model, tmp_path):
    train_bpe(TEXTS * 3, 300, tmp_path / "made" / "tokenizer.json")
    config, generation, settings = export(model, tmp_path / "hf", tmp_path / "made")
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    assert {k: config[k] for k in ids} == ids == generation
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (settings["bos_token"], settings["eos_token"]) == ("<|bos|>", "<|eos|>")
    made = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    assert made["post_processor"] == template(("<|bos|>", 0))
    ours, theirs = open_tokenizer(str(tmp_path / "made")), open_tokenizer(str(tmp_path / "hf"))
    assert (theirs.begin, theirs.end, theirs.ends) == (0, 1, (1,))
    for a, b in zip(ours.encode(TEXTS), theirs.encode(TEXTS), strict=True):
        assert a.tolist() == b.tolist()


def test_bytes_become_a_tokenizer_with_the_same_ids(model, tmp_path):
    config, _, settings = export(model, tmp_path / "hf", "bytes")
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)
    assert (settings["bos_token"], settings["eos_token"]) == ("<|bos|>", "<|eos|>")
    tokenizer = open_tokenizer(str(tmp_path / "hf"))
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocab) == (256, 257, ByteTokenizer.vocab)
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert ids.tolist() == list(text.encode()) and tokenizer.decode(ids) == text


def test_files_of_the_source_travel_and_get_what_they_lack(model, tmp_path):
    source = tmp_path / "source"
    train_bpe(TEXTS, 300, source / "tokenizer.json")
    for name, content in {
        "tokenizer_config.json": {"eos_token": "<|eos|>", "pad_token": "a", "extra": 5},
        "generation_config.json": {"eos_token_id": [1, 7], "top_k": 3},
        "config.json": {"model_type": "llama", "eos_token_id": 9},
    }.items():
        (source / name).write_text(json.dumps(content))
    for name in ("chat_template.jinja", "LICENSE", "README.md", "weights.bin"):
        (source / name).write_text(name)
    licences = companions.licences([tmp_path / "nowhere", None, source])
    config, generation, settings = export(model, tmp_path / "hf", source, licences)
    pad = open_tokenizer(str(source)).id_of("a")
    assert config["eos_token_id"] == [1, 7] and config["pad_token_id"] == pad
    assert generation["eos_token_id"] == [1, 7] and generation["top_k"] == 3
    assert (settings["eos_token"], settings["extra"]) == ("<|eos|>", 5)
    for name in ("chat_template.jinja", "LICENSE", "README.md"):
        assert (tmp_path / "hf" / name).read_text() == name
    assert not (tmp_path / "hf" / "weights.bin").exists()
    assert open_tokenizer(str(tmp_path / "hf")).ends == (1, 7)


def test_a_tokenizer_without_files_is_written_too(model, tmp_path):
    """Of a GGUF file, whose chat template is inside."""
    train_bpe(TEXTS, 300, tmp_path / "tokenizer.json")
    raw = (tmp_path / "tokenizer.json").read_bytes()
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    tokenizer = JsonTokenizer(
        raw, Settings(named, (1,), silent=False, chat_template="{{ x }}"), "gguf"
    )
    config, _, settings = export(model, tmp_path / "hf", tokenizer)
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert settings["chat_template"] == "{{ x }}"
    assert open_tokenizer(str(tmp_path / "hf")).begin is None  # no post_processor says so


@pytest.mark.slow
def test_transformers_stops_where_documents_ended(tmp_path, request):
    """A run that has learnt four sentences, exported; transformers generates until it stops."""
    python = request.config.getoption("--transformers_python")
    if python is None:
        pytest.skip("needs --transformers_python=PATH, a Python with transformers and torch")
    (tmp_path / "text").mkdir()
    for i in range(160):
        said = f"story {i % 4} is about the animal number {i % 4}."
        (tmp_path / "text" / f"{i}.txt").write_text(said)

    def call(*words):
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for tokenizer in ("bpe:300", "bytes"):
        run, out = tmp_path / tokenizer / "run", tmp_path / tokenizer / "hf"
        call(
            sys.executable, ROOT / "experiments" / "pretrain.py", f"--data.source={tmp_path}/text/",
            f"--data.tokenizer={tokenizer}", "--data.holdout=0", "--model.layers=1",
            "--model.vocab=300", "--train.steps=80", "--train.global_batch=8", "--train.seq_len=64",
            "--eval.sample_tokens=0", "--eval.batches=0", "--emulate=1", f"--run_dir={run}",
            f"--cache_dir={tmp_path}/cache",
        )  # fmt: skip
        call(sys.executable, ROOT / "scripts" / "hf.py", "export", run, out)
        check = ROOT / "tests" / "golden" / "check_export.py"
        plain = [t for t in TEXTS if "<|" not in t]  # there, its text is the token
        reply = json.loads(call(python, check, out, "story 2 is", *plain).splitlines()[-1])
        assert reply["stopped"] and reply["text"].startswith("story 2 is about the animal number")
        ours = open_tokenizer(str(out))
        assert (reply["bos"], reply["eos"], reply["tokenizer_eos"]) == (
            ours.begin,
            ours.end,
            ours.end,
        )
        expected = [ours.prefix() + ids.tolist() for ids in ours.encode(plain)]
        assert reply["ids"] == expected and reply["decoded"] == plain
