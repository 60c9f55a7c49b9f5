"""Counters of a host, beside what the kernel itself and other readers say."""

import ctypes
import os
import resource
import time

import pytest

from megajax.monitor.meter import Gpus, HostMeter, counters, traffic
from tests.fake_nvml import Nvml

STAT = "cpu  {} 0 10 {} 5 0 0 0 0 0\ncpu0 1 1 1 1\n"
NET = "x\ny\n lo: 100 0 0 0 0 0 0 0 50 0 0\neth0: 7 0 0 0 0 0 0 0 3 0 0\n"


@pytest.fixture
def system(tmp_path):
    for name in ("proc/net", "sys/class/net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text(NET)
    (tmp_path / "proc/stat").write_text(STAT.format(20, 65))
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB")
    return tmp_path


def test_rates_come_with_the_second_reading_and_never_from_a_counter_that_began_again(
    system, monkeypatch
):
    now, pauses = [10.0], {"rx_prio3_pause": 1000, "tx_prio0_pause": 5, "rx_packets": 10**9}
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    meter = HostMeter(system, Gpus(Nvml()), lambda card: pauses)
    first = meter.host(system)
    assert set(first) == {"disk_free_bytes", "network_bytes", "memory_share"}
    assert first["network_bytes"] == 160 and first["memory_share"] == 0.75
    now[0] += 2
    pauses["rx_prio3_pause"] += 600
    (system / "proc/stat").write_text(STAT.format(50, 135))
    second = meter.host(system)
    assert second["cpu_share"] == pytest.approx(0.3)
    assert second["pfc_packets_per_s"] == 300
    now[0] += 2
    pauses["rx_prio3_pause"] = 0
    assert "pfc_packets_per_s" not in meter.host(system)


def test_a_host_without_files_has_no_values(system):
    for name in ("stat", "meminfo"):
        (system / "proc" / name).unlink()
    assert set(HostMeter(system, count=counters).host(system)) == {
        "disk_free_bytes",
        "network_bytes",
    }


def test_this_process_is_measured():
    meter = HostMeter()
    first, begin = meter.process(os.getpid()), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF)
    while time.process_time() < before.ru_utime + before.ru_stime + 0.1:
        pass
    values = meter.process(os.getpid())
    assert "cpu_cores" not in first
    least = 0.05 / (time.monotonic() - begin)  # the kernel counts in hundredths of a second
    assert least < values["cpu_cores"] < 4 * os.cpu_count()
    assert 2**22 < values["resident_bytes"] < 2**40
    assert meter.process(2**22 + 1) == {}


def test_gpus_give_what_they_have():
    first, second = HostMeter(gpus=Gpus(Nvml())).devices().values()
    assert first == {
        "gpu_duty": 0.1,
        "gpu_memory_duty": 0.5,
        "gpu_memory_bytes": 2**33,
        "gpu_power_w": 350.5,
        "gpu_celsius": 61,
        "gpu_clock_mhz": 1980,
    }
    assert second["gpu_duty"] == 0.2 and "gpu_power_w" not in second
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert Gpus.find() is None and HostMeter().devices() == {}


def test_the_counters_of_network_cards():
    """Of every card of this machine that has any: names without bytes behind them, and counts."""
    cards = {}
    for card in os.listdir("/sys/class/net"):
        try:
            cards[card] = counters(card)
        except OSError:
            continue
    assert all(name.isprintable() and name for counts in cards.values() for name in counts)
    assert all(count >= 0 for counts in cards.values() for count in counts.values())
    with pytest.raises(OSError):
        counters("no-such-card")
    assert traffic() >= 0
