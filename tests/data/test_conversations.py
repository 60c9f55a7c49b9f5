"""Conversations about images: what is read, what is refused, and rows that never cut an image."""

import base64
import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megajax.core.errors import UserError
from megajax.data.conversations import data_url, open_conversations, tar_members
from megajax.data.images import collate, patch_count, patchify
from megajax.data.pack import IGNORED
from megajax.data.tokenizer import ByteTokenizer
from megajax.data.vision import (
    GREY,
    Dialogue,
    VisionDataConfig,
    VisionRows,
    evaluated,
    fixed_rows,
    open_vision,
    packed,
    prepared,
    side_keys,
)
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig, positions

MODEL = VlmConfig()
IMAGE = MODEL.image_token
BEGIN, END = 256, 257


def png(seed: int, height: int = 56, width: int = 56) -> bytes:
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asked(image: str, question: str = "what?", answer: str = "a cat") -> dict:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
    return {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
    }


def write_lines(path: Path, values: list) -> str:
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return str(path)


def write_tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> str:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def opened(source: str, seq_len: int = 64, **settings):
    data = VisionDataConfig(**({"source": source, "holdout": 0.0} | settings))
    return open_vision(data, seq_len, 0, MODEL, ByteTokenizer()), data


def text_of(ids: np.ndarray) -> str:
    return "".join("#" if i == IMAGE else chr(i) if i < 256 else "<>"[i - 256] for i in ids)


def test_collate_gives_a_row_for_each_sample():
    images = [np.random.default_rng(i).integers(0, 256, (56, 84, 3), np.uint8) for i in range(2)]
    samples = [
        {"tokens": [7, IMAGE, 8], "images": images[:1]},
        {"tokens": [7, 8], "images": []},
        {"tokens": [IMAGE, IMAGE, 9], "images": images, "targets": [-1, 5, 6]},
    ]
    batch = collate(samples, MODEL)
    assert batch["tokens"].tolist() == [
        [7, *[IMAGE] * 6, 8, 0, 0, 0, 0, 0],
        [7, 8, *[0] * 11],
        [*[IMAGE] * 12, 9],
    ]
    assert batch["segments"].tolist()[0] == [1] * 8 + [-1] * 5
    assert batch["targets"].tolist() == [
        [-1] * 6 + [8] + [-1] * 6,
        [8] + [-1] * 12,
        [-1] * 11 + [5, 6],
    ]
    assert batch["places"].tolist()[2] == [*range(12), -1]
    assert batch["images"].tolist()[2] == [0] * 24 + [1] * 24 + [-1] * 16
    assert batch["images"].tolist()[1] == [-1] * 64  # a power of two of merged ones
    for row, sample in enumerate(samples):
        at = 0
        for number, image in enumerate(sample["images"]):
            patches, places, _ = patchify(image, MODEL.tower)
            span = slice(at, at := at + len(patches))
            assert (batch["patches"][row, span] == patches).all()
            assert (batch["patch_places"][row, span] == places).all()
            assert (batch["images"][row, span] == number).all()
        ids = batch["tokens"][row][batch["segments"][row] > 0]
        true = positions(ids, [(2, 3)] * len(sample["images"]), IMAGE)
        assert (batch["rotary"][row, : len(ids)] == true.T).all()
    types = {name: x.dtype.name for name, x in batch.items()}
    assert types.pop("patches") == "uint8" and {*types.values()} == {"int32"}
    with pytest.raises(ValueError, match="^row 1: 1 placeholders .* and 0 images"):
        collate([samples[0], {"tokens": [IMAGE], "images": []}], MODEL)
    with pytest.raises(ValueError, match="^row 0: 0 placeholders .* and 1 images"):
        collate([{"tokens": [3], "images": images[:1]}], MODEL)
    with pytest.raises(ValueError, match="^row 0: .*200 times"):
        thin = np.zeros((1, 300, 3), np.uint8)
        collate([{"tokens": [IMAGE], "images": [thin]}], MODEL)


