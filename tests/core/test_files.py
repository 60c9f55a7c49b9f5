"""Files of strangers: kinds that block or never end, and JSON that takes much memory."""

import io
import json
import math
import os
import socket
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from megajax.core import files
from megajax.core.errors import UserError


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "linked_pipe").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    assert files.read_bytes(tmp_path / "link", 3) == b"abc"
    assert files.map_bytes(tmp_path / "link").tobytes() == b"abc"
    for name in ("pipe", "linked_pipe"):
        with pytest.raises(UserError, match=f"{name}: it is a named pipe; only regular files"):
            files.open_regular(tmp_path / name)
    with pytest.raises(UserError, match="it is a device"):
        files.open_regular("/dev/zero")
    with pytest.raises(UserError, match="it is a folder"):
        files.open_regular(tmp_path)
    with pytest.raises(OSError):
        files.open_regular(tmp_path / "socket")
    with pytest.raises(UserError, match="not a name that a file can have"):
        files.open_regular("a\0b")


def test_a_file_is_read_up_to_its_limit_in_memory_of_its_size(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    with pytest.raises(UserError, match="x has 100 bytes; 99 are read at most"):
        files.read_bytes(tmp_path / "x", 99)
    tracemalloc.start()
    assert files.read_bytes(tmp_path / "x", 2**30) == bytes(100)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_json_of_more_values_than_its_length_pays(monkeypatch):
    monkeypatch.setattr(files, "SLACK", 10_000)
    for text in (b"[" + b"[]," * 1000 + b"0]", '{"a":' + '[{},"\u00e9"],' * 1000 + "}"):
        with pytest.raises(ValueError, match="values in .* bytes; .* are read at most in a file"):
            files.parse_json(text)
    entries = ",".join(f'"layer.{i}.weight": [{i}, 123456789]' for i in range(1000))
    assert len(files.parse_json(f"{{{entries}}}")) == 1000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", r"x must hold a JSON object, not \[1\]"),
        ("null", "must hold a JSON object"),
        ("{", "x is not JSON: "),
        ("\xff", "x is not JSON: "),
        ('{"a": ' + "[" * 9_000, "nested too deep"),
        ('{"a": 1, "b": {}, "a": 2}', "'a' comes twi"),
        (f'{{"a": {{"{"b" * 900}": 1, "{"b" * 900}": 1}}}}', "'bbb.{195,205} comes twice"),
        (" " * 10_000, "x has 10,000 bytes"),
        (None, "cannot read .*x: No such file"),
    ],
)
def test_an_object_of_a_stranger_or_one_sentence_with_the_flag(tmp_path, content, words):
    if content is not None:
        (tmp_path / "x").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=words) as error:
        files.read_object(tmp_path / "x", 9_999, "init_from")
    assert str(error.value).endswith(" (--init_from)") and len(str(error.value)) < 400


def test_the_object_of_a_file(tmp_path):
    (tmp_path / "x").write_text('{"a": {"b": [1, {}]}, "c": null}')
    assert files.read_object(tmp_path / "x", 99) == {"a": {"b": [1, {}]}, "c": None}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "", "{", "\xff"])
def test_json_that_is_none(text):
    with pytest.raises(ValueError):
        files.parse_json(text)


def test_what_is_not_finite_is_null_in_json():
    """And comes back as NaN, or as what the reader says; NumPy's scalars are plain numbers."""
    value = {
        "a": (1.5, math.inf),
        2: [np.float32("nan"), np.float32(0.25), ml_dtypes.bfloat16(0.5)],
        np.int64(3): {"b": np.bool_(True), "c": None, "d": np.float64("-inf")},
    }
    text = files.json_text(value)
    parsed = json.loads(text, parse_constant=pytest.fail)
    assert text.endswith("}\n") and parsed == {
        "a": [1.5, None],
        "2": [None, 0.25, 0.5],
        "3": {"b": True, "c": None, "d": None},
    }
    assert math.isnan(files.or_nan(parsed["a"][1])) and files.or_nan(None, math.inf) == math.inf
    assert files.or_nan(0.0) == 0 and files.or_nan(0.0, math.inf) == 0


@pytest.mark.parametrize("key", [math.nan, -math.inf, np.float32("nan"), np.float16("inf")])
def test_a_key_must_be_finite(key):
    with pytest.raises(ValueError, match="JSON has no key -?(nan|inf)"):
        files.json_text({"a": [{key: 1}]})


