"""The time of one call of a compiled program: records, their times, and a replay of its streams.

A device has a stream for what it computes and one for its collectives. The schedule is the text's:
a collective starts when the computation before it has ended; computation behind the collective's
second half (`-done`) waits for it. All turns of a loop stand as one task of their total time, so a
loop hides in its turns what one turn hides, and what lies across two turns counts as in one. Copies
between memories are computation. Collectives have the alpha-beta times of cost/network.py. What a
call costs beside its operations (overheads.py) lies on the compute stream: a part of it before the
first operation, a part at each launch.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from megajax.core.hardware import Cluster, DeviceCard
from megajax.cost.hlo import device_groups
from megajax.cost.hlo_module import Module
from megajax.cost.hlo_text import Instruction
from megajax.cost.network import Group, collective_time, group_of
from megajax.cost.program import Platform, records
from megajax.cost.record import OpRecord
from megajax.cost.replay import Replay, replay
from megajax.cost.roofline import Roofline
from megajax.schedule.ir import Task
from megajax.schedule.simulator import Slowdown
from megajax.systems.cdmpp.overheads import Overheads, counts

# (records, card) -> (seconds of one execution, their standard deviations)
Times = Callable[[Sequence[OpRecord], DeviceCard], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A record at its place in the schedule.

    instruction: the line. starts: the name that its second half will ask for; '': the stream waits
    for it at once. after: the names of those whose second half stands before it.
    """

    record: OpRecord
    instruction: Instruction
    starts: str
    after: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """What is predicted of one call.

    seconds, exposed_s: of the replay. sigma: standard deviation of seconds, with the errors of all
    operations fully correlated. compute_s, communication_s: of all executions, alone. overhead_s:
    of the call and its launches. rows: (record, seconds of all its executions, their deviation),
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


def assumed(found: Sequence[OpRecord], card: DeviceCard) -> tuple[np.ndarray, np.ndarray]:
    """Times of records at the efficiencies that cost/roofline.py assumes."""
    model = Roofline()
    seconds = np.zeros(len(found))
    for place, one in enumerate(found):
        share = model.attention if one.kind == "attention" else model.matmul
        arithmetic = dataclasses.replace(one, nbytes=0.0).floor_s(card) / share
        moving = one.nbytes / (model.memory_bandwidth * card.memory_bytes_per_s)
        seconds[place] = max(arithmetic, moving)
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
    """Returns the time of one call of a compiled module on a cluster.

    Args: text: `compiled.as_text()`. times: of a fitted predictor (`Predictor.predict`), or those
      of assumed efficiencies. live_rows, live_pairs, platform: as of
      `cost.program.records`. overheads: of a call; None: hidden. slowdown: of `cost.replay.replay`.
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
        whole = counts(text)
        durations = seconds + overheads.launch_s * executions
        before = overheads.of(dataclasses.replace(whole, launches=0))
    found = replay(tasks(launches, durations.tolist(), before), slowdown)
    order = np.argsort(-seconds, kind="stable")
    # Of errors that are all one factor, the replay grows by that factor.
    share = float(sigma.sum() / seconds.sum()) if seconds.sum() else 0.0
    return StepTime(
        found.seconds,
        found.exposed_s,
        share * found.seconds,
        float(seconds[~is_sent].sum()),
        float(seconds[is_sent].sum()),
        tuple((launches[i].record, float(seconds[i]), float(sigma[i])) for i in order),
        found,
        before + float((durations - seconds).sum()),
    )


def tasks(
    launches: Sequence[Launch], seconds: Sequence[float], before_s: float = 0.0
) -> list[Task]:
    """Returns the tasks of a schedule, for `cost.replay.replay`.

    seconds: of all executions of each launch. before_s: until the first of them starts.
    """
    out = [Task("call", "compute", (), before_s, "F")] if before_s else []
    names: dict[str, str] = {}  # what a second half asks for -> the newest task of that name
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
    """Yields what a module launches, in the order of its schedule."""
    found: dict[str, collections.deque[OpRecord]] = collections.defaultdict(collections.deque)
    all_records = records(text, live_rows=live_rows, live_pairs=live_pairs, platform=platform)
    for record in all_records:
        found[record.name].append(record)
    module = Module(text, live_rows)
    done: list[str] = []
    for starts, instruction in _walk(module, module.entry, done, ""):
        if waiting := found.get(instruction.name):
            is_async = starts and '"is_sync":true' not in instruction.attributes
            yield Launch(waiting.popleft(), instruction, starts if is_async else "", tuple(done))
            done.clear()


def _walk(
    module: Module, name: str, done: list[str], starts: str
) -> Iterator[tuple[str, Instruction]]:
    """Yields (what a second half will ask for, instruction), bodies of loops and calls in their
    place; adds to `done` what second halves have asked for since the last launch."""
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
    """Returns {kind of record: seconds of all its executions}, the longest first."""
    total: dict[str, float] = collections.defaultdict(float)
    for record, seconds, _ in step.rows:
        total[record.kind] += seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))
