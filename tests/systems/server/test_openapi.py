"""The OpenAPI document: valid, complete, and in agreement with what the server does."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import jsonschema
import pytest
import uvicorn

from megajax.systems.server import http
from megajax.systems.server.launch import build_server
from megajax.systems.server.openapi import SCHEMAS
from megajax.systems.server.options import HttpOptions
from tests.systems.server.test_app import TEMPLATE, ask, engine, serve, serving


async def fetch(client):
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    return document


def schema_of(document, path):
    content = document["paths"][path]["post"]["requestBody"]["content"]
    # References are resolved from the root of the document.
    return content["application/json"]["schema"] | {"components": document["components"]}


def accepts(schema, body):
    return jsonschema.Draft202012Validator(schema).is_valid(body)


@serve
async def test_the_document_says_what_the_server_answers(client, worker):
    document = await fetch(client)
    for path, methods in document["paths"].items():
        (method,) = methods
        if method == "get" and "{name}" not in path:
            response = await client.get(path)
            (content,) = methods["get"]["responses"]["200"]["content"].items()
            assert response.headers["content-type"].startswith(content[0]), path
            if content[0] == "application/json":
                schema = content[1]["schema"] | {"components": document["components"]}
                jsonschema.validate(response.json(), schema)
    chat = [{"role": "user", "content": "x"}]
    cases = [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 2, "temperature": 0}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
    ]
    for path, body in cases:
        schema = schema_of(document, path)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert accepts(schema, body)
        response = await client.post(path, json=body)
        assert response.status_code == 200
        shape = document["paths"][path]["post"]["responses"]["200"]["content"]
        jsonschema.validate(response.json(), shape["application/json"]["schema"])
    error = (await client.post("/tokenize", json={"prompt": 3})).json()
    jsonschema.validate(error, SCHEMAS["Error"])


FORBIDDEN = """{"temperature": -1} {"temperature": "hot"} {"top_p": 0} {"top_p": 1.5} {"n": 129}
    {"n": 0} {"max_tokens": 1.5} {"stream": "yes"} {"stop": [3]} {"seed": 9223372036854775808}
    {"top_k": -2} {"logprobs": 21} {"logit_bias": []} {"suffix": "x"} {"prompt": 3}
    {"stream_options": {"usage": true}} {"modalities": ["audio"]} {"prompt": null}
    {"tempreature": 1} {"presence_penalty": 2.5} {"min_tokens": -1}"""


@pytest.mark.parametrize("member", re.findall(r"\{(?:[^{}]|\{[^{}]*\})*\}", FORBIDDEN))
def test_what_the_document_forbids_the_server_refuses(member):
    async def scenario():
        async with serving() as (client, _):
            schema = schema_of(await fetch(client), "/v1/completions")
            body = {"prompt": "x"} | json.loads(member)
            return accepts(schema, body), (await ask(client, **body)).status_code

    assert asyncio.run(scenario()) == (False, 400)


def test_a_model_without_a_chat_template_has_the_same_members_but_no_chats():
    async def members(chat):
        async with serving(chat=chat) as (client, _):
            paths = (await client.get("/v1/models")).json()["data"][0]["endpoints"]
            return paths, schema_of(await fetch(client), "/v1/chat/completions")["properties"]

    (some, with_template), (none, without) = (
        asyncio.run(members(chat)) for chat in (TEMPLATE, None)
    )
    assert with_template == without and "top_logprobs" in without
    assert [*some] == ["/v1/chat/completions", "/v1/completions"] and none == some[1:]


@contextlib.contextmanager
def listening():
    """Yields the address of a server that runs in a thread."""
    made = http.listen("127.0.0.1", 0)
    limits = HttpOptions(max_body=2**16)
    worker, server = build_server(engine(), "tiny", TEMPLATE, limits, max_batch=4)
    config = uvicorn.Config(server.app, lifespan="off", ws="none", log_level="error")
    web = uvicorn.Server(config)

    async def run():
        worker.start()
        await web.serve([made])
        worker.stop()
        await worker.join()

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    try:
        yield http.address(made)
    finally:
        web.should_exit = True
        thread.join()
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_schemathesis_finds_nothing(tmp_path, seed):
    """Requests that the document allows and that it forbids: no 500, no answer of another shape."""
    program = Path(sys.executable).parent / "schemathesis"
    if not program.is_file():
        pytest.skip("needs schemathesis, which is in no group: uv pip install schemathesis")
    with listening() as address:
        ran = subprocess.run(
            [
                str(program),
                "run",
                f"{address}/openapi.json",
                f"--seed={seed}",
                "--max-examples=30",
                "--request-timeout=100",
                # Members exclude each other in ways that no schema says.
                "--exclude-checks=positive_data_acceptance",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert ran.returncode == 0, ran.stdout
