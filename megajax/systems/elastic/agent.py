"""The agent of a host: starts its training processes, reports how far they are, ends them.

It looks from outside: exit codes, states of processes as Linux has them, progress records in shared
memory, keywords and growth of their logs, bytes on the network, space on the disk (the heartbeat of
MegaScale section 4). The driver decides. When the driver is gone the agent ends its processes and
itself; when the agent is killed its reaper does. Nothing stays running, nor in shared memory.
"""

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.monitor import heartbeat
from megajax.monitor.heartbeat import Span
from megajax.systems.elastic import checks, links, reaper, shared
from megajax.systems.elastic.hosts import AGENT
from megajax.systems.elastic.tls import Tls
from megajax.systems.elastic.wire import Line, dial

TICK_S = 0.1  # (chosen) how soon the end of a process is seen
DUMP_S = 1.0  # (chosen) for the stacks of all threads to be written
LOG_BYTES = 1 << 20  # (chosen) of a log that are searched in a period; a flood is skipped
LINES = 20  # (chosen) keyword lines told of one process
KEYWORDS = (
    "Xid", "NCCL WARN", "CUDA_ERROR", "CUDA error", "Terminating process because the JAX",
    "out of memory", "RESOURCE_EXHAUSTED", "No space left", "ECC error", "injected fault",
)  # fmt: skip
SIGNALLED = 128  # what a shell, and uv run, add to the number of the signal that ended a program


@dataclasses.dataclass
class Process:
    """A training process. Its own session: a kill of the group takes what it started along."""

    rank: int
    popen: subprocess.Popen
    progress: Path
    log: Path
    read: int = 0
    rest: str = ""
    told: int = 0

    def code(self) -> int | None:
        """Returns how it ended: negative for a signal, except those that a run saves on."""
        code = self.popen.poll()
        if code is None or code <= SIGNALLED or code in (143, 130):
            return code
        return SIGNALLED - code

    def state(self) -> str:
        """Returns the state of the training process itself, X when there is none."""
        record = heartbeat.read(self.progress)
        pid = self.popen.pid if record is None else record.pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return "X"
        return stat.rsplit(")", 1)[1].split()[0]

    def send(self, number: int) -> None:
        """Sends a signal to the training process, which a wrapper may have started."""
        record = heartbeat.read(self.progress)
        if self.popen.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(self.popen.pid if record is None else record.pid, number)

    def new_text(self) -> str:
        """Returns what the log has grown by, the end of it when that is much."""
        size = self.log.stat().st_size
        start = max(self.read, size - LOG_BYTES)
        with open(self.log, "rb") as file:
            file.seek(start)
            raw = file.read(size - start)
        self.read = size
        return raw.decode(errors="replace")

    def words(self, text: str) -> list[str]:
        """Returns the whole lines with a keyword, up to LINES of a process."""
        *lines, self.rest = (self.rest[-1000:] + text).split("\n")
        present = [word for word in KEYWORDS if word in text or word in lines[0]] if lines else []
        found = [line[:300] for line in lines if any(word in line for word in present)]
        found = found[: LINES - self.told]
        self.told += len(found)
        return found


