"""Reads from a profile how long each execution of a compiled module's instructions took.

A CPU with several processors works on many instructions in the background, and on a sort with one
processor too. The profiler's event of such an instruction ends when the work was handed out: an
event of 7 us stood for a convolution of 950 us. A second event, 'end: NAME', tells when the work
was done. It may come late, because the thread that completes an instruction starts the next one
first. An instruction is thus done at its 'end', or when an instruction begins that reads its
result, perhaps in a loop's next turn, whichever is earlier. An execution in the background does not
count if other instructions ran meanwhile for more than a tenth of its time: it shared the
processors with them.
"""

import bisect
import collections
import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.core.errors import UserError
from megajax.systems.cdmpp.reads import Reads

# Lines of a GPU's plane that sum up the kernels of its streams, where a tool has derived them.
_SUMS = frozenset((
    "Steps", "XLA Modules", "XLA Ops", "Async XLA Ops", "Framework Ops", "Framework Name Scope",
    "Source code", "Launch Stats",
))  # fmt: skip
_END = "end: "
# (chosen) Share of an execution in the background that others may take, and how many executions
# that began before it may still run.
_SHARED, _NEAR = 0.1, 32


@dataclasses.dataclass(frozen=True)
class _Span:
    """An event of an instruction, in nanoseconds. number: of its 'end' event, if it has one."""

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
    found: dict[str, dict[str, list[_Span]]] = collections.defaultdict(
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
                found[str(stats["hlo_module"])][str(stats["hlo_op"])].append(span)
    of = texts or {}
    return {module: _seconds(spans, ends, of.get(module, "")) for module, spans in found.items()}


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

    That can be if it was in the background. began, ended: of all executions, in order.
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
