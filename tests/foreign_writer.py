"""Writes pickles and torch.save files by hand, hostile ones too; neither torch nor pickle is asked.

The opcodes are those of protocol 2: a value is its own bytes, so any place can hold anything.
"""

import io
import struct
import zipfile
from typing import Any, NamedTuple


class Name(NamedTuple):
    """A name of code."""

    module: str
    attribute: str


class Object(NamedTuple):
    """An object: what its class is, what it is called with, and the state it is given."""

    kind: Name
    args: tuple = ()
    state: Any = None


class Persistent(NamedTuple):
    """What a persistent id refers to."""

    pid: Any


class Pairs(NamedTuple):
    """A dictionary whose keys may be anything, and come twice."""

    pairs: list


class Raw(NamedTuple):
    """Opcodes as they stand."""

    code: bytes


def dumps(value: Any) -> bytes:
    """Returns a whole pickle."""
    return b"\x80\x02" + code(value) + b"."


def code(value: Any) -> bytes:
    """Returns the opcodes that push a value."""
    match value:
        case Raw(code_bytes):
            return code_bytes
        case Name(module, attribute):
            return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"
        case Object(kind, args, state):
            built = b"" if state is None else code(state) + b"b"
            return code(kind) + code(tuple(args)) + b"R" + built
        case Persistent(pid):
            return code(pid) + b"Q"
        case Pairs(pairs):
            return b"}(" + b"".join(code(k) + code(v) for k, v in pairs) + b"u"
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(code, value)) + b"t"
        case list():
            return b"](" + b"".join(map(code, value)) + b"e"
        case dict():
            return code(Pairs(list(value.items())))
    raise TypeError(type(value))


def tensor(offset: Any, shape: Any, strides: Any, key: str = "0", elements: Any = 6) -> Object:
    """Returns a float32 tensor of a storage of six."""
    pid = ("storage", Name("torch", "FloatStorage"), key, "cpu", elements)
    args = (Persistent(pid), offset, shape, strides, False, None)
    return Object(Name("torch._utils", "_rebuild_tensor_v2"), args)


def torch_zip(value: Any, members: dict[str, bytes] | None = None, kind: int = 0) -> bytes:
    """Returns a torch.save file. members: by the names after data/. kind: how they are stored."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        parts = {"data.pkl": dumps(value)}
        parts |= {f"data/{name}": data for name, data in (members or {}).items()}
        for name, data in parts.items():  # of a fixed time: made again, a file has the same bytes
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", (2026, 1, 1, 0, 0, 0)), data, kind)
    return file.getvalue()


def torch_legacy(
    value: Any,
    storages: dict[str, tuple[int, bytes]],
    first: tuple[Any, ...] = (),
    keys: Any = None,
) -> bytes:
    """Returns a torch.save file from before PyTorch 1.6. storages: {key: (elements, bytes)}.

    first: other values than the magic number, the version, the machine. keys: others than theirs.
    """
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    header = (0x1950A86A20F9469CFC6C, 1001, machine)
    parts = [*first, *header[len(first) :], value, list(storages) if keys is None else keys]
    head = b"".join(map(dumps, parts))
    return head + b"".join(struct.pack("<q", n) + data for n, data in storages.values())


def old_tensor(
    shape: Any,
    strides: Any,
    key: str = "7",
    elements: Any = 6,
    cls: str = "FloatStorage",
    view: Any = None,
    offset: Any = 0,
) -> Object:
    """Returns a tensor as those files have them."""
    pid = ("storage", Name("torch", cls), key, "cpu", elements, view)
    args = (Persistent(pid), offset, shape, strides, False, None)
    return Object(Name("torch._utils", "_rebuild_tensor_v2"), args)
