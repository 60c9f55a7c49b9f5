"""Training and judging detectors: configuration, what a run reads, its measure.

A run reads images with boxes (data/detection.py), fits them to canvases, and trains
models/faster_rcnn.py by the library's one train step; `Images` is its data and `MeanPrecision` its
measure (systems/job.py: Reading, Measurement). systems/detector.py opens a trained one.

Average precision is defined as by PASCAL VOC. A detection is right if its box overlaps a true box
of its class in its image by at least `iou`. It is judged by the true box that it overlaps most: a
second detection of that box is wrong, and a detection of a difficult box is neither. Detections of
a class are taken from all images in the order of their scores; precision is the fraction of right
ones so far, recall the fraction of true boxes that have been detected so far, difficult ones not
counted. Sources: "The PASCAL Visual Object Classes Challenge" (Everingham et al., IJCV 2010),
section 4.2, and its development kit of 2010, where the precision is integrated over all recalls;
COCO's own program (pycocotools) for its measures; Xie et al., arXiv 1803.06626, for which species
count.

Legend: N detections of an image or a class, G true boxes, B images of a batch, K detections of an
image with padding, H rows and W columns of pixels.
"""

import contextlib
import dataclasses
import functools
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from PIL import Image, ImageDraw, ImageFont

from megajax.core import config
from megajax.core.axes import BATCH_AXES
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.core.files import write_whole
from megajax.core.layout import Layout
from megajax.core.tree import Tree, count, nbytes_per_device
from megajax.data.augment import AUGMENTATIONS
from megajax.data.butterflies import protocol as split_by_protocol
from megajax.data.detection import (
    MAX_MEGAPIXELS,
    Dataset,
    Example,
    open_detection,
    split,
)
from megajax.data.detection_rows import DetectionRows, repeats_of
from megajax.data.labelled import shown
from megajax.data.loader import Loader
from megajax.data.pack import mix
from megajax.foreign import torchvision
from megajax.layers.losses import LossSums
from megajax.models import faster_rcnn
from megajax.models.faster_rcnn import FasterRcnnConfig
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder, rows_by_step
from megajax.parallel.context import ContextSpec
from megajax.parallel.pipeline import PipelineConfig
from megajax.training.config import (
    CheckpointConfig,
    HeldOutConfig,
    JobConfig,
    LogConfig,
    TrainConfig,
)
from megajax.training.masking import PruneConfig
from megajax.training.optim import OptimConfig
from megajax.training.report import HELD_OUT, OURS, save_plot
from megajax.training.run_dir import RunDir, saved_labels
from megajax.training.step import TrainStep
from megajax.training.task import Leaf, Task, TrainState

# ---- average precision


Boxes = Mapping[str, Any]  # of an image
IOU = 0.5  # (PASCAL VOC)
POINTS = 10  # VOC 2007 reads the precision at the recalls 0, 1/10, ..., 10/10
COCO_MEASURES = ("coco_ap", "coco_ap50", "coco_ap75")  # in the order of pycocotools
NO_COCO = "pycocotools is not installed: uv sync --extra vision"


