"""Freed memory stays in the process: counted by the kernel's own page faults."""

import platform
import subprocess
import sys

import pytest

from megajax.core.host_memory import keep_freed

# Prints the page faults of allocating, writing and freeing 64 MiB, the second time.
TWICE = """
import resource, sys
from megajax.core.host_memory import keep_freed
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
if sys.argv[1] == "keep":
    assert keep_freed({})
for _ in range(2):
    before = faults()
    block = bytearray(b"x") * 2**26
    del block
    last = faults() - before
print(last)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    def run(how):
        done = subprocess.run(
            [sys.executable, "-c", TWICE, how], check=True, capture_output=True, text=True
        )
        return int(done.stdout)

    assert run("keep") < 100 < run("plain")


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_what_the_user_set_stays(name):
    assert not keep_freed({name: "1"})
