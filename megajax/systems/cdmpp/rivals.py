"""Simple predictors that a learned one must beat, on the same rows and splits.

Each is a function (training rows, rows to predict) -> seconds. None reads a name of a device; the
times and numbers that they read are those of the predictor (physics.py).
"""

from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import nnls

from megajax.core.errors import UserError
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.physics import INPUTS, TIMES, Programs, programs, times

Rival = Callable[[Dataset, Dataset], np.ndarray]


def roofline(train: Dataset, test: Dataset) -> np.ndarray:
    """Returns the card's floor of each row; nothing is fitted."""
    return np.array([r.floor_s(test.cards[d]) for r, d in _pairs(test)])


def fitted_roofline(train: Dataset, test: Dataset) -> np.ndarray:
    """Returns a launch, work at the peak, bytes at the bandwidth and transcendentals, weighted.

    The four weights of each kind are not negative and minimise the squared relative error.
    """
    seconds = np.zeros(len(test))
    for kind in _kinds(test):
        mine, other = _of(train, kind), _of(test, kind)
        data = train[mine]
        weights, _ = nnls(_terms(data) / data.seconds[:, None], np.ones(len(data)))
        seconds[other] = _terms(test[other]) @ weights
    return np.maximum(seconds, 1e-9)


def regression(train: Dataset, test: Dataset) -> np.ndarray:
    """Returns a linear regression of log seconds on logarithms, one a kind, lightly damped."""
    seconds = np.zeros(len(test))
    for kind in _kinds(test):
        mine, other = _of(train, kind), _of(test, kind)
        x, y = _columns(train[mine]), np.log(train.seconds[mine])
        middle, spread = x.mean(0), x.std(0) + 1e-6
        z = (x - middle) / spread
        slope = np.linalg.solve(z.T @ z + np.eye(z.shape[1]), z.T @ (y - y.mean()))
        seconds[other] = np.exp(((_columns(test[other]) - middle) / spread) @ slope + y.mean())
    return seconds


def trees(train: Dataset, test: Dataset) -> np.ndarray:
    """Returns gradient-boosted trees on log of seconds over the floor, one a kind.

    Raises: UserError if scikit-learn is not installed; megajax itself does not need it.
    """
    try:
        from sklearn.ensemble import (  # pyrefly: ignore[missing-import]
            HistGradientBoostingRegressor,
        )
    except ImportError as error:
        raise UserError("the rival 'trees' needs scikit-learn, which is not installed") from error
    seconds = np.zeros(len(test))
    for kind in _kinds(test):
        mine, other = _of(train, kind), _of(test, kind)
        model = HistGradientBoostingRegressor(
            max_iter=200, learning_rate=0.1, loss="absolute_error", random_state=0
        )
        data, rows = train[mine], test[other]
        model.fit(_columns(data), np.log(data.seconds / roofline(data, data)))
        seconds[other] = roofline(rows, rows) * np.exp(model.predict(_columns(rows)))
    return seconds


def rescaled(predicted: np.ndarray, seconds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns predictions times the median ratio of some measured rows: how a rival adapts."""
    return predicted * np.median(seconds[rows] / predicted[rows])


RIVALS: Mapping[str, Rival] = {
    "roofline": roofline,
    "fitted roofline": fitted_roofline,
    "regression": regression,
    "trees": trees,
}


def _pairs(data: Dataset) -> zip:
    return zip(data.records, data.devices, strict=True)


def _kinds(data: Dataset) -> list[str]:
    return sorted({record.kind for record in data.records})


def _of(data: Dataset, kind: str) -> np.ndarray:
    found = np.flatnonzero([record.kind == kind for record in data.records])
    if not len(found):
        raise UserError(f"kind {kind} has no row in the training of a rival")
    return found


def _terms(data: Dataset) -> np.ndarray:
    work = [
        (
            1e-5,
            r.flops / max(data.cards[d].flops.values()),
            r.nbytes / data.cards[d].memory_bytes_per_s,
            r["transcendentals"] / max(data.cards[d].flops.values()),
        )
        for r, d in _pairs(data)
    ]
    return np.array(work)


def _columns(data: Dataset) -> np.ndarray:
    """Returns numbers of programs and logarithms of times and attributes of cards."""
    rows = programs(data.records)
    found = np.zeros((len(data), INPUTS + TIMES + 5))
    devices = np.array(data.devices)
    for name in sorted(set(data.devices)):
        chosen, card = devices == name, data.cards[name]
        part: Programs = rows[chosen]
        timed = times(part, card)
        peak = max(card.flops.values())
        of_card = np.log(
            [peak, card.memory_bytes_per_s, card.sms, card.l2_bytes, card.clock_hz or 1]
        )
        found[chosen] = np.concatenate(
            [part.inputs_RX, timed.general_RG, np.tile(of_card, (len(part), 1))], -1
        )
    return found
