"""Frozen dataclasses <-> absl flags, files, JSON and diffs.

An experiment declares presets (functions that return its Config), calls `define_flags(PRESETS)` at
import and `from_flags(PRESETS)` in main. Every leaf of the dataclass tree becomes one typed flag
(`--model.layers=3`); a flag that is not given keeps the preset's value. `--config=FILE` starts from
a file (JSON, YAML or TOML) instead of a preset. Limits of members and the switches that they need
are declared beside their defaults. No jax import here: flags fail in a tenth of a second.

Legend: a leaf is (dotted name, type, dataclass field).
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import numbers
import re
import sys
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from absl import flags, logging

from megajax.core import files, script
from megajax.core.errors import FULL, TEMPORARY, UserError, did_you_mean, respell
from megajax.core.files import expand

# ---- files that hold a configuration
#
# The config.json of a run, or YAML or TOML written by hand. The extension decides: .yaml, .yml,
# .toml, and JSON for every other. The readers return nested mappings; `load` decides which members
# are legal.


MAX_BYTES = 2**20  # (chosen) of a file: the configuration of the largest run has 2^14
MAX_VALUES = 10_000  # (chosen) of a file, those included that YAML's aliases and merges repeat
MAX_DEPTH = 20  # (chosen) groups inside one another


def read(path: str | Path, flag: str = "config") -> Mapping[str, Any]:
    """Returns what a file says.

    flag: which named it, for messages. Raises: UserError naming the file and the flag.
    """
    file = expand(path, flag)
    try:
        with open(file, "rb") as opened:  # also a pipe: a shell's <(...)
            raw = opened.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it has over {MAX_BYTES:,} bytes")
        return parse(raw.decode("utf-8-sig"), file.suffix)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror} (--{flag})") from None
    except ValueError as error:
        raise UserError(f"{path} is not a configuration: {error} (--{flag})") from None


def parse(text: str, suffix: str = ".json", values: int = MAX_VALUES) -> Mapping[str, Any]:
    """Returns what a text says.

    Args: suffix: of a file's name. values: the most that YAML may have. Raises: ValueError.
    """
    try:
        if suffix in (".yaml", ".yml"):
            content = _from_yaml(text, values)
        else:
            toml = suffix == ".toml"
            content = tomllib.loads(text) if toml else files.parse_json(text, files.each_once)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(content, Mapping):
        kind = "null" if content is None else type(content).__name__
        raise ValueError(f"it must hold named members, like train and model, and is a {kind}")
    return content


def _from_yaml(text: str, most: int) -> Any:
    """YAML 1.1, but 1e-3 is a number as it is everywhere else, and no member may stand twice.

    Aliases and merges (<<) can make gigabytes of a few lines, so what they come to is counted.
    """
    import yaml  # here, because most programs read no YAML

    class Loader(yaml.SafeLoader):
        values = 0

        def _count(self, more: int) -> None:
            self.values += more
            if self.values > most:
                raise ValueError(f"it has over {most:,} values")

        def compose_node(self, parent: Any, index: Any) -> Any:
            self._count(1)
            return super().compose_node(parent, index)

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self._count(len(node.value))

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            keys = [key for key, _ in node.value]
            names = Counter(k.value for k in keys if isinstance(k, yaml.ScalarNode))
            if twice := sorted(name for name, n in names.items() if n > 1):
                raise ValueError(f"{', '.join(twice)} stands twice{node.start_mark}")
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (AttributeError, LookupError, TypeError, OverflowError) as error:
        # PyYAML's own, of a value that is not of the type that its tag says: `!!bool maybe`
        raise ValueError(f"a value does not fit its tag: {error}") from None
    return {} if value is None else value  # a file of comments only


def flatten(
    said: Mapping[str, Any], names: Mapping[str, str], optional: Collection[str]
) -> dict[str, Any]:
    """Returns {dotted name: value} of nested members, which may be named by place or by flag.

    'none' is None, as in a flag. What nobody knows keeps the name that it has.

    Args: names: {place or flag: dotted name} of all members. optional: those that may be None.
    Raises: UserError for more members, or groups inside one another, than a configuration has.
    """
    groups = {name.rpartition(".")[0] for name in names}
    flat: dict[str, Any] = {}
    left = MAX_VALUES

    def visit(node: Mapping[str, Any], prefix: str, depth: int) -> None:
        nonlocal left
        left -= 1 + len(node)
        if depth > MAX_DEPTH or left < 0:
            raise UserError("its members are nested too deeply, or too many")
        for key, value in node.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and name not in names:
                visit(value, f"{name}.", depth + 1)
            elif value is None and any(f"{g}.".startswith(f"{name}.") for g in groups):
                pass  # YAML: a group whose members are all comments
            else:
                place = names.get(name, name)
                value = tuple(value) if isinstance(value, list) else value
                flat[place] = None if place in optional and value == "none" else value

    visit(said, "", 1)
    return flat


# ---- limits of a member
#
# The type and the range of one member, and the message that refuses a value. `option` declares a
# Limits with the default. Two callers check it: every construction of a config class (`Checked`),
# and `override`, which knows the member's dotted name and its flag in the running script. A float
# must be finite, whatever its limits say.


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
        if self.base == STRINGS:
            return is_strings(value)
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
    hints, checked = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        base, _ = alternatives(hint := hints[field.name])
        choices = typing.get_args(base) if typing.get_origin(base) is Literal else ()
        if choices or isinstance(base, type) or base == STRINGS:
            limits = field.metadata.get("limits", Limits())
            checked.append(Member(field, hint, base, choices, limits))
    return tuple(checked)


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


STRINGS = tuple[str, ...]  # the hint of a list of words, which flags separate by commas


def is_strings(value: Any) -> bool:
    """Tells a tuple of strings."""
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


def alternatives(hint: Any) -> tuple[Any, bool]:
    """Returns (the type without None, whether None is allowed)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        return options[0], True
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
    elif base == STRINGS:
        if not is_strings(value):
            raise UserError(f"{name}={value!r} must be a tuple of strings (--{flag})")
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


