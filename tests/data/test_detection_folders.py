"""Folders of images with boxes: what they say, what is left out, and what is never opened."""

import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megajax.core.errors import UserError
from megajax.data import detection, images
from megajax.data.detection import open_detection, split

WHITE, BLUE = (255, 255, 255), (0, 0, 255)


def picture(seed: int, height: int = 40, width: int = 60) -> Image.Image:
    """A smooth image, so that JPEG hardly changes it."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def coco(folder: Path, listed: list, boxes: list, classes: list, file="a_train.json") -> str:
    """Writes a COCO folder; listed: (id, name or PIL image, file_name)."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    entries = []
    for number, image, name in listed:
        if image is not None:
            (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            image.save(folder / "images" / name)
        entries.append({"id": number, "file_name": name})
    said = {
        "info": {"year": 2026},
        "images": entries,
        "annotations": [
            {"id": i, "image_id": of, "category_id": c, "bbox": box, "segmentation": [[1.5, 2]]} | x
            for i, (of, c, box, x) in enumerate(boxes)
        ],
        "categories": [{"id": number, "name": name} for number, name in classes],
    }
    (folder / "annotations" / file).write_text(json.dumps(said))
    return f"coco:{folder}"


def voc(folder: Path, name: str, objects: str, extra: str = "") -> str:
    """Writes one image's file of a VOC folder."""
    for below in ("Annotations", "JPEGImages"):
        (folder / below).mkdir(parents=True, exist_ok=True)
    text = f"<annotation>{extra}{objects}</annotation>"
    (folder / "Annotations" / f"{name}.xml").write_text(text)
    return f"voc:{folder}"


def thing(name: str, box: tuple, extra: str = "") -> str:
    names = ("xmin", "ymin", "xmax", "ymax")
    numbers = "".join(f"<{k}>{v}</{k}>" for k, v in zip(names, box, strict=True))
    return f"<object><name>{name}</name>{extra}<bndbox>{numbers}</bndbox></object>"


def yolo(folder: Path, names: str, lines: dict[str, str | None], suffix=".png") -> str:
    """Writes a YOLO folder: image -> the lines of its labels, None for no file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.yaml").write_text(names)
    for seed, (name, text) in enumerate(lines.items()):
        for below in ("images", "labels"):
            (folder / below / name).parent.mkdir(parents=True, exist_ok=True)
        picture(seed).save(folder / "images" / f"{name}{suffix}")
        if text is not None:
            (folder / "labels" / f"{name}.txt").write_text(text)
    return f"yolo:{folder}"


# ---- formats


def test_coco(tmp_path):
    """A folder with blanks, ids that are not dense, subfolders, crowds, an image without boxes."""
    source = coco(
        tmp_path / "my data set",
        [
            (70, picture(0), "a.png"),
            (12, picture(1), "wet place/b.png"),
            (900, picture(2), "c.png"),
        ],
        [
            (12, 41, [1, 2, 10, 20], {}),
            (70, 7, [5.5, 6, 3, 4], {"iscrowd": 1}),
            (12, 7, [0, 0, 60, 40], {}),
        ],
        [(41, "swallowtail"), (7, "blue")],
    )
    dataset = open_detection(source)
    assert dataset.classes == ("blue", "swallowtail") and dataset.problems == {}
    a, b, c = dataset.examples
    assert [Path(e.path).name for e in (a, b, c)] == ["a.png", "b.png", "c.png"]
    assert a.boxes.tolist() == [[5.5, 6, 8.5, 10]] and a.labels.tolist() == [0]
    assert a.difficult.tolist() == [True] and b.difficult.tolist() == [False, False]
    assert b.boxes.tolist() == [[1, 2, 11, 22], [0, 0, 60, 40]] and b.labels.tolist() == [1, 0]
    assert c.boxes.shape == (0, 4) and c.labels.shape == c.difficult.shape == (0,)
    for example in dataset.examples:
        assert example.boxes.dtype == np.float32 and example.labels.dtype == np.int32
        assert example.difficult.dtype == bool and example.domain == "habitat"
        assert example.size == (40, 60) and example.image().dtype == np.uint8
    assert np.array_equal(b.image(), np.asarray(picture(1)))


def test_coco_in_several_files(tmp_path):
    """Ids count within their file. The persons of key points are those of the instances again."""
    pair = [(1, "cat"), (2, "dog")]
    coco(tmp_path, [(5, picture(0), "a.png")], [(5, 1, [1, 1, 5, 5], {})], pair, "i_train.json")
    coco(
        tmp_path,
        [(5, picture(1), "b.png"), (6, None, "a.png")],
        [(5, 9, [2, 2, 5, 5], {}), (6, 3, [1, 1, 5, 5], {}), (6, 3, [1, 1, 6, 5], {})],
        [(3, "cat"), (9, "bee")],
        "k_val.json",
    )
    dataset = open_detection(f"coco:{tmp_path}")
    assert dataset.classes == ("cat", "dog", "bee")
    a, b = dataset.examples
    assert a.boxes.tolist() == [[1, 1, 6, 6], [1, 1, 7, 6]] and a.labels.tolist() == [0, 0]
    assert b.boxes.tolist() == [[2, 2, 7, 7]] and b.labels.tolist() == [2]
    assert dataset.problems == {detection.REPEATED: 1}


@pytest.mark.parametrize("place", ["images/train2017", "train2017", "images", ""])
def test_coco_images_lie_where_the_file_or_its_name_says(tmp_path, place):
    coco(tmp_path, [(1, None, "a.png")], [], [(1, "x")], "instances_train2017.json")
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    picture(0).save(tmp_path / place / "a.png")
    (example,) = open_detection(f"coco:{tmp_path}").examples
    assert Path(example.path) == tmp_path / place / "a.png"


def test_coco_lists_come_in_any_order(tmp_path):
    folder = tmp_path / "d"
    source = coco(folder, [(3, picture(0), "a.png")], [(3, 8, [0, 0, 4, 4], {})], [(8, "x")])
    path = folder / "annotations" / "a_train.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(said.items()))))
    (example,) = open_detection(source).examples
    assert example.boxes.tolist() == [[0, 0, 4, 4]]


def test_voc(tmp_path):
    """Pixels count from 1 and the last one is inside; parts of objects are no objects."""
    part = "<part><name>head</name><bndbox><xmin>2</xmin></bndbox></part>"
    source = voc(
        tmp_path,
        "first",
        thing("peacock", (1, 1, 60, 40))
        + thing("ringlet", (3, 4, 3, 4), "<difficult>1</difficult>"),
        "<filename>p.png</filename><size><width>60</width><height>40</height></size>",
    )
    voc(tmp_path, "second", thing("ringlet", ("2.5", 1, 5, 6), part))
    voc(tmp_path, "third", "")
    for seed, name in enumerate(("p.png", "second.jpeg", "third.bmp")):
        picture(seed).save(tmp_path / "JPEGImages" / name)
    dataset = open_detection(source)
    assert dataset.classes == ("peacock", "ringlet") and dataset.problems == {}
    p, second, third = dataset.examples
    assert p.boxes.tolist() == [[0, 0, 60, 40], [2, 3, 3, 4]] and p.labels.tolist() == [0, 1]
    assert p.difficult.tolist() == [False, True]
    assert second.boxes.tolist() == [[1.5, 0, 5, 6]] and second.labels.tolist() == [1]
    assert third.boxes.shape == (0, 4)


@pytest.mark.parametrize("names", ["names: [ant, bee]", "names:\n  0: ant\n  1: bee\nnc: 2\n"])
def test_yolo(tmp_path, names):
    lines = {
        "train/a": "1 0.5 0.5 0.5 0.25\n\n0 0.1 0.2 0.1 0.1\n",
        "val/b": None,
        "val/c d": "0 0 0 1 0 1 1",  # an outline of three corners
        "e": "",
    }
    dataset = open_detection(yolo(tmp_path, names, lines))
    assert dataset.classes == ("ant", "bee") and dataset.problems == {}
    by_name = {Path(e.path).stem: e for e in dataset.examples}
    assert by_name["a"].boxes.tolist() == pytest.approx(
        np.array([[15, 15, 45, 25], [3, 6, 9, 10]]), abs=1e-5
    )
    assert by_name["a"].labels.tolist() == [1, 0]
    assert by_name["c d"].boxes.tolist() == [[0, 0, 60, 40]]
    assert not len(by_name["b"].boxes) and not len(by_name["e"].boxes)


def test_yolo_with_numbers_that_are_not_dense_in_folders_of_their_own(tmp_path):
    yolo(tmp_path / "train", "", {"a": "7 0.5 0.5 1 1"})
    yolo(tmp_path / "valid", "", {"b": "3 0.5 0.5 1 1\n4 0.5 0.5 1 1"})
    (tmp_path / "data.yaml").write_text("names: {3: x, 7: y}\ntrain: ../../elsewhere/images\n")
    dataset = open_detection(f"yolo:{tmp_path}")
    assert [(e.labels.tolist(), e.boxes.tolist()) for e in dataset.examples] == [
        ([1], [[0, 0, 60, 40]]),
        ([0], [[0, 0, 60, 40]]),
    ]
    assert dataset.classes == ("x", "y") and dataset.problems == {detection.NO_CLASS: 1}


# ---- boxes


def test_boxes_that_cannot_be_used_are_counted_and_their_image_stays(tmp_path):
    nan, huge = float("nan"), 10**400
    source = coco(
        tmp_path,
        [(1, picture(0), "a.png"), (2, picture(1), "b.png")],
        [
            (1, 1, [-5, -5, 10, 10], {}),  # clipped
            (1, 1, [50, 30, 1e9, 1e9], {}),  # clipped
            (1, 1, [1, 1, 0, 5], {}),
            (1, 1, [1, 1, 5, -3], {}),
            (1, 1, [1, 1, nan, 3], {}),
            (1, 1, [1, 1, 1e308 * 10, 3], {}),
            (1, 1, [60, 1, 5, 5], {}),
            (1, 1, [-9, 1, 9, 5], {}),
            (1, 5, [1, 1, 5, 5], {}),
            (7, 1, [1, 1, 5, 5], {}),
            (1, 1, [1, 1, 5], {}),
            (1, 1, None, {}),
            (1, 1, ["a", 1, 2, 3], {}),
            (1, 1, [huge, 1, 2, 3], {}),
            ([1], 1, [1, 1, 5, 5], {}),
            (2, 1, [1, 1, 0, 0], {}),
        ],
        [(1, "x")],
    )
    dataset = open_detection(source)
    a, b = dataset.examples
    assert a.boxes.tolist() == [[0, 0, 5, 5], [50, 30, 60, 40]]
    assert b.boxes.shape == (0, 4)
    assert dataset.problems == {
        detection.EMPTY: 3,
        detection.NOT_FINITE: 2,
        detection.BEYOND: 2,
        detection.NO_CLASS: 1,
        detection.NO_IMAGE: 1,
        detection.NO_NUMBERS: 5,
    }
    assert len(dataset.report()) == 6 and all("; first: " in line for line in dataset.report())


def test_boxes_of_other_formats_that_cannot_be_used(tmp_path):
    broken = "<object><name>x</name></object>" + thing("x", ("nan", 1, 2, 3))
    voc(tmp_path / "voc", "a", broken + thing("", (1, 1, 2, 2)) + thing("x", (5, 5, 4, 9)))
    picture(0).save(tmp_path / "voc/JPEGImages/a.png")
    dataset = open_detection(f"voc:{tmp_path / 'voc'}")
    assert dataset.problems == {
        detection.NO_NUMBERS: 1,
        detection.NOT_FINITE: 1,
        detection.NO_CLASS: 1,
        detection.EMPTY: 1,
    }
    lines = "0 .5 .5\nx .5 .5 1 1\n0 nan .5 1 1\n2 .5 .5 1 1\n0 .5 .5 0 1\n0 3 3 1 1\n0 .5 .5 1 1"
    dataset = open_detection(yolo(tmp_path / "yolo", "names: [x]", {"a": lines}))
    assert dataset.problems == {
        detection.NO_NUMBERS: 2,
        detection.NOT_FINITE: 1,
        detection.NO_CLASS: 1,
        detection.EMPTY: 1,
        detection.BEYOND: 1,
    }
    assert dataset.examples[0].boxes.tolist() == [[0, 0, 60, 40]]


def test_an_image_of_another_size_than_was_annotated_is_counted(tmp_path):
    size = "<size><width>{}</width><height>{}</height></size>"
    for name, width, height in (("a", 600, 400), ("b", 60, 40), ("c", 40, 60), ("d", 0, 0)):
        voc(tmp_path, name, thing("x", (1, 1, 9, 9)), size.format(width, height))
        picture(0).save(tmp_path / "JPEGImages" / f"{name}.png")
    dataset = open_detection(f"voc:{tmp_path}")
    assert len(dataset.examples) == 4 and dataset.problems == {detection.RESIZED: 1}


# ---- hostile folders


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says what it likes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    ends = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + ends


def tiff(entries: list[tuple[int, int, int, int]]) -> bytes:
    """A TIFF of (tag, type, count, value)."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(4)


def bmp(width: int, height: int) -> bytes:
    return struct.pack("<2sIIIIiiHHI", b"BM", 54, 0, 54, 40, width, height, 1, 24, 0) + bytes(20)


def jpeg(width: int, height: int) -> bytes:
    frame = struct.pack(">BBHBHHB", 0xFF, 0xC0, 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + frame + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\xff\xd9"


def webp(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", 10) + bytes(4) + sides
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def saved(kind: str, **options) -> bytes:
    import io

    file = io.BytesIO()
    picture(0).save(file, kind, **options)
    return file.getvalue()


def many_scans() -> bytes:
    """A progressive JPEG whose last scan comes 300 times: decoders take it, and their time."""
    data = saved("JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 300 + data[-2:]


COMMENT = b"\xff\xfe\xff\xff" + bytes(0xFFFD)  # a JPEG's segment of 65,535 bytes
HOSTILE = {
    "a text": (b"hello", images.NOT_IMAGE),
    "nothing": (b"", images.NOT_IMAGE),
    "a gif": (b"GIF89a" + bytes(100), images.NOT_IMAGE),
    "an svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", images.NOT_IMAGE),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", images.NOT_IMAGE),
    "a text that begins like a BMP": (b"BMW drives", images.DAMAGED),
    "a BMP of no known kind": (
        b"BM" + bytes(12) + struct.pack("<I", 77) + bytes(40),
        images.NOT_IMAGE,
    ),
    "a large png": (png(100_000, 100_000), images.TOO_LARGE),
    "a large bmp": (bmp(100_000, 100_000), images.TOO_LARGE),
    "a large bmp from the top": (bmp(100_000, -100_000), images.TOO_LARGE),
    "a large tiff": (tiff([(256, 4, 1, 100_000), (257, 4, 1, 100_000)]), images.TOO_LARGE),
    "a large jpeg": (jpeg(65_535, 65_535), images.TOO_LARGE),
    "a large webp": (webp(100_000, 100_000), images.TOO_LARGE),
    "a png of no height": (png(60, 0), images.DAMAGED),
    "a jpeg of no height": (jpeg(60, 0), images.DAMAGED),
    "a bmp of negative width": (bmp(-60, 40), images.DAMAGED),
    "a tiff without sizes": (tiff([(258, 3, 1, 8)]), images.DAMAGED),
    "a png that says more than it has": (png(60, 40, bytes(100)), images.DAMAGED),
    "a webp that says more than it has": (webp(60, 40), images.DAMAGED),
    "a tiff of floating point": (
        tiff([(256, 4, 1, 6), (257, 4, 1, 4), (258, 3, 1, 32), (339, 3, 1, 3)]),
        images.SAMPLES,
    ),
    "a tiff of very many strips": (
        tiff([(256, 4, 1, 6), (257, 4, 1, 4), (273, 4, 2**31, 8)]),
        images.DAMAGED,
    ),
    "a tiff of a directory far away": (b"II*\0" + struct.pack("<I", 2**31), images.DAMAGED),
    "a jpeg of comments alone": (b"\xff\xd8" + COMMENT * 3, images.DAMAGED),
    "a jpeg of blanks alone": (b"\xff\xd8\xff" + bytes(70_000), images.DAMAGED),
    "a jpeg of very many scans": (many_scans(), images.DAMAGED),
    **{
        f"a truncated {kind}": (saved(kind)[: len(saved(kind)) * 2 // 3], images.DAMAGED)
        for kind in ("JPEG", "PNG", "WebP", "BMP", "TIFF")
    },
    "a truncated progressive JPEG": (saved("JPEG", progressive=True)[:-200], images.DAMAGED),
    "a JPEG cut inside of its header": (saved("JPEG")[:100], images.DAMAGED),
    "a PNG cut inside of its header": (saved("PNG")[:20], images.DAMAGED),
    "a compressed TIFF that is cut": (
        saved("TIFF", compression="tiff_lzw")[:-300],
        images.DAMAGED,
    ),
}


HIDDEN = (
    "a png that says more than it has",
    "a webp that says more than it has",
    "a jpeg of very many scans",
)


@pytest.mark.parametrize("case", [case for case in HOSTILE if case not in HIDDEN])
def test_files_that_are_no_usable_images_are_counted(tmp_path, monkeypatch, case):
    """By their headers alone: a large folder is not decoded when it is opened."""
    monkeypatch.setattr(detection, "VERIFIED", 0)
    check_that_it_is_counted(tmp_path, case)


@pytest.mark.parametrize("case", HIDDEN)
def test_damage_that_headers_do_not_show(tmp_path, monkeypatch, case):
    """It is counted in a small folder. In a large one reading the image says so."""
    source = check_that_it_is_counted(tmp_path, case)
    monkeypatch.setattr(detection, "VERIFIED", 0)
    dataset = open_detection(source)
    assert dataset.problems == {}
    with pytest.raises(
        images.ImageError, match="bad.png (is truncated or damaged|has over 200 scans)"
    ):
        dataset.examples[1].image()


def check_that_it_is_counted(tmp_path: Path, case: str) -> str:
    data, problem = HOSTILE[case]
    source = coco(
        tmp_path,
        [(1, picture(0), "good.png"), (2, picture(0), "bad.png")],
        [(1, 1, [1, 1, 5, 5], {}), (2, 1, [1, 1, 5, 5], {})],
        [(1, "x")],
    )
    (tmp_path / "images" / "bad.png").write_bytes(data)
    tracemalloc.start()
    dataset = open_detection(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6
    assert dataset.problems == {problem: 1}, dataset.first
    assert [Path(e.path).name for e in dataset.examples] == ["good.png"]
    assert "bad.png" in dataset.report()[0]
    return source


def test_the_limit_of_pixels_is_the_users(tmp_path):
    listed = [(1, picture(0, 100, 100), "a.png"), (2, picture(1, 100, 101), "b.png")]
    source = coco(tmp_path, listed, [], [(1, "x")])
    assert len(open_detection(source).examples) == 2
    dataset = open_detection(source, max_megapixels=0.01)
    assert [e.size for e in dataset.examples] == [(100, 100)]
    assert dataset.problems == {images.TOO_LARGE: 1}
    with pytest.raises(UserError, match=r"no usable image: 2 x .*0.001 million.*max_megapixels"):
        open_detection(source, max_megapixels=0.001)


def test_pillows_own_limit_does_not_count(tmp_path, monkeypatch):
    """It warns, and raises, by a number of its own; tests have warnings as errors."""
    kinds = ("a.png", "b.jpg", "c.tif", "d.bmp")
    source = coco(tmp_path, [(i, picture(0), k) for i, k in enumerate(kinds)], [], [(1, "x")])
    packed = tmp_path / "images" / "c.tif"
    picture(0).save(packed, compression="tiff_lzw")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    dataset = open_detection(source)
    assert [e.image().shape for e in dataset.examples] == [(40, 60, 3)] * 4
    monkeypatch.undo()
    assert np.array_equal(dataset.examples[2].image(), np.asarray(picture(0)))


def outside_names(folder: Path) -> dict[str, str]:
    return {
        "absolute": str(folder.parent / "secret.png"),
        "parents": "../../secret.png",
        "parents of a subfolder": "a/../../../secret.png",
        "with backslashes": "..\\..\\secret.png",
        "a URL": "http://example.org/secret.png",
        "a file URL": f"file://{folder.parent}/secret.png",
        "of no parts": "./.",
        "empty": "",
        "a number": 7,
        "a zero byte": "a\0.png",
        "half a character": "\ud800.png",
    }


@pytest.mark.parametrize("case", outside_names(Path("/d/e")))
def test_names_that_leave_the_folder_are_not_opened(tmp_path, case):
    """In COCO's file_name, and in VOC's filename where XML can say it."""
    folder = tmp_path / "set"
    name: object = outside_names(folder)[case]
    source = coco(folder, [(1, picture(0), "a.png")], [], [(1, "x")])
    picture(1).save(tmp_path / "secret.png")
    path = folder / "annotations" / "a_train.json"
    said = json.loads(path.read_text())
    said["images"].append({"id": 2, "file_name": name})
    path.write_text(json.dumps(said))
    dataset = open_detection(source)
    assert [Path(e.path).name for e in dataset.examples] == ["a.png"]
    (problem,) = dataset.problems
    expected = (
        detection.CLOSED if case in ("a zero byte", "half a character") else detection.OUTSIDE
    )
    assert problem == expected and dataset.problems[problem] == 1
    if case not in ("a number", "a zero byte", "half a character", "empty", "of no parts"):
        folder = tmp_path / "voc"
        source = voc(folder, "b", thing("x", (1, 1, 5, 5)), f"<filename>{name}</filename>")
        voc(folder, "c", thing("x", (1, 1, 5, 5)))
        for stem in "bc":
            picture(0).save(folder / "JPEGImages" / f"{stem}.png")
        dataset = open_detection(source)
        assert [Path(e.path).name for e in dataset.examples] == ["c.png"]
        assert dataset.problems == {detection.OUTSIDE: 1}


@pytest.mark.parametrize(
    "case", ["an image", "its folder", "images", "labels", "a label", "data.yaml"]
)
def test_symbolic_links_are_followed_only_when_asked(tmp_path, case):
    folder = tmp_path / "set"
    source = yolo(folder, "names: [x]", {"train/a": "0 .5 .5 1 1", "val/b": "0 .5 .5 1 1"})
    moved = {
        "an image": "images/train/a.png",
        "its folder": "images/train",
        "images": "images",
        "labels": "labels",
        "a label": "labels/train/a.txt",
        "data.yaml": "data.yaml",
    }[case]
    (folder / moved).rename(tmp_path / "elsewhere")
    (folder / moved).symlink_to(tmp_path / "elsewhere")
    dataset = open_detection(source, follow_links=True)
    assert len(dataset.examples) == 2 and dataset.problems == {}
    assert [e.boxes.tolist() for e in dataset.examples] == [[[0, 0, 60, 40]]] * 2
    assert dataset.examples[0].image().shape == (40, 60, 3)
    if case in ("images", "labels", "data.yaml"):  # nothing is left
        with pytest.raises(UserError, match=r"symbolic link \(--data.follow_links\)"):
            open_detection(source)
    else:
        dataset = open_detection(source)
        assert [Path(e.path).name for e in dataset.examples] == ["b.png"]
        assert dataset.problems == {detection.LINK: 1}


def test_a_link_that_comes_after_the_folder_was_opened_is_not_followed(tmp_path):
    source = coco(tmp_path / "set", [(1, picture(0), "a.png")], [], [(1, "x")])
    (example,) = open_detection(source).examples
    picture(0).save(tmp_path / "secret.png")
    path = tmp_path / "set" / "images" / "a.png"
    path.unlink()
    path.symlink_to(tmp_path / "secret.png")
    for read in (example.image, example.key, lambda: example.reduced((1, 1))):
        with pytest.raises(UserError, match="symbolic link"):
            read()


def test_links_in_a_circle_end(tmp_path):
    source = yolo(tmp_path, "names: [x]", {"a": "0 .5 .5 1 1"})
    (tmp_path / "images" / "again").symlink_to(tmp_path / "images")
    assert len(open_detection(source, follow_links=True).examples) == 1


def test_what_is_no_file_does_not_block(tmp_path):
    source = yolo(tmp_path, "names: [x]", {"a": "0 .5 .5 1 1"})
    os.mkfifo(tmp_path / "images" / "pipe.png")
    dataset = open_detection(source)
    assert len(dataset.examples) == 1 and dataset.problems == {detection.CLOSED: 1}
    os.mkfifo(tmp_path / "labels" / "pipe.txt")
    assert open_detection(source).problems == {detection.UNREADABLE: 1}


LAUGHS = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 12))
XML = {
    "entities": (
        f'<!DOCTYPE a [<!ENTITY l0 "ha">{LAUGHS}]><annotation>&l11;</annotation>',
        detection.DOCTYPE,
    ),
    "a file of ours": (
        '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]><annotation>&x;</annotation>',
        detection.DOCTYPE,
    ),
    "a plain doctype": ("<!DOCTYPE annotation><annotation/>", detection.DOCTYPE),
    "depth": ("<a>" * 1000 + "</a>" * 1000, detection.UNREADABLE),
    "length": ("<a>" + " " * 5_000_000 + "</a>", detection.UNREADABLE),
    "no xml": ("hello", detection.UNREADABLE),
    "nothing": ("", detection.UNREADABLE),
    "an encoding that nobody knows": (
        '<?xml version="1.0" encoding="klingon"?><a/>',
        detection.UNREADABLE,
    ),
    "an undefined entity": ("<annotation>&x;</annotation>", detection.UNREADABLE),
}


@pytest.mark.parametrize("case", XML)
def test_hostile_xml(tmp_path, case):
    source = voc(tmp_path, "a", thing("x", (1, 1, 5, 5)))
    for name in ("a", "b"):
        picture(0).save(tmp_path / "JPEGImages" / f"{name}.png")
    text, problem = XML[case]
    (tmp_path / "Annotations" / "b.xml").write_text(text)
    dataset = open_detection(source)
    assert [Path(e.path).name for e in dataset.examples] == ["a.png"]
    assert dataset.problems == {problem: 1}


def test_xml_of_other_encodings(tmp_path):
    source = voc(tmp_path, "a", "")
    picture(0).save(tmp_path / "JPEGImages" / "a.png")
    text = f"<annotation>{thing('Bläuling', (1, 1, 5, 5))}</annotation>"
    for encoding in ("utf-8", "utf-16", "iso-8859-1"):
        head = f'<?xml version="1.0" encoding="{encoding}"?>'
        (tmp_path / "Annotations" / "a.xml").write_bytes((head + text).encode(encoding))
        assert open_detection(source).classes == ("Bläuling",)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("names: []", "has no class"),
        ("nc: 3", "has no class"),
        ("", "has no class"),
        ("names: 7", "cannot be read"),
        ("names: {x: y}", "cannot be read"),
        ("- 1\n- 2", "it must hold named members"),
        ("names: [a", "data.yaml"),
        ("names: !!python/object/apply:os.system ['touch HERE']", "cannot be read"),
        (BOMB + "names: *j", "cannot be read"),
        ("names: " + "[" * 400, "nested too deep"),
        ("names: [a]\n" + "#" * 5_000_000, "has over 4,194,304 bytes"),
        ("names: [a]\nnames: [b]", "stands twice"),
    ],
)
def test_hostile_yaml(tmp_path, text, reason):
    source = yolo(tmp_path, text.replace("HERE", str(tmp_path / "proof")), {"a": None})
    with pytest.raises(UserError, match=reason) as error:
        open_detection(source)
    assert str(tmp_path) in str(error.value) and "(--data.source)" in str(error.value)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "breaks off"),
        ("[]", "stands where"),
        ("hello", "stands where"),
        ('{"images": [' + "[" * 100_000, "nested too deep"),
        ('{"images": [{}]', "breaks off"),
        ('{"categories": []}', "has no class"),
        ('{"categories": [{"id": 1}, 5, {"name": "x"}]}', "3 x image or class without id"),
        (b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_hostile_json(tmp_path, text, reason):
    (tmp_path / "annotations").mkdir()
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "annotations" / "a.json").write_bytes(data)
    with pytest.raises(UserError, match=reason) as error:
        open_detection(f"coco:{tmp_path}")
    assert str(tmp_path) in str(error.value)


def test_a_broken_file_does_not_count_beside_a_good_one(tmp_path):
    source = coco(tmp_path, [(1, picture(0), "a.png")], [], [(1, "x")])
    text = '{"categories": [{"id": 1, "name": "y"}], "images": [{"id": 1, "file_name": "a.png"}'
    (tmp_path / "annotations" / "b.json").write_text(text)
    dataset = open_detection(source)
    assert dataset.classes == ("x",) and dataset.problems == {detection.UNREADABLE: 1}


def test_images_of_json_that_cannot_be_used(tmp_path):
    source = coco(
        tmp_path,
        [
            (1, picture(0), "a.png"),
            (1, None, "a.png"),
            (3, None, "missing.png"),
            (4, None, "a.png/b"),
        ],
        [(3, 1, [1, 1, 4, 4], {})],
        [(1, "x")],
    )
    path = tmp_path / "annotations" / "a_train.json"
    said = json.loads(path.read_text())
    said["images"] += [{"id": 8}, {"file_name": "a.png"}, 5, {"id": [], "file_name": "a.png"}]
    path.write_text(json.dumps(said))
    dataset = open_detection(source)
    assert len(dataset.examples) == 1
    assert dataset.problems == {detection.TWICE: 1, detection.MISSING: 2, detection.NO_NAME: 4}


def test_names_of_strangers_are_shown_on_one_line(tmp_path):
    name = "\x1b[31mred\nname" + "x" * 1000 + ".png"
    source = coco(tmp_path, [(1, picture(0), "a.png"), (2, None, name)], [], [(1, "x")])
    (line,) = open_detection(source).report()
    assert line.isprintable() and len(line) < 1000


@pytest.mark.parametrize(
    "source, reason",
    [
        ("coco:{0}/none", "none is missing"),
        ("coco:{0}/file", "file is no folder"),
        ("coco:{0}/voc", r"has no annotations/\*.json; did you mean voc:.*/voc\?"),
        ("yolo:{0}/voc", "has no data.yaml"),
        ("voc:{0}", r"has no Annotations/\*.xml"),
        ("voc:{0}/voc", "has no class"),
        ("coco:", "must be KIND:FOLDER"),
        ("{0}", "must be KIND:FOLDER"),
        ("cocoa:{0}", r"Did you mean coco\?"),
        ("coco:~nobody/x", "(--data.source)"),
    ],
)
def test_a_wrong_folder(tmp_path, source, reason):
    (tmp_path / "file").write_text("")
    voc(tmp_path / "voc", "a", "")
    with pytest.raises(UserError, match=reason) as error:
        open_detection(source.format(tmp_path))
    assert "--data.source" in str(error.value) and "\n" not in str(error.value)


def test_nothing_usable(tmp_path):
    source = coco(tmp_path, [(1, None, "a.png"), (2, None, "b.png")], [], [(1, "x")])
    with pytest.raises(UserError, match="no usable image: 2 x missing image .*a.png does not"):
        open_detection(source)


def test_an_image_that_changes_after_the_folder_was_opened(tmp_path):
    source = coco(tmp_path, [(1, picture(0), "a.png")], [], [(1, "x")])
    (example,) = open_detection(source).examples
    path = tmp_path / "images" / "a.png"
    picture(0, 41).save(path)
    with pytest.raises(UserError, match="a.png has changed"):
        example.image()
    path.write_bytes(saved("PNG")[:-100])
    with pytest.raises(images.ImageError, match="truncated or damaged"):
        example.image()
    path.unlink()
    with pytest.raises(UserError, match="cannot read .*a.png"):
        example.image()


# ---- pixels

LEFT_TOP = np.array([[[200, 30, 40], [10, 220, 60]], [[70, 80, 240], [255, 255, 255]]], np.uint8)


def block(values: np.ndarray) -> np.ndarray:
    """Four fields of 16 x 16 pixels, large enough for JPEG."""
    return values.repeat(16, 0).repeat(16, 1)


def pixels_of(path: Path) -> np.ndarray:
    folder = path.parent.parent
    source = coco(folder, [(1, None, path.name)], [], [(1, "x")])
    (example,) = open_detection(source).examples
    image = example.image()
    assert image.dtype == np.uint8 and image.shape == (*example.size, 3)
    return image[8::16, 8::16]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


GREY = np.array([[0, 100], [180, 255]], np.uint8)


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tif", "bmp"])
def test_colors_and_greys(place, kind):
    options = {"lossless": True} if kind == "webp" else {"quality": 100} if kind == "jpg" else {}
    Image.fromarray(block(LEFT_TOP)).save(place / f"a.{kind}", **options)
    assert np.abs(pixels_of(place / f"a.{kind}").astype(int) - LEFT_TOP).max() <= 2
    Image.fromarray(block(GREY)).save(place / f"b.{kind}", **options)
    grey = np.abs(pixels_of(place / f"b.{kind}").astype(int) - GREY[..., None])
    assert grey.max() <= 2


def test_one_bit_and_palettes(place):
    Image.fromarray(block(GREY > 128)).save(place / "a.png")
    assert pixels_of(place / "a.png")[..., 0].tolist() == [[0, 0], [255, 255]]
    for kind in ("png", "tif", "bmp"):
        image = Image.fromarray(block(LEFT_TOP)).quantize(4)
        assert image.mode == "P"
        image.save(place / f"b.{kind}")
        assert np.abs(pixels_of(place / f"b.{kind}").astype(int) - LEFT_TOP).max() <= 1


@pytest.mark.parametrize("kind", ["png", "tif"])
def test_sixteen_bits(place, kind):
    deep = np.array([[0, 256 * 100 + 7], [256 * 180, 65535]], np.uint16)
    Image.fromarray(block(deep)).save(place / f"a.{kind}")
    assert np.array_equal(pixels_of(place / f"a.{kind}"), np.repeat((deep >> 8)[..., None], 3, 2))


def test_sixteen_bits_of_colors(place):
    """Written by hand: Pillow writes none."""
    deep = block((LEFT_TOP.astype(int) * 256 + 5).astype(">u2"))
    rows = b"".join(b"\0" + row.tobytes() for row in deep)
    data = bytearray(png(32, 32, rows))
    data[24] = 16  # bits
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (place / "a.png").write_bytes(data)
    assert np.array_equal(pixels_of(place / "a.png"), LEFT_TOP)


@pytest.mark.parametrize("kind", ["jpg", "tif"])
def test_cmyk(place, kind):
    inks = np.array([[[0, 0, 0, 0], [255, 0, 0, 0]], [[0, 255, 0, 0], [0, 0, 0, 255]]], np.uint8)
    Image.fromarray(block(inks), "CMYK").save(place / f"a.{kind}", quality=100)
    seen = pixels_of(place / f"a.{kind}").astype(int)
    expected = [[[255, 255, 255], [0, 255, 255]], [[255, 0, 255], [0, 0, 0]]]
    assert np.abs(seen - expected).max() <= 3


@pytest.mark.parametrize("kind", ["png", "webp", "tif"])
def test_transparent_pixels_show_white(place, kind):
    options = {"lossless": True, "exact": True} if kind == "webp" else {}
    alpha = np.array([[255, 0], [51, 255]], np.uint8)
    layers = np.concatenate([LEFT_TOP, alpha[..., None]], 2)
    Image.fromarray(block(layers)).save(place / f"a.{kind}", **options)
    expected = LEFT_TOP.astype(float) * (alpha / 255)[..., None] + 255 - alpha[..., None]
    assert np.abs(pixels_of(place / f"a.{kind}") - expected).max() <= 1
    if kind == "png":
        grey = np.stack([GREY, alpha], 2)
        Image.fromarray(block(grey)).save(place / "b.png")
        expected = GREY * (alpha / 255) + 255 - alpha
        assert np.abs(pixels_of(place / "b.png")[..., 1] - expected).max() <= 1
        image = Image.fromarray(block(LEFT_TOP)).quantize(4)
        at_0 = int(np.asarray(image)[0, 0])
        image.save(place / "c.png", transparency=at_0)
        seen = pixels_of(place / "c.png").astype(int)
        assert seen[0, 0].tolist() == [255, 255, 255]
        assert np.abs(seen[0, 1] - LEFT_TOP[0, 1]).max() <= 1
        Image.fromarray(block(LEFT_TOP)).save(place / "d.png", transparency=(10, 220, 60))
        assert pixels_of(place / "d.png")[0].tolist() == [[200, 30, 40], [255, 255, 255]]


# What stands in the four fields after EXIF's turn, by the standard: where row 0 and column 0 are.
TURNED = {
    1: [[0, 1], [2, 3]],
    2: [[1, 0], [3, 2]],
    3: [[3, 2], [1, 0]],
    4: [[2, 3], [0, 1]],
    5: [[0, 2], [1, 3]],
    6: [[2, 0], [3, 1]],
    7: [[3, 1], [2, 0]],
    8: [[1, 3], [0, 2]],
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_as_exif_says(place, kind, orientation):
    """The fields are not square, so that height and width differ."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "webp" else {"quality": 100} if kind == "jpg" else {}
    stored = LEFT_TOP.repeat(16, 0).repeat(32, 1)
    Image.fromarray(stored).save(place / f"a.{kind}", exif=exif, **options)
    source = coco(place.parent, [(1, None, f"a.{kind}")], [(1, 1, [0, 0, 9, 9], {})], [(1, "x")])
    dataset = open_detection(source)
    (example,) = dataset.examples
    high, wide = (32, 16) if orientation >= 5 else (16, 32)
    assert example.size == (2 * high, 2 * wide)
    seen = example.image()[high // 2 :: high, wide // 2 :: wide].astype(int)
    expected = LEFT_TOP.reshape(4, 3)[np.array(TURNED[orientation])]
    assert np.abs(seen - expected).max() <= 2
    assert example.boxes.tolist() == [[0, 0, 9, 9]]
    smaller = example.reduced((high // 2, wide // 2))
    factor = example.size[0] / smaller.shape[0]
    assert factor == example.size[1] / smaller.shape[1] and factor == (4 if kind == "jpg" else 1)


def test_damaged_exif_is_passed_over(place):
    for name, exif in {"a": b"II*\0\xff\xff\xff\xff", "b": b"hello", "c": b""}.items():
        picture(0).save(place / f"{name}.jpg", exif=b"Exif\0\0" + exif)
        assert pixels_of(place / f"{name}.jpg").shape == (2, 4, 3)


def test_what_a_camera_adds_to_a_jpeg_is_not_parsed(place):
    """Segments of comments, previews and EXIF without end, which Pillow would join."""
    data = saved("JPEG")
    for mark in (b"\xff\xe1", b"\xff\xed", b"\xff\xfe"):
        text = mark + b"\xff\xff" + b"Exif\0\0" + bytes(0xFFFD - 6)
        data = data[:2] + text * 40 + data[2:]
    (place / "a.jpg").write_bytes(data)
    assert pixels_of(place / "a.jpg").shape == (2, 4, 3)


@pytest.mark.parametrize("height, width", [(1, 1), (10, 8000), (8000, 10), (1, 3000)])
def test_images_of_odd_sizes(tmp_path, height, width):
    source = coco(
        tmp_path, [(1, picture(0, height, width), "a.png")], [(1, 1, [0, 0, 1, 1], {})], [(1, "x")]
    )
    (example,) = open_detection(source).examples
    assert example.image().shape == (height, width, 3) and len(example.boxes) == 1


# ---- hold-out


def test_equal_images_are_held_out_together(tmp_path):
    """Whatever their names and folders are, and a hundred times."""
    listed = [(i, picture(i % 50), f"{'ab'[i % 2]}{i}/x.png") for i in range(100)]
    dataset = open_detection(coco(tmp_path, listed, [], [(1, "x")]))
    learned, held = split(dataset.examples, 0.3)
    assert sorted(learned + held) == [*range(100)]
    assert {i % 50 for i in learned}.isdisjoint(i % 50 for i in held)
    assert 8 <= len(held) <= 52
    # Another image moves no other one.
    listed.append((100, picture(1000), "new.png"))
    more = open_detection(coco(tmp_path, listed, [], [(1, "x")]))
    assert [i for i in split(more.examples, 0.3)[1] if i < 100] == held


def test_few_images_have_both_sides(tmp_path):
    listed = [(i, picture(i), f"{i}.png") for i in range(2)]
    dataset = open_detection(coco(tmp_path, listed, [], [(1, "x")]))
    for fraction in (1e-9, 0.5, 0.99):
        learned, held = split(dataset.examples, fraction)
        assert len(learned) == len(held) == 1
    assert split(dataset.examples, 0.0) == ([0, 1], [])
    alike = [(i, picture(0), f"{i}.png") for i in range(2)]
    dataset = open_detection(coco(tmp_path, alike, [], [(1, "x")]))
    assert split(dataset.examples, 0.5) == ([0, 1], [])


def test_large_files_with_equal_margins_differ(tmp_path):
    """Uncompressed images whose first and last rows are white."""
    keys = []
    for seed in range(2):
        pixels = np.full((800, 900, 3), 255, np.uint8)
        pixels[300:500, 300:600] = seed
        listed = [(1, Image.fromarray(pixels), "a.bmp")]
        dataset = open_detection(coco(tmp_path / str(seed), listed, [], [(1, "x")]))
        assert os.path.getsize(dataset.examples[0].path) > 2**20
        keys.append(dataset.examples[0].key())
    assert keys[0] != keys[1]


def test_the_fingerprint_follows_the_truths(tmp_path):
    def fingerprint(name, box, classes):
        folder = tmp_path / name
        return open_detection(
            coco(folder, [(1, picture(0), "a.png")], [(1, 1, box, {})], classes)
        ).fingerprint()

    first = fingerprint("a", [1, 1, 5, 5], [(1, "x")])
    assert first == fingerprint("b", [1, 1, 5, 5], [(1, "x")])
    assert first != fingerprint("c", [1, 1, 5, 6], [(1, "x")])
    assert first != fingerprint("d", [1, 1, 5, 5], [(1, "y")])
