"""Samples text from a run, or from a Hugging Face folder.

uv run scripts/generate.py --run_dir=runs/pretrain/nano-... --prompt="import "
uv run scripts/generate.py --run_dir=PRUNED --tiles --mesh.tensor=2
uv run scripts/generate.py --hf=FOLDER --prompt="Once upon a time" --sampling.top_p=0.9
"""

import megajax.core.interrupted  # noqa: F401

import sys
from dataclasses import dataclass
from typing import Literal

import jax

from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.needs import other_than
from megajax.parallel import sharding
from megajax.parallel.overlap import Overlap, refuse_fused
from megajax.serving.generate import Generator
from megajax.serving.sampling import SamplingConfig
from megajax.systems.open_model import open_model


@dataclass(frozen=True)
class Config(Checked):
    """What to sample from, and how."""

    run_dir: str | None = option(None, "folder of a run")
    hf: str | None = option(None, "Hugging Face folder (config.json, safetensors, tokenizer.json)")
    step: int | None = option(
        None,
        "checkpoint of the run; none: the latest",
        needs=other_than("run_dir", None),
        at_least=0,
    )
    tiles: bool = option(
        False,
        "multiply the matrices of a pruned run as packed tiles",
        needs=other_than("run_dir", None),
    )
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
    opened = open_model(
        run_dir=cfg.run_dir, hf=cfg.hf, step=cfg.step, tokenizer=cfg.tokenizer, tiles=cfg.tiles
    )
    mesh_.start(cfg.emulate)
    mesh = cfg.mesh.build()
    refuse_fused(cfg.overlap, jax.devices()[0])
    model, tokenizer = opened.cfg, opened.tokenizer
    params, what = opened.load(sharding.layout(mesh, model=model))
    print(what)
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    prompt = begin + tokenizer.encode([cfg.prompt])[0].tolist()
    generator = Generator(model, mesh, dtype=cfg.dtype, sampling=cfg.sampling, overlap=cfg.overlap)
    prompts = [prompt] * cfg.samples
    for ids in generator(params, prompts, cfg.new_tokens, cfg.seed, tokenizer.end):
        print(f"---\n{cfg.prompt}{tokenizer.decode(ids)}")
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
