import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data.config import DataConfig
from megajax.data.corpus import open_corpora
from megajax.data.pack import PackedRows


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(200):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " * (1 + i % 7))
    return folder


def open_one(source, cache, **settings):
    said = []
    corpora, tokenizer = open_corpora(
        DataConfig(source=str(source), **settings), cache, said.append
    )
    return corpora[0], tokenizer, said


def texts(split, tokenizer):
    return {
        tokenizer.decode(split.file.read(d, 0, n))
        for d, n in zip(split.document, split.stop, strict=True)
    }


def test_split_is_by_document_and_stable(folder, tmp_path):
    corpus, tokenizer, _ = open_one(folder, tmp_path / "cache")
    train, held = texts(corpus.train, tokenizer), texts(corpus.held_out, tokenizer)
    everything = {f.read_text() for f in folder.iterdir()}
    assert train | held == everything and not train & held
    assert 0.01 < len(held) / 200 < 0.12
    # More files: no document changes sides.
    for i in range(200, 260):
        (folder / f"{i:03d}.txt").write_text(f"document {i} ")
    bigger, tokenizer, _ = open_one(folder, tmp_path / "cache")
    assert held <= texts(bigger.held_out, tokenizer) and train <= texts(bigger.train, tokenizer)


def test_documents_have_begin_and_end(folder, tmp_path):
    corpus, tokenizer, _ = open_one(folder, tmp_path / "cache")
    tokens = corpus.train.file.read(0, 0, int(corpus.train.file.lengths[0]))
    assert (tokens[0], tokens[-1]) == (tokenizer.begin, tokenizer.end) == (256, 257)


def test_the_cache_is_used_until_the_text_changes(folder, tmp_path):
    first = open_one(folder, tmp_path / "cache")
    again = open_one(folder, tmp_path / "cache")
    assert any("tokenising" in s for s in first[2]) and again[2] == []
    assert first[0].fingerprint == again[0].fingerprint
    (folder / "000.txt").write_text("changed")
    changed = open_one(folder, tmp_path / "cache")
    assert changed[2] and changed[0].fingerprint != first[0].fingerprint


def test_bytes_per_token_counts_the_held_out_text(folder, tmp_path):
    corpus, tokenizer, _ = open_one(folder, tmp_path / "cache")
    held = texts(corpus.held_out, tokenizer)
    size = sum(len(t.encode()) for t in held)
    assert corpus.bytes_per_token == pytest.approx(size / (size + 2 * len(held)))


def test_a_single_file_holds_out_its_tail(tmp_path):
    (tmp_path / "one.txt").write_text("x" * 500 + "y" * 500)
    corpus, _, _ = open_one(tmp_path / "one.txt", tmp_path / "cache", holdout=0.1)
    assert corpus.held_out.tokens == 101 and corpus.train.tokens == 901
    assert set(PackedRows(corpus.held_out, 32, 0)[0]["tokens"]) == {ord("y")}


def test_no_hold_out(tmp_path, folder):
    corpus, _, _ = open_one(folder, tmp_path / "cache", holdout=0.0)
    assert corpus.held_out is None and len(corpus.train.document) == 200


def test_trained_tokenizers_are_cached(folder, tmp_path):
    corpus, tokenizer, said = open_one(folder, tmp_path / "cache", tokenizer="bpe:300")
    assert any("BPE" in s for s in said) and tokenizer.vocab <= 300
    assert corpus.bytes_per_token > 1.2
    assert open_one(folder, tmp_path / "cache", tokenizer="bpe:300")[2] == []


def test_tokenised_files_of_our_own_keep_split_and_bytes(folder, tmp_path):
    from megajax.data.corpus import tokenise
    from megajax.data.source import open_source
    from megajax.data.tokenizer import ByteTokenizer

    stats = tokenise(
        open_source(str(folder), DataConfig()), ByteTokenizer(), tmp_path / "out" / "web"
    )
    from_text, _, _ = open_one(folder, tmp_path / "cache")
    for name in ("web", "web.bin", "web.idx"):
        corpus, _, _ = open_one(tmp_path / "out" / name, tmp_path / "cache")
        assert corpus.train.tokens == from_text.train.tokens
        assert corpus.bytes_per_token == from_text.bytes_per_token
    assert stats["tokens"] == from_text.train.tokens + from_text.held_out.tokens


def test_foreign_token_files_know_no_bytes(folder, tmp_path):
    from megajax.data.indexed import TokenWriter

    with TokenWriter(tmp_path / "foreign", 300) as writer:
        for i in range(100):
            writer.add(np.full(10, i))
    corpus, _, _ = open_one(tmp_path / "foreign", tmp_path / "cache")
    assert corpus.bytes_per_token is None and corpus.held_out.tokens > 0


def test_mixtures_open_every_part(folder, tmp_path):
    cfg = DataConfig(source=f"{folder}:3,{folder}/0*.txt:1")
    corpora, _ = open_corpora(cfg, tmp_path / "cache", lambda _: None)
    assert [c.weight for c in corpora] == [3.0, 1.0]
    assert corpora[1].train.tokens < corpora[0].train.tokens


@pytest.mark.parametrize(
    ("source", "words"),
    [("", "data.source is empty"), ("nowhere/", "nowhere/"), ("x.bin", "needs both")],
)
def test_missing_sources(tmp_path, source, words):
    with pytest.raises(UserError) as error:
        open_one(source, tmp_path)
    assert words in str(error.value)


def test_empty_documents_only(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="holds no text"):
        open_one(tmp_path, tmp_path / "cache")
    assert list((tmp_path / "cache" / "corpora").iterdir()) == []  # nothing half-made


def test_texts_without_tokens_are_refused_when_they_are_packed(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("   ")
    corpus, _, _ = open_one(
        tmp_path / "x.txt", tmp_path / "cache", tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert corpus.train.tokens == 0 and corpus.bytes_per_token is None
    with pytest.raises(UserError, match="has 0 tokens"):
        PackedRows(corpus.train, 8, 0)


def test_a_long_document_takes_few_times_its_bytes_of_memory(tmp_path):
    import tracemalloc

    from megajax.data.corpus import tokenise
    from megajax.data.indexed import TokenFile
    from megajax.data.source import open_source
    from megajax.data.tokenizer import ByteTokenizer

    line = np.random.default_rng(0).integers(32, 127, 2**22, np.uint8).tobytes()
    (tmp_path / "line.txt").write_bytes(line)
    source = open_source(str(tmp_path / "line.txt"), DataConfig())
    tracemalloc.start()
    try:
        tokenise(source, ByteTokenizer(), tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The file, its text, four bytes for each token, and copies of a block.
    assert peak < 9 * len(line)
    tokens = TokenFile(tmp_path / "out").read(0, 0, len(line) + 2)
    assert tokens.tolist() == [256, *line, 257]