def voc_ap(
    truths: Sequence[Boxes],
    detections: Sequence[Boxes],
    *,
    iou: float = IOU,
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
    area = _points_07 if use_07 else _area
    return {label: area(*curve) for label, curve in _curves(truths, detections, iou).items()}


def _curves(
    truths: Sequence[Boxes], detections: Sequence[Boxes], iou: float
) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
    """Returns for each class with true boxes (right detections so far, precision so far, true
    boxes), by score. Raises: ValueError."""
    if not 0 < iou <= 1:
        raise ValueError(f"iou={iou} must be above 0 and at most 1; VOC has 0.5")
    true, detected = _images(truths, detections)
    images_of: dict[int, list[int]] = {}
    counts = Counter[int]()
    for i, ((_, labels, difficult), (_, names, _)) in enumerate(zip(true, detected, strict=True)):
        counts.update(labels[~difficult].tolist())
        for label in {*labels.tolist(), *names.tolist()}:
            images_of.setdefault(label, []).append(i)
    curves = {}
    for label in sorted(counts):
        pairs = [(true[i], detected[i]) for i in images_of[label]]
        scores_N, is_right_N = _judged(label, pairs, iou)
        order = np.argsort(-scores_N, kind="stable")
        right_N = np.cumsum(is_right_N[order])
        curves[label] = right_N, right_N / np.arange(1, len(right_N) + 1), counts[label]
    return curves


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
    label: int, images: Sequence[tuple[tuple, tuple]], iou: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (scores, 1 right or 0 wrong) of the detections of a class in these images. Those that
    are neither are left out. images: truths and detections of each, as of `_images`."""
    scores: list[float] = []
    verdicts: list[int] = []
    for (boxes, labels, difficult), (boxes_N4, labels_N, scores_N) in images:
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


def judge(
    classes: Sequence[str],
    truths: Sequence[Boxes],
    detections: Sequence[Boxes],
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the measures of some images, as evaluation.json has them.

    voc10, voc07: means over the classes that have true boxes, None if none has any; coco_ap,
    coco_ap50, coco_ap75: by pycocotools, else None, and `coco` says why. per_class: of each class
    with true boxes its two average precisions, its true boxes (difficult ones apart) and the images
    with any. without_boxes: the classes that no image here shows.
    left_out: classes that do not count, nor do their boxes and detections.
    """
    ignored = [i for i, name in enumerate(classes) if name in left_out]

    def counted(image: Boxes) -> Boxes:
        labels = np.asarray(image["labels"])
        return {**image, "labels": np.where(np.isin(labels, ignored), -1, labels)}

    truths, detections = [*map(counted, truths)], [*map(counted, detections)]
    curves = _curves(truths, detections, IOU)
    area, points = ({i: f(*curve) for i, curve in curves.items()} for f in (_area, _points_07))
    boxes, images, difficult = Counter[int](), Counter[int](), Counter[int]()
    for _, labels, is_difficult in _images(truths, detections)[0]:
        boxes.update(labels[~is_difficult].tolist())
        images.update({*labels[~is_difficult].tolist()})
        difficult.update(labels[is_difficult].tolist())
    coco = coco_ap(truths, detections)
    return {
        "images": len(truths),
        "voc10": float(np.mean([*area.values()])) if area else None,
        "voc07": float(np.mean([*points.values()])) if area else None,
        **(coco or dict.fromkeys(COCO_MEASURES)),
        "coco": "by pycocotools" if coco else NO_COCO if area else "no true box",
        "per_class": {
            name: {
                "voc10": area[i],
                "voc07": points[i],
                "boxes": boxes[i],
                "images": images[i],
                "difficult": difficult[i],
            }
            for i, name in enumerate(classes)
            if i in area
        },
        "left_out": [*left_out],
        "without_boxes": [
            name for i, name in enumerate(classes) if i not in area and i not in ignored
        ],
    }


# ---- configuration


SIDE = 32  # (torchvision, GeneralizedRCNNTransform) pixels; the sides of canvases are multiples
Protocol = Literal["A", "B"]


@dataclass(frozen=True)
class DetectDataConfig(Checked, section="data"):
    """Source, hold-out, and how an image becomes a row of a batch."""

    source: str = option(
        "butterflies:easy",
        "a folder of photographs with boxes: coco:FOLDER, voc:FOLDER or yolo:FOLDER; or drawings: "
        "butterflies:easy, butterflies:hard",
    )
    test: str | None = option(
        None, "another source, whose images are evaluated; none: those that are held out"
    )
    holdout: float = option(
        0.2, "fraction of images held out, by hash of their content", at_least=0, below=1
    )
    canvases: str = option(
        "128x128",
        "height x width of a batch, several joined by commas: each batch has one of them, and "
        "images are scaled to fit; evaluations have the first",
        "pixels",
    )
    augment: str = option(
        "hflip",
        f"changes of training images, joined by commas: {', '.join(AUGMENTATIONS)}; all; or none",
    )
    enlarge: float = option(
        1.0, "how many times larger an image may become on its canvas", at_least=0.1
    )
    balance: float = option(
        0.0,
        "show images of rare classes more often: a class in a fraction f of the images by the "
        "factor sqrt(balance / f), if that is above 1; 0: every image once an epoch",
        at_least=0,
        at_most=1,
    )
    max_boxes: int = option(100, "largest number of boxes of an image", at_least=1)
    max_megapixels: float = option(
        MAX_MEGAPIXELS, "images with more are left out, and never decoded", "megapixels", above=0
    )
    follow_links: bool = option(False, "follow symbolic links, wherever they lead")
    cache_gib: float = option(
        1.0, "memory for decoded images, of training and of evaluation each", "GiB", at_least=0
    )
    prefetch: int = option(4, "batches that threads prepare ahead", "batches", at_least=0)

    def __post_init__(self):
        """Refuses what is no list of canvases."""
        super().__post_init__()
        try:
            sides = [side for shape in self.shapes for side in shape]
        except ValueError:
            sides = [0]
        if len(self.shapes_text) != len({*self.shapes_text}):
            sides = [0]
        if any(side < SIDE or side % SIDE for side in sides):
            raise UserError(
                f"data.canvases={self.canvases} must be HEIGHTxWIDTH, or several different ones "
                f"joined by commas, in multiples of {SIDE} pixels, such as 128x128 or "
                "480x640,640x480 (--data.canvases)"
            )

    @property
    def shapes_text(self) -> list[str]:
        """The canvases as they were written."""
        return self.canvases.lower().split(",")

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each canvas. Raises: ValueError."""
        pairs = [tuple(int(n) for n in text.split("x")) for text in self.shapes_text]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(self.canvases)
        return tuple((height, width) for height, width in pairs)

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The names of `augment`."""
        if self.augment in ("all", "none"):
            return tuple(AUGMENTATIONS) if self.augment == "all" else ()
        return tuple(filter(None, self.augment.split(",")))

    def shape_of(self, seed: int) -> Callable[[int], int]:
        """Returns (number of a batch) -> the number of its canvas, at random with equal shares."""
        return lambda number: mix(seed, number, "canvas") % len(self.shapes)


@dataclass(frozen=True)
class DetectTrainConfig(TrainConfig, section="train"):
    """One optimizer step and how many of them."""

    global_batch: int = option(
        16, "images of a step, on all devices together", "images", at_least=1
    )
    # Members that say something of rows of tokens: no flags.
    seq_len: ClassVar[int] = 1  # type: ignore
    remat: ClassVar[Literal["none"]] = "none"  # type: ignore
    loss_chunks: ClassVar[int] = 1  # type: ignore
    z_loss: ClassVar[float] = 0.0  # type: ignore
    attention: ClassVar[Literal["xla"]] = "xla"  # type: ignore
    segments: ClassVar[int] = 0  # type: ignore


@dataclass(frozen=True)
class DetectEvalConfig(HeldOutConfig, section="eval"):
    """What is measured beside training, and what is drawn."""

    batches: int = option(
        64,
        "batches of train.global_batch images that an evaluation reads at most; 0: no evaluation",
        at_least=0,
    )
    samples: int = option(
        6, "images that are drawn with their detections after an evaluation", at_least=0
    )
    min_score: float = option(0.5, "score from which a detection is drawn", at_least=0, at_most=1)


@dataclass(frozen=True)
class DetectConfig(JobConfig):
    """A whole run of a detector."""

    model: FasterRcnnConfig = group(FasterRcnnConfig)
    train: DetectTrainConfig = group(DetectTrainConfig)
    data: DetectDataConfig = group(DetectDataConfig)  # type: ignore
    eval: DetectEvalConfig = group(DetectEvalConfig)
    protocol: Protocol | None = option(
        None,
        "how images of specimens are used, and half of those in the habitat evaluated: A: all "
        "specimens are learned from; B: those of species that the habitat has; none: data.holdout "
        "of all images are evaluated",
    )
    init_from: str | None = option(
        None,
        "file of torchvision's weights (.pth, .safetensors) of a ResNet, a VGG16 or a Faster R-CNN "
        "that start the run",
    )
    # Groups that need a stack of layers or a sequence: no flags.
    pipeline: ClassVar[PipelineConfig] = PipelineConfig()  # type: ignore
    context: ClassVar[ContextSpec] = ContextSpec()  # type: ignore
    prune: ClassVar[PruneConfig] = PruneConfig()  # type: ignore
    overlap: ClassVar[Literal["xla"]] = "xla"  # type: ignore

    def task(self) -> Task:
        """Returns the detector with the sum of its losses."""
        G = self.data.max_boxes
        other = {
            "boxes": Leaf((G, 4), (None, None), "float32"),
            "labels": Leaf((G,), (None,)),
            "sizes": Leaf((2,), (None,)),
            "targets": Leaf(),
            "row": Leaf(),
        }
        first, *more = (
            {"images": Leaf((*shape, 3), (None,) * 3, "uint8"), **other}
            for shape in self.data.shapes
        )
        parts = functools.partial(faster_rcnn.parts, self.model)
        return Task(
            parts, first, total_loss, named_losses, unit="images", row_units=1, more_batches=more
        )

    @property
    def row_size(self) -> int:
        """The side of a square with as many pixels as a canvas has in the mean."""
        return round(math.sqrt(np.mean([height * width for height, width in self.data.shapes])))

    def given_model(self) -> None:
        """Returns None: torchvision's files have no configuration."""
        return None

    def given_params(self, layout: Layout, fresh: Tree) -> Tree:
        """Returns new parameters with the weights that the file of `init_from` has."""
        assert self.init_from is not None
        return torchvision.load_params(self.init_from, self.model, fresh).params

    def check(self, sizes: Mapping[str, int]) -> None:
        """Checks what JobConfig checks, and what a detector cannot do. Raises: UserError."""
        for axis in ("pipe", "context"):
            if sizes[axis] > 1:
                raise UserError(
                    f"mesh.{axis}={sizes[axis]}: a detector has no layers or sequence that {axis} "
                    f"could cut; use 1 (--mesh.{axis})"
                )
        super().check(sizes)
        if self.protocol is not None and self.data.test is not None:
            raise UserError(
                f"protocol={self.protocol} evaluates half of the images of data.source, so "
                f"data.test={self.data.test} has no use: leave one of them out (--protocol, "
                "--data.test)"
            )


def total_loss(sums: LossSums, total: jax.Array) -> jax.Array:
    """Returns the objective: the sum of all losses, each a mean over images."""
    return sum(x for _, x in sorted(sums.terms.items())) / total  # type: ignore


def named_losses(sums: LossSums, total: jax.Array) -> dict[str, jax.Array]:
    """Returns what a step reports: the objective and its terms."""
    terms = {f"loss_{name}": x / total for name, x in sorted(sums.terms.items())}
    return {"loss": total_loss(sums, total), **terms}


def easy() -> DetectConfig:
    """Ten drawn species on 128 pixels, minutes of two CPU cores."""
    return DetectConfig(
        model=FasterRcnnConfig.tiny(classes=10),
        train=DetectTrainConfig(steps=240, global_batch=16),
        optim=OptimConfig(lr=3e-3, warmup=20, schedule="cosine", final=0.02, weight_decay=1e-4),
        data=DetectDataConfig(),
        eval=DetectEvalConfig(every=80),
        checkpoint=CheckpointConfig(every=80),
        log=LogConfig(every=10),
    )


def tiny() -> DetectConfig:
    """A few steps of `easy` that show that everything runs."""
    base = easy()
    return dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, steps=4, global_batch=4),
        data=dataclasses.replace(base.data, canvases="128x128,96x128"),
        eval=dataclasses.replace(base.eval, every=2, batches=2, samples=2),
        checkpoint=CheckpointConfig(every=2),
        log=LogConfig(every=1),
    )


