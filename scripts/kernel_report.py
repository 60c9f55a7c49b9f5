"""Compiles every committed kernel configuration for an H100 that is not there.

    uv run --extra aot scripts/kernel_report.py            # all, minutes
    uv run --extra aot scripts/kernel_report.py forward    # those whose name contains a word

Writes experiments/results/kernel_report.json: registers, spilled bytes, shared memory, serialised
wgmma, beside a hash of the sources. tests/pallas_kernels/test_report.py holds it to the rules.
"""

import sys
from pathlib import Path

from absl import app

from megajax.monitor import results
from pallas_kernels.attention import configs

PATH = Path(__file__).parent.parent / "experiments" / "results" / "kernel_report.json"


def main(argv: list[str]) -> None:
    """Writes after every row."""
    rows = []
    for name in configs.CONFIGS:
        if argv[1:] and not any(word in name for word in argv[1:]):
            continue
        rows += configs.report(name)
        print(rows[-1], flush=True)
    if not rows:
        sys.exit(f"error: no configuration is called so; there are {', '.join(configs.CONFIGS)}")
    if not argv[1:]:
        about = results.facts("H100, deviceless", "compiled for H100")
        results.write(PATH, about | {"source": configs.source_hash()}, rows)


if __name__ == "__main__":
    app.run(main)
