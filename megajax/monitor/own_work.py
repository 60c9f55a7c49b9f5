"""Which rank makes the steps slow: how its own work grew beside how the step grew.

All ranks of a job take equally long for a step, because each waits in collectives for the slowest:
the step's time says that one is slow, not which one. What a rank does itself does not wait. Of each
rank three measures of it are read, as far as they are there, in seconds a step:

own      between the steps' launches: data and prepare (timers.py)
demand   processor time that its threads got or waited for, as its agent saw it (host_meter.py)
pulse    how long its devices took for a fixed product, times the usual step (training/loop.py)

A rank is named when for a whole continuity the steps took longer than before, its own work grew by
at least half of that more than the others' did, and nearly every tick says so (MegaScale section
5.1 compares ranks with each other, NVRx with their own past too; Minder section 4.3: continuity).
What slows all ranks, or slows nobody's step, names nobody. A rank that was slow from the start has
no past to grow from; the rule `straggler` compares it with the others. No jax import.

Legend: M measures, R ranks, W ticks of the continuity, P ticks before it.
"""

import warnings
from collections import deque
from dataclasses import dataclass

import numpy as np

MEASURES = ("own", "demand", "pulse")
TICKS = 10  # of the continuity
MISSES = 0  # of them that may say otherwise: disturbances of 200 s are none
LEAST_PAST = 5  # (chosen) ticks before the continuity
PAST = 120  # (chosen) ticks that are remembered before it
GROWN = 0.05  # (chosen) of a step: the least growth that is worth a machine
PART = 0.3  # (chosen) of what a rank's own work grew, that the steps must have grown then
LEAST_PART = 0.3  # (chosen) of what the steps grew, that its own work must explain
TICK_PART = 0.5  # (chosen) of the average that a tick must show
EDGE = 5  # (chosen) ticks before and after the growth that are compared
SIGMAS = 2.5  # (chosen) of a tick's own noise, for an average over ten of them
SEEN, BEYOND = 0.95, 1.5  # (chosen) processor time that it took before, beside the steps, is none
ALIKE = 0.5  # (chosen) as much as the furthest one: more such ranks have a common cause
CROWD = 16  # (chosen) ranks of which two may be sick at a time


@dataclass(frozen=True)
class Slow:
    """A rank that makes the steps slow. since: when the continuity began.

    more_s: seconds of own work a step that it grew more than the others, by the measure that shows
    it best. usual_s, step_s: how long a step took before, and takes now.
    """

    rank: int
    since: float
    measure: str
    more_s: float
    usual_s: float
    step_s: float


