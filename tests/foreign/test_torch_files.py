"""Files that torch wrote (tests/golden/make_foreign.py), and files that nobody should write."""

import os
import pathlib
import zipfile

import ml_dtypes
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.foreign import readers, torch_files
from megajax.foreign.pickles import Global, Record
from megajax.foreign.torch_files import Tensor, TorchFile, plain, tensors
from tests.foreign_writer import Name, Object, Pairs, Persistent, dumps, tensor, torch_zip

KINDS = pathlib.Path(__file__).parent.parent / "golden" / "foreign" / "kinds.pt"
SIX = np.arange(6, dtype=np.float32)
SIX_TENSOR = tensor(0, (6,), (1,))


def opened(tmp_path, *args, **kwargs):
    file = tmp_path / "file.pt"
    file.write_bytes(torch_zip(*args, **kwargs))
    return TorchFile(file)


def test_tensors_are_those_that_torch_saved():
    by_name = dict(tensors(TorchFile(KINDS).value))
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    want = {
        "whole": x,
        "turned": x.T,
        "row": x[1],
        "every_other": x[::2, 1::3],
        "repeated": np.array([[7, 7, 7], [8, 8, 8]], np.float32),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), np.float32),
        "parameter": x[:, :1],
        "complex": (x[0] + 1j * x[1]).astype(np.complex64),
    }
    names = "float64 float16 int64 int32 int16 int8 uint8 uint16 uint32 bool"
    want |= {f"types.{t}": np.arange(5).astype(t) for t in names.split()}
    for t in ("bfloat16", "float8_e4m3fn"):
        want[f"types.{t}"] = np.arange(5).astype(getattr(ml_dtypes, t))
    assert {n for n, t in by_name.items() if isinstance(t, Tensor)} == set(want)
    for name, array in want.items():
        read = by_name[name].read()
        assert read.dtype == array.dtype and read.shape == array.shape, name
        np.testing.assert_array_equal(read, array, err_msg=name)
        assert not read.flags.writeable or read.size == 0
    assert by_name["whole"].storage is by_name["turned"].storage is by_name["every_other"].storage
    assert np.shares_memory(by_name["whole"].read(), by_name["row"].read())


def test_the_rest_is_plain_or_inert():
    value = TorchFile(KINDS).value
    assert isinstance(value["dtype"], Global) and value["dtype"].name == "torch.bfloat16"
    assert value["size"] == (2, 3) and value["set"] == {1, 2}
    assert value["list"] == [1, 2.5, None, True, "x", b"y", (1, 2)]
    assert value["names"].last == "Namespace" and value["names"].state == {"a": 1, "b": "two"}
    assert isinstance(value["numpy"], Record) and isinstance(value["buffer"], Record)
    assert plain({"a": (1, value["dtype"]), "b": value["names"]}) == {
        "a": [1, "torch.bfloat16"],
        "b": "argparse.Namespace",
    }


def test_every_byte_of_a_storage_is_checked(tmp_path):
    data = KINDS.read_bytes()
    with zipfile.ZipFile(KINDS) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("data/12"))
        where = data.index(archive.read(entry), entry.header_offset)
    for place in range(where, where + entry.file_size, 17):
        changed = bytearray(data)
        changed[place] ^= 1
        file = tmp_path / "kinds.pt"
        file.write_bytes(changed)
        with pytest.raises(UserError, match="kinds.pt:kinds/data/12 is damaged"):
            for _, x in tensors(TorchFile(file).value):
                if isinstance(x, Tensor):
                    x.read()


def test_cut_short(tmp_path):
    data, file = KINDS.read_bytes(), tmp_path / "kinds.pt"
    for end in range(0, len(data), 211):
        file.write_bytes(data[:end])
        with pytest.raises(UserError, match="kinds.pt"):
            TorchFile(file)
    with pytest.raises(UserError, match="cannot read"):
        TorchFile(tmp_path / "none.pt")


