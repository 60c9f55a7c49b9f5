"""Two real processes over loopback: one job, the same losses, one decision to stop."""

import signal
import socket
import subprocess

import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from tests.experiments.test_pretrain import (
    command,
    environment,
    home,
    last_step,
    load_config,
    loader_of,
    restore,
    rows,
    wait_for,
)

pytestmark = pytest.mark.process
__all__ = ["home"]  # the fixture, shared


def start_job(home, *flags):
    """Starts two processes of four devices each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = []
    for i in range(2):
        env = environment() | {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(i),
        }
        job.append(
            subprocess.Popen(
                command(home, "--emulate=4", *flags),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
            )
        )
    return job


def losses(train_step, state, loader, steps):
    found = []
    for _ in range(steps):
        state, metrics = train_step.step(state, next(loader))
        found.append(float(metrics["loss"]))
    return found


STEADY = ["--optim.schedule=constant", "--optim.warmup=0", "--optim.lr=1e-3"]


def test_two_processes_are_one_run(home):
    folder = home / "job"
    job = start_job(
        home, "--train.steps=3000", "--checkpoint.every=0", f"--run_dir={folder}", *STEADY
    )
    try:
        wait_for(job[0], lambda: last_step(folder) >= 5)
        job[1].send_signal(signal.SIGTERM)  # to the one that does not write
        outputs = [p.communicate(timeout=300)[0] for p in job]
    finally:
        for p in job:
            p.kill()
    assert [p.returncode for p in job] == [0, 0], outputs
    assert "Continue with:" in outputs[0]
    assert "step 1/" not in outputs[1]  # one process speaks
    assert all(0 <= row["launch_skew_s"] < 60 for row in rows(folder).values())
    assert set(rows(folder, "start_devices_s")) == {0}
    stopped = CheckpointManager(folder / "checkpoints").latest()
    assert stopped >= 5 and f"stopped after step {stopped}" in outputs[0]

    # One process with eight devices goes on, and one that never stopped has the same losses.
    train_step, state, data = restore(folder, stopped)
    loader = loader_of(load_config(folder), train_step, data["rows"])
    resumed = losses(train_step, state, loader, 3)
    alone = loader_of(load_config(folder), train_step, 0)
    straight = losses(
        train_step, train_step.init(load_config(folder).train.seed), alone, stopped + 3
    )
    assert sorted(rows(folder)) == list(range(1, stopped + 1))
    got = [rows(folder)[step]["loss"] for step in range(1, stopped + 1)] + resumed
    np.testing.assert_allclose(got, straight, atol=1e-3)
