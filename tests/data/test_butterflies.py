"""Drawn butterflies: boxes proved from pixels, pictures that never change, splits, exports."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from PIL import Image

from megajax.core.errors import UserError
from megajax.data.butterflies import export, open_butterflies, protocol
from megajax.data.detection import Dataset, Example, open_detection

# SHA-256 of the pixels of these pictures of seed 0, first 16 digits. A change of the drawing
# changes what every result about these data sets was measured on.
DIGESTS = {
    ("easy", 0): "24dfbdf590311d4e",
    ("easy", 299): "5215ed91d25b21c7",
    ("hard", 3): "2123d9efa78b8fa6",
    ("hard", 4): "b27a33b50dadcc81",
    ("hard", 400): "06eedbb06a938259",
}


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def hard() -> Dataset:
    return open_butterflies("hard")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Grey(Example):
    """An example without pixels worth looking at."""

    def image(self) -> np.ndarray:
        return np.full((*self.size, 3), 128, np.uint8)


def grey(path: str, labels: list[int], domain: str = "habitat") -> Grey:
    n = len(labels)
    return Grey(
        path=path,
        boxes=np.tile(np.array([1, 2, 5, 9], np.float32), (n, 1)),
        labels=np.array(labels, np.int32),
        difficult=np.zeros(n, bool),
        size=(12, 10),
        domain=domain,
    )


@pytest.mark.parametrize("name, indices", [("easy", range(12)), ("hard", [*range(24), 400, 401])])
def test_boxes_are_tight_around_the_pixels_that_an_insect_changes(name, indices):
    examples = open_butterflies(name).examples
    boxes = 0
    for i in indices:
        example = examples[i]
        image = example.image()
        assert image.shape == (*example.size, 3) and image.dtype == np.uint8
        for k, box in enumerate(example.boxes):
            changed = (image != example.image(without=k)).any(-1)
            rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
            extent = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            assert extent == tuple(box), (name, i, k)
            boxes += 1
    assert boxes > 20


def test_what_is_mostly_hidden_is_difficult(hard):
    """Insects that are difficult change far fewer pixels of their box than the others."""
    habitat = [e for e in hard.examples if e.domain == "habitat"]
    difficult = np.concatenate([e.difficult for e in habitat])
    assert 0.005 < difficult.mean() < 0.1
    parts = {False: [], True: []}
    for example in [e for e in habitat if e.difficult.any()] + habitat[:30]:
        for k, (x0, y0, x1, y1) in enumerate(example.boxes):
            changed = (example.image() != example.image(without=k)).any(-1).sum()
            parts[bool(example.difficult[k])].append(changed / ((x1 - x0) * (y1 - y0)))
    assert np.median(parts[True]) < 0.8 * np.median(parts[False])


@pytest.mark.parametrize("name, index", DIGESTS)
def test_pictures_never_change(name, index):
    data = open_butterflies(name)
    if data.problems:
        pytest.skip("matplotlib carries other pictures")
    assert digest(data.examples[index].image()) == DIGESTS[name, index]


def test_a_picture_depends_on_seed_and_index_alone(hard):
    examples = open_butterflies("hard", seed=1).examples
    assert not np.array_equal(examples[5].image(), hard.examples[5].image())
    again = open_butterflies("hard").examples
    for i in (9, 2, -1):
        assert np.array_equal(again[i].image(), hard.examples[i].image())
        assert again[i].path == hard.examples[i].path
    assert [e.path for e in again[4:6]] == [hard.examples[i].path for i in (4, 5)]


@pytest.mark.process
def test_missing_photographs_and_another_processor(hard):
    """Photographs that are missing are counted and replaced. What shows none of them is equal to
    the bit without the vector instructions that NumPy uses on this machine."""
    code = """
