"""Average precision against loops with exact fractions, and against pycocotools; what a run of a
detector reads, and that it computes the same on every mesh."""

import dataclasses
import fractions
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.data.detection import Dataset, Example
from megajax.data.images import ImageError
from megajax.layers.losses import LossSums
from megajax.models.faster_rcnn import FasterRcnnConfig
from megajax.models.parts import of_loss
from megajax.parallel import sharding
from megajax.training import detection
from megajax.training.config import JobConfig
from megajax.training.detection import (
    DetectConfig,
    DetectDataConfig,
    coco_ap,
    judge,
    open_sides,
    voc_ap,
)
from megajax.training.run_dir import RunDir
from megajax.training.step import make_train_step
from tests.foreign.test_torchvision import golden, write
from tests.tolerances import LOSSES

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


# ---- measures of a data set


def test_measures_are_means_over_the_classes_that_count():
    """Of four classes one is left out, and one has no true box."""
    truths = [
        image([BOX, FAR], [0, 1]),
        image([BOX, FAR], [2, 0], difficult=[False, True]),
        image([], []),
    ]
    detections = [
        image([BOX, FAR], [0, 1], scores=[0.9, 0.8]),
        image([BOX], [0], scores=[0.95]),
        image([], [], scores=[]),
    ]
    judged = judge(("a", "b", "c", "d"), truths, detections, left_out=("c",))
    assert [*judged["per_class"]] == ["a", "b"]
    assert judged["per_class"]["a"] == {
        "voc10": 0.5,
        "voc07": 0.5,
        "boxes": 1,
        "images": 1,
        "difficult": 1,
    }
    assert judged["voc10"] == judged["voc07"] == 0.75 and judged["images"] == 3
    assert judged["left_out"] == ["c"] and judged["without_boxes"] == ["d"]
    if judged["coco_ap50"] is None:
        assert judged["coco"] == "pycocotools is not installed: uv sync --extra vision"
    else:
        assert judged["coco_ap50"] == pytest.approx(0.75, abs=0.01)
    assert "mean average precision 0.750" in detection.told(judged)


def test_images_without_boxes_have_no_average_precision():
    judged = judge(("a",), [image([], [])], [image([BOX], [0], scores=[1.0])])
    assert judged["voc10"] is judged["voc07"] is judged["coco_ap"] is None
    assert judged["coco"] == "no true box" or "not installed" in judged["coco"]
    assert "no true box in 1 images" in detection.told(judged)


# ---- configuration


@pytest.mark.parametrize("canvases", ["128", "128x", "128x100", "0x32", "128x128,128x128", "axb"])
def test_what_is_no_list_of_canvases_is_refused(canvases):
    with pytest.raises(UserError, match=f"data.canvases={canvases} must be HEIGHTxWIDTH"):
        DetectDataConfig(canvases=canvases)


def test_canvases_are_drawn_from_the_seed_and_the_number_of_the_batch():
    data = DetectDataConfig(canvases="128x96,64x64,96X128")
    assert data.shapes == ((128, 96), (64, 64), (96, 128))
    first, again, other = ([*map(data.shape_of(s), range(300))] for s in (0, 0, 1))
    assert first == again != other
    assert np.bincount(first).min() > 75


def test_flags_of_texts_and_stacks_are_not_offered():
    names = config.flag_names(DetectConfig)
    assert not [n for n in names if n.split(".")[0] in ("pipeline", "context", "prune", "overlap")]
    gone = {"seq_len", "remat", "loss_chunks", "z_loss", "attention", "segments"}
    assert not {f"train.{n}" for n in gone} & {*names}
    others = {n for n in config.flag_names(JobConfig) if n.split(".")[0] not in ("data", "model")}
    lost = {n.split(".")[0] for n in others - {*names}}
    assert lost == {"pipeline", "context", "prune", "overlap", "train"}
    saved = config.to_json(detection.easy())
    assert config.from_json(DetectConfig, saved) == detection.easy()


