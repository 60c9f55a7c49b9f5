"""What the fuzzer (tests/fuzz.py) feeds: parsers of what users, runs and supervisors write.

A target has good inputs, the edits that know its format, and a function that reads an input as the
project does, to the last value. UserError and OSError are answers; anything else is a finding.
"""

import base64
import contextlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megajax.checkpoint.lease import RECORD, Attempt, Lease
from megajax.checkpoint.steps import METADATA, StepFolder
from megajax.core import config
from megajax.core.errors import UserError
from megajax.data import corpus, detection, documents, images, vision
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.tokenizer import ByteTokenizer, open_tokenizer, train_bpe
from megajax.models.vlm import VlmConfig
from megajax.monitor import heartbeat, timeline
from megajax.systems.elastic.events import Journal
from tests import mutations
from tests.mutations import Edit


@dataclass(frozen=True)
class Target:
    """seeds: makes good inputs. read: gets an input and an empty folder that it may fill. slack:
    bytes of memory that any input may take."""

    seeds: Callable[[Path], Sequence[bytes]]
    edits: Sequence[Edit]
    read: Callable[[bytes, Path], None]
    slack: int = 64 * 2**20


def _one(text: str | dict) -> Callable[[Path], list[bytes]]:
    """Returns seeds of one text, or of JSON."""
    return lambda _: [(text if isinstance(text, str) else json.dumps(text)).encode()]


# ---- --config=FILE

YAML = """base: &base {steps: 10, seq_len: 128}
train:
  <<: *base
  lr: 1e-3
model:  # of a decoder
  layers: 2
  dtype: none
data: {source: "stdlib:0.7,notes/:0.3", holdout: 0.05}
when: 2026-01-02
"""
TOML = (
    'run_dir = "x"\n[train]\nsteps = 10\nlr = 1e-3\ntimes = [1, 2.5, 1979-05-27]\n[a.b.c]\nd = 1\n'
)
NAMES = {"train.steps": "train.steps", "train.lr": "train.lr", "model.layers": "model.layers"}


def _settings(data: bytes, folder: Path) -> None:
    for suffix in (".yaml", ".toml", ".json"):
        file = folder / f"config{suffix}"
        file.write_bytes(data)
        with contextlib.suppress(UserError):
            config.flatten(config.read(file), NAMES, {"train.lr"})


def _settings_seeds(folder: Path) -> list[bytes]:
    nested = {"train": {"steps": 10, "lr": 0.5}, "model": {"layers": 2}, "run_dir": "none"}
    return [YAML.encode(), TOML.encode(), json.dumps(nested).encode()]


# ---- what a supervised run leaves: events.jsonl, metrics.jsonl, spans.json, progress, attempt.json


def _report_seeds(folder: Path) -> list[bytes]:
    events = [{"time": 1.5 * i, "clock": i, "event": e} for i, e in enumerate(("start", "fault"))]
    rows = [{"step": i, "time": i, "step_time_s": 0.5, "time_compile_s": 0.1} for i in (1, 2, 2)]
    return ["\n".join(map(json.dumps, [*events, *rows])).encode()]


def _report(data: bytes, folder: Path) -> None:
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).write_bytes(data)
    timeline.figures(folder, folder)


SPANS = {
    "spans": {"0": [["data", 1, 0.0, 0.5], ["launch", 1, 0.5, 1.0]], "1": [["data", 1, 0, 1]]},
    "hosts": {"0": "a", "1": "b"},
    "offsets": {"a": 0.0},
    "grid": "data=2",
}


def _spans(data: bytes, folder: Path) -> None:
    (folder / "attempt0").mkdir()
    (folder / "attempt0" / "spans.json").write_bytes(data)
    timeline.shares(folder)


def _progress_seeds(folder: Path) -> list[bytes]:
    file = folder / "rank0"
    beat = heartbeat.Heartbeat(file)
    for step in range(1, 4):
        for code in range(1, 6):
            beat.keep(step + code / 10, step + code / 10 + 0.1, step, code)
            beat.write(step + code / 10, step, code, 2.5, 0.1, 1.0)
    return [file.read_bytes()]


def _progress(data: bytes, folder: Path) -> None:
    """As an agent tells the driver, and the driver keeps it."""
    (folder / "rank0").write_bytes(data)
    now = heartbeat.read(folder / "rank0")
    spans = heartbeat.read_spans(folder / "rank0")
    if now is not None:
        json.dumps(vars(now))
    told = json.loads(json.dumps([[s.section, s.step, s.begin, s.end] for s in spans]))
    journal = Journal(folder / "out", lambda text: None)
    try:
        journal.evidence(0, {}, {"0": told, "1": told}, {0: "a", 1: "b"}, {"a": 0.5}, None)
        if journal.lost:
            raise AssertionError("evidence was lost")
    finally:
        journal.close()


def _attempt(data: bytes, folder: Path) -> None:
    (folder / RECORD).write_bytes(data)
    lease = Lease(folder, Attempt("run", 2))
    lease.is_lost()
    lease.take()


# ---- what describes a step, a corpus and a tokenizer


