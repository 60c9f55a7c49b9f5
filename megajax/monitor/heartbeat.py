"""The progress of one process in shared memory: the loop writes it, another process reads it.

A job that hangs cannot say so, and liveness is not progress: a rank asleep before a collective
answers every ping while all others wait for ever. So the loop itself leaves a record of where it is
(step, named section, moment) each time it enters a section, about a microsecond, and an agent
outside watches whether it moves (MegaScale sections 4 and 5.1).

The file holds two copies of the record, written in turn, and a ring of the last SPANS finished
sections. A copy begins and ends with its number, and is written from front to back: a writer killed
in the middle leaves one whose numbers differ, and the other copy whole. A reader takes the newest
copy whose numbers agree, so a torn record is never seen. Moments are CLOCK_MONOTONIC: comparable
between the processes of one host, not between hosts. Below are the lease, without which the
processes of a host end themselves, and the folder of all these files.

No jax import: an agent reads it without touching a device.
"""

import contextlib
import faulthandler
import math
import mmap
import os
import select
import shutil
import signal
import struct
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megajax.core import files
from megajax.core.errors import unwritable
from megajax.core.files import open_own

# In the order in which a step passes through them: of two ranks in the same step, the one in the
# earlier section is behind. The last four are the end of a process; 'told': it saved and stopped
# because a signal told it to, before its last step.
SECTIONS = (
    "start", "data", "prepare", "launch", "compile", "wait", "save", "evaluate", "end", "told",
    "failed", "lost",
)  # fmt: skip
CODES = {name: code for code, name in enumerate(SECTIONS)}

# beat, time, step, loss, own_s, step_s, pid, section, has_bad_state, beat again
_RECORD = struct.Struct("<QdqdddIHHQ")
_NUMBER = 8
TRIES = 100  # (chosen) readings, of about a microsecond, before a copy counts as torn for good
_SLOT = 128  # two cache lines: the copies never share one
_SPAN = struct.Struct("<ddqq")  # begin, end, step, section
_SPAN_BYTES = _SPAN.size
_RING = 4096  # where the spans begin
SPANS = 1024  # (chosen) about 250 steps of four sections each
SIZE = _RING + SPANS * _SPAN.size


@dataclass(frozen=True)
class Progress:
    """The progress of a process.

    beat: number of sections entered so far. time: when the last one was entered, seconds of
    CLOCK_MONOTONIC. loss: loss of the last finished step, 0 before the first. own_s: seconds that
    this process spent in its last step before it launched it, in which it waits for no other rank.
    step_s: seconds between its last two steps. has_bad_state: whether the part of the state that
    this process's devices hold is not finite.
    """

    beat: int
    time: float
    step: int
    loss: float
    own_s: float
    step_s: float
    pid: int
    section: str
    has_bad_state: bool = False

    @property
    def has_bad_loss(self) -> bool:
        """Whether the last finished step had no finite loss."""
        return not math.isfinite(self.loss)


@dataclass(frozen=True)
class Span:
    """A finished section: begin and end in seconds of CLOCK_MONOTONIC."""

    section: str
    step: int
    begin: float
    end: float


