"""Rivals: simple models of times that the learned predictor must beat, on the same rows and splits.

A rival is a function that takes training rows and returns a function (rows to predict) -> seconds.
Rivals do not use the names of devices; they read the same times and features as the predictor
(physics.py). A rival fits a separate model for each kind of record. For a kind without training
rows it uses one that is fitted on all kinds together, and `Fitted.unseen` lists such kinds.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.cost.record import OpRecord
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.physics import INPUTS, TIMES, Programs, programs, times

Predict = Callable[[Dataset], np.ndarray]
Rival = Callable[[Dataset], Predict]


def roofline(train: Dataset) -> Predict:
    """Returns the card's floor of each row; nothing is fitted."""
    return _floors


def fitted_roofline(train: Dataset) -> Predict:
    """Returns a roofline whose times are added up with fitted weights.

    The four times are a launch (a constant), the FLOPs at the peak, the bytes at the bandwidth, and
    the transcendental functions at the peak. Their weights, four for each kind, are not negative
    and minimise the squared relative error.
    """

    def fit(data: Dataset) -> Predict:
        weights, _ = nnls(_terms(data) / data.seconds[:, None], np.ones(len(data)))
        return lambda rows: np.maximum(_terms(rows) @ weights, 1e-9)

    return _by_kind(train, fit)


def regression(train: Dataset) -> Predict:
    """Returns a ridge regression of log seconds on logarithms, one for each kind."""

    def fit(data: Dataset) -> Predict:
        x, y = _columns(data), np.log(data.seconds)
        middle, spread = x.mean(0), x.std(0) + 1e-6
        z = (x - middle) / spread
        slope = np.linalg.solve(z.T @ z + np.eye(z.shape[1]), z.T @ (y - y.mean()))
        # Far from the training rows a linear model extrapolates without bound. So predictions are
        # limited to 20 times (e^3) the longest, and a 20th of the shortest, time of the training.
        low, high = y.min() - 3, y.max() + 3
        return lambda rows: np.exp(
            np.clip(((_columns(rows) - middle) / spread) @ slope + y.mean(), low, high)
        )

    return _by_kind(train, fit)


def trees(train: Dataset) -> Predict:
    """Returns gradient-boosted trees for log(seconds / floor), one model for each kind.

    Raises: UserError if scikit-learn is not installed; megajax itself does not need it.
    """
    try:
        from sklearn.ensemble import (  # pyrefly: ignore[missing-import]
            HistGradientBoostingRegressor,
        )
    except ImportError as error:
        raise UserError(
            "the rival 'trees' needs scikit-learn, which is not installed: uv sync --group rivals"
        ) from error

    def fit(data: Dataset) -> Predict:
        model = HistGradientBoostingRegressor(
            max_iter=200, learning_rate=0.1, loss="absolute_error", random_state=0
        )
        model.fit(_columns(data), np.log(data.seconds / _floors(data)))
        return lambda rows: _floors(rows) * np.exp(model.predict(_columns(rows)))

    return _by_kind(train, fit)


RIVALS: Mapping[str, Rival] = {
    "roofline": roofline,
    "fitted roofline": fitted_roofline,
    "regression": regression,
    "trees": trees,
}


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A fitted rival with the methods of Predictor; it has no band, so sigma is NaN.

    kinds: the kinds of the training rows. factors: {name of the card: factor} of adapted devices.
    """

    model: Predict
    kinds: frozenset[str]
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, rival: Rival, train: Dataset) -> "Fitted":
        """Returns a rival fitted on the rows whose time is known."""
        train = train.labelled
        return cls(rival(train), frozenset(record.kind for record in train.records))

    def predict(
        self, records: Sequence[OpRecord], card: DeviceCard
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (seconds, NaN) of each record."""
        unknown = np.full(len(records), np.nan)
        rows = Dataset(records, unknown, [card.name] * len(records), {card.name: card})
        return self.model(rows) * self.factors.get(card.name, 1.0), unknown

    def adapt(self, dataset: Dataset) -> "Fitted":
        """Returns the rival with one factor for each device: the median of measured / predicted."""
        factors = dict(self.factors)
        for device in sorted(set(dataset.devices)):
            rows, card = dataset.of(device).labelled, dataset.cards[device]
            plain = dataclasses.replace(self, factors={}).predict(rows.records, card)[0]
            factors[card.name] = float(np.median(rows.seconds / plain))
        return dataclasses.replace(self, factors=factors)

    def unseen(self, records: Sequence[OpRecord]) -> list[str]:
        """Returns the kinds of these records that have no model of their own."""
        return sorted({record.kind for record in records} - self.kinds)


def _by_kind(train: Dataset, fit: Callable[[Dataset], Predict]) -> Predict:
    """Returns a function that predicts each row with the model of its kind.

    A kind without training rows uses a model of all kinds together. Models are fitted at first use.
    """
    if not len(train):
        raise UserError("a rival needs training rows with measured seconds; there is none")
    models: dict[str, Predict] = {}
    kinds = np.array([record.kind for record in train.records])

    def predict(rows: Dataset) -> np.ndarray:
        seconds = np.zeros(len(rows))
        asked = np.array([record.kind for record in rows.records])
        for kind in sorted(set(asked.tolist())):
            is_trained = kinds == kind
            key = kind if is_trained.any() else ""
            if key not in models:
                models[key] = fit(train[is_trained] if key else train)
            is_asked = asked == kind
            seconds[is_asked] = models[key](rows[is_asked])
        return seconds

    return predict


def _floors(data: Dataset) -> np.ndarray:
    return np.array([max(r.floor_s(data.cards[d]), 1e-12) for r, d in _pairs(data)])


def _pairs(data: Dataset) -> zip:
    return zip(data.records, data.devices, strict=True)


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
    return np.array(work).reshape(-1, 4)


def _columns(data: Dataset) -> np.ndarray:
    """Returns numbers of programs and logarithms of times and attributes of cards."""
    rows = programs(data.records)
    columns = np.zeros((len(data), INPUTS + TIMES + 5))
    devices = np.array(data.devices)
    for name in sorted(set(data.devices)):
        chosen, card = devices == name, data.cards[name]
        part: Programs = rows[chosen]
        timed = times(part, card)
        peak = max(card.flops.values())
        of_card = np.log(
            [peak, card.memory_bytes_per_s, card.sms, card.l2_bytes, card.clock_hz or 1]
        )
        columns[chosen] = np.concatenate(
            [part.inputs_RX, timed.general_RG, np.tile(of_card, (len(part), 1))], -1
        )
    return columns
