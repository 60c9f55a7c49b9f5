"""What each machine does in each second: the drivers of its metrics.

The job's progress is one number; a machine shows what its stage does at that point of the step, by
its own clock, averaged over the second of the sample. Legend: N machines, T seconds of a block.
"""

from dataclasses import dataclass

import numpy as np

from megajax.monitor.fleet import keyed
from megajax.monitor.fleet.roles import BINS, Layout, step_profile
from megajax.monitor.fleet.settings import Setting


@dataclass(frozen=True)
class People:
    """What is constant of the machines, and the profile of a step.

    skew_N: seconds by which the clock of a machine is late, float64. other_N: 1 for a machine of
    the other make. compute_N, load_N, write_N, log_N: factors of its role. The profiles are
    roles.step_profile's.
    """

    stage_N: np.ndarray
    skew_N: np.ndarray
    other_N: np.ndarray
    compute_N: np.ndarray
    load_N: np.ndarray
    write_N: np.ndarray
    log_N: np.ndarray
    compute_PK: np.ndarray
    exchange_PK: np.ndarray


@dataclass(frozen=True)
class Work:
    """drivers: name (specs.DRIVERS) -> float32 (N, T) or (N, 1); one that is 0 is left out."""

    drivers: dict[str, np.ndarray]


def people(layout: Layout, setting: Setting, seed: int) -> People:
    """Returns the constants of the machines.

    ASSUMED: the first stage loads the data of all and has an embedding (compute +3 %), the last one
    the head and the loss (+8 %); data rank 0 writes the weights, the others a tenth of that;
    machine 0 writes the log; clocks differ evenly within the limit.
    """
    rng, N = keyed.generator(seed, keyed.OFFSETS, 1 << 20), layout.machines
    first, last = layout.stage_N == 0, layout.stage_N == layout.stages - 1
    several = layout.stages > 1
    compute_N = 1 + 0.03 * (first & several) + 0.08 * (last & several)
    compute_N = compute_N + 0.01 * min(setting.noise, 2.0) * rng.standard_normal(N)
    other_N = rng.random(N) < setting.other_make
    skew_N = rng.uniform(-setting.skew_s, setting.skew_s, N)
    return People(
        layout.stage_N,
        skew_N,
        other_N.astype(np.float32),
        (compute_N * np.where(other_N, 0.98, 1.0)).astype(np.float32),
        np.where(first & several, 1.5, 1.0).astype(np.float32),
        np.where(layout.data_N == 0, 1.0, 0.1).astype(np.float32),
        (np.arange(N) == 0).astype(np.float32),
        *step_profile(layout.stages, setting.microbatches, setting.exchange),
    )


def work(
    tracks: dict[str, np.ndarray], who: People, setting: Setting, seed: int, second: int
) -> Work:
    """Returns the drivers of the block that starts at `second`.

    Args: tracks: of Job.window, with a margin of the same length before and after the block.
    """
    N = len(who.skew_N)
    seconds = 60
    margin = (len(tracks["speed"]) - seconds) // 2
    whole_N = np.floor(who.skew_N).astype(np.int64)
    part_N = (who.skew_N - whole_N).astype(np.float32)
    at_NT = margin + whole_N[:, None] + np.arange(seconds + 1)

    def seen(name: str) -> np.ndarray | None:
        """A track by the clock of each machine, float32 (N, T); None: it is 0."""
        track = tracks[name]
        if not track.any():
            return None
        at = at_NT[:, :-1]
        return track[at] + part_N[:, None] * (track[at + 1] - track[at])

    progress = tracks["progress"]
    done_NT = progress[at_NT] + part_N[:, None] * (progress[at_NT + 1] - progress[at_NT])
    tempo = seen("tempo")
    assert tempo is not None
    step_s = setting.step_s * tempo
    rate_NT = np.minimum(np.diff(done_NT, axis=1).astype(np.float32) * step_s, 1)
    shared_NT = keyed.interpolated(seed, keyed.SHARED, 6, second, seconds, N)
    compute_NT = _gained(who.compute_PK, who.stage_N, done_NT) * step_s * who.compute_N[:, None]
    compute_NT *= 1 + np.float32(0.03 * setting.noise) * shared_NT
    exchange_NT = _gained(who.exchange_PK, who.stage_N, done_NT) * step_s
    evaluate, idle, starve = seen("evaluate"), seen("idle"), seen("starve")
    alive_NT = np.ones((N, 1), np.float32) if idle is None else 1 - idle
    if evaluate is not None:  # forward passes only, without gradients
        compute_NT += 0.6 * evaluate
        exchange_NT += 0.05 * evaluate
    compute_NT = np.clip(compute_NT, 0, 1.2)  # above 1: denser work in a busy second
    exchange_NT = np.clip(exchange_NT, 0, np.maximum(1 - compute_NT, 0))
    wait_NT = alive_NT - compute_NT - exchange_NT
    if starve is not None:
        wait_NT = wait_NT - starve
    drivers = {
        "compute": compute_NT,
        "exchange": exchange_NT,
        "wait": np.clip(wait_NT, 0, 1),
        "load": rate_NT * who.load_N[:, None] * alive_NT,
        "alive": alive_NT,
        "log": alive_NT * who.log_N[:, None],
    }
    for name, factor in (("write", who.write_N[:, None]), ("init", 1), ("disk", 1)):
        track = seen(name)
        if track is not None:
            drivers[name] = track * factor
    return Work(drivers)


def _gained(profile_PK: np.ndarray, stage_N: np.ndarray, done_NT: np.ndarray) -> np.ndarray:
    """Returns what a cumulated profile gains from each column of done_NT to the next, in steps."""
    steps_NT = np.floor(done_NT)
    place_NT = (done_NT - steps_NT) * BINS
    bin_NT = np.minimum(place_NT.astype(np.int64), BINS - 1)
    flat = profile_PK.ravel()
    at_NT = stage_N[:, None] * (BINS + 1) + bin_NT
    low_NT = flat[at_NT]
    value_NT = low_NT + (place_NT - bin_NT) * (flat[at_NT + 1] - low_NT)
    value_NT += steps_NT * profile_PK[stage_N, -1][:, None]
    return np.diff(value_NT, axis=1).astype(np.float32)
