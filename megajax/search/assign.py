"""Budgeted choice: one option for each item, the best sum of values that the budgets allow.

The multiple-choice knapsack, with one budget or several. Which bits a layer gets (QSync, arXiv
2407.02327; LLM-PQ, arXiv 2403.01136), how sparse a matrix becomes: an item is a
layer, its options differ in value (error, importance, seconds) and in what they cost (bytes of a
device, seconds). `greedy` takes the best value for its cost, step by step; `exact` is an integer
program (program.py). Plain numbers, no jax.

Legend: I items, O options of all items in one row, B budgets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megajax.core.errors import UserError
from megajax.search.program import Program

Rows = Sequence[Sequence[float]]  # of each item, of each of its options
SLACK = 1e-9  # of a budget, for sums of floats in another order
EXACT_SLACK = 1e-6  # what HiGHS counts as kept (its mip_feasibility_tolerance)


@dataclass(frozen=True)
class Assignment:
    """choice: the option of each item. value: their sum. costs: {budget: what they cost of it}."""

    choice: tuple[int, ...]
    value: float
    costs: dict[str, float]


@dataclass(frozen=True)
class _Problem:
    """Options of all items in one row; values are minimised, costs are fractions of budgets."""

    item_O: np.ndarray
    value_O: np.ndarray
    cost_BO: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """The first option of each item."""
        return np.flatnonzero(np.diff(self.item_O, prepend=-1))


def assign(
    values: Rows,
    costs: Mapping[str, Rows],
    budgets: Mapping[str, float],
    *,
    maximise: bool = False,
    method: Literal["exact", "greedy"] = "exact",
) -> Assignment:
    """Chooses an option for every item.

    min (or max) sum_i values[i][choice_i], with sum_i costs[b][i][choice_i] <= budgets[b] for all b

    Args: values: finite; of item i any number of options from 1 on. costs: by budget, like values,
      at least 0. budgets: at least 0, in the units of their costs. maximise: the sum of values.
      method: greedy is fast and near the best for one budget; it may miss a choice that several
      budgets allow. exact is the best, and keeps a budget to 1e-6 of it.
    Raises: UserError for rows that do not match, and when no choice keeps the budgets, with what
      the cheapest options need of them.
    """
    lengths = [len(row) for row in values]
    if not lengths or min(lengths) < 1:
        raise UserError("assign: every item needs an option, and there must be an item")
    for name, limit in budgets.items():
        rows = costs.get(name)
        if rows is None or [len(row) for row in rows] != lengths:
            raise UserError(f"assign: costs of {name} must have a number for each value")
        if not limit >= 0:
            raise UserError(f"assign: budget {name}={limit} must be at least 0; nearest: 0")
    item_O = np.repeat(np.arange(len(lengths)), lengths)
    value_O = np.concatenate([np.asarray(row, float) for row in values])
    cost_BO = np.zeros((len(budgets), item_O.size))
    for b, (name, limit) in enumerate(budgets.items()):
        cost_O = np.concatenate([np.asarray(row, float) for row in costs[name]])
        if not (cost_O >= 0).all():
            raise UserError(f"assign: costs of {name} must be at least 0")
        if limit > 0:
            cost_BO[b] = cost_O / limit
        else:
            cost_BO[b] = np.where(cost_O > 0, 2.0, 0.0)  # more than all of an empty budget
    if not (np.isfinite(value_O).all() and np.isfinite(cost_BO).all()):
        raise UserError("assign: values and costs must be finite; leave an impossible option out")
    problem = _Problem(item_O, -value_O if maximise else value_O, cost_BO)
    for b, (name, limit) in enumerate(budgets.items()):
        if np.minimum.reduceat(cost_BO[b], problem.starts).sum() > 1 + SLACK:
            least = sum(min(row) for row in costs[name])
            raise UserError(
                f"budget {name}={limit:g} cannot be kept: the cheapest options take {least:g}; "
                f"nearest: {least:g}"
            )
    picked = {"exact": _exact, "greedy": _greedy}[method](problem)
    if picked is None:
        limits = ", ".join(f"{name}={limit:g}" for name, limit in budgets.items())
        hint = "; try method='exact'" if method == "greedy" else ""
        raise UserError(f"no choice keeps all budgets at once ({limits}){hint}")
    choice = tuple(int(c) for c in picked - problem.starts)

    def total(rows: Rows) -> float:
        return float(sum(row[c] for row, c in zip(rows, choice, strict=True)))

    return Assignment(choice, total(values), {b: total(costs[b]) for b in budgets})


def _greedy(problem: _Problem) -> np.ndarray | None:
    """Starts from the cheapest options; each change is the one with most value for its cost."""
    item_O, value_O, cost_BO = problem.item_O, problem.value_O, problem.cost_BO
    worst_O = cost_BO.max(0, initial=0.0)  # the budget that an option strains most
    order = np.lexsort((value_O, worst_O, item_O))
    picked = order[problem.starts]
    used_B = cost_BO[:, picked].sum(1)
    if (used_B > 1 + SLACK).any():
        return None
    while True:
        now = picked[item_O]
        gain_O = value_O[now] - value_O
        fits_O = (used_B[:, None] + cost_BO - cost_BO[:, now] <= 1 + SLACK).all(0)
        more_O = np.maximum((cost_BO - cost_BO[:, now]).sum(0), 0.0)
        able_O = fits_O & (gain_O > 0)
        if not able_O.any():
            return picked
        rate_O = np.where(able_O, gain_O / np.maximum(more_O, 1e-300), -np.inf)
        best = int(rate_O.argmax())
        picked[item_O[best]] = best
        used_B = cost_BO[:, picked].sum(1)


def _exact(problem: _Problem) -> np.ndarray | None:
    program, O = Program(), problem.item_O.size  # noqa: E741
    taken_O = program.add(O, high=1, integer=True)
    for options_I in np.split(taken_O, problem.starts[1:]):
        program.row([(options_I, 1.0)], 1, 1)
    for cost_O in problem.cost_BO:
        costly = np.flatnonzero(cost_O)
        program.row([(taken_O[costly], cost_O[costly])], high=1)
    program.minimise([(taken_O, problem.value_O / (np.abs(problem.value_O).max() or 1.0))])
    solution = program.solve(math.inf)
    if solution.x is None:
        if solution.closed:
            return None
        raise RuntimeError("scipy.optimize.milp ended without a solution")
    picked = np.flatnonzero(solution.x > 0.5)
    assert picked.size == problem.starts.size
    assert (problem.cost_BO[:, picked].sum(1) <= 1 + 2 * EXACT_SLACK).all()
    return picked