def test_a_view_by_hand(tmp_path):
    x = opened(tmp_path, tensor(1, (2, 2), (2, 1)), {"0": SIX.tobytes()}).value.read()
    np.testing.assert_array_equal(x, [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (tensor(-1, (2,), (1,)), "negative"),
        (tensor(0, (-2,), (1,)), "negative"),
        (tensor(0, (2,), (-1,)), "negative"),
        (tensor(0, (2.0,), (1,)), "fractional"),
        (tensor(0, (2**62,), (1,)), "giant"),
        (tensor(2**61, (2,), (1,)), "beyond its storage"),
        (tensor(0, (7,), (1,)), "beyond its storage of 24 bytes"),
        (tensor(5, (2,), (1,)), "beyond its storage"),
        (tensor(0, (2**40,), (0,)), "repeats 24 bytes"),
        (tensor(0, (2, 2), (1,)), "2 sizes and 1 strides"),
        (tensor(0, (1,) * 40, (1,) * 40), "40 sizes"),
        (tensor(0, (1,), (1,), key="1"), "no storage '1'"),
        (tensor(0, (1,), (1,), elements=7), "24 bytes for 7 elements"),
        (tensor(0, (1,), (1,), elements=2**70), "24 bytes for"),
        (tensor(0, 5, 5), "no tuple"),
        (tensor(0, (2**61, 0), (0, 1)), "giant"),
        (tensor(0, (1,) * 100, (1,) * 100), "100 sizes"),
        (tensor(0, (1,), (1,), elements="x"), "fractional"),
        (tensor(0, (1,), (1,), key="0" * 999), "a long one"),
        ([tensor(0, (2**22,), (0,)) for _ in range(3)], "share bytes come to over 8 times"),
        (Object(Name("torch._utils", "_rebuild_tensor_v2"), (1, 0, (), ())), "without a storage"),
        (Object(Name("torch._utils", "_rebuild_tensor_v2"), ()), "pickle"),
        (Object(Name("os", "system"), ("touch trace",)), "it names 'os.system'"),
    ],
)
def test_hostile_structures(value, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        opened(tmp_path, value, {"0": SIX.tobytes()})
    assert [p.name for p in tmp_path.iterdir()] == ["file.pt"]


def test_other_files(tmp_path):
    with pytest.raises(UserError, match="compressed"):
        opened(tmp_path, [1], {"0": bytes(10**4)}, kind=zipfile.ZIP_DEFLATED)
    file = tmp_path / "old.pt"
    file.write_bytes(dumps(0x1950A86A20F9469CFC6C))
    with pytest.raises(UserError, match="not a whole file of torch.save: pickle exhausted"):
        TorchFile(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme", "no torch")
    with pytest.raises(UserError, match="no data.pkl"):
        TorchFile(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", dumps(1))
        archive.writestr("a/byteorder", "big")
    with pytest.raises(UserError, match="big-endian"):
        TorchFile(file)


@pytest.mark.parametrize(
    "value",
    [
        Pairs([("a.b", tensor(0, (6,), (1,))), ("a", {"b": tensor(0, (2,), (1,))})]),
        Pairs([(1, tensor(0, (6,), (1,))), ("1", tensor(0, (2,), (1,)))]),
        {"a": {"": {"b": 1}}, "a.": {"b": tensor(0, (2,), (1,))}},
    ],
)
def test_names_that_collide_are_refused(value, tmp_path):
    with pytest.raises(UserError, match="two values of the name"):
        list(tensors(opened(tmp_path, value, {"0": SIX.tobytes()}).value))


def test_a_dot_at_the_beginning_is_part_of_the_name(tmp_path):
    value = {".w": tensor(0, (6,), (1,)), "w": tensor(0, (2,), (1,)), "": {"v": 1}}
    by_name = dict(tensors(opened(tmp_path, value, {"0": SIX.tobytes()}).value))
    assert {n: getattr(x, "shape", x) for n, x in by_name.items()} == {
        ".w": (6,),
        "w": (2,),
        ".v": 1,
    }


def test_members_that_share_bytes(tmp_path):
    """A thousand names of one storage: each would be checked on its own."""
    data = torch_zip([1], {"0": bytes(30), "1": bytes(30)})
    first, second = data.index(b"archive/data/0") - 30, data.index(b"archive/data/1") - 30
    entry = data.rindex(b"archive/data/1") - 46
    assert data[entry + 42 : entry + 46] == second.to_bytes(4, "little")
    changed = data[: entry + 42] + first.to_bytes(4, "little") + data[entry + 46 :]
    (tmp_path / "x.pt").write_bytes(changed)
    with pytest.raises(UserError, match="share bytes"):
        TorchFile(tmp_path / "x.pt")


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(UserError, match="it is a named pipe"):
        TorchFile(tmp_path / "x.pt")


def test_shared_lists_end():
    """2^20 values, and text of terabytes, from a structure of a few hundred bytes."""
    laugh, long = [1], ["x" * 10**6] * 1000
    for _ in range(100):
        laugh = [laugh] * 10
    for value in (laugh, [laugh[0]], long):
        with pytest.raises(ValueError, match="too deep, or too long"):
            plain(value)
    with pytest.raises(ValueError, match="two keys"):
        plain({1: 2, "1": 3})


def test_shared_dictionaries_end(monkeypatch):
    monkeypatch.setattr(torch_files, "MAX_NAMES", 2**20)
    shared = {"x": 1}
    for _ in range(100):
        shared = {"a": shared, "b": shared}
    with pytest.raises(UserError, match="the names of its values take over"):
        list(tensors(shared))
    with pytest.raises(ValueError, match="too deep"):
        plain(shared, depth=5)
    shared["itself"] = shared
    with pytest.raises(UserError, match="or in itself"):
        list(tensors(shared))


VIEWS = KINDS.parent.parent / "torch_views"


@pytest.mark.parametrize(
    ("file", "kind"), [("views.pt", "torch"), ("legacy.pt", "torch"), ("dcp", "dcp")]
)
def test_conjugate_and_negative_views_have_the_values_that_torch_shows(file, kind):
    source = readers.open_foreign(VIEWS / file, kind)
    with np.load(VIEWS / "values.npz") as values:
        assert set(source.shapes) == set(values) and not source.left_out
        for name, value in values.items():
            read = source.view(name)
            assert (read.dtype, read.shape) == (value.dtype, value.shape), name
            assert read.tobytes() == value.tobytes(), name  # the signs of zeros too
            assert not read.flags.writeable or read.size == 0


def test_dtensors_of_one_process_are_read_and_a_part_is_not():
    source = readers.open_foreign(VIEWS / "dtensors_of_1.pt", "torch")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert set(source.shapes) == {"rows", "columns", "same", "plain"}
    for name in ("rows", "columns", "same"):
        np.testing.assert_array_equal(source.view(name), x)
    with pytest.raises(UserError) as error:
        readers.open_foreign(VIEWS / "dtensors_of_2.pt", "torch")
    said = str(error.value)
    assert "rows is one process's part (1, 3) of a DTensor (2, 3) (Shard)" in said
    assert "columns is one process's part (2, 2)" in said and "x.full_tensor()" in said
    assert "2 tensors" in said and "same" not in said and "plain is" not in said


def test_classes_with_plain_values_and_arrays_are_read():
    source = readers.open_foreign(VIEWS / "classes.pt", "torch")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    want = dict.fromkeys(("parameter", "attribute", "buffer", "array", "columns", "list.0"), x)
    want |= {"cell": np.float64(2.5), "list.1.row": x[1]}
    assert set(source.shapes) == set(want) and not source.left_out
    for name, array in want.items():
        read = source.view(name)
        assert read.dtype == array.dtype and read.shape == array.shape, name
        np.testing.assert_array_equal(read, array, err_msg=name)
    assert source.notes["objects"] == {
        "number": 2.5,
        "truth": True,
        "list.2": 7,
        "plain": [1, "two"],
    }


REFUSED = {
    "coo": "sparse", "csr": "sparse", "csc": "sparse", "bsr": "sparse", "bsc": "sparse",
    "nested": "nested", "jagged": "nested", "quantized": "quantized", "channels": "quantized",
    "meta": "'meta'", "masked": "MaskedTensor", "lazy": "without values", "half": "complex32",
    "module": "torch.nn.modules.linear.Linear that holds tensors", "texts": "'U1'",
    "swapped": "big-endian", "inside.0.deep": "sparse",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_dense_tensor_is_refused_by_name(name):
    others = [n for n in REFUSED if n != name]
    with pytest.raises(UserError) as error:
        readers.open_foreign(VIEWS / "refused.pt", "torch", leave_out=others)
    said = str(error.value)
    assert f"holds 1 tensor that cannot be imported: {name} is a" in said and REFUSED[name] in said


def test_what_is_left_out_by_name_is_listed():
    source = readers.open_foreign(VIEWS / "refused.pt", "torch", leave_out=[*REFUSED, "inside"])
    assert set(source.shapes) == {"good"} and set(source.left_out) == set(REFUSED)
    with pytest.raises(UserError, match="no value named insid .--leave_out"):
        readers.open_foreign(VIEWS / "refused.pt", "torch", leave_out=[*REFUSED, "insid"])
    with pytest.raises(UserError, match="holds 17 tensors .*; and 7 more; .*--leave_out"):
        readers.open_foreign(VIEWS / "refused.pt", "torch")


def test_objects_that_only_leave_a_name_are_listed(tmp_path):
    path, buffer = Object(Name("pathlib", "PurePath"), ("x",)), Object(Name("_io", "BytesIO"), ())
    made = {"when": path, "raw": buffer, "w": SIX_TENSOR}
    (tmp_path / "x.pt").write_bytes(torch_zip(made, {"0": SIX.tobytes()}))
    source = readers.open_foreign(tmp_path / "x.pt", "torch")
    assert set(source.shapes) == {"w"}
    assert source.left_out == [
        "when (noted by its name only: pathlib.PurePath)",
        "raw (noted by its name only: _io.BytesIO)",
    ]


def with_bits(bits, cls="FloatStorage"):
    pid = ("storage", Name("torch", cls), "0", "cpu", 3)
    args = (Persistent(pid), 0, (3,), (1,), False, None, bits)
    return Object(Name("torch._utils", "_rebuild_tensor_v2"), args)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (with_bits({"conj": True}), "the bit of a conjugate"),
        (with_bits({"neg": True}, "LongStorage"), "the bit of a conjugate or a negative"),
        (with_bits({"neg": 1}), "no dictionary of truths"),
        (with_bits([1]), "no dictionary of truths"),
        (with_bits({"zero": True}), "x is a tensor with the bit 'zero'"),
        (Object(Name("torch._tensor", "_rebuild_from_type_v2"), (1, 2, 3)), "no name"),
    ],
)
def test_hostile_bits(value, said, tmp_path):
    (tmp_path / "x.pt").write_bytes(torch_zip({"x": value}, {"0": bytes(24)}))
    with pytest.raises(UserError, match=said):
        readers.open_foreign(tmp_path / "x.pt", "torch")


def numpy_array(shape, name, data, order="<"):
    kind = Object(
        Name("numpy", "dtype"), (name, False, True), (3, order, None, None, None, -1, -1, 0)
    )
    raw = Object(Name("_codecs", "encode"), (data.decode("latin1"), "latin1"))
    core = Name("numpy.core.multiarray", "_reconstruct")
    return Object(core, (Name("numpy", "ndarray"), (0,), "b"), (1, shape, kind, False, raw))


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (numpy_array((2**61,), "f4", bytes(4)), "giant"),
        (numpy_array((-1,), "f4", bytes(4)), "negative"),
        (numpy_array((2,), "f4", bytes(4)), r"\(2,\) of float32 with 4 bytes"),
        (numpy_array((1,), "O8", bytes(8)), "x is an array of NumPy's type 'O8'"),
        (numpy_array((1,), "i16", bytes(16)), "x is an array of NumPy's type 'i16'"),
        (numpy_array((1,) * 40, "f4", bytes(4)), "negative, fractional or giant"),
    ],
)
def test_hostile_arrays(array, said, tmp_path):
    (tmp_path / "x.pt").write_bytes(torch_zip({"x": array}))
    with pytest.raises(UserError, match=said):
        readers.open_foreign(tmp_path / "x.pt", "torch")


def test_lists_that_hold_themselves_end(tmp_path):
    x = opened(tmp_path, SIX_TENSOR, {"0": SIX.tobytes()}).value
    laugh = [1]
    for _ in range(100):
        laugh = [laugh] * 10
    assert [n for n, _ in tensors({"laugh": laugh, "x": [x]})] == ["laugh", "x.0"]
    circle = [x]
    circle.append(circle)
    with pytest.raises(UserError, match="or in itself"):
        list(tensors({"circle": circle}))
