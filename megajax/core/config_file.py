"""Files that hold a configuration: the config.json of a run, or YAML or TOML written by hand.

The extension decides: .yaml, .yml, .toml, and JSON for every other. What the members may be is
`core.config`'s to say; this module returns nested mappings, whatever the format.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.paths import expand

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


def parse(text: str, suffix: str = ".json") -> Mapping[str, Any]:
    """Returns what a text says. suffix: of a file's name. Raises: ValueError."""
    try:
        if suffix in (".yaml", ".yml"):
            found = _from_yaml(text)
        else:
            toml = suffix == ".toml"
            found = tomllib.loads(text) if toml else files.parse_json(text, files.each_once)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, Mapping):
        kind = "null" if found is None else type(found).__name__
        raise ValueError(f"it must hold named members, like train and model, and is a {kind}")
    return found


def _from_yaml(text: str) -> Any:
    """YAML 1.1, but 1e-3 is a number as it is everywhere else, and no member may stand twice.

    Aliases and merges (<<) can make gigabytes of a few lines, so what they come to is counted.
    """
    import yaml  # here, because most programs read no YAML

    class Loader(yaml.SafeLoader):
        values = 0

        def _count(self, more: int) -> None:
            self.values += more
            if self.values > MAX_VALUES:
                raise ValueError(f"it has over {MAX_VALUES:,} values")

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
        found = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (AttributeError, LookupError, TypeError, OverflowError) as error:
        # PyYAML's own, of a value that is not of the type that its tag says: `!!bool maybe`
        raise ValueError(f"a value does not fit its tag: {error}") from None
    return {} if found is None else found  # a file of comments only


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
                flat[place] = None if place in optional and value == "none" else value

    visit(said, "", 1)
    return flat
