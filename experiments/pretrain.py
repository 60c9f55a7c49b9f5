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
from megajax.systems import job
from megajax.training.evaluate import Text
from megajax.training.interrupts import ends_when_superseded
from megajax.training.presets import FIRST, PRESETS, take_model

config.define_flags(PRESETS, "nano", FIRST)


@ends_when_superseded()
def main() -> int:
    """Runs the training job. Returns the exit code."""
    return job.run(job.Kind("pretrain", PRESETS, take_model, Text))


if __name__ == "__main__":
    sys.exit(config.run(main))
