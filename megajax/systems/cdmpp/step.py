"""Predicts the time of one call of a compiled program, such as a train step, by a replay.

A replay simulates a device that has one stream for computation and one for collectives. Each record
of the program becomes a task on one of them, in the order of the compiled text. A collective starts
when the computation before it has ended. XLA writes an asynchronous collective as two instructions,
`-start` and `-done`: computation after the `-done` waits for the collective. A record inside a loop
is one task, which takes the time of all iterations. So a loop hides as much communication as a
single iteration would, and overlap between neighbouring iterations counts as overlap inside one.
Copies between memories count as computation.

A predictor gives the times of computation, and the alpha-beta model (cost/roofline.py) those of
collectives. The overheads of a call are on the compute stream: a part before the
first operation, a part at each launch.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

from megajax.core.errors import UserError
from megajax.core.hardware import Cluster, DeviceCard
from megajax.cost.hlo import Instruction, Module, device_groups
from megajax.cost.program import Platform, records
from megajax.cost.record import OpRecord
from megajax.cost.replay import Replay, replay
from megajax.cost.roofline import Group, Roofline, collective_time, group_of
from megajax.schedule.ir import Task
from megajax.schedule.simulator import Slowdown

# ---- overheads
#
# The overheads of a call: its time beyond the times of the instructions that it launches.
#
# A call of a compiled program first looks up its argument arrays. Between two launched
# instructions, and between two iterations of a loop, the runtime of a CPU does work that the
# profiler attributes to neither. These times are fitted on programs that were timed both in one
# piece and instruction by instruction. The host of a GPU launches instructions before the device is
# ready to run them, so there the overheads are hidden and are not added.


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one call of a program contains, in numbers that its overheads depend on.

    arrays: arguments and results. launches: launched instructions. turns: iterations of all loops.
    """

    arrays: int
    launches: float
    turns: float


def counts(text: str) -> Counts:
    """Returns the counts of a compiled module (`compiled.as_text()`)."""
    module = Module(text)
    entry = module.instructions(module.entry).values()
    arguments = sum(one.opcode == "parameter" for one in entry)
    made = sum(len(one.arrays) for one in entry if one.is_root)
    launched = sum(record.executions for record in records(text))
    return Counts(arguments + made, launched, _turns(module, module.entry))


def _turns(module: Module, name: str) -> float:
    total = 0.0
    for one in module.instructions(name).values():
        if loop := module.loop(one):
            total += (loop[1] or 1) * (1 + _turns(module, loop[0]))
        elif one.opcode in ("call", "async-start", "conditional"):
            total += max((_turns(module, name) for name in (*one.called, *one.branches)), default=0)
    return total


@dataclasses.dataclass(frozen=True)
class Overheads:
    """The fitted overheads in seconds.

    call_s: the seconds of every call. array_s, launch_s, turn_s: the seconds of each array, each
    launched instruction and each iteration of a loop (see Counts).
    """

    call_s: float = 0.0
    array_s: float = 0.0
    launch_s: float = 0.0
    turn_s: float = 0.0

    def of(self, call: Counts) -> float:
        """Returns the seconds of one call."""
        return (
            self.call_s
            + self.array_s * call.arrays
            + self.launch_s * call.launches
            + self.turn_s * call.turns
        )

    @classmethod
    def fit(
        cls, programs: Sequence[Counts], computed: Sequence[float], walls: Sequence[float]
    ) -> "Overheads":
        """Returns the non-negative overheads with the least squared relative errors.

        Args: programs: the counts of each program. computed: seconds of all its instructions.
          walls: seconds of its call.
        Raises: UserError without a program.
        """
        if not len(programs):
            raise UserError("overheads are fitted on programs that were timed; there is none")
        total = np.asarray(walls, float)
        table = np.array([(1, one.arrays, one.launches, one.turns) for one in programs], float)
        beyond = np.maximum(total - np.asarray(computed, float), 0)
        fitted, _ = nnls(table / total[:, None], beyond / total)
        return cls(*fitted.tolist())


# ---- replay


