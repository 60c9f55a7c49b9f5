"""The documents: what they mention exists, the site's links lead, the README's program runs."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import types

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


def imported(name: str):
    """A module of scripts/, whose modules import one another by their bare names."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def tools():
    return imported("docs_pages")


@pytest.fixture(scope="module")
def site():
    return imported("docs_site")


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
    errors = tools.Checker(project).check()
    assert len(errors) == len(BAD), errors
    assert [words for words in BAD.values() if not any(words in line for line in errors)] == []


def test_public_names_are_those_that_a_package_lists(tools, project):
    assert tools.public_names("megajax", project) == {"Loader": "megajax.rows"}
    (project / "megajax" / "__init__.py").write_text(
        'a, b, __all__ = public(__name__, {"rows": ("Loader", "Moe")})\n'
    )
    tools.parse.cache_clear()
    assert tools.public_names("megajax", project) == {
        "Loader": "megajax.rows",
        "Moe": "megajax.rows",
    }


def test_the_site_has_a_page_for_each_package_that_the_reference_lists(site, project):
    (project / "docs" / "api.md").write_text("[`megajax`](../megajax/__init__.py)\n")
    assert site.pages(project)["megajax/__init__.py"] == "api/megajax.md"
    text = site.api_page("megajax", project)
    assert "::: megajax.rows.Loader\n    options:\n      members: ['read']" in text
    (project / "megajax" / "more").mkdir()
    again = "from megajax.rows import Loader as Loader\n"
    (project / "megajax" / "more" / "__init__.py").write_text(again)
    text = site.api_page("megajax.more", project)
    assert "Described on the page of megajax: [Loader][megajax.rows.Loader]" in text


def test_links_between_files_become_links_between_pages(site, project):
    (project / "docs" / "papers").mkdir()
    (project / "docs" / "papers" / "a.md").write_text("# A\n")
    (project / "picture.svg").write_text("<svg/>")
    (project / "README.md").write_text("![seen](picture.svg) [page](docs/page.md)\n")
    placed = site.pages(project)
    assert site.pictures(placed, project) == {"picture.svg": "picture.svg"}
    placed |= site.pictures(placed, project)

    def linked(text: str, name: str) -> str:
        return site.relinked(text, name, placed, project)

    assert linked("[p](docs/page.md#rows)", "README.md") == "[p](page.md#rows)"
    assert linked("[a\nb](../../README.md)", "docs/papers/a.md") == "[a\nb](../index.md)"
    assert linked("![x](../picture.svg)", "docs/page.md") == "![x](picture.svg)"
    assert linked("[x](../megajax/rows.py)", "docs/page.md") == "x (`megajax/rows.py`)"
    assert linked("[`rows.py`](../megajax/rows.py)", "docs/page.md") == "`rows.py`"
    same = "[x](#here) [y](https://example.org) [z](none.md)\n```\n[p](../README.md)\n```\n"
    assert linked(same, "docs/page.md") == same


def test_docstrings_become_tables_and_paragraphs(site):
    text = inspect.cleandoc("""Reads rows.

    rows: how many; none: all. order: of the rows,
    as `pack` has it.
    Returns: the rows. Raises: UserError for none.

    More text: with a colon.
    """)
    assert site.described(text, ["rows", "order"], ["order"]).split("\n\n") == [
        "Reads rows.",
        "More text: with a colon.",
        "Attributes:\n    order: of the rows, as `pack` has it.",
        "Args:\n    rows: how many; none: all.",
        "**Returns:** the rows.",
        "**Raises:** `UserError` for none.",
    ]
    assert site.described("Only a sentence: no more.", []) == "Only a sentence: no more."


def test_a_page_that_loads_from_another_host_is_named(site, tmp_path, caplog):
    (tmp_path / "a.html").write_text('<script src="https://x.org/a.js"></script>')
    (tmp_path / "b.html").write_text('<a href="https://x.org">x</a> <img src="a.svg">')
    (tmp_path / "c.css").write_text("@import url(//x.org/c.css);")
    site.on_post_build(types.SimpleNamespace(site_dir=tmp_path))
    assert [record.args[0] for record in caplog.records] == ["a.html", "c.css"]


def test_each_finding_has_a_line_in_the_log(tools, project):
    (project / "docs" / "log").mkdir()
    (project / "docs" / "log" / "2026-Q4.md").write_text("# Q4\n## 2026-11-29: a, b\n")
    (project / "README.md").write_text("")
    (project / "LOG.md").write_text("# Log\n")
    (defect,) = tools.Checker(project).check()
    assert "no line links to '2026-11-29: a, b' of docs/log/2026-Q4.md" in defect
    (project / "LOG.md").write_text("[a](docs/log/2026-Q4.md#2026-11-29-a-b)\n")
    assert tools.Checker(project).check() == []


def test_the_architecture_names_each_package(tools, project):
    (project / "README.md").write_text("")
    (project / "docs" / "ARCHITECTURE.md").write_text("`megajax/rows.py`\n")
    assert tools.Checker(project).check() == []
    (project / "megajax" / "new").mkdir()
    (project / "megajax" / "new" / "__init__.py").write_text("")
    (defect,) = tools.Checker(project).check()
    assert "megajax/new is not mentioned" in defect


def example() -> str:
    """The program in README.md."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    return program


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
