"""The engine against a plain loop with the whole forward pass, and against itself."""

import functools

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.data.tokenizer import ByteTokenizer
from megajax.layers.joined import INPUTS
from megajax.models import decoder
from megajax.quant import Format, quantize_model
from megajax.serving import Engine, SamplingParams, StructuredOutputsParams
from megajax.serving.programs import OneMesh
from megajax.training import logprobs
from tests.plain_loop import (
    CFG,
    SMALL,
    _logits,
    answers,
    check_greedy,
    one_by_one,
    prompts_of,
    run_all,
    sharp,
)


def test_greedy_is_the_argmax_of_the_whole_pass_with_preemption_and_reuse():
    engine, prompts, greedy = check_greedy(
        CFG, 14, 24, 36, **SMALL, pages=16, page_size=4, decode_steps=3
    )
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.prefix_hits > 0
    rows = [prompt + tokens for prompt, (tokens, *_) in zip(prompts, greedy, strict=True)]
    for (_, scores, _), want in zip(greedy, logprobs(CFG, sharp(CFG), rows), strict=True):
        np.testing.assert_allclose(scores, want[-len(scores) :], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_greedy_of_two_hundred_prompts(tensor, reuse):
    engine, *_ = check_greedy(
        CFG, 200, 300, 320, {"tensor": tensor}, dtype="float32", pages=500, page_size=1,
        max_batch=16, prefill_chunk=64, prefix_cache=reuse, decode_steps=1 + tensor // 2,
    )  # fmt: skip
    assert engine.scheduler.preemptions > 0
    assert (engine.scheduler.prefix_hits > 0) == reuse


def exact_bits(dtype, tensor, count, **options):
    mesh = MeshSpec(tensor=tensor).build(jax.devices()[:tensor])
    prompts = prompts_of(count, 60, CFG.vocab)
    params = [SamplingParams(max_tokens=9, seed=i, top_k=20) for i in range(count)]
    engine = Engine(CFG, sharp(CFG), mesh=mesh, dtype=dtype, numerics="exact", **options)
    sampled = answers(engine, prompts, params)
    rows = [prompt + tokens for prompt, (tokens, *_) in zip(prompts, sampled, strict=True)]
    exact = logprobs(CFG, sharp(CFG), rows, mesh=mesh, dtype=dtype, numerics="exact")
    for (_, scores, _), want in zip(sampled, exact, strict=True):
        np.testing.assert_array_equal(np.float32(scores), want[-9:])
    return sampled


def test_exact_numerics_are_the_trainers_bits_in_any_batch_and_pages():
    alone = exact_bits("bfloat16", 1, 5, max_batch=1, page_size=8, pages=20)
    together = exact_bits("bfloat16", 1, 5, max_batch=5, page_size=32, prefill_chunk=7)
    assert alone == together


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_numerics_over_batches_pages_chunks(dtype, tensor):
    runs = [
        exact_bits(dtype, tensor, 64, max_batch=batch, page_size=size, prefill_chunk=chunk)
        for batch, size, chunk in ((1, 16, None), (7, 8, 5), (64, 32, None), (64, 16, 13))
    ]
    assert all(f == runs[0] for f in runs)


def test_a_seed_draws_the_same_alone_and_in_a_batch_and_siblings_differ():
    params = SamplingParams(max_tokens=8, seed=5, n=3, temperature=1.5, logprobs=2)
    engine = Engine(CFG, sharp(CFG), **SMALL, page_size=4, tokenizer=None)

    def draw(others):
        for i in range(others):
            engine.submit([7, i + 1], SamplingParams(max_tokens=6))
        request = engine.submit([1, 2, 3, 4, 5, 6], params)
        tokens = {0: [], 1: [], 2: []}
        for output in engine.run():
            if output.request_id == request:
                tokens[output.index] += output.tokens
                for token, score, top in zip(
                    output.tokens, output.logprobs, output.top_logprobs, strict=True
                ):
                    # The two likeliest and, where it is none of them, the drawn one.
                    assert len(top) == 2 + (sorted(top.values())[-2] > score)
                    assert max(top.values()) >= score - 1e-6
                    assert abs(top[token] - score) < 1e-6
        return tokens

    alone = draw(0)
    assert draw(5) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3


def test_requests_end_as_they_ask():
    engine = Engine(CFG, sharp(CFG), **SMALL, tokenizer=ByteTokenizer())
    plain = one_by_one(CFG, [1, 2, 3], 12, 36)
    stop = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=[plain[4]])
    text = ByteTokenizer().decode(plain[2:4])
    byte = SamplingParams(max_tokens=12, temperature=0, stop=text)
    biased = SamplingParams(max_tokens=3, temperature=0, logit_bias={9: 100})
    outputs = answers(engine, [[1, 2, 3]] * 3, [stop, byte, biased])
    assert outputs[0][0] == plain[: plain.index(plain[4]) + 1]
    assert outputs[0][2] == ["stop"]
    ended = next(i for i in range(12) if text in ByteTokenizer().decode(plain[: i + 1]))
    assert outputs[1][0] == plain[: ended + 1]
    assert outputs[2][0] == [9, 9, 9]
    request = engine.submit([1], SamplingParams(max_tokens=50))
    engine.step()
    engine.cancel(request)
    engine.cancel(request)
    assert [o.finish_reason for o in engine.run()] == ["cancelled"]
    assert engine.pool.in_use == 0


