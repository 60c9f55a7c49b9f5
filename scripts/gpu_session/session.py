"""Runs the parts of a session on a GPU, each as a process of its own. No jax import.

What a part can do wrong must not cost the others their time: a kernel that never returns, a crash,
a CUDA error after which its process is useless, a package that is missing. So the parent (`run`)
never touches the GPU. It kills the process group of a worker whose present stage takes longer than
its limit, records why, and starts the part again for what is left of it (`TRIES` times). Exactly
one part measures at a time; the next few lower their programs meanwhile (channel.py has the
messages). Parts that are not `alone`, checks of results, run beside each other.

Every row is on disk once it has arrived (`Store`; files are replaced as a whole). A second call
with the same folder leaves out what was measured, and what was found faulty.
"""

import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megajax.core.worker import Worker as Child
from megajax.monitor import results
from scripts.gpu_session.channel import shown

AHEAD = min(max((os.cpu_count() or 1) - 4, 3), 12)  # parts that lower while another measures
TRIES = 3  # processes of a part that may die in one call
IMPORT_S, EXIT_S = 150, 20  # until a worker says its first stage, and behind its last word
GRACE_S = 10  # between the request to stop at the end of the time and the kill
LOG_BYTES, LOG_MOST = 20_000, 8 << 20  # of one worker, the end; of log.txt, then half is dropped
TUNED, VERDICTS = "tuned", "verdicts"
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The work of one process. file: the file of its rows. args: the worker's arguments.

    slice_s: after so long it ends behind its present item, and goes on after the other parts.
    """

    name: str
    file: str
    args: Mapping[str, Any] = field(default_factory=dict)
    slice_s: float = 60
    alone: bool = True


class Store:
    """The rows of a folder: DEVICE_FILE.json, of tuned tiles DEVICE.json, and the verdicts."""

    def __init__(self, folder: Path, commit: str, layer: str = "measured on {}"):
        """layer: what a result says of itself, with a place for the device."""
        self.folder, self._commit, self._layer = folder, commit, layer
        self.slug, self._about, self._rows = "", {}, {}

    def open(self, device: str, slug: str) -> None:
        """Reads the rows that earlier calls stored for this device."""
        self.slug = slug
        self._about = results.facts(device, self._layer.format(device)) | {"commit": self._commit}
        self._rows = {}
        for path in self.folder.glob(f"{slug}*.json.part"):  # a killed call left it
            path.unlink()

    def path(self, file: str) -> Path:
        """Returns the path of a file of this device."""
        return self.folder / (f"{self.slug}.json" if file == TUNED else f"{self.slug}_{file}.json")

    def rows(self, file: str) -> list[Row]:
        """Returns all rows of a file."""
        if file not in self._rows:
            path = self.path(file)
            self._rows[file] = json.loads(path.read_text())["rows"] if path.exists() else []
        return self._rows[file]

    def add(self, part: Part, item: str, rows: Sequence[Row]) -> None:
        """Puts rows in the place of those of the same item."""
        about = {"part": part.name, "item": item, "commit": self._commit}
        same = lambda row: (row.get("part"), row.get("item")) == (part.name, item)  # noqa: E731
        others = [row for row in self.rows(part.file) if not same(row)]
        self._rows[part.file] = others + [row | about for row in rows]
        results.write(self.path(part.file), self._about, self._rows[part.file])

    def verdict(self, part: Part) -> Row:
        """Returns a part's verdict: its faults, the items to skip, whether it is finished."""
        verdicts = [row for row in self.rows(VERDICTS) if row["part"] == part.name]
        return (
            verdicts[0]
            if verdicts
            else {
                "part": part.name,
                "verdict": "not begun",
                "finished": False,
                "seconds": 0.0,
                "faults": {},
                "skip": [],
            }
        )

    def judge(self, part: Part, verdict: Row) -> None:
        """Stores the verdict of a part."""
        others = [row for row in self.rows(VERDICTS) if row["part"] != part.name]
        self._rows[VERDICTS] = others + [verdict]
        results.write(self.path(VERDICTS), self._about, self._rows[VERDICTS])

    def forget(self, parts: Sequence[Part]) -> None:
        """Drops the rows and verdicts of these parts, so that they are measured again."""
        for part in parts:
            for file, rows in ((part.file, self.rows(part.file)), (VERDICTS, self.rows(VERDICTS))):
                self._rows[file] = [row for row in rows if row.get("part") != part.name]

    def done(self, part: Part) -> list[str]:
        """Returns the items of a part that need no second measurement."""
        measured = {r["item"] for r in self.rows(part.file) if r.get("part") == part.name}
        return sorted(measured | self.verdict(part)["faults"].keys())

    def wrong(self, part: Part) -> list[str]:
        """Returns the items whose results were not right."""
        rows = self.rows(part.file)
        return [r["item"] for r in rows if r.get("part") == part.name and r.get("passed") is False]


