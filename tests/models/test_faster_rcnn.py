"""The two-stage detector: shapes, awkward images, what a loss depends on, and learning.

Sizes of the published networks are compared with torchvision's own numbers (0.29, the `num_params`
of its weights, which leave out the buffers of frozen batch norms).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.tree import count, named_leaves
from megajax.cost.base import train_flops_per_token
from megajax.layers import boxes
from megajax.models import faster_rcnn
from megajax.models.faster_rcnn import FasterRcnn, FasterRcnnConfig, detector
from megajax.models.resnet import GroupNorm, backbone

SIDE, CLASSES, G = 48, 3, 4
TINY = dataclasses.replace(
    FasterRcnnConfig.tiny(classes=CLASSES), hidden=32, anchor_sizes="12,20", candidates=40
)
LEVELS = dict(maps="fpn", anchor_sizes="8,16,24,32")


@functools.cache
def tiny():
    """Returns (the detector, its parameters)."""
    model = detector(TINY)
    return model, model.init(jax.random.key(0))


@functools.cache
def learner():
    """Returns (params, batch, key) -> ((loss, its terms), gradients), compiled."""
    return jax.jit(jax.value_and_grad(tiny()[0].loss, has_aux=True))


@functools.cache
def module():
    """Returns the detector as a module."""
    graph = nnx.split(nnx.eval_shape(lambda: FasterRcnn(TINY, nnx.Rngs(0))))[0]
    return nnx.merge(graph, tiny()[1])


def scenes(rows, seed=0, side=SIDE):
    """Squares of CLASSES colours on noise."""
    random = np.random.default_rng(seed)
    images = random.random((rows, side, side, 3)).astype(np.float32) * 0.4
    corners, labels = np.zeros((rows, G, 4), np.float32), np.full((rows, G), -1, np.int32)
    for row in range(rows):
        for i in range(random.integers(1, 3)):
            size = random.integers(10, 22)
            x, y = random.integers(0, side - size, 2)
            labels[row, i] = random.integers(0, CLASSES)
            corners[row, i] = x, y, x + size, y + size
            images[row, y : y + size, x : x + size, labels[row, i]] += 0.6
    sizes = np.full((rows, 2), side, np.int32)
    return {"images": images, "boxes": corners, "labels": labels, "sizes": sizes}


def picked(batch, rows):
    return {name: x[np.array(rows)] for name, x in batch.items()}


@functools.cache
def compiled_losses():
    return jax.jit(module().losses)


def image_losses(batch):
    """Returns the loss of each image."""
    return sum(np.asarray(x) for x in compiled_losses()(batch, jax.random.key(1)).values())


def test_a_batch_has_a_loss_gradients_and_detections():
    model, params = tiny()
    batch = scenes(3)
    assert all(x.dtype == jnp.float32 for _, x in named_leaves(params))
    (total, parts), gradients = learner()(params, batch, jax.random.key(1))
    assert {*parts} == {"objectness", "rpn_box", "classification", "box"}
    assert total == pytest.approx(sum(map(float, parts.values())), rel=1e-6)
    # An untrained network says nothing: log 2 for each anchor, log (classes + 1) for each region.
    assert parts["objectness"] == pytest.approx(np.log(2), abs=0.1)
    assert parts["classification"] == pytest.approx(np.log(CLASSES + 1), abs=0.2)
    for name, gradient in named_leaves(gradients):
        assert np.isfinite(gradient).all() and np.any(gradient), name
    corners, scores, labels = model.predict(params, batch["images"])
    K = TINY.detections
    assert (corners.shape, scores.shape, labels.shape) == ((3, K, 4), (3, K), (3, K))
    assert (np.diff(scores) <= 0).all()
    there = np.asarray(labels) >= 0
    assert there.any() and (np.asarray(scores)[there] > TINY.score).all()
    assert (np.diff(there.astype(int)) <= 0).all()  # -1 stands last
    assert not np.asarray(scores)[~there].any() and not np.asarray(corners)[~there].any()
    assert np.asarray(corners).min() >= 0 and np.asarray(corners).max() <= SIDE
    (drawn, _), _ = learner()(params, batch, jax.random.key(2))
    assert drawn != total and drawn == pytest.approx(float(total), rel=0.1)  # other samples


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        LEVELS,
        dict(backbone="zf", width=0.1, pooling="pool", maps="stride16"),
        dict(backbone="vgg16", width=0.1, norm="none"),
        dict(backbone="resnet50", width=0.1, norm="frozen", heads="deep", **LEVELS),
    ],
    ids=str,
)
def test_every_kind_of_network_has_gradients(changes):
    if changes.get("backbone") == "resnet50":
        changes = changes | {"anchor_sizes": "8,16,24,32,40"}
    model = detector(dataclasses.replace(TINY, **changes))
    params = model.init(jax.random.key(0))
    gradients = jax.grad(lambda w: model.loss(w, scenes(1), jax.random.key(1))[0])(params)
    for name, gradient in named_leaves(gradients):
        assert np.isfinite(gradient).all(), name
        is_frozen = changes.get("norm") == "frozen" and ".norm." in name
        assert np.any(gradient) != is_frozen, name


AWKWARD = {
    "no object": lambda batch: batch["labels"].fill(-1),
    "no width": lambda batch: np.copyto(batch["boxes"][..., 2], batch["boxes"][..., 0]),
    "no area": lambda batch: np.copyto(batch["boxes"][..., 2:], batch["boxes"][..., :2]),
    "a thousandth of a pixel": lambda batch: np.copyto(
        batch["boxes"][..., 2], batch["boxes"][..., 0] + 1e-3
    ),
    "turned": lambda batch: np.copyto(batch["boxes"], batch["boxes"][..., [2, 3, 0, 1]]),
    "outside": lambda batch: np.add(batch["boxes"], 500, out=batch["boxes"]),
    "only padding": lambda batch: batch["sizes"].fill(0),
    "one pixel": lambda batch: batch["sizes"].fill(1),
    "all boxes the same": lambda batch: batch["boxes"].__setitem__(..., [4, 4, 30, 30]),
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_images_have_finite_losses_and_gradients(kind):
    model, params = tiny()
    batch = scenes(3)
    AWKWARD[kind](batch)
    (total, parts), gradients = learner()(params, batch, jax.random.key(1))
    assert np.isfinite(total) and total > 0
    for name, gradient in named_leaves(gradients):
        assert np.isfinite(gradient).all(), name
    if kind in ("no object", "no width", "no area", "turned"):
        assert parts["rpn_box"] == parts["box"] == 0  # no box is there to move one to
    *_, labels = model.predict(params, batch["images"], batch["sizes"])
    if kind == "only padding":
        assert (np.asarray(labels) == -1).all()


def test_an_images_loss_depends_on_its_row_alone():
    """Not on its neighbours, nor on the batch that it is in: meshes and micro-batches agree."""
    batch = scenes(3) | {"row": np.array([70, 3, 12], np.int32)}
    together = image_losses(batch)
    np.testing.assert_allclose(image_losses(picked(batch, [2, 0, 1])), together[[2, 0, 1]], 1e-5)
    np.testing.assert_allclose(image_losses(picked(batch, [1])), together[[1]], 1e-5)
    other = image_losses(batch | {"row": np.array([70, 4, 12], np.int32)})
    assert other[1] != together[1] and other[0] == together[0] and other[2] == together[2]
    noisy = batch | {"images": batch["images"].copy()}
    noisy["images"][0] = 1 - noisy["images"][0]
    np.testing.assert_allclose(image_losses(noisy)[1:], together[1:], 1e-5)
    # The order of annotations says nothing.
    turned = batch | {name: batch[name][:, ::-1] for name in ("boxes", "labels")}
    np.testing.assert_allclose(image_losses(turned), together, 1e-5)


def test_the_padding_of_a_canvas_says_nothing():
    """Whatever it holds; and no detection is in it."""
    model, params = tiny()
    batch = scenes(3) | {"row": np.arange(3, dtype=np.int32)}
    batch["sizes"] = np.array([[32, 24], [20, 48], [48, 48]], np.int32)
    noisy = batch["images"].copy()
    for image, (height, width) in zip(noisy, batch["sizes"], strict=True):
        image[height:], image[:, width:] = 7.0, -3.0
    losses = image_losses(batch)
    np.testing.assert_array_equal(image_losses(batch | {"images": noisy}), losses)
    corners, _, labels = map(np.asarray, model.predict(params, noisy, batch["sizes"]))
    for image_corners, names, (height, width) in zip(corners, labels, batch["sizes"], strict=True):
        assert (names >= 0).any()
        assert (image_corners[:, 2] <= width).all() and (image_corners[:, 3] <= height).all()


def test_rows_that_fill_a_batch_do_not_count():
    batch = scenes(3) | {"row": np.arange(3, dtype=np.int32), "targets": np.int32([0, -1, 0])}
    sums = jax.jit(module().loss)(batch, None)
    each = compiled_losses()(
        {name: x for name, x in batch.items() if name != "targets"},
        jax.random.key(faster_rcnn.DRAWS),
    )
    assert sums.count == 2
    for name, value in each.items():
        assert sums.terms[name] == pytest.approx(float(value[0] + value[2]), rel=1e-6)
    total = sum(float(value[0] + value[2]) for value in each.values())
    assert faster_rcnn.objective(sums, 2.0) == pytest.approx(total / 2, rel=1e-6)


def test_images_may_be_bytes():
    batch = scenes(2)
    as_bytes = np.round(batch["images"].clip(0, 1) * 255).astype(np.uint8)
    of_bytes, of_floats = (
        module().maps(jnp.array(x), jnp.array(batch["sizes"]))[8]
        for x in (as_bytes, as_bytes.astype(np.float32) / 255)
    )
    np.testing.assert_allclose(of_bytes, of_floats, atol=1e-5)


def test_bfloat16_computes_nearly_the_same():
    _, params = tiny()
    batch = scenes(3)
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim > 1 else w, params)
    (loss, _), gradients = learner()(params, batch, jax.random.key(1))
    (narrow_loss, _), narrow_gradients = learner()(narrow, batch, jax.random.key(1))
    assert narrow_loss == pytest.approx(float(loss), rel=0.02)
    narrow_leaves = named_leaves(narrow_gradients)
    for (name, a), (_, b) in zip(named_leaves(gradients), narrow_leaves, strict=True):
        error = np.linalg.norm(np.asarray(b, np.float32) - np.asarray(a))
        assert error < 0.3 * np.linalg.norm(a), name


def test_what_regions_learn_is_drawn_as_the_paper_says():
    """At most a quarter are objects, true boxes are among them, and a region's code leads from it
    to its true box."""
    cfg = dataclasses.replace(TINY, region_samples=8, proposals=20)
    module = FasterRcnn(cfg, nnx.Rngs(0))
    random = np.random.default_rng(0)
    truth_G4 = jnp.float32([[4, 4, 20, 20], [25, 20, 45, 44], [0, 0, 9, 9]])
    truth = faster_rcnn.Truth(truth_G4, jnp.int32([2, 0, -1]), jnp.array([True, True, False]))
    near_P4 = truth_G4[:2] + random.uniform(-1, 1, (2, 4)).astype(np.float32)
    near_P4 = jnp.concatenate([truth_G4[:2], near_P4])
    far_P4 = jnp.float32([[30, 0, 40, 10]] * 16)
    proposals_P4 = jnp.concatenate([near_P4, far_P4])
    there_P = jnp.arange(20) < 18
    sample = jax.jit(lambda key: module.sample(key, proposals_P4, there_P, truth))
    for seed in range(5):
        regions = sample(jax.random.key(seed))
        names_R = np.asarray(regions.names_R)
        assert regions.there_R.all() and (names_R > 0).sum() == 2
        for corners, name, code in zip(regions.boxes_R4, names_R, regions.codes_R4, strict=True):
            if name:
                moved = boxes.decode(code, corners, faster_rcnn.REGION_CODES)
                np.testing.assert_allclose(moved, truth_G4[{3: 0, 1: 1}[int(name)]], atol=1e-3)
            else:
                np.testing.assert_array_equal(corners, far_P4[0])


def test_detections_of_each_class_by_hand():
    """Three regions, two of them the same: a class drops overlaps of its own boxes only, a region
    may be two classes, and the background is none."""
    cfg = dataclasses.replace(TINY, classes=2, score=0.2, detections=6)
    chances_PY = jnp.float32([[0.1, 0.5, 0.4], [0.05, 0.6, 0.35], [0.7, 0.1, 0.2], [0.0, 1.0, 0]])
    regions_P4 = jnp.float32([[0, 0, 10, 10], [0, 0, 10, 11], [20, 20, 30, 60], [5, 5, 9, 9]])
    corners, scores, labels = faster_rcnn._detections(
        cfg,
        jnp.log(chances_PY + 1e-9),
        jnp.zeros((4, 3, 4)),
        regions_P4,
        jnp.array([True, True, True, False]),
        jnp.int32([40, 40]),
    )
    np.testing.assert_array_equal(labels, [0, 1, -1, -1, -1, -1])
    np.testing.assert_allclose(scores, [0.6, 0.4, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(corners[:2], [[0, 0, 10, 11], [0, 0, 10, 10]])
    low = dataclasses.replace(cfg, score=0.15)
    corners, _, labels = faster_rcnn._detections(
        low,
        jnp.log(chances_PY + 1e-9),
        jnp.zeros((4, 3, 4)),
        regions_P4,
        jnp.array([True, True, True, False]),
        jnp.int32([40, 40]),
    )
    np.testing.assert_array_equal(labels[:3], [0, 1, 1])
    np.testing.assert_array_equal(corners[2], [20, 20, 30, 40])  # cut at the image's border


def test_a_pyramid_reads_each_region_at_the_level_of_its_area():
    """Equation 1 of arXiv 1612.03144, and the pooling of that map alone."""
    cfg = dataclasses.replace(TINY, **LEVELS)
    module = FasterRcnn(cfg, nnx.Rngs(0))
    random = np.random.default_rng(0)
    maps = {
        stride: jnp.float32(random.standard_normal((1, 512 // stride, 512 // stride, 4)))
        for stride in (4, 8, 16, 32)
    }
    regions = jnp.float32([[3, 5, 60, 80], [8, 8, 240, 120], [0, 0, 230, 230], [0, 0, 512, 512]])
    pooled = jax.jit(module.pool)(maps, regions[None])[0]
    align = jax.jit(boxes.roi_align, static_argnums=(2, 4, 5))
    # Sides 65, 161, 230, 512; 224 is read at stride 16, half of that at 8; 32 is no level here.
    for i, stride in enumerate((4, 8, 16, 16)):
        alone = align(maps[stride][0], regions[i : i + 1], 7, 1 / stride, 2, False)
        np.testing.assert_allclose(pooled[i], alone[0], atol=1e-5)


def test_networks_have_the_sizes_of_the_published_ones():
    def size(cfg):
        return count(faster_rcnn.parts(cfg).abstract)

    frozen = FasterRcnnConfig(classes=90, norm="frozen")
    norms = 2 * 26560  # scale and shift of ResNet-50's channels: buffers there, parameters here
    assert size(frozen) == 41_755_286 + norms  # FasterRCNN_ResNet50_FPN_Weights
    assert size(dataclasses.replace(frozen, heads="deep")) == 43_712_278  # its second version
    chain = nnx.eval_shape(lambda: backbone(nnx.Rngs(0), "vgg16", 1.0, "none", 16))
    assert count(nnx.state(chain)) == 138_357_544 - 123_642_856  # VGG16 without its classifier
    for name, total, classifier in (
        ("resnet18", 11_689_512, 513_000),
        ("resnet50", 25_557_032, 2_049_000),
        ("resnet101", 44_549_160, 2_049_000),
    ):
        net = nnx.eval_shape(lambda name=name: backbone(nnx.Rngs(0), name, 1.0, "frozen", 32))
        assert count(nnx.state(net)) == total - classifier


def test_the_cost_model_knows_the_network():
    """Parameters without biases and norms; FLOPs by hand; the levels of a pyramid share weights."""
    load = TINY.workload(5, SIDE)
    kernels = [x for n, x in named_leaves(faster_rcnn.parts(TINY).abstract) if n.endswith("kernel")]
    assert load.params == sum(x.size for x in kernels)
    cells, regions = (SIDE // 8) ** 2, TINY.proposals + TINY.max_boxes
    places = {"0": 24**2, "1": 12**2, "2": 36, "3": 36, "4": 36}
    flops = 0
    for name, x in named_leaves(faster_rcnn.parts(TINY).abstract):
        if name.endswith("kernel"):
            stage, _, unit, *_ = name.split(".")
            where = {"head": regions, "backbone": places.get(unit), "proposer": cells}[stage]
            flops += 2 * x.size * where
    pooling = 8 * regions * 49 * 96 * 4
    assert train_flops_per_token(load, "megatron") == 3 * (flops + pooling)
    levels = dataclasses.replace(TINY, **LEVELS)
    kernels = [
        x for n, x in named_leaves(faster_rcnn.parts(levels).abstract) if n.endswith("kernel")
    ]
    assert levels.workload(5, 64).params == sum(x.size for x in kernels)
    with pytest.raises(UserError, match="phase=decode"):
        TINY.workload(1, SIDE, phase="decode")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(anchor_sizes="8,x"), "model.anchor_sizes=8,x must be positive numbers"),
        (dict(anchor_ratios="-1"), "model.anchor_ratios=-1 must be positive numbers"),
        (dict(maps="fpn"), "must have 4 numbers, one for each stride"),
        (dict(negative_iou=0.9), "model.negative_iou=0.9 must be at most model.positive_iou=0.6"),
        (dict(LEVELS, pooling="pool"), "use model.pooling=align, or model.maps=stride16"),
        (dict(backbone="vgg19"), "must be one of small, zf, vgg_m, vgg16"),
        (dict(classes=0), "model.classes=0 must be at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **changes)


def test_group_norm_normalises_groups():
    """Against NumPy; a narrow layer has groups of four channels."""
    norm = GroupNorm(24)
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 24)).astype(np.float32) * 3 + 1
    grouped = x.reshape(2, 15, norm.groups, -1).astype(np.float64)
    mean = grouped.mean((1, 3), keepdims=True)
    expected = (grouped - mean) / np.sqrt(grouped.var((1, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.array(x)), expected.reshape(x.shape), atol=1e-5)
    groups = {C: GroupNorm(C).groups for C in (8, 16, 24, 64, 96, 256, 2048, 6)}
    assert groups == {8: 2, 16: 4, 24: 4, 64: 16, 96: 16, 256: 32, 2048: 32, 6: 1}


@pytest.mark.slow
def test_a_small_detector_learns_squares():
    """240 steps of 8 images: nearly all squares are named and framed, and little else is."""
    model = detector(TINY)
    params = model.init(jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(3e-3))

    @jax.jit
    def step(params, state, batch, key):
        loss, gradients = jax.value_and_grad(lambda w: model.loss(w, batch, key)[0])(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    for number in range(240):
        params, state, loss = step(params, state, scenes(8, number), jax.random.key(number))
        assert np.isfinite(loss)
    tests = scenes(32, 10_000)
    corners, scores, labels = (np.asarray(x) for x in model.predict(params, tests["images"]))
    overlap = np.asarray(jax.vmap(boxes.iou)(jnp.array(tests["boxes"]), jnp.array(corners)))
    same = (tests["labels"][..., None] == labels[:, None]) & (tests["labels"][..., None] >= 0)
    hits = (same & (overlap > 0.5) & (scores > 0.5)[:, None]).any(2)
    assert hits.sum() > 0.9 * (tests["labels"] >= 0).sum()
    assert (scores > 0.5).sum() < 1.2 * (tests["labels"] >= 0).sum()
