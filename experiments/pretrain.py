"""Pretraining: a sharded decoder learns real text. The main job.

With no flags it trains a small GPT on Python's own standard library, on 8 emulated CPU devices
(data 4 x tensor 2), samples from it, draws its loss curve and can be stopped and continued:

    uv run experiments/pretrain.py
    uv run experiments/pretrain.py --model.block=parallel --model.window=32 --optim.name=lamb
    uv run --extra gpu experiments/pretrain.py --preset=gpt2 --data.source=TEXT/

The same flags reach from a laptop to MegaScale's configurations (arXiv 2402.15627 section 6.1):
any combination of --mesh.* sizes, block, optimizer and data is one command. --init_from=FOLDER
fine-tunes Hugging Face weights by a recipe of its own (AdamW at 2e-5; presets.finetune).
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import signal
import sys
import time

import jax

from megajax.checkpoint.lease import Attempt
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.data.corpus import open_corpora
from megajax.data.loader import Loader, held_out_batches, training_rows
from megajax.monitor import faults, stream
from megajax.monitor.console import Console, Phases
from megajax.monitor.faults import Injector
from megajax.monitor.meter import Meter
from megajax.monitor.records import Recorder
from megajax.monitor.timers import Timers
from megajax.systems.prune_stages import Pruner
from megajax.training import banner, preflight, resume
from megajax.training.interrupts import ends_when_superseded
from megajax.training.loop import Run, train
from megajax.training.measure import Measure
from megajax.training.presets import FIRST, PRESETS
from megajax.training.report import write_report
from megajax.training.run_dir import command_line, open_run, run_path
from megajax.training.run_lock import lock_run
from megajax.training.start import TUNED, start_name, take_model
from megajax.training.step import make_train_step

config.define_flags(PRESETS, "nano", FIRST)


@ends_when_superseded()
def main() -> int:
    """Runs the training job. Returns the exit code."""
    phases = Phases(time.perf_counter())
    supervision = mesh_.find_supervisor()
    timers = Timers.of_process(supervision.progress)
    cfg, preset = config.from_flags(PRESETS, take_model)  # 1 configuration
    mesh_.start(cfg.emulate, cfg.emulate_without_gpu)  # 2 devices and mesh
    cfg = dataclasses.replace(cfg, mesh=mesh_.fit(cfg.mesh, preset.mesh, jax.device_count()))
    cfg.check(cfg.mesh.sizes(jax.device_count()))
    mesh = cfg.mesh.build()
    mesh_.cache_programs(cfg.cache_dir)
    name = start_name(cfg)
    path = run_path(cfg, "pretrain", name)
    preflight.check(cfg, jax.devices()[0], path)
    attempt = Attempt(supervision.run, supervision.attempt) if supervision.run else None
    lock_run(path, attempt=attempt)  # 3 the run's folder, ours alone
    run_dir = open_run(cfg, "pretrain", name)
    first = jax.process_index() == 0  # one process of a job speaks and writes
    console = Console(cfg.train.steps, cfg.log.every, quiet=not first)
    shown = PRESETS["nano"]() if name == TUNED else preset  # all that the recipe sets
    banner.show_start(console, name, cfg, shown, mesh, run_dir)
    phases.done("devices", console, f"devices of {jax.process_count()} hosts ready")

    corpora, tokenizer = open_corpora(  # 4 data
        cfg.data, cfg.cache_dir, console.say, cfg.model.vocab
    )
    banner.show_data(console, cfg, corpora, tokenizer)
    rows = training_rows(corpora, cfg.train.seq_len, cfg.train.seed)
    phases.done("data", console, "data ready")

    train_step = make_train_step(cfg, mesh)  # 5 model and step
    banner.show_model(console, cfg, train_step, mesh)
    kept = cfg.checkpoint
    checkpoints = CheckpointManager(
        run_dir.checkpoints, keep=kept.keep, attempt=attempt,
        verify_saves=kept.verify_saves, key_file=kept.key_file,
    )  # fmt: skip
    identity = resume.identity(corpora, tokenizer, cfg)
    memory = MemoryTier.of_process(supervision.memory, supervision.attempt)
    # 6 own steps > init_from > new
    start = resume.begin(cfg, train_step, checkpoints, identity, memory)
    phases.done("state", console, start.how)
    if cfg.checkpoint.memory_every_steps and memory is None:
        console.say("no copies in memory: it takes scripts/supervise.py to keep them")

    if first:
        run_dir.begin(cfg, tokenizer)
    work = banner.work(cfg, mesh)
    sinks = [*banner.sinks(cfg, run_dir), console, *stream.of_process(supervision.progress)]
    recorder = Recorder(sinks, rank := jax.process_index(), console.say)
    recorder.emit(int(start.state.step), phases.seconds)
    measure = Measure(
        cfg, train_step, corpora, tokenizer, recorder, console, run_dir,
        lambda: held_out_batches(
            corpora, train_step.abstract_eval_batch, cfg.eval.batches, train_step.order
        ),
    )  # fmt: skip
    pruner = Pruner(
        cfg.prune, train_step.parts.axes, mesh, train_step.natural, train_step.arranged,
        recorder.emit,
    )  # fmt: skip
    run = Run(
        cfg=cfg,
        train_step=train_step,
        state=start.state,
        loader=Loader(
            rows, train_step.abstract_batch, start.rows, cfg.data.prefetch, train_step.order
        ),
        checkpoints=checkpoints,
        profile_dir=run_dir.profile,
        recorder=recorder,
        console=console,
        meter=Meter(work, cfg.train.steps),
        evaluate=measure,
        identity=identity,
        timers=timers,
        faults=Injector(faults.parse(cfg.fault), rank, supervision.attempt, recorder.emit),
        memory=memory,
        between=pruner if cfg.prune.sparsity else None,
    )
    try:
        stop = train(run)  # 7 the loop
    except BaseException as error:
        timers.leave(error)  # at once: a save that is under way is waited for after this
        raise
    finally:
        recorder.close()
    if stop == "signal":
        timers.enter("told", int(run.state.step))
        checkpoints.close()
        console.say(f"stopped after step {int(run.state.step)}; saved. Continue with:")
        console.say(f"  {command_line()}")
        return 128 + signal.SIGINT if run.stopped_by == signal.SIGINT else cfg.told_code
    timers.enter("end", int(run.state.step))
    if first:  # 8 what is left to look at
        facts = banner.facts(cfg, mesh, train_step, name, preset) | {"command": command_line()}
        figures = write_report(run_dir.path, facts, measure.last_sample)
        banner.show_end(console, figures, run_dir, measure.last_sample)
    checkpoints.close()
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
