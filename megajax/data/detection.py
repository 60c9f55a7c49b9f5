"""Images with boxes around the objects in them: the folders that others annotated, as examples.

Legend: N boxes of an image, H rows and W columns of pixels, 4 numbers of a box: x0, y0, x1, y1 in
pixels. A box holds the pixels from x0 up to, but without, x1.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Example(abc.ABC):
    """An image with its boxes. A kind of data is a subclass that knows how to get the pixels.

    path: the name by which messages call the image. boxes: (N, 4) float32. labels: (N,) int32, the
    places of the boxes' classes in Dataset.classes. difficult: (N,) bool; such a box is neither
    right nor wrong to detect (VOC's difficult, COCO's iscrowd). size: (height, width) of the image,
    known without its pixels. domain: habitat, or specimen (one object, spread on a plain ground).
    """

    path: str
    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray
    size: tuple[int, int]
    domain: str = "habitat"

    @abc.abstractmethod
    def image(self) -> np.ndarray:
        """Returns the image, (H, W, 3) uint8, of `size`. Raises: UserError naming the file."""

    def key(self) -> int:
        """Returns 64 bits that depend on the image's content alone, equal for equal images."""
        pixels = np.ascontiguousarray(self.image())
        digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
        digest.update(pixels)
        return int.from_bytes(digest.digest())


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Examples with the names of their classes.

    problems: how many images, boxes or files have which problem; most of them were left out, and
    the name of a problem says so where they were not.
    """

    classes: tuple[str, ...]
    examples: Sequence[Example]
    problems: Mapping[str, int] = dataclasses.field(default_factory=dict)
