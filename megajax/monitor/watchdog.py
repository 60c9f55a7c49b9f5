"""Rules that turn what agents report of a job into actions: pure, on a clock that is handed in.

Liveness says nothing (a rank asleep before a collective keeps all its heartbeats), so the rules
look at ends and at progress. Two ideas keep them honest:

- Of all ranks only those furthest behind are judged; who is ahead waits for them rightly, however
  long. What a section may take is the longest that was seen of it, times FACTOR, with a floor.
- The clock does not run while nobody looks: when the watcher itself was starved on a loaded
  machine, the time that it missed counts for two periods.

Rules (MegaScale section 4): end of a process, silence of an agent, stopped, stall in a section,
loss that is not finite, flood of the log; warnings: straggler, disk, traffic, words in the log.
The rules restart a job or warn; who is excluded, and how often to try, is the driver's business.
No jax import.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megajax.core.errors import SUPERSEDED
from megajax.monitor.heartbeat import CODES
from megajax.monitor.reports import Action, HostReport, Limits, RankReport

FACTOR = 5.0  # (chosen) times the longest time seen in a section, before it counts as a stall
WINDOW = 20  # (chosen) steps whose median counts, for stragglers and traffic
STRAGGLER = 0.08  # (chosen) of a step: named at +12 %, above the 6 % between two at -3 and +3 %
TRAFFIC = 0.5  # (chosen, papers' "traffic drop") of its own median bytes a step
ABORT = -6
TOLD = (0, 143, 130)  # codes of a process that came to its end: done, or saved because told to
TOLD_CODE = 143  # of a job whose processes say that they were told, whatever their own codes


@dataclass
class _Rank:
    host: str
    report: RankReport
    since: float  # when it last moved, or rightly waited for another
    running: float  # when it was last seen in a state other than T
    flood: float | None = None  # since when its log is in flood
    own: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def section(self) -> str:
        p = self.report.progress
        return "start" if p is None else p.section

    @property
    def step(self) -> int:
        p = self.report.progress
        return 0 if p is None else p.step

    @property
    def place(self) -> tuple[int, int]:
        """How far it is."""
        return self.step, CODES[self.section]

    @property
    def has_bad_loss(self) -> bool:
        return self.report.progress is not None and self.report.progress.has_bad_loss

    @property
    def has_bad_state(self) -> bool:
        return self.report.progress is not None and self.report.progress.has_bad_state

    @property
    def came_to_its_end(self) -> bool:
        r = self.report
        return r.code in TOLD and (r.progress is None or self.section in ("end", "told"))

    @property
    def blame(self) -> int:
        """Who of those that ended caused it: the smallest. 0: nothing wrong here."""
        code = self.report.code
        if self.came_to_its_end or (code is None and self.section not in ("failed", "lost")):
            return 0
        if code is not None and code < 0 and code != ABORT:
            return 1  # somebody killed it
        if self.section == "lost":
            return 4  # it died of another rank's death
        if code == ABORT:
            return 3  # so ends jax's runtime what lost its coordinator or was slow to answer
        return 2  # an error of its own, or it left before the end


@dataclass
class _Host:
    heard: float
    disk_free: float = math.inf
    traffic: int | None = None
    step: int = 0
    per_step: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class Watchdog:
    """Watches one attempt of a job: `hear` and `hang_up` take what happens, `judge` decides."""

    def __init__(
        self, ranks: Mapping[str, Sequence[int]], limits: Limits, now: float, period: float = 1.0
    ):
        """ranks: of each host. period: seconds between the reports of an agent."""
        self.limits, self._period = limits, period
        self._last, self._clock = now, 0.0
        self._ranks = {
            r: _Rank(host, RankReport(r), 0.0, 0.0) for host, own in ranks.items() for r in own
        }
        self._hosts = {host: _Host(0.0) for host in ranks}
        self._back = set(self._ranks)  # the ranks furthest behind, when last judged
        self._gone: list[str] = []
        self._seen: dict[str, float] = {}
        self._sign: float | None = None  # when the first sign of a fault came
        self._warned: set[tuple[str, object]] = set()
        self._words: list[tuple[int, str]] = []

    def _tick(self, now: float) -> float:
        self._clock += min(now - self._last, 2 * self._period)
        self._last = now
        return self._clock

    def hang_up(self, host: str) -> None:
        """The connection to an agent is gone."""
        self._gone.append(host)

    def hear(self, now: float, report: HostReport) -> None:
        """Takes an agent's report."""
        clock = self._tick(now)
        host = self._hosts[report.host]
        elapsed = clock - host.heard
        host.heard, host.disk_free = clock, report.disk_free
        for new in report.ranks:
            rank = self._ranks[new.rank]
            old, p = rank.report, new.progress
            if p is not None and (old.progress is None or p.beat != old.progress.beat):
                if new.rank in self._back:  # those ahead also waited for others
                    spent = host.heard - elapsed - rank.since
                    self._seen[rank.section] = max(self._seen.get(rank.section, 0.0), spent)
                if p.step != rank.step and p.step_s:
                    rank.own.append((p.own_s, p.step_s))
                rank.since = clock
            if new.state != "T":
                rank.running = clock
            grown = new.log_bytes - old.log_bytes
            wild = grown > self.limits.flood_bytes_per_s * max(elapsed, self._period)
            rank.flood = (clock if rank.flood is None else rank.flood) if wild else None
            rank.report = new
            self._words += [(new.rank, line) for line in new.words]
        self._count_traffic(host, report)

    def _count_traffic(self, host: _Host, report: HostReport) -> None:
        step = min((self._ranks[r.rank].step for r in report.ranks), default=0)
        if host.traffic is None:
            host.traffic, host.step = report.traffic, step
        elif step > host.step:
            host.per_step.append((report.traffic - host.traffic) / (step - host.step))
            host.traffic, host.step = report.traffic, step

    def judge(self, now: float) -> list[Action]:
        """Returns what is to be done: at most one action that is not a warning, it comes first."""
        clock = self._tick(now)
        self._back = {r.report.rank for r in self._behind()}
        for number, rank in self._ranks.items():
            if number not in self._back:
                rank.since = clock
        for rule in (self._ends, self._silence, self._not_finite, self._stopped, self._stall,
                     self._flood):  # fmt: skip
            if action := rule(clock):
                return [action, *self._warnings()]
        return self._warnings()

    # ---- faults

    def _act(self, rule: str, ranks: Sequence[_Rank], message: str, **more) -> Action:
        where = f"rank {_listed(r.report.rank for r in ranks)} on {_listed(r.host for r in ranks)}"
        return Action(
            kind=more.pop("kind", "restart"),
            rule=rule,
            message=f"{where}: {message}",
            ranks=tuple(r.report.rank for r in ranks),
            hosts=tuple(dict.fromkeys(r.host for r in ranks)),
            step=max((r.step for r in self._ranks.values()), default=0),
            **more,
        )

    def _ends(self, clock: float) -> Action | None:
        ranks = list(self._ranks.values())
        if all(r.came_to_its_end for r in ranks):
            told = any(r.section == "told" for r in ranks)
            code = max(r.report.code or (TOLD_CODE if told else 0) for r in ranks)
            return Action("done", "end", "all ranks came to their end", code=code)
        if taken := [r for r in ranks if r.report.code == SUPERSEDED]:
            why = "a newer driver's run saves in its place"
            return self._act("superseded", taken, why, kind="stop", code=SUPERSEDED)
        bad = [r for r in ranks if r.blame]
        if not bad and not self._gone:
            return None
        self._sign = clock if self._sign is None else self._sign
        waits = any(r.report.code is None for r in ranks)
        if waits and clock - self._sign < self.limits.settle:
            return None
        if self._gone:
            mine = [r for r in ranks if r.host in self._gone]
            return self._act("agent", mine, "the agent is gone")
        least = min(r.blame for r in bad)
        causes = [r for r in bad if r.blame == least]
        if least == 4 and (late := [r for r in self._behind() if not r.blame]):
            # Those that were on their way when jax gave them up.
            return self._act("lost", late, f"lost by others while in {late[0].section!r}")
        if any(r.has_bad_loss for r in causes):
            return self._not_finite(clock)
        if any(r.report.code == 2 for r in causes):
            return self._act("usage", causes, "says it cannot (exit code 2)", kind="stop", code=2)
        first = causes[0]
        return self._act("exit", causes, f"{_how(first)}, step {first.step}")

    def _silence(self, clock: float) -> Action | None:
        for name, host in self._hosts.items():
            quiet = clock - host.heard
            if quiet > self.limits.silence:
                mine = [r for r in self._ranks.values() if r.host == name]
                return self._act("silence", mine, f"the agent said nothing for {quiet:.1f} s")
        return None

    def _not_finite(self, clock: float) -> Action | None:
        """All ranks compute the same loss; it comes from those whose own state is not finite.

        Where no state is bad (the data, a learning rate, a product gone wrong) all are named.
        """
        bad = [r for r in self._ranks.values() if r.has_bad_loss]
        if not bad:
            return None
        self._sign = clock if self._sign is None else self._sign
        waits = any(r.report.code is None for r in self._ranks.values())
        if waits and clock - self._sign < self.limits.settle:
            return None
        sick = [r for r in bad if r.has_bad_state]
        why = ", what it holds of the state is not" if sick else ""
        return self._act("nan", sick or bad, f"the loss is not finite by step {bad[0].step}{why}")

    def _stopped(self, clock: float) -> Action | None:
        live = [r for r in self._ranks.values() if r.report.code is None]
        frozen = [r for r in live if clock - r.running > self.limits.silence]
        if not frozen or len(frozen) == len(live) > 1:  # a whole job is suspended on purpose
            return None
        return self._act("stopped", frozen, f"stopped (SIGSTOP) in {frozen[0].section!r}")

    def _behind(self) -> list[_Rank]:
        live = [r for r in self._ranks.values() if r.report.code is None]
        place = min((r.place for r in live), default=None)
        return [r for r in live if r.place == place]

    def allowed(self, section: str) -> float:
        """Returns the seconds that a section may take now."""
        return max(self.limits.floor(section), FACTOR * self._seen.get(section, 0.0))

    def _stall(self, clock: float) -> Action | None:
        behind = self._behind()
        if not behind:
            return None
        # As of the last report: what was not heard since is the silence rule's.
        ages = [self._hosts[r.host].heard - r.since for r in behind]
        section = behind[0].section
        if min(ages) <= self.allowed(section):
            return None
        frozen = [r for r in behind if r.report.state == "T"]
        return self._act(
            "stall",
            frozen or behind,
            f"no progress for {min(ages):.1f} s in {section!r} of step {behind[0].step} "
            f"(allowed: {self.allowed(section):.1f} s)",
        )

    def _flood(self, clock: float) -> Action | None:
        wild = [
            r for r in self._ranks.values()
            if r.flood is not None and self._hosts[r.host].heard - r.flood > self.limits.silence
        ]  # fmt: skip
        if not wild:
            return None
        rate = self.limits.flood_bytes_per_s / 1e6
        return self._act("flood", wild, f"the log grows by more than {rate:g} MB/s")

    # ---- warnings, each once until its cause is gone

    def _warnings(self) -> list[Action]:
        found = [
            self._act("log", [self._ranks[rank]], line, kind="warn") for rank, line in self._words
        ]
        self._words = []
        return found + self._stragglers() + self._disks() + self._traffic()

    def _once(self, key: tuple[str, object], holds: bool) -> bool:
        if not holds:
            self._warned.discard(key)
            return False
        fresh = key not in self._warned
        self._warned.add(key)
        return fresh

    def _stragglers(self) -> list[Action]:
        ranks = list(self._ranks.values())
        if len(ranks) < 2 or any(len(r.own) < WINDOW for r in ranks):
            return []
        own = {r.report.rank: statistics.median(o for o, _ in r.own) for r in ranks}
        step_s = statistics.median(s for r in ranks for _, s in r.own)
        usual = statistics.median_low(own.values())
        found = []
        for r in ranks:
            more = (own[r.report.rank] - usual) / step_s
            if self._once(("straggler", r.report.rank), more > STRAGGLER):
                message = f"its own work takes {100 * more:.0f} % of a step longer than the others'"
                found.append(self._act("straggler", [r], message, kind="warn"))
        return found

    def _disks(self) -> list[Action]:
        found = []
        for name, host in self._hosts.items():
            if self._once(("disk", name), host.disk_free < self.limits.disk_free):
                free = host.disk_free / 2**30
                message = f"{name}: {free:.2f} GiB left on the disk"
                found.append(Action("warn", "disk", message, hosts=(name,)))
        return found

    def _traffic(self) -> list[Action]:
        found = []
        for name, host in self._hosts.items():
            full = len(host.per_step) == WINDOW
            usual = statistics.median(host.per_step) if full else 0.0
            now = max(list(host.per_step)[-3:], default=0.0)
            if self._once(("traffic", name), full and now < TRAFFIC * usual):
                message = f"{name}: {now:.3g} bytes a step, usually {usual:.3g}"
                found.append(Action("warn", "traffic", message, hosts=(name,)))
        return found


def _listed(values) -> str:
    found = list(dict.fromkeys(str(v) for v in values))
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _how(rank: _Rank) -> str:
    code, where = rank.report.code, f"in {rank.section!r}"
    if rank.section == "failed":
        where = "after an error or an early exit"
    if code is None:
        return f"ending {where}"
    if code == 0:
        return f"left too early {where}"
    return f"killed by signal {-code} {where}" if code < 0 else f"exit code {code} {where}"
