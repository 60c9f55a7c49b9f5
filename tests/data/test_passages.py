"""Labelled passages: what is held out stays out, and a batch is a function of its number."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data import passages
from megajax.data.passages import open_passages

SMALL = ("concurrent", "json", "wsgiref")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_passages(17, "bytes", tmp_path_factory.mktemp("cache"), SMALL)


def texts(rows):
    """The rows as text, by hand: 256 begins a row, the others are bytes."""
    return ["".join(map(chr, row[1:])) for row in rows]


def test_passages_are_pieces_of_the_files_of_their_label(opened):
    root = Path(sysconfig.get_paths()["stdlib"])
    for label, rows in zip(SMALL, opened.train, strict=True):
        said = "".join(
            f.read_bytes().decode("latin-1") + "\0"
            for f in sorted((root / label).rglob("*.py"))
            if "test" not in f.parts
        )
        assert (rows[:, 0] == 256).all() and rows.shape[1] == 17
        assert all(text in said for text in texts(rows)[::97])


def test_held_out_passages_are_of_held_out_files_in_turn(opened):
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {p: sorted(f for f in (root / p).rglob("*.py") if "test" not in f.parts) for p in SMALL}
    held = {
        p: "\0".join(f.read_bytes().decode("latin-1") for f in passages._held_out(files[p], 0.2))
        for p in SMALL
    }
    tokens, labels = opened.held_out(30)
    assert labels.tolist() == [0, 1, 2] * 10 and tokens.shape == (30, 17)
    for text, label in zip(texts(tokens), labels, strict=True):
        assert text in held[SMALL[label]]
    with pytest.raises(UserError, match="must be from 1 to"):
        opened.held_out(10**6)


def test_a_fifth_of_the_bytes_is_held_out_in_whole_files(tmp_path):
    files = [tmp_path / f"{i}.py" for i in range(50)]
    for file in files:
        file.write_text("x" * 10)
    chosen = passages._held_out(files, 0.2)
    assert len(chosen) == 10
    assert chosen == passages._held_out(files[::-1], 0.2)


def test_copies_of_held_out_files_are_held_out_under_every_label(tmp_path):
    files = {p: [tmp_path / f"{p}{i}.py" for i in range(3)] for p in "ab"}
    for file, text in zip(files["a"] + files["b"], "xyzxwx", strict=True):
        file.write_text(text)
    cut = passages._with_copies(files, {"a": {files["a"][0]}, "b": {files["b"][1]}})
    assert cut == {"a": {files["a"][0]}, "b": set(files["b"])}


def test_batches_depend_on_seed_and_step_alone(opened):
    first, labels = opened.batch(3, 7, 64)
    again, _ = opened.batch(3, 7, 64)
    other, _ = opened.batch(3, 8, 64)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert set(labels.tolist()) == {0, 1, 2}
    for row, label in zip(first, labels, strict=True):
        assert (opened.train[label] == row).all(1).any()


def test_a_package_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="nonesuch holds no passage"):
        open_passages(17, "bytes", tmp_path, ("json", "nonesuch"))
