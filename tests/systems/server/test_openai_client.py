"""A real server, asked by OpenAI's own client: everything that its users rely on."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import jax
import openai
import psutil
import pytest
from PIL import Image

from megajax.data.tokenizer import FileTokenizer, train_bpe
from megajax.foreign import hf
from megajax.models import decoder
from megajax.models.vlm import VlmConfig
from tests.image_loop import TOWER, picture, sharp
from tests.tiny import MODEL

pytestmark = [pytest.mark.process, pytest.mark.slow]
SCRIPT = Path(__file__).parents[3] / "scripts" / "serve.py"
CFG = dataclasses.replace(MODEL, layers=1, vocab=400, vocab_multiple=16, max_positions=1024)
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant> "
CALM = {"max_retries": 0, "timeout": 120}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of random weights with a tokenizer and a chat template."""
    made = tmp_path_factory.mktemp("model") / "tiny-chat"
    params = jax.jit(decoder.parts(CFG).init)(jax.random.key(0))
    hf.save(params, CFG, made, "float32")
    texts = ["hello wörld 日本 user assistant def return " * 3]
    train_bpe(texts, 400, made / "tokenizer.json")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


class Served:
    """A process of scripts/serve.py."""

    def __init__(self, folder, log, *flags, **env):
        self._log = log
        # On one device: these tests emulate eight.
        env = os.environ | {"XLA_FLAGS": ""} | env
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), f"--hf={folder}", "--port=0", "--dtype=float32",
                 "--prefill_chunk=64", "--pages=400", *flags],
                stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent,
            )  # fmt: skip
        deadline = time.monotonic() + 180
        while not (address := re.search(r"http://\S+/v1", log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.url = address[0]

    def metric(self, name):
        page = httpx2.get(self.url.removesuffix("/v1") + "/metrics").text
        return float(re.search(rf"^megajax:{name}{{.*}} (\S+)$", page, re.M)[1])

    def settle(self, name="num_requests_running"):
        """Waits until nothing runs, and checks that all pages are free."""
        for _ in range(200):
            if not self.metric(name) and not self.metric("kv_cache_usage_perc"):
                return
            time.sleep(0.05)
        raise AssertionError("pages are still in use")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert code == 0, self._log.read_text()


@contextlib.contextmanager
def served(folder, log, *flags, **env):
    made = Served(folder, log, *flags, **env)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with served(folder, tmp_path_factory.mktemp("log") / "log", "--max_batch=16") as made:
        yield made
        made.end()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", **CALM) as made:
        yield made


def test_models_and_a_completion(client, folder):
    assert [m.id for m in client.models.list().data] == ["tiny-chat"]
    assert client.models.retrieve("tiny-chat").id == "tiny-chat"
    completion = client.completions.create(model="tiny-chat", prompt="hello", max_tokens=9, seed=1)
    again = client.completions.create(model="tiny-chat", prompt="hello", max_tokens=9, seed=1)
    assert completion.choices[0].text == again.choices[0].text and completion._request_id
    tokenizer = FileTokenizer(folder / "tokenizer.json", "tiny")
    assert completion.usage.prompt_tokens == 1 + len(tokenizer.encode(["hello"])[0])


def test_a_chat_and_its_stream(client):
    asked = {
        "model": "tiny-chat",
        "seed": 2,
        "max_completion_tokens": 20,
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "日本"}],
    }
    answer = client.chat.completions.create(**asked)
    options = {"include_usage": True}
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert parts[0].choices[0].delta.role == "assistant"
    deltas = [c.delta.content or "" for p in parts for c in p.choices]
    assert "".join(deltas) == answer.choices[0].message.content
    assert parts[-1].usage == answer.usage and not parts[-1].choices
    assert parts[-2].choices[0].finish_reason == answer.choices[0].finish_reason


