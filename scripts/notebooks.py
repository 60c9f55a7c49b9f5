"""Executes every notebook of experiments/notebooks in a fresh kernel; fails with the first error.

uv run scripts/notebooks.py            # check
uv run scripts/notebooks.py --write    # and keep the outputs
"""

import megajax.core.interrupted  # noqa: F401

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from absl import flags
from nbclient import NotebookClient

from megajax.core import config

FOLDER = Path(__file__).parent.parent / "experiments" / "notebooks"
MAX_CELLS = 12
WRITE = flags.DEFINE_boolean("write", False, "keep the outputs in the notebooks")


def main() -> None:
    """Runs them one after the other, each in an empty folder."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if len(notebook.cells) > MAX_CELLS:
            raise SystemExit(f"{path.name} has {len(notebook.cells)} cells, at most {MAX_CELLS}")
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}})
            client.execute()
        print(f"{path.name}: {len(notebook.cells)} cells in {time.perf_counter() - began:.0f} s")
        if WRITE.value:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    sys.exit(config.run(main))
