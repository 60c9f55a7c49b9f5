"""Samples text from a run, or from a Hugging Face folder.

uv run scripts/generate.py --run_dir=runs/pretrain/nano-... --prompt="import "
uv run scripts/generate.py --run_dir=PRUNED --tiles --mesh.tensor=2
uv run scripts/generate.py --hf=FOLDER --prompt="Once upon a time" --sampling.top_p=0.9
"""

import megajax.core.interrupted  # noqa: F401

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax

from megajax.checkpoint import hf
from megajax.checkpoint.run_folder import load_params
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.needs import other_than
from megajax.core.paths import expand
from megajax.core.tree import Tree
from megajax.data.tokenizer import Tokenizer, check_vocabulary, open_tokenizer
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import sharding
from megajax.parallel.overlap import Overlap, refuse_fused
from megajax.serving.generate import Generator
from megajax.serving.sampling import SamplingConfig
from megajax.systems.prune_export import stored, to_tiles
from megajax.training.config import Config as RunConfig
from megajax.training.run_dir import saved_tokenizer


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


def open_run(cfg: Config) -> tuple[DecoderConfig, Tokenizer, Callable[[Layout], Tree]]:
    """Returns (model, tokenizer, what loads the parameters) of --run_dir."""
    folder = expand(cfg.run_dir or "", "run_dir")
    run = config.load_json(RunConfig, folder / "config.json", "run_dir")
    tokenizer = open_tokenizer(cfg.tokenizer) if cfg.tokenizer else saved_tokenizer(folder)

    def load(layout: Layout) -> Tree:
        params, step = load_params(
            folder, run.model, layout, cfg.step, run.checkpoint.dir, run.checkpoint.key_file
        )
        print(f"{folder}, step {step}, {mesh_.describe(layout.mesh)}")
        return pack(run, layout, params) if cfg.tiles else params

    return run.model, tokenizer, load


def pack(run: RunConfig, layout: Layout, params: Tree) -> Tree:
    """Returns the parameters with the run's pruned matrices as tiles. Raises: UserError."""
    if not run.prune.sparsity:
        raise UserError(
            "the run was not pruned, so no matrix has tiles to leave out; sample without --tiles, "
            "or train with --prune.sparsity (--tiles)"
        )
    tiles = to_tiles(
        params, None, decoder.parts(run.model).axes, layout=layout, tile=run.prune.tile,
        chunk=run.prune.chunk, single=run.prune.pattern == "tew",
    )  # fmt: skip
    print(f"pruned matrices as tiles, which hold {stored(tiles):.1%} of their entries")
    return tiles


def open_hf(cfg: Config) -> tuple[DecoderConfig, Tokenizer, Callable[[Layout], Tree]]:
    """Returns (model, tokenizer, what loads the parameters) of --hf."""
    folder = expand(cfg.hf or "", "hf")
    model = hf.load_decoder_config(folder, "hf")
    if cfg.tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"hf={folder} has no tokenizer.json: say what its tokens are (--tokenizer=bytes, "
            "--tokenizer=FILE)"
        )

    def load(layout: Layout) -> Tree:
        print(f"{folder}, {mesh_.describe(layout.mesh)}")
        return hf.load_params(folder, model, layout)

    return model, open_tokenizer(cfg.tokenizer or str(folder)), load


def main() -> int:
    """Prints each continuation."""
    cfg, _ = config.from_flags(PRESETS)
    if (cfg.run_dir is None) == (cfg.hf is None):
        raise UserError("give one of --run_dir and --hf")
    mesh_.start(cfg.emulate)
    mesh = cfg.mesh.build()
    refuse_fused(cfg.overlap, jax.devices()[0])
    model, tokenizer, load = open_run(cfg) if cfg.run_dir is not None else open_hf(cfg)
    check_vocabulary(tokenizer, model.vocab)
    params = load(sharding.layout(mesh, model=model))
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    prompt = begin + tokenizer.encode([cfg.prompt])[0].tolist()
    generator = Generator(model, mesh, dtype=cfg.dtype, sampling=cfg.sampling, overlap=cfg.overlap)
    prompts = [prompt] * cfg.samples
    for ids in generator(params, prompts, cfg.new_tokens, cfg.seed, tokenizer.end):
        print(f"---\n{cfg.prompt}{tokenizer.decode(ids)}")
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
