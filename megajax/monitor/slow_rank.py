"""Finds the rank whose own work makes all steps slow, and shows in what its host differs.

SlowRank, a detector, collects reports for a tenth of the continuity, and until nearly all ranks
have finished a step. OwnWork compares the ranks by their medians of that time. Steps that compile
do not count, nor do sections in which all ranks stop (saves, evaluations). No jax import.
"""

import gzip
import statistics
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.alerts import Alert
from megajax.monitor.detectors import Job, Rule
from megajax.monitor.records import Record

# ---- which rank makes the steps slow: how its own work grew, compared with the step
#
# All ranks of a job take equally long for a step, because each waits in collectives for the
# slowest: the step's time says that one is slow, not which one. What a rank does itself does not
# wait. Of each rank three measures of it are read, as far as they are there, in seconds a step:
#
# own     between the steps' launches: data and prepare (timers.py)
# demand  processor time that its threads got or waited for, as its agent saw it (meter.py)
# pulse   how long its devices took for a fixed product, times the usual step (training/loop.py)
#
# A rank is named when for a whole continuity the steps took longer than before, its own work grew
# by at least half of that more than the others' did, and nearly every tick says so (MegaScale
# section 5.1 compares ranks with each other, NVRx with their own past too; Minder section 4.3:
# continuity). What slows all ranks, or slows nobody's step, names nobody. A rank that was slow from
# the start has no past to grow from; the rule `straggler` compares it with the others. No jax
# import. The others are those whose devices are of the same kind (detectors.py). The only rank of a
# kind is compared with its past alone.
#
# Legend: M measures, R ranks, W ticks of the continuity, P ticks before it.


MEASURES = ("own", "demand", "pulse")
TICKS = 10  # of the continuity
MISSES = 0  # of them that may say otherwise: disturbances of 200 s are none
LEAST_PAST = 5  # (chosen) ticks before the continuity
PAST = 120  # (chosen) ticks that are remembered before it
GROWN = 0.05  # (chosen) of a step: the least growth that is worth a machine
PART = 0.3  # (chosen) of what a rank's own work grew, that the steps must have grown then
LEAST_PART = 0.3  # (chosen) of what the steps grew, that its own work must explain
TICK_PART = 0.5  # (chosen) of the average that a tick must show
EDGE = 5  # (chosen) ticks before and after the growth that are compared
SIGMAS = 2.5  # (chosen) of a tick's own noise, for an average over ten of them
SEEN, BEYOND = 0.95, 1.5  # (chosen) processor time that it took before, beside the steps, is none
ALIKE = 0.5  # (chosen) as much as the furthest one: more such ranks have a common cause
CROWD = 16  # (chosen) ranks of which two may be sick at a time


@dataclass(frozen=True)
class Slow:
    """A rank that makes the steps slow. since: when it became slow, Unix seconds.

    more_s: by how many seconds a step its own work grew more than that of the others, by the
    measure that shows it best. usual_s, step_s: how long a step took before, and takes now.
    """

    rank: int
    since: float
    measure: str
    more_s: float
    usual_s: float
    step_s: float


