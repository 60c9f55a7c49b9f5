"""Hostile requests to every endpoint: each is refused in OpenAI's form, and the server lives."""

import asyncio
import json

import pytest

from tests.systems import test_encoder_server as encoders
from tests.systems.server.test_app import serving

JSON = {"Content-Type": "application/json"}
DEEP = b'{"%s": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
VALUES = (
    """3 true {} {"a":1} [[]] [null] [{}] ["x",3] [[1.5]] [[-1]] [-1] [1e400] [99999999] NaN
    Infinity -Infinity "\\ud800" [true] [[true]] [["x"]] ["""
    "".split()
)
TOPS = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"3",
    b"\xff\xfe{}",
    b"{",
    b"{}",
    b'{"a":NaN}',
    b"{'input': 1}",
]
MEMBERS = """{"model":"other"} {"model":3} {"model":"../../etc/passwd"} {"__proto__":{}}
    {"encoding_format":"hex"} {"encoding_format":7} {"dimensions":-1} {"dimensions":"x"}
    {"truncate":1} {"parse_special":"no"} {"<script>":1} {"stream":true} {"input":null}""".split()


def bodies(name):
    """Yields raw bodies whose member `name` or whose other members are wrong."""
    yield from TOPS
    yield from (f'{{"{name}": {value}}}'.encode() for value in VALUES)
    yield DEEP % name.encode()
    yield json.dumps({name: ["x"] * 2049}).encode()
    yield from (f'{{"{name}": "x", {member[1:]}'.encode() for member in MEMBERS)


async def send(client, path, raw):
    answer = await client.post(path, content=raw, headers=JSON)
    assert 400 <= answer.status_code < 500, (path, raw[:80], answer.status_code, answer.text[:200])
    error = answer.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and len(error["message"]) < 1000
    assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize("head", [False, True])
def test_an_encoder_survives(tmp_path, head):
    path, other = ("/v1/embeddings", "/v1/classify")[:: -1 if head else 1]
    encoders.save(tmp_path / "m", head)

    async def scenario():
        async with encoders.serving(tmp_path / "m", max_body=2**18) as (client, work):
            count = 0
            for raw in bodies("input"):
                await send(client, path, raw)
                count += 1
            await send(client, other, b'{"input": "x"}')
            await send(client, "/v1/completions", b'{"prompt": "x"}')
            await send(client, path, b'{"input": "' + b"x" * 2**18 + b'"}')
            for method in ("GET", "PUT", "DELETE"):
                assert (await client.request(method, path)).status_code == 405
            assert (await client.post(path, content=b'{"input": "x"}')).status_code == 415
            assert (await client.get("/health")).status_code == 200 and work.live == 0
            return count

    assert asyncio.run(scenario()) >= 45


def test_an_input_of_too_many_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megajax.systems.server.encoders.TOKENS", 100)
    encoders.save(tmp_path / "m", False)
    answers = encoders.ask(
        tmp_path / "m",
        "/v1/embeddings",
        [{"input": ["x" * 31] * 4}, {"input": "x" * 99, "truncate": False}],
    )
    assert [a.status_code for a in answers] == [400, 400]
    assert [a.json()["error"]["code"] for a in answers] == ["context_length_exceeded"] * 2


def test_a_language_model_survives_at_its_other_endpoints():
    async def scenario():
        async with serving(max_body=2**18) as (client, worker):
            for path, name in (("/tokenize", "prompt"), ("/detokenize", "tokens")):
                for raw in bodies(name):
                    await send(client, path, raw)
            for path in ("/docs", "/openapi.json", "/version", "/"):
                assert (await client.post(path, content=b"{}")).status_code == 405
                assert (await client.get(path + "?x=<script>")).status_code == 200
            for path in ("/..%2f..%2fetc/passwd", "/docs/../x", "/v1/models/%00", "/v1/models/<b>"):
                answer = await client.get(path)
                assert answer.status_code == 404 and "error" in answer.json()

    asyncio.run(scenario())
