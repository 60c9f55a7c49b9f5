"""Rows of images: the canvas, the order, the augmentations, and what may go wrong."""

import logging

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data import detection_rows
from megajax.data.augment import AUGMENTATIONS
from megajax.data.detection import Example
from megajax.data.detection_rows import DetectionRows, fit, repeats_of
from megajax.data.images import ImageError


class Drawn(Example):
    """An image of memory, which counts how often it is read."""

    def __init__(self, image, boxes=(), labels=(), difficult=(), name="a.png", fault=None):
        boxes = np.array(boxes, np.float32).reshape(-1, 4)
        super().__init__(
            path=name,
            boxes=boxes,
            labels=np.array(labels, np.int32),
            difficult=np.array(difficult or [False] * len(boxes), bool),
            size=image.shape[:2],
        )
        object.__setattr__(self, "pixels", image)
        object.__setattr__(self, "reads", [])
        object.__setattr__(self, "fault", fault)

    def image(self):
        self.reads.append(1)
        if self.fault:
            raise self.fault
        return self.pixels


def square(height: int, width: int, box: tuple, level: int = 255) -> Drawn:
    image = np.full((height, width, 3), 20, np.uint8)
    x0, y0, x1, y1 = box
    image[y0:y1, x0:x1] = level
    return Drawn(image, [box], [level % 7])


def counted(row: dict) -> list[int]:
    rows, columns = np.nonzero(row["images"].min(2) > 137)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_members_of_a_row():
    rows = DetectionRows([square(40, 60, (10, 10, 30, 20))], [(64, 64), (30, 90)], 3, 0)
    row = rows.row(5, 0)
    assert {k: (v.shape, v.dtype) for k, v in row.items()} == {
        "images": ((64, 64, 3), np.uint8),
        "boxes": ((3, 4), np.float32),
        "labels": ((3,), np.int32),
        "sizes": ((2,), np.int32),
        "targets": ((), np.int32),
        "row": ((), np.int32),
    }
    assert row["row"] == 5 and row["targets"] == 0 and row["sizes"].tolist() == [40, 60]
    assert row["labels"].tolist() == [255 % 7, -1, -1]
    assert row["boxes"].tolist() == [[10, 10, 30, 20], [0] * 4, [0] * 4]
    assert not row["images"][40:].any() and not row["images"][:, 60:].any()
    assert counted(row) == [10, 10, 30, 20]
    small = rows.row(5, 1)
    assert small["images"].shape == (30, 90, 3) and small["sizes"].tolist() == [30, 45]
    assert small["boxes"][0].tolist() == [7.5, 7.5, 22.5, 15]
    assert np.abs(counted(small) - small["boxes"][0]).max() <= 1


def test_images_are_fitted_without_losing_their_proportion():
    assert fit((40, 60), (64, 64), 1.0) == (40, 60)
    assert fit((40, 60), (64, 64), 9.0) == (43, 64)
    assert fit((400, 600), (64, 64), 1.0) == (43, 64)
    assert fit((10, 8000), (512, 512), 1.0) == (1, 512)
    assert fit((1, 1), (512, 512), 1.0) == (1, 1)
    assert fit((1, 1), (512, 400), 1e9) == (400, 400)
    large = DetectionRows([square(20, 30, (10, 10, 20, 20))], [(80, 80)], 3, 0, enlarge=2.0)
    row = large.row(0, 0)
    assert row["sizes"].tolist() == [40, 60] and row["boxes"][0].tolist() == [20, 20, 40, 40]
    assert np.abs(counted(row) - row["boxes"][0]).max() <= 1


def test_an_image_that_shrinks_is_averaged():
    """A fine pattern becomes grey; taking every tenth pixel would give black or white."""
    pattern = np.indices((200, 200)).sum(0) % 2 * 255
    image = np.repeat(pattern[..., None], 3, 2).astype(np.uint8)
    row = DetectionRows([Drawn(image)], [(20, 20)], 1, 0).row(0, 0)
    assert 120 < row["images"].min() and row["images"].max() < 135
    assert row["labels"].tolist() == [-1] and row["targets"] == 0


@pytest.mark.parametrize("canvases", [[(90, 90)], [(60, 100), (100, 60)], [(33, 47)]])
def test_boxes_lie_around_their_pixels_after_each_augmentation(canvases):
    examples = [square(70, 110, (20, 30, 60, 50)), square(110, 50, (5, 60, 40, 105))]
    for name in AUGMENTATIONS:
        rows = DetectionRows(examples, canvases, 2, 0, [name])
        for i in range(12):
            shape = i % len(canvases)
            row = rows.row(i, shape)
            high, wide = row["sizes"]
            assert high <= canvases[shape][0] and wide <= canvases[shape][1]
            assert np.abs(counted(row) - row["boxes"][0]).max() <= 1.5
            assert not row["images"][high:].any() and not row["images"][:, wide:].any()