def log_softmax(prompt):
    """The oracle: (len(prompt), vocabulary) in float64, by one pass over the whole prompt."""
    ids = np.asarray([prompt], np.int32)
    batch = {"tokens": ids, "positions": np.arange(len(prompt), dtype=np.int32)[None]}
    logits = np.asarray(_logits(CFG)(sharp(CFG), batch), np.float64)[0, :, : CFG.vocab]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_prompts_are_scored_whatever_their_pages_and_neighbours(numerics):
    """In chunks, beside others, again where its pages could be reused, and after preemption."""
    options = SMALL | {"pages": 16, "page_size": 4}
    engine = Engine(CFG, sharp(CFG), **options, numerics=numerics)
    prompts = [np.random.default_rng(i).integers(0, CFG.vocab, 24).tolist() for i in range(3)]
    scored: dict = {}
    asked = [(prompts[0], 3, 1), (prompts[0], 0, 2), (prompts[1], None, 1), (prompts[2], 20, 1)]
    for prompt, most, n in asked:
        params = SamplingParams(max_tokens=14, temperature=0, n=n, prompt_logprobs=most)
        scored[engine.submit(prompt, params)] = []
    for output in engine.run():
        if output.prompt_logprobs is not None:
            scored[output.request_id].append(output.prompt_logprobs)
    assert engine.scheduler.preemptions > 0
    for (prompt, most, n), scores in zip(asked, scored.values(), strict=True):
        assert len(scores) == (0 if most is None else n)
        want = log_softmax(prompt)
        for each in scores:
            assert each[0] is None and len(each) == len(prompt)
            for place, top in enumerate(each[1:]):
                likeliest = np.argsort(-want[place])[:most].tolist()
                assert set(top) == {*likeliest, prompt[place + 1]} and max(top.values()) <= 0
                for token, logprob in top.items():
                    assert abs(logprob - want[place, token]) < 1e-4


def test_nothing_but_the_largest_length_ends_an_answer_before_the_least():
    plain = one_by_one(CFG, [1, 2, 3], 12, 36)
    assert plain[4] not in plain[:4]
    engine = Engine(CFG, sharp(CFG), **SMALL, tokenizer=Ending((plain[4],)), decode_steps=3)
    asked = [
        SamplingParams(max_tokens=12, temperature=0, **more)
        for more in (
            {"min_tokens": 4},
            {"min_tokens": 5},
            {"min_tokens": 12},
            {},
            {"min_tokens": 7, "ignore_eos": True, "stop_token_ids": plain[4:5]},
        )
    ]
    outputs = answers(engine, [[1, 2, 3]] * 5, asked)
    assert outputs[0][0] == outputs[3][0] == plain[:5] and outputs[0][2] == ["stop"]
    for (tokens, _, reasons), least in zip(outputs[1:3], (5, 12), strict=True):
        assert tokens[:4] == plain[:4] and plain[4] not in tokens[:least]
        # The likeliest of the others, from the whole pass.
        scores = log_softmax([1, 2, 3, *plain[:4]])[-1].copy()
        scores[plain[4]] = -np.inf
        assert tokens[4] == scores.argmax() and len(tokens) >= least
        assert reasons == ["length"] if len(tokens) == 12 else ["stop"]
    assert outputs[4][0][:4] == plain[:4] and plain[4] not in outputs[4][0][:7]
    text = ByteTokenizer().decode(plain[1:2])
    byte = SamplingParams(max_tokens=12, temperature=0, stop=text, min_tokens=12, ignore_eos=True)
    assert answers(engine, [[1, 2, 3]], [byte])[0][2] == ["length"]
    with pytest.raises(UserError, match="min_tokens=1 needs at most 16 tokens that end an answer"):
        engine.submit([1], SamplingParams(min_tokens=1, stop_token_ids=range(5, 25)))


