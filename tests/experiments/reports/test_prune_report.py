"""Counts of packed weights against loops, and what is made of points."""

import numpy as np
import pytest

from experiments.reports import tilewise
from experiments.reports.tilewise import METHODS
from megajax.core.errors import UserError
from megajax.monitor import results
from pallas_kernels.tile_sparse.format import TileSparse


def point(task, seed, method, goal, loss, accuracy):
    return {
        "part": "point",
        "task": task,
        "seed": seed,
        "method": method,
        "goal": goal,
        "stages": f"{100 * goal:g}" if goal else "",
        "sparsity": goal,
        "loss": loss,
        "accuracy": accuracy,
    }


def test_work_of_a_packed_weight_is_that_of_its_slots_counted_in_a_loop():
    rows, tile, chunk, shape = 10, 8, 4, (22, 40)
    random = np.random.default_rng(0)
    mask = random.random(shape) < 0.15
    mask[:, random.random(40) < 0.4] = False
    mask[4:8] = False  # no tile reads these columns of x
    columns_left = np.flatnonzero(mask.any(0))
    tiles = [columns_left[i : i + tile] for i in range(0, columns_left.size, tile)]
    slots, read = 0, set()
    for columns in tiles:
        for first in range(0, 22, chunk):
            rows_of_chunk = range(first, min(first + chunk, 22))
            if any(mask[k, n] for k in rows_of_chunk for n in columns):
                slots += 1
                read |= set(rows_of_chunk)
    assert 0 < slots < 6 * 5 and not read & {4, 5, 6, 7}
    weight = TileSparse.from_dense(np.ones(shape, np.float16), mask, tile=tile, chunk=chunk)
    work = tilewise.sparse_work(rows, weight)
    assert work.flops == 2 * rows * slots * chunk * tile
    moved = 2 * (rows * (len(read) + 40) + slots * chunk * tile)
    indices = work.bytes - moved
    T = len(tiles)
    assert indices == 4 * (2 * slots + T + (T + 1) + T * tile)  # all int32


def test_a_dense_product_and_its_bounds():
    work = tilewise.dense_work(12800, (768, 3072))
    assert work.flops == 2 * 12800 * 768 * 3072
    assert work.bytes == 2 * (12800 * 768 + 12800 * 3072 + 768 * 3072)
    assert work.floor_s == max(work.flops / 989.5e12, work.bytes / 4.8e12)


def test_three_quarters_pruned_are_a_quarter_of_the_flops(monkeypatch):
    small = {"attention": ((512, 512), 4, 2.5), "up": ((512, 1024), 1, 2.5)}
    monkeypatch.setattr(tilewise, "SHAPES", small)
    scores = np.random.default_rng(0).lognormal(size=(128, 128))
    methods = [METHODS["TW-64"], METHODS["BW"]]
    rows = list(tilewise.speeds(dict.fromkeys(tilewise.SHAPES, scores), methods, [0.75]))
    assert [r["shape"] for r in rows] == ["attention", "up"]  # BW has no kernel
    for row in rows:
        assert row["flops_saved"] == pytest.approx(4, rel=0.06)
        assert 1 < row["bytes_saved"] < row["flops_saved"]
        assert row["kernel"] and row["paper"] > 2
    quality = {"part": "quality", "task": "text", "method": "TW-64", "goal": 0.75, "n": 3}
    quality |= {"lost": 0.5, "lost_std": 0.1, "lost_accuracy": 0.2, "lost_accuracy_std": None}
    other = quality | {"method": "TW-1", "lost": 0.1}
    (price,) = tilewise.prices([other, quality], rows)
    assert price["text_lost"] == 0.5
    flops = 2 * 12800 * 512 * (4 * 512 + 1024)
    ours = 4 * rows[0]["gflop"] + rows[1]["gflop"]
    assert price["flops_saved"] == pytest.approx(flops / 1e9 / ours)


def test_losses_are_against_the_dense_model_of_the_same_seed_tuned_as_long():
    points = [
        point("text", 0, "dense", 0.0, 9.0, 0.1),
        point("text", 0, "dense", 0.75, 1.0, 0.60),
        point("text", 1, "dense", 0.75, 2.0, 0.50),
        point("text", 0, "TW-1", 0.75, 1.1, 0.58),
        point("text", 1, "TW-1", 0.75, 2.3, 0.46),
        point("text", 0, "BW", 0.75, 1.5, 0.50),
    ]
    rows = {r["method"]: r for r in tilewise.quality(points)}
    assert rows["TW-1"]["lost"] == pytest.approx(0.2) and rows["TW-1"]["n"] == 2
    assert rows["TW-1"]["lost_std"] == pytest.approx(np.sqrt(0.02))
    assert rows["TW-1"]["lost_accuracy"] == pytest.approx(0.03)
    assert rows["BW"]["lost_std"] is None
    verdicts = {r["what"]: r for r in tilewise.claims(list(rows.values()))}
    assert verdicts["lost"]["ratio"] == pytest.approx(0.4) and verdicts["lost"]["met"]
    assert verdicts["lost_accuracy"]["ratio"] == pytest.approx(0.3)
    points[-1]["loss"] = 0.9  # blocks lose nothing: there is no half of it
    (loss, _) = tilewise.claims(list(tilewise.quality(points)))
    assert loss["ratio"] is None and not loss["met"]


def test_points_of_a_file_come_back_and_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "points.json"
    assert tilewise.former(path) == {}
    results.write(path, {}, [point("text", 0, "BW", 0.5, 1.0, 0.5)])
    assert list(tilewise.former(path)) == [("text", 0, "BW", "50")]
    path.write_text("{")
    with pytest.raises(UserError, match="holds no points"):
        tilewise.former(path)