def test_collate_takes_arrays_and_refuses_what_is_no_sample():
    images = np.zeros((2, 56, 84, 3), np.uint8)
    batch = collate([{"tokens": np.array([IMAGE, 3, IMAGE]), "images": images}], MODEL)
    assert (batch["images"][0] == [0] * 24 + [1] * 24 + [-1] * 16).all()
    for sample, message in (
        ({"tokens": []}, "one or more whole numbers"),
        ({}, "needs the member tokens"),
        ([1, 2], "needs the member tokens"),
        ({"tokens": [2**40]}, f"0..{MODEL.vocab - 1}, not 1099511627776"),
        ({"tokens": [2**70]}, "whole numbers"),
        ({"tokens": [3, -5]}, "not -5"),
        ({"tokens": [MODEL.vocab]}, f"not {MODEL.vocab}"),
        ({"tokens": [1.7]}, "whole numbers"),
        ({"tokens": [[1, 2]]}, "whole numbers"),
        ({"tokens": [1, 2], "targets": [1, -2]}, "targets must be in -1.."),
        ({"tokens": [1, 2], "targets": [1]}, "1 targets for 2 tokens"),
        ({"tokens": [IMAGE], "images": [Image.new("RGB", (28, 28))]}, "not a Image"),
        ({"tokens": [IMAGE], "images": [[[[1, 2, 3]]]]}, "not a list"),
        ({"tokens": [IMAGE], "images": 5}, "not iterable"),
    ):
        with pytest.raises(ValueError, match=f"^row 1: .*{message}"):
            collate([{"tokens": [1]}, sample], MODEL)


def test_an_image_is_resized_once(tmp_path):
    """Sizes that `fit` makes and would change again: a record has the patches that were counted."""
    for least, most, size in (
        (50176, 50176, (300, 200)),
        (3136, 3136, (70, 90)),
        (3136, 28 * 28 * 1280, (41, 5800)),
        (3136, 12544, (20, 4000)),
    ):
        tower = dataclasses.replace(MODEL.tower, min_pixels=least, max_pixels=most)
        model = dataclasses.replace(MODEL, tower=tower)
        source = write_lines(tmp_path / "a.jsonl", [asked(url(png(0, *size)))])
        spec = VisionDataConfig(source=source, holdout=0.0, patches=1200)
        data = open_vision(spec, 512, 0, model, ByteTokenizer())
        made = prepared(data.train.sample(0), model)
        assert [[len(made.tokens), len(made.patches)]] == data.train.sizes.tolist()
        assert len(made.patches) == patch_count(size, tower)


def test_answers_alone_are_targets():
    source = {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a?"}]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "<image>b?"},
            {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        ],
        "images": [url(png(0)), url(png(1))],
    }
    from megajax.data.conversations import Place, record

    read = record(source, "it", Place(None, False))
    tokens, targets = Dialogue(ByteTokenizer(), IMAGE).encode(read)
    assert text_of(tokens) == "<be kind\n#a?\nyes>#b?\nno>"
    learned = [chr(t) if t < 256 else ">" for t in targets if t >= 0]
    assert "".join(learned) == "yes>no>"
    assert (targets[:-1][targets[:-1] >= 0] == tokens[1:][targets[:-1] >= 0]).all()


