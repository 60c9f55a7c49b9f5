"""Samples text from a run, or from a Hugging Face folder.

uv run scripts/generate.py --run_dir=runs/pretrain/nano-... --prompt="import "
uv run scripts/generate.py --hf=FOLDER --prompt="Once upon a time" --top_p=0.9
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megajax.checkpoint import hf
from megajax.checkpoint.run_folder import load_params
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.data.tokenizer import check_vocabulary, open_tokenizer
from megajax.parallel import sharding
from megajax.parallel.overlap import Overlap
from megajax.serving.generate import Generator
from megajax.serving.sampling import SamplingConfig
from megajax.training.config import Config as RunConfig
from megajax.training.run_dir import saved_tokenizer


@dataclass(frozen=True)
class Config(Checked):
    """What to sample from, and how."""

    run_dir: str | None = option(None, "folder of a run")
    hf: str | None = option(None, "Hugging Face folder (config.json, safetensors, tokenizer.json)")
    step: int | None = option(None, "checkpoint of the run; none: the latest", at_least=0)
    tokenizer: str | None = option(None, "bytes or a tokenizer.json; none: the model's own")
    prompt: str = option("def ", "what to continue")
    samples: int = option(1, "continuations to write", at_least=1)
    new_tokens: int = option(200, "longest continuation", "tokens", at_least=1)
    seed: int = option(0, "of the sampling", at_least=0, at_most=2**32 - 1)
    dtype: Literal["float32", "bfloat16"] = option("float32", "of compute")
    overlap: Overlap = option("auto", "how tensor ranks add up their sums; see the training flag")
    emulate: int | None = option(None, "CPU devices to emulate; none: real ones", at_least=1)
    sampling: SamplingConfig = group(SamplingConfig)
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, whole=True)


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def main() -> int:
    """Prints each continuation."""
    cfg, _ = config.from_flags(PRESETS)
    if (cfg.run_dir is None) == (cfg.hf is None):
        raise UserError("give one of --run_dir and --hf")
    mesh_.start(cfg.emulate)
    mesh = cfg.mesh.build()
    layout = sharding.layout(mesh)
    if cfg.run_dir is not None:
        run = config.load_json(RunConfig, Path(cfg.run_dir) / "config.json")
        model = run.model
        params, step = load_params(cfg.run_dir, model, layout, cfg.step, run.checkpoint.dir)
        tokenizer = open_tokenizer(cfg.tokenizer) if cfg.tokenizer else saved_tokenizer(cfg.run_dir)
        print(f"{cfg.run_dir}, step {step}, {mesh_.describe(mesh)}")
    else:
        model = hf.load_decoder_config(cfg.hf)
        params = hf.load_params(cfg.hf, model, layout)
        tokenizer = open_tokenizer(cfg.tokenizer or cfg.hf)
        print(f"{cfg.hf}, {mesh_.describe(mesh)}")
    check_vocabulary(tokenizer, model.vocab)
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    prompt = begin + tokenizer.encode([cfg.prompt])[0].tolist()
    generator = Generator(model, mesh, dtype=cfg.dtype, sampling=cfg.sampling, overlap=cfg.overlap)
    prompts = [prompt] * cfg.samples
    for ids in generator(params, prompts, cfg.new_tokens, cfg.seed, tokenizer.end):
        print(f"---\n{cfg.prompt}{tokenizer.decode(ids)}")
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
