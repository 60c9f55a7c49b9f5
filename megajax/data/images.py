"""Image files that strangers made: what they are by their headers, and their pixels as RGB.

A header is read by the few lines here, before any decoder sees the file: the kind of the file by
its first bytes, never by its name, its size, how the camera was held (EXIF), and whether the file
is complete. Decoders are Pillow's for the five kinds below and no others; their memory and time
follow from the pixels that the header says, which the caller limits.

Pixels: grey and palette images become RGB, CMYK too (without colour profiles); of 16 bits the upper
8 stay; what is transparent shows white; of several pages or frames the first is read. Floating
point and 32-bit samples have no known range and are not read.

`decode` reads the bytes of a PNG, JPEG or WebP, whoever sent them. `collate` makes a batch of a
vision-language model from tokens and pixels, with the resizing, the patches and their order of
Qwen2-VL (arXiv 2409.12191; transformers, Qwen2VLImageProcessor).

Legend: H rows, W columns of pixels; B rows of a batch, S tokens of a row, P patches of a row, Q = P
/ merge^2 merged patches, C = 3 patch^2 values of a patch.
"""

import dataclasses
import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np
from PIL import BmpImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin
from PIL import WebPImagePlugin as WebpImagePlugin

from megajax.core.errors import UserError
from megajax.data.pack import IGNORED

ORIENTATION = 0x0112  # the tag of EXIF and TIFF: 1 upright, 2 to 8 mirrored or turned
PARTS = 2**16  # (chosen) segments or chunks that a header is sought in
VALUES = 2**20  # (chosen) numbers of one tag of a TIFF, as many as its strips
EXIF = 2**18  # (chosen) bytes of EXIF that are searched for the orientation
TAIL = 2**12  # (chosen) bytes at the end of a JPEG that are searched for its end mark
SCANS = 200  # (chosen: photographs have 10) of a progressive JPEG; each takes time like all pixels
SLACK = 2**28  # (chosen) bytes that a file may have beyond 8 for each of its pixels
SIDE = 2**15  # (chosen) pixels of a side of an image that `decode` reads
NOT_SENT = "not a PNG, JPEG or WebP image"
NOT_IMAGE = "not a JPEG, PNG, WebP, TIFF or BMP image"
DAMAGED = "truncated or damaged image"
TOO_LARGE = "image of too many megapixels"
LONG = "image that is too long for its width"
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


def read_pixels(
    file: BinaryIO, header: Header, path: str, least: tuple[int, int] | None = None
) -> np.ndarray:
    """Returns the image as (H, W, 3) uint8, as it is shown (EXIF).

    least: (height, width); a JPEG may be decoded at a half, a quarter or an eighth of its size when
      neither side becomes shorter than this, which takes a fraction of the time.
    A JPEG whose data break off before its end mark decodes: what is missing is grey, or repeats.
    Raises: ImageError when the file is damaged, or its samples are not read; OSError.
    """
    height, width = header.size
    if _size(file) > (most := SLACK + 8 * height * width):
        raise ImageError(DAMAGED, f"{path} has {_size(file):,} bytes; {most:,} are read at most")
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


def decode(data: bytes, *, max_pixels: int = 2**24) -> np.ndarray:
    """Returns a PNG, JPEG or WebP image as (H, W, 3) uint8, as it is shown (EXIF); of several
    frames the first.

    Nothing is decoded before the header was read: its pixels bound the memory and the time.
    Raises: ImageError, which is a UserError, for what is no such image, is truncated or damaged,
      has more than max_pixels pixels, or a side of more than SIDE.
    """
    file, what = io.BytesIO(data), "the image"
    head = bytes(data[:32])
    if not any(begins(head) for begins, read in KINDS if read in SENT):
        state = "it is empty" if not head else f"it begins with {head[:12]!r}"
        raise ImageError(NOT_SENT, f"{what} is {NOT_SENT}: {state}")
    header = read_header(file, what, math.inf)
    height, width = header.size
    if height * width > max_pixels or max(height, width) > SIDE:
        may = f"it may have {max_pixels:,}, and" if height * width > max_pixels else "but"
        raise ImageError(
            TOO_LARGE, f"{what} has {width:,} x {height:,} pixels; {may} a side at most {SIDE:,}"
        )
    return read_pixels(file, header, what)


def _size(file: BinaryIO) -> int:
    """Returns the bytes of an open file or of a buffer."""
    place = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(place)
    return size


