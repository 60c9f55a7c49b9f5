"""Image files that strangers made: what they are by their headers, and their pixels as RGB.

A header is read by the few lines here, before any decoder sees the file: the kind of the file by
its first bytes, never by its name, its size, how the camera was held (EXIF), and whether the file
is complete. Decoders are Pillow's for the five kinds below and no others; their memory and time
follow from the pixels that the header says, which the caller limits.

Pixels: grey and palette images become RGB, CMYK too (without colour profiles); of 16 bits the upper
8 stay; what is transparent shows white; of several pages or frames the first is read. Floating
point and 32-bit samples have no known range and are not read.

Legend: H rows, W columns of pixels.
"""

import dataclasses
import io
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from PIL import BmpImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin
from PIL import WebPImagePlugin as WebpImagePlugin

from megajax.core.errors import UserError
from megajax.core.files import size_of

ORIENTATION = 0x0112  # the tag of EXIF and TIFF: 1 upright, 2 to 8 mirrored or turned
PARTS = 2**16  # (chosen) segments or chunks that a header is sought in
VALUES = 2**20  # (chosen) numbers of one tag of a TIFF, as many as its strips
EXIF = 2**18  # (chosen) bytes of EXIF that are searched for the orientation
TAIL = 2**12  # (chosen) bytes at the end of a JPEG that are searched for its end mark
SCANS = 200  # (chosen: photographs have 10) of a progressive JPEG; each takes time like all pixels
SLACK = 2**28  # (chosen) bytes that a file may have beyond 8 for each of its pixels
NOT_IMAGE = "not a JPEG, PNG, WebP, TIFF or BMP image"
DAMAGED = "truncated or damaged image"
TOO_LARGE = "image of too many megapixels"
SAMPLES = "image with samples that are not read"


class ImageError(UserError):
    """A file that cannot be used. problem: why, in the few words under which it is counted."""

    def __init__(self, problem: str, message: str):
        """message: for a person; names the file."""
        super().__init__(message)
        self.problem = problem


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """size: (height, width) as the image is shown. orientation: EXIF's, 1 to 8. complete: whether
    the end of the file was seen; False: only decoding tells."""

    kind: str
    size: tuple[int, int]
    orientation: int
    complete: bool


def read_header(file: BinaryIO, path: str, max_megapixels: float) -> Header:
    """Returns what a file's header says. path: for messages.

    Raises: ImageError when the file is of no kind that is read, damaged, or has more pixels.
    """
    head = file.read(32)
    reader = next((read for begins, read in KINDS if begins(head)), None)
    if reader is None:
        raise ImageError(NOT_IMAGE, f"{path} is {NOT_IMAGE}")
    file.seek(0)
    try:
        header = reader(file)
    except (struct.error, IndexError):
        raise ImageError(DAMAGED, f"{path} is truncated: its header breaks off") from None
    except ValueError as error:
        problem = error.problem if isinstance(error, ImageError) else DAMAGED
        raise ImageError(problem, f"{path} cannot be read: {error}") from None
    height, width = header.size
    if height * width > max_megapixels * 1e6:
        raise ImageError(
            TOO_LARGE,
            f"{path} has {width:,} x {height:,} pixels, more than {max_megapixels:g} million "
            "(--data.max_megapixels)",
        )
    if min(height, width) < 1:
        raise ImageError(DAMAGED, f"{path} has {width} x {height} pixels")
    return header


def decode(
    file: BinaryIO, header: Header, path: str, least: tuple[int, int] | None = None
) -> np.ndarray:
    """Returns the image as (H, W, 3) uint8, as it is shown (EXIF).

    least: (height, width); a JPEG may be decoded at a half, a quarter or an eighth of its size when
      neither side becomes shorter than this, which takes a fraction of the time.
    Raises: ImageError when the file is damaged, or its samples are not read; OSError.
    """
    height, width = header.size
    if size_of(file) > (most := SLACK + 8 * height * width):
        raise ImageError(DAMAGED, f"{path} has {size_of(file):,} bytes; {most:,} are read at most")
    file.seek(0)
    if header.kind == "TIFF":  # its decoder reads only the strips of the first page
        source: Any = file
    else:
        data = file.read()
        source = io.BytesIO(_bare_jpeg(data, path) if header.kind == "JPEG" else data)
    try:
        picture = DECODERS[header.kind](source)
        if least and header.kind == "JPEG":
            rows, columns = least[::-1] if header.orientation >= 5 else least
            picture.draft("RGB", (columns, rows))
        pixels = _rgb(picture)
    except (MemoryError, ImageError):
        raise
    except Exception as error:  # Pillow raises many kinds for what is damaged
        raise ImageError(
            DAMAGED, f"{path} is truncated or damaged: {str(error) or type(error).__name__:.200}"
        ) from None
    stored = 1 if header.kind == "TIFF" else header.orientation  # Pillow has turned a TIFF already
    pixels = np.ascontiguousarray(_upright(pixels, stored))
    if not least and pixels.shape[:2] != header.size:
        raise ImageError(DAMAGED, f"{path} has other pixels than its header says")
    return pixels


