"""The documents: what they mention exists, the reference is fresh, the README's program runs."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from tests import forks

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = '''"""Trains. Not a real script."""
from absl import flags
OUT = flags.DEFINE_string("out", "", "where")
for name, what in (("step", 1), ("save", 2)):
    add(f"--{name}_s", help=what)
add("--grid", help="of devices")
class Config(Checked):
    mesh: MeshSpec = group(MeshSpec)
    moe: Moe = group(Moe, flag="experts")
    seed: int = option(0, "of all", flag="luck")
    more: rows.Config = group(rows.Config)
config.define_flags({}, "tiny")
'''
IMPORTS = "from megajax import rows\nfrom megajax.rows import MeshSpec, Moe\n"
LIBRARY = '''class MeshSpec(Checked):
    data: int = option(1, "rows")
class Moe(Checked):
    top_k: int = option(1, "of a token")
class Config(Checked):
    width: int = option(1, "of a row")
class Loader:
    def read(self, rows: int, *, order=None) -> list:
        """Returns rows.

        rows: how many.
        """
'''


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import docs_pages
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return docs_pages


@pytest.fixture
def project(tmp_path):
    """A repository with one script, one module and one public name."""
    sources = {
        "scripts/run.py": IMPORTS + SCRIPT,
        "megajax/__init__.py": "from megajax.rows import Loader as Loader\n",
        "megajax/rows.py": LIBRARY,
        "docs/page.md": "# A page\n\n## Rows, and more\n",
    }
    for name, text in sources.items():
        (path := tmp_path / name).parent.mkdir(exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


GOOD = """# Title
[page](docs/page.md#rows-and-more), [here](#title), [out](https://example.org/x#y)
`megajax/rows.py:Loader.read`, `rows.py`, `scripts/`, `megajax.Loader`, `Loader`, `--mesh.*`
`scripts/run.py --mesh.data=2 --experts.top_k=1 --step_s=3 -- other --flag`
`megajax/later.py` is not built yet
```
uv run scripts/run.py --out=X \\
    --grid=2 --luck=1 --more.width=2   # comment --nothing
```
"""
BAD = {
    "[x](docs/none.md)": "link to docs/none.md: there is no such file",
    "[x](docs/page.md#rows)": "link to docs/page.md#rows: there is no such heading",
    "`megajax/none.py`": "megajax/none.py: there is no such file",
    "`megajax/rows.py:Loader.write`": "the file does not define this name",
    "`megajax.rows.Nothing`": "megajax.rows.Nothing: there is no such name",
    "`Loadre`": "Loadre: Loadre occurs in no source file",
    "`--mesh.dat=2`": "--mesh.dat=2: no script has this flag",
    "`scripts/run.py --moe.top_k=1`": "scripts/run.py --moe.top_k: the script has no such flag",
    "```\nuv run scripts/run.py \\\n --evaluate_s=1\n```": "run.py --evaluate_s: the script has",
    "`scripts/run.py --seed=1`": "scripts/run.py --seed: the script has no such flag",
    "```\nuv run scripts/walk.py\n```": "scripts/walk.py: there is no such script",
}


def test_what_documents_mention_is_looked_up(tools, project):
    (project / "README.md").write_text(GOOD)
    assert tools.Checker(project).check() == []
    (project / "README.md").write_text("\n\n".join(BAD))
    found = tools.Checker(project).check()
    assert len(found) == len(BAD), found
    assert [words for words in BAD.values() if not any(words in line for line in found)] == []


def test_the_reference_shows_signatures_and_docstrings(tools, project):
    pages = tools.pages(project)
    assert set(pages) == {"docs/api/README.md", "docs/api/megajax.md"}
    text = pages["docs/api/megajax.md"]
    assert "[`megajax/rows.py`](../../megajax/rows.py)" in text
    assert "def read(self, rows: int, *, order=None) -> list" in text and "rows: how many." in text
    (project / "megajax" / "__init__.py").write_text(
        'a, b, __all__ = public(__name__, {"rows": ("Loader", "Moe")})\n'
    )
    tools.parse.cache_clear()
    assert tools.public_names("megajax", project) == {
        "Loader": "megajax.rows",
        "Moe": "megajax.rows",
    }


def example() -> str:
    """The program in README.md."""
    (found,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    return found


def test_the_example_is_short_and_imports_what_exists(tools):
    code = example()
    assert len(code.splitlines()) <= 30
    checker = tools.Checker(ROOT)
    for node in ast.parse(code).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                assert checker.has_name(name), name


@pytest.mark.slow
@pytest.mark.process
def test_the_example_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    (tmp_path / "example.py").write_text(example())
    done = forks.run(str(tmp_path / "example.py"))
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+) nats", done.stdout)]
    assert len(losses) == 40 and losses[-1] < 0.7 * losses[0]


def test_readme_is_one_screen_and_a_map():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
