"""The agent of a host: starts its training processes, reports how far they are, ends them.

It looks from outside: exit codes, states of processes as Linux has them, progress records in shared
memory, keywords and growth of their logs, and the counters of the host (the heartbeat of MegaScale
section 4). What it sees, and what the processes record themselves, goes to the driver as one
stream of records, the newest of each name once a period. The driver decides. When the driver is
gone the agent ends its processes and itself; when the agent is killed its reaper does. Nothing
stays running, nor in shared memory: what left its session is found as a descendant of the agent,
or by a mark in its environment.
"""

import codecs
import contextlib
import ctypes
import dataclasses
import fcntl
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.monitor import heartbeat, records
from megajax.monitor.heartbeat import Span
from megajax.monitor.meter import HostMeter
from megajax.monitor.records import Reader, Record, newest, records_file, without_host
from megajax.systems.elastic import checks, reaper, wire
from megajax.systems.elastic.wire import AGENT, Line, Tls, dial

# ---- what a command prints, through a pipe: into its log, and its newest part to the driver
#
# The command itself never meets a full disk: the agent empties the pipe, and what the log does not
# take is dropped, and counted in the log as soon as there is room again. A thread writes the log,
# so neither the agent's other work nor a disk that hangs holds the command up. What a killed
# command had printed is still in the pipe and is taken from there. Nobody waits for the pipe's end,
# because a process that the command left behind may hold it open for ever. While its agent is
# frozen, a command that prints more than PIPE_BYTES waits, until its lease has run out.


PIPE_BYTES = 1 << 20  # (chosen) the most that Linux gives everybody
NEWEST_BYTES = 1 << 20  # (chosen) kept for the driver between two reports; a flood is skipped
WAITING_BYTES = 1 << 24  # (chosen) that wait for a slow disk; more is dropped
TAIL_BYTES = 4096  # (chosen) of the last output, for the evidence when the log lacks some
CLOSE_S = 5.0  # (chosen) for the log of a disk that hangs


