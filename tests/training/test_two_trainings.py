"""Two trainings one after the other in one job of two processes: the same steps come twice."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.training.test_loop import Loader, Step, run_of

pytestmark = [pytest.mark.process, pytest.mark.slow]
ROOT = Path(__file__).parent.parent.parent
LATE_S = 3.0  # that one process comes later to a first step than the other


class Sleepy(Loader):
    """Has its first row late."""

    def __init__(self, seconds):
        self._seconds = seconds

    def __next__(self):
        time.sleep(self._seconds)
        self._seconds = 0.0
        return {}


class Summed(Step):
    """Adds the number of processes, by a program of all of them, and notes when it is launched.
    bad: the step whose loss is not finite."""

    def __init__(self, bad=None):
        import jax
        from jax.sharding import PartitionSpec as P

        self.bad, self.launched, self.leaf_norms = bad, [], np.ones(1)
        mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        self.rows = {}
        self._place = jax.sharding.NamedSharding(mesh, P("a"))
        self._sum = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(mesh, P()))

    @property
    def step(self):
        return self

    def _ones(self):
        import jax

        return jax.make_array_from_callback((2,), self._place, lambda _: np.ones(1, np.float32))

    def lower(self, state, batch):
        return self._sum.lower(self._ones())

    def __call__(self, state, batch):
        self.launched.append(time.time())
        added = float(self._sum(self._ones()))
        new, metrics = Step.step(self, state, batch)
        new.params["w"] = state.params["w"] + np.int32(added)
        if int(new.step) == self.bad:
            metrics["loss"] = np.float32(np.nan)
        return new, metrics


def work(rank, port):
    """What a process of the job does; prints a line of JSON for each training."""
    import jax

    from megajax.monitor.timers import LaunchSkew
    from megajax.training.loop import NotFinite, train
    from megajax.training.task import TrainState

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    for late, bad in ((1, None), (0, 3), (1, None)):
        run = run_of([])
        run.hooks, run.train_step = (), Summed(bad)
        run.state = TrainState({"w": np.int32(0)}, {}, np.int32(0))
        run.skew = LaunchSkew.of_job()
        run.loader = Sleepy(LATE_S if rank == late else 0.0)
        try:
            end = train(run)
        except NotFinite:
            end = "not finite"
        w = int(run.state.params["w"])
        first = run.train_step.launched[0]
        print(json.dumps({"end": end, "w": w, "first": first}), flush=True)


def test_each_begins_when_all_processes_have_compiled():
    """The second ends by an error, while its next step is under way already."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.training.test_two_trainings",
             str(rank), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=120) for p in job]
    finally:
        for p in job:
            p.kill()
    assert [p.returncode for p in job] == [0, 0], outputs
    ours, theirs = (
        [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # Gloo speaks too
        for out, _ in outputs
    )
    assert [(r["end"], r["w"]) for r in ours] == [(r["end"], r["w"]) for r in theirs]
    assert [(r["end"], r["w"]) for r in ours] == [("done", 10), ("not finite", 8), ("done", 10)]
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one["first"] - other["first"]) < LATE_S / 2


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