# ---- parsers of flags


WORDS = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    STRINGS: "words separated by commas",
}


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
            if self.base == STRINGS:
                return tuple(word for part in argument.split(",") if (word := part.strip()))
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


# ---- members that need others
#
# Members that have no effect unless another member has some value. `option` and `group` declare a
# Needs: experts' settings need experts, the settings of a pipeline need stages. Only values that
# were given as flags are looked at: presets and saved files may hold values that have no effect.


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
    cfg: Any, settings: Mapping[str, Any], flags: Mapping[str, str], verb: str | None = None
) -> Iterator[str]:
    """Yields a sentence for each member that was set and has no effect.

    Args: settings: {dotted name: value} of the flags that were set. flags: {dotted name: flag} of
      all members. verb: what the script is asked to do.
    """
    for name, value in settings.items():
        said = f"{flags[name]}={_word(value)} has no effect:"
        *path, field = _walk(cfg, name)
        verbs = field[1].metadata.get("verbs")
        if verb is not None and verbs and verb not in verbs:
            yield f"{said} {verb} does not use it, only {', '.join(verbs)} (--{flags[name]})"
            continue
        for prefix, part, current in (*path, field):
            needs: Needs | None = part.metadata.get("needs")
            if needs is None or current in needs.harmless:
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
    parts, prefix = [], ""
    for part in name.split("."):
        field = next(f for f in dataclasses.fields(cfg) if f.name == part)
        cfg = getattr(cfg, part)
        parts.append((prefix, field, cfg))
        prefix += f"{part}."
    return parts


# ---- config classes and their leaves


flags.disclaim_key_flags()  # `--help` lists the flags under the script that calls define_flags

Presets = Mapping[str, Callable[[], Any]]


def option(
    default: Any,
    help: str,
    unit: str = "",
    needs: Needs | None = None,
    verbs: tuple[str, ...] = (),
    flag: str | None = None,
    **bounds: float,
) -> Any:
    """Returns a dataclass field.

    needs: a condition without which it has no effect. verbs: the script's verbs that read it;
      empty: all.
    flag: its name on the command line; None: the dotted path from the root.
    bounds: the range of a number (limits.Limits: at_least, above, at_most, below).
    """
    about = {
        "help": help,
        "unit": unit,
        "needs": needs,
        "verbs": verbs,
        "flag": flag,
        "limits": Limits(**bounds),
    }
    return dataclasses.field(default=default, metadata=about)


def group(
    factory: Callable[[], Any],
    resets: bool = False,
    flag: str | None = None,
    needs: Needs | None = None,
) -> Any:
    """Returns a field that holds a nested config.

    resets: setting any flag of the group resets its other flags to their defaults; their values in
      the preset are ignored.
    flag: what its flags begin with ('moe': --moe.experts); None: the dotted path from the root.
    needs: a condition without which its members have no effect.
    """
    about = {"resets": resets, "flag": flag, "needs": needs}
    return dataclasses.field(default_factory=factory, metadata=about)


