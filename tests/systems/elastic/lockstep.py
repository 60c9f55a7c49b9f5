"""A training job without jax, for tests of supervision: ranks in lockstep over TCP.

lockstep.py FOLDER STEPS SAVE_EVERY PAUSE_S [FAULTS]. In each step every rank sends the sum of its
rows to rank 0, which sends back the sum of all: an all-reduce. The parameter is a hash over all
sums, whatever the number of ranks; rank 0 saves it. As under jax a lost connection raises
JaxRuntimeError, a clean-up at the end waits for the others for ever after an error, and a SIGTERM
to one rank makes all save in the same step, say so and exit with 0. Rank 0 leaves a row a step in
metrics.jsonl, and every rank records its steps for its agent.
"""

import atexit
import hashlib
import json
import math
import os
import pathlib
import signal
import socket
import struct
import sys
import time

from megajax.monitor import faults, records
from megajax.monitor.records import Recorder
from megajax.monitor.timers import Timers

ROWS = 12
SHARE = struct.Struct("<d?")


class JaxRuntimeError(Exception):
    """As jax calls it."""


def connect(rank, ranks):
    """Rank 0 gets the sockets of all others, in order; the others the one to rank 0."""
    if ranks == 1:
        return []
    host, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
    if rank == 0:
        with socket.create_server((host, int(port))) as server:
            socks = {}
            while len(socks) < ranks - 1:
                sock, _ = server.accept()
                socks[sock.recv(1)[0]] = sock
            return [socks[r] for r in sorted(socks)]
    while True:
        try:
            sock = socket.create_connection((host, int(port)))
        except OSError:
            time.sleep(0.02)
        else:
            sock.sendall(bytes([rank]))
            return [sock]


def receive(sock):
    try:
        raw = sock.recv(SHARE.size, socket.MSG_WAITALL)
    except OSError:
        raw = b""
    if len(raw) < SHARE.size:
        raise JaxRuntimeError("INTERNAL: Gloo all-reduce failed: Connection closed by peer")
    return SHARE.unpack(raw)


def all_reduce(rank, socks, value, stop):
    if rank == 0:
        for other in map(receive, socks):
            value, stop = value + other[0], stop or other[1]
        for sock in socks:
            sock.sendall(SHARE.pack(value, stop))
        return value, stop
    socks[0].sendall(SHARE.pack(value, stop))
    return receive(socks[0])


def main(folder, steps, every, pause_s, spec=""):
    folder = pathlib.Path(folder)
    rank = int(os.environ.get("JAX_PROCESS_ID", 0))
    ranks = int(os.environ.get("JAX_NUM_PROCESSES", 1))
    clean = []
    atexit.register(lambda: clean or time.sleep(60))  # jax's barrier; runs after the timers' word
    progress, attempt = pathlib.Path(os.environ["MEGAJAX_PROGRESS"]), os.environ["MEGAJAX_ATTEMPT"]
    timers = Timers.of_process(progress)
    recorder = Recorder(records.of_process(progress), rank)
    injector = faults.Injector(faults.parse(spec), rank, int(attempt), recorder.emit)
    faults._poison = lambda state: math.nan
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    saved = folder / "saved.json"
    at = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "value": ""}
    socks = connect(rank, ranks)
    print(f"rank {rank} of {ranks} begins after step {at['step']}", flush=True)
    memory = pathlib.Path(os.environ["MEGAJAX_MEMORY"])
    print(f"in memory: {memory.read_text() if memory.exists() else 'nothing'}", flush=True)
    memory.write_text(f"rank {rank}, attempt {attempt}")
    step, value = at["step"], at["value"]
    while step < int(steps):
        step += 1
        timers.enter("data", step)
        part = float(sum((step * 31 + row * 7) % 101 for row in range(rank, ROWS, ranks)))
        part = injector.strike(step, part)
        timers.enter("prepare", step)
        time.sleep(float(pause_s))
        timers.enter("launch", step)
        total, stop = all_reduce(rank, socks, part, bool(asked))
        timers.enter("wait", step)
        timers.loss = total
        if not math.isfinite(total):
            timers.has_bad_state = not math.isfinite(part)
            clean.append(1)
            sys.exit(2)
        recorder.emit(step, {"total": total, "step_time_s": float(pause_s)})
        value = hashlib.sha256(f"{value}{total}".encode()).hexdigest()
        if rank == 0:
            row = {"step": step, "time": time.time(), "loss": total, "step_time_s": float(pause_s)}
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        if step % int(every) == 0 or step == int(steps) or stop:
            timers.enter("save", step)
            if rank == 0:
                fresh = folder / "saved.new"
                fresh.write_text(json.dumps({"step": step, "value": value}))
                fresh.rename(saved)
        if stop:
            break
    timers.enter("told" if step < int(steps) else "end", step)
    clean.append(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
