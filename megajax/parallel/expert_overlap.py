"""Which implementation of an expert layer's two halves runs, and why; see overlap.py.

A row that was measured across real ranks of this kind of GPU decides; without one, the cost model
(cost/rings.py) compares a ring with plain XLA, and only a clear gain counts; the fused kernels are
taken where they were measured, never by simulation, and never where another axis of the mesh may
communicate beside them (pallas_kernels/collective/clique.py).
Where experts lie on several nodes XLA's collectives are left alone: a ring would send every token
over the slow links as often as there are ranks behind them.

The fused kernels send a token once for each of its A choices and each of the R / G tensor ranks
that cut an expert, and bring as many float32 answers back; XLA sends it to R - 1 ranks and their
float32 sums back. So cut experts are fused where that is asked for, never by choice: the tables'
rival is plain XLA for whole experts, which has R / G times as many tokens for as many rows.

Legend: R ranks that hold tokens, G ranks of the expert axis.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from megajax.core.hardware import DeviceCard, find_card
from megajax.cost import rings
from megajax.parallel import overlap
from megajax.parallel.overlap import Implementation
from pallas_kernels import tuned
from pallas_kernels.collective import clique
from pallas_kernels.expert import api as kernels
from pallas_kernels.expert import fusions

DISPATCH, COMBINE = kernels.DISPATCH, kernels.COMBINE
HALVES = (DISPATCH, COMBINE)


class Layer(NamedTuple):
    """An expert layer on one rank; hidden: columns of each first product, or depth of the second.

    tokens: of a rank, top choices each, width wide. experts: of a rank. reached: other ranks that
    plain XLA sends a token to.
    """

    tokens: int
    top: int
    width: int
    experts: int
    hidden: tuple[int, ...]
    ranks: int
    groups: int
    dtype: str
    reached: int

    @property
    def rows(self) -> int:
        """Rows that one source has at a rank's experts, if all sources have as many."""
        return self.tokens * self.top // self.groups


def choose(
    op: str,
    implementation: str | None,
    tokens: tuple[int, int, int],
    weights: Sequence[jax.Array],
    axes: tuple[str, str | None],
) -> Implementation:
    """Returns what runs, inside a shard_map. None is chosen here, its reason in the log once.

    Args: op: of HALVES. tokens: (T, A, D) of a rank. weights: the products of this op, (E, K, N).
    Raises: ValueError for an unknown word; NotImplementedError where 'fused' cannot run.
    """
    mesh, (E, dtype) = jax.sharding.get_abstract_mesh(), (weights[0].shape[0], weights[0].dtype)
    hidden = tuple(w.shape[2 if op == DISPATCH else 1] for w in weights)
    layer = describe(mesh.shape, tokens, E, hidden, axes, dtype.name, lanes=True)
    return choose_all({op: layer}, implementation, axes, mesh)


def choose_all(
    halves: Mapping[str, Layer],
    implementation: str | None,
    axes: tuple[str, str | None],
    mesh: AbstractMesh,
) -> Implementation:
    """Does what `choose` does, for one half or both; only here are choices checked and made."""
    name = " and ".join(halves)
    if implementation not in overlap.IMPLEMENTATIONS:
        words = overlap.IMPLEMENTATIONS
        raise ValueError(f"{name}: implementation={implementation!r}; there are {words}")
    if implementation == "fused":
        for op, layer in halves.items():
            if why := fused_reasons(op, layer, mesh):
                raise NotImplementedError(
                    f"{op}: implementation='fused' cannot run here: {'; '.join(why)}; use 'ring', "
                    "'xla', or None to let it choose (--overlap=auto)"
                )
    if implementation is not None:
        return implementation  # type: ignore[return-value]
    word, why = best(halves, axes, mesh)
    layer = next(iter(halves.values()))
    overlap.log_once(name, tuple(layer), layer.ranks, word, why)
    return word


def describe(
    sizes: Any,
    tokens: tuple[int, int, int],
    experts: int,
    hidden: tuple[int, ...],
    axes: tuple[str, str | None],
    dtype: str,
    lanes: bool = False,
) -> Layer:
    """Returns the Layer on a mesh of these {axis: size}. lanes: plain XLA may send in lanes."""
    groups = sizes[axes[0]]
    beside = sizes[axes[1]] if axes[1] is not None else 1
    reached = groups * beside - 1
    if lanes and groups > 2 * tokens[1]:
        reached = min(reached, beside * tokens[1])
    return Layer(*tokens, experts, hidden, groups * beside, groups, dtype, reached)


