"""Times each launched instruction of compiled programs, from the profiler's events.

A machine's speed drifts, so programs run in turn, one pass over all of them after the other; the
passes of a program are thus far apart in time. Every second pass belongs to the other half. The
time of an instruction in a pass is the median over its executions. Its label is the least time over
all passes, and the noise of the label is the difference of the two halves' least times.
"""

import copy
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from megajax.core.errors import UserError
from megajax.cost.hlo import Module, parse
from megajax.cost.program import records
from megajax.cost.record import OpRecord
from megajax.systems.cdmpp.events import read, tracing
from megajax.systems.cdmpp.families import Program

HALVES = 2
# (chosen) A CPU is shared, also with other virtual machines: with one thread, the least times of 6
# passes differ by 7.5 % (mean) between two halves, those of the same rows in 48 passes by 3.6 %.
# Compiling takes longer than all of them.
CPU_PASSES, GPU_PASSES = 48, 6
NOISY = 0.1  # rows whose halves differ by more are marked (chosen)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A program with the times of its launched instructions.

    records: those that the profiler timed; on a CPU with the executions that it saw, if loops have
    trip counts that depend on values. halves: (records, HALVES) seconds of one execution. wall:
    (HALVES,) seconds of a whole call. untimed: number of records without an event.
    """

    program: Program
    records: list[OpRecord]
    halves: np.ndarray
    wall: np.ndarray
    untimed: int


def check_passes(passes: int) -> None:
    """Raises UserError unless each half has three passes or more, and both equally many."""
    if passes < 3 * HALVES or passes % HALVES:
        raise UserError(f"passes={passes} must be even and at least {3 * HALVES} (--passes)")


def usual_passes() -> int:
    """Returns how many passes make labels of this process's device agree."""
    return CPU_PASSES if _is_cpu() else GPU_PASSES


@dataclasses.dataclass(frozen=True)
class Ready:
    """A compiled program. module: its name, unlike any other's. call: runs it once, until done."""

    compiled: jax.stages.Compiled
    module: str
    call: Callable[[], Any]

    @functools.cached_property
    def text(self) -> str:
        """The compiled module."""
        return self.compiled.as_text() or ""

    @functools.cached_property
    def records(self) -> list[OpRecord]:
        """What the program launches, as far as it may have an event of its own."""
        inside = _in_small_calls(self.text)
        return [record for record in records(self.compiled) if record.name not in inside]

    def on(self, args: tuple) -> "Ready":
        """Returns the same program with other arrays, and with what was read of it."""
        found = copy.copy(self)
        call = functools.partial(_call, self.compiled, args)
        object.__setattr__(found, "call", call)  # dataclasses.replace would read it all again
        return found


def ready(program: Program) -> Ready:
    """Compiles a program."""
    compiled = compile_program(program)
    return Ready(compiled, _module(program), functools.partial(_call, compiled, program.args))


def _call(compiled: jax.stages.Compiled, args: tuple) -> Any:
    return jax.block_until_ready(compiled(*args))


def measure(programs: Sequence[Program], passes: int = 6) -> list[Timed]:
    """Compiles the programs and times them in turn.

    Args: passes: over all programs, as `check_passes` wants it.
    Raises: UserError on a wrong number of passes, and where the profiler names no instruction.
    """
    check_passes(passes)
    return measure_ready([(program, ready(program)) for program in programs], passes)


def measure_ready(programs: Sequence[tuple[Program, Ready]], passes: int = 6) -> list[Timed]:
    """Times compiled programs in turn. Raises: UserError, as `measure` does."""
    found = instructions([compiled for _, compiled in programs], passes)
    return [Timed(program, *parts) for (program, _), parts in zip(programs, found, strict=True)]


