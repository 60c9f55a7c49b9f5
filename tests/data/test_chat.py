"""Control tokens of a chat. Oracle: tokenizers of one token a letter; their ids stand here."""

import json
import random
import re

import pytest
from tokenizers import Tokenizer, models, normalizers

from megajax.core.errors import UserError
from megajax.data.chat import MARKS, ControlTokens, TooLongError
from megajax.data.tokenizer import PART, ByteTokenizer, open_tokenizer, prompt_ids

CONTROL = ["<s>", "<e>", "<es", "s><x", "~"]  # two that overlap others, and one of a letter
LETTERS = "<>sexabt| "


def letters(folder, control=CONTROL, user=("<t>",), normalizer=None):
    """A tokenizer of one id a letter, then the control tokens, then those that are not special."""
    vocab = {c: i for i, c in enumerate(LETTERS)}
    made = Tokenizer(models.BPE(vocab, []))
    if normalizer is not None:
        made.normalizer = normalizer
    members = json.loads(made.to_str())
    members["added_tokens"] = [
        {
            "id": len(vocab) + i,
            "content": c,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": c in control,
        }
        for i, c in enumerate([*control, *user])
    ]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(members))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    return open_tokenizer(str(folder))


def spelled(text):
    return [LETTERS.index(c) for c in text]


S, E, ES, SX, TILDE, T = range(len(LETTERS), len(LETTERS) + 6)


def test_in_a_prompt_special_tokens_are_tokens_or_text(tmp_path):
    tokenizer = letters(tmp_path)
    assert prompt_ids(tokenizer, "a<e>b<s>") == [*spelled("a"), E, *spelled("b"), S]
    assert prompt_ids(tokenizer, "a<e>b<s>", special=False) == spelled("a<e>b<s>")
    assert prompt_ids(tokenizer, "<t>", special=False) == [T]  # is not special: always a token
    assert tokenizer.encode(["a<e>"])[0].tolist() == spelled("a<e>")  # a document
    assert tokenizer.decode([E, 0], special=True) == "<e> <" and tokenizer.decode([E, 0]) == "<"


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (["a<e>b", ""], [*spelled("a<e>b"), S]),
        (["a<e", ">b"], [*spelled("a<e"), S, *spelled(">b")]),
        (["<s><x", "<es>"], [*spelled("<s><x"), S, *spelled("<es>")]),
        (["<s><s>", "<e>"], [*spelled("<s><s>"), S, *spelled("<e>")]),
        (["a<t>", "<t"], [*spelled("a"), T, S, *spelled("<t")]),
    ],
)
def test_only_the_template_writes_control_tokens(tmp_path, texts, ids):
    controls = ControlTokens(letters(tmp_path), "{{ a }}<s>{{ b }}<e>")
    mark = controls.mark(texts)
    first, second = controls.protect(texts, mark)
    assert controls.encode(f"{first}<s>{second}<e>", mark) == [*ids, E]
    for _ in range(2):  # two texts without anything between them
        joined = controls.encode(first + second + "<s>", mark)
        assert joined[-1] == S and not {S, E, ES, SX, TILDE} & set(joined[:-1])


def test_a_token_that_the_template_writes_is_a_control_token(tmp_path):
    """Also one that is not special; and a control token may be one letter."""
    controls = ControlTokens(letters(tmp_path), "<t>{{ a }}")
    mark = controls.mark("a<t>")
    assert controls.encode("<t>" + controls.protect("a<t>", mark), mark) == [T, *spelled("a<t>")]
    assert controls.encode("~" + controls.protect("a~", mark), mark) == [TILDE, *spelled("a")]


def test_marks_cannot_be_forged(tmp_path):
    controls = ControlTokens(letters(tmp_path), "")
    mark = controls.mark({"a": MARKS[0]}, [MARKS[1]])
    assert mark == MARKS[2]
    value = {"<e>": ["<s>", 1, None, {"b": "~"}]}
    made = json.dumps(controls.protect(value, mark), ensure_ascii=False)
    assert not any(c in made for c in CONTROL[:-1]) and '~"' not in made
    assert json.loads(made.replace(mark, "")) == value
    with pytest.raises(UserError, match="U\\+FDD0 to U\\+FDEF"):
        controls.mark("".join(MARKS))


