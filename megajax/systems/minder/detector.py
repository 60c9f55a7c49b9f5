"""The detector of a job: learns what is healthy, then reads windows and names machines.

Source: Minder (NSDI 2025, arXiv 2411.01791). Each tick of 24 s goes through features.py (LSTM-VAEs)
and tracker.py (distances to the peers and to the machine's own past) on the device, then through
judge.py (continuity, causes) on the host. The state is that of one job; windows may be cut anywhere
and give the same alerts, and no second is computed twice.

Legend: C metrics, F channels, N machines.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.quality import Quality
from megajax.systems.minder import features, kinds, tracker
from megajax.systems.minder.alert import Alert
from megajax.systems.minder.judge import Found, Judge
from megajax.systems.minder.pending import Pending, Window, grid_of, held
from megajax.systems.minder.profile import Profile
from megajax.systems.minder.settings import CHANNELS, LEAST, TICK, WINDOW, WINDOWS, Settings

LEFT = 3600.0  # (chosen) seconds of silence after which a machine is no part of the job


class Detector:
    """Watches one job. Not thread-safe."""

    def __init__(self, profile: Profile, settings: Settings | None = None):
        """settings: None: those of the profile."""
        self.profile = profile
        self.settings = profile.settings if settings is None else settings
        self.notes: list[str] = []  # of the last update: what was wrong with its window
        C = len(profile.metrics)
        first = [profile.metrics.index(m) for m in profile.priority or profile.metrics]
        order = [c + k * C for c in first for k in range(CHANNELS)]
        self._judge = Judge(self.settings, profile.limits, order)
        self._pending = Pending(profile.metrics)
        self._prior = tracker.Prior(
            *(jnp.asarray(getattr(profile, f.name), jnp.float32)
              for f in dataclasses.fields(tracker.Prior))
        )  # fmt: skip
        self._tracks = tracker.begin(self._prior, 0)
        longest = int(profile.period_C.max(initial=1))
        self._tail_CNT = np.zeros((C, 0, longest - 1), np.float32)  # may be held in the next tick
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
        """Learns from jobs that were mostly healthy; nobody needs to say which parts were not.

        Args: sources: one a job: a path of a CSV or parquet file, Samples or a Grid; at least 4
          machines and 10 minutes each. seed: of the networks and of what they see. metrics: in the
          order in which they decide; None: the paper's order, then by name. steps: of training.
          folder: keeps the training every 100 steps, and it goes on after a stop. tell:
          called with lines of progress. faults: where they are known, of each source the intervals
          [start, end) in Unix s in which a machine was faulty: the order in which the metrics
          decide is then learnt from them (priority.py). They change nothing else.
        Raises: UserError where there is too little to learn from.
        """
        from megajax.systems.minder import fit  # the trainer's imports take seconds
        from megajax.systems.minder.training import Keep

        if isinstance(sources, str | Path) or not isinstance(sources, Iterable):
            sources = [sources]  # type: ignore[list-item]
        return cls(
            fit.fit(list(sources), seed, metrics, steps, settings, tell,
                    Keep(folder), faults)
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path, settings: Settings | None = None) -> "Detector":
        """Returns a detector without history. Raises: UserError for a file that is none."""
        return cls(Profile.load(path), settings)

    def save(self, path: str | Path) -> None:
        """Writes what was learnt, not what was seen of a job since."""
        self.profile.save(path)

    # ---- a job

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines of the job, as far as they are known."""
        return tuple(self._pending.machines)

    @property
    def scores(self) -> dict[str, float]:
        """{machine: how far it was at the last tick}, 1 at what makes an alert."""
        return dict(zip(self._pending.machines, self._judge.worst_N.tolist(), strict=False))

    @property
    def named(self) -> dict[str, float]:
        """{machine: Unix seconds until which it is not named again} of those that were named. While
        a machine differs, or is silent, this lies `clear_s` after the last tick."""
        until = zip(self._pending.machines, self._judge.free_at_N.tolist(), strict=False)
        return {machine: at for machine, at in until if at > 0}

    def leave(self, machine: str) -> None:
        """Declares that a machine left the job on purpose: its silence is no sign."""
        if machine in self._pending.machines:
            self._forget([self._pending.machines.index(machine)])

    def update(self, window: Window) -> list[Alert]:
        """Reads a window, the seconds that follow those of the last one.

        Returns: alerts that are new. `notes` then says what was wrong with the window.
        Raises: UserError for what is no window, or when the job has fewer than 4 machines.
        """
        grid = self._quality.check(grid_of(window))
        self.notes = [*grid.notes, *self._pending.add(grid)]
        # In its first seconds a machine may only have lost a sample.
        if len(self._pending.machines) < LEAST and grid.end - self._pending.begin >= WINDOW:
            count = len(self._pending.machines)
            while self._pending.take() is not None:  # their time is over
                pass
            raise UserError(
                f"a job of {count} machines cannot be judged: at least {LEAST} are needed to say "
                "which one differs"
            )
        found: list[Alert] = []
        while (tick := self._pending.take()) is not None:
            found += self._look(*tick)
        return found

    def _look(self, start: int, values_CNT: np.ndarray) -> list[Alert]:
        """Judges one tick."""
        end, N = start + TICK, len(self._pending.machines)
        values_CNT = self._arrive(start, values_CNT)
        C, rows = values_CNT.shape[0], _rows(N)
        if self._tracks.offset_FN.shape[1] != rows:
            self._tracks = tracker.resized(self._tracks, self._prior, rows)
        held_N = np.zeros(rows, bool)
        held_N[:N] = ~self._judge.learns_N(end)
        p = self.profile
        y_FNJ = np.full((CHANNELS * C, rows, WINDOWS), np.nan, np.float32)
        y_FNJ[:, :N] = features.of_tick(p.model, p.vae, p.range_3C, values_CNT)
        self._tracks, score, far, _ = tracker.advance(
            self._prior, self._tracks, jnp.asarray(y_FNJ), held_N
        )
        found = self._judge.look(end, np.asarray(score)[:, :N], np.asarray(far)[:, :N])
        alerts = [self._alert(one, end) for one in found]
        last_N = self._judge.seen_CN.max(0)
        silent_N = np.isfinite(last_N) & (end - last_N > LEFT)
        if silent_N.any():
            self._forget(np.flatnonzero(silent_N).tolist())
        return alerts

    def _arrive(self, start: int, values_CNT: np.ndarray) -> np.ndarray:
        """Takes new machines in; returns the seconds with values held for their metric's period."""
        C, N, T = values_CNT.shape
        judge, tail = self._judge, self._tail_CNT.shape[2]
        if (have := judge.joined_N.shape[0]) < N:
            judge.grow(N)
            pad = ((0, 0), (0, N - have), (0, 0))
            self._tail_CNT = np.pad(self._tail_CNT, pad, constant_values=np.nan)
        has_CNT = np.isfinite(values_CNT)
        last_CN = start + T - np.argmax(has_CNT[..., ::-1], 2)
        judge.see(np.where(has_CNT.any(2), last_CN, -math.inf), start)
        both = np.concatenate([self._tail_CNT, values_CNT], 2)
        self._tail_CNT = both[..., both.shape[2] - tail :]
        return held(both, self.profile.period_C)[..., tail:]

    def _forget(self, rows: list[int]) -> None:
        self._pending.forget(rows)
        if rows[0] >= self._judge.joined_N.shape[0]:
            return  # came since the last tick
        self._judge.forget(rows)
        self._tail_CNT = np.delete(self._tail_CNT, rows, axis=1)
        self._tracks = tracker.without(self._tracks, rows)

    # ---- alerts

    def _alert(self, found: Found, end: float) -> Alert:
        metrics, judge = self.profile.metrics, self._judge
        C = len(metrics)
        signed_F = judge.mean_FN[:, found.row]
        named = {}
        for c, metric in enumerate(
            metrics
        ):  # a level has a direction, so a residual must be larger
            level, residual = float(signed_F[c]), float(signed_F[C + c])
            named[metric] = level if 2 * abs(level) >= abs(residual) else residual
        apart = sorted(((m, s) for m, s in named.items() if abs(s) >= 1), key=lambda x: -abs(x[1]))
        if found.channel is None:
            assert found.metric is not None
            metric, kind = metrics[found.metric], "silent" if found.whole else "vanished"
        else:
            metric = metrics[found.channel % C]
            kind = kinds.nearest({m: float(signed_F[c]) for c, m in enumerate(metrics)})
        machine = self._pending.machines[found.row]
        return Alert(machine, metric, found.since, found.score, kind, tuple(apart), end)


def _rows(machines: int) -> int:
    """Returns a power of two, so that few programs are compiled as machines come and go."""
    return max(8, 1 << (machines - 1).bit_length())


assert WINDOWS * WINDOW == TICK
