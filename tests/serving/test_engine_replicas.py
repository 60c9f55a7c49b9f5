"""An engine whose mesh has replicas gives the answers of an engine on one of them."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.data.tokenizer import ByteTokenizer
from megajax.serving import Engine, PagePool, SamplingParams, Scheduler
from megajax.serving.scheduler import Schedulers
from tests.plain_loop import CFG, SMALL, one_by_one, prompts_of, run_all, sharp
from tests.serving.test_engine import random_params
from tests.tiny import MODEL

ROOT = Path(__file__).parents[2]
# Pages run out.
OPTIONS = {
    "dtype": "float32",
    "prefill_chunk": 16,
    "page_size": 4,
    "pages": 18,
    "max_batch": 10,
    "context": 56,
    "decode_steps": 3,
    "tokenizer": ByteTokenizer(),
}


def engine_of(mesh, cfg=CFG, **options):
    mesh = MeshSpec(**mesh).build(jax.devices()[: int(np.prod([*mesh.values()]))])
    return Engine(cfg, sharp(cfg), mesh=mesh, **options)


def serve(engine, prompts, params):
    """Submits three requests before each step.

    Returns by request and index (tokens, log-probabilities, likeliest tokens, those of the prompt,
    reason)."""
    answers, todo = {}, list(zip(prompts, params, strict=True))
    while todo or engine.busy:
        for _ in range(min(3, len(todo))):
            engine.submit(*todo.pop(0))
        for o in engine.step():
            key = o.request_id, o.index
            tokens, logprobs, tops, *_ = answers.get(key, ([], [], [], None))
            scores = o.prompt_logprobs or (answers[key][3] if key in answers else None)
            answers[key] = (
                tokens + o.tokens,
                logprobs + o.logprobs,
                tops + (o.top_logprobs or []),
                scores,
                o.finish_reason,
            )
    assert engine.pool.in_use == 0
    assert engine.programs.compiled <= engine.programs.bound
    return answers


@pytest.mark.parametrize(
    ("numerics", "replicas", "count"),
    [
        ("exact", {"data": 4}, 16),
        pytest.param("exact", {"node": 2, "context": 2}, 60, marks=pytest.mark.slow),
        pytest.param("fast", {"data": 4}, 60, marks=pytest.mark.slow),
        pytest.param("fast", {"node": 2, "data": 2}, 60, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_one_replica(numerics, replicas, count):
    """Of requests with forks, constraints, penalties, scored prompts and all ends, while pages run
    out. Exact numerics: to the bit. Fast ones: the tokens, as the sizes of steps differ."""
    random = np.random.default_rng(3)
    prompts = prompts_of(count, 40, CFG.vocab)
    params = [random_params(random) for _ in prompts]
    options = OPTIONS | {"numerics": numerics}
    one = engine_of({"tensor": 2}, **options | {"pages": 36, "max_batch": 6})
    many = engine_of({**replicas, "tensor": 2}, **options)
    expected, answers = (serve(engine, prompts, params) for engine in (one, many))
    assert many.programs.bound <= one.programs.bound
    assert many.scheduler.preemptions > 0
    assert many.scheduler.prefix_hits > 0
    if numerics == "exact":
        assert answers == expected
        return
    assert answers.keys() == expected.keys()
    for key, (tokens, logprobs, _, _, reason) in answers.items():
        assert (tokens, reason) == (expected[key][0], expected[key][4])
        np.testing.assert_allclose(logprobs, expected[key][1], atol=1e-4)


def test_replicas_stay_idle_sleep_and_take_new_weights():
    """With weights that are cut over the replicas."""
    options = SMALL | {"prefill_chunk": 8, "max_batch": 4, "pages": 6, "page_size": 4}
    engine = engine_of({"data": 4}, MODEL, **options, zero="full")
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5]]
    expected = [one_by_one(MODEL, prompt, 5, 16) for prompt in prompts]
    assert run_all(engine, prompts[:1], 5) == expected[:1]
    assert engine.pool.capacity == 20
    request = engine.submit([1], SamplingParams(max_tokens=9))
    engine.step()
    engine.cancel(request)
    assert [o.finish_reason for o in engine.run()] == ["cancelled"]
    engine.sleep()
    engine.load(sharp(MODEL), 1)
    assert run_all(engine, prompts, 5) == expected
    with pytest.raises(UserError, match="the 5 pages hold 20 of 21"):  # of one replica
        engine.submit([1] * 9, SamplingParams(max_tokens=13))
    assert engine.programs.compiled == 1


def test_fewer_sequences_than_replicas_are_repeated():
    options = SMALL | {"max_batch": 3, "pages": 9, "page_size": 4}
    assert engine_of({"data": 4}, MODEL, **options).pool.capacity == 8


def test_requests_go_to_the_replica_with_the_fewest_sequences():
    pools = [PagePool(9, 4) for _ in range(3)]
    limits = {"max_batch": 2, "budget": 8, "chunk": 4, "context": 32}
    joint = Schedulers([Scheduler(p, **limits, replica=r) for r, p in enumerate(pools)], 9)
    made = [joint.add(i, [1, 2], max_tokens=9, n=n) for i, n in enumerate((1, 2, 1, 1, 1))]
    assert [{s.replica for s in each} for each in made] == [{0}, {1}, {2}, {0}, {2}]
    with pytest.raises(UserError, match="request 1 has not ended"):
        joint.add(1, [1], max_tokens=1)
    plan = joint.plan(4)
    assert [(p.sequence.slot, p.start, p.count) for p in plan.pieces] == [
        (slot, 0, 2) for slot in (0, 1, 2, 4, 5)
    ]
    joint.commit(plan, {piece.sequence: [3] for piece in plan.pieces})
    assert len(joint.running) == 6  # the second answer of request 1 has forked
    plan = joint.plan(4)  # it feeds the last token of the prompt, so nobody makes four steps
    assert plan.steps == 4 and plan.copies == ((10, 11),)
    joint.cancel(2), joint.cancel(4)  # replica 2 is idle
    drawn = {p.sequence: [3] * 4 for p in plan.pieces}
    following = joint.plan_after(plan)
    assert {p.sequence.replica for p in following.pieces} == {0, 1} and following.steps == 4
    joint.commit(plan, drawn)
    joint.add(5, [1, 2], max_tokens=9)
    assert joint.plan_after(following) is None  # request 5 could start
    joint.commit(following, drawn)
    assert joint.plan(4).steps == 1  # replica 2 computes a prompt


def digest(numerics):
    """Returns what the engine answers on four devices, as text."""
    random = np.random.default_rng(3)
    prompts = prompts_of(16, 40, CFG.vocab)
    params = [random_params(random) for _ in prompts]
    engine = engine_of({"data": 2, "tensor": 2}, **OPTIONS, numerics=numerics)
    return repr(sorted(serve(engine, prompts, params).items()))


def work(rank, port):
    """What a process of the job does; process 0 prints the answers."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    for numerics in ("fast", "exact"):
        text = digest(numerics)
        if rank == 0:
            print(text, flush=True)


@pytest.mark.slow
@pytest.mark.process
def test_replicas_in_two_processes_give_the_answers_of_one_process():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    module = "tests.serving.test_engine_replicas"
    job = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, rank, port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in "01"
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in job]
    finally:
        for process in job:
            process.kill()
    assert not any(process.returncode for process in job), outputs
    answers = [line for line in outputs[0][0].splitlines() if line.startswith("[((")]
    assert answers == [digest(numerics) for numerics in ("fast", "exact")]


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