class Agent:
    """Serves one driver until told to quit, or until the driver is gone."""

    def __init__(
        self,
        name: str,
        driver: str,
        secret: str,
        env: Mapping[str, str],
        period: float,
        tls: Tls | None = None,
    ):
        """Joins a driver that holds the job's secret, and obeys no other.

        driver: its host:port. env: of the training processes, completed by the driver's.
        Raises: OSError when the driver is not there, not the job's, or has an agent of this name.
        """
        self._secret, self._env, self._period, self._tls = secret, env, period, tls
        self._line: Line = dial(driver, secret, AGENT, name, tls)
        self._address: str = self._line.sock.getsockname()[0]
        self._join()
        shared.sweep(shared.root())
        self._folder, self._lock = shared.claim(shared.root())
        self._processes: list[Process] = []
        self._attempt = 0
        self._asked: int | None = None
        self._disk = Path(".")
        self._reaper = subprocess.Popen(
            [sys.executable, "-S", "-E", str(reaper.__file__)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._tell_reaper(f"folder {self._folder}")

    def _join(self) -> None:
        """Says where this agent is, and waits to be taken."""
        try:
            self._line.send({"address": self._address, "pid": os.getpid()})
            said: list[dict[str, Any]] = []
            while not said:
                said = self._line.receive()
            if said[0]["do"] != "welcome":
                raise ConnectionRefusedError(said[0].get("why", "the driver takes no agent"))
        except BaseException:
            self._line.close()
            raise
        self._first = said[1:]  # what came behind the welcome

    def _tell_reaper(self, words: str) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(words + "\n")
        self._reaper.stdin.flush()

    def serve(self) -> int:
        """Returns 0 after 'quit', 1 when the driver was lost."""
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._ask)
            due = 0.0
            while True:
                ready, _, _ = select.select([self._line], [], [], TICK_S)
                heard, self._first = self._first, []
                for message in heard + (self._line.receive() if ready else []):
                    if message["do"] == "quit":
                        return 0
                    self._obey(message)
                if self._asked is not None:
                    self._line.send({"asked": self._asked})
                    self._asked = None
                ended = any(p.popen.returncode is None and p.code() is not None
                            for p in self._processes)  # fmt: skip
                if ended or time.monotonic() >= due:
                    due = time.monotonic() + self._period
                    self._report()
        except OSError:
            return 1
        finally:
            self._stop()
            self._line.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper.wait()

    def _ask(self, number: int, _: object) -> None:
        """Asks the driver to let the whole job save and stop; a second signal ends this agent."""
        signal.signal(number, signal.SIG_DFL)
        self._asked = number

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "ping":
                self._line.send({"mine": time.monotonic()})
            case "port":
                with socket.socket(links.family(self._address)) as probe:
                    probe.bind((self._address, 0))
                    self._line.send({"port": probe.getsockname()[1]})
            case "start":
                self._start(message)
            case "tell":
                for p in self._processes:
                    p.send(message["signal"])
            case "dump":
                self._line.send({"stacks": self._stacks(), "spans": self._spans()})
            case "stop":
                self._report()  # the last of its log
                self._stop()
                self._line.send({"stopped": self._attempt})
            case "answer":
                self._line.send({"answers": links.answer(self._address, self._secret, self._tls)})
            case "reach":
                try:
                    figure = links.reach(message["at"], self._secret, self._tls)
                    self._line.send({"reached": figure})
                except (OSError, ValueError) as error:
                    self._line.send({"reached": str(error) or type(error).__name__})
            case "check":
                self._line.send({"checks": checks.run(self._disk)})

    def _start(self, message: dict[str, Any]) -> None:
        """Starts the processes of an attempt.

        message: attempt, command, folder, {rank: env}, memory: whether to go on from copies there.
        """
        self._attempt = message["attempt"]
        logs = Path(message["folder"])
        for place, (rank, env) in enumerate(message["ranks"].items()):
            memory = self._folder / f"memory{place}"  # stays from attempt to attempt
            if not message["memory"]:
                memory.unlink(missing_ok=True)
            progress = self._folder / f"attempt{self._attempt}-rank{rank}"
            log = logs / f"rank{rank}.log"
            own = {
                "MEGAJAX_PROGRESS": str(progress), "MEGAJAX_MEMORY": str(memory),
                "MEGAJAX_ATTEMPT": str(self._attempt),
            }  # fmt: skip
            try:
                popen = _run(message["command"], log, {**self._env, **env, **own})
            except OSError as error:  # another one would say the same
                program = message["command"][0]
                at = "" if error.filename in (None, program) else f": {error.filename}"
                self._line.send({"unable": f"cannot start {program!r}: {error.strerror}{at}"})
                return
            self._disk = logs
            self._tell_reaper(f"group {popen.pid}")
            self._processes.append(Process(int(rank), popen, progress, log))

    def _report(self) -> None:
        ranks = []
        for p in self._processes:
            text = p.new_text()
            if p.rank == 0 and text:
                self._line.send({"out": text})
            record = heartbeat.read(p.progress)
            code = p.code()
            ranks.append(
                {
                    "rank": p.rank,
                    "state": "X" if code is not None else p.state(),
                    "code": code,
                    "progress": None if record is None else dataclasses.asdict(record),
                    "log_bytes": p.read,
                    "words": p.words(text),
                }
            )
        self._line.send(
            {
                "report": self._attempt,
                "ranks": ranks,
                "disk_free": shutil.disk_usage(self._disk).free,
                "traffic": traffic(),
                "clock": time.monotonic(),
            }
        )

    def _stacks(self) -> dict[int, str]:
        """Returns the Python stacks of every rank, or why there are none."""
        live = [p for p in self._processes if p.code() is None]
        asked = [p for p in live if heartbeat.read(p.progress) is not None]
        for p in asked:  # without a record nobody waits for the signal, and it would kill
            p.send(signal.SIGUSR1)
        time.sleep(DUMP_S if asked else 0.0)
        found = {}
        for p in self._processes:
            file = heartbeat.stacks_file(p.progress)
            text = file.read_text() if file.exists() else ""
            state, code = p.state(), p.code()
            found[p.rank] = text or f"no stacks: state {state}, exit code {code}\n"
        return found

    def _spans(self) -> dict[int, list]:
        """Returns the last sections of every rank, of dead ones too; the one that it is in last."""
        found = {}
        for p in self._processes:
            spans, now = heartbeat.read_spans(p.progress), heartbeat.read(p.progress)
            if now is not None:
                spans.append(Span(now.section, now.step, now.time, time.monotonic()))
            found[p.rank] = [dataclasses.astuple(s) for s in spans]
        return found

    def _stop(self) -> None:
        """Kills every process with all that it started, and waits until none is left."""
        for p in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(p.popen.pid, signal.SIGKILL)
        for p in self._processes:
            p.popen.wait()
            with contextlib.suppress(OSError):  # the reaper may be dead, and is not needed now
                self._tell_reaper(f"reaped {p.popen.pid}")
            p.progress.unlink(missing_ok=True)
            heartbeat.stacks_file(p.progress).unlink(missing_ok=True)
        self._processes = []


def _run(command: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen:
    """Starts a command in a session of its own. Raises: OSError: no such program, or no log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def traffic() -> int:
    """Returns bytes in and out of this host's network and InfiniBand ports since they began."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        fields = line.split(":", 1)[1].split()
        total += int(fields[0]) + int(fields[8])
    for name in ("port_xmit_data", "port_rcv_data"):
        for counter in Path("/sys/class/infiniband").glob(f"*/ports/*/counters/{name}"):
            with contextlib.suppress(OSError, ValueError):
                total += 4 * int(counter.read_text())  # counted in words of four bytes
    return total
