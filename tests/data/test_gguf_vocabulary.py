"""Tokenizers of GGUF files against merging by hand, written from the two algorithms."""

import io
import itertools
import json
import random
import unicodedata

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data import vocabulary_files
from megajax.data.tokenizer import JsonTokenizer, open_tokenizer, train_bpe
from tests import gguf_writer as w

TEXT = (__doc__ + "\n" + "def main(self): return 'it''s 2024, we''ve 1,234.5 naïve cafés'\n\t") * 3
SPARE = 2**40


def made(metadata, tokens, **arrays):
    raw, settings = vocabulary_files.tokenizer_json(metadata, SPARE, tokens, **arrays)
    return JsonTokenizer(raw, settings, "a file")


def texts(rng, count):
    letters = "   aeistheTHE'sreve0123456789\n\r\t,.!?-<|>é中文😀_²½"
    for _ in range(count):
        if rng.random() < 0.5:
            begin = rng.randrange(len(TEXT))
            yield TEXT[begin : begin + rng.randint(0, 60)]
        else:
            yield "".join(rng.choice(letters) for _ in range(rng.randint(0, 30)))


# ---- byte-level BPE


def is_letter(c):
    return unicodedata.category(c)[0] == "L"


def is_number(c):
    return unicodedata.category(c)[0] == "N"


def is_other(c):
    return not (is_letter(c) or is_number(c) or c.isspace())


def run(text, at, test):
    end = at
    while end < len(text) and test(text[end]):
        end += 1
    return end


def gpt2_words(text):
    """GPT-2's pattern: 's|'t|'re|'ve|'m|'ll|'d| ?L+| ?N+| ?[^ LN]+|blanks but the last|blanks."""
    at, words = 0, []
    while at < len(text):
        end = next(
            (
                at + len(x)
                for x in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
                if text.startswith(x, at)
            ),
            at,
        )
        start = at + (text[at] == " ")
        for test in (is_letter, is_number, is_other):
            if end == at and run(text, start, test) > start:
                end = run(text, start, test)
        if end == at:
            end = run(text, at, str.isspace)
            if end < len(text) and end - at > 1:
                end -= 1
        words.append(text[at:end])
        at = end
    return words


def digits_apart(text):
    """SmolLM: every number alone, then GPT-2's pattern on what is between."""
    words, part = [], ""
    for c in text:
        if is_number(c):
            words += [*gpt2_words(part), c]
            part = ""
        else:
            part += c
    return words + gpt2_words(part)


def contraction(text, at):
    low = text[at : at + 3].lower()
    return next(
        (len(x) for x in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if low.startswith(x)), 0
    )


def llama3_words(text, digits):
    """The pattern of Llama 3 (digits 3) and Qwen2 (digits 1)."""
    at, words = 0, []
    while at < len(text):
        c = text[at]
        lead = at + (not (is_letter(c) or is_number(c) or c in "\r\n"))
        other = at + (c == " ")
        if size := contraction(text, at):
            end = at + size
        elif run(text, lead, is_letter) > lead:
            end = run(text, lead, is_letter)
        elif is_number(c):
            end = min(at + digits, run(text, at, is_number))
        elif run(text, other, is_other) > other:
            end = run(text, run(text, other, is_other), lambda x: x in "\r\n")
        else:
            stop = run(text, at, str.isspace)
            line = max((i for i in range(at, stop) if text[i] in "\r\n"), default=None)
            if line is not None:
                end = line + 1
            else:
                end = stop - 1 if stop < len(text) and stop - at > 1 else stop
        words.append(text[at:end])
        at = end
    return words


def merge(word, ranks, vocab, ignores_merges):
    """Byte-level BPE: the pair of the lowest rank first."""
    letters = w.byte_letters()
    parts = [letters[b] for b in word.encode()]
    if ignores_merges and "".join(parts) in vocab:
        return [vocab["".join(parts)]]
    while True:
        pairs = [(ranks.get(pair, 10**9), i) for i, pair in enumerate(itertools.pairwise(parts))]
        rank, i = min(pairs, default=(10**9, 0))
        if rank == 10**9:
            return [vocab[p] for p in parts]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


