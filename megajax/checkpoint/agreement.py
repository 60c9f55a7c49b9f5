"""What the processes of a job tell one another before they go on together.

Each function is a collective: all processes must call it, in the same order. A process that is
alone needs no device for it, and this module loads jax on first use.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megajax.checkpoint.trust import CheckpointError, DamagedError, ForbiddenError


def tell(values: Any) -> np.ndarray:
    """Returns (processes, *shape) int64: the integers that every process says, by its index.

    values: a number or nested lists of numbers, of one shape on all processes.
    """
    import jax

    numbers = np.array(values, np.int64)
    if jax.process_count() == 1:
        return numbers[None]
    from jax.experimental import multihost_utils

    # As words of 32 bits: devices have no int64 without jax_enable_x64.
    words = multihost_utils.process_allgather(numbers.reshape(-1).view(np.int32))
    return np.asarray(words).view(np.int64).reshape(-1, *numbers.shape)


def first(value: int | None) -> int | None:
    """Returns what process 0 says: a natural number, or None."""
    told = int(tell(-1 if value is None else value)[0])
    return None if told < 0 else told


@contextlib.contextmanager
def together(what: str, explain: Callable[[Exception], CheckpointError]) -> Iterator[None]:
    """Lets all processes come through what is inside, or none, with errors of one kind.

    For what can fail on one process before a collective that all must reach. Inside may be
    collectives that any process reaches only if all do. what: is read, for messages. explain: makes
    an error of this process what it raises.
    Raises: CheckpointError if any process has one of another kind than these two, else
      ForbiddenError if any has one, else DamagedError if any has one.
    """
    problem: CheckpointError | None = None
    try:
        yield
    except Exception as error:
        try:
            problem = explain(error)
        except Exception as second:  # a disk that is lost: the others are waiting to be told
            problem = CheckpointError(f"{what}: {error}; and then {second}")
        problem.__cause__ = error
    kinds = (CheckpointError, DamagedError, ForbiddenError, CheckpointError)
    kind = 0 if problem is None else len(kinds) - 1
    kind = next((i for i in (1, 2) if isinstance(problem, kinds[i])), kind)
    worst = int(tell(kind).max())
    if worst > kind:
        problem = kinds[worst](str(problem or f"{what} failed on another process"))
    if problem is not None:
        raise problem
