"""The Prometheus source against a real server that scrapes eight machines and a node exporter.

The machines are process groups with an agent each (tests/machines.py).
"""

import math
import signal
import time

import numpy as np
import pytest

from megajax.monitor import sources
from megajax.monitor.samples import Samples, concat, to_grid
from megajax.monitor.sources import convert, http_query
from megajax.monitor.sources import server as server_
from tests import machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif("machines.is_missing()", reason=machines.NEEDED),
]
PER_HOST = {"cpu_usage", "memory_usage", "disk_throughput"}
COUNT = 8


def wait_until(condition, seconds, what):
    """Waits for something that a loaded machine may take long for."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.5)


def is_up(source, count, seconds=5):
    """Tells whether all machines gave samples in the last seconds."""
    now = math.floor(time.time())
    try:
        grid = to_grid(source.read(now - seconds, now))
    except sources.Unavailable:
        return False
    if "cpu_usage" not in grid.metrics or len(grid.machines) < count:
        return False
    return not np.isnan(grid.values_CNT[grid.metrics.index("cpu_usage")]).all(1).any()


def of(grid, metric, instance):
    return grid.values_CNT[grid.metrics.index(metric), grid.machines.index(instance)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(machines, node exporter's instance, server), all of them up."""
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        machines.machines(COUNT, folder) as fleet,
        machines.node_exporter() as node,
        machines.server(folder / "server", [*(m.instance for m in fleet), node]) as server,
    ):
        source = sources.prometheus(server.url, metrics=sorted(PER_HOST), retries=1)
        wait_until(lambda: is_up(source, COUNT + 1), 60, "the server does not scrape")
        yield fleet, node, server


def test_stress_on_one_machine_shows_on_it_alone(world):
    fleet, node, server = world
    source = sources.prometheus(server.url)
    begin = math.floor(time.time())
    time.sleep(15)
    fleet[3].stress("cpu", 1.0)
    fleet[5].stress("memory", 800)
    fleet[6].stress("disk", 4)
    time.sleep(20)
    end = math.floor(time.time()) - 3
    for machine, kind in ((3, "cpu"), (5, "memory"), (6, "disk")):
        fleet[machine].stress(kind, 0)
    grid = to_grid(source.read(begin, end))
    instances = [m.instance for m in fleet]
    assert set(grid.machines) == {*instances, node}
    for metric, k in (("cpu_usage", 3), ("memory_usage", 5), ("disk_throughput", 6)):
        quiet, stressed = (
            {i: np.nanmean(of(grid, metric, i)[part]) for i in instances}
            for part in (slice(0, 13), slice(-15, None))
        )
        others = [stressed[i] for i in instances if i != fleet[k].instance]
        assert stressed[fleet[k].instance] > 2 * max(others), (metric, stressed)
        assert quiet[fleet[k].instance] < 2 * max(quiet[i] for i in instances if i != instances[k])
    measured = {m for c, m in enumerate(grid.metrics) if np.isfinite(of(grid, m, node)).any()}
    more = {"disk_usage", "disk_busy", "tcp_throughput", "tcp_rdma_throughput"}
    assert measured >= PER_HOST | more
    shares = [m for m in measured if m.endswith("usage") or m == "disk_busy"]
    for metric in shares:
        values_T = of(grid, metric, node)
        assert -0.05 <= np.nanmin(values_T) and np.nanmax(values_T) <= 1.1, metric
    assert np.isnan(of(grid, "cpu_usage", instances[0])).mean() < 0.1  # scrapes that were late


def raw_samples(server, start, end):
    """The stored samples of all of an exporter's series that the table knows, without look-back."""
    client = http_query.Client(server.url)
    listed = {n for m in convert.METRICS for n in server_.exporter_names(m)}
    rows = []
    for name in sorted(listed):
        query = {"query": f"{name}[{end - start}s]", "time": str(end)}
        data, _ = client.ask("query", query, lambda data: data)
        for series in data["result"]:
            labels = {k: v for k, v in series["metric"].items() if k not in ("__name__", "job")}
            machine = labels.pop("instance")
            pairs = ",".join(f'{k}="{v}"' for k, v in labels.items())
            rows += [
                (float(t), machine, f"{name}{{{pairs}}}", float(v)) for t, v in series["values"]
            ]
    return Samples.of(rows, start, end)