def fused_reasons(op: str, layer: Layer, mesh: AbstractMesh) -> tuple[str, ...]:
    """Returns what keeps the kernel of `op`, or that of its backward pass, from running."""
    wide, deep = [layer.width] * len(layer.hidden), list(layer.hidden)
    other = COMBINE if op == DISPATCH else DISPATCH
    found = []
    for which in (op, other):
        contracted, widths = (wide, deep) if which == DISPATCH else (deep, wide)
        why = kernels.reasons(which, contracted, widths, layer.ranks, layer.dtype, mesh)
        found += [reason for reason in why if reason not in found]
    return tuple(found)


def crosses_nodes(sizes: Any, axes: tuple[str, str | None]) -> bool:
    """Whether ranks that exchange tokens may lie on several nodes.

    Devices are numbered node by node, the last axis of a mesh fastest.
    """
    names = list(sizes)
    cut = [names.index(axis) for axis in axes if axis is not None and sizes[axis] > 1]
    block = math.prod(sizes[name] for name in names[min(cut, default=len(names)) :])
    return block > clique.NODE or clique.NODE % block > 0


def best(
    halves: Mapping[str, Layer], axes: tuple[str, str | None], mesh: AbstractMesh
) -> tuple[Implementation, str]:
    """Returns (what to take for one half or for both, why)."""
    layer, device = next(iter(halves.values())), mesh.abstract_device
    if layer.ranks == 1:
        return "xla", "one rank: nothing travels"
    if device is None or device.platform == "cpu":
        return "xla", "a CPU has nothing to hide"
    if crosses_nodes(mesh.shape, axes):
        return "xla", "experts on several nodes: XLA's collectives"
    if word := measured(halves, axes, mesh):
        return word, overlap.MEASURED
    card = find_card(device.device_kind, "bfloat16")
    if card is None or not device.num_cores:
        return "xla", f"nothing is known of {layer.ranks} x {device.device_kind}"
    times = [simulate(op, half, card, device.num_cores) for op, half in halves.items()]
    plain, ring = sum(found[0] for found in times), sum(found[1] for found in times)
    turns = sum(2 if op == COMBINE else 1 for op in halves)
    counted = ring + turns * layer.ranks * rings.STEP_S  # steps twice, as overlap.py does
    gains = layer.rows >= overlap.ROWS and counted <= overlap.GAIN * plain
    return "ring" if gains else "xla", (
        "simulated, not measured, so only a clear gain counts: forward and backward "
        f"{ring * 1e6:.0f} us as a ring, {plain * 1e6:.0f} us as plain XLA"
    )


def measured(
    halves: Mapping[str, Layer], axes: tuple[str, str | None], mesh: AbstractMesh
) -> Implementation | None:
    """Returns what was the fastest for all of these; None where not all of them were measured.

    Tables are of experts that are whole on a rank.
    """
    if any(half.ranks > half.groups for half in halves.values()):
        return None
    device = mesh.abstract_device
    words = {overlap.measured(op, key(op, layer), device) for op, layer in halves.items()}
    (word,) = words if len(words) == 1 else (None,)
    if word == "fused":
        names = [axis for axis in axes if axis is not None]
        found = [why for op, half in halves.items() for why in fused_reasons(op, half, mesh)]
        return None if found or clique.beside(mesh.shape, names) else word
    return word


def key(op: str, layer: Layer) -> tuned.Key:
    """Returns the key of a table's row, as the kernels look it up (cut experts: `routes.cut`)."""
    hidden = sum(layer.hidden)
    choices = layer.tokens * layer.top * (layer.ranks // layer.groups)
    K, N = (layer.width, hidden) if op == DISPATCH else (hidden, layer.width)
    return fusions.key(op, layer.ranks, choices, layer.experts, K, N)


def simulate(op: str, layer: Layer, card: DeviceCard, cores: int) -> tuple[float, float]:
    """Returns the cost model's seconds of (plain XLA, the ring), for balanced experts."""
    rank = rings.Rank(card, cores, layer.ranks, layer.dtype)
    half = rings.ExpertHalf(
        layer.tokens, layer.top, layer.width, layer.experts, layer.hidden, layer.rows, layer.reached
    )
    return (rings.expert_dispatch if op == DISPATCH else rings.expert_combine)(rank, half)
