"""Reads the public names of packages, and finds what documents mention and nothing has.

Nothing is imported: ast only. A package's public names are those of its `megajax.core.lazy.public`
mapping, of a literal __all__, or those that it imports `as` themselves.

Checked in documents: links and their anchors; in backticks and in code blocks: files,
`file.py:name`, dotted names of the packages, flags of the script that a command calls, and any
other word, which must occur somewhere in the sources. Lines that say "not built yet" may name what
does not exist.
"""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
API = "docs/api.md"
Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@functools.cache
def parse(path: Path) -> ast.Module:
    """Returns the syntax tree of a source file."""
    return ast.parse(path.read_text())


def source_of(module: str, root: Path = ROOT) -> Path | None:
    """Returns the file of a dotted module name, None when there is none."""
    base = root.joinpath(*module.split("."))
    found = (p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file())
    return next(found, None)


def public_names(package: str, root: Path = ROOT) -> dict[str, str]:
    """Returns {public name: the module that defines it}, in the order of the names."""
    path = source_of(package, root)
    found: dict[str, str] = {}
    listed: list[str] | None = None
    for node in parse(path).body if path else ():
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {a.name: str(node.module) for a in node.names if a.asname == a.name}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found |= _lazy(package, node.value)
        elif isinstance(node, ast.Assign) and "__all__" in [ast.unparse(t) for t in node.targets]:
            listed = ast.literal_eval(node.value)
    if listed is not None:
        here = {
            a.asname or a.name: str(n.module)
            for n in parse(path).body
            if path
            if isinstance(n, ast.ImportFrom)
            for a in n.names
        }
        found = {name: found.get(name) or here.get(name, package) for name in listed}
    return dict(sorted(found.items()))


def _lazy(package: str, call: ast.Call) -> dict[str, str]:
    """What `public(__name__, {module: (names)})` says."""
    if ast.unparse(call.func).split(".")[-1] != "public" or len(call.args) < 2:
        return {}
    listed: dict[str, tuple[str, ...]] = ast.literal_eval(call.args[1])
    return {name: f"{package}.{module}" for module, names in listed.items() for name in names}


def define(module: str, name: str, root: Path = ROOT) -> tuple[Path, Definition] | None:
    """Returns (file, definition) of a name, also where its module only imports it."""
    if (path := source_of(module, root)) is None:
        return None
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return path, node
        if isinstance(node, ast.Assign) and name in [ast.unparse(t) for t in node.targets]:
            return path, node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return path, node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module != module:
                    return define(node.module, alias.name, root)
    return None


def docstring(module: str, root: Path = ROOT) -> str:
    """Returns the docstring of a module, '' when it has none."""
    path = source_of(module, root)
    return (ast.get_docstring(parse(path)) or "") if path else ""


def api_packages(root: Path = ROOT) -> dict[str, str]:
    """Returns {package: its __init__.py} of the packages that docs/api.md links, in its order."""
    listed = root / API
    text = listed.read_text() if listed.exists() else ""
    files = re.findall(r"\]\(\.\./([\w/]+/__init__\.py)\)", text)
    return {file.removesuffix("/__init__.py").replace("/", "."): file for file in files}


# ---- documents


DOCUMENTS = (
    "README.md", "PAPERS.md", "LOG.md", "docs/*.md", "docs/papers/*.md",
    "pallas_kernels/*/README.md",
)  # fmt: skip
PLANNED = "not built yet"
SOURCES = (".py", ".sh", ".yaml", ".yml", ".toml", ".ipynb", ".md")
SCRIPT = re.compile(r"(?:(?:experiments|scripts)/)?(\w+\.(?:py|sh))$")
# What other programs define: their flags, and files that the project makes when it runs.
FOREIGN_FLAGS = {
    "--extra", "--group", "--help", "--helpfull", "--nodes", "--server-side", "--signal", "--batch",
    "--all", "--slow", "--lint", "--FLAG", "--durations", "--with", "--logdir", "--quiet",
}  # fmt: skip
MADE = ("pallas_kernels/tuned", "runs/", "summary.md", "plan.md")  # appear when a script has run
PRETRAIN = "pretrain.py"  # these launchers hand it the flags that are not theirs
ADDS = ("add", "add_argument")  # how scripts call argparse's method
LAUNCHERS = ("launch_ray.py", "launch_slurm.sh")
OPTIONS = {
    "megajax/systems/minder/run.py": ("MinderConfig", "minder."),  # made in a loop
    "experiments/qsync.py": ("QSyncConfig", ""),  # a class beside the Config that it extends
}
SHARED = {"tune.py": "scripts/gpu_check.py", "supervise.py": "megajax/systems/minder/run.py"}
# Words of other programs and formats that documents mention in backticks.
FOREIGN = {
    "aws", "s3", "sync", "sbatch", "scancel", "srun", "kubectl", "mpirun", "nvidia", "git", "pip",
    "install", "moto", "ui", "perfetto", "dev", "shm", "tmp", "ptxas", "TMA", "gh", "clone", "cd",
    "rankK", "attemptN", "NOTES", "jupyterlab", "jupyter", "lab", "tensorboard",
}  # fmt: skip