def test_stop_strings(client):
    asked = {"model": "tiny-chat", "prompt": "hello", "seed": 3, "max_tokens": 40}
    text = client.completions.create(**asked).choices[0].text
    stop = text[5:8]
    for stopped in (
        client.completions.create(**asked, stop=[stop]).choices[0].text,
        "".join(
            p.choices[0].text for p in client.completions.create(**asked, stop=stop, stream=True)
        ),
    ):
        assert stopped == text[: text.index(stop)]


def test_logprobs_in_both_formats(client):
    asked = {"model": "tiny-chat", "temperature": 0, "max_tokens": 6}
    logprobs = client.completions.create(**asked, prompt="hello", logprobs=3).choices[0].logprobs
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob == max(top.values()) <= 0 and len(top) == 3
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        **asked, messages=messages, logprobs=True, top_logprobs=2
    ).choices[0]
    entries = chat.logprobs.content
    data = bytes(b for entry in entries for b in entry.bytes)
    assert data.decode(errors="replace") == chat.message.content
    assert all(e.top_logprobs[0].logprob == e.logprob for e in entries)


def test_several_answers_and_forms(client):
    asked = {"model": "tiny-chat", "max_tokens": 12, "seed": 4}
    several = client.completions.create(**asked, prompt="hello", n=3)
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert len({c.text for c in several.choices}) == 3
    form = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
    messages = [{"role": "user", "content": "?"}]
    asked["max_tokens"] = 100
    chat = client.chat.completions.create(**asked, messages=messages, response_format=schema)
    assert json.loads(chat.choices[0].message.content)["a"] in (True, False)
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "top_k": 5, "min_p": 0.01}
    text = client.completions.create(**asked, prompt="x", extra_body=extra).choices[0].text
    assert text in ("yes", "no")


def test_errors_have_the_classes_of_the_client(client, server):
    asked = {"model": "tiny-chat", "prompt": "hello"}
    with pytest.raises(openai.NotFoundError, match="does not exist") as refused:
        client.completions.create(**asked | {"model": "gpt"})
    assert refused.value.code == "model_not_found" and refused.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="context has 1024 tokens") as refused:
        client.completions.create(**asked, max_tokens=1024)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="context has 1024"):
        client.chat.completions.create(
            model="tiny-chat", messages=[{"role": "user", "content": "hello " * 2000}]
        )
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**asked, temperature=-1)
    headers = {"Content-Type": "application/json"}
    response = httpx2.post(server.url + "/completions", content="{no", headers=headers)
    assert response.status_code == 400 and "not valid JSON" in response.json()["error"]["message"]


def test_forty_streams_at_a_time(server):
    async def one(client, seed):
        asked = {"model": "tiny-chat", "prompt": "hello", "seed": seed, "max_tokens": 40}
        stream = await client.completions.create(**asked, stream=True)
        return "".join([p.choices[0].text async for p in stream])

    async def scenario():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", **CALM) as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(40)))
            assert [await one(client, seed) for seed in (0, 17, 39)] == [
                together[seed] for seed in (0, 17, 39)
            ]

    asyncio.run(scenario())
    server.settle()


def test_a_client_that_leaves_frees_its_pages(client, server):
    asked = {"model": "tiny-chat", "prompt": "hello", "max_tokens": 1000}
    before = server.metric("generation_tokens_total")
    stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    stream.close()
    server.settle()
    assert server.metric("generation_tokens_total") - before < 900
    with pytest.raises(openai.APITimeoutError):  # without streaming
        client.completions.create(**asked, timeout=0.1, extra_body={"ignore_eos": True})
    server.settle()


