"""Torchvision's state dicts of detectors and of their backbones, and the leaves of a `FasterRcnn`.

The counterpart of names.py for models/faster_rcnn.py: ResNet and VGG16, as torchvision's
classifiers have them, and Faster R-CNN on a pyramid, in the first version (fasterrcnn_resnet50_fpn)
and the second (fasterrcnn_resnet50_fpn_v2). A batch norm becomes a scale and a shift; torchvision
orders a region's features by channel first. Class 0 is the background in both.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from megajax.core.errors import UserError
from megajax.models.faster_rcnn import SIDE
from megajax.models.resnet import BLOCKS, CHAINS, EPS, FINEST

Shapes = Mapping[str, tuple[int, ...]]
Kind = Literal["detector", "resnet", "vgg16"]

# A tensor that only this kind of network has, by its name in today's torchvision.
_MARKS: Mapping[Kind, str] = {
    "detector": "roi_heads.box_predictor.cls_score.weight",
    "resnet": "layer1.0.conv1.weight",
    "vgg16": "features.28.weight",
}
# Where programs keep the state dict: torchvision's references save {"model": ...}, DataParallel
# puts "module." before each name.
_HOMES = ("", "model.", "module.", "model.module.", "state_dict.", "state_dict.module.")
# Names before torchvision 0.13, which its published first version still has.
_OLD_NAMES = {"rpn.head.conv.": "rpn.head.conv.0.0."} | {
    f"backbone.fpn.{part}_blocks.{i}.": f"backbone.fpn.{part}_blocks.{i}.0."
    for part in ("inner", "layer")
    for i in range(4)
}
OF_CLASSES = ("head.name.", "head.code.")  # leaves whose shapes the number of classes decides


class StateDict(NamedTuple):
    """What a state dict is.

    kind: of network. names: {today's name: name in the file}. settings: the members of a
    FasterRcnnConfig that it decides. classes: without the background; None: a classifier's. eps: of
    its batch norms.
    """

    kind: Kind
    names: Mapping[str, str]
    settings: Mapping[str, Any]
    classes: int | None
    eps: float


class Source(NamedTuple):
    """How a leaf is made: from the tensors of these names, of one shape, by `make`."""

    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., np.ndarray]


def describe(shapes: Shapes) -> StateDict:
    """Returns what a file's tensors are. Raises: UserError when they are no network of these."""
    for home in _HOMES:
        inner = {n.removeprefix(home): n for n in shapes if n.startswith(home)}
        for kind, mark in _MARKS.items():
            if mark in inner:
                return _describe(kind, inner, shapes)
    raise UserError(
        "it is none of the networks of torchvision that are read: ResNet, VGG16 and Faster R-CNN "
        f"(it has none of {', '.join(_MARKS.values())})"
    )


def _describe(kind: Kind, inner: Mapping[str, str], shapes: Shapes) -> StateDict:
    modern, is_old = {}, False
    for name, stored in inner.items():
        old = next((o for o in _OLD_NAMES if name in (f"{o}weight", f"{o}bias")), None)
        is_old |= old is not None
        modern[name if old is None else name.replace(old, _OLD_NAMES[old])] = stored
    if kind == "vgg16":
        return StateDict(kind, modern, {"backbone": "vgg16", "norm": "none"}, None, EPS)
    body = "backbone.body." if kind == "detector" else ""
    settings: dict[str, Any] = {"backbone": _resnet(body, modern), "norm": "frozen"}
    classes = None
    if kind == "detector":
        first, heads = "roi_heads.box_head.fc6.weight", "plain"
        if first not in modern:
            first, heads = "roi_heads.box_head.5.weight", "deep"
        settings |= {"maps": "fpn", "heads": heads}
        if first in modern and shapes[modern[first]]:
            settings["hidden"] = shapes[modern[first]][0]
        scores = shapes[modern[_MARKS["detector"]]]
        if len(scores) != 2 or scores[0] < 2:
            raise UserError(
                f"{_MARKS['detector']} has the shape {list(scores)}, not that of classes"
            )
        classes = scores[0] - 1
    # The published first version was trained when torchvision's frozen norms added nothing to the
    # variance, and torchvision sets that for it (overwrite_eps). Newer ones have new names.
    frozen = f"{body}bn1.num_batches_tracked" not in modern
    return StateDict(kind, modern, settings, classes, 0.0 if is_old and frozen else EPS)


def _resnet(body: str, names: Mapping[str, str]) -> str:
    """Returns which ResNet it is, by its blocks. Raises: UserError for one that is not built."""
    pattern = re.compile(rf"{re.escape(body)}layer([1-4])\.(\d+)\.")
    blocks = {hit.groups() for hit in map(pattern.match, names) if hit is not None}
    depths = tuple(sum(stage == at for at, _ in blocks) for stage in "1234")
    deep = f"{body}layer1.0.conv3.weight" in names
    for name, expected in BLOCKS.items():
        if depths == expected and deep == (name != "resnet18"):
            return name
    raise UserError(
        f"it is a ResNet of {', '.join(map(str, depths))} blocks {'with' if deep else 'without'} "
        f"bottlenecks; {', '.join(BLOCKS)} can be read"
    )


def sources(state: StateDict, leaves: Shapes) -> dict[str, Source]:
    """Returns how the leaves of a detector are made, {our name: source}; a classifier's state dict
    has those of the backbone alone.

    leaves: {name: shape} of all parameters of a FasterRcnn with the settings of `state`.
    """
    made = {}
    for name, shape in leaves.items():
        *module, leaf = name.split(".")
        if state.kind != "detector" and module[0] != "backbone":
            continue
        theirs = _module(state, *module)
        if leaf in ("scale", "shift"):
            parts = ("weight", "running_var", "bias", "running_mean")
            fold = _scale if leaf == "scale" else _shift
            tensors = tuple(f"{theirs}.{part}" for part in parts)
            made[name] = Source(tensors, shape, functools.partial(fold, state.eps))
        elif leaf == "bias":
            made[name] = Source((f"{theirs}.bias",), shape, np.asarray)
        else:  # a kernel; torch has filters first, then channels, then the window
            rearrange = _convolution if len(shape) == 4 else np.transpose
            rearrange = _channels_last if name == "head.first.kernel" else rearrange
            stored = (shape[-1], shape[-2], *shape[:-2])
            made[name] = Source((f"{theirs}.weight",), stored, rearrange)
    return made


def is_needless(name: str, state: StateDict, settings: Mapping[str, Any]) -> bool:
    """Tells whether a detector has no use for a tensor: a counter, the layers of a classifier, and
    the last stage of a ResNet where the detector ends before it. name: today's."""
    if name.endswith(".num_batches_tracked"):
        return True
    if state.kind == "detector":
        return False
    is_cut = settings["maps"] != "fpn" and name.startswith("layer4.")
    return is_cut or name.startswith(("fc.", "classifier."))


def _module(state: StateDict, *path: str) -> str:
    """Returns torchvision's name of one of our modules."""
    body = "backbone.body." if state.kind == "detector" else ""
    places = {"conv": "0", "norm": "1"}
    match path:
        case "backbone", "stem", part:
            return body + {"conv": "conv1", "norm": "bn1"}[part]
        case "backbone", "stages", stage, block, "units", unit, part:
            layer = {"conv": "conv", "norm": "bn"}[part] + str(int(unit) + 1)
            return f"{body}layer{int(stage) + 1}.{block}.{layer}"
        case "backbone", "stages", stage, block, "shortcut", part:
            return f"{body}layer{int(stage) + 1}.{block}.downsample.{places[part]}"
        case "backbone", "units", unit, "conv":  # there, a ReLU is a layer too
            before = CHAINS["vgg16"][: int(unit)]
            return f"features.{sum(1 if layer.kind == 'pool' else 2 for layer in before)}"
        case "pyramid", "lateral" | "output" as part, stride, layer:
            blocks = "inner_blocks" if part == "lateral" else "layer_blocks"
            level = int(stride).bit_length() - FINEST.bit_length()
            return f"backbone.fpn.{blocks}.{level}.{places[layer]}"
        case "proposer", "units", unit, "conv":
            return f"rpn.head.conv.{unit}.0"
        case "proposer", "score" | "code" as part:
            return f"rpn.head.{'cls_logits' if part == 'score' else 'bbox_pred'}"
        case "head", "units", unit, layer:
            return f"roi_heads.box_head.{unit}.{places[layer]}"
        case "head", "first" | "second" as part:
            first = "fc6" if state.settings["heads"] == "plain" else "5"
            return f"roi_heads.box_head.{first if part == 'first' else 'fc7'}"
        case "head", "name" | "code" as part:
            return f"roi_heads.box_predictor.{'cls_score' if part == 'name' else 'bbox_pred'}"
    raise KeyError(".".join(path))


def _convolution(x: np.ndarray) -> np.ndarray:
    return x.transpose(2, 3, 1, 0)


def _scale(eps: float, weight: np.ndarray, variance: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return weight / np.sqrt(variance + np.float32(eps))


def _shift(
    eps: float, weight: np.ndarray, variance: np.ndarray, bias: np.ndarray, mean: np.ndarray
) -> np.ndarray:
    return bias - mean * _scale(eps, weight, variance)


def _channels_last(x: np.ndarray) -> np.ndarray:
    """Returns the matrix that reads pooled regions with the channels last, inputs first."""
    by_bins = x.reshape(len(x), -1, SIDE, SIDE).transpose(2, 3, 1, 0)
    return by_bins.reshape(-1, len(x))
