"""Rules: the plain data behind a Layout, word -> mesh axes. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Rules:
    """Word -> mesh axes, for the places where an array can be. A missing word is not cut.

    stored: parameters at rest. act: activations inside a block. residual: activations on the
    residual stream, between blocks. partial: the axes over which gradients of a weight are partial
    sums; a weight in use is whole over them.
    """

    stored: Mapping[str, Axes]
    act: Mapping[str, Axes]
    residual: Mapping[str, Axes]
    partial: Axes