class Ending(ByteTokenizer):
    """Ends at several ids, as a generation_config.json may say."""

    def __init__(self, ends):
        self.ends = ends


def test_every_end_token_stops_an_answer():
    plain = one_by_one(CFG, [1, 2, 3], 12, 36)
    engine = Engine(CFG, sharp(CFG), **SMALL, tokenizer=Ending((35, plain[4])))
    ended = SamplingParams(max_tokens=12, temperature=0)
    (output,) = answers(engine, [[1, 2, 3]], [ended])
    assert (output[0], output[2]) == (plain[: plain.index(plain[4]) + 1], ["stop"])


def random_params(random):
    """What a request may ask for, each with some probability."""
    members = {"max_tokens": int(random.integers(1, 9)), "seed": int(random.integers(99))}
    for name, value in (
        ("temperature", 0), ("top_k", 5), ("top_p", 0.8), ("min_p", 0.1), ("logprobs", 3), ("n", 3),
        ("repetition_penalty", 1.2), ("frequency_penalty", 0.4), ("logit_bias", {3: 5.0}),
        ("stop_token_ids", [7]), ("stop", "ab"), ("priority", 2),
        ("prompt_logprobs", 2), ("min_tokens", members["max_tokens"]),
        ("structured_outputs", StructuredOutputsParams(regex="[0-9]{1,20}")),
    ):  # fmt: skip
        if random.random() < 0.25:
            members[name] = value
    if "structured_outputs" in members:
        members.pop("min_tokens", None)
    return SamplingParams(**members)


@pytest.mark.parametrize(("numerics", "bound"), [("fast", 9), ("exact", 6)])
def test_random_traffic_compiles_a_bounded_number_of_programs(numerics, bound):
    """fast: steps of 8 and of 16 tokens, the same with scores of prompts, 3 decode steps of 8, what
    takes their last tokens, copies of pages, penalties, masks of constraints. exact: a tile, the
    same with scores, a draw, and the last three."""
    options = SMALL | {"pages": 30, "page_size": 4, "tokenizer": ByteTokenizer()}
    engine = Engine(CFG, sharp(CFG), **options, decode_steps=3, numerics=numerics)
    assert engine.programs.bound == bound
    random = np.random.default_rng(2)
    for _ in range(40):
        for _ in range(random.integers(0, 4)):
            prompt = random.integers(0, 3, random.integers(1, 40)).tolist()
            request = engine.submit(prompt, random_params(random))
        if random.random() < 0.1:
            engine.cancel(request)
        for _ in range(random.integers(1, 6)):
            engine.step()
    assert list(engine.run()) or not engine.busy
    assert engine.programs.compiled == bound
    assert engine.pool.in_use == 0


@pytest.mark.parametrize("numerics", ["fast", pytest.param("exact", marks=pytest.mark.slow)])
def test_steps_are_compiled_before_the_weights_are_there(numerics):
    engine = Engine(CFG, decoder.parts(CFG).abstract, numerics=numerics, pages=40, **SMALL)
    ready = engine.compile()
    engine.submit([1], SamplingParams(max_tokens=1))
    with pytest.raises(UserError, match="sleeps"):
        engine.step()
    engine.cancel(0)
    assert [output.finish_reason for output in engine.run()] == ["cancelled"]
    engine.load(sharp(CFG), 0)
    for program in ready:
        program.result()
    prompts = prompts_of(6, 20, CFG.vocab)
    outputs = answers(engine, prompts, [SamplingParams(max_tokens=5, temperature=0)] * 6)
    for prompt, (tokens, *_) in zip(prompts, outputs, strict=True):
        assert tokens == one_by_one(CFG, prompt, 5, 36)
    assert engine.programs.compiled == len(ready) == 2  # nothing was compiled a second time


def test_a_step_takes_a_larger_program_that_is_ready():
    engine = Engine(CFG, sharp(CFG), **SMALL | {"prefill_chunk": 32})
    (program,) = engine.compile((20,), others=False)
    program.result()
    prompts = prompts_of(3, 12, CFG.vocab)
    outputs = answers(engine, prompts, [SamplingParams(max_tokens=4, temperature=0)] * 3)
    assert [tokens for tokens, *_ in outputs] == [one_by_one(CFG, p, 4, 36) for p in prompts]
    assert engine.programs.compiled == 1


