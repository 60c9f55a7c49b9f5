"""Makes tests/golden/detection_*.npz: what torchvision computes of boxes, and with its detectors.

Run it in a separate environment (it needs torchvision, which megajax does not have):

    python -m venv tv && tv/bin/pip install torch torchvision
    PYTHONPATH=. tv/bin/python tests/golden/make_detection.py

detection_boxes.npz: a member NAME/MEMBER is an argument or a result of one case, which
tests/layers/test_image_boxes.py reads. detection_models.npz: the names and shapes of each state
dict, and results; tests/torchvision_weights.py has the weights and the images. Made with torch
2.15.0 and torchvision 0.29.2 on a CPU.
"""

import json
import pathlib

import numpy as np
import torch
from torch import nn
from torchvision import models, ops
from torchvision.models import detection
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops.boxes import _batched_nms_vanilla

from tests import torchvision_weights

FOLDER = pathlib.Path(__file__).parent


def main() -> None:
    """Writes both files."""
    rng = np.random.default_rng(20261129)
    cases = codes(rng) | anchors() | suppression(rng) | pooling(rng) | matching(rng)
    np.savez_compressed(FOLDER / "detection_boxes.npz", **cases)
    np.savez_compressed(FOLDER / "detection_models.npz", **backbones(), **detectors())


