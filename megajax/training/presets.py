"""Named configurations: where pretraining starts, and what a plan plans."""

import dataclasses
from collections.abc import Callable
from typing import Any

from megajax.core.mesh import MeshSpec
from megajax.models.decoder_config import PRESETS as MODELS
from megajax.models.decoder_config import DecoderConfig
from megajax.training.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LogConfig,
    TrainConfig,
)
from megajax.training.optim import OptimConfig


def nano() -> Config:
    """0.9 M parameters, 4,096 tokens a step, about two minutes on two CPU cores."""
    return Config(
        model=MODELS["nano"](),
        mesh=MeshSpec(tensor=2),
        train=TrainConfig(steps=160, global_batch=32, seq_len=128),
        optim=OptimConfig(name="muon", lr=2e-2, warmup=10),
        eval=EvalConfig(every=80, batches=4),
        checkpoint=CheckpointConfig(every=80),
        log=LogConfig(every=10),
        emulate_without_gpu=8,
    )


def nano_moe() -> Config:
    """nano with 8 experts, of which a token uses 2: as many active parameters."""
    mesh = MeshSpec(expert=4, tensor=2)
    return dataclasses.replace(nano(), model=MODELS["nano_moe"](), mesh=mesh)


def large(name: str, global_batch: int = 512) -> Config:
    """A published model with the settings of its size: bf16, 2 million tokens a step or fewer."""
    model = MODELS[name]()
    seq_len = min(model.max_positions, 4096)
    return Config(
        model=model,
        train=TrainConfig(
            steps=20_000,
            global_batch=global_batch,
            seq_len=seq_len,
            dtype="bfloat16",
            loss_chunks=8,
            z_loss=1e-4,
        ),
        optim=OptimConfig(lr=3e-4, warmup=1000, final=0.1, schedule="cosine"),
        eval=EvalConfig(every=1000, batches=16),
    )


def megascale(name: str) -> Config:
    """MegaScale table 2: 6,144 rows of 2,048 tokens a step on 3,072 GPUs and more."""
    return large(name, 6144)


# The flags that --help describes; the others it names.
FIRST = (
    "preset", "config", "run_dir", "init_from", "data.source", "data.tokenizer", "train.steps",
    "train.global_batch", "train.seq_len", "optim.lr",
)  # fmt: skip


def recipe(max_positions: int) -> dict[str, Any]:
    """Full fine-tuning of given weights: what --init_from starts from without --preset or --config,
    as the members of a configuration, for decoders and encoders.

    Rate, cosine, decay and optimizer: supervised fine-tuning of Llama 2 (arXiv 2307.09288 section
    3.1: AdamW, 2e-5, 0.1). A rate for training from scratch, 100 times larger and more, would
    overwrite what the weights know. Moments decay as in the library's pretraining presets.
    """
    return dict(
        train=TrainConfig(
            steps=200,  # (chosen: minutes for a small model; the paper's is 2 epochs of its data)
            global_batch=16,  # (chosen: fits one GPU with a 1B model; the paper has 64)
            seq_len=min(max_positions, 512),  # (chosen: as the batch; the paper has 4096)
        ),
        optim=OptimConfig(
            name="adamw",
            lr=2e-5,
            warmup=10,  # (chosen: 5 % of the steps, so that Adam's moments exist before the peak)
            schedule="cosine",
            final=0.0,  # (chosen: nothing follows; the paper does not say)
            weight_decay=0.1,
        ),
        checkpoint=CheckpointConfig(every=100),
    )


def finetune(model: DecoderConfig) -> Config:
    """The recipe for fine-tuning a decoder."""
    evaluation = EvalConfig(every=50, batches=4)
    return Config(model=model, eval=evaluation, **recipe(model.max_positions))


SMALL: dict[str, Callable[[], Config]] = {"nano": nano, "nano_moe": nano_moe}
PRESETS = SMALL | {
    name: (lambda name=name: megascale(name) if "megascale" in name else large(name))
    for name in MODELS
    if name not in SMALL
}
