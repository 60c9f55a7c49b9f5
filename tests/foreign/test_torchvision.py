"""Torchvision's state dicts give its maps, boxes and scores (tests/golden/make_detection.py)."""

import dataclasses
import functools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.tree import named_leaves
from megajax.foreign import torchvision
from megajax.models import faster_rcnn
from megajax.models.faster_rcnn import FasterRcnnConfig
from tests import foreign_writer, torchvision_weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "detection_models.npz"


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """Returns the results of one network."""
    with np.load(GOLDEN) as cases:
        return {n.partition("/")[2]: cases[n] for n in cases if n.startswith(f"{name}/")}


@functools.cache
def state_dict(name: str) -> dict[str, np.ndarray]:
    """Returns the weights of one network under torchvision's names."""
    shapes = json.loads(golden(name)["state"].tobytes())
    return {n: torchvision_weights.tensor(n, tuple(shape)) for n, shape in shapes.items()}


def write(folder: pathlib.Path, state: dict[str, np.ndarray]) -> pathlib.Path:
    """Writes a state dict as one file of safetensors."""
    safetensors.numpy.save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def torch_file(state: dict[str, np.ndarray]) -> bytes:
    """Returns what torchvision's own training scripts save of a state dict."""
    value, members = {}, {}
    for i, (name, x) in enumerate(state.items()):
        strides = [math.prod(x.shape[d + 1 :]) for d in range(x.ndim)]
        members[str(i)] = x.astype(np.float32).tobytes()
        value[name] = foreign_writer.tensor(0, x.shape, tuple(strides), str(i), x.size)
    return foreign_writer.torch_zip({"model": value, "epoch": 3}, members)


def settings(backbone: str, **changes) -> FasterRcnnConfig:
    """Returns the configuration of a network of torchvision with four classes."""
    return FasterRcnnConfig(classes=4, **{"backbone": backbone, "norm": "frozen"} | changes)


def fresh(cfg: FasterRcnnConfig):
    """Returns parameters that no file gives."""
    return jax.tree.map(lambda x: jnp.full(x.shape, 7.0), faster_rcnn.parts(cfg).abstract)


def network(cfg: FasterRcnnConfig, params) -> faster_rcnn.FasterRcnn:
    """Returns the module with these parameters."""
    graph = nnx.split(nnx.eval_shape(lambda: faster_rcnn.FasterRcnn(cfg, nnx.Rngs(0))))[0]
    return nnx.merge(graph, params)


