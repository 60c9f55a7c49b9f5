"""Makes the API reference in docs/api from docstrings, and checks what the documents mention.

    uv run scripts/docs.py            # write docs/api/*.md
    uv run scripts/docs.py --check    # write nothing; exit code 1 with one line for each defect

The check fails when a page of the reference is not what the docstrings say now, and when README.md,
PAPERS.md, a page of docs/ or the README.md of a kernel mentions in backticks, in a command or in a
link something that does not exist: a file, a function of a file, a flag, a heading, a name.
No package of the project is imported apart from megajax.core, and no device is started.
"""

import megajax.core.interrupted  # noqa: F401

import sys

from absl import flags
from docs_pages import FOLDER, ROOT, Checker, pages

from megajax.core import config

CHECK = flags.DEFINE_boolean("check", False, "write nothing; exit code 1: something is wrong")


def stale(wanted: dict[str, str]) -> list[str]:
    """Returns the pages of the reference that are missing, different or too many."""
    there = {p.relative_to(ROOT).as_posix() for p in (ROOT / FOLDER).glob("*.md")}
    differ = [n for n, t in wanted.items() if n not in there or (ROOT / n).read_text() != t]
    return sorted({*differ, *(there - set(wanted))})


def main() -> int:
    """Returns 1 when --check finds something."""
    wanted = pages()
    old = stale(wanted)
    if not CHECK.value:
        for name in old:
            path = ROOT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[name]) if name in wanted else path.unlink()
        print(f"written: {', '.join(old) or 'none'}")
        return 0
    found = [f"{name}: differs from the docstrings; run scripts/docs.py" for name in old]
    found += Checker(ROOT).check()
    print("\n".join(found) if found else "documents: nothing is wrong")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(config.run(main))
