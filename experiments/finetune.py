"""Fine-tuning: a decoder learns chats; an encoder learns labels, or hidden tokens of text.

With no flags a small encoder learns to say from which package of Python's standard library a
passage comes, on 8 emulated CPU devices (data 4 x tensor 2), in under a minute. `--preset=chat`
teaches a small decoder the form of the answers of a made set. A run can be stopped and continued as
pretraining can; every flag of experiments/pretrain.py means the same here.

    uv run experiments/finetune.py
    uv run experiments/finetune.py --preset=nano_mlm
    uv run experiments/finetune.py --preset=chat
    uv run --extra gpu experiments/finetune.py --init_from=FOLDER --data.source=CHATS.jsonl
    uv run --extra gpu experiments/finetune.py --preset=bert_base --init_from=HF_FOLDER \\
        --data.source=LABELLED.jsonl --model.labels=2 --new_head=true

What is learnt follows from the preset; without one, from the model of --init_from: a decoder learns
chats, an encoder labels. Chats are conversations in the form of OpenAI's API, of ShareGPT or Alpaca
(docs/finetuning.md). Labelled text is jsonl lines with the members `text` and `label`
(--data.text_key, --data.label_key), or a folder with a folder of text files for each label.
--model.head=mlm reads what pretraining reads. Source of the encoders' objectives: BERT (arXiv
1810.04805).
"""

import megajax.core.interrupted  # noqa: F401

import sys

from megajax.core import config
from megajax.systems import job
from megajax.training.chats import ChatsConfig
from megajax.training.finetune import FIRST, PRESETS, open_reading, take
from megajax.training.interrupts import ends_when_superseded

config.define_flags(PRESETS, "nano", FIRST, also=(ChatsConfig,))


@ends_when_superseded()
def main() -> int:
    """Runs the training job. Returns the exit code."""
    return job.run(job.Kind("finetune", PRESETS, take, open_reading))


if __name__ == "__main__":
    sys.exit(config.run(main))
