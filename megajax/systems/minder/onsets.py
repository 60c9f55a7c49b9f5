"""When each machine moved, to the second: who moved first is the cause, who moved later follows.

The judge knows onsets to a tick of 24 s, and a fault reaches the neighbours of its machine within
seconds. Here the last minutes of all samples are kept. A machine's onset is the change point of its
course against the machines that do not differ: the moment that splits the course into two levels
with the least squares, over all metrics in which the machine differs.

Legend: C metrics, N machines, T seconds, R machines that are asked for.
"""

import collections

import numpy as np

from megajax.systems.minder.settings import TICK

AROUND = 4  # (chosen) ticks before and after a tick in which its machine's onset is looked for
MORE = AROUND + 3  # ticks that are kept beyond the longest span
MOST = 64  # (chosen) machines that are asked for: where more differ, the job has changed
LEAST = 8  # (chosen) seconds on either side of a change point
BLUR = 6.0  # (chosen) of an onset: so many times noise variance over squared change, in seconds
OTHERS = 2  # machines that do not differ, at least
MOVED = 2.0  # (chosen) standard deviations from which a metric has moved


class Onsets:
    """The last samples of all machines, scaled, in half precision."""

    def __init__(self, ticks: int):
        """ticks: of the longest span that is judged."""
        self._ticks: collections.deque[np.ndarray] = collections.deque(maxlen=ticks + MORE)

    def add(self, x_CNT: np.ndarray) -> None:
        """Adds a tick; x_CNT: scaled samples; machines may have come since the last one."""
        self._ticks.append(x_CNT.astype(np.float16))

    def forget(self, rows: list[int]) -> None:
        """Removes the machines in these rows."""
        for k, x_CNT in enumerate(self._ticks):
            there = [row for row in rows if row < x_CNT.shape[1]]
            self._ticks[k] = np.delete(x_CNT, there, axis=1)

    def moved(
        self, rows_R: np.ndarray, ago_R: np.ndarray, far_CR: np.ndarray, still_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (seconds before now at which each machine moved, by how much that may be wrong).

        NaN where it cannot be told. Args: ago_R: the same, to a tick. far_CR: scores of the levels.
        still_N: machines that do not differ.
        """
        moved_R, blur_R = np.full((2, len(rows_R)), np.nan)
        if still_N.sum() < OTHERS or len(rows_R) > MOST:
            return moved_R, blur_R
        ticks_R = np.round(ago_R / TICK).astype(int)
        for ago in np.unique(ticks_R):
            last, first = max(ago - AROUND, 0), min(ago + AROUND, len(self._ticks))
            if first - last < AROUND:  # too long ago
                continue
            part_CNT = self._part(first, last, len(still_N))
            others_CNT = part_CNT[:, still_N]
            others_CNT[:, 0][~np.isfinite(others_CNT).any(1)] = np.inf  # nobody has a sample
            middle_CT = np.nanmedian(others_CNT, 1)
            middle_CT[~np.isfinite(middle_CT)] = np.nan
            for r in np.flatnonzero(ticks_R == ago):
                metrics = np.abs(far_CR[:, r]) >= MOVED
                apart_CT = (part_CNT[:, rows_R[r]] - middle_CT)[metrics]
                split, blur_R[r] = _change(apart_CT)
                moved_R[r] = TICK * first - split
        return moved_R, blur_R

    def _part(self, first: int, last: int, machines: int) -> np.ndarray:
        """Returns x_CNT from `first` ticks ago to `last` ticks ago."""
        parts = []
        for k in range(len(self._ticks) - first, len(self._ticks) - last):
            x_CNT = self._ticks[k].astype(np.float32)
            pad = ((0, 0), (0, machines - x_CNT.shape[1]), (0, 0))
            parts.append(np.pad(x_CNT, pad, constant_values=np.nan))
        return np.concatenate(parts, 2)


def _change(apart_CT: np.ndarray) -> tuple[float, float]:
    """Returns (seconds before the change, by how much that may be wrong), NaN if there is none."""
    gain_T, sure = np.zeros(apart_CT.shape[1] + 1), 0.0
    for apart_T in apart_CT:
        measured_T = np.isfinite(apart_T)
        count_T = np.concatenate([[0], np.cumsum(measured_T)])
        total_T = np.concatenate([[0.0], np.cumsum(np.where(measured_T, apart_T, 0.0))])
        steps = np.diff(apart_T[measured_T])
        if len(steps) < 4 * LEAST:
            continue
        noise = max(float(np.median(np.abs(steps))) ** 2, 1e-6)
        after_T, sum_T = count_T[-1] - count_T, total_T[-1] - total_T
        inside_T = (count_T >= LEAST) & (after_T >= LEAST)
        before_T = np.maximum(count_T, 1)
        step_T = np.where(inside_T, sum_T / np.maximum(after_T, 1) - total_T / before_T, 0.0)
        gain_T += step_T**2 * before_T * after_T / max(count_T[-1], 1) / noise
        sure += float(step_T[np.argmax(gain_T)]) ** 2 / noise
    if sure <= 0:
        return np.nan, np.nan
    return float(np.argmax(gain_T)), BLUR / sure