def test_two_thousand_requests_leave_nothing_behind(server):
    """Of every kind: whole, streamed, refused, left, with a form."""
    memory = psutil.Process(server.process.pid)

    async def one(client, number):
        asked = {"model": "tiny-chat", "prompt": f"hello {number}", "max_tokens": 6}
        kind = number % 5
        if kind == 0:
            stream = await client.completions.create(**asked, stream=True)
            assert [p async for p in stream]
        elif kind == 1:
            stream = await client.completions.create(**asked | {"max_tokens": 500}, stream=True)
            async with stream:
                await anext(stream)
        elif kind == 2:
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**asked, top_p=7)
        else:
            form = {"structured_outputs": {"regex": f"[a-z]{{{number % 9 + 1}}}"}}
            more = {"extra_body": form} if kind == 3 else {"n": 2}
            await client.completions.create(**asked, **more)

    async def some(client, first, count):
        async def worker(start):
            for number in range(first + start, first + count, 20):
                await one(client, number)

        await asyncio.gather(*(worker(k) for k in range(20)))
        await asyncio.to_thread(server.settle)
        return memory.memory_info().rss, memory.num_fds(), memory.num_threads()

    async def scenario():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", **CALM) as client:
            await some(client, 0, 500)
            first = await some(client, 500, 500)
            second = await some(client, 1000, 1000)
            print(f"(memory, files, threads) after 1,000 requests {first}, 2,000 {second}")
            assert second[0] - first[0] < 8 * 2**20, (first, second)
            assert second[1] <= first[1] + 4 and second[2] <= first[2] + 2

    asyncio.run(scenario())


def test_overload_is_429_with_the_time_to_wait(folder, tmp_path):
    async def scenario(url):
        async with openai.AsyncOpenAI(base_url=url, api_key="k" * 20, **CALM) as client:
            asked = {"model": "other-name", "prompt": "x", "max_tokens": 200}
            jobs = [
                client.completions.create(**asked, extra_body={"ignore_eos": True})
                for _ in range(12)
            ]
            responses = await asyncio.gather(*jobs, return_exceptions=True)
        refused = [f for f in responses if isinstance(f, openai.RateLimitError)]
        assert refused and len(refused) + sum(hasattr(f, "choices") for f in responses) == 12
        assert 1 <= int(refused[0].response.headers["retry-after"]) <= 60
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="no", **CALM).models.list()

    keys = tmp_path / "keys"
    keys.write_text("k" * 20 + "\n")
    keys.chmod(0o600)
    flags = ("--max_batch=2", "--max_waiting=3", f"--api_key_file={keys}")
    with served(folder, tmp_path / "log", *flags, "--served_model_name=other-name") as made:
        asyncio.run(scenario(made.url))
        made.end()


def test_sigterm_lets_running_requests_end_and_a_second_one_does_not(folder, tmp_path):
    for number, signals in enumerate((1, 2)):
        with served(folder, tmp_path / f"log{number}") as made:
            with openai.OpenAI(base_url=made.url, api_key="x", **CALM) as client:
                stream = client.completions.create(
                    model="tiny-chat",
                    prompt="x",
                    max_tokens=900,
                    stream=True,
                    extra_body={"ignore_eos": True},
                    stream_options={"include_usage": True},
                )
                next(stream)
                made.process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
                host, port = made.url.removesuffix("/v1").removeprefix("http://").split(":")
                with pytest.raises(OSError):
                    socket.create_connection((host, int(port)), timeout=5)
                if signals == 2:
                    made.process.send_signal(signal.SIGTERM)
                    with pytest.raises(openai.APIError, match="stopping"):
                        list(stream)
                    assert made.process.wait(30) == 1
                    continue
                *_, last, usage = stream
                assert last.choices[0].finish_reason == "length"
                assert usage.usage.completion_tokens == 900
            assert made.process.wait(30) == 0


