"""Compares a new device with known ones: which it resembles, and how far the nearest is.

A distance is a sum of differences, each divided by the difference at which devices have little in
common. Compute capability and power limit are looked up by the names of NVIDIA GPUs (physics.py);
a device with another name is compared by its card alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from megajax.core.hardware import DeviceCard
from megajax.cost.record import KINDS
from megajax.systems.cdmpp.physics import gpu

# Differences of compute capability, and of the power limit's logarithm, over which the traits of a
# device count e times less for another.
_NEAR, _NEAR_POWER = 1.0, 0.5
_NEAR_RATE = 2.0  # of the logarithms of peak and bandwidth (chosen: both e times as large count 1)
_PRODUCT_KINDS = ("product", "batched_product")
_TWIN = 0.5  # (chosen: an H100 is 0.18 from an H200, which has the same chip; an A100 is 2.9)
_LEAST = 0.1  # a card of the same numbers still is another device
# Products of an unseen device: the power limit is in their times (physics.py), so only capability
# makes devices near, more sharply, and what a card does not say differs more between near GPUs than
# it agrees (chosen: the five training GPUs of NeuSight, each left out in turn).
_NEAR_PRODUCTS, _PRODUCTS = 0.4, 0.5


def prior(own: tuple[float, float] | None, names: Sequence[str]) -> np.ndarray:
    """Returns the weights (devices,) with which the traits of known devices apply to another one.

    Args: own: compute capability and power limit in W of that device (physics.gpu); None: unknown.
    """
    others = [gpu(name) for name in names]
    if own is None or not any(others):
        return np.full(len(names), 1 / len(names))
    away = [np.inf if other is None else _apart(own, other) for other in others]
    weights = np.exp(-np.array(away))
    return weights / weights.sum()


def blend(own: tuple[float, float] | None, names: Sequence[str], kinds_R: np.ndarray) -> np.ndarray:
    """Returns the weights (R, devices) of known devices' traits for rows on an unseen device.

    Those of products are of devices near in compute capability, and sum to _PRODUCTS.
    Args: own, names: see `prior`.
    """
    others = [gpu(name) for name in names]
    products = np.full(len(names), 1 / len(names))
    if own is not None and any(others):
        away = [np.inf if o is None else abs(o[0] - own[0]) / _NEAR_PRODUCTS for o in others]
        near = np.exp(min(away) - np.array(away))
        products = near / near.sum()
    is_product_R1 = np.isin(kinds_R, [KINDS.index(kind) for kind in _PRODUCT_KINDS])[:, None]
    return np.where(is_product_R1, _PRODUCTS * products, prior(own, names))


def distance(name: str, card: DeviceCard, cards: Mapping[str, DeviceCard]) -> float:
    """Returns the distance of a device from the nearest of some others, at least _LEAST."""
    return max(_LEAST, min(_distance(name, card, *other) for other in cards.items()))


def twin(card: DeviceCard, cards: Mapping[str, DeviceCard]) -> str | None:
    """Returns the name of a device that has the same chip as a card; None: there is none.

    It is the nearest device of the same compute capability, if its distance is below _TWIN. What
    was learnt about it is used for the card.
    """
    own = gpu(card.name)
    if own is None:
        return None
    away = {
        name: _distance("", card, name, known)
        for name, known in cards.items()
        if (other := gpu(known.name) or gpu(name)) is not None and other[0] == own[0]
    }
    nearest = min(away, key=away.__getitem__, default=None)
    return nearest if nearest is not None and away[nearest] < _TWIN else None


def _distance(name: str, card: DeviceCard, other: str, known: DeviceCard) -> float:
    rates = [
        np.log(max(card.flops.values()) / max(known.flops.values())),
        np.log(card.memory_bytes_per_s / known.memory_bytes_per_s),
    ]
    far = float(np.abs(rates).sum()) / _NEAR_RATE
    one, two = gpu(card.name) or gpu(name), gpu(known.name) or gpu(other)
    return far + (_apart(one, two) if one and two else 0.0)


def _apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    return abs(other[0] - one[0]) / _NEAR + abs(float(np.log(other[1] / one[1]))) / _NEAR_POWER