class Checked:
    """Base of config classes: each construction checks every member's type and a number's limits.

    section: what messages call its members by, e.g. 'train' (train.steps, --train.steps). A class
    that checks more calls `super().__post_init__()` first.
    """

    _section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str = ""):
        """section: see above."""
        cls._section = f"{section}." if section else ""

    def __post_init__(self):
        """Refuses members of another type and numbers outside their limits."""
        check_members(self, self._section)


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Yields every leaf of a config class, depth first."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hint, field


def flag_names(cls: type, prefix: str = "", shown: str = "") -> dict[str, str]:
    """Returns {dotted name: flag} of every leaf: they differ where a group has its own flag."""
    hints = typing.get_type_hints(cls)
    names: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        name, flag = prefix + field.name, field.metadata.get("flag") or shown + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            names |= flag_names(typing.cast(type, hints[field.name]), f"{name}.", f"{flag}.")
        else:
            names[name] = flag
    return names


def sections(cls: type, shown: str = "") -> dict[str, str]:
    """Returns {what the flags of a group begin with: the first sentence of its class}, '' first."""
    hints = typing.get_type_hints(cls)
    titles = {"": ""} if not shown else {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hint := hints[field.name]):
            flag = field.metadata.get("flag") or shown + field.name
            titles[flag] = (hint.__doc__ or "").strip().splitlines()[0]
            titles |= sections(typing.cast(type, hint), f"{flag}.")
    return titles


def get(cfg: Any, name: str) -> Any:
    """Returns the value of a dotted name."""
    for part in name.split("."):
        cfg = getattr(cfg, part)
    return cfg