def test_a_row_follows_from_its_number_alone():
    """Whatever was read before, in which order, and with which cache."""
    examples = [square(40, 60, (i, i, 30, 30), 150 + i) for i in range(7)]
    names = [*AUGMENTATIONS]

    def rows(**options):
        return DetectionRows(examples, [(64, 64), (48, 48)], 2, 3, names, **options)

    first = rows()
    expected = [first.row(i, i % 2) for i in range(30)]
    other = rows(cache_bytes=0)
    for i in reversed(range(30)):
        again = other.row(i, i % 2)
        assert all(np.array_equal(again[k], expected[i][k]) for k in again)
    moved = DetectionRows(examples, [(64, 64), (48, 48)], 2, 4, names)
    assert any(
        not np.array_equal(moved.row(i, 0)["images"], first.row(i, 0)["images"]) for i in (1, 2)
    )


def test_each_epoch_has_every_example_once_in_an_order_of_its_own():
    examples = [square(8, 8, (0, 0, 8, 8), 100 + i) for i in range(20)]
    rows = DetectionRows(examples, [(8, 8)], 1, 0)
    epochs = [
        [int(rows.row(20 * e + i, 0)["images"][0, 0, 0]) for i in range(20)] for e in range(3)
    ]
    assert all(sorted(epoch) == [*range(100, 120)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_all_augmentations_come_and_so_do_plain_rows():
    """One geometric and one other at most: 7 x 4 combinations, of which each is as likely."""
    example = square(64, 64, (5, 20, 30, 30))
    rows = DetectionRows([example], [(64, 64)], 1, 0, [*AUGMENTATIONS])
    plain = sum(np.array_equal(rows.row(i, 0)["images"], example.pixels) for i in range(280))
    assert 2 <= plain <= 25  # 10 expected
    boxes = {tuple(np.round(rows.row(i, 0)["boxes"][0])) for i in range(100)}
    right_angles = [(5, 20, 30, 30), (34, 20, 59, 30), (5, 34, 30, 44), (34, 34, 59, 44)]
    assert boxes >= {*right_angles, (20, 34, 30, 59), (34, 5, 44, 30)} and len(boxes) > 8


def test_without_a_seed_the_examples_come_once_and_as_they_are():
    examples = [square(8, 8, (0, 0, 8, 8), 100 + i) for i in range(3)]
    rows = DetectionRows(examples, [(8, 8)], 1, None, ["hflip", "noise"])
    seen = [rows.row(i, 0) for i in range(5)]
    assert [int(row["images"][0, 0, 0]) for row in seen] == [100, 101, 102, 0, 0]
    assert [int(row["targets"]) for row in seen] == [0, 0, 0, -1, -1]
    assert [int(row["row"]) for row in seen] == [0, 1, 2, 3, 4]
    assert seen[4]["labels"].tolist() == [-1] and seen[4]["sizes"].tolist() == [8, 8]


def test_difficult_boxes_are_no_truths():
    image = np.zeros((9, 9, 3), np.uint8)
    boxes = [[0, 0, 4, 4], [1, 1, 5, 5], [2, 2, 6, 6]]
    example = Drawn(image, boxes, [3, 4, 5], [False, True, False])
    row = DetectionRows([example], [(9, 9)], 2, 0).row(0, 0)
    assert row["labels"].tolist() == [3, 5]
    assert row["boxes"].tolist() == [boxes[0], boxes[2]]


def test_more_boxes_than_the_limit_is_one_clear_line():
    image = np.zeros((9, 9, 3), np.uint8)
    few = Drawn(image, [[0, 0, 4, 4]] * 2, [0] * 2, name="few.png")
    many = Drawn(image, [[0, 0, 4, 4]] * 5, [0] * 5, name="ma\nny.png")
    more = Drawn(image, [[0, 0, 4, 4]] * 3, [0] * 3, name="more.png")
    DetectionRows([few, many, more], [(9, 9)], 5, 0)
    with pytest.raises(UserError, match="ny.png.* has 5 boxes and data.max_boxes=2, which 1 more"):
        DetectionRows([few, many, more], [(9, 9)], 2, 0)
    with pytest.raises(UserError) as error:
        DetectionRows([many], [(9, 9)], 4, 0)
    assert "\n" not in str(error.value) and "5 or more (--data.max_boxes)" in str(error.value)
    with pytest.raises(UserError, match=r"'hflop'; .*Did you mean hflip\? \(--data.augment\)"):
        DetectionRows([few], [(9, 9)], 2, 0, ["hflop"])
    with pytest.raises(UserError, match="no image to learn from"):
        DetectionRows([], [(9, 9)], 2, 0)


def test_a_damaged_image_counts_nothing_and_is_named_once(caplog):
    good = square(8, 8, (0, 0, 8, 8))
    fault = ImageError("damaged", "bad.png is damaged")
    bad = Drawn(np.zeros((8, 8, 3), np.uint8), [[0, 0, 4, 4]], [1], fault=fault)
    rows = DetectionRows([good, bad], [(8, 8)], 1, 0)
    with caplog.at_level(logging.WARNING, "absl"):
        targets = [int(rows.row(i, 0)["targets"]) for i in range(8)]
    assert sorted(targets) == [-1] * 4 + [0] * 4
    filling = rows.row(targets.index(-1), 0)
    assert not filling["images"].any() and filling["labels"].tolist() == [-1]
    assert [r.getMessage() for r in caplog.records] == ["An image is left out: bad.png is damaged"]
    lost = Drawn(bad.pixels, fault=UserError("cannot read lost.png"))
    with pytest.raises(UserError, match=r"cannot read lost.png"):
        DetectionRows([lost], [(8, 8)], 1, 0).row(0, 0)


def test_images_are_read_once_while_the_cache_has_room():
    """Kept in the size that the largest canvas needs: 32 x 32 pixels of three bytes."""
    examples = [square(64, 64, (0, 0, 60, 60)) for _ in range(4)]

    def reads(cache_bytes: int) -> int:
        for example in examples:
            example.reads.clear()
        rows = DetectionRows(examples, [(16, 16), (32, 32)], 1, 0, cache_bytes=cache_bytes)
        for i in range(40):
            rows.row(i, i % 2)
        return sum(len(example.reads) for example in examples)

    assert reads(4 * 32 * 32 * 3) == 4
    assert reads(0) == 40
    assert 4 < reads(2 * 32 * 32 * 3) < 40
    cache = detection_rows.Cache(100)
    for key in range(50):
        cache.get(key, lambda: np.zeros(30, np.uint8))
    ones = [int(cache.get(key, lambda: np.ones(30, np.uint8))[0]) for key in (49, 48, 47, 46)]
    assert ones == [0, 0, 0, 1]


@pytest.mark.parametrize("height, width", [(1, 1), (10, 8000), (8000, 10), (1, 300)])
def test_rows_of_odd_images(height, width):
    image = np.full((height, width, 3), 90, np.uint8)
    example = Drawn(image, [[0, 0, 1, 1], [0, 0, width, height]], [0, 1])
    rows = DetectionRows([example], [(64, 48)], 2, 0, [*AUGMENTATIONS])
    for i in range(20):
        row = rows.row(i, 0)
        boxes, (high, wide) = row["boxes"], row["sizes"]
        assert np.isfinite(boxes).all() and (boxes[:, 2:] > boxes[:, :2]).all()
        assert high >= 1 and wide >= 1 and (boxes[:, 2:] <= [wide, high]).all()


def test_images_of_rare_classes_are_shown_more_often():
    """Against the fractions by hand: 8 images show class 0, 2 show class 1, 1 is without boxes."""
    common = [square(8, 8, (1, 1, 5, 5), 7) for _ in range(8)]
    rare = [square(8, 8, (1, 1, 5, 5), 8) for _ in range(2)]
    examples = [*common, *rare, Drawn(np.zeros((8, 8, 3), np.uint8))]
    assert [e.labels.tolist() for e in (common[0], rare[0])] == [[0], [1]]
    assert repeats_of(examples, 0.0).tolist() == [1] * 11
    repeats = repeats_of(examples, 8 / 11)  # of class 0: factor 1; of class 1: sqrt(4)
    assert repeats.tolist() == [1] * 8 + [2] * 2 + [1]
    assert repeats_of(examples, 4.5 / 11)[8:10].tolist() == [1, 2]  # of class 1: factor 1.5
    rows = DetectionRows(examples, [(8, 8)], 1, 5, repeats=repeats)
    for epoch in range(3):
        labels = [int(rows.row(13 * epoch + i, 0)["labels"][0]) for i in range(13)]
        assert [labels.count(k) for k in (0, 1, -1)] == [8, 4, 1]
