"""The butterfly table: runs that are cut off go on, intervals, and which protocol is better."""

import json

import pytest
from scipy import stats

from experiments.reports import butterfly
from megajax.core.errors import UserError

# Writes what a run of experiments/butterfly.py would; fails where a file says so.
STAND_IN = """
import json, pathlib, sys
flags = dict(a.lstrip("-").split("=", 1) for a in sys.argv[2:])
home = pathlib.Path(flags["run_dir"])
home.mkdir(parents=True, exist_ok=True)
with open(home.parent / "starts", "a") as file:
    print(home.name, file=file)
if (home.parent / "broken").exists() and flags["protocol"] == "B":
    sys.exit(75)
value = 0.5 + 0.1 * (flags["protocol"] == "A") + 0.01 * int(flags["train.seed"])
row = {"step": 9, "eval_voc10": value, "eval_voc07": value, "eval_images": 3}
lines = json.dumps({"step": 9, "loss": 1.0}), json.dumps(row)
(home / "metrics.jsonl").write_text("".join(line + chr(10) for line in lines))
"""


def all_runs(tmp_path, seeds=2):
    (tmp_path / "script.py").write_text(STAND_IN)
    runs = butterfly.runs(tmp_path / "script.py", [], tmp_path / "out", seeds, ("A", "B"), ("zf",))
    return [*runs]


def test_runs_that_ended_are_not_started_again(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "broken").touch()
    with pytest.raises(UserError, match="B-zf-0 ended with exit code 75; the same command goes on"):
        all_runs(tmp_path)
    (tmp_path / "out" / "broken").unlink()
    rows = all_runs(tmp_path)
    starts = (tmp_path / "out" / "starts").read_text().split()
    assert starts == ["A-zf-0", "B-zf-0", "B-zf-0", "A-zf-1", "B-zf-1"]
    assert [(r["protocol"], r["seed"], r["steps"]) for r in rows] == [
        ("A", 0, 9),
        ("B", 0, 9),
        ("A", 1, 9),
        ("B", 1, 9),
    ]
    assert rows[2]["voc10"] == pytest.approx(0.61) and rows[0]["cpu_s"] > 0
    assert json.loads((tmp_path / "out" / "A-zf-1" / "row.json").read_text()) == rows[2]
    text = butterfly.markdown({"rows": rows, "layer": "measured"})
    assert "| ZF | A | 0.605 ± 0.064 |" in text and "protocol A is better" in text


def test_the_interval_is_students():
    values = [0.5, 0.6, 0.62]
    mean, half = butterfly.interval(values)
    low, high = stats.t.interval(0.95, 2, loc=mean, scale=stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert butterfly.interval([0.5]) == (0.5, None)
    assert butterfly.shown([0.5]) == "0.500"


def row(protocol, seed, value):
    return {"protocol": protocol, "backbone": "zf", "seed": seed, "voc10": value}


def test_a_protocol_is_better_only_outside_of_the_interval():
    close = [row("A", 0, 0.6), row("B", 0, 0.5), row("A", 1, 0.5), row("B", 1, 0.55)]
    assert "neither protocol is better as measured" in butterfly.verdict(close)
    apart = [row("A", s, 0.5 + 0.01 * s) for s in range(3)]
    apart += [row("B", s, 0.7 + 0.011 * s) for s in range(3)]
    assert butterfly.verdict(apart).endswith("protocol B is better.")
    assert "3 pairs" in butterfly.verdict(apart)
    assert "one pair says nothing" in butterfly.verdict(apart[::3])
    assert "No backbone and seed" in butterfly.verdict(apart[:2])
