"""Images that strangers send, and what a vision-language model gets of them."""

import dataclasses
import io
import math
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from megajax.core.errors import UserError
from megajax.data import images
from megajax.data.images import decode, expanded, fit, patchify


@dataclasses.dataclass(frozen=True)
class Tower:
    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280


def picture(height: int = 40, width: int = 60, seed: int = 0) -> Image.Image:
    """A smooth image, so that JPEG hardly changes it."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def png(width: int, height: int, data: bytes, depth: int = 8, color: int = 2) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", head)
        + png_chunk(b"IDAT", data)
        + png_chunk(b"IEND", b"")
    )


def test_kinds_are_decoded():
    true = np.asarray(picture())
    assert (decode(saved(picture(), "PNG")) == true).all()
    assert (decode(saved(picture(), "WebP", lossless=True)) == true).all()
    near = decode(saved(picture(), "JPEG", quality=95)).astype(int) - true
    assert np.abs(near).mean() < 4
    assert decode(saved(picture(), "PNG")).flags.c_contiguous


def test_exif_turns_the_image():
    exif = Image.Exif()
    exif[images.ORIENTATION] = 6  # to be shown after a quarter turn clockwise
    for kind in ("PNG", "WebP"):
        data = saved(picture(), kind, exif=exif, **({"lossless": True} if kind == "WebP" else {}))
        assert (decode(data) == np.rot90(np.asarray(picture()), -1)).all()


def test_modes_become_rgb():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert (decode(saved(Image.fromarray(grey), "PNG")) == grey[:, :, None]).all()
    deep = grey.astype(np.uint16) << 8 | 7
    assert (decode(saved(Image.fromarray(deep), "PNG")) == grey[:, :, None]).all()
    for depth, data, clear, true in (
        (2, b"\0\x1b", 1, [0, 255, 170, 255]),  # samples 0 1 2 3, of which 1 is clear
        (4, b"\0\x01\x2f", 2, [0, 17, 255, 255]),
        (16, b"\0\x12\x34\x12\x35\x80\0\0\0", 0x1234, [255, 0x12, 128, 0]),
    ):
        file = png(4, 1, zlib.compress(data), depth, 0)
        clear_chunk = png_chunk(b"tRNS", struct.pack(">H", clear))
        assert decode(file[:33] + clear_chunk + file[33:])[0, :, 0].tolist() == true, depth
    file = png(1, 1, zlib.compress(bytes(7)), 16, 2)
    with pytest.raises(UserError, match="transparent colour of 16-bit"):
        decode(file[:33] + png_chunk(b"tRNS", bytes(6)) + file[33:])
    palette = picture().quantize(16)
    assert (decode(saved(palette, "PNG")) == np.asarray(palette.convert("RGB"))).all()
    clear = Image.new("RGBA", (6, 4), (200, 0, 0, 0))
    assert (decode(saved(clear, "PNG")) == 255).all()  # transparent shows white
    cmyk = decode(saved(picture().convert("CMYK"), "JPEG", quality=95))
    assert np.abs(cmyk.astype(int) - np.asarray(picture())).mean() < 6


def test_first_frame_of_several():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for kind, options in (("PNG", {}), ("WebP", {"lossless": True})):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (decode(data) == np.asarray(frames[0])).all(), kind


JPEG, PNG, WEBP = (saved(picture(), kind) for kind in ("JPEG", "PNG", "WebP"))
HOSTILE = {
    "empty": b"",
    "text": b"hello",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "gif": saved(picture(), "GIF"),
    "bmp": saved(picture(), "BMP"),
    "tiff": saved(picture(), "TIFF"),
    "zip": b"PK\3\4" + bytes(60),
    "jpeg_head": JPEG[:20],
    "jpeg_half": JPEG[: len(JPEG) // 2],
    "png_head": PNG[:30],
    "png_half": PNG[: len(PNG) // 2],
    "webp_half": WEBP[: len(WEBP) // 2],
    "png_of_jpeg": b"\x89PNG\r\n\x1a\n" + JPEG,
    "narrow": png(1, 60_000, zlib.compress(bytes(4 * 60_000))),
    "huge_header": png(100_000, 100_000, zlib.compress(bytes(2**20))),
    "sides": png(2**31 - 1, 2**31 - 1, b""),
    "no_side": png(0, 7, b""),
    "bomb": png(2**13, 2**12, zlib.compress(bytes((3 * 2**13 + 1) * 2**12), 9)),
    "short_rows": png(2000, 2000, zlib.compress(bytes(100))),
    "bad_zlib": png(20, 20, b"\0" * 50),
    "bad_depth": png(20, 20, zlib.compress(bytes(2000)), depth=7),
    "jpeg_12_bit": JPEG.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
    "webp_huge": b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0" + b"\xff" * 6 + bytes(12),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str):
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"^the image "):
            decode(HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_limit_of_pixels_is_the_callers():
    assert decode(PNG, max_pixels=2400).shape == (40, 60, 3)
    with pytest.raises(UserError, match=r"60 x 40 pixels; it may have 2,399"):
        decode(PNG, max_pixels=2399)


def smart_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The arithmetic of transformers, written down again from its documentation."""
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > most:
        b = math.sqrt((height * width) / most)
        return (
            max(factor, math.floor(height / b / factor) * factor),
            max(factor, math.floor(width / b / factor) * factor),
        )
    if h * w < least:
        b = math.sqrt(least / (height * width))
        return math.ceil(height * b / factor) * factor, math.ceil(width * b / factor) * factor
    return h, w


