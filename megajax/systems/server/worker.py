"""One thread that steps the engine; the event loop gives it requests and takes their outputs.

The engine is not thread-safe, so this thread alone calls it. Requests and cancellations wait in a
list that the thread empties between two steps; outputs go back to the event loop, one call a step,
into the queue that came with their request.

On several processes, all of them make the same calls of their engines in the same order. Process 0
has the HTTP server. Before each step its thread writes what it is about to ask the engine into the
key-value store of jax.distributed, under the number of the step; the others read it and do the same
(`follow`). An engine decides by what it is asked alone, so all processes start the same programs. A
step is a computation of all of them: when step i has been read, every process has read what came
before it, so older entries are deleted.

States: the worker runs; it drains (no new request, the old ones end); it failed (the engine
raised).
"""

import asyncio
import dataclasses
import json
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
from absl import logging

from megajax.core import mesh
from megajax.core.errors import UserError
from megajax.serving import Engine, Output, SamplingParams, StructuredOutputsParams
from megajax.serving.images import Picture, further
from megajax.systems.server.base import ApiError, EngineFailed, Metrics, stopping

RATE = 64  # (chosen) answers from whose ends a waiting time is estimated
LONGEST_WAIT_S = 60  # (openai's client) a longer Retry-After is not followed
FOLDER = "megajax/serve"
KEPT = 8  # (chosen) entries of the store behind the newest that are not deleted yet
WAIT_MS = 10_000  # (chosen) of one call of the store; nobody may ask for hours
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 60)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
# ("submit", prompt, params) or ("cancel", id, None).
type Command = tuple[str, Any, SamplingParams | None]


@dataclasses.dataclass(eq=False)
class Stream:
    """A request on its way through the engine, as the event loop sees it.

    outputs: queue of (number of the answer, Output), or (number, EngineFailed). first: number of
    its first answer there. images: of the prompt's placeholders.
    adapter: that answers; None: the base.
    """

    prompt: Sequence[int]
    params: SamplingParams
    outputs: asyncio.Queue
    first: int
    accepted: asyncio.Future
    images: Sequence[Picture] = ()
    adapter: str | None = None
    began: float = dataclasses.field(default_factory=time.monotonic)
    # When an answer last grew, by index.
    last: dict[int, float] = dataclasses.field(default_factory=dict)
    # The thread's: the engine's id, and how many answers have not ended.
    id: int | None = None
    left: int = 0


@dataclasses.dataclass(frozen=True)
class Load:
    """What an engine has to do, in answers; the share of its pages that is in use; and what its
    scheduler has counted since it was made."""

    waiting: int = 0
    running: int = 0
    usage: float = 0.0
    preemptions: int = 0
    prefix_hits: int = 0


