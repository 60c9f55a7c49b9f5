"""The watchdog of one attempt of a job: records of all ranks in, actions out. Pure.

`hear` takes what agents report, each detector of a list looks at it (detectors.py), and what they
find becomes at most one action that ends the attempt, besides warnings (alerts.py). The clock is
handed in. Who is excluded, and how often to try, is the driver's business. No jax import.
"""

from collections.abc import Mapping, Sequence

from megajax.monitor.alerts import RESPONSES, Action, Alert, Kind, respond
from megajax.monitor.detectors import DETECTORS, NEEDED, Detector, Maker
from megajax.monitor.job import Job, Limits
from megajax.monitor.records import Record


class Watchdog:
    """`hear` and `hang_up` take what happens, `judge` decides."""

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        limits: Limits,
        now: float,
        period: float = 1.0,
        detectors: Mapping[str, Maker] = DETECTORS,
        responses: Mapping[str, Kind] = RESPONSES,
    ):
        """ranks: of each host. period: seconds between the reports of an agent. detectors: by name.

        responses: what is done about an alert, by its rule.
        """
        self.job = Job(ranks, limits, now, period)
        self._responses = responses
        self._detectors: dict[str, Detector] = {n: make(self.job) for n, make in detectors.items()}
        self._fresh: list[Record] = []

    def hang_up(self, host: str, why: str = "") -> None:
        """The connection to an agent is gone."""
        self.job.gone[host] = why

    def hear(self, now: float, host: str, records: Sequence[Record]) -> None:
        """Takes a report of a host's agent."""
        self.job.hear(now, host, records)
        self._fresh += records

    def judge(self, now: float) -> list[Action]:
        """Returns what is to be done; an action that ends the attempt comes first."""
        self.job.look(now)
        records, self._fresh = self._fresh, []
        alerts: list[Alert] = []
        for name, detector in list(self._detectors.items()):
            try:
                alerts += detector.watch(records)
            except Exception as error:  # of whoever wrote it: no reason to end a job
                if name == NEEDED:
                    raise
                del self._detectors[name]
                why = f"the detector {name!r} fails and is switched off: {error!r:.200}"
                alerts.append(Alert("detector", why))
        return respond(alerts, self._responses)
