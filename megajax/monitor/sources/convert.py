"""From an exporter's series to the metrics of a machine: counters to rates, devices to extremes.

METRICS is the table of what exporters call them; `canonical` applies it to samples. What the table
does not know keeps its name and is taken as a gauge. Where a machine has several series of a metric
(eight GPUs), the metric is their mean, and `<metric>_min` and `<metric>_max` are their extremes,
second by second: one dead GPU of eight moves a mean by 12 % only.

Series of one metric are told apart by labels (`DCGM_FI_DEV_GPU_UTIL{gpu="3"}`). Where most times of
a machine have several rows without labels, these are devices in the order in which they come.

Legend: N rows. A cell is a second of a machine.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.samples import Samples, index

# ---- what exporters call the metrics of a machine, and what the detector calls them
#
# The 21 metrics that Minder collects (NSDI 2025, arXiv 2411.01791, section 4.2 and its appendix;
# the first seven are those that it uses, in its order), and a few more that only name a cause. Each
# has one or more recipes, which say how to make it of the series of an exporter: NVIDIA's
# dcgm-exporter (default-counters.csv and dcp-metrics-included.csv), Prometheus' node_exporter with
# its collectors ethtool and infiniband (PFC counters as the driver mlx5 names them), and this
# project's own records (megajax/monitor/meter.py). The first recipe for which a machine has the
# series is used.
#
# Units: shares are from 0 to 1, bytes and not multiples of them, seconds, watts, degrees Celsius,
# MHz. `canonical` applies the table to samples, server.py writes it as expressions of Prometheus.


GAUGE: Literal["gauge"] = "gauge"
COUNTER: Literal["counter"] = "counter"

# Network devices that pass on what another device counts as well, and file systems in memory.
_CARDS = (
    'device!~"lo|veth.*|docker.*|br-.*|virbr.*|cni.*|flannel.*|cali.*|tap.*|tun.*|bond.*|ifb.*"'
)
_DISKS = 'fstype!~"tmpfs|ramfs|devtmpfs|overlay|squashfs|fuse.*|nsfs|iso9660"'


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make a metric of the series of an exporter.

    names: the exporter's series; their values are added up if all other labels are equal. kind: a
    counter becomes a rate a second. scale: factor from the exporter's unit to ours. only:
    conditions on labels, as in PromQL. over: how several series of a machine become one: "devices"
    gives their mean and, as separate metrics, the least and the greatest. rest_of: the value is 1 -
    names / rest_of; "1": it is 1 - names.
    """

    names: tuple[str, ...]
    kind: Literal["gauge", "counter"] = GAUGE
    scale: float = 1.0
    only: str = ""
    over: Literal["devices", "sum", "max", "mean"] = "devices"
    rest_of: str = ""

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Tells whether a series with these labels meets the conditions of `only`."""
        for label, operator, pattern in re.findall(r'(\w+)(!~|=~|!=|=)"([^"]*)"', self.only):
            same = bool(re.fullmatch(pattern, labels.get(label, "")))
            if same == (operator[0] == "!"):
                return False
        return True


def _sum(*names: str, only: str = "") -> Recipe:
    """The sum of counters over the devices of a machine."""
    return Recipe(names, COUNTER, only=only, over="sum")


def _priorities(prefix: str, suffix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{k}{suffix}" for k in range(8))


_TCP = ("node_network_receive_bytes_total", "node_network_transmit_bytes_total")
_RDMA = (
    "node_infiniband_port_data_received_bytes_total",
    "node_infiniband_port_data_transmitted_bytes_total",
)

# Metric -> recipes. The 21 that the paper collects come first, and of these the seven that it uses,
# in the order that it learnt.
METRICS: Mapping[str, tuple[Recipe, ...]] = {
    "pfc_tx_packet_rate": (
        _sum(*_priorities("node_ethtool_transmitted_prio", "_pause")),
        Recipe(("pfc_packets_per_s",), over="sum"),  # of both directions
    ),
    "cpu_usage": (
        Recipe(("node_cpu_seconds_total",), COUNTER, only='mode="idle"', over="mean", rest_of="1"),
        Recipe(("cpu_share",)),
    ),
    "gpu_duty_cycle": (Recipe(("DCGM_FI_DEV_GPU_UTIL",), scale=0.01), Recipe(("gpu_duty",))),
    "gpu_power_draw": (Recipe(("DCGM_FI_DEV_POWER_USAGE",)), Recipe(("gpu_power_w",))),
    "gpu_graphics_engine_activity": (Recipe(("DCGM_FI_PROF_GR_ENGINE_ACTIVE",)),),
    "gpu_tensor_activity": (Recipe(("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",)),),
    "nvlink_bandwidth": (
        Recipe(("DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES")),
        # default-counters.csv calls it a counter, but DCGM gives a rate in MB/s
        # (github.com/NVIDIA/dcgm-exporter/pull/658).
        Recipe(("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",), scale=1e6),
    ),
    "memory_usage": (
        Recipe(
            ("node_memory_MemAvailable_bytes",), over="sum", rest_of="node_memory_MemTotal_bytes"
        ),
        Recipe(("memory_share",)),
    ),
    "disk_usage": (
        Recipe(
            ("node_filesystem_avail_bytes",),
            only=_DISKS,
            over="max",
            rest_of="node_filesystem_size_bytes",
        ),
    ),
    "tcp_throughput": (_sum(*_TCP, only=_CARDS),),
    "tcp_rdma_throughput": (
        _sum(*_TCP, *_RDMA, only=_CARDS),
        Recipe(("network_bytes",), COUNTER, over="sum"),
    ),
    "gpu_memory_used": (
        Recipe(("DCGM_FI_DEV_FB_USED",), scale=2.0**20),
        Recipe(("gpu_memory_bytes",)),
    ),
    "gpu_temperature": (Recipe(("DCGM_FI_DEV_GPU_TEMP",)), Recipe(("gpu_celsius",))),
    "gpu_sm_activity": (Recipe(("DCGM_FI_PROF_SM_ACTIVE",)),),
    "gpu_clocks": (Recipe(("DCGM_FI_DEV_SM_CLOCK",)), Recipe(("gpu_clock_mhz",))),
    "gpu_fp_engine_activity": (Recipe(("DCGM_FI_PROF_PIPE_FP32_ACTIVE",)),),
    "gpu_memory_bandwidth_utilization": (
        Recipe(("DCGM_FI_PROF_DRAM_ACTIVE",)),
        Recipe(("DCGM_FI_DEV_MEM_COPY_UTIL",), scale=0.01),
        Recipe(("gpu_memory_duty",)),
    ),
    "pcie_bandwidth": (
        Recipe(("DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES")),
        # A rate in kB/s too, whatever its type says (github.com/NVIDIA/dcgm-exporter/issues/354).
        Recipe(("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", "DCGM_FI_DEV_PCIE_RX_THROUGHPUT"), scale=1e3),
    ),
    "pcie_usage": (),  # a share of the link's width and speed, which no exporter of these shows
    "ecn_packet_rate": (
        _sum("node_infiniband_np_ecn_marked_roce_packets_received_total"),
        _sum("node_ethtool_received_ecn_mark"),
    ),
    "cnp_packet_rate": (
        _sum(
            "node_infiniband_np_cnp_packets_sent_total",
            "node_infiniband_rp_cnp_packets_handled_total",
        ),
    ),
    # Beyond the paper's.
    "pfc_rx_packet_rate": (_sum(*_priorities("node_ethtool_received_prio", "_pause")),),
    "disk_busy": (Recipe(("node_disk_io_time_seconds_total",), COUNTER, over="max"),),
    "disk_throughput": (_sum("node_disk_read_bytes_total", "node_disk_written_bytes_total"),),
    "gpu_xid": (Recipe(("DCGM_FI_DEV_XID_ERRORS",), over="max"),),
    "pcie_replay_rate": (_sum("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),),
    "gpu_ecc_error_rate": (_sum("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),),
    "nvlink_error_rate": (
        _sum(
            "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        ),
    ),
}
MINDER = tuple(METRICS)[:7]  # (arXiv 2411.01791, section 4.4) in the order that the paper learnt
# What jobs are judged by. A GPU whose clock is held down by heat makes all machines wait; among
# Minder's seven, only its power may show it.
WATCHED = (*MINDER, "gpu_clocks", "gpu_temperature")

# How many GPUs of a machine answer in a second. A mean over the GPUs that are left looks healthy
# when one of them is off its bus. Of the first of these metrics that the machine has.
GPU_COUNT = "gpu_count"
COUNTED = ("gpu_temperature", "gpu_duty_cycle", "gpu_power_draw", "gpu_memory_used")

LEAST, GREATEST = "_min", "_max"  # of the devices of a machine, behind the metric's name


_PAIR = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')


def parse(series: str) -> tuple[str, dict[str, str]]:
    """Returns (name, labels) of a series as Prometheus writes it: name{label="value",...}.

    What does not have this form is a name without labels.
    """
    name, brace, inside = series.partition("{")
    if not brace or not inside.endswith("}"):
        return series, {}
    inside, at, labels = inside[:-1], 0, dict[str, str]()
    while at < len(inside):  # pair by pair, so that the time is that of one pass
        if (pair := _PAIR.match(inside, at)) is None:
            return (name.strip(), labels) if not inside[at:].strip() else (series, {})
        labels[pair[1]], at = pair[2], pair.end()
    return name.strip(), labels


# ---- samples under the names of the table


DEVICES = 4096  # (chosen) of a machine: more values of one time are no devices
NAMES = 4096  # (chosen) exporter's names, without their labels
GAP = 2.5  # (chosen) times the usual distance of a counter's readings: over more there is no rate


@dataclasses.dataclass
class Rows:
    """Rows of one metric. machine_N, key_N: int64; a key is a device: a number for its labels."""

    time_N: np.ndarray
    machine_N: np.ndarray
    key_N: np.ndarray
    value_N: np.ndarray

    def of(self, rows: np.ndarray) -> "Rows":
        """Returns some of the rows: a mask or places."""
        return Rows(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    @classmethod
    def join(cls, parts: Sequence["Rows"]) -> "Rows":
        """Returns the rows of all parts."""
        return cls(
            *(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls))
        )

    def sorted(self) -> "Rows":
        """Returns the rows by machine, device and time."""
        return self.of(np.lexsort((self.time_N, self.key_N, self.machine_N)))

    def devices(self) -> int:
        """Returns the number of devices of the machine that has most."""
        if not len(self.key_N):
            return 0
        keys = int(self.key_N.max()) + 1
        return int(np.bincount(np.unique(self.machine_N * keys + self.key_N) // keys).max())


def canonical(samples: Samples) -> Samples:
    """Returns the samples under the names of METRICS, all of them gauges.

    A counter that began again has no rate over that interval, nor has one over a gap. Rates stand
    at the time of the later reading. Samples that need nothing of this come back unchanged.
    """
    table = _Table(samples)
    if not table.needs_work():
        return samples
    rows_of: dict[str, list[Rows]] = {}
    used = set()
    for metric, recipes in METRICS.items():
        used |= {name for recipe in recipes for name in (*recipe.names, recipe.rest_of)}
        for suffix, rows in table.first(recipes).items():
            rows_of.setdefault(metric + suffix, []).append(rows)
    for base in dict.fromkeys(b for b, _ in table.parsed if b not in used):
        for suffix, rows in over_devices(table.rows(base)).items():
            rows_of.setdefault(base + suffix, []).append(rows)
    for metric in COUNTED:
        if metric + LEAST in rows_of:
            rows_of[GPU_COUNT] = [table.count(METRICS[metric])]
            break
    # The rows as samples of the same machines and interval.
    metrics = tuple(sorted(m for m, parts in rows_of.items() if sum(len(p.time_N) for p in parts)))
    parts = [Rows.join(rows_of[m]) for m in metrics]
    rows = Rows.join([_NONE, *parts])
    return Samples(
        rows.time_N,
        rows.machine_N,
        np.repeat(np.arange(len(metrics)), [len(p.time_N) for p in parts]),
        rows.value_N,
        samples.machines,
        metrics,
        samples.start,
        samples.end,
        (*samples.notes, *table.notes),
    )


_NONE = Rows(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


class _Table:
    """The series of samples by the exporter's name."""

    def __init__(self, samples: Samples):
        self.samples, self.notes = samples, list[str]()
        self.parsed = [parse(m) for m in samples.metrics]
        labels = [repr(sorted(labels.items())) for _, labels in self.parsed]
        self.labels, self._key_of_metric = index(labels)
        self._metrics: dict[str, list[int]] = {}  # exporter's name -> its metrics
        for k, (base, _) in enumerate(self.parsed):
            self._metrics.setdefault(base, []).append(k)
        if len(self._metrics) > NAMES:
            raise UserError(
                f"{len(self._metrics):,} names of metrics; {NAMES:,} are read at most. Is the "
                "column of metrics one of identities or times?"
            )
        self._order_N = np.argsort(samples.metric_N, kind="stable")  # the rows by metric
        self._first_C = np.searchsorted(
            samples.metric_N[self._order_N], np.arange(len(samples.metrics) + 1)
        )
        self._occurrence_N = _occurrences(samples)

    def needs_work(self) -> bool:
        """Tells whether a metric's name is in the table, has labels, or stands for several
        devices."""
        known = {n for recipes in METRICS.values() for recipe in recipes for n in recipe.names}
        return self._occurrence_N is not None or any(
            base in known or labels for base, labels in self.parsed
        )

    def rows(self, base: str, recipe: Recipe | None = None) -> Rows:
        """Returns the rows of an exporter's name that have a value and the labels of a recipe."""
        s, first_C = self.samples, self._first_C
        parts = [
            self._order_N[first_C[k] : first_C[k + 1]]
            for k in self._metrics.get(base, ())
            if recipe is None or recipe.takes(self.parsed[k][1])
        ]
        place_N = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
        place_N = place_N[np.isfinite(s.value_N[place_N]) & np.isfinite(s.time_N[place_N])]
        key_N = self._key_of_metric[s.metric_N[place_N]].astype(np.int64)
        if self._occurrence_N is not None:
            key_N += len(self.labels) * self._occurrence_N[place_N]
        machine_N = s.machine_N[place_N].astype(np.int64)
        return Rows(s.time_N[place_N], machine_N, key_N, s.value_N[place_N])

    def first(self, recipes: Iterable[Recipe]) -> dict[str, Rows]:
        """Returns {suffix of the metric: rows}, of each machine by its first recipe with rows."""
        parts: dict[str, list[Rows]] = {}
        for recipe, rows in self._each(recipes):
            reduced = (
                over_devices(rows) if recipe.over == "devices" else {"": reduce(rows, recipe.over)}
            )
            for suffix, part in reduced.items():
                parts.setdefault(suffix, []).append(part)
        return {suffix: Rows.join(p) for suffix, p in parts.items()}

    def count(self, recipes: Iterable[Recipe]) -> Rows:
        """Returns how many devices of each machine have the metric in each cell."""
        return Rows.join([reduce(rows, "count") for _, rows in self._each(recipes)])

    def _each(self, recipes: Iterable[Recipe]) -> Iterable[tuple[Recipe, Rows]]:
        """Yields each recipe with the rows of the machines for which no earlier one has rows."""
        had = np.empty(0, np.int64)
        for recipe in recipes:
            rows = self._by(recipe)
            rows = rows.of(~np.isin(rows.machine_N, had))
            if len(rows.time_N):
                had = np.union1d(had, rows.machine_N)
                yield recipe, rows

    def _by(self, recipe: Recipe) -> Rows:
        """Returns a recipe's value of every device."""
        parts = [self.rows(name, recipe) for name in recipe.names]
        if recipe.kind == COUNTER:
            parts = [self._rates(p, name) for p, name in zip(parts, recipe.names, strict=True)]
        parts = [p for p in parts if len(p.time_N)]
        if not parts:
            return _NONE
        rows = parts[0] if len(parts) == 1 else _added(parts)
        rows.value_N = rows.value_N * recipe.scale
        if recipe.rest_of == "1":
            rows.value_N = 1 - rows.value_N
        elif recipe.rest_of:
            rows = _complement(rows, self.rows(recipe.rest_of, recipe))
        return rows

    def _rates(self, rows: Rows, name: str) -> Rows:
        """Returns how fast each counter grows, at the later of two readings."""
        rows = rows.sorted()
        same = (np.diff(rows.machine_N) == 0) & (np.diff(rows.key_N) == 0)
        seconds, grown = np.diff(rows.time_N), np.diff(rows.value_N)
        same &= seconds > 0
        if not same.any():
            return _NONE
        if (again := same & (grown < 0)).any():
            machines = [self.samples.machines[k] for k in np.unique(rows.machine_N[1:][again])]
            more = f" and {len(machines) - 3} more" if len(machines) > 3 else ""
            self.notes.append(
                f"{name} began again {np.count_nonzero(again)} times "
                f"({', '.join(machines[:3])}{more}); these intervals have no rate"
            )
        good = same & (grown >= 0) & (seconds <= GAP * np.median(seconds[same]))
        later = rows.of(np.flatnonzero(good) + 1)
        later.value_N = grown[good] / seconds[good]
        return later


