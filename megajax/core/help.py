"""What --help and --helpfull print: the flags of a script by section, those that matter first.

--help describes every flag of a small script. Of a large one it describes the flags that matter
most and names the others; --helpfull describes all, and absl's own flags.

Legend: a row is (flag, type in words, description).
"""

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from absl import flags

WIDTH = 100
FEW = 30  # flags that --help describes one by one (chosen: a screen)
WORDS = ("--help", "-help", "-h", "-?", "--helpshort", "--helpfull", "-helpfull")

Row = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Page:
    """sections: {what its flags begin with: what it is about}; '' holds the script's own flags.
    rows: in the order of the configuration. first: flags that matter most; empty: the script's own.
    """

    sections: Mapping[str, str]
    rows: Sequence[Row]
    first: Sequence[str] = ()

    def section(self, flag: str) -> str:
        """Returns the section of a flag: the longest that it begins with."""
        found = [s for s in self.sections if flag.startswith(f"{s}.")]
        return max(found, key=len, default="")


class Start(flags.Flag):
    """--preset; it knows the page of every preset, because that shows other values."""

    pages: Mapping[str, Callable[[], Page]] = {}

    def page(self, argv: Sequence[str]) -> Page:
        """Returns the page of the preset that a command line starts from."""
        words = zip(argv, [*argv[1:], ""], strict=True)
        given = [
            after if word.lstrip("-") == "preset" else word.partition("=")[2]
            for word, after in words
            if word.startswith("-") and word.lstrip("-").partition("=")[0] == "preset"
        ]
        return self.pages[
            next((w for w in reversed(given) if w in self.pages), str(self.default))
        ]()


def asked(argv: Sequence[str]) -> bool | None:
    """Returns whether the command line asks for all flags; None if it asks for no help."""
    words = list(argv[1:])
    words = words[: words.index("--")] if "--" in words else words
    wanted = [w for w in words if w in WORDS]
    return any(w.endswith("full") for w in wanted) if wanted else None


def answer() -> None:
    """Prints the help that the command line asks for, and ends the program with exit code 0."""
    full = asked(sys.argv)
    if full is not None:
        print(show(full))
        sys.exit(0)


def show(full: bool) -> str:
    """Returns the help of the script that is running. full: of every flag, absl's too."""
    known = flags.FLAGS
    mine = {f.name: f for f in known.get_key_flags_for_module(sys.argv[0])}
    start = mine.get("preset")
    page = start.page(sys.argv) if isinstance(start, Start) else Page({"": ""}, [])
    theirs = [name for name in mine if name not in {row[0] for row in page.rows}]
    rows = [*(_row(mine[name]) for name in theirs), *page.rows]
    page = dataclasses.replace(page, rows=rows, first=page.first and (*page.first, *theirs))
    rest = [_row(known[name]) for name in sorted(known) if name not in mine]
    rest = list(dict.fromkeys(rest))  # a short name is the same flag once more
    return text(sys.modules["__main__"].__doc__ or "", page, rest, full)


def _row(flag: flags.Flag) -> Row:
    value = f"; {flag.default}" if flag.default is not None else ""
    return flag.name, flag.flag_type(), f"{flag.help}{value}"


def text(about: str, page: Page, foreign: Iterable[Row], full: bool) -> str:
    """Returns the help of a script.

    Args: about: its docstring. foreign: absl's own flags, which only --helpfull lists.
    """
    lines = [about.strip(), ""]
    rows = {row[0]: row for row in page.rows}
    first = [f for f in dict.fromkeys(page.first) if f in rows]
    first = first or [f for f in rows if not page.section(f)]
    brief = not full and len(rows) > FEW
    lines += [
        *(["The flags that matter most:" if brief else "Flags:"] if rows else []),
        *map(_line, map(rows.get, first)),
    ]
    for section, what in page.sections.items():
        members = [f for f in rows if page.section(f) == section and f not in first]
        if members:
            title = f"{section or 'others'}: {what}" if what else section or "others"
            lines += ["", textwrap.fill(title, WIDTH)]
            lines += [_names(members)] if brief else map(_line, map(rows.get, members))
    if brief:
        lines += ["", "--helpfull describes them all."]
    if full:
        lines += ["", "absl:", *map(_line, foreign)]
    return "\n".join(lines)


def _line(row: Row | None) -> str:
    assert row is not None
    flag, kind, what = row
    return textwrap.fill(
        f"--{flag}: {what} ({kind})", WIDTH, initial_indent="  ", subsequent_indent="      ",
        break_on_hyphens=False,
    )  # fmt: skip


def _names(flags: Iterable[str]) -> str:
    return textwrap.fill(
        " ".join(f"--{flag}" for flag in flags), WIDTH, initial_indent="  ", subsequent_indent="  ",
        break_on_hyphens=False,
    )  # fmt: skip
