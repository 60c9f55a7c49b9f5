"""Files of torch.save, read without torch and without running their pickle.

Such a file is a zip of stored members: NAME/data.pkl, the structure, and NAME/data/KEY, the bytes
of each storage. A tensor is a view of a storage (offset, shape, strides), which may have to be
conjugated or negated (torch keeps two bits for that beside the storage); it stays in the file till
it is read. Members are checked against the zip's CRC-32 once, before the first tensor of them is
given out. A DTensor is read where one process held all of it; what is no dense tensor (sparse,
nested, quantized, meta, subclasses) becomes an Unread, which says what it is and how to save it so
that it can be read. Files older than PyTorch 1.6 are no zip (section "older files").
torch.distributed. checkpoint writes folders of such files (section "DCP folders"). No jax.
"""

import bisect
import functools
import io
import itertools
import math
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from megajax.core import files
from megajax.core.boxes import Box, intersect
from megajax.core.errors import UserError
from megajax.foreign import pickles
from megajax.foreign.pickles import Global, Record
from megajax.foreign.safetensors import read_index

# ---- older files
#
# Files of torch.save from before PyTorch 1.6, read without torch and without running a pickle.
#
# Such a file is five pickles, one after the other: a magic number, a version, what machine wrote
# it, the structure, the keys of its storages; then for each key, in that order, the number of
# elements (int64) and the bytes. A storage's type is known from the structure only. There are no
# checksums. Source: `_legacy_save` in torch/serialization.py. No jax.


LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
MAX_FIRST = 2**16  # (chosen) bytes of each of the first three pickles: they have some 100


def is_legacy(raw: np.ndarray) -> bool:
    """Tells whether a file begins with a pickle."""
    return raw[:1].tobytes() == b"\x80" and raw[1:2].tobytes() <= b"\5"


def legacy_members(
    raw: np.ndarray, where: str, width: Callable[[Any], int]
) -> dict[str, tuple[np.ndarray, int]]:
    """Returns a file's parts as those of a zip of today: {name: (its bytes, 0 for no checksum)}.

    Args: raw: uint8, the file. where: names it in errors. width(class): bytes of an element of a
      storage, or a ValueError.
    Raises: UserError for a file that is damaged, of another version or byte order, or hostile.
    """
    parts, at = [], 0
    for most in (MAX_FIRST, MAX_FIRST, MAX_FIRST, pickles.MAX_BYTES, pickles.MAX_BYTES):
        end = _pickle_end(raw, at, most, where)
        parts.append(raw[at:end])
        at = end
    magic, version, machine = (pickles.loads(p.tobytes(), where) for p in parts[:3])
    if magic != LEGACY_MAGIC or version != LEGACY_VERSION:
        raise UserError(f"{where} is a pickle, but not of torch.save: it has no magic number")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise UserError(f"{where} was written on a big-endian machine")
    try:
        sizes = _legacy_storages(parts[3].tobytes(), where, width)
        keys = pickles.loads(parts[4].tobytes(), where)
        if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys):
            raise ValueError("its storages' keys are no list of texts")
        if len(set(keys)) < len(keys) or set(keys) != sizes.keys():
            raise ValueError("it lists other storages than its tensors have")
        members = {"legacy/data.pkl": (parts[3], 0)}
        for key in keys:
            elements, itemsize = sizes[key]
            (stored,) = struct.unpack("<q", raw[at : at + 8].tobytes())
            begin, at = at + 8, at + 8 + elements * itemsize
            if stored != elements or at > raw.size:
                raise ValueError(f"storage {key[:50]!r} of {elements:,} elements is not whole")
            members[f"legacy/data/{key}"] = (raw[begin:at], 0)
    except struct.error:
        raise UserError(f"{where} is not a whole file of torch.save: it ends too early") from None
    except ValueError as error:
        raise UserError(f"{where} is not a whole file of torch.save: {error}") from None
    return members


def _pickle_end(raw: np.ndarray, begin: int, most: int, where: str) -> int:
    """Returns where the pickle that begins at a place ends."""
    stream = io.BytesIO(raw[begin : begin + most].tobytes())
    try:
        for number, _ in enumerate(pickletools.genops(stream)):
            if number == pickles.MAX_STEPS:
                raise ValueError(f"more than {number:,} opcodes")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{where} is not a whole file of torch.save: {str(error)[:200]}") from None
    return begin + stream.tell()


def _legacy_storages(
    structure: bytes, where: str, width: Callable[[Any], int]
) -> dict[str, tuple[int, int]]:
    """Returns {key: (elements, bytes of one)} of the storages that a structure refers to."""
    storages: dict[str, tuple[int, int]] = {}

    def storage(pid: Any) -> None:
        kind, cls, key, _, elements, *view = pid
        if kind != "storage" or not isinstance(cls, Global) or not isinstance(key, str):
            raise ValueError("a persistent id that is no storage")
        if any(v is not None for v in view):
            raise ValueError(f"storage {key[:50]!r} is a part of another one")
        if type(elements) is not int or not 0 <= elements < 2**60:
            raise ValueError("a storage with a negative, fractional or giant size")
        if storages.setdefault(key, (elements, width(cls))) != (elements, width(cls)):
            raise ValueError(f"storage {key[:50]!r} has two types or sizes")

    def nothing(*_: Any) -> None:
        """Stands for the functions that make tensors: only the storages are read here."""

    names = "_rebuild_tensor _rebuild_tensor_v2 _rebuild_parameter".split()
    builders = {f"torch._utils.{name}": nothing for name in names}
    pickles.loads(structure, where, builders, storage)
    return storages


