"""Models that are named as at huggingface.co: what their cache holds, and errors."""

import json
import pathlib
import re

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import constants

from megajax.core import config, files
from megajax.core.errors import TemporaryError, UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.data.tokenizer import train_bpe
from megajax.llm import LLM
from megajax.systems.open_model import kind_of, open_model
from megajax.training import chats, presets

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "hf_llama.npz"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """(the name ORG/tiny of a model, its snapshot in the cache) of a user without a network."""
    golden = np.load(GOLDEN)
    said = json.loads(str(golden["config"])) | {"vocab_size": 300}
    tensors = {k[7:]: golden[k] for k in golden.files if k.startswith("tensor:")}
    for name, tensor in tensors.items():
        if tensor.shape[0] == 101:
            tensors[name] = np.resize(tensor, (300, *tensor.shape[1:]))
    org = re.sub(r"\W", "", tmp_path.name)  # a process asks for a name once
    blobs = tmp_path / f"models--{org}--tiny" / "blobs"
    snapshot = blobs.parent / "snapshots" / COMMIT
    (blobs.parent / "refs").mkdir(parents=True)
    (blobs.parent / "refs" / "main").write_text(COMMIT)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "aa").write_text(json.dumps(said))
    safetensors.numpy.save_file(tensors, blobs / "bb")
    train_bpe(["some text to learn"], 260, blobs / "cc")
    for name, blob in (("config", "aa"), ("model", "bb"), ("tokenizer", "cc")):
        end = "safetensors" if name == "model" else "json"
        (snapshot / f"{name}.{end}").symlink_to(f"../../blobs/{blob}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return f"{org}/tiny", snapshot


def test_a_name_is_the_snapshot_in_the_cache_and_a_path_stays(cache, tmp_path, monkeypatch):
    name, snapshot = cache
    assert files.model_folder(name, "hf") == snapshot
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert files.model_folder(name, "hf") == pathlib.Path(name)


def test_a_model_is_opened_by_its_name(cache):
    name, snapshot = cache
    assert kind_of(name) == "hf"
    opened = open_model(hf=name)
    assert (opened.name, opened.cfg.vocab, opened.folder) == ("tiny", 300, snapshot)
    stored = safetensors.numpy.load_file(snapshot / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    llm = LLM(name, context=32, max_batch=1, cache_dir=None)
    assert llm.name == "tiny"
    table = dict(named_leaves(opened.load_to_serve(MeshSpec().build(jax.devices()[:1]))[0]))[
        "tokens"
    ]
    np.testing.assert_array_equal(np.asarray(table)[:300], stored)


@pytest.mark.parametrize("program", ("train", "finetune"))
def test_a_run_keeps_the_name_and_reads_the_snapshot(cache, program, monkeypatch):
    monkeypatch.setattr(config, "start_given", lambda: False)  # no command line
    name, snapshot = cache
    typed = {"init_from": name}
    if program == "train":
        cfg = presets.take_model(presets.nano(), typed, {})
    else:
        cfg = chats.take_chats(chats.chat(), typed, {})
    assert cfg.model.vocab == 300
    assert cfg.data.tokenizer == str(snapshot / "tokenizer.json")


def test_what_cannot_be_read_is_explained(cache, monkeypatch):
    both = "does not exist: give a folder with config.json, or ORG/NAME of a model"
    for name in ("tiny", "a/b/c", "../x", "org/model.gguf", "/no/such", "org/"):
        with pytest.raises(UserError, match=f"^hf={name} {both}.*--hf"):
            files.model_folder(name, "hf")
    with pytest.raises(UserError, match="no/such is no folder here.*hf download no/such") as caught:
        open_model(hf="no/such")
    assert caught.value.exit_code == 2 and str(cache[1].parents[2]) in str(caught.value)

    # The port 9 of this machine answers nobody.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        TemporaryError, match="cannot be downloaded from http://127.0.0.1:9: .*--hf"
    ):
        files.model_folder("no/network", "hf")


def test_only_what_is_read_is_downloaded(cache, monkeypatch):
    listed = """config.json generation_config.json model.safetensors
        model-00001-of-00002.safetensors model.safetensors.index.json
        tokenizer.json tokenizer.model vocab.json merges.txt
        chat_template.jinja preprocessor_config.json LICENSE pytorch_model.bin model.gguf
        consolidated.safetensors onnx/model.onnx original/params.json flax_model.msgpack""".split()
    asked = {}

    def download(name, **patterns):
        asked.update(patterns)
        return str(cache[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files.model_folder("org/other", "hf")
    chosen = list(huggingface_hub.utils.filter_repo_objects(listed, **asked))
    assert chosen == listed[: listed.index("LICENSE") + 1]