@pytest.mark.parametrize("name", detection.PRESETS)
def test_each_preset_can_run(name):
    cfg = detection.PRESETS[name]()
    cfg.check(cfg.mesh.sizes(1))
    batches = [cfg.task().batch, *cfg.task().more_batches]
    assert [b["images"].shape[:2] for b in batches] == [*cfg.data.shapes]


def test_axes_that_cut_layers_or_sequences_are_refused():
    for axis in ("pipe", "context"):
        cfg = config.override(detection.easy(), {f"mesh.{axis}": 2})
        with pytest.raises(UserError, match=f"mesh.{axis}=2: a detector has no layers"):
            cfg.check(cfg.mesh.sizes(8))
    cfg = config.override(detection.easy(), {"protocol": "A", "data.test": "coco:x"})
    with pytest.raises(UserError, match="protocol=A evaluates half of the images"):
        cfg.check(cfg.mesh.sizes(1))


# ---- what a run reads


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Square(Example):
    """One square of its class's level on black."""

    number: int

    def image(self):
        pixels = np.full((*self.size, 3), self.number, np.uint8)
        for (x0, y0, x1, y1), label in zip(self.boxes.astype(int), self.labels, strict=True):
            pixels[y0:y1, x0:x1] = 80 + 40 * label
        return pixels


def square(number, labels, domain="habitat"):
    corners = [
        (8 + 20 * k, 8 + number % 8, 24 + 20 * k, 24 + number % 8) for k in range(len(labels))
    ]
    return Square(
        path=f"{number}.png",
        boxes=np.array(corners, np.float32).reshape(-1, 4),
        labels=np.array(labels, np.int32),
        difficult=np.zeros(len(labels), bool),
        size=(64, 48),
        domain=domain,
        number=number,
    )


@pytest.fixture
def sources(monkeypatch):
    """Data sets by name, in the place of folders."""
    known = {
        "squares": Dataset(("a", "b", "c"), [square(i, [i % 2]) for i in range(40)]),
        "renamed": Dataset(("b", "a"), [square(i, [i % 2]) for i in range(4)]),
        "stranger": Dataset(("a", "z"), [square(i, [i % 2]) for i in range(4)]),
        "rare": Dataset(("a", "b"), [square(0, [1]), *(square(i, [0]) for i in range(1, 9))]),
        "two domains": Dataset(
            ("a", "b", "c", "d"),
            [square(i, [i % 2]) for i in range(8)]
            + [square(10 + i, [i % 4], "specimen") for i in range(8)]
            + [square(30, [3])],
        ),
        "empty": Dataset(("a", "b", "c"), [square(i, [0] if i else []) for i in range(4)]),
    }
    monkeypatch.setattr(detection, "open_source", lambda name, *_: known[name])
    open_sides.cache_clear()
    yield known
    open_sides.cache_clear()


def data_of(source, **changes):
    return DetectDataConfig(source=source, canvases="64x64,64x96", max_boxes=3, **changes)


def test_images_are_held_out_by_their_content(sources):
    sides = open_sides(data_of("squares", holdout=0.25), None, 0)
    numbers = [{e.number for e in side} for side in (sides.train, sides.test)]
    assert not numbers[0] & numbers[1] and len(numbers[0] | numbers[1]) == 40
    assert 4 <= len(numbers[1]) <= 18 and sides.classes == ("a", "b", "c")
    assert open_sides(data_of("squares", holdout=0), None, 0).test == []


def test_a_species_in_one_image_of_the_habitat_does_not_count(sources):
    assert open_sides(data_of("rare"), None, 0).single == ("b",)
    sides = open_sides(data_of("two domains"), "B", 0)
    assert sides.single == ("d",) and sides.classes == ("a", "b")
    assert {e.domain for e in sides.test} == {"habitat"} and len(sides.test) == 4
    assert len(sides.train) == 8 and len(open_sides(data_of("two domains"), "A", 0).train) == 12


def test_another_source_is_evaluated_by_the_names_of_its_classes(sources):
    sides = open_sides(data_of("squares", test="renamed"), None, 0)
    assert len(sides.train) == 40
    assert [e.labels.tolist() for e in sides.test] == [[1], [0], [1], [0]]
    with pytest.raises(UserError, match="data.test=stranger has boxes of z, and the classes of"):
        open_sides(data_of("squares", test="stranger"), None, 0)


