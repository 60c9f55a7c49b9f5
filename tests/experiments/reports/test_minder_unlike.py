"""Rows and the table of the three other fleets, from cases made by hand."""

import json

import pytest

from experiments.reports import minder, minder_unlike
from megajax.core.errors import UserError


def case(kind, ours, levels=None, faulty="a"):
    """Returns a case whose fault begins at second 100; alerts: (machine, second)."""
    said = {"ours": ours} | ({} if levels is None else {"levels": levels})
    faults = [] if kind == "healthy" else [{"machine": faulty, "start": 100, "end": 900}]
    return {
        "kind": kind,
        "left": [],
        "faults": faults,
        "machine_days": 0.5,
        "said": {n: [{"machine": m, "at": at} for m, at in alerts] for n, alerts in said.items()},
    }


CASES = [
    case("lag", [("a", 350)], []),
    case("lag", [("a", 90), ("b", 400)], []),  # too early, and another machine
    case("order", [("a", 400), ("a", 800)], [("b", 300)]),
    case("healthy", [("c", 7)]),
    case("healthy", []),
]


def test_recall_by_kind_and_precision_over_all_scenes():
    rows = list(minder_unlike.rows("counters", CASES))
    by = {(r["detector"], r.get("kind")): r for r in rows}
    lag, order = by["ours", "lag"], by["ours", "order"]
    assert (lag["named"], lag["faults"], lag["vain"]) == (1, 2, 2)
    assert (order["recall"], order["delay_s"]["p50"]) == (1.0, 300.0)
    total = by["ours", None]
    assert (total["named"], total["vain"], total["precision"]) == (2, 3, 2 / 5)
    assert (total["healthy_vain"], total["healthy_machine_days"]) == (1, 1.0)
    levels = by["levels", None]
    assert (levels["named"], levels["vain"], levels["healthy_machine_days"]) == (0, 1, 0)


def test_the_table_shows_each_fleet_twice(tmp_path):
    about = {"layer": "simulated", "device": "cpu", "date": "2026-11-29", "commit": "abc"}
    config = {"sizes": [8], "faults": 2, "healthy": 2, "seed": 1000}
    rows = list(minder_unlike.rows("counters", CASES))
    path = tmp_path / "minder_unlike.json"
    path.write_text(json.dumps(about | {"config": config, "rows": rows}))
    text = minder.unlike(path)
    assert (
        "| counters | the whole detector | 1 of 1 | 1 of 2 | 0.400 (3 in vain) | 1 in 1.0 |" in text
    )
    assert "| counters | levels only | 0 of 1 | 0 of 2 | 0.000 (1 in vain) | - |" in text
    assert "order 1.00, lag 0.50" in text


def test_an_unknown_fleet_is_refused():
    with pytest.raises(UserError, match=r"'x' must be one of .*--unlike.fleets"):
        minder_unlike.Config(fleets="counters,x")
