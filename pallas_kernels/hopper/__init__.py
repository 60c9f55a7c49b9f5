"""The engine under all products for Hopper GPUs."""

import pathlib

_ALL = tuple(sorted(pathlib.Path(__file__).parent.glob("*.py")))
# What makes the kernel of every product, for the hash of its sources; and, of products that
# communicate, what they share besides.
FUSED = tuple(f for f in _ALL if f.name in ("fused.py", "peers.py", "schedule.py"))
FILES = tuple(f for f in _ALL if f not in FUSED)