def instructions(
    programs: Sequence[Ready], passes: int = 6
) -> list[tuple[list[OpRecord], np.ndarray, np.ndarray, int]]:
    """Returns (records, halves, wall, untimed) of each program, as `Timed` has them."""
    check_passes(passes)
    for program in programs:
        program.call()
    walls = np.zeros((passes, len(programs)))
    with tempfile.TemporaryDirectory() as folder:
        with tracing(folder):
            for turn in range(passes):
                walls[turn] = calls(programs, 1)[0][0]
        events = read(folder, {program.module: program.text for program in programs})
    if programs and not any(events.get(program.module) for program in programs):
        raise UserError(
            "the profiler named no instruction; on a GPU, command buffers hide them: set "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    out = []
    for place, program in enumerate(programs):
        named, found = events.get(program.module, {}), program.records
        is_open = has_open_loops(program.text)
        if _is_cpu() and is_open:
            each = [_counted(r, named.get(r.name, ()), passes) for r in found]
        else:
            each = [(r, _of_record(r, named.get(r.name, ()), passes, is_open)) for r in found]
        pairs = [(r, _halves(times)) for r, times in each if times is not None]
        pairs = [(r, least) for r, least in pairs if np.isfinite(least).all()]
        halves = np.array([least for _, least in pairs]).reshape(-1, HALVES)
        kept = [r for r, _ in pairs]
        out.append((kept, halves, _halves(walls[:, place]), len(found) - len(kept)))
    return out


def calls(programs: Sequence[Ready], passes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (passes, programs) seconds of a call, and of processors in it; programs take turns.

    Where this process has one processor, the seconds of a call are more than the processor's by
    what other processes took of it.
    """
    walls, busy = np.zeros((2, passes, len(programs)))
    for turn in range(passes):
        for place, program in enumerate(programs):
            began, worked = time.perf_counter(), time.process_time()
            program.call()
            walls[turn, place] = time.perf_counter() - began
            busy[turn, place] = time.process_time() - worked
    return walls, busy


def _of_record(
    record: OpRecord, events: Sequence[float], passes: int, is_open: bool
) -> np.ndarray | None:
    """Returns an instruction's seconds in each pass, from events that are kernels or executions.

    An execution may launch several kernels on a GPU, which follow each other. On a CPU a sort first
    copies its operands, with an event for each copy.
    """
    is_sum = not _is_cpu() or record.kind == "sort"
    return _by_pass(events, passes, record.executions, is_sum=is_sum, is_open=is_open)


def _by_pass(
    events: Sequence[float],
    passes: int,
    executions: float,
    *,
    is_sum: bool = False,
    is_open: bool = False,
) -> np.ndarray | None:
    """Returns an instruction's seconds in each pass; None where its events do not add up.

    is_sum: several events for an execution are its parts, which are added. is_open: the program has
    a loop that turns as often as values say; there, several events for an execution may be several
    turns, so they do not add up.
    """
    if not events or len(events) % passes:
        return None
    of_pass = np.array(events).reshape(passes, -1)
    runs = round(executions)
    if is_open and of_pass.shape[1] != runs:
        return None
    if of_pass.shape[1] > runs > 0 and of_pass.shape[1] % runs == 0 and is_sum:
        of_pass = of_pass.reshape(passes, runs, -1).sum(2)
    return np.median(of_pass, 1)


def has_open_loops(text: str) -> bool:
    """Whether a compiled module has a loop that turns as often as values say."""
    loops = (line for line in text.splitlines() if " while(" in line)
    return any("known_trip_count" not in line for line in loops)


def _counted(
    record: OpRecord, events: Sequence[float], passes: int
) -> tuple[OpRecord, np.ndarray | None]:
    """Returns a record of a program with open loops with the executions that were seen, and its
    seconds in each pass; passes may have differed."""
    if len(events) < passes or record.kind == "sort":  # whose copies have events as well
        return record, None
    times = np.array([np.median(part) for part in np.array_split(events, passes)])
    return dataclasses.replace(record, executions=len(events) / passes), times


def _is_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _halves(times: np.ndarray) -> np.ndarray:
    """Returns the least time of the passes of each half, which take turns."""
    return np.array([times[half::HALVES].min() for half in range(HALVES)])


def _in_small_calls(text: str) -> set[str]:
    """Returns the names of what XLA has compiled for a CPU into one function, with their loop.

    The profiler has one event for the whole loop, which is not divided among them.
    """
    if "xla_cpu_small_call" not in text:
        return set()
    module = Module(text)
    lines = (place.line for place in module.places() if "xla_cpu_small_call" in place.line)
    starts = [name for line in lines if (one := parse(line)) is not None for name in one.called]
    inside = (parse(place.line) for start in starts for place in module.places(start))
    return {one.name for one in inside if one is not None}


def _module(program: Program) -> str:
    return f"jit_program{program.number}"


def compile_program(program: Program) -> jax.stages.Compiled:
    """Returns the compiled program, whose module has the program's number in its name."""

    def call(*args):
        return program.function(*args)

    call.__name__ = _module(program).removeprefix("jit_")
    return jax.jit(call).lower(*program.args).compile()
