"""The nearest measured row, and none where none was measured."""

import json
import math

import pytest

from pallas_kernels import tuned

KEY = {"dtype": "bfloat16", "causal": True, "width": 128, "longest": 1024}


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"op": "attend", "key": KEY | {"longest": n, "width": w}, "tile": {"block": n + w}}
        for n in (1024, 16384)
        for w in (64, 128)
    ]
    (tmp_path / "chip.json").write_text(json.dumps({"rows": rows}))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "block"),
    [({}, 1152), ({"longest": 3000}, 1152), ({"longest": 5000}, 16512), ({"width": 80}, 1088)],
)
def test_the_nearest_row_in_octaves(folder, change, block):
    found = tuned.find("attend", KEY | change, kind="chip", folder=folder)
    assert found and found["tile"]["block"] == block


@pytest.mark.parametrize("change", [{"causal": False}, {"dtype": "float16"}, {"more": 1}])
def test_words_must_agree(folder, change):
    assert tuned.find("attend", KEY | change, kind="chip", folder=folder) is None


def test_no_table_no_op_no_gpu(folder):
    assert tuned.find("attend", KEY, kind="other chip", folder=folder) is None
    assert tuned.find("norm", KEY, kind="chip", folder=folder) is None
    assert tuned.find("attend", KEY, folder=folder) is None


def test_distance_and_names():
    assert tuned.distance({"m": 0}, {"m": 0}) == 0
    assert tuned.distance({"m": 0}, {"m": 1}) == math.inf
    assert tuned.distance({"m": 8, "n": 2}, {"m": 1, "n": 4}) == 4
    assert tuned.slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"


def test_a_guess_is_logged_once(folder, caplog):
    for _ in range(2):
        tuned.find("attend", KEY | {"longest": 777}, kind="chip", folder=folder)
    assert sum("no tile was measured" in r.getMessage() for r in caplog.records) <= 1
