"""Two real processes over loopback: one job, the same losses, one decision to stop."""

import signal
import socket
import subprocess

import pytest

from megajax.checkpoint.manager import CheckpointManager
from tests.experiments.test_pretrain import (
    command,
    environment,
    home,
    last_step,
    rows,
    run,
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
    assert [p.returncode for p in job] == [143, 143], outputs
    assert "Continue with:" in outputs[0]
    assert "step 1/" not in outputs[1]  # one process speaks
    assert all(0 <= row["launch_skew_s"] < 60 for row in rows(folder).values())
    assert set(rows(folder, "start_devices_s")) == {0}
    stopped = CheckpointManager(folder / "checkpoints").latest()
    assert stopped >= 5 and f"stopped after step {stopped}" in outputs[0]

    # One process with eight devices goes on, and one that never stopped has the same losses.
    last = stopped + 3
    resumed, straight = (
        run(home, f"--train.steps={last}", f"--run_dir={f}", *STEADY)
        for f in (folder, home / "alone")
    )
    assert resumed.returncode == straight.returncode == 0, resumed.stderr + straight.stderr
    assert f"resumed after step {stopped}" in resumed.stdout
    got, want = rows(folder), rows(home / "alone")
    assert sorted(got) == sorted(want) == list(range(1, last + 1))
    for step, row in want.items():
        assert got[step]["loss"] == pytest.approx(row["loss"], abs=1e-3)
