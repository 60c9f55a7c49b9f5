"""The nine augmentations: boxes against pixels that are counted, and what stays as it was."""

import numpy as np
import pytest

from megajax.data.augment import AUGMENTATIONS, is_geometric

NINE = "hflip vflip rot90 rot180 rot270 rot_small noise blur contrast".split()
COLORS = np.array([[1, 0.1, 0.1], [0.1, 1, 0.1], [0.1, 0.1, 1]], np.float32)


def scene(rng: np.random.Generator, shape: str, height: int, width: int, noise: float = 0.0):
    """Returns an image with up to three objects that do not touch, each of its own color, and the
    boxes of their pixels, counted."""
    image = np.full((height, width, 3), 0.45, np.float32)
    image += noise * rng.standard_normal(image.shape).astype(np.float32)
    image = np.clip(image, 0.3, 0.6)
    boxes = []
    third = width // 3
    for i in range(3):
        w, h = int(rng.integers(12, third - 2)), int(rng.integers(12, height - 2))
        x, y = int(rng.integers(third * i, third * (i + 1) - w)), int(rng.integers(0, height - h))
        rows, columns = np.mgrid[:height, :width] + 0.5
        u, v = (columns - x - w / 2) / (w / 2), (rows - y - h / 2) / (h / 2)
        part = {
            "rectangle": np.maximum(abs(u), abs(v)) < 1,
            "ellipse": u * u + v * v < 1,
            "diamond": abs(u) + abs(v) < 1,
        }[shape]
        image[part] = COLORS[i]
        boxes.append(counted(image, i))
    return image, np.array(boxes, np.float32)


def counted(image: np.ndarray, number: int) -> list[int]:
    """Returns the box of the pixels that are nearer to an object's color than to the ground's."""
    rows, columns = np.nonzero(np.abs(image - COLORS[number]).max(2) < 0.3)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def iou(a: np.ndarray, b: np.ndarray) -> float:
    common = np.prod(np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None))
    return common / (np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - common)


def test_there_are_nine():
    assert list(AUGMENTATIONS) == NINE
    assert [n for n in NINE if is_geometric(n)] == NINE[:6]


