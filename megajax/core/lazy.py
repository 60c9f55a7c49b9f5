"""Public names of a package that load their module on first use (pallas_kernels/lazy.py)."""

from pallas_kernels.lazy import public as public