def test_an_array_is_no_json():
    with pytest.raises(TypeError, match="ndarray"):
        files.json_text({"a": np.zeros(2)})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_those_that_numpy_reads(tmp_path, save):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 4)),
        "b": np.asfortranarray(rng.integers(0, 9, (2, 3, 5))),
        "text": np.array(["x", "été"]),
        "none": np.empty((0, 7), np.float32),
        "one": np.array(5),
        "big": np.arange(4).astype(">i2"),
        "flags": np.array([True, False]),
    }
    save(tmp_path / "x.npz", **arrays)
    read = files.read_arrays(tmp_path / "x.npz", "table")
    assert read.keys() == arrays.keys()
    with np.load(tmp_path / "x.npz") as other:
        for name, array in read.items():
            np.testing.assert_array_equal(array, other[name], strict=True)
            assert array.flags.writeable


def _npy(head, body=b""):
    text = f"{head}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2**40,)}"), ""),
        (_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,)}"), "needs 8,79"),
        (_npy("{'descr': '<U99999999', 'fortran_order': False, 'shape': (2,)}"), "needs"),
        (
            _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nsystem\n"),
            "object",
        ),
        (_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", bytes(8)), "shape"),
        (_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (\0,)}"), ""),
        (b"no array", ""),
        (b"", ""),
    ],
)
def test_an_array_that_is_none_is_refused_with_its_file(tmp_path, member, words):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(UserError, match=rf"x\.npz is no table, or it is damaged: .*{words}"):
        files.read_arrays(tmp_path / "x.npz", "table")


def test_an_archive_of_arrays_may_hold_so_much(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(2**20))
    monkeypatch.setattr(files, "ARRAYS", 2**20)
    with pytest.raises(UserError, match="8,388,7.. bytes; 1,048,576 are read at most"):
        files.read_arrays(tmp_path / "x.npz", "table")
    with pytest.raises(UserError, match="no table"):
        (tmp_path / "x.npz").write_bytes(b"PK")
        files.read_arrays(tmp_path / "x.npz", "table")


@pytest.mark.parametrize("compress", [False, True])
def test_arrays_replace_a_file_or_leave_it(tmp_path, compress):
    path = tmp_path / "a.npz"
    arrays = {"x": np.arange(6).reshape(2, 3), "head": np.array("text")}
    files.write_arrays(path, arrays, compress)
    result = files.read_arrays(path, "archive")
    assert result.keys() == arrays.keys()
    assert all(np.array_equal(result[n], x) for n, x in arrays.items())
    before = path.read_bytes()
    with pytest.raises(ValueError):
        files.write_arrays(path, {"x": np.array([object()])}, compress)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.npz"]


def test_a_lock_is_held_by_one_or_shared_until_it_is_closed(tmp_path):
    def opened():
        return os.open(tmp_path, os.O_RDONLY)

    first, second, third = opened(), opened(), opened()
    assert files.lock(first, shared=True) and files.lock(second, shared=True)
    assert not files.lock(third, wait_s=0.05)
    os.close(first)
    os.close(second)
    assert files.lock(third)
    other = opened()
    assert not files.lock(other, shared=True)
    os.close(third)
    assert files.lock(other, wait_s=None)
    os.close(other)


# ---- names of strangers, and lists that are longer than memory


def test_a_strangers_name_stays_below_its_folder(tmp_path):
    folder = tmp_path / "set"
    (folder / "a b").mkdir(parents=True)
    (folder / "a b" / "file").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    for name in ("a b/file", "./a b//file", "a b/./file"):
        with files.open_below(folder, name) as file:
            assert file.read() == b"inside"
    outside = ["../secret", "a b/../../secret", str(tmp_path / "secret"), "file:///etc/hosts", ""]
    for name in (*outside, "..", ".", "/", "http://x/a b/file"):
        for follow_links in (False, True):
            with pytest.raises(files.OutsideError, match="not a name below the folder"):
                files.open_below(folder, name, follow_links)
    for name in ("missing", "a b/missing", "missing/file"):
        with pytest.raises(FileNotFoundError):
            files.open_below(folder, name)
    with pytest.raises(NotADirectoryError):
        files.open_below(folder, "a b/file/more")
    for name in ("a\0b", "\0/file", "\ud800", "\ud800/file"):
        with pytest.raises(UserError, match="not a name that a file can have"):
            files.open_below(folder, name)


