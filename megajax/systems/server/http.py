"""Serving an application on a socket until a signal says stop.

The first SIGTERM or Ctrl-C: no new connection, no new request, the running ones end, exit code 0.
The second one, or stop_timeout_s: what runs is cut off, exit code 1.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from megajax.core.errors import UserError
from megajax.systems.server.app import Server
from megajax.systems.server.worker import Worker

IDLE_S = 30  # (chosen) a connection without a request is kept
LATE_S = 5  # (chosen) for the last events after the requests were cut off


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 is any free one.

    It is opened before a model is read, so that a port in use is told at once.
    Raises: UserError.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(2048)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; take another port, or 0 "
            "for any that is free (--port, --host)"
        ) from None
    return made


def address(made: socket.socket) -> str:
    """Returns where a socket listens, as a URL."""
    host, port = made.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Http(uvicorn.Server):
    """Leaves the signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(server: Server, worker: Worker, made: socket.socket, stop_timeout_s: float) -> int:
    """Serves until a signal. Returns the exit code."""
    config = uvicorn.Config(
        server.app, loop="asyncio", http="h11", ws="none", lifespan="off", access_log=False,
        log_level="warning", timeout_keep_alive=IDLE_S, server_header=False,
    )  # fmt: skip
    http, loop, asked = _Http(config), asyncio.get_running_loop(), asyncio.Event()
    signals = 0

    def ask() -> None:
        nonlocal signals
        signals += 1
        asked.set()
        worker.stop()
        http.should_exit = True
        if signals > 1:
            cut.set()

    cut = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
    worker.start()
    serving = asyncio.create_task(http.serve(sockets=[made]))
    waiting = asyncio.create_task(asked.wait())
    await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not asked.is_set():  # uvicorn gave up
        worker.stop()
        return 1
    print("stopping: running requests end first", flush=True)
    ended = asyncio.create_task(_ended(serving, worker))
    await asyncio.wait(
        {ended, asyncio.create_task(cut.wait())},
        timeout=stop_timeout_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    if ended.done():
        return 0
    print(f"stopping: {worker.live} requests are cut off", file=sys.stderr, flush=True)
    worker.abort()
    await asyncio.wait({ended}, timeout=LATE_S)
    if not ended.done():  # the engine hangs in a step, and would keep the process
        sys.stdout.flush()
        os._exit(1)
    return 1


async def _ended(serving: asyncio.Task, worker: Worker) -> None:
    await serving
    await worker.join()
