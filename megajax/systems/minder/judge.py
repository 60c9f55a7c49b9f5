"""Decides from the scores of ticks which machine to name: continuity, causes, series that end.

Minder section 4.3: a machine is named after it has differed for four minutes without a break
(tracker.py). If several machines differ, one may be the cause while the others wait for it.
Machines that began within `group_s` of each other are one group, and only the furthest of them is
named; if another machine is further and began a moment later, the decision waits for it. A machine
that begins to differ while a named machine still does, and by less, counts as its follower. If
machines differ in the same metrics and one of them clearly moved first, that one is
named, however far the others are. If too many machines differ, the job has changed and nobody is
named.

Legend: F channels, N rows of machines, C metrics, H ticks that are remembered.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megajax.systems.minder.settings import CHANNELS, TICK, Settings
from megajax.systems.minder.tracker import YOUNG, Limits, demand, score, spans

# ---- when each machine moved, to the second: who moved first is the cause, who later follows
#
# The judge knows onsets to a tick of 24 s, and a fault reaches the neighbours of its machine within
# seconds. Here the last minutes of all samples are kept. A machine's onset is the change point of
# its course against the machines that do not differ: the moment that splits the course into two
# levels with the least squares, over all metrics in which the machine differs.
#
# Legend: C metrics, N machines, T seconds, R machines that are asked for.


AROUND = 4  # (chosen) ticks before and after a tick in which its machine's onset is looked for
MORE = AROUND + 3  # ticks that are kept beyond the longest span
MOST = 64  # (chosen) machines that are asked for: where more differ, the job has changed
LEAST_SIDE = 8  # (chosen) seconds on either side of a change point
BLUR = 6.0  # (chosen) of an onset: so many times noise variance over squared change, in seconds
OTHERS = 2  # machines that do not differ, at least
MOVED = 2.0  # (chosen) standard deviations from which a metric has moved


class Onsets:
    """The last samples of all machines, scaled, in half precision."""

    def __init__(self, ticks: int):
        """ticks: length of the longest span that is judged."""
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

        NaN where it cannot be told. Args: rows_R: rows of the machines. ago_R: seconds before now
        at
          which they moved, known to a tick. far_CR: scores of their levels. still_N: machines that
          do not differ.
        """
        moved_R, blur_R = np.full((2, len(rows_R)), np.nan)
        if still_N.sum() < OTHERS or len(rows_R) > MOST:
            return moved_R, blur_R
        ticks_R = np.round(ago_R / TICK).astype(int)
        for ago in np.unique(ticks_R):
            last, first = max(ago - AROUND, 0), min(ago + AROUND, len(self._ticks))
            if first - last < AROUND:  # too long ago
                continue
            parts = []
            for k in range(len(self._ticks) - first, len(self._ticks) - last):
                x_CNT = self._ticks[k].astype(np.float32)
                pad = ((0, 0), (0, len(still_N) - x_CNT.shape[1]), (0, 0))
                parts.append(np.pad(x_CNT, pad, constant_values=np.nan))
            part_CNT = np.concatenate(parts, 2)
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


def _change(apart_CT: np.ndarray) -> tuple[float, float]:
    """Returns (seconds before the change, by how much that may be wrong), NaN if there is none."""
    gain_T, sure = np.zeros(apart_CT.shape[1] + 1), 0.0
    for apart_T in apart_CT:
        measured_T = np.isfinite(apart_T)
        count_T = np.concatenate([[0], np.cumsum(measured_T)])
        total_T = np.concatenate([[0.0], np.cumsum(np.where(measured_T, apart_T, 0.0))])
        steps = np.diff(apart_T[measured_T])
        if len(steps) < 4 * LEAST_SIDE:
            continue
        noise = max(float(np.median(np.abs(steps))) ** 2, 1e-6)
        after_T, sum_T = count_T[-1] - count_T, total_T[-1] - total_T
        inside_T = (count_T >= LEAST_SIDE) & (after_T >= LEAST_SIDE)
        before_T = np.maximum(count_T, 1)
        step_T = np.where(inside_T, sum_T / np.maximum(after_T, 1) - total_T / before_T, 0.0)
        gain_T += step_T**2 * before_T * after_T / max(count_T[-1], 1) / noise
        sure += float(step_T[np.argmax(gain_T)]) ** 2 / noise
    if sure <= 0:
        return np.nan, np.nan
    return float(np.argmax(gain_T)), BLUR / sure


