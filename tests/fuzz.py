"""Feeds broken files to every parser of bytes that strangers write, for a stated time.

    uv run python -m tests.fuzz --seconds=60                     # each target for a minute
    uv run python -m tests.fuzz --targets=pickles,zips --seconds=900
    uv run python -m tests.fuzz --targets=zips --replay=runs/fuzz/zips/7-1234.bin

Inputs are good files after random edits (tests/mutations.py, tests/fuzz_targets.py,
tests/fuzz_local.py); the number of an input and --seed make it again. They are read in child
processes. A finding is an exception that is neither UserError nor OSError, the end of a process,
more than 10 s of a processor or 60 s of waiting, or more memory than 10 times the input plus 64 MB,
or 256 MB for tables of metrics, which are read in blocks of 4 MiB
(the limit on the address space is set before each input). Seconds are those of a processor, so that
other work on the machine takes nothing away from a target's time and makes no hang. Each kind of
finding is saved once, as TARGET/SEED-NUMBER.bin with its reason beside it; fuzz.json holds the
counts, the most seconds of a processor that one input took, and the most memory of a process.
Exits with 1 when there is a finding.
"""

import megajax.core.interrupted  # noqa: F401

import contextlib
import ctypes
import errno
import gc
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.monitor import results
from tests.fuzz_local import Target
from tests.fuzz_targets import TARGETS
from tests.mutations import mutate

HANG_S, STILL_S = 10, 60  # for one input: of a processor, and of waiting for anything else
GROWTH = 10  # bytes of memory for each byte of an input, beyond the slack of its target
CHILD_S = 20  # seconds of a processor that a child works; a crash costs no more than it
HANGS = {signal.SIGPROF: f"over {HANG_S} s", signal.SIGALRM: f"still for {STILL_S} s"}
PAGE = resource.getpagesize()
ONE_ARENA = -8, 1  # mallopt: threads that come and go must not each reserve 64 MB


@dataclass(frozen=True)
class Config(Checked):
    """What is fed, and for how long."""

    targets: str = option("all", "names joined by commas; all: every one")
    seconds: float = option(60.0, "for each target", "s", above=0)
    seed: int = option(0, "of the edits", at_least=0, at_most=2**32 - 1)
    replay: str = option("", "a saved input to read once instead")
    out: str = results.out_option("fuzz")


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def make(target: Target, seeds: list[bytes], seed: int, number: int) -> bytes:
    """Returns input `number`."""
    return mutate(random.Random(f"{seed} {number}"), seeds, target.edits)