def override(cfg: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of `cfg` with {dotted name: value} replaced.

    Raises: UserError for a name that does not exist or a value of the wrong type.
    """
    known = {name: (hint, field) for name, hint, field in leaves(type(cfg))}
    shown = flag_names(type(cfg))
    for name, value in values.items():
        if inner := [n for n in known if n.startswith(f"{name}.")]:
            raise UserError(
                f"{name}={value!r} must hold members, like {inner[0]}={get(cfg, inner[0])!r}"
            )
        if name not in known:
            raise UserError(f"config has no field {name!r}.{did_you_mean(name, known)}")
        hint, field = known[name]
        check_type(shown[name], shown[name], value, hint)
        limits = field.metadata.get("limits", Limits())
        check_number(shown[name], shown[name], value, limits, field.default)
    return _replace(cfg, dict(values))


def _replace(cfg: Any, values: dict[str, Any]) -> Any:
    """Replaces all leaves of one level at once, so that validation sees only the final state."""
    level: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, tail = name.partition(".")
        if tail:
            nested.setdefault(head, {})[tail] = value
        else:
            level[head] = value
    for head, sub in nested.items():
        level[head] = _replace(getattr(cfg, head), sub)
    return dataclasses.replace(cfg, **level)


# ---- flags


def _page(presets: Presets, start: str, first: tuple[str, ...]) -> script.Page:
    """Returns what --help shows: flags with their values in the preset `start`."""
    base = presets[start]()
    shown, rows, verbs = flag_names(type(base)), [], {}
    for name, hint, field in leaves(type(base)):
        kind = spell_type(hint, field.metadata.get("limits", Limits()))
        value = script.spell(get(base, name)) or "empty"
        rows.append((shown[name], kind, f"{_describe(field)}; {start}: {value}"))
        if field.metadata.get("verbs"):
            verbs[shown[name]] = field.metadata["verbs"]
    return script.Page(sections(type(base)), rows, first, verbs)


def _describe(field: dataclasses.Field) -> str:
    unit = field.metadata.get("unit")
    return field.metadata.get("help", "") + (f" [{unit}]" if unit else "")


def define_flags(
    presets: Presets,
    default: str,
    first: tuple[str, ...] = (),
    verbs: Sequence[str] = (),
    also: Sequence[type] = (),
) -> None:
    """Defines --preset, --config and one flag for each leaf of the presets' Config class.

    also: the classes of presets that have another one, and so other flags. A flag that a preset's
    class lacks is refused. first: the flags that --help describes when it cannot describe all;
    empty: those of no group. verbs: those of the script, where its own flags begin their
    descriptions with verbs.
    """
    base = presets[default]()
    names = Literal[tuple(presets)]  # type: ignore[valid-type]
    start = script.Start(Parser(names), None, "preset", default, "configuration to start from")
    start.verbs = verbs
    start.others = set()
    start.pages = {name: functools.partial(_page, presets, name, first) for name in presets}
    flags.DEFINE_flag(start)
    about = "file (.json, .yaml or .toml) to start from"
    if len(presets) > 1:
        about += "; a value that it lacks is that of --preset, if that is given, else the default"
    flags.DEFINE(Parser(str | None), "config", None, about)
    for cls in (type(base), *also):
        shown = flag_names(cls)
        for name, hint, field in leaves(cls):
            if shown[name] in start.others:
                continue
            start.others.add(shown[name])
            if hint is bool:
                flags.DEFINE_boolean(shown[name], None, _describe(field))
            else:
                flags.DEFINE(Parser(hint), shown[name], None, _describe(field))


def from_flags(
    presets: Presets,
    adapt: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any] | None = None,
    verb: str | None = None,
    warn: bool = True,
) -> tuple[Any, Any]:
    """Returns (the configuration, the preset or file that it started from).

    Args: adapt(base, given flags, members of the file) -> base: what one says about the others'
      defaults. A base of another class is adapted once more, with that one's flags. verb: what
      the script is asked to do. warn: of given flags that have no effect.
    Raises: UserError when a value or a combination is illegal.
    """
    values = flags.FLAGS
    base, read = presets[values.preset](), {}
    if values.config is not None:
        base, read = _load(base if values["preset"].present else type(base)(), values.config)
    settings = _typed(type(base))
    if adapt is not None:
        before, base = type(base), adapt(base, settings, read)
        if type(base) is not before:
            settings = _typed(type(base))
            base = adapt(base, settings, read)
    start: Any = values["preset"]
    strange = start.others - set(flag_names(type(base)).values())
    if typed := [flag for flag in sorted(strange) if values[flag].present]:
        raise UserError(
            f"--{typed[0]} is not for this kind of run ({type(base).__name__}); leave it out, or "
            f"choose another --preset (--{typed[0]})"
        )
    cfg = _overlay(base, settings)
    for sentence in idle(cfg, settings, flag_names(type(cfg)), verb) if warn else ():
        logging.warning("%s", sentence)
    return cfg, base


def _typed(cls: type) -> dict[str, Any]:
    """Returns {dotted name: value} of the typed flags of a class."""
    values = flags.FLAGS
    names = flag_names(cls).items()
    return {name: values[flag].value for name, flag in names if values[flag].present}


def start_name() -> str:
    """Returns the name of the preset, or of the file, that the flags started from."""
    path = flags.FLAGS.config
    return flags.FLAGS.preset if path is None else Path(path).stem


def start_flags() -> list[str]:
    """Returns the flags that start from there: --preset, --config or both."""
    values = flags.FLAGS
    path, chosen = values.config, f"--preset={values.preset}"
    if path is None:
        return [chosen]
    return [*([chosen] if values["preset"].present else []), f"--config={path}"]


def start_given() -> bool:
    """Tells whether --preset or --config was typed, or both are at their defaults."""
    return any(flags.FLAGS[name].present for name in ("preset", "config"))


def choose(word: str, verbs: Mapping[str, Any]) -> Any:
    """Returns verbs[word], for a script whose first word says what it does.

    Raises: UserError with all verbs, and the one that was probably meant.
    """
    if word not in verbs:
        listed = " or ".join(verbs) if len(verbs) == 2 else ", ".join(verbs)
        raise UserError(f"{word!r} must be {listed}.{did_you_mean(word, verbs)}")
    return verbs[word]


def run(main: Callable[..., Any], positional: int = 0, optional: int = 0) -> None:
    """Runs main(*words) under absl; a UserError, or Ctrl-C that main leaves, ends it in one line.

    positional: how many words the command line must have. optional: how many more it may have.
    """

    def guarded(argv: list[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells every detail at INFO
        try:
            words = argv[1:]
            if len(words) > (most := positional + optional):
                raise UserError(f"unexpected argument {words[most]!r}: settings are --FLAG=VALUE")
            if len(words) < positional:
                needed = "1 word is" if positional == 1 else f"{positional} words are"
                raise UserError(f"{needed} needed, {len(words)} given; see --help")
            code = main(*words)
        except UserError as error:
            hint = f" (exit code {TEMPORARY}: a later start may work)"
            print(
                f"error: {respell(script.as_started(str(error)), list(flags.FLAGS))}"
                f"{hint if error.exit_code == TEMPORARY else ''}",
                file=sys.stderr,
            )
            script.settle(error.exit_code)
            sys.exit(error.exit_code)
        except OSError as error:
            if error.errno not in FULL or error.filename is None:
                raise
            print(
                f"error: cannot write {error.filename}: {error.strerror}; make room, and start the "
                f"command again (exit code {TEMPORARY}: a later start may work)",
                file=sys.stderr,
            )
            script.settle(TEMPORARY)
            sys.exit(TEMPORARY)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            script.settle(130)
            sys.exit(130)
        sys.exit(code)

    script.start(guarded)


# ---- JSON, diff, fingerprint


def to_json(cfg: Any) -> str:
    """Returns the configuration as indented JSON text."""
    return json.dumps(dataclasses.asdict(cfg), indent=2) + "\n"


def from_json(cls: type, text: str) -> Any:
    """Returns the configuration that `to_json` wrote.

    Members that the text lacks keep their defaults, so older files stay readable.
    Raises: UserError for names that this version does not know.
    """
    return overlay(cls(), parse(text))


def load_json(cls: type, path: str | Path, flag: str = "config") -> Any:
    """Reads a saved configuration. flag: which named it. Raises: UserError naming the file."""
    return load(cls(), path, flag)


def load(base: Any, path: str | Path, flag: str = "config") -> Any:
    """Returns `base` with what a JSON, YAML or TOML file says.

    flag: which named the file. Raises: UserError naming the file and what is wrong.
    """
    return _load(base, path, flag)[0]


def _load(base: Any, path: str | Path, flag: str = "config") -> tuple[Any, dict[str, Any]]:
    """Returns what `load` does, and {dotted name: value} of what the file says."""
    content = read(path, flag)
    try:
        flat = _flatten(type(base), content)
        return _overlay(base, flat), flat
    except UserError as error:
        raise UserError(f"{path} is not a configuration: {error} (--{flag})") from None


def overlay(base: Any, said: Mapping[str, Any]) -> Any:
    """Returns `base` with the members of a nested mapping, named by their place or by their flag.

    'none' is None, as in a flag. Other members of a group keep their values in `base`, unless any
    flag of the group resets the others (`group`).
    """
    return _overlay(base, _flatten(type(base), said))


def _overlay(base: Any, flat: Mapping[str, Any]) -> Any:
    # One flag of such a group resets its other members to their defaults.
    for field in dataclasses.fields(base):
        if field.metadata.get("resets") and any(n.startswith(f"{field.name}.") for n in flat):
            factory = typing.cast(Callable, field.default_factory)
            base = dataclasses.replace(base, **{field.name: factory()})
    return override(base, flat)


def _flatten(cls: type, said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {dotted name: value} of the nested members of a file."""
    hints = {name: hint for name, hint, _ in leaves(cls)}
    names = {flag: name for name, flag in flag_names(cls).items()} | {n: n for n in hints}
    return flatten(said, names, {n for n in hints if alternatives(hints[n])[1]})


def diff(cfg: Any, base: Any) -> list[tuple[str, Any, Any]]:
    """Returns [(dotted name, value in base, value in cfg)] of the leaves that differ."""
    pairs = [(name, get(base, name), get(cfg, name)) for name, _, _ in leaves(type(cfg))]
    return [(name, old, new) for name, old, new in pairs if old != new]


def spell(cfg: Any, base: Any) -> list[str]:
    """Returns the flags that make `cfg` of `base`: what from_flags reads, for a command line."""
    names, flat = flag_names(type(cfg)), diff(cfg, base)
    for field in dataclasses.fields(cfg):
        changes = [d for d in flat if d[0].startswith(f"{field.name}.")]
        if field.metadata.get("resets") and changes:  # the base's values of the group are ignored
            factory = typing.cast(Callable, field.default_factory)
            fresh = dataclasses.replace(base, **{field.name: factory()})
            from_default = [d for d in diff(cfg, fresh) if d[0].startswith(f"{field.name}.")]
            flat = [d for d in flat if d not in changes] + (from_default or changes[:1])
    order = list(names)
    flat.sort(key=lambda d: order.index(d[0]))
    return [f"--{names[name]}={script.spell(new)}" for name, _, new in flat]


def fingerprint(cfg: Any, ignore: tuple[str, ...] = ()) -> str:
    """Returns 8 hex digits that name a configuration, equal in every process.

    ignore: dotted names, or groups, that do not count.
    """
    values = {
        name: get(cfg, name)
        for name, _, _ in leaves(type(cfg))
        if not any(name == i or name.startswith(f"{i}.") for i in ignore)
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
