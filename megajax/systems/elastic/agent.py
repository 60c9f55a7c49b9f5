"""The agent of a host: starts its training processes, reports how far they are, ends them.

It looks from outside: exit codes, states of processes as Linux has them, progress records in shared
memory, keywords and growth of their logs, and the counters of the host (the heartbeat of MegaScale
section 4). What it sees, and what the processes record themselves, goes to the driver as one
stream of records, the newest of each name once a period. The driver decides. When the driver is
gone the agent ends its processes and itself; when the agent is killed its reaper does. Nothing
stays running, nor in shared memory: what left its session is found as a descendant of the agent,
or by a mark in its environment.
"""

import contextlib
import dataclasses
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.monitor import heartbeat, records
from megajax.monitor.heartbeat import Span
from megajax.monitor.meter import HostMeter
from megajax.monitor.records import Record, without_host
from megajax.systems.elastic import checks, links, ranks, reaper, shared
from megajax.systems.elastic.hosts import AGENT
from megajax.systems.elastic.ranks import Process
from megajax.systems.elastic.tls import Tls
from megajax.systems.elastic.wire import Line, dial

TICK_S = 0.1  # (chosen) how soon the end of a process is seen
DUMP_S = 1.0  # (chosen) for the stacks of all threads to be written


class Agent:
    """Serves one driver until told to quit, or until the driver is gone."""

    def __init__(
        self,
        name: str,
        driver: str,
        secret: str,
        env: Mapping[str, str],
        period: float,
        tls: Tls | None = None,
    ):
        """Joins a driver that holds the job's secret, and obeys no other.

        driver: its host:port. env: of the training processes, completed by the driver's.
        Raises: OSError when the driver is not there, not the job's, or has an agent of this name.
        """
        self._secret, self._env, self._period, self._name = secret, env, period, name
        self._meter = HostMeter()
        self._line: Line = dial(driver, secret, AGENT, name, tls)
        self._address: str = self._line.sock.getsockname()[0]
        self._mark = secrets.token_hex(16)
        self._join()
        shared.sweep(shared.root())
        self._claim()
        ranks.adopt_orphans()
        self._processes: list[Process] = []
        self._attempt = 0
        self._asked: int | None = None
        self.was_asked = False  # to stop, by a signal
        self._disk = Path(".")
        self._reaper = self._new_reaper()

    def _claim(self) -> None:
        """Takes a folder in shared memory."""
        self._folder, self._lock = shared.claim(shared.root())
        self._lease = heartbeat.Lease(heartbeat.beside(self._folder / "any"))

    def _release(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lease.close()
        os.close(self._lock)

    def _new_reaper(self) -> subprocess.Popen:
        """Returns a reaper that knows all that is running."""
        fresh = subprocess.Popen(
            [sys.executable, "-S", "-E", str(reaper.__file__)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        known = [f"folder {self._folder}", f"mark {self._mark}"]
        known += [f"group {p.popen.pid}" for p in self._processes]
        assert fresh.stdin is not None
        fresh.stdin.write("\n".join(known) + "\n")
        fresh.stdin.flush()
        return fresh

    def _join(self) -> None:
        """Says where this agent is, and waits to be taken."""
        try:
            pid = os.getpid()
            self._line.send({"address": self._address, "pid": pid, "mark": self._mark})
            said: list[dict[str, Any]] = []
            while not said:
                said = self._line.receive()
            if said[0]["do"] != "welcome":
                raise ConnectionRefusedError(said[0].get("why", "the driver takes no agent"))
        except BaseException:
            self._line.close()
            raise
        self._first = said[1:]  # what came behind the welcome

    def _tell_reaper(self, words: str) -> None:
        try:
            assert self._reaper.stdin is not None
            self._reaper.stdin.write(words + "\n")
            self._reaper.stdin.flush()
        except OSError:  # somebody has killed it
            self._dismiss_reaper()
            self._reaper = self._new_reaper()

    def _dismiss_reaper(self) -> None:
        """Lets the reaper clean up and end."""
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            self._reaper.stdin.close()
        self._reaper.wait()

    def serve(self) -> int:
        """Returns 0 after 'quit', 1 when the driver was lost."""
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._ask)
            due = 0.0
            while True:
                ready, _, _ = select.select([self._line], [], [], TICK_S)
                heard, self._first = self._first, []
                for message in heard + (self._line.receive() if ready else []):
                    if message["do"] == "quit":
                        return 0
                    self._obey(message)
                if self._asked is not None:
                    self._line.send({"asked": self._asked})
                    self._asked = None
                ended = any(p.popen.returncode is None and p.code() is not None
                            for p in self._processes)  # fmt: skip
                if ended or time.monotonic() >= due:
                    due = time.monotonic() + self._period
                    self._report()
        except OSError:
            return 1
        finally:
            self._stop()
            self._line.close()
            self._release()
            self._dismiss_reaper()

    def _ask(self, number: int, _: object) -> None:
        """Asks the driver to let the whole job save and stop; a second signal ends this agent."""
        signal.signal(number, signal.SIG_DFL)
        self._asked, self.was_asked = number, True

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "lease":
                self._lease.renew(message["since"])
            case "moment":
                self._line.send({"moment": heartbeat.now()})
            case "ping":
                self._line.send({"mine": time.monotonic()})
            case "port":
                with socket.socket(links.family(self._address)) as probe:
                    probe.bind((self._address, 0))
                    self._line.send({"port": probe.getsockname()[1]})
            case "start":
                self._start(message)
            case "tell":
                for p in self._processes:
                    p.send(message["signal"])
            case "dump":
                self._line.send({"stacks": self._stacks(), "spans": self._spans()})
            case "stop":
                self._report()  # the last of its log
                self._stop()
                self._line.send({"stopped": self._attempt})
            case "answer":
                self._line.send({"answers": links.answer(self._address, self._secret)})
            case "reach":
                try:
                    figure = links.reach(message["at"], self._secret)
                    self._line.send({"reached": figure})
                except (OSError, ValueError) as error:
                    self._line.send({"reached": str(error) or type(error).__name__})
            case "check":
                self._line.send({"checks": checks.run(self._disk)})

    def _start(self, message: dict[str, Any]) -> None:
        """Starts the processes of an attempt.

        message: attempt, command, folder, {rank: env}, memory: whether to go on from copies there,
        lease: how old it may grow, since: from when it counts, run: the driver's name of the job.
        """
        self._attempt = message["attempt"]
        if not self._lease.is_there():  # somebody has cleaned up shared memory
            self._release()
            self._claim()
            self._tell_reaper(f"folder {self._folder}")
        self._lease.renew(message["since"], message["lease"])
        logs = Path(message["folder"])
        for place, (rank, env) in enumerate(message["ranks"].items()):
            memory = self._folder / f"memory{place}"  # stays from attempt to attempt
            if not message["memory"]:
                memory.unlink(missing_ok=True)
            progress = self._folder / f"attempt{self._attempt}-rank{rank}"
            log = logs / f"rank{rank}.log"
            own = {
                "MEGAJAX_PROGRESS": str(progress), "MEGAJAX_MEMORY": str(memory),
                "MEGAJAX_ATTEMPT": str(self._attempt), "MEGAJAX_RUN": message.get("run", ""),
                reaper.MARK: self._mark,
            }  # fmt: skip
            try:
                popen, output = ranks.run(message["command"], log, {**self._env, **env, **own})
            except OSError as error:  # another one would say the same
                program = message["command"][0]
                at = "" if error.filename in (None, program) else f": {error.filename}"
                self._line.send({"unable": f"cannot start {program!r}: {error.strerror}{at}"})
                return
            self._disk = logs
            self._processes.append(Process(int(rank), popen, progress, output))
            self._tell_reaper(f"group {popen.pid}")
        for p in self._processes:
            p.output.follow()

    def _own(self) -> set[int]:
        return {self._reaper.pid, *(p.popen.pid for p in self._processes)}

    def _report(self) -> None:
        ranks.reap(self._own())
        now, name, meter = time.time(), self._name, self._meter
        found = [
            Record(now, name, None, device, None, n, value)
            for device, values in {None: meter.host(self._disk), **meter.devices()}.items()
            for n, value in values.items()
        ]
        for p in self._processes:
            text = p.output.new_text()
            if p.rank == 0 and text:
                self._line.send({"out": text})
            found += p.records(name, meter, text)
        rows = [without_host(r) for r in found]
        self._line.send({"report": self._attempt, "records": rows, "moment": heartbeat.now()})

    def _stacks(self) -> dict[int, str]:
        """Returns the Python stacks of every rank, or why there are none."""
        live = [p for p in self._processes if p.code() is None]
        asked = [p for p in live if heartbeat.read(p.progress) is not None]
        for p in asked:  # without a record nobody waits for the signal, and it would kill
            p.send(signal.SIGUSR1)
        time.sleep(DUMP_S if asked else 0.0)
        found = {}
        for p in self._processes:
            file = heartbeat.stacks_file(p.progress)
            text = ""
            with contextlib.suppress(OSError):
                text = file.read_text(errors="replace")
            state, code = p.state(), p.code()
            text = text or f"no stacks: state {state}, exit code {code}\n"
            found[p.rank] = text + p.output.missing()
        return found

    def _spans(self) -> dict[int, list]:
        """Returns the last sections of every rank, of dead ones too; the one that it is in last."""
        found = {}
        for p in self._processes:
            spans, now = heartbeat.read_spans(p.progress), heartbeat.read(p.progress)
            if now is not None:
                spans.append(Span(now.section, now.step, now.time, time.monotonic()))
            found[p.rank] = [dataclasses.astuple(s) for s in spans]
        return found

    def _stop(self) -> None:
        """Kills every process with all that it started, and waits until none is left."""
        for p in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(p.popen.pid, signal.SIGKILL)
        for p in self._processes:
            p.popen.wait()
        reaper.kill_all(self._left)  # what left its group
        ended, self._processes = self._processes, []
        for p in ended:
            with contextlib.suppress(OSError):
                self._tell_reaper(f"reaped {p.popen.pid}")
            p.output.close()
            for file in (p.progress, heartbeat.stacks_file(p.progress), records.beside(p.progress)):
                file.unlink(missing_ok=True)

    def _left(self) -> set[int]:
        """Returns what was started here and lives."""
        ranks.reap({self._reaper.pid})
        return reaper.descendants(os.getpid(), {self._reaper.pid}) | reaper.marked(self._mark)
