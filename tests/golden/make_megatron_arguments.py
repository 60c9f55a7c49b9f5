"""Makes megajax/foreign/megatron_arguments.json: the names of Megatron-LM's arguments.

Run it in a separate environment beside a clone of NVIDIA/Megatron-LM, of which it takes names only:

    python tests/golden/make_megatron_arguments.py CLONE/.git

The names are those of every option, of every member of a configuration class, and of every member
that training sets, in one version a year and the newest. Which of them are read or change what a
model computes is said in foreign/megatron.py; all others are inert there.
"""

import ast
import json
import pathlib
import re
import subprocess
import sys

TARGET = pathlib.Path(__file__).parents[2] / "megajax/foreign/megatron_arguments.json"
YEARS = range(2021, 2027)


def git(repository: str, *arguments: str) -> str:
    """Returns what git prints."""
    words = ["git", f"--git-dir={repository}", *arguments]
    return subprocess.run(words, capture_output=True, text=True).stdout


def names_in(text: str) -> set[str]:
    """Returns the names of arguments in a file's text."""
    names = set(re.findall(r"\bargs\.(\w+) = ", text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            options = [a.value for a in node.args if isinstance(a, ast.Constant)]
            named = {k.arg: k.value.value for k in node.keywords if k.arg == "dest"}  # type: ignore
            names.add(named.get("dest") or options[0].lstrip("-").replace("-", "_"))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            names |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore
    return names


def main(repository: str) -> None:
    """Writes the names."""
    names: set[str] = set()
    for year in YEARS:
        commit = git(repository, "rev-list", "-1", f"--before={year}-12-31", "HEAD").strip()
        files = git(repository, "ls-tree", "-r", "--name-only", commit, "megatron").split()
        for file in files:
            if re.search(r"(arguments|config|training|initialize|global_vars)[^/]*\.py$", file):
                try:
                    names |= names_in(git(repository, "show", f"{commit}:{file}"))
                except SyntaxError:
                    print("skipped", commit[:8], file)
    TARGET.write_text(json.dumps(sorted(names), indent=0) + "\n")
    print(len(names), "names")


if __name__ == "__main__":
    main(sys.argv[1])
