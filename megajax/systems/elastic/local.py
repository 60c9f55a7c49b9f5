"""Several processes of one job on this machine, without a driver: `megajax train --processes=2`.

Process 0 prints to the console, the others to files. The first failure ends all of them; nothing is
restarted, which scripts/supervise.py does. The processes meet at a port of this machine, and
core/mesh.py divides its devices among them. No jax import.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megajax.core.errors import UserError
from megajax.systems.elastic import agent, events

MARK = "MEGAJAX_ONE_HOST"  # in the environment of such a process
TICK_S = 0.05  # (chosen) how soon the end of a process is seen
GRACE_S = 15.0  # (chosen) for a process to end after another one has failed
LINES = 20  # (chosen) of the output of a process that failed
MOST = 1024  # (chosen) processes


def is_started(processes: int, env: Mapping[str, str]) -> bool:
    """Tells whether this process is one of those that `run` has started.

    Raises: UserError where another launcher has started it, or where there would be too many.
    """
    if processes == 1 or (MARK in env and env.get("JAX_NUM_PROCESSES") == str(processes)):
        return True
    if "JAX_COORDINATOR_ADDRESS" in env:
        raise UserError(
            f"processes={processes}: a launcher has started this process already (it set "
            "JAX_COORDINATOR_ADDRESS); leave the flag out (--processes)"
        )
    if processes > MOST:
        raise UserError(f"processes={processes} must be in [1, {MOST}] (--processes)")
    return False


def run(processes: int, command: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs the processes of a job to their ends. Returns the exit code of the first that failed.

    Signals that ask this process to end reach all of them. Raises: UserError when the files of
    their output cannot be made.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    try:
        folder = events.new_folder("processes")
    except OSError as error:
        raise UserError(f"cannot write to runs/processes: {error.strerror}") from None
    logs = [folder / f"rank{rank}.log" for rank in range(1, processes)]
    shown = logs[0].name if processes == 2 else f"rank1.log to rank{processes - 1}.log"
    print(f"{processes} processes; those after process 0 print to {folder}/{shown}", flush=True)
    job = {**env, MARK: "1", "JAX_COORDINATOR_ADDRESS": address}
    job["JAX_NUM_PROCESSES"] = str(processes)
    asked: list[int] = []  # signals
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays what it is
            signal.signal(number, lambda number, _: asked.append(number))
    started: list[subprocess.Popen] = []
    outputs: list[agent.Output] = []
    try:
        started.append(agent.tied(list(command), {**job, "JAX_PROCESS_ID": "0"}))
        for rank, log in enumerate(logs, 1):
            popen, output = agent.run(list(command), log, {**job, "JAX_PROCESS_ID": str(rank)})
            started.append(popen)
            outputs.append(output)
        for output in outputs:  # its threads begin after the last fork
            output.follow()
        rank, was_asked = _wait(started, asked)
    finally:
        _end(started)
        for output in outputs:
            output.close()
    if rank is None:
        return 0
    code = started[rank].returncode
    if rank and not was_asked:
        _show(rank, code, logs[rank - 1])
    return code if code > 0 else agent.SIGNALLED - code


def _wait(started: Sequence[subprocess.Popen], asked: list[int]) -> tuple[int | None, bool]:
    """Returns (the first process that failed, None: all ended well; whether a signal came)."""
    was_asked = False
    while True:
        while asked:
            was_asked, number = True, asked.pop(0)
            for process in started:
                if process.poll() is None:
                    process.send_signal(number)
        codes = [process.poll() for process in started]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and not was_asked:
            return failed[0], False
        if None not in codes:
            return (failed[0] if failed else None), was_asked
        time.sleep(TICK_S)


def _end(started: Sequence[subprocess.Popen]) -> None:
    """Ends the processes that are left: SIGTERM, and SIGKILL to their groups after GRACE_S."""
    for process in started:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        time.sleep(TICK_S)
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _show(rank: int, code: int, log: Path) -> None:
    """Prints the end of the output of a process that failed."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    print(f"process {rank} ended with exit code {code}; its last lines ({log}):", file=sys.stderr)
    print("\n".join(f"  {line}" for line in lines[-LINES:]), file=sys.stderr)