def test_the_number_of_classes_is_that_of_the_data(sources):
    base = dataclasses.replace(detection.easy(), data=data_of("squares"))
    assert detection.take_model(base, {}, {}).model.classes == 3
    assert detection.take_model(base, {"data.source": "renamed"}, {}).model.classes == 2
    typed = {"data.source": "two domains", "protocol": "B"}
    assert detection.take_model(base, typed, {}).model.classes == 2
    assert detection.take_model(base, {"model.classes": 7}, {}).model.classes == 10


def test_weights_of_torchvision_decide_the_network(sources, monkeypatch, tmp_path):
    """Of names alone: a ResNet-18 with frozen norms, on the recipe for fine-tuning."""
    names = json.loads(golden("resnet18")["state"].tobytes())
    weights = write(tmp_path, {name: np.zeros(1, np.float32) for name in names})
    monkeypatch.setattr(config, "start_given", lambda: False)
    typed = {"init_from": str(weights), "data.source": "squares"}
    cfg = config.override(detection.take_model(detection.easy(), typed, {}), typed)
    model = cfg.model
    assert (model.backbone, model.norm, model.width) == ("resnet18", "frozen", 1.0)
    assert model.classes == 3 and model.maps == "fpn" and cfg.optim.lr == detection.tuned().optim.lr
    monkeypatch.setattr(config, "start_given", lambda: True)
    typed["model.norm"] = "group"
    cfg = config.override(detection.take_model(detection.easy(), typed, {}), typed)
    assert (cfg.model.norm, cfg.model.maps, cfg.model.hidden) == ("group", "stride8", 192)
    console = Console()
    detection.Images(tiny_config(init_from=str(weights)), console, RunDir(tmp_path / "run"))
    assert any("is for no classes: what names regions begins anew" in x for x in console.lines)
    with pytest.raises(UserError, match="init_from=/nowhere: there is no such file"):
        detection.take_model(detection.easy(), {"init_from": "/nowhere"}, {})


class Console:
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def tiny_config(source="squares", **changes):
    cfg = dataclasses.replace(
        detection.tiny(),
        data=data_of(source, augment="hflip,rot90,noise"),
        model=dataclasses.replace(
            FasterRcnnConfig.tiny(classes=3),
            width=0.25,
            hidden=32,
            anchor_sizes="16",
            candidates=32,
            proposals=8,
            region_samples=8,
            detections=4,
        ),
    )
    return config.override(cfg, {"train.steps": 6, "train.global_batch": 8} | changes)


def test_classes_of_another_run_or_another_number_are_refused(sources, tmp_path):
    console = Console()
    images = detection.Images(tiny_config(), console, RunDir(tmp_path))
    assert images.labels == ("a", "b", "c")
    assert any("images to learn" in line for line in console.lines)
    with pytest.raises(UserError, match="model.classes=2 must be the 3 of data.source=squares"):
        detection.Images(tiny_config(**{"model.classes": 2}), console, RunDir(tmp_path))
    (tmp_path / "labels.json").write_text(json.dumps(["a", "b", "x"]))
    with pytest.raises(UserError, match="has the classes a, b, c, and the run in .* a, b, x"):
        detection.Images(tiny_config(), console, RunDir(tmp_path))


def test_more_boxes_than_the_limit_are_refused(sources, tmp_path):
    sources["squares"].examples[3] = square(3, [0, 1, 1, 0])
    with pytest.raises(UserError, match="3.png has 4 boxes and data.max_boxes=3.*set it to 4"):
        detection.Images(tiny_config(**{"data.holdout": 0.0}), Console(), RunDir(tmp_path))


# ---- training


