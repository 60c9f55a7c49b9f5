"""Small pictures with alpha that are painted through matrices, with the owner of each pixel.

A Sprite is made once, at several resolutions, and quantized to 8 bits. A Canvas paints it in the
window that its matrix covers. The edge of a sprite is blended with the background and never with
another owner's sprite, so that the pixels of an owner are exactly those that change without it.

The arithmetic on pixels is float32 addition, multiplication, division and square root, which give
the same bits on every machine; there are no matrix products. butterflies.py draws with these.

Legend: H rows of pixels, W columns, C channels.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

UNIT = 56  # (chosen) pixels of a unit in the finest level of a sprite
FAINT = 0.3  # (chosen) alpha below which a pixel at the edge of a sprite with an owner is not drawn

Color = tuple[float, float, float]
Row = tuple[float, float, float]
Matrix = tuple[Row, Row, Row]


@dataclasses.dataclass(frozen=True)
class Sprite:
    """A picture with alpha, premultiplied, and the rectangle of its plane that it covers.

    levels: float32 (H + 2, W + 2, 4), each of half the resolution of the one before, with a border
    of transparent pixels. box: x0, y0, x1, y1 in the units of the plane.
    """

    levels: tuple[np.ndarray, ...]
    box: tuple[float, float, float, float]

    @classmethod
    def paint(
        cls,
        box: tuple[float, float, float, float],
        color: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    ) -> "Sprite":
        """Makes a sprite. color: from x and y (H, W) to RGB (H, W, 3) and alpha (H, W), 0 to 1."""
        x0, y0, x1, y1 = box
        width, height = (int(8 * math.ceil((b - a) * UNIT / 8)) for a, b in ((x0, x1), (y0, y1)))
        x = x0 + (np.arange(2 * width) + 0.5) * ((x1 - x0) / (2 * width))
        y = y0 + (np.arange(2 * height) + 0.5) * ((y1 - y0) / (2 * height))
        rgb, alpha = color(*np.meshgrid(x, y))
        # The trigonometry behind these numbers differs by a bit between machines; 8 bits do not,
        # save where a number lies on a limit between two of them. Round colors do, hence 0.503.
        pixels = np.concatenate([rgb * alpha[..., None], alpha[..., None]], -1)
        pixels = np.floor(255 * np.clip(halve(pixels), 0, 1) + 0.503)
        pixels = pixels.astype(np.float32) / np.float32(255)
        levels = []
        while min(pixels.shape[:2]) >= 4:
            levels.append(np.pad(pixels, ((1, 1), (1, 1), (0, 0))))
            pixels = halve(pixels)
        return cls(tuple(levels), box)


def halve(pixels: np.ndarray) -> np.ndarray:
    """Returns a picture of half the resolution; an odd last row or column is left out."""
    height, width = pixels.shape[0] // 2 * 2, pixels.shape[1] // 2 * 2
    p = pixels[:height, :width]
    p = p[0::2] + p[1::2]
    return (p[:, 0::2] + p[:, 1::2]) * p.dtype.type(0.25)


def _inverse(m: Matrix) -> Matrix:
    """Returns the inverse of a matrix up to a factor, which homogeneous coordinates ignore."""
    (a, b, c), (d, e, f), (g, h, i) = m
    return (
        (e * i - f * h, c * h - b * i, b * f - c * e),
        (f * g - d * i, a * i - c * g, c * d - a * f),
        (d * h - e * g, b * g - a * h, a * e - b * d),
    )


class Canvas:
    """A picture that is being painted, with the owner of each pixel.

    rgb_HWC: float32, 0 to 255; None: only owners are painted. owner_HW: int16, 0 the background,
    k + 1 insect k, -1 what covers insects.
    """

    def __init__(self, rgb_HWC: np.ndarray | None, side: int):
        """Starts with a background, which is painted over, or with its side alone."""
        self.rgb_HWC = rgb_HWC
        self.ground_HWC: np.ndarray | None = None  # the picture before the first owner
        self.owner_HW = np.zeros((side, side), np.int16)

    def paint(self, sprite: Sprite, matrix: Matrix, gain: Color, owner: int = 0) -> None:
        """Paints a sprite. matrix: from its plane to pixels. gain: factors of its colors."""
        x0, y0, x1, y1 = sprite.box
        side = self.owner_HW.shape[0]
        corners = []
        for x, y in ((x0, y0), (x1, y0), (x0, y1), (x1, y1)):
            px, py, pw = (row[0] * x + row[1] * y + row[2] for row in matrix)
            corners.append((px / pw, py / pw))
        left, right = (f(c[0] for c in corners) for f in (min, max))
        top, bottom = (f(c[1] for c in corners) for f in (min, max))
        left, top = max(math.floor(left), 0), max(math.floor(top), 0)
        right, bottom = min(math.ceil(right), side), min(math.ceil(bottom), side)
        if right <= left or bottom <= top:
            return
        window = (slice(top, bottom), slice(left, right))
        rgba_HWC = _sample(sprite, matrix, left, top, right, bottom)
        alpha_HW = rgba_HWC[..., 3]  # a view
        if owner:
            rgba_HWC *= (alpha_HW >= np.float32(FAINT))[..., None]
            drawn_HW, owners_HW = alpha_HW > 0, self.owner_HW[window]
            if self.rgb_HWC is not None:
                if self.ground_HWC is None:
                    self.ground_HWC = self.rgb_HWC.copy()
                hides_HW = drawn_HW & (owners_HW != 0) & (owners_HW != owner)
                if hides_HW.any():
                    self.rgb_HWC[window][hides_HW] = self.ground_HWC[window][hides_HW]
            owners_HW[drawn_HW] = owner
        if self.rgb_HWC is not None:
            color_HWC = rgba_HWC[..., :3] * (np.asarray(gain, np.float32) * np.float32(255))
            self.rgb_HWC[window] *= (np.float32(1) - alpha_HW)[..., None]
            self.rgb_HWC[window] += color_HWC


def _sample(sprite: Sprite, matrix: Matrix, x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    """Returns a sprite as the pixels of a window show it: float32 (H, W, 4)."""
    bx0, by0, bx1, by1 = sprite.box
    # The level whose pixels are about as large as the window's, in the direction of more pixels.
    (a, b, c), (d, e, f), (g, h, _) = matrix
    scale = math.sqrt(max((a - c * g) ** 2 + (d - f * g) ** 2, (b - c * h) ** 2 + (e - f * h) ** 2))
    level = sprite.levels[0]
    for finer, coarser in zip(sprite.levels, sprite.levels[1:], strict=False):
        level = finer
        if (coarser.shape[1] - 2) / (bx1 - bx0) < 0.85 * scale:
            break
        level = coarser
    height, width = level.shape[0] - 2, level.shape[1] - 2
    su, sv = width / (bx1 - bx0), height / (by1 - by0)
    n = _inverse(matrix)
    # From pixels of the window to pixels of the level: rows of u, v and the divisor.
    rows = (
        [su * (p - bx0 * w) + 0.5 * w for p, w in zip(n[0], n[2], strict=True)],
        [sv * (p - by0 * w) + 0.5 * w for p, w in zip(n[1], n[2], strict=True)],
        n[2],
    )
    x = np.arange(x0, x1, dtype=np.float32) + np.float32(0.5)
    y = (np.arange(y0, y1, dtype=np.float32) + np.float32(0.5))[:, None]
    u, v, w = (np.float32(p) * x + (np.float32(q) * y + np.float32(r)) for p, q, r in rows)
    u = np.clip(u / w, np.float32(0), np.float32(width + 0.99))
    v = np.clip(v / w, np.float32(0), np.float32(height + 0.99))
    iu, iv = u.astype(np.int32), v.astype(np.int32)
    fu, fv = (u - iu)[..., None], (v - iv)[..., None]
    flat = level.reshape(-1, 4)
    at = iv * np.int32(width + 2) + iu
    upper = flat.take(at, axis=0)
    upper += (flat.take(at + 1, axis=0) - upper) * fu
    at += np.int32(width + 2)
    lower = flat.take(at, axis=0)
    lower += (flat.take(at + 1, axis=0) - lower) * fu
    upper += (lower - upper) * fv
    return upper


def flat_matrix(x: float, y: float, angle: float, length: float, width: float) -> Matrix:
    """Returns the matrix of a flat sprite. length, width: pixels of a unit along y and x."""
    c, s = math.cos(angle), math.sin(angle)
    return ((c * width, -s * length, x), (s * width, c * length, y), (0.0, 0.0, 1.0))
