"""Tokenizers in other files than tokenizer.json. Oracle: transformers 5.24 and sentencepiece,
frozen by tests/golden/make_tokenizers.py."""

import base64
import json
import lzma
import random

import pytest

from megajax.core.errors import UserError
from megajax.data import vocabulary_files
from megajax.data.tokenizer import open_tokenizer
from tests.golden import make_tokenizers as made


@pytest.fixture(scope="module")
def golden():
    return json.loads(lzma.decompress(made.FILE.read_bytes()))["others"]


def folder(files, path):
    plain = {
        name: base64.b64decode(content["base64"])
        if isinstance(content, dict) and "base64" in content
        else content
        for name, content in files.items()
    }
    made.write(plain, path)
    return path


def test_ids_are_those_of_transformers(golden, tmp_path):
    """Both kinds of SentencePiece, files of GPT-2, Qwen2, RoBERTa, GPT-NeoX and BERT."""
    assert len(golden) == 30
    refused = []
    for files, (begin, end, ids) in golden:
        said = files.get("tokenizer_config.json"), files["config.json"]
        try:
            tokenizer = open_tokenizer(str(folder(files, tmp_path / "f")))
        except UserError as error:
            refused.append(str(error))
            continue
        assert tokenizer.settings.tokens.get("bos_token") is None or begin is not None, said
        after = [] if tokenizer.end is None else [tokenizer.end]
        encoded = tokenizer.encode(made.TEXTS)
        for text, theirs, ours in zip(made.TEXTS, ids, encoded, strict=True):
            expected = tokenizer.prefix() + ours.tolist()
            assert theirs in (expected, expected + after), (said, text)
        if end is not None and len(ids[1]) < 2:  # of an empty text: nothing, or what is around
            assert tokenizer.end == end, said
    # added_tokens_decoder says <unk>, and piece 0 is </s>: transformers adds a 321st token.
    assert len(refused) == 1 and "gives '<unk>' the id 0, but" in refused[0]


def test_the_copy_in_a_run_is_the_same_tokenizer(golden, tmp_path):
    for files, _ in golden[1::4]:
        theirs = open_tokenizer(str(folder(files, tmp_path / "f")))
        theirs.copy_to(tmp_path / "run")
        ours = open_tokenizer(str(tmp_path / "run"))
        assert (ours.begin, ours.end, ours.ends) == (theirs.begin, theirs.end, theirs.ends)
        assert [a.tolist() for a in ours.encode(made.TEXTS)] == [
            a.tolist() for a in theirs.encode(made.TEXTS)
        ]
        for file in (tmp_path / "run").iterdir():
            file.unlink()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "is no SentencePiece model"),
        ({"tokenizer.model": b""}, "is no SentencePiece model: it has no pieces"),
        ({"tokenizer.model": b"\x0a\xff\xff\xff\xff\x0f"}, "is no part of a protobuf message"),
        ({"tokenizer.model": b"\x0a\x03\x0a\x01a\x12\x02\x18\x04"}, "of model_type 4"),
        ({"tokenizer.model": b"\x0a\x03\x0a\x01a\x12\x03\xc0\x01\x01"}, "with blanks behind words"),
        (
            {"tokenizer.model": b"\x0a\x03\x0a\x01a", "tokenizer_config.json":
             {"tokenizer_class": "T5Tokenizer"}},
            "the class T5Tokenizer cuts words in a way that is not known here",
        ),
        (
            {"tokenizer.model": b"\x0a\x03\x0a\x01a", "tokenizer_config.json":
             {"tokenizer_class": "LlamaTokenizer"}},
            "is a Unigram model, which the class LlamaTokenizer would read as a BPE",
        ),
        ({"vocab.json": {"a": 0}, "merges.txt": ""}, "the class TokenizersBackend cuts words"),
        (
            {"vocab.json": {"a": "0"}, "merges.txt": "", "config.json": {"model_type": "gpt2"}},
            "its members must be ids",
        ),
        (
            {"vocab.json": {"a": 0}, "merges.txt": "#version\na b c\n",
             "config.json": {"model_type": "gpt2"}},
            "line 2 is 'a b c', not two tokens",
        ),
        (
            {"vocab.json": {"a": 0}, "merges.txt": "", "config.json": {"model_type": "gpt2"},
             "tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "<x>"}}}},
            "gives '<x>' the id 7, but",
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(tmp_path, files, words):
    made.write(files, tmp_path / "f")
    with pytest.raises(UserError, match="--data.tokenizer|tokenizer_class") as error:
        open_tokenizer(str(tmp_path / "f"))
    assert words in str(error.value)


def test_a_folder_with_half_a_tokenizer_has_none(tmp_path):
    made.write({"vocab.json": {"a": 0}}, tmp_path / "f")
    with pytest.raises(UserError, match="vocab.json with merges.txt, tokenizer.model or vocab.txt"):
        open_tokenizer(str(tmp_path / "f"))


def test_a_damaged_model_is_refused_or_read(golden, seed):
    """Never a crash, whatever byte is another one."""
    rng = random.Random(seed)
    data = next(base64.b64decode(f["tokenizer.model"]["base64"]) for f, _ in golden)
    model = vocabulary_files.read_model(data)
    assert model.pieces[1] == ("<s>", 0.0, vocabulary_files.CONTROL) and model.byte_fallback
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            vocabulary_files.read_model(bytes(changed[: rng.randrange(1, len(changed))]))
        except ValueError:
            pass


@pytest.mark.parametrize("gap", [1000, 2**21, 2**31 + 5])
def test_ids_may_have_gaps_but_not_be_nearly_all_gaps(tmp_path, gap):
    vocab = {"<|endoftext|>": 0, "a": 1, "b": gap}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    if gap < 2**20:
        assert open_tokenizer(str(tmp_path)).vocab == gap + 1
        return
    with pytest.raises(UserError, match=f"vocab.json has 3 tokens and the id {gap}; the largest"):
        open_tokenizer(str(tmp_path))
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(UserError, match="tokenizer.json"):
        open_tokenizer(str(tmp_path))


def test_a_map_of_characters_that_says_it_is_larger_than_it_is_is_refused(tmp_path):
    pieces = b"".join(b"\x0a%c\x0a\x01%c" % (3, c) for c in b"abc")
    (tmp_path / "tokenizer.model").write_bytes(pieces + b"\x1a\x06\x12\x04\x00\x00\x80\xc0")
    with pytest.raises(UserError, match=r"tokenizer\.model is no .*says that 3,229,614,080 follow"):
        open_tokenizer(str(tmp_path))
    bad = {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(b"\0\0\x80\xc0").decode(),
    }
    made = {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [bad]},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(UserError, match=r"tokenizer\.json: .*says that 3,229,614,080 follow"):
        open_tokenizer(str(tmp_path))
