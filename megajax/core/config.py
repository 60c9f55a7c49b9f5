"""Frozen dataclasses <-> absl flags, JSON and diffs.

An experiment declares presets (functions that return its Config), calls `define_flags(PRESETS)` at
import and `from_flags(PRESETS)` in main. Every leaf of the dataclass tree becomes one typed flag
(`--model.layers=3`); a flag that is not given keeps the preset's value. `--config=FILE` starts from
a saved config.json instead of a preset. No jax import here: flags fail in a tenth of a second.

Legend: a leaf is (dotted name, type, dataclass field).
"""

import dataclasses
import hashlib
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from absl import app, flags, logging

from megajax.core import config_file
from megajax.core.errors import UserError, did_you_mean
from megajax.core.limits import Limits, alternatives, check_number, check_type

flags.disclaim_key_flags()  # `--help` lists the flags under the script that calls define_flags

Presets = Mapping[str, Callable[[], Any]]


def option(default: Any, help: str, unit: str = "", **bounds: float) -> Any:
    """Returns a dataclass field with its help text, unit and range (limits.Limits: at_least...)."""
    about = {"help": help, "unit": unit, "limits": Limits(**bounds)}
    return dataclasses.field(default=default, metadata=about)


def group(factory: Callable[[], Any], whole: bool = False, flag: str | None = None) -> Any:
    """Returns a field that holds a nested config.

    whole: one flag of the group drops what the preset says of all its other members.
    flag: what its flags begin with ('moe': --moe.experts); None: the dotted path from the root.
    """
    return dataclasses.field(default_factory=factory, metadata={"whole": whole, "flag": flag})


class Checked:
    """Base of config classes: each construction checks every number against its field's limits.

    section: what messages call its members by, e.g. 'train' (train.steps, --train.steps). A class
    that checks more calls `super().__post_init__()` first.
    """

    _section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str = ""):
        """section: see above."""
        cls._section = f"{section}." if section else ""

    def __post_init__(self):
        """Refuses numbers outside their limits."""
        for field in dataclasses.fields(self):  # type: ignore[bad-argument-type]
            name = self._section + field.name
            _check_limits(name, name, getattr(self, field.name), field)


def _check_limits(name: str, flag: str, value: Any, field: dataclasses.Field) -> None:
    limits = field.metadata.get("limits", Limits())
    check_number(name, flag, value, limits, field.default)


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
    found: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        name, flag = prefix + field.name, field.metadata.get("flag") or shown + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            found |= flag_names(typing.cast(type, hints[field.name]), f"{name}.", f"{flag}.")
        else:
            found[name] = flag
    return found


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
        if name not in known:
            raise UserError(f"config has no field {name!r}.{did_you_mean(name, known)}")
        hint, field = known[name]
        check_type(shown[name], shown[name], value, hint)
        _check_limits(shown[name], shown[name], value, field)
    return _replace(cfg, dict(values))


def _replace(cfg: Any, values: dict[str, Any]) -> Any:
    """Replaces all leaves of one level at once, so that validation sees only the final state."""
    here: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, tail = name.partition(".")
        if tail:
            nested.setdefault(head, {})[tail] = value
        else:
            here[head] = value
    for head, sub in nested.items():
        here[head] = _replace(getattr(cfg, head), sub)
    return dataclasses.replace(cfg, **here)


