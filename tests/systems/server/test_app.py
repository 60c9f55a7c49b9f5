"""The endpoints, asked in this process: shapes, errors, limits, clients that leave."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import re

import jax
import jsonschema
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data.chat import ChatTemplate
from megajax.data.tokenizer import ByteTokenizer
from megajax.models import decoder, lora
from megajax.models.lora import LoraConfig
from megajax.serving import Engine
from megajax.serving import engine as engine_
from megajax.systems.server.launch import adapter_folders, build_server
from megajax.systems.server.options import HttpOptions
from tests.systems.server import asgi
from tests.tiny import MODEL

CFG = dataclasses.replace(MODEL, layers=1, vocab=259, max_positions=128)
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "",
    "",
)
KEY = "0123456789abcdef"


@functools.cache
def base():
    return jax.jit(decoder.parts(CFG).init)(jax.random.key(0))


@functools.cache
def engine():
    return with_adapters()


def with_adapters(**adapters):
    params = base()
    return Engine(
        CFG,
        params,
        dtype="float32",
        max_batch=4,
        prefill_chunk=16,
        page_size=8,
        pages=80,
        tokenizer=ByteTokenizer(),
        adapters=adapters,
    )


@contextlib.asynccontextmanager
async def serving(chat=TEMPLATE, keys=(), to=None, sampling=None, **options):
    """Yields (a client, the worker)."""
    limits = HttpOptions(**({"max_body": 4096} | options))
    worker, server = build_server(
        to or engine(), "tiny", chat, limits, max_batch=4, keys=list(keys), sampling=sampling
    )
    worker.start()
    try:
        async with asgi.client(server.app) as client:
            yield client, worker
    finally:
        worker.stop()
        assert await worker.join(60)
        assert worker.live == 0 and worker.engine.pool.in_use == 0


def serve(test):
    """Runs a coroutine function with (client, worker)."""

    @functools.wraps(test)
    def run():
        async def scenario():
            async with serving() as (client, worker):
                await test(client, worker)

        asyncio.run(scenario())

    del run.__wrapped__  # pytest would take its parameters for fixtures
    return run


async def ask(client, path="completions", **body):
    return await client.post(f"/v1/{path}", json=body)


async def events(client, path="completions", **body):
    async with client.stream("POST", f"/v1/{path}", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@serve
async def test_a_completion_and_its_stream_say_the_same(client, worker):
    body = {"prompt": "hello", "max_tokens": 12, "seed": 3, "logprobs": 2, "n": 2}
    response = (await ask(client, **body)).json()
    assert response["object"] == "text_completion" and response["model"] == "tiny"
    assert response["usage"]["prompt_tokens"] == 6  # with the token that begins a document
    assert [c["index"] for c in response["choices"]] == [0, 1]
    parts = await events(client, **body, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == response["usage"]
    for choice in response["choices"]:
        streamed = [c for p in parts for c in p["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in streamed) == choice["text"]
        assert [c["finish_reason"] for c in streamed if c["finish_reason"]] == [
            choice["finish_reason"]
        ]
        logprobs = choice["logprobs"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert (
                sum((c["logprobs"][name] for c in streamed if c["logprobs"]), []) == logprobs[name]
            )
        assert len(logprobs["tokens"]) <= 12
        listed = (logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs"))
        for token, score, top in zip(*listed, strict=True):
            assert top[token] == score and len(top) in (2, 3)
            assert len(top) == 2 or score == min(top.values())
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])


@serve
async def test_a_chat_and_its_stream_say_the_same(client, worker):
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hé"}]}],
        "max_completion_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    response = (await ask(client, "chat/completions", **body)).json()
    choice = response["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert response["usage"]["prompt_tokens"] == len("user: hé\nassistant: ".encode())
    parts = await events(client, "chat/completions", **body)
    deltas = [p["choices"][0]["delta"] for p in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == choice["message"]["content"]
    entries = choice["logprobs"]["content"]
    data = bytes(b for e in entries for b in e["bytes"])
    assert data.decode(errors="replace") == choice["message"]["content"]
    assert all(max(t["logprob"] for t in e["top_logprobs"]) == e["logprob"] for e in entries)


@serve
async def test_stops_echo_prompts_of_ids_and_biases(client, worker):
    bias = {str(ord("a")): 100}
    response = (
        await ask(client, prompt=["x", "yy"], logit_bias=bias, max_tokens=4, echo=True)
    ).json()
    assert [c["text"] for c in response["choices"]] == ["xaaaa", "yyaaaa"]
    assert response["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    response = (await ask(client, prompt=[[65, 66]], stop=["aaa"], logit_bias=bias)).json()
    assert (response["choices"][0]["text"], response["choices"][0]["finish_reason"]) == ("", "stop")
    assert response["usage"]["completion_tokens"] == 3
    more = {"logit_bias": {"257": 100}, "max_tokens": 5, "logprobs": 0}
    response = (await ask(client, prompt="x", **more)).json()["choices"][0]
    assert (response["text"], response["finish_reason"]) == ("", "stop")
    assert response["logprobs"]["tokens"] == ["token_id:257"]  # counts in usage, and is listed
    assert response["logprobs"]["text_offset"] == [0]
    response = (await ask(client, prompt="x", **more, ignore_eos=True)).json()
    assert response["usage"]["completion_tokens"] == 5


@serve
async def test_the_drawn_token_is_listed_whatever_number_is_asked_for(client, worker):
    body = {"prompt": "hello", "max_tokens": 8, "seed": 3, "temperature": 2}
    logprobs = [
        (await ask(client, **body, logprobs=most)).json()["choices"][0]["logprobs"]
        for most in (0, 1, 5)
    ]
    alone = [
        {t: p} for t, p in zip(logprobs[0]["tokens"], logprobs[0]["token_logprobs"], strict=True)
    ]
    assert logprobs[0]["top_logprobs"] == alone
    for more in logprobs[1:]:
        for one, top in zip(alone, more["top_logprobs"], strict=True):
            assert one.items() <= top.items()


@serve
async def test_a_prompt_is_echoed_with_its_log_probabilities(client, worker):
    """As evaluation harnesses ask: the tokens of the prompt, then one that is drawn, or none."""
    ids = [*b"hello world", 200, 256, *b"!"]
    body = {"prompt": [ids, ids[:1]], "echo": True, "logprobs": 1, "temperature": 0}
    for most in (0, 1):
        response = (await ask(client, **body, max_tokens=most, n=2)).json()
        assert response["usage"]["completion_tokens"] == 4 * most
        for choice, prompt in zip(response["choices"], [ids, ids, ids[:1], ids[:1]], strict=True):
            scores = choice["logprobs"]
            assert all(len(value) == len(prompt) + most for value in scores.values())
            assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
            assert scores["tokens"][: len(prompt)] == [
                f"token_id:{i}" if i > 255 else f"bytes:\\x{i:02x}" if i > 127 else chr(i)
                for i in prompt
            ]
            # The byte 200 begins a character, which only the last token shows to be none.
            assert scores["text_offset"][: len(prompt)] == [*range(11), 11, 11, 11][: len(prompt)]
            for place, top in enumerate(scores["top_logprobs"]):
                if place:
                    assert top[scores["tokens"][place]] == scores["token_logprobs"][place]
            assert choice["finish_reason"] in ("length", "stop")
            assert choice["text"].startswith(worker.engine.tokenizer.decode(prompt))
        batch = {
            "tokens": np.asarray([ids], np.int32),
            "positions": np.arange(len(ids), dtype=np.int32)[None],
        }
        params = jax.jit(decoder.parts(CFG).init)(jax.random.key(0))
        logits = np.asarray(jax.jit(decoder.parts(CFG).logits)(params, batch), np.float64)[
            0, :, :259
        ]
        want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        scores = response["choices"][0]["logprobs"]
        np.testing.assert_allclose(
            scores["token_logprobs"][1 : len(ids)], want[range(len(ids) - 1), ids[1:]], atol=1e-4
        )
        likeliest = [max(top.values()) for top in scores["top_logprobs"][1 : len(ids)]]
        np.testing.assert_allclose(likeliest, want[:-1].max(-1), atol=1e-4)
        parts = await events(client, **body, max_tokens=most)
        for index in range(2):
            streamed = [c["logprobs"] for p in parts for c in p["choices"] if c["index"] == index]
            for name, value in response["choices"][2 * index]["logprobs"].items():
                assert sum((part[name] for part in streamed if part), []) == value
    error = (await ask(client, prompt="x", max_tokens=0)).json()["error"]
    assert "0 with echo=true" in error["message"]


@serve
async def test_a_least_length_holds_back_stop_strings_and_end_tokens(client, worker):
    bias = {str(ord("a")): 100, "257": 100}
    body = {"prompt": "x", "logit_bias": bias, "max_tokens": 9, "stop": ["aa"], "temperature": 0}
    choice = (await ask(client, **body, min_tokens=4)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("aaaa", "stop")
    parts = await events(client, **body, min_tokens=4)
    assert "".join(c["text"] for p in parts for c in p["choices"]) == "aaaa"


@serve
async def test_answers_have_the_form_that_is_asked_for(client, worker):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, "é"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages, seeds = [{"role": "user", "content": "?"}], range(4)
    for seed in seeds:
        body = {"messages": messages, "response_format": asked, "seed": seed, "max_tokens": 90}
        choice = (await ask(client, "chat/completions", **body)).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        form = (
            {"structured_outputs": {"regex": "[ab]{3}"}}
            if seed % 2
            else {"guided_regex": "[ab]{3}"}
        )
        text = (await ask(client, prompt="x", seed=seed, **form)).json()["choices"][0]["text"]
        assert re.fullmatch("[ab]{3}", text)


BAD = [
    ({"model": "other"}, 404, "model_not_found", "does not exist; this server has 'tiny'"),
    ({"max_tokens": 200}, 400, "context_length_exceeded", "context has 128 tokens; the prompt"),
    ({"max_tokens": 0}, 400, "invalid_value", "must be at least 1, or 0 with echo=true"),
    ({"temperature": "x"}, 400, "invalid_value", "temperature='x' must be a number"),
    ({"temperature": -1}, 400, "invalid_value", "temperature=-1 must be in [0, 1e+30]"),
    ({"top_p": 0}, 400, "invalid_value", "top_p=0 must be in"),
    ({"n": 1000}, 400, "invalid_value", "n=1000 must be from 1 to 128"),
    ({"stop": 7}, 400, "invalid_value", "stop=7 must be a string or a list"),
    ({"stop": [""]}, 400, "invalid_value", "no empty string"),
    ({"prompt": None}, 400, "invalid_value", "prompt=None is missing"),
    ({"prompt": [[300]]}, 400, None, "token id 300; the vocabulary has 0 to 258"),
    ({"prompt": {}}, 400, "invalid_value", "must be a text, token ids"),
    ({"temprature": 1}, 400, "unknown_parameter", "temprature. Did you mean temperature?"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias has the key 'x'"),
    ({"guided_regex": "("}, 400, None, "structured_outputs.regex cannot be used"),
    ({"guided_regex": "a" * 2000000}, 413, None, "longer than"),
    ({"guided_regex": "(a{1000}){1000}"}, 400, None, "regex cannot be used: lexer error: too many"),
    (
        {"guided_json": {"type": "integer", "minimun": 3}},
        400,
        "invalid_value",
        "the keyword 'minimun', which JSON Schema does not know. Did you mean minimum?",
    ),
    ({"top_k": 2**31}, 400, "invalid_value", "top_k=2147483648 must be in [-1, 2147483647]"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, 400, None, "exclude"),
    ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format must be"),
    ({"stream_options": {"x": 1}}, 400, "unknown_parameter", "no member stream_options.x"),
]


@serve
async def test_what_is_wrong_is_said_as_openai_says_it(client, worker):
    for body, status, code, message in BAD:
        response = await ask(client, **({"prompt": "x"} | body))
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code), (body, error)
        assert message in error["message"], error
        assert set(error) == {"message", "type", "param", "code"} and error["type"]
    headers = {"Content-Type": "application/json"}
    for raw, status in (
        (b"{", 400),
        (b"[1]", 400),
        (b'{"prompt": NaN}', 400),
        (b"\xff", 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"[" * 4000, 400),
        (b" " * 5000, 413),
    ):
        response = await client.post("/v1/completions", content=raw, headers=headers)
        assert response.status_code == status, raw[:20]
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await client.post("/v1/completions", content=b"{}")).status_code == 415
    assert (await client.get("/v1/completions")).status_code == 405
    assert (await client.get("/v2")).json()["error"]["type"] == "not_found_error"
    for messages in (
        [],
        "x",
        [{"content": "x"}],
        [{"role": "user", "content": [{"image_url": 1}]}],
        [{"role": "tool", "content": "x"}],
    ):
        response = await ask(client, "chat/completions", messages=messages)
        assert response.status_code == 400, messages
    listed = {"messages": [{"role": "user", "content": "x"}]}
    for more in ({"top_logprobs": 2}, {"tools": [{}]}, {"tool_choice": "required"}):
        assert (await ask(client, "chat/completions", **listed, **more)).status_code == 400


HARMLESS = {
    "reasoning_effort": "low",
    "verbosity": "low",
    "modalities": ["text"],
    "prediction": None,
    "parallel_tool_calls": True,
    "use_beam_search": False,
    "prompt_cache_retention": "24h",
}


def test_members_that_change_no_answer_are_taken_or_refused_by_one_flag():
    async def scenario():
        listed = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "seed": 1}
        async with serving() as (client, _):
            plain = (await ask(client, "chat/completions", **listed)).json()["choices"]
            hinted = (await ask(client, "chat/completions", **listed, **HARMLESS)).json()
            assert hinted["choices"] == plain
            for more in ({"modalities": ["text", "audio"]}, {"use_beam_search": True}):
                response = await ask(client, "chat/completions", **listed, **more)
                assert response.status_code == 400 and "is not supported" in response.text
        async with serving(strict_members=True) as (client, _):
            for name, value in HARMLESS.items():
                response = await ask(client, "chat/completions", **listed, **{name: value})
                passes = name in ("prediction", "prompt_cache_retention")  # null; of the client
                assert response.status_code == (200 if passes else 400), name
                assert passes or "--strict_members" in response.text

    asyncio.run(scenario())


def test_a_server_samples_as_its_model_recommends():
    """Greedy answers do not depend on the seed; a temperature in the request does count."""

    async def scenario():
        async with serving(sampling={"temperature": 0.0}) as (client, _):
            texts = [
                (await ask(client, prompt="hello", max_tokens=8, **more)).json()["choices"][0][
                    "text"
                ]
                for more in ({"seed": 1}, {"seed": 2}, {"seed": 2, "temperature": 1})
            ]
        assert texts[0] == texts[1] != texts[2]

    asyncio.run(scenario())


def test_a_long_text_becomes_ids_and_back_beside_other_requests():
    async def scenario():
        async with serving(max_body=2**22) as (client, _):
            text, answered = "wörd " * 100_000, 0
            asked = asyncio.create_task(client.post("/tokenize", json={"prompt": text}))
            while not asked.done():
                answered += (await client.get("/health")).status_code == 200
                await asyncio.sleep(0.001)  # the transport itself gives way to nobody
            answer = (await asked).json()
            assert answer["tokens"] == [256, *text.encode()] and answer["max_model_len"] == 128
            assert answer["count"] == len(answer["tokens"]) and answered > 3
            ids = answer["tokens"][1:]
            assert (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"] == text

    asyncio.run(scenario())


def test_a_refused_prompt_costs_no_more_than_its_bound():
    class Counted(ByteTokenizer):
        """Counts the tokens that it makes."""

        count = 0

        def encode(self, texts, special=False, most=None):
            ids = super().encode(texts, special, most)
            self.count += sum(map(len, ids))
            return ids

    async def scenario():
        async with serving(max_body=2**23) as (client, worker):
            counted = worker.engine.tokenizer = Counted()
            limits = HttpOptions(max_body=2**23)
            made, server = build_server(worker.engine, "tiny", TEMPLATE, limits, max_batch=4)
            made.start()
            async with asgi.client(server.app) as client:
                long = "word " * 800_000
                messages = [{"role": "user", "content": long}]
                for path, body in (
                    ("completions", {"prompt": [long, long]}),
                    ("chat/completions", {"messages": messages}),
                ):
                    counted.count = 0
                    error = (await ask(client, path, **body)).json()["error"]
                    assert error["code"] == "context_length_exceeded", error
                    assert counted.count < 2**15
            made.stop()
            assert await made.join(60)
            worker.engine.tokenizer = ByteTokenizer()

    asyncio.run(scenario())


def test_a_model_without_a_template_says_so():
    async def scenario():
        for chat in (None, ChatTemplate("{% for %}", "", "")):
            async with serving(chat) as (client, _):
                body = {"messages": [{"role": "user", "content": "x"}]}
                response = await ask(client, "chat/completions", **body)
                assert response.status_code == 400 and "chat template" in response.text

    asyncio.run(scenario())


def test_a_key_is_needed_where_there_are_keys():
    async def scenario():
        async with serving(keys=["x" * 20, KEY]) as (client, _):
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer no"}, 401),
                ({"Authorization": KEY}, 401),
                ({"Authorization": f"Bearer {KEY}"}, 200),
            ):
                assert (await client.get("/v1/models", headers=headers)).status_code == status
            assert (await client.get("/health")).status_code == 200

    asyncio.run(scenario())


def test_too_many_that_wait_are_told_to_come_again():
    async def scenario():
        async with serving(max_waiting=2) as (client, _):
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
            responses = await asyncio.gather(*(ask(client, **body) for _ in range(12)))
            codes = sorted(r.status_code for r in responses)
            # 4 run and 2 wait; more than these only if some ended in between.
            assert codes[:6] == [200] * 6 and codes[-1] == 429
            refused = next(r for r in responses if r.status_code == 429)
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
            assert refused.json()["error"]["code"] == "too_many_waiting"
            assert (await ask(client, prompt="x", max_tokens=2)).status_code == 200

    asyncio.run(scenario())


def test_a_request_that_takes_too_long_is_ended():
    async def scenario():
        async with serving(request_timeout_s=0.05) as (client, _):
            body = {"prompt": "x", "max_tokens": 120, "ignore_eos": True}
            response = await ask(client, **body)
            assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
            parts = await events(client, **body)
            assert parts[-1]["error"]["code"] == "timeout"

    asyncio.run(scenario())


def test_an_engine_that_raises_ends_all_requests_and_health_says_so():
    class Broken:
        """The engine, until its third step."""

        def __init__(self):
            self.steps = 0

        def __getattr__(self, name):
            return getattr(engine(), name)

        def step(self):
            self.steps += 1
            if self.steps > 3:
                raise RuntimeError("out of memory")
            return engine().step()

    async def scenario():
        async with serving(to=Broken()) as (client, worker):
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
            responses = await asyncio.gather(*(ask(client, **body) for _ in range(3)))
            assert [r.status_code for r in responses] == [500] * 3
            assert "out of memory" in responses[0].json()["error"]["message"]
            health = await client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "engine_failed"
            assert (await ask(client, **body)).status_code == 500
            for sequence in list(engine().scheduler.running):
                engine().cancel(sequence.request)
            list(engine().run())

    asyncio.run(scenario())


# Numbers as JSON spells them, at the edges of arrays and of what Python converts.
EDGES = [
    *(str(sign * 2**bits + more) for bits in (7, 8, 15, 16, 31, 32, 53, 63, 64) for sign in (1, -1)
      for more in (-1, 0)),
    "0", "-0.0", "1", "-1", "0.5", "1e-400", "1e38", "3.5e38", "-1e39", "1e308", "1e400", "-1e400",
    "NaN", "Infinity", "9" * 400, "-" + "9" * 400, "9" * 5000, "true", '"1"',
]  # fmt: skip
NUMBERS = {
    "completions": [
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "priority",
        "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
        "stop_token_ids", "logit_bias", "prompt", "stream_options",
    ],
    "chat/completions": ["max_tokens", "max_completion_tokens", "top_logprobs", "top_k", "seed"],
}  # fmt: skip
INSIDE = {
    "stop_token_ids": "[%s]",
    "logit_bias": '{"5": %s}',
    "prompt": "[[65, %s]]",
    "stream_options": '{"include_usage": %s}',
}


async def check_edges(edges_of):
    """Asks for each member at some edges beside eight streams, none of which may notice."""
    headers = {"Content-Type": "application/json"}
    # As many may wait as all edges of `n` ask for at once.
    async with serving(max_body=8192, max_waiting=2**12) as (client, worker):
        stream = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        alone = [(await ask(client, **stream, seed=seed)).json()["choices"] for seed in range(8)]
        running: list = []
        for number, (path, name) in enumerate(
            (p, n) for p, names in NUMBERS.items() for n in names
        ):
            if not running:
                running = [asyncio.create_task(ask(client, **stream, seed=s)) for s in range(8)]
                await asyncio.sleep(0)
            start = '{"prompt": "a", "max_tokens": 1, "n": 1'
            if path != "completions":
                start = '{"messages": [{"role": "user", "content": "a"}], "logprobs": true'
            values = [INSIDE.get(name, "%s") % edge for edge in edges_of(number)]
            # Of two members the last counts.
            raws = [f'{start}, "priority": 1000, "{name}": {value}}}' for value in values]
            asked = [client.post(f"/v1/{path}", content=r, headers=headers) for r in raws]
            for raw, response in zip(raws, await asyncio.gather(*asked), strict=True):
                assert response.status_code in (200, 400), (raw[:100], response.text[:300])
                assert response.status_code == 200 or len(response.text) < 6000, raw[:100]
            if all(task.done() for task in running):
                assert [task.result().json()["choices"] for task in running] == alone
                running = []
        responses = await asyncio.gather(*running)
        assert [f.json()["choices"] for f in responses] in ([], alone)


def test_no_number_of_a_request_harms_others():
    asyncio.run(check_edges(lambda number: EDGES[number % 9 :: 9]))


@pytest.mark.slow
def test_no_number_of_a_request_harms_others_at_any_edge():
    asyncio.run(check_edges(lambda number: EDGES))


def test_what_fails_while_one_request_is_laid_out_ends_it_alone(monkeypatch):
    """Whatever the reason: here the rules of one request raise, and another's are never made."""
    real = engine_.Answer.write_rules

    def broken(self, rules, slot):
        if self.params.top_k == 7:
            raise OverflowError("does not fit")
        real(self, rules, slot)

    def seeds(self, params, *more):
        if params.top_k == 8:
            raise MemoryError
        return words(self, params, *more)

    words = Engine._seed_words

    @serve
    async def check(client, worker):
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        asked = [body | {"seed": 1}, body | {"top_k": 7}, body | {"top_k": 8}, body | {"seed": 2}]
        alone = [(await ask(client, **asked[i])).json()["choices"] for i in (0, 3)]
        monkeypatch.setattr(engine_.Answer, "write_rules", broken)
        monkeypatch.setattr(Engine, "_seed_words", seeds)
        responses = await asyncio.gather(*(ask(client, **each) for each in asked))
        assert [f.status_code for f in responses] == [200, 500, 500, 200]
        assert [responses[i].json()["choices"] for i in (0, 3)] == alone
        assert (await client.get("/health")).status_code == 200

    check()