class Heartbeat:
    """The writer. One per process; the only caller of `write`."""

    def __init__(self, path: Path):
        """Makes the file, or reuses one of the same size.

        Raises: UserError when its folder has no room: the pages are taken here, because a page that
          is missing later would end the process by SIGBUS, and nobody can watch without them.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_own(path), "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, SIZE)
                file.truncate(SIZE)
                self._memory = mmap.mmap(file.fileno(), SIZE)
        except OSError as error:
            raise unwritable(
                f"cannot keep {SIZE:,} bytes of progress in {path}: {error.strerror}; make room "
                f"in {path.parent}, which the agent on this host reads",
                error,
            ) from None
        self._pid = os.getpid()
        self._beat = 0

    def write(
        self,
        now: float,
        step: int,
        section: int,
        loss: float,
        own_s: float,
        step_s: float,
        has_bad_state: bool = False,
        pack=_RECORD.pack_into,  # a default costs no look-up
    ) -> None:
        """Publishes that a section (its code) of a step was entered at `now`."""
        self._beat = beat = self._beat + 1
        pack(
            self._memory, (beat & 1) * _SLOT,
            beat, now, step, loss, own_s, step_s, self._pid, section, has_bad_state, beat,
        )  # fmt: skip

    def keep(self, begin: float, end: float, step: int, section: int, pack=_SPAN.pack_into) -> None:
        """Adds a finished section to the ring; `write` must follow."""
        pack(
            self._memory, _RING + (self._beat - 1) % SPANS * _SPAN_BYTES, begin, end, step, section
        )


def _copies(memory: mmap.mmap) -> list[Progress | None]:
    """Returns the two copies, None for one that is torn; copy 0 was never written."""
    copies: list[Progress | None] = []
    for at in (0, _SLOT):
        # Against the order of writing: the last number says that all before it was there, the first
        # that nothing of the next copy was.
        last = memory[at + _RECORD.size - _NUMBER : at + _RECORD.size]
        record = memory[at : at + _RECORD.size]
        first = memory[at : at + _NUMBER]
        beat, now, step, loss, own_s, step_s, pid, code, bad, _ = _RECORD.unpack(record)
        if first == last == record[:_NUMBER] and code < len(SECTIONS):
            section = SECTIONS[code]
            copies.append(Progress(beat, now, step, loss, own_s, step_s, pid, section, bool(bad)))
        else:
            copies.append(None)
    return copies


def read(path: Path) -> Progress | None:
    """Returns the newest whole record, None when the process has written none."""
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as memory,
        ):
            for _ in range(TRIES):  # a copy that stays torn is of a dead writer
                copies = _copies(memory)
                if None not in copies:
                    break
    except (FileNotFoundError, ValueError):  # not made, or not yet of its size
        return None
    return max((p for p in copies if p is not None and p.beat), key=lambda p: p.beat, default=None)


def read_spans(path: Path) -> list[Span]:
    """Returns the last finished sections, oldest first, also of a process that is dead."""
    newest = read(path)  # first: the writer goes on meanwhile
    if newest is None:
        return []
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    if len(raw) < SIZE:
        return []
    # The first entry has no span before it; a live writer may be at work on the oldest of the ring.
    count = newest.beat - 1
    readable = range(max(count - SPANS + 8, 0), count)
    spans = []
    for i in readable:
        begin, end, step, code = _SPAN.unpack_from(raw, _RING + i % SPANS * _SPAN.size)
        if 0 <= code < len(SECTIONS):
            spans.append(Span(SECTIONS[code], step, begin, end))
    return spans


def stacks_file(path: Path) -> Path:
    """Returns where a process with this progress file writes its stacks."""
    return path.with_suffix(".stacks")


def dump_stacks_on_signal(path: Path) -> None:
    """Makes SIGUSR1 write all Python stacks beside the progress file. Raises: OSError.

    faulthandler answers in the signal handler itself, so a thread that holds the interpreter's
    lock, or is blocked in C++, cannot keep it from answering.
    """
    stacks = os.fdopen(open_own(stacks_file(path)), "w")  # open as long as the process lives
    stacks.truncate(0)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


# ---- the lease of a host's training processes: without a fresh one they end themselves
#
# The driver renews it with every report of the host's agent, and the agent leaves its moment in a
# file beside the progress records. When the agent is frozen or dead, or cannot reach the driver,
# the moment grows old, and each process ends before the driver starts its successor elsewhere. The
# moment is the agent's own, from before the driver answered: an answer that was long on its way
# renews nothing. Moments are CLOCK_BOOTTIME, which goes on while a machine sleeps; they are
# compared on one host only.


EXPIRED = 75  # the exit code: nothing is wrong with the command, start it elsewhere
LOOK_S = 0.5  # (chosen) between two looks at the lease
_LEASE = struct.Struct("<ddQQ")  # moment, longest age in seconds, process, its namespace


def now() -> float:
    """Returns the moment, in seconds since this machine started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lease_file(progress: Path) -> Path:
    """Returns the file of the lease for a process with this progress file."""
    return progress.with_name("lease")


