"""Images in chats: what is answered, what is refused, and what hostile files cost."""

import asyncio
import base64
import dataclasses
import functools
import io
import json
import resource
import socket
import struct
import time
import zlib

import jax
import numpy as np
import pytest
from PIL import Image

from megajax.checkpoint.manager import CheckpointManager
from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.data.conversations import Inline, Record, Turn
from megajax.data.tokenizer import ByteTokenizer
from megajax.data.vision import Dialogue
from megajax.models.vlm import VlmConfig
from megajax.serving import Engine, SamplingParams
from megajax.systems.open_model import open_model
from megajax.systems.server import images as images_
from megajax.systems.server.base import ApiError
from megajax.systems.server.options import HttpOptions
from megajax.training.vision import nano
from tests import image_loop
from tests.systems.server.test_app import ask, events, serving
from tests.tiny import MODEL

PLACEHOLDER = 260
CFG = VlmConfig(
    dataclasses.replace(MODEL, layers=1, vocab=262, max_positions=160),
    image_loop.TOWER,
    PLACEHOLDER,
    "2,1,1",
)


@functools.cache
def engine():
    return Engine(
        CFG,
        image_loop.sharp(CFG),
        dtype="float32",
        max_batch=4,
        prefill_chunk=16,
        page_size=8,
        pages=80,
        tokenizer=ByteTokenizer(),
    )


def serve(**options):
    """Runs a coroutine function with a client of a server with these options."""

    def wrap(test):
        @functools.wraps(test)
        def run():
            async def scenario():
                async with serving(to=engine(), **options) as (client, worker):
                    await test(client, worker)

            asyncio.run(scenario())

        del run.__wrapped__  # pytest would take its parameters for fixtures
        return run

    return wrap


def url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def saved(pixels, kind="PNG", **options):
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def shown(*urls):
    return [{"type": "image_url", "image_url": {"url": each}} for each in urls]


def asking(*parts, **body):
    """The body of a chat whose one message has these parts: texts, and URLs of images."""
    content = [
        {"type": "text", "text": part[1:]} if part.startswith("=") else shown(part)[0]
        for part in parts
    ]
    body = {"max_tokens": 8, "temperature": 0, "logprobs": True} | body
    return body | {"messages": [{"role": "user", "content": content}]}


def drawn(ids, *images):
    """The log-probabilities that the engine itself gives."""
    engine().submit(ids, SamplingParams(max_tokens=8, temperature=0), images=images)
    return [score for output in engine().run() for score in output.logprobs]


def scores(answer):
    return [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]


FIRST, SECOND = image_loop.picture(1, 16, 24), image_loop.picture(2, 16, 24)


@serve()
async def test_images_are_answered_as_the_engine_does(client, worker):
    one = await ask(client, "chat/completions", **asking(url(saved(FIRST)), "=what?"))
    two = await ask(
        client, "chat/completions", **asking("=a", url(saved(FIRST)), url(saved(SECOND)), "=b")
    )
    other = await ask(client, "chat/completions", **asking(url(saved(SECOND)), "=what?"))
    assert [answer.status_code for answer in (one, two, other)] == [200] * 3, two.text
    parts = await events(client, "chat/completions", **asking(url(saved(FIRST)), "=what?"))
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == one.json()["choices"][0]["message"]["content"]
    spelled = lambda text: list(text.encode())  # noqa: E731
    ids = [*spelled("user: "), PLACEHOLDER, *spelled("what?\nassistant: ")]
    assert one.json()["usage"]["prompt_tokens"] == len(ids) + 5  # 6 merged patches
    worker.stop()
    assert await worker.join(60)
    assert np.allclose(scores(one), drawn(ids, FIRST), atol=1e-5)
    assert not np.allclose(scores(one), scores(other), atol=1e-2)
    ids = [*spelled("user: a"), PLACEHOLDER, PLACEHOLDER, *spelled("b\nassistant: ")]
    assert np.allclose(scores(two), drawn(ids, FIRST, SECOND), atol=1e-5)


