"""How a script starts and ends: help, flags, and an output that nobody reads. No jax import."""

import contextlib
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import app

from megajax.core import help as help_


def start(main: Callable[..., Any]) -> None:
    """Runs main(argv) under absl, after the question for help was answered."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold any character
    with output_may_close():
        help_.answer()
        app.run(main)


@contextlib.contextmanager
def output_may_close() -> Iterator[None]:
    """Ends the script without a traceback when what reads its output (head, less) is gone.

    The exit code is then 141, which is what a shell reports for a program that SIGPIPE ends.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # at the exit Python would report the same error in its own words
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # it was another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
