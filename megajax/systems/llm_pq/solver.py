"""The planner: the fastest placement within memory and quality, with a bound on what is left.

'exact': pairs of micro-batch sizes are solved in the order of their linear bounds. For each pair,
an integer program over counts (layers of each width on each device) gives a lower bound of the
time, and the best arrangement of its counts gives a placement. If the placement does not reach the
bound, because layers differ in quality, an integer program over single layers decides. Pairs whose
bound is not below the best placement are skipped. 'counts': the same without the program over
layers; it is exact if all layers lose the same quality. 'transfer': the paper's heuristic, with the
gap to the linear bounds.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.search.program import Solution
from megajax.systems.llm_pq.milp import Counts, Layers
from megajax.systems.llm_pq.problem import (
    SLACK,
    Placement,
    Problem,
    Stage,
    arrange,
    omega_of,
    simple,
    timed,
    violations,
    widths,
)

# ---- state of a search
#
# The state that all solvers share: the clock, the best placement so far, the bounds.
#
# A pair is (micro-batch size of prefill, micro-batch size of decoding); each pair has an integer
# program (milp.py). The bound of a pair is a time that no placement of the pair is below. The gap
# is that of the smallest bound.


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
        plan = arrange(self.problem, counts_DB, self.deadline)
        if plan is None:
            return None
        if self.offer(*plan, pair) or self.quality is None:
            return 0.0
        self.hints[pair, tuple(plan[0])] = None  # its stages, with narrower layers, may do
        return omega_of(self.problem, plan[1]) - self.quality

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
            solution = attended(lambda p=program, s=seconds: p.solve(s, integer=False))
            self.bounds[pair] = min(solution.value, known_s) if solution.closed else 0.0

    def result(self, status: str) -> Placement:
        """Returns the best placement. Must have one."""
        assert self.best is not None
        stages, bits, (prefill, decode) = self.best
        times = timed(self.problem, stages, bits, prefill, decode)
        return Placement(
            tuple(stages),
            tuple(bits),
            prefill,
            decode,
            times.tokens_per_s,
            self.gap,
            times.prefill_s,
            times.decode_s,
            omega_of(self.problem, bits),
            status,
        )


def attended(work: Callable[[], Solution]) -> Solution:
    """Runs HiGHS in a thread of its own, because Ctrl-C waits until C++ code returns.

    What HiGHS prints goes to stderr.
    Raises: KeyboardInterrupt; the thread then ends with its time limit or with the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[Solution] = []
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
        stdout = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def least_omega(problem: Problem, seconds: float = 10.0) -> tuple[np.ndarray | None, bool]:
    """Returns (counts (D, B) that lose the least quality within the memory ("adabits"), whether
    that is proven).

    None, proven: the memory holds the model at no widths.
    """
    program = Counts(problem, (0, 0), None, goal="omega")
    program.order_twins()
    solution = attended(lambda: program.solve(seconds))
    return None if solution.x is None else program.counts(solution.x), solution.closed


def spelled(amount: float) -> str:
    """Returns a number of bytes; fractions are those of a problem in other units."""
    return f"{amount:.0f}" if amount >= 1000 or amount == round(amount) else f"{amount:.4g}"


def at_least(value: float) -> str:
    """Returns a number in few digits that do not say less: a bound that can be given as it is."""
    short = f"{value:g}"
    return short if float(short) >= value else repr(value)


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
    # The bytes that the devices lack, or a lower bound of them where `is_exact` is false.
    programs: list[Counts | Layers] = [Counts(problem, (0, 0), quality, goal="memory")]
    if quality is not None and np.ptp(problem.omega, axis=0).any():  # where a layer stands counts
        programs.append(Layers(problem, (0, 0), quality, goal="memory"))
    missing, is_exact = 0.0, False
    for program in programs:
        solution = attended(lambda p=program: p.solve(seconds))
        is_exact = solution.closed
        if not is_exact:
            missing = max(missing, solution.bound)
        elif solution.x is not None:
            missing = max(missing, program.missing(solution.x))
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
    condition, least = "", "At the least it takes"
    if quality is not None:
        condition = f" with a sum of omega of at most {quality:g}"
        least = "With any sum of omega it takes at least"
    return UserError(
        f"the memory of the {problem.devices} devices cannot hold the model{condition}: "
        f"{'' if is_exact else 'at least '}{spelled(missing)} bytes are missing. "
        f"{least} {spelled(total)} bytes "
        f"({listed}); the devices have {spelled(room)}, and a layer cannot be cut. The largest "
        f"term: {largest}"
    )


