"""Quantizes a decoder's matrices to few bits and says what that costs in held-out loss.

    uv run scripts/quantize.py --run_dir=RUN --bits=4                  # GPTQ; measures only
    uv run scripts/quantize.py --hf=FOLDER --bits=3 --method=awq
    uv run scripts/quantize.py --gguf=FILE --bits=4 --group=64 --out=FOLDER

Calibration reads the part of --source that training would learn from; the loss is measured on the
part that training would hold out. --out writes a Hugging Face folder in GPTQ's form
(checkpoint_format gptq_v2, or the older gptq with --form=gptq_v1) or, with --form=awq, in AWQ's
form of 4 bits. `scripts/serve.py --hf` and `scripts/generate.py --hf` read such folders;
docs/quantization.md says which of them GPTQModel and transformers read.
Embeddings, head, norms and biases stay as they are. Methods: rtn rounds to nearest, gptq is arXiv
2210.17323, awq arXiv 2306.00978. With --out, awq's scales of inputs are shared by the matrices
that read the same inputs, and folded into the norm or the matrix before them.
Exit code 2: a flag is wrong.
"""

import megajax.core.interrupted  # noqa: F401

import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, option, other_than
from megajax.core.errors import UserError
from megajax.core.packed import PackedWeight
from megajax.core.tree import nbytes
from megajax.foreign import companions, hf, hf_quantized
from megajax.foreign.hf_quantized import AWQ_BITS, BITS, Form
from megajax.models import folding
from megajax.parallel import sharding
from megajax.quant import Format, quantize_model
from megajax.systems.llm_pq.quality import calibrate, loss_of, windows
from megajax.systems.open_model import open_model


@dataclass(frozen=True)
class Config(Checked):
    """The model, the form of its weights, and the text that judges them."""

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
    tokenizer: str | None = option(None, "bytes or a tokenizer.json; none: the model's own")
    bits: int = option(4, "bits of a weight: 2, 3, 4 or 8", at_least=2, at_most=8)
    group: int = option(128, "number of inputs that share a scale", at_least=1)
    symmetric: bool = option(True, "whether codes are symmetric around 0; false: with zero points")
    method: Literal["rtn", "gptq", "awq"] = option("gptq", "method of rounding")
    source: str = option(
        "stdlib", "text for calibration and loss, given as --data.source of pretraining"
    )
    calibration_rows: int = option(32, "rows of training text for calibration", "rows", at_least=1)
    eval_rows: int = option(32, "rows of held-out text for the loss", "rows", at_least=1)
    length: int = option(256, "length of a row", "tokens", at_least=2)
    seed: int = option(0, "random seed of the order of the text", at_least=0)
    out: str | None = option(None, "folder to write; none: measures only")
    form: Form = option(
        "gptq",
        "form of the files, whatever the method of rounding; gptq is its version gptq_v2, "
        "gptq_v1 the older one; awq: 4 bits only",
        needs=other_than("out", None),
    )

    def __post_init__(self):
        """Refuses widths that there are not, and what no file can hold, before the work."""
        super().__post_init__()
        if self.bits not in BITS:
            raise UserError(f"bits={self.bits} must be one of {', '.join(map(str, BITS))} (--bits)")
        if self.out is None:
            return
        if not self.symmetric:
            raise UserError(
                "zero points of this rounding are no whole numbers of scales, as the files have "
                "them (--out); measure without --out, or write with --symmetric"
            )
        if self.form == "awq" and self.bits != AWQ_BITS:
            raise UserError(
                f"bits={self.bits} must be {AWQ_BITS} in AWQ's form; --form=gptq takes others "
                "(--bits)"
            )


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def is_packed(x: Any) -> bool:
    """Tells a matrix in few bits from an array."""
    return isinstance(x, PackedWeight)


def main() -> int:
    """Prints the losses, and writes the folder."""
    cfg, _ = config.from_flags(PRESETS)
    fmt = Format(cfg.bits, cfg.group, 0, symmetric=cfg.symmetric, scale_dtype="float16")
    opened = open_model(
        run_dir=cfg.run_dir, hf=cfg.hf, gguf=cfg.gguf, step=cfg.step, tokenizer=cfg.tokenizer
    )
    if cfg.out is not None:  # before the work, not behind it
        hf.free_folder(cfg.out)
        hf_quantized.check(opened.cfg, fmt, cfg.form)
    mesh_.start(1)
    mesh = mesh_.MeshSpec().build()
    params, what = opened.load(sharding.layout(mesh, "none", decode=True, model=opened.cfg))
    print(what, flush=True)
    if any(isinstance(w, PackedWeight) for w in jax.tree.leaves(params, is_leaf=is_packed)):
        raise UserError(f"{opened.name} is quantized as it is stored; give a dense model")
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)  # on no mesh
    length = min(cfg.length, opened.cfg.max_positions)

    def text(rows: int, held_out: bool):
        return windows(
            cfg.source, opened.tokenizer, (rows, length), held_out=held_out, seed=cfg.seed
        )

    judged = text(cfg.eval_rows, True)
    before = loss_of(params, opened.cfg, judged)
    print(f"{judged.size} held-out tokens of {cfg.source}: {before:.4f} nats a token", flush=True)
    began, calibration = time.monotonic(), None
    if cfg.method != "rtn":
        calibration = calibrate(params, opened.cfg, [*text(cfg.calibration_rows, False)[:, None]])
    to_fold = folding.sources(opened.cfg) if cfg.out is not None else None
    params_q = quantize_model(
        params, opened.cfg, fmt, calibration=calibration, method=cfg.method, sources=to_fold
    )
    if to_fold is not None:
        params_q = folding.fold(params_q, opened.cfg)  # files have no place for scales of inputs
    after = loss_of(params_q, opened.cfg, judged)
    small, large = nbytes(params_q["blocks"]), nbytes(params["blocks"])
    print(
        f"{cfg.method}, {cfg.bits} bits, groups of {cfg.group}: {after:.4f} nats a token "
        f"({after - before:+.4f}); the blocks have {8 * small / (large / 4):.2f} bits a number; "
        f"{time.monotonic() - began:.0f} s"
    )
    if cfg.out is not None:
        licences = companions.licences([cfg.run_dir, cfg.hf])
        hf_quantized.save(
            params_q, opened.cfg, cfg.out, opened.tokenizer, form=cfg.form, licences=licences
        )
        print(f"{cfg.out}: a Hugging Face folder in {cfg.form.upper()}'s form")
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
