"""The profile of healthy jobs: everything that `fit` learns, in one file.

The file is a NumPy archive without pickles: arrays by name, and a JSON text with the names of the
metrics, the settings and a checksum of the arrays.

Legend: C metrics, F channels: the level of each metric, then the residual of each.
"""

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.tree import Tree, named_leaves, nest
from megajax.models.lstm_vae import LstmVaeConfig
from megajax.systems.minder.settings import CHANNELS as CHANNELS_
from megajax.systems.minder.settings import Settings
from megajax.systems.minder.tracker import Limits

FORMAT = 1
CHANNELS = (
    "low_C",
    "high_C",
    "bend_C",
    "period_C",
    "bottom_C",
    "top_C",
    "noise_F",
    "offset_F",
    "slope_F",
)
EVIDENCE = ("inverse", "limit")
DYNAMICS = ("noise_F", "offset_F", "slope_F", *EVIDENCE)


@dataclass(frozen=True)
class Dynamics:
    """What `fit` learnt of spreads and lags (tracker.py), F = C + 1; as in Profile."""

    noise_F: np.ndarray
    offset_F: np.ndarray
    slope_F: np.ndarray
    limits: Limits

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays by name."""
        return {n: getattr(self.limits if n in EVIDENCE else self, n) for n in DYNAMICS}


@dataclass(frozen=True)
class Profile:
    """Everything that `fit` learnt.

    metrics: names, in the order of the networks. priority: names, in the order in which they decide
    the metric of an alert; empty: as metrics. model, vae: configuration and parameters of the
    networks. low_C, high_C, bend_C: range of healthy values, and from where the scale is
    logarithmic (features.scaled). period_C: seconds between samples. bottom_C, top_C: ends of the
    metrics' scales (features.py: Edges). noise_F: standard deviation of a machine's ticks about its
    own offset. offset_F, slope_F: standard deviations of the machines' offsets, and of how far
    machines move apart when the median of all moves. limits: of the scores of healthy machines.
    report: facts about the fit. dynamics: of spreads and lags; None in a file of a version before
    them.
    """

    metrics: tuple[str, ...]
    model: LstmVaeConfig
    vae: Tree
    low_C: np.ndarray
    high_C: np.ndarray
    bend_C: np.ndarray
    period_C: np.ndarray
    bottom_C: np.ndarray
    top_C: np.ndarray
    noise_F: np.ndarray
    offset_F: np.ndarray
    slope_F: np.ndarray
    limits: Limits
    settings: Settings = Settings()
    report: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the fit
    priority: tuple[str, ...] = ()
    dynamics: Dynamics | None = None

    @property
    def range_3C(self) -> np.ndarray:
        """Returns low, high and bend."""
        return np.stack([self.low_C, self.high_C, self.bend_C])

    def save(self, path: str | Path) -> None:
        """Writes the file, replacing an older one only when the new one is complete."""
        arrays = {name: np.asarray(getattr(self, name)) for name in CHANNELS}
        arrays |= {name: getattr(self.limits, name) for name in EVIDENCE}
        arrays |= {f"vae.{name}": np.asarray(leaf) for name, leaf in named_leaves(self.vae)}
        if self.dynamics is not None:
            arrays |= {f"dynamics.{n}": np.asarray(x) for n, x in self.dynamics.arrays().items()}
        head = {
            "format": FORMAT,
            "metrics": list(self.metrics),
            "priority": list(self.priority),
            "model": dataclasses.asdict(self.model),
            "settings": dataclasses.asdict(self.settings),
            "report": self.report,
            "checksum": _checksum(arrays),
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            with open(new, "wb") as file:
                np.savez(file, head=np.array(json.dumps(head)), **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """Returns the profile of a file. Raises: UserError for a file that `save` did not write."""
        try:
            arrays = files.read_arrays(path, "detector that `save` wrote")
            head = json.loads(str(arrays.pop("head")))
            metrics, model = tuple(head["metrics"]), LstmVaeConfig(**head["model"])
            settings, report = Settings(**head["settings"]), head["report"]
            priority = tuple(head.get("priority", ()))
            known = head["format"] == FORMAT and head["checksum"] == _checksum(arrays)
            for name, end in (("bottom_C", -np.inf), ("top_C", np.inf)):  # not in older files
                arrays.setdefault(name, np.full_like(arrays["low_C"], end))
            channels = {name: arrays[name] for name in CHANNELS}
            limits = Limits(*(arrays[name] for name in EVIDENCE))
            learnt = _dynamics(arrays, len(metrics))
        except OSError as error:
            raise UserError(f"model={path} cannot be read: {error.strerror} (--model)") from None
        except UserError as error:
            raise UserError(f"model={error} (--model)") from None
        except Exception as error:  # a foreign or damaged archive fails in many ways
            raise UserError(
                f"model={path} is no detector that `save` wrote: {type(error).__name__} (--model)"
            ) from None
        known = known and set(priority) <= set(metrics)
        if not known or any(not _fits(n, x, len(metrics)) for n, x in channels.items()):
            raise UserError(f"model={path} is damaged, or of another version (--model)")
        vae = nest({n[4:]: x for n, x in arrays.items() if n.startswith("vae.")})
        return Profile(
            metrics,
            model,
            vae,
            **channels,
            limits=limits,
            settings=settings,
            report=report,
            priority=priority,
            dynamics=learnt,
        )


def _dynamics(arrays: dict[str, np.ndarray], metrics: int) -> Dynamics | None:
    """Returns what a file says of spreads and lags. Raises: ValueError, KeyError."""
    if f"dynamics.{DYNAMICS[0]}" not in arrays:
        return None
    found = {n: arrays[f"dynamics.{n}"] for n in DYNAMICS}
    if any(found[n].shape != (metrics + 1,) for n in DYNAMICS if n.endswith("_F")):
        raise ValueError("spreads of other metrics")
    limits = Limits(*(found.pop(n) for n in EVIDENCE))
    return Dynamics(**found, limits=limits)


def _fits(name: str, array: np.ndarray, metrics: int) -> bool:
    return array.shape == ((CHANNELS_ * metrics,) if name.endswith("_F") else (metrics,))


def _checksum(arrays: dict[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(arrays):
        x = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(f"{name} {x.dtype.str} {x.shape}".encode() + x.tobytes(), total)
    return total
