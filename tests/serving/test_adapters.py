"""Several adapters in one engine: each answer has the tokens of its merged model."""

import jax
import pytest

from megajax.core.errors import UserError
from megajax.models import decoder, lora
from megajax.models.lora import LoraConfig
from megajax.serving import Engine, SamplingParams
from tests.models.test_lora import disturbed
from tests.tiny import MODEL

ASKED = SamplingParams(max_tokens=6, temperature=0)
PROMPT = list(range(3, 24))  # more than a page
OPTIONS = dict(dtype="float32", page_size=8, max_batch=8, pages=40)


def made():
    """(base, {name: parameters with an adapter}), of unlike ranks and modules."""
    parts = decoder.parts(MODEL)
    base = parts.init(jax.random.key(0))
    configs = {"wide": LoraConfig(5), "narrow": LoraConfig(2, 8.0, ("q", "mlp"))}
    adapted = {}
    for i, (name, cfg) in enumerate(configs.items()):
        params, _ = lora.adapt(base, parts.axes, cfg, jax.random.key(i))
        adapted[name] = disturbed(params, i)
    return base, adapted


def answers(engine, *requests):
    ids = [engine.submit(prompt, ASKED, adapter=name) for name, prompt in requests]
    tokens = {i: [] for i in ids}
    for output in engine.run():
        tokens[output.request_id] += output.tokens
    return [tokens[i] for i in ids]


@pytest.mark.slow
def test_each_answer_is_that_of_its_merged_model():
    base, adapted = made()
    models = {None: base} | {name: lora.merge(p) for name, p in adapted.items()}
    expected = {
        n: answers(Engine(MODEL, p, **OPTIONS), (None, PROMPT))[0] for n, p in models.items()
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    engine = Engine(MODEL, base, adapters=adapted, **OPTIONS)
    names = ["wide", None, "narrow", "wide"]
    assert answers(engine, *((n, PROMPT) for n in names)) == [expected[n] for n in names]
    # Pages of the same prompt are not those of another adapter; of the same one they are.
    for name in ("narrow", None, "wide"):
        assert answers(engine, (name, PROMPT)) == [expected[name]]
    with pytest.raises(UserError, match="adapter='wid' is none of the engine's: wide, narrow"):
        engine.submit(PROMPT, ASKED, adapter="wid")
    engine.load(base, 1)
    assert answers(engine, ("wide", PROMPT)) == [expected["wide"]]


def test_what_is_no_adapter_of_the_model_is_refused():
    base, adapted = made()
    with pytest.raises(UserError, match="have no adapters"):
        Engine(MODEL, base, adapters={"one": base}, **OPTIONS)
    with pytest.raises(UserError, match="is none of the engine's: none"):
        Engine(MODEL, base, **OPTIONS).submit(PROMPT, ASKED, adapter="one")
