"""The tokenizer that a GGUF file describes, as a tokenizer.json.

Two models: `gpt2`, a byte-level BPE with its merges, whose words are cut as
`tokenizer.ggml.pre` names, and `llama`, SentencePiece's BPE, whose merges follow from the scores of
its pieces. Source of names and of their regular expressions: llama.cpp (src/llama-vocab.cpp) and
the tokenizer.json of the models that the names are called after. No jax.
"""

import functools
import itertools
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import GROWTH
from megajax.data.special_tokens import BEGIN_NAMES, END_NAMES, Settings, template
from megajax.data.tokenizer import MOST

# {argument of tokenizer_json: the file's array}.
ARRAYS = {
    "tokens": "tokenizer.ggml.tokens",
    "merges": "tokenizer.ggml.merges",
    "scores": "tokenizer.ggml.scores",
    "types": "tokenizer.ggml.token_type",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # (the specification)
ENTRY_BYTES = 768  # (measured: 630 to 680) of memory that a token, or a merge, takes to be read
APART_BYTES = 1280  # (measured: 1,160) more for a token that is found before words are cut
SLACK = 48 * 2**20  # (chosen) bytes of memory that any vocabulary may take
MAX_PIECE = 256  # (chosen: published ones have at most some 100) letters of a SentencePiece piece
MAX_LETTERS = 2**23  # (chosen: 2 s; published ones have some 2^21) letters of all such pieces
SPACE = "\u2581"  # SentencePiece's sign for a blank

# (llama.cpp, src/llama-vocab.cpp) Tokens that end an answer by their text, whatever the file says.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# {key of a token of code models that ends an answer: its texts}, the first that there is.
CODE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

_GPT2 = "gpt2"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASES % ("", "", "")
_GPT4O = _CASES % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")

# {name: (how words are cut, whether a word that is a token is not merged from its parts, whether a
# text begins with the begin token)}.
_PRE: dict[str, tuple[str, bool, bool]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat"), (_GPT2, False, False)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        ("digits", False, False),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), (_LLAMA3, True, True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_LLAMA3, False, False)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2, False, False)
    ),
    "tekken": (_TEKKEN, True, True),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O, False, False)),
}
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # their text is normalised to NFC


def check_counts(counts: Mapping[str, int], size: int) -> int:
    """Refuses a vocabulary that would take far more memory than its file has bytes.

    counts: {member of ARRAYS: its elements}. size: of the file, bytes.
    Returns: bytes of memory that are left for `tokenizer_json`.
    """
    if not counts.get("tokens"):
        raise UserError("it has no tokens, so no tokenizer can be made of it")
    entries = counts["tokens"] + counts.get("merges", 0)
    budget = SLACK + (GROWTH - 2) * size
    if entries * ENTRY_BYTES > budget or counts["tokens"] > MOST:
        raise UserError(
            f"{entries:,} tokens and merges in a file of {size:,} bytes; at most "
            f"{min(MOST, budget // ENTRY_BYTES):,} are read in one of this size"
        )
    return budget - entries * ENTRY_BYTES


def tokenizer_json(
    metadata: Mapping[str, Any],
    spare: int,
    tokens: Sequence[str],
    merges: Sequence[str] = (),
    scores: np.ndarray | None = None,
    types: np.ndarray | None = None,
) -> tuple[bytes, Settings]:
    """Returns (a tokenizer.json, the settings that go with it).

    Args: metadata: of the file. spare: what `check_counts` returned. tokens: by their ids. merges:
      'left right', the first ones first. scores, types: one for each token.
    Raises: UserError for a tokenizer that cannot be built here.
    """
    for name, array in (("scores", scores), ("token_type", types)):
        if array is not None and len(array) != len(tokens):
            raise UserError(f"it has {len(tokens):,} tokens and {len(array):,} {name}")
    kinds = np.full(len(tokens), NORMAL) if types is None else np.array(types)
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        text = token or f"[EMPTY_{number}]"  # llama.cpp's name for it
        if vocab.setdefault(text, number) != number:
            raise UserError(f"the tokens {vocab[text]} and {number} are both {text!r:.80}")
    model = metadata.get("tokenizer.ggml.model")
    special = _specials(metadata, tokens)
    if model == "gpt2":
        found, adds = _byte_level(metadata, vocab, merges)
    elif model == "llama":
        if scores is None:
            raise UserError("tokenizer.ggml.model is llama, but there are no scores of its tokens")
        unknown = special.get(
            "unknown", next((i for i, k in enumerate(kinds) if k == UNKNOWN), None)
        )
        pairs = _merges(vocab, scores, kinds, spare)
        found, adds = _sentencepiece(metadata, vocab, pairs, unknown), True
    else:
        raise UserError(
            f"tokenizer.ggml.model is {reprlib.repr(model):.60}; it must be gpt2 or llama"
        )
    ends = _ends(special, vocab)
    texts = {*ENDS, *itertools.chain(*CODE_ENDS.values())}
    kinds[[i for i in ends if tokens[i] in texts and kinds[i] != UNKNOWN]] = CONTROL
    apart = [i for i, k in enumerate(kinds.tolist()) if k in (UNKNOWN, CONTROL, USER_DEFINED)]
    if len(apart) * APART_BYTES > spare:
        raise UserError(f"{len(apart):,} of its tokens are special; the file is too short for them")
    for name, usual in (("bos", BEGIN_NAMES), ("eos", END_NAMES)):  # where the file says nothing
        if name not in special and (there := next((n for n in usual if n in vocab), None)):
            special[name] = vocab[there]
    begin = special.get("bos") if _truth(metadata, "add_bos_token", adds) else None
    found |= {
        "version": "1.0", "truncation": None, "padding": None,
        "post_processor": None if begin is None else template((list(vocab)[begin], begin)),
        "added_tokens": [
            {
                "id": i, "content": tokens[i], "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": kinds[i] != USER_DEFINED,
            }
            for i in apart if tokens[i]
        ],
    }  # fmt: skip
    texts = list(vocab)  # by their ids
    names = {f"{n}_token": texts[special[n]] if n in special else None for n in ("bos", "eos")}
    settings = Settings(names, ends, silent=False, chat_template=_template(metadata))
    return json.dumps(found, ensure_ascii=False, default=bool).encode(), settings


