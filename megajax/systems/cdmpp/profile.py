"""Times each launched instruction of compiled programs, from the profiler's events.

A machine's speed drifts, so programs run in turn, one pass over all of them after the other; the
passes of a program are thus far apart in time. Every second pass belongs to the other half. The
time of an instruction in a pass is the median over its executions. Its label is the least time over
all passes, and the noise of the label is the difference of the two halves' least times. A CPU's
card (its peaks) is measured by such times too.
"""

import bisect
import collections
import contextlib
import copy
import dataclasses
import functools
import math
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, DeviceCard
from megajax.cost.hlo import Module, parse
from megajax.cost.program import records
from megajax.cost.program_work import FREE
from megajax.cost.record import OpRecord
from megajax.systems.cdmpp.families import Program

# ---- readers of a result
#
# `Reads` says which instructions of a compiled module read the result of which, through tuples and
# loops. An iteration of a loop reads what the iteration before it stored in the loop's tuple: an
# instruction at the end of a body has its readers at the body's beginning, and after the loop.


# Their events last as long as those of the instructions inside.
CONTAINERS = frozenset(("while", "call", "conditional"))


class Reads:
    """The readers of each instruction of a module, and the instructions that contain others.

    readers: {instruction: those that read its result}. containers: names of `CONTAINERS`.
    """

    def __init__(self, text: str):
        """Reads `compiled.as_text()`; names are unique in a module."""
        module = Module(text)
        of = {name: module.instructions(name) for name in module.computations}
        self._all = {one.name: one for each in of.values() for one in each.values()}
        self._roots = {
            name: [one for one in each.values() if one.is_root] for name, each in of.items()
        }
        loops = [one for one in self._all.values() if one.opcode == "while"]
        # {parameter of a body or condition: its loop}
        self._loops = {
            one.name: loop
            for loop in loops
            for inside in (loop.get("body"), loop.get("condition"))
            for one in of.get(inside, {}).values()
            if one.opcode == "parameter"
        }
        self.containers = {one.name for one in self._all.values() if one.opcode in CONTAINERS}
        self.readers: dict[str, set[str]] = collections.defaultdict(set)
        for one in self._all.values():
            if one.opcode not in FREE:  # nothing runs for these
                for operand in one.operands:
                    for source in self._sources(operand, None, set()):
                        self.readers[source].add(one.name)

    def _sources(self, name: str, index: int | None, seen: set) -> set[str]:
        """Returns what computed a value: a part of it, if it is a tuple and `index` is a number."""
        one = self._all.get(name)
        if one is None or (name, index) in seen:
            return set()
        seen.add((name, index))
        if one.opcode == "get-tuple-element" and one.operands:
            return self._sources(one.operands[0], int(one.get("index", "0")), seen)
        if one.opcode == "tuple" and index is not None:
            return self._sources(one.operands[index], None, seen)
        loop = self._loops.get(name, one if one.opcode == "while" else None)
        if loop is not None and index is not None:
            # What the last turn left, and what was there before the first.
            left = [root.name for root in self._roots.get(loop.get("body"), ())]
            return set().union(
                *(self._sources(each, index, seen) for each in (*left, *loop.operands))
            )
        if one.opcode in FREE:
            return set().union(*(self._sources(each, None, seen) for each in one.operands))
        return {name}


# ---- events
#
# `read` takes from a profile how long each execution of a compiled module's instructions took.
#
# A CPU with several processors works on many instructions in the background, and on a sort with one
# processor too. The profiler's event of such an instruction ends when the work was handed out: an
# event of 7 us stood for a convolution of 950 us. A second event, 'end: NAME', tells when the work
# was done. It may come late, because the thread that completes an instruction starts the next one
# first. An instruction is thus done at its 'end', or when an instruction begins that reads its
# result, perhaps in a loop's next iteration, whichever is earlier. An execution in the background
# does not count if other instructions ran meanwhile for more than a tenth of its time: it shared
# the processors with them.


# Lines of a GPU's plane that sum up the kernels of its streams, where a tool has derived them.
_SUMS = frozenset(
    (
        "Steps",
        "XLA Modules",
        "XLA Ops",
        "Async XLA Ops",
        "Framework Ops",
        "Framework Name Scope",
        "Source code",
        "Launch Stats",
    )
)
_END = "end: "
# (chosen) Share of an execution in the background that others may take, and how many executions
# that began before it may still run.
_SHARED, _NEAR = 0.1, 32


@dataclasses.dataclass(frozen=True)
class _Span:
    """An event of an instruction, in nanoseconds. number: the number of its 'end' event, if it has
    one."""

    begin: float
    duration: float
    number: tuple[int, int] | None


