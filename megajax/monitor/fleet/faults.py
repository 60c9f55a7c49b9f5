"""The tables of metrics and fault types, and Fault: one fault of one machine, as it is drawn.

METRICS says how a healthy machine's readings follow its work; KINDS, how a fault moves them, from
its onset to the halt of the job.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.monitor.fleet.roles import Layout
from megajax.monitor.sources.convert import MINDER

# ---- metrics
#
# The 21 metrics of Minder (section 4.1) and how a healthy machine's readings follow its work.
#
# A reading is `base` plus the levels times what the machine does in that second (DRIVERS), in the
# unit of the metric; for packet rates all of this is the logarithm of packets per second. The order
# of METRICS begins with the seven that Minder uses, in the order of priority that it learned.
#
# Every number here is ASSUMED: chosen to look like a host with 8 GPUs of 700 W and 400 Gbit/s of
# RDMA a GPU, since no public trace of such a job exists. Noise is given in shares of the metric's
# span, the difference between a working and an idle machine; a fifth of it is there on an idle
# machine, the rest grows with what the machine does (packet rates: all of it is always there, as a
# factor). CPU: the threads that wait for a collective poll, so that a job that hangs is not idle.


# What a machine does, each 0..1: computes; sends gradients; waits inside a collective (the kernel
# spins); loads data; writes a checkpoint; starts processes; has a process at all; writes the log;
# waits for a slow disk.
DRIVERS = ("compute", "exchange", "wait", "load", "write", "init", "alive", "log", "disk")

# The second in which a machine of the middle of the pipeline works: what "nominal" means.
TYPICAL = {"compute": 0.75, "exchange": 0.15, "wait": 0.1, "load": 1.0, "alive": 1.0}


@dataclass(frozen=True)
class Spec:
    """One metric of a host.

    All values are in `unit`; if `log`, base, levels, surge, low and high are natural logarithms of
    values in it, and the noise is added to the logarithm.

    base: the reading of an idle machine. levels: {activity (DRIVERS): what is added to the base by
    the activity at intensity 1}. surge: the value to which a move with the target "high" leads.
    low, high: the limits of a reading. white, slow, offset: standard deviations, in shares of the
    span, of the noise of each second, of the noise with a correlation time of 5 s to 15 min, and of
    the constant differences between machines. quantum: readings are multiples of it; 0: they
    are not rounded. counter: the exporter shows a counter, so that a restart of the exporter spoils
    a second.
    """

    name: str
    unit: str
    base: float
    levels: dict[str, float] = field(hash=False)
    surge: float
    low: float = 0.0
    high: float = float("inf")
    white: float = 0.03
    slow: float = 0.03
    offset: float = 0.03
    quantum: float = 0.0
    counter: bool = False
    log: bool = False

    @cached_property
    def nominal(self) -> float:
        """The reading of a machine at work, without noise (its logarithm where `log`)."""
        return self.base + sum(self.levels.get(k, 0) * v for k, v in TYPICAL.items())

    @cached_property
    def span(self) -> float:
        """Difference between a working and an idle machine, at least 1e-3."""
        return max(abs(self.nominal - self.base), 1e-3)


def _percent(
    name: str, base: float, surge: float, quantum: float = 1.0, noise=(), **levels
) -> Spec:
    white, slow, offset = noise or (0.03, 0.03, 0.03)
    return Spec(name, "%", base, levels, surge, 0, 100, white, slow, offset, quantum)


def _share(name: str, surge: float, noise=(), **levels) -> Spec:
    white, slow, offset = noise or (0.04, 0.04, 0.03)
    return Spec(name, "1", 0.0, levels, surge, 0, 1, white, slow, offset, 0.001)


def _bytes(name: str, base: float, surge: float, noise=(), **levels) -> Spec:
    white, slow, offset = noise or (0.06, 0.05, 0.03)
    return Spec(name, "B/s", base, levels, surge, 0, surge, white, slow, offset, 0, counter=True)


def _packets(name: str, base: float, surge: float, noise=(), **levels) -> Spec:
    """Bursts make most of it: a standard deviation of a factor of 2 within a machine."""
    white, slow, offset = noise or (0.20, 0.20, 0.12)
    return Spec(
        name, "1/s", base, levels, surge, -3, 13, white, slow, offset, 1, counter=True, log=True
    )


_LIST = (
    # A pause every few seconds in healthy training; 40,000 a second in a surge (e^10.6).
    _packets("pfc_tx_packet_rate", 0.0, 10.6, exchange=2.0, compute=1.5, wait=1.0, alive=1.2),
    _percent("cpu_usage", 4, 92, noise=(0.07, 0.07, 0.08),
             compute=6, exchange=8, wait=12, load=6, write=12, init=35, alive=3, log=3, disk=6),
    _percent("gpu_duty_cycle", 0, 100, noise=(0.012, 0.012, 0.008),
             compute=98, exchange=97, wait=92, init=4),
    Spec("gpu_power_draw", "W", 95, {"compute": 480, "exchange": 190, "wait": 130, "alive": 25},
         690, 60, 700, 0.025, 0.03, 0.03, 0.1),
    _share("gpu_graphics_engine_activity", 1.0, noise=(0.025, 0.03, 0.02),
           compute=0.96, exchange=0.90, wait=0.80),
    _share("gpu_tensor_activity", 0.8, compute=0.50, exchange=0.01),
    _bytes("nvlink_bandwidth", 0, 4.0e11, compute=1.4e11, exchange=6e10),
    # The other fourteen.
    _percent("memory_usage", 9, 97, 0.1, noise=(0.004, 0.03, 0.04), alive=38, load=4, write=6),
    _percent("disk_usage", 1, 99, noise=(0.10, 0.10, 0.08), load=5, write=55, log=4, disk=60),
    _bytes("tcp_throughput", 2e6, 3e9, noise=(0.15, 0.12, 0.08), load=8e7, write=6e8, log=2e6),
    _bytes("tcp_rdma_throughput", 2e6, 4e10, exchange=3.0e10, compute=4e9, load=8e7, write=6e8),
    Spec("gpu_memory_used", "B", 1e9, {"alive": 6.6e10}, 8.0e10, 0, 8.0e10,
         0.002, 0.004, 0.02, 1e6),
    Spec("gpu_temperature", "C", 31, {"alive": 18, "compute": 10}, 90, 20, 95, 0.01, 0.05, 0.06, 1),
    _share("gpu_sm_activity", 1.0, compute=0.80, exchange=0.25, wait=0.15),
    Spec("gpu_clocks", "MHz", 345, {"alive": 1500, "compute": -60}, 1980, 210, 1980,
         0.01, 0.01, 0.006, 15),
    _share("gpu_fp_engine_activity", 0.6, compute=0.14, exchange=0.02),
    _share("gpu_memory_bandwidth_utilization", 1.0, compute=0.38, exchange=0.20, wait=0.02),
    _bytes("pcie_bandwidth", 1e7, 6e10, load=1.2e9, exchange=9e9, compute=1e9, write=5e9),
    _percent("pcie_usage", 0, 100, load=2, exchange=16, compute=2, write=9),
    _packets("ecn_packet_rate", 0.5, 12.0, exchange=3.5, compute=2.0, wait=1.0),
    _packets("cnp_packet_rate", 0.3, 11.5, exchange=3.2, compute=1.8, wait=1.0),
)  # fmt: skip

METRICS: dict[str, Spec] = {spec.name: spec for spec in _LIST}
NUMBERS: dict[str, int] = {name: number for number, name in enumerate(METRICS)}


# ---- anything that is not the undisturbed step: jitters, phases of the job, faults
#
# A Move leads the readings of a metric from their healthy value towards a target. A fault and a
# harmless jitter are made of the same moves, of the same sizes: only how long they last, and on how
# many machines, tells them apart. Legend: R rows (machines), T seconds.


Target = Literal["idle", "zero", "high", "nominal", "gone"]
Shape = Literal["step", "ramp", "oscillation", "flapping"]
# What the whole job does meanwhile. write: a checkpoint that stops the GPUs; write_behind: one that
# does not; starve: the GPUs wait for data; disk: slow storage; workload: other batches.
State = Literal["", "write", "write_behind", "evaluate", "restart", "starve", "disk", "workload"]


class Move(NamedTuple):
    """How one metric moves. metric: its name; "*": all metrics.

    target: where the metric goes: idle: its value without a process; zero; high: the metric's
    surge; nominal: its value at full speed, without noise (a flat line at size 1); gone: no
    samples. size: 0..1, how far it goes towards the target. seconds: length of a ramp, or period of
    an oscillation or of flapping. delay_s: seconds after the start of the fault.
    """

    metric: str
    target: Target
    size: float = 1.0
    shape: Shape = "step"
    seconds: float = 60.0
    delay_s: float = 0.0

    def scaled(self, share: float, delay_s: float) -> "Move":
        """Returns a weaker and later copy, for a peer."""
        return self._replace(size=self.size * share, delay_s=self.delay_s + delay_s)

    def weight(self, since_RT: np.ndarray) -> np.ndarray:
        """Returns the share of the way, float32 (R, T), `since_RT` seconds after the start."""
        since_RT = since_RT - self.delay_s
        if self.shape == "ramp":
            envelope = np.clip(since_RT / self.seconds, 0, 1)
        elif self.shape == "oscillation":  # never quite back: 0.2 .. 1
            envelope = 0.6 - 0.4 * np.cos(2 * np.pi * since_RT / self.seconds)
        elif self.shape == "flapping":  # on for 0.7 of the period
            envelope = np.where(since_RT % self.seconds < 0.7 * self.seconds, 1.0, 0.0)
        else:
            envelope = np.ones_like(since_RT)
        return np.where(since_RT >= 0, self.size * envelope, 0).astype(np.float32)

    def level(self, spec: Spec) -> float:
        """Returns the value towards which the move leads a metric, in the metric's unit; if
        spec.log, the natural logarithm of that value. NaN for the target 'gone'."""
        zero = spec.low if spec.log else 0.0
        levels = {"idle": spec.base, "zero": zero, "high": spec.surge, "nominal": spec.nominal}
        return levels.get(self.target, np.nan)


@dataclass(frozen=True)
class Disturbance:
    """Something that happens in [start, end), Unix seconds.

    machines: numbers of those that show the moves; empty: all. speed: 0..1, of the whole job, since
    all machines wait for the slowest. ramp_s: the speed falls over so many seconds.
    """

    kind: str
    start: float
    end: float
    machines: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    speed: float = 1.0
    ramp_s: float = 0.0
    state: State = ""

    def __post_init__(self):
        if not self.start <= self.end:
            raise UserError(f"{self.kind}: end={self.end} must not be before start={self.start}")
        if not 0 <= self.speed <= 1:
            nearest = min(max(self.speed, 0), 1)
            raise UserError(f"{self.kind}: speed={self.speed} must be in 0..1; nearest: {nearest}")
        unknown = [m.metric for m in self.moves if m.metric != "*" and m.metric not in METRICS]
        if unknown:
            raise UserError(f"{self.kind}: unknown metrics {unknown}; known: {sorted(METRICS)}")

    @property
    def changes_the_job(self) -> bool:
        """Whether machines that it does not name notice it."""
        return self.speed < 1 or bool(self.state)


# ---- the fault types of Minder with their shares, and an assumed signature for each
#
# From the paper: the names, the shares (Table 1, 7 months; the evaluation set of 150 faults), that
# a fault type moves a metric only in some of its cases (an OR), that PCIe downgrading shows in PFC
# packets, that GPU execution errors and PCIe downgrading spread to a group within seconds, that an
# optical cable (AOC) has no counters of its own, and that most abnormal patterns last for more than
# 5 minutes before the job halts.
#
# ASSUMED is everything else: the probability with which a group of metrics moves, how far, in which
# shape, how the job slows. The paper's own table of probabilities was not available to us. Sizes
# are drawn log-uniformly, so that the weak end of each range lies near the noise between machines.


GROUPS: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu_usage",),
    "gpu": (
        "gpu_duty_cycle",
        "gpu_power_draw",
        "gpu_graphics_engine_activity",
        "gpu_tensor_activity",
        "gpu_sm_activity",
        "gpu_fp_engine_activity",
        "gpu_memory_bandwidth_utilization",
    ),
    "clock": ("gpu_power_draw", "gpu_clocks"),
    "heat": ("gpu_temperature",),
    "pfc": ("pfc_tx_packet_rate", "ecn_packet_rate", "cnp_packet_rate"),
    "nvlink": ("nvlink_bandwidth",),
    "network": ("tcp_rdma_throughput", "pcie_bandwidth", "pcie_usage"),
    "tcp": ("tcp_throughput",),
    "disk": ("disk_usage",),
    "memory": ("memory_usage", "gpu_memory_used"),
}


class Effect(NamedTuple):
    """What a group of metrics does. low, high: range of the sizes (see disturbances.Move)."""

    group: str
    probability: float
    target: Target
    low: float
    high: float


@dataclass(frozen=True)
class Kind:
    """A fault type. table, evaluation: its shares in Table 1 and in the evaluation set, in percent.

    hangs: probability that the whole job stops at once, with all GPUs waiting; slows: that it goes
    on at a speed drawn from `speed`. spreads: probability that peers show the same, weaker: by a
    share drawn from `spread`. creeps: probability of a gradual onset. sole: effects that always
    come, of which the first is what the fault type is known by.
    """

    table: float
    evaluation: float
    effects: tuple[Effect, ...]
    hangs: float = 0.0
    slows: float = 0.5
    speed: tuple[float, float] = (0.5, 0.95)
    spreads: float = 0.3
    spread: tuple[float, float] = (0.1, 0.5)
    creeps: float = 0.2
    vanishes: float = 0.0


KINDS: dict[str, Kind] = {
    # A correctable storm or a page retirement: the process crawls, or dies and leaves memory.
    "ecc_error": Kind(
        38.9,
        25.7,
        (
            Effect("cpu", 0.75, "idle", 0.25, 1.0),
            Effect("gpu", 0.66, "idle", 0.12, 1.0),
            Effect("pfc", 0.10, "high", 0.2, 0.7),
            Effect("nvlink", 0.4, "idle", 0.15, 1.0),
            Effect("memory", 0.5, "idle", 0.2, 0.9),
            Effect("tcp", 0.2, "idle", 0.2, 0.8),
        ),
        hangs=0.35,
        slows=0.4,
    ),
    "cuda_execution_error": Kind(
        14.6,
        15.0,
        (
            Effect("cpu", 0.65, "idle", 0.3, 1.0),
            Effect("gpu", 0.70, "idle", 0.15, 1.0),
            Effect("nvlink", 0.5, "idle", 0.2, 1.0),
            Effect("memory", 0.4, "idle", 0.2, 0.9),
        ),
        hangs=0.5,
        slows=0.3,
    ),
    # Several GPUs of the host at once, and the group around it within seconds.
    "gpu_execution_error": Kind(
        7.7,
        10.0,
        (
            Effect("gpu", 0.75, "idle", 0.12, 0.8),
            Effect("cpu", 0.45, "idle", 0.25, 0.9),
            Effect("nvlink", 0.35, "idle", 0.15, 0.8),
        ),
        hangs=0.4,
        slows=0.4,
        spreads=0.8,
        spread=(0.3, 0.8),
    ),
    # The link halves; the buffers of the card fill; it sends pauses; so do its neighbours.
    "pcie_downgrading": Kind(
        6.6,
        8.6,
        (
            Effect("pfc", 1.0, "high", 0.35, 0.9),
            Effect("network", 0.8, "idle", 0.1, 0.5),
            Effect("gpu", 0.15, "idle", 0.1, 0.4),
            Effect("nvlink", 0.2, "idle", 0.1, 0.4),
        ),
        slows=0.95,
        speed=(0.3, 0.9),
        spreads=0.85,
        spread=(0.3, 0.8),
        creeps=0.1,
    ),
    "machine_unreachable": Kind(
        6.0,
        7.6,
        (
            Effect("cpu", 0.5, "idle", 0.5, 1.0),
            Effect("gpu", 0.5, "zero", 0.3, 1.0),
            Effect("network", 0.7, "zero", 0.8, 1.0),
            Effect("tcp", 0.8, "zero", 0.8, 1.0),
            Effect("pfc", 0.3, "zero", 0.6, 1.0),
        ),
        hangs=0.9,
        slows=0.1,
        creeps=0.0,
        vanishes=0.6,
    ),
    "nic_dropout": Kind(
        5.7,
        7.2,
        (
            Effect("network", 1.0, "zero", 0.1, 1.0),
            Effect("cpu", 0.8, "idle", 0.3, 1.0),
            Effect("gpu", 0.7, "idle", 0.15, 1.0),
            Effect("pfc", 0.6, "zero", 0.5, 1.0),
        ),
        hangs=0.7,
        slows=0.3,
        creeps=0.05,
    ),
    # Retries against a storage system: threads burn CPU or sleep; the GPUs of the host starve.
    "hdfs_error": Kind(
        5.7,
        7.2,
        (
            Effect("cpu", 0.75, "high", 0.12, 0.7),
            Effect("tcp", 0.9, "zero", 0.4, 1.0),
            Effect("disk", 0.3, "high", 0.2, 0.8),
            Effect("gpu", 0.35, "idle", 0.12, 0.6),
        ),
        hangs=0.3,
        slows=0.4,
        creeps=0.3,
    ),
    # One GPU of eight is gone: the host's mean falls by an eighth, or its series end.
    "gpu_card_drop": Kind(
        2.0,
        2.5,
        (
            Effect("gpu", 0.9, "zero", 0.125, 0.5),
            Effect("cpu", 0.7, "idle", 0.25, 1.0),
            Effect("nvlink", 0.5, "zero", 0.125, 1.0),
        ),
        hangs=0.7,
        slows=0.2,
        creeps=0.0,
        vanishes=0.5,
    ),
    "nvlink_error": Kind(
        1.7,
        2.1,
        (
            Effect("nvlink", 0.9, "zero", 0.15, 1.0),
            Effect("gpu", 0.6, "idle", 0.1, 0.7),
            Effect("cpu", 0.4, "idle", 0.2, 0.8),
        ),
        hangs=0.4,
        slows=0.5,
    ),
    # Weak: only its consequences are seen.
    "aoc_error": Kind(
        0.9,
        1.2,
        (
            Effect("pfc", 0.8, "high", 0.25, 0.6),
            Effect("network", 0.5, "idle", 0.1, 0.4),
            Effect("nvlink", 0.2, "idle", 0.2, 0.4),
        ),
        slows=0.8,
        speed=(0.7, 0.98),
        spreads=0.5,
        spread=(0.3, 0.7),
        creeps=0.1,
    ),
    # The paper's "others", divided by us.
    "fail_slow": Kind(  # power or heat holds the clocks down: all wait for this machine
        5.0,
        6.3,
        (Effect("clock", 1.0, "idle", 0.12, 0.6), Effect("heat", 0.7, "high", 0.2, 0.8)),
        slows=1.0,
        speed=(0.4, 0.92),
        spreads=0.0,
        creeps=0.6,
    ),
    "cpu_contention": Kind(
        3.2,
        4.0,
        (Effect("cpu", 1.0, "high", 0.12, 0.9), Effect("gpu", 0.3, "idle", 0.08, 0.4)),
        slows=0.6,
        creeps=0.3,
        spreads=0.1,
    ),
    "memory_leak": Kind(
        2.0,
        2.6,
        (Effect("memory", 1.0, "high", 0.3, 1.0), Effect("cpu", 0.8, "high", 0.12, 0.6)),
        slows=0.4,
        creeps=0.9,
        spreads=0.0,
    ),
}


# Mixes of fault types, as weights. The shares of the evaluation set are known for four types; the
# rest is divided as in Table 1. The last three are for held-out cases: ASSUMED.
MIXES: dict[str, dict[str, float]] = {
    "table": {name: kind.table for name, kind in KINDS.items()},
    "evaluation": {name: kind.evaluation for name, kind in KINDS.items()},
    "even": dict.fromkeys(KINDS, 1.0),
    "weak": {
        name: 4.0 if name in ("pcie_downgrading", "gpu_execution_error", "aoc_error") else 1.0
        for name in KINDS
    },
    "slow": {
        name: 4.0 if name in ("fail_slow", "cpu_contention", "memory_leak") else 1.0
        for name in KINDS
    },
}


# ---- drawing a fault


# Share of weak faults among those that do not stop the job: their sizes come from their whole
# range, those of the others from its upper half, in logarithms. ASSUMED: most are plain to see.
WEAK = 0.3


@dataclass(frozen=True)
class Fault:
    """One fault of one machine, from its onset to the halt of the job, Unix seconds.

    metrics: the metrics that move on this machine. moves: how they move. peers: (number of a
    machine, delay in s, share of the size) of the machines that show the fault later and weaker.
    speed, speed_delay_s, ramp_s: speed of the job as a whole, when it changes, and how gradually.
    restart_s: how long the job stands after the halt; 0: it goes on.
    """

    machine: str
    kind: str
    start: float
    end: float
    metrics: tuple[str, ...]
    moves: tuple[Move, ...] = ()
    peers: tuple[tuple[int, float, float], ...] = ()
    speed: float = 1.0
    speed_delay_s: float = 0.0
    ramp_s: float = 0.0
    restart_s: float = field(default=240.0)

    def disturbances(self, layout: Layout) -> list[Disturbance]:
        """Returns the disturbances of the fault's machine, of its peers and of the job."""
        victim = layout.names.index(self.machine)
        disturbances = [Disturbance(self.kind, self.start, self.end, (victim,), self.moves)]
        spread = [m for m in self.moves if m.target not in ("gone", "nominal")]
        for machine, delay_s, share in self.peers:
            moves = tuple(m.scaled(share, delay_s) for m in spread)
            disturbances.append(Disturbance("peer", self.start, self.end, (machine,), moves))
        slow = min(self.start + self.speed_delay_s, self.end)
        if self.speed < 1:
            kind = "hang" if self.speed == 0 else "slow"
            disturbances.append(Disturbance(kind, slow, self.end, (), (), self.speed, self.ramp_s))
        if self.restart_s > 0:
            disturbances.append(
                Disturbance("halt", self.end, self.end + self.restart_s, state="restart")
            )
        return disturbances


