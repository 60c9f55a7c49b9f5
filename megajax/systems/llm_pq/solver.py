"""The planner: the fastest placement within memory and quality, with a bound on what is left.

'exact': pairs of micro-batch sizes are solved in the order of their linear bounds. For each pair,
an integer program over counts (layers of each width on each device) gives a lower bound of the
time, and the best arrangement of its counts gives a placement. If the placement does not reach the
bound, because layers differ in quality, an integer program over single layers decides. Pairs whose
bound is not below the best placement are skipped. 'counts': the same without the program over
layers; it is exact if all layers lose the same quality. 'transfer': the paper's heuristic, with the
gap to the linear bounds.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from megajax.core.errors import UserError, did_you_mean
from megajax.systems.llm_pq.arrange import arrange
from megajax.systems.llm_pq.milp import Counts, Layers
from megajax.systems.llm_pq.problem import Placement, Problem, Stage, violations
from megajax.systems.llm_pq.search import CLOSE, Pair, Search, attended, explain, least_omega
from megajax.systems.llm_pq.splits import simple
from megajax.systems.llm_pq.transfer import transfer

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
        raise _nothing(search, solver, time_limit_s)
    if status == "optimal" and search.gap > 0:
        status = "heuristic" if search.left > 0.1 else "time limit"
    return search.result(status)


def _nothing(search: Search, solver: Solver, time_limit_s: float) -> UserError:
    """Returns the error of a search that found no placement."""
    is_proven = min(search.bounds.values(), default=0.0) == float("inf")
    if not is_proven and search.left <= 0.05:
        return UserError(
            f"time_limit_s={time_limit_s:g} ended the search before any placement was found; "
            f"nearest: {2 * time_limit_s:g} (--time_limit_s)"
        )
    if error := explain(search.problem, search.quality, min(max(time_limit_s, 2.0), 20.0)):
        return error
    if is_proven or solver == "exact":
        return UserError("no placement keeps the memory of the devices and the quality")
    return UserError(
        f"solver={solver} found no placement that keeps the memory of the devices and the quality, "
        "but does not prove that there is none; nearest: exact (--solver)"
    )


def _number(name: str, value: Any) -> float:
    try:
        found = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise UserError(f"{name}={value!r} must be a number (--{name})")
    return found


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
            _climb_stages(search, search.left / 2)
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
                given, began = min(slice_s, search.left), time.monotonic()
                closed = step(search, pair, given)
                # HiGHS may also give up for its own reasons; more time does not help then.
                if not closed and search.open(pair) and time.monotonic() - began > given / 2:
                    again.append(pair)
        pairs, slice_s = again, 3 * slice_s


def _by_counts(search: Search, pair: Pair, seconds: float) -> bool:
    """Bounds a pair and offers placements. Returns whether the program over counts was solved."""
    quality, tighter = search.quality, 0.0
    closed = False
    for tries in range(TIGHTER):
        wanted = None if quality is None else max(quality - tighter, 0.0)
        program = Counts(search.problem, pair, wanted, known_s=search.seconds)
        program.order_twins()
        found = attended(lambda p=program: p.solve(min(seconds, search.left), CLOSE / 10))
        if tries == 0:
            search.raise_bound(pair, found.bound)
            closed = found.closed
        if found.x is None:
            return closed
        excess = search.offer_counts(program.counts(found.x), pair)
        if excess is None or excess <= 0 or search.left <= 0:
            return closed
        if found.value >= search.seconds:
            return closed
        tighter = max(2 * tighter, excess)
    return closed


def _climb_stages(search: Search, seconds: float) -> None:
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
        found = attended(lambda: program.solve(limit, CLOSE))
        if found.x is not None:
            search.offer(*program.plan(found.x), pair)
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
            found = attended(lambda p=program, s=limit: p.solve(s, CLOSE / 10))
            if memory == 1.0:
                search.raise_bound(pair, found.bound)
            if found.x is None or search.offer(*program.plan(found.x), pair):
                return found.closed
            if search.quality is None or not program.cover(found.x, search.quality):
                break  # it exceeds the memory
    return False
