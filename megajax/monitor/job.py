"""What the records of a job say so far: how far each rank is, and since when.

The watchdog puts the records of all hosts into one Job, and the detectors read it. Its clock does
not run while nobody looks: when the watcher itself was starved on a loaded machine, the time that
it missed counts for two periods. How long it missed is known (`absence`): what agents and
ranks did meanwhile, because nobody answered them, is not their fault. No jax import.

Of all ranks only those furthest behind can be late; who is ahead waits for them rightly, however
long. So `since` of every other rank is now.
"""

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megajax.monitor.alerts import Alert, Cause
from megajax.monitor.heartbeat import CODES
from megajax.monitor.records import Record, Value

FACTOR = 5.0  # (chosen) times the longest time seen in a section, before it counts as a stall
WINDOW = 20  # (chosen) steps whose median counts, for stragglers and traffic
TOLD = (0, 143, 130)  # codes of a process that came to its end: done, or saved because told to


@dataclass(frozen=True)
class Limits:
    """How long is too long, in seconds, and how much too much.

    start: from the start of a process to its first step, and its first two steps, which compile.
    step: in each section of a step. save, evaluate: in a save; in an evaluation and at the end.
    silence: of an agent; of a stopped process. settle: between the first sign of a fault and its
    judgement, so that the signs of the rank that caused it are in.
    """

    start: float = 1800.0
    step: float = 180.0
    save: float = 600.0
    evaluate: float = 1800.0
    silence: float = 15.0
    settle: float = 2.0
    flood_bytes_per_s: float = 20e6
    disk_free: float = 2**30

    def floor(self, section: str) -> float:
        """Returns the least that a section may take."""
        if section in ("start", "compile"):
            return self.start
        if section == "save":
            return self.save
        return self.evaluate if section in ("evaluate", "end", "told") else self.step


