"""What form an answer must have: a regular expression, a JSON schema, or one of some texts.

Names are those of vLLM's StructuredOutputsParams, which replaced its guided_json, guided_regex and
guided_choice. Not here: how a constraint becomes masks of tokens (constraint.py).
"""

import dataclasses
import json as json_
from collections.abc import Collection, Mapping
from typing import Any

from megajax.core.errors import UserError

KINDS = ("json", "regex", "choice", "json_object")
LONGEST = 2**18  # (chosen) characters of a constraint: large schemas in use have some 2^15


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
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise UserError("structured_outputs.json=False is a schema that no value matches")
        if len(given) != 1:
            raise UserError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; given: "
                f"{', '.join(given) or 'none'}"
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
                f"structured_outputs.{given[0]} has {size} characters; it must have at most "
                f"{LONGEST}"
            )

    @property
    def kind(self) -> str:
        """Name of the member that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _schema(self) -> str | None:
        if self.json is None:
            return None
        try:
            found = json_.loads(self.json) if isinstance(self.json, str) else self.json
            if isinstance(found, Mapping) or found is True:
                # True is a schema too, and the same as {}.
                return json_.dumps({} if found is True else dict(found), allow_nan=False)
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
