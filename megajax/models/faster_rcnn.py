"""Faster R-CNN: a detector of two stages (arXiv 1506.01497), with RoIAlign and feature pyramids.

The first stage, the region proposal network (RPN), scores the anchors of every map and moves them;
the best of them, without those that overlap a better one, are proposals. The second stage pools the
features of each proposal, names it and moves it once more. Both are trained together; a proposal is
a constant for the second stage (section 3.2, approximate joint training). Where the paper leaves a
choice, this is torchvision 0.29's: sampling, normalisation of the losses, order of suppression.

Shapes are static: true boxes are padded with the label -1, samples and proposals that are missing
have no weight, and detections are padded with the label -1. The loss of an image is the mean over
its own samples. Its random numbers follow its row number alone, so that every mesh and every number
of micro-batches draws the same. Weights are used in the type that they have (float32, bfloat16);
boxes, scores and losses are float32.

A canvas may be larger than its image (`sizes`). The padding is read as zeros whatever it holds;
anchors lie on it too, as background, and boxes are clipped to the image, so that none is in the
padding. Group norms see the padding: an image on a larger canvas has slightly different features.

Legend: B images, H rows, W columns, C channels, A anchors, N sampled anchors, G true boxes,
P proposals, R sampled regions, K detections, Y classes with the background first.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.cost.base import Op, Part, Phase, Workload
from megajax.cost.kernels import Convolution as ConvolutionKernel
from megajax.cost.kernels import Kernel, Matmul, Pooling, RoiAlign
from megajax.layers import boxes, param
from megajax.layers.losses import LossSums
from megajax.layers.ops import Ops
from megajax.models import parts as parts_
from megajax.models.resnet import (
    BLOCKS,
    FINEST,
    Convolution,
    Maps,
    Network,
    NormKind,
    Pyramid,
    Unit,
    as_input,
    backbone,
    narrow,
)

Array = jax.Array

# Of ImageNet, which torchvision's weights expect (torchvision, GeneralizedRCNNTransform).
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PROPOSAL_NMS = 0.7  # IoU above which the worse of two proposals is dropped (section 3.3)
REGION_IOU = 0.5  # from which a region is its true box's (arXiv 1504.08083, section 2.3)
FOREGROUND = 0.25  # of sampled regions, at most (arXiv 1504.08083, section 2.3)
POSITIVE = 0.5  # of sampled anchors, at most (section 3.1.3)
BETA = 1 / 9  # where the smooth L1 loss becomes linear (the authors' code: sigma 3)
ANCHOR_CODES, REGION_CODES = (1.0,) * 4, (10.0, 10.0, 5.0, 5.0)  # weights (the authors' code)
SIDE = 7  # bins a side of a pooled region (arXiv 1504.08083, section 2.1)
SAMPLING = 2  # points a side of a bin (torchvision)
PYRAMID = 256  # channels of a pyramid (arXiv 1612.03144, section 3)
CANONICAL, CANONICAL_STRIDE = 224, 16  # this side is read at this stride (the same, equation 1)
SMALLEST_PROPOSAL, SMALLEST_DETECTION = 1e-3, 1e-2  # pixels (torchvision)
TERMS = ("objectness", "rpn_box", "classification", "box")  # of the loss
LAST_CANDIDATES = 4096  # pairs of region and class that the last suppression compares (chosen)
DRAWS = 0x726F6973  # seed of the samples that a train step draws


@dataclasses.dataclass(frozen=True)
class FasterRcnnConfig(Checked, section="model"):
    """Everything that decides the parameters and the arithmetic of a detector."""

    classes: int = option(20, "number of classes, without the background", at_least=1)
    backbone: Network = option("resnet50", "network that makes the feature maps")
    width: float = option(1.0, "factor of the backbone's channels", at_least=0.05, at_most=4)
    norm: NormKind = option(
        "group", "norm after each convolution of the backbone; frozen: of imported weights"
    )
    maps: Literal["fpn", "stride16", "stride8"] = option(
        "fpn", "what is searched: a feature pyramid, or one map with this many pixels a cell"
    )
    heads: Literal["plain", "deep"] = option(
        "plain", "layers before the predictions; deep: those of torchvision's second version"
    )
    hidden: int = option(1024, "width of the dense layers of the second stage", at_least=1)
    pooling: Literal["align", "pool"] = option("align", "how a region reads its features")
    anchor_sizes: str = option(
        "32,64,128,256,512", "sides of square anchors in pixels; of a pyramid one for each level"
    )
    anchor_ratios: str = option("0.5,1,2", "heights of anchors divided by their widths")
    candidates: int = option(1000, "best anchors of each map before suppression", at_least=1)
    proposals: int = option(1000, "regions that the first stage proposes", at_least=1)
    anchor_samples: int = option(256, "anchors of an image that training scores", at_least=1)
    region_samples: int = option(512, "regions of an image that training scores", at_least=1)
    positive_iou: float = option(0.7, "IoU from which an anchor is its box's", above=0, at_most=1)
    negative_iou: float = option(0.3, "IoU below which an anchor is background", above=0, at_most=1)
    score: float = option(0.05, "score above which a box is a detection", at_least=0, below=1)
    nms: float = option(
        0.5,
        "IoU above which the worse of two detections of a class is dropped",
        at_least=0,
        at_most=1,
    )
    detections: int = option(100, "detections of an image at most", at_least=1)
    max_boxes: int = option(100, "annotated boxes of a training image at most", at_least=1)

    def __post_init__(self):
        """Refuses thresholds and anchors that do not fit."""
        super().__post_init__()
        if self.negative_iou > self.positive_iou:
            raise UserError(
                f"model.negative_iou={self.negative_iou} must be at most model.positive_iou="
                f"{self.positive_iou}; nearest: {self.positive_iou} (--model.negative_iou)"
            )
        sizes, _ = _numbers(self, "anchor_sizes"), _numbers(self, "anchor_ratios")
        if self.maps == "fpn" and len(sizes) != len(self.strides):
            raise UserError(
                f"model.anchor_sizes={self.anchor_sizes} must have {len(self.strides)} numbers, "
                f"one for each stride ({', '.join(map(str, self.strides))}) of the pyramid on "
                f"{self.backbone} (--model.anchor_sizes)"
            )
        if self.maps == "fpn" and self.pooling == "pool":
            raise UserError(
                "model.pooling=pool reads one map, and model.maps=fpn has several; use "
                "model.pooling=align, or model.maps=stride16 (--model.pooling, --model.maps)"
            )

    @classmethod
    def tiny(cls, classes: int) -> "FasterRcnnConfig":
        """A detector for images of 128 pixels that trains on two CPU cores in minutes."""
        return cls(
            classes=classes,
            backbone="small",
            maps="stride8",
            hidden=192,
            anchor_sizes="24,40,60",
            anchor_ratios="1",
            candidates=128,
            proposals=24,
            anchor_samples=64,
            region_samples=32,
            positive_iou=0.6,
            detections=16,
            max_boxes=8,
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels a cell of each map that is searched."""
        if self.maps != "fpn":
            return (int(self.maps.removeprefix("stride")),)
        return (4, 8, 16, 32, 64) if self.backbone in BLOCKS else (4, 8, 16, 32)

    @property
    def anchors_per_cell(self) -> int:
        """Anchors of one cell."""
        sizes = 1 if self.maps == "fpn" else len(_numbers(self, "anchor_sizes"))
        return sizes * len(_numbers(self, "anchor_ratios"))

    @property
    def sizes(self) -> dict[str, tuple[int, str]]:
        """{logical word: (size of that dimension, the field that sets it)}."""
        return {"embed": (self.hidden, "model.hidden")}

    @property
    def layers(self) -> int:
        """Layers of a stack that a pipeline can cut: none."""
        return 0

    @property
    def max_positions(self) -> int:
        """Positions of a row: images are no sequences."""
        return 0

    @property
    def dropout(self) -> float:
        """Dropout rate: there is no dropout."""
        return 0.0

    def workload(
        self, batch: int, side: int, dtype: str = "bfloat16", phase: Phase = "train"
    ) -> Workload:
        """Returns the forward pass of this many square images as a list of operations.

        They are those of the network's own program; norms, activations, suppression and losses are
        left out. side: pixels of an image's side. phase: 'train', or 'prefill' for detection.
        Raises: UserError for 'decode'.
        """
        if phase == "decode":
            raise UserError("a detector generates no tokens: phase=decode must be train or prefill")
        regions = self.proposals
        if phase == "train":
            regions = min(self.region_samples, regions + self.max_boxes)
        graph, weights = nnx.split(nnx.eval_shape(lambda: FasterRcnn(self, nnx.Rngs(0))))
        network = functools.partial(nnx.merge, graph)
        images = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
        sizes = jax.ShapeDtypeStruct((batch, 2), jnp.int32)
        read = lambda weights, *x: network(weights).maps(*x)  # noqa: E731
        kernels = [(kernel, None) for kernel in _kernels(read, weights, images, sizes)]
        maps = jax.eval_shape(read, weights, images, sizes)
        for i, x in enumerate(maps.values()):  # the maps share the proposer's weights
            scored = _kernels(lambda weights, x: network(weights).proposer(x), weights, x)
            kernels += [(kernel, 0 if i else None) for kernel in scored]
        channels = x.shape[-1]
        kernels.append((RoiAlign(batch * regions, SIDE, channels, SAMPLING), None))
        pooled = jax.ShapeDtypeStruct((batch, regions, SIDE, SIDE, channels), jnp.float32)
        named = _kernels(lambda weights, x: network(weights).head(x), weights, pooled)
        kernels += [(kernel, None) for kernel in named]
        places: dict[type, Part] = {ConvolutionKernel: "convolution", Matmul: "head"}
        ops = (
            Op(places.get(type(kernel), "pooling"), kernel, 1, sets, (dtype,))
            for kernel, sets in kernels
        )
        return Workload(tuple(ops), batch, 1, 1, 0, phase)


