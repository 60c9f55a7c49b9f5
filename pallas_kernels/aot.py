"""Deviceless compilation: GPUs as a compile target on a machine without a GPU.

Needs the wheels of the extra `aot` (the CUDA plugin without a driver). What comes out is the real
scheduled GPU program: its collectives, memory and kernels can be inspected, not run.
"""

import dataclasses
import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.hopper.cards import CHIPS


def target(kind: str) -> str:
    """Returns a chip of CHIPS as the target description (a text proto) of XLA's GPU compiler."""
    name, major, cores, shared_core, shared_block, l2, clock, memory, bandwidth = CHIPS[kind]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: {shared_core}
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {int(bandwidth)}  l2_cache_size: {l2}  clock_rate_ghz: {clock}
  device_memory_size: {int(memory)}
  shared_memory_per_block_optin: {shared_block}  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"  dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""


@functools.cache
def devices(nodes: int = 1, gpus_per_node: int = 8, kind: str = "h100") -> tuple[jax.Device, ...]:
    """Returns the GPUs of a cluster that does not exist, node by node. kind: a key of CHIPS.

    Raises: NotImplementedError when the extra `aot` is not installed.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there is no driver to ask
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=kind,
            target_config=target(kind),
            topology=f"1x{nodes}x{gpus_per_node}",
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise NotImplementedError(
            f"deviceless compilation needs the CUDA plugin: uv sync --extra aot ({error})"
        ) from error
    return tuple(topology.devices)


def compile(lowered: jax.stages.Lowered, options: dict[str, Any] | None = None) -> Any:
    """Returns the compiled program of a step lowered for `devices`.

    options: compiler options. The cache on disk is left out: it takes such a program and cannot
    give it back, for reading one needs a client with devices (jax 0.11).
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        return lowered.compile(compiler_options=options)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        return lowered.compile(compiler_options=options)
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


# What ptxas remarks on wgmma where it costs speed. "wgmma.mma_async instructions are serialized due
# to" a reason has a number for each reason (C7510, C7511, C7512, C7515 and others). C7517 says that
# a "wgmma.wait_group", in CUDA 12 a "warpgroup.wait", "is injected": the kernel reads registers of
# a wgmma in flight, so ptxas waits there. C7519, an injected warpgroup.arrive, orders registers
# before the next wgmma and waits for none in flight: it does not count.
SERIAL = re.compile(
    r"\(C751[07]\)|instructions are serialized|(?:wgmma\.wait_group|warpgroup\.wait) is injected"
)


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What ptxas says of one Mosaic GPU kernel.

    registers: those of a thread at launch. spilled_bytes: stores and loads to local memory.
    shared_bytes: shared memory of a thread block, without barriers. serialized: ptxas made wgmma
    instructions wait, which costs most of their speed: each for the one before it, or all at a
    place where the kernel has no wait (`SERIAL`).
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    serialized: bool


def report(function: Callable[..., Any], *args: Any) -> list[KernelReport]:
    """Compiles a function for `devices`, its arguments being abstract; one report a kernel.

    Raises: NotImplementedError where the compiler left no report.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        before = {name: os.environ.get(name) for name in flags}
        os.environ.update(flags)
        try:
            compile(jax.jit(function).lower(*args))
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value
        kernels = [_parse(path) for path in sorted(pathlib.Path(folder).glob("*.ptxas"))]
    if not kernels:
        raise NotImplementedError(
            "the compiler left no ptxas report; is the kernel in the program?"
        )
    return kernels


def _parse(path: pathlib.Path) -> KernelReport:
    text = path.read_text()
    resources = path.with_suffix(".resources.txt").read_text()

    def find(pattern: str, source: str = text) -> str:
        match = re.search(pattern, source)
        if match is None:
            raise NotImplementedError(f"ptxas says nothing of {pattern!r}: {source[:300]}")
        return match[1]

    spilled = (int(find(rf"(\d+) bytes spill {what}")) for what in ("stores", "loads"))
    return KernelReport(
        name=find(r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?'"),
        registers=int(find(r"Used (\d+) registers")),
        spilled_bytes=sum(spilled),
        shared_bytes=int(find(r"smem_scratch_bytes=(\d+)", resources)),
        serialized=SERIAL.search(text) is not None,
    )
