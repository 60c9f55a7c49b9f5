"""Hook of MkDocs (mkdocs.yml): what the site has besides docs/, and where its links lead.

    uv run --group docs mkdocs serve

The pages of docs/ and the documents outside of it are written for the repository, with relative
links between files. In the site, README.md is the first page, PAPERS.md and LOG.md lie beside it,
the README.md of a kernel folder is kernels/NAME.md, and docs/api.md leads to one page for each
package, which mkdocstrings fills from docstrings. Links to these files and to pictures are
rewritten. A link to another file of the repository becomes the file's name, because the repository
has no public address. `described` prepares a docstring for mkdocstrings (docs_griffe.py calls it).

Nothing that a reader's browser loads may come from another host: `on_post_build` warns, and a
warning ends `mkdocs build --strict`.
"""

import logging
import posixpath
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import docs_pages
from docs_pages import ROOT

LOG = logging.getLogger("mkdocs.docs_site")
OUTSIDE = {"README.md": "index.md", "PAPERS.md": "PAPERS.md", "LOG.md": "LOG.md"}
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.(?:svg|png))\)")
LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def pages(root: Path = ROOT) -> dict[str, str]:
    """Returns {a file of the repository: its place in the site}, of documents and packages."""
    placed = {name: place for name, place in OUTSIDE.items() if (root / name).exists()}
    for path in sorted(root.glob("docs/**/*.md")):
        name = path.relative_to(root).as_posix()
        placed[name] = name.removeprefix("docs/")
    for path in sorted(root.glob("pallas_kernels/*/README.md")):
        placed[path.relative_to(root).as_posix()] = f"kernels/{path.parent.name}.md"
    for package, file in docs_pages.api_packages(root).items():
        placed[file] = f"api/{package}.md"
    return placed


def pictures(placed: Collection[str], root: Path = ROOT) -> dict[str, str]:
    """Returns {a picture that documents show: its place in the site}, of those outside of docs/."""
    shown = set()
    for name in placed:
        if name.endswith(".md"):
            for target in PICTURE.findall((root / name).read_text()):
                shown.add(posixpath.normpath(posixpath.join(posixpath.dirname(name), target)))
    return {name: name for name in sorted(shown) if not name.startswith("docs/")}


def relinked(text: str, name: str, placed: dict[str, str], root: Path = ROOT) -> str:
    """Returns the text of a document with the links that the site needs.

    name: of the document in the repository. placed: {file of the repository: place in the site}.
    Links to files that do not exist stay as they are, and MkDocs warns of them.
    """
    base = posixpath.dirname(placed[name])

    def replace(match: re.Match) -> str:
        picture, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if file in placed:
            place = posixpath.relpath(placed[file], base or ".")
            return f"{picture}[{label}]({place}{hash_}{anchor})"
        if not (root / file).exists():
            return match[0]
        if label.strip("`") in (file, posixpath.basename(file)):
            return f"`{label.strip('`')}`"
        return f"{label} (`{file}`)"

    parts = FENCE.split(text)
    # "[a] [b]" would be a reference to b.
    parts[::2] = (LINK.sub(replace, part).replace("] [", "] \\[") for part in parts[::2])
    return "".join(parts)


def api_page(package: str, root: Path = ROOT) -> str:
    """Returns the page of a package: a directive of mkdocstrings for each public name."""
    about = docs_pages.docstring(package, root)
    lines = [f"# {package}", about]
    for name, module in docs_pages.public_names(package, root).items():
        if (defined := docs_pages.define(module, name, root)) is None:
            raise LookupError(f"{package} lists {name}, which {module} does not define")
        path, node = defined
        place = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if other := _documented(place, name, package, root):
            lines += [f"## {name}", f"Described on the page of {other}: [{name}][{place}.{name}]."]
            continue
        lines.append(f"::: {place}.{name}\n    options:\n      members: {_members(node)}")
    return "\n\n".join(lines) + "\n"


def _documented(place: str, name: str, package: str, root: Path) -> str:
    """Returns the package whose page describes a name of another package's module, else ''.

    That is the package of the module, if it lists the name too: each name is described once.
    """
    near = [p for p in docs_pages.api_packages(root) if place.startswith(f"{p}.")]
    other = max(near, key=len, default=package)
    return other if other != package and name in docs_pages.public_names(other, root) else ""


