"""The harness with a clock of our own."""

import jax
import pytest

from pallas_kernels import bench


def test_inputs_rotate_and_warmup_does_not_count():
    seen = []

    def clock(function, *args):
        seen.append(function(*args))
        return 100.0 if len(seen) <= 4 else float(len(seen))

    timing = bench.measure(lambda x: x, [(0,), (1,), (2,)], runs=11, warmup=4, clock=clock)
    assert seen == [i % 3 for i in range(15)]
    assert timing == bench.Timing(median_s=10.0, p10_s=6.0, p90_s=14.0, runs=11)


def test_peaks_count_flops_and_bytes():
    found = bench.peaks(64, clock=lambda function, *args: 0.5 if function(*args) is not None else 0)
    assert found["matmul_flops_per_s"] == pytest.approx(2 * 64**3 / 0.5)
    assert found["copy_bytes_per_s"] == pytest.approx(2 * 64 * 128 * 2 / 0.5)


def test_without_a_gpu_there_is_no_device_time(monkeypatch):
    monkeypatch.setattr(bench.profiler, "measure", lambda function: lambda *args: (None, None))
    with pytest.raises(NotImplementedError, match="nothing to time"):
        bench.device_clock(jax.numpy.sin, 1.0)
