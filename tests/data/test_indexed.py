import os
import struct

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data.indexed import TokenFile, TokenWriter

DOCUMENTS = [np.arange(5), np.array([], int), np.array([511, 7, 7])]


@pytest.mark.parametrize("vocab", [512, 200_000])
def test_round_trip(tmp_path, vocab):
    with TokenWriter(tmp_path / "x", vocab) as writer:
        for d in DOCUMENTS:
            writer.add(d)
    file = TokenFile(tmp_path / "x")
    assert len(file) == 3 and file.dtype == (np.uint16 if vocab < 2**16 else np.int32)
    for i, d in enumerate(DOCUMENTS):
        assert file.read(i, 0, len(d)).tolist() == d.tolist()
    assert file.read(2, 1, 3).tolist() == [7, 7]


def megatron_bytes(documents, code, dtype):
    """The format written down a second time, from Megatron-LM's reader."""
    lengths = [len(d) for d in documents]
    pointers, at = [], 0
    for n in lengths:
        pointers.append(at)
        at += n * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(documents)) + struct.pack("<Q", len(documents) + 1)
    index += np.array(lengths, np.int32).tobytes() + np.array(pointers, np.int64).tobytes()
    index += np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    return index, b"".join(np.asarray(d, dtype).tobytes() for d in documents)


def test_our_files_are_megatrons_to_the_byte(tmp_path):
    with TokenWriter(tmp_path / "x", 512) as writer:
        for d in DOCUMENTS:
            writer.add(d)
    index, data = megatron_bytes(DOCUMENTS, 8, np.uint16)
    assert (tmp_path / "x.idx").read_bytes() == index
    assert (tmp_path / "x.bin").read_bytes() == data


@pytest.mark.parametrize(("code", "dtype"), [(1, np.uint8), (4, np.int32), (8, np.uint16)])
def test_megatrons_files_are_read(tmp_path, code, dtype):
    index, data = megatron_bytes([[1, 2, 3], [4]], code, dtype)
    (tmp_path / "m.idx").write_bytes(index)
    (tmp_path / "m.bin").write_bytes(data)
    assert TokenFile(tmp_path / "m").read(1, 0, 1).tolist() == [4]


def test_a_failed_writer_leaves_no_index(tmp_path):
    with pytest.raises(RuntimeError), TokenWriter(tmp_path / "x", 512) as writer:
        writer.add(np.arange(3))
        raise RuntimeError
    with pytest.raises(UserError, match="cannot read token file"):
        TokenFile(tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i, d: (b"garbage" + i, d), "is not a Megatron index"),
        (lambda i, d: (i[:-3], d), "is damaged"),
        (lambda i, d: (i, d[:-1]), "is damaged"),
        (lambda i, d: (i[:17] + b"\x63" + i[18:], d), "dtype code 99"),
        (lambda i, d: (b"", d), "is not a Megatron index"),
    ],
)
def test_damage_is_found(tmp_path, change, words):
    index, data = change(*megatron_bytes([[1, 2, 3], [4]], 8, np.uint16))
    (tmp_path / "m.idx").write_bytes(index)
    (tmp_path / "m.bin").write_bytes(data)
    with pytest.raises(UserError) as error:
        TokenFile(tmp_path / "m")
    assert words in str(error.value) and str(error.value).endswith(" (--data.source)")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([0, 2, 1, 3], "out of order: entry 2 is 1, after 2"),
        ([0, -1, 2, 3], "entry 1 of its document table is -1, and its sequences are 0 to 3"),
        ([0, 1, 2, 4], "entry 3 of its document table is 4"),
        ([0, 1, 2**63 - 1, 3], "entry 2 of its document table is 9223372036854775807"),
        ([1, 1, 2, 3], "goes from 1 to 3"),
        ([0, 1, 1, 2], "goes from 0 to 2"),
    ],
)
def test_a_document_table_that_no_writer_makes_is_refused(tmp_path, table, words):
    index, data = megatron_bytes([[1, 2, 3], [4], [5]], 8, np.uint16)
    (tmp_path / "m.idx").write_bytes(index[:-32] + np.array(table, np.int64).tobytes())
    (tmp_path / "m.bin").write_bytes(data)
    with pytest.raises(UserError, match=words):
        TokenFile(tmp_path / "m")


def test_several_sequences_may_be_one_document(tmp_path):
    index, data = megatron_bytes([[1, 2, 3], [4], [5]], 8, np.uint16)
    table = np.array([0, 0, 2, 3], np.int64).tobytes()
    (tmp_path / "m.idx").write_bytes(index[:-32] + table)
    (tmp_path / "m.bin").write_bytes(data)
    assert TokenFile(tmp_path / "m").read(2, 0, 1).tolist() == [5]


