"""The training loop: data, step, records, evaluation, checkpoints, and every way to stop.

The host stays one step ahead of the devices: it reads the numbers of step n after it has
dispatched step n + 1, so logging costs no device time. Before a save or an evaluation it catches
up. Checkpoints hang off the loop, never inside the step.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.core import mesh
from megajax.core.errors import TEMPORARY, UserError
from megajax.core.tree import Tree, named_leaves
from megajax.monitor.console import Console
from megajax.monitor.faults import Injector
from megajax.monitor.meter import Meter
from megajax.monitor.records import Recorder
from megajax.monitor.timers import LaunchSkew, Timers
from megajax.training.config import JobConfig
from megajax.training.interrupts import Interrupts, QuietGarbage
from megajax.training.resume import KEPT
from megajax.training.step import StorageOrder
from megajax.training.task import TrainState

# ---- profiler
#
# Records chosen steps with jax.profiler.


class Profiler:
    """Starts before the first chosen step and stops after the last; a resumed run may miss both."""

    def __init__(self, span: tuple[int, int] | None, folder: Path):
        """span: first and last step; None: never."""
        self._span, self._folder, self._active = span, folder, False

    def before(self, step: int) -> None:
        """Starts recording when its span begins with this step."""
        if self._span is not None and self._span[0] == step:
            jax.profiler.start_trace(str(self._folder))
            self._active = True

    def ends(self, step: int) -> bool:
        """Tells whether this step is the last to record, so that the loop waits for it."""
        return self._active and self._span is not None and step >= self._span[1]

    def after(self, step: int) -> None:
        """Stops recording when its span ends with this step."""
        if self.ends(step):
            self._active = False
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:  # of XLA: a RuntimeError
                logging.warning("The profile in %s cannot be written: %s", self._folder, error)


# ---- pulse
#
# How long this process's device needs for a fixed product, now and then, between two steps.
#
# All ranks wait for the slowest in collectives, and jax has no timers of single kernels that are
# always on (MegaScale section 5.1 has CUDA events), so that a device that is slow shows in nobody's
# step in particular. The product is put behind a step on the device's queue and takes nothing from
# other ranks. The rule `slow` compares its times (monitor/slow_rank.py).


# Rows of the square matrices, and products in a row: about 2 ms of an H100, 20 ms of a CPU's core.
SIZES = {"gpu": (4096, 12), "cpu": (256, 8)}


class Pulse:
    """`launch` behind a step's dispatch, `finish` once that step is done."""

    def __init__(self, every: int, device: jax.Device | None = None):
        """every: steps from one to the next. device: None: the first of this process."""
        self._every, self._device = every, device or jax.local_devices()[0]
        size, self._times = SIZES.get(self._device.platform, SIZES["cpu"])
        dtype = jnp.bfloat16 if self._device.platform == "gpu" else jnp.float32
        x = jnp.full((size, size), 1 / size, dtype)
        self._x = jax.device_put(x, self._device)
        self._run = jax.jit(self._product)
        self._pending: tuple[int, jax.Array, jax.Array] | None = None
        self._run(self._x, jax.device_put(jnp.float32(0), self._device)).block_until_ready()

    def _product(self, x: jax.Array, after: jax.Array) -> jax.Array:
        y = x + (0 * after).astype(x.dtype)
        for _ in range(self._times):
            y = x @ y
        return y[0, 0]

    def launch(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Puts a pulse behind a step if one is due. metrics: those of the step; they are not waited
        for."""
        if step % self._every or "loss" not in metrics:
            return
        after = metrics["loss"].addressable_data(0)
        if after.devices() == {self._device}:
            self._pending = step, after, self._run(self._x, after.astype(jnp.float32))

    def finish(self, step: int, wait: Any = jax.block_until_ready) -> dict[str, float]:
        """Waits for a step that `launch` saw, then for its pulse: returns {'pulse_s': seconds}.

        Nothing where none is due, or where the step was done before anybody looked, so that nobody
        knows when its pulse began.
        """
        if self._pending is None or self._pending[0] != step:
            return {}
        _, after, pulse = self._pending
        self._pending = None
        if after.is_ready():  # type: ignore[attr-defined]
            return {}
        wait(after)
        began = time.perf_counter()
        wait(pulse)
        return {"pulse_s": time.perf_counter() - began}


# ---- loop


Stop = Literal["done", "signal"]


class NotFinite(UserError):
    """Loss or gradient is not finite; the state before it is kept, and nothing was saved of it."""


class ReplicasDiffer(UserError):
    """Devices that should hold the same bits do not; nothing was saved of it. A later start goes on
    from the last step that was saved, perhaps on other devices."""

    exit_code = TEMPORARY


class Hook(Protocol):
    """Work between two steps: an evaluation, pruning, or work of a caller."""

    def due(self, finished: int, last: bool) -> bool:
        """Tells whether the hook has work after so many finished steps. last: whether it was the
        last step of the run."""
        ...

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Called once, before the first step of this process; returns the state to begin with."""
        ...

    def __call__(self, state: TrainState, finished: int) -> TrainState:
        """Does the work that is due. Returns the state with which the next step begins.

        It may donate `state`. A checkpoint of the same step was written before.
        """
        ...


class Step(Protocol):
    """The members of a step that the loop uses. A `TrainStep` is one, a `JointStep` another.

    step(state, batch) -> (state, metrics), of which `loss` and `grad_norm` decide whether it is
    finite; every scalar is recorded. state: any pytree with `step`, the number of finished steps.
    leaf_norms among the metrics and leaf_names name a bad gradient. storage: what a checkpoint says
    of the state. agree(state): whether replicas hold the same bits. A step with a member
    `is_synchronous` that is true returns when its work is done, and is recorded at once.
    """

    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]: ...  # noqa: D102

    @property
    def storage(self) -> StorageOrder: ...  # noqa: D102

    @property
    def leaf_names(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def agree(self) -> Callable[[Any], Any]: ...  # noqa: D102


class Batches(Protocol):
    """Endless batches. position: the number of rows consumed so far, which checkpoints store.
    rows_per_batch: the rows that one batch consumes."""

    position: int
    rows_per_batch: int

    def __next__(self) -> Any:
        """Returns the next batch."""
        ...


@dataclasses.dataclass
class Run:
    """The objects of one run. identity: the facts about the data that a resumed run must find
    unchanged. hooks: called in this order. check_program: of a job of several processes, refuses
    the compiled step before it runs."""

    cfg: JobConfig
    train_step: Step
    state: TrainState
    loader: Batches
    checkpoints: CheckpointManager
    profile_dir: Path
    recorder: Recorder
    console: Console
    meter: Meter
    identity: dict[str, Any]
    hooks: Sequence[Hook] = ()
    timers: Timers = dataclasses.field(default_factory=Timers)
    faults: Injector = dataclasses.field(default_factory=Injector)
    skew: LaunchSkew = dataclasses.field(default_factory=LaunchSkew.of_job)
    memory: MemoryTier | None = None
    pulse: Pulse | None = None
    stopped_by: int | None = None
    check_program: Callable[[Any], None] = lambda compiled: None


def data_state(run: Run) -> dict[str, Any]:
    """Returns the description of the data for a checkpoint. Its position is one global count of
    rows."""
    exchange = dict(run.train_step.storage.exchange)
    named = {KEPT: exchange} if exchange else {}
    return {"rows": run.loader.position} | named | run.identity


def train(run: Run) -> Stop:
    """Trains to the last step, or until a signal. The state is saved in both cases.

    Raises: NotFinite naming the step and the first bad leaf; SaveError when the last save failed.
    """
    cfg, timers = run.cfg, run.timers
    first = int(run.state.step) + 1
    profiler = Profiler(cfg.profile.span, run.profile_dir)
    with Interrupts() as interrupts, QuietGarbage(cfg.log.gc_every) as garbage:
        pending: tuple[int, dict] | None = None
        for hook in run.hooks:
            run.state = hook.start(run.state, first - 1)
        run.meter.restart()
        for step in range(first, cfg.train.steps + 1):
            profiler.before(step)
            timers.enter("data", step)
            batch = next(run.loader)
            run.state = run.faults.strike(step, run.state)
            run.meter.waited(timers.enter("prepare", step))
            run.skew.launch(step)
            timers.enter("launch" if step > first else "compile", step)
            if step == first and jax.process_count() > 1:
                # The program is kept for the call below.
                run.check_program(run.train_step.step.lower(run.state, batch).compile())  # type: ignore
                mesh.meet(f"before step {first}")
            run.state, metrics = run.train_step.step(run.state, batch)
            if run.pulse is not None:
                run.pulse.launch(step, metrics)
            # The first step's end is waited for in the second: groups of devices meet in it.
            timers.enter("wait" if step > first + 1 else "compile", step)
            if pending is not None:
                _finish(run, *pending)
            pending = (step, metrics)
            if getattr(run.train_step, "is_synchronous", False):
                _finish(run, *pending)
                pending = None
            stop = interrupts.asked(step)
            last = step == cfg.train.steps
            saves = stop or last or _due(step, cfg.checkpoint.every)
            copies = run.memory is not None and _due(step, cfg.checkpoint.memory_every_steps)
            due = [h for h in run.hooks if h.due(step, last)] if last or not stop else []
            compares = _compares(cfg, step, saves)
            if saves or copies or due or compares or profiler.ends(step):
                if pending is not None:
                    _finish(run, *pending)  # catch up, and never save or measure what is not finite
                pending = None
            profiler.after(step)
            if compares:
                check_replicas(run, step)
            if saves or copies:
                timers.enter("save", step)
                _keep(run, step, saves, copies)
            if due:
                timers.enter("evaluate", step)
                run.faults.delay("evaluate", step)
            for hook in due:
                run.state = hook(run.state, step)
            if saves or copies or due:
                run.meter.restart()
            garbage.after(step)
            if stop:
                run.stopped_by = interrupts.signal
                return "signal"
    return "done"


def _compares(cfg: JobConfig, step: int, saves: bool) -> bool:
    """Tells whether replicas are compared after a step: what is saved must be what all hold."""
    every = cfg.exchange.check_every if cfg.wire != "none" else 0
    return every > 0 and (saves or step % every == 0)


def check_replicas(run: Run, step: int) -> None:
    """Compares what several devices hold of the same part of the state. One small collective.

    Raises: ReplicasDiffer naming the step and the first leaf.
    """
    same = named_leaves(run.train_step.agree(run.state))
    differ = [name for name, is_same in same if not bool(is_same)]
    if not differ:
        return
    run.checkpoints.wait()
    good = run.checkpoints.latest()
    last = f"last checkpoint: step {good}" if good is not None else "no checkpoint yet"
    raise ReplicasDiffer(
        f"after step {step} the devices that should hold the same bits of {differ[0]} do not "
        f"({len(differ)} of {len(same)} leaves differ); {last} in {run.checkpoints.folder}, and "
        "nothing was saved since. A device or a link gives wrong results: start the command "
        "again, on other machines if it comes back; 0 does not look (--wire.check_every)"
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _keep(run: Run, step: int, saves: bool, copies: bool) -> None:
    """Saves the state to storage, or copies it into memory, or both."""
    run.faults.delay("save", step)
    rows = run.train_step.storage.layers
    if copies and run.memory is not None:
        run.memory.put(step, run.state, data_state(run), rows)
    if saves:
        run.checkpoints.save(step, run.state, data_state=data_state(run), order=rows)
        if refuted := run.checkpoints.refuted():  # an error in the log too, when it was found
            run.recorder.emit(step, {"checkpoint_refuted": refuted[-1]})


def _finish(run: Run, step: int, metrics: dict[str, jax.Array]) -> None:
    """Waits for a step and records it."""
    pulse = {} if run.pulse is None else run.pulse.finish(step)
    values = {k: np.asarray(v) for k, v in metrics.items()}
    loss, norm = float(values["loss"]), float(values["grad_norm"])
    row = {k: v.item() for k, v in values.items() if v.ndim == 0}
    # Steps whose sizes differ, as iterations of reinforcement learning, say how much they counted.
    units = int(row.pop("units", run.meter.work.units_per_step))
    row[run.meter.work.unit] = units
    run.timers.loss = loss
    row |= run.timers.drain() | pulse
    run.recorder.emit(step, row | run.meter.finish(step, loss, units) | run.skew.finish(step))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        bad = bad_leaves(run.state)
        run.timers.has_bad_state = bool(bad)  # who does not say so has it from another
        raise NotFinite(_bad_step(run, step, loss, norm, values["leaf_norms"], bad))


def bad_leaves(state: Tree) -> list[str]:
    """Returns the leaves of which this process's own devices hold something not finite.

    A step that is not finite keeps the state before it, so a bad leaf was bad before that step. A
    bad leaf stays on the devices that hold it, although every process computes a loss from it that
    is not finite.
    """

    def is_bad(x: jax.Array) -> bool:
        floats = jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
        return floats and not all(np.isfinite(s.data).all() for s in x.addressable_shards)

    return [name for name, x in named_leaves(state) if is_bad(x)]


def _bad_step(
    run: Run,
    step: int,
    loss: float,
    norm: float,
    leaf_norms: np.ndarray,
    bad_state: Sequence[str],
) -> str:
    bad = [
        n for n, x in zip(run.train_step.leaf_names, leaf_norms, strict=True) if not np.isfinite(x)
    ]
    holder = (
        f"; process {jax.process_index()} holds {bad_state[0]} that is not finite"
        if bad_state
        else ""
    )
    leaf = f"the gradient of each leaf is finite, the norm of all is {norm}"
    if bad:
        leaf = f"first non-finite gradient: {bad[0]} ({len(bad)} of {len(leaf_norms)} leaves)"
    rows = run.loader.rows_per_batch
    run.checkpoints.wait()
    good = run.checkpoints.latest()
    last = f"last good checkpoint: step {good}" if good is not None else "no checkpoint yet"
    return (
        f"step {step}: loss is {loss}; {leaf}{holder}; {last} "
        f"in {run.checkpoints.folder}; the batch held rows {(step - 1) * rows}..{step * rows - 1}. "
        "Lower --optim.lr, or look at the data"
    )
