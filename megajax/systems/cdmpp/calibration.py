"""How sure a prediction is: its 90 % band, the nearest known device, and the ranges of the
training.

The width of a band is a relative standard deviation for each kind of record. It is chosen as in
conformal prediction: networks predict rows that they have not learnt from, and the estimate is the
number for which nine in ten of the relative errors are within 1.645 times it. A band of that
half-width then covers nine in ten rows that are similar.

On a device without rows the estimate grows with the distance to the nearest known device. To find
how fast, further networks are each trained without one device. The excess of the errors on that
device over those on known devices is divided by its distance from the devices that the network had.
(If the distance were ignored, the band of an A100 with more memory would be as wide as that of a
GPU of another generation.) The median over the left-out devices is used, because a single device
whose rows were measured in two sessions at different clocks would otherwise set the band of every
device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.core.hardware import DeviceCard
from megajax.cost.record import FEATURES, KINDS, OPCODES, OpRecord, peak
from megajax.systems.cdmpp import network
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.network import plain_device
from megajax.systems.cdmpp.physics import Programs

# ---- nearness
#
# Which known devices a new device resembles, and how far away they are.
#
# A known device is one whose rows the predictor was fitted on or adapted to; its traits are the
# vector of fitted numbers that describes it (network.py). A device without rows gets the traits of
# a known device with the same chip (`twin`), or else a weighted mean of the traits of the devices
# in the training. Its bands are widened by its distance to the nearest one. A distance is a sum of
# differences of properties, each divided by the difference at which devices have little in common.
# Only the numbers of a card count, never its name. A card without a compute capability or a power
# limit (a CPU's) is compared by its rates alone.


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
# (the power limit is already in the times, physics.py), and fall by a factor of e for a difference
# of _NEAR_PRODUCTS. They sum to _PRODUCTS and not to 1, because in what a card does not say, GPUs
# that are near differ more than they agree. (Chosen with the five training GPUs of NeuSight, each
# left out in turn.)
_NEAR_PRODUCTS, _PRODUCTS = 0.4, 0.5


def prior(card: DeviceCard, known: Sequence[DeviceCard]) -> np.ndarray:
    """Returns the weights (devices,) with which the traits of known devices apply to another one.

    Args: card: the card of that device.
    """
    chip, others = _chip(card), [_chip(other) for other in known]
    if chip is None or not any(others):
        return np.full(len(known), 1 / len(known))
    away = [np.inf if other is None else _apart(chip, other) for other in others]
    weights = np.exp(-np.array(away))
    return weights / weights.sum()


def blend(card: DeviceCard, known: Sequence[DeviceCard], kinds_R: np.ndarray) -> np.ndarray:
    """Returns the weights (R, devices) of known devices' traits for rows on an unseen device.

    The weights of a product depend on compute capability alone and sum to _PRODUCTS. Those of the
    other kinds are the weights of `prior`.
    Args: card, known: as in `prior`. kinds_R: the kind of each row, an index into KINDS.
    """
    chip, others = _chip(card), [_chip(other) for other in known]
    products = np.full(len(known), 1 / len(known))
    if chip is not None and any(others):
        away = [np.inf if o is None else abs(o[0] - chip[0]) / _NEAR_PRODUCTS for o in others]
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
    chip = _chip(card)
    if chip is None:
        return None
    away = {
        name: _apart(chip, other)
        for name, known in cards.items()
        if (other := _chip(known)) is not None and other[0] == chip[0]
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


# ---- widths of bands


COVERED, WIDTH = 0.9, 1.645
_ENOUGH = 20  # least number of rows for which a kind of record gets an estimate of its own
_FOLDS = 5  # largest number of networks that are trained with one device left out
_PARTS = 10  # parts into which the programs are divided; each network leaves out a different part
_WITH_ALL = 3  # further networks with all devices, if there are fewer devices than _FOLDS


@dataclasses.dataclass(frozen=True)
class Errors:
    """Estimated relative standard deviations of predictions.

    every: over all rows. kinds: for each kind of record, NaN for a kind with too few rows.
    """

    every: float
    kinds: np.ndarray

    def of(self, kinds_R: np.ndarray) -> np.ndarray:
        """Returns the relative standard deviation of each row, (R,), by its kind."""
        of_kind = self.kinds[kinds_R]
        return np.where(np.isnan(of_kind), self.every, of_kind)

    def plus(self, other: "Errors", times: float) -> "Errors":
        """Returns these errors plus `times` times the other ones, kind by kind."""
        every = np.full(len(KINDS), self.every), np.full(len(KINDS), other.every)
        filled = [
            np.where(np.isnan(e.kinds), default, e.kinds)
            for e, default in zip((self, other), every, strict=True)
        ]
        return Errors(self.every + times * other.every, filled[0] + times * filled[1])

    @classmethod
    def of_rows(cls, ratio_R: np.ndarray, kinds_R: np.ndarray) -> "Errors":
        """Returns the errors of rows from their ratios, measured over predicted seconds."""
        return cls.of_scores(scores(ratio_R), kinds_R)

    @classmethod
    def of_scores(cls, score_R: np.ndarray, kinds_R: np.ndarray) -> "Errors":
        """Returns the errors whose bands cover 90 % of the rows. score_R: as `scores` returns."""
        kinds = [
            _quantile(score_R[kinds_R == k]) if (kinds_R == k).sum() >= _ENOUGH else np.nan
            for k in range(len(KINDS))
        ]
        return cls(_quantile(score_R), np.array(kinds))

    @classmethod
    def typical(cls, parts: Sequence["Errors"]) -> "Errors":
        """Returns the median of several devices' errors, kind by kind."""
        columns = np.stack([part.kinds for part in parts]).T
        known = [column[~np.isnan(column)] for column in columns]
        kinds = [np.median(column) if len(column) else np.nan for column in known]
        return cls(float(np.median([part.every for part in parts])), np.array(kinds))

    def rescaled(self, score_R: np.ndarray, kinds_R: np.ndarray) -> "Errors":
        """Returns these errors, rescaled so that nine in ten of some rows lie in their bands.

        A kind with enough of these rows gets an error of its own. The other kinds have too few, so
        their errors are all multiplied by the same factor.
        """
        factor = _quantile(score_R / np.maximum(self.of(kinds_R), 1e-6))
        kinds = self.of_scores(score_R, kinds_R).kinds
        return Errors(factor * self.every, np.where(np.isnan(kinds), factor * self.kinds, kinds))