def test_a_document_that_the_index_cannot_hold_is_refused(tmp_path):
    with TokenWriter(tmp_path / "x", 512) as writer:
        with pytest.raises(UserError, match=r"2,147,483,648 tokens, .* 2,147,483,647 at most"):
            writer.add(np.broadcast_to(np.int32(1), 2**31))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("open", r"cannot read token file .*x: .*denied.* \(--data.source\)"),
        ("preadv", r"cannot read .*x.bin: denied \(--data.source\)"),
    ],
)
def test_a_pair_that_cannot_be_read_is_named(tmp_path, monkeypatch, call, words):
    with TokenWriter(tmp_path / "x", 512) as writer:
        writer.add(np.arange(5))

    def fail(*args, **kwargs):
        raise PermissionError(13, "denied")

    with monkeypatch.context() as patched, pytest.raises(UserError, match=words):
        patched.setattr(os, call, fail)
        TokenFile(tmp_path / "x").read(0, 0, 1)


@pytest.mark.parametrize(
    ("offsets", "lengths", "said"),
    [
        ([-2, 6], [3, 1], "negative length or offset .document 0"),
        ([2**63 - 2, 6], [3, 1], "8 bytes, 9223372036854775812 used by document 0"),
        ([0, 2**63 - 8], [3, 2**31 - 1], "used by document 1"),
        ([0, 6], [3, 2], "8 bytes, 10 used by document 1"),
        ([0, 2], [3, 1], "documents 0 and 1 share tokens"),
        ([2, 0], [1, 3], "documents 1 and 0 share tokens"),
        ([1, 6], [2, 1], "not a multiple of 2 bytes"),
        ([0, 6], [3, -1], "negative length or offset .document 1"),
    ],
)
def test_offsets_are_those_of_the_file(offsets, lengths, said, tmp_path):
    """A sum that overflows passed, and gave no tokens; an offset into a neighbour gave its."""
    index, data = megatron_bytes([[1, 2, 3], [4]], 8, np.uint16)
    body = np.array(lengths, np.int32).tobytes() + np.array(offsets, np.int64).tobytes()
    (tmp_path / "m.idx").write_bytes(index[:34] + body + index[34 + len(body) :])
    (tmp_path / "m.bin").write_bytes(data)
    with pytest.raises(UserError, match=said):
        TokenFile(tmp_path / "m")


def test_documents_may_lie_in_any_order(tmp_path):
    index, data = megatron_bytes([[1, 2, 3], [4]], 8, np.uint16)
    body = np.array([1, 2], np.int32).tobytes() + np.array([6, 0], np.int64).tobytes()
    (tmp_path / "m.idx").write_bytes(index[:34] + body + index[34 + len(body) :])
    (tmp_path / "m.bin").write_bytes(data)
    assert [TokenFile(tmp_path / "m").read(i, 0, i + 1).tolist() for i in (0, 1)] == [[4], [1, 2]]


def test_a_file_that_is_cut_short_while_it_is_open_gets_a_sentence(tmp_path):
    """Through a memory map it ended the process by SIGBUS."""
    with TokenWriter(tmp_path / "x", 512) as writer:
        for _ in range(9):
            writer.add(np.arange(500))
    file = TokenFile(tmp_path / "x")
    os.truncate(tmp_path / "x.bin", 2200)
    assert file.read(1, 0, 500).tolist() == list(range(500))
    with pytest.raises(UserError, match=r"ends at byte 2200, in document 2, and had 9000 bytes"):
        file.read(2, 0, 500)
    with pytest.raises(UserError, match=r"ends at byte 8000, .* \(--data.source\)"):
        file.read(8, 0, 1)


def test_a_token_file_that_nobody_needs_is_closed(tmp_path):
    with TokenWriter(tmp_path / "x", 512) as writer:
        writer.add(np.arange(3))
    before = len(os.listdir("/proc/self/fd"))
    files = [TokenFile(tmp_path / "x") for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    del files
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_a_pipe_is_no_token_file(suffix, tmp_path):
    for name, data in zip(("idx", "bin"), megatron_bytes([[1]], 8, np.uint16), strict=True):
        (tmp_path / f"m.{name}").write_bytes(data)
    (tmp_path / f"m.{suffix}").unlink()
    os.mkfifo(tmp_path / f"m.{suffix}")
    with pytest.raises(UserError, match="it is a named pipe"):
        TokenFile(tmp_path / "m")
