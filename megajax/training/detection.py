"""Training and judging detectors: average precision, as PASCAL VOC and COCO define it.

A detection is right if its box overlaps a true box of its class in its image by at least `iou`. It
is judged by the true box that it overlaps most: a second detection of that box is wrong, and a
detection of a difficult box is neither. Detections of a class are taken from all images in the
order of their scores; precision is the fraction of right ones so far, recall the fraction of true
boxes that have been detected so far, difficult ones not counted.

Sources: "The PASCAL Visual Object Classes Challenge" (Everingham et al., IJCV 2010), section 4.2,
and its development kit of 2010, where the precision is integrated over all recalls; COCO's own
program (pycocotools) for its measures.

Legend: N detections of an image or a class, G true boxes.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# ---- average precision


Boxes = Mapping[str, Any]  # of an image
POINTS = 10  # VOC 2007 reads the precision at the recalls 0, 1/10, ..., 10/10
COCO_MEASURES = ("coco_ap", "coco_ap50", "coco_ap75")  # in the order of pycocotools
NO_COCO = "pycocotools is not installed: uv sync --extra vision"


def voc_ap(
    truths: Sequence[Boxes],
    detections: Sequence[Boxes],
    *,
    iou: float = 0.5,
    use_07: bool = False,
) -> dict[int, float]:
    """Returns {class: average precision} of the classes that have true boxes.

    Args: truths: for each image boxes (G, 4), x0 y0 x1 y1, labels (G,) and difficult (G,) bool,
      which may be missing. detections: for each image boxes (N, 4), labels (N,), scores (N,). A
      label below 0 is padding. iou: overlap from which a detection is right. use_07: the mean of
      the precisions at eleven recalls, as VOC measured until 2009; else the area under the curve.
    Raises: ValueError for lists of unlike lengths, columns of an image that do not fit, a score
      that is not finite, or an iou outside (0, 1].
    """
    if not 0 < iou <= 1:
        raise ValueError(f"iou={iou} must be above 0 and at most 1; VOC has 0.5")
    true, detected = _images(truths, detections)
    listed = [labels[~difficult] for _, labels, difficult in true]
    classes = np.unique(np.concatenate(listed)) if listed else ()
    result: dict[int, float] = {}
    for label in map(int, classes):
        count = sum(int((labels == label).sum()) for labels in listed)
        scores_N, is_right_N = _judged(label, true, detected, iou)
        order = np.argsort(-scores_N, kind="stable")
        right_N = np.cumsum(is_right_N[order])
        precision_N = right_N / np.arange(1, len(right_N) + 1)
        result[label] = (_points_07 if use_07 else _area)(right_N, precision_N, count)
    return result


def _images(
    truths: Sequence[Boxes], detections: Sequence[Boxes]
) -> tuple[list[tuple[np.ndarray, ...]], list[tuple[np.ndarray, ...]]]:
    """Returns for each image (boxes, labels, difficult), and for each (boxes, labels, scores)."""
    if len(truths) != len(detections):
        raise ValueError(f"{len(truths)} images have true boxes and {len(detections)} detections")
    return (
        [_columns(t, i, "difficult", bool) for i, t in enumerate(truths)],
        [_columns(d, i, "scores", np.float64) for i, d in enumerate(detections)],
    )


def _columns(image: Boxes, i: int, last: str, dtype: Any) -> tuple[np.ndarray, ...]:
    """Returns the boxes, labels and last column of an image, without padding."""
    labels = np.asarray(image["labels"]).reshape(-1).astype(np.int64)
    boxes = np.asarray(image["boxes"], np.float64).reshape(-1, 4)
    values = image.get(last) if last == "difficult" else image[last]
    values = np.zeros(len(labels)) if values is None else values
    values = np.asarray(values).reshape(-1).astype(dtype)
    if not len(boxes) == len(labels) == len(values):
        raise ValueError(
            f"image {i}: {len(boxes)} boxes, {len(labels)} labels and {len(values)} {last}; they "
            "must be equally many"
        )
    if dtype is not bool and not np.isfinite(values[labels >= 0]).all():
        raise ValueError(f"image {i}: a score is not finite")
    return boxes[labels >= 0], labels[labels >= 0], values[labels >= 0]


def _judged(
    label: int, true: Sequence[tuple], detected: Sequence[tuple], iou: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (scores, 1 right or 0 wrong) of the detections of a class in all images. Those that
    are neither are left out."""
    scores: list[float] = []
    verdicts: list[int] = []
    for (boxes, labels, difficult), (boxes_N4, labels_N, scores_N) in zip(
        true, detected, strict=True
    ):
        truth_G4, difficult_G = boxes[labels == label], difficult[labels == label]
        is_taken_G = np.zeros(len(truth_G4), bool)
        numbers = np.flatnonzero(labels_N == label)
        for n in numbers[np.argsort(-scores_N[numbers], kind="stable")]:
            overlap_G = _overlaps(boxes_N4[n], truth_G4)
            best = int(overlap_G.argmax()) if len(overlap_G) else -1
            is_hit = best >= 0 and overlap_G[best] >= iou
            if is_hit and difficult_G[best]:
                continue
            scores.append(float(scores_N[n]))
            verdicts.append(int(is_hit and not is_taken_G[best]))
            if is_hit:
                is_taken_G[best] = True
    return np.asarray(scores, np.float64), np.asarray(verdicts, np.int64)