def _step_seeds(folder: Path) -> list[bytes]:
    described = {"item_handlers": None, "metrics": {}, "custom_metadata": {"rows": 7, "a": [1]}}
    arrays = {"array_metadata": {"param_name": "w", "chunk_shape": [2, 3], "write_shape": [2]}}
    return [json.dumps(x).encode() for x in (described, {"array_metadatas": [arrays]})]


def _step(data: bytes, folder: Path) -> None:
    from megajax.checkpoint import orbax_io  # here: it takes jax

    step = folder / "5"
    (step / "state" / "array_metadatas").mkdir(parents=True)
    (step / "state" / "array_metadatas" / "process_0").write_bytes(data)
    (step / METADATA).write_bytes(data)
    for chunk in orbax_io.stored_chunks(step).values():
        orbax_io.amplification(chunk, chunk, [])
    steps = StepFolder(folder)
    for number in steps.steps():
        with contextlib.suppress(UserError):
            steps.record(number)
        json.dumps(steps.data_state(number))


def _pair(folder: Path) -> TokenFile:
    with TokenWriter(folder / "x", 300) as writer:
        for n in (5, 0, 3):
            writer.add(np.arange(n))
    return TokenFile(folder / "x")


def _table_seeds(folder: Path) -> list[bytes]:
    file = _pair(folder)
    keys = [documents.token_key(file.read(i, 0, n)) for i, n in enumerate((5, 0, 3))]
    documents.write_documents(folder / "x", [1, 2, 3], keys, [7, 8, 9])
    np.savez(folder / "y.npz", a=np.zeros(3))
    table, archive = folder / "x.documents.npy", folder / "y.npz"
    return [table.read_bytes(), archive.read_bytes()]


def _table(data: bytes, folder: Path) -> None:
    file = _pair(folder)
    (folder / "x.documents.npy").write_bytes(data)
    documents.open_documents(file, ByteTokenizer(), 2**30, folder / "cache", lambda text: None)


def _stats(data: bytes, folder: Path) -> None:
    file = _pair(folder)
    (folder / "x.json").write_bytes(data)
    corpus.recorded_tokenizer(str(file.prefix))
    corpus._check_recorded(file.prefix, ByteTokenizer(), corpus.DataConfig())


STATS = {"source": "x", "tokenizer": "bytes", "tokenizer_identity": "bytes", "documents": 3}


def _specials_seeds(folder: Path) -> list[bytes]:
    bos = {"__type": "AddedToken", "content": "<|bos|>", "special": True}
    rows = {
        "bos_token": bos,
        "eos_token": "<|eos|>",
        "chat_template": "{{x}}",
        "added": {"0": bos},
    }
    return [json.dumps(rows).encode()]


def _specials(data: bytes, folder: Path) -> None:
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"fuzz-bpe-{os.getppid()}.json"
    if not file.exists():
        train_bpe(["hello world, hello there"] * 3, 270, file)
    (folder / "tokenizer.json").symlink_to(file)
    (folder / "tokenizer_config.json").write_bytes(data)
    tokenizer: Any = open_tokenizer(str(folder))
    tokenizer.encode(["hello <|bos|>"])


_LOCK = {"host": "a", "pid": 7, "since": "now", "command": "python x.py"}


def _lock(data: bytes, folder: Path) -> None:
    from megajax.training import run_lock  # here: it takes jax

    (folder / "lock").write_bytes(data)
    file = os.open(folder / "lock", os.O_RDONLY)
    try:
        run_lock._holder(file)
    finally:
        os.close(file)


BINARY = (*mutations.COMMON, mutations.set_number)
# ---- folders of annotated images

COCO = {
    "images": [{"id": 3, "file_name": "a.png", "width": 24, "height": 16}],
    "annotations": [
        {"image_id": 3, "category_id": 7, "bbox": [1.5, 2, 3, 4], "segmentation": [[1, 2, 3, 4]]}
    ],
    "categories": [{"id": 7, "name": "x"}],
}
VOC = """<?xml version="1.0"?><annotation><filename>a.png</filename><size><width>24</width>
<height>16</height></size><object><name>x</name><difficult>1</difficult><bndbox><xmin>1</xmin>
<ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox></object></annotation>"""


