"""Fine-tuning: an encoder learns labels, or hidden tokens of text.

With no flags a small encoder learns to say from which package of Python's standard library a
passage comes, on 8 emulated CPU devices (data 4 x tensor 2), in under a minute. It can be stopped
and continued as pretraining can; every flag of experiments/pretrain.py that does not sample text
means the same here.

    uv run experiments/finetune.py
    uv run experiments/finetune.py --preset=nano_mlm
    uv run --extra gpu experiments/finetune.py --preset=bert_base --init_from=HF_FOLDER \\
        --data.source=LABELLED.jsonl --model.labels=2 --new_head=true

Labelled text is jsonl lines with the members `text` and `label` (--data.text_key,
--data.label_key), or a folder with a folder of text files for each label. --model.head=mlm reads
what pretraining reads. Source of the objectives: BERT (arXiv 1810.04805).
"""

import megajax.core.interrupted  # noqa: F401

import sys

from megajax.core import config
from megajax.systems import job
from megajax.training.finetune import FIRST, PRESETS, Examples, take_encoder
from megajax.training.interrupts import ends_when_superseded

config.define_flags(PRESETS, "nano", FIRST)


@ends_when_superseded()
def main() -> int:
    """Runs the training job. Returns the exit code."""
    return job.run(job.Kind("finetune", PRESETS, take_encoder, Examples))


if __name__ == "__main__":
    sys.exit(config.run(main))
