"""Checks that all attention functions share: heads, windows, and what is static of the logits."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from pallas_kernels import arguments
from pallas_kernels.attention.reference import Spec


def make_spec(op: str, width: int, scale: float | None, softcap: float | None) -> Spec:
    """Returns what is static of the logits. width: of a head.

    Raises: ValueError for numbers that are not above 0.
    """
    if softcap is not None:
        softcap = arguments.positive(op, "softcap", softcap, "None for no cap")
    if scale is None:
        return Spec(width**-0.5, softcap)
    return Spec(arguments.positive(op, "scale", scale, "None for K ** -0.5"), softcap)


def check_heads(op: str, heads: int, kv_heads: int, width: int) -> None:
    """Raises: ValueError without heads or width, or where groups of heads would be unequal."""
    if not heads * kv_heads * width:
        raise ValueError(
            f"{op}: q (.., {heads}, {width}) and k (.., {kv_heads}, {width}) must have heads and a "
            "head width"
        )
    if heads % kv_heads:
        near = [g for g in range(1, heads + 1) if heads % g == 0]
        raise ValueError(
            f"{op}: {heads} query heads must be a multiple of {kv_heads} key-value heads; G of "
            f"{near}"
        )


def check_window(op: str, window: Any) -> None:
    """Raises: ValueError for what is no pair of limits."""
    if window is None:
        return
    pair = isinstance(window, Sequence) and len(window) == 2
    if not pair or not all(w is None or (isinstance(w, Integral) and int(w) >= 0) for w in window):
        example = (
            f"({window}, 0)" if isinstance(window, Integral) and int(window) >= 0 else "(4, 0)"
        )
        raise ValueError(
            f"{op}: window={window!r} must be (left, right), keys before and after a query's own, "
            f"each an integer of 0 or more, or None for no limit, as in window={example}"
        )