class EngineMetrics:
    """What is measured of an engine. Names are vLLM's."""

    def __init__(self, metrics: Metrics):
        """metrics: of the server."""
        add, self._before = metrics.add, Load()
        gauge, counter, timer = prometheus.Gauge, prometheus.Counter, prometheus.Histogram
        self._running = add(gauge, "num_requests_running", "Answers with a slot.")
        self._waiting = add(gauge, "num_requests_waiting", "Answers without one.")
        self._usage = add(gauge, "kv_cache_usage_perc", "Used pages, 0 to 1.")
        self._preemptions = add(counter, "num_preemptions", "Preempted answers.")
        self._hits = add(counter, "prefix_cache_hits", "Prompt tokens found.")
        self._prompt = add(counter, "prompt_tokens", "Tokens of prompts.")
        self._drawn = add(counter, "generation_tokens", "Drawn tokens.")
        self._ended = add(counter, "request_success", "Ended answers.", "finished_reason")
        self._model = metrics.model
        self._first = add(
            timer, "time_to_first_token_seconds", "Arrival to first token.", buckets=SECONDS
        )
        self._between = add(
            timer, "inter_token_latency_seconds", "Between tokens of an answer.", buckets=SECONDS
        )
        self._latency = add(
            timer, "e2e_request_latency_seconds", "Arrival to end of an answer.", buckets=LONG
        )

    def observe(self, stream: Stream, output: Output, now: float) -> None:
        """Records an output of a request, at a time of time.monotonic."""
        count, before = len(output.tokens), stream.last.get(output.index)
        if not stream.last:
            self._prompt.inc(len(stream.prompt) + further(stream.images))
        if count:
            self._drawn.inc(count)
            if before is None:
                self._first.observe(now - stream.began)
            for _ in range(count - (before is None)):
                self._between.observe((now - (before or now)) / count)
        stream.last[output.index] = now
        if output.finish_reason is not None:
            self._ended.labels(self._model, output.finish_reason).inc()
            self._latency.observe(now - stream.began)

    def set_load(self, load: Load) -> None:
        """Records the engine's state."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._usage.set(load.usage)
        self._preemptions.inc(load.preemptions - self._before.preemptions)
        self._hits.inc(load.prefix_hits - self._before.prefix_hits)
        self._before = load


class Worker:
    """Runs an engine. Its public methods are for the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        max_waiting: int,
        max_batch: int,
        peers: "Peers | None" = None,
    ):
        """max_waiting: answers that may wait in addition to those that can run at once, max_batch.
        peers: the other processes; None: there are none.
        """
        self.engine, self.metrics, self._measured = engine, metrics, EngineMetrics(metrics)
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
    def live(self) -> int:
        """Requests that the engine has."""
        return len(self._streams)

    def check(self) -> None:
        """Raises: ApiError where no request can be taken at all."""
        if self.failure is not None:
            raise ApiError(500, f"the engine failed: {self.failure}", code="engine_failed")
        if self._stopping:
            raise stopping()

    def check_room(self) -> None:
        """Raises: ApiError where no request can be taken now, as too many wait."""
        with self._lock:
            self.check()
            ahead = self._queued + self._load.waiting
            free = max(0, self._batch - self._load.running)
            if ahead >= self._most + free:
                raise self._overloaded(ahead)

    async def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        outputs: asyncio.Queue,
        first: int,
        images: Sequence[Picture] = (),
        adapter: str | None = None,
    ) -> Stream:
        """Returns a stream when the engine has taken the request. outputs, first, images, adapter:
        as Stream's.

        Raises: ApiError when too many wait. UserError for what can never run.
        """
        if params.structured_outputs is not None:
            await asyncio.to_thread(self.engine.prepare, params)
        accepted = asyncio.get_running_loop().create_future()
        stream = Stream(prompt, params, outputs, first, accepted, images, adapter)
        with self._lock:  # its owner may enter it again
            self.check_room()
            self._queued += params.n
            self._inbox.append(("submit", stream))
            self._lock.notify()
        try:
            await accepted
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
        """Ends a request; nothing is done for one that has ended."""
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
            self._measured.observe(stream, output, now)
            if output.finish_reason is not None:
                self._ends.append(now)
            stream.outputs.put_nowait((stream.first + output.index, output))
        self._measured.set_load(load)

    # ---- the thread's side

    def _run(self) -> None:
        try:
            while (commands := self._next()) is not None:
                for verb, stream in commands:
                    if verb == "submit":
                        self._submit(stream)
                    elif stream.id is not None:
                        self.engine.cancel(stream.id)
                with self._lock:
                    self._queued -= sum(s.params.n for verb, s in commands if verb == "submit")
                    self._load = self._count()
                outputs = self.engine.step() if self.engine.busy else []
                shown = [(self._streams[output.request_id], output) for output in outputs]
                for stream, output in shown:
                    stream.left -= output.finish_reason is not None
                    if not stream.left:
                        del self._streams[output.request_id]
                with self._lock:
                    self._load = load = self._count()
                self._call(self._hand_out, shown, load)
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
            told: list[Command] = [
                (verb, list(s.prompt), s.params) if verb == "submit" else (verb, s.id, None)
                for verb, s in commands
            ]
            self._peers.tell(None if ended else told)
        return None if ended else commands

    def _submit(self, stream: Stream) -> None:
        try:
            stream.id = self.engine.submit(
                stream.prompt, stream.params, images=stream.images, adapter=stream.adapter
            )
        except UserError as error:
            self._call(_settle, stream.accepted, error)
        except Exception as error:  # of this request alone: the engine has taken nothing
            logging.exception("a request could not be taken")
            self._call(_settle, stream.accepted, EngineFailed(_line(error)))
        else:
            self._streams[stream.id], stream.left = stream, stream.params.n
            self._call(_settle, stream.accepted)

    def _count(self) -> Load:
        scheduler, pool = self.engine.scheduler, self.engine.pool
        return Load(
            len(scheduler.waiting),
            len(scheduler.running),
            pool.in_use / pool.capacity,
            scheduler.preemptions,
            scheduler.prefix_hits,
        )

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure, commands, self._inbox = _line(error), self._inbox, []
        failed = EngineFailed(self.failure)
        for stream in self._streams.values():
            self._call(stream.outputs.put_nowait, (stream.first, failed))
        for verb, stream in commands:
            if verb == "submit":
                self._call(_settle, stream.accepted, failed)
        self._streams.clear()
        self._call(self.failed.set)

    def _call(self, function: Callable, *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _line(error: BaseException) -> str:
    """An error and where it was raised, in one line."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    where = f" ({Path(last.filename).name}:{last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}{where}"


def _settle(future: asyncio.Future, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# ---- several processes


class Peers:
    """The other processes, as process 0 tells them its commands."""

    def __init__(self):
        """Nothing has been told."""
        self._store, self._number = mesh.job_store(), 0

    def tell(self, commands: list[Command] | None) -> None:
        """Tells the commands before the next step; None: there is none any more."""
        self._store.key_value_set(f"{FOLDER}/{self._number}", encode(commands))
        if self._number >= KEPT:
            self._store.key_value_delete(f"{FOLDER}/{self._number - KEPT}")
        self._number += 1


def follow(engine: Engine) -> None:
    """Does in this process what process 0 tells, until it says that it ends."""
    store, number = mesh.job_store(), 0
    while True:
        try:
            text = store.blocking_key_value_get(f"{FOLDER}/{number}", WAIT_MS)
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            continue
        if (commands := decode(text)) is None:
            return
        for verb, what, params in commands:
            if verb == "cancel":
                engine.cancel(what)
            else:
                try:
                    engine.submit(what, params)  # type: ignore[arg-type]
                except Exception:
                    pass  # process 0 has the same, and answers it
        if engine.busy:
            engine.step()
        number += 1


def encode(commands: list[Command] | None) -> str:
    """Returns commands as JSON."""

    def plain(params: SamplingParams | None) -> dict[str, Any] | None:
        if params is None:
            return None
        members = {k: getattr(params, k) for k in params.__dataclass_fields__}
        form = params.structured_outputs
        if form is not None:
            members["structured_outputs"] = {k: getattr(form, k) for k in form.__dataclass_fields__}
        return members

    return json.dumps(
        None if commands is None else [(verb, what, plain(p)) for verb, what, p in commands]
    )


def decode(text: str) -> list[Command] | None:
    """Returns the commands that `encode` wrote."""

    def params_of(members: dict[str, Any] | None) -> SamplingParams | None:
        if members is None:
            return None
        if members["structured_outputs"] is not None:
            members["structured_outputs"] = StructuredOutputsParams(**members["structured_outputs"])
        return SamplingParams(**members)

    commands = json.loads(text)
    if commands is None:
        return None
    return [(verb, what, params_of(members)) for verb, what, members in commands]
