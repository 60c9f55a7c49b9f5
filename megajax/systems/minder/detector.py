"""The detector: learns how healthy machines behave, then reads a job's metrics and names machines.

Source: Minder (NSDI 2025, arXiv 2411.01791). Each tick of 24 s goes through features.py (LSTM-VAEs)
and tracker.py (distances to the peers and to the machine's own past) on the device, then through
judge.py (continuity, causes) on the host. Spreads and lags (second half of tracker.py, not in the
paper) are scored and judged in the same way, and count only for machines that no level explains. A
detector has the state of one job. The data may be cut into windows of any length and give the same
alerts; no second is computed twice.

Legend: C metrics, F channels, N machines.
"""

import collections
import dataclasses
import functools
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.tree import Tree, named_leaves, nest
from megajax.models.lstm_vae import LstmVaeConfig
from megajax.monitor.alerts import COURSES, Alert
from megajax.monitor.fleet.faults import GROUPS, KINDS
from megajax.monitor.samples import Grid, Quality, Samples, hold, nothing_in, to_grid
from megajax.monitor.sources.files import read
from megajax.systems.minder import features, tracker
from megajax.systems.minder.features import Edges
from megajax.systems.minder.judge import Finding, Judge, Onsets
from megajax.systems.minder.settings import CHANNELS, LEAST, TICK, WINDOW, WINDOWS, Settings
from megajax.systems.minder.tracker import Limits, spans

# ---- windows: seconds of metrics that a detector waits for or looks back on
#
# Pending: seconds that wait until their tick is complete; windows may be cut anywhere. Recent: the
# last minutes, for pictures and new models.
#
# Legend: C metrics, N machines, T seconds.


Window = str | Path | Samples | Grid
FAR = 3 * 86400  # (chosen) seconds from the middle of a window at which a time must be wrong


def grid_of(window: Window) -> Grid:
    """Returns a window as a grid of one second; missing samples stay missing.

    Raises: UserError for a file that cannot be read, or an object that is no window.
    """
    if isinstance(window, Grid):
        if window.step_s != 1:
            raise UserError(f"a grid of {window.step_s} s must be of 1 s for a detector")
        return window
    if isinstance(window, str | Path):
        window = read(window)
    if not isinstance(window, Samples):
        raise UserError(
            f"a window of type {type(window).__name__} must be a path of a CSV or parquet file, "
            "Samples, or a Grid"
        )
    return to_grid(_near(window), 1, dict.fromkeys(window.metrics, 1.0))


def held(values_CNT: np.ndarray, period_C: np.ndarray) -> np.ndarray:
    """Returns values_CNT with each sample repeated for its metric's period (seconds), no longer."""
    if (period_C <= 1).all():
        return values_CNT
    pairs = zip(values_CNT, period_C, strict=True)
    return np.stack([hold(values_NT, period) for values_NT, period in pairs])


def _near(samples: Samples) -> Samples:
    """Drops rows whose time is days away from all others, which would make the grid huge."""
    if samples.start is not None and samples.end is not None or not len(samples):
        return samples
    finite_N = np.isfinite(samples.time_N)
    if not finite_N.any():
        raise UserError("no row of the window has a time that is a number")
    near_N = finite_N & (np.abs(samples.time_N - np.median(samples.time_N[finite_N])) <= FAR)
    if near_N.all():
        return samples
    note = f"{int((~near_N).sum())} rows have times days away from all others, or none: left out"
    return Samples(
        samples.time_N[near_N],
        samples.machine_N[near_N],
        samples.metric_N[near_N],
        samples.value_N[near_N],
        samples.machines,
        samples.metrics,
        samples.start,
        samples.end,
        (*samples.notes, note),
    )


