"""Folders that four processes of torch wrote (tests/golden/make_foreign.py), and hostile ones."""

import pathlib

import ml_dtypes
import numpy as np
import pytest

from megajax.core.boxes import Box
from megajax.core.errors import UserError
from megajax.foreign import readers, torch_files
from megajax.foreign.safetensors import TensorFolder
from megajax.foreign.torch_files import DcpFolder
from tests.foreign_writer import Name, Object, Pairs, Raw, code, dumps, tensor, torch_zip

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "foreign" / "dcp"
ROWS = np.arange(60, dtype=np.float32).reshape(10, 6)
WANT = {
    "model.rows": ROWS,
    "model.plane": ROWS[:7, :5].astype(ml_dtypes.bfloat16),
    "model.few": np.arange(2),
    "model.same": np.arange(5, dtype=np.float16),
    "model.scalar": np.float32(3.5),
    "model.empty": np.zeros((0, 3), np.float32),
}
HOME = "torch.distributed.checkpoint.metadata"
FLOAT = Object(Name(HOME, "TensorProperties"), (), (Name("torch", "float32"), None, False, None))


def record(name, home=HOME, **state):
    return Object(Name(home, name), (), state)


def size(*numbers):
    return Object(Name("torch", "Size"), (numbers,))


def chunk(offset, sizes):
    return record("ChunkStorageMetadata", offsets=size(*offset), sizes=size(*sizes))


def place(offset, file="a.distcp", at=0, length=0, **more):
    index = record("MetadataIndex", fqn="x", offset=size(*offset), index=0)
    home = "torch.distributed.checkpoint.filesystem"
    return index, record("_StorageInfo", home, relative_path=file, offset=at, length=length, **more)


def metadata(folder, shape, chunks, places, properties=FLOAT):
    """Writes a metadata file of one tensor x."""
    entry = record("TensorStorageMetadata", properties=properties, size=size(*shape), chunks=chunks)
    folder.mkdir(exist_ok=True)
    value = record("Metadata", state_dict_metadata={"x": entry}, storage_data=Pairs(places))
    (folder / ".metadata").write_bytes(dumps(value))
    return folder


def test_tensors_of_four_processes():
    checkpoint = DcpFolder(GOLDEN)
    assert set(checkpoint.tensors) == set(WANT)
    assert [len(checkpoint.tensors[f"model.{n}"].boxes) for n in ("rows", "plane", "few")] == [
        4,
        4,
        2,
    ]
    for name, array in WANT.items():
        read = checkpoint.view(name)
        assert read.dtype == array.dtype and read.shape == array.shape, name
        np.testing.assert_array_equal(read, array, err_msg=name)
    objects = {name: checkpoint.value(name) for name in checkpoint.objects}
    assert objects == {"lr": 0.125, "steps": [1, 2], "note": "hello"}


