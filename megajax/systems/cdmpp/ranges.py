"""The ranges of the training rows: which kinds, data types, sizes and cards a predictor has seen.

A prediction for a record or a card far beyond them carries a warning (predictor.FarFromTraining).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megajax.core.hardware import DeviceCard
from megajax.cost.record import FEATURES, OPCODES, OpRecord, peak
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.physics import Programs

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
            mine, their = getattr(self, name), getattr(other, name)
            values[name] = {key: _wider(mine[key], their[key]) for key in mine}
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
        found, near = [], self.joined(learnt)
        for what, here, seen in (
            ("kind", {record.kind for record in records}, near.kinds),
            ("operation", {OPCODES[i] for i in np.flatnonzero(_opcodes(rows))}, near.opcodes),
            ("data type", set(rows.dtypes), near.dtypes),
        ):
            for name in sorted(here - set(seen)):
                found.append(f"the training had no {what} {name}")
        pairs = {(r.kind, r.dtype) for r in records if r.dtype not in self.dtypes}
        for kind, dtype in sorted(pairs):
            if dtype in near.dtypes and f"{kind} {dtype}" not in near.pairs:
                found.append(f"the training had no {kind} of data type {dtype}")
        table = np.array([record.features for record in records])
        for name, (low, high) in near.sizes.items():
            values = table[:, FEATURES.index(name)]
            far = (values > high * MARGIN) | ((values > 0) & (values < low / MARGIN))
            if far.any():
                found.append(
                    f"{name} of {far.sum()} operations, e.g. {values[far][0]:.4g}, is more than "
                    f"{MARGIN:g} times beyond the training's {low:.4g} to {high:.4g}"
                )
        for dtype in () if known else sorted(set(rows.dtypes)):
            for name, value in _of_card(card, dtype).items():
                low, high = near.cards[name]
                if not low / MARGIN <= value <= high * MARGIN:
                    found.append(
                        f"{name} of {card.name}, {value:.4g}, is more than {MARGIN:g} times beyond "
                        f"the training's {low:.4g} to {high:.4g}"
                    )
        return list(dict.fromkeys(found))


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
