"""Compiles the committed kernel configurations for an H100 that is not there.

    uv run --extra aot scripts/kernel_report.py              # what changed since the last report
    uv run --extra aot scripts/kernel_report.py forward d64  # those whose name has all these words
    uv run --extra aot scripts/kernel_report.py all          # every one, many minutes

Without words a configuration whose sources changed is traced, and compiled if its program changed
too. Writes experiments/results/kernel_report.json after every configuration: registers, spilled
bytes, shared memory, whether ptxas makes wgmma instructions wait (pallas_kernels/aot.py), and two
hashes (pallas_kernels/report.py).
"""

import megajax.core.interrupted  # noqa: F401

import json
import sys
from pathlib import Path

from megajax.core import script
from megajax.monitor import results
from pallas_kernels import report

PATH = Path(__file__).parent.parent / "experiments" / "results" / "kernel_report.json"


def main(argv: list[str]) -> int:
    """Returns 1 when a configuration spills or its wgmma instructions are made to wait."""
    words = argv[1:]
    known: dict[str, list[dict]] = {}
    for row in json.loads(PATH.read_text())["rows"]:
        known.setdefault(row["config"], []).append(row)
    chosen = [
        n for n in report.names() if not words or words == ["all"] or set(words) <= {*n.split()}
    ]
    if not chosen:
        sys.exit(f"error: no configuration is called so; there are {', '.join(report.names())}")
    if not words:
        stale = [n for n in chosen if not _current(known.get(n), "source", report.source_hash(n))]
        chosen = [n for n in stale if not _current(known.get(n), "program", report.program_hash(n))]
        same = set(stale) - set(chosen)
        for row in (row for name in same for row in known[name]):
            row["source"] = report.source_hash(row["config"])
        print(f"{len(same)} configurations have other sources and the same program")
        _write(known)
    faults = []
    for name in chosen:
        known[name] = report.compile_config(name)
        faults += [fault for row in known[name] for fault in report.faults(row)]
        print(*known[name], sep="\n", flush=True)
        _write(known)
    print(f"{len(chosen)} of {len(report.names())} configurations compiled", *faults, sep="\n")
    return bool(faults)


def _current(rows: list[dict] | None, key: str, value: str) -> bool:
    return rows is not None and all(row.get(key) == value for row in rows)


def _write(known: dict[str, list[dict]]) -> None:
    rows = [row for each in report.names() if each in known for row in known[each]]
    results.write(PATH, results.facts("H100, deviceless", "compiled for H100"), rows)


if __name__ == "__main__":
    script.start(main)