def test_fit_is_that_of_qwen2_vl():
    rng = np.random.default_rng(0)
    for height, width in (*rng.integers(20, 3000, (60, 2)).tolist(), (28, 980), (1, 200), (42, 42)):
        tower = Tower()
        size = fit((height, width), tower)
        assert size == smart_resize(height, width, 28, tower.min_pixels, tower.max_pixels)
        assert size[0] * size[1] <= tower.max_pixels and fit(size, tower) == size
    with pytest.raises(UserError, match="200 times"):
        fit((1, 201), Tower())


def test_patches_of_a_merged_patch_follow_each_other():
    image = np.random.default_rng(1).integers(0, 256, (24, 36, 3), np.uint8)
    tower = Tower(patch=3, merge=2, min_pixels=1)
    patches, places, grid = patchify(image, tower)
    assert grid == (4, 6) and patches.shape == (96, 27) and patches.dtype == np.uint8
    number = 0
    for block_row in range(4):  # Qwen2VLImageProcessor: block by block, then inside the block
        for block_column in range(6):
            for y in range(2):
                for x in range(2):
                    row, column = 2 * block_row + y, 2 * block_column + x
                    assert places[number].tolist() == [row, column]
                    part = image[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
                    assert (patches[number] == part.transpose(2, 0, 1).ravel()).all()
                    number += 1
    assert images.patch_count((24, 36), tower) == 96


def test_placeholders_become_as_many_as_there_are_merged_patches():
    tokens, targets, places = expanded(np.array([5, 9, 6, 9, 7]), [(1, 3), (2, 1)], 9)
    assert tokens.tolist() == [5, 9, 9, 9, 6, 9, 9, 7]
    assert places.tolist() == [-1, 0, 1, 2, -1, 3, 4, -1]
    assert targets.tolist() == [-1, -1, -1, 6, -1, -1, 7, -1]  # nothing predicts a placeholder
    _, targets, _ = expanded(np.array([5, 9, 6]), [(1, 2)], 9, np.array([-1, 40, 50]))
    assert targets.tolist() == [-1, -1, 40, 50]
    with pytest.raises(ValueError, match="2 placeholders of images .token 9. and 1 images"):
        expanded(np.array([9, 9]), [(1, 1)], 9)
    with pytest.raises(ValueError, match="2 targets for 3 tokens"):
        expanded(np.array([1, 2, 3]), [], 9, np.array([1, 2]))
