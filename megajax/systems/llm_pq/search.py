"""The state that all solvers of LLM-PQ share: the clock, the best placement so far, the bounds.

A pair is (micro-batch size of prefill, micro-batch size of decoding); each pair has an integer
program of its own. The bound of a pair is a time that no placement of the pair is below. The gap is
that of the smallest bound.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megajax.core.errors import UserError
from megajax.systems.llm_pq.arrange import arrange
from megajax.systems.llm_pq.milp import Counts, Found, Layers
from megajax.systems.llm_pq.problem import (
    SLACK,
    Placement,
    Problem,
    Stage,
    omega_of,
    timed,
    violations,
)

Pair = tuple[int, int]
CLOSE = 1e-7  # (chosen) a relative difference of times that is none
PROVEN = 1e-6  # (HiGHS: tolerance of a row) a gap that its bounds cannot tell from none
POLL_S = 0.2  # (chosen) how often the thread that Ctrl-C reaches looks


@dataclass
class Search:
    """The state of one search. hints: stages from counts whose widths lost too much quality."""

    problem: Problem
    quality: float | None
    deadline: float
    bounds: dict[Pair, float] = field(default_factory=dict)
    best: tuple[list[Stage], list[int], Pair] | None = None
    seconds: float = np.inf
    hints: dict[tuple[Pair, tuple[Stage, ...]], None] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def gap(self) -> float:
        """The fraction by which a better placement may be shorter, at most."""
        bound = max(min(min(self.bounds.values(), default=0.0), self.seconds), 0.0)
        gap = float(1 - bound / self.seconds) if self.seconds else 0.0
        return 0.0 if gap < PROVEN else gap

    def open(self, pair: Pair) -> bool:
        """Returns whether a pair may hold something better than the best."""
        return self.bounds[pair] < self.seconds * (1 - CLOSE)

    def raise_bound(self, pair: Pair, bound: float) -> None:
        """Notes that no placement of a pair is below the bound, in seconds."""
        self.bounds[pair] = max(self.bounds[pair], bound)

    def offer(self, stages: list[Stage], bits: list[int], pair: Pair) -> bool:
        """Takes a placement if it is the best. Returns whether it is legal."""
        if violations(self.problem, stages, bits, self.quality):
            return False
        seconds = timed(self.problem, stages, bits, *pair).seconds
        if seconds < self.seconds:
            self.best, self.seconds = (stages, bits, pair), seconds
        return True

    def offer_counts(self, counts_DB: np.ndarray, pair: Pair) -> float | None:
        """Takes the best arrangement of counts.

        Returns by how much its sum of omega exceeds the quality (0 or less: it is legal), or None
        when the memory keeps it from every order.
        """
        found = arrange(self.problem, counts_DB, self.deadline)
        if found is None:
            return None
        if self.offer(*found, pair) or self.quality is None:
            return 0.0
        self.hints[pair, tuple(found[0])] = None  # its stages, with narrower layers, may do
        return omega_of(self.problem, found[1]) - self.quality

    def linear_bounds(self, known_s: float) -> None:
        """Bounds every pair by its linear program: milliseconds each.

        Args: known_s: seconds of some placement. No bound is above it, unless it is infinite: then
          a bound is infinite where nothing fits.
        """
        for pair in self.bounds:
            if self.left <= 0:
                return  # a bound of 0 says nothing
            program = Counts(self.problem, pair, self.quality, known_s=known_s)
            seconds = min(10.0, self.left)
            found = attended(lambda p=program, s=seconds: p.solve(s, whole=False))
            self.bounds[pair] = min(found.value, known_s) if found.closed else 0.0

    def result(self, status: str) -> Placement:
        """Returns the best placement. Must have one."""
        assert self.best is not None
        stages, bits, (prefill, decode) = self.best
        times = timed(self.problem, stages, bits, prefill, decode)
        return Placement(
            tuple(stages), tuple(bits), prefill, decode, times.tokens_per_s, self.gap,
            times.prefill_s, times.decode_s, omega_of(self.problem, bits), status,
        )  # fmt: skip


def attended(work: Callable[[], Found]) -> Found:
    """Runs HiGHS in a thread of its own, because Ctrl-C waits until C++ code returns.

    What HiGHS prints goes to stderr.
    Raises: KeyboardInterrupt; the thread then ends with its time limit or with the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[Found] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    with _stdout_to_stderr():
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
    if errors:
        raise errors[0]
    return results[0]


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Moves what C code prints: HiGHS has a line ("tmpSolver.run();") that no option turns off."""
    flush = ctypes.CDLL(None).fflush  # C has a buffer beside Python's
    sys.stdout.flush()
    flush(None)
    try:
        kept = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def least_omega(problem: Problem, seconds: float = 10.0) -> tuple[np.ndarray | None, bool]:
    """Returns (counts (D, B) that lose the least quality within the memory ("adabits"), whether
    that is proven).

    None, proven: the memory holds the model at no widths.
    """
    program = Counts(problem, (0, 0), None, goal="omega")
    program.order_twins()
    found = attended(lambda: program.solve(seconds))
    return None if found.x is None else program.counts(found.x), found.closed


def spelled(amount: float) -> str:
    """Returns a number of bytes; fractions are those of a problem in other units."""
    return f"{amount:.0f}" if amount >= 1000 or amount == round(amount) else f"{amount:.4g}"


def at_least(value: float) -> str:
    """Returns a number in few digits that do not say less: a bound that can be given as it is."""
    short = f"{value:g}"
    return short if float(short) >= value else repr(value)


def _missing(problem: Problem, quality: float | None, seconds: float) -> tuple[float, bool]:
    """Returns (bytes that the devices lack, or a lower bound, whether the number is exact)."""
    programs: list[Counts | Layers] = [Counts(problem, (0, 0), quality, goal="memory")]
    if quality is not None and np.ptp(problem.omega, axis=0).any():  # where a layer stands counts
        programs.append(Layers(problem, (0, 0), quality, goal="memory"))
    least, is_exact = 0.0, False
    for program in programs:
        found = attended(lambda p=program: p.solve(seconds))
        is_exact = found.closed
        if not is_exact:
            least = max(least, found.bound)
        elif found.x is not None:
            least = max(least, program.missing(found.x))
    return least, is_exact


def explain(problem: Problem, quality: float | None, seconds: float = 20.0) -> UserError | None:
    """Returns the error of a problem without a placement, which names what is missing, or None.

    Where layers are unlike and the quality is bounded, the program over single layers decides; in
    the seconds that it has, it may find a lower bound only, which the message then says.
    """
    best = problem.omega.min(1).sum()
    if quality is not None and best > quality * (1 + SLACK):
        return UserError(
            f"quality={quality:g} is below the least sum of omega of any widths; nearest: "
            f"{at_least(float(best))}"
        )
    missing, is_exact = _missing(problem, quality, seconds)
    if missing <= SLACK * problem.memory.max():
        return None
    size, low = min(zip(problem.layer_bytes.tolist(), problem.bits, strict=True))
    terms = {
        f"weights at {low} bits": size * problem.layers,
        "cache": problem.cache_bytes * problem.layers,
        "first stage": problem.first_bytes,
        "last stage": problem.last_bytes,
    }
    listed = ", ".join(f"{name} {spelled(value)}" for name, value in terms.items())
    total, room = sum(terms.values()), problem.memory.sum()
    largest = max(terms, key=terms.__getitem__)
    wanted, least = "", "At the least it takes"
    if quality is not None:
        wanted = f" with a sum of omega of at most {quality:g}"
        least = "With any sum of omega it takes at least"
    return UserError(
        f"the memory of the {problem.devices} devices cannot hold the model{wanted}: "
        f"{'' if is_exact else 'at least '}{spelled(missing)} bytes are missing. "
        f"{least} {spelled(total)} bytes "
        f"({listed}); the devices have {spelled(room)}, and a layer cannot be cut. The largest "
        f"term: {largest}"
    )
