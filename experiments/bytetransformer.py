"""ByteTransformer (arXiv 2210.03052): BERT that never touches padding, beside BERT that does.

    uv run experiments/bytetransformer.py                                  # any CPU, seconds
    PYTHONPATH=. python3 experiments/bytetransformer.py --preset=paper     # one Hopper GPU

The paper's workload is sequences whose average length is 0.6 of the longest, in the layers of BERT
base. The steps of its figure 13 (LayerNorm fusion, GELU fusion, zero padding, fused attention) are
added one after another, and padded rows run through cuDNN's attention beside them.
On any device the command checks that every step gives the padded model's result for each valid
token, with NaN in the padding, for averages of 0.1, 0.6 and 1.0 of the longest (--model.* and
--dtype choose the model). It counts the work that packing saves on the paper's own shapes. Times of
a CPU are not reported.
On a GPU it also measures times on the device and on the clock, and attention alone beside unfused
attention, which is PyTorch's where torch finds the GPU (the paper: 6.13 times as fast). The command
writes bytetransformer_cpu.json or bytetransformer_gpu.json after every row, and then .svg and .png,
into --out. Exit code 1: a step is not exact.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from experiments.reports import bytetransformer as report
from experiments.reports.reporting import closing
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.models.encoder_config import PRESETS as MODELS
from megajax.models.encoder_config import EncoderConfig
from megajax.monitor import results
from pallas_kernels.cases import paper_lengths

ALPHAS = (0.1, 0.6, 1.0)  # average over longest; the paper's is 0.6
PAPER_LENGTHS = "64,128,256,384,512,768,1024"
# Milliseconds of 12 layers on an A100, fp16, batch 16, average 0.6, at these maximum lengths (the
# README of the paper's repository).
PAPER_AT = (64, 256, 384, 512, 768, 1024)
PAPER_MS = {
    "PyTorch": (3.20, 9.56, 15.01, 21.0, 35.31, 53.21),
    "TensorFlow": (4.57, 12.17, 18.56, 26.03, 44.62, 65.94),
    "FasterTransformer": (2.24, 6.77, 10.37, 18.03, 32.09, 50.28),
    "FasterTransformer, no padding": (1.93, 5.49, 7.05, 13.79, 28.21, 45.22),
    "DeepSpeed": (2.81, 9.03, 15.19, 21.55, 37.95, 59.96),
    "ByteTransformer": (2.09, 6.85, 8.44, 9.22, 16.30, 24.70),
}
PAPER = {"lengths": PAPER_AT, "ms": PAPER_MS, "attention_over_pytorch": 6.13}  # the last: abstract


@dataclass(frozen=True)
class Config(Checked):
    """What runs: the exactness of `model`, and on a GPU its times."""

    model: EncoderConfig = group(EncoderConfig)
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "data type of weights and tokens"
    )
    kernels: Literal["auto", "hopper", "reference"] = option(
        "auto",
        "implementation of our kernels; auto: as shipped, which is plain JAX where that is faster",
    )
    batch: int = option(4, "sequences in the check of exactness", at_least=1)
    longest: int = option(64, "padded length in the check of exactness", "tokens", at_least=1)
    batches: str = option("16", "numbers of sequences that are timed on a GPU, joined by commas")
    lengths: str = option(
        PAPER_LENGTHS, "maximum lengths that are counted and timed, joined by commas"
    )
    runs: int = option(50, "timed calls of each row, after 10 of warm-up", at_least=1)
    out: str = results.out_option("bytetransformer")

    def __post_init__(self):
        """Refuses sizes that cannot be drawn or timed."""
        super().__post_init__()
        for name in ("batches", "lengths"):
            numbers(name, getattr(self, name))


def tiny() -> Config:
    """Two layers with heads of the paper's width."""
    return Config(model=EncoderConfig(layers=2, width=128, heads=2, mlp=512))


def paper() -> Config:
    """BERT base in bfloat16, batches of 1 to 16."""
    return Config(MODELS["bert_base"](), "bfloat16", batch=16, longest=256, batches="1,16")


