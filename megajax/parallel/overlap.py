"""Which implementation of a collective matmul runs, and why: the one place that chooses and checks.

A row that was measured across real ranks of this kind of GPU decides (pallas_kernels/tuned.py says
what a row must show; scripts/tune.py measures one GPU beside an emulated link, and such a row gives
an explicit 'fused' its tile and decides nothing). Otherwise the cost model (cost/traffic.py)
compares a ring with plain XLA, and only a clear gain counts, so that nothing is lost where nothing
was measured. Reasons say which of the two it was.

A fused kernel needs its GPUs for itself (pallas_kernels/collective/clique.py). `refuse_mesh`
refuses --overlap=fused on other meshes when a job is configured; 'auto' never takes it there. On
the meshes that remain, XLA's own collectives of the same program must not run beside the kernel
either: `compiler_options` sees to that.

Legend: R ranks.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import AbstractMesh, Mesh

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard, find_card
from megajax.cost import traffic
from pallas_kernels import tuned
from pallas_kernels.collective import clique

Implementation = Literal["xla", "ring", "fused"]
Overlap = Literal["auto", "xla", "ring", "fused"]
IMPLEMENTATIONS = (None, "xla", "ring", "fused")
# Names of the products that bring their communication, functions of pallas_kernels.
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
DISPATCH, COMBINE = "dispatch_grouped_matmul", "grouped_matmul_combine"
SUMS = ("float32", "bfloat16", "float16")
# Rows of all ranks; the width of what travels; the other width of each product that shares it.
Shape = tuple[int, int, tuple[int, ...]]
# jax.Device or jax.sharding.AbstractDevice: platform, device_kind.
Device = Any

# A ring is taken when the model gives it at most this part of plain XLA's time, its steps counted
# twice (chosen: the model knows no clocks and no contention), with at least so many rows a rank
# (chosen: below, GPT-3's products lose) and at most the ranks of a node.
GAIN, ROWS = 0.95, 512
MEASURED = "measured across ranks of this kind"

# What makes XLA start nothing that waits for other GPUs beside a fused kernel. Its collectives run
# on the stream of the kernels, which all GPUs work off in the program's order, instead of streams
# of their own, and CUDA graphs keep that order. Copies and fusions may still run beside a kernel:
# they wait for no other GPU, so they end.
COLLECTIVES = (
    "ALLREDUCE",
    "ALLGATHER",
    "REDUCESCATTER",
    "COLLECTIVEBROADCAST",
    "ALLTOALL",
    "COLLECTIVEPERMUTE",
    "RAGGEDALLTOALL",
)
IN_ORDER = {
    "xla_gpu_disable_async_collectives": ",".join(COLLECTIVES),
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
}


def choose(
    op: str,
    implementation: str | None,
    shape: Shape,
    axis: str,
    dtype: Any,
    mesh: AbstractMesh | None = None,
) -> Implementation:
    """Returns what runs. None is chosen here, and its reason is in the log once.

    op: 'all_gather_matmul', 'matmul_reduce_scatter' or 'matmul_all_reduce'. mesh: what the program
    is for; None: the one that it is traced under.
    Raises: ValueError for an unknown word; NotImplementedError where what was asked for cannot run.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation={implementation!r}; there are {IMPLEMENTATIONS}")
    mesh = mesh or jax.sharding.get_abstract_mesh()
    if implementation == "ring" and op == REDUCE:
        raise NotImplementedError(
            f"{op}: implementation='ring': rows that are not cut leave a ring nothing to hide "
            "its hops behind; use 'xla', or matmul_reduce_scatter"
        )
    if implementation == "fused" and (why := fused_reasons(op, shape, axis, dtype, mesh)):
        others = "'xla'" if op == REDUCE else "'ring', 'xla'"
        raise NotImplementedError(
            f"{op}: implementation='fused' cannot run here: {'; '.join(why)}; use {others}, or "
            "None to let it choose (--overlap=auto)"
        )
    if implementation is not None:
        return implementation  # type: ignore[return-value]
    word, why = best(op, shape, axis, jnp.dtype(dtype).name, mesh)
    log_once(op, shape, mesh.shape[axis], word, why)
    return word


def sum_dtype(op: str, acc_dtype: Any) -> str:
    """Returns the name of the type in which sums cross ranks.

    Raises: UserError for a type that products have not.
    """
    try:
        name = jnp.dtype(acc_dtype).name
    except TypeError:
        name = str(acc_dtype)
    if name not in SUMS:
        raise UserError(
            f"{op}: acc_dtype={name} must be one of {', '.join(SUMS)}; nearest: float32"
        )
    return name


def fused_reasons(
    op: str, shape: Shape, axis: str, dtype: Any, mesh: AbstractMesh
) -> tuple[str, ...]:
    """Returns what keeps the kernel of `op` from running. Empty: it runs."""
    from pallas_kernels.collective import api as kernels

    _, contracted, widths = _problem(op, shape)
    return kernels.reasons(op, contracted, widths, mesh.shape[axis], dtype, mesh)


def refuse_fused(overlap: Overlap, device: Device) -> None:
    """Refuses fused kernels on a device that has none, whatever the shape. Raises: UserError."""
    if overlap != "fused":
        return
    from pallas_kernels.collective import api as kernels

    if why := kernels.device_reasons(device):
        raise UserError(f"overlap=fused: {why[0]}; use auto, ring or xla (--overlap)")


