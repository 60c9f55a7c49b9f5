"""Images with boxes as rows of a batch: fitted to a canvas, augmented, padded.

Row i is a pure function of (seed, i) and of the canvas that its batch has: each epoch shows every
example once, or as often as `repeats` says, in an order of its own, with augmentations that follow
from the row's number.

Legend: G boxes of a row at most, H rows and W columns of a canvas.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging
from PIL import Image

from megajax.core.errors import UserError, did_you_mean
from megajax.data.augment import AUGMENTATIONS, is_geometric
from megajax.data.detection import Example, printable
from megajax.data.images import ImageError
from megajax.data.pack import IGNORED, mix, permute

NONE = np.zeros(0, np.int32)
TRANSPOSED = ("rot90", "rot270")  # augmentations that exchange height and width


class DetectionRows:
    """An endless sequence of rows on canvases (loader.py:ShapedRows).

    Each row has: images (H, W, 3) uint8, zero beyond the image at the top left; boxes (G, 4)
    float32; labels (G,) int32, -1 for no box; sizes (2,) int32, the image's height and width on the
    canvas; targets () int32, 0, or -1 for a row that counts nothing; row () int32, its number.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        canvases: Sequence[tuple[int, int]],
        max_boxes: int,
        seed: int | None,
        augmentations: Sequence[str] = (),
        enlarge: float = 1.0,
        cache_bytes: int = 2**30,
        repeats: np.ndarray | None = None,
    ):
        """Checks that the boxes of every example fit.

        Args:
          examples: not empty. Their difficult boxes are left out: they teach neither that something
            is there nor that nothing is.
          canvases: (height, width) of each shape.
          max_boxes: G.
          seed: of the order and of the augmentations. None: the examples once, in their order and
            as they are, and then rows that count nothing.
          augmentations: names of AUGMENTATIONS. A row gets one of the geometric ones or none, all
            equally likely, and one of the others or none.
          enlarge: how many times larger an image may become on a canvas.
          cache_bytes: of images that stay in memory, in the size that the canvases need.
          repeats: how often an epoch shows each example, int (as `repeats_of`); None: once.
        Raises: UserError.
        """
        unknown = [name for name in augmentations if name not in AUGMENTATIONS]
        if unknown:
            raise UserError(
                f"data.augment has {unknown[0]!r}; augmentations are {', '.join(AUGMENTATIONS)}."
                f"{did_you_mean(unknown[0], AUGMENTATIONS)} (--data.augment)"
            )
        if not examples:
            raise UserError("there is no image to learn from (--data.source)")
        counts = [int((~example.difficult).sum()) for example in examples]
        if max(counts) > max_boxes:
            worst = examples[int(np.argmax(counts))]
            more = sum(count > max_boxes for count in counts) - 1
            raise UserError(
                f"{printable(worst.path)} has {max(counts)} boxes and data.max_boxes={max_boxes}"
                f"{f', which {more} more images exceed' if more else ''}; set it to "
                f"{max(counts)} or more (--data.max_boxes)"
            )
        self.examples, self.canvases, self.max_boxes = examples, canvases, max_boxes
        self.seed, self.enlarge = seed, enlarge
        self._moving = [name for name in augmentations if is_geometric(name)]
        self._light = [name for name in augmentations if not is_geometric(name)]
        is_transposed = any(name in TRANSPOSED for name in augmentations)
        self._all_canvases = [*canvases, *(c[::-1] for c in canvases if is_transposed)]
        counts = np.ones(len(examples), int) if repeats is None else repeats
        self._numbers = np.repeat(np.arange(len(examples)), counts)
        self._cache = Cache(cache_bytes)
        self._damaged: set[int] = set()

    def row(self, i: int, shape: int) -> dict[str, np.ndarray]:
        """Returns row i on a canvas, given by its number.

        A damaged image becomes a row that counts nothing, and a warning names it once. Raises:
        UserError when an image cannot be read.
        """
        canvas, names = self.canvases[shape], []
        rng = np.random.default_rng(mix(self.seed or 0, i, "augmentations"))
        epoch, number = divmod(i, len(self._numbers))
        if self.seed is not None:
            number = permute(number, len(self._numbers), mix(self.seed, epoch, "images"))
            for group in (self._moving, self._light):
                if (choice := int(rng.integers(len(group) + 1))) < len(group):
                    names.append(group[choice])
        elif epoch:
            return self._padded(i, canvas)
        number = int(self._numbers[number])
        try:
            image, boxes = self._fitted(number, canvas, names, rng)
        except ImageError as error:
            if number not in self._damaged:
                self._damaged.add(number)
                logging.warning("An image is left out: %s", error)
            return self._padded(i, canvas)
        example = self.examples[number]
        return self._padded(i, canvas, image, boxes, example.labels[~example.difficult])

    def _fitted(
        self, number: int, canvas: tuple[int, int], names: list[str], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns an example, uint8, fitted to a canvas and augmented, with its boxes."""
        example = self.examples[number]
        is_transposed = any(name in TRANSPOSED for name in names)
        height, width = fit(example.size, canvas[::-1] if is_transposed else canvas, self.enlarge)
        image = resized(self._cache.get(number, lambda: self._pixels(example)), (height, width))
        scale = np.array([width, height, width, height]) / np.array([*example.size[::-1]] * 2)
        boxes = (example.boxes[~example.difficult] * scale).astype(np.float32)
        for name in names:
            exact = name != "rot_small" and is_geometric(name)  # moves pixels as they are
            if not exact and image.dtype == np.uint8:
                image = image.astype(np.float32) / np.float32(255)
            image, boxes = AUGMENTATIONS[name](image, boxes, rng)
        if image.dtype != np.uint8:
            image = np.clip(image * 255 + np.float32(0.5), 0, 255).astype(np.uint8)
        return image, boxes

    def _pixels(self, example: Example) -> np.ndarray:
        """Returns an example's image in the largest size that a canvas needs, if that is less."""
        fits = (fit(example.size, canvas, min(self.enlarge, 1.0)) for canvas in self._all_canvases)
        size = max(fits)
        return resized(example.reduced(size), size)

    def _padded(
        self,
        i: int,
        canvas: tuple[int, int],
        image: np.ndarray | None = None,
        boxes: np.ndarray = NONE,
        labels: np.ndarray = NONE,
    ) -> dict[str, np.ndarray]:
        """Returns the members of a row; without an image, of one that counts nothing."""
        images = np.zeros((*canvas, 3), np.uint8)
        # A loss may divide by the sides of an image, so that of no image has some too.
        height, width = canvas if image is None else image.shape[:2]
        if image is not None:
            images[:height, :width] = image
        boxes_G4 = np.zeros((self.max_boxes, 4), np.float32)
        labels_G = np.full(self.max_boxes, IGNORED, np.int32)
        if len(boxes):
            boxes_G4[: len(boxes)] = np.clip(boxes, 0, [width, height, width, height])
            labels_G[: len(labels)] = labels
        return {
            "images": images,
            "boxes": boxes_G4,
            "labels": labels_G,
            "sizes": np.array([height, width], np.int32),
            "targets": np.array(IGNORED if image is None else 0, np.int32),
            "row": np.array(i % 2**31, np.int32),
        }


def repeats_of(examples: Sequence[Example], threshold: float) -> np.ndarray:
    """Returns how often an epoch shows each example so that rare classes are seen more often.

    A class that a fraction f of the examples shows has the factor max(1, sqrt(threshold / f)), an
    example the largest factor of its classes (LVIS, arXiv 1908.03195, appendix "repeat factor
    sampling"). A fraction of a factor becomes one more or none, spread evenly over the examples.
    Difficult boxes do not count. threshold: 0: every example once. Returns: int (examples,).
    """
    shown = [np.unique(example.labels[~example.difficult]) for example in examples]
    counts = np.bincount(np.concatenate([*shown, NONE]).astype(int), minlength=1)
    factors = np.sqrt(threshold * len(examples) / np.maximum(counts, 1))
    each = np.array([max(1.0, *factors[labels]) if len(labels) else 1.0 for labels in shown])
    ends = np.floor(np.cumsum(each) + 1e-9).astype(int)
    return np.diff(ends, prepend=0)


def fit(size: tuple[int, int], canvas: tuple[int, int], enlarge: float) -> tuple[int, int]:
    """Returns (height, width) of an image on a canvas: its sides keep their proportion, but none
    becomes shorter than a pixel."""
    scale = min(canvas[0] / size[0], canvas[1] / size[1], enlarge)
    height, width = (max(round(side * scale), 1) for side in size)
    return min(height, canvas[0]), min(width, canvas[1])


def resized(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns a uint8 image in another size (height, width); one that shrinks is averaged."""
    if image.shape[:2] == size:
        return image
    picture = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(picture)


class Cache:
    """The arrays that were used last, up to a number of bytes; for several threads."""

    def __init__(self, most: int):
        """most: bytes."""
        self._most, self._bytes = most, 0
        self._arrays: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the array of a key, which make() returns when it is not there."""
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
                return self._arrays[key]
        array = make()
        with self._lock:
            if key not in self._arrays and array.nbytes <= self._most:
                self._arrays[key] = array
                self._bytes += array.nbytes
                while self._bytes > self._most:
                    self._bytes -= self._arrays.popitem(last=False)[1].nbytes
        return array
