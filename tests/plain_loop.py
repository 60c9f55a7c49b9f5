"""The oracle of the engine's tests: a loop that runs the whole forward pass for every token."""

import dataclasses
import functools

import jax
import numpy as np

from megajax.core.mesh import MeshSpec
from megajax.models import decoder
from megajax.serving import Engine, SamplingParams
from tests.tiny import MODEL

CFG = dataclasses.replace(MODEL, max_positions=320)
# As few and as small programs as possible: steps of 8 and 16 tokens.
SMALL = {"dtype": "float32", "prefill_chunk": 16, "max_batch": 6}


@functools.cache
def sharp(cfg):
    """Parameters large enough that the likeliest token is clear."""
    params = jax.jit(decoder.parts(cfg).init)(jax.random.key(0))
    return jax.tree.map(lambda x: 4 * x, params)


@functools.cache
def _logits(cfg):
    return jax.jit(decoder.parts(cfg).logits)


def one_by_one(cfg, prompt, new, row, params=None):
    """The oracle: run a whole row again for every token. What comes later is masked."""
    tokens, params = list(prompt), sharp(cfg) if params is None else params
    for _ in range(new):
        ids = np.zeros((1, row), np.int32)
        ids[0, : len(tokens)] = tokens
        batch = {"tokens": ids, "positions": np.arange(row, dtype=np.int32)[None]}
        logits = np.asarray(_logits(cfg)(params, batch))[0, len(tokens) - 1]
        tokens.append(int(np.argmax(logits[: cfg.vocab])))
    return tokens[len(prompt) :]


def prompts_of(count, longest, vocab, seed=0):
    """Random prompts, every third of which begins like the one before it."""
    random = np.random.default_rng(seed)
    prompts = []
    for i in range(count):
        prompt = random.integers(0, vocab, random.integers(1, longest + 1)).tolist()
        prompts.append(
            prompts[-1][: longest // 2] + prompt[: longest // 2] if i % 3 == 2 else prompt
        )
    return prompts


def answers(engine, prompts, params, seed=0):
    """Submits in random order while the engine runs. Returns [(tokens, logprobs, reason)]."""
    random = np.random.default_rng(seed)
    todo, ids = list(random.permutation(len(prompts))), {}
    outcomes = [([], [], []) for _ in prompts]
    while todo or engine.busy:
        for _ in range(min(len(todo), int(random.integers(0, 6)))):
            i = todo.pop()
            ids[engine.submit(prompts[i], params[i])] = i
        for output in engine.step():
            tokens, scores, reasons = outcomes[ids[output.request_id]]
            assert not reasons
            assert len(output.tokens) == len(output.logprobs) == len(output.versions)
            tokens += output.tokens
            scores += output.logprobs
            reasons += [output.finish_reason] if output.finish_reason else []
    assert engine.pool.in_use == 0
    assert engine.programs.compiled <= engine.programs.bound
    return outcomes


def greedy(lengths):
    return [SamplingParams(max_tokens=n, temperature=0) for n in lengths]


def check_greedy(cfg, count, longest, row, mesh=None, **options):
    prompts = prompts_of(count, longest, cfg.vocab)
    lengths = np.random.default_rng(1).integers(1, 12, count).tolist()
    mesh = mesh and MeshSpec(**mesh).build(jax.devices()[: int(np.prod(list(mesh.values())))])
    engine = Engine(cfg, sharp(cfg), mesh=mesh, **options)
    outcomes = answers(engine, prompts, greedy(lengths))
    for prompt, length, (tokens, _, reasons) in zip(prompts, lengths, outcomes, strict=True):
        assert tokens == one_by_one(cfg, prompt, length, row)
        assert reasons == ["length"]
    return engine, prompts, outcomes


def run_all(engine, prompts, new):
    """Returns the greedy continuation of each prompt."""
    ids = [engine.submit(p, SamplingParams(max_tokens=new, temperature=0)) for p in prompts]
    tokens_of = {id: [] for id in ids}
    for output in engine.run():
        tokens_of[output.request_id] += output.tokens
    return list(tokens_of.values())
