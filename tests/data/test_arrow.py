"""Arrow files as texts and chats: what save_to_disk of datasets writes, and hostile ones."""

import dataclasses
import gzip
import json
import struct

import pyarrow
import pytest
from pyarrow import ipc

from megajax.core.errors import UserError
from megajax.data import chats
from megajax.data.config import DataConfig
from megajax.data.source import open_source

CHATS = [
    {"messages": [{"role": "user", "content": f"{k}?"}, {"role": "assistant", "content": "é" * k}]}
    for k in range(1, 6)
]


def write(path, table, form="stream", rows=2, **options):
    options = ipc.IpcWriteOptions(**options)
    new = ipc.new_stream if form == "stream" else ipc.new_file
    path.parent.mkdir(parents=True, exist_ok=True)
    with new(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def saved(folder, table, files=2):
    """Writes a folder as datasets 4.0 does: rows in files, state.json, dataset_info.json."""
    step = -(-len(table) // files)
    names = [f"data-{k:05d}-of-{files:05d}.arrow" for k in range(files)]
    for k, name in enumerate(names):
        write(folder / name, table.slice(k * step, step))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    info = {"features": {n: {"dtype": "string", "_type": "Value"} for n in table.column_names}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def texts(source, **changes):
    return [d.text for d in open_source(str(source), DataConfig(**changes)).documents()]


@pytest.mark.parametrize("form", ("stream", "file"))
@pytest.mark.parametrize("kind", ("string", "large_string", "binary", "dictionary"))
def test_texts_of_a_file(tmp_path, form, kind):
    words = ["a", "é\n", None, "c" * 99, "a"]
    column = pyarrow.array(words)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    file = write(tmp_path / "x.arrow", pyarrow.table({"n": range(5), "body": column}), form)
    if kind == "string":
        with pytest.raises(UserError, match="x.arrow row 3: member 'body' is null"):
            texts(file, text_key="body")
    column = column.drop_null()
    write(file, pyarrow.table({"n": range(4), "body": column}), form)
    assert texts(file, text_key="body") == ["a", "é\n", "c" * 99, "a"]
    with pytest.raises(UserError, match="no column 'text'; its columns: n, body.*--data.text_key"):
        texts(file)
    with pytest.raises(UserError, match="column 'n' has the type int64, no text"):
        texts(file, text_key="n")


def test_folders_of_save_to_disk(tmp_path):
    table = pyarrow.table({"text": [f"text {k}" for k in range(7)]})
    folder = saved(tmp_path / "train", table)
    write(folder / "cache-0123.arrow", pyarrow.table({"text": ["what datasets computed"]}))
    assert texts(folder) == table["text"].to_pylist()
    assert texts(tmp_path) == table["text"].to_pylist()

    folder = saved(tmp_path / "chats" / "train", pyarrow.Table.from_pylist(CHATS))
    expected = [m["messages"] for m in CHATS]
    cfg = chats.ChatDataConfig(source=f"{folder}:0.5,{folder / 'data-00000-of-00002.arrow'}:0.5")
    both, first = (source for *_, source in chats.open_sources(cfg))
    assert [both[k].messages for k in range(len(both))] == expected
    assert [first[k].messages for k in range(len(first))] == expected[:3]
    with pytest.raises(UserError, match="holds the splits train; name the folder of one.*train "):
        chats.open_source(str(folder.parent))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \.arrow file"):
        chats.open_source(str(tmp_path / "empty"))


@pytest.mark.parametrize("ending", (".gz", ".zst"))
def test_chats_of_packed_lines(tmp_path, ending):
    lines = "\n\n".join(map(json.dumps, CHATS)).encode()
    pack = gzip.compress if ending == ".gz" else lambda b: pyarrow.compress(b, "zstd", asbytes=True)
    (tmp_path / f"x.jsonl{ending}").write_bytes(pack(lines))
    source = chats.open_source(str(tmp_path / f"x.jsonl{ending}"))
    assert [source[k].messages for k in range(5)] == [m["messages"] for m in CHATS]
    assert source[1].where.endswith("line 3")
    (tmp_path / f"x.jsonl{ending}").write_bytes(pack(lines)[:-20])
    with pytest.raises(UserError, match="cannot read .*x.jsonl"):
        chats.open_source(str(tmp_path / f"x.jsonl{ending}"))
    (tmp_path / f"x.jsonl{ending}").write_bytes(pack(b'{"messages": "' + b" " * 2**24))
    with pytest.raises(UserError, match="unfolds to over"):
        chats.open_source(str(tmp_path / f"x.jsonl{ending}"))


def test_hostile_files(tmp_path):
    table = pyarrow.table({"text": ["word " * 50] * 40})
    intact = write(tmp_path / "x.arrow", table, rows=40).read_bytes()
    for cut in (0, 3, 100, len(intact) // 2):
        (tmp_path / "x.arrow").write_bytes(intact[:cut])
        with pytest.raises(UserError, match="cannot read .*x.arrow"):
            texts(tmp_path / "x.arrow")
    for codec in ("lz4", "zstd"):
        write(tmp_path / "x.arrow", table, compression=codec)
        with pytest.raises(UserError, match="compressed inside: write it again without"):
            texts(tmp_path / "x.arrow")
    # A dictionary in which a long value stands once, and in the table 100,000 times.
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 10**5, "int8"), ["w" * 999])
    write(tmp_path / "x.arrow", pyarrow.table({"text": repeated}), rows=10**5)
    with pytest.raises(UserError, match="unfolds to over"):
        texts(tmp_path / "x.arrow")
    # Offsets that lead out of the file.
    raw = write(tmp_path / "x.arrow", pyarrow.table({"text": ["x" * 7777]})).read_bytes()
    changed = raw.replace(struct.pack("<ii", 0, 7777), struct.pack("<ii", 0, 2**30))
    assert changed != raw
    (tmp_path / "x.arrow").write_bytes(changed)
    with pytest.raises(UserError, match="cannot read .*x.arrow"):
        texts(tmp_path / "x.arrow")
    # Chats: a row of very many values, types that are not read, no column of a chat.
    empty = pyarrow.ListArray.from_arrays([0, 2**20 + 1], pyarrow.nulls(2**20 + 1))
    source = chats.open_source(str(write(tmp_path / "x.arrow", pyarrow.table({"messages": empty}))))
    with pytest.raises(UserError, match="row 1 has 1,048,578 values; 1,048,576 are read at most"):
        source[0]
    coded = pyarrow.table({"instruction": pyarrow.array(["a"]).dictionary_encode()})
    source = chats.open_source(str(write(tmp_path / "x.arrow", coded)))
    with pytest.raises(UserError, match="values of the type dictionary.* are not read"):
        source[0]
    write(tmp_path / "x.arrow", pyarrow.table({"n": [1]}))
    with pytest.raises(UserError, match="needs columns of messages.*its columns: n"):
        chats.open_source(str(tmp_path / "x.arrow"))


def test_bytes_that_are_changed_end_in_an_error_or_in_texts(tmp_path):
    """No byte of a small file crashes the process."""
    table = pyarrow.table({"text": pyarrow.array(["ab", "c", "ab"]).dictionary_encode()})
    intact = bytearray(write(tmp_path / "x.arrow", table).read_bytes())
    source = open_source(str(tmp_path / "x.arrow"), dataclasses.replace(DataConfig()))
    failed = 0
    for at in range(len(intact)):
        changed = intact.copy()
        changed[at] ^= 0xFF
        (tmp_path / "x.arrow").write_bytes(changed)
        try:
            list(source.documents())
        except UserError:
            failed += 1
    assert failed > len(intact) // 10
