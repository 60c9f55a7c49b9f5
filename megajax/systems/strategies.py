"""Search: which mesh and which schedule a configuration should have on a cluster.

Every mesh, schedule and rematerialisation is proposed. The check that a run uses refuses illegal
meshes, the memory bound drops what fits no device, the cost model ranks the others, and the best
few are compiled. A compiled program shows how far the memory of its kind of program exceeds the
bound, so candidates that are likely too large are then neither compiled nor ranked. The model, its
batch and its optimizer stay as they are. Times are ESTIMATES.

A search asks the cost model 10^5 times, so each proposal is priced before its complete
configuration is checked, which builds and verifies the tick table that would run. Only the best
proposals are checked.

Ctrl-C ends a search early: the search then returns what it has ranked and says how far it came.
"""

import dataclasses
import functools
import itertools
import math
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from megajax.core.axes import ZERO_AXES
from megajax.core.errors import UserError, divisors
from megajax.core.hardware import Cluster
from megajax.core.mesh import MeshSpec
from megajax.cost import memory, traffic
from megajax.cost.base import CostModel
from megajax.cost.estimate import estimate
from megajax.cost.roofline import Roofline
from megajax.models.parts import Remat
from megajax.parallel.pipeline import PipelineConfig
from megajax.parallel.sharding import ShardSpec
from megajax.parallel.wire import WireSpec
from megajax.schedule.build import Schedule
from megajax.systems import aot
from megajax.systems.aot import RESERVE_BYTES, Plan
from megajax.training.config import Config
from megajax.training.shape import resolved

SHOWN = 10  # rows of the ranking beside the compiled ones (chosen)
MOST_CONTEXT = 8  # devices that share a row (chosen)
# Programs that are compiled in vain before a search gives up, and the CPU seconds after which it
# begins no other one: a large model takes 10 to 120 of them (chosen).
MOST_MISFITS, MOST_CPU_S = 12, 900.0

Tell = Callable[[str], None]  # is told how far a search is, in a line


