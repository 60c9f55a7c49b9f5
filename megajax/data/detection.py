"""Images with boxes around the objects in them: the folders that others annotated, as examples.

A folder of a stranger is hostile until it is read. Nothing outside of it is opened, images are what
their headers say (images.py), and annotations are parsed within limits. What cannot be used is left
out and counted by the name of the problem: an image with all its boxes, or a box, while its image
stays. A box that reaches over the edge of its image is clipped.

Legend: N boxes of an image, B boxes of a folder, H rows and W columns of pixels, 4 numbers of a
box: x0, y0, x1, y1 in pixels. A box holds the pixels from x0 up to, but without, x1.
"""

import abc
import array
import concurrent.futures
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from megajax.core import config
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import (
    LinkError,
    OutsideError,
    expand,
    name_below,
    open_below,
    read_lists,
    size_of,
)
from megajax.data.images import Header, ImageError, read_header, read_pixels
from megajax.data.source import files_below

MAX_MEGAPIXELS = 100.0
TEXT = 4 * 2**20  # (chosen) bytes of an annotation file of one image, and of a data.yaml
DEPTH = 32  # (chosen) elements of XML inside one another
CLASSES = 25_000  # (chosen: ImageNet has 21,841) of a data.yaml
IMAGES, BOXES = 2**24, 2**26  # (chosen) of a folder: memory for each of them is some 500 bytes
VERIFIED = 100  # (chosen: a second or two) megapixels of a small folder, which are all decoded
READERS = 8  # (chosen) files whose headers are read at a time: a network disk takes its time
BLOCK, BLOCKS = 2**16, 16  # (chosen) bytes, and blocks of a large file that identify its content
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")