class Output:
    """The output of one command. total: bytes printed so far. lost: those that no log has."""

    def __init__(self, log: Path):
        """Opens the log; a disk that does not take one costs the log. writer: the command's end."""
        self.log, self.total, self.lost = log, 0, 0
        self._why = ""
        self._file = self._open()
        if self._file < 0:
            print(f"[agent] no log {log}: {self._why}. The job goes on", file=sys.stderr)
        self._newest, self._skipped, self._tail = bytearray(), False, b""
        self._waiting = bytearray()  # for the log
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._guard = threading.Lock()  # of all but the log; nobody writes to a disk under it
        self._read, self.writer = os.pipe()
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError):  # this user has too many pipes of this size
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)

    def follow(self) -> None:
        """Begins to write the log."""
        self._thread.start()

    def new_text(self) -> str:
        """Returns the output since the last call, or the end of it if there is too much."""
        self._take()
        with contextlib.suppress(BlockingIOError):  # the disk has hung for long
            os.write(self._waker, b".")
        with self._guard:
            raw, skipped = bytes(self._newest), self._skipped
            self._newest, self._skipped = bytearray(), False
        if skipped:
            self._decoder.reset()
        return self._decoder.decode(raw)

    def missing(self) -> str:
        """Returns the last lines that were printed, '' when the log has all of them."""
        if not self.lost:
            return ""
        text = self._tail.decode(errors="replace")
        return f"{self.lost} bytes of output are not in the log ({self._why}); the last:\n{text}\n"

    def close(self) -> None:
        """Empties the pipe and closes log and pipe; waits at most CLOSE_S for the disk."""
        os.close(self._waker)
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(CLOSE_S)

    def _follow(self) -> None:
        told, open_ = b".", True
        while told:
            files = [self._read, self._wake] if open_ else [self._wake]
            ready, _, _ = select.select(files, [], [])
            told = os.read(self._wake, 1 << 16) if self._wake in ready else told
            open_ = self._take()
            with self._guard:
                data, self._waiting = bytes(self._waiting), bytearray()
            self._log(data)
        for file in (self._read, self._wake, self._file):
            if file >= 0:
                os.close(file)

    def _take(self) -> bool:
        """Reads what is in the pipe now. Tells whether somebody still holds its other end."""
        taken = 0
        with self._guard:
            while taken <= PIPE_BYTES:
                try:
                    data = os.read(self._read, 1 << 16)
                except BlockingIOError:
                    return True
                if not data:
                    return False
                taken += len(data)
                self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._newest += data
        if (over := len(self._newest) - NEWEST_BYTES) > 0:
            del self._newest[:over]
            self._skipped = True
        if len(self._waiting) < WAITING_BYTES:
            self._waiting += data
        else:
            self.lost, self._why = self.lost + len(data), "the disk is too slow"

    def _log(self, data: bytes) -> None:
        """Writes to the log as much as the disk takes, after a note about bytes that are
        missing."""
        if self.lost and data:
            note = f"\n[agent] {self.lost} bytes are missing here: {self._why}\n".encode()
            if not self._write(note, is_atomic=True):
                self.lost += len(data)
                return
            self.lost = 0
        self.lost += len(data) - self._write(data)

    def _write(self, data: bytes, is_atomic: bool = False) -> int:
        """Returns how many bytes the log took. whole: all of them, or none."""
        if self._file < 0:
            self._file = self._open()
        written = 0
        try:
            while self._file >= 0 and written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            self._why = error.strerror or str(error)
            with contextlib.suppress(OSError):
                if is_atomic and written:
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                    written = 0
        return written

    def _open(self) -> int:
        """Returns the log's descriptor, -1 if the log cannot be opened."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.log, flags, 0o644)
        except OSError as error:
            self._why = error.strerror or str(error)
            return -1


# ---- a training process as its agent sees it, from outside, and how it is started and tied to it


LINES = 20  # (chosen) keyword lines told of one process
KEYWORDS = (
    "Xid",
    "NCCL WARN",
    "CUDA_ERROR",
    "CUDA error",
    "Terminating process because the JAX",
    "out of memory",
    "RESOURCE_EXHAUSTED",
    "No space left",
    "ECC error",
    "injected fault",
)
TRACEBACK = "Traceback (most recent call last)"
ERRORS = ("error: ", "[lease] ", "Check failed: ")  # the first two begin a line
PROGRESS = ("beat", "section", "loss", "own_s", "step_s", "has_bad_state")  # of a heartbeat
SIGNALLED = 128  # what a shell, and uv run, add to the number of the signal that ended a program
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclasses.dataclass
class Process:
    """A training process.

    It has its own session, so that a kill of its group ends its children too.
    """

    rank: int
    popen: subprocess.Popen
    progress: Path
    output: Output
    partial: str = ""  # a line that has not ended yet
    told: int = 0
    error: str = ""  # the last that it printed
    in_traceback: bool = False
    reader: Reader | None = None

    def code(self) -> int | None:
        """Returns how it ended: negative for a signal, except those that a run saves on."""
        code = self.popen.poll()
        if code is None or code <= SIGNALLED or code in (143, 130):
            return code
        return SIGNALLED - code

    def state(self) -> str:
        """Returns the state of the training process, as in /proc; X if it has ended."""
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

    def words(self, text: str) -> list[str]:
        """Returns whole lines with a keyword, up to LINES of a process; notes the last error."""
        *lines, self.partial = (self.partial[-1000:] + text).split("\n")
        if lines and (self.in_traceback or any(word in text for word in (TRACEBACK, *ERRORS))):
            self._note(lines)
        present = [word for word in KEYWORDS if word in text or word in lines[0]] if lines else []
        matches = [line[:300] for line in lines if any(word in line for word in present)]
        matches = matches[: LINES - self.told]
        self.told += len(matches)
        return matches

    def _note(self, lines: list[str]) -> None:
        """Remembers the last error: the end of a traceback, or a line of a script or of the
        lease."""
        for line in lines:
            if line.startswith(TRACEBACK):
                self.in_traceback = True
            elif self.in_traceback and line and not line[0].isspace():
                self.error, self.in_traceback = line[:300], False
            elif line.startswith(ERRORS[:2]) or ERRORS[2] in line:
                self.error = line[:300]

    def records(self, host: str, meter: HostMeter, text: str) -> list[Record]:
        """Returns the records of this process: the newest that it made, and those that are seen
        from outside, which replace records of the same name. text: new output."""
        self.reader = self.reader or Reader(records_file(self.progress), host, self.rank)
        progress, code, now = heartbeat.read(self.progress), self.code(), time.time()
        seen: dict[str, float | int | str] = {"state": "X" if code is not None else self.state()}
        if code is not None:
            seen["exit_code"] = code
        if progress is not None:
            seen |= {n: getattr(progress, n) for n in PROGRESS}
            seen |= {} if code is not None else meter.process(progress.pid)
        seen["log_bytes"] = self.output.total
        step = None if progress is None else progress.step
        lines = self.words(text)
        if self.error and (code is not None or seen.get("section") in ("failed", "lost")):
            seen["error"] = self.error
        values = [*seen.items(), *(("log_line", line) for line in lines)]
        outside = [Record(now, host, self.rank, None, step, n, v) for n, v in values]
        return newest(self.reader.take()) + outside


def run(command: list[str], log: Path, env: Mapping[str, str]) -> tuple[subprocess.Popen, Output]:
    """Starts a command in a session of its own, to be called by this process's main thread.

    The command is killed when this process dies. Returns: it, and its output, which nobody takes
    before `follow`: a process with threads should not fork. Raises: OSError: no such program.
    """
    output = Output(log)
    try:
        popen = tied(command, env, output.writer)
    except BaseException:
        os.close(output.writer)
        output.close()
        raise
    os.close(output.writer)
    return popen, output


def tied(command: list[str], env: Mapping[str, str], output: int | None = None) -> subprocess.Popen:
    """Starts a command in a session of its own, which is killed when this process dies.

    output: the descriptor that it prints to; None: those of this process.
    """
    agent = os.getpid()
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: _die_with(agent),
    )


def _die_with(agent: int) -> None:
    """Makes the kernel kill this child when the agent's thread that forked it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes orphaned descendants of this process its children."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


