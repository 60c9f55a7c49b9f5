"""Seconds and memory of an iteration's stages: hand computations, monotony, and the command."""

import dataclasses
import functools
import itertools
import json
import math

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, Cluster, parse_cluster
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.systems.hybridflow import estimates, mapping
from megajax.systems.hybridflow.estimates import MODELS, Estimates, Iteration
from tests import forks
from tests.systems.hybridflow.test_mapping import brute_force

SMALL = DecoderConfig(
    layers=4, width=1024, heads=8, kv_heads=8, head_width=128, mlp=4096, vocab=32000, tied=False
)
WORK = Iteration(responses=16, prompt=128, response=128, rows=8, updates=2, logprobs=True)
A100 = CARDS["A100"]


@functools.cache
def small(memory: float = 6e9, work: Iteration = WORK) -> Estimates:
    """Four small models on two hosts of two GPUs that have so many bytes."""
    card = dataclasses.replace(A100, memory_bytes=memory)
    return Estimates(dict.fromkeys(MODELS, SMALL), work, Cluster(card, 2, 2))


def test_decoding_is_the_weights_and_the_cache_at_the_memory_s_bandwidth():
    model, tensor, batch = PRESETS["llama3_8b"](), 2, 4
    work = Iteration(responses=8, prompt=1024, response=1024, rows=8, updates=1)
    timed = Estimates({"actor": model}, work, parse_cluster("a100:1x4")).generation(4, tensor, 6e10)
    load = model.workload(1, 1)
    weights = 2 * (load.params - model.vocab * model.width) / tensor
    contexts = np.arange(1025, 2048, dtype=np.float64)  # of the 1,023 tokens after the first
    cache = 2 * 2 * batch * contexts * model.layers * model.kv_heads * model.head_width / tensor
    reading = np.sum((weights + cache) / (0.85 * A100.memory_bytes_per_s))

    def sums(tokens):  # an all-reduce of the residual stream after the embedding and each sublayer
        travel = 0.5 * 2 * tokens * model.width / A100.link_bytes_per_s
        return (2 * model.layers + 1) * (8.4e-6 + 2 * (3.4e-6 + travel))

    prompts = 2 * load.dense_params * 1024 / tensor / (0.7 * A100.peak("bfloat16")) + sums(1024)
    by_hand = reading + 1023 * sums(batch) + batch * prompts
    assert timed.seconds == pytest.approx(by_hand, rel=0.03)
    assert timed.layout == "data 2 x tensor 2, 4 sequences at a time"
    resident = 2 * load.params / tensor + cache[-1] / 2047 * 2048
    assert timed.used == pytest.approx(resident, rel=0.01)


def test_the_transition_is_the_paper_s_formula_over_the_links():
    model = PRESETS["llama3_8b"]()
    one = Estimates({"actor": model}, WORK, parse_cluster("a100:2x8"))
    nbytes = 2 * model.workload(1, 1).params
    shard, inside, hosts = nbytes / 2, 4, 2  # four devices a host share a rank of tensor 2
    near, far = (inside - 1) / inside * shard, (hosts - 1) / hosts * shard / inside
    assert near + far == pytest.approx((8 - 1) / 16 * nbytes)  # (d_g - 1) / (p t), table 2
    by_hand = 8.4e-6 + 3 * 3.4e-6 + near / 300e9 + 14e-6 + far / 25e9
    assert one.transition_s(16, 2) == pytest.approx(by_hand, rel=1e-9)
    assert one.transition_s(1, 1) == 0.0


def test_more_devices_and_memory_are_never_slower_and_more_work_never_faster():
    # On one host: between hosts, sending the weights of a small model costs more than is gained.
    models, host = dict.fromkeys(MODELS, SMALL), parse_cluster("a100:1x4")
    work = dataclasses.replace(WORK, prompt=1024, response=1024, rows=16, updates=1)
    ample = Estimates(models, work, host)
    longer = Estimates(models, dataclasses.replace(work, response=2048), host)
    for stage, model in itertools.product(mapping.STAGES, MODELS):
        seconds = [ample.seconds(stage, model, n) for n in (1, 2, 4)]
        assert seconds == sorted(seconds, reverse=True), (stage, model)
        assert longer.seconds(stage, model, 4) >= seconds[-1]
    for n, model in itertools.product((1, 2, 4), MODELS):
        rooms = (1e9, 2e9, 4e9, 8e9, 7e10)
        choices = [ample.choice(model, n, room) for room in rooms]
        totals = [choice.seconds if choice else math.inf for choice in choices]
        assert totals == sorted(totals, reverse=True) and math.isfinite(totals[-1])
    for size in (1, 2, 3):
        for group in itertools.combinations(MODELS, size):
            for more in set(MODELS) - set(group):
                bigger = tuple(m for m in MODELS if m in (*group, more))
                assert small().least(group) <= small().least(bigger)