def _kernels(function: Callable, *args: Any) -> list[Kernel]:
    """Returns the convolutions, poolings and products of a function's program, in their order."""
    kernels: list[Kernel] = []

    def visit(program: Any) -> None:
        for eqn in program.eqns:
            inputs: Any = [x.aval.shape for x in eqn.invars]
            outputs: Any = [x.aval.shape for x in eqn.outvars]
            name, params = eqn.primitive.name, eqn.params
            if name == "conv_general_dilated":
                (rows, columns, channels, filters), stride = inputs[1], params["window_strides"][0]
                B, H, W, _ = outputs[0]
                kernels.append(
                    ConvolutionKernel(B, H, W, channels, filters, (rows, columns), stride)
                )
            elif name == "reduce_window_max":
                window, stride = params["window_dimensions"][1], params["window_strides"][1]
                B, H, W, channels = outputs[0]
                kernels.append(Pooling(B, H, W, channels, window, stride))
            elif name == "dot_general":
                *rows, width = inputs[0]
                kernels.append(Matmul(math.prod(rows), width, inputs[1][1]))
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return kernels


def _numbers(cfg: FasterRcnnConfig, field: str) -> tuple[float, ...]:
    """Returns the numbers of a text. Raises: UserError."""
    text, default = getattr(cfg, field), getattr(FasterRcnnConfig, field)
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < x < math.inf for x in numbers):
        raise UserError(
            f"model.{field}={text} must be positive numbers with commas between them; the default "
            f"is {default} (--model.{field})"
        )
    return numbers


# ---- the network


class Dense(nnx.Module):
    """A product and a bias, in the type of the kernel."""

    def __init__(
        self, rngs: nnx.Rngs, inputs: int, outputs: int, words: tuple, std: float | None = None
    ):
        """words: of the kernel. std: of the initial kernel; None: that for a ReLU after it."""
        std = math.sqrt(2 / inputs) if std is None else std
        self.kernel = param.normal(rngs, None, (inputs, outputs), words, std)
        self.bias = param.constant(None, (outputs,), (None,), 0.0)

    def __call__(self, x: Array) -> Array:
        """Returns x . kernel + bias."""
        kernel = self.kernel[...]
        y = as_input(x, kernel.dtype) @ kernel
        return y + param.broadcast(self.bias, y, y.dtype)


class Proposer(nnx.Module):
    """The region proposal network: scores and codes of all anchors of a map (section 3.1)."""

    def __init__(self, cfg: FasterRcnnConfig, channels: int, rngs: nnx.Rngs):
        """channels: of each map."""
        depth = 2 if cfg.heads == "deep" else 1
        units = {str(i): Unit(rngs, channels, channels, "none") for i in range(depth)}
        self.units = nnx.Dict(units)
        self.score = Convolution(rngs, channels, cfg.anchors_per_cell, 1, std=0.01)
        self.code = Convolution(rngs, channels, 4 * cfg.anchors_per_cell, 1, std=0.01)

    def __call__(self, x_BHWC: Array) -> tuple[Array, Array]:
        """Returns float32 (scores_BA, codes_BA4)."""
        B = x_BHWC.shape[0]
        for i in range(len(self.units)):
            x_BHWC = self.units[str(i)](x_BHWC)
        scores, codes = (y(x_BHWC).astype(jnp.float32) for y in (self.score, self.code))
        return scores.reshape(B, -1), codes.reshape(B, -1, 4)


