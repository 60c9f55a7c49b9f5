"""A training command: from flags to the last checkpoint, whatever is trained.

`run(kind)` is a whole command in its order. experiments/finetune.py is `run` of a `Kind`;
experiments/pretrain.py writes the same steps out for one decoder. Devices, the run's folder and its
lock, checkpoints, resume, records, supervision, signals and the report are a `Job`'s, the same for
every kind.
"""

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from megajax.checkpoint.lease import Attempt
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.core import config, script
from megajax.core import mesh as mesh_
from megajax.data.loader import Loader
from megajax.data.tokenizer import Tokenizer
from megajax.monitor import faults, records
from megajax.monitor.console import Console, Phases
from megajax.monitor.faults import Injector
from megajax.monitor.meter import Meter
from megajax.monitor.records import Recorder, Sink, keep_standard_streams
from megajax.monitor.timers import Timers
from megajax.training import precision, report, resume, shape
from megajax.training.loop import Batches, Hook, Pulse, Run, train
from megajax.training.presets import TUNED, start_name
from megajax.training.report import write_report
from megajax.training.run_dir import RunDir, open_run, run_path
from megajax.training.run_lock import lock_run
from megajax.training.shape import is_open, resolved, with_segments
from megajax.training.shares import rows_of_ranks
from megajax.training.step import TrainStep, make_train_step

MINDER = "minder"  # the value of --detector


class Measurement(Hook, Protocol):
    """The evaluations of a run. last_sample: the newest text that the model wrote, if it writes.

    One whose figures are no losses has `scores` too: those of its last evaluation, by name.
    """

    last_sample: str | None


class Reading(Protocol):
    """The data of a run.

    tokenizer: of its texts; None: it reads none. labels: the names of a classifier's classes in the
    order of their numbers; empty: the run trains no classifier. rows: what `row_batches` makes
    batches of. identity: the facts about the data that a resumed run must find unchanged. One that
    computes something with the first state has prepare(train_step, state, run_dir) too, which is
    called before `measure`.
    """

    tokenizer: Tokenizer | None
    labels: tuple[str, ...]
    rows: Any
    identity: dict[str, Any]

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> Measurement:
        """Returns the evaluations of a run on this data."""
        ...


