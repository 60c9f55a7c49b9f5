"""Checks of the arguments of public functions.

They raise a ValueError at the boundary, before anything is traced. It names the function, the
argument and its value, the rule, and what to write instead.
"""

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INT32 = jnp.iinfo(jnp.int32)
# Of float32, which flushes smaller numbers to 0.
TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_arrays(op: str, needed: Sequence[str] = (), **arrays: Any) -> None:
    """Refuses what has no shape and type. needed: names that may not be None; of others, None is
    left to the caller.

    Raises: ValueError.
    """
    for name, x in arrays.items():
        if (x is not None or name in needed) and not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise ValueError(
                f"{op}: {name} must be a jax or NumPy array, got {type(x).__name__}; write "
                f"jnp.asarray({name}, dtype)"
            )


def concrete(x: Any) -> np.ndarray | None:
    """Returns the values where they are known, None where they are traced."""
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def integers(op: str, name: str, values: Any, *, ndim: int) -> jax.Array | np.ndarray:
    """Returns int32: NumPy's of a list or of any NumPy integers, else the int32 jax array given.

    Raises: ValueError for other types, another rank, and values that int32 cannot hold.
    """
    if isinstance(values, Sequence):
        check_numbers(op, name, values)
        values = np.asarray(values) if len(values) else np.zeros(0, np.int32)
    check_arrays(op, **{name: values})
    if values.ndim != ndim or not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(
            f"{op}: {name} {values.dtype}{values.shape} must be integers with {ndim} dimension"
            f"{'s' if ndim > 1 else ''}"
        )
    if isinstance(values, np.ndarray):
        if values.size and not INT32.min <= values.min() <= values.max() <= INT32.max:
            raise ValueError(
                f"{op}: {name} holds {values.min()} to {values.max()}, which int32 cannot"
            )
        return values.astype(np.int32)
    if values.dtype != jnp.int32:
        raise ValueError(
            f"{op}: {name} must be int32, got {values.dtype}; write {name}.astype(jnp.int32)"
        )
    return values


def check_numbers(op: str, name: str, values: Any) -> None:
    """Refuses lists that are no array of numbers.

    Raises: ValueError.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, jax.errors.TracerArrayConversionError):
        array = np.asarray(None)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{op}: {name} must be numbers, got {values!r}; or give a jax array")


def integer(op: str, name: str, value: Any, least: int) -> int:
    """Returns a static integer of at least `least`.

    Raises: ValueError.
    """
    try:
        number = operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{op}: {name}={value!r} must be an integer of at least {least}")
    if number < least:
        raise ValueError(f"{op}: {name}={number} must be at least {least}")
    return number


def positive(op: str, name: str, value: Any, otherwise: str) -> float:
    """Returns a static number above 0, in float32 too, in which kernels take it.

    Raises: ValueError.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{op}: {name} must be known when the function is traced, got {value}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not TINY <= number <= HUGE:
        raise ValueError(
            f"{op}: {name}={value!r} must be a finite number above 0 (float32, at least "
            f"{TINY:.1e}), or {otherwise}"
        )
    return number


def dtype_name(op: str, name: str, value: Any, known: Sequence[str]) -> str:
    """Returns the name of a type that is one of `known`.

    Raises: ValueError.
    """
    try:
        dtype = str(jnp.dtype(value).name)
    except TypeError:
        dtype = ""  # not the name of any type
    if dtype not in known:
        raise ValueError(f"{op}: {name}={value!r} must be one of {', '.join(known)}")
    return dtype


@contextlib.contextmanager
def reverse_only(op: str) -> Iterator[None]:
    """Replaces JAX's error for forward mode, which custom rules do not have, by a clearer one.

    Raises: TypeError, as JAX does.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"{op} has gradients (jax.grad, jax.vjp, jax.jacrev) and no forward mode (jax.jvp, "
            "jax.jacfwd, jax.linearize): its backward pass is a rule of its own"
        ) from error
