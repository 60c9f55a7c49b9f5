"""Compiles the committed kernel configurations for an H100 that is not there.

    uv run --extra aot scripts/kernel_report.py              # what changed since the last report
    uv run --extra aot scripts/kernel_report.py forward d64  # those whose name has all these words
    uv run --extra aot scripts/kernel_report.py all          # every one, many minutes

Writes experiments/results/kernel_report.json after every configuration: registers, spilled bytes,
shared memory, serialised wgmma, and a hash of the sources (pallas_kernels/report.py).
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
    """Returns 1 when a configuration spills or is serialised."""
    words = argv[1:]
    known = {row["config"]: [] for row in json.loads(PATH.read_text())["rows"]}
    for row in json.loads(PATH.read_text())["rows"]:
        known[row["config"]].append(row)
    chosen = [
        name
        for name in report.names()
        if words == ["all"]
        or (words and set(words) <= set(name.split()))
        or (
            not words
            and (name not in known or known[name][0]["source"] != report.source_hash(name))
        )
    ]
    if words and not chosen:
        sys.exit(f"error: no configuration is called so; there are {', '.join(report.names())}")
    faults = []
    for name in chosen:
        known[name] = report.compile_config(name)
        faults += [fault for row in known[name] for fault in report.faults(row)]
        print(*known[name], sep="\n", flush=True)
        rows = [row for each in report.names() if each in known for row in known[each]]
        results.write(PATH, results.facts("H100, deviceless", "compiled for H100"), rows)
    print(f"{len(chosen)} of {len(report.names())} configurations compiled", *faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    script.start(main)
