"""Files of torch.save from before PyTorch 1.6, read without torch and without running a pickle.

Such a file is five pickles, one after the other: a magic number, a version, what machine wrote it,
the structure, the keys of its storages; then for each key, in that order, the number of elements
(int64) and the bytes. A storage's type is known from the structure only. There are no checksums.
Source: `_legacy_save` in torch/serialization.py. No jax.
"""

import io
import pickletools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from megajax.checkpoint.formats import pickles
from megajax.checkpoint.formats.pickles import Global
from megajax.core.errors import UserError

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
MAX_FIRST = 2**16  # (chosen) bytes of each of the first three pickles: they have some 100


def is_legacy(raw: np.ndarray) -> bool:
    """Tells whether a file begins with a pickle."""
    return raw[:1].tobytes() == b"\x80" and raw[1:2].tobytes() <= b"\5"


def members(
    raw: np.ndarray, where: str, width: Callable[[Any], int]
) -> dict[str, tuple[np.ndarray, int]]:
    """Returns a file's parts as those of a zip of today: {name: (its bytes, 0 for no checksum)}.

    Args: raw: uint8, the file. where: names it in errors. width(class): bytes of an element of a
      storage, or a ValueError.
    Raises: UserError for a file that is damaged, of another version or byte order, or hostile.
    """
    parts, at = [], 0
    for most in (MAX_FIRST, MAX_FIRST, MAX_FIRST, pickles.MAX_BYTES, pickles.MAX_BYTES):
        end = _end(raw, at, most, where)
        parts.append(raw[at:end])
        at = end
    magic, version, machine = (pickles.loads(p.tobytes(), where) for p in parts[:3])
    if magic != MAGIC or version != VERSION:
        raise UserError(f"{where} is a pickle, but not of torch.save: it has no magic number")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise UserError(f"{where} was written on a big-endian machine")
    try:
        sizes = _storages(parts[3].tobytes(), where, width)
        keys = pickles.loads(parts[4].tobytes(), where)
        if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys):
            raise ValueError("its storages' keys are no list of texts")
        if len(set(keys)) < len(keys) or set(keys) != sizes.keys():
            raise ValueError("it lists other storages than its tensors have")
        found = {"legacy/data.pkl": (parts[3], 0)}
        for key in keys:
            elements, itemsize = sizes[key]
            (stored,) = struct.unpack("<q", raw[at : at + 8].tobytes())
            begin, at = at + 8, at + 8 + elements * itemsize
            if stored != elements or at > raw.size:
                raise ValueError(f"storage {key[:50]!r} of {elements:,} elements is not whole")
            found[f"legacy/data/{key}"] = (raw[begin:at], 0)
    except struct.error:
        raise UserError(f"{where} is not a whole file of torch.save: it ends too early") from None
    except ValueError as error:
        raise UserError(f"{where} is not a whole file of torch.save: {error}") from None
    return found


def _end(raw: np.ndarray, begin: int, most: int, where: str) -> int:
    """Returns where the pickle that begins at a place ends."""
    stream = io.BytesIO(raw[begin : begin + most].tobytes())
    try:
        for number, _ in enumerate(pickletools.genops(stream)):
            if number == pickles.MAX_STEPS:
                raise ValueError(f"more than {number:,} opcodes")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{where} is not a whole file of torch.save: {str(error)[:200]}") from None
    return begin + stream.tell()


def _storages(
    structure: bytes, where: str, width: Callable[[Any], int]
) -> dict[str, tuple[int, int]]:
    """Returns {key: (elements, bytes of one)} of the storages that a structure refers to."""
    found: dict[str, tuple[int, int]] = {}

    def storage(pid: Any) -> None:
        kind, cls, key, _, elements, *view = pid
        if kind != "storage" or not isinstance(cls, Global) or not isinstance(key, str):
            raise ValueError("a persistent id that is no storage")
        if any(v is not None for v in view):
            raise ValueError(f"storage {key[:50]!r} is a part of another one")
        if type(elements) is not int or not 0 <= elements < 2**60:
            raise ValueError("a storage with a negative, fractional or giant size")
        if found.setdefault(key, (elements, width(cls))) != (elements, width(cls)):
            raise ValueError(f"storage {key[:50]!r} has two types or sizes")

    def nothing(*_: Any) -> None:
        pass

    names = "_rebuild_tensor _rebuild_tensor_v2 _rebuild_parameter".split()
    builders = {f"torch._utils.{name}": nothing for name in names}
    pickles.loads(structure, where, builders, storage)
    return found
