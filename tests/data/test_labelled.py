"""Labelled sets and hidden tokens: each example once an epoch, copies on one side, shares."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megajax.core.errors import UserError
from megajax.data.config import LabelledConfig
from megajax.data.labelled import (
    Classes,
    Examples,
    FixedRows,
    MaskedRows,
    ShuffledRows,
    majority,
    open_labelled,
)
from megajax.data.pack import IGNORED

TEXTS = [(f"text number {i} of its kind", "ab"[i % 3 == 0]) for i in range(60)]


def write_lines(folder, lines):
    (folder / "set.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return str(folder / "set.jsonl")


def opened(source, cache, **changes):
    return open_labelled(LabelledConfig(source=source, holdout=0.3, **changes), 16, cache)


def decoded(data, side):
    texts = [data.tokenizer.decode(ids[1:]) for ids in side.tokens]
    return list(zip(texts, (data.labels[i] for i in side.labels_N), strict=True))


def test_lines_and_folders_give_the_same_examples(tmp_path):
    lines = write_lines(tmp_path, [{"text": t, "label": k} for t, k in [*TEXTS, TEXTS[0]]])
    for i, (text, label) in enumerate(TEXTS):
        (tmp_path / "set" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / label / f"{i}.txt").write_text(text)
    pair = opened(lines, tmp_path / "cache"), opened(f"{tmp_path}/set", tmp_path / "cache")
    sides = [[sorted(set(decoded(f, s))) for s in (f.train, f.held_out)] for f in pair]
    assert sides[0] == sides[1]
    both = sides[0][0] + sides[0][1]
    assert sorted(both) == sorted((text[:15], label) for text, label in TEXTS)
    first = [TEXTS[0][0][:15] in {t for t, _ in side} for side in sides[0]]
    assert sorted(first) == [False, True]  # and so is its copy on one side
    assert pair[0].labels == ("a", "b") and pair[0].vocab == pair[0].tokenizer.vocab
    assert pair[0].fingerprint != opened(lines, tmp_path / "cache", tokenizer="bpe:300").fingerprint
    held = pair[0].held_out
    assert majority(held.labels_N) == max(np.bincount(held.labels_N)) / len(held)


@pytest.mark.parametrize("name", ["set.json", "set.parquet", "set.JSONL.gz"])
@pytest.mark.parametrize("number", [False, True])
def test_other_files_give_the_same_examples_as_lines(name, number, tmp_path):
    rows = [{"text": t, "label": "ab".index(k) if number else k} for t, k in TEXTS]
    lines = opened(write_lines(tmp_path, rows), tmp_path / "cache")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.pdf").touch()
    file = tmp_path / "other" / name
    if name.endswith("json"):
        file.write_text(json.dumps(rows, indent=1))
    elif name.endswith("gz"):
        file.write_bytes(gzip.compress("".join(json.dumps(x) + "\n" for x in rows).encode()))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    heard = []
    cfg = LabelledConfig(source=str(file.parent), holdout=0.3)
    data = open_labelled(cfg, 16, tmp_path / "cache", heard.append)
    assert heard == [f"data.source={file.parent}: read 1 of 2 files; not read: .pdf 1"]
    assert data.labels == lines.labels and data.fingerprint == lines.fingerprint


def test_rows_pad_and_name_the_label_at_the_first_token():
    examples = Examples([np.arange(9, 12), np.arange(30)], np.array([1, 0]))
    row = FixedRows(examples, 6)[0]
    assert row["tokens"].tolist() == [9, 10, 11, 0, 0, 0]
    assert row["targets"].tolist() == [1] + [IGNORED] * 5
    assert row["segments"].tolist() == [1, 1, 1, -1, -1, -1]
    assert row["positions"].tolist() == [0, 1, 2, 0, 0, 0]
    assert FixedRows(examples, 6)[1]["tokens"].tolist() == list(range(6))
    assert {x.dtype for x in row.values()} == {np.dtype(np.int32)}


def test_an_epoch_has_every_example_once_in_an_order_of_its_own():
    examples = Examples([np.array([i]) for i in range(20)], np.zeros(20, np.int32))
    rows = ShuffledRows(examples, 1, 3)
    epochs = [[int(rows[20 * e + i]["tokens"][0]) for i in range(20)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1] != list(range(20))


def test_hidden_tokens_have_the_papers_shares(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 100, 4000).astype(np.int32)
    rows = MaskedRows({5: {"tokens": tokens, "targets": tokens, "segments": tokens}}, 100, 100, 1)
    row, again = rows[5], rows[5]
    assert all((row[k] == again[k]).all() for k in row)
    chosen = row["targets"] >= 0
    assert chosen.mean() == pytest.approx(0.15, abs=0.02)
    assert (row["targets"][chosen] == tokens[chosen]).all()
    assert (row["tokens"][~chosen] == tokens[~chosen]).all()
    assert (row["tokens"][chosen] == 100).mean() == pytest.approx(0.8, abs=0.06)
    same = row["tokens"][chosen] == tokens[chosen]
    assert same.mean() == pytest.approx(0.1, abs=0.04) and row["tokens"].max() == 100
    assert (row["segments"] == tokens).all() and row["targets"].dtype == np.int32


@pytest.mark.parametrize(
    "lines, message",
    [
        ([{"text": "x", "label": 1}, {"text": "y", "label": 1}], "has the labels 1: a labelled"),
        ([{"text": "x"}], r"line 1: member 'label' must be a label, .* found None.*label_key"),
        ([{"text": "x", "label": True}], "found True: remove the line"),
        ([{"text": "x", "label": 1}, {"text": "x", "label": 2}], "leaves no example"),
    ],
)
def test_a_set_without_labels_is_refused(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        opened(write_lines(tmp_path, lines), tmp_path / "cache")


@pytest.mark.parametrize(
    "labels, order",
    [
        ([11, 2, 0, 10, 1], "0 1 2 10 11"),
        (["1.5", "-1", "0.25"], "-1 0.25 1.5"),
        (["class10", "class2", "class1"], "class1 class2 class10"),
        (["10b", "9a", "b", "a"], "9a 10b a b"),
        (["neutral", "negative", "positive"], "negative neutral positive"),
        (["nan", "1", "inf"], "1 inf nan"),
        (["x" + "9" * 5000, "x1", "x" + "8" * 5000], f"x1 x{'8' * 5000} x{'9' * 5000}"),
    ],
)
def test_labels_are_numbered_as_a_person_lists_them(tmp_path, labels, order):
    lines = [{"text": f"{i} of {k!s:.9}", "label": k} for i in range(20) for k in labels]
    data = opened(write_lines(tmp_path, lines), tmp_path / "cache")
    assert data.labels == tuple(order.split(" "))
    texts = data.tokenizer.decode(data.train.tokens[0][1:]), data.train.labels_N[0]
    assert data.labels[texts[1]].startswith(texts[0].split(" of ")[1][:3])


@pytest.mark.parametrize(
    "names, labels, numbers",
    [
        (("positive", "negative"), ("negative", "positive"), [1, 0]),
        (("10", "2", "0"), ("0", "2", "10"), [2, 1, 0]),  # names that are numbers, not numbers
        (("LABEL_0", "LABEL_1", "LABEL_2"), ("0", "2"), [0, 2]),
        (("LABEL_0", "LABEL_1"), ("LABEL_1",), [1]),
        (("no", "yes"), ("0", "1"), [0, 1]),  # all of them, so they can only be the numbers
        (("no", "maybe", "yes"), ("no", "yes"), [0, 2]),
        # "1 star" is number 0: a part of the numbers may be meant otherwise
        (("1 star", "2 stars", "3 stars"), ("1", "2"), None),
        (("LABEL_0", "LABEL_1"), ("negative", "positive"), None),
        (("a", "b"), ("a", "c"), None),
    ],
)
def test_labels_have_the_numbers_of_the_classifier(names, labels, numbers):
    """The numbers by hand; a label that is no class is refused by name."""
    classes = Classes(names, "FOLDER", "Begin a new head")
    if numbers is None:
        with pytest.raises(UserError, match="that FOLDER does not know: .*Begin a new head"):
            classes.numbers(labels, "set.jsonl")
    else:
        assert classes.numbers(labels, "set.jsonl") == numbers


def test_a_set_takes_the_classes_of_the_classifier(tmp_path):
    source = write_lines(tmp_path, [{"text": t, "label": k} for t, k in TEXTS])
    plain = opened(source, tmp_path / "cache")
    classes = Classes(("b", "never", "a"), "FOLDER", "")
    cfg = LabelledConfig(source=source, holdout=0.3)
    data = open_labelled(cfg, 16, tmp_path / "cache", classes=classes)
    assert data.labels == ("b", "never", "a")
    for side in ("train", "held_out"):
        assert decoded(data, getattr(data, side)) == decoded(plain, getattr(plain, side))
    assert data.fingerprint != plain.fingerprint


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_rows_are_cut_as_transformers_cuts_them(family, tmp_path):
    """[CLS] text [SEP] and <s> text </s>, the last one kept where the text is too long; frozen by
    tests/golden/make_rows.py."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "rows.json").read_text())[family]
    for name, text in golden["files"].items():
        (tmp_path / name).write_text(text)
    texts = [(t, "ab"[i % 2]) for i, t in enumerate(golden["texts"]) if t]  # without a text: no row
    expected = {
        n: [r for r, t in zip(rows, golden["texts"], strict=True) if t]
        for n, rows in golden["rows"].items()
    }
    more = [(f"a mat {i}", "ab"[i % 2]) for i in range(20)]  # so that both sides have examples
    source = write_lines(tmp_path, [{"text": t, "label": k} for t, k in texts + more])
    for length, rows in expected.items():
        cfg = LabelledConfig(source=source, holdout=0.5, tokenizer=f"{tmp_path}/tokenizer.json")
        data = open_labelled(cfg, int(length), tmp_path / "cache")
        ours = [list(ids) for side in (data.train, data.held_out) for ids in side.tokens]
        assert len(ours) == len(texts + more) and all(row in ours for row in rows), length
    with pytest.raises(UserError, match="train.seq_len=2 has no room .*at least 3"):
        open_labelled(cfg, 2, tmp_path / "cache")


def test_a_folder_without_folders_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="has the labels none: a labelled set is jsonl"):
        opened(str(tmp_path), tmp_path / "cache")
