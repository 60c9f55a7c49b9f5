"""What scripts/house.py counts, on trees whose figures are known; and the places of the mutants."""

import ast
import json
import sys
import textwrap

import pytest

from scripts import house, mutants
from tests import forks


@pytest.fixture
def tree(tmp_path):
    """A library of known sizes: `a` loads `b` at its top, and `c` in a function only."""
    files = {
        "megajax/__init__.py": "",
        "megajax/core/__init__.py": (
            "from megajax.core.lazy import public\n"
            "__getattr__ = public(__name__, {'b': ('Thing',)})\n"
        ),
        "megajax/core/b.py": "class Thing:\n    def size(self):\n        return 1\n",
        "megajax/core/c.py": "x = [1]  # fmt: " + "skip\n" + "def f(own, *, _kept=0): pass\n",
        "megajax/core/lazy.py": "def public(name, listed):\n    found = name\n    return found\n",
        "experiments/a.py": "from megajax.core import Thing\ndef g():\n    import megajax.core.c\n",
        "experiments/z.py": "import experiments.a\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return house.Tree(tmp_path)


def test_areas_are_counted(tree, monkeypatch):
    monkeypatch.setattr(house, "ENTRIES", {"z": "experiments.z"})
    figures = tree.counts()
    area = figures["areas"]["megajax"]
    assert (area["files"], area["lines"], area["functions"]) == (5, 10, 3)
    assert area["function_lines"] == {"sum": 2 + 3 + 2, "median": 2, "p90": 3}
    assert area["fmt_skips"] == 1 and area["banned_names"] == 3
    assert figures["banned_names"]["megajax"] == {"found": 1, "kept": 1, "own": 1}


def test_a_closure_follows_public_names_and_no_function(tree):
    core = {"megajax", "megajax.core", "megajax.core.b", "megajax.core.lazy"}
    assert tree.closure("experiments.z") == core | {"experiments.z", "experiments.a"}
    assert tree.closure("experiments.a") == core | {"experiments.a", "megajax.core.c"}


def test_a_private_module_with_one_importer_is_listed(tree):
    small = tree.single_importers()
    assert {name: row["importer"] for name, row in small.items()} == {
        "megajax.core.c": "experiments.a",
        "megajax.core.lazy": "megajax.core",
    }


def test_names_are_counted_where_they_are_bound():
    text = """
    def found(given, /, *own, rest=1, **kept):
        self.whole = given.wanted = other
        for here, (mine, _) in found: pass
        with x as turn: print(led, kept=found)
        return [way for way in rest if (beside := way)]
    class let_go: rest: int
    """
    names = house.banned_names(ast.parse(textwrap.dedent(text)))
    assert names == dict.fromkeys(house.BANNED - {"led"}, 1) | {"rest": 2}


def test_a_walk_enters_each_function_once(tmp_path, monkeypatch):
    """a.one calls b.two, twice, which calls a.three: two transitions, of which one comes back."""
    folder = tmp_path / "megajax"
    folder.mkdir()
    (folder / "walked_a.py").write_text(
        "import walked_b\ndef one():\n    walked_b.two(); walked_b.two()\ndef three(): pass\n"
    )
    (folder / "walked_b.py").write_text("def two():\n    import walked_a\n    walked_a.three()\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(house, "ROOT", tmp_path)
    import walked_a  # type: ignore[import-not-found]

    with house.Walk() as walk:
        walked_a.one()
    again = house.Walk(known=walk)
    with again:
        walked_a.one()
    assert walk.figures() == {
        "files": 2,
        "functions": 3,
        "transitions": 2,
        "returns": 1,
        "calls": 5,
        "names": ["megajax/walked_a.py", "megajax/walked_b.py"],
    }
    assert again.figures()["functions"] == 0 and again.figures()["calls"] == 5
    for name in ("walked_a", "walked_b"):
        del sys.modules[name]


def test_a_fault_is_planted_at_any_depth_of_indentation(tmp_path):
    row = {"id": "x", "snippet": "if a:\nb()", "replacement": "if c:\n    d()", "tests": ["test_y"]}
    (tmp_path / "m.json").write_text(json.dumps({"mutants": [row]}))
    (mutant,) = mutants.read(tmp_path / "m.json")
    path, text = tmp_path / "f.py", "def f():\n    if a:\n        b()\n    return 1\n"
    ((_, place),) = mutant.places({path: text})
    assert mutant.apply(text, place) == text.replace("if a", "if c").replace("b()", "d()")
    assert mutants.why_moved(mutant, {path: text * 2}) == "the snippet stands in 2 places"
    assert "stands in 0 files of tests" in mutants.why_moved(mutant, {path: text})


@pytest.mark.slow
@pytest.mark.process
def test_the_flows_run():
    """Each goes through files of its own room, and comes back to some."""
    done = forks.run("scripts/house.py", "--flows", "--json")
    assert done.returncode == 0, done.stderr
    flows = json.loads(done.stdout)["flows"]
    rooms = {
        "batch to loss": ("data", "models", "layers"),
        "gradient to update": ("training", "parallel"),
        "save": ("checkpoint",),
        "restore": ("checkpoint",),
        "served request": ("serving", "systems"),
        "alert to action": ("monitor", "systems"),
    }
    assert list(flows) == list(rooms)
    for name, flow in flows.items():
        assert len(set(flow["names"])) == flow["files"] <= flow["functions"] <= flow["calls"]
        assert 0 < flow["returns"] < flow["transitions"] < flow["functions"], name
        for room in rooms[name]:
            assert any(n.startswith(f"megajax/{room}/") for n in flow["names"]), (name, room)
