"""Constrained answers against independent checks: re, json and jsonschema; random weights."""

import dataclasses
import functools
import json
import re

import jax
import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from megajax.core.errors import UserError
from megajax.data.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from megajax.models import decoder
from megajax.serving import Engine, SamplingParams, StructuredOutputsParams
from megajax.serving.constraint import Constraints
from tests.tiny import MODEL

CFG = dataclasses.replace(MODEL, layers=1, vocab=320, vocab_multiple=64, max_positions=192)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog", None]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "marks"],
    "additionalProperties": False,
}
REGEXES = (
    r"[ab]{3}-\d{1,4}",
    r"(日本|é+x){1,3}",
    r".{2,9}",
    r"(yes|no) *",
    r"[^a-z]{5}",
    r"[\w-]+@x/",
)
CHOICES = ("red", "green. or (blue)", "日 本", " x\n")


@functools.cache
def params(seed):
    return jax.jit(decoder.parts(CFG).init)(jax.random.key(seed))


@functools.cache
def engine(numerics="fast", steps=4):
    return Engine(
        CFG,
        params(0),
        dtype="float32",
        max_batch=6,
        prefill_chunk=16,
        page_size=8,
        pages=100,
        tokenizer=ByteTokenizer(),
        numerics=numerics,
        decode_steps=steps,
    )


def form(**members):
    return StructuredOutputsParams(**members)


def submit(to, structured, seed, temperature=1.5, **more):
    asked = SamplingParams(
        max_tokens=180, seed=seed, temperature=temperature, structured_outputs=structured, **more
    )
    return to.submit([65 + seed % 20, 10], asked)


def texts(to, requests):
    """Returns {request: [(bytes, reason)] by index}. Requests: id -> n."""
    answers = {r: [[[], None] for _ in range(n)] for r, n in requests.items()}
    for output in to.run():
        one = answers[output.request_id][output.index]
        one[0] += [t for t in output.tokens if t != to.tokenizer.end]
        one[1] = output.finish_reason
    decode = to.tokenizer.decode
    assert to.pool.in_use == 0 and to.programs.compiled <= to.programs.bound
    return {r: [(decode(ids), reason) for ids, reason in each] for r, each in answers.items()}


def check(text, reason, structured):
    if reason == "length":  # cut off; that what came so far was legal, the mask has seen to
        return False
    assert reason == "stop"
    if structured.regex is not None:
        assert re.fullmatch(structured.regex, text, re.ASCII), (structured.regex, text)
    elif structured.choice is not None:
        assert text in structured.choice
    else:
        schema = {"type": "object"} if structured.json_object else json.loads(structured.json)
        jsonschema.validate(json.loads(text), schema)
    return True


def test_answers_match_whatever_the_weights_and_the_seed():
    forms = [form(regex=r) for r in REGEXES] + [form(json=PERSON), form(choice=CHOICES)]
    to, requests = engine(), {}
    for seed in range(5):
        for i, structured in enumerate(forms):
            requests[submit(to, structured, seed, (0, 1, 3, 1e20)[(seed + i) % 4])] = structured
        free = to.submit([3, 4], SamplingParams(max_tokens=30, seed=seed, temperature=2.0))
        requests[free] = None
    answers = texts(to, dict.fromkeys(requests, 1))
    ended = [check(*answers[r][0], f) for r, f in requests.items() if f is not None]
    assert sum(ended) > len(ended) * 0.7
    assert {len(answers[r][0][0]) for r, f in requests.items() if f is None} & set(range(9, 31))
    assert any(text not in ("", *CHOICES) for text, _ in (answers[r][0] for r in requests))


def test_the_mask_is_what_makes_them_match():
    """Without it, random weights match nothing: the checks above can fail."""
    to = engine()
    plain = [to.submit([65, 10], SamplingParams(max_tokens=40, seed=s)) for s in range(8)]
    answers = texts(to, dict.fromkeys(plain, 1))
    for each in answers.values():
        assert not any(re.fullmatch(r, each[0][0]) for r in REGEXES if r != ".{2,9}")


def test_a_constraint_does_not_touch_its_neighbours_and_n_answers_differ():
    to = engine()
    free = SamplingParams(max_tokens=20, seed=1, temperature=1.2)

    def tokens(others):
        request = to.submit([1, 2, 3], free)
        requests = {submit(to, form(regex="[a-z]{8,20}"), 7, n=3): 3} if others else {}
        alone = texts(to, {request: 1} | requests)
        return alone[request], [text for r in requests for text, _ in alone[r]]

    first, _ = tokens(False)
    second, siblings = tokens(True)
    assert first == second
    assert len(set(siblings)) == 3 and all(re.fullmatch("[a-z]{8,20}", s) for s in siblings)


def test_exact_numerics_and_penalties_keep_to_the_form():
    to = engine("exact", None)
    structured = form(json=PERSON)
    more = {"repetition_penalty": 1.3, "frequency_penalty": 2, "logit_bias": {65: 100}}
    requests = {submit(to, structured, seed, **more): 1 for seed in range(3)}
    assert any(check(*each[0], structured) for each in texts(to, requests).values())


