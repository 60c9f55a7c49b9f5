"""A cluster on one machine, as a scheduler keeps it: a driver, an agent a host, what they started.

The driver listens on a fixed port; each host's agent reaches it through a relay of its own. What
ends is started again, as a scheduler does; a host on the blocklist gives way to one of a new name.
Everything lies in one folder, on two small disks where the machine lets us mount them.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError

# ---- network
#
# The network between an agent and its driver, which can fall silent: no FIN, no RST, no byte.
#
# A relay listens on a port of its own and hands on what comes, in a thread. While it is cut it
# takes nothing and gives nothing, as a switch without power does; both ends keep their connections.
# It can also hold back what comes, end its connections, and change a byte.


TICK_S = 0.1  # (chosen)


class Relay:
    """Hands connections on to a port of this machine.

    cut: set to silence it. held_s: seconds for which all that comes waits. wrong: set, changes a
    byte of what comes next, and is set back. ends: set, ends all connections, and is set back.
    """

    def __init__(self, to: int):
        """to: the port of the driver."""
        self._to = to
        self.cut = self.wrong = self.ends = False
        self.held_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._others: dict[socket.socket, socket.socket] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self.cut:
                self._ended.wait(TICK_S)
                continue
            if self.ends:
                self.ends = False
                for sock in list(self._others):
                    self._end(sock)
            for key, _ in self._selector.select(TICK_S):
                sock = key.fileobj
                if sock is self._listener:
                    self._accept()
                elif isinstance(sock, socket.socket) and sock in self._others:
                    self._hand_on(sock)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            there = socket.create_connection(("127.0.0.1", self._to), timeout=5)
        except OSError:  # no driver is there
            near.close()
            return
        for one, other in ((near, there), (there, near)):
            one.settimeout(5)
            self._others[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _hand_on(self, sock: socket.socket) -> None:
        other = self._others[sock]
        try:
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            if self.held_s:
                self._ended.wait(self.held_s)
            if self.wrong:
                self.wrong = False
                at = len(data) // 2
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            other.sendall(data)
        except OSError:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        for one in (sock, self._others.get(sock)):
            if one is not None:
                self._others.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

    def close(self) -> None:
        """Ends it, with its connections."""
        self._ended.set()
        self._thread.join()
        for sock in (*self._others, self._listener):
            sock.close()
        self._selector.close()


# ---- cluster


ROOT = Path(__file__).parents[2]
SUPERVISE = str(ROOT / "scripts" / "supervise.py")
DISK = "256m"  # (chosen) bytes of each of the two disks
AGAIN_S = 2.0  # (chosen) until what has ended is started again
JOIN_S = 600.0  # (chosen)


class Tail:
    """Reads the new lines of a file that grows, and that somebody may remove."""

    def __init__(self, path: Path):
        """path: need not exist yet."""
        self._path, self._at, self._partial = path, 0, ""

    def lines(self) -> list[str]:
        """Returns the whole lines since the last call."""
        try:
            with open(self._path, errors="replace") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0
                file.seek(self._at)
                text = file.read()
                self._at = file.tell()
        except OSError:
            return []
        *lines, self._partial = (self._partial + text).split("\n")
        return lines

    def rows(self) -> list[dict[str, Any]]:
        """Returns the lines that are JSON objects."""
        values = []
        for line in self.lines():
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
        return [row for row in values if isinstance(row, dict)]


class Host:
    """One host: its agent, and the network to the driver."""

    def __init__(self, name: str, relay: Relay):
        """Nothing runs yet."""
        self.name, self.relay = name, relay
        self.agent: subprocess.Popen | None = None
        self.since = 0.0  # when its agent ended

    @property
    def pid(self) -> int:
        """The process number of the agent; 0: none runs."""
        return self.agent.pid if self.agent is not None and self.agent.poll() is None else 0


class Cluster:
    """Keeps driver and agents running; the caller must call `tick` every now and then."""

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        command: Callable[[], list[str]],
        hosts: int,
        env: Mapping[str, str],
    ):
        """Args: flags: flags of the driver. command: returns the command that a driver supervises;
        it is called for each driver. env: environment of all processes that are started here."""
        self.folder, self._flags, self._command, self._env = folder, flags, command, env
        self.disks = {name: folder / name for name in ("run_disk", "out_disk")}
        self.mounted: list[Path] = []
        for disk in self.disks.values():
            disk.mkdir()
            words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
            with contextlib.suppress(OSError):
                if subprocess.run(words, capture_output=True).returncode == 0:
                    self.mounted.append(disk)
        (folder / "tmp").mkdir()
        self.run_dir, self.out = self.disks["run_disk"] / "run", self.disks["out_disk"] / "watch"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._secret = secrets.token_hex(16)
        self.driver: subprocess.Popen | None = None
        self.held = 0.0  # until when no driver is started
        self.codes: list[int] = []  # of drivers that ended
        self._ended = 0.0
        self._made = 0
        self.hosts: list[Host] = []
        self.seen: set[int] = set()  # numbers of all agents
        for _ in range(hosts):
            self._add_host()

    def _add_host(self) -> None:
        self.hosts.append(Host(f"host{self._made}", Relay(self.port)))
        self._made += 1

    def environment(self) -> dict[str, str]:
        """Returns that of driver and agents."""
        return {
            **self._env,
            "MEGAJAX_TOKEN": self._secret,
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(ROOT),
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }

    def spawn(self, words: list[str], log: str) -> subprocess.Popen:
        """Starts scripts/supervise.py."""
        with open(self.folder / log, "a") as out:
            return subprocess.Popen(
                [sys.executable, SUPERVISE, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )

    def agent_words(self, host: Host, join_s: float = JOIN_S) -> list[str]:
        """Returns the flags of a host's agent."""
        words = [f"--agent=127.0.0.1:{host.relay.port}", f"--name={host.name}"]
        return [*words, "--period_s=0.5", f"--join_s={join_s:g}"]

    def tick(self) -> None:
        """Restarts driver and agents that have ended."""
        now = time.monotonic()
        with contextlib.suppress(OSError):
            blocked = (self.out / "blocklist").read_text().split()
            for host in [h for h in self.hosts if h.name in blocked]:
                self.retire(host)
                self._add_host()
        for host in self.hosts:
            if not host.pid and (host.agent is None or self._rested(host, now)):
                host.agent, host.since = self.spawn(self.agent_words(host), "agents.txt"), 0.0
                self.seen.add(host.agent.pid)
        if self.driver is not None and (code := self.driver.poll()) is not None:
            self.codes.append(code)
            self.driver, self._ended = None, now
            if code in (2, 70):
                raise UserError(f"the driver ended with {code}:\n{self.tail('driver.txt')}")
        if self.driver is None and 0 not in self.codes and now > max(self.held, self._ended + 1):
            words = ["--agents=elsewhere", f"--listen=127.0.0.1:{self.port}", *self._flags]
            words += [f"--out={self.out}", "--", *self._command()]
            self.driver = self.spawn(words, "driver.txt")

    def _rested(self, host: Host, now: float) -> bool:
        host.since = host.since or now
        return now - host.since > AGAIN_S

    def retire(self, host: Host) -> None:
        """Ends a host for good."""
        self.hosts.remove(host)
        if host.agent is not None:
            for pid in (host.pid, *self.ranks_of(host.pid).values()):
                kill(pid, signal.SIGCONT)
            kill(host.pid, signal.SIGTERM)  # asks the driver; a second one ends it
            kill(host.pid, signal.SIGKILL)
            host.agent.wait()
        host.relay.close()

    def tail(self, log: str) -> str:
        """Returns the end of a log."""
        with contextlib.suppress(OSError):
            return "\n".join((self.folder / log).read_text(errors="replace").splitlines()[-30:])
        return ""

    def ranks_of(self, agent: int) -> dict[int, int]:
        """Returns {rank: process} of the living processes that an agent started."""
        ranks: dict[int, int] = {}
        for pid, words in environments():
            record = Path(words.get("MEGAJAX_PROGRESS", ""))
            if agent and record.parent.name.startswith(f"megajax-{agent}-"):
                rank = int(record.name.rpartition("rank")[2])
                if parent(pid) == agent:
                    ranks[rank] = pid
        return ranks

    def ranks(self) -> dict[int, tuple[Host, int]]:
        """Returns {rank: (its host, its process)}."""
        return {r: (h, pid) for h in self.hosts for r, pid in self.ranks_of(h.pid).items()}

    def reaper_of(self, agent: int) -> int:
        """Returns the process of an agent's reaper, 0: none."""
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes()
                if b"reaper.py" in words and parent(int(name)) == agent:
                    return int(name)
        return 0

    def leavings(self) -> list[str]:
        """Returns what the cluster left behind: processes, shared memory, temporary files, the
        port."""
        remains = []
        for pid, words in environments():
            if str(self.folder) in words.get("TMPDIR", "") and pid != os.getpid():
                remains.append(f"process {pid}")
        for agent in self.seen:
            remains += [str(p) for p in Path("/dev/shm").glob(f"megajax-{agent}-*")]
        remains += [str(p) for p in (self.folder / "tmp").iterdir()]
        try:
            socket.create_server(("127.0.0.1", self.port)).close()
        except OSError as error:
            remains.append(f"port {self.port}: {error.strerror}")
        return remains

    def send_home(self) -> None:
        """Ends the agents that wait for another driver; those of the last end by themselves."""
        for host in self.hosts:
            joined = host.pid and list(Path("/dev/shm").glob(f"megajax-{host.pid}-*"))
            if host.agent is not None and not joined:
                host.agent.kill()
                host.agent.wait()
            host.relay.cut = False

    def close(self) -> None:
        """Ends all, and unmounts the disks."""
        if self.driver is not None:
            kill(self.driver.pid, signal.SIGCONT)
            self.driver.kill()
            self.driver.wait()
        for host in list(self.hosts):
            self.retire(host)
        end = time.monotonic() + 20
        for pid in [p for p, w in environments() if str(self.folder) in w.get("TMPDIR", "")]:
            kill(pid, signal.SIGKILL)
        for disk in self.mounted:
            while subprocess.run(["umount", str(disk)], capture_output=True).returncode:
                if time.monotonic() > end:
                    break
                time.sleep(0.5)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that may have ended. A process number of 0 is ignored."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def parent(pid: int) -> int:
    """Returns the parent of a process, 0 if the process does not exist."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def environments() -> list[tuple[int, dict[str, str]]]:
    """Returns (process, its environment) of all that may be read and are no zombies."""
    processes = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{name}/environ").read_bytes().decode(errors="replace")
            pairs = (w.partition("=") for w in raw.split("\0") if "=" in w)
            words = {name: value for name, _, value in pairs}
            if words:
                processes.append((int(name), words))
    return processes
