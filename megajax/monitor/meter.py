"""Derived measures of training: throughput, MFU in two conventions, memory, data wait, ETA."""

import resource
import time
from collections import deque
from dataclasses import dataclass

import jax

WINDOW = 20  # (chosen) steps whose median gives throughput and ETA
SMOOTHING = 0.9  # (chosen) weight of the past in the smoothed loss


@dataclass(frozen=True)
class Work:
    """What a step does, for throughput and MFU.

    unit: what is counted ('tokens', 'images'). flops_megatron, flops_causal: a unit, in both
    conventions; None: the model does not say. peak_flops: of all devices together; None: unknown (a
    CPU).
    """

    units_per_step: int
    flops_megatron: float | None
    flops_causal: float | None
    peak_flops: float | None
    unit: str = "tokens"


class Meter:
    """Turns moments into rates. `waited` goes around the data, `finish` after a step."""

    def __init__(self, work: Work, steps: int):
        """steps: of the whole run."""
        self.work, self._steps = work, steps
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._smooth: float | None = None
        self._last = time.perf_counter()
        self._wait = 0.0

    def restart(self) -> None:
        """Leaves the time since the last step out (evaluation, a save, a sample)."""
        self._last = time.perf_counter()

    def waited(self, seconds: float) -> None:
        """Adds time that the loop stood waiting for data."""
        self._wait += seconds

    def finish(self, step: int, loss: float) -> dict[str, float | None]:
        """Returns the measures of a finished step.

        mfu: Megatron's convention (all keys of a row), as published tables have it; mfu_causal:
        keys really seen. Both None where no peak is known. step_time_s of the first step includes
        the compilation; the ETA leaves it out.
        """
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        if self._smooth is None:
            self._smooth = loss
        else:
            self._times.append(elapsed)
            self._smooth = SMOOTHING * self._smooth + (1 - SMOOTHING) * loss
        usual = sorted(self._times)[len(self._times) // 2] if self._times else float("inf")
        wait, self._wait = self._wait, 0.0
        rate = self.work.units_per_step / elapsed

        def mfu(flops: float | None) -> float | None:
            peak = self.work.peak_flops
            return rate * flops / peak if peak and flops is not None else None

        return {
            "loss_smooth": self._smooth,
            "step_time_s": elapsed,
            f"{self.work.unit}_per_s": rate,
            "mfu": mfu(self.work.flops_megatron),
            "mfu_causal": mfu(self.work.flops_causal),
            "memory_gib": memory_bytes() / 2**30,
            "data_wait": min(wait / elapsed, 1.0),
            "eta_s": usual * (self._steps - step),
        }


def memory_bytes() -> int:
    """Returns the peak of the fullest local device, or of this process where devices do not say."""
    stats = [d.memory_stats() for d in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux: KiB