# ---- files


BIN = "pytorch_model.bin"
DTYPES: dict[str, Any] = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2, "int64": np.int64, "int32": np.int32, "int16": np.int16,
    "int8": np.int8, "uint64": np.uint64, "uint32": np.uint32, "uint16": np.uint16,
    "uint8": np.uint8, "bool": np.bool_, "complex64": np.complex64, "complex128": np.complex128,
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
# What is no dense tensor: torch's function that would build it -> (what it is, how to save it).
NOT_DENSE: Mapping[str, tuple[str, str]] = {
    "torch._utils._rebuild_sparse_tensor": ("a sparse tensor", "save x.to_dense()"),
    "torch._utils._rebuild_sparse_csr_tensor": ("a sparse tensor", "save x.to_dense()"),
    "torch._utils._rebuild_nested_tensor": ("a nested tensor", "save x.unbind()"),
    "torch.nested._internal.nested_tensor._rebuild_njt": ("a nested tensor", "save x.unbind()"),
    "torch._utils._rebuild_qtensor": ("a quantized tensor", "save x.dequantize()"),
    "torch._utils._rebuild_meta_tensor_no_storage": (
        "a tensor on the device 'meta', which has no values",
        "save it after it was loaded",
    ),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": (
        "a tensor of a device without storages",
        "save x.cpu()",
    ),
    "torch._utils._rebuild_device_tensor_from_numpy": (
        "a tensor of a device without storages",
        "save x.cpu()",
    ),
    "torch._utils._rebuild_xla_tensor": ("a tensor of an XLA device", "save x.cpu()"),
    "torch.nn.parameter.UninitializedParameter": (
        "a parameter without values",
        "save it after its first use",
    ),
    "torch.nn.parameter.UninitializedBuffer": (
        "a buffer without values",
        "save it after its first use",
    ),
}
QUANTIZED = ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")  # storages
PLAIN_TYPES = frozenset(
    ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
    + ("torch.nn.parameter.Buffer", "torch.nn.Parameter", "torch.nn.Buffer")
)  # classes of tensors whose values are those of their storage
ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
NUMBERS = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")  # NumPy's types that are numbers
MAX_RANK = 32
MAX_REPEATED = 16 * 2**20  # bytes that a tensor may repeat its storage to (strides of 0)
MAX_SHARED = 8  # times that the tensors of a file may come to its bytes (chosen: ties are 2)
MAX_DIRECTORY = 16 * 2**20  # bytes of a zip's directory (chosen: 150,000 storages)
MAX_KEY = 200  # characters of a storage's key (chosen: they are numbers)
MAX_NAMES = 24 * 2**20  # (chosen) bytes of all names that nested dictionaries may come to
NAME_BYTES = 48  # (chosen) bytes that a name costs beside its characters
MAX_PLAIN = 2**17  # (chosen) values that go into a step's data state
MAX_PLAIN_TEXT = 2**24  # (chosen) characters of them
LOCAL = struct.Struct("<4s22xHH")  # a zip's local header: signature, lengths of name and extra


class Storage:
    """The bytes of one member. dtype: of its elements, as the file says."""

    def __init__(self, raw: np.ndarray, crc32: int, dtype: Any, where: str):
        """raw: uint8, a view of the file. crc32: 0: the writer kept none."""
        self._raw, self._crc32, self.dtype, self.where = raw, crc32, np.dtype(dtype), where

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self._raw.size

    @functools.cached_property
    def raw(self) -> np.ndarray:
        """The bytes, uint8. Raises: UserError when they are not those that were written."""
        if self._crc32 and zlib.crc32(self._raw) != self._crc32:
            raise UserError(f"{self.where} is damaged: its bytes do not match their checksum")
        return self._raw


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that lies in a file.

    strides: in elements. conjugate, negative: what torch does to the stored values when it reads
    them; `x.conj()` and `x.conj().imag` of torch share the storage of x.
    """

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False

    def read(self) -> np.ndarray:
        """Returns the tensor, read-only: a view of the file, or a copy where a bit changes values.

        Raises: UserError for damage.
        """
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        width = self.dtype.itemsize
        pairs = zip(self.shape, self.strides, strict=True)
        strides = tuple(width * s if n > 1 else width for n, s in pairs)  # of 1: any is legal
        raw = self.storage.raw
        x = np.ndarray(self.shape, self.dtype, raw.data, self.offset * width, strides)
        if self.conjugate or self.negative:
            x = np.asarray(np.conjugate(x) if self.conjugate else x)
            x = np.asarray(np.negative(x) if self.negative else x)
            x.flags.writeable = False
        return x


@dataclass(frozen=True, eq=False, slots=True)
class Array:
    """An array of NumPy's that lies in a pickle."""

    dtype: np.dtype
    shape: tuple[int, ...]
    data: bytes
    by_columns: bool

    def read(self) -> np.ndarray:
        """Returns the array, read-only."""
        order = "F" if self.by_columns else "C"
        return np.frombuffer(self.data, self.dtype).reshape(self.shape, order=order)


