"""Tools in chats: the three forms of calls, whole and streamed; what is no call stays text."""

import asyncio
import json

import pytest

from megajax.systems.open_model import ChatTemplate
from megajax.systems.server.tools import CallReader, form_of
from tests.systems.server.test_app import TEMPLATE, ask, events, serving

NAMES = frozenset({"add", "now"})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": "é"}}'
MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "é"}}]'
ADD = [("add", {"a": 1, "b": "é"})]

CASES = [
    ("hermes", HERMES, "", ADD),
    ("hermes", f"Let me see.\n{HERMES}\n{NOW}", "Let me see.\n", [*ADD, ("now", {})]),
    ("hermes", HERMES.removesuffix("</tool_call>"), "", ADD),
    ("llama", LLAMA, "", ADD),
    ("llama", f"\n{LLAMA}; {LLAMA}", "", ADD * 2),
    ("mistral", MISTRAL, "", ADD),
    ("mistral", MISTRAL.removeprefix("[TOOL_CALLS] "), "", ADD),
]
TEXTS = [
    ("hermes", "a < b and <tool_"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
    ("hermes", HERMES.replace("add", "rm")),
    ("hermes", HERMES.replace('{"a": 1, "b": "é"}', '"x"')),
    ("hermes", HERMES + "<tool_call>{</tool_call>"),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("llama", '{"name": ' * 50_000),
    ("llama", "An answer with " + LLAMA),
    ("llama", LLAMA + " and more"),
    ("llama", "{}"),
    ("mistral", "[1, 2]"),
    ("mistral", MISTRAL[:-1]),
    ("mistral", "Hello"),
]


def read(form, text, size):
    reader = CallReader(form, NAMES)
    shown = "".join(reader.add(text[i : i + size]) for i in range(0, len(text), size))
    held, calls = reader.finish()
    return shown + held, [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls
    ]


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_calls_are_read_however_the_text_comes(number, size):
    form, text, shown, calls = CASES[number]
    got, made = read(form, text, size)
    assert (got.strip(), made) == (shown.strip(), calls)


@pytest.mark.parametrize("size", [5, 10**6])
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_what_is_no_call_stays_text(number, size):
    form, text = TEXTS[number]
    assert read(form, text, size) == (text, [])


def test_the_template_says_the_form():
    assert form_of("{% if tools %}<tool_call>") == "hermes"
    assert form_of("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]") == "mistral"
    assert form_of("""{% if tools %}{"name": x, "parameters": y}""") == "llama"
    assert form_of("<tool_call>") is form_of("{{ tools }}") is None


SOURCE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a }})"
    "{% endfor %};{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "1 + 2?"}


def test_a_chat_with_tools():
    """The model is made to write a call by a constraint of its form."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    body = {
        "messages": [USER],
        "tools": [TOOL],
        "max_tokens": 70,
        "structured_outputs": {"choice": [call]},
    }
    past = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]

    async def scenario():
        template = ChatTemplate(SOURCE, "", "")
        async with serving(chat=template, max_body=2**15) as (client, _):
            chat = "chat/completions"
            complete = (await ask(client, chat, **body)).json()
            streamed = await events(client, chat, **body)
            plain = (await ask(client, chat, **body, tool_choice="none")).json()
            ids = await client.post("/tokenize", json={"messages": past, "tools": [TOOL]})
            refused = [
                (await ask(client, chat, **{**body, **wrong})).status_code
                for wrong in (
                    {"tools": [3]},
                    {"tools": [{"type": "function"}]},
                    {"tools": [{**TOOL, "type": "x"}]},
                    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
                    {"tools": [TOOL] * 129},
                    {"tool_choice": "required"},
                    {"functions": [TOOL]},
                    {"messages": [{**USER, "tool_calls": [1]}]},
                    {"messages": [{**USER, "tool_calls": {"a": 1}}]},
                )
            ]
            prompt = await client.post("/detokenize", json={"tokens": ids.json()["tokens"]})
        async with serving(chat=TEMPLATE) as (client, _):
            none = await ask(client, "chat/completions", **body)
        return complete, streamed, plain, prompt.json()["prompt"], refused, none

    complete, streamed, plain, prompt, refused, none = asyncio.run(scenario())
    (choice,) = complete["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    deltas = [p["choices"][0]["delta"] for p in streamed]
    (last,) = [d["tool_calls"] for d in deltas if "tool_calls" in d]
    assert last[0]["function"] == made["function"] and last[0]["index"] == 0
    assert not any(d.get("content") for d in deltas)
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert plain["choices"][0]["message"]["content"] == call
    assert prompt == "add <tool_call>user: 1 + 2?;assistant: add(1);tool: 3;"
    assert refused == [400] * 9
    assert none.status_code == 400 and none.json()["error"]["code"] == "no_tools"
