"""From the records of a job to the rank that makes its steps slow, with what its host shows beside.

Reports are collected for a tenth of the continuity, and until each rank has finished a step, and
given to own_work.py. Steps that compile do not count, nor do sections that stop all (saves,
evaluations). No jax import.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from megajax.monitor.alerts import Alert
from megajax.monitor.detectors import Rule
from megajax.monitor.job import Job
from megajax.monitor.own_work import TICKS, OwnWork, Slow
from megajax.monitor.records import Record

COMPILES = 3  # (chosen) steps of an attempt that may compile
IN_STEP = ("data", "prepare", "launch", "wait")
APART = 3.0  # (chosen) robust standard deviations at which a metric of a host is worth a word
SHOWN = 3  # metrics in an alert
# Of a host, its ranks or its devices: what may say why it is slow (Minder's metrics, its table 1).
METRICS = (
    "cpu_share", "cpu_cores", "cpu_wait_cores", "memory_share", "resident_bytes", "network_bytes",
    "pfc_packets_per_s", "gpu_duty", "gpu_memory_duty", "gpu_memory_bytes", "gpu_power_w",
    "gpu_celsius", "gpu_clock_mhz", "disk_free_bytes",
)  # fmt: skip
GROWING = ("network_bytes",)  # counters: their growth counts


class SlowRank(Rule):
    """A rank whose own work makes all steps slow."""

    def __init__(
        self,
        job: Job,
        continuity_s: float,
        work: OwnWork | None = None,
        emit: Callable[[Sequence[Record]], object] | None = None,
    ):
        """continuity_s: how long until an alert. work: of the attempt before, where its ranks were
        as many. emit: takes records of what is found: own_work_share of each rank."""
        super().__init__(job)
        self.work = work or OwnWork(len(job.ranks))
        self.steps_s: list[float] = []  # of each tick of this attempt
        self.found: dict[int, Slow] = {}  # by rank, those that were named in this attempt
        self._tick_s = continuity_s / TICKS
        self._emit = emit
        self._numbers = sorted(job.ranks)
        self._first: dict[int, int] = {}
        self._step: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._since, self._wall = self._job.clock, time.time()
        self._values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._hosts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Takes records; at the end of a tick returns an alert for each host that is named."""
        steps = {r.rank: r.step for r in records if r.name == "section" and r.rank is not None}
        waits: dict[int, float] = {}
        for r in records:
            if r.name in METRICS and isinstance(r.value, int | float):
                self._hosts[r.name][r.host].append(float(r.value))
            if r.rank is None or r.device is not None or not isinstance(r.value, int | float):
                continue
            if r.name in ("cpu_cores", "cpu_wait_cores"):
                waits[r.rank] = waits.get(r.rank, 0.0) + r.value
            elif r.name == "pulse_s":
                self._values["pulse"][r.rank].append(float(r.value))
        for number, step in steps.items():
            self._take(number, step or 0, waits.get(number))
        if self._job.clock - self._since < self._tick_s or not self._is_enough():
            return []
        alerts = self._judge()
        self._begin()
        return alerts

    def _take(self, number: int, step: int, demand: float | None) -> None:
        rank = self._job.ranks[number]
        if rank.section not in IN_STEP:
            return
        if step - self._first.setdefault(number, step) < COMPILES:
            return
        if demand is not None:
            self._values["demand"][number].append(demand)
        if step != self._step.get(number) and (step_s := rank.number_of("step_s")):
            self._values["step"][number].append(step_s)
            self._values["own"][number].append(rank.number_of("own_s"))
        self._step[number] = step

    def _is_enough(self) -> bool:
        """Whether nearly all ranks have finished a step that counts."""
        return len(self._values["step"]) > 0.9 * len(self._numbers)

    def _judge(self) -> list[Alert]:
        v = self._values
        steps_s = [statistics.median(x) for x in v["step"].values()]
        step_s = statistics.median(steps_s)
        self.steps_s.append(step_s)
        pulses = {r: statistics.median(x) for r, x in v["pulse"].items()}
        usual = statistics.median(pulses.values()) if pulses else 1.0
        work_MR = np.full((3, len(self._numbers)), np.nan)
        for k, number in enumerate(self._numbers):
            if own := v["own"].get(number):
                work_MR[0, k] = statistics.median(own)
            if demand := v["demand"].get(number):
                work_MR[1, k] = statistics.fmean(demand) * step_s
            if number in pulses and usual > 0:
                work_MR[2, k] = pulses[number] / usual * step_s
        found = self.work.tick(self._wall, step_s, work_MR)
        self._tell_shares()
        by_host: dict[str, list[Slow]] = defaultdict(list)
        for one in found:
            number = self._numbers[one.rank]
            self.found[number] = one
            by_host[self._job.ranks[number].host].append(one)
        return [self._alert(host, own) for host, own in by_host.items()]

    def _tell_shares(self) -> None:
        if self._emit is not None:
            now, step = time.time(), self._job.step
            self._emit([
                Record(now, self._job.ranks[n].host, n, None, step, "own_work_share", float(s))
                for n, s in zip(self._numbers, self.work.share_R, strict=True)
            ])  # fmt: skip

    def _alert(self, host: str, own: Sequence[Slow]) -> Alert:
        most = max(own, key=lambda s: s.more_s)
        since = time.strftime("%H:%M:%S", time.gmtime(most.since))
        words = WORDS[most.measure].format(1000 * most.more_s)
        message = (
            f"{words}; steps take {most.step_s:.3g} s, before {since} UTC {most.usual_s:.3g} s"
        )
        if beside := self.beside(host):
            message += "; " + ", ".join(beside)
        ranks = [self._job.ranks[self._numbers[s.rank]] for s in own]
        return self._job.alert("slow", ranks, message)

    def beside(self, host: str) -> list[str]:
        """Returns in which metrics a host differs from the others in this tick, in words."""
        apart: list[tuple[float, str]] = []
        for name, by_host in self._hosts.items():
            values = {h: _level(name, x) for h, x in by_host.items()}
            if host not in values or len(values) < 3:
                continue
            others = [x for h, x in values.items() if h != host]
            middle = statistics.median(others)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in others)
            far = abs(values[host] - middle) / (spread + 0.05 * abs(middle) + 1e-9)
            if far >= APART:
                text = f"{name} {values[host]:.3g} (others {middle:.3g})"
                apart.append((far, text))
        return [text for _, text in sorted(apart, reverse=True)[:SHOWN]]


def _level(name: str, values: Sequence[float]) -> float:
    return values[-1] - values[0] if name in GROWING else statistics.fmean(values)


WORDS = {
    "own": "its own work before a step takes {:.0f} ms longer than it did, the others' does not",
    "demand": "its threads compute, or wait for a processor, {:.0f} ms a step longer than they did",
    "pulse": "its devices need {:.0f} ms a step more than they did, the others' do not",
}
