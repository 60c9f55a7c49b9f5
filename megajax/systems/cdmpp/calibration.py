"""Estimates how far predictions are from measured times, which sets the width of their 90 % bands.

The estimate is a relative standard deviation for each kind of record. It is chosen as in conformal
prediction: networks predict rows that they have not learnt from, and the estimate is the number for
which nine in ten of the relative errors are within 1.645 times it. A band of that half-width then
covers nine in ten rows that are similar.

On a device without rows the estimate grows with the distance to the nearest known device
(nearness.py). To find how fast, further networks are each trained without one device. The excess of
the errors on that device over those on known devices is divided by its distance from the devices
that the network had. (If the distance were ignored, the band of an A100 with more memory would be
as wide as that of a GPU of another generation.) The median over the left-out devices is used,
because a single device whose rows were measured in two sessions at different clocks would otherwise
set the band of every device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.core.hardware import DeviceCard
from megajax.cost.record import KINDS
from megajax.systems.cdmpp import nearness, train
from megajax.systems.cdmpp.network import plain_device

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
        own = self.kinds[kinds_R]
        return np.where(np.isnan(own), self.every, own)

    def plus(self, other: "Errors", times: float) -> "Errors":
        """Returns these errors plus `times` times the other ones, kind by kind."""
        every = np.full(len(KINDS), self.every), np.full(len(KINDS), other.every)
        own = [
            np.where(np.isnan(e.kinds), default, e.kinds)
            for e, default in zip((self, other), every, strict=True)
        ]
        return Errors(self.every + times * other.every, own[0] + times * own[1])

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
        own = self.of_scores(score_R, kinds_R).kinds
        return Errors(factor * self.every, np.where(np.isnan(own), factor * self.kinds, own))


def _quantile(scores: np.ndarray) -> float:
    rank = min(len(scores), int(np.ceil(COVERED * (len(scores) + 1))))
    return float(np.sort(scores)[rank - 1])


def scores(ratio_R: np.ndarray) -> np.ndarray:
    """Returns, for each row, the relative standard deviation whose 90 % band just holds it.

    ratio_R: measured over predicted seconds.
    """
    return np.abs(ratio_R - 1) / WIDTH


def of_training(
    graph: Any, states: Any, rows: train.Rows, traits_EYZ: np.ndarray
) -> Mapping[str, Errors]:
    """Returns the errors on the training rows themselves, which are too small if rows are few."""
    device = plain_device(jax.numpy.asarray(traits_EYZ[:, rows.device_R]))
    found = Errors.of_rows(
        _ratio(graph, states, rows, device).mean(0), np.asarray(rows.inputs.kinds_R)
    )
    return {"known": found, "away": found}


def folds(
    rows: train.Rows,
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
    graph, states, traits_EYZ = train.fit(
        rows, use_EY, (~held_ER).astype(float), seed=seed, steps=steps, progress=progress
    )
    distance_E, kinds_R = np.ones(len(out)), np.asarray(rows.inputs.kinds_R)
    traits_ERZ = traits_EYZ[:, devices_R]
    for member, left in enumerate(out):
        if left >= 0:
            others = np.delete(np.arange(len(names)), left)
            have = [cards[names[int(i)]] for i in others]
            card = cards[names[left]]
            weights_RY = nearness.blend(card, have, kinds_R)
            unseen_R = devices_R == left
            traits_ERZ[member, unseen_R] = weights_RY[unseen_R] @ traits_EYZ[member, others]
            distance_E[member] = nearness.distance(card, have)
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


def _ratio(graph: Any, states: Any, rows: train.Rows, device: Any) -> np.ndarray:
    """Returns measured over predicted seconds, (E, R)."""
    offsets, sharpness = train.offsets_of(graph, states, rows.inputs, device)
    return np.exp(-np.asarray(train.errors_of(rows, offsets, sharpness), np.float64))


def leave_out(rows: int) -> np.ndarray:
    """Returns (fits, rows): 1 where a fit reads a row, else 0.

    The first fit reads all rows. If there are 8 rows or more, four further fits each leave out a
    different quarter of them, so that errors on unread rows can be observed.
    """
    place = np.arange(rows) % 4
    parts = [place != part for part in range(4)] if rows >= 8 else []
    return np.stack([np.ones(rows, bool), *parts]).astype(float)