def test_a_constraint_that_becomes_too_complex_ends_its_answer_only():
    to = engine()
    with pytest.raises(UserError, match="regex cannot be used"):  # known at its first token
        submit(to, form(regex="(a{1000}){1000}"), 0)
    requests = {submit(to, form(regex="[ab](a{1000}){1000}"), 0): 1}
    requests[submit(to, form(regex="[ab]{5}"), 0)] = 1
    (_, first), (text, second) = (each[0] for each in texts(to, requests).values())
    assert (first, second) == ("constraint", "stop") and re.fullmatch("[ab]{5}", text)


def test_a_constrained_answer_survives_preemption():
    to = Engine(
        CFG,
        params(1),
        dtype="float32",
        max_batch=4,
        prefill_chunk=16,
        page_size=4,
        pages=26,
        tokenizer=ByteTokenizer(),
    )
    structured = form(regex="[0-9a-f]{40}")
    asked = [
        SamplingParams(max_tokens=60, seed=seed, structured_outputs=structured) for seed in range(6)
    ]
    requests = {to.submit([5, 6], each): 1 for each in asked}
    assert all(check(*each[0], structured) for each in texts(to, requests).values())
    assert to.scheduler.preemptions > 0


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"regex": "("}, "structured_outputs.regex cannot be used: .*unclosed group"),
        ({"json": {"type": "foo"}}, "Invalid type"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json": '{"type": "array", "items":' * 400 + "{}" + "}" * 400}, "recursion"),
    ],
)
def test_what_cannot_be_compiled_is_refused_at_once(members, message):
    with pytest.raises(UserError, match=message):
        engine().submit([1], SamplingParams(structured_outputs=form(**members)))
    assert not engine().busy


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "exactly one of json, regex, choice, json_object; given: none"),
        ({"regex": "a", "choice": ["a"]}, "given: regex, choice"),
        ({"choice": []}, "list of at least one text"),
        ({"choice": "ab"}, "list of at least one text"),
        ({"json": "{"}, "must be a JSON schema"),
        ({"json": 7}, "must be a JSON schema, an object"),
        ({"regex": 7}, "must be a string"),
        ({"regex": "a" * 2**19}, "characters; it must have at most"),
    ],
)
def test_what_is_no_form_is_refused(members, message):
    with pytest.raises(UserError, match=message):
        form(**members)


def test_an_engine_without_a_tokenizer_says_so():
    without = Constraints(None)
    with pytest.raises(UserError, match="needs a tokenizer"):
        without.matcher(form(regex="a"))


# ---- other vocabularies, without a model: uniform draws from the mask


def walk(tokenizer, structured, seed, most=200):
    """Draws uniformly from what the mask allows. Returns (the text, whether it ended)."""
    matcher = Constraints(tokenizer).matcher(structured)
    random, taken = np.random.default_rng(seed), []
    words = np.zeros(-(-tokenizer.vocab // 32) + 2, np.uint32)
    pieces = tokenizer.pieces()
    for _ in range(most):
        matcher.write_mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert len(allowed) and allowed.max() < tokenizer.vocab
        taken.append(int(random.choice(allowed)))
        if matcher.take(taken[-1]):
            return b"".join(pieces[t] or b"" for t in taken).decode(), True
    return b"".join(pieces[t] or b"" for t in taken).decode(errors="ignore"), False


def sentencepiece(folder):
    """A tokenizer of SentencePiece's kind: bytes, a few pieces, no end token."""
    names = ["<unk>"] + [f"<0x{b:02X}>" for b in range(256)]
    names += ["▁", "▁a", "a", "b", "ab", "日", '▁"', '{"', "1", "▁no"]
    made = tokenizers.Tokenizer(
        models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder / "tokenizer.json", "sp")


@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
def test_any_vocabulary_of_bytes_serves(kind, tmp_path):
    if kind == "bpe":
        train_bpe(["ab ab name age true false 日本 é"] * 9, 300, tmp_path / "tokenizer.json")
        tokenizer = FileTokenizer(tmp_path / "tokenizer.json", "bpe")
    else:
        tokenizer = ByteTokenizer() if kind == "bytes" else sentencepiece(tmp_path / "sp")
    assert (tokenizer.end is None) == (kind == "sentencepiece")
    forms = [form(regex=r) for r in REGEXES] + [form(json=PERSON), form(choice=CHOICES)]
    ended = 0
    for structured in forms:
        for seed in range(4):
            text, done = walk(tokenizer, structured, seed)
            ended += done and check(text, "stop", structured)
    assert ended >= len(forms) * 2


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused(tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", "words")
    with pytest.raises(UserError, match="do not stand for bytes: its decoder is none"):
        Constraints(tokenizer).matcher(form(regex="a"))