def _overlaps(box_4: np.ndarray, truth_G4: np.ndarray) -> np.ndarray:
    """Returns intersection over union of a box with each true box, 0 where both are empty."""
    low_G2 = np.maximum(box_4[:2], truth_G4[:, :2])
    high_G2 = np.minimum(box_4[2:], truth_G4[:, 2:])
    shared_G = np.maximum(high_G2 - low_G2, 0).prod(1)
    area, areas_G = (np.maximum(b[..., 2:] - b[..., :2], 0).prod(-1) for b in (box_4, truth_G4))
    union_G = area + areas_G - shared_G
    return np.where(union_G > 0, shared_G / np.where(union_G > 0, union_G, 1.0), 0.0)


def _area(right_N: np.ndarray, precision_N: np.ndarray, count: int) -> float:
    """Returns the area under the curve of precision over recall, whose precision at a recall is the
    best one at that recall or beyond."""
    best_N = np.maximum.accumulate(precision_N[::-1])[::-1]
    steps_N = np.diff(right_N, prepend=0) / count
    return float((steps_N * best_N).sum())


def _points_07(right_N: np.ndarray, precision_N: np.ndarray, count: int) -> float:
    """Returns the mean of the best precisions at or beyond eleven recalls. Recalls are compared as
    integers: 3 of 10 boxes reach the recall of 3/10."""
    best = [precision_N[POINTS * right_N >= i * count].max(initial=0.0) for i in range(POINTS + 1)]
    return float(np.mean(best))


def coco_ap(truths: Sequence[Boxes], detections: Sequence[Boxes]) -> dict[str, float] | None:
    """Returns COCO's AP, AP50 and AP75 of boxes by pycocotools (the extra `vision`): means over the
    classes, of ten overlaps and at 0.5 and 0.75. None without pycocotools, or without a true box.

    Args: as of `voc_ap`. A difficult box is treated as a crowd.
    """
    try:
        from pycocotools.coco import COCO  # type: ignore
        from pycocotools.cocoeval import COCOeval  # type: ignore
    except ImportError:
        return None
    true, detected = _images(truths, detections)
    names = sorted({int(x) for _, labels, difficult in true for x in labels[~difficult]})
    if not names:
        return None
    annotations = [
        {
            "id": 0,
            "image_id": i,
            "category_id": int(label),
            "bbox": [*box_4[:2].tolist(), *(box_4[2:] - box_4[:2]).tolist()],
            "area": float((box_4[2:] - box_4[:2]).prod()),
            "iscrowd": int(is_difficult),
        }
        for i, (boxes, labels, difficult) in enumerate(true)
        for box_4, label, is_difficult in zip(boxes, labels, difficult, strict=True)
        if int(label) in names
    ]
    for number, annotation in enumerate(annotations, 1):  # 0 would stand for no match
        annotation["id"] = number
    rows = [
        [i, *box_4[:2], *(box_4[2:] - box_4[:2]), score, label]
        for i, (boxes, labels, scores) in enumerate(detected)
        for box_4, label, score in zip(boxes, labels, scores, strict=True)
        if int(label) in names
    ]
    if not rows:
        return dict.fromkeys(COCO_MEASURES, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(len(true))],
            "categories": [{"id": label, "name": str(label)} for label in names],
            "annotations": annotations,
        }
        coco.createIndex()
        judge = COCOeval(coco, coco.loadRes(np.asarray(rows, np.float64)), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return dict(zip(COCO_MEASURES, map(float, judge.stats[:3]), strict=True))
