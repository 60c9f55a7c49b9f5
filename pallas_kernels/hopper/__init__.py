"""The engine under all products for Hopper GPUs: what their kernels share."""

import pathlib

# What makes the kernel of every product, for the hash of its sources.
FILES = tuple(sorted(pathlib.Path(__file__).parent.glob("*.py")))