@dataclass
class Rank:
    """A training process. values: the last one of each name that it recorded."""

    number: int
    host: str
    since: float = 0.0  # when it last moved, or rightly waited for another
    running: float = 0.0  # when it was last seen in a state other than T
    flood: float | None = None  # since when its log is in flood
    step: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    own: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def number_of(self, name: str) -> float:
        """Returns the last value of a name, 0 before the first."""
        return _number(self.values.get(name), 0.0)

    @property
    def section(self) -> str:
        """Name of the section of a step that it is in."""
        return str(self.values.get("section", "start"))

    @property
    def place(self) -> tuple[int, int]:
        """How far it is."""
        return self.step, CODES[self.section]

    @property
    def code(self) -> int | None:
        """How it ended, negative for a signal; None: it lives."""
        return int(self.number_of("exit_code")) if "exit_code" in self.values else None

    @property
    def is_frozen(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP)."""
        return self.values.get("state") == "T"

    @property
    def has_bad_loss(self) -> bool:
        """Whether its last finished step had no finite loss."""
        return not math.isfinite(self.number_of("loss"))

    @property
    def has_bad_state(self) -> bool:
        """Whether what its own devices hold of the state is not finite."""
        return bool(self.number_of("has_bad_state"))

    @property
    def error(self) -> str:
        """The last error that it printed, '' for none."""
        return str(self.values.get("error", ""))

    @property
    def came_to_its_end(self) -> bool:
        """Whether it ended as it should, or is about to."""
        return self.code in TOLD and ("beat" not in self.values or self.section in ("end", "told"))


@dataclass
class Host:
    """A machine with its ranks. heard: when its agent last reported."""

    name: str
    ranks: list[Rank]
    heard: float = 0.0
    step: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    counted: float | None = None  # bytes through its network at that step
    per_step: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def number_of(self, name: str, otherwise: float = 0.0) -> float:
        """Returns the last value of a name, or what is given before the first."""
        return _number(self.values.get(name), otherwise)


class Job:
    """One attempt of a job. clock: in seconds, goes on while somebody looks."""

    def __init__(
        self, ranks: Mapping[str, Sequence[int]], limits: Limits, now: float, period: float = 1.0
    ):
        """ranks: of each host. period: seconds between the reports of an agent."""
        self.limits, self._period = limits, period
        self._last, self.clock = now, 0.0
        self.hosts = {name: Host(name, [Rank(r, name) for r in own]) for name, own in ranks.items()}
        self.ranks = {r.number: r for host in self.hosts.values() for r in host.ranks}
        self.gone: dict[str, str] = {}  # hosts whose agents hung up, and why
        self._gaps: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (end, seconds) unwatched
        self._back = set(self.ranks)  # the ranks furthest behind, at the last look
        self._seen: dict[str, float] = {}
        self._sign: float | None = None  # when the first sign of a fault came

    @property
    def step(self) -> int:
        """The furthest step of any rank."""
        return max((r.step for r in self.ranks.values()), default=0)

    def tick(self, now: float) -> None:
        """Lets the clock go on to a moment of the watcher's clock."""
        gap = now - self._last
        self.clock += min(gap, 2 * self._period)
        if gap > 2 * self._period:
            self._gaps.append((now, gap))
        self._last = now

    def look(self, now: float) -> None:
        """Finds who is behind, before the detectors judge."""
        self.tick(now)
        self._back = {r.number for r in self.behind()}
        for rank in self.ranks.values():
            if rank.number not in self._back:
                rank.since = self.clock

    def hear(self, now: float, name: str, records: Sequence[Record]) -> None:
        """Takes what the agent of a host reports at one time."""
        self.tick(now)
        host = self.hosts[name]
        elapsed = self.clock - host.heard
        host.heard = self.clock
        told: dict[int, list[Record]] = {}
        for r in records:
            if r.rank is None:
                if r.device is None:
                    host.values[r.name] = r.value
            elif r.device is None and r.name != "log_line":
                told.setdefault(r.rank, []).append(r)
        for number, own in told.items():
            self._hear_rank(self.ranks[number], own, elapsed)
        self._count_traffic(host)

    def _hear_rank(self, rank: Rank, records: Sequence[Record], elapsed: float) -> None:
        before, section = dict(rank.values), rank.section
        rank.values.update((r.name, r.value) for r in records)
        step = next((r.step or 0 for r in records if r.name == "section"), rank.step)
        if rank.values.get("beat") != before.get("beat"):
            if rank.number in self._back:  # those ahead also waited for others
                spent = self.clock - elapsed - rank.since
                self._seen[section] = max(self._seen.get(section, 0.0), spent)
            if step != rank.step and (step_s := rank.number_of("step_s")):
                rank.own.append((rank.number_of("own_s"), step_s))
            rank.since = self.clock
        rank.step = step
        if not rank.is_frozen:
            rank.running = self.clock
        if any(r.name == "log_bytes" for r in records):
            grown = rank.number_of("log_bytes") - _number(before.get("log_bytes"), 0.0)
            wild = grown > self.limits.flood_bytes_per_s * max(elapsed, self._period)
            rank.flood = (self.clock if rank.flood is None else rank.flood) if wild else None

    def _count_traffic(self, host: Host) -> None:
        total = host.number_of("network_bytes")
        step = min((r.step for r in host.ranks), default=0)
        if host.counted is None:
            host.counted, host.step = total, step
        elif step > host.step:
            host.per_step.append((total - host.counted) / (step - host.step))
            host.counted, host.step = total, step

    # ---- what rules ask

    def absence(self) -> float:
        """Returns for how many seconds nobody looked, where that may explain what is seen now."""
        recent = self._last - self.limits.silence - self.limits.settle - 2 * self._period
        return sum(gap for end, gap in self._gaps if end >= recent)

    def is_up(self) -> bool:
        """Tells whether every rank came as far as a step, as far as ranks tell where they are."""
        return all(r.step > 0 for r in self.ranks.values())

    def behind(self) -> list[Rank]:
        """Returns the living ranks that are furthest behind."""
        live = [r for r in self.ranks.values() if r.code is None]
        place = min((r.place for r in live), default=None)
        return [r for r in live if r.place == place]

    def allowed(self, section: str, least: float | None = None) -> float:
        """Returns the seconds that a section may take now: FACTOR times the longest that was seen
        of it, and not less than `least`, None: its limit."""
        least = self.limits.floor(section) if least is None else least
        return max(least, FACTOR * self._seen.get(section, 0.0))

    def is_settled(self, times: float = 1.0) -> bool:
        """Called at a sign of a fault. Tells whether the signs of the other ranks are in.

        times: how often to wait for as long as the limits say.
        """
        self._sign = self.clock if self._sign is None else self._sign
        waits = any(r.code is None for r in self.ranks.values())
        return not waits or self.clock - self._sign >= times * self.limits.settle

    def alert(
        self,
        rule: str,
        ranks: Sequence[Rank],
        message: str,
        code: int = 0,
        cause: Cause = "other",
        error: str = "",
    ) -> Alert:
        """Returns an alert that names ranks with their hosts. error: numbers in it do not count."""
        where = f"rank {_listed(r.number for r in ranks)} on {_listed(r.host for r in ranks)}"
        hosts = tuple(dict.fromkeys(r.host for r in ranks))
        numbers = tuple(r.number for r in ranks)
        error = re.sub(r"0x[0-9a-f]+|\d+", "#", error)
        return Alert(rule, f"{where}: {message}", numbers, hosts, self.step, code, cause, error)


def _number(value: Value, otherwise: float) -> float:
    return value if isinstance(value, int | float) else otherwise


def _listed(values: Iterable[object]) -> str:
    found = list(dict.fromkeys(str(v) for v in values))
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
