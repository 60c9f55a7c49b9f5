"""--detector=minder with a fitted model and a real Prometheus, on four real processes.

Each host is a control group whose counters an exporter shows under the host's name. A healthy run
is recorded by the server, and the detector is fitted on that; in the same run again, one host gets
busy neighbours. About half an hour.
"""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from tests import machines
from tests.experiments.test_pretrain import ROOT, environment, home
from tests.experiments.test_run_minder import GROUPS, SHARE, job
from tests.experiments.test_supervised import same

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif("machines.is_missing()", reason=machines.NEEDED),
]
__all__ = ["home"]  # the fixture, shared

STEPS = 1000  # of 0.65 s here
HEALTHY_S = 620  # of the first run, to fit on
CONTINUITY_S = 96
HOSTS, SPARES = 4, 1


@contextlib.contextmanager
def exporters(run, ports):
    """Shows the counters of each host of a job."""
    started = []
    try:
        for host, port in zip(run.names, ports, strict=False):
            run.wait_for(lambda host=host: all(g.exists() for g in run.groups(host)), 60)
            script = str(ROOT / "scripts" / "agent_metrics.py")
            words = [f"--port={port}", f"--cgroup={run.groups(host)[0].name}"]
            started.append(
                subprocess.Popen([sys.executable, script, *words], stdout=subprocess.DEVNULL)
            )
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def recorded(home, server, ports):
    """Runs undisturbed, and fits a model on what the server stored of it. Returns its path."""
    folder = home / "healthy"
    with job(home, folder, STEPS, share=SHARE) as run, exporters(run, ports):
        run.wait_for(lambda: run.step() >= 20)
        begun = time.time()
        run.wait_for(lambda: time.time() - begun > HEALTHY_S, HEALTHY_S + 60)
        assert run.step() < STEPS, "this machine is too fast: more STEPS are needed"
        fitted = subprocess.run(
            [
                sys.executable,
                str(ROOT / "experiments" / "minder.py"),
                "train",
                f"--prometheus={server.url}",
                f"--hours={HEALTHY_S / 3600}",
                f"--out={home}/minder",
            ],
            env=environment() | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert fitted.returncode == 0, fitted.stderr
        print(fitted.stdout)
        run.end()
        assert not run.told() and not run.events("fault")
    return home / "minder" / "model.npz"


def hogged(home, server, ports, model):
    """The same run, with busy processes on the host of rank 2."""
    rank = 2
    flags = (
        f"--minder.model={model}",
        f"--prometheus={server.url}",
        "--respond=slow=warn",
        f"--minder.continuity_s={CONTINUITY_S}",
    )
    with (
        job(home, home / "hog", STEPS, *flags, spares=SPARES, share=SHARE) as run,
        exporters(run, ports),
    ):
        run.wait_for(lambda: run.step() >= 20)
        time.sleep(240)
        assert not run.told(), run.told()
        host, began = run.team()[rank], time.time()
        for _ in range(2):
            run.start(host, [sys.executable, "-c", "while True: pass"], SHARE)
        (fault,) = run.wait_for(lambda: run.events("fault"))
        assert (fault["rule"], fault["hosts"]) == ("minder", [host])
        (alert,) = [e for e in run.told() if e["rule"] == "minder"]
        assert (alert["ranks"], alert["hosts"]) == ([rank], [host])
        assert "cpu_usage" in alert["message"]
        print(f"named after {alert['time'] - began:.0f} s: {alert['message']}")
        assert alert["time"] - began <= CONTINUITY_S + 60
        run.end()
        assert len(run.events("fault")) == 1 and len(run.events("told")) == 1
        first, second = (e["message"].split(" on ")[1].split(", ") for e in run.events("start"))
        (spare,) = set(run.names) - set(first)
        assert first[rank] == host and second[rank] == spare
        (eviction,) = json.loads((run.out / "evictions.json").read_text())["evictions"]
        print(eviction)
        assert (eviction["host"], eviction["rule"]) == (host, "minder")
        assert eviction["verdict"] == "right", eviction
        assert "megajax_host_minder_score{" in (run.out / "metrics.prom").read_text()


def test_a_host_whose_metrics_differ_is_saved_evicted_and_the_run_ends_as_if_undisturbed(home):
    if not os.access(GROUPS, os.W_OK):
        pytest.skip("needs control groups of processors (version 1) that it may make")
    ports = [machines.free_port() for _ in range(HOSTS + SPARES)]
    names = {f"127.0.0.1:{port}": f"h{k}" for k, port in enumerate(ports)}
    with machines.server(home / "prometheus", names) as server:
        model = recorded(home, server, ports)
        hogged(home, server, ports, model)
    same(home / "hog", home / "healthy", STEPS)