def test_any_box_of_a_tensor():
    checkpoint, random = DcpFolder(GOLDEN), np.random.default_rng(0)
    for name in ("model.rows", "model.plane"):
        array = WANT[name]
        for _ in range(30):
            edges = [np.sort(random.choice(n + 1, 2, replace=False)) for n in array.shape]
            start, stop = (tuple(int(e[k]) for e in edges) for k in (0, 1))
            part = array[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            np.testing.assert_array_equal(checkpoint.view(name, Box(start, stop)), part)


def test_as_safetensors(tmp_path):
    assert readers.detect(GOLDEN) == "dcp"
    source = readers.open_foreign(GOLDEN, "dcp", 3)
    readers.write(source, tmp_path)
    assert source.step == 3 and not source.left_out
    assert source.notes["objects"]["steps"] == [1, 2]
    checkpoint = TensorFolder(tmp_path)
    for name, array in WANT.items():
        assert checkpoint.view(name).tobytes() == array.tobytes(), name


def test_by_hand(tmp_path):
    """Two pieces in one file, the second in another order of strides."""
    pieces = [tensor(0, (2, 1), (1, 1), elements=2), tensor(0, (2, 2), (1, 2), elements=4)]
    data = [np.array([0, 3], np.float32), np.array([1, 4, 2, 5], np.float32)]
    zips = [torch_zip(p, {"0": d.tobytes()}) for p, d in zip(pieces, data, strict=True)]
    ends = np.cumsum([0, *map(len, zips)])
    places = [
        place(offset, at=int(a), length=int(b - a))
        for offset, a, b in zip([(0, 0), (0, 1)], ends[:-1], ends[1:], strict=True)
    ]
    metadata(tmp_path, (2, 3), [chunk((0, 0), (2, 1)), chunk((0, 1), (2, 2))], places)
    (tmp_path / "a.distcp").write_bytes(b"".join(zips))
    np.testing.assert_array_equal(DcpFolder(tmp_path).view("x"), [[0, 1, 2], [3, 4, 5]])


WHOLE = [chunk((0,), (4,))]
HALVES = [chunk((0,), (2,)), chunk((2,), (2,))]


@pytest.mark.parametrize(
    ("shape", "chunks", "places", "said"),
    [
        ((4,), WHOLE, [place((0,), "../a")], "'../a', which leads out of the folder"),
        ((4,), WHOLE, [place((0,), "a/../../b")], "leads out of the folder"),
        ((4,), WHOLE, [place((0,), "/etc/passwd")], "leads out of the folder"),
        ((4,), WHOLE, [place((0,), "a\0")], "leads out of the folder"),
        ((4,), WHOLE, [place((0,), "")], "leads out of the folder"),
        ((4,), WHOLE, [], r"x: no file holds chunk \(0,\)"),
        ((4,), HALVES, [place((0,))], r"x: no file holds chunk \(2,\)"),
        ((4,), HALVES[:1], [place((0,))], "its chunks hold 2 of 4 elements"),
        ((4,), [], [], "its chunks hold 0 of 4 elements"),
        ((4,), [*HALVES, chunk((1,), (2,))], [place((0,))], "overlap"),
        ((2, 2), [chunk((0, 0), (2, 1)), chunk((1, 0), (1, 2))], [], "overlap"),
        ((4,), [chunk((2,), (3,))], [place((2,))], "is not in"),
        ((4,), [chunk((-1,), (4,))], [place((0,))], "negative"),
        ((-4,), WHOLE, [place((0,))], "negative"),
        ((2**62,), WHOLE, [place((0,))], "giant"),
        ((4,), [chunk((0, 0), (4, 1))], [place((0,))], "is not in"),
        ((4,), WHOLE, [place((0,), at=-1)], "negative"),
        ((4,), WHOLE, [place((0,)), place((0,))], "two places"),
        ((4,), WHOLE, [place((0,), transform_descriptors=["zstd"])], "compressed"),
        ((4,), [5], [place((0,))], "no attribute"),
        ((), [chunk((), ()), chunk((), ())], [place(())], "a scalar in 2 chunks"),
        ((2**61, 0), [], [], "giant"),
        ((1,) * 100, [], [], "no tuple"),
        ((4,), WHOLE, [place((0,), length=15)], "15 bytes do not hold the chunk"),
        ((4,), HALVES, [place((0,), length=9), place((2,), at=8, length=9)], "share bytes of a"),
    ],
)
def test_hostile_metadata(shape, chunks, places, said, tmp_path):
    with pytest.raises(UserError, match=f"metadata is damaged: .*{said}"):
        DcpFolder(metadata(tmp_path, shape, chunks, places))


def test_a_command_in_the_metadata(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = Object(Name("os", "system"), ("touch trace",))
    with pytest.raises(UserError, match="it names 'os.system'"):
        DcpFolder(metadata(tmp_path, (4,), WHOLE, [place((0,))], evil))
    assert [p.name for p in tmp_path.iterdir()] == [".metadata"]


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (tensor(0, (3,), (1,)), "is not the float32"),
        (tensor(0, (4, 1), (1, 1)), "is not the float32"),
        ([1], "is not the float32"),
        (tensor(0, (7,), (1,)), "beyond its storage"),
        (Object(Name("os", "system"), ("x",)), "os.system"),
    ],
)
def test_pieces_that_are_not_what_is_said(piece, said, tmp_path):
    data = torch_zip(piece, {"0": ROWS[0].tobytes()})
    folder = DcpFolder(metadata(tmp_path, (4,), WHOLE, [place((0,), length=len(data))]))
    with pytest.raises(UserError, match="cannot read .*a.distcp"):
        folder.view("x")
    (tmp_path / "a.distcp").write_bytes(data)
    with pytest.raises(UserError, match=f"a.distcp.*{said}"):
        folder.view("x")
    (tmp_path / "a.distcp").write_bytes(data[:-1])
    with pytest.raises(UserError, match="a.distcp is cut short"):
        DcpFolder(tmp_path).view("x")


def test_damage_in_the_golden_folder(tmp_path):
    """The metadata cut anywhere is an error; a piece whose bytes changed is named."""
    data = (GOLDEN / ".metadata").read_bytes()
    for end in range(0, len(data), 29):
        (tmp_path / ".metadata").write_bytes(data[:end])
        with pytest.raises(UserError):
            DcpFolder(tmp_path)
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(UserError, match="has no tensor model.x"):
        DcpFolder(tmp_path).view("model.x")
    for file in GOLDEN.glob("*.distcp"):
        raw = file.read_bytes()
        place = raw.find(ROWS[3].tobytes())  # rows 3 to 5 are the second rank's
        if place >= 0:
            raw = raw[:place] + b"\x01" + raw[place + 1 :]
        (tmp_path / file.name).write_bytes(raw)
    with pytest.raises(UserError, match="model.rows at byte .* is damaged"):
        DcpFolder(tmp_path).view("model.rows")


def test_chunks_that_cross_are_counted_not_compared_for_ever(monkeypatch):
    """Bars that lie over one another along the dimension that has the most cuts."""
    monkeypatch.setattr(torch_files, "MAX_PAIRS", 1000)
    bars = [Box((i, i), (200, i + 1)) for i in range(200)]
    with pytest.raises(ValueError, match="200 chunks lie across one another"):
        torch_files._check_cover("x", (200, 200), bars)


def test_a_list_of_chunks_for_many_tensors(tmp_path):
    """Empty chunks need no place, and a memo names a list of them in two bytes."""
    empty = code(chunk((0,), (0,)))
    many = Raw(b"](" + (empty + b"q\x00" + b"h\x00" * 400) + b"eq\x01")
    entries = {f"x{i}": (many if i == 0 else Raw(b"h\x01")) for i in range(99)}
    entries = {
        n: record("TensorStorageMetadata", properties=FLOAT, size=size(0), chunks=x)
        for n, x in entries.items()
    }
    value = record("Metadata", state_dict_metadata=entries, storage_data={})
    (tmp_path / ".metadata").write_bytes(dumps(value))
    with pytest.raises(UserError, match="its tensors share their lists of chunks"):
        DcpFolder(tmp_path)
