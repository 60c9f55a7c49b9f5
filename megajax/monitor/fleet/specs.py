"""The 21 metrics of Minder (section 4.1) and how a healthy machine's readings follow its work.

A reading is `base` plus the levels times what the machine does in that second (DRIVERS), in the
unit of the metric; for packet rates all of this is the logarithm of packets per second. The order
of METRICS begins with the seven that Minder uses, in the order of priority that it learned.

Every number here is ASSUMED: chosen to look like a host with 8 GPUs of 700 W and 400 Gbit/s of RDMA
a GPU, since no public trace of such a job exists. Noise is given in shares of the metric's span,
the difference between a working and an idle machine; a fifth of it is there on an idle machine,
the rest grows with what the machine does (packet rates: all of it is always there, as a factor).
CPU: the threads that wait for a collective poll, so that a job that hangs is not idle.
"""

from dataclasses import dataclass, field
from functools import cached_property

# What a machine does, each 0..1: computes; sends gradients; waits inside a collective (the kernel
# spins); loads data; writes a checkpoint; starts processes; has a process at all; writes the log;
# waits for a slow disk.
DRIVERS = ("compute", "exchange", "wait", "load", "write", "init", "alive", "log", "disk")

# The second in which a machine of the middle of the pipeline works: what "nominal" means.
TYPICAL = {"compute": 0.75, "exchange": 0.15, "wait": 0.1, "load": 1.0, "alive": 1.0}


@dataclass(frozen=True)
class Spec:
    """One metric of a host.

    levels: driver -> what it adds at 1. surge: where a disturbance called "high" leads. white,
    slow, offset: standard deviations of the noise of a second, of the noise with a correlation time
    of 5 s to 15 min, and of the constant differences between machines, in shares of the span.
    quantum: step of the readings, 0: none. counter: the exporter shows a counter, so a restart of
    it spoils a second. log: base, levels and noise are of the natural logarithm.
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
