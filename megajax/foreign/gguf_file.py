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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand

# ---- formats of blocks
#
# Block formats of GGUF tensors, and their values as float32.
#
# A row of a quantized tensor is a sequence of blocks: 32 or 256 weights with their scales. Source:
# the structures and `dequantize_row_*` of GGML (ggml-common.h, ggml-quants.c). Formats that are
# looked up in a table of vectors (IQ1 to IQ3), that hold activations (Q8_1, Q8_K), and ternary ones
# are known by their size only and cannot be read. No jax.
#
# A quantized weight is scale * code, or scale * code + zero, of its group: `Packing.parts` returns
# the three, in which quant.QTensor holds the weights without loss.
#
# Legend: N blocks, W weights of a block, G its groups.


Reader = Callable[[np.ndarray], np.ndarray]
# Codes (N, W), whole numbers; float32 scales (N, G); float32 zero points (N, G), or None.
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]

CHUNK = 2**13  # (chosen: 8 MiB of float32) blocks of 256 weights that are read at one time
# (ggml-common.h) the 16 values of the non-linear 4-bit formats.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True)
class Packing:
    """How a type's blocks are quantized. bits: of a code here, which may be more than the file's.
    group: weights that share a scale. zeros: whether there are zero points; codes have a sign
    otherwise. scale_dtype: in which scales and zero points are exact."""

    parts: Callable[[np.ndarray], Parts]
    bits: int
    group: int
    zeros: bool = False
    scale_dtype: str = "float32"

    def read(self, raw: np.ndarray) -> np.ndarray:
        """Returns float32 (N, W)."""
        code, scale, zero = self.parts(raw)
        groups = code.reshape(*scale.shape, code.shape[1] // scale.shape[1])
        out = scale[..., None] * groups.astype(np.float32)
        if zero is not None:
            out += zero[..., None]
        return out.reshape(code.shape)


@dataclass(frozen=True)
class Format:
    """How a type stores weights. read: None for what cannot be read. packing: None for what is not
    quantized."""

    name: str
    weights: int
    nbytes: int
    read: Reader | None = None
    packing: Packing | None = None


def _packed(name: str, weights: int, nbytes: int, *packing: Any) -> Format:
    fields = Packing(*packing)
    return Format(name, weights, nbytes, fields.read, fields)


def _plain(dtype: type) -> Reader:
    return lambda raw: raw.view(dtype).astype(np.float32)


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """Returns the float16 at a place of each block, (N, 1)."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns 4-bit numbers: a block's low ones, then its high ones."""
    return np.concatenate([packed & 15, packed >> 4], 1)


def _fifth_bits(raw: np.ndarray, at: int) -> np.ndarray:
    """Returns 16 where a bit of the 32 at a place is set, else 0."""
    return np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(raw: np.ndarray) -> Parts:
    return _nibbles(raw[:, 2:]).astype(np.int8) - np.int8(8), _half(raw, 0), None


def _q4_1(raw: np.ndarray) -> Parts:
    return _nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: np.ndarray) -> Parts:
    q = _nibbles(raw[:, 6:]) | _fifth_bits(raw, 2)
    return q.astype(np.int8) - np.int8(16), _half(raw, 0), None


def _q5_1(raw: np.ndarray) -> Parts:
    return _nibbles(raw[:, 8:]) | _fifth_bits(raw, 4), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: np.ndarray) -> Parts:
    return raw[:, 2:].view(np.int8), _half(raw, 0), None


def _iq4_nl(raw: np.ndarray) -> Parts:
    return IQ4[_nibbles(raw[:, 2:])], _half(raw, 0), None


