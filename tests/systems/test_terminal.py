"""A chat in a terminal: commands, several lines, Ctrl-C, an engine, a server, hostile answers."""

import io
import json
import signal
import types

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from megajax.core.errors import UserError
from megajax.systems.terminal import Chat, LocalModel, RemoteModel
from tests.systems.server.test_app import engine
from tests.systems.server.test_page import KEY, fake, listening


class Echo:
    """Says what it was asked, and what else the test wants."""

    name, tokens = "echo", 3

    def __init__(self, *parts):
        self.asked, self._parts, self.closed = [], parts, 0

    def answer(self, messages, raw):
        self.asked.append(list(messages))
        if "fail" in messages[-1]["content"]:
            raise UserError("cannot")
        try:
            yield from self._parts or (messages[-1]["content"],)
        finally:
            self.closed += 1


def talk(model, text, **options):
    out, err = io.StringIO(), io.StringIO()
    chat = Chat(model, lines=io.StringIO(text), out=out, err=err, **options)
    chat.run()
    return chat, out.getvalue(), err.getvalue()


def test_messages_and_commands(tmp_path):
    file = tmp_path / "saved.jsonl"
    model = Echo()
    text = '/system Be short.\none\ntwo\\\nlines\n"""\n/a\n\nb\n"""\nfail\n'
    text += f"/save {file}\n/save {file}\n"
    chat, out, err = talk(model, text + "/nothing\n\n/reset\nnew\n/exit\nnever\n")
    assert out == "one\ntwo\nlines\n/a\n\nb\nnew\n"
    assert [m["content"] for m in model.asked[1]] == ["Be short.", "one", "one", "two\nlines"]
    assert model.asked[0][0] == {"role": "system", "content": "Be short."}
    assert [m["content"] for m in model.asked[-1]] == ["Be short.", "new"]
    (saved,) = (json.loads(line) for line in file.read_text().splitlines())
    assert [m["role"] for m in saved["messages"]] == ["system", *["user", "assistant"] * 3]
    assert "error: cannot\n" in err and "there is no command '/nothing'" in err
    assert "exists; name a new file" in err and err.count("[3 tokens, ") == 4
    assert len(chat.messages) == 2 and max(map(len, err.splitlines())) < 200


def test_control_characters_of_an_answer_do_not_reach_the_terminal():
    _, out, _ = talk(Echo("a\x1b]0;title\x07\tb\n", "\x9b31m\r"), "x\n")
    assert out == "a]0;title\tb\n31m\n"


def test_ctrl_c_stops_the_answer_and_not_the_program():
    class Endless(Echo):
        def answer(self, messages, raw):
            self.asked.append(messages)
            try:
                while True:
                    yield "x"
                    signal.raise_signal(signal.SIGINT)
            finally:
                self.closed += 1

    model = Endless()
    before = signal.getsignal(signal.SIGINT)
    chat, out, err = talk(model, "one\ntwo\n")
    assert out == "xx\nxx\n" and model.closed == 2 and err.count("stopped]") == 2
    assert [m["content"] for m in chat.messages] == ["one", "xx", "two", "xx"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_engine_answers_and_stops():
    tokenizer = engine().tokenizer
    llm = types.SimpleNamespace(engine=engine(), tokenizer=tokenizer, name="tiny")
    llm.encode = lambda text: [256, *text.encode()]
    model = LocalModel(llm, {"temperature": 0, "logit_bias": {97: 100}}, 6)
    assert "".join(model.answer([{"role": "user", "content": "x"}], True)) == "aaaaaa"
    assert model.tokens == 6
    grown = model.answer([{"role": "user", "content": "x"}], True)
    assert next(grown) == "a"
    grown.close()
    assert not engine().busy and engine().pool.in_use == 0
    with pytest.raises(UserError, match=r"context 128: /reset begins anew"):
        list(model.answer([{"role": "user", "content": "x" * 200}], True))


def test_a_server_answers():
    app, asked = fake([KEY])
    with listening(app) as address:
        with pytest.raises(UserError, match="401: give a valid key"):
            RemoteModel(address, None, {}, 8)
        model = RemoteModel(address + "/v1/", KEY, {"top_p": 0.5}, 8)
        assert model.name == "tiny"
        with pytest.raises(UserError, match=r"model=huge: .* has tiny \(--model\)"):
            RemoteModel(address, KEY, {}, 8, "huge")
        chat, out, err = talk(model, "hi\nfail\n")
        assert out.startswith("echo hi <img") and "400: cannot answer" in err
        assert asked[0]["top_p"] == 0.5 and asked[0]["max_tokens"] == 8
        assert " tokens, " in err and len(chat.messages) == 2
        talk(model, "a\nb\n", raw=True)
        assert [b["prompt"][:6] for b in asked if "prompt" in b] == ["a", "aecho "]
    with pytest.raises(UserError, match=r"does not answer: .*--url"):
        RemoteModel(address, None, {}, 8)
    with pytest.raises(UserError, match="must begin with http"):
        RemoteModel("file:///etc/passwd", None, {}, 8)


def test_a_server_that_lists_no_models_is_refused():
    for listed in ([], {"data": None}, {"data": [{"name": 1}]}, {"data": [3]}):
        app = Starlette(
            routes=[Route("/v1/models", lambda request, listed=listed: JSONResponse(listed))]
        )
        with listening(app) as address, pytest.raises(UserError, match="lists no models"):
            RemoteModel(address, None, {}, 8)
