"""llm_pq.py as a user meets it: a small run, what is refused, and Ctrl-C."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests import forks


def experiment(*flags):
    return forks.run("experiments/llm_pq.py", *flags)


@pytest.mark.slow  # a program, seconds of imports
@pytest.mark.process
def test_a_small_run_writes_placement_rows_and_figure(tmp_path):
    done = experiment(f"--out={tmp_path}", "--time_limit_s=10")
    assert done.returncode == 0, done.stderr
    names = {"llm_pq.json", "llm_pq.svg", "llm_pq.png", "placement_case1.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    found = json.loads((tmp_path / "llm_pq.json").read_text())
    assert found["layer"] == "simulated estimate" and found["omega"].startswith("assumed")
    (row,) = found["rows"]
    assert row["gap"] == 0 and row["model"] == "OPT-13B"
    assert {rival["name"] for rival in row["rivals"]} >= {"uniform", "pipeedge", "offload_16"}
    assert all(rival["speedup"] is None or rival["speedup"] >= 1 for rival in row["rivals"])


@pytest.mark.slow
@pytest.mark.process
def test_devices_that_cannot_hold_the_model(tmp_path):
    done = experiment("--preset=case5", "--cluster=v100:1", f"--out={tmp_path}")
    assert done.returncode == 2
    assert "45105862272 bytes are missing" in done.stderr
    assert "The largest term: cache" in done.stderr


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "flag", ["--preset=case12", "--quality=best", "--cluster=t4", "--bits=2,4", "--cases=casé1"]
)
def test_flags_that_are_refused(flag, tmp_path):
    done = experiment(flag, f"--out={tmp_path}")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("case", "seconds"), [("case6", 15), ("case3", 6)])
def test_ctrl_c_prints_the_best_so_far(case, seconds, tmp_path):
    """Also while HiGHS computes, which aborted a process that ended as usual (case3, 6 s)."""
    command = [sys.executable, "experiments/llm_pq.py", f"--preset={case}", f"--out={tmp_path}",
               "--norivals", "--time_limit_s=300"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the configuration: imports are done
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "(interrupted)" in told and "V100" in told
    assert json.loads((tmp_path / f"placement_{case}.json").read_text())["gap"] > 0
