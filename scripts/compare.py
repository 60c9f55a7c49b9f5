"""Compares runs: what differs in their configurations, their losses, speeds and curves.

    uv run scripts/compare.py RUN OTHER
    uv run scripts/compare.py runs/pretrain/* --out=runs/compare

Prints one table and writes OUT/compare.png, compare.svg and compare.json. The last loss is the mean
of the last 10 steps. Runs that have not ended are compared as far as they are.
"""

import megajax.core.interrupted  # noqa: F401

import shutil
import sys
from dataclasses import dataclass

from megajax.core import config
from megajax.core.config import Checked
from megajax.core.errors import UserError
from megajax.monitor import results
from megajax.monitor.results import out_option
from megajax.training import compare


@dataclass(frozen=True)
class Config(Checked):
    """The folder of the plot."""

    out: str = out_option("compare")


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def main(*folders: str) -> int:
    """Prints the table and draws the curves."""
    cfg, _ = config.from_flags(PRESETS)
    if len(folders) > compare.MAX_RUNS:
        raise UserError(f"{len(folders)} runs are too many; at most {compare.MAX_RUNS}")
    runs = [compare.read(folder) for folder in folders]
    rows = compare.rows(runs)
    out = results.writable_folder(cfg.out)
    print(table(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    about = results.facts(f"{len(runs)} runs", "read from metrics.jsonl")
    results.write(out / "compare.json", about, rows)
    compare.draw(runs, out / "compare")
    print(f"see {out}/compare.png, .svg and .json")
    return 0


def table(rows: list[dict], width: int | None) -> str:
    """Returns the rows in columns; what a terminal has no room for stands below, a block a run."""
    changed = [name for name in rows[0] if name not in (*compare.COLUMNS.values(), "run")]
    figures = {"run": "run", **compare.COLUMNS}
    text = results.columns(rows, {**figures, **{name: name for name in changed}})
    if width is None or max(map(len, text.splitlines())) <= width:
        return text
    few = {head: member for head, member in figures.items() if head != "best held out"}
    lines = [results.columns(rows, few)]
    if changed:
        lines.append("differences:")
    for name in changed:
        lines.append(f"  {name}: {', '.join(str(row[name]) for row in rows)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(config.run(main, positional=1, optional=10**6))
