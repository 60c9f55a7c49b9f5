"""The predictor: seconds of a launched operation on a device, by networks fitted on measured times.

A prediction is never below the roofline of the device's card, and never longer for a card with more
FLOP/s, bandwidth, SMs or L2 (network.py). A device is known if its rows were in the training, or if
the predictor was adapted to it. Each known device has traits, a small vector of fitted numbers,
which is found by the name of its card; `basis` says so. For any other device the name has no part
in a prediction: the predictor uses a weighted mean of the traits of known devices, in which those
with a similar compute capability and power limit weigh most (calibration.py).
"""

import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.cost.record import FEATURES, KINDS, LEAF, LEAF_FEATURES, OPCODES, OpRecord
from megajax.systems.cdmpp import calibration, network, neusight
from megajax.systems.cdmpp.calibration import Errors, Ranges
from megajax.systems.cdmpp.dataset import (
    Dataset,
    card_as_json,
    card_of_json,
    load_arrays,
    save_arrays,
)
from megajax.systems.cdmpp.network import Device, Network, Scale, above, combine
from megajax.systems.cdmpp.physics import (
    INPUTS,
    TILES,
    TIMES,
    Programs,
    Times,
    check_card,
    programs,
    times,
)

# ---- file of a predictor
#
# The file of a predictor: an npz archive without pickles.


VERSION = 3
DEFAULT = pathlib.Path(__file__).with_name("default.npz")
_OWN = ("traits", "shift", "offsets")
_SCALE = ("mean", "deviation", "low", "high")


def _layout() -> list[Any]:
    """Returns the names that give each weight of the networks its meaning.

    A file that was written with other names belongs to another version of megajax.
    """
    return [VERSION, FEATURES, KINDS, OPCODES, LEAF_FEATURES, TILES, TIMES]


