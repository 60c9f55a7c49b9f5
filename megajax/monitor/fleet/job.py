"""The timeline of the whole job: its speed, its phases and its progress, second by second.

Training is synchronous, so there is one progress for all machines: a machine that is slow slows
all. Legend: T seconds.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megajax.monitor.fleet import background
from megajax.monitor.fleet.background import HOUR
from megajax.monitor.fleet.disturbances import Disturbance
from megajax.monitor.fleet.roles import Layout
from megajax.monitor.fleet.settings import Setting

TRACKS = ("speed", "tempo", "evaluate", "idle", "init", "starve", "write", "disk")


@dataclass(frozen=True)
class Job:
    """A job from second `start` on. explicit: disturbances besides those of the background."""

    setting: Setting
    layout: Layout
    seed: int
    start: int
    explicit: tuple[Disturbance, ...]

    @cached_property
    def _hours(self) -> dict[int, list[Disturbance]]:
        return {}  # a cache of a pure function

    @cached_property
    def _tracks(self) -> dict[int, dict[str, np.ndarray]]:
        return {}

    @cached_property
    def _progress(self) -> list[float]:
        """Steps done at the start of hour first, first + 1, ..."""
        return [0.0]

    def _of_hour(self, hour: int) -> list[Disturbance]:
        if hour not in self._hours:
            made = background.of_hour(self.setting, self.layout, self.seed, hour)
            if hour * HOUR < self.start:  # nothing is disturbed before the job starts
                made = [d for d in made if d.start >= self.start]
            self._hours[hour] = made + background.phases(self.setting, self.start, hour)
        return self._hours[hour]

    def disturbances(self, first: float, last: float) -> list[Disturbance]:
        """Returns those that overlap [first, last), background first, in a fixed order."""
        hours = range(int(first // HOUR) - 1, int(last // HOUR) + 1)
        drawn = [d for hour in hours for d in self._of_hour(hour)]
        return [d for d in (*drawn, *self.explicit) if d.start < last and d.end > first]

    def tracks(self, hour: int) -> dict[str, np.ndarray]:
        """Returns the tracks of an hour, float32 (3600,), and `progress` in steps, float64 (3601,).

        speed: 0..1. tempo: seconds of a step in shares of the setting's. idle: no process. starve:
        GPUs wait for data or for the disk. evaluate, init, write, disk: 0..1, how much of it.
        """
        if hour in self._tracks:
            return self._tracks[hour]
        second = hour * HOUR
        found: dict[str, np.ndarray] = {name: np.zeros(HOUR, np.float32) for name in TRACKS}
        found["speed"] += 1
        found["tempo"] += 1
        changes = [d for d in self.disturbances(second, second + HOUR) if d.changes_the_job]
        # A job that hangs saves and evaluates nothing, so a hang comes last.
        for disturbance in sorted(changes, key=lambda d: d.kind == "hang"):
            _apply(disturbance, second, found)
        steps = found["speed"].astype(np.float64) / (self.setting.step_s * found["tempo"])
        if second < self.start:
            steps[: self.start - second] = 0
        done = self._steps_before(hour)
        found["progress"] = done + np.concatenate([[0.0], np.cumsum(steps)])
        first = self.start // HOUR
        if hour - first + 1 == len(self._progress):
            self._progress.append(float(found["progress"][-1]))
        self._tracks[hour] = found
        return found

    def _steps_before(self, hour: int) -> float:
        first = self.start // HOUR
        if hour < first:
            return 0.0
        while len(self._progress) <= hour - first:
            missing = first + len(self._progress) - 1
            self._tracks.pop(missing, None)
            self.tracks(missing)
            if len(self._tracks) > 4:
                self.forget(missing)
        return self._progress[hour - first]

    def forget(self, hour: int) -> None:
        """Drops what is cached of the hours before `hour` - 2."""
        for cache in (self._hours, self._tracks):
            for old in [h for h in cache if h < hour - 2]:
                del cache[old]

    def window(self, first: int, seconds: int) -> dict[str, np.ndarray]:
        """Returns the tracks of [first, first + seconds); progress has one value more."""
        parts = []
        for hour in range(first // HOUR, (first + seconds - 1) // HOUR + 1):
            tracks, second = self.tracks(hour), hour * HOUR
            low, high = max(first - second, 0), min(first + seconds - second, HOUR)
            parts.append({n: v[low : high + (n == "progress")] for n, v in tracks.items()})
        joined = {n: np.concatenate([p[n] for p in parts]) for n in TRACKS}
        progress = [p["progress"][:-1] for p in parts[:-1]] + [parts[-1]["progress"]]
        return joined | {"progress": np.concatenate(progress)}


def _apply(disturbance: Disturbance, second: int, tracks: dict[str, np.ndarray]) -> None:
    """Enters a disturbance into the tracks of the hour that starts at `second`."""
    low = int(np.clip(np.ceil(disturbance.start - second), 0, HOUR))
    high = int(np.clip(np.ceil(disturbance.end - second), 0, HOUR))
    if low == high:
        return
    part, state = slice(low, high), disturbance.state
    speed = disturbance.speed
    if state in ("write", "evaluate", "restart", "starve"):
        speed = 0.0
    if state == "workload":
        tracks["tempo"][part] /= max(speed, 0.05)
    else:
        since = np.arange(low, high) + second - disturbance.start
        fall = np.clip(since / disturbance.ramp_s, 0, 1) if disturbance.ramp_s else 1.0
        now = np.float32(1 - (1 - speed) * fall)
        tracks["speed"][part] = np.minimum(tracks["speed"][part], now)
    if disturbance.kind == "hang":
        for name in ("write", "evaluate", "starve", "idle", "init"):
            tracks[name][part] = 0
    marks = {
        "write": (("write", 1.0), ("starve", 1.0)),
        "write_behind": (("write", 0.4),),
        "evaluate": (("evaluate", 1.0),),
        "starve": (("starve", 1.0),),
        "disk": (("disk", 1.0),),
        "restart": (("idle", 1.0),),
    }
    for name, value in marks.get(state, ()):
        tracks[name][part] = np.maximum(tracks[name][part], np.float32(value))
    if state == "restart":  # processes start in its second half
        half = int(np.ceil((disturbance.start + disturbance.end) / 2 - second))
        tracks["init"][max(half, low) : high] = 1.0
