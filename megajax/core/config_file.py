"""Files that hold a configuration: the config.json of a run, or YAML or TOML written by hand.

The extension decides: .yaml, .yml, .toml, and JSON for every other. What the members may be is
`core.config`'s to say; this module returns nested mappings, whatever the format.
"""

import json
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.paths import expand


def read(path: str | Path, flag: str = "config") -> Mapping[str, Any]:
    """Returns what a file says.

    flag: which named it, for messages. Raises: UserError naming the file and the flag.
    """
    file = expand(path, flag)
    try:
        return parse(file.read_text(), file.suffix)
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
            found = tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    except RecursionError:
        raise ValueError("its members are nested too deeply") from None
    if not isinstance(found, Mapping):
        kind = "null" if found is None else type(found).__name__
        raise ValueError(f"it must hold named members, like train and model, and is a {kind}")
    return found


def _from_yaml(text: str) -> Any:
    """YAML 1.1, but 1e-3 is a number as it is everywhere else, and no member may stand twice."""
    import yaml  # here, because most programs read no YAML

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            names = [key.value for key, _ in node.value]
            if twice := {str(n) for n in names if names.count(n) > 1}:
                raise ValueError(f"{', '.join(sorted(twice))} stands twice{node.start_mark}")
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        found = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return {} if found is None else found  # a file of comments only


def flatten(
    said: Mapping[str, Any], names: Mapping[str, str], optional: Collection[str]
) -> dict[str, Any]:
    """Returns {dotted name: value} of nested members, which may be named by place or by flag.

    'none' is None, as in a flag. What nobody knows keeps the name that it has.

    Args: names: {place or flag: dotted name} of all members. optional: those that may be None.
    """
    groups = {name.rpartition(".")[0] for name in names}
    flat: dict[str, Any] = {}

    def visit(node: Mapping[str, Any], prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and name not in names:
                visit(value, f"{name}.")
            elif value is None and any(f"{g}.".startswith(f"{name}.") for g in groups):
                pass  # YAML: a group whose members are all comments
            else:
                place = names.get(name, name)
                flat[place] = None if place in optional and value == "none" else value

    visit(said, "")
    return flat