def _members(node: docs_pages.Definition) -> list[str] | bool:
    """The methods of a class that are shown. Fields stand in a table of the class' docstring."""
    methods = [n for n in getattr(node, "body", ()) if type(n).__name__ == "FunctionDef"]
    return [m.name for m in methods if not m.name.startswith("_") or m.name == "__call__"] or False


def described(text: str, parameters: Collection[str], fields: Collection[str] = ()) -> str:
    """Returns a docstring of this project in the style that griffe's parser `google` reads.

    `name: text` at the beginning of a line, or behind the end of a sentence, describes a name of
    `parameters` or of `fields`, and all that follows in its paragraph describes such names, too.
    Returns, Raises, Warns and Source become paragraphs.
    """
    names = "|".join(sorted(map(re.escape, {*parameters, *fields}), key=len, reverse=True)) or "$^"
    call = r"(?:\([^\n]*?\))?"
    entry = re.compile(
        rf"(?:^[ ]*(?:Args:|Attributes:)?\s*|(?<=[.;:,] ))((?:{names}){call}(?:, (?:{names}))*):\s"
        r"|(?:^[ ]*|(?<=[.;] ))(Returns|Raises|Warns|Source):\s|^[ ]*(?:Args|Attributes):\s",
        re.MULTILINE,
    )
    plain, entries, notes = [], {}, []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        matches = list(entry.finditer(paragraph))
        before = paragraph[: matches[0].start()] if matches else paragraph
        if before.strip():
            plain.append(before.rstrip())
        for at, match in enumerate(matches):
            end = matches[at + 1].start() if at + 1 < len(matches) else len(paragraph)
            body = " ".join(paragraph[match.end() : end].split()).rstrip(";")
            if match[2]:
                notes.append((match[2], body))
            elif match[1]:
                for name in re.sub(r"\(.*\)", "", match[1]).split(", "):
                    entries[name] = body
            elif body:
                plain.append(body)
    return "\n\n".join([*plain, *_sections(entries, fields), *map(_note, notes)])


def _sections(entries: dict[str, str], fields: Collection[str]) -> Iterator[str]:
    """Yields the sections Attributes and Args of a docstring."""
    for title, is_field in (("Attributes", True), ("Args", False)):
        lines = [f"    {n}: {body}" for n, body in entries.items() if (n in fields) == is_field]
        if lines:
            yield "\n".join([f"{title}:", *lines])


def _note(note: tuple[str, str]) -> str:
    """A paragraph about results, errors, warnings or the source; an error's name is code."""
    kind, body = note
    if kind == "Raises":
        body = re.sub(r"\b([A-Z]\w+(?:Error|Exception|Interrupt))\b", r"`\1`", body)
    return f"**{kind}:** {body}"


# ---- events of MkDocs


def on_config(config: Any) -> Any:
    """Gives headings the anchors that GitHub gives them, and expands patterns in `nav`."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, _: docs_pages.slug(text)
    places = sorted(pages().values())

    def expand(entry: Any) -> list:
        if isinstance(entry, dict):
            return [{title: _flat(map(expand, each)) if isinstance(each, list) else each
                     for title, each in entry.items()}]  # fmt: skip
        if not entry.endswith("/*"):
            return [entry]
        return [p for p in places if posixpath.dirname(p) == entry[:-2]]

    config.nav = _flat(map(expand, config.nav))
    return config


def _flat(lists: Iterator[list]) -> list:
    """Returns the lists' members as one list."""
    return [each for one in lists for each in one]


def on_files(files: Any, config: Any) -> Any:
    """Adds the documents and the pictures outside of docs/, and a page for each package."""
    from mkdocs.structure.files import File

    placed = pages()
    for name, place in (placed | pictures(placed)).items():
        if name.endswith(".py"):
            package = place.removeprefix("api/").removesuffix(".md")
            files.append(File.generated(config, place, content=api_page(package)))
        elif not name.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites the links of a page."""
    placed = pages()
    names = {place: name for name, place in placed.items()}
    name = names[page.file.src_uri]
    return markdown if name.endswith(".py") else relinked(markdown, name, placed | pictures(placed))


def on_post_build(config: Any) -> None:
    """Warns of pages that load a script, a style or a picture from another host."""
    tag = r"<(?:script|img|iframe|source|link)\b[^>]*"
    loads = {
        "*.html": re.compile(rf"{tag}\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"),
        "*.css": re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^);]*"),
    }
    for pattern, load in loads.items():
        for path in sorted(Path(config.site_dir).rglob(pattern)):
            for match in load.finditer(path.read_text()):
                LOG.warning("%s loads from another host: %s", path.name, match[0])
