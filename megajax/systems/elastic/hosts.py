"""The hosts of a job as its driver sees them: agents that came, were asked, hung up, are excluded.

Agents come by themselves, or this machine's are started by `spawn`; the driver never logs in
anywhere. Only who holds the job's secret comes in (door.py), and an error in what one connection
says ends that connection only. What an agent says without being asked goes to the driver's `on_*`.
No jax import.
"""

import dataclasses
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from megajax.systems.elastic import links, reaper
from megajax.systems.elastic.door import Door
from megajax.systems.elastic.tls import Tls
from megajax.systems.elastic.wire import Line, join_address

TICK_S = 0.1  # (chosen)
LONGEST_LOOK_S = (
    2.0  # (chosen) a longer time between two looks is this driver's, and nobody's delay
)
ANSWER_S = 15.0  # (chosen) for stacks, and for the end of killed processes
WAITING_S = 30.0  # (chosen) between two words about agents that are missing
SPARES_S = 10.0  # (chosen) for spares of this machine to come, though enough are there
SPAWN_S = 1.0  # (chosen) between two starts of one agent
QUIET_S = 5.0  # (chosen) after that an agent gives way to another of its name
AGENT, OPERATOR = "agent", "evict"  # the purposes of connections to a driver
Spawn = Callable[[str], subprocess.Popen]


@dataclasses.dataclass
class Host:
    """An agent that is there."""

    name: str
    line: Line
    address: str
    pid: int
    heard: float  # when it last said something
    mark: str = ""  # in the environment of all that it starts
    leased: float = float("-inf")  # when it was last told that its processes may go on
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


class Listener(Protocol):
    """Who hears what comes unasked."""

    def on_join(self, host: Host) -> None:
        """An agent came."""

    def on_hang_up(self, host: Host, why: str) -> None:
        """An agent is gone."""

    def on_report(self, host: Host, message: dict[str, Any]) -> None:
        """The news of a period."""

    def on_asked(self, signal: int) -> None:
        """A host was told that the job should stop."""

    def on_evict(self, name: str) -> None:
        """Somebody wants a host out."""

    def on_readmit(self, name: str) -> None:
        """Somebody says that a host that is out is good."""

    def on_output(self, text: str) -> None:
        """Rank 0 printed something."""

    def on_refused(self, address: str, why: str, count: int) -> None:
        """A connection was ended: it did not prove itself, or what it said made no sense."""

    def on_unable(self, host: Host, why: str) -> None:
        """A host cannot start the command."""

    def on_wait(self, seconds: float) -> None:
        """Agents are missing, which may come for so long."""


