"""The same weights in other shapes: stacked or by layer or by stage, fused or apart, padded or not.

A conversion works on {dotted name: array}, looks at the ends of the names only, and so converts
parameters, gradients and an optimizer's moments alike, in one tree or each alone. Every one goes
there and `back`, and back after there changes no bit. Arrays are NumPy arrays (memory maps too) or
jax arrays; what can be a view is one.

Legend: L layers, P stages, D model width, H query heads, G key-value heads, K head width. Stacked,
(L, ...), in the model's order, is how readers give layers (`offline.StoredLeaves`).
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megajax.core.errors import UserError, nearest_multiples

Leaves = Mapping[str, Any]


class Conversion(Protocol):
    """Converts our layout to another one and back."""

    def there(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the leaves in the other layout. Raises: UserError when they do not fit."""
        ...

    def back(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the leaves in ours. Raises: UserError when they do not fit."""
        ...


@dataclass(frozen=True)
class Unstacked:
    """<group>.x of (L, ...) as <group>.0.x, <group>.1.x, ...; scalars and other leaves stay."""

    group: str = "blocks"

    def there(self, leaves: Leaves) -> dict[str, Any]:
        """Returns one leaf a layer, in the order of the layers. Raises: UserError if they are."""
        converted: dict[str, Any] = {}
        for name, x in leaves.items():
            place = _find(name, self.group)
            if place is None or x.ndim == 0:
                converted[name] = x
                continue
            if re.match(r"\d+\.", name[place:]):
                raise UserError(f"{name} is one layer already: its rows are no layers")
            for i in range(x.shape[0]):
                converted[f"{name[:place]}{i}.{name[place:]}"] = x[i]
        return converted

    def back(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the layers stacked. Raises: UserError when one is missing or of another shape."""
        converted: dict[str, Any] = {}
        layers: dict[str, dict[int, Any]] = {}
        for name, x in leaves.items():
            place = _find(name, self.group)
            number = re.match(r"(\d+)\.", name[place:]) if place is not None else None
            if place is None or number is None:
                converted[name] = x
                continue
            stacked = name[:place] + name[place + number.end() :]
            converted.setdefault(stacked, None)
            layers.setdefault(stacked, {})[int(number[1])] = x
        for stacked, pieces in layers.items():
            missing = [i for i in range(max(pieces) + 1) if i not in pieces]
            shapes = {tuple(x.shape) for x in pieces.values()}
            if missing or len(shapes) > 1:
                what = f"lacks layers {missing}" if missing else f"has layers of shapes {shapes}"
                raise UserError(f"{stacked} {what}")
            converted[stacked] = _stack([pieces[i] for i in range(len(pieces))])
        return converted


@dataclass(frozen=True)
class Staged:
    """<group>.x of (L, ...) as (P, L', ...): what each pipeline stage holds, chunk after chunk.

    Chunk c of stage s is group c P + s of the layers (Megatron's interleaving, arXiv 2104.04473).
    Where P `chunks` does not divide L, layers of zeros fill the last groups.
    """

    layers: int
    stages: int
    chunks: int = 1
    group: str = "blocks"

    def __post_init__(self):
        """Raises: UserError for numbers that no layers can be dealt out by."""
        _at_least_one(layers=self.layers, stages=self.stages, chunks=self.chunks)
        for name, value in (("stages", self.stages), ("chunks", self.chunks)):
            if value > self.layers:
                raise UserError(
                    f"{name}={value} must be at most the number of layers; nearest: {self.layers}"
                )

    @property
    def order(self) -> np.ndarray:
        """The layer at each place, (P, L'); numbers from L on are padding."""
        per = -(-self.layers // (self.stages * self.chunks))
        numbers = np.arange(per * self.stages * self.chunks)
        places = numbers.reshape(self.chunks, self.stages, per).transpose(1, 0, 2)
        return places.reshape(self.stages, self.chunks * per)

    def there(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the leaves by stage. Raises: UserError for another number of layers."""
        order = self.order

        def cut(name: str, x: Any) -> Any:
            if x.shape[0] != self.layers:
                raise UserError(f"{name} has {x.shape[0]} layers, not {self.layers}")
            padded = _grow(x, 0, order.size)
            return padded[order.ravel()].reshape(*order.shape, *x.shape[1:])

        return self._each(leaves, cut)

    def back(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the leaves stacked. Raises: UserError for other stages, or padding not zero."""
        order = self.order

        def join(name: str, x: Any) -> Any:
            if x.shape[:2] != order.shape:
                raise UserError(f"{name} has (stages, layers) {x.shape[:2]}, not {order.shape}")
            flat = x.reshape(order.size, *x.shape[2:])[np.argsort(order.ravel())]
            return _shrink(name, flat, 0, self.layers)

        return self._each(leaves, join)

    def _each(self, leaves: Leaves, change: Callable[[str, Any], Any]) -> dict[str, Any]:
        return {
            n: x if _find(n, self.group) is None or x.ndim == 0 else change(n, x)
            for n, x in leaves.items()
        }


@dataclass(frozen=True)
class FusedQkv:
    """query (..., D, H, K), key and value (..., D, G, K) as qkv (..., D, G, H/G + 2, K).

    Megatron's order: the queries of a group, then its key and its value; so a cut along G by tensor
    parallelism cuts all three alike.
    """

    names: tuple[str, str, str] = ("query", "key", "value")
    fused: str = "qkv"

    def there(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the leaves fused. Raises: UserError where one of the three is missing."""
        converted: dict[str, Any] = {}
        for name, x in leaves.items():
            home, _, last = name.rpartition(".")
            if last not in self.names:
                converted[name] = x
                continue
            full = [f"{home}.{n}".lstrip(".") for n in self.names]
            if missing := [n for n in full if n not in leaves]:
                raise UserError(f"{name} cannot be fused: {', '.join(missing)} is not there")
            target = f"{home}.{self.fused}".lstrip(".")
            if target not in converted:
                converted[target] = self._fuse(name, *(leaves[n] for n in full))
        return converted

    def _fuse(self, name: str, q: Any, k: Any, v: Any) -> Any:
        if min(q.ndim, k.ndim) < 2:
            raise UserError(f"{name}: {q.shape} and {k.shape} are not (..., heads, width)")
        *outer, H, K = q.shape
        G = k.shape[-2]
        if k.shape != v.shape or [*k.shape[:-2], k.shape[-1]] != [*outer, K] or H % G:
            raise UserError(f"{name}: heads of {q.shape}, {k.shape} and {v.shape} do not fuse")
        return _join([q.reshape(*outer, G, H // G, K), k[..., None, :], v[..., None, :]], -2)

    def back(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the three leaves. Raises: UserError for a shape that is not fused."""
        converted: dict[str, Any] = {}
        for name, x in leaves.items():
            home, _, last = name.rpartition(".")
            if last != self.fused:
                converted[name] = x
                continue
            if x.ndim < 3 or x.shape[-2] < 3:
                raise UserError(f"{name} of {x.shape} is not (..., groups, heads + 2, width)")
            *outer, G, R, K = x.shape
            q = x[..., :-2, :].reshape(*outer, G * (R - 2), K)
            for n, piece in zip(self.names, (q, x[..., -2, :], x[..., -1, :]), strict=True):
                converted[f"{home}.{n}".lstrip(".")] = piece
        return converted


@dataclass(frozen=True)
class PaddedVocab:
    """Rows of zeros up to a multiple, in the tables that have one row a word.

    tables: {end of a leaf's name: dimension of the vocabulary}. vocab: words without padding.
    """

    vocab: int
    multiple: int
    tables: tuple[tuple[str, int], ...] = (("tokens", 0), ("head", 1))

    def __post_init__(self):
        """Raises: UserError for numbers below one."""
        _at_least_one(vocab=self.vocab, multiple=self.multiple)

    @property
    def rows(self) -> int:
        """Rows with padding."""
        return math.ceil(self.vocab / self.multiple) * self.multiple

    def there(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the tables with padding, whatever padding they had before."""
        return self._each(leaves, lambda n, x, d: _grow(_shrink(n, x, d, self.vocab), d, self.rows))

    def back(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the tables without padding. Raises: UserError when it is not zero."""
        return self._each(leaves, lambda n, x, d: _shrink(n, x, d, self.vocab))

    def _each(self, leaves: Leaves, change: Callable[[str, Any, int], Any]) -> dict[str, Any]:
        converted = dict(leaves)
        for name, x in leaves.items():
            for end, d in self.tables:
                if name.split(".")[-1] == end and x.ndim > d:
                    if x.shape[d] < self.vocab:
                        near = nearest_multiples(self.vocab, self.multiple)
                        raise UserError(
                            f"{name} has {x.shape[d]} rows for {self.vocab} words; {near}"
                        )
                    converted[name] = change(name, x, d)
        return converted


def convert(
    leaves: Leaves, there: Sequence[Conversion] = (), back: Sequence[Conversion] = ()
) -> dict:
    """Returns the leaves after `back` of each in `back`, the last first, then `there` of each."""
    converted = dict(leaves)
    for conversion in reversed(back):
        converted = conversion.back(converted)
    for conversion in there:
        converted = conversion.there(converted)
    return converted


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name}={value} must be a whole number from 1 on; nearest: 1")


def units(names: Iterable[str]) -> list[list[str]]:
    """Returns the names in groups that every conversion here turns into others independently.

    A group is one stacked leaf or its layers, and of attention's query, key and value all three.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        home, _, last = re.sub(r"(^|\.)blocks\.\d+\.", r"\1blocks.", name).rpartition(".")
        key = f"{home}.{FusedQkv.fused if last in FusedQkv.names else last}"
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _find(name: str, group: str) -> int | None:
    """Returns where the part after '<group>.' begins in a name, or None."""
    match = re.search(rf"(?:^|\.){re.escape(group)}\.", name)
    return match.end() if match else None


def _home(x: Any) -> Any:
    """Returns the array module of an array: NumPy, or jax's if it is a jax array."""
    return np if isinstance(x, np.ndarray) else x.__array_namespace__()


def _stack(pieces: Sequence[Any]) -> Any:
    return _home(pieces[0]).stack(pieces)


def _join(pieces: Sequence[Any], axis: int) -> Any:
    return _home(pieces[0]).concatenate(pieces, axis=axis)


def _grow(x: Any, axis: int, size: int) -> Any:
    """Returns x with zeros behind it along an axis."""
    if x.shape[axis] == size:
        return x
    shape = [size - x.shape[axis] if d == axis else n for d, n in enumerate(x.shape)]
    return _join([x, _home(x).zeros(shape, x.dtype)], axis)


def _shrink(name: str, x: Any, axis: int, size: int) -> Any:
    """Returns the first `size` along an axis. Raises: UserError when the rest is not zero."""
    index = (slice(None),) * axis
    if np.asarray(x[(*index, slice(size, None))]).any():
        raise UserError(f"{name}: what pads it from {size} to {x.shape[axis]} is not zero")
    return x[(*index, slice(size))]
