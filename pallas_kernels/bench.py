"""Timing kernels on a GPU: device time only, L2 cold, the machine's peaks beside them.

One jitted program calls a function on several distinct inputs, one after another, and is launched
many times; a sample is the time of one launch over the number of calls. The inputs and results of
one launch are larger than L2 together, so that no call finds its operands there. The clock is
CUPTI's sum of kernel times, in one session for all launches; where CUPTI does not work, the host's
clock around each launch, which counts the gaps between kernels too: a row says which it was (jax
gives no access to CUDA events). A time says little without its ceiling, and data sheets are not
reached: a plain matrix product and a copy are timed in the same process.
"""

import dataclasses
import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.hopper.cards import CHIPS

CUPTI, WALL = "cupti", "wall"
Samples = tuple[str, list[float]]  # which clock, and the seconds of each launch
Clock = Callable[[Callable[..., Any], Sequence[Any], int], Samples]
Side = tuple[Callable[..., Any], list[Any]]  # what is timed, its abstract arguments
COLD_BYTES = 128e6  # (chosen: twice the L2 of an H200, and more)
SETS, MOST_SETS, ROOM_BYTES = 3, 16, 20e9  # inputs of one launch (chosen), and what they may take


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 10th and 90th percentile over launches; `runs` calls in all."""

    median_s: float
    p10_s: float
    p90_s: float
    runs: int
    clock: str


def device_clock(
    program: Callable[..., Any],
    args: Sequence[Any],
    launches: int,
    fallback: Clock | None = None,
) -> Samples:
    """Returns the seconds that the GPU spends in the kernels of each launch, by CUPTI if it can.

    fallback: the clock where CUPTI does not work; None: `wall_clock`.
    """
    jax.block_until_ready(program(*args))
    fallback = fallback or wall_clock
    try:
        times = _kernel_seconds(program, args, launches)
    except Exception as error:
        # The program's own, as JAX or as PyTorch says it: this process cannot go on.
        if "CUDA_ERROR" in str(error) or "CUDA error" in str(error):
            raise
        _warn_once(f"CUPTI does not work here, so another clock is used: {error}")
        return fallback(program, args, launches)
    per_launch, remainder = divmod(len(times), launches)
    if not times or remainder:
        _warn_once(f"CUPTI saw {len(times)} kernels in {launches} launches: it is not used")
        return fallback(program, args, launches)
    sums = np.asarray(times).reshape(launches, per_launch).sum(1)
    return CUPTI, sums.tolist()


def _kernel_seconds(program: Callable[..., Any], args: Sequence[Any], launches: int) -> list[float]:
    """Returns the seconds of all kernels of all launches, in order; frees results as they come."""
    if profiler.mosaic_gpu_lib is None:
        raise NotImplementedError("jax's CUDA plugin is not installed")
    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # profiler.Cupti would keep all results
    extension._cupti_init()
    try:
        for _ in range(launches):
            jax.block_until_ready(program(*args))
    finally:
        timings = extension._cupti_get_timings(False)
    return [milliseconds / 1e3 for _, milliseconds in timings]


def wall_clock(program: Callable[..., Any], args: Sequence[Any], launches: int) -> Samples:
    """Returns the seconds of each launch by this process's clock."""
    times = []
    for _ in range(launches):
        began = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - began)
    return WALL, times


def _warn_once(text: str) -> None:
    logging.log_first_n(logging.WARNING, text, 1)