def test_the_servers_expressions_agree_with_the_conversion_of_stored_samples(world):
    """Two programs, PromQL and NumPy, for the same table."""
    _, node, server = world
    end = math.floor(time.time()) - 3
    start = end - 30
    by_server = to_grid(sources.prometheus(server.url).read(start, end))
    converted = to_grid(sources.canonical(raw_samples(server, start - 5, end)))
    assert set(converted.metrics) == set(by_server.metrics)
    assert converted.machines == by_server.machines
    for c, metric in enumerate(by_server.metrics):
        shown = by_server.values_CNT[c]
        stored = converted.values_CNT[converted.metrics.index(metric)][:, 5:]
        # A sample of second t is first seen at t + 1.
        both = np.isfinite(shown[:, 1:]) & np.isfinite(stored[:, :-1])
        assert both.mean() > 0.8 * np.isfinite(shown).mean(), metric
        same = np.isclose(shown[:, 1:][both], stored[:, :-1][both], rtol=1e-3, atol=1e-9)
        assert same.mean() > 0.95, (metric, same.mean())


def test_what_ends_is_a_hole_and_a_restart_of_the_server_is_one_of_all(world):
    fleet, _, server = world
    source = sources.prometheus(server.url, metrics=["cpu_usage", "memory_usage"], retries=1)
    killed = time.time()
    fleet[7].kill()
    time.sleep(8)
    stopped = time.time()
    server.stop()
    with pytest.raises(sources.Unavailable, match="Connection refused"):
        source.read(stopped - 5, stopped)
    time.sleep(12)
    started = time.time()
    server.start()
    wait_until(lambda: is_up(source, COUNT, 3), 60, "the server does not come back")
    time.sleep(3)
    end = time.time()
    grid = to_grid(source.read(killed - 10, end))
    at = {
        k: math.ceil(v) - grid.start
        for k, v in {"killed": killed, "stopped": stopped, "started": started}.items()
    }
    for metric in grid.metrics:
        gone, other = (of(grid, metric, fleet[k].instance) for k in (7, 0))
        assert np.isfinite(gone[: at["killed"] - 1]).mean() > 0.7
        assert np.isnan(gone[at["killed"] + 3 :]).all()
        assert np.isfinite(other[: at["stopped"] - 1]).mean() > 0.8
        assert np.isnan(other[at["stopped"] + 3 : at["started"]]).all()
        assert np.isfinite(other[-2:]).any()
    later = source.read(end - 3, end)
    assert any(f"machine {fleet[7].instance} gave nothing" in note for note in later.notes)


def test_a_server_that_hangs_is_named_and_reading_goes_on(world):
    _, _, server = world
    source = sources.prometheus(server.url, metrics=["cpu_usage"], retries=0, timeout_s=1.0)
    now = math.floor(time.time())
    server.send(signal.SIGSTOP)
    try:
        with pytest.raises(sources.Unavailable, match="no whole answer within 1 s"):
            source.read(now - 10, now)
    finally:
        server.send(signal.SIGCONT)
    assert len(source.read(now - 10, now)) > 0


def test_a_guarded_server_wants_the_password_and_its_authority(tmp_path):
    with (
        machines.machines(1, tmp_path) as (machine,),
        machines.server(tmp_path / "server", [machine.instance], guarded=True) as server,
    ):
        options = {"user": "me", "ca_file": server.certificate, "retries": 1}
        good = sources.prometheus(server.url, password=machines.PASSWORD, **options)
        wait_until(lambda: is_up(good, 1), 60, "the server does not scrape")
        now = math.floor(time.time())
        with pytest.raises(sources.Refused, match="401 Unauthorized"):
            sources.prometheus(server.url, password="wrong", **options).read(now - 5, now)
        with pytest.raises(sources.Unavailable, match="not trusted"):
            options |= {"ca_file": None, "retries": 0}
            sources.prometheus(server.url, password=machines.PASSWORD, **options).read(now - 5, now)
        parts = [good.read(now - 5, now - 3), good.read(now - 3, now)]
        joined = good.read(now - 5, now)
        assert sorted(concat(parts).rows()) == sorted(joined.rows())  # any cut gives the same
