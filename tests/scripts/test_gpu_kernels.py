"""The GPU script's kernels part, on a CPU."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_kernels

sys.path.pop(0)


def test_the_matrix_is_whole_and_begins_with_every_width():
    checks = gpu_kernels.matrix()
    assert len(set(checks)) == len(checks) == 3 * 4 * 2 * 3 * 2
    assert [c.width for c in checks[:4]] == [128, 64, 256, 96]
    lengths, capacity = gpu_kernels.LENGTHS
    assert all(sum(each) <= capacity and len(each) == 5 for each in lengths)


@pytest.mark.slow
def test_a_rehearsal_runs_every_line():
    rows, about = [], {}
    gpu_kernels.check_kernels(rows.append, about, time.perf_counter() + 1000, rehearsal=True)
    assert rows[0]["passed"], rows[0]
    ours = [row for row in rows if row.get("implementation") == "ours"]
    assert [row["direction"] for row in ours] == ["forward", "forward+backward"]
    assert about["matmul_flops_per_s"] > 0 and about["copy_bytes_per_s"] > 0
    assert "cudnn" in rows[-1]["implementation"]  # a CPU has none: a note, not a crash


@pytest.mark.slow
def test_an_error_in_the_kernel_is_seen(monkeypatch):
    """The bound is tight enough to fail for an attention with a wrong scale."""
    right = gpu_kernels.varlen_attention

    def wrong(q, *rest, **options):
        return right(q * 1.05, *rest, **options)

    monkeypatch.setattr(gpu_kernels, "varlen_attention", wrong)
    found = gpu_kernels.errors(gpu_kernels.TINY, "reference", gpu_kernels.TINY_LENGTHS)
    assert max(found.values()) > 1
