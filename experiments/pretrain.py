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

import sys

from megajax.core import config
from megajax.data.loader import Loader
from megajax.systems import job
from megajax.training import report
from megajax.training.evaluate import Text
from megajax.training.interrupts import ends_when_superseded
from megajax.training.presets import FIRST, PRESETS, take_model
from megajax.training.step import make_train_step

config.define_flags(PRESETS, "nano", FIRST)
KIND = job.Kind("pretrain", PRESETS, take_model, Text)


@ends_when_superseded()
def main() -> int:
    """Runs the training job. Returns the exit code.

    The whole run in its order. What it shares with other training commands, such as
    experiments/finetune.py, is in megajax/systems/job.py.
    """
    timers = job.start_timers()

    # Configuration: a preset, changed by the file of --config, then by the model of --init_from,
    # then by the other flags. The run prints what differs from the preset.
    cfg, preset = config.from_flags(PRESETS, take_model)

    # Devices, and the mesh that the configuration makes of them. What cannot run on this mesh ends
    # the command here, before anything is compiled.
    cfg, mesh = job.start_devices(cfg, preset)

    # The run's folder, for this job alone.
    run = job.Job(KIND, cfg, preset, mesh, timers)

    # Data: packed rows of text. Row i is a function of the seed and of i.
    text = Text(cfg, run.console, run.run_dir)
    run.done("data", "data ready")

    # Model: the task has the decoder as pure functions, the members of a batch, and the objective.
    # The step calls it with the layout of the mesh, which says where each parameter and activation
    # lies, and with the Ops that put communication and kernels around the layers. It is compiled
    # at the first call.
    built = run.fitted(text.rows)
    train_step = make_train_step(built, mesh, built.task())
    report.show_model(run.console, cfg, train_step, mesh)

    # State: that of the run's own newest checkpoint, else new with the weights of --init_from, else
    # new.
    start = run.first_state(train_step, text)

    # What is recorded and measured beside training: figures of every step, now and then the loss of
    # held-out rows and a text that the model writes.
    recorder = run.recorder(train_step, start)
    measure = text.measure(train_step, recorder, run.console, run.run_dir)

    # The loop, from the first row that no step has consumed. It saves checkpoints, stops after a
    # signal, and at the end writes the report.
    batch, order = train_step.abstract_batch, train_step.storage.tokens
    loader = Loader(text.rows, batch, start.rows, cfg.data.prefetch, order, train_step.share)
    return run.train(train_step, start, loader, recorder, measure, text)


if __name__ == "__main__":
    sys.exit(config.run(main))
