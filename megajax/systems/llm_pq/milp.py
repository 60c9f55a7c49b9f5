"""The integer programs of LLM-PQ for one pair of micro-batch sizes, solved by HiGHS.

Layers differ in quality only, so time and memory depend on COUNTS alone: how many layers of each
width every device has, and which devices come first and last. `Counts` is the program over these,
with at most D x (B + 3) integers. If quality is bounded and layers lose different quality, it
assigns widths to layers without regard to their place, so it is a relaxation; if layers are alike,
it is exact. `Layers` adds the place of every layer. The layers of a device are consecutive, so the
order of devices follows from the solution and needs no search.

Legend: L layers, D devices, B widths in bits, K kinds of layers (rows of omega that are equal).
"""

from collections.abc import Iterable
from typing import Literal

import numpy as np

from megajax.search.program import Program, Solution
from megajax.systems.llm_pq.problem import SLACK, Problem, Stage, widths

Goal = Literal["time", "omega", "memory"]


class Counts:
    """The program over counts. `program` may get more rows; `solve` answers in seconds.

    sizes: micro-batches of prefill and of decoding. quality: the most that the sum of omega may be;
    None: any. memory: a factor on the devices' memory. goal: what is least: 'time' in seconds,
    'omega' (loss of quality), or 'memory': the bytes that the devices lack. known_s: seconds of a
    known placement; solutions that take longer may be left out.
    """

    def __init__(
        self,
        problem: Problem,
        sizes: tuple[int, int],
        quality: float | None,
        *,
        goal: Goal = "time",
        memory: float = 1.0,
        known_s: float = np.inf,
    ) -> None:
        """Writes the rows; the class says what the arguments are."""
        D, B = problem.devices, len(problem.bits)
        self.problem, self.program = problem, Program()
        self.scale, self.constant = 1.0, 0.0
        add = self.program.add
        self.n_DB = add(D, B, high=problem.layers, integer=True)
        self.used_D = add(D, high=1, integer=True)
        self.first_D = add(D, high=1, integer=True)
        self.last_D = add(D, high=1, integer=True)
        self.many = add(high=1, integer=True)  # whether there are two stages or more
        self._shape(problem)
        self._memory(problem, memory, goal)
        if goal == "time":
            self._time(problem, *sizes, known_s)
        self._quality(problem, None if goal == "omega" else quality, goal)

    def _quality(self, problem: Problem, quality: float | None, goal: Goal) -> None:
        """Widths of layers wherever they stand, as many of each as the devices have."""
        if goal != "omega" and quality is None:
            return
        omega_KB, times_K = np.unique(problem.omega, axis=0, return_counts=True)
        taken_KB = self.program.add(*omega_KB.shape, high=problem.layers)
        for k, times in enumerate(times_K):
            self.program.row([(taken_KB[k], 1.0)], float(times), float(times))
        for b in range(len(problem.bits)):
            self.program.row([(taken_KB[:, b], 1.0), (self.n_DB[:, b], -1.0)], 0, 0)
        bound_omega(self.program, taken_KB, omega_KB, quality, float(problem.omega.min(1).sum()))

    def _shape(self, problem: Problem) -> None:
        """All layers are somewhere; a device that is used has one; there is a first and a last."""
        row, D = self.program.row, problem.devices
        row([(self.n_DB, 1.0)], problem.layers, problem.layers)
        for j in range(D):
            row([(self.n_DB[j], 1.0), (self.used_D[j], -problem.layers)], high=0)
            row([(self.n_DB[j], 1.0), (self.used_D[j], -1.0)], low=0)
            row([(self.first_D[j], 1.0), (self.used_D[j], -1.0)], high=0)
            row([(self.last_D[j], 1.0), (self.used_D[j], -1.0)], high=0)
            row([(self.first_D[j], 1.0), (self.last_D[j], 1.0), (self.many, 1.0)], high=2)
        row([(self.first_D, 1.0)], 1, 1)
        row([(self.last_D, 1.0)], 1, 1)
        row([(self.used_D, 1.0), (self.many, -(D - 1.0))], high=1)
        row([(self.used_D, 1.0), (self.many, -1.0)], low=1)

    def order_twins(self) -> None:
        """Gives the earlier of two devices that cannot be told apart no fewer layers."""
        for a, b in self.problem.twins():
            self.program.row([(self.n_DB[a], 1.0), (self.n_DB[b], -1.0)], low=0)

    def _memory(self, problem: Problem, factor: float, goal: Goal) -> None:
        each_B = problem.layer_bytes + problem.cache_bytes
        # HiGHS keeps a row to an absolute 1e-6, so rows are in layers, and a device's memory counts
        # up to what the whole model takes: a memory of 1e15 bytes must not set the unit.
        most = problem.layers * float(each_B.max()) + problem.first_bytes + problem.last_bytes
        unit = float(each_B.max()) or most or 1.0
        missing_D = None
        if goal == "memory":
            self.scale, missing_D = unit, self.program.add(problem.devices)
            self.program.minimise([(missing_D, 1.0)])
        for j in range(problem.devices):
            more = [] if missing_D is None else [(missing_D[j], -1.0)]
            self.program.row(
                [
                    (self.n_DB[j], each_B / unit),
                    (self.first_D[j], problem.first_bytes / unit),
                    (self.last_D[j], problem.last_bytes / unit),
                    *more,
                ],
                high=factor * min(float(problem.memory[j]), most) / unit,
            )

    def _time(self, problem: Problem, prefill: int, decode: int, known_s: float) -> None:
        """The objective of problem.timed, in units of the slowest layer.

        A layer, or a link, that alone takes longer than `known_s` is left out. Otherwise a device
        that is 1e8 times as slow as the others sets the unit, and HiGHS' tolerances are coarse.
        """
        program, n = self.program, problem.new_tokens
        table, hop = problem.prefill_s[prefill], problem.prefill_hop_s[prefill]
        step, link = problem.decode_s[decode], problem.decode_hop_s[decode]
        m, rounds, known_s = problem.batches(decode), max(n - 2, 0), known_s * (1 + 1e-9)
        late_DB = problem.batches(prefill) * table + (n - 1) * m * step > known_s
        program.forbid(self.n_DB[late_DB])
        table, step = np.where(late_DB, 0.0, table), np.where(late_DB, 0.0, step)
        if problem.batches(prefill) * hop + (n - 1) * m * link > known_s:
            program.forbid(self.many)
            hop = link = 0.0
        self.scale = max(table.max(), step.max(), hop, link) or 1.0
        slowest = self._slowest(table / self.scale, hop / self.scale)
        links = (self.used_D, hop / self.scale)
        program.minimise(
            [(self.n_DB, table / self.scale), links, (slowest, problem.batches(prefill) - 1.0)]
        )
        self.constant = -hop / self.scale
        if n == 1:
            return
        step, link = step / self.scale, link / self.scale
        slowest, lap = self._slowest(step, link), program.add()
        # lap >= sum, with (stages - 1) links in it; lap >= m x slowest
        program.row([(lap, 1.0), (self.n_DB, -step), (self.used_D, -link)], low=-link)
        program.row([(lap, 1.0), (slowest, -float(m))], low=0)
        program.minimise(
            [(self.n_DB, step), (self.used_D, link), (slowest, m - 1.0), (lap, float(rounds))]
        )
        self.constant -= link

    def _slowest(self, table_DB: np.ndarray, hop: float) -> np.ndarray:
        slowest = self.program.add()
        for j in range(self.problem.devices):
            self.program.row([(slowest, 1.0), (self.n_DB[j], -table_DB[j])], low=0)
        self.program.row([(slowest, 1.0), (self.many, -hop)], low=0)
        return slowest

    def solve(self, seconds: float, gap: float = 0.0, integer: bool = True) -> Solution:
        """Returns the best counts: value and bound in seconds of the whole run."""
        solution = self.program.solve(seconds, gap, integer)
        value, bound = ((v + self.constant) * self.scale for v in (solution.value, solution.bound))
        return Solution(solution.x, value, bound, solution.closed)

    def counts(self, x: np.ndarray) -> np.ndarray:
        """Returns (D, B) layers of each width on each device."""
        return np.rint(x[self.n_DB]).astype(int)

    def missing(self, x: np.ndarray) -> float:
        """Returns the bytes that the devices lack for a solution, without HiGHS' tolerance."""
        problem = self.problem
        need_D = self.counts(x) @ (problem.layer_bytes + problem.cache_bytes)
        need_D += np.rint(x[self.first_D]) * problem.first_bytes
        need_D += np.rint(x[self.last_D]) * problem.last_bytes
        return float(np.maximum(need_D - problem.memory, 0).sum())


