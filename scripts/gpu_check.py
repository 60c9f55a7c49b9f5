"""Checks and times everything that needs a GPU, the most valuable first, within ten minutes.

    PYTHONPATH=. python3 scripts/gpu_check.py                   # all parts, at most 9 minutes
    PYTHONPATH=. python3 scripts/gpu_check.py attention gemm    # parts with one of these words
    PYTHONPATH=. python3 scripts/gpu_check.py --again expert    # measure these parts again
    PYTHONPATH=. python3 scripts/gpu_check.py --rehearse        # on a CPU, tiny, in up to an hour

Run again with the same --out, the command continues where it stopped. To continue from the
committed results, copy experiments/results/DEVICE_*.json and pallas_kernels/tuned/DEVICE.json into
--out first. Serving and training run what the tuning tables of pallas_kernels/tuned make the
default, so copy a newly measured table there before these parts run.

This process never touches the GPU. Each part is a process of its own (gpu_session/worker.py) with a
limit for every stage, so a kernel that hangs costs its limit, a crash costs its part, and the rest
is measured. Correctness comes before speed: a small kernel and the peaks of the machine,
the checks of every kernel folder, then times beside rivals, training, the tunings that matter most,
and products with communication behind an emulated link.

At most eight files go into --out: DEVICE_kernels.json (times), DEVICE_checks.json,
DEVICE_train.json (steps beside the cost model's estimates), DEVICE_serving.json (decoding beside
its memory roofline), DEVICE_overlap.json, DEVICE.json (a table for pallas_kernels/tuned),
DEVICE_verdicts.json and log.txt. Each file is rewritten as a whole after every row. Compiled
programs are cached in runs/gpu_cache, which is not part of the results: a program must be lowered
before it is found there, so the finished rows save a second run more time than the cache does.
Needs jax with CUDA, flax, optax and absl only. The exit code is 1 when something failed.
"""

import megajax.core.interrupted  # noqa: F401

import ctypes
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from megajax.core import script
from megajax.core.errors import UserError, did_you_mean
from megajax.monitor import results
from scripts.gpu_session.session import TUNED, Part, Session, Store

