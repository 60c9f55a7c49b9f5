"""Labels: measured rows with their families, programs and noise, and batches that measure them.

A label is the measured time of a row. A family is a group of similar programs (families.py). The
passes of a measurement form two halves, and each half gives a separate time: the difference of the
two is the noise of the label (profile.py). All of it is stored in one npz file, of which
`Dataset.load` reads the columns of a data set.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.monitor import results
from megajax.systems.cdmpp.dataset import Dataset, load_arrays, save_arrays
from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.profile import HALVES, NOISY, Ready, Timed, measure_ready, ready

_OWN = ("family", "program", "halves", "walls")


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """The labelled rows of one or more profiles.

    dataset: the rows, each with the smaller time of its two halves. families: (rows,) the name of
    the family of each row's program. programs: (rows,) the number of that program. halves: (rows,
    HALVES) seconds of the instruction, the least time over the passes of each half. walls: (rows,
    HALVES) seconds of a whole call of the row's program.
    """

    dataset: Dataset
    families: np.ndarray
    programs: np.ndarray
    halves: np.ndarray
    walls: np.ndarray

    @classmethod
    def of(cls, timed: Sequence[Timed], card: DeviceCard, facts: Mapping[str, Any]) -> "Labels":
        """Returns the labels of programs timed on one device."""
        records = [r for one in timed for r in one.records]
        halves = np.concatenate([np.zeros((0, HALVES)), *(one.halves for one in timed)])
        counts = [len(one.records) for one in timed]
        return cls(
            Dataset(records, halves.min(1), [card.name] * len(records), {card.name: card}, facts),
            np.repeat(np.array([one.program.family for one in timed], np.str_), counts),
            np.repeat(np.array([one.program.number for one in timed], np.int64), counts),
            halves,
            np.repeat(np.array([one.wall for one in timed]).reshape(-1, HALVES), counts, 0),
        )

    @classmethod
    def joined(cls, parts: Sequence["Labels"]) -> "Labels":
        """Returns the rows of all parts. Raises: UserError if there is no part."""
        if not parts:
            raise UserError("nothing was measured; give more time (--budget)")
        datasets = [part.dataset for part in parts]
        cards: dict[str, DeviceCard] = {}
        for dataset in datasets:
            cards.update(dataset.cards)
        rows = [record for dataset in datasets for record in dataset.records]
        devices = [name for dataset in datasets for name in dataset.devices]
        seconds = np.concatenate([dataset.seconds for dataset in datasets])
        joined = Dataset(rows, seconds, devices, cards, datasets[-1].facts)
        columns = ("families", "programs", "halves", "walls")
        return cls(joined, *(np.concatenate([getattr(p, name) for p in parts]) for name in columns))

    @classmethod
    def together(cls, paths: Sequence[str | os.PathLike[str]]) -> "Labels":
        """Returns the rows of several files.

        The card of a device that several files measured is that of the first of them, which should
        be the file of real programs. Programs of later files get other numbers than those of
        earlier ones.
        """
        parts = [cls.load(path) for path in paths]
        cards: dict[str, DeviceCard] = {}
        for part in parts:
            cards = {**part.dataset.cards, **cards}
        renumbered: list[Labels] = []
        for part in parts:
            first_cards = {name: cards[name] for name in part.dataset.cards}
            first = (
                max((int(other.programs.max(initial=-1)) for other in renumbered), default=-1) + 1
            )
            dataset = dataclasses.replace(part.dataset, cards=first_cards)
            renumbered.append(
                dataclasses.replace(part, dataset=dataset, programs=part.programs + first)
            )
        facts = dict(parts[0].dataset.facts)
        facts |= {"parts": [dict(part.dataset.facts) for part in parts]} if len(parts) > 1 else {}
        return cls.joined(renumbered).with_facts(facts)

    @property
    def disagreement(self) -> np.ndarray:
        """(rows,): |a - b| / min(a, b) of both halves."""
        return np.ptp(self.halves, 1) / self.halves.min(1)

    @property
    def is_marked(self) -> np.ndarray:
        """(rows,): whether the halves differ by more than NOISY."""
        return self.disagreement > NOISY

    @property
    def noise(self) -> dict[str, float]:
        """The noise floor: mean and median disagreement, and the share of marked rows."""
        apart = self.disagreement
        return {
            "noise_mean": float(apart.mean()),
            "noise_median": float(np.median(apart)),
            "marked": float(self.is_marked.mean()),
        }

    @property
    def below_floor(self) -> float:
        """The share of rows that are faster than their card's roofline by more than 5 %.

        On a GPU the arrays of such rows are in the L2 cache, which the roofline does not consider.
        A predictor never predicts less than the roofline.
        """
        rows = zip(self.dataset.records, self.dataset.devices, strict=True)
        floors = np.array([record.floor_s(self.dataset.cards[name]) for record, name in rows])
        return float((floors > 1.05 * self.dataset.seconds).mean())

    def of_rows(self, rows: np.ndarray) -> "Labels":
        """Returns some rows. rows: their numbers."""
        columns = ("families", "programs", "halves", "walls")
        return Labels(self.dataset[rows], *(getattr(self, name)[rows] for name in columns))

    def with_facts(self, facts: Mapping[str, Any]) -> "Labels":
        """Returns the same rows with other facts about their provenance."""
        return dataclasses.replace(self, dataset=dataclasses.replace(self.dataset, facts=facts))

    def with_raised_cards(self) -> "Labels":
        """Returns the rows with cards whose rates are raised until no row is below its roofline.

        This is meant for devices whose card was measured. The card of a CPU is measured with a few
        simple programs, and some operation may read its arrays from a faster cache than they did.
        """
        cards = dict(self.dataset.cards)
        rows = zip(self.dataset.records, self.dataset.devices, self.dataset.seconds, strict=True)
        for record, device, seconds in rows:
            card = cards[device]
            if record.floor_s(card) > seconds:
                flops = {
                    name: max(peak, record.flops / seconds) for name, peak in card.flops.items()
                }
                moved = max(card.memory_bytes_per_s, record.nbytes / seconds)
                cards[device] = dataclasses.replace(card, flops=flops, memory_bytes_per_s=moved)
        return dataclasses.replace(self, dataset=dataclasses.replace(self.dataset, cards=cards))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an npz file that `load` and `Dataset.load` read."""
        self.dataset.save(path)
        columns = (self.families.astype(np.str_), self.programs, self.halves, self.walls)
        save_arrays(path, load_arrays(path, "data set") | dict(zip(_OWN, columns, strict=True)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Labels":
        """Returns the labels of a file. Raises: UserError if it is none or damaged."""
        dataset, arrays = Dataset.load(path), load_arrays(path, "data set")
        if missing := [name for name in _OWN if name not in arrays]:
            raise UserError(
                f"{path} has no {missing[0]}: scripts/profile_programs.py did not write it"
            )
        for name in _OWN:
            if arrays[name].shape[:1] != (len(dataset),):
                raise UserError(
                    f"{path} is damaged: {name} has the shape {arrays[name].shape}, not "
                    f"{len(dataset)} rows"
                )
        return cls(dataset, *(arrays[name] for name in _OWN))


def card_json(card: DeviceCard) -> str:
    """Returns a card as a line of JSON."""
    return json.dumps(dataclasses.asdict(card) | {"flops": dict(card.flops)})


# ---- compiled programs of a batch
#
# Draws and compiles the programs of a batch that are to be timed on a GPU, several at a time.
#
# XLA's autotuning runs variants of matrix products on the GPU while it compiles them. So a complete
# batch is compiled before any program of it is timed. If other processes time programs on the same
# GPU at that moment, autotuning must be turned off, and the input arrays must be drawn on the host.
# A program that cannot be drawn, compiled or run is left out, so that an operation that the GPU
# does not support costs only the programs that contain it.


Tell = Callable[[str], None]
_Pair = tuple[Program, Ready]


def prepared(
    draw: Callable[[int], Program],
    numbers: Sequence[int],
    *,
    threads: int = 1,
    end: float = math.inf,
    host: jax.Device | None = None,
    tell: Tell = print,
) -> tuple[list[_Pair], int]:
    """Returns (programs that compiled, count of the numbers that were tried).

    Args: draw: makes the program of a number. threads: programs that compile at a time. end: time
        of the monotonic clock, in seconds, after which no further program is begun. host: where
        the arrays are drawn; None: on the device that runs the programs.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_compiled, draw, number, host, tell) for number in numbers]
        wait(futures, max(end - time.monotonic(), 0) if end < math.inf else None)
        late = [future for future in reversed(futures) if future.cancel()]
    begun = futures[: len(futures) - len(late)]  # the pool begins them in their order
    pairs = [future.result() for future in begun]
    return [pair for pair in pairs if pair is not None], len(begun)


def runnable(
    programs: Sequence[_Pair], tell: Tell = print, *, device: jax.Device | None = None
) -> list[_Pair]:
    """Runs each program once; returns those that do not fail.

    device: takes the arrays of the programs returned, which were drawn elsewhere.
    """
    running = []
    for program, compiled in programs:
        try:
            if device is not None:
                args = jax.device_put(program.args, device)
                program, compiled = dataclasses.replace(program, args=args), compiled.on(args)
            compiled.call()
        except Exception as error:
            tell(_line(program.number, program.family, "did not run", error))
        else:
            running.append((program, compiled))
    return running


def _compiled(
    draw: Callable[[int], Program], number: int, host: jax.Device | None, tell: Tell
) -> _Pair | None:
    family = ""
    try:
        with jax.default_device(host):
            program = draw(number)
        family = program.family
        compiled = ready(program)
        _ = compiled.records, compiled.text  # read here, while other programs compile
    except Exception as error:
        tell(_line(number, family, "did not compile", error))
        return None
    return program, compiled


def _line(number: int, family: str, what: str, error: BaseException) -> str:
    said = str(error).strip().splitlines() or [""]
    of = f" ({family})" if family else ""
    return f"program {number}{of} {what}: {type(error).__name__}: {said[0][:300]}"


# ---- turns on one GPU
#
# Several processes use one GPU in turn, so that only one of them runs kernels at a time.
#
# A process holds an exclusive lock on a file while it has its turn. The operating system releases
# the lock when the process ends, even in a crash. The file contains the process that holds the lock
# and the time since when it does, so that another process can end a holder that hangs.


class Turns:
    """Turns of processes at a resource, such as a GPU, that a lock on a file stands for."""

    def __init__(self, path: Path):
        """Names the file; it is made on the first turn."""
        self.path = path

    @contextlib.contextmanager
    def take(self) -> Iterator[float]:
        """Waits until no other process has a turn, then takes one. Yields the seconds waited."""
        began = time.monotonic()
        with open(self.path, "a") as file:
            files.lock(file.fileno(), wait_s=None)
            now = time.monotonic()
            file.truncate(0)
            file.write(f"{os.getpid()} {now}\n")
            file.flush()
            try:
                yield now - began
            finally:
                file.truncate(0)

    def seconds_of(self, process: int) -> float:
        """Returns for how long a living process has had its turn; 0.0: it has none."""
        words = self.path.read_text().split() if self.path.exists() else []
        if len(words) != 2 or words[0] != str(process):
            return 0.0
        return time.monotonic() - float(words[1])


def share(process: int, processes: int, programs: int, families: int) -> list[int]:
    """Returns the numbers of the programs, from 0 to `programs` - 1, that one process is to time.

    Each number belongs to one process, and each process has one of every `processes` consecutive
    numbers. Families take turns over the numbers, so with a fixed choice a process could get the
    same few families again and again. The choice moves on by one before they would repeat, so that
    each process gets programs of every family.
    """
    period = math.lcm(processes, families)
    rounds = range(-(-programs // processes))
    numbers = [i * processes + (process + i * processes // period) % processes for i in rounds]
    return [number for number in numbers if number < programs]


# ---- batches
#
# From the numbers of programs to a file of labels: compile, then time, then save.


@dataclasses.dataclass(frozen=True)
class Batch:
    """Programs to time, and how.

    name: the number of their file, that of programs up to the last of these. threads: programs that
    compile at a time. end: as `prepared` has it. turns: the lock of a GPU that other processes may
    use. host: the device that draws the arrays then. facts: more of them for the labels.
    """

    numbers: Sequence[int]
    folder: Path
    card: DeviceCard
    passes: int
    name: int
    threads: int = 1
    end: float = float("inf")
    turns: Turns | None = None
    host: jax.Device | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def time(self, draw: Callable[[int], Program]) -> dict[str, Any]:
        """Times the programs and writes their file; returns what to print.

        Raises: UserError as `measure_ready` does, except on a GPU.
        """
        tell = functools.partial(print, flush=True)
        began = time.monotonic()
        programs, tried = prepared(
            draw, self.numbers, threads=self.threads, end=self.end, host=self.host, tell=tell
        )
        compiled = time.monotonic()
        timed: list[Timed] = []
        with self.turns.take() if self.turns else contextlib.nullcontext(0.0) as waited:
            try:
                programs = runnable(programs, tell, device=jax.devices()[0] if self.host else None)
                timed = measure_ready(programs, self.passes)
            except Exception as error:  # out of memory, with other programs' arrays in it
                if isinstance(error, UserError) and self.turns is None:
                    raise
                what = f"{type(error).__name__}: {str(error)[:300]}"
                tell(f"the batch of programs {list(self.numbers)} failed: {what}")
        lost: dict[str, list[str]] = {}  # by kind: instructions that the profiler did not time
        for (_, compiled_program), one in zip(programs, timed, strict=False):
            names = {record.name for record in one.records}
            for record in compiled_program.records:
                if record.name not in names:
                    lost.setdefault(record.kind, []).append(record.name)
        if lost:
            each = (f"{len(names)} {kind} ({names[0]})" for kind, names in lost.items())
            tell(f"without a time: {', '.join(each)}")
        facts = results.facts(self.card.name, "measured")
        facts |= {"passes": self.passes, **self.facts}
        labels = Labels.of(timed, self.card, facts)
        if len(labels.halves):
            labels.save(self.folder / "new.npz")  # in two steps, and the process may be ended
            name = self.name - len(self.numbers) + tried
            (self.folder / "new.npz").replace(self.folder / f"{name:06}.npz")
        return {
            "tried": tried,
            "rows": len(labels.halves),
            "untimed": sum(one.untimed for one in timed),
            "noise": 100 * labels.noise["noise_median"] if len(labels.halves) else float("nan"),
            "compiling": compiled - began,
            "waiting": waited,
            "timing": time.monotonic() - compiled - waited,
        }