def _quantile(scores: np.ndarray) -> float:
    rank = min(len(scores), int(np.ceil(COVERED * (len(scores) + 1))))
    return float(np.sort(scores)[rank - 1])


def scores(ratio_R: np.ndarray) -> np.ndarray:
    """Returns, for each row, the relative standard deviation whose 90 % band just holds it.

    ratio_R: measured over predicted seconds.
    """
    return np.abs(ratio_R - 1) / WIDTH


def of_training(
    graph: Any, states: Any, rows: network.Rows, traits_EYZ: np.ndarray
) -> Mapping[str, Errors]:
    """Returns the errors on the training rows themselves, which are too small if rows are few."""
    device = plain_device(jax.numpy.asarray(traits_EYZ[:, rows.device_R]))
    errors = Errors.of_rows(
        _ratio(graph, states, rows, device).mean(0), np.asarray(rows.inputs.kinds_R)
    )
    return {"known": errors, "away": errors}


def folds(
    rows: network.Rows,
    cards: Mapping[str, DeviceCard],
    hashes: Sequence[str],
    rng: np.random.Generator,
    *,
    steps: int,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
) -> Mapping[str, Errors]:
    """Trains further networks, each without some programs and one device, and tests them on these.

    Args: cards: {name of a device: its card}, in the order of the indices in rows.device_R. hashes:
      the structural hash of each row's record.
    Returns: {'known': errors on known devices, 'away': what each unit of distance adds to them}.
    """
    names, devices_R = list(cards), np.asarray(rows.device_R)
    out = rng.permutation(len(names))[:_FOLDS] if len(names) > 1 else np.zeros(0, int)
    more = 0 if len(names) >= _FOLDS else _WITH_ALL
    out = np.concatenate([out, np.full(more, -1)])  # -1: no device
    different, program_R = np.unique(np.array(hashes), return_inverse=True)
    part_R = (rng.permutation(len(different)) % _PARTS)[program_R]
    held_ER = part_R[None] == np.arange(len(out))[:, None]
    use_EY = np.ones((len(out), len(names)))
    use_EY[np.flatnonzero(out >= 0), out[out >= 0]] = 0
    graph, states, traits_EYZ = network.fit(
        rows, use_EY, (~held_ER).astype(float), seed=seed, steps=steps, progress=progress
    )
    distance_E, kinds_R = np.ones(len(out)), np.asarray(rows.inputs.kinds_R)
    traits_ERZ = traits_EYZ[:, devices_R]
    for member, left in enumerate(out):
        if left >= 0:
            others = np.delete(np.arange(len(names)), left)
            have = [cards[names[int(i)]] for i in others]
            card = cards[names[left]]
            weights_RY = blend(card, have, kinds_R)
            unseen_R = devices_R == left
            traits_ERZ[member, unseen_R] = weights_RY[unseen_R] @ traits_EYZ[member, others]
            distance_E[member] = distance(card, have)
    unseen_ER = devices_R[None] == out[:, None]
    score_ER = scores(_ratio(graph, states, rows, plain_device(jax.numpy.asarray(traits_ERZ))))
    kinds_ER = np.broadcast_to(kinds_R, score_ER.shape)
    known_ER = held_ER & ~unseen_ER
    if not known_ER.any():
        known_ER = ~unseen_ER  # fewer programs than parts
    known = Errors.of_scores(score_ER[known_ER], kinds_ER[known_ER])
    if not unseen_ER.any():
        return {"known": known, "away": known}  # one device: nothing says how devices differ
    beyond_ER = np.maximum(score_ER - known.of(kinds_ER), 0) / distance_E[:, None]
    away = [
        Errors.of_scores(beyond_R[unseen_R], kinds_R[unseen_R])
        for beyond_R, unseen_R in zip(beyond_ER, unseen_ER, strict=True)
        if unseen_R.any()
    ]
    return {"known": known, "away": Errors.typical(away)}


