"""The counters that an agent shows, beside those of psutil's source /proc and of the process."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from megajax.core.errors import UserError
from megajax.monitor import exporter
from megajax.monitor.meter import Gpus
from megajax.monitor.sources import convert
from tests.fake_nvml import Nvml
from tests.machines import free_port

LINE = re.compile(r"(\w+)(?:\{(.*)\})? (-?[\d.e+-]+)")


def parsed(text):
    """{(name, labels as text): value} of the text format."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {(m[1], m[2] or ""): float(m[3]) for m in map(LINE.fullmatch, lines)}
    assert len(values) == len(lines)
    return values


def read(rows):
    return parsed(exporter.text(rows))


def of(values, name):
    return {labels: value for (n, labels), value in values.items() if n == name}


def test_a_host_shows_what_the_kernel_says():
    host = exporter.Host(folder=os.sep)
    values = read(host.rows())
    idle = [v for k, v in of(values, "node_cpu_seconds_total").items() if 'mode="idle"' in k]
    assert len(idle) == os.cpu_count() and sum(idle) <= time.monotonic() * len(idle)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert values["node_memory_MemTotal_bytes", ""] == total
    assert 0 < values["node_memory_MemAvailable_bytes", ""] < total
    (size,) = of(values, "node_filesystem_size_bytes").values()
    (free,) = of(values, "node_filesystem_avail_bytes").values()
    assert 0 < free < size
    assert of(values, "node_network_receive_bytes_total")['device="lo"'] >= 0
    known = {
        n for recipes in convert.METRICS.values() for w in recipes for n in (*w.names, w.rest_of)
    }
    assert {name for name, _ in values} <= known


def test_processor_time_that_falls_a_little_does_not_begin_again(tmp_path):
    (tmp_path / "proc").mkdir()
    host = exporter.Host(tmp_path, gpus=None)
    shown = []
    for idle in (1000, 990, 1010, 5):
        (tmp_path / "proc/stat").write_text(f"cpu  1 0 0 1\ncpu0 7 0 0 {idle} 0 0 0 0\n")
        shown.append(of(read(host.rows()), "node_cpu_seconds_total")['cpu="0",mode="idle"'])
    assert shown == [10.0, 10.0, 10.1, 0.05]