def hard() -> DetectConfig:
    """Thirty species of look-alikes in rich backgrounds, a quarter of an hour of a CPU core.

    Muon learns what AdamW has not begun to learn in these steps. Look-alikes differ by marks of a
    few pixels, so images are enlarged; canvases of three sizes bring the large specimens to the
    sizes of insects in the habitat.
    """
    base = easy()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, anchor_sizes="24,48,96,180"),
        train=dataclasses.replace(base.train, steps=1800, global_batch=8),
        optim=dataclasses.replace(base.optim, name="muon"),
        data=dataclasses.replace(
            base.data,
            source="butterflies:hard",
            canvases="256x256,192x192,128x128",
            enlarge=2.0,
            augment="all",
            balance=0.1,
        ),
        eval=dataclasses.replace(base.eval, every=300),
        checkpoint=CheckpointConfig(every=300),
    )


def paper() -> DetectConfig:
    """A run of the butterfly paper's table, on a quarter of the backbone's width: at most twelve
    minutes of a CPU core."""
    base = hard()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, backbone="vgg16", width=0.25),
        train=dataclasses.replace(base.train, steps=380),
        protocol="A",
        eval=dataclasses.replace(base.eval, every=0),
    )


def resnet50_fpn() -> DetectConfig:
    """A detector for photographs of one's own on a GPU: ResNet-50 with a feature pyramid."""
    return DetectConfig(
        model=FasterRcnnConfig(classes=20),
        train=DetectTrainConfig(steps=10_000, global_batch=16, dtype="bfloat16"),
        optim=OptimConfig(name="sgd", lr=0.02, warmup=500, final=0.0, weight_decay=1e-4, clip=10.0),
        data=DetectDataConfig(
            canvases="800x1056,1056x800,640x864,864x640", augment="hflip,contrast", cache_gib=8.0
        ),
        eval=DetectEvalConfig(every=1000),
        checkpoint=CheckpointConfig(every=1000),
    )


