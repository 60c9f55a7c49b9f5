"""Compares a new device with known ones: which of them it resembles, and how far away they are.

A known device is one whose rows the predictor was fitted on or adapted to; its traits are the
vector of fitted numbers that describes it (network.py). A device without rows gets the traits of a
known device with the same chip (`twin`), or else a weighted mean of the traits of the devices in
the training. Its bands are widened by its distance to the nearest one (calibration.py). A distance
is a sum of differences of properties, each divided by the difference at which devices have little
in common. Only the numbers of a card count, never its name. A card without a compute capability or
a power limit (a CPU's) is compared by its rates alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from megajax.core.hardware import DeviceCard
from megajax.cost.record import KINDS

# Differences of compute capability, and of the logarithm of the power limit, that reduce the weight
# of a known device by a factor of e. Each counts as a distance of 1.
_NEAR, _NEAR_POWER = 1.0, 0.5
# Difference of the logarithms of peak and bandwidth together that counts as a distance of 1
# (chosen: both e times as large).
_NEAR_RATE = 2.0
_PRODUCT_KINDS = ("product", "batched_product")
# Distance by the power limit below which two devices of one compute capability count as having the
# same chip (chosen: power limits that differ by 28 %; that of an L40S is 4.9 times an L4's).
_TWIN = 0.5
_LEAST = 0.1  # the smallest distance, because a device with an equal card is still another device
# For products on an unseen device, the weights of known devices depend on compute capability alone
# (the power limit is already in the times, power.py), and fall by a factor of e for a difference
# of _NEAR_PRODUCTS. They sum to _PRODUCTS and not to 1, because in what a card does not say, GPUs
# that are near differ more than they agree. (Chosen with the five training GPUs of NeuSight, each
# left out in turn.)
_NEAR_PRODUCTS, _PRODUCTS = 0.4, 0.5


def prior(card: DeviceCard, known: Sequence[DeviceCard]) -> np.ndarray:
    """Returns the weights (devices,) with which the traits of known devices apply to another one.

    Args: card: of that device.
    """
    own, others = _chip(card), [_chip(other) for other in known]
    if own is None or not any(others):
        return np.full(len(known), 1 / len(known))
    away = [np.inf if other is None else _apart(own, other) for other in others]
    weights = np.exp(-np.array(away))
    return weights / weights.sum()


def blend(card: DeviceCard, known: Sequence[DeviceCard], kinds_R: np.ndarray) -> np.ndarray:
    """Returns the weights (R, devices) of known devices' traits for rows on an unseen device.

    The weights of a product depend on compute capability alone and sum to _PRODUCTS. Those of the
    other kinds are the weights of `prior`.
    Args: card, known: as in `prior`. kinds_R: the kind of each row, an index into KINDS.
    """
    own, others = _chip(card), [_chip(other) for other in known]
    products = np.full(len(known), 1 / len(known))
    if own is not None and any(others):
        away = [np.inf if o is None else abs(o[0] - own[0]) / _NEAR_PRODUCTS for o in others]
        near = np.exp(min(away) - np.array(away))
        products = near / near.sum()
    is_product_R1 = np.isin(kinds_R, [KINDS.index(kind) for kind in _PRODUCT_KINDS])[:, None]
    return np.where(is_product_R1, _PRODUCTS * products, prior(card, known))


def distance(card: DeviceCard, known: Sequence[DeviceCard]) -> float:
    """Returns the distance of a device from the nearest of some others, at least _LEAST."""
    return max(_LEAST, min(_distance(card, other) for other in known))


def twin(card: DeviceCard, cards: Mapping[str, DeviceCard]) -> str | None:
    """Returns the name of a device that has the same chip as a card; None: there is none.

    It has the same compute capability, and the nearest power limit, not much above or below the
    card's. What was learnt about it is used for the card. The card's FLOP/s, bandwidth, SMs and L2
    have no part in the choice: a card with more of them has the same twin, and is never predicted
    slower.
    """
    own = _chip(card)
    if own is None:
        return None
    away = {
        name: _apart(own, other)
        for name, known in cards.items()
        if (other := _chip(known)) is not None and other[0] == own[0]
    }
    nearest = min(away, key=away.__getitem__, default=None)
    return nearest if nearest is not None and away[nearest] < _TWIN else None


def _chip(card: DeviceCard) -> tuple[float, float] | None:
    """Returns the compute capability and the power limit in W of a card; None: not both known."""
    return (card.capability, card.power_w) if card.capability and card.power_w else None


def _distance(card: DeviceCard, known: DeviceCard) -> float:
    rates = [
        np.log(max(card.flops.values()) / max(known.flops.values())),
        np.log(card.memory_bytes_per_s / known.memory_bytes_per_s),
    ]
    far = float(np.abs(rates).sum()) / _NEAR_RATE
    one, two = _chip(card), _chip(known)
    return far + (_apart(one, two) if one and two else 0.0)


def _apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    return abs(other[0] - one[0]) / _NEAR + abs(float(np.log(other[1] / one[1]))) / _NEAR_POWER
