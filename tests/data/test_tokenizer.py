import json

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data.tokenizer import ByteTokenizer, bpe_size, open_tokenizer, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café ☕", ""]


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert ids.tolist() == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"
    assert tokenizer.decode([0xE9]) == "\ufffd"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS * 20, 300, path)
    return path


def test_bpe_round_trip_and_is_shorter_than_bytes(bpe):
    tokenizer = open_tokenizer(str(bpe))
    assert tokenizer.vocab <= 300
    encoded = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(e) for e in encoded] == TEXTS
    assert len(encoded[0]) < len(TEXTS[0])
    assert {tokenizer.begin, tokenizer.end} == {0, 1}


def test_bpe_training_is_deterministic(bpe, tmp_path):
    train_bpe(TEXTS * 20, 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == bpe.read_text()


def test_special_tokens_of_a_tokenizer_config_win(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe.read_text())
    names = {"bos_token": {"content": "a"}, "eos_token": "b"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = open_tokenizer(str(tmp_path))
    a, b = (int(tokenizer.encode([c])[0][0]) for c in "ab")
    assert (tokenizer.begin, tokenizer.end) == (a, b)


@pytest.mark.parametrize("name", ["nowhere.json", "/", "bits"])
def test_a_wrong_path_is_refused(name):
    with pytest.raises(UserError, match="--data.tokenizer"):
        open_tokenizer(name)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        open_tokenizer(str(tmp_path))


def test_bpe_names():
    assert bpe_size("bytes") is None and bpe_size("x/tokenizer.json") is None
    assert bpe_size("bpe:8192") == 8192
    for name in ("bpe:", "bpe:many", "bpe:100"):
        with pytest.raises(UserError, match="at least 258"):
            bpe_size(name)


def test_ids_are_int32():
    assert ByteTokenizer().encode(["x"])[0].dtype == np.int32