@dataclass(frozen=True, eq=False, slots=True)
class Unread:
    """A tensor that cannot be read. what: says what it is. remedy: how it could be saved."""

    what: str
    remedy: str


class TorchFile:
    """What a file of torch.save holds, or what lies in a part of a file."""

    def __init__(self, path: str | Path, raw: np.ndarray | None = None, where: str = ""):
        """Reads the structure. raw: uint8, the part of the file; None: all of it.

        Raises: UserError for a file that is damaged, too old, or wants code run.
        """
        self.where = where or str(path)
        self._raw = map_file(path) if raw is None else raw
        members = _file_members(self._raw, self.where)
        structure = [n for n in members if n.endswith("/data.pkl")]
        if len(structure) != 1:
            raise UserError(f"{self.where} is a zip, but not of torch.save: it has no data.pkl")
        self._home = structure[0].removesuffix("data.pkl")
        self._members = members
        self._storages: dict[str, Storage] = {}
        self._left = MAX_REPEATED + MAX_SHARED * self._raw.size
        if order := members.get(f"{self._home}byteorder"):
            if order[0].tobytes() != b"little":
                raise UserError(f"{self.where} was written on a big-endian machine")
        text = Storage(*members[structure[0]], np.uint8, f"{self.where}:{structure[0]}").raw
        builders = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
            "torch._tensor._rebuild_from_type": self._subclass,
            "torch._tensor._rebuild_from_type_v2": self._subclass,
            "torch.Size": lambda sizes: tuple(sizes),
        } | {name: lambda *_, said=said: Unread(*said) for name, said in NOT_DENSE.items()}
        self.value = pickles.loads(text.tobytes(), self.where, builders, self._storage)

    def _storage(self, pid: Any) -> Storage | Unread:
        """Makes a storage of ('storage', class, key, place, elements)."""
        kind, cls, key, _, elements, *_ = pid  # files before 1.6 have one more, which is None
        if kind != "storage" or not isinstance(cls, Global):
            raise ValueError("a persistent id that is no storage")
        if not isinstance(key, str) or len(key) > MAX_KEY:
            raise ValueError(f"a storage with a key of type {type(key).__name__}, or a long one")
        if type(elements) is not int or elements < 0:
            raise ValueError("a storage with a negative or fractional size")
        if cls.name.rpartition(".")[2].removesuffix("Storage") in QUANTIZED:
            return Unread(*NOT_DENSE["torch._utils._rebuild_qtensor"])
        dtype = storage_dtype(cls)
        member = self._members.get(f"{self._home}data/{key}")
        if member is None:
            raise ValueError(f"there is no storage {key[:50]!r}")
        if key not in self._storages:
            where = f"{self.where}:{self._home}data/{key}"
            self._storages[key] = Storage(*member, dtype, where)
        storage = self._storages[key]
        if elements * dtype.itemsize > storage.nbytes:
            raise ValueError(f"storage {key} has {storage.nbytes} bytes for {elements} elements")
        return storage

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any = None,
        hooks: Any = None,
        bits: Any = None,
        *_: Any,
    ) -> Tensor | Unread:
        if isinstance(storage, Unread):
            return storage
        if not isinstance(storage, Storage):
            raise ValueError("a tensor without a storage")
        return self._view(storage, storage.dtype, offset, shape, strides, bits)

    def _tensor_v3(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any,
        hooks: Any,
        dtype: Any,
        bits: Any = None,
        *_: Any,
    ) -> Tensor | Unread:
        if not isinstance(storage, Storage):
            raise ValueError("a tensor without a storage")
        if isinstance(dtype, Global) and dtype.name.removeprefix("torch.") not in DTYPES:
            return Unread(f"a tensor of the type {dtype.name[:MAX_KEY]}", "save it as another type")
        return self._view(storage, dtype_of(dtype), offset, shape, strides, bits)

    def _subclass(self, build: Any, cls: Any, args: Any, state: Any = None, *_: Any) -> Any:
        """Makes a tensor of a class that is not torch.Tensor, or that has attributes."""
        if not all(isinstance(x, Global) for x in (build, cls)) or not isinstance(args, tuple):
            raise ValueError("a tensor of a class that is no name")
        kind = cls.name[:MAX_KEY]
        if cls.name.rpartition(".")[2] == "DTensor" and cls.name.startswith("torch."):
            return _all_of_dtensor(args, state)
        builder = {"v2": self._tensor, "v3": self._tensor_v3}.get(build.name[-2:])
        if build.name in NOT_DENSE:
            return Unread(*NOT_DENSE[build.name])
        if build.name.startswith("torch._utils._rebuild_tensor_v") and builder is not None:
            if cls.name in PLAIN_TYPES:
                return builder(*args)
        return Unread(f"a tensor of the class {kind}", "save it as a plain torch.Tensor")

    def _view(
        self, storage: Storage, dtype: np.dtype, offset: Any, shape: Any, strides: Any, bits: Any
    ) -> Tensor | Unread:
        """Makes a tensor; every number in it is checked. bits: torch's metadata, a dictionary."""
        if not isinstance(shape, tuple | list) or not isinstance(strides, tuple | list):
            raise ValueError("a tensor whose sizes or strides are no tuple")
        if len(shape) != len(strides) or len(shape) > MAX_RANK:
            raise ValueError(f"a tensor of {len(shape)} sizes and {len(strides)} strides")
        numbers = (offset, *shape, *strides)
        if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            raise ValueError("a tensor with negative, fractional or giant sizes")
        check_shape(shape, dtype)
        reach = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        if math.prod(shape) and reach * dtype.itemsize > storage.nbytes:
            raise ValueError(f"a tensor that ends beyond its storage of {storage.nbytes} bytes")
        if math.prod(shape) * dtype.itemsize > max(storage.nbytes, MAX_REPEATED):
            raise ValueError(f"a tensor of {tuple(shape)} that repeats {storage.nbytes} bytes")
        self._left -= math.prod(shape) * dtype.itemsize
        if self._left < 0:
            raise ValueError(f"tensors that share bytes come to over {MAX_SHARED} times the file")
        flags = {} if bits is None else bits
        if not isinstance(flags, dict) or any(type(v) is not bool for v in flags.values()):
            raise ValueError("a tensor whose bits are no dictionary of truths")
        if others := sorted(map(word, flags.keys() - {"conj", "neg"})):
            return Unread(f"a tensor with the bit {others[0]!r:.50}", "save x.clone()")
        conjugate, negative = flags.get("conj", False), flags.get("neg", False)
        if conjugate and dtype.kind != "c" or negative and dtype.kind not in "fcV":
            raise ValueError(f"a tensor of {dtype} with the bit of a conjugate or a negative")
        return Tensor(storage, dtype, offset, tuple(shape), tuple(strides), conjugate, negative)


