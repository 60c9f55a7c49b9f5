"""The nearest measured row, none where none was measured, and what a row must say."""

import math

import pytest

from pallas_kernels import tuned
from tests import tables

KEY = {"dtype": "bfloat16", "causal": True, "width": 128, "longest": 1024}


@pytest.fixture(autouse=True)
def measured(tmp_path, monkeypatch):
    rows = [
        {"op": "attend", "key": KEY | {"longest": n, "width": w}, "tile": {"block": n + w}}
        for n in (1024, 16384)
        for w in (64, 128)
    ]
    tables.write(monkeypatch, tmp_path, *rows, kind="chip")


@pytest.mark.parametrize(
    ("change", "block"),
    [({}, 1152), ({"longest": 3000}, 1152), ({"longest": 5000}, 16512), ({"width": 80}, 1088)],
)
def test_the_nearest_row_in_octaves(change, block):
    row = tuned.find("attend", KEY | change, kind="chip")
    assert row and row["tile"]["block"] == block


@pytest.mark.parametrize("change", [{"causal": False}, {"dtype": "float16"}, {"more": 1}])
def test_words_must_agree(change):
    assert tuned.find("attend", KEY | change, kind="chip") is None


def test_no_table_no_op_no_gpu():
    assert tuned.find("attend", KEY, kind="other chip") is None
    assert tuned.find("norm", KEY, kind="chip") is None
    assert tuned.find("attend", KEY) is None


def test_distance_and_names():
    assert tuned.distance({"m": 0}, {"m": 0}) == 0
    assert tuned.distance({"m": 0}, {"m": 1}) == math.inf
    assert tuned.distance({"m": 8, "n": 2}, {"m": 1, "n": 4}) == 4
    assert tuned.slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"


def test_a_guess_is_logged_once(caplog):
    for _ in range(2):
        tuned.find("attend", KEY | {"longest": 777}, kind="chip")
    assert sum("no tile was measured" in r.getMessage() for r in caplog.records) <= 1


WINNER = tables.row("attend", KEY)
FAILED = WINNER | {"correct": False}


@pytest.mark.parametrize(
    ("rows", "change", "why"),
    [
        ([WINNER], {}, None),
        ([WINNER], {"longest": 2048}, None),
        ([WINNER], {"longest": 2049}, "of another size"),
        ([], {}, "no measurement"),
        ([FAILED], {}, "failed where it was measured"),
        ([WINNER, FAILED], {}, "failed where it was measured"),
        ([FAILED, WINNER], {}, "failed where it was measured"),
        ([{k: v for k, v in WINNER.items() if k != "correct"}], {}, "failed"),
        ([WINNER | {"fastest": "reference"}], {}, "reference was the fastest"),
        ([WINNER | {"rivals": {"reference": 2.0, "cudnn": 0.9}}], {}, "cudnn was faster"),
        ([WINNER | {"rivals": {}}], {}, "no rival was faster"),
    ],
)
def test_what_makes_a_kernel_the_default(rows, change, why, tmp_path, monkeypatch):
    tables.write(monkeypatch, tmp_path, *rows, kind="chip")
    objection = tuned.against(tuned.find("attend", KEY | change, kind="chip"))
    assert objection == why if why is None else why in objection


def test_only_a_real_link_makes_a_fused_kernel_the_default():
    fused = tables.row("gather", KEY, fastest="fused") | {"octaves": 0.0}
    for link, why in ((None, "emulated"), ("emulated", "emulated"), ("real", None)):
        objection = tuned.against(fused | {"link": link}, "fused")
        assert objection == why if why is None else why in objection


def test_a_tile_is_that_of_a_right_result_within_an_octave():
    near = {"tile": {"block": 1}, "octaves": 1.0}
    assert tuned.tile(FAILED | near) is None
    assert tuned.tile(WINNER | near) == {"block": 1}
    assert tuned.tile(WINNER | near | {"octaves": 1.01}) is None
