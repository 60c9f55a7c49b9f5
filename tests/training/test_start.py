"""What a run starts from: a folder of weights counts where init_from stands; flags go over all."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.data.tokenizer import train_bpe
from megajax.training import finetune, presets
from megajax.training.config import Config
from megajax.training.finetune import nano, take_encoder
from megajax.training.presets import take_model

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_llama.npz"


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A folder with a model's shape and a tokenizer; --config was typed."""
    folder = tmp_path / "weights"
    folder.mkdir()
    with np.load(GOLDEN) as golden:
        (folder / "config.json").write_text(str(golden["config"]))
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(config, "start_given", lambda: True)
    return folder


def start(typed, read=()):
    read = dict(read)
    base = config.override(Config(), read)
    return config.override(take_model(base, typed, read), typed)


def test_a_file_with_weights_takes_their_model_and_keeps_what_it_says(weights):
    shape = json.loads((weights / "config.json").read_text())
    read = {"init_from": str(weights), "model.window": 8, "optim.lr": 1e-3}
    cfg = start({"train.steps": 3}, read)
    assert (cfg.model.width, cfg.model.window) == (shape["hidden_size"], 8)
    assert (cfg.optim.lr, cfg.train.steps) == (1e-3, 3)
    assert cfg.data.tokenizer == str(weights / "tokenizer.json")
    assert start({}, read | {"data.tokenizer": "bytes"}).data.tokenizer == "bytes"
    assert start({"model.window": 4}, read).model.window == 4


def test_typed_weights_replace_the_model_of_a_file(weights):
    read = {"model.layers": 9, "model.window": 8, "data.tokenizer": "bpe:400"}
    cfg = start({"init_from": str(weights)}, read)
    assert cfg.model.layers != 9 and cfg.model.window is None
    assert cfg.data.tokenizer == str(weights / "tokenizer.json")
    (weights / "tokenizer.json").unlink()
    assert start({"init_from": str(weights)}, read).data.tokenizer == "bpe:400"
    with pytest.raises(UserError, match="has no tokenizer .*: say what its tokens are"):
        start({"init_from": str(weights)}, {})


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_both_commands_begin_from_weights_with_the_recipe_of_the_documents(
    family, tmp_path, monkeypatch
):
    """Without --preset or --config. The figures are also those that docs/training.md states."""
    with np.load(GOLDEN.parent / f"hf_{family}.npz") as golden:
        (tmp_path / "config.json").write_text(str(golden["config"]))
    typed = {"init_from": str(tmp_path), "data.tokenizer": "bytes", "new_head": True}
    take, nano = {"llama": (take_model, Config), "bert": (take_encoder, finetune.nano)}[family]
    monkeypatch.setattr(config, "start_given", lambda: False)
    cfg = take(nano(), typed, {})
    optim, train = cfg.optim, cfg.train
    assert (optim.name, optim.lr, optim.schedule, optim.final) == ("adamw", 2e-5, "cosine", 0.0)
    assert (optim.warmup, optim.weight_decay, optim.beta2) == (10, 0.1, 0.95)
    assert (train.steps, train.global_batch) == (200, 16)
    assert train.seq_len == cfg.model.max_positions < 512  # of these tiny models
    largest = dataclasses.replace(cfg.model, max_positions=600)
    tuned = finetune.tuned(largest) if family == "bert" else presets.finetune(largest)
    assert tuned.train.seq_len == 512 and tuned.optim == optim
    page = " ".join((GOLDEN.parents[2] / "docs" / "training.md").read_text().split())
    assert "AdamW with a learning rate of 2e-5, 200 steps of 16 rows of up to 512 tokens" in page
    # --preset or --config replaces the recipe.
    monkeypatch.setattr(config, "start_given", lambda: True)
    assert take(nano(), typed, {}).optim == nano().optim


def test_the_presets_of_encoders_have_the_settings_of_bert(monkeypatch):
    """arXiv 1810.04805, appendix A.3: rows of 128, batches of 32, 2e-5, 10 % of warm-up."""
    cfg = finetune.PRESETS["bert_base"]()
    assert (cfg.train.seq_len, cfg.train.global_batch, cfg.optim.lr) == (128, 32, 2e-5)
    assert cfg.optim.warmup == cfg.train.steps // 10 and cfg.optim.schedule == "linear"


def test_no_weights_and_a_saved_file_read_no_folder():
    """Of a run whose weights are gone since, config.json says all."""
    assert start({"init_from": None}, {"init_from": "gone"}) == Config()
    saved = config.override(Config(), {"init_from": "gone", "model.layers": 3})
    read = {name: config.get(saved, name) for name, _, _ in config.leaves(Config)}
    assert start({}, read) == saved
    with pytest.raises(UserError, match="gone"):
        start({"init_from": "gone"}, read)


def test_the_vocabulary_is_that_of_the_tokenizer(tmp_path):
    assert start({"data.tokenizer": "bpe:8192"}).model.vocab == 8192
    assert start({}, {"data.tokenizer": "bpe:8192"}).model.vocab == 8192  # of a file
    chosen = {"data.tokenizer": "bpe:8192", "model.vocab": 9000}
    assert start(chosen).model.vocab == start({}, chosen).model.vocab == 9000
    assert start({"data.tokenizer": "bpe:300"}).model.vocab == 300
    for size in (280, 700):  # a file, also one that has more than the preset
        words = " ".join(f"w{k:03d}" for k in range(900))
        train_bpe([words], size, tmp_path / "tokenizer.json")
        for name in (tmp_path, tmp_path / "tokenizer.json"):
            assert start({"data.tokenizer": str(name)}).model.vocab == size
    large = presets.large("qwen3_0p6b")
    fitted = take_model(large, {"data.tokenizer": str(tmp_path)}, {}).model
    assert (fitted.vocab, fitted.padded_vocab) == (700, 768)
    # A Megatron pair, whose tokenizer lies beside it.
    (tmp_path / "x.tokenizer").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "x.tokenizer" / "tokenizer.json")
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "x.idx").write_bytes(b"")
    cfg = start({"data.source": str(tmp_path / "x")})
    assert (cfg.data.tokenizer, cfg.model.vocab) == (str(tmp_path / "x.tokenizer"), 700)
    # With bytes a preset keeps its size, and its program.
    usual = Config().model.vocab
    assert start({}).model.vocab == start({"data.tokenizer": "bytes"}).model.vocab == usual
    hidden = finetune.nano_mlm()
    assert take_encoder(hidden, {"data.tokenizer": "bpe:300"}, {}).model.vocab == 301
    with pytest.raises(UserError, match="data.tokenizer=nowhere is neither"):
        start({"data.tokenizer": "nowhere"})
    with pytest.raises(UserError, match="bpe:N needs N of at least 258"):
        start({"data.tokenizer": "bpe:3"})
    for head, vocab in (("classify", 8192), ("mlm", 8193)):
        flags = {"data.tokenizer": "bpe:8192", "model.head": head}
        base = config.override(nano(), flags)
        assert take_encoder(base, flags, {}).model.vocab == vocab