def save(predictor: Any, path: str | os.PathLike[str]) -> None:
    """Writes a predictor."""
    leaves = jax.tree.leaves(predictor.states)
    names = list(predictor.devices)
    arrays = {f"weight{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    arrays |= {f"scale {part}": getattr(predictor.scale, part) for part in _SCALE}
    for part in _OWN:
        arrays[f"device {part}"] = np.stack(
            [np.asarray(getattr(predictor.devices[name], part), np.float32) for name in names]
        )
    head = {
        "layout": _layout(),
        "weights": len(leaves),
        "devices": names,
        "trained": list(predictor.trained),
        "cards": [card_as_json(card, name) for name, card in predictor.cards.items()],
        "ranges": dataclasses.asdict(predictor.ranges),
        "learnt": {name: dataclasses.asdict(ranges) for name, ranges in predictor.learnt.items()},
        "errors": {k: [e.every, e.kinds.tolist()] for k, e in predictor.errors.items()},
        "facts": dict(predictor.facts),
    }
    save_arrays(path, {"head": np.array(json.dumps(head)), **arrays})


def load(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Returns the fields of a predictor. Raises: UserError if the file cannot be one."""
    if path is None and not DEFAULT.exists():
        raise UserError("this megajax ships no trained predictor: name a file, or fit one")
    path = DEFAULT if path is None else path
    arrays = load_arrays(path, "predictor")
    try:
        head = json.loads(str(arrays["head"]))
        if head["layout"] != json.loads(json.dumps(_layout())):
            raise UserError(f"{path} is of another version of megajax: fit the predictor again")
        scale = Scale(*(arrays[f"scale {part}"] for part in _SCALE))
        graph, states = _network(arrays, head)
        parts = [arrays[f"device {part}"] for part in _OWN]
        devices = {name: Device(*(p[i] for p in parts)) for i, name in enumerate(head["devices"])}
        return {
            "graph": graph,
            "states": states,
            "scale": scale,
            "ranges": Ranges(**head["ranges"]),
            "devices": devices,
            "learnt": {name: Ranges(**ranges) for name, ranges in head.get("learnt", {}).items()},
            "cards": dict(card_of_json(entry) for entry in head["cards"]),
            "errors": {k: Errors(e, np.array(kinds)) for k, (e, kinds) in head["errors"].items()},
            "trained": head["trained"],
            "facts": head["facts"],
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no predictor of megajax, or it is damaged: {error}") from error


def _network(arrays: dict[str, np.ndarray], head: dict[str, Any]) -> tuple[Any, Any]:
    leaves = [arrays[f"weight{i}"] for i in range(head["weights"])]
    module = nnx.eval_shape(lambda: Network(INPUTS, LEAF, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    structure = jax.tree.structure(state)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    if [leaf.shape[1:] for leaf in leaves] != shapes or not all(
        np.isfinite(x).all() for x in leaves
    ):
        raise ValueError("the weights are not those of the network")
    return graph, jax.tree.unflatten(structure, leaves)


# ---- predictor


MEMBERS = 3  # networks, whose predictions are averaged
STEPS = 2000  # training steps of these networks
FOLD_STEPS = 500  # training steps of the further networks that set the width of bands
ROWS_PER_GROUP = 20_000  # most rows of one device and kind that are used; of more, see `sample`
# Members of a card that a prediction reads.
_NUMBERS = (
    "flops",
    "memory_bytes_per_s",
    "sms",
    "l2_bytes",
    "clock_hz",
    "capability",
    "power_w",
)
_CHUNK = 4096  # rows of one call of the network
_MOST_ADAPTED = 128  # most rows of a kind that an adaptation reads, to take seconds on one core


class FarFromTraining(UserWarning):
    """A prediction for a record or a device unlike everything in the training."""


@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """A fitted predictor of times.

    graph, states: the networks (structure and weights), whose predictions are averaged; the weights
    have a leading dimension of networks. scale: mean and deviation of the networks' inputs over the
    training rows. ranges: sizes, kinds and data types of the training rows, beyond which
    predictions warn. devices: what was fitted for each known device. cards: the cards of the known
    devices. errors: relative errors by kind of record: those of known devices ('known'), those of
    adapted ones ('adapted NAME'), and what each unit of distance to the nearest known device adds
    ('away'). trained: names of the devices of `fit`. facts: source, date and commit of the
    training. learnt: {name of an adapted device: the ranges of the rows that it was adapted to}.
    """

    graph: Any
    states: Any
    scale: network.Scale
    ranges: Ranges
    devices: Mapping[str, Device]
    cards: Mapping[str, DeviceCard]
    errors: Mapping[str, calibration.Errors]
    trained: Sequence[str]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learnt: Mapping[str, Ranges] = dataclasses.field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        dataset: Dataset,
        *,
        seed: int = 0,
        members: int = MEMBERS,
        steps: int = STEPS,
        fold_steps: int = FOLD_STEPS,
        progress: Callable[[str, int, float], None] | None = None,
    ) -> Self:
        """Returns a predictor fitted on the rows of a data set; rows without a time are left out.

        If a device and kind has more than ROWS_PER_GROUP rows, a sample of them is used.
        Args: members: networks whose predictions are averaged. steps: their training steps.
          fold_steps: training steps of further networks, which leave programs and devices out;
          their errors on these give the width of the band. 0: the errors of the training rows give
          it. progress: called with the part ('members', 'errors'), the step and the loss.
        Raises: UserError if no row has a time, a card lacks SMs or L2, or a number is too small.
        """
        _check_at_least(1, members=members, steps=steps)
        _check_at_least(0, fold_steps=fold_steps)
        data = sample(dataset.labelled.without_duplicates(), ROWS_PER_GROUP, seed)
        if not len(data):
            raise UserError(
                f"a fit needs rows with measured seconds: of {len(dataset)} rows none has them"
            )
        names = sorted(set(data.devices))
        rows = programs(data.records)
        scale = network.Scale.of(rows.inputs_RX)
        labelled = _rows(data, rows, names, scale)
        rng = np.random.default_rng(seed)
        everything = np.ones((members, len(data)))
        graph, states, traits_EYZ = network.fit(
            labelled,
            np.ones((members, len(names))),
            everything,
            seed=seed,
            steps=steps,
            progress=None if progress is None else lambda i, x: progress("members", i, x),
        )
        fold = None
        if fold_steps:
            fold = calibration.folds(
                labelled,
                {name: data.cards[name] for name in names},
                [record.hash for record in data.records],
                rng,
                steps=fold_steps,
                seed=seed + 1,
                progress=None if progress is None else lambda i, x: progress("errors", i, x),
            )
        plain = network.no_offsets(members)
        devices = {
            name: dataclasses.replace(plain, traits=traits_EYZ[:, i])
            for i, name in enumerate(names)
        }
        return cls(
            graph,
            states,
            scale,
            Ranges.of(data, rows),
            devices,
            {name: data.cards[name] for name in names},
            fold or calibration.of_training(graph, states, labelled, traits_EYZ),
            names,
            {**data.facts, "rows": len(data), "seed": seed},
        )

    def predict(
        self, records: Sequence[OpRecord], card: DeviceCard
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (seconds, sigma), float64 (records,), of one execution of each record.

        sigma is a standard deviation in seconds, which includes the noise of measured times: about
        nine of ten times lie within 1.645 sigma.
        Warns: FarFromTraining, once, with the properties that are unlike the training.
        Raises: UserError if the card lacks its SMs, L2, bandwidth or FLOP/s.
        """
        check_card(card.name, card)
        if not len(records):
            return np.zeros(0), np.zeros(0)
        rows = programs(records)
        name = self._name(card)
        twin = name or calibration.twin(card, {k: self.cards[k] for k in self._adapted})
        learnt = None if twin is None else self.learnt.get(twin)
        far = self.ranges.beyond(rows, records, card, known=name is not None, learnt=learnt)
        if self._adapted and twin is None and neusight.SOURCE in self.facts.values():
            far.append(
                f"the known times of {card.name} and its like are of PyTorch's kernels with their "
                "launch, so small kernels of compiled programs are predicted to be too slow"
            )
        if far:
            warnings.warn("; ".join(far), FarFromTraining, stacklevel=2)
        device, traits_ERZ = self._device(twin, card), None
        if twin is None:
            weights_RY = calibration.blend(card, self._trained_cards, rows.kinds_R)
            traits_ERZ = np.einsum("ry,yez->erz", weights_RY, self._traits_YEZ)
        logs_ER = self._logs(rows, card, device, traits_ERZ)
        seconds = np.maximum(np.exp(logs_ER.mean(0)), [record.floor_s(card) for record in records])
        errors = self.errors.get(f"adapted {twin}") or self.errors["known"]
        if twin is None:
            errors = self._unseen(card)
        elif name is None:
            far = calibration.distance(card, [self.cards[twin]])
            errors = errors.plus(self.errors["away"], far)
        # If the networks' predictions spread by more than the error that is expected of such rows,
        # the networks know little about this row, and the spread is the better estimate.
        relative = np.maximum(errors.of(rows.kinds_R), logs_ER.std(0))
        return seconds, seconds * relative

    def basis(self, card: DeviceCard) -> str:
        """Returns a sentence: what predictions for this card rest on, rows of it or its numbers."""
        name = self._name(card)
        if name is None:
            twin = calibration.twin(card, {k: self.cards[k] for k in self._adapted})
            text = f"There are no rows of {card.name}: it is predicted from its card's numbers"
            chip = "which has the same compute capability and about its power limit"
            return f"{text}." if twin is None else f"{text} and from rows of {twin}, {chip}."
        rows = self.cards[name]
        other = [
            field.name
            for field in dataclasses.fields(card)
            if field.name in _NUMBERS and getattr(card, field.name) != getattr(rows, field.name)
        ]
        called = card.name if name == card.name else f"{card.name} ({name})"
        text = f"The predictor has rows of {called}, which it found by that name"
        numbers = ", ".join(other)
        return f"{text}; the card asked for differs in {numbers}." if other else f"{text}."

    def learnt_from(self, card: DeviceCard) -> str | None:
        """Returns the device whose rows of compiled programs tell the times of a card: a device of
        its name, or one with its chip. None: there are none, and times are those of other GPUs or
        of another library's kernels."""
        adapted = {k: self.cards[k] for k in self._adapted}
        name = self._name(card)
        if name in adapted or (name and neusight.SOURCE not in self.facts.values()):
            return name
        return calibration.twin(card, adapted)

    @property
    def _trained_cards(self) -> list[DeviceCard]:
        return [self.cards[name] for name in self.trained]

    def _unseen(self, card: DeviceCard) -> calibration.Errors:
        """Returns the errors to expect on a device without rows."""
        far = calibration.distance(card, self._trained_cards)
        return self.errors["known"].plus(self.errors["away"], far)

    @property
    def kinds(self) -> Sequence[str]:
        """Kinds of records that were in the training."""
        return self.ranges.kinds

    def adapt(self, dataset: Dataset) -> "Predictor":
        """Returns a predictor that has also learnt some rows of new devices; it takes seconds.

        The networks stay as they are. Only the traits, shifts and offsets of each device are fitted
        (network.Device). The width of the device's bands comes from further fits, each of which
        leaves out a part of the rows and is judged on it.
        Raises: UserError if no row has a time.
        """
        data = dataset.labelled.without_duplicates()
        if not len(data):
            raise UserError(
                f"adapting needs rows with measured seconds: of {len(dataset)} rows none has them"
            )
        devices, cards, errors = dict(self.devices), dict(self.cards), dict(self.errors)
        learnt = dict(self.learnt)
        for name in sorted(set(data.devices)):
            part = sample(data.of(name), _MOST_ADAPTED, 0)
            rows = programs(part.records)
            learnt[name] = Ranges.of(part, rows).joined(learnt.get(name))
            labelled = _rows(part, rows, [name], self.scale)
            prior = self._device(name if name in self.devices else None, data.cards[name])
            folds = calibration.leave_out(len(part))
            fitted = jax.tree.map(
                np.asarray, network.adapt(self.graph, self.states, labelled, prior.traits, folds)
            )
            devices[name] = jax.tree.map(lambda leaf: leaf[0], fitted)
            cards[name] = data.cards[name]
            logs = [
                self._logs(rows, data.cards[name], jax.tree.map(lambda leaf, i=i: leaf[i], fitted))
                for i in range(1, len(folds))
            ]
            if logs:
                out = np.argmin(folds[1:], 0)  # the fit that has not read a row
                logs_R = np.stack(logs).mean(1)[out, np.arange(len(part))]
                score_R = calibration.scores(np.exp(np.log(part.seconds) - logs_R))
                errors[f"adapted {name}"] = self.errors["known"].rescaled(score_R, rows.kinds_R)
            else:
                errors[f"adapted {name}"] = self._unseen(data.cards[name])
        return dataclasses.replace(self, devices=devices, cards=cards, errors=errors, learnt=learnt)

    @property
    def _adapted(self) -> list[str]:
        """Names of the devices that were adapted to."""
        return [name for name in self.devices if name not in self.trained]

    def _name(self, card: DeviceCard) -> str | None:
        """Returns the name under which the predictor knows a card's device; None: it does not.

        That is the card's own name, or the name of the only known device whose card has this name.
        If several have it (variants of one GPU), all members of the card must be equal.
        """
        if card.name in self.devices:
            return card.name
        same = [name for name, known in self.cards.items() if known.name == card.name]
        if len(same) > 1:
            same = [name for name in same if self.cards[name] == card]
        return same[0] if len(same) == 1 else None

    def _device(self, name: str | None, card: DeviceCard) -> Device:
        if name is not None:
            return self.devices[name]
        weights = calibration.prior(card, self._trained_cards)
        traits_EZ = np.einsum("y,yez->ez", weights, self._traits_YEZ)
        return dataclasses.replace(network.no_offsets(len(traits_EZ)), traits=traits_EZ)

    @property
    def _traits_YEZ(self) -> np.ndarray:
        """Traits of the devices of the training."""
        return np.stack([self.devices[known].traits for known in self.trained])

    def _logs(
        self,
        rows: Programs,
        card: DeviceCard,
        device: Device,
        traits_ERZ: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns log seconds of each member, (E, R), in float64.

        traits_ERZ: traits of each row. None: the device's.
        """
        inputs, timed = self.scale(rows), times(rows, card)
        parts = []
        for start in range(0, len(rows), _CHUNK):
            part = jax.tree.map(lambda leaf, s=start: leaf[s : s + _CHUNK], inputs)
            count = len(part.kinds_R)
            padded = min(_CHUNK, 1 << (count - 1).bit_length())
            part = jax.tree.map(lambda x, n=padded: np.resize(x, (n, *x.shape[1:])), part)
            small = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32)[:, None], device)
            if traits_ERZ is not None:
                traits = traits_ERZ[:, np.resize(np.arange(start, start + count), padded)]
                small = dataclasses.replace(small, traits=traits.astype(np.float32))
            offsets_ERO, sharpness = network.offsets_of(self.graph, self.states, part, small)
            parts.append(np.asarray(offsets_ERO, np.float64)[:, :count])
        offsets_ERO, sharp = np.concatenate(parts, 1), np.asarray(sharpness, np.float64)
        logs = [
            above(timed.floor_R, combine(timed, rows.product_R, offsets_RO, sharp[e], np), np)
            for e, offsets_RO in enumerate(offsets_ERO)
        ]
        return np.stack(logs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an npz file; it is replaced only when the new one is complete."""
        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Self:
        """Returns the predictor of a file; None: the one that ships with megajax.

        Raises: UserError if the file is missing, damaged or of another version.
        """
        return cls(**load(path))


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def sample(data: Dataset, most: int, seed: int) -> Dataset:
    """Returns at most `most` rows of each device and kind; rows of rare sizes are preferred.

    The probability that a row is kept is inversely proportional to the square root of the number of
    rows with about as many FLOPs (within a factor of two). Measured data sets have many small
    programs, while the large ones decide the time of a model.
    """
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, str], list[int]] = {}
    for row, (device, record) in enumerate(zip(data.devices, data.records, strict=True)):
        groups.setdefault((device, record.kind), []).append(row)
    chosen = []
    for rows in groups.values():
        if len(rows) > most:
            sizes = [np.log2(max(data.records[row].flops, 1)) // 1 for row in rows]
            _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
            chance = 1 / np.sqrt(counts[inverse])
            rows = list(rng.choice(rows, most, replace=False, p=chance / chance.sum()))
        chosen += rows
    return data[np.sort(np.array(chosen, int))]


def _rows(
    data: Dataset, rows: Programs, names: Sequence[str], scale: network.Scale
) -> network.Rows:
    """Returns labelled rows, with the times of each on its device's card."""
    device_R = np.array([names.index(name) for name in data.devices])
    columns: dict[str, np.ndarray] = {}
    for place, name in enumerate(names):
        check_card(name, data.cards[name])
        chosen = device_R == place
        for field, part in vars(times(rows[chosen], data.cards[name])).items():
            target = columns.setdefault(field, np.zeros((len(rows), *part.shape[1:])))
            target[chosen] = part
    timed = Times(**columns)
    return network.Rows.of(scale(rows), rows.product_R, timed, np.log(data.seconds), device_R)