def bound_omega(
    program: Program, taken: np.ndarray, omega: np.ndarray, quality: float | None, least: float
) -> None:
    """Keeps the sum of omega x taken to `quality`; None: makes it the objective.

    least: the sum of omega of the best widths. The row is in units of what may be lost beyond that,
    and widths that alone lose more are left out: HiGHS keeps a row to an absolute 1e-6 only, which
    is too coarse where layers are very unlike.
    """
    if quality is None:
        program.minimise([(taken, omega / (float(omega.max()) or 1.0))])
        return
    room = quality * (1 + SLACK) - least
    more = omega - omega.min(-1, keepdims=True)
    program.forbid(taken[more > room])
    more = np.where(more > room, 0.0, more)
    unit = float(more.max()) or 1.0
    program.row([(taken, more / unit)], high=room / unit)


class Layers(Counts):
    """The exact program: every layer has a device and a width.

    The counts and the place where each device starts are integer variables. The widths x of layers
    are real ones: for given counts and stages they are a transport problem, whose corners are
    integers.
    """

    def _quality(self, problem: Problem, quality: float | None, goal: Goal) -> None:
        L, D, B = problem.layers, problem.devices, len(problem.bits)
        row = self.program.row
        self.x_LDB = x = self.program.add(L, D, B, high=1)
        self.starts_LD = starts_LD = self.program.add(L, D, high=1, integer=True)
        for i in range(L):
            row([(x[i], 1.0)], 1, 1)
            for j in range(D):
                # Else two devices could share layers by halves, between the first and the last.
                row([(x[i, j], 1.0), (starts_LD[i, j], -1.0)], low=0)
                before = [] if i == 0 else [(x[i - 1, j], 1.0)]
                row([(starts_LD[i, j], 1.0), (x[i, j], -1.0), *before], low=0)
        for j in range(D):
            row([(starts_LD[:, j], 1.0), (self.used_D[j], -1.0)], 0, 0)
            row([(x[0, j], 1.0), (self.first_D[j], -1.0)], 0, 0)
            row([(x[L - 1, j], 1.0), (self.last_D[j], -1.0)], 0, 0)
            for b in range(B):
                row([(x[:, j, b], 1.0), (self.n_DB[j, b], -1.0)], 0, 0)
        for a, b in problem.twins():
            for i in range(L):  # the earlier of two twins starts no later
                row([(starts_LD[: i + 1, a], 1.0), (starts_LD[: i + 1, b], -1.0)], low=0)
        if goal == "omega" or quality is not None:
            wide = np.broadcast_to(problem.omega[:, None, :], x.shape)
            bound_omega(self.program, x, wide, quality, float(problem.omega.min(1).sum()))

    def below(self, seconds: float) -> None:
        """Leaves out all solutions that take so many seconds or more."""
        cost = np.concatenate(self.program.cost)
        numbers = np.flatnonzero(cost)
        high = seconds / self.scale - self.constant
        self.program.row([(numbers, cost[numbers])], high=high)

    def keep(self, stages: Iterable[Stage]) -> None:
        """Leaves out all solutions with other stages, so that only the widths remain to be
        chosen."""
        other_LD = np.ones(self.starts_LD.shape, bool)
        starts_LD = np.ones(self.starts_LD.shape, bool)
        for d, start, stop in stages:
            other_LD[start:stop, d] = False
            starts_LD[start, d] = False
        self.program.forbid(self.x_LDB[other_LD].ravel())
        self.program.forbid(self.starts_LD[starts_LD])

    def cover(self, x: np.ndarray, quality: float) -> bool:
        """Leaves out the widths of a solution if they lose too much quality, and all widths that
        lose more. HiGHS keeps the bound of quality to its tolerance only. Of layers that lose too
        much together, whatever the others have, one must get a width that loses less. Returns
        whether the solution's widths lose too much.
        """
        omega, everyone = self.problem.omega, np.arange(self.problem.layers)
        least_L = omega.min(1)
        column_L = x[self.x_LDB].sum(1).argmax(1)
        excess_L = omega[everyone, column_L] - least_L
        room = quality * (1 + SLACK) - float(least_L.sum())
        # Before the first cover the widths x may be fractions; then the chosen ones are a guess.
        is_whole = bool((np.abs(x - np.rint(x)) < 1e-5)[self.x_LDB].all())
        self.program.make_integer(self.x_LDB.ravel())
        if excess_L.sum() <= room:
            return not is_whole
        inside = list(everyone)
        for i in np.argsort(excess_L, kind="stable"):  # as few layers as still lose too much
            if excess_L[inside].sum() - excess_L[i] > room:
                inside.remove(i)
        lossy = [self.x_LDB[i][:, omega[i] >= omega[i, column_L[i]]].ravel() for i in inside]
        self.program.row([(np.concatenate(lossy), 1.0)], high=len(inside) - 1.0)
        return True

    def plan(self, x: np.ndarray) -> tuple[list[Stage], list[int]]:
        """Returns (stages, bits) of a solution."""
        counts_DB = self.counts(x)
        place_DL = np.rint(x[self.starts_LD]).T
        order = sorted(
            np.flatnonzero(counts_DB.sum(1)).tolist(), key=lambda d: place_DL[d].argmax()
        )
        edges = np.cumsum([0, *(counts_DB[d].sum() for d in order)]).tolist()
        stages = [(d, edges[k], edges[k + 1]) for k, d in enumerate(order)]
        bits: list[int] = []
        for d, start, stop in stages:
            picked = widths(self.problem.omega[start:stop], counts_DB[d])[1]
            bits += [self.problem.bits[b] for b in picked]
        return stages, bits
