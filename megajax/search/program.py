"""Mixed-integer linear programs, written row by row and solved by HiGHS (scipy.optimize.milp).

`Program` collects variables, rows and the objective; `solve` returns a `Solution` with a bound,
also when the time ends before the optimum is proven. The planner of LLM-PQ (systems/llm_pq/milp.py)
writes its programs with it. Choices of one option an item have a simpler interface: assign.py.
Plain numbers, no jax.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Term = tuple[np.ndarray, np.ndarray | float]  # variables, coefficients


@dataclass(frozen=True)
class Solution:
    """The result of HiGHS. x: the best solution, None: none yet. bound: no solution is below it.

    closed: whether x is proven optimal or, if x is None, the program infeasible.
    """

    x: np.ndarray | None
    value: float
    bound: float
    closed: bool


class Program:
    """Variables and rows of a mixed-integer program that minimises."""

    def __init__(self) -> None:
        """An empty program."""
        self.size = 0
        self.lows: list[np.ndarray] = []
        self.highs: list[np.ndarray] = []
        self.integer: list[np.ndarray] = []
        self.cost: list[np.ndarray] = []
        self.entries: list[tuple[np.ndarray, np.ndarray]] = []
        self.ranges: list[tuple[float, float]] = []

    def add(self, *shape: int, high: float = np.inf, integer: bool = False) -> np.ndarray:
        """Returns the numbers of new variables, from 0 up to `high`, in this shape."""
        count = int(np.prod(shape, dtype=int))
        self.lows.append(np.zeros(count))
        self.highs.append(np.full(count, float(high)))
        self.integer.append(np.full(count, int(integer)))
        self.cost.append(np.zeros(count))
        numbers = np.arange(self.size, self.size + count).reshape(shape)
        self.size += count
        return numbers

    def row(self, terms: Iterable[Term], low: float = -np.inf, high: float = np.inf) -> None:
        """Adds low <= sum of coefficient x variable <= high. A variable may stand in two terms."""
        numbers, values = [], []
        for variables, coefficients in terms:
            numbers.append(np.ravel(variables))
            values.append(np.broadcast_to(coefficients, np.shape(variables)).ravel())
        self.entries.append((np.concatenate(numbers), np.concatenate(values)))
        self.ranges.append((low, high))

    def forbid(self, numbers: np.ndarray) -> None:
        """Makes variables 0."""
        high = np.concatenate(self.highs)
        high[numbers] = 0.0
        self.highs = [high]

    def make_integer(self, numbers: np.ndarray) -> None:
        """Restricts variables to integers."""
        integer = np.concatenate(self.integer)
        integer[numbers] = 1
        self.integer = [integer]

    def minimise(self, terms: Iterable[Term]) -> None:
        """Adds terms to the objective."""
        cost = np.concatenate(self.cost)
        for variables, coefficients in terms:
            np.add.at(cost, variables, coefficients)
        self.cost = [cost]

    def solve(self, seconds: float, gap: float = 0.0, integer: bool = True) -> Solution:
        """Returns the best solution after at most so many seconds.

        integer: False: solves the linear program instead.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # a third of a second
        from scipy.sparse import coo_array

        rows = np.concatenate([np.full(n.size, r) for r, (n, _) in enumerate(self.entries)])
        columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.ranges), self.size)).tocsr()
        low, high = np.array(self.ranges).T
        result = milp(
            np.concatenate(self.cost),
            constraints=LinearConstraint(matrix, low, high),
            bounds=Bounds(np.concatenate(self.lows), np.concatenate(self.highs)),
            integrality=np.concatenate(self.integer) * integer,
            options={"time_limit": max(seconds, 0.05), "mip_rel_gap": gap},
        )
        if result.status == 2:
            return Solution(None, np.inf, np.inf, True)
        bound = result.mip_dual_bound if integer else result.fun
        bound = 0.0 if bound is None or not np.isfinite(bound) else float(bound)
        if result.x is None:
            return Solution(None, np.inf, bound, False)
        return Solution(np.asarray(result.x), float(result.fun), bound, result.status == 0)
