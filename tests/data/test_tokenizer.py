import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megajax.core.errors import UserError
from megajax.data import tokenizer
from megajax.data.tokenizer import (
    ByteTokenizer,
    bpe_size,
    check_vocabulary,
    open_tokenizer,
    train_bpe,
)

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
    (b,) = open_tokenizer(str(bpe)).encode(["b"])[0].tolist()
    assert (tokenizer.begin, tokenizer.end) == (None, b)  # no post_processor puts bos_token there


@pytest.mark.parametrize("name", ["nowhere.json", "/", "bits"])
def test_a_wrong_path_is_refused(name):
    with pytest.raises(UserError, match="--data.tokenizer"):
        open_tokenizer(name)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        open_tokenizer(str(tmp_path))


def save(folder, model, special=(), **settings):
    """A tokenizer.json of a model with some special tokens."""
    members = json.loads(Tokenizer(model).to_str()) | settings
    members["added_tokens"] = [
        {
            "id": i,
            "content": c,
            "special": s,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, c, s in special
    ]
    (folder / "tokenizer.json").write_text(json.dumps(members))
    return folder


def test_text_never_becomes_a_special_id(bpe):
    """The literal text of a special token is encoded as the characters that it is."""
    tokenizer = open_tokenizer(str(bpe))
    text = "a<|eos|>b<|bos|><|eos|>"
    (ids,) = tokenizer.encode([text])
    assert not {tokenizer.begin, tokenizer.end} & set(ids.tolist())
    assert tokenizer.decode(ids) == text


def test_pieces_that_are_special_tokens_are_cut(tmp_path):
    """A Unigram has </s> among its own pieces, and finds it in text whatever is marked special."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "</s>ab")]
    save(tmp_path, models.Unigram(pieces, 0, False), [(0, "<unk>", True), (1, "</s>", True)])
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.end == 1
    many = tokenizer.encode(["a</s>b", "</s></s>", "a?", "</s>" * 2000])
    assert [ids.tolist() for ids in many[:3]] == [
        [6, 2, 3, 4, 5, 7],
        [2, 3, 4, 5, 2, 3, 4, 5],
        [6, 0],
    ]
    assert many[3].tolist() == [2, 3, 4, 5] * 2000


def test_an_end_that_is_not_marked_special_is_not_read_from_text(tmp_path):
    vocab = {c: i for i, c in enumerate("<eos>!")} | {"<eos>": 9}
    save(tmp_path, models.BPE(vocab, []), [(9, "<eos>", False)])
    tokenizer = open_tokenizer(str(tmp_path))
    (ids,) = tokenizer.encode(["!<eos>!"])
    assert tokenizer.end == 9 and ids.tolist() == [vocab[c] for c in "!<eos>!"]


def test_a_special_token_of_one_letter_is_left_out(tmp_path):
    save(tmp_path, models.WordLevel({"x": 0, "[UNK]": 1}, "[UNK]"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    assert open_tokenizer(str(tmp_path)).encode(["x"])[0].tolist() == []


def test_documents_are_neither_cut_nor_filled(tmp_path, bpe):
    """A tokenizer.json may hold the lengths of a model's inputs."""
    members = json.loads(bpe.read_text())
    members["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    members["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|bos|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(members))
    plain, limited = (open_tokenizer(str(f)).encode(TEXTS) for f in (bpe, tmp_path))
    assert [a.tolist() for a in plain] == [b.tolist() for b in limited]


def test_the_vocabulary_reaches_beyond_the_largest_id(tmp_path):
    save(tmp_path, models.WordLevel({"a": 0, "b": 900}, "a"))
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.vocab == 901
    with pytest.raises(UserError, match=r"ids up to 900.* nearest: 901 \(--model.vocab"):
        check_vocabulary(tokenizer, 900)
    check_vocabulary(tokenizer, 901)


def test_the_identity_follows_the_content(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe.read_text())
    assert open_tokenizer(str(tmp_path)).identity == open_tokenizer(str(bpe)).identity
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert open_tokenizer(str(tmp_path)).identity != open_tokenizer(str(bpe)).identity


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{oops", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[1]", r"must hold a JSON object, not \[1\]"),
        ("null", "must hold a JSON object, not None"),
        ('{"bos_token": 5}', "bos_token is 5; it must be a string"),
        ('{"eos_token": {"content": 7}}', "eos_token is {'content': 7}; it must be"),
        ('{"eos_token": {}}', "eos_token is {}; it must be"),
        ('{"eos_token": ["</s>"]}', "eos_token is"),
        ('{"bos_token": "\\ud800"}', "must be a string of Unicode characters"),
    ],
)
def test_a_broken_tokenizer_config_is_named(bpe, tmp_path, config, words):
    (tmp_path / "tokenizer.json").write_text(bpe.read_text())
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="latin-1")
    with pytest.raises(UserError, match=f"tokenizer_config.json.* {words}"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "content", ["[1]", "null", "", "{oops", "\xff", '{"model": 5}', '{"model": {"type": "BPE"}}']
)
def test_a_broken_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="tokenizer.json is not a tokenizer.json: "):
        open_tokenizer(str(tmp_path))


