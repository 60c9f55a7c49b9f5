"""The experiment as a user meets it: a small run, and what is refused."""

import functools
import json

import pytest

from tests import forks

experiment = functools.partial(forks.run, "experiments/bytetransformer.py")


@pytest.mark.slow  # CI runs the whole preset
@pytest.mark.process
def test_a_small_run_writes_its_rows_and_figure(tmp_path):
    done = experiment(
        "--model.layers=1", "--batch=2", "--longest=16", "--lengths=64,256", f"--out={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".svg", ".png"}
    result = json.loads((tmp_path / "bytetransformer_cpu.json").read_text())
    parts = {part: [r for r in result["rows"] if r["part"] == part] for part in ("exact", "count")}
    assert parts["exact"] and all(row["passed"] for row in parts["exact"])
    assert [row["longest"] for row in parts["count"]] == [64, 256]
    assert not any("median_ms" in row for row in result["rows"])  # no time of a CPU


@pytest.mark.process
def test_a_wrong_flag_is_one_line():
    done = experiment("--lengths=64;128")
    assert done.returncode == 2
    assert done.stderr.startswith("error: lengths=64;128 must be whole numbers above 0")
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_kernels_that_this_device_lacks_are_one_line(tmp_path):
    done = experiment("--kernels=hopper", f"--out={tmp_path}/never")
    assert done.returncode == 2
    assert done.stderr.startswith("error: kernels=hopper needs a Hopper GPU: found cpu")
    assert not list(tmp_path.iterdir())