def assert_close(x_BHWC: jax.Array, expected: np.ndarray) -> None:
    """Compares the values of a map that make_detection.py keeps; the unit is their mean size."""
    x = np.asarray(x_BHWC).transpose(0, 3, 1, 2).reshape(-1)
    x = x[:: -(-x.size // 600)]
    np.testing.assert_allclose(x, expected, atol=1e-4 * np.abs(expected).mean(), rtol=1e-4)


BACKBONES = {
    "resnet18": ({"maps": "fpn"}, {4: "layer1", 8: "layer2", 16: "layer3", 32: "layer4"}),
    "resnet50": ({"maps": "fpn"}, {4: "layer1", 8: "layer2", 16: "layer3", 32: "layer4"}),
    "vgg16": ({"maps": "stride16", "norm": "none"}, {16: "features.29"}),
}


def test_a_classifier_gives_the_backbone_alone(tmp_path):
    cfg = settings("resnet18", hidden=16)
    old = fresh(cfg)
    loaded = torchvision.load_params(write(tmp_path, state_dict("resnet18")), cfg, old)
    before, after = dict(named_leaves(old)), dict(named_leaves(loaded.params))
    assert set(loaded.new) == {n for n in before if not n.startswith("backbone.")}
    assert {n for n in before if before[n] is after[n]} == set(loaded.new)
    assert torchvision.describe(tmp_path / "weights.safetensors").classes is None


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_gives_torchvisions_maps(name, tmp_path):
    changes, layers = BACKBONES[name]
    cfg = settings(name, hidden=16, **changes)
    params = torchvision.load_params(write(tmp_path, state_dict(name)), cfg, fresh(cfg)).params
    images = torchvision_weights.images(1, 64, 96)
    x = (images - np.float32(faster_rcnn.MEAN)) / np.float32(faster_rcnn.DEVIATION)
    maps = jax.jit(lambda params, x: network(cfg, params).backbone(x))(params, x)
    for stride, layer in layers.items():
        assert_close(maps[stride], golden(name)[layer])


@pytest.mark.parametrize("maps", ["stride8", "stride16"])
def test_a_backbone_that_ends_early_leaves_the_last_stage(maps, tmp_path):
    cfg = settings("resnet18", hidden=16, maps=maps)
    loaded = torchvision.load_params(write(tmp_path, state_dict("resnet18")), cfg, fresh(cfg))
    assert not any(n.startswith("backbone.") for n in loaded.new)


DETECTORS = {
    "fpn18": settings("resnet18", hidden=64, proposals=100),
    "v1": settings("resnet50"),
    "v2": settings("resnet50", heads="deep"),
}


@pytest.mark.parametrize(
    "name", ["fpn18", *(pytest.param(n, marks=pytest.mark.slow) for n in ("v1", "v2"))]
)
def test_a_detector_gives_torchvisions_boxes(name, tmp_path):
    """The pyramid, and 100 detections in each image; one image is smaller than its canvas."""
    cfg = DETECTORS[name]
    loaded = torchvision.load_params(write(tmp_path, state_dict(name)), cfg, fresh(cfg))
    assert loaded.new == ()
    images = torchvision_weights.images(2, 128, 160)
    sizes = jnp.broadcast_to(jnp.array([128, 160]), (2, 2))
    levels = jax.jit(lambda *x: network(cfg, x[0]).maps(*x[1:]))(loaded.params, images, sizes)
    for key, x_BHWC in zip("0123", levels.values(), strict=False):
        assert_close(x_BHWC, golden(name)[f"level{key}"])
    assert_close(levels[64], golden(name)["levelpool"])
    images = np.concatenate([images, images[1:]])
    images[2, 112:], images[2, :, 144:] = 0.7, 0.2
    sizes = jnp.array([[128, 160], [128, 160], [112, 144]])
    boxes, scores, labels = faster_rcnn.detector(cfg).predict(loaded.params, images, sizes)
    for i in range(3):
        expected = {n: golden(name)[f"{n}{i}"] for n in ("boxes", "scores", "labels")}
        np.testing.assert_allclose(scores[i], expected["scores"], atol=1e-3)
        # Scores as near as rounding may change places, so each box has to be some box.
        near = np.abs(np.asarray(boxes[i])[:, None] - expected["boxes"][None]).max(-1)
        near += 10 * (np.asarray(labels[i])[:, None] + 1 != expected["labels"][None])
        print(
            name,
            i,
            len(near),
            near.min(1).max(),
            np.abs(np.asarray(scores[i]) - expected["scores"]).max(),
        )
        assert (near.min(1) < 1e-3).all() and (near.min(0) < 1e-3).all()


def test_another_number_of_classes_begins_their_predictions_anew(tmp_path):
    cfg = dataclasses.replace(DETECTORS["fpn18"], classes=7)
    old = fresh(cfg)
    loaded = torchvision.load_params(write(tmp_path, state_dict("fpn18")), cfg, old)
    assert sorted(loaded.new) == [
        f"head.{part}.{leaf}" for part in ("code", "name") for leaf in ("bias", "kernel")
    ]
    stays = {
        n for (n, a), (_, b) in zip(*map(named_leaves, (old, loaded.params)), strict=True) if a is b
    }
    assert stays == set(loaded.new)


def test_a_file_of_torch_with_old_names(tmp_path):
    """Torchvision's published first version has these; its frozen norms add nothing to variances.

    The file is what its training scripts save: the state dict is a member, beside others.
    """
    state = dict(state_dict("fpn18"))
    variance = "backbone.body.layer2.0.bn1.running_var"
    state[variance] = np.full_like(state[variance], 1e-5)
    cfg = DETECTORS["fpn18"]
    new = torchvision.load_params(write(tmp_path, state), cfg, fresh(cfg)).params
    renamed = {re.sub(r"(_blocks\.\d|head\.conv)(\.0)+\.", r"\1.", n): x for n, x in state.items()}
    assert {"rpn.head.conv.weight", "backbone.fpn.layer_blocks.3.bias"} <= renamed.keys()
    (tmp_path / "model.pth").write_bytes(torch_file(renamed))
    old = torchvision.load_params(tmp_path / "model.pth", cfg, fresh(cfg)).params
    for (name, a), (_, b) in zip(*map(named_leaves, (old, new)), strict=True):
        if not name.endswith(("scale", "shift")):
            np.testing.assert_array_equal(a, b)
    weight = state[variance.replace("running_var", "weight")]
    for params, eps in ((old, 0), (new, 1e-5)):
        scale = dict(named_leaves(params))["backbone.stages.1.0.units.0.norm.scale"]
        np.testing.assert_allclose(scale, weight / np.sqrt(1e-5 + eps), rtol=1e-5)
    described = torchvision.describe(tmp_path / "model.pth")
    assert described.classes == 4
    assert (
        dataclasses.replace(FasterRcnnConfig(classes=4, proposals=100), **described.settings) == cfg
    )


def without(name: str):
    return lambda state: {n: x for n, x in state.items() if n != name}


def changed(name: str, change):
    return lambda state: state | {name: change(state[name])}


MARK = "roi_heads.box_predictor.cls_score.weight"
CONV, VARIANCE = "backbone.body.layer2.0.conv1.weight", "backbone.body.bn1.running_var"
BAD_STATES = {
    "lacks": (without(CONV), f"it lacks 1 tensors of the detector: {CONV}"),
    "has more": (
        lambda state: state | {"roi_heads.mask_head.0.weight": np.ones(3, np.float32)},
        "it has 1 that the detector has not: roi_heads.mask_head.0.weight",
    ),
    "shape": (
        changed(CONV, lambda x: x[:5]),
        f"{CONV} has the shape [5, 64, 3, 3], not [128, 64, 3, 3]",
    ),
    "type": (changed(CONV, lambda x: x.astype(np.int32)), f"{CONV} is int32; weights are of a"),
    "NaN": (changed(CONV, lambda x: x * np.nan), f"{CONV} give weights that are not finite"),
    "variance": (changed(VARIANCE, lambda x: -x), "give weights that are not finite"),
    "other": (lambda state: {"conv.weight": np.ones(3, np.float32)}, "none of the networks of"),
    "depth": (
        lambda state: {n: x for n, x in state.items() if "layer3.1." not in n},
        "it is a ResNet of 2, 2, 1, 2 blocks without bottlenecks; resnet18, resnet50, resnet101",
    ),
    "first": (
        without("roi_heads.box_head.fc6.weight"),
        "which model.heads=plain cannot take; give --model.heads=deep",
    ),
    "scalar": (
        changed(MARK, lambda x: np.array(1.5)),
        f"{MARK} has the shape [], not that of classes",
    ),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_file_that_does_not_fit_is_refused_by_name(case, tmp_path):
    change, message = BAD_STATES[case]
    cfg = DETECTORS["fpn18"]
    path = write(tmp_path, change(state_dict("fpn18")))
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        torchvision.load_params(path, cfg, fresh(cfg))
    assert str(path) in str(raised.value) and "--init_from" in str(raised.value)


@pytest.mark.parametrize(
    "changes,flags",
    [
        ({"backbone": "resnet50"}, "--model.backbone=resnet18"),
        ({"norm": "group"}, "--model.norm=frozen"),
        ({"width": 0.5, "hidden": 32}, "--model.hidden=64 --model.width=1.0"),
    ],
)
def test_a_model_of_another_shape_is_told_its_flags(changes, flags, tmp_path):
    cfg = dataclasses.replace(DETECTORS["fpn18"], **changes)
    with pytest.raises(UserError, match=re.escape(f"cannot take; give {flags}, or leave")):
        torchvision.load_params(write(tmp_path, state_dict("fpn18")), cfg, {})


def test_a_file_that_wants_code_run_or_is_cut_is_refused(tmp_path):
    cfg, path = DETECTORS["fpn18"], tmp_path / "model.pth"
    run = foreign_writer.Object(foreign_writer.Name("os", "system"), ("touch run",))
    path.write_bytes(foreign_writer.torch_zip({MARK: run}))
    with pytest.raises(UserError, match="os.system"):
        torchvision.load_params(path, cfg, {})
    path.write_bytes(torch_file({MARK: np.ones((2, 3))})[:-100])
    with pytest.raises(UserError, match="model.pth"):
        torchvision.load_params(path, cfg, {})
    with pytest.raises(UserError, match="there is no such file"):
        torchvision.load_params(tmp_path / "none.pth", cfg, {})
