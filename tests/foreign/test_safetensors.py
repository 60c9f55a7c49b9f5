import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from megajax.core.errors import UserError
from megajax.foreign import readers
from megajax.foreign.safetensors import INDEX, SINGLE, TensorFolder, write_folder

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.int64),
    "c": np.array(3.5, np.float16),
    "empty": np.zeros((0, 4), np.float32),
}
CODES = {"float32": "F32", "int64": "I64", "float16": "F16", "bfloat16": "BF16"}


def write(folder, tensors, **settings):
    folder.mkdir(exist_ok=True)
    table = {n: (a.shape, CODES[a.dtype.name]) for n, a in tensors.items()}
    write_folder(folder, table, tensors.__getitem__, **settings)


def test_the_library_reads_what_we_write(tmp_path):
    write(tmp_path, TENSORS)
    loaded = safetensors.numpy.load_file(tmp_path / SINGLE)
    assert set(loaded) == set(TENSORS)
    for name, array in TENSORS.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_we_read_what_the_library_writes(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    folder = TensorFolder(tmp_path)
    assert set(folder.names()) == set(TENSORS) and "a.weight" in folder
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(folder.view(name), array)


def test_bfloat16(tmp_path):
    array = np.array([[1.5, -2.25]], ml_dtypes.bfloat16)
    write(tmp_path, {"x": array})
    view = TensorFolder(tmp_path).view("x")
    assert view.dtype == ml_dtypes.bfloat16 and view.tolist() == [[1.5, -2.25]]


def test_shards_have_an_index(tmp_path):
    tensors = {f"t{i}": np.full((10, 10), i, np.float32) for i in range(7)}
    write(tmp_path, tensors, shard_bytes=900)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 2800
    assert set(index["weight_map"].values()) == {
        f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)
    }
    folder = TensorFolder(tmp_path)
    for name, array in tensors.items():
        np.testing.assert_array_equal(folder.view(name), array)


def header(entries, body=b"\0" * 16):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + body


GOOD = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}


def twice(entries):
    one = json.dumps(entries)[1:-1]
    text = f"{{{one}, {one}}}".encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 16


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",  # a header longer than the file
        struct.pack("<Q", 4) + b"oops",
        header(GOOD)[:-1],  # truncated data
        header({"x": GOOD["x"] | {"data_offsets": [0, 12]}}),
        header({"x": GOOD["x"] | {"shape": [-4]}}),
        header({"x": GOOD["x"] | {"shape": [2**60, 2**60]}}),
        header({"x": GOOD["x"] | {"dtype": "X9"}}),
        header({"x": GOOD["x"] | {"data_offsets": [1, 17]}}),
        header({"x": {"shape": [4]}}),
        header([1, 2]),
        header({"x": GOOD["x"] | {"shape": [True, 4]}}),
        header({"x": GOOD["x"] | {"shape": [4.0]}}),
        header(GOOD, b"\0" * 20),  # bytes of no tensor
        header(GOOD | {"y": GOOD["x"]}),  # shared bytes
        header({"x": GOOD["x"] | {"data_offsets": [4, 20]}}, b"\0" * 20),  # a hole
        struct.pack("<Q", 200_000) + b'{"a":' * 40_000,  # deeper than a parser goes
        twice(GOOD),
        header(GOOD | {"__metadata__": {"format": 1}}),
        header(GOOD | {"__metadata__": {"format": ["pt"]}}),
        header(GOOD | {"__metadata__": "pt"}),
        header(GOOD | {"__metadata__": {"format": None}}),
    ],
)
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(UserError, match="is not a safetensors file"):
        TensorFolder(tmp_path)


def test_a_good_header_of_the_same_kind_is_read(tmp_path):
    (tmp_path / SINGLE).write_bytes(header(GOOD))
    assert TensorFolder(tmp_path).view("x").tolist() == [0.0] * 4


def test_one_file_by_its_name(tmp_path):
    """Whatever lies beside it: an index speaks of other files."""
    (tmp_path / "weights.safetensors").write_bytes(header(GOOD))
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    path = tmp_path / "weights.safetensors"
    assert readers.detect(path) == "safetensors"
    read = readers.open_foreign(path, "safetensors")
    assert list(read.shapes) == ["x"] and read.view("x").tolist() == [0.0] * 4


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="has neither model.safetensors nor"):
        TensorFolder(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    with pytest.raises(UserError, match="model-1.safetensors"):
        TensorFolder(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(UserError, match="is damaged"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    ("homes", "words"),
    [
        ({"x": "../model.safetensors"}, "is not the name of a file here"),
        ({"x": "/etc/passwd"}, "is not the name of a file here"),
        ({"x": 3}, "is not the name of a file here"),
        ({}, "no tensors"),
        ({"x": "model.safetensors", "y": "model.safetensors"}, "says that y is in model.safe"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path, homes, words):
    (tmp_path / SINGLE).write_bytes(header(GOOD))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": homes}))
    with pytest.raises(UserError, match=words):
        TensorFolder(tmp_path)


def test_two_models_in_one_folder_are_refused(tmp_path):
    (tmp_path / SINGLE).write_bytes(header(GOOD))
    (tmp_path / "other.safetensors").write_bytes(header(GOOD))
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(GOOD, "other.safetensors")})
    )
    with pytest.raises(UserError, match="and model.safetensors.index.json of other files"):
        TensorFolder(tmp_path)


def with_header(path, header, payload=b""):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ([2**61, 0], "giant sizes"),
        ([1] * 100, "over 32 dimensions"),
        ([2**62], "giant"),
        ([2**61] * 1000, "over 32 dimensions"),
        ("12", "no list"),
        ([True], "fractional"),
    ],
)
def test_shapes_that_no_array_has(shape, said, tmp_path):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    with_header(tmp_path / SINGLE, {"x": entry})
    with pytest.raises(UserError, match=f"is not a safetensors file: .*{said}"):
        TensorFolder(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """Readers would disagree on which one counts; the index names one, the other was dropped."""
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    for name in "ab":
        with_header(tmp_path / name, {"x": entry, name: entry | {"data_offsets": [1, 2]}}, b"12")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b", "a": "a", "b": "b"}}))
    with pytest.raises(UserError, match="b holds x, and so does .*a; a tensor may be in one file"):
        TensorFolder(tmp_path)


def test_a_pipe_as_a_shard_or_an_index(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "pipe"}}')
    with pytest.raises(UserError, match="pipe: it is a named pipe"):
        TensorFolder(tmp_path)


def test_an_index_nested_without_end(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": ' + "[" * 100_000)
    with pytest.raises(UserError, match="index.json is not JSON: it is nested too deep"):
        TensorFolder(tmp_path)