def numbers(name: str, text: str) -> list[int]:
    """'1,16' -> [1, 16]. Raises: UserError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"{name}={text} must be whole numbers above 0 with commas (--{name}=1,16)")
    return [int(word) for word in words]


def torch_row(cfg: Config, batch: int, longest: int) -> dict[str, Any]:
    """PyTorch's attention on padded rows, operation by operation, in half precision."""
    row = {"part": "attention", "step": "padded, PyTorch", "batch": batch, "longest": longest}
    if importlib.util.find_spec("torch") is None:
        return row | {"note": "torch is not installed"}
    import torch

    if not torch.cuda.is_available():
        return row | {"note": "torch finds no GPU"}
    H, K = cfg.model.heads, cfg.model.head_width
    q, k, v = torch.randn(3, batch, H, longest, K, device="cuda", dtype=torch.float16)
    lengths = torch.tensor(paper_lengths(longest, batch), device="cuda")
    dead = torch.arange(longest, device="cuda")[None] >= lengths[:, None]
    mask = (dead[:, None, None] * -10000.0).half()
    times = []
    for _ in range(10 + cfg.runs):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.softmax(q @ k.transpose(-1, -2) * K**-0.5 + mask, -1) @ v
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    p10, median, p90 = (float(x) for x in np.percentile(times[10:], (10, 50, 90)))
    return row | {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "n": cfg.runs}


def main() -> int:
    """Checks, counts and, on a GPU, times. Returns 1 when a step is not exact."""
    cfg, base = config.from_flags(PRESETS)  # 1 configuration and device
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    mesh_.start()
    device, on_gpu = jax.devices()[0], jax.default_backend() == "gpu"
    if cfg.kernels == "hopper" and not on_gpu:
        raise UserError(
            f"kernels=hopper needs a Hopper GPU: found {device.platform}; nearest: auto, reference "
            "(--kernels)"
        )
    layer = f"measured on {device.device_kind}" if on_gpu else "emulated, work counted"
    about: dict[str, Any] = results.facts(device.device_kind, layer)
    about |= {"preset": config.start_name(), "model": dataclasses.asdict(cfg.model), "paper": PAPER}
    path = results.writable_folder(cfg.out) / f"bytetransformer_{'gpu' if on_gpu else 'cpu'}.json"
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> dict[str, Any]:
        rows.append(row)
        results.write(path, about, rows)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        print(*(f"{k} {v}" for k, v in shown.items() if v is not None), sep=" | ", flush=True)
        return row

    def attempt(part: str, step: report.Step, batch: int, longest: int) -> None:
        """Adds a row of times; one that fails must not lose the others."""
        time = report.timed if part == "time" else report.timed_attention
        try:
            add(time(cfg.model, step, cfg.dtype, batch, longest, runs=cfg.runs))
        except Exception as error:
            note = f"{type(error).__name__}: {str(error)[:300]}"
            add({"part": part, "step": step.name, "batch": batch, "longest": longest, "note": note})

    for step in (*report.STEPS, report.CUDNN):  # 2 what cannot run here
        if reason := report.missing(step):
            add({"part": "missing", "step": step.name, "note": reason})
    steps = report.runnable(None if cfg.kernels == "auto" else cfg.kernels)
    sizes = cfg.model, cfg.dtype, cfg.batch, cfg.longest  # 3 exactness
    for row in report.exact(*sizes, ALPHAS, steps):
        add(row)
    shape, lengths = MODELS["bert_base"](), numbers("lengths", cfg.lengths)
    for longest in lengths:  # 4 work saved, on the paper's shapes
        add(report.counted(shape, 16, longest))
    for row in [row for n in (256, 1024) for row in report.steps_counted(shape, 16, n)]:
        add(row)
    if on_gpu:  # 5 times: the whole stack, then attention alone
        batches = sorted(numbers("batches", cfg.batches), reverse=True)
        for batch, longest in itertools.product(batches, lengths):
            for step in steps:
                attempt("time", step, batch, longest)
        for batch, longest in itertools.product(batches, lengths):
            for step in (s for s in steps if not s.norm or s.attention == "varlen"):
                attempt("attention", step, batch, longest)
            add(torch_row(cfg, batch, longest))
    draw(rows, path.with_suffix(""), on_gpu)  # 6 figure
    print(f"{path}, .svg and .png")
    print(report.conclusion(rows, on_gpu))
    print(closing(config.start_name()))
    return int(not all(row["passed"] for row in rows if row["part"] == "exact"))


def draw(rows: list[dict[str, Any]], path: Path, on_gpu: bool) -> None:
    """Draws the measurements if there are some, else the counts."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no figure")
    elif on_gpu and not any("median_ms" in row for row in rows):
        print("nothing was timed: no figure")
    elif on_gpu:
        paper_ms = dict(zip(PAPER_AT, PAPER_MS["ByteTransformer"], strict=True))
        report.draw_times(rows, paper_ms, path)
    else:
        report.draw_counts(rows, path)


PRESETS = {"tiny": tiny, "paper": paper}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main))
