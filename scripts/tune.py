"""Times every tile of the kernels on this GPU and keeps the fastest, for all who have its kind.

    PYTHONPATH=. python3 scripts/tune.py                     # what this GPU's table lacks
    PYTHONPATH=. python3 scripts/tune.py attention forward   # those with all these words
    PYTHONPATH=. python3 scripts/tune.py --again --minutes=8
    PYTHONPATH=. python3 scripts/tune.py --rehearse --out=runs/tune   # on a CPU, one tiny tile

Each key of the table is a process of its own (gpu_session), with a limit for every
candidate, and the keys that matter most come first. Rows go into DEVICE.json in --out as they come,
so a run may be cut off and called again; DEVICE_verdicts.json says what failed, and candidates that
hung are left out from then on. The kernels read tables in pallas_kernels/tuned, which is where they
go if neither --out nor $OUT names a folder. Needs jax with CUDA and absl only.
"""

import megajax.core.interrupted  # noqa: F401

import os
import subprocess
import sys

import gpu_check

from megajax.core import script
from scripts.gpu_session.session import Part

FIRST = Part("device", "kernels", {"do": "device"})
LIST_S = 300  # that listing the tunings may take


def names(words: list[str]) -> list[str]:
    """Returns tunings with all words, the most valuable first. Raises: SystemExit if none."""
    if set(words) <= {"first"}:
        first = list(gpu_check.TUNE_FIRST)
        return first if words else [*first, *(n for n in listed([]) if n not in first)]
    tunings = listed(words)
    if not tunings:
        sys.exit("error: nothing has these words; there are\n" + "\n".join(listed([])))
    return sorted(tunings, key=lambda name: name not in gpu_check.TUNE_FIRST)


def listed(words: list[str]) -> list[str]:
    """Returns the names of tunings that have all words, from a process that may import jax."""
    command = [sys.executable, str(gpu_check.ROOT / "scripts" / "gpu_session" / "tune.py"), *words]
    environment = gpu_check.environment(rehearsal=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIST_S, env=environment)
    if done.returncode:
        sys.exit(f"error: the tunings cannot be listed:\n{done.stderr[-2000:]}")
    return done.stdout.split("\n")[:-1]


def main(argv: list[str]) -> int:
    """Returns 1 when a tuning failed."""
    rehearsal = gpu_check.REHEARSE.value
    if not rehearsal:
        gpu_check.need_driver()
    chosen = ["tiny"] if rehearsal else names(argv[1:])
    folder = os.environ.get("OUT", str(gpu_check.ROOT / "pallas_kernels" / "tuned"))
    return gpu_check.run(FIRST, [gpu_check.tuning(name) for name in chosen], folder)


if __name__ == "__main__":
    script.start(main)
