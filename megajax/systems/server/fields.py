"""Reading the members of a JSON body one by one, with an error that names what is wrong; and
writing a large one."""

import itertools
import json
from collections.abc import Callable, Collection
from typing import Any

from megajax.core.errors import did_you_mean
from megajax.systems.server.errors import ApiError

PART = 2**10  # (chosen) members of a list that are written at a time
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def parse(raw: bytes) -> dict[str, Any]:
    """Returns the object of a request's body. Raises: ApiError."""

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is no JSON")

    try:
        found = json.loads(raw, parse_constant=no_number)
        if b"\\u" in raw:  # halves of a surrogate pair are no text
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return found


def write(value: Any) -> str:
    """Returns a value as JSON. A long list is written in parts, between which other threads run:
    json.dumps of a million numbers would stop all of them for as long."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dump(k)}:{write(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list) and len(value) > PART:
        return "[" + ",".join(_dump(part)[1:-1] for part in itertools.batched(value, PART)) + "]"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Fields:
    """The members of a body; each is taken once, and what nobody takes is refused."""

    def __init__(self, body: dict[str, Any], where: str = ""):
        """where: what messages put before the names, with a dot."""
        self._body, self._where, self._known = body, where, set()  # type: ignore[var-annotated]

    def take[T](self, name: str, kind: type[T], default: Any = None) -> Any:
        """Returns a member of one JSON type; null is the default. Raises: ApiError."""
        self._known.add(name)
        value = self._body.get(name)
        if value is None:
            return default
        legal = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not legal or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"must be {KINDS[kind]}")
        return value

    def any(self, name: str) -> Any:
        """Returns a member of whatever type, or None."""
        self._known.add(name)
        return self._body.get(name)

    def between(self, name: str, low: int, high: int, default: int | None) -> Any:
        """Returns a whole number in a range."""
        value = self.take(name, int, default)
        if value is not None and not low <= value <= high:
            raise self.error(name, f"must be from {low} to {high}")
        return value

    def only(self, name: str, legal: Callable[[Any], bool], words: str) -> None:
        """Refuses all values of a member that ask for what this server does not do."""
        value = self.any(name)
        if value is not None and not legal(value):
            raise self.error(name, words)

    def ignore(self, *names: str) -> None:
        """Lets members pass that change no answer."""
        self._known.update(names)

    def end(self) -> None:
        """Raises: ApiError for a member that nobody has taken."""
        for name in self._body:
            if name not in self._known:
                near = did_you_mean(name, self._known)
                raise ApiError(
                    400,
                    f"there is no member {self._where}{name!s:.80}.{near}",
                    param=f"{self._where}{name!s:.80}",
                    code="unknown_parameter",
                )

    def error(self, name: str, rule: str) -> ApiError:
        """Returns an error about a member."""
        value, full = self._body.get(name), self._where + name
        return ApiError(400, f"{full}={value!r:.100} {rule}", param=full, code="invalid_value")


def strings(fields: Fields, name: str, most: int, longest: int) -> list[str]:
    """Returns a member that is a string or a list of some. longest: characters of each."""
    value = fields.any(name)
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(s, str) for s in listed):
        raise fields.error(name, "must be a string or a list of strings")
    if len(listed) > most:
        raise fields.error(name, f"has {len(listed)} strings; at most {most}")
    if (length := max(map(len, listed), default=0)) > longest:
        raise fields.error(name, f"has a string of {length} characters; at most {longest}")
    return listed


def is_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    )


def none_of(*values: Any) -> Callable[[Any], bool]:
    """Returns what accepts only these values."""

    def legal(value: Any) -> bool:
        return any(type(value) is type(v) and value == v for v in values)

    return legal


def empty(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return isinstance(value, Collection) and not value