def _iq4_xs(raw: np.ndarray) -> Parts:
    """Eight groups of 32; a group's scale has 4 bits in one place and 2 in another."""
    high = np.ascontiguousarray(raw[:, 2:4]).view(np.uint16)
    high = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], 2).reshape(-1, 8)
    scale = (low | (high << 4)).astype(np.float32) - 32
    q = _nibbles(raw[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return IQ4[q], _half(raw, 0) * scale, None


def _planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns numbers of 1, 2 or 4 bits of runs of bytes (..., n): the lowest bits of all bytes
    first, (..., 8 / bits, n)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8(2**bits - 1)


def _q2_k(raw: np.ndarray) -> Parts:
    """Sixteen groups of 16, each with a scale and a minimum of 4 bits."""
    q = _planes(raw[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 256)
    scale = _half(raw, 80) * (raw[:, :16] & 15).astype(np.float32)
    least = _half(raw, 82) * (raw[:, :16] >> 4).astype(np.float32)
    return q, scale, -least


def _q3_k(raw: np.ndarray) -> Parts:
    """Sixteen groups of 16 with scales of 6 bits; a weight's third bit is in a mask."""
    low = _planes(raw[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256)
    high = _planes(raw[:, :32], 1).reshape(-1, 256)
    q = (low | (high << 2)).astype(np.int8) - np.int8(4)
    part = raw[:, 96:104]
    low_bits = np.concatenate([part & 15, part >> 4], 1)
    high_bits = _planes(raw[:, 104:108], 2).reshape(-1, 16)
    return q, _half(raw, 108) * ((low_bits | (high_bits << 4)).astype(np.float32) - 32), None


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (scales, minima), (N, 8) each, of the 12 bytes in Q4_K and Q5_K."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], 1)
    least = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], 1)
    return scale.astype(np.float32), least.astype(np.float32)


def _eight_groups(raw: np.ndarray, q: np.ndarray) -> Parts:
    """Returns the parts of Q4_K and Q5_K, whose codes these are."""
    scale, least = _six_bits(raw[:, 4:16])
    return q.reshape(-1, 256), _half(raw, 0) * scale, -(_half(raw, 2) * least)


def _q4_k(raw: np.ndarray) -> Parts:
    return _eight_groups(raw, _planes(raw[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(raw: np.ndarray) -> Parts:
    low = _planes(raw[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _eight_groups(raw, low | (_planes(raw[:, 16:48], 1) << 4))


def _q6_k(raw: np.ndarray) -> Parts:
    """Sixteen groups of 16 with scales of 8 bits."""
    low = _planes(raw[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = _planes(raw[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    q = (low | (high << 4)).astype(np.int8) - np.int8(32)
    return q, _half(raw, 208) * raw[:, 192:208].view(np.int8).astype(np.float32), None


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, _plain(np.float32)),
    1: Format("F16", 1, 2, _plain(np.float16)),
    2: _packed("Q4_0", 32, 18, _q4_0, 4, 32, False, "float16"),
    3: _packed("Q4_1", 32, 20, _q4_1, 4, 32, True, "float16"),
    6: _packed("Q5_0", 32, 22, _q5_0, 8, 32, False, "float16"),
    7: _packed("Q5_1", 32, 24, _q5_1, 8, 32, True, "float16"),
    8: _packed("Q8_0", 32, 34, _q8_0, 8, 32, False, "float16"),
    9: Format("Q8_1", 32, 36),
    10: _packed("Q2_K", 256, 84, _q2_k, 2, 16, True),
    11: _packed("Q3_K", 256, 110, _q3_k, 3, 16),
    12: _packed("Q4_K", 256, 144, _q4_k, 4, 32, True),
    13: _packed("Q5_K", 256, 176, _q5_k, 8, 32, True),
    14: _packed("Q6_K", 256, 210, _q6_k, 8, 16),
    15: Format("Q8_K", 256, 292),
    16: Format("IQ2_XXS", 256, 66),
    17: Format("IQ2_XS", 256, 74),
    18: Format("IQ3_XXS", 256, 98),
    19: Format("IQ1_S", 256, 50),
    20: _packed("IQ4_NL", 32, 18, _iq4_nl, 8, 32, False, "float16"),
    21: Format("IQ3_S", 256, 110),
    22: Format("IQ2_S", 256, 82),
    23: _packed("IQ4_XS", 256, 136, _iq4_xs, 8, 32),
    24: Format("I8", 1, 1),
    25: Format("I16", 1, 2),
    26: Format("I32", 1, 4),
    27: Format("I64", 1, 8),
    28: Format("F64", 1, 8, _plain(np.float64)),
    29: Format("IQ1_M", 256, 56),
    30: Format("BF16", 1, 2, _plain(ml_dtypes.bfloat16)),
    34: Format("TQ1_0", 256, 54),
    35: Format("TQ2_0", 256, 66),
    39: Format("MXFP4", 32, 17),
    40: Format("NVFP4", 64, 36),
    41: Format("Q1_0", 128, 18),
}
READABLE = ", ".join(f.name for f in FORMATS.values() if f.read is not None)


def dequantize(raw: np.ndarray, form: Format) -> np.ndarray:
    """Returns float32 weights (rows, weights of a row).

    raw: uint8 (rows, bytes of a row), whole blocks of a format that can be read.
    """
    read = form.read
    assert read is not None
    (out,) = _by_rows(raw, form, lambda part: (read(part),))
    assert out is not None
    return out


def take_apart(raw: np.ndarray, form: Format) -> Parts:
    """Returns the codes, scales and zero points of rows, in a format that has a packing. Each is
    (rows, weights of a row) or (rows, groups of a row). raw: as in `dequantize`."""
    assert form.packing is not None
    code, scale, zero = _by_rows(raw, form, form.packing.parts)
    assert code is not None and scale is not None
    return code, scale, zero


def _by_rows(raw: np.ndarray, form: Format, read: Callable) -> list[np.ndarray | None]:
    """Returns what `read` makes of blocks, a few rows at a time."""
    rows, blocks = raw.shape[0], raw.shape[1] // form.nbytes
    step, each = max(1, CHUNK * 256 // max(1, blocks * form.weights)), []
    with np.errstate(all="ignore"):  # scales may be infinite: the weights then say so
        for begin in range(0, max(rows, 1), step):
            part = np.ascontiguousarray(raw[begin : begin + step])
            count = len(part)
            parts = read(part.reshape(count * blocks, form.nbytes))
            each.append([x if x is None else x.reshape(count, blocks * x.shape[-1]) for x in parts])
    return [None if x[0] is None else np.concatenate(x) for x in zip(*each, strict=True)]


# ---- the file


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
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
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
        array = self.metadata.get(key)
        if not isinstance(array, Array):
            raise UserError(f"{self.path} has no array {key}")
        if array.kind != _TEXT:
            dtype = np.dtype(_SCALARS[array.kind][1])
            return self._raw[array.at : array.at + array.count * dtype.itemsize].view(dtype)
        texts, at, raw = [], array.at, memoryview(self._raw)
        try:
            for _ in range(array.count):
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
        form = info.format
        if form.read is None:
            raise UserError(
                f"{self.path}: {name} has the format {form.name}; {READABLE} are read. Convert "
                "the file: llama-quantize --allow-requantize FILE NEW Q4_K"
            )
        width = info.shape[-1]
        first, last = columns or (0, width)
        begin, end = first // form.weights, -(-last // form.weights)
        raw = self._raw[info.at : info.at + info.nbytes]
        raw = raw.reshape(-1, width // form.weights, form.nbytes)[slice(*(rows or (None,)))]
        part = raw[:, begin:end].reshape(raw.shape[0], (end - begin) * form.nbytes)
        out = dequantize(part, form)
        cut = begin * form.weights
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
        """Skips bytes, which the file must have. Returns the offset of the first."""
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
    places: dict[str, tuple[tuple[int, ...], Format, int]] = {}
    for _ in range(count):
        name = reader.text(MAX_NAME, "a tensor's name")
        if name in places:
            raise ValueError(f"the tensor {name[:200]} comes twice")
        rank = reader.count("<I", MAX_DIMENSIONS, f"dimensions of {name[:200]}")
        sizes = tuple(reader.number("<Q") for _ in range(rank))
        number, offset = reader.number("<I"), reader.number("<Q")
        if number not in FORMATS:
            raise ValueError(f"{name[:200]} has the type {number}, which is not known here")
        if offset % alignment:
            raise ValueError(f"{name[:200]} begins at {offset}, no multiple of {alignment}")
        places[name] = (sizes[::-1], FORMATS[number], offset)
    base = -(-reader.at // alignment) * alignment
    infos = {name: _info(name[:200], *what, base, len(reader.raw)) for name, what in places.items()}
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