def test_a_file_that_the_package_panics_over_is_refused(bpe, tmp_path, capfd):
    """Its exception is none that `except Exception` catches. The fuzzer found it."""
    members = json.loads(bpe.read_text())
    members["model"] |= {"continuing_subword_prefix": "#", "merges": [["h", ""]]}
    members["model"]["vocab"][""] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(members))
    with pytest.raises(UserError, match="is not a tokenizer.json: slice index"):
        open_tokenizer(str(tmp_path))
    assert "panicked" in capfd.readouterr().err


def test_a_token_without_end_is_refused(tmp_path):
    """The package overflows its stack when it frees one of 172,000 letters. The fuzzer found it."""
    save(tmp_path, models.Unigram([("<unk>", 0.0), ("a" * 4096, -1.0)], 0))
    assert open_tokenizer(str(tmp_path)).vocab == 2
    for token in ("a" * 4097, "\u00e9" * 2049):
        save(tmp_path, models.Unigram([("<unk>", 0.0), (token, -1.0)], 0))
        with pytest.raises(UserError, match=f"has {len(token):,} letters; at most 4,096"):
            open_tokenizer(str(tmp_path))
    save(tmp_path, models.WordLevel({"b" * 5000: 0}, "a"))
    with pytest.raises(UserError, match="has 5,000 letters"):
        open_tokenizer(str(tmp_path))


def test_ids_may_leave_out_a_million_but_not_more(bpe, tmp_path):
    members = json.loads(bpe.read_text())
    legal = len(members["model"]["vocab"]) + 1 + 2**20
    for largest in (legal, legal + 1, 2**31 - 1, 2**31):
        members["model"]["vocab"]["wide"] = largest
        (tmp_path / "tokenizer.json").write_text(json.dumps(members))
        if largest == legal:
            assert open_tokenizer(str(tmp_path)).vocab == legal + 1
            continue
        with pytest.raises(UserError, match=f"the id {largest}; .*largest legal one is {legal} "):
            open_tokenizer(str(tmp_path))


def test_a_tokenizer_without_tokens_or_for_other_text_is_refused(tmp_path):
    save(tmp_path, models.WordLevel({}, "a"))
    with pytest.raises(UserError, match="has no tokens"):
        open_tokenizer(str(tmp_path))
    save(tmp_path, models.WordLevel({"b": 0}, "a"))
    with pytest.raises(UserError, match="cannot encode: "):
        open_tokenizer(str(tmp_path)).encode(["c"])


def test_bpe_names():
    assert bpe_size("bytes") is None and bpe_size("x/tokenizer.json") is None
    assert bpe_size("bpe:8192") == 8192
    for size in ("", "many", "100", "²²²", "٣٠٠", "9" * 20, "4294967296", f"{300:012}{'9' * 5000}"):
        with pytest.raises(UserError, match="at least 258"):
            bpe_size(f"bpe:{size}")


