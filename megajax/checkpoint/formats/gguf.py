"""GGUF files, read by memory map: llama.cpp's weights with what describes them.

A file is the magic, a version and two counts; key-value pairs; then name, dimensions, type and
offset of each tensor; then, from a multiple of `general.alignment`, the tensors' bytes. Numbers are
little-endian. Source: the format's specification (docs/gguf.md of ggml-org/ggml), versions 2 and 3.

Nothing is taken on trust: every count, length and offset is compared with the bytes that are left
before it is followed, and an array stays in the file until it is asked for. The `gguf` package's
reader is not used here, because it follows counts as they stand and makes a NumPy array for each
element: a file of 80 bytes that claims 2**62 elements keeps it busy forever, and the tokens of a
model take 20 times their bytes. No jax.
"""

import itertools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.formats.gguf_blocks import (
    FORMATS,
    READABLE,
    Format,
    Parts,
    dequantize,
    take_apart,
)
from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.paths import expand

MAGIC = b"GGUF"
OLDER = (b"lmgg", b"tjgg", b"fmgg", b"algg")  # ggml, ggjt, ggmf, ggla, as little-endian words
VERSIONS = (2, 3)
ALIGNMENT = 32  # (the specification) of a file that names none
MAX_ALIGNMENT = 2**20  # (chosen: files have 32, some 4096)
MAX_DIMENSIONS = 4  # (GGML_MAX_DIMS)
MAX_KEYS = 2**14  # (chosen) pairs: published files have some 50
MAX_TENSORS = 2**16  # (chosen) published files have at most some 2,000
MAX_NAME = 2**10  # (chosen) bytes of a key or a name: GGML takes names of 63
MAX_TEXT = 2**24  # (chosen) bytes of a text value: the longest are chat templates, some 2^15
MAX_STRINGS = 2**22  # (chosen) strings in all arrays: vocabularies and merges have some 2^20

# {number of a value's type: (its struct, its dtype)}; 8 is a text, 9 an array.
_SCALARS = {
    0: ("<B", "u1"), 1: ("<b", "i1"), 2: ("<H", "<u2"), 3: ("<h", "<i2"), 4: ("<I", "<u4"),
    5: ("<i", "<i4"), 6: ("<f", "<f4"), 7: ("<?", "u1"), 10: ("<Q", "<u8"), 11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}  # fmt: skip
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Array:
    """An array that lies in the file. kind: number of its elements' type. at: its first byte."""

    kind: int
    count: int
    at: int


@dataclass(frozen=True, slots=True)
class Info:
    """A tensor that lies in the file. shape: the fastest dimension last, as NumPy has it."""

    shape: tuple[int, ...]
    format: Format
    at: int
    nbytes: int


