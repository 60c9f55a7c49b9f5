"""Plans a run: compiles its train step for a cluster without having one, and estimates the step.

`plan(cfg, cluster)` builds the step that training runs, compiles it for the cluster's GPUs without
a driver, and reads memory, collectives and matmuls from the scheduled program. It returns XLA's
figures and the terms of the cost model. Times are ESTIMATES. So a laptop can compare the
configurations that MegaScale (section 3) tuned by hand on 12,288 GPUs.
"""

import dataclasses
import math
import time
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from absl import logging

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, Cluster
from megajax.cost import hlo, memory, traffic
from megajax.cost.base import CostModel, Phase
from megajax.cost.estimate import Estimate, estimate
from megajax.cost.hlo import Module
from megajax.cost.roofline import Roofline
from megajax.cost.step import StepShape
from megajax.parallel.pipeline import branches
from megajax.training.config import Config
from megajax.training.shape import resolved, step_shape
from megajax.training.step import make_train_step
from pallas_kernels import aot
from pallas_kernels.hopper.cards import CHIPS

# Held by NCCL's buffers, the CUDA context and fragmentation (assumed until measured).
RESERVE_BYTES = 2.5e9
# Nothing runs, so kernels need no optimising; schedule and memory stay as they are (measured).
QUICK = {"xla_backend_optimization_level": 0}
INSTALL = "uv sync --extra aot"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The program of one step for one cluster.

    xla: {'arguments', 'temporary', 'peak': bytes a device}. state: exact bytes a device of
    parameters and optimizer. matmul_flops: executed by one device; in a pipeline, by one that had
    work in all slots. cpu_s: CPU seconds it took.
    attention: the kernel that it was compiled with.
    """

    text: str
    xla: dict[str, float]
    state: dict[str, int]
    collectives: tuple[hlo.Collective, ...]
    matmul_flops: int
    cpu_s: float
    attention: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The estimates of a step on a cluster.

    terms: {term: bytes a device}, a lower bound. compiled: None if the terms alone do not fit.
    misfit: the largest term of a step that does not fit; None: it fits, or nothing is compiled and
    the bound would fit. expected: for a step that was not compiled, bytes a device that compiled
    programs of its kind let expect; None: there are no such programs.
    """

    cfg: Config
    cluster: Cluster
    step: StepShape
    terms: dict[str, float]
    estimate: Estimate
    compiled: Compiled | None
    warnings: tuple[str, ...]
    misfit: str | None
    expected: float | None = None

    @property
    def needed(self) -> float:
        """Bytes a device that the step needs, with the reserve: XLA's peak where it is known, else
        what is expected, else at least the bound."""
        if self.compiled:
            return self.compiled.xla["peak"] + RESERVE_BYTES
        return (self.expected or memory.bound(self.terms)) + RESERVE_BYTES

    @property
    def fits(self) -> bool:
        """Whether a compiled program fits. Without one nobody knows that a step does."""
        return self.compiled is not None and self.misfit is None


def sizes(cfg: Config, cluster: Cluster) -> dict[str, int]:
    """Returns {mesh axis: size} on this cluster, checked.

    Raises: UserError when the configuration cannot run there or leaves devices idle.
    """
    axes = cfg.mesh.sizes(cluster.devices)
    used = math.prod(axes.values())
    if used != cluster.devices:
        raise UserError(
            f"mesh uses {used} of the {cluster.devices} devices of {cluster.name}; leave out "
            f"--mesh.data, it takes the devices that remain (--mesh.data, --cluster)"
        )
    cfg.check(axes)
    return axes


def compile_step(cfg: Config, cluster: Cluster, *, fused: bool = False) -> Compiled:
    """Compiles the step of a configuration for a cluster, without devices.

    cuDNN's attention cannot be compiled without its library and a driver. In its place stands
    XLA's, or our Hopper kernel's where `fused` asks for it and it can run: it moves about the bytes
    of cuDNN's and makes as many products.
    Raises: UserError when the compiler is not installed.
    """
    attention = "hopper" if fused and _is_fused(cfg) else "xla"
    if attention == "hopper":
        try:
            return _compile_step(cfg, cluster, attention)
        except NotImplementedError as error:
            logging.info("attention is XLA's: %s", error)
    return _compile_step(cfg, cluster, "xla")


def is_compiled_for(cluster: Cluster) -> bool:
    """Whether the compiler knows the GPUs of a cluster."""
    return cluster.card.name.lower() in CHIPS


def compiled_in_place(cfg: Config, cluster: Cluster) -> Cluster:
    """Returns the cluster for which to compile a step with a fused kernel of attention: the same
    one, or of H100s where our kernel is not compiled for its GPUs. XLA's attention, which writes
    all scores to memory, would take several times the time of the cuDNN kernel that runs there.
    """
    if cluster.card.capability == CARDS["H100"].capability or not _is_fused(cfg):
        return cluster
    return dataclasses.replace(cluster, card=CARDS["H100"])