class Worker:
    """One process of a part."""

    def __init__(self, command: Sequence[str], part: Part, spec: Row, env: Mapping[str, str]):
        """command: the worker's; spec: what it reads first."""
        self.part, self.began, self.going_s, self.stopping = part, time.monotonic(), None, False
        self.stage, self.item, self.skip, self.rival = "import", None, "", None
        self.limit_s: float | None = IMPORT_S * spec.get("limit_scale", 1)
        self.stage_began, self.how, self.why = self.began, "", ""
        self.killed, self.blamed = "", False
        self.log: IO[bytes] = tempfile.TemporaryFile()
        self.child = Child(command, apart=True, stdout=self.log, stderr=self.log, env=env)
        self.process = self.child.process
        self.child.send(spec)

    def go(self) -> None:
        """Tells the worker that the GPU is free for it."""
        self.going_s = time.monotonic()
        self.child.send("go")

    def stop(self) -> None:
        """Asks the worker to end after its present item."""
        if not self.stopping:
            self.stopping = True
            self.child.send("stop")

    def note_stage(self, message: Row) -> None:
        """Notes the worker's stage, whose limit counts from now on."""
        self.stage, self.item = message["stage"], message["item"]
        self.limit_s, self.skip = message["limit_s"], message.get("skip", "")
        self.rival = message.get("rival")
        self.stage_began = time.monotonic()

    def note_end(self, message: Row) -> None:
        """Notes that the worker has sent everything; a crash at its exit is no fault."""
        self.how, self.why = message["end"], message["why"]
        self.note_stage({"stage": "exit", "item": None, "limit_s": EXIT_S})

    def overdue(self) -> bool:
        """Whether the present stage takes longer than its limit."""
        return self.limit_s is not None and time.monotonic() - self.stage_began > self.limit_s

    def beyond_slice(self) -> bool:
        """Whether the worker has used its share of the time."""
        return self.going_s is not None and time.monotonic() - self.going_s > self.part.slice_s

    def kill(self, why: str, fault: bool = True) -> None:
        """Kills the process and its children. fault: whether this counts as a fault of the part."""
        if not self.killed and self.process.poll() is None:
            self.killed, self.blamed = why, fault
        self.child.kill()

    def close(self) -> str:
        """Closes the parent's files of the worker and returns the end of its output."""
        self.kill("")  # what it started and left
        self.child.close()
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - LOG_BYTES))
        with self.log:
            return self.log.read().decode(errors="replace")

    def failure(self) -> str:
        """Says what went wrong with the process; '' if it ended as it said or was not to blame."""
        if self.how:
            return ""
        if self.killed:
            return self.killed if self.blamed else ""
        code = self.process.returncode
        ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"its process ended {ended} in the stage {self.stage!r}"