def _namespace() -> int:
    """Returns the process-number namespace of this process, 0 if it is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Lease:
    """The writer: an agent."""

    def __init__(self, path: Path):
        """Makes the file. Raises: OSError."""
        self._file = open_own(path)
        self._moment = self._longest = 0.0

    def renew(self, moment: float, longest: float | None = None) -> None:
        """Lets the processes go on until `longest` seconds after the moment.

        longest: None: the same as in the last call.
        """
        self._longest = self._longest if longest is None else longest
        self._moment = max(self._moment, moment)
        record = _LEASE.pack(self._moment, self._longest, os.getpid(), _namespace())
        with contextlib.suppress(OSError):  # no memory is left: the lease grows old
            os.pwrite(self._file, record, 0)

    def is_there(self) -> bool:
        """Tells whether the file still exists, so that processes can read the lease."""
        return os.fstat(self._file).st_nlink > 0

    def close(self) -> None:
        """Closes the file; it is removed with its folder."""
        os.close(self._file)


class Watch:
    """The reader: a training process. A thread looks at the lease as long as the process lives."""

    def __init__(self, path: Path):
        """Begins to watch. Raises: OSError if there is no lease."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._agent = -1
        _, _, agent, namespace = self._read()
        if namespace == _namespace() != 0:
            try:
                self._agent = os.pidfd_open(agent)
            except ProcessLookupError:
                end("its agent is dead")
            except OSError:  # an old kernel, or no descriptor is left: the lease grows old
                self._agent = -1
        threading.Thread(target=self._look, name="lease", daemon=True).start()

    def _read(self) -> tuple[float, float, int, int]:
        raw = os.pread(self._file, _LEASE.size, 0)
        return _LEASE.unpack(raw) if len(raw) == _LEASE.size else (0.0, 0.0, 0, 0)

    def lost(self) -> str | None:
        """Returns why this process may not go on, None while it may."""
        try:
            if os.fstat(self._file).st_nlink == 0:
                return "its agent has ended"
            moment, longest, _, _ = self._read()
        except OSError as error:  # else the thread that looks would end, and nobody would look
            return f"its lease cannot be read: {error.strerror}"
        age = now() - moment
        if age > longest:
            return f"its agent heard nothing of the driver for {age:.1f} s of {longest:g}"
        return None

    def check(self) -> None:
        """Ends this process at once when its lease has run out."""
        if (why := self.lost()) is not None:
            end(why)

    def _look(self) -> None:
        while True:
            if self._agent < 0:
                time.sleep(LOOK_S)
            elif select.select([self._agent], [], [], LOOK_S)[0]:
                end("its agent is dead")
            self.check()


def of_process(progress: Path) -> Watch | None:
    """Returns a watch of the lease beside this file, None if there is no lease."""
    try:
        return Watch(lease_file(progress))
    except FileNotFoundError:
        return None


def end(why: str) -> None:
    """Ends this process without a clean-up, which could wait for others or write into storage."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:  # a pipe that nobody empties would hold us up
            os.write(2, f"[lease] process {os.getpid()} ends: {why}\n".encode())
    os._exit(EXPIRED)


# ---- the folder of an agent in shared memory: progress records, and copies of the training state
#
# The agent removes it at its end, its reaper when the agent was killed. Where all were killed at
# one time (a scheduler does so) the next agent of that machine does: each folder is locked by its
# agent as long as that lives, whatever its name or its namespace of process numbers. A training
# that watches itself (systems/minder/run.py) has such a folder too.
#
# Everybody may write to /dev/shm, so nothing there is known by its name. A folder has a name that
# nobody can guess, no other user may enter it, and the file FOLDER_MARK tells it from what this
# user keeps there under a similar name. Folders of other users are never looked into.


PREFIX = "megajax-"
FOLDER_MARK = ".megajax-agent"
YOUNG_S = 60.0  # (chosen) a folder may be without its lock for a moment after it was made


def shared_memory() -> Path:
    """Returns where shared memory is, or else the folder for temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def claim_folder(parent: Path) -> tuple[Path, int]:
    """Makes a folder in `parent`, locked so that `sweep_folders` of other processes leaves it.

    Returns: (the folder, an open descriptor of it). The lock lasts until the descriptor is closed,
      at the latest until this process ends; a caller that ignores the descriptor keeps the lock.
    Raises: OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    files.lock(lock, wait_s=None)
    os.close(open_own(folder / FOLDER_MARK))
    return folder, lock


def sweep_folders(parent: Path) -> list[Path]:
    """Removes this user's folders whose agents are gone. Returns them."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                facts = os.fstat(lock)
                if facts.st_uid != os.geteuid() or time.time() - facts.st_ctime < YOUNG_S:
                    continue
                # Raises when it is not the folder of an agent.
                os.stat(FOLDER_MARK, dir_fd=lock, follow_symlinks=False)
                if files.lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
            finally:
                os.close(lock)
    return removed
