"""safetensors files: read by memory map, written as a stream, without torch.

A file is u64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then
the row-major tensors. A big model is a folder of shards with model.safetensors.index.json
{"weight_map": {name: file}}. Source: the format's README (huggingface/safetensors).
"""

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megajax.core import files
from megajax.core.errors import UserError

DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32,
    "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
CODES = {np.dtype(dtype).name: code for code, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 * 2**20  # (the reference implementation's limit)
MAX_INDEX = 2**28  # (chosen) bytes of an index
MAX_RANK = 32
SHARD_BYTES = 5 * 10**9  # (Hugging Face's default shard size)


class TensorFolder:
    """The tensors of a Hugging Face folder, by name, as views of its files."""

    def __init__(self, folder: str | Path, single_name: str = SINGLE, alone: bool = False):
        """Reads the headers. single_name: of the file that has all tensors, if there is no index.

        alone: whether that file is read even if an index of other files lies beside it.
        Raises: UserError when there is none or one is damaged.
        """
        self.folder = Path(folder)
        index, single = self.folder / INDEX, (self.folder / single_name).is_file()
        if index.is_file() and not alone:
            homes = read_index(index)
            if single and single_name not in homes.values():  # transformers would read it alone
                raise UserError(
                    f"{self.folder} has {single_name}, and {INDEX} of other files; move one away"
                )
        elif single:
            homes = {}
        else:
            raise UserError(f"{self.folder} has neither {single_name} nor {INDEX}")
        self._tensors: dict[str, tuple[Path, Any, tuple[int, ...], int]] = {}
        for name in sorted(set(homes.values())) or [single_name]:
            header = _read_header(self.folder / name)
            if both := header.keys() & self._tensors.keys():
                tensor = min(both)
                raise UserError(
                    f"{self.folder / name} holds {tensor[:200]}, and so does "
                    f"{self._tensors[tensor][0]}; a tensor may be in one file only"
                )
            self._tensors |= header
        self._map = functools.cache(files.map_bytes)
        for tensor, name in homes.items():
            if tensor not in self._tensors or self._tensors[tensor][0].name != name:
                raise UserError(f"{index} says that {tensor[:200]} is in {name}; it is not")

    def __contains__(self, name: str) -> bool:
        """Tells whether there is a tensor of this name."""
        return name in self._tensors

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self._tensors)

    def kind(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Returns the shape and the type of a tensor that is there."""
        _, dtype, shape, _ = self._tensors[name]
        return shape, np.dtype(dtype)

    def view(self, name: str) -> np.ndarray:
        """Returns a tensor as a part of its file's memory map: read where it is indexed.

        Raises: UserError for a name that is not there, and a file that cannot be read any more.
        """
        if name not in self._tensors:
            raise UserError(f"{self.folder} has no tensor {name}")
        path, dtype, shape, offset = self._tensors[name]
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        try:
            raw = self._map(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        end = offset + math.prod(shape) * np.dtype(dtype).itemsize
        if end > raw.size:
            raise UserError(f"{path} has become shorter: {name[:200]} ends at {end} of {raw.size}")
        return raw[offset:end].view(dtype).reshape(shape)


def read_index(path: Path) -> dict[str, str]:
    """Returns {tensor: file name}. Raises: UserError; also for files outside the folder."""
    try:
        homes = files.read_object(path, MAX_INDEX)["weight_map"]
        for tensor, name in homes.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{tensor} is in {name!r}, which is not the name of a file here")
        if not homes:
            raise ValueError("no tensors")
        return dict(homes)
    except UserError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is damaged: {str(error)[:300]!r}") from None


def _read_header(path: Path) -> dict[str, tuple[Path, Any, tuple[int, ...], int]]:
    """Returns {tensor: (file, dtype, shape, offset)}; every number in it is checked."""
    try:
        with files.open_regular(path) as file:
            size = files.size_of(file)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MAX_HEADER, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = files.parse_json(file.read(length), files.each_once)
        places, spans = {}, []
        for name, entry in header.items():
            if name == "__metadata__":
                _check_metadata(entry)
                continue
            dtype, shape, (begin, end) = _check_entry(name[:200], entry)
            if 8 + length + end > size:
                raise ValueError(f"{name[:200]}: bytes {begin}..{end} are not in the file")
            spans.append((begin, end, name))
            places[name] = (path, dtype, shape, 8 + length + begin)
        _check_spans(sorted(spans), size - 8 - length)
        return places
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path} is not a safetensors file: {str(error)[:500]}") from None


def _check_metadata(entry: Any) -> None:
    """Refuses what the reference implementation refuses. Raises: ValueError."""
    if entry is None:
        return
    if not isinstance(entry, dict):
        raise ValueError(f"__metadata__ must be an object of strings, not {entry!r:.100}")
    for name, value in entry.items():
        if not isinstance(value, str):
            raise ValueError(
                f"__metadata__ must hold strings only; {name[:200]!r} is {value!r:.100}"
            )


def _check_entry(name: str, entry: Any) -> tuple[Any, tuple[int, ...], tuple[int, int]]:
    """Returns (dtype, shape, (begin, end)) of a header's entry. Raises: ValueError and others."""
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise ValueError(f"{name}: a shape of over {MAX_RANK} dimensions, or that is no list")
    if any(type(n) is not int or not 0 <= n < 2**62 for n in (*shape, begin, end)):
        raise ValueError(f"{name}: negative, fractional or giant sizes")
    width = np.dtype(dtype).itemsize
    if math.prod(n for n in shape if n) * width >= 2**62:  # NumPy has none, even of 0 elements
        raise ValueError(f"{name}: giant sizes {shape}")
    if end - begin != math.prod(shape) * width:
        raise ValueError(f"{name}: bytes {begin}..{end} do not hold {tuple(shape)}")
    return dtype, tuple(shape), (begin, end)


def _check_spans(spans: list[tuple[int, int, str]], size: int) -> None:
    """Refuses tensors that share bytes, and bytes that belong to no tensor: data may hide there."""
    reached = 0
    for begin, end, name in spans:
        if begin != reached:
            what = "shares bytes with another tensor" if begin < reached else "follows unused bytes"
            raise ValueError(f"{name[:200]} at {begin}..{end} {what}")
        reached = end
    if reached != size:
        raise ValueError(f"{size - reached} bytes belong to no tensor")


def write_folder(
    folder: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    produce: Callable[[str], np.ndarray],
    shard_bytes: int = SHARD_BYTES,
    single: str | None = None,
) -> None:
    """Writes {name: (shape, dtype code)}; produce(name) is called once each, in file order.

    single: name of the one file that has all tensors; None: SINGLE, or several with an index.
    """
    if single is not None:
        _write_file(folder / single, list(tensors), tensors, produce)
        return
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (shape, code) in tensors.items():
        nbytes = math.prod(shape) * np.dtype(DTYPES[code]).itemsize
        if filled and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], tensors, produce)
        return
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, names, tensors, produce)
        weight_map |= dict.fromkeys(names, file)
    sizes = (math.prod(s) * np.dtype(DTYPES[c]).itemsize for s, c in tensors.values())
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    path: Path,
    names: Sequence[str],
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    produce: Callable[[str], np.ndarray],
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
    offset = 0
    for name in names:
        shape, code = tensors[name]
        end = offset + math.prod(shape) * np.dtype(DTYPES[code]).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            shape, code = tensors[name]
            array = _cast(name, produce(name), code)
            if array.shape != shape:
                raise AssertionError(f"{name}: {array.shape} was announced as {shape}")
            file.write(array.reshape(-1).view(np.uint8))


def _cast(name: str, x: np.ndarray, code: str) -> np.ndarray:
    """Returns an array as it is written. Raises: UserError when a number becomes infinite."""
    with np.errstate(over="ignore"):
        array = np.asarray(x, DTYPES[code], order="C")
    if array.dtype != x.dtype and (over := np.isinf(array)).any() and np.isfinite(x[over]).any():
        largest = np.abs(x[np.isfinite(x)]).max()
        raise UserError(
            f"{name} holds {largest:g}, more than {code} can; nearest: bfloat16, float32 "
            "(--dtype of scripts/hf.py export)"
        )
    return array
