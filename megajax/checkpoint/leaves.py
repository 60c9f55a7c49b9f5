"""What a save accepts, and how it is stored: names, types, random keys, arrays of the host.

A tree that could not be restored is refused before anything is written. Storage has types for
numbers only, so typed random keys (jax.random.key) are stored as the uint32 words of their
`key_data`; a restore makes keys of them again when `like` holds keys. The implementation of a key
is not stored: `like` must have the one that was saved.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.integrity import Record
from megajax.checkpoint.store import CheckpointError
from megajax.core.boxes import stored_rows
from megajax.core.errors import did_you_mean
from megajax.core.tree import Tree, named_leaves

# What zarr3 of tensorstore 0.1 has a type for (tried, one by one).
NUMBERS = (
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "bfloat16 complex64 complex128 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()

# {leaf: the row of the model at each place of its first dimension}, of leaves in another order.
Order = Mapping[str, Sequence[int]]

NUMBER: Any = (bool, int, float, complex, np.generic)  # a leaf of the host without dimensions


def check(state: Tree) -> None:
    """Raises CheckpointError, which names the leaf, for a tree that could not be restored."""
    leaves = named_leaves(state)
    if not leaves:
        raise CheckpointError("the state holds no array, so there is nothing to save")
    seen: set[str] = set()
    for name, x in leaves:
        if name in seen:
            raise CheckpointError(
                f"two leaves are named {name}: names are the keys with dots between; rename one"
            )
        seen.add(name)
        if not _is_text(name):
            raise CheckpointError(f"leaf {name!r}: its name cannot be written as UTF-8; rename it")
        if name.endswith("/"):
            raise CheckpointError(f"leaf {name}: a name must not end in a slash; rename it")
        if not is_key(x) and (kind := type_name(x)) not in NUMBERS:
            raise CheckpointError(
                f"leaf {name} is {kind}, which storage has no type for; convert it to one of "
                f"{', '.join(NUMBERS)}, or leave it out"
            )


def is_key(x: Any) -> bool:
    """Tells typed random keys, and their ShapeDtypeStructs, from numbers."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def type_name(x: Any) -> str:
    """Returns the name of a leaf's type, whatever the order of its bytes is."""
    return np.dtype(x.dtype).name if hasattr(x, "dtype") else np.asarray(x).dtype.name


def storable(state: Tree) -> Tree:
    """Returns the tree as it is stored. Arrays of the host are copied, for they may change."""
    return jax.tree.map(_storable, state)


def _storable(x: Any) -> Any:
    if is_key(x):
        return jax.random.key_data(x)
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.memmap) and not x.flags.writeable:  # of a file: nobody writes through it
        return np.asarray(x, _native(x.dtype))
    x = np.asarray(x)
    return np.array(x, _native(x.dtype))


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=") if dtype.byteorder in "<>" else dtype


def wanted(like: Tree) -> Tree:
    """Returns what to ask storage for: `storable` of what `like` describes.

    Numbers of the host are asked for as NumPy arrays; so are types that this process's devices do
    not have (float64 without jax_enable_x64), where `like` names no sharding.
    Raises: CheckpointError for a leaf that is no number, no array and no ShapeDtypeStruct, and for
    a sharding of a type that devices do not have.
    """
    for name, x in named_leaves(like):
        if not isinstance(x, NUMBER) and not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise CheckpointError(
                f"leaf {name} of `like` is {x!r}; give a number, an array or a jax.ShapeDtypeStruct"
            )
        if getattr(x, "sharding", None) is not None and not _on_devices(x):
            raise CheckpointError(
                f"leaf {name} of `like` is {x.dtype} with a sharding, and devices have that type "
                "only with jax_enable_x64; set it, or give a NumPy array or leave the sharding out"
            )
    return jax.tree.map(_wanted, like)


def _on_devices(x: Any) -> bool:
    return is_key(x) or jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype


def _wanted(x: Any) -> Any:
    if is_key(x):
        abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
        words = jax.eval_shape(jax.random.key_data, abstract)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=x.sharding)
    found = np.asarray(x) if isinstance(x, NUMBER) else x
    if not found.dtype.isnative:
        found = np.empty(found.shape, _native(found.dtype))
    return found if _on_devices(found) else np.empty(found.shape, found.dtype)


def returned(state: Tree, like: Tree) -> Tree:
    """Returns what storage gave for `wanted(like)` as `like` has it: words become keys again,
    and arrays of the host numbers.
    """

    def leaf(x: Any, as_: Any) -> Any:
        if is_key(as_):
            return jax.random.wrap_key_data(x, impl=as_.dtype._impl)
        if isinstance(as_, NUMBER):
            return x[()] if isinstance(as_, np.generic) else x.item()
        return x

    return jax.tree.map(leaf, state, like)


def step_number(step: Any) -> int:
    """Returns a step as an int. Raises: CheckpointError for what no folder can be named by."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(f"step {step!r} must be a whole number from 0 on")
    return number


def metric_number(metric: Any) -> float | None:
    """Returns a metric as a float; NaN as None: it ranks nowhere. Raises: CheckpointError."""
    try:
        number = None if metric is None else float(metric)
    except (TypeError, ValueError):
        raise CheckpointError(f"metric {metric!r} must be a number or None") from None
    return None if number is None or math.isnan(number) else number


def check_json(value: Any, where: str = "data_state") -> None:
    """Raises CheckpointError, which names the member, for what JSON would change or refuse."""
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; JSON has text for keys")
            check_json(member, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            check_json(member, f"{where}[{i}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise CheckpointError(
            f"{where} is {value!r} of type {type(value).__name__}; JSON has text, int, float, "
            "bool, None, lists and dicts"
        )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_fits(step: int, folder: Path, like: Tree, record: Record, partial: bool) -> None:
    """Raises CheckpointError when `like` is not the tree that was saved."""
    wanted = dict(named_leaves(like))
    strange = [n for n in wanted if n not in record.leaves]
    missing = [] if partial else [n for n in record.leaves if n not in wanted]
    problems = [f"leaf {n} is not there.{did_you_mean(n, record.leaves)}" for n in strange[:3]]
    problems += [f"leaf {n} is there and not in `like`" for n in missing[:3]]
    for name, x in wanted.items():
        stored = record.leaves.get(name)
        if stored and (tuple(stored.shape), stored.dtype) != (tuple(x.shape), str(x.dtype)):
            problems.append(
                f"leaf {name} is {stored.dtype}{tuple(stored.shape)} there and "
                f"{x.dtype}{tuple(x.shape)} in `like`"
            )
    if problems:
        raise CheckpointError(f"cannot restore step {step} of {folder}: {'; '.join(problems[:5])}")


def orders_of(tree: Tree, order: Order | None) -> list[list[int]]:
    """Returns the order of the rows of each leaf, [] for one in the model's order.

    Raises: CheckpointError when `order` names no leaf, or is no order of its rows.
    """
    given, found = dict(order or {}), []
    for name, x in named_leaves(tree):
        rows = [int(row) for row in given.pop(name, ())]
        if rows and sorted(rows) != list(range(x.shape[0] if x.shape else 0)):
            raise CheckpointError(
                f"order of leaf {name} must hold each of its {x.shape[:1]} rows once, found {rows}"
            )
        found.append([] if rows == sorted(rows) else rows)
    if given:
        raise CheckpointError(f"order names {next(iter(given))}, which is no leaf of the state")
    return found


def rows_of(record: Record | None, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Returns {leaf: the stored row of each wanted one}, of leaves that are stored in another order
    than wanted. record: None: all are stored in the model's order. wanted: [] stands for it."""
    known = {} if record is None else record.leaves
    found = {}
    for name, order in wanted.items():
        rows = stored_rows(known[name].order if name in known else (), order)
        if rows is not None:
            found[name] = rows
    return found