# Of times at assumed efficiencies: the least of a launched kernel, and what 90 % of measured times
# are multiples of. (Chosen with measured rows, which have no part in the efficiencies: sums of 8 to
# 128 rows of an H200, 2026-11-27, experiments/results/cdmpp_gpu_labels.npz, and of each of the
# eight GPUs of NeuSight's test rows. A fit, not a test on unseen GPUs.)
LAUNCH_S, ASSUMED_BAND = 2e-6, (0.7, 3.0)

# (records, card) -> (seconds of one execution, their standard deviations)
Times = Callable[[Sequence[OpRecord], DeviceCard], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A record at its place in the schedule.

    instruction: the line of the compiled text. starts: for an asynchronous record, the name that
    its `-done` instruction refers to; '': the computation after it waits for it at once. after:
    names of the asynchronous records that must have ended before this one starts.
    """

    record: OpRecord
    instruction: Instruction
    starts: str
    after: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The predicted times of one call, in seconds.

    seconds: those of the complete call. exposed_s: communication that no computation hides. sigma:
    standard deviation of `seconds` if the errors of all operations are fully correlated. compute_s,
    communication_s: sums over all executions, without overlap. overhead_s: the overheads of the
    call and its launches. rows: (record, seconds of all its executions, their standard deviation),
    the longest first.
    """

    seconds: float
    exposed_s: float
    sigma: float
    compute_s: float
    communication_s: float
    rows: tuple[tuple[OpRecord, float, float], ...]
    replay: Replay
    overhead_s: float = 0.0


def assumed(launched: Sequence[OpRecord], card: DeviceCard) -> tuple[np.ndarray, np.ndarray]:
    """Returns (seconds, sigma) of records at the efficiencies that cost/roofline.py assumes."""
    model = Roofline()
    seconds = np.zeros(len(launched))
    for place, one in enumerate(launched):
        share = model.attention if one.kind == "attention" else model.matmul
        arithmetic = dataclasses.replace(one, nbytes=0.0).floor_s(card) / share
        moving = one.nbytes / (model.memory_bandwidth * card.memory_bytes_per_s)
        launch = LAUNCH_S if card.capability else 0.0  # a CPU launches nothing
        seconds[place] = max(arithmetic, moving, launch)
    return seconds, model.sigma * seconds


def predict(
    text: str,
    cluster: Cluster,
    times: Times = assumed,
    *,
    live_rows: float = 1.0,
    live_pairs: float = 1.0,
    platform: Platform = "gpu",
    overheads: Overheads | None = None,
    slowdown: Slowdown | None = None,
) -> StepTime:
    """Returns the predicted time of one call of a compiled module on a cluster.

    Args: text: `compiled.as_text()`. times: gives the seconds of records: `Predictor.predict`, or
      `assumed`. live_rows, live_pairs, platform: as in `cost.program.records`. overheads: those of
      a call; None: none, as on a GPU, whose host launches ahead. slowdown: as in `replay`.
    """
    launches = list(schedule(text, live_rows=live_rows, live_pairs=live_pairs, platform=platform))
    is_sent = np.array([one.record.kind == "collective" for one in launches], bool)
    computed = [one.record for one in launches if one.record.kind != "collective"]
    seconds, sigma = np.zeros(len(launches)), np.zeros(len(launches))
    if computed:
        seconds[~is_sent], sigma[~is_sent] = times(computed, cluster.card)
    for place in np.flatnonzero(is_sent):
        seconds[place] = _sending(launches[place], cluster)
        sigma[place] = Roofline().sigma * seconds[place]
    executions = np.array([one.record.executions for one in launches])
    seconds, sigma = seconds * executions, sigma * executions
    durations, before = seconds, 0.0
    if overheads is not None:
        call = counts(text)
        durations = seconds + overheads.launch_s * executions
        before = overheads.of(dataclasses.replace(call, launches=0))
    replayed = replay(tasks(launches, durations.tolist(), before), slowdown)
    order = np.argsort(-seconds, kind="stable")
    # If all tasks were longer by one factor, the replay would be longer by that factor, so the
    # relative deviation of the sum of all tasks is also that of the replay.
    share = float(sigma.sum() / seconds.sum()) if seconds.sum() else 0.0
    return StepTime(
        replayed.seconds,
        replayed.exposed_s,
        share * replayed.seconds,
        float(seconds[~is_sent].sum()),
        float(seconds[is_sent].sum()),
        tuple((launches[i].record, float(seconds[i]), float(sigma[i])) for i in order),
        replayed,
        before + float((durations - seconds).sum()),
    )


def tasks(
    launches: Sequence[Launch], seconds: Sequence[float], before_s: float = 0.0
) -> list[Task]:
    """Returns the tasks of a schedule, for `cost.replay.replay`.

    seconds: those of all executions of each launch, together. before_s: seconds before the first
    launch.
    """
    out = [Task("call", "compute", (), before_s, "F")] if before_s else []
    names: dict[str, str] = {}  # name that a `-done` refers to -> its newest task
    before: tuple[str, ...] = ()  # what the next task of the compute stream waits for
    last = tuple(task.name for task in out)  # the newest task of that stream
    for place, (one, duration) in enumerate(zip(launches, seconds, strict=True)):
        name = f"{place} {one.record.name}"
        waits = (*before, *(names[start] for start in one.after if start in names))
        if one.record.kind == "collective":
            deps = tuple(dict.fromkeys((*waits, *last)))
            out.append(Task(name, "communication", deps, float(duration), "COMM"))
            if one.starts:
                names[one.starts], before = name, waits
            else:
                before = (*waits, name)
        else:
            out.append(Task(name, "compute", waits, float(duration), "F"))
            before, last = (), (name,)
    return out


def schedule(
    text: str, *, live_rows: float = 1.0, live_pairs: float = 1.0, platform: Platform = "gpu"
) -> Iterator[Launch]:
    """Yields the launches of a module in the order of its schedule."""
    by_name: dict[str, collections.deque[OpRecord]] = collections.defaultdict(collections.deque)
    all_records = records(text, live_rows=live_rows, live_pairs=live_pairs, platform=platform)
    for record in all_records:
        by_name[record.name].append(record)
    module = Module(text, live_rows)
    done: list[str] = []
    for starts, instruction in _walk(module, module.entry, done, ""):
        if waiting := by_name.get(instruction.name):
            is_async = starts and '"is_sync":true' not in instruction.attributes
            yield Launch(waiting.popleft(), instruction, starts if is_async else "", tuple(done))
            done.clear()


def _walk(
    module: Module, name: str, done: list[str], starts: str
) -> Iterator[tuple[str, Instruction]]:
    """Yields (name that a `-done` will refer to, instruction) in the order of the schedule.

    The bodies of loops and calls are visited in their place. The names that `-done` instructions
    have referred to since the last launch are appended to `done`.
    """
    for one in module.instructions(name).values():
        if one.opcode.endswith("-done"):
            done.extend(one.operands[:1])
        elif loop := module.loop(one):
            yield from _walk(module, loop[0], done, "")
        elif one.opcode in ("call", "async-start", "conditional"):
            inner = one.name if one.opcode == "async-start" else ""
            for called in (*one.called, *one.branches):
                yield from _walk(module, called, done, inner)
        else:
            yield (one.name if one.opcode.endswith("-start") else starts), one


def _sending(launch: Launch, cluster: Cluster) -> float:
    """Returns the seconds of one execution of a collective."""
    one, record = launch.instruction, launch.record
    kind = one.opcode.removesuffix("-start")
    groups = device_groups(one.attributes, cluster.devices)
    nbytes = max(record["bytes_read"], record["bytes_written"])
    if kind == "collective-permute":
        apart = [pair for pair in groups if pair[0] != pair[1]]
        hosts = max((len({i // cluster.gpus_per_host for i in pair}) for pair in apart), default=0)
        return collective_time(kind, nbytes, Group(2 // hosts, hosts), cluster) if hosts else 0.0
    if kind in ("collective-broadcast", "send", "recv"):
        kind = "collective-permute"
    return collective_time(kind, nbytes, group_of(groups[0], cluster.gpus_per_host), cluster)


def by_kind(step: StepTime) -> Mapping[str, float]:
    """Returns {kind of record: seconds of all executions}, the longest first."""
    total: dict[str, float] = collections.defaultdict(float)
    for record, seconds, _ in step.rows:
        total[record.kind] += seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))
