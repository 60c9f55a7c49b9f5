"""One part of gpu_check.py or tune.py, in its own process (channel.py: the messages).

A part that waits for its turn traces and compiles what it will measure first; it starts no kernel.
Parts are imported when they are asked for: a package that is missing costs its parts only.

For tests, the environment variable GPU_CHECK_FAULTS plants faults, 'PART:FAULT;PART:FAULT', on the
first item of a part: `hang` (never returns), `exit` (the process leaves), `cuda` (raises what
XLA raises for a CUDA error), `wrong` (the folder's kernel gives 1.05 times its result) and
`missing` (a package that the part imports).
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.gpu_session.channel import Channel, Item, reason, work

ROOT = Path(__file__).parents[2]
SMI = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def smoke(spec: dict[str, Any]) -> list[Item]:
    """Returns items: this machine, one tiny kernel, and the rates that no kernel exceeds."""
    import jax

    from pallas_kernels import bench
    from pallas_kernels.gemm import bench as gemm

    rehearsal = spec["rehearsal"]

    def machine() -> dict[str, Any]:
        device = jax.devices()[0]
        row: dict[str, Any] = {"jax": jax.__version__, "cores": os.cpu_count()}
        if rehearsal:
            return row
        asked = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        told = told if shutil.which("nvidia-smi") else "no nvidia-smi"
        return row | {"sms": device.core_count, "nvidia_smi": told}

    def kernel() -> dict[str, Any]:
        ratios = gemm.errors(gemm.TINY_CASES[0], "interpret" if rehearsal else "hopper")
        return {"errors": ratios, "passed": max(ratios.values()) <= 1}

    def peaks() -> dict[str, Any]:
        return bench.peaks(256, bench.wall_clock) if rehearsal else bench.peaks()

    return [
        Item("machine", machine, limit_s=20),
        Item("one kernel", kernel, limit_s=90),
        Item("peaks", peaks, limit_s=60),
    ]


def build(spec: dict[str, Any], channel: Channel) -> list[Item]:
    """Returns the items of a part."""
    do, rehearsal = spec["do"], spec["rehearsal"]
    if do == "device":
        return []
    if do == "smoke":
        return smoke(spec)
    if do in ("losses", "step"):
        from scripts.gpu_session import training

        if do == "losses":
            return training.losses_items(rehearsal)
        return training.step_items(spec["variant"], rehearsal)
    if do == "serving":
        from scripts.gpu_session import serving

        return serving.items(rehearsal)
    if do == "tune":
        from scripts.gpu_session import tune

        return tune.items(spec["tuning"], channel, rehearsal)
    from scripts.gpu_session import kernels

    if do == "bert":
        return kernels.bert(rehearsal)
    if do == "checks":
        return kernels.checks(spec["folder"], spec["span"], rehearsal)
    if do == "torch":
        return kernels.torch_times(spec["folder"], spec["direction"], rehearsal)
    if do == "times":
        return kernels.times(spec["folder"], spec["direction"], rehearsal)
    return kernels.fused(spec["folder"], do == "exact", rehearsal)


# ---- planted faults

CHANGED = {  # folder -> where its kernel is looked up
    "attention": ("pallas_kernels.attention.bench", "varlen_attention"),
    "gemm": ("pallas_kernels", "fused_gemm"),
    "grouped": ("pallas_kernels", "grouped_matmul"),
    "norm": ("pallas_kernels", "norm_unpack"),
    "quant_gemm": ("pallas_kernels", "quant_matmul"),
    "quantize": ("pallas_kernels.quantize.api", "subtract_quantize"),
    "tile_sparse": ("pallas_kernels.tile_sparse.bench", "tile_sparse_matmul"),
}


def planted(part: str) -> str | None:
    """Returns the planted fault of this part, None without one."""
    faults = filter(None, os.environ.get("GPU_CHECK_FAULTS", "").split(";"))
    return dict(each.rsplit(":", 1) for each in faults).get(part)


def plant(fault: str | None, spec: dict[str, Any], items: list[Item]) -> list[Item]:
    """Returns the items with a fault in the first."""
    if fault == "wrong":
        module, name = CHANGED[spec["folder"]]
        _make_wrong(importlib.import_module(module), name)
    if fault not in ("hang", "exit", "cuda") or not items:
        return items

    def run() -> Any:
        if fault == "hang":
            time.sleep(1e6)
        if fault == "exit":
            os._exit(3)
        import jax

        raise jax.errors.JaxRuntimeError(
            "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
        )

    return [dataclasses.replace(items[0], run=run, limit_s=1), *items[1:]]


def _make_wrong(module: Any, name: str) -> None:
    import jax

    right = getattr(module, name)

    def wrong(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        off = 1.0 if options["implementation"] == "reference" else 1.05
        return jax.tree.map(lambda y: (y * off).astype(y.dtype), result)

    setattr(module, name, wrong)


# ---- the process


def main() -> int:
    """Runs one part."""
    channel = Channel()
    spec = channel.spec
    fault = planted(spec["part"])
    try:
        if fault == "missing":
            raise ModuleNotFoundError("No module named 'planted'")
        import jax

        from pallas_kernels import tuned

        if spec["rehearsal"]:
            jax.config.update("jax_num_cpu_devices", 8)  # the interpreter needs as many threads
            jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of it
        jax.config.update("jax_compilation_cache_dir", str(ROOT / "runs" / "gpu_cache"))
        try:
            device = jax.devices()[0]
        except RuntimeError as error:
            channel.end("refused", f"jax finds no device: {error}")
            return 1
        kind, slug = device.device_kind, tuned.slug(device.device_kind)
        if device.platform != "gpu":
            if not spec["rehearsal"]:
                told = "jax finds no GPU (is the CUDA plugin installed: uv sync --extra gpu?)"
                channel.end("refused", told)
                return 1
            slug = "rehearsal"
        channel.hello(device=kind, slug=slug)
        items = build(spec, channel)
    except ImportError as error:
        channel.end("missing", reason(error))
        return 1
    probe = lambda: jax.block_until_ready(jax.numpy.add(1, 1))  # noqa: E731
    work(channel, plant(fault, spec, items), probe)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a CUDA context that failed may take minutes to tear down