class Pending:
    """Collects windows of any length and returns complete ticks, in order and each once."""

    def __init__(self, metrics: Sequence[str]):
        """metrics: names of the metrics that are kept, in this order."""
        self._metrics = tuple(metrics)
        self.machines: list[str] = []  # in the order of their coming: a machine's row
        self._start: int | None = None
        self._values_CNT = np.full((len(metrics), 0, 0), np.nan, np.float32)
        self.end = 0  # seconds up to which windows have come
        self.begin = 0  # of the first window

    def add(self, grid: Grid) -> list[str]:
        """Adds a window; returns sentences about the parts of it that cannot be used."""
        notes = []
        if self._start is None:
            self._start = -(-grid.start // TICK) * TICK  # ticks begin at multiples of their length
            self.end, self.begin = self._start, grid.start
        if late := max(min(self._start - grid.start, grid.values_CNT.shape[2]), 0):
            if np.isfinite(grid.values_CNT[:, :, :late]).any() and self.end > self._start:
                notes.append(f"{late} s of samples came after their time was judged: left out")
        known = set(self._metrics)
        if strange := [m for m in grid.metrics if m not in known]:
            notes.append(f"metrics that the detector was not fitted on: {', '.join(strange[:10])}")
        if not known & set(grid.metrics) and grid.metrics:
            raise UserError(
                f"none of the window's metrics ({', '.join(grid.metrics[:10])}) is one that the "
                f"detector was fitted on ({', '.join(self._metrics[:10])})"
            )
        shows_N = np.isfinite(grid.values_CNT).any((0, 2))  # who has no sample is not there yet
        there = [m for m, shows in zip(grid.machines, shows_N, strict=True) if shows]
        known_machines = set(self.machines)
        self.machines += [m for m in there if m not in known_machines]
        self.end = max(grid.end, self.end)
        C, N, T = self._values_CNT.shape
        more = (len(self.machines) - N, max(self.end - self._start - T, 0))
        if any(more):
            pad = ((0, 0), (0, more[0]), (0, more[1]))
            self._values_CNT = np.pad(self._values_CNT, pad, constant_values=np.nan)
        row = {name: k for k, name in enumerate(self.machines)}
        rows = np.array([row[m] for m in there], int)
        places = [self._metrics.index(m) for m in grid.metrics if m in known]
        used = [m in known for m in grid.metrics]
        new = grid.values_CNT[used][:, shows_N, late:]
        first = grid.start + late - self._start
        part = self._values_CNT[:, :, first : first + new.shape[2]]
        for c, values_NT in zip(places, new, strict=True):
            part[c, rows] = np.where(np.isfinite(values_NT), values_NT, part[c, rows])
        return notes

    def take(self) -> tuple[int, np.ndarray] | None:
        """Returns (start in Unix seconds, values_CNT) of the next complete tick, or None."""
        if self._start is None or self.end < self._start + TICK:
            return None
        start, tick = self._start, self._values_CNT[:, :, :TICK]
        self._start, self._values_CNT = start + TICK, self._values_CNT[:, :, TICK:]
        return start, tick

    def forget(self, rows: Sequence[int]) -> None:
        """Removes the machines in these rows; later machines move up."""
        gone = set(rows)
        self.machines = [m for i, m in enumerate(self.machines) if i not in gone]
        self._values_CNT = np.delete(self._values_CNT, list(rows), axis=1)


# ---- the last minutes of a job's metrics, as the daemon read them


class Recent:
    """Grids of successive seconds, no older than `keep_s` seconds."""

    def __init__(self, keep_s: float):
        """keep_s: seconds before the newest one that are kept."""
        self._keep_s = keep_s
        self._grids: collections.deque[Grid] = collections.deque()

    def add(self, grid: Grid) -> None:
        """Adds the grid of the next seconds."""
        self._grids.append(grid)
        while self._grids[0].end < grid.end - self._keep_s:
            self._grids.popleft()

    def clear(self) -> None:
        """Drops all grids."""
        self._grids.clear()

    def __iter__(self) -> Iterator[Grid]:
        return iter(self._grids)

    def metric(self, name: str, start: int, end: int) -> Grid:
        """Returns one metric in [start, end), Unix seconds; NaN where nothing was read."""
        return merged(list(self._grids), [name], start, end)


def merged(
    grids: Sequence[Grid], metrics: Sequence[str], start: int | None = None, end: int | None = None
) -> Grid:
    """Returns successive grids of one second as one grid; NaN where nothing was read.

    Args: metrics: names that are kept, in this order. start, end: Unix seconds; None: those of the
      first and the last grid.
    """
    start = min((g.start for g in grids), default=0) if start is None else start
    end = max((g.end for g in grids), default=start) if end is None else end
    inside = [g for g in grids if g.start < end and g.end > start]
    machines = tuple(sorted({m for g in inside for m in g.machines}))
    place = {machine: n for n, machine in enumerate(machines)}
    shape = (len(metrics), len(machines), max(end - start, 0))
    values_CNT = np.full(shape, np.nan, np.float32)
    for grid in inside:
        rows = [place[m] for m in grid.machines]
        first, last = max(grid.start, start), min(grid.end, end)
        for c, name in enumerate(metrics):
            if name in grid.metrics:
                part = grid.values_CNT[grid.metrics.index(name), :, first - grid.start :]
                values_CNT[c, rows, first - start : last - start] = part[:, : last - first]
    return Grid(start, 1, values_CNT, machines, tuple(metrics))


# ---- the profile of healthy jobs: everything that `fit` learns, in one file
#
# The file is a NumPy archive without pickles: arrays by name, and a JSON text with the names of the
# metrics, the settings and a checksum of the arrays.
#
# Legend: C metrics, F channels: the level of each metric, then the residual of each.


FORMAT = 1
ARRAYS = (
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
    machines move apart when the median of all moves. limits: the limits of the scores of healthy
    machines. report: facts about the fit. dynamics: what was learnt of spreads and lags; None: the
    file was written before they existed.
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
        arrays = {name: np.asarray(getattr(self, name)) for name in ARRAYS}
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
        files.write_arrays(path, {"head": np.array(json.dumps(head)), **arrays})

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
            channels = {name: arrays[name] for name in ARRAYS}
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
        lengths = {"C": len(metrics), "F": CHANNELS * len(metrics)}
        if not known or any(x.shape != (lengths[n[-1]],) for n, x in channels.items()):
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
    """Returns what a file holds of spreads and lags, or None. Raises: ValueError, KeyError."""
    if f"dynamics.{DYNAMICS[0]}" not in arrays:
        return None
    members = {n: arrays[f"dynamics.{n}"] for n in DYNAMICS}
    if any(members[n].shape != (metrics + 1,) for n in DYNAMICS if n.endswith("_F")):
        raise ValueError("spreads of other metrics")
    limits = Limits(*(members.pop(n) for n in EVIDENCE))
    return Dynamics(**members, limits=limits)


def _checksum(arrays: dict[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(arrays):
        x = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(f"{name} {x.dtype.str} {x.shape}".encode() + x.tobytes(), total)
    return total


# ---- the fault type of an alert: the one whose signature is nearest to the machine's scores
#
# monitor/fleet/faults.py says how each type changes which metrics. Only its names and shares come
# from Minder (NSDI 2025, arXiv 2411.01791, table 1). Signs and sizes are ASSUMED, because the
# paper's table of probabilities is not public. Simulated jobs are drawn from the same table, so the
# types of their alerts do not show how well the types of real faults are recognised. Whether a
# machine is named does not depend on its type.


# Metrics of real exporters (monitor/sources/convert.py) that the simulator does not have.
ALSO = {"disk": ("disk_busy", "disk_throughput")}
NEAR = 0.45  # (chosen) cosine below which no type is near


def nearest(scores: Mapping[str, float]) -> str:
    """Returns the fault type whose signature has the largest cosine with a machine's scores.

    'unknown' if no type is near, for example with metrics that the table does not have. If a type
    changes a group of metrics of which none is measured, this counts against the type; otherwise
    types would look equal that share one measured metric.
    Args: scores: {metric: signed score} of all metrics that are measured.
    """
    length = sum(s * s for s in scores.values()) ** 0.5
    best, name = NEAR, "unknown"
    for kind in KINDS:
        signature = _signature(kind, frozenset(scores))
        shared = sum(s * signature.get(m, 0.0) for m, s in scores.items())
        norm = sum(w * w for w in signature.values()) ** 0.5
        if length and shared / (length * norm) > best:
            best, name = shared / (length * norm), kind
    return name


@functools.lru_cache(256)
def _signature(kind: str, measured: frozenset[str]) -> Mapping[str, float]:
    """Returns {metric: signed weight} of a fault type.

    The weight of a group of metrics is the probability that it changes times the median size. It is
    divided among the group's measured metrics so that their length is the weight. A group without a
    measured metric has one entry, named after the group.
    """
    weights: dict[str, float] = {}
    for effect in KINDS[kind].effects:
        sign = 1.0 if effect.target == "high" else -1.0
        weight = sign * effect.probability * (effect.low * effect.high) ** 0.5
        group = (*GROUPS[effect.group], *ALSO.get(effect.group, ()))
        members = [m for m in group if m in measured] or [f"({effect.group})"]
        for metric in members:
            weights[metric] = weights.get(metric, 0.0) + weight / len(members) ** 0.5
    return weights


# ---- the detector


OLDER = (
    "the model was fitted by a version that knew neither spread nor lag, so neither is judged: fit "
    "it anew"
)
# (chosen on jobs of the simulated fleet) factor on the limits of spreads and lags: machines with
# other roles follow a job that changes in other ways
FIRM = 1.75
SMOOTH = 0.25  # (chosen) share by which a tick moves the lag that an alert tells
LEFT = 3600.0  # (chosen) seconds of silence after which a machine no longer belongs to the job


class Detector:
    """Watches one job. Not thread-safe."""

    def __init__(self, profile: Profile, settings: Settings | None = None):
        """Makes a detector that has not seen a job. settings: None: those of the profile."""
        self.profile = profile
        self.settings = profile.settings if settings is None else settings
        self.notes: list[str] = []  # of the last update: what was wrong with its window
        C = len(profile.metrics)
        first = [profile.metrics.index(m) for m in profile.priority or profile.metrics]
        order = [c + k * C for c in first for k in range(CHANNELS)]
        self._onsets = Onsets(spans(self.settings.ticks)[-1].ticks)
        self._judge = Judge(self.settings, profile.limits, order, self._onsets)
        self._pending = Pending(profile.metrics)
        self._prior = tracker.Prior(
            *(
                jnp.asarray(getattr(profile, f.name), jnp.float32)
                for f in dataclasses.fields(tracker.Prior)
            )
        )
        self._tracks = tracker.begin(self._prior, 0)
        self._course, self._about = None, [OLDER]
        if profile.dynamics is not None:
            self._about = []
            self._course = _Course(profile.dynamics, self.settings, [C, *first])
        longest = int(profile.period_C.max(initial=1))
        self._tail_CNT = np.zeros((C, 0, longest - 1), np.float32)  # may be held in the next tick
        self._edges = Edges(profile.bottom_C, profile.top_C)
        self._quality = Quality(profile.metrics)

    # ---- learning, saving

    @classmethod
    def fit(
        cls,
        sources: "Iterable[Window] | Window",
        *,
        seed: int = 0,
        metrics: Sequence[str] | None = None,
        steps: int = 800,
        settings: Settings = Settings(),
        folder: str | Path | None = None,
        tell: Any = None,
        faults: "Sequence[Sequence[tuple[float, float]]] | None" = None,
    ) -> "Detector":
        """Returns a detector fitted on jobs that were mostly healthy; no labels are needed.

        Args: sources: one for each job: path of a CSV or Parquet file, Samples or a Grid, with at
          least 4 machines and 10 minutes. seed: of the networks and of the order of their data.
          metrics: names, in the order in which they decide the metric of an alert; None: the
          paper's order, then by name. steps: training steps of the networks. folder: saves the
          training every 100 steps, so that the same call resumes; None: not saved. tell: called
          with lines of progress. faults: for each source the intervals [start, end) in Unix seconds
          in which a machine was faulty. They change nothing but the order of the metrics, which is
          then learnt from them (fit.py); None: not known.
        Raises: UserError if there is too little data.
        """
        from megajax.systems.minder import fit  # the trainer's imports take seconds
        from megajax.systems.minder.features import Keep

        if isinstance(sources, str | Path) or not isinstance(sources, Iterable):
            sources = [sources]  # type: ignore[list-item]
        return cls(
            fit.fit(list(sources), seed, metrics, steps, settings, tell, Keep(folder), faults)
        )

    @classmethod
    def load(cls, path: str | Path, settings: Settings | None = None) -> "Detector":
        """Returns a detector from a file of `save`; it has not seen a job yet.

        Raises: UserError for a file that cannot be read or is none of `save`.
        """
        return cls(Profile.load(path), settings)

    def save(self, path: str | Path) -> None:
        """Writes what `fit` learnt to a file; the state of the current job is not saved."""
        self.profile.save(path)

    # ---- a job

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the machines of the job that have been seen."""
        return tuple(self._pending.machines)

    @property
    def scores(self) -> dict[str, float]:
        """{machine: score at the last tick}; 1 is the limit of an alert."""
        worst_N = self._judge.worst_N
        if self._course is not None:
            worst_N = np.maximum(worst_N, self._course.judge.worst_N)
        return dict(zip(self._pending.machines, worst_N.tolist(), strict=False))

    @property
    def named(self) -> dict[str, float]:
        """{named machine: Unix seconds until which it is not named again}.

        While a machine differs or is silent, this is `clear_s` after the last tick.
        """
        until = zip(self._pending.machines, self._judge.free_at_N.tolist(), strict=False)
        return {machine: at for machine, at in until if at > 0}

    def leave(self, machine: str) -> None:
        """Declares that a machine left the job on purpose, so its silence raises no alert."""
        if machine in self._pending.machines:
            self._forget([self._pending.machines.index(machine)])

    def update(self, window: Window) -> list[Alert]:
        """Judges a window; its seconds follow those of the last call.

        Args: window: path of a CSV or Parquet file, Samples, or a Grid of 1 s.
        Returns: the new alerts. Afterwards `notes` has a sentence for each flaw of the window, also
          if no machine has a sample in it.
        Raises: UserError for anything else, for a window that has neither a row nor an interval, or
          if the job has fewer than 4 machines.
        """
        grid = grid_of(window)
        if not grid.values_CNT.shape[2]:
            raise UserError(
                "the window has neither a row nor an interval of time, so nothing was judged: give "
                "rows, or samples with start and end" + "".join(f"; {n}" for n in grid.notes)
            )
        grid = self._quality.check(grid)
        self.notes = [*self._about, *grid.notes, *self._pending.add(grid)]
        self._about = []
        # In its first seconds a machine may only have lost a sample.
        if len(self._pending.machines) < LEAST and grid.end - self._pending.begin >= WINDOW:
            count = len(self._pending.machines)
            while self._pending.take() is not None:  # their time is over
                pass
            if not count:
                raise UserError(nothing_in(grid) or "no machine has a sample yet")
            raise UserError(
                f"a job of {count} machines cannot be judged: at least {LEAST} are needed to say "
                "which one differs"
            )
        alerts: list[Alert] = []
        while (tick := self._pending.take()) is not None:
            alerts += self._look(*tick)
        return alerts

    def _look(self, start: int, values_CNT: np.ndarray) -> list[Alert]:
        """Judges one tick."""
        end, N = start + TICK, len(self._pending.machines)
        values_CNT = self._arrive(start, values_CNT)
        C, rows = values_CNT.shape[0], tracker.rows(N)
        if self._tracks.offset_FN.shape[1] != rows:
            self._tracks = tracker.resized(self._tracks, self._prior, rows)
        held_N, anew_N = np.zeros((2, rows), bool)
        held_N[:N], anew_N[:N] = ~self._judge.learns_N(end), self._judge.anew_N
        p = self.profile
        y_FNJ = np.full((CHANNELS * C, rows, WINDOWS), np.nan, np.float32)
        y_FNJ[:, :N] = features.of_tick(p.model, p.vae, p.range_3C, values_CNT)
        self._tracks, score, far, middle_F, apart = tracker.advance(
            self._prior, self._tracks, jnp.asarray(y_FNJ), held_N, anew_N
        )
        hidden_2CN = self._edges.seen(values_CNT, ~held_N[:N])
        score_FN, far_FN = np.array(score)[:, :N], np.array(far)[:, :N]
        for x_FN in (score_FN, far_FN):
            x_FN[:C][hidden_2CN[0] & (x_FN[:C] < 0) | hidden_2CN[1] & (x_FN[:C] > 0)] = 0.0
        x_CNT = features.scaled(values_CNT, *p.range_3C[:, :, None, None].astype(np.float32))
        self._onsets.add(x_CNT)
        findings = self._judge.look(
            end, score_FN, far_FN, np.asarray(apart)[:, :N], np.asarray(middle_F)
        )
        alerts = [self._alert(one, end) for one in findings]
        if self._course is not None:
            for one in self._course.look(end, x_CNT, rows, self._judge):
                alerts.append(self._alert_of_course(one, end, self._course))
        last_N = self._judge.seen_CN.max(0)
        silent_N = np.isfinite(last_N) & (end - last_N > LEFT)
        if silent_N.any():
            self._forget(np.flatnonzero(silent_N).tolist())
        return alerts

    def _arrive(self, start: int, values_CNT: np.ndarray) -> np.ndarray:
        """Adds new machines; returns the tick with each sample held for its metric's period."""
        C, N, T = values_CNT.shape
        judge, tail = self._judge, self._tail_CNT.shape[2]
        if (have := judge.joined_N.shape[0]) < N:
            judge.grow(N)
            if self._course is not None:
                self._course.judge.grow(N)
            pad = ((0, 0), (0, N - have), (0, 0))
            self._tail_CNT = np.pad(self._tail_CNT, pad, constant_values=np.nan)
        has_CNT = np.isfinite(values_CNT)
        last_CN = start + T - np.argmax(has_CNT[..., ::-1], 2)
        judge.see(np.where(has_CNT.any(2), last_CN, -math.inf), start)
        both = np.concatenate([self._tail_CNT, values_CNT], 2)
        self._tail_CNT = both[..., both.shape[2] - tail :]
        return held(both, self.profile.period_C)[..., tail:]

    def _forget(self, rows: list[int]) -> None:
        self._quality.forget([self._pending.machines[k] for k in rows])
        self._pending.forget(rows)
        if rows[0] >= self._judge.joined_N.shape[0]:
            return  # came since the last tick
        self._judge.forget(rows)
        self._tail_CNT = np.delete(self._tail_CNT, rows, axis=1)
        self._tracks = tracker.without(self._tracks, rows)
        self._edges.forget(rows)
        self._onsets.forget(rows)
        if self._course is not None:
            self._course.forget(rows)

    # ---- alerts

    def _alert(self, finding: Finding, end: float) -> Alert:
        metrics, judge = self.profile.metrics, self._judge
        C = len(metrics)
        signed_F = judge.mean_FN[:, finding.row]
        named = {}
        for c, metric in enumerate(
            metrics
        ):  # a level has a direction, so a residual must be larger
            level, residual = float(signed_F[c]), float(signed_F[C + c])
            named[metric] = level if 2 * abs(level) >= abs(residual) else residual
        apart = sorted(((m, s) for m, s in named.items() if abs(s) >= 1), key=lambda x: -abs(x[1]))
        if finding.channel is None:
            assert finding.metric is not None
            metric, kind = metrics[finding.metric], "silent" if finding.is_silent else "vanished"
        else:
            metric = metrics[finding.channel % C]
            kind = nearest({m: float(signed_F[c]) for c, m in enumerate(metrics)})
        machine = self._pending.machines[finding.row]
        return Alert.of_machine(
            machine, metric, finding.since, finding.score, kind, tuple(apart), end
        )

    def _alert_of_course(self, finding: Finding, end: float, course: "_Course") -> Alert:
        metrics, mean_F = self.profile.metrics, course.judge.mean_FN[:, finding.row]
        assert finding.channel is not None
        is_late = finding.channel == len(metrics)
        named = dict(zip(metrics, mean_F.tolist(), strict=False))
        apart = sorted(((m, s) for m, s in named.items() if s >= 1), key=lambda x: -x[1])
        shown = max(named, key=lambda m: named[m]) if is_late else metrics[finding.channel]
        return Alert.of_machine(
            self._pending.machines[finding.row],
            shown,
            finding.since,
            finding.score,
            COURSES[is_late],
            tuple(apart),
            end,
            float(course.lag_N[finding.row]) if is_late else 0.0,
        )


class _Course:
    """Spreads and lags of a job's machines: estimates and judge. lag_N: by how many seconds each
    machine is behind the others, over about the last two minutes."""

    def __init__(self, learnt: Dynamics, settings: Settings, order: Sequence[int]):
        F = len(learnt.noise_F)
        firm = dataclasses.replace(settings, strict=FIRM * settings.strict)
        self.judge = Judge(firm, learnt.limits, order, levels=F)
        self.lag_N = np.zeros(0)
        self._state = tracker.State()
        self._prior = tracker.prior(learnt.noise_F, learnt.offset_F, learnt.slope_F)
        self._tracks = tracker.begin(self._prior, 0)

    def look(self, end: float, x_CNT: np.ndarray, rows: int, levels: Judge) -> list[Finding]:
        """Takes the scaled samples of a tick that ended at `end`; returns the machines to name.

        A machine that `levels` names, or one that differs while it names another, is not named.
        Args: rows: length of the arrays of compiled programs. levels: the judge of levels, which is
          told which machines are named.
        """
        N = x_CNT.shape[1]
        if self._tracks.offset_FN.shape[1] != rows:
            self._tracks = tracker.resized(self._tracks, self._prior, rows)
        y_FN, state_S = tracker.of_tick(x_CNT)
        is_usual, is_new = self._state.see(state_S)
        if not is_usual:
            y_FN = np.full_like(y_FN, np.nan)
        if is_new:
            self.judge.anew()
        self.judge.come(levels)
        held_N, anew_N = np.zeros((2, rows), bool)
        held_N[:N], anew_N[:N] = ~self.judge.learns_N(end), self.judge.anew_N
        self._tracks, score_FN, far_FN, apart_FN = tracker.advance_course(
            self._prior, self._tracks, y_FN, held_N, anew_N
        )
        # Whoever was behind from the start has a wrong clock; short steps can hide by how much.
        score_FN[-1, self.judge.young_N()] = 0.0
        lag_N = y_FN[-1]
        if np.isfinite(lag_N).any():
            self.lag_N = np.pad(self.lag_N, (0, N - len(self.lag_N)))
            self.lag_N += SMOOTH * np.nan_to_num(lag_N - np.nanmedian(lag_N) - self.lag_N)
        findings = self.judge.look(end, score_FN, far_FN, apart_FN, None)
        self.judge.tell(levels, findings)
        return findings

    def forget(self, rows: list[int]) -> None:
        """Removes the machines in these rows."""
        self.judge.forget(rows)
        self._tracks = tracker.without(self._tracks, rows)
        self.lag_N = np.delete(self.lag_N, [r for r in rows if r < len(self.lag_N)])


assert WINDOWS * WINDOW == TICK


# ---- a detector that runs on, whatever a window makes it raise


MAX_NOTES = 1000  # (chosen) that are remembered
# A number that stands alone: a count or a moment, not a part of a machine's name or address.
NUMBER = re.compile(r"(?<![\w.:/-])\d+(?:\.\d+)?(?![\w:/-]|\.\d)")


class Runner:
    """Judges window after window of one job, for the daemon (watch.py) and for child.py."""

    def __init__(self, load: Callable[[], Detector], quiet_s: float = math.inf):
        """load: returns a detector that has seen no job. quiet_s: seconds without a note, after
        which the note is new again."""
        self._load, self._quiet_s = load, quiet_s
        self.detector = load()
        self._notes: dict[str, float] = {}  # without its numbers -> when it came

    def begin(self) -> None:
        """Begins anew, without history."""
        self.detector = self._load()

    def judge(self, window: Window) -> tuple[list[Alert], list[str], Exception | None]:
        """Returns (new alerts, notes about the window, the error that it caused or None).

        After an error that is no UserError, what the detector had learnt may be half of the old and
        half of the new, so it begins anew.
        """
        detector = self.detector
        try:
            return detector.update(window), detector.notes, None
        except UserError as error:
            return [], detector.notes, error
        except Exception as error:
            self.begin()
            return [], detector.notes, error

    def is_new(self, note: str) -> bool:
        """Tells whether a note has not occurred for `quiet_s`; numbers in it do not count."""
        key, now = without_numbers(note), time.monotonic()
        came = self._notes.pop(key, None)
        self._notes[key] = now
        if len(self._notes) > MAX_NOTES:
            del self._notes[next(iter(self._notes))]  # the one that is longest ago
        return came is None or now - came > self._quiet_s


def without_numbers(note: str) -> str:
    """Returns the note with its numbers replaced by '#', so that repeated notes compare equal."""
    return NUMBER.sub("#", note)
