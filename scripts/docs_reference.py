"""Builds the pages of docs/api from the docstrings of public names. Nothing is imported: ast only.

A package's public names are those of its `megajax.core.lazy.public` mapping, of a literal __all__,
or those that it imports `as` themselves. A package without any has no page.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = "docs/api"
PACKAGES = (
    "megajax", "megajax.checkpoint", "megajax.core", "megajax.cost", "megajax.data",
    "megajax.layers", "megajax.models", "megajax.monitor", "megajax.monitor.fleet",
    "megajax.monitor.sources",
    "megajax.parallel", "megajax.quant", "megajax.schedule", "megajax.search", "megajax.serving",
    "megajax.systems", "megajax.systems.cdmpp", "megajax.systems.llm_pq", "megajax.systems.minder",
    "megajax.training", "pallas_kernels",
)  # fmt: skip
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
        here = {a.asname or a.name: str(n.module) for n in parse(path).body if path
                if isinstance(n, ast.ImportFrom) for a in n.names}  # fmt: skip
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


def signature(node: ast.FunctionDef) -> str:
    """Returns `def name(...) -> type`, a parameter a line where it does not fit into one."""
    args = ast.unparse(node.args)
    back = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if len(line := f"def {node.name}({args}){back}") <= 96:
        return line
    each = _parameters(node.args)
    return "\n".join([f"def {node.name}(", *(f"    {a}," for a in each), f"){back}"])


def _parameters(args: ast.arguments) -> list[str]:
    """The parameters one by one, as they are written."""

    def one(arg: ast.arg, default: ast.expr | None) -> str:
        note = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
        equals = " = " if note else "="
        return f"{arg.arg}{note}" + (f"{equals}{ast.unparse(default)}" if default else "")

    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    found = [one(a, d) for a, d in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    if args.vararg:
        found.append(f"*{one(args.vararg, None)}")
    elif args.kwonlyargs:
        found.append("*")
    found += [one(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return found + ([f"**{one(args.kwarg, None)}"] if args.kwarg else [])


def fenced(text: str, language: str = "") -> str:
    """Returns text as a code block."""
    return f"```{language}\n{text}\n```"


def prose(node: ast.AST) -> list[str]:
    """Returns a docstring as blocks of Markdown: as it is, since its columns mean something."""
    text = ast.get_docstring(node)  # type: ignore[arg-type]
    return [fenced(text, "text")] if text else []


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Yields the fields of a class; those of `option` with their default and their help."""
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or ast.unparse(item.target).startswith("_"):
            continue
        line = f"{ast.unparse(item.target)}: {ast.unparse(item.annotation)}"
        value, about = item.value, ""
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("option"):
            helps = [a for a in value.args[1:2] if isinstance(a, ast.Constant)]
            about = f"  # {helps[0].value}" if helps else ""
            value = value.args[0] if value.args else None
        yield line + (f" = {ast.unparse(value)}" if value is not None else "") + about


def describe(node: Definition) -> list[str]:
    """Returns the blocks of a definition: signature, docstring, fields and methods."""
    if isinstance(node, ast.FunctionDef):
        return [fenced(signature(node), "python"), *prose(node)]
    if not isinstance(node, ast.ClassDef):
        return [fenced(ast.unparse(node), "python")]
    bases = [*map(ast.unparse, node.bases), *(f"{k.arg}={ast.unparse(k.value)}"
             for k in node.keywords)]  # fmt: skip
    head = f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}"
    blocks = [fenced("\n".join([head, *(f"    {line}" for line in fields(node))]), "python")]
    blocks += prose(node)
    for item in node.body:
        public = isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
        called = isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__call__")
        if public or called:
            marks = [f"@{ast.unparse(d)}" for d in item.decorator_list]
            blocks += [fenced("\n".join([*marks, signature(item)]), "python"), *prose(item)]
    return blocks


def page(package: str, root: Path = ROOT) -> str:
    """Returns the page of a package, '' when it lists no public names."""
    names = public_names(package, root)
    if not names:
        return ""
    about = ast.get_docstring(parse(source_of(package, root))) or ""  # type: ignore[arg-type]
    blocks = [
        "<!-- Made by scripts/docs.py from docstrings; do not edit. -->",
        f"# `{package}`", about, "Back to the [list of packages](README.md).",
        "\n".join(f"- [`{name}`](#{name.lower()})" for name in names),
    ]  # fmt: skip
    for name, module in names.items():
        if (found := define(module, name, root)) is None:
            raise LookupError(f"{package} lists {name}, which {module} does not define")
        path, node = found
        where = path.relative_to(root).as_posix()
        up = "../" * (FOLDER.count("/") + 1)
        blocks += [f"## {name}", f"Defined in [`{where}`]({up}{where}).", *describe(node)]
    return "\n\n".join(blocks) + "\n"


def pages(root: Path = ROOT) -> dict[str, str]:
    """Returns {path of a page: its text} of the whole reference, its index first."""
    found = {package: text for package in PACKAGES if (text := page(package, root))}
    lines = []
    for package in found:
        about = ast.get_docstring(parse(source_of(package, root)))  # type: ignore[arg-type]
        first = about.splitlines()[0] if about else "no description."
        count = len(public_names(package, root))
        names = "1 public name" if count == 1 else f"{count} public names"
        lines.append(f"- [`{package}`]({package}.md): {first} ({names})")
    index = "\n\n".join([
        "<!-- Made by scripts/docs.py from docstrings; do not edit. -->",
        "# API reference",
        "The public names of each package, with their signatures and docstrings. Names that "
        "are not listed here may change at any time, except those that a page of docs/ uses. "
        "`uv run scripts/docs.py` makes these pages anew.",
        "\n".join(lines),
    ])  # fmt: skip
    named = {f"{FOLDER}/{package}.md": text for package, text in found.items()}
    return {f"{FOLDER}/README.md": index + "\n"} | named