import hashlib, importlib.util
importlib.util.find_spec = lambda name: None
from megajax.data.butterflies import open_butterflies
data = open_butterflies("hard")
print(len(data.problems), *data.problems)
print(data.examples[0].boxes.tolist(), data.examples[0].image().shape)
print(hashlib.sha256(b"".join(e.image().tobytes() for e in data.examples[-80:])).hexdigest())
"""
    features = np.__config__.CONFIG["SIMD Extensions"].get("found", [])
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(features)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    problems, picture, drawn = run.stdout.splitlines()
    assert problems.startswith("2 grace_hopper.jpg of matplotlib is missing or is another file")
    assert picture == f"{hard.examples[0].boxes.tolist()} (128, 128, 3)"
    specimens = hard.examples[-80:]
    assert drawn == hashlib.sha256(b"".join(e.image().tobytes() for e in specimens)).hexdigest()


def test_easy_scenes():
    train, test = (open_butterflies(name) for name in ("easy", "easy:test"))
    assert (len(train.examples), len(test.examples)) == (300, 96)
    assert len(train.classes) == 10 and train.classes == test.classes
    assert not {e.path for e in train.examples} & {e.path for e in test.examples}
    labels = [e.labels for e in train.examples]
    assert {len(part) for part in labels} == {1, 2, 3}
    assert set(np.concatenate(labels)) == set(range(10))
    sides = np.concatenate([e.boxes[:, 2:] - e.boxes[:, :2] for e in train.examples]).max(1)
    assert sides.min() >= 29 and sides.max() <= 66


def test_the_hard_profile_has_the_proportions_of_the_paper(hard):
    triples = Counter(name.partition("-")[0] for name in hard.classes)
    assert len(triples) == 20 and set(triples.values()) == {3}
    habitat = [e for e in hard.examples if e.domain == "habitat"]
    specimens = [e for e in hard.examples if e.domain == "specimen"]
    pictures = Counter(k for e in habitat for k in set(e.labels.tolist()))
    counts = sorted(pictures.values())
    assert counts[:4] == [1] * 4 and counts[4] == 2 and counts[-1] == 40 and len(counts) == 34
    assert counts[19] < 12 < counts[-4]  # a long tail
    assert {k for k, n in pictures.items() if n > 1} == set(range(30))
    assert all(len(e.labels) == 1 for e in specimens)
    assert {int(e.labels[0]) for e in specimens} == set(range(60))
    sides = np.concatenate([e.boxes[:, 2:] - e.boxes[:, :2] for e in habitat])
    assert 6 <= sides.min() and 11 <= sides.max(1).min() and sides.max() <= 66
    for example in specimens[:20]:
        x0, y0, x1, y1 = example.boxes[0]
        assert 80 <= max(x1 - x0, y1 - y0) <= 114
        assert abs(x0 + x1 - 128) < 10 and abs(y0 + y1 - 128) < 12
        image = example.image().astype(np.int32)
        assert np.concatenate([image[:4], image[-4:]]).mean() > 190  # pale paper
        mirrored = np.abs(image[:, 8:-8] - image[:, -9:7:-1]).mean()
        assert mirrored < np.abs(image[8:-8] - image[-9:7:-1]).mean()  # upright: wings left, right


@pytest.mark.parametrize("seed", range(3))
def test_protocols_of_the_paper(hard, seed):
    splits = {name: protocol(hard, name, seed) for name in "AB"}
    by_path = {e.path: e for e in hard.examples}
    for name, (train, test, classes) in splits.items():
        assert {e.domain for e in test} == {"habitat"}
        paths = [e.path for e in (*train, *test)]
        assert len(set(paths)) == len(paths)
        assert len(classes) == {"A": 60, "B": 30}[name]
        for example in (*train, *test):
            old = by_path[example.path]
            names = [classes[k] for k in example.labels]
            assert names == [hard.classes[k] for k in old.labels]
            assert np.array_equal(example.boxes, old.boxes)
        field = [e for e in train if e.domain == "habitat"]
        assert abs(len(field) - len(test)) <= 0.06 * len(paths)
        sides = [Counter(k for e in s for k in set(e.labels.tolist())) for s in (field, test)]
        assert set(sides[0]) == set(sides[1]) and len(sides[0]) == 30
        for k in sides[0]:  # a picture of two species may be the other's
            assert abs(sides[0][k] - sides[1][k]) <= 1 + 0.15 * (sides[0][k] + sides[1][k])
    assert np.array_equal(splits["A"][1][0].image(), by_path[splits["A"][1][0].path].image())
    assert [e.path for e in splits["A"][1]] == [e.path for e in splits["B"][1]]
    specimens = {n: sum(e.domain == "specimen" for e in s[0]) for n, s in splits.items()}
    assert specimens == {"A": 228, "B": sum(int(e.labels[0]) < 30 for e in hard.examples[-228:])}
    other = protocol(hard, "A", seed + 1)[1]
    assert [e.path for e in other] != [e.path for e in splits["A"][1]]


def test_a_species_in_one_picture_is_left_out_with_all_that_follows():
    """c is in one picture. Without that picture, b is in one picture too."""
    examples = [
        *(grey(f"a{n}", [0]) for n in range(4)),
        grey("bc", [1, 2]),
        grey("ab", [0, 1]),
        grey("none", []),
        *(grey(f"specimen{k}", [k], "specimen") for k in (0, 1, 3)),
    ]
    data = Dataset(("a", "b", "c", "d"), examples)
    train, test, classes = protocol(data, "A")
    assert classes == ("a", "b", "d")
    assert len(test) in (2, 3) and {e.path for e in test} <= {"a0", "a1", "a2", "a3", "none"}
    paths = "a0 a1 a2 a3 none specimen0 specimen1 specimen3".split()
    assert sorted(e.path for e in (*train, *test)) == paths
    train, _, classes = protocol(data, "B")
    assert classes == ("a",)
    assert [e.path for e in train if e.domain == "specimen"] == ["specimen0"]


def read_coco(folder):
    parts = json.loads((folder / "annotations" / "instances.json").read_text())
    names = {c["id"]: c["name"] for c in parts["categories"]}
    for image in parts["images"]:
        rows = [
            (names[a["category_id"]], *a["bbox"][:2], *np.add(a["bbox"][:2], a["bbox"][2:]))
            for a in parts["annotations"]
            if a["image_id"] == image["id"]
        ]
        crowds = [a["iscrowd"] for a in parts["annotations"] if a["image_id"] == image["id"]]
        yield folder / "images" / image["file_name"], rows, crowds


def read_voc(folder):
    for path in sorted((folder / "Annotations").iterdir()):
        root = ElementTree.parse(path).getroot()
        rows = []
        for entry in root.iter("object"):
            corners = [int(entry.findtext(f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax")]
            rows.append((entry.findtext("name"), *np.subtract(corners, (1, 1, 0, 0))))
        hidden = [int(entry.findtext("difficult")) for entry in root.iter("object")]
        assert root.findtext("size/width") == root.findtext("size/height") == "128"
        yield folder / "JPEGImages" / root.findtext("filename"), rows, hidden


def read_yolo(folder):
    names = yaml.safe_load((folder / "data.yaml").read_text())["names"]
    for path in sorted((folder / "labels").iterdir()):
        rows = []
        for line in path.read_text().splitlines():
            label, x, y, width, height = line.split()
            center, half = np.array([float(x), float(y)]), np.array([float(width), float(height)])
            corners = np.concatenate([center - half / 2, center + half / 2]) * 128
            rows.append((names[int(label)], *corners))
        yield folder / "images" / f"{path.stem}.png", rows, None


@pytest.mark.parametrize("read", [read_coco, read_voc, read_yolo])
def test_export(hard, tmp_path, read):
    """An independent reader of each format gets the boxes, the names and the pixels back."""
    hidden = next(e for e in hard.examples if e.difficult.any())
    data = Dataset(hard.classes, [*hard.examples[:4], hidden])
    format = read.__name__.removeprefix("read_")
    folder = export(data, tmp_path / "a folder", format)
    assert folder == tmp_path / "a folder"
    entries = list(read(folder))
    assert len(entries) == len(data.examples)
    for (path, rows, difficult), example in zip(entries, data.examples, strict=True):
        assert [row[0] for row in rows] == [hard.classes[k] for k in example.labels]
        assert np.allclose([row[1:] for row in rows], example.boxes, atol=1e-5)
        assert difficult is None or difficult == example.difficult.astype(int).tolist()
        with Image.open(path) as opened:
            error = np.abs(np.asarray(opened).astype(int) - example.image())
        assert error.max() == 0 if path.suffix == ".png" else error.mean() < 3


@pytest.mark.parametrize("format", ["coco", "voc", "yolo"])
def test_an_export_is_opened(tmp_path, format):
    data = open_detection("butterflies:hard")
    examples = [*data.examples[:6], data.examples[-1]]
    folder = export(Dataset(data.classes, examples), tmp_path / "out", format)
    opened = open_detection(f"{format}:{folder}")
    assert not opened.problems
    entries = sorted(opened.examples, key=lambda example: example.path)
    for entry, example in zip(entries, examples, strict=True):
        assert np.allclose(entry.boxes, example.boxes, atol=1e-4)
        names = [opened.classes[k] for k in entry.labels]
        assert names == [data.classes[k] for k in example.labels]


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: open_butterflies("hrad"),
            "butterflies:hrad must be .* easy, easy:test, hard. Did you mean hard?",
        ),
        (lambda: open_butterflies("easy", seed=-1), "seed=-1 .* nearest: 0"),
        (lambda: protocol(open_butterflies("easy"), "C"), "protocol='C' must be A .* or B"),
        (lambda: protocol(open_butterflies("easy"), "A"), "needs pictures of specimens"),
        (
            lambda: protocol(Dataset(("a",), [grey("s", [0], "specimen"), grey("h", [0])]), "B"),
            "a species in two pictures of the habitat",
        ),
        (
            lambda: export(open_butterflies("easy"), "x", "cocoo"),
            "coco, voc, yolo. Did you mean coco?",
        ),
    ],
)
def test_bad_requests(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_export_leaves_a_folder_alone_that_has_files(hard, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    with pytest.raises(UserError, match="cannot write"):
        export(Dataset(hard.classes, hard.examples[:1]), tmp_path / "mine", "coco")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes"]
