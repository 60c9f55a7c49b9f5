"""What a run starts from: a folder of weights counts where init_from stands; flags go over all."""

import json
from pathlib import Path

import numpy as np
import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.training.config import Config
from megajax.training.finetune import nano, take_encoder
from megajax.training.start import take_model

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_llama.npz"


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A folder with a model's shape and a tokenizer; --config was typed."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(str(np.load(GOLDEN)["config"]))
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(config, "start_given", lambda: True)
    return folder


def start(given, read=()):
    read = dict(read)
    base = config.override(Config(), read)
    return config.override(take_model(base, given, read), given)


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


def test_no_weights_and_a_saved_file_read_no_folder():
    """Of a run whose weights are gone since, config.json says all."""
    assert start({"init_from": None}, {"init_from": "gone"}) == Config()
    saved = config.override(Config(), {"init_from": "gone", "model.layers": 3})
    read = {name: config.get(saved, name) for name, _, _ in config.leaves(Config)}
    assert start({}, read) == saved
    with pytest.raises(UserError, match="gone"):
        start({"init_from": "gone"}, read)


def test_a_bpe_makes_room_for_its_tokens():
    assert start({"data.tokenizer": "bpe:8192"}).model.vocab == 8192
    assert start({}, {"data.tokenizer": "bpe:8192"}).model.vocab == 8192  # of a file
    chosen = {"data.tokenizer": "bpe:8192", "model.vocab": 9000}
    assert start(chosen).model.vocab == start({}, chosen).model.vocab == 9000
    usual = Config().model.vocab  # runs that had room before go on with what they had
    assert start({"data.tokenizer": "bpe:300"}).model.vocab == usual
    with pytest.raises(UserError, match="bpe:N needs N of at least 258"):
        start({"data.tokenizer": "bpe:3"})
    for head, wanted in (("classify", 8192), ("mlm", 8193)):
        flags = {"data.tokenizer": "bpe:8192", "model.head": head}
        base = config.override(nano(), flags)
        assert take_encoder(base, flags, {}).model.vocab == wanted
