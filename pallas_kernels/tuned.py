"""Which tile, and which implementation, was fastest on a device, as scripts/tune.py measured.

One JSON a device kind, in tuned/: {"rows": [{"op", "key", "tile", "median_us", "fastest", ...}]},
fastest: 'hopper', or 'reference' where plain JAX was faster than the best tile; of products that
span ranks 'fused', or 'xla'.
A key has words, which must agree (type, causal order), and sizes (head width, longest segment, M,
N, K), of which the nearest row by the sum of their distances in octaves is taken; a size that is
not one of the table's is said once in the log. Without a table a kernel's own heuristic decides,
which is a pure function: a program compiled without a GPU is the same everywhere.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging

FOLDER = pathlib.Path(__file__).parent / "tuned"
Key = Mapping[str, str | bool | int]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One measurement that a table may hold; a kernel folder's configs.py lists its own.

    op, key: as the kernel's api looks them up. candidates: frozen dataclasses, legal on the target,
    the heuristic's first. function: (candidate, interpret) -> what is timed. inputs: (random key)
    -> its arguments, normal values. reference: plain JAX of the same arguments and results, the
    rival that the default falls back on. others: further rivals by name, (function, its inputs),
    which a caller may choose instead; one that cannot run is left out. want: what results are
    compared with, but where it is not finite; None: what the reference gives. words: what 'fastest'
    says when a candidate is, and when the reference is.
    """

    op: str
    key: Key
    candidates: Sequence[Any]
    function: Callable[[Any, bool], Callable[..., Any]]
    inputs: Callable[[jax.Array], tuple[Any, ...]]
    reference: Callable[..., Any]
    others: Mapping[str, tuple[Callable[..., Any], Callable[[jax.Array], tuple[Any, ...]]]] = (
        dataclasses.field(default_factory=dict)
    )
    want: Callable[..., Any] | None = None
    words: tuple[str, str] = ("hopper", "reference")


def device_kind() -> str | None:
    """Returns this process's GPU as a table is named ('nvidia_h200'), None without one."""
    if jax.default_backend() != "gpu":
        return None
    return slug(jax.local_devices()[0].device_kind)


def slug(kind: str) -> str:
    """'NVIDIA H200' -> 'nvidia_h200'."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def find(
    op: str, key: Key, *, kind: str | None = None, folder: pathlib.Path = FOLDER
) -> dict | None:
    """Returns the nearest row that was measured, None where no row's words agree.

    kind: a table's name; None: this process's GPU, without one there is no row.
    """
    kind = kind or device_kind()
    if kind is None:
        return None
    rows = [row for row in _rows(kind, folder) if row["op"] == op]
    apart = [distance(key, row["key"]) for row in rows]
    if not apart or min(apart) == math.inf:
        return None
    nearest = rows[apart.index(min(apart))]
    if min(apart) > 0:
        _log_once(op, tuple(sorted(key.items())), tuple(sorted(nearest["key"].items())), kind)
    return nearest


def slower(rows: Sequence[dict | None], needed: bool) -> list[str]:
    """Returns why plain JAX is taken where nobody chose: a row says so, or there is none.

    needed: whether the kernel waits for a row that says that it is faster.
    """
    if needed and None in rows:
        return ["no measurement for this device says that the kernel is faster than XLA's product"]
    return [
        f"{row['fastest']} was the fastest when it was measured for {row['key']}"
        for row in rows
        if row and row["fastest"] != "hopper"
    ]


def distance(one: Key, other: Key) -> float:
    """In octaves over all sizes; infinite where a word or the set of names differs."""
    if one.keys() != other.keys():
        return math.inf
    total = 0.0
    for name, value in one.items():
        measured = other[name]
        if value == measured:
            continue
        if isinstance(value, str | bool) or isinstance(measured, str) or not value * measured:
            return math.inf
        total += abs(math.log2(value / measured))
    return total


@functools.cache
def _rows(kind: str, folder: pathlib.Path) -> list[dict]:
    path = folder / f"{kind}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


@functools.cache
def _log_once(op: str, key: tuple, nearest: tuple, kind: str) -> None:
    logging.info("%s: no tile was measured for %s on %s; took that of %s", op, dict(key), kind,
                 dict(nearest))  # fmt: skip