class OwnWork:
    """Remembers the ticks of one job. share_R: the growth of own work now, in usual steps."""

    def __init__(self, ranks: int, ticks: int = TICKS):
        """ticks: of the continuity."""
        self._ticks = ticks
        self._at: deque[float] = deque(maxlen=ticks + PAST)
        self._step: deque[float] = deque(maxlen=ticks + PAST)
        self._work: deque[np.ndarray] = deque(maxlen=ticks + PAST)
        self._named: set[int] = set()
        self.share_R = np.zeros(ranks)

    @property
    def usual_s(self) -> float | None:
        """How long a step usually took before the last ticks; None: not known yet."""
        past = list(self._step)[: -self._ticks]
        return float(np.median(past)) if len(past) >= LEAST_PAST else None

    def tick(self, at: float, step_s: float, work_MR: np.ndarray) -> list[Slow]:
        """Takes the medians of a stretch of time that began at `at`; returns who is newly named.

        work_MR: seconds a step by MEASURES; NaN: not measured.
        """
        self._at.append(at)
        self._step.append(step_s)
        self._work.append(np.asarray(work_MR, float))
        if len(self._step) < self._ticks + LEAST_PAST:
            return []
        with warnings.catch_warnings():  # rows without any measurement
            warnings.simplefilter("ignore", RuntimeWarning)
            return self._judge()

    def _judge(self) -> list[Slow]:
        W, step_T = self._ticks, np.asarray(self._step)
        usual = float(np.median(step_T[:-W]))
        grown_TMR, excess_TMR, noise_MR = self._grown(np.stack(self._work), W)
        now_WMR = excess_TMR[-W:]
        mean_MR = np.nan_to_num(np.nanmean(now_WMR, axis=0))
        self.share_R = mean_MR.max(0) / usual
        self._named &= set(np.flatnonzero(self.share_R > GROWN / 2).tolist())
        lasts_MR = (now_WMR >= TICK_PART * mean_MR - noise_MR).sum(0) >= W - MISSES
        seen_MR = np.nan_to_num(np.nanquantile(excess_TMR[:-W], SEEN, axis=0))
        seen_MR[np.array(MEASURES) != "demand"] = 0.0
        lasts_MR &= (mean_MR > SIGMAS * noise_MR) & (mean_MR > BEYOND * seen_MR)
        lasts_MR &= (mean_MR >= GROWN * usual) & _alone(np.nanmean(grown_TMR[-W:], axis=0))
        found = []
        for r in np.flatnonzero(lasts_MR.any(0)):
            if int(r) in self._named:
                continue
            for m in sorted(np.flatnonzero(lasts_MR[:, r]), key=lambda m: -mean_MR[m, r]):
                one = self._slow(int(r), int(m), excess_TMR[:, m, r], step_T)
                if one is not None:
                    found.append(one)
                    self._named.add(int(r))
                    break
        return found

    def _slow(self, r: int, m: int, excess_T: np.ndarray, step_T: np.ndarray) -> Slow | None:
        """Returns the finding about a rank whose own work has grown, None where no step did."""
        W = self._ticks
        more = float(np.nanmean(excess_T[-W:]))
        low_T = ~(excess_T >= TICK_PART * more)
        before = np.flatnonzero(low_T[:-W])
        onset = int(before[-1]) + 1 if len(before) else 0
        before_s = float(np.median(step_T[max(onset - EDGE, 0) : max(onset, 1)]))
        grown = float(np.median(step_T[onset + 1 : onset + 1 + EDGE])) - before_s
        least = max(GROWN * before_s, PART * more if MEASURES[m] == "own" else 0.0)
        is_clear = MEASURES[m] == "pulse" and more >= 2 * GROWN * before_s
        if not is_clear and not (grown >= least and more >= LEAST_PART * grown):
            return None
        now = float(np.median(step_T[-W:]))
        return Slow(r, list(self._at)[onset], MEASURES[m], more, before_s, now)

    @staticmethod
    def _grown(work_TMR: np.ndarray, W: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (growth over the past before the last W ticks, growth beyond the others', noise
        of that in the past, (M, R))."""
        grown_TMR = work_TMR - np.nanmedian(work_TMR[:-W], axis=0)
        excess_TMR = grown_TMR - _others(grown_TMR)
        noise_MR = 1.4826 * np.nanmedian(np.abs(excess_TMR[:-W]), axis=0)
        noise_MR = np.fmax(noise_MR, np.nanmedian(noise_MR, axis=1, keepdims=True))
        return grown_TMR, excess_TMR, noise_MR


def _alone(grown_MR: np.ndarray) -> np.ndarray:
    """Returns where a rank is no one of many that grew like it, as all do, or those of one role."""
    grown_MR = np.nan_to_num(grown_MR)
    most_M1 = grown_MR.max(1, keepdims=True)
    near_MR = (grown_MR >= ALIKE * most_M1) & (grown_MR > 0)
    two_M1 = (grown_MR >= ALIKE / 2 * most_M1).sum(1, keepdims=True) <= 2
    many_M1 = near_MR.sum(1, keepdims=True)
    return near_MR & ((many_M1 == 1) | (two_M1 & (grown_MR.shape[1] >= CROWD)))


def _others(x_TMR: np.ndarray) -> np.ndarray:
    """Returns the median of the other ranks, of each rank."""
    R = x_TMR.shape[2]
    if R > 16:  # one more or less does not move it
        return np.nanmedian(x_TMR, axis=2, keepdims=True)
    if R == 1:
        return np.zeros_like(x_TMR)
    parts = [np.nanmedian(np.delete(x_TMR, r, axis=2), axis=2) for r in range(R)]
    return np.stack(parts, axis=2)
