"""The run of a training command: from flags to the last checkpoint, whatever is trained.

`pretrain` and `finetune` are this run with another `Kind`: its presets, what it reads and what it
measures. Devices, the run's folder and lock, checkpoints, resume, records, supervision, signals and
the report are the same for all.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from megajax.checkpoint.lease import Attempt
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.mesh import Supervision
from megajax.data.loader import Loader
from megajax.data.tokenizer import Tokenizer
from megajax.monitor import faults, records
from megajax.monitor.console import Console, Phases
from megajax.monitor.faults import Injector
from megajax.monitor.meter import Meter
from megajax.monitor.records import Recorder, keep_standard_streams
from megajax.monitor.timers import Timers
from megajax.systems.minder.in_run import InRun, watched_timers
from megajax.systems.minder.run import NAME
from megajax.systems.pruning import Pruner
from megajax.training import report, resume, shape
from megajax.training.loop import Batches, Hook, Pulse, Run, train
from megajax.training.presets import TUNED, start_name
from megajax.training.report import write_report
from megajax.training.run_dir import RunDir, command_line, open_run, run_path
from megajax.training.run_lock import lock_run
from megajax.training.shape import is_open, resolved, with_segments
from megajax.training.step import TrainStep, make_train_step


class Measurement(Hook, Protocol):
    """The evaluations of a run. last_sample: the newest text that the model wrote, if it writes."""

    last_sample: str | None


class Reading(Protocol):
    """What a run reads. tokenizer: of its texts; None: it reads none. labels: the names of a
    classifier's classes in the order of their numbers; empty: it trains no classifier. rows: what
    `row_batches` makes batches of. identity: what must not change under a data position."""

    tokenizer: Tokenizer | None
    labels: tuple[str, ...]
    rows: Any
    identity: dict[str, Any]

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> Measurement:
        """Returns the evaluations of a run on what it reads."""
        ...


def row_batches(cfg: Any, reading: Reading, step: TrainStep, position: int) -> Loader:
    """Returns the batches of a run that reads rows."""
    return Loader(
        reading.rows, step.abstract_batch, position, cfg.data.prefetch, step.storage.tokens
    )


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of runs.

    name: of the experiment, the folder of its runs. presets: a run that starts from given weights
    is shown by how it differs from the first. take: as config.from_flags takes it. open(cfg,
    console, run_dir): what a run reads, which it describes on the console; run_dir: of the run.
    build(cfg, mesh): the step, one compiled program or several (loop.Step). batches(cfg, reading,
    step, position): what the loop takes its batches from, from a position on. show(console, cfg,
    step, mesh): says what is trained.
    """

    name: str
    presets: Mapping[str, Callable[[], Any]]
    take: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any]
    open: Callable[[Any, Console, RunDir], Reading]
    build: Callable[[Any, Mesh], Any] = make_train_step
    batches: Callable[[Any, Reading, Any, int], Batches] = row_batches
    show: Callable[[Console, Any, Any, Mesh], None] = report.show_model


@dataclasses.dataclass
class _Start:
    """A run whose configuration, devices and folder are settled."""

    cfg: Any
    preset: Any
    name: str
    mesh: Mesh
    run_dir: RunDir
    console: Console
    attempt: Attempt | None
    supervision: Supervision
    timers: Timers
    phases: Phases
    progress: Path | None


def run(kind: Kind) -> int:
    """Runs a training job by its flags. Returns the exit code.

    What cannot be written beside the checkpoints (metrics, samples, the report, what is printed)
    changes no exit code.
    """
    keep_standard_streams(pipes=False)
    begun = _begin(kind)
    cfg, console, phases, timers = begun.cfg, begun.console, begun.phases, begun.timers
    reading = kind.open(cfg, console, begun.run_dir)  # 4 data
    phases.done("data", console, "data ready")
    built = cfg  # 5 model and step
    has_slots = begun.mesh.devices.flat[0].platform != "cpu" and kind.build is make_train_step
    if has_slots:  # cuDNN's attention has slots for documents
        built = with_segments(cfg, reading.rows, dict(begun.mesh.shape))
    if is_open(built):
        built = resolved(built, dict(begun.mesh.shape), mesh_.memory_bytes(begun.mesh))
    for name, _, value in config.diff(built, cfg):
        console.say(f"{name}: {value}, chosen for this data and GPU")
    train_step = kind.build(built, begun.mesh)
    kind.show(console, cfg, train_step, begun.mesh)
    job, measurement = _assemble(kind, begun, reading, train_step)
    try:
        stop = train(job)  # 8 the loop
    except BaseException as error:
        timers.leave(error)  # at once: a save that is under way is waited for after this
        raise
    finally:
        job.recorder.close()
    if stop == "signal":
        timers.enter("told", int(job.state.step))
        job.checkpoints.close()
        console.say(f"stopped after step {int(job.state.step)}; saved. Continue with:")
        console.say(f"  {command_line()}")
        return 128 + signal.SIGINT if job.stopped_by == signal.SIGINT else cfg.told_code
    timers.enter("end", int(job.state.step))
    if jax.process_index() == 0:  # 9 what is left to look at
        facts = report.facts(cfg, begun.mesh, train_step, begun.name, begun.preset)
        sample, labels = measurement.last_sample, reading.labels
        facts |= {"command": command_line()}
        figures = write_report(begun.run_dir.path, facts, sample, console.say, labels)
        report.show_end(console, figures, begun.run_dir, sample, labels)
    job.checkpoints.close()
    return 0


