"""No held-out document is trained on, wherever its copies lie. Oracle: sets of the texts."""

import dataclasses
import gzip
import json
import os

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data import documents
from megajax.data.config import DataConfig
from megajax.data.corpus import open_corpora, recorded_tokenizer, tokenise
from megajax.data.indexed import TokenWriter
from megajax.data.pack import PackedRows
from megajax.data.source import open_source
from megajax.data.tokenizer import ByteTokenizer, open_tokenizer, train_bpe
from megajax.training import resume
from megajax.training.config import Config
from tests.data.test_indexed import megatron_bytes

TEXTS = [f"document {i}, " * (1 + i % 5) for i in range(120)]


def write(folder, texts=TEXTS, name="t{}.txt"):
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / name.format(i)).write_text(text)
    return folder


def write_foreign(prefix, texts=TEXTS, begin=(), end=(), dtype_vocab=300):
    """A .bin that nobody recorded: bytes, with or without begin and end."""
    with TokenWriter(prefix, dtype_vocab) as writer:
        for text in texts:
            writer.add(np.array([*begin, *text.encode(), *end], int))
    return prefix


def open_all(*sources, cache, **settings):
    source = ",".join(f"{s}:1" for s in sources)
    settings = {"holdout": 0.2} | settings
    return open_corpora(DataConfig(source=source, **settings), cache, lambda _: None)


def texts_of(split):
    """The text of each range, without what is no byte."""
    ranges = zip(split.document, split.start, split.stop, strict=True)
    decode = ByteTokenizer().decode
    return [decode(split.file.read(d, a, b)) for d, a, b in ranges]


def sides(corpora):
    learned = [t for c in corpora for t in texts_of(c.train)]
    held = [t for c in corpora if c.held_out is not None for t in texts_of(c.held_out)]
    return learned, held


def test_copies_under_other_names_are_on_the_same_side(tmp_path):
    """Files, their copies, their links and lines of jsonl with the same texts."""
    folder = write(tmp_path / "text")
    write(folder / "copies", name="other{}.md")
    for i in range(60):
        os.symlink(folder / f"t{i}.txt", folder / f"link{i}.txt")
    lines = "\n".join(json.dumps({"text": t}) for t in reversed(TEXTS))
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    corpora, _ = open_all(folder, cache=tmp_path / "cache")
    learned, held = sides(corpora)
    assert not set(learned) & set(held) and set(learned) | set(held) == set(TEXTS)
    assert 0.1 < len(set(held)) / len(TEXTS) < 0.3
    assert len(learned) + len(held) == 3 * len(TEXTS)  # links count once
    assert corpora[0].copies == 2 * len(TEXTS)


def make_part(kind, tmp_path):
    if kind == "folder":
        return write(tmp_path / "text")
    if kind == "jsonl":
        (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS[::-1]))
        return tmp_path / "x.jsonl"
    if kind == "glob":
        return f"{write(tmp_path / 'text')}/*[0-4].txt"
    if kind == "ours":
        folder = write(tmp_path / "ours", TEXTS[:70])
        source = open_source(str(folder), DataConfig())
        tokenise(source, ByteTokenizer(), tmp_path / "bins" / "ours")
        return tmp_path / "bins" / "ours"
    if kind == "foreign":
        return write_foreign(tmp_path / "foreign", TEXTS[20:])
    return write_foreign(tmp_path / "wide", TEXTS[::2], [256], [257], 2**17)


@pytest.mark.parametrize(
    "kinds",
    [
        ("folder", "jsonl"),
        ("folder", "glob"),
        ("ours", "folder"),
        ("foreign", "folder"),
        ("foreign", "wide"),
        ("glob", "foreign", "ours", "wide", "jsonl"),
    ],
)
def test_overlapping_parts_of_a_mixture_agree(tmp_path, kinds):
    parts = [make_part(kind, tmp_path) for kind in kinds]
    corpora, _ = open_all(*parts, cache=tmp_path / "cache")
    learned, held = sides(corpora)
    assert held and not set(learned) & set(held)
    documents = [t for t in learned + held]
    assert sum(c.copies for c in corpora) == len(documents) - len(set(documents))


