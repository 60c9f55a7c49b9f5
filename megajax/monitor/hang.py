"""Names the rank for which all others wait, within seconds; `stall` and `stopped` act later.

When a collective hangs, the ranks that came to it say where they wait, and the one that did not is
silent or behind (MegaScale section 5.2). So a rank is named when the others have waited for it for
`after_s` seconds, and not for a section that rightly takes long: compilation, saves, evaluations.
Where all are in the same section the processes tell: one that a signal stopped, or the only one
that computes. This only names; a person, or the limits of job.py, end the attempt. No jax import.
"""

from collections.abc import Sequence

from megajax.monitor.alerts import Alert
from megajax.monitor.detectors import Rule
from megajax.monitor.job import FACTOR, Job, Rank
from megajax.monitor.records import Record

AFTER_S = 10.0  # (chosen): with a report a second, named in less than 15 s
BRIEF = ("data", "prepare", "launch", "wait")  # sections of a step
BUSY, IDLE = 0.5, 0.1  # (chosen) processors that a rank uses: it computes; it waits


class Hang(Rule):
    """A rank that does not come, while the others wait for it."""

    def __init__(self, job: Job, after_s: float = AFTER_S):
        """after_s: how long the others have waited when it is named."""
        super().__init__(job)
        self._after = after_s
        self._late: dict[int, float] = {}  # rank -> since when it alone is behind
        self._longest = 0.0  # that a rank was late for and then came

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert about those that are newly named."""
        job = self._job
        live = [r for r in job.ranks.values() if r.code is None]
        found = [self._silent(live), self._frozen(live), self._behind(live)]
        return [alert for alert in found if alert is not None]

    def _silent(self, live: Sequence[Rank]) -> Alert | None:
        """Hosts whose agents do not report, while most others do."""
        job = self._job
        quiet = {h.name: job.clock - h.heard for h in job.hosts.values()}
        hosts = [name for name, age in quiet.items() if age > self._after]
        is_new = self.is_new(("silent", *hosts), bool(hosts))
        if not hosts or 2 * len(hosts) >= len(quiet) > 1 or not is_new:
            return None
        ranks = [r for name in hosts for r in job.hosts[name].ranks]
        return job.alert("hang", ranks, f"nothing was heard of it for {quiet[hosts[0]]:.0f} s")

    def _frozen(self, live: Sequence[Rank]) -> Alert | None:
        job = self._job
        ranks = [r for r in live if r.is_frozen and job.clock - r.running > self._after]
        numbers = tuple(r.number for r in ranks)
        is_new = self.is_new(("frozen", *numbers), bool(ranks))
        if not ranks or len(ranks) == len(live) > 1 or not is_new:
            return None
        age = job.clock - min(r.running for r in ranks)
        section = ranks[0].section
        return job.alert("hang", ranks, f"stopped by a signal for {age:.0f} s, in {section!r}")

    def _behind(self, live: Sequence[Rank]) -> Alert | None:
        """The few that are behind, or in the same section the only one that computes."""
        job, back = self._job, self._job.behind()
        if len(live) < 2 or not back or back[0].section not in BRIEF:
            self._late.clear()
            return None
        late = back if 2 * len(back) < len(live) or len(back) < len(live) == 2 else []
        how = f"the others wait for it, which is in {back[0].section!r} of step {back[0].step}"
        allowed = max(self._after, min(FACTOR * self._longest, job.limits.step))
        if not late and len(back) == len(live):
            late = self._computing(back)
            how = f"it computes while the others wait, all in {back[0].section!r}"
            allowed = job.allowed(back[0].section, self._after)
        if any(r.section not in BRIEF for r in live):
            late = []  # of those ahead, some are in what takes long
        places = {r.number: r.since for r in late}
        for number, since in list(self._late.items()):
            if places.get(number) != since:  # it came
                del self._late[number]
                self._longest = max(self._longest, job.clock - since)
        self._late |= places
        late = [r for r in late if job.hosts[r.host].heard - r.since > allowed]
        if not late or not self.is_new(("behind", *places.items()), True):
            return None
        age = job.hosts[late[0].host].heard - late[0].since
        return job.alert("hang", late, f"{how}, for {age:.0f} s")

    def _computing(self, ranks: Sequence[Rank]) -> list[Rank]:
        busy = [r for r in ranks if r.number_of("cpu_cores") > BUSY]
        idle = [r for r in ranks if r.number_of("cpu_cores") < IDLE]
        return busy if len(busy) == 1 and len(idle) == len(ranks) - 1 else []
