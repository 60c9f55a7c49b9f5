"""Cleans up after an agent that was killed: standard library only, started as a file.

It reads lines from its standard input: 'group N' and 'folder PATH'. When the input ends, because
the agent closed it or is dead in whatever way, the process groups are killed and the folders (in
shared memory) removed. It lives in a session of its own and ignores what is meant for the agent.
"""

import contextlib
import os
import shutil
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups, folders = [], []
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "group":
            groups.append(int(rest))
        elif word == "reaped":
            groups.remove(int(rest))
        elif word == "folder":
            folders.append(rest)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