def draw_kind(rng: np.random.Generator, mix: str) -> str:
    """Returns a fault type of a mix, a key of MIXES."""
    weights = np.array(list(MIXES[mix].values()))
    return list(MIXES[mix])[rng.choice(len(weights), p=weights / weights.sum())]


def draw_fault(
    rng: np.random.Generator,
    kind: str,
    layout: Layout,
    start: float,
    end: float,
    strength: tuple[float, float] = (1.0, 1.0),
    visible: Collection[str] = MINDER,
    machine: int | None = None,
) -> Fault:
    """Returns a fault of a kind.

    Args: start, end: its onset and the halt of the job. strength: range of the factor on all sizes.
        visible: at least one of these metrics moves, if the kind moves any of them. machine: number
        of the machine; None: it is drawn.
    Raises: UserError for a kind that is not in KINDS.
    """
    if kind not in KINDS:
        raise UserError(f"kind={kind!r} must be one of {sorted(KINDS)}.{did_you_mean(kind, KINDS)}")
    what = KINDS[kind]
    victim = int(rng.integers(layout.machines)) if machine is None else machine
    factor = float(rng.uniform(*strength))
    shape, seconds = _shape(rng, what, end - start)
    speed, delay_s, ramp_s = 1.0, float(rng.uniform(0, 20)), 0.0
    chance = rng.random()
    if chance < what.hangs:
        speed = 0.0
    elif chance < what.hangs + what.slows:
        speed = float(rng.uniform(*what.speed))
        ramp_s = seconds if shape == "ramp" else 0.0
    # A machine for which all others wait has stopped: that is plain to see.
    weak = speed > 0 and rng.random() < WEAK
    if speed == 0:  # while all machines wait, what only work moves shows nothing
        waiting = tuple(m for m in visible if METRICS[m].levels.get("wait"))
        visible = waiting or visible
    moves = _moves(rng, what, factor, (shape, seconds), weak, visible)
    if kind == "fail_slow":  # the victim is never seen to wait
        metrics = rng.permutation(["gpu_tensor_activity", "gpu_sm_activity", "nvlink_bandwidth"])[
            :2
        ]
        size = float(rng.uniform(0.3, 0.9))
        moves += tuple(Move(str(m), "nominal", size, shape, seconds) for m in metrics)
    if rng.random() < what.vanishes:
        moves = _vanishing(rng, kind, moves)
    peers: list[tuple[int, float, float]] = []
    if rng.random() < what.spreads:
        near = layout.peers(victim)
        most = min(8, layout.machines // 4)  # a fault that all show has no place
        for k in rng.permutation(len(near))[:most]:
            share = float(rng.uniform(*what.spread))
            peers.append((near[k], float(np.exp(rng.uniform(0, np.log(60)))), share))
    names = tuple(dict.fromkeys(m.metric for m in moves))
    return Fault(
        layout.names[victim], kind, start, end, names, moves, tuple(peers), speed, delay_s, ramp_s
    )


def _shape(rng: np.random.Generator, kind: Kind, lasts: float) -> tuple[Shape, float]:
    """Returns a shape and its seconds.

    A gradual onset lasts 1 to 4 minutes, at most a third of the fault.
    """
    if rng.random() < kind.creeps:
        return "ramp", float(min(rng.uniform(60, 240), lasts / 3))
    chance = rng.random()
    if chance < 0.70:
        return "step", 0.0
    if chance < 0.85:
        return "ramp", float(rng.uniform(5, 60))
    if chance < 0.95:
        return "oscillation", float(rng.uniform(6, 60))
    return "flapping", float(rng.uniform(5, 30))


def _moves(
    rng: np.random.Generator,
    kind: Kind,
    factor: float,
    shape: tuple[Shape, float],
    weak: bool,
    visible: Collection[str],
) -> tuple[Move, ...]:
    """Returns drawn moves of the effects; one of them is visible, if any can be."""
    possible = [e for e in kind.effects if any(m in visible for m in GROUPS[e.group])]
    for _ in range(1000):
        moves: list[Move] = []
        for effect in kind.effects:
            if rng.random() >= effect.probability:
                continue
            low = effect.low if weak else np.sqrt(effect.low * effect.high)
            size = float(np.exp(rng.uniform(np.log(low), np.log(effect.high)))) * factor
            for metric in _members(rng, GROUPS[effect.group]):
                each = min(1.0, size * float(rng.uniform(0.7, 1.2)))
                moves.append(Move(metric, effect.target, each, *shape))
        if not possible or any(m.metric in visible for m in moves):
            return tuple(moves)
    return tuple(Move(m, e.target, e.high, *shape) for e in possible[:1] for m in GROUPS[e.group])


def _members(rng: np.random.Generator, group: Sequence[str]) -> list[str]:
    """Returns some of a group's metrics, each with 0.75, at least one of the first four."""
    members = [m for m in group if rng.random() < 0.75]
    return members or [group[int(rng.integers(min(4, len(group))))]]


def _vanishing(rng: np.random.Generator, kind: str, moves: tuple[Move, ...]) -> tuple[Move, ...]:
    """Returns moves after which series end: all of a machine, or those of its GPUs."""
    delay_s = float(rng.uniform(0, 30))
    if kind == "machine_unreachable":
        return (*moves, Move("*", "gone", 1.0, "step", 0.0, delay_s))
    gone = tuple(Move(m, "gone", 1.0, "step", 0.0, delay_s) for m in _GPU)
    return (*(m for m in moves if m.metric not in _GPU), *gone)


_GPU = (
    *GROUPS["gpu"],
    "gpu_clocks",
    "gpu_temperature",
    "gpu_memory_used",
    "nvlink_bandwidth",
)