def test_disks_cards_and_gpus_have_the_names_of_their_exporters(tmp_path, monkeypatch):
    for folder in (
        "proc",
        "sys/block/nvme0n1",
        "sys/class/net/eth0",
        "sys/class/infiniband/mlx5_0/ports/1/counters",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/diskstats").write_text(
        "259 0 nvme0n1 10 0 2 0 20 0 4 0 0 1500 0\n259 1 nvme0n1p1 10 0 2 0 20 0 4 0 0 9 0\n"
    )
    for name, words in (("port_rcv_data", "5"), ("port_xmit_data", "6")):
        (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters" / name).write_text(words)
    monkeypatch.setattr(exporter.meter, "counters", lambda card: {"tx_prio3_pause": 8, "x": 1})
    values = read(exporter.Host(tmp_path, Gpus(Nvml())).rows())
    port = 'device="mlx5_0",port="1"'
    expected = {
        ("node_disk_read_bytes_total", 'device="nvme0n1"'): 1024.0,
        ("node_disk_written_bytes_total", 'device="nvme0n1"'): 2048.0,
        ("node_disk_io_time_seconds_total", 'device="nvme0n1"'): 1.5,
        ("node_infiniband_port_data_received_bytes_total", port): 20.0,
        ("node_infiniband_port_data_transmitted_bytes_total", port): 24.0,
        ("node_ethtool_transmitted_prio3_pause", 'device="eth0"'): 8.0,
        ("DCGM_FI_DEV_GPU_UTIL", 'gpu="0"'): 10.0,
        ("DCGM_FI_DEV_GPU_UTIL", 'gpu="1"'): 20.0,
        ("DCGM_FI_DEV_MEM_COPY_UTIL", 'gpu="0"'): 50.0,
        ("DCGM_FI_DEV_FB_USED", 'gpu="0"'): 8192.0,
        ("DCGM_FI_DEV_POWER_USAGE", 'gpu="0"'): 350.5,
        ("DCGM_FI_DEV_GPU_TEMP", 'gpu="1"'): 61.0,
        ("DCGM_FI_DEV_SM_CLOCK", 'gpu="0"'): 1980.0,
    }
    for key, value in expected.items():
        assert values[key] == pytest.approx(value), key
    assert len(of(values, "DCGM_FI_DEV_POWER_USAGE")) == 1  # the second GPU has no meter
    assert len(of(values, "node_disk_read_bytes_total")) == 1  # a part of a disk is not counted


BUSY = """
import os, sys, time
os.setpgid(0, 0)
if os.fork() == 0:
    held = bytearray(50 << 20)
    while True: pass
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def busy_group():
    """A process that sleeps, and a child of it that holds 50 MiB and never stops."""
    process = subprocess.Popen([sys.executable, "-S", "-c", BUSY], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def spent(rows):
    values = of(rows, "node_cpu_seconds_total")
    return {k.split('"')[3]: v for k, v in values.items()}


@pytest.mark.process
def test_a_group_shows_its_own_time_and_memory_and_ends_with_its_processes():
    with busy_group() as process:
        group = exporter.Group(process.pid)
        before, begin = spent(read(group.rows())), time.monotonic()
        child = next(pid for pid, _ in group._last if pid != process.pid)
        ticks = lambda: sum(map(int, group._stat(child)[11:13]))  # noqa: E731
        first = ticks()
        time.sleep(1.0)
        values, elapsed = read(group.rows()), time.monotonic() - begin
        used = (ticks() - first) / os.sysconf("SC_CLK_TCK") / os.cpu_count()
        after = spent(values)
        grown = {mode: after[mode] - before[mode] for mode in after}
        assert grown["user"] + grown["system"] == pytest.approx(used, abs=0.03) and used > 0.02
        assert sum(grown.values()) == pytest.approx(elapsed, abs=0.05)
        memory = [v for (n, _), v in values.items() if n.startswith("node_memory")]
        assert 50 << 20 < abs(memory[0] - memory[1]) < 200 << 20
        assert not of(values, "node_network_receive_bytes_total")  # it has no namespace of its own
        os.kill(child, signal.SIGKILL)
        time.sleep(0.1)
        left = spent(read(group.rows()))
        assert left["user"] >= after["user"]  # what ended stays counted
    with pytest.raises(exporter.Gone):
        read(group.rows())
    with pytest.raises(UserError, match="no such process"):
        exporter.Group(process.pid)


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a control group: needs root")
def test_a_control_group_shows_its_own_time_and_memory():
    roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/memory")
    version_2 = os.path.exists(f"{roots[0]}/cgroup.controllers")
    folders = [f"{r}/megajax{os.getpid()}" for r in (roots[:1] if version_2 else roots[1:])]
    try:
        for folder in folders:
            os.mkdir(folder)
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        with busy_group() as process:
            (child,) = [p for p, _ in exporter.Group(process.pid)._last if p != process.pid]
            for folder in folders:
                with open(f"{folder}/cgroup.procs", "w") as f:
                    f.write(str(child))
            group = exporter.Cgroup(os.path.basename(folders[0]))
            before, begin = spent(read(group.rows())), time.monotonic()
            time.sleep(0.5)
            values = read(group.rows())
            grown = {mode: v - before[mode] for mode, v in spent(values).items()}
            assert sum(grown.values()) == pytest.approx(time.monotonic() - begin, abs=0.1)
            assert grown["user"] > 0.02
        time.sleep(0.1)
    finally:
        for folder in folders:
            os.rmdir(folder)
    with pytest.raises(exporter.Gone):
        read(group.rows())


@contextlib.contextmanager
def served(rows):
    with exporter.Server("127.0.0.1", 0, rows) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://{server.address}"
        finally:
            server.shutdown()
            thread.join()


def test_the_page_is_one_of_prometheus_and_says_when_there_is_nothing():
    rows = [("a_total", "counter", {"x": 'q"\\\n'}, 1.5), ("b", "gauge", {}, 2)]
    with served(lambda: iter(rows)) as url:
        with urllib.request.urlopen(f"{url}/metrics?x=1") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            said = answer.read().decode()
        assert said == (
            '# TYPE a_total counter\na_total{x="q\\"\\\\\\n"} 1.5\n# TYPE b gauge\nb 2\n'
        )
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            urllib.request.urlopen(f"{url}/")
        caught.value.close()
        with pytest.raises(UserError, match="cannot be had"):
            exporter.Server("127.0.0.1", int(url.rpartition(":")[2]), lambda: iter(rows))

    def gone():
        raise exporter.Gone("it ended")
        yield

    with served(gone) as url:
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            urllib.request.urlopen(f"{url}/metrics")
        caught.value.close()
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as rude:
            rude.sendall(b"\x00\xff\r\n\r\n")  # a client that speaks no HTTP hurts nobody
            rude.recv(100)


@pytest.mark.process
def test_the_script_serves_until_it_is_told_to_stop():
    command = [sys.executable, "scripts/agent_metrics.py", "--port=0", f"--pid={os.getpid()}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[1]
        with urllib.request.urlopen(url) as answer:
            values = parsed(answer.read().decode())
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        total, free = (values[f"node_memory_Mem{n}_bytes", ""] for n in ("Total", "Available"))
        assert 0 < total - free < 20 * resident
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close()


@pytest.mark.process
def test_an_agent_of_supervision_shows_its_host_while_it_waits_for_its_driver():
    port = free_port()
    command = [
        sys.executable,
        "scripts/supervise.py",
        "--agent=127.0.0.1:1",
        "--join_s=30",
        f"--metrics_at=127.0.0.1:{port}",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "MEGAJAX_TOKEN": "x" * 32}
    )
    try:
        assert "no driver at 127.0.0.1:1 yet" in process.stderr.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            values = parsed(answer.read().decode())
        assert len(of(values, "node_cpu_seconds_total")) >= 4 * os.cpu_count()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    wrong = [sys.executable, "scripts/supervise.py", "--metrics_at=127.0.0.1:1", "--", "true"]
    said = subprocess.run(wrong, capture_output=True, text=True)
    assert said.returncode == 2 and "--metrics_at is for an --agent" in said.stderr
