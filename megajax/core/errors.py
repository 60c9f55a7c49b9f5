"""The one exception that means: the user can fix this, and the message says how.

Every boundary (flags, files, meshes, checkpoints) raises it with what was given, the rule, the
nearest legal value and the flag. `core.config.run` prints it without a traceback and exits with the
error's code: 2, which launchers do not retry, 75 for what may work the next time, or 76 where a
newer start of the same job has taken its place.
"""

import difflib
import errno
import math
import re
from collections.abc import Collection, Iterable

TEMPORARY = 75  # exit code of what may work the next time: nothing is wrong with the command
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk has no room
SUPERSEDED = 76  # exit code of a process whose place another has taken: no fault, not to be retried


class UserError(ValueError):
    """Bad input, explained. A ValueError, so that library callers need not know this class."""

    exit_code = 2


class TemporaryError(UserError):
    """What a later start of the same command may not meet: a full disk, a peer that is late."""

    exit_code = TEMPORARY


def unwritable(message: str, error: OSError) -> UserError:
    """Returns the error of a place that cannot be written; a full disk is a temporary one."""
    return (TemporaryError if error.errno in FULL else UserError)(message)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean x?' for the nearest known word, or '' when none is near."""
    spelled = {str(k).lower(): str(k) for k in known}
    near = difflib.get_close_matches(str(word).lower(), spelled, n=1)
    return f" Did you mean {spelled[near[0]]}?" if near else ""


def nearest_multiples(value: int, factor: int) -> str:
    """Returns the legal neighbours of `value`, e.g. 'nearest: 64, 128' for (100, 64)."""
    low = value // factor * factor
    return f"nearest: {low}, {low + factor}" if low > 0 else f"nearest: {factor}"


def divisors(value: int) -> list[int]:
    """Returns the divisors of a number, ascending; of 0 none. Takes time like its square root."""
    low = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return low + [value // d for d in reversed(low) if d * d != value]


def nearest_divisors(value: int, target: int) -> str:
    """Returns the divisors of `value` around `target`, e.g. 'nearest: 4, 6' for (12, 5)."""
    all_divisors = divisors(value)
    below = [d for d in all_divisors if d < target][-1:]
    above = [d for d in all_divisors if d > target][:1]
    return "nearest: " + ", ".join(str(d) for d in below + above)


def respell(message: str, flags: Collection[str]) -> str:
    """Returns a message of the library with the flags of the script that shows it.

    The library calls a member by its place in a training run (--train.steps). The script's own flag
    is that one, the only one that ends so (--run.train.steps), or the last word (--steps). Flags
    that the script does not have are left out of the list at the end.
    """

    def script_flag(flag: str) -> str | None:
        longer = [f for f in flags if f.endswith(f".{flag}")]
        last = flag.rpartition(".")[2]
        if flag in flags:
            return flag
        return longer[0] if len(longer) == 1 else last if last in flags else None

    body, opening, listed = message.rpartition(" (--")
    if opening and listed.endswith(")"):
        pairs = [word.removeprefix("--") for word in listed[:-1].split(", ")]
        spelled = [(script_flag(re.split("[= ]", p)[0]), p) for p in pairs]
        shown = [f"--{flag}{p[len(re.split('[= ]', p)[0]) :]}" for flag, p in spelled if flag]
        message = f"{body} ({', '.join(shown)})" if shown else body
    message = re.sub(
        r"(?<=--)[a-z_]+(?:\.[a-z_0-9]+)*", lambda m: script_flag(m[0]) or m[0], message
    )
    return re.sub(r"^[a-z_]+(?:\.[a-z_0-9]+)+(?==)", lambda m: script_flag(m[0]) or m[0], message)
