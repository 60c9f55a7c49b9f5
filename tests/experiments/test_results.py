"""Where results go, and whether documents say what the results say."""

import json
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from experiments.reports import reporting
from megajax.core import config
from megajax.core.errors import UserError
from megajax.monitor import results

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "experiments" / "results"
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("experiments", "scripts")
    for path in (ROOT / folder).glob("*.py")
    if re.search(r"^config.define_flags\(", path.read_text(), re.MULTILINE)
)
# Whose work is to write there, from a run or from committed results, or to read a whole report.
PUBLISHERS = {"scripts/publish.py", "scripts/tables.py", "scripts/figures.py"}
PUBLISHERS |= {"scripts/kernel_report.py", "scripts/learn_h200.py", "scripts/frozen.py"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_default_writes_over_committed_results(script, monkeypatch):
    """Every preset of every experiment: --out is runs/<the script's name>, or nothing."""
    declared, outs = [], []
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(config, "define_flags", lambda presets, *_, **__: declared.append(presets))
    for kind in ("string", "boolean", "integer", "float", "enum", "bool"):
        stub = lambda name, default, *_, **__: outs.append(default) if name == "out" else None  # noqa: E731
        monkeypatch.setattr(flags, f"DEFINE_{kind}", stub)
    monkeypatch.setattr(flags, "DEFINE_alias", lambda *_, **__: None)
    runpy.run_path(str(ROOT / script), run_name="imported")
    (presets,) = declared
    outs += [getattr(make(), "out", None) for make in presets.values()]
    for out in outs:
        assert out in (None, f"runs/{Path(script).stem.removeprefix('run_')}"), script
        if out is not None:
            assert not (ROOT / out).is_relative_to(COMMITTED)


def test_only_publishers_name_the_folder_of_committed_results():
    """All others take it from --out: `"experiments" / "results"` and like expressions."""
    named = {
        path.relative_to(ROOT).as_posix()
        for folder in ("experiments", "scripts", "megajax")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"""/ "results"|["']experiments/results""", path.read_text())
    }
    assert named == PUBLISHERS


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("schedules", {"stages": 0}, r"stages=0 must be at least 1; nearest: 1 \(--stages\)"),
        ("schedules", {"microbatches": 6}, r"multiple of stages=4 .* nearest: 4, 8 \(--microb"),
        ("flux", {"rows": "12"}, r"multiple of the 8 ranks; nearest: 8, 16 \(--rows\)"),
        ("comet", {"tokens": "12"}, r"multiple of the 8 ranks; nearest: 8, 16 \(--tokens\)"),
        ("comet", {"stds": "nan"}, r"must be numbers of at least 0 .*\(--stds"),
        ("comet", {"stds": "0.1,5"}, r"so 5 must be below 0.5 \(--stds\)"),
    ],
)
def test_flags_of_experiments_are_refused_by_their_own_names(script, flags, message, monkeypatch):
    monkeypatch.setattr(config, "define_flags", lambda *_, **__: None)
    made = runpy.run_path(str(ROOT / "experiments" / f"{script}.py"), run_name="imported")
    with pytest.raises(UserError, match=message):
        made["Config"](**flags)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert results.writable_folder(str(tmp_path / "new" / "one")).is_dir()
    for bad in ("file", "file/inside"):
        with pytest.raises(
            UserError, match=r"cannot write to .*file.*: Not a directory; .*\(--out\)"
        ):
            results.writable_folder(str(tmp_path / bad))
    with pytest.raises(UserError, match=r"\(--state\)"):
        results.writable_folder(str(tmp_path / "file"), "state")


def test_papers_says_how_many_rows_of_the_mfu_agree():
    """The sentence against the rows above it in docs/papers/megascale.md, digit by digit."""
    text = (ROOT / "docs" / "papers" / "megascale.md").read_text()
    table = text.split("<!-- megascale_mfu -->")[1].split("<!-- end -->")[0]
    rows = [[c.strip() for c in line.split("|")] for line in table.splitlines() if "%" in line]
    rows = [cells[1:5] for cells in rows if len(cells) == 6]
    same = [paper == ours for _, _, paper, ours in rows]
    assert len(rows) == 8
    assert f"{sum(same)} of 8 rows agree to the last digit" in table
    (line,) = (line for line in table.splitlines() if "agree" in line)
    for (gpus, *_), agrees in zip(rows, same, strict=True):
        assert (f"at {gpus} GPUs" in line) == (not agrees)