def _all_of_dtensor(args: tuple, state: Any) -> Any:
    """Returns the local tensor of a DTensor where it is all of it, else an Unread.

    args: those of torch's _rebuild_wrapper_subclass. state: its members, or (None, its members).
    """
    states = state if isinstance(state, tuple) else (state,)
    members = {k: v for s in states if isinstance(s, dict) for k, v in s.items()}
    local, spec = members.get("_local_tensor"), members.get("_spec")
    placements = spec.member("placements") if isinstance(spec, Record) else None
    if isinstance(local, Unread) or len(args) < 3 or not isinstance(placements, tuple | list):
        return local if isinstance(local, Unread) else Unread("a DTensor", _FULL)
    kinds = [p.last if isinstance(p, Record) else type(p).__name__ for p in placements]
    shape = args[2]
    if isinstance(local, Tensor) and local.shape == shape and set(kinds) <= {"Shard", "Replicate"}:
        return local
    held = local.shape if isinstance(local, Tensor) else "nothing"
    shape = shape if isinstance(shape, tuple) and _is_flat(shape) else "(...)"
    return Unread(
        f"one process's part {held} of a DTensor {shape} ({', '.join(kinds)})"[:300], _FULL
    )


_FULL = "save x.full_tensor(), or all processes' parts by torch.distributed.checkpoint"


def _array(record: Record) -> Any:
    """Returns the array or the number that a record of NumPy's says, or an Unread of it."""
    kind = record.kind.rpartition(".")
    if kind[0] not in ARRAYS or kind[2] not in ("_reconstruct", "scalar"):
        return record
    if kind[2] == "scalar" and len(record.args) == 2:
        shape, by_columns = (), False
        dtype, data = record.args
    elif isinstance(record.state, tuple) and len(record.state) == 5:
        _, shape, dtype, by_columns, data = record.state
    else:
        return Unread("an array of NumPy's without values", "save it as a tensor")
    name = dtype.args[0] if isinstance(dtype, Record) and dtype.args else None
    order = dtype.state if isinstance(dtype, Record) else None
    if not isinstance(name, str) or not NUMBERS.fullmatch(name) or not isinstance(data, bytes):
        return Unread(f"an array of NumPy's type {word(name)[:20]!r}", "save it as a tensor")
    if not isinstance(order, tuple) or len(order) < 2 or order[1] not in ("<", "|", "="):
        return Unread("an array of NumPy's in big-endian order", "save it as a tensor")
    numbers = shape if isinstance(shape, tuple) and len(shape) <= MAX_RANK else (-1,)
    if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise ValueError("an array with negative, fractional or giant sizes")
    made = np.dtype(name)
    check_shape(numbers, made)
    if math.prod(numbers) * made.itemsize != len(data):
        raise ValueError(f"an array {numbers} of {made} with {len(data):,} bytes")
    array = Array(made, tuple(numbers), data, by_columns is True)
    return array.read().item() if kind[2] == "scalar" else array


def storage_dtype(cls: Global) -> np.dtype:
    """Returns the type of a storage's elements. Raises: ValueError for an unknown class."""
    name = STORAGES.get(cls.name.rpartition(".")[2])
    if name is None:
        raise ValueError(f"a storage of {cls.name[:100]}")
    return np.dtype(DTYPES[name])


def dtype_of(value: Any) -> np.dtype:
    """Returns the type that 'torch.float32' and the like name. Raises: ValueError."""
    name = value.name.removeprefix("torch.") if isinstance(value, Global) else None
    if name not in DTYPES:
        raise ValueError(f"a dtype {name or type(value).__name__}")
    return np.dtype(DTYPES[name])


