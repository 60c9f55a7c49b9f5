"""Plants faults into the library, one at a time, and sees whether the tests for them find them.

    uv run scripts/mutants.py                    # all mutants of tests/mutants.json, some minutes
    uv run scripts/mutants.py --only=lease       # those whose id contains a word
    uv run scripts/mutants.py --check            # only: does each still have its place and tests

A mutant names its place by text and its tests by name, so files may move. It is one row of:

  id           where the fault lies, and what it is
  snippet      one to three lines that stand once in megajax and pallas_kernels, without the
               indentation of the first
  replacement  what stands there instead
  tests        names of test functions, `name[parameters]` for one of its cases

The source is copied into a temporary folder, so nothing here changes. There, all tests of all
mutants run once without a fault, and then those of each mutant with it, each time in a fork of one
process that has imported what megajax depends on. The result of a mutant is one of

  killed       a test failed: the fault is found
  survived     every test passed: a gap
  moved        the snippet is absent or not unique, or a test is: adapt the mutant
  broken       a test fails without the fault too, or none ran

Exit code 1: not all are killed.
"""

import megajax.core.interrupted  # noqa: F401

import ast
import compileall
import contextlib
import functools
import importlib
import os
import py_compile
import re
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from megajax.core import config, files
from megajax.core.errors import UserError

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "mutants.json"
LIBRARY = ("megajax", "pallas_kernels")
COPIED = (*LIBRARY, "experiments", "scripts", "tests")
LEFT = shutil.ignore_patterns("__pycache__", "results")
MAX_TABLE = 2**22  # (chosen) bytes of mutants.json
# What tests import and a fault cannot change.
DEPENDENCIES = (
    "flax.nnx",
    "jax.experimental.pallas.mosaic_gpu",
    "optax",
    "orbax.checkpoint",
    "pytest",
    "scipy.optimize",
)


@dataclass(frozen=True)
class Mutant:
    """One row of mutants.json."""

    id: str
    snippet: str
    replacement: str
    tests: tuple[str, ...]

    def places(self, texts: dict[Path, str]) -> list[tuple[Path, re.Match]]:
        """Returns where the snippet stands, at any depth of indentation."""
        lines = [re.escape(line.strip()) for line in self.snippet.splitlines()]
        pattern = re.compile(r"[ \t]*\n[ \t]*".join(lines))
        return [(path, m) for path, text in texts.items() for m in pattern.finditer(text)]

    def apply(self, text: str, place: re.Match) -> str:
        """Returns the text of the file with the fault in it."""
        begin = text.rfind("\n", 0, place.start()) + 1
        indent = re.match(r"[ \t]*", text[begin:])[0]
        lines = self.replacement.splitlines() or [""]
        new = "\n".join([lines[0], *(indent + line for line in lines[1:])])
        return text[: place.start()] + new + text[place.end() :]


def read(path: Path = TABLE) -> list[Mutant]:
    """Returns the mutants of a table. Raises: UserError."""
    try:
        rows = files.read_object(path, MAX_TABLE)["mutants"]
        mutants = [Mutant(**row | {"tests": tuple(row["tests"])}) for row in rows]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is no table of mutants: {error!r:.200}") from None
    if len({m.id for m in mutants}) < len(mutants):
        raise UserError(f"{path}: two mutants have one id")
    return mutants


def sources(root: Path = ROOT) -> dict[Path, str]:
    """Returns the text of each file of the library."""
    return {p: p.read_text() for top in LIBRARY for p in sorted((root / top).rglob("*.py"))}


@functools.cache
def _test_files(root: Path) -> dict[Path, str]:
    return {p: p.read_text() for p in sorted((root / "tests").rglob("test_*.py"))}


def find_tests(names: tuple[str, ...], root: Path = ROOT) -> list[str]:
    """Returns the pytest ids of test functions by their names. Raises: LookupError."""
    texts, ids = _test_files(root), []
    for name in names:
        bare = name.partition("[")[0]
        defined = re.compile(rf"^(?:async )?def {re.escape(bare)}\(", re.MULTILINE)
        paths = [p for p, text in texts.items() if defined.search(text)]
        if len(paths) != 1:
            raise LookupError(f"{bare} stands in {len(paths)} files of tests")
        ids.append(f"{paths[0].relative_to(root)}::{name}")
    return ids


