"""The experiment as a user meets it: a run that goes on after a stop, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]


def start(*flags):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "experiments" / "tilewise.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow  # CI runs the whole preset
@pytest.mark.process
def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(tmp_path):
    flags = "--steps=4", "--tune=2", "--methods=TW-1,BW", "--stages=50,75", "--held_out=32"
    flags += (f"--cache_dir={tmp_path / 'cache'}",)
    for name in ("whole", "stopped"):
        folders = f"--out={tmp_path / name}", f"--state={tmp_path / name}-state"
        with start(*flags, *folders) as run:
            if name == "stopped":
                while "TW-1 at 50 %" not in run.stdout.readline():
                    assert run.poll() is None, run.stderr.read()
                run.send_signal(signal.SIGINT)
            output, errors = run.communicate()
        if name == "stopped":
            assert run.returncode == 130 and "the same command goes on" in errors
            with start(*flags, *folders) as run:
                output, errors = run.communicate()
        assert run.returncode == 0, errors
        assert ("points are in" in output) == (name == "stopped")
    rows = [
        json.loads((tmp_path / name / "tilewise.json").read_text())["rows"]
        for name in ("whole", "stopped")
    ]
    assert rows[0] == rows[1]
    assert {row["part"] for row in rows[0]} == {"point", "quality", "claim", "speed", "price"}
    assert {p.suffix for p in (tmp_path / "whole").iterdir()} == {".json", ".svg", ".png"}


@pytest.mark.process
def test_a_wrong_flag_is_one_line():
    done = forks.run("experiments/tilewise.py", "--methods=TW-16")
    assert done.returncode == 2
    assert done.stderr.startswith("error: methods=TW-16: 'TW-16' must be one of EW, VW")
    assert "Traceback" not in done.stderr