# The names of problems. What the first ones count is left out.
MISSING = "missing image"
CLOSED = "image that cannot be opened"
OUTSIDE = "image outside of the folder"
LINK = "symbolic link (--data.follow_links)"
NO_NAME = "image or class without id or name"
TWICE = "image whose id another image has"
UNREADABLE = "annotation file that cannot be read"
DOCTYPE = "annotation file with a DOCTYPE"
NO_NUMBERS = "box without four numbers"
NOT_FINITE = "box with infinite or undefined numbers"
EMPTY = "box without area"
BEYOND = "box outside of its image"
NO_CLASS = "box of an unknown class"
NO_IMAGE = "box of an unknown image"
REPEATED = "box that two annotation files have"
RESIZED = "image of another size than was annotated (read all the same)"


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

    def reduced(self, least: tuple[int, int]) -> np.ndarray:
        """Returns the image, or one of the same view that was quicker to read and has fewer pixels,
        but no side shorter than `least` (height, width) has it."""
        return self.image()

    def key(self) -> int:
        """Returns 64 bits that depend on the image's content alone, equal for equal images."""
        pixels = np.ascontiguousarray(self.image())
        return _digest(repr(pixels.shape).encode(), pixels)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Examples with the names of their classes.

    problems: how many images, boxes or files have which problem; they were left out, unless the
    name of the problem says that they were not. first: problem -> a sentence about its first case.
    """

    classes: tuple[str, ...]
    examples: Sequence[Example]
    problems: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def report(self) -> list[str]:
        """Returns a line for each problem, with how often it came and its first case."""
        return [
            f"{count:,} x {problem}" + (f"; first: {self.first[problem]}" if self.first else "")
            for problem, count in self.problems.items()
        ]

    def fingerprint(self) -> str:
        """Returns a hash of classes, names, sizes and boxes: it changes when the truths do."""
        digest = hashlib.sha256(repr(self.classes).encode(errors="surrogatepass"))
        for example in self.examples:
            facts = Path(example.path).name, example.size, example.domain
            digest.update(repr(facts).encode(errors="surrogatepass"))
            for values in (example.boxes, example.labels, example.difficult):
                digest.update(np.ascontiguousarray(values))
        return digest.hexdigest()[:16]


def split(examples: Sequence[Example], fraction: float) -> tuple[list[int], list[int]]:
    """Returns the numbers of the examples (to learn from, held out).

    The content of an image decides, not its name or place: equal images are on one side, and an
    image that is added moves no other. Where chance would leave a side empty, the image with the
    lowest or highest hash goes there.
    """
    if not fraction or not examples:
        return [*range(len(examples))], []
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        keys = [*pool.map(lambda example: example.key(), examples)]
    limit = int(fraction * 2**64)
    low, high = min(keys), max(keys)
    held = [low != high and (key < limit or key == low) and key != high for key in keys]
    return [i for i, h in enumerate(held) if not h], [i for i, h in enumerate(held) if h]


def open_detection(
    source: str, max_megapixels: float = MAX_MEGAPIXELS, follow_links: bool = False
) -> Dataset:
    """Returns the examples of a source.

    Args:
      source: one of these.
        coco:FOLDER annotations/*.json; images below images/, FOLDER, or a folder that is called as
          the end of the file's name (instances_train2017.json: train2017/ or images/train2017/).
        voc:FOLDER Annotations/*.xml; images in JPEGImages/.
        yolo:FOLDER data.yaml with `names`; images/ and labels/, or both inside of train/, val/, ...
        butterflies:NAME drawings, butterflies.py.
      max_megapixels: images with more pixels are left out without being decoded.
      follow_links: whether symbolic links are followed, wherever they lead. Other names that leave
        the folder are never opened.
    Raises: UserError when the folder is none, is of another kind, or has no class or usable image.
    """
    kind, _, name = source.partition(":")
    if kind == "butterflies":
        from megajax.data import butterflies  # here: it needs this module

        return butterflies.open_butterflies(name)
    if kind not in FORMATS or not name:
        known = [*FORMATS, "butterflies"]
        raise UserError(
            f"data.source={source} must be KIND:FOLDER with a KIND of {', '.join(known)}"
            f"{did_you_mean(kind, known)} (--data.source)"
        )
    folder = expand(name, "data.source")
    if not folder.is_dir():
        state = "no folder" if folder.exists() else "missing"
        raise UserError(f"data.source={source}: {folder} is {state} (--data.source)")
    format_ = FORMATS[kind]
    if not format_.has(folder):
        others = [f"{k}:{name}" for k, other in FORMATS.items() if other.has(folder)]
        raise UserError(
            f"data.source={source}: {folder} has no {format_.needs}"
            f"{f'; did you mean {others[0]}?' if others else ''} (--data.source)"
        )
    problems = Problems()
    listing = format_.read(folder, problems, follow_links)
    if not listing.classes:
        raise UserError(
            f"data.source={source}: {folder} has no class{problems.reasons()} (--data.source)"
        )
    examples = _examples(folder, listing, problems, max_megapixels, follow_links)
    if not examples:
        raise UserError(
            f"data.source={source}: {folder} has no usable image{problems.reasons()} "
            "(--data.source)"
        )
    return Dataset(tuple(listing.classes), examples, problems.counts, problems.first)


class Problems:
    """What was left out. counts: problem -> how often. first: problem -> its first case."""

    def __init__(self) -> None:
        """Starts with none."""
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, problem: str, message: str, count: int = 1) -> None:
        """Counts a problem. message: names what has it."""
        if count:
            self.counts[problem] = self.counts.get(problem, 0) + count
            self.first.setdefault(problem, message)

    def reasons(self) -> str:
        """Returns what to add to a message: the problems with their first cases, or nothing."""
        lines = [f"{n:,} x {name} ({self.first[name]})" for name, n in self.counts.items()]
        return f": {'; '.join(lines)}" if lines else ""


@dataclasses.dataclass
class Listing:
    """What the annotations of a folder say, before an image was looked at.

    classes: names. names: for each image the places, relative to the folder, where it may be; none
    when it is known that the image cannot be used. declared: for each image (height, width), or
    None. The others have an entry for each box: the number of its image (-1: none), its class (-1:
    unknown), whether it is difficult, the file that has it, and four numbers.
    relative: boxes are fractions of the sides of their images.
    """

    classes: list[str] = dataclasses.field(default_factory=list)
    names: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    declared: list[tuple[float, float] | None] = dataclasses.field(default_factory=list)
    image: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    label: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    difficult: array.array = dataclasses.field(default_factory=lambda: array.array("b"))
    file: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    numbers: array.array = dataclasses.field(default_factory=lambda: array.array("d"))
    relative: bool = False

    def add_image(self, names: tuple[str, ...], declared: tuple[float, float] | None = None) -> int:
        """Returns the number of a new image. Raises: UserError when there are too many."""
        if len(self.names) >= IMAGES:
            raise UserError(f"a folder may list {IMAGES:,} images (--data.source)")
        self.names.append(names)
        self.declared.append(declared)
        return len(self.names) - 1

    def add_box(
        self, image: int, label: int, numbers: Iterable[float], difficult: bool, file: int = 0
    ) -> None:
        """Adds a box of four numbers. Raises: UserError when there are too many."""
        if len(self.image) >= BOXES:
            raise UserError(f"a folder may have {BOXES:,} boxes (--data.source)")
        self.image.append(image)
        self.label.append(label)
        self.difficult.append(difficult)
        self.file.append(file)
        self.numbers.extend(numbers)

    def extend(self, other: "Listing") -> None:
        """Adds the boxes of another listing. Raises: UserError when there are too many."""
        if len(self.image) + len(other.image) > BOXES:
            raise UserError(f"a folder may have {BOXES:,} boxes (--data.source)")
        for name in ("image", "label", "difficult", "file", "numbers"):
            getattr(self, name).extend(getattr(other, name))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FileExample(Example):
    """An image file of a folder. name: relative to the folder. header: as the file had it when the
    folder was opened."""

    folder: Path
    name: str
    header: Header
    max_megapixels: float
    follow_links: bool

    def image(self) -> np.ndarray:
        """Returns the image. Raises: ImageError, which is a UserError, when the file is damaged or
        another one than before; UserError when it cannot be read."""
        return self._pixels(None)

    def reduced(self, least: tuple[int, int]) -> np.ndarray:
        """Returns the image, perhaps with fewer pixels but no side shorter than `least` has it."""
        return self._pixels(least)

    def key(self) -> int:
        """Returns 64 bits of the file's bytes: all of a small file, else 16 blocks of it, which
        differ between photographs even where their first and last rows are white."""
        try:
            with open_below(self.folder, self.name, self.follow_links) as file:
                size = size_of(file)
                if size <= BLOCK * BLOCKS:
                    return _digest(str(size).encode(), file.read(BLOCK * BLOCKS))
                blocks = []
                for i in range(BLOCKS):
                    file.seek((size - BLOCK) * i // (BLOCKS - 1))
                    blocks.append(file.read(BLOCK))
                return _digest(str(size).encode(), *blocks)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror} (--data.source)") from None

    def _pixels(self, least: tuple[int, int] | None) -> np.ndarray:
        shown = printable(self.path)
        try:
            with open_below(self.folder, self.name, self.follow_links) as file:
                header = read_header(file, shown, self.max_megapixels)
                if header.size != self.size:
                    raise UserError(f"{shown} has changed since the folder was opened")
                return read_pixels(file, header, shown, least)
        except OSError as error:
            raise UserError(f"cannot read {shown}: {error.strerror} (--data.source)") from None


def printable(name: str) -> str:
    """Returns a name as a message may show it: on one line, without control characters."""
    return name if name.isprintable() and len(name) <= 300 else f"{name!r:.300}"


def _digest(*parts: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest())


def _examples(
    folder: Path, listing: Listing, problems: Problems, max_megapixels: float, follow_links: bool
) -> list[FileExample]:
    """Returns the images that can be used, in the order of the listing, with their boxes."""

    def look(names: tuple[str, ...], pixels: bool = False) -> tuple[str, Header | str] | None:
        for name in names:
            if result := _look(folder, name, max_megapixels, follow_links, pixels):
                return result
        return (MISSING, f"{printable(names[0])} does not exist") if names else None

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        seen = [*pool.map(look, listing.names)]
    headers = [result[1] for result in seen if result and isinstance(result[1], Header)]
    is_small = sum(math.prod(header.size) for header in headers) <= VERIFIED * 1e6
    usable: dict[str, tuple[int, Header]] = {}  # a file that two lists name is one image
    number = np.full(len(seen) + 1, -1)
    for i, (result, declared) in enumerate(zip(seen, listing.declared, strict=True)):
        if result and isinstance(result[1], Header) and (is_small or not result[1].complete):
            result = look((result[0],), pixels=True)  # one at a time: it may take 2 GB
        if result is None:
            continue
        name, header = result
        if isinstance(header, str):
            problems.add(name, header)
            continue
        number[i], _ = usable.setdefault(name, (len(usable), header))
        if declared and header.size not in (declared, declared[::-1]):
            height, width = header.size
            problems.add(
                RESIZED,
                f"{printable(name)} has {width} x {height} pixels, and was annotated with "
                f"{declared[1]:g} x {declared[0]:g}",
            )
    image_B = number[np.asarray(listing.image, np.int64)]
    sizes = np.array([header.size for _, header in usable.values()], np.float64).reshape(-1, 2)
    where = [printable(name) for name in usable]
    chosen_B, boxes_B4 = _clean(listing, image_B, sizes, where, problems)
    order = chosen_B[np.argsort(image_B[chosen_B], kind="stable")]
    boxes_B4 = boxes_B4[order].astype(np.float32)
    labels_B = np.asarray(listing.label, np.int64)[order].astype(np.int32)
    difficult_B = np.asarray(listing.difficult, np.int8)[order].astype(bool)
    ends = np.searchsorted(image_B[order], np.arange(len(usable) + 1))
    return [
        FileExample(
            path=str(folder / name),
            boxes=boxes_B4[ends[i] : ends[i + 1]],
            labels=labels_B[ends[i] : ends[i + 1]],
            difficult=difficult_B[ends[i] : ends[i + 1]],
            size=header.size,
            folder=folder,
            name=name,
            header=header,
            max_megapixels=max_megapixels,
            follow_links=follow_links,
        )
        for name, (i, header) in usable.items()
    ]


def _look(
    folder: Path, name: str, max_megapixels: float, follow_links: bool, pixels: bool
) -> tuple[str, Header | str] | None:
    """Returns (name, header) of an image, (problem, message), or None when there is no such file.

    pixels: whether they must be readable too.
    """
    shown = printable(name)
    try:
        with open_below(folder, name, follow_links) as file:
            header = read_header(file, shown, max_megapixels)
            if pixels:
                read_pixels(file, header, shown)
            return name, header
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ImageError as error:
        return error.problem, str(error)
    except OutsideError as error:
        return LINK if isinstance(error, LinkError) else OUTSIDE, str(error)
    except UserError as error:
        return CLOSED, str(error)
    except OSError as error:
        return CLOSED, f"{shown}: {error.strerror}"


def _clean(
    listing: Listing,
    image_B: np.ndarray,
    sizes: np.ndarray,
    where: Sequence[str],
    problems: Problems,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the boxes that can be used, and all boxes, clipped to their images.

    image_B: the number of each box's image, -1 for one that is left out. sizes: of the images.
    """
    label_B = np.asarray(listing.label, np.int64)
    boxes_B4 = np.array(listing.numbers, np.float64).reshape(-1, 4)
    usable_B = image_B >= 0
    image_B = np.where(usable_B, image_B, 0)

    def leave(problem: str, which_B: np.ndarray) -> None:
        nonlocal usable_B
        which_B = which_B & usable_B
        if which_B.any():
            first = int(np.argmax(which_B))
            numbers = ", ".join(f"{v:g}" for v in listing.numbers[4 * first : 4 * first + 4])
            problems.add(problem, f"{numbers} of {where[image_B[first]]}", int(which_B.sum()))
            usable_B = usable_B & ~which_B

    leave(NO_CLASS, label_B < 0)
    leave(NOT_FINITE, ~np.isfinite(boxes_B4).all(1))
    boxes_B4[~usable_B] = 0
    if len(sizes):
        sides_B4 = sizes[image_B][:, [1, 0, 1, 0]]
        if listing.relative:
            boxes_B4 *= sides_B4
        leave(EMPTY, (boxes_B4[:, 2:] <= boxes_B4[:, :2]).any(1))
        boxes_B4 = np.clip(boxes_B4, 0, sides_B4)
        small_B4 = boxes_B4.astype(np.float32)
        leave(BEYOND, (small_B4[:, 2:] <= small_B4[:, :2]).any(1))
    file_B = np.asarray(listing.file, np.int64)
    if len(set(listing.file)) > 1:
        columns = [file_B, *boxes_B4.T, label_B, image_B, ~usable_B]
        order = np.lexsort(columns)
        facts = np.stack([np.asarray(c, np.float64)[order] for c in columns[1:]])
        again = (facts[:, 1:] == facts[:, :-1]).all(0) & (file_B[order][1:] != file_B[order][:-1])
        twice_B = np.zeros(len(file_B), bool)
        twice_B[order[1:][again]] = True
        leave(REPEATED, twice_B)
    return np.flatnonzero(usable_B), boxes_B4


# ---- formats


def _annotations(folder: Path, name: str, follow_links: bool, problems: Problems) -> bytes | None:
    """Returns a short annotation file; None, and counts the problem, when it cannot be read."""
    try:
        with open_below(folder, name, follow_links) as file:
            data = file.read(TEXT + 1)
    except LinkError as error:
        problems.add(LINK, str(error))
    except UserError as error:
        problems.add(UNREADABLE, str(error))
    except OSError as error:
        problems.add(UNREADABLE, f"{printable(name)}: {error.strerror}")
    else:
        if len(data) <= TEXT:
            return data
        problems.add(UNREADABLE, f"{printable(name)} has over {TEXT:,} bytes")
    return None


def _listed(folder: Path, below: str, follow_links: bool, problems: Problems) -> list[str]:
    """Returns the names, relative to the folder, of what lies below one of its folders, sorted."""
    root = folder / below
    if follow_links:
        paths = [*files_below(root)]
    else:
        paths = []
        if root.is_symlink():
            problems.add(LINK, f"{root} is a symbolic link")
            return []

        def closed(error: OSError) -> None:
            problems.add(CLOSED, f"{printable(str(error.filename))}: {error.strerror}")

        for at, folders, names in os.walk(root, onerror=closed):
            for name in folders:
                if (path := Path(at, name)).is_symlink():
                    problems.add(LINK, f"{printable(str(path))} is a symbolic link")
            paths += [Path(at, name) for name in names]
    visible = [path for path in paths if not path.name.startswith(".")]
    return sorted(str(path.relative_to(folder)) for path in visible)


def _below(name: Any, shown: str, problems: Problems) -> str | None:
    """Returns an image's name, written by a stranger; None, and counts it, when it is none."""
    try:
        if not isinstance(name, str):
            raise OutsideError(f"{name!r:.100} is not the name of a file")
        return name_below(name.replace("\\", "/"))  # written under Windows
    except OutsideError as error:
        problems.add(OUTSIDE, f"{error} ({shown})")
        return None


def _size(height: Any, width: Any) -> tuple[float, float] | None:
    """Returns the size that an annotation says, None when it says none."""
    try:
        size = float(height), float(width)
    except (TypeError, ValueError, OverflowError):
        return None
    return size if min(size) > 0 else None


def _class_name(name: Any) -> str:
    """Returns the name of a class. Raises: TypeError for lists, which aliases of YAML can make
    endless."""
    if not isinstance(name, str | int | float):
        raise TypeError(f"a class has a {type(name).__name__} as its name")
    return str(name).strip()


# COCO


def _read_coco(folder: Path, problems: Problems, follow_links: bool) -> Listing:
    listing = Listing()
    names = [n for n in _listed(folder, "annotations", follow_links, problems) if n[-5:] == ".json"]
    for number, name in enumerate(names):
        part = CocoFile()
        try:
            with open_below(folder, name, follow_links) as file:
                for member, element in read_lists(file, "segmentation"):
                    part.add(member, element)
        except LinkError as error:
            problems.add(LINK, str(error))
        except OSError as error:
            problems.add(UNREADABLE, f"{printable(name)}: {error.strerror}")
        except ValueError as error:
            problems.add(UNREADABLE, f"{printable(name)}: {error}")
        else:
            part.put(listing, number, name, problems)
    return listing


class CocoFile:
    """What one annotation file says. Its lists may come in any order, so ids are looked up last."""

    def __init__(self) -> None:
        """Starts empty."""
        self.images: dict[Any, tuple[Any, tuple[float, float] | None]] = {}
        self.classes: dict[Any, str] = {}
        self.image_ids: dict[Any, int] = {}  # id -> its number
        self.class_ids: dict[Any, int] = {}
        self.boxes = Listing()
        self.problems = Problems()

    def add(self, member: str, element: Any) -> None:
        """Takes an element of one of the lists."""
        add = {"annotations": self._box, "images": self._image, "categories": self._class}
        if member in add:
            add[member](element)

    def _box(self, element: Any) -> None:
        try:
            x, y, width, height = map(float, element["bbox"])
            image = self.image_ids.setdefault(element.get("image_id"), len(self.image_ids))
            label = self.class_ids.setdefault(element.get("category_id"), len(self.class_ids))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            self.problems.add(NO_NUMBERS, f"{element!r:.200}")
            return
        crowd = bool(element.get("iscrowd", 0))
        self.boxes.add_box(image, label, (x, y, x + width, y + height), crowd)

    def _image(self, element: Any) -> None:
        try:
            key, name = element["id"], element["file_name"]
            taken = key in self.images
        except (KeyError, TypeError):
            self.problems.add(NO_NAME, f"{element!r:.200}")
            return
        if taken:
            self.problems.add(TWICE, f"{element!r:.200}")
        elif len(self.images) >= IMAGES:
            raise UserError(f"a folder may list {IMAGES:,} images")
        else:
            self.images[key] = name, _size(element.get("height"), element.get("width"))

    def _class(self, element: Any) -> None:
        try:
            self.classes.setdefault(element["id"], _class_name(element["name"]))
        except (KeyError, TypeError):
            self.problems.add(NO_NAME, f"{element!r:.200}")

    def put(self, listing: Listing, number: int, file: str, problems: Problems) -> None:
        """Adds what the file says to what others said. number: of this file."""
        for problem, count in self.problems.counts.items():
            problems.add(problem, f"{self.problems.first[problem]} of {printable(file)}", count)
        part = Path(file).stem.rpartition("_")[2]  # train2017 of instances_train2017.json
        images = {}
        for key, (name, declared) in self.images.items():
            below = _below(name, file, problems)
            places = ("images/", f"images/{part}/", f"{part}/", "") if below else ()
            images[key] = listing.add_image(tuple(f"{p}{below}" for p in places), declared)
        numbers = {name: i for i, name in enumerate(listing.classes)}
        is_sorted = all(isinstance(key, int | float) for key in self.classes)
        for key in sorted(self.classes) if is_sorted else self.classes:
            numbers.setdefault(self.classes[key], len(numbers))
        listing.classes = list(numbers)
        # -1 at the end stands for what has no entry.
        image_of = np.array([images.get(key, -1) for key in self.image_ids] + [-1])
        label_of = np.array(
            [numbers[self.classes[k]] if k in self.classes else -1 for k in self.class_ids] + [-1]
        )
        image_B = image_of[np.asarray(self.boxes.image, np.int64)]
        label_B = label_of[np.asarray(self.boxes.label, np.int64)]
        problems.add(NO_IMAGE, f"{printable(file)}", int((image_B < 0).sum()))
        self.boxes.image = array.array("q", image_B.tobytes())
        self.boxes.label = array.array("q", label_B.tobytes())
        self.boxes.file = array.array("q", np.full_like(image_B, number).tobytes())
        listing.extend(self.boxes)


# VOC


def _read_voc(folder: Path, problems: Problems, follow_links: bool) -> Listing:
    listing, number_of = Listing(), {}
    files = _listed(folder, "Annotations", follow_links, problems)
    for file in (name for name in files if name[-4:] == ".xml"):
        data = _annotations(folder, file, follow_links, problems)
        if data is None:
            continue
        try:
            said = VocFile(data)
        except ValueError as error:
            problem = DOCTYPE if isinstance(error, DoctypeError) else UNREADABLE
            problems.add(problem, f"{printable(file)}: {error}")
            continue
        stem = Path(file).stem
        names = [f"{stem}{suffix}" for suffix in SUFFIXES]
        if (name := said.text("filename")) is not None:
            below = _below(name, file, problems)
            names = [below, *names] if below else []
        image = listing.add_image(
            tuple(f"JPEGImages/{name}" for name in names),
            _size(said.text("size/height"), said.text("size/width")),
        )
        for thing in said.objects:
            name = thing.get("name", "")
            try:
                x0, y0, x1, y1 = (float(thing[f"bndbox/{k}"]) for k in VOC_NUMBERS)
            except (KeyError, ValueError):
                problems.add(NO_NUMBERS, f"{name!r:.100} in {printable(file)}")
                continue
            label = number_of.setdefault(name, len(number_of)) if name else -1
            difficult = thing.get("difficult", "0") not in ("0", "")
            listing.add_box(image, label, (x0 - 1, y0 - 1, x1, y1), difficult)
    listing.classes = sorted(number_of)
    place = np.argsort(np.argsort(list(number_of))) if number_of else np.zeros(0, int)
    label_B = np.asarray(listing.label, np.int64)
    known_B = label_B >= 0
    label_B[known_B] = place[label_B[known_B]]
    listing.label = array.array("q", label_B.tobytes())
    return listing


VOC_NUMBERS = ("xmin", "ymin", "xmax", "ymax")  # 1-based, and the last pixel is inside


class DoctypeError(ValueError):
    """XML that defines entities, or could: a few lines of it can become gigabytes."""


class VocFile:
    """What an XML file says, within the limits of DEPTH and of the parser's own encodings.

    objects: the texts of each object by their places in it, such as bndbox/xmin; those of parts of
    objects (a head, a hand) have other places.
    """

    def __init__(self, data: bytes):
        """Raises: ValueError when it is no XML, or nested too deep; DoctypeError."""
        self.objects: list[dict[str, str]] = []
        self._texts: dict[str, str] = {}
        self._places: list[str] = []
        self._letters: list[str] = []
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._refuse
        parser.StartElementHandler = self._begin
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._letters.append
        try:
            parser.Parse(data, True)
        except (expat.ExpatError, LookupError) as error:  # LookupError: an unknown encoding
            raise ValueError(f"it is no XML: {error}") from None

    def text(self, place: str) -> str | None:
        """Returns the text of an element outside of objects; None where it is missing or empty."""
        return self._texts.get(place) or None

    def _refuse(self, *_: Any) -> None:
        raise DoctypeError("it has a DOCTYPE, which is not read")

    def _begin(self, name: str, _: Any) -> None:
        self._places.append(name)
        if len(self._places) > DEPTH:
            raise ValueError(f"it has over {DEPTH} elements inside one another")
        if self._places[1:] == ["object"]:
            self.objects.append({})
        self._letters.clear()

    def _end(self, name: str) -> None:
        text = "".join(self._letters).strip()
        self._letters.clear()
        _, *place = self._places
        if place[:1] == ["object"]:
            self.objects[-1].setdefault("/".join(place[1:]), text)
        else:
            self._texts.setdefault("/".join(place), text)
        self._places.pop()


# YOLO


def _read_yolo(folder: Path, problems: Problems, follow_links: bool) -> Listing:
    listing = Listing(relative=True)
    numbers = _yolo_names(folder, follow_links, problems)
    listing.classes = list(dict.fromkeys(numbers.values()))
    place = {number: listing.classes.index(name) for number, name in numbers.items()}
    tops = ["images"]
    if not (folder / "images").is_dir():
        tops = sorted(f"{p.parent.name}/images" for p in folder.glob("*/images"))
    for name in (n for top in tops for n in _listed(folder, top, follow_links, problems)):
        parts = Path(name).with_suffix(".txt").parts
        at = tops[0].count("/") if tops else 0
        label = "/".join((*parts[:at], "labels", *parts[at + 1 :]))
        if not os.path.lexists(folder / label):  # an image without objects
            listing.add_image((name,))
            continue
        data = _annotations(folder, label, follow_links, problems)
        image = listing.add_image((name,) if data is not None else ())
        for line in (data or b"").decode(errors="replace").splitlines():
            if not (words := line.split()):
                continue
            try:
                number, *values = map(float, words)
                box = _yolo_box(values)
            except ValueError:
                problems.add(NO_NUMBERS, f"{line!r:.100} in {printable(label)}")
                continue
            listing.add_box(image, place.get(number, -1), box, False)
    return listing


