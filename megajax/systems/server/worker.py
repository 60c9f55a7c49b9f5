"""One thread that steps the engine; the event loop gives it requests and takes their outputs.

The engine is not thread-safe, so this thread alone calls it. Requests and cancellations wait in a
list that the thread empties between two steps; outputs go back to the event loop, one call a step,
into a queue for each request. On several processes the thread of the first one tells the others
before each step what it is about to do (peers.py), since all of them must make the same calls.

States: it runs; it drains (no new request, the old ones end); it failed (the engine raised).
"""

import asyncio
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from absl import logging

from megajax.core.errors import UserError
from megajax.serving import Engine, Output, SamplingParams
from megajax.systems.server.errors import ApiError, EngineFailed
from megajax.systems.server.metrics import Metrics

RATE = 64  # (chosen) answers from whose ends a waiting time is estimated
# ("submit", prompt, params) or ("cancel", id, None).
type Command = tuple[str, Any, SamplingParams | None]
LONGEST_WAIT_S = 60  # (openai's client) a longer Retry-After is not followed


@dataclass(eq=False)
class Stream:
    """A request on its way through the engine, as the event loop sees it."""

    prompt: Sequence[int]
    params: SamplingParams
    accepted: asyncio.Future
    outputs: asyncio.Queue = field(default_factory=asyncio.Queue)
    began: float = field(default_factory=time.monotonic)
    last: dict[int, float] = field(default_factory=dict)  # when an answer last grew, by index
    # The thread's: the engine's id, and how many answers have not ended.
    id: int | None = None
    left: int = 0

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yields outputs until all answers have ended. Raises: EngineFailed."""
        alive = self.params.n
        while alive:
            output = await self.outputs.get()
            if isinstance(output, Exception):
                raise output
            alive -= output.finish_reason is not None
            yield output


@dataclass(frozen=True)
class Load:
    """What the engine has to do, in answers."""

    waiting: int = 0
    running: int = 0


class Worker:
    """Runs an engine. Its public methods are for the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        max_waiting: int,
        max_batch: int,
        peers: Callable[[list[Command] | None], None] | None = None,
    ):
        """max_waiting: answers that may wait beside those that can run at once, max_batch.

        peers: tells the other processes what the engine is about to be asked, in order; None: no
          more.
        """
        self.engine, self.metrics = engine, metrics
        self._most, self._batch, self._peers = max_waiting, max_batch, peers
        self._lock = threading.Condition()
        self._inbox: list[tuple[str, Stream]] = []
        self._queued = 0  # answers in the inbox
        self._load = Load()
        self._stopping = False
        self.failure: str | None = None  # what ended the thread, in one line
        self._streams: dict[int, Stream] = {}  # by the engine's id; the thread's
        self._ends: deque[float] = deque(maxlen=RATE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- the event loop's side

    def start(self) -> None:
        """Starts the thread. The caller runs on the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self.failed = asyncio.Event()  # set when `failure` is
        self._thread.start()

    @property
    def draining(self) -> bool:
        """Whether it takes no new request."""
        return self._stopping

    @property
    def live(self) -> int:
        """Requests that the engine has; for tests."""
        return len(self._streams)

    def check(self) -> None:
        """Raises: ApiError where no request can be taken at all."""
        if self.failure is not None:
            raise ApiError(500, f"the engine failed: {self.failure}", code="engine_failed")
        if self._stopping:
            raise ApiError(503, "the server is stopping", code="stopping")

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> Stream:
        """Returns a stream when the engine has taken the request.

        Raises: ApiError when too many wait. UserError for what can never run.
        """
        if params.structured_outputs is not None:
            await asyncio.to_thread(self.engine.prepare, params)
        stream = Stream(prompt, params, asyncio.get_running_loop().create_future())
        with self._lock:
            self.check()
            ahead = self._queued + self._load.waiting
            free = max(0, self._batch - self._load.running)
            if ahead >= self._most + free:
                raise self._overloaded(ahead)
            self._queued += params.n
            self._inbox.append(("submit", stream))
            self._lock.notify()
        try:
            await stream.accepted
        except asyncio.CancelledError:  # the client left: whether or not the engine has it
            self.cancel(stream)
            raise
        return stream

    def _overloaded(self, ahead: int) -> ApiError:
        """More wait than may. The client is told after how long half of them should be done."""
        wait = 1.0
        if len(self._ends) > 1 and self._ends[-1] > self._ends[0]:
            rate = (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])
            wait = ahead / 2 / rate
        seconds = min(max(1, math.ceil(wait)), LONGEST_WAIT_S)
        return ApiError(
            429,
            f"{ahead} answers wait for the model, and at most {self._most} may (--max_waiting)",
            code="too_many_waiting",
            headers={"Retry-After": str(seconds)},
        )

    def cancel(self, stream: Stream) -> None:
        """Ends a request; one that has ended is none of its business."""
        if stream.id is not None and not stream.left:
            return
        with self._lock:
            self._inbox.append(("cancel", stream))
            self._lock.notify()

    def stop(self) -> None:
        """Takes no request from now on; the thread ends with the last one that is running."""
        with self._lock:
            self._stopping = True
            self._lock.notify()

    def abort(self) -> None:
        """Cuts off all requests, whose answers end with 'cancelled'."""
        for stream in list(self._streams.values()):
            self.cancel(stream)

    async def join(self, timeout: float | None = None) -> bool:
        """Waits until the thread has ended; False: it has not."""
        await asyncio.to_thread(self._thread.join, timeout)
        return not self._thread.is_alive()

    def _hand_out(self, outputs: list[tuple[Stream, Output]], load: Load) -> None:
        now = time.monotonic()
        for stream, output in outputs:
            self.metrics.observe(stream, output, now)
            if output.finish_reason is not None:
                self._ends.append(now)
            stream.outputs.put_nowait(output)
        self.metrics.set_load(self.engine, load)

    # ---- the thread's side

    def _run(self) -> None:
        try:
            while (commands := self._next()) is not None:
                self._obey(commands)
                self._show(self.engine.step() if self.engine.busy else [])
        except BaseException as error:  # whatever it was, no request may wait for ever
            self._fail(error)

    def _next(self) -> list[tuple[str, Stream]] | None:
        """Waits for something to do. Returns commands, or None when there is nothing left."""
        with self._lock:
            while not self._inbox and not self.engine.busy and not self._stopping:
                self._lock.wait()
            commands, self._inbox = self._inbox, []
            # The engine has no id for what is submitted and cancelled in one breath.
            new = {stream for verb, stream in commands if verb == "submit"}
            self._inbox = [c for c in commands if c[0] == "cancel" and c[1] in new]
        commands = [c for c in commands if c not in self._inbox]
        ended = not commands and not self.engine.busy
        if self._peers is not None:
            self._peers(None if ended else [_told(*command) for command in commands])
        return None if ended else commands

    def _obey(self, commands: list[tuple[str, Stream]]) -> None:
        for verb, stream in commands:
            if verb == "cancel":
                if stream.id is not None:
                    self.engine.cancel(stream.id)
                continue
            try:
                stream.id = self.engine.submit(stream.prompt, stream.params)
            except UserError as error:
                self._call(_refuse, stream.accepted, error)
            except Exception as error:  # of this request alone: the engine has taken nothing
                logging.exception("a request could not be taken")
                self._call(_refuse, stream.accepted, EngineFailed(_line(error)))
            else:
                self._streams[stream.id], stream.left = stream, stream.params.n
                self._call(_accept, stream.accepted)
        with self._lock:
            self._queued -= sum(s.params.n for verb, s in commands if verb == "submit")
            self._load = self._count()

    def _count(self) -> Load:
        scheduler = self.engine.scheduler
        return Load(len(scheduler.waiting), len(scheduler.running))

    def _show(self, outputs: list[Output]) -> None:
        """Sends a step's outputs to the event loop, and forgets the requests that ended."""
        found = [(self._streams[output.request_id], output) for output in outputs]
        for stream, output in found:
            stream.left -= output.finish_reason is not None
            if not stream.left:
                del self._streams[output.request_id]
        with self._lock:
            self._load = load = self._count()
        self._call(self._hand_out, found, load)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure, commands, self._inbox = _line(error), self._inbox, []
        failed = EngineFailed(self.failure)
        for stream in self._streams.values():
            self._call(stream.outputs.put_nowait, failed)
        for verb, stream in commands:
            if verb == "submit":
                self._call(_refuse, stream.accepted, failed)
        self._streams.clear()
        self._call(self.failed.set)

    def _call(self, function: Callable, *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _told(verb: str, stream: Stream) -> Command:
    """A command as another process needs it."""
    if verb == "cancel":
        return verb, stream.id, None
    return verb, list(stream.prompt), stream.params


def _line(error: BaseException) -> str:
    """An error and where it was raised, in one line."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    where = f" ({Path(last.filename).name}:{last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}{where}"


def _accept(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)


def _refuse(future: asyncio.Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
