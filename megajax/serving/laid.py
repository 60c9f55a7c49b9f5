"""A step's segments laid side by side, as the arrays that its program reads.

Legend: T tokens of a step, B segments, S slots (sequences that run), M pages of the longest
sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megajax.serving import draw, paged
from megajax.serving.draw import Rules

LEAST = 8  # tokens of the smallest program


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of one sequence that a step feeds. ids: theirs. first: their position.
    draws: whether the last of them is followed by a token to draw. following: the ids behind each
    of them, as far as their log-probabilities are asked for."""

    slot: int
    ids: Sequence[int]
    first: int
    draws: bool
    following: Sequence[int] = ()


class Laid(NamedTuple):
    """What a step reads beside weights and state. rows_B: where a segment's last token is. slot_B:
    its slot; S: it draws nothing. rules_B: how it draws."""

    tokens: paged.Tokens
    rows_B: Any
    slot_B: Any
    rules_B: Rules


class Laying:
    """Lays segments in arrays of few shapes. sizes: the T that there are."""

    def __init__(self, slots: int, budget: int, width: int):
        """slots: S. budget: most tokens of a step. width: M."""
        self._slots, self._width = slots, width
        self.sizes = _sizes(budget)

    def size(self, tokens: int) -> int:
        """Returns the smallest T that holds so many tokens."""
        return next(size for size in self.sizes if size >= tokens)

    def step(
        self, segments: Sequence[Segment], table_SM: np.ndarray, rules: Rules, T: int | None = None
    ) -> Laid:
        """Returns what a step of these segments reads, in NumPy; a row for each, in their order.

        table_SM, rules: by slot. T: one of `sizes` that holds the segments; None: the smallest.
        """
        T = T or self.size(sum(len(s.ids) for s in segments))
        B = min(T, self._slots)
        tokens, at = self.tokens(segments, table_SM, T, B)
        slot_B, rows_B = np.full(B, self._slots, np.int32), np.zeros(B, np.int32)
        rules_B = draw.plain_rules(B)
        used = [s.slot for s in segments]
        for target, source in zip(fields(rules_B), fields(rules), strict=True):
            target[: len(used)] = source[used]
        for b, segment in enumerate(segments):
            rows_B[b] = at[b] + len(segment.ids) - 1
            if segment.draws:
                slot_B[b] = segment.slot
        return Laid(tokens, rows_B, slot_B, rules_B)

    def tokens(
        self, segments: Sequence[Segment], table_SM: np.ndarray, T: int, B: int
    ) -> tuple[paged.Tokens, list[int]]:
        """Returns (the segments' tokens side by side, where each begins)."""
        tokens, at, where = paged.tokens_like(T, B, self._width), 0, []
        tokens.table_BM[: len(segments)] = table_SM[[s.slot for s in segments]]
        for b, segment in enumerate(segments):
            count = len(segment.ids)
            tokens.ids_T[at : at + count] = segment.ids
            tokens.positions_T[at : at + count] = range(segment.first, segment.first + count)
            tokens.start_B[b], tokens.count_B[b] = at, count
            tokens.context_B[b] = segment.first + count
            where.append(at)
            at += count
        return tokens, where


def fields(rules: Rules) -> list[np.ndarray]:
    """Returns the arrays of rules."""
    return [getattr(rules, name) for name in rules.__dataclass_fields__]


def _sizes(budget: int) -> tuple[int, ...]:
    """Powers of two from LEAST on, the last of which holds the budget."""
    sizes = [LEAST]
    while sizes[-1] < budget:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)