PRESETS = {
    "easy": easy,
    "tiny": tiny,
    "hard": hard,
    "paper": paper,
    "resnet50_fpn": resnet50_fpn,
}

# The flags that --help describes; the others it names.
FIRST = (
    "preset",
    "config",
    "run_dir",
    "data.source",
    "data.canvases",
    "data.augment",
    "protocol",
    "model.backbone",
    "train.steps",
    "train.global_batch",
    "optim.lr",
)


def tuned() -> DetectConfig:
    """The recipe for torchvision's weights, as --init_from has it without --preset or --config."""
    base = resnet50_fpn()
    return dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, steps=2000, global_batch=8),
        optim=dataclasses.replace(base.optim, lr=0.005, warmup=100),
        eval=dataclasses.replace(base.eval, every=500),
        checkpoint=CheckpointConfig(every=500),
    )


def take_model(
    base: DetectConfig, typed: Mapping[str, Any], read: Mapping[str, Any]
) -> DetectConfig:
    """Returns `base` with the network of the file of init_from, if there is one, and as many
    classes as the data has, unless they were chosen.

    Args: typed: {dotted name: value} of the flags; read: of the file of --config.
    Raises: UserError when the weights or the data cannot be opened.
    """
    weights = typed.get("init_from", base.init_from)
    if weights is not None:
        base = base if config.start_given() else tuned()
        settings = {f"model.{n}": x for n, x in torchvision.describe(weights).settings.items()}
        settings["model.width"] = 1.0
        base = config.override(
            base, {n: x for n, x in settings.items() if n not in {**read, **typed}}
        )
    if "model.classes" in {**read, **typed}:
        return base
    deciding = {n: x for n, x in typed.items() if n.startswith("data.")}
    deciding |= {n: typed[n] for n in ("protocol", "train.seed") if n in typed}
    cfg = config.override(base, deciding)
    classes = open_sides(cfg.data, cfg.protocol, cfg.train.seed).classes
    return config.override(base, {"model.classes": len(classes)})


