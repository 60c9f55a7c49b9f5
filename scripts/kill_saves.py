"""kill -9 at random moments of a save, over and over: what was finished must come back, bit by bit.

    uv run scripts/kill_saves.py              # 10 kills, seconds
    uv run scripts/kill_saves.py --kills=200  # minutes

A preloaded interpreter forks the victims (an import costs seconds, a fork nothing). A victim
restores the latest step, compares every leaf with what was saved, and saves step after step until
it is killed at a random moment while a save is under way, the first save of a folder too: every
--restarts kills a new folder begins. Checked after each restart: no leaf differs, the step is not
older than the last save that was reported finished, and the folder holds nothing but `keep` steps
and at most one more. Stops at the first check that fails; writes kill_saves.json into --out.
"""

import megajax.core.interrupted  # noqa: F401

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.directory import StepFolder
from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.monitor import results

KEEP = 2
STATE = 8 * 64 * 1024 * 4  # bytes of a victim's state
MOST = 1.2 * (KEEP + 1) * STATE  # bytes of a folder after a restart: steps, and their metadata


@dataclass(frozen=True)
class Config(Checked):
    """How often, and where."""

    kills: int = option(10, "kill -9 while a save is under way", at_least=1)
    restarts: int = option(20, "kills in one folder, then a new one begins", at_least=1)
    seed: int = option(0, "of the moments", at_least=0, at_most=2**32 - 1)
    folder: str = option("", "where checkpoints are written; empty: a temporary folder")
    out: str = results.out_option("kill_saves")


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def state(step: int) -> dict[str, np.ndarray]:
    """What a victim saves as this step."""
    random = np.random.default_rng(step)
    return {f"x{i}": random.standard_normal((64, 1024), np.float32) for i in range(8)}


def say(word: str, value: object) -> None:
    """Writes one line in one system call: with PYTHONUNBUFFERED, print makes several, and a kill
    between them would leave half a line in the pipe, which the next process would complete."""
    os.write(1, f"{word} {value}\n".encode())


def victim(folder: str) -> None:
    """Restores, compares, saves for ever. Says where it is, a line each."""
    import jax

    from megajax.checkpoint.manager import CheckpointManager

    jax.config.update("jax_platforms", "cpu")
    manager = CheckpointManager(folder, keep=KEEP)
    step = manager.latest() or 0
    if step:
        found = manager.restore(like=state(0))
        wrong = [n for n, x in state(step).items() if np.asarray(found[n]).tobytes() != x.tobytes()]
        if wrong or manager.latest() != step:
            raise ValueError(f"step {step} came back as {manager.latest()}, other leaves: {wrong}")
    say("restored", step)
    os.read(0, 1)  # until the folder was looked at
    while True:
        step += 1
        saved = state(step)
        say("saving", step)
        manager.save(step, saved, data_state={"rows": step}).result()
        say("saved", step)


def nursery() -> None:
    """Forks a victim of the folder that each line of the input names, and waits for its end."""
    import orbax.checkpoint.experimental.v1  # noqa: F401

    import megajax.checkpoint.manager  # noqa: F401

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


class Killer:
    """One folder that victims save in, and what must be found there."""

    def __init__(self, process: subprocess.Popen, folder: Path, random: np.random.Generator):
        """process: a nursery."""
        self._process, self._folder, self._random = process, folder, random
        self._save_s = [0.5, 0.1]  # seconds of a victim's first save and of others, as last seen
        self._finished, self._killed = 0, False

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def _hear(self) -> tuple[str, int]:
        assert self._process.stdout is not None
        word, _, value = self._process.stdout.readline().decode().strip().partition(" ")
        if word in ("", "failed"):
            raise UserError(f"a victim in {self._folder} failed: {value or 'no word of it'}")
        if word == "saved":
            self._finished = int(value)
        return word, int(value)

    def kill(self) -> dict[str, Any]:
        """Kills a victim during a save; one that was hit between two saves does not count.

        Returns: what it had found. Raises: UserError when that is not what must be there.
        """
        while True:
            self._say(f"{self._folder}\n")
            pid = self._hear()[1]
            restored = self._hear()[1]
            row = self._look(restored)
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
            if last[0] == "saving":
                self._killed = True
                return row | {"killed_in": last[1]}

    def _look(self, restored: int) -> dict[str, Any]:
        """Checks the folder as a victim found it and cleaned it up."""
        names = sorted(p.name for p in self._folder.iterdir()) if self._folder.exists() else []
        size = sum(f.stat().st_size for f in self._folder.rglob("*") if f.is_file())
        if restored < self._finished:
            raise UserError(f"step {restored} came back, but step {self._finished} was finished")
        steps = StepFolder(self._folder).steps()
        if names != sorted(str(s) for s in steps) or len(steps) > KEEP + 1 or size > MOST:
            raise UserError(f"{self._folder} has grown: {size} bytes in {names}")
        lead = restored - self._finished  # a save that was finished, but killed before it said so
        return {"restored": restored, "lead": lead, "bytes": size}


def run(cfg: Config, folder: Path, began: float) -> list[dict[str, Any]]:
    """Returns a row for each kill. Raises: UserError at the first check that fails."""
    random = np.random.default_rng(cfg.seed)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, "--nursery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    rows: list[dict[str, Any]] = []
    try:
        while len(rows) < cfg.kills:
            if len(rows) % cfg.restarts == 0:
                killer = Killer(process, folder / f"{len(rows) // cfg.restarts}", random)
            rows.append({"folder": len(rows) // cfg.restarts} | killer.kill())
            if len(rows) % 20 == 0 or len(rows) == cfg.kills:
                first = sum(row["killed_in"] == 1 for row in rows)
                largest = max(row["bytes"] for row in rows) / STATE
                print(
                    f"{len(rows)} kills, {first} in the first save, largest folder {largest:.2f} "
                    f"states, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    return rows


def main() -> int:
    """Kills, prints, writes."""
    cfg, _ = config.from_flags(PRESETS)
    path = results.writable_folder(cfg.out) / "kill_saves.json"
    where = results.writable_folder(cfg.folder, "folder") if cfg.folder else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=where) as name:
        rows = run(cfg, Path(name), began)
    about = results.facts(f"{os.cpu_count()} CPU cores", "measured on this machine")
    about |= {
        "kills": len(rows),
        "kills_in_a_first_save": sum(row["killed_in"] == 1 for row in rows),
        "restarts_a_folder": cfg.restarts,
        "steps_lost": 0,  # finished, and not there: run() raises
        "leaves_that_differ": 0,
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
