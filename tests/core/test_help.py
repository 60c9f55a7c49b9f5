import pytest
from absl import flags

from megajax.core import script

SECTIONS = {"": "", "train": "One step.", "model": "The network.", "model.rope": "Rotation."}
ROWS = [
    (name, "text", f"about {name}") for name in ("preset", "run_dir", "train.steps", "train.lr")
]
ROWS += [(f"model.size{i}", "an integer", "a size") for i in range(30)] + [
    ("model.rope.base", "", "")
]
ABSL = [("verbosity", "int", "of the log")]


def test_a_large_script_describes_what_matters_and_names_the_rest():
    page = script.Page(SECTIONS, ROWS, first=("preset", "train.steps"))
    shown = script.text("What it does.\n", page, ABSL, full=False)
    lines = shown.splitlines()
    assert lines[0] == "What it does." and "verbosity" not in shown
    assert lines[2:5] == [
        "The flags that matter most:",
        "  --preset: about preset (text)",
        "  --train.steps: about train.steps (text)",
    ]
    assert "train: One step.\n  --train.lr\n" in shown and "--train.lr:" not in shown
    assert "model.rope: Rotation.\n  --model.rope.base" in shown
    assert max(map(len, lines)) <= script.WIDTH
    for name, _, _ in ROWS:
        assert f"--{name}" in shown


def test_helpfull_describes_all():
    shown = script.text("", script.Page(SECTIONS, ROWS), ABSL, full=True)
    assert "--train.lr: about train.lr (text)" in shown
    assert shown.endswith("absl:\n  --verbosity: of the log (int)")


def test_a_small_script_describes_all_at_once():
    shown = script.text("", script.Page(SECTIONS, ROWS[:4]), ABSL, full=False)
    assert "--train.lr: about" in shown and "absl" not in shown and "helpfull" not in shown


def test_help_is_asked_for_by_these_words_only():
    assert script.asked(["x.py", "--help"]) is False and script.asked(["x.py", "a", "-h"]) is False
    assert script.asked(["x.py", "--helpfull"]) is True
    assert script.asked(["x.py", "--prompt=--help"]) is None
    assert script.asked(["x.py", "--", "--help"]) is None and script.asked(["--help"]) is None


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("", "tiny"),
        ("--preset=paper", "paper"),
        ("--preset paper --x", "paper"),
        ("-preset paper --preset=tiny", "tiny"),
        ("--preset", "tiny"),
        ("--preset=unknown", "tiny"),
        ("preset paper", "tiny"),
    ],
)
def test_help_shows_the_preset_that_is_asked_for(words, page):
    start = script.Start(flags.ArgumentParser(), None, "preset", "tiny", "")
    start.pages = {name: lambda name=name: name for name in ("tiny", "paper")}
    assert start.page(["x.py", *words.split(), "--help"]) == page


def test_a_flag_is_described_once_and_no_flags_need_no_heading():
    page = script.Page(SECTIONS, ROWS, first=("preset", "run_dir", "preset"))
    assert script.text("", page, ABSL, full=False).count("--preset:") == 1
    assert script.text("What it does.", script.Page({"": ""}, []), [], full=False).strip() == (
        "What it does."
    )


def test_flags_of_some_verbs_stand_under_a_heading_of_these():
    page = script.Page({"": ""}, ROWS[:3], verbs={"run_dir": ("fit", "judge", "watch")})
    shown = script.text("", page, ABSL, full=False)
    assert "Flags:\n  --preset: about preset (text)\n  --train.steps" in shown
    assert "\n\nFlags of fit, judge and watch:\n  --run_dir: about run_dir (text)" in shown
