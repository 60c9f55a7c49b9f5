"""Frozen dataclasses <-> absl flags, JSON and diffs.

An experiment declares presets (functions that return its Config), calls `define_flags(PRESETS)` at
import and `from_flags(PRESETS)` in main. Every leaf of the dataclass tree becomes one typed flag
(`--model.layers=3`); a flag that is not given keeps the preset's value. `--config=FILE` starts from
a saved config.json instead of a preset. No jax import here: flags fail in a tenth of a second.

Legend: a leaf is (dotted name, type, dataclass field).
"""

import dataclasses
import functools
import hashlib
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from absl import flags, logging

from megajax.core import config_file, needs, script
from megajax.core import help as help_
from megajax.core.errors import FULL, TEMPORARY, UserError, did_you_mean, respell
from megajax.core.flag_parser import Parser, spell_type
from megajax.core.limits import Limits, alternatives, check_members, check_number, check_type
from megajax.core.needs import Needs

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

    needs: without what it has no effect. verbs: of the script, the ones that use it; empty: all.
    flag: its name on the command line; None: the dotted path from the root.
    bounds: the range of a number (limits.Limits: at_least, above, at_most, below).
    """
    about = {
        "help": help, "unit": unit, "needs": needs, "verbs": verbs, "flag": flag,
        "limits": Limits(**bounds),
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=about)


def group(
    factory: Callable[[], Any],
    whole: bool = False,
    flag: str | None = None,
    needs: Needs | None = None,
) -> Any:
    """Returns a field that holds a nested config.

    whole: one flag of the group drops what the preset says of all its other members.
    flag: what its flags begin with ('moe': --moe.experts); None: the dotted path from the root.
    needs: without what its members have no effect.
    """
    about = {"whole": whole, "flag": flag, "needs": needs}
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
    found: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        name, flag = prefix + field.name, field.metadata.get("flag") or shown + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            found |= flag_names(typing.cast(type, hints[field.name]), f"{name}.", f"{flag}.")
        else:
            found[name] = flag
    return found


def sections(cls: type, shown: str = "") -> dict[str, str]:
    """Returns {what the flags of a group begin with: the first sentence of its class}, '' first."""
    hints = typing.get_type_hints(cls)
    found = {"": ""} if not shown else {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hint := hints[field.name]):
            flag = field.metadata.get("flag") or shown + field.name
            found[flag] = (hint.__doc__ or "").strip().splitlines()[0]
            found |= sections(typing.cast(type, hint), f"{flag}.")
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


# ---- flags


def _page(presets: Presets, start: str, first: tuple[str, ...]) -> help_.Page:
    """Returns what --help shows: flags with their values in the preset `start`."""
    base = presets[start]()
    shown, rows = flag_names(type(base)), []
    for name, hint, field in leaves(type(base)):
        kind = spell_type(hint, field.metadata.get("limits", Limits()))
        rows.append((shown[name], kind, f"{_describe(field)}; {start}: {get(base, name)}"))
    return help_.Page(sections(type(base)), rows, first)


def _describe(field: dataclasses.Field) -> str:
    unit = field.metadata.get("unit")
    return field.metadata.get("help", "") + (f" [{unit}]" if unit else "")


def define_flags(presets: Presets, default: str, first: tuple[str, ...] = ()) -> None:
    """Defines --preset, --config and one flag for each leaf of the presets' Config class.

    first: the flags that --help describes when it cannot describe all; empty: those of no group.
    """
    base = presets[default]()
    names = Literal[tuple(presets)]  # type: ignore[valid-type]
    start = help_.Start(Parser(names), None, "preset", default, "where the configuration starts")
    start.pages = {name: functools.partial(_page, presets, name, first) for name in presets}
    flags.DEFINE_flag(start)
    about = "start from a .json, .yaml or .toml file; what it lacks comes from --preset, if given"
    flags.DEFINE(Parser(str | None), "config", None, about)
    shown = flag_names(type(base))
    for name, hint, field in leaves(type(base)):
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
      defaults. verb: what the script is asked to do. warn: of given flags that have no effect.
    Raises: UserError when a value or a combination is illegal.
    """
    values = flags.FLAGS
    base, read = presets[values.preset](), {}
    if values.config is not None:
        base, read = _load(base if values["preset"].present else type(base)(), values.config)
    names = flag_names(type(base)).items()
    given = {name: values[flag].value for name, flag in names if values[flag].present}
    if adapt is not None:
        base = adapt(base, given, read)
    cfg = _overlay(base, given)
    for sentence in needs.idle(cfg, given, flag_names(type(cfg)), verb) if warn else ():
        logging.warning("%s", sentence)
    return cfg, base


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
                f"error: {respell(str(error), list(flags.FLAGS))}"
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
    return overlay(cls(), config_file.parse(text))


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
    found = config_file.read(path, flag)
    try:
        flat = _flatten(type(base), found)
        return _overlay(base, flat), flat
    except UserError as error:
        raise UserError(f"{path} is not a configuration: {error} (--{flag})") from None


def overlay(base: Any, said: Mapping[str, Any]) -> Any:
    """Returns `base` with the members of a nested mapping, named by their place or by their flag.

    'none' is None, as in a flag. A group of which one member is set keeps what `base` says of the
    others, unless one flag of that group drops it too.
    """
    return _overlay(base, _flatten(type(base), said))


def _overlay(base: Any, flat: Mapping[str, Any]) -> Any:
    return override(_drop_whole(base, flat), flat)


def _flatten(cls: type, said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {dotted name: value} of the nested members of a file."""
    hints = {name: hint for name, hint, _ in leaves(cls)}
    names = {flag: name for name, flag in flag_names(cls).items()} | {n: n for n in hints}
    return config_file.flatten(said, names, {n for n in hints if alternatives(hints[n])[1]})


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
