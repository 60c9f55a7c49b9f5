"""Folders of torch.distributed.checkpoint (DCP), read without torch.

`.metadata` is a pickle that says for each tensor its dtype, its shape and the chunks it was cut in,
and for each chunk the file and the bytes that hold it; there lies one file of torch.save. A tensor,
or a box of it, is put together from the chunks that it meets: no more than that is in memory.
Every chunk has bytes of its own in a file, at least as many as its elements take; what shares them,
or would take longer than its length warrants, is refused.
Megatron-Core's `torch_dist` format is this too (megatron.py). Compressed files are refused. No jax.
"""

import bisect
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from megajax.checkpoint.formats import pickles
from megajax.checkpoint.formats.pickles import Global, Record
from megajax.checkpoint.formats.torch_files import (
    DTYPES,
    MAX_RANK,
    Tensor,
    TorchFile,
    Unread,
    check_shape,
    dtype_of,
    map_file,
    show,
)
from megajax.core.boxes import Box, intersect
from megajax.core.errors import UserError

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
        found = pickles.loads(raw, str(file), {"torch.Size": tuple})
        left = len(raw) // CHUNK_BYTES
        self.tensors: dict[str, Chunked] = {}
        self.objects: dict[str, Place] = {}
        self.unread: dict[str, Unread] = {}
        try:
            places = _places(found)
            for name, entry in _dictionary(found, "state_dict_metadata").items():
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
        wanted = Box.whole(tensor.shape) if box is None else box
        copies = intersect(tensor.boxes, [wanted])
        if len(copies) == 1:
            return self._chunk(name, copies[0].source)[wanted.index(tensor.boxes[copies[0].source])]
        out = np.zeros(wanted.shape, tensor.dtype)
        for copy in copies:
            piece = self._chunk(name, copy.source)
            out[copy.box.index(wanted)] = piece[copy.box.index(tensor.boxes[copy.source])]
        return out

    def value(self, name: str) -> Any:
        """Returns what is no tensor, as `pickles` reads it. Raises: UserError as view does."""
        if name not in self.objects:
            raise UserError(f"{self.folder} has no object {name}")
        return self._open(name, self.objects[name]).value

    def _chunk(self, name: str, number: int) -> np.ndarray:
        tensor = self.tensors[name]
        place, shape = tensor.places[number], tensor.boxes[number].shape
        found = self._open(name, place).value
        if isinstance(found, Unread):
            raise UserError(
                f"{self.folder / place.file}: {name} is {found.what}, which is not read; "
                f"{found.remedy}"
            )
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (tensor.dtype, shape):
            raise UserError(
                f"{self.folder / place.file}: chunk {number} of {name} at byte {place.offset} is "
                f"not the {tensor.dtype}{shape} that {METADATA} says"
            )
        return found.read()

    def _open(self, name: str, place: Place) -> TorchFile:
        raw = self._file(place.file)
        end = place.offset + place.length
        file = self.folder / place.file
        if end > raw.size:
            raise UserError(f"{file} is cut short: {name} is to end at {end} of {raw.size} bytes")
        return TorchFile(file, raw[place.offset : end], f"{file}: {name} at byte {place.offset}")


def _dictionary(record: Any, member: str) -> dict:
    found = record.member(member) if isinstance(record, Record) else None
    if not isinstance(found, dict):
        raise ValueError(f"it has no {member}")
    return found


def _places(metadata: Any) -> dict[tuple, Place]:
    """Returns {(name, offset or None): where it lies}."""
    found: dict[tuple, Place] = {}
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
        if key in found:
            raise ValueError(f"{name} has two places for the chunk at {offset}")
        found[key] = Place(file, *numbers)
    _check_places(found)
    return found


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
    found = [_find(places, name, box.start) for box in boxes]
    for box, place in zip(boxes, found, strict=True):
        if box.size * dtype.itemsize > place.length:
            raise ValueError(
                f"{name}: {place.length} bytes do not hold the chunk at {box.start}, "
                f"{dtype}{box.shape}"
            )
    return Chunked(dtype, shape, boxes, found)


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
    held, all_of_it = sum(b.size for b in boxes), Box.whole(shape).size
    if held != all_of_it:
        raise ValueError(f"{name}: its chunks hold {held:,} of {all_of_it:,} elements")
