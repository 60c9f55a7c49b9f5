"""The daemon against a real Prometheus: eight machines, one of them under real stress.

The machines are process groups with an agent each (tests/machines.py); the model is fitted on their
own quiet minutes. Everything is one test of half an hour, because quiet minutes take their time.
`pytest -s` prints how long it took to find the machine, and the load meanwhile.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from megajax.systems.minder.reporter import NAMES
from tests import machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif("machines.is_missing()", reason=machines.NEEDED),
]
COUNT, SICK, QUIET_S = 8, 3, 600
SCRIPT = machines.ROOT / "experiments" / "minder.py"


def load():
    return f"load average {os.getloadavg()[0]:.1f}"


class Daemon:
    """experiments/minder.py watch as a process. lines: what it has said so far."""

    def __init__(self, folder, *flags):
        self.path = folder / "watch.log"
        self._seen = len(self.lines) if self.path.exists() else 0
        with self.path.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, "watch", f"--out={folder}", *flags],
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": "."},
            )

    @property
    def lines(self):
        return self.path.read_text().splitlines()

    def alerts(self):
        return [line for line in self.lines if "ALERT" in line]

    def wait(self, words, seconds):
        """Returns how long it took until a line after the last one waited for had these words."""
        began = time.monotonic()
        while True:
            lines = self.lines
            for k in range(self._seen, len(lines)):
                if re.search(words, lines[k]):
                    self._seen = k + 1
                    return time.monotonic() - began
            assert self.process.poll() is None, lines[-5:]
            assert time.monotonic() - began < seconds, (words, lines[-8:])
            time.sleep(0.5)

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def get(url):
    with urllib.request.urlopen(url) as response:
        return response.read().decode()


def metric(address, name):
    rows = re.findall(rf"^megajax_minder_{name}(?:{{(.*)}})? (\S+)$", get(address), re.M)
    return {labels: float(value) for labels, value in rows}


def found_again(url, sick):
    """Returns how long it took until the machine's score was that of an alert."""
    began = time.monotonic()
    while metric(url, "score").get(f'machine="{sick}"', 0.0) < 1:
        assert time.monotonic() - began < 300
        time.sleep(1)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(machines, server, proxy before it, Alertmanager or None), and a model in `folder`."""
    folder = tmp_path_factory.mktemp("watch")
    with (
        machines.machines(COUNT, folder) as fleet,
        machines.node_exporter() as node,
        machines.server(folder / "server", [*(m.instance for m in fleet), node]) as server,
        machines.proxy(server.url) as proxy,
        machines.alertmanager(folder / "alertmanager") as alertmanager,
    ):
        time.sleep(QUIET_S + 60)
        only = "|".join(re.escape(m.instance) for m in fleet)
        flags = ("--continuity_s=96", f"--only={only}", f"--out={folder}")
        done = subprocess.run(
            [sys.executable, SCRIPT, "train", f"--prometheus={server.url}",
             f"--hours={(QUIET_S + 30) / 3600}", *flags],
            cwd=folder, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield folder, fleet, server, proxy, alertmanager, only


def test_a_stressed_machine_is_found_and_nothing_that_the_server_does_ends_the_watch(world):
    folder, fleet, _, proxy, alertmanager, only = world
    port, sick = machines.free_port(), fleet[SICK].instance
    url = f"http://127.0.0.1:{port}/metrics"
    flags = [
        f"--prometheus={proxy.url}",
        f"--only={only}",
        f"--metrics_port={port}",
        "--timeout_s=5",
        f"--heatmap={folder}/heat.png",
        "--period_s=4",
    ]
    flags += [f"--alertmanager={alertmanager}"] if alertmanager else []
    with Daemon(folder, *flags) as daemon:
        one_stress(daemon, url, world)
    with Daemon(folder, *flags, "--timeout_s=20") as again:  # the stress goes on
        again.wait("watching", 120)
        print(f"found again {found_again(url, sick):.0f} s after a restart, {load()}")
        assert len(again.alerts()) == 1 and metric(url, "alerts") == {"": 1.0}  # not told again
        fleet[SICK].stress("cpu", 0)
        assert again.end(signal.SIGINT) == 130
    rows = [json.loads(line) for line in (folder / "watch/events.jsonl").read_text().splitlines()]
    assert [r["machine"] for r in rows if r["event"] == "alert"] == [sick]
    assert (folder / "heat.png").stat().st_size > 5_000


def one_stress(daemon, url, world):
    """Ten quiet minutes, a stress that goes on, and what a server may do meanwhile."""
    folder, fleet, server, proxy, alertmanager, _ = world
    sick = fleet[SICK].instance
    daemon.wait("watching", 120)
    time.sleep(QUIET_S)
    assert not daemon.alerts() and metric(url, "machines") == {"": COUNT}
    print(f"\n10 quiet minutes: no alert, {load()}")

    fleet[SICK].stress("cpu", 1.0)
    took = daemon.wait("ALERT", 180)
    print(f"found after {took:.0f} s of a continuity of 96 s, {load()}")
    assert sick in daemon.alerts()[0] and "cpu_usage" in daemon.alerts()[0]
    time.sleep(10)  # until the metrics, too, say so
    assert set(re.findall(r"^# TYPE (\S+)", get(url), re.M)) == set(NAMES)
    (picture,) = (folder / "watch" / "alerts").glob("*.png")
    assert picture.stat().st_size > 10_000
    if alertmanager:
        (alert,) = json.loads(get(f"{alertmanager}/api/v2/alerts"))
        assert alert["labels"]["machine"] == sick and alert["status"]["state"] == "active"

    for mode, words in (
        ("half", "breaks off|no answer"),
        ("nonsense", "begins with '<html>'"),
        ("slow", "no whole answer within 5 s"),
        ("refuse", "401 Unauthorized"),
    ):
        proxy.mode = mode
        print(f"{mode}: said after {daemon.wait(f'reading: .*({words})', 60):.0f} s")
        proxy.mode = "pass"
        daemon.wait("reading: works again", 90)
    server.stop()
    daemon.wait("reading: .*502", 60)
    time.sleep(15)
    server.start()
    daemon.wait("reading: works again", 90)
    time.sleep(20)
    assert len(daemon.alerts()) == 1, daemon.alerts()
    assert metric(url, "source_failures_total")[""] >= 5 and metric(url, "lag_seconds")[""] < 30

    assert daemon.end(signal.SIGTERM) == 0 and "stopped: " in daemon.lines[-1]


def test_a_wrong_password_at_the_start_is_exit_code_2(world):
    folder, fleet, *_ = world
    (folder / "password").write_text("wrong\n")
    with machines.server(folder / "guarded", [fleet[0].instance], guarded=True) as server:
        time.sleep(3)
        with contextlib.suppress(FileNotFoundError):
            (folder / "watch.log").unlink()
        with Daemon(
            folder,
            f"--prometheus={server.url}",
            "--user=me",
            f"--password_file={folder}/password",
            f"--ca_file={server.certificate}",
        ) as daemon:
            assert daemon.process.wait(120) == 2
    assert "401 Unauthorized" in daemon.lines[-1] and "wrong" not in daemon.lines[-1]