ROOT = Path(__file__).parent.parent
WORKER = [sys.executable, str(ROOT / "scripts" / "gpu_session" / "worker.py")]
REHEARSAL_SCALE, REHEARSAL_MINUTES = 30, 60  # of limits on a CPU that interprets; of the time
SMOKE = Part("smoke", "kernels", {"do": "smoke"})
FOLDERS = (
    "attention",
    "gemm",
    "grouped",
    "norm",
    "tile_sparse",
    "quantize",
    "quant_gemm",
    "paged",
)
UNDIFFERENTIATED = ("quantize", "quant_gemm", "paged")  # have no kernel of a backward pass
TORCH = ("attention", "gemm", "grouped", "norm", "quant_gemm")  # where PyTorch has a rival
FORWARD, BOTH = "forward", "forward+backward"
FUSED = ("collective", "expert")
SAMPLE = 6  # checks of a folder before any times
# Names of gpu_session/training.py:VARIANTS, the goals first.
TRAIN_FIRST = ("cudnn, remat outputs", "hopper, remat outputs")
TRAIN_REST = (
    "cudnn, remat dots",
    "cudnn, remat full",
    "cudnn, batch 16",
    "cudnn, parallel block",
    "xla, batch 2",
)
# Of scripts/tune.py's tunings, by their whole names: decoding from pages and with packed weights,
# long attention, packed attention, the products of a large decoder layer, its norm, experts, and a
# product behind a link.
QUANT = "quant_gemm quant matmul dtype bfloat16 bits 4 group 128 zeros False activation none"
TUNE_FIRST = (
    "paged paged attention dtype bfloat16 pages bfloat16 width 128 group 4 heads 8 page 16"
    " tokens 64 segments 64 room 4096",
    *(f"{QUANT} M {M} N 28672 K 8192" for M in (1, 16)),
    f"{QUANT} M 16 N 8192 K 28672",
    *(f"{QUANT} M {M} N 14336 K 4096" for M in (1, 16, 64)),
    *(f"{QUANT} M 16 N {N} K {K}" for N, K in ((6144, 4096), (4096, 14336))),
    f"{QUANT} M 256 N 14336 K 4096",
    f"{QUANT.removesuffix('none')}silu M 2048 N 14336 K 4096",
    f"{QUANT} M 8192 N 4096 K 14336",
    "attention varlen attention forward dtype bfloat16 width 128 group 1 longest 16384"
    " tokens 16384",
    "attention varlen attention forward dtype bfloat16 width 128 group 4 longest 4096 tokens 32768",
    "attention varlen attention backward dtype bfloat16 width 128 group 4 longest 4096 tokens 32768"
    " deterministic False",
    "attention varlen attention forward dtype bfloat16 width 64 group 1 longest 1000 tokens 9880",
    "gemm fused gemm dtype bfloat16 kind forward activation silu residual False"
    " M 8192 N 14336 K 4096",
    "gemm fused gemm dtype bfloat16 kind forward activation none residual True"
    " M 8192 N 4096 K 14336",
    "grouped grouped matmul dtype bfloat16 kind forward G 8 M 16384 N 14336 K 4096",
    "norm fused layer norm dtype bfloat16 centred False added True unpacks False width 4096"
    " rows 16384",
    "tile_sparse tile sparse matmul dtype bfloat16 kind forward activation none format 128x64"
    " M 12800 K 4096 P 16384 slots 2048",
    "quantize hadamard quantize dtype float32 bits 8 new_bits 8 group 128 random True hadamard True"
    " payloads 8 elements 67108864",
    "collective all gather matmul ranks 8 rows 512 K 12288 N 6144",
)
# Those of the model that the part `serving` decodes with: attention, and products in 4 bits.
TUNE_SERVED = (
    *(
        "paged paged attention dtype bfloat16 pages bfloat16 width 64 group 4 heads 8 page 16"
        f" tokens {tokens} segments {segments} room 768"
        for tokens, segments in ((8, 8), (64, 64), (512, 64))
    ),
    *(
        f"{QUANT} M {M} N {N} K {K}"
        for M in (8, 64, 512)
        for N, K in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
    ),
)
ALIASES = {
    "kernels": (*FOLDERS, "bert"),
    "train": ("losses", "step"),
    "plan": ("step",),
    "tune served": TUNE_SERVED,
}

OUT = flags.DEFINE_string("out", None, "folder of the results; none: $OUT, else the script's own")
MINUTES = flags.DEFINE_float("minutes", None, "time in all; none: 9, of a rehearsal 60", 0)
AGAIN = flags.DEFINE_boolean("again", False, "forget what the folder holds of these parts")
REHEARSE = flags.DEFINE_boolean("rehearse", False, "run every part on a CPU, tiny")
COMMIT = flags.DEFINE_string("commit", None, "what results say they ran; none: git is asked")


def parts() -> list[Part]:
    """Returns all parts after the first, the most valuable first."""

    def checks(folder: str, more: bool) -> Part:
        span = [SAMPLE, None] if more else [0, SAMPLE]
        name = f"{folder} checks{' more' if more else ''}"
        args = {"do": "checks", "folder": folder, "span": span}
        return Part(name, "checks", args, slice_s=120, alone=False)

    def times(folder: str, direction: str, slice_s: float = 30) -> Part:
        args = {"do": "times", "folder": folder, "direction": direction}
        return Part(f"{folder} {direction}", "kernels", args, slice_s)

    def torch_times(folder: str, direction: str) -> list[Part]:
        args = {"do": "torch", "folder": folder, "direction": direction}
        name = f"{folder} {direction} torch"
        return [Part(name, "kernels", args, 20)] if folder in TORCH else []

    def step(variant: str) -> Part:
        return Part(f"step {variant}", "train", {"do": "step", "variant": variant})

    return [
        *(checks(folder, False) for folder in FOLDERS),
        *(
            Part(f"{name} exact", "checks", {"do": "exact", "folder": name}, 90, False)
            for name in FUSED
        ),
        Part("losses", "checks", {"do": "losses"}, 90, False),
        tuning(TUNE_FIRST[0]),
        *(tuning(name) for name in TUNE_SERVED),
        times("paged", FORWARD),
        Part("serving", "serving", {"do": "serving"}, 120),
        times("attention", FORWARD, 60),
        *torch_times("attention", FORWARD),
        times("gemm", FORWARD),
        *torch_times("gemm", FORWARD),
        times("attention", BOTH, 45),
        *torch_times("attention", BOTH),
        *(step(variant) for variant in TRAIN_FIRST),
        *(
            part
            for folder in ("quant_gemm", "grouped", "norm", "tile_sparse", "quantize")
            for part in (times(folder, FORWARD), *torch_times(folder, FORWARD))
        ),
        *(tuning(name) for name in TUNE_FIRST[1:14]),
        Part("bert", "kernels", {"do": "bert"}, 30),
        *(
            part
            for folder in FOLDERS
            if folder not in ("attention", *UNDIFFERENTIATED)
            for part in (times(folder, BOTH, 20), *torch_times(folder, BOTH))
        ),
        *(tuning(name) for name in TUNE_FIRST[14:]),
        *(Part(f"{name} times", "overlap", {"do": "hidden", "folder": name}, 60) for name in FUSED),
        *(step(variant) for variant in TRAIN_REST),
        *(checks(folder, True) for folder in FOLDERS),
    ]