def _ratio(graph: Any, states: Any, rows: network.Rows, device: Any) -> np.ndarray:
    """Returns measured over predicted seconds, (E, R)."""
    offsets, sharpness = network.offsets_of(graph, states, rows.inputs, device)
    return np.exp(-np.asarray(network.errors_of(rows, offsets, sharpness), np.float64))


def leave_out(rows: int) -> np.ndarray:
    """Returns (fits, rows): 1 where a fit reads a row, else 0.

    The first fit reads all rows. If there are 8 rows or more, four further fits each leave out a
    different quarter of them, so that errors on unread rows can be observed.
    """
    place = np.arange(rows) % 4
    parts = [place != part for part in range(4)] if rows >= 8 else []
    return np.stack([np.ones(rows, bool), *parts]).astype(float)


# ---- ranges of the training rows
#
# The kinds, data types, sizes and cards of the training rows. A prediction for a record or a card
# far beyond them carries a warning (predictor.FarFromTraining).


MARGIN = 4.0  # factor by which a value may be beyond the training's range without a warning
_SIZES = (
    "flops",
    "bytes_read",
    "bytes_written",
    "batch",
    "m",
    "n",
    "k",
    "elements",
    "rows",
    "width",
)


@dataclasses.dataclass(frozen=True)
class Ranges:
    """What some rows have: kinds, opcodes and data types, and ranges of their sizes and cards.

    pairs: the combinations "KIND DTYPE" that occur. The training has a `Ranges`, and so has each
    device that the predictor was adapted to, for its own rows. A data type that occurs only in the
    latter counts as known on that device alone, and only for the kinds of records that have it.
    """

    kinds: Sequence[str]
    opcodes: Sequence[str]
    dtypes: Sequence[str]
    sizes: Mapping[str, Sequence[float]]
    cards: Mapping[str, Sequence[float]]
    pairs: Sequence[str] = ()

    @classmethod
    def of(cls, data: Dataset, rows: Programs) -> "Ranges":
        """Returns the ranges of these rows."""
        table = np.array([record.features for record in data.records])
        sizes = {name: _range(table[:, FEATURES.index(name)]) for name in _SIZES}
        return cls(
            sorted({record.kind for record in data.records}),
            [OPCODES[i] for i in np.flatnonzero(_opcodes(rows))],
            sorted(set(rows.dtypes)),
            sizes,
            {
                name: _range(np.array([_of_card(data.cards[d], t)[name] for d, t in used]))
                for used in [sorted(set(zip(data.devices, rows.dtypes, strict=True)))]
                for name in ("FLOP/s", "bytes/s of memory", "SMs", "bytes of L2")
            },
            sorted({f"{record.kind} {record.dtype}" for record in data.records}),
        )

    def joined(self, other: "Ranges | None") -> "Ranges":
        """Returns the union of both ranges; `other` may be None."""
        if other is None:
            return self
        values: dict[str, Any] = {
            name: sorted({*getattr(self, name), *getattr(other, name)})
            for name in ("kinds", "opcodes", "dtypes", "pairs")
        }
        for name in ("sizes", "cards"):
            ranges, their = getattr(self, name), getattr(other, name)
            values[name] = {key: _wider(ranges[key], their[key]) for key in ranges}
        return Ranges(**values)

    def beyond(
        self,
        rows: Programs,
        records: Sequence[OpRecord],
        card: DeviceCard,
        *,
        known: bool,
        learnt: "Ranges | None" = None,
    ) -> list[str]:
        """Returns a sentence for each property that is unlike the training; [] if there is none.

        known: whether the predictor knows this device by its name; its card is then not compared.
        learnt: ranges of the rows that this device, or the device with the same chip, was adapted
        to.
        """
        sentences, near = [], self.joined(learnt)
        for what, asked, seen in (
            ("kind", {record.kind for record in records}, near.kinds),
            ("operation", {OPCODES[i] for i in np.flatnonzero(_opcodes(rows))}, near.opcodes),
            ("data type", set(rows.dtypes), near.dtypes),
        ):
            for name in sorted(asked - set(seen)):
                sentences.append(f"the training had no {what} {name}")
        pairs = {(r.kind, r.dtype) for r in records if r.dtype not in self.dtypes}
        for kind, dtype in sorted(pairs):
            if dtype in near.dtypes and f"{kind} {dtype}" not in near.pairs:
                sentences.append(f"the training had no {kind} of data type {dtype}")
        table = np.array([record.features for record in records])
        for name, (low, high) in near.sizes.items():
            values = table[:, FEATURES.index(name)]
            far = (values > high * MARGIN) | ((values > 0) & (values < low / MARGIN))
            if far.any():
                sentences.append(
                    f"{name} of {far.sum()} operations, e.g. {values[far][0]:.4g}, is more than "
                    f"{MARGIN:g} times beyond the training's {low:.4g} to {high:.4g}"
                )
        for dtype in () if known else sorted(set(rows.dtypes)):
            for name, value in _of_card(card, dtype).items():
                low, high = near.cards[name]
                if not low / MARGIN <= value <= high * MARGIN:
                    sentences.append(
                        f"{name} of {card.name}, {value:.4g}, is more than {MARGIN:g} times beyond "
                        f"the training's {low:.4g} to {high:.4g}"
                    )
        return list(dict.fromkeys(sentences))


def _opcodes(rows: Programs) -> np.ndarray:
    return (rows.leaves_RNC[..., : len(OPCODES)] > 0).any((0, 1))


def _wider(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Returns the range that covers both; the range (0, 0) stands for no value."""
    real = [each for each in (one, other) if each[1] > 0] or [(0.0, 0.0)]
    return min(low for low, _ in real), max(high for _, high in real)


def _range(values: np.ndarray) -> tuple[float, float]:
    real = values[values > 0]
    return (float(real.min()), float(real.max())) if len(real) else (0.0, 0.0)


def _of_card(card: DeviceCard, dtype: str) -> dict[str, float]:
    return {
        "FLOP/s": peak(card, dtype),
        "bytes/s of memory": card.memory_bytes_per_s,
        "SMs": float(card.sms),
        "bytes of L2": float(card.l2_bytes),
    }