# ---- bitwidth transfer
#
# The heuristic of LLM-PQ, "bitwidth transfer" (arXiv 2403.01136): fast, legal, not optimal.
#
# The heuristic starts from the widths with the least loss of quality ("adabits") and makes one
# change after another. In a change, either the slowest device (the straggler) gives a layer to a
# faster one (a pioneer), which may store another layer in fewer bits to make room; or the straggler
# stores one of its layers in fewer bits while another device uses more, so that the quality holds.
# The change that shortens the run most is made, until none does.
#
# The paper lists the changes that it tries (16 bits of a pioneer against two straggler layers of 8,
# ...). Here all changes with one moved layer and up to one layer of another width are tried.
#
# Legend: D devices, B widths in bits.


TRIED = 3  # (chosen) pairs of micro-batch sizes: those whose start is fastest
STEPS = 400  # (chosen) changes at most


def counts_seconds(problem: Problem, counts_DB: np.ndarray, pair: Pair) -> float:
    """Returns the time of problem.timed, which only the counts decide."""
    prefill, decode = pair
    used = counts_DB.sum(1) > 0
    links = int(used.sum()) - 1

    def spent(table: np.ndarray, hop: float) -> tuple[float, float]:
        each = (counts_DB * table).sum(1)
        return float(each.sum()) + links * hop, max(float(each.max()), hop if links else 0.0)

    total, slowest = spent(problem.prefill_s[prefill], problem.prefill_hop_s[prefill])
    seconds = total + (problem.batches(prefill) - 1) * slowest
    if problem.new_tokens > 1:
        m = problem.batches(decode)
        total, slowest = spent(problem.decode_s[decode], problem.decode_hop_s[decode])
        seconds += (problem.new_tokens - 2) * max(total, m * slowest) + total + (m - 1) * slowest
    return seconds


def transfer(search: Search, counts_DB: np.ndarray) -> None:
    """Improves the counts for the most promising pairs, and offers what it finds."""
    starts = sorted(search.bounds, key=lambda p: counts_seconds(search.problem, counts_DB, p))
    for pair in starts[:TRIED]:
        search.offer_counts(counts_DB, pair)
        climb(search, counts_DB.copy(), pair)


def climb(search: Search, counts_DB: np.ndarray, pair: Pair) -> None:
    """Makes the best change until none is left."""
    problem = search.problem
    now = counts_seconds(problem, counts_DB, pair)
    prefill, decode = pair
    # Seconds that each device works in the complete run, for one layer of each width.
    prefill_DB = problem.prefill_s[prefill] * problem.batches(prefill)
    rounds = max(problem.new_tokens - 1, 0) * problem.batches(decode)
    decode_DB = problem.decode_s[decode] * rounds
    totals: dict[bytes, float] = {}

    def may_keep(counts: np.ndarray) -> bool:
        """Whether the best widths of layers, wherever they stand, keep the quality."""
        if search.quality is None:
            return True
        all_B = counts.sum(0)
        key = all_B.tobytes()
        if key not in totals:
            totals[key] = widths(problem.omega, all_B)[0]
        return totals[key] <= search.quality * (1 + SLACK)

    for _ in range(STEPS):
        if search.left <= 0:
            return
        busy_s_D = (counts_DB * (prefill_DB + decode_DB)).sum(1)
        straggler = int(busy_s_D.argmax())
        better = []
        for change in _changes(counts_DB, straggler):
            seconds = counts_seconds(problem, change, pair)
            if seconds >= now * (1 - CLOSE):
                continue
            need_D = change @ (problem.layer_bytes + problem.cache_bytes)  # without the ends
            if (need_D <= problem.memory * (1 + SLACK)).all():
                better.append((seconds, change))
        for seconds, change in sorted(better, key=lambda item: item[0]):
            if search.left <= 0:
                return
            excess = search.offer_counts(change, pair) if may_keep(change) else 1.0
            if excess is not None and excess <= 0:
                counts_DB, now = change, seconds
                break
        else:
            return


def _changes(counts_DB: np.ndarray, straggler: int) -> Iterator[np.ndarray]:
    """A layer leaves the straggler or changes its width there; then one layer may change too."""
    D, B = counts_DB.shape
    firsts = []
    for b in np.flatnonzero(counts_DB[straggler]):
        for device in range(D):
            for width in range(B):
                if (device, width) != (straggler, b):
                    first = counts_DB.copy()
                    first[straggler, b] -= 1
                    first[device, width] += 1
                    firsts.append(first)
    for first in firsts:
        yield first
        for device, b in zip(*np.nonzero(first), strict=True):
            for width in range(B):
                if width != b:
                    second = first.copy()
                    second[device, b] -= 1
                    second[device, width] += 1
                    yield second


# ---- solve


