"""What one member of a configuration may be: its type, its range, and the message that refuses.

`core.config.option` declares a Limits beside the default. Two callers check it: every construction
of a config class (`core.config.Checked`), and `core.config.override`, which knows the member's
dotted name and its flag in the running script. A float must be finite, whatever its limits say.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import types
import typing
from typing import Any, Literal

from megajax.core.errors import UserError, did_you_mean

EPS = 1e-30  # (chosen) least number that is added against a division by 0: float32 flushes
# numbers below 1.2e-38 to 0, and then a row or a gradient of zeros becomes NaN


@dataclasses.dataclass(frozen=True)
class Limits:
    """The range of a number; None: no bound. `above` and `below` exclude the bound itself."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def allows(self, value: float) -> bool:
        """Tells whether a finite number is inside the range."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def rule(self) -> str:
        """Returns the range in words, e.g. 'at least 0', or 'in [0, 1)'; empty: no bound."""
        low = self.above if self.at_least is None else self.at_least
        high = self.below if self.at_most is None else self.at_most
        if low is not None and high is not None:
            left = "(" if self.at_least is None else "["
            right = ")" if self.at_most is None else "]"
            return f"in {left}{low:.10g}, {high:.10g}{right}"
        if low is not None:
            return f"{'above' if self.at_least is None else 'at least'} {low:.10g}"
        if high is not None:
            return f"{'below' if self.at_most is None else 'at most'} {high:.10g}"
        return ""

    def nearest(self, value: float) -> float | None:
        """Returns the nearest legal value; None beside a bound that the range excludes, where a
        float has none."""
        if self.at_least is not None and value < self.at_least:
            return self.at_least
        if self.at_most is not None and value > self.at_most:
            return self.at_most
        return None


@dataclasses.dataclass(frozen=True)
class Member:
    """What one member of a config class may be. field: of its dataclass. hint: its type."""

    field: dataclasses.Field
    hint: Any
    base: Any  # the hint without None
    choices: tuple[Any, ...]  # of a Literal
    limits: Limits

    def is_legal(self, value: Any) -> bool:
        """Tells quickly that `check` accepts a value; False: that has to be asked."""
        kind = value.__class__
        if kind is int and self.base in (int, float):
            return -(2**63) < value < 2**63 and self.limits.allows(value)
        if kind is float and self.base is float:
            return math.isfinite(value) and self.limits.allows(value)
        return value in self.choices if kind is str and self.choices else kind is self.base

    def check(self, name: str, flag: str, value: Any) -> None:
        """Refuses another type and a number outside its limits.

        Args: name: as messages say it. flag: without the dashes. Raises: UserError.
        """
        check_type(name, flag, value, self.hint)
        check_number(name, flag, value, self.limits, self.field.default)


@functools.cache
def members(cls: type) -> tuple[Member, ...]:
    """Returns the members of a config class, its groups too, that have a type to be checked."""
    hints, found = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        base, _ = alternatives(hint := hints[field.name])
        choices = typing.get_args(base) if typing.get_origin(base) is Literal else ()
        if choices or isinstance(base, type):
            limits = field.metadata.get("limits", Limits())
            found.append(Member(field, hint, base, choices, limits))
    return tuple(found)


def check_members(cfg: Any, section: str) -> None:
    """Checks all members of a configuration; a NumPy scalar becomes Python's, as JSON needs it.

    section: what messages put before their names, with a dot. Raises: UserError.
    """
    for member in members(type(cfg)):
        value, name = getattr(cfg, member.field.name), member.field.name
        if member.is_legal(value):  # quick: searches make many configurations
            continue
        if type(value).__module__ == "numpy" and value.shape == ():
            value = value.item()
            object.__setattr__(cfg, name, value)
        member.check(section + name, section + name, value)


def check_number(name: str, flag: str, value: Any, limits: Limits, default: Any) -> None:
    """Refuses a number that is not finite or outside its limits; what is no number passes.

    Args: name: of the member, as messages say it. flag: without the dashes. default: suggested
      where there is no nearest legal value.
    Raises: UserError.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return
    try:
        finite = math.isfinite(float(value))
    except OverflowError:  # a whole number that no float holds
        finite = False
    if finite and limits.allows(float(value)):
        return
    rule, near = limits.rule(), limits.nearest(float(value)) if finite else None
    if not finite:
        rule = f"a finite number{', ' if rule else ''}{rule}"
    advice = f"nearest: {near:.10g}" if near is not None else f"the default is {default}"
    raise UserError(f"{name}={value} must be {rule}; {advice} (--{flag})")


def alternatives(hint: Any) -> tuple[Any, bool]:
    """Returns (the type without None, whether None is allowed)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        return rest[0], True
    return hint, False


def check_type(name: str, flag: str, value: Any, hint: Any) -> None:
    """Refuses a value that a type hint does not allow. Raises: UserError."""
    base, optional = alternatives(hint)
    if value is None and optional:
        return
    if typing.get_origin(base) is Literal:
        choices = typing.get_args(base)
        if not isinstance(value, str) or value not in choices:
            listed = ", ".join([*map(str, choices), *(["none"] if optional else [])])
            raise UserError(
                f"{name}={value} must be one of {listed}.{did_you_mean(value, choices)} (--{flag})"
            )
    elif base is float:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise UserError(f"{name}={value!r} must be a number (--{flag})")
    elif not isinstance(value, base) or (base is int and isinstance(value, bool)):
        if members := getattr(base, "__protocol_attrs__", None):
            raise UserError(_lacks(name, value, base, sorted(members)))
        near = f"; nearest: {int(value)}" if base is int and _is_whole(value) else ""
        raise UserError(f"{name}={value!r} must be of type {base.__name__}{near} (--{flag})")


def _lacks(name: str, value: Any, protocol: type, members: list[str]) -> str:
    """Returns which members of a protocol a value does not have, each with what it is."""
    missing = [member for member in members if not hasattr(value, member)]
    about = (inspect.getdoc(getattr(protocol, member)) or "" for member in missing)
    lines = (f"{member}: {text}".rstrip(" :") for member, text in zip(missing, about, strict=True))
    return (
        f"{name}={value!r} lacks {len(missing)} of the members that {protocol.__name__} has "
        f"({', '.join(members)}): {'; '.join(lines)}"
    )


def _is_whole(value: Any) -> bool:
    """Tells whether a value, or what its text says, is a whole number of another type."""
    try:
        return float(value) == int(value)
    except (TypeError, ValueError, OverflowError):
        return False
