"""Executes every notebook of experiments/notebooks in a fresh kernel; fails with the first error.

    uv run scripts/notebooks.py [NAME ...]           # check
    uv run scripts/notebooks.py --write [NAME ...]   # and keep the outputs

The outputs are committed, so that a notebook can be read without running it. The check fails when a
cell raises or when the outputs are large. It says, and with --strict fails, when a cell prints a
warning and when what it printed has other words than the outputs in the file. Numbers may differ:
many are times. Of a cell with the tag `varies` (a sample of a model) only the kinds of output are
compared.
"""

import megajax.core.interrupted  # noqa: F401

import base64
import io
import itertools
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from absl import flags
from nbclient import NotebookClient
from PIL import Image
from traitlets.config import Config

from megajax.core import config

FOLDER = Path(__file__).parent.parent / "experiments" / "notebooks"
MAX_CELLS = 12
MAX_BYTES = 400_000  # of a file with its outputs (chosen: pictures of a few dozen kilobytes each)
VARIES = "varies"
STRICT = flags.DEFINE_boolean("strict", False, "fail too when outputs differ or a cell warns")
WRITE = flags.DEFINE_boolean("write", False, "keep the outputs in the notebooks")


def execute(notebook: nbformat.NotebookNode) -> None:
    """Runs the cells in an empty folder and a fresh kernel; their outputs replace the old."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as sockets:
        # Socket files instead of TCP ports, of which ipykernel warns: others could read along. The
        # path is absolute, because the kernel works in another folder.
        ipc = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        client = NotebookClient(
            notebook,
            timeout=900,
            startup_timeout=300,
            record_timing=False,
            config=ipc,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute()


def words(cell: nbformat.NotebookNode) -> list[str]:
    """Returns what a cell printed, without numbers and breaks, and the kinds of its pictures. A
    kernel sends the lines of one cell in one message or in several, so they are joined."""
    kinds, texts = [], []
    for output in cell.outputs:
        text = output.get("text", "")
        if output.output_type in ("execute_result", "display_data"):
            pictures = sorted(kind for kind in output.data if kind != "text/plain")
            text = output.data.get("text/plain", "") if not pictures else ""
            kinds += pictures
        texts.append(text)
    if VARIES in cell.metadata.get("tags", ()):
        return kinds
    numberless = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", " ".join(texts))
    return [*kinds, " ".join(numberless.split())]


def shrink(notebook: nbformat.NotebookNode) -> None:
    """Gives every picture a palette of 64 colours, which makes its file several times smaller."""
    for output in (o for cell in notebook.cells for o in cell.get("outputs", ())):
        if png := output.get("data", {}).get("image/png"):
            picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
            picture.quantize(64, dither=Image.Dither.NONE).save(file := io.BytesIO(), "PNG")
            output.data["image/png"] = base64.b64encode(file.getvalue()).decode() + "\n"


def defects(old: nbformat.NotebookNode, new: nbformat.NotebookNode) -> list[str]:
    """Returns one line for each cell that warns, or whose outputs are not those of the file."""
    bad = []
    codes = [[c for c in n.cells if c.cell_type == "code"] for n in (old, new)]
    for at, (before, after) in enumerate(zip(*codes, strict=True), 1):
        warned = [o.text for o in after.outputs if o.get("name") == "stderr"]
        bad += [f"code cell {at} warns: {text.strip()}" for text in warned]
        for was, now in itertools.zip_longest(words(before), words(after), fillvalue="nothing"):
            if was != now:
                bad.append(
                    f"code cell {at}: the file has\n    {was.strip()}\n  the cell gave\n"
                    f"    {now.strip()}\n  uv run scripts/notebooks.py --write"
                )
    return bad


def main(*names: str) -> int:
    """Runs them one after the other; returns 1 when something is wrong."""
    wrong = 0
    for name in names or sorted(path.name for path in FOLDER.glob("*.ipynb")):
        path = (FOLDER / name).with_suffix(".ipynb")
        old = nbformat.read(path, as_version=4)
        if len(old.cells) > MAX_CELLS:
            raise SystemExit(f"{path.name} has {len(old.cells)} cells, at most {MAX_CELLS}")
        new = nbformat.from_dict(old)
        began = time.perf_counter()
        execute(new)
        print(f"{path.name}: {len(new.cells)} cells in {time.perf_counter() - began:.0f} s")
        found = defects(new if WRITE.value else old, new)
        print("\n".join(f"{path.name}: {line}" for line in found), end="\n" if found else "")
        wrong += len(found) * STRICT.value
        shrink(new)
        if (size := len(nbformat.writes(new).encode())) > MAX_BYTES:
            print(f"{path.name}: {size:,} bytes with its outputs, at most {MAX_BYTES:,}")
            wrong += 1
        if WRITE.value:
            nbformat.write(new, path)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(config.run(main, optional=len(sys.argv)))
