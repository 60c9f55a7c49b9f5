"""Kills a process again and again while it saves: finished saves must be restored bit by bit.

    uv run scripts/kill_saves.py                              # 10 kills, seconds
    uv run scripts/kill_saves.py --kills=200                  # minutes
    uv run scripts/kill_saves.py --kills=200 --around=junk    # beside files that are no steps
    uv run scripts/kill_saves.py --kills=200 --around=store   # in an object store with faults

The victims are forks of one interpreter that has imported everything (an import takes seconds, a
fork almost none). A victim restores the latest step, compares every leaf with what was saved, and
saves step after step until it is killed at a random moment of a save. After every --restarts kills
a new folder begins, so that first saves are killed too. After each restart the script checks that
no leaf differs, that the restored step is not older than the last save that was reported finished,
and that the folder holds at most one step more than the manager keeps. It stops at the first check
that fails, and writes kill_saves.json into --out.
"""

import megajax.core.interrupted  # noqa: F401

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from megajax.checkpoint.steps import StepFolder
from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.monitor import results
from tests.checkpoint import hostile_places

KEEP = 2
STATE = 8 * 64 * 1024 * 4  # bytes of a victim's state
MOST = 1.2 * (KEEP + 1) * STATE  # bytes of a folder after a restart: steps, and their metadata


@dataclass(frozen=True)
class Config(Checked):
    """Number of kills, and where they happen."""

    kills: int = option(10, "number of kill -9 while a save is under way", at_least=1)
    restarts: int = option(20, "kills in one folder before a new one begins", at_least=1)
    seed: int = option(0, "random seed of the moments", at_least=0, at_most=2**32 - 1)
    around: Literal["quiet", "junk", "store"] = option(
        "quiet", "what else happens there: nothing, junk in the folder, an object store that lies"
    )
    folder: str = option("", "folder in which checkpoints are written; empty: a temporary one")
    out: str = results.out_option("kill_saves")


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def state(step: int) -> dict[str, np.ndarray]:
    """Returns the state that a victim saves as this step."""
    random = np.random.default_rng(step)
    return {f"x{i}": random.standard_normal((64, 1024), np.float32) for i in range(8)}


def say(word: str, value: object) -> None:
    """Writes one line in one system call: with PYTHONUNBUFFERED, print makes several, and a kill
    between them would leave half a line in the pipe, which the next process would complete."""
    os.write(1, f"{word} {value}\n".encode())


def victim(folder: str) -> None:
    """Restores, compares and saves for ever. Reports each stage in a line."""
    import jax

    from megajax.checkpoint import store
    from megajax.checkpoint.manager import CheckpointManager
    from megajax.checkpoint.store import CheckpointError, SaveError

    jax.config.update("jax_platforms", "cpu")
    store.RETRIES = {"max_retries": 5, "initial_delay": "20ms", "max_delay": "100ms"}
    manager = CheckpointManager(folder, keep=KEEP)
    step, said = manager.latest() or 0, manager.latest()
    if step:
        try:
            restored = manager.restore(like=state(0))
        except CheckpointError:
            if manager.latest() is not None:
                raise
            step = 0  # what looked like steps was none
        else:
            step = manager.latest() or 0
            right = state(step)
            wrong = [
                n for n, x in right.items() if np.asarray(restored[n]).tobytes() != x.tobytes()
            ]
            if wrong or step > said:
                raise ValueError(f"step {said} came back as {step}, other leaves: {wrong}")
    say("restored", step)
    os.read(0, 1)  # until the folder was looked at
    while True:
        step += 1
        saved = state(step)
        say("saving", step)
        try:
            manager.save(step, saved, data_state={"rows": step}).result()
        except SaveError:
            say("refused", step)
        else:
            say("saved", step)


def nursery() -> None:
    """Forks a victim for the folder that each line of the input names, and waits for its end."""
    import orbax.checkpoint.experimental.v1  # noqa: F401

    import megajax.checkpoint.manager  # noqa: F401

    hostile_places.obey_modes()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                victim(line.strip())
            except BaseException as error:
                say("failed", repr(error))
            os._exit(1)
        say("pid", child)
        os.waitpid(child, 0)
        say("died", 0)


class Place(Protocol):
    """What surrounds the saves of victims."""

    def must_come_back(self) -> int:
        """Returns the oldest step that a restart may restore."""

    def begin(self) -> None:
        """Is called when a victim begins to save."""

    def tidy(self, most: int) -> int:
        """Checks that the place holds at most so many steps and nothing else. Returns: bytes.
        Raises: UserError."""

    def look(self, saved: list[int]) -> dict[str, Any]:
        """Checks after a kill. saved: the steps finished since the last call. Raises: UserError."""

    def close(self) -> None:
        """Releases the place."""


class Quiet:
    """A folder where nothing else happens."""

    def __init__(self, folder: Path):
        """folder: need not exist yet."""
        self._folder, self._finished = folder, 0

    def must_come_back(self) -> int:
        """Returns the last step that was reported finished."""
        return self._finished

    def begin(self) -> None:
        """Nothing begins."""

    def tidy(self, most: int) -> int:
        """Checks that all names are those of steps, few of them."""
        names = sorted(p.name for p in self._folder.iterdir()) if self._folder.exists() else []
        size = sum(f.stat().st_size for f in self._folder.rglob("*") if f.is_file())
        steps = StepFolder(self._folder).steps()
        if names != sorted(str(s) for s in steps) or len(steps) > most or size > MOST:
            raise UserError(f"{self._folder} has grown: {size} bytes in {names}")
        return size

    def look(self, saved: list[int]) -> dict[str, Any]:
        """Remembers."""
        self._finished = max([self._finished, *saved])
        return {}

    def close(self) -> None:
        """Nothing ends."""