def _is_fused(cfg: Config) -> bool:
    """Whether a run's attention is a fused kernel that ours can stand for."""
    half = jnp.dtype(cfg.train.dtype).itemsize == 2
    cut = cfg.mesh.context != 1 and cfg.context.kind != "ulysses"
    return cfg.train.attention != "xla" and half and not cut


def _compile_step(cfg: Config, cluster: Cluster, attention: Literal["hopper", "xla"]) -> Compiled:
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, attention=attention))
    began = time.process_time()
    try:
        kind = cluster.card.name.lower()
        if not is_compiled_for(cluster):
            raise UserError(
                f"cluster={cluster.name}: steps are compiled for {', '.join(CHIPS)} only; "
                "--workload=prefill, decode or serve needs no compiler (--cluster)"
            )
        mesh = cfg.mesh.build(aot.devices(cluster.hosts, cluster.gpus_per_host, kind))
        step = make_train_step(cfg, mesh)
        lowered = step.step.lower(  # type: ignore[missing-attribute]
            step.abstract_state, step.abstract_batch
        )
        program = aot.compile(lowered, QUICK)
    except NotImplementedError as error:
        if attention == "hopper":
            raise  # the kernel's own reason, or the compiler is missing and XLA's fails as well
        raise UserError(f"planning needs the CUDA compiler and no GPU: {INSTALL}") from error
    except jax.errors.JaxRuntimeError as error:
        if any(tool in str(error) for tool in ("ptxas", "libdevice", "nvlink", "libnvvm")):
            first = str(error).splitlines()[0]
            raise UserError(f"the CUDA compiler is incomplete: {INSTALL} ({first})") from error
        raise
    spent = time.process_time() - began
    text, used = program.as_text(), program.memory_analysis()
    xla = {
        "arguments": float(used.argument_size_in_bytes),
        "temporary": float(used.temp_size_in_bytes),
        "peak": float(used.peak_memory_in_bytes),
    }
    state = step.abstract_state
    held = Roofline().memory(
        {
            "parameters": jax.tree.leaves(state.params),
            "optimizer": jax.tree.leaves(state.opt),
        }
    )
    # The share of live rows if experts are balanced: each device of the axis has room for the rows
    # of all tokens.
    live = 1 / mesh.shape["expert"]
    module = Module(text, live)
    collectives = _with_branches(
        hlo.collectives(text, dict(mesh.shape), live), cfg, mesh.shape["pipe"]
    )
    return Compiled(text, xla, held, collectives, module.flops_of(module.entry), spent, attention)


def _with_branches(
    collectives: Iterable[hlo.Collective], cfg: Config, stages: int
) -> tuple[hlo.Collective, ...]:
    """Multiplies the collectives in a branch of a pipeline by how often its table takes the branch.

    A slot that idle stages skip is a branch, too. It counts in every tick, because some stage takes
    it and the others wait.
    """
    if stages == 1:
        return tuple(collectives)
    taken = branches(cfg.pipeline.route(stages))

    def counted(c: hlo.Collective) -> hlo.Collective:
        for (scope, ticks), times in taken.items():
            if scope in c.op_name and c.loops and c.loops[0] == ticks:
                return dataclasses.replace(c, taken=times * math.prod(c.loops[1:]))
        return c

    return tuple(map(counted, collectives))


def outline(
    cfg: Config,
    cluster: Cluster,
    fused_attention: bool = False,
    phase: Phase = "train",
    model: CostModel = Roofline(),
) -> Plan:
    """Returns the plan that the cost model alone makes: no compiler, milliseconds.

    Nothing is assumed to overlap, which is what a schedule does at worst, save for what a
    pipeline's program makes overlap: chunks' weights and gradients. phase: 'prefill' of the batch's
    rows, or 'decode' of one token for each with a cache of seq_len tokens, instead of training.
    model: of the times.
    Raises: UserError when the configuration cannot run there.
    """
    axes = sizes(cfg, cluster)
    cfg = resolved(cfg, axes, cluster.card.memory_bytes)
    step = step_shape(cfg, axes, fused_attention, phase)
    terms = memory.terms(step)
    guess = estimate(step, cluster, traffic.transfers(step), model)
    misfit = memory.misfit(terms, cluster.card.memory_bytes - RESERVE_BYTES)
    return Plan(cfg, cluster, step, terms, guess, None, (), misfit)


def plan(cfg: Config, cluster: Cluster, model: CostModel = Roofline()) -> Plan:
    """Returns the plan of the compiled step; only outlined if it cannot fit anyway."""
    outlined = outline(cfg, cluster, model=model)
    if outlined.misfit:
        return outlined
    cfg = outlined.cfg
    compiled = compile_step(cfg, cluster)
    step, terms = outlined.step, outlined.terms | compiled.state
    pod = cluster.hosts_per_pod * cluster.gpus_per_host
    planned = Plan(
        cfg,
        cluster,
        step,
        terms,
        estimate(step, cluster, compiled.collectives, model),
        compiled,
        tuple(hlo.find(compiled.collectives, step.zero_axes, pod)),
        None,
    )
    if planned.needed <= cluster.card.memory_bytes:
        return planned
    return dataclasses.replace(planned, misfit=max(terms, key=lambda term: terms[term]))
