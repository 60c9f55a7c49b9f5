"""Members of a configuration that have no effect unless another member says so.

`core.config.option` and `group` declare a Needs: experts' settings need experts, the settings of a
pipeline need stages. Only what was given as a flag is looked at: presets and saved files may hold
values that lie idle.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Needs:
    """The switch of a member, or of all members of a group.

    members: what must be set, seen from the class that declares the field. words: to what, as a
    message says it. test: of their values. harmless: values of the field that ask for nothing.
    """

    members: tuple[str, ...]
    words: str
    test: Callable[..., bool]
    harmless: tuple[Any, ...] = ()


def above(bound: float, *members: str, harmless: tuple[Any, ...] = ()) -> Needs:
    """Needs one of these members above a number."""
    return Needs(members, f"above {bound}", lambda *values: max(values) > bound, harmless)


def equal(member: str, *choices: Any) -> Needs:
    """Needs a member to have one of these values."""
    return Needs((member,), " or ".join(map(_word, choices)), lambda value: value in choices)


def other_than(member: str, choice: Any, harmless: tuple[Any, ...] = ()) -> Needs:
    """Needs a member to have any value but this one."""
    words = "to be set" if choice is None else f"other than {choice}"
    return Needs((member,), words, lambda value: value != choice, harmless)


def idle(
    cfg: Any, given: Mapping[str, Any], flags: Mapping[str, str], verb: str | None = None
) -> Iterator[str]:
    """Yields a sentence for each member that was given and has no effect.

    Args: given: {dotted name: value}. flags: {dotted name: flag} of all members. verb: what the
      script is asked to do.
    """
    for name, value in given.items():
        said = f"{flags[name]}={_word(value)} has no effect:"
        *path, field = _walk(cfg, name)
        verbs = field[1].metadata.get("verbs")
        if verb is not None and verbs and verb not in verbs:
            yield f"{said} {verb} does not use it, only {', '.join(verbs)} (--{flags[name]})"
            continue
        for prefix, part, found in (*path, field):
            needs: Needs | None = part.metadata.get("needs")
            if needs is None or found in needs.harmless:
                continue
            switches = [prefix + member for member in needs.members]
            now = [_walk(cfg, switch)[-1][2] for switch in switches]
            if name not in switches and not needs.test(*now):
                those = " or ".join(flags[switch] for switch in switches)
                listed = ", ".join(f"--{flags[switch]}" for switch in switches)
                is_now = ", ".join(map(_word, now))
                yield f"{said} it needs {those} {needs.words}, found {is_now} ({listed})"
                break


def _word(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _walk(cfg: Any, name: str) -> list[tuple[str, dataclasses.Field, Any]]:
    """Returns (what comes before it, field, value) of each part of a dotted name."""
    found, prefix = [], ""
    for part in name.split("."):
        field = next(f for f in dataclasses.fields(cfg) if f.name == part)
        cfg = getattr(cfg, part)
        found.append((prefix, field, cfg))
        prefix += f"{part}."
    return found