def check_shape(shape: Sequence[int], dtype: np.dtype) -> None:
    """Refuses what NumPy has no array for, also where a size of 0 hides it. Raises: ValueError."""
    if len(shape) > MAX_RANK:
        raise ValueError(f"a tensor of {len(shape)} dimensions; {MAX_RANK} are read at most")
    if math.prod(n for n in shape if n) * dtype.itemsize >= 2**62:
        raise ValueError(f"a tensor of giant sizes {tuple(shape)}")


def word(key: Any) -> str:
    """Returns a dictionary's key as a part of a name; never the text of nested values."""
    if isinstance(key, Record | Global):
        return key.kind if isinstance(key, Record) else key.name
    return key if isinstance(key, str) else repr(key)[:MAX_KEY] if _is_flat(key) else "(...)"


def _is_flat(x: Any) -> bool:
    parts = x if isinstance(x, tuple) else (x,)
    return len(parts) <= 8 and all(
        m is None or isinstance(m, int | float) or isinstance(m, str | bytes) and len(m) <= MAX_KEY
        for m in parts
    )


def tensors(value: Any, where: str = "the file") -> Iterator[tuple[str, Any]]:
    """Yields (dots-joined keys, value) of nested dictionaries' ends.

    A list or tuple is entered too if it holds tensors; its parts are named by their numbers.
    Values: Tensors, Arrays, an Unread for each tensor or object with tensors that cannot be read,
    and the rest as `pickles` reads it.
    Raises: UserError for two ends of one name, and for more or longer names than MAX_NAMES bytes,
    which shared dictionaries and those that hold themselves can come to.
    """
    todo: list[tuple[str | None, Any]] = [(None, value)]
    seen, left, holders = set(), MAX_NAMES, _Holders()
    while todo:
        name, x = todo.pop()
        if isinstance(x, Record):
            try:
                x = _array(x)
            except ValueError as error:
                raise UserError(
                    f"{where} is damaged: {(name or '')[:MAX_KEY]} is {error}"
                ) from None
        if isinstance(x, list | tuple | Record | Storage) and holders(x):
            if isinstance(x, Record):
                x = Unread(f"an object {x.kind[:MAX_KEY]} that holds tensors", _STATE_DICT)
            elif isinstance(x, Storage):
                x = Unread("a storage without a tensor", "save it as a tensor")
            else:
                x = dict(enumerate(x))
        if isinstance(x, dict):
            prefix = "" if name is None else f"{name}."
            parts = [word(k) for k in x]
            left -= NAME_BYTES + sum(map(len, parts)) + len(parts) * (len(prefix) + NAME_BYTES)
            if left < 0:
                raise UserError(
                    f"{where} is nested so that the names of its values take over {MAX_NAMES:,} "
                    "bytes; a dictionary that is in many places, or in itself, does that"
                )
            pairs = zip(parts, x.values(), strict=True)
            todo += reversed([(prefix + part, v) for part, v in pairs])
        elif (name or "") in seen:
            raise UserError(
                f"{where} has two values of the name {(name or '')[:MAX_KEY]!r}: parts of a name "
                "are joined with dots, so both cannot be imported; rename one"
            )
        else:
            seen.add(name or "")
            yield name or "", x


_STATE_DICT = "save its state_dict(), or a dictionary of its tensors"


