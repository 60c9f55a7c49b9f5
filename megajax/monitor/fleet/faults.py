"""Fault: one fault of one machine, from its onset to the halt of the job, and how one is drawn.

The fault types, their shares and their signatures are the tables of kinds.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.monitor.fleet.disturbances import Disturbance, Move, Shape
from megajax.monitor.fleet.kinds import GROUPS, KINDS, MIXES, Kind
from megajax.monitor.fleet.roles import Layout
from megajax.monitor.fleet.specs import METRICS
from megajax.monitor.sources.names import MINDER

# Share of weak faults among those that do not stop the job: their sizes come from their whole
# range, those of the others from its upper half, in logarithms. ASSUMED: most are plain to see.
WEAK = 0.3


@dataclass(frozen=True)
class Fault:
    """One fault of one machine, from its onset to the halt of the job, Unix seconds.

    metrics: those that move on this machine. moves: how. peers: (number of a machine, delay in s,
    share of the size): those that show it too, later and weaker. speed, speed_delay_s, ramp_s: what
    the whole job does. restart_s: how long the job stands after the halt; 0: it goes on.
    """

    machine: str
    kind: str
    start: float
    end: float
    metrics: tuple[str, ...]
    moves: tuple[Move, ...] = ()
    peers: tuple[tuple[int, float, float], ...] = ()
    speed: float = 1.0
    speed_delay_s: float = 0.0
    ramp_s: float = 0.0
    restart_s: float = field(default=240.0)

    def disturbances(self, layout: Layout) -> list[Disturbance]:
        """Returns what the fault does to its machine, its peers and the job."""
        victim = layout.names.index(self.machine)
        found = [Disturbance(self.kind, self.start, self.end, (victim,), self.moves)]
        spread = [m for m in self.moves if m.target not in ("gone", "nominal")]
        for machine, delay_s, share in self.peers:
            moves = tuple(m.scaled(share, delay_s) for m in spread)
            found.append(Disturbance("peer", self.start, self.end, (machine,), moves))
        slow = min(self.start + self.speed_delay_s, self.end)
        if self.speed < 1:
            kind = "hang" if self.speed == 0 else "slow"
            found.append(Disturbance(kind, slow, self.end, (), (), self.speed, self.ramp_s))
        if self.restart_s > 0:
            found.append(Disturbance("halt", self.end, self.end + self.restart_s, state="restart"))
        return found


def draw_kind(rng: np.random.Generator, mix: str) -> str:
    """Returns a fault type of a mix, a key of MIXES."""
    weights = np.array(list(MIXES[mix].values()))
    return list(MIXES[mix])[rng.choice(len(weights), p=weights / weights.sum())]


def draw_fault(
    rng: np.random.Generator,
    kind: str,
    layout: Layout,
    start: float,
    end: float,
    strength: tuple[float, float] = (1.0, 1.0),
    visible: Collection[str] = MINDER,
    machine: int | None = None,
) -> Fault:
    """Returns a fault of a kind.

    Args: start, end: its onset and the halt. strength: range of a factor of all sizes. visible: at
        least one of these metrics moves, if any can. machine: None: drawn.
    Raises: UserError for a kind that is not in KINDS.
    """
    if kind not in KINDS:
        raise UserError(f"kind={kind!r} must be one of {sorted(KINDS)}.{did_you_mean(kind, KINDS)}")
    what = KINDS[kind]
    victim = int(rng.integers(layout.machines)) if machine is None else machine
    factor = float(rng.uniform(*strength))
    shape, seconds = _shape(rng, what, end - start)
    speed, delay_s, ramp_s = 1.0, float(rng.uniform(0, 20)), 0.0
    chance = rng.random()
    if chance < what.hangs:
        speed = 0.0
    elif chance < what.hangs + what.slows:
        speed = float(rng.uniform(*what.speed))
        ramp_s = seconds if shape == "ramp" else 0.0
    # A machine for which all others wait has stopped: that is plain to see.
    weak = speed > 0 and rng.random() < WEAK
    if speed == 0:  # while all machines wait, what only work moves shows nothing
        waiting = tuple(m for m in visible if METRICS[m].levels.get("wait"))
        visible = waiting or visible
    moves = _moves(rng, what, factor, (shape, seconds), weak, visible)
    if kind == "fail_slow":  # the victim is never seen to wait
        kept = rng.permutation(["gpu_tensor_activity", "gpu_sm_activity", "nvlink_bandwidth"])[:2]
        size = float(rng.uniform(0.3, 0.9))
        moves += tuple(Move(str(m), "nominal", size, shape, seconds) for m in kept)
    if rng.random() < what.vanishes:
        moves = _vanishing(rng, kind, moves)
    peers: list[tuple[int, float, float]] = []
    if rng.random() < what.spreads:
        near = layout.peers(victim)
        most = min(8, layout.machines // 4)  # a fault that all show has no place
        for k in rng.permutation(len(near))[:most]:
            share = float(rng.uniform(*what.spread))
            peers.append((near[k], float(np.exp(rng.uniform(0, np.log(60)))), share))
    names = tuple(dict.fromkeys(m.metric for m in moves))
    return Fault(
        layout.names[victim], kind, start, end, names, moves, tuple(peers), speed, delay_s, ramp_s
    )


def _shape(rng: np.random.Generator, kind: Kind, lasts: float) -> tuple[Shape, float]:
    """Returns a shape and its seconds. A creeping onset takes 1 to 4 minutes, at most a third."""
    if rng.random() < kind.creeps:
        return "ramp", float(min(rng.uniform(60, 240), lasts / 3))
    chance = rng.random()
    if chance < 0.70:
        return "step", 0.0
    if chance < 0.85:
        return "ramp", float(rng.uniform(5, 60))
    if chance < 0.95:
        return "oscillation", float(rng.uniform(6, 60))
    return "flapping", float(rng.uniform(5, 30))


def _moves(
    rng: np.random.Generator,
    kind: Kind,
    factor: float,
    shape: tuple[Shape, float],
    weak: bool,
    visible: Collection[str],
) -> tuple[Move, ...]:
    """Returns the moves that a draw of the effects gives; one of them is visible, if any can be."""
    possible = [e for e in kind.effects if any(m in visible for m in GROUPS[e.group])]
    for _ in range(1000):
        moves: list[Move] = []
        for effect in kind.effects:
            if rng.random() >= effect.probability:
                continue
            low = effect.low if weak else np.sqrt(effect.low * effect.high)
            size = float(np.exp(rng.uniform(np.log(low), np.log(effect.high)))) * factor
            for metric in _members(rng, GROUPS[effect.group]):
                own = min(1.0, size * float(rng.uniform(0.7, 1.2)))
                moves.append(Move(metric, effect.target, own, *shape))
        if not possible or any(m.metric in visible for m in moves):
            return tuple(moves)
    return tuple(Move(m, e.target, e.high, *shape) for e in possible[:1] for m in GROUPS[e.group])


def _members(rng: np.random.Generator, group: Sequence[str]) -> list[str]:
    """Returns some of a group's metrics, each with 0.75, at least one of the first four."""
    kept = [m for m in group if rng.random() < 0.75]
    return kept or [group[int(rng.integers(min(4, len(group))))]]


def _vanishing(rng: np.random.Generator, kind: str, moves: tuple[Move, ...]) -> tuple[Move, ...]:
    """Returns moves after which series end: all of a machine, or those of its GPUs."""
    delay_s = float(rng.uniform(0, 30))
    if kind == "machine_unreachable":
        return (*moves, Move("*", "gone", 1.0, "step", 0.0, delay_s))
    gone = tuple(Move(m, "gone", 1.0, "step", 0.0, delay_s) for m in _GPU)
    return (*(m for m in moves if m.metric not in _GPU), *gone)


_GPU = (
    *GROUPS["gpu"], "gpu_clocks", "gpu_temperature", "gpu_memory_used", "nvlink_bandwidth",
)  # fmt: skip
