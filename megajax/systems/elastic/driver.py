"""The driver of a job: starts attempts, watches them, and after a fault starts the next one.

On a fault (MegaScale section 4): stacks of every rank, all processes ended, self-checks on every
host, bad hosts excluded, a pause, and the same command again. The command goes on from the newest
step that its checkpoint manager finds good. Hosts beyond the wanted number are hot spares; with
fewer the job goes on if the policy allows, because checkpoints reshard.

The driver is not a rank: a dead rank 0, and with it jax's coordinator, is a fault as any other. It
never logs in anywhere: agents come to it, started by itself on this machine, or by srun, JobSet or
Ray elsewhere. No jax import.
"""

import dataclasses
import selectors
import signal
import socket
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megajax.monitor.heartbeat import Progress
from megajax.monitor.reports import Action, HostReport, Limits, RankReport
from megajax.monitor.watchdog import Watchdog
from megajax.systems.elastic import checks
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.policy import ELSEWHERE, Policy, Recovery
from megajax.systems.elastic.wire import Line

TICK_S = 0.1  # (chosen)
ANSWER_S = 15.0  # (chosen) for stacks, and for the end of killed processes
CHECK_S = 400.0  # (chosen) for self-checks; those of GPUs may take 300
STEPS = 200  # (chosen) newest step times whose median enters the ETTR


@dataclasses.dataclass(frozen=True)
class Settings:
    """hosts: wanted at a time. processes: of a host. join: seconds to wait for agents.

    grace: seconds to save for a job that was told to stop. grid: of devices, 'pipe=2,tensor=8'.
    """

    command: tuple[str, ...]
    hosts: int = 1
    processes: int = 1
    join: float = 600.0
    grace: float = 600.0
    period: float = 1.0
    grid: str | None = None
    limits: Limits = Limits()
    policy: Policy = Policy()


@dataclasses.dataclass
class Host:
    """An agent that is there."""

    name: str
    line: Line
    address: str
    pid: int
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


