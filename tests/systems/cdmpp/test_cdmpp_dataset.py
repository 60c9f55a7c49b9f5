"""Data sets of measured operations: rows, files, and what they refuse."""

import dataclasses
import pathlib

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost.record import LEAF, product, rowwise
from megajax.systems.cdmpp import Dataset
from megajax.systems.cdmpp.dataset import VERSION

RESULTS = pathlib.Path(__file__).parents[3] / "experiments" / "results"


def example() -> Dataset:
    shared = product(2, 64, 32, 16, "bfloat16", bias=True)
    records = [shared, rowwise(("add",), 8, 128, 2, "float32"), shared, shared]
    seconds = np.array([1e-5, 2e-5, np.nan, 3e-5])
    cards = {"one": CARDS["H100"], "two": CARDS["A100"]}
    return Dataset(records, seconds, ["one", "one", "two", "one"], cards, {"date": "2026-11-24"})


def test_rows_are_chosen_by_indices_masks_and_slices():
    data = example()
    assert len(data) == 4 and len(data[1:]) == 3 and len(data[2]) == 1
    assert data[np.array([3, 0])].seconds.tolist() == [3e-5, 1e-5]
    assert data[np.array([False, True, False, False])].records[0].kind == "fusion"
    assert len(data.labelled) == 3 and data.of("two").devices == ["two"]
    assert (data + data).seconds.shape == (8,)


def test_duplicates_are_rows_of_one_program_on_one_device():
    unique = example().without_duplicates()
    assert unique.devices == ["one", "one", "two"] and np.isnan(unique.seconds[2])
    # The median of what its rows have; an unknown time counts for nothing.
    data = example()
    three = data[np.array([0, 2, 0, 3])]
    three.seconds[:] = (1.0, 5.0, np.nan, 7.0)
    np.testing.assert_array_equal(three.typical().seconds, [4.0, 5.0, 4.0, 4.0])
    assert three.without_duplicates().seconds[0] == 4.0 and three.seconds[0] == 1.0


def test_a_file_gives_the_same_rows_back(tmp_path):
    data = example()
    data.save(tmp_path / "data.npz")
    again = Dataset.load(tmp_path / "data.npz")
    np.testing.assert_array_equal(again.seconds, data.seconds)
    assert again.devices == data.devices and dict(again.cards) == dict(data.cards)
    assert dict(again.facts) == {"date": "2026-11-24"}
    assert again.records[0] is again.records[2]  # shared records are stored once
    for one, other in zip(again.records, data.records, strict=True):
        for field in dataclasses.fields(one):
            if field.name not in ("features", "tree"):
                assert getattr(one, field.name) == getattr(other, field.name)
        np.testing.assert_array_equal(one.features, other.features)
        np.testing.assert_array_equal(one.tree.leaves, other.tree.leaves)
        np.testing.assert_array_equal(one.tree.positions, other.tree.positions)
    data[:0].save(tmp_path / "empty.npz")
    assert len(Dataset.load(tmp_path / "empty.npz")) == 0


def test_incomplete_rows_are_refused():
    data = example()
    with pytest.raises(UserError, match="device two has no card; cards given: one"):
        Dataset(data.records, data.seconds, data.devices, {"one": CARDS["H100"]})
    with pytest.raises(UserError, match="4, 3 and 4"):
        Dataset(data.records, data.seconds[:3], data.devices, data.cards)
    for wrong in (0.0, -1.0, np.inf):
        with pytest.raises(UserError, match="row 1"):
            Dataset(data.records, np.array([1, wrong, 1, 1]), data.devices, data.cards)
    with pytest.raises(UserError, match="device one has two different cards"):
        data + Dataset([], np.zeros(0), [], {"one": CARDS["B200"]})


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    with pytest.raises(UserError, match="does not exist"):
        Dataset.load(path)
    example().save(path)
    content = path.read_bytes()
    for text in (b"", b"no archive", content[: len(content) // 2], content[:300] + content[400:]):
        path.write_bytes(text)
        with pytest.raises(UserError, match="damaged"):
            Dataset.load(path)
    np.savez(path, seconds=np.zeros(3))
    with pytest.raises(UserError, match="damaged"):
        Dataset.load(path)
    example().save(path)
    arrays = dict(np.load(path))
    arrays["version"] = arrays["version"] - 1
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="measure again"):
        Dataset.load(path)


@pytest.mark.parametrize("name", ["cpu", "gpu", "h200"])
def test_the_rows_in_the_repository_are_of_this_version(name):
    with np.load(RESULTS / f"cdmpp_{name}_labels.npz") as arrays:
        assert int(arrays["version"]) == VERSION
        assert arrays["leaves"].shape == (arrays["operations"].sum(), LEAF)
        assert {"family", "program", "halves", "walls"} <= set(arrays.files)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("seconds", lambda x: np.array(1.0), "shapes"),
        ("seconds", lambda x: x[:2], "shapes"),
        ("record", lambda x: x - 5, "before the first"),
        ("device", lambda x: x + 7, "out of range"),
        ("cards", lambda x: np.array("[]"), "no card of the device 'one'"),
        ("cards", lambda x: np.array("[3]"), ""),
        ("operations", lambda x: -x, "incomplete"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(tmp_path, name, change, words):
    example().save(tmp_path / "data.npz")
    with np.load(tmp_path / "data.npz") as file:
        arrays = {n: file[n] for n in file.files}
    np.savez(tmp_path / "data.npz", **{**arrays, name: change(arrays[name])})
    with pytest.raises(UserError, match=rf"data\.npz is no data set of megajax, .*{words}"):
        Dataset.load(tmp_path / "data.npz")