def test_chat_template_of_qwen2_vl(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from megajax.data.conversations import Inline, Record, Turn
    from megajax.data.tokenizer import open_tokenizer

    names = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=names,
        show_progress=False,
    )
    made.train_from_iterator(["a"], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    dialogue = Dialogue(tokenizer, 4)
    turns = (Turn("user", (None, "<|image_pad|> hi")), Turn("assistant", ("yes",)))
    tokens, targets = dialogue.encode(Record("it", turns, (Inline("a", b""),)))
    assert tokenizer.decode(tokens, special=True) == (  # Qwen2-VL's chat_template.json
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|image_pad|> hi<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert (tokens == 4).sum() == 1  # a text never becomes a placeholder
    assert tokenizer.decode(targets[targets >= 0], special=True) == "yes<|im_end|>"


def test_sources_give_the_same_samples(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    files = [png(k) for k in range(3)]
    (tmp_path / "images").mkdir()
    for k, data in enumerate(files):
        (tmp_path / "images" / f"{k}.png").write_bytes(data)
    captions = [f"caption {k}" for k in range(3)]
    sources = [
        write_lines(
            tmp_path / "a.jsonl",
            [asked(url(f), "", c) for f, c in zip(files, captions, strict=True)],
        ),
        write_lines(
            tmp_path / "b.jsonl", [asked(f"images/{k}.png", "", captions[k]) for k in range(3)]
        ),
        write_tar(
            tmp_path / "c.tar",
            [
                member
                for k, (data, caption) in enumerate(zip(files, captions, strict=True))
                for member in ((f"x/{k:03}.png", data), (f"x/{k:03}.txt", caption.encode()))
            ],
        ),
        write_tar(
            tmp_path / ("d" * 120 + ".tar"),
            [
                member
                for k, (data, caption) in enumerate(zip(files, captions, strict=True))
                for member in (
                    ("y" * 150 + f"/{k:03}.json", json.dumps({"caption": caption}).encode()),
                    ("y" * 150 + f"/{k:03}.png", data),
                    ("y" * 150 + f"/{k:03}.pkl", b"cos\nsystem\n(S'true'\ntR."),
                )
            ],
            tarfile.PAX_FORMAT,
        ),
        str(tmp_path / "e"),
        str(tmp_path / "f"),
    ]
    for folder in ("e", "f"):
        (tmp_path / folder).mkdir()
        for k, data in enumerate(files):
            (tmp_path / folder / f"{k}.png").write_bytes(data)
    for k, caption in enumerate(captions):
        (tmp_path / "e" / f"{k}.txt").write_text(caption + "\n")
    write_lines(
        tmp_path / "f" / "metadata.jsonl",
        [{"file_name": f"{k}.png", "text": captions[k]} for k in range(3)],
    )
    table = pyarrow.table(
        {"image": [{"bytes": f, "path": None} for f in files], "caption": captions}
    )
    parquet.write_table(table, tmp_path / "g.parquet", row_group_size=2)
    sources.append(str(tmp_path / "g.parquet"))
    messages = [asked("unused")["messages"] for _ in files]
    for m, caption in zip(messages, captions, strict=True):
        m[0]["content"] = [{"type": "image"}]
        m[1]["content"] = [{"type": "text", "text": caption}]
    table = pyarrow.table({"messages": messages, "images": [[f] for f in files]})
    parquet.write_table(table, tmp_path / "h.parquet")
    sources.append(str(tmp_path / "h.parquet"))
    for source in sources:
        data, _ = opened(source)
        for k, caption in enumerate(captions):
            sample = data.train.sample(k)
            assert text_of(sample.tokens) == f"<#\n{caption}>", source
            true = np.asarray(Image.open(io.BytesIO(files[k])))
            assert len(sample.images) == 1 and (sample.images[0] == true).all(), source
    several, _ = opened(str(tmp_path / "[cd]*.tar"))
    assert several.count == (6, 0)
    assert list(several.problems.counts) == ["member .pkl, which is not read"]


WRONG = {
    "placeholder": (
        {
            "messages": [
                {"role": "user", "content": "<image><image>x"},
                {"role": "assistant", "content": "y"},
            ],
            "images": ["@"],
        },
        "placeholder without an image",
    ),
    "image": (
        {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "images": ["@"],
        },
        "1 of 1 images have no placeh",
    ),
    "no images": (
        {
            "messages": [
                {"role": "user", "content": "<image>x"},
                {"role": "assistant", "content": "y"},
            ]
        },
        "placeholder without an image: the record has 0",
    ),
    "no answer": ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
    "remote": (asked("https://example.com/a.png"), "URLs are not read"),
    "file": (asked("file:///etc/passwd"), "URLs are not read"),
    "scheme": (asked("//example.com/a.png"), "URLs are not read"),
    "absolute": (asked("/etc/passwd"), "not a name below the folder"),
    "outside": (asked("images/../../a.png"), "not a name below the folder"),
    "link": (asked("link.png"), "symbolic link"),
    "missing": (asked("nobody.png"), "cannot read nobody.png: No such file"),
    "text": (asked("text.png"), "not a JPEG, PNG, WebP"),
    "tiff": (asked("a.tiff"), "is a TIFF; PNG, JPEG and WebP are read"),
    "pixels": (asked("half.png"), "truncated or damaged"),
    "base64": (asked("data:image/png;base64,@@@"), "not base64"),
    "svg": (asked("data:image/svg+xml;base64,PHN2Zz4="), "not a JPEG, PNG, WebP"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "must have a role"),
    "part": ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "part of type"),
    "empty": ({}, "it needs messages"),
    "surrogate": (asked("@", "\ud800"), "a lone surrogate"),
    "list": ([1], "it must be an object"),
    "answer": (
        {"messages": [{"role": "assistant", "content": [{"type": "image", "image": "@"}]}]},
        "answers are texts",
    ),
    "long": (asked("thin.png"), "200 times"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_names_the_row(name: str, tmp_path):
    value, message = WRONG[name]
    value = json.loads(json.dumps(value).replace('"@"', json.dumps(url(png(0)))))
    outside = tmp_path / "outside.png"
    outside.write_bytes(png(3))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.png").symlink_to(outside)
    (folder / "text.png").write_text("hello")
    (folder / "half.png").write_bytes(png(1)[:4000])
    (folder / "thin.png").write_bytes(png(1, 1, 300))
    Image.new("RGB", (30, 30)).save(folder / "a.tiff")
    source = write_lines(folder / "a.jsonl", [asked(url(png(2))), value])
    with pytest.raises(UserError, match=r"a\.jsonl line 2: .*" + message):
        opened(source)
    if name == "pixels":  # its header is right: known when it is decoded
        return
    data, _ = opened(source, faulty="skip")
    assert data.count == (1, 0) and list(data.problems.counts.values()) == [1]


def test_what_does_not_fit_is_counted_or_an_error(tmp_path):
    values = [asked(url(png(0))), asked(url(png(1, 280, 280))), asked(url(png(2)), "x" * 80)]
    source = write_lines(tmp_path / "a.jsonl", values)
    data, _ = opened(source)
    assert data.count == (1, 0)
    assert data.problems.counts == {"sample that does not fit a row": 2}
    assert "line 2 has 113 tokens and 400 patches" in data.problems.reasons()
    with pytest.raises(UserError, match="line 2 has 113 tokens and 400 patches"):
        opened(source, misfit="error")
    with pytest.raises(UserError, match=r"data.patches=6 must be a multiple .* nearest: 4, 8"):
        opened(source, patches=6)
    with pytest.raises(UserError, match=r"no sample that can be used: 3 x sample that"):
        opened(source, seq_len=8)


def test_folders_without_captions_and_other_names_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(png(0))
    with pytest.raises(UserError, match="is a folder without captions: 1 images"):
        opened(str(tmp_path))
    with pytest.raises(UserError, match="must be rendered, FOLDER"):
        opened(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="must be rendered, FOLDER"):
        opened(str(tmp_path / "a.zip"))
    (tmp_path / "a.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(UserError, match="damaged header"):
        opened(str(tmp_path / "a.tar"))
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(UserError, match="line 1 is not JSON"):
        opened(str(tmp_path / "a.jsonl"))


def test_tar_members_stay_inside_of_the_file(tmp_path):
    good = Path(write_tar(tmp_path / "a.tar", [("a.png", png(0)), ("a.txt", b"x")])).read_bytes()
    assert [name for name, *_ in tar_members(io.BytesIO(good), "it")] == ["a.png", "a.txt"]
    with pytest.raises(UserError, match="breaks off"):
        list(tar_members(io.BytesIO(good[:600]), "it"))
    for size in (b"-0000000001\0", b"77777777777\0", b"\xff" * 12):
        head = bytearray(good[:512])
        head[124:136] = size
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        with pytest.raises(UserError, match="damaged header|breaks off"):
            list(tar_members(io.BytesIO(bytes(head) + good[512:]), "it"))


def test_data_urls_are_bounded():
    assert data_url("data:image/png;base64,AAEC", 3) == bytes([0, 1, 2])
    assert data_url("data:;base64,AAEC", 3) == bytes([0, 1, 2])
    for bad in ("data:image/png,AAEC", "data:text/html;base64,AAEC", "data:" + ";a" * 200):
        with pytest.raises(UserError, match="must begin like"):
            data_url(bad, 10)
    with pytest.raises(UserError, match="10 are read at most"):
        data_url("data:image/png;base64," + "A" * 100, 10)


def conversations(tmp_path: Path, count: int) -> str:
    rng = np.random.default_rng(0)
    values = []
    for k in range(count):
        sizes = rng.integers(1, 4, (int(rng.integers(0, 3)), 2))
        parts: list[dict] = [
            {"type": "image", "image": url(png(100 * k + j, 56 * int(h), 56 * int(w)))}
            for j, (h, w) in enumerate(sizes)
        ]
        content = [*parts, {"type": "text", "text": "?" * int(rng.integers(1, 9))}]
        answer = {"role": "assistant", "content": str(k)}
        values.append({"messages": [{"role": "user", "content": content}, answer]})
    return write_lines(tmp_path / "many.jsonl", values)


def test_rows_hold_whole_samples_and_depend_on_seed_and_number_alone(tmp_path):
    source = conversations(tmp_path, 40)
    data, spec = opened(source, seq_len=96, patches=200)
    rows = VisionRows(data.train, spec, 96, 3, MODEL)
    count = rows.rows_per_epoch
    assert count is not None
    seen: list[str] = []
    for i in range(2 * count):
        row = rows[i]
        shapes = {x.shape for x in row.values()}
        assert shapes == {(96,), (96, 3), (200, 588), (200, 2), (200,)}
        quarter = 0
        for segment in range(1, row["segments"].max() + 1):
            at = row["segments"] == segment
            ids, places = row["tokens"][at], row["places"][at]
            shown = places[places >= 0]
            assert (ids[places >= 0] == IMAGE).all() and (ids[places < 0] != IMAGE).all()
            assert shown.tolist() == [*range(quarter, quarter := quarter + len(shown))]
            assert ids[0] == BEGIN and ids[-1] == END  # nothing is cut
            assert (row["positions"][at] == np.arange(len(ids))).all()
            seen.append(text_of(ids).rpartition("\n")[2][:-1])
        assert quarter * 4 == (row["images"] >= 0).sum()
        live = row["images"] >= 0
        begins = live & (row["patch_places"] == 0).all(-1)  # the first patch of an image
        assert (row["images"][live] == begins.cumsum()[live] - 1).all()
    for epoch in range(2):
        part = seen[epoch * len(data.train) : (epoch + 1) * len(data.train)]
        assert sorted(part) == sorted(str(k) for k in range(40) if str(k) in part)
        assert len({*part}) == len(part)
    assert seen[: len(data.train)] != seen[len(data.train) :]
    again = VisionRows(data.train, spec, 96, 3, MODEL)
    for i in (count + 1, 0):
        a, b = again[i], rows[i]
        assert all((a[name] == b[name]).all() for name in a)
    other = VisionRows(data.train, spec, 96, 4, MODEL)
    assert any((other[i]["tokens"] != rows[i]["tokens"]).any() for i in range(count))


def test_what_is_too_large_is_told_before_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png(0))
    source = write_lines(tmp_path / "a.jsonl", [asked("a.png")])
    members = [(f"k.{i}.png", png(0)) for i in range(3)]
    tar = write_tar(tmp_path / "a.tar", [*members, ("k.txt", b"a cat")])
    opened(tar, patches=400)
    monkeypatch.setattr("megajax.data.conversations.IMAGES", 2)
    with pytest.raises(UserError, match=r"a\.tar sample k has 3 images .* may have 2 images"):
        opened(tar, patches=400)
    monkeypatch.setattr("megajax.data.conversations.IMAGES", 3)
    monkeypatch.setattr("megajax.data.conversations.SAMPLE", 2000)
    with pytest.raises(UserError, match=r"a\.tar sample k has .* and 2,000 bytes"):
        opened(tar, patches=400)
    monkeypatch.setattr("megajax.data.conversations.IMAGE", 100)
    with pytest.raises(UserError, match=r"line 1: cannot read a.png: it has .* bytes; 100 are"):
        opened(source)


def test_a_value_that_rows_repeat_is_in_memory_once(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = png(0, 280, 280)
    table = pyarrow.table({"image": [{"bytes": file}] * 300, "text": ["a cat"] * 300})
    parquet.write_table(table, tmp_path / "a.parquet")
    source = open_conversations(str(tmp_path / "a.parquet"))
    before = pyarrow.total_allocated_bytes()
    assert source[0].images[0].open().read() == file
    assert pyarrow.total_allocated_bytes() - before < 20 * len(file)


def test_a_disk_that_fails_leaves_no_sample_out(tmp_path):
    for k in range(2):
        (tmp_path / f"{k}.png").write_bytes(png(k))
    source = write_lines(tmp_path / "a.jsonl", [asked("0.png"), asked("1.png")])
    data, spec = opened(source, faulty="skip")
    (tmp_path / "1.png").unlink()
    rows = VisionRows(data.train, spec, 128, 0, MODEL)
    with pytest.raises(UserError, match="line 2: cannot read 1.png"):
        rows[0]
    with pytest.raises(UserError, match="line 2: cannot read 1.png"):
        evaluated(data.train, 9, "skip")


def test_damaged_pixels_leave_their_sample_out(tmp_path):
    (tmp_path / "half.png").write_bytes(png(1, 560, 560)[:9000])
    source = write_lines(tmp_path / "a.jsonl", [asked(url(png(0))), asked("half.png")])
    settings: dict = {"seq_len": 640, "patches": 2400}
    with pytest.raises(UserError, match="truncated or damaged"):
        opened(source, **settings)
    data, spec = opened(source, faulty="skip", **settings)
    assert data.count == (2, 0)  # the headers are right
    rows = VisionRows(data.train, spec, 640, 0, MODEL)
    assert rows.rows_per_epoch == 1 and rows[0]["segments"].max() == 1
    assert [s.answer for s in evaluated(data.train, 9, "skip")] == ["a cat"]
    with pytest.raises(UserError, match="line 2: image 0 is truncated|line 2: half.png is trunc"):
        evaluated(data.train, 9)


def test_what_a_source_holds_has_a_fingerprint(tmp_path):
    values = [asked(url(png(0))), asked(url(png(1)))]
    prints = {opened(write_lines(tmp_path / "a.jsonl", values))[0].fingerprint}
    for other in (
        [values[0], asked(url(png(2)))],
        [values[0], asked(url(png(1)), answer="a dog")],
        [values[0], asked(url(png(1)), question="whut?")],
        values[::-1],
        values[:1],
    ):
        prints.add(opened(write_lines(tmp_path / "a.jsonl", other))[0].fingerprint)
    assert len(prints) == 6
    again = opened(write_lines(tmp_path / "a.jsonl", values))[0].fingerprint
    assert again in prints
    tower = dataclasses.replace(MODEL.tower, min_pixels=4 * 28 * 28 * 2)  # other rows
    other = open_vision(
        VisionDataConfig(source=str(tmp_path / "a.jsonl"), holdout=0.0),
        64,
        0,
        dataclasses.replace(MODEL, tower=tower),
        ByteTokenizer(),
    )
    assert other.fingerprint not in prints


def test_packing_fills_rows_in_order():
    sizes = np.array([(3, 4), (3, 0), (2, 8), (5, 4), (9, 0)])
    assert packed(range(5), sizes, (9, 8)) == [[0, 1], [2, 3][:1], [3], [4]]


def test_an_image_is_on_one_side(tmp_path):
    files = [png(k) for k in range(12)]
    values = [asked(url(f), "", f"{n} {k}") for k, f in enumerate(files) for n in ("a", "b")]
    data, _ = opened(write_lines(tmp_path / "a.jsonl", values), holdout=0.3)
    train, held = (
        {data_.sample(k).images[0].tobytes() for k in range(n)}
        for data_, n in zip((data.train, data.held_out), data.count, strict=True)
    )
    assert train and held and train.isdisjoint(held)
    assert sum(data.count) == 24


def test_records_that_share_an_image_are_on_one_side(tmp_path):
    """Records of one image, and of two of which the next record has one."""
    files = [png(k, 28, 28) for k in range(60)]
    values = []
    for k in range(0, 60, 3):
        for group in ([k], [k, k + 1], [k + 2, k + 1], [k + 2]):
            parts: list = [
                {"type": "image_url", "image_url": {"url": url(files[i])}} for i in group
            ]
            messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
            values.append({"messages": messages})
    data, _ = opened(write_lines(tmp_path / "a.jsonl", values), holdout=0.4)
    train, held = (
        {image.tobytes() for k in range(n) for image in side.sample(k).images}
        for side, n in zip((data.train, data.held_out), data.count, strict=True)
    )
    assert train and held and train.isdisjoint(held)
    assert side_keys([(5, 9), (7,), (9, 7), (8,)])[:3] == side_keys([(5,)]) * 3


def test_drawings_fill_rows_and_the_control_shows_grey():
    data, spec = opened("rendered", holdout=0.1, patches=96)
    rows = VisionRows(data.train, spec, 64, 0, MODEL)
    kinds = set()
    for i in range(20):
        row = rows[i]
        texts = [text_of(row["tokens"][row["segments"] == s]) for s in (1, 2)]
        kinds |= {t.split("?")[0].split("#")[-1] for t in texts}
        assert row["segments"].max() >= 2
    assert kinds == {"word", "number", "circles", "crosses", "highest", "lowest"}
    blank = VisionRows(data.train, dataclasses.replace(spec, blank=True), 64, 0, MODEL)[5]
    row = rows[5]
    assert (blank["patches"][blank["images"] >= 0] == GREY).all()
    assert all((blank[n] == row[n]).all() for n in row if n != "patches")
    samples = [data.held_out.sample(k) for k in range(7)]
    fixed = fixed_rows(samples, spec, 64, MODEL, False)
    assert [k for _, numbers in fixed for k in numbers] == [*range(7)]
    for row, numbers in fixed:
        for segment, k in enumerate(numbers, 1):
            at = row["segments"] == segment
            targets = row["targets"][at & (row["targets"] != IGNORED)]
            assert text_of(targets) == samples[k].answer + ">"
    with pytest.raises(UserError, match="a drawing has .* tokens"):
        opened("rendered", seq_len=12, holdout=0.1)
    for holdout, nearest in ((0.0, 0.01), (0.0001, 0.01), (0.9999, 0.99)):
        with pytest.raises(UserError, match=f"leaves no drawing .*; nearest: {nearest} "):
            opened("rendered", holdout=holdout)
    small = dataclasses.replace(spec, patches=12)
    with pytest.raises(UserError, match="a drawing has .* data.patches=12 "):
        VisionRows(data.train, small, 64, 0, MODEL)[0]


def test_collate_equals_the_processor_of_transformers():
    """tests/golden/make_hf.py: ids, patches, places and positions of Qwen2-VL's own processor."""
    golden = np.load(Path(__file__).parents[1] / "golden" / "hf_qwen2_vl.npz")
    said = json.loads(str(golden["config"]))
    image_token = said["image_token_id"]
    tower = VitConfig(min_pixels=28 * 28, max_pixels=28 * 28 * 36)  # PIXELS
    cfg = VlmConfig(tower=tower, image_token=image_token)
    names = ["none", "one", "three", "wide", "resized"]
    samples = []
    for name in names:
        ids = golden[f"{name}:tokens"]
        repeated = (ids == image_token) & (np.append(0, ids[:-1]) == image_token)
        images = [golden[n] for n in sorted(golden.files) if n.startswith(f"{name}:image")]
        samples.append({"tokens": ids[~repeated], "images": images})
    batch = collate(samples, cfg)
    for row, name in enumerate(names):
        ids = golden[f"{name}:tokens"]
        size = len(ids)
        assert (batch["tokens"][row, :size] == ids).all()
        assert (batch["segments"][row] > 0).sum() == size
        assert (batch["rotary"][row, :size] == golden[f"{name}:positions"].T).all()
        if name == "none":
            assert (batch["images"][row] == -1).all()
            continue
        patches = golden[f"{name}:patches"]
        count = len(patches)
        assert (batch["patches"][row, :count] == patches).all()
        assert (batch["patch_places"][row, :count] == golden[f"{name}:patch_places"]).all()
        sizes = golden[f"{name}:grids"].prod(1) * 4
        assert (batch["images"][row, :count] == np.repeat(np.arange(len(sizes)), sizes)).all()
        assert (batch["images"][row, count:] == -1).all()