class Killer:
    """One place in which victims save, with the checks of what must be there."""

    def __init__(
        self,
        process: subprocess.Popen,
        address: str,
        place: Place,
        random: np.random.Generator,
    ):
        """process: a nursery. address: the place's address."""
        self._process, self._address, self._place = process, address, place
        self._random = random
        self._save_s = [0.5, 0.1]  # seconds of a victim's first save and of others, as last seen
        self._killed = self._finished = False
        self._saved: list[int] = []
        self.refused = 0

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def _hear(self) -> tuple[str, int]:
        assert self._process.stdout is not None
        word, _, value = self._process.stdout.readline().decode().strip().partition(" ")
        if word in ("", "failed"):
            raise UserError(f"a victim in {self._address} failed: {value or 'no word of it'}")
        if word == "saved":
            self._saved.append(int(value))
            self._finished = True
        self.refused += word == "refused"
        return word, int(value)

    def kill(self) -> dict[str, Any]:
        """Kills a victim during a save; one that was hit between two saves does not count.

        Returns: the step that the victim restored, and figures of the kill. Raises: UserError if
        the step or its bits are wrong.
        """
        while True:
            least = self._place.must_come_back()
            self._say(f"{self._address}\n")
            pid = self._hear()[1]
            restored = self._hear()[1]
            if restored < least:
                raise UserError(f"step {restored} came back, but step {least} was good")
            row: dict[str, Any] = {"restored": restored, "lead": restored - least}
            row["bytes"] = self._place.tidy(KEEP + 1)
            self._place.begin()
            self._say("\n")
            through = int(self._random.integers(self._killed and not self._finished, 3))
            for nth in range(through if self._killed else 0):
                self._hear()
                began = time.monotonic()
                self._hear()
                self._save_s[min(nth, 1)] = time.monotonic() - began
            took = self._save_s[min(through, 1)]
            heard = self._hear()
            time.sleep(self._random.uniform(0, 1.1 * took))
            os.kill(pid, signal.SIGKILL)
            while heard[0] != "died":
                last, heard = heard, self._hear()
            row |= self._place.look(self._saved)
            self._saved = []
            if last[0] == "saving":
                self._killed = True
                return row | {"killed_in": last[1], "refused": self.refused}


def run(cfg: Config, folder: Path, began: float) -> list[dict[str, Any]]:
    """Returns a row for each kill. Raises: UserError at the first check that fails."""
    random = np.random.default_rng(cfg.seed)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        places = Places(cfg, folder, stack)
        process = places.nursery()
        while len(rows) < cfg.kills:
            number = len(rows) // cfg.restarts
            if len(rows) % cfg.restarts == 0:
                killer = Killer(process, *places.new(number), random)
            rows.append({"folder": number} | killer.kill())
            if len(rows) % 20 == 0 or len(rows) == cfg.kills:
                first = sum(row["killed_in"] == 1 for row in rows)
                largest = max(row["bytes"] for row in rows) / STATE
                print(
                    f"{len(rows)} kills, {first} in the first save, largest folder {largest:.2f} "
                    f"states, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    return rows


class Places:
    """Makes the surroundings that were asked for, and a nursery that knows them."""

    def __init__(self, cfg: Config, folder: Path, stack: contextlib.ExitStack):
        """stack: ends what was made."""
        self._cfg, self._folder, self._stack = cfg, folder, stack
        self._random = np.random.default_rng([cfg.seed, 1])
        self._environment: dict[str, str] = {}
        if cfg.around == "store":
            self._store = hostile_places.LyingStore("0", KEEP, state, self._random, folder)
            stack.callback(self._store.close)
            self._environment = self._store.environment()

    def nursery(self) -> subprocess.Popen:
        """Returns a process that forks victims."""
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | self._environment,
        )
        self._stack.callback(_end, process)
        return process

    def new(self, number: int) -> tuple[str, Place]:
        """Returns (where victims save next, what surrounds them there)."""
        folder = self._folder / f"{number}"
        place: Place
        match self._cfg.around:
            case "store":
                self._store.new_run(f"{number}")
                return self._store.address, self._store
            case "junk":
                place = hostile_places.Junk(folder, KEEP, state, self._random)
            case _:
                place = Quiet(folder)
        self._stack.callback(place.close)
        return str(folder), place


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def main() -> int:
    """Kills, prints, writes."""
    cfg, _ = config.from_flags(PRESETS)
    name = "kill_saves" + ("" if cfg.around == "quiet" else f"_{cfg.around}")
    path = results.writable_folder(cfg.out) / f"{name}.json"
    where = results.writable_folder(cfg.folder, "folder") if cfg.folder else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=where) as name:
        rows = run(cfg, Path(name), began)
    about = results.facts(f"{os.cpu_count()} CPU cores", "measured on this machine")
    about |= {
        "around": cfg.around,
        "kills": len(rows),
        "kills_in_a_first_save": sum(row["killed_in"] == 1 for row in rows),
        "restarts_a_folder": cfg.restarts,
        "steps_lost": 0,  # good or finished, and gone too early: run() raises
        "leaves_that_differ": 0,
        "saves_refused": sum(
            max(row["refused"] for row in rows if row["folder"] == folder)
            for folder in {row["folder"] for row in rows}
        ),
        "disturbances": sum(
            max(row.get("disturbances", 0) for row in rows if row["folder"] == folder)
            for folder in {row["folder"] for row in rows}
        )
        if cfg.around == "junk"
        else rows[-1].get("disturbances", 0),
        "state_bytes": STATE,
        "largest_folder_bytes": max(row["bytes"] for row in rows),
        "seconds": round(time.monotonic() - began),
    }
    results.write(path, about, rows)
    print(path)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--nursery"]:
        nursery()
    else:
        sys.exit(config.run(main))