class Hosts:
    """All agents of a driver."""

    def __init__(
        self,
        owner: Listener,
        listener: socket.socket,
        secret: str,
        spawn: Spawn | None = None,
        count: int = 0,
        tls: Tls | None = None,
    ):
        """spawn: starts an agent of a name on this machine. count: agents to start."""
        self._owner, self._spawn = owner, spawn
        self._selector = selectors.DefaultSelector()
        serves = (AGENT, OPERATOR)
        self._door = Door(listener, self._selector, secret, serves, owner.on_refused, tls)
        self._local: dict[str, subprocess.Popen] = {}
        self._next: dict[str, float] = {}  # when each may be started again
        self._names = [f"local{i}" for i in range(count)] if spawn else []
        self._here: dict[str, Host] = {}
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

    def gather(self, wanted: int, least: int, seconds: float, stop: Callable[[], bool]) -> bool:
        """Waits for agents: all wanted, or after a while the fewest that will do. Tells success."""
        began = self.clock
        end = began + seconds
        # Those of this machine come by themselves, and soon.
        word = began + (WAITING_S if self._names else 0.0)
        while not stop():
            awaited = self.candidates() if self.clock < began + SPARES_S else ()
            if len(self.good()) >= max(wanted, len(awaited)):
                break
            for name in self._names:
                self._start_agent(name)
            possible = len(set(self._names) - self.blocked)
            if self._names and possible < wanted and len(self.good()) >= possible:
                break  # no others can come
            now = self.clock
            if now > end:
                break
            if now >= word:
                word = now + WAITING_S
                self._owner.on_wait(end - now)
            self.pump()
        return len(self.good()) >= max(least, 1)

    def _start_agent(self, name: str) -> None:
        """Starts an agent of this machine that is not running; not at once when it has just been
        tried, as one that ends at its start would keep the machine busy."""
        gone = name not in self._local or self._local[name].poll() is not None
        now = time.monotonic()
        if self._spawn and gone and name not in self.blocked and now >= self._next.get(name, 0.0):
            self._next[name] = now + SPAWN_S
            self._local[name] = self._spawn(name)

    def good(self) -> list[Host]:
        """Returns those that are there and not excluded, by name."""
        found = [h for h in self._here.values() if h.name not in self.blocked]
        return sorted(found, key=lambda h: h.name)

    def choose(self, team: Sequence[Host], count: int, moves: Collection[str] = ()) -> list[Host]:
        """Returns the hosts of the next attempt, at most `count`.

        Each of the former team takes its former place, where its memory fits; others come where
        one is gone. moves: hosts that must not have their former place; they come last, and where
        no other is left all of the team exchange their places.
        """
        good = {h.name: h for h in self.good()}
        last = [good.pop(name) for name in sorted(moves) if name in good]
        kept = [good.pop(h.name, None) for h in team]
        others = iter([*good.values(), *last])
        found = [h or next(others, None) for h in kept]
        chosen = [h for h in (*found, *others) if h is not None][:count]
        if any(a.name == b.name in moves for a, b in zip(chosen, team, strict=False)):
            chosen = [*chosen[1:], *chosen[:1]]
        return chosen

    def has(self, host: Host) -> bool:
        """Tells whether this very agent is there, and not another of its name."""
        return self._here.get(host.name) is host

    def candidates(self) -> set[str]:
        """Returns the names of those that are good, or can be started again."""
        return {h.name for h in self.good()} | (set(self._names) - self.blocked)

    def pump(self, timeout: float = TICK_S) -> None:
        """Takes what agents say."""
        _ = self.clock
        for key, _ in self._selector.select(timeout):
            line: Any = key.fileobj
            if line is self._door.listener:
                self._door.accept()
            elif not line.closed:  # another of this turn's messages may have ended it
                self._hear(line)
        self._door.sweep()

    def _hear(self, line: Line) -> None:
        """Takes what one connection has sent; whatever is wrong with it ends this connection."""
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
        host = next((h for h in self._here.values() if h.line is line), None)
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
                self._renew(host, message["moment"])
                self._owner.on_report(host, message)
            else:
                host.answers |= message

    def _join(self, line: Line, message: dict[str, Any]) -> None:
        """Takes an agent in, instead of a silent one of its name."""
        known = self._here.get(line.name)
        if known is not None:
            quiet = self.clock - known.heard
            if quiet < QUIET_S:  # or two hosts of one name would end one another for ever
                line.send({"do": "wait", "why": f"another agent is called {line.name} (--name)"})
                self._drop(line, "its name is taken")
                return
            self._drop(known.line, f"silent for {quiet:.0f} s, and another came")
        address, pid = str(message["address"]), int(message["pid"])
        host = Host(line.name, line, address, pid, self.clock, str(message.get("mark", "")))
        self._here[host.name] = host
        self._owner.on_join(host)
        line.send({"do": "welcome"})

    def _renew(self, host: Host, moment: float) -> None:
        """Lets the processes of a host go on, counted from a moment of its own clock."""
        host.leased = time.monotonic()
        self.send([host], do="lease", since=moment)

    def _drop(self, line: Line, why: str = "") -> None:
        """Ends a connection, and forgets the agent behind it."""
        self._door.turn_away(line, why)
        for host in [h for h in self._here.values() if h.line is line]:
            del self._here[host.name]
            self._owner.on_hang_up(host, why)

    def send(self, hosts: Sequence[Host], **message: Any) -> None:
        """Tells hosts something; one that cannot be reached has hung up."""
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
        """Returns what each host answers, None where it does not in time. stop: end early."""
        return self.ask_each({h.name: message for h in hosts}, hosts, answer, seconds, stop)

    def ask_each(
        self,
        messages: dict[str, dict],
        hosts: Sequence[Host],
        answer: str,
        seconds: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """Does what `ask` does, with a message for each host by its name."""
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

    def check_links(self, hosts: Sequence[Host]) -> dict[links.Pair, float | str]:
        """Returns MB/s of the links between pairs of hosts, or what is wrong with them.

        A pair of which an agent does not answer is left out: that says nothing about the link.
        """
        by_name = {h.name: h for h in hosts}
        found: dict[links.Pair, float | str] = {}
        for pairs in links.rounds(sorted(by_name)):
            servers = [by_name[b] for _, b in pairs]
            ports = self.ask(servers, "answers", ANSWER_S, do="answer")
            at = {
                a: {"do": "reach", "at": join_address(by_name[b].address, port or 1)}
                for (a, b), port in zip(pairs, ports, strict=True)
            }
            clients = [by_name[a] for a, _ in pairs]
            said = self.ask_each(at, clients, "reached", 2 * links.WAIT_S)
            for pair, port, figure in zip(pairs, ports, said, strict=True):
                if figure is not None and port is not None:
                    found[pair] = figure
        return found

    def dismiss(self, host: Host) -> bool:
        """Lets go of an agent that does not answer; one of this machine is killed, with all that it
        started. Tells whether its processes have certainly ended."""
        self._drop(host.line)
        agent = self._local.get(host.name)
        if agent is None:
            return False
        if agent.pid == host.pid:
            agent.kill()
            agent.wait()
        return bool(host.mark) and reaper.kill_all(lambda: reaper.marked(host.mark), ANSWER_S)

    def close(self) -> None:
        """Sends the agents home. Those of this machine have ANSWER_S, all of them together."""
        self.send(list(self._here.values()), do="quit")
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
        for host in self._here.values():
            host.line.close()
        self._door.close()
        self._selector.close()