def _quiet(_: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A chosen mesh and schedule. step_s: the estimated seconds of a step. bound: the memory bound
    in bytes of a device."""

    step_s: float
    bound: float
    cfg: Config


@dataclasses.dataclass(frozen=True)
class Priced:
    """What the cost model says of some proposals.

    fits: the proposals that fit a device, fastest first. dropped: {largest memory term: how many of
    the other proposals have it}. nearest: the proposals that need least, if none fits. meshes: how
    many meshes are priced.
    """

    fits: list[Strategy]
    dropped: Mapping[str, int]
    nearest: list[Strategy]
    meshes: int


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What a search found.

    compiled: the compiled plans; those that fit come first, the fastest before the others. ranked:
    the best of the other candidates by the cost model, without those whose kind is known to need
    too much. meshes, proposals: how many were considered. dropped: {largest memory term: proposals
    that do not fit by their bound}. cpu_s: CPU seconds before anything was compiled. unlikely: how
    many fit by their bound and are expected not to, by the programs that were compiled. ended: why
    fewer plans that fit were compiled than asked for; "": as many were. stopped: what Ctrl-C left
    undone; "": nothing.
    """

    compiled: tuple[Plan, ...]
    ranked: tuple[Plan, ...]
    meshes: int
    proposals: int
    dropped: Mapping[str, int]
    cpu_s: float
    unlikely: int = 0
    ended: str = ""
    stopped: str = ""

    @property
    def best(self) -> Plan:
        """The fastest plan that fits; if none does, the plan that needs least."""
        return [*self.compiled, *self.ranked][0]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that fit, then those that may fit and were not compiled, then those that do
        not."""
        fits = sum(p.fits for p in self.compiled)
        return (*self.compiled[:fits], *self.ranked, *self.compiled[fits:])


def search(
    cfg: Config,
    cluster: Cluster,
    best: int = 3,
    compiles: bool = True,
    model: CostModel = Roofline(),
    tell: Tell = _quiet,
) -> Ranking:
    """Ranks what could run by the cost model, compiles the best few and ranks those again.

    best: how many that fit are compiled. model: the cost model that gives the times. tell: is
    called with a line that says how far the search is, at each mesh and several times a second
    while the compiler runs. After Ctrl-C, or a KeyboardInterrupt that `tell` raises, the candidates
    that are priced by then are ranked and returned; a compilation that runs at that moment goes on
    in a thread, which ends with the process.
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
    priced = price(cfg, cluster, meshes, model, tell)
    spent, tries, stopped = time.process_time() - began, Tries(), ""
    if priced.meshes < len(meshes):
        if not (priced.fits or priced.nearest):
            raise KeyboardInterrupt
        stopped = f"{priced.meshes} of {len(meshes)} legal meshes are priced, nothing is compiled"
    elif compiles and priced.fits and not aot.is_compiled_for(cluster):
        tries.ended = f"programs cannot be compiled for {cluster.card.name}"
    elif compiles and priced.fits:
        tries = compile_best(priced.fits, cluster, best, model, tell)
        if tries.is_stopped:
            fitting = sum(p.fits for p in tries.plans)
            stopped = f"all legal meshes are priced, {fitting} of {best} that fit are compiled"
    done = [p.cfg for p in tries.plans]
    likely = [one for one in priced.fits if tries.growth.fits(one, cluster)]
    others = (p for p in legal(likely, cluster, model) if p.cfg not in done)
    ranked = [
        dataclasses.replace(outlined, expected=tries.growth.expected(outlined))
        for outlined in itertools.islice(others, SHOWN)
    ]
    if not (ranked or tries.plans):
        ranked = list(itertools.islice(legal(priced.nearest, cluster, model), 1))
    return Ranking(
        tuple(tries.plans),
        tuple(ranked),
        len(meshes),
        len(priced.fits) + sum(priced.dropped.values()),
        priced.dropped,
        spent,
        len(priced.fits) - len(likely),
        tries.ended,
        stopped,
    )


def legal_meshes(cfg: Config, cluster: Cluster) -> list[tuple[MeshSpec, dict[str, int]]]:
    """Returns (mesh, its sizes) of every mesh on which some schedule can run.

    Tensor parallelism stays on a host. `node` cuts data parallelism only where that changes
    something: with hybrid sharding, and with --wire, whose exchange has two levels if the ranks on
    a host are one of them. A schedule only adds conditions to those of its mesh, so a mesh is legal
    if a step of one micro-batch is legal on it.
    """
    experts = divisors(cfg.model.moe.experts) or [1]
    contexts = [2**k for k in range(MOST_CONTEXT.bit_length())]
    meshes = []
    for pipe in divisors(cfg.model.layers):
        plainest = _schedule(cfg, "1f1b", 1, 1 if pipe > 1 else None)
        spanned = cluster.devices // (pipe * cluster.gpus_per_host)
        nodes = [1, spanned] if cfg.wire != "none" and spanned > 1 else [1]
        for node in divisors(cluster.hosts) if cfg.zero == "hybrid" else nodes:
            for expert in experts:
                for context in contexts:
                    for tensor in divisors(cluster.gpus_per_host):
                        mesh = MeshSpec(
                            pipe=pipe, node=node, expert=expert, context=context, tensor=tensor
                        )
                        try:
                            sizes = aot.sizes(dataclasses.replace(plainest, mesh=mesh), cluster)
                        except UserError:
                            continue
                        meshes.append((mesh, sizes))
    return meshes


def proposals(cfg: Config, mesh: MeshSpec, sizes: Mapping[str, int]) -> Iterator[Config]:
    """Yields the configuration with every schedule and rematerialisation for a legal mesh, and with
    every exchange of data parallelism.

    Micro-batches are the ways to cut a replica's rows; fewer than stages would leave most stages
    idle. Interleaved with one chunk is 1f1b and left out.
    """
    for one in exchanges(dataclasses.replace(cfg, mesh=mesh), sizes):
        yield from _schedules(one, sizes)


def exchanges(cfg: Config, sizes: Mapping[str, int]) -> Iterator[Config]:
    """Yields the configuration and, if it has a wire, the alternatives without one.

    A wire changes what a run computes, so a search proposes one only if the configuration has it.
    The alternatives show whether the wire pays: they cut the weights, or only the optimizer state.
    The axis `node` changes nothing in them, so they are proposed without it. A wire within a single
    rank sends nothing and is left out.
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
                        yield PipelineConfig(
                            schedule, microbatches, chunks, stash, gradients=gradients
                        )


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
    """Returns what the cost model says of every proposal, or of those before Ctrl-C.

    What a proposal leaves open, as --train.loss_chunks=0 does, is chosen first, as in a run.
    """
    capacity = cluster.card.memory_bytes - RESERVE_BYTES
    fits: list[Strategy] = []
    nearest: list[Strategy] = []
    dropped, least, done = Counter(), float("inf"), 0
    try:
        for done, (mesh, sizes) in enumerate(meshes):
            looked_at = len(fits) + sum(dropped.values())
            counts = f"{looked_at:,} candidates so far, {len(fits):,} fit"
            tell(f"pricing mesh {done + 1} of {len(meshes)}: {counts}")
            for proposal in proposals(cfg, mesh, sizes):
                candidate = resolved(proposal, sizes, cluster.card.memory_bytes)
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
    """Yields the outlines of the candidates that a run would accept, in their order.

    Of equally fast candidates on one mesh (such as gpipe and interleaved), only the first is
    yielded, which needs least memory.
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


class Growth:
    """The factors by which the memory of compiled programs exceeded its bound, for each kind.

    The bound (memory.bound, bytes a device) counts neither fragmentation nor all copies that XLA
    makes. Both differ with what a program keeps for its backward pass, which is its kind
    (`_keeps`).
    """

    def __init__(self):
        """Starts without any observation."""
        self._seen: dict[tuple, list[float]] = {}

    def learn(self, planned: Plan, bound: float) -> None:
        """Notes the peak of a compiled plan. bound: bytes a device, before it was compiled."""
        if planned.compiled:
            factor = planned.compiled.xla["peak"] / bound
            self._seen.setdefault(_keeps(planned.cfg), []).append(factor)

    def factor(self, cfg: Config, share: float = 1.0) -> float:
        """Returns what to multiply a bound by, from the least (share 0) to the most (share 1) that
        programs of its kind needed. If none of its kind is compiled: from 1 to the least of all."""
        every = itertools.chain.from_iterable(self._seen.values())
        seen = self._seen.get(_keeps(cfg)) or [1.0, max(1.0, min(every, default=1.0))]
        return min(seen) + share * (max(seen) - min(seen))

    def fits(self, one: Strategy, cluster: Cluster, share: float = 1.0) -> bool:
        """Whether a candidate fits if it needs more than its bound by this factor."""
        need = self.factor(one.cfg, share) * one.bound
        return need + RESERVE_BYTES <= cluster.card.memory_bytes

    def expected(self, outlined: Plan) -> float | None:
        """Returns the bytes a device that a plan is expected to need, by the largest factor of its
        kind. None: no program of its kind is compiled."""
        if _keeps(outlined.cfg) not in self._seen:
            return None
        return self.factor(outlined.cfg) * memory.bound(outlined.terms)


@dataclasses.dataclass
class Tries:
    """What was compiled. plans: those that fit come first, the fastest before the others. ended: as
    `Ranking.ended`.

    is_stopped: whether Ctrl-C ended the compilations.
    """

    plans: list[Plan] = dataclasses.field(default_factory=list)
    growth: Growth = dataclasses.field(default_factory=Growth)
    ended: str = ""
    is_stopped: bool = False


def compile_best(
    priced: Sequence[Strategy],
    cluster: Cluster,
    best: int,
    model: CostModel = Roofline(),
    tell: Tell = _quiet,
) -> Tries:
    """Compiles the fastest candidates until `best` of them fit, or MOST_MISFITS do not.

    A compiled program needs more memory than the bound of its candidate, by a factor that is
    similar in programs of one kind (Growth). The next candidate is the fastest whose bound times
    this factor fits. The factor is the least that was observed, until a program does not fit; with
    each one that does not, it moves towards the largest, which it reaches after half of
    MOST_MISFITS. If no candidate fits with it, the least factor decides. After two thirds of
    MOST_MISFITS programs that did not fit, the next candidate is the one with the least expected
    memory instead of the fastest, so that a search with many misfits still finds a plan that fits
    if there is one.

    priced: the candidates, the fastest first.
    """
    tries, began, left = Tries(), time.process_time(), list(priced)
    try:
        while (fitting := sum(p.fits for p in tries.plans)) < best:
            misfits = len(tries.plans) - fitting
            outlined = _next(left, tries.growth, cluster, misfits, model)
            if outlined is None:
                tries.ended = "no other candidate is expected to fit"
            elif misfits >= MOST_MISFITS:
                tries.ended = f"{misfits} programs did not fit"
            elif time.process_time() - began > MOST_CPU_S:
                tries.ended = f"compiling took more than {MOST_CPU_S:.0f} CPU seconds"
            if outlined is None or tries.ended:
                break
            state = f"compiling: {fitting} of {best} that fit are done, {len(tries.plans)} tried"
            tell(state)
            planned = _in_thread(
                functools.partial(aot.plan, outlined.cfg, cluster, model), tell, state
            )
            tries.plans.append(planned)
            tries.growth.learn(planned, memory.bound(outlined.terms))
    except KeyboardInterrupt:
        tries.is_stopped = True
    tries.plans.sort(key=lambda p: (not p.fits, p.estimate.step_s))
    return tries


def _next(
    left: list[Strategy], growth: Growth, cluster: Cluster, misfits: int, model: CostModel
) -> Plan | None:
    """Returns the outline of the candidate to compile next, and takes it and its equals from
    `left`; None: all that are left need too much by the least growth that was seen."""
    left[:] = [one for one in left if growth.fits(one, cluster, 0.0)]
    share = min(1.0, 2 * misfits / MOST_MISFITS)
    worth = [one for one in left if growth.fits(one, cluster, share)] or list(left)
    if misfits >= MOST_MISFITS * 2 // 3:
        worth = sorted(left, key=lambda one: growth.factor(one.cfg, share) * one.bound)
    for one in worth:
        outlined = next(legal([one], cluster, model), None)
        if outlined is None:
            left.remove(one)
            continue
        equals = (one.step_s, one.cfg.mesh)  # gpipe beside interleaved: the first needs least
        left[:] = [other for other in left if (other.step_s, other.cfg.mesh) != equals]
        return outlined
    return None


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
    """The kind of a program: what decides how far its memory lies above its bound."""
    staged = cfg.mesh.pipe > 1
    return staged, staged and (cfg.pipeline.stash, cfg.pipeline.gradients), cfg.train.remat


def _schedule(cfg: Config, schedule: Schedule, chunks: int, microbatches: int | None) -> Config:
    """The configuration with a pipeline's order, and a step in one piece."""
    return dataclasses.replace(
        cfg,
        pipeline=PipelineConfig(schedule, microbatches, chunks),
        train=dataclasses.replace(cfg.train, accumulate=1),
    )