# ---- what a run reads


@dataclass(frozen=True)
class Sides:
    """The data of a run in two parts.

    train, test: examples whose labels number `classes`. single: the species that one image of the
    habitat shows, which do not count. dataset: from which both are, for its problems.
    """

    classes: tuple[str, ...]
    train: Sequence[Example]
    test: Sequence[Example]
    single: tuple[str, ...]
    dataset: Dataset


open_source = functools.lru_cache(maxsize=2)(open_detection)


@functools.lru_cache(maxsize=2)  # the number of classes is asked for before the run begins
def open_sides(data: DetectDataConfig, protocol: Protocol | None, seed: int) -> Sides:
    """Opens the source of a run. seed: draws the halves of a protocol. Raises: UserError."""
    dataset = open_source(data.source, data.max_megapixels, data.follow_links)
    classes, examples = dataset.classes, dataset.examples
    if protocol is not None:
        train, test, classes = split_by_protocol(dataset, protocol, seed)
        return Sides(classes, train, test, single_species(dataset), dataset)
    if data.test is not None:
        other = open_source(data.test, data.max_megapixels, data.follow_links)
        test = renumbered(other, classes, f"data.test={data.test}", data.source)
        both = Dataset(classes, [*examples, *test])
        return Sides(classes, examples, test, single_species(both), dataset)
    train, test = ([examples[i] for i in side] for side in split(examples, data.holdout))
    return Sides(classes, train, test, single_species(dataset), dataset)


def single_species(dataset: Dataset) -> tuple[str, ...]:
    """Returns the classes that exactly one image of the habitat shows."""
    counts = Counter[int]()
    for example in dataset.examples:
        if example.domain != "specimen":
            counts.update({*example.labels.tolist()})
    return tuple(name for i, name in enumerate(dataset.classes) if counts[i] == 1)


def renumbered(dataset: Dataset, classes: Sequence[str], what: str, whose: str) -> list[Example]:
    """Returns examples whose labels number other classes of the same names.

    Args: what: named the data, for messages. whose: has these classes.
    Raises: UserError for a class with boxes that is not among them.
    """
    used = sorted({int(k) for example in dataset.examples for k in example.labels})
    if unknown := [dataset.classes[k] for k in used if dataset.classes[k] not in classes]:
        raise UserError(
            f"{what} has boxes of {shown(unknown)}, and the classes of {whose} are "
            f"{shown(classes)}; name the classes alike, or train a detector of its own"
        )
    number = {name: i for i, name in enumerate(classes)}
    places = np.array([number.get(name, -1) for name in dataset.classes], np.int32)
    return [dataclasses.replace(e, labels=places[e.labels]) for e in dataset.examples]


