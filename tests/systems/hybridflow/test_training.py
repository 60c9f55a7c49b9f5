"""Iterations of reinforcement learning: equal on every mesh, resumed to the bit, and learning."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.tree import named_leaves
from megajax.data import tokenizer as tokenizer_
from megajax.serving.engine import Engine
from megajax.serving.programs import OneMesh
from megajax.systems.hybridflow import (
    DataBatch,
    advantages,
    run,
    tasks,
    token_rewards,
    with_references,
    with_tokens,
)
from megajax.systems.hybridflow.command import Problems, PromptBatches, built
from megajax.systems.hybridflow.config import ALGORITHMS, nano, tiny
from megajax.systems.hybridflow.controller import Dataflow, Models, remax
from megajax.systems.hybridflow.worker import Actor, Critic, response_text, token_weights

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tokenizer(tmp_path):
    tokenizer_.write_characters(tasks.ALPHABET, tmp_path / "tokenizer.json")
    return tokenizer_.open_tokenizer(str(tmp_path / "tokenizer.json"))


def small(**over):
    """tiny on one device, but for these flags (dots as double underscores)."""
    flags = {
        "mesh.data": 1,
        "mesh.tensor": 1,
        "generate.tensor": 1,
        "train.steps": 2,
        "rl.check_every": 0,
        "rl.prompts": 4,
    }
    return config.override(tiny(), flags | {k.replace("__", "."): v for k, v in over.items()})


def test_the_tasks_alphabet(tokenizer):
    text = "12+3*(4-5)=,/ 67890"
    ids = tokenizer_.prompt_ids(tokenizer, text)
    assert ids[0] == tokenizer.begin == 0 and len(ids) == len(text) + 1
    assert tokenizer.decode(ids[1:]) == text and tokenizer.ends == (1,)
    assert tokenizer.vocab == len(tasks.ALPHABET) + 2


def test_every_token_of_a_response_but_its_end_leaves_text(tokenizer):
    """Else a bonus on entropy fills right answers with tokens that cost nothing."""
    assert response_text([3, 0, 4, 1], tokenizer) == "1<|bos|>2"
    assert response_text([3, 21, 4, 1], tokenizer) == "12<|21|>"  # the model's padding
    assert response_text([3, 4, 5], tokenizer) == "123" and response_text([], tokenizer) == ""
    letters = tokenizer_.ByteTokenizer()
    assert response_text([97, 256, 98, 258, 257], letters) == "a<|256|>b<|258|>"
    assert letters.decode([97, 256, 259]) == "a" and letters.decode([97, 259], True) == "a"


def test_weights_of_tokens_are_the_aggregations():
    """Sums of weighted losses are losses.aggregate of the padded rows."""
    from megajax.systems.hybridflow import losses

    lengths, most = [3, 1, 0, 5], 6
    mask = np.arange(most)[None] < np.array(lengths)[:, None]
    table = np.random.default_rng(0).standard_normal(mask.shape).astype(np.float32)
    for how in losses.AGGREGATIONS:
        want = float(losses.aggregate(table, mask, how))
        weights = token_weights(lengths, how, most)
        ours = sum((w * x[: len(w)]).sum() for w, x in zip(weights, table, strict=True))
        assert ours == pytest.approx(want, rel=1e-5), how


def test_remax_compares_a_response_with_its_own_prompts_greedy_one():
    """Of four prompts, the reward of one response and of one greedy response failed."""
    cfg = small(algorithm="remax", rl__on_error="skip", rl__n=2, rl__kl="none")
    scores = np.array([1.0, 2.0, 3.0, np.nan, 5.0, 6.0, 7.0, 8.0], np.float32)
    drawn = DataBatch(
        {
            "groups": np.repeat(np.arange(4), 2),
            "response_ids": [[3, 1]] * 8,
            "logprobs": [np.zeros(2, np.float32)] * 8,
            "finish": ["stop"] * 8,
        }
    )
    reward, actor, sent = MagicMock(), MagicMock(), []
    reward.score.return_value.result.return_value = {"scores": scores}
    reward.workers = [MagicMock(errors={3: ValueError()}, metrics={})]
    actor.update = lambda batch, iteration: sent.append(batch)
    actor.logprobs(drawn).result = lambda: DataBatch({"trainer_logprobs": [np.zeros(2)] * 4})
    flow = MagicMock(cfg=cfg, _groups={"reward": reward, "actor": actor})
    flow._generate.return_value = drawn
    flow._scores = lambda *args: Dataflow._scores(flow, *args)
    flow._scored = lambda *args: Dataflow._scored(flow, *args)
    greedy = np.array([10.0, 20.0, np.nan, 40.0], np.float32)
    models = Models(
        cfg,
        actor,
        reward,
        None,
        None,
        lambda p: Dataflow._rollouts(flow, p, 1, {}),
        lambda p: greedy,
    )
    remax(models, DataBatch({"prompts": list("abcd")}))
    gains = [row[0] for row in sent[0]["advantages"]]
    assert gains == [1.0 - 10, 2.0 - 10, 7.0 - 40, 8.0 - 40]
    greedy[:] = np.nan
    with pytest.raises(UserError, match="no response has a baseline"):
        remax(models, DataBatch({"prompts": list("abcd")}))


def rollouts(cfg):
    """Responses of made-up policies, two to a prompt."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, cfg.rl.max_tokens + 1, 16)
    prompts = [[0, *random.integers(2, 21, 4)] for _ in range(8)]
    return DataBatch(
        {
            "prompt_ids": [prompts[i // 2] for i in range(16)],
            "response_ids": [[int(t) for t in random.integers(1, 21, n)] for n in lengths],
            "old_logprobs": [np.float32(-2.5 - random.random(n)) for n in lengths],
            "advantages": [np.float32(random.standard_normal(n)) for n in lengths],
            "old_values": [np.float32(random.standard_normal(n)) for n in lengths],
            "returns": [np.float32(random.standard_normal(n)) for n in lengths],
        }
    )


def five_updates(tokenizer, **over):
    """Returns (losses of actor and critic, their parameters) after five updates."""
    cfg = small(algorithm="ppo", rl__minibatches=1, train__steps=5, train__global_batch=8, **over)
    devices = int(np.prod([n for n in dataclasses.asdict(cfg.mesh).values() if n]))
    used = jax.devices()[:devices]
    batch, losses, params = rollouts(cfg), [], {}
    for worker in (Actor(cfg, used, tokenizer), Critic(cfg, used)):
        worker.state = worker.step.init(0)
        losses += [worker.update(batch, i)["loss"] for i in range(5)]
        natural = worker.step.storage.natural(worker.state.params)
        params |= {f"{type(worker).__name__}.{n}": np.asarray(x) for n, x in named_leaves(natural)}
    return losses, params


MESHES = {
    "data 4": {"mesh__data": 4},
    "tensor 4": {"mesh__tensor": 4},
    "context 2": {"mesh__context": 2},
    "pipe 2, data 2": {"mesh__pipe": 2, "mesh__data": 2, "pipeline__microbatches": 2},
    "accumulate 4": {"train__accumulate": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_five_updates_are_equal_on_every_mesh(name, tokenizer):
    losses, params = five_updates(tokenizer)
    ours, theirs = five_updates(tokenizer, **MESHES[name])
    np.testing.assert_allclose(ours, losses, atol=1e-5)
    for leaf, x in params.items():
        np.testing.assert_allclose(theirs[leaf], x, atol=1e-4, err_msg=leaf)


def test_an_iteration_of_ppo_is_recorded_under_verls_names():
    history = run("gae", small(algorithm="ppo", rl__kl="reward", rl__kl_target=0.05))
    assert len(history) == 2
    names = """actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy
        actor/grad_norm critic/vf_loss critic/vf_clipfrac critic/vf_explained_var
        critic/score/mean critic/advantages/max critic/returns/min critic/values/mean
        response_length/mean response_length/clip_ratio prompt_length/max timing_s/gen
        timing_s/reward timing_s/ref timing_s/values timing_s/update_critic timing_s/update_actor
        timing_s/update_weights timing_s/step timing_s/waiting/update_critic
        timing_per_token_ms/gen perf/throughput perf/total_num_tokens actor/reward_kl
        actor/kl_coefficient actor/logprob_difference loss grad_norm leaf_norms"""
    assert set(names.split()) <= set(history[0])
    assert history[0]["actor/reward_kl"] == pytest.approx(0, abs=1e-5)  # it is the reference
    assert history[0]["actor/logprob_difference"] < 1e-5
    # twice 16 samples below a target of 0.05: 20 % of 16 / 10,000 less each
    assert history[1]["actor/kl_coefficient"] == pytest.approx(0.001 * (1 - 0.2 * 16 / 1e4))


def test_responses_that_the_engine_did_not_end_are_left_out(monkeypatch, caplog):
    """The logits are no numbers for the second prompt of iteration 1, for all of iteration 2."""
    cfg = small(algorithm="ppo", rl__kl="reward", rl__kl_target=0.05)
    plain, struck = Engine.run, [1]

    def broken(engine):
        for output in plain(engine):
            if output.request_id in struck:
                nan = [math.nan] * len(output.logprobs)
                output = dataclasses.replace(output, logprobs=nan, finish_reason="error")
            yield output

    monkeypatch.setattr(Engine, "run", broken)
    problems = Problems(cfg)
    flow, batches = built(cfg, cfg.mesh.build(), problems), PromptBatches(cfg, problems.prompts)
    try:
        state, metrics = flow.step(flow.init(0), next(batches))
        assert metrics["rollout/unfinished_prompts"] == 1 and metrics["reward/failed_prompts"] == 0
        assert np.isfinite(metrics["loss"]) and "ended a response with 'error'" in caplog.text
        assert {*np.asarray(flow.last["groups"])} == {0, 2, 3} and len(flow.last) == 12
        struck += [0, 2, 3]
        with pytest.raises(
            UserError, match="iteration 2: no prompt has .* to learn from: 4 of which"
        ):
            flow.step(state, next(batches))
    finally:
        flow.close()


def test_a_recipe_of_the_documents_and_recipes_that_lack_something():
    page = (ROOT / "docs" / "rl.md").read_text().split("<!-- recipe.py -->\n```python\n")[1]
    code = page.split("for metrics in")[0].replace("mesh.start(", "dict(")
    names: dict = {}
    exec(compile(code, "recipe.py", "exec"), names)
    cfg = small(train__steps=1, rl__clip_high=0.5, rl__overlong=2, algorithm="dapo")
    assert cfg.rule.clip_high == 0.5 and cfg.rule.aggregation == "token-mean"
    assert math.isfinite(run(names["median"], cfg)[0]["actor/pg_loss"])
    for recipe, said in (
        ("grppo", "Did you mean grpo"),
        (lambda models, prompts: models.rollouts(prompts), "a recipe returns"),
        (
            lambda models, prompts: (b := models.rollouts(prompts), [models.actor.update(b, 1)]),
            "with_references",
        ),
    ):
        with pytest.raises(UserError, match=said):
            run(recipe, cfg)


@pytest.mark.slow
def test_fewer_responses_than_minibatches_make_fewer_updates(tmp_path):
    """One of four responses has a reward; entropy is not averaged with that of no token."""
    (tmp_path / "one.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if extra_info['index'] == 0 else None\n"
    )
    flags = {"algorithm": "ppo", "rl__n": 1, "rl__on_error": "skip", "train__steps": 1}
    flags |= {"reward": f"{tmp_path}/one.py:f", "cache_dir": str(tmp_path)}
    one, two = (run("gae", small(**flags, rl__minibatches=n))[0] for n in (1, 2))
    for name in ("loss", "grad_norm", "actor/entropy", "critic/vf_loss"):
        assert one[name] == two[name], name
    assert one["reward/failed_prompts"] == 3


@pytest.mark.slow
def test_sequences_without_pages_wait_and_draw_the_same(monkeypatch):
    """Three pages for each sequence: with four, one runs at a time; two hold none."""
    flags = {"rl__max_tokens": 40, "train__seq_len": 48, "generate__numerics": "exact"}
    cfg = small(**flags, train__steps=1)
    plenty = run("grpo", cfg)[0]
    monkeypatch.setattr(OneMesh, "default_pages", lambda *args: 4)
    few = run("grpo", cfg)[0]
    for name in ("loss", "grad_norm", "critic/score/mean", "response_length/mean"):
        assert few[name] == plenty[name], name
    monkeypatch.setattr(OneMesh, "default_pages", lambda *args: 2)
    words = "= 46: the devices have memory for .* of 17 tokens; nearest: rl.max_tokens=11 "
    with pytest.raises(UserError, match=words):
        run("grpo", cfg)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_algorithms_run(name):
    history = run(ALGORITHMS[name].estimator, small(algorithm=name, rl__overlong=2))
    assert all(np.isfinite(h["loss"]) and h["grad_norm"] > 0 for h in history)


@pytest.mark.slow
def test_split_models_learn_as_colocated_ones():
    flags = {"algorithm": "ppo", "mesh__data": 2, "mesh__tensor": 2, "generate__tensor": 2}
    one = run("gae", small(**flags))
    parts = run("gae", small(**flags, placement="split"))
    for a, b in zip(one, parts, strict=True):
        for key in ("loss", "critic/score/mean", "critic/vf_loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], abs=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_have_the_trainers_log_probabilities_to_the_bit(dtype):
    flags = {"mesh__data": 2, "mesh__tensor": 4, "generate__tensor": 2, "rl__check_every": 1}
    history = run("grpo", small(**flags, generate__numerics="exact", train__dtype=dtype))
    assert [h["rollout/logprob_unlike_tokens"] for h in history] == [0, 0]


def command(*flags, check=True):
    return subprocess.run(
        [sys.executable, ROOT / "experiments" / "hybridflow.py", "--preset=tiny", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=check,
    )


def last_exact(task, tmp_path, *flags):
    """Returns the fraction of held-out greedy answers that are exact after a run of nano."""
    script = ROOT / "experiments" / "hybridflow.py"
    folders = f"--run_dir={tmp_path}/a", f"--cache_dir={tmp_path}"
    subprocess.run(
        [sys.executable, script, f"--task={task}", *folders, *flags],
        capture_output=True,
        cwd=ROOT,
        check=True,
        env=os.environ | {"XLA_FLAGS": ""},  # optimised programs: hundreds of iterations
    )
    rows = map(json.loads, (tmp_path / "a" / "metrics.jsonl").read_text().splitlines())
    return [r[f"val-core/{task}/exact"] for r in rows if f"val-core/{task}/exact" in r][-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_three_digits_are_copied(algorithm, seed, tmp_path):
    flags = f"--algorithm={algorithm}", f"--train.seed={seed}"
    assert last_exact("copy:3", tmp_path, *flags) >= 0.95


@pytest.mark.slow
def test_three_digits_are_sorted(tmp_path):
    """The command of docs/rl.md."""
    assert last_exact("sort:3", tmp_path, "--train.steps=200") >= 0.85


def nano_on_one_device(**over):
    """nano on one device, without decay of the learning rate, but for these flags."""
    flags = {"mesh.data": 1, "mesh.tensor": 1, "generate.tensor": 1, "optim.schedule": "constant"}
    return config.override(nano(), flags | {k.replace("__", "."): v for k, v in over.items()})


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["same", "chance", None])
def test_only_a_reward_that_judges_the_answer_teaches(reward, tmp_path):
    """60 iterations with rewards of 1, with random rewards, and with the task's own."""
    file = tmp_path / "odd.py"
    file.write_text(
        "import random\n"
        "draws = random.Random(0)\n"
        "def same(data_source, solution_str, ground_truth): return 1.0\n"
        "def chance(data_source, solution_str, ground_truth): return draws.random()\n"
    )
    flags = {"reward": f"{file}:{reward}"} if reward else {}
    history = run("grpo", nano_on_one_device(train__steps=60, cache_dir=str(tmp_path), **flags))
    exact = [h["val-core/copy:3/exact"] for h in history if "val-core/copy:3/exact" in h]
    assert len(exact) == 3
    if reward is None:
        assert exact[-1] >= 0.3
        return
    assert max(exact) <= 0.02  # of 128 answers; a guess is right once in 10,000 times
    advantages_ = [max(h["critic/advantages/max"], -h["critic/advantages/min"]) for h in history]
    assert (max(advantages_) == 0) == (reward == "same")


@pytest.mark.slow
def test_a_reversed_advantage_unlearns():
    """A recipe of a user: GRPO for 40 iterations, then the negative of its advantages."""

    def reversed_late(models, prompts):
        batch = with_references(models, models.rollouts(prompts))
        rewards, mask = token_rewards(models, batch)
        gains = advantages.grpo(rewards, mask, batch["groups"])
        sign = 1 if models.iteration <= 40 else -1
        batch = with_tokens(batch, "advantages", sign * gains)
        return batch, [models.actor.update(batch, models.iteration)]

    history = run(reversed_late, nano_on_one_device(train__steps=55))
    scores = [h["critic/score/mean"] for h in history]
    best, last = np.mean(scores[35:40]), np.mean(scores[-5:])
    assert best >= 0.4 and last <= best / 2, scores