class Session:
    """Runs parts, in their order, until they are finished or the time is over."""

    def __init__(
        self,
        command: Sequence[str],
        store: Store,
        end: float,
        *,
        env: Mapping[str, str] | None = None,
        spec: Row | None = None,
        again: bool = False,
    ):
        """end: of the time, by time.monotonic. spec: what every worker is told.

        again: whether all of these parts is measured again, whatever the store has.
        """
        self._command, self._store, self._end, self._again = command, store, end, again
        self._env, self._spec = dict(os.environ if env is None else env), spec or {}
        self._live: list[Worker] = []
        self._tries: dict[str, int] = {}
        self._queue: list[Part] = []

    def run(self, first: Part, parts: Sequence[Part]) -> int:
        """Returns 1 when a part failed or there is no device, else 0.

        first: the part that must say which device this is before any other begins.
        """
        try:
            self._loop([first])
            if not self._store.slug:
                return 1
            if self._again:
                self._store.forget(parts)
            self._loop([p for p in parts if not self._store.verdict(p)["finished"]])
        finally:
            for worker in self._live:
                worker.kill("the session ended")
                worker.close()
        return self._summary([first, *parts])

    def _loop(self, parts: Sequence[Part]) -> None:
        self._queue = list(parts)
        while self._queue or self._live:
            if time.monotonic() > self._end - GRACE_S:
                self._queue = []
            while self._queue and len(self._live) <= AHEAD:
                self._start(self._queue.pop(0))
            self._hand_out()
            self._listen()
            for worker in [w for w in self._live if w.process.poll() is not None]:
                self._settle(worker)
            for worker in self._live:
                self._limit(worker)

    def _start(self, part: Part) -> None:
        skip = self._store.verdict(part)["skip"] if self._store.slug else []
        done = self._store.done(part) if self._store.slug else []
        spec = {"part": part.name, "done": done, "skip": skip, **part.args}
        self._live.append(Worker(self._command, part, self._spec | spec, self._env))

    def _hand_out(self) -> None:
        """Lets the first worker measure, and beside it those that need not be alone."""
        running = [w for w in self._live if w.going_s]
        for worker in (w for w in self._live if not w.going_s):
            if running and (worker.part.alone or any(w.part.alone for w in running)):
                return
            worker.go()
            running.append(worker)

    def _listen(self) -> None:
        open_ = [w for w in self._live if not w.child.silent]
        ready, *_ = select.select([w.child for w in open_], [], [], 0.05)
        for worker in open_:
            if worker.child in ready:
                self._take(worker)

    def _limit(self, worker: Worker) -> None:
        left = self._end - time.monotonic()
        if left < 0 or (left < GRACE_S and not worker.going_s):
            worker.kill("the time was over", fault=False)
        elif worker.overdue():
            worker.kill(f"killed after {worker.limit_s:g} s in the stage {worker.stage!r}")
        elif left < GRACE_S or worker.beyond_slice():
            worker.stop()

    def _take(self, worker: Worker) -> None:
        """Handles the messages of a worker."""
        part = worker.part
        for message in worker.child.receive():
            if "hello" in message:
                if not self._store.slug:
                    self._store.open(**message["hello"])
            elif "stage" in message:
                worker.note_stage(message)
            elif "rows" in message:
                self._store.add(part, message["item"], message["rows"])
                for row in message["rows"]:
                    print(f"{part.name}: {message['item']}: {shown(row)}", flush=True)
            elif "fault" in message:
                self._fault(part, message["item"], message["fault"])
            else:
                worker.note_end(message)

    def _fault(self, part: Part, item: str, why: str) -> None:
        verdict = self._store.verdict(part)
        self._store.judge(part, verdict | {"faults": verdict["faults"] | {item: why}})
        print(f"{part.name}: {item}: FAILED: {why}", flush=True)

    def _settle(self, worker: Worker) -> None:
        """Judges a part whose process has ended, and starts it again for the items left."""
        self._take(worker)
        self._live.remove(worker)
        part, printed, failure = worker.part, worker.close(), worker.failure()
        self._log(f"{part.name}: {worker.how or failure} {worker.why}".strip(), printed)
        if not self._store.slug:
            print(f"error: {worker.why or failure}\n{printed[-2000:]}", file=sys.stderr)
            return
        finished = worker.how == "complete"
        if worker.how == "stopped":
            self._queue.append(part)
        elif failure or worker.how == "poisoned":
            if failure and worker.skip:
                verdict = self._store.verdict(part)
                self._store.judge(part, verdict | {"skip": [*verdict["skip"], worker.skip]})
            elif failure and worker.rival is not None:  # the part is not to blame
                self._store.add(part, worker.item or "", [worker.rival | {"note": failure}])
                failure = ""
            elif failure and worker.item is not None:
                self._fault(part, worker.item, failure)
            self._tries[part.name] = self._tries.get(part.name, 0) + 1
            finished = self._tries[part.name] == TRIES
            if finished:
                failure, worker.why = failure or "given up: its third process failed", ""
            else:
                self._queue.insert(0, part)
        verdict = self._store.verdict(part)
        seconds = verdict["seconds"] + (time.monotonic() - (worker.going_s or time.monotonic()))
        why = (worker.why or failure) if worker.how in ("missing", "refused") or failure else ""
        verdict |= {"finished": finished, "seconds": seconds}
        self._store.judge(part, verdict | self._words(part, verdict, why))

    def _words(self, part: Part, verdict: Row, why: str) -> Row:
        """The verdict in words, and whether it is a failure. why: of the process, if it failed."""
        wrong, faults = self._store.wrong(part), verdict["faults"]
        items = len(self._store.done(part))
        causes = [f"{item} is wrong" for item in wrong]
        causes += [f"{item}: {cause}" for item, cause in faults.items()]
        if why and not causes:
            causes = [why]
        text = f"{items} items" if verdict["finished"] else f"unfinished, {items} items so far"
        if causes:
            text = f"failed ({text}): {'; '.join(causes)}"
        return {"verdict": text, "failed": bool(causes)}

    def _log(self, head: str, printed: str) -> None:
        self._store.folder.mkdir(parents=True, exist_ok=True)
        path = self._store.folder / "log.txt"
        if path.exists() and path.stat().st_size > LOG_MOST:
            path.write_bytes(path.read_bytes()[-LOG_MOST // 2 :])
        with path.open("a") as file:
            file.write(f"---- {head}\n{printed}\n")

    def _summary(self, parts: Sequence[Part]) -> int:
        verdicts = [self._store.verdict(part) for part in parts]
        for verdict in verdicts:
            print(f"{verdict['part']}: {verdict['verdict'][:300]} ({verdict['seconds']:.0f} s)")
        left = sum(not verdict["finished"] for verdict in verdicts)
        again = f"; {left} parts are unfinished, call again" if left else ""
        print(f"{self._store.folder}/{self._store.slug}*.json are written{again}")
        return int(any(verdict.get("failed") for verdict in verdicts))
