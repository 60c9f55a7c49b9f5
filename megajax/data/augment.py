"""Nine augmentations of an image with boxes: flips, rotations, noise, blur, contrast.

Each is a function (image, boxes, rng) -> (image, boxes): image (H, W, 3) float32 from 0 to 1, boxes
(N, 4) x0, y0, x1, y1 in pixels, exclusive. All randomness comes from the generator, and every box
stays in its place of the array. Augmentations whose names have `flip` or `rot` move pixels; the
others return the boxes as they came.

Legend: H rows and W columns of an image, N boxes, P pixels of a box or around it.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from PIL import Image
from scipy import ndimage

Augmentation = Callable[
    [np.ndarray, np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]
]
ANGLE = math.radians(10.0)  # (chosen) the largest small rotation
SHIFT = 0.25  # (chosen) of the shorter side, which the end of a long image moves by at most
NOISE = 0.06  # (chosen) standard deviation of the strongest noise
BLUR = 0.3, 1.5  # (chosen) pixels
GAMMA, GAIN = 1.5, 1.3  # (chosen) the largest exponent and factor, or one over them
RING = 3  # (chosen) pixels around a box that show its background
REACH = 0.05  # (chosen) of half a side, which an object may seem to miss
FAR = 4.0, 0.04  # (chosen) median deviations, and levels, from the background of what is no part


def _hflip(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    W = image.shape[1]
    x0, y0, x1, y1 = boxes.T
    return image[:, ::-1], np.stack([W - x1, y0, W - x0, y1], 1).astype(boxes.dtype)


def _vflip(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    H = image.shape[0]
    x0, y0, x1, y1 = boxes.T
    return image[::-1], np.stack([x0, H - y1, x1, H - y0], 1).astype(boxes.dtype)


def _rot90(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Turns counter-clockwise, as np.rot90 does."""
    W = image.shape[1]
    x0, y0, x1, y1 = boxes.T
    return np.rot90(image), np.stack([y0, W - x1, y1, W - x0], 1).astype(boxes.dtype)


def _rot180(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    return _vflip(*_hflip(image, boxes, rng), rng)


def _rot270(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    return _rot90(*_rot180(image, boxes, rng), rng)


# ---- a small rotation
#
# The image is rotated around its centre and made smaller, so that all of it stays inside: no object
# loses a part, and no box leaves the image. What is left over gets the image's mean color.
#
# The rectangle around a rotated box is too large for an object that leaves the corners of its box
# empty: for a disk of 40 pixels, 10 degrees make it 46 pixels. So the pixels of a box that are not
# like those around it are rotated, and the new box lies around them. Where these pixels do not
# reach all four sides of the box, the surroundings hide a part of the object; the new box is then
# at least as large as for an ellipse that fills the old one. It is never smaller than for the
# middles of the four sides, nor larger than for the full box.


def _rot_small(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    H, W = image.shape[:2]
    short, long = sorted((H, W))
    most = min(ANGLE, math.asin(min(2 * SHIFT * short / long, 1.0)))
    angle = rng.uniform(-most, most)
    cos, sin = math.cos(angle), math.sin(angle)
    scale = 1 / (cos + abs(sin) * long / short)  # the longer side decides
    # Places relative to the centre: new = scale * rotate(old), with y downwards.
    rotate = scale * np.array([[cos, sin], [-sin, cos]])
    back = np.linalg.inv(rotate)
    centre = np.array([W / 2, H / 2])
    shift = centre - back @ centre
    data = (*back[0], shift[0], *back[1], shift[1])
    mean = image.mean((0, 1), dtype=np.float64)
    planes = [
        np.asarray(
            Image.fromarray(np.ascontiguousarray(image[..., c], np.float32)).transform(
                (W, H),
                Image.Transform.AFFINE,
                data,
                Image.Resampling.BILINEAR,
                fillcolor=float(mean[c]),
            )
        )
        for c in range(3)
    ]
    moved = [_rotated_box(image, box, rotate, centre) for box in np.asarray(boxes, np.float64)]
    boxes_N4 = np.array(moved, boxes.dtype).reshape(-1, 4)
    return np.stack(planes, 2), boxes_N4


def _rotated_box(
    image: np.ndarray, box: np.ndarray, rotate: np.ndarray, centre: np.ndarray
) -> np.ndarray:
    """Returns the box of an object after a rotation around the centre of the image."""
    half = (box[2:] - box[:2]) / 2
    middle = rotate @ ((box[:2] + box[2:]) / 2 - centre) + centre
    rectangle = np.abs(rotate) @ half  # how far it reaches to each side
    least = np.hypot(*(rotate * half).T)  # an ellipse
    corners_P2 = _object_corners(image, box)
    if not len(corners_P2):
        return np.concatenate([middle - least, middle + least])
    missing = np.maximum(corners_P2.min(0) - box[:2], box[2:] - corners_P2.max(0))
    if (missing <= np.maximum(1, REACH * half)).all():
        least = np.abs(rotate * half).max(1)  # the middles of the four sides
    places_P2 = (corners_P2 - centre) @ rotate.T + centre - middle
    low = np.clip(places_P2.min(0), -rectangle, -least)
    high = np.clip(places_P2.max(0), least, rectangle)
    return np.concatenate([middle + low, middle + high])


def _object_corners(image: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Returns the corners (P, 2) of the pixels of a box that differ from those around it."""
    H, W = image.shape[:2]
    x0, y0 = np.floor(box[:2]).astype(int)
    x1, y1 = np.ceil(box[2:]).astype(int)
    left, top = max(x0 - RING, 0), max(y0 - RING, 0)
    region = image[top : min(y1 + RING, H), left : min(x1 + RING, W)]
    inside = np.zeros(region.shape[:2], bool)
    inside[y0 - top : y1 - top, x0 - left : x1 - left] = True
    around_P3 = region[~inside]
    if not len(around_P3) or not inside.any():
        return np.zeros((0, 2))
    usual = np.median(around_P3, 0)
    spread = np.median(np.abs(around_P3 - usual), 0)
    part = inside & (np.abs(region - usual) > FAR[0] * spread + FAR[1]).any(-1)
    rows, columns = np.nonzero(part)
    ends = [np.stack([columns + i, rows + j], 1) for i in (0, 1) for j in (0, 1)]
    return np.clip(np.concatenate(ends) + [left, top], box[:2], box[2:])


# ---- light


def _noise(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    noise = rng.standard_normal(image.shape, np.float32)
    noise *= np.float32(rng.uniform(0, NOISE))
    noise += image
    return np.clip(noise, 0, 1, out=noise), boxes


def _blur(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    sigma = rng.uniform(*BLUR)
    return ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest", truncate=3.0), boxes


def _contrast(
    image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Changes the brightness by an exponent and the contrast by a factor around the mean."""
    gamma, gain = (most ** rng.uniform(-1, 1) for most in (GAMMA, GAIN))
    bright = np.power(image, np.float32(gamma))
    mean = np.float32(bright.mean(dtype=np.float64))
    bright -= mean
    bright *= np.float32(gain)
    bright += mean
    return np.clip(bright, 0, 1, out=bright), boxes


AUGMENTATIONS: Mapping[str, Augmentation] = MappingProxyType(
    {
        "hflip": _hflip,
        "vflip": _vflip,
        "rot90": _rot90,
        "rot180": _rot180,
        "rot270": _rot270,
        "rot_small": _rot_small,
        "noise": _noise,
        "blur": _blur,
        "contrast": _contrast,
    }
)


def is_geometric(name: str) -> bool:
    """Tells whether an augmentation moves pixels, and boxes with them."""
    return "flip" in name or "rot" in name
