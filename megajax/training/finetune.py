"""Fine-tuning and masked-token pretraining of encoders: configuration, presets, start.

`--model.head` is the objective: `classify` learns the label of a text from its first token, `mlm`
hidden tokens (BERT, arXiv 1810.04805). Everything else is as in pretraining.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.core import config, config_file
from megajax.core.config import group, option
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.needs import other_than
from megajax.core.paths import expand
from megajax.core.tree import Tree
from megajax.data.config import LabelledConfig
from megajax.data.tokenizer import need_tokenizer, tokenizer_file
from megajax.models import encoder
from megajax.models.encoder_config import PRESETS as MODELS
from megajax.models.encoder_config import EncoderConfig, Head
from megajax.training import presets
from megajax.training.config import (
    CheckpointConfig,
    Config,
    HeldOutConfig,
    JobConfig,
    LogConfig,
    TrainConfig,
)
from megajax.training.optim import OptimConfig
from megajax.training.start import fit_vocabulary
from megajax.training.task import Task, mean_loss, token_rows


@dataclass(frozen=True)
class FinetuneConfig(JobConfig):
    """A whole run of an encoder: labels or hidden tokens, by its head."""

    model: EncoderConfig = group(EncoderConfig)
    data: LabelledConfig = group(LabelledConfig)
    new_head: bool = option(
        False,
        "begin the head from random weights, whichever head the folder of init_from has",
        needs=other_than("init_from", None),
    )

    def task(self) -> Task:
        """Returns the encoder with its head's targets."""
        train = self.train
        parts = functools.partial(
            encoder.parts, self.model, dtype=train.dtype, loss_chunks=max(train.loss_chunks, 1)
        )
        return Task(parts, token_rows(train.seq_len), mean_loss(train.z_loss))

    def given_params(self, layout: Layout, fresh: Tree) -> Tree:
        """Reads the parameters as JobConfig does; with `new_head` the head begins anew."""
        from megajax.checkpoint import hf

        assert self.init_from is not None
        theirs = hf.load_config(self.init_from)
        if not isinstance(theirs, EncoderConfig):
            return super().given_params(layout, fresh)
        self.check_head(theirs)
        if not self.new_head:
            return super().given_params(layout, fresh)
        like = {name: getattr(theirs, name) for name in ("head", "labels", "pooler")}
        given = hf.load_params(self.init_from, dataclasses.replace(self.model, **like), layout)
        return fresh | {name: x for name, x in given.items() if name not in encoder.HEAD}

    def check_head(self, theirs: EncoderConfig) -> None:
        """Refuses to leave the head of the folder of init_from out unless `new_head` says so.

        theirs: of the folder. Raises: UserError.
        """
        if self.new_head or _head(theirs) == _head(self.model):
            return
        shown = [f"{h} with {n} labels" if n else h for h, n in map(_head, (theirs, self.model))]
        has = "has no head" if theirs.head == "none" else f"has the head {shown[0]}"
        raise UserError(
            f"{self.init_from} {has}, and the run has the head {shown[1]}, which would begin from "
            "random weights; say so with --new_head=true, or train the folder's head (--new_head, "
            "--model.head, --model.labels)"
        )

    def check(self, sizes: Mapping[str, int]) -> None:
        """Checks what JobConfig checks, and what an encoder cannot do. Raises: UserError."""
        for axis in ("pipe", "context"):
            if sizes[axis] > 1:
                raise UserError(
                    f"mesh.{axis}={sizes[axis]}: encoders are cut over node, data and tensor only; "
                    f"use 1 (--mesh.{axis})"
                )
        super().check(sizes)
        model, train = self.model, self.train
        if model.head == "none":
            raise UserError(
                "model.head=none has no loss; train with mlm or classify (--model.head)"
            )
        if train.seq_len > model.max_positions - model.position_offset:
            raise UserError(
                f"train.seq_len={train.seq_len} is beyond the rows of the position table that are "
                f"left; at most {model.max_positions - model.position_offset} (--train.seq_len, "
                "--model.max_positions, --model.position_offset)"
            )


def _head(model: EncoderConfig) -> tuple[str, int]:
    """Returns what must be equal for a head to fit: its kind, and the classes of a classifier."""
    return model.head, model.labels if model.head == "classify" else 0


def nano() -> FinetuneConfig:
    """Two blocks learn from which package of Python's library a passage of 48 tokens comes."""
    return FinetuneConfig(
        model=EncoderConfig(
            layers=2, vocab=1152, max_positions=128, types=0, dropout=0.1, head="classify", labels=8
        ),
        mesh=MeshSpec(tensor=2),
        train=TrainConfig(steps=60, global_batch=64, seq_len=48),
        optim=OptimConfig(name="muon", lr=2e-2, warmup=6, weight_decay=0.01),
        data=LabelledConfig(tokenizer="bpe:1024", holdout=0.2),
        eval=HeldOutConfig(every=30, batches=12),
        checkpoint=CheckpointConfig(every=30),
        log=LogConfig(every=6),
        emulate_without_gpu=8,
    )


