"""The timeline of a healthy job: its disturbances, speed, phases and progress, second by second.

Training is synchronous, so there is one progress for all machines: a machine that is slow slows
all. Legend: T seconds.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megajax.monitor.fleet import roles
from megajax.monitor.fleet.faults import METRICS, Disturbance, Move, Shape, Target
from megajax.monitor.fleet.roles import BINS, Layout, Setting, step_profile

# ---- what happens in a healthy job: the hard negatives of a detector
#
# An hour's disturbances are a function of (setting, seed, hour): nothing needs the hours before.
# None of them lasts more than HOUR, so an hour's second depends on two hours' draws.
#
# Kinds, rates and sizes are ASSUMED. Their sizes are those of faults on purpose: a detector must
# tell them apart by how long they last and on how many machines.


HOUR = 3600

# Of one machine: name -> (share, moves as (metric, target, smallest and largest size), coupled).
# A coupled one slows the job. Sizes of packet rates are shares of the way in logarithms.
JITTERS: dict[str, tuple[float, list[tuple[str, Target, float, float]], float]] = {
    "cpu_burst": (0.25, [("cpu_usage", "high", 0.10, 0.9)], 0.1),
    "process_pause": (
        0.15,
        [
            ("cpu_usage", "idle", 0.3, 1.0),
            ("gpu_tensor_activity", "zero", 0.2, 0.9),
            ("gpu_power_draw", "idle", 0.2, 0.8),
        ],
        0.5,
    ),
    "network_burst": (
        0.25,
        [
            ("pfc_tx_packet_rate", "high", 0.15, 0.8),
            ("ecn_packet_rate", "high", 0.15, 0.8),
            ("cnp_packet_rate", "high", 0.15, 0.8),
        ],
        0.3,
    ),
    "gpu_throttle": (
        0.15,
        [
            ("gpu_power_draw", "idle", 0.1, 0.5),
            ("gpu_clocks", "idle", 0.1, 0.4),
            ("gpu_duty_cycle", "zero", 0.05, 0.5),
            ("gpu_graphics_engine_activity", "zero", 0.05, 0.5),
        ],
        0.5,
    ),
    "link_retrain": (0.10, [("nvlink_bandwidth", "zero", 0.2, 1.0)], 0.3),
    "stuck_sensor": (
        0.05,
        [("gpu_power_draw", "nominal", 1.0, 1.0), ("gpu_temperature", "nominal", 1.0, 1.0)],
        0.0,
    ),
    "disk_burst": (
        0.05,
        [("disk_usage", "high", 0.3, 1.0), ("cpu_usage", "high", 0.05, 0.3)],
        0.0,
    ),
}

# Of the whole job or a rack: name -> (share, shortest, longest in s).
JOB_EVENTS = {
    "data_stall": (0.22, 4, 90),
    "network_stall": (0.18, 3, 60),
    "slow_disk": (0.12, 120, 900),
    "congestion": (0.14, 20, 300),
    "rack_slow": (0.14, 20, 200),
    "rack_burst": (0.10, 5, 120),
    "restart": (0.04, 90, 400),
    "scrape_outage": (0.06, 3, 45),
}


def of_hour(setting: Setting, layout: Layout, seed: int, hour: int) -> list[Disturbance]:
    """Returns the disturbances that start in hour `hour` (seconds hour x 3600 on), by start."""
    rng = roles.generator(seed, roles.EVENTS, hour)
    begin = hour * HOUR
    count = rng.poisson(setting.jitters * (layout.machines + 6))
    low, high = np.log(setting.jitter_s)
    disturbances = []
    for _ in range(count):
        start, seconds = begin + rng.uniform(0, HOUR), float(np.exp(rng.uniform(low, high)))
        machine = int(rng.integers(layout.machines))
        disturbances.append(draw_jitter(layout, rng, start, seconds, machine))
    disturbances += _job_events(setting, layout, rng, begin)
    disturbances += _gaps(setting, layout, rng, begin)
    return sorted(disturbances, key=lambda d: (d.start, d.kind, d.machines))


def phases(setting: Setting, start: int, hour: int) -> list[Disturbance]:
    """Returns the checkpoints and evaluations that begin in an hour; the job began at `start`.

    Every fourth checkpoint stops the GPUs, the others are written behind the training: ASSUMED.
    """
    disturbances = []
    kinds = (
        ("checkpoint", setting.checkpoint_every_s, setting.checkpoint_s),
        ("evaluation", setting.evaluate_every_s, setting.evaluate_s),
    )
    for kind, every, seconds in kinds:
        if every <= 0:
            continue
        first = max(1, int(np.ceil((hour * HOUR - start) / every)))
        last = int(np.ceil(((hour + 1) * HOUR - start) / every))
        for k in range(first, last):
            at = start + k * every
            if kind == "evaluation":
                disturbances.append(Disturbance(kind, at, at + seconds, state="evaluate"))
            elif k % 4 == 0:
                disturbances.append(Disturbance(kind, at, at + seconds, state="write"))
            else:
                disturbances.append(Disturbance(kind, at, at + 3 * seconds, state="write_behind"))
    return disturbances


def draw_jitter(
    layout: Layout, rng: np.random.Generator, start: float, seconds: float, machine: int
) -> Disturbance:
    """Returns a short disturbance of one machine."""
    names = list(JITTERS)
    share = np.array([JITTERS[n][0] for n in names])
    name = names[rng.choice(len(names), p=share / share.sum())]
    _, moves, coupled = JITTERS[name]
    shape: Shape = ("step", "ramp", "oscillation")[rng.choice(3, p=(0.6, 0.25, 0.15))]
    seconds_of_shape = float(rng.uniform(3, 30))
    drawn = tuple(
        Move(metric, target, float(rng.uniform(low, high)), shape, seconds_of_shape)
        for metric, target, low, high in moves
    )
    # At most a few slow the job in an hour, however many machines there are.
    slows = rng.random() < coupled * min(1.0, 16 / layout.machines)
    speed = float(rng.uniform(0.5, 0.95)) if slows else 1.0
    return Disturbance(name, start, start + seconds, (machine,), drawn, speed)


def _job_events(
    setting: Setting, layout: Layout, rng: np.random.Generator, second: int
) -> list[Disturbance]:
    names = list(JOB_EVENTS)
    share = np.array([JOB_EVENTS[n][0] for n in names])
    disturbances = []
    for _ in range(rng.poisson(setting.job_events)):
        name = names[rng.choice(len(names), p=share / share.sum())]
        _, low, high = JOB_EVENTS[name]
        start = second + rng.uniform(0, HOUR)
        end = start + float(np.exp(rng.uniform(np.log(low), np.log(high))))
        disturbances += _job_event(name, layout, rng, start, end)
    return disturbances


def _job_event(
    name: str, layout: Layout, rng: np.random.Generator, start: float, end: float
) -> list[Disturbance]:
    if name == "data_stall":
        return [Disturbance(name, start, end, speed=0.0, state="starve")]
    if name == "network_stall":
        return [Disturbance(name, start, end, speed=0.0)]
    if name == "slow_disk":
        return [Disturbance(name, start, end, speed=float(rng.uniform(0.7, 1.0)), state="disk")]
    if name == "restart":  # and then caches are cold
        cold = Disturbance(
            "cold_caches", end, end + float(rng.uniform(60, 300)), speed=0.6, state="disk"
        )
        return [Disturbance(name, start, end, speed=0.0, state="restart"), cold]
    if name == "scrape_outage":
        return [Disturbance(name, start, end, moves=(Move("*", "gone"),))]
    burst = tuple(
        Move(
            metric, "high", float(rng.uniform(0.15, 0.7)), "oscillation", float(rng.uniform(5, 40))
        )
        for metric in ("pfc_tx_packet_rate", "ecn_packet_rate", "cnp_packet_rate")
    )
    if name == "congestion":
        return [Disturbance(name, start, end, (), burst, float(rng.uniform(0.6, 0.95)))]
    rack = rng.integers(layout.rack_N[-1] + 1)
    machines = [int(k) for k in np.flatnonzero(layout.rack_N == rack)]
    if name == "rack_burst":
        return [Disturbance(name, start, end, tuple(machines), burst)]
    speed = float(rng.uniform(0.6, 0.95))
    slowed = []
    for number, machine in enumerate(machines):  # not all of them by the same amount
        size = float(rng.uniform(0.05, 0.5))
        metrics = ("gpu_power_draw", "gpu_clocks", "gpu_tensor_activity", "nvlink_bandwidth")
        moves = tuple(Move(m, "idle", size, "ramp", 10.0) for m in metrics)
        slowed.append(
            Disturbance(name, start, end, (machine,), moves, speed if number == 0 else 1.0)
        )
    return slowed


def _gaps(
    setting: Setting, layout: Layout, rng: np.random.Generator, second: int
) -> list[Disturbance]:
    """Samples that are lost for a while, and exporters that restart.

    A restarted exporter shows counters from zero: after a hole of 1 to 4 s their rate of one second
    is far too low, since a rate that sees a reset counts from zero (as Prometheus' does).
    """
    disturbances = []
    for _ in range(rng.poisson(setting.gaps * (layout.machines + 2))):
        start, machine = second + rng.uniform(0, HOUR), int(rng.integers(layout.machines))
        if rng.random() < 0.3:
            back = start + float(rng.uniform(1, 4))
            low = tuple(Move(m, "zero", 0.7) for m, spec in METRICS.items() if spec.counter)
            disturbances.append(Disturbance("gap", start, back, (machine,), (Move("*", "gone"),)))
            disturbances.append(Disturbance("counter_reset", back, back + 1, (machine,), low))
            continue
        seconds = float(np.exp(rng.uniform(np.log(2), np.log(90))))
        disturbances.append(
            Disturbance("gap", start, start + seconds, (machine,), (Move("*", "gone"),))
        )
    return disturbances


# ---- the progress of the job


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
            made = of_hour(self.setting, self.layout, self.seed, hour)
            if hour * HOUR < self.start:  # nothing is disturbed before the job starts
                made = [d for d in made if d.start >= self.start]
            self._hours[hour] = made + phases(self.setting, self.start, hour)
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
        tracks: dict[str, np.ndarray] = {name: np.zeros(HOUR, np.float32) for name in TRACKS}
        tracks["speed"] += 1
        tracks["tempo"] += 1
        changes = [d for d in self.disturbances(second, second + HOUR) if d.changes_the_job]
        # A job that hangs saves and evaluates nothing, so a hang comes last.
        for disturbance in sorted(changes, key=lambda d: d.kind == "hang"):
            _apply(disturbance, second, tracks)
        steps = tracks["speed"].astype(np.float64) / (self.setting.step_s * tracks["tempo"])
        if second < self.start:
            steps[: self.start - second] = 0
        done = self._steps_before(hour)
        tracks["progress"] = done + np.concatenate([[0.0], np.cumsum(steps)])
        first = self.start // HOUR
        if hour - first + 1 == len(self._progress):
            self._progress.append(float(tracks["progress"][-1]))
        self._tracks[hour] = tracks
        return tracks

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
        """Drops cached hours before `hour` - 2."""
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


# ---- what each machine does in each second: the drivers of its metrics
#
# The job's progress is one number; a machine shows what its stage does at that point of the step,
# by its own clock, averaged over the second of the sample. Legend: N machines, T seconds of a
# block.


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
    """What each machine does in each second of a block.

    drivers: {activity (faults.py, DRIVERS): its intensity, float32 (N, T), or (N, 1) if it is equal
    in all seconds}. The intensity is 0 to 1; that of `compute` may reach 1.2. An activity that is 0
    in the whole block is left out.
    """

    drivers: dict[str, np.ndarray]


def people(layout: Layout, setting: Setting, seed: int) -> People:
    """Returns the constants of the machines.

    ASSUMED: the first stage loads the data of all and has an embedding (compute +3 %), the last one
    the head and the loss (+8 %); data rank 0 writes the weights, the others a tenth of that;
    machine 0 writes the log; clocks differ evenly within the limit.
    """
    rng, N = roles.generator(seed, roles.OFFSETS, 1 << 20), layout.machines
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
    """Returns what the machines do in the block of 60 seconds that starts at `second`.

    Args: tracks: as Job.window returns them, of the block and of as many seconds before it as after
      it. This margin is longer than the largest skew_N, because a machine whose clock is late shows
      what the job did at another second.
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
    shared_NT = roles.interpolated(seed, roles.SHARED, 6, second, seconds, N)
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
    """Returns how much a cumulated profile gains between neighbouring columns of done_NT, in
    steps."""
    steps_NT = np.floor(done_NT)
    place_NT = (done_NT - steps_NT) * BINS
    bin_NT = np.minimum(place_NT.astype(np.int64), BINS - 1)
    flat = profile_PK.ravel()
    at_NT = stage_N[:, None] * (BINS + 1) + bin_NT
    low_NT = flat[at_NT]
    value_NT = low_NT + (place_NT - bin_NT) * (flat[at_NT + 1] - low_NT)
    value_NT += steps_NT * profile_PK[stage_N, -1][:, None]
    return np.diff(value_NT, axis=1).astype(np.float32)
