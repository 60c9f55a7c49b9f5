"""Search: which mesh and which schedule a configuration should have on a cluster.

Every mesh, schedule and rematerialisation is proposed; the check that a run uses says which meshes
can be, the memory bound drops what fits no device, the cost model ranks the rest, and the best few
are compiled. The model, its batch and its optimizer stay as they are. Times are ESTIMATES.

A search asks the cost model 10^5 times, so each proposal is priced before it is checked once more
as a whole, and only the best are: the check builds and verifies the tick table that would run.

Ctrl-C ends a search early: it then returns what it has, and says how far it came.
"""

import dataclasses
import functools
import itertools
import math
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from megajax.core.axes import ZERO_AXES
from megajax.core.errors import UserError, divisors
from megajax.core.hardware import Cluster
from megajax.core.mesh import MeshSpec
from megajax.cost import memory, traffic
from megajax.cost.base import CostModel
from megajax.cost.estimate import estimate
from megajax.cost.roofline import Roofline
from megajax.models.parts import Remat
from megajax.parallel.pipeline import PipelineConfig, Schedule
from megajax.parallel.sharding import ShardSpec
from megajax.parallel.wire import WireSpec
from megajax.systems import aot
from megajax.systems.aot import RESERVE_BYTES, Plan
from megajax.training.config import Config

SHOWN = 10  # rows of the ranking beside the compiled ones (chosen)
MOST_CONTEXT = 8  # devices that share a row (chosen)

Tell = Callable[[str], None]  # is told how far a search is, in a line


