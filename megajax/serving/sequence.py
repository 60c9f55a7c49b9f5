"""What the scheduler hands to the engine: sequences, and what a step does with them.

Not here: how they change (scheduler.py is the only one that writes to a sequence).
"""

import collections.abc as abc
from dataclasses import dataclass, field
from typing import NamedTuple

from megajax.serving.cache import chain


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a prompt. Equal only to itself; all members are to be read only.

    request: as given to `Scheduler.add`. index: of the request's n. tokens: prompt and drawn ones.
    computed: how many tokens have keys and values in `pages`. slot: row of the batch while it runs,
    else None.
    """

    request: abc.Hashable
    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    tokens: list[int]
    family: "Family" = field(repr=False)
    order: tuple[int, int] = (0, 0)  # the smaller, the earlier served
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    keys: list[bytes] = field(default_factory=list, repr=False)  # of its full pages, as far as used
    published: int = 0  # pages that were offered for reuse
    anew: bool = False  # no page of another request is reused for it
    weights: int = 0  # number of the weights with which its pages were begun

    def key(self, i: int, size: int) -> bytes:
        """Returns the key of its full page i. size: tokens a page. Each is computed once."""
        keys = self.keys
        while len(keys) <= i:
            k = len(keys)
            keys.append(chain(keys[-1] if keys else b"", self.tokens[k * size : (k + 1) * size]))
        return keys[i]


@dataclass(eq=False, slots=True)
class Family:
    """The sequences of a request that have not ended.

    held: wait until another one has computed the prompt. ready: run, and have computed it.
    """

    alive: dict[Sequence, None] = field(default_factory=dict)
    held: dict[Sequence, None] = field(default_factory=dict)
    ready: dict[Sequence, None] = field(default_factory=dict)


class Piece(NamedTuple):
    """Feed tokens[start : start + count]; draws: then the sequence's next token is drawn."""

    sequence: Sequence
    start: int
    count: int
    draws: bool


class Plan(NamedTuple):
    """One call of the device.

    pieces: by slot, at most one a sequence. copies: (source page, target page), all to be done
    before anything is fed; no page is both. steps: tokens that each piece draws; above 1, every
    piece is one token, and the pages have room for what the steps feed.
    """

    pieces: tuple[Piece, ...]
    copies: tuple[tuple[int, int], ...]
    steps: int