def test_a_run_on_images_is_served_as_it_was_trained(tmp_path):
    """Its parameters; and a chat reads the tokens that training makes of the same turns."""
    run = dataclasses.replace(nano(), model=CFG)
    (tmp_path / "config.json").write_text(config.to_json(run))
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.save(3, {"params": image_loop.sharp(CFG)}, data_state={"rows": 0})
    manager.close()
    with pytest.raises(UserError, match="a vision-language model, which scripts/serve.py serves"):
        open_model(run_dir=str(tmp_path))
    opened = open_model(run_dir=str(tmp_path), vision=True)
    assert opened.cfg == CFG
    params, what = opened.load_to_serve(MeshSpec().build(jax.devices()[:1]))
    assert "step 3" in what
    to = Engine(CFG, params, dtype="float32", max_batch=4, pages=80, tokenizer=opened.tokenizer)

    async def scenario():
        async with serving(to=to, chat=opened.chat) as (client, _):
            asked = asking(url(saved(FIRST)), "=what?", logprobs=None, max_tokens=6)
            return await ask(client, "chat/completions", **asked)

    turns = Turn("user", (None, "what?")), Turn("assistant", ("x",))
    record = Record("here", turns, (Inline("image", b""),))
    tokens, _ = Dialogue(ByteTokenizer(), PLACEHOLDER).encode(record)
    expected = image_loop.one_by_one(tokens[:-2].tolist(), [FIRST], 6, cfg=CFG)
    message = asyncio.run(scenario()).json()["choices"][0]["message"]
    assert message["content"] == ByteTokenizer().decode(expected)


