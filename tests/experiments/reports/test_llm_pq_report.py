"""What experiments/llm_pq.py reports of a case that Ctrl-C ends."""

import dataclasses

import numpy as np
import pytest

from experiments.reports import llm_pq as report
from experiments.reports import llm_pq_run
from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, MixedCluster
from megajax.cost.base import Stack
from megajax.systems.llm_pq import PRESETS, Workload

SMALL = Workload(
    "small", Stack(8, 2048, 16, 16, 128, 8192), 50272, prompt=64, new_tokens=8, requests=8
)

# Two devices that hold the model at some widths only, so that rivals lose unlike qualities.
CARD = dataclasses.replace(CARDS["T4"], memory_bytes=int((0.55e9 + 1.93e9) / 0.95))
LARGER = dataclasses.replace(CARDS["V100"], memory_bytes=int((0.85e9 + 1.93e9) / 0.95))
PAIR = MixedCluster((CARD, LARGER), PRESETS["case3"].cluster.link)
OPTIONS = report.Options("equal", "counts", 10, True)
OTHER = report.Options(0.5, "counts", 10, True)  # a quality that no rival has


@pytest.fixture
def searches(monkeypatch):
    """Counts the searches; Ctrl-C comes in the one of number `at`, before or after a placement."""
    state = {"count": 0, "at": 0, "raises": False}
    solve = report.solve

    def counted(*args, **options):
        placement = solve(*args, **options)
        state["count"] += 1
        if state["count"] == state["at"]:
            if state["raises"]:
                raise KeyboardInterrupt
            return dataclasses.replace(placement, status="interrupted")
        return placement

    monkeypatch.setattr(report, "solve", counted)
    return state


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("at", [2, 3])
def test_ctrl_c_among_the_rivals_ends_all_searches(searches, at, raises):
    """The placement stays, the rivals before it too, and no other search begins."""
    searches |= {"at": at, "raises": raises}
    row, placement, is_interrupted = report.one("case1", SMALL, PAIR, OTHER)
    assert is_interrupted and searches["count"] == at
    assert placement.status == "optimal" and "fastest" not in row
    complete, _, ended = report.one("case1", SMALL, PAIR, OTHER)
    assert not ended and "fastest" in complete
    assert row["rivals"] == complete["rivals"][: len(row["rivals"])]
    assert len(row["rivals"]) < len(complete["rivals"])
    assert report.text(row, placement) and report.summary([row])  # both take half a case


def test_ctrl_c_in_the_first_search_leaves_rivals_out(searches):
    searches["at"] = 1
    row, placement, is_interrupted = report.one("case1", SMALL, PAIR, OPTIONS)
    assert is_interrupted and placement.status == "interrupted" and row["rivals"] == []
    assert searches["count"] == 1


def test_ctrl_c_between_the_searches_keeps_the_placement(monkeypatch):
    """While the placement is simulated: this is done again, and nothing else begins."""
    simulate, calls = report.simulate, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return simulate(*args)

    monkeypatch.setattr(report, "simulate", interrupted)
    row, placement, is_interrupted = report.one("case1", SMALL, PAIR, OPTIONS)
    assert is_interrupted and row["rivals"] == [] and len(calls) == 2
    assert row["tokens_per_s"] == placement.tokens_per_s


def test_a_search_at_any_quality_begins_with_the_placement(monkeypatch):
    """It is no slower then, and the placement is not lost where that search finds nothing."""
    solve, begun = report.solve, []

    def refused(problem, *, quality, start=(), **options):
        if quality is not None:
            return solve(problem, quality=quality, start=start, **options)
        begun.append(list(start))
        raise UserError("time_limit_s ended the search before any placement was found")

    monkeypatch.setattr(report, "solve", refused)
    row, placement, is_interrupted = report.one("case1", SMALL, PAIR, OPTIONS)
    assert not is_interrupted and row["rivals"] and "fastest" not in row
    pair = placement.prefill_batch, placement.decode_batch
    assert begun == [[(placement.stages, placement.bits, pair)]]
    assert report.text(row, placement) and report.summary([row])


def test_a_rival_of_the_same_quality_is_compared_with_the_placement(monkeypatch):
    """It was planned again: one report had two answers to a search that the time limit ended."""
    solve, asked = report.solve, []

    def counted(problem, *, quality, **options):
        asked.append(quality)
        return solve(problem, quality=quality, **options)

    monkeypatch.setattr(report, "solve", counted)
    row, placement, _ = report.one("case1", SMALL, PAIR, OPTIONS)
    assert len(asked) == len(set(asked)) > 2
    same = [rival for rival in row["rivals"] if rival["omega"] == row["quality"]]
    assert "uniform" in {rival["name"] for rival in same}
    assert {rival["ours_tokens_per_s"] for rival in same} == {placement.tokens_per_s}


def test_prompts_of_many_requests():
    """The 513th of 16 rows had no token, and the 529th nearly all of its row."""
    rows = np.arange(2 * 129).reshape(2, 129)
    prompts = llm_pq_run.beginnings(rows, 70)
    assert [len(prompt) for prompt in prompts[:6]] == [32, 32, 31, 31, 30, 30]
    assert all(1 <= len(prompt) <= 32 for prompt in prompts) and prompts[69] == [129]
