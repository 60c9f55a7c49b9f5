"""Serving an application on a socket until a signal says stop.

The first SIGTERM or Ctrl-C: no new connection, no new request, the running ones end, exit code 0.
The second one, or the end of stop_timeout_s: what runs is cut off, exit code 1. An engine that has
failed answers nothing any more: exit code 75, for a supervisor to start the process anew.

A connection on which the client sends nothing, or half of a request, or reads nothing, is closed
after a time limit. If there are more connections than descriptors allow, the oldest ones without a
request are closed first.
"""

import asyncio
import contextlib
import errno
import functools
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from absl import logging
from uvicorn.protocols.http.h11_impl import H11Protocol

from megajax.core.errors import UserError
from megajax.systems.server.base import Work

IDLE_S = 30  # (chosen) for which a connection stays open between two requests
HEAD_S = 20  # (chosen) from a connection's begin, or a request's first byte, to its last header
STALLED_S = 30  # (chosen) for which a client may read too slowly for the next part of an answer
CHECK_S = 1  # (chosen) between two looks at all connections
LATE_S = 5  # (chosen) for the last bytes of a connection that is being closed
SPARE = 64  # (chosen) descriptors that are left for files and for connections being accepted
ROUND = 16  # (chosen) connections accepted at once, so that several rounds stay within SPARE
QUEUE = 2048  # (chosen) connections that the system keeps until they are accepted
FAILED = 75  # (sysexits.h, EX_TEMPFAIL) exit code of a process whose engine failed
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 is any free one.

    It is opened before a model is read, so that a port in use is told at once.
    Raises: UserError.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sets TCP_NODELAY only for sockets that name the protocol. Without it, an answer in
        # two parts waits 40 ms for the client's delayed acknowledgement.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(QUEUE)
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


def most_connections() -> int:
    """Returns how many connections the limit of descriptors (ulimit -n) leaves room for."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else SPARE
    return max(ROUND, min(most, 2**20) - used - SPARE)


STARTING = b'{"status": "starting", "error": {"message": "the server is starting", "type": \
"server_error", "param": null, "code": "starting"}}'
WAIT_S = 1  # (chosen) for the request of a client that connects while the server starts


@contextlib.contextmanager
def starting(made: socket.socket) -> Iterator[None]:
    """Answers whoever connects with 503 and the status `starting`, in a thread, until the block
    ends: a model is read and compiled for a while after the socket is open."""
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
        f"Content-Length: {len(STARTING)}\r\nConnection: close\r\n\r\n"
    ).encode()
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            if not select.select([made], [], [], WAIT_S / 4)[0]:
                continue
            with contextlib.suppress(OSError), made.accept()[0] as client:
                client.settimeout(WAIT_S)
                client.recv(2**16)
                client.sendall(head + STARTING)
                client.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=answer, name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Http(uvicorn.Server):
    """uvicorn's server, without its signal handlers: `serve` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts ROUND connections at once, and lets QUEUE wait: asyncio has one number."""
        await super().startup(sockets)
        for made in sockets or ():
            made.listen(QUEUE)


