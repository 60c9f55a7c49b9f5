"""The driver of a job: starts attempts, watches them, and after a fault starts the next one.

On a fault (MegaScale section 4): stacks of every rank, all processes ended, self-checks on every
host, bad hosts excluded, a pause, and the same command again. The command goes on from the newest
step that its checkpoint manager finds good. Hosts beyond the wanted number are hot spares; with
fewer the job goes on if the policy allows, because checkpoints reshard.

The driver is not a rank, so that the end of rank 0, which runs jax's coordinator, is a fault like
any other. It never logs in anywhere: agents connect to it, which it starts itself on this machine,
and which srun, JobSet or Ray start elsewhere. Hosts holds the connections to the agents and calls
the driver's `on_*` methods for messages that are no answers. No jax import.
"""

import dataclasses
import selectors
import signal
import socket
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megajax.monitor import records
from megajax.monitor.alerts import RESPONSES, Action
from megajax.monitor.detectors import DETECTORS, Limits, Maker, Watchdog
from megajax.monitor.heartbeat import LOOK_S
from megajax.systems.elastic import checks, reaper
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.policy import (
    EARLY,
    ELSEWHERE,
    USAGE,
    Guard,
    Policy,
    Recovery,
    Verdict,
    after,
    ended,
    to_evict,
)
from megajax.systems.elastic.wire import AGENT, OPERATOR, Door, Line, Tls, join_address

# ---- the hosts of a job: agents that came, were asked, hung up, are excluded
#
# Agents come by themselves, or this machine's are started by `spawn`; the driver never logs in
# anywhere. Only who holds the job's secret comes in (wire.py), and an error in what one connection
# says ends that connection only.


TICK_S = 0.1  # (chosen)
LONGEST_LOOK_S = (
    2.0  # (chosen) a longer time between two looks is this driver's, and nobody's delay
)
ANSWER_S = 15.0  # (chosen) for stacks, and for the end of killed processes
WAITING_S = 30.0  # (chosen) between two words about agents that are missing
SPARES_S = 10.0  # (chosen) for spares of this machine to come, though enough are there
SPAWN_S = 1.0  # (chosen) between two starts of one agent
QUIET_S = 5.0  # (chosen) after that an agent gives way to another of its name
Spawn = Callable[[str], subprocess.Popen]


@dataclasses.dataclass
class Host:
    """An agent that is connected, and its host."""

    name: str
    line: Line
    address: str
    pid: int
    heard: float  # when it last said something
    mark: str = ""  # in the environment of all that it starts
    leased: float = float("-inf")  # when it was last told that its processes may go on
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