WORDS = {
    "gpt-2": gpt2_words,
    "smollm": digits_apart,
    "llama-bpe": lambda text: llama3_words(text, 3),
    "qwen2": lambda text: llama3_words(text, 1),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(tokens, merges) of a BPE of 600 tokens."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe([TEXT], 600, path)
    model = json.loads(path.read_text())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    return vocab, [" ".join(m) for m in model["merges"]]


@pytest.mark.parametrize("pre", WORDS)
def test_ids_are_those_of_merging_by_hand(pre, trained, seed):
    tokens, merges = trained
    tokens = [*tokens, "Ġzq", "<|mine|>"]  # a token that no merge makes
    kinds = np.full(len(tokens), 1)
    kinds[:2], kinds[-1] = 3, 4
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    tokenizer = made(metadata, tokens, merges=merges, types=kinds)
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    vocab = {t: i for i, t in enumerate(tokens)}
    for text in [*texts(random.Random(seed), 100), " zq", "a<|bos|> b", TEXT]:
        if pre == "qwen2":
            text = unicodedata.normalize("NFC", text)
        ignores_merges = pre == "llama-bpe"
        expected = [i for x in WORDS[pre](text) for i in merge(x, ranks, vocab, ignores_merges)]
        assert tokenizer.encode([text])[0].tolist() == expected, text
        assert tokenizer.decode(expected) == text
    assert tokenizer.encode(["a<|mine|>b"])[0].tolist()[1:2] == [len(tokens) - 1]
    assert (len(tokens) - 2 in tokenizer.encode([" zq"])[0]) == (pre == "llama-bpe")


def test_text_is_composed_for_qwen(trained):
    tokens, merges = trained
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    tokenizer = made(metadata, tokens, merges=merges)
    assert tokenizer.decode(tokenizer.encode(["cafe\u0301"])[0]) == "caf\u00e9"


@pytest.mark.parametrize(
    ("pre", "add", "begin"),
    [
        ("smollm", None, None),
        ("smollm", True, 260),
        ("llama-bpe", None, 260),
        ("tekken", False, None),
    ],
)
def test_begin_end_and_template(pre, add, begin, tmp_path):
    metadata = w.vocabulary() | {"tokenizer.ggml.pre": pre}
    if add is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    kinds = np.array([x.value for x in metadata["tokenizer.ggml.token_type"]])
    tokenizer = made(metadata, tokens, merges=merges, types=kinds)
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocab) == (begin, 261, 262)
    assert tokenizer.chat_template.startswith("{{ bos_token }}")
    assert tokenizer.settings.tokens["bos_token"] == "<|begin|>"
    tokenizer.copy_to(tmp_path)
    again = open_tokenizer(str(tmp_path))
    assert (again.begin, again.end, again.identity) == (begin, 261, tokenizer.identity)
    text = "hello <|end|> world"
    assert again.encode([text])[0].tolist() == tokenizer.encode([text])[0].tolist()
    assert 261 not in tokenizer.encode([text])[0]


def test_other_ends_of_a_file_stop_answers_too(tmp_path):
    metadata = w.vocabulary() | {"tokenizer.ggml.eot_token_id": 260}
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    kinds = np.array([x.value for x in metadata["tokenizer.ggml.token_type"]])
    tokenizer = made(metadata, tokens, merges=merges, types=kinds)
    assert (tokenizer.end, tokenizer.ends) == (261, (261, 260))
    tokenizer.copy_to(tmp_path)
    assert open_tokenizer(str(tmp_path)).ends == (261, 260)


# ---- SentencePiece


def pieces(rng):
    """Returns (tokens, scores, types): bytes, letters, and what 200 random merges make of them."""
    words = [("\u2581" + x) for x in TEXT.split()] + ["\u2581" * 4]
    letters = sorted(set("".join(words)) - set("2é½"))  # those three fall back to bytes
    made, parts = [], [list(x) for x in words]
    for _ in range(200):
        pairs = {
            a + b
            for x in parts
            for a, b in itertools.pairwise(x)
            if a + b not in made and set(a + b) <= set(letters)
        }
        if not pairs:
            break
        new = rng.choice(sorted(pairs))
        made.append(new)
        for x in parts:
            i = 0
            while i + 1 < len(x):
                if x[i] + x[i + 1] == new:
                    x[i : i + 2] = [new]
                i += 1
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *made, *letters]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(made) + len(letters))
    scores = [0.0] * 259 + [float(-i) for i in range(len(made) + len(letters))]
    return tokens, np.array(scores, np.float32), np.array(kinds)


