"""Timing kernels on a GPU: device time only, inputs in rotation, the machine's peaks beside them.

A time says little without its ceiling, and data sheets are not reached: a plain matrix product and
a copy are timed in the same process. Never used on a CPU, save to rehearse with another clock.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

Clock = Callable[..., float]
Side = tuple[Callable[..., Any], list[Any]]  # what is timed, its abstract arguments
Add = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 10th and 90th percentile of `runs`."""

    median_s: float
    p10_s: float
    p90_s: float
    runs: int


def device_clock(function: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds that the GPU spends in the kernels of one call (CUPTI)."""
    _, milliseconds = profiler.measure(function)(*args)
    if milliseconds is None:
        raise NotImplementedError("no kernel ran on a GPU: there is nothing to time")
    return milliseconds / 1e3


def wall_clock(function: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds of one call by this process's clock: for rehearsals."""
    began = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - began


def measure(
    function: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    runs: int = 50,
    warmup: int = 10,
    clock: Clock = device_clock,
) -> Timing:
    """Times a jitted function on each of several equal inputs in turn, so that L2 holds none."""
    times = [clock(function, *inputs[i % len(inputs)]) for i in range(warmup + runs)][warmup:]
    p10, median, p90 = (float(x) for x in np.percentile(times, (10, 50, 90)))
    return Timing(median, p10, p90, runs)


def peaks(n: int = 8192, clock: Clock = device_clock) -> dict[str, float]:
    """Returns flops_per_s of a bf16 product (n, n) and bytes_per_s of a copy of 8 n n bytes."""
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [(jax.random.normal(key, (n, n), jnp.bfloat16),) for key in keys]
    product = measure(jax.jit(lambda x: x @ x), inputs, 20, 5, clock)
    wide = [(jnp.concatenate([x, x], 1),) for (x,) in inputs]
    # Adding 1 reads and writes everything; a plain copy could be elided.
    copy = measure(jax.jit(lambda x: x + jnp.ones((), x.dtype)), wide, 20, 5, clock)
    return {
        "matmul_flops_per_s": 2 * n**3 / product.median_s,
        "copy_bytes_per_s": 2 * wide[0][0].nbytes / copy.median_s,
    }


def attempt(add: Add, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """Adds a row; one that fails must not lose the others."""
    began = time.perf_counter()
    try:
        row = about | measure()
    except Exception as error:
        row = about | {"note": f"{type(error).__name__}: {str(error)[:300]}"}
    add(row | {"took_s": time.perf_counter() - began})