class OwnWork:
    """Remembers the ticks of one job. share_R: the growth of own work now, in usual steps."""

    def __init__(self, ranks: int, ticks: int = TICKS):
        """ticks: ticks for which a rank must be slow before it is named."""
        self._ticks = ticks
        self._at: deque[float] = deque(maxlen=ticks + PAST)
        self._step: deque[float] = deque(maxlen=ticks + PAST)
        self._work: deque[np.ndarray] = deque(maxlen=ticks + PAST)
        self._named: set[int] = set()
        self._kinds = ("",) * ranks
        self.first_pulse_s: dict[str, float] = {}  # by kind, the median of the first tick
        self.share_R = np.zeros(ranks)

    @property
    def usual_s(self) -> float | None:
        """How long a step usually took before the last ticks; None: not known yet."""
        past = list(self._step)[: -self._ticks]
        return float(np.median(past)) if len(past) >= LEAST_PAST else None

    def meet(self, kinds_R: Sequence[str]) -> None:
        """Takes the kind of each rank's devices. Where one has changed, another attempt has placed
        the ranks differently, and all that was remembered is forgotten."""
        if tuple(kinds_R) != self._kinds:
            self._kinds = tuple(kinds_R)
            for known in (self._at, self._step, self._work, self._named, self.first_pulse_s):
                known.clear()

    def tick(self, at: float, step_s: float, work_MR: np.ndarray) -> list[Slow]:
        """Takes the medians of a tick that began at `at`; returns the ranks that are newly named.

        work_MR: seconds a step by MEASURES; NaN: not measured.
        """
        self._at.append(at)
        self._step.append(step_s)
        self._work.append(np.asarray(work_MR, float))
        if len(self._step) < self._ticks + LEAST_PAST:
            return []
        with warnings.catch_warnings():  # rows without any measurement
            warnings.simplefilter("ignore", RuntimeWarning)
            return self._judge()

    def _judge(self) -> list[Slow]:
        W, step_T = self._ticks, np.asarray(self._step)
        usual = float(np.median(step_T[:-W]))
        grown_TMR, excess_TMR, noise_MR = self._grown(np.stack(self._work), W)
        now_WMR = excess_TMR[-W:]
        mean_MR = np.nan_to_num(np.nanmean(now_WMR, axis=0))
        self.share_R = mean_MR.max(0) / usual
        self._named &= set(np.flatnonzero(self.share_R > GROWN / 2).tolist())
        lasts_MR = (now_WMR >= TICK_PART * mean_MR - noise_MR).sum(0) >= W - MISSES
        seen_MR = np.nan_to_num(np.nanquantile(excess_TMR[:-W], SEEN, axis=0))
        seen_MR[np.array(MEASURES) != "demand"] = 0.0
        lasts_MR &= (mean_MR > SIGMAS * noise_MR) & (mean_MR > BEYOND * seen_MR)
        lasts_MR &= (mean_MR >= GROWN * usual) & _alone(np.nanmean(grown_TMR[-W:], axis=0))
        slow = []
        for r in np.flatnonzero(lasts_MR.any(0)):
            if int(r) in self._named:
                continue
            for m in sorted(np.flatnonzero(lasts_MR[:, r]), key=lambda m: -mean_MR[m, r]):
                one = self._slow(int(r), int(m), excess_TMR[:, m, r], step_T)
                if one is not None:
                    slow.append(one)
                    self._named.add(int(r))
                    break
        return slow

    def _slow(self, r: int, m: int, excess_T: np.ndarray, step_T: np.ndarray) -> Slow | None:
        """Returns the finding about a rank whose own work has grown, None where no step did."""
        W = self._ticks
        more = float(np.nanmean(excess_T[-W:]))
        low_T = ~(excess_T >= TICK_PART * more)
        before = np.flatnonzero(low_T[:-W])
        onset = int(before[-1]) + 1 if len(before) else 0
        before_s = float(np.median(step_T[max(onset - EDGE, 0) : max(onset, 1)]))
        grown = float(np.median(step_T[onset + 1 : onset + 1 + EDGE])) - before_s
        least = max(GROWN * before_s, PART * more if MEASURES[m] == "own" else 0.0)
        is_clear = MEASURES[m] == "pulse" and more >= 2 * GROWN * before_s
        if not is_clear and not (grown >= least and more >= LEAST_PART * grown):
            return None
        now = float(np.median(step_T[-W:]))
        return Slow(r, list(self._at)[onset], MEASURES[m], more, before_s, now)

    def _grown(self, work_TMR: np.ndarray, W: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (growth over the past before the last W ticks, growth beyond the others', noise
        of that in the past, (M, R))."""
        grown_TMR = work_TMR - np.nanmedian(work_TMR[:-W], axis=0)
        excess_TMR, kinds_R = np.empty_like(grown_TMR), np.array(self._kinds)
        for kind in np.unique(kinds_R):
            peers_TMP = grown_TMR[:, :, kinds_R == kind]
            excess_TMR[:, :, kinds_R == kind] = peers_TMP - _others(peers_TMP)
        noise_MR = 1.4826 * np.nanmedian(np.abs(excess_TMR[:-W]), axis=0)
        noise_MR = np.fmax(noise_MR, np.nanmedian(noise_MR, axis=1, keepdims=True))
        return grown_TMR, excess_TMR, noise_MR


def _alone(grown_MR: np.ndarray) -> np.ndarray:
    """Returns where a rank is no one of many that grew like it, as all do, or those of one role."""
    grown_MR = np.nan_to_num(grown_MR)
    most_M1 = grown_MR.max(1, keepdims=True)
    near_MR = (grown_MR >= ALIKE * most_M1) & (grown_MR > 0)
    two_M1 = (grown_MR >= ALIKE / 2 * most_M1).sum(1, keepdims=True) <= 2
    many_M1 = near_MR.sum(1, keepdims=True)
    return near_MR & ((many_M1 == 1) | (two_M1 & (grown_MR.shape[1] >= CROWD)))


def _others(x_TMR: np.ndarray) -> np.ndarray:
    """Returns the median of the other ranks, of each rank."""
    R = x_TMR.shape[2]
    if R > 16:  # one more or less does not move it
        return np.nanmedian(x_TMR, axis=2, keepdims=True)
    if R == 1:
        return np.zeros_like(x_TMR)
    parts = [np.nanmedian(np.delete(x_TMR, r, axis=2), axis=2) for r in range(R)]
    return np.stack(parts, axis=2)


# ---- the detector


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
        """continuity_s: seconds for which a rank must be slow before an alert. work: what is known
        from the attempt before, if it had as many ranks. emit: takes a record `own_work_share` for
        each rank after every tick."""
        super().__init__(job)
        self.work = work or OwnWork(len(job.ranks))
        self.steps_s: list[float] = []  # of each tick of this attempt
        self.named: dict[int, Slow] = {}  # by rank, those that were named in this attempt
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
        # Nearly all ranks must have finished a step that counts.
        is_enough = len(self._values["step"]) > 0.9 * len(self._numbers)
        if self._job.clock - self._since < self._tick_s or not is_enough:
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

    def _judge(self) -> list[Alert]:
        v = self._values
        steps_s = [statistics.median(x) for x in v["step"].values()]
        step_s = statistics.median(steps_s)
        self.steps_s.append(step_s)
        self.work.meet([self._job.ranks[number].kind for number in self._numbers])
        pulses = {r: statistics.median(x) for r, x in v["pulse"].items()}
        if len(kinds := self._job.by_kind()) > 1:  # in units of what its kind usually takes
            for kind, ranks in kinds.items():
                if known := [pulses[r.number] for r in ranks if r.number in pulses]:
                    usual = self.work.first_pulse_s.setdefault(kind, statistics.median(known))
                    pulses |= {
                        r.number: pulses[r.number] / usual for r in ranks if r.number in pulses
                    }
        usual = statistics.median(pulses.values()) if pulses else 1.0
        work_MR = np.full((3, len(self._numbers)), np.nan)
        for k, number in enumerate(self._numbers):
            if work := v["own"].get(number):
                work_MR[0, k] = statistics.median(work)
            if demand := v["demand"].get(number):
                work_MR[1, k] = statistics.fmean(demand) * step_s
            if number in pulses and usual > 0:
                work_MR[2, k] = pulses[number] / usual * step_s
        slow = self.work.tick(self._wall, step_s, work_MR)
        if self._emit is not None:
            now, step = time.time(), self._job.step
            self._emit(
                [
                    Record(now, self._job.ranks[n].host, n, None, step, "own_work_share", float(s))
                    for n, s in zip(self._numbers, self.work.share_R, strict=True)
                ]
            )
        by_host: dict[str, list[Slow]] = defaultdict(list)
        for one in slow:
            number = self._numbers[one.rank]
            self.named[number] = one
            by_host[self._job.ranks[number].host].append(one)
        return [self._alert(host, ranks) for host, ranks in by_host.items()]

    def _alert(self, host: str, slow: Sequence[Slow]) -> Alert:
        most = max(slow, key=lambda s: s.more_s)
        since = time.strftime("%H:%M:%S", time.gmtime(most.since))
        words = WORDS[most.measure].format(1000 * most.more_s)
        message = (
            f"{words}; steps take {most.step_s:.3g} s, before {since} UTC {most.usual_s:.3g} s"
        )
        if differences := self.differences(host):
            message += "; " + ", ".join(differences)
        ranks = [self._job.ranks[self._numbers[s.rank]] for s in slow]
        return self._job.alert("slow", ranks, message)

    def differences(self, host: str) -> list[str]:
        """Returns in which metrics a host differs from the others of its kind in this tick, in
        words."""
        apart: list[tuple[float, str]] = []
        kinds = {name: one.kind for name, one in self._job.hosts.items()}
        for name, by_host in self._hosts.items():
            alike = {h: x for h, x in by_host.items() if kinds.get(h) == kinds.get(host)}
            values = {h: _level(name, x) for h, x in alike.items()}
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


# ---- what the hosts of a run showed, as a long CSV of sources/files.py, to fit a detector on


MOST_BYTES = 2**30  # (chosen) of rows, before they are compressed; a disk has room for more


class RecordFile:
    """Writes the metrics of hosts; when the disk takes no more, it stops writing and nothing
    else."""

    def __init__(self, path: Path):
        """Replaces a file. path: ends with .csv.gz. Raises: UserError when it cannot be written."""
        if not path.name.endswith(".csv.gz"):
            raise UserError(
                f"minder.record={path} must end with .csv.gz; nearest: {path}.csv.gz "
                "(--minder.record)"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = gzip.open(path, "wt", compresslevel=1)
        except OSError as error:
            raise UserError(f"minder.record={path}: {error.strerror} (--minder.record)") from None
        self._bytes = self._file.write("timestamp,machine,metric,value\n")

    def write(self, records: Sequence[Record]) -> None:
        """Adds the records that are metrics of machines."""
        rows = []
        for r in records:
            if r.name in METRICS and isinstance(r.value, int | float):
                labels = [
                    f'{n}=""{v}""'
                    for n, v in (("rank", r.rank), ("device", r.device))
                    if v is not None
                ]
                name = f'"{r.name}{{{",".join(labels)}}}"' if labels else r.name
                host = r.host.replace('"', '""')
                rows.append(f'{r.time:.3f},"{host}",{name},{float(r.value)!r}\n')
        if rows and self._bytes < MOST_BYTES:
            try:
                self._bytes += self._file.write("".join(rows))
            except OSError:
                self._bytes = MOST_BYTES

    def close(self) -> None:
        """Writes buffered rows and closes the file."""
        try:
            self._file.close()
        except OSError:
            return