def _yolo_box(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Returns the box of a centre, width and height, or around the corners of an outline."""
    if len(values) == 4:
        x, y, width, height = values
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if len(values) < 6 or len(values) % 2 or not all(map(math.isfinite, values)):
        raise ValueError("neither a box nor an outline")
    return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])


def _yolo_names(folder: Path, follow_links: bool, problems: Problems) -> dict[float, str]:
    """Returns {number: name} of the classes."""
    data = _annotations(folder, "data.yaml", follow_links, problems)
    try:
        said = config.parse((data or b"").decode(), ".yaml", 2 * CLASSES).get("names")
        pairs = said.items() if isinstance(said, Mapping) else enumerate(said or ())
        return {float(number): _class_name(name) for number, name in pairs}
    except (ValueError, TypeError, OverflowError) as error:
        problems.add(UNREADABLE, f"data.yaml: {error}")
        return {}


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of folder. needs: what it must have, for messages. has(folder): whether it does."""

    needs: str
    has: Callable[[Path], bool]
    read: Callable[[Path, Problems, bool], Listing]


FORMATS = {
    "coco": Format(
        "annotations/*.json", lambda f: any((f / "annotations").glob("*.json")), _read_coco
    ),
    "voc": Format("Annotations/*.xml", lambda f: any((f / "Annotations").glob("*.xml")), _read_voc),
    "yolo": Format("data.yaml", lambda f: (f / "data.yaml").is_file(), _read_yolo),
}