class _Connection(H11Protocol):
    """uvicorn's connection, with limits of number and time."""

    def __init__(self, *, most: int, **options: Any):
        super().__init__(**options)
        self._most, self._began = most, self.loop.time()
        self._head: float | None = self._began  # since when a whole head is waited for
        self._stalled: float | None = None  # since when the client reads too little
        self._closing: float | None = None

    @property
    def answering(self) -> bool:
        """Whether there is a request that is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def expendable(self) -> tuple[bool, float] | None:
        """The key by which connections are sorted before the first one is closed for a new one;
        None: a complete request has come on this one, so it is not closed."""
        if self.transport.is_closing() or (self.answering and not self.cycle.more_body):
            return None
        return self.answering, self._began

    def connection_made(self, transport: Any) -> None:
        """Closes another connection if there are too many, or refuses this one."""
        super().connection_made(transport)
        others = [c for c in self.connections if c is not self and not c.transport.is_closing()]
        if len(others) < self._most:
            return
        logging.log_every_n_seconds(
            logging.WARNING,
            "there are %d connections, and no more descriptors (ulimit -n): the "
            "oldest without a whole request are closed (--max_connections)",
            60,
            self._most,
        )
        expendable = [c for c in others if isinstance(c, _Connection) and c.expendable is not None]
        if expendable:
            min(expendable, key=lambda c: c.expendable or (True, 0.0)).transport.abort()
        else:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Notes when the first byte of a request's head comes, and when the head is complete."""
        super().data_received(data)
        if self.answering:
            self._head = None
        elif self._head is None:
            self._head = self.loop.time()

    def pause_writing(self) -> None:
        """Notes that the client reads more slowly than the server writes."""
        self._stalled = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Notes that the client reads again."""
        self._stalled = None
        super().resume_writing()

    def shutdown(self) -> None:
        """Closes a connection without a request, whatever was received on it."""
        try:
            super().shutdown()
        except Exception:  # h11's, of a client that broke off inside a request
            self.transport.abort()

    def check(self, now: float) -> None:
        """Closes a connection that has been silent for too long. now: of the loop."""
        if self.transport.is_closing():
            self._closing = self._closing or now
            if now - self._closing > LATE_S:
                self.transport.abort()
        elif self._stalled is not None and now - self._stalled > STALLED_S:
            self.transport.abort()
        elif self._head is not None and now - self._head > HEAD_S:
            self.transport.close()


async def _check_connections(http: uvicorn.Server) -> None:
    """Checks all connections every CHECK_S: a timer for each would be set anew at each byte."""
    while True:
        await asyncio.sleep(CHECK_S)
        now = asyncio.get_running_loop().time()
        for connection in list(http.server_state.connections):
            if isinstance(connection, _Connection):
                connection.check(now)


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs, at most once a minute, that there is no descriptor for a new connection."""
    error = context.get("exception")
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return loop.default_exception_handler(context)
    logging.log_every_n_seconds(
        logging.ERROR, "no connection can be accepted: %s (ulimit -n)", 60, error.strerror
    )


async def serve(
    server: Any,
    work: Work,
    made: socket.socket,
    stop_timeout_s: float,
    max_connections: int | None = None,
) -> int:
    """Serves until a signal. Returns the exit code.

    server: has the `app` of a Base. work: what its answers come from; `serve` starts it.
    max_connections: None: as many as the limit of descriptors leaves room for.
    """
    most = most_connections() if max_connections is None else max_connections
    config = uvicorn.Config(
        server.app,
        loop="asyncio",
        http=functools.partial(_Connection, most=most),  # type: ignore
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="error",
        backlog=ROUND,
        timeout_keep_alive=IDLE_S,
        server_header=False,
    )
    http, loop = _Http(config), asyncio.get_running_loop()
    asked, cut = asyncio.Event(), asyncio.Event()

    def ask() -> None:
        (cut if asked.is_set() else asked).set()
        work.stop()
        http.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
    loop.set_exception_handler(_note)
    work.start()
    serving = asyncio.create_task(http.serve(sockets=[made]))
    checking = asyncio.create_task(_check_connections(http))
    waiting = [asyncio.create_task(event.wait()) for event in (asked, work.failed)]
    await asyncio.wait({*waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not work.failed.is_set():
        print("stopping: running requests end first", flush=True)
    work.stop()
    http.should_exit = True
    code = await _stop(http, work, serving, cut, stop_timeout_s)
    for task in (checking, *waiting):
        task.cancel()
    if work.failure is not None:
        print(
            f"error: the engine failed: {work.failure}; start the server anew (exit code {FAILED})",
            file=sys.stderr,
            flush=True,
        )
        return FAILED
    return code


async def _stop(
    http: uvicorn.Server,
    work: Work,
    serving: asyncio.Task,
    cut: asyncio.Event,
    timeout_s: float,
) -> int:
    """Waits for the running requests, and cuts off those that do not end in time. Returns the exit
    code."""

    async def end() -> None:
        await serving
        await work.join()

    ending, cutting = asyncio.create_task(end()), asyncio.create_task(cut.wait())
    late = min(LATE_S, timeout_s / 10)
    patience = LATE_S if work.failure is not None else timeout_s - 2 * late
    first = asyncio.FIRST_COMPLETED
    await asyncio.wait({ending, cutting}, timeout=patience, return_when=first)
    cutting.cancel()
    if ending.done():
        ending.result()
        return 0
    print(f"stopping: {work.live} requests are cut off", file=sys.stderr, flush=True)
    work.abort()
    await asyncio.wait({ending}, timeout=late)
    if unread := len(http.server_state.connections):
        print(f"stopping: {unread} connections are cut off", file=sys.stderr, flush=True)
    for connection in list(http.server_state.connections):
        connection.transport.abort()  # type: ignore[union-attr]
    await asyncio.wait({ending}, timeout=LATE_S)
    if not ending.done():  # the engine hangs in a step, and would keep the process
        sys.stdout.flush()
        os._exit(FAILED if work.failure is not None else 1)
    return 1
