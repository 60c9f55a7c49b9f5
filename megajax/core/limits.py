"""What one member of a configuration may be: its type, its range, and the message that refuses.

`core.config.option` declares a Limits beside the default. Two callers check it: every construction
of a config class (`core.config.Checked`), and `core.config.override`, which knows the member's
dotted name and its flag in the running script. A float must be finite, whatever its limits say.
"""

import dataclasses
import math
import numbers
import types
import typing
from typing import Any, Literal

from megajax.core.errors import UserError, did_you_mean


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


def is_legal(value: Any, limits: Limits) -> bool:
    """Tells quickly that `check_number` accepts a value; False: that has to be asked."""
    if value.__class__ is int:
        return -(2**63) < value < 2**63 and limits.allows(value)
    return value is None or (
        value.__class__ is float and math.isfinite(value) and limits.allows(value)
    )


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
        if value not in typing.get_args(base):
            choices = typing.get_args(base)
            listed = ", ".join(map(str, choices))
            raise UserError(
                f"{name}={value} must be one of {listed}.{did_you_mean(value, choices)} (--{flag})"
            )
    elif base is float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UserError(f"{name}={value!r} must be a number (--{flag})")
    elif not isinstance(value, base) or (base is int and isinstance(value, bool)):
        raise UserError(f"{name}={value!r} must be of type {base.__name__} (--{flag})")