@serve
async def test_what_a_client_breaks_off_is_no_traceback(client, worker):
    """An upload that ends early, by ASGI's own messages, and a request with two lengths."""
    sent, messages = [], [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive():
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await client._transport.app(scope, receive, send)
    assert sent[0]["status"] == 499
    headers = {
        "Content-Type": "application/json",
        "Transfer-Encoding": "chunked",
        "Content-Length": "2",
    }
    response = await client.post("/v1/completions", content=b"{}", headers=headers)
    assert response.status_code == 400 and "not both" in response.json()["error"]["message"]


def test_a_request_chooses_an_adapter_by_its_model():
    async def scenario():
        params, _ = lora.adapt(base(), decoder.parts(CFG).axes, LoraConfig(2), jax.random.key(1))
        params = jax.tree.map(
            lambda w: dataclasses.replace(w, b=w.b + 0.3) if lora.is_low_rank(w) else w,
            params,
            is_leaf=lora.is_low_rank,
        )
        made = with_adapters(style=params)
        body = dict(prompt="abc", max_tokens=6, temperature=0, ignore_eos=True)
        async with serving() as (client, _):
            plain = (await ask(client, **body)).json()
        async with serving(to=made) as (client, _):
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(m["id"], m.get("parent")) for m in listed] == [
                ("tiny", None),
                ("style", "tiny"),
            ]
            assert (await client.get("/v1/models/style")).json() == listed[1]
            of_base, of_style = [
                (await ask(client, **body, model=m)).json() for m in ("tiny", "style")
            ]
            assert of_base["choices"] == plain["choices"]
            assert of_style["model"] == "style" and of_style["choices"] != plain["choices"]
            answer = await client.post("/v1/completions", json=body | {"model": "other"})
            assert answer.status_code == 404 and "'style'" in answer.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("word", ["style", "=F", "style=", "tiny=F"])