def test_a_stage_that_a_model_has_not_is_free_and_one_that_cannot_run_is_infinite():
    ample = small(80e9)
    assert ample.seconds("generate", "critic", 4) == 0 == ample.seconds("train", "reward", 4)
    assert ample.seconds("prepare", "actor", 4) > 0
    rollout = small(80e9, dataclasses.replace(WORK, logprobs=False))
    assert rollout.seconds("prepare", "actor", 4) == 0
    assert ample.seconds("train", "actor", 3) == math.inf  # neither divides nor fills a host
    assert small(4e9).seconds("train", "actor", 1) == math.inf
    assert small(4e9).least(("actor",)) > 1


def test_everything_that_shares_a_device_fits_it():
    tight = small()
    for size in range(1, len(MODELS) + 1):
        for group in itertools.combinations(MODELS, size):
            if (n := tight.least(group)) > 4:
                continue
            rests = tight.resting(group, n)
            for model in group:
                choice = tight.chosen(model, n)
                assert choice is not None
                assert all(rests + t.used <= 6e9 - 2.5e9 for t in choice.stages.values())


@pytest.mark.parametrize("memory", [5e9, 6e9, 80e9])
def test_the_best_mapping_is_that_of_brute_force(memory):
    tight = small(memory)
    best = tight.best()
    total = brute_force(MODELS, 4, tight.seconds, tight.least)
    assert best.seconds == pytest.approx(total, rel=1e-12)
    assert sum(tight.stages(best).values()) == pytest.approx(best.seconds, rel=1e-12)
    colocated = ((*MODELS,),)
    if tight.least(MODELS) <= 4:
        assert tight.best([colocated]).seconds >= best.seconds


def test_models_that_cannot_be_named_are_refused():
    sizes = estimates.parse_models("critic:llama3_8b,actor:llama3_70b")
    assert sizes == {
        "actor": "llama3_70b",
        "critic": "llama3_8b",
        "reference": "llama3_70b",
        "reward": "llama3_8b",
    }
    assert list(estimates.parse_models("actor:gpt2")) == ["actor", "reference"]
    assert list(estimates.parse_models("actor:gpt2,reference:none,reward:nano")) == [
        "actor",
        "reward",
    ]
    for text, reason in (
        ("acto:gpt2", "'acto' must be one of actor, critic.* mean actor.*--models"),
        ("actor:gpt9", "'gpt9' must be one of nano, gpt2.*--models"),
        ("critic:gpt2", "no actor; e.g. actor:llama3_8b .--models"),
        ("actor:gpt2,actor:nano", "actor must be named once"),
        ("actor:none", "'none' must be one of"),
        ("actor", "'' must be one of"),
    ):
        with pytest.raises(UserError, match=reason):
            estimates.parse_models(text)
    with pytest.raises(UserError, match="= 2048 is beyond the 1024 positions of actor"):
        Estimates(
            {"actor": PRESETS["gpt2"]()}, Iteration(8, 1024, 1024, 8, 1), parse_cluster("a100:1x1")
        )
    with pytest.raises(
        UserError, match=r"no room for actor.*nearest: at least \d+ GPUs.*--cluster"
    ):
        small(3e9).best()


command = functools.partial(forks.run, "experiments/hybridflow.py")


@pytest.mark.process
def test_the_command_prints_the_placements(tmp_path):
    small_work = ("--rl.prompts=32", "--rl.max_tokens=64", "--rl.max_prompt=64")
    ask = ("--map", "--models=actor:llama3_1b,critic:qwen2_0p5b", "--cluster=a100:1x8")
    done = command(*ask, *small_work, f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "ESTIMATED" in done.stdout and "| standalone | actor: " in done.stdout
    result = json.loads((tmp_path / "mapping.json").read_text())
    assert result["layer"] == "estimated"
    names = [row["placement"] for row in result["rows"]]
    assert names == ["best", "colocate", "split", "standalone"]
    assert result["rows"][0]["iteration_s"] == min(r["iteration_s"] for r in result["rows"])
    assert {row["model"] for row in result["layouts"]} == set(MODELS)


@pytest.mark.process
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--map", "--models=actor:llama3_7b"), "'llama3_7b' must be one of"),
        (("--map", "--cluster=a1000:1x8"), "a1000 must be one of a100"),
        (("--map", "--cluster=a100:8"), "must be kind:HOSTSxGPUS"),
        (("--map", "--models=actor:llama3_70b", "--cluster=a100:1x8"), "nearest: at least"),
        (("--cluster=a100:1x8",), "cluster=a100:1x8 needs --map"),
    ],
)
def test_the_command_refuses_with_2(flags, reason):
    done = command(*flags)
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr
