"""How wrong predictions are, by kind: of known devices, of unseen and of adapted ones.

The scale is conformal: of the relative errors of rows that a network has not learnt from, nine in
ten are within 1.645 of it, so the band of that width covers nine in ten of like rows.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.cost.record import KINDS
from megajax.systems.cdmpp import train
from megajax.systems.cdmpp.network import plain_device
from megajax.systems.cdmpp.physics import gpu

COVERED, WIDTH = 0.9, 1.645
_ENOUGH = 20  # rows of a kind for an error of its own
_FOLDS = 5
_HELD = 0.05  # of the rows, for the errors of known devices


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative standard deviations: of all rows, and of kinds (NaN where too few rows are)."""

    every: float
    kinds: np.ndarray

    def of(self, kinds_R: np.ndarray) -> np.ndarray:
        """Returns the deviation of each row."""
        own = self.kinds[kinds_R]
        return np.where(np.isnan(own), self.every, own)

    @classmethod
    def of_rows(cls, ratio_R: np.ndarray, kinds_R: np.ndarray) -> "Errors":
        """Returns the errors of rows by their measured over predicted seconds."""
        wrong = np.abs(ratio_R - 1)
        kinds = [
            _scale(wrong[kinds_R == k]) if (kinds_R == k).sum() >= _ENOUGH else np.nan
            for k in range(len(KINDS))
        ]
        return cls(_scale(wrong), np.array(kinds))


def _scale(wrong: np.ndarray) -> float:
    rank = min(len(wrong), int(np.ceil(COVERED * (len(wrong) + 1))))
    return float(np.sort(wrong)[rank - 1] / WIDTH)


def of_training(
    graph: Any, states: Any, rows: train.Rows, traits_EYZ: np.ndarray
) -> Mapping[str, Errors]:
    """Returns the errors of the training rows themselves: too small where a fit has few rows."""
    device = plain_device(jax.numpy.asarray(traits_EYZ[:, rows.device_R]))
    found = Errors.of_rows(
        _ratio(graph, states, rows, device).mean(0), np.asarray(rows.inputs.kinds_R)
    )
    return {"known": found, "unseen": found}


def folds(
    rows: train.Rows,
    names: Sequence[str],
    rng: np.random.Generator,
    *,
    steps: int,
    seed: int,
    prior: Callable[[tuple[float, float] | None, Sequence[str]], np.ndarray],
    progress: Callable[[int, float], None] | None = None,
) -> Mapping[str, Errors]:
    """Returns errors of known and of unseen devices, from networks that leave devices out.

    prior: gives the weights of the devices' traits for a device by its `gpu`.
    """
    out = rng.permutation(len(names))[:_FOLDS] if len(names) > 1 else np.array([-1])
    held_R = rng.random(len(rows.target_R)) < _HELD
    use_EY = np.ones((len(out), len(names)))
    for member, left in enumerate(out):
        use_EY[member, left] = 0 if left >= 0 else 1
    use_ER = np.broadcast_to(~held_R, (len(out), len(held_R))).astype(float)
    graph, states, traits_EYZ = train.fit(
        rows, use_EY, use_ER, seed=seed, steps=steps, progress=progress
    )
    for member, left in enumerate(out):
        if left >= 0:
            others = np.delete(np.arange(len(names)), left)
            weights = prior(gpu(names[left]), [names[int(i)] for i in others])
            traits_EYZ[member, left] = weights @ traits_EYZ[member, others]
    device = plain_device(jax.numpy.asarray(traits_EYZ[:, rows.device_R]))
    ratio_ER = _ratio(graph, states, rows, device)
    kinds_R = np.asarray(rows.inputs.kinds_R)
    unseen_ER = np.asarray(rows.device_R)[None] == out[:, None]
    known_ER = held_R & ~unseen_ER
    groups = {"known": known_ER, "unseen": unseen_ER if unseen_ER.any() else known_ER}
    kinds_ER = np.broadcast_to(kinds_R, ratio_ER.shape)
    if not known_ER.any():
        groups["known"] = ~unseen_ER
    return {name: Errors.of_rows(ratio_ER[who], kinds_ER[who]) for name, who in groups.items()}


def _ratio(graph: Any, states: Any, rows: train.Rows, device: Any) -> np.ndarray:
    """Returns measured over predicted seconds, (E, R)."""
    offsets, sharpness = train.offsets_of(graph, states, rows.inputs, device)
    return np.exp(-np.asarray(train.errors_of(rows, offsets, sharpness), np.float64))


def leave_out(rows: int) -> np.ndarray:
    """Returns which rows a fit reads, (fits, rows): first all, then all but one in four."""
    place = np.arange(rows) % 4
    parts = [place != part for part in range(4)] if rows >= 8 else []
    return np.stack([np.ones(rows, bool), *parts]).astype(float)