def refuse_mesh(overlap: Overlap, sizes: clique.Sizes) -> None:
    """Refuses fused kernels on a mesh of these {axis: size} on which they could wait for ever.

    Products of tensor parallelism have the ranks of `tensor`, those of experts the ranks of
    `expert` and `tensor`.
    Raises: UserError.
    """
    if overlap != "fused":
        return
    tensor, expert = sizes.get("tensor", 1), sizes.get("expert", 1)
    if tensor == expert == 1:  # no product has a collective
        return
    why = clique.out_of_reach(sizes)
    if tensor > 1:
        why += clique.concurrent(sizes, ("tensor",))
    else:
        why += clique.concurrent(sizes, ("expert",))
    if not why:
        return
    axes = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size > 1)
    axis, size = ("tensor", tensor) if tensor > 1 else ("expert", expert)
    raise UserError(
        f"overlap=fused with {axes}: {'; '.join(why)}; nearest: overlap=auto, or a mesh of "
        f"mesh.{axis}={min(size, clique.NODE)} and no other axis (--overlap, --mesh.{axis})"
    )


def compiler_options(overlap: Overlap, mesh: Mesh, unlike: bool = False) -> dict[str, Any] | None:
    """Returns what to compile a program with whose products may be fused: jax.jit(compiler_options=
    ...). None: nothing special.

    unlike: other processes compile other products between the same collectives. The scheduler that
    hides collectives orders them by how long it takes the products to be.

    A kernel fills all SMs of a GPU and waits for its peers. An asynchronous collective of the same
    program, of the head or of a gradient, holds SMs on one GPU and waits for another on which the
    kernel started first: each would wait for the other for ever. So collectives are synchronous
    wherever a kernel may run; 'auto' may take one where a row of a table says so, and rings hide
    nothing there.
    """
    device, sizes = mesh.devices.flat[0], mesh.shape
    if unlike and device.platform != "cpu":
        return {"xla_gpu_enable_latency_hiding_scheduler": False}
    alone = any(sizes[a] > 1 and not clique.concurrent(sizes, (a,)) for a in ("tensor", "expert"))
    if device.platform == "cpu" or not alone:
        return None
    may = overlap == "auto" and any(
        tuned.has_fastest(op, "fused", device.device_kind)
        for op in (GATHER, SCATTER, REDUCE, DISPATCH, COMBINE)
    )
    return dict(IN_ORDER) if overlap == "fused" or may else None


def _problem(op: str, shape: Shape) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns (rows, K of each input, columns of each weight) as the kernels count them."""
    rows, width, parts = shape
    return (rows, (width,), parts) if op == GATHER else (rows, parts, (width,))


def best(
    op: str, shape: Shape, axis: str, dtype: str, mesh: AbstractMesh
) -> tuple[Implementation, str]:
    """Returns (what to take, why) for a product whose gradients are wanted too.

    op: as in `choose`; 'matmul_all_reduce' has no gradient of interest.
    """
    R, device = mesh.shape[axis], mesh.abstract_device
    if R == 1:
        return "xla", "one rank: nothing travels"
    if device is None or device.platform == "cpu":
        return "xla", "a CPU has nothing to hide"
    from pallas_kernels.collective import api as kernels

    rows, width, parts = shape
    _, contracted, widths = _problem(op, shape)
    each = rows if op == REDUCE else rows // R
    word = measured(op, kernels.key(op, R, each, sum(contracted), sum(widths)), device)
    alone = not (
        fused_reasons(op, shape, axis, dtype, mesh) + clique.concurrent(mesh.shape, (axis,))
    )
    if word and (word != "fused" or alone):
        return word, MEASURED
    if op == REDUCE:
        return "xla", "so few rows have nothing to hide behind, and no kernel was measured"
    card = find_card(device.device_kind, "bfloat16")
    if card is None or not device.num_cores or R > clique.NODE:
        return "xla", f"nothing is known of {R} x {device.device_kind}"
    plain, ring = simulate(op, shape, R, dtype, card, device.num_cores)
    gains = rows >= ROWS * R and ring + R * traffic.STEP_S <= GAIN * plain
    return "ring" if gains else "xla", (
        "simulated, not measured, so only a clear gain counts: forward and backward "
        f"{ring * 1e6:.0f} us as a ring, {plain * 1e6:.0f} us as plain XLA"
    )


def measured(op: str, key: tuned.Key, device: Device) -> Implementation | None:
    """Returns the implementation that was measured as the fastest across real ranks; None: no
    measurement."""
    row = tuned.find(op, key, kind=device.device_kind)
    if tuned.against(row, "fused") is None:
        return "fused"
    near = row and row["octaves"] <= tuned.NEAR and row.get("link") == "real"
    return "xla" if row and near and row["fastest"] == "xla" else None


def simulate(
    op: str, shape: Shape, R: int, dtype: str, card: DeviceCard, cores: int
) -> tuple[float, float]:
    """Returns the cost model's seconds of (plain XLA, the ring), both passes without dw."""
    model = traffic.gather_matmul if op == GATHER else traffic.matmul_scatter
    return model(traffic.Rank(card, cores, R, dtype), *shape)


@functools.cache
def log_once(op: str, shape: tuple, R: int, word: str, why: str) -> None:
    """Says a choice and its reason, the first time."""
    logging.info("%s of %s on %d ranks runs as %s (%s)", op, shape, R, word, why)
