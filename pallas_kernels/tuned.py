"""Tables of measurements on a device: the fastest tile, and whether a kernel may be the default.

scripts/tune.py writes one JSON a device kind, tuned/KIND.json: {"rows": [...]}. A row has

    op, key       what was measured
    tile          the fastest of the tiles whose result was right
    correct       true where that tile's result was compared with plain JAX and agreed
    median_us     of that tile; rivals: the same of each rival, by name
    fastest       'hopper', or 'reference' where plain JAX was faster; of products that span ranks
                  'fused', or 'xla'
    link          of products that span ranks: 'real' where the bytes crossed the link between GPUs,
                  'emulated' where one GPU stood for all of them

A key has words, which must agree (type, causal order, head width), and sizes (longest segment, M,
N, K), of which the nearest row by the sum of their distances in octaves is found. It counts within
an octave, and the log says so once: there its tile is used, and it may make a kernel the default
(`against`). Elsewhere, and without a table, a kernel's heuristic gives the tile: on an H200 the
four splits of a product with 14,336 columns left most of the GPU idle in one with 4,096. That is a
pure function of the shapes, so a program that is compiled without a GPU is the same on every
machine.
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
# Octaves over all sizes within which a row says something (chosen: twice the rows is the same
# problem, four times is another).
NEAR = 1.0
Key = Mapping[str, str | bool | int]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One measurement that a table may hold; a kernel folder's bench.py lists its own (`tunings`).

    op, key: as the kernel's api looks them up. candidates: frozen dataclasses, legal on the target,
    the heuristic's first. function: (candidate, interpret) -> what is timed. inputs: (random key)
    -> its arguments, normal values. reference: plain JAX of the same arguments and results, the
    rival that the default falls back on. others: further rivals by name, (function, its inputs),
    which a caller may choose instead; one that cannot run is left out. want: the function whose
    finite results are the right ones; None: the reference. words: what 'fastest' says if a
    candidate was the fastest, and if the reference was. link: as in the row of a product that spans
    ranks.
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
    link: str | None = None


def target() -> str | None:
    """Returns the kind of GPU that a program is for, None where it is for none that is known.

    The mesh that the program is traced under names its devices, whether they are here or not
    (`aot.devices`); without a mesh they are this process's.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind if device.platform in ("gpu", "cuda") else None
    if jax.default_backend() != "gpu":
        return None
    return jax.local_devices()[0].device_kind


def slug(kind: str) -> str:
    """'NVIDIA H200' -> 'nvidia_h200'."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def find(op: str, key: Key, *, kind: str | None = None) -> dict | None:
    """Returns the nearest row with its distance from the key as 'octaves'; None without any.

    kind: the kind of GPU; None: `target()`.
    """
    kind = kind or target()
    if kind is None:
        return None
    kind = slug(kind)
    rows = [row | {"octaves": distance(key, row["key"])} for row in _rows(kind, FOLDER, op)]
    # Of two that are as near, the one that failed counts.
    nearest = min(rows, key=lambda row: (row["octaves"], row.get("correct", False)), default=None)
    if nearest is None or nearest["octaves"] == math.inf:
        return None
    if 0 < nearest["octaves"] <= NEAR:
        _log_once(op, tuple(sorted(key.items())), tuple(sorted(nearest["key"].items())), kind)
    return nearest


def has_fastest(op: str, word: str, kind: str) -> bool:
    """Tells whether any row of a kind of GPU may make `word` the default of an op, at its size."""
    rows = _rows(slug(kind), FOLDER, op)
    return any(against(row | {"octaves": 0.0}, word) is None for row in rows)


def tile(row: dict | None) -> dict[str, Any] | None:
    """Returns the fields of a row's tile; None without a row, of a wrong result or far away."""
    return row["tile"] if row and row.get("correct") and row["octaves"] <= NEAR else None


def against(row: dict | None, word: str = "hopper") -> str | None:
    """Returns why a row does not make a kernel the default; None: it does.

    This is the only place that says what a measurement must show: right, at this size, faster than
    every rival, and over a real link if it spans ranks. word: the kernel's in 'fastest'.
    """
    if row is None:
        return "no measurement on this kind of GPU says that the kernel is right and faster"
    if not row.get("correct"):
        return f"the kernel failed where it was measured, {row['key']}"
    if row["octaves"] > NEAR:
        return f"the nearest measurement is of another size, {row['key']}"
    if word == "fused" and row.get("link") != "real":
        return f"it was measured over an emulated link only, {row['key']}"
    if row["fastest"] != word:
        return f"{row['fastest']} was the fastest at {row['key']}"
    best = min(row["rivals"], key=row["rivals"].__getitem__, default=None)
    if best is None or row["rivals"][best] < row["median_us"]:
        return f"{best or 'no rival'} was faster at {row['key']}"
    return None


def distance(one: Key, other: Key) -> float:
    """Returns the octaves between all sizes, added up; infinite where a word or a name differs."""
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
def _rows(kind: str, folder: pathlib.Path, op: str) -> tuple[dict, ...]:
    path = folder / f"{kind}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return tuple(row for row in rows if row["op"] == op)


@functools.cache
def _log_once(op: str, key: tuple, nearest: tuple, kind: str) -> None:
    logging.info(
        "%s: no tile was measured for %s on %s; took that of %s", op, dict(key), kind, dict(nearest)
    )