class _Holders:
    """Tells which containers hold a tensor, however deep; each container is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}  # by id: the structure outlives this
        self._alive: list[Any] = []

    def __call__(self, value: Any) -> bool:
        path: list[tuple[Any, Iterator[Any]]] = []
        answer = self._enter(value, path)
        while path:
            container, parts = path[-1]
            if answer:
                self._known[id(container)] = True
                path.pop()
                continue
            part = next(parts, path)
            if part is path:  # all parts were looked at: it holds none
                path.pop()
            else:
                answer = self._enter(part, path)
        return answer

    def _enter(self, x: Any, path: list[tuple[Any, Iterator[Any]]]) -> bool:
        """Returns whether a value holds tensors, if known; else puts the container on the path."""
        if isinstance(x, Tensor | Array | Storage | Unread):
            return True
        if isinstance(x, Record) and x.kind.rpartition(".")[0] in ARRAYS:
            return x.last != "scalar"
        if not isinstance(x, dict | list | tuple | Record) or not x:
            return False
        if id(x) not in self._known:
            self._known[id(x)] = False  # also while it is looked at: it may hold itself
            self._alive.append(x)
            if isinstance(x, Record):
                members = x.state.values() if isinstance(x.state, dict) else (x.state,)
                parts = itertools.chain(x.args, members, x.items)
            else:
                parts = iter(x.values() if isinstance(x, dict) else x)
            path.append((x, iter(parts)))
            return False
        return self._known[id(x)]


class Plain:
    """Makes values that JSON can say, of all of a file: so many values and characters.

    named: the classes of the objects that were replaced by the names of their classes.
    """

    def __init__(self) -> None:
        """Starts with the whole allowance."""
        self._values, self._text = MAX_PLAIN, MAX_PLAIN_TEXT
        self.named: dict[str, None] = {}

    def __call__(self, value: Any, depth: int = 20) -> Any:
        """Returns a value as JSON can say it: dtypes and records of code by their names.

        Raises: ValueError for what is nested deeper than `depth`, tensors, two keys of one name,
        and more than what is left.
        """
        self._values -= 1
        self._text -= len(value) if isinstance(value, str) else 0
        if depth == 0 or self._values < 0 or self._text < 0:
            raise ValueError("nested too deep, or too long")
        if isinstance(value, dict):
            self._text -= sum(len(k) for k in value if isinstance(k, str))
            members = {word(k): self(v, depth - 1) for k, v in value.items()}
            if len(members) < len(value):
                raise ValueError("two keys of one name")
            return members
        if isinstance(value, list | tuple | set | frozenset):
            return [self(v, depth - 1) for v in value]
        if isinstance(value, Global):
            return value.name
        if isinstance(value, Record):
            value = _array(value)
        if isinstance(value, Record):
            self.named[value.kind[:MAX_KEY]] = None
            return value.kind
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"a {type(value).__name__}")


def plain(value: Any, depth: int = 20) -> Any:
    """Returns one value as JSON can say it. Raises: ValueError as Plain does."""
    return Plain()(value, depth)


def show(value: Any) -> str:
    """Returns a value for a message: short, and never the text of nested values."""
    return f"{value}"[:60] if _is_flat(value) else type(value).__name__


def map_file(path: str | Path) -> np.ndarray:
    """Returns a file as a memory map. Raises: UserError when it cannot be read."""
    try:
        return files.map_bytes(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


class _Window(io.RawIOBase):
    """A view of bytes as a file: what zipfile reads, without a copy of the whole."""

    def __init__(self, raw: np.ndarray):
        self._raw, self._at = raw, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._raw.size)[whence]
        if at < 0:
            raise ValueError("a place before the beginning")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        end = self._raw.size if size is None or size < 0 else self._at + size
        if end - self._at > MAX_DIRECTORY:  # zipfile reads a directory in one
            raise ValueError(f"its directory has {end - self._at:,} bytes, not {MAX_DIRECTORY:,}")
        content = self._raw[self._at : end].tobytes()
        self._at += len(content)
        return content


def _file_members(raw: np.ndarray, where: str) -> dict[str, tuple[np.ndarray, int]]:
    """Returns {member: (its bytes, its CRC-32)} of a zip of stored members, or of an older file."""
    if is_legacy(raw):
        return legacy_members(raw, where, lambda cls: storage_dtype(cls).itemsize)
    members: dict[str, tuple[np.ndarray, int]] = {}
    spans: list[tuple[int, int, str]] = []
    try:
        with zipfile.ZipFile(_Window(raw)) as archive:  # type: ignore[arg-type]
            entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"{entry.filename} is compressed or encrypted")
            begin = entry.header_offset
            signature, name, extra = LOCAL.unpack(raw[begin : begin + LOCAL.size].tobytes())
            begin += LOCAL.size + name + extra
            end = begin + entry.file_size
            if signature != b"PK\3\4" or entry.file_size != entry.compress_size or end > raw.size:
                raise ValueError(f"{entry.filename} at {begin}..{end} is not in the file")
            if entry.filename in members:
                raise ValueError(f"{entry.filename} comes twice")
            members[entry.filename] = (raw[begin:end], entry.CRC)
            spans.append((entry.header_offset, end, entry.filename))
        spans.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:  # each is checked on its own: many on one would take for ever
                raise ValueError(f"{name} and {other} share bytes")
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise UserError(f"{where} is not a whole file of torch.save: {error}") from None
    return members


class TorchFolder:
    """The tensors of a Hugging Face folder whose weights are files of torch.save, by name.

    As safetensors' TensorFolder: pytorch_model.bin, or the files of its index.
    """

    def __init__(self, folder: str | Path):
        """Reads the structures. Raises: UserError when one is damaged, or holds what is no dense
        tensor."""
        self.folder = Path(folder)
        index = self.folder / f"{BIN}.index.json"
        homes = {} if (self.folder / BIN).is_file() else read_index(index)
        self._tensors: dict[str, Tensor | Array] = {}
        where: dict[str, str] = {}
        for name in sorted(set(homes.values())) or [BIN]:
            file = self.folder / name
            for tensor, value in tensors(TorchFile(file).value, str(file)):
                if not isinstance(value, Tensor | Array):
                    what = value.what if isinstance(value, Unread) else "no tensor"
                    hint = f"; {value.remedy}" if isinstance(value, Unread) else ""
                    raise UserError(f"{file}: {tensor[:MAX_KEY]} is {what}{hint}")
                if tensor in where:
                    raise UserError(
                        f"{file} holds {tensor[:MAX_KEY]}, and so does {where[tensor]}; a tensor "
                        "may be in one file only"
                    )
                self._tensors[tensor], where[tensor] = value, name
        for tensor, name in homes.items():
            if where.get(tensor) != name:
                raise UserError(f"{index} says that {tensor[:MAX_KEY]} is in {name}; it is not")

    def __contains__(self, name: str) -> bool:
        """Tells whether there is a tensor of this name."""
        return name in self._tensors

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self._tensors)

    def kind(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Returns the shape and the type of a tensor that is there."""
        return self._tensors[name].shape, np.dtype(self._tensors[name].dtype)

    def view(self, name: str) -> np.ndarray:
        """Returns a tensor, read-only: mostly a part of its file's memory map.

        Raises: UserError for a name that is not there, and for bytes that are damaged.
        """
        if name not in self._tensors:
            raise UserError(f"{self.folder} has no tensor {name}")
        return self._tensors[name].read()


