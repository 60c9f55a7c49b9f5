"""What the sampler draws against distributions that NumPy computes in float64, by chi-square.

Each case is drawn DRAWS times, all cases in one call. The draws must fit the case's distribution.
They must not fit the distribution without one of its rules: otherwise the test could not see a
sampler that ignores this rule. Seeds are fixed, so results are too.

Legend: V vocabulary, N draws.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from megajax.core.mesh import MeshSpec
from megajax.serving import Engine, SamplingParams, draw
from megajax.systems.aot import QUICK
from pallas_kernels import aot
from tests.plain_loop import CFG, SMALL, _logits, sharp

V, DRAWS = 12, 6000
LOGITS = np.float32([2.0, 1.7, 1.5, 1.2, 1.0, 0.6, 0.3, 0.0, -0.4, -1.0, -2.0, -3.0])[
    np.random.default_rng(0).permutation(V)
]
COUNTS = np.array([0, 1, 0, 3, 0, 0, 2, 0, 1, 0, 0, 0])  # of each token in the answer
SEEN = COUNTS > 0
SEEN[[0, 7]] = True  # in the prompt
BIAS = np.float32([0, 0, 1.5, 0, -2, 0, 0, 0, 0, 3, 0, -100])
NOT_USED = np.zeros((1, draw.words(V)), np.uint32)  # no case has a grammar
PLAIN = SamplingParams()
CASES = {
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 1.7": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(top_k=4),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.3),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "repetition below 1": SamplingParams(repetition_penalty=0.6),
    "presence": SamplingParams(presence_penalty=1.2),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "frequency below 0": SamplingParams(frequency_penalty=-0.5),
    "bias": SamplingParams(logit_bias=dict(enumerate(BIAS.tolist()))),
    "all filters": SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.12),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=5,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=dict(enumerate(BIAS.tolist())),
    ),
}


def distribution(params: SamplingParams) -> np.ndarray:
    """The oracle, from vLLM's documentation: (V,) float64."""
    x = LOGITS.astype(np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    r = params.repetition_penalty
    x = np.where(SEEN, np.where(x > 0, x / r, x * r), x)
    x = x - params.frequency_penalty * COUNTS - params.presence_penalty * SEEN_IN_ANSWER
    x = x / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        p[np.argsort(-p)[params.top_k :]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    enough = np.flatnonzero(np.cumsum(p[order]) >= params.top_p - 1e-12)
    p[order[enough[0] + 1 :]] = 0
    return p / p.sum()


SEEN_IN_ANSWER = COUNTS > 0


@functools.cache
def draws() -> dict[str, np.ndarray]:
    """Returns how often each token was drawn, (V,) a case."""
    B = DRAWS * len(CASES)
    rules = draw.plain_rules(B)
    neutral = SamplingParams()
    for i, params in enumerate(CASES.values()):
        rows = slice(i * DRAWS, (i + 1) * DRAWS)
        rules.temperature[rows], rules.top_k[rows] = params.temperature, params.top_k
        rules.top_p[rows], rules.min_p[rows] = params.top_p, params.min_p
        rules.repetition[rows] = params.repetition_penalty
        rules.presence[rows] = params.presence_penalty
        rules.frequency[rows] = params.frequency_penalty
        rules.changes[rows] = (
            dataclasses.replace(params, temperature=1, top_k=0, top_p=1, min_p=0) != neutral
        )
        # A third by seeds, a third by places in the answer, a third by both.
        third = DRAWS // 3
        seeds = np.arange(DRAWS) % third
        rules.seed[rows, 0] = np.where(np.arange(DRAWS) // third == 1, 7, seeds)
        rules.seed[rows, 1] = i
        rules.drawn[rows] = np.where(np.arange(DRAWS) // third == 0, 3, seeds)
    # A slot with the biases and one without.
    changes = draw.Changes(
        np.stack([COUNTS, COUNTS]).astype(np.int32),
        np.stack([SEEN, SEEN]),
        np.stack([np.zeros(V, np.float32), BIAS]),
        NOT_USED,
    )
    slots = np.repeat([int(bool(p.logit_bias)) for p in CASES.values()], DRAWS).astype(np.int32)
    logits = np.broadcast_to(LOGITS, (B, V))
    log_z = np.full(B, np.log(np.exp(LOGITS).sum()), np.float32)
    drawn, after = jax.jit(draw.draw_tokens)(logits, log_z, rules, changes, slots)
    tokens = np.asarray(drawn.token)
    # Log-probabilities are those of the unmodified logits.
    np.testing.assert_allclose(drawn.logprob, LOGITS[tokens] - log_z[0], rtol=1e-5)
    counted = np.stack([np.bincount(tokens[slots == s], minlength=V) for s in (0, 1)])
    np.testing.assert_array_equal(np.asarray(after.counts_SV) - COUNTS, counted)
    split = tokens.reshape(len(CASES), DRAWS)
    return {name: np.bincount(row, minlength=V) for name, row in zip(CASES, split, strict=True)}


def p_value(counts: np.ndarray, p: np.ndarray) -> float:
    """Returns how likely such counts, or less fitting ones, are under a distribution."""
    if counts[p == 0].any():
        return 0.0
    return float(stats.chisquare(counts[p > 0], counts.sum() * p[p > 0]).pvalue)


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution_and_not_another(name):
    counts, params = draws()[name], CASES[name]
    p = distribution(params)
    assert p_value(counts, p) > 1e-3
    fields = [f.name for f in dataclasses.fields(params)]
    changed = [f for f in fields if getattr(params, f) != getattr(PLAIN, f)]
    others = {f: dataclasses.replace(params, **{f: getattr(PLAIN, f)}) for f in changed}
    # Of several filters the strictest decides: the others alone change nothing.
    wrong = {f: q for f in changed if not np.allclose(q := distribution(others[f]), p)}
    assert wrong.keys() >= set(changed) - {"top_k", "top_p", "min_p"}
    assert wrong
    for field, q in wrong.items():
        assert p_value(counts, q) < 1e-6, field


def test_the_filters_keep_exactly_what_numpy_keeps():
    for name in ("top-k", "top-p", "min-p", "all filters"):
        assert (draws()[name] > 0).tolist() == (distribution(CASES[name]) > 0).tolist()


def test_what_filters_keep_of_many_values_some_of_them_equal():
    """The oracle sorts, in float64. Equal values stay or go together."""
    random, (B, V) = np.random.default_rng(3), (60, 700)
    x = random.normal(0, 3, (B, V)).astype(np.float32)
    x[::2] = np.round(x[::2] * 2) / 2
    rules = draw.plain_rules(B)
    rules.top_k[:] = random.choice([0, 1, 7, 90, V, V + 5], B)
    rules.top_p[:] = random.choice([1, 0.9, 0.5, 1e-6, 1e-40], B)
    x[0, :2], x[0, 2:] = [-0.0, 0.0], -1
    rules.min_p[:] = random.choice([0, 0.1, 1], B)
    stays = np.asarray(jax.jit(draw._filter)(x, rules)) > draw.NEGATIVE
    for row, stays_row, k, p, m in zip(
        x, stays, rules.top_k, rules.top_p, rules.min_p, strict=True
    ):
        odds = np.exp(row.astype(np.float64) - row.max())
        odds[odds < m * (1 - 1e-6)] = 0
        if 0 < k < V:
            odds[odds < np.sort(odds)[-k]] = 0
        odds /= odds.sum()
        larger = np.array([odds[odds > one].sum() for one in odds])
        assert (stays_row == (odds > 0) & ((larger < p * (1 - 1e-6)) | (p == 1))).all()


def test_the_likeliest_tokens_in_passes_are_those_of_a_sort():
    x = np.round(np.random.default_rng(4).normal(0, 2, (9, 300))).astype(np.float32)
    for passes, want in zip(draw._tops(20, x), jax.lax.top_k(x, 20), strict=True):
        np.testing.assert_array_equal(passes, want)


@pytest.mark.aot
def test_drawing_can_be_part_of_one_graph_of_a_gpu():
    """XLA cannot put a sort, a loop or a library's call into one."""
    B, V, mesh = 64, 128_256, MeshSpec().build(aot.devices(1)[:1])
    place = NamedSharding(mesh, PartitionSpec())

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    logits = np.empty((B, V), np.float32)
    changes = jax.eval_shape(lambda: draw.no_changes(B, V))
    args = logits, logits[:, 0], draw.plain_rules(B), changes, np.empty(B, np.int32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(draw.draw_tokens).lower(*jax.tree.map(like, args))
    text = aot.compile(lowered, QUICK).as_text()
    assert len(re.findall(r" conditional\(", text)) == 4
    assert not re.findall(r" (sort|while|custom-call)\(", text)


def test_greedy_penalties_are_exact():
    """The likeliest token after penalties, for many random rows."""
    random = np.random.default_rng(1)
    N = 400
    logits = random.normal(0, 2, (N, V)).astype(np.float32)
    counts = random.poisson(0.7, (N, V)).astype(np.int32)
    seen = (counts > 0) | (random.random((N, V)) < 0.2)
    bias = random.normal(0, 1, (N, V)).astype(np.float32)
    rules = draw.plain_rules(N)
    rules.changes[:] = True
    rules.repetition[:] = random.uniform(0.5, 2, N)
    rules.presence[:], rules.frequency[:] = random.uniform(-2, 2, (2, N))
    x = logits.astype(np.float64) + bias
    r = rules.repetition[:, None].astype(np.float64)
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    x -= rules.frequency[:, None] * counts + rules.presence[:, None] * (counts > 0)
    changes = draw.Changes(counts, seen, bias, NOT_USED)
    slots = np.arange(N, dtype=np.int32)
    drawn, _ = jax.jit(draw.draw_tokens)(logits, np.zeros(N, np.float32), rules, changes, slots)
    np.testing.assert_array_equal(drawn.token, x.argmax(1))


def test_an_engine_draws_its_first_token_from_the_models_distribution():
    prompt, N = [3, 1, 4, 1, 5, 9, 2, 6], 1500
    ids = np.int32([prompt])
    batch = {"tokens": ids, "positions": np.arange(len(prompt), dtype=np.int32)[None]}
    logits = np.asarray(_logits(CFG)(sharp(CFG), batch), np.float64)[0, -1, : CFG.vocab]
    engine = Engine(CFG, sharp(CFG), **SMALL | {"max_batch": 64}, page_size=4, seed=3)
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=2.0, top_k=9, n=N))
    counts = np.bincount([out.tokens[0] for out in engine.run()], minlength=CFG.vocab)
    assert counts.sum() == N

    def of(temperature):
        p = np.exp((logits - logits.max()) / temperature)
        p[np.argsort(-p)[9:]] = 0
        return p / p.sum()

    assert p_value(counts, of(2.0)) > 1e-3
    assert p_value(counts, of(1.0)) < 1e-6
