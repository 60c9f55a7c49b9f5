"""Average precision against loops with exact fractions, and against pycocotools."""

import fractions

import numpy as np
import pytest

from megajax.training.detection import coco_ap, voc_ap

# Of draw(seed, images=200, difficult=0) by pycocotools 2.0.11: AP, AP50, AP75.
FROZEN = {
    0: (0.2029164125041604, 0.4321215048642444, 0.15280474983729783),
    1: (0.20949165097209138, 0.4413275383688806, 0.15218292837750724),
    2: (0.2121667964543754, 0.45565272063817064, 0.14434042217795665),
    3: (0.220250943985437, 0.4826655174571067, 0.16503798144825102),
}


def draw(seed, images, difficult=0.2, classes=3):
    """Truths, and detections of them that are moved, repeated, renamed or of nothing."""
    rng, truths, detections = np.random.default_rng(seed), [], []
    for _ in range(images):
        G = int(rng.integers(0, 5))
        corner = rng.uniform(0, 60, (G, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(8, 40, (G, 2))], 1)
        labels = rng.integers(0, classes, G)
        truths.append({"boxes": boxes, "labels": labels, "difficult": rng.random(G) < difficult})
        guesses = []
        for box, label in zip(boxes, labels, strict=True):
            for _ in range(int(rng.integers(0, 3))):
                other = rng.random() < 0.1
                guesses.append((box + rng.normal(0, 2, 4), (label + other) % classes, 0.3))
        for _ in range(int(rng.integers(0, 2))):
            corner = rng.uniform(0, 60, 2)
            box = np.concatenate([corner, corner + rng.uniform(8, 40, 2)])
            guesses.append((box, rng.integers(0, classes), 0.0))
        detections.append(
            {
                "boxes": np.array([b for b, _, _ in guesses]).reshape(-1, 4),
                "labels": np.array([n for _, n, _ in guesses], int),
                "scores": np.array([s + rng.random() for _, _, s in guesses]),
            }
        )
    return truths, detections


