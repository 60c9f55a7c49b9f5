"""Kills all processes that an agent's commands have started. Standard library only.

Run as a script, this file is the agent's reaper: it reads the lines 'group N', 'reaped N', 'mark
WORD' and 'folder PATH' from its standard input. When the input ends, because the agent closed it or
died, the reaper kills the process groups and all processes with the mark, and removes the folders
(in shared memory). It runs in its own session and ignores signals that are meant for the agent.

A process that left its session and its parents is recognised by the mark in its environment. If it
cleared its environment too, it is still a descendant of the agent, which adopts orphans while it
lives.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable

MARK = "MEGAJAX_MARK"  # of the environment; its value is the agent's own
PAUSE_S = 0.01  # (chosen) until killed processes are looked for again
LONGEST_S = 5.0  # (chosen) for killed processes to be gone, before the reaper gives up


def marked(mark: str) -> set[int]:
    """Returns the processes of this user with the mark in their environment."""
    want = f"{MARK}={mark}".encode()
    pids = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if want in file.read().split(b"\0"):
                pids.add(int(name))
    return pids


def descendants(ancestor: int, spared: Iterable[int] = ()) -> set[int]:
    """Returns all descendants of a process, without zombies.

    spared: processes that are left out, with their descendants.
    """
    children: dict[int, list[int]] = {}
    zombies = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
            children.setdefault(int(parent), []).append(int(name))
            if state in (b"Z", b"X"):
                zombies.add(int(name))
    below, open_, spared = set(), [ancestor], set(spared)
    while open_:
        for child in children.get(open_.pop(), []):
            if child not in spared and child not in below:
                below.add(child)
                open_.append(child)
    return below - zombies


def kill_all(find: Callable[[], set[int]], seconds: float = float("inf")) -> bool:
    """Kills the processes that `find` returns until it returns none; tells whether that succeeded.

    Processes that this user may not kill are left alone.
    """
    end, others = time.monotonic() + seconds, set()
    while left := find() - others:
        if time.monotonic() > end:
            return False
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                others.add(pid)
        time.sleep(PAUSE_S)
    return True


def kill_started(mark: str, spared: Collection[int]) -> None:
    """Kills all that this process's commands have left behind, until nothing of it lives.

    spared: children that live on, whose exit codes others take.
    """

    def living() -> set[int]:
        reap(spared)
        return descendants(os.getpid(), spared) | marked(mark)

    kill_all(living)


def reap(spared: Collection[int]) -> None:
    """Reaps adopted processes that ended; `spared` processes are reaped by others."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in spared:
                return  # a spared child hides the adopted ones, until its code is taken
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return


def main() -> None:
    """Reads, waits, and cleans up."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_IGN)
    groups, folders, marks = [], [], []
    for line in sys.stdin:
        if not line.endswith("\n"):
            break  # the agent died while it wrote: half a number is another group
        word, _, argument = line.strip().partition(" ")
        if word == "group":
            groups.append(int(argument))
        elif word == "reaped":
            groups = [group for group in groups if group != int(argument)]
        elif word == "mark":
            marks.append(argument)
        elif word == "folder":
            folders.append(argument)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for mark in marks:
        kill_all(lambda mark=mark: marked(mark), LONGEST_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
