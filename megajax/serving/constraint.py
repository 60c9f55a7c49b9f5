"""Constraints: the form that an answer must have, and which tokens may come next to follow it.

The form is a regular expression, a JSON schema, or one of some texts. Names are those of vLLM's
StructuredOutputsParams, which replaced its guided_json, guided_regex and guided_choice.

A constraint is compiled once (llguidance, extra `constraints`); each answer has a matcher, which
takes the drawn tokens and gives a mask of the vocabulary, one bit a token. The grammar is over
bytes, so any vocabulary serves whose tokens stand for bytes: bytes themselves, byte-level BPE,
SentencePiece with bytes. The mask goes to the sampler on the device (draw.py).

Legend: W 32-bit words of a mask of the vocabulary with its padding.
"""

import contextlib
import dataclasses
import functools
import json as json_
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError, did_you_mean

KINDS = ("json", "regex", "choice", "json_object")
LONGEST = 2**18  # (chosen) characters of a constraint: large schemas in use have some 2^15
EXPRESSION = 2**14  # (chosen) characters of an expression: 2^17 took 7 s of one CPU core to compile
# Keywords of JSON Schema (drafts 4 to 2020-12), by what they hold. Whether a keyword can be
# followed is asked of the library, which ignores those that it has never heard of.
SCHEMA = {
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED = {
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
}
KEYWORDS = SCHEMA | SCHEMAS | NAMED | {
    "$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor",
    "$recursiveRef", "$ref", "$schema", "$vocabulary", "const", "contentEncoding",
    "contentMediaType", "default", "dependentRequired", "deprecated", "description",
    "discriminator", "enum", "example", "examples", "exclusiveMaximum", "exclusiveMinimum",
    "format", "id", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum",
    "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "nullable",
    "pattern", "readOnly", "required", "title", "type", "uniqueItems", "writeOnly",
}  # fmt: skip
CACHED = 64  # (chosen) compiled constraints that are kept
# (chosen) Between two tokens of JSON: enough for indented text, and no endless white space, which
# small models write where a schema allows it.
WHITESPACE = r"[ \n]{0,16}"
# llguidance's own limits; the first two bound the time of a hostile expression (a step: about 15 ms
# of the lexer, by its documentation).
FUEL = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000}