def overlap(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    return width * height / (sum(areas) - width * height)


def loops(truths, detections, iou, use_07):
    """Average precision by the words of the definition, one detection after the other."""
    result = {}
    for label in {int(n) for t in truths for n in t["labels"]}:
        positives = sum(
            int(n) == label and not d
            for t in truths
            for n, d in zip(t["labels"], t["difficult"], strict=True)
        )
        if not positives:
            continue
        guesses = [
            (-score, i, box)
            for i, d in enumerate(detections)
            for box, n, score in zip(d["boxes"], d["labels"], d["scores"], strict=True)
            if int(n) == label
        ]
        hits, misses, taken, curve = 0, 0, set(), []
        for _, i, box in sorted(guesses, key=lambda g: g[0]):
            of_class = [k for k, n in enumerate(truths[i]["labels"]) if int(n) == label]
            best = max(of_class, key=lambda k: overlap(box, truths[i]["boxes"][k]), default=None)
            if best is None or overlap(box, truths[i]["boxes"][best]) < iou:
                misses += 1
            elif truths[i]["difficult"][best]:
                continue
            elif (i, best) in taken:
                misses += 1
            else:
                taken.add((i, best))
                hits += 1
            recall = fractions.Fraction(hits, positives)
            curve.append((recall, fractions.Fraction(hits, hits + misses)))
        steps = 10 if use_07 else positives
        first = 0 if use_07 else 1
        precisions = [
            max((p for r, p in curve if r >= fractions.Fraction(k, steps)), default=0)
            for k in range(first, steps + 1)
        ]
        result[label] = float(sum(precisions) / fractions.Fraction(len(precisions)))
    return result


@pytest.mark.parametrize("use_07", [False, True])
@pytest.mark.parametrize("iou", [0.5, 0.75])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_the_words_of_the_definition_give(seed, iou, use_07):
    truths, detections = draw(seed, images=40)
    ours = voc_ap(truths, detections, iou=iou, use_07=use_07)
    assert len(ours) == 3 and all(0 < x < 1 for x in ours.values())
    assert ours == pytest.approx(loops(truths, detections, iou, use_07), abs=1e-12)


def image(boxes, labels, **columns):
    return {"boxes": np.array(boxes, np.float32).reshape(-1, 4), "labels": labels} | columns


BOX, FAR = (0, 0, 10, 10), (50, 50, 60, 60)


def test_a_second_detection_is_wrong_even_where_another_box_is_free():
    """A detection is judged by the true box that it overlaps most, not by the best free one."""
    near = (2, 0, 12, 10)
    truths = [image([BOX, near], [0, 0])]
    detections = [image([BOX, BOX], [0, 0], scores=[0.9, 0.8])]
    assert voc_ap(truths, detections) == {0: 0.5}


def test_a_detection_of_a_difficult_box_is_neither_right_nor_wrong():
    truths = [image([BOX, FAR], [0, 0], difficult=[True, False])]
    detections = [image([BOX, BOX, FAR], [0, 0, 0], scores=[0.9, 0.8, 0.7])]
    assert voc_ap(truths, detections) == {0: 1.0}


def test_classes_without_truths_are_left_out_and_padding_is_none():
    truths = [image([BOX, FAR], [2, 1], difficult=[False, True]), image([], [])]
    detections = [
        image([BOX, BOX, FAR], [2, -1, 5], scores=[0.5, np.nan, 0.4]),
        image([FAR], [5], scores=[0.9]),
    ]
    assert voc_ap(truths, detections) == {2: 1.0}
    assert voc_ap(truths, [image([], [], scores=[])] * 2) == {2: 0.0}
    assert voc_ap([image([], [])], [image([BOX], [1], scores=[1.0])]) == {}
    assert voc_ap([], []) == {}


def test_recalls_of_2007_are_compared_exactly():
    """Three of ten boxes reach the recall 3/10, which as a float is above 3 * 0.1."""
    truths = [image([BOX], [0]) for _ in range(10)]
    nothing = image([], [], scores=[])
    for right in range(1, 11):
        detections = [image([BOX], [0], scores=[0.5])] * right + [nothing] * (10 - right)
        assert voc_ap(truths, detections, use_07=True)[0] == pytest.approx((right + 1) / 11)


@pytest.mark.parametrize(
    "truth, detection, message",
    [
        (image([BOX], [0]), image([BOX], [0, 1], scores=[1.0]), "image 0: 1 boxes, 2 labels"),
        (image([BOX], [0]), image([BOX], [0], scores=[np.nan]), "a score is not finite"),
        (image([BOX], [0, 0]), image([], [], scores=[]), "1 boxes, 2 labels and 2 difficult"),
    ],
)
def test_columns_that_do_not_fit_are_refused(truth, detection, message):
    with pytest.raises(ValueError, match=message):
        voc_ap([truth], [detection])


def test_lists_of_unlike_lengths_and_overlaps_outside_of_their_range_are_refused():
    with pytest.raises(ValueError, match="1 images have true boxes and 0 detections"):
        voc_ap([image([BOX], [0])], [])
    with pytest.raises(ValueError, match="iou=50 must be above 0 and at most 1"):
        voc_ap([], [], iou=50)


@pytest.mark.parametrize("seed", FROZEN)
def test_it_is_close_to_pycocotools_which_reads_the_curve_at_101_recalls(seed):
    truths, detections = draw(seed, images=200, difficult=0)
    ours = voc_ap(truths, detections)
    assert np.mean(list(ours.values())) == pytest.approx(FROZEN[seed][1], abs=0.005)


@pytest.mark.parametrize("seed", FROZEN)
def test_pycocotools_gives_what_was_frozen(seed):
    pytest.importorskip("pycocotools")
    truths, detections = draw(seed, images=200, difficult=0)
    measures = coco_ap(truths, detections)
    assert tuple(measures.values()) == pytest.approx(FROZEN[seed], abs=1e-9)


def test_without_a_detection_or_a_truth_there_is_no_curve():
    pytest.importorskip("pycocotools")
    nothing = image([], [], scores=[])
    assert coco_ap([image([BOX], [0])], [nothing])["coco_ap50"] == 0.0
    assert coco_ap([image([BOX], [0], difficult=[True])], [nothing]) is None
