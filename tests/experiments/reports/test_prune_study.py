"""A chain of stages: masks grow, pruned weights are 0 after AdamW, a stopped chain goes on."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from experiments.reports import tilewise
from experiments.reports.tilewise import METHODS, Subject, Trainer, Training
from megajax.models import decoder
from megajax.training.optim import OptimConfig, make_schedule
from tests.tiny import MODEL, host_batch


@pytest.fixture(scope="module")
def trainer():
    cfg = dataclasses.replace(MODEL, layers=1, width=64, heads=2, kv_heads=2, head_width=32)
    subject = Subject(
        "text",
        cfg,
        decoder.parts(cfg),
        lambda seed, step: host_batch(1000 * seed + step, rows=4),
        [host_batch(-i + 10**6, rows=4) for i in range(2)],
    )
    return Trainer(subject, Training(steps=6, tune=3, lr=3e-3, tune_lr=1e-3))


def flat(tree):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


def test_a_chain_prunes_further_and_goes_on_from_a_saved_state_bit_for_bit(trainer, tmp_path):
    dense = trainer.dense(0)
    assert int(dense.step) == 6
    former, method = None, METHODS["TW-1"]
    for state, row in tilewise.chain(trainer, dense, 0, method, (0.5, 0.75)):
        tilewise.save_state(tmp_path / f"{row['goal']}.npz", state)
        masks = flat(state.opt.masks)
        weights = flat(tilewise.pick(state.params, trainer.names))
        assert (weights[~masks] == 0).all() and (weights[masks] != 0).all()
        assert row["sparsity"] == pytest.approx(1 - masks.mean())
        assert abs(row["sparsity"] - row["goal"]) < 0.02
        assert former is None or not (masks & ~former).any()  # nested
        former = masks
    assert int(state.step) == 6 + 2 * 3
    assert row["loss"] == trainer.measure(state.params)["loss"]
    begin = tilewise.load(tmp_path / "0.5.npz", trainer.abstract())
    ((again, other),) = tilewise.chain(trainer, begin, 0, method, (0.75,))
    assert row == other
    chex.assert_trees_all_equal(again, state)


def test_the_loss_is_the_mean_over_held_out_predictions(trainer):
    params = trainer.start(0).params
    loss, right, count = 0.0, 0, 0
    for batch in trainer.subject.held_out:
        logits = np.asarray(trainer.subject.parts.logits(params, batch), np.float64)
        for z_SV, t_S in zip(logits, batch["targets"], strict=True):
            for z_V, t in zip(z_SV, t_S, strict=True):
                if t >= 0:
                    z_V = z_V[: MODEL.vocab]
                    loss -= z_V[t] - np.log(np.exp(z_V - z_V.max()).sum()) - z_V.max()
                    right += int(z_V.argmax() == t)
                    count += 1
    measured = trainer.measure(params)
    assert measured["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert measured["accuracy"] == pytest.approx(right / count)


def test_rates_begin_anew_with_each_stage():
    training = Training(steps=40, tune=10, lr=2e-3, tune_lr=1e-3)
    rates = [training.rate(step) for step in range(60)]
    cosine = make_schedule(OptimConfig(lr=2e-3, schedule="cosine", warmup=10), 40)
    assert rates[39] == pytest.approx(float(cosine(39)))
    assert rates[40] == rates[50] == 1e-3
    table = [float(training.schedule()(np.int32(step))) for step in (0, 39, 40, 49, 50, 109)]
    assert table == [np.float32(training.rate(step)) for step in (0, 39, 40, 49, 50, 109)]
    assert rates[49] == pytest.approx(1e-3 * (1 - 0.9 * 0.9))


def test_units_are_a_quarter_of_the_papers():
    assert METHODS["TW-64"].shrunk == (32, 16)
    assert METHODS["TW-8"].shrunk == (32, 2)
    assert METHODS["TW-1"].shrunk == (32, 1)
    assert METHODS["BW"].shrunk == (8, 8)
