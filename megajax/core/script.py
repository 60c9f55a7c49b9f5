"""How a script starts and ends: help, flags, and an output that nobody reads. No jax import."""

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags

from megajax.core import help as help_
from megajax.core.errors import did_you_mean

# What absl says of a flag that cannot be parsed, and our words for it.
WORDS = {
    r"invalid literal for int\(\).*": "must be an integer",
    r"could not convert string to float.*": "must be a number",
    r"\('Non-boolean argument to boolean flag'.*": "must be true or false",
    r"^ERROR:+ ": "",
}


def start(main: Callable[..., Any]) -> None:
    """Runs main(argv) under absl, after the question for help was answered."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold any character
    with output_may_close():
        help_.answer()
        app.run(main, flags_parser=parse)


def parse(argv: list[str]) -> list[str]:
    """Returns the words of a command line that are no flags.

    What absl would report with exit code 1 is one sentence and exit code 2 here, as wrong values
    are that a script finds itself.
    """
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        sentence = f"there is no flag --{error.flagname}{suggest(error.flagname)}"
    except flags.Error as error:
        sentence = " ".join(str(error).split()).replace("flag --", "--", 1)
        for python, words in WORDS.items():
            sentence = re.sub(python, words, sentence)
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def suggest(name: str) -> str:
    """Returns '. Did you mean --x?' of the flags of the script, or where they are listed.

    A name that is the last part of some flags means these: steps is train.steps or prune.steps.
    """
    last = sorted(flag for flag in flags.FLAGS if flag.endswith(f".{name}"))
    if last:
        return f". Did you mean {' or '.join(f'--{flag}' for flag in last)}?"
    known = flags.FLAGS
    own = [f for f in known if not str(known.find_module_defining_flag(f)).startswith("absl")]
    near = did_you_mean(name, [*own, "help"]).strip().replace("mean ", "mean --")
    return f". {near}" if near else "; --help lists them"


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