def _occurrences(samples: Samples) -> np.ndarray | None:
    """Returns which of the rows of one time, machine and metric each row is, None if that is 0.

    Rows that repeat at few times are no devices: their mean counts.
    """
    near = (np.diff(samples.time_N) == 0) & (np.diff(samples.machine_N) == 0)
    if not (near & (np.diff(samples.metric_N) == 0)).any():  # devices stand beside each other
        return None
    order = np.lexsort((samples.time_N, samples.machine_N, samples.metric_N))
    columns = [c[order] for c in (samples.time_N, samples.machine_N, samples.metric_N)]
    begins = np.ones(len(order), bool)
    begins[1:] = np.any([np.diff(c) != 0 for c in columns], axis=0)
    first = np.flatnonzero(begins)
    size = np.diff(first, append=len(order))
    if size.max() > DEVICES:
        at = int(size.argmax())
        time, machine, metric = (column[first[at]] for column in columns)
        raise UserError(
            f"{samples.machines[machine]} has {size[at]:,} values of {samples.metrics[metric]} at "
            f"{time:.0f} (Unix seconds); {DEVICES:,} devices are read at most"
        )
    place = np.arange(len(order)) - np.repeat(first, size)
    metric_N = columns[2]
    times = np.bincount(metric_N, begins, len(samples.metrics))
    doubled = np.bincount(metric_N, place == 1, len(samples.metrics))
    place[(2 * doubled < times)[metric_N]] = 0
    occurrence_N = np.empty(len(order), np.int64)
    occurrence_N[order] = place
    return occurrence_N if occurrence_N.any() else None