# ---- the decision


HISTORY = 50  # ticks, 20 minutes, or twice the longest span
SUSPECTED = 0.6  # (chosen) of a limit
ALIKE = 0.6  # (chosen) cosine between how a fault differs and how those that follow it do
CLEAR = 1.3  # (chosen) score from which a machine that differs in another way has its own fault
DRAGGED = 0.35  # (chosen) share of the furthest one's distance from which machines count as alike
ALIKE_BELOW = 0.6  # (chosen) share of its difference below which a tick is one of before
SELDOM = 0.25  # (chosen) share of its past in which a machine with a role of its own shows none
CLEARLY = 1.2  # (chosen) times as far: of two machines that differ, the cause
FURTHER = 1.1  # (chosen) times as far: another machine may be the cause
UNLIKE, ODDER = 3.0, 1.3  # (chosen) standard deviations of machines, times its present distance
EARLY = 9  # (chosen) ticks: a first state that lasted longer than a disturbance is the usual one
LEAD = 5.0  # (chosen) seconds by which the first one moved before another: clocks differ by up to 4
LEADER = 0.4  # (chosen) share of the furthest one's distance that the first one has at least
LATELY = 3 * TICK  # seconds within which a machine or a metric that lives has a sample


@dataclass(frozen=True)
class Finding:
    """A machine to name.

    row: its index. channel: index of the channel that decided, None if series ended. metric: index
    of the series that ended first. is_silent: whether all of its series ended. since, score: as in
    Alert.
    """

    row: int
    since: float
    score: float
    channel: int | None = None
    metric: int | None = None
    is_silent: bool = False