def test_ids_are_int32():
    assert ByteTokenizer().encode(["x"])[0].dtype == np.int32


def test_a_bpe_with_dropout_encodes_the_same_every_time(bpe, tmp_path):
    members = json.loads(bpe.read_text())
    members["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(members))
    tokenizer = open_tokenizer(str(tmp_path))
    (plain,) = open_tokenizer(str(bpe)).encode(TEXTS[:1])
    assert all(e.tolist() == plain.tolist() for e in tokenizer.encode(TEXTS[:1] * 20))


def test_a_tokenizer_nested_without_end_or_too_long(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text('{"model": ' + "[" * 100_000)
    with pytest.raises(UserError, match="is not a tokenizer.json: it is nested too deep"):
        open_tokenizer(str(tmp_path))
    monkeypatch.setattr(tokenizer, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match="1,000 are read at most"):
        open_tokenizer(str(tmp_path))


def plain_bpe(texts, vocab):
    """The `tokenizers` package alone, whose time is quadratic in the length of a word."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|bos|>", "<|eos|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(texts, trainer)
    return json.loads(made.to_str())


def test_ordinary_text_trains_the_same_bpe_as_the_package_alone(tmp_path, monkeypatch):
    """Also where a text is longer than what the package is given at a time."""
    monkeypatch.setattr(tokenizer, "PIECE", 2000)
    texts = [Path(tokenizer.__file__).read_text()[:9000], "x" * 256 + " naïve café ☕\n\n  y"]
    train_bpe(texts, 400, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == plain_bpe(texts, 400)


def test_training_takes_time_linear_in_the_length_of_a_word(tmp_path):
    """A word of 100,000 letters took a minute; the longest token is WORD bytes."""
    began = time.process_time()
    train_bpe(["x y z " * 200 + "a" * 100_000], 300, tmp_path / "t.json")
    assert time.process_time() - began < 5
    vocab = json.loads((tmp_path / "t.json").read_text())["model"]["vocab"]
    assert max(map(len, vocab)) == 256


def like_sentencepiece(folder):
    """A BPE without words, whose normalizer puts a blank before a text."""
    vocab = {t: i for i, t in enumerate(["<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz.,", "ab"])}
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    first = {"type": "Prepend", "prepend": "\u2581"}
    steps = {"type": "Sequence", "normalizers": [first, blanks]}
    save(folder, models.BPE(vocab, [("a", "b")], unk_token="<unk>"), normalizer=steps)


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "sentencepiece"])
def test_long_texts_have_the_ids_that_they_have_as_a_whole(bpe, tmp_path, monkeypatch, kind):
    text = "some words, and more.  cab abba  12 naïve\n\tx y z <|eos|> " * 40
    if kind == "sentencepiece":
        like_sentencepiece(tmp_path)
    else:
        members = json.loads(bpe.read_text())
        if kind == "metaspace":
            members["pre_tokenizer"] = {
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": "first",
                "split": True,
            }
        (tmp_path / "tokenizer.json").write_text(json.dumps(members))
    opened = open_tokenizer(str(tmp_path))
    (ids,) = opened.encode([text])
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "PIECE", 100)
        patched.setattr(tokenizer, "WINDOW", 60)
        parts = opened.encode([text, "short", ""])
    assert parts[0].tolist() == ids.tolist() and len(ids) > 500
    assert parts[1].tolist() == opened.encode(["short"])[0].tolist() and len(parts[2]) == 0


def test_a_text_without_words_is_cut_and_says_so(bpe, monkeypatch, caplog):
    monkeypatch.setattr(tokenizer, "PIECE", 100)
    opened = open_tokenizer(str(bpe))
    with caplog.at_level(logging.WARNING):
        (ids,) = opened.encode(["def" * 200])
    assert opened.decode(ids) == "def" * 200
    assert [r.getMessage() for r in caplog.records if "cut after" in r.getMessage()] != []
