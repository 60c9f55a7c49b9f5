"""Runs side by side: figures against hand-made ones, hostile folders, the plot's files."""

import json
import math

import pytest

from megajax.core.errors import UserError
from megajax.training import compare


def make(folder, losses, held_out=(), settings=None, rate="tokens_per_s"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings or {"train": {"steps": 40}}))
    rows = [
        {"step": s, "loss": loss, "step_time_s": 2.0, rate: 100.0 * s}
        for s, loss in enumerate(losses, 1)
    ]
    rows += [{"step": s, "eval_loss": loss} for s, loss in held_out]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 9')
    return str(folder)


def test_the_figures_of_a_run(tmp_path):
    losses = [5.0, None, *(4.0 - k / 10 for k in range(18))]
    run = compare.read(make(tmp_path / "a", losses, [(10, 2.5), (20, 2.75)]))
    assert run.figures() == {
        "last_loss": pytest.approx(sum(4.0 - k / 10 for k in range(8, 18)) / 10),
        "best_loss": pytest.approx(2.3),
        "held_out": 2.75,
        "best_held_out": 2.5,
        "speed": "1.05k tok/s",  # the median of 100, 200, ... 2,000
        "steps": "20 of 40",
        "time": "0:40",
    }


def test_only_what_differs_of_the_computation_is_shown(tmp_path):
    base = {"train": {"steps": 2}, "optim": {"lr": 0.1, "name": "lion"}, "run_dir": "a"}
    other = {"train": {"steps": 2}, "optim": {"lr": 0.2, "name": "lion"}, "run_dir": "b", "new": 1}
    runs = [
        compare.read(make(tmp_path / name / "run", [1.0], settings=settings))
        for name, settings in (("a", base), ("b", other))
    ]
    assert compare.differences(runs) == {"optim.lr": ["0.1", "0.2"]}
    assert [row["run"] for row in compare.rows(runs)] == ["a/run", "b/run"]


def test_a_drawn_curve_is_a_mean_of_the_steps_before(tmp_path):
    losses = {step: float(step % 7) for step in range(1, 10_001)}
    steps, means = compare.smooth({**losses, 50: math.nan})
    assert len(steps) <= compare.POINTS and steps[-1] == 10_000
    at = steps.index(max(s for s in steps if s <= 5000))
    window = [losses[s] for s in range(steps[at] - 199, steps[at] + 1)]
    assert means[at] == pytest.approx(sum(window) / 200)
    assert compare.smooth({3: 1.5}) == ([3], [1.5]) and compare.smooth({}) == ([], [])


def test_the_plot_is_two_files_and_names_are_no_formulas(tmp_path):
    names = ["$x^{$", "_hidden", *(f"run{k}" for k in range(2))]
    runs = [compare.read(make(tmp_path / name, [3.0, 2.0], [(2, 2.5)])) for name in names]
    png, svg = compare.draw(runs, tmp_path / "compare")
    assert png.read_bytes()[:4] == b"\x89PNG" and b"<svg" in svg.read_bytes()
    first = svg.read_bytes()
    compare.draw(runs, tmp_path / "compare")
    assert svg.read_bytes() == first


@pytest.mark.parametrize(
    "config, metrics, words",
    [
        (None, "{}", "has no config.json"),
        ("{}", None, "has no metrics.jsonl"),
        ("[]", "{}", "must hold a JSON object"),
        ('{"a": 1, "a": 2}', "{}", "config.json is not JSON"),
        ("{" + '"a":{' * 9 + "}" * 10, "{}", "nested too deep"),
        ("{}", '{"step": true, "loss": 1}\n{"step": 1e99, "loss": 1}\nxyz', "has no step yet"),
    ],
)
def test_hostile_folders_are_refused_by_name(tmp_path, config, metrics, words):
    folder = tmp_path / "bad"
    folder.mkdir()
    for name, text in (("config.json", config), ("metrics.jsonl", metrics)):
        if text is not None:
            (folder / name).write_text(text)
    with pytest.raises(UserError, match=words) as refused:
        compare.read(str(folder))
    assert str(folder) in str(refused.value)


def test_values_of_other_types_are_no_figures(tmp_path):
    folder = tmp_path / "odd"
    make(folder, [1.0])
    odd = [
        '{"step": 1, "loss": "low", "step_time_s": -1, "tokens_per_s": [1]}',
        '{"step": 2, "loss": 1' + "0" * 400 + ', "step_time_s": {}}',
        '{"step": 3, "eval_loss": null}',
    ]
    (folder / "metrics.jsonl").write_text("\n".join(odd))
    run = compare.read(str(folder))
    assert run.steps == 2 and not run.held_out and math.isnan(run.figures()["best_loss"])
    compare.draw([run], tmp_path / "plot")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="none is no folder of a run: it does not exist"):
        compare.read(str(tmp_path / "none"))