@pytest.fixture
def listener():
    """A socket to which a server that opened an address would connect."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        made.setblocking(False)
        yield made
        with pytest.raises(BlockingIOError):
            made.accept()


def test_no_address_and_no_file_is_opened(listener, tmp_path):
    host = f"127.0.0.1:{listener.getsockname()[1]}/x.png"
    (tmp_path / "x.png").write_bytes(saved(FIRST))
    data = base64.b64encode(saved(FIRST)).decode()
    urls = [f"{scheme}://{host}" for scheme in ("http", "https", "HTTP", "ftp", "gopher", "ws")]
    urls += [f"file://{tmp_path}/x.png", f"{tmp_path}/x.png", f"//{host}", "", " ", "blob:x"]
    urls += [f" data:image/png;base64,{data}", "data:image/png,x", "data:image/png;base64", data]
    urls += [f"data:image/png;base64,http://{host}", f"data:text/uri-list;base64,{data[:40]}\n"]

    async def scenario():
        async with serving(to=engine()) as (client, _):
            for each in urls:
                answer = await ask(client, "chat/completions", **asking(each, "=what?"))
                error = answer.json()["error"]
                assert answer.status_code == 400, each
                assert error["param"] == "messages[0].content[0].image_url", error
                assert error["code"] == "invalid_image"
            assert (
                "opens no address"
                in (await ask(client, "chat/completions", **asking(f"http://{host}"))).text
            )
            good = url(saved(FIRST))
            wrong = [None, "data:", {}, {"url": 3}, {"url": good, "file": "x"}]
            for inner in [*wrong, {"url": good, "detail": 1}]:
                part = {"type": "image_url", "image_url": inner}
                body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
                assert (await ask(client, "chat/completions", **body)).status_code == 400, inner

    asyncio.run(scenario())


@serve(max_images=2, max_image_bytes=4000, max_image_pixels=1000, max_image_memory=2000)
async def test_number_bytes_pixels_and_memory_are_limited(client, worker):
    async def refused(*parts, status=400):
        answer = await ask(client, "chat/completions", **asking(*parts))
        assert answer.status_code == status, answer.text
        return answer.json()["error"]["message"]

    small = url(saved(image_loop.picture(3, 8, 8)))
    assert "has 3 images; at most 2 (--max_images)" in await refused(*[small] * 3)
    noise = url(saved(image_loop.picture(3, 24, 24)))
    assert "(--max_image_bytes)" in await refused(noise, noise[:-8] + "A" * 3000)
    large = url(saved(np.zeros((40, 40, 3), np.uint8)))
    message = await refused(large)
    assert "pixels; it may have 1,000" in message and "(--max_image_pixels)" in message
    # The two never fit, so it would be in vain to ask again.
    assert "(--max_image_memory)" in await refused(noise, noise)
    assert "base64" in await refused(small[:-9] + "\xe9" + small[-8:])
    assert (await ask(client, "chat/completions", **asking(small))).status_code == 200
    # Two images of nine tokens each fit the memory alone, and not the context with this text.
    assert "the model's context" in await refused(small, "=" + "x" * 200)


def chunk(name, content):
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def png(width, height, data=b"", depth=8, colour=2, more=b""):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg_size(data, height, width):
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


@functools.cache
def hostile():
    """Files by name."""
    noise = image_loop.picture(7, 64, 64)
    photo, plain, webp = saved(noise, "JPEG"), saved(noise), saved(noise, "WEBP")
    zeros = zlib.compress(bytes(3 * 2048 * 2048), 1)
    frames = [Image.fromarray(image_loop.picture(k, 32, 32)) for k in range(5)]
    moving = {"save_all": True, "append_images": frames[1:]}
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7), 9))
    return {
        "empty": b"",
        "one byte": b"\x89",
        "text": b"hello" * 100,
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "html": b"<html><script>1</script></html>",
        "gif": saved(Image.fromarray(noise), "GIF"),
        "tiff": saved(noise, "TIFF"),
        "bmp": saved(noise, "BMP"),
        "pdf": b"%PDF-1.7\n" * 50,
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "zip": b"PK\x03\x04" + bytes(100),
        "1 x 60000": saved(np.zeros((60000, 1, 3), np.uint8)),
        "60000 x 1": saved(np.zeros((1, 60000, 3), np.uint8)),
        "1 x 900": saved(np.zeros((900, 1, 3), np.uint8)),
        "100000 x 100000": png(100000, 100000, zlib.compress(bytes(1000))),
        "2^31 - 1": png(2**31 - 1, 2**31 - 1, zlib.compress(b"")),
        "no width": png(0, 10, zlib.compress(b"")),
        "jpeg 65500 x 65500": jpeg_size(photo, 65500, 65500),
        "jpeg of no lines": jpeg_size(photo, 0, 64),
        "bomb below the limit": png(4000, 4000, zlib.compress(bytes(4000 * 12001), 9)),
        "bomb above it": png(20000, 20000, zeros),
        "more pixels than said": png(16, 16, zeros),
        "fewer than said": png(64, 64, zlib.compress(bytes(100))),
        "compressed text": png(16, 16, zlib.compress(bytes(49 * 16)), more=text),
        "truncated png": plain[: len(plain) // 2],
        "truncated jpeg": photo[: len(photo) // 2],
        "truncated webp": webp[: len(webp) // 2],
        "header alone": plain[:33],
        "damaged jpeg": photo[:300] + bytes(reversed(photo[300:])),
        "moving png": saved(frames[0], "PNG", **moving),
        "moving webp": saved(frames[0], "WEBP", **moving),
        "16 bits": saved(Image.fromarray(np.zeros((9, 9), np.uint16))),
        "palette": saved(Image.fromarray(noise).convert("P")),
        "alpha": saved(Image.fromarray(noise).convert("RGBA")),
        "cmyk": saved(Image.fromarray(noise).convert("CMYK"), "JPEG"),
        "half of a base64 digit": None,
        "50 MB": None,
    }


ANSWERED = {"bomb below the limit", "moving png", "moving webp", "palette", "alpha", "16 bits"}
ANSWERED |= {"cmyk"}


@serve()
async def test_hostile_files_get_an_answer_or_a_400_and_the_server_goes_on(client, worker):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    urls = {name: url(data) for name, data in hostile().items() if data is not None}
    urls["half of a base64 digit"] = url(saved(FIRST))[:-3]
    urls["50 MB"] = "data:image/png;base64," + "A" * 50_000_000
    assert len(urls) >= 30
    for name, each in urls.items():
        answer = await ask(client, "chat/completions", **asking(each, "=x", max_tokens=1))
        assert answer.status_code in (200, 400), (name, answer.text)
        assert "Traceback" not in answer.text and "/" not in answer.json().get("error", {}).get(
            "message", ""
        ), answer.text
        if name in ANSWERED:
            assert answer.status_code == 200, (name, answer.text)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 800 * 2**10, f"{grown / 2**10:.0f} MiB"
    answer = await ask(client, "chat/completions", **asking(url(saved(FIRST)), "=x", max_tokens=1))
    assert answer.status_code == 200


def test_others_are_answered_while_an_image_is_decoded(monkeypatch):
    def slow(data, **limits):
        time.sleep(0.6)
        return FIRST

    monkeypatch.setattr(images_, "decode", slow)

    async def scenario():
        async with serving(to=engine()) as (client, _):
            body = asking(url(b"x"), "=x", max_tokens=1)
            asked = [asyncio.create_task(ask(client, "chat/completions", **body)) for _ in range(3)]
            await asyncio.sleep(0.1)
            begun = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            text = await ask(client, prompt="a", max_tokens=1)
            assert text.status_code == 200 and not any(task.done() for task in asked)
            assert time.monotonic() - begun < 0.45
            assert [(await task).status_code for task in asked] == [200] * 3

    asyncio.run(scenario())


@serve()
async def test_the_placeholder_is_nobodys_to_write(client, worker):
    answer = await ask(client, prompt=[1, PLACEHOLDER], max_tokens=1)
    assert answer.status_code == 400
    assert "1 placeholders of images (token 260) and there are 0 images" in answer.text
    chat = {"messages": asking(url(b"x"), "=a")["messages"]}
    ids = (await client.post("/tokenize", json=chat)).json()["tokens"]
    assert ids == [*b"user: ", PLACEHOLDER, *b"a\nassistant: "]
    for wrong in (5, "x", [5], [{"role": "user", "content": 5}], [[]], {"a": 1}):
        answer = await ask(client, "chat/completions", messages=wrong)
        assert answer.status_code == 400, wrong


def test_images_of_other_requests_leave_no_memory_until_they_end():
    reader = images_.ImageReader(engine().see, HttpOptions(max_image_memory=2000))
    part = images_.part_of(shown(url(saved(image_loop.picture(3, 24, 24))))[0], "messages[0]")
    live = reader.read([part])
    with pytest.raises(ApiError) as refused:
        reader.read([part])
    assert refused.value.status == 429
    del live, refused
    assert len(reader.read([part])) == 1
    with pytest.raises(ApiError, match=r"image_url: the images of the request, resized") as refused:
        reader.read([part, part])
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "inner, message",
    [
        (None, r"^messages\[0\].image_url must be {'url'"),
        ({"url": "data:,", "x": 1}, r"^messages\[0\].image_url has the member x"),
        ({"url": url(png(40000, 1))}, r" has 40,000 x 1 pixels; but a side at most 32,768$"),
    ],
)
def test_messages_are_sentences(inner, message):
    reader = images_.ImageReader(engine().see, HttpOptions())
    with pytest.raises(ApiError, match=message):
        reader.read([images_.part_of({"type": "image_url", "image_url": inner}, "messages[0]")])


@serve(max_body=2000, max_image_bytes=4000)
async def test_what_is_no_image_of_a_body_is_limited_as_others(client, worker):
    image = url(saved(image_loop.picture(3, 24, 24)))
    assert len(image) > 2000
    for text, status in (("x", 200), ("x" * 2000, 413)):
        answer = await ask(client, "chat/completions", **asking(image, "=" + text, max_tokens=1))
        assert answer.status_code == status, answer.text
    assert "(--max_body)" in answer.text
    escaped = json.dumps(asking(image, "=x", max_tokens=1)).replace("/", "\\/")
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/v1/chat/completions", content=escaped, headers=headers)
    assert answer.status_code == 200, answer.text
    answer = await ask(client, "chat/completions", **asking(image[:-8] + "A" * 99999, "=x"))
    assert answer.status_code == 413 and "(--max_body, --max_image_bytes)" in answer.text


@serve(max_body=2000, max_image_bytes=4000, request_timeout_s=0.3)
async def test_slow_clients_stop_no_other_for_long(client, worker):
    async def slowly():
        await asyncio.sleep(20)
        yield b"{}"

    def send(content):
        headers = {"Content-Type": "application/json", "Content-Length": "3000"}
        return client.post("/v1/chat/completions", content=content, headers=headers)

    slow = [asyncio.create_task(send(slowly())) for _ in range(images_.LARGE_BODIES)]
    await asyncio.sleep(0.1)
    answer = await asyncio.wait_for(send(b" " * 3000), 5)
    assert answer.status_code == 429 and "4 other bodies" in answer.text
    assert answer.headers["Retry-After"] == "1"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


def test_nothing_is_decoded_for_a_request_that_is_refused(monkeypatch):
    def never(data, **limits):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(images_, "decode", never)

    async def scenario():
        for body, status, options in (
            ({"temperature": -1}, 400, {}),
            ({"surprise": 1}, 400, {}),
            ({}, 429, {"max_waiting": 0}),
        ):
            async with serving(to=engine(), **options) as (client, worker):
                if status == 429:
                    monkeypatch.setattr(worker, "check_room", functools.partial(full, worker))
                answer = await ask(client, "chat/completions", **asking(url(b"x"), "=x", **body))
                assert answer.status_code == status, answer.text

    def full(worker):
        raise ApiError(429, "full")

    asyncio.run(scenario())