# ---- DCP folders
#
# Folders of torch.distributed.checkpoint (DCP), read without torch.
#
# `.metadata` is a pickle that says for each tensor its dtype, its shape and the chunks it was cut
# in, and for each chunk the file and the bytes that hold it; there lies one file of torch.save. A
# tensor, or a box of it, is put together from the chunks that it meets: no more than that is in
# memory. Every chunk has bytes of its own in a file, at least as many as its elements take; what
# shares them, or would take longer than its length warrants, is refused. Megatron-Core's
# `torch_dist` format is this too (megatron.py). Compressed files are refused. No jax.


METADATA = ".metadata"
CHUNK_BYTES = 16  # (chosen) bytes of metadata that a chunk takes at least: a record, two sizes
MAX_PAIRS = 2**20  # (chosen) pairs of chunks of a tensor that are compared, and 64 for each chunk


@dataclass(frozen=True)
class Place:
    """A range of bytes in a file. file: relative to the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunked:
    """A tensor, its chunks and their places."""

    dtype: np.dtype
    shape: tuple[int, ...]
    boxes: list[Box]
    places: list[Place]


class DcpFolder:
    """The tensors and the other objects of a DCP folder, by name.

    unread: the tensors whose values cannot be read.
    """

    def __init__(self, folder: str | Path):
        """Reads the metadata; every number in it is checked.

        Raises: UserError when it is missing, damaged, wants code run, leads out of the folder, or
        says of a tensor that its chunks overlap or do not fill it.
        """
        self.folder = Path(folder)
        file = self.folder / METADATA
        raw = map_file(file).tobytes()
        metadata = pickles.loads(raw, str(file), {"torch.Size": tuple})
        left = len(raw) // CHUNK_BYTES
        self.tensors: dict[str, Chunked] = {}
        self.objects: dict[str, Place] = {}
        self.unread: dict[str, Unread] = {}
        try:
            places = _places(metadata)
            for name, entry in _dictionary(metadata, "state_dict_metadata").items():
                if not isinstance(name, str) or not isinstance(entry, Record):
                    raise ValueError(f"an entry of type {type(entry).__name__}")
                left -= len(entry.member("chunks", ()))
                if left < 0:
                    raise ValueError("its tensors share their lists of chunks")
                if entry.last == "BytesStorageMetadata":
                    self.objects[name] = _find(places, name, None)
                elif (unread := _unread(entry)) is not None:
                    self.unread[name] = unread
                else:
                    self.tensors[name] = _chunked(name, entry, places)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise UserError(f"{file} is damaged: {error}") from None
        self._file = functools.cache(lambda name: map_file(self.folder / name))

    def view(self, name: str, box: Box | None = None) -> np.ndarray:
        """Returns a tensor, or a box of it: a view of the file where one chunk holds it all.

        Raises: UserError for an unknown name, and files that are not what the metadata says.
        """
        if name not in self.tensors:
            raise UserError(f"{self.folder} has no tensor {name}")
        tensor = self.tensors[name]
        target = Box.of_shape(tensor.shape) if box is None else box
        copies = intersect(tensor.boxes, [target])
        if len(copies) == 1:
            return self._chunk(name, copies[0].source)[target.index(tensor.boxes[copies[0].source])]
        out = np.zeros(target.shape, tensor.dtype)
        for copy in copies:
            piece = self._chunk(name, copy.source)
            out[copy.box.index(target)] = piece[copy.box.index(tensor.boxes[copy.source])]
        return out

    def value(self, name: str) -> Any:
        """Returns an object without tensors, as `pickles` reads it. Raises: UserError as `view`."""
        if name not in self.objects:
            raise UserError(f"{self.folder} has no object {name}")
        return self._open(name, self.objects[name]).value

    def _chunk(self, name: str, number: int) -> np.ndarray:
        tensor = self.tensors[name]
        place, shape = tensor.places[number], tensor.boxes[number].shape
        value = self._open(name, place).value
        if isinstance(value, Unread):
            raise UserError(
                f"{self.folder / place.file}: {name} is {value.what}, which is not read; "
                f"{value.remedy}"
            )
        if not isinstance(value, Tensor) or (value.dtype, value.shape) != (tensor.dtype, shape):
            raise UserError(
                f"{self.folder / place.file}: chunk {number} of {name} at byte {place.offset} is "
                f"not the {tensor.dtype}{shape} that {METADATA} says"
            )
        return value.read()

    def _open(self, name: str, place: Place) -> TorchFile:
        raw = self._file(place.file)
        end = place.offset + place.length
        file = self.folder / place.file
        if end > raw.size:
            raise UserError(f"{file} is cut short: {name} is to end at {end} of {raw.size} bytes")
        return TorchFile(file, raw[place.offset : end], f"{file}: {name} at byte {place.offset}")


def _dictionary(record: Any, member: str) -> dict:
    value = record.member(member) if isinstance(record, Record) else None
    if not isinstance(value, dict):
        raise ValueError(f"it has no {member}")
    return value


def _places(metadata: Any) -> dict[tuple, Place]:
    """Returns {(name, offset or None): where it lies}."""
    places: dict[tuple, Place] = {}
    for index, info in _dictionary(metadata, "storage_data").items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise ValueError("places that are no records")
        name, file = index.member("fqn"), info.member("relative_path")
        offset, numbers = index.member("offset"), (info.member("offset"), info.member("length"))
        if not isinstance(name, str) or not isinstance(file, str):
            raise ValueError("a place without a name or a file")
        path = PurePosixPath(file)
        if not file or "\0" in file or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name} is in {file[:200]!r}, which leads out of the folder")
        _check_numbers(name, numbers)
        if info.member("transform_descriptors"):
            raise ValueError(f"{name} is compressed; save it without extensions")
        key = (name, None if offset is None else _check_numbers(name, offset))
        if key in places:
            raise ValueError(f"{name} has two places for the chunk at {offset}")
        places[key] = Place(file, *numbers)
    _check_places(places)
    return places


def _check_places(places: dict[tuple, Place]) -> None:
    """Refuses places that share bytes: a file could be read once for each of a million names."""
    ordered = sorted((p.file, p.offset, p.offset + p.length, key[0]) for key, p in places.items())
    for (file, _, end, name), (other_file, begin, _, other) in itertools.pairwise(ordered):
        if file == other_file and begin < end:
            raise ValueError(f"{name[:200]} and {other[:200]} share bytes of {file}")


def _check_numbers(name: str, numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or len(numbers) > MAX_RANK:
        raise ValueError(f"{name} has sizes that are no tuple")
    if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise ValueError(f"{name} has negative, fractional or giant sizes")
    return numbers


def _find(places: dict[tuple, Place], name: str, offset: tuple | None) -> Place:
    place = places.get((name, offset))
    if place is None:
        raise ValueError(f"{name}: no file holds {'it' if offset is None else f'chunk {offset}'}")
    return place


def _unread(entry: Record) -> Unread | None:
    """Returns what a tensor is whose type has no counterpart here, else None."""
    properties = entry.member("properties")
    state = properties.state if isinstance(properties, Record) else None
    if not isinstance(state, tuple) or len(state) < 2:
        return None
    if isinstance(state[0], Global) and state[0].name.removeprefix("torch.") not in DTYPES:
        return Unread(f"a tensor of the type {state[0].name[:200]}", "save it as another type")
    layout = state[1].args[0] if isinstance(state[1], Record) and state[1].args else "torch.strided"
    if layout != "torch.strided":
        return Unread(f"a tensor of the layout {show(layout)}", "save x.to_dense()")
    return None


def _chunked(name: str, entry: Record, places: dict[tuple, Place]) -> Chunked:
    """Reads one tensor's entry."""
    properties, chunks = entry.member("properties"), entry.member("chunks")
    if entry.last != "TensorStorageMetadata" or not isinstance(chunks, list):
        raise ValueError(f"{name} is of kind {entry.kind}")
    shape, dtype = _check_numbers(name, entry.member("size")), dtype_of(properties.state[0])
    check_shape(shape, dtype)
    boxes = []
    for chunk in chunks:
        start = _check_numbers(name, chunk.member("offsets"))
        sizes = _check_numbers(name, chunk.member("sizes"))
        stop = tuple(a + n for a, n in zip(start, sizes, strict=True))
        if len(stop) != len(shape) or any(b > n for b, n in zip(stop, shape, strict=True)):
            raise ValueError(f"{name}: chunk {start} to {stop} is not in {shape}")
        if all(sizes):  # ranks that hold nothing of it write such chunks
            boxes.append(Box(start, stop))
    _check_cover(name, shape, boxes)
    chunk_places = [_find(places, name, box.start) for box in boxes]
    for box, place in zip(boxes, chunk_places, strict=True):
        if box.size * dtype.itemsize > place.length:
            raise ValueError(
                f"{name}: {place.length} bytes do not hold the chunk at {box.start}, "
                f"{dtype}{box.shape}"
            )
    return Chunked(dtype, shape, boxes, chunk_places)


def _check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Refuses chunks that overlap, and those that leave a hole."""
    if shape and boxes:
        cuts = [len({b.start[d] for b in boxes}) for d in range(len(shape))]
        d = cuts.index(max(cuts))
        ordered = sorted(boxes, key=lambda b: b.start[d])
        starts = [b.start[d] for b in ordered]
        left = MAX_PAIRS + 64 * len(boxes)
        for i, box in enumerate(ordered):
            end = bisect.bisect_left(starts, box.stop[d])
            left -= end - i
            if left < 0:
                raise ValueError(f"{name}: its {len(boxes):,} chunks lie across one another")
            for other in ordered[i + 1 : end]:
                if box & other is not None:
                    raise ValueError(f"{name}: chunks {box.start} and {other.start} overlap")
    elif len(boxes) > 1:
        raise ValueError(f"{name}: a scalar in {len(boxes)} chunks")
    held, all_of_it = sum(b.size for b in boxes), Box.of_shape(shape).size
    if held != all_of_it:
        raise ValueError(f"{name}: its chunks hold {held:,} of {all_of_it:,} elements")