def scene(rng: np.random.Generator, count: int, side: float = 100) -> np.ndarray:
    """Returns boxes (count, 4) in groups of six that overlap; some leave the square."""
    centres = np.repeat(rng.uniform(0, side, (-(-count // 6), 2)), 6, 0)[:count]
    centres = centres + rng.normal(0, side / 30, centres.shape)
    sides = rng.uniform(side / 20, side / 3, (count, 2))
    return np.concatenate([centres - sides / 2, centres + sides / 2], 1).astype(np.float32)


def codes(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """IoU, codes and clipped boxes."""
    a, b = torch.tensor(scene(rng, 24)), torch.tensor(scene(rng, 18))
    anchors, weights = torch.tensor(scene(rng, 24)), (10.0, 10.0, 5.0, 5.0)
    deltas = torch.tensor(rng.normal(0, 3, (24, 4)).astype(np.float32))
    deltas[:4] *= 20  # sides beyond the limit
    coder = BoxCoder(weights)
    cases = {
        "iou/a": a,
        "iou/b": b,
        "iou/result": ops.box_iou(a, b),
        "codes/boxes": a,
        "codes/anchors": anchors,
        "codes/weights": torch.tensor(weights),
        "codes/encoded": coder.encode_single(a, anchors),
        "codes/deltas": deltas,
        "codes/decoded": coder.decode_single(deltas, anchors),
        "clip/boxes": a,
        "clip/size": torch.tensor([60, 90]),
        "clip/result": ops.clip_boxes_to_image(a, (60, 90)),
    }
    return {name: x.numpy() for name, x in cases.items()}


def anchors() -> dict[str, np.ndarray]:
    """Anchors of one map and of a pyramid, with strides that differ by axis."""
    levels = [
        ((3, 4), (16, 16), (128, 256, 512), (0.5, 1.0, 2.0)),
        ((6, 5), (4, 4), (32,), (0.5, 1.0, 2.0)),
        ((2, 3), (33, 31), (5, 7, 20.5), (0.3, 1.0)),
    ]
    cases = {}
    for i, (shape, stride, sizes, ratios) in enumerate(levels):
        made = AnchorGenerator((sizes,), (ratios,))
        stride = [torch.tensor(s) for s in stride]
        result = made.grid_anchors([list(shape)], [stride])[0].numpy()
        members = {"shape": shape, "stride": stride, "sizes": sizes, "ratios": ratios}
        cases |= {f"anchors{i}/{name}": np.asarray(x) for name, x in members.items()}
        cases[f"anchors{i}/result"] = result
    return cases


def suppression(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Boxes that NMS leaves, with distinct scores, without labels and by label."""
    cases = {}
    for i, (count, threshold) in enumerate([(60, 0.3), (128, 0.5), (128, 0.7)]):
        boxes = scene(rng, count)
        scores = (rng.permutation(count) / count).astype(np.float32)
        labels = rng.integers(0, 4, count).astype(np.int32)
        b, s, c = (torch.tensor(x) for x in (boxes, scores, labels))
        members = {"boxes": boxes, "scores": scores, "labels": labels, "threshold": threshold}
        cases |= {f"nms{i}/{name}": np.asarray(x) for name, x in members.items()}
        cases[f"nms{i}/plain"] = ops.nms(b, s, threshold).numpy()
        cases[f"nms{i}/by_label"] = _batched_nms_vanilla(b, s, c.long(), threshold).numpy()
    return cases


def pooling(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Features of boxes inside, partly outside and outside of a map, and of no size."""
    features = rng.normal(size=(9, 13, 2)).astype(np.float32)  # stride 8: 72 x 104 pixels
    inside = "10 12 50 60, 0 0 104 72, 3.3 7.7 4.9 70.1, 90 60 103 71, 0 0 1 1"
    across = (
        "-20 5 30 40, 60 -30 140 20, 80 50 130 110, -60 -60 160 130, -8 -8 8 8, -12.1 64 4 79.9"
    )
    outside = "-90 -90 -40 -40, 200 10 230 50"
    no_size = "20 20 20 20, 30.5 10 30.5 50, 50 40 30 20"
    listed = [row.split() for row in ", ".join([inside, across, outside, no_size]).split(", ")]
    boxes = np.concatenate([np.array(listed, np.float32), scene(rng, 8)])
    rows = torch.tensor(np.concatenate([np.zeros((len(boxes), 1), np.float32), boxes], 1))
    cases = {"roi/features": features, "roi/boxes": boxes, "roi/scale": np.array(1 / 8)}
    plans = [
        ("align_aligned", lambda f: ops.roi_align(f, rows, 4, 1 / 8, 2, True)),
        ("align_plain", lambda f: ops.roi_align(f, rows, 4, 1 / 8, 2, False)),
        ("align_three", lambda f: ops.roi_align(f, rows, 3, 1 / 8, 3, True)),
        ("pool", lambda f: ops.roi_pool(f, rows, 4, 1 / 8)),
    ]
    for name, compute in plans:
        leaf = torch.tensor(features).permute(2, 0, 1)[None].requires_grad_()
        result = compute(leaf)
        cotangent = rng.normal(size=result.shape).astype(np.float32)
        result.backward(torch.tensor(cotangent))
        assert leaf.grad is not None
        cases[f"roi/{name}"] = result.detach().permute(0, 2, 3, 1).numpy()
        cases[f"roi/{name}_cotangent"] = cotangent.transpose(0, 2, 3, 1)
        cases[f"roi/{name}_gradient"] = leaf.grad[0].permute(1, 2, 0).numpy()
    return cases


def matching(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Matches of anchors that overlap a few true boxes; one true box overlaps none."""
    truths = np.concatenate([scene(rng, 7), np.array([[900, 900, 950, 950]], np.float32)])
    iou = ops.box_iou(torch.tensor(truths), torch.tensor(scene(rng, 120)))
    iou[:3, 5] = iou[:3].max()  # a row that is the best of three columns
    cases = {"match/iou": iou.T.numpy()}
    for best in (False, True):
        for rows, name in ((slice(0, 7), "near"), (slice(0, 8), "far")):
            matched = Matcher(0.5, 0.3, best)(iou[rows].clone()).numpy()
            cases[f"match/{name}_{'best' if best else 'plain'}"] = matched
    return cases


def filled(module: nn.Module) -> tuple[nn.Module, np.ndarray]:
    """Returns a module for inference with its weights, and its names and shapes as JSON."""
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    state = {n: torch.tensor(torchvision_weights.tensor(n, s)) for n, s in shapes.items()}
    module.load_state_dict(state)
    return module.eval(), np.frombuffer(json.dumps(shapes).encode(), np.uint8)


def sample(x: torch.Tensor) -> np.ndarray:
    """Returns at most 600 values of a map (B, C, H, W), evenly spaced in its memory."""
    return x.reshape(-1)[:: -(-x.numel() // 600)].numpy()


@torch.no_grad()
def backbones() -> dict[str, np.ndarray]:
    """Maps of classifiers' convolutions, of an image of 64 x 96 pixels."""
    cases, read = {}, ("layer1", "layer2", "layer3", "layer4")
    plans = [("resnet18", read), ("resnet50", read), ("vgg16", ("features.29",))]
    for name, layers in plans:
        module, cases[f"{name}/state"] = filled(getattr(models, name)(weights=None))
        for layer in layers:
            module.get_submodule(layer).register_forward_hook(
                lambda _, __, x, key=f"{name}/{layer}": cases.update({key: sample(x)})
            )
        images = torch.tensor(torchvision_weights.images(1, 64, 96)).permute(0, 3, 1, 2)
        transform = detection.transform.GeneralizedRCNNTransform
        mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        module(transform(64, 96, mean, std)(list(images))[0].tensors)
    return cases


@torch.no_grad()
def detectors() -> dict[str, np.ndarray]:
    """Detections in two images of 128 x 160 pixels, and the levels of the pyramid."""
    # Boxes of 64-bit and 32-bit programs differ by less than 1e-4 pixels with this seed.
    small = resnet_fpn_backbone(backbone_name="resnet18", weights=None)
    head = {
        "box_head": detection.faster_rcnn.TwoMLPHead(256 * 7 * 7, 64),
        "box_predictor": detection.faster_rcnn.FastRCNNPredictor(64, 5),
        "rpn_post_nms_top_n_test": 100,
    }
    settings = {"num_classes": 5, "min_size": 128, "max_size": 160}
    without = {"weights": None, "weights_backbone": None}
    plans = {
        "fpn18": detection.FasterRCNN(small, **(settings | {"num_classes": None} | head)),
        "v1": detection.fasterrcnn_resnet50_fpn(**without, **settings),
        "v2": detection.fasterrcnn_resnet50_fpn_v2(**without, **settings),
    }
    cases = {}
    images = list(torch.tensor(torchvision_weights.images(2, 128, 160)).permute(0, 3, 1, 2))
    for name, module in plans.items():
        module, cases[f"{name}/state"] = filled(module)
        module.transform.resize = lambda image, target: (image, target)
        levels = module.backbone(module.transform(images)[0].tensors)
        cases |= {f"{name}/level{key}": sample(x) for key, x in levels.items()}
        # The third image is on a canvas that is larger than it.
        detections = module(images) + module([images[0], images[1][:, :112, :144]])[1:]
        for i, detected in enumerate(detections):
            cases |= {f"{name}/{member}{i}": x.numpy() for member, x in detected.items()}
    return cases


if __name__ == "__main__":
    main()
