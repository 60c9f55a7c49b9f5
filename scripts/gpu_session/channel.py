"""The worker's end of the pipes between session.py and one part. No jax import.

Standard input brings one line of JSON, which says what to do (`Channel.spec`), and later the lines
`"go"` (the GPU is free for this part) and `"stop"` (end after the present item). When the parent
ends, however it ends, standard input closes and the worker exits. JSON lines go to the file
descriptor that the first argument names, so that what a library prints cannot be mistaken for a
message:

    {"hello": {"device": "NVIDIA H200", "slug": "nvidia_h200"}}
    {"stage": "run", "item": "forward d128", "limit_s": 30}   the parent kills the worker later;
                                    with "rival": {...}, members of the row that says so then
    {"item": "forward d128", "rows": [{...}]}                 what was measured
    {"item": "forward d128", "fault": "ValueError: ..."}      why it could not be
    {"end": "complete"}    or "stopped", "poisoned", "missing", "refused", each with "why"
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
PREPARE_S = 200  # of one program (chosen: the largest kernel takes less on two slow cores)
ORPHAN_S = 60  # behind a stage's limit, when the parent should have killed this process
AHEAD = 8  # programs that a waiting worker prepares (chosen: they stay in memory)


@dataclass(frozen=True)
class Item:
    """One measurement of a part: its name in the part, and what happens, in this order.

    prepare: makes the program; a worker that waits for its turn does it ahead, so it must not start
    a kernel. run: returns the rows, or one row; limit_s: of run. about: members of each row.
    optional: a rival, which may be missing; a failure is then a row that says why, and no fault of
    the part, be it an exception, a crash or a hang.
    """

    name: str
    run: Callable[[], Row | Sequence[Row]]
    prepare: Callable[[], object] | None = None
    about: Mapping[str, Any] | None = None
    limit_s: float = 60
    optional: bool = False


class Channel:
    """Messages from a worker to its parent, and what the parent said so far."""

    def __init__(self) -> None:
        """Reads the specification, and listens from now on."""
        self._out = os.fdopen(int(sys.argv[1]), "w")
        self._lock = threading.Lock()
        self._going, self._stopping = threading.Event(), threading.Event()
        lines = self._lines()
        self.spec: dict[str, Any] = json.loads(next(lines))
        self._scale = self.spec.get("limit_scale", 1)
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()

    def _lines(self) -> Iterator[str]:
        partial = b""
        while chunk := os.read(0, 65536):
            *complete, partial = (partial + chunk).split(b"\n")
            yield from (line.decode() for line in complete)

    def _listen(self, lines: Iterator[str]) -> None:
        for line in lines:
            {"go": self._going, "stop": self._stopping}[json.loads(line)].set()
        # The parent is gone. With this process ends what it started, a compiler for example.
        os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            print(json.dumps(message), file=self._out, flush=True)

    @property
    def going(self) -> bool:
        """Whether the GPU is free for this part."""
        return self._going.is_set()

    @property
    def stopping(self) -> bool:
        """Whether the part should end after the present item."""
        return self._stopping.is_set()

    def wait(self) -> None:
        """Blocks until the GPU is free for this part."""
        if not self.going:
            faulthandler.cancel_dump_traceback_later()
            self._send({"stage": "wait", "item": None, "limit_s": None})
            self._going.wait()

    def hello(self, **facts: Any) -> None:
        """Tells the parent which device this is."""
        self._send({"hello": facts})

    def stage(
        self,
        name: str,
        limit_s: float,
        item: str | None = None,
        skip: str = "",
        rival: Row | None = None,
    ) -> None:
        """Says what comes next; when it takes longer than limit_s the parent kills this process.

        skip: what the next worker of this part should leave out then (spec["skip"]) when it does
        the same item again; empty: it leaves out the item. rival: of an optional item, members of
        the row that says how this process ended, if it ends in this stage.
        """
        limit_s *= self._scale
        # Without a parent that kills it, and whatever C++ keeps Python's threads from running.
        faulthandler.dump_traceback_later(limit_s + ORPHAN_S, exit=True)
        more = {} if rival is None else {"rival": rival}
        self._send({"stage": name, "item": item, "limit_s": limit_s, "skip": skip, **more})

    def rows(self, item: str, rows: Sequence[Row]) -> None:
        """Sends the rows of an item to the parent."""
        self._send({"item": item, "rows": list(rows)})

    def fault(self, item: str, why: str) -> None:
        """Tells the parent why an item could not be measured."""
        self._send({"item": item, "fault": why})

    def end(self, how: str, why: str = "") -> None:
        """Sends the last message."""
        self._send({"end": how, "why": why})


def is_poison(error: BaseException) -> bool:
    """Whether a CUDA error was raised after which nothing in this process can use the GPU."""
    text = str(error)
    return "CUDA_ERROR_" in text and "OUT_OF_MEMORY" not in text


def reason(error: BaseException) -> str:
    """Returns one line of text for an exception."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def shown(row: Row) -> str:
    """Returns a row as text for people."""
    return str({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})[:400]


def work(channel: Channel, items: Sequence[Item], probe: Callable[[], object] = bool) -> None:
    """Prepares some items while the GPU is busy, then measures all that were not measured before.

    probe: uses the GPU, and raises if it cannot be used any more; called after a failure.
    """
    done = set(channel.spec.get("done", ()))
    left = [item for item in items if item.name not in done]
    prepared: set[str] = set()

    def spare(item: Item) -> Row | None:
        return dict(item.about or {}) if item.optional else None

    def prepare(item: Item) -> None:
        if item.prepare is not None and item.name not in prepared:
            channel.stage("prepare", PREPARE_S, item.name, rival=spare(item))
            item.prepare()
            prepared.add(item.name)

    for item in left[:AHEAD]:
        if channel.going:
            break
        with contextlib.suppress(Exception):  # raised again, and reported, when its turn comes
            prepare(item)
    channel.wait()
    for number, item in enumerate(left):
        if channel.stopping and number:  # one at least, or a part with short slices never ends
            return channel.end("stopped")
        about = dict(item.about or {})
        try:
            prepare(item)
            channel.stage("run", item.limit_s, item.name, rival=spare(item))
            result = item.run()
            rows = [result] if isinstance(result, dict) else result
            channel.rows(item.name, [about | row for row in rows])
        except Exception as error:
            poisoned = is_poison(error) or not _works(probe)
            if item.optional:
                channel.rows(item.name, [about | {"note": reason(error)}])
            else:
                channel.fault(item.name, reason(error))
            if poisoned:
                return channel.end("poisoned", reason(error))
    channel.end("complete")


def _works(probe: Callable[[], object]) -> bool:
    try:
        probe()
    except Exception:
        return False
    return True
