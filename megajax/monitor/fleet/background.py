"""What happens in a healthy job: the hard negatives of a detector.

An hour's disturbances are a function of (setting, seed, hour): nothing needs the hours before. None
of them lasts more than HOUR, so an hour's second depends on two hours' draws.

Kinds, rates and sizes are ASSUMED. Their sizes are those of faults on purpose: a detector must tell
them apart by how long they last and on how many machines.
"""

import numpy as np

from megajax.monitor.fleet import keyed
from megajax.monitor.fleet.disturbances import Disturbance, Move, Shape, Target
from megajax.monitor.fleet.roles import Layout
from megajax.monitor.fleet.settings import Setting
from megajax.monitor.fleet.specs import METRICS

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
    rng = keyed.generator(seed, keyed.EVENTS, hour)
    found = _jitters(setting, layout, rng, hour * HOUR)
    found += _job_events(setting, layout, rng, hour * HOUR)
    found += _gaps(setting, layout, rng, hour * HOUR)
    return sorted(found, key=lambda d: (d.start, d.kind, d.machines))


def phases(setting: Setting, start: int, hour: int) -> list[Disturbance]:
    """Returns the checkpoints and evaluations that begin in an hour; the job began at `start`.

    Every fourth checkpoint stops the GPUs, the others are written behind the training: ASSUMED.
    """
    found = []
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
                found.append(Disturbance(kind, at, at + seconds, state="evaluate"))
            elif k % 4 == 0:
                found.append(Disturbance(kind, at, at + seconds, state="write"))
            else:
                found.append(Disturbance(kind, at, at + 3 * seconds, state="write_behind"))
    return found


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


def _jitters(
    setting: Setting, layout: Layout, rng: np.random.Generator, second: int
) -> list[Disturbance]:
    count = rng.poisson(setting.jitters * (layout.machines + 6))
    low, high = np.log(setting.jitter_s)
    found = []
    for _ in range(count):
        start, seconds = second + rng.uniform(0, HOUR), float(np.exp(rng.uniform(low, high)))
        machine = int(rng.integers(layout.machines))
        found.append(draw_jitter(layout, rng, start, seconds, machine))
    return found


def _job_events(
    setting: Setting, layout: Layout, rng: np.random.Generator, second: int
) -> list[Disturbance]:
    names = list(JOB_EVENTS)
    share = np.array([JOB_EVENTS[n][0] for n in names])
    found = []
    for _ in range(rng.poisson(setting.job_events)):
        name = names[rng.choice(len(names), p=share / share.sum())]
        _, low, high = JOB_EVENTS[name]
        start = second + rng.uniform(0, HOUR)
        end = start + float(np.exp(rng.uniform(np.log(low), np.log(high))))
        found += _job_event(name, layout, rng, start, end)
    return found


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
    found = []
    for _ in range(rng.poisson(setting.gaps * (layout.machines + 2))):
        start, machine = second + rng.uniform(0, HOUR), int(rng.integers(layout.machines))
        if rng.random() < 0.3:
            back = start + float(rng.uniform(1, 4))
            low = tuple(Move(m, "zero", 0.7) for m, spec in METRICS.items() if spec.counter)
            found.append(Disturbance("gap", start, back, (machine,), (Move("*", "gone"),)))
            found.append(Disturbance("counter_reset", back, back + 1, (machine,), low))
            continue
        seconds = float(np.exp(rng.uniform(np.log(2), np.log(90))))
        found.append(Disturbance("gap", start, start + seconds, (machine,), (Move("*", "gone"),)))
    return found