def test_adapters_are_name_and_folder(word):
    with pytest.raises(UserError, match="adapter="):
        adapter_folders([word], "tiny")


@serve
async def test_the_server_tells_what_it_has_and_does(client, worker):
    listed = (await client.get("/v1/models")).json()["data"]
    assert [m["id"] for m in listed] == ["tiny"] and listed[0]["max_model_len"] == 128
    assert (await client.get("/v1/models/tiny")).json() == listed[0]
    assert (await client.get("/v1/models/x")).status_code == 404
    await ask(client, prompt="x", max_tokens=5, ignore_eos=True)
    page = (await client.get("/metrics")).text
    one = '{model_name="tiny"}'
    for line in (
        f"megajax:generation_tokens_total{one} 5.0",
        f"megajax:prompt_tokens_total{one} 2.0",
        f"megajax:num_requests_running{one} 0.0",
        f"megajax:num_requests_waiting{one} 0.0",
        f"megajax:kv_cache_usage_perc{one} 0.0",
        f"megajax:num_preemptions_total{one} 0.0",
        f"megajax:time_to_first_token_seconds_count{one} 1.0",
        f"megajax:inter_token_latency_seconds_count{one} 4.0",
        'request_success_total{finished_reason="length",model_name="tiny"} 1.0',
    ):
        assert line in page, line


@serve
async def test_a_client_that_leaves_frees_its_pages(client, worker):
    """By ASGI's own messages: the transport above has no client that leaves."""
    for stream in (True, False):
        body = json.dumps({"prompt": "x", "max_tokens": 120, "ignore_eos": True, "stream": stream})
        left, sent = asyncio.Event(), []
        messages = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive(messages=messages, left=left):
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message, sent=sent):
            sent.append(message)

        app = client._transport.app
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        asking = asyncio.create_task(app(scope, receive, send))
        while worker.engine.pool.in_use < 3:
            await asyncio.sleep(0.005)
        left.set()
        await asking
        for _ in range(400):
            if not worker.live:
                break
            await asyncio.sleep(0.005)
        assert worker.live == 0 and worker.engine.pool.in_use == 0
        assert not any(b"[DONE]" in m.get("body", b"") for m in sent)