def test_the_side_of_a_text_does_not_depend_on_its_companions(tmp_path):
    alone, _ = open_all(write(tmp_path / "text"), cache=tmp_path / "cache")
    more = write(tmp_path / "more", [f"other {i}" for i in range(80)])
    both, _ = open_all(more, tmp_path / "text", cache=tmp_path / "cache")
    assert texts_of(both[1].held_out) == texts_of(alone[0].held_out)


def test_a_tail_that_is_held_out_is_cut_from_every_copy(tmp_path):
    """A part with one document: its copies in the other parts end where its tail begins."""
    long = "".join(chr(97 + i % 26) * (1 + i % 3) for i in range(400))[:795]
    single = write(tmp_path / "single", [long])
    folder = write(tmp_path / "text", [*TEXTS, long])
    foreign = write_foreign(tmp_path / "foreign", [long, long])
    corpora, _ = open_all(single, folder, foreign, cache=tmp_path / "cache", holdout=0.1)
    learned, held = sides(corpora)
    heads = [t for t in learned if long.startswith(t)]
    tails = [t for t in held if long.endswith(t)]
    assert len(heads) == 4 and len(tails) == 3  # the foreign file's own copy has its tail once
    assert {len(t) for t in tails} == {len(long) - len(heads[0])}
    assert {len(t) for t in heads} == {len(heads[0])}  # with and without begin and end tokens
    assert len(heads[0]) == pytest.approx(0.9 * len(long), abs=2)
    assert not {t for t in learned if t in TEXTS} & set(held)


def test_the_bpe_is_not_trained_on_held_out_text(tmp_path, monkeypatch):
    seen = []
    real = train_bpe
    monkeypatch.setattr(
        "megajax.data.corpus.train_bpe",
        lambda texts, size, path: real(_spied(texts, seen), size, path),
    )
    folder = write(tmp_path / "text")
    write(folder / "copies", name="other{}.md")
    bytes_of, _ = open_all(folder, cache=tmp_path / "cache")
    held = set(texts_of(bytes_of[0].held_out))
    open_all(folder, cache=tmp_path / "cache", tokenizer="bpe:300")
    assert seen and not set(seen) & held
    before = len(seen)
    open_all(folder, cache=tmp_path / "cache", tokenizer="bpe:300", holdout=0.0)
    assert set(seen[before:]) == set(TEXTS)  # not the other split's tokenizer


def _spied(texts, seen):
    for text in texts:
        seen.append(text)
        yield text


def test_a_bpe_of_one_held_out_document_learns_its_head(tmp_path):
    one = next(t for t in TEXTS if documents.text_key(t) < 0.2 * 2**64)
    folder = write(tmp_path / "text", [one * 50])
    for fraction in (0.05, 0.99):  # held out or not
        _, tokenizer = open_all(
            folder, cache=tmp_path / "cache", tokenizer="bpe:270", holdout=fraction
        )
        assert tokenizer.vocab > 260