class Stand(nnx.Module):
    """A network with the members of a detector's batch, and a loss of each of them."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(0.1 * jax.random.normal(rngs.params(), (3, 4)))

    def loss(self, batch, key):
        count_traces()
        counts = batch["targets"] >= 0
        color = batch["images"].astype("float32").mean((1, 2)) / 255
        guess = color @ self.kernel[...]
        drawn = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(jax.random.key(0), row)))
        target = batch["boxes"][:, 0] / 64 + 0.1 * drawn(batch["row"])[:, None]
        box = ((guess - target) ** 2).mean(-1)
        terms = {"box": box, "objectness": 0.1 * color.sum(-1)}
        sums = {name: jnp.where(counts, x, 0).sum() for name, x in terms.items()}
        return LossSums(sums, counts.sum())


TRACES = []


def count_traces():
    TRACES.append(1)


@pytest.fixture
def stand(monkeypatch):
    build = lambda key: Stand(nnx.Rngs(params=key))  # noqa: E731
    monkeypatch.setattr(detection.faster_rcnn, "parts", lambda cfg, *_: of_loss(build))


def started(cfg, mesh, tmp_path):
    """The step, the first state and the batches of a run, as systems/job.py makes them."""
    images = detection.Images(cfg, Console(), RunDir(tmp_path))
    step = make_train_step(cfg, mesh)
    return step, step.init(0), functools.partial(detection.canvas_batches, cfg, images, step)


def test_each_canvas_is_compiled_once_and_batches_follow_their_numbers(sources, stand, tmp_path):
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = tiny_config()
    step, state, batches_from = started(cfg, mesh, tmp_path)
    traces, seen, batches = [], [], batches_from(0)
    for _ in range(8):
        batch = next(batches)
        seen.append(jax.tree.map(np.asarray, batch))
        before = len(TRACES)
        state, metrics = step.step(state, batch)
        traces.append((batch["images"].shape[1:3], len(TRACES) - before))
        assert {"loss", "loss_box", "loss_objectness"} <= {*metrics}
        parts = metrics["loss_box"] + metrics["loss_objectness"]
        np.testing.assert_allclose(metrics["loss"], parts, rtol=1e-6)
    shapes = [shape for shape, _ in traces]
    assert {*shapes} == {(64, 64), (64, 96)}
    assert [n > 0 for _, n in traces] == [shape not in shapes[:i] for i, shape in enumerate(shapes)]
    later = batches_from(5 * cfg.train.global_batch)
    for number in range(5, 8):
        again = next(later)
        jax.tree.map(np.testing.assert_array_equal, seen[number], jax.tree.map(np.asarray, again))


MESHES = {
    "data 8": ({}, MeshSpec()),
    "data 4 x tensor 2": ({}, MeshSpec(tensor=2)),
    "accumulate 2": ({"train.accumulate": 2}, MeshSpec(data=4)),
}


def losses(cfg, mesh, tmp_path, steps=5):
    step, state, batches_from = started(cfg, mesh, tmp_path)
    batches, curve = batches_from(0), []
    for _ in range(steps):
        state, metrics = step.step(state, next(batches))
        curve.append([float(metrics[n]) for n in sorted(metrics) if n.startswith("loss")])
    return np.array(curve)


@pytest.mark.parametrize("name", MESHES)
def test_rows_and_their_draws_are_the_same_on_every_mesh(sources, stand, tmp_path, name):
    values, spec = MESHES[name]
    one = losses(tiny_config(), MeshSpec().build(jax.devices()[:1]), tmp_path)
    devices = jax.devices()[:4] if spec.data == 4 else jax.devices()
    many = losses(tiny_config(**values), spec.build(devices), tmp_path)
    np.testing.assert_allclose(many, one, rtol=LOSSES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_detector_learns_the_same_on_every_mesh(sources, tmp_path, name):
    values, spec = MESHES[name]
    cfg = tiny_config(**{"optim.lr": 1e-3})
    one = losses(cfg, MeshSpec().build(jax.devices()[:1]), tmp_path)
    devices = jax.devices()[:4] if spec.data == 4 else jax.devices()
    many = losses(config.override(cfg, values), spec.build(devices), tmp_path)
    np.testing.assert_allclose(many, one, rtol=1e-4)
    assert one.shape == (5, 5) and np.isfinite(one).all()


# ---- detections


class Corner:
    """A detector that finds the square of each image by its brightest pixels, and nothing else."""

    def __init__(self, cfg):
        self.cfg = cfg

    def predict(self, params, images, sizes):
        bright = images.max(-1) >= 80
        rows, columns = bright.any(2), bright.any(1)
        first = lambda x: jnp.argmax(x, 1)  # noqa: E731
        last = lambda x: x.shape[1] - jnp.argmax(x[:, ::-1], 1)  # noqa: E731
        box = jnp.stack([first(columns), first(rows), last(columns), last(rows)], 1)
        level = images.max((1, 2, 3)).astype(jnp.int32)
        labels = jnp.stack([(level - 80) // 40, jnp.full_like(level, -1)], 1)
        boxes = jnp.stack([box, jnp.zeros_like(box)], 1).astype(jnp.float32)
        return boxes, jnp.broadcast_to(params["score"], labels.shape), labels


@pytest.mark.parametrize("devices", [1, 8])
def test_detections_are_in_the_pixels_of_their_images(monkeypatch, devices):
    """Of images of two sizes, one twice as large as the canvas, in batches that do not fit."""
    monkeypatch.setattr(detection.faster_rcnn, "detector", Corner)
    cfg = dataclasses.replace(detection.easy(), data=data_of("squares", enlarge=0.5))
    examples = [square(i, [i % 3]) for i in range(11)]
    mesh = MeshSpec().build(jax.devices()[:devices])
    layout = sharding.layout(mesh, "full", model=cfg.model)
    predictor = detection.Predictor(cfg, layout, most=3)
    params = {"score": jax.device_put(jnp.full((1, 1), 0.75), layout.named(jax.P(None, None)))}
    rows = detection.detection_rows(cfg, examples)
    for example, detected in zip(examples, predictor(params, examples, rows), strict=True):
        assert detected["labels"].tolist() == example.labels.tolist()
        assert detected["scores"].tolist() == [0.75]
        np.testing.assert_allclose(detected["boxes"], example.boxes, atol=2)
    assert predictor(params, [], rows) == []


def test_an_image_that_cannot_be_read_has_no_detections(monkeypatch):
    monkeypatch.setattr(detection.faster_rcnn, "detector", Corner)
    cfg = dataclasses.replace(detection.easy(), data=data_of("squares"))
    examples = [square(i, [0]) for i in range(3)]

    def damaged(self):
        raise ImageError("truncated or damaged image", f"{self.path} is truncated")

    monkeypatch.setattr(type(examples[1]), "image", damaged)
    object.__setattr__(examples[0], "reduced", lambda least: np.full((64, 48, 3), 100, np.uint8))
    mesh = MeshSpec().build(jax.devices()[:1])
    layout = sharding.layout(mesh, "full", model=cfg.model)
    predictor = detection.Predictor(cfg, layout, most=2)
    params = {"score": jax.device_put(jnp.full((1, 1), 0.5), layout.named(jax.P(None, None)))}
    results = predictor(params, examples, detection.detection_rows(cfg, examples))
    assert [r is None for r in results] == [False, True, True]
    read, detections = detection.readable(examples, results)
    assert read == examples[:1] and len(detections) == 1


def test_boxes_are_drawn_where_they_are():
    example = square(0, [1])
    one = {"boxes": example.boxes + 2, "labels": np.array([1]), "scores": np.array([0.9])}
    plain, marked, low = (
        np.asarray(detection.drawn(example.image(), d, ("a", "b"), score, t, side=None))
        for d, score, t in ((one, 0.95, None), (one, 0.5, example), (one, 0.95, example))
    )
    assert plain.shape == (64, 48, 3) and (plain == example.image()).all()
    x0, y0, x1, y1 = example.boxes[0].astype(int)
    assert low[y0, x0 : x1 - 1].tolist() == [[0x3F, 0xB9, 0x50]] * (x1 - x0 - 1)
    assert marked[y1 + 2, x0 + 4].tolist() == [0x1F, 0x6F, 0xEB]
    page = Image.open(io.BytesIO(detection.sheet([Image.fromarray(plain)] * 4)))
    assert page.size == (3 * 390, 2 * 390)
