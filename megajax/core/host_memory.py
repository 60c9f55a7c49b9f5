"""Keeps memory that a process frees, because XLA allocates it again in the next step on a CPU.

On a CPU each call of a compiled program allocates its temporary arrays and frees them. glibc gives
blocks of more than 32 MiB back to the kernel at once, so the next call waits for the kernel to map
and clear each page again: 1 to 5 microseconds for 4 KiB.
"""

import ctypes
import platform
from collections.abc import Mapping

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
KEPT = 2**30  # (chosen) bytes at the end of the heap that may be free without being given back


def keep_freed(env: Mapping[str, str]) -> bool:
    """Tells the C library to keep freed memory of this process, if it is glibc; returns whether.

    The memory that a process holds is then its peak, and more if small blocks lie between large
    free ones; up to KEPT bytes at the heap's end stay. Nothing changes where the user has set the
    C library's own variables.
    """
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in env)
    if is_set or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, KEPT))
