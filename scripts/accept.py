"""Checks that a finished nano run learnt what the README promises; exits with 1 when not.

uv run scripts/accept.py RUN_DIR
"""

import megajax.core.interrupted  # noqa: F401

import sys

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.monitor.records import rows_by_step

LARGEST_LOSS = 2.8  # nats a byte, mean of the last 10 steps
LARGEST_BITS = 4.2  # held-out bits a byte


def main(run: str) -> int:
    """Returns the exit code."""
    folder = expand(run)
    train = rows_by_step(folder / "metrics.jsonl", "loss")
    held_out = rows_by_step(folder / "metrics.jsonl", "eval_loss")
    if not train or not held_out:
        raise UserError(f"{run} is not a finished run: its metrics.jsonl lacks losses")
    last = [train[s]["loss"] for s in sorted(train)[-10:]]
    loss = sum(last) / len(last)
    bits = held_out[max(held_out)]["eval_bits_per_byte"]
    seconds = sum(row["step_time_s"] for row in train.values())
    print(
        f"loss {loss:.3f} (at most {LARGEST_LOSS}), held out {bits:.3f} bits per byte (at most "
        f"{LARGEST_BITS}), {seconds:.0f} s in steps"
    )
    sample = list((folder / "samples").glob("*.txt"))
    curve = folder / "curve.png"
    complete = curve.exists() and curve.stat().st_size > 0 and bool(sample)
    return 0 if loss < LARGEST_LOSS and bits <= LARGEST_BITS and complete else 1


if __name__ == "__main__":
    sys.exit(config.run(main, positional=1))