class Hosts:
    """All agents of a driver."""

    def __init__(
        self,
        owner: "Driver",
        listener: socket.socket,
        secret: str,
        spawn: Spawn | None = None,
        count: int = 0,
        tls: Tls | None = None,
    ):
        """spawn: starts an agent of a name on this machine. count: number of agents to start."""
        self._owner, self._spawn = owner, spawn
        self._selector = selectors.DefaultSelector()
        serves = (AGENT, OPERATOR)
        self._door = Door(listener, self._selector, secret, serves, owner.on_refused, tls)
        self._local: dict[str, subprocess.Popen] = {}
        self._next: dict[str, float] = {}  # when each may be started again
        self._names = [f"local{i}" for i in range(count)] if spawn else []
        self._present: dict[str, Host] = {}
        self._looked, self._clock = time.monotonic(), 0.0
        self.blocked: set[str] = set()

    @property
    def clock(self) -> float:
        """Seconds, by which all waiting for agents is measured. They go on while this process
        looks: one that was frozen for a minute has not waited for a minute."""
        now = time.monotonic()
        self._clock += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        return self._clock

    def gather(self, count: int, least: int, seconds: float, stop: Callable[[], bool]) -> bool:
        """Waits for agents; tells whether the job can start.

        count: hosts that train at a time. least: fewest hosts that are enough after `seconds`.
        stop: whether to end the wait early.
        """
        began = self.clock
        end = began + seconds
        # Those of this machine come by themselves, and soon.
        word = began + (WAITING_S if self._names else 0.0)
        while not stop():
            awaited = self.candidates() if self.clock < began + SPARES_S else ()
            if len(self.good()) >= max(count, len(awaited)):
                break
            for name in self._names:
                # Not at once when it has just been tried: an agent that ends at its start would
                # keep the machine busy.
                gone = name not in self._local or self._local[name].poll() is not None
                is_due = time.monotonic() >= self._next.get(name, 0.0)
                if self._spawn and gone and is_due and name not in self.blocked:
                    self._next[name] = time.monotonic() + SPAWN_S
                    self._local[name] = self._spawn(name)
            possible = len(set(self._names) - self.blocked)
            if self._names and possible < count and len(self.good()) >= possible:
                break  # no others can come
            now = self.clock
            if now > end:
                break
            if now >= word:
                word = now + WAITING_S
                self._owner.on_wait(end - now)
            self.pump()
        return len(self.good()) >= max(least, 1)

    def good(self) -> list[Host]:
        """Returns the hosts that are present and not excluded, by name."""
        hosts = [h for h in self._present.values() if h.name not in self.blocked]
        return sorted(hosts, key=lambda h: h.name)

    def choose(self, team: Sequence[Host], count: int, moves: Collection[str] = ()) -> list[Host]:
        """Returns the hosts of the next attempt, at most `count`.

        Each host of the former team gets its former place, for which it has copies in memory; other
        hosts fill the places of those that are gone. moves: hosts that must not get their former
        place; they come last, and if there is no other host, all hosts exchange their places.
        """
        good = {h.name: h for h in self.good()}
        last = [good.pop(name) for name in sorted(moves) if name in good]
        former = [good.pop(h.name, None) for h in team]
        others = iter([*good.values(), *last])
        places = [h or next(others, None) for h in former]
        chosen = [h for h in (*places, *others) if h is not None][:count]
        if any(a.name == b.name in moves for a, b in zip(chosen, team, strict=False)):
            chosen = [*chosen[1:], *chosen[:1]]
        return chosen

    def has(self, host: Host) -> bool:
        """Tells whether this agent is connected, and not another one of the same name."""
        return self._present.get(host.name) is host

    def candidates(self) -> set[str]:
        """Returns the names of hosts that are not excluded and present, or can be started."""
        return {h.name for h in self.good()} | (set(self._names) - self.blocked)

    def pump(self, timeout: float = TICK_S) -> None:
        """Receives and handles the messages of agents."""
        _ = self.clock
        for key, _ in self._selector.select(timeout):
            line: Any = key.fileobj
            if line is self._door.listener:
                self._door.accept()
            elif not line.closed:  # another of this turn's messages may have ended it
                self._hear(line)
        self._door.sweep()

    def _hear(self, line: Line) -> None:
        """Handles the messages of one connection; an error ends this connection only."""
        try:
            messages = line.receive()
            if not self._door.admits(line):
                return
            for message in messages:
                self._take(line, message)
                if line.closed:
                    return
        except OSError as error:
            self._drop(line, str(error))
        except Exception as error:  # of an agent of another version, or a broken one
            self._door.refuse(line.name, f"said what cannot be used: {error!r:.200}")
            self._drop(line, "said what cannot be used")

    def _take(self, line: Line, message: dict[str, Any]) -> None:
        host = next((h for h in self._present.values() if h.line is line), None)
        if line.purpose == OPERATOR:
            if "readmit" in message:
                self._owner.on_readmit(str(message["readmit"]))
            else:
                self._owner.on_evict(str(message["evict"]))
        elif host is None:
            self._join(line, message)
        else:
            host.heard = self.clock
            if "unable" in message:
                self._owner.on_unable(host, str(message["unable"]))
            elif "asked" in message:
                self._owner.on_asked(int(message["asked"]))
            elif "out" in message:
                self._owner.on_output(str(message["out"]))
            elif "report" in message:
                host.leased = time.monotonic()
                self.send([host], do="lease", since=message["moment"])  # a moment of its clock
                self._owner.on_report(host, message)
            else:
                host.answers |= message

    def _join(self, line: Line, message: dict[str, Any]) -> None:
        """Accepts an agent; it replaces one of the same name that is silent."""
        known = self._present.get(line.name)
        if known is not None:
            quiet = self.clock - known.heard
            if quiet < QUIET_S:  # or two hosts of one name would end one another for ever
                line.send({"do": "wait", "why": f"another agent is called {line.name} (--name)"})
                self._drop(line, "its name is taken")
                return
            self._drop(known.line, f"silent for {quiet:.0f} s, and another came")
        address, pid = str(message["address"]), int(message["pid"])
        host = Host(line.name, line, address, pid, self.clock, str(message.get("mark", "")))
        self._present[host.name] = host
        self._owner.on_join(host)
        line.send({"do": "welcome"})

    def _drop(self, line: Line, why: str = "") -> None:
        """Ends a connection and removes its agent."""
        self._door.turn_away(line, why)
        for host in [h for h in self._present.values() if h.line is line]:
            del self._present[host.name]
            self._owner.on_hang_up(host, why)

    def send(self, hosts: Sequence[Host], **message: Any) -> None:
        """Sends a message to hosts; a host that cannot be reached is removed."""
        for host in hosts:
            if self.has(host):
                try:
                    host.line.send(message)
                except OSError as error:
                    self._drop(host.line, str(error))

    def ask(
        self,
        hosts: Sequence[Host],
        answer: str,
        seconds: float,
        stop: Callable[[], bool] = lambda: False,
        **message: Any,
    ) -> list[Any]:
        """Returns each host's answer, None if it does not answer in time. stop: ends the wait."""
        return self.ask_each({h.name: message for h in hosts}, hosts, answer, seconds, stop)

    def ask_each(
        self,
        messages: dict[str, dict],
        hosts: Sequence[Host],
        answer: str,
        seconds: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """Does the same as `ask`, with a message for each host by its name."""
        for host in hosts:
            host.answers.pop(answer, None)
            self.send([host], **messages[host.name])
        end = self.clock + seconds
        while self.clock < end and not stop():
            if all(answer in h.answers or not self.has(h) for h in hosts):
                break
            self.pump()
        return [h.answers.get(answer) for h in hosts]

    def clock_offset(self, host: Host) -> float:
        """Returns the host's clock minus ours, from the quickest of three answers."""
        best, offset = float("inf"), 0.0
        for _ in range(3):
            asked = time.monotonic()
            (theirs,) = self.ask([host], "mine", 1.0, do="ping")
            ours = time.monotonic()
            if theirs is None:
                break  # it does not answer, and others wait to be asked
            if ours - asked < best:
                best, offset = ours - asked, theirs - (asked + ours) / 2
        return offset

    def dismiss(self, host: Host) -> bool:
        """Removes an agent that does not answer; tells whether its processes have certainly ended.

        An agent of this machine is killed, with all processes that it started.
        """
        self._drop(host.line)
        agent = self._local.get(host.name)
        if agent is None:
            return False
        if agent.pid == host.pid:
            agent.kill()
            agent.wait()
        return bool(host.mark) and reaper.kill_all(lambda: reaper.marked(host.mark), ANSWER_S)

    def close(self) -> None:
        """Tells all agents to quit; those of this machine are killed after ANSWER_S."""
        self.send(list(self._present.values()), do="quit")
        end = time.monotonic() + ANSWER_S
        late = []
        for agent in self._local.values():
            try:
                agent.wait(max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                late.append(agent)
                agent.kill()
        for agent in late:
            agent.wait()
        for host in self._present.values():
            host.line.close()
        self._door.close()
        self._selector.close()


# ---- what a driver is told of its job


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a driver.

    command: the training command. hosts: number of hosts that train at a time. processes: processes
    on each host. join: seconds to wait for agents. grace: seconds to save for a job that was told
    to stop. period: seconds between two reports of an agent. grid: mesh of all devices, for
    pictures, such as 'pipe=2,tensor=8'. limits: of the watchdog. policy: of recovery. invite: a
    sentence that says how to start a missing agent. detectors: by name. guard: decides whether a
    detector may evict a host; None: it may. again: the command line of this driver.
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
    invite: str = ""
    detectors: Mapping[str, Maker] = dataclasses.field(default_factory=lambda: DETECTORS)
    guard: Guard | None = None
    again: str = "the same command"


# ---- the driver


LEASE_S = 1.0 + 2 * LOOK_S  # (chosen) for a process whose lease has run out to be gone
NO_FAULTS = ("superseded", EARLY)  # rules of ends that nobody is at fault for
STEPS = 200  # (chosen) newest step times whose median enters the ETTR


class Driver:
    """`run` supervises the job to its end. signals: numbers that this process was sent."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        listener: socket.socket,
        secret: str,
        show: Callable[[str], None],
        spawn: Spawn | None = None,
        spares: int = 0,
        tls: Tls | None = None,
    ):
        """show: takes the output of rank 0. spawn: starts an agent of a name on this machine.

        spares: agents that `spawn` starts beyond settings.hosts.
        """
        self._settings, self._journal, self._show = settings, journal, show
        self._hosts = Hosts(self, listener, secret, spawn, settings.hosts + spares, tls)
        self._recovery = Recovery(settings.policy)
        self._attempt = journal.last_attempt()
        self._first_attempt = self._attempt + 1
        self._fenced = 0.0  # until when processes of lost hosts may go on
        self._team: list[Host] = []
        self._verdict = Verdict(None, "nothing has happened yet")
        self._dog: Watchdog | None = None
        self._kinds: dict[str, str] = {}  # of the devices of hosts, as far as attempts said it
        self._evict: str | None = None
        self._unable: Action | None = None
        self._step = self._first = 0
        self._steps: deque[float] = deque(maxlen=STEPS)
        self.signals: list[int] = []

    def run(self) -> int:
        """Returns the exit code, see policy."""
        began, s = time.monotonic(), self._settings
        try:
            while True:
                least = s.policy.min_hosts
                if not self._hosts.gather(s.hosts, least, s.join, lambda: bool(self.signals)):
                    came = f"{len(self._hosts.good())} hosts came of at least {least} (--join_s)"
                    told = f"told to stop (signal {self.signals[0]}); " if self.signals else ""
                    return self._give_up(ELSEWHERE, told + came)
                if not self._wait_for_leases():
                    return self._give_up(ELSEWHERE, "told to stop between two attempts")
                if not self._start():
                    continue
                action = self._watch()
                if action.kind == "done":
                    self._collect()
                    self._journal.event("done", action.message, code=action.code)
                    return action.code
                if (code := self._recover(action)) is not None:
                    return code
        finally:
            self._end(time.monotonic() - began)

    # ---- what agents say unasked

    def on_join(self, host: Host) -> None:
        """An agent has connected."""
        self._journal.event("joined", host=host.name, address=host.address, pid=host.pid)

    def on_hang_up(self, host: Host, why: str) -> None:
        """An agent is gone."""
        if self._dog is not None and host in self._team:
            self._dog.hang_up(host.name, why)

    def on_asked(self, signal: int) -> None:
        """An agent got a signal that asks the job to stop."""
        self.signals[:] = self.signals or [signal]  # many hosts ask at one time

    def on_evict(self, name: str) -> None:
        """An operator wants a host to be evicted."""
        self._evict = name

    def on_readmit(self, name: str) -> None:
        """An operator says that an excluded host is good."""
        self._readmit(name, "by hand")

    def on_output(self, text: str) -> None:
        """Rank 0 printed something."""
        self._show(text)

    def on_refused(self, address: str, why: str, count: int) -> None:
        """A connection was ended, and nothing else."""
        self._journal.event("refused", f"{address} {why}", address=address, count=count)

    def on_unable(self, host: Host, why: str) -> None:
        """A host cannot start the command: a mistake in the command, not a fault to go on after."""
        message = f"{host.name} {why}; correct the command behind --"
        self._unable = Action("stop", "command", message, (), (host.name,), self._step, USAGE)

    def on_wait(self, seconds: float) -> None:
        """Agents are missing; the driver waits for them for so many seconds more."""
        s, present = self._settings, [h.name for h in self._hosts.good()]
        self._journal.event(
            "waiting",
            f"{len(present)} of {s.hosts} hosts are here ({', '.join(present) or 'none'}); waiting "
            f"for the agents of the others for {seconds:.0f} s more (--join_s){s.invite}",
        )

    def on_report(self, host: Host, message: dict[str, Any]) -> None:
        """The report of an agent arrived."""
        if message["report"] != self._attempt or self._dog is None or host not in self._team:
            return
        report = records.parse(host.name, message["records"])
        for r in report:
            if r.name == "step_s" and r.step is not None and r.step > self._step:
                self._first = self._first or r.step
                self._step = r.step
                self._steps.append(float(r.value or 0.0))
        self._dog.hear(time.monotonic(), host.name, report)
        self._journal.take(report)

    # ---- an attempt

    def _start(self) -> bool:
        """Starts all processes of the next attempt. Tells whether all of its hosts answered."""
        s = self._settings
        self._team = self._hosts.choose(self._team, s.hosts, self._verdict.moves)
        moments = self._hosts.ask(self._team, "moment", ANSWER_S, do="moment")
        (port,) = self._hosts.ask(self._team[:1], "port", ANSWER_S, do="port")
        if port is None or None in moments:
            for host, moment in zip(self._team, moments, strict=True):
                if moment is None:  # nothing of it runs
                    self._hosts.dismiss(host)
            return False
        self._attempt += 1
        self._journal.begin(self._attempt)
        job = {
            "JAX_COORDINATOR_ADDRESS": join_address(self._team[0].address, port),
            "JAX_NUM_PROCESSES": str(s.processes * len(self._team)),
        }
        folder = self._journal.folder / f"attempt{self._attempt}"
        ranks, number = {}, 0
        for host in self._team:
            ranks[host.name] = range(number, number + s.processes)
            number += s.processes
        responses = {**RESPONSES, **s.policy.responses}
        now = time.monotonic()
        self._dog = Watchdog(ranks, s.limits, now, s.period, s.detectors, responses)
        for host, moment in zip(self._team, moments, strict=True):
            # A process that is alone needs no coordinator.
            envs = {
                rank: job | {"JAX_PROCESS_ID": str(rank)} if number > 1 else {}
                for rank in ranks[host.name]
            }
            self._hosts.send(
                [host],
                do="start",
                attempt=self._attempt,
                command=s.command,
                folder=str(folder),
                ranks=envs,
                memory=self._verdict.memory,
                lease=s.limits.silence,
                since=moment,
                run=self._journal.run,
            )
            host.leased = time.monotonic()
        names = ", ".join(h.name for h in self._team)
        self._journal.event("start", f"attempt {self._attempt}, {number} processes on {names}")
        return True

    def _watch(self) -> Action:
        """Waits for the action that ends this attempt, and records warnings."""
        assert self._dog is not None
        s, told, deadline = self._settings, 0, float("inf")
        leaving: Action | None = None  # takes a host out as soon as the job has saved
        while True:
            self._hosts.pump()
            if s.guard is not None:
                for name in self._recovery.acquitted(s.guard):
                    self._readmit(name, "its eviction was a false alarm")
            if self._unable is not None:
                return self._unable
            actions = self._dog.judge(time.monotonic())
            for action in actions:
                if not action.ends_the_attempt:
                    self._record("warning", action)
            if actions and actions[0].ends_the_attempt:
                return ended(actions[0], told > 0, leaving, self._dog.job.is_up())
            if self._evict is not None:
                name, self._evict = self._evict, None
                hit = tuple(h.name for h in self._team if h.name == name)
                if hit:
                    return Action("evict", "evicted", "evicted by hand", (), hit, self._step)
                self._block(name, "evicted by hand")
            if leaving is None and not told and any(a.kind == "evict" for a in actions):
                others = self._hosts.candidates()
                event = self._journal.event
                leaving = to_evict(actions, others, s.policy.min_hosts, s.guard, event)
                if leaving is not None:
                    deadline = self._tell(f"{leaving.message}: the job may save, and go on without")
            if len(self.signals) > told:
                told = len(self.signals)
                deadline = self._tell(f"signal {self.signals[-1]}: the job may save and stop")
            if told > 1 or self._hosts.clock > deadline:
                if leaving is not None and not told:
                    return leaving
                code = ELSEWHERE
                return Action("stop", "told", "did not save in time", step=self._step, code=code)
            self._journal.gauge(
                step=self._step,
                attempt=self._attempt,
                hosts=len(self._team),
                excluded_hosts=len(self._hosts.blocked),
                restarts=self._recovery.restarts,
            )

    def _tell(self, why: str) -> float:
        """Tells all ranks to save and stop. Returns their deadline, by the clock of the hosts."""
        self._journal.event("told", why)
        self._hosts.send(self._team, do="tell", signal=signal.SIGTERM)
        return self._hosts.clock + self._settings.grace

    def _record(self, name: str, action: Action) -> None:
        self._journal.event(
            name,
            action.message,
            rule=action.rule,
            ranks=action.ranks,
            hosts=action.hosts,
            step=action.step,
            attempt=self._attempt,
        )

    # ---- after a fault

    def _recover(self, fault: Action) -> int | None:
        """Brings the job to rest and decides. Returns the exit code, None to try again."""
        if self._dog is not None:
            hosts = self._dog.job.hosts.values()
            self._kinds |= {host.name: host.kind for host in hosts if host.kind}
        self._dog = None
        self._record(fault.rule if fault.rule in NO_FAULTS else "fault", fault)
        for host in [h for h in self._team if fault.rule == "silence" and h.name in fault.hosts]:
            self._dismiss(host)  # nothing more can be had from it
        self._collect()
        stopped = self._hosts.ask(self._team, "stopped", ANSWER_S, do="stop")
        for host, answer in zip(self._team, stopped, strict=True):
            if answer is None:  # frozen or gone: its reaper ends what it started
                self._dismiss(host)
        bad: dict[str, str] = {}
        says_nothing = fault.kind == "stop" or fault.cause == "temporary" or fault.rule == "driver"
        if not (
            says_nothing or self.signals
        ):  # a full disk and a frozen driver say nothing of hosts
            checked = checks.check_all(
                self._hosts, fault.hosts, lambda: bool(self.signals), self._kinds
            )
            if checked is not None:
                bad, results, links = checked
                self._journal.event("checked", results=results, links=links)
        verdict = self._verdict = self._recovery.decide(fault, bad, self._hosts.candidates())
        for host, why in verdict.excluded.items():
            self._block(host, why)
        if self.signals and verdict.code is None:
            return self._give_up(ELSEWHERE, "told to stop between two attempts")
        if verdict.code is not None:
            return self._give_up(verdict.code, verdict.why)
        self._journal.event("restart", f"in {verdict.wait:g} s", restarts=self._recovery.restarts)
        end = time.monotonic() + verdict.wait
        while time.monotonic() < end and not self.signals:
            self._hosts.pump()
        return None

    def _dismiss(self, host: Host) -> None:
        """Removes an agent that does not answer; its processes may go on until their lease ends."""
        if not self._hosts.dismiss(host):
            until = host.leased + self._settings.limits.silence + LEASE_S
            self._fenced = max(self._fenced, until)

    def _wait_for_leases(self) -> bool:
        """Waits until no process of a removed host can run. Tells whether no signal came meanwhile.

        Two that save into one folder would make two histories of one run.
        """
        left = self._fenced - time.monotonic()
        if left > 0:
            why = f"{left:.1f} s, until the processes of a lost host have ended themselves"
            self._journal.event("fenced", why, seconds=left)
        while time.monotonic() < self._fenced and not self.signals:
            self._hosts.pump()
        return time.monotonic() >= self._fenced

    def _collect(self) -> None:
        """Stores the stacks of all living ranks, and the last sections of all ranks."""
        for host in self._team:
            host.answers.pop("spans", None)
        stacks: dict[str, str] = {}
        spans: dict[str, list] = {}
        for answer in self._hosts.ask(self._team, "stacks", ANSWER_S, do="dump"):
            stacks |= answer or {}
        for host in self._team:
            spans |= host.answers.get("spans", {})
        each = self._settings.processes
        hosts = {r: self._team[r // each].name for r in range(each * len(self._team))}
        offsets = {h.name: self._hosts.clock_offset(h) for h in self._team}
        self._journal.evidence(self._attempt, stacks, spans, hosts, offsets, self._settings.grid)

    def _block(self, name: str, why: str) -> None:
        self._hosts.blocked.add(name)
        self._journal.exclude(name, why)

    def _readmit(self, name: str, why: str) -> None:
        """Makes an excluded host a spare again."""
        self._hosts.blocked.discard(name)
        self._recovery.forgive(name)
        self._journal.readmit(name, why)

    def _give_up(self, code: int, why: str) -> int:
        blocked = ", ".join(sorted(self._hosts.blocked)) or "none"
        self._journal.event("gave up", code=code, why=why)
        when = f"after attempt {self._attempt} at step {self._step}"
        began = self._attempt >= self._first_attempt
        when = when if began else "before the first attempt"
        self._journal.report(
            f"gave up {when}: {why}\n"
            f"exit code {code}; excluded hosts: {blocked}; stacks, logs and events: "
            f"{self._journal.folder}\n{after(code, self._settings.again)}\n"
        )
        return code

    def _end(self, seconds: float) -> None:
        """Dismisses the agents, and records what share of the time went into steps that count."""
        self._hosts.close()
        usual = statistics.median(self._steps or [0.0])
        share = min(usual * (self._step - self._first + 1) / seconds, 1.0)
        self._journal.gauge(effective_time_ratio=share)
        self._journal.event("end", seconds=seconds, step=self._step, effective_time_ratio=share)
        self._journal.close()
