"""Weighted mixtures of row sequences, in exact proportion and without state.

A fixed pattern of 65,536 places says which component fills which place; it repeats for ever. So
row i of the mixture, and how many rows each component has given before it, follow from i alone.
"""

import math
import os
from collections.abc import Sequence

import numpy as np

from megajax.core.errors import UserError
from megajax.data.pack import PackedRows, mix

PATTERN = 1 << 16  # (chosen: a weight is met to 1.5e-5)


class MixedRows:
    """Rows of several components by weight; each component's own order is kept."""

    def __init__(self, components: Sequence[PackedRows], weights: Sequence[float], seed: int):
        """weights: positive and finite, need not add up to 1."""
        self.components = components
        counts = _count(weights)
        pattern = np.repeat(np.arange(len(counts)), counts)
        np.random.RandomState(mix(seed, "mixture") % 2**32).shuffle(pattern)
        self._pattern, self._counts = pattern, counts
        # How many rows its own component has given before each place of the pattern.
        self._before = np.zeros(PATTERN, np.int64)
        for k in range(len(counts)):
            self._before[pattern == k] = np.arange(counts[k])

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i of the mixture."""
        round_, place = divmod(i, PATTERN)
        k = int(self._pattern[place])
        return self.components[k][int(round_ * self._counts[k] + self._before[place])]


def _count(weights: Sequence[float]) -> np.ndarray:
    """Returns how many of the pattern's places each weight has. Raises: UserError for none."""
    weight = np.asarray(weights, np.float64)
    if not (np.isfinite(weight) & (weight > 0)).all():
        raise UserError(
            f"mixture weights {list(weights)} must be positive and finite (--data.source)"
        )
    share = weight / weight.max()  # their sum may be beyond float64
    share /= share.sum()
    counts = np.floor(share * PATTERN).astype(int)
    missing = PATTERN - counts.sum()  # largest remainders take what rounding left
    counts[np.argsort(counts - share * PATTERN)[:missing]] += 1
    if counts.min() == 0:
        raise UserError(
            f"the mixture weight {weight.min():g} is below 1/{PATTERN} of the sum of the weights: "
            "raise it, or leave its part out (--data.source)"
        )
    return counts


def parse(source: str) -> list[tuple[str, float]]:
    """Returns [(name, weight)] of 'a:0.7,b:0.3'; one name alone needs no weight.

    A path that exists is one name, whatever its characters. A name that comes several times is one
    part with the sum of the weights, because two parts of one text would give each row twice.

    Raises: UserError for a weight that is not positive and finite, that one of several lacks, or
    that is too small a share.
    """
    if any(os.path.lexists(os.path.expanduser(source + s)) for s in ("", ".idx")):
        return [(source, 1.0)]
    parts = [part.strip() for part in source.split(",") if part.strip()]
    if not parts:
        raise UserError("data.source is empty (--data.source)")
    parsed: dict[str, float] = {}
    for part in parts:
        head, _, tail = part.rpartition(":")
        weight = _number(tail) if head else None
        if weight is None and len(parts) == 1:
            return [(part, 1.0)]
        if weight is None or not 0 < weight < math.inf:
            raise UserError(
                f"data.source={source}: every part of a mixture needs a positive, finite weight, "
                f"as in stdlib:0.7,notes/:0.3; {part!r} has none (--data.source)"
            )
        parsed[head] = parsed.get(head, 0.0) + weight
    if len(parsed) == 1:
        return [(name, 1.0) for name in parsed]
    _count(list(parsed.values()))
    return list(parsed.items())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
