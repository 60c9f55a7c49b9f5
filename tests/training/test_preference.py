"""DPO and reward models: losses against NumPy in float64, whole steps against another path."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.data.loader import Loader, finite_batches
from megajax.models.heads import critic_params
from megajax.training import preference
from megajax.training.config import Config, TrainConfig
from megajax.training.optim import OptimConfig
from megajax.training.preference import PairRows, Pairs, Side
from megajax.training.scores import logprobs, values
from megajax.training.step import make_train_step
from tests.tiny import MODEL
from tests.tolerances import LOSSES

ROOT = pathlib.Path(__file__).parents[2]
S, ROWS, BETA = 32, 8, 0.5


def pairs_of(count, seed=0, **more):
    """Pairs whose chosen answers count upwards, the rejected ones downwards, of any lengths."""
    random, sides = np.random.default_rng(seed), []
    for _ in range(count):
        asked = random.integers(0, 61, random.integers(2, 6))
        pair = []
        for step in (1, -1):
            answer = (asked[-1] + step * np.arange(1, random.integers(3, 9))) % 61
            tokens = np.concatenate([asked, answer]).astype(np.int32)
            pair.append(Side(tokens, np.arange(len(tokens)) >= len(asked)))
        sides.append((pair[0], pair[1]))
    return Pairs(sides, **more)


def sigmoid_loss(margin):
    return np.log1p(np.exp(-np.float64(margin)))


def step_of(task, accumulate=1, model=MODEL, **mesh):
    train = TrainConfig(steps=20, global_batch=ROWS, seq_len=S, accumulate=accumulate)
    cfg = Config(model=model, train=train, optim=OptimConfig(lr=3e-3, warmup=2))
    devices = MeshSpec(**mesh).build(jax.devices()[: int(np.prod([*mesh.values()]))])
    return make_train_step(cfg, devices, task(model, train))


def dpo(model, train):
    return preference.dpo_task(model, train, BETA)


def learn(step, pairs, steps):
    state, batches, seen = step.init(0), Loader(PairRows(pairs, S, 0), step.abstract_batch), []
    for _ in range(steps):
        state, metrics = step.step(state, next(batches))
        seen.append({k: float(x) for k, x in metrics.items() if x.ndim == 0})
    return seen, state


def test_a_row_holds_both_sides():
    sides = (
        Side(np.int32([5, 6, 7]), np.array([False, True, True])),
        Side(np.int32([5, 9]), np.array([False, True])),
    )
    row = Pairs([sides], np.float32([[-1, -2]]), has_ends=True).row(0, 7)
    expected = {
        "tokens": [5, 6, 7, 5, 9, 0, 0],
        "targets": [6, 7, -1, 9, -1, -1, -1],
        "segments": [0, 0, 0, 1, 1, -1, -1],
        "positions": [0, 1, 2, 0, 1, 0, 0],
        "ends": [0, 0, 1, 0, 1, 0, 0],
        "reference_chosen": -1,
        "reference_rejected": -2,
    }
    assert {k: x.tolist() for k, x in row.items()} == expected


def test_losses_and_gradients_are_the_formula_in_float64():
    """Rows without a pair and places that do not count, of NaN, change nothing."""
    random = np.random.default_rng(3)
    x, targets = random.standard_normal((4, 12)), random.integers(0, 9, (4, 12))
    segments = np.repeat([[0, 1, -1]], 4, 0).repeat(4, 1)
    counts = (random.random((4, 12)) < 0.6) & (segments >= 0)
    counts[0, [0, 5]], counts[3] = True, False
    targets, x = np.where(counts, targets, -1), np.where(counts, x, np.nan)

    def numpy(x):
        sides = [np.where(counts & (segments == i), x, 0).sum(1) for i in (0, 1)]
        return sides, sigmoid_loss(sides[0] - sides[1])[:3].sum()

    batch = {"targets": jnp.int32(targets), "segments": jnp.int32(segments)}

    def ours(x):
        sides = preference.of_sides(x, batch["targets"] >= 0, batch)
        return preference.pair_sums(*sides, batch)

    sums = ours(jnp.float32(x))
    (chosen, rejected), loss = numpy(x)
    assert int(sums.count) == int(preference.count_pairs(batch)) == 3
    np.testing.assert_allclose(sums.preference, loss, rtol=1e-6)
    np.testing.assert_allclose(sums.chosen, chosen[:3].sum(), rtol=1e-5)
    assert int(sums.terms["right"]) == (chosen > rejected)[:3].sum()
    gradient = np.asarray(jax.grad(lambda x: ours(x).preference)(jnp.float32(x)))
    assert (gradient[~counts] == 0).all()
    move = random.standard_normal(x.shape)
    near = [numpy(x + e * move)[1] for e in (1e-6, -1e-6)]
    assert (gradient * move).sum() == pytest.approx((near[0] - near[1]) / 2e-6, rel=1e-4)


@pytest.mark.slow
def test_dpo_is_that_of_each_answer_alone():
    """A batch with two rows that only fill it, against log probabilities that another program gives
    each side alone and the formula of the paper in float64."""
    pairs = pairs_of(6)
    step = step_of(dpo, data=2)
    state = step.init(0)
    params = jax.device_get(state.params)
    reference = preference.reference_logprobs(MODEL, params, pairs, step.layout.mesh, "float32")
    random = np.random.default_rng(1)
    pairs.reference = reference + random.standard_normal(reference.shape).astype(np.float32)
    (batch,) = finite_batches(
        [(PairRows(pairs, S, None), i) for i in range(6)], step.abstract_eval_batch
    )
    sums = step.evaluate(state.params, batch)
    rewards = []
    for (chosen, rejected), known in zip(pairs.sides, pairs.reference, strict=True):
        for side, before in zip((chosen, rejected), known, strict=True):
            (alone,) = logprobs(MODEL, params, [side.tokens.tolist()])
            rewards.append(BETA * (np.float64(alone)[side.mask].sum() - before))
    chosen, rejected = np.reshape(rewards, (-1, 2)).T
    assert int(sums.count) == 6
    expected = {
        "loss": sigmoid_loss(chosen - rejected).mean(),
        "accuracy": (chosen > rejected).mean(),
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margin": (chosen - rejected).mean(),
    }
    seen = step.metrics(sums, float(sums.count))
    assert {*seen} == {*expected}
    for name, x in expected.items():
        np.testing.assert_allclose(seen[name], x, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_policy_that_is_its_reference_has_no_reward():
    """The first loss is log 2; twenty steps later held-out pairs are told apart."""
    step = step_of(dpo, data=2)
    state = step.init(0)
    params = jax.device_get(state.params)
    train, held = pairs_of(64), pairs_of(16, seed=7)
    for pairs in (train, held):
        pairs.reference = preference.reference_logprobs(
            MODEL, params, pairs, step.layout.mesh, "float32"
        )
    seen, state = learn(step, train, 20)
    assert seen[0]["loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert abs(seen[0]["rewards/chosen"]) < 1e-4
    figures = []
    for weights in (params, state.params):
        weights = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), weights, state.params)
        sums = [
            step.evaluate(weights, batch)
            for batch in finite_batches(
                [(PairRows(held, S, None), i) for i in range(16)], step.abstract_eval_batch
            )
        ]
        figures.append(step.metrics(sum(sums[1:], sums[0]), 16.0))
    assert float(figures[0]["loss"]) == pytest.approx(np.log(2), abs=1e-4)
    assert float(figures[1]["accuracy"]) > 0.8 and float(figures[1]["loss"]) < 0.5


@pytest.mark.slow
def test_a_reward_model_scores_the_last_token():
    pairs = pairs_of(8, has_ends=True)
    step = step_of(preference.reward_task, data=2)
    state = step.init(0)
    random = np.random.default_rng(2)
    value = np.float32(random.standard_normal(state.params["value"].shape))
    fresh = jax.device_get(state.params) | {"value": value}
    params = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), fresh, state.params)
    batch = next(Loader(PairRows(pairs, S, None), step.abstract_batch))
    sums = step.evaluate(params, batch)
    model = dataclasses.replace(MODEL, tied=True)
    alone = values(model, fresh, [s.tokens.tolist() for pair in pairs.sides for s in pair])
    chosen, rejected = np.reshape([float(x[-1]) for x in alone], (-1, 2)).astype(np.float64).T
    seen = step.metrics(sums, float(sums.count))
    np.testing.assert_allclose(seen["loss"], sigmoid_loss(chosen - rejected).mean(), rtol=1e-5)
    np.testing.assert_allclose(seen["accuracy"], (chosen > rejected).mean())
    assert {*critic_params(fresh, fresh)} == {*fresh}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "reward"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 4, "tensor": 2},
        {"data": 2, "accumulate": 2},
        {"context": 2, "data": 2},
        {"pipe": 2, "data": 2},
    ],
    ids=str,
)
def test_each_mesh_learns_as_one_device(objective, mesh):
    task, pairs = (dpo, pairs_of(40)) if objective == "dpo" else (preference.reward_task, None)
    if pairs is None:
        pairs = pairs_of(40, has_ends=True)
    else:
        pairs.reference = np.full((40, 2), -20, np.float32)
    control, ends = learn(step_of(task, data=1), pairs, 5)
    step = step_of(task, **mesh)
    state, seen = step.init(0), []
    batches = Loader(PairRows(pairs, S, 0), step.abstract_batch, order=step.order)
    for _ in range(5):
        state, metrics = step.step(state, next(batches))
        seen.append({k: float(x) for k, x in metrics.items() if x.ndim == 0})
    for ours, theirs in zip(seen, control, strict=True):
        for key in theirs:
            np.testing.assert_allclose(ours[key], theirs[key], atol=LOSSES, err_msg=key)
    for (leaf, x), (_, y) in zip(
        named_leaves(step.storage.natural(state.params)), named_leaves(ends.params), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=5e-3, err_msg=leaf)


# ---- pairs of files

ASKED = [{"role": "user", "content": "two?"}]
ONE, TWO = ([{"role": "assistant", "content": x}] for x in ("1", "2"))


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "two?", "chosen": "2", "rejected": "1"},
        {"prompt": ASKED, "chosen": TWO, "rejected": ONE},
        {"chosen": ASKED + TWO, "rejected": ASKED + ONE},
        {"prompt": "two?", "chosen": ASKED + TWO, "rejected": ASKED + ONE},
        {"prompt": ASKED, "chosen": "2", "rejected": ONE, "score_chosen": 9.5},
    ],
)
def test_each_form_of_a_pair(value):
    made = preference.pair(value, "a.jsonl line 1")
    assert (made.chosen, made.rejected, made.shared) == (ASKED + TWO, ASKED + ONE, 1)
    assert made.messages == ASKED + TWO + ONE


@pytest.mark.parametrize(
    "value, said",
    [
        ([1], "it must be an object with chosen and rejected"),
        ({"messages": ASKED}, "it has no chosen and no rejected; its members: 'messages'"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "it has no rejected"),
        ({"chosen": "b", "rejected": "c"}, "chosen is an answer, and there is no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt must be a text or a list of"),
        ({"prompt": "a", "chosen": [7], "rejected": "c"}, "chosen: message 0 must have a role"),
        ({"chosen": ASKED, "rejected": ASKED + ONE}, "chosen must end with a message of the ass"),
        (
            {"chosen": ASKED + TWO, "rejected": [{"role": "user", "content": "b"}, *ONE]},
            "begin with different messages",
        ),
        (
            {"chosen": ASKED + TWO, "rejected": ASKED + TWO + ASKED + ONE},
            "one of chosen and rejected is the beginning of the other",
        ),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "c"}, "a lone surrogate"),
    ],
)
def test_a_pair_of_another_form_is_refused(value, said):
    with pytest.raises(UserError, match=f"a.jsonl line 1: .*{said}.*--data.source"):
        preference.pair(value, "a.jsonl line 1")


@pytest.mark.slow
@pytest.mark.process
def test_a_run_of_dpo_moves_held_out_pairs_and_resumes(tmp_path):
    """The command, in its own processes: the reference is computed once and kept; a run that has
    lost it is refused."""
    pairs = [preference.made_pair(k) for k in range(0, 300)]
    pairs[0] |= {"rejected": pairs[0]["chosen"]}  # equal sides
    lines = [json.dumps(pair) for pair in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    flags = ["--preset=chat", "--objective=dpo", f"--data.source={tmp_path / 'pairs.jsonl'}"]
    flags += [f"--cache_dir={tmp_path / 'cache'}", f"--run_dir={tmp_path / 'run'}", "--emulate=2"]
    flags += ["--optim.lr=2e-3", "--model.layers=2", "--eval.every=4", "--train.steps=8"]
    flags += ["--optim.schedule=constant"]

    def run(*more):
        command = [sys.executable, ROOT / "experiments" / "finetune.py", *flags, *more]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    refused = run()
    assert refused.returncode == 2 and "line 1: chosen and rejected are equal" in refused.stderr
    done = run("--data.faulty=skip")
    assert done.returncode == 0, done.stderr
    assert "1 pairs that cannot be used are left out" in done.stdout
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-3)
    held = [row for row in rows if "eval_accuracy" in row]
    assert held[-1]["eval_accuracy"] > 0.9 and held[-1]["eval_loss"] < 0.5
    more = run("--data.faulty=skip", "--train.steps=10")
    assert more.returncode == 0 and "resumed after step 8" in more.stdout, more.stderr
    assert "computing the log probabilities" not in more.stdout
    (tmp_path / "run" / preference.STORED).unlink()
    lost = run("--data.faulty=skip", "--train.steps=12")
    assert lost.returncode == 2 and "reference.npz is missing or of other pairs" in lost.stderr