def _rgb(picture: Image.Image) -> np.ndarray:
    """Returns the pixels of an opened image as (H, W, 3) uint8, as the file has them."""
    clear = picture.info.get("transparency")  # of a PNG in grey or RGB, the value that shows white
    tiles: Any = getattr(picture, "tile", ()) if clear is not None else ()
    form = tiles[0][3] if tiles else ""
    picture.load()
    if form in ("L;2", "L;4"):  # Pillow scales the pixels to 8 bits, and not this value
        bits = int(form[-1])
        picture.info["transparency"] = (clear & 2**bits - 1) * 255 // (2**bits - 1)
    elif form == "RGB;16B":
        raise ImageError(SAMPLES, "a transparent colour of 16-bit samples is not read")
    if picture.mode.startswith("I;16"):
        deep_HW = np.asarray(picture)
        grey_HW = (deep_HW >> 8).astype(np.uint8)
        if isinstance(clear, int):
            grey_HW[deep_HW == clear] = 255
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
    file.seek(max(file.tell(), _size(file) - TAIL))
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
    return _header("WebP", (height, width), orientation, 8 + total <= _size(file))


def _read_tiff(file: BinaryIO) -> Header:
    tags = _Tags(file)
    bits, formats = tags.numbers(258) or (1,), tags.numbers(339) or (1,)
    if max(bits) > 16 or set(formats) - {1}:
        raise ImageError(SAMPLES, f"samples of {max(bits)} bits and format {formats} are not read")
    size, orientation = (tags.numbers(257) + (0,))[0], (tags.numbers(ORIENTATION) + (0,))[0]
    begins = tags.numbers(273) or tags.numbers(324)
    lengths = tags.numbers(279) or tags.numbers(325)
    complete = 0 < len(begins) == len(lengths) and _size(file) >= max(
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
    complete = packing in (0, 3) and begin + length <= _size(file)
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
SENT = (_read_jpeg, _read_png, _read_webp)  # the kinds that `decode` reads


# ---- batches of a vision-language model

ASPECT = 200  # (transformers, smart_resize) times as long as the other a side may be


class Tower(Protocol):
    """The members of a tower's configuration that decide patches (models/vit.py, VitConfig)."""

    @property
    def patch(self) -> int: ...  # noqa: D102

    @property
    def merge(self) -> int: ...  # noqa: D102

    @property
    def min_pixels(self) -> int: ...  # noqa: D102

    @property
    def max_pixels(self) -> int: ...  # noqa: D102


def fit(size: tuple[int, int], tower: Tower) -> tuple[int, int]:
    """Returns (height, width) in pixels to which an image of this (height, width) is resized:
    multiples of patch * merge, about as many pixels, but within min_pixels and max_pixels. A side
    has patch * merge at least, so that a long image may have more than max_pixels.

    Raises: ImageError for an image that is over 200 times as long as wide.
    Source: smart_resize of transformers' Qwen2VLImageProcessor.
    """
    height, width = size
    unit = tower.patch * tower.merge
    if min(size) < 1 or max(size) > ASPECT * min(size):
        raise ImageError(
            LONG,
            f"the image has {width:,} x {height:,} pixels; one side may be {ASPECT} times as long "
            "as the other",
        )
    rows, columns = (round(side / unit) * unit for side in size)
    if rows * columns > tower.max_pixels:
        beta = math.sqrt(height * width / tower.max_pixels)
        rows, columns = (max(unit, math.floor(side / beta / unit) * unit) for side in size)
    elif rows * columns < tower.min_pixels:
        beta = math.sqrt(tower.min_pixels / (height * width))
        rows, columns = (math.ceil(side * beta / unit) * unit for side in size)
    return rows, columns


def patch_count(size: tuple[int, int], tower: Tower) -> int:
    """Returns the patches of an image of this (height, width); merge^2 of them are a token."""
    rows, columns = fit(size, tower)
    return rows * columns // tower.patch**2


def fitted(image: np.ndarray, tower: Tower) -> np.ndarray:
    """Returns an image (H, W, 3) uint8 in the size of `fit`, resized as Qwen2-VL has it (bicubic).

    Raises: ValueError for another array; ImageError as `fit` does.
    """
    if not isinstance(image, np.ndarray):
        raise ValueError(f"an image is an array uint8 (H, W, 3), not a {type(image).__name__}")
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(f"an image is uint8 (H, W, 3), not {image.dtype} {image.shape}")
    height, width = fit((image.shape[0], image.shape[1]), tower)
    if image.shape[:2] == (height, width):
        return image
    picture = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))


