"""scripts/isa.sh with another pytest, which says what it was given and fails under SSE4_2."""

import os
import pathlib
import subprocess

SCRIPT = pathlib.Path(__file__).parent.parent.parent / "scripts" / "isa.sh"
STAND_IN = '#!/bin/sh\necho "[$XLA_FLAGS] [$*]"\ncase $XLA_FLAGS in *SSE*) exit 1;; esac\n'


def call(folder, *words):
    (folder / "pytest").write_text(STAND_IN)
    (folder / "pytest").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=env)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_one_run_for_each_set(tmp_path):
    level = "--xla_backend_optimization_level=3"
    code, lines, _ = call(tmp_path, "SSE4_2", "native", "--", "-k", "one")
    assert code == 1 and lines == [
        "=== SSE4_2",
        f"[{level} --xla_cpu_max_isa=SSE4_2] [-k one]",
        "=== native",
        f"[{level} ] [-k one]",
        "SSE4_2: FAILED",
        "native: passed",
    ]
    code, lines, _ = call(tmp_path)
    assert code == 1 and lines[-3].startswith("AVX2: ")  # older machines do not have it
    assert lines[-2:] == ["SSE4_2: FAILED", "native: passed"]
    assert call(tmp_path, "native")[0] == 0


def test_a_word_that_is_no_set_is_refused(tmp_path):
    code, lines, error = call(tmp_path, "SSE42")
    assert code == 2 and not lines and "SSE42 is no instruction set; there are" in error