def slug(heading: str) -> str:
    """Returns the anchor of a heading as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def plain(text: str) -> str:
    """Returns Markdown without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Returns the anchors of a document."""
    return {slug(h) for h in re.findall(r"^#+ (.*)$", plain(text), re.MULTILINE)}


def spans(text: str) -> Iterator[str]:
    """Yields what stands in backticks, apart from lines about what is planned."""
    lines = (line for line in plain(text).split("\n") if PLANNED not in line)
    for found in re.finditer(r"(`+)(.+?)\1", "\n".join(lines), re.DOTALL):
        yield " ".join(found[2].split())


def commands(text: str) -> Iterator[str]:
    """Yields the lines of shell code blocks, continued lines joined, comments dropped."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language in ("", "bash", "sh"):
            for line in block.replace("\\\n", " ").split("\n"):
                yield line.split(" #")[0].strip()


def _spelled(tree: ast.Module, flag: ast.JoinedStr) -> set[str]:
    """Returns the flags that `--{name}_s` makes in a loop over tuples that begin with a name."""
    if not ast.unparse(flag).startswith(("f'--", 'f"--')):
        return set()
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and flag in ast.walk(n)]
    if not loops or not isinstance(loops[0].iter, ast.Tuple):
        return set()
    rows = (r.elts[0] if isinstance(r, ast.Tuple) else r for r in loops[0].iter.elts)
    names = [r.value for r in rows if isinstance(r, ast.Constant)]
    parts = [p.value if isinstance(p, ast.Constant) else None for p in flag.values]
    return {"".join(str(n if p is None else p) for p in parts).removeprefix("--") for n in names}