def over_devices(rows: Rows) -> dict[str, Rows]:
    """Returns {"": mean, "_min": least, "_max": greatest} of the devices of each cell.

    Where no machine has two devices in one cell: {"": the rows}.
    """
    if rows.devices() <= 1 or reduce(rows, "count").value_N.max() <= 1:
        return {"": rows}
    hows = {"": "mean", LEAST: "min", GREATEST: "max"}
    return {suffix: reduce(rows, how) for suffix, how in hows.items()}


def reduce(rows: Rows, how: str, by_device: bool = False) -> Rows:
    """Returns one row a cell, or a cell and device: the mean, min, max, sum or count of its rows.

    Several rows of one device in a cell are their mean first, but for by_device.
    """
    if not len(rows.time_N):
        return rows
    if not by_device:
        if rows.devices() <= 1 and how != "count":
            return rows
        rows = reduce(rows, "mean", by_device=True)
    cell_N = np.floor(rows.time_N)
    keys = rows.key_N if by_device else np.zeros_like(rows.key_N)
    order = np.lexsort((cell_N, keys, rows.machine_N))
    columns = [c[order] for c in (cell_N, keys, rows.machine_N)]
    begins = np.ones(len(order), bool)
    begins[1:] = np.any([np.diff(c) != 0 for c in columns], axis=0)
    first = np.flatnonzero(begins)
    size = np.diff(first, append=len(order))
    value_N = rows.value_N[order]
    match how:
        case "count":
            reduced_N = size.astype(np.float64)
        case "min" | "max":
            reduced_N = (np.minimum if how == "min" else np.maximum).reduceat(value_N, first)
        case _:
            reduced_N = np.add.reduceat(value_N, first) / (size if how == "mean" else 1)
    cell_N, keys, machine_N = (c[first] for c in columns)
    return Rows(cell_N, machine_N, keys, reduced_N)