def test_a_bpe_of_one_document_does_not_learn_its_tail(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("megajax.data.corpus.train_bpe", lambda texts, *_: seen.extend(texts))
    one = next(t for t in TEXTS if documents.text_key(t) >= 0.2 * 2**64) + "x" * 200
    folder = write(tmp_path / "text", [one])
    with pytest.raises(UserError):  # no tokenizer was made
        open_all(folder, cache=tmp_path / "cache", tokenizer="bpe:270", holdout=1e-9)
    with pytest.raises(UserError):
        open_all(folder, cache=tmp_path / "cache", tokenizer="bpe:270", holdout=0.25)
    assert [len(t) for t in seen] == [len(one) - 1, int(0.75 * len(one))]


def test_a_pair_is_read_once_and_again_when_it_changes(tmp_path, monkeypatch):
    calls = []
    real = documents._hash
    monkeypatch.setattr(documents, "_hash", lambda *a: calls.append(1) or real(*a))
    write_foreign(tmp_path / "x")
    first, _ = open_all(tmp_path / "x", cache=tmp_path / "cache")
    again, _ = open_all(tmp_path / "x", cache=tmp_path / "cache")
    assert len(calls) == 1 and first[0].fingerprint == again[0].fingerprint
    write_foreign(tmp_path / "x", [t.swapcase() for t in TEXTS])  # as many bytes
    changed, _ = open_all(tmp_path / "x", cache=tmp_path / "cache")
    assert len(calls) == 2 and changed[0].fingerprint != first[0].fingerprint
    open_all(tmp_path / "x", cache=tmp_path / "cache", holdout=0.0)
    assert len(calls) == 2  # nothing is held out, nothing need be read


def test_a_pair_beyond_the_limit_is_held_out_by_number(tmp_path, caplog):
    write_foreign(tmp_path / "x")
    limited = {"hash_gib": 1e-6, "cache": tmp_path / "cache"}
    corpora, _ = open_all(tmp_path / "x", **limited)
    assert "may be trained on (--data.hash_gib)" in caplog.text
    assert corpora[0].copies is None and 0.1 < len(corpora[0].held_out.document) / 120 < 0.3
    write_foreign(tmp_path / "x", [t.swapcase() for t in TEXTS])
    changed, _ = open_all(tmp_path / "x", **limited)
    assert changed[0].fingerprint != corpora[0].fingerprint  # as many bytes, other tokens


def test_a_pair_without_tokens_beyond_the_limit(tmp_path):
    write_foreign(tmp_path / "x", [""] * 3)
    (tmp_path / "x.bin").write_bytes(b"rest")  # of no document
    corpora, _ = open_all(tmp_path / "x", hash_gib=0.0, cache=tmp_path / "cache")
    assert corpora[0].train.tokens == 0


def test_limits_that_mean_nothing_are_refused():
    for name, value in (("hash_gib", -1.0), ("hash_gib", np.nan), ("holdout", np.nan)):
        with pytest.raises(UserError, match=f"--data.{name}"):
            DataConfig(**{name: value})


def test_the_identity_of_a_run_names_split_and_tokenizer(tmp_path):
    folder = write(tmp_path / "text")

    def identity(**settings):
        corpora, tokenizer = open_all(folder, cache=tmp_path / "cache", **settings)
        return resume.identity(corpora, tokenizer, Config())

    plain = identity()
    assert identity() == plain
    assert identity(holdout=0.3)["corpora"] != plain["corpora"]
    bpe = tmp_path / "tokenizer.json"
    train_bpe(TEXTS, 300, bpe)
    one = identity(tokenizer=str(bpe))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "d"}')
    assert identity(tokenizer=str(bpe))["tokenizer"] != one["tokenizer"]  # same path, same size


# ---- ids


def test_ids_beyond_the_vocabulary_are_refused_when_a_file_is_opened(tmp_path):
    with TokenWriter(tmp_path / "x", 2**16) as writer:
        writer.add(np.arange(100))
        writer.add(np.array([5, 50256, 7]))
    cfg = DataConfig(source=str(tmp_path / "x"))
    for settings in ({}, {"holdout": 0.0}, {"hash_gib": 0.0}):
        with pytest.raises(UserError) as error:
            open_corpora(dataclasses.replace(cfg, **settings), tmp_path / "cache", vocab=512)
        told = str(error.value)
        assert "x.bin holds token id 50256 (document 1, token 1)" in told
        assert "model.vocab=512 has ids 0 to 511" in told and "--model.vocab=50257" in told
    open_corpora(cfg, tmp_path / "cache", vocab=50257)
    with pytest.raises(UserError, match="50256"):  # the keys are cached, the ids still checked
        open_corpora(cfg, tmp_path / "cache", vocab=50256)


def test_ids_that_the_sample_misses_never_reach_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SAMPLED", 8)
    monkeypatch.setattr(documents, "PLACES", 2)
    with TokenWriter(tmp_path / "x", 2**17) as writer:
        writer.add(np.where(np.arange(1000) == 500, 70_000, 1))
    cfg = DataConfig(source=str(tmp_path / "x"), holdout=0.0)
    (corpus,), _ = open_corpora(cfg, tmp_path / "cache", vocab=512)
    rows = PackedRows(corpus.train, 32, 0)
    refused = 0
    for i in range(rows.rows_per_epoch):
        try:
            assert rows[i]["tokens"].max() == 1
        except UserError as error:
            refused += 1
            assert "token id 70000 (document 0, token 500)" in str(error)
            assert "--model.vocab=70001" in str(error)
    assert refused == 1