class Driver:
    """`run` supervises the job to its end. signals: numbers that this process was sent."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        listener: socket.socket,
        token: str,
        show: Callable[[str], None],
        spawn: Callable[[str], subprocess.Popen] | None = None,
        spares: int = 0,
    ):
        """show: takes the output of rank 0. spawn: starts an agent of a name on this machine.

        spares: agents that `spawn` starts beyond settings.hosts.
        """
        self._settings, self._journal, self._token, self._show = settings, journal, token, show
        self._spawn = spawn
        self._local: dict[str, subprocess.Popen] = {}
        self._names = [f"local{i}" for i in range(settings.hosts + spares)] if spawn else []
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._hosts: dict[str, Host] = {}
        self._blocked: set[str] = set()
        self._recovery = Recovery(settings.policy)
        self._attempt = -1
        self._team: list[Host] = []
        self._dog: Watchdog | None = None
        self._evict: str | None = None
        self._step = self._first = 0
        self._steps: deque[float] = deque(maxlen=STEPS)
        self.signals: list[int] = []

    def run(self) -> int:
        """Returns the exit code, see policy."""
        began = time.monotonic()
        try:
            while True:
                if not self._gather():
                    return self._give_up(ELSEWHERE, "too few hosts came")
                self._start()
                action = self._watch()
                if action.kind == "done":
                    self._collect()
                    self._journal.event("done", action.message, code=action.code)
                    return action.code
                if (code := self._recover(action)) is not None:
                    return code
        finally:
            self._end(time.monotonic() - began)

    # ---- agents

    def _gather(self) -> bool:
        """Waits for agents: all wanted, or after a while the fewest that the policy allows."""
        wanted, end = self._settings.hosts, time.monotonic() + self._settings.join
        while len(self._good()) < wanted and not self.signals:
            for name in self._names:
                gone = name not in self._local or self._local[name].poll() is not None
                if self._spawn and gone and name not in self._blocked:
                    self._local[name] = self._spawn(name)
            missing = self._names and len(set(self._names) - self._blocked) < wanted
            if missing and len(self._good()) >= len(set(self._names) - self._blocked):
                break  # no others can come
            if time.monotonic() > end:
                break
            self._pump()
        return len(self._good()) >= self._settings.policy.min_hosts and bool(self._good())

    def _good(self) -> list[Host]:
        found = [h for h in self._hosts.values() if h.name not in self._blocked]
        return sorted(found, key=lambda h: h.name)

    def _pump(self, timeout: float = TICK_S) -> None:
        """Takes what agents say."""
        for key, _ in self._selector.select(timeout):
            line: Any = key.fileobj
            if line is self._listener:
                sock, _ = self._listener.accept()
                self._selector.register(Line(sock), selectors.EVENT_READ)
                continue
            try:
                for message in line.receive():
                    self._take(line, message)
            except OSError:
                self._drop(line)

    def _take(self, line: Line, message: dict[str, Any]) -> None:
        host = next((h for h in self._hosts.values() if h.line is line), None)
        if host is None:  # nobody yet
            if message.get("token") != self._token:
                raise ConnectionRefusedError("a stranger")
            if "evict" in message:
                self._evict = message["evict"]
                return
            host = Host(message["hello"], line, message["address"], message["pid"])
            if host.name in self._hosts:  # an agent that was thought of as there
                self._drop(self._hosts[host.name].line)
            self._hosts[host.name] = host
            self._journal.event("joined", host=host.name, address=host.address, pid=host.pid)
        elif "asked" in message:
            self.signals[:] = self.signals or [message["asked"]]  # many hosts ask at one time
        elif "out" in message:
            self._show(message["out"])
        elif "report" in message:
            if message["report"] == self._attempt and self._dog is not None and host in self._team:
                self._hear(host, message)
        else:
            host.answers |= message

    def _drop(self, line: Line) -> None:
        """Forgets an agent that hung up."""
        self._selector.unregister(line)
        line.close()
        for host in [h for h in self._hosts.values() if h.line is line]:
            del self._hosts[host.name]
            if self._dog is not None and host in self._team:
                self._dog.hang_up(host.name)

    def _send(self, hosts: Sequence[Host], **message: Any) -> None:
        for host in hosts:
            if host.name in self._hosts:
                try:
                    host.line.send(message)
                except OSError:
                    self._drop(host.line)

    def _ask(self, hosts: Sequence[Host], answer: str, seconds: float, **message: Any) -> list[Any]:
        """Returns what each host answers, None where it does not in time."""
        for host in hosts:
            host.answers.pop(answer, None)
        self._send(hosts, **message)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if all(answer in h.answers or h.name not in self._hosts for h in hosts):
                break
            self._pump()
        return [h.answers.get(answer) for h in hosts]

    # ---- an attempt

    def _start(self) -> None:
        """Starts all processes of the next attempt."""
        s = self._settings
        self._attempt += 1
        self._team = self._good()[: s.hosts]
        (port,) = self._ask(self._team[:1], "port", ANSWER_S, do="port")
        job = {
            "JAX_COORDINATOR_ADDRESS": f"{self._team[0].address}:{port}",
            "JAX_NUM_PROCESSES": str(s.processes * len(self._team)),
        }
        folder = self._journal.folder / f"attempt{self._attempt}"
        ranks, number = {}, 0
        for host in self._team:
            ranks[host.name] = range(number, number + s.processes)
            number += s.processes
        self._dog = Watchdog(ranks, s.limits, time.monotonic(), s.period)
        for host in self._team:
            # A process that is alone needs no coordinator.
            envs = {
                rank: job | {"JAX_PROCESS_ID": str(rank)} if number > 1 else {}
                for rank in ranks[host.name]
            }
            self._send(
                [host], do="start", attempt=self._attempt, command=s.command,
                folder=str(folder), ranks=envs, memory=self._recovery.trusts_memory,
            )  # fmt: skip
        names = ", ".join(h.name for h in self._team)
        self._journal.event("start", f"attempt {self._attempt}, {number} processes on {names}")

    def _hear(self, host: Host, message: dict[str, Any]) -> None:
        ranks = []
        for r in message["ranks"]:
            progress = None if r["progress"] is None else Progress(**r["progress"])
            ranks.append(
                RankReport(
                    r["rank"], r["state"], r["code"], progress, r["log_bytes"], tuple(r["words"])
                )
            )
            if progress is not None and progress.step > self._step:
                self._first = self._first or progress.step
                self._step = progress.step
                self._steps.append(progress.step_s)
        assert self._dog is not None
        report = HostReport(host.name, tuple(ranks), message["disk_free"], message["traffic"])
        self._dog.hear(time.monotonic(), report)

    def _watch(self) -> Action:
        """Waits for what ends this attempt. Warnings are recorded on the way."""
        assert self._dog is not None
        told, deadline = 0, float("inf")
        while True:
            self._pump()
            found = self._dog.judge(time.monotonic())
            for action in found:
                if action.kind == "warn":
                    self._record("warning", action)
            if found and found[0].kind != "warn":
                return self._saved(found[0]) if told else found[0]
            if self._evict is not None:
                name, self._evict = self._evict, None
                hit = tuple(h.name for h in self._team if h.name == name)
                if hit:
                    return Action("restart", "evicted", "evicted by hand", (), hit, self._step)
                self._block(name, "evicted by hand")
            if len(self.signals) > told:
                told = len(self.signals)
                self._journal.event("told", f"signal {self.signals[-1]}: the job may save and stop")
                self._send(self._team, do="tell", signal=signal.SIGTERM)
                deadline = time.monotonic() + self._settings.grace
            if told > 1 or time.monotonic() > deadline:
                code = ELSEWHERE
                return Action("stop", "told", "did not save in time", step=self._step, code=code)
            self._journal.gauge(
                step=self._step, attempt=self._attempt, hosts=len(self._team),
                excluded_hosts=len(self._blocked), restarts=self._recovery.restarts,
            )  # fmt: skip

    def _saved(self, action: Action) -> Action:
        """A fault of a job that was told to stop ends it; its last step is stored or not."""
        if action.kind == "done":
            return action
        return dataclasses.replace(action, kind="stop", code=ELSEWHERE)

    def _record(self, name: str, action: Action) -> None:
        self._journal.event(
            name, action.message, rule=action.rule, ranks=action.ranks, hosts=action.hosts,
            step=action.step, attempt=self._attempt,
        )  # fmt: skip

    # ---- after a fault

    def _recover(self, fault: Action) -> int | None:
        """Brings the job to rest and decides. Returns the exit code, None to try again."""
        self._dog = None
        self._record("fault", fault)
        for host in [h for h in self._team if fault.rule == "silence" and h.name in fault.hosts]:
            self._dismiss(host)  # nothing more can be had from it
        self._collect()
        stopped = self._ask(self._team, "stopped", ANSWER_S, do="stop")
        for host, answer in zip(self._team, stopped, strict=True):
            if answer is None:  # frozen or gone: its reaper ends what it started
                self._dismiss(host)
        bad: dict[str, str] = {}
        if fault.kind == "restart" and not self.signals:
            present = self._good()
            results = self._ask(present, "checks", CHECK_S, do="check")
            said = {h.name: r for h, r in zip(present, results, strict=True)}
            self._journal.event("checked", results=said)
            bad = checks.failing(said)
        candidates = {h.name for h in self._good()} | (set(self._names) - self._blocked)
        verdict = self._recovery.decide(fault, bad, candidates)
        for host, why in verdict.excluded.items():
            self._block(host, why)
        if self.signals and verdict.code is None:
            return self._give_up(ELSEWHERE, "told to stop between two attempts")
        if verdict.code is not None:
            return self._give_up(verdict.code, verdict.why)
        self._journal.event("restart", f"in {verdict.wait:g} s", restarts=self._recovery.restarts)
        end = time.monotonic() + verdict.wait
        while time.monotonic() < end and not self.signals:
            self._pump()
        return None

    def _collect(self) -> None:
        """Keeps the stacks of all ranks that live and the last sections of all."""
        for host in self._team:
            host.answers.pop("spans", None)
        stacks: dict[str, str] = {}
        spans: dict[str, list] = {}
        for found in self._ask(self._team, "stacks", ANSWER_S, do="dump"):
            stacks |= found or {}
        for host in self._team:
            spans |= host.answers.get("spans", {})
        each = self._settings.processes
        hosts = {r: self._team[r // each].name for r in range(each * len(self._team))}
        offsets = {h.name: self._offset(h) for h in self._team}
        self._journal.evidence(self._attempt, stacks, spans, hosts, offsets, self._settings.grid)

    def _offset(self, host: Host) -> float:
        """Returns the host's clock minus ours, from the quickest of three answers."""
        best, offset = float("inf"), 0.0
        for _ in range(3):
            asked = time.monotonic()
            (theirs,) = self._ask([host], "mine", 1.0, do="ping")
            ours = time.monotonic()
            if theirs is not None and ours - asked < best:
                best, offset = ours - asked, theirs - (asked + ours) / 2
        return offset

    def _block(self, name: str, why: str) -> None:
        self._blocked.add(name)
        self._journal.exclude(name, why)

    def _dismiss(self, host: Host) -> None:
        """Lets go of an agent that does not answer; one of this machine is killed."""
        if host.name in self._hosts:
            self._drop(host.line)
        if host.name in self._local:
            self._local[host.name].kill()
            self._local[host.name].wait()

    def _give_up(self, code: int, why: str) -> int:
        blocked = ", ".join(sorted(self._blocked)) or "none"
        self._journal.event("gave up", code=code, why=why)
        self._journal.report(
            f"gave up after attempt {self._attempt} at step {self._step}: {why}\n"
            f"exit code {code}; excluded hosts: {blocked}; stacks, logs and events: "
            f"{self._journal.folder}\n"
        )
        return code

    def _end(self, seconds: float) -> None:
        """Sends the agents home, and says what part of the time went into steps that count."""
        self._send(list(self._hosts.values()), do="quit")
        for agent in self._local.values():
            try:
                agent.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        usual = statistics.median(self._steps or [0.0])
        share = min(usual * (self._step - self._first + 1) / seconds, 1.0)
        self._journal.gauge(effective_time_ratio=share)
        self._journal.event("end", seconds=seconds, step=self._step, effective_time_ratio=share)
        self._journal.close()
        for host in self._hosts.values():
            host.line.close()
        self._listener.close()
        self._selector.close()
