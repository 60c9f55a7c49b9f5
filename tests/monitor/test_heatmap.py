"""Who is slow, who is silent, and how they are shown."""

import numpy as np

from megajax.core.mesh import MeshSpec
from megajax.monitor import heatmap
from megajax.monitor.heatmap import Grid, Progress

GRID = Grid(pipe=4, data=4, tensor=8)


def times(seed, **factors):
    random = np.random.default_rng(seed)
    found = dict(enumerate(100 * random.uniform(0.97, 1.03, GRID.ranks)))
    return found | {int(k[1:]): 100 * v for k, v in factors.items()}


def test_ranks_lie_as_the_mesh_has_them():
    ids = np.arange(8).reshape(2, 2, 2)  # pipe, data, tensor: the order of the mesh's axes
    names = list(MeshSpec(pipe=2, data=2, tensor=2).sizes(8))
    assert names.index("pipe") < names.index("data") < names.index("tensor")
    grid = Grid(2, 2, 2)
    for place in np.ndindex(2, 2, 2):
        assert grid.place(int(ids[place])) == place


def test_12_percent_is_slow_and_noise_is_not():
    for seed in range(20):
        assert not heatmap.slow(times(seed))
        assert list(heatmap.slow(times(seed, r77=1.15, r5=1.4))) == [5, 77]


def test_silence_points_at_the_rank_that_others_wait_for():
    waits = {r: Progress(17, "all-reduce of data") for r in range(GRID.ranks)}
    assert heatmap.silent(waits, GRID.ranks) == []
    behind = waits | {9: Progress(16, "forward 3")}
    assert heatmap.silent(behind, GRID.ranks) == [9]
    dead = {r: p for r, p in behind.items() if r != 100}
    assert heatmap.silent(dead, GRID.ranks) == [100]
    text = heatmap.describe(behind, GRID).splitlines()
    assert text[0] == "SILENT forward 3 (operation 16): rank(pipe, data, tensor) 9(0, 1, 1)"
    assert "waits in all-reduce" in text[1] and "and 119 more" in text[1]
    assert heatmap.describe(dead, GRID).startswith(
        "SILENT no sign at all: rank(pipe, data, tensor)"
    )


def test_the_page_and_the_picture_name_the_slowest(tmp_path):
    values = times(0, r77=1.2)
    del values[3]
    heatmap.draw(values, GRID, tmp_path / "map.png", "forward + backward (ms)")
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    heatmap.write_html(values, GRID, tmp_path / "map.html", "forward <ms>")
    page = (tmp_path / "map.html").read_text()
    assert "Rank 77 (2, 1, 5) takes 20% longer" in page and "forward &lt;ms&gt;" in page
    assert page.count("<td") == GRID.ranks and "rank 3 (pipe 0, data 0, tensor 3): no value" in page