class _Parser(flags.ArgumentParser):
    """Parses one leaf by its type hint; 'none' stands for None where None is allowed."""

    def __init__(self, hint: Any):
        self.base, self.optional = alternatives(hint)
        words = {int: "an integer", float: "a number", str: "text"}
        if typing.get_origin(self.base) is Literal:
            self.syntactic_help = "|".join(map(str, typing.get_args(self.base)))
        else:
            self.syntactic_help = words[self.base]
        self.syntactic_help += ", or none" if self.optional else ""

    def parse(self, argument: str) -> Any:
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
            return self.base(argument)
        except ValueError:
            raise ValueError(f"must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        return self.syntactic_help


# ---- flags


def define_flags(presets: Presets, default: str) -> None:
    """Defines --preset, --config and one flag for each leaf of the presets' Config class."""
    base = presets[default]()
    names = Literal[tuple(presets)]  # type: ignore[valid-type]
    flags.DEFINE(_Parser(names), "preset", default, "where the configuration starts")
    about = "start from a .json, .yaml or .toml file; what it lacks: of --preset, if that is given"
    flags.DEFINE(_Parser(str | None), "config", None, about)
    shown = flag_names(type(base))
    for name, hint, field in leaves(type(base)):
        unit = field.metadata.get("unit")
        help = field.metadata.get("help", "") + (f" [{unit}]" if unit else "")
        help += f"; {default}: {get(base, name)}"
        if hint is bool:
            flags.DEFINE_boolean(shown[name], None, help)
        else:
            flags.DEFINE(_Parser(hint), shown[name], None, help)


def from_flags(
    presets: Presets, adapt: Callable[[Any, Mapping[str, Any]], Any] | None = None
) -> tuple[Any, Any]:
    """Returns (the configuration, the preset or file that it started from).

    adapt(base, given flags) -> base: what a flag says about the others' defaults.
    Raises: UserError when a value or a combination is illegal.
    """
    values = flags.FLAGS
    base = presets[values.preset]()
    if values.config is not None:
        base = load(base if values["preset"].present else type(base)(), values.config)
    names = flag_names(type(base)).items()
    given = {name: values[flag].value for name, flag in names if values[flag].present}
    if adapt is not None:
        base = adapt(base, given)
    return override(_drop_whole(base, given), given), base


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


def run(main: Callable[..., Any], positional: int = 0, optional: int = 0) -> None:
    """Runs a script under absl: flags, then main(*words); a UserError, or Ctrl-C where main does
    not handle it, ends it in one line.

    positional: how many words the command line must have beside its flags. optional: how many more
    it may have.
    """

    def guarded(argv: list[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells every detail at INFO
        try:
            words = argv[1:]
            if len(words) > (most := positional + optional):
                raise UserError(f"unexpected argument {words[most]!r}: settings are --name=value")
            if len(words) < positional:
                raise UserError(f"{positional} words are needed, {len(words)} given; see --help")
            code = main(*words)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            sys.exit(130)
        sys.exit(code)

    app.run(guarded)


# ---- JSON, diff, fingerprint


def to_json(cfg: Any) -> str:
    """Returns the configuration as indented JSON text."""
    return json.dumps(dataclasses.asdict(cfg), indent=2) + "\n"


def from_json(cls: type, text: str) -> Any:
    """Returns the configuration that `to_json` wrote.

    Members that the text lacks keep their defaults, so older files stay readable.
    Raises: UserError for names that this version does not know.
    """
    return overlay(cls(), config_file.parse(text))


def load_json(cls: type, path: str | Path, flag: str = "config") -> Any:
    """Reads a saved configuration. flag: which named it. Raises: UserError naming the file."""
    return load(cls(), path, flag)


def load(base: Any, path: str | Path, flag: str = "config") -> Any:
    """Returns `base` with what a JSON, YAML or TOML file says.

    flag: which named the file. Raises: UserError naming the file and what is wrong.
    """
    found = config_file.read(path, flag)
    try:
        return overlay(base, found)
    except UserError as error:
        raise UserError(f"{path} is not a configuration: {error} (--{flag})") from None


def overlay(base: Any, said: Mapping[str, Any]) -> Any:
    """Returns `base` with the members of a nested mapping, named by their place or by their flag.

    'none' is None, as in a flag. A group of which one member is set keeps what `base` says of the
    others, unless one flag of that group drops it too.
    """
    hints = {name: hint for name, hint, _ in leaves(type(base))}
    names = {flag: name for name, flag in flag_names(type(base)).items()} | {n: n for n in hints}
    groups = {name.rpartition(".")[0] for name in names}
    flat: dict[str, Any] = {}

    def flatten(node: Mapping[str, Any], prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and name not in names:
                flatten(value, f"{name}.")
            elif value is None and any(f"{g}.".startswith(f"{name}.") for g in groups):
                pass  # YAML: a group whose members are all comments
            else:
                optional = name in names and alternatives(hints[names[name]])[1]
                flat[names.get(name, name)] = None if optional and value == "none" else value

    flatten(said, "")
    return override(_drop_whole(base, flat), flat)


def _drop_whole(base: Any, given: Mapping[str, Any]) -> Any:
    """Returns `base` with the defaults in those of its groups that one member resets."""
    for field in dataclasses.fields(base):
        if field.metadata.get("whole") and any(n.startswith(f"{field.name}.") for n in given):
            factory = typing.cast(Callable, field.default_factory)
            base = dataclasses.replace(base, **{field.name: factory()})
    return base


def diff(cfg: Any, base: Any) -> list[tuple[str, Any, Any]]:
    """Returns [(dotted name, value in base, value in cfg)] of the leaves that differ."""
    pairs = [(name, get(base, name), get(cfg, name)) for name, _, _ in leaves(type(cfg))]
    return [(name, old, new) for name, old, new in pairs if old != new]


def spell(cfg: Any, base: Any) -> list[str]:
    """Returns the flags that make `cfg` of `base`: what from_flags reads, for a command line."""
    names, flat = flag_names(type(cfg)), diff(cfg, base)
    for field in dataclasses.fields(cfg):
        mine = [d for d in flat if d[0].startswith(f"{field.name}.")]
        if field.metadata.get("whole") and mine:  # one flag drops what base says of the others
            factory = typing.cast(Callable, field.default_factory)
            fresh = dataclasses.replace(base, **{field.name: factory()})
            own = [d for d in diff(cfg, fresh) if d[0].startswith(f"{field.name}.")]
            flat = [d for d in flat if d not in mine] + (own or mine[:1])
    order = list(names)
    flat.sort(key=lambda d: order.index(d[0]))
    words = {None: "none", True: "true", False: "false"}
    return [
        f"--{names[name]}={words[new] if new is None or isinstance(new, bool) else new}"
        for name, _, new in flat
    ]


def fingerprint(cfg: Any, ignore: tuple[str, ...] = ()) -> str:
    """Returns 8 hex digits that name a configuration, equal in every process.

    ignore: dotted names, or groups, that do not count.
    """
    kept = {
        name: get(cfg, name)
        for name, _, _ in leaves(type(cfg))
        if not any(name == i or name.startswith(f"{i}.") for i in ignore)
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