def read(target: Target, data: bytes) -> str:
    """Reads one input within the limits. Returns what is wrong, or nothing."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz."))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + target.slack + GROWTH * len(data), before[1]))
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    signal.setitimer(signal.ITIMER_REAL, STILL_S)
    try:
        target.read(data, folder)
    except UserError:
        pass
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return _reason(error)
    except BaseException as error:  # Rust's panics are no Exceptions
        return _reason(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def _reason(error: BaseException) -> str:
    places = [
        f"{Path(f.filename).name}:{f.lineno} {f.name}"
        for f in traceback.extract_tb(error.__traceback__)
    ]
    return f"{type(error).__name__} at {' < '.join(places[:-5:-1])}: {str(error)[:200]}"


def work(
    target: Target, seeds: list[bytes], cfg: Config, first: int, shared: mmap.mmap, say: int
) -> None:
    """Reads inputs from number `first` on; tells where it is and what is wrong. Never returns."""
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_S + 2 * HANG_S,) * 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Rust tells of its panics, the log of what it skips.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    end = time.process_time() + min(CHILD_S, cfg.seconds)
    number = first
    while time.process_time() < end:
        shared[:8] = number.to_bytes(8, "little")
        begin = time.process_time()
        try:
            reason = read(target, make(target, seeds, cfg.seed, number))
        except Exception as error:  # of this script
            reason = f"not in the parser: {_reason(error)}"
        took = int(1e6 * (time.process_time() - begin))
        if took > int.from_bytes(shared[8:], "little"):
            shared[8:] = took.to_bytes(8, "little")
        if reason:
            os.write(say, (json.dumps([number, reason]) + "\n").encode())
        number += 1
    shared[:8] = number.to_bytes(8, "little")
    os._exit(0)


def fuzz(name: str, cfg: Config, out: Path, keep: Callable[[dict], None]) -> None:
    """Feeds one target for its time. keep: gets its row of figures after each child, so that a run
    that is ended has them, too."""
    target, shared = TARGETS[name], mmap.mmap(-1, 16)
    with tempfile.TemporaryDirectory() as folder:
        seeds = list(target.seeds(Path(folder)))
        (Path(folder) / "first").mkdir()
        with contextlib.suppress(ValueError, OSError):
            target.read(seeds[0], Path(folder) / "first")  # what is imported late is imported now
    gc.freeze()
    spent, number, kinds, memory = 0.0, 0, {}, 0
    while (left := cfg.seconds - spent) > 0:
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            os.close(ours)
            work(target, seeds, Config(seed=cfg.seed, seconds=left), number, shared, theirs)
        os.close(theirs)
        with open(ours) as pipe:
            messages = [json.loads(line) for line in pipe]
        _, status, used = os.wait4(child, 0)
        memory = max(memory, used.ru_maxrss)
        code, spent = os.waitstatus_to_exitcode(status), spent + used.ru_utime + used.ru_stime
        number = int.from_bytes(shared[:8], "little")
        if code != 0:
            messages.append([number, HANGS.get(-code, f"ended with {code}")])
            number += 1
        for where, reason in messages:
            kind = reason.partition(": ")[0]
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] == 1:
                save(out / name, cfg.seed, where, make(target, seeds, cfg.seed, where), reason)
        worst = int.from_bytes(shared[8:], "little") / 1e6
        keep(
            {
                "target": name,
                "inputs": number,
                "seconds": round(spent, 1),
                "worst_s": worst,
                "memory_mb": memory // 1024,
                "findings": kinds,
            }
        )


def save(folder: Path, seed: int, number: int, data: bytes, reason: str) -> None:
    """Keeps an input, and why."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{seed}-{number}.bin").write_bytes(data)
    (folder / f"{seed}-{number}.txt").write_text(f"{reason}\n")
    print(f"  {folder.name} {seed}-{number}: {reason}", flush=True)


def main() -> int:
    """Feeds the chosen targets, one after the other."""
    os.environ["RUST_BACKTRACE"] = "0"  # the trace of a panic takes more memory than an input may
    cfg, _ = config.from_flags(PRESETS)
    names = list(TARGETS) if cfg.targets == "all" else cfg.targets.split(",")
    if unknown := [n for n in names if n not in TARGETS]:
        near = did_you_mean(unknown[0], TARGETS)
        raise UserError(f"{unknown[0]!r} must be one of {', '.join(TARGETS)}.{near} (--targets)")
    warnings.filterwarnings("ignore", message=".*os.fork.*")
    ctypes.CDLL(None).mallopt(*ONE_ARENA)
    threading.stack_size(2**18)
    if cfg.replay:
        reason = read(TARGETS[names[0]], Path(cfg.replay).read_bytes())
        print(reason or "no finding")
        return bool(reason)
    out, rows = Path(cfg.out), dict[str, dict]()
    out.mkdir(parents=True, exist_ok=True)

    def keep(row: dict) -> None:
        rows[row["target"]] = row
        report = {"seed": cfg.seed, "rows": [*rows.values()]}
        (out / "fuzz.json").write_text(json.dumps(report, indent=2) + "\n")

    for name in names:
        fuzz(name, cfg, out, keep)
        row, kinds = rows[name], rows[name]["findings"]
        summary = f"{sum(kinds.values())} findings of {len(kinds)} kinds"
        worst = f"at most {row['worst_s']:.2f} s for one and {row['memory_mb']:,} MB"
        print(
            f"{name}: {row['inputs']:,} inputs, {row['seconds']} s, {worst}, {summary}", flush=True
        )
    return int(any(row["findings"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(config.run(main))