def _quiet(_: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A chosen mesh and schedule. step_s: estimate. bound: bytes a device."""

    step_s: float
    bound: float
    cfg: Config


@dataclasses.dataclass(frozen=True)
class Priced:
    """What the cost model says of some proposals.

    fits: those that fit a device, fastest first. dropped: {largest memory term: how many of the
    others}. nearest: where none fits, those that need least. meshes: how many are done.
    """

    fits: list[Strategy]
    dropped: Mapping[str, int]
    nearest: list[Strategy]
    meshes: int


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    compiled: those that fit first, fastest first. ranked: the best by the cost model. meshes,
    proposals: how many were looked at. dropped: {largest memory term: proposals that do not fit}.
    cpu_s: CPU seconds before anything was compiled. stopped: what Ctrl-C left undone; "": nothing.
    """

    compiled: tuple[Plan, ...]
    ranked: tuple[Plan, ...]
    meshes: int
    proposals: int
    dropped: Mapping[str, int]
    cpu_s: float
    stopped: str = ""

    @property
    def best(self) -> Plan:
        """The fastest that fits; if none does, what comes nearest."""
        return [*self.compiled, *self.ranked][0]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The compiled ones, then the ranked ones that were not compiled."""
        done = [p.cfg for p in self.compiled]
        return (*self.compiled, *(p for p in self.ranked if p.cfg not in done))


def search(
    cfg: Config,
    cluster: Cluster,
    best: int = 3,
    compiles: bool = True,
    model: CostModel = Roofline(),
    tell: Tell = _quiet,
) -> Found:
    """Ranks what could run by the cost model, compiles the best few and ranks those again.

    best: how many that fit are compiled, of at most twice as many that are tried. model: of times.
    tell: is told how far the search is, at each mesh and several times a second while the compiler
    runs. After Ctrl-C, or a KeyboardInterrupt that `tell` raises, what is known by then is ranked
    and returned; a compilation that this left goes on in a thread, which ends with the process.
    Raises: UserError when nothing is legal. KeyboardInterrupt before anything is priced.
    """
    began = time.process_time()
    tell("which meshes are legal?")
    meshes = legal_meshes(cfg, cluster)
    if not meshes:
        raise UserError(
            f"no mesh of {cluster.name} divides this configuration: change --train.global_batch="
            f"{cfg.train.global_batch} or --cluster"
        )
    priced, compiled, stopped = price(cfg, cluster, meshes, model, tell), [], ""
    ranked = tuple(
        itertools.islice(
            legal(priced.fits or priced.nearest, cluster, model), SHOWN if priced.fits else 1
        )
    )
    spent = time.process_time() - began
    if priced.meshes < len(meshes):
        if not ranked:
            raise KeyboardInterrupt
        stopped = f"{priced.meshes} of {len(meshes)} legal meshes are priced, nothing is compiled"
    elif compiles and priced.fits:
        compiled, is_stopped = compile_best(priced.fits, cluster, best, model, tell)
        if is_stopped:
            done = sum(p.misfit is None for p in compiled)
            stopped = f"all legal meshes are priced, {done} of {best} that fit are compiled"
    looked_at = len(priced.fits) + sum(priced.dropped.values())
    return Found(tuple(compiled), ranked, len(meshes), looked_at, priced.dropped, spent, stopped)


def legal_meshes(cfg: Config, cluster: Cluster) -> list[tuple[MeshSpec, dict[str, int]]]:
    """Returns (mesh, its sizes) of every mesh on which some schedule can run.

    Tensor parallelism stays on a host. `node` cuts data parallelism only where that changes
    something: with hybrid sharding, and with --wire, whose exchange has two levels if the ranks
    on a host are one of them. What the schedule adds to a mesh only adds conditions, so a mesh is
    legal if one micro-batch in one piece is.
    """
    experts = divisors(cfg.model.moe.experts) or [1]
    found = []
    for pipe in divisors(cfg.model.layers):
        plainest = _schedule(cfg, "1f1b", 1, 1 if pipe > 1 else None)
        for node in _nodes(cfg, cluster, pipe):
            for expert in experts:
                for context in _powers(MOST_CONTEXT):
                    for tensor in divisors(cluster.gpus_per_host):
                        mesh = MeshSpec(
                            pipe=pipe, node=node, expert=expert, context=context, tensor=tensor
                        )
                        try:
                            sizes = aot.sizes(dataclasses.replace(plainest, mesh=mesh), cluster)
                        except UserError:
                            continue
                        found.append((mesh, sizes))
    return found


def _nodes(cfg: Config, cluster: Cluster, pipe: int) -> list[int]:
    """Returns the sizes of `node` that are proposed for so many stages."""
    if cfg.zero == "hybrid":
        return divisors(cluster.hosts)
    spanned = cluster.devices // (pipe * cluster.gpus_per_host)
    return [1, spanned] if cfg.wire != "none" and spanned > 1 else [1]


def proposals(cfg: Config, mesh: MeshSpec, sizes: Mapping[str, int]) -> Iterator[Config]:
    """Yields the configuration with every schedule and rematerialisation for a legal mesh, and with
    every exchange of data parallelism.

    Micro-batches are the ways to cut a replica's rows; fewer than stages would leave most stages
    idle. Interleaved with one chunk is 1f1b and left out.
    """
    for one in exchanges(dataclasses.replace(cfg, mesh=mesh), sizes):
        yield from _schedules(one, sizes)


def exchanges(cfg: Config, sizes: Mapping[str, int]) -> Iterator[Config]:
    """Yields the configuration and, if it has a wire, what else data parallelism could do.

    A wire changes what a run computes, so one is proposed only if it is asked for; then without it
    too, which tells whether it pays: with the weights cut, and with only the optimizer state cut.
    The axis `node` changes nothing there, so those are proposed without it. A wire between ranks
    that are one sends nothing and is left out.
    """
    if cfg.wire == "none" or math.prod(sizes[axis] for axis in ZERO_AXES) > 1:
        yield cfg
    if cfg.wire == "none" or sizes["node"] > 1:
        return
    for zero in ("full", "optimizer") if cfg.shard.zero == "auto" else (cfg.shard.zero,):
        yield dataclasses.replace(cfg, wire="none", exchange=WireSpec(), shard=ShardSpec(zero))


def _schedules(cfg: Config, sizes: Mapping[str, int]) -> Iterator[Config]:
    pipe = sizes["pipe"]
    rows = cfg.train.global_batch // (sizes["node"] * sizes["data"] * sizes["expert"])
    resident = cfg.wire != "none" or cfg.zero == "optimizer"
    for remat in typing.get_args(Remat):
        if pipe == 1:
            for pieces in divisors(rows):
                train = dataclasses.replace(cfg.train, remat=remat, accumulate=pieces)
                yield dataclasses.replace(_schedule(cfg, "1f1b", 1, None), train=train)
            continue
        train = dataclasses.replace(cfg.train, remat=remat, accumulate=1)
        for pipeline in _pipelines(pipe, rows, cfg.model.layers // pipe):
            if resident and pipeline.gradients == "sharded":
                continue
            yield dataclasses.replace(cfg, train=train, pipeline=pipeline)


def _pipelines(pipe: int, rows: int, layers: int) -> Iterator[PipelineConfig]:
    for microbatches in divisors(rows):
        for schedule in typing.get_args(Schedule)[::-1]:  # of equals gpipe comes last
            for chunks in divisors(layers):
                if microbatches < pipe or not _has(schedule, chunks, microbatches, pipe):
                    continue
                for stash in ("input", "residuals"):
                    for gradients in ("local", "sharded"):
                        yield PipelineConfig(schedule, microbatches, chunks, stash, gradients)


def _has(schedule: str, chunks: int, microbatches: int, pipe: int) -> bool:
    """Whether a schedule is worth proposing with so many chunks; the check refuses the others."""
    if schedule in ("1f1b", "zero_bubble"):
        return chunks == 1
    if schedule == "interleaved" and chunks == 1:
        return False
    return chunks == 1 or microbatches % pipe == 0


def price(
    cfg: Config,
    cluster: Cluster,
    meshes: list[tuple[MeshSpec, dict[str, int]]],
    model: CostModel = Roofline(),
    tell: Tell = _quiet,
) -> Priced:
    """Returns what the cost model says of every proposal, or until Ctrl-C of some."""
    capacity = cluster.card.memory_bytes - RESERVE_BYTES
    fits: list[Strategy] = []
    nearest: list[Strategy] = []
    dropped, least, done = Counter(), float("inf"), 0
    try:
        for done, (mesh, sizes) in enumerate(meshes):
            looked_at = len(fits) + sum(dropped.values())
            counts = f"{looked_at:,} candidates so far, {len(fits):,} fit"
            tell(f"pricing mesh {done + 1} of {len(meshes)}: {counts}")
            for candidate in proposals(cfg, mesh, sizes):
                step = aot.step_shape(candidate, sizes)
                terms = memory.terms(step)
                bound = memory.bound(terms)
                if misfit := memory.misfit(terms, capacity):
                    dropped[misfit] += 1
                    if bound < least:
                        least = bound
                        nearest.insert(0, Strategy(0.0, bound, candidate))
                    continue
                guess = estimate(step, cluster, traffic.transfers(step), model)
                fits.append(Strategy(guess.step_s, bound, candidate))
        done = len(meshes)
    except KeyboardInterrupt:
        pass  # `meshes` of the result says so
    fits.sort(key=lambda p: (p.step_s, p.bound))
    return Priced(fits, dict(dropped.most_common()), nearest, done)


def legal(
    priced: Iterable[Strategy], cluster: Cluster, model: CostModel = Roofline()
) -> Iterator[Plan]:
    """Yields the outlines of those that a run would accept, in their order.

    Of equally fast ones on a mesh (gpipe beside interleaved) only the first, which needs least.
    """
    before = None
    for one in priced:
        if before and (before.step_s, before.cfg.mesh) == (one.step_s, one.cfg.mesh):
            continue
        try:
            yield aot.outline(one.cfg, cluster, model=model)
        except UserError:
            continue
        before = one


def compile_best(
    priced: Iterable[Strategy],
    cluster: Cluster,
    best: int,
    model: CostModel = Roofline(),
    tell: Tell = _quiet,
) -> tuple[list[Plan], bool]:
    """Returns the compiled plans, those that fit first, fastest first, and whether Ctrl-C left
    some undone.

    A program needs more than its bound. One whose bound, times the least factor seen of what keeps
    the same, fits no device is not tried.
    """
    plans: list[Plan] = []
    is_stopped = False
    factors: dict[tuple, float] = {}

    def worth(one: Strategy) -> bool:
        need = factors.get(_keeps(one.cfg), 1.0) * one.bound
        return need + RESERVE_BYTES <= cluster.card.memory_bytes

    try:
        for outlined in legal(filter(worth, priced), cluster, model):
            fitting = sum(p.misfit is None for p in plans)
            state = f"compiling: {fitting} of {best} that fit are done, {len(plans)} were tried"
            tell(state)
            planned = _in_thread(
                functools.partial(aot.plan, outlined.cfg, cluster, model), tell, state
            )
            plans.append(planned)
            if planned.compiled:
                kind, bound = _keeps(planned.cfg), memory.bound(outlined.terms)
                factor = planned.compiled.xla["peak"] / bound
                factors[kind] = min(factors.get(kind, factor), factor)
            if sum(p.misfit is None for p in plans) == best or len(plans) == 2 * best:
                break
    except KeyboardInterrupt:
        is_stopped = True
    return sorted(plans, key=lambda p: (p.misfit is not None, p.estimate.step_s)), is_stopped


def _in_thread(make: Callable[[], Plan], tell: Tell, state: str) -> Plan:
    """Returns what a function makes. Ctrl-C ends the waiting at once; in the main thread it would
    wait for the compiler, which is C++ code, for minutes."""
    made: list[Plan | BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # the caller's to see
            made.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    began = time.monotonic()
    while thread.is_alive():
        thread.join(0.2)
        tell(f"{state}, {time.monotonic() - began:.0f} s")
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def _keeps(cfg: Config) -> tuple:
    """What decides how far a program's memory lies above its bound."""
    return cfg.mesh.pipe > 1, cfg.pipeline.stash, cfg.train.remat


def _schedule(cfg: Config, schedule: Schedule, chunks: int, microbatches: int | None) -> Config:
    """The configuration with a pipeline's order, and a step in one piece."""
    return dataclasses.replace(
        cfg,
        pipeline=PipelineConfig(schedule, microbatches, chunks),
        train=dataclasses.replace(cfg.train, accumulate=1),
    )


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]
