import contextlib
import gzip
import importlib.util
import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megajax.core.errors import UserError
from megajax.data import source
from megajax.data.config import DataConfig
from megajax.data.corpus import open_corpora
from megajax.data.source import each_file_once, open_source


def read(folder, **settings):
    return list(open_source(str(folder), DataConfig(**settings)).documents())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "deep" / "b.md").write_text("# beta")
    (tmp_path / "c.py").write_text("gamma = 1")
    (tmp_path / "d.bin").write_text("not text")
    lines = [json.dumps({"text": "one"}), "", json.dumps({"text": "two"})]
    (tmp_path / "e.jsonl").write_text("\n".join(lines))
    with gzip.open(tmp_path / "f.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "three"}))
    with gzip.open(tmp_path / "g.txt.gz", "wt") as file:
        file.write("delta")
    return tmp_path


def test_a_folder_gives_every_text_once_in_order(folder):
    assert [(d.name, d.text) for d in read(folder)] == [
        ("a.txt", "alpha"),
        ("c.py", "gamma = 1"),
        ("deep/b.md", "# beta"),
        ("e.jsonl#1", "one"),
        ("e.jsonl#3", "two"),
        ("f.jsonl.gz#1", "three"),
        ("g.txt.gz", "delta"),
    ]


def test_globs_and_single_files(folder):
    assert [d.name for d in read(f"{folder}/**/*.md")] == ["deep/b.md"]
    assert [d.text for d in read(folder / "a.txt")] == ["alpha"]


def test_the_standard_library_is_there():
    source = open_source("stdlib", DataConfig())
    assert len(source.files) > 300
    assert all(f.suffix == ".py" for f in source.files)
    assert not any("test" in f.parts or "site-packages" in f.parts for f in source.files)


def test_the_fingerprint_follows_the_files(folder):
    before = open_source(str(folder), DataConfig()).fingerprint()
    assert open_source(str(folder), DataConfig()).fingerprint() == before
    (folder / "a.txt").write_text("alpha, longer")
    assert open_source(str(folder), DataConfig()).fingerprint() != before


def test_undecodable_files_are_named_skipped_or_replaced(folder):
    (folder / "bad.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UserError) as error:
        read(folder)
    assert "bad.txt is not UTF-8 text (byte 0xe9 at offset 3)" in str(error.value)
    assert "bad.txt" not in [d.name for d in read(folder, undecodable="skip")]
    replaced = {d.name: d.text for d in read(folder, undecodable="replace")}
    assert replaced["bad.txt"] == "caf\ufffd au lait"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", "{oops", "line 1 is not JSON"),
        ("x.jsonl", '{"body": "x"}', "has no member 'text'"),
        ("x.jsonl", '"just a string"', "has no member 'text'"),
        ("x.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("x.jsonl", "9" * 5_000, "line 1 is not JSON"),
        ("x.jsonl", '{"text": "a"}\n\n{"text": 5}', "line 3: member 'text' is int"),
        ("x.jsonl", '{"text": null}', "line 1: member 'text' is null"),
        ("x.jsonl", '{"text": ["a"]}', "line 1: member 'text' is list"),
        (
            "x.jsonl",
            r'{"text": "caf\udce9"}',
            r"line 1: member 'text' has the lone surrogate \udce9",
        ),
        ("x.txt.gz", "not gzip", "cannot read"),
        ("x.jsonl.gz", "not gzip", "cannot read"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        read(tmp_path)
    assert name in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("name", ["x.txt.gz", "x.md.gz", "x.py.gz", "x.jsonl.gz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-20],
        lambda b: b[:5],
        lambda b: b[:10] + b"\xff" * 4 + b[14:],
        lambda b: b + b"tail",
    ],
)
def test_damaged_gzip_files_are_named(tmp_path, name, damage):
    compressed = gzip.compress(json.dumps({"text": "several words " * 30}).encode())
    (tmp_path / name).write_bytes(damage(compressed))
    with pytest.raises(UserError, match=f"cannot read .*{name}: "):
        read(tmp_path)


def test_lines_end_at_newlines_only(tmp_path):
    """JSON allows raw U+2028, U+0085 and other line ends of Unicode inside a string."""
    text = "one\u2028two\u2029three\x85four"
    lines = [json.dumps({"text": text}, ensure_ascii=False), json.dumps({"text": "next"})]
    (tmp_path / "x.jsonl").write_bytes("\r\n".join(lines).encode())
    assert [(d.name, d.text) for d in read(tmp_path)] == [
        ("x.jsonl#1", text),
        ("x.jsonl#2", "next"),
    ]


def test_lone_surrogates_are_skipped_or_replaced(tmp_path):
    lines = [r'{"text": "a\ud800b"}', r'{"text": "\ud83d\ude00"}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert [d.text for d in read(tmp_path, undecodable="skip")] == ["\U0001f600"]
    replaced = [d.text for d in read(tmp_path, undecodable="replace")]
    assert replaced == ["a\ufffdb", "\U0001f600"]


def test_another_text_key(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "hello"}')
    assert read(tmp_path, text_key="body")[0].text == "hello"


def test_missing_and_empty_sources(tmp_path):
    with pytest.raises(
        UserError, match="has no .txt, .md, .py, .jsonl, .json, .parquet, .arrow file"
    ):
        read(tmp_path)
    with pytest.raises(UserError, match="Did you mean stdlib?"):
        read("stdlb")
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(UserError, match="x.csv is not a"):
        read(tmp_path / "x.csv")


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_line_that_is_not_utf8_is_named_skipped_or_replaced_alone(tmp_path, name):
    raw = b'{"text": "one"}\n{"text": "caf\xe9"}\n{"text": "three"}'
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    with pytest.raises(UserError, match=rf"{name} line 2 is not UTF-8 .*0xe9 at offset 13"):
        read(tmp_path)
    assert [d.text for d in read(tmp_path, undecodable="skip")] == ["one", "three"]
    replaced = [d.text for d in read(tmp_path, undecodable="replace")]
    assert replaced == ["one", "caf\ufffd", "three"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"alpha \xef\xbb\xbf")
    (tmp_path / "b.jsonl").write_bytes(mark + b'{"text": "one"}\n' + mark + b'{"text": "two"}')
    (tmp_path / "c.md").write_bytes(mark)
    assert [d.text for d in read(tmp_path)] == ["alpha \ufeff", "one", "two"]


def test_names_that_are_not_utf8_are_read(tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), b"f\xe9")
    os.mkdir(folder)
    with open(os.path.join(folder, b"caf\xe9\n.txt"), "w") as file:
        file.write("hello " * 20)
    cfg = DataConfig(os.fsdecode(folder))
    corpora, _ = open_corpora(cfg, tmp_path / "cache", lambda _: None)
    assert corpora[0].train.tokens > 100


def test_long_names_are_refused_by_the_flag():
    for suffix in ("", ".bin"):
        with pytest.raises(UserError, match=r"File name too long \(--data.source\)"):
            open_corpora(DataConfig("a" * 300 + suffix), "cache", lambda _: None)
        with pytest.raises(UserError, match="data.source"):  # short enough
            open_corpora(DataConfig("a" * 250 + suffix), "cache", lambda _: None)


def test_broken_links_and_folders_beside_the_standard_library_are_passed_over(
    tmp_path, monkeypatch
):
    (tmp_path / "a.py").write_text("a = 1")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "missing")
    (tmp_path / "folder.py").mkdir()
    paths = {"stdlib": str(tmp_path), "purelib": str(tmp_path)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    for name in ("stdlib", "site-packages"):
        assert [d.name for d in read(name)] == ["a.py"]


def test_a_file_that_vanishes_while_files_are_listed_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone.txt: No such file"):
        each_file_once([tmp_path / "gone.txt"])


def test_a_file_that_vanishes_or_grows_before_it_is_read(tmp_path, monkeypatch):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "one"}\n')
    source = open_source(str(tmp_path), DataConfig())
    stat = Path.stat

    def before(path, **how):  # somebody appends between the question and the reading
        status = stat(path, **how)
        with open(path, "a") as file:
            file.write('{"text": "two"}\n')
        return status

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", before)
        texts = [d.text for d in source.documents()]
    assert texts == ['{"text": "one"}\n', "one", "two"]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"cannot read .*a.txt: .*No such file.*\(--data.source\)"):
        list(source.documents())


def test_a_compressed_file_that_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "GZIP_SLACK", 1000)
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write(" " * 10**6)
    with pytest.raises(UserError, match=r"a.txt.gz unfolds to over \d+,\d+ bytes.*gunzip"):
        read(tmp_path)


def test_a_line_nested_without_end(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + "[" * 100_000)
    with pytest.raises(UserError, match="a.jsonl line 2 is not JSON: it is nested too deep"):
        read(tmp_path)


def packed(data, ending):
    return gzip.compress(data) if ending == ".gz" else pyarrow.compress(data, "zstd", asbytes=True)


LINES = b'{"text": "one"}\n{"text": "two"}\n'
LIST = b'[\n {"text": "one"},\n {"text": "two", "id": 2}\n]\n'
KINDS = {
    "a.jsonl": LINES,
    "b.json": LINES,
    "c.json": LIST,
    "d.json": LIST.replace(b"\n", b""),
    "e.txt": b"one",
    "f.json": b'{\n "text": "one"\n}',
    "g.json": b'{"text": "one"}',
    "h.json": b"\xef\xbb\xbf" + LINES,
}


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("capitals", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_every_ending_gives_the_texts(name, capitals, ending, tmp_path):
    data = packed(KINDS[name], ending) if ending else KINDS[name]
    name += ending
    (tmp_path / (name.upper() if capitals else name)).write_bytes(data)
    want = ["one"] if name[0] in "efg" else ["one", "two"]
    assert [d.text for d in read(tmp_path)] == want
    assert open_source(str(tmp_path), DataConfig()).coverage() is None


def test_what_is_not_read_is_counted_by_its_ending(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.pdf").touch()
    names = "a.tar.gz b.TAR.GZ c.docx LICENSE .hidden e.parquet.gz f.bz2 g.jsonl.xz h.txt~ x.y.zip"
    for name in names.split():
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "settings.json").write_text('{"width": 3}')
    with pytest.raises(UserError, match=r"it has .pdf 4, .tar.gz 2, without ending 2, .bz2 1, "):
        read(tmp_path)
    (tmp_path / "A.TXT").write_text("one")
    (tmp_path / "more.json").write_text(json.dumps([{"text": "two"}]))
    source = open_source(str(tmp_path), DataConfig())
    assert [d.text for d in source.documents()] == ["one", "two"]
    said = source.coverage()
    assert said is not None and "read 2 of 17 files; not read: .pdf 4, .tar.gz 2" in said
    assert said.endswith("others 2")  # eight endings are listed, the others counted
    assert sum(n for _, n in source.unread) == 15
    assert dict(source.unread)[".json without a text 'text'"] == 1
    assert dict(source.unread)[".jsonl.xz"] == dict(source.unread)[".parquet.gz"] == 1
    heard = []
    open_corpora(DataConfig(source=str(tmp_path), holdout=0), tmp_path / "cache", heard.append)
    assert any("read 2 of" in line for line in heard)


def test_a_json_file_that_is_named_must_have_texts(tmp_path):
    for name, content, said in (
        ("a.json", '{"width": 3, "depth": 4}', "no member 'text'; its members: 'width', 'depth'"),
        ("b.json", "[1,\n2]", "b.json item 1 has no member 'text'"),
        ("c.json", '{"text": "a"', "c.json is not JSON"),
        ("d.json", "[" * 100_000, "nested too deep"),
        ("e.json", '[{"text": "a"},\n{"text": 5}]', "e.json item 2: member 'text' is int"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError) as error:
            read(tmp_path / name)
        assert said in str(error.value)


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path, compression="zstd", row_group_size=3)


def test_parquet_gives_the_text_of_every_row(tmp_path):
    texts = ["one", "zwei \u2028 drei", "", "four", "one", "five"] * 3
    write_parquet(tmp_path / "a.PARQUET", id=list(range(18)), text=texts)
    documents = read(tmp_path)
    assert [d.text for d in documents] == [t for t in texts if t]
    assert documents[0].name == "a.PARQUET#1" and documents[2].name == "a.PARQUET#4"
    write_parquet(tmp_path / "a.PARQUET", body=pyarrow.array(texts, pyarrow.large_string()))
    assert len(read(tmp_path, text_key="body")) == 15
    write_parquet(tmp_path / "a.PARQUET", text=pyarrow.array(texts).dictionary_encode())
    assert [d.text for d in read(tmp_path)] == [t for t in texts if t]


def test_parquet_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    for columns, said in (
        ({"body": ["a"]}, "a.parquet has no column 'text'; its columns: body"),
        ({"text": [1]}, "column 'text' has the type int64, no text"),
        ({"text": [["a"]]}, "has the type list"),
        ({"text": ["a", None]}, "a.parquet row 2: member 'text' is null"),
        ({"text": [b"a", b"\xff"]}, "a.parquet row 2 is not UTF-8"),
    ):
        write_parquet(file, **columns)
        with pytest.raises(UserError) as error:
            read(tmp_path)
        assert said in str(error.value)
    write_parquet(file, text=["several words " * 30] * 3)
    data = file.read_bytes()
    for damaged in (data[:-5], data[:40] + bytes(20) + data[60:], b"no parquet", b""):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="a.parquet"):
            read(tmp_path)


def test_parquet_that_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "GZIP_SLACK", 10_000)
    file = tmp_path / "a.parquet"
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 10**6), ["word " * 30])
    for column in (["x" * 10**6], repeated):
        parquet.write_table(pyarrow.table({"text": column}), file, compression="zstd")
        assert file.stat().st_size < 20_000
        with pytest.raises(UserError, match=r"a.parquet unfolds to over \d+,\d+ bytes"):
            read(tmp_path)
    (tmp_path / "a.parquet").unlink()
    for name in ("a.jsonl.zst", "a.txt.zst", "a.json.zst"):
        (tmp_path / name).write_bytes(packed(b'{"text": "' + b" " * 10**6, ".zst"))
        with pytest.raises(UserError, match=rf"{name} unfolds to over .* zstd -d"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.txt.zst"])
def test_damaged_zst_files_are_named(tmp_path, name):
    compressed = packed(json.dumps({"text": "several words " * 30}).encode(), ".zst")
    for damaged in (compressed[:-5], compressed[:5], b"no zstd", compressed + b"tail"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"cannot read .*{name}: "):
            read(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst", "a.json.zst"])
def test_without_pyarrow_the_extra_is_named(name, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "pyarrow" else find_spec(n, *a)
    )
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        UserError, match=f"{name} needs .* uv sync --extra parquet; or .*--data.source"
    ):
        read(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / "a.txt").write_text("one")
    assert [d.text for d in read(tmp_path)] == ["one"]


def test_every_change_of_a_parquet_file_is_read_or_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=["one", "two", "one", "three"])
    content = (tmp_path / "a.parquet").read_bytes()
    for place in range(len(content)):
        data = bytearray(content)
        data[place] ^= 0xA5
        (tmp_path / "a.parquet").write_bytes(data)
        with contextlib.suppress(UserError):
            read(tmp_path, undecodable="replace")