def _rgb(picture: Image.Image) -> np.ndarray:
    """Returns the pixels of an opened image as (H, W, 3) uint8, as the file has them."""
    picture.load()
    if picture.mode.startswith("I;16"):
        grey_HW = (np.asarray(picture) >> 8).astype(np.uint8)
        return np.repeat(grey_HW[:, :, None], 3, 2)
    if picture.mode in ("I", "F"):
        raise ImageError(SAMPLES, f"samples of 32 bits (Pillow's mode {picture.mode}) are not read")
    if picture.has_transparency_data:
        layer = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        picture = Image.new("RGB", layer.size, "white")
        picture.paste(layer, mask=layer.getchannel("A"))
    return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Returns the image as EXIF's orientation shows it."""
    if orientation >= 5:  # stored by columns
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


class _Tiff(TiffImagePlugin.TiffImageFile):
    """Pillow warns of large TIFF files, and refuses larger ones, by a limit of its own that holds
    for a process; here read_header limits. Pillow turns a TIFF by its tag, decode does it too."""

    def load_prepare(self) -> None:
        if self._im is None:
            self.im = Image.core.new(self.mode, self._tile_size)
        super().load_prepare()


DECODERS: dict[str, Callable[[Any], Image.Image]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebpImagePlugin.WebPImageFile,
    "TIFF": _Tiff,
    "BMP": BmpImagePlugin.BmpImageFile,
}


# ---- headers