Plan = tuple[Sequence[Stage], Sequence[int], Pair]
Step = Callable[[Search, Pair, float], bool]  # a solver of one pair in so many seconds
Solver = Literal["exact", "counts", "transfer"]
SOLVERS = ("exact", "counts", "transfer")
TIGHTER = 5  # (chosen) tries with a smaller sum of omega before counts are given up
LOOSE = 1e-5  # (chosen) above the best: a bound that is tight makes HiGHS' own checks fail
SMALL = 12  # (chosen) layers up to which the program over layers needs no better start
WIDTHS_S = 3.0  # (chosen) seconds for the widths of given stages
COVERS = 30  # (chosen) times that a program over layers is told what loses too much
NARROW = 1 - 1e-5  # of the memory, where HiGHS' tolerance let a placement exceed it


def solve(
    problem: Problem,
    *,
    quality: float | None = None,
    solver: Solver = "exact",
    time_limit_s: float = 60,
    start: Sequence[Plan] = (),
) -> Placement:
    """Returns the placement with the most tokens a second.

    Args: quality: bound on the sum of omega; None: no bound. solver: see the module's text.
      time_limit_s: seconds of the search; at its end, or after Ctrl-C, the best placement so far is
      returned with its gap. start: (stages, bits, micro-batch sizes) to begin with; those that
      break memory or quality are ignored.
    Raises: UserError if no placement fits memory and quality, with the missing bytes, or if the
      time limit ends before one is found; KeyboardInterrupt after Ctrl-C before one is found.

    After Ctrl-C HiGHS computes on in a thread until its own time limit. A process that is to end
    before that must flush its output and call `os._exit`, because Python's usual end aborts it.
    """
    if not isinstance(problem, Problem):
        raise UserError(
            f"solve: problem must be an llm_pq.Problem, got a {type(problem).__name__}; "
            "llm_pq.plan takes a Workload and a cluster"
        )
    if solver not in SOLVERS:
        near = did_you_mean(solver, SOLVERS)
        raise UserError(f"solver={solver} must be one of {', '.join(SOLVERS)}.{near} (--solver)")
    quality = None if quality is None else _number("quality", quality)
    if not _number("time_limit_s", time_limit_s) > 0:
        raise UserError(f"time_limit_s={time_limit_s} must be more than 0 (--time_limit_s)")
    search = Search(problem, quality, time.monotonic() + time_limit_s)
    status = "optimal"
    try:
        _search(search, solver, start)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        status = "interrupted"
    if search.best is None:
        is_proven = min(search.bounds.values(), default=0.0) == float("inf")
        if not is_proven and search.left <= 0.05:
            raise UserError(
                f"time_limit_s={time_limit_s:g} ended the search before any placement was found; "
                f"nearest: {2 * time_limit_s:g} (--time_limit_s)"
            )
        if error := explain(problem, quality, min(max(time_limit_s, 2.0), 20.0)):
            raise error
        if is_proven or solver == "exact":
            raise UserError("no placement keeps the memory of the devices and the quality")
        raise UserError(
            f"solver={solver} found no placement that keeps the memory of the devices and the "
            "quality, but does not prove that there is none; nearest: exact (--solver)"
        )
    if status == "optimal" and search.gap > 0:
        status = "heuristic" if search.left > 0.1 else "time limit"
    return search.result(status)


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise UserError(f"{name}={value!r} must be a number (--{name})")
    return number


def _search(search: Search, solver: Solver, start: Sequence[Plan]) -> None:
    problem = search.problem
    search.bounds = dict.fromkeys(itertools.product(problem.prefill_s, problem.decode_s), 0.0)
    known = dataclasses.replace(search)
    _offer(known, simple(problem))
    for stages, bits, pair in start:
        if pair in search.bounds:
            known.offer(list(stages), list(bits), pair)
    if solver != "transfer":  # the heuristic has no help but the bounds
        search.best, search.seconds = known.best, known.seconds
    search.linear_bounds(known.seconds)
    if min(search.bounds.values()) == float("inf"):
        return
    if search.best is None or solver == "transfer":
        counts, closed = least_omega(problem, max(search.left / 6, 1.0))
        if counts is None:
            if closed:
                search.bounds = dict.fromkeys(search.bounds, float("inf"))
            return
        if (least := arrange(problem, counts, search.deadline)) is not None:
            _offer(search, [least])
        if search.best is not None and known.best is None:
            search.linear_bounds(search.seconds)
        if solver == "transfer":
            transfer(search, counts)
            return
    pairs = sorted(search.bounds, key=search.bounds.__getitem__)
    _rounds(search, pairs, _by_counts)
    undone = sorted(filter(search.open, pairs), key=search.bounds.__getitem__)
    if solver == "exact" and undone:
        if search.problem.layers > SMALL:
            climb_stages(search, search.left / 2)
        _rounds(search, undone, _by_layers)


def _offer(search: Search, plans: Iterable[tuple[list[Stage], list[int]]]) -> None:
    """Offers plans with every pair of micro-batch sizes."""
    for stages, bits in plans:
        if not violations(search.problem, stages, bits, search.quality):
            for pair in search.bounds:
                search.offer(stages, bits, pair)


