"""Exporters' series to the metrics of machines, beside plain loops over small sets of rows."""

import itertools
import math
import statistics

import numpy as np
import pytest

from megajax.monitor import sources
from megajax.monitor.records import Record
from megajax.monitor.samples import Samples, to_grid
from megajax.monitor.sources import canonical, convert

T0 = 1_700_000_000


def series(samples, metric, machine="a"):
    """{second: value} of a metric of a machine; two rows of one second would be an error."""
    rows = [(math.floor(t), v) for t, m, c, v in samples.rows() if (m, c) == (machine, metric)]
    assert len(dict(rows)) == len(rows)
    return dict(sorted(rows))


def rates(readings):
    """{second: rate} of (time, count): none over a count that falls, none over a gap."""
    pairs = list(itertools.pairwise(sorted(readings)))
    usual = statistics.median(b[0] - a[0] for a, b in pairs)
    return {
        math.floor(b[0]): (b[1] - a[1]) / (b[0] - a[0])
        for a, b in pairs
        if b[1] >= a[1] and b[0] - a[0] <= 2.5 * usual
    }


def test_eight_gpus_are_their_mean_and_extremes_and_are_counted(seed):
    rng = np.random.default_rng(seed)
    name = "DCGM_FI_DEV_GPU_UTIL"
    value = {
        (m, t, g): float(rng.uniform(0, 100))
        for m in "ab"
        for t in range(20)
        for g in range(8)
        if not (m == "b" and g == 3 and t >= 10)  # its bus has lost it
    }
    rows = [
        (T0 + t + 0.3, m, f'{name}{{gpu="{g}",UUID="x{g}"}}', v) for (m, t, g), v in value.items()
    ]
    rng.shuffle(rows)
    samples = canonical(Samples.of((float(t), str(m), str(c), float(v)) for t, m, c, v in rows))
    assert samples.metrics == (
        "gpu_count",
        "gpu_duty_cycle",
        "gpu_duty_cycle_max",
        "gpu_duty_cycle_min",
    )
    for m in "ab":
        for suffix, of in (("", statistics.fmean), ("_min", min), ("_max", max)):
            expected = {
                T0 + t: of([v for (n, u, _), v in value.items() if (n, u) == (m, t)]) / 100
                for t in range(20)
            }
            assert series(samples, "gpu_duty_cycle" + suffix, m) == pytest.approx(expected)
    counted = series(samples, "gpu_count", "b")
    assert list(counted.values()) == [8.0] * 10 + [7.0] * 10
    assert set(series(samples, "gpu_count").values()) == {8.0}


@pytest.mark.parametrize("period", [1, 15])
def test_counters_are_rates_without_resets_and_gaps(period, seed):
    rng = np.random.default_rng(seed)
    name = "node_disk_io_time_seconds_total"
    readings, count = [], 5e6
    for k in range(40):
        count = 0.0 if k == 17 else count + rng.uniform(0, 1)
        if not 25 < k < 30:  # nobody was heard for four periods
            readings.append((T0 + k * period + rng.uniform(0, 0.4), count))
    rows = [(t, "a", name, v) for t, v in readings] + [(T0, "b", name, 1.0)]
    samples = canonical(Samples.of(rows))
    expected = rates(readings)
    assert series(samples, "disk_busy") == pytest.approx(expected)
    seconds = [math.floor(readings[k][0]) for k in (17, 26)]
    assert len(expected) == len(readings) - 3 and not set(seconds) & set(expected)
    assert "began again 1 times (a)" in samples.notes[0] and samples.machines == ("a", "b")


def test_busy_shares_of_processors_memory_and_the_fullest_disk():
    rows = []
    for t in range(5):
        for cpu, idle in enumerate((0.9, 0.2)):
            label = f'cpu="{cpu}"'
            rows.append((T0 + t, f'node_cpu_seconds_total{{{label},mode="idle"}}', idle * t))
            rows.append((T0 + t, f'node_cpu_seconds_total{{{label},mode="user"}}', 7.0 * t))
        rows.append((T0 + t, "node_memory_MemAvailable_bytes", 25e9 + t))
        rows.append((T0 + t, "node_memory_MemTotal_bytes", 100e9))
        for mount, kind, free in (("/", "ext4", 40), ("/b", "xfs", 30), ("/run", "tmpfs", 1)):
            label = f'fstype="{kind}",mountpoint="{mount}"'
            rows.append((T0 + t, f"node_filesystem_avail_bytes{{{label}}}", free))
            rows.append((T0 + t, f"node_filesystem_size_bytes{{{label}}}", 100))
    samples = canonical(Samples.of((float(t), "a", m, float(v)) for t, m, v in rows))
    assert samples.metrics == ("cpu_usage", "disk_usage", "memory_usage")
    assert list(series(samples, "cpu_usage").values()) == pytest.approx([1 - 1.1 / 2] * 4)
    assert list(series(samples, "memory_usage").values()) == pytest.approx([0.75] * 5)
    assert list(series(samples, "disk_usage").values()) == pytest.approx([0.7] * 5)


