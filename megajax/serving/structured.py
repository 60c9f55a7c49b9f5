"""What form an answer must have: a regular expression, a JSON schema, or one of some texts.

Names are those of vLLM's StructuredOutputsParams, which replaced its guided_json, guided_regex and
guided_choice. Not here: how a constraint becomes masks of tokens (constraint.py).
"""

import dataclasses
import json as json_
from collections.abc import Collection, Mapping
from typing import Any

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
