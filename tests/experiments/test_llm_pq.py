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
    result = json.loads((tmp_path / "llm_pq.json").read_text())
    assert result["layer"] == "simulated estimate" and result["omega"].startswith("assumed")
    (row,) = result["rows"]
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
def test_a_missing_run_is_told_before_the_search(tmp_path):
    done = experiment("--run", f"--run_dir={tmp_path / 'none'}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and "none" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("out/placement_*"))


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
    command = [
        sys.executable,
        "experiments/llm_pq.py",
        f"--preset={case}",
        f"--out={tmp_path}",
        "--norivals",
        "--time_limit_s=300",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the configuration: imports are done
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "(interrupted)" in told and "V100" in told
    assert json.loads((tmp_path / f"placement_{case}.json").read_text())["gap"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_among_the_rivals_ends_the_command(tmp_path):
    """Of two cases only the first is there, with its placement and some of its rivals."""
    command = [
        sys.executable,
        "experiments/llm_pq.py",
        "--cases=case6,case1",
        f"--out={tmp_path}",
        "--time_limit_s=15",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(24)  # the first search has ended
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "tokens/s" in told and "(interrupted)" not in told and "case1:" not in told
    assert "stopped in case6" in errors and "Traceback" not in errors
    (row,) = json.loads((tmp_path / "llm_pq.json").read_text())["rows"]
    assert "fastest" not in row


BLOCKED = """
import ctypes, time
from experiments import llm_pq
def run_cases():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("first", flush=True)
        ctypes.PyDLL(None).sleep(60)  # C code: no Python runs, not even a handler of signals
llm_pq.run_cases = run_cases
llm_pq.main()
"""


@pytest.mark.slow  # seconds of imports
@pytest.mark.process
def test_a_second_ctrl_c_ends_it_at_once():
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("ready\n", "first\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == -signal.SIGINT
