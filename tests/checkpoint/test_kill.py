"""kill -9 during saves, the first one too: what was finished comes back, nothing is left over."""

import json

import pytest

from tests.scripts.test_scripts import call


@pytest.mark.process
def test_kill_9_during_saves(tmp_path, monkeypatch):
    """The script raises at the first wrong bit, lost step or leftover; 200 kills are its result."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # a word and its end of line are two writes then
    out = tmp_path / "results"
    done = call("kill_saves.py", "--kills=10", f"--folder={tmp_path}", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "kill_saves.json").read_text())
    rows = report["rows"]
    assert report["kills"] == len(rows) == 10 and report["kills_in_a_first_save"] >= 1
    assert rows[-1]["restored"] >= 3
    for before, row in zip(rows, rows[1:], strict=False):
        assert before["restored"] <= row["restored"] < row["killed_in"]
        assert row["restored"] >= before["killed_in"] - 1


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("around", ["junk", "store"])
def test_kill_9_in_hostile_places(tmp_path, around):
    flags = (f"--around={around}", "--kills=24", "--restarts=6", f"--folder={tmp_path}")
    done = call("kill_saves.py", *flags, f"--out={tmp_path}/results")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "results" / f"kill_saves_{around}.json").read_text())
    assert report["disturbances"] > 10 and any(row["retired"] for row in report["rows"])
