"""The real trainer, frozen and woken up again: one history on disk, whoever wakes up when."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent.parent
pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize(("kind", "hosts"), [("both", 2), ("driver", 1)])
def test_who_wakes_up_late_writes_nothing(tmp_path, kind, hosts):
    """Two processes of which a host freezes with its agent; a driver whose place another takes."""
    words = ["--tries=1", f"--kind={kind}", f"--hosts={hosts}", "--steps=40", f"--out={tmp_path}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "split_brain.py"), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "split_brain.json").read_text())["rows"]
    assert not row["wrong"] and row["attempts"] >= 2
