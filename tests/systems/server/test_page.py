"""The page for chats: its headers, its place in the server, and how it behaves in Chromium."""

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import threading
import types

import pytest
import uvicorn
from starlette.responses import JSONResponse

from megajax.systems.server import http
from megajax.systems.server.base import ApiError, Base, EventStream, Metrics, parse
from megajax.systems.server.pages import PAGES
from tests.systems.server import asgi
from tests.systems.server.browser import INSTALLED, browser

KEY = "0123456789abcdef"
EVIL = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
CODE = f"Look:\n```html\n{EVIL}\n```\nand `<b>` too."


def fake(keys=(), endpoints=("/v1/chat/completions", "/v1/completions")):
    """A server of a model that says what the test wants, and a list of what it was asked."""
    asked = []

    async def models(_):
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "endpoints": endpoints}]})

    async def answer(request):
        body = parse(await base.body(request))
        asked.append(body)
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if "fail" in text:
            raise ApiError(400, f"cannot answer <b>{text}</b>")
        words = {"code": CODE, "long": "word " * 10_000}.get(text, f"echo {text} {EVIL}")
        pieces = [words[i : i + 5] for i in range(0, len(words), 5)]

        async def events():
            for piece in pieces:
                await asyncio.sleep(0.005)
                part = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
                yield json.dumps({"choices": [{**part, "finish_reason": None}]})
            yield json.dumps({"choices": [], "usage": {"completion_tokens": len(pieces)}})

        return EventStream(events(), 1e9, lambda: asked.append("cancelled"))

    async def classify(request):
        asked.append(parse(await base.body(request)))
        return JSONResponse({"data": [{"probs": [0.25, 0.75]}], "labels": ["bad", "good"]})

    handlers = {path: ("POST", answer) for path in endpoints} | {"/v1/models": ("GET", models)}
    if "/v1/classify" in endpoints:
        handlers["/v1/classify"] = ("POST", classify)
    work = types.SimpleNamespace(check=lambda: None)
    base = Base(handlers, work, Metrics("tiny"), keys=keys, examples={})  # type: ignore
    return base.app, asked


def test_pages_need_no_key_and_load_nothing():
    async def ask():
        async with asgi.client(fake([KEY])[0]) as client:
            refused = await client.get("/v1/models")
            return refused, [await client.get(path) for path in PAGES]

    refused, shown = asyncio.run(ask())
    assert refused.status_code == 401
    for path, page in zip(PAGES, shown, strict=True):
        assert page.status_code == 200, path
        rules = page.headers["content-security-policy"]
        assert rules.startswith("default-src 'none'; ") and "unsafe" not in rules
        assert page.headers["x-content-type-options"] == "nosniff"
        if path == "/openapi.json":
            continue
        loads = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"' )>]*)", page.text)
        assert {*loads} <= {"data:,", "docs", "openapi.json", "./"}, loads
        assert "http:" not in page.text and "https:" not in page.text
        assert not re.search(
            r"\b(innerHTML|outerHTML|insertAdjacent|document\.write|eval)\b", page.text
        )
        assert not re.search(r"<[^>]+\s(on\w+|style)=", page.text)  # the policy forbids these
        for tag in ("script", "style"):
            for inner in re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL):
                digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
                assert f"{tag}-src 'sha256-{digest}'" in rules


@contextlib.contextmanager
def listening(app):
    """Yields the address at which an application listens, in a thread of its own."""
    made = http.listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [made]})
    thread.start()
    try:
        yield http.address(made)
    finally:
        server.should_exit = True
        thread.join()
        made.close()


TEXTS = "[...document.querySelectorAll('.message .text')].map(each => each.textContent)"
IDLE = "!document.getElementById('send').hidden"


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")
def test_a_chat_in_chromium(tmp_path):
    app, asked = fake([KEY])
    with listening(app) as address, browser(tmp_path) as page:
        page.open(address)
        page.until("document.getElementById('error').textContent.includes('API key')")
        page.press("#key", KEY + "\t")
        page.until("document.getElementById('model').value === 'tiny'")
        page.press("#system", "Be short.")
        page.press("#temperature", "0.5")
        page.press("#input", "hi\ue008\ue007\ue008there\ue007")  # Shift+Enter, then Enter
        page.until(f"{TEXTS}.length === 2 && {IDLE}")
        assert page.run(f"return {TEXTS}") == ["hi\nthere", f"echo hi\nthere {EVIL}"]
        body = asked[0]
        assert body["temperature"] == 0.5 and "top_p" not in body
        assert [m["role"] for m in body["messages"]] == ["system", "user"]
        assert re.search(
            r"\d+ tokens, [\d.]+ tokens/s",
            page.run("return document.getElementById('status').textContent"),
        )
        page.press("#input", "code\ue007")
        page.until(f"{TEXTS}.length === 4 && {IDLE}")
        assert page.run("return document.querySelector('pre code').textContent") == EVIL
        assert page.run("return document.querySelectorAll('#log img, #log script').length") == 0
        assert page.run("return document.title") == "megajax"
        for scheme in ("light", "dark"):
            page.cast(scheme)
            for width in (420, 1280):
                page.resize(width, 900)
                page.picture(tmp_path / f"{scheme}_{width}.png")
                wide = page.run("return [document.body.scrollWidth, innerWidth]")
                assert wide[0] <= wide[1], (scheme, width)
        page.click("#options")
        page.picture(tmp_path / "closed.png")
        back = "return getComputedStyle(document.body).backgroundColor"
        before = page.run(back)
        page.click("#theme")
        assert page.run(back) != before
        # Esc stops an answer, whose request ends; the part that came stays.
        page.press("#input", "long\ue007")
        page.until(f"{TEXTS}.length === 6 && {TEXTS}[5].length > 50")
        page.press("#input", "\ue00c")
        page.until(IDLE, 5)
        page.until(
            "document.querySelector('.message:last-of-type .note').textContent.includes('stopped')"
        )
        # An error is said in words, and the message can be sent again.
        page.press("#input", "fail\ue007")
        error = page.until("document.getElementById('error').textContent")
        assert error == "cannot answer <b>fail</b>" and page.run(f"return {TEXTS}.length") == 7
        page.click("#new")
        assert page.run(f"return {TEXTS}") == []
        page.press("#input", "one\ue007")
        page.until(f"{TEXTS}.length === 2 && {IDLE}")
        page.click(".again")
        page.until(f"{TEXTS}.length === 2 && {IDLE}")
        assert [m["content"] for m in asked[-2]["messages"]][1:] == ["one"]
        assert asked.count("cancelled") == 5


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")
def test_other_models_in_chromium(tmp_path):
    app, asked = fake(endpoints=("/v1/completions",))
    with listening(app) as address, browser(tmp_path) as page:
        page.open(address)
        page.until("document.getElementById('model').value === 'tiny'")
        page.press("#input", "ab\ue007")
        page.until(f"{TEXTS}.length === 2 && {IDLE}")
        page.press("#input", "\ue007")  # goes on
        page.until(f"{TEXTS}.length === 3 && {IDLE}")
        assert asked[2]["prompt"] == f"abecho ab {EVIL}" and "messages" not in asked[2]
        page.picture(tmp_path / "completion.png")
    app, asked = fake(endpoints=("/v1/classify",))
    with listening(app) as address, browser(tmp_path / "second") as page:
        page.open(address)
        page.until("document.getElementById('model').value === 'tiny'")
        page.press("#input", "fine\ue007")
        page.until(f"{TEXTS}.length === 2 && {TEXTS}[1].startsWith(' 75.0 %  good')")
        assert asked == [{"model": "tiny", "input": "fine"}]