class GgufFile:
    """What a GGUF file holds. metadata: {key: number, truth value, text or Array}."""

    def __init__(self, path: str | Path):
        """Reads everything but arrays and tensors.

        Raises: UserError for what is no GGUF file, is damaged, is of another version or byte order,
        or is one part of several.
        """
        self.path = expand(path, "gguf")
        try:
            self._raw = files.map_bytes(self.path)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror} (--gguf)") from None
        try:
            self.metadata, self.tensors = _parse(memoryview(self._raw))
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            reason = "it ends too early" if isinstance(error, struct.error) else str(error)[:300]
            raise UserError(f"{self.path} is not a GGUF file that can be read: {reason}") from None
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            number = self.metadata.get("split.no", 0)
            raise UserError(
                f"{self.path} is number {number} of {parts} parts of a model, counted from 0; join "
                "them first: llama-gguf-split --merge FIRST_PART WHOLE (--gguf)"
            )

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._raw.size

    def array(self, key: str) -> np.ndarray | list[str]:
        """Returns the elements of an array: texts as a list, else NumPy's.

        Raises: UserError when there is no such array, or a text is not UTF-8.
        """
        found = self.metadata.get(key)
        if not isinstance(found, Array):
            raise UserError(f"{self.path} has no array {key}")
        if found.kind != _TEXT:
            dtype = np.dtype(_SCALARS[found.kind][1])
            return self._raw[found.at : found.at + found.count * dtype.itemsize].view(dtype)
        texts, at, raw = [], found.at, memoryview(self._raw)
        try:
            for _ in range(found.count):
                (length,) = _LENGTH.unpack_from(raw, at)
                texts.append(str(raw[at + 8 : at + 8 + length], "utf-8"))
                at += 8 + length
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: {key}[{len(texts)}] is no text: {error}") from None
        return texts

    def read(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Returns float32 weights of a tensor, dequantized: (rows, columns) of its last dimension.

        rows: (begin, end) of all dimensions but the last, counted as one; None: all. columns: of
        the last. Raises: UserError for a tensor that is not there or whose format is not read.
        """
        info = self.tensors.get(name)
        if info is None:
            raise UserError(f"{self.path} has no tensor {name}")
        found = info.format
        if found.read is None:
            raise UserError(
                f"{self.path}: {name} has the format {found.name}; {READABLE} are read. Convert "
                "the file: llama-quantize --allow-requantize FILE NEW Q4_K"
            )
        width = info.shape[-1]
        first, last = columns or (0, width)
        begin, end = first // found.weights, -(-last // found.weights)
        raw = self._raw[info.at : info.at + info.nbytes]
        raw = raw.reshape(-1, width // found.weights, found.nbytes)[slice(*(rows or (None,)))]
        part = raw[:, begin:end].reshape(raw.shape[0], (end - begin) * found.nbytes)
        out = dequantize(part, found)
        cut = begin * found.weights
        return out[:, first - cut : last - cut]

    def read_parts(self, name: str) -> Parts:
        """Returns the codes, scales and zero points of a tensor of two dimensions whose format has
        a packing, (rows, weights of a row or their groups) each."""
        info = self.tensors[name]
        return take_apart(
            self._raw[info.at : info.at + info.nbytes].reshape(info.shape[0], -1), info.format
        )


_LENGTH = struct.Struct("<Q")


class _Reader:
    """A place in the bytes of a file."""

    def __init__(self, raw: memoryview):
        self.raw, self.at, self.strings = raw, 0, MAX_STRINGS

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.raw, self.at)
        self.at += struct.calcsize(form)
        return value

    def count(self, form: str, most: int, what: str) -> int:
        value = self.number(form)
        if value > most:
            raise ValueError(f"{value:,} {what}; at most {most:,} are read")
        return value

    def skip(self, nbytes: int, what: str) -> int:
        """Steps over bytes, which must be there. Returns where they begin."""
        begin = self.at
        if nbytes > len(self.raw) - begin:
            raise ValueError(
                f"{what} of {nbytes:,} bytes at {begin:,} in a file of {len(self.raw):,}"
            )
        self.at += nbytes
        return begin

    def text(self, most: int, what: str) -> str:
        length = self.count("<Q", most, f"bytes in {what}")
        begin = self.skip(length, what)
        return str(self.raw[begin : begin + length], "utf-8")

    def value(self, key: str) -> Any:
        kind = self.number("<I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind][0])
        if kind == _TEXT:
            return self.text(MAX_TEXT, key)
        if kind != _ARRAY:
            raise ValueError(f"{key} has the type {kind}, which the format does not know")
        return self.array(key)

    def array(self, key: str) -> Array:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _ARRAY:
            raise ValueError(f"{key} is an array of arrays, which no model has")
        if kind in _SCALARS:
            nbytes = count * np.dtype(_SCALARS[kind][1]).itemsize
            return Array(kind, count, self.skip(nbytes, key))
        if kind != _TEXT:
            raise ValueError(
                f"{key} is an array of the type {kind}, which the format does not know"
            )
        self.strings -= count
        if self.strings < 0:
            raise ValueError(f"arrays of over {MAX_STRINGS:,} strings")
        begin, end = self.at, len(self.raw)
        at, unpack = begin, _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + unpack(self.raw, at)[0]
            if at > end:
                raise ValueError(f"a string of {key} ends beyond the file")
        self.at = at
        return Array(kind, count, begin)


def _parse(raw: memoryview) -> tuple[Mapping[str, Any], Mapping[str, Info]]:
    """Returns (metadata, tensors). Raises: ValueError, struct.error, UnicodeDecodeError."""
    magic = bytes(raw[:4])
    if magic != MAGIC:
        older = ", a format of llama.cpp from before GGUF" if magic in OLDER else ""
        raise ValueError(f"it begins with {magic!r}{older}, not with {MAGIC!r}")
    reader = _Reader(raw)
    reader.at = 4
    version = reader.number("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise ValueError("it is big-endian; only little-endian files are read")
        raise ValueError(f"version {version}; {VERSIONS[0]} and {VERSIONS[1]} are read")
    tensors = reader.count("<Q", MAX_TENSORS, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(reader.count("<Q", MAX_KEYS, "keys")):
        key = reader.text(MAX_NAME, "a key")
        if key in metadata:
            raise ValueError(f"the key {key[:200]} comes twice")
        metadata[key] = reader.value(key[:200])
    alignment = metadata.get("general.alignment", ALIGNMENT)
    legal = isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT
    if not legal or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r:.40}; it must be a power of two")
    return metadata, _infos(reader, tensors, alignment)


def _infos(reader: _Reader, count: int, alignment: int) -> dict[str, Info]:
    """Returns the tensors, each of which lies in the file by itself."""
    found: dict[str, tuple[tuple[int, ...], Format, int]] = {}
    for _ in range(count):
        name = reader.text(MAX_NAME, "a tensor's name")
        if name in found:
            raise ValueError(f"the tensor {name[:200]} comes twice")
        rank = reader.count("<I", MAX_DIMENSIONS, f"dimensions of {name[:200]}")
        sizes = tuple(reader.number("<Q") for _ in range(rank))
        number, offset = reader.number("<I"), reader.number("<Q")
        if number not in FORMATS:
            raise ValueError(f"{name[:200]} has the type {number}, which is not known here")
        if offset % alignment:
            raise ValueError(f"{name[:200]} begins at {offset}, no multiple of {alignment}")
        found[name] = (sizes[::-1], FORMATS[number], offset)
    base = -(-reader.at // alignment) * alignment
    infos = {name: _info(name[:200], *what, base, len(reader.raw)) for name, what in found.items()}
    spans = sorted((i.at, i.at + i.nbytes, name[:200]) for name, i in infos.items())
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"{name} and {other} share bytes")
    return infos


def _info(
    name: str, shape: tuple[int, ...], kind: Format, offset: int, base: int, size: int
) -> Info:
    weights = math.prod(shape)
    if not shape or not weights or weights >= 2**62:
        raise ValueError(f"{name} has the shape {shape}; sizes must be at least 1")
    if shape[-1] % kind.weights:
        raise ValueError(
            f"rows of {name} have {shape[-1]} weights; {kind.name} needs {kind.weights}"
        )
    nbytes = weights // kind.weights * kind.nbytes
    if nbytes > size - base - offset:
        raise ValueError(
            f"{name} of {nbytes:,} bytes at {base + offset:,} ends beyond the file's {size:,}"
        )
    return Info(shape, kind, base + offset, nbytes)