# ---- the form of an answer


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer; exactly one member is given.

    json: a JSON schema, as text or as an object; kept as text. regex: the whole answer matches it;
    in the syntax of Rust's crate regex, without look-around, back references and \\b; \\d, \\w and
    \\s are ASCII's. choice: the answer is one of these texts. json_object: True: any JSON object.
    Raises: UserError for none or several, and for what is no schema, expression or list.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Collection[str] | None = None
    json_object: bool | None = None

    def __post_init__(self):
        """Checks every value."""
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise UserError("structured_outputs.json=False is a schema that no value matches")
        if len(kinds) != 1:
            raise UserError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; given: "
                f"{', '.join(kinds) or 'none'}"
            )
        object.__setattr__(self, "json", self._schema())
        object.__setattr__(self, "choice", self._choices())
        if self.regex is not None and not isinstance(self.regex, str):
            raise UserError(f"structured_outputs.regex={self.regex!r:.80} must be a string")
        if self.json_object not in (None, True, False):
            raise UserError(f"structured_outputs.json_object={self.json_object!r:.80} must be true")
        size = len(self.json or "") + len(self.regex or "") + sum(map(len, self.choice or ()))  # type: ignore[arg-type]
        if size > LONGEST:
            raise UserError(
                f"structured_outputs.{kinds[0]} has {size} characters; it must have at most "
                f"{LONGEST}"
            )
        _check_expression("structured_outputs.regex", self.regex or "")

    @property
    def kind(self) -> str:
        """Name of the member that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _schema(self) -> str | None:
        if self.json is None:
            return None
        try:
            schema = json_.loads(self.json) if isinstance(self.json, str) else self.json
            if isinstance(schema, Mapping) or schema is True:
                # True is a schema too, and the same as {}.
                text = json_.dumps({} if schema is True else dict(schema), allow_nan=False)
                _check_keywords({} if schema is True else schema)
                return text
        except UserError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            reason = f": {error}"
        else:
            reason = ", an object"
        raise UserError(f"structured_outputs.json={self.json!r:.80} must be a JSON schema{reason}")

    def _choices(self) -> tuple[str, ...] | None:
        if self.choice is None:
            return None
        listed = [] if isinstance(self.choice, str) else self.choice
        texts = isinstance(listed, Collection) and all(isinstance(c, str) and c for c in listed)
        if not texts or not listed:
            raise UserError(
                f"structured_outputs.choice={self.choice!r:.80} must be a list of at least one "
                "text, none of them empty"
            )
        return tuple(listed)


def _check_keywords(schema: Any) -> None:
    """Refuses keywords that JSON Schema does not have, whose meaning would be ignored.

    Names that begin with x- are annotations (OpenAPI). Raises: UserError.
    """
    stack = [schema]
    while stack:
        for name, value in stack.pop().items():
            if name not in KEYWORDS and not name.startswith("x-"):
                raise UserError(
                    f"structured_outputs.json has the keyword {name!r:.80}, which JSON Schema does "
                    f"not know.{did_you_mean(name[:80], KEYWORDS)}"
                )
            if name == "pattern" and isinstance(value, str):
                _check_expression("structured_outputs.json: a pattern", value)
            inner: list[Any] = [value] if name in SCHEMA else []
            if name in SCHEMAS and isinstance(value, list):
                inner = value
            if name in NAMED and isinstance(value, Mapping):
                inner = list(value.values())
                for expression in value if name == "patternProperties" else ():
                    _check_expression("structured_outputs.json: a pattern", expression)
            stack += [part for part in inner if isinstance(part, Mapping)]


def _check_expression(name: str, expression: str) -> None:
    """Raises: UserError for an expression whose compilation would take too long."""
    if len(expression) > EXPRESSION:
        raise UserError(
            f"{name} has {len(expression)} characters; an expression must have at most {EXPRESSION}"
        )


# ---- masks of tokens


class Matcher:
    """The state of one answer's constraint."""

    def __init__(self, inner: Any, vocab: int, end: int | None):
        """inner: llguidance's matcher. vocab: ids of the tokenizer. end: the id that may end it."""
        self._inner, self._vocab, self._end = inner, vocab, end

    def copy(self) -> "Matcher":
        """Returns a matcher of the same state for another answer."""
        return Matcher(self._inner.deep_copy(), self._vocab, self._end)

    @property
    def problem(self) -> str | None:
        """Why it cannot go on, or None."""
        if not self._inner.is_error():
            return None
        lines = self._inner.get_error().replace("<non-verbose/>", "").split("\n")
        return " ".join(filter(None, map(str.strip, lines))) or "it is too complex"

    def write_mask(self, mask_W: np.ndarray) -> None:
        """Writes the bits of the tokens that may come next, uint32; none if there is a problem."""
        bits = _mask_of(self._inner, self._vocab, self._end is None)
        mask_W[:] = 0
        # Without an end token the library has one more id, for which the mask may have no word.
        words = min(len(bits), len(mask_W))
        mask_W[:words] = bits[:words]
        if self._end is None:
            word, bit = divmod(self._vocab, 32)
            if word < len(mask_W):
                mask_W[word] &= ~np.uint32(1 << bit)

    def take(self, token: int) -> bool:
        """Takes a drawn token. Returns: whether the answer is complete and nothing may follow."""
        if not self._inner.is_stopped():
            self._inner.consume_token(token)
        return self._inner.is_stopped()


