"""Measured rows with what a Dataset does not hold: the family and program of each, and its noise.

A label is the measured time of a row. A family is a group of similar programs (families.py). The
passes of a measurement form two halves, and each half gives a time of its own: how far the two are
apart is the noise of the label (profile.py). All of it is stored in one npz file, of which
`Dataset.load` reads its own part.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.systems.cdmpp.dataset import Dataset, load_arrays, save_arrays
from megajax.systems.cdmpp.profile import HALVES, NOISY, Timed

_OWN = ("family", "program", "halves", "walls")


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """The labelled rows of one or more profiles.

    dataset: the rows, each with the smaller time of its two halves. families: (rows,) the name of
    the family of each row's program. programs: (rows,) the number of that program. halves: (rows,
    HALVES) seconds of the instruction, the least time over the passes of each half. walls: (rows,
    HALVES) seconds of a whole call of the row's program.
    """

    dataset: Dataset
    families: np.ndarray
    programs: np.ndarray
    halves: np.ndarray
    walls: np.ndarray

    @classmethod
    def of(cls, timed: Sequence[Timed], card: DeviceCard, facts: Mapping[str, Any]) -> "Labels":
        """Returns the labels of programs timed on one device."""
        found = [r for one in timed for r in one.records]
        halves = np.concatenate([np.zeros((0, HALVES)), *(one.halves for one in timed)])
        counts = [len(one.records) for one in timed]
        return cls(
            Dataset(found, halves.min(1), [card.name] * len(found), {card.name: card}, facts),
            np.repeat(np.array([one.program.family for one in timed], np.str_), counts),
            np.repeat(np.array([one.program.number for one in timed], np.int64), counts),
            halves,
            np.repeat(np.array([one.wall for one in timed]).reshape(-1, HALVES), counts, 0),
        )

    @classmethod
    def joined(cls, parts: Sequence["Labels"]) -> "Labels":
        """Returns the rows of all parts. Raises: UserError if there is no part."""
        if not parts:
            raise UserError("nothing was measured; give more time (--budget)")
        datasets = [part.dataset for part in parts]
        cards: dict[str, DeviceCard] = {}
        for dataset in datasets:
            cards.update(dataset.cards)
        rows = [record for dataset in datasets for record in dataset.records]
        devices = [name for dataset in datasets for name in dataset.devices]
        seconds = np.concatenate([dataset.seconds for dataset in datasets])
        whole = Dataset(rows, seconds, devices, cards, datasets[-1].facts)
        kept = ("families", "programs", "halves", "walls")
        return cls(whole, *(np.concatenate([getattr(p, name) for p in parts]) for name in kept))

    @classmethod
    def together(cls, paths: Sequence[str | os.PathLike[str]]) -> "Labels":
        """Returns the rows of several files.

        The card of a device that several files measured is that of the first of them, which should
        be the file of real programs. Programs of later files get other numbers than those of
        earlier ones.
        """
        parts = [cls.load(path) for path in paths]
        cards: dict[str, DeviceCard] = {}
        for part in parts:
            cards = {**part.dataset.cards, **cards}
        found: list[Labels] = []
        for part in parts:
            mine = {name: cards[name] for name in part.dataset.cards}
            first = max((int(other.programs.max(initial=-1)) for other in found), default=-1) + 1
            dataset = dataclasses.replace(part.dataset, cards=mine)
            found.append(dataclasses.replace(part, dataset=dataset, programs=part.programs + first))
        facts = dict(parts[0].dataset.facts)
        facts |= {"parts": [dict(part.dataset.facts) for part in parts]} if len(parts) > 1 else {}
        return cls.joined(found).with_facts(facts)

    @property
    def disagreement(self) -> np.ndarray:
        """(rows,): |a - b| / min(a, b) of both halves."""
        return np.ptp(self.halves, 1) / self.halves.min(1)

    @property
    def is_marked(self) -> np.ndarray:
        """(rows,): whether the halves differ by more than NOISY."""
        return self.disagreement > NOISY

    @property
    def noise(self) -> dict[str, float]:
        """The noise floor: mean and median disagreement, and the share of marked rows."""
        apart = self.disagreement
        return {
            "noise_mean": float(apart.mean()),
            "noise_median": float(np.median(apart)),
            "marked": float(self.is_marked.mean()),
        }

    @property
    def below_floor(self) -> float:
        """The share of rows that are faster than their card's roofline by more than 5 %.

        On a GPU the arrays of such rows are in the L2 cache, which the roofline does not consider.
        A predictor never predicts less than the roofline.
        """
        rows = zip(self.dataset.records, self.dataset.devices, strict=True)
        floors = np.array([record.floor_s(self.dataset.cards[name]) for record, name in rows])
        return float((floors > 1.05 * self.dataset.seconds).mean())

    def of_rows(self, rows: np.ndarray) -> "Labels":
        """Returns some rows. rows: their numbers."""
        kept = ("families", "programs", "halves", "walls")
        return Labels(self.dataset[rows], *(getattr(self, name)[rows] for name in kept))

    def with_facts(self, facts: Mapping[str, Any]) -> "Labels":
        """Returns the same rows with other facts about their provenance."""
        return dataclasses.replace(self, dataset=dataclasses.replace(self.dataset, facts=facts))

    def with_raised_cards(self) -> "Labels":
        """Returns the rows with cards whose rates are raised until no row is below its roofline.

        This is meant for devices whose card was measured. The card of a CPU is measured with a few
        simple programs, and some operation may read its arrays from a faster cache than they did.
        """
        cards = dict(self.dataset.cards)
        rows = zip(self.dataset.records, self.dataset.devices, self.dataset.seconds, strict=True)
        for record, device, seconds in rows:
            card = cards[device]
            if record.floor_s(card) > seconds:
                flops = {
                    name: max(peak, record.flops / seconds) for name, peak in card.flops.items()
                }
                moved = max(card.memory_bytes_per_s, record.nbytes / seconds)
                cards[device] = dataclasses.replace(card, flops=flops, memory_bytes_per_s=moved)
        return dataclasses.replace(self, dataset=dataclasses.replace(self.dataset, cards=cards))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an npz file that `load` and `Dataset.load` read."""
        self.dataset.save(path)
        own = (self.families.astype(np.str_), self.programs, self.halves, self.walls)
        save_arrays(path, load_arrays(path, "data set") | dict(zip(_OWN, own, strict=True)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Labels":
        """Returns the labels of a file. Raises: UserError if it is none or damaged."""
        dataset, arrays = Dataset.load(path), load_arrays(path, "data set")
        if missing := [name for name in _OWN if name not in arrays]:
            raise UserError(
                f"{path} has no {missing[0]}: scripts/profile_programs.py did not write it"
            )
        for name in _OWN:
            if arrays[name].shape[:1] != (len(dataset),):
                raise UserError(
                    f"{path} is damaged: {name} has the shape {arrays[name].shape}, not "
                    f"{len(dataset)} rows"
                )
        return cls(dataset, *(arrays[name] for name in _OWN))


def card_json(card: DeviceCard) -> str:
    """Returns a card as a line of JSON."""
    return json.dumps(dataclasses.asdict(card) | {"flops": dict(card.flops)})
