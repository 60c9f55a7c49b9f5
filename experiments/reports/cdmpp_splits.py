"""Divides measured rows into those to fit on and those to judge on.

Splits never cut a program in two: rows of one structural hash are on one side. Rows of synthetic
programs (families.SYNTHETIC) are fitted on and never judged.
"""

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.systems.cdmpp import choose
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.families import SYNTHETIC
from megajax.systems.cdmpp.labels import Labels

FAMILY_FOLDS = 4
NAMES = ("random", "families", "devices")


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows to fit on, to judge on, and to adapt to, as indices. part: what is held out."""

    name: str
    part: str
    fit: np.ndarray
    judge: np.ndarray
    adapt: np.ndarray | None = None


def unique_rows(dataset: Dataset) -> np.ndarray:
    """Returns the first labelled row of each (structural hash, device)."""
    seen: dict[tuple[str, str], int] = {}
    for row, (record, device) in enumerate(zip(dataset.records, dataset.devices, strict=True)):
        if not np.isnan(dataset.seconds[row]):
            seen.setdefault((record.hash, device), row)
    return np.array(list(seen.values()), int)


def random_split(dataset: Dataset, rows: np.ndarray, seed: int) -> Split:
    """A fifth of the programs' hashes is held out, on all devices."""
    hashes = sorted({dataset.records[i].hash for i in rows})
    held = set(np.random.default_rng(seed).permutation(hashes)[: max(len(hashes) // 5, 1)])
    is_held = np.array([dataset.records[i].hash in held for i in rows], bool)
    return Split("random", "a fifth", rows[~is_held], rows[is_held])


def family_splits(
    dataset: Dataset, rows: np.ndarray, families: np.ndarray, seed: int
) -> Iterator[Split]:
    """Holds out one group of families after the other; programs that both sides have are not
    fitted on."""
    names = np.random.default_rng(seed).permutation(sorted(set(families[rows].tolist())))
    for held in np.array_split(names, min(FAMILY_FOLDS, len(names))):
        is_held = np.isin(families[rows], held)
        judged = {dataset.records[i].hash for i in rows[is_held]}
        is_free = np.array([dataset.records[i].hash not in judged for i in rows], bool)
        yield Split("families", ", ".join(held), rows[~is_held & is_free], rows[is_held])


def with_more(dataset: Dataset, split: Split, more: np.ndarray) -> Split:
    """Returns a split that also fits rows which no split judges (families.SYNTHETIC).

    Left out are rows of devices that the split does not fit on, and of structures that it judges.
    """
    devices = {dataset.devices[i] for i in split.fit}
    judged = {dataset.records[i].hash for i in split.judge}
    free = [
        i for i in more if dataset.devices[i] in devices and dataset.records[i].hash not in judged
    ]
    return dataclasses.replace(split, fit=np.concatenate([split.fit, np.array(free, int)]))


def device_splits(
    dataset: Dataset,
    rows: np.ndarray,
    shots: int,
    seed: int,
    held_out: Collection[str] | None = None,
    programs: np.ndarray | None = None,
) -> Iterator[Split]:
    """Holds devices out, of which the rows of `shots` chosen programs may be seen.

    Args: held_out: devices of which no fit has a row; None: one device after the other. programs: a
        number a row; None: each row is a program.
    """
    names = np.array([dataset.devices[i] for i in rows])
    for name in sorted(set(names.tolist()) if held_out is None else held_out):
        out = [name] if held_out is None else list(held_out)
        fit, other = rows[~np.isin(names, out)], rows[names == name]
        if not len(fit):
            continue
        split = Split("devices", name, fit, other)
        yield split
        yield shown(dataset, split, shots, seed, programs)


def shown(
    dataset: Dataset, split: Split, shots: int, seed: int, programs: np.ndarray | None = None
) -> Split:
    """Returns the split with the rows of chosen programs to adapt to.

    Rows of the structural hashes that those programs have are not judged.
    """
    count = min(shots, len(split.judge) - 1)
    picked = np.zeros(len(split.judge), bool)
    if count > 0:
        picked[choose(dataset[split.judge], count, seed=seed)] = True
    if programs is not None and count > 0:
        device = dataset.devices[split.judge[0]]
        chosen = set(programs[split.judge[picked]].tolist())
        others = sorted(set(programs[split.judge].tolist()) - chosen)  # some have two rows picked
        rng = np.random.default_rng(seed)
        chosen.update(rng.permutation(np.array(others, int))[: count - len(chosen)].tolist())
        seen = {
            record.hash
            for record, name, number in zip(dataset.records, dataset.devices, programs, strict=True)
            if name == device and number in chosen
        }
        picked = np.array([dataset.records[i].hash in seen for i in split.judge], bool)
    return dataclasses.replace(
        split, name=f"{split.name}, {count} programs seen", judge=split.judge[~picked],
        adapt=split.judge[picked],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A choice of splits.

    names: of NAMES. held_out: devices of which no fit has a row; None: one device after the other.
    shots: programs of a device that may be seen. seed: of all but the choice of these programs.
    """

    names: tuple[str, ...]
    held_out: Collection[str] | None
    shots: int
    seed: int

    def __post_init__(self) -> None:
        """Checks the names. Raises: UserError."""
        for name in self.names:
            if name not in NAMES:
                raise UserError(f"splits={name} must be random, families or devices (--splits)")

    def of(
        self, dataset: Dataset, rows: np.ndarray, labels: Labels | None, seed: int
    ) -> list[Split]:
        """Returns the splits of these rows.

        Args: labels: the families and programs of all rows; None: there are none, and no split by
            families. seed: draws the programs to adapt to.
        Raises: UserError on an unknown device, and if all programs are synthetic.
        """
        families = None if labels is None else labels.families
        programs = None if labels is None else labels.programs
        is_real = np.ones(len(rows), bool)
        if families is not None:
            is_real = ~np.isin(families[rows], list(SYNTHETIC))
        real, more = rows[is_real], rows[~is_real]
        if len(more) and not len(real):
            raise UserError(
                "the data has only synthetic programs, which no split judges; give labels of real "
                "programs, too (--data=REAL.npz,SYNTHETIC.npz)"
            )
        found: list[Split] = []
        for name in self.names:
            if name == "random":
                found.append(random_split(dataset, real, self.seed))
            elif name == "families" and families is not None:
                found += family_splits(dataset, real, families, self.seed)
            elif name == "devices":
                for unknown in sorted(set(self.held_out or ()) - set(dataset.devices)):
                    near = did_you_mean(unknown, dataset.devices)
                    raise UserError(
                        f"held_out={unknown} is no device of the data.{near} (--held_out)"
                    )
                found += device_splits(dataset, real, self.shots, seed, self.held_out, programs)
        return [with_more(dataset, split, more) for split in found] if len(more) else found
