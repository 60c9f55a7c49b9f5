"""What two played processes say: waits, predictions, and losses at equal time."""

import dataclasses
import json

import pytest

from experiments.qsync import PRESETS
from experiments.reports import qsync_run
from experiments.reports.qsync_run import Players
from megajax.core.errors import UserError
from megajax.systems.qsync import replay


@pytest.fixture
def players(tmp_path):
    options = dataclasses.replace(
        PRESETS["tiny"](), strong_rates="float32:10", weak_rates="float32:5,float16:8,int8:20"
    )
    return Players(options, tmp_path)


def test_flops_are_those_of_the_weights(players):
    # nano: 16 of 32 rows of 128 tokens a process; 2 FLOPs a weight and token.
    model = players.job.model
    D, K = model.width, model.heads * model.head_width
    assert len(players.flops) == 7 * model.layers
    assert players.flops["blocks.0.attention.query"] == 2 * 16 * 128 * D * K
    assert players.flops["blocks.3.mlp.down"] == 2 * 16 * 128 * D * model.mlp


def test_a_predicted_step_is_that_of_the_slower_process(players):
    players.machine_s = {"float32": 0.3, "float16": 0.4, "int8": 0.5}
    graphs, total = players.graphs({}), 3 * sum(players.flops.values())
    for precision, rate, machine_s in (
        ("float32", 5e9, 0.3),
        ("float16", 8e9, 0.4),
        ("int8", 2e10, 0.5),
    ):
        strong, weak = total / 1e10 + 0.3, total / rate + machine_s
        step = replay(graphs, players.uniform(precision)).step_s
        assert step == pytest.approx(max(strong, weak))
    half = {n: "int8" if "mlp" in n else "float32" for n in players.flops}
    mlp = 3 * sum(f for n, f in players.flops.items() if "mlp" in n)
    weak = mlp / 2e10 + (total - mlp) / 5e9 + 0.5 * mlp / total + 0.3 * (1 - mlp / total)
    plan = {"strong": dict.fromkeys(half, "float32"), "weak": half}
    assert replay(graphs, plan).step_s == pytest.approx(max(weak, total / 1e10 + 0.3))


def test_losses_at_equal_time_lie_between_evaluations():
    rows = [
        {"way": "full", "step_s": 2.0, "curves": [[(10, 4.0), (20, 3.0)], [(10, 5.0), (20, 3.5)]]},
        {"way": "qsync", "step_s": 1.0, "curves": [[(10, 4.1), (20, 3.1)], [(10, 5.0), (20, 3.5)]]},
    ]
    full, fast = qsync_run.judged(rows)
    assert full["seconds"] == 20.0
    assert full["at_time"][0] == pytest.approx(4.5)  # ten steps
    assert fast["at_time"] == fast["at_steps"]
    assert full["at_steps"] == (pytest.approx(3.25), pytest.approx(12.706 * 0.25, rel=1e-3))


def test_steps_that_compile_are_not_timed(tmp_path):
    steps = [{"step": s, "step_time_s": 9.0 if s < 4 else 1.0} for s in range(1, 7)]
    lines = [*steps, {"step": 6, "eval_loss": 2.5}, {"step": 6, "injected_fault": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    assert qsync_run.step_times(tmp_path) == [1.0, 1.0, 1.0]
    assert qsync_run.losses(tmp_path) == [(6, 2.5)]


def test_rates_and_ways_that_do_not_exist_are_refused(tmp_path):
    base = PRESETS["tiny"]()
    with pytest.raises(UserError, match="ways=full,int4: 'int4' must be of full, float16"):
        dataclasses.replace(base, ways="full,int4")
    with pytest.raises(UserError, match="weak_rates lacks int8"):
        Players(dataclasses.replace(base, weak_rates="float32:5,float16:8"), tmp_path)
    with pytest.raises(UserError, match="strong_rates=fast: 'fast' must be a precision"):
        Players(dataclasses.replace(base, strong_rates="fast"), tmp_path)