@contextlib.contextmanager
def tracing(folder: str) -> Iterator[None]:
    """Records what runs, without the calls of Python functions, which would take part of it."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def read(folder: str, texts: Mapping[str, str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Returns {module: {instruction: seconds of its executions, in order}} of a trace's folder.

    Events carry the instruction in 'hlo_op'. Where a GPU ran, only what its streams ran counts: the
    host's launch of a kernel may name the instruction too.

    An execution that does not count, or was not done when the trace ended, has infinite seconds.

    Args: texts: {module: compiled text}, of modules that ran on a CPU.
    """
    of_module: dict[str, dict[str, list[_Span]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    ends: dict[tuple[int, int], float] = {}
    for path in sorted(Path(folder).rglob("*.xplane.pb")):
        for event, stats in _events(path):
            if event.name.startswith(_END) and "_c" in stats:
                ends[stats.get("_ct", 0), stats["_c"]] = event.start_ns
            elif "hlo_op" in stats and "hlo_module" in stats:
                number = (stats.get("_pt", 0), stats["_p"]) if "_p" in stats else None
                span = _Span(event.start_ns, event.duration_ns, number)
                of_module[str(stats["hlo_module"])][str(stats["hlo_op"])].append(span)
    of = texts or {}
    return {m: _seconds(spans, ends, of.get(m, "")) for m, spans in of_module.items()}


def _seconds(
    spans: Mapping[str, list[_Span]], ends: Mapping[tuple[int, int], float], text: str
) -> dict[str, list[float]]:
    ordered = {name: sorted(each, key=lambda span: span.begin) for name, each in spans.items()}
    begins = {name: [span.begin for span in each] for name, each in ordered.items()}
    reads = Reads(text if ends else "")
    done: dict[str, list[float]] = {}
    for name, each in ordered.items():
        then = [begins[reader] for reader in reads.readers.get(name, ()) if reader in begins]
        done[name] = [_done(span, ends, then) for span in each]
    working = done.keys() - reads.containers
    both = sorted(pair for name in working for pair in zip(begins[name], done[name], strict=True))
    began, ended = np.array(both).reshape(-1, 2).T
    return {
        name: [1e-9 * _alone(*pair, began, ended) for pair in zip(each, done[name], strict=True)]
        for name, each in ordered.items()
    }


def _done(span: _Span, ends: Mapping[tuple[int, int], float], then: Sequence[list[float]]) -> float:
    """Returns when an execution was done; infinity if that was after the trace's end.

    then: when each reader of the result began, in order.
    """
    handed_out = span.begin + span.duration
    if not ends or span.number is None:
        return handed_out
    end = ends.get(span.number, math.inf)
    if end <= handed_out:
        return handed_out
    places = ((begins, bisect.bisect_right(begins, span.begin)) for begins in then)
    next_ones = [begins[place] for begins, place in places if place < len(begins)]
    return max(min([end, *next_ones]), handed_out)


def _alone(span: _Span, done: float, began: np.ndarray, ended: np.ndarray) -> float:
    """Returns the nanoseconds of an execution; infinity if others took much of its time.

    That can be if it was in the background. began, ended: when each of all executions began and
    ended, in order.
    """
    if done <= span.begin + span.duration or math.isinf(done):
        return done - span.begin
    near = slice(max(np.searchsorted(began, span.begin) - _NEAR, 0), np.searchsorted(began, done))
    shared = np.minimum(ended[near], done) - np.maximum(began[near], span.begin)
    taken = np.maximum(shared, 0).sum() - (done - span.begin)  # it is one of them
    return done - span.begin if taken <= _SHARED * (done - span.begin) else math.inf


def _events(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    with warnings.catch_warnings():  # jax 0.11.2: the type of stats warns when it is first made
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        try:
            planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        except RuntimeError as error:
            raise UserError(f"{path} is no profile of XLA: {str(error):.200}") from None
        gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
        for plane in gpus or planes:
            for line in plane.lines:
                if not (gpus and line.name in _SUMS):
                    for event in line.events:
                        yield event, dict(event.stats)


# ---- passes over programs


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
        moved = copy.copy(self)
        call = functools.partial(_call, self.compiled, args)
        object.__setattr__(moved, "call", call)  # dataclasses.replace would read it all again
        return moved


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
    timed = instructions([compiled for _, compiled in programs], passes)
    return [Timed(program, *parts) for (program, _), parts in zip(programs, timed, strict=True)]


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
            for number in range(passes):
                walls[number] = calls(programs, 1)[0][0]
        events = read(folder, {program.module: program.text for program in programs})
    if programs and not any(events.get(program.module) for program in programs):
        raise UserError(
            "the profiler named no instruction; on a GPU, command buffers hide them: set "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    out = []
    for place, program in enumerate(programs):
        named, launched = events.get(program.module, {}), program.records
        is_open = has_open_loops(program.text)
        if _is_cpu() and is_open:
            each = [_counted(r, named.get(r.name, ()), passes) for r in launched]
        else:
            each = [
                (r, by_pass(r, named.get(r.name, ()), passes, is_open=is_open)) for r in launched
            ]
        pairs = [(r, halves_of(times)) for r, times in each if times is not None]
        pairs = [(r, least) for r, least in pairs if np.isfinite(least).all()]
        halves = np.array([least for _, least in pairs]).reshape(-1, HALVES)
        recorded = [r for r, _ in pairs]
        out.append((recorded, halves, halves_of(walls[:, place]), len(launched) - len(recorded)))
    return out


def calls(programs: Sequence[Ready], passes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (passes, programs) seconds of a call, and of processors in it; programs take turns.

    Where this process has one processor, the seconds of a call are more than the processor's by
    what other processes took of it.
    """
    walls, busy = np.zeros((2, passes, len(programs)))
    for number in range(passes):
        for place, program in enumerate(programs):
            began, worked = time.perf_counter(), time.process_time()
            program.call()
            walls[number, place] = time.perf_counter() - began
            busy[number, place] = time.process_time() - worked
    return walls, busy


def by_pass(
    record: OpRecord, events: Sequence[float], passes: int, *, is_open: bool = False
) -> np.ndarray | None:
    """Returns an instruction's seconds in each pass; None where its events do not add up.

    An execution may launch several kernels on a GPU, which follow each other. On a CPU a sort first
    copies its operands, with an event for each copy. The seconds of such events are added.
    Args: events: seconds of kernels or executions. is_open: the program has a loop that turns as
      often as values say; there, several events for an execution may be several turns, so they do
      not add up.
    """
    if not events or len(events) % passes:
        return None
    of_pass = np.array(events).reshape(passes, -1)
    runs = round(record.executions)
    if is_open and of_pass.shape[1] != runs:
        return None
    has_parts = not _is_cpu() or record.kind == "sort"
    if of_pass.shape[1] > runs > 0 and of_pass.shape[1] % runs == 0 and has_parts:
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


def halves_of(times: np.ndarray) -> np.ndarray:
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


# ---- card of this machine
#
# `card` returns the card of this machine's device: its peak FLOP/s, bandwidth and other limits.
#
# The card of a GPU has the numbers of its datasheet (core/hardware.py). The card of a CPU is
# measured, because the memory bandwidth of a datasheet does not bound a program whose small arrays
# are in a cache. A few simple programs are timed, and the card gets the largest rates that any of
# them reached. An operation whose arrays are in the nearest cache is then not faster than the
# roofline.


_CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def card(threads: int) -> DeviceCard:
    """Returns the card of jax's first device. threads: CPU threads that this process may use.

    Raises: UserError on a GPU that no card describes.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _cpu_card(threads)
    kind = device.device_kind
    for name, known in CARDS.items():
        if re.search(rf"\b{re.escape(name)}\b", kind.upper()):
            return known
    raise UserError(f"device {kind} has no card; there are {', '.join(CARDS)}")


def _cpu_card(threads: int) -> DeviceCard:
    timed = measure(list(_simple_programs()), passes=6)
    rates = [
        (record.flops / seconds, record.nbytes / seconds)
        for one in timed
        for record, seconds in zip(one.records, one.halves.min(1), strict=True)
    ]
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    clocks = [float(mhz) for mhz in re.findall(r"cpu MHz\s*: ([\d.]+)", info)]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [path.read_text().strip() for path in sorted(_CPU.glob("index*/size"))]
    caches = [int(s[:-1]) * units[s[-1]] for s in sizes if s and s[-1] in units]
    return DeviceCard(
        name=f"{model[1].strip() if model else platform.processor() or 'CPU'}, {threads} threads",
        flops={"float32": max(flops for flops, _ in rates)},
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_bytes_per_s=max(nbytes for _, nbytes in rates),
        link_bytes_per_s=0.0,
        network_bytes_per_s=0.0,
        sms=threads,
        l2_bytes=max(caches, default=0.0),  # of the last cache; 0 where the system does not say
        clock_hz=max(clocks, default=0.0) * 1e6,
    )


def _simple_programs() -> Iterator[Program]:
    """Yields products and additions of arrays from a cache's size to many times it."""
    for number, size in enumerate((256, 512, 768, 1024)):
        square = jnp.ones((size, size), jnp.float32)
        yield Program(10**9 + number, "card", jnp.matmul, (square, square))
    for number, kib in enumerate((16, 64, 256, 1024, 4096, 32768)):
        array = jnp.ones(kib * 256, jnp.float32)
        yield Program(10**9 + 100 + number, "card", lambda x, y: x + y, (array, array))