def chained(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Returns a program that calls a function on each of its arguments, a tuple, in turn.

    A call waits for the one before: XLA neither merges them nor runs them side by side.
    """
    once = jax.jit(function)  # lowered once, however often it is called

    def program(*sets: tuple[Any, ...]) -> list[Any]:
        results: list[Any] = []
        for args in sets:
            if results:
                args, _ = jax.lax.optimization_barrier((args, results[-1]))
            results.append(once(*args))
        return results

    return program


def sets_of(function: Callable[..., Any], like: Sequence[Any]) -> int:
    """Returns how many inputs of these shapes it takes that L2 holds none of the next call's."""
    leaves = jax.tree.leaves((like, jax.eval_shape(function, *like)))
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    if SETS * nbytes > ROOM_BYTES:
        return 1
    return min(max(math.ceil(COLD_BYTES / nbytes), SETS), MOST_SETS)


def measure(
    function: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    runs: int = 50,
    warmup: int = 10,
    clock: Clock = device_clock,
) -> Timing:
    """Times a function on several equal inputs; runs, warmup: calls at least."""
    return measure_program(jax.jit(chained(function)), inputs, runs, warmup, clock)


def measure_program(
    program: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    runs: int = 50,
    warmup: int = 10,
    clock: Clock = device_clock,
) -> Timing:
    """Times a function through its `chained` program, jitted or compiled for these inputs."""
    calls = len(inputs)
    launches = math.ceil(runs / calls)
    for _ in range(math.ceil(warmup / calls)):
        jax.block_until_ready(program(*inputs))
    name, times = clock(program, inputs, launches)
    p10, median, p90 = (float(x) / calls for x in np.percentile(times, (10, 50, 90)))
    return Timing(median, p10, p90, launches * calls, name)


def rounding(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns jax.jit of a program that keeps every rounding to 16 bits, to compare errors with.

    By default XLA leaves out a rounding that it finds inside a fusion, on a GPU. The sums of a
    gradient over rows are then those of float32 numbers, which no program reaches that keeps its
    activations in 16 bits, ours or another.
    """
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False}, **options)


def normal(key: jax.Array, shapes: Any) -> Any:
    """Returns a tree of random arrays, normally distributed."""
    leaves, form = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    drawn = (jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True))
    return form.unflatten(drawn)


def peaks(n: int = 8192, clock: Clock = device_clock) -> dict[str, Any]:
    """Returns the rates of a bf16 product (n, n), and of memory with 32 n n bytes read.

    copy_bytes_per_s: bytes read and written of the best of three, a copy by the driver, one by a
    kernel of XLA's, and a sum, which only reads; each of them stands beside it.
    """
    square = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
    inputs = [normal(key, (square,)) for key in jax.random.split(jax.random.key(0), 3)]
    product = measure(lambda x: x @ x, inputs, 20, 5, clock)
    wide = [(jax.lax.bitcast_convert_type(jnp.tile(x, (8, 2)), jnp.uint16),) for (x,) in inputs[:2]]
    size = wide[0][0].nbytes
    rates = {}
    for name, function, moved in (
        ("driver_copy", lambda x: jnp.copy(x), 2 * size),
        # Adding 1 reads and writes everything; a plain copy could be elided.
        ("kernel_copy", lambda x: x + jnp.ones((), x.dtype), 2 * size),
        ("read", lambda x: x.sum(dtype=jnp.uint32), size),
    ):
        rates[f"{name}_bytes_per_s"] = moved / measure(function, wide, 10, 3, clock).median_s
    return {
        "matmul_flops_per_s": 2 * n**3 / product.median_s,
        "copy_bytes_per_s": max(rates.values()),
        **rates,
        "clock": product.clock,
    }


# The folders with kernels. Each has cases.py (CASES), bench.py (checks, what is timed, tunings) and
# configs.py (what report.py compiles); those of collective and expert have names of their own.
FOLDERS = (
    "attention",
    "collective",
    "expert",
    "gemm",
    "grouped",
    "norm",
    "paged",
    "quant_gemm",
    "quantize",
    "tile_sparse",
)


def module_of(folder: str, what: str) -> Any:
    """Returns a module of a kernel folder, 'bench', 'cases' or 'configs'."""
    return importlib.import_module(f"pallas_kernels.{folder}.{what}")


def memory_rate(device_kind: str) -> float:
    """Returns the HBM bytes a second of a Hopper GPU by jax's name for it, of others an H200's."""
    chip = next((chip for chip in CHIPS if chip in device_kind.lower()), "h200")
    return CHIPS[chip][8]
