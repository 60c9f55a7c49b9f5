"""What a training command starts from: a preset, a file, or the weights of a Hugging Face folder.

`from_flags` calls `take_model` between the preset or file and the flags. A folder of weights counts
where init_from stands: typed, its model and tokenizer replace those of preset and file; in a file,
the members of that file go over the folder's. Flags go over all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megajax.core import config
from megajax.core.paths import expand
from megajax.data.config import DataConfig
from megajax.data.corpus import recorded_tokenizer
from megajax.data.tokenizer import bpe_size, need_tokenizer, tokenizer_file
from megajax.training.config import Config, JobConfig
from megajax.training.presets import finetune

TUNED = "finetune"  # the name of runs that start from given weights
SHAPE = ("model.layers", "model.width", "model.vocab", "data.tokenizer")  # whole: a saved file


def take_model(base: Config, given: Mapping[str, Any], read: Mapping[str, Any]) -> Config:
    """Returns `base` with the defaults that other settings decide.

    With init_from, model and tokenizer come from that folder, and the rest from the recipe for
    fine-tuning, unless --preset or --config was typed. Else the tokenizer is the one that a .bin
    was made with.

    Args: given: {dotted name: value} of the flags; read: of the file.
    """
    folder = given.get("init_from", base.init_from)
    if folder is None:
        return fit_vocabulary(_take_recorded(base, given, read), given, read)
    over = given if "init_from" in given else {**read, **given}
    if all(name in over for name in SHAPE):
        return base
    from megajax.checkpoint import hf

    model = hf.load_decoder_config(folder)
    base = base if config.start_given() else finetune(model)
    base = dataclasses.replace(base, model=model)
    kept = {k: v for k, v in over.items() if k.startswith("model.")}
    if "data.tokenizer" not in {**read, **given}:
        kept["data.tokenizer"] = str(need_tokenizer(folder, "init_from", "--data.tokenizer"))
    elif "data.tokenizer" not in over and (
        tokenizer := tokenizer_file(expand(folder, "init_from"))
    ):
        kept["data.tokenizer"] = str(tokenizer)
    return config.override(base, kept)


def _take_recorded(base: Config, given: Mapping[str, Any], read: Mapping[str, Any]) -> Config:
    """The tokenizer that scripts/tokenize.py recorded beside a .bin, unless one is chosen."""
    chosen = "data.tokenizer" in {**read, **given}
    recorded = recorded_tokenizer(given.get("data.source", base.data.source))
    if chosen or base.data.tokenizer != DataConfig().tokenizer or recorded is None:
        return base
    return dataclasses.replace(base, data=dataclasses.replace(base.data, tokenizer=recorded))


def fit_vocabulary(base: Any, given: Mapping[str, Any], read: Mapping[str, Any]) -> Any:
    """Returns `base` with a vocabulary that has room for bpe:N, unless one is chosen.

    A larger one stays, so that runs which had it go on. A masked-token head has one more id.
    """
    size = bpe_size(str(given.get("data.tokenizer", base.data.tokenizer)))
    if size is None or "model.vocab" in {**read, **given}:
        return base
    size += getattr(base.model, "head", None) == "mlm"
    return config.override(base, {"model.vocab": size}) if size > base.model.vocab else base


def start_name(cfg: JobConfig) -> str:
    """Returns what the run starts from, for its folder and its first line."""
    tuned = cfg.init_from is not None and not config.start_given()
    return TUNED if tuned else config.start_name()