def test_network_counters_are_summed_over_cards_but_not_over_what_passes_on():
    speed = {
        'node_network_receive_bytes_total{device="eth0"}': 3.0,
        'node_network_transmit_bytes_total{device="eth0"}': 5.0,
        'node_network_receive_bytes_total{device="lo"}': 1e9,
        'node_network_transmit_bytes_total{device="veth12"}': 1e9,
        'node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"}': 100.0,
        'node_infiniband_port_data_transmitted_bytes_total{device="mlx5_0",port="1"}': 200.0,
        'node_ethtool_transmitted_prio3_pause{device="eth0"}': 7.0,
        'node_ethtool_transmitted_prio0_pause{device="eth1"}': 4.0,
        'node_ethtool_received_prio0_pause{device="eth0"}': 9.0,
        'DCGM_FI_PROF_NVLINK_TX_BYTES{gpu="0"}': 0.0,
    }
    rows = [(T0 + float(t), "a", m, 1e12 + t * s) for t in range(6) for m, s in speed.items()]
    samples = canonical(Samples.of(rows))
    expected = {
        "tcp_throughput": 8.0,
        "tcp_rdma_throughput": 308.0,
        "pfc_tx_packet_rate": 11.0,
        "pfc_rx_packet_rate": 9.0,
        "nvlink_bandwidth": 1e12,
    }
    assert set(samples.metrics) == set(expected)
    for metric, rate in expected.items():
        assert set(series(samples, metric).values()) == {rate}, metric


def test_of_two_directions_both_are_needed_and_of_two_names_the_first_counts():
    tx, rx = "DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES"
    old = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"
    rows = [
        (T0 + t, m, f'{n}{{gpu="0"}}', 10.0 * k + t)
        for m in "ab"
        for t in range(4)
        for k, n in enumerate((tx, rx, old))
        if not (m == "b" and n != old) and not (n == rx and t == 2)
    ]
    samples = canonical(Samples.of((float(t), m, c, v) for t, m, c, v in rows))
    assert series(samples, "nvlink_bandwidth") == {T0: 10.0, T0 + 1: 12.0, T0 + 3: 16.0}
    assert series(samples, "nvlink_bandwidth", "b") == {T0 + t: (20.0 + t) * 1e6 for t in range(4)}


def test_rows_without_labels_are_devices_where_most_times_have_several():
    rows = [
        (T0 + float(t), "a", "DCGM_FI_DEV_POWER_USAGE", 100.0 + g)
        for t in range(3)
        for g in range(8)
    ]
    samples = canonical(Samples.of(rows))
    assert series(samples, "gpu_power_draw_max") == {T0 + t: 107.0 for t in range(3)}
    assert series(samples, "gpu_count") == {T0 + t: 8.0 for t in range(3)}
    once = [(T0 + float(t), "a", "heat", 1.0) for t in range(9)] + [(T0 + 8.0, "a", "heat", 3.0)]
    samples = canonical(Samples.of(once))
    assert samples.metrics == ("heat",) and to_grid(samples).values_CNT[0, 0, 8] == 2.0


def test_names_of_no_table_stay_as_they_are():
    samples = Samples.of([(T0, "a", "gpu_duty_cycle", 0.5), (T0, "a", "my metric", math.nan)])
    assert canonical(samples) is samples
    labelled = Samples.of([(T0, "a", f'mine{{rank="{k}"}}', float(k)) for k in range(3)])
    means = canonical(labelled)
    assert {m: series(means, m)[T0] for m in means.metrics} == {
        "mine": 1.0,
        "mine_min": 0.0,
        "mine_max": 2.0,
    }
    assert canonical(Samples.of([])).metrics == ()


def test_values_that_are_none_are_in_no_mean():
    rows = [
        (T0, "a", f'DCGM_FI_DEV_GPU_TEMP{{gpu="{g}"}}', v)
        for g, v in enumerate((40.0, math.nan, 50.0, math.inf))
    ]
    samples = canonical(Samples.of(rows))
    assert series(samples, "gpu_temperature") == {T0: 45.0}
    assert series(samples, "gpu_count") == {T0: 2}


def test_the_table_has_the_papers_metrics_and_no_name_twice():
    assert convert.MINDER[0] == "pfc_tx_packet_rate"
    assert list(convert.METRICS)[20] == "cnp_packet_rate"  # the last of the paper's 21
    for recipes in convert.METRICS.values():
        listed = [n for recipe in recipes for n in recipe.names]
        assert len(listed) == len(set(listed))
    assert convert.parse('a{b="c\\"d",e="f"}') == ("a", {"b": 'c\\"d', "e": "f"})
    assert convert.parse("a {odd") == ("a {odd", {})


def test_records_of_a_run_are_samples_of_its_hosts():
    host = {"cpu_share": 0.25, "memory_share": 0.5, "network_bytes": 1e9, "note": "text"}
    records = [
        Record(T0 + k, "h", None, None, None, n, v if n != "network_bytes" else v + 8 * k)
        for k in range(3)
        for n, v in host.items()
    ]
    records += [
        Record(T0 + k, "h", None, g, None, "gpu_duty", g / 10) for k in range(3) for g in range(2)
    ]
    records += [Record(T0 + k, "h", r, None, 5, "loss", 2.0 + r) for k in range(3) for r in (0, 1)]
    samples = sources.from_records(records, {"h": 100.0})
    start = T0 - 100
    expected = {
        "cpu_usage": 0.25,
        "memory_usage": 0.5,
        "tcp_rdma_throughput": 8.0,
        "loss": 2.5,
        "loss_min": 2.0,
        "loss_max": 3.0,
        "gpu_duty_cycle": 0.05,
        "gpu_duty_cycle_min": 0.0,
        "gpu_duty_cycle_max": 0.1,
        "gpu_count": 2.0,
    }
    assert set(samples.metrics) == set(expected)
    for metric, value in expected.items():
        seconds = range(metric == "tcp_rdma_throughput", 3)
        assert series(samples, metric, "h") == pytest.approx({start + k: value for k in seconds})