class Images:
    """The images of a run (systems/job.py: Reading)."""

    tokenizer = None

    def __init__(self, cfg: DetectConfig, console: Console, run_dir: RunDir):
        """Opens them, and says what they show. Raises: UserError."""
        self._cfg, data = cfg, cfg.data
        self._sides = sides = open_sides(data, cfg.protocol, cfg.train.seed)
        self.labels = sides.classes
        former = saved_labels(run_dir.path)
        if former is not None and former != self.labels:
            raise UserError(
                f"data.source={data.source} has the classes {shown(self.labels)}, and the run in "
                f"{run_dir.path} those of {shown(former)}: restore the data to continue the run, "
                "or give another --run_dir"
            )
        if cfg.model.classes != len(self.labels):
            raise UserError(
                f"model.classes={cfg.model.classes} must be the {len(self.labels)} of data.source="
                f"{data.source}: {shown(self.labels)} (--model.classes={len(self.labels)}, or "
                "leave it out)"
            )
        for line in sides.dataset.report():
            console.say(f"{data.source}: {line}")
        console.say(
            f"{data.source}: {len(sides.train):,} images to learn, {len(sides.test):,} to evaluate"
        )
        counts = np.zeros(len(self.labels), int)
        for example in sides.train:
            np.add.at(counts, example.labels[~example.difficult], 1)
        named = [f"{name} {n}" for name, n in zip(self.labels, counts, strict=True)]
        console.say(f"boxes to learn, by class: {shown(named)}")
        if sides.single:
            console.say(f"one image in the habitat, so they do not count: {shown(sides.single)}")
        if cfg.init_from is not None:
            theirs = torchvision.describe(cfg.init_from).classes
            if theirs != cfg.model.classes:
                whose = "no classes" if theirs is None else f"{theirs} classes"
                console.say(f"{cfg.init_from} is for {whose}: what names regions begins anew")
        self.rows = detection_rows(cfg, sides.train, cfg.train.seed)
        self.identity: dict[str, Any] = {
            "examples": sides.dataset.fingerprint(),
            "seed": cfg.train.seed,
        }
        if data.balance:
            self.identity["balance"] = data.balance  # it decides which image a row is

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> "MeanPrecision":
        """Returns the evaluations of a run."""
        return MeanPrecision(self._cfg, train_step, self._sides, recorder, console, run_dir)


def detection_rows(
    cfg: DetectConfig, examples: Sequence[Example], seed: int | None = None
) -> DetectionRows:
    """Returns the rows of examples. seed: of training; None: once, on the first canvas."""
    data, trains = cfg.data, seed is not None
    return DetectionRows(
        examples,
        data.shapes if trains else data.shapes[:1],
        data.max_boxes if trains else max((len(e.boxes) for e in examples), default=0) or 1,
        seed,
        data.augmentations if trains else (),
        data.enlarge,
        int(data.cache_gib * 2**30),
        repeats_of(examples, data.balance) if trains and data.balance else None,
    )


def canvas_batches(cfg: DetectConfig, reading: Images, step: TrainStep, position: int) -> Loader:
    """Returns the batches of a run: the canvas of each is a function of the seed and its number."""
    return Loader(
        reading.rows,
        step.abstract_batches,
        position,
        cfg.data.prefetch,
        shape_of=cfg.data.shape_of(cfg.train.seed),
    )


def show(console: Console, cfg: DetectConfig, train_step: TrainStep, mesh: Mesh) -> None:
    """Says how large the detector is, and on which canvases it learns."""
    params, parts = train_step.abstract_state.params, train_step.parts
    some = ""
    if parts.trains is not None:
        some = f" ({quantity(count(parts.trained(params)))} of them trained)"
    console.say(
        f"{cfg.model.backbone}: {quantity(count(params))} parameters{some}, "
        f"{nbytes_per_device(train_step.abstract_state) / 2**30:.3f} GiB of state a device; "
        f"canvases {', '.join(cfg.data.shapes_text)}"
    )


# ---- detections