class Head(nnx.Module):
    """Names and moves regions (arXiv 1504.08083, figure 1)."""

    def __init__(self, cfg: FasterRcnnConfig, channels: int, rngs: nnx.Rngs):
        """channels: of the pooled features."""
        deep, outputs, into, out = cfg.heads == "deep", cfg.classes + 1, "embed", None
        units = {str(i): Unit(rngs, channels, channels, cfg.norm) for i in range(4 * deep)}
        self.units = nnx.Dict(units)
        self.first = Dense(rngs, SIDE * SIDE * channels, cfg.hidden, (None, "embed"))
        self.second = None if deep else Dense(rngs, cfg.hidden, cfg.hidden, (into, out))
        self.name = Dense(rngs, cfg.hidden, outputs, (into, out), std=0.01)
        self.code = Dense(rngs, cfg.hidden, 4 * outputs, (into, out), std=0.001)

    def __call__(self, x_BRHWC: Array) -> tuple[Array, Array]:
        """Returns float32 (logits_BRY, codes_BRY4)."""
        B, R = x_BRHWC.shape[:2]
        x = x_BRHWC.reshape(B * R, *x_BRHWC.shape[2:])
        for i in range(len(self.units)):
            x = self.units[str(i)](x)
        x = jax.nn.relu(self.first(x.reshape(B * R, -1)))
        x = x if self.second is None else jax.nn.relu(self.second(x))
        logits, codes = (y(x).astype(jnp.float32) for y in (self.name, self.code))
        return logits.reshape(B, R, -1), codes.reshape(B, R, -1, 4)


class Truth(NamedTuple):
    """Annotated boxes. there: which of them are one; a box without an area is not, because it
    overlaps nothing."""

    boxes_G4: Array
    labels_G: Array
    there_G: Array


class Regions(NamedTuple):
    """Regions that the second stage learns from. names: classes, 0 for the background. codes: what
    moves a region to its true box. there: which of them were drawn."""

    boxes_R4: Array
    names_R: Array
    codes_R4: Array
    there_R: Array