@pytest.mark.parametrize("linked", ["file", "folder", "outer"])
def test_a_strangers_links_are_followed_only_when_asked(tmp_path, linked):
    folder, place = tmp_path / "set", tmp_path / "elsewhere"
    (folder / "outer" / "folder").mkdir(parents=True)
    (folder / "outer" / "folder" / "file").write_bytes(b"linked")
    at = folder / {"file": "outer/folder/file", "folder": "outer/folder", "outer": "outer"}[linked]
    at.rename(place)
    at.symlink_to(place)
    (tmp_path / "link").symlink_to(folder)  # the folder itself may be one
    for root in (folder, tmp_path / "link"):
        with files.open_below(root, "outer/folder/file", follow_links=True) as file:
            assert file.read() == b"linked"
        with pytest.raises(files.LinkError, match="symbolic link"):
            files.open_below(root, "outer/folder/file")


LISTS = {
    "info": {"year": 2026, "segmentation": [1]},
    "images": [{"id": 1, "name": 'é "quoted" \\'}, {"id": -2.5e3}, None, [], "x", True, 17],
    "none": [],
    "annotations": [{"segmentation": [[1.5, -2e3], []], "b": [1, 2]}, {'a"segmentation': [3]}],
    "number": 5,
    "text": '"segmentation": [1]',
}


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("indent, separators", [(None, None), (None, (",", ":")), (3, None)])
def test_lists_are_read_one_element_at_a_time(monkeypatch, chunk, indent, separators):
    monkeypatch.setattr(files, "CHUNK", chunk)
    text = json.dumps(LISTS, ensure_ascii=chunk > 2, indent=indent, separators=separators)
    pairs = [(k, v) for k, values in LISTS.items() if isinstance(values, list) for v in values]
    for head in (b"", b"\xef\xbb\xbf", b" \n"):
        assert [*files.read_lists(io.BytesIO(head + text.encode()))] == pairs
    pairs = [
        (k, v | {"segmentation": 0} if k == "annotations" and "b" in v else v) for k, v in pairs
    ]
    assert [*files.read_lists(io.BytesIO(text.encode()), "segmentation")] == pairs


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "breaks off"),
        ("[]", "stands where"),
        ('{"a": [1, 2', "breaks off"),
        ('{"a": [1 2]}', "stands where"),
        ('{"a": [1,]}', "Expecting value"),
        ('{"a": [{"b": tree}, ' + "5," * 2_000 + "5]}", "Expecting value, but there is 'tree"),
        ('{"a": [1]', "breaks off"),
        ('{"a" [1]}', "stands where"),
        ("{5: 1}", "where a name must"),
        ('{"a": [1], "a": [2]}', "'a' comes twice"),
        ('{"a": [' + "[" * 100_000 + "]}", "nested too deep"),
        ('{"a": [' + "1" * 5000 + "]}", "4300"),
        (b'{"a": ["\xff"]}', "utf-8"),
    ],
)
def test_what_is_no_object_of_lists(text, reason):
    data = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(ValueError, match=reason):
        list(files.read_lists(io.BytesIO(data)))


@pytest.mark.parametrize("element", ['"' + "x" * 10_001, '{"b": [' + "1," * 9_000, "1" * 20_000])
@pytest.mark.parametrize("end", ["", '"]}', "]}]}", "]}"])
def test_an_element_has_a_limit_whether_it_ends_or_not(monkeypatch, element, end):
    monkeypatch.setattr(files, "ELEMENT", 10_000)
    monkeypatch.setattr(files, "CHUNK", 1_000)
    for before in ("", '"y", 5, {"c": 7}, ' * 300):
        text = ('{"a": [' + before + element + end).encode()
        with pytest.raises(ValueError, match="over 10,000 characters|4300"):
            list(files.read_lists(io.BytesIO(text)))
    text = '{"a": [' + '"y", ' * 30_000 + '"' + "x" * 9_000 + '"]}'
    assert len([*files.read_lists(io.BytesIO(text.encode()))]) == 30_001


def test_a_long_list_takes_no_memory(monkeypatch):
    """A number every seven bytes, as in the outlines of COCO; json.loads takes six times the text,
    and this some blocks."""
    monkeypatch.setattr(files, "CHUNK", 2**16)
    outline = ",".join(f"{i % 600}.{i % 90 + 10}" for i in range(30))
    element = f'{{"image_id": 5, "segmentation": [[{outline}]], "b": [{outline}]}},'
    text = ('{"annotations": [' + element * 10_000 + "{}]}").encode()
    tracemalloc.start()
    count = sum(1 for _ in files.read_lists(io.BytesIO(text), "segmentation"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 10_001 and len(text) > 3.8e6 and peak < 6e5