def test_the_readme_counts_the_systems_that_are_built():
    text = (ROOT / "README.md").read_text()
    opening = " ".join(text.split("\n## ")[0].split())
    table = text.split("## The fourteen")[1].split("\n## ")[0]
    assert table.count("](https://arxiv.org/abs/") == 14
    table = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", table)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    built = [name.strip("| ") for name, state, *_ in rows if state.startswith("built")]
    begun = [name.strip("| ") for name, state, *_ in rows if state.startswith("begun")]
    waiting = [n for name, state, *_ in rows if "not built yet" in state for n in name.split(",")]
    words = {
        1: "One",
        2: "Two",
        3: "Three",
        4: "Four",
        5: "Five",
        6: "Six",
        7: "Seven",
        8: "Eight",
        9: "Nine",
        10: "Ten",
        11: "Eleven",
        12: "Twelve",
        13: "Thirteen",
        14: "Fourteen",
    }
    assert len(built) + len(begun) + len(waiting) == 14
    assert f"{words[len(built)]} published systems are built" in opening
    verb = "is" if len(waiting) == 1 else "are"
    assert not waiting or f"{words[len(waiting)]} more {verb} planned" in opening
    assert all(name in opening for name in built + begun)


def test_results_are_json_where_a_figure_is_not_finite(tmp_path):
    rows = [{"loss": math.nan, "each": (1.5, np.float64("inf"), -math.inf), "of": {"n": 2}}]
    results.write(tmp_path / "a.json", {"layer": "emulated", "mean": math.inf}, rows)
    result = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert result == {
        "layer": "emulated",
        "mean": None,
        "rows": [{"loss": None, "each": [1.5, None, None], "of": {"n": 2}}],
    }
    assert "| - |" in reporting.table(tmp_path / "a.json", {"loss": "loss"})


def test_results_become_tables_with_their_source(tmp_path):
    about = results.facts("8 x cpu", "emulated")
    assert about["layer"] == "emulated" and about["date"]
    results.write(tmp_path / "r.json", about, [{"a": 1.23456, "b": None}, {"a": 2, "b": "x"}])
    table = reporting.table(tmp_path / "r.json", {"A": "a", "B": "b"}).splitlines()
    assert table[:4] == ["| A | B |", "|---|---|", "| 1.235 | - |", "| 2 | x |"]
    assert "emulated, 8 x cpu" in table[-1]


def test_rows_stand_in_columns_with_their_headings():
    rows = [{"way": "ours", "took": 0.123456}, {"way": "orbax, waits", "took": None}]
    text = results.columns(rows, {"how": "way", "median s": "took"})
    assert text == "how           median s\nours          0.1235\norbax, waits  -"


def test_small_runs_end_in_a_sentence_with_the_papers_number(monkeypatch):
    """One seed says that it is too little to judge; three seeds do not."""
    monkeypatch.setattr(config, "define_flags", lambda *_, **__: None)
    load = lambda name: runpy.run_path(str(ROOT / "experiments" / name), run_name="imported")  # noqa: E731
    sdp, tiles, serving = map(load, ("sdp4bit.py", "tilewise.py", "serving.py"))
    gap = {"part": "gap", "variant": "SDP4Bit", "gap_percent": 1.25, "gap_error": None, "n": 1}
    gap["paper_percent"] = {"125M": 0.1}
    claims = [{"met": True}, {"met": False}]
    rate = [{"mode": "continuous", "ratio": 2.2}]
    small = (
        sdp["conclusion"](sdp["tiny"](), [gap]),
        tiles["conclusion"](tiles["tiny"](), claims),
        serving["conclusion"](serving["tiny"](), rate),
    )
    assert "+1.250 % above float32's after 12 steps" in small[0] and "+0.10 % (125M)" in small[0]
    assert "less than blocks in 1 of 2" in small[1] and "1.95 times" in small[1]
    assert "2.20 times" in small[2] and all("to judge" in text for text in small)
    large = (
        sdp["conclusion"](sdp["Config"](), [gap | {"n": 3, "gap_error": 0.2}]),
        tiles["conclusion"](tiles["Config"](), claims),
        serving["conclusion"](serving["Config"](), rate),
    )
    assert not any("to judge" in text for text in large)