def _ends(special: Mapping[str, int], vocab: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ids that end an answer in llama.cpp: those that the file names, then those of
    ENDS and CODE_ENDS."""
    by_text = [name for name in ENDS if name in vocab]
    calls, others = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
    if not calls.isdisjoint(by_text) and not others.isdisjoint(by_text):  # it ends a message there
        by_text = [name for name in by_text if name != "<|end|>"]
    if "<|tool_response>" in vocab:  # text, in Gemma 4
        by_text = [name for name in by_text if name != "</s>"]
    found = [special[n] for n in ("eos", "eot", "eom") if n in special]
    found += [vocab[name] for name in by_text]
    for key, texts in CODE_ENDS.items():
        there = (vocab[t] for t in texts if t in vocab)
        if (code := special.get(key, next(there, None))) is not None:
            found.append(code)
    return tuple(dict.fromkeys(found))


def _template(metadata: Mapping[str, Any]) -> str | None:
    """Returns the chat template, where there is one."""
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise UserError(f"tokenizer.chat_template is {reprlib.repr(template):.60}, not a text")
    return template or None


def _truth(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise UserError(f"tokenizer.ggml.{key} is {reprlib.repr(value):.60}, not true or false")
    return value


def _specials(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, int]:
    """Returns {bos, eos, eot, eom, unknown, one of CODE_ENDS: its id} of what the file names."""
    found = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", *CODE_ENDS):
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if value is None or value == 2**32 - 1:  # llama.cpp's word for none
            continue
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            raise UserError(
                f"{key} is {reprlib.repr(value):.40}; tokens have the ids 0 to {len(tokens) - 1}"
            )
        found[name] = value
    return found


def _byte_level(
    metadata: Mapping[str, Any], vocab: dict[str, int], merges: Sequence[str]
) -> tuple[dict[str, Any], bool]:
    """Returns (a tokenizer.json's members, whether a text begins with the begin token)."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE:
        raise UserError(
            f"tokenizer.ggml.pre is {reprlib.repr(name):.60}; the ways of cutting words that are "
            f"known are {', '.join(_PRE)}"
        )
    words, whole, adds = _PRE[name]
    pairs = []
    for merge in merges:
        left, blank, right = merge[:1], *merge[1:].partition(" ")[1:]
        left += merge[1:].partition(" ")[0]
        if not blank or not right:
            raise UserError(f"a merge is {merge!r:.80}; it must be two tokens and a blank")
        pairs.append((left, right))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cuts: list[dict[str, Any]] = [byte_level | {"use_regex": words in (_GPT2, "digits")}]
    if words == "digits":
        cuts.insert(0, {"type": "Digits", "individual_digits": True})
    elif words != _GPT2:
        split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated"}
        cuts.insert(0, split | {"invert": False})
    return {
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocab, pairs, ignore_merges=whole),
    }, adds


def _merges(
    vocab: dict[str, int], scores: np.ndarray, kinds: np.ndarray, spare: int
) -> list[tuple[str, str]]:
    """Returns the merges that do what SentencePiece does with the scores of its pieces.

    SentencePiece merges the two neighbours whose piece has the highest score; so the merges are all
    ways to cut a piece into two, in the order of the pieces' scores. spare: bytes of memory.
    """
    pieces = [(token, i) for token, i in vocab.items() if kinds[i] in (NORMAL, USER_DEFINED)]
    if sum(len(piece) for piece, _ in pieces) > MAX_LETTERS:
        raise UserError(f"its pieces have over {MAX_LETTERS:,} letters")
    pieces.sort(key=functools.partial(_rank, scores))
    pairs: list[tuple[str, str]] = []
    for piece, _ in pieces:
        if len(piece) > MAX_PIECE:
            raise UserError(f"the token {piece[:20]!r}... has {len(piece):,} letters")
        # Of runs of one letter SentencePiece merges the leftmost: the longer left part first.
        cuts = ((piece[:at], piece[at:]) for at in range(len(piece) - 1, 0, -1))
        pairs += [(a, b) for a, b in cuts if a in vocab and b in vocab]
        if len(pairs) * ENTRY_BYTES > spare:
            raise UserError(
                f"its {len(vocab):,} pieces have over {len(pairs):,} merges; the file is too short "
                "for them"
            )
    return pairs


def _sentencepiece(
    metadata: Mapping[str, Any],
    vocab: dict[str, int],
    pairs: Sequence[tuple[str, str]],
    unknown: int | None,
) -> dict[str, Any]:
    """Returns a tokenizer.json's members."""
    prefix = _truth(metadata, "add_space_prefix", True)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    name = None if unknown is None else next(t for t, i in vocab.items() if i == unknown)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*steps, blanks]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(vocab, pairs, unknown=name, bytes_too=True),
    }


def _rank(scores: np.ndarray, entry: tuple[str, int]) -> float:
    return -float(scores[entry[1]])


def _bpe(
    vocab: dict[str, int],
    merges: Sequence[tuple[str, str]],
    unknown: str | None = None,
    bytes_too: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": bytes_too, "byte_fallback": bytes_too,
        "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges,
    }  # fmt: skip
