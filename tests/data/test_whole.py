"""What the cache holds is made again when it is damaged; pairs appear as a whole."""

import os
import stat
import threading

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data import corpus, documents
from megajax.data.config import DataConfig
from megajax.data.corpus import open_corpora, recorded_tokenizer, tokenise
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.source import open_source
from megajax.data.tokenizer import ByteTokenizer, open_tokenizer, train_bpe

FILES = ("tokens.bin", "tokens.idx", "tokens.documents.npy", "tokens.json", "tokenizer.json")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"document {i} " * (1 + i % 7))
    return folder


def open_one(source, cache, **settings):
    said = []
    cfg = DataConfig(**{"source": str(source), "tokenizer": "bpe:262"} | settings)
    corpora, tokenizer = open_corpora(cfg, cache, said.append)
    return corpora[0], tokenizer, said


def cut(raw):
    return raw[: len(raw) // 2]


def flip(raw):
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


def test_damaged_folders_of_the_cache_are_made_again(folder, tmp_path):
    cache = tmp_path / "cache"
    before = open_one(folder, cache)[0].fingerprint
    files = {f.name: f for f in cache.rglob("*") if f.name in FILES + (documents.DIGESTS,)}
    assert len(files) == len(FILES) + 1
    damages = (cut, flip, lambda raw: b"", None)
    for i, path in enumerate(files.values()):
        raw = path.read_bytes()
        for damage in (damages[i % 4], damages[(i + 1) % 4]):
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage(raw))
            again, _, said = open_one(folder, cache)
            assert again.fingerprint == before and path.read_bytes() == raw
            assert len(said) == 1
    assert len(list(cache.glob("*/*"))) == 2  # nothing is left beside


def test_damaged_keys_of_the_cache_are_computed_again(tmp_path):
    with TokenWriter(tmp_path / "x", 300) as writer:
        for i in range(40):
            writer.add(np.full(8, i))
    before = open_one(tmp_path / "x", tmp_path / "cache", tokenizer="bytes")[0].fingerprint
    (path,) = (tmp_path / "cache" / "documents").iterdir()
    raw = path.read_bytes()
    for damaged in (b"", cut(raw), flip(raw), b"PK\3\4" + raw, raw[:16] + b"PK\3\4"):
        path.write_bytes(damaged)
        again, _, _ = open_one(tmp_path / "x", tmp_path / "cache", tokenizer="bytes")
        assert again.fingerprint == before and path.read_bytes() == raw


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        cut,
        lambda raw: b"PK\3\4" + raw,
        lambda raw: raw[:20] + b"(((",
        lambda raw: raw.replace(b"(100,), }" + b" " * 27, b"(1" + b"0" * 30 + b",), }"),
        lambda raw: raw.replace(b"(100,)", b"(True,)"),
        lambda raw: raw.replace(b"100", b"'a'"),
        lambda raw: raw[:8] + b"\4\0 }\n\0" + raw[14:],
    ],
)
def test_arrays_that_are_none_are_refused_in_one_way(tmp_path, damage):
    np.save(tmp_path / "x.npy", np.arange(100))
    with pytest.raises(ValueError):
        documents.read_array(damage((tmp_path / "x.npy").read_bytes()))


def test_folders_of_the_cache_can_be_read_by_others(folder, tmp_path):
    mask = os.umask(0o022)
    try:
        open_one(folder, tmp_path / "cache")
    finally:
        os.umask(mask)
    for path in (tmp_path / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


@pytest.mark.parametrize("damaged", [False, True])
def test_runs_that_make_one_folder_at_one_time_agree(tmp_path, damaged):
    target, count = tmp_path / "cache" / "x", 6
    if damaged:
        target.mkdir(parents=True)
        (target / "file").write_text("old")
    barrier, failed = threading.Barrier(count), []

    def fill(new):
        (new / "file").write_text("content")
        barrier.wait()  # all of them have made it before any is renamed

    def run():
        try:
            documents.make_folder(target, fill)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and documents.is_whole(target) and (target / "file").read_text() == "content"
    assert [p.name for p in target.parent.iterdir()] == ["x"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:262"])
def test_folders_with_equal_names_sizes_and_times_are_not_taken_for_one_another(
    tmp_path, monkeypatch, tokenizer
):
    folders = []
    for place, letter in (("a", "x"), ("b", "y")):
        (tmp_path / place / "text").mkdir(parents=True)
        (tmp_path / place / "text" / "t.txt").write_text(letter * 200)
        os.utime(tmp_path / place / "text" / "t.txt", (1, 1))
        monkeypatch.chdir(tmp_path / place)
        corpus, opened, _ = open_one("text", tmp_path / "cache", tokenizer=tokenizer)
        text = opened.decode(corpus.train.file.read(0, 0, int(corpus.train.stop[0])))
        folders.append((set(text), opened.identity))
    assert [f[0] for f in folders] == [{"x"}, {"y"}]
    assert (folders[0][1] == folders[1][1]) == (tokenizer == "bytes")


# ---- pairs


def test_of_two_tokenisations_at_one_time_one_wins_as_a_whole(folder, tmp_path, monkeypatch):
    real, inner = corpus.publish, []

    def publish(*args):
        if not inner:  # while the first is at its end, a second begins and finishes
            inner.append(True)
            tokenise(open_source(str(folder / "1.txt"), DataConfig()), ByteTokenizer(), prefix)
        real(*args)

    prefix = tmp_path / "out" / "web"
    monkeypatch.setattr(corpus, "publish", publish)
    with pytest.raises(FileExistsError):
        tokenise(open_source(str(folder), DataConfig()), ByteTokenizer(), prefix)
    assert len(TokenFile(prefix)) == 1
    names = sorted(p.name for p in prefix.parent.iterdir())
    assert names == ["web.bin", "web.documents.npy", "web.idx", "web.json"]


def test_nothing_of_a_former_pair_stays_beside_a_new_one(folder, tmp_path):
    train_bpe(["a b c"], 260, tmp_path / "bpe" / "tokenizer.json")
    source, prefix = open_source(str(folder), DataConfig()), tmp_path / "web"
    for tokenizer, recorded in (
        (open_tokenizer(str(tmp_path / "bpe")), f"{prefix}.tokenizer"),
        (ByteTokenizer(), "bytes"),
    ):
        tokenise(source, tokenizer, prefix)
        assert recorded_tokenizer(str(prefix)) == recorded
        (tmp_path / "web.idx").unlink()


def test_a_table_of_other_tokens_is_refused(folder, tmp_path):
    tokenise(open_source(str(folder), DataConfig()), ByteTokenizer(), tmp_path / "web")
    with TokenWriter(tmp_path / "web", 300) as writer:
        for i in range(30):
            writer.add(np.full(8, i))
    with pytest.raises(UserError, match=r"web.documents.npy is of other tokens than .*web.bin"):
        open_one(tmp_path / "web", tmp_path / "cache", tokenizer="bytes")


def test_a_slash_means_the_folder_beside_a_pair(folder, tmp_path):
    tokenise(open_source(str(folder / "1.txt"), DataConfig()), ByteTokenizer(), folder)
    assert open_one(f"{folder}/", tmp_path / "cache")[0].train.document.size > 1
    assert open_one(folder, tmp_path / "cache", tokenizer="bytes")[0].train.document.size == 1
