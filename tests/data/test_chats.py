"""Conversations in files, their rows and masks. Oracles: the messages themselves, and a count by
hand of what a letter a token gives."""

import json

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data import quiz
from megajax.data.chat import Chat, rows
from megajax.data.chats import (
    ChatDataConfig,
    ChatRows,
    conversation,
    marked,
    open_chats,
    open_source,
    open_sources,
    trained_tokenizer,
    training_rows,
)
from megajax.data.pack import packed
from megajax.data.tokenizer import open_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, SAID = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A BPE of bytes, trained on nothing, and the template with it."""
    cache = tmp_path_factory.mktemp("cache")
    cfg = ChatDataConfig(tokenizer="bpe:258")
    tokenizer = open_tokenizer(str(trained_tokenizer(cfg, open_sources(cfg), cache)))
    return tokenizer, Chat(TEMPLATE, tokenizer), cache


def write(path, values):
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return str(path)


def sets(tokens, source, seq_len=32, **changes):
    tokenizer, chat, cache = tokens
    cfg = ChatDataConfig(source=source, **{"holdout": 0.0} | changes)
    said = []
    made = open_chats(cfg, open_sources(cfg), tokenizer, chat, seq_len, cache, said.append)
    return made, said


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ({"messages": [USER, SAID]}, [USER, SAID]),
        (
            {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
            [USER, SAID],
        ),
        (
            {"conversations": [USER, SAID], "system": "s"},
            [{"role": "system", "content": "s"}, USER, SAID],
        ),
        ({"instruction": "a?", "input": "", "output": "b"}, [USER, SAID]),
        (
            {"instruction": "a", "input": "c", "output": "b", "history": [["a?", "b"]]},
            [USER, SAID, {"role": "user", "content": "a\n\nc"}, SAID],
        ),
        (
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "s"}]}, SAID]},
            [{"role": "system", "content": "s"}, SAID],
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        (
            {
                "conversations": [
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "2"},
                ]
            },
            [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
            ],
        ),
    ],
)
def test_formats_of_conversations(value, messages):
    assert conversation(value, "here").messages == messages


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[" * 10_000 + "]" * 10_000, "nested too deep"),
        ("{", "is not JSON"),
        ("7", "must be an object with messages"),
        ("{}", "it needs messages, conversations, or instruction"),
        ('{"messages": "a"}', "must be a list"),
        ('{"messages": []}', "must be a list with a message"),
        ('{"messages": [7]}', "message 0 must have a role"),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', "a role of system, user"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "must have a role"),
        ('{"messages": [{"role": "user", "content": 7}]}', "must have a content, a text, not 7"),
        ('{"messages": [{"role": "user"}]}', "must have a content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing to learn"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "is no text"),
        ('{"messages": [{"role": "assistant", "tool_calls": [7]}]}', "tool_calls that are no list"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "weight"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "lone surrogate"),
        ('{"conversations": [{"from": "x", "value": "a"}]}', "a from of human"),
        ('{"conversations": [{"from": "function_call", "value": "{"}]}', "of no JSON"),
        ('{"instruction": "a", "output": "b", "history": [7]}', "list of pairs"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": [7]}', "list of objects"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": "{"}', "no JSON"),
    ],
)
def test_lines_of_strangers_are_refused_by_name(tmp_path, tokens, line, words):
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps({'messages': [USER, SAID]})}\n{line}\n")
    with pytest.raises(UserError, match=words) as error:
        sets(tokens, str(path))
    assert "line 2" in str(error.value) and len(str(error.value)) < 600
    (made,), _ = sets(tokens, str(path), faulty="skip")
    assert made.counts["conversations"] == 1
    assert made.counts["conversations that cannot be used"] == 1


def test_a_huge_line_and_other_files_are_refused(tmp_path, monkeypatch):
    from megajax.data import conversations

    monkeypatch.setattr(conversations, "RECORD", 100)
    with pytest.raises(UserError, match="line 1 has over 100 bytes"):
        open_source(write(tmp_path / "x.jsonl", ["a" * 200]))
    for name, words in (("none.jsonl", "does not exist"), ("x.csv", "must be quiz, FILE.jsonl")):
        (tmp_path / "x.csv").write_text("a")
        with pytest.raises(UserError, match=words):
            open_source(str(tmp_path / name))
    (tmp_path / "x.json").write_text('{"messages": []}')
    with pytest.raises(UserError, match="must hold a list"):
        open_source(str(tmp_path / "x.json"))


def test_json_and_parquet_give_what_jsonl_gives(tmp_path):
    import pyarrow
    from pyarrow import parquet

    values = [{"messages": quiz.messages(k)} for k in range(5)]
    lines = open_source(write(tmp_path / "x.jsonl", values))
    (tmp_path / "x.json").write_text(json.dumps(values))
    parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "x.parquet")
    for name in ("x.json", "x.parquet"):
        source = open_source(str(tmp_path / name))
        assert [source[k].messages for k in range(len(source))] == [
            lines[k].messages for k in range(5)
        ]


def test_rows_hold_conversations_whole_with_answers_as_targets(tmp_path, tokens):
    tokenizer, chat, _ = tokens
    values = [{"messages": [USER, {**SAID, "content": "b" * n}]} for n in (1, 2, 3, 4, 1)]
    (made,), said = sets(tokens, write(tmp_path / "x.jsonl", values), seq_len=64)
    assert len(said) == 1 and sets(tokens, str(tmp_path / "x.jsonl"), seq_len=64)[1] == []
    assert made.counts["tokens that are learnt"] == 11 + 5  # the letters, and an end each
    made_rows = ChatRows(made.train, 64, 0, shuffle=False)
    learnt = 0
    for i in range(made_rows.rows_per_epoch):
        row = made_rows[i]
        assert {k: (v.shape, v.dtype) for k, v in row.items()} == {
            k: ((64,), np.int32) for k in ("tokens", "targets", "segments", "positions")
        }
        dead = row["segments"] == -1
        assert (row["targets"][dead] == -1).all() and (row["positions"][dead] == 0).all()
        for segment in set(row["segments"].tolist()) - {-1}:
            places = row["segments"] == segment
            assert row["positions"][places].tolist() == list(range(places.sum()))
            targets = row["targets"][places]
            answer = targets[targets >= 0]
            assert set(tokenizer.decode(answer[:-1])) == {"b"} and answer[-1] == tokenizer.end
            # A target is the token that follows.
            following = [*row["tokens"][places][1:].tolist(), tokenizer.end]
            assert all(t in (-1, n) for t, n in zip(targets, following, strict=True))
            learnt += len(answer)
    assert learnt == 16
    one = rows(values[2]["messages"], tokenizer, chat)
    assert made.train.read(2)[0].tolist() == one["tokens"].tolist()
    assert made.train.read(2)[1].tolist() == one["mask"].tolist()


def test_every_epoch_has_every_conversation_once(tmp_path, tokens):
    values = [{"messages": [USER, {**SAID, "content": str(n)}]} for n in range(100, 140)]
    (made,), _ = sets(tokens, write(tmp_path / "x.jsonl", values), seq_len=70)
    made_rows = ChatRows(made.train, 70, 3)
    n = made_rows.rows_per_epoch
    for epoch in (0, 1):
        seen = []
        for i in range(epoch * n, epoch * n + n):
            learnt = made_rows[i]["targets"]
            text = tokens[0].decode(learnt[learnt >= 0], special=True)
            seen += text.split("<|eos|>")[:-1]
        assert sorted(seen) == [str(k) for k in range(100, 140)]
    np.testing.assert_array_equal(
        made_rows[n + 1]["tokens"], ChatRows(made.train, 70, 3)[n + 1]["tokens"]
    )
    assert made_rows.fill > 0.9


def test_what_is_too_long_is_cut_behind_an_answer_or_left_out(tmp_path, tokens):
    tokenizer = tokens[0]
    long = {"messages": [USER, SAID, USER, {**SAID, "content": "c" * 99}]}
    never = {"messages": [{**USER, "content": "d" * 99}, SAID]}
    source = write(tmp_path / "x.jsonl", [long, never, {"messages": [USER, SAID]}])
    (made,), _ = sets(tokens, source, seq_len=40)
    assert made.counts["cut behind an answer"] == made.counts["left out, too long"] == 1
    ids, mask = made.train.read(0)
    assert tokenizer.decode(ids, special=True) == "<user>a?<|eos|><assistant>b<|eos|>"
    assert mask.tolist()[-2:] == [True, True] and mask.sum() == 2
    (made,), _ = sets(tokens, source, seq_len=40, too_long="drop")
    assert made.counts["left out, too long"] == 2 and len(made.train) == 1
    with pytest.raises(UserError, match="line 1 has 142 tokens; a row of train.seq_len=40"):
        sets(tokens, source, seq_len=40, too_long="error")
    with pytest.raises(UserError, match="has nothing to learn: .*2 left out, too long"):
        sets(tokens, write(tmp_path / "y.jsonl", [never, never]), seq_len=40)


def test_sides_follow_what_is_asked_and_mixtures_keep_their_weights(tmp_path, tokens):
    def values(letter):
        asked = [{"role": "user", "content": f"{letter}{i % 40}"} for i in range(80)]
        return [{"messages": [u, {**SAID, "content": str(i)}]} for i, u in enumerate(asked)]

    a, b = (write(tmp_path / f"{x}.jsonl", values(x)) for x in "xy")
    made, _ = sets(tokens, f"{a}:0.75,{b}:0.25", holdout=0.3, seq_len=40)
    for s in made:
        sides = []
        for side in (s.train, s.held_out):
            texts = [tokens[0].decode(side.read(k)[0], special=True) for k in range(len(side))]
            sides.append({text.partition("<|eos|>")[0] for text in texts})
        assert sides[0] and sides[1] and not sides[0] & sides[1]
    mixed = training_rows(made, 40, 0)
    letters = [tokens[0].decode(mixed[i]["tokens"][:7]) for i in range(400)]
    assert sum("x" in text for text in letters) == pytest.approx(300, abs=30)


def test_a_row_is_shown_with_what_is_learnt_marked(tmp_path, tokens):
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    values = [{"messages": [{**USER, "content": "\x1b[2J"}, SAID]}]
    values += [{"messages": [USER, calls, {"role": "tool", "content": "2"}, SAID], "tools": [{}]}]
    (made,), _ = sets(tokens, write(tmp_path / "x.jsonl", values), seq_len=200)
    text = marked(ChatRows(made.train, 200, 0, shuffle=False)[0], tokens[0])
    assert text.startswith(
        "--- conversation 1\n<user>\\x1b[2J<|eos|><assistant>[b<|eos|>]\n--- conversation 2\n[{}]"
    )
    assert '<assistant>[{"name": "f", "arguments": {"x": 1}}<|eos|>]<tool>2<|eos|>' in text


def test_packing_fills_the_first_row_with_room():
    sizes = np.array([[5], [6], [4], [3], [1], [10]])
    assert packed(range(6), sizes, (10,)) == [[0], [1, 2], [3, 4], [5]]
    assert packed(range(6), sizes, (10,), 8) == [[0, 2, 4], [1, 3], [5]]