def row_batches(cfg: Any, reading: Reading, step: TrainStep, position: int) -> Loader:
    """Returns the batches of a run that reads rows."""
    how = cfg.data.prefetch, step.storage.tokens, step.share
    return Loader(reading.rows, step.abstract_batch, position, *how)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What differs between training commands.

    name: of the command, and of the folder that holds its runs. presets: {name: configuration}; a
    run that starts from the weights of --init_from prints how it differs from the first of its
    class. take: the `take` of config.from_flags. open(cfg, console, run_dir): opens the data and
    describes it on the console. build(cfg, mesh): makes the step, of one compiled program or of
    several (loop.Step).
    batches(cfg, reading, step, position): makes the batches that follow a position in the data.
    show(console, cfg, step, mesh): describes the model on the console.
    """

    name: str
    presets: Mapping[str, Callable[[], Any]]
    take: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any]
    open: Callable[[Any, Console, RunDir], Reading]
    build: Callable[[Any, Mesh], Any] = make_train_step
    batches: Callable[[Any, Reading, Any, int], Batches] = row_batches
    show: Callable[[Console, Any, Any, Mesh], None] = report.show_model


def run(kind: Kind) -> int:
    """Runs a training command by its flags. Returns the exit code.

    A file beside the checkpoints that cannot be written (metrics, samples, the report, standard
    output) changes no exit code.
    """
    timers = start_timers()
    cfg, preset = config.from_flags(kind.presets, kind.take)
    cfg, mesh = start_devices(cfg, preset)
    job = Job(kind, cfg, preset, mesh, timers)
    reading = kind.open(cfg, job.console, job.run_dir)
    job.done("data", "data ready")
    documents = None if reading.tokenizer is None else reading.rows
    train_step = kind.build(job.fitted(documents), mesh)
    kind.show(job.console, cfg, train_step, mesh)
    start = job.first_state(train_step, reading)
    if (prepare := getattr(reading, "prepare", None)) is not None:
        prepare(train_step, start.state, job.run_dir)
        job.done("reference", "data prepared")
    recorder = job.recorder(train_step, start)
    measurement = reading.measure(train_step, recorder, job.console, job.run_dir)
    batches = kind.batches(cfg, reading, train_step, start.rows)
    return job.train(train_step, start, batches, recorder, measurement, reading)


def start_timers() -> tuple[Timers, Phases]:
    """Returns the timers, which a supervisor watches from now on, and the clock of the start."""
    keep_standard_streams(pipes=False)
    phases = Phases(time.perf_counter())
    return Timers.of_process(mesh_.find_supervisor().progress), phases


def start_devices(cfg: Any, preset: Any) -> tuple[Any, Mesh]:
    """Starts jax on this process's devices. Returns (the configuration with the mesh that they
    make, that mesh). Raises: UserError for a configuration that cannot run on it."""
    mesh_.start(cfg.emulate, cfg.emulate_without_gpu, unlike=cfg.is_unlike)
    with mesh_.together("megajax_configuration"):
        cfg = dataclasses.replace(cfg, mesh=mesh_.fit(cfg.mesh, preset.mesh, jax.device_count()))
        cfg.check(cfg.mesh.sizes(jax.device_count()))
        mesh = cfg.mesh.build()
    mesh_.cache_programs(cfg.cache_dir)
    return cfg, mesh


class Job:
    """A run of a command on its devices, with a folder that no other process may use.

    cfg: the configuration of the flags. run_dir: the folder. console: prints in the first process
    alone.
    """

    def __init__(
        self, kind: Kind, cfg: Any, preset: Any, mesh: Mesh, clocks: tuple[Timers, Phases]
    ):
        """Locks and opens the folder. preset: the configuration before the flags. clocks: of
        start_timers. Raises: UserError for a folder that is in use or holds another run."""
        self.cfg, self.mesh, self._supervision = cfg, mesh, mesh_.find_supervisor()
        self._timers, self._phases = clocks
        self._kinds = precision.agree(cfg)
        # Of each data-parallel rank: the rows of a step if all ranks took as many as that one.
        rows = rows_of_ranks(cfg, mesh, self._kinds)
        self._batches = [len(rows) * n for n in rows]
        self._progress = None  # the file of the timers that a thread of this process watches
        if cfg.detector == MINDER and self._supervision.progress is None:
            from megajax.systems.minder.run import watched_timers

            self._timers, self._progress = watched_timers()
        self._name = name = start_name(cfg)
        # Of a recipe that --init_from brings, all that differs from the first preset is shown, and
        # the folder's name says nothing of it.
        like = (made for make in kind.presets.values() if type(made := make()) is type(cfg))
        base = next(like) if name == TUNED else preset
        named = None if name == TUNED else preset
        self._preset = preset
        path = run_path(cfg, kind.name, name, named)
        shape.check(cfg, jax.devices()[0], path)
        run = self._supervision.run
        self._attempt = Attempt(run, self._supervision.attempt) if run else None
        lock_run(path, attempt=self._attempt)
        self.run_dir = open_run(cfg, kind.name, name, named)
        self.console = Console(cfg.train.steps, cfg.log.every, quiet=jax.process_index() != 0)
        report.show_start(self.console, name, cfg, base, mesh, self.run_dir)
        self.done("devices", f"devices of {jax.process_count()} hosts ready")

    def done(self, phase: str, what: str) -> None:
        """Ends a phase of the start and prints what was done in it."""
        self._phases.done(phase, self.console, what)

    @functools.cached_property
    def checkpoints(self) -> CheckpointManager:
        """The run's checkpoints."""
        spec = self.cfg.checkpoint
        return CheckpointManager(
            self.run_dir.checkpoints,
            keep=spec.keep,
            attempt=self._attempt,
            verify_saves=spec.verify_saves,
            key_file=spec.key_file,
        )

    @functools.cached_property
    def memory(self) -> MemoryTier | None:
        """The copies of the state in memory that outlives this process; None: nobody keeps any."""
        return MemoryTier.of_process(self._supervision.memory, self._supervision.attempt)

    def fitted(self, rows: Any = None) -> Any:
        """Returns the configuration with what it leaves open chosen for the data and the GPU.

        rows: packed documents, for which cuDNN's attention gets slots; None: there are none.
        """
        built, sizes = self.cfg, dict(self.mesh.shape)
        if rows is not None and self.mesh.devices.flat[0].platform != "cpu":
            built = with_segments(self.cfg, rows, sizes, min(self._batches))
        if is_open(built):
            built = resolved(built, sizes, mesh_.memory_bytes(self.mesh), max(self._batches))
        for name, _, value in config.diff(built, self.cfg):
            self.console.say(f"{name}: {value}, chosen for this data and GPU")
        return built

    def first_state(self, train_step: TrainStep, reading: Reading) -> resume.Start:
        """Returns the state that training begins with: of the run's own newest checkpoint, else
        with the weights of --init_from, else a new one."""
        cfg, console = self.cfg, self.console
        start = resume.begin(cfg, train_step, self.checkpoints, reading.identity, self.memory)
        self.done("state", start.how)
        for line in resume.changes(cfg, self.run_dir.former, int(start.state.step)):
            console.say(line)
        if cfg.checkpoint.memory_every_steps and self.memory is None:
            console.say("no copies in memory: it takes scripts/supervise.py to keep them")
        if jax.process_index() == 0:
            self.run_dir.begin(cfg, reading.tokenizer, reading.labels)
        return start

    def recorder(self, train_step: TrainStep, start: resume.Start) -> Recorder:
        """Returns what takes the run's figures to metrics.jsonl, the console and the supervisor."""
        cfg, console = self.cfg, self.console
        sinks: list[Sink] = [
            *report.sinks(cfg, self.run_dir, console),
            console,
            *records.of_process(self._supervision.progress),
        ]
        if self._progress is not None:
            from megajax.systems.minder.run import InRun

            args = cfg.minder, cfg.prometheus, self._progress, self.run_dir.path
            sinks.append(InRun(*args, console.say))
        recorder = Recorder(sinks, jax.process_index(), console.say)
        sent = {name: float(nbytes) for name, (nbytes, _) in report.wire_bytes(train_step).items()}
        # Detectors compare this process with those of its kind (monitor/detectors.py).
        kind = {records.KIND: self._kinds[jax.process_index()]} if self._kinds else {}
        recorder.emit(int(start.state.step), self._phases.seconds | sent | kind)
        return recorder

    def _check_program(self, compiled: Any) -> None:
        """Refuses a job on unlike devices whose programs would wait for each other for ever."""
        if self._kinds:
            from megajax.systems.qsync.programs import compare_job

            processes = [device.process_index for device in self.mesh.devices.flat]
            compare_job(compiled, self._kinds, processes)

    def train(
        self,
        train_step: TrainStep,
        start: resume.Start,
        batches: Batches,
        recorder: Recorder,
        measurement: Measurement,
        reading: Reading,
    ) -> int:
        """Trains to the last step, or until a signal, and writes the report of a run that reached
        its end. Returns the exit code."""
        cfg, console, timers = self.cfg, self.console, self._timers
        hooks: list[Hook] = [measurement]
        if cfg.prune.sparsity:
            from megajax.systems.pruning import Pruner

            storage = train_step.storage
            orders = storage.natural, storage.arranged
            axes, exchange = train_step.parts.axes, train_step.init_exchange
            hooks.append(Pruner(cfg.prune, axes, self.mesh, *orders, recorder.emit, exchange))
        rank, attempt = jax.process_index(), self._supervision.attempt
        pulse_every = cfg.minder.pulse_every if cfg.detector == MINDER else 0
        run = Run(
            cfg=cfg,
            train_step=train_step,
            state=start.state,
            loader=batches,
            checkpoints=self.checkpoints,
            profile_dir=self.run_dir.profile,
            recorder=recorder,
            console=console,
            meter=Meter(report.work(cfg, train_step.task, self.mesh), cfg.train.steps),
            identity=reading.identity,
            hooks=hooks,
            timers=timers,
            faults=Injector(faults.parse(cfg.fault), rank, attempt, recorder.emit),
            memory=self.memory,
            pulse=Pulse(pulse_every) if pulse_every else None,
            check_program=self._check_program,
        )
        try:
            stop = train(run)
        except BaseException as error:
            timers.leave(error)  # at once: a save that is under way is waited for after this
            if isinstance(error, Exception) and jax.process_count() == 1:
                run.checkpoints.wait()  # among several, a save may wait for one that is gone
            raise
        finally:
            recorder.close()
        step = int(run.state.step)
        if stop == "signal":
            timers.enter("told", step)
            run.checkpoints.close()
            console.say(f"stopped after step {step}; saved. Continue with:")
            console.say(f"  {script.command_line()}")
            return 128 + signal.SIGINT if run.stopped_by == signal.SIGINT else cfg.told_code
        timers.enter("end", step)
        if rank == 0:
            facts = report.facts(cfg, self.mesh, train_step, self._name, self._preset)
            facts |= {"command": script.command_line()}
            sample, labels = measurement.last_sample, reading.labels
            scores = getattr(measurement, "scores", {})
            figures = write_report(self.run_dir.path, facts, sample, console.say, labels, scores)
            report.show_end(console, figures, self.run_dir, sample, labels, scores)
        run.checkpoints.close()
        return 0