class FasterRcnn(nnx.Module):
    """The detector as a Flax module, which models.parts.of_loss trains."""

    def __init__(self, cfg: FasterRcnnConfig, rngs: nnx.Rngs):
        """Draws the parameters."""
        self.cfg, last = cfg, cfg.strides[-1]
        if cfg.maps == "fpn":  # the last level is made of the one before it
            self.backbone = backbone(rngs, cfg.backbone, cfg.width, cfg.norm, last // 2)
            channels = {stride: self.backbone.channels[stride] for stride in cfg.strides[:-1]}
            norm, width = cfg.norm if cfg.heads == "deep" else "none", narrow(PYRAMID, cfg.width)
            self.pyramid = Pyramid(rngs, channels, width, norm)
        else:
            self.backbone = backbone(rngs, cfg.backbone, cfg.width, cfg.norm, last)
            self.pyramid, width = None, self.backbone.channels[last]
        self.proposer, self.head = Proposer(cfg, width, rngs), Head(cfg, width, rngs)

    # ---- first stage

    def maps(self, images_BHWC: Array, sizes_B2: Array) -> Maps:
        """Returns the maps that are searched, by stride. images: floats 0..1, or uint8 0..255."""
        x_BHWC = images_BHWC.astype(jnp.float32)
        if jnp.issubdtype(images_BHWC.dtype, jnp.integer):
            x_BHWC = x_BHWC / 255
        mean, deviation = (jnp.array(x)[None, None, None] for x in (MEAN, DEVIATION))
        in_rows_BH1 = (jnp.arange(x_BHWC.shape[1])[None] < sizes_B2[:, :1])[..., None]
        in_columns_B1W = (jnp.arange(x_BHWC.shape[2])[None] < sizes_B2[:, 1:])[:, None]
        in_image = (in_rows_BH1 & in_columns_B1W)[..., None]
        maps = self.backbone(jnp.where(in_image, (x_BHWC - mean) / deviation, 0))
        if self.pyramid is not None:
            return self.pyramid(maps)
        return {stride: maps[stride] for stride in self.cfg.strides}

    def score(self, maps: Maps) -> tuple[Array, Array]:
        """Returns the (scores_BA, codes_BA4) of the anchors of all maps, the finest first."""
        scores, codes = zip(*map(self.proposer, maps.values()), strict=True)
        return jnp.concatenate(scores, 1), jnp.concatenate(codes, 1)

    def anchors(self, maps: Maps) -> list[Array]:
        """Returns each map's anchors (A, 4)."""
        sizes, ratios = _numbers(self.cfg, "anchor_sizes"), _numbers(self.cfg, "anchor_ratios")
        levels: list[Array] = []
        for i, (stride, x) in enumerate(maps.items()):
            height, width = x.shape[1:3]
            sides = sizes[i : i + 1] if self.pyramid else sizes
            levels.append(boxes.anchors((height, width), stride, sides, ratios))
        return levels

    def propose(
        self, levels: list[Array], scores_A: Array, codes_A4: Array, size_2: Array
    ) -> tuple[Array, Array]:
        """Returns one image's (proposals_P4, which of them are there), best first."""
        best, first = [], 0
        for level, anchors_A4 in enumerate(levels):
            part = slice(first, first := first + len(anchors_A4))
            count = min(self.cfg.candidates, len(anchors_A4))
            score, index = jax.lax.top_k(scores_A[part], count)
            moved = boxes.decode(codes_A4[part][index], anchors_A4[index], ANCHOR_CODES)
            best.append((boxes.clip(moved, size_2), score, jnp.full(count, level)))
        box_A4, score_A, level_A = (jnp.concatenate(x) for x in zip(*best, strict=True))
        score_A = jnp.where(_is_larger(box_A4, SMALLEST_PROPOSAL), score_A, -jnp.inf)
        index_P = boxes.nms(box_A4, score_A, PROPOSAL_NMS, self.cfg.proposals, level_A)
        there_P = index_P >= 0
        return jnp.where(there_P[:, None], box_A4[index_P], 0), there_P

    def anchor_losses(
        self, key: Array, anchors_A4: Array, scores_A: Array, codes_A4: Array, truth: Truth
    ) -> tuple[Array, Array]:
        """Returns one image's (objectness, rpn_box), means over the sampled anchors."""
        cfg = self.cfg
        overlap_AG = jnp.where(truth.there_G[None], boxes.iou(anchors_A4, truth.boxes_G4), -1)
        match_A = boxes.match(overlap_AG, cfg.positive_iou, cfg.negative_iou, best=True)
        index_N, there_N = _draw(key, match_A >= 0, match_A == -1, cfg.anchor_samples, POSITIVE)
        match_N, score_N = match_A[index_N], scores_A[index_N]
        positive_N = there_N & (match_N >= 0)
        objectness_N = jax.nn.softplus(score_N) - jnp.where(positive_N, score_N, 0)
        code_N4 = boxes.encode(truth.boxes_G4[match_N], anchors_A4[index_N], ANCHOR_CODES)
        box_N = jnp.where(positive_N, _smooth_l1(codes_A4[index_N] - code_N4), 0)
        return _mean(objectness_N, there_N), _mean(box_N, there_N)

    # ---- second stage

    def sample(self, key: Array, proposals_P4: Array, there_P: Array, truth: Truth) -> Regions:
        """Draws one image's regions from its proposals and true boxes."""
        boxes_P4 = jnp.concatenate([proposals_P4, truth.boxes_G4])
        there_P = jnp.concatenate([there_P, truth.there_G])
        overlap_PG = jnp.where(truth.there_G[None], boxes.iou(boxes_P4, truth.boxes_G4), -1)
        match_P = boxes.match(overlap_PG, REGION_IOU, REGION_IOU, best=False)
        positive_P, count = match_P >= 0, self.cfg.region_samples
        index_R, there_R = _draw(
            key, there_P & positive_P, there_P & ~positive_P, count, FOREGROUND
        )
        match_R, boxes_R4 = match_P[index_R], jnp.where(there_R[:, None], boxes_P4[index_R], 0)
        names_R = jnp.where(there_R & (match_R >= 0), truth.labels_G[match_R] + 1, 0)
        codes_R4 = boxes.encode(truth.boxes_G4[match_R], boxes_R4, REGION_CODES)
        return Regions(boxes_R4, names_R, codes_R4, there_R)

    def pool(self, maps: Maps, regions_BR4: Array) -> Array:
        """Returns the features of regions, (B, R, SIDE, SIDE, C)."""
        if self.pyramid is not None:
            strides = list(maps)[:-1]  # regions are not read of the last level
            sides = regions_BR4[..., 2:] - regions_BR4[..., :2]
            side_BR = jnp.sqrt(jnp.maximum(sides[..., 0] * sides[..., 1], 1e-12))
            level_BR = jnp.floor(jnp.log2(side_BR / CANONICAL * (CANONICAL_STRIDE / FINEST)) + 1e-6)
            level_BR = jnp.clip(level_BR, 0, len(strides) - 1).astype(jnp.int32)
            read = functools.partial(
                boxes.roi_align_levels,
                size=SIDE,
                scales=[1 / stride for stride in strides],
                sampling=SAMPLING,
                aligned=False,  # as torchvision reads pyramids
            )
            return jax.vmap(read)([maps[stride] for stride in strides], regions_BR4, level_BR)
        ((stride, x_BHWC),) = maps.items()
        read = functools.partial(boxes.roi_pool, size=SIDE, scale=1 / stride)
        if self.cfg.pooling == "align":
            read = functools.partial(
                boxes.roi_align, size=SIDE, scale=1 / stride, sampling=SAMPLING, aligned=True
            )
        return jax.vmap(read)(x_BHWC, regions_BR4)

    # ---- what is learned, and what is detected

    def losses(self, batch: parts_.Batch, key: Array) -> dict[str, Array]:
        """Returns the images' losses, each float32 (B,): objectness, rpn_box, classification, box.

        batch: as of `Detector.loss`. It may have the member row, int32 (B,): the number of each
        image, which decides with `key` what is drawn for it.
        """
        labels_BG, boxes_BG4 = batch["labels"], batch["boxes"].astype(jnp.float32)
        truth = Truth(boxes_BG4, labels_BG, (labels_BG >= 0) & _is_larger(boxes_BG4, 0))
        row_B = batch.get("row", jnp.arange(labels_BG.shape[0]))
        keys_B = jax.vmap(functools.partial(jax.random.fold_in, key))(row_B)
        maps = self.maps(batch["images"], batch["sizes"])
        levels = self.anchors(maps)
        all_A4 = jnp.concatenate(levels)

        def first(
            key: Array, size_2: Array, truth: Truth, scores_A: Array, codes_A4: Array
        ) -> tuple[tuple[Array, Array], Regions]:
            keys = jax.random.split(key)
            losses = self.anchor_losses(keys[0], all_A4, scores_A, codes_A4, truth)
            scores_A, codes_A4 = jax.lax.stop_gradient((scores_A, codes_A4))
            proposals = self.propose(levels, scores_A, codes_A4, size_2)
            return losses, self.sample(keys[1], *proposals, truth)

        of_anchors, regions = jax.vmap(first)(keys_B, batch["sizes"], truth, *self.score(maps))
        logits_BRY, codes_BRY4 = self.head(self.pool(maps, regions.boxes_R4))
        of_regions = jax.vmap(_region_losses)(logits_BRY, codes_BRY4, regions)
        return dict(zip(TERMS, (*of_anchors, *of_regions), strict=True))

    def loss(self, batch: parts_.Batch, key: Array | None) -> LossSums:
        """Returns the sums of `losses` over the images whose member targets is not negative.

        key: of the step, which is not used: what is drawn follows the batch's member row.
        """
        counts_B = batch["targets"] >= 0
        losses = self.losses(batch, jax.random.key(DRAWS))
        sums = {name: jnp.where(counts_B, x_B, 0).sum() for name, x_B in losses.items()}
        return LossSums(sums, counts_B.sum())

    def predict(self, images_BHWC: Array, sizes_B2: Array) -> tuple[Array, Array, Array]:
        """Returns (boxes_BK4, scores_BK, labels_BK), by score; labels of -1 pad."""
        maps = self.maps(images_BHWC, sizes_B2)
        propose = functools.partial(self.propose, self.anchors(maps))
        regions_BP4, there_BP = jax.vmap(propose)(*self.score(maps), sizes_B2)
        logits_BPY, codes_BPY4 = self.head(self.pool(maps, regions_BP4))
        detect = functools.partial(_detections, self.cfg)
        return jax.vmap(detect)(logits_BPY, codes_BPY4, regions_BP4, there_BP, sizes_B2)


def _is_larger(boxes_4: Array, side: float) -> Array:
    return ((boxes_4[..., 2:] - boxes_4[..., :2]) > side).all(-1)


def _mean(x_N: Array, there_N: Array) -> Array:
    """Returns the mean of those that are there; 0 if none is."""
    return jnp.where(there_N, x_N, 0).sum() / jnp.maximum(there_N.sum(), 1).astype(jnp.float32)


def _smooth_l1(x_N4: Array) -> Array:
    """Returns the sums over the codes, (N,)."""
    size_N4 = jnp.abs(x_N4)
    return jnp.where(size_N4 < BETA, 0.5 * x_N4**2 / BETA, size_N4 - 0.5 * BETA).sum(-1)


def _draw(
    key: Array, positive_A: Array, negative_A: Array, count: int, share: float
) -> tuple[Array, Array]:
    """Draws rows: (indices (count,), which of them are there). At most count * share are positive;
    negative ones take the other places, as far as there are any."""
    total, draws_A = len(positive_A), jax.random.uniform(key, positive_A.shape)
    drawn, index = jax.lax.top_k(jnp.where(positive_A, draws_A, -1), min(int(count * share), total))
    chosen_A = jnp.zeros(total, bool).at[index].set(drawn >= 0)
    rank_A = jnp.where(chosen_A, 2 + draws_A, jnp.where(negative_A, draws_A, -1))
    rank, index = jax.lax.top_k(rank_A, min(count, total))
    return index, rank >= 0


def _region_losses(logits_RY: Array, codes_RY4: Array, regions: Regions) -> tuple[Array, Array]:
    """Returns one image's (classification, box), means over the sampled regions."""
    _, names_R, codes_R4, there_R = regions
    log_p_RY = jax.nn.log_softmax(logits_RY)
    classification_R = -jnp.take_along_axis(log_p_RY, names_R[:, None], 1)[:, 0]
    of_name_R4 = jnp.take_along_axis(codes_RY4, names_R[:, None, None], 1)[:, 0]
    box_R = jnp.where(names_R > 0, _smooth_l1(of_name_R4 - codes_R4), 0)
    return _mean(classification_R, there_R), _mean(box_R, there_R)


def _detections(
    cfg: FasterRcnnConfig,
    logits_PY: Array,
    codes_PY4: Array,
    regions_P4: Array,
    there_P: Array,
    size_2: Array,
) -> tuple[Array, Array, Array]:
    """Returns one image's (boxes_K4, scores_K, labels_K). Every region may be several classes."""
    scores_PY = jnp.where(there_P[:, None], jax.nn.softmax(logits_PY), 0)[:, 1:]
    boxes_PY4 = boxes.decode(codes_PY4[:, 1:], regions_P4[:, None], REGION_CODES)
    boxes_PY4 = boxes.clip(boxes_PY4, size_2)
    there_PY = (scores_PY > cfg.score) & _is_larger(boxes_PY4, SMALLEST_DETECTION)
    scores_N = jnp.where(there_PY, scores_PY, -jnp.inf).reshape(-1)
    scores_N, index_N = jax.lax.top_k(scores_N, min(LAST_CANDIDATES, scores_N.size))
    boxes_N4, labels_N = boxes_PY4.reshape(-1, 4)[index_N], index_N % cfg.classes
    index_K = boxes.nms(boxes_N4, scores_N, cfg.nms, cfg.detections, labels_N)
    there_K = index_K >= 0
    return (
        jnp.where(there_K[:, None], boxes_N4[index_K], 0),
        jnp.where(there_K, scores_N[index_K], 0),
        jnp.where(there_K, labels_N[index_K], -1),
    )


# ---- how it is trained, and how it is used


def parts(
    cfg: FasterRcnnConfig, layout: Layout | None = None, ops: Ops | None = None
) -> parts_.ModelParts:
    """Returns a detector as ModelParts. A batch has the members of `Detector.loss`, and targets,
    int32 (B,): 0 an image, -1 filling; and row, int32 (B,): the number of each image in the order
    of the data. Images may be uint8. layout, ops: not used, the code runs on complete weights."""
    return parts_.of_loss(lambda key: FasterRcnn(cfg, nnx.Rngs(params=key)))


def objective(sums: LossSums, total: Array) -> Array:
    """Returns what is minimised: the mean over images of the sum of all terms."""
    return sum(sums.terms[name] for name in TERMS) / total


class Detector:
    """A detector as functions of its parameters, a tree of float32 arrays."""

    def __init__(self, cfg: FasterRcnnConfig):
        """Makes no array."""
        graph = nnx.split(nnx.eval_shape(lambda: FasterRcnn(cfg, nnx.Rngs(0))))[0]

        def loss(params: Tree, batch: parts_.Batch, key: Array) -> tuple[Array, dict[str, Array]]:
            losses = nnx.merge(graph, params).losses(batch, key)
            means = {name: x_B.mean() for name, x_B in losses.items()}
            return sum(means.values(), jnp.zeros(())), means

        self.cfg = cfg
        self._init = jax.jit(
            lambda key: nnx.to_pure_dict(nnx.state(FasterRcnn(cfg, nnx.Rngs(params=key))))
        )
        self._loss = jax.jit(loss)
        self._predict = jax.jit(lambda params, *images: nnx.merge(graph, params).predict(*images))

    def init(self, key: Array) -> Tree:
        """Returns random parameters."""
        return self._init(key)

    def loss(self, params: Tree, batch: parts_.Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        """Returns (the mean over images of the sum of their losses, the mean of each loss).

        batch: images (B, H, W, 3), float32 0..1. boxes (B, G, 4), float32 pixels. labels (B, G),
        int32, -1: no box. sizes (B, 2), int32: the (height, width) that is not padding.
        key: of what is drawn. An image draws by its place in the batch.
        """
        return self._loss(params, dict(batch), key)

    def predict(
        self, params: Tree, images: Array, sizes: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Returns (boxes (B, K, 4), scores (B, K), labels (B, K)), by score; labels of -1 pad.

        images: as of `loss`. sizes: as of `loss`; None: the images have no padding.
        """
        if sizes is None:
            sizes = jnp.broadcast_to(jnp.array(images.shape[1:3])[None], (len(images), 2))
        return self._predict(params, images, sizes)


def detector(cfg: FasterRcnnConfig) -> Detector:
    """Returns the detector that a configuration describes."""
    return Detector(cfg)
