"""A storm over a supervised job: one fault after another, each followed until training goes on.

A fault strikes while the job trains calmly. What must be found is found by the driver, under the
right rule and name; then the job trains again. What must be survived without a restart is followed
for some steps. A fault that the driver reports and nobody made is a false alarm.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from experiments.storm.cluster import Cluster, Tail
from experiments.storm.deeds import Deeds, Hit
from experiments.storm.plan import KINDS, Strike
from megajax.core.errors import UserError

TICK_S = 0.2  # (chosen)
CALM = 25  # (chosen) steps without a fault before the next: a save, and a straggler's window
AFTER = 8  # (chosen) steps after which a fault that needs no restart counts as survived
SWEEP_S = 65.0  # after that an agent removes what others left in shared memory (elastic/shared.py)


@dataclass
class Case:
    """A fault that struck, and what became of it. Times are seconds since the epoch."""

    strike: Strike
    hit: Hit
    at: float
    step: int
    attempt: int
    found: float | None = None  # when it was detected
    back: float | None = None  # when a step ended after that
    calmed: float | None = None  # when it was taken back
    rule: str | None = None
    said: str = ""
    right: bool | None = None  # whether the right one was named
    resumed: int | None = None
    alarms: int = 0  # faults reported where none was to be
    again: int = 0  # more faults on the way back

    @property
    def done(self) -> bool:
        """Whether the next may come."""
        return self.back is not None and self.calmed is not None


@dataclass
class Seen:
    """What the job has said so far."""

    events: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Storm:
    """Runs the faults of a plan over a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        deeds: Deeds,
        plan: Iterator[Strike],
        limit_s: float,
        say: Any = print,
    ):
        """limit_s: after that a job that does not train again is lost."""
        self._cluster, self._deeds, self._plan = cluster, deeds, plan
        self._limit, self._say = limit_s, say
        self._tails = (
            Tail(cluster.out / "events.jsonl"),
            Tail(cluster.run_dir / "metrics.jsonl"),
        )
        self._output = Tail(cluster.folder / "driver.txt")
        self.seen = Seen()
        self.cases: list[Case] = []
        self.alarms: list[dict[str, Any]] = []  # faults between two cases
        self.excluded: list[dict[str, Any]] = []  # hosts that nothing in the program speaks against
        self._since_start = 0  # steps of this attempt
        self._resumed: int | None = None
        self._codes = 0
        self.began = time.time()

    @property
    def step(self) -> int:
        """The last step that was finished."""
        return self.seen.rows[-1]["step"] if self.seen.rows else 0

    def run(self, seconds: float) -> None:
        """Strikes until time is up, and returns when the last fault is over. Raises: UserError.

        seconds: from the first step on.
        """
        end, moved = float("inf"), time.monotonic()
        case: Case | None = None
        while case is not None or time.monotonic() < end:
            if self.watch(case):
                moved = time.monotonic()
                if end == float("inf"):
                    end, self.began = moved + seconds, time.time()
            if time.monotonic() - moved > self._limit:
                raise UserError(
                    f"no step for {self._limit:.0f} s, after {case}: "
                    f"{self._cluster.tail('driver.txt')}"
                )
            if case is not None:
                self._follow(case)
                if case.done:
                    self._tell(case)
                    case = None
            elif self._since_start >= CALM and time.monotonic() < end:
                case = self._strike()
            time.sleep(TICK_S)
        if self._deeds.reaper_killed:
            rest = time.monotonic() + SWEEP_S
            while time.monotonic() < rest:
                self.watch(None)
                time.sleep(TICK_S)

    def watch(self, case: Case | None) -> bool:
        """Takes what is new, and gives it to the fault that is under way. Tells progress."""
        self._cluster.tick()
        events, rows = (tail.rows() for tail in self._tails)
        for line in self._output.lines():
            if "resumed after step " in line:
                self._resumed = int(line.split("resumed after step ")[1].split()[0].strip(","))
        for event in events:
            self._event(event, case)
        rows = [r for r in rows if "step_time_s" in r]
        self._since_start += len(rows)
        self.seen.events += events
        self.seen.rows += rows
        if case is not None:
            for row in rows:
                self._row(row, case)
        return bool(rows)

    def _event(self, event: dict[str, Any], case: Case | None) -> None:
        if event["event"] == "start":
            self._since_start = 0
            self._deeds.attempt = int(event["message"].split()[1].strip(","))
        rules = KINDS[case.strike.kind].rules if case is not None else ()
        if event["event"] == "warning" and "straggler" in rules:
            if case is not None and case.found is None and event["rule"] == "straggler":
                self._found(case, event, event["time"])
        if event["event"] == "excluded" and not self._deeds.errors:
            self.excluded.append(event)
            self._say(f"INNOCENT: {event['message']}")
        if event["event"] != "fault":
            return
        if case is None:
            self.alarms.append(event)
            self._say(f"false alarm: {event['rule']}: {event['message']}")
        elif case.found is None and rules and "straggler" not in rules:
            self._found(case, event, event["time"])
        elif rules and "straggler" not in rules:
            case.again += 1
        else:
            case.alarms += 1
            case.said = event["message"]

    def _found(self, case: Case, event: dict[str, Any], at: float) -> None:
        kind = KINDS[case.strike.kind]
        case.found, case.rule, case.said = at, event["rule"], event["message"]
        named = set(event["ranks"]) & set(case.hit.ranks) | set(event["hosts"]) & set(
            case.hit.hosts
        )
        nobody = kind.target == "none" and not event["hosts"]
        case.right = (bool(named) or nobody) and event["rule"] in kind.rules

    def _row(self, row: dict[str, Any], case: Case) -> None:
        """A step ended."""
        kind = KINDS[case.strike.kind]
        if kind.rules and "straggler" not in kind.rules:
            fresh = case.found is not None and row["time"] > case.found
            if fresh and case.back is None and self._deeds.attempt > case.attempt:
                case.back, case.resumed = row["time"], self._resumed
            return
        if "straggler" in kind.rules:
            late = row["step"] > case.step + 60 and case.found is None
            case.back = row["time"] if case.found is not None or late else None
            return
        if case.calmed is not None and row["time"] > case.calmed:
            if row["step"] >= case.step + AFTER and self._since_start >= AFTER:
                case.back = row["time"]

    def _strike(self) -> Case | None:
        strike = next(self._plan)
        hit = self._deeds.do(strike)
        if hit is None:
            self._say(f"{strike.kind}: nothing to strike now")
            return None
        case = Case(strike, hit, time.time(), self.step, self._deeds.attempt)
        self._codes = len(self._cluster.codes)
        self.cases.append(case)
        self._say(f"{case.at - self.began:5.0f} s, step {case.step}: {strike.kind} {_where(hit)}")
        return case

    def _follow(self, case: Case) -> None:
        kind, now = KINDS[case.strike.kind], time.time()
        if case.calmed is None and now - case.at >= (kind.hold_s or 0.0):
            case.hit.back()
            case.calmed = time.time()
        ended = self._cluster.codes[self._codes :]
        if case.found is None and ended and kind.rules in (("told",), ("gone",)):
            told = ended[0] == 143
            case.found, case.rule = now, "told" if told else "gone"
            case.said, case.right = f"the driver ended with {ended[0]}", case.rule in kind.rules

    def _tell(self, case: Case) -> None:
        late = 0.0 if case.found is None else case.found - case.at
        found = "not found" if case.found is None else f"{case.rule} after {late:.1f} s"
        assert case.back is not None
        wrong = "" if case.right in (None, True) else ", WRONGLY NAMED"
        alarms = f", {case.alarms} FALSE ALARMS" if case.alarms else ""
        wanted = bool(KINDS[case.strike.kind].rules)
        self._say(
            f"        {found if wanted else 'no restart'}{wrong}{alarms}, training after "
            f"{case.back - case.at:.1f} s: {case.said}"
        )


def _where(hit: Hit) -> str:
    words = [f"rank {r}" for r in hit.ranks] + list(hit.hosts) + ([hit.note] if hit.note else [])
    return ", ".join(words)
