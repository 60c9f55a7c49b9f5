"""A training process as its agent sees it, from outside, and how it is started and tied to it."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from megajax.monitor import heartbeat
from megajax.monitor.meter import HostMeter
from megajax.monitor.records import Reader, Record, beside, newest
from megajax.systems.elastic.output import Output

LINES = 20  # (chosen) keyword lines told of one process
KEYWORDS = (
    "Xid", "NCCL WARN", "CUDA_ERROR", "CUDA error", "Terminating process because the JAX",
    "out of memory", "RESOURCE_EXHAUSTED", "No space left", "ECC error", "injected fault",
)  # fmt: skip
TRACEBACK = "Traceback (most recent call last)"
ERRORS = ("error: ", "[lease] ", "Check failed: ")  # the first two begin a line
PROGRESS = ("beat", "section", "loss", "own_s", "step_s", "has_bad_state")  # of a heartbeat
SIGNALLED = 128  # what a shell, and uv run, add to the number of the signal that ended a program
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclasses.dataclass
class Process:
    """A training process. Its own session: a kill of the group takes what it started along."""

    rank: int
    popen: subprocess.Popen
    progress: Path
    output: Output
    rest: str = ""
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

    def words(self, text: str) -> list[str]:
        """Returns whole lines with a keyword, up to LINES of a process; notes the last error."""
        *lines, self.rest = (self.rest[-1000:] + text).split("\n")
        if lines and (self.in_traceback or any(word in text for word in (TRACEBACK, *ERRORS))):
            self._note(lines)
        present = [word for word in KEYWORDS if word in text or word in lines[0]] if lines else []
        found = [line[:300] for line in lines if any(word in line for word in present)]
        found = found[: LINES - self.told]
        self.told += len(found)
        return found

    def _note(self, lines: list[str]) -> None:
        """Finds the last error: what ends a traceback, and what a script or the lease says."""
        for line in lines:
            if line.startswith(TRACEBACK):
                self.in_traceback = True
            elif self.in_traceback and line and not line[0].isspace():
                self.error, self.in_traceback = line[:300], False
            elif line.startswith(ERRORS[:2]) or ERRORS[2] in line:
                self.error = line[:300]

    def records(self, host: str, meter: HostMeter, text: str) -> list[Record]:
        """Returns what there is to say of it: the newest of what it recorded itself, and what is
        seen from outside, which counts where both have a name. text: new in its log."""
        self.reader = self.reader or Reader(beside(self.progress), host, self.rank)
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
    agent, output = os.getpid(), Output(log)
    try:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output.writer,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: _die_with(agent),
        )
    except BaseException:
        os.close(output.writer)
        output.close()
        raise
    os.close(output.writer)
    return popen, output


def _die_with(agent: int) -> None:
    """Makes the kernel kill this child when the agent's thread that forked it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes what this process's children leave behind children of this process."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap(own: Collection[int]) -> None:
    """Takes the exit codes of adopted processes; those of `own` are for others to take."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in own:
                return  # one of our own hides the adopted ones, until its code is taken
            os.waitpid(found.si_pid, os.WNOHANG)
        except ChildProcessError:
            return
