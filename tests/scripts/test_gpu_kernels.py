"""The GPU script's parts of kernels, on a CPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_check

from scripts.gpu_session import kernels as gpu_kernels

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


@pytest.mark.parametrize("folder", gpu_check.FOLDERS)
def test_every_case_is_timed_once_and_ours_is_no_rival(folder):
    """Names are what a second call goes by, so they differ."""
    items = gpu_kernels.times(folder, gpu_check.FORWARD, rehearsal=False)
    names = [item.name for item in items]
    cases = gpu_kernels.bench_of(folder).CASES
    assert len(set(names)) == len(names)
    assert [i.about["case"] for i in items if not i.optional] == sorted(
        (case.name for case in cases), key=[i.about["case"] for i in items].index
    )
    assert all(item.optional == (item.about["implementation"] != "ours") for item in items)
    # Compiling makes XLA time its products, which must not disturb the part that measures.
    late = {item.about["implementation"] for item in items if item.prepare is None}
    sides = {item.about["implementation"] for item in items}
    assert late == sides & {"xla", "reference", "dense", "ragged_dot"}
    checks = gpu_kernels.checks(folder, [0, None], rehearsal=False)
    assert len({check.name for check in checks}) == len(checks)


def test_the_goals_come_first():
    """Head width 128 at full length, then variable lengths; ours before its rivals."""
    items = gpu_kernels.times("attention", gpu_check.FORWARD, rehearsal=False)
    abouts = [(i.about["case"], i.about["implementation"]) for i in items]
    assert abouts[:2] == [("d128 16k full", "ours"), ("d128 16k full", "cudnn padded")]
    ours = [case for case, side in abouts if side == "ours"]
    assert ours[:2] == ["d128 16k full", "d128 16k causal"]
    assert all(case.startswith("varlen") for case in ours[2:4])


def test_a_side_is_timed_beside_the_floor_of_the_card(monkeypatch):
    case = attention.TINY_CASE
    sides = attention.sides(case, "reference")
    timed = gpu_kernels.Timed(case, gpu_check.FORWARD, sides["reference"], True)
    timed.prepare()
    monkeypatch.setattr(gpu_kernels.bench, "memory_rate", lambda kind: 1e9)
    row = timed.run()
    assert row["floor_s"] == case.bytes() / 1e9 and row["clock"] == "wall"
    assert row["of_floor"] == pytest.approx(row["floor_s"] / row["median_s"])
    for name, words in (("tokamax packed", "No module named 'tokamax'"), ("cudnn packed", "cuDNN")):
        with pytest.raises(Exception, match=words):
            gpu_kernels.Timed(case, gpu_check.FORWARD, sides[name], True).prepare()


def test_an_h100_has_the_memory_of_an_h100():
    assert gpu_kernels.bench.memory_rate("NVIDIA H100 80GB HBM3") == pytest.approx(
        3.35e12, rel=1e-3
    )
    assert gpu_kernels.bench.memory_rate("NVIDIA H200") == 4.8e12
    assert attention.CASES[-1].floor_s(bytes_per_s=1e9) == attention.CASES[-1].bytes() / 1e9


@pytest.mark.slow
def test_an_error_in_the_kernel_is_seen(monkeypatch):
    """The bound is tight enough to fail for an attention with a wrong scale."""
    right = attention.varlen_attention

    def wrong(q, *operands, **options):
        return right(q * 1.05, *operands, **options)

    monkeypatch.setattr(attention, "varlen_attention", wrong)
    errors = attention.errors(attention.TINY, "reference", attention.TINY_LENGTHS)
    assert max(errors.values()) > 1


@pytest.mark.slow
def test_a_slow_kernel_is_seen():
    """Beside a dense product, by a clock that is made up."""
    (case,) = tile_sparse.TINY_CASES
    right = tile_sparse.errors(case, "reference")
    assert max(right.values()) <= 1 and min(right.values()) > 0

    def clock(function, *args):
        return 1.0 if function.__name__ == "matmul" else 1.5

    ratios = tile_sparse.beside_dense(case, "reference", clock, 1)
    assert ratios["time"] == pytest.approx(1.5 / 1.25)
    assert tile_sparse.beside_dense(case, "reference", bench.wall_clock, 1)["time"] > 0