def _take(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _header(kind: str, size: tuple[int, int], orientation: int, complete: bool) -> Header:
    """size: (height, width) as it is stored."""
    orientation = orientation if 1 <= orientation <= 8 else 1
    return Header(kind, size[::-1] if orientation >= 5 else size, orientation, complete)


def _jpeg_segments(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Yields (marker, where it begins, bytes of its content) up to the first scan, which is the
    last one. The file stands at the content then."""
    begin = 2
    for _ in range(PARTS):
        file.seek(begin)
        head = file.read(4)
        blank, mark, high, low = head if len(head) == 4 else (0, 0, 0, 0)
        if blank != 0xFF or mark in (0, 1, 0xFF) or 0xD0 <= mark <= 0xD8:
            if not head:
                break
            begin += 1  # decoders pass over what stands between segments
            continue
        length = high << 8 | low
        if mark == 0xD9 or length < 2:
            break
        yield mark, begin, length - 2
        if mark == 0xDA:
            return
        begin += 2 + length
    raise ValueError("it has no image, or too many segments before it")


def _read_jpeg(file: BinaryIO) -> Header:
    size, orientation = (0, 0), 0
    for mark, _, length in _jpeg_segments(file):
        if 0xC0 <= mark <= 0xCF and mark not in (0xC4, 0xC8, 0xCC):
            bits, height, width = _take(file, ">BHH")
            size = height, width
            if bits != 8:
                raise ImageError(SAMPLES, f"samples of {bits} bits are not read in a JPEG")
        elif mark == 0xE1 and not orientation and file.read(6) == b"Exif\0\0":
            orientation = _exif_orientation(file.read(max(length - 6, 0)))
    file.seek(max(file.tell(), size_of(file) - TAIL))
    return _header("JPEG", size, orientation, b"\xff\xd9" in file.read(TAIL))


def _bare_jpeg(data: bytes, path: str) -> bytes:
    """Returns a JPEG without the segments that are not about its pixels. Pillow joins and parses
    these, and their length has no limit."""
    pieces, begin = [data[:2]], 2
    for mark, begin, length in _jpeg_segments(io.BytesIO(data)):
        if not (0xE1 <= mark <= 0xED or mark in (0xEF, 0xFE, 0xDA)):
            pieces.append(data[begin : begin + 4 + length])
    if data.count(b"\xff\xda", begin) > SCANS:
        raise ImageError(DAMAGED, f"{path} has over {SCANS} scans")
    return b"".join([*pieces, memoryview(data)[begin:]])


def _read_png(file: BinaryIO) -> Header:
    length, name, width, height = _take(file, ">8xI4sII")
    if name != b"IHDR":
        raise ValueError("its header is not the first chunk")
    orientation, following = 0, 8 + 12 + length
    for _ in range(PARTS):
        file.seek(following)
        chunk = file.read(8)
        if len(chunk) < 8:
            break
        length, name = struct.unpack(">I4s", chunk)
        if name == b"IEND":
            return _header("PNG", (height, width), orientation, True)
        if name == b"eXIf" and not orientation:
            orientation = _exif_orientation(file.read(min(length, EXIF)))
        following += 12 + length
    return _header("PNG", (height, width), orientation, False)


def _read_webp(file: BinaryIO) -> Header:
    total, name, length = _take(file, "<4xI4x4sI")
    content = file.read(10)
    orientation = 0
    if name == b"VP8 " and content[3:6] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", content[6:]))
    elif name == b"VP8L" and content[0] == 0x2F:
        (bits,) = struct.unpack("<I", content[1:5])
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif name == b"VP8X":
        width = int.from_bytes(content[4:7], "little") + 1
        height = int.from_bytes(content[7:10], "little") + 1
        following = 20 + length + length % 2
        for _ in range(PARTS if content[0] & 8 else 0):  # it says that it has EXIF
            file.seek(following)
            chunk = file.read(8)
            if len(chunk) < 8:
                break
            name, length = struct.unpack("<4sI", chunk)
            if name == b"EXIF":
                orientation = _exif_orientation(file.read(min(length, EXIF)))
                break
            following += 8 + length + length % 2
    else:
        raise ValueError("its first chunk is no image")
    return _header("WebP", (height, width), orientation, 8 + total <= size_of(file))


def _read_tiff(file: BinaryIO) -> Header:
    tags = _Tags(file)
    bits, formats = tags.numbers(258) or (1,), tags.numbers(339) or (1,)
    if max(bits) > 16 or set(formats) - {1}:
        raise ImageError(SAMPLES, f"samples of {max(bits)} bits and format {formats} are not read")
    size, orientation = (tags.numbers(257) + (0,))[0], (tags.numbers(ORIENTATION) + (0,))[0]
    begins = tags.numbers(273) or tags.numbers(324)
    lengths = tags.numbers(279) or tags.numbers(325)
    complete = 0 < len(begins) == len(lengths) and size_of(file) >= max(
        begin + length for begin, length in zip(begins, lengths, strict=True)
    )
    return _header("TIFF", (size, (tags.numbers(256) + (0,))[0]), orientation, complete)


def _read_bmp(file: BinaryIO) -> Header:
    begin, header = _take(file, "<10xII")
    if header == 12:
        width, height, bits = _take(file, "<HH2xH")
        packing = 0
    elif header in (40, 52, 56, 64, 108, 124):
        width, height, bits, packing = _take(file, "<ii2xHI")
    else:
        raise ImageError(NOT_IMAGE, f"a header of {header} bytes is no BMP's")
    length = (width * bits + 31) // 32 * 4 * abs(height)
    complete = packing in (0, 3) and begin + length <= size_of(file)
    return _header("BMP", (abs(height), width), 1, complete)


class _Tags:
    """The first directory of a TIFF file, or of EXIF, which has the same form."""

    def __init__(self, file: BinaryIO):
        """Raises: ValueError, struct.error."""
        self.file = file
        file.seek(0)
        self.order = {b"II": "<", b"MM": ">"}.get(file.read(2), "")
        if not self.order:
            raise ValueError("its order of bytes is not said")
        magic, place = _take(file, self.order + "HI")
        if magic != 42:
            raise ValueError("it is no TIFF of 32 bits")
        file.seek(place)
        (count,) = _take(file, self.order + "H")
        entries = struct.iter_unpack(self.order + "HHI4s", _take(file, f"{12 * count}s")[0])
        self.entries = {tag: (kind, number, value) for tag, kind, number, value in entries}
        if any(n > VALUES for kind, n, _ in self.entries.values() if kind not in (1, 2, 6, 7)):
            raise ValueError(f"one of its tags has over {VALUES:,} numbers")

    def numbers(self, tag: int) -> tuple[int, ...]:
        """Returns the whole numbers of a tag; none where it is missing or has others."""
        kind, count, value = self.entries.get(tag, (0, 0, b""))
        letter = {1: "B", 3: "H", 4: "I"}.get(kind)
        if not letter:
            return ()
        form = f"{self.order}{count}{letter}"
        if (size := struct.calcsize(form)) <= 4:
            return struct.unpack(form, value[:size])
        self.file.seek(struct.unpack(self.order + "I", value)[0])
        return _take(self.file, form)


def _exif_orientation(data: bytes) -> int:
    """Returns the orientation that EXIF says, 0 for none."""
    try:
        numbers = _Tags(io.BytesIO(data.removeprefix(b"Exif\0\0"))).numbers(ORIENTATION)
    except (ValueError, struct.error):
        return 0
    return numbers[0] if numbers else 0


KINDS: tuple[tuple[Callable[[bytes], bool], Callable[[BinaryIO], Header]], ...] = (
    (lambda head: head.startswith(b"\xff\xd8\xff"), _read_jpeg),
    (lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"), _read_png),
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", _read_webp),
    (lambda head: head.startswith((b"II*\0", b"MM\0*")), _read_tiff),
    (lambda head: head.startswith(b"BM"), _read_bmp),
)