def _image_seeds(folder: Path) -> list[bytes]:
    smooth = np.add.outer(np.arange(16), np.arange(24)).astype(np.uint8)
    colors = Image.fromarray(np.stack([smooth * 6, 255 - smooth, smooth * 3], 2))
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds = []
    for kind, options in (
        ("JPEG", {"exif": exif}),
        ("JPEG", {"progressive": True}),
        ("PNG", {"exif": exif}),
        ("WebP", {"exif": exif}),
        ("WebP", {"lossless": True}),
        ("TIFF", {"exif": exif}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("BMP", {}),
    ):
        colors.save(folder / "image", kind, **options)
        seeds.append((folder / "image").read_bytes())
    for mode in ("1", "P", "LA", "RGBA"):
        colors.convert(mode).save(folder / "image", "PNG")
        seeds.append((folder / "image").read_bytes())
    return seeds


def _image(data: bytes, folder: Path) -> None:
    (folder / "image").write_bytes(data)
    with open(folder / "image", "rb") as file:
        header = images.read_header(file, "image", 1.0)
        assert images.read_pixels(file, header, "image").shape == (*header.size, 3)
        images.read_pixels(file, header, "image", (1, 1))


def _folder(kind: str, name: str) -> Callable[[bytes, Path], None]:
    """Returns a reader of one annotation file in a folder with an image."""

    def read(data: bytes, folder: Path) -> None:
        for below in ("images/a.png", "JPEGImages/a.png", "labels/a.txt", "data.yaml", name):
            (folder / below).parent.mkdir(parents=True, exist_ok=True)
        for below in ("images", "JPEGImages"):
            Image.new("RGB", (24, 16)).save(folder / below / "a.png")
        (folder / "data.yaml").write_text("names: [x, y]")
        (folder / name).write_bytes(data)
        dataset = detection.open_detection(f"{kind}:{folder}", 1.0)
        for example in dataset.examples:
            height, width = example.size
            assert (example.boxes >= 0).all() and (example.boxes[:, 2:] <= [width, height]).all()
            assert (example.boxes[:, :2] < example.boxes[:, 2:]).all()
            assert (example.labels < len(dataset.classes)).all()
            example.image()
        assert all(line.isprintable() for line in dataset.report())

    return read


# ---- conversations about images

_CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a <image> b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
    ],
    "images": ["a.png", "data:image/png;base64,"],
}


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (60, 56), "red").save(file, "PNG")
    return file.getvalue()


def _chat_seeds(folder: Path) -> list[bytes]:
    url = "data:image/png;base64," + base64.b64encode(_picture()).decode()
    chat = json.dumps(_CHAT).replace("data:image/png;base64,", url)
    return [chat.encode(), json.dumps({"file_name": "a.png", "text": "x"}).encode()]


def _archive_seeds(folder: Path) -> list[bytes]:
    seeds = []
    members = {"a.png": _picture(), "a.txt": b"x", "b.json": b'{"text": "x"}', "b.png": _picture()}
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as tar:
            for name, data in members.items():
                info = tarfile.TarInfo("x" * 120 + "/" + name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        seeds.append(file.getvalue())
    return seeds


def _samples(name: str) -> Callable[[bytes, Path], None]:
    """Returns a reader of a source of samples; every sample is made, and is a row."""

    def read(data: bytes, folder: Path) -> None:
        (folder / "a.png").write_bytes(_picture())
        (folder / name).write_bytes(data)
        spec = vision.VisionDataConfig(source=str(folder / name), holdout=0.0)
        model = VlmConfig()
        opened = vision.open_vision(spec, 64, 0, model, ByteTokenizer())
        rows = vision.VisionRows(opened.train, spec, 64, 0, model)
        for i in range(rows.rows_per_epoch or 0):
            row = rows[i]
            assert ((row["tokens"] == model.image_token) == (row["places"] >= 0)).all()
            assert row["places"].max() < (row["images"] >= 0).sum() // 4

    return read


def _sent(data: bytes, folder: Path) -> None:
    pixels = images.decode(data, max_pixels=10**6)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    assert pixels.shape[0] * pixels.shape[1] <= 10**6


TARGETS = {
    "sent": Target(_image_seeds, (*mutations.COMMON, mutations.set_field), _sent),
    "chats": Target(_chat_seeds, (*mutations.TEXT, mutations.edit_lines), _samples("a.jsonl")),
    "archive": Target(_archive_seeds, (*mutations.COMMON, mutations.set_field), _samples("a.tar")),
    "image": Target(_image_seeds, (*mutations.COMMON, mutations.set_field), _image),
    "coco": Target(_one(COCO), mutations.TEXT, _folder("coco", "annotations/a.json")),
    "voc": Target(_one(VOC), mutations.TEXT, _folder("voc", "Annotations/a.xml")),
    "yolo": Target(_one("names: {0: x, 7: y}\n"), mutations.TEXT, _folder("yolo", "data.yaml")),
    "boxes": Target(
        _one("0 .5 .5 1 1\n1 0 0 0 1 1 1\n"), mutations.TEXT, _folder("yolo", "labels/a.txt")
    ),
    "settings": Target(_settings_seeds, mutations.TEXT, _settings),
    "report": Target(_report_seeds, (*mutations.TEXT, mutations.edit_lines), _report),
    "spans": Target(_one(SPANS), mutations.TEXT, _spans),
    "progress": Target(_progress_seeds, BINARY, _progress),
    "attempt": Target(_one({"run": "run", "number": 2}), mutations.TEXT, _attempt),
    "step": Target(_step_seeds, mutations.TEXT, _step),
    "table": Target(_table_seeds, mutations.TEXT, _table),
    "stats": Target(_one(STATS), mutations.TEXT, _stats),
    "specials": Target(_specials_seeds, mutations.TEXT, _specials),
    "lock": Target(_one(_LOCK), mutations.TEXT, _lock),
}