def patchify(image: np.ndarray, tower: Tower) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Cuts an image into patches, after resizing it (`fitted`): what `cut` returns of it."""
    return cut(fitted(image, tower), tower)


def cut(image: np.ndarray, tower: Tower) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Cuts an image that is resized already into patches.

    `fit` is asked once: of what it gives it may want another size again.

    Args: image: (H, W, 3) uint8, H and W multiples of patch * merge.
    Returns: patches (P, C) uint8, values in the order (channel, row, column); places (P, 2) int32,
      (row, column) of each patch in its image; (rows, columns) of merged patches. The patches of a
      merged one follow each other.
    Raises: ValueError for other sides.
    """
    (height, width), p, m = image.shape[:2], tower.patch, tower.merge
    if min(height, width) < 1 or height % (p * m) or width % (p * m):
        raise ValueError(
            f"an image of {width} x {height} pixels cannot be cut into squares of {p * m}; resize "
            "it (fitted)"
        )
    rows, columns = height // (p * m), width // (p * m)
    blocks = image.reshape(rows, m, p, columns, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    numbers = np.arange(rows * m * columns * m).reshape(rows, m, columns, m).transpose(0, 2, 1, 3)
    places = np.stack(np.divmod(numbers.ravel(), columns * m), -1).astype(np.int32)
    return np.ascontiguousarray(blocks).reshape(-1, 3 * p * p), places, (rows, columns)


def expanded(
    tokens: np.ndarray,
    grids: Sequence[tuple[int, int]],
    image_token: int,
    targets: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Repeats the one placeholder of each image for each of its merged patches.

    Args: tokens: int (n,). grids: (rows, columns) of merged patches of each image, in order.
      targets: int (n,), what each token predicts, IGNORED for nothing; None: the token after it,
      unless that is a placeholder.
    Returns: tokens, targets and places (S,) int32; places: the number of the merged patch that a
      token shows, counted over all images; -1 for text. Of an image the last token predicts what
      the placeholder did.
    Raises: ValueError when placeholders and images are not equally many.
    """
    tokens = np.asarray(tokens, np.int32).reshape(-1)
    is_image = tokens == image_token
    if (count := int(is_image.sum())) != len(grids):
        raise ValueError(
            f"{count} placeholders of images (token {image_token}) and {len(grids)} images; each "
            "image needs one placeholder in the text, and each placeholder an image"
        )
    if targets is None:
        following = np.append(tokens[1:], IGNORED)
        targets = np.where(following == image_token, IGNORED, following)
    targets = np.asarray(targets, np.int32).reshape(-1)
    if targets.shape != tokens.shape:
        raise ValueError(f"{len(targets)} targets for {len(tokens)} tokens")
    counts = np.ones(len(tokens), np.int64)
    counts[is_image] = [rows * columns for rows, columns in grids]
    ends = np.cumsum(counts) - 1
    is_image_S = np.repeat(is_image, counts)
    targets_S = np.full(len(is_image_S), IGNORED, np.int32)
    targets_S[ends] = targets
    places_S = np.where(is_image_S, np.cumsum(is_image_S) - 1, -1).astype(np.int32)
    return np.repeat(tokens, counts), targets_S, places_S


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A sample as the batch has it: tokens, targets, places (S,), rotary (S, 3), all int32; of all
    images patches (P, C) uint8, patch_places (P, 2) int32, and images (P,) int32, the number of
    each patch's image in the sample."""

    tokens: np.ndarray
    targets: np.ndarray
    places: np.ndarray
    rotary: np.ndarray
    patches: np.ndarray
    patch_places: np.ndarray
    images: np.ndarray


def piece(
    tokens: np.ndarray, images: Sequence[np.ndarray], cfg: Any, targets: np.ndarray | None = None
) -> Piece:
    """Returns a sample with its images cut into patches.

    Args: as of `expanded`; images: (H, W, 3) uint8 each, as `fitted` returns them. cfg: a
      VlmConfig.
    Raises: ValueError as `expanded` and `cut` do.
    """
    from megajax.models.vlm import positions  # here: readers of files need no model

    tower: Tower = cfg.tower
    pictures = [cut(image, tower) for image in images]
    grids = [grid for _, _, grid in pictures]
    tokens_S, targets_S, places_S = expanded(tokens, grids, cfg.image_token, targets)
    rotary_3S = positions(tokens_S, grids, cfg.image_token)
    return Piece(
        tokens_S,
        targets_S,
        places_S,
        np.ascontiguousarray(rotary_3S.T, np.int32),
        np.concatenate(
            [patches for patches, _, _ in pictures] or [np.zeros((0, _values(tower)), "u1")]
        ),
        np.concatenate([places for _, places, _ in pictures] or [np.zeros((0, 2), np.int32)]),
        np.repeat(
            np.arange(len(pictures), dtype=np.int32), [len(patches) for patches, _, _ in pictures]
        ),
    )


def _values(tower: Tower) -> int:
    return 3 * tower.patch**2


def row_of(pieces: Sequence[Piece], tokens: int, patches: int, tower: Tower) -> dict[str, Any]:
    """Returns a row of a batch with these samples, one after the other, and padding.

    tokens, patches: S and P of the row. Each sample is a segment, counted from 1.
    Raises: ValueError when they do not fit.
    """
    lengths = [len(p.tokens) for p in pieces]
    counts = [len(p.patches) for p in pieces]
    if sum(lengths) > tokens or sum(counts) > patches:
        raise ValueError(
            f"{sum(lengths)} tokens and {sum(counts)} patches do not fit {tokens} and {patches}"
        )

    def joined(name: str, size: int, fill: int, shape: tuple[int, ...] = ()) -> np.ndarray:
        array = np.full((size, *shape), fill, np.uint8 if name == "patches" else np.int32)
        at = 0
        for values in (getattr(p, name) for p in pieces):
            array[at : at + len(values)] = values
            at += len(values)
        return array

    row = {
        "tokens": joined("tokens", tokens, 0),
        "targets": joined("targets", tokens, IGNORED),
        "segments": np.full(tokens, -1, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "places": joined("places", tokens, -1),
        "rotary": joined("rotary", tokens, 0, (3,)),
        "patches": joined("patches", patches, 0, (_values(tower),)),
        "patch_places": joined("patch_places", patches, 0, (2,)),
        "images": joined("images", patches, -1),
    }
    at = first = image = 0
    for number, (p, length, count) in enumerate(zip(pieces, lengths, counts, strict=True), 1):
        tokens_at, patches_at = slice(at, at + length), slice(first, first + count)
        row["segments"][tokens_at] = number
        row["positions"][tokens_at] = np.arange(length)
        row["places"][tokens_at] += np.where(p.places >= 0, first // tower.merge**2, 0)
        row["images"][patches_at] += image
        at, first, image = at + length, first + count, image + len({*p.images.tolist()})
    return row


def collate(samples: Sequence[Mapping[str, Any]], cfg: Any) -> dict[str, np.ndarray]:
    """Returns a batch of a vision-language model, NumPy, a row for each sample, padded to the
    longest.

    Args:
      samples: each with tokens, ids with one cfg.image_token for each image; images, a list of
        uint8 (H, W, 3); and perhaps targets, what each token predicts, IGNORED (-1) for nothing
        (without: the next token, unless that is a placeholder). Ids are below cfg.vocab.
      cfg: VlmConfig.
    Returns: tokens, targets, segments (-1: padding), positions, places (B, S) int32; rotary
      (B, S, 3) int32; patches (B, P, C) uint8; patch_places (B, P, 2), images (B, P) int32.
      P is a power of two of merged patches, so that few programs are compiled, and tensor ranks
      divide it.
    Raises: ValueError that names the row, from 0, for what is no such sample, where placeholders
      and images are not equally many, or an image cannot be used.
    """
    pieces, tower = [], cfg.tower
    for number, sample in enumerate(samples):
        try:
            if not isinstance(sample, Mapping) or "tokens" not in sample:
                raise ValueError("a sample needs the member tokens")
            tokens = _ids(sample["tokens"], "tokens", 0, cfg.vocab)
            targets = sample.get("targets")
            if targets is not None:
                targets = _ids(targets, "targets", IGNORED, cfg.vocab)
            images = sample.get("images")
            images = [fitted(image, tower) for image in (() if images is None else images)]
            pieces.append(piece(tokens, images, cfg, targets))
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {number}: {error}") from None
    tokens = max((len(p.tokens) for p in pieces), default=0)
    patches, most = tower.merge**2, max((len(p.patches) for p in pieces), default=0)
    while patches < most:
        patches *= 2
    rows = [row_of([p], tokens, patches, tower) for p in pieces]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def _ids(values: Any, name: str, least: int, vocab: int) -> np.ndarray:
    """Returns what a sample gives as ids, int32 (n,). Raises: ValueError for anything else."""
    ids = np.asarray(values)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a list of one or more whole numbers, not {ids.dtype} {ids.shape}"
        )
    if ids.min() < least or ids.max() >= vocab:
        wrong = ids[(ids < least) | (ids >= vocab)][0]
        raise ValueError(f"{name} must be in {least}..{vocab - 1}, not {wrong} (model.vocab)")
    return ids.astype(np.int32)
