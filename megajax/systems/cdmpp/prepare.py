"""Draws and compiles a batch of programs that are to be timed on a GPU, several at a time.

XLA's autotuning runs variants of matrix products on the GPU while it compiles them. So a whole
batch is compiled before any program of it is timed. If other processes time programs on the same
GPU at that moment, autotuning must be turned off, and the input arrays must be drawn on the host. A
program that cannot be drawn, compiled or run is left out, so that an operation that the GPU does
not support costs only the programs that contain it.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import jax

from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.profile import Ready, ready

Tell = Callable[[str], None]
_Pair = tuple[Program, Ready]


def prepared(
    draw: Callable[[int], Program],
    numbers: Sequence[int],
    *,
    threads: int = 1,
    end: float = math.inf,
    host: jax.Device | None = None,
    tell: Tell = print,
) -> tuple[list[_Pair], int]:
    """Returns (programs that compiled, count of the numbers that were tried).

    Args: draw: makes the program of a number. threads: programs that compile at a time. end: time
        of the monotonic clock, in seconds, after which no further program is begun. host: where
        the arrays are drawn; None: on the device that runs the programs.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_compiled, draw, number, host, tell) for number in numbers]
        wait(futures, max(end - time.monotonic(), 0) if end < math.inf else None)
        late = [future for future in reversed(futures) if future.cancel()]
    begun = futures[: len(futures) - len(late)]  # the pool begins them in their order
    found = [future.result() for future in begun]
    return [pair for pair in found if pair is not None], len(begun)


def runnable(
    programs: Sequence[_Pair], tell: Tell = print, *, device: jax.Device | None = None
) -> list[_Pair]:
    """Runs each program once; returns those that do not fail.

    device: takes the arrays of the programs returned, which were drawn elsewhere.
    """
    found = []
    for program, compiled in programs:
        try:
            if device is not None:
                args = jax.device_put(program.args, device)
                program, compiled = dataclasses.replace(program, args=args), compiled.on(args)
            compiled.call()
        except Exception as error:
            tell(_line(program.number, program.family, "did not run", error))
        else:
            found.append((program, compiled))
    return found


def _compiled(
    draw: Callable[[int], Program], number: int, host: jax.Device | None, tell: Tell
) -> _Pair | None:
    family = ""
    try:
        with jax.default_device(host):
            program = draw(number)
        family = program.family
        found = ready(program)
        _ = found.records, found.text  # read here, while other programs compile
    except Exception as error:
        tell(_line(number, family, "did not compile", error))
        return None
    return program, found


def _line(number: int, family: str, what: str, error: BaseException) -> str:
    said = str(error).strip().splitlines() or [""]
    of = f" ({family})" if family else ""
    return f"program {number}{of} {what}: {type(error).__name__}: {said[0][:300]}"
