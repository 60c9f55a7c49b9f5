"""The experiment as a user meets it: what is refused, and that a run goes on after a stop."""

import json
import runpy
import shutil
from pathlib import Path

import pytest

from megajax.core import config
from megajax.core.errors import UserError
from tests import forks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "define_flags", lambda *_, **__: None)
        return runpy.run_path(str(ROOT / "experiments" / "sdp4bit.py"), run_name="imported")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"variants": "qW,qWd"}, r"'qWd' must be one of float32, qW.*Did you mean qWD.*--variants"),
        ({"variants": "loco"}, r"'loco' must be one of float32.*\(--variants\)"),
        ({"variants": "qW,qW"}, r"names one twice \(--variants\)"),
        ({"batch": 6}, r"batch=6 must be a multiple of 4; nearest: 4, 8 \(--batch\)"),
        ({"width": 80}, r"width=80 must be a multiple of 32; nearest: 64, 96 \(--width\)"),
        ({"evals": 9, "steps": 4}, r"evals=9 must be at most steps=4.*\(--evals\)"),
        ({"seeds": 0}, r"seeds=0 must be at least 1.*\(--seeds\)"),
    ],
)
def test_what_cannot_be_is_refused(script, flags, message):
    with pytest.raises(UserError, match=message):
        script["Config"](**flags)


def test_presets_differ_and_paper_has_all_variants(script):
    tiny, paper = (script["PRESETS"][name]() for name in ("tiny", "paper"))
    assert script["names"](paper.variants) == list(script["report"].VARIANTS) and paper.seeds == 3
    assert tiny.steps < paper.steps and len(script["names"](tiny.variants)) == 2
    assert tiny.study.tokens == 12 * 8 * 64


def test_only_what_is_missing_is_trained(script, tmp_path, monkeypatch):
    """Runs that are there are read; of the others the first one of a variant compiles it."""
    report, made = script["report"], []

    class Runner:
        def __init__(self, study, variant, cache_dir):
            made.append(variant)
            self.variant = variant

        def run(self, seed):
            made.append((self.variant, seed))
            return {
                "part": "run",
                "variant": self.variant,
                "seed": seed,
                "loss": 2.0 + seed,
                "loss_masters": 2.0,
                "drift": 0.0,
                "tokens": 1,
                "data": "x",
                "steps": [1],
                "losses": [2.0],
            }

    monkeypatch.setattr(report, "Runner", Runner)
    cfg = script["Config"](variants="float32,qW", seeds=2)
    first = []
    for row in script["runs"](cfg, tmp_path):
        first.append(row)
        if len(first) == 2:
            break  # as Ctrl-C does
    assert made == ["float32", ("float32", 0), "qW", ("qW", 0)]
    complete = list(script["runs"](cfg, tmp_path))
    assert made[4:] == ["float32", ("float32", 1), "qW", ("qW", 1)]
    assert complete[:2] == first and [(r["variant"], r["seed"]) for r in complete] == [
        ("float32", 0),
        ("qW", 0),
        ("float32", 1),
        ("qW", 1),
    ]
    assert list(script["runs"](cfg, tmp_path)) == complete and len(made) == 8
    drawn = script["Config"](variants="float32,fp8", seeds=3, draw=True)
    assert len(list(script["runs"](drawn, tmp_path))) == 2  # --draw trains nothing


@pytest.mark.process
@pytest.mark.slow  # CI runs the preset
def test_drawing_again_what_was_trained(tmp_path):
    flags = "--steps=2", "--evals=1", f"--state={tmp_path / 'state'}"
    flags += (f"--cache_dir={tmp_path / 'cache'}", f"--out={tmp_path / 'out'}")
    done = forks.run("experiments/sdp4bit.py", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "sdp4bit.json").read_text())
    assert {r["part"] for r in result["rows"]} == {"run", "gap", "claim", "estimate"}
    shutil.rmtree(tmp_path / "out")
    done = forks.run("experiments/sdp4bit.py", *flags, "--draw")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "sdp4bit.json").read_text())["rows"] == result["rows"]
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".json", ".svg", ".png"}
