"""The bytes of a tokenizer's ids: put together they are what the tokenizer itself decodes."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megajax.data.tokenizer import ByteTokenizer, FileTokenizer, train_bpe

TEXTS = ["def f(x): return 'é日本'\n", "  two  spaces\tand tabs ", "a\u2581b", "👍🏽 ok", "<s> no"]


def saved(made, folder, **more):
    made.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return FileTokenizer(path, "made")


def byte_level(folder):
    train_bpe(TEXTS * 3, 400, folder / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<|im_start|>"])
    made.add_tokens(["<tool>", "日本"])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return saved(made, folder)


def sentencepiece(folder):
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>"]
    alphabet = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special + alphabet)
    made.train_from_iterator(["two spaces and tabs def return"] * 3, trainer)
    spec = json.loads(made.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in special
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["special"]]
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return saved(made, folder)


def metaspace(folder):
    made = tokenizers.Tokenizer(
        models.Unigram(
            [("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("b", -2.0), ("▁ab", -2.5)], 0, False
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return saved(made, folder)


MAKERS = {"byte level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}


def text_of(tokenizer, ids):
    pieces = tokenizer.pieces()
    data = b"".join(pieces[i] or b"" for i in ids)
    if getattr(tokenizer, "strips_space", False):
        data = data.removeprefix(b" ")
    return data.decode(errors="replace")


@pytest.mark.parametrize("kind", list(MAKERS))
def test_pieces_are_what_the_tokenizer_decodes(kind, tmp_path):
    tokenizer = MAKERS[kind](tmp_path)
    pieces = tokenizer.pieces()
    assert len(pieces) == tokenizer.vocab
    texts = TEXTS if kind != "metaspace" else ["ab a b", "a  b", ""]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert text_of(tokenizer, ids) == tokenizer.decode(ids) == text.replace("\u2581", " ") or (
            kind == "byte level" and text_of(tokenizer, ids) == tokenizer.decode(ids) == text
        )
    random = np.random.default_rng(0)
    textual = [i for i, p in enumerate(pieces) if p is None or _is_text(p)]
    for _ in range(200):
        ids = random.choice(textual, random.integers(1, 8)).tolist()
        assert text_of(tokenizer, ids) == tokenizer.decode(ids), ids


def _is_text(piece):
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_bytes_that_are_no_text_are_replaced_as_the_tokenizer_does(tmp_path):
    for tokenizer in (ByteTokenizer(), byte_level(tmp_path)):
        random = np.random.default_rng(1)
        for _ in range(300):
            ids = random.integers(0, tokenizer.vocab, random.integers(1, 9)).tolist()
            assert text_of(tokenizer, ids) == tokenizer.decode(ids), ids


def test_what_a_prompt_begins_with_and_special_tokens_in_a_template(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sp, bpe = sentencepiece(tmp_path / "a"), byte_level(tmp_path / "b")
    assert sp.prefix() == [1] and bpe.prefix() == []
    ids = bpe.encode(["<|im_start|>a"], special=True)[0].tolist()
    assert len(ids) == 2 and bpe.pieces()[ids[0]] is None
    assert len(bpe.encode(["<|im_start|>a"])[0]) > 2, "a user's text stays text"
    (tmp_path / "c").mkdir()
    train_bpe(["ab"], 300, tmp_path / "c" / "tokenizer.json")
    ours = FileTokenizer(tmp_path / "c" / "tokenizer.json", "c")
    assert ours.prefix() == [ours.begin]