def _mask_of(inner: Any, vocab: int, extra: bool) -> np.ndarray:
    bits = np.zeros(-(-(vocab + extra) // 32), np.uint32)
    inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


class Constraints:
    """Compiles constraints for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Any):
        """Opens nothing yet. tokenizer: with `end` and `pieces` (data/tokenizer.py), else every
        constraint is refused."""
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[StructuredOutputsParams, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    @functools.cached_property
    def _opened(self) -> tuple[Any, Any, Any, int]:
        """(The library, its tokenizer, its limits, ids). Raises: UserError."""
        if self._tokenizer is None or not hasattr(self._tokenizer, "pieces"):
            raise UserError("structured_outputs needs a tokenizer: give the engine one (tokenizer)")
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "structured_outputs needs the package llguidance: uv sync --extra constraints"
            ) from None
        pieces = self._tokenizer.pieces()
        tokenizer = llguidance.LLTokenizer(_Vocabulary(pieces, self._tokenizer))  # pyrefly: ignore
        limits = llguidance.LLParserLimits(verbose_errors=False, **FUEL)
        return llguidance, tokenizer, limits, len(pieces)

    def matcher(self, form: StructuredOutputsParams) -> Matcher:
        """Returns a new answer's matcher; the constraint is compiled if it is not kept.

        Raises: UserError without the library, for a tokenizer whose tokens are no bytes, for what
          the library does not know, and for what is too complex for it.
        """
        with self._lock:
            self._opened  # noqa: B018 (once, whoever comes first)
            compiled = self._compiled.get(form)
            if compiled is not None:
                self._compiled.move_to_end(form)
                return compiled.copy()
        library, tokenizer, limits, vocab = self._opened
        end: int | None = self._tokenizer.end
        try:
            grammar = _grammar(library, form)
        except ValueError as error:  # more nesting than its parser follows
            raise UserError(
                f"structured_outputs.{form.kind} cannot be used: {error!s:.400}"
            ) from None
        inner = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        made = Matcher(inner, vocab, end)
        # The first mask and the first token find what is too complex, or impossible.
        tried, problem = made.copy(), made.problem
        if problem is None:
            allowed = np.unpackbits(
                _mask_of(inner, vocab, end is None).view(np.uint8), bitorder="little"
            )
            if (problem := made.problem) is None and allowed.any():
                tried.take(int(allowed.argmax()))
                problem = tried.problem
        if problem is not None:
            raise UserError(f"structured_outputs.{form.kind} cannot be used: {problem:.400}")
        with self._lock:
            self._compiled[form] = made
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
            return made.copy()


def _grammar(library: Any, form: StructuredOutputsParams) -> str:
    make = library.LLMatcher
    if form.regex is not None:
        # Classes of ASCII: [0-9] is what almost everybody means by \d.
        return make.grammar_from_lark(f"start: /{library.regex_to_lark(form.regex, 'dws')}/")
    if form.choice is not None:
        return make.grammar_from_regex("|".join(map(re.escape, form.choice)))
    schema = '{"type": "object"}' if form.json_object else form.json
    return make.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


class _Vocabulary:
    """A vocabulary as llguidance asks for it.

    Where only one text can follow, the library asks for its tokens and allows the first of them.
    The model's own tokenizer answers if its tokens have exactly those bytes (some put a space
    before a text); else the longest pieces do.
    """

    is_tokenizer_wrapper = True

    def __init__(self, pieces: Sequence[bytes | None], tokenizer: Any):
        self.bos_token_id = None
        self.eos_token_id = len(pieces) if tokenizer.end is None else tokenizer.end
        self.special_token_ids = [i for i, piece in enumerate(pieces) if piece is None]
        self.tokens = [b"<|%d|>" % i if p is None else p for i, p in enumerate(pieces)]
        if tokenizer.end is None:
            self.special_token_ids.append(len(pieces))
            self.tokens.append(b"<|end|>")
        self._encode = getattr(tokenizer, "encode", None)
        self._pieces = pieces
        self._ids = {piece: i for i, piece in enumerate(pieces) if piece}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        with contextlib.suppress(UserError, UnicodeDecodeError):
            if self._encode is not None:
                ids = self._encode([data.decode()])[0].tolist()
                if b"".join(self._pieces[i] or b"" for i in ids) == data:
                    return ids
        return list(self._greedy(data))

    def _greedy(self, data: bytes) -> Iterator[int]:
        at = 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in lengths if data[at : at + n] in self._ids), None)
            if size is None:
                return
            yield self._ids[data[at : at + size]]
            at += size
