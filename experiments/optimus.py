"""Vision-language models: a decoder that reads images by a vision tower.

With no flags a small model learns to answer questions about drawn images (words, numbers, counts,
bars) on 8 emulated CPU devices, in minutes of two CPU cores. It can be stopped and continued as
pretraining can; every flag of experiments/pretrain.py that does not sample text means the same
here.

    uv run experiments/optimus.py
    uv run experiments/optimus.py --data.source=FOLDER --train.freeze=tower,projector
    uv run experiments/optimus.py --preset=paper    # simulates the paper's tables, trains nothing
    uv run --extra gpu experiments/optimus.py --init_from=HF_FOLDER --data.source=CHATS.jsonl

Samples are questions about drawings, conversations or captions (docs/vision.md). On pipeline stages
the vision tower can run while they would wait, as in Optimus (arXiv 2408.03505):

    uv run experiments/optimus.py --mesh.pipe=4 --mesh.data=2 --encoder.schedule=bubbles

By default it runs before the decoder's first block (inline), the schedule that the paper compares
with.
"""

import megajax.core.interrupted  # noqa: F401

import sys

from absl import flags

from experiments.reports import optimus as report
from experiments.reports.reporting import closing
from megajax.core import config
from megajax.systems import job
from megajax.training.interrupts import ends_when_superseded
from megajax.training.vision import FIRST, Samples, show, take_model
from megajax.training.vision import PRESETS as TRAINED

PRESETS = TRAINED | {"paper": TRAINED["nano"]}  # of paper, which trains nothing, flags alone
config.define_flags(PRESETS, "nano", FIRST)
OUT = flags.DEFINE_string("out", "runs/optimus", "of --preset=paper: folder for the results")


@ends_when_superseded()
def main() -> int:
    """Runs the training job, or simulates the paper's. Returns the exit code."""
    if flags.FLAGS.preset == "paper":
        return report.paper(OUT.value)
    code = job.run(job.Kind("optimus", TRAINED, take_model, Samples, show=show))
    if code == 0:
        print(closing(config.start_name()))
    return code


if __name__ == "__main__":
    sys.exit(config.run(main))