def test_decoding_goes_on_before_its_tokens_are_read(monkeypatch):
    """Also behind a token that ends an answer, which only reading it tells."""
    engine = Engine(CFG, sharp(CFG), **SMALL, decode_steps=2)
    plain = [one_by_one(CFG, prompt, 14, 36) for prompt in ([1, 2, 3], [4, 5])]
    calls = []
    for name in ("step", "read"):
        call = getattr(engine.programs, name)
        monkeypatch.setattr(
            engine.programs, name, lambda *a, n=name, c=call, **k: (calls.append(n), c(*a, **k))[1]
        )
    params = [
        SamplingParams(max_tokens=14, temperature=0),
        SamplingParams(max_tokens=14, temperature=0, stop_token_ids=[plain[1][6]]),
    ]
    (first, *_), (second, *_) = answers(engine, [[1, 2, 3], [4, 5]], params)
    assert first == plain[0]
    assert second == plain[1][: plain[1].index(plain[1][6]) + 1]
    assert calls[:3] == ["step", "read", "step"]  # the prompts
    assert calls[3:7] == ["step", "read"] * 2  # each time, one that was started before runs
    assert calls.count("step") == calls.count("read")
    assert engine.pool.in_use == 0
    # The last token of all ends what was started ahead too.
    assert answers(engine, [[4, 5]], params[1:])[0][0] == second
    assert not engine.busy and engine._launched
    engine.sleep()
    assert calls.count("step") == calls.count("read")


def test_new_weights_take_over_between_steps():
    engine = Engine(CFG, sharp(CFG), **SMALL)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=10, temperature=0))
    outputs = engine.step() + engine.step()
    engine.load(jax.tree.map(lambda x: -x, sharp(CFG)), 7)
    outputs += list(engine.run())
    versions = sum((o.versions for o in outputs), [])
    assert versions == sorted(versions)
    assert {0, 7} == set(versions)
    # The pages of the same prompt hold keys of the first weights: nobody reads them any more.
    prompt = list(range(20, 32))
    for version, sign in ((8, 1), (9, -1)):
        params = jax.tree.map(lambda x: sign * x, sharp(CFG))  # noqa: B023
        engine.load(params, version)
        assert run_all(engine, [prompt], 6) == [one_by_one(CFG, prompt, 6, 36, params)]
    with pytest.raises(UserError, match="not of the engine's model"):
        engine.load({"tokens": np.zeros(3)}, 8)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "at least one token"),
        ([1, 61], {}, "has the token id 61; the vocabulary has 0 to 60"),
        ([1.5], {}, "whole numbers"),
        ([1] * 300, {"max_tokens": 21}, "the context has 320; nearest: max_tokens=20"),
        ([1], {"stop": "x"}, "needs a tokenizer"),
        ([1], {"logit_bias": {61: 1}}, "has the token id 61"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt, params, message):
    engine = _idle()
    with pytest.raises(UserError, match=message):
        engine.submit(prompt, SamplingParams(**params))
    assert not engine.busy


@functools.cache
def _idle():
    return Engine(CFG, sharp(CFG), **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "bits"), [(1, None), (2, None), (1, 4)])
def test_layers_in_arrays_of_their_own_give_the_same_tokens(tensor, bits, monkeypatch):
    """As on a GPU; the program then has no loop over layers, and reads each array as it is. Packed
    weights of the same input are one."""
    mesh = MeshSpec(tensor=tensor).build(jax.devices()[:tensor])
    prompts = prompts_of(5, 30, CFG.vocab)
    options = dict(mesh=mesh, dtype="float32", max_batch=4, decode_steps=2)
    greedy = [SamplingParams(max_tokens=6, temperature=0)] * len(prompts)
    params = sharp(CFG) if bits is None else quantize_model(sharp(CFG), CFG, Format(bits, 32))
    want = answers(Engine(CFG, params, **options), prompts, greedy)
    monkeypatch.setattr(OneMesh, "alone", True)
    engine = Engine(CFG, params, **options)
    layers = engine._params["blocks"].stacks
    assert len(layers) == CFG.layers
    for part, names in INPUTS if bits else ():
        first, *others = (layers[0][part][name] for name in names)
        assert first.whole.shape[1] == sum(w.size // w.shape[0] for w in (first, *others))
        assert not jax.tree.leaves(others)
    for (tokens, scores, _), (known_tokens, known, _) in zip(
        answers(engine, prompts, greedy), want, strict=True
    ):
        assert tokens == known_tokens
        np.testing.assert_allclose(scores, known, atol=1e-4)
