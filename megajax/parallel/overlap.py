"""Which implementation of a collective matmul runs, and why.

A table that was measured on this kind of GPU decides (pallas_kernels/tuned: one rank beside ghosts,
pallas_kernels/collective/tunings.py); without one, the cost model (cost/rings.py) says what a ring
would take beside plain XLA, and only a clear gain counts, so that nothing is lost where nothing was
measured. Reasons say which of the two it was.

Legend: R ranks.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from absl import logging

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard, find_card
from megajax.cost import rings
from pallas_kernels import dispatch, tuned
from pallas_kernels.collective import api as kernels

Implementation = Literal["xla", "ring", "fused"]
Overlap = Literal["auto", "xla", "ring", "fused"]
IMPLEMENTATIONS = (None, "xla", "ring", "fused")
SUMS = ("float32", "bfloat16", "float16")
# Rows of all ranks; the width of what travels; the other width of each product that shares it.
Shape = tuple[int, int, tuple[int, ...]]
# jax.sharding.AbstractDevice: platform, device_kind, num_cores; None of a mesh that has none.
Device = Any

# A ring is taken when the model gives it at most this part of plain XLA's time, its steps counted
# twice (chosen: the model knows no clocks and no contention), with at least so many rows a rank
# (chosen: below, GPT-3's products lose) and at most so many ranks (an NVLink domain).
GAIN, ROWS, NODE = 0.95, 512, 8
# Octaves over all sizes within which a measured row speaks for a shape (chosen: a quarter of the
# rows is another problem).
NEAR = 1.0
MEASURED = "measured on one GPU of this kind, its link emulated"


def choose(
    op: str,
    implementation: str | None,
    shape: Shape,
    R: int,
    dtype: Any,
    device: Device = None,
) -> Implementation:
    """Returns what runs. None is chosen here, and its reason is in the log once.

    device: what the program is for; None, inside a shard_map: its mesh's.
    Raises: as `check`.
    """
    check(op, implementation, shape, R, dtype, device)
    if implementation is not None:
        return implementation  # type: ignore[return-value]
    word, why = best(op, shape, R, jnp.dtype(dtype).name, device or _device())
    log_once(op, shape, R, word, why)
    return word


def check(
    op: str, implementation: str | None, shape: Shape, R: int, dtype: Any, device: Device = None
) -> None:
    """Raises: ValueError for an unknown word; NotImplementedError where 'fused' cannot run."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation={implementation!r}; there are {IMPLEMENTATIONS}")
    if implementation == "fused" and (why := fused_reasons(op, shape, R, dtype, device)):
        others = "'xla'" if op == kernels.REDUCE else "'ring', 'xla'"
        raise NotImplementedError(
            f"{op}: implementation='fused' cannot run here: {'; '.join(why)}; use {others}, or "
            "None to let it choose (--overlap=auto)"
        )


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
    op: str, shape: Shape, R: int, dtype: Any, device: Device = None
) -> tuple[str, ...]:
    """Returns what keeps the kernel of `op` from running. Empty: it runs. device: see `choose`."""
    _, contracted, widths = _problem(op, shape)
    return kernels.reasons(op, contracted, widths, R, dtype, device)


def device_reason(device: Device) -> str | None:
    """Returns what keeps any fused kernel from running on a device, whatever the shape."""
    kind = "cpu" if device is None or device.platform == "cpu" else device.device_kind
    return None if dispatch.is_hopper(kind) else f"needs Hopper GPUs, found {kind}"


def refuse_fused(overlap: Overlap, device: Device) -> None:
    """Refuses fused kernels on a device that has none, whatever the shape. Raises: UserError."""
    why = device_reason(device)
    if overlap == "fused" and why:
        raise UserError(f"overlap=fused: {why}; use auto, ring or xla (--overlap)")


def _problem(op: str, shape: Shape) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns (rows, K of each input, columns of each weight) as the kernels count them."""
    rows, width, parts = shape
    return (rows, (width,), parts) if op == kernels.GATHER else (rows, parts, (width,))


def _device() -> Device:
    """Inside a shard_map: what the program is compiled for, be it there or not."""
    return jax.sharding.get_abstract_mesh().abstract_device


def best(op: str, shape: Shape, R: int, dtype: str, device: Device) -> tuple[Implementation, str]:
    """Returns (what to take, why) for a product whose gradients are wanted too.

    op: 'all_gather_matmul' or 'matmul_reduce_scatter'; or 'matmul_all_reduce', forward only.
    """
    if R == 1:
        return "xla", "one rank: nothing travels"
    if device is None or device.platform == "cpu":
        return "xla", "a CPU has nothing to hide"
    rows, width, parts = shape
    _, contracted, widths = _problem(op, shape)
    each = rows if op == kernels.REDUCE else rows // R
    word = measured(op, kernels.key(op, R, each, sum(contracted), sum(widths)))
    if word and (word != "fused" or not fused_reasons(op, shape, R, dtype, device)):
        return word, MEASURED
    if op == kernels.REDUCE:
        return "xla", "so few rows have nothing to hide behind, and no kernel was measured"
    card = find_card(device.device_kind)
    if card is None or not device.num_cores or R > NODE:
        return "xla", f"nothing is known of {R} x {device.device_kind}"
    plain, ring = simulate(op, shape, R, dtype, card, device.num_cores)
    gains = rows >= ROWS * R and ring + R * rings.STEP_S <= GAIN * plain
    return "ring" if gains else "xla", (
        "simulated, not measured, so only a clear gain counts: forward and backward "
        f"{ring * 1e6:.0f} us as a ring, {plain * 1e6:.0f} us as plain XLA"
    )


def measured(op: str, key: tuned.Key) -> Implementation | None:
    """Returns what a table found fastest; None without a row, or where the nearest is far off."""
    row = tuned.find(op, key)
    if row is None or tuned.distance(key, row["key"]) > NEAR:
        return None
    return row["fastest"]


def simulate(
    op: str, shape: Shape, R: int, dtype: str, card: DeviceCard, cores: int
) -> tuple[float, float]:
    """Returns the cost model's seconds of (plain XLA, the ring), both passes without dw."""
    model = rings.gather_matmul if op == kernels.GATHER else rings.matmul_scatter
    return model(rings.Rank(card, cores, R, dtype), *shape)


@functools.cache
def log_once(op: str, shape: tuple, R: int, word: str, why: str) -> None:
    """Says a choice and its reason, the first time."""
    logging.info("%s of %s on %d ranks runs as %s (%s)", op, shape, R, word, why)
