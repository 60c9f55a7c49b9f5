"""From scores of machines by window to alerts: the paper's rule, and how its threshold is tuned.

Minder section 4.3 and 4.4: of the machines of a window, the one with the highest score is the
candidate if that is above a threshold; a machine that has been the candidate for the continuity,
window after window, is named. Metrics are looked at in their order of priority.

Legend: M streams (metrics in order, or one of all), J windows, N machines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.reports.minder_rivals.view import WINDOW, Said, View

CONTINUITY = 240 // WINDOW  # windows: the paper's four minutes
# How a sum of distances becomes a score. z: the paper's; it is at most sqrt(n - 1).
SCORES = ("z", "share", "ratio", "mad", "plain")


@dataclass(frozen=True)
class Trace:
    """The candidates of a case: of each stream and window the two highest scores and whose they
    are, (2, M, J). A case is judged by this alone, so a threshold costs nothing to try."""

    who: np.ndarray
    high: np.ndarray
    kept: dict = field(default_factory=dict)  # strengths that were asked for

    def strength(self, out: int, need: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the lowest score of the last `need` windows, -inf where they had not one
        candidate; the candidate), (M, J) each. out: a machine that is no candidate; -1: none."""
        if (out, need) not in self.kept:
            is_out = self.who[0] == out
            who_MJ = np.where(is_out, self.who[1], self.who[0])
            high_MJ = np.where(is_out, self.high[1], self.high[0])
            found = np.full(who_MJ.shape, -np.inf)
            if who_MJ.shape[1] >= need:
                lasts = np.lib.stride_tricks.sliding_window_view(who_MJ, need, 1)
                same = (lasts == lasts[..., :1]).all(2)
                low = np.lib.stride_tricks.sliding_window_view(high_MJ, need, 1).min(2)
                found[:, need - 1 :] = np.where(same, low, -np.inf)
            self.kept[out, need] = found, who_MJ
        return self.kept[out, need]


def trace(score_MJN: np.ndarray, there_JN: np.ndarray) -> Trace:
    """Returns the candidates; machines that are not there are none."""
    score_MJN = np.where(there_JN, score_MJN, -np.inf)
    first_MJ = score_MJN.argmax(2)
    high_MJ = np.take_along_axis(score_MJN, first_MJ[..., None], 2)
    rest_MJN = score_MJN.copy()
    np.put_along_axis(rest_MJN, first_MJ[..., None], -np.inf, 2)
    second_MJ = rest_MJN.argmax(2)
    next_MJ = np.take_along_axis(rest_MJN, second_MJ[..., None], 2)
    high = np.stack([high_MJ[..., 0], next_MJ[..., 0]]).astype(np.float32)
    return Trace(np.stack([first_MJ, second_MJ]), high)


def normal(d_JN: np.ndarray, there_JN: np.ndarray, how: str) -> np.ndarray:
    """Returns scores of how far each machine's sum of distances is above the others'.

    z: standard deviations above the mean. share: of the highest z that n machines can have.
    ratio: above the median, as a share of it. mad: the same in median absolute deviations. plain:
    the sums themselves.
    """
    d_JN = np.where(there_JN, d_JN, np.nan).astype(np.float64)
    if how == "plain":
        return np.nan_to_num(d_JN)
    if how in ("z", "share"):
        middle, spread = np.nanmean(d_JN, 1, keepdims=True), np.nanstd(d_JN, 1, keepdims=True)
        n = there_JN.sum(1, keepdims=True)
        most = 1.0 if how == "z" else np.sqrt(np.maximum(n - 1, 1))
        return np.nan_to_num((d_JN - middle) / (spread * most + 1e-9))
    middle = np.nanmedian(d_JN, 1, keepdims=True)
    if how == "ratio":
        return np.nan_to_num((d_JN - middle) / (middle + 1e-9))
    spread = 1.4826 * np.nanmedian(np.abs(d_JN - middle), 1, keepdims=True)
    return np.nan_to_num((d_JN - middle) / (spread + 0.02 * middle + 1e-9))


def decide(
    found: Trace, threshold: float, need: int = CONTINUITY, most: int = 1
) -> list[tuple[int, int, int, float]]:
    """Returns [(window, machine, stream, score)]: who is named, the first first.

    need: windows in a row. most: alerts of a case; the paper's call returns after the first. After
    one, that machine is out, and counting begins anew.
    """
    named: list[tuple[int, int, int, float]] = []
    out, begin = -1, 0
    while len(named) < most:
        strength_MJ, who_MJ = found.strength(out, need)
        fires_MJ = strength_MJ > threshold
        fires_MJ[:, : min(begin + need - 1, fires_MJ.shape[1])] = False
        if not fires_MJ.any():
            break
        j = int(fires_MJ.any(0).argmax())
        m = int(fires_MJ[:, j].argmax())
        out, begin = int(who_MJ[m, j]), j + 1
        named.append((j, out, m, float(strength_MJ[m, j])))
    return named


def said(view: View, named: Sequence[tuple[int, int, int, float]], need: int, streams: Any) -> list:
    """Returns alerts. streams: names of the streams."""
    return [
        Said(view.grid.machines[n], streams[m], view.time(j) - need * WINDOW, view.time(j), s, "")
        for j, n, m, s in named
    ]


Options = Mapping[str, Any]
Tried = Callable[[Options], Sequence[tuple[int, int, int]]]  # -> (named, in vain, faults) by case


def f1(counts: Sequence[tuple[int, int, int]]) -> float:
    """Returns F1 of (named, in vain, faults) of all cases."""
    named, vain, faults = (sum(c[k] for c in counts) for k in range(3))
    return 2 * named / max(named + vain + faults, 1)


def best(choices: Iterator[Options], tried: Tried) -> tuple[Options, float]:
    """Returns the choice with the highest F1; of equals the first."""
    found, high = None, -1.0
    for choice in choices:
        if (value := f1(tried(choice))) > high:
            found, high = choice, value
    assert found is not None
    return found, high
