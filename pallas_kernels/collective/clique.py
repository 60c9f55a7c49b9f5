"""Which GPUs a fused kernel ties together, and which collectives must not run at the same time.

A kernel whose ranks are those of one mesh axis still ties ALL devices of its mesh together: JAX
makes the whole mesh its clique (jax/experimental/mosaic/gpu/core.py: xla_replica_ids), and XLA
exchanges the addresses of their memory before the kernel starts. So the whole mesh must reach each
other's memory, whatever the axis.

The kernel's thread blocks fill all SMs and wait for peers. A collective that XLA runs at the same
time, over another axis, holds SMs of its own and waits for its peers. If one GPU starts the kernel
first and another GPU the collective, each waits for the other for ever. Collectives over the same
axis are as dangerous while they run beside the kernel: a program with fused kernels is compiled
without asynchronous collectives (megajax/parallel/overlap.py: compiler_options).
"""

import math
from collections.abc import Mapping, Sequence

NODE = 8  # GPUs that reach each other's memory
Sizes = Mapping[str, int]  # of all axes of a mesh


def out_of_reach(sizes: Sizes) -> tuple[str, ...]:
    """Returns the reasons why devices of a mesh cannot reach each other's memory; empty: they can.

    Devices are numbered node by node.
    """
    devices = math.prod(sizes.values())
    if devices <= NODE:
        return ()
    return (f"needs a whole mesh of at most {NODE} GPUs, those of a node, found {devices}",)


def concurrent(sizes: Sizes, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the reason why a collective may run while a kernel over `axes` waits, if one may."""
    others = [f"{axis} {size}" for axis, size in sizes.items() if size > 1 and axis not in axes]
    if not others:
        return ()
    return (
        f"needs the GPUs for its {' x '.join(axes)} ranks alone: collectives over "
        f"{', '.join(others)} may hold SMs, and each would wait for the other for ever",
    )