class Judge:
    """Remembers the scores of each machine and decides which to name. Each machine is a row."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        order: Sequence[int],
        onsets: Onsets | None = None,
        levels: int | None = None,
    ):
        """Judges a job of which nothing has been seen.

        Args: order: channels in the order in which they decide the metric of an alert. onsets: the
          last samples, to find which machine moved first; None: the order is not used. levels:
          number of channels that are no residuals; None: half of all.
        """
        self._settings, self._courses = settings, onsets
        self._levels = (limits.limit.shape[-1] - 1) // CHANNELS if levels is None else levels
        self._limits = dataclasses.replace(limits, limit=limits.limit * settings.strict)
        self._spans, self._order = spans(settings.ticks), np.asarray(order)
        F, N = limits.limit.shape[-1] - 1, 0
        H = self._history = max(HISTORY, 2 * self._spans[-1].ticks)
        self.scores_FNH = np.full((F, N, H), np.nan, np.float32)
        self.far_FNH = np.full((F, N, H), np.nan, np.float32)  # not cut off
        self._apart_CNH = np.full((self._levels, N, H), np.nan, np.float32)
        # of the job, not of a machine
        self._middle_FH: np.ndarray | None = np.full((F, H), np.nan, np.float32)
        self.mean_FN = np.zeros((F, N))  # of the scores over the continuity
        self.seen_CN = np.full((self._levels, N), -math.inf)  # end of the last second with a sample
        self.joined_N = np.zeros(N)  # -inf: with the job; inf: not yet
        self._begun = False
        self._elsewhere_N = np.array(False)  # of whom another judge says what happened
        self._past_N = np.zeros(N, int)  # ticks from which its offsets were learnt
        self._worst_N = np.zeros(N)  # the last score, 1 at its limit
        self.anew_N = np.zeros(N, bool)  # whose offset is to be learnt anew
        self._always_N = np.zeros(N, bool)  # who has differed ever since it was first seen
        self._free_at_N = np.zeros(N)  # when a named machine may be named again; 0: it was not
        self._named_at_N = np.zeros(N)  # onset, and the highest score, of a machine that is named
        self._named_for_N = np.zeros(N)
        self._named_as_FN = np.zeros((F, N))
        self._follows_N = np.zeros(N)  # until when it counts as the follower of a named one

    def grow(self, rows: int) -> None:
        """Adds machines that have not been seen yet, until there are `rows`."""
        more = rows - self.joined_N.shape[0]
        for name, value in _FIELDS.items():
            array = getattr(self, name)
            axis = _axis(name)
            shape = [*array.shape]
            shape[axis] = more
            empty = np.full(shape, value, array.dtype)
            setattr(self, name, np.concatenate([array, empty], axis))

    def see(self, last_CN: np.ndarray, start: float) -> None:
        """Notes which series have samples in the tick that began at `start` (Unix seconds).

        last_CN: end of each series' last second with a sample, Unix seconds; -inf without one.
        """
        shows_N = np.isfinite(last_CN).any(0)
        first = np.isinf(self.joined_N) & (self.joined_N > 0) & shows_N
        self.joined_N[first] = start if self._begun else -math.inf
        self._begun = self._begun or bool(shows_N.any())
        self.seen_CN = np.maximum(self.seen_CN, last_CN)

    def forget(self, rows: Sequence[int]) -> None:
        """Removes the machines in these rows."""
        for name in _FIELDS:
            setattr(self, name, np.delete(getattr(self, name), list(rows), axis=_axis(name)))

    def learns_N(self, end: float) -> np.ndarray:
        """Returns, (N,), for which machines the tick that ends at `end` may update the offset.

        Machines that have just joined and machines that are suspected are left out. A machine with
        a short past looks odd until its offset is known, so it counts as suspected only from a
        score of 1 on. A machine that has always differed has a role of its own, and learns.
        """
        most_N = np.where(self.young_N(), 1.0, SUSPECTED)
        return self._judged_N(end) & ((self._worst_N <= most_N) | self._always_N)

    def _judged_N(self, end: float) -> np.ndarray:
        """Returns, bool (N,), which machines may be judged at `end` (Unix seconds): those that
        joined the job at least `grace_s` seconds before. Machines that have not been seen are not
        among them."""
        return end - self.joined_N >= self._settings.grace_s

    def young_N(self) -> np.ndarray:
        """Returns, (N,), which machines have a past that is too short to be trusted."""
        return self._past_N < YOUNG

    def look(
        self,
        end: float,
        score_FN: np.ndarray,
        far_FN: np.ndarray,
        apart_FN: np.ndarray,
        middle_F: np.ndarray | None,
    ) -> list[Finding]:
        """Takes the scores of a tick that ended at `end`; returns the machines to name now.

        Args: score_FN: signed, in standard deviations, NaN without samples. far_FN: unclipped.
          apart_FN: distance from the other machines without regard to the machine's own past.
          middle_F: level of the median machine, the state of the job; None: as in tracker.score.
        """
        apart_CN = apart_FN[: self._levels]
        for history, new in (
            (self.scores_FNH, score_FN),
            (self.far_FNH, far_FN),
            (self._apart_CNH, apart_CN),
        ):
            history[..., :-1] = history[..., 1:]
            history[..., -1] = new
        self._middle_FH = (
            None
            if middle_F is None or self._middle_FH is None
            else np.concatenate([self._middle_FH[:, 1:], middle_F[:, None]], 1)
        )
        judged_N = self._judged_N(end)
        self._past_N += judged_N
        self.anew_N = np.zeros(len(judged_N), bool)
        ended = self._ended(end, judged_N)
        return ended + self._differing(end, judged_N)

    @property
    def worst_N(self) -> np.ndarray:
        """The newest score of each machine, (N,); 1 is the limit."""
        return self._worst_N

    @property
    def free_at_N(self) -> np.ndarray:
        """Unix seconds until which each named machine is not named again, (N,); 0: none."""
        return self._free_at_N

    # ---- two judges of one job

    def come(self, first: "Judge") -> None:
        """Copies from another judge of the job when machines joined, and which it suspects or
        names.

        While the other judge suspects or names a machine, no other machine is named here, because
        it may be a follower.
        """
        self.joined_N = first.joined_N.copy()
        suspected_N = first._worst_N > SUSPECTED
        others_N = suspected_N.sum() - suspected_N > 0
        self._elsewhere_N = others_N | (first._free_at_N > 0).any()

    def anew(self) -> None:
        """Drops what was learnt of all machines, because the job does something else now."""
        self._anew(np.ones(len(self._past_N), bool))

    def tell(self, first: "Judge", findings: Sequence[Finding]) -> None:
        """Tells another judge which machines this one names, so that it names neither them nor
        their followers.

        found: the machines that are named now.
        """
        for one in findings:
            first._named_at_N[one.row] = one.since
            first._named_as_FN[:, one.row] = first.mean_FN[:, one.row]
        first._free_at_N = np.maximum(first._free_at_N, self._free_at_N)

    # ---- machines that differ

    def _differing(self, end: float, judged_N: np.ndarray) -> list[Finding]:
        s = self._settings
        ready = self._past_N.max(initial=0)
        if ready < s.ticks:
            return []
        score_GN, onset_N = self._scores(end, judged_N, min(ready, self._spans[-1].ticks))
        self._worst_N = worst_N = score_GN.max(0)
        busy_N = self._free_at_N > 0
        self._free_at_N[busy_N & (worst_N > SUSPECTED)] = end + s.clear_s
        self._free_at_N[self._free_at_N <= end] = 0.0
        follows_N = self._follows_N > end
        again_N = follows_N & (worst_N > SUSPECTED)
        self._follows_N[again_N] = np.maximum(self._follows_N[again_N], end + s.group_s)
        fires_N = (worst_N >= 1) & ~busy_N & ~follows_N & ~self._elsewhere_N
        differing_N = worst_N > SUSPECTED
        if not fires_N.any():
            return []
        # Each machine's unclipped distance in the channel where it is largest, (N,).
        far_FNH = np.nan_to_num(np.abs(self.far_FNH[..., -self._settings.ticks :]))
        far_N, ending_N = np.median(far_FNH, -1).max(0), self._ending(end)
        # Machines that a fault drags along are far behind it; a job that changed has no furthest.
        alike_N = differing_N & (far_N > DRAGGED * far_N[fires_N].max())
        if alike_N.sum() > max(1.0, s.widely * judged_N.sum()) and not _pair(far_N, alike_N):
            rows = np.flatnonzero(alike_N & judged_N)
            if not self._leads(rows, end, onset_N, differing_N):
                return []
        findings = []
        free_N = judged_N & ~busy_N & ~follows_N
        while fires_N.any():
            first = min(onset_N[fires_N])
            group_N = differing_N & (np.abs(onset_N - first) <= s.group_s) & ~busy_N
            row = int(np.argmax(np.where(group_N & fires_N, far_N, -1.0)))
            row = self._first(row, group_N & judged_N, far_N, end, onset_N, differing_N)
            fresh = end - onset_N[row] <= s.continuity_s
            further_N = free_N & ~fires_N & (far_N > FURTHER * far_N[row])
            if fresh and further_N.any():
                further_N &= ~self._later(row, further_N, end, onset_N, differing_N)
            if fresh and further_N.any():
                fires_N &= ~group_N
                continue
            waits = ending_N.any() and not ending_N[row]
            explained = not waits and self._follows(far_N, row, onset_N[row])
            if explained:  # for as long as it differs: at its end the onset looks later
                self._follows_N[row] = end + s.group_s
            elif not waits:
                findings.append(self._named(row, score_GN[:, row], onset_N[row]))
                self._free_at_N[row] = end + s.clear_s
                self._named_at_N[row] = onset_N[row]
                self._named_as_FN[:, row] = self.mean_FN[:, row]
            alike_N = self._alike_N(self.mean_FN[:, row], self.mean_FN)
            others_N = group_N & (alike_N | (worst_N < CLEAR))
            others_N[row] = False
            # A stall of the job may hide for minutes that a follower differs.
            self._follows_N[others_N] = end + s.clear_s
            fires_N &= ~others_N
            fires_N[row] = False
        return findings

    def _scores(self, end: float, judged_N: np.ndarray, have: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (score_GN, onset_N in Unix seconds) of the last `have` ticks; 1: the limit."""
        newest = slice(self._history - have, None)
        score_GN, self.mean_FN = score(
            self.scores_FNH[..., newest],
            self._past_N - 1,
            self._limits,
            self._spans,
            None if self._middle_FH is None else self._middle_FH[:, newest],
        )
        onset_N = self._onsets(end)
        score_GN = np.where(judged_N, score_GN, 0.0)
        odd_N = self._odd_before(end, onset_N, score_GN.max(0) > SUSPECTED)
        score_GN = np.where(odd_N, 0.0, score_GN)
        self._anew(odd_N)
        self._always_N = self._always()
        return score_GN / demand(score_GN.max(0), judged_N, self._always_N), onset_N

    def _moved(
        self, rows_R: np.ndarray, end: float, onset_N: np.ndarray, differing_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (when the machines moved, Unix seconds; by how much that may be wrong)."""
        if self._courses is None:
            return np.full(len(rows_R), np.nan), np.full(len(rows_R), np.nan)
        level_CR = self.mean_FN[: self._levels, rows_R]
        ago_R, blur_R = self._courses.moved(rows_R, end - onset_N[rows_R], level_CR, ~differing_N)
        return end - ago_R, blur_R

    def _first(
        self,
        row: int,
        group_N: np.ndarray,
        far_N: np.ndarray,
        end: float,
        onset_N: np.ndarray,
        differing_N: np.ndarray,
    ) -> int:
        """Returns the machine of a group that clearly moved before its furthest, `row`; else `row`.

        Only machines that differ in the same metrics are compared: another fault has other ones.
        """
        group_N = group_N & (far_N >= LEADER * far_N[row])
        group_N &= self._alike_N(self.mean_FN[:, row], self.mean_FN)
        rows_R = np.flatnonzero(group_N | (np.arange(len(group_N)) == row))
        if len(rows_R) < 2:
            return row
        moved_R, blur_R = self._moved(rows_R, end, onset_N, differing_N)
        at = int(np.flatnonzero(rows_R == row)[0])
        lead_R = moved_R[at] - moved_R - blur_R - blur_R[at]
        first = int(np.argmax(np.where(np.isfinite(lead_R), lead_R, -math.inf)))
        return int(rows_R[first]) if lead_R[first] >= LEAD else row

    def _later(
        self,
        row: int,
        others_N: np.ndarray,
        end: float,
        onset_N: np.ndarray,
        differing_N: np.ndarray,
    ) -> np.ndarray:
        """Tells which of the others clearly moved after a machine, in the same metrics, (N,)."""
        later_N = others_N & self._alike_N(self.mean_FN[:, row], self.mean_FN)
        rows_R = np.append(np.flatnonzero(later_N), row)
        moved_R, blur_R = self._moved(rows_R, end, onset_N, differing_N)
        lead_R = moved_R - moved_R[-1] - blur_R - blur_R[-1]
        later_N[rows_R] = lead_R >= LEAD
        return later_N

    def _leads(
        self, rows_R: np.ndarray, end: float, onset_N: np.ndarray, differing_N: np.ndarray
    ) -> bool:
        """Tells whether one of many machines that differ moved well before all others.

        If the job as a whole changes, its machines move at the same moment.
        """
        moved_R, blur_R = self._moved(rows_R, end, onset_N, differing_N)
        if len(rows_R) < 2 or not np.isfinite(moved_R).all():
            return False
        first, second = np.argsort(moved_R)[:2]
        apart = moved_R[second] - moved_R[first] - blur_R[first] - blur_R[second]
        return bool(apart >= 2 * LEAD)

    def _follows(self, far_N: np.ndarray, row: int, onset: float) -> bool:
        """Tells whether a machine that is already named explains this one.

        It does if it began earlier, was further from its peers, and still differs or differed when
        this one began.
        """
        named_N = self._free_at_N > 0
        self._named_for_N = np.where(named_N, np.maximum(self._named_for_N, far_N), 0.0)
        s = self._settings
        before_N = self._named_at_N <= onset + s.group_s
        soon_N = onset <= self._named_at_N + s.clear_s / 2
        still_N = (self._worst_N > SUSPECTED) | (far_N > far_N[row])
        explains_N = named_N & before_N & (soon_N | still_N)
        ended_N = ~np.isfinite(self._named_for_N)  # they were named because their series ended
        if self._worst_N[row] >= CLEAR:
            explains_N &= ended_N | self._alike_N(self.mean_FN[:, row], self._named_as_FN)
        further_N = self._named_for_N > far_N[row]
        if self._courses is not None:  # the first one need not be the furthest
            further_N |= self._alike_N(self.mean_FN[:, row], self._named_as_FN)
        return bool((explains_N & further_N).any())

    def _alike_N(self, one_F: np.ndarray, others_FN: np.ndarray) -> np.ndarray:
        """Tells which machines differ in the same direction; another fault moves other metrics."""
        a_F, b_FN = one_F[: self._levels], others_FN[: self._levels]
        lengths_N = np.linalg.norm(a_F) * np.linalg.norm(b_FN, axis=0)
        return a_F @ b_FN >= ALIKE * np.maximum(lengths_N, 1e-9)

    def _ending(self, end: float) -> np.ndarray:
        """Returns which machines have had no sample at all for two ticks, while others have."""
        lives_N = end - self.seen_CN.max(0, initial=-math.inf) <= TICK
        had_N = np.isfinite(self.seen_CN).any(0)
        gone_N = had_N & (end - self.seen_CN.max(0, initial=-math.inf) > 2 * TICK)
        gone_N &= self._free_at_N <= end  # those that are named explain by that
        return gone_N & (lives_N.sum() > gone_N.sum())

    def _like_the_others(self) -> np.ndarray:
        """Returns, (N, H), in which ticks a machine did not differ as it does now."""
        length_N = np.maximum((self.mean_FN**2).sum(0), 1e-12)
        filled = np.nan_to_num(self.scores_FNH)
        share_NH = np.einsum("fn,fnh->nh", self.mean_FN, filled) / length_N[:, None]
        return share_NH < ALIKE_BELOW

    def _onsets(self, end: float) -> np.ndarray:
        """Returns, (N,), since when (Unix seconds) each machine has differed as it does now."""
        off_NH = self._like_the_others()[:, ::-1]
        last_N1 = np.ones((len(off_NH), 1), bool)
        # One tick may fail inside of the run, not at its beginning.
        off_NH = np.concatenate([off_NH & np.concatenate([off_NH[:, 1:], last_N1], 1), last_N1], 1)
        return end - TICK * np.maximum(off_NH.argmax(1), self._settings.ticks - 1)

    def _odd_before(self, end: float, onset_N: np.ndarray, asked_N: np.ndarray) -> np.ndarray:
        """Returns, (N,), which of the machines were further from their peers before they changed.

        A machine that was disturbed when it was first seen, and is no longer, has changed as much
        as one that breaks. Which of its two states is odd shows in their distances from the others,
        along the difference between the two.
        """
        H = self._history
        since_N = np.round((end - onset_N) / TICK).astype(int)
        before_N = self._past_N - since_N
        odd_N = np.zeros(len(since_N), bool)
        for row in np.flatnonzero((before_N >= 1) & (before_N <= EARLY) & asked_N):
            first = H - since_N[row]
            then_C = _mean(self._apart_CNH[:, row, max(first - before_N[row], 0) : first])
            now_C = _mean(self._apart_CNH[:, row, H - self._settings.ticks :])
            along_C = (now_C - then_C) / max(float(np.linalg.norm(now_C - then_C)), 1e-9)
            odd_N[row] = abs(then_C @ along_C) > max(UNLIKE, ODDER * abs(now_C @ along_C))
        return odd_N

    def _anew(self, odd_N: np.ndarray) -> None:
        """Drops what was learnt of machines whose first state was the odd one."""
        self.anew_N = odd_N
        self._past_N = np.where(odd_N, 0, self._past_N)
        for history in (self.scores_FNH, self.far_FNH, self._apart_CNH):
            history[:, odd_N] = np.nan

    def _always(self) -> np.ndarray:
        """Returns, (N,), which machines have differed ever since they were first seen.

        That is, they were seldom like the others in their past before the newest `continuity_s`.
        "Seldom" and not "never", because noise makes even a machine with a role of its own look
        like the others in a tick now and then.
        """
        before = self._history - self._settings.ticks
        known_N = np.clip(self._past_N - self._settings.ticks, 0, before)
        is_known_NH = np.arange(before) >= before - known_N[:, None]
        like_N = (self._like_the_others()[:, :before] & is_known_NH).sum(1)
        return (like_N < np.maximum(2, SELDOM * known_N)) & (self._past_N <= self._history)

    def _named(self, row: int, score_G: np.ndarray, onset: float) -> Finding:
        firing = [f for f in self._order if score_G[f] >= 1]
        channel = int(firing[0]) if firing else int(np.abs(self.mean_FN[:, row]).argmax())
        return Finding(row, float(onset), float(score_G.max()), channel=channel)

    # ---- series that end

    def _ended(self, end: float, judged_N: np.ndarray) -> list[Finding]:
        s = self._settings
        lives_CN = end - self.seen_CN <= LATELY
        had_CN = np.isfinite(self.seen_CN)
        gone_CN = had_CN & (end - self.seen_CN >= s.continuity_s) & judged_N
        some_C = lives_CN.sum(1) > 0.5 * (had_CN & ~gone_CN).sum(1)
        gone_CN &= some_C[:, None]  # a metric that ended everywhere says nothing of a machine
        findings = []
        for row in np.flatnonzero(gone_CN.any(0) & (self._free_at_N <= end)):
            ended = np.flatnonzero(gone_CN[:, row])
            first = ended[np.argmin(self.seen_CN[ended, row])]
            since = float(self.seen_CN[first, row])
            is_silent = not lives_CN[:, row].any()
            score = (end - since) / s.continuity_s
            findings.append(
                Finding(int(row), since, score, metric=int(first), is_silent=bool(is_silent))
            )
        for row in np.flatnonzero(gone_CN.any(0)):
            self._free_at_N[row] = end + s.clear_s  # as long as it lasts
            self._named_at_N[row] = self.seen_CN[gone_CN[:, row], row].min()
            self._named_for_N[row] = math.inf
        return findings


def _pair(far_N: np.ndarray, alike_N: np.ndarray) -> bool:
    """Tells whether exactly two machines differ, one of them clearly more: a fault, and a machine
    that it drags along.

    Two of four are too many to name one of them by their number alone.
    """
    far = np.sort(far_N[alike_N])
    return len(far) == 2 and far[1] > CLEARLY * far[0]


def _mean(x_CH: np.ndarray) -> np.ndarray:
    """Returns the mean over ticks, NaN ignored; 0 where there is none."""
    measured = np.isfinite(x_CH)
    return np.where(measured, x_CH, 0.0).sum(1) / np.maximum(measured.sum(1), 1)


_FIELDS = {
    "scores_FNH": np.nan, "far_FNH": np.nan, "_apart_CNH": np.nan, "mean_FN": 0,
    "seen_CN": -math.inf, "joined_N": math.inf, "_past_N": 0, "anew_N": False,
    "_always_N": False, "_worst_N": 0, "_free_at_N": 0, "_follows_N": 0,
    "_named_at_N": 0, "_named_for_N": 0, "_named_as_FN": 0,
}  # members with a row for each machine, and their value for a new machine  # fmt: skip


def _axis(name: str) -> int:
    return 0 if name.endswith("_N") else 1
