"""The pulse: behind a step, timed only where it is known when it began."""

import time

import jax
import jax.numpy as jnp
import pytest

from megajax.training import loop
from megajax.training.loop import Pulse


@pytest.fixture
def step(monkeypatch):
    """A step of whose end the loss tells."""
    monkeypatch.setattr(loop, "SIZES", {"cpu": (32, 2)})  # XLA optimizes nothing in tests

    def run(x):
        # Long enough to be running still when a busy machine comes back to the test.
        return {"loss": jax.lax.fori_loop(0, 1000, lambda _, y: y @ y / 128, x).sum()}

    x = jax.device_put(jnp.ones((128, 128)), jax.devices()[0])
    run = jax.jit(run)
    run(x)["loss"].block_until_ready()
    return lambda: run(x)


def test_a_pulse_is_timed_from_the_end_of_its_step(step):
    pulse = Pulse(2)
    began = time.perf_counter()
    metrics = step()
    pulse.launch(2, metrics)
    row = pulse.finish(2)
    elapsed = time.perf_counter() - began
    assert metrics["loss"].is_ready() and 0 < row["pulse_s"] < elapsed
    assert pulse.finish(2) == {}


def test_a_pulse_is_not_timed_where_nobody_saw_its_step_end(step):
    pulse, metrics = Pulse(2), step()
    metrics["loss"].block_until_ready()
    pulse.launch(4, metrics)
    assert pulse.finish(4) == {}
    pulse.launch(5, metrics)  # not due
    pulse.launch(6, {"other": metrics["loss"]})
    assert pulse.finish(5) == pulse.finish(6) == {}
