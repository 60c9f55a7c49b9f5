"""Deviceless compilation: H100s as a compile target on a machine without a GPU.

Needs the wheels of the extra `aot` (the CUDA plugin without a driver). What comes out is the real
scheduled GPU program: its collectives, memory and kernels can be inspected, not run.
"""

import functools
import os

import jax
from jax.experimental import topologies

# NVIDIA H100 SXM5 80 GB as XLA's GPU compiler wants it described. Limits: CUDA C programming guide,
# compute capability 9.0; clock and bandwidth: H100 datasheet.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"  dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@functools.cache
def devices(nodes: int = 1, gpus_per_node: int = 8) -> tuple[jax.Device, ...]:
    """Returns the H100s of a cluster that does not exist, node by node.

    Raises: NotImplementedError when the extra `aot` is not installed.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there is no driver to ask
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="h100",
            target_config=H100,
            topology=f"1x{nodes}x{gpus_per_node}",
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise NotImplementedError(
            f"deviceless compilation needs the CUDA plugin: uv sync --extra aot ({error})"
        ) from error
    return tuple(topology.devices)
