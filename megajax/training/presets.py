"""Named configurations of pretraining, and how a run chooses one from flags, file and weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megajax.core import config
from megajax.core.files import model_folder
from megajax.core.mesh import MeshSpec
from megajax.data.config import DataConfig
from megajax.data.corpus import recorded_tokenizer
from megajax.data.tokenizer import (
    Tokenizer,
    bpe_size,
    need_tokenizer,
    open_tokenizer,
    tokenizer_file,
)
from megajax.models.decoder_config import PRESETS as MODELS
from megajax.models.decoder_config import DecoderConfig
from megajax.training.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    JobConfig,
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
    "preset",
    "config",
    "run_dir",
    "init_from",
    "data.source",
    "data.tokenizer",
    "train.steps",
    "train.global_batch",
    "train.seq_len",
    "optim.lr",
)


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


# ---- start
#
# What a training command starts from: a preset, a file, or the weights of a Hugging Face folder.
#
# `from_flags` calls `take_model` between the preset or file and the flags. A folder of weights
# counts where init_from stands: typed, its model and tokenizer replace those of preset and file; in
# a file, the members of that file go over the folder's. Flags go over all.


TUNED = "finetune"  # the name of runs that start from given weights
SHAPE = ("model.layers", "model.width", "model.vocab", "data.tokenizer")  # whole: a saved file


def take_model(base: Config, typed: Mapping[str, Any], read: Mapping[str, Any]) -> Config:
    """Returns `base` with the defaults that other settings decide.

    With init_from, model and tokenizer come from that folder, and the rest from the recipe for
    fine-tuning, unless --preset or --config was typed. Else the tokenizer is the one that a .bin
    was made with.

    Args: typed: {dotted name: value} of the flags; read: of the file.
    """
    folder = typed.get("init_from", base.init_from)
    if folder is None:
        return fit_vocabulary(_take_recorded(base, typed, read), typed, read)
    over = typed if "init_from" in typed else {**read, **typed}
    if all(name in over for name in SHAPE):
        return base
    from megajax.foreign import hf

    model = hf.load_decoder_config(folder)
    base = base if config.start_given() else finetune(model)
    base = dataclasses.replace(base, model=model)
    changes = {k: v for k, v in over.items() if k.startswith("model.")}
    if "data.tokenizer" not in {**read, **typed}:
        changes["data.tokenizer"] = str(need_tokenizer(folder, "init_from", "--data.tokenizer"))
    elif "data.tokenizer" not in over and (
        tokenizer := tokenizer_file(model_folder(folder, "init_from"))
    ):
        changes["data.tokenizer"] = str(tokenizer)
    return config.override(base, changes)


def _take_recorded(base: Config, typed: Mapping[str, Any], read: Mapping[str, Any]) -> Config:
    """The tokenizer that scripts/tokenize.py recorded beside a .bin, unless one is chosen."""
    chosen = "data.tokenizer" in {**read, **typed}
    recorded = recorded_tokenizer(typed.get("data.source", base.data.source))
    if chosen or base.data.tokenizer != DataConfig().tokenizer or recorded is None:
        return base
    return dataclasses.replace(base, data=dataclasses.replace(base.data, tokenizer=recorded))


def fit_vocabulary(
    base: Any,
    typed: Mapping[str, Any],
    read: Mapping[str, Any],
    open_named: Callable[[str], Tokenizer] = open_tokenizer,
) -> Any:
    """Returns `base` with the vocabulary of its tokenizer, unless one is chosen.

    A preset's vocabulary has room for `bytes`, which all presets have, and stays with them. bpe:N
    counts as N ids, though a small text may give fewer. A masked-token head has one more id.
    Raises: UserError for a tokenizer that cannot be read.
    """
    name = str(typed.get("data.tokenizer", base.data.tokenizer))
    if name == DataConfig().tokenizer or "model.vocab" in {**read, **typed}:
        return base
    size = bpe_size(name) or open_named(name).vocab
    return config.override(
        base, {"model.vocab": size + (getattr(base.model, "head", None) == "mlm")}
    )


def start_name(cfg: JobConfig) -> str:
    """Returns what the run starts from, for its folder and its first line."""
    tuned = cfg.init_from is not None and not config.start_given()
    return TUNED if tuned else config.start_name()
