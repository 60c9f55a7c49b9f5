"""From the text of a flag to the value of one member, and what a flag shows of its type."""

import typing
from typing import Any, Literal

from absl import flags

from megajax.core.errors import did_you_mean
from megajax.core.limits import Limits, alternatives

WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


class Parser(flags.ArgumentParser):
    """Parses one leaf by its type hint; 'none' stands for None where None is allowed."""

    def __init__(self, hint: Any):
        """hint: of the leaf."""
        self.base, self.optional = alternatives(hint)
        self.syntactic_help = spell_type(hint)

    def parse(self, argument: str) -> Any:
        """Returns the value. Raises: ValueError saying what the type is."""
        if self.optional and str(argument).lower() == "none":
            return None
        if typing.get_origin(self.base) is Literal:
            choices = typing.get_args(self.base)
            if argument not in choices:
                raise ValueError(
                    f"must be one of {', '.join(choices)}.{did_you_mean(argument, choices)}"
                )
            return argument
        try:
            if self.base is bool:
                return {"true": True, "false": False}[str(argument).lower()]
            return self.base(argument)
        except (KeyError, ValueError):
            raise ValueError(f"must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        """Returns the type in words."""
        return self.syntactic_help


def spell_type(hint: Any, limits: Limits = Limits()) -> str:
    """Returns a type in words, e.g. 'an integer, at least 1, or none'."""
    base, optional = alternatives(hint)
    if typing.get_origin(base) is Literal:
        choices = [str(choice) for choice in typing.get_args(base)]
        words = "|".join(choices)
        words = words if len(words) < 60 else ", ".join(choices)
    else:
        words = WORDS[base]
    rule = limits.rule()
    return words + (f", {rule}" if rule else "") + (", or none" if optional else "")
