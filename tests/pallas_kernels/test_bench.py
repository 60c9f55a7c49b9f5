"""The harness with a clock of our own."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import aot, bench


def test_inputs_are_distinct_in_one_program_and_warmup_does_not_count():
    seen = []

    def clock(program, args, launches):
        seen.append((program(*args), launches))
        return "made up", [10.0 * (i + 1) for i in range(launches)]

    timing = bench.measure(lambda x: x + 1, [(0,), (1,), (2,)], runs=31, warmup=4, clock=clock)
    assert seen == [([1, 2, 3], 11)]
    assert timing == bench.Timing(
        20.0, pytest.approx(20 / 3), pytest.approx(100 / 3), 33, "made up"
    )


def test_a_program_calls_once_for_each_input_one_after_another():
    """Nothing is merged: each product is there, and waits for the one before."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    text = jax.jit(bench.chained(jnp.matmul)).lower(*[(x, x)] * 3).as_text()
    assert text.count("call @matmul") == 3 and text.count("optimization_barrier") == 2


@pytest.mark.parametrize(("rows", "sets"), [(2**10, 16), (3 * 2**20, 11), (2**24, 3), (2**31, 1)])
def test_as_many_inputs_as_make_the_cache_cold(rows, sets):
    like = [jax.ShapeDtypeStruct((rows,), jnp.bfloat16)]
    assert bench.sets_of(lambda x: x, like) == sets


def test_peaks_count_flops_and_bytes():
    rates = bench.peaks(64, clock=lambda program, args, launches: ("made up", [1.5] * launches))
    assert rates["matmul_flops_per_s"] == pytest.approx(2 * 64**3 / 0.5)
    size = 8 * 64 * 128 * 2
    assert rates["copy_bytes_per_s"] == pytest.approx(2 * size / 0.75)
    assert rates["read_bytes_per_s"] == pytest.approx(size / 0.75)
    assert rates["clock"] == "made up"


class Cupti:
    """The extension, of which each launch has two kernels."""

    def __init__(self, kernels):
        self.kernels, self.sessions = kernels, 0

    def _cupti_init(self):
        if self.kernels is None:
            raise RuntimeError("no CUPTI")

    def _cupti_get_timings(self, finalize):
        self.sessions += 1
        return [("kernel", milliseconds) for milliseconds in self.kernels]


@pytest.mark.parametrize(
    ("kernels", "clock", "seconds"),
    [
        ([1.0, 2.0, 3.0, 4.0], "cupti", [0.003, 0.007]),
        ([], "wall", None),
        ([1.0, 2.0, 3.0], "wall", None),
        (None, "wall", None),
    ],
)
def test_one_session_for_all_launches_or_the_wall_clock(monkeypatch, kernels, clock, seconds):
    cupti = Cupti(kernels)
    monkeypatch.setattr(bench.profiler, "mosaic_gpu_lib", SimpleNamespace(_mosaic_gpu_ext=cupti))
    used, times = bench.device_clock(lambda x: x, [1.0], 2)
    assert used == clock and len(times) == 2
    if seconds:
        assert times == pytest.approx(seconds) and cupti.sessions == 1


def test_a_cuda_error_is_not_taken_for_a_missing_clock(monkeypatch):
    cupti = SimpleNamespace(_mosaic_gpu_ext=Cupti([]))
    monkeypatch.setattr(bench.profiler, "mosaic_gpu_lib", cupti)

    def kernel(x, calls=[]):  # noqa: B006
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        bench.device_clock(kernel, [1.0], 2)


@pytest.mark.aot
def test_a_program_has_nothing_beside_its_calls():
    """Compiled for an H100: a fusion for each call, not merged, and no copies between them."""
    device = SingleDeviceSharding(aot.devices(1, 1)[0])
    like = (jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=device),)
    program = bench.chained(lambda x: x + jnp.ones((), x.dtype))
    text = aot.compile(jax.jit(program).lower(*[like] * 3)).as_text()
    entry = text[text.index("ENTRY") :]
    assert entry.count(" fusion(") == 3 and " copy(" not in entry