class Predictor:
    """Detections of examples by a model, on the devices of a mesh: one program for a canvas."""

    def __init__(self, cfg: DetectConfig, layout: Layout, most: int):
        """layout: of the parameters. most: images of a batch at most."""
        self._cfg, self._mesh = cfg, layout.mesh
        ways, (height, width) = layout.ways(BATCH_AXES), cfg.data.shapes[0]
        rows = ways * max(1, -(-most // ways))
        spec = layout.act("batch")
        self._abstract = {
            name: jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=layout.named(spec))
            for name, (shape, dtype) in {
                "images": ((height, width, 3), "uint8"),
                "sizes": ((2,), "int32"),
                "targets": ((), "int32"),
            }.items()
        }
        network = faster_rcnn.detector(cfg.model)
        dtype = jnp.dtype(cfg.train.dtype)

        def run(params: Tree, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
            used = jax.tree.map(
                lambda x: jax.sharding.reshard(x.astype(dtype) if x.ndim > 1 else x, P()), params
            )
            local = jax.shard_map(
                lambda used, batch: network.predict(used, batch["images"], batch["sizes"]),
                mesh=self._mesh,
                in_specs=(P(), dict.fromkeys(batch, spec)),
                out_specs=spec,
                check_vma=False,
            )
            columns = (*local(used, batch), batch["sizes"], batch["targets"])
            return jax.tree.map(lambda x: jax.sharding.reshard(x, P()), columns)

        self._run = jax.jit(run)

    def __call__(
        self, params: Tree, examples: Sequence[Example], rows: DetectionRows
    ) -> list[Boxes | None]:
        """Returns for each example boxes (N, 4) in its pixels, labels (N,), scores (N,), by score.
        None for an image that could not be read. rows: of the examples."""
        results: list[Boxes | None] = []
        batches = Loader(rows, self._abstract, shape_of=lambda number: 0)
        while len(results) < len(examples):
            with jax.set_mesh(self._mesh):
                columns = [np.asarray(x) for x in self._run(params, next(batches))]
            for boxes_K4, scores_K, labels_K, size_2, target in zip(*columns, strict=True):
                if len(results) == len(examples):
                    break
                height, width = examples[len(results)].size
                scale_4 = np.tile([width / size_2[1], height / size_2[0]], 2)
                is_there_K = labels_K >= 0
                detected = {
                    "boxes": (boxes_K4 * scale_4)[is_there_K].astype(np.float32),
                    "labels": labels_K[is_there_K],
                    "scores": scores_K[is_there_K],
                }
                results.append(detected if target >= 0 else None)
        return results


class MeanPrecision:
    """A hook of the training loop: average precision of images that nothing is learned from."""

    last_sample = None  # a detector writes no text

    def __init__(
        self,
        cfg: DetectConfig,
        train_step: TrainStep,
        sides: Sides,
        recorder: Recorder,
        console: Console,
        run_dir: RunDir,
    ):
        """Chooses the images, the same ones in each evaluation, spread evenly over all."""
        self._cfg, self._step, self._sides = cfg, train_step, sides
        self._recorder, self._console, self._run_dir = recorder, console, run_dir
        most = min(cfg.eval.batches * cfg.train.global_batch, len(sides.test))
        places = np.arange(most) * len(sides.test) // max(most, 1)
        self._examples = [sides.test[i] for i in places.tolist()]
        self.scores: dict[str, float] = {}
        if self._examples:
            self._rows = detection_rows(cfg, self._examples)
            self._predictor = Predictor(cfg, train_step.layout, cfg.train.global_batch)

    def due(self, finished: int, last: bool) -> bool:
        """Every so many steps, and after the last one."""
        every = self._cfg.eval.every
        return bool(self._examples) and (last or (every > 0 and finished % every == 0))

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Nothing is measured before the first step."""
        return state

    def __call__(self, state: TrainState, finished: int) -> TrainState:
        """Evaluates, records, and draws some images."""
        weights = self._step.weights(state)
        results = self._predictor(weights, self._examples, self._rows)
        examples, detections = readable(self._examples, results)
        judged = judge(self._sides.classes, truths_of(examples), detections, self._sides.single)
        row: dict[str, Any] = {
            f"eval_{name}": judged[name] for name in ("voc10", "voc07", *COCO_MEASURES)
        }
        self.scores = {name: x for name, x in row.items() if x is not None}
        row["eval_images"] = judged["images"]
        if len(self._sides.classes) <= MOST_SHOWN:
            for name in self._sides.classes:
                figures = judged["per_class"].get(name, {"voc10": None, "boxes": 0})
                row[f"eval_ap/{name}"] = figures["voc10"]
                row[f"eval_examples/{name}"] = figures["boxes"]
        self._recorder.emit(finished, row)
        self._console.say(f"step {finished}: {told(judged)}")
        if jax.process_index() == 0:
            draw_precision(self._run_dir, self._console)
            if self._cfg.eval.samples:
                self._draw(finished, examples, detections)
        return state

    def _draw(self, step: int, examples: list[Example], detections: list[Boxes]) -> None:
        pairs = list(zip(examples, detections, strict=True))
        pairs = sorted(pairs, key=lambda pair: not len(pair[0].boxes))  # those with objects first
        pictures = [
            drawn(e.image(), d, self._sides.classes, self._cfg.eval.min_score, e)
            for e, d in pairs[: self._cfg.eval.samples]
        ]
        file = self._run_dir.samples / f"{step:08d}.png"
        try:
            file.parent.mkdir(exist_ok=True)
            write_whole(file, sheet(pictures))
        except OSError as error:
            self._console.say(f"cannot write {file}: {error.strerror}")


def readable(
    examples: Sequence[Example], results: Sequence[Boxes | None]
) -> tuple[list[Example], list[Boxes]]:
    """Returns the examples whose images could be read, and their detections."""
    pairs = [(e, r) for e, r in zip(examples, results, strict=True) if r is not None]
    return [e for e, _ in pairs], [r for _, r in pairs]


def truths_of(examples: Sequence[Example]) -> list[Boxes]:
    """Returns the true boxes of each image, as `voc_ap` takes them."""
    return [{"boxes": e.boxes, "labels": e.labels, "difficult": e.difficult} for e in examples]


def told(judged: Mapping[str, Any]) -> str:
    """Returns one line on the result of `judge`."""
    if judged["voc10"] is None:
        return f"no true box in {judged['images']} images, so there is no average precision"
    line = (
        f"mean average precision {judged['voc10']:.3f} (at overlap 0.5; by VOC 2007 "
        f"{judged['voc07']:.3f}"
    )
    if judged["coco_ap50"] is not None:
        line += f", by COCO {judged['coco_ap50']:.3f}, at 0.5 to 0.95 {judged['coco_ap']:.3f}"
    return f"{line}) of {len(judged['per_class'])} classes in {judged['images']} images"


# ---- pictures


MOST_SHOWN = 200  # (chosen) classes that have figures of their own in metrics.jsonl
TILE = 384  # (chosen) pixels of the longer side of an image in a sheet
TRUE = "#3fb950"  # the colour of true boxes


def drawn(
    image: np.ndarray,
    detections: Boxes,
    classes: Sequence[str],
    min_score: float,
    truth: Example | None = None,
    side: int | None = TILE,
) -> Image.Image:
    """Returns an image with the boxes that have at least `min_score`, their names and scores; true
    boxes are thin. side: pixels to which the longer side is scaled; None: the image's own."""
    height, width = image.shape[:2]
    scale = 1.0 if side is None else side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    picture = Image.fromarray(np.ascontiguousarray(image)).resize(size)
    pen, stroke = ImageDraw.Draw(picture), max(2, max(size) // 200)
    font = ImageFont.load_default(max(11, max(size) // 36))
    for box_4 in () if truth is None else truth.boxes:
        pen.rectangle((box_4 * scale).tolist(), outline=TRUE, width=max(1, stroke // 2))
    columns = (detections[name] for name in ("boxes", "labels", "scores"))
    for box_4, label, score in reversed([*zip(*columns, strict=True)]):
        if score < min_score:
            continue
        corners = (np.asarray(box_4) * scale).tolist()
        pen.rectangle(corners, outline=OURS, width=stroke)
        text = f"{classes[int(label)]} {score:.2f}".encode("latin-1", "replace").decode("latin-1")
        _, _, right, bottom = pen.textbbox((0, 0), text, font=font)
        x = min(max(corners[0], 0), max(size[0] - right, 0))
        y = corners[1] - bottom - 2 if corners[1] > bottom + 2 else corners[1]
        pen.rectangle((x, y, x + right + 2, y + bottom + 2), fill=OURS)
        pen.text((x + 1, y), text, fill="white", font=font)
    return picture


def sheet(pictures: Sequence[Image.Image], side: int = TILE) -> bytes:
    """Returns a PNG with the pictures, of at most `side` pixels, three in a row."""
    columns, step = min(3, len(pictures)) or 1, side + 6
    lines = -(-len(pictures) // columns)
    page = Image.new("RGB", (columns * step, lines * step), "white")
    for i, picture in enumerate(pictures):
        page.paste(picture, (i % columns * step + 3, i // columns * step + 3))
    file = io.BytesIO()
    page.save(file, "PNG")
    return file.getvalue()


def draw_precision(run_dir: RunDir, console: Console) -> None:
    """Draws map.png of a run's metrics.jsonl: mean average precision over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = rows_by_step(run_dir.metrics, "eval_voc10")
    steps = [s for s in sorted(rows) if rows[s]["eval_voc10"] is not None]
    if not steps:
        return
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    last = rows[steps[-1]]
    names = {"eval_voc10": ("VOC 2010", OURS), "eval_voc07": ("VOC 2007", "#8250df")}
    names |= {"eval_coco_ap": ("COCO, overlaps 0.5 to 0.95", HELD_OUT)}
    for name, (text, color) in names.items():
        values = [x for s in steps if (x := rows[s].get(name)) is not None]
        if len(values) == len(steps):
            axes.plot(steps, values, "o-", color=color, lw=1.4, ms=4, label=text)
    axes.set(xlabel="optimizer step", ylabel="mean average precision", ylim=(0, 1))
    axes.set_title(
        f"mean average precision {last['eval_voc10']:.3f} at overlap 0.5 (step {steps[-1]}, "
        f"{last['eval_images']} images)",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_plot(figure, run_dir.path / "map.png", console)