@pytest.mark.parametrize("name", ["hflip", "vflip", "rot90", "rot180", "rot270"])
def test_boxes_follow_their_pixels(name, seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        height, width = (int(n) for n in rng.integers(50, 130, 2))
        image, boxes = scene(rng, "ellipse", height, width)
        moved, new = AUGMENTATIONS[name](image, boxes, rng)
        assert new.tolist() == [counted(moved, i) for i in range(3)]
        turned = name in ("rot90", "rot270")
        assert moved.shape == ((width, height, 3) if turned else image.shape)
        assert sorted(moved.ravel()) == sorted(image.ravel())


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("shape", ["rectangle", "ellipse", "diamond"])
def test_boxes_stay_tight_when_an_image_is_rotated_a_little(shape, noise, seed):
    """They lie around the pixels of an object to within two pixels, whatever its shape; the
    rectangle around a rotated box would be up to a fifth wider."""
    rng = np.random.default_rng(seed)
    overlaps, wide, angles = [], [], set()
    for _ in range(25):
        height, width = (int(n) for n in rng.integers(60, 140, 2))
        image, boxes = scene(rng, shape, height, width, noise)
        moved, new = AUGMENTATIONS["rot_small"](image, boxes, rng)
        assert moved.shape == image.shape and moved.dtype == np.float32
        assert new[:, :2].min() >= 0 and (new[:, 2:] <= [width, height]).all()
        angles.add(round(float(new[0, 0]), 3))
        for i, box in enumerate(new):
            seen = np.array(counted(moved, i), float)
            overlaps.append(iou(box, seen))
            wide.append(np.abs(box - seen).max())
    assert len(angles) > 20
    assert min(overlaps) > 0.8 and max(wide) < 2 and np.mean(overlaps) > 0.94


def test_a_small_rotation_keeps_all_of_the_image():
    """Its corners stay inside, so no object is cut and no box is lost."""
    for height, width in ((100, 100), (60, 180), (300, 20)):
        for seed in range(5):
            image = np.full((height, width, 3), 0.45, np.float32)
            corners = [[0, 0], [width - 8, 0], [0, height - 8]]
            boxes = np.array([[x, y, x + 8, y + 8] for x, y in corners], np.float32)
            for color, (x, y) in zip(COLORS, corners, strict=True):
                image[y : y + 8, x : x + 8] = color
            rng = np.random.default_rng(seed)
            moved, new = AUGMENTATIONS["rot_small"](image, boxes, rng)
            for i in range(3):
                assert np.abs(counted(moved, i) - new[i]).max() < 1.5
            assert new.min() > -1e-3 and (new[:, 2:] <= [width + 1e-3, height + 1e-3]).all()


@pytest.mark.parametrize("name", NINE)
def test_flips_undo_themselves_and_what_is_light_leaves_boxes_alone(name, seed):
    rng = np.random.default_rng(seed)
    image = rng.random((31, 47, 3), np.float32)
    boxes = np.sort(rng.random((5, 2, 2)), 1).reshape(5, 4) * [47, 31, 47, 31]
    for dtype in (np.float32, np.float64):
        given_boxes, given_image = boxes.astype(dtype), image.copy()
        once, new = AUGMENTATIONS[name](image, given_boxes, rng)
        assert np.array_equal(image, given_image) and once.dtype == np.float32
        assert new.dtype == dtype and np.array_equal(given_boxes, boxes.astype(dtype))
        assert once.min() >= 0 and once.max() <= 1
        if is_geometric(name):
            assert not np.array_equal(new, given_boxes)
        else:
            assert np.array_equal(new, given_boxes) and not np.array_equal(once, image)
        if "flip" in name or name == "rot180":
            again, back = AUGMENTATIONS[name](once, new, rng)
            assert np.array_equal(again, image)
            assert np.abs(back - given_boxes).max() <= 1e-5
            whole_boxes = np.round(given_boxes)
            twice = AUGMENTATIONS[name](once, AUGMENTATIONS[name](image, whole_boxes, rng)[1], rng)
            assert np.array_equal(twice[1], whole_boxes)


def test_four_right_angles_are_none(seed):
    rng = np.random.default_rng(seed)
    image, boxes = scene(rng, "ellipse", 60, 90)
    for names in (["rot90"] * 4, ["rot90", "rot270"], ["rot180", "rot90", "rot90"]):
        turned, new = image, boxes
        for name in names:
            turned, new = AUGMENTATIONS[name](turned, new, rng)
        assert np.array_equal(turned, image) and np.array_equal(new, boxes)


@pytest.mark.parametrize("name", NINE)
def test_the_generator_decides(name):
    image, boxes = scene(np.random.default_rng(0), "ellipse", 60, 90)
    one, two, three = (
        AUGMENTATIONS[name](image, boxes, np.random.default_rng(s)) for s in (1, 1, 2)
    )
    assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])
    random = name in ("rot_small", "noise", "blur", "contrast")
    assert np.array_equal(one[0], three[0]) != random


@pytest.mark.parametrize("name", NINE)
@pytest.mark.parametrize("height, width", [(1, 1), (10, 800), (1, 7), (800, 10)])
def test_odd_images_without_and_with_boxes(name, height, width):
    image = np.full((height, width, 3), 0.5, np.float32)
    for boxes in (np.zeros((0, 4), np.float32), np.array([[0, 0, 1, 1]], np.float32)):
        changed, new = AUGMENTATIONS[name](image, boxes, np.random.default_rng(0))
        assert new.shape == boxes.shape and np.isfinite(new).all()
        assert np.isfinite(changed).all() and sorted(changed.shape) == sorted(image.shape)
        assert (new[:, 2:] > new[:, :2]).all()


def test_noise_blur_and_contrast_do_what_they_say():
    rng = np.random.default_rng(0)
    flat = np.full((200, 200, 3), 0.5, np.float32)
    boxes = np.zeros((0, 4), np.float32)
    spreads = [AUGMENTATIONS["noise"](flat, boxes, rng)[0].std() for _ in range(20)]
    assert 0 < min(spreads) and 0.03 < max(spreads) < 0.07
    edge = flat.copy()
    edge[:, :100], edge[:, 100:] = 0.2, 0.8
    blurred = AUGMENTATIONS["blur"](edge, boxes, rng)[0]
    assert (np.diff(blurred, axis=1) >= -1e-6).all() and np.diff(blurred, axis=1).max() < 0.55
    assert np.allclose(blurred.mean(), 0.5, atol=1e-3)
    ranges = [np.ptp(AUGMENTATIONS["contrast"](edge, boxes, rng)[0]) for _ in range(20)]
    assert min(ranges) < 0.55 and max(ranges) > 0.65
