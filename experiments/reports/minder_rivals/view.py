"""A case as the rivals see it: seconds scaled, holes filled, windows of 8 s side by side.

The preparation is the paper's (Minder section 4.1: align, fill a hole with the nearest sample,
scale to [0, 1]), with two gifts: packet rates are scaled by their logarithms and ranges are
quantiles, as our detector does it; and a machine is left out while it is not a member of the job
(before its first sample, after its declared departure), since a scheduler would say so.

Legend: C metrics, N machines, T seconds, J windows, W seconds of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax.core.tree import Tree, named_leaves, nest
from megajax.models import lstm_vae
from megajax.models.lstm_vae import LstmVaeConfig
from megajax.monitor.samples import Grid
from megajax.systems.minder import Detector

WINDOW = 8  # seconds, side by side (paper: one starts every second)
ROWS = 4096  # windows that go through the networks at a time


class Said(NamedTuple):
    """An alert of any detector. at, since: Unix seconds. score: in the detector's unit."""

    machine: str
    metric: str
    since: float
    at: float
    score: float
    kind: str


@dataclass(frozen=True)
class Base:
    """What the rivals take over from a fit of our detector: metrics in order, their ranges (low,
    high, bend) and the networks. It is kept, so that later changes of ours change no rival."""

    metrics: tuple[str, ...]
    range_3C: np.ndarray
    vae: Tree

    @staticmethod
    def of(detector: Detector) -> "Base":
        """Returns that of a fitted detector."""
        profile = detector.profile
        return Base(profile.metrics, profile.range_3C, profile.vae)

    def save(self, path: Path) -> None:
        """Writes an archive without pickles."""
        arrays = {f"vae.{name}": np.asarray(leaf) for name, leaf in named_leaves(self.vae)}
        part = path.with_suffix(".part.npz")
        np.savez(part, metrics=np.array(self.metrics), ranges=self.range_3C, **arrays)  # type: ignore
        part.replace(path)

    @staticmethod
    def load(path: Path) -> "Base":
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            vae = nest({n[4:]: file[n] for n in file.files if n.startswith("vae.")})
            return Base(tuple(str(m) for m in file["metrics"]), file["ranges"], vae)

    def scaled(self, values_CNT: np.ndarray) -> np.ndarray:
        """Returns values with the healthy range in the middle third of [0, 1], where they are cut
        off; metrics with a bend by asinh(value / bend)."""
        low, high, bend = (x[:, None, None] for x in self.range_3C)
        bent = np.arcsinh(values_CNT / np.where(bend > 0, bend, 1.0))
        values = np.where(bend > 0, bent, values_CNT)
        return np.clip((values - low) / (3 * (high - low)) + 1 / 3, 0, 1).astype(np.float32)


@dataclass(frozen=True)
class View:
    """departures: (machine, Unix s)."""

    grid: Grid
    departures: Sequence[tuple[str, float]]
    base: Base

    @property
    def windows(self) -> int:
        """Whole windows of the case."""
        return self.grid.values_CNT.shape[2] // WINDOW

    def time(self, window: int) -> float:
        """Returns the end of a window, Unix s."""
        return self.grid.start + (window + 1) * WINDOW

    @cached_property
    def raw_CNT(self) -> np.ndarray:
        """Seconds in the order of the base's metrics, in their units, NaN for holes."""
        grid = self.grid
        rows = [grid.metrics.index(m) for m in self.base.metrics]
        return grid.values_CNT[rows, :, : self.windows * WINDOW]

    @cached_property
    def filled_CNT(self) -> np.ndarray:
        """Scaled seconds; a hole has the nearest sample of its series, 0.5 where there is none."""
        return nearest(self.base.scaled(self.raw_CNT))

    @cached_property
    def x_CNJW(self) -> np.ndarray:
        """The same in windows."""
        C, N, _ = self.filled_CNT.shape
        return self.filled_CNT.reshape(C, N, self.windows, WINDOW)

    @cached_property
    def denoised_CNJW(self) -> np.ndarray:
        """The windows as the LSTM-VAEs give them back."""
        C, N, J, W = self.x_CNJW.shape
        rows_XWC = self.x_CNJW.reshape(C, N * J, W).transpose(1, 2, 0)
        back = in_parts(lambda x: _denoise(LstmVaeConfig(C), self.base.vae, x), rows_XWC)
        return back.transpose(2, 0, 1).reshape(C, N, J, W)

    @cached_property
    def kept(self) -> dict[str, np.ndarray]:
        """What several rivals share, by name."""
        return {}

    @cached_property
    def there_JN(self) -> np.ndarray:
        """Whether a machine is a member of the job at the end of a window."""
        seen_NT = np.isfinite(self.raw_CNT).any(0)
        joined_N = np.where(seen_NT.any(1), seen_NT.argmax(1), seen_NT.shape[1])
        end_J = (np.arange(self.windows) + 1) * WINDOW
        there_JN = end_J[:, None] > joined_N
        for machine, at in self.departures:
            row = self.grid.machines.index(machine)
            there_JN[end_J + self.grid.start >= at - 4, row] = False  # clocks are up to 2 s wrong
        return there_JN


def nearest(values_CNT: np.ndarray) -> np.ndarray:
    """Returns the values with each NaN replaced by the nearest sample of its series, of two by the
    earlier one; 0.5 where a series has none."""
    T = values_CNT.shape[-1]
    has, now_T = np.isfinite(values_CNT), np.arange(T)
    before = np.maximum.accumulate(np.where(has, now_T, -2 * T), -1)
    after = np.minimum.accumulate(np.where(has, now_T, 3 * T)[..., ::-1], -1)[..., ::-1]
    place = np.where(now_T - before <= after - now_T, before, after)
    none = (place < 0) | (place >= T)
    found = np.take_along_axis(values_CNT, np.where(none, 0, place), -1)
    return np.where(none, np.float32(0.5), found)


def in_parts(function: Any, rows_X: np.ndarray, rows: int = ROWS) -> np.ndarray:
    """Returns function(rows_X), so many rows at a time, so that all lengths run one program."""
    found = []
    for at in range(0, len(rows_X), rows):
        part = rows_X[at : at + rows]
        pad = [(0, rows - len(part))] + [(0, 0)] * (part.ndim - 1)
        found.append(np.asarray(function(np.pad(part, pad)))[: len(part)])
    return np.concatenate(found)


_denoise = jax.jit(lstm_vae.denoise, static_argnums=0)