def test_two_processes_serve_one_model(folder, client, tmp_path):
    """Tensor parallel over jax.distributed, as over two hosts."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    envs = [
        {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": rank}
        for rank in "01"
    ]
    flags = (f"--hf={folder}", "--dtype=float32", "--prefill_chunk=64", "--mesh.tensor=2")
    log = (tmp_path / "follower").open("w")
    follower = subprocess.Popen(
        [sys.executable, str(SCRIPT), *flags, "--pages=400"],
        env=os.environ | envs[1] | {"XLA_FLAGS": ""},
        cwd=tmp_path,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        with served(folder, tmp_path / "log", *flags[3:], **envs[0]) as made:
            with openai.OpenAI(base_url=made.url, api_key="x", **CALM) as two:
                asked = {"model": "tiny-chat", "prompt": "hello", "temperature": 0}
                texts = [
                    c.completions.create(**asked, max_tokens=60, n=2).choices[1].text
                    for c in (client, two)
                ]
                assert texts[0] == texts[1]
                form = {"structured_outputs": {"regex": "[ab]{9}"}, "ignore_eos": True}
                text = two.completions.create(**asked, extra_body=form).choices[0].text
                assert re.fullmatch("[ab]{9}", text)
                with pytest.raises(openai.BadRequestError):
                    two.completions.create(**asked | {"prompt": [999]})
                more = {"max_tokens": 1000, "stream": True, "extra_body": {"ignore_eos": True}}
                stream = two.completions.create(**asked, **more)
                next(stream)
                stream.close()
                made.settle()
                stream = two.completions.create(**asked, **more | {"max_tokens": 300})
                next(stream)
                for process in (follower, made.process):
                    process.send_signal(signal.SIGTERM)
                assert list(stream)[-1].choices[0].finish_reason == "length"
            assert made.process.wait(60) == 0
        assert follower.wait(60) == 0
    finally:
        follower.kill()
        follower.wait()
        log.close()


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """A folder of a vision-language model with a template that has a form for images."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("model")
    made, file = folder / "tiny-sees", folder / "tokenizer.json"
    train_bpe(["hello what is in these images user assistant " * 3], 396, file)
    built = Tokenizer.from_file(str(file))
    built.add_special_tokens(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    text = dataclasses.replace(CFG, bias="qkv")
    cfg = VlmConfig(text, TOWER, built.token_to_id("<|image_pad|>"), "2,1,1")
    hf.save(sharp(cfg), cfg, made, "float32")
    built.save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}> {% for c in m.content %}{% if c.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}\n"
        "{% endfor %}<assistant> "
    )
    return made


def shown(*images, text="what?"):
    urls = [
        image if isinstance(image, str) else f"data:image/png;base64,{png(image)}"
        for image in images
    ]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def png(seed):
    file = io.BytesIO()
    Image.fromarray(picture(seed, 40, 32)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_images_and_their_streams(sees, tmp_path):
    def ask(client, *images, **more):
        options = {"max_tokens": 8, "temperature": 0, "logprobs": True} | more
        options["model"] = "tiny-sees"
        return client.chat.completions.create(messages=shown(*images), **options)

    with served(sees, tmp_path / "log") as made, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        with openai.OpenAI(base_url=made.url, api_key="none", **CALM) as client:
            one, again, other = ask(client, 1), ask(client, 1), ask(client, 2)
            text = one.choices[0].message.content
            scores = [[e.logprob for e in a.choices[0].logprobs.content] for a in (one, other)]
            assert text == again.choices[0].message.content and scores[0] != scores[1]
            assert one.usage.prompt_tokens > 20  # merged patches, and the text
            parts = [part for part in ask(client, 1, stream=True) if part.choices]
            assert "".join(part.choices[0].delta.content or "" for part in parts) == text
            assert ask(client, 1, 2).usage.prompt_tokens == one.usage.prompt_tokens + 22
            before = made.metric("prefix_cache_hits_total")
            assert before > 0
            for address in ("http://127.0.0.1:{}/x.png", "https://127.0.0.1:{}/x.png"):
                with pytest.raises(openai.BadRequestError, match="opens no address"):
                    ask(client, address.format(listener.getsockname()[1]))
            with pytest.raises(openai.BadRequestError, match="PNG, JPEG or WebP"):
                ask(client, "data:image/png;base64,AAAA")
            with pytest.raises(BlockingIOError):
                listener.accept()
            made.settle()
        made.end()


def test_a_port_in_use_is_told_at_once(folder, server):
    port = server.url.removesuffix("/v1").rpartition(":")[2]
    command = [sys.executable, str(SCRIPT), f"--hf={folder}", f"--port={port}"]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2 and "Address already in use" in second.stderr
    assert len(second.stderr.splitlines()) == 1