def _rounds(search: Search, pairs: list[Pair], step: Step) -> None:
    """Solves open pairs, each in a part of the time; what remains open again, in a larger part."""
    slice_s = max(search.left / 8, 0.5)
    while pairs and search.left > 0.05:
        again = []
        for pair in pairs:
            if search.open(pair) and search.left > 0.05:
                limit_s, began = min(slice_s, search.left), time.monotonic()
                closed = step(search, pair, limit_s)
                # HiGHS may also give up for its own reasons; more time does not help then.
                if not closed and search.open(pair) and time.monotonic() - began > limit_s / 2:
                    again.append(pair)
        pairs, slice_s = again, 3 * slice_s


def _by_counts(search: Search, pair: Pair, seconds: float) -> bool:
    """Bounds a pair and offers placements. Returns whether the program over counts was solved."""
    quality, tighter = search.quality, 0.0
    closed = False
    for tries in range(TIGHTER):
        bound = None if quality is None else max(quality - tighter, 0.0)
        program = Counts(search.problem, pair, bound, known_s=search.seconds)
        program.order_twins()
        solution = attended(lambda p=program: p.solve(min(seconds, search.left), CLOSE / 10))
        if tries == 0:
            search.raise_bound(pair, solution.bound)
            closed = solution.closed
        if solution.x is None:
            return closed
        excess = search.offer_counts(program.counts(solution.x), pair)
        if excess is None or excess <= 0 or search.left <= 0:
            return closed
        if solution.value >= search.seconds:
            return closed
        tighter = max(2 * tighter, excess)
    return closed


def climb_stages(search: Search, seconds: float) -> None:
    """Better widths for the best stages, then better stages: neighbours move or trade a place."""
    end = time.monotonic() + seconds
    done: set[tuple[Pair, tuple[Stage, ...]]] = set()

    def improves(pair: Pair, stages: tuple[Stage, ...]) -> bool:
        stages = search.problem.in_twin_order(stages)
        if (pair, stages) in done or time.monotonic() >= end:
            return False
        done.add((pair, stages))
        before = search.seconds
        program = Layers(search.problem, pair, search.quality, known_s=search.seconds)
        program.keep(stages)
        if search.best is not None:
            program.below(search.seconds * (1 + LOOSE))
        limit = min(search.left, WIDTHS_S)
        solution = attended(lambda: program.solve(limit, CLOSE))
        if solution.x is not None:
            search.offer(*program.plan(solution.x), pair)
        return search.seconds < before * (1 - CLOSE)

    for pair, stages in search.hints:
        improves(pair, stages)
    while search.best is not None and time.monotonic() < end:
        stages, _, pair = search.best
        if not any(improves(pair, tried) for tried in [tuple(stages), *_neighbours(stages)]):
            return


def _neighbours(stages: list[Stage]) -> Iterator[tuple[Stage, ...]]:
    """One layer crosses from a stage to any other one, or two stages trade their places."""
    sizes = [(d, stop - start) for d, start, stop in stages]
    for a, b in itertools.permutations(range(len(sizes)), 2):
        if sizes[a][1] > 1:
            moved = dict([(a, sizes[a][1] - 1), (b, sizes[b][1] + 1)])
            yield _in_order([(d, moved.get(k, size)) for k, (d, size) in enumerate(sizes)])
    for a, b in itertools.combinations(range(len(sizes)), 2):
        swapped = list(sizes)
        swapped[a], swapped[b] = sizes[b], sizes[a]
        yield _in_order(swapped)


def _in_order(sizes: list[tuple[int, int]]) -> tuple[Stage, ...]:
    edges = [0, *itertools.accumulate(size for _, size in sizes)]
    return tuple((d, edges[k], edges[k + 1]) for k, (d, _) in enumerate(sizes))


def _by_layers(search: Search, pair: Pair, seconds: float) -> bool:
    """The program over layers. Returns whether it proved its answer."""
    end = time.monotonic() + seconds
    for memory in (1.0, NARROW):
        options = {"memory": memory, "known_s": search.seconds}
        program = Layers(search.problem, pair, search.quality, **options)
        if search.best is not None:
            program.below(search.seconds * (1 + LOOSE))
        for _ in range(COVERS):
            limit = min(end - time.monotonic(), search.left)
            solution = attended(lambda p=program, s=limit: p.solve(s, CLOSE / 10))
            if memory == 1.0:
                search.raise_bound(pair, solution.bound)
            if solution.x is None or search.offer(*program.plan(solution.x), pair):
                return solution.closed
            if search.quality is None or not program.cover(solution.x, search.quality):
                break  # it exceeds the memory
    return False
