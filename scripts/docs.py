"""Checks what the documents mention.

    uv run scripts/docs.py --check    # exit code 1 with one line for each defect

The check fails when README.md, PAPERS.md, LOG.md, a page of docs/ or docs/papers/, or the README.md
of a kernel mentions in backticks, in a command or in a link something that does not exist: a file,
a function of a file, a flag, a heading, a name; when LOG.md lacks a finding of docs/log/; and when
docs/ARCHITECTURE.md lacks a package. No package of the project is imported apart from megajax.core,
and no device is started. mkdocs.yml makes a site of the documents (docs/CONTRIBUTING.md).
"""

import megajax.core.interrupted  # noqa: F401

import sys

from absl import flags
from docs_pages import ROOT, Checker

from megajax.core import config

flags.DEFINE_boolean("check", True, "check the documents, which is all that the script does")


def main() -> int:
    """Returns 1 when something is wrong."""
    defects = Checker(ROOT).check()
    print("\n".join(defects) if defects else "documents: nothing is wrong")
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(config.run(main))
