"""Samples text from a run, a Hugging Face folder or a GGUF file.

uv run scripts/generate.py --run_dir=runs/pretrain/nano-... --prompt="import "
uv run scripts/generate.py --run_dir=PRUNED --tiles --mesh.tensor=2
uv run scripts/generate.py --hf=FOLDER --prompt="Once upon a time" --sampling.top_p=0.9
uv run scripts/generate.py --gguf=FILE --prompt="The capital of France is"
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.axes import ZERO_AXES
from megajax.core.config import Checked, group, option, other_than
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.data.tokenizer import prompt_ids
from megajax.parallel import sharding
from megajax.parallel.overlap import Overlap, refuse_fused
from megajax.parallel.sharding import Zero
from megajax.serving import SamplingParams
from megajax.serving.forward import REPLICA_AXES
from megajax.serving.params import Sampling
from megajax.systems.open_model import OpenModel, open_model

PAGE = 16  # tokens
ADAPTER = "adapter"  # its name in the engine
MOST = 64  # (chosen) samples that are continued at a time


@dataclass(frozen=True)
class Config(Checked):
    """What to sample from, and how."""

    run_dir: str | None = option(None, "folder of a run")
    hf: str | None = option(
        None, "Hugging Face folder (config.json, safetensors, tokenizer.json) or ORG/NAME"
    )
    gguf: str | None = option(None, "GGUF file of a Llama-like model, with its tokenizer")
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
    adapter: str | None = option(None, "PEFT folder of an adapter for the model; none: no adapter")
    tokenizer: str | None = option(None, "bytes or a tokenizer.json; none: the model's own")
    prompt: str = option("def ", "text to continue")
    parse_special: bool = option(
        True, "whether the text of a special token in the prompt is that token, or text"
    )
    sampling_defaults: Literal["model", "none"] = option(
        "model",
        "source of the sampling options that are not given; model: generation_config.json or the "
        "GGUF file; none: the defaults of this script",
    )
    samples: int = option(1, "number of continuations", at_least=1)
    new_tokens: int = option(200, "length of the longest continuation", "tokens", at_least=1)
    seed: int = option(0, "random seed of the sampling", at_least=0, at_most=2**32 - 1)
    dtype: Literal["float32", "bfloat16"] = option("float32", "data type of computation")
    overlap: Overlap = option("auto", "how tensor ranks add up their sums; see the training flag")
    emulate: int | None = option(None, "CPU devices to emulate; none: real ones", at_least=1)
    cache_dir: str = option("~/.cache/megajax", "folder for compiled programs")
    sampling: Sampling = group(Sampling)
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, resets=True)


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def main() -> int:
    """Prints each continuation."""
    flags_set: set[str] = set()

    def note(base: Config, flags: Mapping[str, Any], read: Mapping[str, Any]) -> Config:
        flags_set.update(flags, read)
        return base

    cfg, _ = config.from_flags(PRESETS, note)
    opened = open_model(
        run_dir=cfg.run_dir,
        hf=cfg.hf,
        gguf=cfg.gguf,
        step=cfg.step,
        tokenizer=cfg.tokenizer,
        tiles=cfg.tiles,
    )
    if cfg.sampling_defaults == "model":
        values, line = opened.sampling_defaults()
        named = {f"sampling.{name}": value for name, value in values.items()}
        cfg = config.override(cfg, {n: value for n, value in named.items() if n not in flags_set})
        if line:
            print(line)
    mesh_.start(cfg.emulate)
    mesh_.cache_programs(cfg.cache_dir)
    mesh = cfg.mesh.build()
    refuse_fused(cfg.overlap, jax.devices()[0])
    for text in sample(cfg, opened, mesh):
        print(f"---\n{cfg.prompt}{text}")
    return 0


def sample(cfg: Config, opened: OpenModel, mesh: Mesh) -> list[str]:
    """Returns the continuations. Raises: UserError for a prompt that the model cannot continue."""
    # Several replicas would each need a copy: there, the weights rest cut, as training has them.
    zero: Zero = "none" if math.prod(mesh.shape[a] for a in ZERO_AXES) == 1 else "full"
    layout = sharding.layout(mesh, zero, decode=True, model=opened.cfg)
    tokenizer = opened.tokenizer
    prompt = prompt_ids(tokenizer, cfg.prompt, cfg.parse_special)
    running = min(cfg.samples, MOST)
    # All answers of a request run on one replica, which needs a slot for each.
    replicas = math.prod(mesh.shape[axis] for axis in REPLICA_AXES)
    each = -(-(len(prompt) + cfg.new_tokens) // PAGE) + 1  # and one to grow into
    engine, what, _ = opened.engine(
        mesh,
        lambda: opened.load(layout),
        (running, len(prompt)),
        outlined=not cfg.tiles,
        pages=running * each + 1,
        page_size=PAGE,
        max_batch=running * replicas,
        dtype=cfg.dtype,
        zero=None if zero == "none" else zero,
        overlap=cfg.overlap,
        **({"adapters": {ADAPTER: expand(cfg.adapter, "adapter")}} if cfg.adapter else {}),
    )
    print(what)
    asked = SamplingParams(
        max_tokens=cfg.new_tokens,
        seed=cfg.seed,
        n=cfg.samples,
        **{f.name: getattr(cfg.sampling, f.name) for f in dataclasses.fields(cfg.sampling)},
    )
    try:
        engine.submit(prompt, asked, adapter=ADAPTER if cfg.adapter else None)
    except UserError as error:
        raise UserError(f"{error} (--prompt, --new_tokens)") from None
    answers: list[list[int]] = [[] for _ in range(cfg.samples)]
    for output in engine.run():
        answers[output.index] += output.tokens
    return [tokenizer.decode(ids[:-1] if ids[-1] in tokenizer.ends else ids) for ids in answers]


if __name__ == "__main__":
    sys.exit(config.run(main))