def tuning(name: str) -> Part:
    """Returns the part that measures one row of the table."""
    return Part(f"tune {name}", TUNED, {"do": "tune", "tuning": name}, slice_s=60)


def chosen(all_parts: list[Part], words: list[str]) -> list[Part]:
    """Returns the parts whose name is or has one of the words, in the order of the words.

    Without words it returns all parts. Raises: SystemExit for a word that no part has.
    """
    known = {word for p in all_parts for word in (p.name, *p.name.split())} | ALIASES.keys()
    for word in words:
        if word not in known:
            names = ", ".join([*ALIASES, *(part.name for part in all_parts)])
            near = did_you_mean(word, known)
            sys.exit(f"error: {word!r} is not a word of a part;{near} The parts are {names}")
    if not words:
        return all_parts
    matches: dict[str, Part] = {}
    for word in (each for typed in words for each in ALIASES.get(typed, (typed,))):
        matches |= {p.name: p for p in all_parts if word in (p.name, *p.name.split())}
    return list(matches.values())


def has_driver() -> bool:
    """Whether there may be a GPU; jax decides."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return os.environ.get("JAX_PLATFORMS", "cuda") != "cpu"


def environment(rehearsal: bool) -> dict[str, str]:
    """Returns the environment of workers: several processes, some with PyTorch, share the GPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"JAX_PLATFORMS": "cpu"} if rehearsal else {}
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
        **more,
    }


def need_driver() -> None:
    """Raises: SystemExit without a GPU, before anything begins."""
    if not has_driver():
        sys.exit("error: jax finds no GPU (is the CUDA plugin installed: uv sync --extra gpu?)")


def run(first: Part, selected: list[Part], default_folder: str) -> int:
    """Runs the first part and the selected ones, as the flags say. Returns: the exit code."""
    rehearsal = REHEARSE.value
    if not rehearsal:
        need_driver()
    try:
        folder = results.writable_folder(OUT.value or default_folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # workers are ended on the way out
    minutes = MINUTES.value or (REHEARSAL_MINUTES if rehearsal else 9)
    layer = "rehearsed on a CPU: times mean nothing" if rehearsal else "measured on {}"
    store = Store(folder, results.commit() if COMMIT.value is None else COMMIT.value, layer)
    spec: Any = {"rehearsal": rehearsal, "limit_scale": REHEARSAL_SCALE if rehearsal else 1}
    scale = spec["limit_scale"]
    selected = [dataclasses.replace(part, slice_s=scale * part.slice_s) for part in selected]
    end = time.monotonic() + 60 * minutes
    session = Session(WORKER, store, end, env=environment(rehearsal), spec=spec, again=AGAIN.value)
    return session.run(first, selected)


def main(argv: list[str]) -> int:
    """Runs the parts that are named, or all."""
    return run(SMOKE, chosen(parts(), argv[1:]), os.environ.get("OUT", "runs/gpu_check"))


if __name__ == "__main__":
    script.start(main)