def why_moved(mutant: Mutant, texts: dict[Path, str]) -> str:
    """Returns what the mutant lacks, or nothing."""
    places = mutant.places(texts)
    if len(places) != 1:
        return f"the snippet stands in {len(places)} places"
    try:
        ast.parse(mutant.apply(texts[places[0][0]], places[0][1]))
    except SyntaxError as error:
        return f"with the replacement its file is no Python: {error}"
    try:
        find_tests(mutant.tests)
    except LookupError as error:
        return str(error)
    return ""


class Bench:
    """A copy of the source in which tests run."""

    def __init__(self, folder: Path):
        """Copies and compiles the source, and imports what tests depend on."""
        self.root = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=LEFT, symlinks=True)
        for name in ("pyproject.toml", "docs", "README.md"):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).symlink_to(ROOT / name)
        results = Path("experiments", "results")  # large, and read only
        (folder / results).symlink_to(ROOT / results)
        # Bytecode that is checked against its source's hash: times of changes are too coarse.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        for name in COPIED:
            compileall.compile_dir(folder / name, quiet=2, invalidation_mode=checked)
        sys.dont_write_bytecode = True
        os.environ["MEGAJAX_TEST_CACHE"] = str(folder / "programs")  # tests/conftest.py
        os.environ["JAX_PLATFORMS"] = "cpu"
        for name in DEPENDENCIES:
            importlib.import_module(name)

    def run(self, ids: list[str], log: Path) -> int:
        """Returns pytest's exit code for these tests, in a fork; what it prints is in the log."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            os.chdir(self.root)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            for name in [m for m in sys.modules if m.split(".")[0] in COPIED]:
                del sys.modules[name]
            originals = {os.path.realpath(ROOT / top) for top in ("", *COPIED)}
            sys.path[:] = [p for p in sys.path if os.path.realpath(p) not in originals]
            sys.path.insert(0, str(self.root))
            import pytest

            words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--durations=5", *ids]
            code = int(pytest.main(words))
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            code = 3
        os._exit(code)

    def judge(self, mutant: Mutant, log: Path) -> str:
        """Returns killed, survived or broken."""
        ((path, place),) = mutant.places(sources(self.root))
        text = path.read_text()
        path.write_text(mutant.apply(text, place))
        try:
            code = self.run(find_tests(mutant.tests, self.root), log)
        finally:
            path.write_text(text)
        return {0: "survived", 1: "killed"}.get(code, "broken")


def cpu_s() -> float:
    """Returns the seconds of CPU of this process and of those that it waited for."""
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def define_flags() -> None:
    """Defines the flags of this script. Tests import it beside others that have flags so called."""
    flags.DEFINE_string("only", "", "only the mutants whose id contains this")
    flags.DEFINE_boolean("check", False, "run no test: look for the places and the tests only")


def main() -> int:
    """Judges the mutants."""
    mutants = [m for m in read() if flags.FLAGS.only in m.id]
    texts = sources()
    moved = {m.id: why for m in mutants if (why := why_moved(m, texts))}
    for name, why in moved.items():
        print(f"{name:44} moved: {why}")
    placed = [m for m in mutants if m.id not in moved]
    if flags.FLAGS.check or not placed:
        print(f"{len(placed)} of {len(mutants)} mutants have their place and their tests")
        return int(bool(moved))
    results = dict.fromkeys(moved, "moved")
    with tempfile.TemporaryDirectory(prefix="megajax_mutants_") as folder:
        (root := Path(folder, "source")).mkdir()
        bench, log = Bench(root), Path(folder, "log")
        ids = sorted({test for m in placed for test in find_tests(m.tests)})
        if code := bench.run(ids, log):
            print(f"the tests fail without a fault (pytest's exit code {code}):")
            print(log.read_text()[-4000:])
            return 1
        print(f"{len(ids)} tests pass without a fault: {cpu_s():.0f} s of CPU")
        for mutant in placed:
            begun, clock = cpu_s(), time.monotonic()
            results[mutant.id] = bench.judge(mutant, log)
            used = f"{cpu_s() - begun:.1f} s of CPU, {time.monotonic() - clock:.1f} s"
            print(f"{mutant.id:44} {results[mutant.id]:9} {used}", flush=True)
            if results[mutant.id] == "broken":
                print(log.read_text()[-1500:])
    counts = {word: list(results.values()).count(word) for word in dict.fromkeys(results.values())}
    print(", ".join(f"{count} {word}" for word, count in counts.items()), f"{cpu_s():.0f} s of CPU")
    return int(set(results.values()) != {"killed"})


if __name__ == "__main__":
    define_flags()
    sys.exit(config.run(main))
