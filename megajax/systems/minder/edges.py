"""Machines whose metric usually stands at the end of its scale.

A reading at the end of its scale says "at least", not how much: a duty cycle of 100 % hides by how
much a machine is above its peers. When the job slows and the peers fall to 93 %, the machine stays
above them, which is no change of the machine. Such a difference is left out of its score.

Legend: C metrics, N machines, T seconds of a tick.
"""

import numpy as np

SHARE = 0.01  # (chosen) of a metric's samples that have its highest value, or its lowest
SLOWLY = 0.25  # (chosen) share by which a tick changes what is usual
ALIKE = 1e-5  # of a value: as far apart are readings that are equal


def ends(values: np.ndarray) -> tuple[float, float]:
    """Returns (low, high) ends of the scale of a metric's values; -inf or inf: it has none."""
    low, high = float(values.min()), float(values.max())
    if low == high:  # what has never changed shows no end
        return -np.inf, np.inf
    at_low, at_high = (values == low).mean(), (values == high).mean()
    return (low if at_low > SHARE else -np.inf), (high if at_high > SHARE else np.inf)


class Edges:
    """Remembers which machines have usually been at an end of a metric's scale."""

    def __init__(self, low_C: np.ndarray, high_C: np.ndarray):
        """low_C, high_C: ends of the scales, as `ends` returns them."""
        self._end_2C = np.stack([low_C, high_C]).astype(np.float32)
        self._usual_2CN = np.full((2, len(low_C), 0), np.nan, np.float32)

    def forget(self, rows: list[int]) -> None:
        """Removes the machines in these rows."""
        self._usual_2CN = np.delete(self._usual_2CN, rows, axis=2)

    def seen(self, values_CNT: np.ndarray, learns_N: np.ndarray) -> np.ndarray:
        """Takes the samples of a tick; returns, (2, C, N), who is below or above its peers at an
        end of the scale where it usually stands.

        Args: learns_N: machines that are not suspected.
        """
        N = values_CNT.shape[1]
        more = N - self._usual_2CN.shape[2]
        self._usual_2CN = np.pad(
            self._usual_2CN, ((0, 0), (0, 0), (0, more)), constant_values=np.nan
        )
        measured_CNT = np.isfinite(values_CNT)
        count_CN = measured_CNT.sum(2)
        share_2CN = np.full(self._usual_2CN.shape, np.nan, np.float32)
        inside_2CN = np.zeros(share_2CN.shape, bool)
        for k, sign in enumerate((-1, 1)):
            for c in np.flatnonzero(np.isfinite(self._end_2C[k])):
                end = self._end_2C[k, c]
                beyond_NT = sign * (values_CNT[c] - end)
                near = ALIKE * max(abs(end), 1.0)
                at_N = (np.abs(beyond_NT) <= near).sum(1)
                share_2CN[k, c] = np.where(
                    count_CN[c] > 0, at_N / np.maximum(count_CN[c], 1), np.nan
                )
                inside_2CN[k, c] = ~(beyond_NT > near).any(1)
        usual = self._usual_2CN
        moved = usual + SLOWLY * (share_2CN - usual)
        new = np.where(np.isfinite(usual), np.where(learns_N, moved, usual), share_2CN)
        self._usual_2CN = np.where(np.isfinite(share_2CN), new, usual)
        return (self._usual_2CN > 0.5) & inside_2CN
