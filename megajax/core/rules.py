"""Rules: the plain data behind a Layout, word -> mesh axes. No jax."""

import dataclasses
from collections.abc import Mapping

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Word -> mesh axes, for the places where an array can be. A missing word is not cut.

    stored: parameters at rest. act: activations inside a block. residual: activations on the
    residual stream, between blocks. partial: the axes over which gradients of a weight are partial
    sums; a weight in use is whole over them. sharable: words whose dimension may be shorter than
    the axes that cut it. copies: word -> ranks that hold each entry of such a dimension while it is
    in use: at rest `stored` leaves it uncut, in use `act` cuts it with every entry repeated so
    often.
    """

    stored: Mapping[str, Axes]
    act: Mapping[str, Axes]
    residual: Mapping[str, Axes]
    partial: Axes
    sharable: Axes = ()
    copies: Mapping[str, int] = dataclasses.field(default_factory=dict)