def piece_ids(text, tokens, scores):
    """SentencePiece's BPE: merge the neighbours whose piece has the highest score, leftmost first;
    letters without a piece become their bytes."""
    vocab = {t: i for i, t in enumerate(tokens)}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        merges = [
            (-scores[vocab[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in vocab
        ]
        if not merges:
            break
        _, i = min(merges)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [3 + b for b in part.encode()]
    return ids


def test_ids_are_those_of_sentencepieces_merges(seed):
    rng = random.Random(seed)
    tokens, scores, kinds = pieces(rng)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = made(metadata, tokens, scores=scores, types=kinds)
    assert (tokenizer.begin, tokenizer.end) == (1, 2)
    for text in texts(rng, 300):
        expected = piece_ids(text, tokens, scores)
        assert tokenizer.encode([text])[0].tolist() == expected, text
        assert tokenizer.decode(expected) == text
    bare = made(
        metadata | {"tokenizer.ggml.add_space_prefix": False}, tokens, scores=scores, types=kinds
    )
    assert bare.encode(["the"])[0].tolist()[0] != tokenizer.encode(["the"])[0].tolist()[0]


@pytest.mark.slow
def test_ids_are_those_of_the_sentencepiece_package(seed):
    spm = pytest.importorskip("sentencepiece", reason="uv sync --group models")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 9),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    sp = spm.SentencePieceProcessor(model_proto=model.getvalue())
    every = range(sp.get_piece_size())
    kinds = [
        2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
        for i in every
    ]
    tokenizer = made(
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 0},
        [sp.id_to_piece(i) for i in every],
        scores=np.array([sp.get_score(i) for i in every], np.float32),
        types=np.array(kinds),
    )
    for text in texts(random.Random(seed), 2000):
        assert tokenizer.encode([text])[0].tolist() == sp.encode(text), text


# ---- limits


def test_a_vocabulary_may_not_be_far_larger_than_its_file():
    check = vocabulary_files.check_counts
    assert check({"tokens": 49152, "merges": 48900}, 98 * 10**6) > 0
    assert check({"tokens": 128256, "merges": 280147}, 7 * 10**8) > 0  # Llama 3.2 1B
    for counts in ({"tokens": 10**6}, {"tokens": 1, "merges": 10**6}):
        with pytest.raises(UserError, match="tokens and merges in a file of 9,000,000 bytes"):
            check(counts, 9 * 10**6)


def test_special_tokens_and_merges_of_pieces_are_limited_too():
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    build = vocabulary_files.tokenizer_json
    tokens = [f"{i:x}" for i in range(9000)]
    with pytest.raises(UserError, match="9,000 of its tokens are special"):
        build(metadata, 2**20, tokens, types=np.full(9000, 3))
    metadata = {"tokenizer.ggml.model": "llama"}
    runs = ["a" * n for n in range(1, 200)]
    with pytest.raises(UserError, match="its 199 pieces have over"):
        build(metadata, 2**20, runs, scores=np.zeros(199))
    with pytest.raises(UserError, match="has 300 letters"):
        build(metadata, 2**20, ["a" * 300], scores=np.zeros(1))
    with pytest.raises(UserError, match="have over 8,388,608 letters"):
        many = [f"{i:06x}" + "b" * 250 for i in range(33_000)]
        build(metadata, 2**40, many, scores=np.zeros(33_000))
    with pytest.raises(UserError, match="there are no scores"):
        build(metadata, 2**20, runs)


@pytest.mark.parametrize(
    ("names", "more", "ends"),
    [
        (["<|im_end|>", "<|eot_id|>"], {}, {262, 263}),
        (["<|return|>", "<|call|>", "<|end_|>"], {}, {262, 263}),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], {}, {262, 263, 264}),
        (["<|fim_pad|>", "other"], {"tokenizer.ggml.fim_pad_token_id": 263}, {263}),
        (["</s>", "<|tool_response>"], {}, {263}),
    ],
)
def test_ends_by_their_text_are_those_of_llama_cpp(names, more, ends):
    """Also where a file calls them normal tokens; in a prompt they are tokens then."""
    metadata = w.vocabulary() | more
    tokens = [*metadata["tokenizer.ggml.tokens"], *names]
    kinds = np.array([x.value for x in metadata["tokenizer.ggml.token_type"]] + [1] * len(names))
    tokenizer = made(metadata, tokens, merges=metadata["tokenizer.ggml.merges"], types=kinds)
    assert set(tokenizer.ends) - {261} >= ends and not set(tokenizer.ends) & (
        {262, 263, 264} - ends
    )
    if not more:
        assert tokenizer.encode([tokens[min(ends)]], special=True)[0].tolist() == [min(ends)]
