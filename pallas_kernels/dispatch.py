"""Which implementation of a kernel runs, and why not another.

'hopper' is the Mosaic GPU kernel, 'interpret' the same kernel in Pallas' interpreter (tests),
'reference' plain JAX on any device. An explicit choice runs or raises. None takes the kernel where
it can run and says once, in the log, what kept it from running elsewhere.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from absl import logging

Implementation = Literal["hopper", "reference", "interpret"]
CHOICES = (None, "hopper", "reference", "interpret")


def device_reasons() -> tuple[str, ...]:
    """Returns what keeps this process's GPUs from running a Hopper kernel.

    Without any GPU there is no reason: the program may still be compiled for one (`aot.devices`).
    """
    if jax.default_backend() != "gpu":
        return ()
    found = {str(getattr(d, "compute_capability", "unknown")) for d in jax.local_devices()}
    wrong = sorted(found - {"9.0"})
    return tuple(f"needs compute capability 9.0 (Hopper), found {c}" for c in wrong)


def choose(op: str, implementation: str | None, reasons: Sequence[str]) -> str:
    """Returns 'hopper', 'reference', 'interpret', or 'auto': by the platform compiled for.

    Args: op: public name, for messages. reasons: why the kernel cannot take these inputs; empty
      when it can.
    Raises: ValueError for an unknown word; NotImplementedError, with every reason, for an explicit
      choice that cannot run.
    """
    if implementation not in CHOICES:
        raise ValueError(f"{op}: implementation={implementation!r}; there are {CHOICES}")
    if implementation == "reference":
        return "reference"
    if implementation == "interpret":
        _refuse(op, "interpret", reasons)
        return "interpret"
    reasons = (*reasons, *device_reasons())
    if implementation == "hopper":
        _refuse(op, "hopper", reasons)
        return "hopper"
    for reason in reasons:
        _log_once(op, reason)
    return "reference" if reasons else "auto"


def run(choice: str, hopper: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> Any:
    """Calls what `choose` chose; hopper also takes `interpret=`.

    'auto' leaves both in the program, and the platform that it is lowered for takes one.
    """
    if choice == "auto":
        kernel = functools.partial(hopper, interpret=False)
        return jax.lax.platform_dependent(*args, cuda=kernel, default=reference)
    if choice == "reference":
        return reference(*args)
    return hopper(*args, interpret=choice == "interpret")


def _refuse(op: str, implementation: str, reasons: Sequence[str]) -> None:
    if reasons:
        raise NotImplementedError(
            f"{op}: implementation={implementation!r} cannot run here: {'; '.join(reasons)}; "
            "use implementation='reference', or None to let it choose"
        )


@functools.cache
def _log_once(op: str, reason: str) -> None:
    logging.warning("%s runs its reference implementation: %s", op, reason)