@pytest.mark.parametrize("value", [-1, 2**31, 2**32 + 5])
def test_ids_that_no_vocabulary_has_are_refused(tmp_path, value):
    """They would wrap to other ids in the rows' int32."""
    index, data = megatron_bytes([[1, 2, value], [4] * 40], 5, np.int64)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(UserError, match=rf"token id {value} \(document 0, token 2\)"):
        open_corpora(DataConfig(source=str(tmp_path / "x")), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", "[1]", "must hold a JSON object"),
        ("x.json", "{oops", "is not JSON"),
        ("x.documents.npy", "garbage", "cannot read"),
        ("x.documents.npy", None, "is of another file, or an older format"),
    ],
)
def test_broken_records_beside_a_pair_are_named(tmp_path, name, content, words):
    write_foreign(tmp_path / "x")
    if content is None:
        np.save(tmp_path / name, np.zeros((2, len(TEXTS))))
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} {words}|{words} .*{name}"):
        open_all(tmp_path / "x", cache=tmp_path / "cache")


# ---- the tokenizer that a pair was made with


def test_the_recorded_tokenizer_is_taken_and_another_refused(tmp_path):
    folder = write(tmp_path / "text")
    train_bpe(TEXTS, 300, tmp_path / "bpe" / "tokenizer.json")
    (tmp_path / "bpe" / "tokenizer_config.json").write_text('{"eos_token": "<|bos|>"}')
    tokenizer = open_tokenizer(str(tmp_path / "bpe"))
    tokenise(open_source(str(folder), DataConfig()), tokenizer, tmp_path / "web")
    (tmp_path / "bpe" / "tokenizer.json").unlink()  # the pair can move without its origin
    recorded = recorded_tokenizer(f"{tmp_path}/web.bin")
    corpora, taken = open_all(tmp_path / "web", cache=tmp_path / "cache", tokenizer=recorded)
    assert taken.identity == tokenizer.identity and taken.end == 0
    assert corpora[0].bytes_per_token is not None
    with pytest.raises(UserError) as error:
        open_all(tmp_path / "web", cache=tmp_path / "cache")
    assert "another tokenizer than data.tokenizer=bytes" in str(error.value)
    assert f"--data.tokenizer={recorded}" in str(error.value)
    tokenise(open_source(str(folder), DataConfig()), ByteTokenizer(), tmp_path / "plain")
    assert recorded_tokenizer(f"{folder}:1,{tmp_path}/plain:2") == "bytes"
    assert recorded_tokenizer(str(folder)) is None


# ---- the cache


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path, tokenizer):
    folder = write(tmp_path / "text", TEXTS[:3])
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write to the cache .*file/.*\(--cache_dir\)"):
        open_all(folder, cache=tmp_path / "file" / "cache", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"--cache_dir"):
        open_all(folder, cache="~nobody-of-this-name/cache", tokenizer=tokenizer)


def test_a_pair_needs_no_cache(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    write_foreign(tmp_path / "x")
    corpora, _ = open_all(tmp_path / "x", cache=tmp_path / "file" / "cache")
    assert corpora[0].copies == 0 and "(--cache_dir)" in caplog.text


def test_a_pair_that_names_no_tokenizer_is_told(tmp_path, caplog):
    write_foreign(tmp_path / "x")
    open_all(tmp_path / "x", cache=tmp_path / "cache")
    assert "x.bin says nothing about its tokenizer" in caplog.text
    caplog.clear()
    tokenise(open_source(str(write(tmp_path / "t")), DataConfig()), ByteTokenizer(), tmp_path / "y")
    open_all(tmp_path / "y", cache=tmp_path / "cache")
    assert "tokenizer" not in caplog.text
