"""The hosts of a job as its driver sees them: agents that came, were asked, hung up, are excluded.

Agents come by themselves, or this machine's are started by `spawn`; the driver never logs in
anywhere. What an agent says without being asked goes to the driver's `on_*`. No jax import.
"""

import dataclasses
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megajax.systems.elastic import links
from megajax.systems.elastic.wire import Line

TICK_S = 0.1  # (chosen)
ANSWER_S = 15.0  # (chosen) for stacks, and for the end of killed processes
SPARES_S = 10.0  # (chosen) for spares of this machine to come, though enough are there
Spawn = Callable[[str], subprocess.Popen]


@dataclasses.dataclass
class Host:
    """An agent that is there."""

    name: str
    line: Line
    address: str
    pid: int
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


class Listener(Protocol):
    """Who hears what comes unasked."""

    def on_join(self, host: Host) -> None:
        """An agent came."""

    def on_hang_up(self, host: Host) -> None:
        """An agent is gone."""

    def on_report(self, host: Host, message: dict[str, Any]) -> None:
        """The news of a period."""

    def on_asked(self, signal: int) -> None:
        """A host was told that the job should stop."""

    def on_evict(self, name: str) -> None:
        """Somebody wants a host out."""

    def on_output(self, text: str) -> None:
        """Rank 0 printed something."""


class Hosts:
    """All agents of a driver."""

    def __init__(
        self,
        owner: Listener,
        listener: socket.socket,
        token: str,
        spawn: Spawn | None = None,
        count: int = 0,
    ):
        """spawn: starts an agent of a name on this machine. count: agents to start."""
        self._owner, self._listener, self._token, self._spawn = owner, listener, token, spawn
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._local: dict[str, subprocess.Popen] = {}
        self._names = [f"local{i}" for i in range(count)] if spawn else []
        self._here: dict[str, Host] = {}
        self.blocked: set[str] = set()

    def gather(self, wanted: int, least: int, seconds: float, stop: Callable[[], bool]) -> bool:
        """Waits for agents: all wanted, or after a while the fewest that will do. Tells success."""
        began = time.monotonic()
        end = began + seconds
        while not stop():
            awaited = self.candidates() if time.monotonic() < began + SPARES_S else ()
            if len(self.good()) >= max(wanted, len(awaited)):
                break
            for name in self._names:
                gone = name not in self._local or self._local[name].poll() is not None
                if self._spawn and gone and name not in self.blocked:
                    self._local[name] = self._spawn(name)
            possible = len(set(self._names) - self.blocked)
            if self._names and possible < wanted and len(self.good()) >= possible:
                break  # no others can come
            if time.monotonic() > end:
                break
            self.pump()
        return len(self.good()) >= max(least, 1)

    def good(self) -> list[Host]:
        """Returns those that are there and not excluded, by name."""
        found = [h for h in self._here.values() if h.name not in self.blocked]
        return sorted(found, key=lambda h: h.name)

    def candidates(self) -> set[str]:
        """Returns the names of those that are good, or can be started again."""
        return {h.name for h in self.good()} | (set(self._names) - self.blocked)

    def pump(self, timeout: float = TICK_S) -> None:
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
        host = next((h for h in self._here.values() if h.line is line), None)
        if host is None:  # nobody yet
            if message.get("token") != self._token:
                raise ConnectionRefusedError("a stranger")
            if "evict" in message:
                self._owner.on_evict(message["evict"])
                return
            host = Host(message["hello"], line, message["address"], message["pid"])
            if host.name in self._here:  # an agent that was thought of as there
                self._drop(self._here[host.name].line)
            self._here[host.name] = host
            self._owner.on_join(host)
        elif "asked" in message:
            self._owner.on_asked(message["asked"])
        elif "out" in message:
            self._owner.on_output(message["out"])
        elif "report" in message:
            self._owner.on_report(host, message)
        else:
            host.answers |= message

    def _drop(self, line: Line) -> None:
        """Forgets an agent that hung up."""
        self._selector.unregister(line)
        line.close()
        for host in [h for h in self._here.values() if h.line is line]:
            del self._here[host.name]
            self._owner.on_hang_up(host)

    def send(self, hosts: Sequence[Host], **message: Any) -> None:
        """Tells hosts something; one that cannot be reached has hung up."""
        for host in hosts:
            if host.name in self._here:
                try:
                    host.line.send(message)
                except OSError:
                    self._drop(host.line)

    def ask(self, hosts: Sequence[Host], answer: str, seconds: float, **message: Any) -> list[Any]:
        """Returns what each host answers, None where it does not in time."""
        return self.ask_each({h.name: message for h in hosts}, hosts, answer, seconds)

    def ask_each(
        self, messages: dict[str, dict], hosts: Sequence[Host], answer: str, seconds: float
    ) -> list[Any]:
        """As `ask`, with a message for each host by its name."""
        for host in hosts:
            host.answers.pop(answer, None)
            self.send([host], **messages[host.name])
        began = time.monotonic()
        end = began + seconds
        while time.monotonic() < end:
            if all(answer in h.answers or h.name not in self._here for h in hosts):
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
            if theirs is not None and ours - asked < best:
                best, offset = ours - asked, theirs - (asked + ours) / 2
        return offset

    def check_links(self, hosts: Sequence[Host]) -> dict[links.Pair, float | str]:
        """Returns MB/s of the links between pairs of hosts, or what is wrong with them."""
        by_name = {h.name: h for h in hosts}
        found: dict[links.Pair, float | str] = {}
        for pairs in links.rounds(sorted(by_name)):
            servers = [by_name[b] for _, b in pairs]
            ports = self.ask(servers, "answers", ANSWER_S, do="answer")
            at = {
                a: {"do": "reach", "at": f"{by_name[b].address}:{port or 1}"}
                for (a, b), port in zip(pairs, ports, strict=True)
            }
            clients = [by_name[a] for a, _ in pairs]
            said = self.ask_each(at, clients, "reached", 2 * links.WAIT_S)
            for pair, port, figure in zip(pairs, ports, said, strict=True):
                found[pair] = "no answer" if figure is None or port is None else figure
        return found

    def dismiss(self, host: Host) -> None:
        """Lets go of an agent that does not answer; one of this machine is killed."""
        if host.name in self._here:
            self._drop(host.line)
        if host.name in self._local:
            self._local[host.name].kill()
            self._local[host.name].wait()

    def close(self) -> None:
        """Sends the agents home."""
        self.send(list(self._here.values()), do="quit")
        for agent in self._local.values():
            try:
                agent.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for host in self._here.values():
            host.line.close()
        self._listener.close()
        self._selector.close()
