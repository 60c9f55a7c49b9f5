"""Fine-tuning and masked-token pretraining of encoders: configuration, presets, start.

`--model.head` is the objective: `classify` learns the label of a text from its first token, `mlm`
hidden tokens (BERT, arXiv 1810.04805). Everything else is as in pretraining.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megajax.core import config
from megajax.core.config import group
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.paths import expand
from megajax.core.tree import Tree
from megajax.data.config import LabelledConfig
from megajax.data.tokenizer import need_tokenizer, tokenizer_file
from megajax.models import encoder
from megajax.models.encoder_config import PRESETS as MODELS
from megajax.models.encoder_config import EncoderConfig
from megajax.training.config import (
    CheckpointConfig,
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

    def task(self) -> Task:
        """Returns the encoder with its head's targets."""
        train = self.train
        parts = functools.partial(
            encoder.parts, self.model, dtype=train.dtype, loss_chunks=max(train.loss_chunks, 1)
        )
        return Task(parts, token_rows(train.seq_len), mean_loss(train.z_loss))

    def given_params(self, layout: Layout, fresh: Tree) -> Tree:
        """Reads the parameters as JobConfig does; a head that the folder lacks begins anew."""
        from megajax.checkpoint import hf

        assert self.init_from is not None
        theirs = hf.load_config(self.init_from)
        if not isinstance(theirs, EncoderConfig) or _head(theirs) == _head(self.model):
            return super().given_params(layout, fresh)
        like = {name: getattr(theirs, name) for name in ("head", "labels", "pooler")}
        given = hf.load_params(self.init_from, dataclasses.replace(self.model, **like), layout)
        return fresh | {name: x for name, x in given.items() if name not in encoder.HEAD}

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


PRESETS = {"nano": nano, "nano_mlm": nano_mlm} | {
    name: (lambda name=name: large(name)) for name in MODELS if name != "nano"
}

# The flags that --help describes; the others it names.
FIRST = (
    "preset", "config", "run_dir", "init_from", "model.head", "data.source", "data.label_key",
    "data.tokenizer", "train.steps", "train.global_batch", "train.seq_len", "optim.lr",
)  # fmt: skip


def take_encoder(
    base: FinetuneConfig, given: Mapping[str, Any], read: Mapping[str, Any]
) -> FinetuneConfig:
    """Returns `base` with the model and the tokenizer of the folder of init_from, if there is one.

    The head stays that of `base`: a folder with a masked-token head starts a classifier too.
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
    head = {name: getattr(base.model, name) for name in ("head", "labels", "dropout")}
    base = dataclasses.replace(base, model=dataclasses.replace(model, **head))
    kept = {k: v for k, v in over.items() if k.startswith("model.")}
    if "data.tokenizer" not in {**read, **given}:
        kept["data.tokenizer"] = str(need_tokenizer(folder, "init_from", "--data.tokenizer"))
    elif "data.tokenizer" not in over and (
        tokenizer := tokenizer_file(expand(folder, "init_from"))
    ):
        kept["data.tokenizer"] = str(tokenizer)
    return config.override(base, kept)
