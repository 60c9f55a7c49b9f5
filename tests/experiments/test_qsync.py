"""qsync.py as a user meets it: a plan that training reads, its rivals, and what is refused."""

import json

import pytest

from experiments.qsync import PRESETS, QSyncConfig
from experiments.reports.qsync import EXACT, FULL, UNEVEN, Case
from megajax.core.errors import UserError
from megajax.core.hardware import parse_mixed
from megajax.quant.precisions import Precisions
from megajax.training.presets import PRESETS as RUNS
from tests import forks


def experiment(*flags):
    return forks.run("experiments/qsync.py", *flags)


def case(cfg: QSyncConfig, shares=None) -> Case:
    return Case(cfg.job(), parse_mixed(cfg.cluster), shares or {}, None, cfg)


def test_tiny_is_the_run_of_pretraining():
    tiny, nano = PRESETS["tiny"](), RUNS["nano"]()
    assert (tiny.model, tiny.train, tiny.optim) == (nano.model, nano.train, nano.optim)


def test_uneven_batches_are_the_best_of_all_splits():
    made = case(PRESETS["tiny"]())
    rows = made.uneven()
    splits = [(v, 16 - v) for v in range(1, 16)]
    expected = min(max(made.alone("v100", v), made.alone("t4", t)) for v, t in splits)
    assert sum(2 * n for n in rows.values()) == 32
    assert max(made.alone(kind, n) for kind, n in rows.items()) == pytest.approx(expected)


def test_memory_that_no_plan_fits_is_told_before_the_search():
    with pytest.raises(UserError, match=r"t4: 24 rows take 10\.85 GB.*4\.80 GB.*--memory"):
        case(PRESETS["paper"](), {"t4": 0.3}).rows()


@pytest.mark.slow  # a program, seconds of imports
@pytest.mark.process
def test_a_plan_and_its_profile(tmp_path):
    done = experiment("profile", f"--out={tmp_path}", "--warm_up=1", "--batches=1", "--rows=2")
    assert done.returncode == 0, done.stderr
    done = experiment("plan", f"--out={tmp_path}", f"--omega={tmp_path / 'omega.json'}")
    assert done.returncode == 0, done.stderr
    names = {"qsync.json", "qsync.svg", "qsync.png", "precisions.json", "omega.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    result = json.loads((tmp_path / "qsync.json").read_text())
    assert result["layer"] == "simulated estimate" and result["omega"] == "profiled"
    rows = {row["method"]: row for row in result["rows"]}
    assert rows[EXACT]["step_s"] < rows[FULL]["step_s"] and rows[EXACT]["gap"] == 0
    others = [row for row in rows.values() if row["rows"] == rows[FULL]["rows"] and row["fits"]]
    assert rows[EXACT]["step_s"] <= min(row["step_s"] for row in others) and UNEVEN in rows
    plan = Precisions.load(tmp_path / "precisions.json")
    assert set(plan["v100"].values()) == {"float32"} and len(plan["t4"]) == 28
    assert "float16" in plan["t4"].values()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "flag",
    [
        "--cluster=v100:2,t5:1",
        "--memory=l4:0.5",
        "--memory=t4:2",
        "--strong=l4",
        "--encoder=bert",
        "--train.global_batch=30",
        "--mesh.tensor=2",
        "--train.dtype=bfloat16",
        "--omega=none.json",
        "--cost=table",
    ],
)
def test_flags_that_are_refused(flag, tmp_path):
    done = experiment("plan", flag, f"--out={tmp_path}")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and flag.split("=")[0] in done.stderr
