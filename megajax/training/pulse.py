"""How long this process's device needs for a fixed product, now and then, between two steps.

All ranks wait for the slowest in collectives, and jax has no timers of single kernels that are
always on (MegaScale section 5.1 has CUDA events), so that a device that is slow shows in nobody's
step in particular. The product is put behind a step on the device's queue and takes nothing from
other ranks. The rule `slow` compares its times (monitor/slow_rank.py).
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Rows of the square matrices, and products in a row: about 2 ms of an H100, 20 ms of a CPU's core.
SIZES = {"gpu": (4096, 12), "cpu": (256, 8)}


class Pulse:
    """`launch` behind a step's dispatch, `finish` once that step is done."""

    def __init__(self, every: int, device: jax.Device | None = None):
        """every: steps from one to the next. device: None: the first of this process."""
        self._every, self._device = every, device or jax.local_devices()[0]
        size, self._times = SIZES.get(self._device.platform, SIZES["cpu"])
        dtype = jnp.bfloat16 if self._device.platform == "gpu" else jnp.float32
        x = jnp.full((size, size), 1 / size, dtype)
        self._x = jax.device_put(x, self._device)
        self._run = jax.jit(self._product)
        self._pending: tuple[int, jax.Array, jax.Array] | None = None
        self._run(self._x, jax.device_put(jnp.float32(0), self._device)).block_until_ready()

    def _product(self, x: jax.Array, after: jax.Array) -> jax.Array:
        y = x + (0 * after).astype(x.dtype)
        for _ in range(self._times):
            y = x @ y
        return y[0, 0]

    def launch(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Puts a pulse behind a step where one is due. metrics: of that step, not waited for."""
        if step % self._every or "loss" not in metrics:
            return
        after = metrics["loss"].addressable_data(0)
        if after.devices() == {self._device}:
            self._pending = step, after, self._run(self._x, after.astype(jnp.float32))

    def finish(self, step: int, wait: Any = jax.block_until_ready) -> dict[str, float]:
        """Waits for a step that `launch` saw, then for its pulse: returns {'pulse_s': seconds}.

        Nothing where none is due, or where the step was done before anybody looked, so that nobody
        knows when its pulse began.
        """
        if self._pending is None or self._pending[0] != step:
            return {}
        _, after, pulse = self._pending
        self._pending = None
        if after.is_ready():  # type: ignore[attr-defined]
            return {}
        wait(after)
        began = time.perf_counter()
        wait(pulse)
        return {"pulse_s": time.perf_counter() - began}