def test_text_of_control_tokens_changes_nothing_around_it(tmp_path):
    """A tokenizer that begins each piece between control tokens in a way of its own."""
    tokenizer = letters(tmp_path, normalizer=normalizers.Prepend("x"))
    controls = ControlTokens(tokenizer, "")
    mark = controls.mark("")
    text = f"<s>{controls.protect('a<e>b', mark)}<s>b"
    assert controls.encode(text, mark) == [S, *spelled("xa<e>b"), S, *spelled("xb")]


def test_tokens_of_a_model_that_are_control_tokens_are_cut_or_moved(tmp_path):
    """A Unigram has </s> among its own pieces; loading it under another name moves other ids."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "</s>ab")]
    members = json.loads(Tokenizer(models.Unigram(pieces, 0, False)).to_str())
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    listed = ((0, "<unk>", True), (1, "</s>", True), (8, "<u>", False), (9, "<v>", True))
    members["added_tokens"] = [{"id": i, "content": c, "special": s} | more for i, c, s in listed]
    (tmp_path / "tokenizer.json").write_text(json.dumps(members))
    controls = ControlTokens(open_tokenizer(str(tmp_path)), "")
    mark = controls.mark("")
    text = f"</s>{controls.protect('a</s>', mark)}<v><u></s>"
    assert controls.encode(text, mark) == [1, 6, 2, 3, 4, 5, 9, 8, 1]


def test_bytes_have_no_control_tokens():
    controls = ControlTokens(ByteTokenizer(), "<s>")
    mark = controls.mark("a")
    assert controls.encode("<s>" + controls.protect("a<s>", mark), mark) == list(b"<s>a<s>")


def test_a_prompt_that_is_refused_is_not_read_to_its_end(tmp_path):
    tokenizer = letters(tmp_path)
    ids = tokenizer.encode(["ab" * 2**20], special=True, most=100)[0]
    assert 100 < len(ids) < 2**15
    text = "ab<e>" * 2**13
    usual = tokenizer.encode([text], special=True, most=2**16)[0].tolist()
    assert usual == [*spelled("ab"), E] * 2**13
    controls = ControlTokens(tokenizer, "")
    mark = controls.mark("")
    assert len(controls.encode(controls.protect("<e>" * 2**18, mark), mark, 100)) < 2**16


@pytest.mark.parametrize("size", [1, 2, 5, 30_000, None])
def test_control_tokens_are_the_leftmost_and_of_those_the_longest(tmp_path, size):
    """Oracle: a regular expression. A long text is read in parts, which tokens may cross."""
    controls = ControlTokens(letters(tmp_path), "")
    mark, rng = controls.mark(""), random.Random(size)
    tokens = re.compile("|".join(map(re.escape, sorted(CONTROL, key=len, reverse=True))))
    texts = ["a" * (PART - i) + "<s><x<es><x" for i in range(12)]
    if size is not None:
        parts = ["<", "s", ">", "x", "e", "<es", "s><x"]
        times = 3 if size > 5 else 200
        texts = ["".join(rng.choice(parts) for _ in range(size)) for _ in range(times)]
    for text in texts:
        expected = tokens.sub(lambda m: "".join(c + mark for c in m[0]), text)
        half = any(text.endswith(t[:n]) for t in CONTROL for n in range(1, len(t)))
        assert controls.protect(text, mark) == expected + mark * half


def test_values_with_far_too_many_control_tokens_are_refused_early(tmp_path):
    controls = ControlTokens(letters(tmp_path), "")
    mark = controls.mark("")
    assert controls.protect(["<s>" * 15, {"a": "~~~~~"}], mark, 10)[1]["a"] == f"~{mark}" * 5
    for value in (["<s>" * 15, {"a": "~~~~~~"}], {"<s>" * 21: ""}, ["<s>"] * 21):
        with pytest.raises(TooLongError, match="over 20 times"):
            controls.protect(value, mark, 10)
    # A template may write more of them than the prompt may have.
    assert 10 < len(controls.encode("<s>" * 1000 + mark, mark, 10)) < 100