# ---- the agent


TICK_S = 0.1  # (chosen) how soon the end of a process is seen
DUMP_S = 1.0  # (chosen) for the stacks of all threads to be written


class Agent:
    """Serves one driver until it is told to quit, or until the driver is gone."""

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

        driver: its host:port. env: environment of the training processes, to which the driver adds
        its variables.
        Raises: OSError if no driver listens there, if it does not hold the secret, or if it has an
          agent of this name.
        """
        self._secret, self._env, self._period, self._name = secret, env, period, name
        self._meter = HostMeter()
        self._line: Line = dial(driver, secret, AGENT, name, tls)
        self._address: str = self._line.sock.getsockname()[0]
        self._mark = secrets.token_hex(16)
        self._join()
        heartbeat.sweep_folders(heartbeat.shared_memory())
        self._claim()
        adopt_orphans()
        self._processes: list[Process] = []
        self._attempt = 0
        self._asked: int | None = None
        self.was_asked = False  # to stop, by a signal
        self._disk = Path(".")
        self._reaper = self._new_reaper()

    def _claim(self) -> None:
        """Makes a folder in shared memory, and the lease in it."""
        self._folder, self._lock = heartbeat.claim_folder(heartbeat.shared_memory())
        self._lease = heartbeat.Lease(heartbeat.lease_file(self._folder / "any"))

    def _release(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lease.close()
        os.close(self._lock)

    def _new_reaper(self) -> subprocess.Popen:
        """Returns a reaper that knows all that is running."""
        fresh = subprocess.Popen(
            [sys.executable, "-S", "-E", str(reaper.__file__)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        known = [f"folder {self._folder}", f"mark {self._mark}"]
        known += [f"group {p.popen.pid}" for p in self._processes]
        assert fresh.stdin is not None
        fresh.stdin.write("\n".join(known) + "\n")
        fresh.stdin.flush()
        return fresh

    def _join(self) -> None:
        """Says where this agent is, and waits to be taken."""
        try:
            pid = os.getpid()
            self._line.send({"address": self._address, "pid": pid, "mark": self._mark})
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
        try:
            assert self._reaper.stdin is not None
            self._reaper.stdin.write(words + "\n")
            self._reaper.stdin.flush()
        except OSError:  # somebody has killed it
            self._dismiss_reaper()
            self._reaper = self._new_reaper()

    def _dismiss_reaper(self) -> None:
        """Waits until the reaper has cleaned up and ended."""
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            self._reaper.stdin.close()
        self._reaper.wait()

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
                ended = any(
                    p.popen.returncode is None and p.code() is not None for p in self._processes
                )
                if ended or time.monotonic() >= due:
                    due = time.monotonic() + self._period
                    self._report()
        except OSError:
            return 1
        finally:
            self._stop()
            self._line.close()
            self._release()
            self._dismiss_reaper()

    def _ask(self, number: int, _: object) -> None:
        """Asks the driver to let the whole job save and stop; a second signal ends this agent."""
        signal.signal(number, signal.SIG_DFL)
        self._asked, self.was_asked = number, True

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "lease":
                self._lease.renew(message["since"])
            case "moment":
                self._line.send({"moment": heartbeat.now()})
            case "ping":
                self._line.send({"mine": time.monotonic()})
            case "port":
                with socket.socket(wire.family(self._address)) as probe:
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
                self._line.send({"answers": checks.answer(self._address, self._secret)})
            case "reach":
                try:
                    figure = checks.reach(message["at"], self._secret)
                    self._line.send({"reached": figure})
                except (OSError, ValueError) as error:
                    self._line.send({"reached": str(error) or type(error).__name__})
            case "check":
                self._line.send({"checks": checks.run(self._disk)})

    def _start(self, message: dict[str, Any]) -> None:
        """Starts the processes of an attempt.

        message: attempt, command, folder, {rank: env}, memory: whether to go on from copies there,
        lease: how old it may grow, since: from when it counts, run: the driver's name of the job.
        """
        self._attempt = message["attempt"]
        if not self._lease.is_there():  # somebody has cleaned up shared memory
            self._release()
            self._claim()
            self._tell_reaper(f"folder {self._folder}")
        self._lease.renew(message["since"], message["lease"])
        logs = Path(message["folder"])
        for place, (rank, env) in enumerate(message["ranks"].items()):
            memory = self._folder / f"memory{place}"  # stays from attempt to attempt
            if not message["memory"]:
                memory.unlink(missing_ok=True)
            progress = self._folder / f"attempt{self._attempt}-rank{rank}"
            log = logs / f"rank{rank}.log"
            names = {
                "MEGAJAX_PROGRESS": str(progress),
                "MEGAJAX_MEMORY": str(memory),
                "MEGAJAX_ATTEMPT": str(self._attempt),
                "MEGAJAX_RUN": message.get("run", ""),
                reaper.MARK: self._mark,
            }
            try:
                popen, output = run(message["command"], log, {**self._env, **env, **names})
            except OSError as error:  # another one would say the same
                program = message["command"][0]
                at = "" if error.filename in (None, program) else f": {error.filename}"
                self._line.send({"unable": f"cannot start {program!r}: {error.strerror}{at}"})
                return
            self._disk = logs
            self._processes.append(Process(int(rank), popen, progress, output))
            self._tell_reaper(f"group {popen.pid}")
        for p in self._processes:
            p.output.follow()

    def _report(self) -> None:
        reaper.reap({self._reaper.pid, *(p.popen.pid for p in self._processes)})
        name, meter = self._name, self._meter
        report = meter.records(name, self._disk)
        for p in self._processes:
            text = p.output.new_text()
            if p.rank == 0 and text:
                self._line.send({"out": text})
            report += p.records(name, meter, text)
        rows = [without_host(r) for r in report]
        self._line.send({"report": self._attempt, "records": rows, "moment": heartbeat.now()})

    def _stacks(self) -> dict[int, str]:
        """Returns the Python stacks of every rank, or why a rank has none."""
        live = [p for p in self._processes if p.code() is None]
        asked = [p for p in live if heartbeat.read(p.progress) is not None]
        for p in asked:  # without a record nobody waits for the signal, and it would kill
            p.send(signal.SIGUSR1)
        time.sleep(DUMP_S if asked else 0.0)
        stacks = {}
        for p in self._processes:
            file = heartbeat.stacks_file(p.progress)
            text = ""
            with contextlib.suppress(OSError):
                text = file.read_text(errors="replace")
            state, code = p.state(), p.code()
            text = text or f"no stacks: state {state}, exit code {code}\n"
            stacks[p.rank] = text + p.output.missing()
        return stacks

    def _spans(self) -> dict[int, list]:
        """Returns the last sections of every rank, of dead ones too; the one that it is in last."""
        sections = {}
        for p in self._processes:
            spans, now = heartbeat.read_spans(p.progress), heartbeat.read(p.progress)
            if now is not None:
                spans.append(Span(now.section, now.step, now.time, time.monotonic()))
            sections[p.rank] = [dataclasses.astuple(s) for s in spans]
        return sections

    def _stop(self) -> None:
        """Kills every process with all that it started, and waits until none is left."""
        for p in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(p.popen.pid, signal.SIGKILL)
        for p in self._processes:
            p.popen.wait()
        reaper.kill_started(self._mark, {self._reaper.pid})  # what left its group
        ended, self._processes = self._processes, []
        for p in ended:
            with contextlib.suppress(OSError):
                self._tell_reaper(f"reaped {p.popen.pid}")
            p.output.close()
            for file in (
                p.progress,
                heartbeat.stacks_file(p.progress),
                records.records_file(p.progress),
            ):
                file.unlink(missing_ok=True)