def nano_mlm() -> FinetuneConfig:
    """nano's encoder learns hidden bytes of the text that pretraining reads."""
    base = nano()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab=512, head="mlm"),
        train=dataclasses.replace(base.train, steps=120, global_batch=32, seq_len=64),
        data=LabelledConfig(),
    )


def large(name: str) -> FinetuneConfig:
    """A published encoder with the settings of BERT's fine-tuning (arXiv 1810.04805, appendix A.3:
    rows of 128, batches of 32, 2e-5, linear decay, 10 % of warm-up)."""
    return FinetuneConfig(
        model=dataclasses.replace(MODELS[name](), head="classify"),
        train=TrainConfig(steps=1000, global_batch=32, seq_len=128, dtype="bfloat16"),
        optim=OptimConfig(
            lr=2e-5, warmup=100, schedule="linear", final=0.0, weight_decay=0.01, beta2=0.999,
            eps=1e-6,
        ),
        data=LabelledConfig(holdout=0.1),
        eval=HeldOutConfig(every=250),
    )  # fmt: skip


def tuned(model: EncoderConfig) -> FinetuneConfig:
    """The recipe for fine-tuning given weights (presets.finetune), for an encoder."""
    shared = presets.recipe(model.max_positions - model.position_offset)
    head: Head = "classify"
    evaluation = HeldOutConfig(every=50, batches=4)
    model = dataclasses.replace(model, head=head)
    return FinetuneConfig(model=model, eval=evaluation, **shared)


PRESETS = {"nano": nano, "nano_mlm": nano_mlm} | {
    name: (lambda name=name: large(name)) for name in MODELS if name != "nano"
}


def load_run(run_dir: str | Path) -> Config | FinetuneConfig:
    """Returns the configuration of a run's folder, of a decoder or of an encoder: only an encoder
    has a head. Raises: UserError naming the file."""
    file = expand(run_dir, "run_dir") / "config.json"
    model = config_file.read(file, "run_dir").get("model")
    has_head = isinstance(model, Mapping) and "head" in model
    return config.load_json(FinetuneConfig if has_head else Config, file, "run_dir")


# The flags that --help describes; the others it names.
FIRST = (
    "preset", "config", "run_dir", "init_from", "model.head", "data.source", "data.label_key",
    "data.tokenizer", "train.steps", "train.global_batch", "train.seq_len", "optim.lr",
)  # fmt: skip


def take_encoder(
    base: FinetuneConfig, given: Mapping[str, Any], read: Mapping[str, Any]
) -> FinetuneConfig:
    """Returns `base` with the model and the tokenizer of the folder of init_from, if there is one.

    Without --preset or --config the rest is the recipe for fine-tuning. The head stays that of
    `base`; the number of a classifier's labels is the folder's, if it has one that is trained on.
    Args: given: {dotted name: value} of the flags; read: of the file. Both go over the folder's.
    """
    folder = given.get("init_from", base.init_from)
    over = given if "init_from" in given else {**read, **given}
    if folder is None:
        return fit_vocabulary(base, given, read)
    if {"model.layers", "model.width", "model.vocab"} <= over.keys():
        return base
    from megajax.checkpoint import hf

    model = hf.load_config(folder)
    if not isinstance(model, EncoderConfig):
        raise UserError(
            f"{folder} holds a decoder; this program trains encoders, experiments/pretrain.py "
            "decoders (--init_from)"
        )
    base = base if config.start_given() else tuned(model)
    kept = {k: v for k, v in over.items() if k.startswith("model.")}
    head = kept.get("model.head", base.model.head)
    new = over.get("new_head", base.new_head)
    loaded = not new and head == model.head == "classify"
    labels = model.labels if loaded else base.model.labels
    base = dataclasses.replace(base, model=dataclasses.replace(model, head=head, labels=labels))
    if "data.tokenizer" not in {**read, **given}:
        kept["data.tokenizer"] = str(need_tokenizer(folder, "init_from", "--data.tokenizer"))
    elif "data.tokenizer" not in over and (
        tokenizer := tokenizer_file(expand(folder, "init_from"))
    ):
        kept["data.tokenizer"] = str(tokenizer)
    base = config.override(base, kept)
    dataclasses.replace(base, init_from=folder, new_head=new).check_head(model)
    return base
