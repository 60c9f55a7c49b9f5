"""The GPU script's kernels part, on a CPU."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_kernels

sys.path.pop(0)

from pallas_kernels import bench
from pallas_kernels.attention import bench as attention
from pallas_kernels.tile_sparse import bench as tile_sparse


def test_the_matrix_is_whole_and_begins_with_every_width():
    checks = attention.matrix()
    assert len(set(checks)) == len(checks) == 3 * 4 * 2 * 3 * 2
    assert [c.width for c in checks[:4]] == [128, 64, 256, 96]
    lengths, capacity = attention.LENGTHS
    assert all(sum(each) <= capacity and len(each) == 5 for each in lengths)


def test_the_goals_come_first():
    """Head width 128 forward, variable lengths, its backward; then everything, each once."""
    found = gpu_kernels.queue(rehearsal=False)
    assert len(set(found)) == len(found) >= 2 * len(attention.CASES)
    assert [(b.case.name, b.direction) for b in found[:2]] == [
        ("d128 16k full", "forward"), ("d128 16k causal", "forward"),
    ]  # fmt: skip
    assert all(b.case.name.startswith("varlen") for b in found[2:6])
    assert found[6].case.name == "d128 16k full" and found[6].direction == "forward+backward"


def test_a_side_that_fails_is_a_row_and_time_is_kept(monkeypatch):
    """Rivals that are not there say why; past the deadline nothing runs; the floor is beside."""
    case = attention.TINY_CASE
    monkeypatch.setattr(
        gpu_kernels, "queue", lambda _: [gpu_kernels.Bench("attention", case, "forward")]
    )
    sides = dict(attention.sides(case, "reference"))
    sides = {name: sides[name] for name in ("reference", "tokamax packed", "cudnn packed")}
    monkeypatch.setattr(attention, "sides", lambda *_: sides)
    rows, about = [], {"matmul_flops_per_s": 1.0}
    gpu_kernels.time_cases(rows.append, about, time.perf_counter() + 100, rehearsal=True)
    timed, *failed = rows
    assert timed["of_floor"] == pytest.approx(case.floor_s() / timed["median_s"])
    assert "No module named 'tokamax'" in failed[0]["note"] and "cuDNN" in failed[1]["note"]
    late = []
    gpu_kernels.time_cases(late.append, about, time.perf_counter() - 1, rehearsal=True)
    assert [row["note"] for row in late] == ["not run: out of time"] * 3


@pytest.mark.slow
def test_a_rehearsal_runs_every_line():
    rows, about = [], {}
    gpu_kernels.check_kernels(rows.append, about, time.perf_counter() + 1000, rehearsal=True)
    assert rows[0]["passed"], rows[0]
    ours = [row for row in rows if row.get("implementation") == "ours"]
    assert [row["direction"] for row in ours][:1] == ["forward+backward"]
    assert all("median_s" in row for row in ours), ours
    assert [row["step"] for row in rows if "bert" in row and "median_ms" in row]
    assert about["matmul_flops_per_s"] > 0 and about["copy_bytes_per_s"] > 0
    rivals = [row for row in rows if "cudnn" in row.get("implementation", "")]
    assert rivals and all("note" in row for row in rivals)  # a CPU has none: no crash


@pytest.mark.slow
def test_an_error_in_the_kernel_is_seen(monkeypatch):
    """The bound is tight enough to fail for an attention with a wrong scale."""
    right = attention.varlen_attention

    def wrong(q, *rest, **options):
        return right(q * 1.05, *rest, **options)

    monkeypatch.setattr(attention, "varlen_attention", wrong)
    found = attention.errors(attention.TINY, "reference", attention.TINY_LENGTHS)
    assert max(found.values()) > 1


@pytest.mark.slow
def test_a_slow_kernel_is_seen():
    """Beside a dense product, by a clock that is made up."""
    (case,) = tile_sparse.TINY_CASES
    right = tile_sparse.errors(case, "reference")
    assert max(right.values()) <= 1 and min(right.values()) > 0

    def clock(function, *args):
        return 1.0 if function.__name__ == "matmul" else 1.5

    found = tile_sparse.beside_dense(case, "reference", clock, 1)
    assert found["time"] == pytest.approx(1.5 / 1.25)
    assert tile_sparse.beside_dense(case, "reference", bench.wall_clock, 1)["time"] > 0
