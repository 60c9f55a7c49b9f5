"""Budgeted choice against trying everything."""

import itertools

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.search.assign import assign


def draw(seed, items, budgets, most=4):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, most + 1, items)
    values = [random.integers(-20, 50, n).tolist() for n in lengths]
    costs = {b: [random.integers(0, 20, n).tolist() for n in lengths] for b in budgets}
    limits = {
        b: int(sum(np.mean(row) for row in rows) * random.uniform(0.6, 1.1))
        for b, rows in costs.items()
    }
    return values, costs, limits


def try_all(values, costs, limits, maximise):
    best = None
    for choice in itertools.product(*(range(len(row)) for row in values)):
        spent = {b: sum(r[c] for r, c in zip(costs[b], choice, strict=True)) for b in limits}
        if all(spent[b] <= limits[b] for b in limits):
            value = sum(r[c] for r, c in zip(values, choice, strict=True))
            better = best is None or (value > best if maximise else value < best)
            best = value if better else best
    return best


@pytest.mark.parametrize("maximise", [False, True])
@pytest.mark.parametrize("budgets", [("bytes",), ("bytes", "seconds"), ()])
def test_exact_is_the_best_of_all_choices(budgets, maximise, seed):
    for case in range(8):
        values, costs, limits = draw(seed + case, 6, budgets)
        best = try_all(values, costs, limits, maximise)
        if best is None:
            with pytest.raises(UserError):
                assign(values, costs, limits, maximise=maximise)
            continue
        chosen = assign(values, costs, limits, maximise=maximise)
        assert chosen.value == best
        assert all(chosen.costs[b] <= limits[b] for b in limits)
        assert len(chosen.choice) == len(values)


@pytest.mark.parametrize("maximise", [False, True])
def test_greedy_keeps_its_budget_and_is_near_the_best(maximise, seed):
    random = np.random.default_rng(seed)
    values, costs = [], []
    for _ in range(40):  # the more an option costs the better it is, with diminishing returns
        cost = np.sort(random.uniform(0, 10, 5))
        gain = np.sqrt(cost) * random.uniform(0.5, 2)
        values.append((gain if maximise else -gain).tolist())
        costs.append(cost.tolist())
    for limit in (80.0, 150.0, 300.0):
        greedy, best = (
            assign(values, {"s": costs}, {"s": limit}, maximise=maximise, method=m)
            for m in ("greedy", "exact")
        )
        assert greedy.costs["s"] <= limit * (1 + 1e-9)
        assert abs(greedy.value) <= abs(best.value) + 1e-9
        assert abs(greedy.value) >= 0.97 * abs(best.value)


def test_a_choice_that_is_free_and_better_is_taken():
    for method in ("greedy", "exact"):
        chosen = assign([[5.0, 3.0], [1.0, 9.0]], {"b": [[0, 0], [0, 4]]}, {"b": 0}, method=method)
        assert chosen.choice == (1, 0) and chosen.value == 4.0 and chosen.costs == {"b": 0.0}


def test_what_cannot_be_kept_is_said():
    values, costs = [[1, 2], [3, 4]], {"bytes": [[10, 20], [30, 40]]}
    for method in ("greedy", "exact"):
        with pytest.raises(UserError, match="budget bytes=39 cannot be kept: .* take 40; nearest"):
            assign(values, costs, {"bytes": 39}, method=method)
    # Each budget could be kept alone, both cannot.
    apart = {"a": [[0, 9], [0, 9]], "b": [[9, 0], [9, 0]]}
    with pytest.raises(UserError, match="no choice keeps all budgets at once .a=5, b=5.$"):
        assign(values, apart, {"a": 5, "b": 5})
    with pytest.raises(UserError, match="exact"):
        assign(values, apart, {"a": 5, "b": 5}, method="greedy")


def test_bad_rows_are_refused():
    for values, costs, budgets, message in (
        ([], {}, {}, "every item needs an option"),
        ([[1], []], {}, {}, "every item needs an option"),
        ([[1, 2]], {"b": [[1]]}, {"b": 1}, "costs of b must have a number for each value"),
        ([[1]], {}, {"b": 1}, "costs of b"),
        ([[1]], {"b": [[1]]}, {"b": -1}, "budget b=-1 must be at least 0; nearest: 0"),
        ([[1]], {"b": [[-1]]}, {"b": 1}, "at least 0"),
        ([[float("inf")]], {}, {}, "must be finite"),
    ):
        with pytest.raises(UserError, match=message):
            assign(values, costs, budgets)