def _added(parts: Sequence[Rows]) -> Rows:
    """Returns the sums over parts, of each device and cell where all the parts that it has are."""
    means = [reduce(p, "mean", by_device=True) for p in parts]
    rows = Rows.join(means)
    total = reduce(rows, "sum", by_device=True)
    count = reduce(rows, "count", by_device=True).value_N
    pair_N = total.machine_N * (total.key_N.max() + 1) + total.key_N
    _, device_N = np.unique(pair_N, return_inverse=True)
    most = np.zeros(device_N.max() + 1)
    np.maximum.at(most, device_N, count)
    return total.of(count == most[device_N])


def _complement(part: Rows, total: Rows) -> Rows:
    """Returns 1 - part / total, of each device and cell that has both."""
    part, total = (reduce(r, "mean", by_device=True) for r in (part, total))
    both = Rows.join([part, total])
    side_N = np.repeat([0, 1], [len(part.time_N), len(total.time_N)])
    order = np.lexsort((side_N, both.time_N, both.key_N, both.machine_N))
    both = both.of(order)
    columns = (both.time_N, both.key_N, both.machine_N)
    pairs = np.flatnonzero(np.all([np.diff(c) == 0 for c in columns], axis=0))
    shares, total_N = both.of(pairs), both.value_N[pairs + 1]
    shares.value_N = 1 - shares.value_N / np.where(total_N == 0, np.nan, total_N)
    return shares