class Checker:
    """Knows the files, words and flags of a repository."""

    def __init__(self, root: Path):
        """Reads nothing but the list of files yet."""
        self.root = root
        done = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        self.files = [f for f in done.stdout.split("\n") if f and (root / f).exists()]
        self.folders = {p.as_posix() for f in self.files for p in Path(f).parents} - {"."}

    def documents(self) -> list[Path]:
        """Returns the documents that are checked."""
        return sorted(p for pattern in DOCUMENTS for p in self.root.glob(pattern))

    def check(self) -> list[str]:
        """Returns one line for each defect of each document."""
        found = []
        for path in self.documents():
            text, name = path.read_text(), path.relative_to(self.root).as_posix()
            defects = [*self.links(path, text)]
            for span in spans(text):
                defects += self.span(span)
            for command in commands(text):
                defects += self.command(command)
            found += [f"{name}: {defect}" for defect in dict.fromkeys(defects)]
        return [*found, *self.log(), *self.packages()]

    def log(self) -> Iterator[str]:
        """Yields the headings of docs/log that LOG.md has no link to."""
        index = self.root / "LOG.md"
        listed = set(re.findall(r"\]\(([^)\s]+)\)", index.read_text())) if index.exists() else set()
        for path in sorted(self.root.glob("docs/log/*.md")):
            for heading in re.findall(r"^## (.*)$", plain(path.read_text()), re.MULTILINE):
                if f"docs/log/{path.name}#{slug(heading)}" not in listed:
                    yield f"LOG.md: no line links to {heading!r} of docs/log/{path.name}"

    def packages(self) -> Iterator[str]:
        """Yields the packages of megajax that docs/ARCHITECTURE.md does not mention."""
        page = self.root / "docs" / "ARCHITECTURE.md"
        text = page.read_text() if page.exists() else ""
        for name in self.files:
            folder, _, file = name.rpartition("/")
            if text and name.startswith("megajax/") and file == "__init__.py":
                if not re.search(rf"{re.escape(folder)}\b", text):
                    yield f"docs/ARCHITECTURE.md: {folder} is not mentioned"

    # ---- links

    def links(self, path: Path, text: str) -> Iterator[str]:
        """Yields links to files and headings that are not there."""
        for target in re.findall(r"\]\(([^)\s]+)\)", plain(text)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.exists():
                yield f"link to {target}: there is no such file"
            elif anchor and anchor not in anchors(there.read_text()):
                yield f"link to {target}: there is no such heading"

    # ---- code in a line

    def span(self, span: str) -> Iterator[str]:
        """Yields what a piece of inline code mentions and is not there."""
        words = span.split(" ")
        if any(self.is_script(word) for word in words):
            yield from self.command(span)
            return
        for word in words:
            yield from self.word(word.strip("(),;:'\""))

    def word(self, word: str) -> Iterator[str]:
        """Yields the defect of one word of inline code, if it has one."""
        if word.startswith("--"):
            name = re.split(r"[=\s]", word)[0]
            if not self.is_flag(name[2:], self.all_flags()):
                yield f"{word}: no script has this flag"
        elif ":" in word and (file := word.split(":")[0]).endswith(".py"):
            yield from self.member(file, word.split(":")[1])
        elif self.looks_like_file(word):
            if not self.find(word):
                yield f"{word}: there is no such file"
        elif re.fullmatch(r"(megajax|pallas_kernels)(\.\w+)+(\(.*\))?", word):
            if not self.has_name(re.sub(r"\(.*\)", "", word)):
                yield f"{word}: there is no such name"
        elif re.fullmatch(r"[A-Za-z_][\w.]*(\(\w*=?\)?)?", word):
            for part in re.findall(r"[A-Za-z_]\w*", word):
                if part not in self.words() and part not in FOREIGN:
                    yield f"{word}: {part} occurs in no source file"

    def looks_like_file(self, word: str) -> bool:
        """Tells whether a word must be a file or a folder of the repository."""
        elsewhere = word.startswith(("runs/", "/", "~", "s3:", "gs:"))
        if elsewhere or not re.fullmatch(r"[\w./*-]+", word):
            return False
        top = word.split("/")[0]
        return word.endswith((".py", ".sh", ".md", ".toml", ".ipynb")) or (
            "/" in word and any(f.startswith(f"{top}/") for f in self.files)
        )

    def find(self, word: str) -> list[str]:
        """Returns the files that a word means: a path, the end of one, a folder or a pattern."""
        word = word.rstrip("/").removeprefix("../")
        if word in self.folders or any(word.startswith(made) for made in MADE):
            return [word]
        if "*" in word:
            return [p.as_posix() for p in self.root.glob(word)]
        ends = [f for f in self.files if f == word or f.endswith(f"/{word}")]
        return ends or [f for f in self.folders if f.endswith(f"/{word}")]

    def member(self, file: str, name: str) -> Iterator[str]:
        """Yields the defect of `file.py:name`."""
        found = self.find(file)
        if not found:
            yield f"{file}:{name}: there is no such file"
        elif not any(self.defines(self.root / f, name.removesuffix("()")) for f in found):
            yield f"{file}:{name}: the file does not define this name"

    @staticmethod
    def defines(path: Path, name: str) -> bool:
        """Tells whether a file defines a dotted name: constants, functions, classes, members."""
        body: list[ast.stmt] = parse(path).body
        for part in name.split("."):
            for node in body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part:
                    body = node.body
                    break
                if isinstance(node, ast.ImportFrom) and part in [
                    a.asname or a.name for a in node.names
                ]:
                    body = []
                    break
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if part in map(ast.unparse, targets):
                        body = []
                        break
            else:
                return False
        return True

    def has_name(self, dotted: str) -> bool:
        """Tells whether a module, a public name or a definition has this dotted name."""
        if source_of(dotted, self.root):
            return True
        parts = dotted.split(".")
        for at in range(len(parts) - 1, 0, -1):
            module, rest = ".".join(parts[:at]), parts[at:]
            if path := source_of(module, self.root):
                if self.defines(path, ".".join(rest)):
                    return True
                where = public_names(module, self.root).get(rest[0], module)
                found = define(where, rest[0], self.root)
                return found is not None and self.defines(found[0], ".".join(rest))
        return False

    @functools.cache  # noqa: B019 - one checker a process
    def words(self) -> set[str]:
        """Returns every word of the sources, and every name of a file."""
        found: set[str] = set()
        for name in self.files:
            found |= set(re.findall(r"\w+", name))
            if name.endswith(SOURCES) and not re.match(r"docs/|README|PAPERS|LOG", name):
                found |= set(re.findall(r"[A-Za-z_]\w*", (self.root / name).read_text()))
        return found

    # ---- commands and flags

    @staticmethod
    def is_script(word: str) -> bool:
        """Tells whether a word of a command may be a script of the project."""
        return SCRIPT.fullmatch(word) is not None

    def command(self, line: str) -> Iterator[str]:
        """Yields what a command calls or sets and is not there."""
        for part in re.split(r" -- |; | && ", f" {line} "):
            words = part.split()
            at = next((i for i, word in enumerate(words) if self.is_script(word)), None)
            if at is None:
                continue
            files = [f for f in self.find(words[at]) if f.startswith(("scripts/", "experiments/"))]
            if not files:
                if not self.find(words[at]):
                    yield f"{words[at]}: there is no such script"
                continue
            known = set().union(*(self.flags_of(f) for f in files))
            for word in words[at + 1 :]:
                word = word.lstrip("[`'\"")
                name = re.split(r"[=\s\])]", word)[0]
                if word.startswith("--") and not self.is_flag(name[2:], known):
                    yield f"{words[at]} {name}: the script has no such flag"

    @staticmethod
    def is_flag(name: str, known: set[str]) -> bool:
        """Tells whether a flag, its negation or a pattern of flags is known."""
        name = name.rstrip(".,;:`'\")")
        if f"--{name}" in FOREIGN_FLAGS:
            return True
        if name.endswith("*"):
            return any(flag.startswith(name[:-1]) for flag in known)
        return bool({name, name.removeprefix("no")} & known) or name == ""

    @functools.cache  # noqa: B019
    def all_flags(self) -> set[str]:
        """Returns the flags of all scripts."""
        scripts = [f for f in self.files if re.fullmatch(r"(experiments|scripts)/\w+\.py", f)]
        return set().union(*map(self.flags_of, scripts))

    @functools.cache  # noqa: B019
    def flags_of(self, file: str) -> frozenset[str]:
        """Returns the flags of a script as its source says: absl's, argparse's, its Config's."""
        name = Path(file).name
        found: set[str] = set()
        if name in LAUNCHERS:
            found |= self.flags_of(f"experiments/{PRETRAIN}")
        if name in SHARED:
            found |= self.flags_of(SHARED[name])
        if file in OPTIONS:
            found |= self.fields_of(file, *OPTIONS[file])
        if not name.endswith(".py"):
            return frozenset(found)
        tree = parse(self.root / file)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called, first = ast.unparse(node.func), node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                if called.startswith("flags.DEFINE_"):
                    found.add(first.value)
                elif first.value.startswith("--") and called.split(".")[-1] in ADDS:
                    found.add(first.value[2:])
            if isinstance(first, ast.JoinedStr):
                found |= _spelled(tree, first)
            if called.endswith("define_flags"):
                also = next((k.value for k in node.keywords if k.arg == "also"), None)
                others = also.elts if isinstance(also, ast.Tuple) else []
                classes = ["Config", *map(ast.unparse, others)]
                found |= {"preset", "config"}.union(*(self.fields_of(file, c) for c in classes))
        return frozenset(found)

    def fields_of(self, file: str, name: str, prefix: str = "") -> set[str]:
        """Returns the flags of a class of options, which the file defines or imports."""
        tree = parse(self.root / file)
        cls = next(
            (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), None
        )
        if cls is None:
            return self._imported(tree, file, name, prefix)
        bases = [ast.unparse(base).split(".")[-1] for base in cls.bases]
        found = set().union(*(self.fields_of(file, base, prefix) for base in bases))
        for item in cls.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Call):
                field, call = ast.unparse(item.target), item.value
                shown = {k.arg: ast.unparse(k.value).strip("'") for k in call.keywords}
                inner = prefix + field if "flag" not in shown else shown["flag"]
                if ast.unparse(call.func).endswith("group"):
                    module, _, kind = ast.unparse(call.args[0]).rpartition(".")
                    place = self._module_file(tree, module) or file
                    found |= self.fields_of(place, kind, f"{inner}.")
                else:
                    found.add(inner)
        return found

    def _module_file(self, tree: ast.Module, name: str) -> str | None:
        """Returns the file of a module of ours that another module imports under a name."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        path = source_of(f"{node.module}.{alias.name}", self.root)
                        return path and path.relative_to(self.root).as_posix()
        return None

    def _imported(self, tree: ast.Module, file: str, name: str, prefix: str) -> set[str]:
        """Returns what `fields_of` does, of a class that another module defines.

        A script that imports its presets, and no Config, has the class that is beside these.
        """
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        if name == "Config" and "PRESETS" in names and "Config" not in names:
            return self._of_presets(tree, prefix)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    paths = [source_of(node.module, self.root)]
                    paths.append(source_of(f"{node.module}.{alias.name}", self.root))
                    for path in filter(None, paths):
                        wanted = alias.name if (alias.asname or alias.name) == name else name
                        if self.defines(path, wanted) and wanted in (alias.name, name):
                            return self.fields_of(
                                path.relative_to(self.root).as_posix(), wanted, prefix
                            )
        return set()

    def _of_presets(self, tree: ast.Module, prefix: str) -> set[str]:
        """The flags of a script that imports presets: of the class beside them, or training's."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and "PRESETS" in [a.name for a in node.names]:
                path = source_of(node.module or "", self.root)
                kinds = [n for n in parse(path).body if isinstance(n, ast.ClassDef)] if path else []
                if path and kinds:
                    file = path.relative_to(self.root).as_posix()
                    runs = [k for k in kinds if "JobConfig" in map(ast.unparse, k.bases)]
                    return self.fields_of(file, (runs or kinds)[0].name, prefix)
        return self.fields_of("megajax/training/config.py", "Config", prefix)
