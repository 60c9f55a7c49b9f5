"""The Markdown table of what experiments/bytecheckpoint.py writes, for the documents."""

import json
from pathlib import Path

from megajax.monitor.results import table


def seconds(path: Path) -> str:
    """What saves and loads cost, and the plan for many ranks."""
    columns = {
        "what": "what", "how": "how", "median s": "median_s", "p10": "p10_s", "p90": "p90_s",
        "n": "runs", "GB/s": "gb_per_s", "times the machine's own": "times_the_machine",
    }  # fmt: skip
    found = json.loads(path.read_text())
    (plan,) = (row for row in found["rows"] if row["what"] == "plan")
    text = (
        f"{found['megabytes']:.0f} MB of float32, {found['cores']} cores. A plan for a "
        f"405B model's state on {plan['how']} takes {plan['plan_s']:.1f} s, again "
        f"{1e3 * plan['plan_again_s']:.2g} ms; imbalance {plan['imbalance']:.3f}, "
        f"{plan['gb_per_rank']:.2f} GB a rank."
    )
    kinds = [table(path, columns, what=what) for what in ("stall", "whole", "load")]
    head, source = kinds[0].rsplit("\n\n", 1)
    rows = [line for kind in kinds[1:] for line in kind.splitlines()[2:-2]]
    return "\n".join([text, "", head, *rows, "", source])