def _begin(kind: Kind) -> _Start:
    """Settles what is run, on which devices, in which folder."""
    phases = Phases(time.perf_counter())
    supervision = mesh_.find_supervisor()
    timers = Timers.of_process(supervision.progress)
    cfg, preset = config.from_flags(kind.presets, kind.take)  # 1 configuration
    progress = None  # of the thread that watches, where no driver does
    if cfg.detector == NAME and supervision.progress is None:
        timers, progress = watched_timers()
    mesh_.start(cfg.emulate, cfg.emulate_without_gpu)  # 2 devices and mesh
    cfg = dataclasses.replace(cfg, mesh=mesh_.fit(cfg.mesh, preset.mesh, jax.device_count()))
    cfg.check(cfg.mesh.sizes(jax.device_count()))
    mesh = cfg.mesh.build()
    mesh_.cache_programs(cfg.cache_dir)
    name = start_name(cfg)
    shown = next(iter(kind.presets.values()))() if name == TUNED else preset  # all of the recipe
    named = None if name == TUNED else preset  # the model of a folder differs in every member
    path = run_path(cfg, kind.name, name, named)
    shape.check(cfg, jax.devices()[0], path)
    attempt = Attempt(supervision.run, supervision.attempt) if supervision.run else None
    lock_run(path, attempt=attempt)  # 3 the run's folder, ours alone
    run_dir = open_run(cfg, kind.name, name, named)
    # One process of a job speaks and writes.
    console = Console(cfg.train.steps, cfg.log.every, quiet=jax.process_index() != 0)
    report.show_start(console, name, cfg, shown, mesh, run_dir)
    phases.done("devices", console, f"devices of {jax.process_count()} hosts ready")
    return _Start(
        cfg, preset, name, mesh, run_dir, console, attempt, supervision, timers, phases, progress
    )


def _assemble(
    kind: Kind, begun: _Start, reading: Reading, train_step: TrainStep
) -> tuple[Run, Measurement]:
    """Finds the first state and puts together what the loop works on."""
    cfg, console, supervision = begun.cfg, begun.console, begun.supervision
    kept, run_dir = cfg.checkpoint, begun.run_dir
    checkpoints = CheckpointManager(
        run_dir.checkpoints,
        keep=kept.keep,
        attempt=begun.attempt,
        verify_saves=kept.verify_saves,
        key_file=kept.key_file,
    )
    memory = MemoryTier.of_process(supervision.memory, supervision.attempt)
    # 6 own steps > init_from > new
    start = resume.begin(cfg, train_step, checkpoints, reading.identity, memory)
    begun.phases.done("state", console, start.how)
    for line in resume.changes(cfg, run_dir.former, int(start.state.step)):
        console.say(line)
    if cfg.checkpoint.memory_every_steps and memory is None:
        console.say("no copies in memory: it takes scripts/supervise.py to keep them")
    if jax.process_index() == 0:
        run_dir.begin(cfg, reading.tokenizer, reading.labels)
    sinks = [
        *report.sinks(cfg, run_dir, console),
        console,
        *records.of_process(supervision.progress),
    ]
    if begun.progress is not None:
        args = cfg.minder, cfg.prometheus, begun.progress, run_dir.path
        sinks.append(InRun(*args, console.say))
    recorder = Recorder(sinks, rank := jax.process_index(), console.say)
    sent = {name: float(nbytes) for name, (nbytes, _) in report.wire_bytes(train_step).items()}
    recorder.emit(int(start.state.step), begun.phases.seconds | sent)
    measurement = reading.measure(train_step, recorder, console, run_dir)  # 7 beside training
    hooks: list[Hook] = [measurement]
    if cfg.prune.sparsity:
        hooks.append(
            Pruner(
                cfg.prune,
                train_step.parts.axes,
                begun.mesh,
                train_step.storage.natural,
                train_step.storage.arranged,
                recorder.emit,
                train_step.init_exchange,
            )
        )
    return Run(
        cfg=cfg,
        train_step=train_step,
        state=start.state,
        loader=kind.batches(cfg, reading, train_step, start.rows),
        checkpoints=checkpoints,
        profile_dir=run_dir.profile,
        recorder=recorder,
        console=console,
        meter=Meter(report.work(cfg, train_step.task, begun.mesh), cfg.train.steps),
        identity=reading.identity,
        hooks=hooks,
        timers=begun.timers,
        faults=Injector(faults.parse(cfg.fault), rank, supervision.attempt, recorder.emit),
        memory=memory,
        pulse=_pulse(cfg),
    ), measurement


def _pulse(cfg: Any) -> Pulse | None:
    """Returns what times the devices of this process, where a detector reads it."""
    every = cfg.minder.pulse_every if cfg.detector == NAME else 0
    return Pulse(every) if every else None
